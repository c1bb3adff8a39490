"""Makes the checkpoints motif_tiny, motif_2_tiny and motif_2_tiny_gqa: random weights in the layout of Motif-2.6B and Motif-2-12.7B.

Run from the repository's root, with PyTorch installed (nothing else here needs it):

    python -m tests.interop.golden.make_motif

The logits come from a transcription in PyTorch, in float64, of the authors' model in vLLM (MotifTechnologies/vllm,
vllm/model_executor/models/motif.py at 477e4d7, vllm/v1/attention/backends/grouped_diff_attn.py at 2b73efa). The script compares it with
tests/interop/motif_reference.py, which is written from the MLX port, on these and on other shapes, and stops if they differ. Then it says
by how much the logits would change with each mistake that a converter can make, and stops if one would not show. The authors' own
modeling_motif.py was not at hand. The tensors are the same bit for bit on every run.
"""

import json
import math
import pathlib
import zlib

import numpy as np
import safetensors.torch
import torch

from tests.interop import motif_reference

HERE = pathlib.Path(__file__).parent
NUM_SHARDS = 3

# Fields and values as in the public configs where these are known; sizes are small, token ids are within the vocabulary.
COMMON = {
  "architectures": ["MotifForCausalLM"],
  "attention_dropout": 0.0,
  "auto_map": {
    "AutoConfig": "configuration_motif.MotifConfig",
    "AutoModelForCausalLM": "modeling_motif.MotifForCausalLM",
  },
  "bos_token_id": 1,
  "eos_token_id": 0,
  "hidden_act": "poly_norm",
  "initializer_range": 0.02,
  "max_position_embeddings": 64,
  "max_window_layers": 28,
  "model_type": "Motif",
  "rope_scaling": None,
  "sliding_window": None,
  "use_bias": False,
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 128,
}
# Motif-2.6B: pairs of heads, no num_noise_heads, no head_dim. Its norms' epsilons are far apart, so that an exchange shows.
VANILLA = COMMON | {
  "attn_rms_norm_eps": 1e-2,
  "hidden_size": 48,
  "intermediate_size": 72,
  "num_attention_heads": 6,
  "num_hidden_layers": 3,
  "num_key_value_heads": 6,
  "rms_norm_eps": 1e-6,
  "rope_theta": 500000.0,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
}
# Motif-2-12.7B: groups of 4 signal heads and 1 noise head, one pair of keys and values a group. A converter to GGUF finds grouped_ratio and
# lambda_init = 1 in its config.json; the model reads neither.
GROUPED = COMMON | {
  "attn_rms_norm_eps": 1e-5,
  "grouped_ratio": 4,
  "head_dim": 8,
  "hidden_size": 24,
  "intermediate_size": 40,
  "k_ratio": 1,
  "lambda_init": 1.0,
  "num_attention_heads": 10,
  "num_hidden_layers": 3,
  "num_key_value_heads": 4,
  "num_noise_heads": 2,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1000000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "float32",
}
# Four groups of 2 + 1 share two pairs of keys and values.
GROUPED_GQA = GROUPED | {
  "attn_rms_norm_eps": 1e-2,
  "grouped_ratio": 2,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_attention_heads": 12,
  "num_hidden_layers": 2,
  "num_noise_heads": 4,
  "rms_norm_eps": 1e-3,
  "rope_theta": 100.0,
}
GOLDEN = {
  "motif_tiny": VANILLA,
  "motif_2_tiny": GROUPED,
  "motif_2_tiny_gqa": GROUPED_GQA,
}
# For the comparison alone: shared keys and values without groups, a single group, the heads of the real models, biases.
OTHERS = {
  "vanilla_gqa": VANILLA
  | {"num_attention_heads": 12, "num_key_value_heads": 4},
  "one_group": GROUPED
  | {"num_attention_heads": 5, "num_noise_heads": 1, "num_key_value_heads": 2},
  "heads_of_2.6B": VANILLA
  | {
    "hidden_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 1,
  },
  "heads_of_12.7B": GROUPED
  | {
    "num_attention_heads": 40,
    "num_noise_heads": 8,
    "num_key_value_heads": 16,
    "num_hidden_layers": 1,
  },
  "biases": GROUPED_GQA | {"use_bias": True},
}


