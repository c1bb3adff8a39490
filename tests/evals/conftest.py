"""Small models of every kind with text to measure them on, made without training."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import pytest

from diffjax.config import Config, DataConfig, EvalConfig, ModelConfig
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals.report import intervals
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

# Attention with two maps or one, keys of one map or two, heads that share keys or do not.
KINDS = {
  "softmax": dict(
    attention="softmax", num_heads=4, num_kv_heads=2, head_norm=False
  ),
  "diff": dict(attention="diff", num_heads=2, num_kv_heads=1),
  "diff_v2": dict(
    attention="diff_v2", num_heads=4, num_kv_heads=2, head_norm=False
  ),
}


@pytest.fixture(scope="session")
def text_source(tmp_path_factory):
  """Documents of 100 to 1,500 bytes."""
  path, rng = tmp_path_factory.mktemp("text"), random.Random(0)
  for index in range(60):
    words = rng.choices(
      "the a def return self import class if for in of and is not none".split(),
      k=rng.randint(20, 300),
    )
    (path / f"{index:02d}.txt").write_text(
      f"document {index}: " + " ".join(words) + "\n"
    )
  return f"text:{path}/*.txt"


@pytest.fixture(scope="session")
def make_trained(text_source):
  """make_trained("diff", num_layers=1): a model with random parameters, as if it had been loaded. Same arguments, same model."""

  @functools.cache
  def make(kind="diff", **fields):
    sizes = dict(
      vocab_size=256,
      num_layers=2,
      embed_dim=16,
      head_dim=8,
      ffn_dim=32,
      max_length=512,
    )
    model_config = ModelConfig(**{**sizes, **KINDS[kind], **fields})
    data = DataConfig(
      source=text_source, validation_fraction=0.5, length=64, mode="streamed"
    )
    model = Decoder(model_config)
    params = jax.jit(model.init)(
      jax.random.key(0), jnp.zeros((1, 4), jnp.int32)
    )["params"]
    config = Config(model=model_config, data=data, eval=EvalConfig(ngram=3))
    return Trained(
      f"a {kind} model", config, model, params, load_tokenizer("bytes")
    )

  return make


@pytest.fixture(scope="session")
def uniform():
  """uniform(trained): the same model with an embedding of zeros, which finds all tokens equally likely."""

  def make(trained):
    return dataclasses.replace(
      trained,
      params={
        **trained.params,
        "embedding": jnp.zeros_like(trained.params["embedding"]),
      },
    )

  return make


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch, request):
  """Makes intervals inaccurate but in their own tests: exact ones take longer than the measurements."""
  if request.node.path.name != "test_intervals.py":
    monkeypatch.setattr(intervals, "RESAMPLES", 99)
