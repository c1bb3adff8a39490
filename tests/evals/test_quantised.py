"""The suite "quantised": rounding of logits, and the models that round them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import chex
import flax.linen as nn
import jax
import numpy as np
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.evals.measurement import Measurement, mean_of
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.needle import Needle
from diffjax.evals.quantised import LogitsQuantisation, Quantised, quantise
from diffjax.evals.suite import Model
from diffjax.evals.validation import Validation
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.inference.trained import Trained
from diffjax.model.attention import DiffAttention, MaskArguments
from diffjax.model.definition import broadcast_lambda, by_definition
from diffjax.ops.diff_attention import diff_attention
from tests.harness.tolerances import FLOAT32, FLOAT32_LAYER, FLOAT32_MODEL


def round_to_4_bits(
  logits: np.ndarray, mask: np.ndarray, per: str
) -> np.ndarray:
  """Returns the logits of one map, rounded to 4 bits.

  Args:
    logits: The logits, [queries, keys].
    mask: Whether a query sees a key, [queries, keys].
    per: The logits that share a scale: "tensor", "head" or "row".
  """
  transform = jax.jit(LogitsQuantisation(bits=4, per=per))
  rounded = transform(logits[None, None, None], mask[None])
  return np.asarray(rounded)[0, 0, 0]


def test_four_bits_per_row_by_hand():
  """Logits are rounded to a multiple, from −7 to 7, of the step of their row.

  The step is the largest visible logit of the row, divided by 7.
  """
  # The steps are 14 / 7 = 2 and 1.75 / 7 = 0.25.
  logits = np.float32([[14.0, -3.4, 0.9, 100.0], [1.75, 0.9, -0.6, 0.1]])
  # The first query does not see the key with the logit 100.
  mask = np.array([[True, True, True, False], [True, True, True, True]])

  rounded = round_to_4_bits(logits, mask, per="row")

  # These numbers have no rounding errors in float32.
  visible_logits = rounded[mask].tolist()
  first_row, second_row = [14, -4, 0], [1.75, 1.0, -0.5, 0]
  assert visible_logits == first_row + second_row


def test_four_bits_per_tensor_by_hand():
  """Logits are rounded to a multiple, from −7 to 7, of one step for all rows.

  The step is the largest visible logit of all rows, divided by 7.
  """
  # The step is 14 / 7 = 2.
  logits = np.float32([[14.0, -3.4, 0.9, 100.0], [1.75, 0.9, -0.6, 0.1]])
  # The first query does not see the key with the logit 100.
  mask = np.array([[True, True, True, False], [True, True, True, True]])

  rounded = round_to_4_bits(logits, mask, per="tensor")

  # These numbers have no rounding errors in float32.
  visible_logits = rounded[mask].tolist()
  first_row, second_row = [14, -4, 0], [2, 0, 0, 0]
  assert visible_logits == first_row + second_row


def test_zeros_stay_zeros():
  """The largest logit is 0, and it does not become a divisor."""
  zeros = np.zeros((2, 4), np.float32)
  mask = np.ones((2, 4), bool)

  rounded = round_to_4_bits(zeros, mask, per="row")

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
  transform = jax.jit(LogitsQuantisation(bits=8, per=per))
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


@functools.partial(jax.jit, static_argnums=0)
def apply_to_batch(
  model: nn.Module, params: Any, batch: dict[str, Any]
) -> jax.Array:
  """Returns the output of a decoder for a batch of rows."""
  return model.apply(
    {"params": params},
    batch["tokens"],
    batch["segment_ids"],
    batch["positions"],
  )


@pytest.mark.parametrize(
  "variant, window_settings",
  [
    pytest.param("softmax", {}, id="softmax"),
    pytest.param("diff_v2", {}, id="diff_v2"),
    pytest.param(
      "diff", {"window": 5, "window_pattern": "wf"}, id="diff with windows"
    ),
  ],
)
def test_logits_of_24_bits_change_nothing_and_of_2_bits_much(
  make_trained, variant, window_settings
):
  """Numbers in float32 have 24 significant bits, so 24 bits are exact."""
  trained = make_trained(variant, **window_settings)
  model_of_24_bits = quantise(trained, bits=24, per="row").model
  model_of_2_bits = quantise(trained, bits=2, per="row").model
  rows = validation_rows("quantised", trained, count=3, batch_size=3)
  batch = next(iter(rows))

  exact = apply_to_batch(trained.model, trained.params, batch)
  with_24_bits = apply_to_batch(model_of_24_bits, trained.params, batch)
  with_2_bits = apply_to_batch(model_of_2_bits, trained.params, batch)

  chex.assert_trees_all_close(
    with_24_bits, exact, atol=FLOAT32_LAYER["atol"], rtol=0
  )
  change = np.abs(with_2_bits - exact)
  # A thousand times the rounding errors of the exact output.
  assert change.max() > 1000 * FLOAT32_LAYER["atol"]


def random_heads(
  num_rows: int, num_queries: int, num_keys: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns random queries, keys and values of four heads with two maps.

  Two heads share their keys and values.
  """
  num_heads, num_kv_heads, num_maps, head_dim = 4, 2, 2, 8
  rng = np.random.default_rng(0)
  q_shape = (num_rows, num_queries, num_heads, num_maps, head_dim)
  k_shape = (num_rows, num_keys, num_kv_heads, num_maps, head_dim)
  v_shape = (num_rows, num_keys, num_kv_heads, num_maps * head_dim)
  q = rng.standard_normal(q_shape, np.float32)
  k = rng.standard_normal(k_shape, np.float32)
  v = rng.standard_normal(v_shape, np.float32)
  return q, k, v


