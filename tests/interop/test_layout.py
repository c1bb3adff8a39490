"""Layouts convert parameters to tensors and back, bit for bit."""

import dataclasses
import errno
import os
import weakref
from typing import Any

import chex
import jax
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.interop import diffllama, directory, layout, unilm
from diffjax.interop.layout import allocate
from tests.interop.small_models import make_model


class Tensors(dict[str, np.ndarray]):
  """Tensors in memory, by name. Stands for the files of a checkpoint."""

  def shapes(self):
    return {name: tensor.shape for name, tensor in self.items()}

  def read(self, name):
    return self[name]


def make_layout(name: str, config: ModelConfig) -> layout.Layout:
  """Returns the layout of a model: "diffllama", "unilm V1" or "unilm V2"."""
  if name == "diffllama":
    return diffllama.make_layout(config)
  version = 1 if name == "unilm V1" else 2
  return unilm.make_layout(config, version)


def tensors_of(model_layout: layout.Layout, params: dict[str, Any]) -> Tensors:
  """Returns all tensors of a model in a layout."""
  tensors = Tensors()
  for name in model_layout.shapes():
    tensors[name] = model_layout.tensor(params, name)
  return tensors


@pytest.mark.parametrize(
  ("num_kv_heads", "is_tied"), [(1, True), (2, False), (4, True)]
)
@pytest.mark.parametrize(
  ("name", "attention"),
  [("diffllama", "diff"), ("unilm V1", "diff"), ("unilm V2", "diff_v2")],
)
def test_a_layout_reads_what_it_writes(name, attention, num_kv_heads, is_tied):
  """A layout converts parameters to the tensors of a file format, and back."""
  model = make_model(
    attention, num_kv_heads=num_kv_heads, tie_embeddings=is_tied
  )
  params = model.params
  if name == "diffllama":
    # DiffLlama has no such tensor. `diffllama.write` multiplies it into the
    # output projection before it uses the layout.
    del params["layers"]["attention"]["head_gain"]
  model_layout = make_layout(name, model.config)

  tensors = tensors_of(model_layout, params)
  read_params = model_layout.params(tensors)

  assert tensors.shapes() == model_layout.shapes()
  chex.assert_trees_all_equal(read_params, params)


# Memory. A model may be larger than the memory.


class TensorsInUseOneAtATime(Tensors):
  """Tensors that may be in use only one at a time.

  `copies` has a weak reference to each tensor that was read.
  """

  def __init__(self, tensors):
    super().__init__(tensors)
    self.copies = []

  def read(self, name):
    for copy in self.copies:
      assert copy() is None, "another tensor is still in use"
    tensor = self[name].copy()
    self.copies.append(weakref.ref(tensor))
    return tensor


def test_tensors_are_read_one_at_a_time(monkeypatch):
  """Parameters are in files, so only one tensor needs to be in memory.

  TensorsInUseOneAtATime fails at a read while another tensor is in use.
  """
  # All parameters are then in files, and not only large ones.
  monkeypatch.setattr(layout, "MIN_FILE_BYTES", 1)
  model = make_model()
  model_layout = diffllama.make_layout(model.config)
  tensors = TensorsInUseOneAtATime(tensors_of(model_layout, model.params))

  model_layout.params(tensors)

  assert len(tensors.copies) == len(tensors)


def test_large_parameters_are_files(monkeypatch):
  """A model may be larger than the memory."""
  # Every parameter has at least this size.
  monkeypatch.setattr(layout, "MIN_FILE_BYTES", 1)
  model = make_model()
  model_layout = diffllama.make_layout(model.config)
  tensors = tensors_of(model_layout, model.params)

  params = model_layout.params(tensors)

  # NumPy reads a memmap from its file when it is used.
  for leaf in jax.tree.leaves(params):
    assert isinstance(leaf, np.memmap)


class NineTensors:
  """Nine tensors of 4000 bytes each.

  Attributes:
    read_tensors: a weak reference to each tensor that was read.
    most_in_memory: the largest number of tensors in memory at a time.
  """

  def __init__(self):
    self.read_tensors = []
    self.most_in_memory = 0

  def shapes(self):
    return {f"tensor_{index}": (10, 100) for index in range(9)}

  def read(self, name):
    tensor = np.ones(self.shapes()[name], np.float32)
    self.read_tensors.append(weakref.ref(tensor))
    in_memory = [ref for ref in self.read_tensors if ref() is not None]
    self.most_in_memory = max(self.most_in_memory, len(in_memory))
    return tensor


def test_writing_holds_at_most_the_tensors_of_one_file(monkeypatch, tmp_path):
  """Nine tensors are written to three files."""
  tensor_bytes = 10 * 100 * 4
  monkeypatch.setattr(directory, "SHARD_BYTES", 3 * tensor_bytes)
  tensors = NineTensors()
  tokenizer = make_model().tokenizer
  config = {}

  directory.write(tmp_path, config, tensors, tokenizer, "float32")

  assert len(list(tmp_path.glob("*.safetensors"))) == 3
  assert len(tensors.read_tensors) == 9
  assert tensors.most_in_memory == 3


def test_a_full_disk_is_reported_when_a_parameter_is_allocated(monkeypatch):
  """A large parameter is a temporary file, whose space is reserved at once."""

  def raise_no_space(file, offset, size):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "posix_fallocate", raise_no_space)
  # 2**28 elements of 4 bytes.
  shape_of_1_gib = (2**14, 2**14)

  message = (
    "cannot store a parameter of 1.00 GiB in a file in .*: No space left on"
    " device; set TMPDIR to another"
  )
  with pytest.raises(UserError, match=message):
    allocate(shape_of_1_gib)


def test_a_missing_temporary_directory_is_reported(monkeypatch):
  """Large parameters are temporary files."""
  monkeypatch.setenv("TMPDIR", "/nowhere")
  # 2**28 elements of 4 bytes.
  shape_of_1_gib = (2**14, 2**14)

  message = (
    "in a file in /nowhere: No such file or directory; set TMPDIR to another"
    " directory"
  )
  with pytest.raises(UserError, match=message):
    allocate(shape_of_1_gib)


def test_a_config_of_two_billion_layers_is_rejected_at_once():
  """The files have two layers. The config says two billion.

  Even a list of the tensors' names would not fit into memory.
  """
  model = make_model(num_layers=2)
  layout_of_model = diffllama.make_layout(model.config)
  tensors = tensors_of(layout_of_model, model.params)
  config = dataclasses.replace(model.config, num_layers=2_000_000_000)
  layout_of_config = diffllama.make_layout(config)

  with pytest.raises(UserError, match="says 2000000000 layers"):
    layout_of_config.params(tensors)
