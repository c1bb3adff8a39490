"""Runs commands in the tests' own process: what tests have imported and compiled is neither imported nor compiled again."""

import contextlib
import io
import runpy
import subprocess
import sys
from unittest import mock

from absl import flags, logging  # noqa: F401 (logging defines --verbosity)

from tests.harness import ROOT


def _ours():
  """The flags of this project's modules, and of a command that has run, by module. Libraries define some too, when they are imported."""
  return [
    (module, flag)
    for module, defined in flags.FLAGS.flags_by_module_dict().items()
    for flag in defined
    if module.startswith(
      ("diffjax.", "experiments.", "benchmarks.", "recipes.", str(ROOT))
    )
    or flag.name.partition(".")[0] in ("config", "set")
  ]


def _remove(found):
  for _, flag in found:
    delattr(flags.FLAGS, flag.name)


@contextlib.contextmanager
def own_flags():
  """Room for a command's flags, which may be called as those of commands that tests have imported."""
  verbosity = flags.FLAGS["verbosity"]
  kept, shown = (
    _ours(),
    (verbosity.value, verbosity.present, verbosity.using_default_value),
  )
  _remove(kept)
  try:
    yield
  finally:
    _remove(_ours())
    for module, flag in kept:
      flags.FLAGS[flag.name] = flag
      flags.FLAGS.register_flag_by_module(module, flag)
    verbosity.value, verbosity.present, verbosity.using_default_value = shown


def call(module, *arguments):
  """What `python -m MODULE` does, told as `subprocess.run` tells it. Not for training, which changes how its process keeps memory."""
  out, errors, code = io.StringIO(), io.StringIO(), 0
  arguments = [module, *map(str, arguments)]
  with (
    own_flags(),
    mock.patch.object(sys, "argv", arguments),
    # This process keeps its own Ctrl-C.
    mock.patch("diffjax.host.signals.end_at_ctrl_c"),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(errors),
  ):
    try:
      sys.modules.pop(
        module, None
      )  # of a test that has imported it, at which runpy would warn
      runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
      code = exit.code or 0
  return subprocess.CompletedProcess(
    arguments, code, out.getvalue(), errors.getvalue()
  )
