"""Recall of a value among distractors, and the attention on it (README.md)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from diffjax.config import Config
from experiments import plots
from experiments.ablations.experiment import twins
from experiments.grid import Experiment, Grid
from experiments.retrieval import task

_TRAINING = task.Training()
# Words before the question, and distractors (pairs that are not asked for), where they fit
_CELLS = [
  (length, distractors)
  for length in (24, 48, 96)
  for distractors in (0, 5, 11, 23, 47, 95)
  if 1 + distractors <= length
]
_SAMPLES = 200
_REFERENCE = (96, 95)  # the hardest cell, followed over training
_SEED = 1_000
# The paper's needles: N of them in a text, R asked for; 50 prompts for each of five depths; at most 4K tokens
_PAIRS = ("1/1", "2/2", "4/2", "6/2")
_PROMPTS = 50
_VARIANTS = (
  "transformer",
  "transformer_wide",
  "transformer_norm",
  "diff_without_norm",
  "diff",
  "diff_v2",
)


def prepare(directory: pathlib.Path, config: Config) -> Mapping[str, str]:
  """Writes as many examples as training can read once: every row holds at least one."""
  return task.write(
    directory,
    max(512, 2 * config.train.steps * config.train.batch_size),
    _TRAINING,
  )


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Accuracy in every cell at the end; at every checkpoint, accuracy and the last query's attention in the reference cell."""
  import jax
  import jax.numpy as jnp

  from diffjax.evals.attention import last_query
  from diffjax.inference.trained import load
  from diffjax.model.decoder import logits

  trained = load(workdir)

  @jax.jit
  def forward(params, tokens):
    hidden: Any = trained.model.apply({"params": params}, tokens)
    return jnp.argmax(logits(params, hidden[:, -1:])[:, 0], axis=-1)

  looks = jax.jit(
    lambda params, tokens: last_query(trained.model, params, tokens)
  )
  cells = {cell: _questions(trained.tokenizer, *cell) for cell in _CELLS}

  def accuracy(params, cell):
    tokens, wanted, _ = cells[cell]
    return float(
      np.mean(
        np.concatenate(
          [np.asarray(forward(params, part)) for part in np.split(tokens, 4)]
        )
        == wanted
      )
    )

  curve = []
  steps = {
    *range(config.eval.interval, config.train.steps, config.eval.interval),
    config.train.steps,
  }
  for step in sorted(
    steps
  ):  # not all there are: a run that was stopped saved one more
    params = load(workdir, step).params
    tokens, _, places = cells[_REFERENCE]
    weights = np.concatenate(
      [
        np.asarray(looks(params, part), np.float64)
        for part in np.split(tokens, 4)
      ]
    )
    curve.append(
      {
        "step": step,
        "accuracy": accuracy(params, _REFERENCE),
        **_shares(weights, places),
      }
    )
  grid = [
    {
      "length": cell[0],
      "distractors": cell[1],
      "accuracy": accuracy(trained.params, cell),
    }
    for cell in _CELLS
  ]
  last = curve[-1]
  return {
    "accuracy": last["accuracy"],
    "mean_accuracy": float(np.mean([row["accuracy"] for row in grid])),
    "answer": last["answer_absolute"],
    "noise": last["noise_absolute"],
    "noise_signed": last["noise_signed"],
    "steps_to_half": next(
      (row["step"] for row in curve if row["accuracy"] >= 0.5), None
    ),
    "curve": curve,
    "grid": grid,
  }


