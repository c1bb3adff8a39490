"""The properties that all implementations of differential attention share.

Each test runs with each implementation in IMPLEMENTATIONS, so a new one joins
by adding an entry. Most results are compared with `reference`: the definition,
computed in float64 on the numbers that the implementation gets.
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
from jax.test_util import check_grads

from diffjax.ops.diff_attention import RESIDUAL_NAMES, chunked, diff_attention
from diffjax.ops.diff_attention.gpu import chip as gpu_chip
from diffjax.ops.diff_attention.reference import attention_maps, reference
from diffjax.ops.diff_attention.tpu import chip as tpu_chip
from tests.harness.tolerances import (
  FLOAT32,
  FLOAT32_LAYER,
  assert_close_in_norm,
)

B, D = 2, 6


@dataclasses.dataclass(frozen=True)
class Case:
  """The shapes and options of one call. Axes: see diffjax/parameters.py.

  Attributes:
    name: the id of the test.
    T: queries of a sequence.
    S: keys of a sequence. None for as many as queries.
    H: heads.
    K: key heads.
    G: maps of a group of queries: 1 for plain attention, 2 for one signal map
      and one noise map, more if several signal maps share a noise map.
    M: maps of the keys.
    V: width of the values.
    lam: the axes of λ, or "scalar".
    q_ids: segment ids of the first sequence's queries. The second sequence has
      them in reverse order.
    kv_ids: segment ids of the keys. None for those of the queries.
    q_offset: position of the first query, or of each sequence's first query.
    causal: argument of `diff_attention`.
    window: argument of `diff_attention`.
    scale: argument of `diff_attention`.
  """

  name: str
  T: int = 13
  S: int | None = None
  H: int = 2
  K: int = 2
  G: int = 2
  M: int = 2
  V: int = 10
  lam: str = "BTH"
  q_ids: tuple[int, ...] | None = None
  kv_ids: tuple[int, ...] | None = None
  q_offset: int | tuple[int, int] = 0
  causal: bool = True
  window: int | None = None
  scale: float | None = None


# Segment ids of a sequence of 13 tokens: three documents.
PACKED = (0, 0, 0, 0, 0, 7, 7, 7, 7, 3, 3, 3, 3)

GROUPED = Case("grouped", H=4)
PLAIN_GROUPED = Case("plain_grouped_scale", G=1, M=1, H=4, scale=0.3)
# No key has the segment id 9, so those queries see no key.
EMPTY_ROWS = Case(
  "empty_rows", T=5, S=13, q_ids=(0, 9, 9, 3, 7), kv_ids=PACKED, causal=False
)
PACKED_GROUPED = Case(
  "packed_grouped_lambda_scalar", H=4, q_ids=PACKED, lam="scalar"
)
SHARED_KEYS = Case("shared_keys", M=1, H=4, V=6)

# These cases use each option once.
CASES = [
  PLAIN_GROUPED,
  GROUPED,
  Case(
    "shared_keys_window_lambda_per_head",
    M=1,
    H=3,
    K=1,
    V=6,
    window=4,
    lam="H",
  ),
  PACKED_GROUPED,
  EMPTY_ROWS,
  Case("window_not_causal", window=4, causal=False, S=11),
  Case("offset_window", T=7, S=16, q_offset=6, window=4),
  Case("offset_before_keys", q_offset=-7),
  Case("shared_noise_grouped", G=3, H=8, K=2),
  Case(
    "offset_per_row_packed_window",
    T=7,
    S=13,
    q_offset=(-3, 6),
    q_ids=PACKED[4:11],
    kv_ids=PACKED,
    window=3,
  ),
]

# These cases combine options. The full tier runs them.
COMBINED_CASES = [
  Case("plain", G=1, M=1),
  Case("one_head_per_key_head"),
  Case("grouped_lambda_per_head", H=4, lam="H"),
  SHARED_KEYS,
  Case(
    "shared_noise_shared_keys_packed_window",
    G=4,
    M=1,
    H=6,
    K=1,
    V=6,
    lam="H",
    q_ids=PACKED,
    window=5,
  ),
  Case("several_blocks", T=150, H=4, lam="H"),
  Case("one_query", T=1, S=13, q_offset=(4, 12), lam="scalar"),
  Case("packed_not_causal", q_ids=PACKED, causal=False),
  Case("window_packed_grouped", H=4, window=3, q_ids=PACKED),
  Case("fewer_keys", T=13, S=6),
  Case("cross", T=5, S=11, causal=False),
  Case("offset", T=7, S=16, q_offset=6),
  Case("offset_beyond_window", q_offset=11, window=4),
  Case("offset_per_row_window", T=7, S=13, q_offset=(2, 6), window=3, H=4),
]


@dataclasses.dataclass(frozen=True)
class Implementation:
  """How the tests run an implementation.

  Attributes:
    name: argument of `diff_attention`.
    dtype: the dtype of the arrays, unless a test chooses another one.
    tolerance: of outputs and gradients in that dtype, relative to the norm of
      an array.
    float64_tolerance: the same in float64. None if that is not supported.
    output_atol: of single elements of the output in that dtype, which are of
      order 1.
    unsupported: options of `diff_attention` that it refuses.
    has_small_blocks: whether blocks are small enough for several per sequence.
    default_cases: names of the cases in the default tier, if not all CASES.
      The kernels run in slow interpreters.
    combined_cases: names of the cases of COMBINED_CASES that it runs, if not
      all of them.
  """

  name: str
  dtype: str = "float32"
  tolerance: float = 3e-6
  float64_tolerance: float | None = 1e-12
  output_atol: float = 1e-6
  unsupported: tuple[str, ...] = ()
  has_small_blocks: bool = False
  default_cases: tuple[str, ...] | None = None
  combined_cases: tuple[str, ...] | None = None


IMPLEMENTATIONS = {
  # It is compared with itself in float64.
  "reference": Implementation(
    "reference",
    default_cases=("plain_grouped_scale", "grouped", "shared_noise_grouped"),
    combined_cases=(),
  ),
  "chunked": Implementation(
    "chunked",
    # The same cases with small blocks are in the default tier.
    default_cases=(
      "plain_grouped_scale",
      "grouped",
      "shared_keys_window_lambda_per_head",
      "shared_noise_grouped",
    ),
    # The other cases fit one block, as in CASES.
    combined_cases=("several_blocks",),
  ),
  "chunked_small_blocks": Implementation("chunked", has_small_blocks=True),
  "two_call": Implementation(
    "two_call",
    # The softmax of stock attention is in float32.
    float64_tolerance=1e-6,
    unsupported=("window", "q_offset"),
  ),
  # test_pallas_tpu.py combines the other options, over several blocks.
  "pallas_tpu": Implementation(
    "pallas_tpu",
    float64_tolerance=None,
    default_cases=(
      "plain_grouped_scale",
      "grouped",
      "shared_noise_grouped",
      "offset_per_row_packed_window",
    ),
    combined_cases=("one_query", "fewer_keys", "cross"),
  ),
  # test_pallas_gpu.py combines the options.
  "pallas_gpu": Implementation(
    "pallas_gpu",
    dtype="float16",
    # Weights and outputs have 10 bits of mantissa: rounding to nearest changes
    # a number below 2 by at most 2⁻¹¹, which is 5e-4.
    tolerance=1e-3,
    output_atol=1e-3,
    float64_tolerance=None,
    default_cases=("grouped", "offset_per_row_packed_window"),
    combined_cases=(),
  ),
}


def is_supported(implementation: Implementation, case: Case) -> bool:
  """Returns whether a case leaves unsupported options at their defaults."""
  defaults = Case("defaults")
  for option in implementation.unsupported:
    if getattr(case, option) != getattr(defaults, option):
      return False
  return True


def supported_cases() -> list[Any]:
  """Returns a parameter for each implementation with each of its cases."""
  parameters = []
  for key, implementation in IMPLEMENTATIONS.items():
    for case in CASES:
      if not is_supported(implementation, case):
        continue
      # The full tier runs the cases that the default tier leaves out.
      default_names = implementation.default_cases
      marks = []
      if default_names is not None and case.name not in default_names:
        marks.append(pytest.mark.full)
      parameter = pytest.param(key, case, id=f"{key}-{case.name}", marks=marks)
      parameters.append(parameter)

    for case in COMBINED_CASES:
      names = implementation.combined_cases
      is_chosen = names is None or case.name in names
      if not is_chosen or not is_supported(implementation, case):
        continue
      parameter = pytest.param(
        key, case, id=f"{key}-{case.name}", marks=pytest.mark.full
      )
      parameters.append(parameter)
  return parameters


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
  """An implementation. Kernels are interpreted, and small blocks are set."""
  chosen = IMPLEMENTATIONS[request.param]
  if chosen.name == "pallas_gpu" and jax.__version_info__ < (0, 11, 2):
    pytest.skip("the interpreter of Mosaic GPU kernels needs JAX 0.11.2")

  if chosen.has_small_blocks:
    # Short sequences then have scans, bands, a last block that is shorter, and
    # several tiles of heads.
    monkeypatch.setattr(chunked, "BLOCK_QUERIES", 3)
    monkeypatch.setattr(chunked, "MAX_BANDS", 3)
    monkeypatch.setattr(chunked, "MAX_BLOCK_LOGITS", 64)

  with contextlib.ExitStack() as stack:
    if chosen.name == "pallas_tpu":
      params = pltpu.InterpretParams(uninitialized_memory="nan")
      stack.enter_context(tpu_chip.interpreted(params))
    if chosen.name == "pallas_gpu":
      stack.enter_context(gpu_chip.interpreted())
    yield chosen


class Inputs(NamedTuple):
  """The arguments of one call.

  Attributes:
    arrays: q, k, v and λ, in float64. λ is None with one map.
    d_out: the gradient of the output, in float64.
    options: options that a program is compiled for.
    array_options: segment ids, and offsets if each sequence has its own.
  """

  arrays: tuple
  d_out: np.ndarray
  options: dict[str, Any]
  array_options: dict[str, np.ndarray]


class Results(NamedTuple):
  """The output of one call, and the gradients of its arguments."""

  out: np.ndarray
  d_q: np.ndarray
  d_k: np.ndarray
  d_v: np.ndarray
  d_lam: np.ndarray | None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
  """Returns random arguments for a case."""
  rng = np.random.default_rng(seed)
  kv_length = case.S or case.T
  signal_maps_per_group = max(case.G - 1, 1)
  num_groups = case.H // signal_maps_per_group
  lam_shapes = {"scalar": (), "H": (case.H,), "BTH": (B, case.T, case.H)}
  q = rng.standard_normal((B, case.T, num_groups, case.G, D))
  k = rng.standard_normal((B, kv_length, case.K, case.M, D))
  v = rng.standard_normal((B, kv_length, case.K, case.V))
  lam = None
  if case.G > 1:
    lam = rng.uniform(-0.5, 1.2, lam_shapes[case.lam])
  d_out = rng.standard_normal((B, case.T, case.H, case.V))

  options = {
    "causal": case.causal,
    "window": case.window,
    "scale": case.scale,
  }
  array_options = {}
  if isinstance(case.q_offset, tuple):
    array_options["q_offset"] = np.array(case.q_offset, np.int32)
  else:
    options["q_offset"] = case.q_offset
  if case.q_ids is not None:
    array_options["q_segment_ids"] = segment_ids(case.q_ids)
  if case.kv_ids is not None:
    array_options["kv_segment_ids"] = segment_ids(case.kv_ids)
  return Inputs((q, k, v, lam), d_out, options, array_options)


def segment_ids(first_sequence: tuple[int, ...]) -> np.ndarray:
  """Returns the ids of two sequences, the second in reverse order."""
  ids = np.array(first_sequence, np.int32)
  return np.stack([ids, ids[::-1]])


def run(
  implementation: Implementation, inputs: Inputs, dtype: Any = None
) -> Results:
  """Returns the output and all gradients, converted to float64."""
  dtype = dtype or implementation.dtype
  to_dtype = functools.partial(np.asarray, dtype=jnp.dtype(dtype))
  arrays = jax.tree.map(to_dtype, inputs.arrays)
  d_out = to_dtype(inputs.d_out)
  program = compile_program(implementation, tuple(inputs.options.items()))
  results = program(arrays, d_out, inputs.array_options)
  return jax.tree.map(lambda x: np.asarray(x, np.float64), results)


@functools.cache
def compile_program(implementation: Implementation, options: tuple):
  """Returns a jitted function from arrays to Results.

  Args:
    implementation: the implementation.
    options: pairs of an option of `diff_attention` and its value. Tests with
      equal options share the function.
  """

  @jax.jit
  def program(arrays, d_out, array_options):
    attend = functools.partial(
      diff_attention,
      implementation=implementation.name,
      **dict(options),
      **array_options,
    )
    out, vjp = jax.vjp(attend, *arrays)
    return Results(out, *vjp(d_out))

  return program


@functools.cache
def expected_results(case: Case, dtype: str) -> Results:
  """Returns the results of `reference` in float64, for numbers of a dtype."""

  def round_to_dtype(x):
    return x.astype(jnp.dtype(dtype)).astype(np.float64)

  inputs = make_inputs(case)
  arrays, d_out = jax.tree.map(round_to_dtype, (inputs.arrays, inputs.d_out))
  inputs = inputs._replace(arrays=arrays, d_out=d_out)
  with jax.enable_x64(True):
    return run(IMPLEMENTATIONS["reference"], inputs, np.float64)


@pytest.mark.parametrize(
  ("implementation", "case"), supported_cases(), indirect=["implementation"]
)
def test_output_and_gradients_equal_the_reference(implementation, case):
  actual = run(implementation, make_inputs(case))

  expected = expected_results(case, implementation.dtype)
  assert_close_in_norm(actual, expected, implementation.tolerance)


@pytest.mark.parametrize(
  ("case", "unsupported_option"),
  [
    pytest.param(Case("window", window=4), "window", id="window"),
    pytest.param(Case("offset", q_offset=6), "q_offset", id="offset"),
    pytest.param(
      Case("offset_per_row", q_offset=(4, 12)), "q_offset", id="offset_per_row"
    ),
  ],
)
def test_two_call_names_an_unsupported_option(case, unsupported_option):
  """`two_call` calls stock attention, which lacks these options."""
  inputs = make_inputs(case)

  message = f"^{unsupported_option} .*use implementation="
  with pytest.raises(ValueError, match=message):
    run(IMPLEMENTATIONS["two_call"], inputs)


@pytest.mark.parametrize(
  "implementation",
  ["reference", "chunked", "chunked_small_blocks", "two_call"],
  indirect=True,
)
@pytest.mark.parametrize(
  "case",
  [
    pytest.param(GROUPED, id="grouped"),
    pytest.param(SHARED_KEYS, id="shared_keys", marks=pytest.mark.full),
    pytest.param(PACKED_GROUPED, id="packed", marks=pytest.mark.full),
  ],
)
def test_float64_is_computed_in_float64(implementation, case):
  with jax.enable_x64(True):
    actual = run(implementation, make_inputs(case), np.float64)

  expected = expected_results(case, "float64")
  assert_close_in_norm(actual, expected, implementation.float64_tolerance)


@pytest.mark.parametrize(
  "implementation", ["pallas_tpu", "pallas_gpu"], indirect=True
)
def test_kernels_refuse_float64(implementation):
  with (
    jax.enable_x64(True),
    pytest.raises(ValueError, match="float64.*use implementation="),
  ):
    run(implementation, make_inputs(GROUPED), np.float64)


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(GROUPED, id="grouped"),
    pytest.param(SHARED_KEYS, id="shared_keys", marks=pytest.mark.full),
    pytest.param(PACKED_GROUPED, id="packed", marks=pytest.mark.full),
  ],
)
def test_bfloat16_is_rounded_only_at_the_end(implementation, case):
  """Sums are in float32, so only single numbers are rounded to bfloat16."""
  inputs = make_inputs(case)

  actual = run(implementation, inputs, dtype=jnp.bfloat16)

  expected = expected_results(case, "bfloat16")
  # Results of 7 bits of mantissa have errors of 2e-3 to 4e-3.
  assert_close_in_norm(actual, expected, 1e-2)


def test_output_has_the_dtype_of_the_queries(implementation):
  """`eval_shape` traces the program, and does not compute it."""
  inputs = make_inputs(GROUPED)
  to_bfloat16 = functools.partial(np.asarray, dtype=jnp.dtype("bfloat16"))
  arrays, d_out = jax.tree.map(to_bfloat16, (inputs.arrays, inputs.d_out))
  program = compile_program(implementation, tuple(inputs.options.items()))

  results = jax.eval_shape(program, arrays, d_out, inputs.array_options)

  assert results.out.dtype == jnp.bfloat16


def test_lambda_is_not_rounded_to_the_dtype_of_the_queries():
  """With two equal maps A, the output is A V − λ A V = (1 − λ) A V.

  In bfloat16, this λ would be 1, and the output would be zero.
  """
  lam = np.float32(1 - 2**-10)
  assert lam.astype(jnp.bfloat16) == 1
  q, k, v, _ = make_inputs(GROUPED).arrays
  # q is [B, T, H, maps, D], and k is [B, S, K, maps, D].
  first_map = slice(0, 1)
  q = np.repeat(q[:, :, :, first_map], 2, axis=3)
  k = np.repeat(k[:, :, :, first_map], 2, axis=3)

  attend = jax.jit(functools.partial(diff_attention, implementation="chunked"))
  out = attend(
    q.astype(jnp.bfloat16),
    k.astype(jnp.bfloat16),
    v.astype(jnp.bfloat16),
    lam,
  )

  assert (np.asarray(out) != 0).all()


# two_call is XLA's own attention, which rounds the sum.
@pytest.mark.parametrize(
  "implementation",
  ["chunked", "chunked_small_blocks", "pallas_tpu", "pallas_gpu"],
  indirect=True,
)
def test_row_sums_of_the_backward_pass_are_not_rounded(implementation):
  """If a query sees only one key, their logit has no gradient.

  The weight of the key is 1 for any logit. The backward pass computes the zero
  as a difference of equal sums over the width of the values: of dO ∘ v, and of
  dO ∘ O, where O = v is the output of a map. A rounded sum would not cancel.
  """
  inputs = make_inputs(GROUPED)
  q, k, v, _ = inputs.arrays
  # With integers in v, the output of the call, (1 − λ) v, is exact in bfloat16.
  integers = v.round()
  lam = np.float64(0.5)
  # In a causal window of 1, each query sees only its own key.
  options = inputs.options | {"window": 1}
  inputs = inputs._replace(arrays=(q, k, integers, lam), options=options)

  results = run(implementation, inputs, jnp.bfloat16)

  # Sums of bfloat16 would have errors of about 2⁻⁹.
  assert np.abs(results.d_q).max() < FLOAT32_LAYER["atol"]
  assert np.abs(results.d_k).max() < FLOAT32_LAYER["atol"]


def test_loss_of_a_row_has_no_gradient_for_later_keys(implementation):
  """A row is the output of one query, which sees no later keys."""
  row = 6
  inputs = make_inputs(GROUPED)
  d_out = np.zeros_like(inputs.d_out)
  d_out[:, row] = inputs.d_out[:, row]

  results = run(implementation, inputs._replace(d_out=d_out))

  for gradient in (results.d_k, results.d_v):
    assert (gradient[:, row + 1 :] == 0).all()
    gradient_of_key = np.abs(gradient[:, : row + 1]).sum(axis=(0, 2, -1))
    assert (gradient_of_key != 0).all()


def test_loss_of_a_document_has_no_gradient_for_other_documents(
  implementation,
):
  """A query sees only the keys that have its segment id."""
  inputs = make_inputs(
    Case(
      "two_documents",
      T=5,
      S=13,
      q_ids=(7, 7, 7, 3, 3),
      kv_ids=(0, 0, 0, 0, 0, 7, 7, 7, 7, 3, 3, 3, 3),
      causal=False,
    )
  )
  # The loss reads only the first sequence's document 7: three queries.
  d_out = np.zeros_like(inputs.d_out)
  d_out[0, :3] = inputs.d_out[0, :3]

  results = run(implementation, inputs._replace(d_out=d_out))

  for gradient in (results.d_k, results.d_v):
    gradient_of_document_7 = gradient[0, 5:9]
    assert (gradient_of_document_7 != 0).any(axis=-1).all()
    # The gradients of all other keys.
    gradient[0, 5:9] = 0
    assert (gradient == 0).all()


def stock_attention(
  inputs: Inputs, scale: float | None, dtype: str
) -> np.ndarray:
  """Returns JAX's causal attention of the first map, for numbers of a dtype."""
  q, k, v, _ = inputs.arrays
  # Queries and keys must be as wide as the values. Zeros do not change the
  # products.
  padding = [(0, 0), (0, 0), (0, 0), (0, v.shape[-1] - D)]
  q = np.pad(q[:, :, :, 0], padding).astype(dtype)
  k = np.pad(k[:, :, :, 0], padding).astype(dtype)
  attend = functools.partial(
    jax.nn.dot_product_attention, is_causal=True, scale=scale or D**-0.5
  )
  out = jax.jit(attend)(
    q.astype(np.float32),
    k.astype(np.float32),
    v.astype(dtype).astype(np.float32),
  )
  return np.asarray(out, np.float64)


