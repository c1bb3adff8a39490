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
  """Computes the summary in a results.json again, and draws the results.

  The file itself is written only if its tables change, because the last digits
  of a summary differ between machines.

  Args:
    path: The file.
    stored: Its content.
    name: The experiment's name.

  Returns:
    The names of the files that were written.
  """
  experiment = grid.load(name, stored["grid"])
  updated = stored
  without_failed = results.without_failed_rows(stored)
  if experiment.summarise and without_failed["runs"]:
    summary = experiment.summarise(without_failed)
    updated = {**stored, "summary": summary}
  old_table = table.markdown(experiment, stored)
  new_table = table.markdown(experiment, updated)
  if new_table == old_table:
    return draw(experiment, stored, path.parent)
  results.write(path, updated)
  return [path.name, *draw(experiment, updated, path.parent)]


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
  """Returns the figure of an experiment's results.

  It is the experiment's own plot, or the default plot of `Grid.product`. None
  if there is neither, or if every variant has a failed run.
  """
  if experiment.plot:
    without_failed = results.without_failed_rows(stored)
    if not without_failed["runs"]:
      return None
    return experiment.plot(without_failed)
  crossed = experiment.grids[stored["grid"]].crossed
  if crossed is None:
    return None
  # The first column of the table is drawn.
  title, metric = next(iter(experiment.metrics.items()))
  return product_plot.plot(stored, tuple(crossed.factors), metric, title)


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
