"""Generation: as a loop over the whole model would do it, whatever stands beside a row, and compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder, logits

CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=2,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  ffn_dim=48,
  max_length=300,
)
PROMPTS = [
  [5],
  [7, 3, 9],
  list(range(1, 60)),
  [int(i) for i in np.random.default_rng(0).integers(0, 64, 140)],
]


@pytest.fixture(scope="module")
def model():
  return Decoder(CONFIG)


@pytest.fixture(scope="module")
def params(model):
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))[
    "params"
  ]
  return params | {
    "embedding": 3 * params["embedding"]
  }  # logits far enough apart that rounding decides nothing


@pytest.fixture(scope="module")
def sampler(model, params):
  return Sampler(model, params, batch_size=4, capacity=200)


@pytest.fixture(scope="module")
def next_logits(model, params):
  apply = jax.jit(
    lambda window: logits(params, model.apply({"params": params}, window))
  )

  def function(ids):
    window = (
      jnp.zeros((1, 200), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
    )
    return np.asarray(apply(window)[0, len(ids) - 1])

  return function


def greedily(next_logits, prompt, count):
  ids = list(prompt)
  for _ in range(count):
    ids.append(int(np.argmax(next_logits(ids))))
  return ids[len(prompt) :]


def test_prefill_and_steps_give_the_models_logits(sampler, next_logits):
  state, rows = sampler.prefill(PROMPTS), [list(prompt) for prompt in PROMPTS]
  for tokens in ([1, 2, 3, 4], [9, 8, 7, 6]):
    np.testing.assert_allclose(
      state.logits, [next_logits(row) for row in rows], rtol=1e-4, atol=1e-4
    )
    rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
    state = sampler.step(state, tokens)
  np.testing.assert_allclose(
    state.logits, [next_logits(row) for row in rows], rtol=1e-4, atol=1e-4
  )


def test_prompts_may_share_a_beginning_that_is_read_once(sampler, next_logits):
  shared, rest = PROMPTS[3], [[5], [7, 3, 9], list(range(1, 60)), [4, 4]]
  beginning, compiled = (
    sampler.prefill([shared] * 4),
    sampler._prefill._cache_size(),
  )
  for tails in (rest, rest[::-1], rest[:2]):
    state = sampler.read(beginning, tails)
    np.testing.assert_allclose(
      state.logits[: len(tails)],
      [next_logits([*shared, *tail]) for tail in tails],
      rtol=1e-4,
      atol=1e-4,
    )
  state = sampler.step(sampler.read(beginning, rest), [1, 2, 3, 4])
  np.testing.assert_allclose(
    state.logits[2], next_logits([*shared, *rest[2], 3]), rtol=1e-4, atol=1e-4
  )
  assert sampler._prefill._cache_size() == compiled
  with pytest.raises(
    UserError,
    match="a prompt of 61 tokens behind 140 others: it must have 1 to 60",
  ):
    sampler.read(beginning, [list(range(61))])
  with pytest.raises(UserError, match="a prompt of 0 tokens"):
    sampler.read(beginning, [[1], []])


def test_greedy_generation_is_the_loop_over_the_whole_model(
  sampler, next_logits
):
  wanted = [
    greedily(next_logits, prompt, 21) for prompt in PROMPTS
  ]  # 21: two bursts and a part of a third
  assert sampler.generate(PROMPTS, 21) == wanted
  assert sampler.generate([*PROMPTS, *PROMPTS[:2]], 3) == [
    row[:3] for row in [*wanted, *wanted[:2]]
  ]  # more prompts than rows
  assert sampler.generate(PROMPTS[2:3], 5) == [wanted[2][:5]]


def test_a_stop_token_ends_its_row_alone(sampler, next_logits):
  whole = sampler.generate(PROMPTS, 20)
  stop = whole[1][5]
  ended = [row[: row.index(stop)] if stop in row else row for row in whole]
  assert sampler.generate(PROMPTS, 20, stop_ids=[stop]) == ended
  assert len(ended[1]) < 20


def test_a_predicate_ends_its_row_with_the_token_that_it_asks_about(sampler):
  whole = sampler.generate(PROMPTS, 20)
  assert sampler.generate(PROMPTS, 20, stop=lambda ids: len(ids) == 11) == [
    row[:11] for row in whole
  ]


def test_draws_follow_the_models_probabilities(model, params, next_logits):
  """One token, 4,000 draws: frequencies against temperature, top_k and top_p computed by hand."""
  sampler, prompt = (
    Sampler(model, params, batch_size=500, capacity=4),
    PROMPTS[1],
  )
  scaled = np.float64(next_logits(prompt)) / 1.7
  order = np.argsort(-scaled)

  def expected(top_k, top_p):
    probability = np.exp(scaled - scaled.max())
    if top_k:
      probability[order[top_k:]] = 0
    probability /= probability.sum()
    before = np.cumsum(probability[order]) - probability[order]
    probability[order[before >= top_p]] = 0
    return probability / probability.sum()

  for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.6), (8, 0.7)):
    drawn = sampler.generate(
      [prompt] * 4000, 1, temperature=1.7, top_k=top_k, top_p=top_p, seed=3
    )
    frequency = np.bincount(np.ravel(drawn), minlength=64) / 4000
    wanted = expected(top_k, top_p)
    assert not frequency[wanted == 0].any()
    assert np.abs(frequency - wanted).max() < 5 * np.sqrt(wanted.max() / 4000)
    assert np.count_nonzero(wanted) > 1


def test_a_rows_draws_depend_on_seed_and_row_alone(model, params, sampler):
  options = dict(temperature=4.0, seed=5)
  together = sampler.generate(PROMPTS, 12, **options)
  assert (
    Sampler(model, params, batch_size=2, capacity=160).generate(
      PROMPTS, 12, **options
    )
    == together
  )
  assert sampler.generate(PROMPTS, 12, temperature=4.0, seed=6) != together
  assert (
    sampler.generate([PROMPTS[0]] * 2, 12, **options)[0]
    != sampler.generate([PROMPTS[0]] * 2, 12, **options)[1]
  )
  assert sampler.generate(
    PROMPTS, 12, temperature=4.0, top_k=1, seed=5
  ) == sampler.generate(PROMPTS, 12)


def test_each_place_has_noise_of_its_own(sampler):
  """So hot that every token is as likely: noise that came back would bring the same token back."""
  (row,) = sampler.generate([PROMPTS[0]], 20, temperature=1e6, seed=5)
  assert len(set(row)) > 10


def test_nothing_compiles_twice(model, params):
  """Whatever the lengths of prompts and answers and the settings of one way of drawing."""
  sampler = Sampler(model, params, batch_size=2, capacity=64)
  sampler.generate([[1], [2, 3]], 9, temperature=0.5, top_k=3)
  functions = (sampler._prefill, sampler._draw)
  before = [function._cache_size() for function in functions]
  sampler.generate(
    [[4, 5, 6, 7]], 30, temperature=0.9, top_k=7, top_p=0.3, seed=9
  )
  sampler.generate([list(range(50)), [1]], 3, temperature=2.0, top_p=0.9)
  assert [function._cache_size() for function in functions] == before == [1, 1]


@pytest.mark.parametrize(
  ("prompts", "count", "options", "message"),
  [
    (
      [list(range(60)) * 4],
      1,
      {},
      "240 tokens and 1 new ones are more than the 200",
    ),
    ([[1] * 150], 51, {}, "150 tokens and 51 new"),
    ([[]], 1, {}, "a prompt of 0 tokens"),
    ([[1]], 0, {}, "max_new_tokens must be at least 1; got 0"),
    (
      [[1]],
      1,
      {"temperature": -1.0},
      "temperature must be at least 0; got -1.0",
    ),
    ([[1]], 1, {"temperature": float("nan")}, "temperature"),
    ([[1]], 1, {"top_p": 0.0}, "top_p must be above 0"),
    ([[1]], 1, {"top_k": -1}, "top_k must be at least 0"),
  ],
)
def test_bad_input(sampler, prompts, count, options, message):
  with pytest.raises(UserError, match=message):
    sampler.generate(prompts, count, **options)


@pytest.mark.parametrize("token", [64, -1, 7.9, True, float("nan")], ids=repr)
def test_ids_outside_the_vocabulary_are_refused(sampler, token):
  """At every entry, and in a late batch before the first one is read."""
  wrong = [[1], [2, token]]
  message = "^prompt 1 has .* at position 1: .* from 0 to 63,"
  for call in (
    lambda: sampler.prefill(wrong),
    lambda: sampler.generate(wrong, 2),
    lambda: next(sampler.stream(wrong, 2)),
    lambda: sampler.read(sampler.prefill([[1], [1]]), wrong),
  ):
    with pytest.raises(UserError, match=message):
      call()
  asked = []
  with pytest.raises(UserError, match="^prompt 9 has "):
    sampler.generate([*[[1]] * 9, [token]], 2, stop=asked.append)
  assert not asked
  with pytest.raises(UserError, match="^stop_ids has .* at position 0"):
    sampler.generate([[1]], 2, stop_ids=[token])
  with pytest.raises(UserError, match="^tokens has .* at position 3"):
    sampler.step(sampler.prefill([[1]]), [1, 2, 3, token])


def test_arrays_are_prompts(sampler):
  wanted = sampler.generate([[5, 6], [7, 8]], 3)
  prompts = np.array([[5, 6], [7, 8]], np.uint8)
  assert sampler.generate(prompts, 3) == wanted
  assert sampler.generate(jnp.asarray(prompts), 3) == wanted
  assert sampler.generate(list(map(tuple, prompts)), np.int64(3)) == wanted


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda s: s.generate([1, 2], 2), "prompt 0 is 1: pass a sequence"),
    (lambda s: s.generate([[1], "text"], 2), "prompt 0 is no text, but others"),
    (lambda s: s.generate(["text", [1]], 2), "prompt 1 is no text, but others"),
    (lambda s: s.prefill("text"), "prompt 0 has 't' at position 0"),
    (lambda s: s.step(s.prefill([[1]]), [1]), "tokens has 1 token ids: .* 4"),
    (lambda s: s.generate([[1]], 2.5), "max_new_tokens .* integer .* got 2.5"),
    (lambda s: s.generate([[1]], -2), "max_new_tokens must be at least 1"),
    (lambda s: s.generate([[1]], True), "max_new_tokens .* got True"),
    (lambda s: s.generate([[1]], 2, top_k=2.5), "top_k must be an integer"),
    (lambda s: s.generate([[1]], 2, seed=1.5), "seed must be an integer"),
    (lambda s: s.generate([[1]], 2, seed=2**31), "seed must be an integer"),
  ],
)
def test_wrong_calls(sampler, call, message):
  with pytest.raises(UserError, match=f"^{message}"):
    call(sampler)


def test_a_rows_draws_do_not_depend_on_jaxs_default_generator(
  model, params, sampler
):
  """With "rbg" as the default, numbers in a row would depend on the others."""
  options = dict(temperature=4.0, seed=5)
  wanted = sampler.generate(PROMPTS, 12, **options)
  with jax.default_prng_impl("rbg"):
    other = Sampler(model, params, batch_size=2, capacity=160)
    assert other.generate(PROMPTS, 12, **options) == wanted


def test_rows_share_pages_and_draw_what_they_would_without(
  model, params, sampler
):
  """Prompts of 1, 3, 59 and 140 tokens and 21 new ones need 1, 1, 1 and 2 pages. In 3 pages they go in two batches."""
  tight = Sampler(
    model, params, batch_size=4, capacity=200, cache_tokens=3 * 128
  )
  assert tight.generate(PROMPTS, 21) == sampler.generate(PROMPTS, 21)
  options = dict(temperature=4.0, seed=5)
  assert tight.generate(
    [*PROMPTS, PROMPTS[0]], 9, **options
  ) == sampler.generate([*PROMPTS, PROMPTS[0]], 9, **options)
  assert all(
    pool.tokens.shape[0] == 3
    for pool in tight.prefill(PROMPTS[:1], 9).cache.keys
  )
  with pytest.raises(
    UserError,
    match="rows of 21.* need 5 pages of 128 tokens, and the cache has 3: give it more .cache_tokens.",
  ):
    next(tight.stream(PROMPTS, 20))
  with pytest.raises(UserError, match="rows of 200, 200 tokens need 4 pages"):
    tight.prefill(
      PROMPTS[:2]
    )  # without a limit each has room for as many as the capacity allows


def test_a_prefix_in_pages_has_room_for_what_it_was_given(model, params):
  sampler = Sampler(model, params, batch_size=2, capacity=200, cache_tokens=200)
  beginning = sampler.prefill([[5] * 100], 20)
  assert (
    sampler.step(sampler.read(beginning, [[1] * 28]), [3, 3]).cache.lengths[0]
    == 129
  )
  with pytest.raises(
    UserError,
    match="a prompt of 29 tokens behind 100 others: it must have 1 to 28",
  ):
    sampler.read(beginning, [[1] * 29])


def test_int8_is_near_the_models_logits(model, params, next_logits):
  sampler = Sampler(
    model, params, batch_size=4, capacity=200, cache_dtype="int8"
  )
  state = sampler.step(sampler.prefill(PROMPTS), [1, 2, 3, 4])
  assert all(
    pool.tokens.dtype == jnp.int8
    for pool in (*state.cache.keys, *state.cache.values)
  )
  wanted = np.array(
    [
      next_logits([*prompt, token])
      for prompt, token in zip(PROMPTS, [1, 2, 3, 4], strict=True)
    ]
  )
  error = np.linalg.norm(state.logits - wanted, axis=1) / np.linalg.norm(
    wanted, axis=1
  )
  assert 1e-4 < error.max() < 0.03


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"cache_tokens": 0}, "cache_tokens = 0: must be at least 1"),
    (
      {"cache_dtype": "int4"},
      "dtype = int4: must be None for the model's float32",
    ),
  ],
  ids=str,
)
def test_a_cache_that_cannot_be_is_refused(model, params, options, message):
  with pytest.raises(UserError, match=message):
    Sampler(model, params, capacity=20, **options).prefill([[1]])


def test_a_capacity_beyond_the_models_limit_is_refused(model, params):
  with pytest.raises(
    UserError, match=r"301 tokens a row: the model takes 1 to 300"
  ):
    Sampler(model, params, capacity=301)
