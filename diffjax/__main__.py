"""The `diffjax` command: `diffjax train …` is `python -m diffjax.train …`."""

from __future__ import annotations

import ast
import os
import pathlib
import signal
import sys
from typing import NoReturn

from diffjax.host.signals import end_at_ctrl_c

COMMANDS = (
  "train",
  "generate",
  "evaluate",
  "convert",
  "checkpoints",
  "prepare",
  "aot",
)


def main() -> None:
  """Runs the command that the first argument names."""
  end_at_ctrl_c()
  arguments = sys.argv[1:]
  if not arguments or arguments[0] in ("-h", "-help", "--help"):
    # `diffjax --help | head` must end without an error message.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(_help())
    return
  name, *rest = arguments
  if name not in COMMANDS:
    _fail(f"{name!r} is no command; the commands are {', '.join(COMMANDS)}")
  # Replaces this process by `python -m diffjax.NAME`. So both forms of a
  # command behave the same, for example at Ctrl-C or with worker processes.
  program = [sys.executable, "-m", f"diffjax.{name}", *rest]
  os.execv(sys.executable, program)


def _help() -> str:
  """Returns the text of `diffjax --help`: all commands and what they do."""
  width = max(map(len, COMMANDS))
  lines = ["diffjax COMMAND --help explains a command. The commands:", ""]
  for name in COMMANDS:
    lines.append(f"  {name:{width}}  {_summary(name)}")
  return "\n".join(lines)


def _summary(name: str) -> str:
  """Returns the first line of a command's docstring, without importing it."""
  path = pathlib.Path(__file__).with_name(f"{name}.py")
  source = path.read_text(encoding="utf-8")
  docstring = ast.get_docstring(ast.parse(source)) or ""
  return docstring.partition("\n")[0]


def _fail(message: str) -> NoReturn:
  """Prints an error in the arguments and ends the process with code 2."""
  print(f"error: {message}", file=sys.stderr)
  sys.exit(2)


if __name__ == "__main__":
  main()
