"""The table of what a grid costs, on this machine and on chips."""

import dataclasses

import pytest

from diffjax.config import UserError
from experiments import cost, grid, machine, pace
from experiments.launch import Devices

MACHINE = machine.describe(Devices("cpu", "cpu", 1), 1)


def runs(name, variants, seeds=(0, 1), **changes):
  """Returns the runs of some variants of an experiment."""
  chosen = grid.Grid(variants, variants[0], seeds)
  return grid.expand(name, chosen, changes)


def table_rows(text):
  """Returns the cells of a table's rows by their first cell."""
  cells_by_name = {}
  for line in text.splitlines():
    if line.startswith("|"):
      name, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
      cells_by_name[name] = cells
  return cells_by_name


@pytest.fixture
def timed(monkeypatch):
  """Makes a step take half a second. Returns the configs that are timed."""
  configs = []

  def time_steps(config_by_shape, env):
    configs.extend(config_by_shape.values())
    return dict.fromkeys(config_by_shape, 0.5)

  monkeypatch.setattr(cost, "time_steps", time_steps)
  return configs


def estimate(name, chosen, finished, slots=1):
  """Returns the table for this machine."""
  experiment = grid.load(name)
  return cost.on_this_machine(experiment, chosen, finished, MACHINE, slots, {})


VARIANTS = ("transformer", "diff", "diff_lambda_0.8", "diff_v2")


@pytest.fixture
def ablations():
  """Three runs of each variant."""
  return runs("ablations", VARIANTS, (0, 1, 2))


@pytest.fixture
def finished_transformers(ablations):
  """The Transformer's runs and their seconds. The median is 360."""
  transformers = [run for run in ablations if run.variant == "transformer"]
  return list(zip(transformers, (300, 3000, 360), strict=True))


def test_finished_runs_tell_the_time(timed, ablations, finished_transformers):
  text = estimate("ablations", ablations, finished_transformers)

  assert text.startswith(f"hours of {MACHINE}, 1 at a time\n")
  cells = table_rows(text)["transformer"]
  assert cells[:3] == ["3", "0.837 M", "2.46 M"]
  assert cells[4:] == ["360", "0.3", "3 finished runs"]


def test_steps_tell_the_time_of_other_shapes(
  timed, ablations, finished_transformers
):
  text = estimate("ablations", ablations, finished_transformers)

  rows = table_rows(text)
  assert rows["diff"][4:] == ["300", "0.25", "steps of 0.5 s"]
  assert rows["diff_lambda_0.8"][4:] == ["300", "0.25", "steps of 0.5 s"]
  assert "as busy as it is now" in text


def test_a_shape_is_timed_once(timed, ablations, finished_transformers):
  """DIFF with another λ_init has the shape of DIFF."""
  estimate("ablations", ablations, finished_transformers)

  assert [config.model.attention for config in timed] == ["diff", "diff_v2"]


def test_flops_are_those_of_all_runs_of_a_variant(timed, ablations):
  text = estimate("ablations", ablations, [])

  (diff, *_) = [run for run in ablations if run.variant == "diff"]
  flops = float(table_rows(text)["diff"][3])
  assert flops == pytest.approx(3 * pace.training_flops(diff.config), rel=0.01)


@pytest.mark.parametrize("slots, hours", [(1, "1.05"), (2, "0.525")])
def test_slots_divide_the_hours(
  timed, ablations, finished_transformers, slots, hours
):
  text = estimate("ablations", ablations, finished_transformers, slots)

  assert table_rows(text)["all"][5] == hours


@pytest.fixture
def throughput():
  """Two runs of an experiment that trains nothing, of different shapes."""
  return runs("throughput", ("tiny,length=256", "tiny,length=2048"), (0,))


def test_runs_that_train_nothing_are_not_timed(timed, throughput):
  text = estimate("throughput", throughput, [])

  rows = table_rows(text)
  assert rows["tiny,length=256"][2:] == ["–"] * 5
  assert rows["tiny,length=2048"][2:] == ["–"] * 5
  assert text.endswith(
    "No run has finished on this machine, and these runs take no training steps"
    " that could be timed."
  )
  assert not timed


def test_runs_that_train_nothing_are_estimated_from_other_shapes(
  timed, throughput
):
  short, long = throughput

  rows = table_rows(estimate("throughput", throughput, [(short, 36.0)]))

  assert rows[short.variant][4:] == ["36", "0.01", "1 finished run"]
  assert rows[long.variant][6] == "finished runs of other shapes"
  factor = pace.training_flops(long.config) / pace.training_flops(short.config)
  seconds = float(rows[long.variant][4])
  assert seconds == pytest.approx(36 * factor, rel=0.01)


def test_the_runs_that_others_start_from_are_named(timed):
  outliers = runs("outliers", ("transformer", "diff"))

  text = estimate("outliers", outliers, [])

  assert "python -m experiments.run ablations --cost" in text


def test_only_small_models_are_for_this_machine():
  small = runs("ablations", ("transformer", "diff"))
  large = runs("ablations", ("diff,size=125m",))

  assert cost.for_this_machine(small)
  assert not cost.for_this_machine(large)


def test_chip_hours_follow_from_the_peak():
  chosen = runs("ablations", ("diff,size=125m", "transformer,size=125m"))

  rows = table_rows(cost.on_chips(chosen))

  flops = 0.0
  for run in chosen:
    if run.variant == "diff,size=125m":
      flops += pace.training_flops(run.config)
  # 40% of the peak of an H100.
  flops_per_second = 0.4 * 989.4e12
  h100_hours = float(rows["diff,size=125m"][5])
  assert h100_hours == pytest.approx(flops / flops_per_second / 3600, rel=0.01)
  assert rows["all"][0] == "4"


@pytest.fixture
def small_config():
  """The config of a model whose steps take milliseconds."""
  changes = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.head_dim": 8,
    "model.ffn_dim": 32,
    "train.batch_size": 1,
    "data.length": 32,
  }
  (run,) = runs("ablations", ("diff",), (0,), **changes)
  return run.config


@pytest.mark.full
def test_larger_steps_take_longer(small_config):
  train = dataclasses.replace(small_config.train, batch_size=64)
  large_config = dataclasses.replace(small_config, train=train)

  seconds = cost.time_steps({"small": small_config, "large": large_config}, {})

  assert 0 < seconds["small"] < seconds["large"] < 60


@pytest.mark.full
def test_steps_that_cannot_be_timed_are_an_error(small_config):
  seven_devices = dataclasses.replace(small_config.mesh, data=7)
  config = dataclasses.replace(small_config, mesh=seven_devices)

  with pytest.raises(UserError, match="timing steps failed, as said above"):
    cost.time_steps({"seven devices": config}, {})
