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
from tests.harness.tolerances import FLOAT32_LAYER


@pytest.fixture(scope="module")
def run_of_ablations(make_shared_workdir):
  """The workdir and the config of a small run, with three validation rows."""
  (run,) = grid.expand(
    "ablations", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  workdir, config = make_shared_workdir("run", run.config)
  rows = dataclasses.replace(config.eval, rows=3)
  return workdir, dataclasses.replace(config, eval=rows)


@pytest.fixture(scope="module")
def measured(run_of_ablations):
  """The measurements of the run."""
  workdir, config = run_of_ablations
  return experiment.measure(workdir, config)


def validation_loss(workdir, config):
  """Returns the loss of a run in its first three validation rows."""
  trained = load(workdir)
  (batch,) = validation_batches(config, 3)
  losses = jax.jit(token_losses, static_argnums=0)(
    trained.model, trained.params, batch
  )
  return float(np.sum(losses * batch["weights"]) / np.sum(batch["weights"]))


def test_magnitudes_are_sorted_and_have_a_ratio(measured):
  """Magnitudes are absolute attention logits and absolute hidden states."""
  ranks = ("top_1", "top_2", "top_3", "top_10", "top_100", "median")
  for kind in ("logits", "hidden"):
    magnitudes = [measured[f"{kind}_{rank}"] for rank in ranks]
    assert magnitudes == sorted(magnitudes, reverse=True)
    largest = measured[f"{kind}_top_1"]
    median = measured[f"{kind}_median"]
    assert largest > median > 0
    assert measured[f"{kind}_ratio"] == largest / median


def test_logits_of_fewer_bits_change_the_validation_loss_more(
  run_of_ablations, measured
):
  """A rise is the loss with rounded attention logits minus the exact loss.

  The rounding has one scale per tensor or one per row of logits.
  """
  workdir, config = run_of_ablations

  loss = validation_loss(workdir, config)
  assert measured["loss"] == pytest.approx(loss, rel=FLOAT32_LAYER["rtol"])
  # The parameters are random, so rounded logits change the loss only a little.
  assert 0 < abs(measured["rise_tensor_8"]) < abs(measured["rise_tensor_4"])
  assert abs(measured["rise_tensor_4"]) < 0.1 * loss
  assert 0 < abs(measured["rise_row_8"]) < abs(measured["rise_row_4"])
  assert abs(measured["rise_row_4"]) < 0.1 * loss
  columns_of_the_table = set(experiment.EXPERIMENT.metrics.values())
  assert measured.keys() >= columns_of_the_table


def test_the_measured_runs_are_those_of_ablations():
  """The experiment "outliers" trains no model."""
  changes = {"train.steps": 700}
  gpu_grid_of_ablations = grid.load("ablations").grids["gpu"]
  ablations_configs = {}
  for run in grid.expand("ablations", gpu_grid_of_ablations, changes):
    ablations_configs[run.name] = run.config

  runs = grid.expand("outliers", experiment.EXPERIMENT.grids["gpu"], changes)

  assert not experiment.EXPERIMENT.trains
  for run in runs:
    assert run.config == ablations_configs[run.name]
    # The run whose parameters are measured.
    assert run.pretrained.config == ablations_configs[run.name]


def test_the_plot_has_a_line_for_each_architecture_and_scale(make_results):
  """Attention logits are rounded with one scale per tensor or per row."""

  def measured(run):
    numbers = {}
    for rank in experiment.VALUES:
      numbers[f"logits_{rank}"] = 60.0
      numbers[f"hidden_{rank}"] = 60.0
    for bits in experiment.BITS:
      numbers[f"rise_tensor_{bits}"] = 0.01
      numbers[f"rise_row_{bits}"] = 0.01
    return numbers

  grid_results = make_results("outliers", experiment.EXPERIMENT, measured)

  logits, hidden, rises = experiment.plot(grid_results).axes

  _, labels_of_logits = logits.get_legend_handles_labels()
  assert labels_of_logits == ["Transformer", "DIFF", "DIFF V2"]
  assert hidden.get_title() == "Absolute hidden states"
  _, labels_of_rises = rises.get_legend_handles_labels()
  for architecture in ("Transformer", "DIFF", "DIFF V2"):
    assert f"{architecture}, scaled per tensor" in labels_of_rises
    assert f"{architecture}, scaled per row" in labels_of_rises
