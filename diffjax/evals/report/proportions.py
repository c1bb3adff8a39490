"""95% intervals of proportions, and of paired differences of proportions.

A unit is one trial with an outcome from 0 to 1. The intervals are also valid if
all outcomes are 0 or all are 1.

The formulas are for outcomes of 0 and 1. An outcome may also be the share of
yes among several answers that depend on each other. The intervals are then
conservative: x² ≤ x for x from 0 to 1, so shares vary at most as much as
outcomes of 0 and 1 with the same mean. For the difference d of two shares,
|d|² ≤ |d| gives the same bound.

Newcombe's hybrid score interval for paired proportions is not used, because it
is too narrow in two cases:

- The models agree in nearly all units. If both are right in 50 units and both
  are wrong in 50 units, it is ±0.019, but up to 3.7% of the units may differ.
- There are few units. If one model is right twice and the other one never, it
  is 0.07 to 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

CONFIDENCE = 0.95

# A sum of shares is rounded to this many decimals, so that 1/3 + 1/3 + 1/3 is
# a whole number.
_TOTAL_DECIMALS = 9

# The search for a bound of a difference ends at this distance from −1 and 1,
# because the score statistic may be 0/0 there.
_SEARCH_MARGIN = 1e-9


class Estimate(NamedTuple):
  """An estimate of a number, with its 95% interval.

  Attributes:
    value: The estimate.
    low: The lower bound of the interval.
    high: The upper bound.
  """

  value: float
  low: float
  high: float


def single(outcomes: Float[np.ndarray, "U"]) -> Estimate:
  """Returns Wilson's score interval of a proportion.

  Wilson's formula is for a whole number of successes. If outcomes are shares,
  their sum may not be whole. It is rounded down for the lower bound, and up for
  the upper bound, so the interval is not too narrow.

  Source: Wilson, "Probable inference, the law of succession, and statistical
  inference", JASA 22 (1927). SciPy implements it.

  Args:
    outcomes: The outcomes of the units, from 0 to 1.
  """
  num_units = len(outcomes)
  successes = round(float(outcomes.sum()), _TOTAL_DECIMALS)
  fewer_successes = _wilson_interval(math.floor(successes), num_units)
  more_successes = _wilson_interval(math.ceil(successes), num_units)
  return Estimate(
    value=float(outcomes.mean()),
    low=fewer_successes.low,
    high=more_successes.high,
  )


def _wilson_interval(successes: int, num_units: int) -> Estimate:
  """Returns Wilson's interval for a whole number of successes."""
  # SciPy's statistics take a second to import.
  import scipy.stats

  test = scipy.stats.binomtest(successes, num_units)
  interval = test.proportion_ci(CONFIDENCE, method="wilson")
  return Estimate(
    value=successes / num_units,
    low=float(interval.low),
    high=float(interval.high),
  )


@dataclasses.dataclass(frozen=True)
class _ScoreTest:
  """Tango's score test of the difference of two paired proportions.

  Attributes:
    only_first: The number of units where only the first model is right. For
      outcomes that are shares, the sum of first − second where it is positive.
    only_second: The same for the second model.
    num_units: The number of units.
  """

  only_first: float
  only_second: float
  num_units: int

  @property
  def estimate(self) -> float:
    """The observed difference of the proportions, first − second."""
    return (self.only_first - self.only_second) / self.num_units

  def statistic(self, difference: float) -> float:
    """Returns the score statistic of the hypothesis p₁ − p₂ = Δ.

    It is 0 at the estimate, and falls as Δ grows. With Tango's letters
    b = `only_first`, c = `only_second` and n = `num_units`, it is

      (b − c − nΔ) / √(n (2q + Δ(1 − Δ)))

    q is the probability that only the second outcome is 1. Its maximum
    likelihood estimate under the hypothesis is the larger root of
    A q² + B q + C = 0 with

      A = 2n
      B = (2n − b + c) Δ − b − c
      C = −c Δ (1 − Δ)

    Args:
      difference: Δ.
    """
    b = self.only_first
    c = self.only_second
    n = self.num_units
    residual = b - c - n * difference
    # The variance may be 0 too, and 0/0 has no value.
    if residual == 0:
      return 0.0
    quadratic = 2 * n
    linear = (2 * n - b + c) * difference - b - c
    constant = -c * difference * (1 - difference)
    # Rounding can make the discriminant negative.
    discriminant = max(0.0, linear**2 - 4 * quadratic * constant)
    q = (math.sqrt(discriminant) - linear) / (2 * quadratic)
    variance = n * (2 * q + difference * (1 - difference))
    return residual / math.sqrt(variance)


