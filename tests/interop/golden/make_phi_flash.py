"""Makes the checkpoint phi_flash_tiny: random weights of the attention layers of a small Phi-4-mini-flash-reasoning.

Run from the repository's root, with PyTorch installed (nothing else here needs it) and the authors' file diff_attn.py:

    python -m tests.interop.golden.make_phi_flash ArchScale/lit_gpt/diff_attn.py

The outputs come from the authors' own FlashDiffAttention (microsoft/ArchScale at c2ec1d6), in float64, with FlashAttention replaced by its
definition; what is around it, the projections, norms and feed-forward layers of a checkpoint, is transcribed from vLLM
(vllm/model_executor/models/phi4flash.py at 03356f8). The script compares them with tests/interop/phi_flash_reference.py, which is written
from TensorRT-LLM's port, and stops if they differ. Then it says by how much the outputs would change with each mistake that a converter can
make, and stops if one would not show. The tensors are the same bit for bit on every run. Layers of Mamba and of gated memory are left out.
"""

import json
import math
import pathlib
import sys
import types
import zlib

import numpy as np
import safetensors.torch
import torch

from tests.interop import phi_flash_reference as reference

HERE = pathlib.Path(__file__).parent

# Fields and values as in the public config where these are known; sizes are small.
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
LAYERS = [
  layer
  for layer in range(CONFIG["num_hidden_layers"])
  if reference.layer_kind(CONFIG, layer) in ("windowed", "full", "cross")
]


def shapes():
  """The tensors of the layers with attention, [out, in]."""
  embed, ffn = CONFIG["hidden_size"], CONFIG["intermediate_size"]
  dim = embed // CONFIG["num_attention_heads"]
  found = {}
  for layer in LAYERS:
    rows = embed + (
      0
      if reference.layer_kind(CONFIG, layer) == "cross"
      else 2 * CONFIG["num_key_value_heads"] * dim
    )
    of_layer = {
      f"attn.inner_cross_attn.lambda_{name}": (dim,)
      for name in ("q1", "k1", "q2", "k2")
    }
    of_layer |= {"attn.inner_cross_attn.subln.weight": (2 * dim,)}
    of_layer |= {"attn.Wqkv.weight": (rows, embed), "attn.Wqkv.bias": (rows,)}
    of_layer |= {
      "attn.out_proj.weight": (embed, embed),
      "attn.out_proj.bias": (embed,),
    }
    of_layer |= {
      f"{name}_layernorm.{part}": (embed,)
      for name in ("input", "post_attention")
      for part in ("weight", "bias")
    }
    of_layer |= {
      "mlp.fc1.weight": (2 * ffn, embed),
      "mlp.fc2.weight": (embed, ffn),
    }
    found |= {
      f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()
    }
  return found


def make_tensors():
  """Random tensors in the checkpoint's type; gains, biases and λ too are far from where training starts."""
  tensors = {}
  for name, shape in shapes().items():
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if name.endswith(("norm.weight", "subln.weight")):
      value = 1 + 0.3 * noise
    elif len(shape) == 1:
      value = 0.4 * noise
    else:
      value = (1.5 if "Wqkv" in name else 1.0) * noise / math.sqrt(shape[1])
    tensors[name] = torch.tensor(value).to(torch.bfloat16)
  return tensors


def flash_attention(q, k, v, *, softmax_scale, causal, window_size, **_):
  """FlashAttention's definition on [B, T, heads, D]: a key head serves consecutive query heads, a window is (keys before, keys after)."""
  k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
  before, after = (math.inf if size < 0 else size for size in window_size)
  distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
  visible = (distance <= before) & (distance >= (0 if causal else -after))
  scores = torch.einsum("bthd,bshd->bhts", q, k) * softmax_scale
  return torch.einsum(
    "bhts,bshd->bthd",
    torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1),
    v,
  )


def authors_class(path):
  """FlashDiffAttention of the authors' file. Compiled without its asserts, which want half precision on a GPU."""
  interface = types.SimpleNamespace(
    flash_attn_func=flash_attention, flash_attn_varlen_func=flash_attention
  )
  sys.modules["flash_attn"] = types.SimpleNamespace(
    flash_attn_interface=interface
  )
  torch.cuda.get_device_capability = lambda: (
    8,
    0,
  )  # which FlashAttention it imports
  names = {}
  exec(compile(pathlib.Path(path).read_text(), path, "exec", optimize=1), names)
  return names["FlashDiffAttention"]


