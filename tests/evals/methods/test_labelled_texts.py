"""Synthetic datasets: their texts, classes and words."""

import collections

import pytest

from diffjax.evals.methods.labelled_texts import Dataset, synthetic_dataset


@pytest.fixture(scope="module")
def dataset() -> Dataset:
  """Five classes with three words each."""
  return synthetic_dataset(num_classes=5, num_words=3, seed=1)


def words_by_label(dataset: Dataset) -> dict[str, set[str]]:
  """Returns the words of the training texts of each class."""
  words = collections.defaultdict(set)
  for example in dataset.train:
    words[example.label].update(example.text.split())
  return words


def test_a_seed_determines_the_texts():
  first = synthetic_dataset(num_classes=5, num_words=3, seed=1)
  again = synthetic_dataset(num_classes=5, num_words=3, seed=1)
  other = synthetic_dataset(num_classes=5, num_words=3, seed=2)

  assert again == first
  assert other.train != first.train


def test_the_test_set_is_balanced(dataset):
  """The fixture `dataset` has five classes."""
  train_labels = {example.label for example in dataset.train}
  test_counts = collections.Counter(example.label for example in dataset.test)

  assert len(train_labels) == 5
  # 200 examples of each class.
  assert test_counts == dict.fromkeys(train_labels, 200)


def test_each_class_has_words_that_no_other_class_has(dataset):
  """The fixture `dataset` has five classes with three words each.

  All classes share 20 other words.
  """
  words = words_by_label(dataset)
  shared = set.intersection(*words.values())

  assert len(shared) == 20
  all_class_words = set()
  for label_words in words.values():
    class_words = label_words - shared
    assert len(class_words) == 3
    all_class_words |= class_words
  assert len(all_class_words) == 5 * 3


def test_each_text_has_one_word_of_its_class_and_no_label(dataset):
  words = words_by_label(dataset)
  shared = set.intersection(*words.values())

  for example in dataset.train + dataset.test:
    text_words = set(example.text.split())
    assert len(text_words - shared) == 1
    assert text_words.isdisjoint(words)
