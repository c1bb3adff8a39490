"""Attention over rows that several devices share, as a ring: equal to one device's; what is compiled for it."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from tests.harness.tiers import full


@pytest.fixture(autouse=True)
def loops(monkeypatch):
  """Steps in loops, as on accelerators. Whole training steps, in tests/parallel/test_mesh.py, are as on CPU."""
  monkeypatch.setattr(ring, "platform", lambda: "tpu")


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes and options of one call over `shards` devices along the tokens and `tensor` along the heads."""

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
  ids: bool = False
  options: tuple = ()  # of (name, value)

  def __str__(self) -> str:
    return self.name


CASES = [
  Case("v1_grouped", shards=8),
  Case("v2_segments_given", M=1, order="given", ids=True),
  Case(
    "plain_window_tensor",
    shards=4,
    tensor=2,
    G=1,
    M=1,
    options=(("window", 7),),
  ),
]
MORE = [
  Case("two_shards", shards=2),
  Case("given", order="given"),
  Case("given_window", shards=8, order="given", options=(("window", 3),)),
  Case("short_window_segments", shards=8, ids=True, options=(("window", 3),)),
  Case("long_window", shards=4, options=(("window", 19),)),
  Case("not_causal", ids=True, options=(("causal", False),)),
  Case(
    "not_causal_window", shards=8, options=(("causal", False), ("window", 5))
  ),
  Case("offset", options=(("q_offset", 3),)),
  Case(
    "offset_before_the_keys_given",
    order="given",
    options=(("q_offset", -13), ("window", 6)),
  ),
  Case("nothing_to_see", options=(("q_offset", -32),)),
  Case(
    "v2_segments_tensor",
    shards=2,
    tensor=2,
    M=1,
    ids=True,
    options=(("scale", 0.3),),
  ),
  Case("plain", shards=8, G=1, M=1),
]


