"""Commands that print a ratio, a speed or a table of what was tried."""

import platform


def cpu_name() -> str:
  """The CPU's name, as Linux tells it."""
  try:
    with open("/proc/cpuinfo") as file:
      return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
  except (OSError, StopIteration):
    return platform.processor()
