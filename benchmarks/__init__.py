"""Commands that print a ratio, a speed or a count of failures."""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys
import types
from typing import Any


def cpu_name() -> str:
  """Returns the CPU's name, family and model, as Linux reports them.

  In a virtual machine the name alone may not identify the CPU.
  """
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
  except OSError:
    return platform.processor()

  first_cpu = text.partition("\n\n")[0]
  fields = {}
  for line in first_cpu.splitlines():
    name, _, value = line.partition(":")
    fields[name.strip()] = value.strip()
  try:
    family = f"family {fields['cpu family']}, model {fields['model']}"
    return f"{fields['model name']} ({family})"
  except KeyError:
    return platform.processor()


def machine() -> str:
  """Returns the CPU's name and the number of CPUs that may be used."""
  return f"{cpu_name()}, {len(os.sched_getaffinity(0))} CPUs"


def import_tokamax() -> str | None:
  """Imports tokamax without its profiler.

  tokamax imports a profiler of 30 MB that attention does not need. If it is not
  installed, an empty module takes its place.

  Returns:
    The reason why tokamax cannot be used. None if it was imported.
  """
  try:
    importlib.metadata.version("tokamax")
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
  if importlib.util.find_spec("xprof") is None:
    tools: Any = types.ModuleType("xprof.cli.tools")
    tools.get_kernel_stats_tool = None
    sys.modules["xprof"] = types.ModuleType("xprof")
    sys.modules["xprof.cli"] = types.ModuleType("xprof.cli")
    sys.modules["xprof.cli.tools"] = tools
  try:
    import tokamax  # noqa: F401
  except ImportError as error:
    return f"cannot be imported: {error}"
  return None
