"""Reads the README and the pages of docs/: their commands, their code, and what stands in backticks."""

import re
import shlex

from tests.harness import ROOT

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
  """Returns the commands of a page, in blocks and in backticks.

  `python -m MODULE ARGUMENTS` and `diffjax COMMAND --ARGUMENTS` are commands.
  The second form runs the module diffjax.COMMAND.

  Returns:
    (module, arguments) of each command, in the order of the page.
  """
  found = []
  command = rf"(?:python3? -m ([\w.]+)|\bdiffjax (\w+)(?= --)){ARGUMENTS}"
  for match in re.finditer(command, joined(text)):
    module, name, arguments = match.groups()
    found.append((module or f"diffjax.{name}", shlex.split(arguments)))
  return found
