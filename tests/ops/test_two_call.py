"""What of `two_call` on a GPU can be tested without one: its calls of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
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

# The original functions, which `cudnn_calls` replaces.
STOCK_ATTENTION = jax.nn.dot_product_attention
STOCK_HAS_CUDNN = two_call.has_cudnn


class CudnnCall(NamedTuple):
  """A call that reaches cuDNN."""

  width: int
  has_mask: bool
  is_causal: bool


@pytest.fixture(autouse=True)
def forget_the_gpu():
  """Forgets whether cuDNN supports the GPU, which is asked once per process."""
  STOCK_HAS_CUDNN.cache_clear()
  yield
  STOCK_HAS_CUDNN.cache_clear()


@pytest.fixture
def cudnn_calls(monkeypatch):
  """The calls that reach cuDNN. XLA computes their results."""
  calls = []

  def attention(q, k, v, *, mask, implementation, is_causal, **options):
    if implementation == "cudnn":
      width = q.shape[-1]
      assert k.shape[-1] == width
      assert v.shape[-1] == width
      assert width % 8 == 0
      assert q.dtype == jnp.float16
      calls.append(CudnnCall(width, mask is not None, is_causal))
    # Inside a compiled program, XLA has no float16 attention on CPUs.
    out = STOCK_ATTENTION(
      q.astype(jnp.float32),
      k.astype(jnp.float32),
      v.astype(jnp.float32),
      mask=mask,
      is_causal=is_causal,
      **options,
    )
    return out.astype(q.dtype)

  monkeypatch.setattr(two_call, "has_cudnn", lambda backend: True)
  monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
  return calls


def make_program(
  implementation: str,
  *,
  D: int,
  V: int,
  M: int = 2,
  T: int = 14,
  dtype: Any = jnp.float16,
  has_segments: bool = False,
  **options: Any,
) -> tuple[Callable, tuple[np.ndarray, ...]]:
  """Returns a function that computes output and gradients, and its arguments.

  Args:
    implementation: argument of `diff_attention`.
    D: width of queries and keys.
    V: width of the values.
    M: maps of the keys. The queries have two.
    T: tokens of a sequence.
    dtype: of queries, keys and values.
    has_segments: whether sequences have documents of random lengths.
    **options: other arguments of `diff_attention`.
  """
  rng = np.random.default_rng(0)
  q = rng.standard_normal((2, T, 4, 2, D)).astype(dtype)
  k = rng.standard_normal((2, T, 2, M, D)).astype(dtype)
  v = rng.standard_normal((2, T, 2, V)).astype(dtype)
  lam = rng.uniform(-0.5, 1.2, (2, T, 4)).astype(np.float32)
  segment_ids = None
  if has_segments:
    segment_ids = np.sort(rng.integers(0, 3, (2, T), np.int32), axis=1)

  def attend(*arrays):
    return diff_attention(
      *arrays,
      q_segment_ids=segment_ids,
      implementation=implementation,
      **options,
    )

  def program(*arrays):
    out, vjp = jax.vjp(attend, *arrays)
    return out, vjp(jnp.ones_like(out))

  return program, (q, k, v, lam)


# Each shape and the width of its calls: one call per map and 128 columns of V.
SHAPES = [
  pytest.param(
    {"D": 96, "V": 192, "causal": False},
    [CudnnCall(width=96, has_mask=False, is_causal=False)] * 4,
    id="values_in_two_parts",
  ),
  pytest.param(
    {"D": 20, "V": 150},
    [CudnnCall(width=80, has_mask=False, is_causal=True)] * 4,
    id="padded_keys",
  ),
  pytest.param(
    {"D": 64, "V": 64, "M": 1, "has_segments": True},
    [CudnnCall(width=64, has_mask=True, is_causal=False)] * 2,
    id="shared_keys_and_segments",
  ),
]


@pytest.mark.parametrize(
  ("shape", "expected_calls"),
  [
    *SHAPES,
    pytest.param(
      {"D": 64, "V": 128},
      [CudnnCall(width=128, has_mask=False, is_causal=True)] * 2,
      id="v1",
    ),
    pytest.param(
      {"D": 128, "V": 256},
      [CudnnCall(width=128, has_mask=False, is_causal=True)] * 4,
      id="v1_wide",
    ),
    pytest.param(
      {"D": 64, "V": 64, "M": 1},
      [CudnnCall(width=64, has_mask=False, is_causal=True)] * 2,
      id="v2",
    ),
    pytest.param(
      {"D": 10, "V": 20},
      [CudnnCall(width=24, has_mask=False, is_causal=True)] * 2,
      id="width_of_8",
    ),
    pytest.param(
      {"D": 64, "V": 128, "has_segments": True},
      [CudnnCall(width=128, has_mask=True, is_causal=False)] * 2,
      id="segments",
    ),
    # cuDNN reads a mask as biases, and supports only even lengths of them.
    pytest.param(
      {"D": 64, "V": 128, "T": 13, "has_segments": True},
      [],
      id="segments_of_odd_length",
    ),
    pytest.param({"D": 64, "V": 128, "dtype": jnp.float32}, [], id="float32"),
    pytest.param({"D": 136, "V": 136}, [], id="wide_keys"),
  ],
)
def test_cudnn_is_called_where_it_supports_the_arrays(
  cudnn_calls, shape, expected_calls
):
  """There is one call for each of two maps and each 128 columns of V."""
  program, arrays = make_program("two_call", **shape)

  jax.eval_shape(program, *arrays)

  assert cudnn_calls == expected_calls


@pytest.mark.parametrize(("shape", "expected_calls"), SHAPES)
def test_calls_of_cudnn_add_up_to_the_reference(
  cudnn_calls, shape, expected_calls
):
  """`two_call` computes attention by calls of cuDNN, one per map and part of V.

  The fixture `cudnn_calls` lets XLA compute their results.
  """
  program, arrays = make_program("two_call", **shape)
  reference_program, _ = make_program("reference", **shape)

  actual = jax.jit(program)(*arrays)

  expected = jax.jit(reference_program)(*arrays)
  assert cudnn_calls == expected_calls
  chex.assert_trees_all_equal_structs(actual, expected)
  for actual_array, expected_array in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    # Rounding to float16 changes a number by up to 2⁻¹¹ of it. The error is a
    # sum of a few of these.
    expected_array = np.asarray(expected_array, np.float32)
    largest_error = 8 * 2**-11 * np.abs(expected_array).max()
    error = np.abs(np.asarray(actual_array, np.float32) - expected_array)
    assert error.max() <= largest_error


def test_cudnn_does_not_get_masks_of_2_gib(cudnn_calls):
  """A mask of 4 sequences has 4 · 16384² numbers of 2 bytes: 2 GiB.

  The fixture `cudnn_calls` makes this machine one with cuDNN.
  """
  q = jax.ShapeDtypeStruct((4, 16384, 8, 2, 64), jnp.bfloat16)
  v = jax.ShapeDtypeStruct((4, 16384, 8, 128), jnp.bfloat16)

  assert two_call.cudnn_takes(q, v, masked=False)
  assert not two_call.cudnn_takes(q, v, masked=True)


@pytest.mark.parametrize(
  ("options", "implementation"),
  [
    pytest.param({}, "two_call", id="causal"),
    pytest.param({"has_segments": True}, "two_call", id="segments"),
    pytest.param({"window": 4}, "chunked", id="window"),
    pytest.param({"q_offset": 3}, "chunked", id="offset"),
    pytest.param(
      {"q_offset": np.zeros(2, np.int32)}, "chunked", id="offset_per_row"
    ),
    pytest.param({"dtype": jnp.float32}, "chunked", id="float32"),
  ],
)
def test_auto_takes_two_calls_where_cudnn_supports_them(
  cudnn_calls, monkeypatch, options, implementation
):
  """`two_call` makes one call of cuDNN's attention for each of two maps."""
  monkeypatch.setattr(api, "platform", lambda: "gpu")
  program, arrays = make_program("auto", D=8, V=16, **options)
  choices = []

  with choice.reported_to(choices.append):
    jax.eval_shape(program, *arrays)

  assert [made.implementation for made in choices] == [implementation]


