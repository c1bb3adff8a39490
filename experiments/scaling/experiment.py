"""Scaling: with which share of the parameters does DIFF equal the Transformer?

Trains DIFF, DIFF V2 and the Transformer at several sizes with the same number
of tokens, and at one size with several numbers of tokens. Fits power laws to
the losses (fit.py). See README.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import comparison, plots, series
from experiments.grid import Experiment, Grid
from experiments.scaling.config import ARCHITECTURES, SMALL, parts
from experiments.scaling.fit import Fit, fit, interval

LOSS = "validation/loss"

# The paper's shares of DIFF.
PAPER_SHARES = {
  ("diff", "parameters"): "0.622 (at 11 B), 0.595",
  ("diff", "tokens"): "0.637",
}

# The sizes of the large grids. One of them has several numbers of tokens.
LARGE_SIZES = (
  "830m",
  "1.4b",
  "2.8b",
  "6.8b",
  "13.1b",
  "3b,times=0.125",
  "3b,times=0.25",
  "3b,times=0.5",
  "3b,times=1",
)
SMALL_SIZES = (*SMALL, "0.1m,times=0.5", "0.1m,times=2", "0.1m,times=4")

# A fit has three parameters for each architecture.
MIN_SIZES = 3

# Losses by architecture, size in millions, and seed.
Points = dict[str, dict[float, dict[int, float]]]


def points_by_axis(grid_results: Mapping[str, Any]) -> dict[str, Points]:
  """Returns the losses against parameters and against tokens.

  "parameters" has the runs with the same number of tokens. "tokens" has the
  runs of the sizes that were trained on several numbers of tokens. A run that
  diverged has no loss and is left out.

  Args:
    grid_results: The content of a results.json.
  """
  finished = []
  for run in grid_results["runs"]:
    if run["results"][LOSS] is not None:
      finished.append(run)
  # The sizes with several numbers of tokens, which are multiples.
  sizes_with_times = set()
  for run in finished:
    _, size, times = parts(run["variant"])
    if times is not None:
      sizes_with_times.add(size)

  points: dict[str, Points] = {"parameters": {}, "tokens": {}}
  for run in finished:
    architecture, size, times = parts(run["variant"])
    if times is None:
      x = run["parameters"] / 1e6
      _add_point(points["parameters"], architecture, x, run)
    if size in sizes_with_times:
      x = _num_tokens(grid_results, run) / 1e6
      _add_point(points["tokens"], architecture, x, run)
  return points


def _num_tokens(grid_results: Mapping[str, Any], run: Mapping[str, Any]) -> int:
  """Returns the number of tokens that a run was trained on."""
  config = {**grid_results["config"], **run["config"]}
  tokens_per_step = config["train.batch_size"] * config["data.length"]
  return config["train.steps"] * tokens_per_step


def _add_point(
  points: Points, architecture: str, x: float, run: Mapping[str, Any]
) -> None:
  """Adds the loss of a run at x to the curve of its architecture."""
  curve = points.setdefault(architecture, {})
  curve.setdefault(x, {})[run["seed"]] = run["results"][LOSS]


def fit_seeds(points: Points, seeds: Iterable[int]) -> Fit:
  """Fits power laws to the mean losses over some seeds.

  The fit's `at` is the Transformer's largest size.

  Args:
    points: The losses of an axis.
    seeds: Seeds that every architecture and size has.
  """
  seeds = list(seeds)
  curves = {}
  for architecture, curve in points.items():
    sizes = sorted(curve)
    means = []
    for size in sizes:
      losses = [curve[size][seed] for seed in seeds]
      means.append(float(np.mean(losses)))
    curves[architecture] = (sizes, means)
  return fit(curves, at=max(points["transformer"]))


def summarise(grid_results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns a table row with the fit of each axis and architecture.

  If there are several seeds, the numbers have 95% intervals. An axis has no
  rows if it lacks the Transformer, if an architecture has fewer than three
  sizes, or if there is no seed that all have.

  Args:
    grid_results: The content of a results.json.
  """
  rows = []
  for axis, points in points_by_axis(grid_results).items():
    seeds = _common_seeds(points)
    if not seeds or "transformer" not in points:
      continue
    if min(len(curve) for curve in points.values()) < MIN_SIZES:
      continue
    all_seeds = fit_seeds(points, seeds)
    # The intervals are a jackknife's: from fits that each leave out a seed.
    left_out = []
    if len(seeds) > 1:
      for seed in sorted(seeds):
        left_out.append(fit_seeds(points, seeds - {seed}))
    for name in ARCHITECTURES:
      if name in points:
        rows.append(_summary_row(axis, name, all_seeds, left_out))
  return rows


