"""A model's directory, with the files that Hugging Face's libraries use.

It has config.json, tokenizer.json and the weights: one safetensors file, or
several with an index. Nothing in it is unpickled or executed, so weights in
pytorch_model.bin, which is a pickle, are not read.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from diffjax.config import ModelConfig, UserError, from_config_dict
from diffjax.data.json_file import read_json, write_json
from diffjax.data.tokenizer import Tokenizer
from diffjax.interop.layout import Tensors
from diffjax.interop.tokenizer import write_tokenizer

# The types of tensors that can be written.
DTYPES = {
  "float32": np.dtype(np.float32),
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# The maximum number of bytes of a file's tensors, unless a single tensor is
# larger. The Hugging Face Hub prefers files of this size.
SHARD_BYTES = 5 * 10**9

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# The types whose values float32 represents exactly.
_EXACT_DTYPES = ("F32", "F16", "BF16")

# Old Llama checkpoints store the rotary angles, which follow from the config.
_ROTARY_ANGLES = "rotary_emb.inv_freq"


class SafetensorsDirectory:
  """The tensors in the safetensors files of a directory. See `layout.Tensors`.

  Files stay open, and a tensor is read from its file when it is requested.
  """

  def __init__(self, directory: pathlib.Path):
    """Opens the files, and reads their headers.

    Raises:
      UserError: if a file is missing or truncated, or if two files have a
        tensor of the same name.
    """
    self._directory = directory
    # The open file of each tensor.
    self._files: dict[str, Any] = {}
    for file_name in _weight_file_names(directory):
      self._add_file(file_name)

  def _add_file(self, file_name: str) -> None:
    """Opens a file and adds its tensors."""
    path = self._directory / file_name
    if not path.is_file():
      message = f"there is no {path}"
      if file_name != _WEIGHTS:
        message += f", which {_INDEX} names"
      raise UserError(f"{message}; only safetensors are read, no pickles")
    file = _open_safetensors(path)
    for tensor in file.keys():
      if tensor in self._files:
        raise UserError(
          f"{self} has {tensor} in more than one file, {file_name} among them;"
          " delete the files that are not part of the model"
        )
      if not tensor.endswith(_ROTARY_ANGLES):
        self._files[tensor] = file

  def __str__(self) -> str:
    """Returns the path of the directory."""
    return str(self._directory)

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors, by name."""
    shapes = {}
    for name, file in self._files.items():
      shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor in float32, with its exact values.

    Raises:
      UserError: if float32 does not represent its values exactly.
    """
    file = self._files[name]
    with _convert_errors(self._directory):
      dtype = file.get_slice(name).get_dtype()
      if dtype not in _EXACT_DTYPES:
        raise UserError(
          f"{self} has {name} in {dtype}: only {', '.join(_EXACT_DTYPES)} are"
          " read"
        )
      return file.get_tensor(name).astype(np.float32, copy=False)


def _open_safetensors(path: pathlib.Path) -> Any:
  """Opens a file of tensors and reads its header.

  Raises UserError if the file cannot be read, or is truncated.
  """
  with _convert_errors(path):
    try:
      return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
      raise UserError(
        f"{path} is not a whole safetensors file, download it again: {error}"
      ) from error


def _weight_file_names(directory: pathlib.Path) -> list[str]:
  """Returns the names of the safetensors files in a model's directory."""
  index = directory / _INDEX
  # If both exist, the single file is read, as in transformers.
  if (directory / _WEIGHTS).exists() or not index.exists():
    return [_WEIGHTS]
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise UserError(
      f"{index} has no weight_map: it is not the index of a checkpoint"
    )
  names = sorted({str(name) for name in weight_map.values()})
  # A downloaded index must not lead to other files, such as
  # "../a.safetensors".
  for name in names:
    if pathlib.PurePath(name).name != name:
      raise UserError(
        f"{index} names a file {name!r}: it must be in the same directory"
      )
  return names


