"""The function `diff_attention`, which the package of the same name exports.

It checks its arguments, selects an implementation and runs it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention import arguments, implementations
from diffjax.ops.diff_attention.choice import choose
from diffjax.ops.diff_attention.mask import PER_ROW, Mask
from diffjax.ops.diff_attention.sharded import (
  TOKEN_ORDERS,
  AxisSharding,
  TokenSharding,
  gathered_attention,
)
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  run_implementation,
)
from diffjax.ops.platform import platform


def diff_attention(
  q: Float[Array, "B T Q G D"],
  k: Float[Array, "B S K M D"],
  v: Float[Array, "B S K V"],
  lam: float
  | Float[Array, ""]
  | Float[Array, "H"]
  | Float[Array, "B T H"]
  | None = None,
  *,
  q_segment_ids: Int[Array, "B T"] | None = None,
  kv_segment_ids: Int[Array, "B S"] | None = None,
  q_offset: int | Int[Array, ""] | Int[Array, "B"] = 0,
  causal: bool = True,
  window: int | None = None,
  scale: float | None = None,
  implementation: str = "auto",
  sharding: NamedSharding | PartitionSpec | None = None,
  token_order: str = "given",
) -> Float[Array, "B T H V"]:
  """Computes differential attention (arXiv:2410.05258, eq. 1).

  out = softmax(q₁k₁ᵀ · scale) v − λ · softmax(q₂k₂ᵀ · scale) v

  The heads form Q query groups. The last of the G maps of a group is its noise
  map, and the others are signal maps. Each signal map is a head, from which λ
  times the noise map is subtracted. So H = Q·(G − 1), and signal map i of group
  j is head j·(G − 1) + i. With G = 2, a head has its own noise map. With more,
  heads share one (grouped differential attention, arXiv:2510.06949). With G = 1
  there is no noise map: this is plain attention, and H = Q.

  Query group j attends to key head ⌊j·K/Q⌋. Key s has position s, and query t
  has position q_offset + t. A query that sees no key has an output of zeros and
  no gradient.

  Example:
    q = jnp.zeros((1, 128, 4, 2, 64))  # 4 heads, each with a noise map
    k = jnp.zeros((1, 128, 4, 2, 64))
    v = jnp.zeros((1, 128, 4, 128))
    out = diff_attention(q, k, v, lam=0.8)  # [1, 128, 4, 128]

  Args:
    q: queries.
    k: keys. With M = 2 the noise maps have their own keys (V1). With M = 1 all
      maps share them (V2).
    v: values, which all maps share.
    lam: λ, a number for all heads, for each head, or for each token and head.
      Required if G > 1, and not allowed if G = 1. It is cast to float32, or to
      float64 if q is float64.
    q_segment_ids: documents of the queries. A query sees only keys with an
      equal id. No id marks padding, so 0 is a document too.
    kv_segment_ids: documents of the keys. None for q_segment_ids if T = S.
    q_offset: position of the first query: an int, or an array with one position
      for all sequences or for each. With an int, the compiled program leaves
      out blocks of keys that the mask hides. With an array, positions are known
      only at run time, and "chunked" computes all blocks.
    causal: whether a query sees only keys up to its own position.
    window: the query at position p sees key s if p − window < s ≤ p. If
      `causal` is False, it sees key s if |p − s| < window. None for all keys.
    scale: factor on q·k. None for 1/√D.
    implementation: "auto" for the fastest one on the backend, or a name. A call
      that the named implementation does not support is an error.
      "reference": all maps in memory, for tests.
      "chunked": XLA, one block of queries at a time.
      "two_call": `jax.nn.dot_product_attention` for each map, then subtracts.
      "pallas_tpu", "pallas_gpu" (Hopper): fused kernels.
      Other names are added by `register`.
    sharding: how a mesh splits the axes [B, T, H] of the output: a
      NamedSharding, or a PartitionSpec for the mesh of `jax.set_mesh`. S is
      split like T, and Q and K like H. The call runs inside `shard_map`. If T
      is split, "chunked" and "pallas_tpu" pass keys and values from device to
      device in a ring, which needs T = S and an int as q_offset. Other calls
      gather the keys and values on each device. On a mesh, either pass
      `sharding`, or None in a call that is inside `shard_map` already, because
      block sizes depend on the shapes on one device.
    token_order: the order of each sequence's tokens if T is split: "given", or
      "balanced" for `diffjax.ops.diff_attention.balanced_order`. With a causal
      mask later tokens see more keys, and the balanced order gives all devices
      the same work.

  Returns:
    The outputs of the heads, in q's dtype.

  Raises:
    ValueError: if an argument is invalid, or if the implementation does not
      support the call. The message says which argument, and what to change.
  """
  _check_shapes(q, k, v)
  lam = arguments.broadcast_lambda(lam, q)  # [B, T, H] or None
  q_segment_ids, kv_segment_ids = _check_segments(
    q_segment_ids,
    kv_segment_ids,
    batch=q.shape[0],
    q_length=q.shape[1],
    kv_length=k.shape[1],
  )
  static_offset, offsets = _check_offset(q_offset, batch=q.shape[0])
  window = arguments.check_window(window)
  scale = arguments.check_scale(scale, q.shape[-1])
  implementations.REGISTRY.check(implementation)
  if token_order not in TOKEN_ORDERS:
    raise ValueError(
      f"token_order must be one of {', '.join(TOKEN_ORDERS)};"
      f" got {token_order!r}"
    )

  inputs = Arrays(q, k, v, lam, q_segment_ids, kv_segment_ids, offsets)
  mask = Mask(
    q_length=q.shape[1],
    kv_length=k.shape[1],
    causal=bool(causal),
    window=window,
    offset=static_offset,
    segments=q_segment_ids is not None,
  )
  axis_sharding = None
  if sharding is not None:
    axis_sharding = AxisSharding.of(sharding, "B T H")
  if axis_sharding is None:  # also if the mesh has only one device
    return _attention_on_one_device(inputs, mask, scale, implementation)
  return _attention_on_mesh(
    inputs, mask, scale, implementation, axis_sharding, token_order
  )


def _attention_on_one_device(
  arrays: Arrays, mask: Mask, scale: float, name: str
) -> Float[Array, "B T H V"]:
  """Returns attention by the implementation of a name, or by the fastest."""
  implementation = _select_implementation(name, arrays, mask)
  # This is the custom VJP around the implementation.
  return run_implementation(implementation, arrays, mask, scale)


def _attention_on_mesh(
  arrays: Arrays,
  mask: Mask,
  scale: float,
  name: str,
  sharding: AxisSharding,
  token_order: str,
) -> Float[Array, "B T H V"]:
  """Returns attention on a mesh, where each device computes its shard.

  Args:
    arrays: the arrays of all devices.
    mask: the keys that each query sees.
    scale: factor on q·k.
    name: the name of an implementation, or "auto".
    sharding: the mesh axes that split B, T and H.
    token_order: the order of a sequence's tokens, if T is split.
  """
  # A shard of T holds one piece of consecutive tokens of a sequence, or two if
  # the order is balanced: an early one and a late one.
  num_token_shards = sharding.shards("T")
  tokens = None
  pieces_per_shard = 1
  if num_token_shards > 1:
    tokens = TokenSharding(sharding.axes["T"], num_token_shards, token_order)
    pieces_per_shard = len(tokens.pieces(0))

  # All shards of an axis must have the same size. A query group is not split,
  # so its heads stay together.
  sharding.check("B", sizes={"B": arrays.q.shape[0]})
  sharding.check(
    "T",
    sizes={"T": mask.q_length, "S": mask.kv_length},
    multiple=pieces_per_shard,
  )
  sharding.check("H", sizes={"Q": arrays.q.shape[2], "K": arrays.k.shape[2]})

  attention_on_shard = functools.partial(
    _attention_on_shard, global_mask=mask, scale=scale, name=name, tokens=tokens
  )
  heads_spec = sharding.spec("B T H")
  ids_spec = sharding.spec("B T")
  operands = [  # in the order of the fields of `Arrays`
    (arrays.q, heads_spec),
    (arrays.k, heads_spec),
    (arrays.v, heads_spec),
    (arrays.lam, heads_spec),
    (arrays.q_ids, ids_spec),
    (arrays.kv_ids, ids_spec),
    (arrays.offset, sharding.spec("B")),
  ]
  return sharding.map_shards(attention_on_shard, operands, heads_spec)


def _attention_on_shard(
  *shards: jax.Array | None,
  global_mask: Mask,
  scale: float,
  name: str,
  tokens: TokenSharding | None,
) -> Float[Array, "B T H V"]:
  """Returns attention of the queries that one device holds.

  If devices share a sequence, the keys and values of the other devices arrive
  in a ring, or each device gathers them all.

  Args:
    *shards: this device's shards of the fields of `Arrays`, in their order.
    global_mask: the mask with the lengths of whole sequences.
    scale: factor on q·k.
    name: the name of an implementation, or "auto".
    tokens: how devices share a sequence. None if each one is on one device.
  """
  arrays = Arrays._make(shards)
  # The lengths of a shard, and still the position of the sequence's first
  # query, to which `ring` and `gathered_attention` add the shard's position.
  mask = dataclasses.replace(
    global_mask, q_length=arrays.q.shape[1], kv_length=arrays.k.shape[1]
  )
  if tokens is None:
    return _attention_on_one_device(arrays, mask, scale, name)

  # All devices run one program, so the implementation is chosen for a shard
  # whose position is known only at run time.
  mask_for_choice = dataclasses.replace(mask, offset=PER_ROW)
  implementation = _select_implementation(name, arrays, mask_for_choice)
  can_use_ring = (
    implementation.partial is not None  # merges results of parts of the keys
    and mask.offset != PER_ROW  # a ring is planned while it is compiled
    and mask.q_length == mask.kv_length  # a shard's queries and keys coincide
  )
  if can_use_ring:
    # Imported here because most runs do not share a sequence between devices.
    from diffjax.ops.diff_attention.ring import ring

    ring_implementation = ring(implementation, tokens)
    return run_implementation(ring_implementation, arrays, mask, scale)
  return gathered_attention(implementation, arrays, mask, scale, tokens)


def _select_implementation(
  name: str, arrays: Arrays, mask: Mask
) -> Implementation:
  """Returns the implementation of a name, or the fastest one for "auto"."""
  implementation_name = name
  if name == "auto":
    # The choice is made for pairs of a signal map and a noise map, because most
    # implementations compute groups of more maps as pairs. Only shapes matter.
    q_pairs = jax.eval_shape(
      arguments.repeat_noise_maps, arrays.q
    )  # [B, T, H, 2, D], or arrays.q if G = 1
    choice = choose(platform(), q_pairs, arrays.k, arrays.v, mask)
    implementation_name = choice.implementation
  return implementations.implementation_of(implementation_name)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
  """Raises ValueError if the shapes or dtypes of q, k and v do not match.

  Axes: B batch, T queries, S keys, Q query groups, G maps of a group, K key
  heads, M key maps, D width of queries and keys, V width of values.
  """
  layouts = ("B T Q G D", "B S K M D", "B S K V")
  arguments.check_arrays(q, k, v, layouts)
  maps_per_group = q.shape[3]
  num_key_maps = k.shape[3]
  if maps_per_group == 1 and num_key_maps != 1:
    raise ValueError(
      "k must have M = 1 map (axis 3), since q has one map; got"
      f" M = {num_key_maps} in shape {k.shape}"
    )
  if num_key_maps not in (1, 2):
    raise ValueError(
      f"k must have M = 1 or 2 maps (axis 3); got M = {num_key_maps} in shape"
      f" {k.shape}"
    )
  if k.shape[0] != q.shape[0]:
    raise ValueError(
      f"k must have q's batch size B = {q.shape[0]}; got shape {k.shape}"
    )
  if k.shape[4] != q.shape[4]:
    raise ValueError(
      f"k must have q's width D = {q.shape[4]}; got shape {k.shape}"
    )
  arguments.check_heads(q.shape[2], k.shape[2])
  if v.shape[:3] != k.shape[:3]:
    raise ValueError(
      f"v must have k's axes [B, S, K] = {list(k.shape[:3])};"
      f" got shape {v.shape}"
    )


def _check_segments(
  q_ids: Any, kv_ids: Any, batch: int, q_length: int, kv_length: int
) -> tuple[Int[Array, "B T"] | None, Int[Array, "B S"] | None]:
  """Returns the segment ids of queries and keys, after checking them.

  A query sees only keys with the same id. If there are no kv_ids, keys have the
  ids of the queries, which requires equal lengths.

  Raises:
    ValueError: if the ids are not integers of the right shape, or if the ids of
      the queries are missing.
  """
  if q_ids is None and kv_ids is None:
    return None, None
  if q_ids is None:
    raise ValueError(
      "q_segment_ids must be given with kv_segment_ids; got None"
    )
  if kv_ids is None:
    if q_length != kv_length:
      raise ValueError(
        f"kv_segment_ids must be given if T ≠ S; got None, with T = {q_length}"
        f" and S = {kv_length}"
      )
    kv_ids = q_ids
  _check_ids("q_segment_ids", q_ids, (batch, q_length))
  _check_ids("kv_segment_ids", kv_ids, (batch, kv_length))
  return q_ids, kv_ids


def _check_ids(name: str, ids: jax.Array, shape: tuple[int, int]) -> None:
  """Raises ValueError if the ids are not integers of a shape."""
  is_integer = jnp.issubdtype(ids.dtype, jnp.integer)
  if ids.shape != shape or not is_integer:
    raise ValueError(
      f"{name} must be integers of shape {list(shape)};"
      f" got {arguments.describe(ids)}"
    )


def _check_offset(
  q_offset: Any, batch: int
) -> tuple[int | Literal["per row"], Int[Array, "B"] | None]:
  """Returns q_offset as part of the mask, or as an array of data.

  An int is part of the mask, which is static during compilation. An array is
  data, with a position for each sequence of the batch.

  Example:
    _check_offset(5, batch=2) → (5, None)
    _check_offset(jnp.array([5, 9]), batch=2) → (PER_ROW, [5, 9])

  Returns:
    The offset for `Mask` (an int, or PER_ROW), and the offsets for `Arrays`.

  Raises:
    ValueError: if it is neither an int nor an integer array [] or [B].
  """
  if arguments.is_integer(q_offset):
    return int(q_offset), None
  is_valid_array = (
    isinstance(q_offset, (jax.Array, np.ndarray))
    and jnp.issubdtype(q_offset.dtype, jnp.integer)
    and q_offset.shape in ((), (batch,))
  )
  if is_valid_array:
    offsets = jnp.broadcast_to(q_offset, (batch,))
    return PER_ROW, offsets.astype(jnp.int32)
  raise ValueError(
    f"q_offset must be an int or an integer array [] or [B] with B = {batch};"
    f" got {arguments.describe(q_offset)}"
  )
