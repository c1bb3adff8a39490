"""Decoding against a cache: one property for all implementations, then what each of them promises besides."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

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
from tests.harness.tiers import full


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes and options of one call; `lam` is the shape of λ by name."""

  name: str
  S: int = 300
  lengths: tuple[int, ...] = (0, 1, 300, 130)
  H: int = 4
  K: int = 2
  G: int = 2
  M: int = 2
  D: int = 6
  V: int = 10
  lam: str = "BH"
  window: int | None = None
  scale: float | None = None
  dtype: str = "float32"
  T: int | None = None  # new tokens; None for one, without its axis
  page: int | None = None  # keys of a page; None for a cache without pages
  int8: bool = False


CASES = [
  Case("v1"),
  Case(
    "v1_one_group_lambda_per_head",
    H=3,
    K=1,
    lam="H",
    S=37,
    lengths=(37, 36, 0, 5),
  ),
  Case(
    "v1_not_grouped_scale",
    H=2,
    lengths=(128, 129, 127, 256),
    scale=0.7,
    lam="scalar",
  ),
  Case("v1_keys_not_on_lanes", D=64, V=128),
  Case("v2_only_values_on_lanes", M=1, D=128, window=140),
  Case("plain_many_heads", G=1, M=1, H=18, K=1),
  Case("window_of_one", window=1, M=1, lengths=(0, 1, 300, 129)),
  Case("beyond_the_cache", S=40, lengths=(41, 1000, 40, -3), window=9),
]
PAGED = [
  Case("v1_pages", page=128),
  Case(
    "shared_noise_in_pages", G=3, H=8, T=2, page=128, lengths=(1, 128, 300, 129)
  ),
  Case(
    "v2_pages_of_several_blocks_window",
    M=1,
    page=256,
    S=700,
    lengths=(0, 256, 700, 400),
    window=140,
  ),
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
  Case("v1_tokens", T=5, window=7, lengths=(0, 3, 300, 131)),
  Case("v2_tokens_in_pages", T=3, M=1, page=128, lengths=(1, 128, 300, 129)),
  Case("v1_int8_pages", page=128, int8=True),
]
MORE_PAGED = [
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
COMBINED = [
  Case("v2", M=1),
  Case("plain", G=1, M=1),
  Case("window", window=100, lengths=(0, 99, 300, 229)),
  Case("window_longer_than_the_cache", window=1000),
  Case("whole_blocks", S=256, lengths=(256, 255, 128, 1)),
]
ROUNDED = [
  Case("v1_bfloat16", D=64, V=128, dtype="bfloat16"),
  Case("plain_bfloat16_window", G=1, M=1, window=150, dtype="bfloat16"),
]


needs_gpu_interpreter = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2),
  reason="Pallas has no public interpreter of Mosaic GPU kernels before JAX 0.11.2",
)


@pytest.fixture(params=["xla", "pallas_tpu"])
def implementation(request, monkeypatch):
  """Its name, while small blocks are used and kernels are interpreted: memory not yet written, or beyond an array, is NaN there."""
  monkeypatch.setattr(tpu_decode, "_BLOCK_BYTES", 1)  # 128 keys a block
  with (
    tpu_chip.interpreted()
    if request.param == "pallas_tpu"
    else contextlib.nullcontext()
  ):
    yield request.param


def _arguments(case: Case, dtype=None, hidden=np.nan):
  """The arguments of a call by name: values are those of the case's dtype, all that a row does not see is `hidden`."""
  q, k, v, scales, lam, lengths = _cache(case, hidden)
  tables = None
  if case.page is not None:
    tables, k, v, scales = _in_pages(case, k, v, scales, hidden)
  cast = lambda x: jnp.asarray(
    x, jnp.int8 if case.int8 else dtype or case.dtype
  )
  arguments = {
    "q": jnp.asarray(q, dtype or case.dtype),
    "k": cast(np.nan_to_num(k) if case.int8 else k),
    "v": cast(np.nan_to_num(v) if case.int8 else v),
  }
  arguments |= {
    "lam": None if lam is None else jnp.asarray(lam, dtype or "float32"),
    "lengths": jnp.asarray(lengths),
  }
  arguments |= {} if tables is None else {"block_tables": jnp.asarray(tables)}
  return arguments | (
    {"k_scale": jnp.float32(scales[0]), "v_scale": jnp.float32(scales[1])}
    if case.int8
    else {}
  )


