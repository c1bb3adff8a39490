"""Classification from demonstrations. Every episode assigns words to classes anew, and only its demonstrations tell them.

    w7:y4 w20:y2 w7:y4 w3:y4 w7:y1 …  w20 y2 w7 y4 …

A demonstration is one token for a word and the label shown with it, so that a query's word only has to find its own demonstrations among
the others. Two layers learn this in a minute; with words and labels as separate tokens they did not in ten. One demonstration in three
shows another class's label, so all demonstrations of a word have to be weighed alike. An answer that depends on where they stand depends
on their order.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from diffjax.evals.methods.demonstration_orders import shuffled
from diffjax.evals.methods.labelled_texts import Example
from experiments import words

WORDS, LABELS = 24, 8
VOCABULARY = [
  words.SEPARATOR,
  *(f"w{word}:y{label}" for word in range(WORDS) for label in range(LABELS)),
  *(f"w{word}" for word in range(WORDS)),
  *(f"y{label}" for label in range(LABELS)),
]


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of an episode."""

  # Classes, with labels drawn from all LABELS; the words are divided among them evenly
  classes: int = 4
  # Demonstrations of each word; in training, on average
  demonstrations: int = 3
  # Share of the demonstrations that show another class's label
  mislabelled: float = 1 / 3
  # Queries of an episode in training
  queries: int = 16


SIZES = Sizes()


class Episode(NamedTuple):
  """Demonstrations ("w7:y4" and the label that it shows) and queries ("w7" and its class's label)."""

  demonstrations: list[Example]
  queries: list[Example]


def training_episode(rng: np.random.Generator, sizes: Sizes) -> Episode:
  """Random demonstrations and queries of two or more words. The logarithm of their number is uniform, so that some episodes are easy."""
  classes, labels = _draw(rng, sizes)
  used = rng.permutation(WORDS)[: round(2 * (WORDS / 2) ** rng.random())]
  count = WORDS * sizes.demonstrations
  shown = rng.choice(used, count)
  others = rng.integers(1, sizes.classes, count) * (
    rng.random(count) < sizes.mislabelled
  )
  demonstrations = [
    _shown(word, labels[label])
    for word, label in zip(
      shown, (classes[shown] + others) % sizes.classes, strict=True
    )
  ]
  return Episode(
    demonstrations,
    [
      Example(f"w{word}", f"y{labels[classes[word]]}")
      for word in rng.choice(used, sizes.queries)
    ],
  )


def balanced_episode(rng: np.random.Generator, sizes: Sizes) -> Episode:
  """An episode that shows every word equally often, and every label, right or wrong, too; every word is a query."""
  classes, labels = _draw(rng, sizes)
  wrong = round(sizes.demonstrations * sizes.mislabelled)
  demonstrations, seen = [], [0] * sizes.classes
  for word, own in enumerate(classes):
    others = [
      (own + 1 + (seen[own] + number) % (sizes.classes - 1)) % sizes.classes
      for number in range(wrong)
    ]
    seen[own] += wrong
    demonstrations += [
      _shown(word, labels[label])
      for label in [own] * (sizes.demonstrations - wrong) + others
    ]
  return Episode(
    shuffled(demonstrations, rng),
    [
      Example(f"w{word}", f"y{labels[own]}") for word, own in enumerate(classes)
    ],
  )


def blocked(examples: list[Example], rng: np.random.Generator) -> list[Example]:
  """All demonstrations of one class, then all of the next; classes and demonstrations in random order. The opposite of `alternating`."""
  labels = rng.permutation(
    sorted({example.label for example in examples})
  ).tolist()
  return sorted(
    shuffled(examples, rng), key=lambda example: labels.index(example.label)
  )


def _draw(
  rng: np.random.Generator, sizes: Sizes
) -> tuple[np.ndarray, np.ndarray]:
  """The class of every word, as a number, and the classes' labels."""
  return rng.permutation(np.arange(WORDS) % sizes.classes), rng.permutation(
    LABELS
  )[: sizes.classes]


def _shown(word: int, label: int) -> Example:
  return Example(f"w{word}:y{label}", f"y{label}")


def write(directory: pathlib.Path, count: int, sizes: Sizes) -> dict[str, str]:
  """Writes `count` training episodes, 512 for validation, and the tokenizer; returns the fields of a config that point to them."""

  def records(seed: int, number: int) -> Iterator[dict[str, str]]:
    rng = np.random.default_rng(seed)
    for _ in range(number):
      episode = training_episode(rng, sizes)
      answer = " ".join(
        f"{query.text} {query.label}" for query in episode.queries
      )
      yield {
        "context": " ".join(example.text for example in episode.demonstrations),
        "answer": answer,
      }

  examples = {"train": records(0, count), "validation": records(1, 512)}
  return words.write(
    directory,
    VOCABULARY,
    examples,
    [count, dataclasses.asdict(sizes), VOCABULARY],
  )
