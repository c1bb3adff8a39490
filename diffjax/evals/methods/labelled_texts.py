"""Datasets of short texts with labels, as demonstrations and queries.

A dataset is either synthetic or a folder with two files, `train.jsonl` with
demonstrations and `test.jsonl` with queries. Each line is an object:

    {"text": "my card has not arrived", "label": "card_arrival"}
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
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

  # Labels without any demonstration are reported first, in all of the file.
  labels = _distinct_labels(train)
  for record, query in zip(test_records, test, strict=True):
    if query.label not in labels:
      raise UserError(
        f"{record.location}: the label {query.label!r} is not one of the"
        f" {len(labels)} labels of {train_path}"
      )

  # A query must not be shown to the model with its label.
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
  """Converts the records of a file to examples.

  Raises UserError if a label is empty or has several lines.
  """
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
  """Returns the demonstrations, without those that have a query's text.

  Texts that differ only in spaces are the same.
  """
  query_texts = {_normalize_spaces(query.text) for query in queries}
  remaining = []
  for demonstration in demonstrations:
    if _normalize_spaces(demonstration.text) not in query_texts:
      remaining.append(demonstration)
  return remaining


def _normalize_spaces(text: str) -> str:
  """Returns the words of a text with one space between them."""
  return " ".join(text.split())


def synthetic_dataset(num_classes: int, num_words: int, seed: int) -> Dataset:
  """Generates a dataset that a model can only learn from its demonstrations.

  A text consists of four invented words in random order: one that only its
  class has, and three that all classes share. The label is an invented word
  too. Each class has equally many texts. Example:

      text "midana kokati bugolu fezusi", label "tarive"

  Args:
    num_classes: The number of classes.
    num_words: The number of words of each class, which no other class has.
    seed: The seed of words and texts.
  """
  rng = np.random.default_rng(seed)
  # Each slice continues where the one before ended. So no word occurs twice.
  words = _invented_words(rng)
  labels = list(itertools.islice(words, num_classes))
  words_by_label = {}
  for label in labels:
    words_by_label[label] = list(itertools.islice(words, num_words))
  shared_words = list(itertools.islice(words, _NUM_SHARED_WORDS))

  demonstrations = _synthetic_examples(
    _NUM_SYNTHETIC_DEMONSTRATIONS, words_by_label, shared_words, rng
  )
  queries = _synthetic_examples(
    _NUM_SYNTHETIC_QUERIES, words_by_label, shared_words, rng
  )
  return Dataset(_without_queries(demonstrations, queries), queries)


def _synthetic_examples(
  num_per_class: int,
  words_by_label: Mapping[str, Sequence[str]],
  shared_words: Sequence[str],
  rng: np.random.Generator,
) -> list[Example]:
  """Draws equally many examples of each class.

  Args:
    num_per_class: The number of examples of each class.
    words_by_label: For each label, the words that only its class has.
    shared_words: The words that all classes share.
    rng: The random generator.
  """
  examples = []
  for _ in range(num_per_class):
    for label, class_words in words_by_label.items():
      text = _synthetic_text(class_words, shared_words, rng)
      examples.append(Example(text, label))
  return examples


def _synthetic_text(
  class_words: Sequence[str],
  shared_words: Sequence[str],
  rng: np.random.Generator,
) -> str:
  """Returns one word of a class and some shared words, in random order."""
  class_word = rng.choice(class_words)
  other_words = rng.choice(
    shared_words, _NUM_SHARED_WORDS_IN_TEXT, replace=False
  )
  words = rng.permutation([class_word, *other_words])
  return " ".join(words.tolist())


def _invented_words(rng: np.random.Generator) -> Iterator[str]:
  """Yields each word of three syllables once, in random order.

  A syllable is a consonant and a vowel. A word is, for example, "midana".
  """
  syllables = []
  for consonant in "bdfgklmnprstvz":
    for vowel in "aeiou":
      syllables.append(consonant + vowel)
  num_syllables = len(syllables)
  # Each number stands for a word: its digits in base `num_syllables` are the
  # indices of the word's syllables.
  for number in rng.permutation(num_syllables**_NUM_SYLLABLES_IN_WORD):
    word = ""
    quotient = number
    for _ in range(_NUM_SYLLABLES_IN_WORD):
      quotient, digit = divmod(quotient, num_syllables)
      word += syllables[digit]
    yield word
