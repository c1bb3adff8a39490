"""Runs commands inside the tests' own process.

This is the fastest way to run a command, because modules are already imported
and programs already compiled. It is not for training, which changes how its
process manages memory: use the fixture `command` for that.
"""

import contextlib
import io
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

# absl.logging defines --verbosity.
from absl import flags, logging  # noqa: F401

from tests.harness import ROOT

# Modules whose flags belong to commands of this project. A command that runs as
# `__main__` registers its flags under the path of its file.
_OWN_MODULES = (
  "diffjax.",
  "experiments.",
  "benchmarks.",
  "recipes.",
  str(ROOT),
)
# Flags of ml_collections, which are registered under the module that parses.
_OWN_FLAGS = ("config", "set")


def call(module: str, *arguments: Any) -> subprocess.CompletedProcess:
  """Runs `python -m MODULE ARGUMENTS` in this process.

  Args:
    module: the command's module.
    arguments: its arguments, converted to strings.

  Returns:
    What `subprocess.run` would return. The exit code is the argument of
    `sys.exit`, which can be a message.
  """
  output = io.StringIO()
  errors = io.StringIO()
  exit_code: Any = 0
  argv = [module]
  for argument in arguments:
    argv.append(str(argument))
  # runpy warns if the module was imported before.
  sys.modules.pop(module, None)
  with (
    own_flags(),
    mock.patch.object(sys, "argv", argv),
    # The tests' process keeps its own handler of Ctrl-C.
    mock.patch("diffjax.host.signals.end_at_ctrl_c"),
    contextlib.redirect_stdout(output),
    contextlib.redirect_stderr(errors),
  ):
    try:
      runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
      exit_code = exit.code or 0
  return subprocess.CompletedProcess(
    argv, exit_code, output.getvalue(), errors.getvalue()
  )


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
  """Removes the flags of imported commands, and restores them at the end.

  Two commands can define flags of the same name. absl has one table of flags
  for a process, so a command that runs inside it needs the table for itself.
  """
  verbosity = flags.FLAGS["verbosity"]
  verbosity_state = dict(
    value=verbosity.value,
    present=verbosity.present,
    using_default_value=verbosity.using_default_value,
  )
  imported_flags = _project_flags()
  _remove_flags(imported_flags)
  try:
    yield
  finally:
    _remove_flags(_project_flags())
    for module, flag in imported_flags:
      flags.FLAGS[flag.name] = flag
      flags.FLAGS.register_flag_by_module(module, flag)
    for attribute, value in verbosity_state.items():
      setattr(verbosity, attribute, value)


def _project_flags() -> list[tuple[str, flags.Flag]]:
  """Returns the flags of this project's commands, each with its module."""
  project_flags = []
  for module, module_flags in flags.FLAGS.flags_by_module_dict().items():
    is_own_module = module.startswith(_OWN_MODULES)
    for flag in module_flags:
      # "config.train.steps" is a field of the flag "config".
      first_part = flag.name.partition(".")[0]
      if is_own_module or first_part in _OWN_FLAGS:
        project_flags.append((module, flag))
  return project_flags


def _remove_flags(flags_by_module: list[tuple[str, flags.Flag]]) -> None:
  for _, flag in flags_by_module:
    delattr(flags.FLAGS, flag.name)
