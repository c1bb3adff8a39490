"""The command line that all commands share.

A command reads a config file and its overrides (`--config.train.steps=100`), or
settings, and prints errors of the user in one line.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import io
import os
import select
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from diffjax.cli import config_file, help_page
from diffjax.config import (
  Config,
  UserError,
  from_config_dict,
  to_config_dict,
  to_dataclass,
  unknown_field,
)
from diffjax.host import absent_tpu

# Exit codes.
_USER_ERROR = 1
_USAGE_ERROR = 2
# What a shell reports for a process that SIGINT or SIGPIPE ends.
_INTERRUPTED = 128 + signal.SIGINT
_BROKEN_PIPE = 128 + signal.SIGPIPE


class _ValuesFlag(NamedTuple):
  """The flag --config or --set, whose value has fields that flags override.

  Attributes:
    name: "config" or "set".
    fields: the dataclass of the fields.
    holder: holds the value, a ConfigDict, after flags were parsed.
  """

  name: str
  fields: type
  holder: flags.FlagHolder


class ConfigFile(flags.ArgumentParser):
  """Reads the value of --config.

  The parser of ml_collections prints a traceback if the file has an error.
  """

  def parse(self, spec: str) -> ml_collections.ConfigDict:
    return config_file.read(spec)

  def flag_type(self) -> str:
    return "config file"


def run(
  main: Callable[..., None], *, with_config: bool = True, settings: Any = None
) -> None:
  """Runs a command.

  Reads `--config=NAME[:VARIANT]` and overrides such as
  `--config.train.steps=100`, checks them, and calls `main`. `--import=MODULE`
  imports a module that registers attention variants, before the config is read.
  `--help` prints the module's docstring and the flags that it has defined.

  Exits with 2 for flags that cannot be read, and with 1 for other errors of the
  user. Both print one line to standard error.

  Args:
    main: is called with the config, with the settings, or without arguments.
    with_config: whether the command has a config.
    settings: the settings of a command without a config: a dataclass of
      sections at their defaults. Flags such as `--set.validation.rows=100`
      override them.
  """
  # Standard error escapes what its encoding cannot show. So does standard
  # output from here on.
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
  with _quiet_if_nobody_reads():
    if help_page.is_asked(sys.argv[1:]):
      page = help_page.page(
        with_config=with_config, with_settings=settings is not None
      )
      print(page, flush=True)
      sys.exit()
    absent_tpu.skip()
    values_flag = _define_flags(with_config, settings)
    app.run(
      functools.partial(_call_main, main, values_flag),
      flags_parser=functools.partial(_parse_flags, values_flag),
    )


def _define_flags(with_config: bool, settings: Any) -> _ValuesFlag | None:
  """Defines the flags that commands share.

  Returns:
    The flag of the config or the settings. None for a command without either.
  """
  flags.DEFINE_multi_string("import", [], help_page.IMPORT["--import=MODULE"])
  if with_config:
    holder = config_flags.DEFINE_config_file(
      "config", help_string=help_page.CONFIG["--config=NAME[:VARIANT]"]
    )
    flags.FLAGS["config"].parser = ConfigFile()
    flags.DEFINE_bool("print_config", False, help_page.CONFIG["--print_config"])
    return _ValuesFlag("config", Config, holder)
  if settings is None:
    return None
  # Defining the flag already reads the overrides.
  try:
    _check_overrides(sys.argv[1:], "set", type(settings))
  except UserError as error:
    _fail(str(error), _USAGE_ERROR)
  holder = config_flags.DEFINE_config_dict(
    "set",
    to_config_dict(settings),
    help_string="Settings: --set.SECTION.FIELD=VALUE.",
  )
  return _ValuesFlag("set", type(settings), holder)


def _parse_flags(
  values_flag: _ValuesFlag | None, argv: Sequence[str]
) -> ml_collections.ConfigDict | None:
  """Reads all flags and returns the config or the settings.

  Returns None for a command without either. Ends the process if the flags
  cannot be read.
  """
  values = None
  try:
    _check_encoding(argv)
    _import_modules(argv)
    if values_flag is not None:
      _check_overrides(argv, values_flag.name, values_flag.fields)
    arguments = flags.FLAGS(argv)
    if flags.FLAGS["verbosity"].using_default_value:
      # The libraries report every file they write; --verbosity=0 shows that.
      flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
    if values_flag is not None:
      values = values_flag.holder.value
  except UserError as error:
    _fail(str(error), _USAGE_ERROR)
  except (
    flags.Error,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
  ) as error:
    first_line, *_ = str(error).strip().splitlines()
    _fail(first_line.strip(), _USAGE_ERROR)
  # The first argument is the name of the program.
  if len(arguments) > 1:
    _fail(
      f"unexpected argument {arguments[1]!r}: flags are written --name=value",
      _USAGE_ERROR,
    )
  if values_flag is not None and values is None:
    _fail(
      "pass --config=NAME or --config=FILE, for example --config=tiny;"
      f" {config_file.available()}",
      _USAGE_ERROR,
    )
  return values


def _call_main(
  main: Callable[..., None],
  values_flag: _ValuesFlag | None,
  values: ml_collections.ConfigDict | None,
) -> None:
  """Calls `main` with the checked values, and prints errors in one line."""
  try:
    if values_flag is None or values is None:
      main()
    elif values_flag.name == "set":
      main(to_dataclass(values, values_flag.fields, "set"))
    elif flags.FLAGS.print_config:
      print(config_file.to_toml(from_config_dict(values)), end="")
    else:
      main(from_config_dict(values))
    # Flushes here, where a closed pipe ends the process quietly.
    print(end="", flush=True)
  except app.UsageError as error:
    _fail(str(error), _USAGE_ERROR)
  except UserError as error:
    # A function that prints may also write files and explain its errors.
    if isinstance(error.__cause__, BrokenPipeError) and _closed_outputs():
      raise error.__cause__ from None
    _fail(str(error), _USER_ERROR)
  except KeyboardInterrupt:
    _fail("interrupted", _INTERRUPTED)


@contextlib.contextmanager
def _quiet_if_nobody_reads() -> Iterator[None]:
  """Ends the process quietly if nobody reads its output any more (`… | head`).

  SIGPIPE would do so too. But it would also end a process whose connection to a
  bucket breaks.
  """
  try:
    yield
  except BrokenPipeError:
    closed_outputs = _closed_outputs()
    if not closed_outputs:
      raise
    # Python flushes the outputs when it ends, which must not fail.
    for output in closed_outputs:
      null_device = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null_device, output.fileno())
    sys.exit(_BROKEN_PIPE)


def _closed_outputs() -> list[typing.TextIO]:
  """Returns standard output and error, if their other ends are closed."""
  closed_outputs = []
  for output in (sys.stdout, sys.stderr):
    # A process may have been started without them.
    if output is None:
      continue
    try:
      descriptor = output.fileno()
    except io.UnsupportedOperation:
      # Tests replace the outputs by objects without a descriptor.
      continue
    poll = select.poll()
    poll.register(descriptor, 0)
    for _, event in poll.poll(0):
      if event & (select.POLLERR | select.POLLHUP):
        closed_outputs.append(output)
  return closed_outputs


def _import_modules(argv: Sequence[str]) -> None:
  """Imports the modules of --import, and of --import=A,B with commas between.

  This is before the other flags are read, because a config file may use what
  the modules register.

  Raises:
    UserError: if a module cannot be imported, or the flag has no value.
  """
  modules = imported_modules(argv)
  if not modules:
    return
  # Here, because commands without this flag may not need JAX.
  from diffjax.model.registry import import_modules

  import_modules(modules)


def imported_modules(argv: Sequence[str]) -> list[str]:
  """Returns the modules that a command line names with --import.

  Example: ["train", "--import=my.dint", "--import", "a,b"] →
  ["my.dint", "a", "b"]

  Raises:
    UserError: if the flag has no value.
  """
  modules: list[str] = []
  arguments = iter(argv)
  for argument in arguments:
    if argument == "--":
      break
    name, equals, value = argument.partition("=")
    if name not in ("--import", "-import"):
      continue
    if not equals:
      value = next(arguments, "")
    if not value:
      raise UserError(
        "--import needs a module, such as --import=my_package.dint"
      )
    modules += value.split(",")
  return modules


def _check_encoding(argv: Sequence[str]) -> None:
  """Checks that text and paths are ASCII, or that the locale is UTF-8.

  Libraries in C++ take every path as UTF-8. ASCII is the same in all encodings.

  Raises:
    UserError: with the first text or path that is not ASCII.
  """
  encoding = sys.getfilesystemencoding()
  if codecs.lookup(encoding).name == "utf-8":
    return
  # Here, so that an error in the flags does not wait for this import.
  from diffjax.host.user_cache import cache_directory

  for value in (*argv[1:], os.getcwd(), os.fspath(cache_directory())):
    if not value.isascii():
      escaped = ascii(value)[1:-1]
      raise UserError(
        f"{escaped}: this locale's encoding is {encoding}, and text and paths"
        " beyond ASCII are UTF-8: set PYTHONUTF8=1 in the environment, or a"
        " locale such as C.UTF-8"
      )


def _check_overrides(argv: Sequence[str], root: str, fields: type) -> None:
  """Checks that the fields of all flags `--ROOT.FIELD` exist.

  The error of ml_collections does not have the full name of a field.

  Args:
    argv: the command line.
    root: "config" or "set".
    fields: the dataclass of the fields.

  Raises:
    UserError: with the full name of the first field that does not exist.
  """
  for argument in argv:
    if not argument.startswith("-"):
      continue
    flag_name, _, _ = argument.lstrip("-").partition("=")
    first_name, *names = flag_name.split(".")
    if first_name == root:
      _check_field_exists(names, root, fields)


def _check_field_exists(names: Sequence[str], root: str, fields: type) -> None:
  """Raises UserError if ["train", "steps"] is not a field below the root."""
  field_type: Any = fields
  prefix = f"{root}."
  for name in names:
    types_by_name = {}
    if dataclasses.is_dataclass(field_type):
      types_by_name = typing.get_type_hints(field_type)
    if name not in types_by_name:
      raise unknown_field(prefix, name, types_by_name)
    field_type = types_by_name[name]
    prefix = f"{prefix}{name}."


def _fail(message: str, code: int) -> typing.NoReturn:
  """Ends the process with one line on standard error."""
  print(f"error: {message}", file=sys.stderr)
  sys.exit(code)