def _questions(
  tokenizer: Any, length: int, distractors: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Prompts that end with the key asked for [U, S], the values [U], and the pair's positions in the prompts [U]."""
  rng = np.random.default_rng([_SEED, length, distractors])
  rows, wanted, places = [], [], []
  for _ in range(_SAMPLES):
    example = task.make_example(
      rng, asked=1, distractors=distractors, fillers=length - 1 - distractors
    )
    key, value = tokenizer.encode(" ".join(example.answer))
    rows.append([*tokenizer.encode_prompt(" ".join(example.context)), key])
    wanted.append(value)
    places.append(1 + example.places[0])
  return np.asarray(rows, np.int32), np.asarray(wanted), np.asarray(places)


def _shares(weights: np.ndarray, places: np.ndarray) -> dict[str, float]:
  """The shares of attention on the pair asked for and on the rest of the context (see diffjax/evals/attention.py for the signs)."""
  out = {}
  for sign, chosen in (("signed", weights), ("absolute", np.abs(weights))):
    answer = np.take_along_axis(chosen, places[:, None], axis=1)[:, 0]
    context = chosen[:, 1:-2].sum(
      axis=1
    )  # but for the separator, "?" and the key
    # Sums over prompts first: where λ is near 1, the signed weights of one prompt add up to nearly 0
    out[f"answer_{sign}"] = float(answer.sum() / chosen.sum())
    out[f"noise_{sign}"] = float((context - answer).sum() / chosen.sum())
  return out


def plot(results: Mapping[str, Any]) -> Figure:
  """Draws accuracy, answer and noise in the hardest cell over training; and the last accuracy by distractors for each length."""
  runs = plots.runs_by_variant(results)
  lengths = sorted(
    {row["length"] for row in results["runs"][0]["results"]["grid"]}
  )
  figure = Figure((13, 7), layout="constrained")
  above, below = figure.subplots(2, max(3, len(lengths)))
  shown = {
    "accuracy": "Accuracy",
    "answer_absolute": "Attention to the answer",
    "noise_absolute": "Attention to the rest (noise)",
  }
  for axes, (name, title) in zip(above, shown.items(), strict=False):
    steps = [row["step"] for row in results["runs"][0]["results"]["curve"]]
    plots.over_seeds(
      axes,
      steps,
      {
        row: [[each[name] for each in run["curve"]] for run in own]
        for row, own in runs.items()
      },
    )
    axes.set(
      xlabel="training step",
      ylabel="share of answers" if name == "accuracy" else "share of attention",
    )
    axes.set_title(
      f"{title}; {_REFERENCE[0]} words, {_REFERENCE[1]} distractors",
      fontsize=10,
    )
  for axes, length in zip(below, lengths, strict=False):
    chosen = {
      row: [
        [each for each in run["grid"] if each["length"] == length]
        for run in own
      ]
      for row, own in runs.items()
    }
    distractors = [
      each["distractors"] for each in next(iter(chosen.values()))[0]
    ]
    plots.over_seeds(
      axes,
      distractors,
      {
        row: [[each["accuracy"] for each in run] for run in own]
        for row, own in chosen.items()
      },
    )
    axes.set(xlabel="number of distractors", ylabel="share of answers")
    axes.set_title(f"Accuracy after training; {length} words", fontsize=10)
  lowest = min(axes.get_ylim()[0] for axes in below)
  for axes in below:
    axes.set_ylim(lowest, 1.02)
  for axes in above[3:]:
    axes.set_axis_off()
  figure.legend(
    *above[0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=3,
    fontsize=8,
  )
  return figure


EXPERIMENT = Experiment(
  question="Does DIFF find what is asked for among distractors where the Transformer does not, and is it more than its head norm?",
  grids={"cpu": Grid(_VARIANTS, "transformer", tuple(range(5)))},
  metrics={
    "accuracy": "accuracy",
    "mean over cells": "mean_accuracy",
    "steps to 50%": "steps_to_half",
    "attention to the answer": "answer",
    "noise": "noise",
    "noise, signed": "noise_signed",
  },
  prepare=prepare,
  measure=measure,
  task={
    "training": _TRAINING.__dict__,
    "cells": _CELLS,
    "samples": _SAMPLES,
    "reference": _REFERENCE,
    "asked": task.ASKED,
    "words": len(task.WORDS),
  },
  plot=plot,
)


def measure_needles(workdir: str, config: Config) -> dict[str, Any]:
  """A language model's accuracy for each number of needles, and the last query's attention with six needles."""
  from diffjax.evals.attention import AttentionShares
  from diffjax.evals.needle import Needle
  from diffjax.inference.trained import load

  trained = load(workdir)
  found = {}
  for figure in Needle(pairs=_PAIRS, samples=_PROMPTS).evaluate(trained):
    if figure.at["depth"] == "mean":
      found[f"accuracy_{figure.at['needles']}/{figure.at['asked']}"] = (
        figure.statistic(figure.units)
      )
  for figure in AttentionShares(samples=_PROMPTS).evaluate(trained):
    if figure.at["depth"] == "mean" and figure.name in ("answer", "noise"):
      found[f"{figure.name}_{figure.at['weights']}"] = figure.statistic(
        figure.units
      )
  return found


def plot_needles(results: Mapping[str, Any]) -> Figure:
  """Draws accuracy by needles, and the shares of attention."""
  runs = plots.runs_by_variant(results)
  parts = ("answer_signed", "noise_signed", "answer_absolute", "noise_absolute")
  figure = Figure((9, 3.8), layout="constrained")
  accuracy, looks = figure.subplots(1, 2)
  plots.over_seeds(
    accuracy,
    _PAIRS,
    {
      row: [[run[f"accuracy_{pair}"] for pair in _PAIRS] for run in own]
      for row, own in runs.items()
    },
  )
  words = [part.replace("_", ",\n") for part in parts]
  plots.over_seeds(
    looks,
    words,
    {
      row: [[run[part] for part in parts] for run in own]
      for row, own in runs.items()
    },
    "none",
  )
  accuracy.set(
    title="Accuracy",
    xlabel="needles / asked for",
    ylabel="share of needles found",
    ylim=(-0.05, 1.05),
  )
  looks.set(
    title="Shares of the last query's attention",
    xlabel="part of the text",
    ylabel="share of attention",
  )
  accuracy.legend(fontsize=8)
  return figure


LARGE = Experiment(
  question="Do larger DIFFs find more needles in a text than the Transformer, and look at them more?",
  grids={"gpu": twins("125m"), "tpu": twins("1b")},
  metrics={
    **{f"accuracy, {pair}": f"accuracy_{pair}" for pair in _PAIRS},
    "attention to the answer": "answer_signed",
    "noise": "noise_signed",
    "answer, absolute": "answer_absolute",
    "noise, absolute": "noise_absolute",
  },
  trains=False,
  pretrained="ablations",
  measure=measure_needles,
  task={"pairs": _PAIRS, "prompts": _PROMPTS},
  plot=plot_needles,
)