class PhiFlash:
  """The layers with attention after vLLM's code."""

  def __init__(self, authors, config, tensors, dtype=torch.float64, **fields):
    self.authors, self.config, self.dtype = authors, config, dtype
    self.depth = fields.get("depth", lambda layer: layer)
    self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}

  def linear(self, x, name):
    return torch.nn.functional.linear(
      x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
    )

  def norm(self, x, name):
    weight, bias = (
      self.tensors[f"{name}.{part}"] for part in ("weight", "bias")
    )
    return torch.nn.functional.layer_norm(
      x, x.shape[-1:], weight, bias, self.config["layer_norm_eps"]
    )

  def attention(self, x, layer, shared):
    name, config = f"model.layers.{layer}.attn", self.config
    num_heads, num_kv_heads = (
      config["num_attention_heads"],
      config["num_key_value_heads"],
    )
    dim, kind = (
      config["hidden_size"] // num_heads,
      reference.layer_kind(config, layer),
    )
    qkv = self.linear(x, f"{name}.Wqkv")
    if kind == "cross":
      q, (k, v) = qkv, shared
    else:
      q, *shared = qkv.split(
        [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim], dim=-1
      )
      k, v = shared
    window = (
      (config["sliding_window"] - 1, 0) if kind == "windowed" else (-1, -1)
    )
    inner = self.authors(
      dim,
      self.depth(layer),
      causal=True,
      softmax_scale=dim**-0.5,
      window_size=window,
    ).to(self.dtype)
    prefix = f"{name}.inner_cross_attn."
    inner.load_state_dict(
      {
        key.removeprefix(prefix): tensor
        for key, tensor in self.tensors.items()
        if key.startswith(prefix)
      }
    )
    out = inner(*(x.unflatten(-1, (-1, dim)) for x in (q, k, v)))
    return self.linear(out.flatten(-2), f"{name}.out_proj"), shared

  def block(self, x, layer, shared):
    """The output of a layer, that of its attention, and its keys and values."""
    name = f"model.layers.{layer}"
    attended, shared = self.attention(
      self.norm(x, f"{name}.input_layernorm"), layer, shared
    )
    x = x + attended
    gate, y = self.linear(
      self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp.fc1"
    ).chunk(2, dim=-1)
    return (
      x + self.linear(y * torch.nn.functional.silu(gate), f"{name}.mlp.fc2"),
      attended,
      shared,
    )

  def __call__(self, inputs):
    """The outputs of all layers with attention [layers, B, T, E], and those of their attention; each layer has an input of its own."""
    found, shared = [], None
    with torch.no_grad():
      for layer, x in zip(LAYERS, inputs, strict=True):
        out, attended, shared = self.block(
          torch.tensor(x).to(self.dtype), layer, shared
        )
        found.append((out.double().numpy(), attended.double().numpy()))
    return tuple(np.stack(each) for each in zip(*found, strict=True))


