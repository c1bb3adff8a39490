"""Many-shot in-context learning: classification after many demonstrations.

The protocol of the paper (paper.md, §5): The model reads demonstrations, from
one up to 64K tokens, with balanced classes. Decoding is constrained to the
labels. To measure robustness, the same demonstrations are read in other orders,
which are random or alternate between the classes. The result is the best
accuracy minus the worst.

The paper does not specify these choices:

- Decoding is greedy over the tree of the labels' tokens. To score each label
  in full would take one pass per label (150 in Clinic-150), and would give the
  same answer if the labels differ in their first token. A label is tokenized
  separately from the text before it, in demonstrations and in answers. It ends
  with a blank line.
- Demonstrations come in rounds of one example per class, with the classes
  shuffled in each round. So the counts of classes among the first n
  demonstrations differ by one at most. A class without further examples is left
  out of later rounds.
- The curve begins with one demonstration. Each point has twice as many as the
  point before it, and the last point has as many as fit. A larger number
  continues the demonstrations of a smaller one.
- Accuracy is the mean over `sets` draws of demonstrations. The units are
  queries, so intervals do not include the variation between draws. A query
  counts as one trial, although it is asked after each draw. "best minus worst"
  is not a proportion, so its interval is a bootstrap. It has no interval if all
  queries are answered alike.
- There are `orders` random orders. There are also `orders` alternating orders:
  one example of each class in turn, with the classes in random order and the
  examples of a class in random order.
- Demonstrations are read once for all queries. A demonstration that is also a
  query is left out.

The data is "synthetic" or a folder DATA_DIR/NAME. The synthetic texts consist
of invented words, and each class has its own words. So only the demonstrations
tell the classes apart. A folder has train.jsonl with demonstrations and
test.jsonl with queries, one {"text": …, "label": …} per line. Datasets with a
name that begins with "trec" (TREC, TREC-fine) are written as
"Question: …\\nType: …", all others (Banking-77, Clinic-150) as
"utterance: …\\nintent: …".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import matplotlib.figure
import matplotlib.ticker
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy import ndarray

from diffjax.config import UserError, at_least, field
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.measurement import Measurement, proportion
from diffjax.evals.methods import labelled_texts
from diffjax.evals.methods.demonstration_orders import (
  alternating,
  balanced,
  shuffled,
)
from diffjax.evals.methods.label_decoding import LabelTree, decode_labels
from diffjax.evals.methods.labelled_texts import Dataset, Example
from diffjax.evals.methods.token_limit import checked_token_limit
from diffjax.evals.report.plots import WIDTH, by_model, draw_line
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

# For each kind of order, the function that draws an order of this kind.
_ORDERS: Mapping[str, Callable[..., list[Example]]] = {
  "random": shuffled,
  "alternating": alternating,
}

# Width of a dataset's axes in the plot, in inches.
_DATASET_WIDTH = 4.5


class _Template(NamedTuple):
  """How an example is written in a prompt.

  Attributes:
    text: The format of the example's text. A query ends after it.
    label: The format of the label, which follows the text.
  """

  text: str
  label: str


_QUESTION_TEMPLATE = _Template("Question: {}\nType:", " {}\n\n")
_UTTERANCE_TEMPLATE = _Template("utterance: {}\nintent:", " {}\n\n")


@dataclasses.dataclass(frozen=True)
class ManyShot(Suite[dict[str, Dataset]]):
  """Accuracy of classification after demonstrations, and effect of their order.

  For each dataset and number of demonstrations, "accuracy" is the fraction of
  queries that get the right label. For each kind of order, "best minus worst"
  is the range of accuracies, when the same demonstrations are read in different
  orders. Both lie between 0 and 1. The units are queries.
  """

  name: ClassVar[str] = "many_shot"
  table: ClassVar[TableSpec] = TableSpec(
    unit="queries",
    headers={"demonstrations": "shots", "tokens": ""},
    notes=(
      "shots: demonstrations before a query",
      "accuracy: share of the queries with the right label",
      "best minus worst: spread of accuracy over orders of the demonstrations",
    ),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure("many-shot accuracy", "accuracy", "higher"),
    MainFigure(
      "dependence on the order of examples", "best minus worst", "lower"
    ),
  )

  datasets: tuple[str, ...] = field(
    ("synthetic",), '"synthetic", or names of folders in data_dir.'
  )
  data_dir: str = field("", "Directory of the folders.")
  max_tokens: int = field(
    0,
    "Tokens of a prompt, at most. 0 for the model's config.model.max_length.",
  )
  samples: int = field(
    100,
    "Queries, drawn from the test examples. If there are fewer, all are used.",
    bound=at_least(1),
  )
  sets: int = field(
    3, "Draws of demonstrations to average over.", bound=at_least(1)
  )
  orders: int = field(
    5,
    "Orders of the same demonstrations, for each kind of order. 0 to leave out"
    " the effect of the order.",
    bound=at_least(0),
  )
  seed: int = field(0, "Seed of all draws.")
  synthetic_classes: int = field(
    6, "Classes of the synthetic data.", bound=at_least(1)
  )
  synthetic_words: int = field(
    4,
    "Words of each synthetic class that no other class has.",
    bound=at_least(1),
  )
  batch_tokens: int = field(
    32_768, "Tokens of a batch, which has at least one query."
  )

  def load(self, trained: Trained) -> dict[str, Dataset]:
    """Returns the datasets by name.

    Raises:
      UserError: if a dataset cannot be read, or if the model does not take
        `max_tokens` tokens.
    """
    # Called for its error: a wrong max_tokens is reported before data is read.
    checked_token_limit(self.name, self.max_tokens, trained)
    datasets = {}
    for name in self.datasets:
      datasets[name] = self._load_dataset(name)
    return datasets

  def measure(
    self, trained: Trained, datasets: dict[str, Dataset]
  ) -> Iterator[Measurement]:
    """Yields the accuracies of each dataset, and the effects of the order."""
    capacity = checked_token_limit(self.name, self.max_tokens, trained)
    sampler = Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, self.batch_tokens // capacity),
      capacity=capacity,
    )
    for name, dataset in datasets.items():
      # The draws for a dataset do not depend on the datasets before it.
      rng = np.random.default_rng(self.seed)
      queries = shuffled(dataset.test, rng)[: self.samples]
      encoder = _Encoder(trained.tokenizer, _template_of(name), dataset.labels)
      classifier = _Classifier(name, sampler, encoder, queries)
      demonstration_sets = self._draw_demonstrations(dataset, classifier, rng)
      yield from _accuracies(classifier, demonstration_sets)
      # The effect of the order is measured on the demonstrations of one set.
      if self.orders > 0:
        yield from self._order_effects(classifier, demonstration_sets[0], rng)

  def plot(self, suite_results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Draws accuracy over the number of tokens of the demonstrations.

    Each dataset has its own panel, with a line for each model.
    """
    names = [result["at"]["dataset"] for result in suite_results["figures"]]
    # Each once, in the order of the results.
    datasets = list(dict.fromkeys(names))
    width = max(WIDTH, _DATASET_WIDTH * len(datasets))
    figure = matplotlib.figure.Figure((width, 4), layout="constrained")
    panels = figure.subplots(1, len(datasets), squeeze=False)[0]
    for axes, dataset in zip(panels, datasets, strict=True):
      _draw_accuracies(axes, suite_results, dataset)
    return figure

  def _load_dataset(self, name: str) -> Dataset:
    """Makes the dataset "synthetic", or reads any other from its folder."""
    if name == "synthetic":
      return labelled_texts.synthetic_dataset(
        self.synthetic_classes, self.synthetic_words, self.seed
      )
    if not self.data_dir:
      raise UserError(
        f"set.many_shot.datasets: {name!r} is not 'synthetic';"
        " set.many_shot.data_dir must name the directory it is in"
      )
    return labelled_texts.read_dataset(self.data_dir, name)

  def _draw_demonstrations(
    self, dataset: Dataset, classifier: _Classifier, rng: np.random.Generator
  ) -> list[list[Example]]:
    """Draws `sets` lists of demonstrations, each with balanced classes.

    The lists have the same length. It is the largest one with which all prompts
    fit the model. Raises UserError if it is 0.
    """
    demonstration_sets = []
    for _ in range(self.sets):
      examples = balanced(dataset.train, rng)
      demonstration_sets.append(classifier.longest_fit(examples))
    num_demonstrations = min(map(len, demonstration_sets))
    if num_demonstrations == 0:
      raise UserError(
        f"set.many_shot.datasets: {classifier.sampler.capacity} tokens do not"
        f" hold the longest query of {classifier.dataset_name!r} and one"
        " demonstration; raise set.many_shot.max_tokens if the model takes more"
      )
    return [examples[:num_demonstrations] for examples in demonstration_sets]

  def _order_effects(
    self,
    classifier: _Classifier,
    demonstrations: Sequence[Example],
    rng: np.random.Generator,
  ) -> Iterator[Measurement]:
    """Yields the best accuracy minus the worst, for each kind of order.

    Each accuracy is after the same demonstrations, in another order.
    """
    for order, reorder in _ORDERS.items():
      orderings = []
      for _ in range(self.orders):
        orderings.append(reorder(demonstrations, rng))
      yield _best_minus_worst(classifier, order, orderings)


