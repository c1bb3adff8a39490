"""The suite "outliers", against NumPy on all logits and hidden states."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import chex
import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.data.row import Row, make_batch
from diffjax.evals import outliers
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.outliers import (
  HIDDEN,
  LOGITS,
  RANKS,
  Outliers,
  edges,
  largest,
  median,
)
from diffjax.evals.report.intervals import interval
from diffjax.inference.trained import Trained
from tests.harness.tolerances import FLOAT32


def all_magnitudes(
  trained: Trained, batches: Iterable[dict[str, Any]]
) -> dict[str, list[np.ndarray]]:
  """Returns all magnitudes that count, by name and row.

  They are computed in float64 from the queries, keys and hidden states that the
  model captures. A batch has one row.
  """

  @jax.jit
  def capture(batch):
    _, variables = trained.model.apply(
      {"params": trained.params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["intermediates"],
    )
    return variables["intermediates"]["layers"]

  magnitudes: dict[str, list[np.ndarray]] = {LOGITS: [], HIDDEN: []}
  for batch in batches:
    layers = capture(batch)
    (queries,) = layers["attention"]["query"]
    (keys,) = layers["attention"]["key"]
    (hidden,) = layers["hidden"]
    # Query heads and maps may share keys, so k is repeated along both axes.
    q = np.asarray(queries[:, 0], np.float64)  # [L, T, H, G, D]
    k = np.asarray(keys[:, 0], np.float64)  # [L, S, K, M, D]
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    k = np.repeat(k, q.shape[3] // k.shape[3], axis=3)
    logits = np.einsum("lthgd,lshgd->lhgts", q, k) / np.sqrt(q.shape[-1])

    ids = batch["segment_ids"][0]
    is_token = ids > 0
    is_causal = np.tri(len(ids), dtype=bool)
    is_visible = is_causal & is_token & (ids[:, None] == ids)
    visible_logits = logits[..., is_visible]
    magnitudes[LOGITS].append(np.abs(visible_logits).ravel())

    token_states = np.asarray(hidden)[:, 0, is_token]  # [L, tokens, E]
    magnitudes[HIDDEN].append(np.abs(token_states).ravel())
  return magnitudes


@pytest.mark.parametrize(
  "variant, num_layers",
  [
    pytest.param("softmax", 1, id="softmax"),
    pytest.param("diff", 2, id="diff"),
    pytest.param("diff_v2", 1, id="diff_v2"),
  ],
)
def test_top_values_are_exact_and_medians_close(
  make_trained, variant, num_layers
):
  """The suite keeps only the largest magnitudes and a histogram of all.

  Five rows of 160 tokens hold the 750 tokens. A row has two blocks of queries,
  and the last batch of two rows is not full.
  """
  trained = make_trained(variant, num_layers=num_layers)
  rows = validation_rows("outliers", trained, 5, length=160, batch_size=1)
  magnitudes = all_magnitudes(trained, rows)
  suite = Outliers(tokens=750, length=160, batch_size=2, median_every=1)

  measurements = list(suite.evaluate(trained))

  assert len(measurements) == 2 * (len(RANKS) + 1)
  for measurement in measurements:
    assert len(measurement.units) == 5
    values = np.concatenate(magnitudes[measurement.name])
    value = interval(measurement).value
    if measurement.at["value"] == "median":
      assert value == pytest.approx(np.median(values), rel=0.005)
    else:
      rank = int(measurement.at["value"].removeprefix("top-"))
      assert value == pytest.approx(np.sort(values)[-rank], rel=1e-5)


def test_top_values_of_resampled_rows_are_exact(make_trained):
  """The bootstrap draws the rows of a measurement again, here 0, 0 and 3."""
  trained = make_trained("softmax", num_layers=1)
  rows = validation_rows("outliers", trained, 5, length=160, batch_size=1)
  magnitudes = all_magnitudes(trained, rows)
  suite = Outliers(tokens=750, length=160, batch_size=2, median_every=1)

  measurements = list(suite.evaluate(trained))

  for measurement in measurements:
    if measurement.at["value"] == "median":
      continue
    resampled = measurement.statistic(measurement.units[[0, 0, 3]])
    by_row = magnitudes[measurement.name]
    values = np.concatenate([by_row[0], by_row[0], by_row[3]])
    rank = int(measurement.at["value"].removeprefix("top-"))
    assert resampled == pytest.approx(np.sort(values)[-rank], rel=1e-5)


def test_padding_does_not_count(make_trained):
  """Eleven tokens in a row of 64 give the same values as alone."""
  # Two layers of two heads with two maps each, and an embedding of size 16.
  trained = make_trained("diff")
  row = Row(np.arange(11), np.array([11]), np.array([0]))
  summarize = jax.jit(
    functools.partial(outliers.row_summaries, trained.model, every=1)
  )

  alone = summarize(trained.params, make_batch([row], 11))
  padded = summarize(trained.params, make_batch([row], 64))

  for name in (LOGITS, HIDDEN):
    chex.assert_trees_all_close(padded[name].top, alone[name].top, **FLOAT32)
    num_values = float(alone[name].counts.sum())
    assert float(padded[name].counts.sum()) == num_values
  num_layers = 2
  num_heads = 2
  num_maps = 2
  # The first query sees one key, and the eleventh one sees 11.
  num_pairs = sum(range(1, 11 + 1))
  num_logits = num_layers * num_heads * num_maps * num_pairs
  assert float(padded[LOGITS].counts.sum()) == num_logits
  num_hidden_values = num_layers * 11 * 16
  assert float(padded[HIDDEN].counts.sum()) == num_hidden_values


@pytest.fixture(scope="module")
def medians_of_all(make_trained) -> dict[str, float]:
  """The medians of all queries and tokens, by name."""
  return medians(make_trained(num_layers=1), every=1)


def medians(trained: Trained, every: int) -> dict[str, float]:
  """Returns the medians of every n-th query and token, by name."""
  values = {}
  for measurement in Outliers(tokens=800, median_every=every).evaluate(trained):
    if measurement.at["value"] == "median":
      values[measurement.name] = interval(measurement).value
  return values


@pytest.mark.parametrize(
  "every, tolerance",
  [
    pytest.param(4, 0.05, id="every fourth"),
    pytest.param(10_000, 0.5, id="one of a row"),
  ],
)
def test_a_sample_of_queries_gives_nearly_the_same_median(
  make_trained, medians_of_all, every, tolerance
):
  """The median over every n-th query is compared with that over all queries."""
  sampled = medians(make_trained(num_layers=1), every)

  assert sampled == pytest.approx(medians_of_all, rel=tolerance)
  assert sampled != medians_of_all


def test_the_largest_values_are_found_in_any_group():
  """Row 0 has many large values in one group, and row 1 has equal values."""
  values = np.random.default_rng(0).random((3, 500, 7)).astype(np.float32)
  values[0, 3] += 10
  values[1, ::2] = 0.5

  top = jax.jit(outliers.top_values)(values)

  descending = np.sort(values.reshape(3, -1), axis=1)[:, ::-1]
  chex.assert_trees_all_equal(np.asarray(top), descending[:, :100])


def test_missing_values_are_filled_up():
  values = np.random.default_rng(0).random((3, 2, 7)).astype(np.float32)

  top = np.asarray(jax.jit(outliers.top_values)(values))

  descending = np.sort(values.reshape(3, -1), axis=1)[:, ::-1]
  chex.assert_trees_all_equal(top[:, :14], descending)
  chex.assert_trees_all_equal(top[:, 14:], np.full((3, 86), -1, np.float32))


def test_the_ranks_are_those_of_the_documentation():
  assert RANKS == (1, 2, 3, 10, 100)


@pytest.mark.parametrize("rank, expected", [(1, 9), (2, 8), (3, 7)])
def test_largest_by_hand(rank, expected):
  """−1 fills up the first row, which has two values."""
  top = np.array([[9.0, 2.0, -1.0], [8.0, 7.0, 6.0]])

  assert largest(rank, top[:, :rank]) == expected


def test_largest_of_too_few_values_is_nan():
  assert np.isnan(largest(3, np.array([[1.0, -1.0, -1.0]])))
  assert np.isnan(largest(3, np.zeros((0, 3))))


def test_median_by_hand():
  """One value in [0, 1) and three in [2, 4)."""
  bin_edges = np.array([0.0, 1.0, 2.0, 4.0])
  counts = np.array([[1, 0, 1], [0, 0, 2]])

  # One of the three values in the last bin is below the median.
  assert median(bin_edges, counts) == pytest.approx(2 + 2 * 1 / 3)


def test_median_of_no_values_is_nan():
  assert np.isnan(median(np.array([0.0, 1.0]), np.zeros((1, 1))))


def test_each_value_is_in_the_bin_between_its_edges():
  rng = np.random.default_rng(0)
  values = np.exp(rng.uniform(-16, 13, 1000)).astype(np.float32)

  bins = np.asarray(jax.jit(outliers.bin_indices)(values))

  assert np.all(edges()[bins] <= values)
  assert np.all(values < edges()[bins + 1])


def test_the_outer_bins_contain_smaller_and_larger_values():
  values = np.array([0, 1e-30, 1e30], np.float32)

  bins = np.asarray(jax.jit(outliers.bin_indices)(values))

  last_bin = len(edges()) - 2
  chex.assert_trees_all_equal(bins, np.array([0, 0, last_bin], np.int32))


def test_bins_are_narrow():
  """A bin is at most a sixteenth of an octave at its lower end."""
  # The first bin begins at 0.
  octaves = np.log2(edges()[1:])

  assert np.all(np.diff(octaves) < 0.09)


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param({"tokens": 0}, "tokens = 0", id="tokens"),
    pytest.param({"length": -1}, "length = -1", id="length"),
    pytest.param({"batch_size": 0}, "batch_size = 0", id="batch_size"),
    pytest.param({"median_every": 0}, "median_every = 0", id="median_every"),
  ],
)
def test_an_invalid_setting_raises(make_trained, settings, message):
  with pytest.raises(UserError, match=message):
    list(Outliers(**settings).evaluate(make_trained()))
