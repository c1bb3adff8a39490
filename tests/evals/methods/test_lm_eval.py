"""The adapter gives lm-eval the model's likelihoods and greedy texts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  params = jax.tree.map(lambda leaf: 3 * leaf, params)
  return Trained("model", Config(model=CONFIG), model, params, BYTES)


@pytest.fixture(scope="module")
def log_softmax(model: Trained) -> Callable[[Sequence[int]], np.ndarray]:
  """A function that returns log-probabilities [T, N] of the next tokens.

  It computes them in float64 from the logits of a single row of ids.
  """

  @jax.jit
  def forward(tokens):
    hidden = model.model.apply({"params": model.params}, tokens)
    return logits(model.params, hidden)

  def compute(ids):
    row = np.zeros((1, CONFIG.max_length), np.int32)
    row[0, : len(ids)] = ids
    row_logits = np.asarray(forward(row)[0, : len(ids)], np.float64)
    normalizer = np.log(np.exp(row_logits).sum(-1, keepdims=True))
    return row_logits - normalizer

  return compute


def request(kind: str, *arguments: Any) -> Instance:
  """Returns a request of lm-eval."""
  return Instance(kind, {}, arguments, 0)


def pair_requests(pairs: Sequence[tuple[str, str]]) -> list[Instance]:
  """Returns requests for the likelihoods of continuations after contexts."""
  return [request("loglikelihood", *pair) for pair in pairs]


def test_likelihoods_equal_a_softmax_over_all_logits(model, log_softmax):
  """A likelihood is the sum of the log-probabilities of a continuation.

  A continuation is greedy if each of its tokens is the likeliest one.
  """
  # Contexts and continuations. Tokens are bytes.
  text_pairs = [
    ("The cat", " sat"),
    ("", "alone"),
    ("ends in spaces  ", "word"),
    ("Ünï", " cödé"),
    ("Q", "A" * 46),
  ]

  results = DiffjaxLM(model, batch_tokens=128).loglikelihood(
    pair_requests(text_pairs), disable_tqdm=True
  )

  for (context, continuation), result in zip(text_pairs, results, strict=True):
    log_probability, is_greedy = result
    separator = 255
    ids = [separator, *(context + continuation).encode()]
    # lm-eval moves spaces at the end of a context to the continuation.
    first_scored = len(context.rstrip().encode())
    targets = ids[first_scored + 1 :]
    table = log_softmax(ids[:-1])[first_scored:]  # [targets, N]
    target_values = table[np.arange(len(targets)), targets]
    assert log_probability == pytest.approx(target_values.sum(), rel=1e-5)
    assert is_greedy == np.array_equal(table.argmax(axis=-1), targets)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
  """The pairs that are scored during a test. All have the score 0."""
  collected = []

  def collect(
    model: Any, params: Any, new_pairs: Sequence[Any], **options: Any
  ) -> list[Score]:
    collected.extend(new_pairs)
    return [Score(0.0, True)] * len(new_pairs)

  monkeypatch.setattr(adapter, "score", collect)
  return collected


def test_a_long_context_loses_its_oldest_tokens_except_the_separator(
  model, pairs, caplog
):
  """The model takes 48 inputs.

  These are the separator (255), the context and the continuation without its
  last token. The fixture `pairs` records what would be scored.
  """
  requests = pair_requests(
    [("x" * 30 + "y" * 40, "zz"), ("x", "z" * 48), ("y", "zz")]
  )

  DiffjaxLM(model, batch_tokens=128).loglikelihood(requests)

  assert pairs == [
    # The separator, 6 x's, 40 y's and the first z are 48 inputs.
    ([255, *b"x" * 6, *b"y" * 40], [*b"zz"]),
    ([255], [*b"z" * 48]),
    ([255, *b"y"], [*b"zz"]),
  ]
  assert (
    "2 of 3 contexts are longer than the model takes (48 tokens) and were cut"
    in caplog.text
  )


def test_a_context_that_is_cut_completely_is_reported(model, pairs, caplog):
  """The model takes 48 tokens, so 48 z's leave no room for the first x.

  The fixture `pairs` records the contexts and continuations that are scored.
  """
  requests = pair_requests(
    [("x", "z" * 48), ("", "z" * 48), ("x" * 9, "z" * 47)]
  )

  DiffjaxLM(model, batch_tokens=128).loglikelihood(requests)

  # 47 z's leave room for one of nine x's, after the separator.
  last_context, _ = pairs[2]
  assert last_context == [255, *b"x"]
  # Only the first context lost all of its text. The second one had none.
  assert "1 of these contexts were cut completely" in caplog.text


def test_a_continuation_that_is_longer_than_the_model_takes_raises(model):
  lm = DiffjaxLM(model, batch_tokens=128)

  message = "an answer of 49 tokens .'zzz.*max_length = 48"
  with pytest.raises(UserError, match=message):
    lm.loglikelihood([request("loglikelihood", "x", "z" * 49)])


class JoiningTokenizer:
  """A tokenizer with one token for "ab", "a" and "b" each."""

  document_tokens = separated_by(255)

  def encode(self, text: str) -> list[int]:
    if text == "ab":
      return [200]
    return [ord(text)]


def test_a_token_of_context_and_continuation_is_split(model, pairs):
  """The tokenizer joins "a" and "b" to one token, so "b" would have none.

  The fixture `pairs` records the contexts and continuations that are scored.
  """
  joining_model = dataclasses.replace(model, tokenizer=JoiningTokenizer())
  lm = DiffjaxLM(joining_model, batch_tokens=128)

  lm.loglikelihood([request("loglikelihood", "a", "b")])

  assert pairs == [([255, ord("a")], [ord("b")])]


def test_a_rolling_likelihood_is_summed_over_windows(model, log_softmax):
  """A text is read in windows of 48 tokens, which the model takes at most.

  Each token is scored in the first window that contains it.
  """
  texts = [
    "short",
    "x" * 48,
    # Three windows of 48 tokens. The last one overlaps the second.
    "a longer text, which the model reads in windows that are as long as it"
    " takes: three of them, the last full ",
  ]
  requests = [request("loglikelihood_rolling", text) for text in texts]

  sums = DiffjaxLM(model, batch_tokens=256).loglikelihood_rolling(requests)

  for text, log_likelihood in zip(texts, sums, strict=True):
    # A separator comes first, so the n-th character has the index n of `ids`.
    ids = [255, *text.encode()]
    expected = 0.0
    for first_scored in range(0, len(text), 48):
      stop = min(first_scored + 48, len(text))
      # A window is full unless the text is shorter.
      start = max(stop - 48, 0)
      table = log_softmax(ids[start:stop])
      for position in range(first_scored, stop):
        next_id = ids[position + 1]
        expected += table[position - start, next_id]
    assert log_likelihood == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def greedy_ids(
  log_softmax: Callable[[Sequence[int]], np.ndarray],
) -> list[int]:
  """The 12 likeliest tokens after "Hello", each after those before it."""
  prompt = [255, *b"Hello"]
  ids: list[int] = []
  for _ in range(12):
    next_log_probabilities = log_softmax(prompt + ids)[-1]
    ids.append(int(next_log_probabilities.argmax()))
  return ids


def test_generation_stops_before_the_stop_string(model, greedy_ids):
  """The stop string is two characters in the middle of the greedy answer.

  `greedy_ids` is the model's greedy answer of 12 tokens to "Hello".
  """
  greedy_text = BYTES.decode(greedy_ids)
  # `until` has the stop strings, and `max_gen_toks` is the maximum length.
  stop_string = greedy_text[5:7]
  whole = {"until": [], "max_gen_toks": 12}
  stopped = {"until": [stop_string, "never there"], "max_gen_toks": 12}
  short = {"until": stop_string, "max_gen_toks": 3}
  requests = [
    request("generate_until", "Hello", whole),
    request("generate_until", "Hello", stopped),
    request("generate_until", "Hello", short),
  ]

  texts = DiffjaxLM(model, batch_tokens=128).generate_until(requests)

  assert texts == [
    greedy_text,
    greedy_text[: greedy_text.index(stop_string)],
    BYTES.decode(greedy_ids[:3]).partition(stop_string)[0],
  ]


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


class Generation(NamedTuple):
  """A prompt, and the maximum number of tokens that are generated for it."""

  prompt: list[int]
  num_new: int


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
  """The generations of a test, which fit the model's 48 tokens."""
  recorded: list[Generation] = []

  class RecordingSampler:
    def __init__(
      self, model: Any, params: Any, *, batch_size: int, capacity: int
    ):
      self.capacity = capacity

    def generate(
      self, prompts: Sequence[list[int]], max_new_tokens: int, **options: Any
    ) -> list[list[int]]:
      for prompt in prompts:
        assert len(prompt) + max_new_tokens <= self.capacity <= 48
        recorded.append(Generation(prompt, max_new_tokens))
      return [list(b"answer")] * len(prompts)

  monkeypatch.setattr(adapter, "Sampler", RecordingSampler)
  return recorded


