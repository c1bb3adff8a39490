"""Makes the golden checkpoint phi_flash_tiny.

It has random weights of the attention layers of a small
Phi-4-mini-flash-reasoning. Layers of Mamba and of gated memory are left out.
Needs PyTorch and the authors' file diff_attn.py. Run from the root of the
repository:

    python -m tests.interop.golden.make_phi_flash ArchScale/lit_gpt/diff_attn.py

The outputs come from the authors' own FlashDiffAttention (microsoft/ArchScale
at c2ec1d6), in float64, with FlashAttention replaced by its definition. The
projections, norms and feed-forward layers around it are transcribed from vLLM
(vllm/model_executor/models/phi4flash.py at 03356f8).

The script compares them with tests/interop/phi_flash_reference.py, which is
written from TensorRT-LLM's port, and stops if they differ. It then prints how
much each mistake of a converter would change the outputs, and stops if a
mistake does not change them.

The tensors are the same on every run, bit for bit.
"""

import json
import math
import pathlib
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

from tests.interop import phi_flash_reference as reference

HERE = pathlib.Path(__file__).parent
NUM_ROWS = 2
NUM_TOKENS = 11

# The largest difference from the reference. The authors round λ to float32.
MAX_DIFFERENCE = 1e-6
# The smallest change of the outputs by a mistake.
MIN_CHANGE = 1e-2

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
# A function from a number of heads to a new order of these heads.
Order = Callable[[int], np.ndarray]

# Fields and values are as in the published config, as far as they are known.
# Sizes are small.
CONFIG = {
  "architectures": ["Phi4FlashForCausalLM"],
  "attention_dropout": 0.0,
  "auto_map": {
    "AutoConfig": "configuration_phi4flash.Phi4FlashConfig",
    "AutoModelForCausalLM": "modeling_phi4flash.Phi4FlashForCausalLM",
  },
  "bos_token_id": 1,
  "embd_pdrop": 0.0,
  "eos_token_id": 0,
  "hidden_act": "silu",
  "hidden_size": 32,
  "initializer_range": 0.02,
  "intermediate_size": 24,
  "layer_norm_eps": 1e-5,
  "lm_head_bias": False,
  "mamba_conv_bias": True,
  "mamba_d_conv": 4,
  "mamba_d_state": 16,
  "mamba_dt_rank": 2,
  "mamba_expand": 2,
  "mamba_proj_bias": False,
  "max_position_embeddings": 64,
  "mb_per_layer": 2,
  "mlp_bias": False,
  "model_type": "phi4flash",
  "num_attention_heads": 8,
  "num_hidden_layers": 8,
  "num_key_value_heads": 4,
  "resid_pdrop": 0.0,
  "rope_theta": 10000.0,
  "sliding_window": 4,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "vocab_size": 128,
}
NUM_HEADS = CONFIG["num_attention_heads"]
NUM_KV_HEADS = CONFIG["num_key_value_heads"]
WIDTH = CONFIG["hidden_size"]
HEAD_DIM = WIDTH // NUM_HEADS


def attention_layers() -> list[int]:
  """Returns the numbers of the layers with attention."""
  layers = []
  for layer in range(CONFIG["num_hidden_layers"]):
    if reference.layer_kind(CONFIG, layer) in ("windowed", "full", "cross"):
      layers.append(layer)
  return layers


LAYERS = attention_layers()


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a layer's tensors. Matrices are [outputs, inputs]."""
  num_rows = WIDTH
  if reference.layer_kind(CONFIG, layer) != "cross":
    num_rows += 2 * NUM_KV_HEADS * HEAD_DIM
  ffn_dim = CONFIG["intermediate_size"]
  return {
    "attn.inner_cross_attn.lambda_q1": (HEAD_DIM,),
    "attn.inner_cross_attn.lambda_k1": (HEAD_DIM,),
    "attn.inner_cross_attn.lambda_q2": (HEAD_DIM,),
    "attn.inner_cross_attn.lambda_k2": (HEAD_DIM,),
    "attn.inner_cross_attn.subln.weight": (2 * HEAD_DIM,),
    "attn.Wqkv.weight": (num_rows, WIDTH),
    "attn.Wqkv.bias": (num_rows,),
    "attn.out_proj.weight": (WIDTH, WIDTH),
    "attn.out_proj.bias": (WIDTH,),
    "input_layernorm.weight": (WIDTH,),
    "input_layernorm.bias": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.bias": (WIDTH,),
    "mlp.fc1.weight": (2 * ffn_dim, WIDTH),
    "mlp.fc2.weight": (WIDTH, ffn_dim),
  }


