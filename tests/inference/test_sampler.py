"""The sampler generates what a loop over the whole model would generate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder, logits
from tests.harness.tolerances import FLOAT32_MODEL

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
PROMPT_OF_140 = np.random.default_rng(0).integers(0, 64, 140).tolist()
PROMPTS = [[5], [7, 3, 9], list(range(1, 60)), PROMPT_OF_140]


@pytest.fixture(scope="module")
def model():
  return Decoder(CONFIG)


@pytest.fixture(scope="module")
def params(model):
  ids = np.zeros((1, 1), np.int32)
  params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
  params = jax.device_get(params)
  # Larger embeddings separate the logits, so that rounding errors do not change
  # which token is the most likely one.
  return params | {"embedding": 3 * params["embedding"]}


@pytest.fixture(scope="module")
def sampler(model, params):
  """A sampler that answers four prompts at a time, of up to 200 tokens each."""
  return Sampler(model, params, batch_size=4, capacity=200)


@pytest.fixture(scope="module")
def next_logits(model, params):
  """Returns a function from token ids to the logits of the next token.

  It applies the whole model, without a cache.
  """

  @jax.jit
  def all_logits(window):
    return logits(params, model.apply({"params": params}, window))

  def last_logits(ids):
    window = np.zeros((1, 200), np.int32)
    window[0, : len(ids)] = ids
    return np.asarray(all_logits(window))[0, len(ids) - 1]

  return last_logits


def generate_greedily(next_logits, prompt, num_tokens):
  """Returns the tokens that a loop over the whole model generates."""
  ids = list(prompt)
  for _ in range(num_tokens):
    next_id = int(np.argmax(next_logits(ids)))
    ids.append(next_id)
  return ids[len(prompt) :]


# The model's outputs.


def test_prefill_and_steps_give_the_logits_of_the_model(sampler, next_logits):
  """Four prompts are read, then two tokens are appended to each of them."""
  rows = [list(prompt) for prompt in PROMPTS]

  state = sampler.prefill(PROMPTS)
  expected = np.array([next_logits(row) for row in rows])
  chex.assert_trees_all_close(state.logits, expected, **FLOAT32_MODEL)

  for tokens in ([1, 2, 3, 4], [9, 8, 7, 6]):
    state = sampler.step(state, tokens)
    for row, token in zip(rows, tokens, strict=True):
      row.append(token)
    expected = np.array([next_logits(row) for row in rows])
    chex.assert_trees_all_close(state.logits, expected, **FLOAT32_MODEL)


@pytest.mark.parametrize(
  "tails",
  [
    pytest.param([[5], [7, 3, 9], [6] * 59, [4, 4]], id="full batch"),
    pytest.param([[6] * 59, [4, 4]], id="half a batch"),
  ],
)
def test_prompts_can_share_a_prefix_that_is_read_once(
  sampler, next_logits, tails
):
  """Four rows read the same 140 tokens. Then each row reads another tail.

  The model computes the expected logits from a prefix and its tail.
  """
  prefix = sampler.prefill([PROMPT_OF_140] * 4)

  state = sampler.read(prefix, tails)

  for row, tail in enumerate(tails):
    expected = next_logits([*PROMPT_OF_140, *tail])
    chex.assert_trees_all_close(state.logits[row], expected, **FLOAT32_MODEL)


def test_generation_continues_after_a_shared_prefix(sampler, next_logits):
  """Four rows read the prefix, then other tails, then one more token each."""
  prefix = sampler.prefill([PROMPT_OF_140] * 4)
  state = sampler.read(prefix, [[5], [7], [8, 9], [4]])

  state = sampler.step(state, [1, 2, 3, 4])

  # Row 2 has the tail 8, 9 and the next token 3.
  expected = next_logits([*PROMPT_OF_140, 8, 9, 3])
  chex.assert_trees_all_close(state.logits[2], expected, **FLOAT32_MODEL)


@pytest.mark.parametrize(
  ("tails", "message"),
  [
    (
      [list(range(61))],
      "a prompt of 61 tokens behind 140 others: it must have 1 to 60",
    ),
    ([[1], []], "a prompt of 0 tokens"),
  ],
  ids=["too long", "empty"],
)
def test_a_tail_must_fit_behind_its_prefix(sampler, tails, message):
  """The sampler's cache has 200 tokens. The prefix takes 140 of them."""
  prefix = sampler.prefill([PROMPT_OF_140] * 4)
  with pytest.raises(UserError, match=message):
    sampler.read(prefix, tails)


