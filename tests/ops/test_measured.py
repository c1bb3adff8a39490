"""The choice of `auto` on GPUs by what was measured there."""

import json

import jax.numpy as jnp
import pytest

from diffjax.ops.diff_attention import choice, two_call
from diffjax.ops.diff_attention.gpu import chip, measured, toolchain
from diffjax.ops.diff_attention.mask import Mask

GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def pick(monkeypatch, tmp_path):
  """pick(T, D): the choice of `auto` on a GPU of this kind, with the table that was written; V1 in bfloat16 by default."""
  monkeypatch.setattr(two_call, "_has_cudnn", lambda backend: True)
  monkeypatch.setattr(chip, "refusal", lambda: None)
  monkeypatch.setattr(toolchain, "ASSEMBLER_PROBLEM", None)
  monkeypatch.setattr(measured, "TABLE", tmp_path / "measured.json")
  measured.table.cache_clear()

  def choose(T=4096, D=128, kind="v1", device=GPU, dtype=jnp.bfloat16, **mask):
    G, M, wide = {name: sizes for sizes, name in measured.KINDS.items()}[kind]
    monkeypatch.setattr(choice, "device_kind", lambda: device)
    q, k, v = (
      jnp.zeros((1, 2, 1, *shape), dtype)
      for shape in ((G, D), (M, D), (wide * D,))
    )
    mask = Mask(T, mask.pop("S", T), **mask)
    return choice.choose("gpu", q, k, v, mask).implementation

  yield choose
  measured.table.cache_clear()


def write(*entries):
  entries = [
    dict(
      kind="v1", D=128, packed=False, T=4096, implementation="pallas_gpu", ms={}
    )
    | entry
    for entry in entries
  ]
  measured.TABLE.write_text(json.dumps({GPU: entries}))


def test_without_a_table_it_is_as_before(pick):
  assert (
    not measured.TABLE.exists()
    and pick() == "two_call"
    and pick(window=4) == pick(offset=3) == pick(dtype=jnp.float32) == "chunked"
  )


def test_what_was_measured_is_taken(pick):
  write(
    {},
    {"T": 16384, "implementation": "two_call"},
    {"kind": "plain", "D": 64},
    {"packed": True, "implementation": "chunked"},
  )
  assert pick() == pick(T=9000) == pick(D=96) == pick(D=65) == "pallas_gpu"
  assert pick(T=16384) == pick(T=65536) == "two_call"
  assert (
    pick(D=64, kind="plain") == "pallas_gpu"
    and pick(D=128, kind="plain") == "two_call"
  )
  assert pick(segments=True) == "chunked"


def test_what_was_not_measured_is_as_before(pick):
  write({})
  assert (
    pick(device="NVIDIA H200")
    == pick(D=64)
    == pick(T=4095)
    == pick(kind="v2")
    == pick(segments=True)
    == "two_call"
  )
  assert pick(causal=False) == pick(S=5000) == "two_call"
  assert pick(window=100) == pick(offset=100) == "chunked"


def test_what_cannot_run_is_not_taken(pick, monkeypatch):
  write({})
  assert pick(dtype=jnp.float32) == "chunked"
  monkeypatch.setattr(chip, "refusal", lambda: "needs a Hopper GPU")
  assert pick() == "two_call"


def test_auto_takes_no_kernel_of_an_assembler_that_is_not_trusted(
  pick, monkeypatch
):
  write({})
  monkeypatch.setattr(
    toolchain, "ASSEMBLER_PROBLEM", "ptxas 13.0.88 can corrupt products"
  )
  assert pick() == "two_call"
