"""`decode_attention`: checks its arguments and runs an implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.arguments import (
  broadcast_lambda,
  check_scale,
  check_window,
  repeat_noise_maps,
)
from diffjax.ops.diff_attention.decode.arguments import (
  check_cache,
  check_lengths,
)
from diffjax.ops.diff_attention.decode.choice import choose
from diffjax.ops.diff_attention.decode.implementations import DECODERS
from diffjax.ops.diff_attention.decode.inputs import (
  DecodeImplementation,
  DecodeInputs,
)
from diffjax.ops.diff_attention.sharded import AxisSharding
from diffjax.ops.platform import platform


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
  """Returns the differential attention of each sequence's newest tokens.

  out = softmax(q₁k₁ᵀ · scale) v − λ · softmax(q₂k₂ᵀ · scale) v
  (arXiv:2410.05258, eq. 1)

  The cache already contains the keys and values of the new tokens. Each
  sequence has one new token or, if q has an axis T, T new tokens. Token t of
  sequence b has position lengths[b] − T + t. A token sees the keys up to its
  own. Keys and values that no token sees have no effect, even if they are NaN.

  Query group g reads key head ⌊g / (Q/K)⌋. A group of more than two maps has
  several signal maps and then one noise map, which is subtracted from each.

  The kernels have no gradient. On a mesh, pass `sharding` or call the function
  inside `shard_map`.

  Args:
    q: queries. G is 2 or more for differential attention, 1 for plain
      attention.
    k: cached keys. The keys of sequence b are in k[b], or in pages of S tokens.
      If each map has its own keys (M = 2, version 1), the first D columns are
      for the signal maps, and the others for the noise map. If the maps share
      keys, M = 1 (version 2). The dtype is q's or int8.
      On TPU, S should be a multiple of 128. Otherwise XLA may use another
      layout than the kernel, and copy the cache for every token. A page should
      hold at least 512 KiB of keys and values over all heads, because reading
      less takes less time than a step of the kernel.
    v: cached values, shared by the maps. Only the last axis differs from k.
    lam: λ, as a scalar, per head, or per sequence, token and head. None if
      G = 1. It is converted to float32, or to float64 if q is float64.
    lengths: the number of tokens of each sequence, including the new ones. A
      length of 0 gives zeros. If a length exceeds the capacity, S or N·S, the
      cache has the first tokens of the sequence, and a single new token counts
      as the last one of these.
    block_tables: the page ids of each sequence. Token i of sequence b is in
      page block_tables[b, ⌊i / S⌋]. Entries after the last page are unused. Ids
      outside the pool are clipped, so nothing outside of it is read. None for a
      cache without pages.
    k_scale: the factors of int8 keys, for each head of a page (of a sequence,
      without pages). None for other dtypes.
    v_scale: the factors of int8 values, as `k_scale`.
    window: how many keys a token sees, including its own. None for all.
    scale: the factor on q·k. None for 1/√D.
    implementation: "auto" for the fastest one on this backend, or a name. A
      name never falls back to another implementation.
      "xla": any backend.
      "pallas_tpu": bfloat16 and float32, D up to 256, V up to 512. Reads only
        the blocks of the cache that a sequence sees.
      "pallas_gpu": Hopper, bfloat16 and float16, D up to 128, V up to 256,
        G·H/K up to 64, one new token, no pages, no int8. Reads only the blocks
        that a sequence sees.
    sharding: how [B, H] is sharded over a mesh. A NamedSharding, or a
      PartitionSpec for the mesh of `jax.set_mesh`. Its mesh axes may have any
      names. The cache, λ and lengths are sharded in the same way. Each shard of
      B has an equal part of the P pages, and its page ids count within that
      part. The call runs inside `shard_map`.

  Returns:
    The outputs of the heads in q's dtype. They are accumulated in at least
    float32.

  Raises:
    ValueError: if an argument is invalid, or if the implementation does not
      support it. The message says how to fix it.
  """
  check_cache(q, k, v, block_tables, k_scale, v_scale)
  check_lengths(lengths, batch=q.shape[0])
  window = check_window(window)
  scale = check_scale(scale, q.shape[-1])
  DECODERS.check(implementation)

  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  lam = broadcast_lambda(lam, q)  # [B, H] or [B, T, H]
  q = repeat_noise_maps(q)  # [B, H, G, D] or [B, T, H, G, D], with G ≤ 2
  has_token_axis = q.ndim == 5
  if not has_token_axis:
    q = q[:, None]  # [B, 1, H, G, D]
    if lam is not None:
      lam = lam[:, None]  # [B, 1, H]
  tokens = q.shape[1]

  num_pages, _, page_size, _ = k.shape
  capacity = page_size
  if block_tables is not None:
    capacity = block_tables.shape[1] * page_size
    block_tables = jnp.asarray(block_tables).astype(jnp.int32)
    block_tables = jnp.clip(block_tables, 0, num_pages - 1)
  first_positions = jnp.asarray(lengths).astype(jnp.int32) - tokens
  first_positions = jnp.clip(first_positions, -tokens, capacity - 1)
  if window is not None:
    # A longer window hides nothing, and its arithmetic could overflow int32.
    window = min(window, capacity + tokens)

  if implementation == "auto":
    implementation = choose(platform(), q, v)
  decode = DECODERS.load(implementation)
  inputs = DecodeInputs(
    q, k, v, lam, first_positions, block_tables, k_scale, v_scale
  )
  layout = None
  if sharding is not None:
    layout = AxisSharding.of(sharding, "B H")
  if layout is None:
    out = decode(inputs, window=window, scale=scale)
  else:
    out = _decode_on_mesh(decode, inputs, layout, window=window, scale=scale)
  if not has_token_axis:
    out = out[:, 0]
  return out


def _decode_on_mesh(
  decode: DecodeImplementation,
  inputs: DecodeInputs,
  layout: AxisSharding,
  *,
  window: int | None,
  scale: float,
) -> Float[Array, "B T H V"]:
  """Returns attention, where each device decodes its own sequences and heads.

  Args:
    decode: the implementation, which runs inside `shard_map`.
    inputs: the arrays of all devices.
    layout: the mesh axes that split B and H.
    window: how many keys a token sees. None for all.
    scale: factor on q·k.
  """
  batch, _, num_heads = inputs.q.shape[:3]
  num_pages, num_kv_heads = inputs.k.shape[:2]
  # The shards of an axis must be equal. Pages are split like the sequences that
  # own them, and key heads like query heads.
  batch_sizes = {"B": batch}
  if inputs.block_tables is not None:
    batch_sizes["P"] = num_pages
  layout.check("B", sizes=batch_sizes)
  layout.check("H", sizes={"H": num_heads, "K": num_kv_heads})

  def decode_shard(*arrays: jax.Array | None) -> Float[Array, "B T H V"]:
    return decode(DecodeInputs._make(arrays), window=window, scale=scale)

  by_sequence = layout.spec("B")  # [B] and [B, N]
  by_sequence_and_head = layout.spec("B H")  # [P, K] and [P, K, S, X]
  by_token = PartitionSpec(*by_sequence, None, *layout.spec("H"))  # [B, T, H]
  operands = [  # in the order of DecodeInputs
    (inputs.q, by_token),
    (inputs.k, by_sequence_and_head),
    (inputs.v, by_sequence_and_head),
    (inputs.lam, by_token),
    (inputs.first_positions, by_sequence),
    (inputs.block_tables, by_sequence),
    (inputs.k_scale, by_sequence_and_head),
    (inputs.v_scale, by_sequence_and_head),
  ]
  return layout.map_shards(decode_shard, operands, by_token)
