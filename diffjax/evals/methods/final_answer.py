"""The final answer in a solution of GSM8K or MATH form, and its comparison.

These answers are the same:

- Numbers of exactly the same value: 1,200 and 1200.0, 9{,}500 and 9500, 0.5 and
  1/2 and \\frac12, 1\\frac{1}{2} and 3/2. "$", "%" (50% is 50, not 0.5), the
  degree sign and units at the end are left out.
- Tuples and intervals with the same parts in the same order, between the same
  brackets. Sets, and lists without brackets, with the same parts in any order.
- Words that are spelled alike, case included.
- Other expressions that math-verify finds equal: x + 1 and 1 + x, 2\\sqrt{3} and
  \\sqrt{12}, 3\\times10^4 and 30000.

These are different: a number and its rounded decimal, and number words. Units
are not compared. A list "1,234" is read as the number. A unit is set as text, or
is a word of four or more letters, or a common short one: 4 xy is a product.
Expressions of more than 200 characters and answers of more than 1,000 must be
identical.

math-verify decides only about single expressions that this module cannot decide.
Alone it takes (1,2) for \\{1,2\\}, 50% for 0.5, "east" for "seat", 12_3 for 12,
"1 1/2" for 1, and, with its list of units, 3ab for 3.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from diffjax.evals.methods import equivalence

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
# What groups digits in threes, except a bare comma: 9{,}500, 9,\!500, 9\,500
_DIGIT_GROUPS = re.compile(
  r"(?<=\d)(?:\{,\}|,\\!|\\[,!;:]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))"
)
_DECIMAL = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?"
_FRACTION = r"\d*\\[dt]?frac\{-?\d+\}\{-?\d+\}"
# A minus sign belongs to the number where it cannot be of a difference or a range
_NUMBER = re.compile(
  rf"(?<![\d)\w.}}])-?(?:{_FRACTION}|\$?{_DECIMAL})|{_FRACTION}|\$?{_DECIMAL}"
)
_FORMULA = re.compile(
  r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
)
# A formula without delimiters, up to a space outside of braces
_BARE_FORMULA = re.compile(
  r"-?\d*\\(?!boxed|fbox)[a-zA-Z]+(?:\{(?:[^{}]|\{[^{}]*\})*\}|\s*\d|[^\s.,;{}])*"
)
# Characters. Longer texts would take long.
_LONGEST_NUMBER = 200
_LONGEST_EXPRESSION = 200
_LONGEST_ANSWER = 1000
_BOXES = 20  # the largest number of boxes, from the end, that are searched for one that is closed
_BRACKETS = {"(": ")]", "[": ")]", r"\{": (r"\}",)}
_WRAPPERS = re.compile(
  r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|hbox|boxed|fbox|bf|rm)\s*\{"
)
_DROPPED = re.compile(
  r"(?<!\\)\\(?:left|right|displaystyle|quad|qquad|[,!;:> ])(?![a-zA-Z])|\\(?:left|right)(?=[a-zA-Z])|~|\s"
)
# Stands for a space that `_DROPPED` must not match.
_KEPT_SPACE = "\0"
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degrees?(?![a-zA-Z])|°")
_SHORT_UNITS = (
  "cm|mm|km|mi|in|ft|yd|sq|mg|kg|oz|lbs?|ml|hrs?|yrs?|min|sec|days?|am|pm|AM|PM"
  "|mph|rad|USD|pts?|cups?|eggs?|pies?|pens?|cats?|dogs?|cars?|bags?|box|men|kids?"
)
# Words that name numbers or operations
_NO_UNITS = (
  "alpha|beta|gamma|delta|epsilon|zeta|theta|iota|kappa|lambda|sigma|upsilon"
  "|omega|sqrt|infty|infinity|plus|minus|times|over"
)
_UNITS = re.compile(
  r"(?:(?<=[\d})])\s*\\(?:text|mathrm|mbox|hbox|rm)\s*\{[^{}]*\}"
  rf"|(?<=\d)\s+(?!{_NO_UNITS})(?:{_SHORT_UNITS}|[a-zA-Z]{{4,}})(?![a-zA-Z])[a-zA-Z .]*)"
  r"(?:\^\{?[23]\}?)?$"
)
# math-verify reads a word as a product and a ratio as a quotient, and ignores the
# base of a number
_VERBATIM = re.compile(r"[a-zA-Z]{3,}|.*\d_.*|.*\d:\d.*")


@dataclasses.dataclass(frozen=True)
class _Answer:
  """An answer, taken apart.

  Attributes:
    text: The answer without characters that only typeset it.
    number: Its value, if it is a number.
    kind: "set", or the brackets of a tuple or an interval; "" for others.
    parts: The parts of a set, tuple or interval.
  """

  text: str
  number: Fraction | None = None
  kind: str = ""
  parts: tuple[_Answer, ...] = ()


def extract_answer(solution: str) -> str | None:
  """The final answer of a solution, or None.

  It is the first of these that exists: the content of the last complete \\boxed{…}; the text behind the first "####"; the number or
  formula behind the last "answer is" on its line; the last number. Digits, minus signs and the grouping of digits are normalised.
  """
  solution = _normalise(solution)
  if (boxed := last_boxed(solution)) is not None:
    return boxed
  if (marked := re.search(r"####[ \t]*([^\n]+)", solution)) is not None:
    return marked.group(1).strip()
  for said in reversed(list(re.finditer(r"[Aa]nswer is:?[ \t]*", solution))):
    sentence = solution[said.end() :].partition("\n")[0]
    formula = _FORMULA.match(sentence)
    if formula is not None:
      return formula.group(formula.lastindex or 0).strip()
    bare_formula = _BARE_FORMULA.match(sentence)
    if bare_formula is not None:
      return bare_formula.group()
    if (number := _NUMBER.search(sentence)) is not None:
      return number.group().rstrip(",")
  numbers = _NUMBER.findall(solution)
  return numbers[-1].rstrip(",") if numbers else None


def reference_answer(solution: str) -> str:
  """The final answer of a reference solution, marked by a box or "####". A text without marks is an answer as a whole."""
  return (
    extract_answer(solution) or ""
    if "####" in solution or last_boxed(solution) is not None
    else solution.strip()
  )


def last_boxed(text: str) -> str | None:
  """The content of the last \\boxed{…} or \\fbox{…} whose braces close, or the word behind one without braces; None if there is none."""
  starts = [
    match.end()
    for match in re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", text)
  ]
  for start in reversed(starts[-_BOXES:]):
    if not text.startswith("{", start):
      bare = re.match(r"[^\s$.,]+", text[start:])
      if bare:
        return bare.group()
    elif (end := _closing(text, start)) is not None:
      return text[start + 1 : end].strip()
  return None


def is_same_answer(answer: str, wanted: str) -> bool:
  """Returns whether two answers are the same, by the module's rules.

  Raises:
    UserError: if math-verify is needed and cannot be started.
  """
  if max(len(answer), len(wanted)) > _LONGEST_ANSWER:
    return answer.strip() == wanted.strip()
  return _is_same(_read(_plain(answer)), _read(_plain(wanted)))


def _is_same(answer: _Answer, wanted: _Answer) -> bool:
  if answer.text == wanted.text:
    return True
  if answer.number is not None and wanted.number is not None:
    return answer.number == wanted.number
  if answer.kind and wanted.kind:
    if answer.kind != wanted.kind or len(answer.parts) != len(wanted.parts):
      return False
    if answer.kind == "set":
      return _is_same_set(answer.parts, wanted.parts)
    pairs = zip(answer.parts, wanted.parts, strict=True)
    return all(_is_same(part, wanted_part) for part, wanted_part in pairs)
  if not answer.text or not wanted.text:
    return False
  for text in (answer.text, wanted.text):
    if len(text) > _LONGEST_EXPRESSION or _VERBATIM.fullmatch(text):
      return False
  return equivalence.is_equal(answer.text, wanted.text)


def _is_same_set(answer: Sequence[_Answer], wanted: Sequence[_Answer]) -> bool:
  """Returns whether each part of one has a part of its own in the other."""
  unmatched = list(wanted)
  for part in answer:
    for candidate in unmatched:
      if _is_same(part, candidate):
        unmatched.remove(candidate)
        break
    else:
      return False
  return True


def _closing(text: str, start: int) -> int | None:
  """The index of the brace that closes the one at start. Braces behind a backslash do not count."""
  depth, index = 0, start
  while index < len(text):
    if text[index] == "\\":
      index += 1
    elif text[index] in "{}":
      depth += 1 if text[index] == "{" else -1
      if not depth:
        return index
    index += 1
  return None


def _normalise(text: str) -> str:
  """Writes digits, minus signs and grouped digits in one way."""
  text = text.translate(_CHARACTERS)
  if not text.isascii():
    text = "".join(_ascii_digit(character) for character in text)
  return _DIGIT_GROUPS.sub("", text)


def _ascii_digit(character: str) -> str:
  """Returns the ASCII digit of a decimal digit, and other characters as is."""
  return str(unicodedata.decimal(character, character))


def _read(text: str) -> _Answer:
  """Takes an answer apart that has been through `_plain`."""
  number = _number(text)
  if number is not None:
    return _Answer(text, number)
  for opening, closings in _BRACKETS.items():
    for closing in closings:
      inside = text[len(opening) : -len(closing)]
      if (
        text.startswith(opening)
        and text.endswith(closing)
        and _is_whole(inside)
      ):
        listed = _parts(inside)
        if opening == r"\{":
          return _Answer(text, kind="set", parts=_read_all(listed))
        if len(listed) > 1:
          kind = opening + closing
          return _Answer(text, kind=kind, parts=_read_all(listed))
        if re.fullmatch(r"[A-Za-z]", inside):  # the letter of a choice
          return _Answer(inside)
  listed = _parts(text)
  if len(listed) > 1:
    return _Answer(text, kind="set", parts=_read_all(listed))
  return _Answer(text)


def _read_all(texts: Sequence[str]) -> tuple[_Answer, ...]:
  return tuple(_read(text) for text in texts)


def _plain(answer: str) -> str:
  """Returns an answer without characters that only typeset it."""
  text = _without_delimiters(_normalise(answer))
  text = _DEGREES.sub("", text)
  text = _UNITS.sub("", text.rstrip("."))
  text = _without_wrappers(text)
  text = re.sub(r"\\?[$%]", "", text)
  # A mixed number, before spaces are dropped
  text = re.sub(r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
  text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
  text = _without_spaces(text).rstrip(".")
  text = _with_braces(text)
  # The name of a variable or a function before the value
  return re.sub(
    r"^[a-zA-Z](?:\([a-zA-Z]\))?(?:=|\\in(?![a-zA-Z]) ?)(?=.)", "", text
  )


def _without_delimiters(text: str) -> str:
  """Returns a text without the delimiters of formulas."""
  text = text.strip().strip("$").strip()
  return re.sub(r"\\[()\[\]]", "", text)


def _without_wrappers(text: str) -> str:
  """Returns the content of commands such as \\text{…} in their place."""
  wrapper = _WRAPPERS.search(text)
  while wrapper is not None:
    end = _closing(text, wrapper.end() - 1)
    if end is None:
      break
    content = text[wrapper.end() : end]
    text = text[: wrapper.start()] + content + text[end + 1 :]
    wrapper = _WRAPPERS.search(text)
  return text


def _without_spaces(text: str) -> str:
  """Returns a text without spaces, except between a command and a letter."""
  text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", f"\\1{_KEPT_SPACE}", text)
  return _DROPPED.sub("", text).replace(_KEPT_SPACE, " ")


def _with_braces(text: str) -> str:
  """Writes fractions and roots with all their braces, as \\frac{1}{2}."""
  text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
  text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
  text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
  text = re.sub(r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}", text)
  text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
  return re.sub(r"^(-?)\{?(-?\d+)\}?/\{?(\d+)\}?$", r"\1\2/\3", text)


def _number(text: str) -> Fraction | None:
  """The value of an integer, a decimal, a fraction or a mixed number."""
  if len(text) > _LONGEST_NUMBER:
    return None
  if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
    text = text.replace(",", "")
  if re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)", text):
    return Fraction(text)
  parts = re.fullmatch(
    r"([-+]?)(\d*)\\frac\{(-?\d+)\}\{(-?\d+)\}", text
  ) or re.fullmatch(r"([-+]?)()(\d+)/(\d+)", text)
  if parts is None or not int(parts[4]):
    return None
  value = Fraction(int(parts[2] or 0)) + Fraction(int(parts[3]), int(parts[4]))
  return -value if parts[1] == "-" else value


def _is_whole(inside: str) -> bool:
  """True if its brackets match, so that brackets around it enclose all of it, unlike those of (1,2)(3,4)."""
  depth = 0
  for sign in re.sub(r"\\([{}])", r"\1", inside):
    depth += (sign in "([{") - (sign in ")]}")
    if depth < 0:
      return False
  return depth == 0


def _parts(text: str) -> list[str]:
  """The parts of a text between its commas outside of brackets."""
  parts, depth, start = [], 0, 0
  for index, sign in enumerate(text):
    depth += (sign in "([{") - (sign in ")]}")
    if sign == "," and depth <= 0:
      parts.append(text[start:index])
      start = index + 1
  return [*parts, text[start:]]
