"""Labels of the tokens of a map: words, since single tokens, bytes for instance, have no room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Word(NamedTuple):
  """Tokens that make a word, a number or a sign.

  Attributes:
    start, end: its first token, and the one after its last.
    text: what a label shows.
  """

  start: int
  end: int
  text: str


def words_of(texts: Sequence[str]) -> list[Word]:
  """Groups the texts of tokens: letters, digits and underscores that follow each other are one word, as are signs; blanks have no label."""
  words: list[Word] = []
  for place, text in enumerate(texts):
    shown = text.strip()
    if not shown:
      continue
    joins = (
      words
      and words[-1].end == place
      and text[0] == shown[0]
      and _is_word(words[-1].text[-1]) == _is_word(shown[0])
    )
    if joins:
      words[-1] = words[-1]._replace(end=place + 1, text=words[-1].text + shown)
    else:
      words.append(Word(place, place + 1, shown))
  return words


def readable(words: Sequence[Word], gap: float) -> list[Word]:
  """Those of the words whose labels stand at least `gap` tokens apart. Words go before signs."""
  chosen: list[Word] = []
  for word in sorted(words, key=lambda word: not _is_word(word.text[0])):
    if all(
      abs(word.start + word.end - other.start - other.end) / 2 >= gap
      for other in chosen
    ):
      chosen.append(word)
  return sorted(chosen)


def _is_word(character: str) -> bool:
  return (
    character.isalnum() or character in "_\ufffd"
  )  # a byte of a letter that takes several
