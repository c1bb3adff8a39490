"""Comparison of a text with references: exact match and ROUGE-L.

ROUGE-L is the F1 of the longest common subsequence of words. A word is a
sequence of letters, marks and digits of any script. ASCII words are stemmed as
English. In a script without spaces (Chinese, Japanese, Thai, …), each letter is
a word. Exact match ignores case, punctuation, articles and spaces.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Callable, Sequence

from diffjax.config import UserError

# Returns ROUGE-L of a reference and a text, from 0 to 1.
RougeL = Callable[[str, str], float]

_ARTICLES = ("a", "an", "the")

# Shorter ASCII words are not stemmed, as in rouge-score.
_MIN_STEMMED_LENGTH = 4

# The patterns are in the syntax of the package `regex`. There, && is the
# intersection of two sets of characters, and -- is their difference.
_SCRIPTS_WITHOUT_SPACES = (
  r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
)
# A letter of a script without spaces, with its marks.
_LETTER = rf"[[{_SCRIPTS_WITHOUT_SPACES}]&&[\p{{L}}\p{{N}}]]\p{{M}}*"
# A word of the other scripts.
_WORD = rf"[\p{{L}}\p{{M}}\p{{N}}--[{_SCRIPTS_WITHOUT_SPACES}]]+"


def is_match(text: str, references: Sequence[str]) -> bool:
  """Returns whether a text equals one of the references.

  Case, punctuation, articles and spaces are ignored.
  """
  words = _words_to_match(text)
  for reference in references:
    if words == _words_to_match(reference):
      return True
  return False


def _words_to_match(text: str) -> list[str]:
  """Returns the words of a text, without case, punctuation and articles."""
  kept_text = ""
  for character in _normalize(text):
    if not _is_punctuation(character):
      kept_text += character
  return [word for word in kept_text.split() if word not in _ARTICLES]


def _normalize(text: str) -> str:
  """Returns a text in Unicode's normal form NFKC, without case."""
  return unicodedata.normalize("NFKC", text).casefold()


def _is_punctuation(character: str) -> bool:
  """Returns whether a character is punctuation, of any script."""
  if character in string.punctuation:
    return True
  return unicodedata.category(character).startswith("P")


def load_rouge_l() -> RougeL:
  """Returns a function that computes ROUGE-L of a reference and a text.

  Raises:
    UserError: if rouge-score is not installed.
  """
  try:
    from rouge_score import rouge_scorer

    # The constructor can raise ImportError too.
    tokenizer = _WordTokenizer()
  except ImportError as error:
    raise UserError(
      f"ROUGE-L needs rouge-score, which cannot be imported ({error});"
      " pip install 'diffjax[eval]'"
    ) from error
  scorer = rouge_scorer.RougeScorer(["rougeL"], tokenizer=tokenizer)

  def rouge_l(reference: str, text: str) -> float:
    scores = scorer.score(reference, text)
    return scores["rougeL"].fmeasure

  return rouge_l


class _WordTokenizer:
  """Divides a text into words, in the interface of rouge-score.

  rouge-score's own tokenizer drops all letters except ASCII. For ASCII texts,
  both give the same words.
  """

  def __init__(self) -> None:
    # Imported here, because they come with the extra `eval`.
    import regex
    from nltk.stem import porter

    self._word = regex.compile(f"{_LETTER}|{_WORD}", regex.V1)
    self._stemmer = porter.PorterStemmer()

  def tokenize(self, text: str) -> list[str]:
    """Returns the words of a text, stemmed if they are ASCII."""
    words = []
    for word in self._word.findall(_normalize(text)):
      if word.isascii() and len(word) >= _MIN_STEMMED_LENGTH:
        word = self._stemmer.stem(word)
      words.append(word)
    return words
