"""Ring attention: several devices share the tokens of each sequence.

Keys and values travel around the ring, one piece per device and step.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.compiled import plan
from diffjax.compiled.text import ProgramText
from diffjax.ops.diff_attention import (
  RESIDUAL_NAMES,
  Arrays,
  Options,
  balanced_order,
  diff_attention,
  implementations,
  ring,
  ring_plan,
)
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.sharded import TokenSharding
from diffjax.ops.diff_attention.tpu import block_sizes, chip
from tests.harness.tiers import by_name
from tests.harness.tolerances import FLOAT64


@pytest.fixture(autouse=True)
def steps_in_loops(monkeypatch):
  """Runs the steps of the ring in loops, as on accelerators.

  tests/parallel/test_mesh.py runs whole training steps as on CPUs.
  """
  monkeypatch.setattr(ring, "platform", lambda: "tpu")


@dataclasses.dataclass(frozen=True)
class Case:
  """The shapes and options of one call. Axes: see diffjax/parameters.py.

  Attributes:
    name: the id of the test.
    shards: devices that share the tokens.
    tensor: devices that share the heads.
    order: the order of the tokens: "given", or "balanced", which gives all
      devices equal work with a causal mask.
    T: tokens of a sequence.
    H: heads.
    K: key heads.
    G: maps of a group of queries.
    M: maps of the keys.
    V: width of the values.
    has_segments: whether sequences have several documents.
    q_offset: argument of `diff_attention`.
    window: argument of `diff_attention`.
    causal: argument of `diff_attention`.
    scale: argument of `diff_attention`.
  """

  name: str
  shards: int = 4
  tensor: int = 1
  order: str = "balanced"
  T: int = 32
  H: int = 4
  K: int = 2
  G: int = 2
  M: int = 2
  V: int = 6
  has_segments: bool = False
  q_offset: int = 0
  window: int | None = None
  causal: bool = True
  scale: float | None = None


# V1 has two maps of the keys. V2 has one, for both maps of the queries (M=1).
V1_GROUPED = Case("v1_grouped", shards=8)
V2_SEGMENTS = Case("v2_segments_given", M=1, order="given", has_segments=True)
CASES = [
  V1_GROUPED,
  V2_SEGMENTS,
  Case("plain_window_tensor", tensor=2, G=1, M=1, window=7),
]
COMBINED_CASES = [
  Case("two_shards", shards=2),
  Case("given", order="given"),
  Case("given_window", shards=8, order="given", window=3),
  Case("short_window_segments", shards=8, has_segments=True, window=3),
  Case("long_window", window=19),
  Case("not_causal", has_segments=True, causal=False),
  Case("not_causal_window", shards=8, causal=False, window=5),
  Case("offset", q_offset=3),
  Case("offset_before_the_keys_given", order="given", q_offset=-13, window=6),
  Case("no_visible_keys", q_offset=-32),
  Case(
    "v2_segments_tensor",
    shards=2,
    tensor=2,
    M=1,
    has_segments=True,
    scale=0.3,
  ),
]


class Inputs(NamedTuple):
  """The arrays of one call."""

  arrays: tuple  # q, k, v and λ, which is None with one map
  d_out: np.ndarray
  segment_ids: np.ndarray | None


class Results(NamedTuple):
  """The output of one call, and the gradients of its arguments."""

  out: np.ndarray
  d_q: np.ndarray
  d_k: np.ndarray
  d_v: np.ndarray
  d_lam: np.ndarray | None


def make_inputs(case: Case, dtype: Any) -> Inputs:
  """Returns random arrays. The numbers are the same in all dtypes."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return rng.standard_normal(shape).astype(jnp.bfloat16).astype(dtype)

  q = normal(2, case.T, case.H, case.G, 8)
  k = normal(2, case.T, case.K, case.M, 8)
  v = normal(2, case.T, case.K, case.V)
  lam = None
  if case.G == 2:
    lam_dtype = np.promote_types(dtype, np.float32)
    lam = normal(2, case.T, case.H).astype(lam_dtype)
  d_out = normal(2, case.T, case.H, case.V)
  segment_ids = None
  if case.has_segments:
    tokens = np.arange(case.T, dtype=np.int32)
    segment_ids = np.stack([tokens // 5, tokens // 11])
  return Inputs((q, k, v, lam), d_out, segment_ids)


def make_program(case: Case, implementation: str, sharding=None):
  """Returns a jitted function from Inputs to Results.

  Args:
    case: shapes and options.
    implementation: argument of `diff_attention`.
    sharding: argument of `diff_attention`. None for a single device.
  """
  options: dict[str, Any] = {
    "q_offset": case.q_offset,
    "window": case.window,
    "causal": case.causal,
    "scale": case.scale,
    "implementation": implementation,
  }
  if sharding is not None:
    options["sharding"] = sharding
    options["token_order"] = case.order

  @jax.jit
  def program(inputs):
    attend = functools.partial(
      diff_attention, q_segment_ids=inputs.segment_ids, **options
    )
    out, vjp = jax.vjp(attend, *inputs.arrays)
    return Results(out, *vjp(inputs.d_out))

  return program


def make_sharding(case: Case) -> NamedSharding:
  """Returns a sharding of [B, T, H] over tokens and heads."""
  mesh = jax.make_mesh(
    (case.shards, case.tensor),
    ("context", "tensor"),
    devices=jax.devices()[: case.shards * case.tensor],
  )
  return NamedSharding(mesh, P(None, "context", "tensor"))


def run_ring(
  case: Case, dtype: Any, implementation: str = "chunked"
) -> Results:
  """Returns the results of the ring, converted to float64.

  They are in the order of the sequence, also if the ring has another one.
  """
  order = np.arange(case.T)
  if case.order == "balanced":
    order = balanced_order(case.T, case.shards)
  inputs = jax.tree.map(lambda x: x[:, order], make_inputs(case, dtype))

  results = make_program(case, implementation, make_sharding(case))(inputs)

  back = np.argsort(order)
  return jax.tree.map(lambda x: np.asarray(x, np.float64)[:, back], results)


def expected_results(case: Case) -> Results:
  """Returns the results of the reference on one device in float64."""
  with jax.enable_x64(True):
    results = make_program(case, "reference")(make_inputs(case, np.float64))
    return jax.tree.map(np.asarray, results)


def assert_results_close(
  actual: Results, expected: Results, error: float
) -> None:
  """Compares each array, relative to its largest number if that exceeds 1."""
  for name in Results._fields:
    array = getattr(expected, name)
    if array is None:
      continue
    largest = max(1.0, np.abs(array).max())
    chex.assert_trees_all_close(
      getattr(actual, name), array, rtol=error, atol=error * largest
    )


@pytest.mark.parametrize("case", by_name(CASES, COMBINED_CASES))
def test_ring_equals_one_device(case):
  """The output and the gradients of q, k, v and λ are compared."""
  actual = run_ring(case, np.float32)

  expected = expected_results(case)
  assert_results_close(actual, expected, error=5e-6)


def test_ring_computes_float64_in_float64():
  """Nothing is rounded to float32 between the steps of the ring."""
  with jax.enable_x64(True):
    actual = run_ring(V2_SEGMENTS, np.float64)

  expected = expected_results(V2_SEGMENTS)
  chex.assert_trees_all_close(actual, expected, **FLOAT64)


def test_ring_is_as_accurate_in_bfloat16_as_one_device():
  """Results are rounded once, after the last step of the ring."""
  case = V2_SEGMENTS
  inputs = make_inputs(case, jnp.bfloat16)

  def root_mean_square(x):
    return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))

  one_device = make_program(case, "chunked")(inputs)
  on_ring = run_ring(case, jnp.bfloat16)

  # The reference in float64.
  expected = expected_results(case)
  for name in ("out", "d_q", "d_k", "d_v"):
    exact = getattr(expected, name)
    device_result = np.asarray(getattr(one_device, name), np.float64)
    device_error = root_mean_square(device_result - exact)
    ring_error = root_mean_square(getattr(on_ring, name) - exact)
    assert ring_error <= 1.1 * device_error
  # dλ = −rowsum(dO ∘ A₂V) has the error of A₂V, which is rounded to bfloat16: a
  # relative error of up to 2⁻⁹.
  lam_error = root_mean_square(on_ring.d_lam - expected.d_lam)
  assert lam_error <= 2**-9 * root_mean_square(expected.d_lam)


