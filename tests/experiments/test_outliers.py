"""Outliers of ablations' runs: the magnitudes are the model's, and fewer bits cost more."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.inference.trained import load
from experiments import grid, plots, results
from experiments.outliers import experiment
from tests.harness.tiers import full


@pytest.mark.parametrize("variant", ["diff", *full(["transformer", "diff_v2"])])
def test_measure(make_workdir, variant):
  workdir, config = make_workdir(
    "run",
    grid.expand("ablations", grid.Grid((variant,), variant), {})[0].config,
  )
  found = experiment.measure(
    workdir,
    dataclasses.replace(config, eval=dataclasses.replace(config.eval, rows=3)),
  )
  assert (
    found["logits_ratio"] == found["logits_top_1"] / found["logits_median"] > 1
  )
  assert (
    found["hidden_ratio"] == found["hidden_top_1"] / found["hidden_median"] > 1
  )
  for name in ("logits", "hidden"):
    values = [found[f"{name}_{value}"] for value in experiment._VALUES]
    assert values == sorted(values, reverse=True) and values[0] > values[-1] > 0
  for per in experiment._PER:
    rises = [abs(found[f"rise_{per}_{bits}"]) for bits in experiment._BITS]
    assert 0 < rises[0] < rises[-1] < 0.1 * found["loss"]
  assert set(experiment.EXPERIMENT.metrics.values()) <= found.keys()
  # The loss is that of the first rows of the run's own validation
  from diffjax.data.pipeline import validation_batches
  from diffjax.training.validation import token_losses

  trained = load(workdir)
  config = dataclasses.replace(
    config, eval=dataclasses.replace(config.eval, rows=3)
  )
  (batch,) = validation_batches(config, 3)
  loss = jax.jit(lambda params: token_losses(trained.model, params, batch))(
    trained.params
  )
  assert found["loss"] == pytest.approx(
    float(jnp.sum(loss * batch["weights"]) / np.sum(batch["weights"])), rel=1e-5
  )


def test_nothing_is_trained_twice():
  """The runs measured are those of ablations, config by config."""
  runs = grid.expand(
    "outliers", experiment.EXPERIMENT.grids["gpu"], {"train.steps": 700}
  )
  theirs = {
    run.name: run
    for run in grid.expand(
      "ablations", grid.load("ablations").grids["gpu"], {"train.steps": 700}
    )
  }
  assert not experiment.EXPERIMENT.trains
  for run in runs:
    assert run.pretrained.config == theirs[run.name].config == run.config


def test_the_plot_and_the_table(make_results, tmp_path):
  rng = np.random.default_rng(0)

  def measured(run):
    size = {"transformer": 60.0, "diff": 40.0, "diff_v2": 45.0}[
      run.variant
    ] * rng.uniform(0.9, 1.1)
    rank = dict(
      zip(experiment._VALUES, (1, 0.98, 0.97, 0.93, 0.87, 0.04), strict=True)
    )
    out = {
      f"{name}_{value}": size * share
      for name in ("logits", "hidden")
      for value, share in rank.items()
    }
    rises = {
      f"rise_{per}_{bits}": size / 4 ** (bits + 2 * (per == "row"))
      for per in experiment._PER
      for bits in experiment._BITS
    }
    return {
      **out,
      **rises,
      "loss": 1.33,
      "logits_ratio": 25.0,
      "hidden_ratio": 20.0,
    }

  found = make_results("outliers", experiment.EXPERIMENT, measured)
  plots.save(experiment.plot(found), tmp_path)
  assert (tmp_path / "plot.png").stat().st_size > 20_000
  table = results.table(experiment.EXPERIMENT, found)
  assert table.count("| diff |") == 2 and "rise at 4 bits per row" in table
