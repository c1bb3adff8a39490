"""The table of what a grid costs, on this machine and on chips."""

import dataclasses

import pytest

from diffjax.config import UserError
from diffjax.model.flops import parameter_count
from experiments import cost, grid, machine, pace
from experiments.launch import Devices

MACHINE = machine.describe(Devices("cpu", "cpu", 1), 1)


def runs(name, variants, seeds=(0, 1), changes=None):
  """Returns the runs of some variants of an experiment.

  Args:
    name: The experiment.
    variants: The variants.
    seeds: The seeds of each variant.
    changes: The values of config fields, by their dotted names.
  """
  chosen = grid.Grid(variants, baseline=variants[0], seeds=seeds)
  return grid.expand(name, chosen, changes or {})


def table_rows(text):
  """Returns the rows of a table: rows["diff"]["parameters"] is a cell."""
  lines = []
  for line in text.splitlines():
    if line.startswith("|"):
      lines.append([cell.strip() for cell in line.split("|")[1:-1]])
  header, _, *body = lines

  rows = {}
  for cells in body:
    rows[cells[0]] = dict(zip(header, cells, strict=True))
  return rows


@pytest.fixture
def steps_take_half_a_second(monkeypatch):
  """Makes a training step take half a second.

  Returns:
    The list of the configs that are timed, which is filled later.
  """
  timed_configs = []

  def time_steps(config_by_shape, env):
    timed_configs.extend(config_by_shape.values())
    return dict.fromkeys(config_by_shape, 0.5)

  monkeypatch.setattr(cost, "time_steps", time_steps)
  return timed_configs


def estimate(name, chosen, finished, slots=1):
  """Returns the table of what runs cost on this machine.

  Args:
    name: The experiment.
    chosen: The runs whose cost is estimated.
    finished: The runs that have finished, and their seconds.
    slots: The number of runs side by side.
  """
  experiment = grid.load(name)
  return cost.on_this_machine(experiment, chosen, finished, MACHINE, slots, {})


@pytest.mark.usefixtures("steps_take_half_a_second")
def test_a_run_takes_the_median_time_of_the_finished_runs():
  first, second, third = runs("ablations", ("transformer",), seeds=(0, 1, 2))
  seconds_of_runs = [(first, 300), (second, 3000), (third, 360)]
  median_seconds = 360

  text = estimate("ablations", [first, second, third], seconds_of_runs)

  assert text.startswith(f"hours of {MACHINE}, 1 at a time\n")
  row = table_rows(text)["transformer"]
  assert row["seconds a run"] == str(median_seconds)
  assert row["hours"] == str(3 * median_seconds / 3600)
  assert row["by"] == "3 finished runs"


@pytest.mark.usefixtures("steps_take_half_a_second")
def test_the_table_has_the_sizes_of_each_variant():
  chosen = runs("ablations", ("transformer",), seeds=(0, 1, 2))

  row = table_rows(estimate("ablations", chosen, finished=[]))["transformer"]

  assert row["runs"] == "3"
  millions_of_parameters = parameter_count(chosen[0].config.model) / 1e6
  assert row["parameters"] == f"{millions_of_parameters:.3g} M"
  # 600 steps of 16 rows of 256 tokens.
  millions_of_tokens = 600 * 16 * 256 / 1e6
  assert row["tokens"] == f"{millions_of_tokens:.3g} M"


@pytest.mark.usefixtures("steps_take_half_a_second")
def test_shapes_without_finished_runs_are_estimated_from_timed_steps():
  (finished_run,) = runs("ablations", ("transformer",), seeds=(0,))
  diff_runs = runs("ablations", ("diff", "diff_lambda_0.8"), seeds=(0, 1, 2))

  text = estimate(
    "ablations", [finished_run, *diff_runs], finished=[(finished_run, 300)]
  )

  seconds = diff_runs[0].config.train.steps * 0.5
  for variant in ("diff", "diff_lambda_0.8"):
    row = table_rows(text)[variant]
    assert row["seconds a run"] == f"{seconds:.0f}"
    assert row["hours"] == str(3 * seconds / 3600)
    assert row["by"] == "steps of 0.5 s"
  # Other programs slow down the timed steps.
  assert "as busy as it is now" in text


def test_a_shape_is_timed_once(steps_take_half_a_second):
  """λ_init changes no shape, and a finished run of a shape needs no timing."""
  variants = ("transformer", "diff", "diff_lambda_0.8", "diff_v2")
  chosen = runs("ablations", variants, seeds=(0,))
  finished_transformer = chosen[0]

  estimate("ablations", chosen, finished=[(finished_transformer, 300)])

  timed_configs = steps_take_half_a_second
  timed_models = [config.model.attention for config in timed_configs]
  assert timed_models == ["diff", "diff_v2"]


