"""The Hopper kernels in Pallas's interpreter for Mosaic GPU.

test_diff_attention.py checks the properties of all implementations. The kernels
do not support float32. So results in float16 are compared with `reference` in
float32 on the same numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.gpu import chip
from tests.harness.tiers import by_name
from tests.harness.tolerances import assert_close_in_norm

# Largest errors, relative to the norm of an array.
FLOAT16_ERROR = 1e-3
BFLOAT16_ERROR = 6e-3

pytestmark = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2),
  reason="the interpreter of Mosaic GPU kernels needs JAX 0.11.2",
)


@dataclasses.dataclass(frozen=True)
class Case:
  """The shapes and options of one call. Axes: see diffjax/parameters.py.

  Attributes:
    name: the id of the test.
    T: queries of a sequence.
    S: keys of a sequence. None for as many as queries.
    B: sequences.
    H: heads.
    K: key heads. None for as many as heads.
    G: maps of a group of queries.
    M: maps of the keys.
    D: width of queries and keys.
    V: width of the values.
    lam: the axes of λ, or "scalar".
    has_segments: whether sequences have documents of random lengths.
    dtype: of the arrays.
    q_offset: position of the first query, or of each sequence's first query.
    window: argument of `diff_attention`.
    causal: argument of `diff_attention`.
    scale: argument of `diff_attention`.
  """

  name: str
  T: int
  S: int | None = None
  B: int = 2
  H: int = 2
  K: int | None = None
  G: int = 2
  M: int = 2
  D: int = 8
  V: int = 16
  lam: str = "BTH"
  has_segments: bool = False
  dtype: str = "float16"
  q_offset: int | tuple[int, ...] = 0
  window: int | None = None
  causal: bool = True
  scale: float | None = None


# V1 has two maps of the keys. V2 has one, for both maps of the queries (M=1).
CASES = [
  Case("v1_ragged_grouped", T=130, K=1),
  Case(
    "v1_wide_packed_window",
    T=140,
    H=1,
    D=96,
    V=192,
    has_segments=True,
    window=30,
  ),
  Case("v2_grouped", T=70, H=4, K=2, M=1, V=8),
  Case("plain_wide", T=70, H=1, G=1, M=1, D=128, V=128, causal=False),
  Case("window_not_causal_v2", T=200, B=1, M=1, V=8, window=20, causal=False),
  Case("offset_per_row", T=70, S=300, q_offset=(5, 170)),
]
COMBINED_CASES = [
  Case("v1_not_causal", T=100, causal=False),
  Case("v1_several_tiles", T=300, B=1, H=1),
  Case("v1_wide", T=140, H=1, D=100, V=200),
  Case("v2_wide_not_causal", T=70, H=1, M=1, D=128, V=128, causal=False),
  Case("plain_grouped", T=130, K=1, G=1, M=1, V=8),
  Case("one_query", T=1, S=130, q_offset=(4, 129)),
  Case("packed", T=200, has_segments=True),
  Case("packed_not_causal", T=200, has_segments=True, causal=False),
  Case("window", T=300, B=1, H=1, window=40),
  Case("window_not_causal", T=300, B=1, H=1, window=90, causal=False),
  Case("cross", T=70, S=150, causal=False),
  Case("fewer_keys", T=150, S=70),
  Case("offset_window", T=70, S=300, q_offset=170, window=40),
  Case(
    "offset_per_row_packed_window",
    T=150,
    has_segments=True,
    q_offset=(5, 20),
    window=40,
  ),
  Case("before_keys", T=150, q_offset=-70),
  Case("beyond_window", T=80, S=70, q_offset=100, window=20),
  Case("negative_scale", T=70, H=1, scale=-0.3),
  Case("no_scale", T=70, H=1, has_segments=True, scale=0.0),
]
V1 = Case("v1", T=100)


class Inputs(NamedTuple):
  """The arguments of one call.

  Attributes:
    arrays: q, k, v and λ. λ is None with one map.
    d_out: the gradient of the output.
    options: other arguments of `diff_attention` that a program is compiled for.
    array_options: segment ids, and offsets if each sequence has its own.
  """

  arrays: tuple
  d_out: jax.Array
  options: dict[str, Any]
  array_options: dict[str, jax.Array]


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
    return jnp.asarray(rng.standard_normal(shape), case.dtype)

  kv_length = case.S or case.T
  num_kv_heads = case.K or case.H
  q = normal(case.B, case.T, case.H, case.G, case.D)
  k = normal(case.B, kv_length, num_kv_heads, case.M, case.D)
  v = normal(case.B, kv_length, num_kv_heads, case.V)
  d_out = normal(case.B, case.T, case.H, case.V)
  lam_shapes = {
    "scalar": (),
    "H": (case.H,),
    "BTH": (case.B, case.T, case.H),
  }
  lam = None
  if case.G > 1:
    lam = jnp.float32(rng.uniform(-0.5, 1.2, lam_shapes[case.lam]))

  options = {
    "window": case.window,
    "causal": case.causal,
    "scale": case.scale,
  }
  array_options = {}
  if isinstance(case.q_offset, tuple):
    array_options["q_offset"] = jnp.array(case.q_offset, jnp.int32)
  else:
    options["q_offset"] = case.q_offset
  if case.has_segments:
    ids = np.sort(rng.integers(0, 5, (case.B, case.T)), axis=1)
    array_options["q_segment_ids"] = jnp.asarray(ids, jnp.int32)
  return Inputs((q, k, v, lam), d_out, options, array_options)


def run(implementation: str, inputs: Inputs, params: Any = None) -> Results:
  """Returns the output and all gradients, converted to float32.

  Args:
    implementation: argument of `diff_attention`.
    inputs: the other arguments.
    params: the parameters of the interpreter. None for its defaults.
  """
  program = compile_program(
    implementation, tuple(inputs.options.items()), params
  )
  with chip.interpreted(params):
    results = program(inputs.arrays, inputs.d_out, inputs.array_options)
    results = jax.block_until_ready(results)
  return jax.tree.map(lambda x: np.asarray(x, np.float32), results)


@functools.cache
def compile_program(implementation: str, options: tuple, params: Any):
  """Returns a jitted function from arrays to Results.

  Args:
    implementation: argument of `diff_attention`.
    options: pairs of an option of `diff_attention` and its value.
    params: the parameters of the interpreter. They are part of the program, so
      each has a program of its own.
  """

  @jax.jit
  def program(arrays, d_out, array_options):
    attend = functools.partial(
      diff_attention,
      implementation=implementation,
      **dict(options),
      **array_options,
    )
    out, vjp = jax.vjp(attend, *arrays)
    return Results(out, *vjp(d_out))

  return program


def expected_results(inputs: Inputs) -> Results:
  """Returns the results of `reference` in float32."""
  arrays, d_out = jax.tree.map(jnp.float32, (inputs.arrays, inputs.d_out))
  return run("reference", inputs._replace(arrays=arrays, d_out=d_out))


@pytest.mark.parametrize("case", by_name(CASES, COMBINED_CASES))
def test_output_and_gradients_equal_the_reference(case):
  inputs = make_inputs(case)

  actual = run("pallas_gpu", inputs)

  expected = expected_results(inputs)
  assert_close_in_norm(actual, expected, FLOAT16_ERROR)


@pytest.mark.parametrize(
  "case",
  by_name(
    [Case("lambda_per_head", T=100, lam="H", dtype="bfloat16")],
    [Case("lambda_scalar", T=100, lam="scalar", dtype="bfloat16")],
  ),
)
def test_bfloat16_is_rounded_only_at_the_end(case):
  """Sums are in float32, so only single numbers are rounded to bfloat16."""
  inputs = make_inputs(case)

  actual = run("pallas_gpu", inputs)

  expected = expected_results(inputs)
  assert_close_in_norm(actual, expected, BFLOAT16_ERROR)


@pytest.mark.parametrize(
  "case",
  by_name(
    [Case("narrow", T=140, B=1, H=1, has_segments=True)],
    [Case("wide", T=140, B=1, K=1, D=128, V=256, has_segments=True)],
  ),
)
def test_results_are_deterministic(case):
  """The order of a sum does not depend on which thread is faster.

  The interpreter runs a kernel on several threads, whose speed varies. `case`
  has the tokens (T), sequences (B), heads (H), key heads (K) and widths (D, V).
  """
  inputs = make_inputs(case)

  first = run("pallas_gpu", inputs)
  second = run("pallas_gpu", inputs)

  chex.assert_trees_all_equal(first, second)


def test_output_is_the_same_without_a_gradient():
  """For a gradient, the forward kernel also saves other results."""
  inputs = make_inputs(V1)
  attend = functools.partial(diff_attention, implementation="pallas_gpu")

  with chip.interpreted():
    out = jax.jit(attend)(*inputs.arrays)

  assert out.dtype == jnp.float16
  with_gradient = run("pallas_gpu", inputs)
  chex.assert_trees_all_equal(np.asarray(out, np.float32), with_gradient.out)


@pytest.mark.parametrize(
  "case",
  by_name(
    [Case("v1", T=140, B=1, H=1)],
    [
      Case("v1_wide", T=70, B=1, H=1, D=128, V=256),
      Case("v2_grouped", T=140, B=1, K=1, M=1),
    ],
  ),
)
def test_kernels_have_no_races(case):
  """The interpreter finds threads that write what others read."""
  # JAX offers the result of its race detector only here.
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

  params = plgpu.InterpretGPUParams(detect_races=True)

  run("pallas_gpu", make_inputs(case), params)

  assert not interpret_pallas_call.get_races().races_found


def test_shard_map_does_not_change_the_results():
  """The kernels and their gradients also run inside `shard_map`."""
  inputs = make_inputs(Case("v1", T=100, has_segments=True, lam="scalar"))
  # The interpreter supports only one device.
  mesh = jax.make_mesh(
    (1,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:1],
  )

  def attend(q, k, v, lam, segment_ids):
    return diff_attention(
      q,
      k,
      v,
      lam,
      q_segment_ids=segment_ids,
      implementation="pallas_gpu",
    )

  # The mesh divides all arrays but λ, which its devices share.
  data = P("data")
  attend_on_mesh = jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=(data, data, data, P(), data),
    out_specs=data,
  )

  @jax.jit
  def program(arrays, d_out, segment_ids):
    out, vjp = jax.vjp(attend_on_mesh, *arrays, segment_ids)
    *gradients, _ = vjp(d_out)
    return Results(out, *gradients)

  with chip.interpreted():
    segment_ids = inputs.array_options["q_segment_ids"]
    actual = program(inputs.arrays, inputs.d_out, segment_ids)
    jax.block_until_ready(actual)

  assert_close_in_norm(actual, expected_results(inputs), FLOAT16_ERROR)


@pytest.mark.parametrize(
  ("options", "array_options", "queries", "hidden_keys"),
  [
    pytest.param(
      # Query 128 sees keys 65 to 128, and query 191 sees keys 128 to 191.
      {"window": 64},
      {},
      range(128, 192),
      [*range(64), *range(192, 256)],
      id="window",
    ),
    pytest.param(
      # The queries are one document, and the other keys are another one.
      {"causal": False},
      {"q_segment_ids": np.repeat([[0, 1]], [64, 192], axis=1)},
      range(64),
      range(64, 256),
      id="segments",
    ),
    pytest.param(
      # The hidden keys come after the queries.
      {},
      {},
      range(64),
      range(64, 256),
      id="causal",
      marks=pytest.mark.full,
    ),
  ],
)
def test_hidden_blocks_are_not_computed(
  options, array_options, queries, hidden_keys
):
  """Queries have finite results although keys that they do not see are NaN.

  A product with NaN is NaN, even if a mask follows. A block has 64 tokens.
  """
  queries = np.array(queries)
  hidden_keys = np.array(hidden_keys)
  inputs = make_inputs(Case("one_head", T=256, B=1, H=1, **options))
  q, k, v, lam = inputs.arrays
  k = k.at[:, hidden_keys].set(jnp.nan)
  v = v.at[:, hidden_keys].set(jnp.nan)

  results = run(
    "pallas_gpu",
    inputs._replace(arrays=(q, k, v, lam), array_options=array_options),
  )

  chex.assert_tree_all_finite(results.out[:, queries])
  chex.assert_tree_all_finite(results.d_q[:, queries])
  chex.assert_tree_all_finite(results.d_lam[:, queries])
  # The query at the position of a NaN key sees that key.
  queries_that_see_nan = hidden_keys
  assert np.isnan(results.out[:, queries_that_see_nan]).any()


def test_row_without_keys_has_zero_output_and_no_gradient():
  """A query sees only the keys that have its segment id.

  The first block of 64 queries has queries with keys, and others without.
  """
  # Two sequences of 70 tokens.
  inputs = make_inputs(Case("v1", B=2, T=70, causal=False))
  # No key has the id 9, so queries 0 to 39 see no key.
  q_ids = jnp.full((2, 70), 9, jnp.int32).at[:, 40:].set(1)
  kv_ids = jnp.ones((2, 70), jnp.int32)
  segment_ids = {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}

  results = run("pallas_gpu", inputs._replace(array_options=segment_ids))

  assert (results.out[:, :40] == 0).all()
  assert (results.d_q[:, :40] == 0).all()
  assert (results.d_lam[:, :40] == 0).all()
  assert (results.out[:, 40:] != 0).all()
  assert (results.d_k != 0).all()


@pytest.mark.parametrize(
  ("dtype", "D", "V", "message"),
  [
    pytest.param(
      jnp.float32, 8, 16, "float32.*bfloat16 or float16", id="dtype"
    ),
    pytest.param(jnp.float16, 136, 16, "D = 136.*up to 128", id="D"),
    pytest.param(jnp.float16, 8, 264, "V = 264.*up to 256", id="V"),
  ],
)
def test_error_names_the_unsupported_dtype_or_width(dtype, D, V, message):
  """D is the width of queries and keys. V is the width of values."""
  q = jnp.zeros((1, 8, 2, 2, D), dtype)
  v = jnp.zeros((1, 8, 2, V), dtype)

  with (
    chip.interpreted(),
    pytest.raises(
      ValueError, match=f"^q .*{message}.*implementation='chunked'"
    ),
  ):
    diff_attention(q, q, v, 0.5, implementation="pallas_gpu")


def test_another_backend_is_refused():
  """The tests run on a CPU, here without the interpreter."""
  q = jnp.zeros((1, 8, 2, 2, 8), jnp.float16)
  v = jnp.zeros((1, 8, 2, 16), jnp.float16)

  with pytest.raises(
    ValueError,
    match="^implementation = 'pallas_gpu' needs a Hopper GPU"
    ".*backend is 'cpu'; use implementation=",
  ):
    diff_attention(q, q, v, 0.5, implementation="pallas_gpu")


class BlackwellDevice:
  """What JAX says about a GPU that is newer than Hopper."""

  platform = "gpu"
  device_kind = "NVIDIA B200"
  compute_capability = "10.0"


def test_blackwell_is_refused(monkeypatch):
  q = jnp.zeros((1, 8, 2, 2, 8), jnp.float16)
  v = jnp.zeros((1, 8, 2, 16), jnp.float16)
  monkeypatch.setattr(jax, "devices", lambda *_: [BlackwellDevice])

  with pytest.raises(
    ValueError,
    match="needs a Hopper GPU.*this is NVIDIA B200, 10.0;"
    " use implementation='chunked' or 'auto'",
  ):
    diff_attention(q, q, v, 0.5, implementation="pallas_gpu")


def test_warning_names_an_assembler_that_corrupts_products(monkeypatch):
  """`refusal` says what is wrong with ptxas, the assembler that JAX uses."""
  problem = "ptxas 13.0.88 can corrupt products"
  monkeypatch.setattr(chip.assembler, "refusal", lambda: problem)

  with pytest.warns(UserWarning, match=r"ptxas 13\.0\.88"):
    # A kernel that does nothing.
    chip.make_kernel(
      lambda: None,
      "nothing",
      interpret=None,
      grid=(1,),
      grid_names=("tiles",),
      warpgroups=1,
      outputs=(),
      scratch={},
    )
