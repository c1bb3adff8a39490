"""ptxas, which assembles the GPU kernels: its version, and whether it can be trusted with their products."""

from __future__ import annotations

import functools
import pathlib
import re
import shutil
import subprocess

SAFE = (
  13,
  3,
)  # before it, a product with an operand in registers, as all of these kernels have, can come out wrong in silence


def version(path: str | pathlib.Path) -> tuple[int, ...]:
  """A ptxas's version, as (13, 5, 37); () if it does not run."""
  try:
    said = subprocess.run(
      [str(path), "--version"], capture_output=True, text=True, timeout=60
    ).stdout
  except (OSError, subprocess.TimeoutExpired):
    return ()
  found = re.search(r"\bV(\d+(?:\.\d+)*)", said)
  return tuple(map(int, found[1].split("."))) if found else ()


@functools.cache
def distrust() -> str | None:
  """The reason not to trust what this machine's ptxas makes of the kernels, if so. Mosaic takes the first one on PATH."""
  path = shutil.which("ptxas")
  if path is None or not (found := version(path)) or found >= SAFE:
    return None
  dotted = lambda numbers: ".".join(map(str, numbers))
  return (
    f"ptxas {dotted(found)} ({path}) would assemble the GPU kernels, and before {dotted(SAFE)} it can corrupt their products; "
    f"pip install 'nvidia-cuda-nvcc>={dotted(SAFE)}' and put its nvidia/cu13/bin first on PATH"
  )
