"""One property test for every implementation of differential attention. A new implementation joins by a line in IMPLEMENTATIONS."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from diffjax.ops.diff_attention import RESIDUAL_NAMES, chunked, diff_attention, tpu
from diffjax.ops.diff_attention.reference import attention_maps, reference

# Most of the time goes into compiling; LLVM's optimisations are left to the tests that do not run over all cases.
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes and options of one call. `lam` is λ's shape by name, `ids` a (queries, keys) pair of rows of segment ids."""

  name: str
  T: int = 13
  S: int | None = None
  H: int = 2
  K: int = 2
  G: int = 2
  M: int = 2
  V: int = 10
  lam: str = "BTH"
  ids: tuple | None = None
  q_offset: int | tuple[int, int] = 0
  causal: bool = True
  window: int | None = None


PACKED = (0, 0, 0, 0, 0, 7, 7, 7, 7, 3, 3, 3, 3)
CASES = [
  Case("plain", G=1, M=1),
  Case("plain_grouped", G=1, M=1, H=4),
  Case("v1"),
  Case("v1_grouped_lambda_per_head", H=4, lam="H"),
  Case("v1_lambda_scalar", lam="scalar"),
  Case("v2", M=1, H=4, V=6),
  Case("v2_one_group", M=1, H=3, K=1, V=6, window=4),
  Case("several_blocks", T=150, H=4, lam="H"),
  Case("one_query", T=1, S=13, q_offset=(4, 12), lam="scalar"),
  Case("packed", ids=(PACKED, PACKED)),
  Case("packed_not_causal", ids=(PACKED, PACKED), causal=False),
  Case("empty_rows", T=5, S=13, ids=((0, 9, 9, 3, 7), PACKED), causal=False),
  Case("window", window=5),
  Case("window_packed_grouped", H=4, window=3, ids=(PACKED, PACKED)),
  Case("window_not_causal", window=4, causal=False, T=9, S=13),
  Case("fewer_keys", T=13, S=6),
  Case("cross", T=5, S=11, causal=False),
  Case("offset", T=7, S=16, q_offset=6),
  Case("offset_window", T=7, S=16, q_offset=6, window=4),
  Case("offset_before_keys", q_offset=-4),
  Case("offset_beyond_window", q_offset=11, window=4),
  Case("offset_per_row", T=7, S=13, q_offset=(-3, 6), ids=(PACKED[4:11], PACKED)),
  Case("offset_per_row_window", T=7, S=13, q_offset=(2, 6), window=3, H=4),
]


@dataclasses.dataclass(frozen=True)
class Implementation:
  """An implementation as the tests run it, and what it refuses: case → the argument that its error must name, or None."""

  name: str
  refuses: Callable[[Case], str | None] = lambda case: None
  small_blocks: bool = False
  float64_tolerance: float | None = 1e-12  # None: refuses float64
  # A primitive that occurs only in the forward pass, to count how often that runs; None for what leaves nothing to be saved by name.
  forward_marker: str | None = None


def _two_call_refuses(case: Case) -> str | None:
  return "window" if case.window is not None else "q_offset" if case.q_offset != 0 else None


IMPLEMENTATIONS = {
  "reference": Implementation("reference"),
  "chunked": Implementation("chunked", forward_marker="reduce_max"),
  "chunked_small_blocks": Implementation("chunked", small_blocks=True),
  "two_call": Implementation("two_call", refuses=_two_call_refuses, float64_tolerance=1e-6),  # the stock softmax is float32
  "pallas_tpu": Implementation("pallas_tpu", float64_tolerance=None),
}


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def implementation(request, monkeypatch):
  if request.param.small_blocks:  # scans, bands, ragged ends and groups of heads at sizes that compile quickly
    monkeypatch.setattr(chunked, "_SHORT_BLOCK", 3)
    monkeypatch.setattr(chunked, "_MAX_BANDS", 3)
    monkeypatch.setattr(chunked, "_BLOCK_LOGITS", 64)
  with tpu.interpreted(pltpu.InterpretParams(uninitialized_memory="nan")):
    yield request.param


