"""Tokens: the slope of a difference over the tokens, and its interval."""

import math

import numpy as np
import pytest

from experiments import series
from experiments.tokens import experiment


def make_results(losses: dict[tuple[str, int], list[float]]):
  """Returns results with these losses by row and multiple of the tokens."""
  runs = []
  for (row, times), cell in losses.items():
    for seed, loss in enumerate(cell):
      run = {
        "variant": f"{row},times={times}",
        "seed": seed,
        "results": {"validation/loss": loss},
      }
      runs.append(run)
  return {"baseline": "transformer,*", "runs": runs}


def simulated_losses(rng: np.random.Generator, slope: float, spread: float):
  """Returns losses of DIFF and of the Transformer, three seeds each.

  Their difference is linear in the logarithm of the tokens, although the losses
  themselves are not.

  Args:
    rng: Generates the noise of the losses.
    slope: The slope of the difference.
    spread: The standard deviation of the noise.
  """
  losses = {}
  for times in experiment.TIMES:
    log_times = math.log(times)
    transformer = 2 - 0.3 * log_times + 0.05 * log_times**2
    diff = transformer + 0.05 + slope * log_times
    for row, mean in (("transformer", transformer), ("diff", diff)):
      noise = spread * rng.standard_normal(3)
      losses[row, times] = list(mean + noise)
  return losses


def test_the_slope_does_not_depend_on_the_shape_of_the_curves():
  """The losses of DIFF minus those of the Transformer are on a line."""
  rng = np.random.default_rng(0)
  losses = simulated_losses(rng, slope=-0.02, spread=1e-9)

  slope, low, high = experiment.slope(
    make_results(losses), "diff", "transformer"
  )

  # Almost without noise, the interval has almost no width.
  assert slope == pytest.approx(-0.02, abs=1e-6)
  assert low == pytest.approx(-0.02, abs=1e-6)
  assert high == pytest.approx(-0.02, abs=1e-6)


def test_there_is_no_slope_before_all_runs_have_finished():
  losses = simulated_losses(np.random.default_rng(0), slope=0.0, spread=0.1)
  # DIFF has not been trained on twelve times the tokens.
  del losses["diff", 12]

  fitted = experiment.slope(make_results(losses), "diff", "transformer")

  assert fitted is None


def test_about_95_percent_of_intervals_contain_the_slope():
  rng = np.random.default_rng(1)
  true_slope = 0.01
  num_simulations = 400

  num_hits = 0
  for _ in range(num_simulations):
    losses = simulated_losses(rng, slope=true_slope, spread=0.02)
    fitted = experiment.slope(make_results(losses), "diff", "transformer")
    _, low, high = fitted
    if low <= true_slope <= high:
      num_hits += 1

  # With 400 simulations, a share of 0.95 has a standard deviation of 0.01.
  assert 0.92 <= num_hits / num_simulations <= 0.985


def test_fairness_has_the_runs_with_once_the_tokens():
  """The experiment "fairness" trains the same models on once the tokens."""
  # Two runs of DIFF with four times the tokens.
  longer = make_results({("diff", 4): [1.0, 2.0]})
  diff = {"variant": "diff", "seed": 10, "results": {"validation/loss": 3.0}}
  gated = {"variant": "gated", "seed": 10, "results": {"validation/loss": 3.0}}

  merged = experiment.with_fairness(longer, fairness={"runs": [diff, gated]})

  # "gated" is no variant of this experiment.
  variants = series.column(merged["runs"], "variant")
  assert variants == ["diff,times=1", "diff,times=4", "diff,times=4"]


def test_fairness_may_have_no_results():
  longer = make_results({("diff", 4): [1.0, 2.0]})

  merged = experiment.with_fairness(longer, fairness=None)

  assert merged["runs"] == longer["runs"]
