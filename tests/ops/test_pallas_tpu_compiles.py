"""The TPU kernels compile for each generation of TPU.

The compiler finds layouts that a chip does not have, and kernels that need too
much vector memory. The numbers are checked elsewhere, in the interpreter.
"""

from __future__ import annotations

import concurrent.futures
import platform
import sys
from collections.abc import Sequence

import pytest

from diffjax.ops.diff_attention.tpu import block_sizes
from tests.ops.tpu_compiler import (
  TOPOLOGIES,
  Case,
  DecodeCase,
  GradientCase,
  ModelCase,
  Program,
  compile_cases,
)

pytestmark = pytest.mark.skipif(
  sys.platform != "linux" or platform.machine() != "x86_64",
  reason="the TPU compiler, libtpu, is for Linux on x86-64 only",
)

# Shapes of the variants. V1 uses the most vector memory. Its two heads take
# turns with dQ.
V1 = {"D": 128, "H": 2, "K": 2}
V2 = {"D": 128, "V": 128, "H": 2, "M": 1}
PLAIN = {"D": 256, "V": 256, "G": 1, "M": 1}
SHARED_NOISE = {"D": 128, "V": 256, "H": 8, "G": 5}
SHARED_NOISE_V2 = {"D": 192, "V": 128, "H": 4, "G": 5, "M": 1}

# Each variant with each mask and each dtype, and the widest one on nearly all
# generations.
GRADIENT_CASES = [
  GradientCase("v4", T=2048, D=64, dtype="float32"),
  GradientCase("v4", T=8192, **V2),
  GradientCase("v4", T=3000, **PLAIN),
  GradientCase("v4", T=500, has_segments=True, **PLAIN),
  GradientCase("v4", T=500, window=200, **V2),
  GradientCase("v4", T=500, has_offsets=True, **V1),
  GradientCase("v4", T=500, causal=False, **V2),
  GradientCase("v4", T=3000, **SHARED_NOISE),
  GradientCase("v5e", T=2048, D=64),
  GradientCase("v5e", T=512, D=128, has_remat=True),
  GradientCase("v5e", T=500, **V2),
  GradientCase("v5e", T=3000, **PLAIN),
  GradientCase("v5e", T=500, **SHARED_NOISE_V2),
  GradientCase("v5p", T=3000, **PLAIN),
  GradientCase("v5p", T=500, has_segments=True, **V2),
  GradientCase("v5p", T=500, window=200, **PLAIN),
  GradientCase("v5p", T=500, causal=False, **V1),
  GradientCase("v5p", T=500, has_segments=True, **SHARED_NOISE),
  GradientCase("v6e", T=2048, D=96),
  GradientCase("v6e", T=500, window=200, **V1),
  GradientCase("v6e", T=500, has_offsets=True, **V2),
  GradientCase("v6e", T=500, causal=False, dtype="float32", **PLAIN),
  GradientCase("v6e", T=500, window=129, **SHARED_NOISE_V2),
  GradientCase("v7x", T=3000, **PLAIN),
  GradientCase("v7x", T=500, has_offsets=True, **PLAIN),
  GradientCase("v7x", T=500, dtype="float32", **V2),
  GradientCase("v7x", T=500, has_offsets=True, **SHARED_NOISE_V2),
]

# All options on v4, which has the least vector memory, and two calls on each
# other generation.
DECODE_CASES = [
  DecodeCase("v4", S=65536, D=64),
  DecodeCase("v4", S=8192, D=96),
  DecodeCase("v4", S=8192, D=128),
  DecodeCase("v4", S=8192, D=128, V=128, M=1),
  DecodeCase("v4", S=8192, D=128, has_pages=True),
  DecodeCase("v4", S=8192, D=128, has_pages=True, is_int8=True, tokens=128),
  DecodeCase(
    "v4", S=8192, D=64, V=64, M=1, has_pages=True, is_int8=True, window=1000
  ),
]
for generation in ("v5e", "v5p", "v6e", "v7x"):
  DECODE_CASES += [
    DecodeCase(generation, S=65536, D=64),
    DecodeCase(
      generation, S=8192, D=128, has_pages=True, is_int8=True, tokens=128
    ),
  ]