def _arguments(case: Case, seed: int = 0):
  """(q, k, v, λ), the cotangent and the options, float64 arrays in numpy."""
  rng = np.random.default_rng(seed)
  S = case.S or case.T
  normal = lambda *shape: rng.standard_normal(shape)
  lam_shape = {"scalar": (), "H": (case.H,), "BTH": (2, case.T, case.H)}[case.lam]
  q, k, v = normal(2, case.T, case.H, case.G, 6), normal(2, S, case.K, case.M, 6), normal(2, S, case.K, case.V)
  lam = None if case.G == 1 else rng.uniform(-0.5, 1.2, lam_shape)
  options = dict(causal=case.causal, window=case.window, q_offset=case.q_offset)
  if isinstance(case.q_offset, tuple):
    options["q_offset"] = np.array(case.q_offset, np.int32)
  if case.ids is not None:  # the second row is the first one reversed
    pair = [np.stack([np.array(ids), np.array(ids)[::-1]]).astype(np.int32) for ids in case.ids]
    options.update(q_segment_ids=pair[0], kv_segment_ids=pair[1])
  return (q, k, v, lam), normal(2, case.T, case.H, case.V), options


def _run(implementation: str, arguments, d_out, options, dtype):
  """Output and gradients of every differentiable argument."""
  arguments = jax.tree.map(lambda x: jnp.asarray(x, dtype), arguments)
  options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}

  @_jit
  def run(arguments):
    out, pull = jax.vjp(lambda arguments: diff_attention(*arguments, implementation=implementation, **options), arguments)
    return out, pull(jnp.asarray(d_out, dtype))[0]

  return jax.tree.map(np.asarray, run(arguments))


@functools.cache
def _expected(case: Case):
  with jax.enable_x64(True):
    return _run("reference", *_arguments(case), np.float64)


def _assert_close(actual, expected, tolerance):
  """Norm of the difference over norm, leaf by leaf; a leaf of zeros must be zeros."""

  def check(path, a, e):
    a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
    assert np.isfinite(a).all(), f"{jax.tree_util.keystr(path)} is not finite"
    # A gradient that is zero but for rounding (one visible key) is compared with 1.
    error = np.linalg.norm(a - e) / max(np.linalg.norm(e), 1e-3)
    assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.2e}"

  jax.tree_util.tree_map_with_path(check, actual, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_reference_in_float64(implementation, case):
  argument = implementation.refuses(case)
  if argument is not None:
    with pytest.raises(ValueError, match=rf"{argument} .*use implementation="):
      _run(implementation.name, *_arguments(case), np.float32)
    return
  _assert_close(_run(implementation.name, *_arguments(case), np.float32), _expected(case), 3e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("v1_grouped_lambda_per_head", "v2", "packed")], ids=lambda case: case.name)
def test_float64_and_bfloat16(implementation, case):
  arguments, d_out, options = _arguments(case)
  with jax.enable_x64(True):
    if implementation.float64_tolerance is None:
      with pytest.raises(ValueError, match="float64.*use implementation="):
        _run(implementation.name, arguments, d_out, options, np.float64)
    else:
      _assert_close(_run(implementation.name, arguments, d_out, options, np.float64), _expected(case), implementation.float64_tolerance)
  rounded, d_out = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64), (arguments, d_out))
  with jax.enable_x64(True):
    expected = _run("reference", rounded, d_out, options, np.float64)
  actual = _run(implementation.name, rounded, d_out, options, jnp.bfloat16)
  assert actual[0].dtype == jnp.bfloat16
  _assert_close(actual, expected, 2e-2)


