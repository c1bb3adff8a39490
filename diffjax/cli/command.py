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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from diffjax.cli import config_file, help_page
from diffjax.config import (
  Config,
  UserError,
  field_types,
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
  """The flag of a command's config or of its settings.

  Its value is a ConfigDict. Other flags override single fields of it, for
  example --config.train.steps=100.

  Attributes:
    name: "config" or "set".
    sections: the dataclass of each section, by the section's name.
    holder: absl's reference to the value. It has one after flags are parsed.
  """

  name: str
  sections: Mapping[str, type]
  holder: flags.FlagHolder


class ConfigFile(flags.ArgumentParser):
  """Reads the config file that --config names.

  It replaces the parser of ml_collections, which prints a traceback if the file
  has an error.
  """

  def parse(self, spec: str) -> ml_collections.ConfigDict:
    return config_file.read(spec)

  def flag_type(self) -> str:
    return "config file"


def run(
  main: Callable[..., None],
  *,
  with_config: bool = True,
  default_settings: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
  """Reads the flags of a command and calls its `main`, or prints its help.

  Flags of all commands are `--help` and `--import=MODULE`, which imports a
  module that registers attention variants. A command with a config has
  `--config=NAME[:VARIANT]` and overrides such as `--config.train.steps=100`.

  Exits with 2 for flags that cannot be read, and with 1 for other errors of the
  user. Both print one line to standard error.

  Args:
    main: is called with the config, with the settings, or without arguments.
    with_config: whether the command has a config.
    default_settings: returns the settings of a command without a config:
      dataclasses at their defaults, by name. Flags such as
      `--set.validation.rows=100` override them. `main` gets a dict of
      dataclasses of the same types.
  """
  # Standard output now escapes characters that its encoding does not have, as
  # standard error does. Otherwise, printing them would raise an error.
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
  with _quiet_if_nobody_reads():
    if help_page.is_requested(sys.argv[1:]):
      help_text = help_page.help_text(
        with_config=with_config, with_settings=default_settings is not None
      )
      print(help_text, flush=True)
      sys.exit()
    # Must be called before JAX looks for devices.
    absent_tpu.skip()
    values_flag = _define_flags(with_config, default_settings)
    # absl calls `_parse_flags`, and then `_call_main` with its result.
    app.run(
      functools.partial(_call_main, main, values_flag),
      flags_parser=functools.partial(_parse_flags, values_flag),
    )


def _define_flags(
  with_config: bool,
  default_settings: Callable[[], Mapping[str, Any]] | None,
) -> _ValuesFlag | None:
  """Defines the flags that all commands with a config or with settings share.

  The arguments are those of `run`.

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
    return _ValuesFlag("config", field_types(Config), holder)
  if default_settings is None:
    return None
  # ml_collections reads the overrides when the flag is defined. It reports
  # unknown fields badly, so they are checked before.
  try:
    settings = default_settings()
    sections = {name: type(section) for name, section in settings.items()}
    _check_overrides(sys.argv[1:], "set", sections)
  except UserError as error:
    _fail(str(error), _USAGE_ERROR)
  holder = config_flags.DEFINE_config_dict(
    "set",
    settings_to_config_dict(settings),
    help_string="Settings: --set.SECTION.FIELD=VALUE.",
  )
  return _ValuesFlag("set", sections, holder)


def _parse_flags(
  values_flag: _ValuesFlag | None, argv: Sequence[str]
) -> ml_collections.ConfigDict | None:
  """Returns the config or the settings of a command line.

  Returns None for a command without either. If the command line is wrong,
  prints the reason and ends the process.
  """
  try:
    return _read_flags(values_flag, argv)
  except UserError as error:
    _fail(str(error), _USAGE_ERROR)
  except (
    flags.Error,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
  ) as error:
    # absl and ml_collections raise these for values that they cannot read.
    first_line, *_ = str(error).strip().splitlines()
    _fail(first_line.strip(), _USAGE_ERROR)


def _read_flags(
  values_flag: _ValuesFlag | None, argv: Sequence[str]
) -> ml_collections.ConfigDict | None:
  """Returns the config or the settings of a command line.

  Raises:
    UserError: if the command line is wrong. absl and ml_collections also raise
      their own errors.
  """
  _check_encoding(argv)
  # A config file may use what the modules register.
  import_modules(argv)
  if values_flag is not None:
    _check_overrides(argv, values_flag.name, values_flag.sections)
  # What remains is the name of the program, and arguments that are no flags.
  _, *unexpected = flags.FLAGS(argv)
  if flags.FLAGS["verbosity"].using_default_value:
    # Libraries log every file that they write. --verbosity=0 shows these lines.
    flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
  if unexpected:
    raise UserError(
      f"unexpected argument {unexpected[0]!r}: flags are written --name=value"
    )
  if values_flag is None:
    return None
  values = values_flag.holder.value
  if values is None:
    raise UserError(
      "pass --config=NAME or --config=FILE, for example --config=tiny;"
      f" {config_file.available()}"
    )
  return values


def _call_main(
  main: Callable[..., None],
  values_flag: _ValuesFlag | None,
  values: ml_collections.ConfigDict | None,
) -> None:
  """Checks the config or the settings, and calls `main` with them.

  Prints errors of the user in one line, and ends the process then.
  """
  try:
    if values_flag is None or values is None:
      main()
    elif values_flag.name == "set":
      main(settings_from_config_dict(values, values_flag.sections))
    elif flags.FLAGS.print_config:
      print(config_file.to_toml(from_config_dict(values)), end="")
    else:
      main(from_config_dict(values))
    # If a pipe is closed, flushing raises BrokenPipeError. That must happen
    # here, where `_quiet_if_nobody_reads` handles it.
    print(end="", flush=True)
  except app.UsageError as error:
    _fail(str(error), _USAGE_ERROR)
  except UserError as error:
    # `main` may have turned the error of a closed output into a UserError. The
    # original error is raised, since `_quiet_if_nobody_reads` handles it.
    cause = error.__cause__
    if isinstance(cause, BrokenPipeError) and _closed_outputs():
      raise cause from None
    _fail(str(error), _USER_ERROR)
  except KeyboardInterrupt:
    _fail("interrupted", _INTERRUPTED)


def settings_to_config_dict(
  settings: Mapping[str, Any],
) -> ml_collections.ConfigDict:
  """Returns the settings of a command as a ConfigDict, which flags can change.

  Args:
    settings: the dataclass of each section, by the section's name.
  """
  values = ml_collections.ConfigDict()
  for name, section in settings.items():
    values[name] = to_config_dict(section)
  return values


def settings_from_config_dict(
  values: ml_collections.ConfigDict, sections: Mapping[str, type]
) -> dict[str, Any]:
  """Returns the dataclass of each section with its values.

  Args:
    values: the fields by section and name.
    sections: the type of each section.

  Raises:
    UserError: for the first field that is wrong.
  """
  settings: dict[str, Any] = {}
  for name, section_type in sections.items():
    settings[name] = to_dataclass(values[name], section_type, f"set.{name}")
  return settings


@contextlib.contextmanager
def _quiet_if_nobody_reads() -> Iterator[None]:
  """Ends the process without an error message if its output pipe is closed.

  Example: in `diffjax checkpoints | head -1`, head closes the pipe. The default
  action of SIGPIPE would be simpler, but would also end a process that loses a
  network connection.
  """
  try:
    yield
  except BrokenPipeError:
    closed_outputs = _closed_outputs()
    # Without closed outputs, another pipe is broken.
    if not closed_outputs:
      raise
    # Python flushes both outputs at exit. Writing to the null device succeeds.
    for output in closed_outputs:
      null_device = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null_device, output.fileno())
    sys.exit(_BROKEN_PIPE)


def _closed_outputs() -> list[typing.TextIO]:
  """Returns standard output and error, if their reading ends are closed."""
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
    # Errors and hang-ups are reported even if no event is asked for (0).
    poll.register(descriptor, 0)
    for _, event in poll.poll(0):  # returns at once
      if event & (select.POLLERR | select.POLLHUP):
        closed_outputs.append(output)
  return closed_outputs


def import_modules(argv: Sequence[str]) -> None:
  """Imports the modules that a command line names with --import.

  Raises:
    UserError: if a module cannot be imported, or the flag has no value.
  """
  modules = imported_modules(argv)
  if not modules:
    return
  # Imported here, because it imports JAX, which takes seconds.
  from diffjax.model import registry

  registry.import_modules(modules)


def imported_modules(argv: Sequence[str]) -> list[str]:
  """Returns the modules that a command line names with --import.

  The flag may be repeated, and a value may be several modules with commas
  between them.

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
    # Without "=", the next argument is the value.
    if not equals:
      value = next(arguments, "")
    if not value:
      raise UserError(
        "--import needs a module, such as --import=my_package.dint"
      )
    modules += value.split(",")
  return modules


def _check_encoding(argv: Sequence[str]) -> None:
  """Checks that arguments and paths have the same bytes in UTF-8.

  Libraries in C++ read every path as UTF-8. In another encoding, only ASCII has
  the same bytes.

  Raises:
    UserError: if the encoding of the file system is not UTF-8, and an argument,
      the current directory or the cache directory is not ASCII.
  """
  encoding = sys.getfilesystemencoding()
  if codecs.lookup(encoding).name == "utf-8":
    return
  # Imported here, so that an error in the flags does not wait for this import.
  from diffjax.host.user_cache import cache_directory

  for value in (*argv[1:], os.getcwd(), os.fspath(cache_directory())):
    if not value.isascii():
      escaped = ascii(value)[1:-1]
      raise UserError(
        f"{escaped}: this locale's encoding is {encoding}, and text and paths"
        " beyond ASCII are UTF-8: set PYTHONUTF8=1 in the environment, or a"
        " locale such as C.UTF-8"
      )


def _check_overrides(
  argv: Sequence[str], root: str, sections: Mapping[str, type]
) -> None:
  """Checks that every override, such as --config.train.steps, names a field.

  ml_collections checks this too, but its error lacks the field's full name.

  Args:
    argv: the command line.
    root: the flag that is overridden: "config" or "set".
    sections: the dataclass of each section, by the section's name.

  Raises:
    UserError: with the full name of the first field that does not exist.
  """
  for argument in argv:
    if not argument.startswith("-"):
      continue
    flag_name, _, _ = argument.lstrip("-").partition("=")
    first_name, *field_path = flag_name.split(".")
    if first_name == root:
      _check_field_exists(field_path, sections, f"{root}.")


def _check_field_exists(
  field_path: Sequence[str], types_by_name: Mapping[str, Any], prefix: str
) -> None:
  """Checks that a path of names leads to a field.

  Example: ["train", "steps"] leads to the field `steps` of the section `train`.

  Args:
    field_path: the name of a section, then names of fields in it. An empty path
      is valid.
    types_by_name: the type of each section or field that may come first. It is
      a dataclass for a section.
    prefix: the names before the path in error messages, such as "config.".

  Raises:
    UserError: with the first name that is not a field.
  """
  if not field_path:
    return
  name, *remaining_path = field_path
  if name not in types_by_name:
    raise unknown_field(prefix, name, types_by_name)
  inner_types = {}
  if dataclasses.is_dataclass(types_by_name[name]):
    inner_types = field_types(types_by_name[name])
  _check_field_exists(remaining_path, inner_types, f"{prefix}{name}.")


def _fail(message: str, code: int) -> typing.NoReturn:
  """Ends the process with one line on standard error."""
  print(f"error: {message}", file=sys.stderr)
  sys.exit(code)
