"""THE loop. It reads top to bottom, and its order is a contract: restore → (evaluate → save → step → log)*."""

from __future__ import annotations

import dataclasses
import functools
import signal
import time
from typing import Any

import jax
from absl import logging
from etils import epath

from diffjax.config import Config
from diffjax.data.pipeline import check_vocabulary, training_batches, validation_batches
from diffjax.data.tokenizer import Tokenizer, load_tokenizer
from diffjax.evals import validation
from diffjax.evals.sample import sample
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention import diff_attention
from diffjax.parallel.mesh import make_mesh
from diffjax.training.checkpoint import Checkpoints, check_resume, latest_config, load_params
from diffjax.training.metrics import Metrics, Progress, plot_losses
from diffjax.training.step import TrainState, make_eval_step, make_init, make_model, make_train_step, put_batch


def train(config: Config, workdir: str) -> None:
  """Trains to `config.train.steps`, from the newest checkpoint in `workdir` if there is one.

  SIGTERM and Ctrl-C end it after the step in hand, with a checkpoint; a second one ends it at once.

  Raises:
    UserError: for whatever the user can mend: a config that does not fit the devices, the data or the checkpoint.
  """
  steps, processes = config.train.steps, dict(process_index=jax.process_index(), process_count=jax.process_count())
  mesh = make_mesh(config.mesh)
  tokenizer = load_tokenizer(config.data.tokenizer)
  check_vocabulary(config, tokenizer)
  token_bytes = tokenizer.token_bytes()
  if (saved := latest_config(workdir)) is not None:
    check_resume(saved, config.to_dict())
  make_state, abstract_state = make_init(config, mesh)
  train_step, eval_step = make_train_step(config, mesh, abstract_state), make_eval_step(config, mesh)
  batches = training_batches(config, **processes)
  held_out = validation_batches(config, config.train.batch_size // config.train.accumulation, **processes)
  checkpoints = Checkpoints(workdir, keep=config.train.keep_checkpoints)

  # Restore.
  if (restored := checkpoints.restore(abstract_state)) is not None:
    state = restored.state
    batches.set_state(restored.data_state)
    logging.info("resuming from step %d of %s", restored.step, workdir)
  else:
    state = make_state()
    if config.train.init_from:
      state = dataclasses.replace(state, params=load_params(config.train.init_from, abstract_state.params))
      logging.info("parameters from %s", config.train.init_from)
  step = first = int(state.step)
  metrics = Metrics(
    workdir, config.to_dict(), resume_step=first, wandb_project=config.train.wandb_project, is_writer=jax.process_index() == 0
  )
  progress = Progress(config, first_step=first, num_devices=mesh.size, device_kind=mesh.devices.flat[0].device_kind)
  pending: tuple[int, dict[str, jax.Array]] | None = None

  def log_pending() -> None:
    nonlocal pending
    if pending is not None:
      number, results = pending
      metrics.write(number, progress.report(number, _fetch(results)))
      pending = None

  with Interruption() as interrupted:
    while True:
      done = step >= steps
      ending = done or interrupted()
      fresh = step > first  # what was restored has been evaluated and saved
      evaluating = fresh and bool(config.eval.interval) and (done or step % config.eval.interval == 0)
      saving = fresh and (ending or step % config.train.checkpoint_interval == 0)
      if evaluating or saving:
        log_pending()  # before the checkpoint, so that no line of a step it holds can be lost

      # Evaluate.
      scores = {}
      if evaluating:
        losses = validation.evaluate(eval_step, state.params, held_out, token_bytes=token_bytes, ngram=config.eval.ngram)
        scores = {f"validation/{name}": value for name, value in losses}
        metrics.write(step, scores)
        progress.note(step, scores)

      # Save.
      if saving:
        checkpoints.save(step, state, data_state=batches.get_state(), config=config.to_dict(), metrics=scores)
      if ending:
        break

      # Step.
      _profile(config, step, workdir)
      asked = time.perf_counter()
      batch = put_batch(next(batches), mesh)
      waited = time.perf_counter() - asked
      state, measured = train_step(state, batch)
      step += 1

      # Log: the metrics of the step before, so that the device has its next step already.
      progress.stepped(step, waited)
      log_pending()
      if step % config.train.log_interval == 0 or step == steps:
        pending = step, measured

  checkpoints.close()
  metrics.close()
  progress.close()
  if step < steps:
    logging.info("stopped at step %d of %d, saved; run the same command to go on", step, steps)
  else:
    _finish(config, workdir, make_model(config, mesh), state, tokenizer)


class Interruption:
  """SIGTERM or Ctrl-C, asked for by calling it. The second one acts as if this were not here."""

  def __enter__(self) -> Interruption:
    self._received = False
    self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    return self

  def __exit__(self, *_: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def __call__(self) -> bool:
    return self._received

  def _receive(self, number: int, _: Any) -> None:
    self._received = True
    self.__exit__()
    logging.warning("%s: saving after this step (once more to stop at once)", signal.Signals(number).name)


def _fetch(measured: dict[str, jax.Array]) -> dict[str, float]:
  """A step's metrics on the host, λ by layer."""
  values: dict[str, float] = {}
  for name, value in jax.device_get(measured).items():
    if name == "lambda":
      values |= {f"lambda/layer_{layer:02d}": float(lam) for layer, lam in enumerate(value)}
    else:
      values[f"train/{name}"] = float(value)
  return values


def _profile(config: Config, step: int, workdir: str) -> None:
  """Starts or stops the profiler at the edges of its window."""
  window = config.train.profile_step
  if step == window:
    jax.profiler.start_trace(str(epath.Path(workdir) / "profile"))
  elif window >= 0 and step == window + config.train.profile_steps:
    jax.profiler.stop_trace()


def _finish(config: Config, workdir: str, model: Decoder, state: TrainState, tokenizer: Tokenizer) -> None:
  """What a user looks at first: the plot of the loss and a sample of text."""
  path, text = epath.Path(workdir), ""
  if config.train.sample_tokens:  # by all processes, since they share the parameters; a single row needs no sharded attention
    alone = model.clone(attention_fn=functools.partial(diff_attention, implementation=config.model.attention_implementation))
    prompt = [tokenizer.separator, *tokenizer.encode(config.train.sample_prompt)]
    ids = sample(alone, state.params, prompt, num_tokens=config.train.sample_tokens, length=config.data.length)
    text = config.train.sample_prompt + tokenizer.decode(ids)
  if jax.process_index() == 0:
    plot_losses(path / "metrics.jsonl", path / "loss.png")
    if text:
      (path / "sample.txt").write_text(text)
      print(f"\n--- a sample ---\n{text}\n---")
    print(f"{path}: checkpoints, metrics.jsonl, TensorBoard files, loss.png, sample.txt")
