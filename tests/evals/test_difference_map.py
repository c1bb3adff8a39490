"""Measures of the difference map: by hand, in float64 and of whole models."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.evals import difference_map
from diffjax.evals.difference_map import MEASURES, DifferenceMap
from diffjax.evals.report.intervals import interval
from diffjax.inference.trained import Trained
from tests.harness.tolerances import FLOAT32


@pytest.mark.parametrize(
  "weights, expected",
  [
    pytest.param(
      [0.25, 0.25, 0.25, 0.25],
      {
        "negative share": 0,
        "small share": 0,
        "effective keys": 1,
        "Hoyer sparsity": 0,
      },
      id="uniform",
    ),
    pytest.param(
      [0, 0, 1, 0],
      {
        "negative share": 0,
        "small share": 3 / 4,
        "effective keys": 1 / 4,
        "Hoyer sparsity": 1,
      },
      id="one key",
    ),
    # Two keys with Σ|w| = 4 and Σw² = 10.
    pytest.param(
      [3, -1],
      {
        "negative share": 1 / 4,
        "small share": 0,
        "effective keys": 4**2 / 10 / 2,
        "Hoyer sparsity": (2**0.5 - 4 / 10**0.5) / (2**0.5 - 1),
      },
      id="difference",
    ),
    pytest.param(
      [0, 0],
      {
        "negative share": 0,
        "small share": 0,
        "effective keys": 1,
        "Hoyer sparsity": 0,
      },
      id="zeros",
    ),
  ],
)
def test_measures_of_one_query_by_hand(weights, expected):
  num_keys = len(weights)
  weights = jnp.asarray(weights, jnp.float32).reshape(1, 1, 1, num_keys)
  mask = jnp.ones((1, 1, num_keys), bool)

  sums = np.asarray(difference_map.row_sums(weights, mask))[0]

  # A row of sums over queries: the four measures, and the number of queries.
  *measures, num_queries = sums
  actual = dict(zip(MEASURES, measures, strict=True))
  assert actual == pytest.approx(expected, abs=1e-6)
  assert num_queries == 1


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


def test_only_visible_keys_of_queries_with_two_or_more_count():
  """The first query sees one key, and the queries of padding see none."""
  rng = np.random.default_rng(0)
  # [rows, heads, queries, keys]
  weights = rng.normal(size=(2, 3, 9, 9))
  causal = np.tri(9, dtype=bool)
  mask = np.stack([causal, causal])
  # The second row has five tokens and padding.
  mask[1, 5:] = False

  sums = difference_map.row_sums(
    jnp.asarray(weights, jnp.float32), jnp.asarray(mask)
  )

  # Four sums of measures and the number of queries, for each row.
  expected = np.zeros((2, 5))
  for row, head, query in np.ndindex(2, 3, 9):
    visible_weights = weights[row, head, query, mask[row, query]]
    if len(visible_weights) >= 2:
      # The 1 counts the query.
      expected[row] += [*measures_of_query(visible_weights), 1]
  chex.assert_trees_all_close(sums, expected, **FLOAT32)
  # All 9 and 5 queries count, except the first one of a row.
  num_heads = 3
  num_queries = expected[:, -1].tolist()
  assert num_queries == [num_heads * (9 - 1), num_heads * (5 - 1)]


def with_uniform_maps(trained: Trained) -> Trained:
  """Returns the model with queries of zeros, so that all maps are uniform."""
  layers = trained.params["layers"]
  attention = {
    **layers["attention"],
    "query": jnp.zeros_like(layers["attention"]["query"]),
  }
  params = {**trained.params, "layers": {**layers, "attention": attention}}
  return dataclasses.replace(trained, params=params)


@pytest.mark.parametrize("variant", ["softmax", "diff", "diff_v2"])
def test_uniform_maps_are_not_sparse(make_trained, variant):
  """All keys have the same weight, so none is negative or small."""
  trained = with_uniform_maps(make_trained(variant))
  suite = DifferenceMap(rows=6, batch_size=4)

  measurements = list(suite.evaluate(trained))

  # Each measure has a value for layer 0, for layer 1 and for all layers.
  num_measures = 4
  layers = [measurement.at["layer"] for measurement in measurements]
  assert layers == [0, 1, "all"] * num_measures
  expected = {
    "negative share": 0,
    "small share": 0,
    # As a fraction of the visible keys: all of them count.
    "effective keys": 1,
    "Hoyer sparsity": 0,
  }
  for measurement in measurements:
    num_rows = len(measurement.units)
    assert num_rows == 6
    value = interval(measurement).value
    assert value == pytest.approx(expected[measurement.name], abs=1e-4)


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
