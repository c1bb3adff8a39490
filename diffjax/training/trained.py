"""A trained model, taken from its workdir to be used: parameters, config and tokenizer, on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from diffjax import absent_tpu
from diffjax.config import Config, UserError, from_config_dict
from diffjax.data.tokenizer import Tokenizer, load_tokenizer
from diffjax.model.decoder import Decoder
from diffjax.training.checkpoint import open_checkpoint
from diffjax.training.program import compute_dtype
from diffjax.training.step import init_params

_NAMED = 3  # parameters that an error names, at most


@dataclasses.dataclass(frozen=True)
class Trained:
  """A model as evaluations, generation and conversion take it.

  Attributes:
    name: what tables call it: its workdir and step.
    config: of the run that trained it.
    model: the decoder, in the compute dtype of the device, attention by the fastest implementation there.
    params: its parameters, float32.
    tokenizer: the one that it was trained with.
  """

  name: str
  config: Config
  model: Decoder
  params: Any
  tokenizer: Tokenizer


def load(workdir: epath.PathLike, step: int | None = None) -> Trained:
  """Loads the newest complete checkpoint, or that of a step.

  Raises:
    UserError: if there is none, it is damaged, its parameters are not finite, or its tokenizer is not at hand.
  """
  absent_tpu.skip()
  saved = open_checkpoint(workdir, step)
  config = from_config_dict(saved.config)
  params = saved.params(jax.eval_shape(lambda: init_params(Decoder(config.model), jax.random.key(0))))
  _check_finite(f"{workdir} at step {saved.step}", params)
  tokenizer = load_tokenizer(_tokenizer_beside(workdir, config.data.tokenizer))
  if tokenizer.vocab_size > config.model.vocab_size:
    raise UserError(
      f"{workdir} was trained with {config.model.vocab_size} tokens, but its tokenizer {tokenizer.spec!r} has {tokenizer.vocab_size}: "
      "it is another one; put the one that it was trained with there"
    )
  model = Decoder(config.model, dtype=compute_dtype(config.model.dtype, jax.local_devices()[0].platform))
  return Trained(f"{workdir} at step {saved.step}", config, model, params, tokenizer)


def _check_finite(name: str, params: Any) -> None:
  """Refuses a model that would write zero bytes and be measured as nothing."""
  finite = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(params)
  wrong = [jax.tree_util.keystr(path, simple=True, separator="/") for path, ok in jax.tree.leaves_with_path(finite) if not ok]
  if wrong:
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise UserError(
      f"{name} has parameters that are not finite: {', '.join(wrong[:_NAMED])}{more}: it has diverged; take an earlier checkpoint "
      "with --step (python -m diffjax.checkpoints lists them)"
    )


def keep_tokenizer(workdir: epath.PathLike, spec: str) -> str:
  """Copies a tokenizer's file into the workdir, where `load` looks for it first; built-in ones need none.

  Returns:
    The spec of the copy.
  """
  if (path := _kept(workdir, spec)) is None:
    return spec
  path.write_bytes(epath.Path(spec).expanduser().read_bytes())
  return str(path)


def _kept(workdir: epath.PathLike, spec: str) -> epath.Path | None:
  suffix = epath.Path(spec).suffix
  return epath.Path(workdir) / f"tokenizer{suffix}" if suffix in (".json", ".tiktoken") else None


def _tokenizer_beside(workdir: epath.PathLike, spec: str) -> str:
  """The copy in the workdir, else where the config says."""
  path = _kept(workdir, spec)
  if path is None or path.exists():
    return spec if path is None else str(path)
  if epath.Path(spec).expanduser().exists():  # a run older than the copies
    return spec
  raise UserError(
    f"there is no tokenizer beside the checkpoint: neither {path} nor {spec}, which it was trained with, is there; put it at {path}"
  )
