"""Kills training at random moments, and compares it with an undisturbed run.

    python -m benchmarks.kill --times=100
    python -m benchmarks.kill --processes=2 --times=20 --steps=100

A run is started again after each SIGKILL, until it reaches its last step. The
time between a start and its end is called a life here. It ends while the run
starts, takes steps, evaluates or saves, which it does every few steps.

Every life must begin at the newest complete checkpoint. Of a finished run, the
losses and validation losses (metrics.jsonl), the batches (a SHA-256 for each,
by step, of all lives) and the final parameters must be the same as in the
undisturbed run, bit for bit. Prints a line for each kill, and the counts. Exits
with 1 if anything differs.

With `--processes=N` a run has N processes. A kill ends one of them, chosen at
random, or all. The others must end within a minute, with 1 and an error.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from diffjax.config import (
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.data import prepared
from diffjax.training import manifest

CONFIG = Config(
  model=ModelConfig(
    num_layers=2,
    embed_dim=64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    ffn_dim=128,
  ),
  optimizer=OptimizerConfig(warmup_steps=10),
  train=TrainConfig(
    steps=300,
    batch_size=8,
    log_interval=1,
    checkpoint_interval=5,
    keep_checkpoints=2,
    sample_tokens=0,
  ),
  eval=EvalConfig(interval=50, rows=16),
)
# The training text.
NUM_DOCUMENTS = 200
LINES_PER_DOCUMENT = 60

# The longest time between the second step of a life and its kill.
MAX_LIFE_SECONDS = 4.0
# The share of lives that do not wait for the second step. They are killed while
# they start or compile.
EARLY_SHARE = 0.15
# The share of kills that end all processes.
ALL_SHARE = 0.2
# The time in which the processes that were not killed must end.
MAX_ENDING_SECONDS = 60.0
# The time in which a run must finish if it is not killed.
MAX_RUN_SECONDS = 3600.0
CONNECT_TIMEOUT_SECONDS = 20


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the command.

  Attributes:
    times: Number of kills.
    seed: Seed of the moments and of the processes that are killed.
    mode: `config.data.mode`.
    steps: Steps of a run.
    processes: Processes of a run.
  """

  times: int
  seed: int
  mode: str
  steps: int
  processes: int


class BatchRecord(NamedTuple):
  """A batch that a process has taken, a line of WORKDIR.batches.

  Attributes:
    step: The step of the batch.
    process: Index of the process.
    digest: SHA-256 of the batch.
  """

  step: int
  process: int
  digest: str


def make_data(directory: pathlib.Path, mode: str) -> None:
  """Writes the text that the runs train on, and prepares its rows.

  Args:
    directory: Where the text goes, as text/*.txt.
    mode: "prepared" or, to prepare no rows, "streamed".
  """
  text_directory = directory / "text"
  text_directory.mkdir()
  for index in range(NUM_DOCUMENTS):
    lines = []
    for line in range(LINES_PER_DOCUMENT):
      lines.append(f"document {index}, line {line}: {line * index % 97}\n")
    path = text_directory / f"{index}.txt"
    path.write_text("".join(lines), encoding="utf-8")
  if mode == "prepared":
    prepared.prepare(make_data_config(directory, mode))


def make_data_config(directory: pathlib.Path, mode: str) -> DataConfig:
  """Returns the config of the data in a directory."""
  return DataConfig(
    source=f"text:{directory}/text/*.txt",
    validation_fraction=0.1,
    length=64,
    prepared_dir=str(directory / "rows"),
    mode=mode,
  )


