"""Where cancellation should matter: keys found among more and more noisy ones (README.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import matplotlib.figure
import numpy as np

from diffjax.config import Config
from experiments import plots
from experiments import results as stored
from experiments.grid import Experiment, Grid
from experiments.noisy_lookup.config import RATES, ROWS
from experiments.noisy_lookup.task import Task

_TASK = Task()
_REACHED = 0.9


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Trains and asks a model; nothing of it is kept but the answers."""
  from experiments.noisy_lookup import task

  _, found = task.train(config, _TASK)
  return summary(found, _TASK)


def summary(found: Mapping[str, Any], task: Task) -> dict[str, Any]:
  """The endpoints: accuracy and shares of attention at most pairs, mean over the σ; and the first step of followed accuracy 90%."""
  most = task.pairs * max(task.multiples)
  last = [row for row in found["grid"] if row["pairs"] == most]
  mean = lambda rows, name: float(np.mean([row[name] for row in rows]))  # noqa: E731
  return {
    "accuracy": mean(last, "accuracy"),
    "accuracy_n": mean(
      [row for row in found["grid"] if row["pairs"] == task.pairs], "accuracy"
    ),
    **{f"accuracy_{row['noise']}": row["accuracy"] for row in last},
    "steps_to_90": next(
      (row["step"] for row in found["curve"] if row["accuracy"] >= _REACHED),
      None,
    ),
    "signed": mean(last, "signed"),
    "absolute": mean(last, "absolute"),
    **found,
  }


def summarise(results: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The two differences that decide the claim. Empty for the grid of tuning, whose variants have other names."""
  return stored.contrasts(
    results,
    "accuracy at 8 N",
    "accuracy",
    (("diff", "transformer_norm"), ("diff", "diff_lambda_zero")),
  )


def plot(results: Mapping[str, Any]) -> matplotlib.figure.Figure:
  """Draws the accuracy over training, and at the end over the number of pairs for each σ; for tuning the endpoint over rates."""
  if results["grid"] == "tune":
    return plots.over_rates(results, "accuracy", "share of values found at 8 N")
  noises = list(
    dict.fromkeys(row["noise"] for row in results["runs"][0]["results"]["grid"])
  )
  figure = matplotlib.figure.Figure(
    (4 * (1 + len(noises)), 4), layout="constrained"
  )
  curve, *ends = figure.subplots(1, 1 + len(noises), sharey=True)
  by_variant = plots.runs_by_variant(results)
  first = next(iter(by_variant.values()))[0]
  over_steps = {
    variant: [[row["accuracy"] for row in run["curve"]] for run in runs]
    for variant, runs in by_variant.items()
  }
  plots.over_seeds(curve, [row["step"] for row in first["curve"]], over_steps)
  for axes, noise in zip(ends, noises, strict=True):
    chosen = {
      variant: [
        [row["accuracy"] for row in run["grid"] if row["noise"] == noise]
        for run in runs
      ]
      for variant, runs in by_variant.items()
    }
    pairs = [row["pairs"] for row in first["grid"] if row["noise"] == noise]
    plots.over_seeds(axes, pairs, chosen)
    axes.set_xscale("log", base=2)
    axes.set_xticks(pairs, [str(number) for number in pairs])
    axes.set(
      title=f"at the end, noise σ = {noise:g}", xlabel="pairs in the context"
    )
  curve.set(
    title=f"while training on {_TASK.pairs} pairs, mean over σ",
    xlabel="step",
    ylabel="share of values found",
  )
  figure.legend(
    *curve.get_legend_handles_labels(),
    loc="outside lower center",
    ncols=4,
    fontsize=8,
  )
  return figure


_TUNED = tuple(f"{row},rate={rate:g}" for row in ROWS for rate in RATES)

EXPERIMENT = Experiment(
  question="Does the difference of two maps find a noisy key among more pairs than one map does?",
  grids={
    "tune": Grid(_TUNED, "transformer,*", (100, 101)),
    "cpu": Grid(tuple(ROWS), "transformer_norm", tuple(range(8))),
  },
  metrics={
    "accuracy at 8 N": "accuracy",
    "at N": "accuracy_n",
    **{f"8 N, σ {noise:g}": f"accuracy_{noise}" for noise in _TASK.noises},
    "steps to 90%": "steps_to_90",
    "answer, signed": "signed",
    "answer, absolute": "absolute",
  },
  trains=False,
  measure=measure,
  task=dataclasses.asdict(_TASK),
  summarise=summarise,
  plot=plot,
)
