"""Motif-2.6B and Motif-2-12.7B: DIFF V1 with PolyNorm, and shared noise maps.

Sources: `MotifForCausalLM` in vllm/model_executor/models/motif.py of
MotifTechnologies/vllm, and a public MLX port. They agree. The authors' own
modeling_motif.py was not available. Shared noise maps are called grouped
differential attention (arXiv:2510.06949).

Layout: a directory with config.json, safetensors files and tokenizer.json. The
tensors, with {} for the number of the layer, from 0, and the axes of
diffjax/parameters.py: H counts signal heads, and Q noise heads.

  model.embed_tokens.weight                          [N, E]
  model.layers.{}.input_layernorm.weight             [E]
  model.layers.{}.self_attn.q_proj.weight            [(H + Q)D, E]
  model.layers.{}.self_attn.k_proj.weight            [2KD, E]
  model.layers.{}.self_attn.v_proj.weight            [2KD, E]
  model.layers.{}.self_attn.o_proj.weight            [E, 2HD]
  model.layers.{}.self_attn.lambda_{q1,k1,q2,k2}     [D]
  model.layers.{}.self_attn.subln.weight             [2D]    head norm
  model.layers.{}.post_attention_layernorm.weight    [E]
  model.layers.{}.mlp.{gate,up}_proj.weight          [F, E]
  model.layers.{}.mlp.act_fn.weight                  [3]     PolyNorm
  model.layers.{}.mlp.act_fn.bias                    [1]     PolyNorm
  model.layers.{}.mlp.down_proj.weight               [E, F]
  model.norm.weight                                  [E]
  lm_head.weight                                     [N, E]  only if not tied

- Query heads are in Q groups: the H/Q signal heads of a group, then its noise
  head. Without num_noise_heads in config.json, heads 2i and 2i + 1 are a group.
- Key heads 2i and 2i + 1 are the signal and noise keys of key/value head i.
  Value heads 2i and 2i + 1 are the two halves of its values.
- In config.json, num_attention_heads is H + Q and num_key_value_heads is 2K.
- Layers are counted from 0. λ_init of layer l is 0.8 − 0.6·exp(−0.3·(l − 1)),
  the paper's value for layer l − 1.

Rotary rows: both diffjax and Motif rotate the rows j and j + D/2 of a head, so
no row is moved.

Not supported:
- biases, windows, attention that is not causal, k_ratio ≠ 1, and activations
  other than PolyNorm.
- what hugging_face.py excludes for all models.
- Motif-3, which has another architecture.

Written directories do not contain the authors' modeling code.
"""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

from diffjax.config import ModelConfig, UserError
from diffjax.interop import hugging_face
from diffjax.interop.directory import (
  SafetensorsDirectory,
  checked_config,
)
from diffjax.interop.directory import write as write_directory
from diffjax.interop.layout import ANY_VALUE, Entry, Layout, Model
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

# The fields of config.model that have the same value in all of these models.
_CONSTANT_FIELDS = {
  "attention": "diff",
  "head_norm": True,
  "lambda_init_offset": 1,
  "ffn_activation": "poly_norm",
}
# The fields of config.model that Motif can represent, and their values.
_SUPPORTED = {
  **hugging_face.SUPPORTED,
  **_CONSTANT_FIELDS,
  "lambda_init": None,
  "num_noise_heads": ANY_VALUE,
  "head_norm_eps": ANY_VALUE,
}
_MODEL_TYPES = ("Motif", "motif")

# Fields of config.json that may be missing, and their only supported values.
_SUPPORTED_VALUES = {
  "hidden_act": "poly_norm",
  "use_bias": False,
  "attention_bias": False,
  "qkv_bias": False,
  "is_causal": True,
  "use_sliding_window": False,
  "k_ratio": 1,
}
# Fields of config.json without effect: λ_init follows from the number of the
# layer, and there are no windows, because use_sliding_window is false.
_IGNORED_FIELDS = ("lambda_init", "sliding_window", "max_window_layers")
_KNOWN_FIELDS = (
  *_SUPPORTED_VALUES,
  *_IGNORED_FIELDS,
  "num_noise_heads",
  "grouped_ratio",
  "attn_rms_norm_eps",
)


class _QueryHeads(NamedTuple):
  """The numbers of query heads in a config.json.

  Attributes:
    num_signal: The number of heads that compute a signal map.
    num_noise: The number of heads that compute a noise map. The signal heads of
      a group share one.
  """

  num_signal: int
  num_noise: int


def read(path: str) -> Model:
  """Reads a Motif model from a directory.

  Raises:
    UserError: if the directory is damaged, or the model is not supported.
  """
  directory = pathlib.Path(path)
  config = read_config(directory)
  tokenizer = read_tokenizer(directory, config.vocab_size)
  params = make_layout(config).params(SafetensorsDirectory(directory))
  return Model(config, params, tokenizer)


