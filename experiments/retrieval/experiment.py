"""Retrieval: does DIFF find a value among distractors sooner?

EXPERIMENT trains small models on associative recall. It measures the accuracy
by the number of distractors, and the attention on the answer. LARGE asks
ablations' larger models for needles in a text. See README.md.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from diffjax.config import Config
from experiments import plots, series
from experiments.ablations.experiment import twins
from experiments.grid import Experiment, Grid
from experiments.retrieval import task

TRAINING = task.Training()

# The number of questions in each cell.
SAMPLES = 200

# The hardest cell, which is also measured during training: words before the
# question, and distractors.
REFERENCE = (96, 95)

# Seeds the questions.
SEED = 1_000

# Questions are evaluated in this number of batches.
BATCHES = 4

# For larger models, as in the paper: "4/2" is four needles in a text, two of
# which are asked for. The number of prompts is for each of five depths.
NEEDLES = ("1/1", "2/2", "4/2", "6/2")
PROMPTS = 50

VARIANTS = (
  "transformer",
  "transformer_wide",
  "transformer_norm",
  "diff_without_norm",
  "diff",
  "diff_v2",
)


def _cells() -> list[tuple[int, int]]:
  """Returns the pairs of words before the question and distractors that fit."""
  cells = []
  for length in (24, 48, 96):
    for distractors in (0, 5, 11, 23, 47, 95):
      # One word is the pair that is asked for.
      if 1 + distractors <= length:
        cells.append((length, distractors))
  return cells


CELLS = _cells()


class Questions(NamedTuple):
  """Questions of a cell.

  Attributes:
    tokens: The prompts. Each is a separator, the context, "?" and a key.
    values: The tokens of the right values.
    places: The positions of the pairs that are asked for, in the prompts.
  """

  tokens: Int[np.ndarray, "U S"]
  values: Int[np.ndarray, "U"]
  places: Int[np.ndarray, "U"]


def prepare(directory: pathlib.Path, config: Config) -> Mapping[str, str]:
  """Writes the training data.

  There are more examples than training reads: a row holds at least one, and
  usually not two.
  """
  num_rows = config.train.steps * config.train.batch_size
  return task.write(directory, max(512, 2 * num_rows), TRAINING)


def measure(
  workdir: str,
  config: Config,
  cells: list[tuple[int, int]] = CELLS,
  num_samples: int = SAMPLES,
) -> dict[str, Any]:
  """Measures the accuracy in every cell, and the attention during training.

  A cell is a number of words before the question, and a number of distractors.

  Args:
    workdir: The directory of the run.
    config: The config of the run.
    cells: The cells, with REFERENCE among them.
    num_samples: The number of questions in each cell.

  Returns:
    The results by name. In the cell REFERENCE after training: "accuracy", and
    the shares of attention "answer", "noise" and "noise_signed". Over all
    cells: "mean_accuracy". "steps_to_half" is the first step with an accuracy
    of half, or None. The records of all steps are "curve", and the ones of all
    cells "grid".
  """
  # Listing experiments does not need JAX.
  import jax

  from diffjax.evals.attention import last_query
  from diffjax.inference.trained import load

  trained = load(workdir)
  predict = _make_predict(trained.model)

  @jax.jit
  def attention(params, tokens):
    return last_query(trained.model, params, tokens)

  questions = {}
  for length, distractors in cells:
    questions[length, distractors] = make_questions(
      trained.tokenizer, length, distractors, num_samples
    )

  # The cell REFERENCE at each saved step of the training.
  curve = []
  reference = questions[REFERENCE]
  for step in _measured_steps(config):
    params = load(workdir, step).params
    weights = _in_batches(attention, params, reference.tokens)
    record = {"step": step, "accuracy": _accuracy(predict, params, reference)}
    record |= shares(weights.astype(np.float64), reference.places)
    curve.append(record)

  # All cells after the training.
  grid = []
  for (length, distractors), cell_questions in questions.items():
    accuracy = _accuracy(predict, trained.params, cell_questions)
    grid.append(
      {"length": length, "distractors": distractors, "accuracy": accuracy}
    )

  last = curve[-1]
  accuracies = series.column(grid, "accuracy")
  return {
    "accuracy": last["accuracy"],
    "mean_accuracy": float(np.mean(accuracies)),
    "answer": last["answer_absolute"],
    "noise": last["noise_absolute"],
    "noise_signed": last["noise_signed"],
    "steps_to_half": _first_step(curve, accuracy=0.5),
    "curve": curve,
    "grid": grid,
  }


def _measured_steps(config: Config) -> list[int]:
  """Returns the steps of the regular checkpoints and the last step.

  A run that was stopped has saved one checkpoint more, which is not measured.
  """
  interval = config.eval.interval
  steps = list(range(interval, config.train.steps, interval))
  return [*steps, config.train.steps]


def _make_predict(model: Any) -> Callable[..., Any]:
  """Returns a jitted function that computes the most likely next tokens."""
  import jax
  import jax.numpy as jnp

  from diffjax.model.decoder import logits

  @jax.jit
  def predict(params, tokens):
    hidden: Any = model.apply({"params": params}, tokens)
    return jnp.argmax(logits(params, hidden[:, -1:])[:, 0], axis=-1)

  return predict


def _in_batches(
  function: Callable[..., Any], params: Any, tokens: Int[np.ndarray, "U S"]
) -> np.ndarray:
  """Applies a function to the tokens in batches."""
  outputs = []
  for batch in np.split(tokens, BATCHES):
    outputs.append(np.asarray(function(params, batch)))
  return np.concatenate(outputs)


def _accuracy(
  predict: Callable[..., Any], params: Any, questions: Questions
) -> float:
  """Returns how often the most likely next token is the right value."""
  predictions = _in_batches(predict, params, questions.tokens)
  return float(np.mean(predictions == questions.values))


def _first_step(curve: list[dict[str, Any]], accuracy: float) -> int | None:
  """Returns the first step that reaches an accuracy, or None."""
  for record in curve:
    if record["accuracy"] >= accuracy:
      return record["step"]
  return None


def make_questions(
  tokenizer: Any, length: int, distractors: int, num_samples: int = SAMPLES
) -> Questions:
  """Returns the questions of a cell, which are the same for all models.

  A question shows a context of pairs and filler words, and then a key.

  Args:
    tokenizer: The tokenizer of `task.write`.
    length: The number of words before the question.
    distractors: The number of pairs that are not asked for.
    num_samples: The number of questions.
  """
  rng = np.random.default_rng([SEED, length, distractors])
  tokens = []
  values = []
  places = []
  for _ in range(num_samples):
    example = task.make_example(
      rng, asked=1, distractors=distractors, fillers=length - 1 - distractors
    )
    key, value = tokenizer.encode(" ".join(example.answer))
    context = tokenizer.encode_prompt(" ".join(example.context))
    tokens.append([*context, key])
    values.append(value)
    # The prompt begins with a separator.
    places.append(1 + example.places[0])
  return Questions(
    tokens=np.asarray(tokens, np.int32),
    values=np.asarray(values),
    places=np.asarray(places),
  )


def shares(
  weights: Float[np.ndarray, "U S"], places: Int[np.ndarray, "U"]
) -> dict[str, float]:
  """Returns the shares of attention on the answer and on the noise.

  The answer is the pair that is asked for, and the noise is the rest of the
  context. The weights of DIFF can be negative.

  Args:
    weights: The weights of the last query of each prompt, means over heads and
      layers.
    places: The positions of the pairs that are asked for.

  Returns:
    "answer_signed" and "noise_signed", shares of the signed weights, and
    "answer_absolute" and "noise_absolute", shares of their absolute values.
  """
  measured = {}
  for sign, values in (("signed", weights), ("absolute", np.abs(weights))):
    answer = np.take_along_axis(values, places[:, None], axis=1)[:, 0]
    # The context is the prompt without the separator, "?" and the key.
    context = values[:, 1:-2].sum(axis=1)
    noise = context - answer
    # A ratio of sums over prompts. If λ is near 1, the signed weights of a
    # single prompt add up to nearly 0.
    total = values.sum()
    measured[f"answer_{sign}"] = float(answer.sum() / total)
    measured[f"noise_{sign}"] = float(noise.sum() / total)
  return measured


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the hardest cell over training, and the final accuracy by cell.

  The upper panels have the accuracy and the shares of attention over the steps.
  The lower panels have the accuracy over the number of distractors, one panel
  for each length.
  """
  grid = series.first_run(grid_results)["grid"]
  lengths = sorted(set(series.column(grid, "length")))
  num_columns = max(3, len(lengths))
  figure = Figure((13, 7), layout="constrained")
  upper, lower = figure.subplots(2, num_columns)

  _draw_training(upper[0], grid_results, "accuracy", "Accuracy")
  _draw_training(
    upper[1], grid_results, "answer_absolute", "Attention to the answer"
  )
  _draw_training(
    upper[2], grid_results, "noise_absolute", "Attention to the rest (noise)"
  )
  upper[0].set_ylabel("share of answers")
  upper[1].set_ylabel("share of attention")
  upper[2].set_ylabel("share of attention")
  for axes in upper[3:]:
    axes.set_axis_off()

  for axes, length in zip(lower, lengths, strict=False):
    _draw_cells(axes, grid_results, length)
  lowest = min(axes.get_ylim()[0] for axes in lower)
  for axes in lower:
    axes.set_ylim(lowest, 1.02)

  handles, labels = upper[0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=3, fontsize=8
  )
  return figure


