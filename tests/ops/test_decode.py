"""Decoding: one property test of all implementations, then their own promises.

Keys that a token does not see, and memory that nothing was written to, are NaN
in these tests. A NaN in an output means that a hidden value was used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from diffjax.ops.diff_attention import decode, decode_attention, diff_attention
from diffjax.ops.diff_attention.decode import choice
from diffjax.ops.diff_attention.decode import gpu as gpu_decode
from diffjax.ops.diff_attention.decode import tpu as tpu_decode
from diffjax.ops.diff_attention.gpu import chip as gpu_chip
from diffjax.ops.diff_attention.tpu import chip as tpu_chip
from tests.harness.tiers import by_name, full
from tests.harness.tolerances import FLOAT32

# Largest errors, relative to the norm of a token's output.
FLOAT64_ERROR = 1e-12
FLOAT32_ERROR = 3e-6
FLOAT16_ERROR = 2e-3
BFLOAT16_ERROR = 2e-2


@dataclasses.dataclass(frozen=True)
class Case:
  """The shapes and options of one call. Axes: see diffjax/parameters.py.

  Attributes:
    name: the id of the test.
    S: keys that the cache of a sequence has room for.
    lengths: tokens of each sequence, including the new ones.
    H: heads.
    K: key heads.
    G: maps of a group of queries.
    M: maps of the keys.
    D: width of queries and keys.
    V: width of the values.
    lam: the axes of λ, or "scalar".
    window: argument of `decode_attention`.
    scale: argument of `decode_attention`.
    dtype: the dtype of queries, keys and values.
    T: new tokens of a sequence. None for one, without an axis for it.
    page: keys of a page. None for a cache without pages.
    int8: whether keys and values are int8.
  """

  name: str
  S: int = 300
  lengths: tuple[int, ...] = (0, 1, 300, 130)
  H: int = 4
  K: int = 2
  G: int = 2
  M: int = 2
  D: int = 6
  V: int = 10
  lam: str = "BTH"
  window: int | None = None
  scale: float | None = None
  dtype: str = "float32"
  T: int | None = None
  page: int | None = None
  int8: bool = False


# V1 has two maps of the keys. V2 has one, for both maps of the queries.
V1 = Case("v1")
V2_LANES = Case("v2_only_values_on_lanes", M=1, D=128, window=140)
V1_ONE_GROUP = Case(
  "v1_one_group_lambda_per_head",
  H=3,
  K=1,
  lam="H",
  S=37,
  lengths=(37, 36, 0, 5),
)
CASES = [
  V1,
  V1_ONE_GROUP,
  Case(
    "v1_not_grouped_scale",
    H=2,
    lengths=(128, 129, 127, 256),
    scale=0.7,
    lam="scalar",
  ),
  V2_LANES,
  Case("plain_many_heads", G=1, M=1, H=18, K=1),
  Case("window_of_one", window=1, M=1, lengths=(0, 1, 300, 129)),
  Case("beyond_the_cache", S=40, lengths=(41, 1000, 40, -3), window=9),
]
COMBINED_CASES = [
  Case("v1_keys_not_on_lanes", D=64, V=128),
  Case("v2", M=1),
  Case("plain", G=1, M=1),
  Case("window", window=100, lengths=(0, 99, 300, 229)),
  Case("window_longer_than_the_cache", window=1000),
  Case("whole_blocks", S=256, lengths=(256, 255, 128, 1)),
]

V2_PAGES_WINDOW = Case(
  "v2_pages_of_several_blocks_window",
  M=1,
  page=256,
  S=700,
  lengths=(0, 256, 700, 400),
  window=140,
)
SHARED_NOISE_PAGES = Case(
  "shared_noise_in_pages", G=3, H=8, T=2, page=128, lengths=(1, 128, 300, 129)
)
V1_TOKENS = Case("v1_tokens", T=5, window=7, lengths=(0, 3, 300, 131))
V1_INT8_PAGES = Case("v1_int8_pages", page=128, int8=True)
PAGED_CASES = [
  SHARED_NOISE_PAGES,
  V2_PAGES_WINDOW,
  Case(
    "plain_small_pages_on_lanes",
    G=1,
    M=1,
    H=6,
    K=1,
    D=128,
    V=128,
    page=16,
    S=100,
    lengths=(0, 100, 17, 16),
  ),
  V1_TOKENS,
  V1_INT8_PAGES,
]
COMBINED_PAGED_CASES = [
  Case("v1_pages", page=128),
  Case("v2_tokens_in_pages", T=3, M=1, page=128, lengths=(1, 128, 300, 129)),
  Case(
    "v1_tokens_many_heads_beyond_the_cache",
    T=9,
    H=6,
    S=40,
    lengths=(41, 1000, 48, 4),
  ),
  Case(
    "v1_tokens_window_in_pages_with_a_rest",
    T=130,
    page=200,
    S=600,
    window=150,
    lengths=(130, 7, 600, 300),
  ),
  Case("v2_int8_without_pages", M=1, int8=True),
  Case("v1_int8_tokens_window", T=4, page=128, int8=True, window=100, lam="H"),
  Case("plain_int8", G=1, M=1, page=128, int8=True, D=64, V=64),
]

needs_gpu_interpreter = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2),
  reason="the interpreter of Mosaic GPU kernels needs JAX 0.11.2",
)


@pytest.fixture(params=["xla", "pallas_tpu"])
def implementation(request, monkeypatch):
  """The name of an implementation. The kernel is interpreted."""
  # The kernel then has blocks of 128 keys, the fewest possible.
  monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", 1)
  with contextlib.ExitStack() as stack:
    if request.param == "pallas_tpu":
      stack.enter_context(tpu_chip.interpreted())
    yield request.param


class Cache(NamedTuple):
  """The arguments of a call without pages, in float64.

  Attributes:
    q: queries [B, T, Q, G, D].
    k: keys [B, K, S, M * D].
    v: values [B, K, S, V].
    k_scale: scales of int8 keys [B, pages, K].
    v_scale: scales of int8 values [B, pages, K].
    lam: λ with the axes that the case names. None with one map.
  """

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  k_scale: np.ndarray
  v_scale: np.ndarray
  lam: np.ndarray | None


def first_positions(case: Case) -> np.ndarray:
  """Returns the position of each sequence's first new token.

  It is negative if a sequence has fewer tokens than new ones.
  """
  tokens = case.T or 1
  return np.clip(np.array(case.lengths) - tokens, -tokens, case.S - 1)


def hidden_keys(case: Case) -> np.ndarray:
  """Returns which keys no new token of a sequence sees [B, S]."""
  first = first_positions(case)[:, None]
  key = np.arange(case.S)
  # Keys after the last new token, and keys before the window of the first one.
  is_hidden = key >= first + (case.T or 1)
  if case.window is not None:
    is_hidden |= key <= first - case.window
  return is_hidden


def make_cache(case: Case, hidden: float) -> Cache:
  """Returns random arguments. The value `hidden` replaces hidden keys."""
  rng = np.random.default_rng(0)
  batch = len(case.lengths)
  tokens = case.T or 1
  num_groups = case.H // max(case.G - 1, 1)

  def normal(*shape):
    rounded = rng.standard_normal(shape).astype(jnp.dtype(case.dtype))
    return rounded.astype(np.float64)

  def integers(*shape):
    return rng.integers(-127, 128, shape).astype(np.float64)

  draw = integers if case.int8 else normal
  q = normal(batch, tokens, num_groups, case.G, case.D)
  k = draw(batch, case.K, case.S, case.M * case.D)
  v = draw(batch, case.K, case.S, case.V)
  lam_shapes = {
    "scalar": (),
    "H": (case.H,),
    "BTH": (batch, tokens, case.H),
  }
  lam = None
  if case.G > 1:
    lam = rng.uniform(-0.5, 1.2, lam_shapes[case.lam])

  page = case.page or case.S
  num_pages = -(-case.S // page)
  k_scale, v_scale = rng.uniform(0.01, 0.1, (2, batch, num_pages, case.K))

  is_hidden = hidden_keys(case)
  k = np.where(is_hidden[:, None, :, None], hidden, k)
  v = np.where(is_hidden[:, None, :, None], hidden, v)
  # A page without visible keys also has hidden scales.
  for sequence in range(batch):
    for index in range(num_pages):
      if is_hidden[sequence, index * page : (index + 1) * page].all():
        k_scale[sequence, index] = hidden
        v_scale[sequence, index] = hidden
  return Cache(q, k, v, to_float32(k_scale), to_float32(v_scale), lam)


def to_float32(x: np.ndarray) -> np.ndarray:
  """Returns float64 numbers that float32 represents exactly."""
  return x.astype(np.float32).astype(np.float64)


def move_to_pages(
  x: np.ndarray, page_ids: np.ndarray, page: int, hidden: float
) -> np.ndarray:
  """Returns a pool of pages that contains a cache.

  Args:
    x: keys or values of a cache without pages [B, K, S, X].
    page_ids: the pages of each sequence in the pool [B, pages].
    page: tokens of a page.
    hidden: the value of everything else in the pool.

  Returns:
    The pool [P, K, page, X].
  """
  batch, num_kv_heads, length, width = x.shape
  num_pages = page_ids.shape[1]
  padding = [(0, 0), (0, 0), (0, num_pages * page - length), (0, 0)]
  x = np.pad(x, padding, constant_values=hidden)
  x = x.reshape(batch, num_kv_heads, num_pages, page, width)
  pool = np.full((pool_size(page_ids), num_kv_heads, page, width), hidden)
  pool[page_ids] = np.moveaxis(x, 2, 1)
  return pool


def pool_size(page_ids: np.ndarray) -> int:
  """Returns the pages of a pool: three more than the sequences have."""
  return page_ids.size + 3


def divide_into_pages(
  case: Case, cache: Cache, hidden: float
) -> tuple[Cache, np.ndarray]:
  """Returns the same cache in pages, and the block tables [B, pages].

  The pages of a sequence are in random order. Entries of the tables beyond its
  length are arbitrary.
  """
  rng = np.random.default_rng(1)
  batch, num_pages, num_kv_heads = cache.k_scale.shape
  page_ids = rng.permutation(batch * num_pages + 3)[: batch * num_pages]
  page_ids = page_ids.reshape(batch, num_pages).astype(np.int32)
  k_scale = np.full((pool_size(page_ids), num_kv_heads), hidden)
  k_scale[page_ids] = cache.k_scale
  v_scale = np.full((pool_size(page_ids), num_kv_heads), hidden)
  v_scale[page_ids] = cache.v_scale
  cache_in_pages = cache._replace(
    k=move_to_pages(cache.k, page_ids, case.page, hidden),
    v=move_to_pages(cache.v, page_ids, case.page, hidden),
    k_scale=k_scale,
    v_scale=v_scale,
  )

  pages_in_use = -(-np.array(case.lengths) // case.page)
  is_in_use = np.arange(num_pages) < pages_in_use[:, None]
  arbitrary = rng.choice([-7, 1 << 30, 2], page_ids.shape)
  tables = np.where(is_in_use, page_ids, arbitrary)
  return cache_in_pages, tables.astype(np.int32)


def make_arguments(
  case: Case, dtype: Any = None, hidden: float = np.nan
) -> dict[str, Any]:
  """Returns the arguments of `decode_attention` by name.

  Args:
    case: the shapes.
    dtype: of queries, keys and values. None for the dtype of the case.
    hidden: the value of keys that no new token sees.
  """
  cache = make_cache(case, hidden)
  arguments = {"lengths": np.array(case.lengths, np.int32)}
  if case.page is None:
    # One scale per sequence and head.
    cache = cache._replace(
      k_scale=cache.k_scale[:, 0], v_scale=cache.v_scale[:, 0]
    )
  else:
    cache, tables = divide_into_pages(case, cache, hidden)
    arguments["block_tables"] = tables

  # A single token has no axis T.
  q = cache.q
  lam = cache.lam
  if case.T is None:
    q = q[:, 0]
    if case.lam == "BTH" and lam is not None:
      lam = lam[:, 0]

  dtype = jnp.dtype(dtype or case.dtype)
  lam_dtype = np.float64 if dtype == np.float64 else np.float32
  arguments["q"] = q.astype(dtype)
  arguments["lam"] = None if lam is None else np.asarray(lam, lam_dtype)
  if case.int8:
    # int8 has no NaN.
    k = np.clip(np.nan_to_num(cache.k), -127, 127)
    v = np.clip(np.nan_to_num(cache.v), -127, 127)
    arguments["k"] = k.astype(np.int8)
    arguments["v"] = v.astype(np.int8)
    arguments["k_scale"] = cache.k_scale.astype(np.float32)
    arguments["v_scale"] = cache.v_scale.astype(np.float32)
  else:
    arguments["k"] = cache.k.astype(dtype)
    arguments["v"] = cache.v.astype(dtype)
  return arguments


@functools.cache
def compile_program(case: Case, implementation: str):
  """Returns a jitted function of the dict of `make_arguments`.

  Tests share it.
  """

  @jax.jit
  def program(arguments):
    return decode_attention(
      **arguments,
      window=case.window,
      scale=case.scale,
      implementation=implementation,
    )

  return program


@functools.cache
def expected_output(case: Case) -> np.ndarray:
  """Returns the output of the reference in float64 [B, T, H, V].

  Hidden keys are zeros for it.
  """
  cache = make_cache(case, hidden=0.0)
  k, v, lam = cache.k, cache.v, cache.lam
  batch = len(case.lengths)
  if case.int8:
    page = case.page or case.S
    k_scale = np.repeat(cache.k_scale, page, axis=1)[:, : case.S]  # [B, S, K]
    v_scale = np.repeat(cache.v_scale, page, axis=1)[:, : case.S]
    k = k * np.moveaxis(k_scale, 2, 1)[..., None]
    v = v * np.moveaxis(v_scale, 2, 1)[..., None]
  k = np.moveaxis(k, 1, 2).reshape(batch, case.S, case.K, case.M, case.D)
  v = np.moveaxis(v, 1, 2)

  attend = functools.partial(
    diff_attention,
    window=case.window,
    scale=case.scale,
    implementation="reference",
  )
  q_offset = first_positions(case).astype(np.int32)
  with jax.enable_x64(True):
    out = jax.jit(attend)(cache.q, k, v, lam, q_offset=q_offset)
    return np.asarray(out)


def assert_equals_reference(
  out: jax.Array, case: Case, tolerance: float
) -> None:
  """Checks ‖out − reference‖₂ ≤ tolerance · ‖reference‖₂ for each token.

  So a token that sees no key must have exactly zeros.
  """
  expected = expected_output(case)  # [B, T, H, V]
  actual = np.asarray(out, np.float64)
  if case.T is None:
    actual = actual[:, None]
  chex.assert_equal_shape([actual, expected])

  error_norm = np.linalg.norm(actual - expected, axis=(2, 3))
  expected_norm = np.linalg.norm(expected, axis=(2, 3))
  assert (error_norm <= tolerance * expected_norm).all()


@pytest.mark.parametrize(
  "case",
  by_name(CASES + PAGED_CASES, COMBINED_CASES + COMBINED_PAGED_CASES),
)
def test_output_equals_the_reference(implementation, case):
  """New tokens attend to the keys and values in a cache."""
  program = compile_program(case, implementation)

  out = program(make_arguments(case))

  assert_equals_reference(out, case, FLOAT32_ERROR)


@pytest.mark.parametrize(
  "case", by_name([V1, V2_LANES, V2_PAGES_WINDOW, V1_INT8_PAGES])
)
def test_finite_hidden_values_do_not_change_the_output(implementation, case):
  """No new token sees hidden keys and values. Other tests make them NaN."""
  program = compile_program(case, implementation)

  out = program(make_arguments(case, hidden=1e3))

  assert_equals_reference(out, case, FLOAT32_ERROR)


def test_token_without_keys_has_zero_output(implementation):
  """A sequence with 3 tokens has no keys for the first two of 5 new ones."""
  num_new_tokens = 5
  case = Case("few_tokens", T=num_new_tokens, window=7, lengths=(0, 3, 300))

  out = compile_program(case, implementation)(make_arguments(case))

  out_of_tokens = np.asarray(out)  # [sequences, new tokens, heads, width]
  assert (out_of_tokens[0] == 0).all()
  assert (out_of_tokens[1, :2] == 0).all()
  assert (out_of_tokens[1, 2:] != 0).any(axis=-1).all()
  assert (out_of_tokens[2] != 0).any(axis=-1).all()


@pytest.mark.parametrize(
  "case",
  by_name([V1, SHARED_NOISE_PAGES], [V1_ONE_GROUP, V2_PAGES_WINDOW, V1_TOKENS]),
)
def test_xla_computes_float64_in_float64(case):
  """The implementation "xla" is for all devices. The kernels lack float64."""
  with jax.enable_x64(True):
    arguments = make_arguments(case, np.float64)
    out = compile_program(case, "xla")(arguments)

  assert out.dtype == np.float64
  assert_equals_reference(out, case, FLOAT64_ERROR)


@pytest.mark.parametrize(
  "case",
  by_name(
    [Case("v1_bfloat16", D=64, V=128, dtype="bfloat16")],
    [Case("plain_window", G=1, M=1, window=150, dtype="bfloat16")],
  ),
)
def test_bfloat16_is_rounded_only_at_the_end(implementation, case):
  """Sums are in float32, so only single numbers are rounded to bfloat16."""
  program = compile_program(case, implementation)

  out = program(make_arguments(case))

  assert out.dtype == jnp.bfloat16
  assert_equals_reference(out, case, BFLOAT16_ERROR)


def test_decoding_token_by_token_equals_the_whole_sequence(implementation):
  length, H, K, num_maps, D, V = 5, 4, 2, 2, 6, 10
  rng = np.random.default_rng(1)
  q = np.float32(rng.standard_normal((1, length, H, num_maps, D)))
  k = np.float32(rng.standard_normal((1, length, K, num_maps, D)))
  v = np.float32(rng.standard_normal((1, length, K, V)))
  decode = functools.partial(
    decode_attention, window=3, implementation=implementation
  )
  decode = jax.jit(decode)
  # The cache has room for eight tokens. A NaN would show that unused room is
  # read.
  k_cache = np.full((1, K, 8, num_maps * D), np.nan, np.float32)
  v_cache = np.full((1, K, 8, V), np.nan, np.float32)

  outputs = []
  for t in range(length):
    k_cache[:, :, t] = np.reshape(k[:, t], (1, K, num_maps * D))
    v_cache[:, :, t] = v[:, t]
    num_tokens = np.array([t + 1], np.int32)
    # The caches change in the next step, so this step gets copies.
    out = decode(q[:, t], k_cache.copy(), v_cache.copy(), 0.3, num_tokens)
    outputs.append(np.asarray(out))

  attend = functools.partial(
    diff_attention, window=3, implementation="reference"
  )
  expected = jax.jit(attend)(q, k, v, 0.3)
  chex.assert_trees_all_close(np.stack(outputs, axis=1), expected, **FLOAT32)


def test_other_lengths_do_not_compile_again(implementation):
  """The lengths change with each token, so they must not be static."""
  arguments = make_arguments(V1)
  shorter = arguments | {"lengths": arguments["lengths"] // 2}
  program = compile_program(V1, implementation)
  first = program(arguments)
  # JAX's number of compiled versions of a jitted function.
  num_compiled = program._cache_size()

  program(shorter)
  again = program(arguments)

  assert program._cache_size() == num_compiled
  chex.assert_trees_all_equal(first, again)


def decode_in_shard_map(case: Case, implementation: str, mesh: Mesh):
  """Returns the output with sequences and heads divided over a mesh."""
  cache = P("data", "tensor")
  # All shards of the data have the same λ, as in the model.
  specs = {
    "q": cache,
    "k": cache,
    "v": cache,
    "lam": P("tensor"),
    "lengths": P("data"),
  }
  program = jax.shard_map(
    compile_program(case, implementation),
    mesh=mesh,
    in_specs=(specs,),
    out_specs=cache,
  )
  return jax.jit(program)(make_arguments(case))


def test_shard_map_does_not_change_the_output(implementation):
  """Each of four devices has half of the sequences and half of the heads."""
  case = Case("v1", S=140, lengths=(0, 1, 140, 130), lam="H")
  devices = np.array(jax.devices()[:4]).reshape(2, 2)

  out = decode_in_shard_map(
    case, implementation, Mesh(devices, ("data", "tensor"))
  )

  assert_equals_reference(out, case, FLOAT32_ERROR)


@pytest.mark.parametrize(
  "options",
  [
    pytest.param({}, id="without_pages"),
    pytest.param({"page": 128, "int8": True, "T": 2}, id="int8_pages"),
  ],
)
def test_tpu_kernel_has_no_races(options, monkeypatch):
  """The interpreter finds copies that are read before they have ended."""
  # JAX offers the result of its race detector only here.
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call

  # The smallest limit gives the smallest blocks, 128 keys. So the sequence of
  # 300 keys has several, and the kernel copies one while it reads another.
  monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", 1)
  case = Case("races", S=300, lengths=(0, 5, 300, 170), window=150, **options)

  with tpu_chip.interpreted(pltpu.InterpretParams(detect_races=True)):
    out = compile_program(case, "pallas_tpu")(make_arguments(case))
    jax.block_until_ready(out)

  assert interpret_pallas_call.races is not None
  assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("window", [None, 1, 129, *full([128, 1000])])
@pytest.mark.parametrize(
  ("page", "num_pages", "block_bytes", "tokens"),
  [
    pytest.param(1000, 1, 1024, 1, id="one_page"),
    pytest.param(1000, 1, 256 * 1024, 5, id="larger_blocks"),
    pytest.param(128, 8, 1024, 1, id="a_block_per_page"),
    pytest.param(300, 4, 1024, 3, id="shorter_block_in_each_page"),
    pytest.param(16, 70, 1024, 1, id="pages_smaller_than_a_block"),
  ],
)
def test_tpu_kernel_reads_exactly_the_blocks_with_visible_keys(
  window, page, num_pages, block_bytes, tokens, monkeypatch
):
  """Each step of the kernel reads one block of keys, a part of a page."""
  monkeypatch.setattr(tpu_decode, "BLOCK_BYTES", block_bytes)
  blocks = tpu_decode.Blocks.choose(
    page_size=page,
    pages_per_sequence=num_pages,
    window=window,
    tokens=tokens,
    bytes_per_key=1024,
    num_kv_heads=1,
    query_rows=16,
    num_cores=1,
  )
  # Lengths at and near the ends of blocks and pages.
  lengths = np.array([0, 1, 2, 127, 128, 129, 256, 257, 500, 999, 1000, 0])
  page_ids = np.random.default_rng(0).permutation(len(lengths) * num_pages)
  tables = page_ids.reshape(-1, num_pages)

  grid = jax.jit(blocks.grid)(lengths - tokens, tables)

  expected = []
  for sequence, length in enumerate(lengths):
    first_key = 0
    if window is not None:
      first_key = max(0, length - tokens - window + 1)
    # The blocks of the visible keys, each once, in order. One step writes the
    # zeros of a sequence without visible keys.
    visible_blocks = set()
    for key in range(first_key, length):
      block_of_page = key % page // blocks.block_size
      visible_blocks.add((key // page, block_of_page))
    for page_of_sequence, block_of_page in sorted(visible_blocks or {(0, 0)}):
      page_id = tables[sequence, page_of_sequence]
      pool_block = page_id * blocks.blocks_per_page + block_of_page
      sequence_block = page_of_sequence * blocks.blocks_per_page + block_of_page
      expected.append((sequence, pool_block, sequence_block))

  actual = np.stack([grid.sequence, grid.pool_block, grid.sequence_block], 1)
  chex.assert_trees_all_equal(actual[: grid.num_steps], np.array(expected))


@pytest.mark.parametrize(
  ("platform", "num_products"),
  [
    pytest.param("cuda", 2, id="cuda"),
    pytest.param("tpu", 2, id="tpu"),
    # One more product replaces values that are not finite.
    pytest.param("cpu", 3, id="cpu"),
  ],
)
def test_xla_multiplies_once_with_keys_and_once_with_values(
  platform, num_products
):
  """Each further product would read the keys or values again."""
  traced = compile_program(V1, "xla").trace(make_arguments(V1))

  text = traced.lower(lowering_platforms=(platform,)).as_text()

  assert text.count("stablehlo.dot_general") == num_products


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
  """Returns an array without compiling a program."""
  return np.zeros(shape, dtype)


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    pytest.param("q", zeros(4, 4, 2), id="q_without_width"),
    pytest.param("q", zeros(4, 4, 2, 6, dtype=jnp.int32), id="q_dtype"),
    pytest.param("q", [[1.0]], id="q_no_array"),
    pytest.param("k", zeros(4, 2, 300, 7), id="k_width"),
    pytest.param("k", zeros(4, 3, 300, 12), id="k_heads"),
    pytest.param("k", zeros(1, 2, 300, 12), id="k_batch"),
    pytest.param("k", zeros(4, 2, 300, 2, 6), id="k_axes"),
    pytest.param("k", zeros(4, 2, 300, 12, dtype=jnp.bfloat16), id="k_dtype"),
    pytest.param("k", zeros(4, 2, 0, 12), id="k_length"),
    pytest.param("v", zeros(4, 2, 299, 10), id="v_length"),
    pytest.param("v", zeros(4, 2, 300, 10, dtype=jnp.float16), id="v_dtype"),
    pytest.param("lam", None, id="no_lambda"),
    pytest.param("lam", zeros(4, 8), id="lambda_heads"),
    pytest.param("lam", zeros(3), id="lambda_per_head"),
    pytest.param("lam", zeros(4, 1, 4), id="lambda_axes"),
    pytest.param("lam", zeros(4, dtype=jnp.int32), id="lambda_dtype"),
    pytest.param("lam", "0.3", id="lambda_text"),
    pytest.param("lengths", 3, id="lengths_number"),
    pytest.param("lengths", [1, 2, 3, 4], id="lengths_list"),
    pytest.param("lengths", zeros(4), id="lengths_dtype"),
    pytest.param("lengths", zeros(3, dtype=jnp.int32), id="lengths_batch"),
    pytest.param("lengths", zeros(4, 1, dtype=jnp.int32), id="lengths_axes"),
    pytest.param("window", 0, id="window_of_no_key"),
    pytest.param("window", 2.0, id="window_float"),
    pytest.param("window", True, id="window_boolean"),
    pytest.param("scale", "1", id="scale_text"),
    pytest.param("scale", float("nan"), id="scale_nan"),
    pytest.param("implementation", "reference", id="implementation"),
    pytest.param("implementation", None, id="no_implementation"),
  ],
)
def test_error_names_the_bad_argument(argument, value):
  """One argument is replaced. The others have 4 sequences of up to 300 keys."""
  arguments = make_arguments(V1)
  arguments[argument] = value

  message = f"^{argument} (must|has) .*(got|must divide)"
  with pytest.raises(ValueError, match=message):
    decode_attention(**arguments)


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    pytest.param("block_tables", [[0, 1, 2]] * 4, id="tables_list"),
    pytest.param("block_tables", zeros(4, 3), id="tables_of_floats"),
    pytest.param(
      "block_tables", zeros(4, 3, dtype=bool), id="tables_of_booleans"
    ),
    pytest.param(
      "block_tables", zeros(3, 3, dtype=jnp.int32), id="tables_batch"
    ),
    pytest.param(
      "block_tables", zeros(4, 0, dtype=jnp.int32), id="tables_empty"
    ),
    pytest.param("block_tables", zeros(4, dtype=jnp.int32), id="tables_axes"),
    pytest.param("k", zeros(15, 2, 128, 12), id="k_dtype"),
    pytest.param("v", zeros(15, 2, 128, 10), id="v_dtype"),
    pytest.param("v", zeros(15, 2, 256, 10, dtype=jnp.int8), id="v_page_size"),
    pytest.param("v", zeros(14, 2, 128, 10, dtype=jnp.int8), id="v_pages"),
    pytest.param("k_scale", None, id="no_scale"),
    pytest.param("k_scale", zeros(15, 2, dtype=jnp.bfloat16), id="scale_dtype"),
    pytest.param("v_scale", zeros(15, 1), id="scale_heads"),
    pytest.param("v_scale", 0.1, id="scale_number"),
    pytest.param("lam", zeros(3, 4, 4), id="lambda_batch"),
    pytest.param("q", zeros(4, 2, 4, 0, 6), id="q_without_maps"),
  ],
)
def test_error_names_the_bad_argument_of_pages(argument, value):
  """One argument is replaced. The others have 15 pages of 128 keys."""
  arguments = make_arguments(Case("v1", page=128, int8=True, T=2))
  arguments[argument] = value

  # Keys, values and their scales must fit each other, so the error may name
  # another one of them.
  with pytest.raises(ValueError, match=f"^({argument}|v|k_scale) must .*got"):
    decode_attention(**arguments)


def test_scales_are_refused_without_int8():
  """An int8 cache has a scale for each page and head."""
  arguments = make_arguments(Case("v1", page=128))
  arguments["v_scale"] = np.ones((15, 2), np.float32)

  with pytest.raises(
    ValueError,
    match="^v_scale must be None, since v is float32: only int8 has scales;"
    " got float32 of shape",
  ):
    decode_attention(**arguments)


def test_lambda_is_refused_with_one_map():
  """λ is the factor of the second map, and plain attention has one map."""
  arguments = make_arguments(Case("plain", G=1, M=1))
  arguments["lam"] = 0.3

  with pytest.raises(ValueError, match="^lam must be None with one map"):
    decode_attention(**arguments)


def test_tpu_kernel_is_refused_on_another_backend():
  """The tests run on a CPU, here without the interpreter."""
  arguments = make_arguments(V1)

  message = (
    "^implementation = 'pallas_tpu' needs a TPU.*use implementation='xla'"
  )
  with pytest.raises(ValueError, match=message):
    decode_attention(**arguments, implementation="pallas_tpu")


def test_tpu_kernel_refuses_float16():
  arguments = make_arguments(Case("v1", dtype="float16"))

  with (
    tpu_chip.interpreted(),
    pytest.raises(ValueError, match="^q .*float16.*use implementation='xla'"),
  ):
    decode_attention(**arguments, implementation="pallas_tpu")


def test_xla_takes_float16():
  """`eval_shape` traces the program, and does not compute it."""
  arguments = make_arguments(Case("v1", dtype="float16"))
  decode_by_xla = functools.partial(decode_attention, implementation="xla")

  out = jax.eval_shape(decode_by_xla, **arguments)

  assert out.dtype == jnp.float16


@needs_gpu_interpreter
@pytest.mark.parametrize("case", by_name(CASES, COMBINED_CASES))
def test_gpu_kernel_equals_the_reference(case, monkeypatch):
  # The kernel splits the keys of a sequence over several blocks of threads.
  # With splits of 64 keys or more, sequences of 300 keys have several.
  monkeypatch.setattr(gpu_decode, "MIN_SPLIT_KEYS", 64)
  case = dataclasses.replace(case, dtype="float16")

  with gpu_chip.interpreted():
    out = compile_program(case, "pallas_gpu")(make_arguments(case))
    jax.block_until_ready(out)

  assert_equals_reference(out, case, FLOAT16_ERROR)


@needs_gpu_interpreter
@pytest.mark.parametrize(
  ("options", "tolerance"),
  [
    pytest.param({"dtype": "float16"}, FLOAT16_ERROR, id="v1"),
    pytest.param(
      {"dtype": "float16", "window": 100}, FLOAT16_ERROR, id="window"
    ),
    pytest.param(
      # Plain attention has one map.
      {"dtype": "bfloat16", "G": 1, "M": 1},
      BFLOAT16_ERROR,
      id="plain_bfloat16",
    ),
  ],
)
def test_gpu_kernel_has_no_races(options, tolerance):
  """Several blocks of threads share the keys of a long sequence."""
  # JAX offers the result of its race detector only here.
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
  from jax.experimental.pallas import mosaic_gpu as plgpu

  case = Case("races", S=600, lengths=(0, 600, 450), **options)

  with gpu_chip.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
    out = compile_program(case, "pallas_gpu")(make_arguments(case))
    jax.block_until_ready(out)

  assert not interpret_pallas_call.get_races().races_found
  assert_equals_reference(out, case, tolerance)


@needs_gpu_interpreter
def test_shard_map_does_not_change_the_output_of_the_gpu_kernel():
  lam_per_head = "H"
  case = Case("v1", lam=lam_per_head, dtype="float16")
  # The interpreter supports only one device.
  device = np.array(jax.devices()[:1]).reshape(1, 1)
  mesh = Mesh(device, ("data", "tensor"))

  with gpu_chip.interpreted():
    out = decode_in_shard_map(case, "pallas_gpu", mesh)
    jax.block_until_ready(out)

  assert_equals_reference(out, case, FLOAT16_ERROR)


@needs_gpu_interpreter
def test_gpu_kernel_is_refused_on_another_backend():
  """The tests run on a CPU, here without the interpreter."""
  arguments = make_arguments(Case("v1", dtype="float16"))

  with pytest.raises(
    ValueError,
    match="^implementation = 'pallas_gpu' needs a Hopper GPU"
    ".*use implementation='xla'",
  ):
    decode_attention(**arguments, implementation="pallas_gpu")


@needs_gpu_interpreter
@pytest.mark.parametrize(
  ("case", "message"),
  [
    pytest.param(
      Case("v1", H=66, lam="H", dtype="float16"),
      "q .*66 queries",
      id="many_queries",
    ),
    pytest.param(V1, "q .*float32", id="float32"),
    pytest.param(
      Case("v1", T=2, dtype="float16"), "q .*2 new tokens", id="tokens"
    ),
    pytest.param(
      Case("v1", page=128, dtype="float16"), "block_tables .*pages", id="pages"
    ),
    pytest.param(Case("v1", int8=True, dtype="float16"), "k .*int8", id="int8"),
  ],
)
def test_gpu_kernel_names_what_it_does_not_support(case, message):
  arguments = make_arguments(case)

  with (
    gpu_chip.interpreted(),
    pytest.raises(ValueError, match=f"^{message}.*use implementation='xla'"),
  ):
    decode_attention(**arguments, implementation="pallas_gpu")


def test_auto_logs_its_choice_once(caplog):
  # Other tests may have logged the same choice.
  choice.log_once.cache_clear()
  arguments = make_arguments(V1)

  with caplog.at_level("INFO", logger=decode.__name__):
    jax.eval_shape(lambda: decode_attention(**arguments))
    jax.eval_shape(lambda: decode_attention(**arguments))

  assert [record.message for record in caplog.records] == [
    "decode_attention: implementation 'xla' on backend 'cpu'"
  ]


@pytest.mark.parametrize(
  ("backend", "dtype", "implementation"),
  [
    pytest.param("tpu", jnp.float32, "pallas_tpu", id="tpu"),
    pytest.param("tpu", jnp.float16, "xla", id="tpu_float16"),
    pytest.param("gpu", jnp.float32, "xla", id="gpu"),
    pytest.param("gpu", jnp.float16, "xla", id="gpu_float16"),
  ],
)
def test_auto_takes_the_kernel_where_a_tpu_supports_it(
  backend, dtype, implementation
):
  """The kernel takes bfloat16 and float32."""
  arguments = make_arguments(V1)
  q = arguments["q"].astype(dtype)
  v = arguments["v"].astype(dtype)

  chosen = choice.choose(backend, q, v)

  assert chosen == implementation
