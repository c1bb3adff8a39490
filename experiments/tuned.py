"""Settings that a grid named "tune" chose, on seeds of its own, which no result is taken from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from diffjax.config import UserError
from experiments.grid import FOLDER, load


def best(
  name: str, row: str, metric: str, better: Callable[[Iterable[float]], float]
) -> str:
  """A row's best variant in an experiment's grid "tune".

  Args:
    name: the experiment's.
    row: what its variants begin with, before the first comma.
    metric: name of a number in the results; its mean over the seeds decides. A variant is out if a run of it lacks it (it diverged).
    better: `min` or `max`.

  Returns:
    The variant, such as "diff,rate=0.004".

  Raises:
    UserError: if runs of the row's variants are missing.
  """
  # Here, because SciPy takes a second to load and training does not need it.
  from experiments import results

  grid = load(name, "tune").grids["tune"]
  wanted = {
    f"{variant}/seed_{seed}"
    for variant in grid.variants
    if variant.partition(",")[0] == row
    for seed in grid.seeds
  }
  path = FOLDER / name / "tune" / "results.json"
  runs = (results.read(path, "runs") or {"runs": []})["runs"]
  found: dict[str, list[float]] = {}
  for run in runs:
    if run["name"] in wanted:
      found.setdefault(run["variant"], []).append(run["results"].get(metric))
  if not wanted or sum(map(len, found.values())) < len(wanted):
    raise UserError(
      f"{name}: {row} has not been tuned; run python -m experiments.run {name} --grid=tune"
    )
  finite = lambda each: all(
    value is not None and math.isfinite(value) for value in each
  )  # noqa: E731
  means = {
    variant: statistics.mean(each)
    for variant, each in found.items()
    if finite(each)
  }
  if not means:
    raise UserError(
      f"{name}: no setting of {row} in {path} has a finite {metric}"
    )
  chosen = better(means.values())
  return next(variant for variant, mean in means.items() if mean == chosen)