def test_attention_with_lambda_zero_is_plain_attention(implementation):
  """The output is (A₁ − λ A₂) V, with maps A₁ and A₂ of attention weights."""
  inputs = make_inputs(GROUPED)
  q, k, v, lam = inputs.arrays
  without_noise = inputs._replace(arrays=(q, k, v, np.zeros_like(lam)))

  results = run(implementation, without_noise)

  expected = stock_attention(inputs, scale=None, dtype=implementation.dtype)
  chex.assert_trees_all_close(
    results.out, expected, rtol=0, atol=implementation.output_atol
  )
  # The noise map does not contribute to the output.
  assert (results.d_q[:, :, :, 1] == 0).all()
  assert (results.d_k[:, :, :, 1] == 0).all()


def test_attention_with_one_map_is_plain_attention(implementation):
  """JAX's own attention computes the expected output."""
  inputs = make_inputs(PLAIN_GROUPED)

  results = run(implementation, inputs)

  expected = stock_attention(
    inputs, scale=PLAIN_GROUPED.scale, dtype=implementation.dtype
  )
  chex.assert_trees_all_close(
    results.out, expected, rtol=0, atol=implementation.output_atol
  )


def test_equal_maps_with_lambda_one_cancel(implementation):
  """The output is (A₁ − λ A₂) V, with maps A₁ and A₂ of attention weights."""
  inputs = make_inputs(GROUPED)
  q, k, v, lam = inputs.arrays
  # The fourth axis of q and k has the two maps.
  q[:, :, :, 1] = q[:, :, :, 0]
  k[:, :, :, 1] = k[:, :, :, 0]
  with_equal_maps = inputs._replace(arrays=(q, k, v, np.ones_like(lam)))

  results = run(implementation, with_equal_maps)

  assert np.abs(results.out).max() <= implementation.output_atol


