"""THE loop. It reads top to bottom, and its order is a contract: restore → (evaluate → save → step → log)*."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from jaxtyping import Int

from diffjax.config import Config, UserError
from diffjax.data.pipeline import ValidationBatches, check_prepared, check_vocabulary, training_batches, training_rows, validation_batches
from diffjax.data.reader import Interrupted
from diffjax.data.tokenizer import Tokenizer, load_tokenizer
from diffjax.evals import trigram, validation
from diffjax.model.decoder import Decoder
from diffjax.model.sampler import Sampler
from diffjax.ops.diff_attention import diff_attention
from diffjax.parallel.mesh import batch_share, make_mesh, put_batch
from diffjax.parallel.processes import Agreement, check_same, gather
from diffjax.progress import say
from diffjax.training import runtime
from diffjax.training.checkpoint import Checkpoints, check_resume, latest_config, load_params
from diffjax.training.lock import lock
from diffjax.training.metrics import Metrics, Progress, plot_losses
from diffjax.training.optimizer import skip_reason
from diffjax.training.step import TrainState, make_eval_step, make_init, make_model, make_train_step
from diffjax.training.trained import keep_tokenizer

# Bytes that the trigram model of a byte-level run is fitted on, at most: all of the embedded corpus, seconds of counting.
_TRIGRAM_TOKENS = 200_000_000


def train(config: Config, workdir: str) -> None:
  """Trains to `config.train.steps`, from the newest checkpoint in `workdir` if there is one.

  SIGTERM and Ctrl-C end it after the step or evaluation in hand, or while it waits for data, with a checkpoint; a second one at once.
  Several processes make the same calls in the same order; a signal to one of them ends all after the same step.

  Raises:
    UserError: for whatever the user can mend: a config that does not fit the devices, the data or the checkpoint; or
      `train.max_skipped_in_a_row` steps in a row whose loss or gradient was not finite or spiked.
  """
  with contextlib.ExitStack() as held:
    _train(config, workdir, held)


def _train(config: Config, workdir: str, held: contextlib.ExitStack) -> None:
  is_first = jax.process_index() == 0
  note = say if is_first else lambda message: None
  check_same({"config": config.to_dict(), "--workdir": workdir, "JAX's version": jax.__version__})
  steps, mesh = config.train.steps, make_mesh(config.mesh)
  share, shares = batch_share(mesh)
  processes = dict(process_index=share, process_count=shares)
  tokenizer = load_tokenizer(config.data.tokenizer)
  check_vocabulary(config, tokenizer)
  token_bytes = tokenizer.token_bytes()
  if (saved := latest_config(workdir)) is not None:
    check_resume(saved, config.to_dict())
  make_state, abstract_state = make_init(config, mesh)
  train_step, eval_step = make_train_step(config, mesh, abstract_state), make_eval_step(config, mesh)
  if jax.process_count() > 1 and config.data.mode == "prepared":
    check_prepared(config.data)  # also if all of them feed the same rows
  with runtime.freed_pages_not_kept():  # or decompressors, freed a minute later, would leave a hole where temporaries lie
    batches = training_batches(config, **processes)
    held.callback(batches.close)
    held_out = validation_batches(config, config.train.batch_size // config.train.accumulation, **processes)
  if is_first:
    held.enter_context(lock(workdir))  # before the first write, after what a wrong config is refused for
  checkpoints = Checkpoints(workdir, keep=config.train.keep_checkpoints)
  if is_first:
    keep_tokenizer(workdir, config.data.tokenizer)
  held.enter_context(checkpoints)  # closed before the lock goes, however the run ends

  # Restore.
  if (restored := checkpoints.restore(abstract_state)) is not None:
    state = restored.state
    batches.set_state(_own(restored.data_state, share))
    note(f"resuming from step {restored.step} of {workdir}")
  else:
    state = make_state()
    if config.train.init_from:
      state = dataclasses.replace(state, params=load_params(config.train.init_from, abstract_state.params))
      note(f"starting from the parameters of {config.train.init_from}")
  step = first = int(state.step)
  metrics = Metrics(workdir, config.to_dict(), resume_step=first, wandb_project=config.train.wandb_project, is_writer=is_first)
  held.callback(metrics.close)
  progress = Progress(config, first_step=first, num_devices=mesh.size, device_kind=mesh.devices.flat[0].device_kind)
  held.callback(progress.close)
  profile = _Profiler(config, workdir)
  pending: tuple[int, dict[str, jax.Array]] | None = None

  def log_pending() -> None:
    nonlocal pending
    if pending is None:
      return
    (number, results), pending = pending, None
    in_a_row = int(jax.device_get(results["skipped_in_a_row"]))
    reporting = number % config.train.log_interval == 0 or number == steps
    if in_a_row or reporting:
      measured = jax.device_get(results)
      values = _by_layer(measured)
      metrics.write(number, progress.report(number, values) if reporting else values)
    if in_a_row:
      reason = skip_reason(measured)
      note(f"step {number} is skipped, {in_a_row} in a row: {reason}")
      if 0 < config.train.max_skipped_in_a_row <= in_a_row:
        good = checkpoints.newest(before=number - in_a_row + 1)
        if good is None:  # one saved among the skipped steps is as good: they change no parameter
          good = checkpoints.newest()
        raise UserError(_too_many_skipped(workdir, number, in_a_row, reason, good))

  def save(scores: dict[str, float]) -> None:
    places = dict(gather([share, batches.get_state()]))  # in a stream every process has a place of its own
    data_state = {"shares": [places[share] for share in sorted(places)]}
    checkpoints.save(step, state, data_state=data_state, config=config.to_dict(), metrics=scores)

  with Interruption() as interrupted:
    stopping = Agreement(mesh, interrupted)
    if jax.process_count() == 1:  # one of several alone cannot call off a wait: the others may be in the next step, waiting for it
      batches.interrupted = interrupted
    while True:
      done = step >= steps
      ending = done or stopping()
      fresh = step > first  # what was restored has been evaluated and saved
      evaluating = fresh and bool(config.eval.interval) and (done or step % config.eval.interval == 0)
      saving = fresh and (ending or step % config.train.checkpoint_interval == 0)
      profile(step, ending)
      if evaluating or saving:
        log_pending()  # before the checkpoint, so that no line of a step it holds can be lost

      # Evaluate.
      scores = {}
      if evaluating:
        losses = validation.losses(eval_step, state.params, held_out, token_bytes=token_bytes, ngram=config.eval.ngram)
        scores = {f"validation/{name}": value for name, value in losses}
        if done and jax.process_count() == 1 and config.data.mode == "prepared" and config.data.tokenizer == "bytes":
          scores["validation/trigram_bits_per_byte"] = _trigram_bits_per_byte(config, held_out, token_bytes)
        metrics.write(step, scores)
        progress.note(step, scores)

      # Save.
      if saving:
        save(scores)
      if ending:
        break

      # Step.
      asked = time.perf_counter()
      try:
        batch = put_batch(next(batches), mesh)
      except Interrupted:
        if fresh:
          log_pending()
          save(scores)
        break
      waited = time.perf_counter() - asked
      stopping.ask()
      state, measured = train_step(state, batch)
      step += 1

      # Log: the metrics of the step before, so that the device has its next step already.
      progress.stepped(step, waited)
      log_pending()
      pending = step, measured

    batches.close()
    checkpoints.wait()

  progress.close()
  if step < steps:
    note(f"stopped at step {step} of {steps}{', saved' * fresh}; run the same command to go on")
  else:
    _finish(config, workdir, make_model(config, mesh), state, tokenizer, scores)


def _own(data_state: dict[str, Any], share: int) -> dict[str, Any]:
  """The state of the data of the processes with one share of the batch. Of fewer shares any will do: it is refused where they matter."""
  shares = data_state.get("shares", [data_state])  # an older checkpoint has one for all
  return shares[min(share, len(shares) - 1)]


class Interruption:
  """SIGTERM or Ctrl-C, asked for by calling it. The second one ends the process at once.

  Python runs a signal's handler only between two of its own instructions, and two signals during a compilation as one. So a thread reads
  them too, from the pipe that they are written to as they come.
  """

  def __enter__(self) -> Interruption:
    self._received = False
    self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    self._reading, self._writing = os.pipe()
    os.set_blocking(self._writing, False)
    self._previous_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
    self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *_: Any) -> None:
    signal.set_wakeup_fd(self._previous_pipe)
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    os.write(self._writing, b"\0")
    self._thread.join()
    os.close(self._reading)
    os.close(self._writing)

  def __call__(self) -> bool:
    return self._received

  def _receive(self, *_: Any) -> None:
    self._received = True

  def _watch(self) -> None:
    said = False
    while number := os.read(self._reading, 1)[0]:
      if number in self._previous:  # else another signal that has a handler
        if said:
          if os.isatty(1):
            os.write(1, b"\x1b[?25h\n")  # the cursor, which the live line hides
          os._exit(128 + number)
        self._received = said = True
        say(f"{signal.Signals(number).name}: saving after this step (once more to stop at once)")


def _by_layer(measured: dict[str, Any]) -> dict[str, float]:
  """A step's metrics by the names they are logged under, λ by layer."""
  values: dict[str, float] = {}
  for name, value in measured.items():
    if name == "lambda":
      values |= {f"lambda/layer_{layer:02d}": float(lam) for layer, lam in enumerate(value)}
    else:
      values[f"train/{name}"] = float(value)
  return values