def _cache(case: Case, hidden):
  """q, keys and values of each row in its order, their scales [2, B, pages of a row, K], λ, lengths."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: np.asarray(
    jnp.asarray(rng.standard_normal(shape), case.dtype), np.float64
  )
  B, T, page = len(case.lengths), case.T or 1, case.page or case.S
  groups = case.H // max(case.G - 1, 1)
  q, k, v = (
    normal(B, groups, case.G, case.D),
    normal(B, case.K, case.S, case.M * case.D),
    normal(B, case.K, case.S, case.V),
  )
  if case.T is not None:
    q = normal(B, T, groups, case.G, case.D)
  lam = (
    None
    if case.G == 1
    else rng.uniform(
      -0.5,
      1.2,
      {"scalar": (), "H": (case.H,), "BH": (*q.shape[:-3], case.H)}[case.lam],
    )
  )
  lengths = np.array(case.lengths, np.int32)
  scales = np.float64(
    np.float32(rng.uniform(0.01, 0.1, (2, B, -(-case.S // page), case.K)))
  )
  if case.int8:
    k, v = (rng.integers(-127, 128, x.shape).astype(np.float64) for x in (k, v))
  starts = _starts(case)[:, None]
  unseen = (np.arange(case.S) >= starts + T) | (
    np.arange(case.S) <= starts - (case.window or starts.max() + 1)
  )
  for cache in (k, v):
    np.copyto(cache, hidden, where=unseen[:, None, :, None])
  blocks = np.pad(
    unseen, ((0, 0), (0, -case.S % page)), constant_values=True
  ).reshape(B, -1, page)
  np.copyto(scales, hidden, where=blocks.all(axis=2)[None, :, :, None])
  return q, k, v, scales if case.page else scales[:, :, 0], lam, lengths


def _starts(case: Case):
  """The position of each row's first new token."""
  return np.clip(
    np.array(case.lengths) - (case.T or 1), -(case.T or 1), case.S - 1
  )