def test_row_without_keys_has_zero_output_and_no_gradient(implementation):
  """A query sees only keys with its segment id.

  The ids are those of the first of two sequences.
  """
  case = Case(
    "empty_rows",
    T=5,
    S=13,
    q_ids=(0, 9, 9, 3, 7),
    kv_ids=(0, 0, 0, 0, 0, 7, 7, 7, 7, 3, 3, 3, 3),
    causal=False,
  )

  results = run(implementation, make_inputs(case))

  # No key has the id 9 of queries 1 and 2. Query 3 sees keys with the id 3.
  assert (results.out[0, 1:3] == 0).all()
  assert (results.d_q[0, 1:3] == 0).all()
  assert (results.d_lam[0, 1:3] == 0).all()
  assert (results.out[0, 3] != 0).all()


def test_batch_without_visible_keys_has_only_zeros(implementation):
  """A query sees only keys with its segment id."""
  inputs = make_inputs(EMPTY_ROWS)
  # All queries have the id 9, which no key has.
  q_ids = np.full_like(inputs.array_options["q_segment_ids"], 9)
  array_options = inputs.array_options | {"q_segment_ids": q_ids}

  results = run(implementation, inputs._replace(array_options=array_options))

  zeros = jax.tree.map(np.zeros_like, results)
  chex.assert_trees_all_equal(results, zeros)


