"""Exact match and ROUGE-L, in English and in other scripts."""

import numpy as np
import pytest

from diffjax.evals.methods import text_overlap


@pytest.mark.parametrize(
  "text, references",
  [
    pytest.param("The  Eiffel-Tower!", ["x", "eiffeltower"], id="punctuation"),
    pytest.param("A dog", ["dog"], id="article"),
    pytest.param("«Киев».", ["киев"], id="Cyrillic"),
    pytest.param("北京。", ["北京"], id="Chinese"),
    pytest.param("“Paris”…", ["Paris"], id="quotes"),
    pytest.param("¿Qué?", ["Qué"], id="Spanish"),
    pytest.param("２０２４", ["2024"], id="wide digits"),
    pytest.param("STRASSE", ["Straße"], id="German"),
  ],
)
def test_exact_match_ignores_case_articles_and_punctuation(text, references):
  assert text_overlap.is_match(text, references)


@pytest.mark.parametrize(
  "text, reference",
  [
    pytest.param("Eiffel", "Eiffel Tower", id="part"),
    pytest.param("", "dog", id="empty"),
    pytest.param("Киев", "Минск", id="Cyrillic"),
    pytest.param("", "Киев", id="empty, Cyrillic"),
    pytest.param("é", "e", id="accent"),
  ],
)
def test_other_texts_do_not_match(text, reference):
  assert not text_overlap.is_match(text, [reference])


def test_rouge_l_of_ascii_texts_is_that_of_rouge_score():
  """The library `rouge_score` is the reference for texts in ASCII.

  It splits texts into words, and takes their stems.
  """
  rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
  reference_scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
  rouge_l = text_overlap.load_rouge_l()
  rng = np.random.default_rng(0)
  # Words that have a stem, are split, or have characters that are dropped.
  words = "Dogs running runner's U.S.A. 3.5% it_is DON'T a,b x2 ties _ -- 1st"
  ascii_characters = [chr(code) for code in range(128)]

  def random_text() -> str:
    eight_words = rng.choice(words.split(), 8)
    nine_characters = rng.choice(ascii_characters, 9)
    return " ".join(eight_words) + "".join(nine_characters)

  for _ in range(100):
    reference = random_text()
    text = random_text()
    scores = reference_scorer.score(reference, text)
    # Both compute the F-measure by the same formula, without a difference in
    # rounding.
    expected = scores["rougeL"].fmeasure
    assert rouge_l(reference, text) == expected, (reference, text)


@pytest.mark.parametrize(
  "reference, text, expected",
  [
    pytest.param("Сегодня в Киеве дождь", "Сегодня в Киеве дождь", 1.0),
    # One of two words.
    pytest.param("Киев 2024", "Минск 2024", 0.5),
    pytest.param("КИЕВ", "киев", 1.0),
    pytest.param("今天下雨", "今天下雨", 1.0),
    # Three of four characters, and of three in the other text.
    pytest.param("今天下雨", "今天雨", 2 * (3 / 4) / (3 / 4 + 1)),
    # Four of five characters: 东 and 東 differ.
    pytest.param("东京タワー", "東京タワー", 4 / 5),
    # Composed and decomposed characters are equal.
    pytest.param("caf\u00e9", "cafe\u0301", 1.0),
    pytest.param("café", "cafe", 0.0),
    pytest.param("２０２４", "2024", 1.0),
    # A vowel sign belongs to its word or letter.
    pytest.param("हिन्दी में", "हिन्दी है", 0.5),
    pytest.param("กำ", "ก", 0.0),
    pytest.param("שָׁלוֹם", "שָׁלוֹם", 1.0),
    pytest.param("မြန်မာ", "မြန်မာ။", 1.0),
    pytest.param("!?", "…", 0.0),
  ],
)
def test_rouge_l_of_other_scripts(reference, text, expected):
  """ROUGE-L is the F1 of the longest common subsequence of words.

  Chinese characters are words.
  """
  pytest.importorskip("rouge_score")
  rouge_l = text_overlap.load_rouge_l()

  assert rouge_l(reference, text) == pytest.approx(expected)
  # F1 is symmetric.
  assert rouge_l(text, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
  "reference, text, expected",
  [
    # "killed" has the stem "kill".
    pytest.param(
      "police killed the gunman", "police kill the gunman", 1.0, id="stems"
    ),
    # The longest common subsequence is "police killed": 2 of 4 words.
    pytest.param(
      "police killed the gunman", "the gunman police killed", 0.5, id="order"
    ),
    # The longest common subsequence is "a c d": 3 of 4 and 3 of 6 words.
    pytest.param(
      "a b c d",
      "a x c y z d",
      2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6),
      id="gaps",
    ),
  ],
)
def test_rouge_l_of_known_texts(reference, text, expected):
  """ROUGE-L is the F1 of the longest common subsequence of words."""
  pytest.importorskip("rouge_score")
  rouge_l = text_overlap.load_rouge_l()

  assert rouge_l(reference, text) == pytest.approx(expected)