def _too_many_skipped(workdir: str, step: int, in_a_row: int, reason: str, good: int | None) -> str:
  checkpoint = (
    f"the last good checkpoint is {epath.Path(workdir) / 'checkpoints' / str(good)}" if good is not None else "there is no checkpoint"
  )
  return (
    f"stopped at step {step}: {in_a_row} steps in a row were skipped (config.train.max_skipped_in_a_row), the last one because "
    f"{reason}; {checkpoint}. Lower config.optimizer.learning_rate or change config.data.seed, "
    + (f"with --workdir=NEW --config.train.init_from={workdir}; " if good is not None else "with --workdir=NEW; ")
    + "if the loss has only moved to another level, go on with config.optimizer.spike_sigmas raised, or 0"
  )


class _Profiler:
  """Traces the steps of the config's window into workdir/profile."""

  def __init__(self, config: Config, workdir: str):
    first, count = config.train.profile_step, config.train.profile_steps
    self._window = range(first, first + count) if first >= 0 else range(0)
    self._directory, self._running = str(epath.Path(workdir) / "profile"), False

  def __call__(self, step: int, ending: bool) -> None:
    """Call it between steps, with the number of steps done."""
    wanted = step in self._window and not ending
    if wanted and not self._running:
      jax.profiler.start_trace(self._directory)
    elif self._running and not wanted:
      jax.profiler.stop_trace()
    self._running = wanted


