"""The interface of an implementation, and the custom VJP around it.

An implementation supplies `forward` and `backward`. Everything else is shared:
argument checks, masks, the shapes of λ, sharding, and the names for remat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.arguments import repeat_noise_maps
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.varying import vary_like


class Arrays(NamedTuple):
  """The arrays of one call of the operation."""

  q: Float[Array, "B T Q G D"]
  k: Float[Array, "B S K M D"]
  v: Float[Array, "B S K V"]
  lam: Float[Array, "B T H"] | None  # None if G = 1
  q_ids: Int[Array, "B T"] | None  # None without segments
  kv_ids: Int[Array, "B S"] | None  # None without segments
  offset: Int[Array, "B"] | None  # None if `Mask.offset` is an int


class Saved(NamedTuple):
  """The output of a forward pass, and what its backward pass needs besides.

  Only `output` and `backward` of the same `Implementation` read the fields. So
  each implementation chooses their layouts and the base of the log-sum-exps.
  A field is an array, a tree of arrays, or None if `backward` does not need it.
  """

  out: Any  # `Implementation.output` converts it to [B, T, H, V]
  # A₂v of the noise maps. Kernels that iterate over blocks of keys need it.
  # `chunked` reads all keys of a query at once and does not.
  out2: Any = None
  lse: Any = None  # log-sum-exps of each query's logits, for each map


# The names of the fields of `Saved`, for remat policies. If a policy saves
# them, the forward pass is not computed again.
RESIDUAL_NAMES = tuple(f"diff_attention_{field}" for field in Saved._fields)


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of a call that are static during compilation.

  Attributes:
    scale: factor on q·k.
    save: whether a backward pass may follow. If not, only `Saved.out` is read.
    chosen: the result of the implementation's `prepare`.
  """

  scale: float
  save: bool = False
  chosen: Any = None


class PartialResult(NamedTuple):
  """Attention to some of the keys that the queries see.

  `ring` merges these results, so their layout is the same for all
  implementations. The dtype is float32, or float64 if q is float64. λ has no
  effect on them. G is 1 or 2, because each head has its own noise map here.
  """

  out: Float[Array, "B H T V"]  # A₁v
  out2: Float[Array, "B H T V"] | None  # A₂v; None if G = 1
  # Log-sum-exps of base 2. For a query that sees none of the keys, more than
  # EMPTY_ROW_LSE / 2 (see tiles.py).
  lse: Float[Array, "B H G T"]


@dataclasses.dataclass(frozen=True)
class PartialImplementation:
  """Attention to some of the keys that the queries see, for `ring`.

  Attributes:
    forward: (arrays, mask, options) → PartialResult of these keys.
    backward: (arrays, mask, options, result, d_out [B, T, H, V]) → the terms
      that these keys add to the gradients of q, k and v, in float32, or in
      float64 if q is float64. `result` is the PartialResult of all keys, except
      that `result.out` is A₁v − λA₂v.
  """

  forward: Callable[[Arrays, Mask, Options], PartialResult]
  backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def _prepare_nothing(arrays: Arrays, mask: Mask) -> None:
  """The default of `Implementation.prepare`: every call is supported."""


