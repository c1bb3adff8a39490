"""Associative recall with distractors: pairs of a key and a value among filler, then the values of some keys are asked for.

    k17:v3 n5 k90:v2 n8 n8 k4:v3 … ?  k90 v2 k17 v3 …

A pair is one token, so that the last key has to find its own pair among the others, and nothing else: two layers learn it in a minute, and
keys and values as tokens of their own not in 2,000 steps. The words after
"?" are learnt, as answers (config.data.prompt_field): a key that is asked for can only be guessed, at the same cost for every model, and
its value be looked up. Keys of one context are all different; pairs that are not asked for are distractors, which differ from the others
in nothing before the question, so that the model has to keep all apart.
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
  """What contexts are drawn from."""

  # Pairs not asked for, at most; their number's logarithm is uniform, so that there are easy examples to begin with
  distractors: int = 88
  # Words before the question, at most; filler takes up any part of what the pairs leave
  length: int = 96


class Example(NamedTuple):
  """Words of a context, ended by "?"; keys and values of the pairs asked for; where in the context each pair stands."""

  context: list[str]
  answer: list[str]
  places: list[int]


def make_example(rng: np.random.Generator, *, asked: int, distractors: int, fillers: int) -> Example:
  """An example with these numbers of pairs and of filler words, in random order."""
  pairs = asked + distractors
  keys, values = rng.permutation(KEYS)[:pairs], rng.integers(0, VALUES, pairs)
  items = rng.permutation(pairs + fillers).tolist()  # an item below `pairs` is a pair, the others are filler
  context = [f"k{keys[item]}:v{values[item]}" if item < pairs else f"n{rng.integers(FILLERS)}" for item in items]
  answer = [word for pair in range(asked) for word in (f"k{keys[pair]}", f"v{values[pair]}")]
  return Example([*context, "?"], answer, [items.index(pair) for pair in range(asked)])


def training_examples(rng: np.random.Generator, count: int, training: Training) -> Iterator[Example]:
  """Examples of any number of distractors and of fillers that the limits allow."""
  for _ in range(count):
    distractors = int((training.distractors + 1) ** rng.random()) - 1
    room = training.length - ASKED - distractors
    yield make_example(rng, asked=ASKED, distractors=distractors, fillers=int(rng.integers(0, room + 1)))


def write(directory: pathlib.Path, count: int, training: Training) -> dict[str, str]:
  """Writes training and validation examples and the tokenizer, unless they are there.

  Args:
    directory: where.
    count: training examples.
    training: what they are drawn from.

  Returns:
    The fields of a config that say where they lie.
  """

  def records(seed: int, number: int) -> Iterator[dict[str, str]]:
    for example in training_examples(np.random.default_rng(seed), number, training):
      yield {"context": " ".join(example.context), "answer": " ".join(example.answer)}

  examples = {"train": records(0, count), "validation": records(1, 512)}
  return words.write(directory, WORDS, examples, [count, dataclasses.asdict(training), WORDS, ASKED])
