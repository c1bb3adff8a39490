"""Power laws of the loss, and the share of a size with which one architecture equals another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.optimize
import scipy.stats
from jaxtyping import Float
from numpy import ndarray


@dataclasses.dataclass(frozen=True)
class Fit:
  """L(x) = c + a·(x / at)^−b of several architectures.

  Attributes:
    at: the size at which a is the loss above c.
    c: nats, shared by all.
    a: nats, by architecture.
    b: by architecture.
  """

  at: float
  c: float
  a: Mapping[str, float]
  b: Mapping[str, float]

  def loss(self, name: str, x: Float[ndarray, "X"]) -> Float[ndarray, "X"]:
    return self.c + self.a[name] * (x / self.at) ** -self.b[name]

  def share(self, name: str, other: str) -> float:
    """The x at which a curve has the loss that the other curve has at `at`, divided by `at`."""
    return (self.a[name] / self.a[other]) ** (1 / self.b[name])


def fit(
  curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], at: float
) -> Fit:
  """Least squares over all architectures together.

  They share c, the loss that no size would undercut. It belongs to the text more than to the model, a handful of sizes does not determine
  one for each architecture, and with a common c a share exists wherever the curves do.

  Args:
    curves: by architecture, sizes (three different ones at least) and losses in nats.
    at: see `Fit`.
  """
  names, count = list(curves), len(curves)
  which = np.repeat(np.arange(count), [len(x) for x, _ in curves.values()])
  x, loss = (
    np.concatenate(
      [np.asarray(curve[part], np.float64) for curve in curves.values()]
    )
    for part in (0, 1)
  )
  centre, lowest = np.log(x).mean(), loss.min()
  t = np.log(x) - centre

  def residuals(values):
    log_a, b, c = values[:count], values[count:-1], values[-1]
    return c + np.exp(log_a[which] - b[which] * t) - loss

  def jacobian(values):
    log_a, b = values[:count], values[count:-1]
    above = np.exp(log_a[which] - b[which] * t)[:, None] * (
      which[:, None] == np.arange(count)
    )  # of its own architecture alone
    return np.concatenate(
      [above, -t[:, None] * above, np.ones((len(t), 1))], axis=1
    )

  limits = (
    [-np.inf] * count + [1e-2] * count + [0.0],
    [np.inf] * count + [5.0] * count + [lowest],
  )
  found = []
  for share in (
    0.1,
    0.5,
    0.9,
  ):  # starts: a power law alone is a line of logarithms
    lines = [
      np.polyfit(
        t[which == index], np.log(loss[which == index] - share * lowest), 1
      )
      for index in range(count)
    ]
    start = [
      *(line[1] for line in lines),
      *(np.clip(-line[0], 1e-2, 4) for line in lines),
      share * lowest,
    ]
    found.append(
      scipy.optimize.least_squares(
        residuals, start, jacobian, bounds=limits, x_scale="jac"
      )
    )
  best = min(found, key=lambda result: result.cost).x
  log_a, b = (
    best[:count] - best[count:-1] * (np.log(at) - centre),
    best[count:-1],
  )
  named = lambda values: dict(zip(names, map(float, values), strict=True))
  return Fit(at, float(best[-1]), named(np.exp(log_a)), named(b))


def interval(
  whole: float, left_out: Sequence[float] | Float[ndarray, "S"]
) -> tuple[float, float]:
  """The 95% interval of an estimate by the jackknife, with Student's t. Percentiles of a few resampled seeds would be too narrow.

  Args:
    whole: the estimate from all seeds.
    left_out: for each seed, the estimate from all others.
  """
  count = len(left_out)
  error = np.sqrt((count - 1) * np.var(left_out))
  reach = float(scipy.stats.t.ppf(0.975, count - 1) * error)
  return whole - reach, whole + reach