def _common_seeds(points: Points) -> set[int]:
  """Returns the seeds that all architectures have at all sizes."""
  all_losses = []
  for curve in points.values():
    all_losses += list(curve.values())
  if not all_losses:
    return set()
  common = set(all_losses[0])
  for losses in all_losses:
    common &= set(losses)
  return common


def _summary_row(
  axis: str, name: str, all_seeds: Fit, left_out: Sequence[Fit]
) -> dict[str, Any]:
  """Returns the table row of an architecture, with intervals by the jackknife.

  Args:
    axis: "parameters" or "tokens".
    name: The architecture.
    all_seeds: The fit of all seeds.
    left_out: For each seed, the fit of the other seeds. Empty if there is only
      one seed. Then there are no intervals.
  """
  estimates = _numbers(all_seeds, name)
  left_out_numbers = [_numbers(fitted, name) for fitted in left_out]
  cells: dict[str, Any] = {}
  for key, estimate in estimates.items():
    numbers = series.column(left_out_numbers, key)
    # c may be 0. The others are positive, and have intervals of the logarithm.
    if key == "c":
      cells[key] = _with_interval(estimate, numbers)
    else:
      cells[key] = _positive_with_interval(estimate, numbers)
  return {
    "against": axis,
    "architecture": name,
    "at (M)": all_seeds.at,
    "c": cells["c"],
    "a": cells["a"],
    "b": cells["b"],
    "share": cells.get("share"),
    "paper's share": PAPER_SHARES.get((name, axis)),
  }


def _numbers(fitted: Fit, name: str) -> dict[str, float]:
  """Returns an architecture's numbers. The Transformer has no share."""
  numbers = {"c": fitted.c, "a": fitted.a[name], "b": fitted.b[name]}
  if name != "transformer":
    numbers["share"] = fitted.share(name, "transformer")
  return numbers


def _with_interval(
  estimate: float, left_out: Sequence[float]
) -> float | list[float]:
  """Returns an estimate with its interval, or alone if there is one seed."""
  if not left_out:
    return estimate
  low, high = interval(estimate, left_out)
  return [estimate, float(low), float(high)]


