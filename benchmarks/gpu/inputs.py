"""The shapes that are checked and timed, and random arrays of these shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffjax.ops.diff_attention.gpu import measured

# The width of the layer whose attention is timed, as in `diff_1b`.
EMBED_DIM = 2048
# The number of tokens of a batch. A longer row is a batch of its own.
BATCH_TOKENS = 16384
LENGTHS = (2048, 4096, 8192, 16384, 65536)
# With packed rows, stock attention reads a mask with T·S elements per row.
PACKED_LENGTHS = (4096, 16384)
# Packed rows have up to this number of documents.
MAX_DOCUMENTS = 5


class Kind(NamedTuple):
  """A kind of attention.

  Attributes:
    num_maps: the number of attention maps of a head (G).
    num_key_maps: the number of maps that have their own keys (M).
    value_ratio: the width of the values relative to the keys' (V/D).
  """

  num_maps: int
  num_key_maps: int
  value_ratio: int


KINDS = {
  "v1": Kind(num_maps=2, num_key_maps=2, value_ratio=2),
  "v2": Kind(num_maps=2, num_key_maps=1, value_ratio=1),
  "plain": Kind(num_maps=1, num_key_maps=1, value_ratio=1),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """A call of `diff_attention`.

  Attributes:
    kind: a key of KINDS.
    D: the width of queries and keys.
    B: the number of rows.
    T: the number of queries of a row.
    H: the number of heads.
    packed: whether several documents are packed into a row.
    S: the number of keys of a row. None for T.
    heads_per_key_head: the number of heads that share keys and values.
    causal: whether a query sees only keys up to its own position.
    window: the number of keys that a query sees. None for all.
    q_offset: the position of the first query, for all rows or for each.
    dtype: the name of the arrays' dtype.
  """

  kind: str
  D: int
  B: int
  T: int
  H: int
  packed: bool = False
  S: int | None = None
  heads_per_key_head: int = 1
  causal: bool = True
  window: int | None = None
  q_offset: int | tuple[int, ...] = 0
  dtype: str = "bfloat16"

  def __str__(self) -> str:
    return _describe(self)


@dataclasses.dataclass(frozen=True)
class DecodeCase:
  """A call of `decode_attention`: one new token per row.

  Attributes:
    kind: a key of KINDS.
    D: the width of queries and keys.
    B: the number of rows.
    S: the capacity of the cache of a row.
    H: the number of heads.
  """

  kind: str
  D: int
  B: int
  S: int
  H: int

  def __str__(self) -> str:
    return f"decoding {_describe(self)}"


def _describe(case: Case | DecodeCase) -> str:
  """Returns the fields that differ from their defaults, as text."""
  parts = [case.kind]
  for field in dataclasses.fields(case):
    value = getattr(case, field.name)
    if field.name != "kind" and value != field.default:
      parts.append(f"{field.name} {value}")
  return " ".join(parts)


def to_json(case: Any) -> dict[str, Any]:
  """Returns a case as a dictionary, without fields that are not set."""
  fields = dataclasses.asdict(case)
  return {name: value for name, value in fields.items() if value is not None}


def check_cases() -> list[Case]:
  """Returns the shapes and masks whose results are checked.

  Every kind and width has lengths that blocks divide and others, and every kind
  of mask. The smallest case is the first.
  """
  cases = []
  for kind in KINDS:
    for head_dim in measured.BUCKETS:
      shape = {"kind": kind, "D": head_dim, "B": 2, "H": 2}
      cases += [
        Case(**shape, T=128),
        Case(**shape, T=1000),
        Case(**shape, T=640, causal=False, dtype="float16"),
        Case(**shape, T=1000, window=200, packed=True, heads_per_key_head=2),
        Case(**shape, T=300, S=700, q_offset=(400, 123)),
      ]
  cases += [
    Case("v1", D=96, B=2, T=333, H=2, packed=True),
    Case("v1", D=128, B=2, T=130, S=514, H=2, q_offset=384),
    Case("v2", D=64, B=2, T=1, H=2),
  ]

  def num_logits(case: Case) -> int:
    return case.T * (case.S or case.T) * case.D

  return sorted(cases, key=num_logits)


def decode_check_cases() -> list[DecodeCase]:
  """Returns the decoding calls whose results are checked."""
  return [DecodeCase(kind, D=128, B=4, S=1024, H=4) for kind in KINDS]


def timed_cases(*, packed: bool) -> list[Case]:
  """Returns the calls that are timed, in bfloat16 with a causal mask."""
  lengths = PACKED_LENGTHS if packed else LENGTHS
  cases = []
  for kind in KINDS:
    for head_dim in measured.BUCKETS:
      for length in lengths:
        case = Case(
          kind,
          D=head_dim,
          B=max(BATCH_TOKENS // length, 1),
          T=length,
          H=num_heads(kind, head_dim),
          packed=packed,
        )
        cases.append(case)
  return cases


def timed_decode_cases() -> list[DecodeCase]:
  """Returns the decoding calls that are timed."""
  cases = []
  for kind in KINDS:
    heads = num_heads(kind, head_dim=128)
    cases.append(DecodeCase(kind, D=128, B=32, S=8192, H=heads))
  return cases


def tiny_cases(*, packed: bool = False) -> list[Case]:
  """Returns calls that the interpreter of the kernels computes in seconds."""
  return [Case(kind, D=64, B=1, T=40, H=1, packed=packed) for kind in KINDS]


def tiny_decode_cases() -> list[DecodeCase]:
  """Returns decoding calls for the interpreter of the kernels."""
  return [DecodeCase(kind, D=64, B=1, S=64, H=1) for kind in KINDS]


def num_heads(kind: str, head_dim: int) -> int:
  """Returns the heads of a layer that is EMBED_DIM wide."""
  return EMBED_DIM // (KINDS[kind].value_ratio * head_dim)


def arguments(case: Case) -> tuple[jax.Array, ...]:
  """Returns random q, k and v for `diff_attention`, and λ with two maps.

  The shapes are q [B, T, H, G, D], k [B, S, K, M, D], v [B, S, K, V] and
  λ [B, T, H].
  """
  kind = KINDS[case.kind]
  num_keys = case.S or case.T
  key_heads = case.H // case.heads_per_key_head
  keys = jax.random.split(jax.random.key(0), 4)
  q_shape = (case.B, case.T, case.H, kind.num_maps, case.D)
  k_shape = (case.B, num_keys, key_heads, kind.num_key_maps, case.D)
  v_shape = (case.B, num_keys, key_heads, kind.value_ratio * case.D)
  q = jax.random.normal(keys[0], q_shape, case.dtype)
  k = jax.random.normal(keys[1], k_shape, case.dtype)
  v = jax.random.normal(keys[2], v_shape, case.dtype)
  if kind.num_maps == 1:
    return q, k, v
  lam_shape = (case.B, case.T, case.H)
  lam = jax.random.uniform(keys[3], lam_shape, jnp.float32, -0.5, 1.0)
  return q, k, v, lam


def options(case: Case) -> dict[str, Any]:
  """Returns the case's mask, as keyword arguments of `diff_attention`."""
  mask: dict[str, Any] = {"causal": case.causal, "window": case.window}
  if isinstance(case.q_offset, tuple):
    mask["q_offset"] = jnp.asarray(case.q_offset, jnp.int32)
  else:
    mask["q_offset"] = case.q_offset
  if case.packed:
    mask["q_segment_ids"] = segment_ids(case)
  return mask