class BatchRecorder:
  """Appends a line for each batch that training takes to WORKDIR.batches.

  Training calls `make_writer` once instead of the class of its log of metrics,
  and `record` for each batch instead of the function that moves the batch to
  the devices.
  """

  def __init__(
    self,
    workdir: str,
    process: int,
    put_batch: Callable,
    make_writer: Callable,
  ):
    """Opens the file.

    Args:
      workdir: The run's directory.
      process: Index of this process.
      put_batch: The function that moves a batch to the devices.
      make_writer: The function that opens the log of metrics.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    self._file = os.open(f"{workdir}.batches", flags)
    self._process = process
    self._put_batch = put_batch
    self._make_writer = make_writer
    self._step = 0

  def make_writer(self, *args: Any, start_step: int, **options: Any) -> Any:
    """Remembers the step at which training starts, and opens the log."""
    self._step = start_step
    return self._make_writer(*args, start_step=start_step, **options)

  def record(self, batch: dict[str, np.ndarray], mesh: Any) -> Any:
    """Writes a line for a batch, and then moves it to the devices."""
    self._step += 1
    line = f"{self._step} {self._process} {_batch_digest(batch)}\n"
    # A single call writes the whole line, even if the process is killed.
    os.write(self._file, line.encode())
    return self._put_batch(batch, mesh)


def _batch_digest(batch: dict[str, np.ndarray]) -> str:
  """Returns the SHA-256 of all arrays of a batch."""
  digest = hashlib.sha256()
  for name in sorted(batch):
    digest.update(np.ascontiguousarray(batch[name]).tobytes())
  return digest.hexdigest()


def train(
  settings: Settings,
  directory: pathlib.Path,
  workdir: str,
  coordinator: str,
  process: int,
) -> None:
  """Trains like `python -m diffjax.train`, and records the batches.

  This runs in each process of a life.

  Args:
    settings: The flags.
    directory: The directory of the data.
    workdir: The run's directory.
    coordinator: Address of process 0.
    process: Index of this process.
  """
  from diffjax.host import runtime
  from diffjax.parallel.processes import connected
  from diffjax.training import loop, run_log, session

  runtime.keep_compiled_programs()
  runtime.keep_freed_memory()
  recorder = BatchRecorder(
    workdir, process, session.put_batch, run_log.MetricWriter
  )
  session.put_batch = recorder.record
  run_log.MetricWriter = recorder.make_writer

  config = dataclasses.replace(
    CONFIG,
    train=dataclasses.replace(CONFIG.train, steps=settings.steps),
    data=make_data_config(directory, settings.mode),
  )
  address = coordinator if settings.processes > 1 else ""
  with connected(
    address, settings.processes, process, timeout=CONNECT_TIMEOUT_SECONDS
  ):
    loop.train(config, workdir)


def read_losses(workdir: pathlib.Path) -> list[tuple]:
  """Returns the log of every step without its times."""
  names = ("step", "train/loss", "train/grad_norm", "validation/loss")
  text = (workdir / "metrics.jsonl").read_text(encoding="utf-8")
  rows = []
  for line in text.splitlines():
    metrics = json.loads(line)
    rows.append(tuple(metrics.get(name) for name in names))
  return rows


def read_batch_records(workdir: pathlib.Path) -> list[BatchRecord]:
  """Returns the batches of all lives, in the order they were taken."""
  path = pathlib.Path(f"{workdir}.batches")
  if not path.exists():
    return []
  records = []
  for line in path.read_text(encoding="utf-8").splitlines():
    step, process, digest = line.split()
    records.append(BatchRecord(int(step), int(process), digest))
  return records


def read_batches(
  workdir: pathlib.Path,
) -> list[tuple[tuple[int, int], set[str]]]:
  """Returns the digests of the batches of all lives, by step and process.

  A step that several lives have taken has one digest if its batches are equal.
  """
  digests = collections.defaultdict(set)
  for record in read_batch_records(workdir):
    digests[record.step, record.process].add(record.digest)
  return sorted(digests.items())


def read_parameters(workdir: pathlib.Path) -> list[str]:
  """Returns the SHA-256 of the parameters in the newest complete checkpoint.

  Like all functions in COMPARED, it returns a list.
  """
  from diffjax.parallel.mesh import make_mesh
  from diffjax.training.checkpoint import open_checkpoint
  from diffjax.training.program import build

  def without_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

  program = build(CONFIG, make_mesh(CONFIG.mesh))
  shapes = jax.tree.map(without_sharding, program.abstract_state.params)
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(open_checkpoint(workdir).params(shapes)):
    digest.update(np.asarray(leaf).tobytes())
  return [digest.hexdigest()]


# What must be equal in a killed and in the undisturbed run.
COMPARED: dict[str, Callable[[pathlib.Path], list]] = {
  "losses": read_losses,
  "batches": read_batches,
  "final parameters": read_parameters,
}


def first_difference(actual: Sequence, expected: Sequence) -> str | None:
  """Returns the first entries that differ, as text. None if all are equal."""
  for ours, theirs in itertools.zip_longest(actual, expected):
    if ours != theirs:
      return f"{ours} instead of {theirs}"
  return None


def newest_complete_step(workdir: pathlib.Path) -> int:
  """Returns the step of the newest complete checkpoint. 0 if it has none."""
  directory = manifest.checkpoint_directory(workdir)
  for step in reversed(manifest.steps(directory)):
    with contextlib.suppress(manifest.Damage):
      return manifest.verify(directory / str(step), step)["step"]
  return 0


def activity_at_kill(workdir: pathlib.Path, num_batches: int) -> str:
  """Returns what a life was doing when it was killed, judged by its files.

  Args:
    workdir: The run's directory.
    num_batches: Number of batches that the life has taken.
  """
  directory = workdir / "checkpoints"
  checkpoints = list(directory.iterdir()) if directory.exists() else []
  for path in checkpoints:
    if "tmp" in path.name:
      return "writing a checkpoint"
  for path in checkpoints:
    has_manifest = (path / "manifest.json").exists()
    if path.name.isdecimal() and not has_manifest:
      return "writing a manifest or pruning"
  if num_batches > 0:
    return "taking steps"
  return "starting"


class Life:
  """The processes of a run, from one start of the run to their end.

  Attributes:
    start_time: When the life began, in seconds since the epoch.
    first_step: The first step that it should take.
    processes: Its processes.
  """

  def __init__(
    self, directory: pathlib.Path, workdir: pathlib.Path, settings: Settings
  ):
    """Starts the processes.

    Args:
      directory: The directory of the data.
      workdir: The run's directory.
      settings: The flags.
    """
    self._workdir = workdir
    self._settings = settings
    self._num_earlier_batches = len(read_batch_records(workdir))
    self.first_step = newest_complete_step(workdir) + 1
    self.start_time = time.time()
    self.processes: list[subprocess.Popen] = []
    self._error_files = []

    environment = dict(os.environ)
    if settings.processes > 1:
      # Only process 0 uses the cache of compiled programs. The others compile
      # in every life.
      environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    coordinator = f"localhost:{_free_port()}"
    for index in range(settings.processes):
      command = [
        sys.executable,
        "-m",
        "benchmarks.kill",
        f"--mode={settings.mode}",
        f"--processes={settings.processes}",
        f"--steps={settings.steps}",
        "--child",
        str(directory),
        str(workdir),
        coordinator,
        str(index),
      ]
      error_file = tempfile.TemporaryFile("w+", encoding="utf-8")
      self._error_files.append(error_file)
      process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=error_file
      )
      self.processes.append(process)

  def steps(self) -> list[int]:
    """Returns the steps of the batches that all its processes have taken."""
    records = read_batch_records(self._workdir)
    return [record.step for record in records[self._num_earlier_batches :]]

  def is_running(self) -> bool:
    """Returns whether no process has ended."""
    return all(process.poll() is None for process in self.processes)

  def wait_until(self, seconds: float, *, after_second_step: bool) -> None:
    """Waits for a moment of the life, or for the end of a process.

    Args:
      seconds: How long to wait.
      after_second_step: Whether the time counts from the second step.
    """
    if after_second_step:
      # Each process takes a batch of each step.
      num_processes = len(self.processes)
      while self.is_running() and len(self.steps()) <= num_processes:
        time.sleep(0.01)
    deadline = time.time() + seconds
    while self.is_running() and time.time() < deadline:
      time.sleep(0.001)

  def finish(self) -> None:
    """Waits for processes that were not killed, and must end with 0."""
    self._wait(MAX_RUN_SECONDS, must_fail=False)

  def finish_after_kill(self) -> None:
    """Waits for the processes that are left, which must report an error."""
    self._wait(MAX_ENDING_SECONDS, must_fail=True)

  def _wait(self, timeout: float, *, must_fail: bool) -> None:
    """Waits for all processes. Exits if one does not end as it must.

    Args:
      timeout: Seconds in which all must end.
      must_fail: Whether they must report an error.
    """
    deadline = time.time() + timeout
    pairs = zip(self.processes, self._error_files, strict=True)
    for process, error_file in pairs:
      exit_code: int | None
      try:
        exit_code = process.wait(max(0.0, deadline - time.time()))
      except subprocess.TimeoutExpired:
        exit_code = None
      error_file.seek(0)
      errors = error_file.read()
      if not self._is_correct_end(exit_code, errors, must_fail):
        for other in self.processes:
          other.kill()
        sys.exit(f"a process ended with {exit_code} (None: hangs):\n{errors}")

  def _is_correct_end(
    self, exit_code: int | None, errors: str, must_fail: bool
  ) -> bool:
    """Returns whether a process has ended as it must.

    Args:
      exit_code: Its exit code. None if it has not ended.
      errors: What it has printed.
      must_fail: Whether it must report an error.
    """
    # It is the process that was killed.
    if exit_code == -signal.SIGKILL:
      return True
    if not must_fail:
      return exit_code == 0
    # Another process may be killed after the work is done.
    is_done = newest_complete_step(self._workdir) == self._settings.steps
    if exit_code == 0 and is_done:
      return True
    # A line of the output begins with "error: ".
    has_message = "\nerror: " in f"\n{errors}"
    return exit_code == 1 and has_message


def _free_port() -> int:
  """Returns a port of this machine that no program uses."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


