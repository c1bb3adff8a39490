"""Trains and measures the runs of a study.

Trainings and measurements are separate processes, because a process cannot give
back the devices that it used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffjax.config import Config
from diffjax.host.progress import say
from experiments import (
  collect,
  folders,
  imports,
  launch,
  machine,
  results,
  training_log,
)
from experiments.grid import Run
from experiments.pace import Pace
from experiments.study import Study, Training, trainings

# The file in a workdir with the time spent on it, and the machine.
_TIME_FILE = "spent.json"
# Characters of an error in a line of progress.
_REASON_WIDTH = 120
_OTHER_LAUNCHER = "not known: trained by another launcher"


@dataclasses.dataclass(frozen=True)
class Slot:
  """A share of this machine's devices, which does one run at a time.

  Attributes:
    launcher: Starts the commands.
    environment: The environment variables of the commands.
    machine: The share in words.
  """

  launcher: launch.Launcher
  environment: Mapping[str, str]
  machine: str

  def call(
    self,
    command: Sequence[str],
    workdir: pathlib.Path,
    log: pathlib.Path | None = None,
  ) -> None:
    """Runs a command, and adds its time to the time spent on a workdir.

    Args:
      command: The command.
      workdir: The workdir of the training or of the measured run.
      log: A file to which the output is appended, instead of the terminal.

    Raises:
      launch.Failed: if it fails.
    """
    with _timed(workdir, self.machine):
      self.launcher.call(command, self.environment, log, tail=True)


def make_slots(study: Study, launcher: launch.Launcher) -> list[Slot]:
  """Divides this machine's devices among the study's slots.

  Raises:
    UserError: if the devices cannot be divided.
  """
  num_slots = study.options.slots
  local_devices = launch.devices()
  paths = folders.environment(study.name, imports.modules())
  slots = []
  for index in range(num_slots):
    share = launch.environment(local_devices, index, num_slots)
    slot = Slot(
      launcher=launcher,
      environment={**paths, **share},
      machine=machine.describe(local_devices, num_slots),
    )
    slots.append(slot)
  return slots


def run_all(study: Study, runs: Sequence[Run]) -> list[str]:
  """Trains and measures runs, and writes a result.json for each.

  A run that ends with an error gets a failed.json, and the other runs go on. If
  it is tried again, it resumes from its last checkpoint. So a run that diverged
  diverges again unless its workdir is deleted.

  Args:
    study: The study.
    runs: The runs, usually `collect.missing_runs(study)`.

  Returns:
    The names of the runs that failed.
  """
  finished = collect.finished_runs(study)
  with launch.Launcher() as launcher:
    slots = make_slots(study, launcher)
    # Before the runs start, because several of them may need the same rows.
    prepare_rows(study, runs, launcher)
    pace = Pace(
      finished=collect.seconds_on_machine(finished, slots[0].machine),
      runs=runs,
      slots=len(slots),
      resumes=study.experiment.trains,
    )
    runner = _Runner(study, slots, pace)
    jobs = [(run.name, functools.partial(runner.do, run)) for run in runs]
    try:
      launcher.side_by_side(jobs, len(slots))
    except BaseException:
      say(pace.stopped(len(study.chosen)))
      raise
  return runner.failed


def prepare_rows(
  study: Study, runs: Sequence[Run], launcher: launch.Launcher
) -> None:
  """Prepares the rows of trainings that have not finished.

  Only trainings with config.data.mode = "prepared" have such rows. Trainings
  that differ only in the seed share them.
  """
  commands: dict[str, list[str]] = {}
  for run in runs:
    for training in trainings(study, run):
      if _needs_rows(training, study.places):
        # Trainings with equal data, apart from the seed, need one command.
        data = dataclasses.replace(training.config.data, seed=0)
        commands.setdefault(str(data), _prepare_command(training))
  environment = folders.environment(study.name, imports.modules())
  for command in commands.values():
    launcher.call(command, environment)


def train_and_measure(
  study: Study, run: Run, slot: Slot, log: pathlib.Path | None = None
) -> float | None:
  """Trains and measures a run, and writes its result.json.

  Args:
    study: The study.
    run: One of its runs.
    slot: The devices to use.
    log: A file to which the output of the commands is appended, instead of the
      terminal.

  Returns:
    The seconds spent on it. None if another launcher trained it, because the
    time is not known then.

  Raises:
    launch.Failed: if training or measuring fails.
  """
  workdir = study.workdir(run)
  workdir.mkdir(parents=True, exist_ok=True)
  # The last training is the run's own, or the one that it only measures.
  trained_dir = workdir
  logged: dict[str, float] = {}
  for training in trainings(study, run):
    logged = train(training, study.places, slot, log)
    trained_dir = training.workdir
  # A training by a printed command leaves no record of its time.
  has_time = (workdir / _TIME_FILE).exists()
  is_trained_elsewhere = study.experiment.trains and not has_time

  if study.experiment.measure:
    measured = measure(study, run, trained_dir, slot, log)
  else:
    measured = {}
    for metric in study.experiment.metrics.values():
      measured[metric] = logged.get(metric)

  seconds: float | None
  seconds, machine_name = time_spent(workdir)
  if is_trained_elsewhere:
    seconds = None
    machine_name = _OTHER_LAUNCHER
  results.write_run(
    workdir,
    run,
    task=study.experiment.task,
    results=measured,
    seconds=seconds,
    machine=machine_name,
  )
  return seconds


def train(
  training: Training,
  places: Sequence[str],
  slot: Slot,
  log: pathlib.Path | None = None,
) -> dict[str, float]:
  """Trains, unless the workdir holds the finished training.

  Args:
    training: One of a run's trainings.
    places: Config fields that are not compared, because they only say where
      data is.
    slot: The devices to use.
    log: As for `train_and_measure`.

  Returns:
    The last number of every name in the log of the training.

  Raises:
    launch.Failed: if it fails.
    UserError: if the workdir holds a training of another config.
  """
  workdir = training.workdir
  logged = training_log.final_metrics(workdir, training.config, places)
  if logged is not None:
    return logged
  slot.call(training.command, workdir, log)
  logged = training_log.final_metrics(workdir, training.config, places)
  if logged is None:
    reason = "training ended before its last step, or could not save it"
    raise launch.Failed(f"{workdir}: {reason}", reason)
  return logged


def measure(
  study: Study,
  run: Run,
  trained_dir: pathlib.Path,
  slot: Slot,
  log: pathlib.Path | None = None,
) -> dict[str, Any]:
  """Returns the results of the experiment's `measure`.

  Args:
    study: The study.
    run: The run that is measured.
    trained_dir: The workdir of the trained model.
    slot: The devices to use.
    log: As for `train_and_measure`.

  Raises:
    launch.Failed: if it fails.
  """
  workdir = study.workdir(run)
  config = json.dumps(run.config.to_dict())
  (workdir / "config.json").write_text(f"{config}\n", encoding="utf-8")
  command = [
    sys.executable,
    "-m",
    "experiments.measure",
    *imports.arguments(),
    study.name,
    study.options.grid,
    str(workdir),
    str(trained_dir),
  ]
  slot.call(command, workdir, log)
  content = (workdir / "measured.json").read_text(encoding="utf-8")
  return json.loads(content)


def time_spent(workdir: pathlib.Path) -> tuple[float, str]:
  """Returns the seconds spent on a workdir over all starts, and the machine.

  The machine is the one of the last start. Without a record, this is 0 and "".
  """
  stored = results.read(workdir / _TIME_FILE, "seconds", "machine")
  if stored is None:
    return 0.0, ""
  return stored["seconds"], stored["machine"]


class _Runner:
  """Trains and measures runs in the slots of a launcher.

  Attributes:
    failed: The names of the runs that failed.
  """

  def __init__(self, study: Study, slots: Sequence[Slot], pace: Pace):
    self._study = study
    self._slots = slots
    self._pace = pace
    self.failed: list[str] = []

  def do(self, run: Run, slot_index: int) -> str:
    """Trains and measures a run in a slot.

    If the run itself fails, the error is recorded, and the other runs go on.

    Returns:
      A text for the progress line: the error if the run failed, and how long
      the runs that are left will take.
    """
    self._pace.begin(run)
    workdir = self._study.workdir(run)
    workdir.mkdir(parents=True, exist_ok=True)
    results.forget_failure(workdir)
    # The output of several runs at a time would be mixed on the terminal.
    log = None
    if len(self._slots) > 1:
      log = workdir / "output.txt"
    slot = self._slots[slot_index]
    try:
      seconds = train_and_measure(self._study, run, slot, log)
    except launch.Failed as error:
      results.write_failure(workdir, run, self._study.experiment, error.reason)
      self.failed.append(run.name)
      reason = textwrap.shorten(error.reason, _REASON_WIDTH, placeholder=" …")
      runs_left = self._pace.end(run, seconds=None)
      if not runs_left:
        return f"failed: {reason}"
      return f"failed: {reason}; {runs_left}"
    return self._pace.end(run, seconds)


@contextlib.contextmanager
def _timed(workdir: pathlib.Path, machine: str) -> Iterator[None]:
  """Adds the wall time inside the context to the time spent on a workdir."""
  start = time.monotonic()
  try:
    yield
  finally:
    seconds_before, _ = time_spent(workdir)
    seconds = seconds_before + time.monotonic() - start
    record = {"seconds": seconds, "machine": machine}
    results.write(workdir / _TIME_FILE, record)


def _needs_rows(training: Training, places: Sequence[str]) -> bool:
  """Returns True if rows must be prepared before the training can start."""
  if training.config.data.mode != "prepared" or _has_rows(training.config):
    return False
  logged = training_log.final_metrics(training.workdir, training.config, places)
  return logged is None


def _has_rows(config: Config) -> bool:
  """Returns True if the rows exist in the config's prepared_dir.

  The source of such rows may be missing on this machine.
  """
  from diffjax.data import prepared

  if not config.data.prepared_dir:
    return False
  targets = prepared.targets(config.data)
  return all(prepared.is_prepared(target) for target in targets)


def _prepare_command(training: Training) -> list[str]:
  """Returns the command that prepares the rows of a training."""
  command = []
  for argument in training.command:
    if argument == "diffjax.train":
      command.append("diffjax.prepare")
    elif not argument.startswith("--workdir="):
      command.append(argument)
  return command
