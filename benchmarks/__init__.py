"""Commands that print a ratio, a speed or a table of what was tried."""

import pathlib
import platform


def cpu_name() -> str:
  """The CPU's name, family and model, as Linux tells them: in a virtual machine the name alone may not say which CPU it is."""
  try:
    first = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
  except (OSError, KeyError):
    return platform.processor()