# Each kind of cache with one token and with many, and all generations.
MODEL_CASES = [
  ModelCase("v4", S=8192, D=64),
  ModelCase("v4", S=8192, D=64, tokens=128, has_pages=True, is_int8=True),
  ModelCase("v5e", S=8192, D=64, has_pages=True),
  ModelCase("v5p", S=8192, D=64, has_pages=True, is_int8=True),
  ModelCase("v6e", S=8192, D=64, tokens=128),
  ModelCase("v6e", S=8192, D=64, tokens=128, has_pages=True),
  ModelCase("v7x", S=8192, D=64, M=1, has_pages=True),
]

# Sequences on one mesh axis and heads on the other.
MULTI_CHIP_CASES = [
  ModelCase("v5e:2x2", S=8192, D=64, has_pages=True, is_int8=True, chips=4),
  GradientCase("v5e:4x4", T=512, D=128, B=8, H=8, K=4, chips=16),
  GradientCase(
    "v5p:2x2x4",
    T=512,
    D=128,
    V=128,
    B=8,
    H=8,
    K=4,
    M=1,
    has_segments=True,
    chips=16,
  ),
]


def longest_case(generation: str) -> GradientCase:
  """Returns packed sequences that leave the least vector memory.

  The backward kernel keeps dQ in vector memory. The sequences have the length
  at which dQ just fits. On v4 they are twice as long, which needs two calls.
  """
  blocks = block_sizes.choose(
    generation,
    direction="backward",
    q_length=65536,
    kv_length=65536,
    D=128,
    V=256,
    G=2,
    dtype="bfloat16",
  )
  length = blocks.resident
  if generation == "v4":
    length *= 2
  return GradientCase(generation, T=length, has_segments=True, **V1)


def find_problem(case: Case, program: Program) -> str | None:
  """Returns what is wrong with a program, or None."""
  if program.error is not None:
    return program.error
  variant = "v1"
  if case.M == 1:
    variant = "v2"
  if case.G == 1:
    variant = "plain"

  if not isinstance(case, GradientCase):
    if set(program.kernels) != {f"diff_attention_decode_{variant}"}:
      return f"unexpected kernels: {program.kernels}"
    if program.temporary_bytes > program.cache_bytes / 2:
      # The cache has another layout than the kernel needs, or a model writes
      # to a copy.
      return f"the cache is copied: {program.temporary_bytes} temporary bytes"
    return None

  # The quick and the online forward kernel are each called once, also with
  # remat. The backward kernel has one call or several.
  backward = f"diff_attention_backward_{variant}"
  forward = f"diff_attention_forward_{variant}"
  num_backward = max(1, program.kernels.count(backward))
  expected = [backward] * num_backward + [forward, f"{forward}_online"]
  if program.kernels != expected:
    return f"unexpected kernels: {program.kernels}"
  return None


def find_problems(cases: Sequence[Case]) -> list[str]:
  """Compiles cases in a process, and returns what is wrong with them."""
  problems = []
  # If the process aborts, there are fewer programs, and the last has an error.
  for case, program in zip(cases, compile_cases(cases), strict=False):
    print(case, program)
    problem = find_problem(case, program)
    if problem is not None:
      problems.append(f"{case}: {problem}")
  return problems


@pytest.mark.longest
@pytest.mark.full
def test_kernels_compile_for_each_generation():
  """Two processes run `find_problems`, each with half of the cases."""
  cases = GRADIENT_CASES + DECODE_CASES + MODEL_CASES + MULTI_CHIP_CASES
  for generation in TOPOLOGIES:
    cases.append(longest_case(generation))
  # Each process gets cases of all generations, so that both take equally long.
  num_processes = 2
  groups = [cases[start::num_processes] for start in range(num_processes)]

  problems = []
  with concurrent.futures.ThreadPoolExecutor(num_processes) as pool:
    for problems_of_group in pool.map(find_problems, groups):
      problems += problems_of_group

  assert not problems, "\n".join(problems)
