"""The slope of a difference over tokens, and its interval."""

import math

import numpy as np
import pytest

from experiments.tokens import experiment


def results_of(losses):
  """results.json of losses by (row, times)."""
  runs = [
    {
      "variant": f"{row},times={times}",
      "seed": seed,
      "results": {"validation/loss": loss},
    }
    for (row, times), each in losses.items()
    for seed, loss in enumerate(each)
  ]
  return {"baseline": "transformer,*", "runs": runs}


def losses_of(rng, slope, spread, seeds=3):
  """Curved losses of two rows, whose difference has that slope per factor e of the tokens."""
  curve = lambda times: 2 - 0.3 * math.log(times) + 0.05 * math.log(times) ** 2  # noqa: E731
  draw = lambda mean: list(mean + spread * rng.standard_normal(seeds))  # noqa: E731
  return {
    ("transformer", times): draw(curve(times)) for times in (1, 4, 12)
  } | {
    ("diff", times): draw(curve(times) + 0.05 + slope * math.log(times))
    for times in (1, 4, 12)
  }


def test_a_slope_is_found_whatever_the_curve():
  losses = losses_of(np.random.default_rng(0), -0.02, 1e-9)
  assert experiment.slope(
    results_of(losses), "diff", "transformer"
  ) == pytest.approx((-0.02,) * 3, abs=1e-6)
  del losses["diff", 12]
  assert experiment.slope(results_of(losses), "diff", "transformer") is None


def test_the_interval_holds_the_slope_in_19_of_20():
  rng, held = np.random.default_rng(1), 0
  for _ in range(400):
    _, low, high = experiment.slope(
      results_of(losses_of(rng, 0.01, 0.02)), "diff", "transformer"
    )
    held += low <= 0.01 <= high
  assert 0.92 <= held / 400 <= 0.985


def test_the_fewest_tokens_are_fairness_s():
  longer = results_of({("diff", 4): [1.0, 2.0]})
  fairness = {
    "runs": [
      {"variant": row, "seed": 10, "results": {"validation/loss": 3.0}}
      for row in ("diff", "gated")
    ]
  }
  found = experiment.with_fairness(longer, fairness)
  assert [run["variant"] for run in found["runs"]] == [
    "diff,times=1",
    "diff,times=4",
    "diff,times=4",
  ]
  assert experiment.with_fairness(longer, None)["runs"] == longer["runs"]
