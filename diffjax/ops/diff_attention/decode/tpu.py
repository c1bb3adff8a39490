"""Decoding on TPU, with a kernel that reads only visible blocks of the cache.

A block holds keys and values of several key heads: all keys of a page, or a
part of them. The grid lists the blocks that each sequence sees, one sequence
after the other. Its length is the number of these blocks, which is known when
the program runs. No step is idle, even if one sequence is much longer than the
others.

Axis letters in addition to `__init__.py`:
  h: key heads of a block.
  r: rows of a map, R rounded up to tiles.
  s: keys of a block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from diffjax.ops.diff_attention.arguments import variant_name
from diffjax.ops.diff_attention.decode.inputs import (
  DecodeInputs,
  stack_lambda,
  stack_queries,
  unstack_outputs,
  vary_alike,
)
from diffjax.ops.diff_attention.tiles import (
  LOG2E,
  MASKED_LOGIT,
  Scalar,
  round_up,
)
from diffjax.ops.diff_attention.tpu import chip
from diffjax.ops.diff_attention.tpu.chip import LANES, dot, repeat

# Keys and values of a block. With smaller blocks the overhead of a step shows.
# With larger ones, short sequences read many keys that they do not see.
BLOCK_BYTES = 1 << 20
# Logits of a block: 1 MiB in float32. Its weights take as much.
_BLOCK_LOGITS = 1 << 18
# The kernel's code is repeated for each key head of a block.
_MAX_BLOCK_HEADS = 8

# The rows of a tile in VMEM: 8 · 4 bytes, or 16 · 2 bytes.
_FLOAT32_TILE_ROWS = 8
_BFLOAT16_TILE_ROWS = 16


def decode_attention_tpu(
  inputs: DecodeInputs, *, window: int | None, scale: float
) -> Float[Array, "B T H V"]:
  """Returns the result of `decode_attention`, computed by the TPU kernel.

  Raises:
    ValueError: if the program is not for a TPU, or if the kernel does not
      support a dtype or width.
  """
  chip.generation(otherwise="xla")
  chip.check(inputs.q, inputs.v, otherwise="xla")

  batch, tokens, num_heads, num_maps, _ = inputs.q.shape
  _, num_kv_heads, page_size, _ = inputs.k.shape
  heads_per_kv_head = num_heads // num_kv_heads
  num_rows = tokens * heads_per_kv_head
  rows_per_map = _padded_rows(num_rows, num_maps, inputs.q.dtype)

  block_tables = inputs.block_tables
  if block_tables is None:
    block_tables = jnp.arange(batch, dtype=jnp.int32)[:, None]  # [B, 1]
  blocks = Blocks.choose(
    page_size=page_size,
    pages_per_sequence=block_tables.shape[1],
    window=window,
    tokens=tokens,
    bytes_per_key=_bytes_per_key(inputs),
    num_kv_heads=num_kv_heads,
    query_rows=num_maps * rows_per_map,
    num_cores=chip.cores(),
  )

  # The kernel uses powers of 2, since exp(x) = 2^(x · log₂e).
  q = inputs.q.astype(jnp.float32) * (scale * LOG2E)
  q = stack_queries(q.astype(inputs.q.dtype), inputs.k, rows_per_map)
  lam = inputs.lam
  if lam is not None:
    lam = stack_lambda(lam, num_kv_heads)  # [B, K, R, 1]
    padding_rows = (0, rows_per_map - num_rows)
    lam = jnp.pad(lam, ((0, 0), (0, 0), padding_rows, (0, 0)))

  num_key_maps = inputs.k.shape[-1] // inputs.q.shape[-1]
  out = _call_kernel(
    inputs._replace(q=q, lam=lam, block_tables=block_tables),
    blocks,
    rows_per_map,
    heads_per_kv_head,
    name=f"diff_attention_decode_{variant_name(num_maps, num_key_maps)}",
  )
  return unstack_outputs(out, tokens, heads_per_kv_head)


def _padded_rows(num_rows: int, num_maps: int, dtype: Any) -> int:
  """Returns the rows of a map, rounded up to tiles.

  The sums of each map begin at a tile of float32. The queries of all maps
  together fill tiles of their own dtype.
  """
  if dtype == jnp.bfloat16:
    return round_up(num_rows, _BFLOAT16_TILE_ROWS // num_maps)
  return round_up(num_rows, _FLOAT32_TILE_ROWS)


def _bytes_per_key(inputs: DecodeInputs) -> int:
  """Returns the bytes of a key and its value, of one head."""
  numbers_per_key = inputs.k.shape[-1] + inputs.v.shape[-1]
  return numbers_per_key * inputs.k.dtype.itemsize


class _Grid(NamedTuple):
  """The steps of the kernel. Each step reads one block for one sequence."""

  num_steps: Int[Array, ""]
  sequence: Int[Array, "steps"]
  # The number of the block in the pool: page id · blocks per page + block.
  pool_block: Int[Array, "steps"]
  # The number of the block in the cache of the sequence.
  sequence_block: Int[Array, "steps"]


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How the cache is divided into blocks, and which ones a sequence sees."""

  window: int | None
  tokens: int  # new tokens of a sequence
  page_size: int  # keys of a page
  pages_per_sequence: int
  block_size: int  # keys of a block
  num_heads: int  # key heads of a block

  @classmethod
  def choose(
    cls,
    page_size: int,
    pages_per_sequence: int,
    window: int | None,
    tokens: int,
    bytes_per_key: int,
    num_kv_heads: int,
    query_rows: int,
    num_cores: int,
  ) -> Blocks:
    """Returns the largest blocks within the limits.

    Args:
      page_size: keys of a page.
      pages_per_sequence: pages of a sequence.
      window: how many keys a token sees. None for all.
      tokens: new tokens of a sequence.
      bytes_per_key: bytes of a key and its value, of one head.
      num_kv_heads: K.
      query_rows: rows of queries of one key head, over all maps.
      num_cores: how many cores share the key heads.
    """
    # The bytes of a block are heads · keys · bytes_per_key, and its logits are
    # heads · keys · query_rows. A block has at least LANES keys, and first gets
    # as many heads as that allows.
    max_heads = min(
      _MAX_BLOCK_HEADS,
      BLOCK_BYTES // (LANES * bytes_per_key),
      _BLOCK_LOGITS // (LANES * query_rows),
      num_kv_heads // num_cores,
    )
    num_heads = max(1, max_heads)
    while num_kv_heads % num_heads != 0:  # all blocks have as many heads
      num_heads -= 1

    # Then it gets as many keys as the limits allow, in whole lanes.
    max_keys = min(
      BLOCK_BYTES // (num_heads * bytes_per_key),
      _BLOCK_LOGITS // (num_heads * query_rows),
    )
    max_keys = max(LANES, max_keys // LANES * LANES)

    # The keys of a page that a sequence may see are divided evenly. Without
    # pages (one page per sequence), a window limits them.
    num_visible = page_size
    if window is not None and pages_per_sequence == 1:
      num_visible = min(page_size, window + tokens - 1)
    num_blocks = pl.cdiv(num_visible, max_keys)
    block_size = round_up(pl.cdiv(num_visible, num_blocks), LANES)
    return cls(
      window=window,
      tokens=tokens,
      page_size=page_size,
      pages_per_sequence=pages_per_sequence,
      block_size=block_size,
      num_heads=num_heads,
    )

  @property
  def blocks_per_page(self) -> int:
    return pl.cdiv(self.page_size, self.block_size)

  @property
  def blocks_per_sequence(self) -> int:
    return self.pages_per_sequence * self.blocks_per_page

  def block_of_key(self, key: Scalar) -> Scalar:
    """Returns the number of the block in its sequence that has a key."""
    page = lax.div(key, self.page_size)
    block_of_page = lax.div(lax.rem(key, self.page_size), self.block_size)
    return page * self.blocks_per_page + block_of_page

  def visible_blocks(self, first_position: Scalar) -> tuple[Scalar, Scalar]:
    """Returns the numbers of the first and the last block that tokens see.

    The tokens are the new ones of a sequence. If they see no key, it returns
    block 0, because each sequence needs a step that writes its output.

    Args:
      first_position: the position of the first new token of a sequence.
    """
    # The position is negative if a sequence has fewer keys than new tokens.
    last_key = jnp.maximum(first_position + self.tokens - 1, 0)
    if self.window is None:
      first_key = 0 * first_position  # zeros of the same shape
    else:
      first_key = jnp.maximum(first_position - self.window + 1, 0)
    first_block = self.block_of_key(first_key)
    last_key = jnp.minimum(
      last_key, self.pages_per_sequence * self.page_size - 1
    )
    return first_block, self.block_of_key(last_key)

  def grid(
    self, first_positions: Int[Array, "B"], block_tables: Int[Array, "B N"]
  ) -> _Grid:
    """Returns the grid: one step for each block that a sequence sees.

    The steps of a sequence are consecutive, in the order of its blocks.

    Example:
      Sequence 0 sees its blocks 0 and 1, and sequence 1 sees blocks 2 to 4:
      sequence = [0, 0, 1, 1, 1], sequence_block = [0, 1, 2, 3, 4]

    Args:
      first_positions: the position of each sequence's first new token.
      block_tables: the ids of each sequence's pages.
    """
    first_block, last_block = self.visible_blocks(first_positions)
    num_blocks = last_block - first_block + 1  # of each sequence
    stop_step = jnp.cumsum(num_blocks)  # one after its last step

    # The arrays have the length of the longest possible grid. Entries after
    # `num_steps` are unused, and only need valid indices.
    batch = first_positions.shape[0]
    step = jnp.arange(batch * self._max_visible_blocks())
    # The sequence of a step is the number of sequences that end before it.
    sequence = jnp.sum(step[:, None] >= stop_step, axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, batch - 1)
    # The last step of a sequence, stop_step − 1, reads its last visible block.
    block = step - stop_step[sequence] + 1 + last_block[sequence]
    block = jnp.minimum(block, self.blocks_per_sequence - 1)
    page_id = block_tables[sequence, block // self.blocks_per_page]
    block_of_page = block % self.blocks_per_page
    return _Grid(
      num_steps=stop_step[-1],
      sequence=sequence,
      pool_block=page_id * self.blocks_per_page + block_of_page,
      sequence_block=block,
    )

  def _max_visible_blocks(self) -> int:
    """Returns the largest number of blocks that a sequence may see."""
    if self.window is None:
      return self.blocks_per_sequence
    # The new tokens see `window + tokens − 1` consecutive keys. The last of
    # these keys is `distance` keys after the first one. If the page size is a
    # multiple of the block size, the keys lie in at most
    # ceil(distance / block_size) + 1 blocks. Otherwise each page ends with a
    # shorter block, and the keys cross up to ceil(distance / page_size) ends.
    distance = self.window + self.tokens - 2
    max_blocks = pl.cdiv(distance, self.block_size) + 1
    if self.page_size % self.block_size != 0:
      max_blocks += pl.cdiv(distance, self.page_size)
    return min(self.blocks_per_sequence, max_blocks)


class _KernelArrays(NamedTuple):
  """The arrays that the kernel reads in blocks, or their specs or refs.

  The comments say the shape of the array, and then the shape of a block.
  """

  q: Any  # [B, K, G·r, M·D], [h, G·r, M·D]
  k: Any  # [P, K, S, M·D], [h, s, M·D]; or transposed, see _stored_key_axis
  v: Any  # [P, K, S, V], [h, s, V]; or transposed
  # [P, head_blocks, 1, h], [1, h] in SMEM; None unless k and v are int8
  k_scale: Any
  v_scale: Any
  lam: Any  # [B, K, r, 1], [h, r, 1]; None with one map


class _SumRefs(NamedTuple):
  """The softmax over the blocks that were read so far, in scratch memory."""

  maximum: Any  # [h, G·r, 128], of the logits, equal in all lanes
  weight_sum: Any  # [h, G·r, 128], whose sum over the lanes is the total
  value_sum: Any  # [h, G·r, V]


def _call_kernel(
  inputs: DecodeInputs,
  blocks: Blocks,
  rows_per_map: int,
  group_size: int,
  name: str,
) -> Float[Array, "B K r V"]:
  """Runs the kernel over all visible blocks.

  Args:
    inputs: the arguments, except that q is [B, K, G·r, M·D] and scaled, λ is
      [B, K, r, 1], and block tables are never None.
    blocks: how the cache is divided.
    rows_per_map: r.
    group_size: how many query heads share a key head.
    name: the name of the kernel in profiles.
  """
  batch, num_kv_heads, query_rows, key_width = inputs.q.shape
  value_width = inputs.v.shape[-1]
  k_axis = _stored_key_axis(inputs.k)
  v_axis = _stored_key_axis(inputs.v)

  arrays = _KernelArrays(
    q=inputs.q,
    k=inputs.k,
    v=inputs.v,
    k_scale=_split_heads(inputs.k_scale, blocks.num_heads),
    v_scale=_split_heads(inputs.v_scale, blocks.num_heads),
    lam=inputs.lam,
  )
  if k_axis == 1:
    arrays = arrays._replace(k=jnp.swapaxes(inputs.k, 2, 3))
  if v_axis == 1:
    arrays = arrays._replace(v=jnp.swapaxes(inputs.v, 2, 3))
  first_positions, block_tables, arrays = vary_alike(
    (inputs.first_positions, inputs.block_tables, arrays)
  )
  grid = blocks.grid(first_positions, block_tables)

  row_sums = pltpu.VMEM((blocks.num_heads, query_rows, LANES), jnp.float32)
  value_sums = pltpu.VMEM(
    (blocks.num_heads, query_rows, value_width), jnp.float32
  )
  in_specs = _KernelArrays(
    q=_sequence_spec(blocks, query_rows, key_width),
    k=_cache_spec(blocks, key_width, k_axis),
    v=_cache_spec(blocks, value_width, v_axis),
    k_scale=_scale_spec(blocks, arrays.k_scale),
    v_scale=_scale_spec(blocks, arrays.v_scale),
    lam=None,
  )
  if arrays.lam is not None:
    in_specs = in_specs._replace(lam=_sequence_spec(blocks, rows_per_map, 1))
  return pl.pallas_call(
    functools.partial(_kernel, blocks, (k_axis, v_axis), group_size),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(num_kv_heads // blocks.num_heads, grid.num_steps),
      in_specs=list(in_specs),
      out_specs=_sequence_spec(blocks, rows_per_map, value_width),
      scratch_shapes=[row_sums, row_sums, value_sums],
    ),
    out_shape=jax.ShapeDtypeStruct(
      (batch, num_kv_heads, rows_per_map, value_width),
      inputs.q.dtype,
      manual_axis_type=jax.typeof(arrays.q).manual_axis_type,
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    cost_estimate=_estimate_cost(inputs),
    interpret=chip.interpret_mode.get(),
    name=name,
  )(
    grid.sequence,
    grid.pool_block,
    grid.sequence_block,
    first_positions,
    *arrays,
  )


def _stored_key_axis(cache: Float[Array, "P K S X"]) -> int:
  """Returns 0 if XLA stores a page as [keys, width], and 1 if transposed.

  XLA pads the last two axes of an array to tiles of 8 × 128, and stores them in
  the order that needs less padding. The kernel must read the cache in that
  order. Otherwise, XLA would copy the whole cache for every token.

  Example: a page of 128 keys of width 64 takes 128 × 128 numbers, and 64 × 128
  if it is transposed. So the result is 1.

  Args:
    cache: the keys or the values: P pages of S keys with width X.
  """
  num_keys, width = cache.shape[2:]
  padded_size = round_up(num_keys, 8) * round_up(width, LANES)
  transposed_size = round_up(width, 8) * round_up(num_keys, LANES)
  if transposed_size < padded_size:
    return 1
  return 0


def _split_heads(
  scales: Float[Array, "P K"] | None, num_heads: int
) -> Float[Array, "P head_blocks 1 h"] | None:
  """Returns scales with the key heads split into blocks of `num_heads`."""
  if scales is None:
    return None
  num_pages, num_kv_heads = scales.shape
  num_head_blocks = num_kv_heads // num_heads
  return scales.reshape(num_pages, num_head_blocks, 1, num_heads)


def _sequence_spec(blocks: Blocks, num_rows: int, width: int) -> pl.BlockSpec:
  """Returns which part of q, λ or the output a step of the kernel uses.

  It is the part of the step's sequence and block of heads, [h, rows, width].
  """

  def block_index(head_block, step, sequence, *unused_scalars):
    return sequence[step], head_block, 0, 0

  block_shape = (None, blocks.num_heads, num_rows, width)
  return pl.BlockSpec(block_shape, block_index)


def _cache_spec(blocks: Blocks, width: int, key_axis: int) -> pl.BlockSpec:
  """Returns which keys or values a step of the kernel reads.

  Args:
    blocks: how the cache is divided into blocks.
    width: the width of a key or a value.
    key_axis: 0 if the kernel reads blocks [h, keys, width], and 1 if it reads
      [h, width, keys].
  """

  def block_index(head_block, step, sequence, pool_block, *unused_scalars):
    # All blocks of the pool are numbered, page after page.
    page = lax.div(pool_block[step], blocks.blocks_per_page)
    block_of_page = lax.rem(pool_block[step], blocks.blocks_per_page)
    # A block has all columns of its keys, so the index of columns is 0.
    if key_axis == 0:
      return page, head_block, block_of_page, 0
    return page, head_block, 0, block_of_page

  block_shape = (None, blocks.num_heads, blocks.block_size, width)
  if key_axis == 1:
    block_shape = (None, blocks.num_heads, width, blocks.block_size)
  return pl.BlockSpec(block_shape, block_index)


def _scale_spec(
  blocks: Blocks, scales: Float[Array, "P head_blocks 1 h"] | None
) -> pl.BlockSpec | None:
  """Returns which scales of int8 keys or values a step of the kernel reads.

  Each page has one scale per key head. A step attends to a block of keys, which
  lie in one page and belong to h heads. So it reads h scales of that page.

  Args:
    blocks: how the cache is divided into blocks.
    scales: from `_split_heads`. None if keys and values are not int8.
  """
  if scales is None:
    return None

  def block_index(head_block, step, sequence, pool_block, *unused_scalars):
    # All blocks of the pool are numbered, page after page.
    page = lax.div(pool_block[step], blocks.blocks_per_page)
    return page, head_block, 0, 0

  # The kernel sees [1, h]. None removes the axes of pages and blocks of heads.
  block_shape = (None, None, 1, blocks.num_heads)
  return pl.BlockSpec(block_shape, block_index, memory_space=pltpu.SMEM)


def _estimate_cost(inputs: DecodeInputs) -> pl.CostEstimate:
  """Returns the cost of the kernel if all sequences have the maximum length."""
  batch, num_kv_heads, query_rows, key_width = inputs.q.shape
  page_size, value_width = inputs.v.shape[2:]
  assert inputs.block_tables is not None
  pages_per_sequence = inputs.block_tables.shape[1]
  num_keys = batch * num_kv_heads * pages_per_sequence * page_size
  num_logits = num_keys * query_rows
  # Each logit is a product with a key. Its weight multiplies a value.
  multiply_adds = num_logits * (key_width + value_width)
  return pl.CostEstimate(
    flops=2 * multiply_adds,
    transcendentals=num_logits,  # an exponential for each logit
    bytes_accessed=num_keys * _bytes_per_key(inputs),
  )


def _kernel(
  blocks: Blocks,
  key_axes: tuple[int, int],
  group_size: int,
  sequence_ref,
  pool_block_ref,
  sequence_block_ref,
  first_position_ref,
  q_ref,
  k_ref,
  v_ref,
  k_scale_ref,
  v_scale_ref,
  lam_ref,
  out_ref,
  maximum_ref,
  weight_sum_ref,
  value_sum_ref,
) -> None:
  """Attends from one sequence to one block of its cache.

  The grid is [blocks of key heads, steps of `_Grid`]. The first four refs are
  scalars: the fields of `_Grid`, and the position of the first new token of
  each sequence. The next six have the blocks of `_KernelArrays`. The output is
  [h, r, V]. The last three are scratch memory, which has the shapes of
  `_SumRefs` and keeps its values from step to step.
  """
  del pool_block_ref  # only the block specs need it
  arrays = _KernelArrays(q_ref, k_ref, v_ref, k_scale_ref, v_scale_ref, lam_ref)
  sums = _SumRefs(maximum_ref, weight_sum_ref, value_sum_ref)

  # `step` is used only as an index, because inside shard_map the interpreter
  # cannot add to it.
  step = pl.program_id(1)
  first_token = first_position_ref[sequence_ref[step]]
  block = sequence_block_ref[step]
  first_block, last_block = blocks.visible_blocks(first_token)

  # The keys of the block are `first_key` to `stop_key − 1`.
  page = lax.div(block, blocks.blocks_per_page)
  block_of_page = lax.rem(block, blocks.blocks_per_page)
  first_key = page * blocks.page_size + block_of_page * blocks.block_size
  block_end = first_key + blocks.block_size
  page_end = (page + 1) * blocks.page_size
  stop_key = jnp.minimum(block_end, page_end)

  # A block needs no mask if it ends within its page, the first token sees its
  # last key, and the last token sees its first key.
  is_fully_visible = (first_token + 1 >= block_end) & (stop_key == block_end)
  if blocks.window is not None:
    first_key_of_last_token = first_token + blocks.tokens - blocks.window
    is_fully_visible &= first_key_of_last_token <= first_key
  sees_any_key = first_token + blocks.tokens > 0

  @pl.when(block == first_block)
  def _start_sequence():
    sums.maximum[...] = jnp.full_like(sums.maximum, MASKED_LOGIT)
    sums.weight_sum[...] = jnp.zeros_like(sums.weight_sum)
    sums.value_sum[...] = jnp.zeros_like(sums.value_sum)

  @pl.when(is_fully_visible)
  def _add_visible_block():
    for head in range(blocks.num_heads):
      _add_head(head, arrays, sums, key_axes)

  @pl.when(~is_fully_visible & sees_any_key)
  def _add_masked_block():
    mask = _BlockMask(
      first_key=first_key,
      stop_key=stop_key,
      first_token=first_token,
      tokens=blocks.tokens,
      window=blocks.window,
      group_size=group_size,
      rows_per_map=out_ref.shape[1],
    )
    for head in range(blocks.num_heads):
      _add_head(head, arrays, sums, key_axes, mask)

  @pl.when(block == last_block)
  def _write_output():
    for head in range(blocks.num_heads):
      _write_head(head, sums, lam_ref, out_ref)


@dataclasses.dataclass(frozen=True)
class _BlockMask:
  """Which keys of a block the new tokens of a sequence see."""

  first_key: Scalar
  stop_key: Scalar  # the end of the block or of its page
  first_token: Scalar  # the position of the first new token
  tokens: int
  window: int | None
  group_size: int  # query heads of a key head
  rows_per_map: int

  def visible_keys(self, shape: tuple[int, ...]) -> Bool[Array, "G*r s"]:
    """Returns which keys of the block each query of a key head sees.

    The rows of the result are queries, map after map. A map has `group_size`
    consecutive rows for each new token, one per head: with 2 heads, rows 0 and
    1 belong to token 0, rows 2 and 3 to token 1. So row i belongs to token
    t = ⌊i / group_size⌋, which sees the keys up to position first_token + t:

      key − first_token ≤ t,  or  (key − first_token) · group_size ≤ i

    The second form is equal for integers, and needs no division.
    """
    key = self.first_key + lax.broadcasted_iota(jnp.int32, shape, 1)
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    is_noise_map = row >= self.rows_per_map
    row_of_map = jnp.where(is_noise_map, row - self.rows_per_map, row)

    visible = key < self.stop_key
    distance = key - self.first_token
    visible &= distance * self.group_size <= row_of_map
    if self.window is not None:
      # The query of token t sees the keys after first_token + t − window.
      visible &= (distance + self.window) * self.group_size > row_of_map
    return visible

  def mask_values(
    self, values: Float[Array, "s V"], key_axis: int
  ) -> Float[Array, "s V"]:
    """Replaces values that no new token sees by 0.

    They may be NaN or infinite, and 0·NaN is NaN.

    Args:
      values: the values of the block, of one key head, or their transpose.
      key_axis: the axis of keys, 0 or 1.
    """
    iota = lax.broadcasted_iota(jnp.int32, values.shape, key_axis)
    key = self.first_key + iota
    visible = key < self.stop_key
    visible &= key < self.first_token + self.tokens  # seen by the last token
    if self.window is not None:
      # The first token sees the oldest keys.
      visible &= key > self.first_token - self.window
    # In float32, because not every TPU selects in bfloat16.
    masked = jnp.where(visible, values.astype(jnp.float32), 0)
    return masked.astype(values.dtype)


def _add_head(
  head: int,
  arrays: _KernelArrays,
  sums: _SumRefs,
  key_axes: tuple[int, int],
  mask: _BlockMask | None = None,
) -> None:
  """Adds the block's keys and values of one key head to its sums.

  Args:
    head: the number of the key head in the block.
    arrays: the queries and the block.
    sums: the sums, which are updated.
    key_axes: the axes of keys in the blocks of k and v.
    mask: None if all tokens see all keys.
  """
  k_axis, v_axis = key_axes
  queries = arrays.q[head]  # [G·r, M·D]
  keys = arrays.k[head].astype(queries.dtype)
  logits = dot(queries, keys, (1, 1 - k_axis))  # [G·r, s]
  values = arrays.v[head].astype(queries.dtype)
  if arrays.k_scale is not None:
    logits *= arrays.k_scale[0, head]
  if mask is not None:
    visible = mask.visible_keys(logits.shape)
    logits = jnp.where(visible, logits, MASKED_LOGIT)
    values = mask.mask_values(values, v_axis)

  old_maximum = sums.maximum[head]  # [G·r, 128]
  block_maximum = jnp.max(logits, axis=1, keepdims=True)
  maximum = jnp.maximum(old_maximum, block_maximum)
  block_size = logits.shape[1]
  weights = jnp.exp2(logits - repeat(maximum, block_size))
  correction = jnp.exp2(old_maximum - maximum)
  if mask is not None:
    # If a query has seen no key yet, logits − maximum is 0 and weights are 1.
    weights = jnp.where(visible, weights, 0)

  weight_sum = _sum_to_lanes(weights)  # [G·r, 128]
  sums.weight_sum[head] = sums.weight_sum[head] * correction + weight_sum
  sums.maximum[head] = maximum
  if arrays.v_scale is not None:
    weights *= arrays.v_scale[0, head]
  correction = repeat(correction, sums.value_sum.shape[2])  # [G·r, V]
  value_sum = dot(weights, values, (1, v_axis))
  sums.value_sum[head] = sums.value_sum[head] * correction + value_sum


def _sum_to_lanes(weights: Float[Array, "rows s"]) -> Float[Array, "rows 128"]:
  """Returns the sum over the columns that have the same lane."""
  total = weights[:, :LANES]
  for start in range(LANES, weights.shape[1], LANES):
    total = total + weights[:, start : start + LANES]
  return total


def _write_head(head: int, sums: _SumRefs, lam_ref, out_ref) -> None:
  """Writes the output A₁V − λA₂V of the queries of one key head.

  Args:
    head: the number of the key head in the block.
    sums: the sums over all keys. The rows of the signal maps come first, then
      the rows of the noise maps.
    lam_ref: λ, [h, rows_per_map, 1]. None with one map.
    out_ref: the output, [h, rows_per_map, V].
  """
  # The sum of a row is spread over the lanes.
  weight_sum = jnp.sum(sums.weight_sum[head], axis=1, keepdims=True)
  # A query that sees no key has sums of 0, and gets an output of 0.
  weight_sum = jnp.where(weight_sum == 0, 1.0, weight_sum)
  map_outputs = sums.value_sum[head] / weight_sum  # [G·r, V]
  if lam_ref is None:
    out = map_outputs
  else:
    rows_per_map = out_ref.shape[1]
    signal = map_outputs[:rows_per_map]
    noise = map_outputs[rows_per_map:]
    out = signal - lam_ref[head] * noise
  out_ref[head] = out.astype(out_ref.dtype)
