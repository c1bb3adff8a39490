"""Order robustness: do DIFF's answers depend less on the demonstrations' order?

EXPERIMENT trains small models that classify by demonstrations, and evaluates
them with the same demonstrations in many orders. LARGE asks ablations' larger
models about classes of invented words. See README.md.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure

from diffjax.config import Config
from diffjax.evals.methods.demonstration_orders import alternating, shuffled
from diffjax.evals.methods.labelled_texts import Example
from experiments import plots, series
from experiments.ablations.experiment import twins
from experiments.grid import Experiment, Grid
from experiments.order_robustness import task

if TYPE_CHECKING:
  from diffjax.inference.trained import Trained

# Kinds of orders. Each function returns demonstrations in a random order.
ORDERS: dict[str, Callable[..., list[Example]]] = {
  "random": shuffled,
  "alternating": alternating,
  "blocked": task.blocked,
}

# The number of sets of demonstrations, and of orders of each kind.
SETS = 16
DRAWS = 10

# The numbers of demonstrations at which the accuracy is measured, and the
# number of random orders for that.
COUNTS = (6, 12, 24, 48, 72)
CURVE_DRAWS = 2

# Seeds the sets and the orders of the evaluation.
SEED = 1_000

# For larger models: orders of each kind, and queries.
LARGE_ORDERS = 10
LARGE_QUERIES = 100


def prepare(directory: pathlib.Path, config: Config) -> Mapping[str, str]:
  """Writes the training data: an episode for each row that training reads."""
  num_rows = config.train.steps * config.train.batch_size
  return task.write(directory, max(512, num_rows), task.SIZES)


def measure(workdir: str, config: Config) -> dict[str, Any]:
  """Evaluates a trained model with demonstrations in different orders.

  Args:
    workdir: The directory of the run.
    config: Not used.

  Returns:
    For each kind of order, the accuracy ("random_accuracy" and so on), the
    difference of the best and the worst order ("random_spread") and the share
    of answers that differ between orders ("random_changed"). "curve" has the
    accuracies at COUNTS, in random order.
  """
  # Listing experiments does not need JAX.
  from diffjax.inference.trained import load

  del config
  rng = np.random.default_rng(SEED)
  episodes = [task.balanced_episode(rng, task.SIZES) for _ in range(SETS)]
  classifier = Classifier(load(workdir), episodes)

  measured: dict[str, Any] = {}
  for kind, order in ORDERS.items():
    draws = []
    for _ in range(DRAWS):
      draws.append(_draw_orders(order, episodes, rng))
    answers = [classifier.answers(ordered) for ordered in draws]
    numbers = spread(np.stack(answers, axis=1), classifier.labels)
    for name, number in numbers.items():
      measured[f"{kind}_{name}"] = number
    if kind == "random":
      measured["curve"] = _accuracy_by_count(classifier, draws[:CURVE_DRAWS])
  return measured


def _draw_orders(
  order: Callable[..., list[Example]],
  episodes: Sequence[task.Episode],
  rng: np.random.Generator,
) -> list[list[Example]]:
  """Returns the demonstrations of each episode in a random order.

  Args:
    order: Returns demonstrations in a random order: a value of ORDERS.
    episodes: The episodes.
    rng: The random generator.
  """
  ordered = []
  for episode in episodes:
    ordered.append(order(episode.demonstrations, rng))
  return ordered


class Classifier:
  """A trained model that answers the queries of some episodes.

  An episode is a set of demonstrations, with queries about the same classes.

  Attributes:
    labels: The token of the right label of each query.
  """

  labels: Int[np.ndarray, "sets queries"]

  def __init__(self, trained: Trained, episodes: Sequence[task.Episode]):
    """Initializes the classifier.

    Args:
      trained: The model.
      episodes: The episodes, with equally many queries each.
    """
    self._trained = trained
    self._episodes = episodes
    labels = []
    for episode in episodes:
      labels.append([self._token(query.label) for query in episode.queries])
    self.labels = np.array(labels)
    self._is_possible = self._possible_labels()
    self._forward = self._make_forward()

  def answers(
    self, ordered: Sequence[Sequence[Example]]
  ) -> Int[np.ndarray, "sets queries"]:
    """Returns the most likely label of each query.

    Only the labels of the episode are candidates.

    Args:
      ordered: The demonstrations of each episode, in the order to show.
    """
    rows = []
    for demonstrations, episode in zip(ordered, self._episodes, strict=True):
      shown = self._context(demonstrations)
      for query in episode.queries:
        rows.append([*shown, *self._trained.tokenizer.encode(query.text)])
    scores = self._forward(self._trained.params, np.array(rows))
    num_sets, num_queries = self.labels.shape
    scores = np.asarray(scores).reshape(num_sets, num_queries, -1)
    return np.argmax(np.where(self._is_possible, scores, -np.inf), axis=2)

  def _token(self, word: str) -> int:
    return self._trained.tokenizer.encode(word)[0]

  def _context(self, demonstrations: Sequence[Example]) -> list[int]:
    """Returns the tokens of some demonstrations."""
    tokenizer = self._trained.tokenizer
    text = " ".join(example.text for example in demonstrations)
    return [*tokenizer.document_tokens.start, *tokenizer.encode(text)]

  def _possible_labels(self) -> Bool[np.ndarray, "sets 1 vocabulary"]:
    """Returns whether a token is a label of the episode."""
    vocab_size = self._trained.config.model.vocab_size
    is_possible = np.zeros((len(self.labels), 1, vocab_size), bool)
    np.put_along_axis(is_possible, self.labels[:, None], True, axis=2)
    return is_possible

  def _make_forward(self) -> Callable[..., Any]:
    """Returns a jitted function that computes the logits of the last token."""
    import jax

    from diffjax.model.decoder import logits

    model = self._trained.model

    @jax.jit
    def forward(params, tokens):
      hidden: Any = model.apply({"params": params}, tokens)
      return logits(params, hidden[:, -1:])[:, 0]

    return forward


def _accuracy_by_count(
  classifier: Classifier, draws: Sequence[Sequence[Sequence[Example]]]
) -> list[float]:
  """Returns the accuracy with the first demonstrations alone, for COUNTS.

  Args:
    classifier: The model.
    draws: For each draw of orders, the demonstrations of each episode.
  """
  accuracies = []
  for count in COUNTS:
    is_right = []
    for ordered in draws:
      first = [demonstrations[:count] for demonstrations in ordered]
      is_right.append(classifier.answers(first) == classifier.labels)
    accuracies.append(float(np.mean(is_right)))
  return accuracies


def spread(
  answers: Int[np.ndarray, "S O Q"], labels: Int[np.ndarray, "S Q"]
) -> dict[str, float]:
  """Returns how much answers depend on the order of the demonstrations.

  Args:
    answers: The answers by set of demonstrations, order and query.
    labels: The right answers by set and query.

  Returns:
    - "accuracy": The mean accuracy.
    - "spread": The best accuracy of an order minus the worst, mean over sets.
    - "changed": How often the answers to a query differ between two orders.
  """
  is_right = answers == labels[:, None]
  accuracy: Float[np.ndarray, "S O"] = is_right.mean(axis=2)
  best_minus_worst = accuracy.max(axis=1) - accuracy.min(axis=1)
  num_orders = answers.shape[1]
  first, second = np.triu_indices(num_orders, 1)
  is_changed = answers[:, first] != answers[:, second]
  return {
    "accuracy": float(accuracy.mean()),
    "spread": float(best_minus_worst.mean()),
    "changed": float(is_changed.mean()),
  }


def plot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the accuracy by count, and the numbers of `spread` by kind."""
  figure = Figure((14, 4.2), layout="constrained")
  panels = figure.subplots(1, 4)
  plots.over_seeds(panels[0], COUNTS, series.curves(grid_results, "curve"))
  _label_counts(panels[0], "Accuracy, random order", COUNTS)

  kinds = list(ORDERS)
  _draw_by_kind(panels[1], grid_results, kinds, "accuracy")
  panels[1].set_title("Accuracy", fontsize=10)
  _draw_by_kind(panels[2], grid_results, kinds, "spread")
  panels[2].set_title("Accuracy of the best minus the worst order", fontsize=10)
  panels[2].set_ylim(bottom=0)
  _draw_by_kind(panels[3], grid_results, kinds, "changed")
  panels[3].set_title("Share of answers that change", fontsize=10)
  panels[3].set_ylim(bottom=0)

  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=len(labels),
    fontsize=8,
  )
  return figure


