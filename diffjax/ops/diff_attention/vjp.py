"""An implementation of the operation, and the one custom VJP around it.

An implementation supplies `forward` and `backward`. The custom VJP types the arrays for `shard_map` and names what remat may keep; checks,
masks, λ's shapes and sharding come with the operation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.varying import vary_like


class Arrays(NamedTuple):
  """The operation's data."""

  q: Float[Array, "B T Q G D"]
  k: Float[Array, "B S K M D"]
  v: Float[Array, "B S K V"]
  lam: Float[Array, "B T H"] | None  # None for G = 1
  q_ids: Int[Array, "B T"] | None  # None without segments
  kv_ids: Int[Array, "B S"] | None
  offset: Int[Array, "B"] | None  # None where the mask knows it


class Saved(NamedTuple):
  """The result of a forward pass, and what its backward pass reads besides the arrays. Each in a layout of the implementation's own."""

  out: Any
  out2: Any = None  # the noise maps' A₂V, for kernels that walk the keys block by block; `chunked` sees whole rows and does without
  lse: Any = None  # log-sum-exps of the maps' rows


# Names of what is saved, for remat policies: where these are kept, the forward pass never runs twice.
RESIDUAL_NAMES = tuple(f"diff_attention_{field}" for field in Saved._fields)


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of a call, known while it is compiled.

  Attributes:
    scale: factor on q·k.
    save: whether a backward pass may follow; without one, `Saved.out` alone is read.
    chosen: what the implementation's `prepare` returned.
  """

  scale: float
  save: bool = False
  chosen: Any = None


class PartialResult(NamedTuple):
  """Attention to some of the keys that the queries see.

  The dtype is float32, or q's float64. λ has no effect on it.
  """

  out: Float[Array, "B H T V"]  # A₁V
  out2: Float[Array, "B H T V"] | None  # A₂V; None for G = 1
  # Log-sum-exps of base 2. EMPTY_ROW_LSE for a row that sees none of the keys.
  lse: Float[Array, "B H G T"]


@dataclasses.dataclass(frozen=True)
class PartialImplementation:
  """Attention to some of the keys that the queries see, for `ring`.

  Attributes:
    forward: (arrays, mask, options) → PartialResult of these keys alone.
    backward: (arrays, mask, options, result, d_out [B, T, H, V]) → what these
      keys add to the gradients of q, k and v, in float32 or q's float64.
      `result` has the output, A₂V and log-sum-exps of all keys, not only these;
      its output is A₁V − λA₂V.
  """

  forward: Callable[[Arrays, Mask, Options], PartialResult]
  backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Implementation:
  """One way to compute differential attention. `register` gives it a name.

  Attributes:
    forward: (arrays, mask, options) → Saved.
    backward: (arrays, mask, options, saved, d_out [B, T, H, V]) → gradients of q, k, v and λ (None without λ). None: JAX differentiates
      `forward`.
    prepare: (arrays, mask) → `options.chosen`, hashable, made once for both passes. Raises ValueError for what is not taken, and says what
      would work.
    output: brings `Saved.out` to [B, T, H, V].
    takes_groups: whether groups may have more than two maps, the last subtracted from all others. Else, and in `partial`, each signal
      map comes with a copy of its noise map, as a group of two.
    partial: attention to some of the keys. If it is given, rows that several
      devices share use a ring. None: their keys and values are gathered.
  """

  forward: Callable[[Arrays, Mask, Options], Saved]
  backward: Callable[..., tuple] | None = None
  prepare: Callable[[Arrays, Mask], Any] = lambda arrays, mask: None
  output: Callable[[Any], Float[Array, "B T H V"]] = lambda out: out
  takes_groups: bool = False
  partial: PartialImplementation | None = None


def attend(
  implementation: Implementation, arrays: Arrays, mask: Mask, scale: float
) -> Float[Array, "B T H V"]:
  """The operation by one implementation, with a gradient."""
  options = Options(scale, chosen=implementation.prepare(arrays, mask))
  if implementation.backward is None:
    return implementation.output(
      implementation.forward(arrays, mask, options).out
    )
  # Inside shard_map an array that all devices share must be made each device's own before the custom VJP, or its gradient is not summed.
  return _attend(
    implementation,
    mask,
    options,
    Arrays._make(None if x is None else vary_like(x, *arrays) for x in arrays),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
  implementation: Implementation, mask: Mask, options: Options, arrays: Arrays
):
  return implementation.output(
    implementation.forward(arrays, mask, options).out
  )


def _attend_fwd(
  implementation: Implementation, mask: Mask, options: Options, arrays: Arrays
):
  saved = implementation.forward(
    arrays, mask, dataclasses.replace(options, save=True)
  )
  saved = Saved._make(
    checkpoint_name(x, name)
    for x, name in zip(saved, RESIDUAL_NAMES, strict=True)
  )
  return implementation.output(saved.out), (arrays, saved)


def _attend_bwd(
  implementation: Implementation, mask: Mask, options: Options, residuals, d_out
):
  arrays, saved = residuals
  assert implementation.backward is not None
  return (
    Arrays._make(
      (
        *implementation.backward(arrays, mask, options, saved, d_out),
        None,
        None,
        None,
      )
    ),
  )


_attend.defvjp(_attend_fwd, _attend_bwd)
