"""95% intervals of measurements, and paired differences between two models.

A proportion has Wilson's interval, and a difference of two proportions has
Tango's (`proportions.py`). Other measurements have the interval of a percentile
bootstrap, which resamples whole units. A bootstrap would give a proportion of
0 of 2 the interval [0, 0].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy import ndarray

from diffjax.evals.measurement import Measurement
from diffjax.evals.report import proportions
from diffjax.evals.report.proportions import CONFIDENCE

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Interval:
  """A number and its 95% interval.

  The bounds are NaN without units. A bootstrap's bounds are also NaN if the
  units show no spread, because there is only one or all are equal.

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
    nan = float("nan")
    return Interval(nan, nan, nan, num_units)

  if against is None and measurement.is_proportion:
    bounds = _proportion_bounds(measurement)
  elif against is not None and _are_proportions(measurement, against):
    bounds = _difference_bounds(measurement, against)
  else:
    return _bootstrap(measurement, against)
  return Interval(bounds.estimate, bounds.low, bounds.high, num_units)


def _are_proportions(first: Measurement, second: Measurement) -> bool:
  return first.is_proportion and second.is_proportion


def _check_pair(first: Measurement, second: Measurement) -> None:
  """Raises ValueError if two measurements cannot be paired."""
  is_same = first.name == second.name and first.at == second.at
  if not is_same or len(first.units) != len(second.units):
    raise ValueError(
      f"{first.name} {first.at} of {len(first.units)} units cannot be paired"
      f" with {second.name} {second.at} of {len(second.units)}"
    )


def _proportion_bounds(measurement: Measurement) -> proportions.Bounds:
  """Returns the interval of the mean of the groups' proportions."""
  outcomes, groups = measurement.units.T
  bounds_of_groups = []
  for group in np.unique(groups):
    group_outcomes = outcomes[groups == group]
    bounds_of_groups.append(proportions.single(group_outcomes))
  return proportions.mean(bounds_of_groups)


def _difference_bounds(
  measurement: Measurement, against: Measurement
) -> proportions.Bounds:
  """Returns the interval of the mean of the groups' paired differences."""
  outcomes, groups = measurement.units.T
  # Both models have the same units, so they have the same groups.
  other_outcomes, _ = against.units.T
  bounds_of_groups = []
  for group in np.unique(groups):
    is_member = groups == group
    bounds_of_groups.append(
      proportions.paired_difference(
        outcomes[is_member], other_outcomes[is_member]
      )
    )
  return proportions.mean(bounds_of_groups)


def _bootstrap(
  measurement: Measurement, against: Measurement | None
) -> Interval:
  """Returns the percentile bootstrap's interval.

  For two models, the interval is of the difference measurement − against.
  """

  # The bootstrap draws indices, so that both models get the same units.
  def statistic(unit_indices: ndarray) -> float:
    value = measurement.statistic(measurement.units[unit_indices])
    if against is None:
      return value
    return value - against.statistic(against.units[unit_indices])

  num_units = len(measurement.units)
  all_units = np.arange(num_units)
  value = statistic(all_units)
  has_spread = _has_spread(measurement)
  if against is not None:
    has_spread = has_spread or _has_spread(against)
  if not has_spread:
    return Interval(value, float("nan"), float("nan"), num_units)

  # Imported here, because the import takes a second.
  import scipy.stats

  bootstrap = scipy.stats.bootstrap(
    (all_units,),
    statistic,
    vectorized=False,
    n_resamples=RESAMPLES,
    confidence_level=CONFIDENCE,
    method="percentile",
    rng=np.random.default_rng(0),
  )
  low, high = bootstrap.confidence_interval
  return Interval(value, float(low), float(high), num_units)


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

  If a second model has the same measurement, "against" is its interval and
  "difference" is the interval of the paired difference. Both have the fields of
  `Interval`.

  Args:
    measurements: The measurements of a model.
    against: The measurements of a second model, if there is one.
  """
  second_measurements: dict[tuple[Any, ...], Measurement] = {}
  for second in against or ():
    second_measurements[_name_and_coordinates(second)] = second

  for first in measurements:
    figure: dict[str, Any] = {
      "name": first.name,
      "at": first.at,
      **dataclasses.asdict(interval(first)),
    }
    key = _name_and_coordinates(first)
    if key in second_measurements:
      second = second_measurements[key]
      figure["against"] = dataclasses.asdict(interval(second))
      figure["difference"] = dataclasses.asdict(interval(first, second))
    yield figure


def _name_and_coordinates(measurement: Measurement) -> tuple[Any, ...]:
  """Returns the key by which two models' measurements are paired."""
  return (measurement.name, *sorted(measurement.at.items()))
