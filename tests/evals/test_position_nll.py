"""The suite "position_nll": the cumulative loss by position."""

import math

import jax
import numpy as np
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.position_nll import PositionNLL, spaced
from diffjax.evals.report.intervals import interval
from diffjax.evals.suite import Model
from diffjax.inference.trained import Trained
from diffjax.model.decoder import logits
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_LAYER


def test_a_uniform_model_loses_log_n_at_every_position(
  make_trained, make_uniform
):
  """Each of 256 tokens has the probability 1 / 256, so the loss is log(256)."""
  trained = make_uniform(make_trained(num_layers=1))
  suite = PositionNLL(rows=3, length=256, first=64, per_octave=2)

  measurements = list(suite.evaluate(trained))

  # Two per octave: each position is √2 times the one before it, rounded.
  # 64 √2 is 90.5, and 128 √2 is 181.02.
  positions = [measurement.at["position"] for measurement in measurements]
  assert positions == [64, 91, 128, 181, 256]
  for measurement in measurements:
    num_rows = len(measurement.units)
    assert num_rows == 3
    value = interval(measurement).value
    assert value == pytest.approx(math.log(256), rel=1e-6)


def losses_of_two_rows(trained: Trained, length: int) -> np.ndarray:
  """Returns the loss of each token of the suite's first rows, [2, length]."""

  @jax.jit
  def predict(tokens):
    hidden = trained.model.apply({"params": trained.params}, tokens)
    return jax.nn.log_softmax(logits(trained.params, hidden))

  rows = validation_rows(
    "position_nll", trained, count=2, length=length, packing="concat"
  )
  losses = []
  for batch in rows:
    (log_probabilities,) = np.asarray(predict(batch["tokens"]))
    (targets,) = batch["targets"]
    losses.append(-log_probabilities[np.arange(length), targets])
  return np.stack(losses)


@pytest.mark.parametrize("variant", ["diff", *full(["softmax", "diff_v2"])])
def test_a_measurement_is_the_mean_of_the_losses_so_far(make_trained, variant):
  """The measurement at position n is the mean of the first n losses."""
  trained = make_trained(variant)
  # One position per octave: positions double, up to the length of the rows.
  suite = PositionNLL(rows=2, length=200, first=10, per_octave=1)
  positions = [10, 20, 40, 80, 160, 200]

  measurements = list(suite.evaluate(trained))

  losses = losses_of_two_rows(trained, length=200)  # [rows, tokens]
  for position, measurement in zip(positions, measurements, strict=True):
    assert measurement.at["position"] == position
    expected = losses[:, :position].mean()
    assert interval(measurement).value == pytest.approx(
      expected, rel=FLOAT32_LAYER["rtol"]
    )


def test_a_row_that_is_not_full_is_left_out(make_trained, tmp_path):
  """1,000 bytes are three rows of 300 tokens and a fourth row of 100."""
  (tmp_path / "a.txt").write_text("x" * 1000)
  suite = PositionNLL(source=f"text:{tmp_path}/*.txt", length=300)

  rows = list(suite.load(make_trained()))

  assert len(rows) == 3
  for row in rows:
    # Padding has the weight 0.
    assert row["weights"].all()


def test_a_row_of_long_documents_begins_with_its_document(
  make_trained, tmp_path
):
  """Rows have 20 tokens, here bytes, and one document is shorter."""
  (tmp_path / "1.txt").write_text("first, and more than 20 bytes")
  (tmp_path / "2.txt").write_text("too short")
  (tmp_path / "3.txt").write_text("third, and more than 20 bytes")
  source = f"text:{tmp_path}/*.txt"
  suite = PositionNLL(rows_of="long", source=source, length=20)

  rows = list(suite.load(make_trained()))

  beginnings = set()
  for row in rows:
    # A separator precedes the text.
    _, *text = row["tokens"][0]
    beginnings.add(bytes(text))
  assert beginnings == {b"first, and more tha", b"third, and more tha"}


