"""A model's directory in Hugging Face's layout: config.json, safetensors files with an index if there are several, tokenizer.json.

Nothing in it is unpickled or executed. Weights in pytorch_model.bin are pickles and are not read.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from diffjax.config import ModelConfig, UserError, from_config_dict
from diffjax.data.json_file import read_json, write_json
from diffjax.data.tokenizer import Tokenizer
from diffjax.interop.tokenizer import write_tokenizer

DTYPES = {
  "float32": np.dtype(np.float32),
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# The largest number of bytes of tensors in a file, unless a single tensor is larger. Hugging Face's hub prefers such files.
SHARD_BYTES = 5 * 10**9

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXACT = ("F32", "F16", "BF16")  # types that float32 holds exactly
_COMPUTED = "rotary_emb.inv_freq"  # angles in old Llama checkpoints, which follow from the config


class SafetensorsDirectory:
  """The tensors of a directory, read one at a time. Its text is its path."""

  def __init__(self, directory: pathlib.Path):
    """Opens the files.

    Raises:
      UserError: if there are none, a file is missing or truncated, or two have a tensor of the same name.
    """
    self._directory = directory
    self._files: dict[str, Any] = {}
    for name in _file_names(directory):
      path = directory / name
      if not path.is_file():
        raise UserError(
          f"there is no {path}"
          + f", which {_INDEX} names" * (name != _WEIGHTS)
          + "; only safetensors are read, no pickles"
        )
      for tensor in (file := _opened(path)).keys():
        if tensor in self._files:
          raise UserError(
            f"{directory} has {tensor} in more than one file, {name} among them: which one is meant is not known"
          )
        if not tensor.endswith(_COMPUTED):
          self._files[tensor] = file

  def __str__(self) -> str:
    return str(self._directory)

  def shapes(self) -> dict[str, tuple[int, ...]]:
    return {
      name: tuple(file.get_slice(name).get_shape())
      for name, file in self._files.items()
    }

  def read(self, name: str) -> np.ndarray:
    """A tensor in float32, with its exact values.

    Raises:
      UserError: if float32 does not hold its type exactly.
    """
    file = self._files[name]
    with _explained(self._directory):
      if (dtype := file.get_slice(name).get_dtype()) not in _EXACT:
        raise UserError(
          f"{self} has {name} in {dtype}: only {', '.join(_EXACT)} are read"
        )
      return file.get_tensor(name).astype(np.float32, copy=False)


def _opened(path: pathlib.Path) -> Any:
  """A file of tensors, of which only the header is read.

  Raises:
    UserError: if it cannot be read, or is not whole.
  """
  with _explained(path):
    try:
      return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
      raise UserError(
        f"{path} is not a whole safetensors file, download it again: {error}"
      ) from error


def _file_names(directory: pathlib.Path) -> list[str]:
  if (directory / _WEIGHTS).exists() or not (
    directory / _INDEX
  ).exists():  # like transformers, prefer the single file to the index
    return [_WEIGHTS]
  weight_map = read_json(directory / _INDEX).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise UserError(
      f"{directory / _INDEX} has no weight_map: it is not the index of a checkpoint"
    )
  names = sorted({str(name) for name in weight_map.values()})
  for name in names:
    if pathlib.PurePath(name).name != name:
      raise UserError(
        f"{directory / _INDEX} names a file {name!r}: it must be in the same directory"
      )
  return names


def checked_config(path: pathlib.Path, fields: dict[str, Any]) -> ModelConfig:
  """A model's config from fields of a file.

  Raises:
    UserError: if a field is not valid. Names the file and the field.
  """
  try:
    return from_config_dict({"model": fields, "data": {"length": 1}}).model
  except UserError as error:
    raise UserError(
      f"{path} is not of a model that diffjax supports: {error}"
    ) from error


def write(
  directory: pathlib.Path,
  config: Mapping[str, Any],
  shapes: Mapping[str, tuple[int, ...]],
  tensor: Callable[[str], np.ndarray],
  tokenizer: Tokenizer,
  dtype: str,
) -> None:
  """Writes a model's directory. config.json comes last, so that a directory without it is incomplete.

  Args:
    directory: Is made if it does not exist.
    config: Content of config.json.
    shapes: The shape of every tensor.
    tensor: Gives a tensor by its name. Called once for each tensor, so that those of one file at most are in memory.
    tokenizer: Written as tokenizer.json, tokenizer_config.json and document_tokens.json.
    dtype: "float32" or "bfloat16".

  Raises:
    UserError: if the directory cannot be written.
  """
  shards = _shards(
    {
      name: math.prod(shape) * DTYPES[dtype].itemsize
      for name, shape in shapes.items()
    }
  )
  with _explained(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, tokenizer)
    for file, names in shards.items():
      # safetensors writes the memory of an array and ignores its strides. No name here, or they would live on beside the next file's
      safetensors.numpy.save_file(
        {
          name: np.ascontiguousarray(
            tensor(name).astype(DTYPES[dtype], copy=False)
          )
          for name in names
        },
        directory / file,
        metadata={"format": "pt"},
      )
      shutil.copymode(
        directory / "tokenizer.json", directory / file
      )  # safetensors lets nobody else read it, whatever the umask
    if len(shards) > 1:
      size = (
        sum(math.prod(shape) for shape in shapes.values())
        * DTYPES[dtype].itemsize
      )
      weight_map = {
        name: file for file, names in shards.items() for name in names
      }
      write_json(
        directory / _INDEX,
        {"metadata": {"total_size": size}, "weight_map": weight_map},
      )
    write_json(directory / "config.json", config)


def _shards(sizes: Mapping[str, int]) -> dict[str, list[str]]:
  """The names of the tensors of each file, in order, from their sizes in bytes."""
  shards: list[list[str]] = []
  room = 0
  for name, size in sizes.items():
    if not shards or size > room:
      shards.append([])
      room = SHARD_BYTES
    shards[-1].append(name)
    room -= size
  if len(shards) == 1:
    return {_WEIGHTS: shards[0]}
  return {
    f"model-{number:05d}-of-{len(shards):05d}.safetensors": names
    for number, names in enumerate(shards, 1)
  }


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  """Turns errors of the file system and of safetensors into a UserError of one line."""
  try:
    yield
  except (OSError, safetensors.SafetensorError) as error:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UserError(f"cannot read or write {path}: {reason}") from error