def _template_of(dataset_name: str) -> _Template:
  """Returns the template of a dataset. TREC's texts are questions."""
  if dataset_name.startswith("trec"):
    return _QUESTION_TEMPLATE
  return _UTTERANCE_TEMPLATE


class _Encoder:
  """Converts the examples of a dataset to token ids."""

  def __init__(
    self, tokenizer: Tokenizer, template: _Template, labels: Sequence[str]
  ):
    self._tokenizer = tokenizer
    self._template = template
    # The ids of each label and of the blank line after it. Labels and texts are
    # tokenized separately, so that a label always has the same ids.
    self.label_ids: dict[str, list[int]] = {}
    for label in labels:
      self.label_ids[label] = tokenizer.encode(template.label.format(label))

  def encode_query(self, query: Example) -> list[int]:
    """Returns the ids of a text up to its label."""
    return self._tokenizer.encode(self._template.text.format(query.text))

  def encode_demonstration(self, example: Example) -> list[int]:
    """Returns the ids of a text and its label."""
    return self.encode_query(example) + self.label_ids[example.label]

  def encode_demonstrations(self, examples: Sequence[Example]) -> list[int]:
    """Returns the ids of the part of a prompt that comes before the query."""
    ids = list(self._tokenizer.document_tokens.start)
    for example in examples:
      ids += self.encode_demonstration(example)
    return ids

  def count_tokens(self, examples: Sequence[Example]) -> int:
    """Returns the number of tokens, without those that start a document."""
    num_tokens = 0
    for example in examples:
      num_tokens += len(self.encode_demonstration(example))
    return num_tokens


