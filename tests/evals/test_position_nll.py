"""Cumulative NLL by position."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.position_nll import PositionNLL, spaced
from diffjax.evals.report import intervals, plots, results
from diffjax.evals.report.intervals import interval
from diffjax.model.decoder import logits
from tests.harness.tiers import full


def test_a_uniform_model_loses_log_n_at_every_position(make_trained, uniform):
  found = list(
    PositionNLL(rows=3, length=256).evaluate(uniform(make_trained()))
  )
  assert [figure.at["position"] for figure in found] == [64, 91, 128, 181, 256]
  for figure in found:
    assert len(figure.units) == 3 and interval(figure).value == pytest.approx(
      math.log(256), rel=1e-6
    )


@pytest.mark.parametrize("kind", ["diff", *full(["softmax", "diff_v2"])])
def test_it_is_the_mean_of_the_first_losses(make_trained, kind):
  trained = make_trained(kind)
  found = list(
    PositionNLL(rows=2, length=200, first=10, per_octave=1).evaluate(trained)
  )
  predict = jax.jit(
    lambda params, tokens: jax.nn.log_softmax(
      logits(params, trained.model.apply({"params": params}, tokens))
    )
  )
  total = {figure.at["position"]: [] for figure in found}
  for batch in validation_rows(
    "position_nll", trained, 2, length=200, packing="concat"
  ):
    log_probabilities = predict(trained.params, batch["tokens"])
    losses = -np.take_along_axis(
      np.asarray(log_probabilities)[0], batch["targets"][0][:, None], axis=1
    )[:, 0]
    for position, values in total.items():
      values.append(losses[:position].mean())
  assert list(total) == [10, 20, 40, 80, 160, 200]
  for figure in found:
    assert interval(figure).value == pytest.approx(
      np.mean(total[figure.at["position"]]), rel=1e-5
    )


def test_a_row_that_is_not_full_is_left_out(make_trained):
  trained = make_trained()
  rows = list(PositionNLL(length=300, rows=1000).load(trained))
  assert rows
  for row in rows:
    assert row["weights"].all()
  all_rows = validation_rows(
    "position_nll", trained, 1000, length=300, packing="concat"
  )
  assert len(rows) == len(list(all_rows)) - 1


def test_long_documents_are_rows_of_their_own(make_trained, uniform):
  trained = uniform(make_trained())
  rows = list(PositionNLL(rows_of="long", length=300).load(trained))
  assert rows and all(
    bytes(row["tokens"][0, 1:10].tolist()) == b"document " for row in rows
  )
  assert all(
    row["weights"].all() and row["segment_ids"].min() == 1 for row in rows
  )
  found = list(
    PositionNLL(length=300, rows_of="long", rows=1000).evaluate(trained)
  )
  assert len(found[0].units) == len(rows)


def test_beyond_the_limit_only_if_asked(make_trained, uniform):
  trained = uniform(make_trained(max_length=64))
  with pytest.raises(
    UserError,
    match="length = 100: a diff model takes 1 to 64 tokens.*beyond_limit",
  ):
    list(PositionNLL(length=100).evaluate(trained))
  found = list(
    PositionNLL(length=100, rows=2, beyond_limit=True).evaluate(trained)
  )
  assert [figure.at["position"] for figure in found] == [64, 91, 100]
  assert list(PositionNLL(rows=1).evaluate(trained))[-1].at["position"] == 64


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(rows=0), "rows = 0"),
    (dict(first=0), "first = 0"),
    (dict(rows_of="books"), "'books': must be one of concatenated, long"),
    (dict(length=-1), "length = -1"),
    (
      dict(length=100_000, beyond_limit=True),
      "the text holds less than 100001 tokens",
    ),
    (
      dict(length=100_000, beyond_limit=True, rows_of="long"),
      "the text holds no document of 100001 tokens",
    ),
  ],
)
def test_bad_settings(make_trained, settings, message):
  with pytest.raises(UserError, match=message):
    list(PositionNLL(**settings).evaluate(make_trained(num_layers=1)))


@pytest.mark.parametrize(
  "first, last, per_octave, want",
  [
    (1, 8, 1, [1, 2, 4, 8]),
    (4, 9, 1, [4, 8, 9]),
    (64, 10, 2, [10]),
    (5, 5, 3, [5]),
  ],
)
def test_spaced(first, last, per_octave, want):
  assert spaced(first, last, per_octave) == want


def test_plot(make_trained, uniform, tmp_path):
  trained = uniform(make_trained(num_layers=1))
  suite = PositionNLL(length=128, rows=1)
  rows = list(
    intervals.compare(suite.evaluate(trained), suite.evaluate(trained))
  )
  found = results.finite(
    {
      "suite": "position_nll",
      "settings": dataclasses.asdict(suite),
      "models": [{"name": "a"}, {"name": "b"}],
      "figures": rows,
    }
  )
  plots.save(suite.plot(found), tmp_path / "x.png")
  assert (tmp_path / "x.png").stat().st_size > 1000
