"""The suite "validation", and the rows that other suites share with it."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.intervals import interval
from diffjax.evals.validation import Validation
from diffjax.inference.trained import Trained
from diffjax.parallel.mesh import make_mesh
from diffjax.training.program import build
from diffjax.training.validation import measure_losses


def with_eval_rows(trained: Trained, rows: int) -> Trained:
  """Returns a model whose run has this number of validation rows."""
  eval_config = dataclasses.replace(trained.config.eval, rows=rows)
  config = dataclasses.replace(trained.config, eval=eval_config)
  return dataclasses.replace(trained, config=config)


def evaluate(trained: Trained, suite: Validation) -> dict[str, float]:
  """Returns the values of the suite's measurements by name."""
  values = {}
  for measurement in suite.evaluate(trained):
    values[measurement.name] = interval(measurement).value
  return values


def test_a_uniform_model_loses_log_n(make_trained, make_uniform):
  """Each of 256 tokens has the probability 1 / 256, so the loss is log(256)."""
  trained = make_uniform(make_trained())

  values = evaluate(trained, Validation(rows=7))

  # Of all tokens, of the last tokens of repeated n-grams, and of other tokens.
  for name in ("loss", "AR-Hit", "Others"):
    loss = values[f"{name} (nats/token)"]
    assert loss == pytest.approx(math.log(256), rel=1e-6)
  assert values["perplexity"] == pytest.approx(256, rel=1e-5)


def test_a_uniform_model_needs_8_bits_per_byte(make_trained, make_uniform):
  """A token is a byte, and one of 256 tokens takes log2(256) = 8 bits.

  Separators are predicted too, but they are not bytes of the text.
  """
  trained = make_uniform(make_trained())

  values = evaluate(trained, Validation(rows=7))

  assert 8 < values["bits per byte"] < 8.5


def test_rows_that_fill_the_last_batch_are_not_measured(make_trained):
  """Seven rows are two batches of four, so an empty row fills the last one."""
  suite = Validation(rows=7, batch_size=4)

  for measurement in suite.evaluate(make_trained()):
    # Each row has five sums, from which the losses are computed.
    assert measurement.units.shape == (7, 5)


@pytest.fixture(scope="module")
def logged_losses(make_trained) -> dict[str, float]:
  """The losses of 13 rows that the training loop logs."""
  trained = with_eval_rows(make_trained(), rows=13)
  mesh = make_mesh(trained.config.mesh, jax.devices()[:1])
  program = build(trained.config, mesh)
  rows = validation_rows("validation", trained, count=13, batch_size=4)
  return measure_losses(
    program.eval_step,
    trained.params,
    rows,
    mesh=mesh,
    tokenizer=trained.tokenizer,
    ngram=trained.config.eval.ngram,
  )


@pytest.mark.parametrize("batch_size", [1, 5])
def test_values_equal_those_of_the_training_loop(
  make_trained, logged_losses, batch_size
):
  """The training loop logs the same losses, in batches of four rows.

  13 rows are not a multiple of 4 or 5, so the last batch is not full.
  """
  trained = with_eval_rows(make_trained(), rows=13)

  values = evaluate(trained, Validation(rows=13, batch_size=batch_size))

  expected = {
    "loss (nats/token)": logged_losses["loss"],
    "perplexity": logged_losses["perplexity"],
    "bits per byte": logged_losses["bits_per_byte"],
    "AR-Hit (nats/token)": logged_losses["ar_hit"],
    "Others (nats/token)": logged_losses["others"],
  }
  assert values == pytest.approx(expected, rel=1e-5)


def test_rows_can_be_of_another_text_and_length(make_trained, tmp_path):
  """Tokens are bytes. The model's own text and its row length are not used."""
  (tmp_path / "other.txt").write_text("x" * 1000)

  all_rows = -1
  batches = validation_rows(
    "validation",
    make_trained(),
    all_rows,
    length=128,
    source=f"text:{tmp_path}/*.txt",
  )

  tokens = np.concatenate([batch["tokens"] for batch in batches])
  # 1,000 bytes and a separator take 7.8 rows of 128 tokens.
  assert tokens.shape == (8, 128)
  separator = 255
  padding = 0
  assert set(tokens.ravel()) <= {ord("x"), separator, padding}


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"length": 513},
      "set.validation.length = 513: a diff model takes at most 512 tokens",
      id="long length",
    ),
    pytest.param(
      {"rows": -2},
      "set.validation.rows = -2: must be at least 1, or -1 for all",
      id="rows",
    ),
    pytest.param({"length": -1}, "set.validation.length = -1", id="length"),
    pytest.param(
      {"batch_size": 0}, "set.validation.batch_size = 0", id="batch_size"
    ),
    pytest.param({"ngram": 1}, "set.validation.ngram = 1", id="ngram"),
    pytest.param({"source": "text:/nowhere/*"}, "/nowhere/", id="source"),
  ],
)
def test_an_invalid_setting_raises(make_trained, settings, message):
  """The model takes at most 512 tokens."""
  with pytest.raises(UserError, match=message):
    list(Validation(**settings).evaluate(make_trained()))


def test_a_run_without_validation_rows_raises(make_trained):
  """By default, the suite measures as many rows as the training did."""
  trained = with_eval_rows(make_trained(), rows=0)

  with pytest.raises(UserError, match="the run's own config.eval.rows is 0"):
    list(Validation().evaluate(trained))
