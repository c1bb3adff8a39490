"""Orders of demonstrations: balanced rounds, shuffles and alternation."""

import collections

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


@pytest.fixture(scope="module")
def balanced_examples() -> list[Example]:
  """Balanced examples: three of the label "a", and 50 of each other label."""
  examples = make_examples({"a": 3, "b": 50, "c": 50, "d": 50})
  ordered = balanced(examples, np.random.default_rng(0))
  assert sorted(ordered) == sorted(examples)
  return ordered


def test_rounds_are_balanced_until_a_class_has_no_more(balanced_examples):
  """A round has one example of each class that has examples left.

  The classes are "a" with 3 examples, and "b", "c" and "d" with 50 each.
  """
  # Three rounds contain all four labels, and later ones only b, c and d.
  num_with_all_labels = 3 * 4
  for stop in range(1, len(balanced_examples)):
    labels = [example.label for example in balanced_examples[:stop]]
    counts = [labels.count("b"), labels.count("c"), labels.count("d")]
    assert max(counts) - min(counts) <= 1
    if stop <= num_with_all_labels:
      counts.append(labels.count("a"))
      assert max(counts) - min(counts) <= 1


def test_rounds_have_different_orders_of_labels(balanced_examples):
  """The classes are "a" with 3 examples, and "b", "c" and "d" with 50 each."""
  # Three rounds of four examples come first, then rounds of b, c and d.
  orders = set()
  for start in range(3 * 4, 150, 3):
    round_examples = balanced_examples[start : start + 3]
    orders.add(tuple(example.label for example in round_examples))

  # Three labels have six orders.
  assert len(orders) > 3


@pytest.mark.parametrize("order", [shuffled, alternating])
def test_each_order_has_the_same_demonstrations(order):
  """`order` is a function that draws an order of examples."""
  examples = make_examples({"a": 10, "b": 9, "c": 9})
  rng = np.random.default_rng(0)

  first = order(examples, rng)
  second = order(examples, rng)

  assert sorted(first) == sorted(examples)
  assert sorted(second) == sorted(examples)
  assert first != second


def test_alternating_repeats_one_order_of_the_labels():
  """For example, the labels are "bca" nine times, and then "a"."""
  examples = make_examples({"a": 10, "b": 9, "c": 9})
  rng = np.random.default_rng(0)

  for _ in range(5):
    ordered = alternating(examples, rng)

    labels = "".join(example.label for example in ordered)
    first_round = labels[:3]
    assert collections.Counter(first_round) == {"a": 1, "b": 1, "c": 1}
    # "a" has one example more.
    assert labels == first_round * 9 + "a"