@dataclasses.dataclass
class Counts:
  """The counts of all runs.

  Attributes:
    kills: Number of kills.
    runs: Number of runs that were started.
    steps_in_killed_lives: Steps taken in lives that were killed.
    lives_with_steps: Lives that took steps.
    wrong_starts: Lives that did not begin at the newest complete checkpoint.
    slowest_ending: The longest time, in seconds, until the processes that were
      not killed had ended.
    activities: Kills by what the life was doing.
    victims: Kills by the processes that were killed.
    differences: Differences from the undisturbed run.
  """

  kills: int = 0
  runs: int = 0
  steps_in_killed_lives: int = 0
  lives_with_steps: int = 0
  wrong_starts: int = 0
  slowest_ending: float = 0.0
  activities: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  victims: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  differences: list[str] = dataclasses.field(default_factory=list)

  def table(self, settings: Settings, seconds: float) -> dict[str, Any]:
    """Returns the counts and the settings in the form that is printed.

    Args:
      settings: The flags.
      seconds: How long it took.
    """
    result: dict[str, Any] = {
      "processes": settings.processes,
      "kills": self.kills,
      "moments": dict(self.activities),
    }
    if settings.processes > 1:
      slowest = round(self.slowest_ending, 1)
      result["killed"] = dict(self.victims)
      result["seconds until the others had ended, at most"] = slowest
    return result | {
      "runs finished": self.runs,
      "steps of a run": settings.steps,
      "steps taken in killed lives": self.steps_in_killed_lives,
      "starts that took steps": self.lives_with_steps,
      "starts not from the newest complete checkpoint": self.wrong_starts,
      "differences from the uninterrupted run": self.differences,
      "mode": settings.mode,
      "seed": settings.seed,
      "seconds": round(seconds),
      "date": time.strftime("%Y-%m-%d"),
      "jax": jax.__version__,
      "python": platform.python_version(),
    }