def _identity(out: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
  return out


@dataclasses.dataclass(frozen=True)
class Implementation:
  """A way to compute differential attention. `register` gives it a name.

  Attributes:
    forward: (arrays, mask, options) → Saved.
    backward: (arrays, mask, options, saved, d_out [B, T, H, V]) → the gradients
      of q, k, v and λ, which is None without λ. If this field is None, JAX
      differentiates `forward`.
    prepare: (arrays, mask) → `options.chosen`. It is called once for both
      passes, and its result must be hashable. It raises ValueError with a
      remedy if the implementation does not support the call.
    output: Saved.out → the output [B, T, H, V].
    takes_groups: whether q's query groups may have more than two maps, of which
      the last is subtracted from all others. Otherwise, and always in
      `partial`, each signal map forms a group with a copy of its noise map.
    partial: attention to some of the keys. With it, a ring computes sequences
      that several devices share. Without it, each device gathers their keys and
      values.
  """

  forward: Callable[[Arrays, Mask, Options], Saved]
  backward: Callable[..., tuple] | None = None
  prepare: Callable[[Arrays, Mask], Any] = _prepare_nothing
  output: Callable[[Any], Float[Array, "B T H V"]] = _identity
  takes_groups: bool = False
  partial: PartialImplementation | None = None


def run_implementation(
  implementation: Implementation, arrays: Arrays, mask: Mask, scale: float
) -> Float[Array, "B T H V"]:
  """Returns differential attention by one implementation.

  If the implementation has its own backward pass, it is used for gradients.
  Otherwise JAX differentiates the forward pass.

  Args:
    implementation: the functions that compute attention.
    arrays: q may have any number of maps. λ is [B, T, H] or None.
    mask: the keys that each query sees.
    scale: factor on q·k.

  Raises:
    ValueError: if the implementation does not support the call.
  """
  if not implementation.takes_groups:
    # Give each signal map a copy of the noise map that it shares with others.
    arrays = arrays._replace(q=repeat_noise_maps(arrays.q))
  options = Options(scale, chosen=implementation.prepare(arrays, mask))
  if implementation.backward is None:
    return _compute_output(implementation, mask, options, arrays)

  # Inside shard_map, an array may be the same on all devices of a mesh axis.
  # Its gradient is the sum over these devices. JAX adds that sum where the
  # array becomes a varying one, which must happen outside the custom VJP.
  varying_arrays = []
  for x in arrays:
    if x is not None:
      x = vary_like(x, *arrays)
    varying_arrays.append(x)
  return _compute_output_with_vjp(
    implementation, mask, options, Arrays._make(varying_arrays)
  )


def _compute_output(
  implementation: Implementation, mask: Mask, options: Options, arrays: Arrays
) -> Float[Array, "B T H V"]:
  saved = implementation.forward(arrays, mask, options)
  return implementation.output(saved.out)


# The same function, differentiated by the implementation's backward pass.
_compute_output_with_vjp = jax.custom_vjp(
  _compute_output, nondiff_argnums=(0, 1, 2)
)


def _forward_rule(
  implementation: Implementation, mask: Mask, options: Options, arrays: Arrays
) -> tuple[Float[Array, "B T H V"], tuple[Arrays, Saved]]:
  """Returns the output, and what `_backward_rule` needs (the residuals).

  The residuals have names, by which a remat policy can choose to save them.
  Otherwise the forward pass is computed again before the backward pass.
  """
  options = dataclasses.replace(options, save=True)
  saved = implementation.forward(arrays, mask, options)
  named_arrays = []
  for x, name in zip(saved, RESIDUAL_NAMES, strict=True):
    named_arrays.append(checkpoint_name(x, name))
  saved = Saved(*named_arrays)
  # The output comes from the named array. Otherwise, a policy that saves the
  # names would still compute the forward pass again for the layers that follow.
  residuals = (arrays, saved)
  return implementation.output(saved.out), residuals


def _backward_rule(
  implementation: Implementation,
  mask: Mask,
  options: Options,
  residuals: tuple[Arrays, Saved],
  d_out: Float[Array, "B T H V"],
) -> tuple[Arrays]:
  """Returns the gradients of the arrays. Integer arrays have none.

  Args:
    implementation: its `backward` computes the gradients.
    mask: the keys that each query sees.
    options: the static options of the call.
    residuals: the inputs, and what the forward pass saved.
    d_out: the gradient of the output.
  """
  assert implementation.backward is not None
  arrays, saved = residuals
  d_q, d_k, d_v, d_lam = implementation.backward(
    arrays, mask, options, saved, d_out
  )
  gradients = Arrays(d_q, d_k, d_v, d_lam, q_ids=None, kv_ids=None, offset=None)
  return (gradients,)  # of the only argument that is not static


_compute_output_with_vjp.defvjp(_forward_rule, _backward_rule)
