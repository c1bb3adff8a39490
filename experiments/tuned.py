"""Prints the variants that the grid "tune" of an experiment chooses.

    python -m experiments.tuned fairness validation/loss min
    python -m experiments.tuned noisy_lookup accuracy max

The arguments are the experiment, a number in the results of its runs, and
whether it should be small (min) or large (max). The grid has its own seeds, and
no result is taken from them. Write the printed settings into the config.py of
the experiment and of every experiment that uses the same settings.
"""

from __future__ import annotations

import math
import statistics
import sys

from diffjax.config import UserError
from experiments import grid as grids
from experiments import results
from experiments.grid import FOLDER


def main(name: str, metric: str, better: str) -> None:
  """Prints the best variant of each row.

  Args:
    name: The experiment's name.
    metric: The name of a number in the results.
    better: "min" or "max".

  Raises:
    UserError: as for `best`, and for another value of `better`.
  """
  if better not in ("min", "max"):
    raise UserError(f"{better!r}: must be min or max")
  variants = grids.load(name, "tune").grids["tune"].variants
  rows = dict.fromkeys(_row(variant) for variant in variants)
  for row in rows:
    print(f"{row}: {best(name, row, metric, better)}")


def best(name: str, row: str, metric: str, better: str) -> str:
  """Returns the best variant of a row in an experiment's grid "tune".

  Args:
    name: The experiment's name.
    row: The part of the variants before the first comma.
    metric: The name of a number in the results. Its mean over the seeds
      decides. A variant is left out if one of its runs lacks the number,
      because the run diverged.
    better: "min" or "max".

  Returns:
    The variant, such as "diff,rate=0.004".

  Raises:
    UserError: if runs of the row are missing, or if the number is not finite in
      any variant.
  """
  path = FOLDER / name / "tune" / "results.json"
  means = {}
  for variant, values in _values(name, row, metric).items():
    mean = _mean(values)
    if mean is not None:
      means[variant] = mean
  if not means:
    raise UserError(
      f"{name}: no setting of {row} in {path} has a finite {metric}; check"
      ' the name of the number, or widen the grid "tune"'
    )
  if better == "min":
    return min(means, key=means.__getitem__)
  return max(means, key=means.__getitem__)


def _values(name: str, row: str, metric: str) -> dict[str, list[float | None]]:
  """Returns the number of each seed's run, by variant of the row.

  Args:
    name: The experiment's name.
    row: The part of the variants before the first comma.
    metric: The name of the number. It is None if a run lacks it.

  Raises:
    UserError: if a run is missing.
  """
  tuning = grids.load(name, "tune").grids["tune"]
  stored = results.read(FOLDER / name / "tune" / "results.json", "runs")
  numbers = {}
  if stored is not None:
    for run in stored["runs"]:
      numbers[run["name"]] = run["results"].get(metric)
  values: dict[str, list[float | None]] = {}
  for variant in tuning.variants:
    if _row(variant) != row:
      continue
    values[variant] = []
    for seed in tuning.seeds:
      run_name = f"{variant}/seed_{seed}"
      if run_name not in numbers:
        raise _not_tuned(name, row)
      values[variant].append(numbers[run_name])
  if not values:
    raise _not_tuned(name, row)
  return values


def _mean(values: list[float | None]) -> float | None:
  """Returns the mean; None if a value is missing or not finite."""
  finite = [
    value for value in values if value is not None and math.isfinite(value)
  ]
  if len(finite) < len(values):
    return None
  return statistics.mean(finite)


def _not_tuned(name: str, row: str) -> UserError:
  """Returns the error for a row with missing runs."""
  return UserError(
    f"{name}: {row} has not been tuned; run python -m experiments.run {name}"
    " --grid=tune"
  )


def _row(variant: str) -> str:
  row, _, _ = variant.partition(",")
  return row


if __name__ == "__main__":
  if len(sys.argv) != 4:
    sys.exit("usage: python -m experiments.tuned NAME METRIC min|max")
  try:
    main(*sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
