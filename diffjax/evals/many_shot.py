"""Many-shot in-context learning: accuracy of classifying after more and more demonstrations, and robustness to their order.

The paper's protocol (paper.md, §5): demonstrations from one up to 64K tokens, classes balanced, decoding constrained to the label set. The
same demonstrations are read in other orders, random or alternating by class; the figure is the best minus the worst accuracy. The paper
leaves these choices open:

- Decoding is greedy over the tree of the labels' tokens. Scoring every label in full would cost as many passes as there are labels (150 in
  Clinic-150), for the same answer where labels differ in their first token. Labels are tokenised apart from the text before them, in
  demonstrations and in answers alike, and end with a blank line.
- Demonstrations come in rounds of one from every class, the classes shuffled in each round, so that the first n of them are balanced to
  within one. A class without further examples is left out of later rounds. The curve begins with one demonstration, each point has twice
  as many as the one before, and the last as many as fit. A larger number continues the demonstrations of the smaller one.
- Accuracy is the mean over `sets` draws of demonstrations. The units are queries, so intervals do not cover the draw of demonstrations; a
  query counts as one trial, however many draws it is asked after. `best minus worst` is no proportion and has a bootstrap interval, or none
  where every query is answered alike.
- Orders are drawn `orders` times. Alternating: the classes in a random order, one example of each in turn, in random order within a class.
- Demonstrations are read once for all queries. A demonstration that is also a query is left out.

Data is "synthetic", sentences of invented words whose classes have their own words, so that only the demonstrations tell the classes, or a
folder DATA_DIR/NAME with train.jsonl (demonstrations) and test.jsonl (queries), one {"text": …, "label": …} a line. Names that begin with
"trec" (TREC, TREC-fine) have the form "Question: …\nType: …", all others (Banking-77, Clinic-150) "utterance: …\nintent: …".
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import matplotlib.figure
import matplotlib.ticker
import numpy as np
from absl import logging
from numpy import ndarray

from diffjax.config import UserError, at_least, field
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.measurement import Measurement, proportion
from diffjax.evals.methods import jsonl
from diffjax.evals.methods.label_decoding import LabelTree, decode_labels
from diffjax.evals.report.plots import WIDTH, by_model, draw_line
from diffjax.evals.report.results import TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

_FORMS = {
  "trec": ("Question: {}\nType:", " {}\n\n"),
  "": ("utterance: {}\nintent:", " {}\n\n"),
}
_SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 1000, 200  # of each class


class Example(NamedTuple):
  """A text and its class."""

  text: str
  label: str


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A dataset.

  Attributes:
    train: Demonstrations.
    test: Queries.
    head: Template of an example up to its label.
    tail: Template of the label and the text behind it.
  """

  train: list[Example]
  test: list[Example]
  head: str
  tail: str

  @property
  def labels(self) -> list[str]:
    """The labels of the demonstrations, sorted."""
    return sorted({example.label for example in self.train})


