"""The text that `--help` prints: a command's docstring and its flags."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from absl import flags

from diffjax.config import Config


def _section_names() -> str:
  """Returns the names of the config's sections, with commas between."""
  return ", ".join(section.name for section in dataclasses.fields(Config))


# Flags of all commands with a config, and what they do.
CONFIG = {
  "--config=NAME[:VARIANT]": (
    "A config of configs/ by name, a file, or config.toml of a run;"
    " :transformer, :diff_v2 and other attention variants are its twins of"
    " equal size."
  ),
  "--config.SECTION.FIELD=…": (
    f"Any field of the config. Sections are {_section_names()}."
    " diffjax/config.py and --print_config explain the fields."
  ),
  "--print_config": (
    "Print the whole config as a file for --config. Comments explain each field"
    " and say what it may be."
  ),
}
# Flags of all commands.
IMPORT = {
  "--import=MODULE": (
    "A module with attention variants or suites of your own; may be repeated."
  )
}
# Flags of commands with settings.
_SETTINGS = {
  "--set.SUITE.FIELD=…": (
    "A setting of a suite: a field of its class in diffjax/evals/SUITE.py."
  )
}

# Columns of the text.
_WIDTH = 100
# The column in which explanations of flags start.
_EXPLANATION_COLUMN = 28


def is_requested(arguments: Sequence[str]) -> bool:
  """Returns True if the arguments of a command have a flag for help."""
  for argument in arguments:
    # No argument after "--" is a flag.
    if argument == "--":
      return False
    if argument in ("-h", "-help", "--help"):
      return True
  return False


def help_text(*, with_config: bool, with_settings: bool) -> str:
  """Returns the help text of the running command, as `--help` prints it.

  It is the docstring of the command's module, followed by a list of flags: the
  module's own flags, then the flags that several commands have.

  Args:
    with_config: whether the command has the flags of a config.
    with_settings: whether the command has the flags of settings.
  """
  # The command was started as a script, so its module has the name __main__.
  command_docstring = sys.modules["__main__"].__doc__ or ""
  explanations = {}
  for flag in flags.FLAGS.get_flags_for_module("__main__"):
    explanations[_usage(flag)] = _explanation(flag)
  if with_config:
    explanations |= CONFIG
  if with_settings:
    explanations |= _SETTINGS
  explanations |= IMPORT

  lines = [*_wrap_docstring(command_docstring), ""]
  lines += _wrap_explanations(explanations)
  return "\n".join(lines)


def _usage(flag: flags.Flag) -> str:
  """Returns how a flag is written, such as "--steps=N"."""
  if flag.boolean:
    return f"--{flag.name}"
  value = "…"
  if isinstance(flag.parser, flags.EnumParser):
    value = "|".join(flag.parser.enum_values)
  elif isinstance(flag.parser, flags.IntegerParser | flags.FloatParser):
    value = "N"
  return f"--{flag.name}={value}"


def _explanation(flag: flags.Flag) -> str:
  """Returns what a flag does, and its default in brackets if it has one."""
  text = str(flag.help)
  # absl has added a hint after the text of a flag that may be repeated, and
  # choices, as in "<a|b>: ", before the text of a flag that has them.
  text, _, _ = text.partition(";\n    repeat this option")
  if isinstance(flag.parser, flags.EnumParser):
    _, _, text = text.partition(">: ")
  if flag.default is False:
    return f"{text} [off]"
  if flag.default in (None, "", []):
    return text
  return f"{text} [{flag.default}]"


def _wrap_docstring(docstring: str) -> Iterable[str]:
  """Yields the paragraphs of a docstring, with empty lines between them.

  Paragraphs are wrapped. Indented ones, such as examples, are not.
  """
  for number, paragraph in enumerate(docstring.strip().split("\n\n")):
    if number > 0:
      yield ""
    if not paragraph.startswith(" "):
      paragraph = textwrap.fill(paragraph, _WIDTH)
    yield paragraph


def _wrap_explanations(explanations: Mapping[str, str]) -> Iterable[str]:
  """Yields the text of each flag: its usage, then what it does, wrapped."""
  indent = " " * _EXPLANATION_COLUMN
  for usage, explanation in explanations.items():
    first_column = f"  {usage}  ".ljust(_EXPLANATION_COLUMN)
    yield textwrap.fill(
      explanation,
      _WIDTH,
      initial_indent=first_column,
      subsequent_indent=indent,
    )
