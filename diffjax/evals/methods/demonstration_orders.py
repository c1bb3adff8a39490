"""Orders of demonstrations: random, balanced by class, or alternating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from diffjax.evals.methods.labelled_texts import Example

Item = TypeVar("Item")


def shuffled(items: Sequence[Item], rng: np.random.Generator) -> list[Item]:
  """Returns the items in random order."""
  return [items[index] for index in rng.permutation(len(items))]


def balanced(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[Example]:
  """Returns the examples in an order whose beginnings have balanced classes.

  The order consists of rounds of one example per class. Each round has the
  classes in random order. A class without further examples is left out of later
  rounds. For example, examples of the classes a, b and c can have the order
  b a c, a c b, c b, b.
  """
  ordered = []
  for round_examples in _rounds(_shuffled_classes(examples, rng)):
    ordered += shuffled(round_examples, rng)
  return ordered


def alternating(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[Example]:
  """Returns the examples in an order that alternates between the classes.

  The order consists of rounds of one example per class. All rounds have the
  same order of classes, which is random. A class without further examples is
  left out of later rounds. For example, examples of the classes a, b and c can
  have the order b a c, b a c, b c, b.
  """
  classes = shuffled(_shuffled_classes(examples, rng), rng)
  ordered = []
  for round_examples in _rounds(classes):
    ordered += round_examples
  return ordered


def _shuffled_classes(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[list[Example]]:
  """Groups examples by class, and shuffles the examples of each class.

  The classes are sorted by their labels.
  """
  examples_by_label: dict[str, list[Example]] = {}
  for example in shuffled(examples, rng):
    examples_by_label.setdefault(example.label, []).append(example)
  return [examples_by_label[label] for label in sorted(examples_by_label)]


def _rounds(classes: Sequence[Sequence[Example]]) -> Iterator[list[Example]]:
  """Yields the first example of each class, then the second, and so on."""
  num_rounds = max(map(len, classes), default=0)
  for index in range(num_rounds):
    yield [examples[index] for examples in classes if index < len(examples)]
