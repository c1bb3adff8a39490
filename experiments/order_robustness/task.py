"""Classification from demonstrations: the words of each class are shown.

Every episode assigns words to classes anew. Only its demonstrations tell which
word belongs to which class:

    w7:y4 w20:y2 w7:y4 w3:y4 w7:y1 …  w20 y2 w7 y4 …

A demonstration is a single token for a word and the label shown with it, so a
query only has to find the demonstrations of its word. A model of two layers
learns this in a minute. With separate tokens for words and labels, it had not
learned it after ten minutes.

A third of the demonstrations show the label of another class. A model therefore
has to weigh all demonstrations of a word equally. If its answer depends on
their positions, it depends on their order.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from diffjax.evals.methods.demonstration_orders import shuffled
from diffjax.evals.methods.labelled_texts import Example
from experiments import words

WORDS = 24
LABELS = 8

# The number of episodes for the validation during training.
_VALIDATION_EPISODES = 512


def _vocabulary() -> list[str]:
  """Returns all tokens: demonstrations, words and labels."""
  vocabulary = [words.SEPARATOR]
  for word in range(WORDS):
    for label in range(LABELS):
      vocabulary.append(f"w{word}:y{label}")
  for word in range(WORDS):
    vocabulary.append(f"w{word}")
  for label in range(LABELS):
    vocabulary.append(f"y{label}")
  return vocabulary


VOCABULARY = _vocabulary()


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of an episode.

  Attributes:
    classes: The number of classes. Their labels are drawn from all LABELS. The
      words are divided evenly among the classes.
    demonstrations: The number of demonstrations of each word. In training, the
      mean number.
    mislabelled: The share of demonstrations with the label of another class.
    queries: The number of queries of an episode in training.
  """

  classes: int = 4
  demonstrations: int = 3
  mislabelled: float = 1 / 3
  queries: int = 16


SIZES = Sizes()


class Episode(NamedTuple):
  """Demonstrations and queries that have the same classes.

  Attributes:
    demonstrations: Texts like "w7:y4", with the label that they show.
    queries: Texts like "w7", with the label of the word's class.
  """

  demonstrations: list[Example]
  queries: list[Example]


def training_episode(rng: np.random.Generator, sizes: Sizes) -> Episode:
  """Returns an episode of random demonstrations and queries.

  A demonstration shows a word with a label, which is sometimes wrong. A query
  asks for the right label of a word. An episode uses two words or more. The
  logarithm of their number is uniform, so some episodes are easy.

  Args:
    rng: The random generator.
    sizes: The sizes of the episode.
  """
  word_classes, class_labels = _draw_classes(rng, sizes)
  # The order of these draws must stay: the committed results depend on it.
  permutation = rng.permutation(WORDS)
  # From 2 to WORDS, with a uniform logarithm.
  num_used = round(2 * (WORDS / 2) ** rng.random())
  used_words = permutation[:num_used]
  count = WORDS * sizes.demonstrations
  shown_words = rng.choice(used_words, count)
  # A class plus 1 to classes − 1, modulo the number of classes, is another
  # class.
  wrong_shifts = rng.integers(1, sizes.classes, count)
  is_wrong = rng.random(count) < sizes.mislabelled
  shifts = np.where(is_wrong, wrong_shifts, 0)
  shown_classes = (word_classes[shown_words] + shifts) % sizes.classes

  demonstrations = []
  for word, shown_class in zip(shown_words, shown_classes, strict=True):
    demonstrations.append(_demonstration(word, class_labels[shown_class]))
  queries = []
  for word in rng.choice(used_words, sizes.queries):
    label = class_labels[word_classes[word]]
    queries.append(_query(word, label))
  return Episode(demonstrations, queries)


def balanced_episode(rng: np.random.Generator, sizes: Sizes) -> Episode:
  """Returns an episode for the evaluation, with balanced demonstrations.

  Every word is shown equally often, and so is every label. The wrong labels are
  balanced too. Every word is a query.

  Args:
    rng: The random generator.
    sizes: The sizes of the episode.
  """
  word_classes, class_labels = _draw_classes(rng, sizes)
  num_wrong = round(sizes.demonstrations * sizes.mislabelled)
  num_right = sizes.demonstrations - num_wrong
  # The number of wrong labels given so far to the words of each class. It
  # selects the next wrong class in turn.
  num_given = [0] * sizes.classes

  demonstrations = []
  queries = []
  for word, right_class in enumerate(word_classes):
    right_label = class_labels[right_class]
    demonstrations += [_demonstration(word, right_label)] * num_right
    for _ in range(num_wrong):
      shift = 1 + num_given[right_class] % (sizes.classes - 1)
      wrong_class = (right_class + shift) % sizes.classes
      demonstrations.append(_demonstration(word, class_labels[wrong_class]))
      num_given[right_class] += 1
    queries.append(_query(word, right_label))
  return Episode(shuffled(demonstrations, rng), queries)


def blocked(examples: list[Example], rng: np.random.Generator) -> list[Example]:
  """Returns the demonstrations class by class: the opposite of `alternating`.

  The order of the classes, and the order within a class, are random.

  Args:
    examples: The demonstrations.
    rng: The random generator.
  """
  labels = {example.label for example in examples}
  label_order = rng.permutation(sorted(labels)).tolist()

  def block(example: Example) -> int:
    return label_order.index(example.label)

  return sorted(shuffled(examples, rng), key=block)


def _draw_classes(
  rng: np.random.Generator, sizes: Sizes
) -> tuple[Int[np.ndarray, "words"], Int[np.ndarray, "classes"]]:
  """Returns the class of every word, and the label of every class."""
  word_classes = rng.permutation(np.arange(WORDS) % sizes.classes)
  class_labels = rng.permutation(LABELS)[: sizes.classes]
  return word_classes, class_labels


def _demonstration(word: int, label: int) -> Example:
  return Example(f"w{word}:y{label}", f"y{label}")


def _query(word: int, label: int) -> Example:
  return Example(f"w{word}", f"y{label}")


def write(directory: pathlib.Path, count: int, sizes: Sizes) -> dict[str, str]:
  """Writes training and validation episodes and the tokenizer.

  Existing files are kept.

  Args:
    directory: The directory to write to.
    count: The number of training episodes.
    sizes: The sizes of the episodes.

  Returns:
    The config fields that point to the files.
  """
  examples = {
    "train": _records(0, count, sizes),
    "validation": _records(1, _VALIDATION_EPISODES, sizes),
  }
  content = [count, dataclasses.asdict(sizes), VOCABULARY]
  return words.write(directory, VOCABULARY, examples, content)


def _records(seed: int, count: int, sizes: Sizes) -> Iterator[dict[str, str]]:
  """Yields random training episodes, as records of a JSONL file."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    episode = training_episode(rng, sizes)
    context = [example.text for example in episode.demonstrations]
    answer = [f"{query.text} {query.label}" for query in episode.queries]
    yield {"context": " ".join(context), "answer": " ".join(answer)}
