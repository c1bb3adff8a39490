"""Motif-2.6B and Motif-2-12.7B, DIFF V1 whose heads may share noise maps (grouped differential attention, arXiv:2510.06949).

Their query heads are in groups, signal heads and then one noise head; the keys and values of two heads belong together, the keys of signal
and noise, the halves of values. Without num_noise_heads, heads 2i and 2i + 1 are a group. A layer's λ_init is what the paper gives the
layer before it. Written from the public code of vLLM (MotifTechnologies/vllm, models/motif.py) and of an MLX port, which agree.
"""

from __future__ import annotations

import pathlib

from diffjax.config import ModelConfig, UserError
from diffjax.interop import hugging_face
from diffjax.interop.directory import (
  SafetensorsDirectory,
  checked_config,
)
from diffjax.interop.directory import write as write_directory
from diffjax.interop.layout import Entry, Layout, Model
from diffjax.interop.tokenizer import read_tokenizer, token_fields

_ENTRIES = (
  *hugging_face.entries("head"),
  *hugging_face.LAMBDAS,
  Entry(
    "layers/attention/head_gain",
    "model.layers.{}.self_attn.subln.weight",
    "V = V",
  ),
  Entry(
    "layers/ffn/poly_weights", "model.layers.{}.mlp.act_fn.weight", "W = W"
  ),
  Entry("layers/ffn/poly_constant", "model.layers.{}.mlp.act_fn.bias", " = 1"),
)

# What is so in all of these models, by our config's fields.
_ALWAYS = {
  "attention": "diff",
  "head_norm": True,
  "lambda_init_offset": 1,
  "ffn_activation": "poly_norm",
}
_SAYS = (
  hugging_face.SUPPORTED
  | _ALWAYS
  | {"lambda_init": None, "num_noise_heads": ..., "head_norm_eps": ...}
)
_MODEL_TYPES = ("Motif", "motif")

# Read here, or without effect: λ_init is the schedule's whatever lambda_init says, and use_sliding_window must be false.
_KNOWN = (
  "num_noise_heads",
  "k_ratio",
  "grouped_ratio",
  "attn_rms_norm_eps",
  "use_bias",
  "attention_bias",
  "qkv_bias",
  "is_causal",
  "lambda_init",
  "use_sliding_window",
  "sliding_window",
  "max_window_layers",
)


def read(path: str) -> Model:
  """Reads a directory as these models are published in.

  Raises:
    UserError: if it is damaged, or holds a model that diffjax does not support.
  """
  directory = pathlib.Path(path)
  config = _read_config(directory)
  tokenizer = read_tokenizer(directory, config.vocab_size)
  return Model(
    config, _layout(config).params(SafetensorsDirectory(directory)), tokenizer
  )


def _read_config(directory: pathlib.Path) -> ModelConfig:
  path = directory / "config.json"
  config = hugging_face.read_config_json(directory, _MODEL_TYPES, _KNOWN)
  fixed = dict(
    hidden_act="poly_norm",
    use_bias=False,
    attention_bias=False,
    qkv_bias=False,
    is_causal=True,
    use_sliding_window=False,
  )
  hugging_face.check_values(path, config, **fixed, k_ratio=1)
  maps = hugging_face.divide_field(path, config, "num_attention_heads", 1)
  noise = config.get("num_noise_heads")
  if noise is None:
    heads = hugging_face.divide_field(path, config, "num_attention_heads", 2)
  else:
    noise = hugging_face.divide_field(path, config, "num_noise_heads", 1)
    if maps % noise or maps == noise:
      raise UserError(
        f"{path} has num_noise_heads = {noise}: it must divide num_attention_heads = {maps}, and be less"
      )
    heads = maps - noise
    hugging_face.check_values(path, config, grouped_ratio=heads // noise)
  fields = {
    "num_heads": heads,
    "num_noise_heads": None if noise == heads else noise,
    "num_kv_heads": hugging_face.divide_field(
      path, config, "num_key_value_heads", 2
    )
    if config.get("num_key_value_heads")
    else heads,
    "head_dim": config.get("head_dim")
    or hugging_face.divide_field(path, config, "hidden_size", maps),
    "head_norm_eps": hugging_face.required_field(
      path, config, "attn_rms_norm_eps"
    ),
  }
  return checked_config(
    path, hugging_face.shared_fields(path, config) | fields | _ALWAYS
  )


def write(path: str, model: Model, dtype: str) -> None:
  """Writes a directory as these models are published in, without their code.

  Raises:
    UserError: if this layout cannot hold the model, or the directory cannot be written.
  """
  config, layout = model.config, _layout(model.config)
  noise = config.num_noise_heads
  description = {
    "architectures": ["MotifForCausalLM"],
    "model_type": _MODEL_TYPES[0],
    **hugging_face.make_config(config, maps=2),
    "num_attention_heads": config.num_heads + (noise or config.num_heads),
    **(
      {}
      if noise is None
      else {
        "num_noise_heads": noise,
        "k_ratio": 1,
        "grouped_ratio": config.num_heads // noise,
      }
    ),
    "hidden_act": "poly_norm",
    "attn_rms_norm_eps": config.head_norm_eps or config.norm_eps,
    "use_bias": False,
    **token_fields(model.tokenizer),
    "torch_dtype": dtype,
  }
  write_directory(
    pathlib.Path(path),
    description,
    layout.shapes(),
    lambda name: layout.tensor(model.params, name),
    model.tokenizer,
    dtype,
  )


def _layout(config: ModelConfig) -> Layout:
  return Layout(_ENTRIES, config, tied_by=hugging_face.TIED_BY, supported=_SAYS)