def _positive_with_interval(
  estimate: float, left_out: Sequence[float]
) -> float | list[float]:
  """Like `_with_interval`, with the interval of the logarithm."""
  if not left_out:
    return estimate
  low, high = np.exp(interval(np.log(estimate), np.log(left_out)))
  return [estimate, float(low), float(high)]


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the losses against parameters and against tokens.

  Dots are single runs. Markers are the means over seeds with their intervals.
  The dashed line is the loss of the Transformer's curve at its largest size. It
  ends where DIFF's curve has this loss. Beyond its runs, DIFF's curve is
  dotted.

  Args:
    grid_results: The content of a results.json, with its summary.
  """
  figure = Figure((11, 4.8), layout="constrained")
  panels = figure.subplots(1, 2)
  axis_points = points_by_axis(grid_results)
  for axes, (axis, points) in zip(panels, axis_points.items(), strict=True):
    rows = {}
    for row in grid_results["summary"]:
      if row["against"] == axis:
        rows[row["architecture"]] = row
    for name in ARCHITECTURES:
      if name in points:
        _draw_curve(axes, plots.style(name), points[name], rows.get(name))
    if "diff" in rows:
      _draw_share(axes, rows)
    axes.set(
      xscale="log",
      xlabel=f"{axis} (millions)",
      ylabel="validation loss (nats per token)",
    )
    if points:
      _label_sizes(axes, points)
      axes.legend(fontsize=8)
  return figure


def _draw_share(axes: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
  """Draws where DIFF's curve has the Transformer's loss at its largest size.

  Draws nothing if that is far from the sizes of the runs.

  Args:
    axes: The axes.
    rows: The summary rows of the axis, by architecture.
  """
  share = _value(rows["diff"]["share"])
  if not 0.1 < share < 10:
    return
  at = rows["transformer"]["at (M)"]
  loss = _fitted_loss(rows["transformer"], at)
  axes.plot([at * share, at], [loss, loss], "--", color="0.4", linewidth=1)
  if share > 1:
    # Extends DIFF's curve beyond its runs.
    sizes = np.geomspace(at, at * share, 100)
    axes.plot(
      sizes,
      _fitted_loss(rows["diff"], sizes),
      ":",
      color=plots.style("diff").color,
      linewidth=1,
    )
  axes.annotate(
    f"DIFF with {share:.0%}",
    (at * share, loss),
    textcoords="offset points",
    xytext=(-4, -12),
    ha="right",
    fontsize=8,
  )


def _label_sizes(axes: Any, points: Points) -> None:
  """Labels the x-axis with the Transformer's sizes, if it has any."""
  architecture = next(iter(points))
  if "transformer" in points:
    architecture = "transformer"
  ticks = sorted(points[architecture])
  labels = []
  for tick in ticks:
    # Three digits, but no exponent for large numbers.
    if tick < 1000:
      labels.append(f"{tick:,.3g}")
    else:
      labels.append(f"{tick:,.0f}")
  axes.set_xticks(ticks, labels)
  axes.set_xticks([], minor=True)


def _draw_curve(
  axes: Any,
  style: plots.Style,
  curve: Mapping[float, Mapping[int, float]],
  row: Mapping[str, Any] | None,
) -> None:
  """Draws an architecture's losses, and its fitted curve if there is one.

  Args:
    axes: The axes.
    style: The architecture's name, color and marker.
    curve: Losses by size and seed.
    row: The summary of the fit.
  """
  sizes = np.array(sorted(curve))
  intervals = []
  for size in sizes:
    losses = list(curve[size].values())
    intervals.append(comparison.mean_interval(losses))
    axes.plot(
      [size] * len(losses),
      losses,
      ".",
      color=style.color,
      alpha=0.35,
      markersize=4,
    )
  mean, low, high = np.transpose(intervals)
  axes.errorbar(
    sizes,
    mean,
    yerr=[mean - low, high - mean],
    color=style.color,
    marker=style.marker,
    markersize=5,
    linestyle="none",
    capsize=3,
    label=style.name,
  )
  if row:
    smooth = np.geomspace(sizes[0], sizes[-1], 100)
    axes.plot(smooth, _fitted_loss(row, smooth), color=style.color, linewidth=1)


def _fitted_loss(row: Mapping[str, Any], sizes: Any) -> Any:
  """Returns the losses of a row's fit at sizes in millions."""
  a = _value(row["a"])
  b = _value(row["b"])
  return _value(row["c"]) + a * (sizes / row["at (M)"]) ** -b


def _value(cell: float | list[float]) -> float:
  """Returns a number of the summary without its interval."""
  if isinstance(cell, list):
    return cell[0]
  return cell


def _grid(sizes: Sequence[str], num_seeds: int) -> Grid:
  """Returns the grid of all architectures at some sizes."""
  variants = []
  for size in sizes:
    for architecture in ARCHITECTURES:
      variants.append(f"{architecture},size={size}")
  return Grid(
    variants=tuple(variants),
    baseline="transformer,*",
    seeds=tuple(range(num_seeds)),
  )


EXPERIMENT = Experiment(
  question=(
    "With which share of the parameters, and of the tokens, does DIFF equal"
    " the Transformer?"
  ),
  grids={
    "cpu": _grid(SMALL_SIZES, num_seeds=5),
    "gpu": _grid(LARGE_SIZES, num_seeds=1),
    "tpu": _grid(LARGE_SIZES, num_seeds=1),
  },
  metrics={"loss": LOSS},
  summarise=summarise,
  plot=plot,
)
