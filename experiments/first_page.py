"""Draws the figure of experiments/README.md: loss differences over model size.

    python -m experiments.first_page     # writes plot.png and plot.svg here

Each point is the loss of an architecture minus a Transformer's. The points of
this project come from its results.json files. Published points come from
elsewhere.json, which names their sources.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWNBASE, CARETUPBASE

from diffjax.evals.report.proportions import Estimate
from experiments import comparison, plots, results
from experiments.grid import FOLDER

# The y-axis, in nats per token. A wider interval ends in an arrow at its edge,
# because a larger scale would flatten all other intervals.
FRAME = (-0.1, 0.18)

_LOSS = "validation/loss"
# The experiments with language models.
_EXPERIMENTS = (
  "scaling",
  "ablations",
  "fairness",
  "eight_heads",
  "tokens",
  "one_gpu/gpu",
)
# The panels, with the architectures that each shows.
_PANELS = {
  "DIFF": ("diff", "transformer_norm"),
  "DIFF V2": ("diff_v2", "gated"),
}
# "A gap of 0.02 to 0.03 at 1T training tokens", for a model of unknown size
# (huggingface.co/blog/microsoft/diff-attn-v2).
_V2_POST = (-0.03, -0.02)
_SIZE_TICKS = {
  1e5: "0.1 M",
  1e6: "1 M",
  1e7: "10 M",
  1e8: "100 M",
  1e9: "1 B",
  1e10: "10 B",
}
# Models whose numbers of parameters differ by a smaller factor than e^0.05 are
# drawn at the same x.
_SAME_SIZE_LOG_RATIO = 0.05
# The distance between two results at the same x, in points.
_OFFSET_POINTS = 6.0
# The maximum distance from the first to the last of them.
_MAX_SPREAD_POINTS = 30.0


class Point(NamedTuple):
  """A difference in loss between two architectures.

  Attributes:
    row: The architecture, as results.json names it.
    against: The architecture that is subtracted.
    parameters: The size of the model, with one vocabulary matrix.
    tokens: The number of training tokens. 0 for results of others.
    estimate: The difference in nats per token, with Welch's 95% interval. The
      bounds are NaN if an architecture has a single run.
    source: The name of the source. Empty for this project.
  """

  row: str
  against: str
  parameters: float
  tokens: float
  estimate: Estimate
  source: str = ""


def project_points(folder: pathlib.Path = FOLDER) -> list[Point]:
  """Returns the differences that this project has measured.

  Variants with other numbers of heads are left out: `ablations` makes their
  heads too narrow on purpose.

  Args:
    folder: The directory of the experiments. Those without results are skipped.
  """
  points = []
  for name in _EXPERIMENTS:
    path = folder / name / "results.json"
    stored = results.read(path, "baseline", "config", "runs")
    if stored is not None:
      points += _points_of_experiment(stored)
  return points


def _points_of_experiment(stored: Mapping[str, Any]) -> list[Point]:
  """Returns the differences in loss from the baseline in a results.json."""
  points = []
  for variant in comparison.variant_names(stored):
    estimate = comparison.difference(stored, variant, _LOSS)
    # The heads of variants with "heads=" are too narrow on purpose.
    if estimate is None or "heads=" in variant:
      continue
    first_run = comparison.runs_of(stored, variant)[0]
    config = {**stored["config"], **first_run["config"]}
    tokens_per_step = config["train.batch_size"] * config["data.length"]
    point = Point(
      row=_architecture(variant),
      against=_architecture(stored["baseline"]),
      parameters=first_run["parameters"],
      tokens=config["train.steps"] * tokens_per_step,
      estimate=estimate,
    )
    points.append(point)
  return points


def _architecture(variant: str) -> str:
  """Returns a variant without its options."""
  return variant.partition(",")[0]


def published_points() -> list[Point]:
  """Returns the differences that others have measured, from elsewhere.json."""
  content = (FOLDER / "elsewhere.json").read_text(encoding="utf-8")
  points = []
  for source in json.loads(content):
    for published in source["points"]:
      # The losses of two architectures. The first one is subtracted.
      losses = published["losses"]
      against, row = losses.keys()
      point = Point(
        row=row,
        against=against,
        parameters=published["parameters"],
        tokens=0,
        estimate=_published_estimate(losses, row, against),
        source=source["source"],
      )
      points.append(point)
  return points


def _published_estimate(
  losses: Mapping[str, Sequence[float]], row: str, against: str
) -> Estimate:
  """Returns the difference in mean loss between two architectures.

  Args:
    losses: The losses of each architecture's runs.
    row: One of the architectures.
    against: The architecture that is subtracted.
  """
  runs = []
  for variant, variant_losses in losses.items():
    for loss in variant_losses:
      runs.append({"variant": variant, "results": {_LOSS: loss}})
  stored = {"baseline": against, "runs": runs}
  estimate = comparison.difference(stored, row, _LOSS)
  if estimate is not None:
    return estimate
  # Single runs have no interval.
  difference = statistics.mean(losses[row]) - statistics.mean(losses[against])
  return Estimate(difference, math.nan, math.nan)


def draw() -> Figure:
  """Draws losses minus the Transformer's over the size of the model.

  There is a panel for DIFF and one for DIFF V2. The first one also shows the
  Transformer with DIFF's wide heads and head norm, the second one gated
  attention.
  """
  figure = Figure((10, 6.8), layout="constrained")
  all_axes = figure.subplots(2, 1, sharex=True, sharey=True)
  for axes, (title, rows) in zip(all_axes, _PANELS.items(), strict=True):
    _draw_project_points(axes, _points_of_rows(project_points(), rows))
    _draw_published_points(axes, _points_of_rows(published_points(), rows))
    axes.set_ylim(*FRAME)
    axes.axhline(0, color=plots.style("transformer").color, linewidth=0.8)
    axes.set(
      xscale="log",
      xlim=(6e4, 4e10),
      ylabel=f"loss minus the Transformer's\n(nats per token), {title}",
    )
    axes.legend(fontsize=8, loc="upper right")

  # The V2 post does not state the size of its model, so its result is a band.
  v2_axes = all_axes[-1]
  v2_axes.fill_between(
    (1e9, 4e10),
    *_V2_POST,
    color=plots.style("diff_v2").color,
    alpha=0.25,
    linewidth=0,
  )
  v2_axes.annotate(
    "the authors' V2 post, sizes not stated",
    (1e9, _V2_POST[1]),
    (0, 3),
    textcoords="offset points",
    fontsize=8,
  )
  v2_axes.set_xticks(list(_SIZE_TICKS), list(_SIZE_TICKS.values()))
  v2_axes.set_xlabel("parameters, with one vocabulary matrix")
  return figure


def _points_of_rows(
  points: Iterable[Point], rows: Sequence[str]
) -> list[Point]:
  return [point for point in points if point.row in rows]


def _draw_project_points(axes: Any, points: Sequence[Point]) -> None:
  """Draws filled markers with intervals.

  Points of the same size are side by side, in the order of their tokens.
  """
  labels: set[str] = set()
  for size, group in _group_by_size(points).items():
    max_distance = _MAX_SPREAD_POINTS / max(1, len(group) - 1)
    distance = min(_OFFSET_POINTS, max_distance)
    for index, point in enumerate(group):
      label = _project_label(point)
      is_labelled = label in labels
      artists = _draw_interval(axes, size, point, label, is_labelled)
      labels.add(label)
      artists += _draw_arrows(axes, size, point)
      transform = plots.horizontal_offset(axes, index, len(group), distance)
      for artist in artists:
        artist.set_transform(transform)


def _group_by_size(points: Iterable[Point]) -> dict[float, list[Point]]:
  """Returns the points of each size, in the order of their tokens.

  Similar sizes form one group. Its key is its smallest size.
  """
  groups: dict[float, list[Point]] = {}
  for point in sorted(points, key=lambda point: point.parameters):
    size = point.parameters
    for known_size in groups:
      if abs(math.log(known_size / size)) < _SAME_SIZE_LOG_RATIO:
        size = known_size
        break
    groups.setdefault(size, []).append(point)
  for group in groups.values():
    group.sort(key=lambda point: point.tokens)
  return groups


def _project_label(point: Point) -> str:
  label = f"{plots.style(point.row).name}, this project"
  if point.against != "transformer":
    label += f", minus {plots.style(point.against).name}"
  return label


def _draw_interval(
  axes: Any, x: float, point: Point, label: str, is_labelled: bool
) -> list[Any]:
  """Draws a marker with its interval, and returns matplotlib's artists.

  Args:
    axes: The axes.
    x: The position on the x-axis.
    point: The point.
    label: The name in the legend.
    is_labelled: Whether the legend already has this name.
  """
  style = plots.style(point.row)
  fill_color = style.color
  if point.against != "transformer":
    fill_color = plots.style(point.against).color
  if is_labelled:
    # Matplotlib leaves out names that begin with an underscore.
    label = "_"
  value, low, high = point.estimate
  errorbar = axes.errorbar(
    x,
    value,
    yerr=[[value - low], [high - value]],
    color=style.color,
    marker=style.marker,
    markersize=5,
    markerfacecolor=fill_color,
    capsize=2,
    elinewidth=0.9,
    linestyle="none",
    label=label,
  )
  return list(errorbar.get_children())


def _draw_arrows(axes: Any, x: float, point: Point) -> list[Any]:
  """Draws an arrow where the interval leaves the frame."""
  bottom, top = FRAME
  arrows = []
  if point.estimate.low < bottom:
    arrows.append((bottom, CARETDOWNBASE))
  if point.estimate.high > top:
    arrows.append((top, CARETUPBASE))

  artists = []
  color = plots.style(point.row).color
  for y, marker in arrows:
    artists += axes.plot(x, y, color=color, marker=marker, clip_on=False)
  return artists


def _draw_published_points(axes: Any, points: Sequence[Point]) -> None:
  """Draws hollow markers. A line connects the points of a source.

  The name of the source is beside its largest model.
  """
  points_by_source: dict[str, list[Point]] = {}
  for point in points:
    points_by_source.setdefault(point.source, []).append(point)
  for source, group in points_by_source.items():
    style = plots.style(group[0].row)
    sizes = [point.parameters for point in group]
    estimates = [point.estimate for point in group]
    values, lows, highs = np.transpose(estimates)
    axes.vlines(sizes, lows, highs, color=style.color, linewidth=0.9, zorder=1)
    axes.plot(
      sizes,
      values,
      color=style.color,
      marker=style.marker,
      markersize=6,
      markerfacecolor="white",
      linewidth=0.8,
      linestyle=":",
    )
    axes.annotate(
      source,
      (sizes[-1], values[-1]),
      (7, 0),
      textcoords="offset points",
      fontsize=8,
      va="center",
      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


if __name__ == "__main__":
  print(*plots.save(draw(), FOLDER))
