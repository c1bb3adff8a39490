"""Figures, the numbers that measurements yield, with 95% intervals and paired differences of two models on the same samples.

A figure that is a proportion has Wilson's interval, and a difference of two has Tango's (`proportions.py`). All others have a percentile
bootstrap, which resamples whole units. It would give a proportion of 0 of 2 the interval [0, 0].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from diffjax.evals.report import proportions
from diffjax.evals.report.proportions import CONFIDENCE

RESAMPLES = 2000


def ratio(units: Float[ndarray, "U 2"]) -> float:
  """Σ first column / Σ second column: the mean of units that hold a sum and a count."""
  total, count = units.sum(axis=0)
  return float(total / count)


def mean_over_groups(units: Float[ndarray, "U 2"]) -> float:
  """The mean of the groups' means of units that hold an outcome and the number of a group."""
  return float(
    np.mean(
      [
        units[units[:, 1] == group, 0].mean()
        for group in np.unique(units[:, 1])
      ]
    )
  )


@dataclasses.dataclass(frozen=True)
class Figure:
  """A number of a measurement.

  Attributes:
    name: Name, with its unit if it has one, such as "loss (nats/token)".
    units: The contribution of each independent unit (a document's row, a prompt, a question), [U, …]. What depends on each other, such as
      several answers in one prompt, belongs into one unit.
    at: Its place in the measurement's grid, such as {"length": 4096, "depth": 0.5}.
    statistic: Computes the number from any resampling of the units along axis 0.
    proportion: True if every unit is a trial: it holds an outcome, from 0 to 1, and the number of its group, and the statistic is
      `mean_over_groups`. `proportion` makes such figures.
  """

  name: str
  units: Float[ndarray, "U *parts"]
  at: dict[str, Any] = dataclasses.field(default_factory=dict)
  statistic: Callable[[ndarray], float] = ratio
  proportion: bool = False


def mean_of(name: str, values: Iterable[float], **at: Any) -> Figure:
  """The figure of the mean of one number per unit.

  Args:
    name: Of the figure.
    values: A number for each unit.
    at: The figure's place.
  """
  values = np.asarray(list(values), np.float64)
  return Figure(name, np.stack([values, np.ones_like(values)], axis=1), at)


def proportion(
  name: str,
  outcomes: Iterable[float],
  groups: Iterable[int] | None = None,
  **at: Any,
) -> Figure:
  """The figure of a proportion, the share of yes among independent answers.

  Args:
    name: Of the figure.
    outcomes: For each unit 1 for yes or 0 for no. A unit of several answers has the share of yes among them.
    groups: The number of each unit's group, such as its task. The figure is then the mean of the groups' proportions.
    at: The figure's place.

  Raises:
    ValueError: if an outcome is not between 0 and 1.
  """
  outcomes = np.asarray(list(outcomes), np.float64)
  if ((outcomes < 0) | (outcomes > 1)).any():
    raise ValueError(
      f"{name}: outcomes must be between 0 and 1; got {outcomes.min():.4g} to {outcomes.max():.4g}"
    )
  numbers = (
    np.zeros_like(outcomes)
    if groups is None
    else np.asarray(list(groups), np.float64)
  )
  return Figure(
    name,
    np.stack([outcomes, numbers], axis=1),
    at,
    mean_over_groups,
    proportion=True,
  )


@dataclasses.dataclass(frozen=True)
class Interval:
  """A number and its 95% interval over units.

  The bounds are NaN without units, and for a bootstrap also where the units show no spread: there is one, or all are alike.
  """

  value: float
  low: float
  high: float
  units: int

  def __str__(self) -> str:
    return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def interval(figure: Figure, against: Figure | None = None) -> Interval:
  """The interval of a figure, or of the difference figure − against.

  The difference is paired: both figures are of the same units in the same order.

  Raises:
    ValueError: if their names, places or numbers of units differ.
  """
  count = len(figure.units)
  if against is not None and (
    len(against.units) != count
    or against.name != figure.name
    or against.at != figure.at
  ):
    raise ValueError(
      f"{figure.name} {figure.at} of {count} units cannot be paired with {against.name} {against.at} of {len(against.units)}"
    )

  if not count:
    return Interval(float("nan"), float("nan"), float("nan"), 0)
  if figure.proportion and (against is None or against.proportion):
    return Interval(
      *_of_proportions(
        figure.units, None if against is None else against.units
      ),
      count,
    )
  return _bootstrap(figure, against)


def _of_proportions(
  units: ndarray, against: ndarray | None
) -> proportions.Bounds:
  """The interval of a proportion or a paired difference: of each group, and from these of the mean."""
  members = [units[:, 1] == group for group in np.unique(units[:, 1])]
  if against is None:
    return proportions.mean(
      [proportions.single(units[chosen, 0]) for chosen in members]
    )
  return proportions.mean(
    [
      proportions.paired_difference(units[chosen, 0], against[chosen, 0])
      for chosen in members
    ]
  )


def _bootstrap(figure: Figure, against: Figure | None) -> Interval:
  """The percentile bootstrap's interval."""

  def value(index: ndarray) -> float:
    own = figure.statistic(figure.units[index])
    return (
      own if against is None else own - against.statistic(against.units[index])
    )

  count = len(figure.units)
  everything = np.arange(count)
  whole = value(everything)
  if all(
    (each.units == each.units[0]).all()
    for each in (figure, against)
    if each is not None
  ):
    return Interval(whole, float("nan"), float("nan"), count)
  import scipy.stats  # here, since it takes a second to import

  resampled = scipy.stats.bootstrap(
    (everything,),
    value,
    vectorized=False,
    n_resamples=RESAMPLES,
    confidence_level=CONFIDENCE,
    method="percentile",
    rng=np.random.default_rng(0),
  ).confidence_interval
  return Interval(whole, float(resampled.low), float(resampled.high), count)


def compare(
  figures: Iterable[Figure], against: Iterable[Figure] | None = None
) -> Iterator[dict[str, Any]]:
  """Figures as JSON: name, place, value and interval; with another model's figures, also that model's and the paired difference."""
  others = (
    {}
    if against is None
    else {(other.name, *sorted(other.at.items())): other for other in against}
  )
  for figure in figures:
    row = {
      "name": figure.name,
      "at": figure.at,
      **dataclasses.asdict(interval(figure)),
    }
    if (
      other := others.get((figure.name, *sorted(figure.at.items())))
    ) is not None:
      row |= {
        "against": dataclasses.asdict(interval(other)),
        "difference": dataclasses.asdict(interval(figure, other)),
      }
    yield row
