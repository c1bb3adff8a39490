"""Noisy lookup: does the second map find a noisy key among more pairs?

The task is made for the paper's claim that the second map cancels attention to
what is irrelevant. The grid "tune" chooses the learning rate of each row. The
grid "cpu" compares the rows on fresh seeds. See README.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from diffjax.config import Config
from experiments import comparison, plots, series
from experiments.grid import Experiment, Grid
from experiments.noisy_lookup import task
from experiments.noisy_lookup.config import RATES, ROWS

TASK = task.Task()

# The accuracy whose step is reported.
TARGET_ACCURACY = 0.9

# The comparisons that decide the claim (README.md).
PAIRS = (("diff", "transformer_norm"), ("diff", "diff_lambda_zero"))


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Trains a model, and returns its answers. The model is not saved."""
  del workdir
  _, answers = task.train(config, TASK)
  return summary(answers, TASK)


def summary(answers: Mapping[str, Any], sizes: task.Task) -> dict[str, Any]:
  """Returns the results of a run: its endpoints, and all records.

  Args:
    answers: The records "curve" and "grid" of `task.train`.
    sizes: The sizes of the contexts.

  Returns:
    The records, and these numbers:

    - "accuracy", "signed", "absolute": With the most pairs, means over σ.
    - "accuracy_0.5" and so on: The accuracy with the most pairs, for each σ.
    - "accuracy_n": With as many pairs as in training, mean over σ.
    - "steps_to_90": The first step of the training whose accuracy is
      TARGET_ACCURACY or more. None if there is none.
  """
  most_pairs = sizes.pairs * max(sizes.multiples)
  records_with_most = series.select(answers["grid"], pairs=most_pairs)
  records_with_n = series.select(answers["grid"], pairs=sizes.pairs)

  endpoints: dict[str, Any] = {
    "accuracy": _mean(records_with_most, "accuracy"),
    "accuracy_n": _mean(records_with_n, "accuracy"),
  }
  for record in records_with_most:
    endpoints[f"accuracy_{record['noise']}"] = record["accuracy"]
  endpoints["steps_to_90"] = None
  for record in answers["curve"]:
    if record["accuracy"] >= TARGET_ACCURACY:
      endpoints["steps_to_90"] = record["step"]
      break
  endpoints["signed"] = _mean(records_with_most, "signed")
  endpoints["absolute"] = _mean(records_with_most, "absolute")
  return {**endpoints, **answers}


def _mean(records: Sequence[Mapping[str, Any]], field: str) -> float:
  return float(np.mean(series.column(records, field)))


def summarise(grid_results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns a table row for the difference in accuracy of each pair in PAIRS.

  The grid "tune" has none: its variants have other names.
  """
  return comparison.contrasts(
    grid_results, "accuracy at 8 N", "accuracy", PAIRS
  )


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the accuracy over training, and over the number of pairs by noise.

  For the grid "tune", draws the accuracy over the learning rates instead.
  """
  if grid_results["grid"] == "tune":
    # N is the number of pairs in training.
    title = "share of values found at 8 N"
    return plots.over_rates(grid_results, "accuracy", title)

  first_run = series.first_run(grid_results)
  noises = list(dict.fromkeys(series.column(first_run["grid"], "noise")))
  num_panels = 1 + len(noises)
  figure = Figure((4 * num_panels, 4), layout="constrained")
  panels = figure.subplots(1, num_panels, sharey=True)

  # The first panel has the training, and the others one σ each.
  steps = series.column(first_run["curve"], "step")
  curves = series.fields(grid_results, "curve", "accuracy")
  plots.over_seeds(panels[0], steps, curves)
  for axes, noise in zip(panels[1:], noises, strict=True):
    records = series.select(first_run["grid"], noise=noise)
    pairs = series.column(records, "pairs")
    rows = series.fields(grid_results, "grid", "accuracy", noise=noise)
    plots.over_seeds(axes, pairs, rows)
    axes.set_xscale("log", base=2)
    axes.set_xticks(pairs, [str(number) for number in pairs])
    axes.set(
      title=f"at the end, noise σ = {noise:g}", xlabel="pairs in the context"
    )
  panels[0].set(
    title=f"while training on {TASK.pairs} pairs, mean over σ",
    xlabel="step",
    ylabel="share of values found",
  )
  figure.legend(
    *panels[0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=4,
    fontsize=8,
  )
  return figure


def _tuning_variants() -> tuple[str, ...]:
  """Returns every row at every learning rate."""
  variants = []
  for row in ROWS:
    for rate in RATES:
      variants.append(f"{row},rate={rate:g}")
  return tuple(variants)


def _table_columns() -> dict[str, str]:
  """Returns the columns of the table: their titles and keys of the results."""
  columns = {"accuracy at 8 N": "accuracy", "at N": "accuracy_n"}
  for noise in TASK.noises:
    columns[f"8 N, σ {noise:g}"] = f"accuracy_{noise}"
  columns["steps to 90%"] = "steps_to_90"
  columns["answer, signed"] = "signed"
  columns["answer, absolute"] = "absolute"
  return columns


EXPERIMENT = Experiment(
  question=(
    "Does the difference of two maps find a noisy key among more pairs"
    " than one map does?"
  ),
  grids={
    "tune": Grid(
      variants=_tuning_variants(), baseline="transformer,*", seeds=(100, 101)
    ),
    "cpu": Grid(
      variants=tuple(ROWS),
      baseline="transformer_norm",
      seeds=(0, 1, 2, 3, 4, 5, 6, 7),
    ),
  },
  metrics=_table_columns(),
  trains=False,
  measure=measure,
  task=dataclasses.asdict(TASK),
  summarise=summarise,
  plot=plot,
)
