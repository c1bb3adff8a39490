"""Config files: what --config reads, and the TOML file of a run.

A config file is Python that returns a ConfigDict (`configs/*.py`), or TOML that
holds the fields of a run as plain data. A run keeps its config in its workdir
as TOML. So nothing that came with a checkpoint is executed when it is passed
back in.
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
import types
import typing
from typing import Any

from diffjax.config import (
  Config,
  FieldInfo,
  UserError,
  field_info,
  to_config_dict,
  to_dataclass,
)
from diffjax.host.files import is_remote, write_atomically

if typing.TYPE_CHECKING:
  import ml_collections
  from etils import epath

# The run's config in its workdir.
NAME = "config.toml"

_PACKAGE = pathlib.Path(__file__).parents[1]
# The configs that come with the package: configs/ in the repository.
_CONFIGS = _PACKAGE / "configs"

# Prefixes of the paths of code that the user did not write. An error in it is
# the fault of the line that called it. "<" begins the names of generated code.
_LIBRARIES = (
  "<",
  str(_PACKAGE),
  sysconfig.get_path("stdlib"),
  sysconfig.get_path("platstdlib"),
  sysconfig.get_path("purelib"),
  sysconfig.get_path("platlib"),
)

# Columns of the comments in a TOML file.
_COMMENT_WIDTH = 100
# The file may hold paths with bytes that are not UTF-8. Python represents these
# as surrogates.
_ENCODING = "utf-8"
_ENCODING_ERRORS = "surrogateescape"


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
      f"--config={_shown(spec)}: a TOML file has no variants;"
      f" pass --config={_shown(name)}"
    )
  arguments = [variant] if colon else []
  return _read_python(name, arguments)


def _read_python(name: str, arguments: list[str]) -> ml_collections.ConfigDict:
  """Returns the config of a Python file, or of a config of the package.

  Args:
    name: the path of the file, or the name of a config of the package.
    arguments: the arguments of the file's `get_config`: a variant, or nothing.

  Raises:
    UserError: for every exception, in one line.
  """
  path = pathlib.Path(name)
  if name in names():
    path = _CONFIGS / f"{name}.py"
  _check_is_file(path, name)
  try:
    return _call_get_config(path, name, arguments)
  except UserError:
    # This error already has a message of one line.
    raise
  except Exception as error:
    # The file is the user's own code, which may raise anything.
    if isinstance(error, OSError) and error.filename == str(path):
      raise UserError(
        f"--config={_shown(name)}: cannot be read ({error.strerror})"
      ) from error
    raise _user_code_error(name, error) from error


def names() -> list[str]:
  """Returns the names of the package's configs."""
  return sorted(path.stem for path in _CONFIGS.glob("[!_]*.py"))


def available() -> str:
  """Returns the names of the package's configs, for error messages."""
  return f"the configs are {', '.join(names())}"


def run_name(spec: str) -> str | None:
  """Returns a name for the run of a config: its file's name and its variant.

  A file that is called config.py has the name of its directory. A TOML file has
  None, because the config files of all runs have the same name.

  Examples:
    "configs/diff_1b.py:transformer" → "diff_1b_transformer"
    "experiments/scaling/config.py" → "scaling"
    "runs/tiny/config.toml" → None

  Args:
    spec: the value of --config.
  """
  if _is_toml(spec):
    return None
  file, _, variant = spec.partition(":")
  path = pathlib.Path(file)
  name = path.stem
  # Each experiment has a file of this name.
  if name == "config" and path.parent.name not in ("", ".."):
    name = path.parent.name
  if not variant:
    return name
  # Characters that a file name should not have are replaced.
  variant = re.sub("[^A-Za-z0-9._-]", "_", variant)
  return f"{name}_{variant}"


def to_toml(config: Config, *, comments: bool = True) -> str:
  """Returns the text of a TOML file with all fields. `read` can read it.

  TOML has no None, so a field that is None becomes a comment.

  Args:
    config: the config.
    comments: whether a comment above each field explains it.
  """
  blocks = []
  if comments:
    blocks.append(
      "# Every field of a config; --config takes this file. A field whose line"
      " is a comment is None."
    )
  for section in dataclasses.fields(config):
    values = getattr(config, section.name)
    lines = []
    if comments:
      lines.append(f"# {field_info(section).documentation}")
    lines.append(f"[{section.name}]")
    for field in dataclasses.fields(values):
      if comments:
        lines += _comment_lines(field_info(field))
      lines.append(_toml_line(field.name, getattr(values, field.name)))
    blocks.append("\n".join(lines))
  return "\n\n".join(blocks) + "\n"


def write(path: epath.Path, config: Config) -> None:
  """Writes the config as a TOML file, completely or not at all.

  Raises:
    UserError: if the file cannot be written.
  """
  content = to_toml(config).encode(_ENCODING, _ENCODING_ERRORS)
  try:
    write_atomically(path, content)
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error}"
    ) from error


def _is_toml(spec: str) -> bool:
  """Returns True if --config names a TOML file. A remote file must be one."""
  return is_remote(spec) or spec.endswith(".toml")


def _read_toml(path: str) -> ml_collections.ConfigDict:
  """Returns the config of a TOML file, local or gs://.

  Raises:
    UserError: if it cannot be read, is not TOML, or has a wrong field.
  """
  # Imported here, so that an error in the flags does not wait for it.
  from etils import epath

  try:
    content = epath.Path(path).expanduser().read_bytes()
  except FileNotFoundError as error:
    raise UserError(
      f"--config={_shown(path)}: no such config or file; {available()}"
    ) from error
  except (OSError, ImportError, ValueError) as error:
    # An ImportError means that the library for gs:// is not installed.
    raise UserError(
      f"--config={_shown(path)}: cannot be read ({error})"
    ) from error
  try:
    values = tomllib.loads(content.decode(_ENCODING, _ENCODING_ERRORS))
  except (ValueError, RecursionError) as error:
    raise UserError(
      f"--config={_shown(path)}: not TOML: {_message_line(error)}"
    ) from error
  try:
    return to_config_dict(to_dataclass(values, Config, "config"))
  except UserError as error:
    raise UserError(f"--config={_shown(path)}: {error}") from error


