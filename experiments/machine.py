"""The machine on which a run was trained, in words."""

from __future__ import annotations

import os
import pathlib
import platform

from experiments.launch import Devices

# Exists on Linux only.
CPU_INFO = pathlib.Path("/proc/cpuinfo")


def describe(devices: Devices, num_slots: int) -> str:
  """Returns the devices and CPU cores of one run.

  An example is "1 × H100 (gpu), 8 × AMD EPYC".

  Args:
    devices: The devices of this machine.
    num_slots: How many runs share this machine. Each has its own accelerators,
      but all see the same CPU device.
  """
  num_devices = devices.number
  if devices.backend != "cpu":
    num_devices = devices.number // num_slots
  num_cores = max(1, (os.cpu_count() or 1) // num_slots)
  return (
    f"{num_devices} × {devices.kind} ({devices.backend}),"
    f" {num_cores} × {processor()}"
  )


def processor(cpu_info: pathlib.Path = CPU_INFO) -> str:
  """Returns the CPU's name, such as "AMD EPYC".

  Returns the machine type, such as "x86_64", if the name is unknown.

  Args:
    cpu_info: A file in the format of Linux's /proc/cpuinfo. It may not exist.
  """
  try:
    lines = cpu_info.read_text(encoding="utf-8").splitlines()
  except OSError:
    return platform.machine()
  for line in lines:
    field, _, name = line.partition(":")
    if field.strip() == "model name":
      return name.strip()
  return platform.machine()
