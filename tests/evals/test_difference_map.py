"""Measures of the difference map: by hand, in float64 and of whole models."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from diffjax.evals import difference_map
from diffjax.evals.difference_map import DifferenceMap
from diffjax.evals.report.intervals import interval
from diffjax.inference.trained import Trained
from tests.harness.tolerances import FLOAT32, FLOAT32_MODEL

row_sums = jax.jit(difference_map.row_sums)


@pytest.mark.parametrize(
  "weights, negative_share, small_share, effective_keys, hoyer_sparsity",
  [
    pytest.param([0.25, 0.25, 0.25, 0.25], 0, 0, 1, 0, id="uniform"),
    pytest.param([0, 0, 1, 0], 0, 3 / 4, 1 / 4, 1, id="one key"),
    # n = 4 keys, Σ|w| = 16 and √Σw² = 10. The formulas of the last two measures
    # are (Σ|w|)² / (n Σw²) and (√n − Σ|w| / √Σw²) / (√n − 1).
    pytest.param(
      [7, -1, 1, 7],
      1 / 16,
      0,
      16**2 / (4 * 10**2),
      (2 - 16 / 10) / (2 - 1),
      id="difference",
    ),
    # If all weights of a query are 0, they count as uniform.
    pytest.param([0, 0], 0, 0, 1, 0, id="zeros"),
  ],
)
def test_measures_of_one_query_by_hand(
  weights, negative_share, small_share, effective_keys, hoyer_sparsity
):
  """The sums over a single query are the measures of its weights."""
  # One row with one head and one query, which sees all keys.
  row_weights = np.array([[[weights]]], np.float32)
  mask = np.ones((1, 1, len(weights)), bool)

  (sums,) = np.asarray(row_sums(row_weights, mask))

  # The last sum is the number of queries.
  *measures, _ = sums
  expected = [negative_share, small_share, effective_keys, hoyer_sparsity]
  assert measures == pytest.approx(expected, abs=FLOAT32["atol"])


def measures_of_query(weights: np.ndarray) -> list[float]:
  """Returns the measures of the visible weights of a query, in float64."""
  num_keys = len(weights)
  magnitudes = np.abs(weights)
  ratio = magnitudes.sum() / np.sqrt(np.square(weights).sum())
  return [
    -weights[weights < 0].sum() / magnitudes.sum(),
    np.mean(magnitudes < magnitudes.mean() / 10),
    ratio**2 / num_keys,
    (np.sqrt(num_keys) - ratio) / (np.sqrt(num_keys) - 1),
  ]


def row_sums_in_float64(weights: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns the four sums of measures and the number of queries of each row.

  Queries that see fewer than two keys do not count. The axes are as in
  `difference_map.row_sums`.
  """
  sums = np.zeros((len(weights), 5))
  for row, head, query in np.ndindex(weights.shape[:3]):
    is_visible = mask[row, query]
    if is_visible.sum() >= 2:
      visible_weights = weights[row, head, query][is_visible]
      sums[row, :4] += measures_of_query(visible_weights)
      sums[row, 4] += 1
  return sums


def mask_with_padding() -> np.ndarray:
  """Returns whether a query sees a key, for rows of nine positions.

  The second row has five tokens and padding.
  """
  causal = np.tri(9, dtype=bool)
  mask = np.stack([causal, causal])
  mask[1, 5:] = False
  return mask


def test_sums_equal_those_of_the_visible_keys_of_each_query():
  # [rows, heads, queries, keys]
  weights = np.random.default_rng(0).normal(size=(2, 3, 9, 9))
  mask = mask_with_padding()

  sums = row_sums(weights.astype(np.float32), mask)

  expected = row_sums_in_float64(weights, mask)
  chex.assert_trees_all_close(sums, expected, **FLOAT32)


def test_queries_that_see_fewer_than_two_keys_do_not_count():
  """The first query of a row sees one key, and queries of padding see none."""
  num_heads = 3
  # [rows, heads, queries, keys]
  weights = np.ones((2, num_heads, 9, 9), np.float32)
  # The rows have nine and five tokens. Padding fills up the second one.
  mask = mask_with_padding()

  sums = np.asarray(row_sums(weights, mask))

  # The last sum of a row is the number of queries of all heads.
  num_queries = sums[:, -1].tolist()
  assert num_queries == [num_heads * (9 - 1), num_heads * (5 - 1)]


def with_uniform_maps(trained: Trained) -> Trained:
  """Returns the model with queries of zeros, so that all maps are uniform."""
  layers = trained.params["layers"]
  attention = {
    **layers["attention"],
    "query": np.zeros_like(layers["attention"]["query"]),
  }
  params = {**trained.params, "layers": {**layers, "attention": attention}}
  return dataclasses.replace(trained, params=params)


@pytest.mark.parametrize("variant", ["softmax", "diff", "diff_v2"])
def test_uniform_maps_are_not_sparse(make_trained, variant):
  """Queries of zeros give all keys the same weight.

  So no weight is negative or small, and the effective keys are all keys.
  """
  trained = with_uniform_maps(make_trained(variant))

  measurements = list(DifferenceMap(rows=6, batch_size=4).evaluate(trained))

  expected = {
    "negative share": 0,
    "small share": 0,
    "effective keys": 1,  # As a fraction of the visible keys.
    "Hoyer sparsity": 0,
  }
  for measurement in measurements:
    value = interval(measurement).value
    assert value == pytest.approx(
      expected[measurement.name], abs=FLOAT32_MODEL["atol"]
    )


def test_each_measure_is_of_each_layer_and_of_all_layers(make_trained):
  trained = make_trained("softmax", num_layers=2)

  measurements = list(DifferenceMap(rows=6, batch_size=4).evaluate(trained))

  num_measures = 4
  layers = [measurement.at["layer"] for measurement in measurements]
  assert layers == [0, 1, "all"] * num_measures
  for measurement in measurements:
    num_rows = len(measurement.units)
    assert num_rows == 6


def negative_shares(trained: Trained) -> list[float]:
  """Returns the negative share of the weights, of each layer and of all."""
  shares = []
  for measurement in DifferenceMap(rows=2).evaluate(trained):
    if measurement.name == "negative share":
      shares.append(interval(measurement).value)
  return shares


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
def test_a_difference_of_maps_has_negative_weights(make_trained, variant):
  """The weights are A₁ − λA₂, the difference of two softmax maps."""
  shares = negative_shares(make_trained(variant))

  assert len(shares) == 3
  assert min(shares) > 0.01


def test_softmax_attention_has_no_negative_weights(make_trained):
  shares = negative_shares(make_trained("softmax"))

  # Of two layers, and of both together.
  assert shares == [0, 0, 0]
