"""Attention layers of Phi-4-mini-flash: the authors' outputs, the NumPy transcription's, both ways, and what is refused."""

import functools
import json
import shutil

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
from tests.interop.conftest import GOLDEN

PATH = GOLDEN / "phi_flash_tiny"
LAYERS = {1: "windowed", 3: "windowed", 5: "full", 7: "cross"}


@pytest.fixture(scope="module")
def config():
  return json.loads((PATH / "config.json").read_text())


@pytest.fixture(scope="module")
def tensors():
  return {
    name: value.astype(np.float32)
    for name, value in safetensors.numpy.load_file(
      PATH / "model.safetensors"
    ).items()
  }


@pytest.fixture(scope="module")
def arrays():
  """Of each layer by its number: input, output, and output of the attention, [B, T, E]."""
  with np.load(PATH / "golden.npz") as data:
    return {
      int(layer): [
        data[name][index] for name in ("input", "output", "attention")
      ]
      for index, layer in enumerate(data["layers"])
    }


def test_the_transcription_gives_the_same(config, tensors, arrays):
  """Of the whole layers, without diffjax and PyTorch."""
  assert {
    layer: phi_flash_reference.kind(config, layer) for layer in arrays
  } == LAYERS
  exact = {name: value.astype(np.float64) for name, value in tensors.items()}
  for row in range(2):
    shared = None
    for layer, (x, output, attended) in arrays.items():
      got = phi_flash_reference.block(
        config, exact, layer, x[row].astype(np.float64), shared
      )
      np.testing.assert_allclose(got[0], output[row], atol=1e-6, rtol=0)
      np.testing.assert_allclose(got[1], attended[row], atol=1e-6, rtol=0)
      shared = got[2]


def normed(tensors, layer, x, config):
  gain, shift = (
    tensors[f"model.layers.{layer}.input_layernorm.{part}"]
    for part in ("weight", "bias")
  )
  return layer_norm(x, gain, shift, config["layer_norm_eps"])


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_golden_attention_of_every_layer(
  config, tensors, arrays, implementation
):
  """The cross layer reads the keys and values of the full one, and has none of its own."""
  shared = []

  def attend(q, k, v, lam, **mask):
    shared[:] = k, v
    return diff_attention(q, k, v, lam, **mask, implementation=implementation)

  for layer, (x, _, want) in arrays.items():
    attention, params = phi_flash.read_attention(str(PATH), layer)
    assert ("key" in params, "value_bias" in params) == (
      LAYERS[layer] != "cross",
    ) * 2
    assert attention.window == (
      config["sliding_window"] if LAYERS[layer] == "windowed" else None
    )
    call = attention.clone(attention_fn=attend).apply
    keys_values = (*shared,) if LAYERS[layer] == "cross" else None
    got = call(
      {"params": params},
      normed(tensors, layer, jnp.asarray(x), config),
      lambda_init_schedule(layer),
      keys_values=keys_values,
    )
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_fields_of_a_config_make_the_layers_below_the_cross_ones(
  config, tensors, arrays
):
  """Windows by layer, no RoPE, biases of projections and norms: a block of the decoder equals the authors' whole layer."""
  fields = ModelConfig(
    num_layers=6,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_dim=24,
    rope=False,
    projection_biases=True,
    norm="layer",
    window=config["sliding_window"],
    window_pattern="wwwwff",
  )
  windows = layer_windows(fields)
  for layer in (1, 3, 5):
    x, want, _ = arrays[layer]
    get = lambda name, layer=layer: tensors[f"model.layers.{layer}.{name}"]
    gate, up = np.split(get("mlp.fc1.weight"), 2)
    params = {
      "attention": phi_flash.read_attention(str(PATH), layer)[1],
      "attention_norm": get("input_layernorm.weight"),
      "attention_norm_shift": get("input_layernorm.bias"),
      "ffn_norm": get("post_attention_layernorm.weight"),
      "ffn_norm_shift": get("post_attention_layernorm.bias"),
      "ffn": {"gate": gate.T, "up": up.T, "down": get("mlp.fc2.weight").T},
    }
    assert windows[layer] == (4 if layer < 4 else None)
    window_index = distinct_windows(fields).index(windows[layer])
    block = jax.jit(
      functools.partial(
        Block(fields, jnp.float32, diff_attention).apply, {"params": params}
      )
    )
    got, _ = block(
      x, lambda_inits(fields)[layer], jnp.int32(window_index), None, None
    )
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_written_tensors_are_those_that_were_read(tensors):
  attention = {
    name: value for name, value in tensors.items() if ".attn." in name
  }
  written = {}
  for layer in LAYERS:
    written |= phi_flash.tensors_of(
      phi_flash.read_attention(str(PATH), layer)[1], layer
    )
  assert written.keys() == attention.keys()
  for name, value in attention.items():
    np.testing.assert_array_equal(written[name], value)


