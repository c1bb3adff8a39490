"""95% intervals of proportions: of one model, and of the difference of two models on the same units. They hold at 0 and at 1, too.

A unit is one trial with an outcome from 0 to 1. If it is yes or no, these are the usual intervals. If it is the share of several answers
that may depend on each other, they are conservative: x² ≤ x there, so the outcomes vary at most as those of yes/no trials of the same mean
do, and |d|² ≤ |d| bounds the differences alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy import ndarray

CONFIDENCE = 0.95
_EDGE = 1e-9  # rounding of a sum of shares, and the distance to ±1 at which the search for a bound ends

# Estimate, lower and upper bound
Bounds = tuple[float, float, float]


def single(outcomes: ndarray) -> Bounds:
  """Wilson's score interval of a proportion.

  A total that is not whole, of shares, takes the lower bound of the whole number below it and the upper bound of the one above it.

  Args:
    outcomes: Of the units, from 0 to 1, [U].

  Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), by SciPy.
  """
  import scipy.stats  # here, since it takes a second to import

  total, count = round(float(outcomes.sum()), 9), len(outcomes)
  low, high = (
    scipy.stats.binomtest(whole, count).proportion_ci(
      CONFIDENCE, method="wilson"
    )
    for whole in (math.floor(total), math.ceil(total))
  )
  return float(outcomes.mean()), float(low.low), float(high.high)


def paired_difference(outcomes: ndarray, against: ndarray) -> Bounds:
  """Tango's score interval of the difference of two proportions on the same units.

  It holds the differences that McNemar's test, extended to differences other than 0, does not reject, as Wilson's interval does for one
  proportion. So it excludes 0 exactly if McNemar's test is significant. Newcombe's hybrid score interval for paired proportions is too
  narrow where the models nearly always agree (for 50 times both and 50 times neither it is ±0.019, though up to 3.7% may differ) and with
  few units (one model right twice, the other never: 0.07 to 1).

  Args:
    outcomes: Of the units, from 0 to 1, [U].
    against: The other model's on the same units, [U].

  Source: Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample design", Statistics in
  Medicine 17 (1998), 891–908. SciPy does not have it.
  """
  import scipy.optimize
  import scipy.stats

  each, count = outcomes - against, len(outcomes)
  more, less = float(each.clip(0).sum()), float(-each.clip(None, 0).sum())
  estimate, z = (
    (more - less) / count,
    float(scipy.stats.norm.ppf((1 + CONFIDENCE) / 2)),
  )

  def excess(difference: float) -> float:
    """The score statistic of a difference, in standard errors that it implies. The number of units that speak for the second model is
    then the root of 2n x² + linear x + constant, by maximum likelihood."""
    linear, constant = (
      (2 * count - more + less) * difference - more - less,
      -less * difference * (1 - difference),
    )
    likely = (
      math.sqrt(max(0.0, linear**2 - 8 * count * constant)) - linear
    ) / (4 * count)
    gap = more - less - count * difference
    return gap and gap / math.sqrt(
      count * (2 * likely + difference * (1 - difference))
    )

  def bound(sign: int) -> float:
    edge = sign * (1 - _EDGE)
    if sign * estimate >= 1 - _EDGE or abs(excess(edge)) <= z:
      return float(sign)
    return float(
      scipy.optimize.brentq(
        lambda difference: excess(difference) + sign * z, estimate, edge
      )
    )

  return estimate, bound(-1), bound(1)


def mean(groups: Sequence[Bounds]) -> Bounds:
  """The interval of the mean of independent estimates, each weighted alike, from their intervals. Of one it is that one's.

  Source: the method of variance estimates recovery: Zou, Huang and Zhang, "A note on confidence interval estimation for a linear function
  of binomial proportions", Computational Statistics & Data Analysis 53 (2009).
  """
  estimates, low, high = np.asarray(groups).T
  reach = [
    float(np.sqrt(np.square(bounds - estimates).sum()) / len(estimates))
    for bounds in (low, high)
  ]
  return (
    float(estimates.mean()),
    float(estimates.mean()) - reach[0],
    float(estimates.mean()) + reach[1],
  )
