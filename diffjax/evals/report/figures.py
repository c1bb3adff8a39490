"""What every measurement yields: figures, with 95% intervals, of one model or of two that are compared on the same samples."""

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
  """Σ first column / Σ second: the mean per token of units that hold a sum and a count."""
  total, count = units.sum(axis=0)
  return float(total / count)


@dataclasses.dataclass(frozen=True)
class Figure:
  """One number of a measurement.

  Attributes:
    name: what is measured, with its unit where it has one, such as "loss (nats/token)".
    units: what each independent unit (a document's row, a prompt, a question) contributes, [U, …]. Units are resampled whole.
    at: where in the measurement's grid it stands, such as {"length": 4096, "depth": 0.5}.
    statistic: the number, from any resampling of the units along axis 0.
  """

  name: str
  units: Float[ndarray, "U *parts"]
  at: dict[str, Any] = dataclasses.field(default_factory=dict)
  statistic: Callable[[ndarray], float] = ratio


def mean_of(name: str, values: Iterable[float], **at: Any) -> Figure:
  """The mean of one number per unit."""
  values = np.asarray(list(values), np.float64)
  return Figure(name, np.stack([values, np.ones_like(values)], axis=1), at)


@dataclasses.dataclass(frozen=True)
class Interval:
  """A number and its 95% percentile bootstrap interval over units; NaN bounds from fewer than two units."""

  value: float
  low: float
  high: float
  units: int

  def __str__(self) -> str:
    return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def interval(figure: Figure, against: Figure | None = None) -> Interval:
  """The figure's value; with `against`, the difference figure − against, paired: both are measured on the same units in the same order.

  Raises:
    ValueError: if the two are not of the same units.
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
  import scipy.stats  # here: training, which imports this file, would start a second later

  resampled = scipy.stats.bootstrap(
    (everything,), value, vectorized=False, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile",
    rng=np.random.default_rng(0),
  ).confidence_interval  # fmt: skip
  return Interval(whole, float(resampled.low), float(resampled.high), count)


def compare(figures: Iterable[Figure], against: Iterable[Figure] | None = None) -> Iterator[dict[str, Any]]:
  """Figures as JSON: name, place, value with interval and, beside another model's, that model's and the paired difference."""
  others = {} if against is None else {(other.name, *sorted(other.at.items())): other for other in against}
  for figure in figures:
    row = {"name": figure.name, "at": figure.at, **dataclasses.asdict(interval(figure))}
    if (other := others.get((figure.name, *sorted(figure.at.items())))) is not None:
      row |= {"against": dataclasses.asdict(interval(other)), "difference": dataclasses.asdict(interval(figure, other))}
    yield row
