"""Hugging Face's Llama: a Transformer. It is only read.

`adapt.py` converts the model to one with differential attention.

Source: `LlamaForCausalLM` in src/transformers/models/llama/modeling_llama.py of
transformers.

Layout: a directory with config.json, safetensors files and tokenizer.json. The
tensors, with {} for the number of the layer, from 0, and the axes of
diffjax/parameters.py:

  model.embed_tokens.weight                          [N, E]
  model.layers.{}.input_layernorm.weight             [E]
  model.layers.{}.self_attn.q_proj.weight            [HD, E]
  model.layers.{}.self_attn.{k,v}_proj.weight        [KD, E]
  model.layers.{}.self_attn.o_proj.weight            [E, HD]
  model.layers.{}.post_attention_layernorm.weight    [E]
  model.layers.{}.mlp.{gate,up}_proj.weight          [F, E]
  model.layers.{}.mlp.down_proj.weight               [E, F]
  model.norm.weight                                  [E]
  lm_head.weight                                     [N, E]  only if not tied

Rotary rows: both diffjax and transformers rotate the rows j and j + D/2 of a
head, so no row is moved.

Not supported: windows, and what hugging_face.py excludes for all models.
"""

from __future__ import annotations

import dataclasses
import pathlib

from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory
from diffjax.interop.layout import Layout, Model
from diffjax.interop.tokenizer import read_tokenizer


def read(path: str) -> Model:
  """Reads a Llama from a directory.

  Raises:
    UserError: if the directory is damaged, or the model is not supported.
  """
  directory = pathlib.Path(path)
  config = hugging_face.read_config(directory, "llama", maps=1)
  config = dataclasses.replace(config, attention="softmax", head_norm=False)
  tokenizer = read_tokenizer(directory, config.vocab_size)
  layout = Layout(
    # A head of a Llama has one map, so the order of maps does not matter.
    hugging_face.entries("map"),
    config,
    tied_by=hugging_face.TIED_BY,
    supported=hugging_face.SUPPORTED,
  )
  params = layout.params(SafetensorsDirectory(directory))
  return Model(config, params, tokenizer)
