"""The Hopper kernels on a GPU, right first and then fast: python -m benchmarks.gpu

Every kernel is checked against `reference` in float32 on fresh random inputs. Then attention forward and forward + backward, decoding, and
whole training steps are timed beside what they stand against: two cuDNN calls with V whole or halved (each map's arrays apart, so that
nothing is sliced), `chunked`, and plain attention of the Transformer's shape. All sizes have E = 2048: 2048/(2D) heads of V1, 2048/D of V2
and of the Transformer.

Times are the sums of the times of a program's kernels on the device (CUPTI), medians over several calls after a warm-up, on inputs that
rotate; where CUPTI cannot be had, the host's clock over calls in a row, which the table then says. A training step is timed by the clock.
Rates are of nominal multiply-adds, 6D + 10D a query, visible key and head of V1, 4D + 8D of V2, 4D + 10D for the two heads of D that the
Transformer has in its place, whatever the kernels execute; the backward pass is what forward + backward take less the forward pass.

What is most wanted comes first; what --seconds do not suffice for is missing from benchmarks/gpu.json and from the table. Needs nothing but
JAX, flax, optax, jaxtyping and etils. The compiler matters: ptxas before CUDA 13.3 can corrupt products with registers in silence
(pip install 'nvidia-cuda-nvcc>=13.3').
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import importlib.metadata
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.train_step import stepper
from diffjax.config import Config, DataConfig, ModelConfig, TrainConfig
from diffjax.model.attention import Attention, DiffAttention, DiffAttentionV2
from diffjax.ops.diff_attention import decode_attention, diff_attention
from diffjax.ops.diff_attention.two_call import stock_attention
from diffjax.training.flops import peak_flops, step_flops

RESULTS = pathlib.Path(__file__).with_name("gpu.json")
EMBED = 2048
LAYERS = {"v1": DiffAttention, "v2": DiffAttentionV2, "plain": Attention}
MAPS = {kind: (layer.num_maps, layer.num_key_maps, layer.value_heads) for kind, layer in LAYERS.items()}  # G, M and V/D
MULTIPLY_ADDS = {"v1": (6, 10), "v2": (4, 8), "plain": (2, 5)}  # in D, of one head, forward and backward
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}  # norm of the difference over norm; bfloat16 weights and outputs are 2⁻⁹ apart
SETS = 3  # of inputs

CHECKS = [
  dict(kind=kind, D=D, **options)
  for kind in MAPS
  for D in (64, 128)
  for options in (
    dict(T=1000),
    dict(T=640, causal=False, dtype="float16"),
    dict(T=1000, window=200, segments=True, groups=2),
    dict(T=300, S=700, q_offset=(400, 123)),
  )
] + [dict(kind="v1", D=96, T=333, segments=True), dict(kind="v1", D=128, T=130, S=514, q_offset=384), dict(kind="v2", D=64, T=1, S=1)]


def arrays(kind: str, D: int, B: int, T: int, S: int | None = None, dtype: str = "bfloat16", heads: int | None = None, groups: int = 1):
  """q, k, v and λ (None for plain attention), new ones at every call."""
  (G, M, wide), S = MAPS[kind], S or T
  H = heads or EMBED // (wide * D)
  rng = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
  normal = lambda key, *shape: jax.random.normal(key, shape, dtype)
  lam = None if G == 1 else jax.random.uniform(rng[3], (B, T, H), jnp.float32, -0.5, 1.0)
  return normal(rng[0], B, T, H, G, D), normal(rng[1], B, S, H // groups, M, D), normal(rng[2], B, S, H // groups, wide * D), lam


def compile_all(programs: dict[Any, tuple[Any, Any]]) -> dict[Any, Any]:
  """Compiled programs by name, or the error in words; compiling takes longer than running, so all are compiled at once."""

  def build(program):
    function, arguments = program
    try:
      return jax.jit(function).lower(*arguments).compile()
    except Exception as error:  # one that does not compile must not lose the others
      return f"{type(error).__name__}: {error}"[:500]

  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    return dict(zip(programs, pool.map(build, programs.values()), strict=True))


def milliseconds(program, input_sets) -> tuple[float, str, dict[str, float]]:
  """Median of a call's milliseconds on the device, how they were measured, and those of each kernel."""
  jax.block_until_ready(program(*input_sets[0]))
  start = time.perf_counter()
  jax.block_until_ready(program(*input_sets[1 % len(input_sets)]))
  calls = int(np.clip(0.5 / (time.perf_counter() - start) / len(input_sets), 1, 10))
  try:
    from jax.experimental.mosaic.gpu import profiler

    found: list[list[tuple[str, float]]] = []
    for inputs in input_sets:
      _, timings = profiler.measure(program, aggregate=False, iterations=calls)(*inputs)
      found += [timings] if calls == 1 else timings
    kernels: dict[str, float] = {}
    for name, taken in found[-1]:
      kernels[name] = kernels.get(name, 0) + taken
    return statistics.median(sum(taken for _, taken in call) for call in found), "device", kernels
  except Exception as error:  # whatever the profiler lacks on this machine, times by the clock are better than none
    _say_once(f"  no device times ({type(error).__name__}: {error}); the host's clock instead")
  taken = []
  for inputs in input_sets:
    start = time.perf_counter()
    jax.block_until_ready([program(*inputs) for _ in range(calls)])
    taken.append((time.perf_counter() - start) / calls * 1e3)
  return statistics.median(taken), "clock", {}


