"""Quantised logits: rounding equals that by hand, many bits change nothing, and every way of running a model is quantised."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals import quantised
from diffjax.evals.measurement import mean_of
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.needle import Needle
from diffjax.evals.quantised import (
  LogitsQuantisation,
  Quantised,
  absmax,
  quantise,
)
from diffjax.evals.report import intervals, plots, results
from diffjax.evals.report.intervals import interval
from diffjax.evals.validation import Validation
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.model.attention import DiffAttention, MaskArguments
from diffjax.model.definition import broadcast_lambda, by_definition
from diffjax.ops.diff_attention import diff_attention

QUICK = Quantised(
  measurements=("validation",),
  bits=(4,),
  per=("row",),
  validation=Validation(rows=4),
)


def test_four_bits_by_hand():
  """The levels are −7 … 7, with a step of a seventh of the largest visible logit."""
  logits = jnp.array(
    [[14.0, -3.4, 0.9, 100.0], [1.0, 0.49, -0.51, 0.06]]
  ).reshape(1, 1, 1, 2, 4)
  seen = jnp.array(
    [[True, True, True, False], [True, True, True, True]]
  ).reshape(1, 1, 1, 2, 4)
  by_row = np.asarray(absmax(logits, seen, 4, (4,)))[0, 0, 0]
  np.testing.assert_allclose(by_row[0, :3], [14, -4, 0], atol=1e-6)
  np.testing.assert_allclose(by_row[1], np.array([7, 3, -4, 0]) / 7, atol=1e-6)
  by_tensor = np.asarray(absmax(logits, seen, 4, (1, 2, 3, 4)))[0, 0, 0]
  np.testing.assert_allclose(
    by_tensor[:, :3], [[14, -4, 0], [0, 0, 0]], atol=1e-6
  )
  zeros = jnp.zeros((1, 1, 1, 2, 4))
  np.testing.assert_array_equal(absmax(zeros, seen, 4, (4,)), zeros)


@pytest.mark.parametrize(
  "per, rows, heads",
  [("tensor", False, False), ("head", False, True), ("row", True, True)],
)
def test_what_has_a_scale_of_its_own(per, rows, heads):
  """An outlier makes the logits of its scale coarser, and never those of another sequence."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 3, 2, 5, 5)).astype(np.float32)
  seen = np.tri(5, dtype=bool)[None, None, None].repeat(2, axis=0)
  spiked = logits.copy()
  spiked[0, 1, 0, 3, 2] = 1000
  before, after = (
    np.asarray(absmax(x, seen, 8, quantised._AXES[per]))
    for x in (logits, spiked)
  )
  changed = (before != after).any(axis=-1)
  assert not changed[1].any() and changed[0, 1, 0, 3]
  assert changed[0, 1, 0, 4] == (not rows) and changed[0, 2, 1, 4] == changed[
    0, 1, 1, 4
  ] == (not heads)


@pytest.mark.parametrize(
  "kind, fields",
  [
    ("softmax", {}),
    ("diff", {}),
    ("diff", dict(window=5)),
    ("diff", dict(window=5, window_pattern="wf")),
    ("diff_v2", {}),
  ],
)
def test_many_bits_change_nothing_and_few_change_much(
  make_trained, kind, fields
):
  trained = make_trained(kind, **fields)
  batch = next(iter(validation_rows("quantised", trained, 3, batch_size=3)))
  apply = jax.jit(
    lambda model, params: model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
    ),
    static_argnums=0,
  )
  want = apply(trained.model, trained.params)
  np.testing.assert_allclose(
    apply(quantise(trained, 24, "row").model, trained.params), want, atol=2e-5
  )
  assert (
    np.abs(
      apply(quantise(trained, 2, "tensor").model, trained.params) - want
    ).max()
    > 0.01
  )


def test_padding_does_not_set_the_scale():
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (1, 9, 4, 2, 8))
  k = jax.random.normal(keys[1], (1, 9, 2, 2, 8))
  v = jax.random.normal(keys[2], (1, 9, 2, 16))
  ids = jnp.array([[1] * 6 + [0] * 3])
  layer = DiffAttention(
    num_heads=4, head_dim=8, logits_transform=LogitsQuantisation(4, "tensor")
  )

  @jax.jit
  def attend(q, k, v, ids):
    return layer.attend(q, k, v, 0.3, MaskArguments(ids, ids, True, None))

  short = attend(q[:, :6], k[:, :6], v[:, :6], ids[:, :6])
  long = attend(q.at[:, 6:].multiply(100), k, v, ids)
  np.testing.assert_allclose(long[:, :6], short, atol=1e-5)


def test_rows_beside_it_do_not_change_a_row(make_trained):
  trained = quantise(make_trained(), 4, "tensor")
  alone, together = (
    list(Validation(rows=7, batch_size=size).evaluate(trained))
    for size in (1, 4)
  )
  for one, other in zip(alone, together, strict=True):
    np.testing.assert_allclose(one.units, other.units, rtol=1e-4, atol=1e-3)