def test_vmap_equals_separate_calls(implementation):
  first = make_inputs(GROUPED, seed=0)
  second = make_inputs(GROUPED, seed=1)

  def stack(first_array, second_array):
    return np.stack([first_array, second_array])

  def to_dtype(array):
    return array.astype(implementation.dtype)

  def output_and_gradients(q, k, v, lam, d_out):
    attend = functools.partial(
      diff_attention, implementation=implementation.name
    )
    out, vjp = jax.vjp(attend, q, k, v, lam)
    return Results(out, *vjp(d_out))

  arguments = jax.tree.map(
    stack, (*first.arrays, first.d_out), (*second.arrays, second.d_out)
  )
  # Pallas's interpreter for TPUs does not support the grid axis that vmap adds,
  # so the general interpreter runs the kernels.
  with tpu_chip.interpreted(True):
    program = jax.jit(jax.vmap(output_and_gradients))
    actual = program(*jax.tree.map(to_dtype, arguments))
    jax.block_until_ready(actual)

  expected = jax.tree.map(
    stack, run(implementation, first), run(implementation, second)
  )
  assert_close_in_norm(actual, expected, implementation.tolerance)


def count_row_maxima(loss, arrays: tuple) -> int:
  """Returns how often the program of a gradient computes maxima of rows.

  Only the forward pass of attention does, for its softmax.
  """
  gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
  return str(jax.make_jaxpr(gradient)(*arrays)).count(" reduce_max[")


