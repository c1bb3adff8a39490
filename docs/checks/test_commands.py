"""Documented commands have modules, flags, configs and suites that exist."""

import functools
import importlib.util
import pathlib
import re
import shlex

import pytest
from absl import flags
from ml_collections import config_flags

from diffjax.cli import command
from diffjax.config import UserError, from_config_dict
from diffjax.evals import SUITES
from diffjax.evals.suite import suite_class
from docs.checks.checked_pages import every_page
from tests.harness import ROOT, own_variants
from tests.harness.pages import commands

# Packages of this repository. The flags of other packages are not checked.
PACKAGES = ("diffjax", "benchmarks", "experiments", "recipes")
FLAG_DEFINITION = re.compile(r'(?:DEFINE_\w+\(\s*"|"--)(\w+)"')
# Errors of reading a config or settings.
CONFIG_ERRORS = (
  flags.Error,
  AttributeError,
  KeyError,
  OSError,
  TypeError,
  ValueError,
  UserError,
)


def module_exists(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:
    # The package of the module is missing.
    return False


def source_of(module: str) -> str:
  """Returns the source of a command: a module, or a package's __main__.py."""
  spec = importlib.util.find_spec(module)
  if spec.submodule_search_locations:
    folder = pathlib.Path(spec.submodule_search_locations[0])
    return (folder / "__main__.py").read_text()
  return pathlib.Path(spec.origin).read_text()


@functools.cache
def flags_of(module: str) -> set[str]:
  """Returns the names of a command's flags.

  They are read from its source, because importing all commands takes long.
  Commands that call `command.run` have the flags of diffjax/cli/command.py too:
  either --config or --set, and the others.
  """
  source = source_of(module)
  names = {"help", *FLAG_DEFINITION.findall(source)}
  if "command.run(" in source:
    shared_source = (ROOT / "diffjax/cli/command.py").read_text()
    shared_names = set(FLAG_DEFINITION.findall(shared_source))
    if "with_config=False" in source:
      shared_names.discard("config")
    else:
      shared_names.discard("set")
    names |= shared_names
  return names


def flag_names(arguments: list[str]) -> set[str]:
  """Returns the names of flags up to the dot: "train" for --train.steps=3."""
  names = set()
  for argument in arguments:
    if argument.startswith("--"):
      name, _, _ = argument.removeprefix("--").partition("=")
      section, _, _ = name.partition(".")
      names.add(section)
  return names


def config_error(module: str, arguments: list[str]) -> Exception | None:
  """Reads the --config and --set flags of a command as the command would.

  Returns:
    The error, or None if there is none.
  """
  command_line = [module]
  has_config = False
  for argument in arguments:
    if not re.match(r"--(config|set)\b", argument):
      continue
    if argument.startswith("--config="):
      has_config = True
    # A config of the package may be given by its name alone. The parser of the
    # flags needs a path: --config=tiny:diff becomes configs/tiny.py:diff.
    name_alone = r"^--config=(\w+)(?=:|$)"
    command_line.append(re.sub(name_alone, r"--config=configs/\1.py", argument))
  try:
    if has_config:
      read_config(command_line)
    elif module == "diffjax.evaluate":
      read_settings(command_line)
  except CONFIG_ERRORS as error:
    return error
  return None


def read_config(command_line: list[str]) -> None:
  """Reads --config and its overrides, or raises an error."""
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file(
    "config", flag_values=values, sys_argv=command_line
  )
  values["config"].parser = command.ConfigFile()
  values(command_line)
  from_config_dict(holder.value)


def read_settings(command_line: list[str]) -> None:
  """Reads --set.SUITE.NAME, or raises an error."""
  suites = {name: suite_class(name)() for name in SUITES}
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_dict(
    "set",
    command.settings_to_config_dict(suites),
    flag_values=values,
    sys_argv=command_line,
  )
  values(command_line)
  classes = {name: type(suite) for name, suite in suites.items()}
  command.settings_from_config_dict(holder.value, classes)


def unknown_suites(arguments: list[str]) -> set[str]:
  """Returns the names in --suite that no suite has."""
  names = set()
  for argument in arguments:
    if argument.startswith("--suite="):
      _, _, value = argument.partition("=")
      names |= set(value.split(","))
  return names - set(SUITES)


def command_errors(text: str) -> list[str]:
  """Returns a message for each mistake in the commands of a page."""
  errors = []
  for module, arguments in commands(text):
    name = shlex.join([module, *arguments])
    if not module_exists(module):
      errors.append(f"{name}: no such module")
      continue
    package, _, _ = module.partition(".")
    # The flags of programs of others, such as pytest, are not known here.
    if package not in PACKAGES:
      continue

    unknown_flags = flag_names(arguments) - flags_of(module)
    if unknown_flags:
      errors.append(f"{name}: no such flag: {', '.join(unknown_flags)}")
      continue
    error = config_error(module, arguments)
    if error is not None:
      errors.append(f"{name}: {error}")
    suites = unknown_suites(arguments)
    if module == "diffjax.evaluate" and suites:
      errors.append(f"{name}: no such suite: {', '.join(suites)}")
  return errors


@every_page
def test_commands_can_be_run(page, monkeypatch, tmp_path):
  monkeypatch.chdir(ROOT)
  # Pages have commands with the variants and suites that they define.
  with own_variants.registered(tmp_path):
    assert command_errors(page.read_text()) == []


@pytest.mark.parametrize(
  ("text", "error"),
  [
    pytest.param(
      "    python -m diffjax.trian --config=configs/tiny.py",
      "diffjax.trian --config=configs/tiny.py: no such module",
      id="module",
    ),
    pytest.param(
      "`diffjax trian --config=tiny`",
      "diffjax.trian --config=tiny: no such module",
      id="command",
    ),
    pytest.param(
      "`python -m diffjax.train --workdirs=x`",
      "no such flag: workdirs",
      id="flag",
    ),
    pytest.param(
      "python -m benchmarks.gpu --statics",
      "no such flag: statics",
      id="flag of a benchmark",
    ),
    pytest.param(
      "python -m diffjax.generate --workdir=x --config=configs/tiny.py",
      "no such flag: config",
      id="flag of another command",
    ),
    pytest.param(
      "`a` and `python -m diffjax.generate\n--workdirs=x` and\n`b`",
      "no such flag: workdirs",
      id="command on two lines",
    ),
    pytest.param(
      "srun -n 2 python -m diffjax.train --config=configs/nope.py --workdir=x",
      "nope.py",
      id="config file",
    ),
    pytest.param("`diffjax train --config=nope`", "nope.py", id="config"),
    pytest.param(
      "diffjax train --config=tiny:v3 --workdir=x",
      "'v3' is not allowed",
      id="variant",
    ),
    pytest.param(
      'on 0 ".venv/bin/python -m diffjax.train --config=configs/tiny.py'
      ' --config.train.step=3"',
      "train.step",
      id="field",
    ),
    pytest.param(
      "`diffjax train --config=tiny:transformer --config.train.step=3`",
      "train.step",
      id="field after a variant",
    ),
    pytest.param(
      "python -m diffjax.train --config=configs/tiny.py \\\n"
      "  --config.train.steps=many",
      "many",
      id="type of a field",
    ),
    pytest.param(
      "python -m diffjax.train --config=configs/tiny.py --config.data.length=0",
      "data.length = 0",
      id="bound of a field",
    ),
    pytest.param(
      "python -m diffjax.evaluate --suite=validation,needles --workdir=x",
      "no such suite: needles",
      id="suite",
    ),
    pytest.param(
      "python -m diffjax.evaluate --suite=needle --workdir=x"
      " --set.needle.length=3",
      "length",
      id="setting",
    ),
  ],
)
def test_a_wrong_command_is_reported(text, error, monkeypatch):
  """`text` is that of a page, and `error` a part of the message."""
  monkeypatch.chdir(ROOT)
  (reported,) = command_errors(text)
  assert error in reported


def test_a_command_ends_where_the_shell_ends_it():
  """A comment, an operator, a quotation mark or a backtick ends a command."""
  text = r"""    python -m a.b --c='d e' --f=\$HOME/g   # no
  for i in 0 1; do python -m a --i=$i & done; wait
  on all ".venv/bin/python -m b --c" and `python -m c --d`, or
  bash -c 'python -m d --slice=$A/$B'"""
  assert commands(text) == [
    ("a.b", ["--c=d e", "--f=$HOME/g"]),
    ("a", ["--i=$i"]),
    ("b", ["--c"]),
    ("c", ["--d"]),
    ("d", ["--slice=$A/$B"]),
  ]


def test_diffjax_with_flags_is_a_command():
  text = """diffjax trains models; see diffjax --help.
  `diffjax train --config=tiny` or .venv/bin/diffjax generate --a=b"""
  assert commands(text) == [
    ("diffjax.train", ["--config=tiny"]),
    ("diffjax.generate", ["--a=b"]),
  ]