def test_finite_differences_of_reference():
  (q, k, v, lam), _, options = _arguments(Case("grouped", T=4, H=2, K=1, V=3, ids=((0, 0, 5, 1), (0, 0, 1, 1))))
  with jax.enable_x64(True):
    f = lambda q, k, v, lam: diff_attention(q, k, v, lam, implementation="reference", **jax.tree.map(jnp.asarray, options))
    check_grads(f, (q, k, v, lam), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_what_reference_sees_is_what_the_docstring_says(causal, window):
  (q, k, _, _), _, options = _arguments(Case("packed", T=7, S=13, q_offset=(2, 9), ids=(PACKED[:7], PACKED), causal=causal, window=window))
  maps = np.asarray(attention_maps(jnp.float32(q), jnp.float32(k), **options))
  for b, t, s in np.ndindex(2, 7, 13):
    distance = options["q_offset"][b] + t - s
    sees = options["q_segment_ids"][b, t] == options["kv_segment_ids"][b, s]
    sees &= distance >= 0 or not causal
    sees &= window is None or abs(distance) < window
    assert (maps[b, :, :, t, s] > 0).all() if sees else (maps[b, :, :, t, s] == 0).all()


def test_causal_by_gradient(implementation):
  (q, k, v, lam), _, _ = _arguments(Case("v1"))
  row = 6
  f = lambda k, v: jnp.sum(diff_attention(*map(jnp.float32, (q,)), k, v, lam, implementation=implementation.name)[:, row])
  for gradient in jax.jit(jax.grad(f, (0, 1)))(jnp.float32(k), jnp.float32(v)):
    assert (gradient[:, row + 1 :] == 0).all()
    assert (gradient[:, : row + 1] != 0).any(axis=(0, *range(2, gradient.ndim))).all()


def test_packed_documents_do_not_see_each_other(implementation):
  (q, k, v, lam), _, options = _arguments(Case("packed", ids=(PACKED, PACKED), causal=False))
  q, k, v, lam = map(jnp.float32, (q, k, v, lam))
  ids = np.array(PACKED)
  f = lambda k, v: jnp.sum(diff_attention(q, k, v, lam, implementation=implementation.name, **options)[0, ids == 7] ** 2)
  for gradient in jax.jit(jax.grad(f, (0, 1)))(k, v):
    assert (gradient[0, ids != 7] == 0).all() and (gradient[1] == 0).all()
    assert (gradient[0, ids == 7] != 0).any(axis=tuple(range(1, gradient.ndim - 1))).all()


def test_lambda_zero_is_plain_attention(implementation):
  (q, k, v, _), _, _ = _arguments(Case("v1"))
  q, k, v = map(jnp.float32, (q, k, v))
  diff = diff_attention(q, k, v, 0.0, implementation=implementation.name)
  plain = diff_attention(q[:, :, :, :1], k[:, :, :, :1], v, implementation=implementation.name)
  chex.assert_trees_all_close(diff, plain, atol=1e-6)
  expected = jax.nn.dot_product_attention(q[:, :, :, 0], k[:, :, :, 0], jnp.pad(v, [(0, 0)] * 4)[..., :6], is_causal=True)
  chex.assert_trees_all_close(diff[..., :6], expected, atol=1e-6)


def test_equal_maps_with_lambda_one_give_zero(implementation):
  (q, k, v, _), _, _ = _arguments(Case("v1"))
  q, k, v = jnp.float32(q).at[:, :, :, 1].set(q[:, :, :, 0]), jnp.float32(k).at[:, :, :, 1].set(k[:, :, :, 0]), jnp.float32(v)
  chex.assert_trees_all_close(diff_attention(q, k, v, 1.0, implementation=implementation.name), jnp.zeros((2, 13, 2, 10)), atol=1e-6)


def test_row_without_keys_gives_zero_and_no_gradient(implementation):
  case = Case("empty", T=5, S=13, ids=((0, 9, 9, 3, 7), PACKED), causal=False)
  arguments, d_out, options = _arguments(case)
  out, (d_q, d_k, d_v, d_lam) = _run(implementation.name, arguments, d_out, options, np.float32)
  assert (out[0, 1:3] == 0).all() and (out[0, 3] != 0).all()
  assert (d_q[0, 1:3] == 0).all() and (d_lam[0, 1:3] == 0).all()
  # Nothing but empty rows: the gradients of keys and values vanish, too.
  options["q_segment_ids"] = np.full_like(options["q_segment_ids"], 9)
  for leaf in jax.tree.leaves(_run(implementation.name, arguments, d_out, options, np.float32)):
    assert (leaf == 0).all()


def test_segment_ids_of_queries_serve_keys(implementation):
  (q, k, v, lam), _, options = _arguments(Case("packed", ids=(PACKED, PACKED)))
  f = lambda **ids: diff_attention(*map(jnp.float32, (q, k, v, lam)), implementation=implementation.name, **ids)
  ids = options["q_segment_ids"]
  chex.assert_trees_all_equal(f(q_segment_ids=ids), f(q_segment_ids=ids, kv_segment_ids=ids))


def test_vmap(implementation):
  stacked = [_arguments(Case("v1"), seed)[0] for seed in range(2)]
  arguments = jax.tree.map(lambda *x: jnp.stack([jnp.float32(a) for a in x]), *stacked)

  def f(q, k, v, lam):
    with tpu.interpreted(True):  # the TPU's interpreter does not take vmap's additional grid axis
      return jnp.sum(diff_attention(q, k, v, lam, implementation=implementation.name) ** 2)

  batched = _jit(jax.vmap(jax.value_and_grad(f, (0, 1, 2, 3))))(*arguments)
  single = [_jit(jax.value_and_grad(f, (0, 1, 2, 3)))(*(x[i] for x in arguments)) for i in range(2)]
  chex.assert_trees_all_close(batched, jax.tree.map(lambda *x: jnp.stack(x), *single), rtol=1e-4, atol=1e-5)


def _count(jaxpr, name: str) -> int:
  """Equations of a primitive, those inside other equations included."""
  inner = lambda value: [getattr(v, "jaxpr", v) for v in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns")) if hasattr(v, "eqns")]
  return sum((eqn.primitive.name == name) + sum(_count(j, name) for j in inner(list(eqn.params.values()))) for eqn in jaxpr.eqns)


def test_remat_by_name_runs_the_forward_pass_once():
  (q, k, v, lam), _, _ = _arguments(Case("v1"))
  arguments = tuple(map(jnp.float32, (q, k, v, lam)))
  checked = 0
  for implementation in IMPLEMENTATIONS.values():
    if implementation.forward_marker is None:
      continue
    f = lambda *a, name=implementation.name: jnp.sum(jnp.sin(diff_attention(*(jnp.cos(x) for x in a), implementation=name)))

    def count(policy, f=f, marker=implementation.forward_marker):
      gradient = jax.value_and_grad(f if policy is None else jax.checkpoint(f, policy=policy), (0, 1, 2, 3))
      return _count(jax.make_jaxpr(gradient)(*arguments).jaxpr, marker), jax.jit(gradient)(*arguments)

    once, expected = count(None)
    named, gradients = count(jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES))
    twice, _ = count(jax.checkpoint_policies.nothing_saveable)
    assert once > 0 and named == once and twice == 2 * once
    chex.assert_trees_all_close(gradients, expected, rtol=1e-5, atol=1e-6)
    checked += 1
  assert checked


def test_logits_transform_of_reference():
  (q, k, v, lam), _, _ = _arguments(Case("v1"))
  q, k, v, lam = map(jnp.float32, (q, k, v, lam))
  out = reference(q, k, v, lam, logits_transform=lambda logits: 2 * logits)
  chex.assert_trees_all_close(out, reference(q, k, v, lam, scale=2 * 6**-0.5), atol=1e-6)
  chex.assert_trees_all_close(attention_maps(q, k).sum(-1), jnp.ones((2, 2, 2, 13)), atol=1e-6)


@pytest.mark.parametrize(
  ("causal", "window", "share"), [(True, None, 0.56), (True, 512, 0.2), (False, 512, 0.35), (False, None, 1.0)], ids=str
)
def test_chunked_skips_what_the_mask_hides(causal, window, share):
  length, block = 4096, 128
  bands = chunked._bands(chunked._Mask(causal, window, 1.0, 0), length, length, block)
  assert len(bands) <= chunked._MAX_BANDS + 1
  computed = sum(band.block * band.span * len(band.rows) for band in bands)
  assert computed <= share * length**2
  assert sorted(row for band in bands for row in band.rows) == list(range(0, length, block))


def test_chunked_memory_is_linear_in_length():
  def temporaries(length):
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    arguments = (shape(1, length, 2, 2, 16), shape(1, length, 2, 2, 16), shape(1, length, 2, 32))
    f = jax.grad(lambda q, k, v: jnp.sum(diff_attention(q, k, v, 0.5, implementation="chunked") ** 2), (0, 1, 2))
    return _jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

  short, long = temporaries(4096), temporaries(16384)
  assert long < 5 * short
  assert long < 16384**2  # one map's logits of one head are four times this


def _bad(**changes):
  arguments = dict(q=jnp.zeros((2, 5, 4, 2, 6)), k=jnp.zeros((2, 5, 2, 2, 6)), v=jnp.zeros((2, 5, 2, 8)), lam=0.5, implementation="chunked")
  arguments.update(changes)
  return arguments


@pytest.mark.parametrize(
  ("named", "arguments"),
  [
    ("q ", _bad(q=jnp.zeros((2, 5, 4, 6)))),
    ("q ", _bad(q=jnp.zeros((2, 5, 4, 3, 6)))),
    ("q ", _bad(q=jnp.zeros((2, 5, 4, 2, 6), jnp.int32))),
    ("k ", _bad(k=jnp.zeros((2, 5, 2, 3, 6)))),
    ("k ", _bad(k=jnp.zeros((2, 5, 3, 2, 6)))),
    ("k ", _bad(k=jnp.zeros((1, 5, 2, 2, 6)))),
    ("k ", _bad(k=jnp.zeros((2, 5, 2, 2, 6), jnp.bfloat16))),
    ("v ", _bad(v=jnp.zeros((2, 4, 2, 8)))),
    ("v ", _bad(v=jnp.zeros((2, 5, 1, 8)))),
    ("lam ", _bad(lam=None)),
    ("lam ", _bad(lam=jnp.zeros(5))),
    ("lam ", _bad(q=jnp.zeros((2, 5, 4, 1, 6)), k=jnp.zeros((2, 5, 2, 1, 6)))),
    ("q_segment_ids ", _bad(kv_segment_ids=jnp.zeros((2, 5), jnp.int32))),
    ("kv_segment_ids ", _bad(q=jnp.zeros((2, 3, 4, 2, 6)), q_segment_ids=jnp.zeros((2, 3), jnp.int32))),
    ("q_segment_ids ", _bad(q_segment_ids=jnp.zeros((2, 5)))),
    ("kv_segment_ids ", _bad(q_segment_ids=jnp.zeros((2, 5), jnp.int32), kv_segment_ids=jnp.zeros((2, 4), jnp.int32))),
    ("q_offset ", _bad(q_offset=jnp.zeros(3, jnp.int32))),
    ("q_offset ", _bad(q_offset=1.5)),
    ("window ", _bad(window=0)),
    ("window ", _bad(window=True)),
    ("implementation ", _bad(implementation="flash")),
  ],
)
def test_bad_arguments_are_named(named, arguments):
  with pytest.raises(ValueError, match=f"^{named}"):
    diff_attention(**arguments)


def test_auto_is_logged_once(caplog):
  from diffjax.ops.diff_attention import api

  api._pick.cache_clear()
  with caplog.at_level("INFO"):
    outs = [diff_attention(**_bad(implementation=name)) for name in ("auto", "auto", "chunked")]
  assert [r.getMessage() for r in caplog.records if "diff_attention" in r.name] == [
    f"diff_attention: implementation 'chunked' on backend '{jax.default_backend()}'"
  ]
  chex.assert_trees_all_equal(*outs)
  assert api._pick("tpu", True, False) == "pallas_tpu" and api._pick("tpu", False, False) == "chunked"
  assert api._pick("tpu", False, True) == "chunked"  # compiled for TPUs on a machine with a GPU
  assert api._pick("gpu", True, True) == "two_call" and api._pick("gpu", True, False) == "chunked"
