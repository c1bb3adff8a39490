"""The largest logits and hidden states, and the loss with logits of fewer bits (README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.ticker
from matplotlib.figure import Figure

from diffjax.config import Config
from experiments import plots
from experiments.ablations.experiment import twins
from experiments.grid import Experiment

# Rows for magnitudes, and for the loss with quantised logits; at most those of a run's own validation
_ROWS, _QUANTISED_ROWS = 400, 128
_VALUES = ("top_1", "top_2", "top_3", "top_10", "top_100", "median")
_IN_TABLE = ("top_1", "top_10", "top_100", "median")
_BITS = (8, 6, 4)
_PER = ("tensor", "row")


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Magnitudes of attention logits and hidden states, the loss, and its rise with quantised logits (nats per token)."""
  from diffjax.evals import outliers
  from diffjax.evals.quantised import Quantised
  from diffjax.evals.validation import Validation
  from diffjax.inference.trained import load

  trained = load(workdir)
  found: dict[str, float] = {}
  suite = outliers.Outliers(
    tokens=min(_ROWS, config.eval.rows) * config.data.length
  )
  for figure in suite.evaluate(trained):
    name = "logits" if figure.name == outliers.LOGITS else "hidden"
    found[f"{name}_{figure.at['value'].replace('-', '_')}"] = figure.statistic(
      figure.units
    )
  for name in ("logits", "hidden"):
    found[f"{name}_ratio"] = found[f"{name}_top_1"] / found[f"{name}_median"]
  rows = Validation(rows=min(_QUANTISED_ROWS, config.eval.rows))
  for figure in Quantised(
    measurements=("validation",), bits=_BITS, per=_PER, validation=rows
  ).evaluate(trained):
    if figure.at["bits"] == "all":
      found["loss"] = figure.statistic(figure.units)
    else:
      found[f"rise_{figure.at['per']}_{figure.at['bits']}"] = (
        figure.statistic(figure.units) - found["loss"]
      )
  return found


def plot(results: Mapping[str, Any]) -> Figure:
  """Draws the largest values and the median of logits and of hidden states; and the rise of the loss by bits, per tensor and per row."""
  runs = plots.runs_by_variant(results)
  figure = Figure((13, 4.2), layout="constrained")
  logits, hidden, bits = figure.subplots(1, 3)
  for axes, name, title in (
    (logits, "logits", "Absolute attention logits"),
    (hidden, "hidden", "Absolute hidden states"),
  ):
    labels = [value.replace("_", "-") for value in _VALUES]
    plots.over_seeds(
      axes,
      labels,
      {
        row: [[run[f"{name}_{value}"] for value in _VALUES] for run in own]
        for row, own in runs.items()
      },
      "none",
    )
    axes.set(
      title=title,
      xlabel="place among all values",
      ylabel="magnitude",
      yscale="log",
    )
    ticks = matplotlib.ticker.LogLocator(subs=(1, 2, 5))
    axes.yaxis.set(
      major_locator=ticks,
      major_formatter=matplotlib.ticker.StrMethodFormatter("{x:g}"),
    )
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  for per, line in zip(_PER, ("-", "--"), strict=True):
    rises = {
      row: [[run[f"rise_{per}_{number}"] for number in _BITS] for run in own]
      for row, own in runs.items()
    }
    plots.over_seeds(
      bits,
      [str(number) for number in _BITS],
      rises,
      line,
      f", scaled per {per}",
    )
  bits.set(
    title="Rise of the loss with rounded logits",
    xlabel="bits of a logit",
    ylabel="nats per token",
  )
  bits.set_yscale("symlog", linthresh=1e-3)
  for axes in (logits, bits):
    axes.legend(fontsize=8, handlelength=4)  # dashes can be told from lines
  return figure


EXPERIMENT = Experiment(
  question="Are DIFF's logits and hidden states smaller than the Transformer's, and can its attention do with fewer bits?",
  grids={
    "cpu": twins("tiny", seeds=5),
    "gpu": twins("125m"),
    "tpu": twins("1b"),
  },
  metrics={
    "logits: top-1 / median": "logits_ratio",
    **{
      f"logits: {value.replace('_', '-')}": f"logits_{value}"
      for value in _IN_TABLE
    },
    "hidden states: top-1 / median": "hidden_ratio",
    **{
      f"hidden states: {value.replace('_', '-')}": f"hidden_{value}"
      for value in _IN_TABLE
    },
    "loss": "loss",
    **{f"rise at {bits} bits": f"rise_tensor_{bits}" for bits in _BITS},
    "rise at 4 bits per row": "rise_row_4",
  },
  trains=False,
  pretrained="ablations",
  measure=measure,
  task={
    "rows": _ROWS,
    "quantised_rows": _QUANTISED_ROWS,
    "bits": _BITS,
    "per": _PER,
  },
  plot=plot,
)
