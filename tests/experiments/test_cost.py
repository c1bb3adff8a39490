"""What a grid costs: hours of this machine by finished runs or by steps, and hours of chips."""

import dataclasses

import pytest

from diffjax.config import UserError
from experiments import cost, grid, pace, results
from experiments.launch import Devices

MACHINE = results.machine(Devices("cpu", "cpu", 1), 1)


def runs(
  variants=("transformer", "diff"), seeds=(0, 1), name="ablations", **changes
):
  return grid.expand(name, grid.Grid(variants, variants[0], seeds), changes)


def rows(text):
  return {
    cells[0]: cells[1:]
    for line in text.splitlines()
    if (cells := [cell.strip() for cell in line.split("|")[1:-1]])
  }


@pytest.fixture
def timed(monkeypatch):
  """Steps take half a second; `timed` holds the configs that were timed."""
  asked = []

  def time_steps(shapes, env):
    asked.extend(shapes.values())
    return dict.fromkeys(shapes, 0.5)

  monkeypatch.setattr(cost, "time_steps", time_steps)
  return asked


def here(experiment, chosen, finished, slots=1):
  return cost.on_this_machine(grid.load(experiment), chosen, finished, MACHINE, slots, {})


def test_finished_runs_say_it_or_else_steps(timed):
  """A shape is timed once, and only if none of its runs has finished."""
  chosen = runs(
    ("transformer", "diff", "diff_lambda_0.8", "diff_v2"), (0, 1, 2)
  )
  finished = [
    (run, seconds)
    for run, seconds in zip(
      (run for run in chosen if run.variant == "transformer"),
      (300, 3000, 360),
      strict=True,
    )
  ]
  found = here("ablations", chosen, finished)
  assert (
    found.startswith(f"hours of {MACHINE}, 1 at a time\n")
    and "as busy as it is now" in found
  )
  table = rows(found)
  assert table["transformer"][:3] == ["3", "0.837 M", "2.46 M"] and table[
    "transformer"
  ][4:] == ["360", "0.3", "3 finished runs"]
  assert (
    table["diff"][4:]
    == table["diff_lambda_0.8"][4:]
    == ["300", "0.25", "steps of 0.5 s"]
  )
  assert float(table["diff"][3]) == pytest.approx(
    3 * pace.training_flops(chosen[1].config), rel=0.01
  )
  assert table["all"][5] == "1.05" and [
    config.model.attention for config in timed
  ] == ["diff", "diff_v2"]
  assert rows(here("ablations", chosen, finished, 2))["all"][5] == "0.525", (
    "two at a time"
  )


def test_what_trains_nothing_says_what_it_can(timed):
  """By its finished runs, those of other shapes too; nothing is timed."""
  experiment, chosen = (
    grid.load("throughput"),
    grid.expand("throughput", grid.load("throughput").grids["cpu"], {}),
  )
  found = here("throughput", chosen, [])
  assert (
    rows(found)["tiny,length=256"][2:]
    == rows(found)["tiny,length=2048"][2:]
    == ["–"] * 5
  )
  assert found.endswith(
    "No run has finished on this machine, and these runs take no training steps that could be timed."
  )
  table = rows(here("throughput", chosen, [(chosen[0], 36.0)]))
  assert (
    table["tiny,length=256"][4:] == ["36", "0.01", "1 finished run"]
    and table["tiny,length=2048"][6] == "finished runs of other shapes"
  )
  assert float(table["tiny,length=2048"][4]) == pytest.approx(
    36
    * pace.training_flops(chosen[1].config)
    / pace.training_flops(chosen[0].config),
    rel=0.01,
  )
  assert "python -m experiments.run ablations --cost" in here(
    "outliers", runs(name="outliers"), []
  )
  assert not timed and not experiment.trains


def test_large_grids_are_counted_in_hours_of_chips():
  assert cost.for_this_machine(runs()) and not cost.for_this_machine(
    runs(("diff,size=125m",))
  )
  chosen = runs(("diff,size=125m", "transformer,size=125m"))
  table = rows(cost.on_chips(chosen))
  flops = sum(
    pace.training_flops(run.config)
    for run in chosen
    if run.variant == "diff,size=125m"
  )
  assert float(table["diff,size=125m"][5]) == pytest.approx(
    flops / (0.4 * 989.4e12) / 3600, rel=0.01
  )
  assert table["all"][0] == "4"


@pytest.mark.full
def test_steps_are_timed_in_another_process():
  """One time for each shape, longer for a larger one; a failure is said."""
  small = runs(
    ("diff",),
    (0,),
    **{"model.num_layers": 1, "train.batch_size": 1, "data.length": 32},
  )[0].config
  large = dataclasses.replace(
    small, train=dataclasses.replace(small.train, batch_size=64)
  )
  found = cost.time_steps(
    {pace.shape(config): config for config in (small, large)}, {}
  )
  assert 0 < found[pace.shape(small)] < found[pace.shape(large)] < 60
  wrong = dataclasses.replace(
    small, mesh=dataclasses.replace(small.mesh, data=7)
  )
  with pytest.raises(UserError, match="timing steps failed, as said above"):
    cost.time_steps({pace.shape(wrong): wrong}, {})
