"""The suite "outliers", against NumPy on all logits and hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.data.row import Row, make_batch
from diffjax.evals import outliers
from diffjax.evals.measurement import Measurement
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.outliers import (
  HIDDEN,
  LOGITS,
  Outliers,
  edges,
  largest,
  median,
)
from diffjax.evals.report.intervals import interval
from diffjax.inference.trained import Trained
from tests.harness.tolerances import FLOAT32, FLOAT32_LAYER


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
    layers = jax.device_get(capture(batch))
    (queries,) = layers["attention"]["query"]
    (keys,) = layers["attention"]["key"]
    (hidden,) = layers["hidden"]
    # Query heads and maps may share keys, so k is repeated along both axes.
    q = queries[:, 0].astype(np.float64)  # [L, T, H, G, D]
    k = keys[:, 0].astype(np.float64)  # [L, S, K, M, D]
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    k = np.repeat(k, q.shape[3] // k.shape[3], axis=3)
    logits = np.einsum("lthgd,lshgd->lhgts", q, k) / np.sqrt(q.shape[-1])

    ids = batch["segment_ids"][0]
    is_token = ids > 0
    is_causal = np.tri(len(ids), dtype=bool)
    is_visible = is_causal & is_token & (ids[:, None] == ids)
    visible_logits = logits[..., is_visible]
    magnitudes[LOGITS].append(np.abs(visible_logits).ravel())

    token_states = hidden[:, 0, is_token]  # [L, tokens, E]
    magnitudes[HIDDEN].append(np.abs(token_states).ravel())
  return magnitudes


@pytest.fixture(
  scope="module",
  params=[("softmax", 1), ("diff", 2), ("diff_v2", 1)],
  ids=["softmax", "diff", "diff_v2"],
)
def five_rows(
  request: pytest.FixtureRequest, make_trained: Callable[..., Trained]
) -> tuple[dict[tuple[str, str], Measurement], dict[str, list[np.ndarray]]]:
  """The measurements of five rows, and all magnitudes as NumPy computes them.

  The measurements are by name and value, such as "top-3". The magnitudes are by
  name and row. Attention is computed for 128 queries at a time, so a row has
  two blocks. The last batch of two rows is not full. The median is of all
  queries.
  """
  variant, num_layers = request.param
  trained = make_trained(variant, num_layers=num_layers)
  rows = validation_rows("outliers", trained, count=5, length=160, batch_size=1)
  # 750 tokens take five rows of 160.
  suite = Outliers(tokens=750, length=160, batch_size=2, median_every=1)
  measurements = {}
  for measurement in suite.evaluate(trained):
    measurements[measurement.name, measurement.at["value"]] = measurement
  return measurements, all_magnitudes(trained, rows)


@pytest.mark.parametrize("name", [LOGITS, HIDDEN])
def test_top_values_are_exact(five_rows, name):
  """The value "top-3" is the third largest magnitude of all rows."""
  measurements, magnitudes = five_rows
  values = np.concatenate(magnitudes[name])
  descending = np.flip(np.sort(values))

  for rank in (1, 2, 3, 10, 100):
    top = measurements[name, f"top-{rank}"]
    expected = descending[rank - 1]
    assert interval(top).value == pytest.approx(
      expected, rel=FLOAT32_LAYER["rtol"]
    )


@pytest.mark.parametrize("name", [LOGITS, HIDDEN])
def test_medians_are_nearly_those_of_all_values(five_rows, name):
  """The suite keeps a histogram of all values, not the values themselves."""
  measurements, magnitudes = five_rows
  median_of_histogram = interval(measurements[name, "median"]).value

  expected = np.median(np.concatenate(magnitudes[name]))
  # A bin is up to 1/16 wide, relative to its values. They are evenly spread.
  assert median_of_histogram == pytest.approx(expected, rel=0.005)


def test_logits_and_hidden_states_have_five_ranks_and_a_median(five_rows):
  measurements, _ = five_rows

  values = ("top-1", "top-2", "top-3", "top-10", "top-100", "median")
  expected = itertools.product(("attention logits", "hidden states"), values)
  assert list(measurements) == list(expected)


@pytest.mark.parametrize("name", [LOGITS, HIDDEN])
def test_top_values_of_resampled_rows_are_exact(five_rows, name):
  """A bootstrap computes values again from rows that it draws.

  It may draw a row twice. Here it draws the rows 0, 0 and 3.
  """
  measurements, magnitudes = five_rows
  row_0, _, _, row_3, _ = magnitudes[name]
  values = np.concatenate([row_0, row_0, row_3])
  descending = np.flip(np.sort(values))

  for rank in (1, 2, 3, 10, 100):
    top = measurements[name, f"top-{rank}"]
    resampled = top.statistic(top.units[[0, 0, 3]])
    expected = descending[rank - 1]
    assert resampled == pytest.approx(expected, rel=FLOAT32_LAYER["rtol"])


def summarize_row(
  trained: Trained, num_tokens: int, length: int
) -> dict[str, outliers.Summary]:
  """Returns the largest values and histograms of a row, padded to a length."""
  row = Row(
    tokens=np.arange(num_tokens),
    segment_lengths=np.array([num_tokens]),
    prompt_lengths=np.array([0]),
  )
  batch = make_batch([row], length)
  # The histograms are of all queries or tokens.
  return row_summaries(trained.model, trained.params, batch, every=1)


row_summaries = jax.jit(
  outliers.row_summaries, static_argnums=0, static_argnames="every"
)


@pytest.mark.parametrize("name", [LOGITS, HIDDEN])
def test_padding_does_not_count(make_trained, name):
  trained = make_trained("diff")

  alone = summarize_row(trained, num_tokens=11, length=11)[name]
  padded = summarize_row(trained, num_tokens=11, length=64)[name]

  chex.assert_trees_all_close(padded.top, alone.top, **FLOAT32)
  assert padded.counts.sum() == alone.counts.sum()


def test_all_visible_logits_and_all_hidden_states_count(make_trained):
  """The counts of a histogram add up to the number of values.

  A query sees its own key and the keys before it.
  """
  num_layers = 2
  num_heads = 2
  embed_dim = 16
  num_tokens = 11
  trained = make_trained(
    "diff", num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim
  )

  summaries = summarize_row(trained, num_tokens, length=64)

  num_visible_pairs = num_tokens * (num_tokens + 1) // 2
  num_maps = 2  # A head of DIFF has two attention maps.
  num_logits = num_layers * num_heads * num_maps * num_visible_pairs
  assert summaries[LOGITS].counts.sum() == num_logits
  num_hidden_values = num_layers * num_tokens * embed_dim
  assert summaries[HIDDEN].counts.sum() == num_hidden_values


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
    pytest.param(10_000, 0.5, id="one of a row", marks=pytest.mark.full),
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


def test_top_values_are_the_100_largest_of_each_row():
  """The values of a row are in groups.

  Only the 100 groups with the largest maxima are sorted, because the others
  cannot have one of the 100 largest values.
  """
  num_rows, num_groups, group_size = 3, 500, 7
  rng = np.random.default_rng(0)
  values = rng.random((num_rows, num_groups, group_size)).astype(np.float32)
  # One group of the first row has the seven largest values.
  values[0, 3] += 10
  # Every second group of the second row has seven equal values.
  values[1, ::2] = 0.5

  top = np.asarray(jax.jit(outliers.top_values)(values))

  ascending = np.sort(values.reshape(num_rows, -1), axis=1)
  descending = np.flip(ascending, axis=1)
  chex.assert_trees_all_equal(top, descending[:, :100])


def test_missing_top_values_are_minus_1():
  """`top_values` returns 100 values of each row. These rows have only 14."""
  # [rows, groups, values of a group]
  values = np.random.default_rng(0).random((3, 2, 7)).astype(np.float32)

  top = np.asarray(jax.jit(outliers.top_values)(values))

  num_values = 2 * 7
  num_missing = 100 - num_values
  descending = np.sort(values.reshape(3, num_values), axis=1)[:, ::-1]
  missing = np.full((3, num_missing), -1, np.float32)
  chex.assert_trees_all_equal(top[:, :num_values], descending)
  chex.assert_trees_all_equal(top[:, num_values:], missing)


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
