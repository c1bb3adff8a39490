"""Phi-4-mini-flash's attention layers are read and written.

The golden checkpoint has the outputs of the authors' own code.
"""

import dataclasses
import functools
import json
import math
import shutil
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diffjax.config import ModelConfig, UserError
from diffjax.interop import phi_flash
from diffjax.model.attention import DiffAttention, lambda_init_schedule
from diffjax.model.decoder import (
  Block,
  distinct_windows,
  lambda_inits,
  layer_windows,
)
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.layer_norm import layer_norm
from tests.interop import phi_flash_reference
from tests.interop.small_models import GOLDEN, convert

PATH = GOLDEN / "phi_flash_tiny"
# The layers with attention. The others are Mamba-1 and gated memory.
LAYER_KINDS = {1: "windowed", 3: "windowed", 5: "full", 7: "cross"}
FULL_LAYER = 5

jitted_layer_norm = jax.jit(layer_norm, static_argnums=3)


class Arrays(NamedTuple):
  """The golden arrays of one layer, of shape [rows, tokens, width].

  Attributes:
    x: the input.
    output: the output of the whole layer.
    attention: the output of its attention.
  """

  x: np.ndarray
  output: np.ndarray
  attention: np.ndarray


@pytest.fixture(scope="module")
def config():
  """Returns the config.json of the checkpoint."""
  return json.loads((PATH / "config.json").read_text())


@pytest.fixture(scope="module")
def tensors():
  """Returns the tensors of the checkpoint in float32."""
  stored = safetensors.numpy.load_file(PATH / "model.safetensors")
  return {name: tensor.astype(np.float32) for name, tensor in stored.items()}


@pytest.fixture(scope="module")
def golden():
  """Returns the golden arrays of each layer, by its number."""
  arrays = {}
  with np.load(PATH / "golden.npz") as data:
    for index, layer in enumerate(data["layers"]):
      arrays[int(layer)] = Arrays(
        data["input"][index], data["output"][index], data["attention"][index]
      )
  return arrays


# The reference.


def test_the_reference_knows_the_kinds_of_layers(config, golden):
  """A cross layer attends to the keys and values of the full layer."""
  assert golden.keys() == LAYER_KINDS.keys()
  for layer, kind in LAYER_KINDS.items():
    assert phi_flash_reference.layer_kind(config, layer) == kind


@pytest.mark.parametrize("row", [0, 1])
def test_the_numpy_reference_computes_the_golden_outputs(
  config, tensors, golden, row
):
  """The authors' code in PyTorch has computed the golden outputs."""
  exact = {name: value.astype(np.float64) for name, value in tensors.items()}

  def block(layer, keys_values):
    x = golden[layer].x[row].astype(np.float64)
    return phi_flash_reference.block(config, exact, layer, x, keys_values)

  outputs = {
    1: block(layer=1, keys_values=None),
    3: block(layer=3, keys_values=None),
    5: block(layer=5, keys_values=None),
  }
  # Layer 7 is the cross layer, which reads the keys and values of layer 5.
  outputs[7] = block(layer=7, keys_values=outputs[5].keys_values)

  for layer, arrays in golden.items():
    chex.assert_trees_all_close(
      outputs[layer].output, arrays.output[row], rtol=0, atol=1e-6
    )
    chex.assert_trees_all_close(
      outputs[layer].attention, arrays.attention[row], rtol=0, atol=1e-6
    )


# Reading.


@pytest.mark.parametrize(
  ("layer", "has_keys_values"), [(1, True), (3, True), (5, True), (7, False)]
)
def test_only_the_cross_layer_has_no_keys_and_values(layer, has_keys_values):
  """The last attention layer reads the keys and values of layer 5."""
  _, params = phi_flash.read_attention(str(PATH), layer)

  assert ("key" in params) == has_keys_values
  assert ("value_bias" in params) == has_keys_values


@pytest.mark.parametrize(
  ("layer", "window"), [(1, 4), (3, 4), (5, None), (7, None)]
)
def test_only_the_first_attention_layers_have_a_window(layer, window):
  """A token of layers 1 and 3 sees 4 tokens, including itself."""
  attention, _ = phi_flash.read_attention(str(PATH), layer)

  assert attention.window == window


