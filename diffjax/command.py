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


def run(main: Callable[..., None], *, with_config: bool = True) -> None:
  """Runs a command: reads `--config=FILE[:VARIANT]` and overrides such as `--config.train.steps=100`, checks them, calls `main`.

  Exits with 2 for flags that cannot be read and with 1 for what else the user can mend, each with one line on standard error.

  Args:
    main: What to call with the config, or without arguments.
    with_config: Whether the command has a config.
  """
  if with_config:
    config_flag = config_flags.DEFINE_config_file("config", help_string="Config file, with a variant after a colon where it has some.")

  def fail(message: str, code: int):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)

  def check_overrides(argv: list[str]) -> None:
    """ml_collections refuses unknown fields too, but in words that do not name them whole."""
    for argument in argv:
      if argument.lstrip("-").startswith("config."):
        cls, prefix = Config, ""
        for name in argument.lstrip("-").split("=")[0].split(".")[1:]:
          hints = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
          if name not in hints:
            raise _unknown(prefix, name, hints)
          cls, prefix = hints[name], f"{prefix}{name}."

  def parse(argv: list[str]) -> ml_collections.ConfigDict | None:
    try:
      if with_config:
        check_overrides(argv)
      rest = flags.FLAGS(argv)
      if flags.FLAGS["verbosity"].using_default_value:
        # The libraries report every file they write; --verbosity=0 shows that.
        flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
      config = config_flag.value if with_config else None
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

  def checked_main(config: ml_collections.ConfigDict | None) -> None:
    try:
      main(*([] if config is None else [from_config_dict(config)]))
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

  def convert(cls, mapping, prefix):
    hints = typing.get_type_hints(cls)
    if not isinstance(mapping, dict):  # also what a config file returns, if it is no ConfigDict
      raise UserError(f"{f'config.{prefix}'.rstrip('.')} must be a section with the fields {', '.join(hints)}; got {mapping!r}")
    for name in mapping:
      if name not in hints:
        raise _unknown(prefix, name, hints)
    out = {}
    for name, value in mapping.items():
      kind = hints[name]
      if dataclasses.is_dataclass(kind):
        out[name] = convert(kind, value, f"{prefix}{name}.")
        continue
      allowed = typing.get_args(kind) or (kind,)
      if isinstance(value, int) and abs(value) >= 2**31:
        raise UserError(f"config.{prefix}{name} must be below 2³¹; got a number of {value.bit_length()} bits")
      if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
      if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join(t.__name__ for t in allowed)
        raise UserError(f"config.{prefix}{name} must be {names}; got {value!r}")
      if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config.{prefix}{name} must be finite; got {value}")
      out[name] = value
    return cls(**out)

  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict()
  config = convert(Config, values, "")
  check(config)
  return config


def _unknown(prefix: str, name: Any, fields: typing.Iterable[str]) -> UserError:
  near = difflib.get_close_matches(str(name), fields, n=1)
  hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(fields)}"
  return UserError(f"config.{prefix}{name if str(name).isprintable() else repr(name)} is not a config field: {hint}")