def segment_ids(case: Case) -> jax.Array:
  """Returns the documents' ids of packed rows [B, T]."""
  key = jax.random.key(1)
  shape = (case.B, case.T)
  return jnp.sort(jax.random.randint(key, shape, 0, MAX_DOCUMENTS), axis=1)


def output_gradient(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns a random gradient of the output for q, k, v, …."""
  q = arrays[0]
  v = arrays[2]
  shape = (*q.shape[:3], v.shape[-1])
  return jax.random.normal(jax.random.key(2), shape, q.dtype)


def with_gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
  """Returns a function that computes attention and its gradients.

  Its arguments are the gradient of the output, and the arguments of `attend`.
  It returns the output, and the gradients of these arguments.
  """

  def forward_and_backward(
    gradient: jax.Array, *arrays: jax.Array
  ) -> tuple[jax.Array, ...]:
    output, pullback = jax.vjp(attend, *arrays)
    return output, *pullback(gradient)

  return forward_and_backward


def decode_arguments(case: DecodeCase) -> tuple[Any, ...]:
  """Returns the arguments of `decode_attention`: q, k, v, λ and lengths.

  The caches are at least three quarters full. λ is None with one map.
  """
  # Attention of one query on all keys has the same arrays, in another layout.
  one_query = Case(case.kind, D=case.D, B=case.B, T=1, S=case.S, H=case.H)
  q, k, v, *lams = arguments(one_query)
  lam = lams[0][:, 0] if lams else None
  # [B, S, K, M, D] -> [B, K, S, M*D]
  k_cache = jnp.moveaxis(k, 1, 2).reshape(case.B, case.H, case.S, -1)
  v_cache = jnp.moveaxis(v, 1, 2)
  key = jax.random.key(3)
  least = case.S * 3 // 4
  lengths = jax.random.randint(key, (case.B,), least, case.S + 1)
  return q[:, 0], k_cache, v_cache, lam, lengths
