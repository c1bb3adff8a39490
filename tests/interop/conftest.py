"""Checkpoints in other layouts, the command, and a Transformer's parts in float64 NumPy, independent of diffjax."""

import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from diffjax.config import ModelConfig
from diffjax.data.tokenizer import load_tokenizer
from diffjax.interop.layout import Model
from diffjax.model import decoder
from tests.harness import in_process

GOLDEN = pathlib.Path(__file__).parent / "golden"
SIZES = dict(
  vocab_size=128,
  num_layers=2,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  ffn_dim=24,
  max_length=32,
  rope_base=100.0,
)


def _write_tokenizer(directory, size=128):
  """Writes a tokenizer.json of the given number of tokens: w1, w2, …, and <|endoftext|>."""
  words = {
    "<|endoftext|>": 0,
    **{f"w{index}": index for index in range(1, size)},
  }
  made = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token="w1")
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens(["<|endoftext|>"])
  made.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="session")
def write_tokenizer():
  return _write_tokenizer


@pytest.fixture(scope="session")
def golden():
  """Copies a checkpoint that transformers wrote, with a tokenizer beside it; returns its directory, input ids and float64 logits."""

  def copy(name, to):
    shutil.copytree(GOLDEN / name, to)
    _write_tokenizer(to)
    data = np.load(to / "golden_logits.npz", allow_pickle=False)
    return to, data["input_ids"], data["logits"]

  return copy


@pytest.fixture(scope="session")
def convert():
  """Runs the command; it must not end with a traceback."""

  def run(*args):
    result = in_process.call("diffjax.convert", *args)
    assert "Traceback" not in result.stderr, result.stderr
    return result

  return run


@pytest.fixture(scope="session")
def logits():
  """Logits of a model [B, T, N], by the decoder itself."""

  @jax.jit(static_argnums=0)
  def apply(config, params, tokens):
    hidden = decoder.Decoder(config).apply({"params": params}, tokens)
    return decoder.logits(params, hidden)

  return lambda model, tokens: np.asarray(
    apply(
      model.config,
      jax.tree.map(jnp.asarray, model.params),
      jnp.asarray(tokens, jnp.int32),
    )
  )


@pytest.fixture(scope="session")
def make_model():
  """A model whose parameters are all random, gains too, so that a lost or exchanged one is noticed."""

  def make(attention="diff", tokenizer="bytes", **fields):
    fields = (
      SIZES
      | {"attention": attention, "head_norm": attention == "diff"}
      | fields
    )
    tokenizer = load_tokenizer(tokenizer)
    config = ModelConfig(
      **fields | {"vocab_size": max(fields["vocab_size"], tokenizer.vocab_size)}
    )
    shapes = jax.eval_shape(
      lambda: decoder.Decoder(config).init(
        jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
      )["params"]
    )
    rng = np.random.default_rng(0)

    def draw(path, leaf):
      name = path[-1].key
      gain = name.endswith("norm") or name == "head_gain"
      return (rng.normal(1.0 if gain else 0.0, 0.3, leaf.shape)).astype(
        np.float32
      )

    return Model(
      config, jax.tree_util.tree_map_with_path(draw, shapes), tokenizer
    )

  return make


@pytest.fixture(scope="session")
def write_llama():
  """Writes a random Llama in transformers' layout, and returns its tensors."""

  def write(directory, *, tie=False, tensors=None, without=(), **changes):
    description = {
      "architectures": ["LlamaForCausalLM"],
      "model_type": "llama",
      "vocab_size": 128,
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
      "tie_word_embeddings": tie,
    } | changes
    shapes = {
      "model.embed_tokens.weight": (128, 32),
      "model.norm.weight": (32,),
    }
    if not tie:
      shapes["lm_head.weight"] = (128, 32)
    for layer in range(2):
      prefix = f"model.layers.{layer}."
      shapes |= {
        prefix + "input_layernorm.weight": (32,),
        prefix + "post_attention_layernorm.weight": (32,),
      }
      shapes |= {
        prefix + f"self_attn.{name}_proj.weight": (rows, 32)
        for name, rows in zip("qkvo", (32, 16, 16, 32), strict=True)
      }
      shapes |= {
        prefix + f"mlp.{name}_proj.weight": (24, 32) for name in ("gate", "up")
      } | {prefix + "mlp.down_proj.weight": (32, 24)}
    rng = np.random.default_rng(1)
    made = {
      name: rng.normal(float("norm" in name), 0.3, shape).astype(np.float32)
      for name, shape in shapes.items()
    } | (tensors or {})
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(
      json.dumps(
        {
          name: value
          for name, value in description.items()
          if name not in without
        }
      )
    )
    safetensors.numpy.save_file(
      made, directory / "model.safetensors", metadata={"format": "pt"}
    )
    _write_tokenizer(directory)
    return made

  return write


@pytest.fixture(scope="session")
def parts():
  """RMSNorm, SwiGLU, RoPE and causal attention of one sequence, in float64."""

  def norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain

  def swiglu(x, gate, up, down):
    hidden = x @ gate.T
    return (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T

  def rotate(x, base, *, interleaved):
    """x: [T, heads, D]; pairs are neighbours, or halves."""
    length, _, width = x.shape
    angle = np.arange(length)[:, None, None] * base ** (
      -2.0 * np.arange(width // 2) / width
    )
    a, b = (
      (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    )
    a, b = (
      a * np.cos(angle) - b * np.sin(angle),
      b * np.cos(angle) + a * np.sin(angle),
    )
    return (
      np.stack([a, b], axis=-1).reshape(x.shape)
      if interleaved
      else np.concatenate([a, b], axis=-1)
    )

  def attend(q, k, v):
    """q, k: [T, D], v: [T, V]."""
    scores = np.where(
      np.tri(len(q), dtype=bool), q @ k.T / np.sqrt(q.shape[1]), -np.inf
    )
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v

  return types.SimpleNamespace(
    norm=norm, swiglu=swiglu, rotate=rotate, attend=attend
  )
