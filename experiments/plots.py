"""Functions that the experiments' figures share.

They give each variant its name and colour, draw means over seeds with their
intervals, and write the files.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import matplotlib.transforms
import numpy as np
from matplotlib.figure import Figure

from diffjax.model import variant_styles
from diffjax.plots import styles
from diffjax.plots.styles import Style
from experiments import comparison

# The styles of architectures and of changes to them, the same in every figure.
# The keys are names of variants without options. Some variants of DIFF and V2
# share a colour with DIFF, V2 or each other. No figure has both in its legend.
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
# The colours and markers of other variants, in the order of their use.
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
# The distance between variants with the same x, in points.
_OFFSET_POINTS = 2.0
_POINTS_PER_INCH = 72


def style(variant: str) -> Style:
  """Returns the style of a variant.

  Its name includes the variant's options, for example "DIFF, 4 heads". If a
  figure has several variants that are not in ROWS, use `styles_of`.
  """
  return styles_of([variant])[variant]


def styles_of(variants: Iterable[str]) -> dict[str, Style]:
  """Returns the styles of a figure's variants.

  A variant that is not in ROWS gets the next colour and marker that the figure
  does not have. Variants that are added at the end do not change the styles of
  the others.
  """
  variants = list(dict.fromkeys(variants))
  known_styles = {}
  used_looks = set()
  for variant in variants:
    row_style = ROWS.get(_without_options(variant))
    if row_style is not None:
      name = _with_options(row_style.name, variant)
      known_styles[variant] = row_style._replace(name=name)
      used_looks.add((row_style.color, row_style.marker))

  styles_by_variant = {}
  for variant in variants:
    if variant in known_styles:
      styles_by_variant[variant] = known_styles[variant]
      continue
    color, marker = _unused_look(used_looks)
    used_looks.add((color, marker))
    name = _with_options(legend_text(_without_options(variant)), variant)
    styles_by_variant[variant] = Style(name, color, marker)
  return styles_by_variant


def legend_text(name: str) -> str:
  """Returns a text that matplotlib's legend shows unchanged.

  A legend interprets $ as mathematics, and leaves out names that begin with an
  underscore.
  """
  text = name.replace("$", r"\$")
  if text.startswith("_"):
    return f" {text}"
  return text


def _without_options(variant: str) -> str:
  return variant.partition(",")[0]


def _with_options(name: str, variant: str) -> str:
  """Returns a name followed by the variant's options in words.

  The variant "diff,heads=4" adds ", 4 heads" to the name.
  """
  parts = [name]
  for option in variant.split(",")[1:]:
    key, equals, value = option.partition("=")
    if not equals:
      parts.append(legend_text(option))
    elif key == "heads":
      parts.append(f"{legend_text(value)} heads")
    else:
      parts.append(legend_text(f"{key.replace('_', ' ')} {value}"))
  return ", ".join(parts)


def _unused_look(used_looks: Collection[tuple[str, str]]) -> tuple[str, str]:
  """Returns a colour and a marker whose combination is unused.

  The colour is unused too, as long as there is one. If all combinations are
  used, returns the first one.
  """
  used_colors = {color for color, _ in used_looks}
  for color, marker in zip(COLORS, itertools.cycle(MARKERS), strict=False):
    if color not in used_colors:
      return color, marker
  for marker, color in itertools.product(MARKERS, COLORS):
    if (color, marker) not in used_looks:
      return color, marker
  return COLORS[0], MARKERS[0]


def runs_by_variant(
  results: Mapping[str, Any],
) -> dict[str, list[dict[str, Any]]]:
  """Returns the results of each variant's runs, in the order of results.json.

  Args:
    results: The content of a results.json.
  """
  results_by_variant: dict[str, list[dict[str, Any]]] = {}
  for run in results["runs"]:
    results_by_variant.setdefault(run["variant"], []).append(run["results"])
  return results_by_variant


def horizontal_offset(
  axes: Any, index: int, count: int, distance: float
) -> matplotlib.transforms.Transform:
  """Returns the matplotlib transform that puts marks with one x side by side.

  Args:
    axes: The axes.
    index: The number of the mark, from 0.
    count: How many marks have this x. Their centre stays at x.
    distance: The distance between two marks, in points.
  """
  offset = (index - (count - 1) / 2) * distance
  return axes.transData + matplotlib.transforms.ScaledTranslation(
    offset / _POINTS_PER_INCH, 0, axes.figure.dpi_scale_trans
  )


def over_seeds(
  axes: Any,
  x: Sequence[Any],
  rows: Mapping[str, Any],
  linestyle: str = "-",
  suffix: str = "",
) -> None:
  """Draws each variant's means over seeds, with their 95% intervals.

  The intervals are Student's. Variants are drawn side by side at each x. There
  is no mean where a run lacks the number.

  Args:
    axes: The axes.
    x: Numbers, or texts for categories.
    rows: The numbers [seeds, x] of each variant.
    linestyle: The line style between the means. "none" for no lines.
    suffix: A text that follows the names in the legend.
  """
  styles_by_variant = styles_of(rows)
  for index, (variant, numbers) in enumerate(rows.items()):
    # A column has the numbers of all seeds at one x.
    columns = np.asarray(numbers, float).T
    intervals = [comparison.mean_interval(column) for column in columns]
    mean, low, high = np.transpose(intervals)
    variant_style = styles_by_variant[variant]
    errorbar = axes.errorbar(
      x,
      mean,
      yerr=[mean - low, high - mean],
      label=variant_style.name + suffix,
      color=variant_style.color,
      marker=variant_style.marker,
      markersize=4,
      linewidth=1.2,
      linestyle=linestyle,
      elinewidth=0.8,
      capsize=2,
      capthick=0.8,
    )
    # If the transform is an argument of `errorbar`, the limits of the axes
    # ignore the data.
    transform = horizontal_offset(axes, index, len(rows), _OFFSET_POINTS)
    for artist in errorbar.get_children():
      artist.set_transform(transform)
  axes.tick_params(which="both", labelsize=8)


def over_rates(results: Mapping[str, Any], metric: str, title: str) -> Figure:
  """Draws a metric over the learning rates of a grid that tunes them.

  There is a line through the means over seeds, and a dot for each run. Variants
  have different colours. Options other than the learning rate have different
  line styles. There is no mean where a run lacks the metric.

  The learning rate of the variant "diff,rate=0.003" is 0.003. A variant without
  the option "rate" has the learning rate of the run's config.

  Args:
    results: The content of a results.json.
    metric: The name of a number in the runs' results.
    title: The metric's name in the figure.
  """
  lines = _values_by_rate(results, metric)
  styles_by_row = styles_of(line.row for line in lines)
  line_styles: dict[str, str] = {}
  for line in lines:
    if line.options not in line_styles:
      style_index = len(line_styles) % len(_LINE_STYLES)
      line_styles[line.options] = _LINE_STYLES[style_index]

  figure = Figure((7, 4.5), layout="constrained")
  axes = figure.subplots()
  all_rates: set[float] = set()
  for line, values_by_rate in lines.items():
    row_style = styles_by_row[line.row]
    if line.options:
      name = f"{row_style.name}, {line.options}"
      row_style = row_style._replace(name=name)
    _draw_line(axes, values_by_rate, row_style, line_styles[line.options])
    all_rates.update(values_by_rate)

  # A tick at each learning rate.
  axes.set_xscale("log", base=2)
  ticks = sorted(all_rates)
  axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
  axes.set(xlabel="learning rate", ylabel=title)
  # Long handles distinguish dashed lines from solid ones.
  axes.legend(fontsize=7, handlelength=4)
  return figure


def _draw_line(
  axes: Any,
  values_by_rate: Mapping[float, Sequence[float]],
  line_look: Style,
  line_style: str,
) -> None:
  """Draws a line through the means over seeds, and a dot for each run.

  Args:
    axes: The axes.
    values_by_rate: The values of the runs with each learning rate.
    line_look: The line's name in the legend, its colour and its marker.
    line_style: The line style of matplotlib.
  """
  rates = sorted(values_by_rate)
  means = []
  dots_x: list[float] = []
  dots_y: list[float] = []
  for rate in rates:
    values = values_by_rate[rate]
    means.append(np.mean(values))
    dots_x += [rate] * len(values)
    dots_y += values
  axes.plot(
    rates,
    means,
    line_style,
    color=line_look.color,
    marker=line_look.marker,
    label=line_look.name,
  )
  axes.plot(dots_x, dots_y, ".", color=line_look.color, alpha=0.5)


class _Line(NamedTuple):
  """A line of `over_rates`.

  Attributes:
    row: The variant without options.
    options: Its options other than the learning rate, as text.
  """

  row: str
  options: str


def _values_by_rate(
  results: Mapping[str, Any], metric: str
) -> dict[_Line, dict[float, list[float]]]:
  """Returns the values of each line by learning rate. Missing ones are NaN."""
  lines: dict[_Line, dict[float, list[float]]] = {}
  for run in results["runs"]:
    row, rate, options = _split_rate(results, run)
    value = run["results"][metric]
    if value is None:
      value = math.nan
    values_by_rate = lines.setdefault(_Line(row, options), {})
    values_by_rate.setdefault(rate, []).append(value)
  return lines


def _split_rate(
  results: Mapping[str, Any], run: Mapping[str, Any]
) -> tuple[str, float, str]:
  """Splits the name of a run's variant, such as "diff,scale=root,rate=0.003".

  Returns:
    The variant without options, the learning rate, and the other options as
    text: "diff", 0.003 and "scale root".
  """
  row, *options = run["variant"].split(",")
  rate = None
  other_options = []
  for option in options:
    key, equals, value = option.partition("=")
    if key == "rate" and equals:
      rate = float(value)
    else:
      other_options.append(f"{key} {value}".strip())
  if rate is None:
    config = {**results["config"], **run["config"]}
    rate = config["optimizer.learning_rate"]
  return row, rate, legend_text(", ".join(other_options))


def save(figure: Figure, folder: pathlib.Path) -> list[str]:
  """Writes plot.png and plot.svg, and returns these names.

  The files contain no dates, so the same figure has the same bytes.

  Args:
    figure: The figure.
    folder: The directory of the files.
  """
  styles.tidy(figure)
  figure.savefig(folder / "plot.png", dpi=150, metadata={"Software": None})
  with matplotlib.rc_context({"svg.hashsalt": "diffjax"}):
    figure.savefig(
      folder / "plot.svg", metadata={"Date": None, "Creator": None}
    )
  return ["plot.png", "plot.svg"]
