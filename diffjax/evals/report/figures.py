"""Figures, the numbers that measurements yield, with 95% intervals and paired differences of two models on the same samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

RESAMPLES = 2000
CONFIDENCE = 0.95


def ratio(units: Float[ndarray, "U 2"]) -> float:
  """Σ first column / Σ second column: the mean of units that hold a sum and a count."""
  total, count = units.sum(axis=0)
  return float(total / count)


@dataclasses.dataclass(frozen=True)
class Figure:
  """A number of a measurement.

  Attributes:
    name: Name, with its unit if it has one, such as "loss (nats/token)".
    units: The contribution of each independent unit (a document's row, a prompt, a question), [U, …]. Units are resampled whole.
    at: Its place in the measurement's grid, such as {"length": 4096, "depth": 0.5}.
    statistic: Computes the number from any resampling of the units along axis 0.
  """

  name: str
  units: Float[ndarray, "U *parts"]
  at: dict[str, Any] = dataclasses.field(default_factory=dict)
  statistic: Callable[[ndarray], float] = ratio


def mean_of(name: str, values: Iterable[float], **at: Any) -> Figure:
  """The figure of the mean of one number per unit.

  Args:
    name: Of the figure.
    values: A number for each unit.
    at: The figure's place.
  """
  values = np.asarray(list(values), np.float64)
  return Figure(name, np.stack([values, np.ones_like(values)], axis=1), at)


@dataclasses.dataclass(frozen=True)
class Interval:
  """A number and its 95% percentile bootstrap interval over units. With fewer than two units the bounds are NaN."""

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
  if against is not None and (len(against.units) != count or against.name != figure.name or against.at != figure.at):
    raise ValueError(
      f"{figure.name} {figure.at} of {count} units cannot be paired with {against.name} {against.at} of {len(against.units)}"
    )

  def value(index: ndarray) -> float:
    own = figure.statistic(figure.units[index])
    return own if against is None else own - against.statistic(against.units[index])

  everything = np.arange(count)
  whole = value(everything) if count else float("nan")
  if count < 2:
    return Interval(whole, float("nan"), float("nan"), count)
  import scipy.stats  # here, since it takes a second to import

  resampled = scipy.stats.bootstrap(
    (everything,), value, vectorized=False, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile",
    rng=np.random.default_rng(0),
  ).confidence_interval  # fmt: skip
  return Interval(whole, float(resampled.low), float(resampled.high), count)


def compare(figures: Iterable[Figure], against: Iterable[Figure] | None = None) -> Iterator[dict[str, Any]]:
  """Figures as JSON: name, place, value and interval; with another model's figures, also that model's and the paired difference."""
  others = {} if against is None else {(other.name, *sorted(other.at.items())): other for other in against}
  for figure in figures:
    row = {"name": figure.name, "at": figure.at, **dataclasses.asdict(interval(figure))}
    if (other := others.get((figure.name, *sorted(figure.at.items())))) is not None:
      row |= {"against": dataclasses.asdict(interval(other)), "difference": dataclasses.asdict(interval(figure, other))}
    yield row