def test_remat_by_name_runs_the_forward_pass_once():
  """The backward pass of a checkpoint normally runs the forward pass again.

  A policy that saves the operation's results by their names prevents that.
  """
  inputs = make_inputs(GROUPED)
  arrays = jax.tree.map(np.float32, inputs.arrays)

  def loss(*arrays):
    # Like the layers before attention, the cosine is cheap to compute again.
    q, k, v, lam = jax.tree.map(jnp.cos, arrays)
    out = diff_attention(q, k, v, lam, implementation="chunked")
    # The gradient of the sine needs the output.
    return jnp.sum(jnp.sin(out))

  policies = jax.checkpoint_policies
  save_by_name = policies.save_only_these_names(*RESIDUAL_NAMES)
  saving_loss = jax.checkpoint(loss, policy=save_by_name)
  repeating_loss = jax.checkpoint(loss, policy=policies.nothing_saveable)

  # Only the forward pass computes maxima of rows, for its softmax.
  num_without_checkpoint = count_row_maxima(loss, arrays)

  assert num_without_checkpoint > 0
  assert count_row_maxima(saving_loss, arrays) == num_without_checkpoint
  assert count_row_maxima(repeating_loss, arrays) == 2 * num_without_checkpoint


def test_remat_by_name_does_not_change_gradients():
  """A checkpoint saves the operation's results by their names."""
  inputs = make_inputs(GROUPED)
  arrays = jax.tree.map(np.float32, inputs.arrays)

  def loss(*arrays):
    out = diff_attention(*arrays, implementation="chunked")
    return jnp.sum(jnp.sin(out))

  policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
  remat_loss = jax.checkpoint(loss, policy=policy)
  actual = jax.jit(jax.grad(remat_loss, (0, 1, 2, 3)))(*arrays)

  expected = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)
  chex.assert_trees_all_close(actual, expected, **FLOAT32)


