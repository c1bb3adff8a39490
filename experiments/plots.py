"""What the experiments' figures share: each row's name and colour, means with intervals over seeds, and the files."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.transforms
import numpy as np
from matplotlib.figure import Figure

from diffjax import styles
from diffjax.model import variant_styles
from diffjax.styles import Style
from experiments import results as found

# From a variant's row to its style, the same in every figure: those of architectures, and of experiments' changes to them. Rows that have
# DIFF's or V2's colour are variants of it that no figure shows with a legend.
ROWS = {
  "transformer": variant_styles.style("softmax"),
  "transformer_wide": Style("Transformer with wide heads", styles.GREY, "o"),
  "transformer_norm": Style(
    "Transformer with wide heads and head norm", styles.PURPLE, "o"
  ),
  "diff": variant_styles.style("diff"),
  "diff_without_norm": Style("DIFF without head norm", styles.ORANGE, "s"),
  "diff_lambda_zero": Style("DIFF with λ ≡ 0", styles.SKY, "s"),
  "diff_lambda_0.8": Style("DIFF with λ_init 0.8", styles.BROWN, "v"),
  "diff_lambda_0.5": Style("DIFF with λ_init 0.5", styles.RED, "s"),
  "diff_frozen_lambda": Style("DIFF with frozen λ", styles.RED, "s"),
  "diff_v2": variant_styles.style("diff_v2"),
  "diff_v2_linear": variant_styles.style("diff_v2_linear"),
  "gated": variant_styles.style("gated"),
}
_DODGE = 2.0  # points between the rows that share an x


def style(variant: str) -> Style:
  """The style of a variant's row; its name has the variant's options, as in "DIFF, 4 heads"."""
  row, *options = variant.split(",")
  words = []
  for key, _, value in (option.partition("=") for option in options):
    words.append(
      f"{value} heads" if key == "heads" else f"{key.replace('_', ' ')} {value}"
    )
  return ROWS[row]._replace(name=", ".join([ROWS[row].name, *words]))


def runs_by_variant(
  results: Mapping[str, Any],
) -> dict[str, list[dict[str, Any]]]:
  """The results of each variant's runs, in the order of results.json."""
  variants = dict.fromkeys(run["variant"] for run in results["runs"])
  return {
    variant: [
      run["results"] for run in results["runs"] if run["variant"] == variant
    ]
    for variant in variants
  }


def over_seeds(
  axes: Any,
  x: Sequence[Any],
  rows: Mapping[str, Any],
  linestyle: str = "-",
  suffix: str = "",
) -> None:
  """Draws the mean over seeds with its 95% interval (Student's t), side by side where rows share an x.

  A mean is left out where a run lacks the number.

  Args:
    axes: matplotlib's.
    x: numbers, or texts for categories.
    rows: by variant, numbers [seeds, x].
    linestyle: of the lines between the means; "none" for no lines.
    suffix: behind the names in the legend.
  """
  for place, (variant, numbers) in enumerate(rows.items()):
    mean, low, high = np.transpose(
      [found.mean_interval(column) for column in np.asarray(numbers, float).T]
    )
    shift = matplotlib.transforms.ScaledTranslation(
      (place - (len(rows) - 1) / 2) * _DODGE / 72,
      0,
      axes.figure.dpi_scale_trans,
    )
    shown = style(variant)
    drawn = axes.errorbar(
      x,
      mean,
      yerr=[mean - low, high - mean],
      label=shown.name + suffix,
      color=shown.color,
      marker=shown.marker,
      markersize=4,
      linewidth=1.2,
      linestyle=linestyle,
      elinewidth=0.8,
      capsize=2,
      capthick=0.8,
    )
    for part in drawn.get_children():  # not by the errorbar's own argument, with which the axes' limits would forget the data
      part.set_transform(axes.transData + shift)
  axes.tick_params(which="both", labelsize=8)


def over_rates(results: Mapping[str, Any], metric: str, title: str) -> Figure:
  """Draws a number over the learning rates that were tried, for each row and every other setting: the mean over seeds, and single runs.

  A mean is left out where a run lacks the number."""
  figure = Figure((7, 4.5), layout="constrained")
  axes = figure.subplots()
  lines: dict[tuple[str, str], dict[float, list[float]]] = {}
  for variant, runs in runs_by_variant(results).items():
    row, *fields = variant.split(",")
    values = dict(field.split("=") for field in fields)
    rate = float(values.pop("rate"))
    rest = ", ".join(f"{name} {value}" for name, value in values.items())
    lines.setdefault((row, rest), {})[rate] = [
      math.nan if run[metric] is None else run[metric] for run in runs
    ]
  dashes = dict(
    zip(
      dict.fromkeys(rest for _, rest in lines), ("-", "--", ":"), strict=False
    )
  )
  for (row, rest), points in lines.items():
    shown, rates = style(row), sorted(points)
    label = ", ".join(filter(None, (shown.name, rest)))
    axes.plot(
      rates,
      [np.mean(points[rate]) for rate in rates],
      dashes[rest],
      color=shown.color,
      marker=shown.marker,
      label=label,
    )
    axes.plot(
      [rate for rate in rates for _ in points[rate]],
      [y for rate in rates for y in points[rate]],
      ".",
      color=shown.color,
      alpha=0.5,
    )
  axes.set_xscale("log", base=2)
  ticks = sorted({rate for points in lines.values() for rate in points})
  axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
  axes.set(xlabel="learning rate", ylabel=title)
  axes.legend(fontsize=7, handlelength=4)  # dashes can be told from lines
  return figure


def save(figure: Figure, folder: pathlib.Path) -> list[str]:
  """Writes plot.png and plot.svg into a folder, and returns these names. The same figure gives the same bytes."""
  styles.tidy(figure)
  figure.savefig(folder / "plot.png", dpi=150, metadata={"Software": None})
  with matplotlib.rc_context({"svg.hashsalt": "diffjax"}):
    figure.savefig(
      folder / "plot.svg", metadata={"Date": None, "Creator": None}
    )
  return ["plot.png", "plot.svg"]
