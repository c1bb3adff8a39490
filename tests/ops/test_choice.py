"""What `auto` says of its choice: the reasons, and who is told."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from diffjax.ops.diff_attention import choice, diff_attention, gpu, two_call
from diffjax.ops.diff_attention.gpu import (
  assembler,
  chip,
  measured,
  toolchain,
)
from diffjax.ops.diff_attention.mask import Mask

H100 = "NVIDIA H100 80GB HBM3"
FUSED = "fused GPU kernels (pallas_gpu) for the forward and backward pass"


@pytest.fixture(autouse=True)
def nothing_was_reported():
  choice._reported.clear()
  yield
  choice._reported.clear()


@pytest.fixture
def on_gpu(monkeypatch):
  """on_gpu(kind, …): what is said on a GPU. All kernels run on it unless the test takes them away."""
  monkeypatch.setattr(two_call, "_has_cudnn", lambda backend: True)
  monkeypatch.setattr(chip, "refusal", lambda: None)
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", None)
  measured.table.cache_clear()

  def said(kind=H100, G=2, D=128, dtype=jnp.bfloat16, T=4096, **mask):
    monkeypatch.setattr(choice, "device_kind", lambda: kind)
    q = jax.ShapeDtypeStruct((1, T, 8, G, D), dtype)
    k = jax.ShapeDtypeStruct((1, T, 8, G, D), dtype)
    v = jax.ShapeDtypeStruct((1, T, 8, G * D), dtype)
    return choice.choose("gpu", q, k, v, Mask(T, T, **mask))

  return said


def arrays(dtype=jnp.float32):
  q = jnp.zeros((1, 4, 2, 2, 8), dtype)
  return q, q, jnp.zeros((1, 4, 2, 16), dtype)


def test_segments_of_an_odd_length_are_named_as_the_reason(on_gpu):
  """cuDNN takes these arrays without segments."""
  choice_made = on_gpu(kind="another GPU", T=4095, segments=True)
  assert choice_made.implementation == "chunked"
  assert str(choice_made).endswith(
    "because cuDNN's attention takes no segments of these lengths"
  )


@pytest.mark.parametrize(
  ("backend", "dtype", "line"),
  [
    ("cpu", jnp.float32, "attention: chunked (XLA), because this is a CPU"),
    (
      "tpu",
      jnp.bfloat16,
      "attention: fused TPU kernels (pallas_tpu) for the forward and backward"
      " pass, the fastest on TPUs",
    ),
    (
      "tpu",
      jnp.float16,
      "attention: chunked (XLA), because pallas_tpu does not take float16 with"
      " D = 8 and V = 16",
    ),
  ],
)
def test_the_line_without_a_gpu(backend, dtype, line):
  assert str(choice.choose(backend, *arrays(dtype), Mask(4, 4))) == line


@pytest.mark.parametrize(
  ("options", "line"),
  [
    ({}, f"{FUSED}, measured fastest on {H100}"),
    (
      {"G": 1},
      f"two_call (stock attention), measured fastest on {H100}",
    ),
    (
      {"kind": "NVIDIA A100-SXM4-40GB"},
      "two_call (stock attention), because no measurement on"
      " NVIDIA A100-SXM4-40GB says that pallas_gpu is faster at this shape",
    ),
    (
      {"window": 4},
      "chunked (XLA), because cuDNN's attention takes no window here",
    ),
    (
      {"offset": 4},
      "chunked (XLA), because cuDNN's attention takes no q_offset here",
    ),
    (
      {"dtype": jnp.float32},
      "chunked (XLA), because pallas_gpu does not take float32 with D = 128 and"
      " V = 256",
    ),
    (
      {"dtype": jnp.float32, "kind": "NVIDIA B200"},
      "chunked (XLA), because cuDNN does not take float32 with D = 128 and"
      " V = 256 on NVIDIA B200",
    ),
  ],
)
def test_the_line_on_a_gpu(on_gpu, options, line):
  made = on_gpu(**options)
  assert str(made) == f"attention: {line}"
  assert not made.is_fallback


@pytest.mark.parametrize(
  ("python", "needed", "found"),
  [
    ((3, 11, 7), "JAX 0.11.2 and Python 3.12", "3.11"),
    ((3, 12, 1), "JAX 0.11.2", "3.12"),
  ],
)
def test_an_old_python_is_named(monkeypatch, on_gpu, python, needed, found):
  """Python 3.11 has no JAX that the kernels run with."""
  monkeypatch.undo()
  monkeypatch.setattr(two_call, "_has_cudnn", lambda backend: True)
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
  monkeypatch.setattr(jax, "__version__", "0.10.2")
  monkeypatch.setattr(sys, "version_info", python)
  line = (
    f"two_call (stock attention), because pallas_gpu needs {needed} or newer,"
    f" and this is JAX 0.10.2 on Python {found}"
  )
  assert str(on_gpu()) == f"attention: {line}"
  assert on_gpu().is_fallback
  # Where they were not measured to be faster, it does not matter.
  assert "Python" not in str(on_gpu(G=1))
  assert "Python" not in str(on_gpu(kind="NVIDIA B200"))


def test_an_old_assembler_is_named(monkeypatch, on_gpu):
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", "needs ptxas 13.3")
  made = on_gpu()
  assert (
    str(made)
    == "attention: two_call (stock attention), because pallas_gpu needs ptxas 13.3"
  )
  assert made.is_fallback


def test_the_assembler_is_asked_only_where_its_kernels_would_run(
  monkeypatch, on_gpu
):
  """Asking changes PATH, which no other process needs."""
  monkeypatch.delattr(gpu, "toolchain")
  monkeypatch.delitem(sys.modules, toolchain.__name__)
  monkeypatch.setattr(assembler, "refusal", lambda: pytest.fail("it was asked"))
  for backend in ("cpu", "tpu"):
    choice.choose(backend, *arrays(), Mask(4, 4))
  on_gpu(kind="NVIDIA A100-SXM4-40GB")
  on_gpu(G=1)
  on_gpu(dtype=jnp.float32)
  monkeypatch.setattr(chip, "refusal", lambda: "needs JAX 0.11.2")
  on_gpu()
  assert toolchain.__name__ not in sys.modules


def test_the_assembler_is_asked_once_before_its_kernels_run(
  monkeypatch, on_gpu
):
  questions = []
  monkeypatch.delattr(gpu, "toolchain")
  monkeypatch.delitem(sys.modules, toolchain.__name__)
  monkeypatch.setattr(
    assembler, "refusal", lambda: questions.append(1) or "needs ptxas 13.3"
  )
  assert on_gpu().implementation == on_gpu().implementation == "two_call"
  assert questions == [1]


def test_what_can_be_made_faster_is_a_warning_once(monkeypatch, on_gpu, caplog):
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", "needs ptxas 13.3")
  with caplog.at_level("INFO"):
    on_gpu()
    on_gpu()
    on_gpu(kind="NVIDIA B200")
  levels = [record.levelname for record in caplog.records]
  assert levels == ["WARNING", "INFO"]
  assert "ptxas 13.3" in caplog.records[0].getMessage()


def test_a_listener_hears_each_choice_and_nothing_is_logged(caplog):
  heard = []
  q, k, v = arrays()
  attend = lambda: diff_attention(q, k, v, 0.5)
  with caplog.at_level("INFO"):
    with choice.reported_to(heard.append):
      jax.eval_shape(attend)
    jax.eval_shape(attend)
  assert {str(made) for made in heard} == {
    "attention: chunked (XLA), because this is a CPU"
  }
  assert caplog.records == []
  count = len(heard)
  jax.eval_shape(attend)
  assert len(heard) == count


def test_the_choice_is_the_one_that_runs(monkeypatch):
  """The line would be worth nothing if another implementation ran."""
  from diffjax.ops.diff_attention import implementations

  taken = []
  real = implementations.implementation_of

  def implementation_of(name):
    taken.append(name)
    return real(name)

  monkeypatch.setattr(implementations, "implementation_of", implementation_of)
  heard = []
  q, k, v = arrays()
  with choice.reported_to(heard.append):
    jax.eval_shape(lambda: diff_attention(q, k, v, 0.5))
  assert taken == [made.implementation for made in heard]
  assert taken
