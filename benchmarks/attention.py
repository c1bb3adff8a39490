"""Speed and memory of differential attention's implementations on this machine.

    python -m benchmarks.attention            # ratios: implementations, DIFF against its Transformer twin, cost per token by length
    python -m benchmarks.attention --memory   # peak memory of a process that runs forward + backward at T = 16,384

Candidates that are compared run in turn, several times each; what is printed are medians. DIFF and its twin have equal projections: the
twin has twice the heads, each with one map and values half as wide. Times are taken with training's allocator (runtime.keep_freed_memory).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import cpu_name
from diffjax.host.runtime import keep_freed_memory
from diffjax.ops.diff_attention import diff_attention


def step(
  implementation: str,
  batch: int,
  length: int,
  heads: int,
  maps: int,
  width: int,
  value_width: int,
  packed: bool = False,
):
  """Forward and backward, compiled, and called once: a function of no arguments that waits for the result."""
  keys = jax.random.split(jax.random.key(0), 4)
  q, k = (
    jax.random.normal(key, (batch, length, heads, maps, width))
    for key in keys[:2]
  )
  v = jax.random.normal(keys[2], (batch, length, heads, value_width))
  d_out = jax.random.normal(keys[3], v.shape)
  lam = None if maps == 1 else jnp.full((batch, length, heads), 0.5)
  ids = (
    jnp.broadcast_to(jnp.arange(length) * 3 // length, (batch, length))
    if packed
    else None
  )
  attend = lambda *a: diff_attention(
    *a, q_segment_ids=ids, implementation=implementation
  )
  # Two programs, as in training, where the layers' backward pass cannot reuse the forward pass's logits.
  forward = jax.jit(lambda *a: jax.vjp(attend, *a))
  backward = jax.jit(lambda pull, d_out: pull(d_out))

  def run():
    out, pull = forward(q, k, v, lam)
    jax.block_until_ready((out, backward(pull, d_out)))

  run()
  return run


def medians(candidates: dict, repetitions: int) -> dict[str, float]:
  """Seconds of each candidate, taken in turn so that a busy machine slows all alike."""
  seconds: dict[str, list[float]] = {name: [] for name in candidates}
  for _ in range(repetitions):
    for name, run in candidates.items():
      start = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--memory",
    action="store_true",
    help="peak resident memory at T = 16,384 instead of times",
  )
  parser.add_argument(
    "--only",
    choices=("implementations", "twins", "curve"),
    help="one of the three tables of times",
  )
  parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    step("chunked", 1, 16384, 8, 2, 64, 128)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return
  print(
    f"JAX {jax.__version__}, {jax.default_backend()}, {cpu_name()}, {len(os.sched_getaffinity(0))} threads, float32, forward + backward"
  )
  if flags.memory:
    child = subprocess.run(
      [sys.executable, "-m", "benchmarks.attention", "--child"],
      capture_output=True,
      text=True,
      check=True,
    )
    print(
      f"chunked, B 1 × T 16,384, H 8, D 64: peak memory of the process {int(child.stdout) / 2**20:.2f} GiB"
    )
    return
  keep_freed_memory()
  if flags.only in (None, "implementations"):
    times = medians(
      {
        name: step(name, 1, 4096, 8, 2, 64, 128)
        for name in ("chunked", "two_call", "reference")
      },
      3,
    )
    print("B 1 × T 4096, H 8, D 64, V 128")
    for name, seconds in times.items():
      print(
        f"  {name:10} {seconds * 1e3:8.0f} ms   {seconds / times['chunked']:.2f}× chunked"
      )
  if flags.only in (None, "twins"):
    for batch, length, packed in (
      (16, 256, False),
      (16, 256, True),
      (4, 1024, False),
      (4, 1024, True),
    ):
      candidates = {
        "DIFF": step("chunked", batch, length, 4, 2, 32, 64, packed),
        "twin": step("chunked", batch, length, 8, 1, 32, 32, packed),
      }
      diff, twin = medians(candidates, 25).values()
      shape = f"B {batch} × T {length}, D 32{', packed' if packed else ''}"
      print(
        f"{shape}: DIFF {diff * 1e3:.1f} ms, twin {twin * 1e3:.1f} ms, DIFF/twin {diff / twin:.2f}"
      )
  if flags.only in (None, "curve"):
    print("Cost per token, B 1, H 2, D 64, V 128")
    for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
      seconds = medians(
        {"chunked": step("chunked", 1, length, 2, 2, 64, 128)},
        9 if length < 8192 else 3,
      )["chunked"]
      print(
        f"  T {length:6}: {seconds / length * 1e6:7.1f} µs a token, {seconds / length**2 * 1e9:5.1f} ns a token and key"
      )


if __name__ == "__main__":
  main()
