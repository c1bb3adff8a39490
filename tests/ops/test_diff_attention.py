"""One property test for every implementation of differential attention. A new implementation joins by a line in IMPLEMENTATIONS.

Numbers are rounded to the dtype that an implementation is tested in, and compared with `reference` in float64 on the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from diffjax.ops.diff_attention import (
  RESIDUAL_NAMES,
  choice,
  chunked,
  diff_attention,
  two_call,
)
from diffjax.ops.diff_attention.gpu import chip as gpu_chip
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.reference import attention_maps, reference
from diffjax.ops.diff_attention.tpu import chip
from tests.harness.tiers import full


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes and options of one call: `lam` is λ's shape by name, `ids` a (queries, keys) pair of rows of segment ids."""

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
  scale: float | None = None


PACKED = (0, 0, 0, 0, 0, 7, 7, 7, 7, 3, 3, 3, 3)
V1, EMPTY = (
  Case("v1_grouped", H=4),
  Case("empty_rows", T=5, S=13, ids=((0, 9, 9, 3, 7), PACKED), causal=False),
)
CASES = [  # each option once
  Case("plain_grouped_scale", G=1, M=1, H=4, scale=0.3),
  V1,
  Case(
    "v2_one_group_window_lambda_per_head", M=1, H=3, K=1, V=6, window=4, lam="H"
  ),
  Case("packed_grouped_lambda_scalar", H=4, ids=(PACKED, PACKED), lam="scalar"),
  EMPTY,
  Case("window_not_causal", window=4, causal=False, T=13, S=11),
  Case("offset_window", T=7, S=16, q_offset=6, window=4),
  Case("offset_before_keys", q_offset=-7),
  Case("shared_noise_grouped", G=3, H=8, K=2),
  Case(
    "offset_per_row_packed_window",
    T=7,
    S=13,
    q_offset=(-3, 6),
    ids=(PACKED[4:11], PACKED),
    window=3,
  ),
]
COMBINED = [
  Case("plain", G=1, M=1),
  Case("v1"),
  Case("v1_grouped_lambda_per_head", H=4, lam="H"),
  Case("v2", M=1, H=4, V=6),
  Case(
    "shared_noise_v2_packed_window_lambda_per_head",
    G=4,
    M=1,
    H=6,
    K=1,
    V=6,
    lam="H",
    ids=(PACKED, PACKED),
    window=5,
  ),
  Case("several_blocks", T=150, H=4, lam="H"),
  Case("one_query", T=1, S=13, q_offset=(4, 12), lam="scalar"),
  Case("packed_not_causal", ids=(PACKED, PACKED), causal=False),
  Case("window", window=5),
  Case("window_packed_grouped", H=4, window=3, ids=(PACKED, PACKED)),
  Case("fewer_keys", T=13, S=6),
  Case("cross", T=5, S=11, causal=False),
  Case("offset", T=7, S=16, q_offset=6),
  Case("offset_beyond_window", q_offset=11, window=4),
  Case(
    "offset_per_row", T=7, S=13, q_offset=(-3, 6), ids=(PACKED[4:11], PACKED)
  ),
  Case("offset_per_row_window", T=7, S=13, q_offset=(2, 6), window=3, H=4),
]
# Cases of the kernels in the default tier: they are slow in their interpreters. test_pallas_tpu.py and test_pallas_gpu.py hold more.
INTERPRETED = {
  "pallas_tpu": (
    "plain_grouped_scale",
    "v1_grouped",
    "v2_one_group_window_lambda_per_head",
    "empty_rows",
    "offset_per_row_packed_window",
  ),
  "pallas_gpu": ("v1_grouped", "offset_per_row_packed_window"),
}


@dataclasses.dataclass(frozen=True)
class Implementation:
  """An implementation as the tests run it.

  Attributes:
    name: the implementation's.
    dtype: the widest that tests of all implementations use.
    tolerance: of the relative error in that dtype.
    atol: of outputs of about 1 in that dtype.
    float64_tolerance: None for one that refuses float64.
    refuses: case → the argument that its error must name, or None.
    small_blocks: whether blocks are cut small.
    forward_marker: see below.
  """

  name: str
  dtype: str = "float32"
  tolerance: float = 3e-6
  atol: float = 1e-6
  float64_tolerance: float | None = 1e-12
  refuses: Callable[[Case], str | None] = lambda case: None
  small_blocks: bool = False
  # A primitive that occurs only in the forward pass, to count how often that runs; None for what leaves nothing to be saved by name.
  forward_marker: str | None = None