def generate(model: Trained, texts: Sequence[str], max_gen_toks: int) -> None:
  """Asks for answers of at most this many tokens."""
  options = {"until": [], "max_gen_toks": max_gen_toks}
  requests = [request("generate_until", text, options) for text in texts]
  DiffjaxLM(model, batch_tokens=128).generate_until(requests)


@pytest.mark.parametrize("length", [1, 10, 22, 23, 24, 25, 46, 47, 58])
def test_an_answer_leaves_room_for_its_context(model, generations, length):
  """The model takes 48 tokens: a separator, a context and an answer.

  A context loses tokens only down to half of them, 24 with the separator. An
  answer gets less than `max_gen_toks` only if both do not fit.

  The fixture `generations` records the prompts and the lengths of answers.
  """
  context = list(range(65, 65 + length))
  text = bytes(context).decode()

  for max_gen_toks in range(1, 80, 3):
    generations.clear()
    generate(model, [text], max_gen_toks)

    [(prompt, num_new)] = generations
    separator = 255
    assert prompt[0] == separator
    # A context that is too long loses its beginning.
    kept = prompt[1:]
    assert kept == context[length - len(kept) :]
    assert len(prompt) >= min(1 + length, 24)
    if max_gen_toks <= 24 or 1 + length + max_gen_toks <= 48:
      assert num_new == max_gen_toks
    else:
      assert 24 <= num_new < max_gen_toks