@dataclasses.dataclass(frozen=True)
class ManyShot(Suite[dict[str, Dataset]]):
  """Accuracy of classification after demonstrations, and effect of their order.

  For each dataset and number of demonstrations, "accuracy" is the fraction of
  queries that get the right label. For each kind of order, "best minus worst" is
  the difference of two accuracies: of the best and of the worst order of the
  same demonstrations. The units are queries.
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
    "Orders of the same demonstrations, of each kind. 0 to measure no effect of"
    " the order.",
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
      UserError: if a dataset cannot be read, or max_tokens does not fit the
        model.
    """
    self._capacity(trained)
    return {name: load_dataset(name, self) for name in self.datasets}

  def measure(
    self, trained: Trained, datasets: dict[str, Dataset]
  ) -> Iterator[Measurement]:
    """Yields the accuracies of each dataset, and the effects of the order."""
    capacity = self._capacity(trained)
    sampler = Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, self.batch_tokens // capacity),
      capacity=capacity,
    )
    for name, dataset in datasets.items():
      task = _Task(sampler, trained.tokenizer, name, dataset, self)
      yield from task.accuracies()
      if self.orders:
        yield from task.robustness()

  def plot(self, results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Plots accuracy over tokens of demonstrations: a field for each dataset, a line for each model."""
    models = list(by_model(results, "accuracy"))
    datasets = list(
      dict.fromkeys(row["at"]["dataset"] for _, rows in models for row in rows)
    )
    figure = matplotlib.figure.Figure(
      (max(WIDTH, 4.5 * len(datasets)), 4), layout="constrained"
    )
    for dataset, axes in zip(
      datasets, figure.subplots(1, len(datasets), squeeze=False)[0], strict=True
    ):
      for style, rows in models:
        own = [row for row in rows if row["at"]["dataset"] == dataset]
        draw_line(axes, [row["at"]["tokens"] for row in own], own, style)
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
    return figure

  def _capacity(self, trained: Trained) -> int:
    """Returns the number of tokens of a prompt and its label, at most."""
    max_length = trained.config.model.max_length
    if self.max_tokens == 0:
      return max_length
    if not 1 <= self.max_tokens <= max_length:
      raise UserError(
        f"set.many_shot.max_tokens = {self.max_tokens}: the model takes at most"
        f" {max_length} (its config.model.max_length)"
      )
    return self.max_tokens


class _Task:
  """The questions of one dataset to one model."""

  def __init__(
    self,
    sampler: Sampler,
    tokenizer: Tokenizer,
    name: str,
    dataset: Dataset,
    settings: ManyShot,
  ):
    (
      self._sampler,
      self._tokenizer,
      self._name,
      self._dataset,
      self._settings,
    ) = sampler, tokenizer, name, dataset, settings
    self._endings = {
      label: self._encode(dataset.tail.format(label))
      for label in dataset.labels
    }
    self._tree = LabelTree.grow(list(self._endings.values()))
    rng = np.random.default_rng(settings.seed)
    self._queries = [
      dataset.test[index]
      for index in rng.permutation(len(dataset.test))[: settings.samples]
    ]
    self._heads = [
      self._encode(dataset.head.format(query.text)) for query in self._queries
    ]
    self._sets = [
      self._that_fit(balanced(dataset.train, rng)) for _ in range(settings.sets)
    ]
    self._most = min(map(len, self._sets))
    self._rng = rng

  def accuracies(self) -> Iterator[Measurement]:
    """Accuracy with one demonstration up to as many as fit."""
    counts = [
      *itertools.takewhile(
        lambda count: count < self._most,
        (1 << power for power in itertools.count()),
      ),
      self._most,
    ]
    for count in counts:
      chosen = [demonstrations[:count] for demonstrations in self._sets]
      correct = np.stack(
        [self._correct(demonstrations) for demonstrations in chosen], axis=1
      )
      yield proportion("accuracy", correct.mean(1), **self._place(chosen))

  def robustness(self) -> Iterator[Measurement]:
    """Best minus worst accuracy over orders of the first set of demonstrations, as many as fit."""
    demonstrations = self._sets[0][: self._most]
    for kind, order in (("random", shuffled), ("alternating", alternating)):
      correct = [
        self._correct(order(demonstrations, self._rng))
        for _ in range(self._settings.orders)
      ]
      yield Measurement(
        "best minus worst",
        np.stack(correct, axis=1),
        {**self._place([demonstrations]), "order": kind},
        _best_minus_worst,
      )

  def _place(self, sets: Sequence[Sequence[Example]]) -> dict[str, Any]:
    tokens = np.mean(
      [
        sum(len(self._demonstration(example)) for example in demonstrations)
        for demonstrations in sets
      ]
    )
    return {
      "dataset": self._name,
      "demonstrations": len(sets[0]),
      "tokens": round(float(tokens)),
    }

  def _correct(self, demonstrations: Sequence[Example]) -> ndarray:
    """1 for each query whose label was right, else 0."""
    sampler, labels = self._sampler, self._dataset.labels
    beginning = [
      *self._tokenizer.document_tokens.start,
      *itertools.chain.from_iterable(map(self._demonstration, demonstrations)),
    ]
    shared, found = (
      sampler.prefill([beginning] * sampler.batch_size),
      list[int](),
    )
    for start in range(0, len(self._heads), sampler.batch_size):
      heads = self._heads[start : start + sampler.batch_size]
      found += decode_labels(
        sampler, sampler.read(shared, heads), len(heads), self._tree
      )
    return np.asarray(
      [
        labels[label] == query.label
        for label, query in zip(found, self._queries, strict=True)
      ],
      np.float64,
    )

  def _that_fit(self, demonstrations: Sequence[Example]) -> list[Example]:
    """The first demonstrations, as many as leave room for start, query and label."""
    room = (
      self._sampler.capacity
      - len(self._tokenizer.document_tokens.start)
      - max(map(len, self._heads))
      - max(map(len, self._endings.values()))
    )
    sizes = itertools.accumulate(
      len(self._demonstration(example)) for example in demonstrations
    )
    fitting = sum(
      1 for _ in itertools.takewhile(lambda size: size <= room, sizes)
    )
    if not fitting:
      raise UserError(
        f"set.many_shot.datasets: {self._sampler.capacity} tokens do not hold the longest query of {self._name!r} and one demonstration; "
        "raise set.many_shot.max_tokens if the model takes more"
      )
    return list(demonstrations[:fitting])

  def _demonstration(self, example: Example) -> list[int]:
    return (
      self._encode(self._dataset.head.format(example.text))
      + self._endings[example.label]
    )

  def _encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text)


def _best_minus_worst(correct: ndarray) -> float:
  """Best minus worst accuracy of `correct`, [queries, orders]."""
  accuracies = correct.mean(0)
  return float(accuracies.max() - accuracies.min())


def balanced(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[Example]:
  """All examples, in rounds of one from every class that has any left. Each round's classes and each class's examples are shuffled."""
  rounds = itertools.zip_longest(*_by_class(examples, rng))
  return [
    example
    for round_ in rounds
    for example in shuffled(
      [example for example in round_ if example is not None], rng
    )
  ]


def shuffled(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[Example]:
  """The examples in random order."""
  return [examples[index] for index in rng.permutation(len(examples))]


def alternating(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[Example]:
  """The examples, one of each class in turn. The order of the classes is random and the same in each turn. Empty classes are left out."""
  classes = _by_class(examples, rng)
  classes = [classes[index] for index in rng.permutation(len(classes))]
  return [
    example
    for round_ in itertools.zip_longest(*classes)
    for example in round_
    if example is not None
  ]


def _by_class(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[list[Example]]:
  """The examples of each class, in random order."""
  classes: dict[str, list[Example]] = collections.defaultdict(list)
  for example in shuffled(examples, rng):
    classes[example.label].append(example)
  return [classes[label] for label in sorted(classes)]


def load_dataset(name: str, settings: ManyShot) -> Dataset:
  """Loads a dataset.

  Raises:
    UserError: for missing files, lines that lack a field, and queries whose label no demonstration has.
  """
  head, tail = next(
    form for prefix, form in _FORMS.items() if name.startswith(prefix)
  )
  if name == "synthetic":
    train, test = synthetic(
      settings.synthetic_classes, settings.synthetic_words, settings.seed
    )
    return Dataset(without_queries(train, test), test, head, tail)
  if not settings.data_dir:
    raise UserError(
      f"set.many_shot.datasets: {name!r} is not 'synthetic'; set.many_shot.data_dir must name the directory it is in"
    )
  files = {
    split: os.path.join(settings.data_dir, name, f"{split}.jsonl")
    for split in ("train", "test")
  }
  records = {
    split: jsonl.read(path, {"text": str, "label": str})
    for split, path in files.items()
  }
  examples: dict[str, list[Example]] = {}
  for split, found in records.items():
    examples[split] = [
      Example(record.value["text"].strip(), record.value["label"].strip())
      for record in found
    ]
    for record, example in zip(found, examples[split], strict=True):
      if not example.label or "\n" in example.label:
        raise UserError(
          f"{record.place}: a label must be one line, and not empty; got {example.label!r}"
        )
  known = {example.label for example in examples["train"]}
  for record, example in zip(records["test"], examples["test"], strict=True):
    if example.label not in known:
      raise UserError(
        f"{record.place}: the label {example.label!r} is not one of the {len(known)} labels of {files['train']}"
      )
  train = without_queries(examples["train"], examples["test"])
  shown = {example.label for example in train}
  for record, example in zip(records["test"], examples["test"], strict=True):
    if example.label not in shown:
      raise UserError(
        f"{record.place}: every demonstration of the label {example.label!r}"
        f" is also a query; add other texts to {files['train']}"
      )
  num_removed = len(examples["train"]) - len(train)
  if num_removed > 0:
    logging.warning(
      "%s: %d demonstrations are also queries and are not shown",
      files["train"],
      num_removed,
    )
  return Dataset(train, examples["test"], head, tail)


def without_queries(
  demonstrations: Sequence[Example], queries: Sequence[Example]
) -> list[Example]:
  """Returns the demonstrations whose texts are not queries."""
  # Texts with other spaces are the same.
  query_words = {tuple(query.text.split()) for query in queries}
  others = []
  for shot in demonstrations:
    if tuple(shot.text.split()) not in query_words:
      others.append(shot)
  return others


def synthetic(
  num_classes: int, num_words: int, seed: int
) -> tuple[list[Example], list[Example]]:
  """Makes demonstrations and queries of invented words, the same number for every class.

  A text has a word of its class and three words that all classes share, in random order. Only demonstrations tell the words and the names
  of the classes.

  Args:
    num_classes: Number of classes.
    num_words: Number of words of each class.
    seed: Of words and texts.
  """
  rng = np.random.default_rng(seed)
  words = _invented_words(rng)
  labels = [next(words) for _ in range(num_classes)]
  own = {label: [next(words) for _ in range(num_words)] for label in labels}
  shared = [next(words) for _ in range(20)]

  def example(label: str) -> Example:
    return Example(
      " ".join(
        rng.permutation(
          [rng.choice(own[label]), *rng.choice(shared, 3, replace=False)]
        ).tolist()
      ),
      label,
    )

  make = lambda count: [
    example(label) for _ in range(count) for label in labels
  ]
  return make(_SYNTHETIC_TRAIN), make(_SYNTHETIC_TEST)


def _invented_words(rng: np.random.Generator) -> Iterator[str]:
  """Different words of three syllables."""
  syllables = [
    consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"
  ]
  for number in rng.permutation(len(syllables) ** 3):
    yield "".join(
      syllables[number // len(syllables) ** power % len(syllables)]
      for power in range(3)
    )