class _Classifier:
  """Classifies a dataset's queries with a model, after demonstrations.

  Attributes:
    dataset_name: The name of the dataset.
    sampler: The sampler of the model.
    encoder: The encoder of the dataset.
  """

  def __init__(
    self,
    dataset_name: str,
    sampler: Sampler,
    encoder: _Encoder,
    queries: Sequence[Example],
  ):
    self.dataset_name = dataset_name
    self.sampler = sampler
    self.encoder = encoder
    self._queries = queries
    self._query_ids = [encoder.encode_query(query) for query in queries]
    self._labels = list(encoder.label_ids)
    self._label_tree = LabelTree.grow(list(encoder.label_ids.values()))

  def longest_fit(self, examples: Sequence[Example]) -> list[Example]:
    """Returns the first examples, as many as can be shown before any query.

    The longest query and the longest label must fit after them.
    """
    num_start_tokens = len(self.encoder.encode_demonstrations([]))
    longest_query = max(map(len, self._query_ids))
    longest_label = max(map(len, self.encoder.label_ids.values()))
    max_tokens = (
      self.sampler.capacity - num_start_tokens - longest_query - longest_label
    )
    fitting: list[Example] = []
    num_tokens = 0
    for example in examples:
      num_tokens += len(self.encoder.encode_demonstration(example))
      if num_tokens > max_tokens:
        break
      fitting.append(example)
    return fitting

  def outcomes(
    self, demonstrations: Sequence[Example]
  ) -> Float[ndarray, "queries"]:
    """Returns for each query 1 if the model gives the right label, else 0.

    Args:
      demonstrations: The examples that the model reads before each query.
    """
    sampler = self.sampler
    # The demonstrations are read once. Each batch of queries continues them.
    shared_prefix = self.encoder.encode_demonstrations(demonstrations)
    prefix_state = sampler.prefill([shared_prefix] * sampler.batch_size)
    label_indices: list[int] = []
    for start in range(0, len(self._query_ids), sampler.batch_size):
      batch = self._query_ids[start : start + sampler.batch_size]
      query_state = sampler.read(prefix_state, batch)
      label_indices += decode_labels(
        sampler, query_state, len(batch), self._label_tree
      )

    outcomes = np.zeros(len(self._queries))
    for row, query in enumerate(self._queries):
      label = self._labels[label_indices[row]]
      if label == query.label:
        outcomes[row] = 1
    return outcomes

  def outcome_columns(
    self, demonstration_lists: Sequence[Sequence[Example]]
  ) -> Float[ndarray, "queries lists"]:
    """Returns the outcomes after each of several lists of demonstrations."""
    columns = []
    for demonstrations in demonstration_lists:
      columns.append(self.outcomes(demonstrations))
    return np.stack(columns, axis=1)


