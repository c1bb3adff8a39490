"""Loads trained models from their workdirs."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from diffjax.config import (
  Config,
  MeshConfig,
  ModelConfig,
  UserError,
  from_config_dict,
)
from diffjax.data.tokenizer import Tokenizer
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

# How many parameters an error message names.
_MAX_NAMED = 3
# The sizes that a number of devices must divide to share a model.
_SHARED_SIZES = ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size")


@dataclasses.dataclass(frozen=True)
class Trained:
  """A trained model.

  Attributes:
    name: The name in tables: the workdir and the step.
    config: The config of the run that trained it.
    model: The decoder, with the compute dtype of this process's devices. Its
      attention uses the implementation of the config, or "auto" if that one
      cannot run here.
    params: The parameters in float32, or with the matrices in int8. If several
      devices share the model, they are sharded over a mesh.
    tokenizer: The tokenizer that the model was trained with.
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


class StoredModel(NamedTuple):
  """A trained model that is not on a device: its parameters are NumPy arrays.

  Attributes:
    config: The config of the run that trained it.
    params: The parameters. They may be memory-mapped files.
    tokenizer: The tokenizer that the model was trained with.
  """

  config: Config
  params: dict[str, Any]
  tokenizer: Tokenizer


def load(
  workdir: epath.PathLike,
  step: int | None = None,
  *,
  tensor: int = 1,
  weight_dtype: str | None = None,
  imports: Iterable[str] = (),
) -> Trained:
  """Loads a model from a complete checkpoint of a run.

  Example:

  ```
  trained = load("runs/tiny")
  hidden = trained.model.apply({"params": trained.params}, tokens)
  logits = diffjax.model.decoder.logits(trained.params, hidden)
  ```

  Args:
    workdir: The run's directory, local or gs://.
    step: The checkpoint's step. None for the newest complete checkpoint.
    tensor: The number of devices that share the model, like
      `config.mesh.tensor` in training. Each device loads its part of the
      parameters. `Sampler` and the evaluations then run on all of them.
    weight_dtype: "int8" rounds the layers' matrices to 8 bits, which takes a
      quarter of their memory (see `diffjax.int8`). None keeps float32.
    imports: Modules to import first, which register the attention variant of
      the model. A checkpoint stores only the variant's name.

  Raises:
    UserError: if there is no such checkpoint, if it is damaged or has
      parameters that are not finite, if its tokenizer is missing, if this
      number of devices cannot share the model, if qwix is not installed (for
      int8), if a module cannot be imported, or if no module has registered the
      model's attention.
  """
  absent_tpu.skip()
  import_modules(imports)
  if weight_dtype not in (None, "int8"):
    raise UserError(
      f"weight_dtype = {weight_dtype!r}: must be 'int8', or None for float32"
    )

  checkpoint = open_checkpoint(workdir, step)
  config = from_config_dict(checkpoint.config)
  name = f"{os.fspath(workdir).rstrip('/')} at step {checkpoint.step}"

  implementation = _choose_implementation(workdir, config)
  mesh = None
  if tensor != 1:
    mesh = _tensor_mesh(config.model, tensor)
  model = Decoder(
    config.model,
    dtype=_local_dtype(config.model),
    attention_fn=_attention_fn(implementation, mesh),
  )

  params = checkpoint.params(_abstract_params(config.model, mesh))
  _check_finite(name, _are_finite(params))
  if weight_dtype == "int8":
    name = f"{name}, weights in int8"
    params = quantise(params)

  tokenizer = load_workdir_tokenizer(workdir, config)
  return Trained(name, config, model, params, tokenizer)


def load_piecewise(
  workdir: epath.PathLike,
  make_array: Callable[[tuple[int, ...]], np.ndarray],
) -> StoredModel:
  """Loads a model from the newest checkpoint of a run, into NumPy arrays.

  The parameters are copied in small pieces. So they may be larger than the
  memory, if `make_array` returns memory-mapped files.

  Args:
    workdir: The run's directory, local or gs://.
    make_array: Returns a new array of a given shape.

  Raises:
    UserError: if there is no complete checkpoint, if it has parameters that are
      not finite, or if its tokenizer is missing.
  """
  checkpoint = open_checkpoint(workdir)
  config = from_config_dict(checkpoint.config)
  abstract_params = _abstract_params(config.model, mesh=None)
  params = checkpoint.copied_params(abstract_params, make_array)
  are_finite = jax.tree.map(_is_finite_by_rows, params)
  _check_finite(f"{workdir} at step {checkpoint.step}", are_finite)
  tokenizer = load_workdir_tokenizer(workdir, config)
  return StoredModel(config, params, tokenizer)


