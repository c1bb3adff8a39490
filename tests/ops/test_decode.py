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
from diffjax.ops.diff_attention.gpu import chip as gpu_chip
from diffjax.ops.diff_attention.gpu import decode as gpu_decode
from diffjax.ops.diff_attention.tpu import chip as tpu_chip
from diffjax.ops.diff_attention.tpu import decode as tpu_decode
from tests.tiers import full


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


CASES = [
  Case("v1"),
  Case("v1_one_group_lambda_per_head", H=3, K=1, lam="H", S=37, lengths=(37, 36, 0, 5)),
  Case("v1_not_grouped_scale", H=2, lengths=(128, 129, 127, 256), scale=0.7, lam="scalar"),
  Case("v1_keys_not_on_lanes", D=64, V=128),
  Case("v2_only_values_on_lanes", M=1, D=128, window=140),
  Case("plain_many_heads", G=1, M=1, H=18, K=1),
  Case("window_of_one", window=1, M=1, lengths=(0, 1, 300, 129)),
  Case("beyond_the_cache", S=40, lengths=(41, 1000, 40, -3), window=9),
]
COMBINED = [
  Case("v2", M=1),
  Case("plain", G=1, M=1),
  Case("window", window=100, lengths=(0, 99, 300, 229)),
  Case("window_longer_than_the_cache", window=1000),
  Case("whole_blocks", S=256, lengths=(256, 255, 128, 1)),
]
ROUNDED = [Case("v1_bfloat16", D=64, V=128, dtype="bfloat16"), Case("plain_bfloat16_window", G=1, M=1, window=150, dtype="bfloat16")]


needs_gpu_interpreter = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2), reason="Pallas has no public interpreter of Mosaic GPU kernels before JAX 0.11.2"
)


@pytest.fixture(params=["xla", "pallas_tpu"])
def implementation(request, monkeypatch):
  """Its name, while small blocks are used and kernels are interpreted: memory not yet written, or beyond an array, is NaN there."""
  monkeypatch.setattr(tpu_decode, "_BLOCK_BYTES", 1)  # 128 keys a block
  with tpu_chip.interpreted() if request.param == "pallas_tpu" else contextlib.nullcontext():
    yield request.param


