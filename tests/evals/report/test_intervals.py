"""Intervals cover the truth in about 95% of cases, and pairing narrows them."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats

from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.report import intervals
from diffjax.evals.report.intervals import Interval, compare, interval


def coverage(estimates: Sequence[Interval], truth: float) -> float:
  """Returns the share of intervals that contain the truth."""
  num_covering = 0
  for estimate in estimates:
    num_covering += estimate.low <= truth <= estimate.high
  return num_covering / len(estimates)


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
  assert 0.88 <= coverage(bootstrap_estimates, truth=1) <= 0.98


def test_bootstraps_are_as_wide_as_an_interval_of_normal_means(
  bootstrap_estimates,
):
  """The estimates are of means of 60 draws with the standard deviation 1."""
  widths = [item.high - item.low for item in bootstrap_estimates]

  # 95% of a normal distribution are within 1.96 standard deviations.
  standard_error = 1 / math.sqrt(60)
  expected = 2 * 1.96 * standard_error
  assert np.mean(widths) == pytest.approx(expected, rel=0.1)


def test_the_interval_of_a_paired_difference_has_the_width_of_the_noise():
  """The difficulty of a unit is the same for both models, so it cancels."""
  num_units = 100
  noise_deviation = 0.01
  rng = np.random.default_rng(1)
  difficulty = rng.normal(size=num_units)
  noise = noise_deviation * rng.normal(size=num_units)
  first = mean_of("x", difficulty)
  second = mean_of("x", difficulty + 0.05 + noise)

  estimate = interval(first)
  difference = interval(first, against=second)

  # The first model is below the second one.
  assert difference.high < 0
  # 95% of a normal distribution are within 1.96 standard deviations. The
  # difficulty has the standard deviation 1.
  width_of_one = 2 * 1.96 / math.sqrt(num_units)
  width_of_noise = noise_deviation * width_of_one
  # The standard deviation of 100 draws has an error of about 7%.
  assert estimate.high - estimate.low == pytest.approx(width_of_one, rel=0.2)
  assert difference.high - difference.low == pytest.approx(
    width_of_noise, rel=0.2
  )


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
  """Models are compared in the same measurement, on the same units."""
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
  """Wilson's interval contains the truth in 84% to 100% of samples.

  A sample has `count` units. Each is right with the probability `rate`. All
  numbers of right units are tried.
  """
  probability_of_covering = 0.0
  for num_right in range(count + 1):
    outcomes = np.arange(count) < num_right
    estimate = interval(proportion("accuracy", outcomes))
    is_covering = estimate.low <= rate <= estimate.high
    probability = scipy.stats.binom.pmf(num_right, count, rate)
    probability_of_covering += is_covering * probability

  assert probability_of_covering >= 0.84


@pytest.mark.parametrize(
  "count, only_first, only_second",
  [(10, 0.05, 0.05), (3, 0.3, 0.1), (10, 0.0, 0.1), (3, 0.6, 0.0)],
)
def test_paired_differences_cover_the_truth_with_few_units(
  count, only_first, only_second
):
  """The interval contains the true difference in at least 88% of samples.

  A sample has `count` units. Only the first model is right with the probability
  `only_first`, and only the second one with the probability `only_second`.
  """
  rng = np.random.default_rng(0)
  equal = 1 - only_first - only_second
  # Whether the first and the second model are right.
  outcomes_of_both = np.array([[1, 0], [0, 1], [1, 1], [0, 0]])
  probabilities = [only_first, only_second, equal / 2, equal / 2]
  estimates = []
  for _ in range(300):
    sample = rng.choice(outcomes_of_both, size=count, p=probabilities)
    first, second = sample.T
    estimates.append(interval(proportion("x", first), proportion("x", second)))

  true_difference = only_first - only_second
  assert coverage(estimates, truth=true_difference) >= 0.88


def test_equal_answers_to_one_prompt_count_as_one_answer():
  """Two answers that are right or wrong together tell as much as one."""
  rng = np.random.default_rng(2)
  outcomes = rng.random(20) < 0.4
  answers = np.stack([outcomes, outcomes], axis=1)

  estimate = interval(proportion("x", answers.mean(axis=1)))

  assert estimate == interval(proportion("x", outcomes))


def test_shares_of_dependent_answers_cover_the_truth():
  """A prompt is easy or hard, and both of its answers depend on that."""
  num_prompts = 12
  rng = np.random.default_rng(0)
  estimates = []
  for _ in range(300):
    is_easy = rng.random(num_prompts) < 0.5
    rates = np.where(is_easy, 0.95, 0.05)
    answers = rng.random((num_prompts, 2)) < rates[:, None]
    share_of_right_answers = answers.mean(axis=1)
    estimates.append(interval(proportion("accuracy", share_of_right_answers)))

  true_accuracy = (0.95 + 0.05) / 2
  # For 300 samples, it is √(0.95 * 0.05 / 300) = 0.013, here rounded down.
  standard_error = 0.01
  assert coverage(estimates, true_accuracy) >= 0.95 - 2 * standard_error


def test_groups_have_equal_weight():
  """The large group has 3 of 4 right, and the small group none."""
  large_group = [1] * 30 + [0] * 10
  small_group = [0] * 10
  groups = [0] * 40 + [1] * 10

  estimate = interval(proportion("x", large_group + small_group, groups))

  assert estimate.value == (3 / 4 + 0) / 2
  assert estimate.units == 40 + 10


def test_errors_of_groups_add_up_as_squares():
  """Groups are independent, so the error of a sum is the root of squares."""
  large_group = [1] * 30 + [0] * 10
  small_group = [0] * 10
  groups = [0] * 40 + [1] * 10

  estimate = interval(proportion("x", large_group + small_group, groups))

  large = interval(proportion("x", large_group))
  small = interval(proportion("x", small_group))
  error_of_large = large.high - large.value
  error_of_small = small.high - small.value
  error_of_sum = math.sqrt(error_of_large**2 + error_of_small**2)
  error_of_mean = error_of_sum / 2
  assert estimate.high - estimate.value == pytest.approx(error_of_mean)
  assert 0 < estimate.low < estimate.value


def test_means_over_groups_cover_the_truth():
  """The groups have the rates 0.9 and 0.1, and the same weight."""
  easy_group_size = 12
  hard_group_size = 4
  groups = [0] * easy_group_size + [1] * hard_group_size
  rng = np.random.default_rng(0)
  estimates = []
  for _ in range(300):
    easy_outcomes = rng.random(easy_group_size) < 0.9
    hard_outcomes = rng.random(hard_group_size) < 0.1
    outcomes = np.concatenate([easy_outcomes, hard_outcomes])
    estimates.append(interval(proportion("accuracy", outcomes, groups)))

  true_mean = (0.9 + 0.1) / 2
  # For 300 samples, it is √(0.95 * 0.05 / 300) = 0.013, here rounded down.
  standard_error = 0.01
  assert coverage(estimates, true_mean) >= 0.95 - 2 * standard_error


def test_two_models_without_right_answers_have_a_symmetric_difference():
  """The first and the second model are equally likely to be the better one."""
  questions_per_group = 2
  groups = [0, 0, 1, 1]
  none_right = proportion("accuracy", outcomes=[0, 0, 0, 0], groups=groups)

  difference = interval(none_right, against=none_right)

  # Tango's interval of n equal outcomes is ±z² / (n + z²). The errors of two
  # groups add up as squares, and the mean is half of the sum.
  z = 1.96
  bound_of_group = z**2 / (questions_per_group + z**2)
  bound_of_mean = math.sqrt(2 * bound_of_group**2) / 2
  assert difference.high == pytest.approx(bound_of_mean, rel=1e-4)
  assert difference.low == pytest.approx(-bound_of_mean, rel=1e-4)


def test_outcomes_lie_between_0_and_1():
  with pytest.raises(
    ValueError, match="outcomes must be between 0 and 1; got 0 to 2"
  ):
    proportion("x", [0, 2])
