"""Layouts: how another project names and arranges a model's weights.

A layout is a table. Each entry names a parameter of diffjax, a tensor of the
file, and the order of the axes in both, in the notation of einops. Reading and
writing use the same table, so a round trip gives the same weights, bit for bit.

Some projects rotate the pairs (2j, 2j + 1) of a head, and diffjax rotates the
pairs (j, j + D/2). The rows of the query and key projections are then permuted.
A table writes D as two axes: P is the member of a pair, and J is the pair. So
"(P J)" in diffjax is "(J P)" in such a file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tempfile
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import einops
import numpy as np

from diffjax.config import ModelConfig, UserError
from diffjax.data.tokenizer import Tokenizer
from diffjax.model.shapes import axis_sizes

# In `supported` of a Layout: all values of a field are supported.
ANY_VALUE = object()

# The values of the fields of config.model that a layout supports by default.
_DEFAULT_SUPPORTED = {
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

# Arrays of this many bytes or more are temporary files, so that a model may be
# larger than the memory.
MIN_FILE_BYTES = 64 * 2**20
# /tmp may be in memory.
_DEFAULT_FILE_DIRECTORY = "/var/tmp"

_BYTES_PER_FLOAT32 = 4
_BYTES_PER_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Model:
  """A model, independent of the layout that it was read from.

  Attributes:
    config: Its sizes and variant.
    params: Its parameters, a tree of float32 NumPy arrays as in
      model/decoder.py. Large arrays are memory-mapped temporary files.
    tokenizer: Its tokenizer.
  """

  config: ModelConfig
  params: dict[str, Any]
  tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Entry:
  """A parameter of diffjax, and the tensors in which a file stores it.

  Example: each layer has a matrix with a row for each output of the queries.

    Entry(
      "layers/attention/query",
      "model.layers.{}.self_attn.q_proj.weight",
      "E Q G D = (Q G D) E",
    )

  Attributes:
    param: The path in the parameter tree. A path that begins with "layers/" is
      an array with a leading axis L, and the file has a tensor for each layer.
    tensor: The name in the file, with {} for the number of the layer.
    axes: The axes of the parameter without L, " = ", and the axes of the
      tensor. `diffjax/parameters.py` defines the letters.
  """

  param: str
  tensor: str
  axes: str

  @property
  def is_per_layer(self) -> bool:
    """Whether the file has a tensor for each layer."""
    return self.param.startswith("layers/")

  @property
  def param_axes(self) -> str:
    """The axes of the parameter, such as "E Q G D"."""
    return self.axes.split(" = ")[0]

  @property
  def tensor_axes(self) -> str:
    """The axes of the tensor, such as "(Q G D) E"."""
    return self.axes.split(" = ")[1]


class Tensors(Protocol):
  """Named tensors that are read one by one.

  If they are in a file or directory, `str` returns its path, for messages.
  """

  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of all tensors, by name."""

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor in float32."""


def allocate(shape: tuple[int, ...]) -> np.ndarray:
  """Returns a float32 array whose values are not set.

  A large array is a temporary file in TMPDIR, by default in /var/tmp. The file
  is deleted when the array is no longer used.

  Raises:
    UserError: if the file cannot be created, or the disk is full.
  """
  num_bytes = _BYTES_PER_FLOAT32 * math.prod(shape)
  if num_bytes < MIN_FILE_BYTES:
    return np.empty(shape, np.float32)
  directory = _temporary_directory()
  try:
    with tempfile.TemporaryFile(dir=directory) as file:
      # Reserves the space. Otherwise, a write to the array would end the
      # process with a signal if the disk is full.
      if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)
      file.truncate(num_bytes)
      return np.memmap(file, np.float32, shape=shape)
  except OSError as error:
    raise UserError(
      f"cannot store a parameter of {num_bytes / _BYTES_PER_GIB:.2f} GiB in a"
      f" file in {directory}: {error.strerror or error}; set TMPDIR to another"
      " directory"
    ) from error


def _temporary_directory() -> str:
  """Returns the directory for large temporary files."""
  directory = os.environ.get("TMPDIR")
  if directory:
    return directory
  if os.path.isdir(_DEFAULT_FILE_DIRECTORY):
    return _DEFAULT_FILE_DIRECTORY
  return tempfile.gettempdir()


class Layout:
  """Converts a model's parameters to the tensors of another project, and back.

  A layout is for one config, which determines the shapes.
  """

  def __init__(
    self,
    entries: Iterable[Entry],
    config: ModelConfig,
    *,
    tied_by: str,
    supported: Mapping[str, Any] = types.MappingProxyType({}),
  ):
    """Initializes the layout.

    Args:
      entries: The table of the layout.
      config: The model's config.
      tied_by: The field of the project's config.json that says whether the
        embedding is also the output projection.
      supported: The value of each field of config.model that this layout
        supports, if `_DEFAULT_SUPPORTED` has another value or none.
        ANY_VALUE for a field whose value is stored in config.json.

    Raises:
      UserError: if this layout does not support the model.
    """
    _check_supported(config, supported)
    self._num_layers = config.num_layers
    self._is_tied = config.tie_embeddings
    self._tied_by = tied_by
    self._sizes = axis_sizes(config)
    # Axes that only layouts have: the two numbers of a rotary pair, the rotary
    # pairs of a head, and the width of values divided by D.
    self._sizes["P"] = 2
    self._sizes["J"] = config.head_dim // 2
    self._sizes["C"] = self._sizes["V"] // config.head_dim

    entries_by_param = {entry.param: entry for entry in entries}
    # The names of these two tensors.
    self._embedding = entries_by_param["embedding"].tensor
    self._unembedding = entries_by_param["unembedding"].tensor
    # If tied, the parameters have no unembedding.
    if self._is_tied:
      del entries_by_param["unembedding"]
    self._entries = list(entries_by_param.values())

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors, by name."""
    shapes = {}
    for name, (entry, _) in self._tensor_sources.items():
      shapes[name] = shape_of(entry.tensor_axes, self._sizes)
    return shapes

  def tensors(self, params: dict[str, Any]) -> ConvertedTensors:
    """Returns the tensors of a model. Each is converted when it is read.

    Args:
      params: The parameters of the model.
    """
    return ConvertedTensors(self, params)

  def tensor(self, params: dict[str, Any], name: str) -> np.ndarray:
    """Returns a tensor of this layout, converted from a model's parameters.

    Args:
      params: The parameters of the model.
      name: The name of the tensor.
    """
    entry, layer = self._tensor_sources[name]
    param: Any = params
    for key in entry.param.split("/"):
      param = param[key]
    if layer is not None:
      param = param[layer]
    return rearrange(param, entry.param_axes, entry.tensor_axes, self._sizes)

  def params(self, tensors: Tensors) -> dict[str, Any]:
    """Returns the parameters of a model in float32, the inverse of `tensors`.

    Args:
      tensors: The tensors of the model in this layout.

    Raises:
      UserError: if a tensor is missing, has another shape, or is not in this
        layout.
    """
    self._check(tensors)
    params: dict[str, Any] = {}
    for entry in self._entries:
      # "layers/attention/query" is params["layers"]["attention"]["query"].
      *sections, name = entry.param.split("/")
      section = params
      for key in sections:
        section = section.setdefault(key, {})
      section[name] = self._read_param(tensors, entry)
    return params

  # Computed on first use: `_check` detects a wrong number of layers before a
  # table for them takes memory.
  @functools.cached_property
  def _tensor_sources(self) -> dict[str, tuple[Entry, int | None]]:
    """The entry and the layer of each tensor, by the name of the tensor.

    The layer is None if the entry is not per layer.
    """
    sources = {}
    for entry in self._entries:
      for layer in self._layers(entry):
        sources[entry.tensor.format(layer)] = (entry, layer)
    return sources

  def _layers(self, entry: Entry) -> Sequence[int | None]:
    """Returns the numbers of the layers of an entry.

    Returns [None] if the entry has only one tensor for the whole model.
    """
    if entry.is_per_layer:
      return range(self._num_layers)
    return [None]

  def _read_param(self, tensors: Tensors, entry: Entry) -> np.ndarray:
    """Returns the parameter of an entry, with its layers along axis 0.

    A parameter that is not per layer has no such axis.
    """
    layers = self._layers(entry)
    layer_shape = shape_of(entry.param_axes, self._sizes)
    stack = allocate((len(layers), *layer_shape))
    for index, layer in enumerate(layers):
      # The result gets no name, so that it is freed before the next tensor is
      # read.
      stack[index] = self._read_layer(tensors, entry, layer)
    if entry.is_per_layer:
      return stack
    return stack[0]

  def _read_layer(
    self, tensors: Tensors, entry: Entry, layer: int | None
  ) -> np.ndarray:
    """Returns the parameter of one layer, converted from its tensor."""
    tensor = tensors.read(entry.tensor.format(layer))
    return rearrange(tensor, entry.tensor_axes, entry.param_axes, self._sizes)

  def _check(self, tensors: Tensors) -> None:
    """Raises UserError if a tensor's name or shape is not of this layout."""
    shapes = dict(tensors.shapes())
    # This comes first, because self.shapes() takes memory for each layer.
    if self._num_layers > len(shapes):
      raise UserError(
        f"{tensors} has only {len(shapes)} tensors, but its config.json says"
        f" {self._num_layers} layers; replace config.json with the model's own"
      )
    # Some files have the matrix of a tied embedding twice.
    has_both = self._unembedding in shapes and self._embedding in shapes
    if self._is_tied and has_both:
      self._check_tied(tensors)
      del shapes[self._unembedding]

    expected_shapes = self.shapes()
    for name, expected_shape in expected_shapes.items():
      if name not in shapes:
        raise UserError(self._missing_message(tensors, name))
      if shapes[name] != expected_shape:
        raise UserError(
          f"{tensors} has {name} of shape {list(shapes[name])}, but its"
          f" config.json requires {list(expected_shape)}"
        )
    unknown_names = shapes.keys() - expected_shapes.keys()
    if unknown_names:
      raise UserError(_unknown_message(tensors, min(unknown_names)))

  def _check_tied(self, tensors: Tensors) -> None:
    """Raises UserError if a tied embedding and unembedding differ."""
    unembedding = tensors.read(self._unembedding)
    embedding = tensors.read(self._embedding)
    if not np.array_equal(unembedding, embedding):
      raise UserError(
        f"{tensors} has a {self._unembedding} that differs from"
        f" {self._embedding}, but its config.json says {self._tied_by}: true;"
        " set that to false if the two are not tied"
      )

  def _missing_message(self, tensors: Tensors, name: str) -> str:
    """Returns the error message for a missing tensor."""
    message = (
      f"{tensors} has no tensor {name}, which this layout needs for its"
      " config.json"
    )
    if name == self._unembedding:
      message += (
        f"; if it is equal to {self._embedding}, set {self._tied_by} to true in"
        " config.json"
      )
    return message


