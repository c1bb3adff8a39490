"""The TPU kernels over several blocks, in Pallas's interpreter for TPUs.

test_diff_attention.py checks the properties of all implementations, with short
sequences that fit one block.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params

from diffjax.ops.diff_attention import diff_attention, vjp
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import LOG2E
from diffjax.ops.diff_attention.tpu import (
  attention,
  block_sizes,
  chip,
  forward,
)
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks
from tests.harness.tiers import by_name
from tests.harness.tolerances import assert_close_in_norm

# Largest error, relative to the norm of an array.
FLOAT32_ERROR = 3e-6

# Tiles of 128 queries and 128 keys, or of 256 and 128.
SQUARE = Blocks(128, 128, 128, 128, 1024, 2)
WIDE = Blocks(256, 128, 128, 128, 1024, 3)
# Full tiles of 256 × 256, which are computed in sub-tiles of 128 × 256. Tiles
# that the mask cuts have sub-tiles of 128 × 128.
FINE = Blocks(256, 256, 128, 128, 1024, 2, (128, 256))
# dQ of only 256 or 128 queries is in vector memory, so that a sequence needs
# several calls of the backward kernel.
SPANS = Blocks(128, 128, 128, 128, 256)
SHORT_SPANS = Blocks(128, 128, 128, 128, 128)
# Blocks of keys that two cores can divide evenly.
LONG = Blocks(128, 128, 128, 128, 2048)


@dataclasses.dataclass(frozen=True)
class Case:
  """The shapes and options of one call. Axes: see diffjax/parameters.py.

  Attributes:
    name: the id of the test.
    blocks: block sizes of both kernels.
    T: queries of a sequence.
    S: keys of a sequence. None for as many as queries.
    B: sequences.
    H: heads.
    K: key heads. None for as many as heads.
    G: maps of a group of queries.
    M: maps of the keys.
    D: width of queries and keys.
    V: width of the values.
    starts: where the first sequence's documents start, after the first one.
      Those of the second sequence start T / 2 tokens later. None for a single
      document.
    q_offset: position of the first query, or of each sequence's first query.
    window: argument of `diff_attention`.
    causal: argument of `diff_attention`.
  """

  name: str
  blocks: Blocks
  T: int
  S: int | None = None
  B: int = 2
  H: int = 2
  K: int | None = None
  G: int = 2
  M: int = 2
  D: int = 8
  V: int = 16
  starts: tuple[int, ...] | None = None
  q_offset: int | tuple[int, ...] = 0
  window: int | None = None
  causal: bool = True


# V1 has two maps of the keys. V2 has one, for both maps of the queries (M=1).
CASES = [
  Case("ragged_grouped", FINE, T=300, K=1),
  Case("v2_grouped_window", WIDE, B=1, T=300, K=1, M=1, V=8, window=100),
]
FURTHER_CASES = [
  Case("window_not_causal", SQUARE, B=1, T=300, H=1, window=100, causal=False),
  Case("shared_noise", FINE, B=1, T=300, H=4, K=1, G=3),
  Case("offset_per_row", SHORT_SPANS, T=130, S=300, H=1, q_offset=(5, 170)),
]
COMBINED_CASES = [
  # Tiles that are mostly visible, also below the diagonal, that are mostly
  # hidden, and that are hidden.
  Case("packed_long", FINE, T=600, H=1, starts=(40, 560)),
  Case(
    "shared_noise_v2_spans_packed",
    SPANS,
    B=1,
    T=300,
    H=6,
    K=1,
    G=4,
    M=1,
    D=24,
    V=8,
    starts=(70, 180),
  ),
  Case("v2", WIDE, T=300, H=4, K=2, M=1, V=8),
  Case("plain", FINE, T=300, G=1, M=1, V=8),
  Case("packed", FINE, T=300, starts=(70, 110, 180, 250)),
  # Tiles that are mostly hidden.
  Case("packed_short", FINE, T=600, H=1, starts=(128, 256, 384, 512)),
  Case(
    "packed_not_causal",
    FINE,
    T=300,
    starts=(70, 110, 180, 250),
    causal=False,
  ),
  Case("packed_offset_per_row", FINE, T=300, starts=(70, 110), q_offset=(5, 0)),
  Case("window", FINE, T=600, window=100),
  Case(
    "offset_per_row_window_not_causal",
    SQUARE,
    T=130,
    S=640,
    q_offset=(5, 255),
    window=150,
    causal=False,
  ),
  Case("offset_window", SQUARE, T=130, S=300, q_offset=170, window=40),
  Case("before_keys", SQUARE, T=300, q_offset=-100),
  Case("several_spans_of_a_group", SPANS, B=1, T=600, K=1),
]

# On two cores. Neither the sequences nor the key heads divide by two. The
# blocks of keys do in some of the cases.
TWO_CORE_CASES = [
  Case("packed", SPANS, B=1, T=300, H=1, starts=(70, 180)),
]
COMBINED_TWO_CORE_CASES = [
  Case(
    "plain_grouped_window",
    LONG,
    B=1,
    T=400,
    H=4,
    K=1,
    G=1,
    M=1,
    V=8,
    window=150,
  ),
  Case("grouped", LONG, B=1, T=600, H=4, K=1),
  Case("three_heads", FINE, B=1, T=600, H=3, causal=False),
  Case(
    "three_rows_v2",
    SQUARE,
    B=3,
    T=300,
    H=4,
    K=1,
    M=1,
    V=8,
    q_offset=(5, 0, 40),
  ),
]


class Inputs(NamedTuple):
  """The arguments of one call in float32.

  Attributes:
    arrays: q, k, v and λ. λ is None with one map.
    d_out: the gradient of the output.
    options: other arguments of `diff_attention`.
  """

  arrays: tuple
  d_out: np.ndarray
  options: dict[str, Any]


class Results(NamedTuple):
  """The output of one call, and the gradients of its arguments."""

  out: np.ndarray
  d_q: np.ndarray
  d_k: np.ndarray
  d_v: np.ndarray
  d_lam: np.ndarray | None


def make_inputs(case: Case) -> Inputs:
  """Returns random arguments for a case."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)

  kv_length = case.S or case.T
  num_kv_heads = case.K or case.H
  num_groups = case.H // max(case.G - 1, 1)
  q = normal(case.B, case.T, num_groups, case.G, case.D)
  k = normal(case.B, kv_length, num_kv_heads, case.M, case.D)
  v = normal(case.B, kv_length, num_kv_heads, case.V)
  d_out = normal(case.B, case.T, case.H, case.V)
  lam = None
  if case.G > 1:
    lam = rng.uniform(0, 1, (case.B, case.T, case.H)).astype(np.float32)

  options = {
    "q_offset": case.q_offset,
    "window": case.window,
    "causal": case.causal,
  }
  if isinstance(case.q_offset, tuple):
    options["q_offset"] = np.array(case.q_offset, np.int32)
  if case.starts is not None:
    starts = np.array(case.starts)
    tokens = np.arange(case.T)
    ids = []
    for sequence in range(case.B):
      later = sequence * (case.T // 2)
      ids.append(np.searchsorted(starts + later, tokens, side="right"))
    options["q_segment_ids"] = np.stack(ids).astype(np.int32)
  return Inputs((q, k, v, lam), d_out, options)


def make_program(implementation: str, inputs: Inputs) -> Callable:
  """Returns a jitted function from q, k, v and λ to Results."""
  attend = functools.partial(
    diff_attention, implementation=implementation, **inputs.options
  )

  @jax.jit
  def program(arrays):
    out, pull_back = jax.vjp(attend, *arrays)
    return Results(out, *pull_back(inputs.d_out))

  return program


def run(implementation: str, inputs: Inputs) -> Results:
  """Returns the output and all gradients."""
  program = make_program(implementation, inputs)
  return jax.tree.map(np.asarray, program(inputs.arrays))


def iterate_equations(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a program and of its inner programs."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from iterate_equations(inner)


def kernel_calls(function: Callable, *arguments: Any) -> list[Any]:
  """Returns the equations that call kernels when a function is traced."""
  calls = []
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  for equation in iterate_equations(jaxpr):
    if equation.primitive.name == "pallas_call":
      calls.append(equation)
  return calls


@pytest.fixture
def race_detectors(monkeypatch):
  """The interpreter's race detectors, one per kernel that runs."""
  detectors = []
  make_detector = interpret_pallas_call.RaceDetectionState

  def make_and_keep_detector(**options):
    detector = make_detector(**options)
    detectors.append(detector)
    return detector

  monkeypatch.setattr(
    interpret_pallas_call, "RaceDetectionState", make_and_keep_detector
  )
  return detectors


def assert_no_races(race_detectors) -> None:
  """Checks that no kernel reads memory while it is written."""
  # The forward and the backward kernel have a detector each.
  assert len(race_detectors) >= 2
  for detector in race_detectors:
    assert not detector.races_found


@pytest.mark.parametrize("case", by_name(CASES, FURTHER_CASES + COMBINED_CASES))
def test_output_and_gradients_equal_the_reference(case, race_detectors):
  """The kernels have no races either, which the interpreter detects."""
  inputs = make_inputs(case)
  # Reading memory that nothing was written to gives NaN.
  params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)

  with (
    chip.interpreted(params),
    block_sizes.use(forward=case.blocks, backward=case.blocks),
  ):
    actual = run("pallas_tpu", inputs)

  expected = run("reference", inputs)
  assert_close_in_norm(actual, expected, FLOAT32_ERROR)
  assert_no_races(race_detectors)


@pytest.mark.full
@pytest.mark.parametrize("case", by_name(CASES + FURTHER_CASES))
def test_online_kernel_equals_the_reference(case):
  """Values that exceed 2⁴⁰ need the online kernel.

  This kernel subtracts the running maximum from the logits. For smaller values,
  the quick kernel is accurate without that.
  """
  inputs = make_inputs(case)
  q, k, v, lam = inputs.arrays
  large_v = v * np.float32(2.0**50)
  inputs = inputs._replace(arrays=(q, k, large_v, lam))

  with (
    chip.interpreted(),
    block_sizes.use(forward=case.blocks, backward=case.blocks),
  ):
    actual = run("pallas_tpu", inputs)

  expected = run("reference", inputs)
  assert_close_in_norm(actual, expected, FLOAT32_ERROR)


@pytest.mark.full
@pytest.mark.parametrize(
  "case", by_name(TWO_CORE_CASES + COMBINED_TWO_CORE_CASES)
)
def test_two_cores_share_the_keys_of_one_head(
  case, race_detectors, monkeypatch
):
  """The kernels for chips with two cores, TPU v4 and v5p, are correct."""
  # The kernels divide their work by the number of cores of the chip.
  monkeypatch.setattr(chip, "cores", lambda: 2)
  inputs = make_inputs(case)
  # JAX's interpreter cannot run the loops of a kernel on two cores. Then one
  # core does the work of both. Kernels loop over tiles of keys if there are
  # documents, or if several tiles are loaded together (`span`).
  has_loops = case.starts is not None or case.blocks.span > 1
  params = pltpu.InterpretParams(
    uninitialized_memory="nan",
    detect_races=True,
    num_cores_or_threads=1 if has_loops else 2,
  )

  with (
    chip.interpreted(params),
    block_sizes.use(forward=case.blocks, backward=case.blocks),
  ):
    actual = run("pallas_tpu", inputs)

  expected = run("reference", inputs)
  assert_close_in_norm(actual, expected, FLOAT32_ERROR)
  assert_no_races(race_detectors)


def parallel_sizes(kernel_call: Any) -> list[int]:
  """Returns the sizes of the axes of a kernel's grid that cores share."""
  grid = kernel_call.params["grid_mapping"].grid
  semantics = kernel_call.params["compiler_params"].dimension_semantics
  sizes = []
  for size, kind in zip(grid, semantics, strict=True):
    if kind == pltpu.PARALLEL:
      sizes.append(size)
  return sizes


@pytest.mark.parametrize(
  "case", by_name(TWO_CORE_CASES, COMBINED_TWO_CORE_CASES)
)
def test_two_cores_get_equal_shares_of_the_backward_pass(case, monkeypatch):
  """Cores share an axis of a kernel's grid. Its size is even."""
  monkeypatch.setattr(chip, "cores", lambda: 2)
  inputs = make_inputs(case)

  with (
    chip.interpreted(),
    block_sizes.use(forward=case.blocks, backward=case.blocks),
  ):
    program = make_program("pallas_tpu", inputs)
    calls = kernel_calls(program, inputs.arrays)

  backward_calls = []
  for call in calls:
    if "backward" in call.params["name"]:
      backward_calls.append(call)
  assert backward_calls
  for call in backward_calls:
    assert any(size % 2 == 0 for size in parallel_sizes(call))


# The next functions change q [B, T, Q, G, D], k [B, S, K, M, D] and v.


def keep(q, k, v):
  return q, k, v


def make_one_key_huge(q, k, v):
  k = k.copy()
  k[:, 7] *= 1000
  return q, k, v


def make_keys_equal(q, k, v):
  return q, np.broadcast_to(k[:, :1], k.shape), v


def make_queries_large(q, k, v):
  return np.sign(q) * 1e4, k, v


def make_queries_and_keys_tiny(q, k, v):
  return np.sign(q) * 2e-38, np.sign(k) * 2e-38, v


def make_values_huge(q, k, v):
  return q, k, np.sign(v) * 1e37


def make_values_tiny(q, k, v):
  return q, k, np.sign(v) * 1e-30


def make_values_zero(q, k, v):
  return q, k, np.zeros_like(v)


def make_logits_equal(q, k, v, logit):
  """Returns queries and keys with equal logits, to base 2."""
  width = q.shape[-1]
  # The logit is LOG2E / √width · width · element².
  element = np.sqrt(abs(logit) / (LOG2E * np.sqrt(width)))
  return np.full_like(q, np.sign(logit) * element), np.full_like(k, element), v


class ExactResults(NamedTuple):
  """Attention in float64 of one head with two maps.

  Attributes:
    out: the output [T, V].
    lse: the log-sum-exp of each map, to base 2 [2, T].
    max_logit: the largest logit by absolute value.
    logit_size: the largest sum of absolute products of a query and a key, of
      each query [2, T]. The rounding error of a logit is relative to it.
    max_value: the largest value by absolute value.
  """

  out: np.ndarray
  lse: np.ndarray
  max_logit: float
  logit_size: np.ndarray
  max_value: float


def exact_attention(
  q: np.ndarray,
  k: np.ndarray,
  v: np.ndarray,
  lam: np.ndarray,
  num_empty_rows: int,
) -> ExactResults:
  """Returns attention in float64 of one sequence with one head.

  Query t sees keys 0 to t − num_empty_rows, so the first queries see none.
  """
  q = np.asarray(q, np.float64)[0, :, 0]  # [T, 2, D]
  k = np.asarray(k, np.float64)[0, :, 0]
  v = np.asarray(v, np.float64)[0, :, 0]  # [T, V]
  lam = np.asarray(lam, np.float64)[0]  # [T, 1]
  # Exponentials are to base 2, as in the kernels.
  scale = q.shape[-1] ** -0.5 * LOG2E
  logits = np.einsum("tgd,sgd->gts", q, k) * scale
  logit_sizes = np.einsum("tgd,sgd->gts", np.abs(q), np.abs(k)) * scale

  length = q.shape[0]
  query = np.arange(length)[:, None]
  key = np.arange(length)
  is_visible = query - num_empty_rows >= key
  visible_logits = np.where(is_visible, logits, -np.inf)
  # The bounds of 1e±300 keep queries without keys from giving NaN.
  max_logits = np.max(visible_logits, axis=-1, keepdims=True, initial=-1e300)
  weights = np.exp2(np.minimum(logits - max_logits, 0)) * is_visible
  sums = np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
  signal, noise = (weights / sums) @ v
  return ExactResults(
    out=signal - lam * noise,
    lse=(max_logits + np.log2(sums))[..., 0],
    max_logit=np.max(np.abs(logits)),
    logit_size=np.max(logit_sizes, axis=-1),
    max_value=max(np.max(np.abs(v)), 1e-300),
  )


class ForwardPass(NamedTuple):
  """The results of a forward pass.

  Attributes:
    saved: what the TPU kernels save for the backward pass.
    is_quick_result_used: whether the result of the quick kernel is accurate.
  """

  saved: vjp.Saved
  is_quick_result_used: jax.Array


@functools.partial(jax.jit, static_argnames="num_empty_rows")
def run_forward(q, k, v, lam, num_empty_rows: int) -> ForwardPass:
  """Returns the results of the forward pass of the TPU kernels.

  Query t sees keys 0 to t − num_empty_rows, as in `exact_attention`. All inputs
  of a dtype share the compiled program.
  """
  decisions = []
  in_range = forward.in_range

  def record_in_range(*arrays):
    decisions.append(in_range(*arrays))
    return decisions[-1]

  length = q.shape[1]
  mask = Mask(length, length, causal=True, offset=-num_empty_rows)
  arrays = vjp.Arrays(q, k, v, lam, q_ids=None, kv_ids=None, offset=None)
  with (
    mock.patch.object(forward, "in_range", record_in_range),
    chip.interpreted(True),
    block_sizes.use(forward=SQUARE, backward=SQUARE),
  ):
    options = vjp.Options(
      scale=q.shape[-1] ** -0.5,
      save=True,
      chosen=attention.IMPLEMENTATION.prepare(arrays, mask),
    )
    saved = attention.IMPLEMENTATION.forward(arrays, mask, options)
  # The forward pass decides once.
  (is_quick_result_used,) = decisions
  return ForwardPass(saved, is_quick_result_used)


# How q, k and v change, how many queries see no key, and whether the result of
# the quick kernel is used.
ADVERSE_INPUTS = [
  pytest.param(keep, 0, True, id="as_drawn"),
  pytest.param(make_one_key_huge, 0, False, id="one_huge_key"),
  pytest.param(make_keys_equal, 0, True, id="equal_keys"),
  pytest.param(
    functools.partial(make_logits_equal, logit=-59), 0, True, id="logits_-59"
  ),
  pytest.param(
    functools.partial(make_logits_equal, logit=-62), 0, False, id="logits_-62"
  ),
  pytest.param(
    functools.partial(make_logits_equal, logit=-1000), 0, False, id="underflow"
  ),
  pytest.param(
    functools.partial(make_logits_equal, logit=71), 0, True, id="logits_71"
  ),
  pytest.param(
    functools.partial(make_logits_equal, logit=82), 0, False, id="logits_82"
  ),
  pytest.param(
    functools.partial(make_logits_equal, logit=1000), 0, False, id="overflow"
  ),
  pytest.param(make_queries_large, 0, False, id="large_queries"),
  pytest.param(make_queries_and_keys_tiny, 0, True, id="tiny_queries"),
  pytest.param(make_values_huge, 0, False, id="huge_values"),
  pytest.param(make_values_tiny, 0, False, id="tiny_values"),
  pytest.param(make_values_zero, 0, True, id="zero_values"),
  pytest.param(keep, 20, False, id="rows_without_keys"),
]


@pytest.mark.parametrize(
  "dtype",
  [
    pytest.param(jnp.float32, id="float32"),
    pytest.param(jnp.bfloat16, id="bfloat16"),
  ],
)
@pytest.mark.parametrize(
  ("change", "num_empty_rows", "is_quick_result_used"), ADVERSE_INPUTS
)
def test_forward_pass_is_accurate_for_adverse_inputs(
  change, num_empty_rows, is_quick_result_used, dtype
):
  """The quick kernel's result is used only if it is accurate.

  It does not subtract the maximum of the logits. If exponentials leave the
  range of float32, the online kernel computes everything again.
  """
  inputs = make_inputs(Case("one_head", SQUARE, B=1, T=256, H=1))
  q, k, v, lam = inputs.arrays
  q, k, v = change(
    np.asarray(q, np.float64),
    np.asarray(k, np.float64),
    np.asarray(v, np.float64),
  )
  q = q.astype(dtype)
  k = k.astype(dtype)
  v = v.astype(dtype)

  result = run_forward(q, k, v, lam, num_empty_rows)

  out = np.asarray(result.saved.out, np.float64)[0, 0]
  lse = np.asarray(result.saved.lse, np.float64)[0, 0]
  exact = exact_attention(q, k, v, lam, num_empty_rows)
  assert bool(result.is_quick_result_used) == is_quick_result_used

  # The output has errors relative to the largest value. Logits of thousands
  # have errors of 1e-4 in float32, and exponentials have that error too.
  if dtype == jnp.float32:
    error = 2e-6 * np.clip(exact.max_logit / 80, 1, 100)
  else:
    error = 2e-2
  chex.assert_trees_all_close(
    out / exact.max_value, exact.out / exact.max_value, rtol=0, atol=error
  )
  assert (out[:num_empty_rows] == 0).all()

  # The log-sum-exps, which the backward pass reads, have errors relative to
  # the products that were added up. The quick kernel adds up weights in
  # bfloat16 if V is bfloat16: half a unit in the last place is 2⁻⁹.
  lse_error = 2e-6 if dtype == jnp.float32 else 2.0**-8 * LOG2E
  size = np.maximum(1, exact.logit_size)[:, num_empty_rows:]
  chex.assert_trees_all_close(
    lse[:, num_empty_rows:] / size,
    exact.lse[:, num_empty_rows:] / size,
    rtol=0,
    atol=lse_error,
  )
  assert (lse[:, :num_empty_rows] >= 1e29).all()


@pytest.mark.parametrize(
  ("case", "queries", "hidden_keys"),
  [
    pytest.param(
      # Query 256 sees keys 193 to 256, and query 383 sees keys 320 to 383.
      Case("window", SQUARE, B=1, T=512, H=1, window=64),
      range(256, 384),
      [*range(128), *range(384, 512)],
      id="window",
      marks=pytest.mark.full,
    ),
    pytest.param(
      # The queries are one document, and the other keys are another one.
      Case("segments", FINE, B=1, T=384, H=1, causal=False, starts=(128,)),
      range(128),
      range(128, 384),
      id="segments_within_a_tile",
    ),
    pytest.param(
      # The hidden keys come after the queries.
      Case("causal", SQUARE, B=1, T=384, H=1),
      range(128),
      range(128, 384),
      id="causal",
      marks=pytest.mark.full,
    ),
    pytest.param(
      Case("segments", SQUARE, B=1, T=384, H=1, causal=False, starts=(128,)),
      range(128),
      range(128, 384),
      id="segments",
      marks=pytest.mark.full,
    ),
  ],
)
def test_hidden_tiles_are_not_computed(case, queries, hidden_keys):
  """Queries have finite results although keys that they do not see are NaN.

  A product with NaN is NaN, even if a mask follows. A tile has 128 tokens.
  """
  queries = np.array(queries)
  hidden_keys = np.array(hidden_keys)
  inputs = make_inputs(case)
  _, k, v, _ = inputs.arrays
  k[:, hidden_keys] = np.nan
  v[:, hidden_keys] = np.nan

  with (
    chip.interpreted(pltpu.InterpretParams()),
    block_sizes.use(forward=case.blocks, backward=case.blocks),
  ):
    results = run("pallas_tpu", inputs)

  chex.assert_tree_all_finite(results.out[:, queries])
  chex.assert_tree_all_finite(results.d_q[:, queries])
  chex.assert_tree_all_finite(results.d_lam[:, queries])
  # The query at the position of a NaN key sees that key.
  queries_that_see_nan = hidden_keys
  assert np.isnan(results.out[:, queries_that_see_nan]).any()


# The tiles of the next tests have 8 queries and 4 keys. The last one of each
# row and column is cut off.
Q_BLOCK, KV_BLOCK, Q_LENGTH, KV_LENGTH = 8, 4, 21, 18


class Tile(NamedTuple):
  """A tile of 8 queries and 4 keys. The last positions are inclusive."""

  first_query: int
  last_query: int
  first_key: int
  last_key: int
  # [queries, keys], without those beyond the ends.
  is_visible: np.ndarray

  @property
  def bounds(self) -> tuple[int, int, int, int]:
    """The arguments of a mask's methods."""
    return self.first_query, self.last_query, self.first_key, self.last_key


@pytest.fixture(
  params=itertools.product([True, False], [None, 1, 5, 8, 11], [-9, 0, 3, 8]),
  ids=str,
)
def mask(request):
  """A mask for each combination of `causal`, `window` and `offset`."""
  causal, window, offset = request.param
  return Mask(Q_LENGTH, KV_LENGTH, causal, window, offset)


def visible_pairs(mask: Mask) -> np.ndarray:
  """Returns whether query t sees key s, by the definition of a mask [T, S]."""
  query = mask.offset + np.arange(mask.q_length)[:, None]
  distance = query - np.arange(mask.kv_length)
  is_visible = np.full(distance.shape, True)
  if mask.causal:
    is_visible &= distance >= 0
  if mask.window is not None:
    is_visible &= np.abs(distance) < mask.window
  return is_visible


def tiles_of(mask: Mask) -> list[Tile]:
  """Returns all tiles of a mask. Queries have positions from the offset on."""
  is_visible = visible_pairs(mask)
  tiles = []
  for query in range(0, Q_LENGTH, Q_BLOCK):
    for key in range(0, KV_LENGTH, KV_BLOCK):
      first_query = mask.offset + query
      tile = Tile(
        first_query=first_query,
        last_query=first_query + Q_BLOCK - 1,
        first_key=key,
        last_key=key + KV_BLOCK - 1,
        is_visible=is_visible[query : query + Q_BLOCK, key : key + KV_BLOCK],
      )
      tiles.append(tile)
  return tiles


def test_keys_of_contains_all_visible_keys(mask):
  """`keys_of` returns the first and last key that a block of queries may see.

  Here 21 queries are in blocks of 8. The first one has the position `offset`.
  """
  is_visible = visible_pairs(mask)  # [queries, keys]

  for start in range(0, 21, 8):
    first_position = mask.offset + start
    first_key, last_key = mask.keys_of(first_position, first_position + 7)

    is_key_visible = is_visible[start : start + 8].any(axis=0)
    visible_keys = np.flatnonzero(is_key_visible)
    assert (visible_keys >= first_key).all()
    assert (visible_keys <= last_key).all()


def test_rows_of_contains_all_queries_that_see_a_tile(mask):
  """`rows_of` returns the first and last query that may see a block of keys.

  Here 18 keys are in blocks of 4.
  """
  is_visible = visible_pairs(mask)  # [queries, keys]

  for start in range(0, 18, 4):
    first_row, last_row = mask.rows_of(start, start + 3)

    does_row_see_keys = is_visible[:, start : start + 4].any(axis=1)
    rows = np.flatnonzero(does_row_see_keys)
    assert (rows >= first_row).all()
    assert (rows <= last_row).all()


def test_tile_without_any_visible_pair_has_none(mask):
  """`any_visible` is false only for tiles that a kernel may skip.

  A tile is a block of 8 queries and a block of 4 keys.
  """
  for tile in tiles_of(mask):
    if not mask.any_visible(*tile.bounds):
      assert not tile.is_visible.any()


def test_tile_with_all_pairs_visible_has_all(mask):
  """`all_visible` is true only for tiles that need no mask.

  A tile is a block of 8 queries and a block of 4 keys.
  """
  for tile in tiles_of(mask):
    if mask.all_visible(*tile.bounds):
      assert tile.is_visible.all()


@pytest.mark.parametrize(
  ("kv_length", "causal", "window", "offset"),
  [
    # All tiles of 4 keys are complete.
    *itertools.product([20], [True, False], [None, 1, 5, 8, 11], [-9, 0, 3, 8]),
    # The last tile has only 2 keys. No causal query sees the keys after them.
    *itertools.product([18], [True], [None, 1, 5, 8, 11], [-9]),
  ],
)
def test_partial_differences_list_all_partially_visible_tiles(
  kv_length, causal, window, offset
):
  """The difference of a tile is its first query's position minus its first key.

  Partially visible tiles with equal differences have equal masks. So a kernel
  can prepare a mask for each difference.
  """
  mask = Mask(Q_LENGTH, kv_length, causal, window, offset)

  differences = mask.partial_differences(Q_BLOCK, KV_BLOCK, most=99)

  for tile in tiles_of(mask):
    is_visible = mask.any_visible(*tile.bounds)
    is_full = mask.all_visible(*tile.bounds)
    if is_visible and not is_full:
      assert tile.first_query - tile.first_key in differences


def test_mask_with_visible_padding_has_no_partial_differences():
  """The mask of a tile then also depends on where the keys end."""
  # The last tile of 4 keys has only 2.
  mask = Mask(q_length=24, kv_length=18, causal=False)

  assert mask.partial_differences(q_block=8, kv_block=4, most=99) is None


@pytest.mark.parametrize(
  ("dtype", "D", "V", "message"),
  [
    pytest.param(jnp.float16, 8, 16, "float16.*bfloat16", id="dtype"),
    pytest.param(jnp.float32, 264, 16, "D = 264.*up to 256", id="D"),
    pytest.param(jnp.float32, 8, 520, "V = 520.*up to 512", id="V"),
  ],
)
def test_error_names_the_unsupported_dtype_or_width(dtype, D, V, message):
  """D is the width of queries and keys. V is the width of values."""
  q = np.zeros((1, 8, 2, 2, D), dtype)
  v = np.zeros((1, 8, 2, V), dtype)

  with (
    chip.interpreted(True),
    pytest.raises(
      ValueError, match=f"^q .*{message}.*implementation='chunked'"
    ),
  ):
    diff_attention(q, q, v, 0.5, implementation="pallas_tpu")


def test_another_backend_is_refused():
  """The tests run on a CPU, here without the interpreter."""
  q = np.zeros((1, 8, 2, 2, 8), np.float32)
  v = np.zeros((1, 8, 2, 16), np.float32)

  message = (
    "^implementation = 'pallas_tpu' needs a TPU, and the backend is 'cpu'; use"
    " implementation="
  )
  with pytest.raises(ValueError, match=message):
    diff_attention(q, q, v, 0.5, implementation="pallas_tpu")


def test_forward_kernel_without_gradient_saves_less():
  """A kernel's results show what it saves for the backward pass."""
  B, T, H, D, V = 2, 130, 2, 8, 16
  q = np.zeros((B, T, H, 2, D), np.float32)
  k = np.zeros((B, T, H, 2, D), np.float32)
  v = np.zeros((B, T, H, V), np.float32)
  lam = np.zeros((B, T, H), np.float32)

  def attend(*arrays):
    return diff_attention(*arrays, implementation="pallas_tpu")

  def attend_and_save(*arrays):
    out, _ = jax.vjp(attend, *arrays)
    return out

  with chip.interpreted():
    calls_without_gradient = kernel_calls(attend, q, k, v, lam)
    calls_with_gradient = kernel_calls(attend_and_save, q, k, v, lam)

  # The forward kernel is the first one of a program.
  results_without_gradient = calls_without_gradient[0].outvars
  results_with_gradient = calls_with_gradient[0].outvars
  # The output, and the log-sum-exps, which show whether the output is accurate.
  assert len(results_without_gradient) == 2
  # Also the outputs of the noise maps, which only the backward pass needs.
  assert len(results_with_gradient) == 3
