"""The labels of attention maps: words, because single tokens have no room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Decoders write this for the bytes of an incomplete character.
_REPLACEMENT_CHARACTER = "\ufffd"


class Word(NamedTuple):
  """Consecutive tokens that form a word, a number or punctuation.

  Attributes:
    start: The index of the first token.
    end: The index after the last token.
    text: The text of the label.
  """

  start: int
  end: int
  text: str

  @property
  def middle(self) -> float:
    """The middle of the word on an axis where token i is from i to i + 1."""
    return (self.start + self.end) / 2


def words_of(texts: Sequence[str]) -> list[Word]:
  """Returns the words that consecutive tokens form.

  Letters, digits and underscores form one word, and so do other characters. A
  token that begins with a blank begins a word. Blank tokens have no label. For
  example, the tokens "d", "e", "f", " a", "(", ")" form the words "def", "a"
  and "()".

  Args:
    texts: The text of each token.
  """
  words: list[Word] = []
  for index, text in enumerate(texts):
    label = text.strip()
    if not label:
      continue
    if words and _continues(words[-1], index, text):
      previous = words.pop()
      words.append(Word(previous.start, index + 1, previous.text + label))
    else:
      words.append(Word(index, index + 1, label))
  return words


def readable(words: Sequence[Word], gap: float) -> list[Word]:
  """Returns words whose labels do not overlap, in the order of the text.

  Words with letters or digits are chosen first, and then punctuation that still
  has room.

  Args:
    words: The words of a text.
    gap: The minimum distance between two labels, in tokens.
  """
  with_letters = []
  punctuation = []
  for word in words:
    if _is_letter(word.text[0]):
      with_letters.append(word)
    else:
      punctuation.append(word)

  chosen: list[Word] = []
  for word in with_letters + punctuation:
    distances = [abs(word.middle - previous.middle) for previous in chosen]
    if min(distances, default=gap) >= gap:
      chosen.append(word)
  return sorted(chosen)


def _continues(word: Word, index: int, text: str) -> bool:
  """Returns True if a token continues the previous word.

  Args:
    word: The previous word.
    index: The index of the token.
    text: Its text, which is not blank.
  """
  is_adjacent = word.end == index
  begins_with_blank = text[0].isspace()
  if not is_adjacent or begins_with_blank:
    return False
  return _is_letter(word.text[-1]) == _is_letter(text[0])


def _is_letter(character: str) -> bool:
  """Returns True for letters, digits, underscores and parts of a letter."""
  return character.isalnum() or character in ("_", _REPLACEMENT_CHARACTER)
