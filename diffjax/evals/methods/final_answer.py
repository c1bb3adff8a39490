"""The final answer in a solution of GSM8K or MATH form, and its comparison.

`extract_answer` finds the answer in a solution that a model wrote, and
`is_same_answer` compares it with the reference.

These answers are the same:

- Numbers of exactly the same value: 1,200 and 1200.0, 9{,}500 and 9500, 0.5 and
  1/2 and \\frac12, 1\\frac{1}{2} and 3/2. "$", "%" (50% is 50, not 0.5), the
  degree sign and units at the end are left out.
- Tuples and intervals with the same parts in the same order, between the same
  brackets. Sets, and lists without brackets, with the same parts in any order.
- Words that are spelled alike, case included.
- Other expressions that math-verify finds equal: x + 1 and 1 + x, 2\\sqrt{3}
  and \\sqrt{12}, 3\\times10^4 and 30000.

These are different: a number and its rounded decimal, and a number and its name
in words. Units are not compared. A list "1,234" is read as the number. A unit
is set as text, or is a word of four or more letters, or a common short one:
4 xy is a product. Expressions of more than 200 characters and answers of more
than 1,000 must be identical.

math-verify decides only about single expressions that this module cannot
decide. On its own, it treats as equal: (1,2) and \\{1,2\\}, 50% and 0.5, "east"
and "seat", 12_3 and 12, "1 1/2" and 1, and, with its list of units, 3ab and 3.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from diffjax.evals.methods import equivalence

# Characters and the text that replaces them.
_CHARACTERS = str.maketrans(
  {
    # Minus signs: figure dash, en dash, minus, small and fullwidth hyphen
    "\u2012": "-",
    "\u2013": "-",
    "\u2212": "-",
    "\ufe63": "-",
    "\uff0d": "-",
    # Arabic decimal and thousands separators
    "\u066b": ".",
    "\u066c": ",",
    "π": r"\pi ",
    "∞": r"\infty ",
    "√": r"\sqrt ",
    "×": r"\times ",
    "·": r"\cdot ",
  }
)
# Separators of groups of three digits, except a bare comma: 9{,}500, 9,\!500,
# 9\,500
_DIGIT_SEPARATORS = re.compile(
  r"(?<=\d)(?:\{,\}|,\\!|\\[,!;:]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))"
)

_DECIMAL = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?"
_FRACTION = r"\d*\\[dt]?frac\{-?\d+\}\{-?\d+\}"
# A minus after a digit, a letter, ")", "}" or "." is a difference or a range,
# as in 5-3. It is no sign of the number.
_NUMBER = re.compile(
  rf"(?<![\d)\w.}}])-?(?:{_FRACTION}|\$?{_DECIMAL})|{_FRACTION}|\$?{_DECIMAL}"
)
_FORMULA = re.compile(
  r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
)
# A formula without delimiters, up to a space outside of braces.
_BARE_FORMULA = re.compile(
  r"-?\d*\\(?!boxed|fbox)[a-zA-Z]+"
  r"(?:\{(?:[^{}]|\{[^{}]*\})*\}|\s*\d|[^\s.,;{}])*"
)

# Where an answer begins.
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_MARKED_ANSWER = re.compile(r"####[ \t]*([^\n]+)")
_STATEMENT = re.compile(r"[Aa]nswer is:?[ \t]*")

# The number of boxes, from the end, that are searched for a closed one.
_MAX_BOXES = 20

# In characters. Longer texts are not parsed, to bound the time.
_MAX_NUMBER_LENGTH = 200
_MAX_EXPRESSION_LENGTH = 200
_MAX_ANSWER_LENGTH = 1000

# The closing brackets that may follow an opening bracket.
_BRACKETS = {"(": (")", "]"), "[": (")", "]"), r"\{": (r"\}",)}

# The letter of a choice in brackets, as in (A).
_CHOICE = re.compile(r"[(\[]([A-Za-z])[)\]]")

# Commands whose argument is the answer or a part of it.
_WRAPPERS = re.compile(
  r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|hbox"
  r"|boxed|fbox|bf|rm)\s*\{"
)
# Spaces, and the commands for spaces and sizes.
_SPACING = re.compile(
  r"(?<!\\)\\(?:left|right|displaystyle|quad|qquad|[,!;:> ])(?![a-zA-Z])"
  r"|\\(?:left|right)(?=[a-zA-Z])|~|\s"
)
# Stands for a space that `_SPACING` must not match.
_KEPT_SPACE = "\0"

_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degrees?(?![a-zA-Z])|°")
_SHORT_UNITS = (
  "cm|mm|km|mi|in|ft|yd|sq|mg|kg|oz|lbs?|ml|hrs?|yrs?|min|sec|days?|am|pm|AM|PM"
  "|mph|rad|USD|pts?|cups?|eggs?|pies?|pens?|cats?|dogs?|cars?|bags?|box|men"
  "|kids?"
)
# Words of four or more letters that are not units: they name numbers or
# operations.
_NO_UNITS = (
  "alpha|beta|gamma|delta|epsilon|zeta|theta|iota|kappa|lambda|sigma|upsilon"
  "|omega|sqrt|infty|infinity|plus|minus|times|over"
)
_UNITS = re.compile(
  r"(?:(?<=[\d})])\s*\\(?:text|mathrm|mbox|hbox|rm)\s*\{[^{}]*\}"
  rf"|(?<=\d)\s+(?!{_NO_UNITS})(?:{_SHORT_UNITS}|[a-zA-Z]{{4,}})(?![a-zA-Z])"
  r"[a-zA-Z .]*)(?:\^\{?[23]\}?)?$"
)

# The name of a variable or a function before the value, as in f(x) = 1 and
# x \in [0, 1]
_ASSIGNED_NAME = re.compile(
  r"^[a-zA-Z](?:\([a-zA-Z]\))?(?:=|\\in(?![a-zA-Z]) ?)(?=.)"
)

# Expressions that math-verify misreads: it reads a word as a product and a
# ratio as a quotient, and ignores the base of a number.
_VERBATIM = re.compile(r"[a-zA-Z]{3,}|.*\d_.*|.*\d:\d.*")

_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
# "whole" is the whole part of a mixed number such as 1\frac{1}{2}.
_LATEX_FRACTION = re.compile(
  r"(?P<sign>[-+]?)(?P<whole>\d*)"
  r"\\frac\{(?P<numerator>-?\d+)\}\{(?P<denominator>-?\d+)\}"
)
_SLASH_FRACTION = re.compile(
  r"(?P<sign>[-+]?)(?P<numerator>\d+)/(?P<denominator>\d+)"
)


@dataclasses.dataclass(frozen=True)
class _Answer:
  """An answer and its structure.

  Attributes:
    text: The answer without typesetting.
    number: The value, if the answer is a number.
    kind: "set", or the brackets of a tuple or an interval. "" for others.
    parts: The parts of a set, tuple or interval.
  """

  text: str
  number: Fraction | None = None
  kind: str = ""
  parts: tuple[_Answer, ...] = ()


def extract_answer(solution: str) -> str | None:
  """Returns the final answer in the solution of a problem in mathematics.

  It is the first of these that exists:

  1. the content of the last complete \\boxed{…},
  2. the rest of the line after the first "####",
  3. the number or formula on the same line after "answer is", of the last such
     statement,
  4. the last number.

  Digits and minus signs become ASCII characters, and separators in numbers such
  as 9{,}500 are removed. Returns None if there is no answer.
  """
  solution = _normalize(solution)
  boxed = last_boxed(solution)
  if boxed is not None:
    return boxed
  marked = _MARKED_ANSWER.search(solution)
  if marked is not None:
    return marked.group(1).strip()
  stated = _stated_answer(solution)
  if stated is not None:
    return stated
  numbers = _NUMBER.findall(solution)
  if not numbers:
    return None
  return numbers[-1].rstrip(",")


def _stated_answer(solution: str) -> str | None:
  """Returns the number or formula after "answer is", on the same line.

  If several statements have one, it is that of the last statement.
  """
  statements = list(_STATEMENT.finditer(solution))
  for statement in reversed(statements):
    sentence, _, _ = solution[statement.end() :].partition("\n")
    formula = _FORMULA.match(sentence)
    if formula is not None:
      # There is a group for each pair of delimiters. One of them has matched.
      assert formula.lastindex is not None
      return formula.group(formula.lastindex).strip()
    bare_formula = _BARE_FORMULA.match(sentence)
    if bare_formula is not None:
      return bare_formula.group()
    number = _NUMBER.search(sentence)
    if number is not None:
      return number.group().rstrip(",")
  return None


def reference_answer(solution: str) -> str:
  """Returns the final answer in a data set's solution of a problem.

  A box or "####" marks it. A text without such a mark is the answer itself.
  """
  is_marked = "####" in solution or last_boxed(solution) is not None
  if not is_marked:
    return solution.strip()
  return extract_answer(solution) or ""


def last_boxed(text: str) -> str | None:
  """Returns the content of the last complete \\boxed{…} or \\fbox{…}.

  Without braces, as in \\boxed 5, the content is the next word. A box whose
  brace is not closed is not complete. Returns None if there is no complete box.
  """
  starts = [match.end() for match in _BOX.finditer(text)]
  for start in reversed(starts[-_MAX_BOXES:]):
    if text.startswith("{", start):
      end = _closing_brace(text, start)
      if end is not None:
        return text[start + 1 : end].strip()
    else:
      word = re.match(r"[^\s$.,]+", text[start:])
      if word is not None:
        return word.group()
  return None


def is_same_answer(answer: str, reference: str) -> bool:
  """Returns whether two final answers of a problem in mathematics are the same.

  Typesetting and units do not count: 0.5 and \\frac12\\text{ m} are the same.
  Answers of more than 1,000 characters must be identical.

  Raises:
    UserError: if math-verify is needed and cannot be started.
  """
  if max(len(answer), len(reference)) > _MAX_ANSWER_LENGTH:
    return answer.strip() == reference.strip()
  plain_answer = _remove_typesetting(answer)
  plain_reference = _remove_typesetting(reference)
  return _is_same(_parse(plain_answer), _parse(plain_reference))


def _is_same(answer: _Answer, reference: _Answer) -> bool:
  """Returns whether two parsed answers are the same.

  Numbers are compared by value, and sets, tuples and intervals by their parts.
  math-verify compares other expressions.
  """
  if answer.text == reference.text:
    return True
  if answer.number is not None and reference.number is not None:
    return answer.number == reference.number
  if answer.kind and reference.kind:
    if answer.kind != reference.kind:
      return False
    if len(answer.parts) != len(reference.parts):
      return False
    if answer.kind == "set":
      return _is_same_set(answer.parts, reference.parts)
    return _is_same_sequence(answer.parts, reference.parts)
  if not _is_comparable(answer.text) or not _is_comparable(reference.text):
    return False
  return equivalence.is_equal(answer.text, reference.text)


def _is_comparable(text: str) -> bool:
  """Returns whether math-verify reads an expression rightly and quickly."""
  if not text or len(text) > _MAX_EXPRESSION_LENGTH:
    return False
  return not _VERBATIM.fullmatch(text)


def _is_same_sequence(
  parts: Sequence[_Answer], reference_parts: Sequence[_Answer]
) -> bool:
  """Returns whether two tuples of equal length have the same parts."""
  for part, reference_part in zip(parts, reference_parts, strict=True):
    if not _is_same(part, reference_part):
      return False
  return True


def _is_same_set(
  parts: Sequence[_Answer], reference_parts: Sequence[_Answer]
) -> bool:
  """Returns whether two sets of equal size have the same parts.

  Each part of the reference may match only one part of the answer.
  """
  unmatched = list(reference_parts)
  for part in parts:
    match = _find_same(part, unmatched)
    if match is None:
      return False
    unmatched.remove(match)
  return True


def _find_same(
  answer: _Answer, candidates: Sequence[_Answer]
) -> _Answer | None:
  """Returns the first candidate that is the same answer, or None."""
  for candidate in candidates:
    if _is_same(answer, candidate):
      return candidate
  return None


def _normalize(text: str) -> str:
  """Returns a text with ASCII digits and minus signs.

  Separators of groups of digits are removed, except bare commas: 9{,}500 is
  9500.
  """
  text = text.translate(_CHARACTERS)
  if not text.isascii():
    text = "".join(_ascii_digit(character) for character in text)
  return _DIGIT_SEPARATORS.sub("", text)


def _ascii_digit(character: str) -> str:
  """Returns the ASCII digit of a decimal digit, and other characters as is."""
  return str(unicodedata.decimal(character, character))


def _remove_typesetting(answer: str) -> str:
  """Returns an answer without units and in one form of typesetting.

  Example: "x = \\dfrac12 \\text{ cm}" → "\\frac{1}{2}"
  """
  text = _remove_delimiters(_normalize(answer))
  text = _DEGREES.sub("", text)
  text = _UNITS.sub("", text.rstrip("."))
  text = _unwrap(text)
  # Dollar and percent signs, with or without a backslash.
  text = re.sub(r"\\?[$%]", "", text)
  # A mixed number such as 1 1/2 gets a \frac before spaces are removed.
  text = re.sub(r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
  # The word "pi" becomes the command.
  text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
  text = _remove_spaces(text).rstrip(".")
  text = _add_braces(text)
  return _ASSIGNED_NAME.sub("", text)


def _remove_delimiters(text: str) -> str:
  """Returns a text without the delimiters of formulas."""
  text = text.strip().strip("$").strip()
  return re.sub(r"\\[()\[\]]", "", text)


def _unwrap(text: str) -> str:
  """Returns a text in which the content replaces commands such as \\text{…}."""
  wrapper = _WRAPPERS.search(text)
  while wrapper is not None:
    opening_brace = wrapper.end() - 1
    end = _closing_brace(text, opening_brace)
    if end is None:
      break
    content = text[opening_brace + 1 : end]
    text = text[: wrapper.start()] + content + text[end + 1 :]
    wrapper = _WRAPPERS.search(text)
  return text


def _remove_spaces(text: str) -> str:
  """Returns a text without spaces, except between a command and a letter."""
  text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", f"\\1{_KEPT_SPACE}", text)
  return _SPACING.sub("", text).replace(_KEPT_SPACE, " ")


def _add_braces(text: str) -> str:
  """Returns a text with one form for fractions and roots.

  Commands get all their braces, as in \\frac{1}{2} and \\sqrt{2}. A fraction
  with a slash loses its braces, as in 1/2.
  """
  # \dfrac, \tfrac and \cfrac
  text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
  # \frac12
  text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
  # \frac1{2}
  text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
  # \frac{1}2
  text = re.sub(r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}", text)
  # \sqrt2
  text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
  # {1}/{2}, whose braces are removed
  return re.sub(r"^(-?)\{?(-?\d+)\}?/\{?(\d+)\}?$", r"\1\2/\3", text)


class _Structure(NamedTuple):
  """What a set, tuple or interval consists of.

  Attributes:
    kind: As in `_Answer`.
    items: The texts of its parts.
  """

  kind: str
  items: list[str]


def _parse(text: str) -> _Answer:
  """Parses an answer into a number or its parts. Else keeps its text.

  Args:
    text: The answer, after `_remove_typesetting`.
  """
  number = _parse_number(text)
  if number is not None:
    return _Answer(text, number)
  # (A) and [A] are the letter of a choice, not brackets around a part.
  choice = _CHOICE.fullmatch(text)
  if choice is not None:
    return _Answer(choice.group(1))
  structure = _find_structure(text)
  if structure is None:
    return _Answer(text)
  # Deeply nested brackets reach Python's recursion limit. Until Python 3.11, a
  # comprehension would add a frame for each level.
  parts = []
  for item in structure.items:
    parts.append(_parse(item))
  return _Answer(text, kind=structure.kind, parts=tuple(parts))


def _find_structure(text: str) -> _Structure | None:
  """Returns the parts of a set, tuple, interval or list, or None for others.

  A list without brackets, as in "1, 2", is a set: for a question with several
  answers, their order does not matter.
  """
  for opening, closings in _BRACKETS.items():
    for closing in closings:
      content = _enclosed_content(text, opening, closing)
      if content is None:
        continue
      items = _split_list(content)
      if opening == r"\{":
        return _Structure("set", items)
      # Brackets around a single expression, as in (x + 1), are part of it.
      if len(items) > 1:
        kind = opening + closing
        return _Structure(kind, items)
  items = _split_list(text)
  if len(items) > 1:
    return _Structure("set", items)
  return None


def _enclosed_content(text: str, opening: str, closing: str) -> str | None:
  """Returns what a pair of brackets encloses, or None.

  None means that the pair does not enclose the whole text. The first and the
  last bracket of (1,2)(3,4) are no pair.
  """
  if not text.startswith(opening) or not text.endswith(closing):
    return None
  content = text[len(opening) : -len(closing)]
  if not _is_balanced(content):
    return None
  return content


def _parse_number(text: str) -> Fraction | None:
  """Returns the exact value of a number, or None for other texts.

  Integers, decimals, fractions and mixed numbers are read: 1,200, -0.5, 1/2 and
  1\\frac{1}{2}.
  """
  if len(text) > _MAX_NUMBER_LENGTH:
    return None
  if _GROUPED_NUMBER.fullmatch(text):
    text = text.replace(",", "")
  if _PLAIN_NUMBER.fullmatch(text):
    return Fraction(text)

  fraction = _LATEX_FRACTION.fullmatch(text)
  if fraction is None:
    fraction = _SLASH_FRACTION.fullmatch(text)
  if fraction is None:
    return None
  denominator = int(fraction["denominator"])
  if denominator == 0:
    return None
  value = Fraction(int(fraction["numerator"]), denominator)
  whole_part = fraction.groupdict().get("whole")
  if whole_part:
    value += int(whole_part)
  return -value if fraction["sign"] == "-" else value


def _closing_brace(text: str, start: int) -> int | None:
  """Returns the index of the brace that closes the brace at `start`, or None.

  Braces after a backslash do not count.
  """
  depth = 0
  index = start
  while index < len(text):
    character = text[index]
    if character == "\\":
      # Skips the next character.
      index += 1
    elif character == "{":
      depth += 1
    elif character == "}":
      depth -= 1
      if depth == 0:
        return index
    index += 1
  return None


def _is_balanced(content: str) -> bool:
  """Returns whether the brackets in a text match. Those in 1,2)(3,4 do not."""
  depth = 0
  for character in content:
    depth += _depth_change(character)
    if depth < 0:
      return False
  return depth == 0


def _split_list(text: str) -> list[str]:
  """Returns the parts of a text between its commas outside of brackets."""
  parts = []
  depth = 0
  start = 0
  for index, character in enumerate(text):
    depth += _depth_change(character)
    if character == "," and depth <= 0:
      parts.append(text[start:index])
      start = index + 1
  return [*parts, text[start:]]


def _depth_change(character: str) -> int:
  """Returns 1 for an opening bracket, -1 for a closing one, else 0."""
  if character in "([{":
    return 1
  if character in ")]}":
    return -1
  return 0
