"""Draws the figure of README.md: how the loss differs from the Transformer's, over the size of the model, here and elsewhere.

    python -m experiments.first_page     # writes plot.png and plot.svg beside this file

Points of this project come from the results.json files that are there, those of others from elsewhere.json, which names its sources.
"""

from __future__ import annotations

import json
import math
import statistics
from typing import Any, NamedTuple

import matplotlib.transforms
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWNBASE, CARETUPBASE

from experiments import plots
from experiments import results as found
from experiments.grid import FOLDER

_LOSS = "validation/loss"
# Language models; results that do not exist yet are passed over.
_OURS = (
  "scaling",
  "ablations",
  "fairness",
  "eight_heads",
  "tokens",
  "one_gpu/gpu",
)
_PANELS = {
  "DIFF": ("diff", "transformer_norm"),
  "DIFF V2": ("diff_v2", "gated"),
}
_V2_POST = (
  -0.03,
  -0.02,
)  # "a gap of 0.02 to 0.03 at 1T training tokens" (huggingface.co/blog/microsoft/diff-attn-v2); no size is stated
_DODGE = 6.0  # points between this project's results at one size,
_SPREAD = 30.0  # and from the first to the last of them at most, since the next size is near
_FRAME = (
  -0.1,
  0.18,
)  # nats: wider intervals end in an arrow there, since they would flatten all others


class Point(NamedTuple):
  """A difference in loss.

  Attributes:
    row: the architecture.
    against: the architecture that it is compared with.
    parameters: of the model, with one vocabulary matrix.
    tokens: that it was trained on, if it is this project's.
    difference: of the losses, in nats per token.
    low, high: the bounds of its 95% interval (Welch); NaN without several runs of each architecture.
    source: empty for this project.
  """

  row: str
  against: str
  parameters: float
  tokens: float
  difference: float
  low: float
  high: float
  source: str = ""


def ours() -> list[Point]:
  """This project's differences. Variants with another number of heads are left out: ablations made their heads too narrow on purpose."""
  points = []
  for name in _OURS:
    stored = found.read(
      FOLDER / name / "results.json", "baseline", "config", "runs"
    )
    if stored is None:
      continue
    against = stored["baseline"].partition(",")[0]
    for variant in dict.fromkeys(run["variant"] for run in stored["runs"]):
      compared = found.difference(stored, variant, _LOSS)
      if compared is not None and "heads=" not in variant:
        run = next(run for run in stored["runs"] if run["variant"] == variant)
        config = {**stored["config"], **run["config"]}
        tokens = (
          config["train.steps"]
          * config["train.batch_size"]
          * config["data.length"]
        )
        points.append(
          Point(
            variant.partition(",")[0],
            against,
            run["parameters"],
            tokens,
            *compared,
          )
        )
  return points


def elsewhere() -> list[Point]:
  """Other people's differences, with intervals where they report several runs of each architecture."""
  points = []
  for source in json.loads(
    (FOLDER / "elsewhere.json").read_text(encoding="utf-8")
  ):
    for point in source["points"]:
      (against, theirs), (row, losses) = point["losses"].items()
      runs = [
        {"variant": name, "results": {_LOSS: loss}}
        for name, each in point["losses"].items()
        for loss in each
      ]
      single = (
        statistics.mean(losses) - statistics.mean(theirs),
        math.nan,
        math.nan,
      )
      difference, low, high = (
        found.difference({"baseline": against, "runs": runs}, row, _LOSS)
        or single
      )
      points.append(
        Point(
          row,
          against,
          point["parameters"],
          0,
          difference,
          low,
          high,
          source["source"],
        )
      )
  return points


