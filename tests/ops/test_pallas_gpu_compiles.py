"""The GPU kernels go through the real compiler for Hopper (sm_90a), on a machine without a GPU.

What is compiled is a gradient through `diff_attention(implementation="pallas_gpu")`, and decoding. What fails here would fail on the GPU:
layouts that the chip does not have, shared memory that runs out. And ptxas tells what would make a kernel slow: registers that spill, and
products that it had to run one after the other. That the numbers are right is checked elsewhere, in the interpreter.

It needs the compiler's packages, without a GPU or a driver:
  pip install --no-deps jax-cuda13-plugin==JAX jax-cuda13-pjrt==JAX nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import pytest

from benchmarks.gpu import ptxas

ROOT = pathlib.Path(__file__).parents[2]
QUICK = [{"D": 64, "remat": True}, {"D": 128, "V": 128, "M": 1, "segments": True}, {"D": 128, "decode": True}]
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


# What ptxas may spill, bytes stored and loaded by a thread, and what was measured with ptxas 13.5: (kernel, width of queries) → at most.
# What is not here may spill nothing, nor may its products wait for one another. The forward kernel keeps one loop bound with a window.
SPILLS = {("forward_v1", 64): 16, ("d_kv_v1", 128): 1200}

pytestmark = [
  pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the GPU kernels need JAX 0.11.2 or newer"),
  pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="the compiler for Hopper is not installed: the packages are named at the top of this file",
  ),
]


def _check(cases: list[dict]) -> list[str]:
  """Compiles in another process; what is wrong, one line each."""
  with tempfile.TemporaryDirectory() as dump:
    environment = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": dump, "MOSAIC_GPU_DUMP_PTXAS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = os.pathsep.join([str(ptxas.newest().parent), os.environ["PATH"]])  # Mosaic takes the first one on PATH
    command = [sys.executable, __file__, json.dumps(cases)]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
  results = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
  wrong = []
  for result in results:
    print(json.dumps(result))
    case = result["case"]
    kind = "plain" if case.get("G") == 1 else "v2" if case.get("M") == 1 else "v1"
    if "error" in result:
      wrong.append(f"{case}: {result['error']}")
      continue
    expected = ["decode"] if case.get("decode") else [f"d_kv_{kind}", f"d_q_{kind}", f"forward_{kind}"]
    if sorted(result["kernels"]) != expected or result["forward_calls"] != ("forward" in expected[-1]):
      wrong.append(f"{case}: kernels {sorted(result['kernels'])}, the forward one {result['forward_calls']} times")
    for name, said in result["kernels"].items():
      most = SPILLS.get((name, 64 if case["D"] <= 64 else 128), 0)
      if said["spilled"] > most or (said["serialized"] and not most):
        wrong.append(f"{case}: {name}: {said}")
  if len(results) < len(cases):
    wrong.append(f"{cases[len(results)]}: the compiler ended with {process.returncode}\n{process.stderr[-2000:]}")
  return wrong


def test_forward_and_backward_compile():
  wrong = _check(QUICK)
  assert not wrong, "\n".join(wrong)


@pytest.mark.full
def test_every_shape_and_mask_compiles():
  wrong = _check(CASES)
  assert not wrong, "\n".join(wrong)


def _compile(cases: list[dict]) -> None:
  """The other process: prints one line of JSON a case."""
  import warnings

  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding
  from jax.sharding import PartitionSpec as P

  from diffjax.ops.diff_attention import RESIDUAL_NAMES, decode_attention, diff_attention

  warnings.simplefilter("ignore")
  dump = os.environ["MOSAIC_GPU_DUMP_TO"]
  device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=ptxas.H100).devices[0]
  mesh = Mesh([device], ("data",))
  struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

  def lower(
    T=2048, D=64, V=None, H=2, K=1, G=2, M=2, B=2, dtype="bfloat16", segments=False, offsets=False, window=None, causal=True, remat=False,
    decode=False,
  ):  # fmt: skip
    if decode:
      cache = [struct((B, K, T, width), dtype) for width in (M * D, V or 2 * D)]
      arrays = [struct((B, H, G, D), dtype), *cache, struct((B, H), jnp.float32) if G == 2 else None, struct((B,), jnp.int32)]
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(lambda *a: decode_attention(*a, window=window, implementation="pallas_gpu")).lower(*arrays)
    arrays = [struct((B, T, H, G, D), dtype), struct((B, T, K, M, D), dtype), struct((B, T, K, V or 2 * D), dtype)]
    arrays += [struct((B, T, H), jnp.float32)] if G == 2 else []
    extra = {}
    if segments:
      extra["q_segment_ids"] = struct((B, T), jnp.int32)
    if offsets:
      extra["q_offset"] = struct((B,), jnp.int32)
    f = lambda arrays, extra: diff_attention(*arrays, **extra, window=window, causal=causal, implementation="pallas_gpu")
    loss = lambda arrays, extra: jnp.sum(jnp.sin(f(arrays, extra).astype(jnp.float32)))
    if remat:
      loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.jit(jax.grad(loss)).lower(arrays, extra)

  for case in cases:
    start, result = time.perf_counter(), {"case": case}
    for path in glob.glob(f"{dump}/*"):
      os.remove(path)
    try:
      compiled = lower(**case).compile()
      result["temporaries"] = compiled.memory_analysis().temp_size_in_bytes
      calls = [line for line in compiled.as_text().splitlines() if "custom_call_target=" in line and "mosaic_gpu" in line]
      result["forward_calls"] = sum("diff_attention_forward" in line for line in calls)
      result["kernels"] = {}
      for path in sorted(glob.glob(f"{dump}/*.ptxas")):
        said = pathlib.Path(path).read_text()
        name = re.search(r"diff_attention_(\w+)_mosaic", said)
        result["kernels"][name[1] if name else path] = {
          "registers": int(re.findall(r"Used (\d+) registers", said)[-1]),
          "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
          "serialized": "serializ" in said,
        }
    except Exception as error:  # told by the test, with the case that it belongs to
      result["error"] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(result | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
  _compile(json.loads(sys.argv[1]))
