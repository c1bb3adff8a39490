"""Outliers: the magnitudes and the losses that are measured."""

import dataclasses

import jax
import numpy as np
import pytest

from diffjax.data.pipeline import validation_batches
from diffjax.inference.trained import load
from diffjax.training.validation import token_losses
from experiments import grid
from experiments.outliers import experiment


@pytest.fixture
def run_of_ablations(make_workdir):
  """The workdir and the config of a small run, with three validation rows."""
  (run,) = grid.expand(
    "ablations", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  workdir, config = make_workdir("run", run.config)
  rows = dataclasses.replace(config.eval, rows=3)
  return workdir, dataclasses.replace(config, eval=rows)


def validation_loss(workdir, config):
  """Returns the loss of a run in its first three validation rows."""
  trained = load(workdir)
  (batch,) = validation_batches(config, 3)
  losses = jax.jit(token_losses, static_argnums=0)(
    trained.model, trained.params, batch
  )
  return float(np.sum(losses * batch["weights"]) / np.sum(batch["weights"]))


def test_the_measurements_of_a_run(run_of_ablations):
  """Several properties are checked here, since a measurement takes long."""
  workdir, config = run_of_ablations

  measured = experiment.measure(workdir, config)

  # VALUES begins with the largest magnitude, and ends with the median. "hidden"
  # are the hidden states.
  for kind in ("logits", "hidden"):
    magnitudes = [measured[f"{kind}_{value}"] for value in experiment.VALUES]
    assert magnitudes == sorted(magnitudes, reverse=True)
    assert magnitudes[0] > magnitudes[-1] > 0
    assert measured[f"{kind}_ratio"] == magnitudes[0] / magnitudes[-1]

  # "rise" is the change of the loss if attention logits are rounded. Logits of
  # 4 bits change it more than logits of 8 bits.
  for scaled_per in experiment.SCALED_PER:
    change_with_8_bits = abs(measured[f"rise_{scaled_per}_8"])
    change_with_4_bits = abs(measured[f"rise_{scaled_per}_4"])
    assert 0 < change_with_8_bits < change_with_4_bits
    assert change_with_4_bits < 0.1 * measured["loss"]

  expected_loss = validation_loss(workdir, config)
  assert measured["loss"] == pytest.approx(expected_loss, rel=1e-5)

  columns_of_the_table = set(experiment.EXPERIMENT.metrics.values())
  assert measured.keys() >= columns_of_the_table


def test_the_measured_runs_are_those_of_ablations():
  """This experiment does not train."""
  changes = {"train.steps": 700}
  gpu_grid_of_ablations = grid.load("ablations").grids["gpu"]
  ablations = {}
  for run in grid.expand("ablations", gpu_grid_of_ablations, changes):
    ablations[run.name] = run

  runs = grid.expand("outliers", experiment.EXPERIMENT.grids["gpu"], changes)

  assert not experiment.EXPERIMENT.trains
  for run in runs:
    assert run.config == ablations[run.name].config
    assert run.pretrained.config == run.config


def test_the_plot_has_a_line_for_each_row_and_scale(make_results):
  def measured(run):
    numbers = {}
    for kind in ("logits", "hidden"):
      for rank, value in enumerate(experiment.VALUES):
        numbers[f"{kind}_{value}"] = 60.0 / (1 + rank) + run.seed
    for per in experiment.SCALED_PER:
      for bits in experiment.BITS:
        numbers[f"rise_{per}_{bits}"] = 0.01 * run.seed + 4.0**-bits
    return numbers

  grid_results = make_results("outliers", experiment.EXPERIMENT, measured)

  logits, hidden, bits = experiment.plot(grid_results).axes

  _, labels = logits.get_legend_handles_labels()
  assert labels == ["Transformer", "DIFF", "DIFF V2"]
  assert hidden.get_title() == "Absolute hidden states"
  # Three rows with a scale per tensor, then three with a scale per row.
  _, labels = bits.get_legend_handles_labels()
  assert labels[1] == "DIFF, scaled per tensor"
  assert labels[4] == "DIFF, scaled per row"
