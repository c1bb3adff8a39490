"""Random parameters for tests to which their values do not matter."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from scipy import special

from diffjax.model.decoder import Decoder
from diffjax.parameters import PARAMETERS

ZERO_INITIALIZED = ("poly_constant", "dex_matrix", "dex_lambda")
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")

# The matrices that write to the residual stream.
RESIDUAL = ("out", "down")

# The standard deviation of a standard normal distribution truncated at ±2.
_TRUNCATED_NORMAL_STD = 0.87962566103423978


def parameters(
  module: nn.Module, *inputs: Any, seed: int = 0, **options: Any
) -> dict[str, Any]:
  """Returns a module's parameters, drawn by NumPy.

  Nothing is compiled: only shapes are traced. Programs that draw by jax.random
  take most of the time of a small test. The numbers have the distributions of
  `module.init`, but not its values. A test of the initialisation itself should
  call `module.init`.

  Args:
    module: a decoder or one of its layers.
    inputs: arguments of the module's call: arrays, numbers or their shapes
      (jax.ShapeDtypeStruct).
    seed: of the random numbers.
    options: keyword arguments of the module's call.
  """
  init = functools.partial(module.init, **options)
  key = jax.eval_shape(jax.random.key, 0)
  shapes = jax.eval_shape(init, key, *inputs)["params"]
  out_scale = _out_scale(module)
  rng = np.random.default_rng(seed)

  def draw(path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    name = path[-1].key
    values = _initial_values(name, leaf.shape, rng)
    if name in RESIDUAL:
      values *= out_scale
    return values.astype(leaf.dtype)

  # `jnp.asarray` would compile a program for each shape.
  return jax.device_put(jax.tree.map_with_path(draw, shapes))


def _out_scale(module: nn.Module) -> float:
  """Returns the factor on the matrices that write to the residual stream."""
  if isinstance(module, Decoder):
    # Each layer adds two terms to the residual stream.
    return (2 * module.config.num_layers) ** -0.5
  return module.out_scale


def _initial_values(
  name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
  """Returns values as model/attention.py and model/decoder.py draw them."""
  if name.endswith("_norm") or name == "head_gain":
    return np.ones(shape)
  if name.endswith(("_bias", "_shift")) or name in ZERO_INITIALIZED:
    return np.zeros(shape)
  if name == "poly_weights":
    return np.full(shape, 1 / 3)
  if name in LAMBDA_VECTORS:
    return rng.normal(scale=0.1, size=shape)
  if name in ("embedding", "unembedding"):
    return rng.normal(scale=shape[-1] ** -0.5, size=shape)
  return _matrix(name, shape, rng)


def _matrix(
  name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
  """Returns draws from a truncated normal of standard deviation 1/√inputs."""
  axes = PARAMETERS[name].axes
  # The parameters of one layer have no layer axis.
  if len(shape) < len(axes):
    axes = axes.removeprefix("L")
  sizes = dict(zip(axes, shape, strict=True))
  inputs = math.prod(sizes[axis] for axis in PARAMETERS[name].inputs)

  # The inverse of the distribution function makes normal numbers of uniform
  # ones. scipy.stats has this distribution, but its import takes a second.
  lowest, highest = special.ndtr([-2, 2])
  draws = special.ndtri(rng.uniform(lowest, highest, shape))
  return draws / (_TRUNCATED_NORMAL_STD * math.sqrt(inputs))