def test_padding_does_not_set_the_scale():
  """The largest logit of a row sets its scale, but logits of padding do not."""
  num_tokens = 6
  # Nine positions. The last three are padding, which has the segment id 0.
  segment_ids = np.array([[1, 1, 1, 1, 1, 1, 0, 0, 0]])
  q, k, v = random_heads(num_rows=1, num_queries=9, num_keys=9)
  q_with_large_padding = q.copy()
  q_with_large_padding[:, num_tokens:] *= 100
  k_with_large_padding = k.copy()
  k_with_large_padding[:, num_tokens:] *= 100
  quantisation = LogitsQuantisation(bits=4, per="tensor")
  layer = DiffAttention(num_heads=4, head_dim=8, logits_transform=quantisation)

  @jax.jit
  def attend(q, k):
    mask = MaskArguments(
      q_segment_ids=segment_ids,
      kv_segment_ids=segment_ids,
      causal=True,
      window=None,
    )
    output = layer.attend(q, k, v, lam=0.3, mask=mask)
    return output[:, :num_tokens]

  output = attend(q, k)
  output_with_large_padding = attend(q_with_large_padding, k_with_large_padding)

  chex.assert_trees_all_close(output_with_large_padding, output, **FLOAT32)


def test_a_row_does_not_depend_on_the_other_rows_of_its_batch(make_trained):
  """With `per="tensor"`, each row of a batch has a scale of its own.

  If the rows shared a scale, losses would depend on the size of batches.
  """
  trained = quantise(make_trained(), bits=4, per="tensor")

  one_by_one = list(Validation(rows=7, batch_size=1).evaluate(trained))
  in_batches = list(Validation(rows=7, batch_size=4).evaluate(trained))

  for expected, actual in zip(one_by_one, in_batches, strict=True):
    # The units of a measurement are the sums of losses of each row.
    chex.assert_trees_all_close(actual.units, expected.units, **FLOAT32_MODEL)


def test_reading_with_a_cache_is_quantised(make_trained):
  """Generation reads a prompt, and then token by token with a key/value cache.

  Logits are rounded in both steps. So the outputs are the same as without a
  cache.
  """
  trained = make_trained("diff_v2")
  model = quantise(trained, bits=3, per="row").model
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 250, size=(2, 18), dtype=np.int32)
  prompt, token_16, token_17 = np.split(tokens, [16, 17], axis=1)
  read_with_cache = jax.jit(functools.partial(extend, model))
  params_by_layer = unstack(model, trained.params)
  cache = empty_cache(model, batch_size=2, capacity=32)

  outputs, cache = read_with_cache(params_by_layer, prompt, cache)
  output_16, cache = read_with_cache(params_by_layer, token_16, cache)
  output_17, cache = read_with_cache(params_by_layer, token_17, cache)

  with_cache = np.concatenate([outputs, output_16, output_17], axis=1)
  variables = {"params": trained.params}
  expected = jax.jit(model.apply)(variables, tokens)
  chex.assert_trees_all_close(with_cache, expected, **FLOAT32_LAYER)
  # Outputs of exact logits differ a thousand times more than rounding errors.
  exact = jax.jit(trained.model.apply)(variables, tokens)
  change = np.abs(with_cache - exact)
  assert change.max() > 1000 * FLOAT32_LAYER["atol"]


