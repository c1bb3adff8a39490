"""Length extensions of ablations' runs, and the loss by position."""

import dataclasses
import functools

import pytest

from diffjax.config import from_config_dict
from diffjax.configs import diff_3b, diff_3b_64k
from experiments import grid
from experiments.ablations import config as ablations
from experiments.long_context import config as long_context
from experiments.long_context import experiment


def configs(row: str, size: str):
  """Returns the config of a run of ablations, and the config of its extension.

  An extension trains a finished run further, with longer rows.
  """
  variant = f"{row},size={size}"
  short = from_config_dict(ablations.get_config(variant).to_dict())
  extended = from_config_dict(long_context.get_config(variant).to_dict())
  return short, extended


@pytest.mark.parametrize(
  "size, length_factor", [("tiny", 8), ("125m", 8), ("1b", 32)]
)
def test_the_rope_base_grows_with_the_length(size, length_factor):
  short, extended = configs("diff", size)

  assert extended.data.length == length_factor * short.data.length
  assert extended.model.max_length == extended.data.length
  # The paper's extension has the same exponent: its rows are 16 times as long,
  # and its RoPE base is 16**1.5 = 64 times as large.
  expected_base = short.model.rope_base * length_factor**1.5
  assert extended.model.rope_base == pytest.approx(expected_base)


@pytest.mark.parametrize("size", ["tiny", "125m", "1b"])
def test_an_extension_has_the_tokens_of_a_step_and_a_quarter_of_the_rate(size):
  short, extended = configs("diff", size)

  short_tokens = short.train.batch_size * short.data.length
  assert extended.train.batch_size * extended.data.length == short_tokens
  short_rate = short.optimizer.learning_rate
  assert extended.optimizer.learning_rate == short_rate / 4


@pytest.mark.parametrize("size", ["tiny", "125m", "1b"])
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


def test_the_papers_extension_has_a_larger_rope_base_and_a_smaller_rate():
  short = diff_3b.get_config()
  extended = diff_3b_64k.get_config()

  assert extended.data.length == 16 * short.data.length
  assert extended.model.rope_base == 64 * short.model.rope_base
  assert extended.optimizer.learning_rate == short.optimizer.learning_rate / 4


@pytest.fixture(scope="module")
def measure_extension(make_shared_workdir):
  """Returns a function that measures an extension of a run of 64 tokens.

  Both have the same parameters. The RoPE base of the run is 10,000.
  """
  grid_of_one = grid.Grid(variants=("diff",), baseline="diff")
  (run,) = grid.expand("long_context", grid_of_one, {})
  short = run.pretrained.config
  start, _ = make_shared_workdir("start", short, {"model.max_length": 64})

  @functools.cache
  def measure(new_length, rope_base):
    fields = {
      "train.init_from": start,
      "data.length": new_length,
      "model.max_length": new_length,
      "model.rope_base": rope_base,
      "eval.rows": 3,
    }
    name = f"extension_{rope_base}"
    workdir, config = make_shared_workdir(name, run.config, fields)
    return experiment.measure(workdir, config)

  return measure


@pytest.mark.full
def test_only_the_losses_after_the_extension_depend_on_its_rope_base(
  measure_extension,
):
  """The parameters are equal, and the run before the extension has 10,000."""
  same_base = measure_extension(new_length=256, rope_base=10_000.0)
  larger_base = measure_extension(new_length=256, rope_base=80_000.0)

  # A curve has the losses by position.
  assert same_base["curve_after"] == same_base["curve_before"]
  assert larger_base["curve_before"] == same_base["curve_before"]
  assert larger_base["curve_after"] != same_base["curve_after"]


def test_the_table_has_the_losses_at_the_old_and_the_new_length(
  measure_extension,
):
  """The run has 64 tokens in a row before the extension, and 256 after it."""
  measured = measure_extension(new_length=256, rope_base=80_000.0)

  # There are two positions for each factor of two.
  positions = [16, 23, 32, 45, 64, 91, 128, 181, 256]
  assert measured["positions"] == positions
  assert measured["own_length"] == 64
  loss_before = dict(zip(positions, measured["curve_before"], strict=True))
  loss_after = dict(zip(positions, measured["curve_after"], strict=True))
  columns = experiment.EXPERIMENT.metrics.values()
  assert {column: measured[column] for column in columns} == {
    "before_short": loss_before[64],
    "before": loss_before[256],
    "after_short": loss_after[64],
    "after": loss_after[256],
    "gain": loss_after[64] - loss_after[256],
  }


def test_the_legends_name_the_curves_of_both_panels(make_results):
  """The left panel has losses before and after, the right one only after."""

  def measured(run):
    return {
      "own_length": 256,
      "positions": [64, 256, 1024, 2048],
      "curve_before": [2.5, 2.5, 2.5, 2.5],
      "curve_after": [1.5, 1.5, 1.5, 1.5],
    }

  grid_results = make_results("long_context", experiment.EXPERIMENT, measured)

  left, right = experiment.plot(grid_results).axes

  _, left_labels = left.get_legend_handles_labels()
  assert "DIFF, before" in left_labels
  assert "DIFF, after" in left_labels
  _, right_labels = right.get_legend_handles_labels()
  assert right_labels == ["Transformer", "DIFF", "DIFF V2"]