def normed_input(
  config: dict[str, Any],
  tensors: dict[str, np.ndarray],
  golden: dict[int, Arrays],
  layer: int,
) -> jax.Array:
  """Returns the input of a layer's attention, after the norm before it."""
  name = f"model.layers.{layer}.input_layernorm"
  return jitted_layer_norm(
    golden[layer].x,
    tensors[f"{name}.weight"],
    tensors[f"{name}.bias"],
    config["layer_norm_eps"],
  )


def keys_values_of_full_layer(
  config: dict[str, Any],
  tensors: dict[str, np.ndarray],
  golden: dict[int, Arrays],
) -> tuple[jax.Array, jax.Array]:
  """Returns the keys and values that the cross layer reads."""
  attention, params = phi_flash.read_attention(str(PATH), FULL_LAYER)

  @jax.jit
  def keys_values(x):
    arguments = []

    def record(q, k, v, lam, **mask):
      arguments.extend([k, v])
      return diff_attention(q, k, v, lam, **mask)

    recording = attention.clone(attention_fn=record)
    recording.apply({"params": params}, x, lambda_init_schedule(FULL_LAYER))
    return tuple(arguments)

  return keys_values(normed_input(config, tensors, golden, FULL_LAYER))


def attention_output(
  layer: int, implementation: str, x: jax.Array, keys_values: Any = None
) -> jax.Array:
  """Returns the output of an attention layer that diffjax has read."""
  attention, params = phi_flash.read_attention(str(PATH), layer)
  attention_fn = functools.partial(
    diff_attention, implementation=implementation
  )
  apply = jax.jit(attention.clone(attention_fn=attention_fn).apply)
  lambda_init = lambda_init_schedule(layer)
  return apply({"params": params}, x, lambda_init, keys_values=keys_values)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize(
  "layer", [pytest.param(3, id="windowed"), pytest.param(5, id="full")]
)
def test_an_attention_layer_computes_its_golden_output(
  config, tensors, golden, layer, implementation
):
  """The authors' code has computed the golden output."""
  x = normed_input(config, tensors, golden, layer)

  output = attention_output(layer, implementation, x)

  expected = golden[layer].attention
  chex.assert_trees_all_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_the_cross_layer_computes_its_golden_output(
  config, tensors, golden, implementation
):
  """Layer 7 has queries of its own, and the keys and values of layer 5."""
  x = normed_input(config, tensors, golden, layer=7)
  keys_values = keys_values_of_full_layer(config, tensors, golden)

  output = attention_output(7, implementation, x, keys_values)

  expected = golden[7].attention
  chex.assert_trees_all_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
  ("layer", "message"),
  [
    pytest.param(
      4,
      r"layer 4 of .*config.json has no attention; pass an odd number from 1"
      " to 7",
      id="even",
    ),
    pytest.param(9, "layer 9 of .* has no attention", id="too large"),
    pytest.param(-1, "layer -1 of .* has no attention", id="negative"),
  ],
)
def test_a_layer_without_attention_is_rejected(layer, message):
  """Odd layers have attention. Even ones are Mamba or gated memory."""
  with pytest.raises(UserError, match=message):
    phi_flash.read_attention(str(PATH), layer)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    (
      "model_type",
      "phi3",
      "model_type = 'phi3': this layout supports only 'phi4flash'",
    ),
    # Each third layer instead of each second one would have attention.
    ("mb_per_layer", 3, "mb_per_layer = 3: diffjax supports only 2"),
    (
      "num_hidden_layers",
      6,
      "num_hidden_layers = 6: it must be a positive multiple of 4",
    ),
    (
      "num_attention_heads",
      7,
      "num_attention_heads = 7: it must be a positive multiple of 4",
    ),
    # The tensor has 64 rows, for 8 query heads and 4 key/value heads.
    (
      "num_key_value_heads",
      2,
      r"has model.layers.1.attn.Wqkv.weight of shape \[64, 32\]; for its"
      r" config.json it must be \[48, 32\]",
    ),
    ("sliding_window", None, "has no sliding_window"),
    # A list with a window for each layer is not supported.
    (
      "sliding_window",
      [None, 4],
      r"sliding_window = \[None, 4\]: it must be a positive multiple of 1",
    ),
    ("qk_norm", True, "has fields that diffjax does not know: qk_norm = True"),
  ],
)
def test_an_unsupported_config_is_rejected(
  field, value, message, config, tmp_path
):
  """diffjax would compute other outputs than the authors' code."""
  shutil.copy(PATH / "model.safetensors", tmp_path)
  unsupported_config = {**config, field: value}
  (tmp_path / "config.json").write_text(json.dumps(unsupported_config))

  with pytest.raises(UserError, match=message):
    phi_flash.read_attention(str(tmp_path), layer=1)


