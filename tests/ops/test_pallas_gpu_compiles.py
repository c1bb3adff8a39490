"""The GPU kernels go through the real compiler for Hopper (sm_90a), on a machine without a GPU.

What is compiled is a gradient through `diff_attention(implementation="pallas_gpu")`, and decoding. What fails here would fail on the GPU:
layouts that the chip does not have, shared memory that runs out. And the machine code tells what would make a kernel slow: registers that
spill, products that run one after the other, weights that are made while the tensor cores wait. That the numbers are right is checked
elsewhere, in the interpreter.
"""

from __future__ import annotations

import jax
import pytest

from benchmarks.gpu import static

QUICK = [
  {"D": 64, "remat": True},
  {"D": 128, "V": 128, "M": 1, "segments": True},
  {"D": 128, "decode": True},
]
CASES = [  # with QUICK: each kind of kernel, each width, each mask, and two masks at the widths whose registers spill
  {"D": 64, "causal": False},
  {"D": 128},
  {"D": 96},
  {"D": 64, "V": 64, "M": 1, "H": 4},
  {"D": 128, "V": 128, "M": 1, "causal": False},
  {"D": 128, "V": 128, "G": 1, "M": 1},
  {"D": 64, "segments": True, "window": 512},
  {"D": 128, "segments": True, "window": 512},
  {"D": 64, "T": 1000},
  {"D": 128, "offsets": True},
  {"D": 128, "dtype": "float16"},
  {"D": 96, "decode": True, "window": 300},
  {"D": 64, "V": 64, "M": 1, "decode": True, "dtype": "float16"},
  {"D": 128, "V": 128, "G": 1, "M": 1, "decode": True},
]


# Instructions in inner loops that move registers to memory and back, at most: (kernel, width of queries). What is not here has none. Packed
# rows' loops of blocks that a mask cuts have nearly all of them. Counted for dQ: 17 with JAX 0.11.2, 21 with 0.12.
SPILLS = {("d_q_v1", 128): 21, ("d_kv_v1", 128): 5}

pytestmark = [
  pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="the GPU kernels need JAX 0.11.2 or newer",
  ),
  pytest.mark.skipif(
    static.missing() is not None, reason=static.missing() or ""
  ),
]


def _wrong(cases: list[dict]) -> list[str]:
  """What is wrong with the kernels of these cases, one line each."""
  wrong = []
  for case, kernels, forward_calls in static.compiled(cases):
    print(case, kernels)
    kind = static.kind_of(case)
    if isinstance(kernels, str):
      wrong.append(f"{case}: {kernels}")
      continue
    expected = (
      ["decode"]
      if case.get("decode")
      else [f"d_kv_{kind}", f"d_q_{kind}", f"forward_{kind}"]
    )
    if sorted(
      kernel.name for kernel in kernels
    ) != expected or forward_calls != ("forward" in expected[-1]):
      wrong.append(
        f"{case}: kernels {[kernel.name for kernel in kernels]}, the forward one {forward_calls} times"
      )
    for kernel in kernels:
      most = SPILLS.get((kernel.name, 64 if case["D"] <= 64 else 128), 0)
      if not kernel.loops or kernel.serialized or kernel.spills > most:
        wrong.append(f"{case}: {kernel}")
  return wrong


def test_forward_and_backward_compile():
  wrong = _wrong(QUICK)
  assert not wrong, "\n".join(wrong)


@pytest.mark.full
def test_every_shape_and_mask_compiles():
  wrong = _wrong(CASES)
  assert not wrong, "\n".join(wrong)


def test_weights_are_made_while_products_go_on():
  """In the forward kernel, whole blocks: a map's exponentials stand between a wait for its logits alone and one for everything."""
  [(_, kernels, _)] = static.compiled([{"D": 128}])
  [forward] = [kernel for kernel in kernels if kernel.name == "forward_v1"]
  for loop in forward.loops:
    assert loop.schedule == "8 N64, 4 N256, wait 1, 34 exp, wait 0", forward