def test_a_row_of_long_documents_has_no_padding(make_trained):
  rows = list(PositionNLL(rows_of="long", length=300).load(make_trained()))

  assert rows
  for row in rows:
    # Padding has the weight 0 and the segment id 0.
    assert row["weights"].all()
    assert row["segment_ids"].min() == 1


def test_each_long_document_is_a_unit(make_trained, tmp_path):
  """The units are the samples of a confidence interval."""
  trained = make_trained("softmax", num_layers=1)
  num_documents = 3
  for index in range(num_documents):
    (tmp_path / f"{index}.txt").write_text("x" * 1000)
  source = f"text:{tmp_path}/*.txt"
  suite = PositionNLL(rows_of="long", source=source, length=300)

  measurement = next(suite.evaluate(trained))

  assert len(measurement.units) == num_documents


def test_rows_beyond_the_models_length_need_a_setting(make_trained):
  trained = make_trained(num_layers=1, max_length=64)

  message = "length = 100: a diff model takes 1 to 64 tokens.*beyond_limit"
  with pytest.raises(UserError, match=message):
    list(PositionNLL(length=100).evaluate(trained))


def test_rows_can_be_longer_than_the_model_was_trained_for(make_trained):
  trained = make_trained(num_layers=1, max_length=64)
  suite = PositionNLL(length=100, rows=2, beyond_limit=True)

  measurements = list(suite.evaluate(trained))

  # The last position is the length of the rows.
  last_measurement = measurements[-1]
  assert last_measurement.at["position"] == 100
  assert np.isfinite(interval(last_measurement).value)


def test_the_default_length_is_the_models(make_trained, make_uniform):
  """The last position is the length of the rows."""
  trained = make_uniform(make_trained(num_layers=1, max_length=64))

  measurements = list(PositionNLL(rows=1).evaluate(trained))

  assert measurements[-1].at["position"] == 64


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param({"rows": 0}, "rows = 0", id="rows"),
    pytest.param({"first": 0}, "first = 0", id="first"),
    pytest.param(
      {"rows_of": "books"},
      "'books': must be one of concatenated, long",
      id="rows_of",
    ),
    pytest.param({"length": -1}, "length = -1", id="length"),
    pytest.param(
      {"length": 100_000, "beyond_limit": True},
      "the text holds less than 100001 tokens",
      id="short text",
    ),
    pytest.param(
      {"length": 100_000, "beyond_limit": True, "rows_of": "long"},
      "the text holds no document of 100001 tokens",
      id="short documents",
    ),
  ],
)
def test_an_invalid_setting_raises(make_trained, settings, message):
  trained = make_trained(num_layers=1)

  with pytest.raises(UserError, match=message):
    list(PositionNLL(**settings).evaluate(trained))


@pytest.mark.parametrize(
  "first, last, per_octave, expected",
  [
    pytest.param(1, 8, 1, [1, 2, 4, 8], id="whole octaves"),
    pytest.param(4, 9, 1, [4, 8, 9], id="last between octaves"),
    pytest.param(64, 10, 2, [10], id="last before first"),
    pytest.param(5, 5, 3, [5], id="last is first"),
  ],
)
def test_positions_are_spaced_by_octaves(first, last, per_octave, expected):
  """An octave is a factor of 2. The last position is always included."""
  assert spaced(first, last, per_octave) == expected


def test_the_plot_of_two_models_is_drawn(make_trained, make_uniform, tmp_path):
  trained = make_uniform(make_trained(num_layers=1))
  models = [Model(trained, {"name": "a"}), Model(trained, {"name": "b"})]
  suite = PositionNLL(length=128, rows=1)
  data = [suite.load(model.trained) for model in models]

  suite.run(models, data, epath.Path(tmp_path))

  image = (tmp_path / "position_nll.png").read_bytes()
  assert image.startswith(b"\x89PNG")
