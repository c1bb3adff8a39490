"""Commands that print a ratio, a speed or a table of what was tried."""

import importlib.metadata
import importlib.util
import pathlib
import platform
import sys
import types
from typing import Any


def cpu_name() -> str:
  """The CPU's name, family and model, as Linux tells them: in a virtual machine the name alone may not say which CPU it is."""
  try:
    first = (
      pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    )
    fields = {
      name.strip(): value.strip()
      for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
  except (OSError, KeyError):
    return platform.processor()


def import_tokamax() -> str | None:
  """Imports tokamax, which asks for a profiler of 30 MB that attention does not need.

  Returns:
    The reason why it cannot be timed, if so.
  """
  try:
    importlib.metadata.version("tokamax")
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
  if importlib.util.find_spec("xprof") is None:
    tools: Any = types.ModuleType("xprof.cli.tools")
    tools.get_kernel_stats_tool = None
    sys.modules |= {
      "xprof": types.ModuleType("xprof"),
      "xprof.cli": types.ModuleType("xprof.cli"),
      "xprof.cli.tools": tools,
    }
  try:
    import tokamax  # noqa: F401
  except ImportError as error:
    return f"cannot be imported: {error}"
  return None