# Greedy generation.


def test_greedy_generation_equals_a_loop_over_the_model(sampler, next_logits):
  """The sampler generates bursts of tokens: here two, and a part of a third."""
  answers = sampler.generate(PROMPTS, 21)

  for prompt, answer in zip(PROMPTS, answers, strict=True):
    assert answer == generate_greedily(next_logits, prompt, 21)


@pytest.mark.parametrize(
  "prompts",
  [
    pytest.param([*PROMPTS, *PROMPTS[:2]], id="more than a batch"),
    pytest.param(PROMPTS[2:3], id="less than a batch"),
  ],
)
def test_the_number_of_prompts_does_not_change_the_answers(sampler, prompts):
  """The sampler answers four prompts at a time. Each is also answered alone."""
  answers = sampler.generate(prompts, 5)

  for prompt, answer in zip(prompts, answers, strict=True):
    assert sampler.generate([prompt], 5) == [answer]


def test_a_stop_token_ends_only_its_own_row(sampler):
  """An answer ends before its first stop token."""
  whole_answers = sampler.generate(PROMPTS, 20)
  # A token that row 1 generates.
  stop_id = whole_answers[1][5]

  answers = sampler.generate(PROMPTS, 20, stop_ids=[stop_id])

  expected = []
  for answer in whole_answers:
    if stop_id in answer:
      answer = answer[: answer.index(stop_id)]
    expected.append(answer)
  assert answers == expected
  assert len(answers[1]) < 20


def test_a_stop_predicate_ends_a_row_after_the_token_it_accepts(sampler):
  def has_eleven_tokens(ids):
    return len(ids) == 11

  answers = sampler.generate(PROMPTS, 20, stop=has_eleven_tokens)

  whole_answers = sampler.generate(PROMPTS, 20)
  assert answers == [answer[:11] for answer in whole_answers]


# Random draws.


@pytest.fixture(scope="module")
def wide_sampler(model, params):
  """A sampler that answers 500 prompts at a time, of up to 3 tokens each."""
  return Sampler(model, params, batch_size=500, capacity=4)


def probabilities_of_kept_tokens(scaled_logits, top_k, top_p):
  """Returns the probabilities of the tokens that top-k and top-p keep."""
  order = np.argsort(-scaled_logits)
  probabilities = np.exp(scaled_logits - scaled_logits.max())
  if top_k > 0:
    probabilities[order[top_k:]] = 0
  probabilities /= probabilities.sum()

  # top-p drops a token if the more likely ones have this probability already.
  sorted_probabilities = probabilities[order]
  probability_before = np.cumsum(sorted_probabilities) - sorted_probabilities
  probabilities[order[probability_before >= top_p]] = 0
  return probabilities / probabilities.sum()


@pytest.mark.parametrize(
  ("top_k", "top_p"),
  [
    pytest.param(0, 1.0, id="all tokens", marks=pytest.mark.full),
    pytest.param(5, 1.0, id="top-k", marks=pytest.mark.full),
    pytest.param(0, 0.6, id="top-p", marks=pytest.mark.full),
    pytest.param(8, 0.7, id="top-k and top-p"),
  ],
)
def test_draws_follow_the_probabilities_of_the_model(
  wide_sampler, next_logits, top_k, top_p
):
  """The frequencies of the next token approximate its probabilities."""
  prompt = [7, 3, 9]
  temperature = 1.7
  num_draws = 4000
  vocab_size = 64
  scaled_logits = np.float64(next_logits(prompt)) / temperature
  expected = probabilities_of_kept_tokens(scaled_logits, top_k, top_p)

  answers = wide_sampler.generate(
    [prompt] * num_draws,
    max_new_tokens=1,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=3,
  )

  draws = np.concatenate(answers)
  frequencies = np.bincount(draws, minlength=vocab_size) / num_draws
  # The standard error of a frequency is √(p(1 − p) / draws), and p(1 − p) is
  # less than the largest p.
  max_standard_error = np.sqrt(expected.max() / num_draws)
  assert np.count_nonzero(expected) > 1
  assert not frequencies[expected == 0].any()
  assert np.abs(frequencies - expected).max() < 5 * max_standard_error


