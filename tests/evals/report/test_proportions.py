"""Intervals of proportions have published values, and agree with the tests that they invert."""

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
  """Table I of Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine 17 (1998), its method 3."""
  found = proportions.single(np.arange(count) < yes)
  assert found == pytest.approx((yes / count, low, high), abs=6e-5)


@pytest.mark.parametrize(
  "both, first, second, neither, low, high",
  [
    (1, 1, 7, 12, -0.5172, -0.0260),
    (59, 6, 16, 80, -0.1240, -0.0054),
    (2, 0, 0, 0, -0.6576, 0.6576),
  ],
)
def test_paired_differences_of_fagerland(
  both, first, second, neither, low, high
):
  """Two examples of Fagerland, Lydersen and Laake, "Statistical Analysis of Contingency Tables" (2017), chapter 8: Tango's intervals of
  the data of Bentur et al. (2009) and Cavo et al. (2012); without discordant units the bounds are ±z² / (n + z²)."""
  outcomes = [
    np.repeat(np.array(values, float), [both, first, second, neither])
    for values in ([1, 1, 0, 0], [1, 0, 1, 0])
  ]
  found = proportions.paired_difference(*outcomes)
  assert found == pytest.approx(
    ((first - second) / len(outcomes[0]), low, high), abs=6e-5
  )
  reversed_ = proportions.paired_difference(*outcomes[::-1])
  assert reversed_ == pytest.approx((-found[0], -found[2], -found[1]))


def test_a_difference_excludes_0_exactly_if_mcnemars_test_is_significant():
  z = scipy.stats.norm.ppf(0.975)
  for count in (2, 9, 30):
    for first in range(count + 1):
      for second in range(count + 1 - first):
        rest = count - first - second
        one, other = (
          np.repeat([1.0, 0.0, 1.0], [*sizes, rest])
          for sizes in ((first, second), (0, first + second))
        )
        other[first : first + second] = 1
        estimate, low, high = proportions.paired_difference(one, other)
        assert -1 <= low <= estimate <= high <= 1
        assert (low > 0 or high < 0) == (
          abs(first - second) > z * np.sqrt(first + second)
        )


def test_shares_are_bounded_by_the_whole_numbers_around_their_total():
  thirds = proportions.single(np.array([1 / 3, 1 / 3, 1 / 3, 0, 0]))
  assert thirds == pytest.approx(
    proportions.single(np.array([1.0, 0, 0, 0, 0]))
  )
  one, two = (proportions.single(np.arange(5) < yes) for yes in (1, 2))
  assert proportions.single(np.array([0.5, 0.5, 0.5, 0, 0])) == pytest.approx(
    (0.3, one[1], two[2])
  )