def test_gradients_of_the_reference_equal_finite_differences():
  # The query with the id 5 sees no key.
  case = Case(
    "small", T=4, H=2, K=1, V=3, q_ids=(0, 0, 5, 1), kv_ids=(0, 0, 1, 1)
  )
  inputs = make_inputs(case)
  attend = functools.partial(
    diff_attention, implementation="reference", **inputs.array_options
  )

  with jax.enable_x64(True):
    check_grads(
      jax.jit(attend),
      inputs.arrays,
      order=1,
      modes=["rev"],
      # A finite difference of step h has errors of h² and of ε / h.
      atol=1e-7,
      rtol=1e-7,
    )


@pytest.mark.parametrize(
  ("causal", "window", "keys_of_queries_1_to_3", "keys_of_queries_3_to_5"),
  [
    (True, None, [[0, 1], [0, 1, 2], [3]], [[3], [3, 4], [3, 4, 5]]),
    (True, 2, [[0, 1], [1, 2], [3]], [[3], [3, 4], [4, 5]]),
    (False, None, [[0, 1, 2], [0, 1, 2], [3, 4, 5]], [[3, 4, 5]] * 3),
    (False, 2, [[0, 1, 2], [1, 2], [3, 4]], [[3, 4], [3, 4, 5], [4, 5]]),
  ],
)
def test_reference_weighs_exactly_the_visible_keys(
  causal, window, keys_of_queries_1_to_3, keys_of_queries_3_to_5
):
  """A query sees the keys of its document.

  With a causal mask, the keys must not be later than the query. With a window,
  they must be less than `window` tokens away.
  """
  # The tokens 0, 1, 2 of each of two sequences are one document, and the tokens
  # 3, 4, 5 are another one. The queries are the tokens 1, 2, 3 of the first
  # sequence, and 3, 4, 5 of the second one.
  inputs = make_inputs(Case("packed", T=3, S=6))
  q, k, _, _ = inputs.arrays

  maps_of = functools.partial(attention_maps, causal=causal, window=window)
  maps = jax.jit(maps_of)(
    np.float32(q),
    np.float32(k),
    q_segment_ids=np.array([[0, 0, 7], [7, 7, 7]]),
    kv_segment_ids=np.array([[0, 0, 0, 7, 7, 7]] * 2),
    q_offset=np.array([1, 3]),
  )
  maps = np.asarray(maps)

  B, H, num_maps, T, S = maps.shape
  expected_keys = [keys_of_queries_1_to_3, keys_of_queries_3_to_5]
  for b, h, g, t in np.ndindex(B, H, num_maps, T):
    weights_of_keys = maps[b, h, g, t]
    visible_keys = np.flatnonzero(weights_of_keys)
    assert visible_keys.tolist() == expected_keys[b][t]


