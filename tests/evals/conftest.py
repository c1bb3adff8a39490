"""Small models of several variants with random parameters, and their text."""

import dataclasses
import functools
import pathlib
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from diffjax.config import Config, DataConfig, EvalConfig, ModelConfig
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals.report import intervals
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder
from tests.harness.parameters import parameters

SIZES = dict(
  vocab_size=256,
  num_layers=2,
  embed_dim=16,
  head_dim=8,
  ffn_dim=32,
  max_length=512,
)

# A Transformer with one map, DIFF V1 with two maps and keys for each, and DIFF
# V2 with two maps of the same keys. Two heads of each share their keys.
VARIANTS = {
  "softmax": dict(
    attention="softmax", num_heads=4, num_kv_heads=2, head_norm=False
  ),
  "diff": dict(attention="diff", num_heads=2, num_kv_heads=1),
  "diff_v2": dict(
    attention="diff_v2", num_heads=4, num_kv_heads=2, head_norm=False
  ),
}

WORDS = "the a def return self import class if for in of and is not none"


@pytest.fixture(scope="session")
def text_source(tmp_path_factory: pytest.TempPathFactory) -> str:
  """The data source of 60 documents of 100 to 1,500 bytes."""
  directory = tmp_path_factory.mktemp("text")
  write_documents(directory)
  return f"text:{directory}/*.txt"


def write_documents(directory: pathlib.Path) -> None:
  """Writes documents of random words."""
  rng = random.Random(0)
  for index in range(60):
    words = rng.choices(WORDS.split(), k=rng.randint(20, 300))
    text = f"document {index}: {' '.join(words)}\n"
    (directory / f"{index:02d}.txt").write_text(text)


@pytest.fixture(scope="session")
def make_trained(text_source: str) -> Callable[..., Trained]:
  """A function that returns a model with random parameters.

  Example: `make_trained("diff", num_layers=1)`. Calls with the same arguments
  return the same model.
  """
  data = DataConfig(
    source=text_source, validation_fraction=0.5, length=64, mode="streamed"
  )

  @functools.cache
  def make(variant: str = "diff", **fields: Any) -> Trained:
    model_config = ModelConfig(**{**SIZES, **VARIANTS[variant], **fields})
    config = Config(model=model_config, data=data, eval=EvalConfig(ngram=3))
    model = Decoder(model_config)
    params = parameters(model, jax.ShapeDtypeStruct((1, 4), np.int32))
    tokenizer = load_tokenizer("bytes")
    return Trained(f"a {variant} model", config, model, params, tokenizer)

  return make


@pytest.fixture(scope="session")
def make_uniform() -> Callable[[Trained], Trained]:
  """A function that makes a model predict all tokens with equal probability."""

  def make(trained: Trained) -> Trained:
    embedding = np.zeros_like(trained.params["embedding"])
    params = {**trained.params, "embedding": embedding}
    return dataclasses.replace(trained, params=params)

  return make


@pytest.fixture(autouse=True)
def few_resamples(
  monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
  """Makes the bounds of bootstrap intervals inaccurate and fast.

  Accurate ones take longer than the measurements of these tests. Only the tests
  of intervals check the bounds.
  """
  if request.node.path.name != "test_intervals.py":
    monkeypatch.setattr(intervals, "RESAMPLES", 99)
