"""Layouts of weights as tables: each entry names an array of diffjax and a tensor of the file, and the order of the axes in both.

Reading and writing use the same table, so that a round trip gives the same weights, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tempfile
import types
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import einops
import numpy as np

from diffjax.config import ModelConfig, UserError
from diffjax.data.tokenizer import Tokenizer
from diffjax.model.shapes import axis_sizes


@dataclasses.dataclass(frozen=True)
class Model:
  """A model, as it is read from any layout and written to any.

  Attributes:
    config: Its sizes and kind.
    params: The parameter tree (see model/decoder.py), NumPy arrays in float32. Large ones are temporary files that look like arrays.
    tokenizer: Its tokenizer.
  """

  config: ModelConfig
  params: dict[str, Any]
  tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Entry:
  """An array and its tensor, or its L tensors.

  Attributes:
    param: Path in the parameter tree. Under "layers/" an array has a leading axis L, and a tensor for each layer.
    tensor: Name in the file, with {} for the layer's number.
    axes: Both shapes, without L, in einops' notation: "E Q G D = (G Q D) E". Beside the project's letters, C is V / D, and D may be
      written as P J: the two members of a rotated pair, and D/2 pairs.
  """

  param: str
  tensor: str
  axes: str


class Tensors(Protocol):
  """Named tensors of a file or directory."""

  def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

  def read(self, name: str) -> np.ndarray: ...


# What a layout takes for granted, unless it says otherwise.
_PLAIN = {
  "causal": True,
  "window": None,
  "rope": True,
  "projection_biases": False,
  "embed_scale": 1.0,
  "num_noise_heads": None,
  "plain_layers": 0,
  "value_dim": None,
  "rope_dim": None,
  "rope_scaling": "none",
  "head_norm_eps": None,
  "lambda_init_offset": 0,
  "ffn_activation": "silu",
  "norm": "rms",
}


# Bytes from which on an array is a temporary file: a model larger than the memory is put together, and written, piece by piece.
_MAX_BYTES_IN_MEMORY = 1 << 26
_LARGE_FILES = "/var/tmp"  # /tmp may lie in the memory


def allocate(shape: tuple[int, ...]) -> np.ndarray:
  """A float32 array to be filled. A large one is a file in TMPDIR, by default /var/tmp, which vanishes with the array.

  Raises:
    UserError: if the disk is too full for it.
  """
  if (size := 4 * math.prod(shape)) < _MAX_BYTES_IN_MEMORY:
    return np.empty(shape, np.float32)
  directory = os.environ.get("TMPDIR") or (
    _LARGE_FILES if os.path.isdir(_LARGE_FILES) else tempfile.gettempdir()
  )
  try:
    with tempfile.TemporaryFile(dir=directory) as file:
      if hasattr(
        os, "posix_fallocate"
      ):  # else a write to a full disk would end the process by a signal
        os.posix_fallocate(file.fileno(), 0, size)
      file.truncate(size)
      return np.memmap(file, np.float32, shape=shape)
  except OSError as error:
    reason = f"{error.strerror or error}; TMPDIR names another directory"
    raise UserError(
      f"cannot keep a parameter of {size / 2**30:.2f} GiB in a file in {directory}: {reason}"
    ) from error


class Layout:
  """A table with the sizes of a model."""

  def __init__(
    self,
    entries: Iterable[Entry],
    config: ModelConfig,
    *,
    tied_by: str,
    supported: Mapping[str, Any] = types.MappingProxyType({}),
  ):
    """Fills in the sizes.

    Args:
      entries: The table.
      config: The model's.
      tied_by: Field of the layout's config.json that says whether the embedding is the output projection too.
      supported: What it takes for granted otherwise than other layouts, by the config's fields; ... for a field that its config.json has.

    Raises:
      UserError: if the model has what the layout cannot say.
    """
    for field, plain in {**supported, **_PLAIN, **supported}.items():
      if plain is not ... and (value := getattr(config, field)) != plain:
        raise UserError(
          f"this layout can only say {field} {plain}: it cannot hold a model of {field} {value}"
        )
    self._layers, self._tied, self._tied_by = (
      config.num_layers,
      config.tie_embeddings,
      tied_by,
    )
    self._sizes = axis_sizes(config)
    self._sizes |= dict(
      P=2, J=config.head_dim // 2, C=self._sizes["V"] // config.head_dim
    )
    entries = list(entries)
    self._embedding, self._unembedding = (
      next(entry.tensor for entry in entries if entry.param == param)
      for param in ("embedding", "unembedding")
    )
    self._entries = [
      entry
      for entry in entries
      if not (self._tied and entry.param == "unembedding")
    ]

  @functools.cached_property
  def _places(self) -> dict[str, tuple[Entry, int | None]]:
    """The entry and layer of each tensor."""
    return {
      entry.tensor.format(layer): (entry, layer)
      for entry in self._entries
      for layer in self._numbers(entry)
    }

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor."""
    return {
      name: self._shape(entry.axes.split(" = ")[1])
      for name, (entry, _) in self._places.items()
    }

  def tensor(self, params: dict[str, Any], name: str) -> np.ndarray:
    """A tensor of the layout, made of a model's parameters."""
    entry, layer = self._places[name]
    array: Any = params
    for key in entry.param.split("/"):
      array = array[key]
    here, there = entry.axes.split(" = ")
    return self._rearrange(
      array if layer is None else array[layer], here, there
    )

  def params(self, tensors: Tensors) -> dict[str, Any]:
    """The parameters of a model, made of the layout's tensors, in float32.

    Raises:
      UserError: if a tensor is missing, has another shape, or is not in this layout.
    """
    self._check(tensors)
    params: dict[str, Any] = {}
    for entry in self._entries:
      here, there = entry.axes.split(" = ")
      stack = allocate((len(self._numbers(entry)), *self._shape(here)))
      for index, layer in enumerate(self._numbers(entry)):
        stack[index] = self._rearrange(
          tensors.read(entry.tensor.format(layer)), there, here
        )
      *sections, name = entry.param.split("/")
      section = params
      for key in sections:
        section = section.setdefault(key, {})
      section[name] = stack if sections else stack[0]
    return params

  def _check(self, tensors: Tensors) -> None:
    found = dict(tensors.shapes())
    if self._layers > len(found):
      raise UserError(
        f"{tensors} has {len(found)} tensors: its config.json is of another model, with {self._layers} layers"
      )
    wanted = self.shapes()
    if self._tied and self._unembedding in found and self._embedding in found:
      if not np.array_equal(
        tensors.read(self._unembedding), tensors.read(self._embedding)
      ):
        raise UserError(
          f"{tensors} has a {self._unembedding} that differs from {self._embedding}, but its config.json says {self._tied_by}: true; "
          "set that to false if the two are not tied"
        )
      del found[self._unembedding]
    for name in wanted:
      if name not in found:
        hint = (
          f"; if it is {self._embedding} again, set {self._tied_by} to true in config.json"
          * (name == self._unembedding)
        )
        raise UserError(
          f"{tensors} has no tensor {name}, which this layout needs for its config.json{hint}"
        )
      if found[name] != wanted[name]:
        raise UserError(
          f"{tensors} has {name} of shape {list(found[name])}, but for its config.json it must be {list(wanted[name])}"
        )
    if extra := sorted(found.keys() - wanted.keys()):
      hint = ": diffjax has no biases" * extra[0].endswith(".bias")
      raise UserError(
        f"{tensors} has a tensor {extra[0]}, which is not in this layout for its config.json{hint}"
      )

  def _numbers(self, entry: Entry) -> range | list[None]:
    return range(self._layers) if entry.param.startswith("layers/") else [None]

  def _shape(self, axes: str) -> tuple[int, ...]:
    return tuple(
      math.prod(self._sizes[letter] for letter in group if letter.isalpha())
      for group in re.findall(r"\([^)]*\)|\w", axes)
    )

  def _rearrange(
    self, array: np.ndarray, before: str, after: str
  ) -> np.ndarray:
    return einops.rearrange(
      np.asarray(array),
      f"{before} -> {after}",
      **{letter: self._sizes[letter] for letter in before if letter.isalpha()},
    )
