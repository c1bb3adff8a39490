"""The tables: a written model is read back bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.interop import diffllama, unilm

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
  tensors = Tensors({name: layout.tensor(model.params, name) for name in layout.shapes()})
  assert tensors.shapes() == layout.shapes()
  params = layout.params(tensors)
  if name == "diffllama":
    params["layers"]["attention"]["head_gain"] = model.params["layers"]["attention"]["head_gain"]
  assert jax.tree.structure(params) == jax.tree.structure(model.params)
  jax.tree.map(np.testing.assert_array_equal, params, model.params)


def test_a_config_of_endless_layers_costs_nothing(make_model):
  model = make_model()
  layout = diffllama._layout(model.config)
  tensors = Tensors({name: layout.tensor(model.params, name) for name in layout.shapes()})
  with pytest.raises(UserError, match="with 2000000000 layers"):
    diffllama._layout(dataclasses.replace(model.config, num_layers=2_000_000_000)).params(tensors)