@pytest.mark.parametrize(
  ("D", "V", "parts_of_the_values"),
  # A call multiplies weights with up to 128 columns of the values.
  [pytest.param(128, 256, 2, id="wide"), pytest.param(64, 128, 1, id="narrow")],
)
def test_auto_calls_cudnn_on_blackwell(
  cudnn_calls, monkeypatch, D, V, parts_of_the_values
):
  """Blackwell is a generation of GPUs for which there are no fused kernels."""

  class BlackwellDevice:
    platform = "gpu"
    device_kind = "NVIDIA B200"
    compute_capability = "10.0"

  def has_cudnn_on_gpu(backend):
    return STOCK_HAS_CUDNN("gpu")

  # The tests run on a CPU. The original function decides whether this GPU has
  # cuDNN.
  monkeypatch.setattr(jax, "devices", lambda *_: [BlackwellDevice])
  monkeypatch.setattr(api, "platform", lambda: "gpu")
  monkeypatch.setattr(two_call, "has_cudnn", has_cudnn_on_gpu)
  program, arrays = make_program("auto", D=D, V=V)

  jax.eval_shape(program, *arrays)

  call = CudnnCall(width=128, has_mask=False, is_causal=True)
  num_maps = 2
  assert cudnn_calls == [call] * (num_maps * parts_of_the_values)


@pytest.mark.parametrize(
  ("capability", "expected"),
  [
    pytest.param("7.5", False, id="turing"),
    pytest.param("8.0", True, id="ampere"),
    pytest.param("8.9", True, id="ada"),
    pytest.param("9.0", True, id="hopper"),
    pytest.param("12.0", True, id="blackwell"),
    pytest.param("gfx942", False, id="amd"),
  ],
)
def test_cudnn_attention_needs_ampere(monkeypatch, capability, expected):
  """Ampere is compute capability 8.0. AMD's GPUs have names instead."""

  class Device:
    compute_capability = capability

  monkeypatch.setattr(jax, "devices", lambda: [Device])

  assert two_call.has_cudnn("gpu") is expected


def test_other_backends_have_no_cudnn():
  """cuDNN is a library for GPUs of NVIDIA."""
  assert not two_call.has_cudnn("cpu")