def _arguments(case: Case, dtype=None, hidden=np.nan):
  """q, k, v, λ and lengths; values are those of the case's dtype, keys and values that a row does not see are `hidden`."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), case.dtype), np.float64)
  B = len(case.lengths)
  q, k, v = normal(B, case.H, case.G, case.D), normal(B, case.K, case.S, case.M * case.D), normal(B, case.K, case.S, case.V)
  lam = None if case.G == 1 else rng.uniform(-0.5, 1.2, {"scalar": (), "H": (case.H,), "BH": (B, case.H)}[case.lam])
  lengths = np.array(case.lengths, np.int32)
  ends = np.clip(lengths, 0, case.S)[:, None]
  unseen = (np.arange(case.S) >= ends) | (np.arange(case.S) < ends - (case.window or case.S))
  for cache in (k, v):
    np.copyto(cache, hidden, where=unseen[:, None, :, None])
  cast = lambda x: jnp.asarray(x, dtype or case.dtype)
  return cast(q), cast(k), cast(v), None if lam is None else jnp.asarray(lam, dtype or "float32"), jnp.asarray(lengths)


def _decode(case: Case, arguments, implementation: str):
  return decode_attention(*arguments, window=case.window, scale=case.scale, implementation=implementation)


@functools.cache
def _program(case: Case, implementation: str):
  return jax.jit(lambda arguments: _decode(case, arguments, implementation))


def _run(case: Case, arguments, implementation: str):
  return _program(case, implementation)(arguments)


@functools.cache
def _expected(case: Case):
  """`reference` in float64, on a cache that is zero where a row does not see it."""
  B = len(case.lengths)

  @jax.jit
  def run(q, k, v, lam, lengths):
    k, v = (jnp.nan_to_num(jnp.moveaxis(x, 1, 2)) for x in (k, v))
    lam = None if lam is None else jnp.broadcast_to(lam, (B, case.H))[:, None]
    return diff_attention(
      q[:, None], k.reshape(B, case.S, case.K, case.M, case.D), v, lam, q_offset=jnp.clip(lengths, 0, case.S) - 1,
      window=case.window, scale=case.scale, implementation="reference",
    )[:, 0]  # fmt: skip

  with jax.enable_x64(True):
    return np.asarray(run(*_arguments(case, jnp.float64)))


def _assert_close(actual, case: Case, tolerance: float):
  """Row by row of the batch, norm of the difference over norm; a row of length 0 is zeros."""
  actual, expected = np.asarray(actual, np.float64), _expected(case)
  assert actual.shape == (len(case.lengths), case.H, case.V)
  for length, a, e in zip(case.lengths, actual, expected, strict=True):
    assert (e == 0).all() == (length <= 0)
    error = np.linalg.norm(a - e) if length <= 0 else np.linalg.norm(a - e) / np.linalg.norm(e)
    assert error <= (tolerance if length > 0 else 0), f"length {length}: relative error {error:.2e}"


@pytest.mark.parametrize("case", [*CASES, *full(COMBINED)], ids=lambda case: case.name)
def test_agrees_with_reference(implementation, case):
  _assert_close(_run(case, _arguments(case), implementation), case, 3e-6)


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=lambda case: case.name)
def test_hidden_values_that_are_finite_count_for_nothing_either(implementation, case):
  _assert_close(_run(case, _arguments(case, hidden=1e3), implementation), case, 3e-6)


@pytest.mark.parametrize("case", [*CASES[:3], *COMBINED[:2]], ids=lambda case: case.name)
def test_agrees_with_reference_in_float64(case):
  with jax.enable_x64(True):
    out = _run(case, _arguments(case, jnp.float64), "xla")
  assert out.dtype == np.float64
  _assert_close(out, case, 1e-12)


@pytest.mark.parametrize("case", [ROUNDED[0], *full(ROUNDED[1:])], ids=lambda case: case.name)
def test_agrees_with_reference_in_bfloat16(implementation, case):
  out = _run(case, _arguments(case), implementation)
  assert out.dtype == jnp.bfloat16
  _assert_close(out, case, 2e-2)


@needs_gpu_interpreter
@pytest.mark.parametrize("case", [*CASES, *full(COMBINED)], ids=lambda case: case.name)
def test_the_gpu_kernel_agrees_with_reference(case, monkeypatch):
  monkeypatch.setattr(gpu_decode, "_LEAST_KEYS", 64)  # several splits
  case = dataclasses.replace(case, dtype="float16")
  with gpu_chip.interpreted():
    _assert_close(_run(case, _arguments(case), "pallas_gpu"), case, 2e-3)


@needs_gpu_interpreter
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"G": 1, "M": 1, "dtype": "bfloat16"}], ids=str)
def test_no_race_in_the_gpu_kernel(options, monkeypatch):
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
  from jax.experimental.pallas import mosaic_gpu as plgpu

  monkeypatch.setattr(gpu_decode, "_LEAST_KEYS", 256)
  case = Case("v1", **{"dtype": "float16", "S": 600, "lengths": (0, 600, 450), **options})
  with gpu_chip.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
    _assert_close(_run(case, _arguments(case), "pallas_gpu"), case, 2e-2)
  assert not interpret_pallas_call.get_races().races_found


def test_equals_one_row_of_the_whole_sequence(implementation):
  """Token after token, the cache filled as decoding fills it, gives what one causal call over the sequence gives."""
  rng = np.random.default_rng(1)
  T, S = 5, 8
  q, k, v = (jnp.float32(rng.standard_normal(shape)) for shape in ((1, T, 4, 2, 6), (1, T, 2, 2, 6), (1, T, 2, 10)))
  whole = jax.jit(lambda *a: diff_attention(*a, window=3, implementation="reference"))(q, k, v, 0.3)
  cached_k, cached_v = np.full((1, 2, S, 12), np.nan, np.float32), np.full((1, 2, S, 10), np.nan, np.float32)
  step = jax.jit(lambda *a: decode_attention(*a, window=3, implementation=implementation))
  for t in range(T):
    cached_k[:, :, t], cached_v[:, :, t] = np.reshape(k[:, t], (1, 2, 12)), v[:, t]
    out = step(q[:, t], cached_k, cached_v, 0.3, np.array([t + 1], np.int32))
    np.testing.assert_allclose(out, whole[:, t], atol=1e-5)


def test_other_lengths_do_not_compile_again(implementation):
  *arrays, lengths = _arguments(CASES[0])
  first = _run(CASES[0], (*arrays, lengths), implementation)
  compiled = _program(CASES[0], implementation)._cache_size()
  _, again = (_run(CASES[0], (*arrays, n), implementation) for n in (lengths // 2, lengths))
  assert _program(CASES[0], implementation)._cache_size() == compiled
  assert (first == again).all()


def test_in_shard_map(implementation):
  case = Case("v1", S=140, lengths=(0, 1, 140, 130), lam="H")
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
  cache = P("data", "tensor")
  # λ is every data shard's, as the model's is.
  run = lambda *arguments: _decode(case, arguments, implementation)
  run = jax.shard_map(run, mesh=mesh, in_specs=(cache, cache, cache, P("tensor"), P("data")), out_specs=cache)
  _assert_close(jax.jit(run)(*_arguments(case)), case, 3e-6)


def test_no_race_in_the_kernel(monkeypatch):
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where the interpreter says what it found, and nowhere else

  monkeypatch.setattr(tpu_decode, "_BLOCK_BYTES", 1)
  case = Case("v1_window", window=150, lengths=(0, 5, 300, 170))
  with tpu_chip.interpreted(pltpu.InterpretParams(detect_races=True)):
    out = jax.block_until_ready(_run(case, _arguments(case), "pallas_tpu"))
  assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found
  _assert_close(out, case, 3e-6)


@pytest.mark.parametrize("window", [None, 1, 2, 128, 129, 300, 1000])
@pytest.mark.parametrize("block_bytes", [1, 256])
def test_the_kernel_walks_the_blocks_that_a_row_sees_and_no_other(window, block_bytes, monkeypatch):
  monkeypatch.setattr(tpu_decode, "_BLOCK_BYTES", block_bytes * 1024)
  cached = 1000
  walk = tpu_decode._Walk.choose(cached, None if window is None else min(window, cached), 1024, 16)
  for length in (0, 1, 2, 127, 128, 129, 256, 257, 500, 999, 1000):
    seen = {key // walk.block for key in range(max(0, length - (window or cached)), length)}
    at_hand, live = zip(*(map(int, walk.at(jnp.int32(length), step)) for step in range(walk.steps)), strict=True)
    assert [block for block, computed in zip(at_hand, live, strict=True) if computed] == sorted(seen)
    assert set(at_hand) == (seen or {0})  # a row that sees nothing has the first block at hand, once
    assert all(b - a in (0, 1) for a, b in zip(at_hand, at_hand[1:], strict=False))


def test_xla_multiplies_with_keys_once_and_with_values_once():
  case = Case("v1")
  traced = jax.jit(lambda *arguments: _decode(case, arguments, "xla")).trace(*_arguments(case))
  products = lambda platform: traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.dot_general")
  assert products("cuda") == products("tpu") == 2
  assert products("cpu") == 3  # one more where the cache holds what is not finite


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("q", jnp.zeros((4, 4, 2))),
    ("q", jnp.zeros((4, 4, 3, 6))),
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
  arguments = dict(zip(("q", "k", "v", "lam", "lengths"), _arguments(Case("v1")), strict=True))
  with pytest.raises(ValueError, match=f"^{name} (must|has) .*(got|must divide)"):
    decode_attention(**({"implementation": implementation} | arguments | {name: value}))


def test_lambda_is_refused_with_one_map():
  q, k, v, _, lengths = _arguments(Case("plain", G=1, M=1))
  with pytest.raises(ValueError, match="^lam must be None with one map"):
    decode_attention(q, k, v, 0.3, lengths)


def test_the_kernel_says_what_it_does_not_take():
  q, k, v, lam, lengths = _arguments(Case("v1"))
  with pytest.raises(ValueError, match="^implementation = 'pallas_tpu' needs a TPU.*use implementation='xla'"):
    decode_attention(q, k, v, lam, lengths, implementation="pallas_tpu")
  half = [x.astype(jnp.float16) for x in (q, k, v)]
  with tpu_chip.interpreted(), pytest.raises(ValueError, match="^q .*float16.*use implementation='xla'"):
    decode_attention(*half, lam, lengths, implementation="pallas_tpu")
  assert jax.eval_shape(lambda: decode_attention(*half, lam, lengths, implementation="xla")).dtype == jnp.float16


@needs_gpu_interpreter
def test_the_gpu_kernel_in_shard_map():
  """On one device: the interpreter takes no more."""
  case, cache = Case("v1", lam="H", dtype="float16"), P("data", "tensor")
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
  run = lambda *arguments: _decode(case, arguments, "pallas_gpu")
  run = jax.shard_map(run, mesh=mesh, in_specs=(cache, cache, cache, P("tensor"), P("data")), out_specs=cache)
  with gpu_chip.interpreted():
    _assert_close(jax.jit(run)(*_arguments(case)), case, 2e-3)


@needs_gpu_interpreter
def test_the_gpu_kernel_says_what_it_does_not_take():
  q, k, v, lam, lengths = _arguments(Case("v1", dtype="float16"))
  with pytest.raises(ValueError, match="^implementation = 'pallas_gpu' needs a Hopper GPU.*use implementation='xla'"):
    decode_attention(q, k, v, lam, lengths, implementation="pallas_gpu")
  many = _arguments(Case("many", H=66, lam="H", dtype="float16"))
  for arguments, what in ((many, "66 queries"), ([x.astype(jnp.float32) for x in (q, k, v)] + [lam, lengths], "float32")):
    with gpu_chip.interpreted(), pytest.raises(ValueError, match=f"^q .*{what}.*use implementation='xla'"):
      decode_attention(*arguments, implementation="pallas_gpu")


def test_auto_is_logged_once(caplog):
  decode._log_once.cache_clear()
  arguments = _arguments(Case("v1"))
  with caplog.at_level("INFO", logger=decode.__name__):
    for _ in range(2):
      jax.eval_shape(lambda: decode_attention(*arguments))
  assert [record.message for record in caplog.records] == ["decode_attention: implementation 'xla' on backend 'cpu'"]


def test_auto_takes_the_kernel_on_a_tpu_where_it_can():
  q, _, v, *_ = _arguments(Case("v1"))
  half = (q.astype(jnp.float16), v.astype(jnp.float16))
  assert decode._pick("tpu", q, v) == "pallas_tpu"
  assert decode._pick("tpu", *half) == decode._pick("gpu", q, v) == decode._pick("gpu", *half) == "xla"
