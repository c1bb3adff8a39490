"""Config files: Python that returns a ConfigDict (`configs/*.py`), and TOML, which holds the fields of a run as plain data.

A run keeps its config in its workdir as TOML, so nothing that came with a checkpoint is executed when it is passed back in.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import inspect
import json
import pathlib
import re
import sys
import sysconfig
import textwrap
import tomllib
import traceback
import typing

from diffjax.config import (
  Bound,
  Config,
  UserError,
  bound_of,
  to_config_dict,
  to_dataclass,
)

if typing.TYPE_CHECKING:
  import ml_collections
  from etils import epath

# The run's config in its workdir.
NAME = "config.toml"
# The configs that come with the package: configs/ in the repository.
_PACKAGE = pathlib.Path(__file__).parents[1]
_CONFIGS = _PACKAGE / "configs"

_WIDTH = 100
# Code that the user did not write: an error in it is the fault of the line that called it.
_LIBRARIES = (
  "<",
  str(_PACKAGE),
  *(
    sysconfig.get_path(name)
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
  ),
)
# Paths may hold bytes that are not UTF-8, which Python keeps as surrogates.
_ENCODING = dict(encoding="utf-8", errors="surrogateescape")


def read(spec: str) -> ml_collections.ConfigDict:
  """Returns the config that --config names.

  Args:
    spec: NAME, NAME:VARIANT, FILE or FILE:VARIANT. NAME is a config of the
      package, such as "tiny". It takes precedence over a file of that name.

  Raises:
    UserError: in one line, with the file and the line where something is wrong.
  """
  if _is_toml(spec):
    return _read_toml(spec)
  name, colon, variant = spec.partition(":")
  if name.endswith(".toml"):
    raise UserError(
      f"--config={_shown(spec)}: a TOML file has no variants; pass --config={_shown(name)}"
    )
  path = pathlib.Path(name)
  if name in names():
    path = _CONFIGS / f"{name}.py"
  try:
    is_directory, exists = path.is_dir(), path.exists()
  except (
    OSError,
    ValueError,
  ) as error:  # such as a name that is too long, or holds a null
    raise UserError(
      f"--config={_shown(name)}: cannot be read ({error})"
    ) from error
  if name and is_directory:
    files = sorted([*path.glob("[!_]*.py"), *path.glob(NAME)])
    inside = (
      f"a file in it: {', '.join(map(str, files))}"
      if files
      else f"a file; {available()}"
    )
    raise UserError(
      f"--config={_shown(name)}: that is a directory; name {inside}"
    )
  if not name or not exists:
    raise UserError(
      f"--config={_shown(name)}: no such config or file; {available()}"
    )
  arguments = [variant] if colon else []
  try:
    return _call(path, name, *arguments)
  except UserError:
    raise
  except OSError as error:
    if error.filename == str(path):
      raise UserError(
        f"--config={_shown(name)}: cannot be read ({error.strerror})"
      ) from error
    raise _located(name, error) from error
  except Exception as error:  # whatever the user's own code raises
    raise _located(name, error) from error


def names() -> list[str]:
  """Returns the names of the package's configs."""
  return sorted(path.stem for path in _CONFIGS.glob("[!_]*.py"))


def available() -> str:
  """Returns the names of the package's configs, for error messages."""
  return f"the configs are {', '.join(names())}"


def run_name(spec: str) -> str | None:
  """Returns a name for the run of a config, or None for a TOML file.

  For "configs/diff_1b.py:transformer" it is "diff_1b_transformer", and for
  "experiments/scaling/config.py" it is "scaling". A TOML file is the config of a
  run, and all of them have the same name.

  Args:
    spec: The value of --config.
  """
  if _is_toml(spec):
    return None
  file, _, variant = spec.partition(":")
  path = pathlib.Path(file)
  name = path.stem
  # The configs of the experiments are all called config.py.
  if name == "config" and path.parent.name not in ("", ".."):
    name = path.parent.name
  if not variant:
    return name
  return f"{name}_{re.sub('[^A-Za-z0-9._-]', '_', variant)}"


def _is_toml(spec: str) -> bool:
  return "://" in spec or spec.endswith(".toml")


def to_toml(config: Config, *, comments: bool = True) -> str:
  """The config as a TOML file that `read` takes, every field included.

  Args:
    config: The config.
    comments: True for a comment above each field, with its unit, what it may be and what it does.
  """
  lines = (
    [
      "# Every field of a config; --config takes this file. A field whose line is a comment is None."
    ]
    if comments
    else []
  )
  for section in dataclasses.fields(config):
    values = getattr(config, section.name)
    about = _comments(type(values))
    lines += (
      ["", f"# {type(values).__doc__}"] if comments else [""] * bool(lines)
    )
    lines.append(f"[{section.name}]")
    for field in dataclasses.fields(values):
      if comments:
        lines += textwrap.wrap(
          _about(about[field.name], bound_of(field)),
          _WIDTH,
          initial_indent="# ",
          subsequent_indent="# ",
        )
      value = getattr(values, field.name)
      lines.append(
        f"# {field.name} = None"
        if value is None
        else f"{field.name} = {_scalar(value)}"
      )
  return "\n".join(lines).strip() + "\n"