@functools.cache
def _say_once(line: str) -> None:
  print(line, file=sys.stderr)


def with_gradients(function):
  """Output and gradients of all arguments, for a gradient of the output that is given first."""

  def both(d_out, *arguments):
    out, pull = jax.vjp(function, *arguments)
    return out, pull(d_out)

  return both


def check(report: dict) -> None:
  """Every kernel against `reference` in float32: output and gradients, and decoding."""
  programs, inputs = {}, {}
  for n, case in enumerate(CHECKS):
    kind, D, T, S, groups = case["kind"], case["D"], case["T"], case.get("S", case["T"]), case.get("groups", 1)
    q, k, v, lam = arrays(kind, D, 2, T, S, case.get("dtype", "bfloat16"), heads=2, groups=groups)
    options = {name: case[name] for name in ("causal", "window", "q_offset") if name in case}
    if isinstance(options.get("q_offset"), tuple):
      options["q_offset"] = jnp.asarray(options["q_offset"], jnp.int32)
    if "segments" in case:
      options["q_segment_ids"] = jnp.asarray(np.sort(np.random.default_rng().integers(0, 5, (2, T)), axis=1))
    d_out = jax.random.normal(jax.random.key(n), (*q.shape[:3], v.shape[-1])).astype(q.dtype)
    for name in ("pallas_gpu", "reference"):
      given = [d_out, q, k, v] + ([] if lam is None else [lam])
      if name == "reference":
        given = [x.astype(jnp.float32) for x in given]
      attend = lambda *a, name=name, options=options: diff_attention(*a, **options, implementation=name)
      programs[n, name], inputs[n, name] = (with_gradients(attend), given), given
  cases = [json.dumps(case) for case in CHECKS]
  for kind in MAPS:
    q, k, v, lam, lengths = decoding(kind, 128, 4, 1024, heads=4)
    for name in ("pallas_gpu", "reference"):
      given = (q, k, v, *([] if lam is None else [lam]), lengths)
      if name == "reference":
        given = tuple(x.astype(jnp.float32) for x in given[:-1]) + given[-1:]
      key = len(cases), name
      programs[key], inputs[key] = (decoder(kind, "xla" if name == "reference" else name), given), given
    cases.append(json.dumps(dict(kind=kind, decode=True)))
  with jax.default_matmul_precision("highest"):
    compiled = compile_all(programs)
  for n, case in enumerate(cases):
    failed = [x for x in (compiled[n, "pallas_gpu"], compiled[n, "reference"]) if isinstance(x, str)]
    result: dict[str, Any] = {"case": json.loads(case)}
    if failed:
      result |= {"right": False, "error": failed[0]}
    else:
      actual, expected = (jax.tree.leaves(compiled[n, name](*inputs[n, name])) for name in ("pallas_gpu", "reference"))
      norm = lambda x: float(jnp.linalg.norm(jnp.ravel(x).astype(jnp.float32)))
      errors = [norm(a.astype(jnp.float32) - e.astype(jnp.float32)) / max(norm(e), 1e-3) for a, e in zip(actual, expected, strict=True)]
      result["errors"] = dict(zip(("out", "d_q", "d_k", "d_v", "d_lam"), (float(f"{error:.2e}") for error in errors), strict=False))
      result["right"] = all(error <= TOLERANCE[json.loads(case).get("dtype", "bfloat16")] for error in errors)  # False where NaN
    report["checks"].append(result)
    print(f"  {'right' if result['right'] else 'WRONG'} {case}: {result.get('errors') or result['error']}", flush=True)


