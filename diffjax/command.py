"""What the commands share: a config file and its overrides, read and checked, and errors in one line.

A config file (``configs/*.py``) returns an ``ml_collections.ConfigDict`` laid out like `diffjax.config.Config`, so that any field can be
overridden on the command line (``--config.train.steps=100``).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import pathlib
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from diffjax.config import Config, UserError, check

Section = typing.TypeVar("Section")


def run(main: Callable[..., None], *, with_config: bool = True, settings: Any = None) -> None:
  """Runs a command: reads `--config=FILE[:VARIANT]` and overrides such as `--config.train.steps=100`, checks them, calls `main`.

  Exits with 2 for flags that cannot be read and with 1 for what else the user can mend, each with one line on standard error.

  Args:
    main: What to call with the config, with the settings, or without arguments.
    with_config: Whether the command has a config.
    settings: A command without a config may have settings: a dataclass of sections at their defaults, overridden by flags such as
      `--set.validation.rows=100`.
  """

  def fail(message: str, code: int):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)

  def check_overrides(argv: list[str]) -> None:
    """ml_collections refuses unknown fields too, but in words that do not name them whole."""
    for argument in argv:
      root, *names = argument.lstrip("-").split("=")[0].split(".")
      if argument.startswith("-") and names and root in overridden:
        cls: Any = overridden[root]
        prefix = f"{root}."
        for name in names:
          hints = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
          if name not in hints:
            raise _unknown(prefix, name, hints)
          cls, prefix = hints[name], f"{prefix}{name}."

  # By the name of the flag.
  overridden: dict[str, type] = {"config": Config} if with_config else {} if settings is None else {"set": type(settings)}
  if with_config:
    config_flag = config_flags.DEFINE_config_file("config", help_string="Config file, with a variant after a colon where it has some.")
  elif settings is not None:
    try:
      check_overrides(sys.argv[1:])  # defining the flag reads them
    except UserError as error:
      fail(str(error), 2)
    config_flag = config_flags.DEFINE_config_dict("set", to_config_dict(settings), help_string="Settings: --set.SECTION.FIELD=VALUE.")

  def parse(argv: list[str]) -> ml_collections.ConfigDict | None:
    try:
      check_overrides(argv)
      rest = flags.FLAGS(argv)
      if flags.FLAGS["verbosity"].using_default_value:
        # The libraries report every file they write; --verbosity=0 shows that.
        flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
      config = config_flag.value if overridden else None
      if config is not None:
        config.to_dict()  # a missing file is reported at the first access
    except UserError as error:
      fail(str(error), 2)
    except OSError:
      fail(f"--config: no such file; {configs()}", 2)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
      lines = [line.strip() for line in str(error).splitlines() if line.strip()]
      fail(lines[-1] if "parsing config file" in lines[0] else lines[0], 2)
    if len(rest) > 1:
      fail(f"unexpected argument {rest[1]!r}: flags are written --name=value", 2)
    if with_config and config is None:
      fail(f"pass --config=FILE[:VARIANT], for example --config=configs/tiny.py; {configs()}", 2)
    return config

  def configs() -> str:
    names = sorted(str(path) for path in pathlib.Path("configs").glob("*.py"))
    return f"there are {', '.join(names)}" if names else "there are none in ./configs: run from the root of the repository"

  def checked_main(values: ml_collections.ConfigDict | None) -> None:
    try:
      if values is None:
        main()
      else:
        main(from_config_dict(values) if with_config else to_dataclass(values, type(settings), "set"))
    except app.UsageError as error:
      fail(str(error), 2)
    except UserError as error:
      fail(str(error), 1)
    except KeyboardInterrupt:
      fail("interrupted", 130)

  app.run(checked_main, flags_parser=parse)


def to_config_dict(config: Any = None) -> ml_collections.ConfigDict:
  """A config (the defaults if none) as a ConfigDict, for config files to edit and flags to override."""

  def convert(section):
    out = ml_collections.ConfigDict()
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
      value = getattr(section, field.name)
      if dataclasses.is_dataclass(value):
        value = convert(value)
      elif isinstance(hints[field.name], types.UnionType):  # float | None: None stays overridable by a float
        placeholder = config_dict.placeholder(typing.get_args(hints[field.name])[0])
        out[field.name] = placeholder
      out[field.name] = value
    return out

  return convert(config or Config())


def from_config_dict(values: ml_collections.ConfigDict | dict[str, Any]) -> Config:
  """Checks field names, types and ranges.

  Raises:
    UserError: naming the field, what it got and what would work.
  """
  config = to_dataclass(values, Config, "config")
  check(config)
  return config


def to_dataclass(values: ml_collections.ConfigDict | dict[str, Any], cls: type[Section], root: str) -> Section:
  """A dataclass of plain fields, tuples and sections from nested dicts, names and types checked.

  Args:
    values: What the fields are; one that is left out keeps its default.
    cls: The dataclass.
    root: What messages call it.

  Raises:
    UserError: naming the field, what it got and what would work.
  """

  def convert(cls, mapping, prefix):
    hints = typing.get_type_hints(cls)
    if not isinstance(mapping, dict):  # also what a config file returns, if it is no ConfigDict
      raise UserError(f"{prefix.rstrip('.')} must be a section with the fields {', '.join(hints)}; got {mapping!r}")
    for name in mapping:
      if name not in hints:
        raise _unknown(prefix, name, hints)
    return cls(**{name: convert_field(hints[name], value, f"{prefix}{name}") for name, value in mapping.items()})

  def convert_field(kind, value, field):
    if dataclasses.is_dataclass(kind):
      return convert(kind, value, f"{field}.")
    if typing.get_origin(kind) is tuple:  # tuple[int, ...]
      if not isinstance(value, tuple | list):
        raise UserError(f"{field} must be values with commas between them; got {value!r}")
      return tuple(convert_field(typing.get_args(kind)[0], item, field) for item in value)
    allowed = typing.get_args(kind) or (kind,)
    if isinstance(value, int) and abs(value) >= 2**31:
      raise UserError(f"{field} must be below 2³¹; got a number of {value.bit_length()} bits")
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
      value = float(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
      names = " or ".join(t.__name__ for t in allowed)
      raise UserError(f"{field} must be {names}; got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
      raise UserError(f"{field} must be finite; got {value}")
    return value

  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict()
  return convert(cls, values, f"{root}.")


def _unknown(prefix: str, name: Any, fields: typing.Iterable[str]) -> UserError:
  near = difflib.get_close_matches(str(name), fields, n=1)
  root, _, section = prefix.partition(".")
  hint = f"did you mean {section}{near[0]}?" if near else f"there are {', '.join(fields)}"
  kind = "config field" if root == "config" else "setting"
  return UserError(f"{prefix}{name if str(name).isprintable() else repr(name)} is not a {kind}: {hint}")
