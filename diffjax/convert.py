"""Converts a model between diffjax's workdirs and other layouts.

    python -m diffjax.convert --from=diffjax:runs/tiny --to=diffllama:exported
    python -m diffjax.convert --from=diffllama:model --to=diffjax:runs/model
    python -m diffjax.convert --from=llama:model --to=diffjax:runs/v2
    python -m diffjax.convert --from=llama:a --to=diffjax:b --attention=dex

The layouts are:

    diffjax    a workdir; its newest checkpoint is read
    diffllama  Hugging Face's DiffLlama
    llama      Hugging Face's Llama; can only be read
    unilm      the authors' layers, DIFF V1 and DIFF V2
    motif      Motif-2.6B and Motif-2-12.7B

The modules of diffjax/interop/ describe them. All but diffjax are directories
with config.json, safetensors files and the model's tokenizer.json. A model that
--to cannot represent is an error.

A llama becomes a DIFF V2 model with the same logits. With --attention, a
Transformer becomes a DIFF V2 or DEX model with the same logits (see
interop/adapt.py). Prints the tokens that begin and end a document, which the
published model names. Writes a README.md with the model's config, data and
measurements next to the model.
"""

from __future__ import annotations

if __name__ == "__main__":
  # This comes before the slow imports, so that Ctrl-C also ends the command
  # during them.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import dataclasses
import importlib
import os
import types
from typing import NamedTuple

import jax
from absl import app, flags

from diffjax.cli import command
from diffjax.config import OF_THE_RUN, Config, UserError
from diffjax.host.files import is_remote
from diffjax.interop.adapt import ATTENTIONS, adapted
from diffjax.interop.card import write_card
from diffjax.interop.layout import Model
from diffjax.interop.tokenizer import token_names
from diffjax.model.registry import imported_modules
from diffjax.training import manifest

# The layouts, and their modules in diffjax/interop.
_MODULES = {
  "diffjax": "workdir",
  "diffllama": "diffllama",
  "unilm": "unilm",
  "llama": "llama",
  "motif": "motif",
}
_FROM = flags.DEFINE_string(
  "from",
  None,
  "LAYOUT:PATH of the model.",
)
_TO = flags.DEFINE_string(
  "to",
  None,
  "LAYOUT:PATH to write it to: a directory that does not exist or is empty.",
)
_ATTENTION = flags.DEFINE_enum(
  "attention",
  None,
  list(ATTENTIONS),
  "What a Transformer becomes; for a llama, diff_v2 by default.",
)
_NUM_NOISE_HEADS = flags.DEFINE_integer(
  "num_noise_heads",
  None,
  "With diff_v2, noise maps that heads share; one for each head by default.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  "float32",
  ["float32", "bfloat16"],
  "Type of the written tensors; a workdir's are always float32.",
)


class _Location(NamedTuple):
  """The value of --from or --to.

  Attributes:
    layout: The name of the layout, such as "llama".
    path: The directory. A workdir may be gs://.
  """

  layout: str
  path: str


def main() -> None:
  """Reads the model of --from, converts it, and writes it to --to."""
  source = _parse_location("from", _FROM.value)
  target = _parse_location("to", _TO.value)
  _check_flags(target)
  _check_empty(target.path)
  _use_cpu()

  model = _module(source.layout).read(source.path)
  model = _adapt_attention(model, source.layout)
  run_config = _write_model(target, model)
  write_card(
    target.path,
    model,
    layout=target.layout,
    dtype=_DTYPE.value,
    source_layout=source.layout,
    source_path=source.path,
  )

  _print_summary(target.path, model)
  if run_config is not None:
    print(
      "to continue training from it:"
      f" --config.train.init_from={target.path} {_start_flags(run_config)}"
    )


def _adapt_attention(model: Model, source_layout: str) -> Model:
  """Returns the model with the attention of --attention.

  Without the flag, a model of the layout llama gets diff_v2, and others stay as
  they are.
  """
  attention = _ATTENTION.value
  if attention is None and source_layout == "llama":
    attention = "diff_v2"
  if attention is None:
    return model
  return adapted(model, attention, _NUM_NOISE_HEADS.value)


def _write_model(target: _Location, model: Model) -> Config | None:
  """Writes a model in the layout of --to.

  Returns:
    The config of the written workdir. None for other layouts, from which
    training cannot start.
  """
  if target.layout == "diffjax":
    return _module("diffjax").write(target.path, model)
  _module(target.layout).write(target.path, model, _DTYPE.value)
  return None


