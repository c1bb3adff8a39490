"""The authors' layers: golden ones as layers of a whole model, and whole models against an independent one."""

import ast
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diffjax.interop import unilm
from diffjax.model.attention import (
  DiffAttention,
  DiffAttentionV2,
  lambda_init_schedule,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "model/golden"


@pytest.mark.parametrize("name", ["v1_mha_depth0", "v1_gqa_depth5", "v2_gqa"])
def test_golden_layer_in_a_whole_model(make_model, name, tmp_path):
  """The layer's tensors go into a state dict as they are; the model that is read from it computes the layer's output."""
  data = np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
  meta = ast.literal_eval(str(data["meta"]))
  depth, sizes = (
    meta["depth"],
    {
      key: meta[key]
      for key in ("num_heads", "num_kv_heads", "head_dim", "rope_base")
    },
  )
  attention = {"v1": "diff", "v2": "diff_v2"}[meta["kind"]]
  model = make_model(
    attention, num_layers=depth + 1, embed_dim=meta["embed_dim"], **sizes
  )
  unilm.write(str(tmp_path), model, "float32")
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  layer = {
    key.split("/")[1]: data[key]
    for key in data.files
    if key.startswith("param/")
  }
  assert {
    key.split("self_attn.")[1]
    for key in tensors
    if f"layers.{depth}.self_attn." in key
  } == layer.keys()
  for key, tensor in layer.items():
    assert tensors[f"layers.{depth}.self_attn.{key}"].shape == tensor.shape
    tensors[f"layers.{depth}.self_attn.{key}"] = tensor.astype(np.float32)
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")

  model = unilm.read(str(tmp_path))
  module = {"v1": DiffAttention, "v2": DiffAttentionV2}[meta["kind"]](**sizes)
  params = jax.tree.map(
    lambda leaf: jnp.asarray(leaf[depth]), model.params["layers"]["attention"]
  )
  y = jax.jit(module.apply)(
    {"params": params},
    jnp.asarray(data["x"], jnp.float32),
    lambda_init_schedule(depth),
  )
  assert np.linalg.norm(y - data["y"]) < 2e-6 * np.linalg.norm(data["y"])


def reference(parts, tensors, config, tokens):
  """Logits of one row [T] by a model of the authors' layers as the layout's description says, in float64."""
  tensors = {
    name: tensor.astype(np.float64) for name, tensor in tensors.items()
  }
  H, K, D, eps = (
    config["num_heads"],
    config["num_kv_heads"],
    config["head_dim"],
    config["norm_eps"],
  )
  x = tensors["embed_tokens.weight"][tokens]
  for number in range(config["n_layers"]):
    w = {
      name.removeprefix(f"layers.{number}."): tensor
      for name, tensor in tensors.items()
      if name.startswith(f"layers.{number}.")
    }
    h = parts.norm(x, w["self_attn_layer_norm.weight"], eps)
    q, k, v = (h @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k = (
      parts.rotate(
        array.reshape(len(x), -1, D), config["rope_theta"], interleaved=True
      )
      for array in (q, k)
    )
    v = v.reshape(len(x), K, -1)
    heads = []
    for head in range(H):
      group = head // (H // K)
      if config["diff_version"] == 1:
        start = 0.8 - 0.6 * math.exp(-0.3 * number)
        first, second = (
          math.exp(
            w[f"self_attn.lambda_q{index}"] @ w[f"self_attn.lambda_k{index}"]
          )
          for index in (1, 2)
        )
        maps = [
          parts.attend(
            q[:, 2 * head + index], k[:, 2 * group + index], v[:, group]
          )
          for index in (0, 1)
        ]
        normed = parts.norm(
          maps[0] - (first - second + start) * maps[1],
          w["self_attn.subln.weight"],
          1e-5,
        )
        heads.append((1 - start) * normed)
      else:
        lam = 1 / (1 + np.exp(-h @ w["self_attn.lambda_proj.weight"][head]))
        maps = [
          parts.attend(q[:, 2 * head + index], k[:, group], v[:, group])
          for index in (0, 1)
        ]
        heads.append(maps[0] - lam[:, None] * maps[1])
    out = w[
      "self_attn.out_proj.weight"
      if config["diff_version"] == 1
      else "self_attn.o_proj.weight"
    ]
    x = x + np.concatenate(heads, axis=-1) @ out.T
    x = x + parts.swiglu(
      parts.norm(x, w["final_layer_norm.weight"], eps),
      *(w[f"ffn.{name}.weight"] for name in ("fc1", "gate", "fc2")),
    )
  last = tensors[
    "embed_tokens.weight"
    if config["share_input_output_embed"]
    else "output_projection.weight"
  ]
  return parts.norm(x, tensors["layer_norm.weight"], eps) @ last.T


@pytest.mark.parametrize("attention", ["diff", "diff_v2"])
@pytest.mark.parametrize("tie", [True, False])
def test_whole_model(make_model, parts, logits, attention, tie, tmp_path):
  """A written model computes the same by the layout's description as in diffjax; read again, it is the same bit for bit."""
  model = make_model(attention, tie_embeddings=tie)
  unilm.write(str(tmp_path), model, "float32")
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  config = json.loads((tmp_path / "config.json").read_text())
  tokens = np.random.default_rng(0).integers(0, 128, (1, 16))
  want = reference(parts, tensors, config, tokens[0])
  np.testing.assert_allclose(
    logits(model, tokens)[0], want, atol=5e-6 * np.abs(want).max(), rtol=0
  )
  again = unilm.read(str(tmp_path))
  assert again.config == model.config
  jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_inward_and_outward_is_exact(make_model, tmp_path):
  unilm.write(str(tmp_path / "a"), make_model("diff"), "bfloat16")
  unilm.write(str(tmp_path / "b"), unilm.read(str(tmp_path / "a")), "bfloat16")
  for name in (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
  ):
    assert (tmp_path / "a" / name).read_bytes() == (
      tmp_path / "b" / name
    ).read_bytes(), name