def attention_programs(kind: str, D: int) -> dict[str, tuple[Any, bool]]:
  """The timed functions for a kind of attention, by name; True with those that take each map's arrays separately."""

  def two_calls(parts):
    def attend(q1, q2, k1, k2, v, lam):
      first, second = (stock_attention(q, k, v, causal=True, scale=D**-0.5, parts=parts) for q, k in ((q1, k1), (q2, k2)))
      return (first - lam[..., None] * second).astype(v.dtype)

    return attend

  named = lambda name: lambda *a: diff_attention(*a, implementation=name)
  if kind == "plain":
    return {
      "fused": (named("pallas_gpu"), False),
      "cudnn": (lambda q, k, v: stock_attention(q[:, :, :, 0], k[:, :, :, 0], v, causal=True, scale=D**-0.5), False),
    }
  programs = {"fused": (named("pallas_gpu"), False), "two_call": (two_calls(1), True), "chunked": (named("chunked"), False)}
  if kind == "v1":
    programs["two_call halved"] = (two_calls(2), True)
  return programs


def time_attention(kind: str, D: int, sizes: list[tuple[int, int]], report: dict) -> None:
  """All implementations at all (batch, length), forward and forward + backward."""
  programs, keys = {}, []
  for B, T in sizes:
    whole = jax.eval_shape(lambda B=B, T=T: arrays(kind, D, B, T))
    for name, (function, apart) in attention_programs(kind, D).items():
      given = jax.eval_shape(_apart, *whole) if apart else tuple(x for x in whole if x is not None)
      d_out = jax.ShapeDtypeStruct((B, T, whole[0].shape[2], whole[2].shape[-1]), whole[0].dtype)
      programs[B, T, name, "forward"] = function, given
      programs[B, T, name, "both"] = with_gradients(function), (d_out, *given)
      keys.append((B, T, name, apart))
  compiled = compile_all(programs)
  for B, T, name, apart in keys:
    row: dict[str, Any] = {"kind": kind, "D": D, "B": B, "T": T, "name": name}
    sets = [arrays(kind, D, B, T) for _ in range(SETS)]
    d_out = jax.random.normal(jax.random.key(0), (B, T, sets[0][0].shape[2], sets[0][2].shape[-1]), sets[0][0].dtype)
    given = [_apart(*x) if apart else tuple(a for a in x if a is not None) for x in sets]
    for direction, inputs in (("forward", given), ("both", [(d_out, *x) for x in given])):
      program = compiled[B, T, name, direction]
      if isinstance(program, str):
        row["error"] = program
        continue
      try:
        row[f"{direction}_ms"], row["clock"], kernels = milliseconds(program, inputs)
      except Exception as error:  # out of memory, say: the other implementations are still to be timed
        row["error"] = f"{type(error).__name__}: {error}"[:500]
        continue
      if direction == "both" and name == "fused":
        row["kernels_ms"] = {re.sub(r"_mosaic.*|^void ", "", kernel)[:60]: round(taken, 4) for kernel, taken in kernels.items()}
    pairs = B * sets[0][0].shape[2] * T * (T + 1) / 2
    forward, backward = (2 * n * D * pairs for n in MULTIPLY_ADDS[kind])
    if "forward_ms" in row:
      row["forward_tflops"] = round(forward / row["forward_ms"] / 1e9, 1)
    if {"forward_ms", "both_ms"} <= row.keys():
      row["backward_tflops"] = round(backward / (row["both_ms"] - row["forward_ms"]) / 1e9, 1)
    report["attention"].append(row)
  save(report)


def _apart(q, k, v, lam):
  return q[:, :, :, 0], q[:, :, :, 1], k[:, :, :, 0], k[:, :, :, -1], v, lam


