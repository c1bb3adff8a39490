"""Interrupts cold starts of training: python -m benchmarks.interrupt --times=50

Each start of `python -m diffjax.train --config=configs/tiny.py` has an empty cache and rows to prepare, and gets one Ctrl-C, as a terminal
sends it: to the command and its workers. The moment is random, the earlier the likelier, from the command's own first line until the first
step is logged. (Before that Python itself starts, and its own KeyboardInterrupt ends it.) Each must end with 130 and `error: interrupted`
as its only line of error; once a step has been taken, with 0 and a checkpoint. Prints a line a start and a tally; exits with 1 if one ends
otherwise or takes longer than --limit seconds. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks import kill
from diffjax.training import manifest

FIELDS = {
  "data.length": 64,
  "data.validation_fraction": 0.1,
  "train.log_interval": 1,
}


class Start:
  """A cold start of training, with everything that it writes in a directory of its own."""

  def __init__(self, text: pathlib.Path, directory: pathlib.Path):
    directory.mkdir()
    self.workdir, self._log = directory / "run", directory / "log"
    fields = FIELDS | {
      "data.source": f"text:{text}/*.txt",
      "data.prepared_dir": directory / "rows",
    }
    arguments = [
      "--config=configs/tiny.py",
      f"--workdir={self.workdir}",
      *(f"--config.{name}={value}" for name, value in fields.items()),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(directory / "cache")}
    with self._log.open("w", encoding="utf-8") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "diffjax.train", *arguments],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
    while (
      len(os.listdir(f"/proc/{self._process.pid}/task")) < 2
    ):  # the second thread hears signals
      time.sleep(0.001)
    self.began = time.monotonic()

  def text(self) -> str:
    return self._log.read_text(encoding="utf-8")

  def reach_first_step(self) -> float:
    """Waits for it. Returns the seconds since the start."""
    while "\nstep 1/" not in self.text():
      if self._process.poll() is not None:
        sys.exit(
          f"training ends by itself with {self._process.returncode}:\n{self.text()}"
        )
      time.sleep(0.05)
    return time.monotonic() - self.began

  def interrupt(self) -> tuple[float, str]:
    """Seconds until it has ended, and how: "ended", "saved", or what is wrong."""
    sent = time.monotonic()
    os.killpg(self._process.pid, signal.SIGINT)
    try:
      code = self._process.wait(timeout=60)
    except subprocess.TimeoutExpired:
      os.killpg(self._process.pid, signal.SIGKILL)
      return 60.0, "trained on"
    seconds = time.monotonic() - sent
    time.sleep(0.2)  # for what workers say
    others = [
      line
      for line in self.text().splitlines()
      if not line.startswith(("diffjax: ", "step "))
    ]
    if code == 130 and others == ["error: interrupted"]:
      return seconds, "ended"
    if (
      code == 0
      and not others
      and manifest.steps(manifest.checkpoint_directory(self.workdir))
    ):
      return seconds, "saved"
    return seconds, f"wrong: exit code {code}, {others}"


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--times", type=int, default=50, help="starts")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument(
    "--limit",
    type=float,
    default=2.0,
    help="seconds in which a start must end, but for those that save",
  )
  flags = parser.parse_args()
  rng, tally, slowest = (
    random.Random(flags.seed),
    collections.Counter[str](),
    0.0,
  )
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch)
    kill.make_data(directory, "streamed")
    first = Start(directory / "text", directory / "first")
    whole = first.reach_first_step()
    _, how = first.interrupt()
    print(
      f"the first step is logged after {whole:.1f} s; interrupted then: {how}",
      flush=True,
    )
    tally[how] += 1
    for index in range(flags.times):
      start, delay = (
        Start(directory / "text", directory / str(index)),
        whole * rng.random() ** 2,
      )
      time.sleep(delay)
      seconds, how = start.interrupt()
      said = start.text().splitlines()
      print(
        f"{index + 1}: after {delay:.2f} s, {len(said)} lines: {how} in {seconds:.2f} s",
        flush=True,
      )
      if how == "ended":
        slowest = max(slowest, seconds)
      tally[how] += 1
  print(f"{dict(tally)}; those without a step ended in at most {slowest:.2f} s")
  sys.exit(
    0 if set(tally) <= {"ended", "saved"} and slowest <= flags.limit else 1
  )


if __name__ == "__main__":
  main()
