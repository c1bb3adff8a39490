"""Makes the golden checkpoints of Motif: random weights in its layout.

motif_tiny is like Motif-2.6B. motif_2_tiny and motif_2_tiny_gqa are like
Motif-2-12.7B. Needs PyTorch. Run from the root of the repository:

    python -m tests.interop.golden.make_motif

The logits come from a transcription in PyTorch, in float64, of the authors'
model in vLLM (MotifTechnologies/vllm, vllm/model_executor/models/motif.py at
477e4d7, and vllm/v1/attention/backends/grouped_diff_attn.py at 2b73efa). The
authors' own modeling_motif.py was not available.

The script compares this transcription with tests/interop/motif_reference.py,
which is written from the MLX port, for these and for other shapes. It stops if
they differ. It then prints how much each mistake of a converter would change
the logits, and stops if a mistake does not change them.

The tensors are the same on every run, bit for bit.
"""

import json
import math
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

from tests.interop import motif_reference

HERE = pathlib.Path(__file__).parent
NUM_SHARDS = 3
POLY_NORM_EPS = 1e-6

# The largest difference of the two transcriptions, which are both in float64.
MAX_DIFFERENCE = 1e-11
# The smallest change of the logits by a mistake.
MIN_CHANGE = 1e-3

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

# Fields and values are as in the published configs, as far as they are known.
# Sizes are small, and token ids are within the vocabulary.
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
# Like Motif-2.6B: pairs of heads, no num_noise_heads, no head_dim. The ε of the
# norms are far apart, so that an exchange changes the logits.
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
# Like Motif-2-12.7B: groups of 4 signal heads and 1 noise head, and one pair of
# key/value heads for each group. A converter to GGUF finds grouped_ratio and
# lambda_init = 1 in its config.json. The model reads neither.
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
# Four groups of 2 + 1 heads share two pairs of key/value heads.
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
# Only compared, not written: shared keys and values without groups, a single
# group, the heads of the published models, and biases.
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


class Sizes(NamedTuple):
  """The numbers of heads of a model, and their size.

  Attributes:
    num_heads: the number of query heads, signal and noise heads.
    num_groups: the number of groups. Each has one noise head.
    num_pairs: the number of pairs of key/value heads.
    head_dim: the size of a head.
  """

  num_heads: int
  num_groups: int
  num_pairs: int
  head_dim: int


