"""The final answer in a solution of GSM8K or MATH form, and the comparison of answers.

The library that does more (math-verify) passes a model's text to sympy, whose parser evaluates it as Python. This code executes
nothing that comes from data. These answers are the same:

- numbers of the same value, exactly: 1,200 and 1200.0, 0.5 and 1/2 and \\frac12, 1\\frac{1}{2} and 3/2; "$", "%" (50% is 50, not 0.5),
  the degree sign and units at the end (of two letters at least, or set as text) are left out;
- otherwise the same characters, without those that only typeset: spaces, \\left and \\right, \\text{…}, \\mathrm{…}, \\displaystyle,
  \\dfrac for \\frac, \\frac12 for \\frac{1}{2}, \\sqrt2 for \\sqrt{2}, a last full stop, "x =" before the answer;
- tuples and intervals whose parts are the same, in order, between the same brackets; sets and lists without brackets, in any order.

These are not: all that takes algebra (x + 1 and 1 + x, 2\\sqrt{3} and \\sqrt{12}, 1/\\sqrt{2} and \\sqrt{2}/2, a product and its
factors), a number and its rounded decimal, scientific notation, number words. Units are not compared, and a list "1,234" is read as the
number. Answers of more than a thousand characters must be equal as they stand.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

# A minus sign belongs to the number where it cannot be of a difference or a range
_NUMBER = re.compile(
  r"(?<![\d)\w.])-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?|\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?"
)
_LONGEST_NUMBER, _LONGEST_ANSWER = (
  200,
  1000,
)  # characters; longer ones would take long
_BOXES = 20  # the largest number of boxes, from the end, that are searched for one that is closed
_BRACKETS = {"(": ")]", "[": ")]", r"\{": (r"\}",)}
_WRAPPERS = re.compile(
  r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|hbox|boxed|fbox|bf|rm)\s*\{"
)
_DROPPED = re.compile(
  r"(?<!\\)\\(?:left|right|displaystyle|quad|qquad|[,!;:> ])(?![a-zA-Z])|\\(?:left|right)(?=[a-zA-Z])|~|\s"
)
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degrees?(?![a-zA-Z])|°")
_UNITS = re.compile(
  r"(?:(?<=[\d})])\s*\\(?:text|mathrm|mbox|hbox|rm)\s*\{[^{}]*\}|(?<=\d)\s+[a-zA-Z]{2}[a-zA-Z .]*)(?:\^\{?[23]\}?)?$"
)


def extract(solution: str) -> str | None:
  """The final answer of a solution, or None.

  It is the first of these that exists: the content of the last complete \\boxed{…}; the text behind the first "####"; the number or
  formula behind the last "answer is" on its line; the last number.
  """
  if (boxed := last_boxed(solution)) is not None:
    return boxed
  if (marked := re.search(r"####[ \t]*([^\n]+)", solution)) is not None:
    return marked.group(1).strip()
  for said in reversed(list(re.finditer(r"[Aa]nswer is:?[ \t]*", solution))):
    sentence = solution[said.end() :].partition("\n")[0]
    if (formula := re.match(r"\$([^$]+)\$", sentence)) is not None:
      return formula.group(1).strip()
    if (number := _NUMBER.search(sentence)) is not None:
      return number.group().rstrip(",")
  numbers = _NUMBER.findall(solution)
  return numbers[-1].rstrip(",") if numbers else None


def reference(solution: str) -> str:
  """The final answer of a reference solution, marked by a box or "####". A text without marks is an answer as a whole."""
  return (
    extract(solution) or ""
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


def same(answer: str, wanted: str) -> bool:
  """True if two answers are the same, by the module's rules."""
  return _form(answer) == _form(wanted)


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


def _form(answer: str) -> object:
  """The same form for all answers that the module's rules call the same: a Fraction, forms with their brackets, or a text."""
  if len(answer) > _LONGEST_ANSWER:
    return answer.strip()
  text = _plain(answer)
  if (number := _number(text)) is not None:
    return number
  for opening, closings in _BRACKETS.items():
    for closing in closings:
      inside = text[len(opening) : -len(closing)]
      if (
        text.startswith(opening)
        and text.endswith(closing)
        and _is_whole(inside)
      ):
        parts = [_form(part) for part in _parts(inside)]
        if opening == r"\{":
          return ("set", frozenset(Counter(parts).items()))
        if len(parts) > 1:
          return (opening, tuple(parts), closing)
        if re.fullmatch(r"[A-Za-z]", inside):  # the letter of a choice
          return inside
  listed = _parts(text)
  return (
    ("set", frozenset(Counter(_form(part) for part in listed).items()))
    if len(listed) > 1
    else text
  )


def _plain(answer: str) -> str:
  """The answer without characters that only typeset it."""
  text = answer.strip().strip("$").strip()
  text = (
    text.replace(r"\(", "")
    .replace(r"\)", "")
    .replace(r"\[", "")
    .replace(r"\]", "")
    .replace("−", "-")
  )
  text = _DEGREES.sub("", text)
  text = _UNITS.sub("", text.rstrip("."))
  while (wrapper := _WRAPPERS.search(text)) is not None and (
    end := _closing(text, wrapper.end() - 1)
  ) is not None:
    text = text[: wrapper.start()] + text[wrapper.end() : end] + text[end + 1 :]
  text = (
    text.replace(r"\$", "").replace("$", "").replace(r"\%", "").replace("%", "")
  )
  text = _DROPPED.sub("", text).rstrip(".")
  text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
  text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
  text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
  text = re.sub(r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}", text)
  text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
  text = re.sub(r"^(-?)\{?(-?\d+)\}?/\{?(\d+)\}?$", r"\1\2/\3", text)
  return re.sub(
    r"^[a-zA-Z](?:\([a-zA-Z]\))?(?:=|\\in(?![a-zA-Z]))(?=.)", "", text
  )


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
