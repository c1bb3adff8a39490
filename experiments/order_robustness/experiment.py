"""The dependence of a model's answers on the order of its demonstrations (README.md)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from diffjax.config import Config
from diffjax.evals.methods.demonstration_orders import alternating, shuffled
from diffjax.evals.methods.labelled_texts import Example
from experiments import plots
from experiments.ablations.experiment import twins
from experiments.grid import Experiment, Grid
from experiments.order_robustness import task

_ORDERS: dict[str, Callable] = {
  "random": shuffled,
  "alternating": alternating,
  "blocked": task.blocked,
}
_SETS = 16  # of demonstrations
_DRAWS = 10  # orders of each kind
_COUNTS = (6, 12, 24, 48, 72)  # demonstrations, for accuracy by their number
_CURVE_DRAWS = 2  # random orders for that accuracy
_SEED = 1_000
# For larger models: orders of each kind, and queries
_ORDERS_LARGE, _QUERIES_LARGE = 10, 100


def prepare(directory: pathlib.Path, config: Config) -> Mapping[str, str]:
  """Writes as many episodes as training reads, one a row."""
  return task.write(
    directory,
    max(512, config.train.steps * config.train.batch_size),
    task.SIZES,
  )


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Accuracy for each kind of order, the best order's minus the worst's, and how often the answers to a query differ by order."""
  import jax

  from diffjax.inference.trained import load
  from diffjax.model.decoder import logits

  trained = load(workdir)

  @jax.jit
  def forward(params, tokens):
    hidden: Any = trained.model.apply({"params": params}, tokens)
    return logits(params, hidden[:, -1:])[:, 0]

  rng = np.random.default_rng(_SEED)
  sets = [task.balanced_episode(rng, task.SIZES) for _ in range(_SETS)]
  encode = trained.tokenizer.encode
  wanted = np.array(
    [[encode(query.label)[0] for query in queries] for _, queries in sets]
  )
  possible = np.zeros((_SETS, 1, config.model.vocab_size), bool)
  np.put_along_axis(possible, wanted[:, None], True, axis=2)

  def answers(ordered: list[list[Example]]) -> np.ndarray:
    """The likeliest label for every query after its set's demonstrations in the given order, [sets, queries]."""
    rows = []
    for demonstrations, (_, queries) in zip(ordered, sets, strict=True):
      shown = [
        *trained.tokenizer.document_tokens.start,
        *encode(" ".join(example.text for example in demonstrations)),
      ]
      rows += [[*shown, *encode(query.text)] for query in queries]
    scores = np.asarray(forward(trained.params, np.array(rows))).reshape(
      _SETS, -1, config.model.vocab_size
    )
    return np.argmax(np.where(possible, scores, -np.inf), axis=2)

  found: dict[str, Any] = {}
  for kind, order in _ORDERS.items():
    draws = [
      [order(demonstrations, rng) for demonstrations, _ in sets]
      for _ in range(_DRAWS)
    ]
    given = np.stack([answers(ordered) for ordered in draws], axis=1)
    found |= {
      f"{kind}_{name}": value for name, value in spread(given, wanted).items()
    }
    if kind == "random":
      found["curve"] = [
        float(
          np.mean(
            [
              answers([each[:count] for each in ordered]) == wanted
              for ordered in draws[:_CURVE_DRAWS]
            ]
          )
        )
        for count in _COUNTS
      ]
  return found


