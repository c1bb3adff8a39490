"""Hugging Face's DiffLlama: DIFF V1 with another order of sub-heads.

Source: `DiffLlamaForCausalLM` in
src/transformers/models/diffllama/modeling_diffllama.py of transformers.

Layout: a directory with config.json, safetensors files and tokenizer.json. The
tensors, with {} for the number of the layer, from 0, and the axes of
diffjax/parameters.py:

  model.embed_tokens.weight                          [N, E]
  model.layers.{}.input_layernorm.weight             [E]
  model.layers.{}.self_attn.q_proj.weight            [2HD, E]
  model.layers.{}.self_attn.k_proj.weight            [2KD, E]
  model.layers.{}.self_attn.v_proj.weight            [2KD, E]
  model.layers.{}.self_attn.o_proj.weight            [E, 2HD]
  model.layers.{}.self_attn.lambda_{q1,k1,q2,k2}     [D]
  model.layers.{}.post_attention_layernorm.weight    [E]
  model.layers.{}.mlp.{gate,up}_proj.weight          [F, E]
  model.layers.{}.mlp.down_proj.weight               [E, F]
  model.norm.weight                                  [E]
  lm_head.weight                                     [N, E]  only if not tied

- Query heads i and i + H are the signal and the noise of head i. Key heads i
  and i + K belong to key/value head i, and value heads i and i + K are the
  halves of its values.
- In config.json, num_attention_heads is 2H and num_key_value_heads is 2K.
- The head norm has no gain. Writing multiplies the rows of W_O by the gain of
  diffjax, and reading sets the gain to 1.

Rotary rows: both diffjax and transformers rotate the rows j and j + D/2 of a
sub-head, so no row is moved.

Not supported: λ_init other than the schedule's, a model without head norm,
windows, shared noise maps, and what hugging_face.py excludes for all models.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from diffjax.config import ModelConfig, UserError
from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory
from diffjax.interop.directory import write as write_directory
from diffjax.interop.layout import Layout, Model
from diffjax.interop.tokenizer import read_tokenizer, token_fields

_ENTRIES = (*hugging_face.entries("map"), *hugging_face.LAMBDAS)


def read(path: str) -> Model:
  """Reads a DiffLlama from a directory.

  Raises:
    UserError: if the directory is damaged, or the model is not supported.
  """
  directory = pathlib.Path(path)
  config = hugging_face.read_config(directory, "diffllama", maps=2)
  tokenizer = read_tokenizer(directory, config.vocab_size)
  params = make_layout(config).params(SafetensorsDirectory(directory))
  # DiffLlama's head norm has no gain.
  params["layers"]["attention"]["head_gain"] = np.ones(
    (config.num_layers, 2 * config.head_dim), np.float32
  )
  return Model(config, params, tokenizer)


def write(path: str, model: Model, dtype: str) -> None:
  """Writes a model as a DiffLlama, to a directory that transformers loads.

  Args:
    path: The directory. It is made if it does not exist.
    model: The model.
    dtype: The type of the tensors, "float32" or "bfloat16".

  Raises:
    UserError: if DiffLlama cannot represent the model, or the directory cannot
      be written.
  """
  config = model.config
  _check_attention(config)
  layout = make_layout(config)
  params = _fold_head_gain(model.params)
  stored_config = {
    "architectures": ["DiffLlamaForCausalLM"],
    "model_type": "diffllama",
    **hugging_face.make_config(config, maps=2),
    **token_fields(model.tokenizer),
    "dtype": dtype,
  }
  write_directory(
    pathlib.Path(path),
    stored_config,
    layout.tensors(params),
    model.tokenizer,
    dtype,
  )


def _check_attention(config: ModelConfig) -> None:
  """Raises UserError if DiffLlama's attention is not the model's."""
  if config.attention != "diff":
    raise UserError(
      "DiffLlama supports only attention = 'diff'; the model has"
      f" {config.attention!r}"
    )
  if not config.head_norm:
    raise UserError(
      "DiffLlama supports only head_norm = True; the model has False"
    )
  if config.lambda_init is not None:
    raise UserError(
      "DiffLlama supports only lambda_init = None, the schedule; the model has"
      f" {config.lambda_init}"
    )


def make_layout(config: ModelConfig) -> Layout:
  """Returns the layout of a DiffLlama model.

  Args:
    config: The config of the model.

  Raises:
    UserError: if DiffLlama cannot represent the model.
  """
  return Layout(
    _ENTRIES,
    config,
    tied_by=hugging_face.TIED_BY,
    supported=hugging_face.SUPPORTED,
  )


def _fold_head_gain(params: dict[str, Any]) -> dict[str, Any]:
  """Returns the parameters with W_O multiplied by the gain of the head norm.

  The head norm multiplies the outputs of each head by a gain, and W_O maps them
  to the width of the model. So the gain can be moved into the rows of W_O.
  """
  attention = dict(params["layers"]["attention"])
  # [layers, value width]
  gain = attention.pop("head_gain")
  # W_O is [layers, heads, value width, model width].
  attention["out"] = attention["out"] * gain[:, None, :, None]
  layers = {**params["layers"], "attention": attention}
  return {**params, "layers": layers}
