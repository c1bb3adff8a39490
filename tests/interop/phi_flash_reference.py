"""The attention half of Phi-4-mini-flash-reasoning in float64 NumPy, head by head, independent of diffjax.

Written from the formulas of TensorRT-LLM's port (auto_deploy/models/custom/modeling_phi4flash.py): one loop over pairs of heads, values 2D
wide. golden/make_phi_flash.py runs the authors' own code, and compares the two. Tensors have their names and shapes in the checkpoint
([out, in]).
"""

import math

import numpy as np

HEAD_NORM_EPS = 1e-5  # no field of config.json changes it


def kind(config, layer):
  """What stands in the attention's place in a layer."""
  half = config["num_hidden_layers"] // 2
  if layer % config["mb_per_layer"] == 0:
    return "mamba" if layer <= half else "gated memory"
  if layer < half:
    return "windowed"
  return "full" if layer == half + 1 else "cross"


def lambda_init(layer):
  return 0.8 - 0.6 * math.exp(-0.3 * layer)


def linear(x, tensors, name):
  return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def layer_norm(x, tensors, name, eps):
  x = x - x.mean(axis=-1, keepdims=True)
  return (
    x
    / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    * tensors[f"{name}.weight"]
    + tensors[f"{name}.bias"]
  )


def attention_map(q, k, window):
  """softmax of q kᵀ / √D [T, T] over a token's last `window` keys, its own among them."""
  distance = np.subtract.outer(np.arange(len(q)), np.arange(len(k)))
  scores = np.where(
    (distance >= 0) & (distance < (window or math.inf)),
    q @ k.T / math.sqrt(q.shape[1]),
    -np.inf,
  )
  weights = np.exp(scores - scores.max(axis=1, keepdims=True))
  return weights / weights.sum(axis=1, keepdims=True)


def attention(config, tensors, layer, x, shared=None):
  """Output of a layer's attention [T, E] for its input x [T, E] behind the norm, and its heads of keys and values.

  Args:
    config: config.json.
    tensors: of the checkpoint, in float64.
    layer: the layer's number.
    x: the input.
    shared: heads of keys and values of the full layer, for a cross layer.
  """
  name = f"model.layers.{layer}.attn"
  get = lambda part: tensors[f"{name}.inner_cross_attn.{part}"]
  num_heads, num_kv_heads = (
    config["num_attention_heads"],
    config["num_key_value_heads"],
  )
  dim = config["hidden_size"] // num_heads
  heads = np.split(
    linear(x, tensors, f"{name}.Wqkv"),
    tensors[f"{name}.Wqkv.weight"].shape[0] // dim,
    axis=1,
  )
  q, k, v = (
    heads[:num_heads],
    heads[num_heads : num_heads + num_kv_heads],
    heads[num_heads + num_kv_heads :],
  )
  if kind(config, layer) == "cross":
    k, v = shared
  window = (
    config["sliding_window"] if kind(config, layer) == "windowed" else None
  )
  init = lambda_init(layer)
  lam = (
    np.exp(get("lambda_q1") @ get("lambda_k1"))
    - np.exp(get("lambda_q2") @ get("lambda_k2"))
    + init
  )
  outputs = []
  for pair in range(num_heads // 2):
    of = 2 * (
      pair // (num_heads // num_kv_heads)
    )  # the first of its two heads of keys and values
    values = np.concatenate([v[of], v[of + 1]], axis=1)
    out = (
      attention_map(q[2 * pair], k[of], window) @ values
      - lam * attention_map(q[2 * pair + 1], k[of + 1], window) @ values
    )
    out = (
      out
      / np.sqrt((out**2).mean(axis=1, keepdims=True) + HEAD_NORM_EPS)
      * get("subln.weight")
    )
    outputs.append(out * (1 - init))
  return linear(np.concatenate(outputs, axis=1), tensors, f"{name}.out_proj"), (
    k,
    v,
  )


def block(config, tensors, layer, x, shared=None):
  """Output of a whole layer [T, E], of its attention, and its heads of keys and values."""
  name, eps = f"model.layers.{layer}", config["layer_norm_eps"]
  attended, shared = attention(
    config,
    tensors,
    layer,
    layer_norm(x, tensors, f"{name}.input_layernorm", eps),
    shared,
  )
  x = x + attended
  gate, up = np.split(
    linear(
      layer_norm(x, tensors, f"{name}.post_attention_layernorm", eps),
      tensors,
      f"{name}.mlp.fc1",
    ),
    2,
    axis=1,
  )
  return (
    x + linear(gate / (1 + np.exp(-gate)) * up, tensors, f"{name}.mlp.fc2"),
    attended,
    shared,
  )