def _abstract_params(config: ModelConfig, mesh: Mesh | None) -> Any:
  """Returns shapes and dtypes of a model's parameters, without their values.

  On a mesh, they also have the sharding of each parameter.
  """
  model = Decoder(config)
  shapes = jax.eval_shape(
    functools.partial(init_params, model), _abstract_key()
  )
  if mesh is None:
    return shapes
  return jax.tree.map(_with_sharding, shapes, shardings(shapes, mesh))


def _abstract_key() -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of a random key, for tracing."""
  return jax.eval_shape(jax.random.key, 0)


def _with_sharding(
  leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of a leaf with a sharding."""
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _attention_fn(
  implementation: str, mesh: Mesh | None
) -> Callable[..., jax.Array]:
  """Returns an `attention_fn` that uses one implementation of `diff_attention`.

  Args:
    implementation: the implementation's name, or "auto".
    mesh: the devices that share the model. None for one device.
  """
  if mesh is not None:
    return sharded_attention(mesh, implementation)
  if implementation == "auto":
    return diff_attention
  return functools.partial(diff_attention, implementation=implementation)


def _choose_implementation(workdir: epath.PathLike, config: Config) -> str:
  """Returns the implementation of attention for a model in this process.

  The config names an implementation. If it cannot run on the devices of this
  process, prints the reason and returns "auto".
  """
  name = config.model.attention_implementation
  if name == "auto":
    return name
  problem = _implementation_problem(config, name)
  if problem is None:
    return name
  say(
    f"{workdir} names config.model.attention_implementation = {name!r}, which"
    f" cannot run here ({problem}); 'auto' is used instead"
  )
  return "auto"


def _implementation_problem(config: Config, name: str) -> str | None:
  """Returns why an implementation of attention cannot run here.

  Returns None if it can run the model of the config.
  """
  if name not in implementations.names():
    return (
      "no implementation of that name is registered; --import=MODULE imports"
      " one of your own"
    )
  model = Decoder(
    config.model,
    dtype=_local_dtype(config.model),
    attention_fn=functools.partial(diff_attention, implementation=name),
  )
  tokens = jax.ShapeDtypeStruct((1, config.data.length), jnp.int32)
  try:
    # Traces the model without computing anything. The implementation raises an
    # error if it does not support these shapes, dtypes or devices.
    jax.eval_shape(model.init, _abstract_key(), tokens)
  except ValueError as error:
    return str(error)
  return None


def _local_dtype(config: ModelConfig) -> Any:
  """Returns the compute dtype of a model on this process's devices."""
  return compute_dtype(config.dtype, jax.local_devices()[0].platform)


def _tensor_mesh(config: ModelConfig, tensor: int) -> Mesh:
  """Returns a mesh of devices that share a model.

  Args:
    config: the decoder's config.
    tensor: the number of devices.

  Raises:
    UserError: if there are fewer devices, or if the number does not divide the
      sizes of the model that are split.
  """
  devices = jax.local_devices()
  sizes = {name: getattr(config, name) for name in _SHARED_SIZES}
  common_divisor = math.gcd(*sizes.values())
  possible_counts = []
  for count in range(1, len(devices) + 1):
    if common_divisor % count == 0:
      possible_counts.append(count)
  if tensor not in possible_counts:
    model_sizes = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    raise UserError(
      f"tensor = {tensor}: must be at most the {len(devices)} devices here and"
      f" divide the model's {model_sizes};"
      f" it can be {', '.join(str(count) for count in possible_counts)}"
    )
  return make_mesh(MeshConfig(data=1, tensor=tensor), devices[:tensor])


@jax.jit
def _are_finite(params: Any) -> Any:
  """Returns a tree of bools: whether all numbers of a parameter are finite."""
  return jax.tree.map(_is_finite, params)


def _is_finite(array: jax.Array) -> jax.Array:
  """Returns whether all numbers of an array are finite."""
  return jnp.isfinite(array).all()


def _is_finite_by_rows(array: np.ndarray) -> bool:
  """Returns whether all numbers of an array are finite.

  Reads one row at a time, because the array may be larger than the memory.
  """
  return all(np.isfinite(row).all() for row in array)


def _check_finite(name: str, are_finite: Any) -> None:
  """Raises UserError if a model has parameters that are not finite.

  Such a model generates zero bytes, and its measurements have no meaning.

  Args:
    name: The name of the model.
    are_finite: The tree of parameters, with a bool in place of each one.
  """
  bad_names = []
  for path, is_finite in jax.tree.leaves_with_path(are_finite):
    if not is_finite:
      bad_names.append(jax.tree_util.keystr(path, simple=True, separator="/"))
  if not bad_names:
    return
  listed = ", ".join(bad_names[:_MAX_NAMED])
  num_unlisted = len(bad_names) - _MAX_NAMED
  if num_unlisted > 0:
    listed = f"{listed} and {num_unlisted} more"
  raise UserError(
    f"{name} has parameters that are not finite: {listed}: it has diverged;"
    " take an earlier checkpoint with --step (python -m diffjax.checkpoints"
    " lists them)"
  )