def test_rows_of_a_map_sum_to_one():
  """A row of a map has the weights of all keys for one query."""
  q, k, _, _ = make_inputs(GROUPED).arrays

  maps = jax.jit(attention_maps)(np.float32(q), np.float32(k))

  # The last axis has the keys.
  sums = np.asarray(maps).sum(axis=-1)
  chex.assert_trees_all_close(sums, np.ones_like(sums), **FLOAT32)


def test_scale_is_a_factor_of_the_queries():
  """The default scale is 1 / √D, with the width D of the queries."""
  q, k, v, lam = jax.tree.map(np.float32, make_inputs(GROUPED).arrays)
  default_scale = D**-0.5

  attend = jax.jit(reference, static_argnames="scale")

  doubled_scale = attend(q, k, v, lam, scale=2 * default_scale)

  doubled_queries = attend(2 * q, k, v, lam)
  chex.assert_trees_all_close(doubled_scale, doubled_queries, **FLOAT32)


def test_keys_have_the_segment_ids_of_the_queries_by_default():
  q, k, v, lam = jax.tree.map(np.float32, make_inputs(GROUPED).arrays)
  # Each of the two sequences has 13 tokens, in three documents.
  ids_of_first = [0, 0, 0, 0, 0, 7, 7, 7, 7, 3, 3, 3, 3]
  ids_of_second = [3, 3, 3, 3, 7, 7, 7, 7, 0, 0, 0, 0, 0]
  ids = np.array([ids_of_first, ids_of_second], np.int32)
  attend = functools.partial(
    diff_attention, q, k, v, lam, q_segment_ids=ids, implementation="reference"
  )
  attend = jax.jit(attend)

  by_default = attend()

  given = attend(kv_segment_ids=ids)
  chex.assert_trees_all_equal(by_default, given)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
  """Returns an array without compiling a program."""
  return np.zeros(shape, dtype)


