"""Reads the commands that experiments.run prints."""

import shlex
import sys

import pytest

import diffjax.cli.command
from tests.harness import in_process

_WORKDIR = "--workdir="


def configs_by_workdir(output):
  """Returns the config of each printed `diffjax.train` command, by workdir."""
  configs = {}
  for line in output.splitlines():
    workdir, config = parsed(line)
    configs[workdir] = config
  return configs


def parsed(line):
  """Returns the workdir and the config of a printed `diffjax.train` command."""
  python, dash_m, module, *arguments = shlex.split(line)
  assert (python, dash_m, module) == (sys.executable, "-m", "diffjax.train")

  workdirs = []
  config_flags = []
  for argument in arguments:
    if argument.startswith(_WORKDIR):
      workdirs.append(argument.removeprefix(_WORKDIR))
    else:
      config_flags.append(argument)
  (workdir,) = workdirs
  return workdir, _read_config(config_flags)


def _read_config(config_flags):
  """Returns the config that a command reads from its flags."""
  configs = []
  with in_process.own_flags(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["train", *config_flags])
    with pytest.raises(SystemExit):
      diffjax.cli.command.run(configs.append)
  (config,) = configs
  return config