def mistakes(tensors):
  """What a wrong converter would do: (a mistake's name, changed tensors, changed config, other arguments)."""
  dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
  q, kv = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]

  def rows(part, order, axis=0):
    """Reorders heads of Wqkv or out_proj; `order` maps the number of heads that there are to an array of their numbers."""

    def change(name, tensor):
      if f".{part}." not in name or tensor.ndim <= axis:
        return tensor
      index = np.arange(tensor.shape[axis]).reshape(-1, dim)
      return tensor.index_select(
        axis, torch.tensor(index[order(len(index))].reshape(-1))
      )

    return {name: change(name, tensor) for name, tensor in tensors.items()}

  def part_of(start, stop, order):
    """An order of the heads from `start` to `stop` alone; cross layers have no heads of keys and values."""
    return lambda count: np.concatenate(
      [
        np.arange(count)[:start],
        start + order(np.arange(min(stop, count) - start)),
        np.arange(count)[stop:],
      ]
    )

  def set_to(suffix, function):
    return {
      name: function(tensor) if name.endswith(suffix) else tensor
      for name, tensor in tensors.items()
    }

  swapped = lambda x: x.reshape(-1, 2)[:, ::-1].reshape(-1)
  halves = lambda x: x.reshape(2, -1).T.reshape(-1)
  grouped = lambda count: (
    np.arange(count)
    if count == q
    else np.concatenate(
      [
        [*range(i * q // kv, (i + 1) * q // kv), q + i, q + kv + i]
        for i in range(kv)
      ]
    ).argsort()
  )
  yield (
    "maps exchanged in the queries",
    rows("Wqkv", part_of(0, q, swapped)),
    {},
    {},
  )
  yield (
    "all first maps of queries before all second ones",
    rows("Wqkv", part_of(0, q, halves)),
    {},
    {},
  )
  yield (
    "maps exchanged in the keys",
    rows("Wqkv", part_of(q, q + kv, swapped)),
    {},
    {},
  )
  yield (
    "all first maps of keys before all second ones",
    rows("Wqkv", part_of(q, q + kv, halves)),
    {},
    {},
  )
  yield (
    "halves of values exchanged",
    rows("Wqkv", part_of(q + kv, q + 2 * kv, swapped)),
    {},
    {},
  )
  yield (
    "all first halves of values before all second ones",
    rows("Wqkv", part_of(q + kv, q + 2 * kv, halves)),
    {},
    {},
  )
  yield (
    "Wqkv in groups of query heads, a key and a value",
    rows("Wqkv", grouped),
    {},
    {},
  )
  yield (
    "columns of out_proj as (half, head)",
    rows("out_proj", lambda count: halves(np.arange(count)), 1),
    {},
    {},
  )
  yield (
    "no bias of queries, keys and values",
    set_to("Wqkv.bias", torch.zeros_like),
    {},
    {},
  )
  yield (
    "no bias of the output",
    set_to("out_proj.bias", torch.zeros_like),
    {},
    {},
  )
  yield "no bias of the norms", set_to("norm.bias", torch.zeros_like), {}, {}
  yield (
    "no gain in the head norm",
    set_to("subln.weight", torch.ones_like),
    {},
    {},
  )
  yield (
    "halves of fc1 exchanged",
    set_to("fc1.weight", lambda x: x.roll(len(x) // 2, 0)),
    {},
    {},
  )
  yield "λ's vectors at 0", set_to("lambda_q1", torch.zeros_like), {}, {}
  yield (
    "a window of one key less",
    tensors,
    {"sliding_window": CONFIG["sliding_window"] - 1},
    {},
  )
  yield (
    "a window of one key more",
    tensors,
    {"sliding_window": CONFIG["sliding_window"] + 1},
    {},
  )
  yield (
    "λ_init of the layer before",
    tensors,
    {},
    {"depth": lambda layer: layer - 1},
  )
  yield (
    "λ_init counted in layers with attention",
    tensors,
    {},
    {"depth": LAYERS.index},
  )


def main(path):
  authors, tensors = authors_class(path), make_tensors()
  inputs = (
    np.random.default_rng(0)
    .normal(size=(len(LAYERS), 2, 11, CONFIG["hidden_size"]))
    .astype(np.float32)
  )
  outputs, attended = PhiFlash(authors, CONFIG, tensors)(inputs)
  arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
  for row in range(inputs.shape[1]):
    shared = None
    for index, layer in enumerate(LAYERS):
      block, attention, shared = reference.block(
        CONFIG, arrays, layer, inputs[index, row].astype(np.float64), shared
      )
      difference = max(
        np.abs(block - outputs[index, row]).max(),
        np.abs(attention - attended[index, row]).max(),
      )
      print(
        f"layer {layer}, {reference.layer_kind(CONFIG, layer)}, row {row}: the two differ by {difference:.1e}"
      )
      if not difference < 1e-6:  # the authors round λ to float32
        raise SystemExit("they disagree")
  rounded = np.abs(
    PhiFlash(authors, CONFIG, tensors, torch.float32)(inputs)[0] - outputs
  ).max()
  print(
    f"largest output {np.abs(outputs).max():.2f}; in float32 they are off by {rounded:.1e}"
  )
  for mistake, wrong, fields, others in mistakes(tensors):
    difference = np.abs(
      PhiFlash(authors, CONFIG | fields, wrong, **others)(inputs)[0] - outputs
    ).max(axis=(1, 2, 3))
    print(f"  {mistake}: {', '.join(f'{value:.1e}' for value in difference)}")
    if not difference.max() > 1e-2:
      raise SystemExit("the outputs do not show the mistake")
  directory = HERE / "phi_flash_tiny"
  directory.mkdir(exist_ok=True)
  (directory / "config.json").write_text(
    json.dumps(CONFIG, indent=2, sort_keys=True) + "\n"
  )
  safetensors.torch.save_file(
    tensors, directory / "model.safetensors", metadata={"format": "pt"}
  )
  single = {
    "output": outputs.astype(np.float32),
    "attention": attended.astype(np.float32),
  }
  np.savez_compressed(
    directory / "golden.npz", layers=LAYERS, input=inputs, **single
  )


if __name__ == "__main__":
  main(sys.argv[1])
