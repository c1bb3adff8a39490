"""Associative recall with distractors: find the value of a key in a context.

A context has pairs of a key and a value among filler words. It ends with "?".
Then keys of some pairs follow, each with its value:

    k17:v3 n5 k90:v2 n8 n8 k4:v3 … ?  k90 v2 k17 v3 …

A pair is a single token, so the last key only has to find its own pair. A model
of two layers learns this in a minute. With separate tokens for keys and values,
it had not learned it after 2,000 steps.

The loss covers the words after "?" (`config.data.prompt_field`). The next key
can only be guessed, at the same cost for every model. Its value can be looked
up. The keys of a context are different. Distractors are pairs that are not
asked for. Nothing before the question distinguishes them, so the model has to
keep all pairs apart.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments import words

KEYS = 96
VALUES = 8
FILLERS = 32

# The number of pairs that are asked for in a training context.
ASKED = 8

# The number of examples for the validation during training.
_VALIDATION_EXAMPLES = 512


def _vocabulary() -> list[str]:
  """Returns all tokens: pairs, keys, values and fillers."""
  vocabulary = [words.SEPARATOR, "?"]
  for key in range(KEYS):
    for value in range(VALUES):
      vocabulary.append(f"k{key}:v{value}")
  vocabulary += [f"k{key}" for key in range(KEYS)]
  vocabulary += [f"v{value}" for value in range(VALUES)]
  vocabulary += [f"n{filler}" for filler in range(FILLERS)]
  return vocabulary


WORDS = _vocabulary()


@dataclasses.dataclass(frozen=True)
class Training:
  """Limits of the training contexts.

  Attributes:
    distractors: The largest number of distractors. The logarithm of the number
      is uniform, so some examples are easy.
    length: The largest number of words before the question. The words that are
      not pairs are filler, up to a random number.
  """

  distractors: int = 88
  length: int = 96


class Example(NamedTuple):
  """A context and the questions about it.

  Attributes:
    context: The words of the context. The last one is "?".
    answer: The keys and values of the pairs that are asked for, in turn.
    places: The positions of these pairs in the context.
  """

  context: list[str]
  answer: list[str]
  places: list[int]


def make_example(
  rng: np.random.Generator, *, asked: int, distractors: int, fillers: int
) -> Example:
  """Returns a random example of associative recall.

  Its context has the pairs and the filler words in random order.

  Args:
    rng: The random generator.
    asked: The number of pairs that are asked for.
    distractors: The number of further pairs.
    fillers: The number of filler words.
  """
  pairs = asked + distractors
  # All keys of a context are different.
  keys = rng.permutation(KEYS)[:pairs]
  values = rng.integers(0, VALUES, pairs)
  # Items below `pairs` are pairs, and the first ones are asked for. The other
  # items are filler.
  items = rng.permutation(pairs + fillers).tolist()

  context = []
  for item in items:
    if item < pairs:
      context.append(f"k{keys[item]}:v{values[item]}")
    else:
      context.append(f"n{rng.integers(FILLERS)}")
  context.append("?")

  answer = []
  for pair in range(asked):
    answer += [f"k{keys[pair]}", f"v{values[pair]}"]
  places = [items.index(pair) for pair in range(asked)]
  return Example(context, answer, places)


def training_examples(
  rng: np.random.Generator, count: int, training: Training
) -> Iterator[Example]:
  """Yields random examples within the limits of the training.

  Args:
    rng: The random generator.
    count: The number of examples.
    training: The limits.
  """
  for _ in range(count):
    # The logarithm of 1 + distractors is uniform.
    distractors = int((training.distractors + 1) ** rng.random()) - 1
    max_fillers = training.length - ASKED - distractors
    fillers = int(rng.integers(0, max_fillers + 1))
    yield make_example(
      rng, asked=ASKED, distractors=distractors, fillers=fillers
    )


def write(
  directory: pathlib.Path, count: int, training: Training
) -> dict[str, str]:
  """Writes training and validation examples and the tokenizer.

  Existing files are kept.

  Args:
    directory: The directory to write to.
    count: The number of training examples.
    training: The limits of the examples.

  Returns:
    The config fields that point to the files.
  """
  examples = {
    "train": _records(0, count, training),
    "validation": _records(1, _VALIDATION_EXAMPLES, training),
  }
  content = [count, dataclasses.asdict(training), WORDS, ASKED]
  return words.write(directory, WORDS, examples, content)


def _records(
  seed: int, count: int, training: Training
) -> Iterator[dict[str, str]]:
  """Yields random examples, as records of a JSONL file."""
  rng = np.random.default_rng(seed)
  for example in training_examples(rng, count, training):
    context = " ".join(example.context)
    yield {"context": context, "answer": " ".join(example.answer)}