def _two_call_refuses(case: Case) -> str | None:
  return (
    "window"
    if case.window is not None
    else "q_offset"
    if case.q_offset != 0
    else None
  )


IMPLEMENTATIONS = {
  "reference": Implementation("reference"),
  "chunked": Implementation("chunked", forward_marker="reduce_max"),
  "chunked_small_blocks": Implementation("chunked", small_blocks=True),
  "two_call": Implementation(
    "two_call", refuses=_two_call_refuses, float64_tolerance=1e-6
  ),  # the stock softmax is float32
  "pallas_tpu": Implementation("pallas_tpu", float64_tolerance=None),
  # Ten bits of mantissa in weights and outputs are 5e-4 at most, and a mask that is wrong by one key shows at 1e-1.
  "pallas_gpu": Implementation(
    "pallas_gpu", "float16", tolerance=1e-3, atol=1e-3, float64_tolerance=None
  ),
}


def _over_cases(default, more):
  """Parametrizes by implementation and case; cases in `more` are of the full tier, and so are most of the interpreted ones."""
  pairs = list(itertools.product(IMPLEMENTATIONS, [*default, *more]))
  others = [
    (name, case)
    for name, case in pairs
    if case in more or case.name not in INTERPRETED.get(name, case.name)
  ]
  chosen = [pair for pair in pairs if pair not in others]
  ids = [f"{name}-{case.name}" for name, case in [*chosen, *others]]
  return pytest.mark.parametrize(
    ("implementation", "case"),
    [*chosen, *full(others)],
    ids=ids,
    indirect=["implementation"],
  )


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
  chosen = IMPLEMENTATIONS[request.param]
  if chosen.small_blocks:  # scans, bands, ragged ends and groups of heads at sizes that compile quickly
    monkeypatch.setattr(chunked, "_BLOCK_QUERIES", 3)
    monkeypatch.setattr(chunked, "_MAX_BANDS", 3)
    monkeypatch.setattr(chunked, "_MAX_BLOCK_LOGITS", 64)
  if chosen.name == "pallas_gpu" and jax.__version_info__ < (0, 11, 2):
    pytest.skip(
      "Pallas has no public interpreter of Mosaic GPU kernels before JAX 0.11.2"
    )
  with chip.interpreted(pltpu.InterpretParams(uninitialized_memory="nan")):
    with (
      gpu_chip.interpreted()
      if chosen.name == "pallas_gpu"
      else contextlib.nullcontext()
    ):
      yield chosen


def _arguments(case: Case, seed: int = 0):
  """(q, k, v, λ), the cotangent and the options, float64 arrays in numpy."""
  rng = np.random.default_rng(seed)
  S = case.S or case.T
  normal = lambda *shape: rng.standard_normal(shape)
  lam_shape = {"scalar": (), "H": (case.H,), "BTH": (2, case.T, case.H)}[
    case.lam
  ]
  groups = case.H // max(case.G - 1, 1)
  q, k, v = (
    normal(2, case.T, groups, case.G, 6),
    normal(2, S, case.K, case.M, 6),
    normal(2, S, case.K, case.V),
  )
  lam = None if case.G == 1 else rng.uniform(-0.5, 1.2, lam_shape)
  options = dict(
    causal=case.causal,
    window=case.window,
    q_offset=case.q_offset,
    scale=case.scale,
  )
  if isinstance(case.q_offset, tuple):
    options["q_offset"] = np.array(case.q_offset, np.int32)
  if case.ids is not None:  # the second row is the first one reversed
    pair = [
      np.stack([np.array(ids), np.array(ids)[::-1]]).astype(np.int32)
      for ids in case.ids
    ]
    options.update(q_segment_ids=pair[0], kv_segment_ids=pair[1])
  return (q, k, v, lam), normal(2, case.T, case.H, case.V), options


@functools.cache
def _program(implementation: Implementation, options: tuple):
  """A compiled program that tests share as long as only numbers differ: output and gradients of every differentiable argument."""

  @jax.jit
  def run(arguments, d_out, arrays):
    attend = lambda arguments: diff_attention(
      *arguments, implementation=implementation.name, **dict(options), **arrays
    )
    out, pull = jax.vjp(attend, arguments)
    return out, pull(d_out)[0]

  return run


