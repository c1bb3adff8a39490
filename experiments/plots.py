"""What the experiments' figures share: each row's name and colour, means with intervals over seeds, and the files."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.transforms
import numpy as np
from matplotlib.figure import Figure

from diffjax.model import variant_styles
from diffjax.plots import styles
from diffjax.plots.styles import Style
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
# The colours and markers of other rows, in the order in which they are given.
COLORS = (
  styles.BLUE,
  styles.RED,
  styles.GREEN,
  styles.ORANGE,
  styles.PURPLE,
  styles.SKY,
  styles.BROWN,
  styles.BLACK,
  styles.GREY,
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINE_STYLES = ("-", "--", ":", "-.")
_DODGE = 2.0  # points between the rows that share an x


def style(variant: str) -> Style:
  """Returns the style of a variant's row; its name has the variant's options, as in "DIFF, 4 heads".

  A figure of several rows whose names are not in ROWS needs `styles_of`.
  """
  return styles_of([variant])[variant]


def styles_of(variants: Iterable[str]) -> dict[str, Style]:
  """Returns the styles of a figure's rows, by variant.

  A row that is not in ROWS gets the next colour and marker that the figure does not have. Further rows at the end do not change those
  before them.
  """
  variants = list(dict.fromkeys(variants))
  styles_by_variant = {}
  used = set()
  for variant in variants:
    row = variant.partition(",")[0]
    if row in ROWS:
      name = _words(ROWS[row].name, variant)
      styles_by_variant[variant] = ROWS[row]._replace(name=name)
      used.add((ROWS[row].color, ROWS[row].marker))
  for variant in variants:
    if variant in styles_by_variant:
      continue
    color, marker = _free_look(used)
    used.add((color, marker))
    name = _words(legend_text(variant.partition(",")[0]), variant)
    styles_by_variant[variant] = Style(name, color, marker)
  return {variant: styles_by_variant[variant] for variant in variants}


def legend_text(name: str) -> str:
  """Returns a name that matplotlib shows in a legend as it is.

  It takes $ for mathematics, and leaves out names that start with "_".
  """
  text = name.replace("$", r"\$")
  return f" {text}" if text.startswith("_") else text


def _words(row: str, variant: str) -> str:
  """Returns a row's name with the options of a variant in words."""
  words = [row]
  for option in variant.split(",")[1:]:
    key, equals, value = option.partition("=")
    if not equals:
      words.append(legend_text(option))
    elif key == "heads":
      words.append(f"{legend_text(value)} heads")
    else:
      words.append(legend_text(f"{key.replace('_', ' ')} {value}"))
  return ", ".join(words)


def _free_look(used: Collection[tuple[str, str]]) -> tuple[str, str]:
  """Returns a colour and a marker that are not used, of a new colour if there is one."""
  used_colors = {color for color, _ in used}
  for color, marker in zip(COLORS, itertools.cycle(MARKERS), strict=False):
    if color not in used_colors:
      return color, marker
  for marker, color in itertools.product(MARKERS, COLORS):
    if (color, marker) not in used:
      return color, marker
  return COLORS[0], MARKERS[0]


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
  styles_by_variant = styles_of(rows)
  for place, (variant, numbers) in enumerate(rows.items()):
    mean, low, high = np.transpose(
      [found.mean_interval(column) for column in np.asarray(numbers, float).T]
    )
    shift = matplotlib.transforms.ScaledTranslation(
      (place - (len(rows) - 1) / 2) * _DODGE / 72,
      0,
      axes.figure.dpi_scale_trans,
    )
    shown = styles_by_variant[variant]
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

  The learning rate is the option "rate" of a variant's name, or else that of its config. A mean is left out where a run lacks the number.
  """
  figure = Figure((7, 4.5), layout="constrained")
  axes = figure.subplots()
  lines: dict[tuple[str, str], dict[float, list[float]]] = {}
  for run in results["runs"]:
    row, rate, rest = _split_rate(results, run)
    number = run["results"][metric]
    numbers = lines.setdefault((row, rest), {}).setdefault(rate, [])
    numbers.append(math.nan if number is None else number)
  styles_by_row = styles_of(row for row, _ in lines)
  settings = dict.fromkeys(rest for _, rest in lines)
  line_styles = dict(zip(settings, itertools.cycle(_LINE_STYLES), strict=False))
  for (row, rest), points in lines.items():
    shown = styles_by_row[row]
    rates = sorted(points)
    means = [np.mean(points[rate]) for rate in rates]
    axes.plot(
      rates,
      means,
      line_styles[rest],
      color=shown.color,
      marker=shown.marker,
      label=f"{shown.name}, {rest}" if rest else shown.name,
    )
    dots_x = []
    dots_y = []
    for rate in rates:
      dots_x += [rate] * len(points[rate])
      dots_y += points[rate]
    axes.plot(dots_x, dots_y, ".", color=shown.color, alpha=0.5)
  axes.set_xscale("log", base=2)
  ticks = sorted({rate for points in lines.values() for rate in points})
  axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
  axes.set(xlabel="learning rate", ylabel=title)
  axes.legend(fontsize=7, handlelength=4)  # dashes can be told from lines
  return figure


def _split_rate(
  results: Mapping[str, Any], run: Mapping[str, Any]
) -> tuple[str, float, str]:
  """Returns a run's row, its learning rate, and its other options in words."""
  row, *options = run["variant"].split(",")
  rate = None
  words = []
  for option in options:
    key, equals, value = option.partition("=")
    if key == "rate" and equals:
      rate = float(value)
    else:
      words.append(f"{key} {value}".strip())
  if rate is None:
    config = {**results["config"], **run["config"]}
    rate = config["optimizer.learning_rate"]
  return row, rate, legend_text(", ".join(words))


def save(figure: Figure, folder: pathlib.Path) -> list[str]:
  """Writes plot.png and plot.svg into a folder, and returns these names. The same figure gives the same bytes."""
  styles.tidy(figure)
  figure.savefig(folder / "plot.png", dpi=150, metadata={"Software": None})
  with matplotlib.rc_context({"svg.hashsalt": "diffjax"}):
    figure.savefig(
      folder / "plot.svg", metadata={"Date": None, "Creator": None}
    )
  return ["plot.png", "plot.svg"]
