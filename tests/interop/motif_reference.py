"""Motif-2.6B and Motif-2-12.7B in float64 NumPy, head by head, independent of diffjax.

Written from the MLX port's formulas: one loop over the heads that reach the residual stream, values 2D wide. golden/make_motif.py holds a
second transcription, in PyTorch and from vLLM's code, and compares the two. Tensors have their names and shapes in the checkpoints
([out, in]).
"""

import math

import numpy as np

POLY_NORM_EPS = 1e-6  # no field of config.json changes it


def lambda_init(layer):
  """Layers count from 0, and the schedule is that of the layer before: layer 0 has −0.0099."""
  return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


def rms_norm(x, gain, eps):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain


def poly_norm(x, weight, bias):
  n = lambda z: rms_norm(z, 1.0, POLY_NORM_EPS)
  return weight[0] * n(x**3) + weight[1] * n(x**2) + weight[2] * n(x) + bias


def rotate(x, theta):
  """x [T, D] at positions 0, 1, …; dimension j turns with j + D/2."""
  half = x.shape[1] // 2
  angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
  low, high = x[:, :half], x[:, half:]
  return np.concatenate(
    [
      low * np.cos(angles) - high * np.sin(angles),
      high * np.cos(angles) + low * np.sin(angles),
    ],
    axis=1,
  )


def attention_map(q, k):
  """Causal softmax of q kᵀ / √D [T, T]."""
  scores = np.where(
    np.tri(len(q), dtype=bool), q @ k.T / math.sqrt(q.shape[1]), -np.inf
  )
  weights = np.exp(scores - scores.max(axis=1, keepdims=True))
  return weights / weights.sum(axis=1, keepdims=True)


def linear(x, tensors, name):
  return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def attention(config, tensors, layer, x):
  """Output of a layer's self_attn [T, E] for its input x [T, E] (after the norm before it)."""
  name = f"model.layers.{layer}.self_attn"
  get = lambda part: tensors[f"{name}.{part}"]
  num_heads = config["num_attention_heads"]
  num_groups = config.get("num_noise_heads") or num_heads // 2
  num_pairs = config["num_key_value_heads"] // 2
  size = (
    num_heads // num_groups
  )  # query heads of a group: signal heads, then the noise head
  dim = config.get("head_dim") or config["hidden_size"] // num_heads
  heads = lambda part: np.split(
    linear(x, tensors, f"{name}.{part}"),
    np.arange(dim, tensors[f"{name}.{part}.weight"].shape[0], dim),
    axis=1,
  )
  q = [rotate(head, config["rope_theta"]) for head in heads("q_proj")]
  k = [rotate(head, config["rope_theta"]) for head in heads("k_proj")]
  v = heads("v_proj")
  init = lambda_init(layer)
  lam = (
    np.exp(get("lambda_q1") @ get("lambda_k1"))
    - np.exp(get("lambda_q2") @ get("lambda_k2"))
    + init
  )
  outputs = []
  for group in range(num_groups):
    pair = group // (num_groups // num_pairs)
    values = np.concatenate([v[2 * pair], v[2 * pair + 1]], axis=1)
    noise = attention_map(q[group * size + size - 1], k[2 * pair + 1]) @ values
    for signal in range(size - 1):
      out = (
        attention_map(q[group * size + signal], k[2 * pair]) @ values
        - lam * noise
      )
      outputs.append(
        rms_norm(out, get("subln.weight"), config["attn_rms_norm_eps"])
        * (1 - init)
      )
  return linear(np.concatenate(outputs, axis=1), tensors, f"{name}.o_proj")


def logits(config, tensors, ids):
  """Logits [T, N] of one row of tokens [T]."""
  tensors = {
    name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()
  }
  norm = lambda x, name: rms_norm(
    x, tensors[f"{name}.weight"], config["rms_norm_eps"]
  )
  x = tensors["model.embed_tokens.weight"][ids]
  for layer in range(config["num_hidden_layers"]):
    name = f"model.layers.{layer}"
    x = x + attention(
      config, tensors, layer, norm(x, f"{name}.input_layernorm")
    )
    inner = norm(x, f"{name}.post_attention_layernorm")
    gate = poly_norm(
      linear(inner, tensors, f"{name}.mlp.gate_proj"),
      *(tensors[f"{name}.mlp.act_fn.{part}"] for part in ("weight", "bias")),
    )
    x = x + linear(
      gate * linear(inner, tensors, f"{name}.mlp.up_proj"),
      tensors,
      f"{name}.mlp.down_proj",
    )
  unembedding = (
    "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
  )
  return norm(x, "model.norm") @ tensors[f"{unembedding}.weight"].T