def write(path: str, model: Model, dtype: str) -> None:
  """Writes a model to a directory as a Motif model.

  Args:
    path: The directory. It is made if it does not exist.
    model: The model.
    dtype: The type of the tensors, "float32" or "bfloat16".

  Raises:
    UserError: if Motif cannot represent the model, or the directory cannot be
      written.
  """
  layout = make_layout(model.config)
  write_directory(
    pathlib.Path(path),
    _make_config(model, dtype),
    layout.tensors(model.params),
    model.tokenizer,
    dtype,
  )


def read_config(directory: pathlib.Path) -> ModelConfig:
  """Returns the config of the model that a config.json describes.

  Args:
    directory: The directory of the config.json.

  Raises:
    UserError: if the file is damaged, or the model is not supported.
  """
  stored_config = hugging_face.read_config_json(
    directory, _MODEL_TYPES, _KNOWN_FIELDS
  )
  stored_config.check_values(_SUPPORTED_VALUES)
  heads = _read_query_heads(stored_config)

  num_kv_heads = heads.num_signal
  if stored_config.get("num_key_value_heads"):
    # The file counts the signal key and the noise key of a head separately.
    stored_kv_heads = stored_config.get_integer(
      "num_key_value_heads", multiple_of=2
    )
    num_kv_heads = stored_kv_heads // 2
  head_dim = stored_config.get("head_dim")
  if not head_dim:
    stored_heads = heads.num_signal + heads.num_noise
    embed_dim = stored_config.get_integer(
      "hidden_size", multiple_of=stored_heads
    )
    head_dim = embed_dim // stored_heads

  fields = hugging_face.shared_fields(stored_config)
  fields.update(_CONSTANT_FIELDS)
  fields["num_heads"] = heads.num_signal
  if heads.num_noise != heads.num_signal:
    fields["num_noise_heads"] = heads.num_noise
  fields["num_kv_heads"] = num_kv_heads
  fields["head_dim"] = head_dim
  fields["head_norm_eps"] = stored_config.get_required("attn_rms_norm_eps")
  return checked_config(stored_config.path, fields)


def _read_query_heads(stored_config: hugging_face.StoredConfig) -> _QueryHeads:
  """Returns the numbers of signal and noise heads in a config.json.

  num_attention_heads is their sum. If num_noise_heads is missing, each signal
  head has a noise head of its own.

  Raises:
    UserError: if a number is not valid, or the signal heads cannot share the
      noise heads evenly.
  """
  if stored_config.get("num_noise_heads") is None:
    num_heads = stored_config.get_integer("num_attention_heads", multiple_of=2)
    return _QueryHeads(num_signal=num_heads // 2, num_noise=num_heads // 2)

  num_heads = stored_config.get_integer("num_attention_heads")
  num_noise = stored_config.get_integer("num_noise_heads")
  if num_heads % num_noise != 0 or num_heads == num_noise:
    raise UserError(
      f"{stored_config.path} has num_noise_heads = {num_noise}: it must divide"
      f" num_attention_heads = {num_heads}, and be less"
    )
  num_signal = num_heads - num_noise
  stored_config.check_values({"grouped_ratio": num_signal // num_noise})
  return _QueryHeads(num_signal, num_noise)


def _make_config(model: Model, dtype: str) -> dict[str, Any]:
  """Returns the content of the config.json of a model.

  Args:
    model: The model.
    dtype: The type of the written tensors.
  """
  config = model.config
  stored_config: dict[str, Any] = {
    "architectures": ["MotifForCausalLM"],
    "model_type": _MODEL_TYPES[0],
    **hugging_face.make_config(config, maps=2),
  }
  num_noise = config.num_noise_heads
  # Without shared noise maps, each head has a signal and a noise map, and
  # num_attention_heads is already correct.
  if num_noise is not None:
    stored_config["num_attention_heads"] = config.num_heads + num_noise
    stored_config["num_noise_heads"] = num_noise
    stored_config["k_ratio"] = 1
    stored_config["grouped_ratio"] = config.num_heads // num_noise
  head_norm_eps = config.head_norm_eps
  if head_norm_eps is None:
    head_norm_eps = config.norm_eps
  stored_config["hidden_act"] = "poly_norm"
  stored_config["attn_rms_norm_eps"] = head_norm_eps
  stored_config["use_bias"] = False
  stored_config.update(token_fields(model.tokenizer))
  stored_config["torch_dtype"] = dtype
  return stored_config


def make_layout(config: ModelConfig) -> Layout:
  """Returns the layout of a Motif model.

  Args:
    config: The config of the model.

  Raises:
    UserError: if Motif cannot represent the model.
  """
  return Layout(
    _ENTRIES, config, tied_by=hugging_face.TIED_BY, supported=_SUPPORTED
  )
