"""motif_reference.py computes the outputs of the golden Motif checkpoints.

It uses neither diffjax nor PyTorch.
"""

import json

import chex
import numpy as np
import pytest

from tests.interop import motif_reference
from tests.interop.small_models import copy_golden, read_tensors

NAMES = ["motif_tiny", "motif_2_tiny", "motif_2_tiny_gqa"]


@pytest.fixture(params=NAMES)
def golden(request, tmp_path):
  """Returns a golden checkpoint, with logits by another implementation."""
  return copy_golden(request.param, tmp_path / "source")


@pytest.fixture
def config(golden):
  """Returns the config.json of the checkpoint."""
  return json.loads((golden.path / "config.json").read_text())


@pytest.fixture
def exact_tensors(golden):
  """Returns the tensors in float64."""
  tensors = read_tensors(golden.path)
  return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


def test_golden_tensors_have_the_dtype_of_the_config(golden, config):
  tensors = read_tensors(golden.path)

  dtypes = {tensor.dtype.name for tensor in tensors.values()}
  assert dtypes == {config["torch_dtype"]}


def test_the_numpy_reference_computes_the_golden_logits(
  golden, config, exact_tensors
):
  """The golden logits are from PyTorch, in float64."""
  for row, token_ids in enumerate(golden.ids):
    logits = motif_reference.logits(config, exact_tensors, token_ids)

    expected = golden.logits[row]
    chex.assert_trees_all_close(logits, expected, rtol=0, atol=1e-6)


def test_the_numpy_reference_computes_the_golden_attention_of_every_layer(
  golden, config, exact_tensors
):
  # Arrays of shape [layers, rows, tokens, width], in float32.
  data = np.load(golden.path / "golden_logits.npz")
  inputs = data["attention_input"].astype(np.float64)
  outputs = data["attention_output"]

  num_layers, num_rows = inputs.shape[:2]
  assert num_layers == config["num_hidden_layers"]
  for layer in range(num_layers):
    for row in range(num_rows):
      x = inputs[layer, row]
      output = motif_reference.attention(config, exact_tensors, layer, x)
      expected = outputs[layer, row]
      chex.assert_trees_all_close(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
  ("layer", "expected"), [(0, -0.0099), (1, 0.2), (2, 0.3555)]
)
def test_lambda_init_is_the_schedule_of_the_layer_before(layer, expected):
  """Motif has 0.8 - 0.6 exp(-0.3 (layer - 1)), with layers from 0."""
  lambda_init = motif_reference.lambda_init(layer)

  assert round(lambda_init, 4) == expected
