"""The end of a run: a plot of its losses, and a sample of text."""

from __future__ import annotations

import contextlib

import jax
from absl import logging
from etils import epath

from diffjax.host.lock import lock
from diffjax.inference.sampler import Sampler
from diffjax.model.variant_styles import style
from diffjax.training import memory
from diffjax.training.metrics import read_log
from diffjax.training.result import TrainResult

_TEMPERATURE = 0.8


def finish(result: TrainResult) -> None:
  """Ends a finished run with a plot of its losses and a sample of text.

  Writes loss.png and sample.txt in the workdir, and prints the sample and the
  names of all files. Does nothing if a signal has stopped the run early.

  All processes must call this, because they share the parameters.

  Args:
    result: the result of `training.loop.train`.

  Raises:
    LostWorkdir: if the workdir is not the directory that the run has locked.
      Nothing is written then.
    UserError: if another run uses the workdir, or if there is not enough
      memory.
  """
  if not result.is_finished:
    return
  with contextlib.ExitStack() as stack:
    stack.enter_context(
      memory.explain_out_of_memory(result.config, result.mesh.shape)
    )
    # Training has released the lock. Raise if the workdir has been deleted or
    # replaced since. `lock` would make or lock another directory.
    result.check_lock()
    if jax.process_index() == 0:
      stack.enter_context(lock(result.workdir))
    text = _generate_sample(result)
    result.check_lock()
    if jax.process_index() == 0:
      _write_files(result, text)
    # If the workdir was deleted meanwhile, so were the files.
    result.check_lock()


def _generate_sample(result: TrainResult) -> str:
  """Returns the config's prompt with the model's continuation.

  Returns "" if the config asks for no sample, or if the prompt is as long as
  the model's context.
  """
  config = result.config
  prompt = result.tokenizer.encode_prompt(config.train.sample_prompt)
  max_tokens = config.model.max_length - len(prompt)
  num_tokens = min(config.train.sample_tokens, max_tokens)
  if num_tokens < 1:
    return ""
  capacity = len(prompt) + num_tokens
  sampler = Sampler(result.model, result.params, capacity=capacity)
  [answer] = sampler.generate([prompt], num_tokens, temperature=_TEMPERATURE)
  continuation = result.tokenizer.decode_after(prompt, answer)
  return config.train.sample_prompt + continuation


def _write_files(result: TrainResult, text: str) -> None:
  """Writes loss.png and sample.txt, and prints the sample and all file names.

  If a file cannot be written, it prints a warning: the trained parameters are
  saved already.

  Args:
    result: the result of a finished run.
    text: the sample. "" for no sample.
  """
  config = result.config
  workdir = epath.Path(result.workdir)
  files = "checkpoints, config.toml, metrics.jsonl, tensorboard, loss.png"
  if text:
    prompt = config.train.sample_prompt
    print(f"\n--- a sample: the model continues {prompt!r} ---\n{text}\n---")
    files += ", sample.txt"
  try:
    plot_losses(
      workdir / "metrics.jsonl", workdir / "loss.png", config.model.attention
    )
    if text:
      (workdir / "sample.txt").write_text(text, encoding="utf-8")
  except OSError as error:
    logging.warning(
      "cannot write the plot and the sample in %s: %s", workdir, error
    )
    return
  print(f"written to {workdir}:\n  {files}")


def plot_losses(
  jsonl: epath.PathLike, png: epath.PathLike, attention: str
) -> None:
  """Writes a picture of a run's training and validation losses by step.

  Args:
    jsonl: the metrics.jsonl of a run.
    png: the picture to write.
    attention: `config.model.attention` of the run.
  """
  # Imported here because it takes a second, and only the end of a run needs it.
  from diffjax.plots.curves import loss_curves

  figure = loss_curves([(style(attention), read_log(jsonl))])
  with epath.Path(png).open("wb") as file:
    figure.savefig(file, format="png", dpi=200)
