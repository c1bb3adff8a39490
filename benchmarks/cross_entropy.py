"""Time and memory of the fused loss relative to the plain formula.

    python -m benchmarks.cross_entropy
    python -m benchmarks.cross_entropy --peak

Both compute the loss and the gradients of the hidden states and of the output
matrix. Times are medians, at sizes where the plain formula fits, which holds
all logits. Temporaries are the plan of the compiled program for B 4 × T 4096.
`--peak` also runs that program in another process and prints how much its
resident memory grows, which takes minutes on a small CPU, and 3 GiB.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import machine
from benchmarks.timing import median_seconds
from diffjax.host.runtime import keep_freed_memory
from diffjax.ops.cross_entropy import (
  fused_cross_entropy,
  reference_cross_entropy,
)

VOCABULARY = 100_288
WIDTH = 1024
MEMORY_SHAPE = {"B": 4, "T": 4096}
# B and T.
TIMED_SHAPES = ((1, 512), (1, 1024), (1, 2048))


def compile_loss(
  cross_entropy: Callable, B: int, T: int
) -> tuple[jax.stages.Compiled, tuple[jax.Array, ...]]:
  """Compiles a program for the loss and its gradients.

  Args:
    cross_entropy: The fused loss or the plain formula.
    B: Number of rows.
    T: Tokens of a row.

  Returns:
    The compiled program, and random arguments for it.
  """
  hidden_key, embedding_key, targets_key = jax.random.split(
    jax.random.key(0), 3
  )
  hidden = jax.random.normal(hidden_key, (B, T, WIDTH))
  embedding = jax.random.normal(embedding_key, (VOCABULARY, WIDTH))
  embedding = embedding * WIDTH**-0.5
  targets = jax.random.randint(targets_key, (B, T), 0, VOCABULARY)
  weights = jnp.ones((B, T))
  arguments = (hidden, embedding, targets, weights)
  gradient = jax.value_and_grad(cross_entropy, argnums=(0, 1), has_aux=True)
  return jax.jit(gradient).lower(*arguments).compile(), arguments


def make_step(cross_entropy: Callable, B: int, T: int) -> Callable[[], None]:
  """Returns a function that computes the loss and gradients, and waits."""
  program, arguments = compile_loss(cross_entropy, B, T)

  def run() -> None:
    jax.block_until_ready(program(*arguments))

  return run


def print_times(repetitions: int) -> None:
  """Prints the time of the fused loss relative to the plain formula."""
  for B, T in TIMED_SHAPES:
    candidates = {
      "plain": make_step(reference_cross_entropy, B, T),
      "fused": make_step(fused_cross_entropy, B, T),
    }
    seconds = median_seconds(candidates, repetitions)
    plain = seconds["plain"]
    fused = seconds["fused"]
    print(
      f"B {B} × T {T}: plain {plain:.2f} s, fused {fused:.2f} s,"
      f" fused/plain {fused / plain:.2f}"
    )


def print_memory(*, with_peak: bool) -> None:
  """Prints the memory of the fused loss for B 4 × T 4096.

  Args:
    with_peak: Whether to run it in another process as well.
  """
  program, _ = compile_loss(fused_cross_entropy, **MEMORY_SHAPE)
  plan = program.memory_analysis()
  assert plan is not None
  temporaries = plan.temp_size_in_bytes / 2**20
  print(
    f"B 4 × T 4096: {temporaries:.0f} MiB of temporaries in the compiled"
    " program"
  )
  if not with_peak:
    return
  child = subprocess.run(
    [sys.executable, "-m", "benchmarks.cross_entropy", "--child"],
    capture_output=True,
    text=True,
    check=True,
  )
  growth = int(child.stdout) / 2**10
  results = plan.output_size_in_bytes / 2**20
  print(
    f"B 4 × T 4096: resident memory grows by {growth:.0f} MiB while it runs,"
    f" including {results:.0f} MiB of results"
  )


def peak_growth_kib() -> int:
  """Returns how much this process's resident memory grows in one step."""
  program, arguments = compile_loss(fused_cross_entropy, **MEMORY_SHAPE)
  # Resets the peak, which compilation has raised.
  pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
  before = _memory_status_kib("VmRSS")
  jax.block_until_ready(program(*arguments))
  return _memory_status_kib("VmHWM") - before


def _memory_status_kib(field: str) -> int:
  """Returns a field of /proc/self/status.

  Args:
    field: "VmRSS" for the resident memory now, "VmHWM" for its peak.
  """
  status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
  match = re.search(rf"{field}:\s*(\d+)", status)
  assert match is not None
  return int(match[1])


def main() -> None:
  """Prints the memory of the fused loss, and its time."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--repetitions", type=int, default=5)
  parser.add_argument(
    "--peak", action="store_true", help="also run B 4 × T 4096 once"
  )
  parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    print(peak_growth_kib())
    return

  print(
    f"JAX {jax.__version__}, {machine()}, float32, N {VOCABULARY:,}, E {WIDTH}"
  )
  print_memory(with_peak=flags.peak)
  keep_freed_memory()
  print_times(flags.repetitions)


if __name__ == "__main__":
  main()
