"""A machine that has the TPU's library but no TPU: libtpu is installed for its compiler, as by '.[dev]'."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import pkgutil
import re
import sys

# JAX and libtpu set these themselves where there is no TPU.
_NOT_ASKING = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")
_GOOGLE = "0x1ae0"  # PCI's number of the vendor


def skip() -> None:
  """Lets JAX compute on the CPU at once where it would look for a TPU in vain, and libtpu would print errors about it.

  Whatever may be an accelerator, or may ask for one, leaves JAX as it is. Call it before JAX makes its backends; later it changes nothing.
  """
  jax = sys.modules.get("jax")
  chosen = os.environ.get("JAX_PLATFORMS") or (jax and jax.config.jax_platforms)
  if (
    chosen
    or importlib.util.find_spec("libtpu") is None
    or _may_have_tpu()
    or _may_have_another_accelerator()
  ):
    return
  os.environ["JAX_PLATFORMS"] = "cpu"
  if jax:  # it has read the variable already
    jax.config.update("jax_platforms", "cpu")


def _may_have_tpu() -> bool:
  asked = any(
    re.search("^(LIB)?TPU_|_TPU_", name)
    for name in os.environ
    if name not in _NOT_ASKING
  )
  devices = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
  return (
    asked
    or bool(devices)
    or any(
      _vendor(path) == _GOOGLE
      for path in glob.glob("/sys/bus/pci/devices/*/vendor")
    )
  )


def _vendor(path: str) -> str:
  try:
    return pathlib.Path(path).read_text(encoding="utf-8").strip()
  except OSError:
    return _GOOGLE  # it may be one


def _may_have_another_accelerator() -> bool:
  """True if JAX has another plugin than NVIDIA's, or that one and a GPU."""
  namespace = importlib.util.find_spec("jax_plugins")
  plugins = {
    module.name
    for module in pkgutil.iter_modules(
      namespace.submodule_search_locations if namespace else []
    )
  }
  plugins |= {
    point.name for point in importlib.metadata.entry_points(group="jax_plugins")
  }
  nvidia = {name for name in plugins if name.startswith("xla_cuda")}
  return bool(plugins - nvidia) or bool(
    nvidia and (glob.glob("/dev/nvidia*") or os.path.exists("/dev/dxg"))
  )
