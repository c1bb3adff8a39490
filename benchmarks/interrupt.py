"""Interrupts training at random moments of a cold start.

    python -m benchmarks.interrupt --times=50

Each start of `python -m diffjax.train --config=configs/tiny.py` has an empty
cache and must prepare its rows. It gets one Ctrl-C, as a terminal sends it: to
the command and to its workers. The moment is random, and early ones are more
likely. It is after the command's own first line, because until then Python's
own KeyboardInterrupt ends the process, and before the first step is logged.

A start must end with 130, and `error: interrupted` as its only error. If it has
taken a step, it must end with 0 and a checkpoint. Prints a line for each start,
and the counts. Exits with 1 if a start ends in another way, or if one takes
longer than --limit seconds. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from benchmarks import kill
from diffjax.training import manifest

FIELDS = {
  "data.length": 64,
  "data.validation_fraction": 0.1,
  "train.log_interval": 1,
}
# Seconds after which an interrupted start is killed.
MAX_ENDING_SECONDS = 60.0
# Time for workers that are still printing.
OUTPUT_SECONDS = 0.2

ENDED = "ended"
SAVED = "saved"


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the command.

  Attributes:
    times: Number of interrupted starts.
    seed: Seed of the moments.
    limit: Seconds in which a start that has not taken a step must end.
  """

  times: int
  seed: int
  limit: float


class Interruption(NamedTuple):
  """How a start ended.

  Attributes:
    seconds: Seconds from the signal to the end.
    outcome: ENDED, SAVED, or a description of what is wrong.
  """

  seconds: float
  outcome: str


class Start:
  """A cold start of training, in another process.

  It writes only into its own directory.
  """

  def __init__(self, text: pathlib.Path, directory: pathlib.Path):
    """Starts training, and waits until the command handles signals.

    Args:
      text: Directory of the training text.
      directory: Directory for everything that the run writes. It is created.
    """
    directory.mkdir()
    self._workdir = directory / "run"
    self._log = directory / "log"
    fields = FIELDS | {
      "data.source": f"text:{text}/*.txt",
      "data.prepared_dir": directory / "rows",
    }
    command = [
      sys.executable,
      "-m",
      "diffjax.train",
      "--config=configs/tiny.py",
      f"--workdir={self._workdir}",
    ]
    for name, value in fields.items():
      command.append(f"--config.{name}={value}")
    with self._log.open("w", encoding="utf-8") as log:
      self._process = subprocess.Popen(
        command,
        env=os.environ | {"XDG_CACHE_HOME": str(directory / "cache")},
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
    # The command has installed its signal handler when it has a second thread.
    threads = f"/proc/{self._process.pid}/task"
    while len(os.listdir(threads)) < 2:
      time.sleep(0.001)
    self._start_time = time.monotonic()

  def output(self) -> str:
    """Returns what training has printed."""
    return self._log.read_text(encoding="utf-8")

  def wait_for_first_step(self) -> float:
    """Waits until the first step is logged; returns the seconds until then."""
    while "\nstep 1/" not in self.output():
      exit_code = self._process.poll()
      if exit_code is not None:
        sys.exit(
          f"training ended with {exit_code} before it was interrupted:\n"
          f"{self.output()}"
        )
      time.sleep(0.05)
    return time.monotonic() - self._start_time

  def interrupt(self) -> Interruption:
    """Sends Ctrl-C to all processes, and waits for the end."""
    sent = time.monotonic()
    os.killpg(self._process.pid, signal.SIGINT)
    try:
      exit_code = self._process.wait(timeout=MAX_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
      os.killpg(self._process.pid, signal.SIGKILL)
      return Interruption(MAX_ENDING_SECONDS, "trained on")
    seconds = time.monotonic() - sent
    time.sleep(OUTPUT_SECONDS)
    return Interruption(seconds, self._outcome(exit_code))

  def _outcome(self, exit_code: int) -> str:
    """Returns ENDED, SAVED, or a description of what is wrong."""
    errors = []
    for line in self.output().splitlines():
      # Other lines are progress.
      if not line.startswith(("diffjax: ", "step ")):
        errors.append(line)
    if exit_code == 130 and errors == ["error: interrupted"]:
      return ENDED
    checkpoints = manifest.checkpoint_directory(self._workdir)
    if exit_code == 0 and not errors and manifest.steps(checkpoints):
      return SAVED
    return f"wrong: exit code {exit_code}, {errors}"


def interrupt_starts(settings: Settings, directory: pathlib.Path) -> bool:
  """Interrupts starts, and prints how they end.

  Args:
    settings: The flags.
    directory: An empty directory.

  Returns:
    Whether all starts ended as they must.
  """
  rng = random.Random(settings.seed)
  outcomes = collections.Counter[str]()
  # The longest time until a start without a step has ended.
  slowest = 0.0
  # In this mode it writes only the text, so that each start prepares its rows.
  kill.make_data(directory, "streamed")
  text = directory / "text"

  # The first start shows how long a start takes until its first step.
  first_start = Start(text, directory / "first")
  start_seconds = first_start.wait_for_first_step()
  interruption = first_start.interrupt()
  outcomes[interruption.outcome] += 1
  print(
    f"the first step is logged after {start_seconds:.1f} s; interrupted then:"
    f" {interruption.outcome}",
    flush=True,
  )

  for index in range(settings.times):
    start = Start(text, directory / str(index))
    # The square makes early moments more likely.
    delay = start_seconds * rng.random() ** 2
    time.sleep(delay)
    interruption = start.interrupt()
    outcomes[interruption.outcome] += 1
    if interruption.outcome == ENDED:
      slowest = max(slowest, interruption.seconds)
    num_lines = len(start.output().splitlines())
    print(
      f"{index + 1}: after {delay:.2f} s, {num_lines} lines:"
      f" {interruption.outcome} in {interruption.seconds:.2f} s",
      flush=True,
    )

  print(
    f"{dict(outcomes)}; starts without a step ended in at most {slowest:.2f} s"
  )
  has_wrong_outcome = not outcomes.keys() <= {ENDED, SAVED}
  return not has_wrong_outcome and slowest <= settings.limit


def main() -> None:
  """Interrupts starts. Exits with 1 if one does not end as it must."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--times", type=int, default=50, help="starts")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument(
    "--limit",
    type=float,
    default=2.0,
    help="seconds in which a start without a step must end",
  )
  settings = Settings(**vars(parser.parse_args()))
  with tempfile.TemporaryDirectory() as scratch:
    is_correct = interrupt_starts(settings, pathlib.Path(scratch))
  sys.exit(0 if is_correct else 1)


if __name__ == "__main__":
  main()