@dataclasses.dataclass(frozen=True)
class ConvertedTensors:
  """The tensors of a model in a layout, with the methods of `Tensors`.

  Attributes:
    layout: The layout.
    params: The parameters of the model.
  """

  layout: Layout
  params: dict[str, Any]

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors, by name."""
    return self.layout.shapes()

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor, converted from the parameters."""
    return self.layout.tensor(self.params, name)


def _unknown_message(tensors: Tensors, name: str) -> str:
  """Returns the error message for a tensor that a layout does not have."""
  message = (
    f"{tensors} has a tensor {name}, which is not in this layout for its"
    " config.json"
  )
  if name.endswith(".bias"):
    message += ": biases are not supported"
  return message


def shape_of(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """Returns the shape of an array.

  Example: the axes "E (H V)" give (32, 64) if E = 32, H = 4 and V = 16.

  Args:
    axes: The axes of the array, in the notation of einops.
    sizes: The size of each letter, and maybe of others.
  """
  shape = []
  # An axis is a letter, a product of letters in parentheses, or the number 1.
  for axis in re.findall(r"\([^)]*\)|\w", axes):
    letter_sizes = _letter_sizes(axis, sizes)
    shape.append(math.prod(letter_sizes.values()))
  return tuple(shape)


def rearrange(
  array: np.ndarray, axes: str, new_axes: str, sizes: Mapping[str, int]
) -> np.ndarray:
  """Returns an array with its axes in another order, split or merged.

  Example: with "E (H V)" and "H V E", einops gets "E (H V) -> H V E".

  Args:
    array: The array.
    axes: Its axes, in the notation of einops.
    new_axes: The axes of the result.
    sizes: The size of each letter, and maybe of others.
  """
  # einops refuses the sizes of letters that are not in the pattern.
  return einops.rearrange(
    np.asarray(array), f"{axes} -> {new_axes}", **_letter_sizes(axes, sizes)
  )


def _letter_sizes(axes: str, sizes: Mapping[str, int]) -> dict[str, int]:
  """Returns the sizes of the letters in a text such as "E (H V)"."""
  return {letter: sizes[letter] for letter in axes if letter.isalpha()}


def _check_supported(
  config: ModelConfig, layout_supported: Mapping[str, Any]
) -> None:
  """Raises UserError if a layout does not support a model's config.

  Args:
    config: The model's config.
    layout_supported: The values that the layout supports, where they differ
      from the defaults. These fields are checked first.
  """
  supported = dict(layout_supported)
  for field, value in _DEFAULT_SUPPORTED.items():
    supported.setdefault(field, value)
  for field, value in supported.items():
    if value is ANY_VALUE:
      continue
    model_value = getattr(config, field)
    if model_value != value:
      raise UserError(
        f"this format supports only {field} = {value!r}; the model has"
        f" {model_value!r}"
      )
