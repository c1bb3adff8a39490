"""Speed and memory of differential attention's implementations.

    python -m benchmarks.attention
    python -m benchmarks.attention --only twins
    python -m benchmarks.attention --memory

Prints three tables of times: the implementations, DIFF relative to a
Transformer, and the time per token by length. The Transformer has equal
projections: twice the heads, each with one map and values half as wide. Times
are medians, measured with the memory allocator of training.

`--memory` prints the peak memory of a process that runs forward and backward at
T = 16,384.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import machine
from benchmarks.timing import median_seconds
from diffjax.host.runtime import keep_freed_memory
from diffjax.ops.diff_attention import diff_attention

IMPLEMENTATIONS = ("chunked", "two_call", "reference")
TABLES = ("implementations", "twins", "curve")
CURVE_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of a call of attention.

  Attributes:
    B: Number of rows.
    T: Number of tokens of a row.
    H: Number of heads.
    G: Number of maps of a head.
    D: Width of queries and keys.
    V: Width of values.
    is_packed: Whether each row has three documents.
  """

  B: int
  T: int
  H: int
  G: int
  D: int
  V: int
  is_packed: bool = False


# The shape of --memory.
MEMORY_SHAPE = Shape(B=1, T=16384, H=8, G=2, D=64, V=128)


def make_step(implementation: str, shape: Shape) -> Callable[[], None]:
  """Returns a function that computes attention and its gradients once.

  It waits for the result, so that it can be timed.

  Args:
    implementation: The name of an implementation of `diff_attention`.
    shape: The shape of the random inputs.
  """
  q_key, k_key, v_key, d_out_key = jax.random.split(jax.random.key(0), 4)
  maps_shape = (shape.B, shape.T, shape.H, shape.G, shape.D)
  values_shape = (shape.B, shape.T, shape.H, shape.V)
  q = jax.random.normal(q_key, maps_shape)
  k = jax.random.normal(k_key, maps_shape)
  v = jax.random.normal(v_key, values_shape)
  d_out = jax.random.normal(d_out_key, values_shape)
  # λ. A Transformer has one map, and no λ.
  lam = None
  if shape.G > 1:
    lam = jnp.full((shape.B, shape.T, shape.H), 0.5)
  segment_ids = None
  if shape.is_packed:
    ids_of_row = jnp.arange(shape.T) * 3 // shape.T
    segment_ids = jnp.broadcast_to(ids_of_row, (shape.B, shape.T))

  def attend(q, k, v, lam):
    return diff_attention(
      q,
      k,
      v,
      lam,
      q_segment_ids=segment_ids,
      implementation=implementation,
    )

  # Two programs, as in training, where the layers' backward pass cannot reuse
  # the logits of the forward pass.
  @jax.jit
  def forward(q, k, v, lam):
    return jax.vjp(attend, q, k, v, lam)

  @jax.jit
  def backward(pull_back, d_out):
    return pull_back(d_out)

  def run() -> None:
    out, pull_back = forward(q, k, v, lam)
    jax.block_until_ready((out, backward(pull_back, d_out)))

  return run


def print_implementations() -> None:
  """Prints the time of each implementation relative to `chunked`."""
  shape = Shape(B=1, T=4096, H=8, G=2, D=64, V=128)
  candidates = {name: make_step(name, shape) for name in IMPLEMENTATIONS}
  seconds = median_seconds(candidates, repetitions=3)
  print("B 1 × T 4096, H 8, D 64, V 128")
  for name in IMPLEMENTATIONS:
    milliseconds = seconds[name] * 1e3
    ratio = seconds[name] / seconds["chunked"]
    print(f"  {name:10} {milliseconds:8.0f} ms   {ratio:.2f}× chunked")


def print_twins() -> None:
  """Prints the time of DIFF relative to a Transformer of the same width."""
  for B, T in ((16, 256), (4, 1024)):
    for is_packed in (False, True):
      # The Transformer has twice the heads, each with one map and half of V.
      diff = Shape(B, T, H=4, G=2, D=32, V=64, is_packed=is_packed)
      twin = Shape(B, T, H=8, G=1, D=32, V=32, is_packed=is_packed)
      candidates = {
        "diff": make_step("chunked", diff),
        "twin": make_step("chunked", twin),
      }
      seconds = median_seconds(candidates, repetitions=25)
      packed = ", packed" if is_packed else ""
      diff_milliseconds = seconds["diff"] * 1e3
      twin_milliseconds = seconds["twin"] * 1e3
      ratio = seconds["diff"] / seconds["twin"]
      print(
        f"B {B} × T {T}, D 32{packed}: DIFF {diff_milliseconds:.1f} ms,"
        f" twin {twin_milliseconds:.1f} ms, DIFF/twin {ratio:.2f}"
      )


def print_curve() -> None:
  """Prints the time per token by length."""
  print("Cost per token, B 1, H 2, D 64, V 128")
  for T in CURVE_LENGTHS:
    step = make_step("chunked", Shape(B=1, T=T, H=2, G=2, D=64, V=128))
    repetitions = 9 if T < 8192 else 3
    seconds = median_seconds({"chunked": step}, repetitions)["chunked"]
    per_token = seconds / T * 1e6
    per_pair = seconds / T**2 * 1e9
    print(
      f"  T {T:6}: {per_token:7.1f} µs a token,"
      f" {per_pair:5.1f} ns a token and key"
    )


def print_memory() -> None:
  """Prints the peak memory of another process that runs one step."""
  child = subprocess.run(
    [sys.executable, "-m", "benchmarks.attention", "--child"],
    capture_output=True,
    text=True,
    check=True,
  )
  peak_kib = int(child.stdout)
  print(
    "chunked, B 1 × T 16,384, H 8, D 64: peak memory of the process"
    f" {peak_kib / 2**20:.2f} GiB"
  )


def main() -> None:
  """Prints the tables of times, or the peak memory."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--memory", action="store_true", help="peak memory instead of times"
  )
  parser.add_argument("--only", choices=TABLES, help="one table of times")
  parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    make_step("chunked", MEMORY_SHAPE)()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return

  print(
    f"JAX {jax.__version__}, {jax.default_backend()}, {machine()}, float32,"
    " forward + backward"
  )
  if flags.memory:
    print_memory()
    return
  keep_freed_memory()
  if flags.only in (None, "implementations"):
    print_implementations()
  if flags.only in (None, "twins"):
    print_twins()
  if flags.only in (None, "curve"):
    print_curve()


if __name__ == "__main__":
  main()
