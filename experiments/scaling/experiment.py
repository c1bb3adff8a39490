"""The share of the parameters, and of the tokens, with which DIFF equals the Transformer (README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments import results as found
from experiments.grid import Experiment, Grid
from experiments.scaling.config import ARCHITECTURES, SMALL, parts
from experiments.scaling.fit import Fit, fit, interval

_LOSS = "validation/loss"
_PAPER = {
  ("diff", "parameters"): "0.622 (at 11 B), 0.595",
  ("diff", "tokens"): "0.637",
}
Points = dict[
  str, dict[float, dict[int, float]]
]  # by architecture, size and seed


def _points(results: Mapping[str, Any]) -> dict[str, Points]:
  """Losses against parameters, of runs of the same number of tokens, and against tokens (both in millions), of runs of one size."""
  # A run that diverged has no loss, and its seed is left out
  runs = [
    (*parts(run["variant"]), run)
    for run in results["runs"]
    if run["results"][_LOSS] is not None
  ]
  measured_by_tokens = {size for _, size, times, _ in runs if times is not None}
  points: dict[str, Points] = {"parameters": {}, "tokens": {}}
  for architecture, size, times, run in runs:
    config = {**results["config"], **run["config"]}
    tokens = (
      config["train.steps"] * config["train.batch_size"] * config["data.length"]
    )
    chosen = {"parameters": run["parameters"]} if times is None else {}
    chosen |= {"tokens": tokens} if size in measured_by_tokens else {}
    for axis, x in chosen.items():
      points[axis].setdefault(architecture, {}).setdefault(x / 1e6, {})[
        run["seed"]
      ] = run["results"][_LOSS]
  return points


def _fit(points: Points, seeds: set[int]) -> Fit:
  """Fits the means over some seeds. Shares are shares of the Transformer's largest size."""
  means = {
    name: (
      sorted(curve),
      [
        float(np.mean([curve[x][seed] for seed in seeds]))
        for x in sorted(curve)
      ],
    )
    for name, curve in points.items()
  }
  return fit(means, at=max(points["transformer"]))


def summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """A row for each axis and architecture: the fitted curve, and the share with which it equals the Transformer, with intervals where there
  are several seeds. An axis with fewer than three sizes of an architecture, or without a seed that all have, has no rows."""
  rows = []
  for axis, points in _points(results).items():
    seeds = (
      set.intersection(
        *(set(losses) for curve in points.values() for losses in curve.values())
      )
      if points
      else set()
    )
    if (
      not seeds
      or "transformer" not in points
      or min(map(len, points.values())) < 3
    ):
      continue
    whole = _fit(points, seeds)
    left_out = (
      [_fit(points, seeds - {seed}) for seed in sorted(seeds)]
      if len(seeds) > 1
      else []
    )
    for name in (name for name in ARCHITECTURES if name in points):
      cells = {
        "c": _with_interval(whole.c, [each.c for each in left_out]),
        "a": _with_interval(
          whole.a[name], [each.a[name] for each in left_out], positive=True
        ),
        "b": _with_interval(
          whole.b[name], [each.b[name] for each in left_out], positive=True
        ),
        "share": None,
      }
      if name != "transformer":
        shares = [
          each.share(name, "transformer") for each in (whole, *left_out)
        ]
        cells["share"] = _with_interval(shares[0], shares[1:], positive=True)
      rows.append(
        {
          "against": axis,
          "architecture": name,
          "at (M)": whole.at,
          **cells,
          "paper's share": _PAPER.get((name, axis)),
        }
      )
  return rows


def _with_interval(
  whole: float, left_out: list[float], positive: bool = False
) -> float | list[float]:
  """An estimate with its interval, or alone if there is one seed. The interval of a positive number is that of its logarithm."""
  if not left_out:
    return whole
  low, high = (
    np.exp(interval(np.log(whole), np.log(left_out)))
    if positive
    else interval(whole, left_out)
  )
  return [whole, float(low), float(high)]