def test_a_missing_tensor_of_a_layer_is_named(config, tmp_path):
  """The config.json says 16 layers, but there are tensors of 8."""
  shutil.copy(PATH / "model.safetensors", tmp_path)
  longer_config = {**config, "num_hidden_layers": 16}
  (tmp_path / "config.json").write_text(json.dumps(longer_config))

  message = (
    r"has no tensor model.layers.15.attn.Wqkv.weight; for its config.json it"
    r" must be \[32, 32\]"
  )
  with pytest.raises(UserError, match=message):
    phi_flash.read_attention(str(tmp_path), layer=15)


@pytest.mark.parametrize("layout", ["llama", "diffllama", "motif"])
def test_convert_rejects_a_whole_phi_flash_with_a_hint(layout, tmp_path):
  """diffjax has no Mamba layers, so only attention layers can be read."""
  out = tmp_path / "out"

  result = convert(f"--from={layout}:{PATH}", f"--to=diffjax:{out}")

  assert result.returncode == 1
  assert not out.exists()
  (line,) = result.stderr.splitlines()
  assert "model_type = 'phi4flash': this layout supports only" in line
  assert "layers of Phi-4-mini-flash" in line
  assert line.endswith("with diffjax.interop.phi_flash.read_attention")


# Writing.


def test_written_tensors_are_the_tensors_that_were_read(tensors):
  """Only the tensors of attention layers are read and written."""
  expected = {}
  for name, tensor in tensors.items():
    if ".attn." in name:
      expected[name] = tensor

  written = {}
  for layer in LAYER_KINDS:
    _, params = phi_flash.read_attention(str(PATH), layer)
    written |= phi_flash.tensors_of(params, layer)

  chex.assert_trees_all_equal(written, expected)


def test_a_written_layer_has_the_same_output_by_the_reference(config, golden):
  """diffjax and NumPy compute the same from the same random parameters.

  The reference reads them as the tensors of the layout.
  """
  attention, read_params = phi_flash.read_attention(str(PATH), FULL_LAYER)
  rng = np.random.default_rng(0)
  params = {}
  for name, leaf in read_params.items():
    params[name] = rng.normal(scale=0.3, size=leaf.shape).astype(np.float32)
  one_row = golden[FULL_LAYER].x[:1]

  tensors = phi_flash.tensors_of(params, FULL_LAYER)

  exact_tensors = jax.tree.map(np.float64, tensors)
  expected, _ = phi_flash_reference.attention(
    config, exact_tensors, FULL_LAYER, one_row[0].astype(np.float64)
  )
  lambda_init = lambda_init_schedule(FULL_LAYER)
  output = jax.jit(attention.apply)({"params": params}, one_row, lambda_init)
  chex.assert_trees_all_close(output[0], expected, rtol=0, atol=1e-5)


# The same layers in a model of diffjax.

# Layer 7, the cross layer, is not supported in a decoder.
DECODER_CONFIG = ModelConfig(
  num_layers=6,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  ffn_dim=24,
  rope=False,
  projection_biases=True,
  norm="layer",
  window=4,
  window_pattern="wwwwff",
)