def checked_config(path: pathlib.Path, fields: dict[str, Any]) -> ModelConfig:
  """Returns the config of a model from the fields in a file.

  Args:
    path: The file, for messages.
    fields: The fields of config.model.

  Raises:
    UserError: if a field is not valid.
  """
  # A config must have a data section. Rows of one token fit every model.
  config_dict = {"model": fields, "data": {"length": 1}}
  try:
    return from_config_dict(config_dict).model
  except UserError as error:
    raise UserError(
      f"{path} is not of a model that diffjax supports: {error}"
    ) from error


def write(
  directory: pathlib.Path,
  config: Mapping[str, Any],
  tensors: Tensors,
  tokenizer: Tokenizer,
  dtype: str,
) -> None:
  """Writes a model's directory.

  config.json is written last, so a directory without it is incomplete. Only the
  tensors of one file are in memory at the same time.

  Args:
    directory: The directory. It is created if it does not exist.
    config: The content of config.json.
    tensors: The tensors. Each is read once.
    tokenizer: The tokenizer of the model.
    dtype: The type of the written tensors, "float32" or "bfloat16".

  Raises:
    UserError: if the directory cannot be written.
  """
  itemsize = DTYPES[dtype].itemsize
  sizes = {
    name: math.prod(shape) * itemsize
    for name, shape in tensors.shapes().items()
  }
  files = _split_into_files(sizes)

  with _convert_errors(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, tokenizer)
    for file_name, names in files.items():
      _write_tensors(directory / file_name, tensors, names, dtype)
      # safetensors makes files that only their owner can read. The tokenizer's
      # file has the permissions that the user has chosen with umask.
      shutil.copymode(directory / "tokenizer.json", directory / file_name)
    if len(files) > 1:
      index = _make_index(files, total_size=sum(sizes.values()))
      write_json(directory / _INDEX, index)
    write_json(directory / "config.json", config)


def _write_tensors(
  path: pathlib.Path, tensors: Tensors, names: Sequence[str], dtype: str
) -> None:
  """Writes the tensors of these names to a safetensors file."""
  # This is a function, so that the arrays are freed before the next file.
  arrays = {}
  for name in names:
    # safetensors writes the memory of an array and ignores its strides.
    arrays[name] = np.ascontiguousarray(tensors.read(name), DTYPES[dtype])
  # transformers loads only files that name the framework, PyTorch.
  safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})


def _split_into_files(sizes: Mapping[str, int]) -> dict[str, list[str]]:
  """Distributes tensors over files of at most `SHARD_BYTES`.

  Args:
    sizes: The size of each tensor in bytes, in the order of the files.

  Returns:
    The names of the tensors of each file, by the name of the file. If all
    tensors fit into one file, it is model.safetensors.
  """
  # The names of the tensors, grouped by file.
  groups: list[list[str]] = []
  bytes_left = 0
  for name, size in sizes.items():
    if not groups or size > bytes_left:
      groups.append([])
      bytes_left = SHARD_BYTES
    groups[-1].append(name)
    bytes_left -= size

  num_files = len(groups)
  if num_files == 1:
    return {_WEIGHTS: groups[0]}
  files = {}
  for number, names in enumerate(groups, start=1):
    files[f"model-{number:05d}-of-{num_files:05d}.safetensors"] = names
  return files


def _make_index(
  files: Mapping[str, Sequence[str]], total_size: int
) -> dict[str, Any]:
  """Returns the content of model.safetensors.index.json.

  Args:
    files: The names of the tensors of each file.
    total_size: The size of all tensors in bytes.
  """
  weight_map = {}
  for file_name, names in files.items():
    for name in names:
      weight_map[name] = file_name
  return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


@contextlib.contextmanager
def _convert_errors(path: pathlib.Path) -> Iterator[None]:
  """Raises a UserError for an error of the file system or of safetensors.

  Args:
    path: The file or directory that the body reads or writes, for the message.
  """
  try:
    yield
  except (OSError, safetensors.SafetensorError) as error:
    message = str(error).strip() or type(error).__name__
    first_line = message.splitlines()[0]
    raise UserError(f"cannot read or write {path}: {first_line}") from error
