"""Intervals of proportions have the values of publications.

They also agree with the tests that they invert.
"""

import numpy as np
import pytest
import scipy.stats

from diffjax.evals.report import proportions


@pytest.mark.parametrize(
  "yes, count, low, high",
  [
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0, 0.1611),
    (1, 29, 0.0061, 0.1718),
  ],
)
def test_single_proportions_of_newcombe(yes, count, low, high):
  """Newcombe, "Two-sided confidence intervals for the single proportion",
  Statistics in Medicine 17 (1998), table I, method 3.
  """
  outcomes = np.repeat([1.0, 0.0], [yes, count - yes])

  estimate = proportions.single(outcomes)

  # The table has four decimals.
  assert estimate == pytest.approx((yes / count, low, high), abs=6e-5)


def paired_outcomes(
  both_right: int, only_first: int, only_second: int, none_right: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the outcomes of two models.

  Args:
    both_right: the number of units where both models are right.
    only_first: the number of units where only the first model is right.
    only_second: the number of units where only the second model is right.
    none_right: the number of units where no model is right.
  """
  counts = [both_right, only_first, only_second, none_right]
  outcomes = np.repeat([1.0, 1.0, 0.0, 0.0], counts)
  against = np.repeat([1.0, 0.0, 1.0, 0.0], counts)
  return outcomes, against


@pytest.mark.parametrize(
  "both_right, only_first, only_second, none_right, low, high",
  [
    pytest.param(1, 1, 7, 12, -0.5172, -0.0260, id="Bentur et al. (2009)"),
    pytest.param(59, 6, 16, 80, -0.1240, -0.0054, id="Cavo et al. (2012)"),
  ],
)
def test_paired_differences_have_the_bounds_of_a_textbook(
  both_right, only_first, only_second, none_right, low, high
):
  """The bounds are Tango's intervals in a textbook, of data of two studies.

  Fagerland, Lydersen and Laake, "Statistical Analysis of Contingency Tables"
  (2017), chapter 8.
  """
  outcomes, against = paired_outcomes(
    both_right, only_first, only_second, none_right
  )

  estimate = proportions.paired_difference(outcomes, against)

  difference = (only_first - only_second) / len(outcomes)
  # The textbook has four decimals.
  assert estimate == pytest.approx((difference, low, high), abs=6e-5)


def test_a_paired_difference_of_equal_outcomes_has_tangos_bounds():
  """If all n outcomes are equal, Tango's bounds are ±z² / (n + z²)."""
  estimate = proportions.paired_difference(np.ones(2), np.ones(2))

  z = scipy.stats.norm.ppf(0.975)
  bound = z**2 / (2 + z**2)
  assert estimate == pytest.approx((0, -bound, bound), abs=6e-5)


def test_the_interval_of_swapped_models_is_the_negative_interval():
  """For example, [−0.5, −0.1] becomes [0.1, 0.5]."""
  outcomes, against = paired_outcomes(
    both_right=1, only_first=1, only_second=7, none_right=12
  )

  estimate = proportions.paired_difference(outcomes, against)
  swapped = proportions.paired_difference(against, outcomes)

  assert swapped.value == pytest.approx(-estimate.value)
  assert swapped.low == pytest.approx(-estimate.high)
  assert swapped.high == pytest.approx(-estimate.low)


@pytest.mark.parametrize("count", [2, 9, 30])
def test_excluding_0_means_that_mcnemars_test_is_significant(count):
  """McNemar's statistic is (b − c)² / (b + c), with one degree of freedom.

  b is the number of units where only the first model is right (`only_first`),
  and c where only the second one is (`only_second`). All numbers with a sum of
  at most `count` are tried.
  """
  critical_value = scipy.stats.chi2.ppf(0.95, df=1)
  for num_different in range(count + 1):
    for only_first in range(num_different + 1):
      only_second = num_different - only_first
      outcomes, against = paired_outcomes(
        both_right=count - num_different,
        only_first=only_first,
        only_second=only_second,
        none_right=0,
      )

      value, low, high = proportions.paired_difference(outcomes, against)

      # Both sides are multiplied by b + c, which may be 0.
      squared_difference = (only_first - only_second) ** 2
      is_significant = squared_difference > critical_value * num_different
      excludes_zero = not low <= 0 <= high
      assert excludes_zero == is_significant
      assert -1 <= low <= value <= high <= 1


def test_shares_that_sum_to_a_whole_number_count_as_that_number():
  """A share is of several answers, for example one of three is right.

  The sum of three thirds may be slightly more or less than 1.
  """
  thirds = proportions.single(np.array([1 / 3, 1 / 3, 1 / 3, 0, 0]))

  one_of_five = proportions.single(np.array([1.0, 0, 0, 0, 0]))
  assert thirds == pytest.approx(one_of_five)


def test_shares_are_bounded_by_the_whole_numbers_around_their_total():
  """The total is 1.5 of 5, which is between 1 of 5 and 2 of 5."""
  estimate = proportions.single(np.array([0.5, 0.5, 0.5, 0, 0]))

  one_of_five = proportions.single(np.array([1.0, 0, 0, 0, 0]))
  two_of_five = proportions.single(np.array([1.0, 1.0, 0, 0, 0]))
  assert estimate.value == pytest.approx(1.5 / 5)
  assert estimate.low == pytest.approx(one_of_five.low)
  assert estimate.high == pytest.approx(two_of_five.high)