@pytest.mark.parametrize(
  "lam",
  [
    pytest.param(np.float32(0.3), id="scalar"),
    # For each of two rows, three queries and four heads.
    pytest.param(
      np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4), id="per token"
    ),
  ],
)
def test_logits_of_24_bits_give_the_output_of_diff_attention(lam):
  """`diff_attention` cannot round logits, so a quantised layer replaces it.

  The layer computes all weights in `layer.weights`. It has the same λ, and the
  same `q_offset`: the position of the first query in each row. Numbers in
  float32 have 24 significant bits, so 24 bits are exact.
  """
  q, k, v = random_heads(num_rows=2, num_queries=3, num_keys=9)
  q_offset = np.array([2, 5])
  quantisation = LogitsQuantisation(bits=24, per="row")
  layer = DiffAttention(num_heads=4, head_dim=8, logits_transform=quantisation)
  quantised_attention = by_definition(
    diff_attention, layer.weights, layer.supports
  )
  lam_per_head = broadcast_lambda(lam, q, num_heads=4)

  output = jax.jit(quantised_attention)(
    q, k, v, lam_per_head, q_offset=q_offset
  )

  expected = jax.jit(diff_attention)(q, k, v, lam, q_offset=q_offset)
  chex.assert_trees_all_close(output, expected, **FLOAT32)


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
def needle_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Needle]]:
  """The name of each model that the suite "needle" measures, and the suite.

  The suite is replaced by one that measures nothing, because it takes long. Its
  accuracy is 1/2 at the depth 0.5 and in the mean over depths.
  """
  calls = []

  def load(suite: Needle, trained: Trained) -> str:
    return "a haystack"

  def measure(
    suite: Needle, trained: Trained, data: Any
  ) -> Iterator[Measurement]:
    assert data == "a haystack"
    calls.append((trained.name, suite))
    for depth in (0.5, "mean"):
      yield mean_of("accuracy", [1.0, 0.0], needles=1, depth=depth)

  monkeypatch.setattr(Needle, "load", load)
  monkeypatch.setattr(Needle, "measure", measure)
  return calls


# `needle_calls` replaces the suite "needle", which takes long.
@pytest.mark.usefixtures("needle_calls")
def test_each_suite_is_measured_without_and_with_quantisation(make_trained):
  """Exact logits, with "all" bits, come first. Then come 8 and 4 bits."""
  suite = Quantised(
    measurements=("validation", "needle"),
    bits=(8, 4),
    per=("row",),
    validation=Validation(rows=4),
  )

  measurements = list(suite.evaluate(make_trained()))

  names_and_bits = []
  for measurement in measurements:
    names_and_bits.append((measurement.name, measurement.at["bits"]))
  assert names_and_bits == [
    ("validation: loss (nats/token)", "all"),
    ("validation: loss (nats/token)", 8),
    ("validation: loss (nats/token)", 4),
    ("needle: accuracy", "all"),
    ("needle: accuracy", 8),
    ("needle: accuracy", 4),
  ]


def test_more_bits_change_losses_less(make_trained):
  suite = Quantised(
    measurements=("validation",),
    bits=(8, 4),
    per=("row",),
    validation=Validation(rows=4),
  )

  exact, with_8_bits, with_4_bits = suite.evaluate(make_trained())

  # The units of a measurement are the losses of each row.
  largest_change_of_8_bits = np.abs(with_8_bits.units - exact.units).max()
  largest_change_of_4_bits = np.abs(with_4_bits.units - exact.units).max()
  assert largest_change_of_8_bits < largest_change_of_4_bits


def test_a_measured_suite_has_its_own_settings(make_trained, needle_calls):
  """`needle_calls` has each model that "needle" measures, and its settings."""
  needle_suite = Needle(samples=7)
  suite = Quantised(
    measurements=("needle",), bits=(8,), per=("row",), needle=needle_suite
  )

  list(suite.evaluate(make_trained()))

  assert needle_calls == [
    ("a diff model", needle_suite),
    ("a diff model, logits of 8 bits per row", needle_suite),
  ]


# `needle_calls` replaces the suite "needle", which takes long.
@pytest.mark.usefixtures("needle_calls")
def test_bits_and_scale_precede_the_coordinates_of_a_suite(make_trained):
  """The suite "needle" has the coordinates "needles" and "depth"."""
  suite = Quantised(measurements=("needle",), bits=(8,), per=("row",))

  exact, with_8_bits = suite.evaluate(make_trained())

  needle_coordinates = {"needles": 1, "depth": "mean"}
  assert exact.at == {"bits": "all", "per": "", **needle_coordinates}
  assert with_8_bits.at == {"bits": 8, "per": "row", **needle_coordinates}


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
  model = Model(make_trained("softmax", num_layers=1), {"name": "a"})
  suite = Quantised(
    measurements=("validation",),
    bits=(4,),
    per=("row",),
    validation=Validation(rows=4),
  )

  suite.run([model], [suite.load(model.trained)], epath.Path(tmp_path))

  image = (tmp_path / "quantised.png").read_bytes()
  assert image.startswith(b"\x89PNG")
