"""Measurements of a suite, with the contribution of each unit.

A unit is an independent observation, such as a prompt. From the units,
`report/intervals.py` computes confidence intervals and paired differences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray


def ratio(units: Float[ndarray, "U 2"]) -> float:
  """Returns the sum of the first column divided by the sum of the second.

  For example, if each unit is the summed loss of a row and its number of
  tokens, the result is the mean loss per token.

  Args:
    units: For each unit a sum and a count.
  """
  total, count = units.sum(axis=0)
  return float(total / count)


def mean_over_groups(units: Float[ndarray, "U 2"]) -> float:
  """Returns the mean of the groups' means, so that groups have equal weight.

  Args:
    units: For each unit its outcome and the number of its group.
  """
  outcomes, group_numbers = units.T
  group_means = []
  for group in np.unique(group_numbers):
    group_means.append(outcomes[group_numbers == group].mean())
  return float(np.mean(group_means))


@dataclasses.dataclass(frozen=True)
class Measurement:
  """A number that a suite measures.

  Example: `Measurement("accuracy", units, {"length": 4096, "depth": 0.5})`

  Attributes:
    name: The name, with the unit of measurement if there is one, such as
      "loss (nats/token)".
    units: The contribution of each independent observation, [U, ...]. An
      observation is, for example, a row of text, a prompt or a question.
      Several answers to one prompt depend on each other, so they belong in one
      unit.
    at: The coordinates in the suite's grid, such as {"depth": 0.5}.
    statistic: Computes the number from units, or from a resampling of them.
  """

  name: str
  units: Float[ndarray, "U *parts"]
  at: dict[str, Any] = dataclasses.field(default_factory=dict)
  statistic: Callable[[ndarray], float] = ratio

  def __post_init__(self) -> None:
    """Makes `units` an array."""
    object.__setattr__(self, "units", np.asarray(self.units))

  @property
  def is_proportion(self) -> bool:
    """True if the function `proportion` made this measurement."""
    return self.statistic is mean_over_groups


def mean_of(name: str, values: Iterable[float], **at: Any) -> Measurement:
  """Returns the measurement of the mean of one value per unit.

  Args:
    name: The measurement's name.
    values: The value of each unit.
    **at: The measurement's coordinates.
  """
  column = np.asarray(list(values), np.float64)
  units = np.stack([column, np.ones_like(column)], axis=1)
  return Measurement(name, units, at)


def proportion(
  name: str,
  outcomes: Iterable[float],
  groups: Iterable[int] | None = None,
  **at: Any,
) -> Measurement:
  """Returns the measurement of a proportion, such as an accuracy.

  Args:
    name: The measurement's name.
    outcomes: For each unit 1 for yes or 0 for no. A unit of several answers has
      the share of yes among them.
    groups: The number of each unit's group, such as its task. The measurement
      is then the mean of the groups' proportions.
    **at: The measurement's coordinates.

  Raises:
    ValueError: if an outcome is not between 0 and 1.
  """
  outcome_column = np.asarray(list(outcomes), np.float64)
  is_outside = (outcome_column < 0) | (outcome_column > 1)
  if is_outside.any():
    raise ValueError(
      f"{name}: outcomes must be between 0 and 1; got"
      f" {outcome_column.min():.4g} to {outcome_column.max():.4g}"
    )
  group_column = np.zeros_like(outcome_column)
  if groups is not None:
    group_column = np.asarray(list(groups), np.float64)
  units = np.stack([outcome_column, group_column], axis=1)
  return Measurement(name, units, at, mean_over_groups)
