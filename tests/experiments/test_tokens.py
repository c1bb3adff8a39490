"""Tokens: the slope of a difference over the tokens, and its interval."""

import math

import numpy as np
import pytest

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


def test_the_slope_is_fitted_to_the_difference_of_two_bent_curves():
  """The curves are losses over the logarithm of the tokens."""
  rng = np.random.default_rng(0)
  # Only the difference of the two curves is a line.
  losses = simulated_losses(rng, slope=-0.02, spread=1e-9)

  estimate = experiment.slope(make_results(losses), "diff", "transformer")

  # The losses have almost no noise, so the interval has almost no width.
  assert estimate.value == pytest.approx(-0.02, abs=1e-6)
  assert estimate.low == pytest.approx(-0.02, abs=1e-6)
  assert estimate.high == pytest.approx(-0.02, abs=1e-6)


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
    estimate = experiment.slope(make_results(losses), "diff", "transformer")
    if estimate.low <= true_slope <= estimate.high:
      num_hits += 1

  standard_deviation = (0.95 * 0.05 / num_simulations) ** 0.5
  actual = num_hits / num_simulations
  assert actual == pytest.approx(0.95, abs=3 * standard_deviation)


def test_the_runs_of_fairness_are_added_with_times_1():
  """A variant ROW,times=N trains on N times the tokens of "fairness"."""
  tokens = {"runs": [{"variant": "diff,times=4"}]}
  # The experiment "tokens" has no row "gated".
  fairness = {"runs": [{"variant": "diff"}, {"variant": "gated"}]}

  merged = experiment.with_fairness(tokens, fairness)

  assert merged["runs"] == [
    {"variant": "diff,times=1"},
    {"variant": "diff,times=4"},
  ]


def test_fairness_may_have_no_results():
  tokens = {"runs": [{"variant": "diff,times=4"}]}

  merged = experiment.with_fairness(tokens, fairness=None)

  assert merged["runs"] == tokens["runs"]
