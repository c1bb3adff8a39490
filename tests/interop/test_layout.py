"""The tables: a written model is read back bit for bit."""

import dataclasses
import errno
import os
import weakref

import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.interop import diffllama, directory, unilm
from diffjax.interop.layout import allocate

LAYOUTS = {
  "diffllama": ("diff", lambda config: diffllama._layout(config)),
  "unilm V1": ("diff", lambda config: unilm._layout(config, 1)),
  "unilm V2": ("diff_v2", lambda config: unilm._layout(config, 2)),
}


class Tensors(dict):
  def shapes(self):
    return {name: tensor.shape for name, tensor in self.items()}

  def read(self, name):
    return self[name]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_table_reads_back_what_it_writes(make_model, name, num_kv_heads, tie):
  attention, make = LAYOUTS[name]
  model = make_model(attention, num_kv_heads=num_kv_heads, tie_embeddings=tie)
  layout = make(model.config)
  tensors = Tensors(
    {name: layout.tensor(model.params, name) for name in layout.shapes()}
  )
  assert tensors.shapes() == layout.shapes()
  params = layout.params(tensors)
  if name == "diffllama":
    params["layers"]["attention"]["head_gain"] = model.params["layers"][
      "attention"
    ]["head_gain"]
  assert jax.tree.structure(params) == jax.tree.structure(model.params)
  jax.tree.map(np.testing.assert_array_equal, params, model.params)


def test_one_tensor_at_a_time(make_model, monkeypatch):
  """A model larger than the memory: no tensor is left when the next is read, and every array is a file."""
  model = make_model()
  layout, read = diffllama._layout(model.config), []

  class Fleeting(Tensors):
    def read(self, name):
      assert not [earlier for earlier in read if earlier() is not None]
      tensor = self[name].copy()
      read.append(weakref.ref(tensor))
      return tensor

  monkeypatch.setattr("diffjax.interop.layout._MIN_FILE_BYTES", 1)
  params = layout.params(
    Fleeting(
      {name: layout.tensor(model.params, name) for name in layout.shapes()}
    )
  )
  assert len(read) == len(layout.shapes())
  for leaf in jax.tree.leaves(params):
    assert isinstance(leaf, np.memmap)


def test_the_tensors_of_one_file_at_a_time(make_model, monkeypatch, tmp_path):
  made = []

  class OnesWhenRead:
    def shapes(self):
      return {f"t{index}": (10, 100) for index in range(9)}

    def read(self, name):
      array = np.ones(self.shapes()[name], np.float32)
      made.append(weakref.ref(array))
      assert sum(earlier() is not None for earlier in made) <= 3
      return array

  monkeypatch.setattr(directory, "SHARD_BYTES", 3 * 4000)
  directory.write(
    tmp_path, {}, OnesWhenRead(), make_model().tokenizer, "float32"
  )
  assert len(made) == 9 and len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_full_disk_is_told(monkeypatch):
  def full(file, offset, size):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "posix_fallocate", full)
  with pytest.raises(
    UserError,
    match="cannot store a parameter of 1.00 GiB in a file in .*: No space left on device; set TMPDIR to another",
  ):
    allocate((1 << 14, 1 << 14))
  monkeypatch.setenv("TMPDIR", "/nowhere")
  with pytest.raises(
    UserError,
    match="in a file in /nowhere: No such file or directory; set TMPDIR to another directory",
  ):
    allocate((1 << 14, 1 << 14))


def test_a_config_of_endless_layers_costs_nothing(make_model):
  model = make_model()
  layout = diffllama._layout(model.config)
  tensors = Tensors(
    {name: layout.tensor(model.params, name) for name in layout.shapes()}
  )
  with pytest.raises(UserError, match="says 2000000000 layers"):
    diffllama._layout(
      dataclasses.replace(model.config, num_layers=2_000_000_000)
    ).params(tensors)