@pytest.mark.full
def test_draws_do_not_depend_on_the_batch_size(model, params, sampler):
  options = dict(temperature=4.0, seed=5)
  # `sampler` answers four prompts at a time, and this one two.
  narrow_sampler = Sampler(model, params, batch_size=2, capacity=160)

  answers = narrow_sampler.generate(PROMPTS, 12, **options)

  assert answers == sampler.generate(PROMPTS, 12, **options)


def test_draws_depend_on_the_seed(sampler):
  answers = sampler.generate(PROMPTS, 12, temperature=4.0, seed=5)
  other_answers = sampler.generate(PROMPTS, 12, temperature=4.0, seed=6)

  assert answers != other_answers


def test_draws_depend_on_the_row(sampler):
  prompt = [5]

  first, second = sampler.generate([prompt, prompt], 12, temperature=4, seed=5)

  assert first != second


def test_draws_from_one_token_are_greedy(sampler):
  """top_k = 1 leaves only the most likely token."""
  answers = sampler.generate(PROMPTS, 12, temperature=4.0, top_k=1, seed=5)

  # The default temperature is 0, so this is greedy.
  assert answers == sampler.generate(PROMPTS, 12)


def test_each_position_has_its_own_noise(sampler):
  """A draw adds noise to the logits, and takes the largest one.

  At this temperature all tokens are equally likely. If all positions had the
  same noise, they would get the same token.
  """
  (answer,) = sampler.generate([[5]], 20, temperature=1e6, seed=5)

  assert len(set(answer)) > 10


@pytest.mark.full
def test_draws_do_not_depend_on_the_default_generator_of_jax(model, params):
  """A row's draws are the same in batches of two and of four rows.

  JAX's generator "rbg" would draw other numbers for another batch size.
  """
  options = dict(temperature=4.0, seed=5)
  sampler = Sampler(model, params, batch_size=4, capacity=200)
  expected = sampler.generate(PROMPTS, 12, **options)

  with jax.default_prng_impl("rbg"):
    rbg_sampler = Sampler(model, params, batch_size=2, capacity=160)
    answers = rbg_sampler.generate(PROMPTS, 12, **options)

  assert answers == expected


def test_lengths_and_settings_do_not_recompile(model, params):
  """All prompts of up to 64 tokens share a program, and so do all draws."""
  sampler = Sampler(model, params, batch_size=2, capacity=64)

  # The prompts, the answers and all settings differ between the calls.
  sampler.generate([[1], [2, 3]], 9, temperature=0.5, top_k=3)
  sampler.generate([[4] * 50], 3, temperature=0.9, top_p=0.3, seed=9)
  sampler.generate([[5, 6]], 30, temperature=2.0, top_k=7, top_p=0.9)
  prefix = sampler.prefill([[7] * 20, [7] * 20])
  sampler.read(prefix, [[1], [2, 3]])

  # A jitted function of JAX counts its compiled versions.
  num_programs_for_prompts = sampler._prefill._cache_size()
  num_programs_for_draws = sampler._draw._cache_size()
  assert num_programs_for_prompts == 1
  assert num_programs_for_draws == 1


# Wrong arguments.


@pytest.mark.parametrize(
  ("prompt_length", "num_tokens", "message"),
  [
    (240, 1, "240 tokens and 1 new ones are more than the 200"),
    (150, 51, "150 tokens and 51 new"),
    (0, 1, "a prompt of 0 tokens"),
  ],
)
def test_a_prompt_and_its_answer_have_1_to_200_tokens(
  sampler, prompt_length, num_tokens, message
):
  prompt = [1] * prompt_length
  with pytest.raises(UserError, match=message):
    sampler.generate([prompt], num_tokens)


@pytest.mark.parametrize(
  ("num_tokens", "message"),
  [
    (0, "max_new_tokens must be at least 1; got 0"),
    (-2, "max_new_tokens must be at least 1"),
    (2.5, "max_new_tokens .* integer .* got 2.5"),
    (True, "max_new_tokens .* got True"),
  ],
)
def test_the_number_of_new_tokens_is_a_positive_integer(
  sampler, num_tokens, message
):
  with pytest.raises(UserError, match=message):
    sampler.generate([[1]], num_tokens)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": -1.0}, "temperature must be at least 0; got -1"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p must be above 0"),
    ({"top_k": -1}, "top_k must be at least 0"),
    ({"top_k": 2.5}, "top_k must be an integer"),
    ({"seed": 1.5}, "seed must be an integer"),
    ({"seed": 2**31}, "seed must be an integer"),
  ],
  ids=str,
)
def test_an_option_outside_its_range_is_rejected(sampler, options, message):
  with pytest.raises(UserError, match=message):
    sampler.generate([[1]], 1, **options)


