"""Ring attention: several devices share the tokens of each sequence.

Keys and values travel around the ring, one piece per device and step.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var, jaxprs_in_params
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
from tests.harness.tolerances import FLOAT64, assert_close_in_norm


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


@functools.cache
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


@functools.cache
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


def root_mean_square_errors(actual: Results, expected: Results) -> np.ndarray:
  """Returns the errors of the output and of the gradients of q, k and v."""
  errors = []
  for name in ("out", "d_q", "d_k", "d_v"):
    actual_array = np.asarray(getattr(actual, name), np.float64)
    difference = actual_array - getattr(expected, name)
    errors.append(np.sqrt(np.mean(difference**2)))
  return np.array(errors)


def test_ring_is_as_accurate_in_bfloat16_as_one_device():
  """Results are rounded to bfloat16 once, after the last step of the ring."""
  case = V2_SEGMENTS

  on_ring = run_ring(case, jnp.bfloat16)

  on_one_device = make_program(case, "chunked")(make_inputs(case, jnp.bfloat16))
  in_float64 = expected_results(case)
  errors_of_ring = root_mean_square_errors(on_ring, in_float64)
  errors_of_device = root_mean_square_errors(on_one_device, in_float64)
  # Rounding in each of the four steps would at least double the errors.
  assert (errors_of_ring <= 1.1 * errors_of_device).all()


def test_gradient_of_lambda_on_a_ring_is_rounded_at_most_once():
  """In bfloat16, rounding to nearest changes a number by up to 2⁻⁹ of it."""
  actual = run_ring(V2_SEGMENTS, jnp.bfloat16).d_lam

  expected = expected_results(V2_SEGMENTS).d_lam
  assert_close_in_norm(actual, expected, tolerance=2**-9)


@pytest.mark.full
@pytest.mark.parametrize(
  "case",
  by_name(
    [
      Case("v1", shards=2, T=256, H=1, K=1, V=16),
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
  """An implementation attends to a part of the keys at a time on a ring.

  The ring adds up the results of all parts, so they must not be rounded.
  """
  B, T, H, K, num_maps, D, V = 2, 32, 4, 2, 2, 8, 6
  arrays = Arrays(
    q=jnp.zeros((B, T, H, num_maps, D), jnp.bfloat16),
    k=jnp.zeros((B, T, K, num_maps, D), jnp.bfloat16),
    v=jnp.zeros((B, T, K, V), jnp.bfloat16),
    lam=jnp.zeros((B, T, H), jnp.float32),
    q_ids=None,
    kv_ids=None,
    offset=None,
  )
  d_out = jnp.zeros((B, T, H, V), jnp.bfloat16)
  implementation = implementations.implementation_of(name)
  mask = Mask(q_length=T, kv_length=T)

  def attend_to_a_part(arrays, d_out):
    chosen = implementation.prepare(arrays, mask)
    options = Options(scale=0.3, save=True, chosen=chosen)
    result = implementation.partial.forward(arrays, mask, options)
    # The backward pass gets outputs of all keys, which are rounded.
    whole = result._replace(
      out=result.out.astype(jnp.bfloat16),
      out2=result.out2.astype(jnp.bfloat16),
    )
    gradients = implementation.partial.backward(
      arrays, mask, options, whole, d_out
    )
    return result, gradients

  with chip.interpreted():
    result, gradients = jax.eval_shape(attend_to_a_part, arrays, d_out)

  for array in (*result, *gradients):
    assert array.dtype == jnp.float32


def count_transfers_of_program(case: Case) -> int:
  """Returns how often the compiled gradient sends an array to another device.

  Checks that no operation sends an array to all devices.
  """
  program = make_program(case, "chunked", make_sharding(case))
  lowered = program.lower(make_inputs(case, np.float32))
  text = lowered.compile().as_text()
  for operation_of_all_devices in ("all-gather", "all-reduce", "all-to-all"):
    assert operation_of_all_devices not in text
  return text.count(" collective-permute(")


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
def test_compiled_ring_only_sends_arrays_from_device_to_device():
  """Gathering the keys of all devices would need more memory."""
  assert count_transfers_of_program(Case("balanced", has_segments=True)) > 0


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
  ("order", "num_neighbors"),
  [
    # The tokens before a device's tokens are on the device before or after it.
    pytest.param("balanced", 2, id="window"),
    # They are on the device before it.
    pytest.param("given", 1, id="window_given"),
  ],
)
def test_compiled_ring_sends_keys_only_to_neighbors(order, num_neighbors):
  """With a window of 3 tokens, a device needs only its neighbors' keys."""
  case = Case("window", shards=8, order=order, window=3)

  num_transfers = count_transfers_of_program(case)

  # k and v move in the forward pass. The backward pass reuses them.
  num_transfers_of_keys = 2 * num_neighbors
  # Their gradients dk and dv move too, and at last return to their device.
  num_transfers_of_gradients = 2 * (num_neighbors + 1)
  assert num_transfers == num_transfers_of_keys + num_transfers_of_gradients


