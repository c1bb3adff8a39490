"""Outliers against numpy on all logits and hidden states."""

import functools

import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.data.row import Row, make_batch
from diffjax.evals import outliers
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.outliers import (
  RANKS,
  Outliers,
  Summary,
  edges,
  largest,
  median,
)
from diffjax.evals.report.intervals import interval


def magnitudes(trained, batches):
  """All |logits| and |hidden states| that count, from what the model captures."""

  @jax.jit
  def captured(params, batch):
    _, variables = trained.model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["intermediates"],
    )
    return variables["intermediates"]["layers"]

  logits, hidden = [], []
  for batch in batches:
    layers = captured(trained.params, batch)
    q, k, x = (
      np.asarray(part[0], np.float64)
      for part in (
        layers["attention"]["query"],
        layers["attention"]["key"],
        layers["hidden"],
      )
    )
    k = np.repeat(
      np.repeat(k, q.shape[3] // k.shape[3], axis=3),
      q.shape[4] // k.shape[4],
      axis=4,
    )
    ids = batch["segment_ids"]
    seen = (
      (ids[:, :, None] == ids[:, None])
      & (ids > 0)[:, None]
      & np.tri(ids.shape[1], dtype=bool)
    )
    all_logits = np.moveaxis(
      np.einsum("lbthgd,lbshgd->lbhgts", q, k) / np.sqrt(q.shape[-1]), 1, 0
    )
    logits += [
      np.abs(row[..., mask]).ravel()
      for row, mask in zip(all_logits, seen, strict=True)
    ]
    hidden += [
      np.abs(row[:, kept]).ravel()
      for row, kept in zip(np.moveaxis(x, 1, 0), ids > 0, strict=True)
    ]
  return {"attention logits": logits, "hidden states": hidden}


@pytest.mark.parametrize("kind", ["softmax", "diff", "diff_v2"])
def test_top_values_are_exact_and_medians_close(make_trained, kind):
  trained = make_trained(kind)
  want = magnitudes(
    trained, validation_rows("outliers", trained, 5, length=160, batch_size=1)
  )
  # 5 rows, each of two blocks of queries, in batches of which the last is filled up
  found = list(
    Outliers(tokens=750, length=160, batch_size=2, median_every=1).evaluate(
      trained
    )
  )
  assert len(found) == 12
  for figure in found:
    values = np.sort(np.concatenate(want[figure.name]))
    assert len(figure.units) == 5
    if figure.at["value"] == "median":
      assert interval(figure).value == pytest.approx(
        np.median(values), rel=0.005
      )
      continue
    rank = int(figure.at["value"].removeprefix("top-"))
    assert interval(figure).value == pytest.approx(values[-rank], rel=1e-5)
    # And so is every resampling: rows 0, 0 and 3
    values = np.sort(
      np.concatenate([want[figure.name][row] for row in (0, 0, 3)])
    )
    assert figure.statistic(figure.units[[0, 0, 3]]) == pytest.approx(
      values[-rank], rel=1e-5
    )


def test_padding_does_not_count(make_trained):
  """Eleven tokens in a row of 64 give the same values as alone."""
  trained = make_trained()
  row = Row(np.arange(11), np.array([11]), np.array([0]))
  summaries = jax.jit(
    functools.partial(outliers.row_summaries, trained.model, every=1)
  )
  short, long = (
    summaries(trained.params, make_batch([row], length)) for length in (11, 64)
  )
  for name in short:
    for alone, padded in zip(short[name], long[name], strict=True):
      np.testing.assert_allclose(alone[:, :100], padded[:, :100], rtol=1e-5)
  # Layers × heads × maps × pairs, and layers × tokens × E
  assert [
    float(long[name][1].sum()) for name in ("attention logits", "hidden states")
  ] == [2 * 2 * 2 * 66, 2 * 11 * 16]


def test_a_sample_of_queries_gives_nearly_the_same_median(make_trained):
  trained = make_trained()
  for every, tolerance in ((4, 0.05), (10_000, 0.5)):
    whole, sample = (
      [
        interval(figure).value
        for figure in Outliers(tokens=800, median_every=n).evaluate(trained)
        if figure.at["value"] == "median"
      ]
      for n in (1, every)
    )
    assert sample == pytest.approx(whole, rel=tolerance) and sample != whole


def test_an_outlier_is_found_wherever_it_is():
  """_top_values sorts only the groups with the largest values: many large ones in one group, ties, and fewer values than are kept."""
  rng = np.random.default_rng(0)
  values = rng.random((3, 500, 7)).astype(np.float32)
  values[0, 3] += 10
  values[1, ::2] = 0.5
  want = np.sort(values.reshape(3, -1), axis=1)[:, ::-1][:, :100]
  np.testing.assert_array_equal(jax.jit(outliers._top_values)(values), want)
  few = np.asarray(jax.jit(outliers._top_values)(values[:, :2]))
  np.testing.assert_array_equal(
    few[:, :14], np.sort(values[:, :2].reshape(3, -1), axis=1)[:, ::-1]
  )
  assert (few[:, 14:] == -1).all()


def test_largest_and_median_by_hand():
  top = np.array([[9.0, 2.0, -1.0], [8.0, 7.0, 6.0]])
  assert [largest(rank, top[:, :rank]) for rank in (1, 2, 3)] == [9, 8, 7]
  assert np.isnan(largest(3, np.array([[1.0, -1.0, -1.0]]))) and np.isnan(
    largest(3, top[:0])
  )
  assert median(
    np.array([0.0, 1.0, 2.0, 4.0]), np.array([[1, 0, 1], [0, 0, 2]])
  ) == pytest.approx(2 + 2 / 3)
  assert np.isnan(median(np.array([0.0, 1.0]), np.zeros((1, 1))))
  assert RANKS == (1, 2, 3, 10, 100)


def test_bins_hold_every_size():
  values = np.concatenate(
    [
      np.float32([0, 1e-30, 1e30]),
      np.exp(np.random.default_rng(0).uniform(-16, 13, 1000)).astype(
        np.float32
      ),
    ]
  )
  add = jax.jit(functools.partial(outliers._add_values, every=1))
  start = Summary(
    np.full((len(values), 100), -1, np.float32),
    np.zeros((len(values), len(edges()) - 1), np.float32),
  )
  _, counts = add(start, values[:, None, None])
  bins = np.argmax(counts, axis=1)
  assert (
    (np.sum(counts, axis=1) == 1).all()
    and bins[0] == bins[1] == 0
    and bins[2] == len(edges()) - 2
  )
  assert (
    (edges()[bins[3:]] <= values[3:]) & (values[3:] < edges()[bins[3:] + 1])
  ).all()
  assert np.all(np.diff(np.log2(edges()[1:])) < 0.09)


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(tokens=0), "tokens = 0"),
    (dict(length=-1), "length = -1"),
    (dict(batch_size=0), "batch_size = 0"),
    (dict(median_every=0), "median_every = 0"),
  ],
)
def test_bad_settings(make_trained, settings, message):
  with pytest.raises(UserError, match=message):
    list(Outliers(**settings).evaluate(make_trained()))
