"""Intervals cover the truth as often as they should, and pairing makes those of differences narrow."""

import itertools
import math

import numpy as np
import pytest

from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.report import intervals
from diffjax.evals.report.intervals import compare, interval


def test_intervals_cover_the_truth_as_often_as_they_say(monkeypatch):
  """Means of 60 draws from a skewed distribution whose mean is 1; a percentile bootstrap is known to fall a little short of 95%."""
  monkeypatch.setattr(intervals, "RESAMPLES", 400)
  rng = np.random.default_rng(0)
  found = [interval(mean_of("x", rng.exponential(size=60))) for _ in range(200)]
  covered = np.mean([one.low <= 1 <= one.high for one in found])
  assert 0.88 <= covered <= 0.98
  width = np.mean([one.high - one.low for one in found])
  assert width == pytest.approx(2 * 1.96 / math.sqrt(60), rel=0.1)


def test_a_paired_difference_is_tighter_than_its_parts():
  rng = np.random.default_rng(1)
  difficulty = rng.normal(size=100)
  first, second = (
    mean_of("x", difficulty + 0.01 * rng.normal(size=100)),
    mean_of("x", difficulty + 0.05),
  )
  difference = interval(first, second)
  assert difference.high < 0 and difference.high - difference.low < 0.01
  assert interval(first).high - interval(first).low > 0.3
  (row,) = compare([first], [second])
  assert row["difference"]["value"] == pytest.approx(
    row["value"] - row["against"]["value"]
  )


def test_a_ratio_counts_tokens_not_rows():
  assert (
    interval(Measurement("loss", np.array([[10.0, 1.0], [10.0, 9.0]]))).value
    == 2.0
  )


def test_few_units_have_no_interval_and_other_units_cannot_be_paired():
  one = interval(mean_of("x", [3.0]))
  assert one.value == 3 and math.isnan(one.low) and math.isnan(one.high)
  assert math.isnan(interval(mean_of("x", [])).value)
  for other in (
    mean_of("x", [1.0]),
    mean_of("y", [1.0, 2.0]),
    mean_of("x", [1.0, 2.0], depth=1),
  ):
    with pytest.raises(ValueError, match="cannot be paired"):
      interval(mean_of("x", [1.0, 2.0]), other)


def test_units_that_are_all_alike_have_no_bootstrap_interval():
  alike = interval(mean_of("x", [0.0] * 4))
  assert alike.value == 0 and math.isnan(alike.low) and math.isnan(alike.high)
  assert (
    interval(mean_of("x", [1.0, 2.0, 4.0]), mean_of("x", [0.0] * 3)).low > 0
  )


def test_no_proportion_of_few_units_is_certain():
  """0 of 2 and 2 of 2 do not exclude a rate of a half, and no result of two prompts makes two models differ."""
  none, both = (
    proportion("accuracy", outcomes) for outcomes in ([0, 0], [1, 1])
  )
  assert interval(none).low == 0 and interval(none).high > 0.5
  assert interval(both).high == 1 and interval(both).low < 0.5
  for first, second in itertools.product((none, both), repeat=2):
    difference = interval(first, second)
    assert (
      difference.low < 0 < difference.high
      and difference.low <= difference.value <= difference.high
    )
  assert interval(proportion("accuracy", [1])).low < 0.5
  assert math.isnan(interval(proportion("accuracy", [])).low)


def covered(draw, truth, figures_of, runs=300):
  """The share of runs whose interval holds the truth."""
  rng = np.random.default_rng(0)
  found = [interval(*figures_of(draw(rng))) for _ in range(runs)]
  return np.mean([one.low <= truth <= one.high for one in found])


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_proportions_cover_the_truth_with_few_units(count, rate):
  """Wilson's interval is near 95% on average over rates, and at single rates between 84% and 100%."""
  assert (
    covered(
      lambda rng: rng.random(count) < rate,
      rate,
      lambda outcomes: [proportion("x", outcomes)],
    )
    >= 0.83
  )


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize(
  "only_first, only_second", [(0.05, 0.05), (0.3, 0.1), (0.0, 0.1), (0.6, 0.0)]
)
def test_paired_differences_cover_the_truth_with_few_units(
  count, only_first, only_second
):
  def draw(rng):
    who = rng.choice(
      3, count, p=[only_first, only_second, 1 - only_first - only_second]
    )
    both = rng.random(count) < 0.5
    return [
      proportion("x", np.where(who == 2, both, who == model))
      for model in (0, 1)
    ]

  assert covered(draw, only_first - only_second, lambda pair: pair) >= 0.88


def test_answers_in_one_prompt_are_no_independent_trials():
  """Prompts whose two answers are right or wrong together tell as much as prompts with one: a prompt is a trial."""
  rng = np.random.default_rng(2)
  single = rng.random(20) < 0.4
  assert interval(
    proportion("x", np.stack([single, single], axis=1).mean(axis=1))
  ) == interval(proportion("x", single))

  def halves(rng):  # a prompt is easy or hard, and its answers follow it
    easy = rng.random(12) < 0.5
    return (rng.random((12, 2)) < np.where(easy, 0.95, 0.05)[:, None]).mean(
      axis=1
    )

  assert (
    covered(halves, 0.5, lambda outcomes: [proportion("x", outcomes)]) >= 0.93
  )


def test_the_mean_of_groups_weights_them_alike_and_has_the_spread_of_each():
  outcomes, groups = [1] * 30 + [0] * 10 + [0] * 10, [0] * 40 + [1] * 10
  found = interval(proportion("x", outcomes, groups))
  assert found.value == 0.375 and found.units == 50
  assert 0 < found.low < found.value < found.high
  large, small = (
    interval(proportion("x", outcomes[:40])),
    interval(proportion("x", outcomes[40:])),
  )
  assert found.high - found.value == pytest.approx(
    math.hypot(large.high - large.value, small.high - small.value) / 2
  )

  def draw(rng):
    return np.concatenate([rng.random(12) < 0.9, rng.random(4) < 0.1])

  assert (
    covered(
      draw,
      0.5,
      lambda outcomes: [proportion("x", outcomes, [0] * 12 + [1] * 4)],
    )
    >= 0.93
  )
  paired = interval(
    proportion("x", [0] * 4, [0, 0, 1, 1]),
    proportion("x", [0] * 4, [0, 0, 1, 1]),
  )
  assert paired.low == pytest.approx(-paired.high) and paired.high > 0.3


def test_outcomes_lie_between_0_and_1():
  with pytest.raises(
    ValueError, match="outcomes must be between 0 and 1; got 0 to 2"
  ):
    proportion("x", [0, 2])
