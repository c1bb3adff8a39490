"""Makes JAX use the CPU on machines that have libtpu, but no TPU.

The extra 'dev' installs libtpu, because its compiler works without a TPU.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import pkgutil
import re
import sys
from typing import Any

# JAX and libtpu set these on machines without a TPU.
_VARIABLES_WITHOUT_TPU = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")
# Other variables with such names ask for a TPU or configure one, for example
# TPU_NAME, LIBTPU_INIT_ARGS and COLAB_TPU_ADDR.
_TPU_VARIABLE = re.compile("^(LIB)?TPU_|_TPU_")

# The PCI number of the vendor Google.
_GOOGLE = "0x1ae0"


def skip() -> None:
  """Makes JAX use the CPU if libtpu is installed and there is no accelerator.

  Otherwise JAX would search for a TPU, and libtpu would print errors. Does
  nothing if the machine may have an accelerator or the user may want one.
  Call this before JAX creates its backends; later it has no effect.
  """
  jax = sys.modules.get("jax")
  if _is_platform_chosen(jax):
    return
  if importlib.util.find_spec("libtpu") is None:
    return
  if _may_have_tpu() or _may_have_another_accelerator():
    return
  os.environ["JAX_PLATFORMS"] = "cpu"
  if jax is not None:
    # JAX has been imported, and has read the variable already.
    jax.config.update("jax_platforms", "cpu")


def _is_platform_chosen(jax: Any) -> bool:
  """Returns True if the user has chosen the devices that JAX uses.

  Args:
    jax: The module, or None if it has not been imported.
  """
  if os.environ.get("JAX_PLATFORMS"):
    return True
  if jax is None:
    return False
  return bool(jax.config.jax_platforms)


def _may_have_tpu() -> bool:
  """Returns True if there may be a TPU, or the environment asks for one."""
  for name in os.environ:
    if name in _VARIABLES_WITHOUT_TPU:
      continue
    if _TPU_VARIABLE.search(name):
      return True
  # The drivers of TPUs create these files.
  if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"):
    return True
  for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
    if _pci_vendor(path) == _GOOGLE:
      return True
  return False


def _pci_vendor(path: str) -> str:
  """Returns the vendor of a PCI device, or Google's if it cannot be read."""
  try:
    return pathlib.Path(path).read_text(encoding="utf-8").strip()
  except OSError:
    return _GOOGLE


def _may_have_another_accelerator() -> bool:
  """Returns True if JAX has a plugin for hardware that may be present.

  NVIDIA's plugin is ignored on a machine without an NVIDIA GPU.
  """
  plugins = _find_jax_plugins()
  nvidia_plugins = {name for name in plugins if name.startswith("xla_cuda")}
  if plugins - nvidia_plugins:
    return True
  if not nvidia_plugins:
    return False
  # Linux on Windows (WSL) has GPUs at /dev/dxg.
  return bool(glob.glob("/dev/nvidia*")) or os.path.exists("/dev/dxg")


def _find_jax_plugins() -> set[str]:
  """Returns the names of the installed plugins of JAX.

  A plugin is a module in the namespace package `jax_plugins`, or an entry point
  of the group "jax_plugins".
  """
  entry_points = importlib.metadata.entry_points(group="jax_plugins")
  plugins = {entry_point.name for entry_point in entry_points}
  namespace = importlib.util.find_spec("jax_plugins")
  # The locations are None if `jax_plugins` is a module, not a package. Without
  # this check, iter_modules(None) would return all modules.
  if namespace is not None and namespace.submodule_search_locations is not None:
    modules = pkgutil.iter_modules(namespace.submodule_search_locations)
    plugins.update(module.name for module in modules)
  return plugins
