"""Associative recall with distractors: pairs of a key and a value among filler words, then questions for the values of some keys.

    k17:v3 n5 k90:v2 n8 n8 k4:v3 … ?  k90 v2 k17 v3 …

A pair is one token, so that the last key only has to find its own pair among the others. Two layers learn this in a minute; with keys and
values as separate tokens they did not in 2,000 steps. The loss covers the words after "?" (config.data.prompt_field): the next key can only
be guessed, at the same cost for every model; its value can be looked up. Keys of one context are all different. Distractors are pairs that
are not asked for. Before the question nothing tells them from the others, so the model has to keep all pairs apart.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments import words

KEYS, VALUES, FILLERS = 96, 8, 32
WORDS = [
  words.SEPARATOR,
  "?",
  *(f"k{key}:v{value}" for key in range(KEYS) for value in range(VALUES)),
  *(f"k{key}" for key in range(KEYS)),
  *(f"v{value}" for value in range(VALUES)),
  *(f"n{filler}" for filler in range(FILLERS)),
]
ASKED = 8  # pairs that are asked for, in training


@dataclasses.dataclass(frozen=True)
class Training:
  """Limits of the training contexts."""

  # Most distractors of a context. The logarithm of their number is uniform, so that some examples are easy
  distractors: int = 88
  # Most words before the question. A random part of what the pairs leave is filler
  length: int = 96


class Example(NamedTuple):
  """Words of a context, ended by "?"; keys and values of the pairs asked for; the positions of these pairs in the context."""

  context: list[str]
  answer: list[str]
  places: list[int]


def make_example(
  rng: np.random.Generator, *, asked: int, distractors: int, fillers: int
) -> Example:
  """An example with these numbers of pairs and of filler words, in random order."""
  pairs = asked + distractors
  keys, values = rng.permutation(KEYS)[:pairs], rng.integers(0, VALUES, pairs)
  items = rng.permutation(
    pairs + fillers
  ).tolist()  # an item below `pairs` is a pair, the others are filler
  context = [
    f"k{keys[item]}:v{values[item]}"
    if item < pairs
    else f"n{rng.integers(FILLERS)}"
    for item in items
  ]
  answer = [
    word
    for pair in range(asked)
    for word in (f"k{keys[pair]}", f"v{values[pair]}")
  ]
  return Example(
    [*context, "?"], answer, [items.index(pair) for pair in range(asked)]
  )


def training_examples(
  rng: np.random.Generator, count: int, training: Training
) -> Iterator[Example]:
  """Random examples within the limits."""
  for _ in range(count):
    distractors = int((training.distractors + 1) ** rng.random()) - 1
    room = training.length - ASKED - distractors
    yield make_example(
      rng,
      asked=ASKED,
      distractors=distractors,
      fillers=int(rng.integers(0, room + 1)),
    )


def write(
  directory: pathlib.Path, count: int, training: Training
) -> dict[str, str]:
  """Writes training and validation examples and the tokenizer, unless they exist.

  Args:
    directory: where to write.
    count: training examples.
    training: their limits.

  Returns:
    The fields of a config that point to the files.
  """

  def records(seed: int, number: int) -> Iterator[dict[str, str]]:
    for example in training_examples(
      np.random.default_rng(seed), number, training
    ):
      yield {
        "context": " ".join(example.context),
        "answer": " ".join(example.answer),
      }

  examples = {"train": records(0, count), "validation": records(1, 512)}
  return words.write(
    directory,
    WORDS,
    examples,
    [count, dataclasses.asdict(training), WORDS, ASKED],
  )