def _in_pages(case: Case, k, v, scales, hidden):
  """Tables, keys, values and scales of a pool in which the rows' pages lie in no order, beside others that no row has."""
  rng = np.random.default_rng(1)
  (B, K, S, _), page = k.shape, case.page
  N = -(-S // page)
  P = B * N + 3
  ids = rng.permutation(P)[: B * N].reshape(B, N).astype(np.int32)
  pools = []
  for x in (k, v):
    pool = np.full((P, K, page, x.shape[3]), hidden)
    x = np.pad(
      x, ((0, 0), (0, 0), (0, -S % page), (0, 0)), constant_values=hidden
    )
    pool[ids] = np.moveaxis(x.reshape(B, K, N, page, -1), 2, 1)
    pools.append(pool)
  of_pages = np.full((2, P, K), hidden)
  of_pages[:, ids] = scales
  held = np.maximum(-(-np.array(case.lengths) // page), 0)[:, None]
  return (
    np.where(np.arange(N) < held, ids, rng.choice([-7, 1 << 30, 2], (B, N))),
    *pools,
    of_pages,
  )


def _decode(case: Case, arguments, implementation: str):
  return decode_attention(
    **arguments,
    window=case.window,
    scale=case.scale,
    implementation=implementation,
  )


@functools.cache
def _program(case: Case, implementation: str):
  return jax.jit(lambda arguments: _decode(case, arguments, implementation))


def _run(case: Case, arguments, implementation: str):
  return _program(case, implementation)(arguments)


@functools.cache
def _expected(case: Case):
  """`reference` in float64, on a cache that is zero where a row does not see it."""
  q, k, v, scales, lam, _ = _cache(case, np.nan)
  B, S = k.shape[0], case.S
  if case.int8:
    page = case.page or S
    of_keys = [
      np.repeat(np.moveaxis(x.reshape(B, -1, case.K), 2, 1), page, axis=2)[
        :, :, :S, None
      ]
      for x in scales
    ]
    k, v = k * of_keys[0], v * of_keys[1]
  k, v = (np.moveaxis(np.nan_to_num(x), 1, 2) for x in (k, v))
  q = q if case.T else q[:, None]
  lam = (
    None
    if lam is None
    else np.broadcast_to(
      lam if case.T or lam.ndim < 2 else lam[:, None], (*q.shape[:-3], case.H)
    )
  )
  with jax.enable_x64(True):
    run = jax.jit(
      functools.partial(
        diff_attention,
        window=case.window,
        scale=case.scale,
        implementation="reference",
      )
    )
    out = run(
      q,
      k.reshape(B, S, case.K, case.M, case.D),
      v,
      lam,
      q_offset=_starts(case).astype(np.int32),
    )
  return np.asarray(out)


def _assert_close(actual, case: Case, tolerance: float):
  """Token by token, norm of the difference over norm; a token that sees nothing has zeros."""
  actual, expected = np.asarray(actual, np.float64), _expected(case)
  assert actual.shape == (
    len(case.lengths),
    *((case.T,) if case.T else ()),
    case.H,
    case.V,
  )
  for start, of_row, wanted in zip(
    _starts(case), actual if case.T else actual[:, None], expected, strict=True
  ):
    for position, a, e in zip(
      range(start, start + len(wanted)), of_row, wanted, strict=True
    ):
      assert (e == 0).all() == (position < 0)
      error = (
        np.linalg.norm(a - e)
        if position < 0
        else np.linalg.norm(a - e) / np.linalg.norm(e)
      )
      assert error <= (tolerance if position >= 0 else 0), (
        f"position {position}: relative error {error:.2e}"
      )


@pytest.mark.parametrize(
  "case",
  [*CASES, *PAGED, *full([*COMBINED, *MORE_PAGED])],
  ids=lambda case: case.name,
)
def test_agrees_with_reference(implementation, case):
  _assert_close(_run(case, _arguments(case), implementation), case, 3e-6)


@pytest.mark.parametrize(
  "case", [CASES[0], CASES[4], PAGED[2], PAGED[6]], ids=lambda case: case.name
)
def test_hidden_values_that_are_finite_count_for_nothing_either(
  implementation, case
):
  _assert_close(
    _run(case, _arguments(case, hidden=1e3), implementation), case, 3e-6
  )


@pytest.mark.parametrize(
  "case", [*CASES[:3], *COMBINED[:2], *PAGED[1:5]], ids=lambda case: case.name
)
def test_agrees_with_reference_in_float64(case):
  with jax.enable_x64(True):
    out = _run(case, _arguments(case, jnp.float64), "xla")
  assert out.dtype == np.float64
  _assert_close(out, case, 1e-12)


@pytest.mark.parametrize(
  "case", [ROUNDED[0], *full(ROUNDED[1:])], ids=lambda case: case.name
)
def test_agrees_with_reference_in_bfloat16(implementation, case):
  out = _run(case, _arguments(case), implementation)
  assert out.dtype == jnp.bfloat16
  _assert_close(out, case, 2e-2)


@needs_gpu_interpreter
@pytest.mark.parametrize(
  "case", [*CASES, *full(COMBINED)], ids=lambda case: case.name
)
def test_the_gpu_kernel_agrees_with_reference(case, monkeypatch):
  monkeypatch.setattr(gpu_decode, "_MIN_SPLIT_KEYS", 64)  # several splits
  case = dataclasses.replace(case, dtype="float16")
  with gpu_chip.interpreted():
    _assert_close(_run(case, _arguments(case), "pallas_gpu"), case, 2e-3)


@needs_gpu_interpreter
@pytest.mark.parametrize(
  "options",
  [{}, {"window": 100}, {"G": 1, "M": 1, "dtype": "bfloat16"}],
  ids=str,
)
def test_no_race_in_the_gpu_kernel(options, monkeypatch):
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
  from jax.experimental.pallas import mosaic_gpu as plgpu

  monkeypatch.setattr(gpu_decode, "_MIN_SPLIT_KEYS", 256)
  case = Case(
    "v1", **{"dtype": "float16", "S": 600, "lengths": (0, 600, 450), **options}
  )
  with gpu_chip.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
    _assert_close(_run(case, _arguments(case), "pallas_gpu"), case, 2e-2)
  assert not interpret_pallas_call.get_races().races_found


def test_equals_one_row_of_the_whole_sequence(implementation):
  """Token after token, the cache filled as decoding fills it, gives what one causal call over the sequence gives."""
  rng = np.random.default_rng(1)
  T, S = 5, 8
  q, k, v = (
    jnp.float32(rng.standard_normal(shape))
    for shape in ((1, T, 4, 2, 6), (1, T, 2, 2, 6), (1, T, 2, 10))
  )
  whole = jax.jit(
    lambda *a: diff_attention(*a, window=3, implementation="reference")
  )(q, k, v, 0.3)
  cached_k, cached_v = (
    np.full((1, 2, S, 12), np.nan, np.float32),
    np.full((1, 2, S, 10), np.nan, np.float32),
  )
  step = jax.jit(
    lambda *a: decode_attention(*a, window=3, implementation=implementation)
  )
  for t in range(T):
    cached_k[:, :, t], cached_v[:, :, t] = (
      np.reshape(k[:, t], (1, 2, 12)),
      v[:, t],
    )
    out = step(q[:, t], cached_k, cached_v, 0.3, np.array([t + 1], np.int32))
    np.testing.assert_allclose(out, whole[:, t], atol=1e-5)


def test_other_lengths_do_not_compile_again(implementation):
  arguments = _arguments(CASES[0])
  first = _run(CASES[0], arguments, implementation)
  compiled = _program(CASES[0], implementation)._cache_size()
  _, again = (
    _run(CASES[0], arguments | {"lengths": n}, implementation)
    for n in (arguments["lengths"] // 2, arguments["lengths"])
  )
  assert _program(CASES[0], implementation)._cache_size() == compiled
  assert (first == again).all()


def test_in_shard_map(implementation):
  case = Case("v1", S=140, lengths=(0, 1, 140, 130), lam="H")
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
  cache = P("data", "tensor")
  # λ is every data shard's, as the model's is.
  specs = {
    "q": cache,
    "k": cache,
    "v": cache,
    "lam": P("tensor"),
    "lengths": P("data"),
  }
  run = jax.shard_map(
    lambda arguments: _decode(case, arguments, implementation),
    mesh=mesh,
    in_specs=(specs,),
    out_specs=cache,
  )
  _assert_close(jax.jit(run)(_arguments(case)), case, 3e-6)


@pytest.mark.parametrize(
  "options",
  [{}, {"page": 128, "int8": True, "T": 2}],
  ids=["without_pages", "int8_pages"],
)
def test_no_race_in_the_kernel(options, monkeypatch):
  from jax._src.pallas.mosaic.interpret import (
    interpret_pallas_call,
  )  # where the interpreter says what it found, and nowhere else

  monkeypatch.setattr(tpu_decode, "_BLOCK_BYTES", 1)
  case = Case("v1_window", window=150, lengths=(0, 5, 300, 170), **options)
  with tpu_chip.interpreted(pltpu.InterpretParams(detect_races=True)):
    out = jax.block_until_ready(_run(case, _arguments(case), "pallas_tpu"))
  assert (
    interpret_pallas_call.races is not None
    and not interpret_pallas_call.races.races_found
  )
  _assert_close(out, case, 3e-6)


@pytest.mark.parametrize("window", [None, 1, 2, 128, 129, 300, 1000])
@pytest.mark.parametrize(
  "page, pages, block_bytes, tokens",
  [
    (1000, 1, 1, 1),
    (1000, 1, 256, 5),
    (128, 8, 1, 1),
    (300, 4, 1, 3),
    (16, 70, 1, 1),
  ],
)
def test_the_kernel_walks_the_blocks_that_rows_see_and_no_other(
  window, page, pages, block_bytes, tokens, monkeypatch
):
  monkeypatch.setattr(tpu_decode, "_BLOCK_BYTES", block_bytes * 1024)
  blocks = tpu_decode._Blocks.choose(
    page, pages, window, tokens, 1024, 1, 16, 1
  )
  lengths = np.array([0, 1, 2, 127, 128, 129, 256, 257, 500, 999, 1000, 0])
  tables = (
    np.random.default_rng(0)
    .permutation(len(lengths) * pages)
    .reshape(-1, pages)
  )
  grid = blocks.grid(jnp.asarray(lengths - tokens), jnp.asarray(tables))
  steps = [], [], []
  for row, length in enumerate(lengths):
    seen = range(max(0, length - tokens - (window or 2000) + 1), length)
    parts = dict.fromkeys(
      (key // page, key % page // blocks.block_size) for key in seen
    ) or {(0, 0): None}  # an empty row writes its zeros
    for at, part in parts:
      steps[0].append(row)
      steps[1].append(tables[row, at] * blocks.blocks_per_page + part)
      steps[2].append(at * blocks.blocks_per_page + part)
  assert int(grid.num_steps) == len(steps[0])
  for found, wanted in zip(
    (grid.sequence, grid.pool_block, grid.sequence_block), steps, strict=True
  ):
    assert found[: grid.num_steps].tolist() == wanted


def test_xla_multiplies_with_keys_once_and_with_values_once():
  case = Case("v1")
  traced = jax.jit(lambda arguments: _decode(case, arguments, "xla")).trace(
    _arguments(case)
  )
  products = lambda platform: (
    traced.lower(lowering_platforms=(platform,))
    .as_text()
    .count("stablehlo.dot_general")
  )
  assert products("cuda") == products("tpu") == 2
  assert (
    products("cpu") == 3
  )  # one more where the cache holds what is not finite


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("q", jnp.zeros((4, 4, 2))),
    ("lam", jnp.zeros((4, 8))),
    ("q", jnp.zeros((4, 4, 2, 6), jnp.int32)),
    ("q", [[1.0]]),
    ("k", jnp.zeros((4, 2, 300, 7))),
    ("k", jnp.zeros((4, 3, 300, 12))),
    ("k", jnp.zeros((1, 2, 300, 12))),
    ("k", jnp.zeros((4, 2, 300, 2, 6))),
    ("k", jnp.zeros((4, 2, 300, 12), jnp.bfloat16)),
    ("k", jnp.zeros((4, 2, 0, 12))),
    ("v", jnp.zeros((4, 2, 299, 10))),
    ("v", jnp.zeros((4, 2, 300, 10), jnp.float16)),
    ("lam", None),
    ("lam", jnp.zeros(3)),
    ("lam", jnp.zeros((4, 1, 4))),
    ("lam", jnp.zeros(4, jnp.int32)),
    ("lam", "0.3"),
    ("lengths", 3),
    ("lengths", [1, 2, 3, 4]),
    ("lengths", jnp.zeros(4)),
    ("lengths", jnp.zeros(3, jnp.int32)),
    ("lengths", jnp.zeros((4, 1), jnp.int32)),
    ("window", 0),
    ("window", 2.0),
    ("window", True),
    ("scale", "1"),
    ("scale", float("nan")),
    ("implementation", "reference"),
    ("implementation", None),
  ],
)
def test_bad_arguments_are_named(implementation, name, value):
  with pytest.raises(
    ValueError, match=f"^{name} (must|has) .*(got|must divide)"
  ):
    decode_attention(
      **(
        {"implementation": implementation}
        | _arguments(Case("v1"))
        | {name: value}
      )
    )


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("block_tables", [[0, 1, 2]] * 4),
    ("block_tables", jnp.zeros((4, 3))),
    ("block_tables", jnp.zeros((4, 3), bool)),
    ("block_tables", jnp.zeros((3, 3), jnp.int32)),
    ("block_tables", jnp.zeros((4, 0), jnp.int32)),
    ("block_tables", jnp.zeros(4, jnp.int32)),
    ("k", jnp.zeros((15, 2, 128, 12))),
    ("v", jnp.zeros((15, 2, 128, 10))),
    ("v", jnp.zeros((15, 2, 256, 10), jnp.int8)),
    ("v", jnp.zeros((14, 2, 128, 10), jnp.int8)),
    ("k_scale", None),
    ("k_scale", jnp.zeros((15, 2), jnp.bfloat16)),
    ("v_scale", jnp.zeros((15, 1))),
    ("v_scale", 0.1),
    ("lam", jnp.zeros((3, 4, 4))),
    ("q", jnp.zeros((4, 2, 4, 0, 6))),
  ],
)
def test_bad_arguments_of_pages_are_named(implementation, name, value):
  arguments = _arguments(Case("v1", page=128, int8=True, T=2))
  with pytest.raises(ValueError, match=f"^({name}|v|k_scale) must .*got"):
    decode_attention(
      **({"implementation": implementation} | arguments | {name: value})
    )


def test_scales_are_for_int8_alone():
  with pytest.raises(
    ValueError,
    match="^v_scale must be None, since v is float32: only int8 has scales; got float32 of shape",
  ):
    decode_attention(
      **_arguments(Case("v1", page=128)), v_scale=jnp.ones((15, 2))
    )


def test_lambda_is_refused_with_one_map():
  with pytest.raises(ValueError, match="^lam must be None with one map"):
    decode_attention(**_arguments(Case("plain", G=1, M=1)) | {"lam": 0.3})


def test_the_kernel_says_what_it_does_not_take():
  with pytest.raises(
    ValueError,
    match="^implementation = 'pallas_tpu' needs a TPU.*use implementation='xla'",
  ):
    decode_attention(**_arguments(Case("v1")), implementation="pallas_tpu")
  half = _arguments(Case("v1", dtype="float16"))
  with (
    tpu_chip.interpreted(),
    pytest.raises(ValueError, match="^q .*float16.*use implementation='xla'"),
  ):
    decode_attention(**half, implementation="pallas_tpu")
  assert (
    jax.eval_shape(lambda: decode_attention(**half, implementation="xla")).dtype
    == jnp.float16
  )


@needs_gpu_interpreter
def test_the_gpu_kernel_in_shard_map():
  """On one device: the interpreter takes no more."""
  case, cache = Case("v1", lam="H", dtype="float16"), P("data", "tensor")
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
  specs = {
    "q": cache,
    "k": cache,
    "v": cache,
    "lam": P("tensor"),
    "lengths": P("data"),
  }
  run = jax.shard_map(
    lambda arguments: _decode(case, arguments, "pallas_gpu"),
    mesh=mesh,
    in_specs=(specs,),
    out_specs=cache,
  )
  with gpu_chip.interpreted():
    _assert_close(jax.jit(run)(_arguments(case)), case, 2e-3)


@needs_gpu_interpreter
def test_the_gpu_kernel_says_what_it_does_not_take():
  with pytest.raises(
    ValueError,
    match="^implementation = 'pallas_gpu' needs a Hopper GPU.*use implementation='xla'",
  ):
    decode_attention(
      **_arguments(Case("v1", dtype="float16")), implementation="pallas_gpu"
    )
  for case, what in (
    (Case("many", H=66, lam="H", dtype="float16"), "q .*66 queries"),
    (Case("v1"), "q .*float32"),
    (Case("v1", T=2, dtype="float16"), "q .*2 new tokens"),
    (Case("v1", page=128, dtype="float16"), "block_tables .*pages"),
    (Case("v1", int8=True, dtype="float16"), "k .*int8"),
  ):
    with (
      gpu_chip.interpreted(),
      pytest.raises(ValueError, match=f"^{what}.*use implementation='xla'"),
    ):
      decode_attention(**_arguments(case), implementation="pallas_gpu")


def test_auto_is_logged_once(caplog):
  choice._log_once.cache_clear()
  arguments = _arguments(Case("v1"))
  with caplog.at_level("INFO", logger=decode.__name__):
    for _ in range(2):
      jax.eval_shape(lambda: decode_attention(**arguments))
  assert [record.message for record in caplog.records] == [
    "decode_attention: implementation 'xla' on backend 'cpu'"
  ]


def test_auto_takes_the_kernel_on_a_tpu_where_it_can():
  q, v = (_arguments(Case("v1"))[name] for name in "qv")
  half = (q.astype(jnp.float16), v.astype(jnp.float16))
  assert choice.choose("tpu", q, v) == "pallas_tpu"
  assert (
    choice.choose("tpu", *half)
    == choice.choose("gpu", q, v)
    == choice.choose("gpu", *half)
    == "xla"
  )