@pytest.mark.parametrize("order", ["balanced", "given"])
@pytest.mark.parametrize("shards", [2, 8])
def test_only_the_first_step_of_a_causal_ring_has_masks(order, shards):
  """In the first step, each device attends to its own keys.

  Later, all queries of a call of attention see all of its keys.
  """
  tokens_of_a_device = 16
  mask = Mask(tokens_of_a_device, tokens_of_a_device, causal=True)
  tokens = TokenSharding(("context",), shards, order)

  first_step, *later_steps = ring_plan.plan_steps(mask, tokens)

  # A step lists the calls of each device.
  for calls_of_device in first_step.calls:
    assert [call.mask for call in calls_of_device] == [mask]
  for step in later_steps:
    for call in itertools.chain.from_iterable(step.calls):
      assert not call.mask.causal
      assert call.mask.window is None


@pytest.mark.parametrize("order", ["balanced", "given"])
@pytest.mark.parametrize("shards", [2, 8])
def test_keys_move_by_one_device_per_step(order, shards):
  """In step i, a device has the keys of the device i places before it."""
  tokens = TokenSharding(("context",), shards, order)

  steps = ring_plan.plan_steps(Mask(q_length=16, kv_length=16), tokens)

  assert [step.distance for step in steps] == list(range(shards))


