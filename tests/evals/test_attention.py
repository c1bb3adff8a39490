"""The suite "attention", with models whose attention is set by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import chex
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

QUICK = AttentionShares(
  length=512, needles=1, depths=(0.0, 0.5, 1.0), samples=3, haystack="synthetic"
)
ONE_DEPTH = dataclasses.replace(QUICK, depths=(0.5,))

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


@pytest.mark.parametrize("variant", ["diff", *full(["softmax", "diff_v2"])])
def test_attention_to_digits_only_is_all_on_the_answer(make_trained, variant):
  """All maps are equal, and shares do not depend on the sum 1 − λ."""
  maps = [0] if variant == "softmax" else [0, 1]
  trained = make_digit_seeker(make_trained, variant, maps)

  shares = measure_shares(trained, QUICK)

  for weights in ("signed", "absolute"):
    for depth in (*QUICK.depths, "mean"):
      answer = shares["answer", weights, depth]
      assert answer == pytest.approx(1.0, abs=1e-5)
      noise = shares["noise", weights, depth]
      assert noise == pytest.approx(0.0, abs=1e-5)
  for part in ("BOS", "query"):
    assert shares[part, "signed", "mean"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
def test_a_uniform_second_map_gives_other_parts_negative_shares(
  make_trained, variant
):
  """A₁ is on the answer, A₂ is uniform and λ = 1/2.

  The weights sum to 1 − λ = 1/2. A part of n tokens among T = 512 has the
  weight 1[answer] − n / 2T, so its share is 2 · 1[answer] − n / T.
  """
  trained = make_digit_seeker(make_trained, variant, [0])

  shares = measure_shares(trained, ONE_DEPTH)

  # The prompts of the suite, for the lengths of their parts.
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
  noise = 511 - answer - query
  expected = {
    "BOS": -1 / 512,
    "query": -query / 512,
    "answer": 2 - answer / 512,
    "noise": -noise / 512,
  }
  signed = {part: shares[part, "signed", "mean"] for part in expected}
  assert signed == pytest.approx(expected, rel=1e-4)
  # A₁ has 1/5 on each of the five digits. So their absolute weights sum to
  # 1 − 5 / 2T, and those of the other 507 tokens to 507 / 2T.
  absolute_sum = 1 - 5 / 1024 + 507 / 1024
  assert shares["noise", "absolute", "mean"] == pytest.approx(
    noise / 1024 / absolute_sum, rel=1e-4
  )


def test_uniform_attention_gives_each_part_its_length(make_trained):
  trained = make_digit_seeker(make_trained, "softmax", [])

  shares = measure_shares(trained, ONE_DEPTH)

  assert shares["BOS", "signed", "mean"] == pytest.approx(1 / 512, rel=1e-4)
  # A needle has about 42 bytes.
  assert 0.05 < shares["answer", "signed", "mean"] < 0.1
  signed_noise = shares["noise", "signed", "mean"]
  assert signed_noise == pytest.approx(shares["noise", "absolute", "mean"])


def test_the_last_query_of_a_window_attends_to_the_window(make_trained):
  trained = make_trained(window=5, num_layers=1)
  tokens = np.arange(12)[None]

  weights = jax.jit(attention.last_query, static_argnums=0)(
    trained.model, trained.params, tokens
  )

  attended = np.flatnonzero(weights[0])
  chex.assert_trees_all_equal(attended, np.arange(7, 12))


# Token 0 is the start, 3 and 4 are the answer, and 6 and 7 are the question.
PROMPT = NeedlePrompt(list(range(8)), ["1"], [(3, 5)], (6, 8), (0, 1))
WEIGHTS = np.array([0.1, 0.2, -0.2, 0.3, 0.1, -0.1, 0.05, 0.05])


def test_signed_shares_by_hand():
  """The weights sum to 1/2."""
  shares = attention.shares_of(WEIGHTS, PROMPT)

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
  """The absolute weights sum to 1.1."""
  shares = attention.shares_of(WEIGHTS, PROMPT)

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
  shares = attention.shares_of(np.zeros(8), PROMPT)

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
  with pytest.raises(UserError, match=message):
    list(dataclasses.replace(QUICK, **settings).evaluate(make_trained()))


def test_the_plot_of_two_models_is_drawn(make_trained, tmp_path):
  trained = make_trained("softmax", num_layers=1)
  suite = dataclasses.replace(QUICK, depths=(0.0, 1.0), samples=2)
  measurements = list(suite.evaluate(trained))
  suite_results = results.finite(
    {
      "suite": "attention",
      "settings": {},
      "models": [{"name": "a"}, {"name": "b"}],
      "figures": list(intervals.compare(measurements, measurements)),
    }
  )

  plots.save(suite.plot(suite_results), tmp_path / "attention.png")

  assert (tmp_path / "attention.png").stat().st_size > 1000
