"""Outliers: are DIFF's largest logits and hidden states smaller?

Measures the models of ablations: the magnitudes of attention logits and hidden
states, and the loss if the logits are rounded to a few bits. See README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import matplotlib.ticker
from matplotlib.figure import Figure

from diffjax.config import Config
from experiments import plots, series
from experiments.ablations.experiment import twins
from experiments.grid import Experiment

if TYPE_CHECKING:
  from diffjax.inference.trained import Trained

# Validation rows for the magnitudes, and for the loss with rounded logits. A
# run whose own validation has fewer rows uses those.
ROWS = 400
QUANTISED_ROWS = 128

# Order statistics of the absolute values, largest first.
VALUES = ("top_1", "top_2", "top_3", "top_10", "top_100", "median")
VALUES_IN_TABLE = ("top_1", "top_10", "top_100", "median")

# Bits of a rounded logit, and what shares the scale of the rounding: all logits
# of a layer and sequence, or the logits of one query.
BITS = (8, 6, 4)
SCALED_PER = ("tensor", "row")


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Returns the magnitudes, the loss, and its rise with rounded logits.

  Args:
    workdir: The directory of a run of ablations.
    config: The config of that run.

  Returns:
    "logits_top_1" and so on for the absolute attention logits, "hidden_top_1"
    and so on for the absolute hidden states, the ratios of the largest to the
    median, "loss" in nats per token, and "rise_tensor_8" and so on for the rise
    of the loss.
  """
  # Listing experiments does not need JAX.
  from diffjax.inference.trained import load

  trained = load(workdir)
  magnitudes = _magnitudes(
    trained, min(ROWS, config.eval.rows) * config.data.length
  )
  losses = _quantised_losses(trained, min(QUANTISED_ROWS, config.eval.rows))
  return {**magnitudes, **losses}


def _magnitudes(trained: Trained, num_tokens: int) -> dict[str, float]:
  """Returns order statistics of the absolute logits and hidden states.

  The names are "logits_top_1", "hidden_median" and so on.

  Args:
    trained: The model.
    num_tokens: The number of tokens of validation rows.
  """
  from diffjax.evals import outliers

  measured: dict[str, float] = {}
  suite = outliers.Outliers(tokens=num_tokens)
  for figure in suite.evaluate(trained):
    kind = "logits" if figure.name == outliers.LOGITS else "hidden"
    value = figure.at["value"].replace("-", "_")
    measured[f"{kind}_{value}"] = figure.statistic(figure.units)
  for kind in ("logits", "hidden"):
    largest = measured[f"{kind}_top_1"]
    measured[f"{kind}_ratio"] = largest / measured[f"{kind}_median"]
  return measured


def _quantised_losses(trained: Trained, num_rows: int) -> dict[str, float]:
  """Returns the loss with exact logits, and its rise with rounded ones.

  The names are "loss", "rise_tensor_8" and so on.

  Args:
    trained: The model.
    num_rows: The number of validation rows.
  """
  from diffjax.evals.quantised import Quantised
  from diffjax.evals.validation import Validation

  measured: dict[str, float] = {}
  suite = Quantised(
    measurements=("validation",),
    bits=BITS,
    per=SCALED_PER,
    validation=Validation(rows=num_rows),
  )
  for figure in suite.evaluate(trained):
    loss = figure.statistic(figure.units)
    bits = figure.at["bits"]
    if bits == "all":
      # The exact logits come first.
      measured["loss"] = loss
    else:
      rise = loss - measured["loss"]
      measured[f"rise_{figure.at['per']}_{bits}"] = rise
  return measured


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the magnitudes, and the rise of the loss over the bits."""
  figure = Figure((13, 4.2), layout="constrained")
  logits, hidden, bits = figure.subplots(1, 3)
  _draw_magnitudes(logits, grid_results, "logits", "attention logits")
  _draw_magnitudes(hidden, grid_results, "hidden", "hidden states")
  _draw_rises(bits, grid_results)
  for axes in (logits, bits):
    # Wide enough to tell dashes from lines.
    axes.legend(fontsize=8, handlelength=4)
  return figure


def _draw_magnitudes(
  axes: Any, grid_results: Mapping[str, Any], kind: str, title: str
) -> None:
  """Draws the order statistics of the logits or of the hidden states."""
  names = [f"{kind}_{value}" for value in VALUES]
  labels = [value.replace("_", "-") for value in VALUES]
  rows = series.metrics(grid_results, names)
  plots.over_seeds(axes, labels, rows, linestyle="none")
  axes.set(
    title=f"Absolute {title}",
    xlabel="place among all values",
    ylabel="magnitude",
    yscale="log",
  )
  axes.yaxis.set(
    major_locator=matplotlib.ticker.LogLocator(subs=(1, 2, 5)),
    major_formatter=matplotlib.ticker.StrMethodFormatter("{x:g}"),
  )
  axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def _draw_rises(axes: Any, grid_results: Mapping[str, Any]) -> None:
  """Draws the rise of the loss over the bits of a logit."""
  labels = [str(bits) for bits in BITS]
  for per, line_style in zip(SCALED_PER, ("-", "--"), strict=True):
    names = [f"rise_{per}_{bits}" for bits in BITS]
    rows = series.metrics(grid_results, names)
    plots.over_seeds(
      axes, labels, rows, linestyle=line_style, suffix=f", scaled per {per}"
    )
  axes.set(
    title="Rise of the loss with rounded logits",
    xlabel="bits of a logit",
    ylabel="nats per token",
  )
  axes.set_yscale("symlog", linthresh=1e-3)


def _table_columns() -> dict[str, str]:
  """Returns the columns of the table: their titles and keys of the results."""
  columns = {}
  for kind, title in (("logits", "logits"), ("hidden", "hidden states")):
    columns[f"{title}: top-1 / median"] = f"{kind}_ratio"
    for value in VALUES_IN_TABLE:
      columns[f"{title}: {value.replace('_', '-')}"] = f"{kind}_{value}"
  columns["loss"] = "loss"
  for bits in BITS:
    columns[f"rise at {bits} bits"] = f"rise_tensor_{bits}"
  columns["rise at 4 bits per row"] = "rise_row_4"
  return columns


EXPERIMENT = Experiment(
  question=(
    "Are DIFF's logits and hidden states smaller than the Transformer's,"
    " and can its attention do with fewer bits?"
  ),
  grids={
    "cpu": twins("tiny", num_seeds=5),
    "gpu": twins("125m"),
    "tpu": twins("1b"),
  },
  metrics=_table_columns(),
  trains=False,
  pretrained="ablations",
  measure=measure,
  task={
    "rows": ROWS,
    "quantised_rows": QUANTISED_ROWS,
    "bits": BITS,
    "per": SCALED_PER,
  },
  plot=plot,
)
