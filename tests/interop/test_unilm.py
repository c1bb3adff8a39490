"""The authors' layers: models are written in their layout, and read again."""

import json
import math
import pathlib
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy

from diffjax.interop import unilm
from diffjax.model.attention import (
  DiffAttention,
  DiffAttentionV2,
  lambda_init_schedule,
)
from tests.harness import ROOT
from tests.harness.tolerances import assert_close_in_norm
from tests.interop import transformer_reference as parts
from tests.interop.small_models import make_model, model_logits, read_tensors

Tensors = dict[str, np.ndarray]

# Single layers with the outputs of the authors' code.
GOLDEN = ROOT / "tests/model/golden"


class GoldenLayer(NamedTuple):
  """The tensors of a layer of the authors' code, an input x and its output y.

  x and y have the shape [rows, tokens, width].
  """

  tensors: Tensors
  x: np.ndarray
  y: np.ndarray


def load_golden_layer(name: str) -> GoldenLayer:
  """Returns a layer from the golden files of the model's tests."""
  tensors = {}
  with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as data:
    for key, value in data.items():
      group, _, tensor_name = key.partition("/")
      if group == "param":
        tensors[tensor_name] = value.astype(np.float32)
    return GoldenLayer(tensors, data["x"].astype(np.float32), data["y"])


def replace_attention(
  directory: pathlib.Path, layer: int, golden_tensors: Tensors
) -> None:
  """Replaces all tensors of a layer's attention in a written model.

  Args:
    directory: the directory of the model.
    layer: the number of the layer.
    golden_tensors: the new tensors, by their name in the authors' layer.
  """
  tensors = read_tensors(directory)
  prefix = f"layers.{layer}.self_attn."
  attention_names = {name for name in tensors if name.startswith(prefix)}
  assert attention_names == {prefix + name for name in golden_tensors}
  for name, tensor in golden_tensors.items():
    assert tensors[prefix + name].shape == tensor.shape
    tensors[prefix + name] = tensor
  safetensors.numpy.save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
  ("name", "variant", "attention", "layer"),
  [
    (
      "v1_mha_depth0",
      "diff",
      DiffAttention(num_heads=2, num_kv_heads=2, head_dim=16),
      0,
    ),
    (
      "v1_gqa_depth5",
      "diff",
      DiffAttention(num_heads=4, num_kv_heads=2, head_dim=8),
      5,
    ),
    (
      "v2_gqa",
      "diff_v2",
      DiffAttentionV2(num_heads=4, num_kv_heads=2, head_dim=16),
      0,
    ),
  ],
  ids=["v1_mha_depth0", "v1_gqa_depth5", "v2_gqa"],
)
def test_a_layer_with_golden_tensors_computes_the_golden_output(
  name, variant, attention, layer, tmp_path
):
  """The authors' code has computed the golden output from these tensors.

  They replace the last layer's tensors in a written model, which is then read.
  """
  golden = load_golden_layer(name)
  random_model = make_model(
    variant,
    num_layers=layer + 1,
    embed_dim=golden.x.shape[-1],
    num_heads=attention.num_heads,
    num_kv_heads=attention.num_kv_heads,
    head_dim=attention.head_dim,
    rope_base=attention.rope_base,
  )
  unilm.write(str(tmp_path), random_model, "float32")
  replace_attention(tmp_path, layer, golden.tensors)

  model = unilm.read(str(tmp_path))

  params = {}
  for key, all_layers in model.params["layers"]["attention"].items():
    params[key] = all_layers[layer]
  apply = jax.jit(attention.apply)
  output = apply({"params": params}, golden.x, lambda_init_schedule(layer))
  assert_close_in_norm(output, golden.y, tolerance=2e-6)


# Whole models, against the description of the layout.


def v1_head(
  tensors: Tensors,
  prefix: str,
  layer: int,
  q: np.ndarray,
  k: np.ndarray,
  v: np.ndarray,
) -> np.ndarray:
  """Returns the output of one head of the authors' V1 layer, in float64.

  Args:
    tensors: the tensors of the model.
    prefix: the beginning of the names of the attention's tensors.
    layer: the number of the layer.
    q: the head's queries of shape [tokens, 2, D].
    k: its keys, of the same shape.
    v: its values of shape [tokens, 2D].
  """
  lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
  signal_dot = tensors[f"{prefix}lambda_q1"] @ tensors[f"{prefix}lambda_k1"]
  noise_dot = tensors[f"{prefix}lambda_q2"] @ tensors[f"{prefix}lambda_k2"]
  lambda_ = math.exp(signal_dot) - math.exp(noise_dot) + lambda_init
  signal = parts.attend(q[:, 0], k[:, 0], v)
  noise = parts.attend(q[:, 1], k[:, 1], v)
  gain = tensors[f"{prefix}subln.weight"]
  normed = parts.rms_norm(signal - lambda_ * noise, gain, 1e-5)
  return (1 - lambda_init) * normed


