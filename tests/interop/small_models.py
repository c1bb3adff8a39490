"""Small models and checkpoints, and the command that converts them."""

import functools
import json
import pathlib
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers

from diffjax.config import ModelConfig
from diffjax.data.tokenizer import load_tokenizer
from diffjax.interop.layout import Model
from diffjax.model import decoder
from tests.harness import in_process

GOLDEN = pathlib.Path(__file__).parent / "golden"

# The vocabulary of `write_tokenizer`, `write_llama` and the golden checkpoints.
VOCAB_SIZE = 128

_SIZES = {
  "vocab_size": VOCAB_SIZE,
  "num_layers": 2,
  "embed_dim": 32,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 4,
  "ffn_dim": 24,
  "max_length": 32,
  "rope_base": 100.0,
}
_LLAMA_CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": VOCAB_SIZE,
  "hidden_size": 32,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 32,
  "rms_norm_eps": 1e-6,
  "hidden_act": "silu",
  "rope_theta": 500.0,
  "rope_scaling": None,
}
_LLAMA_LAYER_SHAPES = {
  "input_layernorm.weight": (32,),
  "post_attention_layernorm.weight": (32,),
  "self_attn.q_proj.weight": (32, 32),
  "self_attn.k_proj.weight": (16, 32),
  "self_attn.v_proj.weight": (16, 32),
  "self_attn.o_proj.weight": (32, 32),
  "mlp.gate_proj.weight": (24, 32),
  "mlp.up_proj.weight": (24, 32),
  "mlp.down_proj.weight": (32, 24),
}


class Golden(NamedTuple):
  """A checkpoint of another project, and its outputs in float64.

  Attributes:
    path: the directory.
    ids: token ids of shape [rows, tokens].
    logits: their logits, of shape [rows, tokens, vocabulary].
  """

  path: pathlib.Path
  ids: np.ndarray
  logits: np.ndarray


def convert(*arguments: str) -> subprocess.CompletedProcess:
  """Runs `python -m diffjax.convert`, and asserts that it has no traceback."""
  result = in_process.call("diffjax.convert", *arguments)
  assert "Traceback" not in result.stderr, result.stderr
  return result


def edit_config(directory: pathlib.Path, changes: dict[str, Any]) -> None:
  """Changes fields of the config.json in a directory."""
  path = directory / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | changes))


def make_model(
  attention: str = "diff", tokenizer: str = "bytes", **fields: Any
) -> Model:
  """Returns a model whose parameters are all random.

  Gains are random too, so that a lost or exchanged one changes the outputs.

  Args:
    attention: the attention variant.
    tokenizer: "bytes" or the path of a tokenizer file.
    fields: further fields of config.model.
  """
  loaded_tokenizer = load_tokenizer(tokenizer)
  all_fields = {
    **_SIZES,
    "attention": attention,
    "head_norm": attention == "diff",
    **fields,
  }
  all_fields["vocab_size"] = max(
    all_fields["vocab_size"], loaded_tokenizer.vocab_size
  )
  config = ModelConfig(**all_fields)
  rng = np.random.default_rng(0)

  def draw(path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    name = path[-1].key
    is_gain = name.endswith("norm") or name == "head_gain"
    mean = 1.0 if is_gain else 0.0
    return rng.normal(mean, 0.3, leaf.shape).astype(np.float32)

  params = jax.tree_util.tree_map_with_path(draw, _param_shapes(config))
  return Model(config, params, loaded_tokenizer)


@functools.cache
def _param_shapes(config: ModelConfig) -> dict[str, Any]:
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  key = jax.eval_shape(jax.random.key, 0)
  return jax.eval_shape(decoder.Decoder(config).init, key, ids)["params"]


def model_logits(model: Model, ids: np.ndarray) -> np.ndarray:
  """Returns the logits that diffjax's decoder computes.

  Args:
    model: the model.
    ids: token ids of shape [rows, tokens].
  """
  int32_ids = np.asarray(ids, np.int32)
  return np.asarray(_logits(model.config, model.params, int32_ids))


@functools.partial(jax.jit, static_argnums=0)
def _logits(
  config: ModelConfig, params: dict[str, Any], ids: jax.Array
) -> jax.Array:
  hidden = decoder.Decoder(config).apply({"params": params}, ids)
  return decoder.logits(params, hidden)


def write_tokenizer(
  directory: pathlib.Path, vocab_size: int = VOCAB_SIZE
) -> None:
  """Writes a tokenizer.json with the tokens <|endoftext|>, w1, w2, …"""
  vocabulary = {"<|endoftext|>": 0}
  for index in range(1, vocab_size):
    vocabulary[f"w{index}"] = index
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocabulary, unk_token="w1")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(["<|endoftext|>"])
  tokenizer.save(str(directory / "tokenizer.json"))


def copy_golden(name: str, directory: pathlib.Path) -> Golden:
  """Copies a golden checkpoint, and adds a tokenizer.json.

  Args:
    name: a directory in tests/interop/golden.
    directory: where to copy it. It must not exist.
  """
  shutil.copytree(GOLDEN / name, directory)
  write_tokenizer(directory)
  with np.load(directory / "golden_logits.npz", allow_pickle=False) as data:
    return Golden(directory, data["input_ids"], data["logits"])


def read_tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the tensors of all safetensors files in a directory, by name."""
  tensors = {}
  for path in sorted(directory.glob("*.safetensors")):
    tensors |= safetensors.numpy.load_file(path)
  return tensors


def write_llama(
  directory: pathlib.Path, is_tied: bool = False
) -> dict[str, np.ndarray]:
  """Writes a random Llama in the layout of transformers.

  Args:
    directory: where to write it. It may exist.
    is_tied: whether the embedding is also the output projection.

  Returns:
    The tensors, by name.
  """
  shapes = {
    "model.embed_tokens.weight": (VOCAB_SIZE, 32),
    "model.norm.weight": (32,),
  }
  if not is_tied:
    shapes["lm_head.weight"] = (VOCAB_SIZE, 32)
  for layer in range(_LLAMA_CONFIG["num_hidden_layers"]):
    for name, shape in _LLAMA_LAYER_SHAPES.items():
      shapes[f"model.layers.{layer}.{name}"] = shape

  rng = np.random.default_rng(1)
  tensors = {}
  for name, shape in shapes.items():
    mean = 1.0 if "norm" in name else 0.0
    tensors[name] = rng.normal(mean, 0.3, shape).astype(np.float32)

  directory.mkdir(exist_ok=True)
  config = {**_LLAMA_CONFIG, "tie_word_embeddings": is_tied}
  (directory / "config.json").write_text(json.dumps(config))
  safetensors.numpy.save_file(
    tensors, directory / "model.safetensors", metadata={"format": "pt"}
  )
  write_tokenizer(directory)
  return tensors
