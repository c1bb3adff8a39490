"""Reads the commands that experiments.run prints."""

import shlex
import sys

import pytest

import diffjax.cli.command
from tests.harness import in_process


def parsed(line):
  """The workdir and the config that `diffjax.train` reads from a printed line."""
  python, dash_m, module, *arguments = shlex.split(line)
  assert (python, dash_m, module) == (sys.executable, "-m", "diffjax.train")
  (workdir,) = (
    argument.removeprefix("--workdir=")
    for argument in arguments
    if argument.startswith("--workdir=")
  )
  configs = []
  with (
    in_process.own_flags(),
    pytest.MonkeyPatch.context() as patch,
    pytest.raises(SystemExit),
  ):
    patch.setattr(
      sys,
      "argv",
      [
        "train",
        *(
          argument
          for argument in arguments
          if not argument.startswith("--workdir=")
        ),
      ],
    )
    diffjax.cli.command.run(configs.append)
  return workdir, *configs
