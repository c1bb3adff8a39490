"""The logged seconds are the steps' seconds, on several kinds of machines."""

import dataclasses
import json
import pathlib
import time

import jax
import numpy as np
import pytest

from diffjax.config import Config, DataConfig, TrainConfig
from diffjax.parallel.mesh import make_mesh
from diffjax.training.run_log import RunLog

NUM_STEPS = 24
EVALUATION_INTERVAL = 5
SAVE_INTERVAL = 8
COMPILATION_SECONDS = 60.0
EVALUATION_SECONDS = 7.0
SAVE_SECONDS = 3.0


class Clock:
  """A clock that a test sets forward."""

  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


class Result:
  """A number that a device computes until a certain time."""

  def __init__(self, clock: Clock, end: float):
    self._clock = clock
    self._end = end

  def is_ready(self):
    return self._clock.now >= self._end

  def __array__(self, dtype=None, copy=None):
    # Reading the number waits for it.
    self._clock.now = max(self._clock.now, self._end)
    return np.zeros((), dtype)


@dataclasses.dataclass(frozen=True)
class Machine:
  """How long a step takes, and what a dispatch waits for.

  Attributes:
    wait: seconds until the next batch is there.
    compute: seconds that the device computes.
    dispatch_blocks: True if a dispatch returns at the end of the step.
  """

  wait: float
  compute: float
  dispatch_blocks: bool = False

  @property
  def shows_first_begin(self) -> bool:
    """False if the loop cannot know when the first step began.

    It knows the end of a step only while it does not wait for anything else.
    """
    return not self.dispatch_blocks and self.wait <= self.compute


SYNCHRONOUS = Machine(wait=0.5, compute=1.0, dispatch_blocks=True)
DEVICE_BOUND = Machine(wait=0.25, compute=1.0)
DATA_BOUND = Machine(wait=1.0, compute=0.03125)


class Simulation:
  """A run on a machine, whose log is the one under test.

  Attributes:
    true_seconds: by step, the true seconds per step since the last logged one.
    total_seconds: the seconds of the whole run after its first dispatch, except
      for evaluations and saves.
  """

  def __init__(
    self,
    machine: Machine,
    log_interval: int,
    workdir: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
  ):
    """Takes all steps, in the order of the training loop."""
    self._machine = machine
    self._log_interval = log_interval
    self._clock = Clock()
    monkeypatch.setattr(time, "perf_counter", self._clock)
    config = Config(
      data=DataConfig(length=16),
      train=TrainConfig(
        steps=NUM_STEPS, batch_size=2, log_interval=log_interval
      ),
    )
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    self._log = RunLog(config, str(workdir), mesh, None, start_step=0)
    self.true_seconds: dict[int, float] = {}
    # When the device ends its last step.
    self._device_end = self._clock.now
    # The last step that was logged or followed by an evaluation or a save, and
    # the time from which the next ones are measured.
    self._window_step = 0
    self._window_start = 0.0

    interruption_seconds = 0.0
    for step in range(1, NUM_STEPS + 1):
      self._take_step(step)
      if step == 1:
        first_dispatch = self._clock.now
      if step % EVALUATION_INTERVAL == 0:
        self._interrupt(step, EVALUATION_SECONDS)
        self._log.add_evaluation(step, {}, 0)
        interruption_seconds += EVALUATION_SECONDS
      if step % SAVE_INTERVAL == 0:
        self._interrupt(step, SAVE_SECONDS)
        self._log.add_save(step)
        interruption_seconds += SAVE_SECONDS
    self._log.flush()
    run_seconds = self._clock.now - first_dispatch
    self.total_seconds = run_seconds - interruption_seconds
    self._log.close()

  def _take_step(self, step: int) -> None:
    """Waits for a batch and dispatches a step."""
    self._clock.now += self._machine.wait
    self._log.add_wait(self._machine.wait)
    if step == 1:
      self._clock.now += COMPILATION_SECONDS
    begin = max(self._clock.now, self._device_end)
    self._device_end = begin + self._machine.compute
    if self._machine.dispatch_blocks:
      self._clock.now = self._device_end
    if step == 1:
      if self._machine.shows_first_begin:
        self._window_start = begin
      else:
        self._start_window(step, self._device_end)
    result = Result(self._clock, self._device_end)
    metrics = {"skipped_in_a_row": result, "loss": result}
    self._log.record_dispatched_step(step, metrics)

    is_logged = step % self._log_interval == 0 or step == NUM_STEPS
    if is_logged and step > self._window_step:
      seconds = self._device_end - self._window_start
      self.true_seconds[step] = seconds / (step - self._window_step)
      self._start_window(step, self._device_end)

  def _interrupt(self, step: int, seconds: float) -> None:
    """Waits for the device, and then does something else for some seconds."""
    self._log.flush()
    self._clock.now += seconds
    self._start_window(step, self._clock.now)

  def _start_window(self, step: int, start: float) -> None:
    self._window_step = step
    self._window_start = start


