"""The adapter gives lm-eval the model's likelihoods and greedy texts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402

from diffjax.config import Config, ModelConfig, UserError  # noqa: E402
from diffjax.data.document_tokens import separated_by  # noqa: E402
from diffjax.data.tokenizer import load_tokenizer  # noqa: E402
from diffjax.evals.methods import lm_eval as adapter  # noqa: E402
from diffjax.evals.methods.lm_eval import DiffjaxLM  # noqa: E402
from diffjax.evals.methods.scoring import Score  # noqa: E402
from diffjax.inference.trained import Trained  # noqa: E402
from diffjax.model.decoder import Decoder, logits  # noqa: E402
from tests.harness.parameters import parameters  # noqa: E402

BYTES = load_tokenizer("bytes")
# The token that begins a document.
SEPARATOR = 255
CONFIG = ModelConfig(
  num_layers=1,
  embed_dim=16,
  num_heads=1,
  num_kv_heads=1,
  head_dim=8,
  ffn_dim=16,
  max_length=48,
)


@pytest.fixture(scope="module")
def model() -> Trained:
  """A model that takes 48 tokens. Its probabilities are not nearly uniform."""
  model = Decoder(CONFIG)
  params = parameters(model, jax.ShapeDtypeStruct((1, 1), np.int32))
  params = jax.tree.map(lambda leaf: 3 * np.asarray(leaf), params)
  return Trained("model", Config(model=CONFIG), model, params, BYTES)


@pytest.fixture(scope="module")
def next_log_probabilities(model: Trained) -> Callable[[bytes], np.ndarray]:
  """A function that returns log-probabilities [N] of the token after a text.

  It computes them in float64 from the logits of a single row. Tokens are bytes.
  """

  @jax.jit
  def forward(tokens):
    hidden = model.model.apply({"params": model.params}, tokens)
    return logits(model.params, hidden)

  def compute(text):
    row = np.zeros((1, CONFIG.max_length), np.int32)
    row[0, : len(text)] = list(text)
    last_position = len(text) - 1
    last_logits = np.asarray(forward(row), np.float64)[0, last_position]
    return last_logits - np.log(np.exp(last_logits).sum())

  return compute


@pytest.fixture(scope="module")
def direct_score(
  next_log_probabilities: Callable[[bytes], np.ndarray],
) -> Callable[[bytes, bytes], Score]:
  """A function that scores a continuation by the definition.

  Its log-probability is the sum over its tokens, each after all tokens before
  it. It is greedy if each token is the likeliest one.
  """

  def compute(context, continuation):
    text = context
    log_probability = 0.0
    is_greedy = True
    for token in continuation:
      log_probabilities = next_log_probabilities(text)
      log_probability += log_probabilities[token]
      is_greedy &= bool(token == log_probabilities.argmax())
      text += bytes([token])
    return Score(log_probability, is_greedy)

  return compute


def request(kind: str, *arguments: Any) -> Instance:
  """Returns a request of lm-eval."""
  return Instance(kind, {}, arguments, 0)


def pair_requests(pairs: Sequence[tuple[str, str]]) -> list[Instance]:
  """Returns requests for the likelihoods of continuations after contexts."""
  return [request("loglikelihood", *pair) for pair in pairs]


def test_likelihoods_equal_a_softmax_over_all_logits(model, direct_score):
  """The score of a continuation equals its definition, `direct_score`.

  A separator precedes the context. Tokens are bytes.
  """
  # Contexts and continuations.
  text_pairs = [
    ("The cat", " sat"),
    ("", "alone"),
    ("Ünï", " cödé"),
    ("Q", "A" * 46),
  ]
  lm = DiffjaxLM(model, batch_tokens=128)

  results = lm.loglikelihood(pair_requests(text_pairs), disable_tqdm=True)

  separator = b"\xff"
  for (context, continuation), result in zip(text_pairs, results, strict=True):
    log_probability, is_greedy = result
    expected = direct_score(separator + context.encode(), continuation.encode())
    # The model computes in float32.
    assert log_probability == pytest.approx(expected.log_probability, rel=1e-5)
    assert is_greedy == expected.is_greedy


@pytest.fixture
def scored_pairs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
  """The contexts and continuations that are scored. The scores are 0."""
  collected = []

  def collect(
    model: Any, params: Any, new_pairs: Sequence[Any], **options: Any
  ) -> list[Score]:
    collected.extend(new_pairs)
    return [Score(0.0, True)] * len(new_pairs)

  monkeypatch.setattr(adapter, "score", collect)
  return collected


def test_spaces_at_the_end_of_a_context_are_part_of_the_continuation(
  model, scored_pairs
):
  lm = DiffjaxLM(model, batch_tokens=128)

  lm.loglikelihood([request("loglikelihood", "The cat  ", "sat")])

  assert scored_pairs == [([SEPARATOR, *b"The cat"], [*b"  sat"])]


def test_a_long_context_loses_its_oldest_tokens_except_the_separator(
  model, scored_pairs
):
  """The model reads 48 tokens: all except the last one of the continuation."""
  context = "x" * 30 + "y" * 40
  continuation = "zz"
  lm = DiffjaxLM(model, batch_tokens=128)

  lm.loglikelihood([request("loglikelihood", context, continuation)])

  # The separator, 46 tokens of the context and the first z are 48 tokens.
  end_of_context = b"x" * 6 + b"y" * 40
  assert scored_pairs == [([SEPARATOR, *end_of_context], [*b"zz"])]


def test_contexts_that_are_cut_are_reported(model, scored_pairs, caplog):
  """The model reads 48 tokens: all except the last one of the continuation."""
  requests = pair_requests(
    [
      # A separator and 47 of 48 z's are 48 tokens, so "x" is cut completely.
      ("x", "z" * 48),
      # There is no context to cut.
      ("", "z" * 48),
      # With one z less, there is room for one of nine x's.
      ("x" * 9, "z" * 47),
    ]
  )

  DiffjaxLM(model, batch_tokens=128).loglikelihood(requests)

  assert scored_pairs == [
    ([SEPARATOR], [*b"z" * 48]),
    ([SEPARATOR], [*b"z" * 48]),
    ([SEPARATOR, *b"x"], [*b"z" * 47]),
  ]
  assert (
    "2 of 3 contexts are longer than the model takes (48 tokens) and were cut"
    in caplog.text
  )
  assert "1 of these contexts were cut completely" in caplog.text


def test_a_continuation_that_is_longer_than_the_model_takes_raises(model):
  lm = DiffjaxLM(model, batch_tokens=128)

  message = "an answer of 49 tokens .'zzz.*max_length = 48"
  with pytest.raises(UserError, match=message):
    lm.loglikelihood([request("loglikelihood", "x", "z" * 49)])


def test_a_token_of_context_and_continuation_is_split(model, scored_pairs):
  """The tokenizer encodes "a" followed by "b" as one token.

  The continuation "b" is scored as a token of its own.
  """

  class JoiningTokenizer:
    document_tokens = separated_by(SEPARATOR)

    def encode(self, text: str) -> list[int]:
      return {"a": [1], "b": [2], "ab": [3]}[text]

  joining_model = dataclasses.replace(model, tokenizer=JoiningTokenizer())
  lm = DiffjaxLM(joining_model, batch_tokens=128)

  lm.loglikelihood([request("loglikelihood", "a", "b")])

  assert scored_pairs == [([SEPARATOR, 1], [2])]


def test_a_rolling_likelihood_is_summed_over_windows(model, direct_score):
  """The model reads a text in windows of 48 tokens, after a separator.

  Windows may overlap, but each token is scored once. `direct_score` is the
  score by the definition.
  """
  first_part = b"abcdefgh" * 6
  second_part = b"ijklmnop" * 6
  last_part = b"qrstuvwx"
  long_text = first_part + second_part + last_part
  texts = [b"short", b"x" * 48, long_text]
  requests = [request("loglikelihood_rolling", text.decode()) for text in texts]

  sums = DiffjaxLM(model, batch_tokens=256).loglikelihood_rolling(requests)

  separator = b"\xff"
  # The last window has 48 tokens, too: the last part without its last token,
  # which is not read, and the tokens before that part.
  num_context = 48 - (len(last_part) - 1)
  last_context = (first_part + second_part)[-num_context:]
  first_window = direct_score(separator, first_part).log_probability
  # The second window begins with the last token of the first part.
  second_window = direct_score(b"h", second_part).log_probability
  last_window = direct_score(last_context, last_part).log_probability
  expected = [
    direct_score(separator, b"short").log_probability,
    direct_score(separator, b"x" * 48).log_probability,
    first_window + second_window + last_window,
  ]
  # The model computes in float32.
  assert sums == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def greedy_ids(
  next_log_probabilities: Callable[[bytes], np.ndarray],
) -> list[int]:
  """The 12 likeliest tokens after "Hello", each after those before it."""
  text = b"\xffHello"
  ids: list[int] = []
  for _ in range(12):
    likeliest_token = int(next_log_probabilities(text).argmax())
    ids.append(likeliest_token)
    text += bytes([likeliest_token])
  return ids


def test_generation_stops_before_the_stop_string(model, greedy_ids):
  """`greedy_ids` is the model's greedy answer of 12 tokens to "Hello"."""
  greedy_text = BYTES.decode(greedy_ids)
  stop_string = greedy_text[5:7]
  text_before_stop, _, _ = greedy_text.partition(stop_string)
  no_stop = {"until": [], "max_gen_toks": 12}
  one_stop = {"until": stop_string, "max_gen_toks": 12}
  two_stops = {"until": [stop_string, "never there"], "max_gen_toks": 12}
  requests = [
    request("generate_until", "Hello", no_stop),
    request("generate_until", "Hello", one_stop),
    request("generate_until", "Hello", two_stops),
  ]

  texts = DiffjaxLM(model, batch_tokens=128).generate_until(requests)

  assert texts == [greedy_text, text_before_stop, text_before_stop]