def _check_is_file(path: pathlib.Path, name: str) -> None:
  """Raises UserError if a config file does not exist or is a directory.

  Args:
    path: the file.
    name: the value of --config, without a variant.
  """
  try:
    is_directory = path.is_dir()
    exists = path.exists()
  except (OSError, ValueError) as error:
    # For example, the name is too long or holds a null character.
    raise UserError(
      f"--config={_shown(name)}: cannot be read ({error})"
    ) from error
  # pathlib takes an empty name as the current directory, which exists.
  if not name or not exists:
    raise UserError(
      f"--config={_shown(name)}: no such config or file; {available()}"
    )
  if not is_directory:
    return
  files = sorted([*path.glob("[!_]*.py"), *path.glob(NAME)])
  if files:
    remedy = f"name a file in it: {', '.join(map(str, files))}"
  else:
    remedy = f"name a file; {available()}"
  raise UserError(f"--config={_shown(name)}: that is a directory; {remedy}")


def _call_get_config(
  path: pathlib.Path, name: str, arguments: list[str]
) -> ml_collections.ConfigDict:
  """Runs a Python file and returns the result of its `get_config`.

  Args:
    path: the file.
    name: the value of --config, without a variant, for error messages.
    arguments: the arguments of `get_config`: a variant, or nothing.

  Raises:
    UserError: if `get_config` is missing, takes other arguments, or does not
      return a ConfigDict. Errors in the file's code are raised as they are.
  """
  # Imported here, so that an error in the flags does not wait for it.
  import ml_collections

  module = _import_file(path)
  get_config = getattr(module, "get_config", None)
  if not callable(get_config):
    raise UserError(
      f"{name} has no get_config(): a config file defines get_config() or"
      " get_config(variant), as configs/tiny.py does"
    )
  try:
    inspect.signature(get_config).bind(*arguments)
  except TypeError as error:
    if arguments:
      remedy = f"it takes no variant; pass --config={name}"
    else:
      remedy = f"it needs a variant; pass --config={name}:VARIANT"
    raise UserError(f"{name}: get_config: {remedy}") from error
  config = get_config(*arguments)
  if config is None:
    raise UserError(
      f"{name}: get_config() returned None: did you forget a return?"
    )
  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(
      f"{name}: get_config() returned {type(config).__name__}: it must return a"
      " ConfigDict, as configs/tiny.py does"
    )
  return config.lock()


def _import_file(path: pathlib.Path) -> types.ModuleType:
  """Runs a Python file and returns its module.

  The file's name need not end in .py.
  """
  loader = importlib.machinery.SourceFileLoader("config_file", str(path))
  spec = importlib.util.spec_from_loader(loader.name, loader)
  assert spec is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[loader.name] = module
  loader.exec_module(module)
  return module


def _user_code_error(name: str, error: Exception) -> UserError:
  """Returns the UserError for an exception that a config file raised.

  Its message names the line of the user's code that caused the exception.

  Example: "mine.py:4: KeyError: x"

  Args:
    name: the value of --config. It is named if the traceback has no line of the
      user's code.
    error: the exception.
  """
  location = name
  if isinstance(error, SyntaxError) and error.filename:
    location = f"{error.filename}:{error.lineno}"
  else:
    # The traceback ends with the innermost call. The last line that is the
    # user's own is the cause.
    for frame in traceback.extract_tb(error.__traceback__):
      if not _is_library(frame.filename):
        location = f"{frame.filename}:{frame.lineno}"
  message = (
    f"{_shown(location)}: {type(error).__name__}: {_message_line(error)}"
  )
  return UserError(message.rstrip(": "))


def _is_library(filename: str) -> bool:
  """Returns True for files that the user did not write, except configs.

  An error in such a file is the fault of the line that called it.
  """
  is_config = filename.startswith(str(_CONFIGS))
  return filename.startswith(_LIBRARIES) and not is_config


def _message_line(error: BaseException) -> str:
  """Returns the message of an error, without its location, in one line."""
  message: object = error
  if isinstance(error, SyntaxError):
    # str(error) also has the file and the line.
    message = error.msg
  elif isinstance(error, KeyError) and error.args:
    # str(error) has quotes around the key.
    message = error.args[0]
  return " ".join(str(message).split())


def _shown(name: str) -> str:
  """Returns a name for an error message, with line breaks escaped."""
  return name if name.isprintable() else repr(name)


def _comment_lines(info: FieldInfo) -> list[str]:
  """Returns the comment above a field: its documentation and its bound."""
  comment = info.documentation
  if info.bound is not None and not _names_choices(comment, info.bound.choices):
    comment = f"{comment} It {info.bound}."
  return textwrap.wrap(
    comment, _COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# "
  )


def _names_choices(comment: str, choices: tuple[str, ...]) -> bool:
  """Returns True if there are choices and the comment quotes all of them."""
  if not choices:
    return False
  return all(f'"{choice}"' in comment for choice in choices)


def _toml_line(name: str, value: Any) -> str:
  """Returns the line of a field in a TOML file."""
  if value is None:
    return f"# {name} = None"
  if isinstance(value, bool):
    return f"{name} = {str(value).lower()}"
  if isinstance(value, str):
    # JSON's escapes are TOML's. TOML also requires one for the DEL character.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{name} = {text}"
  return f"{name} = {value!r}"
