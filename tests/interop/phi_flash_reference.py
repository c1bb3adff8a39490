"""Phi-4-mini-flash-reasoning's attention layers in float64 NumPy.

They are independent of diffjax. Written from the formulas of TensorRT-LLM's
port (auto_deploy/models/custom/modeling_phi4flash.py), as a loop over pairs of
heads, with values of width 2D. golden/make_phi_flash.py runs the authors' own
code, and compares the two.

Tensors have their names and shapes in the checkpoint: [outputs, inputs]. T is
the number of tokens, E the model width and D the head dimension.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Config = Mapping[str, Any]
Tensors = Mapping[str, np.ndarray]

# A constant of the model's code, not a field of config.json.
HEAD_NORM_EPS = 1e-5


class KeysValues(NamedTuple):
  """The keys and values of a layer.

  Attributes:
    keys: a list of heads, each [T, D].
    values: a list of heads, each [T, D].
  """

  keys: list[np.ndarray]
  values: list[np.ndarray]


class BlockOutputs(NamedTuple):
  """What a layer computes.

  Attributes:
    output: the output of the whole layer, [T, E].
    attention: the output of its attention, [T, E].
    keys_values: the keys and values that its attention reads.
  """

  output: np.ndarray
  attention: np.ndarray
  keys_values: KeysValues


def layer_kind(config: Config, layer: int) -> str:
  """Returns the kind of a layer, such as "mamba" or "windowed"."""
  half = config["num_hidden_layers"] // 2
  if layer % config["mb_per_layer"] == 0:
    return "mamba" if layer <= half else "gated memory"
  if layer < half:
    return "windowed"
  if layer == half + 1:
    return "full"
  return "cross"


def lambda_init(layer: int) -> float:
  """Returns λ_init of a layer, counted from 0."""
  return 0.8 - 0.6 * math.exp(-0.3 * layer)


def linear(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
  """Returns the projection of x, with a bias if there is one."""
  return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def layer_norm(
  x: np.ndarray, tensors: Tensors, name: str, eps: float
) -> np.ndarray:
  """Returns x with mean 0 and variance 1, times the gain, plus the shift."""
  centered = x - x.mean(axis=-1, keepdims=True)
  variance = (centered**2).mean(axis=-1, keepdims=True)
  normed = centered / np.sqrt(variance + eps)
  return normed * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def attention_map(q: np.ndarray, k: np.ndarray, window: float) -> np.ndarray:
  """Returns the softmax of q kᵀ / √D, of shape [T, T].

  Args:
    q: queries of shape [T, D].
    k: keys of shape [T, D].
    window: how many keys a token sees, its own among them. math.inf for all.
  """
  distance = np.subtract.outer(np.arange(len(q)), np.arange(len(k)))
  is_visible = (distance >= 0) & (distance < window)
  scores = np.where(is_visible, q @ k.T / math.sqrt(q.shape[1]), -np.inf)
  weights = np.exp(scores - scores.max(axis=1, keepdims=True))
  return weights / weights.sum(axis=1, keepdims=True)


def attention(
  config: Config,
  tensors: Tensors,
  layer: int,
  x: np.ndarray,
  shared: KeysValues | None = None,
) -> tuple[np.ndarray, KeysValues]:
  """Returns the output of a layer's attention, and its keys and values.

  Args:
    config: the config.json.
    tensors: the tensors of the checkpoint, in float64.
    layer: the number of the layer, from 0.
    x: the input, after the norm before it, of shape [T, E].
    shared: the keys and values of the full layer, for a cross layer.

  Returns:
    The output of shape [T, E], and the keys and values.
  """
  name = f"model.layers.{layer}.attn"
  num_heads = config["num_attention_heads"]
  num_kv_heads = config["num_key_value_heads"]
  dim = config["hidden_size"] // num_heads
  kind = layer_kind(config, layer)

  projected = linear(x, tensors, f"{name}.Wqkv")
  heads = np.split(projected, projected.shape[1] // dim, axis=1)
  q = heads[:num_heads]
  if kind == "cross":
    keys_values = shared
  else:
    keys_values = KeysValues(
      keys=heads[num_heads : num_heads + num_kv_heads],
      values=heads[num_heads + num_kv_heads :],
    )
  k, v = keys_values
  window = config["sliding_window"] if kind == "windowed" else math.inf

  prefix = f"{name}.inner_cross_attn"
  signal_dot = tensors[f"{prefix}.lambda_q1"] @ tensors[f"{prefix}.lambda_k1"]
  noise_dot = tensors[f"{prefix}.lambda_q2"] @ tensors[f"{prefix}.lambda_k2"]
  lambda_ = np.exp(signal_dot) - np.exp(noise_dot) + lambda_init(layer)
  head_gain = tensors[f"{prefix}.subln.weight"]

  outputs = []
  for pair in range(num_heads // 2):
    # Several pairs of query heads share a pair of key/value heads.
    first = 2 * (pair // (num_heads // num_kv_heads))
    values = np.concatenate([v[first], v[first + 1]], axis=1)
    signal = attention_map(q[2 * pair], k[first], window) @ values
    noise = attention_map(q[2 * pair + 1], k[first + 1], window) @ values
    difference = signal - lambda_ * noise
    mean_square = (difference**2).mean(axis=1, keepdims=True)
    normed = difference / np.sqrt(mean_square + HEAD_NORM_EPS) * head_gain
    outputs.append(normed * (1 - lambda_init(layer)))
  output = linear(np.concatenate(outputs, axis=1), tensors, f"{name}.out_proj")
  return output, keys_values


def block(
  config: Config,
  tensors: Tensors,
  layer: int,
  x: np.ndarray,
  shared: KeysValues | None = None,
) -> BlockOutputs:
  """Returns the outputs of a whole layer.

  Args:
    config: the config.json.
    tensors: the tensors of the checkpoint, in float64.
    layer: the number of the layer, from 0.
    x: the input of shape [T, E].
    shared: the keys and values of the full layer, for a cross layer.
  """
  name = f"model.layers.{layer}"
  eps = config["layer_norm_eps"]

  normed = layer_norm(x, tensors, f"{name}.input_layernorm", eps)
  attended, keys_values = attention(config, tensors, layer, normed, shared)
  x = x + attended

  normed = layer_norm(x, tensors, f"{name}.post_attention_layernorm", eps)
  gate, up = np.split(linear(normed, tensors, f"{name}.mlp.fc1"), 2, axis=1)
  silu = gate / (1 + np.exp(-gate))
  output = x + linear(silu * up, tensors, f"{name}.mlp.fc2")
  return BlockOutputs(output, attended, keys_values)
