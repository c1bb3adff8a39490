"""Orders of demonstrations: balanced rounds, shuffles and alternation."""

import collections
import itertools

import numpy as np
import pytest

from diffjax.evals.methods.demonstration_orders import (
  alternating,
  balanced,
  shuffled,
)
from diffjax.evals.methods.labelled_texts import Example


def make_examples(counts: dict[str, int]) -> list[Example]:
  """Returns examples with distinct texts, as many of each label as given."""
  examples = []
  for label, count in counts.items():
    for number in range(count):
      examples.append(Example(f"{label}{number}", label))
  return examples


def labels_of(examples: list[Example]) -> list[str]:
  return [example.label for example in examples]


def test_a_round_has_one_example_of_each_label_that_is_left():
  """The label "a" has three examples, so it is in the first three rounds."""
  examples = make_examples({"a": 3, "b": 50, "c": 50, "d": 50})

  ordered = balanced(examples, np.random.default_rng(0))

  labels = labels_of(ordered)
  # Three rounds of four labels, and then 47 rounds of three labels.
  num_labels_with_a = 3 * 4
  rounds_with_a = np.reshape(labels[:num_labels_with_a], (3, 4))
  rounds_without_a = np.reshape(labels[num_labels_with_a:], (47, 3))
  for round_labels in rounds_with_a:
    assert sorted(round_labels) == ["a", "b", "c", "d"]
  for round_labels in rounds_without_a:
    assert sorted(round_labels) == ["b", "c", "d"]


def test_rounds_have_different_orders_of_labels():
  """In 50 rounds, all six orders of three labels occur."""
  examples = make_examples({"b": 50, "c": 50, "d": 50})

  ordered = balanced(examples, np.random.default_rng(0))

  labels = labels_of(ordered)
  rounds = np.reshape(labels, (50, 3)).tolist()
  orders = {tuple(round_labels) for round_labels in rounds}
  assert orders == set(itertools.permutations("bcd"))


@pytest.mark.parametrize("draw_order", [balanced, shuffled, alternating])
def test_each_order_has_the_same_demonstrations(draw_order):
  examples = make_examples({"a": 10, "b": 9, "c": 9})
  rng = np.random.default_rng(0)

  first = draw_order(examples, rng)
  second = draw_order(examples, rng)

  assert sorted(first) == sorted(examples)
  assert sorted(second) == sorted(examples)
  assert first != second


def test_alternating_repeats_one_order_of_the_labels():
  """For example, the labels are "bca" nine times, and then "a"."""
  examples = make_examples({"a": 10, "b": 9, "c": 9})
  rng = np.random.default_rng(0)

  for _ in range(5):
    ordered = alternating(examples, rng)

    labels = "".join(labels_of(ordered))
    first_round = labels[:3]
    assert collections.Counter(first_round) == {"a": 1, "b": 1, "c": 1}
    # "a" has one example more.
    assert labels == first_round * 9 + "a"
