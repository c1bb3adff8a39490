"""Writes the tables and figures of experiments again, and runs nothing.

They are drawn from results.json:

    # All experiments.
    python -m experiments.draw
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
from experiments import grid, plots, product_plot, results, table
from experiments.grid import Experiment


def main(names: Sequence[str]) -> None:
  """Draws the results of every grid of some experiments.

  Args:
    names: Names of experiments, or paths of their folders. Empty for all
      experiments.

  Raises:
    UserError: for an unknown experiment.
  """
  for argument in names or grid.names():
    name = grid.resolve(argument)
    for path in sorted((grid.FOLDER / name).rglob("results.json")):
      stored = results.read(path, "experiment", "grid", "baseline", "runs")
      assert stored is not None
      written = redraw(path, stored, name)
      print(f"{path.parent}: {', '.join(written)}")


def redraw(path: pathlib.Path, stored: dict[str, Any], name: str) -> list[str]:
  """Draws a results.json, with a new summary.

  The file itself is written only if the table of its summary changes, since the
  last digits of a fit differ between machines.

  Args:
    path: The file.
    stored: Its content.
    name: The experiment's name.

  Returns:
    The names of the files that were written.
  """
  experiment = grid.load(name, stored["grid"])
  renewed = stored
  rows = results.without_failed_rows(stored)
  if experiment.summarise and rows["runs"]:
    renewed = {**stored, "summary": experiment.summarise(rows)}
  stored_table = table.markdown(experiment, stored)
  if table.markdown(experiment, renewed) == stored_table:
    return draw(experiment, stored, path.parent)
  results.write(path, renewed)
  return [path.name, *draw(experiment, renewed, path.parent)]


def draw(
  experiment: Experiment, stored: Mapping[str, Any], folder: pathlib.Path
) -> list[str]:
  """Writes the table and, if there is one, the plot of an experiment.

  Args:
    experiment: The experiment.
    stored: The content of its results.json.
    folder: The directory for table.md, plot.png and plot.svg.

  Returns:
    The names of the files that were written.
  """
  text = table.markdown(experiment, stored)
  (folder / "table.md").write_text(text, encoding="utf-8")
  figure = _figure(experiment, stored)
  if figure is None:
    return ["table.md"]
  return ["table.md", *plots.save(figure, folder)]


def _figure(experiment: Experiment, stored: Mapping[str, Any]) -> Figure | None:
  """Returns the experiment's own plot, or the plot of its product.

  None if it has neither, or if no row is complete.
  """
  if experiment.plot:
    rows = results.without_failed_rows(stored)
    if not rows["runs"]:
      return None
    return experiment.plot(rows)
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
