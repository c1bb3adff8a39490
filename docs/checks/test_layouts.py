"""The docstring of a layout lists the tensors that its code reads and writes.

A line of such a docstring has the name of a tensor, the version for which it
exists if there are several, and its shape:

  layers.{}.self_attn.o_proj.weight  V2  [E, HD]
"""

import json
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diffjax.config import ModelConfig
from diffjax.data.tokenizer import load_tokenizer
from diffjax.interop import diffllama, llama, motif, phi_flash, unilm
from diffjax.interop.layout import Model
from diffjax.interop.tokenizer import write_tokenizer
from diffjax.model.decoder import Decoder
from diffjax.model.flops import parameter_count
from tests.harness import ROOT
from tests.harness.parameters import parameters

Shapes = dict[str, tuple[int, ...]]

PHI_FLASH = ROOT / "tests/interop/golden/phi_flash_tiny"
# A line of a docstring: name, version and shape of a tensor.
TENSOR_LINE = re.compile(
  r"  (?P<name>\S+)\s+(?:(?P<version>V[12])\s+)?\[(?P<shape>[^\]]+)\]"
)


def documented_shapes(
  docstring: str, sizes: dict[str, int], version: str = ""
) -> Shapes:
  """Returns the shape of each tensor of a checkpoint that a docstring lists.

  Of the layers' tensors, it returns those of layer 0. A line of the docstring
  has a name, maybe a version, and a shape:

    layers.{}.self_attn.o_proj.weight  V2  [E, HD]

  Args:
    docstring: The docstring of a layout of checkpoints.
    sizes: The sizes of the axes by letter.
    version: "V1" or "V2", for layouts that have both.
  """
  shapes: Shapes = {}
  for line in docstring.splitlines():
    match = TENSOR_LINE.match(line)
    if match is None:
      continue
    is_other_version = match["version"] not in (None, version)
    if version and is_other_version:
      continue
    dims = match["shape"].split(", ")
    shape = tuple(evaluate(dim, sizes) for dim in dims)
    for name in expand(match["name"].replace("{}", "0")):
      assert name not in shapes, f"{name} is documented twice"
      shapes[name] = shape
  return shapes


def evaluate(dim: str, sizes: dict[str, int]) -> int:
  """Returns the value of a documented size, such as "2HD" or "(H + Q)D"."""
  product = re.sub(r"(?<=[\w)])(?=[A-Z(])", "*", dim)
  return eval(product, {}, sizes)


def expand(pattern: str) -> list[str]:
  """Returns the names of a pattern such as "a.{b,c}.d"."""
  match = re.fullmatch(r"(.*)\{(.+)\}(.*)", pattern)
  if match is None:
    return [pattern]
  prefix, choices, suffix = match.groups()
  return [prefix + choice + suffix for choice in choices.split(",")]


def written_shapes(file: pathlib.Path) -> Shapes:
  """Returns the shapes in a file, except in layers above layer 0."""
  shapes = {}
  for name, tensor in safetensors.numpy.load_file(file).items():
    if "layers." not in name or "layers.0." in name:
      shapes[name] = tensor.shape
  return shapes


def sizes_of(config: ModelConfig) -> dict[str, int]:
  """Returns the sizes of the axes, with Q for the number of noise maps."""
  return {
    "N": config.vocab_size,
    "E": config.embed_dim,
    "F": config.ffn_dim,
    "H": config.num_heads,
    "Q": config.num_noise_heads or config.num_heads,
    "K": config.num_kv_heads,
    "D": config.head_dim,
  }


def make_model(**fields: Any) -> Model:
  """Returns a small model with the given fields of `config.model`."""
  tokenizer = load_tokenizer("bytes")
  sizes = {
    "vocab_size": tokenizer.vocab_size,
    "num_layers": 1,
    "embed_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_dim": 24,
    "max_length": 32,
  }
  config = ModelConfig(tie_embeddings=False, **{**sizes, **fields})
  tokens = jnp.zeros((1, 1), jnp.int32)
  params = parameters(Decoder(config), tokens)
  return Model(config, params, tokenizer)