@pytest.mark.parametrize(
  ("order", "expected_pairs"),
  [
    # Each device has 16 queries. In a step, it computes half of their pairs
    # with the 16 keys of another device.
    pytest.param("balanced", {16 * 16 // 2}, id="balanced"),
    # A device with earlier tokens computes no pair. The others compute all.
    pytest.param("given", {0, 16 * 16}, id="given"),
  ],
)
@pytest.mark.parametrize("shards", [2, 8])
def test_balanced_order_gives_all_devices_equal_work(
  order, expected_pairs, shards
):
  """A device's work in a step is the number of pairs of a query and a key."""
  mask_of_own_keys = Mask(q_length=16, kv_length=16, causal=True)
  tokens = TokenSharding(("context",), shards, order)

  _, *later_steps = ring_plan.plan_steps(mask_of_own_keys, tokens)

  for step in later_steps:
    assert pairs_of_devices(step) == expected_pairs


def pairs_of_devices(step: ring_plan.Step) -> set[int]:
  """Returns the different numbers of pairs that devices compute in a step."""
  numbers = set()
  for calls_of_device in step.calls:
    # At most one call, since each call costs time.
    assert len(calls_of_device) <= 1
    num_pairs = 0
    for call in calls_of_device:
      num_pairs += call.mask.q_length * call.mask.kv_length
    numbers.add(num_pairs)
  return numbers


def iterate_equations(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a program and of its inner programs."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from iterate_equations(inner)


def find_loop_bodies(jaxpr: Any, containing: str) -> list[Any]:
  """Returns the bodies of all loops (`scan`) that contain a primitive."""
  bodies = []
  for equation in iterate_equations(jaxpr):
    if equation.primitive.name == "scan":
      body = equation.params["jaxpr"].jaxpr
      names = [inner.primitive.name for inner in iterate_equations(body)]
      if containing in names:
        bodies.append(body)
  return bodies


def find_dependents(body: Any, primitive: str) -> set[str]:
  """Returns the primitives that read results of a primitive, or such results.

  Args:
    body: equations in the order in which they run.
    primitive: its name, which is part of the result.
  """
  dependents = set()
  dependent_variables = set()
  for equation in body.eqns:
    variables = [x for x in equation.invars if isinstance(x, Var)]
    is_dependent = not dependent_variables.isdisjoint(variables)
    if is_dependent or equation.primitive.name == primitive:
      dependents.add(equation.primitive.name)
      dependent_variables.update(equation.outvars)
  return dependents


def test_transfers_do_not_wait_for_attention():
  """So a step's transfers can run at the same time as its attention."""
  # JAX's primitives in the program: a `ppermute` sends keys to the next device,
  # and a `cond` computes the attention of a step.
  transfer = "ppermute"
  attention = "cond"
  case = Case("balanced")
  program = make_program(case, "chunked", make_sharding(case))

  jaxpr = jax.make_jaxpr(program)(make_inputs(case, np.float32)).jaxpr

  # Each pass is a loop over the steps of the ring.
  forward_step, backward_step = find_loop_bodies(jaxpr, containing=transfer)
  for step in (forward_step, backward_step):
    primitives_after_attention = find_dependents(step, attention)
    assert attention in primitives_after_attention
    assert transfer not in primitives_after_attention


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


def count_overlapping_transfers(text: str) -> list[int]:
  """Returns the transfers that run during the kernels, for each loop of a ring.

  The body of such a loop calls its kernels in one `conditional`. A transfer is
  a pair of operations: `collective-permute-start` and `-done`.
  """
  counts = []
  for body in ProgramText(text).computations.values():
    kernels = find_lines(body, "conditional")
    starts = find_lines(body, "collective-permute-start")
    ends = find_lines(body, "collective-permute-done")
    if len(kernels) == 1 and starts:
      if max(starts) < kernels[0] < min(ends):
        counts.append(len(starts))
  return counts


@pytest.mark.full
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
def test_tpu_compiler_runs_transfers_at_the_same_time_as_kernels():
  """All transfers of a step start before its kernels, and end after them."""
  text = plan.call_with_devices(compile_for_tpu, topology="v5p:2x2x1")

  # k and v move in the forward pass.
  transfers_of_forward_step = 2
  # k, v and their gradients move in the backward pass.
  transfers_of_backward_step = 4
  counts = count_overlapping_transfers(text)
  assert transfers_of_forward_step in counts
  assert transfers_of_backward_step in counts


def find_lines(body: list[str], operation: str) -> list[int]:
  """Returns the numbers of the lines of a computation with an operation."""
  numbers = []
  for number, line in enumerate(body):
    if f" {operation}(" in line:
      numbers.append(number)
  return numbers


def count_transfers(saved_names: Sequence[str]) -> int:
  """Returns how often a checkpointed gradient of a ring of two sends an array.

  Args:
    saved_names: names of the results that the checkpoint saves.
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
  # JAX's primitive `ppermute` sends an array to another device.
  return str(jax.make_jaxpr(gradient)(*inputs.arrays)).count(" ppermute[")


def test_remat_by_name_does_not_repeat_the_transfers():
  """A checkpoint normally runs the forward pass again in the backward pass.

  A policy that saves the operation's results by their names prevents that.
  """
  num_transfers = count_transfers(saved_names=RESIDUAL_NAMES)
  num_repeated = count_transfers(saved_names=["other"])

  # k and v are sent to the other device.
  transfers_of_forward_pass = 2
  # k, v and their gradients are sent. Then the gradients are sent back.
  transfers_of_backward_pass = 4 + 2
  assert num_transfers == transfers_of_forward_pass + transfers_of_backward_pass
  assert num_repeated == num_transfers + transfers_of_forward_pass
