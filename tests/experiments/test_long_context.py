"""Length extensions: only the length and the fields that follow from it change, and both curves are of the same documents."""

import dataclasses

import numpy as np
import pytest

from experiments import grid, plots, results
from experiments.ablations.config import get_config as pretrained
from experiments.long_context import experiment
from experiments.long_context.config import get_config
from tests.harness.tiers import full


@pytest.mark.parametrize("size", ["", ",size=125m", ",size=1b"])
@pytest.mark.parametrize("row", ["transformer", "diff", "diff_v2"])
def test_extensions(size, row):
  short, long = (
    grid._with_fields(get(row + size).to_dict(), {})
    for get in (pretrained, get_config)
  )
  factor = long.data.length / short.data.length
  assert factor in (8, 32) and long.model.max_length == long.data.length
  assert long.model.rope_base == pytest.approx(
    short.model.rope_base * factor**1.5
  )
  assert long.optimizer.learning_rate == short.optimizer.learning_rate / 4
  assert (
    long.train.batch_size * long.data.length
    == short.train.batch_size * short.data.length
  )
  same = dict(rope_base=0.0, max_length=0, remat="")  # the parameters fit
  assert dataclasses.replace(long.model, **same) == dataclasses.replace(
    short.model, **same
  )


def test_the_base_grows_as_the_papers():
  from diffjax.configs import diff_3b, diff_3b_64k

  short, long = diff_3b.get_config(), diff_3b_64k.get_config()
  assert (
    long.model.rope_base
    == short.model.rope_base * (long.data.length / short.data.length) ** 1.5
  )
  assert long.optimizer.learning_rate == short.optimizer.learning_rate / 4


@pytest.mark.parametrize("variant", ["diff", *full(["transformer", "diff_v2"])])
def test_measure(make_workdir, variant):
  """With the same parameters, the curves before and after differ by the RoPE base alone; with the same base they are equal."""
  run = grid.expand("long_context", grid.Grid((variant,), variant), {})[0]
  start, _ = make_workdir(
    "start", run.pretrained.config, {"model.max_length": 64}
  )
  longer = {
    "train.init_from": start,
    "data.length": 256,
    "model.max_length": 256,
    "eval.rows": 3,
  }
  find = lambda name, fields: experiment.measure(
    *make_workdir(name, run.config, {**longer, **fields})
  )
  base = run.pretrained.config.model.rope_base
  same, other = find("same", {"model.rope_base": base}), find("other", {})
  assert (
    same["positions"] == [16, 23, 32, 45, 64, 91, 128, 181, 256]
    and same["own_length"] == 64
  )
  assert (
    same["curve_after"]
    == same["curve_before"]
    == other["curve_before"]
    != other["curve_after"]
  )
  assert (
    other["after"] == other["curve_after"][-1]
    and other["after_short"] == other["curve_after"][4]
  )
  assert (
    other["before"] == other["curve_before"][-1]
    and other["before_short"] == other["curve_before"][4]
  )
  assert other["gain"] == other["after_short"] - other["after"]
  assert set(experiment.EXPERIMENT.metrics.values()) <= other.keys()


def test_the_plot_and_the_table(make_results, tmp_path):
  rng = np.random.default_rng(0)
  positions = np.array([64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048])

  def measured(run):
    level = 1.5 - 0.03 * (run.variant == "diff") + rng.normal(0, 0.01)
    after = level - 0.02 * np.log2(positions / 64)
    before = after + np.maximum(0, np.log2(positions / 256)) * 0.5
    ends = {
      "before": before[-1],
      "before_short": before[4],
      "after": after[-1],
      "after_short": after[4],
      "gain": after[4] - after[-1],
    }
    return {
      **ends,
      "own_length": 256,
      "positions": positions,
      "curve_before": before,
      "curve_after": after,
    }

  found = make_results("long_context", experiment.EXPERIMENT, measured)
  plots.save(experiment.plot(found), tmp_path)
  assert (tmp_path / "plot.png").stat().st_size > 20_000
  assert results.table(experiment.EXPERIMENT, found).count("| diff |") == 2