def test_a_layer_of_ours_is_written_as_the_authors_read_it(
  config, tensors, arrays
):
  """Drawn by our initialisation with random biases; the transcription reads the written tensors."""
  x, layer = arrays[5][0][0], 5
  attention = phi_flash.read_attention(str(PATH), layer)[0]
  params = attention.init(jax.random.key(0), x[None], 0.5)["params"]
  params = {
    name: np.asarray(leaf)
    + 0.1 * np.random.default_rng(0).normal(size=leaf.shape)
    for name, leaf in params.items()
  }
  exact = {
    name: value.astype(np.float64)
    for name, value in phi_flash.tensors_of(params, layer).items()
  }
  want, _ = phi_flash_reference.attention(
    config, exact, layer, x.astype(np.float64)
  )
  got = attention.apply(
    {"params": jax.tree.map(jnp.float32, params)},
    x[None],
    lambda_init_schedule(layer),
  )
  np.testing.assert_allclose(got[0], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
  ("layer", "change", "message"),
  [
    (
      4,
      {},
      r"layer 4 of .*config.json has no attention; pass an odd number from 1 to 7",
    ),
    (9, {}, "layer 9 of .* has no attention"),
    (-1, {}, "layer -1 of .* has no attention"),
    (
      1,
      dict(model_type="phi3"),
      "model_type = 'phi3': this layout supports only 'phi4flash'",
    ),
    (1, dict(mb_per_layer=3), "mb_per_layer = 3: diffjax supports only 2"),
    (
      1,
      dict(num_hidden_layers=6),
      "num_hidden_layers = 6: it must be a positive multiple of 4",
    ),
    (
      1,
      dict(num_attention_heads=7),
      "num_attention_heads = 7: it must be a positive multiple of 4",
    ),
    (
      1,
      dict(num_key_value_heads=2),
      r"has model.layers.1.attn.Wqkv.weight of shape \[64, 32\]; for its config.json it must be \[48, 32\]",
    ),
    (1, dict(sliding_window=None), "has no sliding_window"),
    (
      1,
      dict(sliding_window=[None, 4]),
      r"sliding_window = \[None, 4\]: it must be a positive multiple of 1",
    ),
    (
      1,
      dict(qk_norm=True),
      "has fields that diffjax does not know: qk_norm = True",
    ),
    (
      15,
      dict(num_hidden_layers=16),
      r"has no tensor model.layers.15.attn.Wqkv.weight; for its config.json it must be \[32, 32\]",
    ),
  ],
)
def test_what_is_refused(layer, change, message, config, tmp_path):
  shutil.copy(PATH / "model.safetensors", tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(config | change))
  with pytest.raises(UserError, match=message):
    phi_flash.read_attention(str(tmp_path), layer)


@pytest.mark.parametrize("layout", ["llama", "diffllama", "motif"])
def test_a_whole_model_is_refused_and_says_what_can_be_read(
  convert, layout, tmp_path
):
  result = convert(
    f"--from={layout}:{PATH}", f"--to=diffjax:{tmp_path / 'out'}"
  )
  assert result.returncode == 1 and not (tmp_path / "out").exists()
  (line,) = result.stderr.splitlines()
  assert "model_type = 'phi4flash': this layout supports only" in line
  assert "layers of Phi-4-mini-flash" in line and line.endswith(
    "with diffjax.interop.phi_flash.read_attention"
  )


def test_layers_of_the_public_size_have_its_parameters():
  """19.67 million numbers, and 13.11 where the keys and values are another layer's."""
  layer = DiffAttention(
    num_heads=20,
    num_kv_heads=10,
    head_dim=64,
    rope=False,
    projection_biases=True,
  )
  x = jax.ShapeDtypeStruct((1, 3, 2560), jnp.float32)
  k, v = (
    jax.ShapeDtypeStruct((1, 3, 10, *shape), jnp.float32)
    for shape in ((2, 64), (128,))
  )
  made = lambda **given: jax.eval_shape(
    layer.init, jax.random.key(0), x, 0.5, **given
  )["params"]
  count = lambda **given: sum(
    leaf.size for leaf in jax.tree.leaves(made(**given))
  )
  assert count() == (5120 + 2560) * 2560 + 5120 + 2560 + 4 * 64 + 128
  assert count(keys_values=(k, v)) == 2 * (2560 * 2560 + 2560) + 4 * 64 + 128
