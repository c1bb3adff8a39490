"""A trained model, taken from its workdir to be used: parameters, config and tokenizer, on one device or split over several."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from diffjax.config import (
  Config,
  MeshConfig,
  ModelConfig,
  UserError,
  from_config_dict,
)
from diffjax.data.tokenizer import (
  Tokenizer,
)
from diffjax.host import absent_tpu
from diffjax.host.progress import say
from diffjax.int8 import quantise
from diffjax.model.decoder import Decoder
from diffjax.model.registry import import_modules
from diffjax.ops.diff_attention import diff_attention, implementations
from diffjax.parallel.mesh import make_mesh, sharded_attention
from diffjax.parallel.rules import shardings
from diffjax.training.checkpoint import open_checkpoint
from diffjax.training.program import compute_dtype
from diffjax.training.step import init_params
from diffjax.training.workdir_tokenizer import load_workdir_tokenizer

_NAMED = 3  # parameters that an error names, at most


@dataclasses.dataclass(frozen=True)
class Trained:
  """A model as evaluations, generation and conversion take it.

  Attributes:
    name: what tables call it: its workdir and step.
    config: of the run that trained it.
    model: the decoder, in the compute dtype of the device. Attention runs by the config's implementation, or by "auto" if it cannot run here.
    params: its parameters, float32 or the matrices in int8; on a mesh if several devices share them.
    tokenizer: the one that it was trained with.
  """

  name: str
  config: Config
  model: Decoder
  params: Any
  tokenizer: Tokenizer

  @property
  def short_name(self) -> str:
    """The name without the directories above the workdir."""
    return self.name.rpartition("/")[2]


def load(
  workdir: epath.PathLike,
  step: int | None = None,
  *,
  tensor: int = 1,
  weight_dtype: str | None = None,
  imports: Iterable[str] = (),
) -> Trained:
  """Loads the newest complete checkpoint, or that of a step.

  Args:
    workdir: the run's directory, local or gs://.
    step: the checkpoint's; None for the newest complete one.
    tensor: devices that share the model, as `config.mesh.tensor` has them in training: each reads its own part of the parameters. What
      takes the model (`Sampler`, evaluations) then runs on all of them.
    weight_dtype: "int8" rounds the layers' matrices to 8 bits, a quarter of their memory (`diffjax.int8`); None leaves them in float32.
    imports: modules to import first, which register the attention variant of
      the model. A checkpoint stores only its name.

  Raises:
    UserError: if there is none, it is damaged, its parameters are not finite, its tokenizer is not at hand, or so many devices cannot share
      it; or qwix is not there, which int8 needs. Also if a module cannot be
      imported, or no module has registered the model's attention.
  """
  absent_tpu.skip()
  import_modules(imports)
  if weight_dtype not in (None, "int8"):
    raise UserError(
      f"weight_dtype = {weight_dtype!r}: must be 'int8', or None for float32"
    )
  saved = open_checkpoint(workdir, step)
  config = from_config_dict(saved.config)
  shapes = jax.eval_shape(
    lambda: init_params(Decoder(config.model), jax.random.key(0))
  )
  implementation = _choose_implementation(workdir, config)
  attention: Callable[..., jax.Array] = diff_attention
  if implementation != "auto":
    attention = functools.partial(diff_attention, implementation=implementation)
  if tensor != 1:
    _check_shares(config.model, tensor)
    mesh = make_mesh(
      MeshConfig(data=1, tensor=tensor), jax.local_devices()[:tensor]
    )
    attention = sharded_attention(mesh, implementation)
    shapes = jax.tree.map(
      lambda leaf, at: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=at
      ),
      shapes,
      shardings(shapes, mesh),
    )
  params = saved.params(shapes)
  name = f"{os.fspath(workdir).rstrip('/')} at step {saved.step}"
  _check_finite(
    name,
    jax.jit(
      lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree)
    )(params),
  )
  if weight_dtype is not None:
    name, params = f"{name}, weights in int8", quantise(params)
  tokenizer = load_workdir_tokenizer(workdir, config)
  model = Decoder(
    config.model, dtype=_local_dtype(config.model), attention_fn=attention
  )
  return Trained(name, config, model, params, tokenizer)


def load_piecewise(
  workdir: epath.PathLike, room: Callable[[tuple[int, ...]], np.ndarray]
) -> tuple[Config, dict[str, Any], Tokenizer]:
  """The newest complete checkpoint's config, parameters and tokenizer, where the parameters need not fit the memory.

  Args:
    workdir: the run's directory, local or gs://.
    room: makes an array of a shape, which a parameter is copied into.

  Raises:
    UserError: as `load`.
  """
  saved = open_checkpoint(workdir)
  config = from_config_dict(saved.config)
  params = saved.copied_params(
    jax.eval_shape(
      lambda: init_params(Decoder(config.model), jax.random.key(0))
    ),
    room,
  )
  _check_finite(
    f"{workdir} at step {saved.step}",
    jax.tree.map(
      lambda leaf: all(np.isfinite(part).all() for part in leaf), params
    ),
  )
  return config, params, load_workdir_tokenizer(workdir, config)


def _choose_implementation(workdir: epath.PathLike, config: Config) -> str:
  """Returns the implementation of attention to use.

  It is the one that the config names. A model may be used on other devices than
  those that trained it: if it cannot run here, prints why and returns "auto".
  """
  name = config.model.attention_implementation
  if name == "auto":
    return name
  problem = _why_not_here(config, name)
  if problem is None:
    return name
  say(
    f"{workdir} names config.model.attention_implementation = {name!r}, which"
    f" cannot run here ({problem}); 'auto' is used instead"
  )
  return "auto"


def _why_not_here(config: Config, name: str) -> str | None:
  """Returns why an implementation of attention cannot run the model here."""
  if name not in implementations.names():
    return (
      "no implementation of that name is registered; --import=MODULE imports one"
      " of your own"
    )
  model = Decoder(
    config.model,
    dtype=_local_dtype(config.model),
    attention_fn=functools.partial(diff_attention, implementation=name),
  )
  tokens = jax.ShapeDtypeStruct((1, config.data.length), jnp.int32)
  try:
    # Tracing asks the implementation whether it takes the arrays.
    jax.eval_shape(model.init, jax.random.key(0), tokens)
  except ValueError as error:
    return str(error)
  return None


def _local_dtype(config: ModelConfig) -> Any:
  """Returns the compute dtype of a model on this process's devices."""
  return compute_dtype(config.dtype, jax.local_devices()[0].platform)


def _check_shares(config: ModelConfig, tensor: int) -> None:
  """Refuses a number of devices that cannot share heads, feed-forward columns and vocabulary."""
  sizes = {
    name: getattr(config, name)
    for name in ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
  }
  here, divisor = len(jax.local_devices()), math.gcd(*sizes.values())
  if tensor not in (
    possible := [count for count in range(1, here + 1) if divisor % count == 0]
  ):
    raise UserError(
      f"tensor = {tensor}: must be at most the {here} devices here and divide the model's "
      f"{', '.join(f'{name} = {size}' for name, size in sizes.items())}; it can be {', '.join(map(str, possible))}"
    )


def _check_finite(name: str, finite: Any) -> None:
  """Refuses a model that would write zero bytes and be measured as nothing. `finite` says of each parameter whether it is."""
  wrong = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, ok in jax.tree.leaves_with_path(finite)
    if not ok
  ]
  if wrong:
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise UserError(
      f"{name} has parameters that are not finite: {', '.join(wrong[:_NAMED])}{more}: it has diverged; take an earlier checkpoint "
      "with --step (python -m diffjax.checkpoints lists them)"
    )
