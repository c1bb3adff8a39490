"""Finds the assembler of the GPU kernels, and checks that it is safe.

Pallas hands a kernel to XLA as PTX. JAX 0.11 looks for ptxas on PATH, then in
/usr/local/cuda, then in the package nvidia-cuda-nvcc. (XLA's own fusions look
in the package first.) JAX 0.12 uses the library nvJitLink if it can be loaded,
and `jax[cuda13]` installs it.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax

# The oldest safe release of CUDA. Before it, ptxas can silently corrupt matrix
# products with an operand in registers. All kernels here have such products.
SAFE = (13, 3)
# The first JAX that assembles kernels with nvJitLink. It compiles them for
# linking, where setmaxnreg is ignored: the forward, dQ and dK/dV kernels of V1
# at D 128 then spill 2.0, 3.4 and 7.1 KB instead of 0, 44 and 132 bytes.
_NVJITLINK_SINCE = (0, 12)
_REMEDY = "pip install 'diffjax[cuda]'"


def version(path: str | pathlib.Path) -> tuple[int, ...]:
  """Returns the version of an executable of ptxas, NVIDIA's assembler.

  Example:
    "Cuda compilation tools, release 13.5, V13.5.37" → (13, 5, 37)

  Args:
    path: the executable.

  Returns:
    The version. An empty tuple, which is less than all others, if it does not
    run or prints no version.
  """
  try:
    process = subprocess.run(
      [str(path), "--version"], capture_output=True, text=True, timeout=60
    )
  except (OSError, subprocess.TimeoutExpired):
    return ()
  match = re.search(r"\bV(\d+(?:\.\d+)*)", process.stdout)
  if match is None:
    return ()
  return tuple(int(number) for number in match[1].split("."))


def packaged() -> pathlib.Path | None:
  """Returns ptxas of the package nvidia-cuda-nvcc, or None without it."""
  for folder in sys.path:
    path = pathlib.Path(folder, "nvidia/cu13/bin/ptxas").absolute()
    if path.is_file():
      return path
  return None


def prefer_packaged() -> None:
  """Puts the packaged ptxas first on PATH if PATH has no safe one.

  Old versions of ptxas, NVIDIA's assembler, can corrupt matrix products. The
  package nvidia-cuda-nvcc brings a newer one.

  Only PATH changes which ptxas assembles Pallas's kernels. CUDA_ROOT, CUDA_HOME
  and XLA's flags do not. XLA looks ptxas up when the process compiles its first
  kernel, so PATH must change before that. Call this only if a GPU kernel is
  about to be compiled, because no other process needs a different PATH.
  """
  path = packaged()
  if path is None or version(path) < SAFE:
    return
  on_path = shutil.which("ptxas")
  if on_path is not None and version(on_path) >= SAFE:
    return
  searched = os.environ.get("PATH", os.defpath)
  os.environ["PATH"] = f"{path.parent}{os.pathsep}{searched}"


def release() -> tuple[int, int]:
  """Returns the CUDA release of the assembler that JAX uses, such as (13, 5).

  JAX reports only the newest PTX version that the assembler supports. PTX 9.5
  belongs to CUDA 13.5. For CUDA 12 the minor version is not exact.

  Raises:
    Exception: if JAX has no compiler for GPUs, or finds no assembler.
  """
  from jax._src.lib import mosaic_gpu

  ptx = mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version()
  major, minor = divmod(ptx, 10)
  # CUDA 12 has PTX 8, and CUDA 13 has PTX 9.
  return major + 4, minor


def is_loaded(library: str) -> bool:
  """Returns True if this process has loaded the library, such as "libcuda"."""
  try:
    mapped = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
  except OSError:  # not Linux
    return False
  return f"/{library}." in mapped


def is_nvjitlink_loaded() -> bool:
  """Returns True if nvJitLink is loaded. `release` loads it if it can."""
  return is_loaded("libnvJitLink")


@functools.cache
def refusal() -> str | None:
  """Returns why the kernels cannot use the assembler, or None if they can.

  The reason continues a sentence that begins with "pallas_gpu". This calls
  `prefer_packaged` first, which may change PATH.
  """
  safe_major, safe_minor = SAFE
  needed = f"needs ptxas {safe_major}.{safe_minor} or newer"
  prefer_packaged()
  try:
    major, minor = release()
  except Exception as error:  # The type depends on what is missing.
    message = str(error) or repr(error)
    first_line = message.splitlines()[0]
    return f"{needed}, and JAX finds none ({first_line}); {_REMEDY}"
  if (major, minor) < SAFE:
    # For old releases, the minor version is not exact.
    name = str(major)
    if major >= safe_major:
      name = f"{major}.{minor}"
    return (
      f"{needed}, and JAX uses ptxas of CUDA {name} here, which can corrupt"
      f" products; {_REMEDY}"
    )
  # Newer versions of JAX prefer nvJitLink, if it is installed, to ptxas.
  if jax.__version_info__ >= _NVJITLINK_SINCE and is_nvjitlink_loaded():
    return (
      f"needs ptxas, and JAX {jax.__version__} uses nvJitLink, which ignores"
      " the kernels' register counts and makes them spill;"
      f" {_REMEDY}, which brings JAX 0.11"
    )
  return None