def test_reading_with_a_cache_is_quantised_too(make_trained):
  trained = quantise(make_trained("diff_v2"), 3, "row")
  tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 250)
  whole = jax.jit(trained.model.apply)({"params": trained.params}, tokens)
  weights, cache = (
    unstack(trained.model, trained.params),
    empty_cache(trained.model, 2, 32),
  )
  read = jax.jit(functools.partial(extend, trained.model))
  pieces = []
  for first, last in ((0, 16), (16, 17), (17, 18)):
    hidden, cache = read(weights, tokens[:, first:last], cache)
    pieces.append(hidden)
  np.testing.assert_allclose(
    jnp.concatenate(pieces, axis=1), whole[:, :18], rtol=2e-5, atol=2e-5
  )
  assert (
    np.abs(
      whole
      - jax.jit(make_trained("diff_v2").model.apply)(
        {"params": trained.params}, tokens
      )
    ).max()
    > 0.01
  )


@pytest.mark.parametrize("lam", [0.3, np.linspace(0, 1, 24).reshape(2, 3, 4)])
def test_offsets_and_lambda_are_those_of_diff_attention(lam):
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, 3, 4, 2, 8))
  k = jax.random.normal(keys[1], (2, 9, 2, 2, 8))
  v = jax.random.normal(keys[2], (2, 9, 2, 16))
  lam = jnp.asarray(lam, jnp.float32)
  offsets = jnp.array([2, 5])
  layer = DiffAttention(
    num_heads=4, head_dim=8, logits_transform=LogitsQuantisation(24, "row")
  )
  attend = by_definition(diff_attention, layer.weights, layer.supports)
  found = jax.jit(attend)(
    q, k, v, broadcast_lambda(lam, q, 4), q_offset=offsets
  )
  want = jax.jit(diff_attention)(q, k, v, lam, q_offset=offsets)
  np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_variant_must_support_quantised_logits(make_trained, monkeypatch):
  """The error comes before anything is measured."""
  monkeypatch.setattr(DiffAttention, "supports", frozenset())
  with pytest.raises(UserError, match="--suite=quantised: .*quantized_logits"):
    QUICK.evaluate(make_trained())


def test_the_suite_measures_without_and_with_quantisation(
  make_trained, monkeypatch
):
  trained = make_trained()
  asked = []

  def accuracy(suite, model, data):  # needles take long
    assert data == "a haystack"
    asked.append((model.name, suite.samples))
    for depth in (0.5, "mean"):
      yield mean_of("accuracy", [1.0, 0.0], needles=1, depth=depth)

  monkeypatch.setattr(Needle, "load", lambda suite, model: "a haystack")
  monkeypatch.setattr(Needle, "measure", accuracy)
  suite = dataclasses.replace(
    QUICK,
    measurements=("validation", "needle"),
    bits=(8, 4),
    needle=Needle(samples=7),
  )
  found = list(suite.evaluate(trained))
  assert [
    (figure.name, figure.at["bits"], figure.at["per"]) for figure in found
  ] == [
    (name, *kind)
    for name in ("validation: loss (nats/token)", "needle: accuracy")
    for kind in (("all", ""), (8, "row"), (4, "row"))
  ]
  assert found[3].at == {
    "bits": "all",
    "per": "",
    "needles": 1,
    "depth": "mean",
  }
  assert {samples for _, samples in asked} == {7} and asked[1][
    0
  ] == "a diff model, logits of 8 bits per row"
  loss = [interval(figure).value for figure in found[:3]]
  assert abs(loss[1] - loss[0]) < abs(loss[2] - loss[0])


@pytest.mark.parametrize(
  "settings, message",
  [
    (
      dict(measurements=("attention",)),
      "'attention': must be one of validation, needle, position_nll, many_shot, harness, mathematics",
    ),
    (dict(per=("layer",)), "'layer': must be one of tensor, head, row"),
    (dict(bits=(1,)), "bits = 1: must lie between 2 and 24"),
  ],
)
def test_bad_settings(make_trained, settings, message):
  with pytest.raises(UserError, match=message):
    list(dataclasses.replace(QUICK, **settings).evaluate(make_trained()))


def test_no_measurements_have_no_plot(make_trained):
  suite = Quantised(measurements=())
  assert list(suite.evaluate(make_trained())) == []
  assert suite.plot({"models": [{"name": "a"}], "figures": []}) is None


def test_plot(make_trained, tmp_path):
  trained = make_trained("softmax", num_layers=1)
  rows = list(intervals.compare(QUICK.evaluate(trained)))
  found = results.finite(
    {
      "suite": "quantised",
      "settings": {},
      "models": [{"name": "a"}],
      "figures": rows,
    }
  )
  plots.save(QUICK.plot(found), tmp_path / "x.png")
  assert (tmp_path / "x.png").stat().st_size > 1000
