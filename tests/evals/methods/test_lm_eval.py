"""The adapter gives lm-eval the model's own likelihoods and greedy texts."""

import dataclasses

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
def model():
  model = Decoder(CONFIG)
  params = jax.tree.map(
    lambda x: x * 3,
    parameters(model, jnp.zeros((1, 1), jnp.int32)),
  )
  return Trained("model", Config(model=CONFIG), model, params, BYTES)


@pytest.fixture(scope="module")
def log_softmax(model):
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


def request(kind, *arguments):
  return Instance(kind, {}, arguments, 0)


def test_loglikelihoods(model, log_softmax):
  text_pairs = [
    ("The cat", " sat"),
    ("", "alone"),
    ("ends in spaces  ", "word"),
    ("Ünï", " cödé"),
    ("Q", "A" * 46),
  ]
  results = DiffjaxLM(model, batch_tokens=128).loglikelihood(
    [request("loglikelihood", *pair) for pair in text_pairs],
    disable_tqdm=True,
  )
  for (context, continuation), (log_probability, is_greedy) in zip(
    text_pairs, results, strict=True
  ):
    ids = [255, *(context + continuation).encode()]
    # lm-eval moves spaces at the end of a context to the continuation.
    first_scored = len(context.rstrip().encode())
    targets = ids[first_scored + 1 :]
    table = log_softmax(ids[:-1])[first_scored:]  # [targets, N]
    target_values = table[np.arange(len(targets)), targets]
    assert log_probability == pytest.approx(target_values.sum(), rel=1e-5)
    assert is_greedy == np.array_equal(table.argmax(axis=-1), targets)


@pytest.fixture
def pairs(monkeypatch):
  """Collects the pairs to score instead of scoring them."""
  collected = []

  def collect(model, params, new_pairs, **options):
    collected.extend(new_pairs)
    return [Score(0.0, True)] * len(new_pairs)

  monkeypatch.setattr(adapter, "score", collect)
  return collected


def test_a_context_that_is_too_long_loses_its_oldest_tokens_but_not_the_separator(
  model, pairs, caplog
):
  text_pairs = [("x" * 30 + "y" * 40, "zz"), ("x", "z" * 48), ("y", "zz")]
  DiffjaxLM(model, batch_tokens=128).loglikelihood(
    [request("loglikelihood", *pair) for pair in text_pairs]
  )
  assert pairs == [
    ([255, *b"x" * 6, *b"y" * 40], [*b"zz"]),
    ([255], [*b"z" * 48]),
    ([255, *b"y"], [*b"zz"]),
  ]
  assert (
    "2 of 3 contexts are longer than the model takes (48 tokens) and were cut"
    in caplog.text
  )


def test_a_context_that_is_lost_is_reported(model, pairs, caplog):
  """A continuation of the maximum length leaves no room for a context."""
  lm = DiffjaxLM(model, batch_tokens=128)
  text_pairs = [("x", "z" * 48), ("", "z" * 48), ("x" * 9, "z" * 47)]
  lm.loglikelihood([request("loglikelihood", *pair) for pair in text_pairs])
  assert pairs[2][0] == [255, *b"x"]
  assert "1 of these contexts were cut completely" in caplog.text
  message = "an answer of 49 tokens .'zzz.*max_length = 48"
  with pytest.raises(UserError, match=message):
    lm.loglikelihood([request("loglikelihood", "x", "z" * 49)])


def test_a_continuation_that_the_tokenizer_joins_with_the_context(
  model, pairs, monkeypatch
):
  class JoiningTokenizer:
    document_tokens = separated_by(255)

    def encode(self, text):
      return [200] if text == "ab" else [ord(text)]

  joining_model = dataclasses.replace(model, tokenizer=JoiningTokenizer())
  lm = DiffjaxLM(joining_model, batch_tokens=128)
  lm.loglikelihood([request("loglikelihood", "a", "b")])
  assert pairs == [([255, ord("a")], [ord("b")])]