@pytest.mark.parametrize(
  ("argument", "changes"),
  [
    # The valid shapes are q [2, 5, 4, 2, 6] (sequences, queries, heads, maps,
    # width), k [2, 5, 2, 2, 6], v [2, 5, 2, 8], and λ of one number. The ids
    # say what is wrong.
    pytest.param("q", {"q": zeros(2, 5, 4, 6)}, id="q_without_maps"),
    pytest.param(
      "q", {"q": zeros(2, 5, 4, 2, 6, dtype=jnp.int32)}, id="q_of_integers"
    ),
    pytest.param(
      "k",
      {"q": zeros(2, 5, 4, 3, 6), "k": zeros(2, 5, 2, 3, 6)},
      id="three_maps_of_keys",
    ),
    pytest.param("k", {"k": zeros(2, 5, 2, 3, 6)}, id="more_maps_of_keys"),
    pytest.param("k", {"k": zeros(2, 5, 3, 2, 6)}, id="k_heads"),
    pytest.param("k", {"k": zeros(1, 5, 2, 2, 6)}, id="k_batch"),
    pytest.param(
      "k", {"k": zeros(2, 5, 2, 2, 6, dtype=jnp.bfloat16)}, id="k_dtype"
    ),
    pytest.param("v", {"v": zeros(2, 4, 2, 8)}, id="v_length"),
    pytest.param("v", {"v": zeros(2, 5, 1, 8)}, id="v_heads"),
    pytest.param("lam", {"lam": None}, id="no_lambda"),
    pytest.param("lam", {"lam": zeros(5)}, id="lambda_heads"),
    pytest.param(
      "lam",
      {"q": zeros(2, 5, 4, 3, 6), "lam": zeros(4)},
      id="lambda_of_groups",
    ),
    pytest.param(
      "lam",
      {"q": zeros(2, 5, 4, 1, 6), "k": zeros(2, 5, 2, 1, 6)},
      id="lambda_of_one_map",
    ),
    pytest.param(
      # Ids of keys need ids of queries.
      "q_segment_ids",
      {"kv_segment_ids": zeros(2, 5, dtype=jnp.int32)},
      id="only_ids_of_keys",
    ),
    pytest.param(
      "q_segment_ids",
      {"q_segment_ids": zeros(2, 5)},
      id="ids_of_floats",
    ),
    pytest.param(
      "kv_segment_ids",
      {
        "q": zeros(2, 3, 4, 2, 6),
        "q_segment_ids": zeros(2, 3, dtype=jnp.int32),
      },
      id="no_ids_of_more_keys",
    ),
    pytest.param(
      "kv_segment_ids",
      {
        "q_segment_ids": zeros(2, 5, dtype=jnp.int32),
        "kv_segment_ids": zeros(2, 4, dtype=jnp.int32),
      },
      id="length_of_ids",
    ),
    pytest.param(
      "q_offset", {"q_offset": zeros(3, dtype=jnp.int32)}, id="offset_batch"
    ),
    pytest.param("q_offset", {"q_offset": 1.5}, id="offset_of_a_float"),
    pytest.param("window", {"window": 0}, id="window_of_no_key"),
    pytest.param("window", {"window": True}, id="window_of_a_boolean"),
    pytest.param(
      "implementation", {"implementation": "flash"}, id="implementation"
    ),
  ],
)
def test_error_names_the_bad_argument(argument, changes):
  valid_arguments = {
    "q": zeros(2, 5, 4, 2, 6),
    "k": zeros(2, 5, 2, 2, 6),
    "v": zeros(2, 5, 2, 8),
    "lam": 0.5,
    "implementation": "chunked",
  }

  with pytest.raises(ValueError, match=f"^{argument} "):
    diff_attention(**(valid_arguments | changes))