def _trigram_bits_per_byte(config: Config, held_out: ValidationBatches, token_bytes: Int[np.ndarray, "N"]) -> float:
  """What a byte trigram model fitted on the same training split reaches: a trained model has to beat it."""
  rows = 1024
  batches = itertools.islice(training_rows(config, rows), max(1, _TRIGRAM_TOKENS // (rows * config.data.length)))
  return trigram.fit(batches).bits_per_byte(held_out, token_bytes)


def _finish(config: Config, workdir: str, model: Decoder, state: TrainState, tokenizer: Tokenizer, scores: dict[str, float]) -> None:
  """What a user looks at first: the losses, their plot and a sample of text."""
  path, text = epath.Path(workdir), ""
  if config.train.sample_tokens:  # by all processes, since they share the parameters
    prompt = [tokenizer.separator, *map(int, tokenizer.encode(config.train.sample_prompt))]
    room = config.model.max_length - len(prompt)
    if room > 0:
      count = min(config.train.sample_tokens, room)
      alone = model.clone(attention_fn=diff_attention)  # a single row needs no sharded attention
      sampler = Sampler(alone, state.params, capacity=len(prompt) + count)
      [ids] = sampler.generate([prompt], count, temperature=0.8)
      text = config.train.sample_prompt + tokenizer.decode(ids)
  if jax.process_index() == 0:
    try:
      plot_losses(path / "metrics.jsonl", path / "loss.png")
      if text:
        (path / "sample.txt").write_text(text)
    except (OSError, ValueError) as error:  # ValueError: a line of which a full disk took a part
      logging.warning("cannot write the plot and the sample in %s: %s", path, error)
    if text:
      print(f"\n--- a sample ---\n{text}\n---")
    for name, value in scores.items():
      print(f"{name} {value:.4f}")
    print(f"{path}: checkpoints, metrics.jsonl, TensorBoard files, loss.png{', sample.txt' * bool(text)}")
