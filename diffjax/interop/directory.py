"""A model's directory as Hugging Face lays it out: config.json, safetensors files with an index if there are several, tokenizer.json.

Nothing in it is unpickled or executed. Weights in pytorch_model.bin are pickles, so they are not read.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from diffjax.config import ModelConfig, UserError, from_config_dict
from diffjax.data.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Bytes of tensors in one file, at most, unless one alone is larger: what Hugging Face's hub is comfortable with.
SHARD_BYTES = 5 * 10**9

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXACT = ("F32", "F16", "BF16")  # what float32 holds
_COMPUTED = "rotary_emb.inv_freq"  # old Llama checkpoints store the angles, which follow from the config


class SafetensorsDirectory:
  """The tensors of a directory, read one at a time. As text it is its path."""

  def __init__(self, directory: pathlib.Path):
    """Opens the files.

    Raises:
      UserError: if there are none, or one is missing or truncated.
    """
    self._directory = directory
    self._files: dict[str, Any] = {}
    for name in _file_names(directory):
      path = directory / name
      if not path.is_file():
        raise UserError(f"there is no {path}" + f", which {_INDEX} names" * (name != _WEIGHTS) + "; only safetensors are read, no pickles")
      with _explained(path):
        file = safetensors.safe_open(path, framework="numpy")
        self._files |= {tensor: file for tensor in file.keys() if not tensor.endswith(_COMPUTED)}

  def __str__(self) -> str:
    return str(self._directory)

  def shapes(self) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

  def read(self, name: str) -> np.ndarray:
    """A tensor in float32, exactly.

    Raises:
      UserError: if it is of a type that float32 does not hold.
    """
    file = self._files[name]
    with _explained(self._directory):
      if (dtype := file.get_slice(name).get_dtype()) not in _EXACT:
        raise UserError(f"{self} has {name} in {dtype}: only {', '.join(_EXACT)} are read")
      return file.get_tensor(name).astype(np.float32)


def _file_names(directory: pathlib.Path) -> list[str]:
  if (directory / _WEIGHTS).exists() or not (directory / _INDEX).exists():  # transformers too takes the one file before the index
    return [_WEIGHTS]
  weight_map = read_json(directory / _INDEX).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise UserError(f"{directory / _INDEX} has no weight_map: it is not the index of a checkpoint")
  names = sorted({str(name) for name in weight_map.values()})
  for name in names:
    if pathlib.PurePath(name).name != name:
      raise UserError(f"{directory / _INDEX} names a file {name!r}: it must be one beside it")
  return names


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object from a file.

  Raises:
    UserError: if it is missing or something else.
  """
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror or error}") from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path} is not JSON: {error}") from error
  if not isinstance(content, dict):
    raise UserError(f"{path} must hold a JSON object; got {str(content)[:40]}")
  return content


def checked_config(path: pathlib.Path, fields: dict[str, Any]) -> ModelConfig:
  """A model's config from fields of a file.

  Raises:
    UserError: naming the file and the field that cannot be.
  """
  try:
    return from_config_dict({"model": fields, "data": {"length": 1}}).model
  except UserError as error:
    raise UserError(f"{path} is of no model that diffjax has: {error}") from error


def read_tokenizer(directory: pathlib.Path, vocab_size: int) -> Tokenizer:
  """The tokenizer beside a model.

  Raises:
    UserError: if there is none, or it has more tokens than the model.
  """
  path = directory / "tokenizer.json"
  if not path.exists():
    raise UserError(
      f"there is no tokenizer beside the model: put its tokenizer.json into {directory} (transformers writes one: "
      "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY))"
    )
  tokenizer = load_tokenizer(str(path))
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"{path} has {tokenizer.vocab_size} tokens, but the model has {vocab_size}: it is another one's; put the model's own there"
    )
  return tokenizer


def write(
  directory: pathlib.Path,
  config: Mapping[str, Any],
  shapes: Mapping[str, tuple[int, ...]],
  tensor: Callable[[str], np.ndarray],
  tokenizer: Tokenizer,
  dtype: str,
) -> None:
  """Writes a model's directory. config.json comes last: a directory without it is one that was interrupted.

  Args:
    directory: Made if it is not there.
    config: Of config.json.
    shapes: Of every tensor.
    tensor: Gives a tensor by its name; called once for each, so that no more than one file's are in memory.
    tokenizer: Written as tokenizer.json and tokenizer_config.json, its separator for the first and last token of a text: diffjax's own
      documents lie between two.
    dtype: "float32" or "bfloat16".

  Raises:
    UserError: if it cannot be written.
  """
  shards = _shards({name: math.prod(shape) * DTYPES[dtype].itemsize for name, shape in shapes.items()})
  with _explained(directory):
    directory.mkdir(parents=True, exist_ok=True)
    for file, names in shards.items():
      # safetensors writes the memory of an array as it lies, whatever its strides.
      arrays = {name: np.ascontiguousarray(tensor(name).astype(DTYPES[dtype])) for name in names}
      safetensors.numpy.save_file(arrays, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
      size = sum(math.prod(shape) for shape in shapes.values()) * DTYPES[dtype].itemsize
      weight_map = {name: file for file, names in shards.items() for name in names}
      _write_json(directory / _INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_tokenizer(directory, tokenizer)
    _write_json(directory / "config.json", config)


def _shards(sizes: Mapping[str, int]) -> dict[str, list[str]]:
  """The names of tensors by file, in order, from their sizes in bytes."""
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
  return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": names for number, names in enumerate(shards, 1)}


def _write_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer) -> None:
  import tokenizers

  text = tokenizer.tokenizer_json()
  separator = tokenizers.Tokenizer.from_str(text).id_to_token(tokenizer.separator)
  (directory / "tokenizer.json").write_text(text, encoding="utf-8")
  description: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": separator, "eos_token": separator}
  # Else transformers 4 adds token_type_ids, which DiffLlama does not take.
  description |= {"model_input_names": ["input_ids", "attention_mask"], "clean_up_tokenization_spaces": False}
  _write_json(directory / "tokenizer_config.json", description)


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  """What goes wrong in the file system or in a file, as one line."""
  try:
    yield
  except (OSError, safetensors.SafetensorError) as error:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UserError(f"cannot read or write {path}: {reason}") from error
