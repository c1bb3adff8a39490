"""Log-likelihoods equal a softmax over all logits for any batch, length and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.evals.methods import scoring
from diffjax.model.decoder import Decoder, logits
from tests.parameters import parameters

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


@pytest.fixture(scope="module")
def model_and_params():
  model = Decoder(CONFIG)
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  return model, jax.tree.map(lambda x: x * 3, params)  # far from uniform


@pytest.fixture(scope="module")
def direct(model_and_params):
  """The score from log-softmax of the logits of the whole unpadded sequence, computed in full length rows."""
  model, params = model_and_params
  forward = jax.jit(
    lambda tokens: logits(params, model.apply({"params": params}, tokens))
  )

  def compute(context, continuation):
    ids = [*context, *continuation]
    padded = np.zeros((1, CONFIG.max_length), np.int32)
    padded[0, : len(ids) - 1] = ids[:-1]
    every = np.asarray(forward(padded)[0], np.float64)
    places = range(len(context) - 1, len(ids) - 1)
    log_softmax = every - np.log(np.exp(every).sum(-1, keepdims=True))
    return sum(log_softmax[place, ids[place + 1]] for place in places), all(
      every[place].argmax() == ids[place + 1] for place in places
    )

  return compute


def test_scores_equal_a_direct_computation(
  model_and_params, direct, monkeypatch
):
  monkeypatch.setattr(
    scoring, "_CHUNK_LOGITS", 50 * 3 * 7
  )  # chunks of a few tokens, the last one padded
  rng = np.random.default_rng(0)
  pairs = [
    (rng.integers(50, size=a).tolist(), rng.integers(50, size=b).tolist())
    for a, b in rng.integers(1, 50, (9, 2))
  ]
  pairs += [([3], [4]), ([3] * 100, [4]), ([3], [4] * 100), ([1, 2], [3, 4])]
  # A greedy continuation, so that is_greedy is not always False; and one that is wrong only at its end
  model, params = model_and_params
  forward = jax.jit(
    lambda tokens: logits(params, model.apply({"params": params}, tokens))
  )
  greedy = [5]
  for _ in range(6):
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(greedy)] = greedy
    greedy.append(int(forward(padded)[0, len(greedy) - 1].argmax()))
  pairs += [
    (greedy[:2], greedy[2:]),
    (greedy[:2], [*greedy[2:-1], (greedy[-1] + 1) % 50]),
  ]
  scores = scoring.score(model, params, pairs, batch_tokens=3 * 64)
  expected = [direct(*pair) for pair in pairs]
  np.testing.assert_allclose(
    [score.log_probability for score in scores],
    [value for value, _ in expected],
    rtol=1e-5,
    atol=1e-5,
  )
  assert [score.is_greedy for score in scores] == [
    greedy for _, greedy in expected
  ]
  assert scores[-2].is_greedy and not scores[-1].is_greedy


def test_a_bucket_compiles_once(model_and_params):
  model, params = model_and_params
  before = scoring._score_rows._cache_size()
  for count in (1, 2, 5, 9):
    scoring.score(
      model,
      params,
      [([1] * length, [2] * 3) for length in range(40, 40 + count)],
      batch_tokens=256,
    )
  assert scoring._score_rows._cache_size() <= before + 1


def test_uniform_model(model_and_params):
  model, params = model_and_params
  nothing = jax.tree.map(jnp.zeros_like, params)
  (score,) = scoring.score(model, nothing, [([1], [2, 3, 4])])
  assert score.log_probability == pytest.approx(-3 * np.log(50), rel=1e-6)


def test_bad_pairs(model_and_params):
  model, params = model_and_params
  with pytest.raises(
    UserError,
    match="a continuation of 2 tokens after 100 does not fit the model, whose config.model.max_length is 100",
  ):
    scoring.score(model, params, [([1] * 100, [2, 3])])
  for pair in ([], [1]), ([1], []):
    with pytest.raises(ValueError, match="neither may be empty"):
      scoring.score(model, params, [pair])


@pytest.mark.parametrize("token", [50, -1, 7.9, True, float("nan")], ids=repr)
def test_ids_outside_the_vocabulary_are_refused(model_and_params, token):
  model, params = model_and_params
  good = ([1, 2], [3])
  named = "at position 1: token ids are integers from 0 to 49,"
  with pytest.raises(UserError, match=f"^pair 1: the context has .* {named}"):
    scoring.score(model, params, [good, ([1, token], [2])])
  with pytest.raises(
    UserError, match=f"^pair 2: the continuation has .* {named}"
  ):
    scoring.score(model, params, [good, good, ([1], [2, token])])
  with pytest.raises(UserError, match="^pair 0: the context has 'a'"):
    scoring.score(model, params, [("a", "b")])


def test_arrays_are_scored_as_lists(model_and_params):
  model, params = model_and_params
  wanted = scoring.score(model, params, [([1, 2], [3])])
  arrays = [(np.array([1, 2], np.uint16), jnp.array([3], jnp.int8))]
  assert scoring.score(model, params, arrays) == wanted