def draw_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns random values of a tensor.

  Gains, biases and λ are far from their initial values.
  """
  noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
  if name.endswith(("norm.weight", "subln.weight")):
    return 1 + 0.3 * noise
  if len(shape) == 1:
    return 0.4 * noise
  num_inputs = shape[1]
  # Larger queries and keys make the attention less uniform.
  gain = 1.5 if "Wqkv" in name else 1.0
  return gain * noise / math.sqrt(num_inputs)


def make_tensors() -> Tensors:
  """Returns random tensors in the type of the checkpoint."""
  tensors = {}
  for layer in LAYERS:
    for short_name, shape in layer_shapes(layer).items():
      name = f"model.layers.{layer}.{short_name}"
      tensors[name] = torch.tensor(draw_tensor(name, shape)).to(torch.bfloat16)
  return tensors


def flash_attention(
  q: torch.Tensor,
  k: torch.Tensor,
  v: torch.Tensor,
  *,
  softmax_scale: float,
  causal: bool,
  window_size: tuple[int, int],
  **_: Any,
) -> torch.Tensor:
  """Returns what FlashAttention computes, by its definition.

  Args:
    q: queries of shape [rows, tokens, heads, D].
    k: keys. A key head serves consecutive query heads.
    v: values.
    softmax_scale: the factor of the scores.
    causal: whether tokens see only themselves and the tokens before.
    window_size: how many keys before and after itself a token sees. Negative
      for all.
  """
  heads_per_key = q.shape[2] // k.shape[2]
  k = k.repeat_interleave(heads_per_key, dim=2)
  v = v.repeat_interleave(heads_per_key, dim=2)

  before, after = window_size
  query_positions = torch.arange(q.shape[1])[:, None]
  distance = query_positions - torch.arange(k.shape[1])
  is_visible = torch.ones_like(distance, dtype=torch.bool)
  if before >= 0:
    is_visible &= distance <= before
  if causal:
    is_visible &= distance >= 0
  elif after >= 0:
    is_visible &= distance >= -after

  scores = torch.einsum("bthd,bshd->bhts", q, k) * softmax_scale
  scores = scores.masked_fill(~is_visible, -math.inf)
  return torch.einsum("bhts,bshd->bthd", torch.softmax(scores, dim=-1), v)


def load_authors_class(path: str) -> type[torch.nn.Module]:
  """Returns FlashDiffAttention of the authors' file.

  The file is compiled without its asserts, which require half precision on a
  GPU.

  Args:
    path: the path of diff_attn.py.
  """
  interface = types.SimpleNamespace(
    flash_attn_func=flash_attention, flash_attn_varlen_func=flash_attention
  )
  sys.modules["flash_attn"] = types.SimpleNamespace(
    flash_attn_interface=interface
  )

  def ampere_capability() -> tuple[int, int]:
    return (8, 0)

  # The file chooses the version of FlashAttention by the GPU.
  torch.cuda.get_device_capability = ampere_capability
  source = pathlib.Path(path).read_text()
  module: dict[str, Any] = {}
  exec(compile(source, path, "exec", optimize=1), module)
  return module["FlashDiffAttention"]


def layer_number(layer: int) -> int:
  """Returns the depth of a layer for λ_init: its number."""
  return layer


class BlockOutputs(NamedTuple):
  """What a layer computes.

  Attributes:
    output: the output of the whole layer, of shape [rows, tokens, width].
    attention: the output of its attention, of the same shape.
    keys_values: the keys and values that its attention reads.
  """

  output: torch.Tensor
  attention: torch.Tensor
  keys_values: tuple[torch.Tensor, torch.Tensor]


class LayerOutputs(NamedTuple):
  """The outputs of all layers with attention.

  Attributes:
    outputs: of the whole layers, [layers, rows, tokens, width].
    attention: of their attention, of the same shape.
  """

  outputs: np.ndarray
  attention: np.ndarray


class PhiFlash:
  """The layers with attention, after vLLM's code."""

  def __init__(
    self,
    authors_class: type[torch.nn.Module],
    config: Config,
    tensors: Tensors,
    dtype: torch.dtype = torch.float64,
    depth: Callable[[int], int] = layer_number,
  ):
    """Initializes the layers.

    Args:
      authors_class: FlashDiffAttention.
      config: the config.json.
      tensors: the tensors of the checkpoint.
      dtype: the type of the computation.
      depth: returns the depth of a layer for λ_init.
    """
    self.authors_class = authors_class
    self.config = config
    self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    self.dtype = dtype
    self.depth = depth

  def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
    weight = self.tensors[f"{name}.weight"]
    bias = self.tensors.get(f"{name}.bias")
    return torch.nn.functional.linear(x, weight, bias)

  def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.nn.functional.layer_norm(
      x,
      x.shape[-1:],
      self.tensors[f"{name}.weight"],
      self.tensors[f"{name}.bias"],
      self.config["layer_norm_eps"],
    )

  def inner_attention(self, layer: int) -> torch.nn.Module:
    """Returns the authors' module of a layer, with its tensors."""
    # FlashAttention counts the keys before a token, without its own.
    window = (-1, -1)
    if reference.layer_kind(self.config, layer) == "windowed":
      window = (self.config["sliding_window"] - 1, 0)
    module = self.authors_class(
      HEAD_DIM,
      self.depth(layer),
      causal=True,
      softmax_scale=HEAD_DIM**-0.5,
      window_size=window,
    )
    prefix = f"model.layers.{layer}.attn.inner_cross_attn."
    state = {}
    for name, tensor in self.tensors.items():
      if name.startswith(prefix):
        state[name.removeprefix(prefix)] = tensor
    module = module.to(self.dtype)
    module.load_state_dict(state)
    return module

  def attention(
    self,
    x: torch.Tensor,
    layer: int,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
  ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the output of a layer's attention, and its keys and values."""
    name = f"model.layers.{layer}.attn"
    qkv = self.linear(x, f"{name}.Wqkv")
    if reference.layer_kind(self.config, layer) == "cross":
      q = qkv
      k, v = shared
    else:
      kv_size = NUM_KV_HEADS * HEAD_DIM
      q, k, v = qkv.split([NUM_HEADS * HEAD_DIM, kv_size, kv_size], dim=-1)
    heads = self.inner_attention(layer)(
      q.unflatten(-1, (-1, HEAD_DIM)),
      k.unflatten(-1, (-1, HEAD_DIM)),
      v.unflatten(-1, (-1, HEAD_DIM)),
    )
    return self.linear(heads.flatten(-2), f"{name}.out_proj"), (k, v)

  def block(
    self,
    x: torch.Tensor,
    layer: int,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
  ) -> BlockOutputs:
    """Returns the outputs of a layer.

    Args:
      x: the input of shape [rows, tokens, width].
      layer: the number of the layer.
      shared: the keys and values of the full layer, for a cross layer.
    """
    name = f"model.layers.{layer}"
    normed = self.norm(x, f"{name}.input_layernorm")
    attended, keys_values = self.attention(normed, layer, shared)
    x = x + attended
    normed = self.norm(x, f"{name}.post_attention_layernorm")
    gate, up = self.linear(normed, f"{name}.mlp.fc1").chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate)
    output = x + self.linear(up * silu, f"{name}.mlp.fc2")
    return BlockOutputs(output, attended, keys_values)

  @torch.no_grad()
  def __call__(self, inputs: np.ndarray) -> LayerOutputs:
    """Returns the outputs of all layers with attention.

    Args:
      inputs: an input for each layer, of shape [layers, rows, tokens, width].
    """
    outputs = []
    attention = []
    keys_values = None
    for layer, x in zip(LAYERS, inputs, strict=True):
      block = self.block(torch.tensor(x).to(self.dtype), layer, keys_values)
      keys_values = block.keys_values
      outputs.append(block.output.double().numpy())
      attention.append(block.attention.double().numpy())
    return LayerOutputs(np.stack(outputs), np.stack(attention))


