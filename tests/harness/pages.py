"""Reads the pages of the documentation: their commands and their code."""

import re
import shlex
from typing import NamedTuple

from tests.harness import ROOT

DOCUMENTATION = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_CODE_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_INDENTED_LINE = re.compile(r"^    .*?$", re.MULTILINE)
# Code in backticks that continues on the next line.
_BROKEN_INLINE_CODE = re.compile(r"(`[^`\n]+)\n([^`\n]+`)")

# An argument of a command. The arguments end at a comment, at an operator of
# the shell (| & ;), and at the quote or backtick that encloses the command.
_ARGUMENT = r"""
  [ ]+(?!\#)
  (?: '[^']*' | \\. | [^\s'"`|&;] )+
"""
_COMMAND = re.compile(
  rf"""
  (?:
    python3?[ ]-m[ ](?P<module>[\w.]+)
    | \bdiffjax[ ](?P<name>\w+)(?=[ ]--)
  )
  (?P<arguments>(?:{_ARGUMENT})*)
  """,
  re.VERBOSE,
)


class Command(NamedTuple):
  """A documented command: `python -m MODULE ARGUMENTS`."""

  module: str
  arguments: list[str]


def commands(text: str) -> list[Command]:
  """Returns the commands of a page, in blocks and in backticks.

  `python -m MODULE ARGUMENTS` and `diffjax COMMAND --ARGUMENTS` are commands.
  The second form runs the module diffjax.COMMAND.
  """
  documented = []
  for match in _COMMAND.finditer(_join_lines(text)):
    module = match["module"] or f"diffjax.{match['name']}"
    arguments = shlex.split(match["arguments"])
    documented.append(Command(module, arguments))
  return documented


def python_blocks(text: str) -> list[str]:
  """Returns the blocks of Python of a page."""
  return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
  """Returns a page without its code blocks.

  Code in backticks stays, on one line.
  """
  without_fences = _CODE_FENCE.sub("", text)
  return _join_lines(_INDENTED_LINE.sub("", without_fences))


def inline_code(text: str) -> list[str]:
  """Returns the code in backticks of a page."""
  return re.findall(r"`([^`\n]+)`", prose(text))


def headings(text: str) -> list[str]:
  """Returns the headings of a page as they are written."""
  without_fences = _CODE_FENCE.sub("", text)
  return re.findall(r"^#+ (.*)$", without_fences, re.MULTILINE)


def _join_lines(text: str) -> str:
  """Returns the text with each command and inline code on one line."""
  text = text.replace("\\\n", " ")
  parts = []
  end_of_fence = 0
  for fence in _CODE_FENCE.finditer(text):
    before_fence = text[end_of_fence : fence.start()]
    parts.append(_BROKEN_INLINE_CODE.sub(r"\1 \2", before_fence))
    parts.append(fence[0])
    end_of_fence = fence.end()
  parts.append(_BROKEN_INLINE_CODE.sub(r"\1 \2", text[end_of_fence:]))
  return "".join(parts)
