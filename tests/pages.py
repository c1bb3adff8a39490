"""Reads the README and the pages of docs/: their commands, their code, and what stands in backticks."""

import re
import shlex

from tests.conftest import ROOT

DOCUMENTATION = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of a shell's line, what belongs to one command: it ends at a comment, at what combines commands, and at the quote that it stands in.
ARGUMENTS = r"""((?:[ ]+(?!\#)(?:'[^']*'|\\.|[^\s'"`|&;])+)*)"""


def outside_code(text):
  """A page's text without what stands in fences and indented blocks, and with what stands in backticks on one line."""
  return joined(
    re.sub(r"^```.*?^```$|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
  )


def joined(text):
  """The text with shell's lines, and what stands in backticks, on one line each."""
  parts = re.split(
    r"(^```.*?^```$)", text.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE
  )
  return "".join(
    part
    if part.startswith("```")
    else re.sub(r"(`[^`\n]+)\n([^`\n]+`)", r"\1 \2", part)
    for part in parts
  )


def in_backticks(text):
  return re.findall(r"`([^`\n]+)`", outside_code(text))


def python_blocks(text):
  return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text):
  """The commands `python -m MODULE ARGUMENTS` of a page, in blocks and in backticks, as (module, arguments)."""
  return [
    (module, shlex.split(rest))
    for module, rest in re.findall(
      rf"python3? -m ([\w.]+){ARGUMENTS}", joined(text)
    )
  ]
