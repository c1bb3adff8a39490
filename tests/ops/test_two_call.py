"""`two_call` on a GPU, as far as it shows without one: what reaches cuDNN, and that the parts make the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.diff_attention import (
  api,
  choice,
  diff_attention,
  two_call,
)
from tests.harness.tiers import full

STOCK = jax.nn.dot_product_attention
HAS_CUDNN = two_call._has_cudnn.__wrapped__


@pytest.fixture
def calls(monkeypatch):
  """The calls that reach cuDNN, as (width, masked, causal); XLA stands in for it."""
  seen = []

  def cudnn(q, k, v, *, mask, implementation, is_causal, **options):
    if implementation == "cudnn":
      assert (
        q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.dtype == jnp.float16
      )
      seen.append((q.shape[-1], mask is not None, is_causal))
    # In float32: within a compiled program XLA's CPU backend takes no float16 here.
    return STOCK(
      *(x.astype(jnp.float32) for x in (q, k, v)),
      mask=mask,
      is_causal=is_causal,
      **options,
    ).astype(q.dtype)

  monkeypatch.setattr(two_call, "_has_cudnn", lambda backend: True)
  monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
  return seen


def _program(
  implementation, D, V, M=2, T=14, dtype=jnp.float16, ids=False, **options
):
  """Output and gradients as a function, and its arguments."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  arrays = (
    normal(2, T, 4, 2, D),
    normal(2, T, 2, M, D),
    normal(2, T, 2, V),
    jnp.asarray(rng.uniform(-0.5, 1.2, (2, T, 4)), jnp.float32),
  )
  segment_ids = (
    jnp.asarray(np.sort(rng.integers(0, 3, (2, T)), axis=1)) if ids else None
  )

  def run(*arrays):
    out, pull = jax.vjp(
      lambda *a: diff_attention(
        *a, q_segment_ids=segment_ids, implementation=implementation, **options
      ),
      *arrays,
    )
    return out, pull(jnp.ones_like(out))

  return run, arrays


SHAPES = [
  (dict(D=96, V=192, causal=False), [(96, False, False)] * 4),
  (dict(D=20, V=150), [(80, False, True)] * 4),
  (dict(D=64, V=64, M=1, ids=True), [(64, True, False)] * 2),
]
MORE_SHAPES = [
  (dict(D=64, V=128), [(128, False, True)] * 2),
  (dict(D=128, V=256), [(128, False, True)] * 4),
  (dict(D=64, V=64, M=1), [(64, False, True)] * 2),
  (dict(D=10, V=20), [(24, False, True)] * 2),
  (dict(D=64, V=128, ids=True), [(128, True, False)] * 2),
]
REFUSED = [
  dict(D=64, V=128, T=13, ids=True),  # cuDNN takes no biases of odd lengths
  dict(D=64, V=128, dtype=jnp.float32),
  dict(D=136, V=136),
]


@pytest.mark.parametrize(
  ("shape", "expected"),
  [*SHAPES, *MORE_SHAPES, *((shape, []) for shape in REFUSED)],
  ids=str,
)
def test_what_reaches_cudnn(calls, shape, expected):
  run, arrays = _program("two_call", **shape)
  jax.eval_shape(run, *arrays)
  assert calls == expected


@pytest.mark.parametrize(
  "shape",
  [shape for shape, _ in SHAPES] + full([shape for shape, _ in MORE_SHAPES]),
  ids=str,
)
def test_the_parts_make_the_whole(calls, shape):
  actual, expected = (
    jax.jit(run)(*arrays)
    for run, arrays in (
      _program(name, **shape) for name in ("two_call", "reference")
    )
  )
  assert calls
  for a, e in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(
      np.float32(a),
      np.float32(e),
      rtol=0,
      atol=4e-3 * np.abs(np.float32(e)).max(),
    )


def test_large_masks_do_not_go_through_cudnn(calls):
  q, v = (
    jax.ShapeDtypeStruct((4, 16384, 8, *shape), jnp.bfloat16)
    for shape in ((2, 64), (128,))
  )
  assert two_call.cudnn_takes(q, v, masked=False) and not two_call.cudnn_takes(
    q, v, masked=True
  )


def test_auto_on_a_gpu(calls, monkeypatch):
  picked = []
  monkeypatch.setattr(api, "platform", lambda: "gpu")
  for options in (
    {},
    {"ids": True},
    {"window": 4},
    {"q_offset": 3},
    {"q_offset": jnp.zeros(2, jnp.int32)},
    {"dtype": jnp.float32},
  ):
    run, arrays = _program("auto", D=8, V=16, **options)
    with choice.reported_to(lambda made: picked.append(made.implementation)):
      jax.eval_shape(run, *arrays)
  assert picked == ["two_call"] * 2 + ["chunked"] * 4


@pytest.mark.parametrize(("D", "V", "number"), [(128, 256, 4), (64, 128, 2)])
def test_auto_on_blackwell(calls, monkeypatch, D, V, number):
  """Calls cuDNN once for each map and each 128 columns of V."""

  class Device:
    platform, device_kind, compute_capability = "gpu", "NVIDIA B200", "10.0"

  run, arrays = _program("auto", D=D, V=V)
  monkeypatch.setattr(two_call, "_has_cudnn", lambda backend: HAS_CUDNN("gpu"))
  monkeypatch.setattr(api, "platform", lambda: "gpu")
  monkeypatch.setattr(jax, "devices", lambda *_: [Device])
  jax.eval_shape(run, *arrays)
  assert calls == [(128, False, True)] * number


@pytest.mark.parametrize(
  ("capability", "expected"),
  [
    ("7.5", False),
    ("8.0", True),
    ("8.9", True),
    ("9.0", True),
    ("12.0", True),
    ("gfx942", False),
  ],
)
def test_which_gpus_have_cudnn_attention(monkeypatch, capability, expected):
  class Device:
    compute_capability = capability

  monkeypatch.setattr(jax, "devices", lambda: [Device])
  two_call._has_cudnn.cache_clear()
  assert two_call._has_cudnn("gpu") == expected
  two_call._has_cudnn.cache_clear()
  assert not two_call._has_cudnn("cpu")
