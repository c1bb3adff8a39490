"""Attention to the answer, on models whose attention is made by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals import attention
from diffjax.evals.attention import AttentionShares
from diffjax.evals.methods.needle_prompts import NeedlePrompt
from diffjax.evals.report import intervals, plots, results
from diffjax.evals.report.intervals import interval
from tests.harness.tiers import full

QUICK = AttentionShares(
  length=512, needles=1, depths=(0.0, 0.5, 1.0), samples=3, haystack="synthetic"
)
DIGITS = list(b"0123456789")


def looking_at_digits(trained, maps):
  """In every head the named maps attend only to digits, which only the needle's number has; the others attend to all keys alike.

  Digits have an embedding of their own. It becomes the key's part that RoPE turns least, which here, with a huge base, is not at all.
  """
  params = {
    name: jnp.zeros_like(leaf)
    for name, leaf in trained.params.items()
    if name != "layers"
  }
  layers = {name: leaf for name, leaf in trained.params["layers"].items()}
  zeros = {
    name: jnp.zeros_like(leaf) for name, leaf in layers["attention"].items()
  }
  params["embedding"] = (
    params["embedding"]
    .at[:, 1]
    .set(1.0)
    .at[jnp.array(DIGITS), 0]
    .set(1.0)
    .at[jnp.array(DIGITS), 1]
    .set(0.0)
  )
  params["final_norm"] = jnp.ones_like(params["final_norm"])
  slowest = zeros["query"].shape[-1] // 2 - 1
  query = zeros["query"]
  for index in maps:
    query = query.at[:, 1, :, index, slowest].set(10.0)
  zeros |= {
    "query": query,
    "key": zeros["key"].at[:, 0, :, :, slowest].set(10.0),
  }
  ffn = {name: jnp.zeros_like(leaf) for name, leaf in layers["ffn"].items()}
  params["layers"] = layers | {"attention": zeros, "ffn": ffn}
  return dataclasses.replace(trained, params=params)


def measured(trained, suite=QUICK):
  return {
    (figure.name, figure.at["weights"], figure.at["depth"]): interval(
      figure
    ).value
    for figure in suite.evaluate(trained)
  }


def make(make_trained, kind):
  return make_trained(
    kind, rope_base=1e30, lambda_init=0.5 if kind == "diff" else None
  )


@pytest.mark.parametrize("kind", ["diff", *full(["softmax", "diff_v2"])])
def test_attention_that_looks_only_at_the_answer(make_trained, kind):
  """All maps do, so the difference sums to 1 − λ, which the normalisation removes."""
  found = measured(
    looking_at_digits(
      make(make_trained, kind), [0] if kind == "softmax" else [0, 1]
    )
  )
  for weights in ("signed", "absolute"):
    for depth in (*QUICK.depths, "mean"):
      assert found["answer", weights, depth] == pytest.approx(1.0, abs=1e-5)
      assert found["noise", weights, depth] == pytest.approx(0.0, abs=1e-5)
  assert found["BOS", "signed", "mean"] == pytest.approx(
    0.0, abs=1e-5
  ) and found["query", "signed", "mean"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
def test_what_a_uniform_second_map_takes_away(make_trained, kind):
  """A₁ on the answer, A₂ uniform, λ = ½ (V2: the sigmoid of 0): a part of n tokens in T has (1[answer] − n / 2T) / ½, signed."""
  trained = looking_at_digits(make(make_trained, kind), [0])
  found = measured(trained, dataclasses.replace(QUICK, depths=(0.5,)))
  prompts = attention.make_prompts(
    trained.tokenizer,
    length=512,
    num_needles=1,
    num_asked=1,
    depth=0.5,
    samples=3,
    seed=0,
    haystack=attention.find_haystack(trained, "synthetic", tokens=16 * 512),
  )
  answer = np.mean([np.diff(prompt.answer_spans[0]) for prompt in prompts])
  query = np.mean([512 - prompt.query_span[0] for prompt in prompts])
  want = {
    "BOS": -1 / 512,
    "query": -query / 512,
    "answer": 2 - answer / 512,
    "noise": -(511 - answer - query) / 512,
  }
  assert {
    part: found[part, "signed", "mean"] for part in want
  } == pytest.approx(want, rel=1e-4)
  total = 1 - 5 / 1024 + 507 / 1024  # the number's five digits, and all else
  assert found["noise", "absolute", "mean"] == pytest.approx(
    (511 - answer - query) / 1024 / total, rel=1e-4
  )


def test_uniform_attention_gives_each_part_its_length(make_trained):
  found = measured(
    looking_at_digits(make(make_trained, "softmax"), []),
    dataclasses.replace(QUICK, depths=(0.5,)),
  )
  assert found["BOS", "signed", "mean"] == pytest.approx(1 / 512, rel=1e-4)
  assert (
    0.05 < found["answer", "signed", "mean"] < 0.1
  )  # a needle of some 42 bytes
  assert found["noise", "signed", "mean"] == pytest.approx(
    found["noise", "absolute", "mean"]
  )


def test_a_windows_last_query_weighs_the_windows_keys_alone(make_trained):
  trained = make_trained(window=5, num_layers=1)
  weights = attention.last_query(
    trained.model, trained.params, np.arange(12)[None]
  )
  assert np.flatnonzero(weights[0]).tolist() == list(range(7, 12))


def test_shares_by_hand():
  prompt = NeedlePrompt(list(range(8)), ["1"], [(3, 5)], (6, 8), (0, 1))
  shares = attention.shares_of(
    np.array([0.1, 0.2, -0.2, 0.3, 0.1, -0.1, 0.05, 0.05]), prompt
  )
  want = {
    "BOS": 0.2,
    "context before": 0.0,
    "answer": 0.8,
    "context after": -0.2,
    "query": 0.2,
    "noise": -0.2,
  }
  assert {part: shares[part, "signed"] for part in want} == pytest.approx(want)
  want = {
    "BOS": 0.1,
    "context before": 0.4,
    "answer": 0.4,
    "context after": 0.1,
    "query": 0.1,
    "noise": 0.5,
  }
  assert {
    part: shares[part, "absolute"] * 1.1 for part in want
  } == pytest.approx(want)
  assert np.isnan(attention.shares_of(np.zeros(8), prompt)["answer", "signed"])


@pytest.mark.parametrize(
  "settings, message",
  [
    (
      dict(length=513),
      "set.attention.length = 513: a diff model takes 1 to 512",
    ),
    (dict(length=64), "tokens do not hold"),
    (dict(samples=0), "samples = 0"),
    (dict(needles=0), "needles = 0"),
    (dict(batch_tokens=0), "batch_tokens = 0"),
    (dict(depths=()), "depths"),
    (dict(depths=(2.0,)), "depth"),
    (dict(haystack="books"), "must be 'validation' or 'synthetic'"),
  ],
)
def test_bad_settings(make_trained, settings, message):
  with pytest.raises(UserError, match=message):
    list(dataclasses.replace(QUICK, **settings).evaluate(make_trained()))


def test_plot(make_trained, tmp_path):
  trained = make_trained("softmax", num_layers=1)
  suite = dataclasses.replace(QUICK, depths=(0.0, 1.0), samples=2)
  rows = list(
    intervals.compare(suite.evaluate(trained), suite.evaluate(trained))
  )
  found = results.finite(
    {
      "suite": "attention",
      "settings": {},
      "models": [{"name": "a"}, {"name": "b"}],
      "figures": rows,
    }
  )
  plots.save(suite.plot(found), tmp_path / "x.png")
  assert (tmp_path / "x.png").stat().st_size > 1000