@pytest.mark.parametrize(
  ("prompts", "message"),
  [
    ([1, 2], "prompt 0 is 1: pass a sequence"),
    ([[1], "text"], "prompt 0 is no text, but others"),
    (["text", [1]], "prompt 1 is no text, but others"),
  ],
)
def test_prompts_are_all_texts_or_all_sequences_of_ids(
  sampler, prompts, message
):
  with pytest.raises(UserError, match=message):
    sampler.generate(prompts, 2)


def test_prefill_rejects_texts(sampler):
  """Otherwise the characters of a text would count as prompts."""
  with pytest.raises(UserError, match="^prompt 0 has 't' at position 0"):
    sampler.prefill("text")


def test_a_step_needs_a_token_for_each_row(sampler):
  """Also rows without a prompt need one. The sampler has four rows."""
  state = sampler.prefill([[1]])
  with pytest.raises(UserError, match="^tokens has 1 token ids: .* 4"):
    sampler.step(state, [1])


# Not in the vocabulary of 64 tokens.
@pytest.fixture(params=[64, -1, 7.9, True, float("nan")], ids=repr)
def wrong_id(request):
  return request.param


def test_every_method_rejects_wrong_ids_in_prompts(sampler, wrong_id):
  """The wrong ids are 64, -1, 7.9, True and NaN. The vocabulary has 64 ids."""
  prompts = [[1], [2, wrong_id]]
  prefix = sampler.prefill([[1], [1]])
  message = "^prompt 1 has .* at position 1: .* from 0 to 63,"

  with pytest.raises(UserError, match=message):
    sampler.prefill(prompts)
  with pytest.raises(UserError, match=message):
    sampler.generate(prompts, max_new_tokens=2)
  with pytest.raises(UserError, match=message):
    next(sampler.stream(prompts, max_new_tokens=2))
  with pytest.raises(UserError, match=message):
    sampler.read(prefix, prompts)


def test_all_prompts_are_checked_before_the_first_is_read(sampler, wrong_id):
  """The wrong id is in the third batch of four prompts."""
  prompts = [[1]] * 9 + [[wrong_id]]
  # The sampler calls `stop` with every answer so far.
  answers_seen = []

  with pytest.raises(UserError, match="^prompt 9 has "):
    sampler.generate(prompts, 2, stop=answers_seen.append)

  assert not answers_seen


def test_wrong_stop_ids_are_rejected(sampler, wrong_id):
  with pytest.raises(UserError, match="^stop_ids has .* at position 0"):
    sampler.generate([[1]], 2, stop_ids=[wrong_id])


def test_a_step_rejects_wrong_ids(sampler, wrong_id):
  state = sampler.prefill([[1]])
  with pytest.raises(UserError, match="^tokens has .* at position 3"):
    sampler.step(state, [1, 2, 3, wrong_id])


@pytest.mark.parametrize(
  "prompts",
  [
    pytest.param(np.array([[5, 6], [7, 8]], np.uint8), id="NumPy array"),
    pytest.param(jnp.array([[5, 6], [7, 8]]), id="JAX array"),
    pytest.param([(5, 6), (7, 8)], id="tuples"),
  ],
)
def test_prompts_can_be_arrays_and_tuples(sampler, prompts):
  answers = sampler.generate(prompts, 3)

  assert answers == sampler.generate([[5, 6], [7, 8]], 3)


def test_the_number_of_new_tokens_can_be_an_integer_of_numpy(sampler):
  answers = sampler.generate([[5, 6]], np.int64(3))

  assert answers == sampler.generate([[5, 6]], 3)


# Pages of the cache.


@pytest.fixture(scope="module")
def three_page_sampler(model, params):
  """A sampler of four rows, whose cache has only three pages of 128 tokens."""
  return Sampler(
    model, params, batch_size=4, capacity=200, cache_tokens=3 * 128
  )


