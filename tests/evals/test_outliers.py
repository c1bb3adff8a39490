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
  """The suite keeps only the largest values of a row, and a histogram of all.

  Attention is computed for 128 queries at a time, so a row has two blocks. The
  last batch of two rows is not full.
  """
  trained = make_trained(variant, num_layers=num_layers)
  rows = validation_rows("outliers", trained, count=5, length=160, batch_size=1)
  magnitudes = all_magnitudes(trained, rows)
  # 750 tokens take five rows of 160. The median is of all queries.
  suite = Outliers(tokens=750, length=160, batch_size=2, median_every=1)

  measurements = list(suite.evaluate(trained))

  # Of logits and of hidden states: the top-1, -2, -3, -10, -100 and the median.
  assert len(measurements) == 2 * (5 + 1)
  for measurement in measurements:
    num_rows = len(measurement.units)
    assert num_rows == 5
    values = np.concatenate(magnitudes[measurement.name])
    value = interval(measurement).value
    if measurement.at["value"] == "median":
      # A histogram has only approximate medians.
      assert value == pytest.approx(np.median(values), rel=0.005)
    else:
      # "top-3" is the third largest value.
      rank = int(measurement.at["value"].removeprefix("top-"))
      assert value == pytest.approx(np.sort(values)[-rank], rel=1e-5)


def test_top_values_of_resampled_rows_are_exact(make_trained):
  """A bootstrap computes each value again from rows that it draws.

  It may draw a row twice. Here it draws the rows 0, 0 and 3.
  """
  trained = make_trained("softmax", num_layers=1)
  rows = validation_rows("outliers", trained, count=5, length=160, batch_size=1)
  magnitudes = all_magnitudes(trained, rows)
  # 750 tokens take five rows of 160.
  suite = Outliers(tokens=750, length=160, batch_size=2, median_every=1)

  measurements = list(suite.evaluate(trained))

  for measurement in measurements:
    if measurement.at["value"] == "median":
      continue
    resampled = measurement.statistic(measurement.units[[0, 0, 3]])
    by_row = magnitudes[measurement.name]
    values = np.concatenate([by_row[0], by_row[0], by_row[3]])
    # "top-3" is the third largest value.
    rank = int(measurement.at["value"].removeprefix("top-"))
    assert resampled == pytest.approx(np.sort(values)[-rank], rel=1e-5)


def test_padding_does_not_count(make_trained):
  """A row of 11 tokens has the same values if padding follows them."""
  # Two layers of two heads with two maps each, and an embedding of size 16.
  trained = make_trained("diff")
  row = Row(
    tokens=np.arange(11),
    segment_lengths=np.array([11]),
    prompt_lengths=np.array([0]),
  )
  # A summary has the largest values, and a histogram of every n-th query: here
  # of all.
  summarize = jax.jit(
    functools.partial(outliers.row_summaries, trained.model, every=1)
  )

  # Rows of 11 and of 64 tokens.
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
  """To save time, the median can be of every n-th query and token only.

  The fewer queries are in the sample, the larger is the error.
  """
  sampled = medians(make_trained(num_layers=1), every)

  assert sampled == pytest.approx(medians_of_all, rel=tolerance)
  assert sampled != medians_of_all


def test_the_largest_values_are_found_in_any_group():
  """`top_values` returns the 100 largest values of each row.

  It sorts only the 100 groups with the largest maxima, of 500 here.
  """
  # [rows, groups, values]
  values = np.random.default_rng(0).random((3, 500, 7)).astype(np.float32)
  # All large values of the first row are in one group.
  values[0, 3] += 10
  # The second row has many equal values.
  values[1, ::2] = 0.5

  top = jax.jit(outliers.top_values)(values)

  descending = np.sort(values.reshape(3, -1), axis=1)[:, ::-1]
  chex.assert_trees_all_equal(np.asarray(top), descending[:, :100])


def test_missing_values_are_filled_up():
  """`top_values` returns 100 values of a row. −1 stands for a missing one."""
  # Three rows of 2 * 7 values.
  values = np.random.default_rng(0).random((3, 2, 7)).astype(np.float32)

  top = np.asarray(jax.jit(outliers.top_values)(values))

  num_values = 14
  num_missing = 100 - num_values
  descending = np.sort(values.reshape(3, num_values), axis=1)[:, ::-1]
  missing = np.full((3, num_missing), -1, np.float32)
  chex.assert_trees_all_equal(top[:, :num_values], descending)
  chex.assert_trees_all_equal(top[:, num_values:], missing)


def test_the_ranks_are_those_of_the_documentation():
  assert RANKS == (1, 2, 3, 10, 100)


@pytest.mark.parametrize("rank, expected", [(1, 9), (2, 8), (3, 7)])
def test_largest_by_hand(rank, expected):
  """The rank 2 is the second largest value of all rows."""
  # −1 fills up the first row, which has only two values.
  top = np.array([[9.0, 2.0, -1.0], [8.0, 7.0, 6.0]])

  assert largest(rank, top[:, :rank]) == expected


def test_largest_of_too_few_values_is_nan():
  """There is no third largest value. −1 stands for a missing value."""
  one_value = np.array([[1.0, -1.0, -1.0]])
  no_rows = np.zeros((0, 3))

  assert np.isnan(largest(3, one_value))
  assert np.isnan(largest(3, no_rows))


def test_median_by_hand():
  """The values in a bin of a histogram count as evenly spread."""
  bin_edges = np.array([0.0, 1.0, 2.0, 4.0])
  # Two rows have together one value in [0, 1), and three values in [2, 4).
  counts = np.array([[1, 0, 1], [0, 0, 2]])

  value = median(bin_edges, counts)

  # Two of the four values are below the median: the one in [0, 1), and one of
  # the three in [2, 4). So it is at a third of the last bin, which is 2 wide.
  assert value == pytest.approx(2 + 2 * 1 / 3)


def test_median_of_no_values_is_nan():
  assert np.isnan(median(np.array([0.0, 1.0]), np.zeros((1, 1))))


def test_each_value_is_in_the_bin_between_its_edges():
  rng = np.random.default_rng(0)
  # From about 2⁻²³ to 2¹⁹. The bins reach from 2⁻²⁴ to 2²⁰.
  values = np.exp(rng.uniform(-16, 13, 1000)).astype(np.float32)

  bins = np.asarray(jax.jit(outliers.bin_indices)(values))

  assert np.all(edges()[bins] <= values)
  assert np.all(values < edges()[bins + 1])


def test_the_outer_bins_contain_smaller_and_larger_values():
  """The bins reach from 2⁻²⁴ to 2²⁰."""
  values = np.array([0, 1e-30, 1e30], np.float32)

  bins = np.asarray(jax.jit(outliers.bin_indices)(values))

  # A bin has two edges, and bins are counted from 0.
  num_bins = len(edges()) - 1
  last_bin = num_bins - 1
  chex.assert_trees_all_equal(bins, np.array([0, 0, last_bin], np.int32))


def test_bins_are_narrow():
  """The upper edge of a bin is at most 17/16 of its lower edge."""
  # The first bin is left out, because it begins at 0.
  octaves = np.log2(edges()[1:])

  # log2(17 / 16) is 0.087.
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
