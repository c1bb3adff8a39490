"""Measures of the difference map: by hand, against float64, and on models with a known answer."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.evals import difference_map
from diffjax.evals.difference_map import MEASURES, DifferenceMap
from diffjax.evals.report.intervals import interval


def one_row(weights):
  """The measures of one query."""
  weights = jnp.asarray(weights, jnp.float32)[None, None, None]
  sums = np.asarray(
    difference_map.row_sums(weights, jnp.ones(weights.shape[1:], bool))
  )[0]
  assert sums[-1] == 1
  return dict(zip(MEASURES, sums[:-1], strict=True))


def test_measures_by_hand():
  assert one_row([0.25] * 4) == pytest.approx(
    {
      "negative share": 0,
      "small share": 0,
      "effective keys": 1,
      "Hoyer sparsity": 0,
    },
    abs=1e-6,
  )
  assert one_row([0, 0, 1, 0]) == pytest.approx(
    {
      "negative share": 0,
      "small share": 0.75,
      "effective keys": 0.25,
      "Hoyer sparsity": 1,
    }
  )
  assert one_row([3, -1]) == pytest.approx(
    {
      "negative share": 0.25,
      "small share": 0,
      "effective keys": 16 / 20,
      "Hoyer sparsity": (2**0.5 - 4 / 10**0.5) / (2**0.5 - 1),
    },
    abs=1e-6,
  )
  assert one_row([0, 0]) == pytest.approx(
    {
      "negative share": 0,
      "small share": 0,
      "effective keys": 1,
      "Hoyer sparsity": 0,
    },
    abs=1e-6,
  )


def test_rows_count_only_what_they_see_and_queries_of_two_keys_or_more():
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(2, 3, 9, 9))
  seen = np.tri(9, dtype=bool)[None].repeat(2, axis=0)
  seen[1, 5:] = False
  want = np.zeros((2, 5))
  for b, h, t in np.ndindex(2, 3, 9):
    if (n := seen[b, t].sum()) >= 2:
      w = weights[b, h, t, seen[b, t]]
      size = np.abs(w)
      ratio = size.sum() / np.sqrt((w**2).sum())
      hoyer = (np.sqrt(n) - ratio) / (np.sqrt(n) - 1)
      want[b] += (
        -w[w < 0].sum() / size.sum(),
        np.mean(size < size.mean() / 10),
        ratio**2 / n,
        hoyer,
        1,
      )
  np.testing.assert_allclose(
    difference_map.row_sums(
      jnp.asarray(weights, jnp.float32), jnp.asarray(seen)
    ),
    want,
    rtol=1e-5,
  )
  assert want[:, -1].tolist() == [24, 12]


def flat(trained):
  """The model with queries of zeros, so that every map is uniform."""
  layers = trained.params["layers"]
  still = layers["attention"] | {
    "query": jnp.zeros_like(layers["attention"]["query"])
  }
  return dataclasses.replace(
    trained, params={**trained.params, "layers": {**layers, "attention": still}}
  )


@pytest.mark.parametrize("kind", ["softmax", "diff", "diff_v2"])
def test_uniform_maps_are_not_sparse(make_trained, kind):
  found = list(
    DifferenceMap(rows=6, batch_size=4).evaluate(flat(make_trained(kind)))
  )
  assert [figure.at["layer"] for figure in found] == [0, 1, "all"] * 4
  want = {
    "negative share": 0,
    "small share": 0,
    "effective keys": 1,
    "Hoyer sparsity": 0,
  }
  for figure in found:
    assert len(figure.units) == 6 and interval(figure).value == pytest.approx(
      want[figure.name], abs=1e-4
    )


def test_only_a_difference_has_negative_weights(make_trained):
  for kind, negative in (("softmax", False), ("diff", True), ("diff_v2", True)):
    found = [
      figure
      for figure in DifferenceMap(rows=2).evaluate(make_trained(kind))
      if figure.name == "negative share"
    ]
    assert all((interval(figure).value > 0.01) == negative for figure in found)