def draw() -> Figure:
  """A panel for DIFF, with the Transformer that has DIFF's wide heads and head norm, and one for DIFF V2, with gated attention."""
  figure = Figure((10, 6.8), layout="constrained")
  for axes, (title, rows) in zip(
    figure.subplots(2, 1, sharex=True, sharey=True),
    _PANELS.items(),
    strict=True,
  ):
    _draw_ours(axes, [point for point in ours() if point.row in rows])
    _draw_elsewhere(axes, [point for point in elsewhere() if point.row in rows])
    axes.set_ylim(*_FRAME)
    axes.axhline(0, color=plots.style("transformer").color, linewidth=0.8)
    axes.set(
      xscale="log",
      xlim=(6e4, 4e10),
      ylabel=f"loss minus the Transformer's\n(nats per token), {title}",
    )
    axes.legend(fontsize=8, loc="upper right")
  axes.fill_between(
    (1e9, 4e10),
    *_V2_POST,
    color=plots.style("diff_v2").color,
    alpha=0.25,
    linewidth=0,
  )
  axes.annotate(
    "the authors' V2 post, sizes not stated",
    (1e9, _V2_POST[1]),
    (0, 3),
    textcoords="offset points",
    fontsize=8,
  )
  sizes = {
    1e5: "0.1 M",
    1e6: "1 M",
    1e7: "10 M",
    1e8: "100 M",
    1e9: "1 B",
    1e10: "10 B",
  }
  axes.set_xticks(list(sizes), list(sizes.values()))
  axes.set_xlabel("parameters, with one vocabulary matrix")
  return figure


def _draw_ours(axes: Any, points: list[Point]) -> None:
  """Draws filled markers with intervals. Those of one size stand side by side, from few tokens to many."""
  sizes: dict[float, list[Point]] = {}
  for point in sorted(
    points, key=lambda point: (point.parameters, point.tokens)
  ):
    near = next(
      (size for size in sizes if abs(math.log(size / point.parameters)) < 0.05),
      point.parameters,
    )
    sizes.setdefault(near, []).append(point)
  labels = set()
  for size, group in sizes.items():
    group.sort(key=lambda point: point.tokens)
    step = min(_DODGE, _SPREAD / max(1, len(group) - 1))
    for place, point in enumerate(group):
      style, against = plots.style(point.row), plots.style(point.against)
      label = f"{style.name}, this project" + (
        f", minus {against.name}" if point.against != "transformer" else ""
      )
      drawn = axes.errorbar(
        size,
        point.difference,
        yerr=[[point.difference - point.low], [point.high - point.difference]],
        color=style.color,
        marker=style.marker,
        markersize=5,
        markerfacecolor=style.color
        if point.against == "transformer"
        else against.color,
        capsize=2,
        elinewidth=0.9,
        linestyle="none",
        label="_" if label in labels else label,
      )
      labels.add(label)
      shift = matplotlib.transforms.ScaledTranslation(
        (place - (len(group) - 1) / 2) * step / 72,
        0,
        axes.figure.dpi_scale_trans,
      )
      beyond = zip(
        (point.low < _FRAME[0], point.high > _FRAME[1]),
        _FRAME,
        (CARETDOWNBASE, CARETUPBASE),
        strict=True,
      )
      arrows = [
        axes.plot(size, edge, color=style.color, marker=arrow, clip_on=False)[0]
        for out, edge, arrow in beyond
        if out
      ]
      for part in (*drawn.get_children(), *arrows):
        part.set_transform(axes.transData + shift)


def _draw_elsewhere(axes: Any, points: list[Point]) -> None:
  """Draws hollow markers, those of one source joined, with its name at the largest model."""
  for source in dict.fromkeys(point.source for point in points):
    group = [point for point in points if point.source == source]
    style, x, y = (
      plots.style(group[0].row),
      [point.parameters for point in group],
      [point.difference for point in group],
    )
    axes.vlines(
      x,
      [point.low for point in group],
      [point.high for point in group],
      color=style.color,
      linewidth=0.9,
      zorder=1,
    )
    axes.plot(
      x,
      y,
      color=style.color,
      marker=style.marker,
      markersize=6,
      markerfacecolor="white",
      linewidth=0.8,
      linestyle=":",
    )
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.annotate(
      source,
      (x[-1], y[-1]),
      (7, 0),
      textcoords="offset points",
      fontsize=8,
      va="center",
      bbox=behind,
    )


if __name__ == "__main__":
  print(*plots.save(draw(), FOLDER))
