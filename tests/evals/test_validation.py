"""The validation suite, and the rows that other measurements share with it."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.intervals import interval
from diffjax.evals.validation import Validation
from diffjax.parallel.mesh import make_mesh
from diffjax.training.program import build
from diffjax.training.validation import measure_losses


def numbers(figures):
  return {figure.name: interval(figure).value for figure in figures}


def test_a_uniform_model_loses_log_n(make_trained, uniform):
  figures = list(Validation(rows=7).evaluate(uniform(make_trained())))
  found = numbers(figures)
  assert {figure.units.shape for figure in figures} == {
    (7, 5)
  }  # the row that fills the batch is none
  for name in (
    "loss (nats/token)",
    "AR-Hit (nats/token)",
    "Others (nats/token)",
  ):
    assert found[name] == pytest.approx(math.log(256), rel=1e-6)
  assert found["perplexity"] == pytest.approx(256, rel=1e-5)
  assert (
    8 < found["bits per byte"] < 8.5
  )  # separators cost bits and are no bytes


def test_the_suite_equals_what_the_loop_logs_whatever_the_batch(make_trained):
  trained = make_trained()
  config = dataclasses.replace(
    trained.config, eval=dataclasses.replace(trained.config.eval, rows=13)
  )
  mesh = make_mesh(config.mesh, jax.devices()[:1])
  step = build(config, mesh).eval_step
  rows = validation_rows("validation", trained, 13, batch_size=4)
  logged = measure_losses(
    step,
    trained.params,
    rows,
    mesh=mesh,
    tokenizer=trained.tokenizer,
    ngram=3,
  )
  for batch_size in (1, 5):
    found = numbers(
      Validation(rows=13, batch_size=batch_size).evaluate(trained)
    )
    assert list(found.values()) == pytest.approx(
      list(logged.values()), rel=1e-5
    )


def test_rows_of_another_text_or_length(make_trained, tmp_path):
  trained = make_trained()
  (tmp_path / "other.txt").write_text("x" * 1000)
  batches = list(
    validation_rows(
      "validation", trained, -1, length=128, source=f"text:{tmp_path}/*.txt"
    )
  )
  tokens = np.concatenate([batch["tokens"] for batch in batches])
  assert tokens.shape == (8, 128) and set(tokens.ravel()) <= {ord("x"), 255, 0}


@pytest.mark.parametrize(
  "settings, message",
  [
    (
      dict(length=513),
      "set.validation.length = 513: a diff model takes at most 512 tokens",
    ),
    (
      dict(rows=-2),
      "set.validation.rows = -2: must be at least 1, or -1 for all",
    ),
    (dict(length=-1), "set.validation.length = -1"),
    (dict(batch_size=0), "set.validation.batch_size = 0"),
    (dict(ngram=1), "set.validation.ngram = 1"),
    (dict(source="text:/nowhere/*"), "/nowhere/"),
  ],
)
def test_bad_settings(make_trained, settings, message):
  with pytest.raises(UserError, match=message):
    list(Validation(**settings).evaluate(make_trained()))


def test_a_run_without_validation_rows_is_named(make_trained):
  """The number of rows comes from the run's config, and that is 0."""
  trained = make_trained()
  eval_config = dataclasses.replace(trained.config.eval, rows=0)
  config = dataclasses.replace(trained.config, eval=eval_config)
  trained = dataclasses.replace(trained, config=config)
  with pytest.raises(UserError, match="the run's own config.eval.rows is 0"):
    list(Validation().evaluate(trained))
