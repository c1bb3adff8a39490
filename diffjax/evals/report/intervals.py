"""95% intervals of measurements, and paired differences between two models.

A proportion has Wilson's interval, and a difference of two proportions has
Tango's (`proportions.py`). If there are groups, such as tasks, they have the
interval of the mean over the groups. Other measurements have the interval of a
percentile bootstrap, which resamples whole units. A bootstrap has no useful
interval for a proportion of 0 of 2, because resampled units do not vary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy import ndarray

from diffjax.evals.measurement import Measurement
from diffjax.evals.report import proportions
from diffjax.evals.report.proportions import CONFIDENCE, Estimate

# The number of resamplings of a bootstrap.
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Interval:
  """A number and its 95% interval.

  Without units, all three numbers are NaN. The bounds of a bootstrap are also
  NaN if all units are equal, or if there is only one.

  Attributes:
    value: The number.
    low: The lower bound.
    high: The upper bound.
    units: The number of units.
  """

  value: float
  low: float
  high: float
  units: int

  def __str__(self) -> str:
    return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def interval(
  measurement: Measurement, against: Measurement | None = None
) -> Interval:
  """Returns the interval of a measurement, or of a paired difference.

  Args:
    measurement: The measurement.
    against: The same measurement of another model, on the same units in the
      same order. The interval is then of the difference measurement − against.

  Raises:
    ValueError: if their names, coordinates or numbers of units differ.
  """
  if against is not None:
    _check_pair(measurement, against)
  num_units = len(measurement.units)
  if num_units == 0:
    return Interval(math.nan, math.nan, math.nan, num_units)

  is_proportion = measurement.is_proportion
  if against is not None:
    is_proportion = is_proportion and against.is_proportion
  if not is_proportion:
    estimate = _bootstrap(measurement, against)
  elif against is None:
    estimate = _estimate_proportion(measurement)
  else:
    estimate = _estimate_difference(measurement, against)
  return Interval(estimate.value, estimate.low, estimate.high, num_units)


def _check_pair(first: Measurement, second: Measurement) -> None:
  """Raises ValueError if two measurements cannot be paired."""
  is_same = first.name == second.name and first.at == second.at
  if not is_same or len(first.units) != len(second.units):
    raise ValueError(
      f"{first.name} {first.at} of {len(first.units)} units cannot be paired"
      f" with {second.name} {second.at} of {len(second.units)}"
    )


def _estimate_proportion(measurement: Measurement) -> Estimate:
  """Returns the mean of the groups' proportions, with its interval."""
  # The two columns of a proportion's units.
  outcomes, groups = measurement.units.T
  estimates = []
  for group in np.unique(groups):
    group_outcomes = outcomes[groups == group]
    estimates.append(proportions.single(group_outcomes))
  return proportions.mean(estimates)


def _estimate_difference(
  measurement: Measurement, against: Measurement
) -> Estimate:
  """Returns the mean of the groups' paired differences, with its interval."""
  # Both models have the same units, so they have the same groups.
  outcomes, groups = measurement.units.T
  other_outcomes, _ = against.units.T
  estimates = []
  for group in np.unique(groups):
    is_member = groups == group
    difference = proportions.paired_difference(
      outcomes[is_member], other_outcomes[is_member]
    )
    estimates.append(difference)
  return proportions.mean(estimates)


def _bootstrap(
  measurement: Measurement, against: Measurement | None
) -> Estimate:
  """Returns a number with the interval of a percentile bootstrap.

  For two models, the number is the difference measurement − against.
  """

  # The bootstrap resamples indices of units, so that both models get the same
  # units.
  def compute_number(unit_indices: ndarray) -> float:
    number = measurement.statistic(measurement.units[unit_indices])
    if against is None:
      return number
    return number - against.statistic(against.units[unit_indices])

  unit_indices = np.arange(len(measurement.units))
  number = compute_number(unit_indices)
  has_spread = _has_spread(measurement)
  if against is not None:
    has_spread = has_spread or _has_spread(against)
  if not has_spread:
    return Estimate(number, math.nan, math.nan)

  # Imported here, because the import takes a second.
  import scipy.stats

  bootstrap = scipy.stats.bootstrap(
    (unit_indices,),
    compute_number,
    vectorized=False,
    n_resamples=RESAMPLES,
    confidence_level=CONFIDENCE,
    method="percentile",
    rng=np.random.default_rng(0),
  )
  low, high = bootstrap.confidence_interval
  return Estimate(number, float(low), float(high))


def _has_spread(measurement: Measurement) -> bool:
  """Returns True if the units are not all equal."""
  units = measurement.units
  return bool((units != units[0]).any())


def compare(
  measurements: Iterable[Measurement],
  against: Iterable[Measurement] | None = None,
) -> Iterator[dict[str, Any]]:
  """Yields measurements with their intervals, in the form of the JSON files.

  For example, a measurement of one model gives

    {"name": "accuracy", "at": {"depth": 0.5},
     "value": 0.8, "low": 0.67, "high": 0.89, "units": 50}

  If a second model has the same measurement, there are two more fields:
  "against" is its interval, and "difference" is the interval of the paired
  difference. Both have the fields of `Interval`.

  Args:
    measurements: The measurements of a model.
    against: The measurements of a second model, if there is one.
  """
  second_by_key: dict[tuple[Any, ...], Measurement] = {}
  for second in against or ():
    second_by_key[_name_and_coordinates(second)] = second

  for first in measurements:
    figure: dict[str, Any] = {
      "name": first.name,
      "at": first.at,
      **dataclasses.asdict(interval(first)),
    }
    key = _name_and_coordinates(first)
    if key in second_by_key:
      second = second_by_key[key]
      figure["against"] = dataclasses.asdict(interval(second))
      figure["difference"] = dataclasses.asdict(interval(first, second))
    yield figure


def _name_and_coordinates(measurement: Measurement) -> tuple[Any, ...]:
  """Returns the key by which two models' measurements are paired."""
  return (measurement.name, *sorted(measurement.at.items()))
