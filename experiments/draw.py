"""Writes the tables and figures of finished experiments anew from their results.json, and runs nothing.

python -m experiments.draw                     # of all experiments
python -m experiments.draw ablations scaling
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from diffjax.config import UserError
from experiments import grid as grids
from experiments import plots, results
from experiments.grid import Experiment


def main(names: Sequence[str]) -> None:
  """Draws all results in the folders of these experiments, of every grid; of all experiments if none is named.

  Raises:
    UserError: for an unknown experiment.
  """
  for name in names or grids.names():
    if name not in grids.names():
      raise UserError(
        f"there is no experiment {name!r}; there are {', '.join(grids.names())}"
      )
    for path in sorted((grids.FOLDER / name).rglob("results.json")):
      found = results.read(path, "experiment", "grid", "baseline", "runs")
      assert found is not None
      print(f"{path.parent}: {', '.join(redraw(path, found))}")


def redraw(path: pathlib.Path, found: dict[str, Any]) -> list[str]:
  """Draws a results.json. Returns the names of the files that it wrote.

  The file itself is written only if its summary's table changes, since the last digits of a fit differ between machines."""
  experiment = grids.load(found["experiment"], found["grid"])
  renewed = (
    {**found, "summary": experiment.summarise(found)}
    if experiment.summarise
    else found
  )
  if results.table(experiment, renewed) == results.table(experiment, found):
    return draw(experiment, found, path.parent)
  results.write(path, renewed)
  return [path.name, *draw(experiment, renewed, path.parent)]


def draw(
  experiment: Experiment, found: Mapping[str, Any], folder: pathlib.Path
) -> list[str]:
  """Writes table.md and, if the experiment has a plot, plot.png and plot.svg into a folder. Returns their names."""
  (folder / "table.md").write_text(
    results.table(experiment, found), encoding="utf-8"
  )
  return [
    "table.md",
    *(plots.save(experiment.plot(found), folder) if experiment.plot else []),
  ]


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