class Kill(NamedTuple):
  """A kill, and what it interrupted.

  Attributes:
    life_seconds: Seconds from the start of the life to the kill.
    num_batches: Number of batches that all processes of the life had taken.
    activity: What the life was doing.
    victims: Indices of the processes that were killed.
    ending_seconds: Seconds from the kill until all processes had ended.
  """

  life_seconds: float
  num_batches: int
  activity: str
  victims: list[int]
  ending_seconds: float


class Killer:
  """Starts runs and kills them until there have been enough kills.

  Attributes:
    counts: The counts so far.
  """

  def __init__(self, settings: Settings, directory: pathlib.Path):
    """Prepares the data.

    Args:
      settings: The flags.
      directory: An empty directory for the data and the runs.
    """
    make_data(directory, settings.mode)
    self._settings = settings
    self._directory = directory
    self._rng = random.Random(settings.seed)
    self.counts = Counts()

  def compare_runs(self) -> None:
    """Kills runs, and compares each with an undisturbed run."""
    undisturbed = self._directory / "whole"
    Life(self._directory, undisturbed, self._settings).finish()
    # At least one run is compared, even with --times=0.
    while self._needs_kills() or self.counts.runs == 0:
      workdir = self._directory / f"run{self.counts.runs}"
      self.counts.runs += 1
      is_finished = False
      while not is_finished:
        is_finished = self._live(workdir)

      for name, read in COMPARED.items():
        difference = first_difference(read(workdir), read(undisturbed))
        if difference is not None:
          self.counts.differences.append(
            f"run {self.counts.runs}: its {name} differ, first {difference}"
          )

  def _needs_kills(self) -> bool:
    return self.counts.kills < self._settings.times

  def _live(self, workdir: pathlib.Path) -> bool:
    """Starts or continues a run, and kills it at a random moment.

    The run is not killed if it ends before that moment, or if there have been
    enough kills.

    Returns:
      Whether the run has reached its last step.
    """
    life = Life(self._directory, workdir, self._settings)
    is_early = self._rng.random() < EARLY_SHARE
    delay = self._rng.uniform(0, MAX_LIFE_SECONDS)
    if self._needs_kills():
      life.wait_until(delay, after_second_step=not is_early)
    if not self._needs_kills() or not life.is_running():
      life.finish()
      self._count_start(life)
      return True

    victims = self._choose_victims()
    for index in victims:
      life.processes[index].kill()
    kill_time = time.time()
    life.finish_after_kill()
    ending_seconds = time.time() - kill_time
    self._count_start(life)
    num_batches = len(life.steps())
    kill = Kill(
      life_seconds=kill_time - life.start_time,
      num_batches=num_batches,
      activity=activity_at_kill(workdir, num_batches),
      victims=victims,
      ending_seconds=ending_seconds,
    )
    self._count_kill(kill)
    self._print_kill(kill)
    return False

  def _choose_victims(self) -> list[int]:
    """Returns the indices of the processes to kill: one, or all."""
    indices = list(range(self._settings.processes))
    if self._rng.random() < ALL_SHARE:
      return indices
    return [self._rng.choice(indices)]

  def _count_start(self, life: Life) -> None:
    """Counts where a life began, if it has taken a step."""
    steps = life.steps()
    if not steps:
      return
    self.counts.lives_with_steps += 1
    if steps[0] != life.first_step:
      self.counts.wrong_starts += 1

  def _count_kill(self, kill: Kill) -> None:
    """Adds a kill to the counts."""
    counts = self.counts
    num_processes = self._settings.processes
    counts.kills += 1
    counts.activities[kill.activity] += 1
    counts.steps_in_killed_lives += kill.num_batches // num_processes
    if num_processes == 1:
      return
    counts.victims[_victims_name(kill.victims)] += 1
    if len(kill.victims) < num_processes:
      slowest = max(counts.slowest_ending, kill.ending_seconds)
      counts.slowest_ending = slowest

  def _print_kill(self, kill: Kill) -> None:
    """Prints a line about the last kill that was counted."""
    line = (
      f"kill {self.counts.kills}: {kill.life_seconds:.1f} s after its start,"
      f" {kill.num_batches} batches into it, {kill.activity}"
    )
    num_processes = self._settings.processes
    if len(kill.victims) < num_processes:
      line += (
        f"; process {kill.victims[0]}, the others ended"
        f" {kill.ending_seconds:.1f} s later"
      )
    elif num_processes > 1:
      line += "; all"
    print(line, flush=True)