def spread(answers: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
  """The spread of answers over orders.

  Args:
    answers: by set of demonstrations, order and query, [S, O, Q].
    wanted: the right answers, [S, Q].

  Returns:
    Mean accuracy; and, averaged over sets, the best order's accuracy minus the worst one's, and the share of pairs of orders after which a
    query has different answers.
  """
  accuracy = (answers == wanted[:, None]).mean(axis=2)
  first, second = np.triu_indices(answers.shape[1], 1)
  return {
    "accuracy": float(accuracy.mean()),
    "spread": float((accuracy.max(axis=1) - accuracy.min(axis=1)).mean()),
    "changed": float((answers[:, first] != answers[:, second]).mean()),
  }


def plot(results: Mapping[str, Any]) -> Figure:
  """Draws accuracy by the number of demonstrations; and accuracy, best minus worst and changed answers by the kind of order."""
  runs = plots.runs_by_variant(results)
  figure = Figure((14, 4.2), layout="constrained")
  curve, *kinds = figure.subplots(1, 4)
  plots.over_seeds(
    curve,
    _COUNTS,
    {variant: [run["curve"] for run in own] for variant, own in runs.items()},
  )
  _by_count(curve, "Accuracy, random order", _COUNTS)
  titles = {
    "accuracy": "Accuracy",
    "spread": "Accuracy of the best minus the worst order",
    "changed": "Share of answers that change",
  }
  for axes, (name, title) in zip(kinds, titles.items(), strict=True):
    _by_kind(
      axes,
      tuple(_ORDERS),
      {
        variant: [[run[f"{kind}_{name}"] for kind in _ORDERS] for run in own]
        for variant, own in runs.items()
      },
    )
    axes.set_title(title, fontsize=10)
  for axes in kinds[1:]:
    axes.set_ylim(bottom=0)
  figure.legend(
    *curve.get_legend_handles_labels(),
    loc="outside lower center",
    ncols=len(runs),
    fontsize=8,
  )
  return figure


def _by_count(axes: Any, title: str, counts: Sequence[int]) -> None:
  axes.set(
    xlabel="number of demonstrations", ylabel="share of answers", ylim=(0, 1)
  )
  axes.set_title(title, fontsize=10)
  axes.set_xscale("log", base=2)
  axes.set_xticks(counts, [str(count) for count in counts])
  axes.set_xticks([], minor=True)


def _by_kind(axes: Any, kinds: Sequence[str], rows: Mapping[str, Any]) -> None:
  plots.over_seeds(axes, kinds, rows, "none")
  axes.set(xlabel="order of the demonstrations", ylabel="share of answers")
  axes.margins(x=0.2)


EXPERIMENT = Experiment(
  question="Do DIFF's answers depend less on the order of its demonstrations?",
  grids={
    "cpu": Grid(
      ("transformer", "transformer_norm", "diff", "diff_v2"),
      "transformer",
      tuple(range(5)),
    )
  },
  metrics={
    "best − worst, random": "random_spread",
    "best − worst, alternating": "alternating_spread",
    "best − worst, blocked": "blocked_spread",
    "changed, random": "random_changed",
    "changed, alternating": "alternating_changed",
    "changed, blocked": "blocked_changed",
    "accuracy, random": "random_accuracy",
    "accuracy, alternating": "alternating_accuracy",
    "accuracy, blocked": "blocked_accuracy",
  },
  prepare=prepare,
  measure=measure,
  task={
    **dataclasses.asdict(task.SIZES),
    "words": task.WORDS,
    "labels": task.LABELS,
    "sets": _SETS,
    "orders": _DRAWS,
    "counts": _COUNTS,
  },
  plot=plot,
)


def measure_many_shot(workdir: str, config: Config) -> dict[str, Any]:
  """A language model's accuracy on classes of invented words by the number of demonstrations, and best minus worst order of the most."""
  from diffjax.evals import many_shot
  from diffjax.inference.trained import load

  found: dict[str, Any] = {"counts": [], "curve": []}
  suite = many_shot.ManyShot(orders=_ORDERS_LARGE, samples=_QUERIES_LARGE)
  for figure in suite.evaluate(load(workdir)):
    value = figure.statistic(figure.units)
    if figure.name == "accuracy":
      found["counts"].append(figure.at["demonstrations"])
      found["curve"].append(value)
    else:
      found[f"{figure.at['order']}_spread"] = value
  return {**found, "accuracy": found["curve"][-1]}


def plot_many_shot(results: Mapping[str, Any]) -> Figure:
  """Draws accuracy by the number of demonstrations, and best minus worst by the kind of order."""
  runs, kinds = plots.runs_by_variant(results), ("random", "alternating")
  counts = results["runs"][0]["results"]["counts"]
  figure = Figure((9, 3.8), layout="constrained")
  curve, spreads = figure.subplots(1, 2)
  plots.over_seeds(
    curve,
    counts,
    {variant: [run["curve"] for run in own] for variant, own in runs.items()},
  )
  _by_count(curve, "Accuracy", counts)
  curve.legend(fontsize=8)
  _by_kind(
    spreads,
    kinds,
    {
      variant: [[run[f"{kind}_spread"] for kind in kinds] for run in own]
      for variant, own in runs.items()
    },
  )
  spreads.set_title("Accuracy of the best minus the worst order", fontsize=10)
  spreads.set_ylim(bottom=0)
  return figure


LARGE = Experiment(
  question="Do larger DIFFs' answers depend less on the order of their demonstrations?",
  grids={"gpu": twins("125m"), "tpu": twins("1b")},
  metrics={
    "best − worst, random": "random_spread",
    "best − worst, alternating": "alternating_spread",
    "accuracy": "accuracy",
  },
  trains=False,
  pretrained="ablations",
  measure=measure_many_shot,
  task={"orders": _ORDERS_LARGE, "queries": _QUERIES_LARGE},
  plot=plot_many_shot,
)