class Mistake(NamedTuple):
  """A mistake that a converter could make.

  Attributes:
    name: what is wrong.
    tensors: the tensors that it would read.
    fields: the fields of the config that it would read.
    depth: the depth of a layer that it would use for λ_init.
  """

  name: str
  tensors: Tensors
  fields: Config = {}
  depth: Callable[[int], int] = layer_number


def reorder_heads(
  tensors: Tensors,
  projection: str,
  first: int,
  end: int,
  order: Order,
  axis: int = 0,
) -> Tensors:
  """Returns tensors whose heads from `first` to `end` have another order.

  Cross layers have no heads of keys and values, so there `end` is lower.

  Args:
    tensors: the tensors of the checkpoint.
    projection: "Wqkv" or "out_proj".
    first: the first head that is moved.
    end: the head after the last one.
    order: the order of the moved heads.
    axis: the axis of the heads. A bias without this axis is not changed.
  """
  changed = dict(tensors)
  for name, tensor in tensors.items():
    if f".{projection}." not in name or tensor.ndim <= axis:
      continue
    num_heads = tensor.shape[axis] // HEAD_DIM
    num_moved = min(end, num_heads) - first
    if num_moved <= 0:
      continue
    heads = np.arange(num_heads)
    heads[first : first + num_moved] = first + order(num_moved)
    index = np.arange(tensor.shape[axis]).reshape(num_heads, HEAD_DIM)
    new_index = torch.tensor(index[heads].reshape(-1))
    changed[name] = tensor.index_select(axis, new_index)
  return changed