def _parse_location(flag: str, value: str | None) -> _Location:
  """Parses the value of --from or --to, such as "llama:models/a".

  Args:
    flag: The name of the flag, for messages.
    value: LAYOUT:PATH, or None if the flag was not passed.

  Raises:
    app.UsageError: if the value is missing or wrong.
  """
  layout, _, path = (value or "").partition(":")
  if layout not in _MODULES or not path:
    message = f"pass --{flag}=LAYOUT:PATH, LAYOUT one of {', '.join(_MODULES)}"
    if value:
      message += f"; got {value!r}"
    raise app.UsageError(message)
  if is_remote(path) and layout != "diffjax":
    raise app.UsageError(
      f"--{flag}={value}: only workdirs may be gs://; copy the files to a local"
      " disk"
    )
  return _Location(layout, os.path.expanduser(path))


def _check_flags(target: _Location) -> None:
  """Raises app.UsageError if the flags contradict each other."""
  if target.layout == "llama":
    raise app.UsageError(
      "--to=llama: this layout can only be read, because Llama has no DIFF"
      " attention"
    )
  if target.layout == "diffjax" and _DTYPE.value != "float32":
    raise app.UsageError(
      f"--dtype={_DTYPE.value}: a workdir's parameters are always float32"
    )
  if _NUM_NOISE_HEADS.value is not None and _ATTENTION.value is None:
    raise app.UsageError(
      f"--num_noise_heads={_NUM_NOISE_HEADS.value}: pass --attention=diff_v2"
      " with it"
    )


def _check_empty(path: str) -> None:
  """Raises UserError if --to exists and is not an empty directory."""
  # An absolute path, or gs://. Raises UserError if gs:// is not available.
  target = manifest.checkpoint_directory(path).parent
  try:
    if not target.exists():
      return
    is_empty_directory = target.is_dir() and not any(target.iterdir())
  except OSError as error:
    raise UserError(
      f"--to: cannot look at {path}: {error.strerror or error}"
    ) from error
  if not is_empty_directory:
    raise UserError(
      f"--to: {path} exists and is not an empty directory; choose another one,"
      " or delete it"
    )


def _use_cpu() -> None:
  """Makes JAX use only the CPU.

  A conversion needs no accelerator, and another process may be using it.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  # JAX reads the variable only when it is imported, so before this.
  jax.config.update("jax_platforms", "cpu")


def _module(layout: str) -> types.ModuleType:
  """Returns the module of diffjax.interop that reads and writes a layout."""
  return importlib.import_module(f"diffjax.interop.{_MODULES[layout]}")


def _print_summary(path: str, model: Model) -> None:
  """Prints the sizes of a written model, and the tokens around documents."""
  config = model.config
  vocabulary = f"vocabulary {config.vocab_size}"
  if model.tokenizer.vocab_size != config.vocab_size:
    vocabulary += f" (its tokenizer has {model.tokenizer.vocab_size})"
  print(
    f"{path}: {config.attention}, {config.num_layers} layers of width"
    f" {config.embed_dim}, {vocabulary}"
  )
  tokens = model.tokenizer.document_tokens
  start = token_names(model.tokenizer, tokens.start)
  end = token_names(model.tokenizer, tokens.end)
  stop = token_names(model.tokenizer, tokens.stop)
  print(
    f"documents: {' '.join([*start, 'TEXT', *end])}; generation stops at"
    f" {' or '.join(stop)}"
  )


def _start_flags(config: Config) -> str:
  """Returns the flags of diffjax.train for the same model and tokenizer.

  They include --import for attention variants outside diffjax.

  Example: "--config.data.tokenizer=runs/v2/tokenizer.json
    --config.model.vocab_size=32000 …"

  Args:
    config: The config of the workdir that training starts from.
  """
  start_flags = []
  for module in imported_modules():
    start_flags.append(f"--import={module}")
  start_flags.append(f"--config.data.tokenizer={config.data.tokenizer}")
  for name, value in dataclasses.asdict(config.model).items():
    if name not in OF_THE_RUN and value is not None:
      start_flags.append(f"--config.model.{name}={value}")
  return " ".join(start_flags)


if __name__ == "__main__":
  command.run(main, with_config=False)