def v2_head(
  x: np.ndarray,
  lambda_projection: np.ndarray,
  q: np.ndarray,
  k: np.ndarray,
  v: np.ndarray,
) -> np.ndarray:
  """Returns the output of one head of the authors' V2 layer, in float64.

  Args:
    x: the input of the layer, of shape [tokens, width].
    lambda_projection: the head's row of the projection to λ, [width].
    q: the head's queries of shape [tokens, 2, D].
    k: its keys of shape [tokens, D].
    v: its values of shape [tokens, D].
  """
  lambda_ = 1 / (1 + np.exp(-x @ lambda_projection))
  signal = parts.attend(q[:, 0], k, v)
  noise = parts.attend(q[:, 1], k, v)
  return signal - lambda_[:, None] * noise


def reference_attention(
  tensors: Tensors, config: dict[str, Any], layer: int, x: np.ndarray
) -> np.ndarray:
  """Returns the output of a layer's attention, in float64."""
  prefix = f"layers.{layer}.self_attn."
  num_heads = config["num_heads"]
  num_kv_heads = config["num_kv_heads"]
  head_dim = config["head_dim"]
  theta = config["rope_theta"]
  is_v1 = config["diff_version"] == 1
  num_tokens = len(x)

  q = x @ tensors[f"{prefix}q_proj.weight"].T
  k = x @ tensors[f"{prefix}k_proj.weight"].T
  v = x @ tensors[f"{prefix}v_proj.weight"].T
  q = parts.rotate(q.reshape(num_tokens, -1, head_dim), theta, interleaved=True)
  k = parts.rotate(k.reshape(num_tokens, -1, head_dim), theta, interleaved=True)
  v = v.reshape(num_tokens, num_kv_heads, -1)

  heads = []
  for head in range(num_heads):
    kv_head = head // (num_heads // num_kv_heads)
    head_q = q[:, 2 * head : 2 * head + 2]
    if is_v1:
      head_k = k[:, 2 * kv_head : 2 * kv_head + 2]
      output = v1_head(tensors, prefix, layer, head_q, head_k, v[:, kv_head])
    else:
      projection = tensors[f"{prefix}lambda_proj.weight"][head]
      output = v2_head(x, projection, head_q, k[:, kv_head], v[:, kv_head])
    heads.append(output)
  out_name = "out_proj" if is_v1 else "o_proj"
  out = tensors[f"{prefix}{out_name}.weight"]
  return np.concatenate(heads, axis=-1) @ out.T


def reference_logits(
  tensors: Tensors, config: dict[str, Any], ids: np.ndarray
) -> np.ndarray:
  """Returns the logits of one row, as the layout's description defines them.

  Args:
    tensors: the written tensors.
    config: the written config.json.
    ids: token ids of shape [tokens].
  """
  exact = {name: value.astype(np.float64) for name, value in tensors.items()}
  eps = config["norm_eps"]
  x = exact["embed_tokens.weight"][ids]
  for layer in range(config["n_layers"]):
    prefix = f"layers.{layer}."
    gain = exact[f"{prefix}self_attn_layer_norm.weight"]
    normed = parts.rms_norm(x, gain, eps)
    x = x + reference_attention(exact, config, layer, normed)
    gain = exact[f"{prefix}final_layer_norm.weight"]
    x = x + parts.swiglu(
      parts.rms_norm(x, gain, eps),
      exact[f"{prefix}ffn.fc1.weight"],
      exact[f"{prefix}ffn.gate.weight"],
      exact[f"{prefix}ffn.fc2.weight"],
    )
  hidden = parts.rms_norm(x, exact["layer_norm.weight"], eps)
  if config["share_input_output_embed"]:
    return hidden @ exact["embed_tokens.weight"].T
  return hidden @ exact["output_projection.weight"].T


@pytest.mark.parametrize(
  ("attention", "is_tied"), [("diff", True), ("diff_v2", False)]
)
def test_a_written_model_has_the_same_logits_by_the_reference(
  attention, is_tied, tmp_path
):
  """The reference computes the logits in NumPy, from the written files."""
  model = make_model(attention, tie_embeddings=is_tied)
  token_ids = np.random.default_rng(0).integers(0, 128, size=16)

  unilm.write(str(tmp_path), model, "float32")

  config = json.loads((tmp_path / "config.json").read_text())
  expected = reference_logits(read_tensors(tmp_path), config, token_ids)
  logits = model_logits(model, token_ids[None])[0]
  atol = 5e-6 * np.abs(expected).max()
  chex.assert_trees_all_close(logits, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("attention", ["diff", "diff_v2"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_model_that_is_written_and_read_is_the_same(
  attention, is_tied, tmp_path
):
  """With tied embeddings, the embedding is also the output projection."""
  model = make_model(attention, tie_embeddings=is_tied)

  unilm.write(str(tmp_path), model, "float32")

  read = unilm.read(str(tmp_path))
  assert read.config == model.config
  chex.assert_trees_all_equal(read.params, model.params)


@pytest.mark.parametrize(
  "file_name",
  [
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
  ],
)
def test_a_model_that_is_read_and_written_again_has_the_same_file(
  file_name, tmp_path
):
  """Files of a model that was read and not changed are equal in every byte."""
  first = tmp_path / "first"
  second = tmp_path / "second"
  unilm.write(str(first), make_model("diff"), "bfloat16")

  model = unilm.read(str(first))
  unilm.write(str(second), model, "bfloat16")

  expected = (first / file_name).read_bytes()
  assert (second / file_name).read_bytes() == expected