def test_generation_stops_after_the_maximum_number_of_tokens(model, greedy_ids):
  """`greedy_ids` is the model's greedy answer of 12 tokens to "Hello"."""
  options = {"until": [], "max_gen_toks": 3}
  lm = DiffjaxLM(model, batch_tokens=128)

  (text,) = lm.generate_until([request("generate_until", "Hello", options)])

  first_three_tokens = greedy_ids[:3]
  assert text == BYTES.decode(first_three_tokens)


def test_generation_samples_if_asked_to(model, greedy_ids):
  """Twelve sampled tokens are hardly ever the twelve likeliest ones.

  Those are `greedy_ids`, the model's greedy answer to "Hello".
  """
  options = {
    "until": [],
    "max_gen_toks": 12,
    "do_sample": True,
    "temperature": 1.0,
  }
  lm = DiffjaxLM(model, batch_tokens=128)

  (sampled,) = lm.generate_until([request("generate_until", "Hello", options)])

  assert sampled != BYTES.decode(greedy_ids)


@pytest.fixture
def recorded_generations(
  monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[list[int], int]]:
  """The prompts of a test, each with the maximum length of its answer."""
  recorded = []

  class RecordingSampler:
    def __init__(self, model, params, *, batch_size, capacity):
      self.capacity = capacity

    def generate(self, prompts, max_new_tokens, **options):
      for prompt in prompts:
        assert len(prompt) + max_new_tokens <= self.capacity <= 48
        recorded.append((prompt, max_new_tokens))
      return [list(b"answer")] * len(prompts)

  monkeypatch.setattr(adapter, "Sampler", RecordingSampler)
  return recorded


