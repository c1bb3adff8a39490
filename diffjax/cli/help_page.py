"""The page that `--help` prints: what a command's docstring says, and the flags that the command defines."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence

from absl import flags

# What every command with a config takes besides its own flags.
CONFIG = {
  "--config=NAME[:VARIANT]": "A config of configs/ by name, a file, or config.toml of a run; :transformer, :diff_v2 and other attention variants are its twins of equal size.",
  "--config.SECTION.FIELD=…": "Any field of the config. diffjax/config.py says what each one means.",
  "--print_config": "Print the whole config, with units and choices, as a file for --config.",
}
# What every command takes.
IMPORT = {
  "--import=MODULE": "A module that registers attention variants of your own, such as my_package.dint; may be repeated."
}
_SETTINGS = {
  "--set.SUITE.FIELD=…": "A setting of a suite: a field of Settings in diffjax/evals/SUITE.py."
}
_WIDTH = 100  # columns
_COLUMN = 28  # where what a flag does begins


def is_asked(arguments: Sequence[str]) -> bool:
  """True if the command line asks for help."""
  asked = {"-h", "-help", "--help"}.intersection(arguments)
  return any(
    "--" not in arguments[: arguments.index(argument)] for argument in asked
  )


def page(*, with_config: bool, with_settings: bool) -> str:
  """The page of the module that runs as a command.

  Args:
    with_config: True for a command with a config.
    with_settings: True for one with settings.
  """
  own = {
    _written(flag): _explained(flag)
    for flag in flags.FLAGS.flags_by_module_dict().get(sys.argv[0], [])
  }
  table = (
    own
    | (CONFIG if with_config else {})
    | (_SETTINGS if with_settings else {})
    | IMPORT
  )
  return f"{_wrapped(sys.modules['__main__'].__doc__ or '')}\n\n{_lines(table)}"


def _wrapped(docstring: str) -> str:
  """Paragraphs are filled; indented lines stay as they are."""
  blocks = docstring.strip().split("\n\n")
  return "\n\n".join(
    block if block.startswith(" ") else textwrap.fill(block, _WIDTH)
    for block in blocks
  )


def _written(flag: flags.Flag) -> str:
  if flag.boolean:
    return f"--{flag.name}"
  if isinstance(flag.parser, flags.EnumParser):
    return f"--{flag.name}={'|'.join(flag.parser.enum_values)}"
  return f"--{flag.name}={'N' if isinstance(flag.parser, flags.IntegerParser | flags.FloatParser) else '…'}"


def _explained(flag: flags.Flag) -> str:
  """What it does, and its default if it has one."""
  about = str(flag.help).partition(";\n    repeat this option")[
    0
  ]  # absl's own words around ours
  about = (
    about.partition(">: ")[2]
    if isinstance(flag.parser, flags.EnumParser)
    else about
  )
  return (
    about
    if flag.default in (None, "", [])
    else f"{about} [{'off' if flag.default is False else flag.default}]"
  )


def _lines(table: Mapping[str, str]) -> str:
  wrap = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * _COLUMN)
  lines = []
  for name, about in table.items():
    wrap.initial_indent = f"  {name}  ".ljust(_COLUMN)
    lines.append(wrap.fill(about))
  return "\n".join(lines)