@pytest.mark.parametrize(
  "case",
  by_name(
    [Case("v1", shards=2, T=256, H=1, K=1, V=16)],
    [
      Case("v2_segments", T=1024, H=2, K=1, M=1, has_segments=True),
      Case("plain_window", T=1024, G=1, M=1, K=4, window=200),
    ],
  ),
)
def test_ring_of_tpu_kernels_equals_one_device(case):
  """The kernels run in an interpreter of Pallas."""
  # None is the interpreter for TPUs, in which a kernel waits for all devices.
  # With a window, devices run different numbers of kernels, so that case needs
  # the general interpreter: True.
  interpreter = None
  if case.window is not None:
    interpreter = True

  with chip.interpreted(interpreter):
    actual = run_ring(case, np.float32, implementation="pallas_tpu")

  expected = expected_results(case)
  assert_results_close(actual, expected, error=2e-5)


@pytest.mark.parametrize("name", ["chunked", "pallas_tpu"])
def test_partial_results_are_float32(name):
  """The ring adds up results for parts of the keys, so they are not rounded.

  A result consists of the outputs of the two maps, `out` and `out2`, and of the
  log-sum-exps `lse`.
  """
  inputs = make_inputs(V1_GROUPED, jnp.bfloat16)
  implementation = implementations.implementation_of(name)
  mask = Mask(q_length=32, kv_length=32)

  def run_partial(q, k, v, lam, d_out):
    arrays = Arrays(q, k, v, lam, q_ids=None, kv_ids=None, offset=None)
    chosen = implementation.prepare(arrays, mask)
    options = Options(scale=0.3, save=True, chosen=chosen)
    result = implementation.partial.forward(arrays, mask, options)
    # The ring saves the sums of all parts for the backward pass, and these are
    # rounded.
    rounded = result._replace(
      out=result.out.astype(jnp.bfloat16),
      out2=result.out2.astype(jnp.bfloat16),
    )
    gradients = implementation.partial.backward(
      arrays, mask, options, rounded, d_out
    )
    return result, gradients

  with chip.interpreted():
    result, gradients = jax.eval_shape(
      run_partial, *inputs.arrays, inputs.d_out
    )

  for array in (*result, *gradients):
    assert array.dtype == jnp.float32
  # Two sequences, four heads, 32 queries and values of width 6.
  chex.assert_shape([result.out, result.out2], (2, 4, 32, 6))
  # One number for each of the two maps of a head.
  chex.assert_shape(result.lse, (2, 4, 2, 32))


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
  ("case", "num_moves"),
  [
    # Without a window, the number of moves is left open.
    pytest.param(Case("balanced", has_segments=True), None, id="balanced"),
    # In balanced order, the next tokens are on the device before or after.
    pytest.param(Case("window", shards=8, window=3), 2, id="window"),
    # In the given order, they are on the next device.
    pytest.param(
      Case("window_given", shards=8, order="given", window=3),
      1,
      id="window_given",
    ),
  ],
)
def test_compiled_ring_sends_keys_only_to_neighbors(case, num_moves):
  """Each move sends an array to a neighbor, by a `collective-permute`.

  With a window of 3 tokens, a device needs only the keys of its neighbors.
  """
  program = make_program(case, "chunked", make_sharding(case))
  inputs = make_inputs(case, np.float32)

  text = program.lower(inputs).compile().as_text()

  # No device gathers the arrays of all devices.
  assert "all-gather" not in text
  assert "all-reduce" not in text
  assert "all-to-all" not in text
  num_transfers = len(re.findall(r" collective-permute\(", text))
  assert num_transfers > 0
  if num_moves is not None:
    # k and v move in the forward pass. The backward pass reuses them.
    transfers_of_keys = 2 * num_moves
    # Their gradients dk and dv move too, and at last return to their device.
    transfers_of_gradients = 2 * (num_moves + 1)
    assert num_transfers == transfers_of_keys + transfers_of_gradients


