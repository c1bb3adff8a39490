"""Intervals cover the truth in about 95% of cases, and pairing narrows them."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.report import intervals
from diffjax.evals.report.intervals import Interval, compare, interval


def coverage(
  measurements: Sequence[Sequence[Measurement]], truth: float
) -> float:
  """Returns the share of samples whose interval contains the truth.

  Args:
    measurements: for each sample the arguments of `interval`.
    truth: the number that the measurements estimate.
  """
  num_covering = 0
  for arguments in measurements:
    estimate = interval(*arguments)
    num_covering += estimate.low <= truth <= estimate.high
  return num_covering / len(measurements)


@pytest.fixture(scope="module")
def bootstrap_estimates() -> list[Interval]:
  """Intervals of means of 60 draws from a skewed distribution.

  The mean and the standard deviation of the distribution are 1.
  """
  rng = np.random.default_rng(0)
  estimates = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(intervals, "RESAMPLES", 300)
    for _ in range(150):
      draws = rng.exponential(size=60)
      estimates.append(interval(mean_of("x", draws)))
  return estimates


def test_bootstraps_cover_the_truth(bootstrap_estimates):
  """A percentile bootstrap is known to fall a little short of 95%.

  The estimates are of a mean whose true value is 1.
  """
  covers = [item.low <= 1 <= item.high for item in bootstrap_estimates]

  assert 0.88 <= np.mean(covers) <= 0.98


def test_bootstraps_are_as_wide_as_an_interval_of_normal_means(
  bootstrap_estimates,
):
  """The estimates are of means of 60 draws with the standard deviation 1."""
  widths = [item.high - item.low for item in bootstrap_estimates]

  # 95% of a normal distribution are within 1.96 standard deviations.
  standard_error = 1 / math.sqrt(60)
  expected = 2 * 1.96 * standard_error
  assert np.mean(widths) == pytest.approx(expected, rel=0.1)


def test_a_paired_difference_is_tighter_than_its_parts():
  """Both models measure the same 100 units. The second one is 0.05 higher.

  The units differ much more from each other.
  """
  rng = np.random.default_rng(1)
  difficulty = rng.normal(size=100)
  noise = 0.01 * rng.normal(size=100)
  first = mean_of("x", difficulty + noise)
  second = mean_of("x", difficulty + 0.05)

  difference = interval(first, second)
  estimate = interval(first)

  # The first model is clearly below the second one.
  assert difference.high < 0
  # An interval of 95% is 2 * 1.96 / √100 = 0.39 standard deviations wide. These
  # are 0.01 for the differences, and about 1 for the units.
  assert difference.high - difference.low < 0.01
  assert estimate.high - estimate.low > 0.3


def test_a_difference_is_of_the_two_values():
  first = mean_of("x", [1.0, 2.0, 4.0])
  second = mean_of("x", [3.0, 1.0, 1.0])

  (figure,) = compare([first], [second])

  assert figure["difference"]["value"] == pytest.approx(
    figure["value"] - figure["against"]["value"]
  )


def test_a_ratio_counts_tokens_not_rows():
  # The summed loss and the number of tokens of two rows.
  sums_and_tokens = np.array([[10.0, 1.0], [10.0, 9.0]])

  estimate = interval(Measurement("loss", sums_and_tokens))

  # The mean of the rows' mean losses would be (10 / 1 + 10 / 9) / 2.
  assert estimate.value == (10 + 10) / (1 + 9)


def test_a_bootstrap_of_one_unit_has_no_bounds():
  """If a single unit is drawn again and again, the mean does not vary."""
  estimate = interval(mean_of("x", [3.0]))

  assert estimate.value == 3
  assert math.isnan(estimate.low)
  assert math.isnan(estimate.high)


@pytest.mark.parametrize(
  "measurement",
  [
    pytest.param(mean_of("x", []), id="mean"),
    pytest.param(proportion("x", []), id="proportion"),
  ],
)
def test_a_measurement_without_units_is_nan(measurement):
  estimate = interval(measurement)

  assert math.isnan(estimate.value)
  assert math.isnan(estimate.low)
  assert math.isnan(estimate.high)
  assert estimate.units == 0


@pytest.mark.parametrize(
  "other",
  [
    pytest.param(mean_of("x", [1.0]), id="number of units"),
    pytest.param(mean_of("y", [1.0, 2.0]), id="name"),
    pytest.param(mean_of("x", [1.0, 2.0], depth=1), id="coordinates"),
  ],
)
def test_different_measurements_cannot_be_paired(other):
  """The difference of two models is of the same measurement on the same units."""
  measurement = mean_of("x", [1.0, 2.0])

  with pytest.raises(ValueError, match="cannot be paired"):
    interval(measurement, against=other)


def test_a_bootstrap_of_equal_units_has_no_bounds():
  """Whichever units are drawn, their mean does not vary."""
  estimate = interval(mean_of("x", [0.0] * 4))

  assert estimate.value == 0
  assert math.isnan(estimate.low)
  assert math.isnan(estimate.high)


def test_a_difference_has_bounds_if_the_units_of_one_model_differ():
  first = mean_of("x", [1.0, 2.0, 4.0])
  second = mean_of("x", [0.0, 0.0, 0.0])

  difference = interval(first, against=second)

  assert difference.low > 0


def test_no_proportion_of_few_units_excludes_a_half():
  none_right = interval(proportion("accuracy", [0, 0]))
  all_right = interval(proportion("accuracy", [1, 1]))
  one_of_one = interval(proportion("accuracy", [1]))

  assert none_right.low == 0
  assert none_right.high > 0.5
  assert all_right.low < 0.5
  assert all_right.high == 1
  assert one_of_one.low < 0.5


def test_no_results_of_two_prompts_make_two_models_differ():
  """Not even if one model is right in both, and the other in none."""
  none_right = proportion("accuracy", [0, 0])
  all_right = proportion("accuracy", [1, 1])

  for first, second in itertools.product((none_right, all_right), repeat=2):
    difference = interval(first, against=second)
    assert difference.low < 0 < difference.high
    assert difference.low <= difference.value <= difference.high


@pytest.mark.parametrize("count, rate", [(3, 0.05), (10, 0.3), (3, 0.9)])
def test_proportions_cover_the_truth_with_few_units(count, rate):
  """Wilson's interval covers the truth in 95% of cases, on average over rates.

  At single rates it does in 84% to 100%. Here it is tried 300 times.
  """
  rng = np.random.default_rng(0)
  measurements = []
  for _ in range(300):
    outcomes = rng.random(count) < rate
    measurements.append([proportion("x", outcomes)])

  assert coverage(measurements, truth=rate) >= 0.83


@pytest.mark.parametrize(
  "count, only_first, only_second",
  [(10, 0.05, 0.05), (3, 0.3, 0.1), (10, 0.0, 0.1), (3, 0.6, 0.0)],
)
def test_paired_differences_cover_the_truth_with_few_units(
  count, only_first, only_second
):
  """An interval of 95% contains the true difference in 88% of 300 trials.

  Args:
    count: The number of units.
    only_first: The probability that only the first model is right.
    only_second: The probability that only the second model is right.
  """
  rng = np.random.default_rng(0)
  equal = 1 - only_first - only_second
  pairs = []
  for _ in range(300):
    kinds = rng.choice(
      ["first", "second", "equal"],
      count,
      p=[only_first, only_second, equal],
    )
    # In half of the units with equal outcomes, both models are right.
    is_right_by_both = rng.random(count) < 0.5
    first = np.where(kinds == "equal", is_right_by_both, kinds == "first")
    second = np.where(kinds == "equal", is_right_by_both, kinds == "second")
    pairs.append([proportion("x", first), proportion("x", second)])

  true_difference = only_first - only_second
  assert coverage(pairs, truth=true_difference) >= 0.88


def test_equal_answers_to_one_prompt_count_as_one_answer():
  """Two answers that are right or wrong together tell as much as one."""
  rng = np.random.default_rng(2)
  outcomes = rng.random(20) < 0.4
  answers = np.stack([outcomes, outcomes], axis=1)

  estimate = interval(proportion("x", answers.mean(axis=1)))

  assert estimate == interval(proportion("x", outcomes))


def test_shares_of_dependent_answers_cover_the_truth():
  """A prompt is easy or hard, and both of its answers depend on that."""
  rng = np.random.default_rng(0)
  measurements = []
  for _ in range(300):
    # Twelve prompts, of which about half are easy.
    is_easy = rng.random(12) < 0.5
    rates = np.where(is_easy, 0.95, 0.05)
    answers = rng.random((12, 2)) < rates[:, None]
    shares = answers.mean(axis=1)
    measurements.append([proportion("x", shares)])

  # The true share is (0.95 + 0.05) / 2. 95% of the intervals should contain it.
  assert coverage(measurements, truth=0.5) >= 0.93


def test_groups_have_equal_weight_and_their_own_spread():
  """The large group has 3 of 4 right, and the small group none."""
  large_group = [1] * 30 + [0] * 10
  small_group = [0] * 10
  groups = [0] * 40 + [1] * 10

  estimate = interval(proportion("x", large_group + small_group, groups))

  assert estimate.value == (3 / 4 + 0) / 2
  assert estimate.units == 40 + 10
  assert 0 < estimate.low < estimate.value < estimate.high
  # The distances to the bounds of independent groups add up as squares.
  large = interval(proportion("x", large_group))
  small = interval(proportion("x", small_group))
  large_distance = large.high - large.value
  small_distance = small.high - small.value
  expected = math.hypot(large_distance, small_distance) / 2
  assert estimate.high - estimate.value == pytest.approx(expected)


def test_means_over_groups_cover_the_truth():
  """The groups have the rates 0.9 and 0.1, and the same weight."""
  rng = np.random.default_rng(0)
  groups = [0] * 12 + [1] * 4
  measurements = []
  for _ in range(300):
    outcomes = np.concatenate([rng.random(12) < 0.9, rng.random(4) < 0.1])
    measurements.append([proportion("x", outcomes, groups)])

  true_mean = (0.9 + 0.1) / 2
  assert coverage(measurements, true_mean) >= 0.93


def test_two_models_without_right_answers_have_a_symmetric_difference():
  """Two questions in each of two groups say little, so the interval is wide."""
  groups = [0, 0, 1, 1]
  first = proportion("x", [0, 0, 0, 0], groups)
  second = proportion("x", [0, 0, 0, 0], groups)

  difference = interval(first, against=second)

  assert difference.low == pytest.approx(-difference.high)
  assert difference.high > 0.3


def test_outcomes_lie_between_0_and_1():
  with pytest.raises(
    ValueError, match="outcomes must be between 0 and 1; got 0 to 2"
  ):
    proportion("x", [0, 2])