@pytest.mark.usefixtures("steps_take_half_a_second")
def test_flops_are_those_of_all_runs_of_a_variant():
  first, second = runs("ablations", ("diff",), seeds=(0, 1))

  text = estimate("ablations", [first, second], finished=[])

  flops_of_first = pace.training_flops(first.config)
  expected = flops_of_first + pace.training_flops(second.config)
  flops = float(table_rows(text)["diff"]["FLOPs"])
  assert flops == pytest.approx(expected, rel=0.01)


@pytest.mark.usefixtures("steps_take_half_a_second")
@pytest.mark.parametrize("slots, hours", [(1, "0.5"), (2, "0.25")])
def test_runs_side_by_side_divide_the_hours(slots, hours):
  """There are six runs with 600 steps, and a step takes half a second."""
  chosen = runs("ablations", ("diff", "diff_v2"), seeds=(0, 1, 2))

  text = estimate("ablations", chosen, finished=[], slots=slots)

  assert table_rows(text)["all"]["hours"] == hours


def test_runs_without_training_steps_are_not_timed(steps_take_half_a_second):
  """The experiment "throughput" trains no model."""
  shapes = ("tiny,length=256", "tiny,length=2048")
  chosen = runs("throughput", shapes, seeds=(0,))

  text = estimate("throughput", chosen, finished=[])

  timed_configs = steps_take_half_a_second
  assert timed_configs == []
  for shape in shapes:
    row = table_rows(text)[shape]
    for column in ("tokens", "FLOPs", "seconds a run", "hours", "by"):
      assert row[column] == "–"
  assert text.endswith(
    "No run has finished on this machine, and these runs take no training steps"
    " that could be timed."
  )


@pytest.mark.usefixtures("steps_take_half_a_second")
def test_runs_without_training_steps_are_estimated_by_their_flops():
  """The experiment "throughput" trains no model. One of its runs took 36 s."""
  shapes = ("tiny,length=256", "tiny,length=2048")
  finished_run, other_run = runs("throughput", shapes, seeds=(0,))

  text = estimate(
    "throughput", [finished_run, other_run], finished=[(finished_run, 36.0)]
  )

  rows = table_rows(text)
  assert rows["tiny,length=256"]["seconds a run"] == "36"
  assert rows["tiny,length=256"]["by"] == "1 finished run"
  finished_flops = pace.training_flops(finished_run.config)
  other_flops = pace.training_flops(other_run.config)
  seconds = float(rows["tiny,length=2048"]["seconds a run"])
  # The table rounds to three digits.
  assert seconds == pytest.approx(36 * other_flops / finished_flops, rel=0.01)
  assert rows["tiny,length=2048"]["by"] == "finished runs of other shapes"


@pytest.mark.usefixtures("steps_take_half_a_second")
def test_the_table_names_the_command_for_the_runs_that_are_measured():
  """The experiment "outliers" measures runs that "ablations" trains."""
  outliers = runs("outliers", ("transformer", "diff"))

  text = estimate("outliers", outliers, finished=[])

  assert "python -m experiments.run ablations --cost" in text


def test_only_small_models_are_for_this_machine():
  small = runs("ablations", ("transformer", "diff"))
  large = runs("ablations", ("diff,size=125m",))

  assert cost.for_this_machine(small)
  assert not cost.for_this_machine(large)


def test_hours_of_chips_assume_40_percent_of_the_peak():
  chosen = runs("ablations", ("diff,size=125m", "transformer,size=125m"))

  rows = table_rows(cost.on_chips(chosen))

  flops = 0.0
  for run in chosen:
    if run.variant == "diff,size=125m":
      flops += pace.training_flops(run.config)
  h100_peak_flops_per_second = 989.4e12
  seconds = flops / (0.4 * h100_peak_flops_per_second)
  # The table rounds to three digits.
  hours = float(rows["diff,size=125m"]["H100"])
  assert hours == pytest.approx(seconds / 3600, rel=0.01)
  assert rows["all"]["runs"] == str(len(chosen))


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
  (run,) = runs("ablations", ("diff",), seeds=(0,), changes=changes)
  return run.config


@pytest.mark.full
def test_larger_steps_take_longer(small_config):
  train = dataclasses.replace(small_config.train, batch_size=64)
  large_config = dataclasses.replace(small_config, train=train)

  seconds = cost.time_steps({"small": small_config, "large": large_config}, {})

  assert 0 < seconds["small"] < seconds["large"] < 60


@pytest.mark.full
def test_steps_that_cannot_be_timed_are_an_error(small_config):
  # This machine has fewer than seven devices.
  seven_devices = dataclasses.replace(small_config.mesh, data=7)
  config = dataclasses.replace(small_config, mesh=seven_devices)

  with pytest.raises(UserError, match="timing steps failed, as said above"):
    cost.time_steps({"seven devices": config}, {})