def write(path: epath.Path, config: Config) -> None:
  """Writes the config as TOML, completely or not at all.

  Raises:
    UserError: if that fails.
  """
  temporary = path.parent / f"{path.name}.tmp"
  try:
    temporary.write_bytes(to_toml(config).encode(**_ENCODING))
    temporary.replace(path)
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error}"
    ) from error


def _read_toml(path: str) -> ml_collections.ConfigDict:
  from etils import epath  # here: a mistyped flag does not wait for it

  try:
    values = tomllib.loads(
      epath.Path(path).expanduser().read_bytes().decode(**_ENCODING)
    )
  except FileNotFoundError as error:
    raise UserError(
      f"--config={_shown(path)}: no such config or file; {available()}"
    ) from error
  except (
    OSError,
    ImportError,
  ) as error:  # ImportError: gs:// without its library
    raise UserError(
      f"--config={_shown(path)}: cannot be read ({error})"
    ) from error
  except (ValueError, RecursionError) as error:
    raise UserError(
      f"--config={_shown(path)}: not TOML: {_line(error)}"
    ) from error
  try:
    return to_config_dict(to_dataclass(values, Config, "config"))
  except UserError as error:
    raise UserError(f"--config={_shown(path)}: {error}") from error


def _call(
  path: pathlib.Path, name: str, *variant: str
) -> ml_collections.ConfigDict:
  """Runs a Python file, and calls its `get_config`.

  Args:
    path: The file.
    name: What --config calls it.
    *variant: The variant, if --config has one.
  """
  import ml_collections

  loader = importlib.machinery.SourceFileLoader("config_file", str(path))
  spec = importlib.util.spec_from_loader(loader.name, loader)
  assert spec is not None
  module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
  loader.exec_module(module)
  get_config = getattr(module, "get_config", None)
  if not callable(get_config):
    raise UserError(
      f"{name} has no get_config(): a config file defines get_config() or get_config(variant), as configs/tiny.py does"
    )
  try:
    inspect.signature(get_config).bind(*variant)
  except TypeError as error:
    remedy = (
      f"it takes no variant; pass --config={name}"
      if variant
      else f"it needs a variant; pass --config={name}:VARIANT"
    )
    raise UserError(f"{name}: get_config: {remedy}") from error
  config = get_config(*variant)
  if config is None:
    raise UserError(
      f"{name}: get_config() returned None: did you forget a return?"
    )
  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(
      f"{name}: get_config() returned {type(config).__name__}: it must return a ConfigDict, as configs/tiny.py does"
    )
  return config.lock()


def _is_library(filename: str) -> bool:
  """Returns True for code whose errors are the fault of its caller."""
  is_config = filename.startswith(str(_CONFIGS))
  return filename.startswith(_LIBRARIES) and not is_config


def _located(path: str, error: Exception) -> UserError:
  """An error of the user's own code: the innermost of his lines that led to it, and what went wrong."""
  place = path
  if isinstance(error, SyntaxError) and error.filename:
    place = f"{error.filename}:{error.lineno}"
  else:
    frames = [
      frame
      for frame in traceback.extract_tb(error.__traceback__)
      if not _is_library(frame.filename)
    ]
    if frames:
      place = f"{frames[-1].filename}:{frames[-1].lineno}"
  return UserError(
    f"{_shown(place)}: {type(error).__name__}: {_line(error)}".rstrip(": ")
  )


def _line(error: BaseException) -> str:
  """What an error says, in one line."""
  said = (
    error.msg
    if isinstance(error, SyntaxError)
    else error.args[0]
    if isinstance(error, KeyError) and error.args
    else error
  )
  return " ".join(str(said).split())


def _shown(name: str) -> str:
  return name if name.isprintable() else repr(name)


def _comments(section: type) -> dict[str, str]:
  """The comment above each field of a section, by the field's name."""
  found, above = {}, list[str]()
  for line in map(str.strip, inspect.getsource(section).splitlines()):
    if line.startswith("# "):
      above.append(line.removeprefix("# "))
    else:
      if above and (field := re.match(r"(\w+): ", line)):
        found[field[1]] = " ".join(above)
      above = []
  return found


def _about(comment: str, bound: Bound | None) -> str:
  """A field's comment, and its bound where the comment does not say it."""
  if bound is None or (
    bound.choices and all(f'"{choice}"' in comment for choice in bound.choices)
  ):
    return comment
  return f"{comment} ({str(bound).removeprefix('must be ')})"


def _scalar(value: str | bool | int | float) -> str:
  if isinstance(value, str):
    return json.dumps(value, ensure_ascii=False).replace(
      "\x7f", "\\u007f"
    )  # JSON's escapes are TOML's, which has one more
  return str(value).lower() if isinstance(value, bool) else repr(value)