def generate(model: Trained, texts: Sequence[str], max_gen_toks: int) -> None:
  """Asks for answers of at most this many tokens."""
  options = {"until": [], "max_gen_toks": max_gen_toks}
  requests = [request("generate_until", text, options) for text in texts]
  DiffjaxLM(model, batch_tokens=128).generate_until(requests)


@pytest.mark.parametrize(
  "context_size, max_gen_toks, kept_size, num_new",
  [
    # A separator, the context and the answer fit: they are 48 tokens.
    (1, 46, 1, 46),
    (10, 37, 10, 37),
    (22, 25, 22, 25),
    (23, 24, 23, 24),
    (24, 23, 24, 23),
    (25, 22, 25, 22),
    (46, 1, 46, 1),
    # An answer of 24 tokens at most is not shortened, but the context is.
    (24, 24, 23, 24),
    (25, 23, 24, 23),
    (46, 2, 45, 2),
    (47, 1, 46, 1),
    (58, 1, 46, 1),
    (58, 24, 23, 24),
    # A longer answer is shortened to 24 tokens.
    (1, 47, 1, 24),
    (10, 38, 10, 24),
    (22, 26, 22, 24),
    (23, 25, 23, 24),
    (24, 25, 23, 24),
    (58, 79, 23, 24),
  ],
)
def test_an_answer_leaves_room_for_its_context(
  model, recorded_generations, context_size, max_gen_toks, kept_size, num_new
):
  """The model takes 48 tokens: a separator, a context and an answer.

  A context that is too long loses its beginning.
  """
  context = bytes(range(65, 65 + context_size))

  generate(model, [context.decode()], max_gen_toks)

  num_lost = context_size - kept_size
  prompt = [SEPARATOR, *context[num_lost:]]
  assert recorded_generations == [(prompt, num_new)]


def test_a_shortened_answer_is_reported(model, recorded_generations, caplog):
  """Half of the model's 48 tokens are for the answer."""
  generate(model, ["x" * 30], max_gen_toks=256)

  # The prompt is a separator and the last 23 of 30 x's.
  assert recorded_generations == [([SEPARATOR, *b"x" * 23], 24)]
  assert "1 answers have at most 24 of 256 tokens" in caplog.text


def test_requests_of_one_call_can_have_different_limits(
  model, recorded_generations
):
  """The model takes 48 tokens: a separator, a context and an answer.

  If a context leaves no room for 40 tokens, its answer has at most 24. Answers
  of the same length are generated together.
  """
  texts = ["x" * 7, "y" * 8, "z" * 7, "w" * 8]

  generate(model, texts, max_gen_toks=40)

  assert recorded_generations == [
    ([SEPARATOR, *b"xxxxxxx"], 40),
    ([SEPARATOR, *b"zzzzzzz"], 40),
    ([SEPARATOR, *b"yyyyyyyy"], 24),
    ([SEPARATOR, *b"wwwwwwww"], 24),
  ]


def test_a_model_that_is_too_short_for_an_answer_raises(model):
  """A context and an answer have at least two tokens each."""
  short_config = Config(model=dataclasses.replace(CONFIG, max_length=3))
  short_model = dataclasses.replace(model, config=short_config)
  lm = DiffjaxLM(short_model, batch_tokens=128)
  options = {"max_gen_toks": 9}

  message = "max_length = 3: a context and an answer need at least 4 tokens"
  with pytest.raises(UserError, match=message):
    lm.generate_until([request("generate_until", "Hello", options)])


def test_the_adapter_is_not_registered_in_lm_eval():
  from lm_eval.api.registry import model_registry

  for name in model_registry:
    assert "diff" not in name
