"""The golden Motif checkpoints are what a transcription of the public formulas gives, without diffjax and without PyTorch."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tests.interop import motif_reference


@pytest.mark.parametrize(
  "name", ["motif_tiny", "motif_2_tiny", "motif_2_tiny_gqa"]
)
def test_golden_motif(golden, name, tmp_path):
  path, ids, want = golden(name, tmp_path / "source")
  config = json.loads((path / "config.json").read_text())
  tensors = {}
  for file in path.glob("*.safetensors"):
    tensors |= safetensors.numpy.load_file(file)
  assert {tensor.dtype.name for tensor in tensors.values()} == {
    config["torch_dtype"]
  }
  tensors = {
    tensor: value.astype(np.float64) for tensor, value in tensors.items()
  }
  for row, logits in zip(ids, want, strict=True):
    np.testing.assert_allclose(
      motif_reference.logits(config, tensors, row), logits, atol=1e-6, rtol=0
    )  # the file has float32
  layers = np.load(path / "golden_logits.npz")
  for layer, (inputs, outputs) in enumerate(
    zip(layers["attention_input"], layers["attention_output"], strict=True)
  ):
    for x, y in zip(inputs, outputs, strict=True):
      np.testing.assert_allclose(
        motif_reference.attention(config, tensors, layer, x.astype(np.float64)),
        y,
        atol=2e-6,
        rtol=0,
      )


def test_lambda_init_is_the_schedule_of_the_layer_before():
  assert [
    round(motif_reference.lambda_init(layer), 4) for layer in (0, 1, 2)
  ] == [-0.0099, 0.2, 0.3555]
