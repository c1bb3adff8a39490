"""The table of what a grid costs, on this machine and on chips."""

import dataclasses

import pytest

from diffjax.config import UserError
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
def timed_configs(monkeypatch):
  """Makes a step take half a second. Returns the configs that are timed."""
  configs = []

  def time_steps(config_by_shape, env):
    configs.extend(config_by_shape.values())
    return dict.fromkeys(config_by_shape, 0.5)

  monkeypatch.setattr(cost, "time_steps", time_steps)
  return configs


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


@pytest.fixture
def ablations():
  """Three runs of each of four variants. Two of them have the same shape."""
  variants = ("transformer", "diff", "diff_lambda_0.8", "diff_v2")
  return runs("ablations", variants, seeds=(0, 1, 2))


@pytest.fixture
def finished_transformers(ablations):
  """The Transformer's runs and their seconds. The median is 360."""
  first, second, third = [
    run for run in ablations if run.variant == "transformer"
  ]
  return [(first, 300), (second, 3000), (third, 360)]


@pytest.mark.usefixtures("timed_configs")
def test_finished_runs_tell_the_time(ablations, finished_transformers):
  """The three runs of the Transformer took 300, 360 and 3,000 seconds."""
  text = estimate("ablations", ablations, finished_transformers)

  assert text.startswith(f"hours of {MACHINE}, 1 at a time\n")
  row = table_rows(text)["transformer"]
  assert row["runs"] == "3"
  assert row["parameters"] == "0.837 M"
  # 600 steps of 16 rows of 256 tokens.
  assert row["tokens"] == "2.46 M"
  # The median.
  assert row["seconds a run"] == "360"
  assert row["hours"] == str(3 * 360 / 3600)
  assert row["by"] == "3 finished runs"


# Here, a step takes half a second.
@pytest.mark.usefixtures("timed_configs")
def test_steps_tell_the_time_of_other_shapes(ablations, finished_transformers):
  text = estimate("ablations", ablations, finished_transformers)

  rows = table_rows(text)
  for variant in ("diff", "diff_lambda_0.8"):
    # 600 steps of 0.5 seconds, for each of three runs.
    assert rows[variant]["seconds a run"] == "300"
    assert rows[variant]["hours"] == "0.25"
    assert rows[variant]["by"] == "steps of 0.5 s"
  assert "as busy as it is now" in text


def test_a_shape_is_timed_once(timed_configs, ablations, finished_transformers):
  """The variants are the Transformer, DIFF with two λ_init, and DIFF V2."""
  estimate("ablations", ablations, finished_transformers)

  # λ_init changes no shape. The steps of the Transformer are not timed, since
  # its runs have finished.
  timed_models = [config.model.attention for config in timed_configs]
  assert timed_models == ["diff", "diff_v2"]


@pytest.mark.usefixtures("timed_configs")
def test_flops_are_those_of_all_runs_of_a_variant(ablations):
  text = estimate("ablations", ablations, finished=[])

  expected = 0.0
  for run in ablations:
    if run.variant == "diff":
      expected += pace.training_flops(run.config)
  flops = float(table_rows(text)["diff"]["FLOPs"])
  assert flops == pytest.approx(expected, rel=0.01)


@pytest.mark.usefixtures("timed_configs")
@pytest.mark.parametrize("slots, hours", [(1, "1.05"), (2, "0.525")])
def test_runs_side_by_side_divide_the_hours(
  ablations, finished_transformers, slots, hours
):
  """The Transformer takes 0.3 hours, and three other variants 0.25 each."""
  text = estimate("ablations", ablations, finished_transformers, slots=slots)

  assert table_rows(text)["all"]["hours"] == hours


@pytest.fixture
def throughput():
  """Two runs of an experiment that trains nothing, of different shapes."""
  shapes = ("tiny,length=256", "tiny,length=2048")
  return runs("throughput", shapes, seeds=(0,))


def test_runs_that_train_nothing_are_not_timed(timed_configs, throughput):
  text = estimate("throughput", throughput, finished=[])

  rows = table_rows(text)
  for shape in ("tiny,length=256", "tiny,length=2048"):
    for column in ("tokens", "FLOPs", "seconds a run", "hours", "by"):
      assert rows[shape][column] == "–"
  assert text.endswith(
    "No run has finished on this machine, and these runs take no training steps"
    " that could be timed."
  )
  assert not timed_configs


@pytest.mark.usefixtures("timed_configs")
def test_runs_that_train_nothing_are_estimated_from_other_shapes(throughput):
  """Their seconds are proportional to the FLOPs of their shapes."""
  short, long = throughput

  text = estimate("throughput", throughput, finished=[(short, 36.0)])

  short_row = table_rows(text)["tiny,length=256"]
  assert short_row["seconds a run"] == "36"
  assert short_row["by"] == "1 finished run"
  long_row = table_rows(text)["tiny,length=2048"]
  factor = pace.training_flops(long.config) / pace.training_flops(short.config)
  seconds = float(long_row["seconds a run"])
  assert seconds == pytest.approx(36 * factor, rel=0.01)
  assert long_row["by"] == "finished runs of other shapes"


@pytest.mark.usefixtures("timed_configs")
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


def test_chip_hours_follow_from_the_peak():
  chosen = runs("ablations", ("diff,size=125m", "transformer,size=125m"))

  rows = table_rows(cost.on_chips(chosen))

  flops = 0.0
  for run in chosen:
    if run.variant == "diff,size=125m":
      flops += pace.training_flops(run.config)
  # The table assumes 40% of the peak. An H100 has a peak of 989.4 TFLOP/s.
  flops_per_second = 0.4 * 989.4e12
  h100_hours = float(rows["diff,size=125m"]["H100"])
  assert h100_hours == pytest.approx(flops / flops_per_second / 3600, rel=0.01)
  # Two variants with two seeds.
  assert rows["all"]["runs"] == "4"


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
