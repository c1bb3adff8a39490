"""Power laws of the loss, fitted to several architectures at once.

From two curves follows the share: the size at which one architecture has the
loss that another has at a larger size, relative to that size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.optimize
import scipy.stats
from jaxtyping import Float, Int
from numpy import ndarray

# Bounds of the exponent b.
_MIN_EXPONENT = 1e-2
_MAX_EXPONENT = 5.0

# The fit starts from several values of c, as shares of the lowest loss, and
# from exponents up to this bound.
_START_SHARES = (0.1, 0.5, 0.9)
_MAX_START_EXPONENT = 4


@dataclasses.dataclass(frozen=True)
class Fit:
  """The curves L(x) = c + a · (x / at)^−b of several architectures.

  Attributes:
    at: The size at which `a` is the loss above c.
    c: The loss that no size undercuts, in nats. All architectures share it.
    a: In nats, by architecture.
    b: The exponent, by architecture.
  """

  at: float
  c: float
  a: Mapping[str, float]
  b: Mapping[str, float]

  def loss(self, name: str, x: Float[ndarray, "X"]) -> Float[ndarray, "X"]:
    """Returns the loss of an architecture at some sizes."""
    return self.c + self.a[name] * (x / self.at) ** -self.b[name]

  def share(self, name: str, reference: str) -> float:
    """Returns the share of a size that an architecture needs.

    It is x / at, for the size x at which the architecture has the loss that the
    reference has at `at`.

    Args:
      name: The architecture.
      reference: The architecture that it is compared with.
    """
    return (self.a[name] / self.a[reference]) ** (1 / self.b[name])


class _Problem:
  """The least-squares problem of `fit`.

  The model is L = c + exp(log_a − b · t), where t is log(x) minus its mean. The
  parameters are a vector: log_a by architecture, b by architecture, and c.

  Attributes:
    center: The mean of log(x).
    lowest_loss: The lowest loss, an upper bound of c.
  """

  def __init__(
    self, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
  ):
    sizes = []
    losses = []
    architectures = []
    for index, (curve_sizes, curve_losses) in enumerate(curves.values()):
      sizes += list(curve_sizes)
      losses += list(curve_losses)
      architectures += [index] * len(curve_sizes)
    log_sizes = np.log(np.asarray(sizes, np.float64))
    self.center = log_sizes.mean()
    self._t: Float[ndarray, "P"] = log_sizes - self.center
    self._losses: Float[ndarray, "P"] = np.asarray(losses, np.float64)
    self._architectures: Int[ndarray, "P"] = np.array(architectures)
    self._count = len(curves)
    self.lowest_loss = self._losses.min()

  def unpack(
    self, parameters: Float[ndarray, "V"]
  ) -> tuple[Float[ndarray, "A"], Float[ndarray, "A"], float]:
    """Returns log_a, b and c."""
    log_a = parameters[: self._count]
    b = parameters[self._count : -1]
    return log_a, b, parameters[-1]

  def residuals(self, parameters: Float[ndarray, "V"]) -> Float[ndarray, "P"]:
    """Returns the model's losses minus the measured losses."""
    _, _, c = self.unpack(parameters)
    return c + self._above_c(parameters) - self._losses

  def jacobian(self, parameters: Float[ndarray, "V"]) -> Float[ndarray, "P V"]:
    """Returns the derivatives of the residuals."""
    # A point depends on the parameters of its own architecture alone.
    is_own = self._architectures[:, None] == np.arange(self._count)
    by_log_a = self._above_c(parameters)[:, None] * is_own
    by_b = -self._t[:, None] * by_log_a
    by_c = np.ones((len(self._t), 1))
    return np.concatenate([by_log_a, by_b, by_c], axis=1)

  def bounds(self) -> tuple[list[float], list[float]]:
    """Returns the lower and the upper bounds of the parameters."""
    count = self._count
    lower = [-np.inf] * count + [_MIN_EXPONENT] * count + [0.0]
    upper = [np.inf] * count + [_MAX_EXPONENT] * count + [self.lowest_loss]
    return lower, upper

  def start(self, c: float) -> list[float]:
    """Returns initial parameters for a value of c.

    For a given c, a power law is a line of logarithms.
    """
    log_a = []
    b = []
    for index in range(self._count):
      is_own = self._architectures == index
      log_above_c = np.log(self._losses[is_own] - c)
      slope, intercept = np.polyfit(self._t[is_own], log_above_c, 1)
      log_a.append(intercept)
      b.append(np.clip(-slope, _MIN_EXPONENT, _MAX_START_EXPONENT))
    return [*log_a, *b, c]

  def _above_c(self, parameters: Float[ndarray, "V"]) -> Float[ndarray, "P"]:
    """Returns the model's losses minus c."""
    log_a, b, _ = self.unpack(parameters)
    architectures = self._architectures
    return np.exp(log_a[architectures] - b[architectures] * self._t)


def fit(
  curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], at: float
) -> Fit:
  """Fits the curves of all architectures together, by least squares.

  They share c, for three reasons. The loss that no size would undercut belongs
  to the text more than to the model. A handful of sizes does not determine one
  c for each architecture. And with a common c, a share exists wherever the
  curves do.

  Args:
    curves: The sizes and the losses in nats, by architecture. Each needs at
      least three different sizes.
    at: The size at which `a` is the loss above c.
  """
  problem = _Problem(curves)
  solutions = []
  for share in _START_SHARES:
    solution = scipy.optimize.least_squares(
      problem.residuals,
      problem.start(share * problem.lowest_loss),
      problem.jacobian,
      bounds=problem.bounds(),
      x_scale="jac",
    )
    solutions.append(solution)
  best = min(solutions, key=_cost)

  log_a, b, c = problem.unpack(best.x)
  a = np.exp(log_a - b * (np.log(at) - problem.center))
  return Fit(
    at=at,
    c=float(c),
    a=dict(zip(curves, a.tolist(), strict=True)),
    b=dict(zip(curves, b.tolist(), strict=True)),
  )


def _cost(solution: scipy.optimize.OptimizeResult) -> float:
  return solution.cost


def interval(
  estimate: float, left_out: Sequence[float] | Float[ndarray, "S"]
) -> tuple[float, float]:
  """Returns the 95% interval of an estimate, by the jackknife.

  It uses Student's t. The percentiles of a few resampled seeds would be too
  narrow.

  Args:
    estimate: The estimate from all seeds.
    left_out: For each seed, the estimate from the remaining seeds.
  """
  num_seeds = len(left_out)
  standard_error = np.sqrt((num_seeds - 1) * np.var(left_out))
  quantile = scipy.stats.t.ppf(0.975, num_seeds - 1)
  reach = float(quantile * standard_error)
  return estimate - reach, estimate + reach