def change_tensors(
  tensors: Tensors,
  suffix: str,
  change: Callable[[torch.Tensor], torch.Tensor],
) -> Tensors:
  """Returns tensors after a change of those whose names have a suffix."""
  changed = dict(tensors)
  for name, tensor in tensors.items():
    if name.endswith(suffix):
      changed[name] = change(tensor)
  return changed


def exchange_pairs(count: int) -> np.ndarray:
  """Returns the order 1, 0, 3, 2, … of heads."""
  return np.arange(count).reshape(-1, 2)[:, ::-1].reshape(-1)


def even_before_odd(count: int) -> np.ndarray:
  """Returns the order in which position 2i has head i.

  A converter makes this mistake if it expects all first heads of the pairs
  before all second ones.
  """
  return np.arange(count).reshape(2, -1).T.reshape(-1)


def group_by_key(count: int) -> np.ndarray:
  """Returns the order of a converter that expects groups in Wqkv.

  A group has the query heads of a key head, the key head and the value head.
  """
  # A cross layer has only queries.
  if count == NUM_HEADS:
    return np.arange(count)
  queries_per_key = NUM_HEADS // NUM_KV_HEADS
  groups = []
  for key in range(NUM_KV_HEADS):
    first_query = key * queries_per_key
    groups += range(first_query, first_query + queries_per_key)
    groups += [NUM_HEADS + key, NUM_HEADS + NUM_KV_HEADS + key]
  return np.argsort(groups)