def _curve_counts(largest: int) -> list[int]:
  """Returns the numbers of demonstrations to measure the accuracy after.

  They are the powers of two below the largest number, and that number. For
  example, [1, 2, 4, 5] for 5.
  """
  counts = []
  count = 1
  while count < largest:
    counts.append(count)
    count *= 2
  return [*counts, largest]


def _accuracies(
  classifier: _Classifier, demonstration_sets: Sequence[Sequence[Example]]
) -> Iterator[Measurement]:
  """Yields the accuracies after 1, 2, 4, … demonstrations, and after all.

  Args:
    classifier: The classifier of the queries.
    demonstration_sets: Sets of equally many demonstrations. Each accuracy is
      the mean over the sets.
  """
  max_demonstrations = len(demonstration_sets[0])
  for count in _curve_counts(max_demonstrations):
    shorter_sets = [examples[:count] for examples in demonstration_sets]
    yield _accuracy(classifier, shorter_sets)


def _accuracy(
  classifier: _Classifier, demonstration_sets: Sequence[Sequence[Example]]
) -> Measurement:
  """Measures the mean accuracy over sets of equally many demonstrations."""
  outcomes = classifier.outcome_columns(demonstration_sets)
  coordinates = _coordinates(classifier, demonstration_sets)
  return proportion("accuracy", outcomes.mean(axis=1), **coordinates)


def _best_minus_worst(
  classifier: _Classifier, order: str, orderings: Sequence[Sequence[Example]]
) -> Measurement:
  """Measures the range of accuracies over orders of the same demonstrations.

  Args:
    classifier: The classifier of the queries.
    order: The kind of order, a key of `_ORDERS`.
    orderings: The demonstrations in different orders of this kind.
  """
  coordinates = _coordinates(classifier, orderings)
  coordinates["order"] = order
  return Measurement(
    name="best minus worst",
    units=classifier.outcome_columns(orderings),
    at=coordinates,
    statistic=_accuracy_range,
  )


def _coordinates(
  classifier: _Classifier, demonstration_sets: Sequence[Sequence[Example]]
) -> dict[str, Any]:
  """Returns the coordinates of a measurement on sets of demonstrations.

  The sets have equally many demonstrations. Their numbers of tokens can differ,
  and the coordinate is the mean.
  """
  num_tokens = []
  for demonstrations in demonstration_sets:
    num_tokens.append(classifier.encoder.count_tokens(demonstrations))
  return {
    "dataset": classifier.dataset_name,
    "demonstrations": len(demonstration_sets[0]),
    "tokens": round(float(np.mean(num_tokens))),
  }


def _accuracy_range(outcomes: Float[ndarray, "queries orders"]) -> float:
  """Returns the best order's accuracy minus the worst order's."""
  accuracies = outcomes.mean(axis=0)
  return float(accuracies.max() - accuracies.min())


def _draw_accuracies(
  axes: Axes, suite_results: Mapping[str, Any], dataset: str
) -> None:
  """Draws a line for each model over the tokens of demonstrations.

  Args:
    axes: Where to draw.
    suite_results: The content of the suite's JSON file.
    dataset: The name of the dataset whose accuracies are drawn.
  """
  for style, accuracies in by_model(suite_results, "accuracy"):
    results = [
      result for result in accuracies if result["at"]["dataset"] == dataset
    ]
    num_tokens = [result["at"]["tokens"] for result in results]
    draw_line(axes, num_tokens, results, style)
  axes.set(
    title=dataset,
    xscale="log",
    ylim=(0, 1),
    xlabel="tokens of demonstrations",
    ylabel="accuracy",
  )
  axes.xaxis.set_major_formatter(
    matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
  )
  axes.legend(fontsize=9)