def sizes(config: Config) -> Sizes:
  """Returns the numbers of heads of a config."""
  num_heads = config["num_attention_heads"]
  return Sizes(
    num_heads=num_heads,
    num_groups=config.get("num_noise_heads", num_heads // 2),
    num_pairs=config["num_key_value_heads"] // 2,
    head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
  )


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a layer's tensors. Matrices are [outputs, inputs]."""
  embed_dim = config["hidden_size"]
  ffn_dim = config["intermediate_size"]
  num_heads, num_groups, num_pairs, head_dim = sizes(config)
  num_signal_heads = num_heads - num_groups
  matrices = {
    "self_attn.q_proj": (num_heads * head_dim, embed_dim),
    "self_attn.k_proj": (2 * num_pairs * head_dim, embed_dim),
    "self_attn.v_proj": (2 * num_pairs * head_dim, embed_dim),
    "self_attn.o_proj": (embed_dim, 2 * num_signal_heads * head_dim),
    "mlp.gate_proj": (ffn_dim, embed_dim),
    "mlp.up_proj": (ffn_dim, embed_dim),
    "mlp.down_proj": (embed_dim, ffn_dim),
  }
  shapes: dict[str, tuple[int, ...]] = {}
  for name, shape in matrices.items():
    shapes[f"{name}.weight"] = shape
  if config["use_bias"]:
    for name, shape in matrices.items():
      shapes[f"{name}.bias"] = shape[:1]
  for name in ("q1", "k1", "q2", "k2"):
    shapes[f"self_attn.lambda_{name}"] = (head_dim,)
  shapes["self_attn.subln.weight"] = (2 * head_dim,)
  shapes["mlp.act_fn.weight"] = (3,)
  shapes["mlp.act_fn.bias"] = (1,)
  shapes["input_layernorm.weight"] = (embed_dim,)
  shapes["post_attention_layernorm.weight"] = (embed_dim,)
  return shapes


def model_shapes(config: Config) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of all tensors of a checkpoint."""
  embed_dim = config["hidden_size"]
  vocab_size = config["vocab_size"]
  shapes: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (vocab_size, embed_dim)
  }
  for layer in range(config["num_hidden_layers"]):
    for name, shape in layer_shapes(config).items():
      shapes[f"model.layers.{layer}.{name}"] = shape
  shapes["model.norm.weight"] = (embed_dim,)
  if not config["tie_word_embeddings"]:
    shapes["lm_head.weight"] = (vocab_size, embed_dim)
  return shapes


def draw_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns random values of a tensor.

  Gains, λ and the coefficients of PolyNorm are far from their initial values.
  """
  noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
  if name.endswith(("norm.weight", "subln.weight")):
    return 1 + 0.3 * noise
  if "lambda" in name or "act_fn" in name or name.endswith(".bias"):
    return 0.4 * noise
  if "embed_tokens" in name or "lm_head" in name:
    return 0.08 * noise
  num_inputs = shape[1]
  # Larger queries and keys make the attention less uniform.
  gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
  return gain * noise / math.sqrt(num_inputs)


def make_tensors(config: Config) -> Tensors:
  """Returns random tensors in the type of the checkpoint."""
  dtype = getattr(torch, config["torch_dtype"])
  tensors = {}
  for name, shape in model_shapes(config).items():
    tensors[name] = torch.tensor(draw_tensor(name, shape)).to(dtype)
  return tensors


class Outputs(NamedTuple):
  """What a model computes.

  Attributes:
    logits: of shape [rows, tokens, vocabulary].
    attention_inputs: the inputs of self_attn of each layer, of shape
      [layers, rows, tokens, width].
    attention_outputs: its outputs, of the same shape.
  """

  logits: np.ndarray
  attention_inputs: np.ndarray
  attention_outputs: np.ndarray


class Motif:
  """The model of vLLM's code, in float64.

  The heads are fused. The attention has four calls: the signal and the noise
  heads, each with the first and the second half of the values.
  """

  def __init__(self, config: Config, tensors: Tensors):
    self.config = config
    self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
    self.sizes = sizes(config)

  def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
    weight = self.tensors[f"{name}.weight"]
    bias = self.tensors.get(f"{name}.bias")
    return torch.nn.functional.linear(x, weight, bias)

  def norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * self.tensors[f"{name}.weight"]

  def project_heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a projection of shape [rows, tokens, heads, D]."""
    return self.linear(x, name).unflatten(-1, (-1, self.sizes.head_dim))

  def rope(self, x: torch.Tensor) -> torch.Tensor:
    """Rotates x [rows, tokens, heads, D] in halves ("neox style")."""
    head_dim = self.sizes.head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = 1.0 / self.config["rope_theta"] ** exponents
    positions = torch.arange(x.shape[1], dtype=torch.float64)
    angles = positions[:, None, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    new_first = first * angles.cos() - second * angles.sin()
    new_second = second * angles.cos() + first * angles.sin()
    return torch.cat([new_first, new_second], dim=-1)

  def attend(
    self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
  ) -> torch.Tensor:
    """Returns causal attention. Arguments are [rows, tokens, heads, D].

    As in FlashAttention, a key head serves consecutive query heads.
    """
    heads_per_key = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(heads_per_key, dim=2)
    v = v.repeat_interleave(heads_per_key, dim=2)
    output = torch.nn.functional.scaled_dot_product_attention(
      q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    return output.transpose(1, 2)

  def lambda_init(self, layer: int) -> float:
    offset = self.config.get("lambda_init_offset", 1)
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - offset))

  def lambda_full(self, layer: int) -> torch.Tensor:
    prefix = f"model.layers.{layer}.self_attn.lambda_"
    signal_products = self.tensors[f"{prefix}q1"] * self.tensors[f"{prefix}k1"]
    noise_products = self.tensors[f"{prefix}q2"] * self.tensors[f"{prefix}k2"]
    signal = torch.exp(torch.sum(signal_products))
    noise = torch.exp(torch.sum(noise_products))
    return signal - noise + self.lambda_init(layer)

  def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
    """Returns the output of a layer's self_attn."""
    name = f"model.layers.{layer}.self_attn"
    _, num_groups, num_pairs, _ = self.sizes
    q = self.rope(self.project_heads(x, f"{name}.q_proj"))
    k = self.rope(self.project_heads(x, f"{name}.k_proj"))
    v = self.project_heads(x, f"{name}.v_proj")

    # In each group, the noise head is the last one.
    groups = q.unflatten(2, (num_groups, -1))
    signal_q = groups[:, :, :, :-1].flatten(2, 3)
    noise_q = groups[:, :, :, -1]
    signal_k, noise_k = k.unflatten(2, (num_pairs, 2)).unbind(3)
    v1, v2 = v.unflatten(2, (num_pairs, 2)).unbind(3)

    signal_halves = [
      self.attend(signal_q, signal_k, v1),
      self.attend(signal_q, signal_k, v2),
    ]
    noise_halves = [
      self.attend(noise_q, noise_k, v1),
      self.attend(noise_q, noise_k, v2),
    ]
    signal = torch.cat(signal_halves, dim=-1)
    noise = torch.cat(noise_halves, dim=-1)
    signals_per_noise = signal.shape[2] // noise.shape[2]
    noise = noise.repeat_interleave(signals_per_noise, dim=2)

    difference = signal - self.lambda_full(layer) * noise
    normed = self.norm(
      difference, f"{name}.subln", self.config["attn_rms_norm_eps"]
    )
    heads = normed * (1 - self.lambda_init(layer))
    return self.linear(heads.flatten(2), f"{name}.o_proj")

  def poly_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
    def normalize(power: torch.Tensor) -> torch.Tensor:
      mean_square = power.pow(2).sum(-1, keepdim=True) / power.shape[-1]
      return power / torch.sqrt(mean_square + POLY_NORM_EPS)

    square = x.pow(2)
    cube = square * x
    weight = self.tensors[f"{name}.weight"]
    return (
      weight[0] * normalize(cube)
      + weight[1] * normalize(square)
      + weight[2] * normalize(x)
      + self.tensors[f"{name}.bias"]
    )

  def feed_forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
    """Returns the output of a layer's mlp."""
    name = f"model.layers.{layer}.mlp"
    gate = self.linear(x, f"{name}.gate_proj")
    activated = self.poly_norm(gate, f"{name}.act_fn")
    up = self.linear(x, f"{name}.up_proj")
    return self.linear(activated * up, f"{name}.down_proj")

  def __call__(self, ids: np.ndarray) -> Outputs:
    """Returns the outputs for token ids of shape [rows, tokens]."""
    eps = self.config["rms_norm_eps"]
    x = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
    inputs = []
    outputs = []
    for layer in range(self.config["num_hidden_layers"]):
      name = f"model.layers.{layer}"
      attention_input = self.norm(x, f"{name}.input_layernorm", eps)
      attention_output = self.attention(attention_input, layer)
      inputs.append(attention_input)
      outputs.append(attention_output)
      x = x + attention_output
      normed = self.norm(x, f"{name}.post_attention_layernorm", eps)
      x = x + self.feed_forward(normed, layer)

    hidden = self.norm(x, "model.norm", eps)
    if self.config["tie_word_embeddings"]:
      unembedding = self.tensors["model.embed_tokens.weight"]
    else:
      unembedding = self.tensors["lm_head.weight"]
    logits = hidden @ unembedding.T
    return Outputs(
      logits.numpy(), torch.stack(inputs).numpy(), torch.stack(outputs).numpy()
    )


def reference_outputs(
  config: Config, tensors: Tensors, ids: np.ndarray, inputs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the logits and the attention outputs of motif_reference.py.

  Args:
    config: the config.json.
    tensors: the tensors of the checkpoint.
    ids: token ids of shape [rows, tokens].
    inputs: the inputs of self_attn, of shape [layers, rows, tokens, width].
  """
  arrays = {}
  for name, tensor in tensors.items():
    arrays[name] = tensor.double().numpy()
  logits = []
  for row in ids:
    logits.append(motif_reference.logits(config, arrays, row))
  outputs = np.empty_like(inputs)
  for layer, rows in enumerate(inputs):
    for index, x in enumerate(rows):
      outputs[layer, index] = motif_reference.attention(
        config, arrays, layer, x
      )
  return np.stack(logits), outputs


def compare(
  name: str, config: Config, tensors: Tensors, ids: np.ndarray
) -> Outputs:
  """Returns the outputs. Exits if the two transcriptions differ."""
  outputs = Motif(config, tensors)(ids)
  other_logits, other_attention = reference_outputs(
    config, tensors, ids, outputs.attention_inputs
  )
  logits_difference = np.abs(outputs.logits - other_logits).max()
  attention_difference = np.abs(
    outputs.attention_outputs - other_attention
  ).max()
  difference = max(logits_difference, attention_difference)
  print(
    f"{name}: largest logit {np.abs(outputs.logits).max():.2f}, the two"
    f" transcriptions differ by {difference:.1e}"
  )
  # Also true for NaN.
  if not difference < MAX_DIFFERENCE:
    raise SystemExit(f"{name}: the transcriptions differ")
  return outputs


class Mistake(NamedTuple):
  """A mistake that a converter could make.

  Attributes:
    name: what is wrong.
    tensors: the tensors that it would read.
    fields: the fields of the config that it would read.
  """

  name: str
  tensors: Tensors
  fields: Config


def reorder_heads(
  tensors: Tensors, projection: str, order: np.ndarray, axis: int = 0
) -> Tensors:
  """Returns tensors whose heads have another order in each layer.

  Args:
    tensors: the tensors of a checkpoint.
    projection: the name of the projection, such as "q_proj".
    order: the old number of the head at each new position.
    axis: the axis of the heads.
  """
  changed = dict(tensors)
  for name, tensor in tensors.items():
    if f".{projection}.weight" in name:
      index = np.arange(tensor.shape[axis]).reshape(len(order), -1)
      new_index = torch.tensor(index[order].reshape(-1))
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


def head_mistakes(config: Config, tensors: Tensors) -> list[Mistake]:
  """Returns mistakes in the order of heads."""
  num_heads, num_groups, num_pairs, _ = sizes(config)
  num_signals = num_heads - num_groups
  heads = np.arange(num_heads)
  noise_first = np.roll(heads.reshape(num_groups, -1), 1, axis=1).reshape(-1)
  signal_groups = heads[:num_signals].reshape(num_groups, -1)
  noise_heads = heads[num_signals:, None]
  noise_last = np.concatenate([signal_groups, noise_heads], axis=1).reshape(-1)
  exchanged = exchange_pairs(2 * num_pairs)
  halves = even_before_odd(2 * num_pairs)
  output_halves = even_before_odd(2 * num_signals)

  mistakes = [
    Mistake(
      "noise head first in its group",
      reorder_heads(tensors, "q_proj", noise_first),
      {},
    ),
    Mistake(
      "all noise heads after all signal heads",
      reorder_heads(tensors, "q_proj", noise_last),
      {},
    ),
    Mistake(
      "k₁ and k₂ exchanged", reorder_heads(tensors, "k_proj", exchanged), {}
    ),
    Mistake(
      "halves of values exchanged",
      reorder_heads(tensors, "v_proj", exchanged),
      {},
    ),
  ]
  if num_pairs > 1:
    mistakes += [
      Mistake(
        "all k₁ before all k₂", reorder_heads(tensors, "k_proj", halves), {}
      ),
      Mistake(
        "all first halves of values before all second ones",
        reorder_heads(tensors, "v_proj", halves),
        {},
      ),
      Mistake(
        "columns of o_proj as (half, head)",
        reorder_heads(tensors, "o_proj", output_halves, axis=1),
        {},
      ),
    ]
  return mistakes


def rotate_neighbours(tensors: Tensors, head_dim: int) -> Tensors:
  """Returns tensors as if the dimensions (2j, 2j + 1) were rotated together."""

  def change(tensor: torch.Tensor) -> torch.Tensor:
    pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)

  changed = change_tensors(tensors, ".q_proj.weight", change)
  return change_tensors(changed, ".k_proj.weight", change)


def repeat_first_lambda(tensors: Tensors) -> Tensors:
  """Returns tensors whose second λ vectors equal the first ones."""
  changed = dict(tensors)
  for name in tensors:
    if name.endswith(("lambda_q2", "lambda_k2")):
      changed[name] = tensors[name.removesuffix("2") + "1"]
  return changed


def reverse(tensor: torch.Tensor) -> torch.Tensor:
  return tensor.flip(0)


def make_mistakes(config: Config, tensors: Tensors) -> list[Mistake]:
  """Returns the mistakes that a converter could make."""
  mistakes = head_mistakes(config, tensors)
  mistakes += [
    Mistake(
      "rotation of neighbours",
      rotate_neighbours(tensors, sizes(config).head_dim),
      {},
    ),
    Mistake(
      "λ's second exponential like the first", repeat_first_lambda(tensors), {}
    ),
    Mistake(
      "the schedule of λ_init without its offset",
      tensors,
      {"lambda_init_offset": 0},
    ),
    Mistake(
      "no gain in the head norm",
      change_tensors(tensors, "subln.weight", torch.ones_like),
      {},
    ),
    Mistake(
      "PolyNorm's coefficients from the lowest power",
      change_tensors(tensors, "act_fn.weight", reverse),
      {},
    ),
    Mistake(
      "no bias in PolyNorm",
      change_tensors(tensors, "act_fn.bias", torch.zeros_like),
      {},
    ),
    Mistake("θ of 10,000", tensors, {"rope_theta": 10000.0}),
  ]
  eps = config["rms_norm_eps"]
  if config["attn_rms_norm_eps"] != eps:
    mistakes.append(
      Mistake(
        "rms_norm_eps in the head norm", tensors, {"attn_rms_norm_eps": eps}
      )
    )
  return mistakes


def check_mistakes(
  name: str,
  config: Config,
  tensors: Tensors,
  ids: np.ndarray,
  logits: np.ndarray,
) -> None:
  """Exits if a mistake does not change the logits."""
  for mistake in make_mistakes(config, tensors):
    wrong = Motif(config | mistake.fields, mistake.tensors)(ids)
    change = np.abs(wrong.logits - logits).max()
    print(f"  {mistake.name}: {change:.1e}")
    if not change > MIN_CHANGE:
      raise SystemExit(f"{name}: the logits do not show the mistake")


def write_json(path: pathlib.Path, content: Any) -> None:
  path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_shards(directory: pathlib.Path, tensors: Tensors) -> None:
  """Writes tensors to NUM_SHARDS files, with an index."""
  weight_map = {}
  for index, name in enumerate(tensors):
    shard = index * NUM_SHARDS // len(tensors) + 1
    weight_map[name] = f"model-{shard:05}-of-{NUM_SHARDS:05}.safetensors"
  for file_name in sorted(set(weight_map.values())):
    part = {}
    for name, tensor in tensors.items():
      if weight_map[name] == file_name:
        part[name] = tensor
    safetensors.torch.save_file(
      part, directory / file_name, metadata={"format": "pt"}
    )
  sizes_in_bytes = [tensor.nbytes for tensor in tensors.values()]
  index_content = {
    "metadata": {"total_size": sum(sizes_in_bytes)},
    "weight_map": weight_map,
  }
  write_json(directory / "model.safetensors.index.json", index_content)


def write_checkpoint(
  name: str, config: Config, tensors: Tensors, ids: np.ndarray, outputs: Outputs
) -> None:
  """Writes a golden checkpoint, and its outputs in float32."""
  directory = HERE / name
  directory.mkdir(exist_ok=True)
  write_json(directory / "config.json", config)
  if config["torch_dtype"] == "bfloat16":
    safetensors.torch.save_file(
      tensors, directory / "model.safetensors", metadata={"format": "pt"}
    )
  else:
    write_shards(directory, tensors)
  np.savez_compressed(
    directory / "golden_logits.npz",
    input_ids=ids,
    logits=outputs.logits.astype(np.float32),
    attention_input=outputs.attention_inputs.astype(np.float32),
    attention_output=outputs.attention_outputs.astype(np.float32),
  )


def main() -> None:
  ids = np.random.default_rng(0).integers(0, COMMON["vocab_size"], (2, 13))
  for name, config in OTHERS.items():
    compare(name, config, make_tensors(config), ids)
  for name, config in GOLDEN.items():
    tensors = make_tensors(config)
    outputs = compare(name, config, tensors, ids)
    write_checkpoint(name, config, tensors, ids, outputs)
    check_mistakes(name, config, tensors, ids, outputs.logits)


if __name__ == "__main__":
  main()