def _label_counts(axes: Any, title: str, counts: Sequence[int]) -> None:
  """Labels a panel of the accuracy by the number of demonstrations."""
  axes.set(
    xlabel="number of demonstrations", ylabel="share of answers", ylim=(0, 1)
  )
  axes.set_title(title, fontsize=10)
  axes.set_xscale("log", base=2)
  axes.set_xticks(counts, [str(count) for count in counts])
  axes.set_xticks([], minor=True)


def _draw_by_kind(
  axes: Any, grid_results: Mapping[str, Any], kinds: Sequence[str], name: str
) -> None:
  """Draws one of the numbers of `spread` by the kind of order."""
  names = [f"{kind}_{name}" for kind in kinds]
  rows = series.metrics(grid_results, names)
  plots.over_seeds(axes, kinds, rows, linestyle="none")
  axes.set(xlabel="order of the demonstrations", ylabel="share of answers")
  axes.margins(x=0.2)


EXPERIMENT = Experiment(
  question="Do DIFF's answers depend less on the order of its demonstrations?",
  grids={
    "cpu": Grid(
      variants=("transformer", "transformer_norm", "diff", "diff_v2"),
      baseline="transformer",
      seeds=(0, 1, 2, 3, 4),
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
    "sets": SETS,
    "orders": DRAWS,
    "counts": COUNTS,
  },
  plot=plot,
)


def measure_many_shot(
  workdir: str,
  config: Config,
  num_orders: int = LARGE_ORDERS,
  num_queries: int = LARGE_QUERIES,
) -> dict[str, Any]:
  """Evaluates a language model on classes of invented words.

  Args:
    workdir: The directory of a run of ablations.
    config: The config of that run.
    num_orders: The number of orders of each kind.
    num_queries: The number of queries.

  Returns:
    The numbers of demonstrations ("counts"), the accuracy at each ("curve") and
    at the most ("accuracy"); and for each kind of order, the best accuracy of
    an order minus the worst ("random_spread").
  """
  # Listing experiments does not need JAX.
  from diffjax.evals import many_shot
  from diffjax.inference.trained import load

  del config
  counts: list[int] = []
  curve: list[float] = []
  spreads: dict[str, float] = {}
  suite = many_shot.ManyShot(orders=num_orders, samples=num_queries)
  for figure in suite.evaluate(load(workdir)):
    value = figure.statistic(figure.units)
    if figure.name == "accuracy":
      counts.append(figure.at["demonstrations"])
      curve.append(value)
    else:
      spreads[f"{figure.at['order']}_spread"] = value
  return {"counts": counts, "curve": curve, **spreads, "accuracy": curve[-1]}


def plot_many_shot(grid_results: Mapping[str, Any]) -> Figure:
  """Draws the accuracy by count, and the spread by the kind of order."""
  counts = series.first_run(grid_results)["counts"]
  figure = Figure((9, 3.8), layout="constrained")
  left, right = figure.subplots(1, 2)
  plots.over_seeds(left, counts, series.curves(grid_results, "curve"))
  _label_counts(left, "Accuracy", counts)
  left.legend(fontsize=8)

  _draw_by_kind(right, grid_results, ("random", "alternating"), "spread")
  right.set_title("Accuracy of the best minus the worst order", fontsize=10)
  right.set_ylim(bottom=0)
  return figure


LARGE = Experiment(
  question=(
    "Do larger DIFFs' answers depend less on the order of their demonstrations?"
  ),
  grids={"gpu": twins("125m"), "tpu": twins("1b")},
  metrics={
    "best − worst, random": "random_spread",
    "best − worst, alternating": "alternating_spread",
    "accuracy": "accuracy",
  },
  trains=False,
  pretrained="ablations",
  measure=measure_many_shot,
  task={"orders": LARGE_ORDERS, "queries": LARGE_QUERIES},
  plot=plot_many_shot,
)
