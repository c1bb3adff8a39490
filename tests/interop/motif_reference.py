"""Motif-2.6B and Motif-2-12.7B in float64 NumPy, independent of diffjax.

Written from the formulas of the MLX port, as a loop over the heads that reach
the residual stream, with values of width 2D. golden/make_motif.py has a second
transcription, in PyTorch and from vLLM's code, and compares the two.

Tensors have their names and shapes in the checkpoints: [outputs, inputs]. T is
the number of tokens, E the model width and D the head dimension.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]

# A constant of the model's code, not a field of config.json.
POLY_NORM_EPS = 1e-6


def lambda_init(layer: int) -> float:
  """Returns λ_init of a layer, counted from 0.

  The schedule is the paper's for the layer before. Layer 0 has −0.0099.
  """
  return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


def rms_norm(x: np.ndarray, gain: np.ndarray | float, eps: float) -> np.ndarray:
  """Returns x divided by its root mean square, times the gain."""
  mean_square = np.mean(x**2, axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + eps) * gain


def poly_norm(
  x: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> np.ndarray:
  """Returns the activation, a polynomial of x with normalized powers."""
  cubic = rms_norm(x**3, 1.0, POLY_NORM_EPS)
  quadratic = rms_norm(x**2, 1.0, POLY_NORM_EPS)
  linear_term = rms_norm(x, 1.0, POLY_NORM_EPS)
  return (
    weight[0] * cubic + weight[1] * quadratic + weight[2] * linear_term + bias
  )


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
  """Returns x [T, D] after RoPE. Dimensions j and j + D/2 are a pair."""
  num_tokens, dim = x.shape
  half = dim // 2
  frequencies = theta ** (-np.arange(half) / half)
  angles = np.arange(num_tokens)[:, None] * frequencies
  low = x[:, :half]
  high = x[:, half:]
  new_low = low * np.cos(angles) - high * np.sin(angles)
  new_high = high * np.cos(angles) + low * np.sin(angles)
  return np.concatenate([new_low, new_high], axis=1)


def attention_map(q: np.ndarray, k: np.ndarray) -> np.ndarray:
  """Returns the causal softmax of q kᵀ / √D, of shape [T, T]."""
  is_visible = np.tri(len(q), dtype=bool)
  scores = np.where(is_visible, q @ k.T / math.sqrt(q.shape[1]), -np.inf)
  weights = np.exp(scores - scores.max(axis=1, keepdims=True))
  return weights / weights.sum(axis=1, keepdims=True)


def linear(x: np.ndarray, tensors: Tensors, name: str) -> np.ndarray:
  """Returns the projection of x, with a bias if there is one."""
  return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def project_heads(
  x: np.ndarray, tensors: Tensors, name: str, head_dim: int
) -> list[np.ndarray]:
  """Returns the projection of x as a list of heads, each [T, D]."""
  projected = linear(x, tensors, name)
  return np.split(projected, projected.shape[1] // head_dim, axis=1)


def attention(
  config: Mapping[str, Any], tensors: Tensors, layer: int, x: np.ndarray
) -> np.ndarray:
  """Returns the output of a layer's attention, of shape [T, E].

  Args:
    config: the config.json.
    tensors: the tensors of the model.
    layer: the number of the layer, from 0.
    x: the input, after the norm before it, of shape [T, E].
  """
  name = f"model.layers.{layer}.self_attn"
  num_heads = config["num_attention_heads"]
  num_groups = config.get("num_noise_heads") or num_heads // 2
  num_kv_pairs = config["num_key_value_heads"] // 2
  # A group has its signal heads, then its noise head.
  group_size = num_heads // num_groups
  groups_per_pair = num_groups // num_kv_pairs
  head_dim = config.get("head_dim") or config["hidden_size"] // num_heads

  theta = config["rope_theta"]
  query_heads = project_heads(x, tensors, f"{name}.q_proj", head_dim)
  key_heads = project_heads(x, tensors, f"{name}.k_proj", head_dim)
  q = [rotate(head, theta) for head in query_heads]
  k = [rotate(head, theta) for head in key_heads]
  v = project_heads(x, tensors, f"{name}.v_proj", head_dim)

  signal_dot = tensors[f"{name}.lambda_q1"] @ tensors[f"{name}.lambda_k1"]
  noise_dot = tensors[f"{name}.lambda_q2"] @ tensors[f"{name}.lambda_k2"]
  lambda_ = np.exp(signal_dot) - np.exp(noise_dot) + lambda_init(layer)
  head_gain = tensors[f"{name}.subln.weight"]

  outputs = []
  for group in range(num_groups):
    first_head = group * group_size
    noise_head = first_head + group_size - 1
    pair = group // groups_per_pair
    signal_key = k[2 * pair]
    noise_key = k[2 * pair + 1]
    values = np.concatenate([v[2 * pair], v[2 * pair + 1]], axis=1)
    noise = attention_map(q[noise_head], noise_key) @ values
    for head in range(first_head, noise_head):
      signal = attention_map(q[head], signal_key) @ values
      difference = signal - lambda_ * noise
      normed = rms_norm(difference, head_gain, config["attn_rms_norm_eps"])
      outputs.append(normed * (1 - lambda_init(layer)))
  return linear(np.concatenate(outputs, axis=1), tensors, f"{name}.o_proj")


def feed_forward(tensors: Tensors, layer: int, x: np.ndarray) -> np.ndarray:
  """Returns the output of a layer's feed-forward network, of shape [T, E]."""
  name = f"model.layers.{layer}.mlp"
  gate = poly_norm(
    linear(x, tensors, f"{name}.gate_proj"),
    tensors[f"{name}.act_fn.weight"],
    tensors[f"{name}.act_fn.bias"],
  )
  up = linear(x, tensors, f"{name}.up_proj")
  return linear(gate * up, tensors, f"{name}.down_proj")


def logits(
  config: Mapping[str, Any], tensors: Tensors, ids: np.ndarray
) -> np.ndarray:
  """Returns the logits [T, vocabulary] of one row of tokens [T]."""
  exact = {}
  for name, tensor in tensors.items():
    exact[name] = np.asarray(tensor, np.float64)
  eps = config["rms_norm_eps"]

  x = exact["model.embed_tokens.weight"][ids]
  for layer in range(config["num_hidden_layers"]):
    name = f"model.layers.{layer}"
    normed = rms_norm(x, exact[f"{name}.input_layernorm.weight"], eps)
    x = x + attention(config, exact, layer, normed)
    normed = rms_norm(x, exact[f"{name}.post_attention_layernorm.weight"], eps)
    x = x + feed_forward(exact, layer, normed)
  hidden = rms_norm(x, exact["model.norm.weight"], eps)

  if config["tie_word_embeddings"]:
    unembedding = exact["model.embed_tokens.weight"]
  else:
    unembedding = exact["lm_head.weight"]
  return hidden @ unembedding.T
