"""The assembler of GPU kernels: which one Mosaic really takes, and the newest one first on PATH.

JAX has two ways to ptxas; diffjax/ops/diff_attention/gpu/assembler.py describes them, and chooses for training. Here the newest one is put
first for all processes of the benchmark, and what Mosaic took is found out by a kernel.

`python -m benchmarks.gpu.ptxas` compiles a small kernel and a fusion and prints what it found, as JSON. A spy goes first on PATH for that:
a script that notes what it is given to assemble, and hands it on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from diffjax.ops.diff_attention.gpu.assembler import SAFE, packaged, version

PACKAGES = (
  "jax",
  "jaxlib",
  "jax-cuda13-plugin",
  "nvidia-cuda-nvcc",
  "nvidia-cudnn-cu13",
  "flax",
  "optax",
  "tokamax",
)
H100 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_SPY = """#!/bin/sh
for argument; do [ -f "$argument" ] && grep -o '\\.entry [A-Za-z0-9_$]*' "$argument" >> '{log}'; done
exec '{ptxas}' "$@"
"""


def newest(folder: pathlib.Path | None = None) -> pathlib.Path | None:
  """The ptxas of a folder; without one the newest of the packaged ones and of PATH's."""
  if folder is not None:
    return folder / "ptxas"
  candidates = []
  in_package = packaged()
  if in_package is not None:
    candidates.append(in_package)
  on_path = shutil.which("ptxas")
  if on_path is not None:
    candidates.append(pathlib.Path(on_path))
  return max(candidates, key=version, default=None)


def put_first(path: pathlib.Path) -> None:
  """Puts the ptxas first on PATH, for this process and those that it starts. Only before anything is compiled."""
  os.environ["PATH"] = os.pathsep.join(
    [str(path.parent.resolve()), os.environ["PATH"]]
  )


def probe() -> dict[str, Any]:
  """The environment, found in a process of its own.

  Returns:
    Backend, device, its kind, compute capability, versions of packages, and `mosaic` and `fusions`: which ptxas assembled each, as
    {"path": …, "version": "13.5.37"}, or {"unknown": why}.
  """
  first = shutil.which("ptxas")
  with tempfile.TemporaryDirectory() as folder:
    log, spy = pathlib.Path(folder, "log"), pathlib.Path(folder, "ptxas")
    environment = dict(os.environ)
    if first:
      spy.write_text(_SPY.format(log=log, ptxas=first), encoding="utf-8")
      spy.chmod(0o755)
      environment["PATH"] = os.pathsep.join([folder, environment["PATH"]])
    command = [sys.executable, "-m", "benchmarks.gpu.ptxas"]
    process = subprocess.run(
      command, env=environment, capture_output=True, text=True, timeout=180
    )
    if process.returncode:
      raise RuntimeError(f"JAX does not start here: {process.stderr[-2000:]}")
    found = json.loads(process.stdout.splitlines()[-1])
    assembled = log.read_text(encoding="utf-8") if log.exists() else ""
  compiled = found.pop("compiled")
  named = lambda path: {
    "path": str(path),
    "version": ".".join(map(str, version(path))),
  }
  for what, mark in (("mosaic", "mosaic_gpu"), ("fusions", "fusion")):
    if compiled is not True:
      found[what] = {"unknown": compiled}
    elif any(mark in line for line in assembled.splitlines()):
      found[what] = named(first)
    elif (
      what == "fusions"
      and (packaged := pathlib.Path(str(found["cuda"])) / "bin/ptxas").exists()
    ):
      found[what] = named(packaged)  # where XLA looks before PATH
    else:
      found[what] = {"unknown": f"not {first}, the first one on PATH"}
  return found


def refusal(found: dict[str, Any]) -> str | None:
  """The reason not to trust kernels of the ptxas that the probe found, if so."""
  mosaic = found["mosaic"]
  if "unknown" in mosaic:
    return (
      f"it is not known which ptxas assembles the kernels: {mosaic['unknown']}"
    )
  if tuple(map(int, mosaic["version"].split("."))) < SAFE:
    least = ".".join(map(str, SAFE))
    return f"ptxas {mosaic['version']} ({mosaic['path']}) assembles the kernels, and before {least} it can corrupt their products"
  return None


def _main() -> None:
  """The other process of `probe`."""
  import jax
  from jax._src import lib  # knows the packaged CUDA that XLA is told of

  versions = {}
  for package in PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = "none"
  device = jax.devices()[0]
  found = {
    "backend": jax.default_backend(),
    "device": device.device_kind,
    "capability": getattr(device, "compute_capability", None),
    "python": sys.version.split()[0],
    "processors": len(os.sched_getaffinity(0)),
    "versions": versions,
    "cuda": lib.cuda_path,
    "driver": "none",
  }
  if shutil.which("nvidia-smi"):
    query = [
      "nvidia-smi",
      "--query-gpu=driver_version",
      "--format=csv,noheader",
    ]
    found["driver"] = subprocess.run(
      query, capture_output=True, text=True, timeout=60
    ).stdout.strip()
  try:
    _compile(device)
    found["compiled"] = True
  except (
    Exception
  ) as error:  # the caller decides whether it goes on without knowing
    found["compiled"] = f"{type(error).__name__}: {error}"[:500]
  print(json.dumps(found))


def _compile(device) -> None:
  """Compiles a kernel of Mosaic and a fusion of XLA: for this GPU, or on another machine ahead of time for an H100."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.experimental.pallas import mosaic_gpu as plgpu

  def body(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2

  shape = jax.ShapeDtypeStruct((128,), jnp.float32)
  kernel: Any = plgpu
  double = kernel.kernel(body, out_type=shape, kernel_name="probe")
  program = jax.jit(lambda x: jnp.sum(jnp.sin(double(x)) + x))
  if device.platform == "gpu":
    jax.block_until_ready(program(jnp.zeros(shape.shape)))
    return
  target = topologies.get_topology_desc(
    platform="cuda", topology="1x1x1", target_config=H100
  ).devices[0]
  mesh = jax.sharding.Mesh([target], ("data",))
  shape = jax.ShapeDtypeStruct(
    shape.shape,
    shape.dtype,
    sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
  )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program.lower(shape).compile()


if __name__ == "__main__":
  _main()