def _draw_training(
  axes: Any, grid_results: Mapping[str, Any], name: str, title: str
) -> None:
  """Draws a number in the cell REFERENCE over the steps of training."""
  length, distractors = REFERENCE
  steps = series.column(series.first_run(grid_results)["curve"], "step")
  plots.over_seeds(axes, steps, series.fields(grid_results, "curve", name))
  axes.set_xlabel("training step")
  axes.set_title(
    f"{title}; {length} words, {distractors} distractors", fontsize=10
  )


def _draw_cells(
  axes: Any, grid_results: Mapping[str, Any], length: int
) -> None:
  """Draws the final accuracy over the number of distractors at a length."""
  grid = series.first_run(grid_results)["grid"]
  records = series.select(grid, length=length)
  distractors = series.column(records, "distractors")
  rows = series.fields(grid_results, "grid", "accuracy", length=length)
  plots.over_seeds(axes, distractors, rows)
  axes.set(xlabel="number of distractors", ylabel="share of answers")
  axes.set_title(f"Accuracy after training; {length} words", fontsize=10)


EXPERIMENT = Experiment(
  question=(
    "Does DIFF find what is asked for among distractors where the Transformer"
    " does not, and is it more than its head norm?"
  ),
  grids={
    "cpu": Grid(
      variants=VARIANTS, baseline="transformer", seeds=(0, 1, 2, 3, 4)
    )
  },
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
    "training": dataclasses.asdict(TRAINING),
    "cells": CELLS,
    "samples": SAMPLES,
    "reference": REFERENCE,
    "asked": task.ASKED,
    "words": len(task.WORDS),
  },
  plot=plot,
)


