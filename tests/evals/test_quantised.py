"""The suite "quantised": rounding of logits, and the models that round them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals.measurement import Measurement, mean_of
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.needle import Needle
from diffjax.evals.quantised import LogitsQuantisation, Quantised, quantise
from diffjax.evals.report import intervals, plots, results
from diffjax.evals.validation import Validation
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.inference.trained import Trained
from diffjax.model.attention import DiffAttention, MaskArguments
from diffjax.model.definition import broadcast_lambda, by_definition
from diffjax.ops.diff_attention import diff_attention
from tests.harness.tolerances import FLOAT32, FLOAT32_LAYER, FLOAT32_MODEL


def round_logits(logits: jax.Array, mask: jax.Array, per: str) -> np.ndarray:
  """Returns the logits of one map, rounded to 4 bits.

  Args:
    logits: The logits, [queries, keys].
    mask: Whether a query sees a key, [queries, keys].
    per: The logits that share a scale: "tensor", "head" or "row".
  """
  transform = LogitsQuantisation(bits=4, per=per)
  rounded = transform(logits[None, None, None], mask[None])
  return np.asarray(rounded)[0, 0, 0]


def test_four_bits_per_row_by_hand():
  """Four bits have the levels −7, −6, … 7, which are multiplied by a scale.

  The scale of a row is its largest visible logit, divided by 7.
  """
  logits = jnp.array([[14.0, -3.4, 0.9, 100.0], [1.0, 0.49, -0.51, 0.06]])
  # The first query does not see the last key.
  mask = jnp.array([[True, True, True, False], [True, True, True, True]])

  rounded = round_logits(logits, mask, per="row")

  # Multiples of 14 / 7 = 2, and multiples of 1 / 7.
  first_row = np.array([14, -4, 0])
  second_row = np.array([7, 3, -4, 0]) / 7
  chex.assert_trees_all_close(rounded[0, :3], first_row, atol=1e-6, rtol=0)
  chex.assert_trees_all_close(rounded[1], second_row, atol=1e-6, rtol=0)


def test_four_bits_per_tensor_by_hand():
  """Four bits have 15 levels. Here they are −14, −12, … 14.

  All queries share the scale, which the largest visible logit, 14, sets.
  """
  logits = jnp.array([[14.0, -3.4, 0.9, 100.0], [1.0, 0.49, -0.51, 0.06]])
  # The first query does not see the last key.
  mask = jnp.array([[True, True, True, False], [True, True, True, True]])

  rounded = round_logits(logits, mask, per="tensor")

  expected = np.array([[14, -4, 0], [0, 0, 0]])
  chex.assert_trees_all_close(rounded[:, :3], expected, atol=1e-6, rtol=0)


def test_zeros_stay_zeros():
  """The largest logit is 0, and it does not become a divisor."""
  zeros = jnp.zeros((2, 4))
  mask = jnp.ones((2, 4), bool)

  rounded = round_logits(zeros, mask, per="row")

  chex.assert_trees_all_equal(rounded, np.zeros((2, 4), np.float32))


def queries_changed_by_an_outlier(per: str) -> np.ndarray:
  """Returns whether an outlier changes any rounded logit of a query.

  Logits are rounded to multiples of a scale, which the largest one sets. The
  outlier is in sequence 0, query group 1, map 0 and query 3.

  Args:
    per: The logits that share a scale: "tensor", "head" or "row".

  Returns:
    Booleans, [sequences, query groups, maps, queries].
  """
  rng = np.random.default_rng(0)
  # [sequences, query groups, maps, queries, keys]
  logits = rng.normal(size=(2, 3, 2, 5, 5)).astype(np.float32)
  mask = np.tri(5, dtype=bool)[None].repeat(2, axis=0)
  logits_with_outlier = logits.copy()
  logits_with_outlier[0, 1, 0, 3, 2] = 1000
  transform = LogitsQuantisation(bits=8, per=per)
  rounded = np.asarray(transform(logits, mask))
  rounded_with_outlier = np.asarray(transform(logits_with_outlier, mask))
  return np.any(rounded != rounded_with_outlier, axis=-1)


def test_with_a_scale_per_row_an_outlier_changes_only_its_query():
  """A row is the logits of one query."""
  is_changed = queries_changed_by_an_outlier(per="row")

  # The sequence, query group, map and query of the outlier.
  assert np.argwhere(is_changed).tolist() == [[0, 1, 0, 3]]


def test_with_a_scale_per_head_an_outlier_changes_queries_of_its_map():
  # The outlier is in sequence 0, query group 1, map 0 and query 3.
  is_changed = queries_changed_by_an_outlier(per="head")

  assert is_changed[0, 1, 0, 3], "the query of the outlier"
  assert is_changed[0, 1, 0, 4], "another query"
  assert not is_changed[0, 1, 1].any(), "another map"
  assert not is_changed[0, 2].any(), "another query group"
  assert not is_changed[1].any(), "another sequence"


def test_with_a_scale_per_tensor_an_outlier_changes_its_whole_sequence():
  # The outlier is in sequence 0, query group 1, map 0 and query 3.
  is_changed = queries_changed_by_an_outlier(per="tensor")

  assert is_changed[0, 1, 0, 3], "the query of the outlier"
  assert is_changed[0, 1, 0, 4], "another query"
  assert is_changed[0, 1, 1, 4], "another map"
  assert is_changed[0, 2, 1, 4], "another query group"
  assert not is_changed[1].any(), "another sequence"


@pytest.mark.parametrize(
  "variant, fields",
  [
    pytest.param("softmax", {}, id="softmax"),
    pytest.param("diff_v2", {}, id="diff_v2"),
    pytest.param(
      "diff", {"window": 5, "window_pattern": "wf"}, id="diff with windows"
    ),
  ],
)
def test_logits_of_24_bits_change_nothing_and_of_2_bits_much(
  make_trained, variant, fields
):
  """The suite rounds the logits of attention to a number of bits."""
  trained = make_trained(variant, **fields)
  rows = validation_rows("quantised", trained, count=3, batch_size=3)
  batch = next(iter(rows))

  @functools.partial(jax.jit, static_argnums=0)
  def apply(model, params):
    return model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
    )

  many_bits = quantise(trained, bits=24, per="row")
  few_bits = quantise(trained, bits=2, per="tensor")

  exact = apply(trained.model, trained.params)
  fine = apply(many_bits.model, trained.params)
  coarse = apply(few_bits.model, trained.params)

  # The mantissa of float32 has 24 bits too.
  chex.assert_trees_all_close(fine, exact, atol=1e-5, rtol=0)
  assert np.abs(coarse - exact).max() > 0.01


def test_padding_does_not_set_the_scale():
  """Large queries at positions of padding do not make the rounding coarser."""
  keys = jax.random.split(jax.random.key(0), 3)
  # One row of nine positions, and four heads with two maps, of size 8. Two heads
  # share their keys and values.
  q = jax.random.normal(keys[0], (1, 9, 4, 2, 8))
  k = jax.random.normal(keys[1], (1, 9, 2, 2, 8))
  v = jax.random.normal(keys[2], (1, 9, 2, 16))
  # Six tokens, then three of padding, whose id is 0.
  segment_ids = jnp.array([[1, 1, 1, 1, 1, 1, 0, 0, 0]])
  quantisation = LogitsQuantisation(bits=4, per="tensor")
  layer = DiffAttention(num_heads=4, head_dim=8, logits_transform=quantisation)

  @jax.jit
  def attend(q, k, v, segment_ids):
    mask = MaskArguments(
      q_segment_ids=segment_ids,
      kv_segment_ids=segment_ids,
      causal=True,
      window=None,
    )
    return layer.attend(q, k, v, lam=0.3, mask=mask)

  alone = attend(q[:, :6], k[:, :6], v[:, :6], segment_ids[:, :6])
  q_with_large_padding = q.at[:, 6:].multiply(100)
  padded = attend(q_with_large_padding, k, v, segment_ids)

  chex.assert_trees_all_close(padded[:, :6], alone, **FLOAT32)


def test_a_row_does_not_depend_on_the_other_rows_of_its_batch(make_trained):
  """With `per="tensor"`, all logits of a row share a scale.

  Another row has another scale.
  """
  trained = quantise(make_trained(), bits=4, per="tensor")

  alone = Validation(rows=7, batch_size=1).evaluate(trained)
  together = Validation(rows=7, batch_size=4).evaluate(trained)

  for expected, actual in zip(alone, together, strict=True):
    chex.assert_trees_all_close(actual.units, expected.units, **FLOAT32_MODEL)


def test_reading_with_a_cache_is_quantised(make_trained):
  """Reading with a cache rounds the logits to 3 bits, as reading without one.

  16 tokens are read at once, and two more one by one.
  """
  trained = make_trained("diff_v2")
  model = quantise(trained, bits=3, per="row").model
  tokens = jax.random.randint(jax.random.key(1), (2, 18), 0, 250)
  read = jax.jit(functools.partial(extend, model))
  # `extend` takes the parameters of each layer as a separate tree.
  weights = unstack(model, trained.params)
  cache = empty_cache(model, batch_size=2, capacity=32)

  first, cache = read(weights, tokens[:, :16], cache)
  second, cache = read(weights, tokens[:, 16:17], cache)
  third, cache = read(weights, tokens[:, 17:], cache)

  with_cache = jnp.concatenate([first, second, third], axis=1)
  variables = {"params": trained.params}
  without_cache = jax.jit(model.apply)(variables, tokens)
  chex.assert_trees_all_close(with_cache, without_cache, **FLOAT32_LAYER)
  # The model without rounding has other outputs.
  exact = jax.jit(trained.model.apply)(variables, tokens)
  assert np.abs(without_cache - exact).max() > 0.01


@pytest.mark.parametrize(
  "lam",
  [
    pytest.param(np.float32(0.3), id="scalar"),
    # For each row, query and head.
    pytest.param(
      np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4), id="per token"
    ),
  ],
)
def test_lambda_and_query_offsets_are_those_of_diff_attention(lam):
  """Both functions apply λ and the positions of the queries in the same way.

  Rounding to 24 bits, as many as the mantissa of float32 has, changes nothing.
  There are two rows with three queries and nine keys each. Their first queries
  are at the positions 2 and 5.
  """
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, 3, 4, 2, 8))
  k = jax.random.normal(keys[1], (2, 9, 2, 2, 8))
  v = jax.random.normal(keys[2], (2, 9, 2, 16))
  offsets = jnp.array([2, 5])
  quantisation = LogitsQuantisation(bits=24, per="row")
  layer = DiffAttention(num_heads=4, head_dim=8, logits_transform=quantisation)
  # Takes the place of `diff_attention`, and computes the matrix of all weights
  # with `layer.weights`, which rounds the logits.
  attend = by_definition(diff_attention, layer.weights, layer.supports)

  quantised_output = jax.jit(attend)(
    q, k, v, broadcast_lambda(lam, q, num_heads=4), q_offset=offsets
  )

  output = jax.jit(diff_attention)(q, k, v, lam, q_offset=offsets)
  chex.assert_trees_all_close(quantised_output, output, **FLOAT32)


def test_a_variant_must_support_quantised_logits(make_trained, monkeypatch):
  """The error is raised before anything is measured.

  A variant of attention lists in `supports` what can be done with it. The suite
  needs "quantized_logits".
  """
  monkeypatch.setattr(DiffAttention, "supports", frozenset())
  suite = Quantised(measurements=("validation",))
  trained = make_trained()

  with pytest.raises(UserError, match="--suite=quantised: .*quantized_logits"):
    suite.evaluate(trained)


@pytest.fixture
def needle_calls(
  monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[Trained, Needle]]:
  """The models and settings that the suite "needle" has measured.

  The suite is replaced by one that measures nothing, because it takes long.
  """
  calls = []

  def load(suite: Needle, trained: Trained) -> str:
    return "a haystack"

  def measure(
    suite: Needle, trained: Trained, data: Any
  ) -> Iterator[Measurement]:
    assert data == "a haystack"
    calls.append((trained, suite))
    for depth in (0.5, "mean"):
      yield mean_of("accuracy", [1.0, 0.0], needles=1, depth=depth)

  monkeypatch.setattr(Needle, "load", load)
  monkeypatch.setattr(Needle, "measure", measure)
  return calls


# `needle_calls` replaces the suite "needle", which takes long.
@pytest.mark.usefixtures("needle_calls")
def test_each_suite_is_measured_without_and_with_quantisation(make_trained):
  """The suites "validation" and "needle" are measured three times each.

  That is with exact logits, of "all" bits, and with logits of 8 and of 4 bits.
  """
  suite = Quantised(
    measurements=("validation", "needle"),
    bits=(8, 4),
    per=("row",),
    validation=Validation(rows=4),
  )

  measurements = list(suite.evaluate(make_trained()))

  rows = []
  for measurement in measurements:
    at = measurement.at
    rows.append((measurement.name, at["bits"], at["per"]))
  assert rows == [
    ("validation: loss (nats/token)", "all", ""),
    ("validation: loss (nats/token)", 8, "row"),
    ("validation: loss (nats/token)", 4, "row"),
    ("needle: accuracy", "all", ""),
    ("needle: accuracy", 8, "row"),
    ("needle: accuracy", 4, "row"),
  ]
  # More bits change the losses of rows less.
  exact_losses = measurements[0].units
  error_of_8_bits = np.abs(measurements[1].units - exact_losses).max()
  error_of_4_bits = np.abs(measurements[2].units - exact_losses).max()
  assert error_of_8_bits < error_of_4_bits


def test_a_measured_suite_has_its_own_settings_and_coordinates(
  make_trained, needle_calls
):
  """`needle_calls` replaces the suite "needle", which takes long.

  It lists the models and the settings with which that suite is called.
  """
  suite = Quantised(
    measurements=("needle",),
    bits=(8,),
    per=("row",),
    needle=Needle(samples=7),
  )

  exact_accuracy, _ = suite.evaluate(make_trained())

  assert exact_accuracy.at == {
    "bits": "all",
    "per": "",
    "needles": 1,
    "depth": "mean",
  }
  for _, needle_suite in needle_calls:
    assert needle_suite.samples == 7
  names = [trained.name for trained, _ in needle_calls]
  assert names == ["a diff model", "a diff model, logits of 8 bits per row"]


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"measurements": ("attention",)},
      "'attention': must be one of validation, needle, position_nll,"
      " many_shot, harness, mathematics",
      id="measurements",
    ),
    pytest.param(
      {"per": ("layer",)},
      "'layer': must be one of tensor, head, row",
      id="per",
    ),
    pytest.param(
      {"bits": (1,)}, "bits = 1: must lie between 2 and 24", id="bits"
    ),
  ],
)
def test_an_invalid_setting_raises(make_trained, settings, message):
  with pytest.raises(UserError, match=message):
    list(Quantised(**settings).evaluate(make_trained()))


def test_no_measurements_have_no_plot(make_trained):
  suite = Quantised(measurements=())

  assert list(suite.evaluate(make_trained())) == []
  assert suite.plot({"models": [{"name": "a"}], "figures": []}) is None


def test_the_plot_is_drawn(make_trained, tmp_path):
  trained = make_trained("softmax", num_layers=1)
  suite = Quantised(
    measurements=("validation",),
    bits=(4,),
    per=("row",),
    validation=Validation(rows=4),
  )
  figures = list(intervals.compare(suite.evaluate(trained)))
  # The content of the results file.
  suite_results = results.finite(
    {
      "suite": "quantised",
      "settings": {},
      "models": [{"name": "a"}],
      "figures": figures,
    }
  )

  plots.save(suite.plot(suite_results), tmp_path / "quantised.png")

  # An image, and not an empty file.
  assert (tmp_path / "quantised.png").stat().st_size > 1000
