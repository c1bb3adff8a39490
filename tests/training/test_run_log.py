"""Logged speeds are those of the steps, whatever a dispatch waits for."""

import dataclasses
import json
import time

import jax
import numpy as np
import pytest

from diffjax.config import Config, DataConfig, TrainConfig
from diffjax.parallel.mesh import make_mesh
from diffjax.training.run_log import RunLog

STEPS = 24
# Seconds of compiling, of an evaluation and of a save.
COMPILING, EVALUATION, SAVE = 60.0, 7.0, 3.0


class Clock:
  """A clock that the test sets forward."""

  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


class Result:
  """A number that a device computes until a certain time."""

  def __init__(self, clock, end):
    self._clock, self._end = clock, end

  def is_ready(self):
    return self._clock.now >= self._end

  def __array__(self, dtype=None, copy=None):
    self._clock.now = max(self._clock.now, self._end)
    return np.zeros((), dtype)


@dataclasses.dataclass(frozen=True)
class Machine:
  """How long a step takes, and what a dispatch waits for.

  Attributes:
    wait: seconds until a batch has come.
    compute: seconds that the device computes.
    dispatch_blocks: True if a dispatch returns at the end of the step.
  """

  wait: float
  compute: float
  dispatch_blocks: bool = False


SYNCHRONOUS = Machine(0.5, 1.0, dispatch_blocks=True)
DEVICE_BOUND = Machine(0.25, 1.0)
DATA_BOUND = Machine(1.0, 0.03125)


def train(machine, log_interval, workdir, monkeypatch):
  """Takes steps in the order of the loop.

  Returns:
    The seconds per step that were logged and the true ones, by step, and the
    sum of all seconds that are not compiling, evaluations or saves.
  """
  clock = Clock()
  monkeypatch.setattr(time, "perf_counter", clock)
  config = Config(
    data=DataConfig(length=16),
    train=TrainConfig(steps=STEPS, batch_size=2, log_interval=log_interval),
  )
  mesh = make_mesh(config.mesh, jax.devices()[:1])
  log = RunLog(config, str(workdir), mesh, None, start_step=0)
  device_free = clock.now
  ends, start, true_seconds = {}, (0, 0.0), {}
  for step in range(1, STEPS + 1):
    clock.now += machine.wait
    log.add_wait(machine.wait)
    if step == 1:
      clock.now += COMPILING
    begin = max(clock.now, device_free)
    ends[step] = device_free = begin + machine.compute
    if machine.dispatch_blocks:
      clock.now = device_free
    if step == 1:
      start, first = (0, begin), clock.now
      if machine.dispatch_blocks or machine.wait > machine.compute:
        # The beginning of the first step is not seen.
        start = (1, device_free)
    result = Result(clock, device_free)
    results = {"skipped_in_a_row": result, "loss": result}
    log.record_dispatched_step(step, results)
    is_logged = step % log_interval == 0 or step == STEPS
    if is_logged and step > start[0]:
      taken = step - start[0]
      true_seconds[step] = (ends[step] - start[1]) / taken
      start = (step, ends[step])
    for interval, seconds, done in (
      (5, EVALUATION, lambda step: log.add_evaluation(step, {}, 0)),
      (8, SAVE, log.add_save),
    ):
      if step % interval == 0:
        log.flush()
        clock.now += seconds
        done(step)
        start = (step, clock.now)
  log.flush()
  interruptions = STEPS // 5 * EVALUATION + STEPS // 8 * SAVE
  total = clock.now - first - interruptions
  log.close()
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  logged = {
    line["step"]: line["train/step_seconds"]
    for line in lines
    if "train/step_seconds" in line
  }
  return logged, true_seconds, total


@pytest.mark.parametrize("log_interval", [1, 2, 3, 10])
@pytest.mark.parametrize("machine", [SYNCHRONOUS, DEVICE_BOUND], ids=str)
def test_speeds_are_those_of_the_steps(
  machine, log_interval, tmp_path, monkeypatch
):
  logged, wanted, _ = train(machine, log_interval, tmp_path, monkeypatch)
  assert logged == pytest.approx(wanted)


@pytest.mark.parametrize("log_interval", [1, 3, 10])
def test_speeds_of_a_run_that_waits_for_data(
  log_interval, tmp_path, monkeypatch
):
  """The end of a step is not seen while the loop waits for the next batch."""
  logged, wanted, _ = train(DATA_BOUND, log_interval, tmp_path, monkeypatch)
  assert logged == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(
  "machine", [SYNCHRONOUS, DEVICE_BOUND, DATA_BOUND], ids=str
)
def test_no_second_is_lost(machine, tmp_path, monkeypatch):
  logged, _, total = train(machine, 1, tmp_path, monkeypatch)
  assert sum(logged.values()) == pytest.approx(total)


def test_time_waited_is_that_of_the_steps(tmp_path, monkeypatch):
  train(SYNCHRONOUS, 3, tmp_path, monkeypatch)
  lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
  shares = [line.get("train/wait_fraction") for line in lines]
  assert shares[1:] == pytest.approx([1 / 3] * 8)
