"""Cumulative NLL by position."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals import position_nll
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.position_nll import Settings, spaced
from diffjax.evals.report import figures, results
from diffjax.evals.report.figures import interval
from diffjax.model.decoder import logits
from tests.tiers import full


def test_a_uniform_model_loses_log_n_at_every_position(make_trained, uniform):
  found = list(
    position_nll.evaluate(uniform(make_trained()), Settings(rows=3, length=256))
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
    position_nll.evaluate(
      trained, Settings(rows=2, length=200, first=10, per_octave=1)
    )
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


def test_long_documents_are_rows_of_their_own(make_trained, uniform):
  trained = uniform(make_trained())
  rows = list(position_nll._long_documents(trained, Settings(), 300))
  assert rows and all(
    bytes(row["tokens"][0, 1:10].tolist()) == b"document " for row in rows
  )
  assert all(
    row["weights"].all() and row["segment_ids"].min() == 1 for row in rows
  )
  found = list(
    position_nll.evaluate(
      trained, Settings(length=300, rows_of="long", rows=1000)
    )
  )
  assert len(found[0].units) == len(rows)


def test_beyond_the_limit_only_if_asked(make_trained, uniform):
  trained = uniform(make_trained(max_length=64))
  with pytest.raises(
    UserError,
    match="length = 100: a diff model takes 1 to 64 tokens.*beyond_limit",
  ):
    list(position_nll.evaluate(trained, Settings(length=100)))
  found = list(
    position_nll.evaluate(
      trained, Settings(length=100, rows=2, beyond_limit=True)
    )
  )
  assert [figure.at["position"] for figure in found] == [64, 91, 100]
  assert (
    list(position_nll.evaluate(trained, Settings(rows=1)))[-1].at["position"]
    == 64
  )


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(rows=0), "rows = 0"),
    (dict(first=0), "first = 0"),
    (dict(rows_of="books"), "'books': must be 'concatenated' or 'long'"),
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
    list(
      position_nll.evaluate(make_trained(num_layers=1), Settings(**settings))
    )


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
  settings = Settings(length=128, rows=1)
  rows = list(
    figures.compare(
      position_nll.evaluate(trained, settings),
      position_nll.evaluate(trained, settings),
    )
  )
  found = results.finite(
    {
      "suite": "position_nll",
      "settings": dataclasses.asdict(settings),
      "models": [{"name": "a"}, {"name": "b"}],
      "figures": rows,
    }
  )
  position_nll.plot(found, tmp_path / "x.png")
  assert (tmp_path / "x.png").stat().st_size > 1000