def _run(implementation: Implementation, arguments, d_out, options, dtype=None):
  dtype = implementation.dtype if dtype is None else dtype
  arguments, d_out = jax.tree.map(
    lambda x: jnp.asarray(x, dtype), (arguments, d_out)
  )
  arrays = {
    name: jnp.asarray(x)
    for name, x in options.items()
    if isinstance(x, np.ndarray)
  }
  program = _program(
    implementation,
    tuple((name, x) for name, x in options.items() if name not in arrays),
  )
  return jax.tree.map(np.asarray, program(arguments, d_out, arrays))


@functools.cache
def _expected(case: Case, dtype: str):
  """`reference` in float64 on numbers rounded to a dtype."""
  arguments, d_out, options = _arguments(case)
  arguments, d_out = jax.tree.map(
    lambda x: x.astype(jnp.dtype(dtype)).astype(np.float64), (arguments, d_out)
  )
  with jax.enable_x64(True):
    return _run(
      IMPLEMENTATIONS["reference"], arguments, d_out, options, np.float64
    )


def _assert_close(actual, expected, tolerance):
  """Norm of the difference over norm, leaf by leaf; a leaf of zeros must be zeros."""

  def check(path, a, e):
    a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
    assert np.isfinite(a).all(), f"{jax.tree_util.keystr(path)} is not finite"
    # A gradient that is zero but for rounding (one visible key) is compared with 1.
    error = np.linalg.norm(a - e) / max(np.linalg.norm(e), 1e-3)
    assert error <= tolerance, (
      f"{jax.tree_util.keystr(path)}: relative error {error:.2e}"
    )

  jax.tree_util.tree_map_with_path(check, actual, expected)


@_over_cases(CASES, COMBINED)
def test_agrees_with_reference_in_float64(implementation, case):
  argument, (arguments, d_out, options) = (
    implementation.refuses(case),
    _arguments(case),
  )
  if argument is not None:
    with pytest.raises(ValueError, match=rf"{argument} .*use implementation="):
      _run(implementation, arguments, d_out, options)
    return
  if case.ids is not None and case.ids[0] == case.ids[1]:
    del options["kv_segment_ids"]  # those of the queries serve
  _assert_close(
    _run(implementation, arguments, d_out, options),
    _expected(case, implementation.dtype),
    implementation.tolerance,
  )


@_over_cases(
  [V1],
  [
    case
    for case in CASES + COMBINED
    if case.name in ("v2", "packed_grouped_lambda_scalar")
  ],
)
def test_float64_and_bfloat16(implementation, case):
  arguments, d_out, options = _arguments(case)
  with jax.enable_x64(True):
    if implementation.float64_tolerance is None:
      with pytest.raises(ValueError, match="float64.*use implementation="):
        _run(implementation, arguments, d_out, options, np.float64)
    else:
      actual = _run(implementation, arguments, d_out, options, np.float64)
      _assert_close(
        actual, _expected(case, "float64"), implementation.float64_tolerance
      )
  actual = _run(implementation, arguments, d_out, options, jnp.bfloat16)
  assert actual[0].dtype == jnp.bfloat16
  _assert_close(actual, _expected(case, "bfloat16"), 2e-2)


# two_call is XLA's own.
@pytest.mark.parametrize(
  "implementation",
  ["chunked", "chunked_small_blocks", "pallas_tpu", "pallas_gpu"],
  indirect=True,
)
def test_delta_is_not_rounded(implementation):
  """One key a row: outputs are exact in bfloat16, dP is rowsum(dO ∘ O), and queries and keys get no gradient unless that sum is rounded."""
  (q, k, v, _), d_out, options = _arguments(V1)
  arguments = (q, k, v.round(), np.float64(0.5))
  _, (d_q, d_k, _, _) = _run(
    implementation, arguments, d_out, options | {"window": 1}, jnp.bfloat16
  )
  assert (
    max(np.abs(gradient.astype(np.float64)).max() for gradient in (d_q, d_k))
    < 1e-5
  )


