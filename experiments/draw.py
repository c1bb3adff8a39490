"""Writes the tables and figures of finished experiments anew from their results.json, and runs nothing.

python -m experiments.draw                     # of all experiments
python -m experiments.draw ablations scaling
python -m experiments.draw /home/me/lambda_study
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from diffjax.config import UserError
from experiments import grid as grids
from experiments import plots, product_plot, results
from experiments.grid import Experiment


def main(names: Sequence[str]) -> None:
  """Draws all results in the folders of these experiments, of every grid.

  Args:
    names: Names of experiments, or paths of their folders; all experiments if
      it is empty.

  Raises:
    UserError: for an unknown experiment.
  """
  for argument in names or grids.names():
    name = grids.resolve(argument)
    for path in sorted((grids.FOLDER / name).rglob("results.json")):
      stored = results.read(path, "experiment", "grid", "baseline", "runs")
      assert stored is not None
      written = redraw(path, stored, name)
      print(f"{path.parent}: {', '.join(written)}")


def redraw(path: pathlib.Path, stored: dict[str, Any], name: str) -> list[str]:
  """Draws a results.json. Returns the names of the files that it wrote.

  The file itself is written only if its summary's table changes, since the last digits of a fit differ between machines.

  Args:
    path: The file.
    stored: Its content.
    name: The experiment's name.
  """
  experiment = grids.load(name, stored["grid"])
  renewed = stored
  rows = results.without_failed_rows(stored)
  if experiment.summarise and rows["runs"]:
    renewed = {**stored, "summary": experiment.summarise(rows)}
  stored_table = results.table(experiment, stored)
  if results.table(experiment, renewed) == stored_table:
    return draw(experiment, stored, path.parent)
  results.write(path, renewed)
  return [path.name, *draw(experiment, renewed, path.parent)]


def draw(
  experiment: Experiment, stored: Mapping[str, Any], folder: pathlib.Path
) -> list[str]:
  """Writes table.md and, if there is a plot, plot.png and plot.svg into a folder. Returns their names."""
  table = results.table(experiment, stored)
  (folder / "table.md").write_text(table, encoding="utf-8")
  figure = _figure(experiment, stored)
  if figure is None:
    return ["table.md"]
  return ["table.md", *plots.save(figure, folder)]


def _figure(experiment: Experiment, stored: Mapping[str, Any]) -> Figure | None:
  """Returns the experiment's plot, or that of a product; None if there is neither."""
  if experiment.plot:
    rows = results.without_failed_rows(stored)
    return experiment.plot(rows) if rows["runs"] else None
  crossed = experiment.grids[stored["grid"]].crossed
  if crossed is None:
    return None
  title, metric = next(iter(experiment.metrics.items()))
  return product_plot.plot(stored, tuple(crossed.factors), metric, title)


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
