"""Log-likelihoods equal a softmax over all logits.

This holds for any batch, length and padding.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.evals.methods import scoring
from diffjax.model.decoder import Decoder, logits
from tests.harness.parameters import parameters

CONFIG = ModelConfig(
  vocab_size=50,
  num_layers=2,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  ffn_dim=48,
  max_length=100,
)


class ScoredModel(NamedTuple):
  """A model and its parameters."""

  model: Decoder
  params: Any


@pytest.fixture(scope="module")
def model_and_params() -> ScoredModel:
  """A model whose probabilities are not nearly uniform."""
  model = Decoder(CONFIG)
  params = parameters(model, jax.ShapeDtypeStruct((1, 1), np.int32))
  params = jax.tree.map(lambda leaf: 3 * np.asarray(leaf), params)
  return ScoredModel(model, params)


@pytest.fixture(scope="module")
def compute_logits(
  model_and_params: ScoredModel,
) -> Callable[[Sequence[int]], np.ndarray]:
  """A function that returns the logits [T, N] of a row, without its padding."""
  model, params = model_and_params

  @jax.jit
  def forward(tokens):
    return logits(params, model.apply({"params": params}, tokens))

  def compute(ids):
    padded = np.zeros((1, CONFIG.max_length), np.int32)
    padded[0, : len(ids)] = ids
    padded_logits = np.asarray(forward(padded), np.float64)
    return padded_logits[0, : len(ids)]

  return compute


def score_directly(
  compute_logits: Callable[[Sequence[int]], np.ndarray],
  context: Sequence[int],
  continuation: Sequence[int],
) -> scoring.Score:
  """Returns the score from the log-softmax of all logits in float64."""
  ids = [*context, *continuation]
  first_scored = len(context) - 1
  scored_logits = compute_logits(ids[:-1])[first_scored:]
  normalizer = np.log(np.exp(scored_logits).sum(-1, keepdims=True))
  log_softmax = scored_logits - normalizer
  target_values = log_softmax[np.arange(len(continuation)), continuation]
  is_greedy = np.array_equal(scored_logits.argmax(axis=-1), continuation)
  return scoring.Score(target_values.sum(), is_greedy)


def random_pairs(rng: np.random.Generator, count: int) -> list[Any]:
  """Returns pairs of a context and a continuation of 1 to 49 tokens each."""
  pairs = []
  for _ in range(count):
    context_length, continuation_length = rng.integers(1, 50, size=2)
    context = rng.integers(CONFIG.vocab_size, size=context_length)
    continuation = rng.integers(CONFIG.vocab_size, size=continuation_length)
    pairs.append((context.tolist(), continuation.tolist()))
  return pairs


def test_scores_equal_a_direct_computation(model_and_params, compute_logits):
  """The score of a continuation is its log-probability after a context.

  `score_directly` computes it from the softmax of a single row.
  """
  model, params = model_and_params
  # The model reads at most 100 tokens: the context and the continuation
  # without its last token.
  edge_cases = [
    ([3], [4]),
    ([3] * 100, [4]),
    ([3], [4] * 100),
    ([1, 2], [3, 4]),
  ]
  pairs = edge_cases + random_pairs(np.random.default_rng(0), count=9)
  num_rows = 3
  # Logits are computed for chunks of seven positions. Rows have 64 positions,
  # which are no multiple of seven, so the last chunk is padded.
  chunk_length = 7

  scores = scoring.score(
    model,
    params,
    pairs,
    batch_tokens=num_rows * 64,
    chunk_logits=num_rows * chunk_length * CONFIG.vocab_size,
  )

  for score, (context, continuation) in zip(scores, pairs, strict=True):
    expected = score_directly(compute_logits, context, continuation)
    # The model computes in float32.
    assert score.log_probability == pytest.approx(
      expected.log_probability, rel=1e-5, abs=1e-5
    )
    assert score.is_greedy == expected.is_greedy


def test_a_continuation_is_greedy_if_all_its_tokens_are_the_likeliest(
  model_and_params, compute_logits
):
  """A single other token makes a continuation not greedy, here the last one."""
  model, params = model_and_params
  context = [5]
  greedy = []
  for _ in range(6):
    next_logits = compute_logits(context + greedy)[-1]
    greedy.append(int(next_logits.argmax()))
  *first_tokens, last_token = greedy
  other_token = (last_token + 1) % CONFIG.vocab_size
  pairs = [(context, greedy), (context, [*first_tokens, other_token])]

  score, other_score = scoring.score(model, params, pairs, batch_tokens=64)

  assert score.is_greedy
  assert not other_score.is_greedy


def test_rows_of_one_padded_length_compile_once(model_and_params):
  """Rows of 33 to 64 tokens are padded to 64. One program scores them all."""
  model, params = model_and_params
  # The cache of a jitted function has an entry for each compiled program.
  scoring._score_rows.clear_cache()

  for num_pairs in (1, 2, 5, 9):
    pairs = []
    for context_length in range(40, 40 + num_pairs):
      pairs.append(([1] * context_length, [2] * 3))
    scoring.score(model, params, pairs, batch_tokens=256)

  assert scoring._score_rows._cache_size() == 1


def test_a_uniform_model_gives_each_token_log_n(model_and_params):
  """With parameters of 0, each of 50 tokens has the probability 1 / 50."""
  model, params = model_and_params
  zero_params = jax.tree.map(np.zeros_like, params)

  (score,) = scoring.score(model, zero_params, [([1], [2, 3, 4])])

  # The continuation has three tokens.
  expected = 3 * np.log(1 / 50)
  assert score.log_probability == pytest.approx(expected, rel=1e-6)


def test_a_pair_that_is_longer_than_the_model_takes_raises(model_and_params):
  """The model would read 101 tokens: all except the last one."""
  model, params = model_and_params
  pairs = [([1] * 100, [2, 3])]

  message = (
    "a continuation of 2 tokens after 100 does not fit the model, whose"
    " config.model.max_length is 100"
  )
  with pytest.raises(UserError, match=message):
    scoring.score(model, params, pairs)


@pytest.mark.parametrize(
  "context, continuation",
  [
    pytest.param([], [1], id="context"),
    pytest.param([1], [], id="continuation"),
  ],
)
def test_an_empty_context_or_continuation_raises(
  model_and_params, context, continuation
):
  model, params = model_and_params

  with pytest.raises(ValueError, match="neither may be empty"):
    scoring.score(model, params, [(context, continuation)])


@pytest.mark.parametrize("token", [50, -1, 7.9, True, float("nan")], ids=repr)
def test_an_id_of_a_context_outside_the_vocabulary_raises(
  model_and_params, token
):
  """The vocabulary has 50 tokens. Pairs are counted from 0."""
  model, params = model_and_params
  good_pair = ([1, 2], [3])
  wrong_pair = ([1, token], [2])

  message = "^pair 1: the context has .* at position 1: .* from 0 to 49,"
  with pytest.raises(UserError, match=message):
    scoring.score(model, params, [good_pair, wrong_pair])


@pytest.mark.parametrize("token", [50, -1, 7.9, True, float("nan")], ids=repr)
def test_an_id_of_a_continuation_outside_the_vocabulary_raises(
  model_and_params, token
):
  """The vocabulary has 50 tokens. Pairs are counted from 0."""
  model, params = model_and_params
  good_pair = ([1, 2], [3])
  wrong_pair = ([1], [2, token])

  message = "^pair 1: the continuation has .* at position 1: .* from 0 to 49,"
  with pytest.raises(UserError, match=message):
    scoring.score(model, params, [good_pair, wrong_pair])


def test_texts_instead_of_ids_raise(model_and_params):
  """Texts must be tokenized first."""
  model, params = model_and_params

  with pytest.raises(UserError, match="^pair 0: the context has 'a'"):
    scoring.score(model, params, [("a", "b")])


def test_arrays_are_scored_as_lists(model_and_params):
  model, params = model_and_params
  lists = [([1, 2], [3])]
  arrays = [
    (np.array([1, 2], np.uint16), jax.device_put(np.array([3], np.int8)))
  ]

  scores = scoring.score(model, params, arrays)

  assert scores == scoring.score(model, params, lists)