def decoding(kind: str, D: int, B: int, S: int, heads: int | None = None):
  """q, k, v, λ and lengths of one new token a row, whose caches are at least three quarters full."""
  q, k, v, lam = arrays(kind, D, B, 1, S, heads=heads)
  lengths = jnp.asarray(np.random.default_rng().integers(S * 3 // 4, S + 1, B), jnp.int32)
  cached = lambda x: jnp.moveaxis(x, 1, 2).reshape(B, x.shape[2], S, -1)
  return q[:, 0], cached(k), cached(v), None if lam is None else lam[:, 0], lengths


def decoder(kind: str, implementation: str):
  """`decode_attention` of arrays alone."""

  def attend(q, k, v, *rest):
    lam, lengths = (None, *rest) if kind == "plain" else rest
    return decode_attention(q, k, v, lam, lengths, implementation=implementation)

  return attend


def time_decoding(report: dict, B: int = 32, S: int = 8192) -> None:
  """One token of a batch of rows with long caches, D 128: the time, and the bytes that the rows see over it."""
  for kind in MAPS:
    sets = [tuple(x for x in decoding(kind, 128, B, S) if x is not None) for _ in range(SETS)]
    seen = statistics.median(int(jnp.sum(x[-1])) for x in sets) * sets[0][1].shape[1] * (sets[0][1].shape[3] + sets[0][2].shape[3]) * 2
    programs = {name: (decoder(kind, name), sets[0]) for name in ("pallas_gpu", "xla")}
    for name, program in compile_all(programs).items():
      row: dict[str, Any] = {"kind": kind, "B": B, "S": S, "name": name}
      if isinstance(program, str):
        row["error"] = program
      else:
        row["ms"], row["clock"], _ = milliseconds(program, sets)
        row["gigabytes_per_second"] = round(seen / row["ms"] / 1e6)
      report["decode"].append(row)
  save(report)


def time_steps(report: dict, length: int = 4096, layers: int = 4, repetitions: int = 10) -> None:
  """Training steps on packed rows of a model of 1.4B's widths with fewer layers, in turn."""
  shape = dict(vocab_size=100_288, num_layers=layers, embed_dim=EMBED, head_dim=128, ffn_dim=5440, max_length=length)
  models = {}
  for attention, heads in (("diff", 8), ("softmax", 16)):
    for name in ("pallas_gpu", "two_call"):
      kind = dict(attention=attention, num_heads=heads, num_kv_heads=heads, head_norm=attention == "diff", attention_implementation=name)
      models[f"{attention} {name}"] = ModelConfig(**kind, **shape)
  rows = 16384 // length
  peak = peak_flops(jax.devices()[0].device_kind)
  runs, taken = {}, {}
  for name, model in models.items():
    try:
      runs[name] = stepper(Config(model=model, data=DataConfig(length=length), train=TrainConfig(batch_size=rows)))
    except Exception as error:  # one that fails must not cost the others their times: a GPU is at hand for minutes
      report["steps"].append({"name": name, "error": f"{type(error).__name__}: {error}"[:500]})
  for n in range(repetitions + 2):
    for name, run in runs.items():
      start = time.perf_counter()
      run()
      if n >= 2:
        taken.setdefault(name, []).append(time.perf_counter() - start)
  for name, seconds in taken.items():
    median = statistics.median(seconds)
    row = {"name": name, "T": length, "layers": layers, "seconds": median, "tokens_per_second": round(rows * length / median)}
    if peak:
      row["mfu"] = round(step_flops(models[name], length, rows * length).training / median / peak, 4)
    report["steps"].append(row)
  save(report)


def environment() -> dict[str, Any]:
  """The device, driver and versions of this run, and the ptxas that JAX finds."""
  versions = {}
  for package in ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13", "flax", "optax"):
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = "none"
  packaged = [path for folder in sys.path for path in pathlib.Path(folder or ".").glob("nvidia/*/bin/ptxas")]
  said = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which(command[0]) else "none"
  return {
    "date": datetime.date.today().isoformat(),
    "device": jax.devices()[0].device_kind,
    "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "versions": versions,
    "ptxas": {str(path): said(str(path), "--version").splitlines()[-1:] for path in [*packaged, shutil.which("ptxas") or "ptxas"]},
  }


def save(report: dict) -> None:
  """At once, so that a run that is cut short loses nothing."""
  text = json.dumps(report, indent=1)
  RESULTS.write_text(re.sub(r"\n {3,}", " ", re.sub(r"\n  ([}\]])", r" \1", text)) + "\n")


def table(report: dict) -> str:
  """Markdown, of what there is."""
  lines = [
    "| attention | T | fused forward, both (ms) | TF/s forward, backward | two_call | chunked | plain | two_call/fused | plain/fused |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  rows = {(x["kind"], x["D"], x["T"], x["name"]): x for x in report["attention"]}
  least = lambda found: min((x for x in found if x and "both_ms" in x), key=lambda x: x["both_ms"], default=None)
  shown = lambda x: f"{x['forward_ms']:.2f}, {x['both_ms']:.2f}" if x else "–"
  for kind, D, T in dict.fromkeys(key[:3] for key in rows if key[0] != "plain"):
    of = lambda name, kind=kind, D=D, T=T: least([rows.get((kind, D, T, name))])
    fused, two = of("fused"), least([of("two_call"), of("two_call halved")])
    plain = least([rows.get(("plain", D, T, name)) for name in ("fused", "cudnn")])
    ratio = lambda x, fused=fused: f"{x['both_ms'] / fused['both_ms']:.2f}" if x and fused else "–"
    rates = f"{fused['forward_tflops']:.0f}, {fused['backward_tflops']:.0f}" if fused else "–"
    halved = " (V halved)" if two and two["name"].endswith("halved") else ""
    plainly = f"{shown(plain)} ({plain['name']})" if plain else "–"
    line = [f"{kind} D {D}", T, shown(fused), rates, shown(two) + halved, shown(of("chunked")), plainly, ratio(two), ratio(plain)]
    lines.append("| " + " | ".join(map(str, line)) + " |")
  for row in report["decode"]:
    what = f"{row['ms'] * 1e3:.0f} µs, {row['gigabytes_per_second']} GB/s" if "ms" in row else row["error"]
    lines.append(f"decode {row['kind']} {row['name']}, B {row['B']}, S {row['S']}: {what}")
  for row in report["steps"]:
    what = f"{row['tokens_per_second']:,} tokens/s, MFU {row.get('mfu', float('nan')):.1%}" if "seconds" in row else row["error"]
    lines.append(f"step {row['name']}: {what}")
  wrong = sum(not x["right"] for x in report["checks"])
  lines.append(f"{len(report['checks']) - wrong} of {len(report['checks'])} checks right")
  if any(x.get("clock") == "clock" for x in (*report["attention"], *report["decode"])):
    lines.append("some times are the host's clock's, with what it takes to start a program")
  return "\n".join([*lines, *(f"missing: {x}" for x in report["missing"])])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--seconds", type=float, default=510, help="nothing is begun after these")
  parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384, 2048], help="each with --tokens tokens in all")
  parser.add_argument("--tokens", type=int, default=16384)
  parser.add_argument("--longest", type=int, default=65536, help="timed as one sequence")
  parser.add_argument("--widths", nargs="+", type=int, default=[128, 64], help="D")
  flags = parser.parse_args()
  if jax.default_backend() != "gpu":
    sys.exit(f"error: this times a GPU, and the backend is {jax.default_backend()!r}")
  started = time.monotonic()
  report: dict[str, Any] = {"environment": environment(), "checks": [], "attention": [], "decode": [], "steps": [], "missing": []}
  sizes = [(flags.tokens // T, T) for T in flags.lengths] + [(1, flags.longest)]
  attention = lambda kind, D: (f"attention {kind} D {D}", lambda: time_attention(kind, D, sizes, report))
  first, *rest = flags.widths
  parts = [
    ("checks", lambda: check(report)),
    *(attention(kind, first) for kind in ("v1", "plain")),
    ("decode", lambda: time_decoding(report)),
    ("steps", lambda: time_steps(report)),
    *(attention(kind, D) for D in rest for kind in ("v1", "plain")),
    *(attention("v2", D) for D in flags.widths),
  ]
  for name, part in parts:
    if time.monotonic() - started > flags.seconds:
      report["missing"].append(f"{name}: no time was left")
      continue
    print(f"{name}, after {time.monotonic() - started:.0f} s", flush=True)
    try:
      part()
    except Exception as error:  # what comes after it is still to be measured
      report["missing"].append(f"{name}: {type(error).__name__}: {error}"[:500])
    save(report)
  print(table(report))
  sys.exit(0 if report["checks"] and all(x["right"] for x in report["checks"]) else 1)


if __name__ == "__main__":
  main()
