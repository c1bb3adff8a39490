"""Milliseconds of a program, on the device where that can be had, and what the GPU's clocks and power were meanwhile."""

from __future__ import annotations

import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np

FIELDS = {
  "clocks.sm": "sm_mhz",
  "clocks.mem": "memory_mhz",
  "power.draw": "watts",
  "temperature.gpu": "celsius",
}  # of nvidia-smi

_WARM_UP = (
  0.2  # seconds of calls before any is timed: an idle GPU's clocks are low
)


def milliseconds(program, input_sets) -> tuple[float, str, dict[str, float]]:
  """Median of a call's milliseconds over several calls on inputs that rotate, how they were measured, and those of each kernel.

  They are the sums of the times of the program's kernels on the device (CUPTI); where CUPTI cannot be had, the host's clock's over calls in
  a row.
  """
  jax.block_until_ready(program(*input_sets[0]))
  begun, taken_once = time.perf_counter(), 0.0
  while time.perf_counter() < begun + _WARM_UP:
    start = time.perf_counter()
    jax.block_until_ready(program(*input_sets[-1]))
    taken_once = time.perf_counter() - start
  calls = int(np.clip(0.5 / taken_once / len(input_sets), 1, 10))
  try:
    from jax.experimental.mosaic.gpu import profiler

    found: list[list[tuple[str, float]]] = []
    for inputs in input_sets:
      _, timings = profiler.measure(program, aggregate=False, iterations=calls)(
        *inputs
      )
      found += [timings] if calls == 1 else timings
    kernels: dict[str, float] = {}
    for name, taken in found[-1]:
      name = _short(name)
      kernels[name] = round(kernels.get(name, 0) + taken, 4)
    return (
      statistics.median(sum(taken for _, taken in call) for call in found),
      "device",
      kernels,
    )
  except Exception as error:  # whatever the profiler lacks on this machine, times by the clock are better than none
    print(
      f"no device times ({type(error).__name__}: {error}); the host's clock instead",
      file=sys.stderr,
    )
  taken = []
  for inputs in input_sets:
    start = time.perf_counter()
    jax.block_until_ready([program(*inputs) for _ in range(calls)])
    taken.append((time.perf_counter() - start) / calls * 1e3)
  return statistics.median(taken), "clock", {}


def kernels(function) -> dict[str, float]:
  """Milliseconds of each kernel of a call, the longest first, by JAX's profiler: for programs that donate their arguments."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      function()
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    return by_kernel(jax.profiler.ProfileData.from_file(str(path)))


def by_kernel(profile: Any) -> dict[str, float]:
  """The sums over all streams of a GPU: {} without one."""
  found: dict[str, float] = {}
  for line in (
    line
    for plane in profile.planes
    if plane.name.startswith("/device:GPU")
    for line in plane.lines
  ):
    if line.name.startswith("Stream"):
      for event in line.events:
        name = _short(event.name)
        found[name] = found.get(name, 0) + event.duration_ns / 1e6
  return {
    name: round(ms, 3)
    for name, ms in sorted(found.items(), key=lambda x: -x[1])
  }


def _short(name: str) -> str:
  """A kernel's name without what Mosaic and C++ add."""
  return re.sub(r"_mosaic.*|^void ", "", name)[:60]


class Gauge:
  """Reads the GPU's clocks, power and temperature in the background, where there is nvidia-smi. A context manager; it changes nothing."""

  def __init__(self, command: list[str] | None = None):
    query = [
      "nvidia-smi",
      f"--query-gpu={','.join(FIELDS)}",
      "--format=csv,noheader,nounits",
      "--loop-ms=200",
    ]
    self._command = command or (query if shutil.which("nvidia-smi") else None)
    self._samples: list[list[float]] = []

  def __enter__(self) -> Gauge:
    if self._command:
      self._process = subprocess.Popen(
        self._command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
      )
      threading.Thread(target=self._read, daemon=True).start()
    return self

  def __exit__(self, *_: Any) -> None:
    if self._command:
      self._process.kill()
      self._process.wait()

  def _read(self) -> None:
    assert self._process.stdout
    for line in self._process.stdout:
      number = lambda text: (
        float(text) if re.fullmatch(r"\s*[\d.]+\s*", text) else float("nan")
      )  # "[N/A]"
      self._samples.append([number(text) for text in line.split(",")])

  def take(self) -> dict[str, list[float]]:
    """Least, median and most since the last time, by field; {} if nothing was read."""
    samples, self._samples = self._samples, []
    columns = zip(FIELDS.values(), zip(*samples, strict=False), strict=False)
    known = {name: [x for x in column if x == x] for name, column in columns}
    return {
      name: [min(x), statistics.median(x), max(x)]
      for name, x in known.items()
      if x
    }
