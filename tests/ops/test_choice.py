"""What `auto` reports about its choice, and to whom."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.diff_attention import (
  choice,
  diff_attention,
  gpu,
  implementations,
  two_call,
)
from diffjax.ops.diff_attention.gpu import (
  assembler,
  chip,
  measured,
  toolchain,
)
from diffjax.ops.diff_attention.mask import Mask

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def forget_reported():
  """Choices are reported once per process: forgets those of other tests."""
  choice.forget_reported()
  yield
  choice.forget_reported()


@pytest.fixture
def choose_on_gpu(monkeypatch):
  """A function that returns the choice of `auto` on a GPU.

  The GPU runs all kernels, unless the test prevents that.
  """
  monkeypatch.setattr(two_call, "has_cudnn", lambda backend: True)
  monkeypatch.setattr(chip, "refusal", lambda: None)
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", None)
  measured.table.cache_clear()

  def choose(kind=H100, G=2, D=128, dtype=jnp.bfloat16, T=4096, **mask):
    monkeypatch.setattr(choice, "device_kind", lambda: kind)
    q = jax.ShapeDtypeStruct((1, T, 8, G, D), dtype)
    v = jax.ShapeDtypeStruct((1, T, 8, G * D), dtype)
    return choice.choose("gpu", q, q, v, Mask(T, T, **mask))

  return choose


def make_arrays(dtype=jnp.float32):
  """Returns q, k and v."""
  q = np.zeros((1, 4, 2, 2, 8), dtype)
  v = np.zeros((1, 4, 2, 16), dtype)
  return q, q, v


@pytest.mark.parametrize(
  ("backend", "dtype", "line"),
  [
    pytest.param(
      "cpu",
      jnp.float32,
      "attention: chunked (XLA), because this is a CPU",
      id="cpu",
    ),
    pytest.param(
      "tpu",
      jnp.bfloat16,
      "attention: fused TPU kernels (pallas_tpu) for the forward and backward"
      " pass, the fastest on TPUs",
      id="tpu",
    ),
    pytest.param(
      "tpu",
      jnp.float16,
      "attention: chunked (XLA), because pallas_tpu does not take float16 with"
      " D = 8 and V = 16",
      id="tpu_float16",
    ),
  ],
)
def test_choice_without_a_gpu_says_why(backend, dtype, line):
  """The choice of `auto`, as a text, is the line in the log."""
  q, k, v = make_arrays(dtype)

  made = choice.choose(backend, q, k, v, Mask(q_length=4, kv_length=4))

  assert str(made) == line


@pytest.mark.parametrize(
  ("options", "line"),
  [
    pytest.param(
      {},
      "fused GPU kernels (pallas_gpu) for the forward and backward pass,"
      " measured fastest on NVIDIA H100 80GB HBM3",
      id="v1",
    ),
    pytest.param(
      {"G": 1},
      "two_call (stock attention), measured fastest on NVIDIA H100 80GB HBM3",
      id="plain",
    ),
    pytest.param(
      {"kind": "NVIDIA A100-SXM4-40GB"},
      "two_call (stock attention), because no measurement on NVIDIA"
      " A100-SXM4-40GB says that pallas_gpu is faster at this shape",
      id="not_measured",
    ),
    pytest.param(
      {"window": 4},
      "chunked (XLA), because cuDNN's attention takes no window here",
      id="window",
    ),
    pytest.param(
      {"offset": 4},
      "chunked (XLA), because cuDNN's attention takes no q_offset here",
      id="offset",
    ),
    pytest.param(
      # cuDNN takes these arrays without segments.
      {"kind": "another GPU", "T": 4095, "segments": True},
      "chunked (XLA), because cuDNN's attention takes no segments of these"
      " lengths",
      id="segments_of_odd_length",
    ),
    pytest.param(
      {"dtype": jnp.float32},
      "chunked (XLA), because pallas_gpu does not take float32 with D = 128 and"
      " V = 256",
      id="float32",
    ),
    pytest.param(
      {"dtype": jnp.float32, "kind": "NVIDIA B200"},
      "chunked (XLA), because cuDNN does not take float32 with D = 128 and"
      " V = 256 on NVIDIA B200",
      id="float32_not_measured",
    ),
  ],
)
def test_choice_on_a_gpu_says_why(choose_on_gpu, options, line):
  """Without `options`, a call is V1 with G = 2 maps, in bfloat16 on an H100."""
  made = choose_on_gpu(**options)

  assert str(made) == f"attention: {line}"
  assert not made.is_fallback


@pytest.mark.parametrize(
  ("python_version", "reason"),
  [
    pytest.param(
      # No JAX for Python 3.11 runs the kernels.
      (3, 11, 7),
      "pallas_gpu needs JAX 0.11.2 and Python 3.12 or newer,"
      " and this is JAX 0.10.2 on Python 3.11",
      id="python_3.11",
    ),
    pytest.param(
      (3, 12, 1),
      "pallas_gpu needs JAX 0.11.2 or newer,"
      " and this is JAX 0.10.2 on Python 3.12",
      id="python_3.12",
    ),
  ],
)
def test_choice_names_the_version_that_the_kernels_need(
  monkeypatch, python_version, reason
):
  """With newer versions, `auto` would choose pallas_gpu on an H100."""
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
  monkeypatch.setattr(jax, "__version__", "0.10.2")
  monkeypatch.setattr(sys, "version_info", python_version)
  monkeypatch.setattr(two_call, "has_cudnn", lambda backend: True)
  monkeypatch.setattr(choice, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
  q = jax.ShapeDtypeStruct((1, 4096, 8, 2, 128), jnp.bfloat16)
  v = jax.ShapeDtypeStruct((1, 4096, 8, 256), jnp.bfloat16)
  causal = Mask(q_length=4096, kv_length=4096)

  choice_of_auto = choice.choose("gpu", q, q, v, causal)

  assert str(choice_of_auto) == (
    f"attention: two_call (stock attention), because {reason}"
  )
  assert choice_of_auto.is_fallback


@pytest.mark.parametrize(
  "options",
  [
    pytest.param({"G": 1}, id="plain"),
    pytest.param({"kind": "NVIDIA B200"}, id="not_measured"),
  ],
)
def test_choice_names_no_version_where_the_kernels_are_not_faster(
  monkeypatch, choose_on_gpu, options
):
  """`G` is the number of attention maps: 1 for plain attention."""
  monkeypatch.setattr(chip, "refusal", lambda: "needs JAX 0.11.2")

  made = choose_on_gpu(**options)

  assert "JAX" not in str(made)
  assert not made.is_fallback


def test_choice_names_an_old_assembler(monkeypatch, choose_on_gpu):
  """Without its assembler, the fastest implementation cannot run."""
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", "needs ptxas 13.3")

  made = choose_on_gpu()

  assert str(made) == (
    "attention: two_call (stock attention), because pallas_gpu needs ptxas 13.3"
  )
  assert made.is_fallback


@pytest.fixture
def toolchain_not_imported(monkeypatch):
  """Undoes the import of the module that checks the assembler."""
  monkeypatch.delattr(gpu, "toolchain")
  monkeypatch.delitem(sys.modules, toolchain.__name__)


@pytest.mark.usefixtures("toolchain_not_imported")
def test_assembler_is_not_checked_where_its_kernels_would_not_run(
  monkeypatch, choose_on_gpu
):
  """Importing `toolchain` checks the assembler, which may change PATH.

  Only the GPU kernels need the assembler.
  """
  q, k, v = make_arrays()

  for backend in ("cpu", "tpu"):
    choice.choose(backend, q, k, v, Mask(q_length=4, kv_length=4))
  # Another implementation is faster on an A100, and for plain attention.
  choose_on_gpu(kind="NVIDIA A100-SXM4-40GB")
  choose_on_gpu(G=1)
  # The kernels do not support float32, or an old JAX.
  choose_on_gpu(dtype=jnp.float32)
  monkeypatch.setattr(chip, "refusal", lambda: "needs JAX 0.11.2")
  choose_on_gpu()

  assert toolchain.__name__ not in sys.modules


@pytest.mark.usefixtures("toolchain_not_imported")
def test_assembler_is_checked_once_before_its_kernels_run(
  monkeypatch, choose_on_gpu
):
  """Importing `toolchain` checks the assembler."""
  num_checks = 0

  def refuse():
    nonlocal num_checks
    num_checks += 1
    return "needs ptxas 13.3"

  monkeypatch.setattr(assembler, "refusal", refuse)

  first = choose_on_gpu()
  second = choose_on_gpu()

  assert num_checks == 1
  # Without its assembler, the fastest implementation cannot run.
  assert first.implementation == "two_call"
  assert second.implementation == "two_call"


def test_auto_logs_its_choice_once(caplog):
  """A model calls the operation in each layer."""
  q, k, v = make_arrays()

  with caplog.at_level("INFO"):
    jax.eval_shape(lambda: diff_attention(q, k, v, 0.5))
    jax.eval_shape(lambda: diff_attention(q, k, v, 0.5))

  messages = [record.getMessage() for record in caplog.records]
  assert messages == ["attention: chunked (XLA), because this is a CPU"]


def test_choice_that_the_user_can_improve_is_a_warning(
  monkeypatch, choose_on_gpu, caplog
):
  """An H100 could run faster kernels with a newer assembler. A B200 could not.

  Each choice is logged once.
  """
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", "needs ptxas 13.3")

  with caplog.at_level("INFO"):
    choose_on_gpu(kind="NVIDIA H100 80GB HBM3")
    choose_on_gpu(kind="NVIDIA H100 80GB HBM3")
    choose_on_gpu(kind="NVIDIA B200")

  warning, information = caplog.records
  assert warning.levelname == "WARNING"
  assert "ptxas 13.3" in warning.getMessage()
  assert information.levelname == "INFO"


def test_choice_that_a_listener_received_is_never_logged(caplog):
  """The listener, here `choices.append`, reports it in its own way."""
  q, k, v = make_arrays()
  choices = []

  with caplog.at_level("INFO"):
    with choice.reported_to(choices.append):
      jax.eval_shape(lambda: diff_attention(q, k, v, 0.5))
    jax.eval_shape(lambda: diff_attention(q, k, v, 0.5))

  assert len(choices) == 1
  assert str(choices[0]) == "attention: chunked (XLA), because this is a CPU"
  assert caplog.records == []


def test_reported_choice_is_the_implementation_that_runs(monkeypatch):
  """The operation loads an implementation by its name before it runs it."""
  loaded = []
  load = implementations.implementation_of

  def record_and_load(name):
    loaded.append(name)
    return load(name)

  monkeypatch.setattr(implementations, "implementation_of", record_and_load)
  q, k, v = make_arrays()
  choices = []

  with choice.reported_to(choices.append):
    jax.eval_shape(lambda: diff_attention(q, k, v, 0.5))

  assert len(choices) == 1
  assert loaded == [choices[0].implementation]


@pytest.mark.parametrize(
  ("backend", "dtype", "has_cudnn", "expected"),
  [
    pytest.param("tpu", jnp.float32, False, "pallas_tpu", id="tpu"),
    pytest.param("tpu", jnp.float16, False, "chunked", id="tpu_float16"),
    pytest.param("gpu", jnp.float16, True, "two_call", id="gpu_with_cudnn"),
    pytest.param("gpu", jnp.float16, False, "chunked", id="gpu_without_cudnn"),
    pytest.param("gpu", jnp.float32, True, "chunked", id="gpu_float32"),
    pytest.param("cpu", jnp.float16, True, "chunked", id="cpu"),
  ],
)
def test_auto_depends_on_the_backend_of_the_program(
  monkeypatch, backend, dtype, has_cudnn, expected
):
  """A program may be compiled on a machine that does not have its backend."""
  monkeypatch.setattr(two_call, "has_cudnn", lambda backend: has_cudnn)
  q, k, v = make_arrays(dtype)

  made = choice.choose(backend, q, k, v, Mask(q_length=4, kv_length=4))

  assert made.implementation == expected
