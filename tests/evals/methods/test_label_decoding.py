"""Decoding that writes nothing but a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals.methods.label_decoding import LabelTree, decode_labels
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder, logits
from tests.harness.parameters import parameters

BYTES = load_tokenizer("bytes")


class RandomState(NamedTuple):
  """The state of a RandomSampler: the logits of the next token, [B, N]."""

  logits: np.ndarray


class RandomSampler:
  """A sampler of three rows whose logits are random."""

  batch_size = 3

  def __init__(self) -> None:
    self.rng = np.random.default_rng(0)

  def state(self) -> RandomState:
    return RandomState(self.rng.normal(size=(self.batch_size, 256)))

  def step(self, state: RandomState, tokens: Sequence[int]) -> RandomState:
    return self.state()


def encode_labels(labels: Sequence[str]) -> list[list[int]]:
  """Returns the ids of labels as a prompt continues with them."""
  return [BYTES.encode(f" {label}\n\n") for label in labels]


def decode_by_definition(
  next_logits: Callable[[list[int]], np.ndarray],
  labels: Sequence[list[int]],
  prompt: list[int],
) -> int:
  """Returns the index of the label that is written after a prompt.

  Each token is the likeliest one that continues a label. It ends when only one
  label begins with the written tokens.
  """
  written: list[int] = []
  candidates = list(labels)
  while len(candidates) > 1:
    token_logits = next_logits(prompt + written)
    tokens = sorted({label[len(written)] for label in candidates})
    written.append(max(tokens, key=token_logits.__getitem__))
    candidates = [
      label for label in candidates if label[: len(written)] == written
    ]
  return labels.index(candidates[0])


def test_decoding_takes_the_likeliest_token_that_leads_to_a_label():
  """Decoding equals a loop over the whole model.

  The labels begin alike, and one is the beginning of another.
  """
  config = ModelConfig(
    num_layers=2,
    embed_dim=32,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=32,
    max_length=128,
  )
  model = Decoder(config)
  params = parameters(model, jax.ShapeDtypeStruct((1, 1), np.int32))
  # Large parameters, so that the probabilities are not nearly uniform.
  params = jax.tree.map(lambda leaf: 3 * np.asarray(leaf), params)
  labels = encode_labels(["cat", "cat food", "catalogue", "dog", "do"])
  beginning = BYTES.encode("A beginning that all share. ")
  texts = ["x", "what is it?", "y" * 70, "cats", "a", "bb", "Z" * 9, "dog"]
  queries = [BYTES.encode(text) for text in texts]

  @jax.jit
  def compute_logits(tokens):
    return logits(params, model.apply({"params": params}, tokens))

  def next_logits(ids: list[int]) -> np.ndarray:
    padded = np.zeros((1, config.max_length), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(compute_logits(padded))[0, len(ids) - 1]

  sampler = Sampler(model, params, batch_size=4, capacity=128)
  tree = LabelTree.grow(labels)
  after_beginning = sampler.prefill([beginning] * 4)
  decoded = []
  for start in range(0, len(queries), 4):
    state = sampler.read(after_beginning, queries[start : start + 4])
    decoded += decode_labels(sampler, state, 4, tree)

  expected = []
  for query in queries:
    prompt = beginning + query
    expected.append(decode_by_definition(next_logits, labels, prompt))
  assert decoded == expected
  assert len(set(decoded)) > 1


def test_random_logits_decode_to_labels_only():
  """200 batches of three rows are enough to decode each label once.

  A label may be the beginning of another one.
  """
  labels = ["a", "ab", "abc", "b", "ba", "entity", "entity:animal"]
  tree = LabelTree.grow(encode_labels(labels))
  sampler = RandomSampler()

  decoded = set()
  for _ in range(200):
    random_logits = sampler.state()
    indices = decode_labels(sampler, random_logits, count=3, tree=tree)
    decoded.update(indices)

  all_label_indices = set(range(len(labels)))
  assert decoded == all_label_indices


def test_a_single_label_is_always_decoded():
  # A sampler of three rows.
  sampler = RandomSampler()
  # The only label has the token 1.
  tree = LabelTree.grow([[1]])

  indices = decode_labels(sampler, sampler.state(), count=3, tree=tree)

  assert indices == [0, 0, 0]


@pytest.mark.parametrize(
  "labels",
  [
    pytest.param([[1, 2], [1, 2]], id="equal"),
    pytest.param([[1, 2], [1, 2, 3]], id="prefix"),
  ],
)
def test_labels_that_cannot_be_told_apart_raise(labels):
  """Each label is a list of tokens."""
  message = "labels 0, 1 .counted from 0. have the same tokens"
  with pytest.raises(UserError, match=message):
    LabelTree.grow(labels)
