"""Converts a model between diffjax's workdirs and other layouts.

    python -m diffjax.convert --from=diffjax:runs/tiny --to=diffllama:exported    # for transformers
    python -m diffjax.convert --from=diffllama:downloaded --to=diffjax:runs/diffllama
    python -m diffjax.convert --from=llama:downloaded --to=diffjax:runs/v2    # as DIFF V2
    python -m diffjax.convert --from=llama:downloaded --to=diffjax:runs/dex --attention=dex
    python -m diffjax.convert --from=motif:downloaded --to=diffjax:runs/motif

The layouts are described in diffjax/interop/: diffjax, a workdir, of which the newest checkpoint is read; diffllama, Hugging Face's; unilm,
the authors' layers, V1 and V2; llama, Hugging Face's, which is only read; motif, Motif-2.6B and Motif-2-12.7B. All but workdirs are
directories with config.json, safetensors files and a tokenizer.json with the same ids as the model's tokenizer. A model that a layout
cannot hold is an error. By --attention a Transformer, from llama or a workdir, becomes a DIFF V2 or DEX model of the same logits
(interop/adapt.py). README.md is written beside the model: its config, its data and what was measured of it.

The tokens that begin and end a document are those of the published model. They are printed, and stored beside the tokenizer.
"""

if __name__ == "__main__":
  # Before the other imports, which take a while: Ctrl-C ends them too.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import dataclasses
import importlib
import os
import sys

from absl import app, flags

from diffjax.cli import command
from diffjax.config import OF_THE_RUN, Config, UserError
from diffjax.evals.report import card
from diffjax.interop.layout import Model
from diffjax.interop.tokenizer import token_names
from diffjax.model.registry import imported_modules
from diffjax.training import manifest

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
  f"LAYOUT:PATH of the model; a layout is one of {', '.join(_MODULES)}.",
)
_TO = flags.DEFINE_string(
  "to",
  None,
  "LAYOUT:PATH to write it to: a directory that does not exist or is empty.",
)
_ATTENTION = flags.DEFINE_enum(
  "attention",
  None,
  ["softmax", "diff_v2", "dex"],
  "What a Transformer becomes; by default a llama becomes diff_v2, and all else stays.",
)
_NUM_NOISE_HEADS = flags.DEFINE_integer(
  "num_noise_heads",
  None,
  "Of diff_v2, noise maps that its heads share; by default one a head.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  "float32",
  ["float32", "bfloat16"],
  "Type of the written tensors; a workdir's are always float32.",
)


def main() -> None:
  """Reads the model of --from and writes it to --to."""
  (source, source_path), (target, target_path) = (
    _parse("from", _FROM.value),
    _parse("to", _TO.value),
  )
  if target == "llama":
    raise app.UsageError(
      "--to=llama: that layout is only read: it has no DIFF attention"
    )
  if target == "diffjax" and _DTYPE.value != "float32":
    raise app.UsageError(
      f"--dtype={_DTYPE.value}: a workdir's parameters are always float32"
    )
  if _NUM_NOISE_HEADS.value is not None and _ATTENTION.value is None:
    raise app.UsageError(
      f"--num_noise_heads={_NUM_NOISE_HEADS.value}: pass --attention=diff_v2 with it"
    )
  _check_empty(target_path)
  # Nothing is computed, and another process may use the accelerator.
  os.environ["JAX_PLATFORMS"] = "cpu"
  if "jax" in sys.modules:  # by a module of --import
    sys.modules["jax"].config.update("jax_platforms", "cpu")
  model = _module(source).read(source_path)
  if (
    attention := _ATTENTION.value or ("diff_v2" if source == "llama" else None)
  ) is not None:
    model = importlib.import_module("diffjax.interop.adapt").adapted(
      model, attention, _NUM_NOISE_HEADS.value
    )
  if target == "diffjax":
    start = _flags(_module(target).write(target_path, model))
  else:
    _module(target).write(target_path, model, _DTYPE.value)
    start = ""
  card.write(
    target_path,
    target,
    model.config,
    model.params,
    _DTYPE.value,
    f"{source}:{source_path}",
    model.tokenizer,
  )
  _print_summary(target_path, model)
  if start:
    print(
      "to continue training from it:"
      f" --config.train.init_from={target_path} {start}"
    )


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


def _parse(flag: str, value: str | None) -> tuple[str, str]:
  layout, _, path = (value or "").partition(":")
  if layout not in _MODULES or not path:
    got = f"; got {value!r}" if value else ""
    raise app.UsageError(
      f"pass --{flag}=LAYOUT:PATH, LAYOUT one of {', '.join(_MODULES)}{got}"
    )
  if "://" in path and layout != "diffjax":
    raise app.UsageError(
      f"--{flag}={value}: only workdirs may be gs://; copy the files to a local disk"
    )
  return layout, os.path.expanduser(path)


def _check_empty(path: str) -> None:
  target = manifest.checkpoint_directory(path).parent
  try:
    free = not target.exists() or target.is_dir() and not any(target.iterdir())
  except OSError as error:
    raise UserError(
      f"--to: cannot look at {path}: {error.strerror or error}"
    ) from error
  if not free:
    raise UserError(
      f"--to: {path} exists and is not an empty directory; choose another one, or delete it"
    )


def _module(layout: str):
  return importlib.import_module(f"diffjax.interop.{_MODULES[layout]}")


def _flags(config: Config) -> str:
  """The flags of diffjax.train, beside a config file and a workdir, to start from a workdir that was written here."""
  model = {
    name: value
    for name, value in dataclasses.asdict(config.model).items()
    if name not in OF_THE_RUN and value is not None
  }
  return " ".join(
    [
      *(f"--import={module}" for module in imported_modules()),
      f"--config.data.tokenizer={config.data.tokenizer}",
      *(f"--config.model.{name}={value}" for name, value in model.items()),
    ]
  )


if __name__ == "__main__":
  command.run(main, with_config=False)
