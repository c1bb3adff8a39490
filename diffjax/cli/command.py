"""The command line that all commands share: a config file and its overrides, and errors in one line.

Any field of a config can be overridden (``--config.train.steps=100``).
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
from typing import Any

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


def run(
  main: Callable[..., None], *, with_config: bool = True, settings: Any = None
) -> None:
  """Runs a command: reads `--config=NAME[:VARIANT]` and overrides such as `--config.train.steps=100`, checks them, calls `main`.

  Exits with 2 for flags that cannot be read and with 1 for any other error that the user can fix, each with one line on standard error.
  `--help` prints the module's docstring and the flags that it has defined.

  Args:
    main: What to call with the config, with the settings, or without arguments.
    with_config: True for a command with a config.
    settings: A command without a config may have settings: a dataclass of sections at their defaults, overridden by flags such as
      `--set.validation.rows=100`.

  Every command has the flag `--import=MODULE`. It imports a module that
  registers attention variants, before the config is read.
  """
  if isinstance(
    sys.stdout, io.TextIOWrapper
  ):  # standard error escapes what its encoding cannot show; so shall standard output
    sys.stdout.reconfigure(errors="backslashreplace")
  with _quiet_if_nobody_reads():
    if help_page.is_asked(sys.argv[1:]):
      print(
        help_page.page(
          with_config=with_config, with_settings=settings is not None
        ),
        flush=True,
      )
      sys.exit()
    absent_tpu.skip()
    _run(main, with_config, settings)


def _run(main: Callable[..., None], with_config: bool, settings: Any) -> None:
  flag: flags.FlagHolder | None = None
  cls: type = Config if with_config else type(settings)
  root = "config" if with_config else "set"
  printing: flags.FlagHolder | None = None
  flags.DEFINE_multi_string("import", [], help_page.IMPORT["--import=MODULE"])
  if with_config:
    flag = config_flags.DEFINE_config_file(
      "config", help_string=help_page.CONFIG["--config=NAME[:VARIANT]"]
    )
    flags.FLAGS["config"].parser = ConfigFile()
    printing = flags.DEFINE_bool(
      "print_config", False, help_page.CONFIG["--print_config"]
    )
  elif settings is not None:
    try:
      _check_overrides(sys.argv[1:], root, cls)  # defining the flag reads them
    except UserError as error:
      _fail(str(error), 2)
    flag = config_flags.DEFINE_config_dict(
      "set",
      to_config_dict(settings),
      help_string="Settings: --set.SECTION.FIELD=VALUE.",
    )

  def checked_main(values: ml_collections.ConfigDict | None) -> None:
    try:
      if values is None:
        main()
      elif not with_config:
        main(to_dataclass(values, cls, root))
      elif printing is not None and printing.value:
        print(config_file.to_toml(from_config_dict(values)), end="")
      else:
        main(from_config_dict(values))
      print(end="", flush=True)  # here, where a closed pipe is noticed quietly
    except app.UsageError as error:
      _fail(str(error), 2)
    except UserError as error:
      if (
        isinstance(error.__cause__, BrokenPipeError) and _without_reader()
      ):  # what prints may also write files, and explain their errors
        raise error.__cause__ from None
      _fail(str(error), 1)
    except KeyboardInterrupt:
      _fail("interrupted", 130)

  app.run(
    checked_main,
    flags_parser=functools.partial(_parse, flag=flag, root=root, cls=cls),
  )


class ConfigFile(flags.ArgumentParser):
  """Reads the value of --config. ml_collections' own parser prints a traceback of its own for errors in the file."""

  def parse(self, spec: str) -> ml_collections.ConfigDict:
    return config_file.read(spec)

  def flag_type(self) -> str:
    return "config file"


@contextlib.contextmanager
def _quiet_if_nobody_reads() -> Iterator[None]:
  """Ends the process without a word, as SIGPIPE would, if it prints to a pipe that nobody reads any more (`… | head`).

  The signal itself would also end a process whose connection to a bucket breaks.
  """
  try:
    yield
  except BrokenPipeError:
    if not (closed := _without_reader()):
      raise
    for stream in (
      closed
    ):  # so that Python finds no error when it flushes them at its end
      os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(128 + signal.SIGPIPE)


def _without_reader() -> list[typing.TextIO]:
  """Those of standard output and standard error whose other end is closed."""
  found = []
  for stream in filter(
    None, (sys.stdout, sys.stderr)
  ):  # a process may have been started without them
    with contextlib.suppress(
      io.UnsupportedOperation
    ):  # a test's, which has no descriptor
      poll = select.poll()
      poll.register(stream.fileno(), 0)
      if any(
        event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)
      ):
        found.append(stream)
  return found


def _parse(
  argv: Sequence[str], *, flag: flags.FlagHolder | None, root: str, cls: type
) -> ml_collections.ConfigDict | None:
  """Reads all flags, and returns the value of the one that holds the config or the settings (None for a command without either)."""
  values = None
  try:
    _check_encoding(argv)
    _import_modules(argv)
    if flag is not None:
      _check_overrides(argv, root, cls)
    rest = flags.FLAGS(argv)
    if flags.FLAGS["verbosity"].using_default_value:
      # The libraries report every file they write; --verbosity=0 shows that.
      flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
    if flag is not None:
      values = flag.value
  except UserError as error:
    _fail(str(error), 2)
  except (
    flags.Error,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
  ) as error:
    _fail(
      next(line.strip() for line in str(error).splitlines() if line.strip()), 2
    )
  if len(rest) > 1:
    _fail(f"unexpected argument {rest[1]!r}: flags are written --name=value", 2)
  if flag is not None and values is None:
    _fail(
      "pass --config=NAME or --config=FILE, for example --config=tiny;"
      f" {config_file.available()}",
      2,
    )
  return values


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
  """Raises UserError for text and paths that this locale spoils: what is in C++ takes every path as UTF-8. ASCII is the same in all."""
  encoding = sys.getfilesystemencoding()
  if codecs.lookup(encoding).name == "utf-8":
    return
  # Here, so that an error in the flags does not wait for this import.
  from diffjax.host.user_cache import cache_directory

  for value in (*argv[1:], os.getcwd(), os.fspath(cache_directory())):
    if not value.isascii():
      raise UserError(
        f"{ascii(value)[1:-1]}: this locale's encoding is {encoding}, and text and paths beyond ASCII are UTF-8: set PYTHONUTF8=1 in the "
        "environment, or a locale such as C.UTF-8"
      )


def _check_overrides(argv: Sequence[str], root: str, cls: type) -> None:
  """Raises UserError for a flag `--ROOT.FIELD` whose field is not in `cls`: ml_collections' own message does not name the whole field."""
  for argument in argv:
    first, *names = argument.lstrip("-").split("=")[0].split(".")
    if not argument.startswith("-") or not names or first != root:
      continue
    kind: Any = cls
    prefix = f"{root}."
    for name in names:
      hints = (
        typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
      )
      if name not in hints:
        raise unknown_field(prefix, name, hints)
      kind, prefix = hints[name], f"{prefix}{name}."


def _fail(message: str, code: int) -> typing.NoReturn:
  print(f"error: {message}", file=sys.stderr)
  sys.exit(code)
