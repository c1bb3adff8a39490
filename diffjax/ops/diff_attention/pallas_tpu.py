"""Differential attention on TPU as fused Pallas kernels: one pass forward, one pass backward.

Forward, a block of queries stays while blocks of keys pass: both maps' softmax run online, and V is loaded once for both. Backward, a block
of keys stays while the query heads that share it pass: dP is computed once for both maps, dV meets their weighted sum, and dQ of a whole
head is accumulated where it stays in VMEM. Per query, key and head, in multiply-adds of d (paper §1): 6 and 10 for V1, 4 and 8 for V2.

Tiles that the mask hides are neither loaded nor computed. A tile is walked in sub-tiles that fit the registers; in tiles that the mask
cuts, hidden sub-tiles are skipped, and only sub-tiles that it cuts pay for it. Exponentials are base 2: queries are multiplied by
scale·log₂e once, outside.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import block_sizes, residuals
from diffjax.ops.diff_attention.block_sizes import Blocks
from diffjax.ops.diff_attention.tiles import Geometry, Scalar, block_of, both, negate
from diffjax.ops.varying import vary_like

_HIDDEN = -1e30  # a hidden logit; finite, so that the maximum of a row that sees nothing can be subtracted from it
_LOG2E = float(np.log2(np.e))
_LANES = 128
_MAX_BODIES = 4  # bodies for tiles that the mask cuts, each compiled for one position of the cut

_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=False)


@contextlib.contextmanager
def interpreted(params: pltpu.InterpretParams | bool) -> Iterator[None]:
  """Within it the kernels run in Pallas's TPU interpreter, or with True in its general one, on any backend: for tests."""
  token = _interpret.set(params)
  try:
    yield
  finally:
    _interpret.reset(token)


def pallas_tpu(
  q: Float[Array, "B T H G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: Float[Array, "B T H"] | None,
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | None = None,
  scale: float,
) -> Float[Array, "B T H V"]:
  """`diff_attention` on TPU; the arguments are those of `api.diff_attention`, checked there.

  Raises:
    ValueError: the program is not for a TPU, or a dtype or width is not taken.
  """
  generation = _generation()
  if not takes(q, v):
    raise ValueError(
      f"q ({q.dtype}, D = {q.shape[-1]}) and v (V = {v.shape[-1]}) are not taken by implementation 'pallas_tpu', which takes bfloat16 and "
      "float32, D up to 256 and V up to 512: cast them, or use implementation='chunked'"
    )
  static = isinstance(q_offset, int)
  geometry = Geometry(causal, window, q_offset if static else None, q.shape[1], k.shape[1])
  forward, backward = (
    block_sizes.choose(generation, direction, q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], q.shape[3], q.dtype)
    for direction in ("forward", "backward")
  )
  options = _Options(geometry, scale, forward, backward, block_sizes.VMEM_BYTES[generation], _interpret.get())
  arrays = (q, k, v, lam, q_segment_ids, kv_segment_ids, None if static else q_offset)
  # Inside shard_map an array that all devices share must be made each device's own before the custom VJP, or its gradient is not summed.
  return _attend(options, *(None if x is None else vary_like(x, *arrays) for x in arrays))


def takes(q: jax.Array, v: jax.Array) -> bool:
  """Whether the kernel takes arrays of such dtypes and widths."""
  return q.dtype in (jnp.bfloat16, jnp.float32) and q.shape[-1] <= 256 and v.shape[-1] <= 512


def _generation() -> str:
  """The TPU that the program is compiled for: the device's, or the abstract mesh's when compiling ahead of time."""
  if _interpret.get():
    return "v5e"
  try:
    return str(pltpu.get_tpu_info().chip_version)
  except ValueError as error:
    raise ValueError(
      f"implementation = 'pallas_tpu' needs a TPU, and the backend is {jax.default_backend()!r}; use implementation='chunked' or 'auto'"
    ) from error


@dataclasses.dataclass(frozen=True)
class _Options:
  geometry: Geometry
  scale: float
  forward: Blocks
  backward: Blocks
  vmem_bytes: int
  interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q, k, v, lam, q_ids, kv_ids, offset):
  out, _, _ = _forward(options, q, k, v, lam, q_ids, kv_ids, offset, save=False)
  return jnp.swapaxes(out, 1, 2)