def paired_difference(
  outcomes: Float[np.ndarray, "U"], against: Float[np.ndarray, "U"]
) -> Estimate:
  """Returns Tango's score interval of the difference of two proportions.

  Both proportions are of the same units. The interval contains the differences
  that the score test does not reject. For the difference 0 this is McNemar's
  test, so the interval excludes 0 exactly if McNemar's test is significant.

  Source: Tango, "Equivalence test and confidence interval for the difference in
  proportions for the paired-sample design", Statistics in Medicine 17 (1998),
  891–908. SciPy does not implement it.

  Args:
    outcomes: The outcomes of the units, from 0 to 1.
    against: The outcomes of the other model for the same units.
  """
  # SciPy's statistics take a second to import.
  import scipy.stats

  differences = outcomes - against
  test = _ScoreTest(
    only_first=float(differences.clip(min=0).sum()),
    only_second=float((-differences).clip(min=0).sum()),
    num_units=len(outcomes),
  )
  # The test rejects if the statistic is beyond ± the critical value. The
  # statistic falls as the difference grows, so it is positive at the lower
  # bound and negative at the upper bound.
  critical_value = float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2))
  return Estimate(
    value=test.estimate,
    low=_find_difference(test, statistic=critical_value, limit=-1.0),
    high=_find_difference(test, statistic=-critical_value, limit=1.0),
  )


def _find_difference(test: _ScoreTest, statistic: float, limit: float) -> float:
  """Returns the difference at which a score test has the given statistic.

  The statistic is 0 at the observed difference, and its magnitude grows from
  there to `limit`. The search is between these two differences.

  Args:
    test: The test.
    statistic: The statistic to reach: positive if `limit` is −1, and negative
      if it is 1.
    limit: The end of the possible differences, −1 or 1. It is returned if no
      difference has the statistic.
  """
  # SciPy's root finders take a while to import.
  import scipy.optimize

  if abs(limit - test.estimate) <= _SEARCH_MARGIN:
    return limit
  search_end = limit * (1 - _SEARCH_MARGIN)
  is_reached = abs(test.statistic(search_end)) > abs(statistic)
  if not is_reached:
    return limit

  def error(difference: float) -> float:
    return test.statistic(difference) - statistic

  # The error changes its sign between the two ends.
  return float(scipy.optimize.brentq(error, test.estimate, search_end))


def mean(estimates: Sequence[Estimate]) -> Estimate:
  """Returns the mean of independent estimates, with its interval.

  All estimates have the same weight. For one estimate, this is the estimate
  itself. The distance of the mean of k estimates to its lower bound is

    √(Σᵢ (lowᵢ − valueᵢ)²) / k

  The upper bound has the same formula.

  Source: the method of variance estimates recovery. Zou, Huang and Zhang, "A
  note on confidence interval estimation for a linear function of binomial
  proportions", Computational Statistics & Data Analysis 53 (2009).
  """
  values, lows, highs = np.asarray(estimates).T
  mean_value = float(values.mean())
  return Estimate(
    value=mean_value,
    low=mean_value - _mean_distance(lows, values),
    high=mean_value + _mean_distance(highs, values),
  )


def _mean_distance(
  bounds: Float[np.ndarray, "k"], values: Float[np.ndarray, "k"]
) -> float:
  """Returns the distance of the mean of k estimates to its bound."""
  squared_distances = np.square(bounds - values)
  return float(np.sqrt(squared_distances.sum()) / len(values))
