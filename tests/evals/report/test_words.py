"""Tokens form words, and labels of words do not overlap."""

from collections.abc import Sequence

from diffjax.evals.report.words import Word, readable, words_of


def texts(words: Sequence[Word]) -> list[str]:
  """Returns the texts of words."""
  return [word.text for word in words]


def test_tokens_form_words_and_groups_of_punctuation():
  """A word has the index of its first token, and the one after its last."""
  tokens = ["d", "e", "f", " ", "a", "_", "1", "(", ")", ":", "\n"]
  tokens += [" the", " cat", "s"]

  words = words_of(tokens)

  assert texts(words) == ["def", "a_1", "():", "the", "cats"]
  # The tokens 4 to 6, and the tokens 12 and 13.
  assert words[1] == Word(start=4, end=7, text="a_1")
  assert words[4] == Word(start=12, end=14, text="cats")


def test_words_are_preferred_to_punctuation():
  """Labels are at least `gap` tokens apart, so that they do not overlap."""
  words = words_of(["x", "=", "y", ";", "z"])

  assert texts(readable(words, gap=1)) == ["x", "=", "y", ";", "z"]
  assert texts(readable(words, gap=2)) == ["x", "y", "z"]