def measure_needles(
  workdir: str,
  config: Config,
  needles: tuple[str, ...] = NEEDLES,
  num_prompts: int = PROMPTS,
) -> dict[str, Any]:
  """Evaluates a language model on needles in a text.

  Args:
    workdir: The directory of a run of ablations.
    config: The config of that run.
    needles: Numbers of needles in a text and asked for, such as "6/2".
    num_prompts: The number of prompts for each depth.

  Returns:
    The accuracies ("accuracy_6/2" and so on), and with six needles the shares
    of the last query's attention ("answer_signed" and so on).
  """
  # Listing experiments does not need JAX.
  from diffjax.evals.attention import AttentionShares
  from diffjax.evals.needle import Needle
  from diffjax.inference.trained import load

  del config
  trained = load(workdir)
  measured = {}
  needle_suite = Needle(pairs=needles, samples=num_prompts)
  for figure in needle_suite.evaluate(trained):
    if figure.at["depth"] == "mean":
      name = f"accuracy_{figure.at['needles']}/{figure.at['asked']}"
      measured[name] = figure.statistic(figure.units)
  attention_suite = AttentionShares(samples=num_prompts)
  for figure in attention_suite.evaluate(trained):
    if figure.at["depth"] == "mean" and figure.name in ("answer", "noise"):
      name = f"{figure.name}_{figure.at['weights']}"
      measured[name] = figure.statistic(figure.units)
  return measured


def plot_needles(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the accuracy by number of needles, and the shares of attention."""
  figure = Figure((9, 3.8), layout="constrained")
  left, right = figure.subplots(1, 2)
  accuracies = [f"accuracy_{needles}" for needles in NEEDLES]
  plots.over_seeds(left, NEEDLES, series.metrics(grid_results, accuracies))
  left.set(
    title="Accuracy",
    xlabel="needles / asked for",
    ylabel="share of needles found",
    ylim=(-0.05, 1.05),
  )
  left.legend(fontsize=8)

  parts = ("answer_signed", "noise_signed", "answer_absolute", "noise_absolute")
  labels = [part.replace("_", ",\n") for part in parts]
  shares_by_variant = series.metrics(grid_results, parts)
  plots.over_seeds(right, labels, shares_by_variant, linestyle="none")
  right.set(
    title="Shares of the last query's attention",
    xlabel="part of the text",
    ylabel="share of attention",
  )
  return figure


LARGE = Experiment(
  question=(
    "Do larger DIFFs find more needles in a text than the Transformer,"
    " and look at them more?"
  ),
  grids={"gpu": twins("125m"), "tpu": twins("1b")},
  metrics={
    "accuracy, 1/1": "accuracy_1/1",
    "accuracy, 2/2": "accuracy_2/2",
    "accuracy, 4/2": "accuracy_4/2",
    "accuracy, 6/2": "accuracy_6/2",
    "attention to the answer": "answer_signed",
    "noise": "noise_signed",
    "answer, absolute": "answer_absolute",
    "noise, absolute": "noise_absolute",
  },
  trains=False,
  pretrained="ablations",
  measure=measure_needles,
  task={"pairs": NEEDLES, "prompts": PROMPTS},
  plot=plot_needles,
)