def block_parameters(
  tensors: dict[str, np.ndarray], layer: int
) -> dict[str, Any]:
  """Returns a layer's tensors as the parameters of a block of the decoder."""
  name = f"model.layers.{layer}"
  _, attention = phi_flash.read_attention(str(PATH), layer)
  gate, up = np.split(tensors[f"{name}.mlp.fc1.weight"], 2)
  return {
    "attention": attention,
    "attention_norm": tensors[f"{name}.input_layernorm.weight"],
    "attention_norm_shift": tensors[f"{name}.input_layernorm.bias"],
    "ffn_norm": tensors[f"{name}.post_attention_layernorm.weight"],
    "ffn_norm_shift": tensors[f"{name}.post_attention_layernorm.bias"],
    "ffn": {
      "gate": gate.T,
      "up": up.T,
      "down": tensors[f"{name}.mlp.fc2.weight"].T,
    },
  }


def test_the_window_pattern_of_a_decoder_can_be_that_of_phi_flash():
  """The pattern names a letter for each layer: w for a window, f for none."""
  config = dataclasses.replace(
    DECODER_CONFIG, num_layers=6, window=4, window_pattern="wwwwff"
  )

  windows = layer_windows(config)

  assert windows[1] == 4
  assert windows[3] == 4
  assert windows[5] is None


# Layers 1 and 3 have a window, and layer 5 has none.
@pytest.mark.parametrize("layer", [1, 3, 5])
def test_blocks_of_the_decoder_compute_the_golden_outputs(
  tensors, golden, layer
):
  """A block is a whole layer: attention, feed-forward layer and norms."""
  block = Block(DECODER_CONFIG, jnp.float32, diff_attention)
  params = block_parameters(tensors, layer)
  # A block gets the index of its window in the list of the model's windows.
  window = layer_windows(DECODER_CONFIG)[layer]
  window_index = distinct_windows(DECODER_CONFIG).index(window)

  output, _ = jax.jit(block.apply)(
    {"params": params},
    golden[layer].x,
    lambda_init=lambda_inits(DECODER_CONFIG)[layer],
    window_index=np.int32(window_index),
    segment_ids=None,
    positions=None,
  )

  chex.assert_trees_all_close(output, golden[layer].output, rtol=0, atol=1e-5)


# The size of the published model.

PUBLISHED_LAYER = DiffAttention(
  num_heads=20, num_kv_heads=10, head_dim=64, rope=False, projection_biases=True
)


def count_parameters(
  module: DiffAttention, *inputs: Any, **options: Any
) -> int:
  """Returns the number of parameters of a module."""
  key = jax.random.key(0)
  shapes = jax.eval_shape(module.init, key, *inputs, **options)["params"]
  sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
  return sum(sizes)


def test_a_published_attention_layer_has_19_67_million_parameters():
  """These are the sizes of Phi-4-mini-flash."""
  width = 2560
  x = jax.ShapeDtypeStruct((1, 3, width), jnp.float32)

  num_parameters = count_parameters(PUBLISHED_LAYER, x, lambda_init=0.5)

  # 20 heads with two queries each, and 10 with two keys and a wide value.
  num_qkv_rows = (20 * 2 * 64) + (10 * 2 * 64) + (10 * 128)
  qkv_projection = num_qkv_rows * width + num_qkv_rows
  out_projection = width * width + width
  lambda_vectors, head_norm_gain = 4 * 64, 128
  assert num_parameters == (
    qkv_projection + out_projection + lambda_vectors + head_norm_gain
  )
  assert round(num_parameters / 1e6, 2) == 19.67


def test_a_published_cross_layer_has_13_11_million_parameters():
  """It projects only queries and the output. Another layer has the keys."""
  width = 2560
  batch_size, num_tokens = 1, 3
  x = jax.ShapeDtypeStruct((batch_size, num_tokens, width), jnp.float32)
  # 10 heads with two keys of size 64, and a value of size 128.
  keys = jax.ShapeDtypeStruct((batch_size, num_tokens, 10, 2, 64), jnp.float32)
  values = jax.ShapeDtypeStruct((batch_size, num_tokens, 10, 128), jnp.float32)

  num_parameters = count_parameters(
    PUBLISHED_LAYER, x, lambda_init=0.5, keys_values=(keys, values)
  )

  query_projection = width * width + width
  out_projection = width * width + width
  lambda_vectors, head_norm_gain = 4 * 64, 128
  assert num_parameters == (
    query_projection + out_projection + lambda_vectors + head_norm_gain
  )
  assert round(num_parameters / 1e6, 2) == 13.11
