"""Length extensions of ablations' runs, and the loss by position."""

import dataclasses

import numpy as np
import pytest

from diffjax.config import from_config_dict
from diffjax.configs import diff_3b, diff_3b_64k
from experiments import grid
from experiments.ablations import config as ablations
from experiments.long_context import config as long_context
from experiments.long_context import experiment

SIZES = pytest.mark.parametrize("size", ["tiny", "125m", "1b"])


def configs(row: str, size: str):
  """Returns the config of a run of ablations, and that of its extension.

  An extension trains a finished run further, with longer rows.
  """
  variant = f"{row},size={size}"
  short = from_config_dict(ablations.get_config(variant).to_dict())
  extended = from_config_dict(long_context.get_config(variant).to_dict())
  return short, extended


@SIZES
def test_the_rope_base_grows_with_the_length(size):
  """An extension trains a finished run further, with longer rows."""
  short, extended = configs("diff", size)

  # Rows are 8 times as long, or 32 times.
  factor = extended.data.length / short.data.length
  assert factor in (8, 32)
  assert extended.model.max_length == extended.data.length
  # The rule of the paper's extension.
  expected_base = short.model.rope_base * factor**1.5
  assert extended.model.rope_base == pytest.approx(expected_base)


@SIZES
def test_an_extension_has_the_tokens_of_a_step_and_a_quarter_of_the_rate(size):
  short, extended = configs("diff", size)

  short_tokens = short.train.batch_size * short.data.length
  assert extended.train.batch_size * extended.data.length == short_tokens
  short_rate = short.optimizer.learning_rate
  assert extended.optimizer.learning_rate == short_rate / 4


@SIZES
@pytest.mark.parametrize("row", ["transformer", "diff", "diff_v2"])
def test_the_parameters_of_a_run_fit_its_extension(size, row):
  short, extended = configs(row, size)

  # Only the fields of the model that have no effect on parameters may differ.
  same_shapes = dataclasses.replace(
    extended.model,
    rope_base=short.model.rope_base,
    max_length=short.model.max_length,
    remat=short.model.remat,
  )
  assert same_shapes == short.model


def test_the_papers_extension_has_the_same_rope_base_and_rate_rules():
  short = diff_3b.get_config()
  extended = diff_3b_64k.get_config()

  factor = extended.data.length / short.data.length
  assert extended.model.rope_base == short.model.rope_base * factor**1.5
  short_rate = short.optimizer.learning_rate
  assert extended.optimizer.learning_rate == short_rate / 4


@pytest.fixture
def measure(make_workdir):
  """measure("name", rope_base=8e4): the measurements of an extension.

  The run of 64 tokens and its extension to 256 have the same parameters.
  """
  grid_of_one = grid.Grid(variants=("diff",), baseline="diff")
  (run,) = grid.expand("long_context", grid_of_one, {})
  short = run.pretrained.config
  start, _ = make_workdir("start", short, {"model.max_length": 64})

  def measure_extension(name, rope_base):
    fields = {
      "train.init_from": start,
      "data.length": 256,
      "model.max_length": 256,
      "model.rope_base": rope_base,
      "eval.rows": 3,
    }
    workdir, config = make_workdir(name, run.config, fields)
    return experiment.measure(workdir, config)

  return measure_extension


def test_the_curves_differ_by_the_rope_base_alone(measure):
  # The extension has the parameters of the run, whose base is 10,000.
  same = measure("same", rope_base=10_000.0)
  larger = measure("larger", rope_base=80_000.0)

  # The curves are losses by position, before and after the extension.
  assert same["curve_before"] == same["curve_after"]
  assert larger["curve_before"] == same["curve_before"]
  assert larger["curve_after"] != same["curve_after"]

  # The columns of the table are values of the curves: "short" is the loss at
  # the run's own length, and the others are the loss at the last position.
  # Each position is about √2 times the one before.
  positions = [16, 23, 32, 45, 64, 91, 128, 181, 256]
  assert larger["positions"] == positions
  assert larger["own_length"] == 64
  own = positions.index(64)
  assert larger["before_short"] == larger["curve_before"][own]
  assert larger["before"] == larger["curve_before"][-1]
  assert larger["after_short"] == larger["curve_after"][own]
  assert larger["after"] == larger["curve_after"][-1]
  assert larger["gain"] == larger["after_short"] - larger["after"]
  assert larger.keys() >= set(experiment.EXPERIMENT.metrics.values())


def test_the_plot_has_the_curves_before_and_after(make_results):
  """The right panel compares the curves after the extension."""

  def measured(run):
    loss = 1.5 + 0.01 * run.seed
    return {
      "own_length": 256,
      "positions": [64, 256, 1024, 2048],
      "curve_before": np.full(4, loss + 1),
      "curve_after": np.full(4, loss),
    }

  grid_results = make_results("long_context", experiment.EXPERIMENT, measured)

  left, right = experiment.plot(grid_results).axes

  _, labels = left.get_legend_handles_labels()
  assert "DIFF, before" in labels
  assert "DIFF, after" in labels
  _, labels = right.get_legend_handles_labels()
  assert labels == ["Transformer", "DIFF", "DIFF V2"]