def _attend_fwd(options: _Options, q, k, v, lam, q_ids, kv_ids, offset):
  out, out2, lse = _forward(options, q, k, v, lam, q_ids, kv_ids, offset, save=True)
  out, lse = checkpoint_name(out, residuals.OUT), checkpoint_name(lse, residuals.LSE)
  out2 = None if out2 is None else checkpoint_name(out2, residuals.OUT2)
  return jnp.swapaxes(out, 1, 2), (q, k, v, lam, q_ids, kv_ids, offset, out, out2, lse)


def _attend_bwd(options: _Options, saved, d_out):
  return *_backward(options, d_out, *saved), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """What a kernel knows while it is compiled."""

  geometry: Geometry
  blocks: Blocks
  num_maps: int  # G
  num_key_maps: int  # M
  q_blocks: int
  kv_blocks: int
  keys_pass: bool  # forward: keys pass by a block of queries; backward: queries pass by a block of keys
  steps: int  # blocks that pass, at most
  segments: bool

  @property
  def num_scalars(self) -> int:
    return 3 * (self.geometry.q_offset is None or self.segments) + 4 * self.segments

  def cost(self, heads: int, *, flops: int, exps: int) -> pl.CostEstimate:
    """Of the tiles that positions alone do not hide; both counts are per query and key."""
    blocks, geometry = self.blocks, dataclasses.replace(self.geometry, q_offset=self.geometry.q_offset or 0)
    p0, k0 = np.arange(self.q_blocks)[:, None] * blocks.q + geometry.q_offset, np.arange(self.kv_blocks) * blocks.kv
    tiles = np.sum(np.broadcast_to(geometry.some(p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1), (self.q_blocks, self.kv_blocks)))
    area = int(tiles) * blocks.q * blocks.kv * heads
    return pl.CostEstimate(flops=flops * area, transcendentals=exps * area, bytes_accessed=0)

  def passing(self, scalars, b: Scalar, stays: Scalar) -> tuple[Scalar, Scalar]:
    """First and last block that pass by block `stays`; none if the last lies before the first."""
    blocks, geometry = self.blocks, self.geometry
    if scalars:
      index = b * (self.q_blocks if self.keys_pass else self.kv_blocks) + stays
      return scalars[1][index], scalars[2][index]
    if self.keys_pass:
      p0 = geometry.q_offset + stays * blocks.q
      first, last = geometry.keys_of(p0, p0 + blocks.q - 1)
      return block_of(first, blocks.kv), block_of(last, blocks.kv)
    first, last = geometry.rows_of(stays * blocks.kv, (stays + 1) * blocks.kv - 1)
    return block_of(first, blocks.q), block_of(last, blocks.q)

  def block(self, scalars, b: Scalar, stays: Scalar, step: Scalar) -> Scalar:
    """The block to have at hand at a step: the last one stays where no more are to come, so that nothing is loaded."""
    first, last = self.passing(scalars, b, stays)
    return jnp.minimum(first + step, jnp.maximum(last, 0))

  def position(self, scalars, b: Scalar, i: Scalar) -> Scalar:
    """Position of the first query of block i."""
    offset = self.geometry.q_offset if self.geometry.q_offset is not None else scalars[0][b]
    return offset + i * self.blocks.q

  def visit(self, scalars, b: Scalar, i: Scalar, j: Scalar, live: Scalar, body: Callable) -> None:
    """Runs body(row, key, mask) for every sub-tile of tile (i, j) that a query may see into, unless the tile is not `live`.

    row and key say where in the tile the sub-tile begins; mask(q_axis, ids) gives its elementwise mask, and is None where all is seen.
    """
    blocks, geometry = self.blocks, self.geometry
    p0, k0 = self.position(scalars, b, i), j * blocks.kv
    subtiles = list(itertools.product(range(0, blocks.q, blocks.q_inner), range(0, blocks.kv, blocks.kv_inner)))
    corners = lambda row, key, p0, k0: (p0 + row, p0 + row + blocks.q_inner - 1, k0 + key, k0 + key + blocks.kv_inner - 1)

    def mask(row: int, key: int, p0: Scalar, k0: Scalar, q_axis: int, q_ids=None, kv_ids=None):
      shape = (blocks.q_inner, blocks.kv_inner) if q_axis == 0 else (blocks.kv_inner, blocks.q_inner)
      rows, keys = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (q_axis, 1 - q_axis))
      visible = geometry.visible(rows - keys + (p0 + row - k0 - key), keys + (k0 + key))
      if self.segments:
        same = q_ids == kv_ids
        visible = same if visible is None else visible & same
      return visible

    tile = p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1
    some, every = both(live, geometry.some(*tile)), geometry.every(*tile)
    if self.segments:
      overlap, equal = self._ids(scalars, b, i, j, subtiles)
      some, every = both(some, overlap), both(every, equal)

    @_when(both(some, every))
    def _():
      for row, key in subtiles:
        body(row, key, None)

    differences = None if self.segments else geometry.partial_differences(blocks.q, blocks.kv, _MAX_BODIES)
    partial = both(some, negate(every))
    if differences is None:

      @_when(partial)
      def _():
        for row, key in subtiles:
          visible = geometry.some(*corners(row, key, p0, k0))
          if self.segments:
            visible = both(visible, self._ids(scalars, b, i, j, [(row, key)])[0])
          _when(visible)(functools.partial(body, row, key, functools.partial(mask, row, key, p0, k0)))

      return
    for difference in differences:  # every tile whose first query lies so far behind its first key is cut in the same way

      @_when(both(partial, p0 - k0 == difference))
      def _(difference=difference):
        for row, key in subtiles:
          corner = corners(row, key, difference, 0)
          if geometry.some(*corner):
            body(row, key, None if geometry.every(*corner) else functools.partial(mask, row, key, difference, 0))

  def _ids(self, scalars, b: Scalar, i: Scalar, j: Scalar, subtiles) -> tuple[Scalar, Scalar]:
    """Whether the ranges of segment ids of queries and keys overlap, and whether all ids are equal."""
    q_low, q_high, kv_low, kv_high = scalars[3:]
    blocks = self.blocks
    q_start, q_size = (b * self.q_blocks + i) * (blocks.q // blocks.q_inner), blocks.q_inner
    kv_start, kv_size = (b * self.kv_blocks + j) * (blocks.kv // blocks.kv_inner), blocks.kv_inner
    q_indices = [q_start + row // q_size for row in sorted({row for row, _ in subtiles})]
    kv_indices = [kv_start + key // kv_size for key in sorted({key for _, key in subtiles})]
    q_low = functools.reduce(jnp.minimum, [q_low[n] for n in q_indices])
    q_high = functools.reduce(jnp.maximum, [q_high[n] for n in q_indices])
    kv_low = functools.reduce(jnp.minimum, [kv_low[n] for n in kv_indices])
    kv_high = functools.reduce(jnp.maximum, [kv_high[n] for n in kv_indices])
    return both(q_low <= kv_high, kv_low <= q_high), both(q_low == q_high, kv_low == kv_high, q_low == kv_low)


def _when(condition: Scalar) -> Callable:
  if isinstance(condition, bool):
    return (lambda function: function()) if condition else (lambda function: None)
  return pl.when(condition)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
  """A matrix product over the given axes, accumulated in float32; float32 operands are not rounded to bfloat16."""
  precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
  return lax.dot_general(
    a.astype(b.dtype), b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def _forward(options: _Options, q, k, v, lam, q_ids, kv_ids, offset, *, save: bool):
  """Returns the output [B, H, T, V] and, to be saved for a gradient, O₂ likewise and the log-sum-exps (base 2) [B, H, G, T]; else None."""
  kernel = _make_kernel(options.geometry, options.forward, q, k, q_ids, keys_pass=True)
  scalars = _scalars(kernel, q_ids, kv_ids, offset, q.shape[0])
  (B, T, H, G, D), (K, M), V = q.shape, k.shape[2:4], v.shape[-1]
  R, rows, keys = H // K, kernel.blocks.q, kernel.blocks.kv
  length = kernel.q_blocks * rows
  stays = lambda b, h, i, step, *scalars: (b, h, i, 0)
  stays_row = lambda b, h, i, step, *scalars: (b, h, 0, i)
  passes = lambda b, h, i, step, *scalars: (b, lax.div(h, R), kernel.block(scalars, b, i, step), 0)
  inputs = [(x, (rows, D), stays) for x in _queries(options, q, length)]
  inputs += [(x, (keys, x.shape[-1]), passes) for x in (*_keys(k, kernel), *_keys(v[:, :, :, None], kernel))]
  if lam is not None:
    inputs.append((_pad(jnp.swapaxes(lam, 1, 2)[:, :, None], 3, length), (1, rows), stays_row))
  if q_ids is not None:
    inputs += [
      (_pad(q_ids, 1, length)[:, None, None], (1, rows), lambda b, h, i, step, *scalars: (b, 0, 0, i)),
      (
        _pad(kv_ids, 1, kernel.kv_blocks * keys)[:, None, None],
        (1, keys),
        lambda b, h, i, step, *scalars: (b, 0, 0, kernel.block(scalars, b, i, step)),
      ),
    ]
  outputs = [((B, H, length, V), q.dtype, (rows, V), stays)] * (1 + (G == 2 and save))
  if save:
    outputs.append(((B, H, G, length), jnp.float32, (G, rows), stays_row))
  out, *saved = _call(
    options, functools.partial(_forward_kernel, kernel, save), f"diff_attention_forward_{'v1' if M == 2 else 'v2' if G == 2 else 'plain'}",
    grid=(B, H, kernel.q_blocks, kernel.steps), parallel=3, scalars=scalars, inputs=inputs, outputs=outputs,
    scratch=[(G, rows, _LANES), (G, rows, _LANES), (G, rows, V)], like=q,
    cost=kernel.cost(B * H, flops=2 * G * (D + V), exps=G),
  )  # fmt: skip
  lse = saved.pop()[..., :T] if save else None
  out2 = saved.pop()[:, :, :T] if saved else None
  return out[:, :, :T], out2, lse


def _backward(options: _Options, d_out, q, k, v, lam, q_ids, kv_ids, offset, out, out2, lse):
  """Gradients of q, k, v and λ (None without λ); paper §1."""
  (B, T, H, G, D), (K, M) = q.shape, k.shape[2:4]
  d_out = jnp.swapaxes(d_out, 1, 2)
  row_sums = lambda x: jnp.sum(d_out.astype(jnp.float32) * x.astype(jnp.float32), axis=-1)
  delta, d_lam = row_sums(out)[:, :, None], None
  if lam is not None:
    lam = jnp.swapaxes(lam, 1, 2)
    delta2 = row_sums(out2)
    delta = jnp.stack([delta[:, :, 0] + lam * delta2, delta2], axis=2)
    d_lam = -jnp.swapaxes(delta2, 1, 2)
    lam = lam[:, :, None]
  # dQ of all the rows of a call stays in VMEM: a call takes as many heads of a group as fit, or a span of one head's rows.
  block = options.backward.q
  heads = max(r for r in range(1, H // K + 1) if (H // K) % r == 0 and (r == 1 or r * _round_up(T, block) <= options.backward.resident))
  span = min(_round_up(T, block), max(block, options.backward.resident // heads // block * block))
  group = lambda x: x.reshape(B, K, H // K, *x.shape[2:])
  d_q, d_k, d_v = [], 0.0, 0.0
  for head in range(0, H // K, heads):
    spans = []
    for start in range(0, T, span):
      stop = min(start + span, T)
      own = lambda x, axis, head=head, start=start, stop=stop: lax.slice_in_dim(group(x)[:, :, head : head + heads], start, stop, axis=axis)
      shifted = options.geometry.q_offset
      geometry = dataclasses.replace(options.geometry, q_length=stop - start, q_offset=None if shifted is None else shifted + start)
      pieces = _backward_span(
        dataclasses.replace(options, geometry=geometry), own(jnp.swapaxes(q, 1, 2), 3), k, v, own(d_out, 3), own(lse, 4), own(delta, 4),
        None if lam is None else own(lam, 4), None if q_ids is None else q_ids[:, start:stop], kv_ids,
        None if offset is None else offset + start, whole=heads == H // K and span >= T,
      )  # fmt: skip
      spans.append(pieces[0])
      d_k, d_v = d_k + pieces[1], d_v + pieces[2]
    d_q.append(jnp.concatenate(spans, axis=4) if len(spans) > 1 else spans[0])
  d_q = jnp.concatenate(d_q, axis=2) if len(d_q) > 1 else d_q[0]  # [B, K, R, G, T, D]
  return jnp.transpose(d_q.reshape(B, H, G, T, D), (0, 3, 1, 2, 4)), jnp.transpose(d_k, (0, 3, 1, 2, 4)).astype(k.dtype), jnp.swapaxes(d_v, 1, 2).astype(v.dtype), d_lam


def _backward_span(options: _Options, q, k, v, d_out, lse, delta, lam, q_ids, kv_ids, offset, *, whole: bool):
  """dQ [B, K, R, G, T, D], dK [B, K, M, S, D] and dV [B, K, S, V] of queries [B, K, R, T, G, D]; dK and dV float32 unless `whole`."""
  (B, K, R, T, G, D), (S, M), V = q.shape, (k.shape[1], k.shape[3]), v.shape[-1]
  kernel = _make_kernel(options.geometry, options.backward, q[:, 0, 0], k, q_ids, keys_pass=False)
  scalars = _scalars(kernel, q_ids, kv_ids, offset, B)
  rows, keys = kernel.blocks.q, kernel.blocks.kv
  length, kv_length = kernel.q_blocks * rows, kernel.kv_blocks * keys
  stays = lambda b, kv, j, r, step, *scalars: (b, kv, j, 0)
  passes = lambda b, kv, j, r, step, *scalars: (b, kv, r, kernel.block(scalars, b, j, step), 0)
  passes_row = lambda b, kv, j, r, step, *scalars: (b, kv, r, 0, kernel.block(scalars, b, j, step))
  queries = _queries(options, q.reshape(B, K * R, T, G, D).swapaxes(1, 2), length)
  inputs = [(x.reshape(B, K, R, length, D), (rows, D), passes) for x in queries]
  inputs += [(x, (keys, x.shape[-1]), stays) for x in (*_keys(k, kernel), *_keys(v[:, :, :, None], kernel))]
  inputs += [
    (_pad(d_out, 3, length), (rows, V), passes),
    (_pad(lse, 4, length, -_HIDDEN), (G, rows), passes_row),
    (_pad(delta, 4, length), (G, rows), passes_row),
  ]
  if lam is not None:
    inputs.append((_pad(lam, 4, length), (1, rows), passes_row))
  if q_ids is not None:
    inputs += [
      (_pad(q_ids, 1, length)[:, None, None], (1, rows), lambda b, kv, j, r, step, *scalars: (b, 0, 0, kernel.block(scalars, b, j, step))),
      (_pad(kv_ids, 1, kv_length)[:, None, None], (1, keys), lambda b, kv, j, r, step, *scalars: (b, 0, 0, j)),
    ]
  dtype = k.dtype if whole else jnp.float32
  outputs = [((B, K, R, G, length, D), q.dtype, (R, G, length, D), lambda b, kv, j, r, step, *scalars: (b, kv, 0, 0, 0, 0))]
  outputs += [((B, K, kv_length, D), dtype, (keys, D), stays)] * M + [((B, K, kv_length, V), dtype, (keys, V), stays)]
  d_q, *d_k, d_v = _call(
    options, functools.partial(_backward_kernel, kernel, options.scale), f"diff_attention_backward_{'v1' if M == 2 else 'v2' if G == 2 else 'plain'}",
    grid=(B, K, kernel.kv_blocks, R, kernel.steps), parallel=2, scalars=scalars, inputs=inputs, outputs=outputs,
    scratch=[(R, G, length, D), (M, keys, D), (keys, V)], like=k, cost=kernel.cost(B * K * R, flops=2 * (3 * G * D + 2 * V), exps=G),
  )  # fmt: skip
  return d_q[:, :, :, :, :T], jnp.stack([x[:, :, :S] for x in d_k], axis=2), d_v[:, :, :S]


def _make_kernel(geometry: Geometry, blocks: Blocks, q, k, q_ids, *, keys_pass: bool) -> _Kernel:
  q_blocks, kv_blocks = pl.cdiv(q.shape[1], blocks.q), pl.cdiv(k.shape[1], blocks.kv)
  kernel = _Kernel(geometry, blocks, q.shape[-2], k.shape[3], q_blocks, kv_blocks, keys_pass, 0, q_ids is not None)
  stay, most = (q_blocks, kv_blocks) if keys_pass else (kv_blocks, q_blocks)
  if geometry.q_offset is not None:
    most = max(
      1, *(last - first + 1 for first, last in (dataclasses.replace(kernel, segments=False).passing((), 0, n) for n in range(stay)))
    )
  elif geometry.window is not None:
    sides = 1 if geometry.causal else 2
    span, size = (blocks.q, blocks.kv) if keys_pass else (blocks.kv, blocks.q)
    most = min(most, pl.cdiv(span + sides * (geometry.window - 1), size) + 1)
  return dataclasses.replace(kernel, steps=most)


def _scalars(kernel: _Kernel, q_ids, kv_ids, offset, batch: int) -> list[jax.Array]:
  """What index maps and kernels read when the mask is data: offsets, first and last passing block, ranges of ids. Flat int32 arrays."""
  if not kernel.num_scalars:
    return []
  geometry, blocks = kernel.geometry, kernel.blocks
  offset = jnp.full((batch,), geometry.q_offset, jnp.int32) if offset is None else offset
  p0 = (offset[:, None] + blocks.q * jnp.arange(kernel.q_blocks, dtype=jnp.int32))[:, :, None]
  k0 = blocks.kv * jnp.arange(kernel.kv_blocks, dtype=jnp.int32)
  visible = jnp.broadcast_to(geometry.some(p0, p0 + blocks.q - 1, k0, k0 + blocks.kv - 1), (batch, kernel.q_blocks, kernel.kv_blocks))
  ranges = []
  if q_ids is not None:
    tiles = lambda ids, count, size: _pad(ids, 1, count * size).reshape(batch, count, size)
    q_tiles, kv_tiles = tiles(q_ids, kernel.q_blocks, blocks.q), tiles(kv_ids, kernel.kv_blocks, blocks.kv)
    low, high = lambda x: jnp.min(x, axis=-1), lambda x: jnp.max(x, axis=-1)
    visible &= (low(q_tiles)[:, :, None] <= high(kv_tiles)[:, None]) & (low(kv_tiles)[:, None] <= high(q_tiles)[:, :, None])
    for ids, size in ((q_tiles, blocks.q_inner), (kv_tiles, blocks.kv_inner)):
      ranges += [low(ids.reshape(-1, size)), high(ids.reshape(-1, size))]
  axis = 2 if kernel.keys_pass else 1
  some = jnp.any(visible, axis=axis)
  first = jnp.where(some, jnp.argmax(visible, axis=axis), 0)
  last = jnp.where(some, visible.shape[axis] - 1 - jnp.argmax(jnp.flip(visible, axis), axis=axis), -1)
  return [x.astype(jnp.int32).reshape(-1) for x in (offset, first, last, *ranges)]


def _call(options: _Options, function, name: str, *, grid, parallel: int, scalars, inputs, outputs, scratch, like, cost):
  """`pallas_call` on (array, block, index map) and (shape, dtype, block, index map); a block's leading axes are squeezed away."""
  spec = lambda ndim, block, index: pl.BlockSpec((None,) * (ndim - len(block)) + block, index)
  varying = jax.typeof(like).manual_axis_type
  return pl.pallas_call(
    function,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=grid,
      in_specs=[spec(x.ndim, block, index) for x, block, index in inputs],
      out_specs=[spec(len(shape), block, index) for shape, _, block, index in outputs],
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype, _, _ in outputs],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel), vmem_limit_bytes=options.vmem_bytes
    ),
    cost_estimate=cost,
    interpret=options.interpret,
    name=name,
  )(*scalars, *(x for x, _, _ in inputs))


def _queries(options: _Options, q, length: int) -> list[jax.Array]:
  """[B, T, H, G, D] as G of [B, H, length, D], times scale·log₂e."""
  q = (q.astype(jnp.float32) * (options.scale * _LOG2E)).astype(q.dtype)
  return [_pad(jnp.swapaxes(q[:, :, :, g], 1, 2), 2, length) for g in range(q.shape[3])]


def _keys(k, kernel: _Kernel) -> list[jax.Array]:
  """[B, S, K, M, D] as M of [B, K, length, D]."""
  return [_pad(jnp.swapaxes(k[:, :, :, m], 1, 2), 2, kernel.kv_blocks * kernel.blocks.kv) for m in range(k.shape[3])]


def _pad(x: jax.Array, axis: int, length: int, value: float | None = None) -> jax.Array:
  """x up to a length: with a value, else zeros, or the last id where x holds ids."""
  widths = [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
  if length == x.shape[axis]:
    return x
  return jnp.pad(x, widths, mode="edge") if jnp.issubdtype(x.dtype, jnp.integer) else jnp.pad(x, widths, constant_values=value or 0)


def _round_up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple


def _forward_kernel(kernel: _Kernel, save: bool, *refs) -> None:
  """Grid [B, H, query blocks, key blocks that pass]."""
  scalars, refs = refs[: kernel.num_scalars], iter(refs[kernel.num_scalars :])
  G, M = kernel.num_maps, kernel.num_key_maps
  q, k, v = [next(refs) for _ in range(G)], [next(refs) for _ in range(M)], next(refs)
  lam = next(refs) if G == 2 else None
  q_ids, kv_ids = (next(refs), next(refs)) if kernel.segments else (None, None)
  out = next(refs)
  out2, lse = next(refs) if G == 2 and save else None, next(refs) if save else None
  peak, total, acc = refs  # [G, rows, 128] and [G, rows, V]; a row's total is spread over the lanes until the end
  b, i, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  first, last = kernel.passing(scalars, b, i)

  @pl.when(step == 0)
  def _():
    peak[...] = jnp.full_like(peak, _HIDDEN)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  def subtile(row: int, key: int, mask) -> None:
    rows, keys = pl.ds(row, kernel.blocks.q_inner), pl.ds(key, kernel.blocks.kv_inner)
    values = v[keys, :]
    if mask is not None:
      ids = (_column(q_ids[:, rows]), kv_ids[:, keys]) if kernel.segments else ()
      mask = mask(0, *ids)
    for g in range(G):
      logits = _dot(q[g][rows, :], k[g % M][keys, :], (1, 1))
      if mask is not None:
        logits = jnp.where(mask, logits, _HIDDEN)
      before = peak[g, rows, :]
      after = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
      weights = jnp.exp2(logits - _repeat(after, logits.shape[1]))
      shrink = jnp.exp2(before - after)
      parts = [weights[:, lane : lane + _LANES] for lane in range(0, weights.shape[1], _LANES)]
      total[g, rows, :] = total[g, rows, :] * shrink + functools.reduce(jnp.add, parts)
      peak[g, rows, :] = after
      acc[g, rows, :] = acc[g, rows, :] * _repeat(shrink, acc.shape[2]) + _dot(weights, values, (1, 0))

  kernel.visit(scalars, b, i, kernel.block(scalars, b, i, step), first + step <= last, subtile)

  @pl.when(step == kernel.steps - 1)
  def _():
    outs = []
    for g in range(G):
      empty = peak[g] <= _HIDDEN / 2  # the row saw no key; whatever was added up counts for nothing
      sums = jnp.where(empty, 1.0, jnp.sum(total[g], axis=1, keepdims=True))
      outs.append(acc[g] * _repeat(jnp.where(empty, 0.0, 1.0 / sums), acc.shape[2]))
      if save:
        # An empty row's log-sum-exp makes its weights zero in the backward pass.
        lse[g : g + 1, :] = jnp.where(empty, -_HIDDEN, peak[g] + jnp.log2(sums)).T[:1]
    if G == 1:
      out[...] = outs[0].astype(out.dtype)
    else:
      second = outs[1].astype(out.dtype)  # rounded first, so that the backward pass, which reads it, agrees
      if save:
        out2[...] = second
      out[...] = (outs[0] - _column(lam[...]) * second.astype(jnp.float32)).astype(out.dtype)


def _backward_kernel(kernel: _Kernel, scale: float, *refs) -> None:
  """Grid [B, K, key blocks, query heads of a key head, query blocks that pass]. Maps are transposed: keys × queries."""
  scalars, refs = refs[: kernel.num_scalars], iter(refs[kernel.num_scalars :])
  G, M = kernel.num_maps, kernel.num_key_maps
  q, k, v, d_out = [next(refs) for _ in range(G)], [next(refs) for _ in range(M)], next(refs), next(refs)
  lse, delta = next(refs), next(refs)  # [G, rows]
  lam = next(refs) if G == 2 else None
  q_ids, kv_ids = (next(refs), next(refs)) if kernel.segments else (None, None)
  d_q, d_k, d_v = next(refs), [next(refs) for _ in range(M)], next(refs)
  d_q_acc, d_k_acc, d_v_acc = refs  # [heads, G, all rows, D], [M, keys, D] and [keys, V]
  b, j, head, step = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)
  first, last = kernel.passing(scalars, b, j)
  i = kernel.block(scalars, b, j, step)
  d_q_tile = d_q_acc.at[head, :, pl.ds(pl.multiple_of(i * kernel.blocks.q, kernel.blocks.q), kernel.blocks.q)]

  @pl.when((j == 0) & (head == 0) & (step == 0))
  def _():
    d_q_acc[...] = jnp.zeros_like(d_q_acc)

  @pl.when((head == 0) & (step == 0))
  def _():
    d_k_acc[...] = jnp.zeros_like(d_k_acc)
    d_v_acc[...] = jnp.zeros_like(d_v_acc)

  def subtile(row: int, key: int, mask) -> None:
    rows, keys = pl.ds(row, kernel.blocks.q_inner), pl.ds(key, kernel.blocks.kv_inner)
    if mask is not None:
      ids = (q_ids[:, rows], _column(kv_ids[:, keys])) if kernel.segments else ()
      mask = mask(1, *ids)
    d_rows = d_out[rows, :]
    d_weights = _dot(v[keys, :], d_rows, (1, 1))  # dP, shared by the maps
    d_logits, weighted = [], None
    for g in range(G):
      logits = _dot(k[g % M][keys, :], q[g][rows, :], (1, 1))
      if mask is not None:
        logits = jnp.where(mask, logits, _HIDDEN)
      weights = jnp.exp2(logits - lse[g : g + 1, rows])
      if g == 1:
        weights = weights * -lam[:, rows]
      weighted = weights if weighted is None else weighted + weights  # A₁ − λA₂
      d_logits.append((weights * (d_weights - delta[g : g + 1, rows])).astype(d_rows.dtype))
    d_v_acc[keys, :] += _dot(weighted, d_rows, (1, 0))
    for g in range(G):
      d_k_acc[g % M, keys, :] += _dot(d_logits[g], q[g][rows, :], (1, 0))
      d_q_tile[g, rows, :] += _dot(d_logits[g], k[g % M][keys, :], (0, 0))

  kernel.visit(scalars, b, i, j, first + step <= last, subtile)

  end = (head == pl.num_programs(3) - 1) & (step == kernel.steps - 1)

  @pl.when(end & (j == pl.num_programs(2) - 1))
  def _():
    d_q[...] = (d_q_acc[...] * scale).astype(d_q.dtype)

  @pl.when(end)
  def _():
    for m in range(M):
      d_k[m][...] = (d_k_acc[m] * (1 / _LOG2E)).astype(d_k[m].dtype)  # the queries carry scale·log₂e
    d_v[...] = d_v_acc[...].astype(d_v.dtype)


def _column(row: jax.Array) -> jax.Array:
  """[1, n] as [n, 1]."""
  return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def _repeat(x: jax.Array, width: int) -> jax.Array:
  """[rows, 128] of equal lanes at another width."""
  return jnp.tile(x, (1, pl.cdiv(width, _LANES)))[:, :width]
