"""The suite "attention", with models whose attention is set by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.evals import attention
from diffjax.evals.attention import AttentionShares
from diffjax.evals.methods.needle_prompts import NeedlePrompt
from diffjax.evals.report import intervals
from diffjax.evals.suite import Model
from diffjax.inference.trained import Trained
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_LAYER, FLOAT32_MODEL

# A prompt has digits only in the needle's number.
DIGITS = np.array(list(b"0123456789"))


# Which maps of a head attend only to digits.
ALL_MAPS = slice(None)
FIRST_MAP = slice(1)
NO_MAPS = slice(0)


def make_model(
  make_trained: Callable[..., Trained], variant: str, maps_on_digits: slice
) -> Trained:
  """Returns a model whose chosen maps attend only to digits.

  All other maps attend to all keys equally. λ is 1/2 in every variant.

  Digits have the embedding [1, 0, …], and other tokens have [0, 1, …]. The
  query and the key are each a multiple of one of these, in the component that
  RoPE rotates least. With the huge base here, it does not rotate it at all.

  Args:
    make_trained: The fixture.
    variant: The name of the variant.
    maps_on_digits: `ALL_MAPS`, `FIRST_MAP` or `NO_MAPS`.
  """
  lambda_init = 0.5 if variant == "diff" else None
  trained = make_trained(
    variant, num_layers=1, rope_base=1e30, lambda_init=lambda_init
  )
  params = jax.tree.map(np.zeros_like, trained.params)

  embedding = params["embedding"]
  embedding[:, 1] = 1.0
  embedding[DIGITS, 0] = 1.0
  embedding[DIGITS, 1] = 0.0

  query = params["layers"]["attention"]["query"]  # [L, E, ..., G, D]
  key = params["layers"]["attention"]["key"]
  slowest = query.shape[-1] // 2 - 1
  query[:, 1, :, maps_on_digits, slowest] = 10.0
  key[:, 0, :, :, slowest] = 10.0

  for name in ("attention_norm", "ffn_norm"):
    params["layers"][name] = trained.params["layers"][name]
  params["final_norm"] = trained.params["final_norm"]
  return dataclasses.replace(trained, params=params)


def measure_shares(
  trained: Trained, suite: AttentionShares
) -> dict[tuple[str, str, Any], float]:
  """Returns the shares by (part, "signed" or "absolute", depth)."""
  shares = {}
  for measurement in suite.evaluate(trained):
    key = (
      measurement.name,
      measurement.at["weights"],
      measurement.at["depth"],
    )
    shares[key] = intervals.interval(measurement).value
  return shares


@pytest.mark.parametrize("variant", ["diff", *full(["softmax", "diff_v2"])])
def test_the_share_of_the_answer_is_1_if_all_maps_attend_to_it(
  make_trained, variant
):
  """All maps attend only to digits, and only the answer has digits.

  A share is relative to the sum of all weights. So it is 1 for the answer,
  although the weights A₁ − λA₂ sum to 1 − λ.
  """
  trained = make_model(make_trained, variant, maps_on_digits=ALL_MAPS)
  depths = (0.0, 0.5, 1.0)
  suite = AttentionShares(
    length=512, needles=1, depths=depths, samples=3, haystack="synthetic"
  )

  shares = measure_shares(trained, suite)

  # Shares of weights with their signs, or of absolute weights, at each depth of
  # the answer in the prompt. "noise" is the text around the answer.
  kinds_of_shares = itertools.product(("signed", "absolute"), (*depths, "mean"))
  for weights, depth in kinds_of_shares:
    answer = shares["answer", weights, depth]
    noise = shares["noise", weights, depth]
    assert answer == pytest.approx(1.0, abs=FLOAT32_LAYER["atol"])
    assert noise == pytest.approx(0.0, abs=FLOAT32_LAYER["atol"])


def measure_prompts_of_512_tokens(
  trained: Trained,
) -> dict[tuple[str, str, Any], float]:
  """Returns the shares of three prompts of 512 tokens, by part and weights."""
  suite = AttentionShares(
    length=512, needles=1, depths=(0.5,), samples=3, haystack="synthetic"
  )
  return measure_shares(trained, suite)


def mean_part_lengths(trained: Trained) -> dict[str, float]:
  """Returns the mean lengths of the parts of the three prompts, in tokens."""
  haystack = attention.find_haystack(trained, "synthetic", tokens=16 * 512)
  prompts = attention.make_prompts(
    trained.tokenizer,
    length=512,
    num_needles=1,
    num_asked=1,
    depth=0.5,
    samples=3,
    seed=0,
    haystack=haystack,
  )
  answer_lengths = []
  query_lengths = []
  for prompt in prompts:
    start, stop = prompt.answer_spans[0]
    answer_lengths.append(stop - start)
    query_lengths.append(512 - prompt.query_span[0])
  answer = np.mean(answer_lengths)
  query = np.mean(query_lengths)
  noise = 512 - 1 - answer - query
  return {"BOS": 1, "answer": answer, "query": query, "noise": noise}


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
def test_a_uniform_second_map_gives_other_parts_negative_shares(
  make_trained, variant
):
  """The weights are A₁ − λA₂. A₁ is on the answer only, and A₂ is uniform."""
  trained = make_model(make_trained, variant, maps_on_digits=FIRST_MAP)
  lam = 1 / 2  # The λ of all models of `make_model`.
  num_tokens = 512

  shares = measure_prompts_of_512_tokens(trained)

  # The numbers of tokens of the four parts of a prompt.
  lengths = mean_part_lengths(trained)
  # λA₂ takes this weight from each token.
  taken = lam / num_tokens
  sum_of_weights = 1 - lam
  expected = {
    "BOS": -taken * lengths["BOS"] / sum_of_weights,
    "query": -taken * lengths["query"] / sum_of_weights,
    "answer": (1 - taken * lengths["answer"]) / sum_of_weights,
    "noise": -taken * lengths["noise"] / sum_of_weights,
  }
  signed_shares = {part: shares[part, "signed", "mean"] for part in expected}
  assert signed_shares == pytest.approx(expected, rel=FLOAT32_MODEL["rtol"])


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
def test_absolute_shares_are_relative_to_the_sum_of_absolute_weights(
  make_trained, variant
):
  """The weights are A₁ − λA₂. A₁ is on the answer's digits, A₂ is uniform."""
  trained = make_model(make_trained, variant, maps_on_digits=FIRST_MAP)
  lam = 1 / 2  # The λ of all models of `make_model`.
  num_tokens = 512
  num_digits = 5  # The answer is a number from 10,000 to 50,000.

  shares = measure_prompts_of_512_tokens(trained)

  weight_of_digit = 1 / num_digits - lam / num_tokens
  weight_of_other_token = -lam / num_tokens
  num_other_tokens = num_tokens - num_digits
  sum_over_digits = num_digits * abs(weight_of_digit)
  sum_over_others = num_other_tokens * abs(weight_of_other_token)
  # "noise" is the text around the sentence with the answer.
  noise_length = mean_part_lengths(trained)["noise"]
  sum_over_noise = noise_length * abs(weight_of_other_token)
  expected = sum_over_noise / (sum_over_digits + sum_over_others)
  absolute_share = shares["noise", "absolute", "mean"]
  assert absolute_share == pytest.approx(expected, rel=FLOAT32_MODEL["rtol"])