@pytest.mark.parametrize(
  ("layout", "fields", "version"),
  [
    pytest.param(diffllama, {}, "", id="diffllama"),
    pytest.param(unilm, {}, "V1", id="unilm V1"),
    pytest.param(
      unilm,
      {"attention": "diff_v2", "head_norm": False},
      "V2",
      id="unilm V2",
    ),
    pytest.param(
      motif,
      {
        "num_noise_heads": 2,
        "num_kv_heads": 1,
        "lambda_init_offset": 1,
        "ffn_activation": "poly_norm",
      },
      "",
      id="motif",
    ),
  ],
)
def test_the_documented_tensors_are_written(layout, fields, version, tmp_path):
  """The docstring of a layout's module lists all tensors with their shapes.

  Some of its lines are only for V1 or V2 of attention: `version` selects them.
  """
  model = make_model(**fields)

  layout.write(str(tmp_path), model, "float32")

  [file] = tmp_path.glob("*.safetensors")
  # The sizes of the letters in the docstring, such as E for embed_dim.
  sizes = sizes_of(model.config)
  documented = documented_shapes(layout.__doc__, sizes, version)
  assert written_shapes(file) == documented


def test_the_documented_tensors_of_a_llama_are_read(tmp_path):
  """A missing or an extra tensor in the file would be an error.

  The docstring of the module `llama` lists all tensors with their shapes.
  """
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 500.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  write_tokenizer(tmp_path, load_tokenizer("bytes"))
  # The same sizes, by their letters in the docstring. D is 32 / 4.
  sizes = {"N": 256, "E": 32, "F": 24, "H": 4, "K": 2, "D": 8}
  tensors = {}
  for name, shape in documented_shapes(llama.__doc__, sizes).items():
    tensors[name] = np.zeros(shape, np.float32)
  safetensors.numpy.save_file(
    tensors, tmp_path / "model.safetensors", metadata={"format": "pt"}
  )

  model = llama.read(str(tmp_path))

  num_documented = sum(tensor.size for tensor in tensors.values())
  assert parameter_count(model.config) == num_documented


@pytest.mark.parametrize(
  ("layers_above_the_middle", "has_keys_and_values"),
  [
    pytest.param(1, True, id="layer with keys and values"),
    pytest.param(3, False, id="layer with shared keys and values"),
  ],
)
def test_the_documented_tensors_of_phi_flash_are_read(
  layers_above_the_middle, has_keys_and_values
):
  """The docstring of the module `phi_flash` lists the tensors of a layer.

  The highest layers share the keys and values of a lower one.
  """
  config = json.loads((PHI_FLASH / "config.json").read_text())
  layer = config["num_hidden_layers"] // 2 + layers_above_the_middle
  # The file counts attention maps. A head has two.
  num_heads = config["num_attention_heads"] // 2
  num_kv_heads = config["num_key_value_heads"] // 2
  head_dim = config["hidden_size"] // config["num_attention_heads"]
  # A matrix computes queries of two maps and, in some layers, keys of two maps
  # and values of twice the width.
  num_rows = 2 * num_heads * head_dim
  if has_keys_and_values:
    num_rows += (2 + 2) * num_kv_heads * head_dim

  _, params = phi_flash.read_attention(str(PHI_FLASH), layer)
  # `documented` has the names of layer 0.
  tensors = phi_flash.tensors_of(params, layer=0)

  # The letters of these sizes in the docstring.
  sizes = {"E": config["hidden_size"], "H": num_heads, "K": num_kv_heads}
  sizes |= {"D": head_dim, "R": num_rows}
  documented = documented_shapes(phi_flash.__doc__, sizes)
  assert {name: tensor.shape for name, tensor in tensors.items()} == documented
