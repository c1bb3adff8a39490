"""The choice of `auto` on GPUs by a table of measurements."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.ops.diff_attention import choice, two_call
from diffjax.ops.diff_attention.gpu import chip, measured, toolchain
from diffjax.ops.diff_attention.mask import Mask

GPU = "NVIDIA H100 80GB HBM3"
# Groups of maps, maps of the keys, and width of the values divided by D.
SHAPES = {name: shape for shape, name in measured.KINDS.items()}


@pytest.fixture
def choose(monkeypatch, tmp_path):
  """A function that returns the implementation that `auto` chooses on a GPU.

  The GPU runs all kernels. The table of measurements is that of `write_table`.
  """
  monkeypatch.setattr(two_call, "has_cudnn", lambda backend: True)
  monkeypatch.setattr(chip, "refusal", lambda: None)
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", None)
  monkeypatch.setattr(measured, "TABLE", tmp_path / "measured.json")
  measured.table.cache_clear()

  def choose_implementation(
    T=4096, S=None, D=128, kind="v1", device=GPU, dtype=jnp.bfloat16, **mask
  ):
    monkeypatch.setattr(choice, "device_kind", lambda: device)
    G, M, relative_width = SHAPES[kind]
    q = np.zeros((1, 2, 1, G, D), dtype)
    k = np.zeros((1, 2, 1, M, D), dtype)
    v = np.zeros((1, 2, 1, relative_width * D), dtype)
    made = choice.choose("gpu", q, k, v, Mask(T, S or T, **mask))
    return made.implementation

  yield choose_implementation
  measured.table.cache_clear()


def write_table(*entries: dict) -> None:
  """Writes a table. Entries are V1 with 4096 tokens unless they differ."""
  default = {
    "kind": "v1",
    "D": 128,
    "packed": False,
    "T": 4096,
    "implementation": "pallas_gpu",
    "ms": {},
  }
  complete_entries = [default | entry for entry in entries]
  measured.TABLE.write_text(json.dumps({GPU: complete_entries}))


@pytest.mark.parametrize(
  ("options", "implementation"),
  [
    pytest.param({}, "two_call", id="causal"),
    pytest.param({"window": 4}, "chunked", id="window"),
    pytest.param({"offset": 3}, "chunked", id="offset"),
    pytest.param({"dtype": jnp.float32}, "chunked", id="float32"),
  ],
)
def test_cudnn_is_the_default_without_a_table(choose, options, implementation):
  """`two_call` calls cuDNN. `chunked` replaces it where cuDNN cannot run."""
  assert not measured.TABLE.exists()

  chosen = choose(**options)

  assert chosen == implementation


@pytest.mark.parametrize(
  ("options", "implementation"),
  [
    pytest.param({}, "pallas_gpu", id="measured_shape"),
    pytest.param({"T": 9000}, "pallas_gpu", id="longer"),
    pytest.param({"D": 96}, "pallas_gpu", id="narrower"),
    pytest.param({"D": 65}, "pallas_gpu", id="narrowest_of_the_kernel"),
    pytest.param({"T": 16384}, "two_call", id="next_measured_length"),
    pytest.param({"T": 65536}, "two_call", id="longest"),
    pytest.param({"D": 64, "kind": "plain"}, "pallas_gpu", id="plain"),
    pytest.param({"kind": "plain"}, "two_call", id="plain_not_measured"),
    pytest.param({"segments": True}, "chunked", id="packed"),
  ],
)
def test_measured_implementation_is_chosen(choose, options, implementation):
  """A measurement counts for longer rows, too, up to the next measured length.

  Entries say how they differ from variant V1 with heads of width D = 128 and
  T = 4096 tokens, where `pallas_gpu` was the fastest. So do `options`.
  """
  write_table(
    {},
    {"T": 16384, "implementation": "two_call"},
    {"kind": "plain", "D": 64},
    {"packed": True, "implementation": "chunked"},
  )

  chosen = choose(**options)

  assert chosen == implementation


@pytest.mark.parametrize(
  ("options", "implementation"),
  [
    pytest.param({"device": "NVIDIA H200"}, "two_call", id="another_gpu"),
    pytest.param({"D": 64}, "two_call", id="width_of_another_kernel"),
    pytest.param({"T": 4095}, "two_call", id="shorter"),
    pytest.param({"kind": "v2"}, "two_call", id="kind"),
    pytest.param({"segments": True}, "two_call", id="packed"),
    pytest.param({"causal": False}, "two_call", id="not_causal"),
    pytest.param({"S": 5000}, "two_call", id="more_keys"),
    pytest.param({"window": 100}, "chunked", id="window"),
    pytest.param({"offset": 100}, "chunked", id="offset"),
  ],
)
def test_cudnn_is_the_default_where_nothing_was_measured(
  choose, options, implementation
):
  """`two_call` calls cuDNN. `chunked` replaces it where cuDNN cannot run.

  `options` say how a call differs from the only measurement.
  """
  # Causal V1 with width D = 128 and T = 4096 tokens, measured on an H100.
  write_table({})

  chosen = choose(**options)

  assert chosen == implementation


def test_kernels_are_not_chosen_for_a_dtype_that_they_do_not_support(choose):
  """The kernels were the fastest at this shape, measured in bfloat16."""
  write_table({"implementation": "pallas_gpu"})

  chosen = choose(dtype=jnp.float32)

  assert chosen == "chunked"


def test_kernels_are_not_chosen_on_a_gpu_that_does_not_run_them(
  choose, monkeypatch
):
  """The table says that the kernels are the fastest at this shape."""
  write_table({"implementation": "pallas_gpu"})
  monkeypatch.setattr(chip, "refusal", lambda: "needs a Hopper GPU")

  chosen = choose()

  assert chosen == "two_call"


def test_kernels_are_not_chosen_with_an_untrusted_assembler(
  choose, monkeypatch
):
  """The table says that the kernels are the fastest at this shape."""
  write_table({"implementation": "pallas_gpu"})
  problem = "ptxas 13.0.88 can corrupt products"
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", problem)

  chosen = choose()

  assert chosen == "two_call"
