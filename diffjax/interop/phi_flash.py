"""The attention layers of Phi-4-mini-flash-reasoning: DIFF V1 without RoPE.

Sources: `FlashDiffAttention` in lit_gpt/diff_attn.py of microsoft/ArchScale for
the computation, and `Phi4FlashForCausalLM` in
vllm/model_executor/models/phi4flash.py of vLLM for the checkpoint.

Layout: a directory with config.json and safetensors files. Layers are counted
from 0. L is their number. The odd layers have attention:

  1, 3, …, L/2 − 1    a window of sliding_window keys
  L/2 + 1             no window
  L/2 + 3, …, L − 1   no keys and values of its own; reads layer L/2 + 1's

The tensors of a layer, with {} for its number, and the axes of
diffjax/parameters.py. E is 2HD:

  model.layers.{}.attn.Wqkv.weight                        [R, E]
  model.layers.{}.attn.Wqkv.bias                          [R]
  model.layers.{}.attn.out_proj.weight                    [E, 2HD]
  model.layers.{}.attn.out_proj.bias                      [E]
  model.layers.{}.attn.inner_cross_attn.lambda_{q1,k1,q2,k2}  [D]
  model.layers.{}.attn.inner_cross_attn.subln.weight      [2D]    head norm

- The R rows of Wqkv are 2HD rows for queries, 2KD for keys and 2KD for values.
  Above layer L/2 + 1, they are the 2HD rows for queries only.
- Query heads 2i and 2i + 1 are the signal and the noise of head i. Key heads 2i
  and 2i + 1 belong to key/value head i, and value heads 2i and 2i + 1 are the
  halves of its values.
- In config.json, num_attention_heads is 2H and num_key_value_heads is 2K.
- λ_init is `lambda_init_schedule(layer)`, where layers without attention count
  too.

Rotary rows: the layers have no RoPE, so no row is moved.

Not supported:
- whole models, because the even layers (Mamba-1 and gated memory) are not in
  diffjax. So this is no layout of `diffjax.convert`.
- mb_per_layer ≠ 2, which is another order of layers.

layer_types is not read: the number of a layer determines its window.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping

import einops
import numpy as np

from diffjax.config import UserError
from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory
from diffjax.interop.layout import Entry, rearrange, shape_of
from diffjax.model.attention import DiffAttention

_QKV_WEIGHT = "model.layers.{}.attn.Wqkv.weight"
_QKV_BIAS = "model.layers.{}.attn.Wqkv.bias"

# The parameters whose rows are stacked in Wqkv, in this order, and their axes
# after the first one, the model width E. A bias has only these axes.
_QKV_AXES = {"query": "Q G D", "key": "K M D", "value": "K V"}

_ENTRIES = (
  Entry("out", "model.layers.{}.attn.out_proj.weight", "H V E = E (H V)"),
  Entry("out_bias", "model.layers.{}.attn.out_proj.bias", "E = E"),
  Entry(
    "lambda_q1", "model.layers.{}.attn.inner_cross_attn.lambda_q1", "D = D"
  ),
  Entry(
    "lambda_k1", "model.layers.{}.attn.inner_cross_attn.lambda_k1", "D = D"
  ),
  Entry(
    "lambda_q2", "model.layers.{}.attn.inner_cross_attn.lambda_q2", "D = D"
  ),
  Entry(
    "lambda_k2", "model.layers.{}.attn.inner_cross_attn.lambda_k2", "D = D"
  ),
  Entry(
    "head_gain", "model.layers.{}.attn.inner_cross_attn.subln.weight", "V = V"
  ),
)

# ε of the head norm, a constant in the authors' code. Other norms have the ε of
# config.json, layer_norm_eps.
_HEAD_NORM_EPS = 1e-5

# Fields of config.json that are read here, or do not change the attention.
_KNOWN_FIELDS = (
  "embd_pdrop",
  "layer_norm_eps",
  "layer_types",
  "lm_head_bias",
  "mamba_conv_bias",
  "mamba_d_conv",
  "mamba_d_state",
  "mamba_dt_rank",
  "mamba_expand",
  "mamba_proj_bias",
  "mb_per_layer",
  "mlp_bias",
  "resid_pdrop",
  "sliding_window",
)


def read_attention(
  path: str, layer: int
) -> tuple[DiffAttention, dict[str, np.ndarray]]:
  """Returns the attention of one layer of a checkpoint, and its parameters.

  Args:
    path: The directory of the checkpoint.
    layer: The number of the layer among all layers of the model, from 0.

  The layers in the upper half of the model share the keys and values of layer
  num_layers / 2 + 1. The later ones have no projections of their own: call
  their modules with these keys and values as `keys_values`.

  Returns:
    The module, and its parameters in float32. Call the module with
    lambda_init_schedule(layer) as λ_init.

  Raises:
    UserError: if the layer has no attention, the directory is damaged, or it
      holds another model.
  """
  directory = pathlib.Path(path)
  stored_config = hugging_face.read_config_json(
    directory, (hugging_face.PHI_FLASH,), _KNOWN_FIELDS
  )
  stored_config.check_values({"mb_per_layer": 2})
  num_layers = stored_config.get_integer("num_hidden_layers", multiple_of=4)
  # Even layers are Mamba-1 or gated memory.
  if layer not in range(1, num_layers, 2):
    raise UserError(
      f"layer {layer} of {stored_config.path} has no attention; pass an odd"
      f" number from 1 to {num_layers - 1}"
    )
  # The layers of the lower half have a window. Layer num_layers / 2 + 1 is the
  # last one with keys and values. All later layers read these.
  has_window = layer < num_layers // 2
  has_keys_values = layer <= num_layers // 2 + 1

  attention = _make_attention(stored_config, has_window)
  sizes = attention.axis_sizes(stored_config.get_integer("hidden_size"))
  tensors = SafetensorsDirectory(directory)
  params = {
    **_read_qkv(tensors, layer, sizes, has_keys_values),
    **_read_entries(tensors, layer, sizes),
  }
  return attention, params


def tensors_of(
  params: Mapping[str, np.ndarray], layer: int
) -> dict[str, np.ndarray]:
  """Returns the tensors of a layer, given its parameters.

  This is the inverse of `read_attention`. No value is changed.

  Args:
    params: The parameters of a layer, with or without keys and values.
    layer: The number of the layer, for the names of the tensors.

  Returns:
    The tensors by name, such as "model.layers.1.attn.Wqkv.weight".
  """
  tensors = _stack_qkv(params, layer)
  for entry in _ENTRIES:
    # For example, "H V E -> E (H V)".
    pattern = f"{entry.param_axes} -> {entry.tensor_axes}"
    param = np.asarray(params[entry.param])
    tensors[entry.tensor.format(layer)] = einops.rearrange(param, pattern)

  # safetensors needs arrays in C order.
  for name, tensor in tensors.items():
    tensors[name] = np.ascontiguousarray(tensor)
  return tensors


def _stack_qkv(
  params: Mapping[str, np.ndarray], layer: int
) -> dict[str, np.ndarray]:
  """Returns Wqkv and its bias by name, the inverse of `_read_qkv`."""
  weights = []
  biases = []
  for name in _QKV_AXES:
    # Late layers have no keys and values.
    if name not in params:
      continue
    # [model width, heads, …] becomes [all head values, model width].
    weight = np.asarray(params[name])
    embed_dim = weight.shape[0]
    weights.append(weight.reshape(embed_dim, -1).T)
    biases.append(np.ravel(params[f"{name}_bias"]))
  return {
    _QKV_WEIGHT.format(layer): np.concatenate(weights),
    _QKV_BIAS.format(layer): np.concatenate(biases),
  }


def _make_attention(
  stored_config: hugging_face.StoredConfig, has_window: bool
) -> DiffAttention:
  """Returns the attention module of a layer.

  Args:
    stored_config: The config.json. It counts the signal map and the noise map
      of a head as two heads.
    has_window: Whether the layer has a sliding window.
  """
  stored_kv_heads = stored_config.get_integer(
    "num_key_value_heads", multiple_of=2
  )
  stored_heads = stored_config.get_integer(
    "num_attention_heads", multiple_of=stored_kv_heads
  )
  embed_dim = stored_config.get_integer("hidden_size", multiple_of=stored_heads)
  window = None
  if has_window:
    window = stored_config.get_integer("sliding_window")
  return DiffAttention(
    num_heads=stored_heads // 2,
    num_kv_heads=stored_kv_heads // 2,
    head_dim=embed_dim // stored_heads,
    window=window,
    rope=False,
    projection_biases=True,
    norm_eps=_HEAD_NORM_EPS,
  )


def _read_qkv(
  tensors: SafetensorsDirectory,
  layer: int,
  sizes: Mapping[str, int],
  has_keys_values: bool,
) -> dict[str, np.ndarray]:
  """Returns the projections that are stacked in Wqkv, and their biases.

  Args:
    tensors: The tensors of the checkpoint.
    layer: The number of the layer.
    sizes: The sizes of the axes by letter.
    has_keys_values: Whether Wqkv has rows for keys and values.
  """
  embed_dim = sizes["E"]
  # The shape of each parameter without its first axis, the model width.
  shapes = {}
  for name, axes in _QKV_AXES.items():
    if name == "query" or has_keys_values:
      shapes[name] = shape_of(axes, sizes)
  num_rows = sum(math.prod(shape) for shape in shapes.values())
  weight = _read_tensor(
    tensors, _QKV_WEIGHT.format(layer), (num_rows, embed_dim)
  )
  bias = _read_tensor(tensors, _QKV_BIAS.format(layer), (num_rows,))

  params = {}
  start = 0
  for name, shape in shapes.items():
    end = start + math.prod(shape)
    # Wqkv is [rows, model width], and diffjax has the model width first.
    params[name] = weight[start:end].T.reshape(embed_dim, *shape)
    params[f"{name}_bias"] = bias[start:end].reshape(shape)
    start = end
  return params


def _read_entries(
  tensors: SafetensorsDirectory, layer: int, sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
  """Returns the parameters of a layer that are not stacked in Wqkv.

  Args:
    tensors: The tensors of the checkpoint.
    layer: The number of the layer.
    sizes: The sizes of the axes by letter.
  """
  params = {}
  for entry in _ENTRIES:
    name = entry.tensor.format(layer)
    shape = shape_of(entry.tensor_axes, sizes)
    tensor = _read_tensor(tensors, name, shape)
    params[entry.param] = rearrange(
      tensor, entry.tensor_axes, entry.param_axes, sizes
    )
  return params


def _read_tensor(
  tensors: SafetensorsDirectory, name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """Reads a tensor that must have this name and shape.

  Raises:
    UserError: if the tensor is missing or has another shape.
  """
  stored_shapes = tensors.shapes()
  if name not in stored_shapes:
    raise UserError(
      f"{tensors} has no tensor {name}; for its config.json it must be"
      f" {list(shape)}"
    )
  if stored_shapes[name] != shape:
    raise UserError(
      f"{tensors} has {name} of shape {list(stored_shapes[name])}; for its"
      f" config.json it must be {list(shape)}"
    )
  return tensors.read(name)