def test_finite_differences_of_reference():
  (q, k, v, lam), _, options = _arguments(
    Case("grouped", T=4, H=2, K=1, V=3, ids=((0, 0, 5, 1), (0, 0, 1, 1)))
  )
  with jax.enable_x64(True):
    options = {
      name: jnp.asarray(x) if isinstance(x, np.ndarray) else x
      for name, x in options.items()
    }
    f = lambda q, k, v, lam: diff_attention(
      q, k, v, lam, implementation="reference", **options
    )
    check_grads(
      jax.jit(f), (q, k, v, lam), order=1, modes=["rev"], atol=1e-7, rtol=1e-7
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_what_reference_sees_is_what_the_docstring_says(causal, window):
  (q, k, _, _), _, options = _arguments(
    Case(
      "packed",
      T=7,
      S=13,
      q_offset=(2, 9),
      ids=(PACKED[:7], PACKED),
      causal=causal,
      window=window,
    )
  )
  maps = np.asarray(attention_maps(jnp.float32(q), jnp.float32(k), **options))
  for b, t, s in np.ndindex(2, 7, 13):
    distance = options["q_offset"][b] + t - s
    sees = options["q_segment_ids"][b, t] == options["kv_segment_ids"][b, s]
    sees &= distance >= 0 or not causal
    sees &= window is None or abs(distance) < window
    assert (
      (maps[b, :, :, t, s] > 0).all()
      if sees
      else (maps[b, :, :, t, s] == 0).all()
    )


def test_causal_by_gradient(implementation):
  arguments, d_out, options = _arguments(V1)
  row = 6
  _, (_, *gradients, _) = _run(
    implementation,
    arguments,
    d_out * (np.arange(13) == row)[:, None, None],
    options,
  )
  for gradient in gradients:
    assert (gradient[:, row + 1 :] == 0).all()
    assert (
      (gradient[:, : row + 1] != 0)
      .any(axis=(0, *range(2, gradient.ndim)))
      .all()
    )


def test_packed_documents_do_not_see_each_other(implementation):
  arguments, d_out, options = _arguments(EMPTY)
  ids = options["kv_segment_ids"][0]
  options["q_segment_ids"] = np.stack([ids[6:11]] * 2)  # 7, 7, 7, 3, 3
  d_out[1] = d_out[0, 3:] = 0
  _, (_, *gradients, _) = _run(implementation, arguments, d_out, options)
  for gradient in gradients:
    assert (gradient[0, ids != 7] == 0).all() and (gradient[1] == 0).all()
    assert (
      (gradient[0, ids == 7] != 0)
      .any(axis=tuple(range(1, gradient.ndim - 1)))
      .all()
    )


@functools.cache
def _stock_attention(scale: float | None, dtype: str):
  """JAX's own attention of V1's first map, of numbers rounded to a dtype. It takes values as wide as keys alone, six columns at once."""
  (q, k, v, _), _, _ = _arguments(V1)
  run = jax.jit(
    lambda q, k, v: jax.nn.dot_product_attention(
      q, k, v, is_causal=True, scale=scale
    )
  )
  first, last = (
    np.asarray(
      run(
        *(
          jnp.float32(x.astype(dtype))
          for x in (q[:, :, :, 0], k[:, :, :, 0], part)
        )
      )
    )
    for part in (v[..., :6], v[..., 4:])
  )
  return np.concatenate([first[..., :4], last], axis=-1)


def test_lambda_zero_is_plain_attention(implementation):
  (q, k, v, lam), d_out, options = _arguments(V1)
  out, (d_q, d_k, _, _) = _run(
    implementation, (q, k, v, 0 * lam), d_out, options
  )
  chex.assert_trees_all_close(
    np.float32(out),
    _stock_attention(None, implementation.dtype),
    atol=implementation.atol,
  )
  assert (d_q[:, :, :, 1] == 0).all() and (d_k[:, :, :, 1] == 0).all()
  plain = _arguments(CASES[0])[2]
  out, _ = _run(
    implementation, (q[:, :, :, :1], k[:, :, :, :1], v, None), d_out, plain
  )
  chex.assert_trees_all_close(
    np.float32(out),
    _stock_attention(plain["scale"], implementation.dtype),
    atol=implementation.atol,
  )


def test_equal_maps_with_lambda_one_give_zero(implementation):
  (q, k, v, lam), d_out, options = _arguments(V1)
  q[:, :, :, 1], k[:, :, :, 1] = q[:, :, :, 0], k[:, :, :, 0]
  out, _ = _run(implementation, (q, k, v, np.ones_like(lam)), d_out, options)
  chex.assert_trees_all_close(
    np.float32(out),
    np.zeros((2, 13, 4, 10), np.float32),
    atol=implementation.atol,
  )


def test_row_without_keys_gives_zero_and_no_gradient(implementation):
  arguments, d_out, options = _arguments(EMPTY)
  out, (d_q, d_k, d_v, d_lam) = _run(implementation, arguments, d_out, options)
  assert (out[0, 1:3] == 0).all() and (out[0, 3] != 0).all()
  assert (d_q[0, 1:3] == 0).all() and (d_lam[0, 1:3] == 0).all()
  # Nothing but empty rows: the gradients of keys and values vanish, too.
  options["q_segment_ids"] = np.full_like(options["q_segment_ids"], 9)
  for leaf in jax.tree.leaves(_run(implementation, arguments, d_out, options)):
    assert (leaf == 0).all()


def test_vmap(implementation):
  stacked = [_arguments(V1, seed) for seed in range(2)]
  single = [_run(implementation, *arguments) for arguments in stacked]
  options = stacked[0][2]

  def run(arguments, d_out):
    out, pull = jax.vjp(
      lambda arguments: diff_attention(
        *arguments, implementation=implementation.name, **options
      ),
      arguments,
    )
    return out, pull(d_out)[0]

  with chip.interpreted(
    True
  ):  # the TPU's interpreter does not take vmap's additional grid axis
    batched = jax.jit(jax.vmap(run))(
      *jax.tree.map(
        lambda *x: jnp.asarray(np.stack(x), implementation.dtype),
        *[x[:2] for x in stacked],
      )
    )
  _assert_close(
    batched,
    jax.tree.map(lambda *x: np.stack(x), *single),
    implementation.tolerance,
  )


def _count(jaxpr, name: str) -> int:
  """Equations of a primitive, those inside other equations included."""
  inner = lambda value: [
    getattr(v, "jaxpr", v)
    for v in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns"))
    if hasattr(v, "eqns")
  ]
  return sum(
    (eqn.primitive.name == name)
    + sum(_count(j, name) for j in inner(list(eqn.params.values())))
    for eqn in jaxpr.eqns
  )


def test_remat_by_name_runs_the_forward_pass_once():
  (q, k, v, lam), _, _ = _arguments(Case("v1"))
  arguments = tuple(map(jnp.float32, (q, k, v, lam)))
  checked = 0
  for implementation in IMPLEMENTATIONS.values():
    if implementation.forward_marker is None:
      continue
    f = lambda *a, name=implementation.name: jnp.sum(
      jnp.sin(diff_attention(*(jnp.cos(x) for x in a), implementation=name))
    )

    def count(policy, f=f, marker=implementation.forward_marker):
      gradient = jax.value_and_grad(
        f if policy is None else jax.checkpoint(f, policy=policy), (0, 1, 2, 3)
      )
      return _count(
        jax.make_jaxpr(gradient)(*arguments).jaxpr, marker
      ), jax.jit(gradient)(*arguments)

    once, expected = count(None)
    named, gradients = count(
      jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    )
    twice, _ = count(jax.checkpoint_policies.nothing_saveable)
    assert once > 0 and named == once and twice == 2 * once
    chex.assert_trees_all_close(gradients, expected, rtol=1e-5, atol=1e-6)
    checked += 1
  assert checked


def test_maps_of_the_reference():
  """The scale is a factor on the queries, and rows of a map sum to 1."""
  (q, k, v, lam), _, _ = _arguments(Case("v1"))
  q, k, v, lam = map(jnp.float32, (q, k, v, lam))
  width = q.shape[-1]
  doubled = jax.jit(reference)(2 * q, k, v, lam)
  scaled = jax.jit(functools.partial(reference, scale=2 * width**-0.5))(
    q, k, v, lam
  )
  sums = jax.jit(attention_maps)(q, k).sum(-1)
  chex.assert_trees_all_close(doubled, scaled, atol=1e-6)
  chex.assert_trees_all_close(sums, jnp.ones((2, 2, 2, 13)), atol=1e-6)


@pytest.mark.parametrize(
  ("causal", "window", "share"),
  [
    (True, None, 0.56),
    (True, 512, 0.2),
    (False, 512, 0.35),
    (False, None, 1.0),
  ],
  ids=str,
)
def test_chunked_skips_what_the_mask_hides(causal, window, share):
  length, block = 4096, 128
  bands = chunked._make_bands(Mask(length, length, causal, window), block)
  assert len(bands) <= chunked._MAX_BANDS + 1
  computed = sum(
    band.num_queries * band.num_keys * len(band.first_queries) for band in bands
  )
  assert computed <= share * length**2
  assert sorted(row for band in bands for row in band.first_queries) == list(
    range(0, length, block)
  )


@pytest.mark.parametrize(
  "bands", [2, *full([chunked._MAX_BANDS])]
)  # the fewer, the quicker to compile
def test_chunked_memory_is_linear_in_length(monkeypatch, bands):
  monkeypatch.setattr(chunked, "_MAX_BANDS", bands)

  def temporaries(length):
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    arguments = (
      shape(1, length, 2, 2, 16),
      shape(1, length, 2, 2, 16),
      shape(1, length, 2, 32),
    )
    f = jax.grad(
      lambda q, k, v: jnp.sum(
        diff_attention(q, k, v, 0.5, implementation="chunked") ** 2
      ),
      (0, 1, 2),
    )
    return (
      jax.jit(f)
      .lower(*arguments)
      .compile()
      .memory_analysis()
      .temp_size_in_bytes
    )

  short, long = temporaries(4096), temporaries(16384)
  assert long < 5 * short
  assert long < 16384**2  # one map's logits of one head are four times this


def _bad(**changes):
  arguments = dict(
    q=jnp.zeros((2, 5, 4, 2, 6)),
    k=jnp.zeros((2, 5, 2, 2, 6)),
    v=jnp.zeros((2, 5, 2, 8)),
    lam=0.5,
    implementation="chunked",
  )
  arguments.update(changes)
  return arguments


@pytest.mark.parametrize(
  ("named", "arguments"),
  [
    ("q ", _bad(q=jnp.zeros((2, 5, 4, 6)))),
    ("k ", _bad(q=jnp.zeros((2, 5, 4, 3, 6)), k=jnp.zeros((2, 5, 2, 3, 6)))),
    ("lam ", _bad(q=jnp.zeros((2, 5, 4, 3, 6)), lam=jnp.zeros(4))),
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
    (
      "kv_segment_ids ",
      _bad(
        q=jnp.zeros((2, 3, 4, 2, 6)), q_segment_ids=jnp.zeros((2, 3), jnp.int32)
      ),
    ),
    ("q_segment_ids ", _bad(q_segment_ids=jnp.zeros((2, 5)))),
    (
      "kv_segment_ids ",
      _bad(
        q_segment_ids=jnp.zeros((2, 5), jnp.int32),
        kv_segment_ids=jnp.zeros((2, 4), jnp.int32),
      ),
    ),
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
  choice._reported.clear()
  with caplog.at_level("INFO"):
    programs = [
      jax.make_jaxpr(
        lambda name=name: diff_attention(**_bad(implementation=name))
      )()
      for name in ("auto", "auto", "chunked")
    ]
  assert [
    r.getMessage() for r in caplog.records if "diff_attention" in r.name
  ] == ["attention: chunked (XLA), because this is a CPU"]
  assert len(set(map(str, programs))) == 1


@pytest.mark.parametrize("has_cudnn", [True, False])
def test_auto_takes_what_the_backend_runs(monkeypatch, has_cudnn):
  """Also where a program is compiled for TPUs on a machine with a GPU."""
  monkeypatch.setattr(two_call, "_has_cudnn", lambda backend: has_cudnn)
  q, v = jnp.zeros((2, 4, 2, 2, 8)), jnp.zeros((2, 4, 2, 16))

  def pick(backend, dtype):
    arrays = [x.astype(dtype) for x in (q, q, v)]
    return choice.choose(backend, *arrays, Mask(4, 4)).implementation

  assert (
    pick("tpu", jnp.float32) == "pallas_tpu"
    and pick("tpu", jnp.float16) == "chunked"
  )
  assert (
    pick("gpu", jnp.float16) == ("two_call" if has_cudnn else "chunked")
    and pick("gpu", jnp.float32) == "chunked"
  )
  assert pick("cpu", jnp.float16) == "chunked"