def test_a_cache_with_few_pages_gives_the_same_answers(
  three_page_sampler, sampler
):
  """With few pages, the sampler answers fewer prompts at a time.

  With 21 new tokens, the prompts of 1, 3, 59 and 140 tokens need 1, 1, 1 and 2
  pages of 128 tokens. The cache has three pages, so there are two batches.
  """
  answers = three_page_sampler.generate(PROMPTS, 21)

  assert answers == sampler.generate(PROMPTS, 21)


@pytest.mark.full
def test_a_cache_with_few_pages_gives_the_same_draws(
  three_page_sampler, sampler
):
  """With few pages, the sampler answers fewer prompts at a time.

  Draws depend on the number of the prompt, and not on its row in a batch.
  """
  prompts = [*PROMPTS, [5]]
  options = dict(temperature=4.0, seed=5)

  answers = three_page_sampler.generate(prompts, 9, **options)

  assert answers == sampler.generate(prompts, 9, **options)


def test_a_cache_has_as_many_pages_as_it_was_given(three_page_sampler):
  """A page has 128 tokens."""
  state = three_page_sampler.prefill([[5]], 9)

  for pool in state.cache.keys:
    assert pool.tokens.shape[0] == 3


def test_too_few_pages_for_a_batch_are_an_error(three_page_sampler):
  message = (
    "rows of 21.* need 5 pages of 128 tokens, and the cache has 3:"
    " give it more .cache_tokens."
  )
  with pytest.raises(UserError, match=message):
    next(three_page_sampler.stream(PROMPTS, 20))


def test_without_a_limit_a_row_gets_pages_for_the_whole_capacity(
  three_page_sampler,
):
  """Each of two rows of up to 200 tokens needs two pages of 128 tokens."""
  with pytest.raises(UserError, match="rows of 200, 200 tokens need 4 pages"):
    three_page_sampler.prefill([[5], [7, 3, 9]])


@pytest.mark.full
def test_a_tail_may_fill_the_last_page_of_its_prefix(model, params):
  """A prefix with 20 tokens to come reserves whole pages of 128 tokens."""
  page_size = 128
  prefix_length = 100
  tail_length = page_size - prefix_length
  sampler = Sampler(model, params, batch_size=1, capacity=200, cache_tokens=200)
  prefix = sampler.prefill([[5] * prefix_length], 20)

  state = sampler.read(prefix, [[1] * tail_length])
  state = sampler.step(state, [3])

  assert state.cache.lengths.tolist() == [prefix_length + tail_length + 1]


def test_a_tail_must_fit_in_the_pages_of_its_prefix(model, params):
  """The prefix of 100 tokens has one page, with room for 28 more tokens."""
  sampler = Sampler(model, params, batch_size=1, capacity=200, cache_tokens=200)
  prefix = sampler.prefill([[5] * 100], 20)

  message = "a prompt of 29 tokens behind 100 others: it must have 1 to 28"
  with pytest.raises(UserError, match=message):
    sampler.read(prefix, [[1] * 29])


def test_an_int8_cache_approximates_the_logits(model, params, next_logits):
  """The sampler reads two prompts, and then one more token after each."""
  sampler = Sampler(
    model, params, batch_size=2, capacity=200, cache_dtype="int8"
  )

  state = sampler.prefill([[7, 3, 9], PROMPT_OF_140])
  state = sampler.step(state, [1, 2])

  for pool in (*state.cache.keys, *state.cache.values):
    assert pool.tokens.dtype == jnp.int8
  expected = np.stack(
    [next_logits([7, 3, 9, 1]), next_logits([*PROMPT_OF_140, 2])]
  )
  distance = np.linalg.norm(state.logits - expected, axis=1)
  relative_error = distance / np.linalg.norm(expected, axis=1)
  # int8 has steps of 1/127 of the largest number, which is about 1%.
  assert relative_error.max() < 0.03
  # Without rounding, the error would be below 1e-4.
  assert relative_error.max() > 1e-4


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
def test_an_impossible_cache_is_rejected(model, params, options, message):
  with pytest.raises(UserError, match=message):
    sampler = Sampler(model, params, capacity=20, **options)
    # The cache is allocated here.
    sampler.prefill([[1]])


def test_a_capacity_beyond_the_limit_of_the_model_is_rejected(model, params):
  """The model has max_length = 300."""
  message = "301 tokens a row: the model takes 1 to 300"
  with pytest.raises(UserError, match=message):
    Sampler(model, params, capacity=301)