def plot(results: Mapping[str, Any]) -> Figure:
  """Draws loss against parameters and against tokens: single runs, their means with intervals, and the fitted curves.

  The dashed line is the loss of the Transformer's curve at its largest size; it ends where DIFF's curve has that loss. DIFF's curve is
  dotted beyond its runs."""
  figure = Figure((11, 4.8), layout="constrained")
  for axes, (axis, points) in zip(
    figure.subplots(1, 2), _points(results).items(), strict=True
  ):
    rows = {
      row["architecture"]: row
      for row in results["summary"]
      if row["against"] == axis
    }
    for name in (name for name in ARCHITECTURES if name in points):
      _draw_curve(axes, plots.style(name), points[name], rows.get(name))
    if "diff" in rows and 0.1 < (share := _value(rows["diff"]["share"])) < 10:
      at = rows["transformer"]["at (M)"]
      same = _curve(rows["transformer"], at)
      axes.plot([at * share, at], [same, same], "--", color="0.4", linewidth=1)
      if share > 1:
        beyond = np.geomspace(at, at * share, 100)
        axes.plot(
          beyond,
          _curve(rows["diff"], beyond),
          ":",
          color=plots.style("diff").color,
          linewidth=1,
        )
      axes.annotate(
        f"DIFF with {share:.0%}",
        (at * share, same),
        textcoords="offset points",
        xytext=(-4, -12),
        ha="right",
        fontsize=8,
      )
    axes.set(
      xscale="log",
      xlabel=f"{axis} (millions)",
      ylabel="validation loss (nats per token)",
    )
    if points:
      ticks = sorted(points.get("transformer", next(iter(points.values()))))
      axes.set_xticks(
        ticks,
        [f"{tick:,.3g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks],
      )
      axes.set_xticks([], minor=True)
      axes.legend(fontsize=8)
  return figure


def _draw_curve(
  axes: Any,
  style: plots.Style,
  curve: Mapping[float, Mapping[int, float]],
  row: Mapping[str, Any] | None,
) -> None:
  """Draws an architecture's losses by size and seed, and its fitted curve if there is one."""
  x = np.array(sorted(curve))
  for size in x:
    axes.plot(
      [size] * len(curve[size]),
      list(curve[size].values()),
      ".",
      color=style.color,
      alpha=0.35,
      markersize=4,
    )
  mean, low, high = np.transpose(
    [found.mean_interval(list(curve[size].values())) for size in x]
  )
  axes.errorbar(
    x,
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
    smooth = np.geomspace(x[0], x[-1], 100)
    axes.plot(smooth, _curve(row, smooth), color=style.color, linewidth=1)


def _value(cell: float | list[float]) -> float:
  """A cell of the summary without its interval."""
  return cell[0] if isinstance(cell, list) else cell


def _curve(row: Mapping[str, Any], x: Any) -> Any:
  """The loss of a fitted curve at sizes in millions."""
  return _value(row["c"]) + _value(row["a"]) * (x / row["at (M)"]) ** -_value(
    row["b"]
  )


def _grid(sizes: tuple[str, ...], seeds: int) -> Grid:
  return Grid(
    tuple(f"{name},size={size}" for size in sizes for name in ARCHITECTURES),
    "transformer,*",
    tuple(range(seeds)),
  )


_LARGE = _grid(
  (
    "830m",
    "1.4b",
    "2.8b",
    "6.8b",
    "13.1b",
    "3b,times=0.125",
    "3b,times=0.25",
    "3b,times=0.5",
    "3b,times=1",
  ),
  seeds=1,
)

EXPERIMENT = Experiment(
  question="With which share of the parameters, and of the tokens, does DIFF equal the Transformer?",
  grids={
    "cpu": _grid(
      (*SMALL, "0.1m,times=0.5", "0.1m,times=2", "0.1m,times=4"), seeds=5
    ),
    "gpu": _LARGE,
    "tpu": _LARGE,
  },
  metrics={"loss": _LOSS},
  summarise=summarise,
  plot=plot,
)