def test_uniform_attention_gives_each_part_its_length(make_trained):
  """The share of a part is its number of tokens, divided by all 512."""
  trained = make_model(make_trained, "softmax", maps_on_digits=NO_MAPS)

  shares = measure_prompts_of_512_tokens(trained)

  lengths = mean_part_lengths(trained)
  for part in ("BOS", "answer", "query", "noise"):
    share = shares[part, "signed", "mean"]
    expected = lengths[part] / 512
    assert share == pytest.approx(expected, rel=FLOAT32_MODEL["rtol"])


def test_the_last_query_of_a_window_attends_to_the_window(make_trained):
  """A token sees the five tokens up to itself."""
  trained = make_trained(window=5, num_layers=1)
  tokens = np.arange(12)[None]
  last_query = jax.jit(attention.last_query, static_argnums=0)

  weights = last_query(trained.model, trained.params, tokens)

  # The last token has the index 11.
  attended = np.flatnonzero(weights[0])
  assert attended.tolist() == [7, 8, 9, 10, 11]


# Token 0 is the start, 3 and 4 are the answer, and 6 and 7 are the question.
PROMPT_OF_8_TOKENS = NeedlePrompt(
  ids=[0, 1, 2, 3, 4, 5, 6, 7],
  answers=["1"],
  answer_spans=[(3, 5)],
  query_span=(6, 8),
  bos_span=(0, 1),
)


