"""The suite "attention", with models whose attention is set by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals import attention
from diffjax.evals.attention import AttentionShares
from diffjax.evals.methods.needle_prompts import NeedlePrompt
from diffjax.evals.report import intervals, plots, results
from diffjax.inference.trained import Trained
from tests.harness.tiers import full

# The only digits of a prompt are those of the needle's number.
DIGITS = np.array(list(b"0123456789"))


def make_digit_seeker(
  make_trained: Callable[..., Trained], variant: str, maps: Sequence[int]
) -> Trained:
  """Returns a model whose chosen maps attend only to digits.

  All other maps attend to all keys equally. λ is 1/2 in every variant.

  Digits have the embedding [1, 0, …], and other tokens have [0, 1, …]. The
  query and the key are each a multiple of one of these, in the component that
  RoPE rotates least. With the huge base here, it does not rotate it at all.

  Args:
    make_trained: The fixture.
    variant: The name of the variant.
    maps: The indices of the chosen maps.
  """
  lambda_init = 0.5 if variant == "diff" else None
  trained = make_trained(
    variant, num_layers=1, rope_base=1e30, lambda_init=lambda_init
  )
  params = jax.tree.map(jnp.zeros_like, trained.params)

  embedding = params["embedding"].at[:, 1].set(1.0)
  embedding = embedding.at[DIGITS, 0].set(1.0).at[DIGITS, 1].set(0.0)

  query = params["layers"]["attention"]["query"]  # [L, E, ..., G, D]
  key = params["layers"]["attention"]["key"]
  slowest = query.shape[-1] // 2 - 1
  for index in maps:
    query = query.at[:, 1, :, index, slowest].set(10.0)
  key = key.at[:, 0, :, :, slowest].set(10.0)

  layers = {
    **params["layers"],
    "attention": {**params["layers"]["attention"], "query": query, "key": key},
  }
  for name in ("attention_norm", "ffn_norm"):
    layers[name] = trained.params["layers"][name]
  params = {
    **params,
    "embedding": embedding,
    "final_norm": trained.params["final_norm"],
    "layers": layers,
  }
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


@pytest.mark.parametrize(
  "variant, maps",
  [("diff", [0, 1]), *full([("softmax", [0]), ("diff_v2", [0, 1])])],
)
def test_attention_to_digits_only_is_all_on_the_answer(
  make_trained, variant, maps
):
  """The answer has the only digits of a prompt, and all maps attend to them.

  A share is relative to the sum of all weights. It is 1 for softmax attention,
  and 1 − λ = 1/2 for the weights A₁ − λA₂.
  """
  trained = make_digit_seeker(make_trained, variant, maps)
  suite = AttentionShares(
    length=512,
    needles=1,
    depths=(0.0, 0.5, 1.0),
    samples=3,
    haystack="synthetic",
  )

  shares = measure_shares(trained, suite)

  for weights in ("signed", "absolute"):
    for depth in (0.0, 0.5, 1.0, "mean"):
      answer = shares["answer", weights, depth]
      assert answer == pytest.approx(1.0, abs=1e-5)
      noise = shares["noise", weights, depth]
      assert noise == pytest.approx(0.0, abs=1e-5)
  for part in ("BOS", "query"):
    assert shares[part, "signed", "mean"] == pytest.approx(0.0, abs=1e-5)


def measure_one_depth(
  trained: Trained,
) -> dict[tuple[str, str, Any], float]:
  """Returns the shares of three prompts of 512 tokens, by part and weights."""
  suite = AttentionShares(
    length=512, needles=1, depths=(0.5,), samples=3, haystack="synthetic"
  )
  return measure_shares(trained, suite)


def mean_part_lengths(trained: Trained) -> dict[str, float]:
  """Returns the mean lengths of the parts of `measure_one_depth`'s prompts."""
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
  """The weights are A₁ − A₂ / 2. A₁ is on the answer only, A₂ is uniform.

  A part of n tokens has the weight −(n / 512) / 2, and the answer has 1 more.
  All weights sum to 1 / 2. So the share of a part is −n / 512, plus 2 for the
  answer.
  """
  trained = make_digit_seeker(make_trained, variant, maps=[0])

  shares = measure_one_depth(trained)

  lengths = mean_part_lengths(trained)
  expected = {
    "BOS": -lengths["BOS"] / 512,
    "query": -lengths["query"] / 512,
    "answer": 2 - lengths["answer"] / 512,
    "noise": -lengths["noise"] / 512,
  }
  signed = {part: shares[part, "signed", "mean"] for part in expected}
  assert signed == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
def test_absolute_shares_are_relative_to_the_sum_of_absolute_weights(
  make_trained, variant
):
  """The weights are A₁ − A₂ / 2, with A₁ on five digits and A₂ uniform."""
  trained = make_digit_seeker(make_trained, variant, maps=[0])

  shares = measure_one_depth(trained)

  noise_length = mean_part_lengths(trained)["noise"]
  # What A₂ / 2 takes from each of the 512 tokens. A₁ adds 1 to the five digits.
  weight_of_a2 = 1 / 2 / 512
  num_digits = 5
  num_others = 512 - num_digits
  sum_of_digits = 1 - num_digits * weight_of_a2
  sum_of_others = num_others * weight_of_a2
  expected = noise_length * weight_of_a2 / (sum_of_digits + sum_of_others)
  noise = shares["noise", "absolute", "mean"]
  assert noise == pytest.approx(expected, rel=1e-4)


def test_uniform_attention_gives_each_part_its_length(make_trained):
  # No map attends to digits only, so the single map is uniform.
  trained = make_digit_seeker(make_trained, "softmax", maps=[])

  shares = measure_one_depth(trained)

  # One token of the prompt's 512 is its start ("BOS").
  assert shares["BOS", "signed", "mean"] == pytest.approx(1 / 512, rel=1e-4)
  # The sentence with the answer has about 42 tokens, 0.08 of the prompt.
  assert 0.05 < shares["answer", "signed", "mean"] < 0.1
  # All weights are positive, so they equal their absolute values.
  signed_noise = shares["noise", "signed", "mean"]
  assert signed_noise == pytest.approx(shares["noise", "absolute", "mean"])


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
  """Token 0 is the start, 3 and 4 are the answer, and 6 and 7 the query.

  A share is relative to the sum of all weights, which is 0.5. Noise is the
  context before and after the answer.
  """
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
  """Token 0 is the start, 3 and 4 are the answer, and 6 and 7 the query.

  A share is relative to the sum of absolute weights, which is 1.1. Noise is the
  context before and after the answer.
  """
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
  suite = AttentionShares(
    length=512, needles=1, depths=(0.0, 1.0), samples=2, haystack="synthetic"
  )
  measurements = list(suite.evaluate(trained))
  # The content of the results file, for a model that is compared with itself.
  suite_results = results.finite(
    {
      "suite": "attention",
      "settings": {},
      "models": [{"name": "a"}, {"name": "b"}],
      "figures": list(intervals.compare(measurements, measurements)),
    }
  )

  plots.save(suite.plot(suite_results), tmp_path / "attention.png")

  # An image, and not an empty file.
  assert (tmp_path / "attention.png").stat().st_size > 1000
