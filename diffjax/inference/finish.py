"""The end of a run: the plot of its losses and a sample of text, for its user to look at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from etils import epath

from diffjax.config import Config
from diffjax.data.tokenizer import Tokenizer
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder
from diffjax.model.variant_styles import style
from diffjax.training.metrics import read_log


def finish(
  config: Config,
  workdir: str,
  model: Decoder,
  params: Any,
  tokenizer: Tokenizer,
  check_lock: Callable[[], None],
) -> None:
  """Writes loss.png and sample.txt, and prints the sample and all file names.

  All processes call it.

  Args:
    config: The run's config.
    workdir: The run's directory, local or gs://.
    model: The decoder.
    params: Its parameters.
    tokenizer: The run's.
    check_lock: Raises LostWorkdir if the run may not write in the workdir.
  """
  path = epath.Path(workdir)
  text = _sample(
    config, model, params, tokenizer
  )  # by all processes, since they share the parameters
  check_lock()
  if jax.process_index() != 0:
    return
  files = "checkpoints, config.toml, metrics.jsonl, tensorboard, loss.png"
  if text:
    prompt = config.train.sample_prompt
    print(f"\n--- a sample: the model continues {prompt!r} ---\n{text}\n---")
    files += ", sample.txt"
  try:
    plot_losses(
      path / "metrics.jsonl", path / "loss.png", config.model.attention
    )
    if text:
      (path / "sample.txt").write_text(text, encoding="utf-8")
  except OSError as error:
    logging.warning(
      "cannot write the plot and the sample in %s: %s", path, error
    )
    return
  print(f"written to {path}:\n  {files}")


def _sample(
  config: Config, model: Decoder, params: Any, tokenizer: Tokenizer
) -> str:
  """The config's prompt and how the model continues it; "" if the config asks for no sample, or the prompt leaves no room for one."""
  prompt = tokenizer.encode_prompt(config.train.sample_prompt)
  count = min(config.train.sample_tokens, config.model.max_length - len(prompt))
  if count < 1:
    return ""
  [ids] = Sampler(model, params, capacity=len(prompt) + count).generate(
    [prompt], count, temperature=0.8
  )
  return config.train.sample_prompt + tokenizer.decode_after(prompt, ids)


def plot_losses(
  jsonl: epath.PathLike, png: epath.PathLike, attention: str
) -> None:
  """Draws training and validation loss against steps.

  Args:
    jsonl: A run's metrics.jsonl.
    png: Where to write the picture.
    attention: The run's config.model.attention.
  """
  # Imported here: it takes a second, and only the end of a run needs it.
  from diffjax.plots.curves import loss_curves

  figure = loss_curves([(style(attention), read_log(jsonl))])
  with epath.Path(png).open("wb") as file:
    figure.savefig(file, format="png", dpi=200)