@pytest.mark.parametrize("order", ["balanced", "given"])
@pytest.mark.parametrize("shards", [2, 8])
def test_only_the_first_step_of_a_causal_ring_has_masks(order, shards):
  """In step i, a device attends to the keys of the device i places before it.

  In step 0 these are its own keys. Later its queries see all or none of the
  keys of each call, so these calls need no mask. `step.calls` has a list of
  calls for each device.
  """
  causal_mask = Mask(q_length=16, kv_length=16)
  sharding = TokenSharding(("context",), shards, order)

  steps = ring_plan.plan_steps(causal_mask, sharding)

  assert [step.distance for step in steps] == list(range(shards))
  first_step, *later_steps = steps
  for calls in first_step.calls:
    assert [call.mask for call in calls] == [causal_mask]
  for step in later_steps:
    for calls in step.calls:
      assert len(calls) <= 1
      for call in calls:
        assert not call.mask.causal
        assert call.mask.window is None


@pytest.mark.parametrize(
  ("order", "expected_pairs"),
  [
    # Each device computes half of the pairs of its 16 queries and the 16 keys.
    pytest.param("balanced", {16 * 16 // 2}, id="balanced"),
    # Some devices see none of the keys, and the others see all of them.
    pytest.param("given", {0, 16 * 16}, id="given"),
  ],
)
@pytest.mark.parametrize("shards", [2, 8])
def test_balanced_order_gives_all_devices_equal_work(
  order, expected_pairs, shards
):
  """A device's work in a step is the number of pairs of a query and a key."""
  mask = Mask(q_length=16, kv_length=16)
  sharding = TokenSharding(("context",), shards, order)

  # In the first step, each device has its own keys.
  _, *later_steps = ring_plan.plan_steps(mask, sharding)

  for step in later_steps:
    pairs_of_devices = set()
    for calls_of_device in step.calls:
      num_pairs = 0
      for call in calls_of_device:
        num_pairs += call.mask.q_length * call.mask.kv_length
      pairs_of_devices.add(num_pairs)
    assert pairs_of_devices == expected_pairs


def iterate_equations(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a program, including those of inner programs."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from iterate_equations(inner)


def test_transfers_do_not_wait_for_attention():
  """So a step's transfers can run at the same time as its attention.

  Each pass is a loop (`scan`) over the steps of the ring. `ppermute` sends keys
  to the next device.
  """
  case = Case("balanced")
  program = make_program(case, "chunked", make_sharding(case))
  jaxpr = jax.make_jaxpr(program)(make_inputs(case, np.float32)).jaxpr
  loop_bodies = []
  for equation in iterate_equations(jaxpr):
    if equation.primitive.name == "scan" and "ppermute" in str(equation):
      loop_bodies.append(equation.params["jaxpr"].jaxpr)

  # The forward pass and the backward pass.
  assert len(loop_bodies) == 2
  for body in loop_bodies:
    # The results of a step's attention, which is a `cond`, and everything that
    # is computed from them.
    attention_results = set()
    for equation in body.eqns:
      # Constants have a value, `val`.
      variables = [x for x in equation.invars if not hasattr(x, "val")]
      needs_attention = not attention_results.isdisjoint(variables)
      if equation.primitive.name == "ppermute":
        assert not needs_attention
      if needs_attention or equation.primitive.name == "cond":
        attention_results.update(equation.outvars)
    assert attention_results


def compile_for_tpu(devices, chips, available) -> str:
  """Returns the compiled gradient of one head over four TPU chips.

  `plan.call_with_devices` also passes the number of chips and their memory.
  """
  mesh = jax.make_mesh((4,), ("context",), devices=devices[:4])
  sharding = NamedSharding(mesh, P(None, "context"))
  q = jax.ShapeDtypeStruct(
    (1, 65_536, 1, 2, 128), jnp.bfloat16, sharding=sharding
  )
  v = jax.ShapeDtypeStruct((1, 65_536, 1, 256), jnp.bfloat16, sharding=sharding)

  def loss(q, k, v):
    out = diff_attention(
      q,
      k,
      v,
      0.5,
      implementation="pallas_tpu",
      sharding=sharding,
      token_order="balanced",
    )
    return jnp.sum(out.astype(jnp.float32) ** 2)

  # Small blocks compile faster.
  blocks = block_sizes.Blocks(256, 256, 256, 256, resident=16384)
  with jax.set_mesh(mesh), block_sizes.use(forward=blocks, backward=blocks):
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    return gradient.lower(q, q, v).compile().as_text()


@pytest.mark.full
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
def test_tpu_compiler_runs_transfers_at_the_same_time_as_kernels():
  """Both passes are loops over the steps of the ring.

  The transfers of a step start before its kernels, and end after them.
  """
  text = plan.call_with_devices(compile_for_tpu, topology="v5p:2x2x1")

  assert "all-gather" not in text
  assert "all-to-all" not in text
  num_overlapping_transfers = set()
  for body in ProgramText(text).computations.values():
    kernels = find_lines(body, "conditional")
    starts = find_lines(body, "collective-permute-start")
    ends = find_lines(body, "collective-permute-done")
    if len(kernels) != 1 or not starts:
      continue
    if max(starts) < kernels[0] < min(ends):
      num_overlapping_transfers.add(len(starts))
  # k and v in the forward pass, and also their gradients in the backward pass.
  assert {2, 4} <= num_overlapping_transfers


def find_lines(body: list[str], operation: str) -> list[int]:
  """Returns the numbers of the lines of a computation with an operation."""
  numbers = []
  for number, line in enumerate(body):
    if f" {operation}(" in line:
      numbers.append(number)
  return numbers


@pytest.mark.parametrize(
  ("saved_names", "num_transfers"),
  [
    # k and v are sent in each pass. Their gradients are sent with them, and
    # then to the device of their keys: 2 + 2 + 2 + 2.
    pytest.param(RESIDUAL_NAMES, 8, id="names_of_residuals"),
    # k and v are also sent in the repeated forward pass.
    pytest.param(("other",), 10, id="other_names"),
  ],
)
def test_remat_by_name_does_not_repeat_the_transfers(
  saved_names, num_transfers
):
  """A checkpoint normally runs the forward pass again in the backward pass.

  A policy that saves the operation's results by their names prevents that.
  """
  case = Case("balanced", shards=2)
  inputs = make_inputs(case, np.float32)
  sharding = make_sharding(case)

  def loss(*arrays):
    out = diff_attention(
      *arrays,
      implementation="chunked",
      sharding=sharding,
      token_order="balanced",
    )
    return jnp.sum(jnp.sin(out) * inputs.d_out)

  policy = jax.checkpoint_policies.save_only_these_names(*saved_names)
  gradient = jax.grad(jax.checkpoint(loss, policy=policy))

  program = str(jax.make_jaxpr(gradient)(*inputs.arrays))

  # `ppermute` sends an array to another device.
  assert program.count(" ppermute[") == num_transfers