def sizes(config):
  """Query heads, groups (each with one noise head), pairs of keys and values, head size."""
  num_heads = config["num_attention_heads"]
  dim = config.get("head_dim") or config["hidden_size"] // num_heads
  return (
    num_heads,
    config.get("num_noise_heads", num_heads // 2),
    config["num_key_value_heads"] // 2,
    dim,
  )


def shapes(config):
  """Every tensor of the checkpoint, [out, in]."""
  embed, ffn, vocabulary = (
    config["hidden_size"],
    config["intermediate_size"],
    config["vocab_size"],
  )
  num_heads, num_groups, num_pairs, dim = sizes(config)
  linears = {
    "self_attn.q_proj": (num_heads * dim, embed),
    "self_attn.k_proj": (2 * num_pairs * dim, embed),
    "self_attn.v_proj": (2 * num_pairs * dim, embed),
    "self_attn.o_proj": (embed, 2 * (num_heads - num_groups) * dim),
    "mlp.gate_proj": (ffn, embed),
    "mlp.up_proj": (ffn, embed),
    "mlp.down_proj": (embed, ffn),
  }
  layer = {f"{name}.weight": shape for name, shape in linears.items()}
  if config["use_bias"]:
    layer |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
  layer |= {
    f"self_attn.lambda_{name}": (dim,) for name in ("q1", "k1", "q2", "k2")
  }
  layer |= {
    "self_attn.subln.weight": (2 * dim,),
    "mlp.act_fn.weight": (3,),
    "mlp.act_fn.bias": (1,),
  }
  layer |= {
    "input_layernorm.weight": (embed,),
    "post_attention_layernorm.weight": (embed,),
  }
  return {
    "model.embed_tokens.weight": (vocabulary, embed),
    **{
      f"model.layers.{index}.{name}": shape
      for index in range(config["num_hidden_layers"])
      for name, shape in layer.items()
    },
    "model.norm.weight": (embed,),
    **(
      {}
      if config["tie_word_embeddings"]
      else {"lm_head.weight": (vocabulary, embed)}
    ),
  }


def make_tensors(config):
  """Random tensors in the checkpoint's type; gains, λ and PolyNorm's coefficients too are far from where training starts."""
  tensors = {}
  for name, shape in shapes(config).items():
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if name.endswith(("norm.weight", "subln.weight")):
      value = 1 + 0.3 * noise
    elif "lambda" in name or "act_fn" in name or name.endswith(".bias"):
      value = 0.4 * noise
    elif (
      len(shape) == 2 and "embed_tokens" not in name and "lm_head" not in name
    ):
      value = (
        (1.5 if "q_proj" in name or "k_proj" in name else 1.0)
        * noise
        / math.sqrt(shape[1])
      )
    else:
      value = 0.08 * noise
    tensors[name] = torch.tensor(value).to(
      getattr(torch, config["torch_dtype"])
    )
  return tensors


class Motif:
  """The model after vLLM's code: fused heads, four attention calls, one for each set of queries and half of the values."""

  def __init__(self, config, tensors):
    self.config, self.tensors = (
      config,
      {name: tensor.double() for name, tensor in tensors.items()},
    )
    self.num_heads, self.num_groups, self.num_pairs, self.dim = sizes(config)

  def linear(self, x, name):
    return torch.nn.functional.linear(
      x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
    )

  def norm(self, x, name, eps):
    return (
      x
      * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
      * self.tensors[f"{name}.weight"]
    )

  def rope(self, x):
    """x [B, T, heads, D], rotated in halves ("neox style") before the heads are split."""
    inverse = 1.0 / self.config["rope_theta"] ** (
      torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
    )
    angles = (
      torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * inverse
    )
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
      [
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
      ],
      dim=-1,
    )

  def attend(self, q, k, v):
    """[B, T, heads, D] each; as in FlashAttention, a key head serves consecutive query heads."""
    k, v = (
      x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)
      for x in (k, v)
    )
    return torch.nn.functional.scaled_dot_product_attention(
      q.transpose(1, 2), k, v, is_causal=True
    ).transpose(1, 2)

  def attention(self, x, layer):
    name, (batch, length, _) = f"model.layers.{layer}.self_attn", x.shape
    split = lambda part: self.linear(x, f"{name}.{part}").unflatten(
      -1, (-1, self.dim)
    )
    q = self.rope(split("q_proj")).unflatten(2, (self.num_groups, -1))
    q1, q2 = q[:, :, :, :-1].flatten(2, 3), q[:, :, :, -1]
    k1, k2 = (
      self.rope(split("k_proj")).unflatten(2, (self.num_pairs, 2)).unbind(3)
    )
    v1, v2 = split("v_proj").unflatten(2, (self.num_pairs, 2)).unbind(3)
    first = torch.cat(
      [self.attend(q1, k1, v1), self.attend(q1, k1, v2)], dim=-1
    )
    second = torch.cat(
      [self.attend(q2, k2, v1), self.attend(q2, k2, v2)], dim=-1
    )
    second = second.repeat_interleave(first.shape[2] // second.shape[2], dim=2)
    lambda_init = 0.8 - 0.6 * math.exp(
      -0.3 * (layer - self.config.get("lambda_init_offset", 1))
    )
    q1, k1, q2, k2 = (
      self.tensors[f"{name}.lambda_{part}"] for part in ("q1", "k1", "q2", "k2")
    )
    lambda_full = (
      torch.exp(torch.sum(q1 * k1))
      - torch.exp(torch.sum(q2 * k2))
      + lambda_init
    )
    out = self.norm(
      first - lambda_full * second,
      f"{name}.subln",
      self.config["attn_rms_norm_eps"],
    ) * (1 - lambda_init)
    return self.linear(out.reshape(batch, length, -1), f"{name}.o_proj")

  def poly_norm(self, x, name):
    square = x.pow(2)
    cube = square * x
    n = lambda z: (
      z / torch.sqrt(z.pow(2).sum(-1, keepdim=True) / z.shape[-1] + 1e-6)
    )
    weight = self.tensors[f"{name}.weight"]
    return (
      weight[0] * n(cube)
      + weight[1] * n(square)
      + weight[2] * n(x)
      + self.tensors[f"{name}.bias"]
    )

  def __call__(self, ids):
    """Logits [B, T, N], and every self_attn's input and output [L, B, T, E]."""
    x = self.tensors["model.embed_tokens.weight"][ids]
    inputs, outputs, eps = [], [], self.config["rms_norm_eps"]
    for layer in range(self.config["num_hidden_layers"]):
      name = f"model.layers.{layer}"
      inputs.append(self.norm(x, f"{name}.input_layernorm", eps))
      outputs.append(self.attention(inputs[-1], layer))
      x = x + outputs[-1]
      inner = self.norm(x, f"{name}.post_attention_layernorm", eps)
      gate = self.poly_norm(
        self.linear(inner, f"{name}.mlp.gate_proj"), f"{name}.mlp.act_fn"
      )
      x = x + self.linear(
        gate * self.linear(inner, f"{name}.mlp.up_proj"),
        f"{name}.mlp.down_proj",
      )
    unembedding = (
      "model.embed_tokens.weight"
      if self.config["tie_word_embeddings"]
      else "lm_head.weight"
    )
    return (
      self.norm(x, "model.norm", eps) @ self.tensors[unembedding].T,
      torch.stack(inputs),
      torch.stack(outputs),
    )


def compare(name, config, tensors, ids):
  """Runs both transcriptions; they must agree to rounding."""
  arrays = {tensor: value.double().numpy() for tensor, value in tensors.items()}
  logits, inputs, outputs = (
    x.numpy() for x in Motif(config, tensors)(torch.tensor(ids))
  )
  other = np.stack([motif_reference.logits(config, arrays, row) for row in ids])
  heads = np.stack(
    [
      [motif_reference.attention(config, arrays, layer, x) for x in rows]
      for layer, rows in enumerate(inputs)
    ]
  )
  difference = max(np.abs(logits - other).max(), np.abs(outputs - heads).max())
  print(
    f"{name}: largest logit {np.abs(logits).max():.2f}, the two transcriptions differ by {difference:.1e}"
  )
  if not difference < 1e-11:
    raise SystemExit(f"{name}: the transcriptions disagree")
  return logits, inputs, outputs


def mistakes(config):
  """What a wrong converter would do: (a mistake's name, the change of the tensors, the change of the config)."""
  num_heads, num_groups, num_pairs, dim = sizes(config)

  def rows(part, order, axis=0):
    """Reorders the heads of a projection; `order` maps an array of their numbers to another."""

    def change(tensors):
      for name in [name for name in tensors if f".{part}.weight" in name]:
        numbers = np.arange(tensors[name].shape[axis]).reshape(-1, dim)
        index = numbers[order(np.arange(len(numbers)))].reshape(-1)
        tensors[name] = tensors[name].index_select(axis, torch.tensor(index))

    return change

  def set_to(suffix, function):
    def change(tensors):
      for name in [name for name in tensors if name.endswith(suffix)]:
        tensors[name] = function(tensors[name])

    return change

  def interleaved(tensors):
    """As if dimensions (2j, 2j + 1) rotated together."""
    for name in [
      name
      for name in tensors
      if ".q_proj.weight" in name or ".k_proj.weight" in name
    ]:
      tensors[name] = (
        tensors[name]
        .unflatten(0, (-1, dim // 2, 2))
        .transpose(1, 2)
        .flatten(0, 2)
      )

  def lambda_2_as_1(tensors):
    for name in [
      name for name in tensors if "lambda_q1" in name or "lambda_k1" in name
    ]:
      tensors[name[:-1] + "2"] = tensors[name]

  halves = lambda x: x.reshape(2, -1).T.reshape(-1)
  noise_first = lambda x: np.roll(x.reshape(num_groups, -1), 1, axis=1).reshape(
    -1
  )
  noise_last = lambda x: np.concatenate(
    [x[:-num_groups].reshape(num_groups, -1), x[-num_groups:, None]], axis=1
  ).reshape(-1)
  swapped = lambda x: x.reshape(-1, 2)[:, ::-1].reshape(-1)
  nothing = lambda tensors: None
  yield "noise head first in its group", rows("q_proj", noise_first), {}
  yield "all noise heads after all signal heads", rows("q_proj", noise_last), {}
  yield "k₁ and k₂ exchanged", rows("k_proj", swapped), {}
  yield "halves of values exchanged", rows("v_proj", swapped), {}
  if num_pairs > 1:
    yield "all k₁ before all k₂", rows("k_proj", halves), {}
    yield (
      "all first halves of values before all second ones",
      rows("v_proj", halves),
      {},
    )
    yield "columns of o_proj as (half, head)", rows("o_proj", halves, 1), {}
  yield "rotation of neighbours", interleaved, {}
  yield "λ's second exponential like the first", lambda_2_as_1, {}
  yield (
    "the schedule of λ_init without its offset",
    nothing,
    {"lambda_init_offset": 0},
  )
  yield "no gain in the head norm", set_to("subln.weight", torch.ones_like), {}
  yield (
    "PolyNorm's coefficients from the lowest power",
    set_to("act_fn.weight", lambda x: x.flip(0)),
    {},
  )
  yield "no bias in PolyNorm", set_to("act_fn.bias", torch.zeros_like), {}
  if config["attn_rms_norm_eps"] != config["rms_norm_eps"]:
    yield (
      "rms_norm_eps in the head norm",
      nothing,
      {"attn_rms_norm_eps": config["rms_norm_eps"]},
    )
  yield "θ of 10,000", nothing, {"rope_theta": 10000.0}


def write(name, config, tensors, ids, logits, inputs, outputs):
  directory = HERE / name
  directory.mkdir(exist_ok=True)
  (directory / "config.json").write_text(
    json.dumps(config, indent=2, sort_keys=True) + "\n"
  )
  if config["torch_dtype"] == "bfloat16":
    safetensors.torch.save_file(
      tensors, directory / "model.safetensors", metadata={"format": "pt"}
    )
  else:
    names = list(tensors)
    files = {
      tensor: f"model-{index * NUM_SHARDS // len(names) + 1:05}-of-{NUM_SHARDS:05}.safetensors"
      for index, tensor in enumerate(names)
    }
    for file in sorted(set(files.values())):
      part = {
        tensor: tensors[tensor] for tensor in names if files[tensor] == file
      }
      safetensors.torch.save_file(
        part, directory / file, metadata={"format": "pt"}
      )
    index = {
      "metadata": {
        "total_size": sum(
          x.numel() * x.element_size() for x in tensors.values()
        )
      },
      "weight_map": files,
    }
    (directory / "model.safetensors.index.json").write_text(
      json.dumps(index, indent=2, sort_keys=True) + "\n"
    )
  single = {
    "logits": logits,
    "attention_input": inputs,
    "attention_output": outputs,
  }
  np.savez_compressed(
    directory / "golden_logits.npz",
    input_ids=ids,
    **{key: value.astype(np.float32) for key, value in single.items()},
  )


def main():
  ids = np.random.default_rng(0).integers(0, COMMON["vocab_size"], (2, 13))
  for name, config in OTHERS.items():
    compare(name, config, make_tensors(config), ids)
  for name, config in GOLDEN.items():
    tensors = make_tensors(config)
    logits, inputs, outputs = compare(name, config, tensors, ids)
    write(name, config, tensors, ids, logits, inputs, outputs)
    for mistake, change, fields in mistakes(config):
      wrong = dict(tensors)
      change(wrong)
      difference = np.abs(
        Motif(config | fields, wrong)(torch.tensor(ids))[0].numpy() - logits
      ).max()
      print(f"  {mistake}: {difference:.1e}")
      if not difference > 1e-3:
        raise SystemExit(f"{name}: the logits do not show the mistake")


if __name__ == "__main__":
  main()
