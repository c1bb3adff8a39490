"""Decoding: differential attention of the newest tokens of each row of a batch against its cache of keys and values.

Three implementations that agree: XLA's stands here, the kernels in the rooms `tpu` and `gpu`. Reading the cache is the whole cost, so all
read keys and values once for both maps and for all query heads that share them. Where each map has keys of its own, the cache holds them
side by side, and a query is padded with zeros where the other map's keys stand: one matrix product then gives the logits of both maps, and
the cache is never sliced, transposed or copied.

A cache in pages is a pool of them and a table of each row's own. A cache without a table is the same with one page a row, as long as the
row may grow; so there is one way to read both.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention import arguments
from diffjax.ops.diff_attention.sharded import AxisSharding
from diffjax.ops.diff_attention.tiles import MASKED_LOGIT
from diffjax.ops.platform import platform
from diffjax.ops.varying import vary_like

IMPLEMENTATIONS = ("auto", "xla", "pallas_tpu", "pallas_gpu")
_ROOMS = {
  "pallas_tpu": "tpu",
  "pallas_gpu": "gpu",
}  # whose module `decode` has a function `attend`
_XLA_LOGITS = (
  1 << 20
)  # that XLA's form has at once, where it does not have all: they should stay in a CPU's cache


def decode_attention(
  q: Float[Array, "B *T Q G D"],
  k: Float[Array, "B K S M*D"]
  | Float[Array, "P K S M*D"]
  | Int[Array, "P K S M*D"],
  v: Float[Array, "B K S V"] | Float[Array, "P K S V"] | Int[Array, "P K S V"],
  lam: float
  | Float[Array, ""]
  | Float[Array, "H"]
  | Float[Array, "B *T H"]
  | None,
  lengths: Int[Array, "B"],
  *,
  block_tables: Int[Array, "B N"] | None = None,
  k_scale: Float[Array, "P K"] | None = None,
  v_scale: Float[Array, "P K"] | None = None,
  window: int | None = None,
  scale: float | None = None,
  implementation: str = "auto",
  sharding: NamedSharding | PartitionSpec | None = None,
) -> Float[Array, "B *T H V"]:
  """Differential attention of the newest tokens, out = softmax(q₁k₁ᵀ·scale)v − λ·softmax(q₂k₂ᵀ·scale)v (paper §1; §2 with M = 1).

  There is one new token a row, or, if q has an axis T, the last T ones: token t of row b has position lengths[b] − T + t. Keys and values
  of the new tokens are in the cache already. A token sees the keys up to its own; what the cache holds beyond them is never used, not even
  where it is not finite. Of a group of more than two maps the last is the noise map of all others, as in `diff_attention`. Group g reads
  keys and values of key head ⌊g / (Q/K)⌋. On a mesh, pass `sharding`, or wrap the call in `shard_map` yourself. The kernels have no
  gradient.

  Args:
    q: queries of G = 2 maps, of more whose last is the noise map, or of G = 1 for plain attention.
    k: cached keys: row b's in k[b], or in pages of S tokens each. M = 2: those of the signal maps in the first D places of the last axis,
      those of the noise map in the others (V1). M = 1: shared by the maps (V2). In q's dtype, or int8. On TPU, S should be a multiple of
      128: else XLA may store the cache otherwise than the kernel reads it, and copy it for every token. A page there should hold at least
      512 KiB of keys and values over all heads, since reading less takes less time than a step of the kernel.
    v: cached values, shared by the maps; as k in all but its width.
    lam: λ as a scalar, per head, or per row, token and head; None for G = 1. Made float32 (or q's float64).
    lengths: number of tokens in each row's cache, the new ones included; 0 gives zeros. Of more than S (or N·S) tokens the cache holds the
      first ones, and a single new token counts as the last of them.
    block_tables: the pages of each row in the order of its tokens; row b's token i is in page block_tables[b, ⌊i / S⌋]. Entries behind a
      row's last page are not used. An id outside of the pool is taken for the nearest page, so that nothing beyond the pool is read. None
      for a cache without pages.
    k_scale: what int8 keys are multiplied by, one factor a page (without pages, a row) and head; None for others.
    v_scale: likewise for values.
    window: number of keys visible to a token, itself included: the last ones before it. None for all.
    scale: factor on q·k; 1/√D by default.
    implementation: "auto" (the fastest for the backend), "xla" (any backend), "pallas_tpu" (bfloat16 and float32, D up to 256, V up to 512)
      or "pallas_gpu" (Hopper; bfloat16 and float16, D up to 128, V up to 256, G·H/K up to 64; one new token, no pages, no int8). The
      kernels read only the blocks of the cache that a row sees. A name given never falls back.
    sharding: of [B, H] over a mesh, whose axes may have any names: a NamedSharding, or a PartitionSpec for the mesh of `jax.set_mesh`.
      The cache, λ and lengths are sharded likewise; each shard of B has P / shards pages, and its rows' ids count within them. The call
      then runs inside `shard_map`, each device on its own rows and heads.

  Returns:
    The heads' outputs, accumulated in at least float32, in q's dtype.

  Raises:
    ValueError: an argument is unusable, or the implementation cannot take it; the message says which, and what would work.
  """
  single = getattr(q, "ndim", 0) != 5
  _check_cache(
    q,
    k,
    v,
    "B Q G D" if single else "B T Q G D",
    block_tables,
    k_scale,
    v_scale,
  )
  q, k, v = map(jnp.asarray, (q, k, v))
  lam, q = arguments.broadcast_lambda(lam, q), arguments.repeat_noise_maps(q)
  if single:
    q, lam = q[:, None], None if lam is None else lam[:, None]
  batch, tokens, heads = q.shape[:3]
  cached = k.shape[2] * (1 if block_tables is None else block_tables.shape[1])
  if (
    not isinstance(lengths, arguments.ARRAYS)
    or lengths.shape != (batch,)
    or not jnp.issubdtype(lengths.dtype, jnp.integer)
  ):
    raise ValueError(
      f"lengths must be int32[{batch}], the tokens in each row's cache, got {arguments.describe(lengths)}"
    )
  tables = (
    None
    if block_tables is None
    else jnp.clip(
      jnp.asarray(block_tables).astype(jnp.int32), 0, k.shape[0] - 1
    )
  )
  starts = jnp.clip(
    jnp.asarray(lengths).astype(jnp.int32) - tokens, -tokens, cached - 1
  )  # the first new token's position
  window, scale = (
    arguments.check_window(window),
    arguments.check_scale(scale, q.shape[-1]),
  )
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
    )
  if implementation == "auto":
    implementation = _pick(platform(), q, v)
  attend = functools.partial(
    _attend(implementation),
    window=None if window is None else min(window, cached + tokens),
    scale=scale,
  )
  layout = None if sharding is None else AxisSharding.of(sharding, "B H")
  if layout is None:
    return _squeeze(
      attend(q, k, v, lam, starts, tables, k_scale, v_scale), single
    )
  layout.check(
    0, {"B": batch} if block_tables is None else {"B": batch, "P": k.shape[0]}
  )
  layout.check(1, {"H": heads, "K": k.shape[1]})
  rows, stored, queries = (
    layout.spec(0),
    layout.spec(0, 1),
    PartitionSpec(*layout.spec(0), None, *layout.spec(1)),
  )
  operands = [
    (q, queries),
    (k, stored),
    (v, stored),
    (lam, queries),
    (starts, rows),
    (tables, rows),
    (k_scale, stored),
    (v_scale, stored),
  ]
  return _squeeze(layout.map(attend, operands, queries), single)


def _squeeze(
  out: Float[Array, "B T H V"], single: bool
) -> Float[Array, "B *T H V"]:
  return out[:, 0] if single else out


def _attend(implementation: str) -> Callable[..., jax.Array]:
  """(q [B, T, H, G, D], k, v, λ [B, T, H], first positions [B], block tables, scales of k and v, window, scale) → [B, T, H, V]."""
  if implementation == "xla":
    return _xla
  return importlib.import_module(
    f"diffjax.ops.diff_attention.{_ROOMS[implementation]}.decode"
  ).attend


def _pick(backend: str, q: jax.Array, v: jax.Array) -> str:
  """The fastest implementation. "pallas_gpu" was timed at one shape alone (docs/performance.md), so it is not picked."""
  picked = "xla"
  if backend == "tpu":
    from diffjax.ops.diff_attention.tpu import chip

    picked = "pallas_tpu" if chip.takes(q, v) else picked
  _log_once(picked, backend)
  return picked


@functools.cache
def _log_once(picked: str, backend: str) -> None:
  logging.getLogger(__name__).info(
    "decode_attention: implementation %r on backend %r", picked, backend
  )


def _check_cache(q, k, v, queries: str, tables, k_scale, v_scale) -> None:
  quantised = getattr(k, "dtype", None) == jnp.int8
  layout = "B K S" if tables is None else "P K S"
  arguments.check_arrays(
    q,
    k,
    v,
    (queries, f"{layout} M·D", f"{layout} V"),
    jnp.int8 if quantised else None,
  )
  batch, (groups, num_maps, width) = q.shape[0], q.shape[-3:]
  if tables is None and k.shape[0] != batch:
    raise ValueError(
      f"k must share B = {batch} with q, got shape {k.shape}; pass block_tables if it is in pages"
    )
  arguments.check_heads(groups, k.shape[1])
  if k.shape[3] not in (width, min(num_maps, 2) * width):
    own = " or 2·D (those of the signal maps and of the noise map)" * (
      num_maps > 1
    )
    raise ValueError(
      f"k must have D = {width} (keys shared by the maps){own} in its last axis, got shape {k.shape}"
    )
  if v.shape[:3] != k.shape[:3]:
    raise ValueError(
      f"v must share [{layout.replace(' ', ', ')}] = {k.shape[:3]} with k, got shape {v.shape}"
    )
  if tables is not None and not (
    isinstance(tables, arguments.ARRAYS)
    and jnp.issubdtype(tables.dtype, jnp.integer)
    and tables.shape[:1] == (batch,)
    and tables.ndim == 2
    and tables.size
  ):
    raise ValueError(
      f"block_tables must be int32[{batch}, N], the pages of each row in the order of its tokens, or None for a cache without pages, got "
      f"{arguments.describe(tables)}"
    )
  for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
    if not quantised and scales is not None:
      raise ValueError(
        f"{name} must be None, since {name[0]} is {k.dtype}: only int8 has scales; got {arguments.describe(scales)}"
      )
    if quantised and not (
      isinstance(scales, arguments.ARRAYS)
      and scales.dtype == jnp.float32
      and scales.shape == k.shape[:2]
    ):
      raise ValueError(
        f"{name} must be float32{list(k.shape[:2])}, a factor a page and head, since {name[0]} is int8, got {arguments.describe(scales)}"
      )


def stack(
  q: Float[Array, "B T H G D"], k: Float[Array, "P K S M*D"], rows: int
) -> Float[Array, "B K G*rows M*D"]:
  """A group's queries, map after map, in each token after token, each map's filled up to `rows`.

  A query is zero where keys of the other map stand.
  """
  (B, T, H, G, D), K, M = q.shape, k.shape[1], k.shape[3] // q.shape[4]
  q = (
    q.reshape(B, T, K, H // K, G, D)
    .swapaxes(1, 2)
    .reshape(B, K, T * (H // K), G, D)
  )
  place = lambda g: (g % M * D, (M - 1 - g % M) * D)
  maps = [
    jnp.pad(q[:, :, :, g], ((0, 0), (0, 0), (0, rows - q.shape[2]), place(g)))
    for g in range(G)
  ]
  return jnp.concatenate(maps, axis=2)


def unstack(
  out: Float[Array, "B K rows V"], tokens: int, group: int
) -> Float[Array, "B T H V"]:
  """The outputs of a group's queries, each token's heads together."""
  B, K, _, V = out.shape
  return (
    out[:, :, : tokens * group]
    .reshape(B, K, tokens, group, V)
    .swapaxes(1, 2)
    .reshape(B, tokens, K * group, V)
  )


def _xla(
  q,
  k,
  v,
  lam,
  starts,
  tables,
  k_scale,
  v_scale,
  *,
  window: int | None,
  scale: float,
):
  """All keys at once for one new token and a cache without pages; else piece by piece, as far as the longest row goes."""
  (B, T, H, G, _), K = q.shape, k.shape[1]
  group = H // K
  at_once = tables is None and T == 1
  units, keys = (
    (k.shape[2], 1) if tables is None else (tables.shape[1], k.shape[2])
  )
  taken = (
    units
    if at_once
    else min(units, max(1, _XLA_LOGITS // (B * H * G * T * keys)))
  )
  positions = starts[:, None] + jnp.arange(T)
  pieces = _Pieces(
    queries=stack(q, k, T * group),
    positions=positions,
    group=group,
    k=k,
    v=v,
    tables=tables,
    k_scale=k_scale,
    v_scale=v_scale,
    units=units,
    keys=keys,
    taken=taken,
    window=window,
    scale=scale,
  )
  lam = (
    None
    if lam is None
    else jnp.swapaxes(lam.reshape(B, T, K, group), 1, 2).reshape(
      B, K, T * group, 1
    )
  )
  difference = lambda maps: (
    maps[:, :, 0] if lam is None else maps[:, :, 0] - lam * maps[:, :, 1]
  )
  out = (
    _at_once(pieces, difference) if at_once else difference(_in_turn(pieces))
  )
  return unstack(out, T, group).astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class _Pieces:
  """The cache as XLA's form reads it: in units, which are tokens or pages, and several of them at once."""

  queries: Float[Array, "B K G*T*group M*D"]
  positions: Int[Array, "B T"]
  group: int  # query heads of a key head
  k: jax.Array
  v: jax.Array
  tables: Int[Array, "B N"] | None
  k_scale: Float[Array, "P K"] | None
  v_scale: Float[Array, "P K"] | None
  units: int  # that a row has
  keys: int  # of a unit
  taken: int  # units of a piece
  window: int | None
  scale: float

  @property
  def dtype(self):
    """That sums are in."""
    return jnp.promote_types(jnp.float32, self.queries.dtype)

  def by_map(self, x: jax.Array) -> Float[Array, "B K G N X"]:
    B, K, rows, _ = self.queries.shape
    N = self.positions.shape[1] * self.group
    return x.reshape(B, K, rows // N, N, -1)

  def each_row(self, visible: Bool[Array, "B T S"]) -> Bool[Array, "B 1 1 N S"]:
    return jnp.repeat(visible, self.group, axis=1)[:, None, None]

  def logits(
    self, first, begin=0
  ) -> tuple[Float[Array, "B K G N S"], Bool[Array, "B T S"]]:
    """Logits of a piece from its unit `first` on, and which of its keys each token sees, none before key `begin`."""
    key = first * self.keys + jnp.arange(self.taken * self.keys)
    behind = self.positions[..., None] - key
    visible = (behind >= 0) & (key >= begin)
    if self.window is not None:
      visible &= behind < self.window
    logits = (
      self._product(
        "bknd,bksd->bkns",
        self.queries,
        self._take(self.k, first).astype(self.queries.dtype),
      )
      * self.scale
    )
    if self.k_scale is not None:
      logits *= self._factor(self.k_scale, first)
    return jnp.where(
      self.each_row(visible), self.by_map(logits), MASKED_LOGIT
    ), visible

  def sums(
    self, weights: Float[Array, "B K N S"], visible: Bool[Array, "B T S"], first
  ) -> Float[Array, "B K N V"]:
    """Sums of a piece's values. No weight is on a hidden value."""
    by_any = jnp.any(visible, axis=1)[
      :, None, :, None
    ]  # hidden values, and scales, may not be finite, and 0·NaN is NaN
    if self.v_scale is not None:
      weights *= jnp.where(
        by_any[:, :, None, :, 0], self._factor(self.v_scale, first), 0
      )
    weights = weights.astype(self.queries.dtype)
    product = lambda v: self._product("bkns,bksv->bknv", weights, v)
    seen = lambda v: product(jnp.where(by_any, v, 0))

    def unless_spoilt(v):
      out = product(v)
      return lax.cond(jnp.all(jnp.isfinite(out)), lambda v: out, seen, v)

    # A TPU blends hidden values out while it multiplies. A CPU would copy the values first and take three times as long over everything, so
    # there the copy is made only if the sum came out spoilt; elsewhere the host would have to wait for that answer.
    return lax.platform_dependent(
      self._take(self.v, first).astype(self.queries.dtype),
      cpu=unless_spoilt,
      default=seen,
    )

  def _take(self, x, first):
    """[P, K, S, …] → [B, K, keys taken, …]."""
    if self.tables is None:
      return (
        x
        if self.taken == self.units
        else lax.dynamic_slice_in_dim(x, first, self.taken, axis=2)
      )
    K = x.shape[1]
    rows = x[
      lax.dynamic_slice_in_dim(self.tables, first, self.taken, axis=1)[:, None],
      jnp.arange(K)[:, None],
    ]
    return rows.reshape(
      len(self.tables), K, self.taken * self.keys, *x.shape[3:]
    )

  def _factor(self, scales, first):
    """The scales of the keys taken."""
    of_keys = jnp.broadcast_to(
      scales[..., None], (*scales.shape, self.k.shape[2])
    )
    return self._take(of_keys, first)[:, :, None]

  def _product(self, axes: str, a, b):
    precision = (
      lax.Precision.HIGHEST
      if self.queries.dtype == jnp.float32
      else lax.Precision.DEFAULT
    )
    return jnp.einsum(
      axes, a, b, preferred_element_type=self.dtype, precision=precision
    )


def _at_once(pieces: _Pieces, difference: Callable) -> Float[Array, "B K N V"]:
  """One piece is all: the maps' difference needs V once."""
  logits, visible = pieces.logits(0)
  weights = difference(jax.nn.softmax(logits, axis=-1))
  weights = jnp.where(
    pieces.each_row(visible)[:, 0], weights, 0
  )  # a row that sees no key has weights until here
  return pieces.sums(weights, visible, 0)


def _in_turn(pieces: _Pieces) -> Float[Array, "B K G N V"]:
  """Each map's output, piece by piece."""
  (B, K, rows, _), piece, V = (
    pieces.queries.shape,
    pieces.taken * pieces.keys,
    pieces.v.shape[-1],
  )

  def step(index, state):
    peak, total, acc = state
    first = jnp.minimum(
      index * pieces.taken, pieces.units - pieces.taken
    )  # the last piece may begin within the one before
    logits, visible = pieces.logits(first, index * piece)
    after = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
    weights, shrink = (
      jnp.where(pieces.each_row(visible), jnp.exp(logits - after), 0),
      jnp.exp(peak - after),
    )
    total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
    return (
      after,
      total,
      acc * shrink
      + pieces.by_map(
        pieces.sums(weights.reshape(B, K, rows, -1), visible, first)
      ),
    )

  def empty(width: int, value: float):
    return vary_like(
      pieces.by_map(jnp.full((B, K, rows, width), value, pieces.dtype)),
      pieces.queries,
      pieces.k,
      pieces.v,
      pieces.positions,
    )

  oldest, newest = jnp.min(pieces.positions), jnp.max(pieces.positions)
  first = (
    0
    if pieces.window is None
    else jnp.maximum(oldest - pieces.window + 1, 0) // piece
  )
  last = jnp.minimum(newest + 1, pieces.units * pieces.keys)
  _, total, acc = lax.fori_loop(
    first,
    -(-last // piece),
    step,
    (empty(1, MASKED_LOGIT), empty(1, 0), empty(V, 0)),
  )
  return acc / jnp.where(total == 0, 1, total)
