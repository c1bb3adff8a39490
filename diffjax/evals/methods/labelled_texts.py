"""Datasets of short texts with labels, as demonstrations and queries.

A dataset is either synthetic or a folder with two files, `train.jsonl` with
demonstrations and `test.jsonl` with queries. Each line is an object:

    {"text": "my card has not arrived", "label": "card_arrival"}
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from diffjax.config import UserError
from diffjax.evals.methods import jsonl

_RECORD_FIELDS = {"text": str, "label": str}

# Synthetic texts per class.
_NUM_SYNTHETIC_DEMONSTRATIONS = 1000
_NUM_SYNTHETIC_QUERIES = 200
# Synthetic words that all classes share, in total and in each text.
_NUM_SHARED_WORDS = 20
_NUM_SHARED_WORDS_IN_TEXT = 3

_NUM_SYLLABLES_IN_WORD = 3


class Example(NamedTuple):
  """A text and its label.

  Attributes:
    text: The text.
    label: The name of its class.
  """

  text: str
  label: str


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Demonstrations and queries with the same labels.

  Attributes:
    train: The demonstrations. None of their texts is a query.
    test: The queries.
  """

  train: list[Example]
  test: list[Example]

  @property
  def labels(self) -> list[str]:
    """Returns the labels of the demonstrations, sorted."""
    return sorted(_distinct_labels(self.train))


def read_dataset(directory: str, name: str) -> Dataset:
  """Reads a dataset, without the demonstrations that are also queries.

  Args:
    directory: The directory of the dataset's folder. May be gs://.
    name: The name of the folder.

  Raises:
    UserError: if a file is missing, a line lacks a field, or a query has a
      label without demonstrations.
  """
  train_path = os.path.join(directory, name, "train.jsonl")
  test_path = os.path.join(directory, name, "test.jsonl")
  train_records = jsonl.read(train_path, _RECORD_FIELDS)
  test_records = jsonl.read(test_path, _RECORD_FIELDS)
  train = _to_examples(train_records)
  test = _to_examples(test_records)

  labels = _distinct_labels(train)
  for record, query in zip(test_records, test, strict=True):
    if query.label not in labels:
      raise UserError(
        f"{record.location}: the label {query.label!r} is not one of the"
        f" {len(labels)} labels of {train_path}"
      )

  demonstrations = _without_queries(train, test)
  remaining_labels = _distinct_labels(demonstrations)
  for record, query in zip(test_records, test, strict=True):
    if query.label not in remaining_labels:
      raise UserError(
        f"{record.location}: every demonstration of the label {query.label!r}"
        f" is also a query; add other texts to {train_path}"
      )
  num_removed = len(train) - len(demonstrations)
  if num_removed > 0:
    logging.warning(
      "%s: %d demonstrations are also queries and are not shown",
      train_path,
      num_removed,
    )
  return Dataset(demonstrations, test)


def _to_examples(records: Sequence[jsonl.Record]) -> list[Example]:
  """Converts the lines of a file. Raises UserError if a label is not a line."""
  examples = []
  for record in records:
    text = record.value["text"].strip()
    label = record.value["label"].strip()
    if not label or "\n" in label:
      raise UserError(
        f"{record.location}: a label must be one line, and not empty; got"
        f" {label!r}"
      )
    examples.append(Example(text, label))
  return examples


def _distinct_labels(examples: Sequence[Example]) -> set[str]:
  """Returns the labels that the examples have."""
  return {example.label for example in examples}


def _without_queries(
  demonstrations: Sequence[Example], queries: Sequence[Example]
) -> list[Example]:
  """Returns the demonstrations whose texts are not queries."""
  # Texts that differ only in spaces are the same.
  query_words = {tuple(query.text.split()) for query in queries}
  remaining = []
  for demonstration in demonstrations:
    if tuple(demonstration.text.split()) not in query_words:
      remaining.append(demonstration)
  return remaining


def synthetic_dataset(num_classes: int, num_words: int, seed: int) -> Dataset:
  """Returns a dataset of invented words, with equally many texts per class.

  A text has one word of its class and three words that all classes share, in
  random order. Labels are invented words too. So only demonstrations tell which
  words belong to which label. Example:

      text "midana kokati bugolu fezusi", label "tarive"

  Args:
    num_classes: The number of classes.
    num_words: The number of words of each class, which no other class has.
    seed: The seed of words and texts.
  """
  rng = np.random.default_rng(seed)
  words = _invented_words(rng)
  labels = list(itertools.islice(words, num_classes))
  words_by_label = {}
  for label in labels:
    words_by_label[label] = list(itertools.islice(words, num_words))
  shared_words = list(itertools.islice(words, _NUM_SHARED_WORDS))

  def make_examples(num_per_class: int) -> list[Example]:
    examples = []
    for _ in range(num_per_class):
      for label in labels:
        text = _synthetic_text(words_by_label[label], shared_words, rng)
        examples.append(Example(text, label))
    return examples

  demonstrations = make_examples(_NUM_SYNTHETIC_DEMONSTRATIONS)
  queries = make_examples(_NUM_SYNTHETIC_QUERIES)
  return Dataset(_without_queries(demonstrations, queries), queries)


def _synthetic_text(
  class_words: Sequence[str],
  shared_words: Sequence[str],
  rng: np.random.Generator,
) -> str:
  """Returns a text of one word of its class and some shared words."""
  class_word = rng.choice(class_words)
  other_words = rng.choice(
    shared_words, _NUM_SHARED_WORDS_IN_TEXT, replace=False
  )
  words = rng.permutation([class_word, *other_words])
  return " ".join(words.tolist())


def _invented_words(rng: np.random.Generator) -> Iterator[str]:
  """Yields all different words of three syllables, in random order."""
  syllables = []
  for consonant in "bdfgklmnprstvz":
    for vowel in "aeiou":
      syllables.append(consonant + vowel)
  num_syllables = len(syllables)
  # The digits of a number in base `num_syllables` are the syllables of a word.
  for number in rng.permutation(num_syllables**_NUM_SYLLABLES_IN_WORD):
    word = ""
    quotient = number
    for _ in range(_NUM_SYLLABLES_IN_WORD):
      quotient, digit = divmod(quotient, num_syllables)
      word += syllables[digit]
    yield word