def logged_values(workdir: pathlib.Path, name: str) -> dict[int, float]:
  """Returns the logged values of a metric by step."""
  values = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    entry = json.loads(line)
    if name in entry:
      values[entry["step"]] = entry[name]
  return values


@pytest.mark.parametrize("log_interval", [1, 2, 3, 10])
@pytest.mark.parametrize("machine", [SYNCHRONOUS, DEVICE_BOUND], ids=str)
def test_the_logged_seconds_are_those_of_the_steps(
  machine, log_interval, tmp_path, monkeypatch
):
  """The run is simulated on a clock, so its true seconds are known."""
  simulation = Simulation(
    machine,
    log_interval=log_interval,
    workdir=tmp_path,
    monkeypatch=monkeypatch,
  )

  logged_seconds = logged_values(tmp_path, "train/step_seconds")
  assert logged_seconds == pytest.approx(simulation.true_seconds)


@pytest.mark.parametrize("log_interval", [1, 3, 10])
def test_the_logged_seconds_are_nearly_exact_if_the_run_waits_for_data(
  log_interval, tmp_path, monkeypatch
):
  """The loop cannot see the end of a step while it waits for a batch.

  A batch takes 1 s here, and a step 0.03 s.
  """
  machine = Machine(wait=1.0, compute=0.03125)

  simulation = Simulation(
    machine,
    log_interval=log_interval,
    workdir=tmp_path,
    monkeypatch=monkeypatch,
  )

  logged_seconds = logged_values(tmp_path, "train/step_seconds")
  assert logged_seconds == pytest.approx(simulation.true_seconds, rel=0.05)


@pytest.mark.parametrize(
  "machine", [SYNCHRONOUS, DEVICE_BOUND, DATA_BOUND], ids=str
)
def test_the_logged_seconds_add_up_to_those_of_the_run(
  machine, tmp_path, monkeypatch
):
  """The run is simulated on a clock. Evaluations and saves are not counted."""
  simulation = Simulation(
    machine, log_interval=1, workdir=tmp_path, monkeypatch=monkeypatch
  )

  logged_seconds = logged_values(tmp_path, "train/step_seconds")
  total_seconds = sum(logged_seconds.values())
  assert total_seconds == pytest.approx(simulation.total_seconds)


def test_the_logged_wait_is_the_fraction_of_the_steps(tmp_path, monkeypatch):
  """A step waits for its batch for 0.5 s, and then computes for 1 s."""
  machine = Machine(wait=0.5, compute=1.0, dispatch_blocks=True)

  Simulation(machine, log_interval=3, workdir=tmp_path, monkeypatch=monkeypatch)

  # Every third of the 24 steps is logged with its times.
  fraction_by_step = logged_values(tmp_path, "train/wait_fraction")
  assert list(fraction_by_step) == [3, 6, 9, 12, 15, 18, 21, 24]
  for fraction in fraction_by_step.values():
    assert fraction == pytest.approx(0.5 / (0.5 + 1.0))