def test_a_shortened_answer_is_reported(model, generations, caplog):
  """Half of the model's 48 tokens are for the answer.

  The fixture `generations` records the prompts and the lengths of answers.
  """
  generate(model, ["x" * 30], max_gen_toks=256)

  # The prompt is a separator and the last 23 of 30 x's.
  assert generations == [([255, *b"x" * 23], 24)]
  assert "1 answers have at most 24 of 256 tokens" in caplog.text


def test_requests_of_one_call_can_have_different_limits(model, generations):
  """40 of the model's 48 tokens leave 8 for a separator and a context.

  After a longer context, an answer has only 24 tokens. Requests with the same
  limit are answered together, so the order changes.

  The fixture `generations` records the prompts and the lengths of answers.
  """
  generate(model, ["x" * 7, "y" * 30, "z" * 7, "w" * 8], max_gen_toks=40)

  limits = []
  for prompt, num_new in generations:
    first_byte = bytes(prompt[1:2])
    limits.append((first_byte, num_new))
  assert limits == [(b"x", 40), (b"z", 40), (b"y", 24), (b"w", 24)]


def test_a_model_that_is_too_short_for_an_answer_raises(model):
  short = Config(model=dataclasses.replace(CONFIG, max_length=3))
  lm = DiffjaxLM(dataclasses.replace(model, config=short), batch_tokens=128)
  with pytest.raises(UserError, match="config.model.max_length = 3: a context"):
    lm.generate_until([request("generate_until", "Hello", {"max_gen_toks": 9})])


def test_the_adapter_is_not_registered_in_lm_eval():
  from lm_eval.api.registry import model_registry

  for name in model_registry:
    assert "diff" not in name