def test_rolling_likelihoods(model, log_softmax):
  texts = [
    "short",
    "x" * 48,
    # Three windows of 48 tokens. The last one overlaps the second.
    "a longer text, which the model reads in windows that are as long as it"
    " takes: three of them, the last full ",
  ]
  sums = DiffjaxLM(model, batch_tokens=256).loglikelihood_rolling(
    [request("loglikelihood_rolling", text) for text in texts]
  )
  for text, log_likelihood in zip(texts, sums, strict=True):
    ids = [255, *text.encode()]
    expected = 0.0
    for first_scored in range(0, len(text), 48):
      stop = min(first_scored + 48, len(text))
      start = max(stop - 48, 0)
      table = log_softmax(ids[start:stop])
      for position in range(first_scored, stop):
        expected += table[position - start, ids[position + 1]]
    assert log_likelihood == pytest.approx(expected, rel=1e-5)


def test_generation_stops_before_the_stop_string(model, log_softmax):
  ids = [255, *b"Hello"]
  for _ in range(12):
    ids.append(int(log_softmax(ids)[-1].argmax()))
  greedy_text = BYTES.decode(ids[6:])
  stop_string = greedy_text[5:7]
  all_options = [
    {"until": [], "max_gen_toks": 12},
    {"until": [stop_string, "never there"], "max_gen_toks": 12},
    {"until": stop_string, "max_gen_toks": 3},
  ]
  lm = DiffjaxLM(model, batch_tokens=128)
  texts = lm.generate_until(
    [request("generate_until", "Hello", options) for options in all_options]
  )
  assert texts == [
    greedy_text,
    greedy_text[: greedy_text.index(stop_string)],
    BYTES.decode(ids[6:9]).split(stop_string)[0],
  ]
  sampling = {
    "until": [],
    "max_gen_toks": 12,
    "do_sample": True,
    "temperature": 1.0,
  }
  sampled = lm.generate_until([request("generate_until", "Hello", sampling)])
  assert sampled != [greedy_text]


def test_an_answer_leaves_room_for_its_context(model, monkeypatch, caplog):
  """The model takes 48 tokens. A context keeps 24 if it has as many."""
  generated = []

  class Sampler:
    def __init__(self, model, params, *, batch_size, capacity):
      self.capacity = capacity

    def generate(self, prompts, max_new_tokens, **options):
      for prompt in prompts:
        assert len(prompt) + max_new_tokens <= self.capacity <= 48
        generated.append((prompt, max_new_tokens))
      return [list(b"answer")] * len(prompts)

  monkeypatch.setattr(adapter, "Sampler", Sampler)
  lm = DiffjaxLM(model, batch_tokens=128)

  def generate(text, max_gen_toks):
    """Returns the prompt and the maximum number of new tokens."""
    generated.clear()
    options = {"until": [], "max_gen_toks": max_gen_toks}
    lm.generate_until([request("generate_until", text, options)])
    [(prompt, num_new)] = generated
    return prompt, num_new

  for length in range(1, 60, 3):
    context = list(range(65, 65 + length))
    text = bytes(context).decode()
    for max_gen_toks in range(1, 80, 3):
      prompt, num_new = generate(text, max_gen_toks)
      assert prompt[0] == 255
      assert prompt[1:] == context[len(context) - len(prompt) + 1 :]
      assert len(prompt) >= min(1 + len(context), 24)
      if max_gen_toks <= 24 or 1 + len(context) + max_gen_toks <= 48:
        assert num_new == max_gen_toks
      else:
        assert 24 <= num_new < max_gen_toks
  assert generate("x" * 30, 256) == ([255, *b"x" * 23], 24)
  assert "1 answers have at most 24 of 256 tokens" in caplog.text
  # Requests of one call may have different limits.
  generated.clear()
  options = {"until": [], "max_gen_toks": 40}
  texts = ["x" * 7, "y" * 30, "z" * 7, "w" * 8]
  lm.generate_until(
    [request("generate_until", text, options) for text in texts]
  )
  first_bytes = [(bytes(prompt[1:2]), num_new) for prompt, num_new in generated]
  assert first_bytes == [(b"x", 40), (b"z", 40), (b"y", 24), (b"w", 24)]


def test_a_model_that_is_too_short_for_a_context_and_an_answer(model):
  short = Config(model=dataclasses.replace(CONFIG, max_length=3))
  lm = DiffjaxLM(dataclasses.replace(model, config=short), batch_tokens=128)
  with pytest.raises(UserError, match="config.model.max_length = 3: a context"):
    lm.generate_until([request("generate_until", "Hello", {"max_gen_toks": 9})])


def test_nothing_is_registered():
  from lm_eval.api.registry import model_registry

  for name in model_registry:
    assert "diff" not in name
