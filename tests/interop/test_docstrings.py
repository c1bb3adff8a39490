"""The docstring of a layout names the tensors that its code reads and writes.

A line of such a docstring has the name of a tensor, the version for which it
exists if there are several, and its shape:

  layers.{}.self_attn.o_proj.weight  V2  [E, HD]
"""

import json
import re

import pytest

from diffjax.interop import diffllama, llama, motif, phi_flash, unilm
from tests.interop.conftest import GOLDEN

# name, version, shape
_TENSOR_LINE = re.compile(r"  (\S+)\s+(?:(V[12])\s+)?\[([^\]]+)\]")


def documented_shapes(docstring, sizes, version=None):
  """Returns the shapes of the tensors of layer 0 and of those without layer.

  Args:
    docstring: The docstring of a layout.
    sizes: The sizes of the axes by letter.
    version: "V1" or "V2", for layouts that have both.
  """
  shapes = {}
  for line in docstring.splitlines():
    match = _TENSOR_LINE.match(line)
    if match is None:
      continue
    pattern, line_version, dims = match.groups()
    if line_version not in (None, version):
      continue
    shape = tuple(evaluate(dim, sizes) for dim in dims.split(", "))
    for name in expand(pattern.replace("{}", "0")):
      assert name not in shapes, f"{name} is documented twice"
      shapes[name] = shape
  return shapes


def evaluate(dim, sizes):
  """Returns the value of a documented size, such as "2HD" or "(H + Q)D"."""
  product = re.sub(r"(?<=[\w)])(?=[A-Z(])", "*", dim)
  return eval(product, {}, sizes)


def expand(pattern):
  """Returns the names of a pattern such as "a.{b,c}.d"."""
  match = re.fullmatch(r"(.*)\{(.+)\}(.*)", pattern)
  if match is None:
    return [pattern]
  prefix, choices, suffix = match.groups()
  return [prefix + choice + suffix for choice in choices.split(",")]


def layer_0(shapes):
  """Returns the shapes without those of the layers above the lowest one."""
  return {
    name: shape
    for name, shape in shapes.items()
    if "layers." not in name or "layers.0." in name
  }


def sizes_of(config):
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


@pytest.mark.parametrize(
  ("module", "fields", "version"),
  [
    pytest.param(diffllama, {"attention": "diff"}, None, id="diffllama"),
    pytest.param(unilm, {"attention": "diff"}, "V1", id="unilm V1"),
    pytest.param(unilm, {"attention": "diff_v2"}, "V2", id="unilm V2"),
    pytest.param(
      motif,
      {
        "attention": "diff",
        "num_noise_heads": 2,
        "num_kv_heads": 1,
        "lambda_init_offset": 1,
        "ffn_activation": "poly_norm",
      },
      None,
      id="motif",
    ),
  ],
)
def test_documented_tensors_are_those_of_the_code(
  make_model, module, fields, version
):
  config = make_model(tie_embeddings=False, **fields).config
  if version is None:
    layout = module._layout(config)
  else:
    layout = module._layout(config, int(version.removeprefix("V")))
  documented = documented_shapes(module.__doc__, sizes_of(config), version)
  assert documented == layer_0(layout.shapes())


def test_documented_tensors_of_a_llama(write_llama, tmp_path):
  tensors = write_llama(tmp_path)
  config = llama.read(str(tmp_path)).config
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  documented = documented_shapes(llama.__doc__, sizes_of(config))
  assert documented == layer_0(shapes)


@pytest.mark.parametrize(
  ("layer", "rows"), [(5, "2HD + 4KD"), (7, "2HD")], ids=["full", "cross"]
)
def test_documented_tensors_of_phi_flash(layer, rows):
  config = json.loads((GOLDEN / "phi_flash_tiny/config.json").read_text())
  sizes = {
    "E": config["hidden_size"],
    "H": config["num_attention_heads"] // 2,
    "K": config["num_key_value_heads"] // 2,
    "D": config["hidden_size"] // config["num_attention_heads"],
  }
  sizes["R"] = evaluate(rows, sizes)
  _, params = phi_flash.read_attention(str(GOLDEN / "phi_flash_tiny"), layer)
  tensors = phi_flash.tensors_of(params, layer=0)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  assert documented_shapes(phi_flash.__doc__, sizes) == shapes
