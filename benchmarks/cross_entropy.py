"""The fused loss against the plain formula, and its memory: python -m benchmarks.cross_entropy

Loss and gradients of hidden states and output matrix. Times are medians of runs in turn, at a size where the plain formula, which holds all
logits, fits; temporaries are the compiled program's plan, at the size asked for, beside the peak of a process that runs it (`--peak`).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp

from benchmarks import cpu_name
from benchmarks.attention import medians
from diffjax.host.runtime import keep_freed_memory
from diffjax.ops.cross_entropy import (
  fused_cross_entropy,
  reference_cross_entropy,
)

VOCABULARY, WIDTH = 100_288, 1024


def gradient(function, batch: int, length: int):
  """Loss and gradients, compiled, and its inputs."""
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (batch, length, WIDTH))
  embedding = jax.random.normal(keys[1], (VOCABULARY, WIDTH)) * WIDTH**-0.5
  targets = jax.random.randint(keys[2], (batch, length), 0, VOCABULARY)
  arrays = (hidden, embedding, targets, jnp.ones((batch, length)))
  return jax.jit(
    jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
  ).lower(*arrays).compile(), arrays


def _resident_kib(field: str) -> int:
  """This process's resident memory now (VmRSS) or at its peak (VmHWM), as Linux tells it."""
  return int(
    re.search(
      rf"{field}:\s*(\d+)",
      pathlib.Path("/proc/self/status").read_text(encoding="utf-8"),
    )[1]
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--repetitions", type=int, default=5)
  parser.add_argument(
    "--peak",
    action="store_true",
    help="also run B 4 × T 4096 once: minutes on a small CPU, 3 GiB",
  )
  parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    run, arrays = gradient(fused_cross_entropy, 4, 4096)
    pathlib.Path("/proc/self/clear_refs").write_text(
      "5", encoding="utf-8"
    )  # the peak so far, of compiling, is forgotten
    before = _resident_kib("VmRSS")
    jax.block_until_ready(run(*arrays))
    print(_resident_kib("VmHWM") - before)
    return
  print(
    f"JAX {jax.__version__}, {cpu_name()}, {len(os.sched_getaffinity(0))} threads, float32, N {VOCABULARY:,}, E {WIDTH}"
  )
  plan = gradient(fused_cross_entropy, 4, 4096)[0].memory_analysis()
  print(
    f"B 4 × T 4096: {plan.temp_size_in_bytes / 2**20:.0f} MiB of temporaries by the compiled plan"
  )
  if flags.peak:
    child = subprocess.run(
      [sys.executable, "-m", "benchmarks.cross_entropy", "--child"],
      capture_output=True,
      text=True,
      check=True,
    )
    results = plan.output_size_in_bytes / 2**20
    print(
      f"B 4 × T 4096: {int(child.stdout) / 2**10:.0f} MiB more resident memory while it runs, {results:.0f} MiB of them its results"
    )
  keep_freed_memory()
  for batch, length in ((1, 512), (1, 1024), (1, 2048)):
    candidates = {}
    for name, function in (
      ("plain", reference_cross_entropy),
      ("fused", fused_cross_entropy),
    ):
      run, arrays = gradient(function, batch, length)
      candidates[name] = lambda run=run, arrays=arrays: jax.block_until_ready(
        run(*arrays)
      )
      candidates[name]()
    plain, fused = medians(candidates, flags.repetitions).values()
    print(
      f"B {batch} × T {length}: plain {plain:.2f} s, fused {fused:.2f} s, fused/plain {fused / plain:.2f}"
    )


if __name__ == "__main__":
  main()