def exchange_halves(tensor: torch.Tensor) -> torch.Tensor:
  return tensor.roll(len(tensor) // 2, 0)


def previous_layer(layer: int) -> int:
  return layer - 1


def head_mistakes(tensors: Tensors) -> list[Mistake]:
  """Returns mistakes in the order of heads."""
  first_value = NUM_HEADS + NUM_KV_HEADS
  num_qkv_heads = NUM_HEADS + 2 * NUM_KV_HEADS

  def reorder_queries(order: Order) -> Tensors:
    return reorder_heads(tensors, "Wqkv", 0, NUM_HEADS, order)

  def reorder_keys(order: Order) -> Tensors:
    return reorder_heads(tensors, "Wqkv", NUM_HEADS, first_value, order)

  def reorder_values(order: Order) -> Tensors:
    return reorder_heads(tensors, "Wqkv", first_value, num_qkv_heads, order)

  return [
    Mistake("maps exchanged in the queries", reorder_queries(exchange_pairs)),
    Mistake(
      "all first maps of queries before all second ones",
      reorder_queries(even_before_odd),
    ),
    Mistake("maps exchanged in the keys", reorder_keys(exchange_pairs)),
    Mistake(
      "all first maps of keys before all second ones",
      reorder_keys(even_before_odd),
    ),
    Mistake("halves of values exchanged", reorder_values(exchange_pairs)),
    Mistake(
      "all first halves of values before all second ones",
      reorder_values(even_before_odd),
    ),
    Mistake(
      "Wqkv in groups of query heads, a key and a value",
      reorder_heads(tensors, "Wqkv", 0, num_qkv_heads, group_by_key),
    ),
    Mistake(
      "columns of out_proj as (half, head)",
      reorder_heads(tensors, "out_proj", 0, NUM_HEADS, even_before_odd, axis=1),
    ),
  ]


def make_mistakes(tensors: Tensors) -> list[Mistake]:
  """Returns the mistakes that a converter could make."""
  window = CONFIG["sliding_window"]
  return [
    *head_mistakes(tensors),
    Mistake(
      "no bias of queries, keys and values",
      change_tensors(tensors, "Wqkv.bias", torch.zeros_like),
    ),
    Mistake(
      "no bias of the output",
      change_tensors(tensors, "out_proj.bias", torch.zeros_like),
    ),
    Mistake(
      "no bias of the norms",
      change_tensors(tensors, "norm.bias", torch.zeros_like),
    ),
    Mistake(
      "no gain in the head norm",
      change_tensors(tensors, "subln.weight", torch.ones_like),
    ),
    Mistake(
      "halves of fc1 exchanged",
      change_tensors(tensors, "fc1.weight", exchange_halves),
    ),
    Mistake(
      "λ's vectors at 0", change_tensors(tensors, "lambda_q1", torch.zeros_like)
    ),
    Mistake(
      "a window of one key less", tensors, {"sliding_window": window - 1}
    ),
    Mistake(
      "a window of one key more", tensors, {"sliding_window": window + 1}
    ),
    Mistake("λ_init of the layer before", tensors, depth=previous_layer),
    Mistake(
      "λ_init counted in layers with attention", tensors, depth=LAYERS.index
    ),
  ]


def check_reference(
  tensors: Tensors, inputs: np.ndarray, expected: LayerOutputs
) -> None:
  """Exits if phi_flash_reference.py computes other outputs."""
  arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
  for row in range(NUM_ROWS):
    keys_values = None
    for index, layer in enumerate(LAYERS):
      x = inputs[index, row].astype(np.float64)
      block = reference.block(CONFIG, arrays, layer, x, keys_values)
      keys_values = block.keys_values
      output_error = block.output - expected.outputs[index, row]
      attention_error = block.attention - expected.attention[index, row]
      difference = max(
        np.abs(output_error).max(), np.abs(attention_error).max()
      )
      kind = reference.layer_kind(CONFIG, layer)
      print(
        f"layer {layer}, {kind}, row {row}: the two differ by {difference:.1e}"
      )
      # Also true for NaN.
      if not difference < MAX_DIFFERENCE:
        raise SystemExit("the reference differs")


def check_mistakes(
  authors_class: type[torch.nn.Module],
  tensors: Tensors,
  inputs: np.ndarray,
  expected: LayerOutputs,
) -> None:
  """Exits if a mistake does not change the outputs."""
  for mistake in make_mistakes(tensors):
    layers = PhiFlash(
      authors_class,
      CONFIG | mistake.fields,
      mistake.tensors,
      depth=mistake.depth,
    )
    change = np.abs(layers(inputs).outputs - expected.outputs)
    layer_changes = change.max(axis=(1, 2, 3))
    values = [f"{value:.1e}" for value in layer_changes]
    print(f"  {mistake.name}: {', '.join(values)}")
    if not layer_changes.max() > MIN_CHANGE:
      raise SystemExit("the outputs do not show the mistake")


def write_checkpoint(
  tensors: Tensors, inputs: np.ndarray, outputs: LayerOutputs
) -> None:
  """Writes the golden checkpoint, and its outputs in float32."""
  directory = HERE / "phi_flash_tiny"
  directory.mkdir(exist_ok=True)
  config = json.dumps(CONFIG, indent=2, sort_keys=True)
  (directory / "config.json").write_text(config + "\n")
  safetensors.torch.save_file(
    tensors, directory / "model.safetensors", metadata={"format": "pt"}
  )
  np.savez_compressed(
    directory / "golden.npz",
    layers=LAYERS,
    input=inputs,
    output=outputs.outputs.astype(np.float32),
    attention=outputs.attention.astype(np.float32),
  )


def main(path: str) -> None:
  authors_class = load_authors_class(path)
  tensors = make_tensors()
  shape = (len(LAYERS), NUM_ROWS, NUM_TOKENS, WIDTH)
  inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)

  outputs = PhiFlash(authors_class, CONFIG, tensors)(inputs)
  check_reference(tensors, inputs, outputs)
  rounded = PhiFlash(authors_class, CONFIG, tensors, torch.float32)(inputs)
  rounding_error = np.abs(rounded.outputs - outputs.outputs).max()
  print(
    f"largest output {np.abs(outputs.outputs).max():.2f}; in float32 they are"
    f" off by {rounding_error:.1e}"
  )
  check_mistakes(authors_class, tensors, inputs, outputs)
  write_checkpoint(tensors, inputs, outputs)


if __name__ == "__main__":
  main(sys.argv[1])