def _victims_name(victims: list[int]) -> str:
  """Returns the name of the killed processes in the counts."""
  if len(victims) > 1:
    return "all"
  if victims == [0]:
    return "process 0"
  return "another one"


def main() -> None:
  """Kills and compares runs, or is a process of a run with --child."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--times", type=int, default=20, help="kills")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument(
    "--mode",
    choices=("prepared", "streamed"),
    default="prepared",
    help="config.data.mode",
  )
  parser.add_argument(
    "--steps", type=int, default=CONFIG.train.steps, help="of a run"
  )
  parser.add_argument("--processes", type=int, default=1, help="of a run")
  # `Life` starts this command with --child for each process of a run.
  parser.add_argument(
    "--child",
    nargs=4,
    metavar=("DIRECTORY", "WORKDIR", "COORDINATOR", "PROCESS"),
    help=argparse.SUPPRESS,
  )
  flags = parser.parse_args()
  settings = Settings(
    times=flags.times,
    seed=flags.seed,
    mode=flags.mode,
    steps=flags.steps,
    processes=flags.processes,
  )
  if flags.child:
    directory, workdir, coordinator, process = flags.child
    train(
      settings,
      directory=pathlib.Path(directory),
      workdir=workdir,
      coordinator=coordinator,
      process=int(process),
    )
    return

  start = time.time()
  with tempfile.TemporaryDirectory() as scratch:
    killer = Killer(settings, pathlib.Path(scratch))
    killer.compare_runs()
  counts = killer.counts
  print(json.dumps(counts.table(settings, time.time() - start), indent=1))
  sys.exit(1 if counts.differences or counts.wrong_starts else 0)


if __name__ == "__main__":
  main()
