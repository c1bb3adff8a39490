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
  """Returns all examples in rounds of one example per class.

  A round has the classes in random order. A class without further examples is
  left out of later rounds. For example, with classes a, b and c: b a c, a c b,
  c b, b.
  """
  ordered = []
  for round_examples in _rounds(_by_class(examples, rng)):
    ordered += shuffled(round_examples, rng)
  return ordered


def alternating(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[Example]:
  """Returns all examples in rounds that have the same order of classes.

  That order is random. A class without further examples is left out of later
  rounds. For example, with classes a, b and c: b a c, b a c, b c, b.
  """
  classes = shuffled(_by_class(examples, rng), rng)
  ordered = []
  for round_examples in _rounds(classes):
    ordered += round_examples
  return ordered


def _by_class(
  examples: Sequence[Example], rng: np.random.Generator
) -> list[list[Example]]:
  """Returns the examples of each class in random order, sorted by label."""
  classes: dict[str, list[Example]] = {}
  for example in shuffled(examples, rng):
    classes.setdefault(example.label, []).append(example)
  return [classes[label] for label in sorted(classes)]


def _rounds(classes: Sequence[Sequence[Example]]) -> Iterator[list[Example]]:
  """Yields the first example of each class, then the second, and so on."""
  num_rounds = max(map(len, classes), default=0)
  for index in range(num_rounds):
    yield [examples[index] for examples in classes if index < len(examples)]
