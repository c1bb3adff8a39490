"""The GPU kernels compile for Hopper (sm_90a), on a machine without a GPU.

The compiler finds layouts that the chip does not have, and kernels that need
too much shared memory. The machine code shows what would make a kernel slow:
registers that spill, and products that run one after the other. The numbers are
checked elsewhere, in the interpreter.
"""

from __future__ import annotations

import jax
import pytest

from benchmarks.gpu import static

pytestmark = [
  pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="the GPU kernels need JAX 0.11.2 or newer",
  ),
  pytest.mark.skipif(
    static.missing() is not None, reason=static.missing() or ""
  ),
]

# A case has arguments of a gradient through `diff_attention`, or of decoding.
V1_WIDE = {"D": 128}
QUICK_CASES = [
  V1_WIDE,
  {"D": 64, "remat": True},
  {"D": 128, "V": 128, "M": 1, "segments": True},
  {"D": 128, "decode": True},
]
# With QUICK_CASES: each kernel, each width and each mask. The widest kernel of
# V1, whose registers spill, has two more masks.
CASES = [
  {"D": 64, "causal": False},
  {"D": 96},
  {"D": 64, "V": 64, "M": 1, "H": 4},
  {"D": 128, "V": 128, "G": 1, "M": 1},
  {"D": 64, "T": 1000, "segments": True, "window": 512},
  {"D": 128, "segments": True, "window": 512},
  {"D": 128, "offsets": True, "dtype": "float16"},
  {"D": 96, "decode": True, "window": 300},
  {"D": 64, "V": 64, "M": 1, "decode": True, "dtype": "float16"},
  {"D": 128, "V": 128, "G": 1, "M": 1, "decode": True},
]

# The largest number of instructions in inner loops that move registers to
# memory and back, by kernel, for wide queries. All other kernels have none.
# Nearly all are in the loops of blocks that the mask of a packed sequence cuts.
# JAX 0.11.2 has 17 for dQ, and JAX 0.12 has 21.
MAX_SPILLS_OF_WIDE_KERNELS = {"d_q_v1": 21, "d_kv_v1": 5}


def find_problems(
  case: dict, kernels: list[static.Kernel], forward_calls: int
) -> list[str]:
  """Returns what is wrong with the kernels of a case.

  Args:
    case: the arguments of the case.
    kernels: the compiled kernels.
    forward_calls: how often the program calls the forward kernel. With remat,
      the gradient must not call it again.
  """
  variant = static.kind_of(case)
  if case.get("decode"):
    expected_names = ["decode"]
    expected_forward_calls = 0
  else:
    expected_names = [f"d_kv_{variant}", f"d_q_{variant}", f"forward_{variant}"]
    expected_forward_calls = 1

  problems = []
  names = sorted(kernel.name for kernel in kernels)
  if names != expected_names:
    problems.append(f"{case}: unexpected kernels: {names}")
  if forward_calls != expected_forward_calls:
    problems.append(f"{case}: {forward_calls} calls of the forward kernel")
  for kernel in kernels:
    max_spills = 0
    if case["D"] > 64:
      max_spills = MAX_SPILLS_OF_WIDE_KERNELS.get(kernel.name, 0)
    if not kernel.loops:
      problems.append(f"{case}: no loops found: {kernel}")
    if kernel.serialized:
      problems.append(f"{case}: products are serialized: {kernel}")
    if kernel.spills > max_spills:
      problems.append(f"{case}: {kernel.spills} spills: {kernel}")
  return problems


def compile_cases(
  cases: list[dict],
) -> tuple[list[list[static.Kernel]], list[str]]:
  """Returns the kernels of each case, and what is wrong with them."""
  kernels_of_cases = []
  problems = []
  for case, result, forward_calls in static.compiled(cases):
    print(case, result)
    # The result is a list of kernels, or an error message.
    if isinstance(result, str):
      kernels_of_cases.append([])
      problems.append(f"{case}: {result}")
    else:
      kernels_of_cases.append(result)
      problems += find_problems(case, result, forward_calls)
  return kernels_of_cases, problems


@pytest.fixture(scope="module")
def quick_cases():
  """The kernels of QUICK_CASES, and what is wrong with them."""
  return compile_cases(QUICK_CASES)


@pytest.mark.longest
def test_kernels_compile_without_spills(quick_cases):
  _, problems = quick_cases

  assert not problems, "\n".join(problems)


@pytest.mark.full
def test_kernels_compile_without_spills_for_each_shape_and_mask():
  _, problems = compile_cases(CASES)

  assert not problems, "\n".join(problems)


def test_forward_kernel_computes_exponentials_during_products(quick_cases):
  """The exponentials of a block are computed while values are multiplied.

  In a step, 128 threads compute 64 queries and 64 keys of one map. A product of
  the tensor cores sums over 16 numbers.
  """
  kernels_of_cases, _ = quick_cases
  # The first case has keys of width D = 128, and values of width V = 256.
  kernels_of_first_case, *_ = kernels_of_cases
  (forward_kernel,) = [
    kernel for kernel in kernels_of_first_case if kernel.name == "forward_v1"
  ]

  # The sum over D. A product has a column for each key.
  products_of_logits = f"{128 // 16} N64"
  # The sum over the keys. A product has a column for each number of a value.
  products_of_values = f"{64 // 16} N256"
  # Each thread has 32 weights of two queries, and a correction for each query.
  exponentials = f"{64 * 64 // 128 + 2} exp"
  expected = (
    f"{products_of_logits}, {products_of_values}, "
    # Waits for all groups of products but the last one: the logits are needed.
    "wait 1, "
    f"{exponentials}, "
    # Waits for all products.
    "wait 0"
  )
  assert {loop.schedule for loop in forward_kernel.loops} == {expected}
