"""Intervals cover the truth as often as they should, and pairing makes those of differences narrow."""

import math

import numpy as np
import pytest

from diffjax.evals.report import figures
from diffjax.evals.report.figures import Figure, compare, interval, mean_of


def test_intervals_cover_the_truth_as_often_as_they_say(monkeypatch):
  """Means of 60 draws from a skewed distribution whose mean is 1; a percentile bootstrap is known to fall a little short of 95%."""
  monkeypatch.setattr(figures, "RESAMPLES", 400)
  rng = np.random.default_rng(0)
  found = [interval(mean_of("x", rng.exponential(size=60))) for _ in range(200)]
  covered = np.mean([one.low <= 1 <= one.high for one in found])
  assert 0.88 <= covered <= 0.98
  width = np.mean([one.high - one.low for one in found])
  assert width == pytest.approx(2 * 1.96 / math.sqrt(60), rel=0.1)


def test_a_paired_difference_is_tighter_than_its_parts():
  rng = np.random.default_rng(1)
  difficulty = rng.normal(size=100)
  first, second = mean_of("x", difficulty + 0.01 * rng.normal(size=100)), mean_of("x", difficulty + 0.05)
  difference = interval(first, second)
  assert difference.high < 0 and difference.high - difference.low < 0.01
  assert interval(first).high - interval(first).low > 0.3
  (row,) = compare([first], [second])
  assert row["difference"]["value"] == pytest.approx(row["value"] - row["against"]["value"])


def test_a_ratio_counts_tokens_not_rows():
  assert interval(Figure("loss", np.array([[10.0, 1.0], [10.0, 9.0]]))).value == 2.0


def test_few_units_have_no_interval_and_other_units_cannot_be_paired():
  one = interval(mean_of("x", [3.0]))
  assert one.value == 3 and math.isnan(one.low) and math.isnan(one.high)
  assert math.isnan(interval(mean_of("x", [])).value)
  for other in (mean_of("x", [1.0]), mean_of("y", [1.0, 2.0]), mean_of("x", [1.0, 2.0], depth=1)):
    with pytest.raises(ValueError, match="cannot be paired"):
      interval(mean_of("x", [1.0, 2.0]), other)