def _arguments(case: Case, dtype):
  rng = np.random.default_rng(0)
  normal = lambda *shape: (
    rng.standard_normal(shape).astype(jnp.dtype(jnp.bfloat16)).astype(dtype)
  )
  q, k, v = (
    normal(2, case.T, case.H, case.G, 8),
    normal(2, case.T, case.K, case.M, 8),
    normal(2, case.T, case.K, case.V),
  )
  lam = (
    normal(2, case.T, case.H).astype(np.promote_types(dtype, np.float32))
    if case.G == 2
    else None
  )
  ids = (
    np.stack([np.arange(case.T) // 5, np.arange(case.T) // 11]).astype(np.int32)
    if case.ids
    else None
  )
  return (q, k, v, lam), normal(2, case.T, case.H, case.V), ids


def _mesh(shards: int, tensor: int = 1):
  return jax.make_mesh(
    (shards, tensor),
    ("context", "tensor"),
    devices=jax.devices()[: shards * tensor],
  )


def _program(case: Case, implementation: str, ids, sharded: bool):
  options = dict(case.options, implementation=implementation, q_segment_ids=ids)
  if sharded:
    sharding = NamedSharding(
      _mesh(case.shards, case.tensor), P(None, "context", "tensor")
    )
    options |= {"sharding": sharding, "token_order": case.order}

  def run(arguments, d_out):
    out, pull = jax.vjp(lambda *a: diff_attention(*a, **options), *arguments)
    return [out, *(x for x in pull(d_out) if x is not None)]

  return jax.jit(run)


def _over_devices(case: Case, dtype, implementation="chunked"):
  """Output and gradients by the ring, in the order of the row."""
  arguments, d_out, ids = _arguments(case, dtype)
  order = (
    balanced_order(case.T, case.shards)
    if case.order == "balanced"
    else np.arange(case.T)
  )
  moved = lambda x: None if x is None else x[:, order]
  found = _program(case, implementation, moved(ids), True)(
    tuple(map(moved, arguments)), moved(d_out)
  )
  return [np.asarray(x, np.float64)[:, np.argsort(order)] for x in found]


def _on_one(case: Case):
  """The definition's, in float64 on one device."""
  with jax.enable_x64(True):
    arguments, d_out, ids = _arguments(case, np.float64)
    return list(
      map(np.asarray, _program(case, "reference", ids, False)(arguments, d_out))
    )


def _assert_close(actual, expected, tolerance):
  assert len(actual) == len(expected)
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(
      a, e, rtol=tolerance, atol=tolerance * max(1.0, np.abs(e).max())
    )


@pytest.mark.parametrize("case", [*CASES, *full(MORE)], ids=str)
def test_the_ring_is_one_device(case):
  _assert_close(_over_devices(case, np.float32), _on_one(case), 5e-6)


@pytest.mark.parametrize("case", [CASES[1]], ids=str)
def test_float64_and_bfloat16(case):
  """In float64 to rounding. In bfloat16 all is rounded once, whatever the number of steps, as on one device; dλ = −rowsum(dO ∘ A₂V) reads a
  rounded A₂V, as in the kernels."""
  with jax.enable_x64(True):
    _assert_close(_over_devices(case, np.float64), _on_one(case), 1e-12)
  expected = _on_one(case)
  error = lambda found: [
    np.sqrt(np.mean((np.asarray(f, np.float64) - e) ** 2))
    for f, e in zip(found, expected, strict=True)
  ]
  arguments, d_out, ids = _arguments(case, jnp.dtype(jnp.bfloat16))
  *one, _ = error(_program(case, "chunked", ids, False)(arguments, d_out))
  *ours, of_lam = error(_over_devices(case, jnp.dtype(jnp.bfloat16)))
  assert all(r <= 1.1 * o for r, o in zip(ours, one, strict=True)), (ours, one)
  assert of_lam <= 2**-9 * np.sqrt(np.mean(expected[-1] ** 2)), of_lam


@pytest.mark.parametrize(
  "case",
  [
    Case("v1", shards=2, T=512, H=1, K=1, V=16),
    *full(
      [
        Case("v2_segments", T=1024, H=2, K=1, M=1, ids=True),
        Case("plain_window", T=1024, G=1, M=1, K=4, options=(("window", 200),)),
      ]
    ),
  ],
  ids=str,
)
def test_the_kernels_go_round(case):
  # The TPU's interpreter waits at every kernel for all devices. Under a window they do not run equally many: Pallas's general one does.
  with chip.interpreted(True if case.options else None):
    actual = _over_devices(case, np.float32, "pallas_tpu")
  _assert_close(actual, _on_one(case), 2e-5)


@pytest.mark.parametrize("implementation", ["chunked", "pallas_tpu"])
def test_partial_results_are_not_rounded(implementation):
  """Outputs and gradients of a part of the keys are float32 where the arrays are not."""
  (q, k, v, lam), d_out, _ = _arguments(CASES[0], jnp.dtype(jnp.bfloat16))
  chosen, mask = implementations.implementation_of(implementation), Mask(32, 32)

  def run(q, k, v, lam, d_out):
    arrays = Arrays(q, k, v, lam, None, None, None)
    options = Options(0.3, save=True, chosen=chosen.prepare(arrays, mask))
    saved = chosen.partial.forward(arrays, mask, options)
    narrow = saved._replace(
      out=saved.out.astype(q.dtype), out2=saved.out2.astype(q.dtype)
    )
    return saved, chosen.partial.backward(arrays, mask, options, narrow, d_out)

  with chip.interpreted():
    saved, gradients = jax.eval_shape(run, q, k, v, lam, d_out)
  assert {x.dtype for x in (*saved, *gradients)} == {jnp.dtype(jnp.float32)}
  assert saved.out.shape == saved.out2.shape == (
    2,
    4,
    32,
    6,
  ) and saved.lse.shape == (2, 4, 2, 32)


def _text(case: Case):
  arguments, d_out, ids = _arguments(case, np.float32)
  return (
    _program(case, "chunked", ids, True)
    .lower(arguments, d_out)
    .compile()
    .as_text()
  )


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
  "case, moves",
  [
    (Case("balanced", shards=4, ids=True), None),
    # In balanced order pieces that follow each other lie on neighbours of either side: two moves, and one back home.
    (Case("window", shards=8, options=(("window", 3),)), 2),
    (
      Case("window_given", shards=8, order="given", options=(("window", 3),)),
      1,
    ),
  ],
  ids=str,
)
def test_keys_travel_and_are_never_gathered(case, moves):
  text = _text(case)
  assert (
    "all-gather" not in text
    and "all-reduce" not in text
    and "all-to-all" not in text
  )
  assert " collective-permute(" in text
  if (
    moves is not None
  ):  # of k and v, which the backward pass finds where they are, and of dK and dV, which also go home
    assert len(re.findall(r" collective-permute\(", text)) == 2 * moves + 2 * (
      moves + 1
    )


@pytest.mark.parametrize("order", ["balanced", "given"])
@pytest.mark.parametrize("shards", [2, 8])
def test_causal_masks_are_known_and_steps_are_equal(order, shards):
  """Of a causal mask a device's own keys are cut, all other ones are seen whole or not at all; in balanced order by as many queries."""
  length = 16
  steps = ring_plan.plan_steps(
    Mask(length, length), TokenSharding(("context",), shards, order)
  )
  assert [step.distance for step in steps] == list(range(shards))
  assert all(
    [call.mask for call in calls] == [Mask(length, length)]
    for calls in steps[0].calls
  )
  for step in steps[1:]:
    for calls in step.calls:
      assert all(
        not call.mask.causal and call.mask.window is None for call in calls
      )
    areas = {
      sum(call.mask.q_length * call.mask.kv_length for call in calls)
      for calls in step.calls
    }
    assert areas == (
      {length**2 // 2} if order == "balanced" else {0, length**2}
    )
    assert all(len(calls) <= 1 for calls in step.calls)


def test_keys_leave_before_they_are_attended_to():
  """The next keys' transfer does not wait for the present ones' attention, nor do gradients that arrive: the two can overlap."""
  case = Case("balanced", shards=4)
  arguments, d_out, ids = _arguments(case, np.float32)
  jaxpr = jax.make_jaxpr(_program(case, "chunked", ids, True))(
    arguments, d_out
  ).jaxpr
  bodies = [
    eqn.params["jaxpr"].jaxpr
    for eqn in _equations(jaxpr)
    if eqn.primitive.name == "scan" and "ppermute" in str(eqn)
  ]
  assert len(bodies) == 2  # forward and backward
  for body in bodies:
    made_here: set = set()  # what follows from a step's attention
    for eqn in body.eqns:
      after = any(
        x in made_here for x in eqn.invars if not hasattr(x, "val")
      )  # constants have one
      assert not (after and eqn.primitive.name == "ppermute")
      if after or eqn.primitive.name == "cond":
        made_here |= set(eqn.outvars)
    assert made_here


def _of_a_tpu(devices, chips, available):
  """The program of one head's gradient over four chips, with small blocks, which compile soon."""
  mesh, sizes = (
    jax.make_mesh((4,), ("context",), devices=devices[:4]),
    block_sizes.Blocks(256, 256, 256, 256, resident=16384),
  )
  sharding = NamedSharding(mesh, P(None, "context"))
  shapes = [(1, 65_536, 1, 2, 128), (1, 65_536, 1, 2, 128), (1, 65_536, 1, 256)]
  arrays = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    for shape in shapes
  ]

  def loss(*arrays):
    out = diff_attention(
      *arrays,
      0.5,
      implementation="pallas_tpu",
      sharding=sharding,
      token_order="balanced",
    )
    return jnp.sum(out.astype(jnp.float32) ** 2)

  with jax.set_mesh(mesh), block_sizes.use(forward=sizes, backward=sizes):
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile().as_text()


@pytest.mark.full
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
def test_on_a_tpu_keys_travel_while_kernels_run():
  """As the compiler schedules it, in both loops every transfer starts before the step's kernels and ends after them."""
  text = plan.call_with_devices(_of_a_tpu, topology="v5p:2x2x1")
  assert "all-gather" not in text and "all-to-all" not in text
  found = []
  for body in ProgramText(text).computations.values():
    at = lambda operation, body=body: [
      n for n, line in enumerate(body) if f" {operation}(" in line
    ]
    kernels, starts, ends = (
      at("conditional"),
      at("collective-permute-start"),
      at("collective-permute-done"),
    )
    if len(kernels) == 1 and starts and max(starts) < kernels[0] < min(ends):
      found.append(len(starts))
  assert {2, 4} <= set(found)  # k and v; and their gradients


def _equations(jaxpr):
  """All equations of a program, of functions that it calls, too."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in eqn.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
          yield from _equations(
            inner if hasattr(inner, "eqns") else inner.jaxpr
          )


def test_the_forward_pass_never_runs_twice_where_its_names_are_kept():
  """Under remat, where what follows the operation is computed again."""
  arguments, d_out, _ = _arguments(Case("balanced", shards=2), np.float32)
  sharding = NamedSharding(_mesh(2), P(None, "context", "tensor"))
  layer = lambda *a: jnp.sum(
    jnp.sin(
      diff_attention(
        *a, implementation="chunked", sharding=sharding, token_order="balanced"
      )
    )
    * d_out
  )

  def moves(*names: str) -> int:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return str(
      jax.make_jaxpr(jax.grad(jax.checkpoint(layer, policy=policy)))(*arguments)
    ).count(" ppermute[")

  once = (
    2 + 2 + 2 + 2
  )  # k and v, k and v again, and their gradients to where these are and back home
  assert moves(*RESIDUAL_NAMES) == once and moves("other") == once + 2