def test_signed_shares_by_hand():
  """A share is relative to the sum of all weights, which is 0.5.

  The noise is the context before and after the answer.
  """
  # The start (BOS), two tokens of context, two of the answer, one token of
  # context, and two of the query.
  weights = np.array([0.1, 0.2, -0.2, 0.3, 0.1, -0.1, 0.05, 0.05])

  shares = attention.shares_of(weights, PROMPT_OF_8_TOKENS)

  expected = {
    "BOS": 0.1 / 0.5,
    "context before": (0.2 - 0.2) / 0.5,
    "answer": (0.3 + 0.1) / 0.5,
    "context after": -0.1 / 0.5,
    "query": (0.05 + 0.05) / 0.5,
    "noise": (0.2 - 0.2 - 0.1) / 0.5,
  }
  signed = {part: shares[part, "signed"] for part in expected}
  assert signed == pytest.approx(expected)


def test_absolute_shares_by_hand():
  """A share is relative to the sum of absolute weights, which is 1.1.

  The noise is the context before and after the answer.
  """
  # The start (BOS), two tokens of context, two of the answer, one token of
  # context, and two of the query.
  weights = np.array([0.1, 0.2, -0.2, 0.3, 0.1, -0.1, 0.05, 0.05])

  shares = attention.shares_of(weights, PROMPT_OF_8_TOKENS)

  expected = {
    "BOS": 0.1 / 1.1,
    "context before": (0.2 + 0.2) / 1.1,
    "answer": (0.3 + 0.1) / 1.1,
    "context after": 0.1 / 1.1,
    "query": (0.05 + 0.05) / 1.1,
    "noise": (0.2 + 0.2 + 0.1) / 1.1,
  }
  absolute = {part: shares[part, "absolute"] for part in expected}
  assert absolute == pytest.approx(expected)


def test_shares_of_weights_that_sum_to_0_are_nan():
  weights = np.zeros(8)

  shares = attention.shares_of(weights, PROMPT_OF_8_TOKENS)

  # It would be 0 / 0.
  assert np.isnan(shares["answer", "signed"])


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"length": 513},
      "set.attention.length = 513: a diff model takes 1 to 512",
      id="length",
    ),
    pytest.param({"length": 64}, "tokens do not hold", id="short length"),
    pytest.param({"samples": 0}, "samples = 0", id="samples"),
    pytest.param({"needles": 0}, "needles = 0", id="needles"),
    pytest.param({"batch_tokens": 0}, "batch_tokens = 0", id="batch_tokens"),
    pytest.param({"depths": ()}, "depths", id="no depth"),
    pytest.param({"depths": (2.0,)}, "depth", id="depth"),
    pytest.param(
      {"haystack": "books"},
      "must be 'validation' or 'synthetic'",
      id="haystack",
    ),
  ],
)
def test_an_invalid_setting_raises(make_trained, settings, message):
  # A diff model of at most 512 tokens.
  trained = make_trained()

  with pytest.raises(UserError, match=message):
    list(AttentionShares(**settings).evaluate(trained))


def test_the_plot_of_two_models_is_drawn(make_trained, tmp_path):
  trained = make_trained("softmax", num_layers=1)
  models = [Model(trained, {"name": "a"}), Model(trained, {"name": "b"})]
  suite = AttentionShares(
    length=512, needles=1, depths=(0.0, 1.0), samples=2, haystack="synthetic"
  )
  data = [suite.load(model.trained) for model in models]

  suite.run(models, data, epath.Path(tmp_path))

  image = (tmp_path / "attention.png").read_bytes()
  assert image.startswith(b"\x89PNG")
