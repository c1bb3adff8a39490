"""The interface that all suites share, and a suite from outside the package."""

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from etils import epath

from diffjax.config import UserError, at_least, field, one_of
from diffjax.evals import SUITES
from diffjax.evals.measurement import Measurement, mean_of
from diffjax.evals.report.intervals import interval
from diffjax.evals.report.results import TableSpec
from diffjax.evals.suite import Model, Suite, register, suite_class
from diffjax.training.validation import token_losses
from tests.harness import own_variants


@dataclasses.dataclass(frozen=True)
class Counting(Suite):
  """Measures the mean of 0, 1, …, count − 1, multiplied by a number.

  That number takes the place of a model.
  """

  name: ClassVar[str] = "counting"
  table: ClassVar[TableSpec] = TableSpec(unit="numbers", notes=("x: a mean",))

  count: int = field(3, "How many numbers.", bound=at_least(1))
  kinds: tuple[str, ...] = field(("a",), "Kinds.", bound=one_of("a", "b"))
  scale: float = field(1.0, "Factor.")

  def load(self, trained):
    return list(range(self.count))

  def measure(self, trained, numbers):
    for kind in self.kinds:
      yield mean_of("x", [trained * number for number in numbers], kind=kind)


def run_counting(directory: pathlib.Path, **settings: Any) -> dict[str, Any]:
  """Runs the suite on the number 1 and returns the content of its JSON file."""
  suite = Counting(**settings)
  model = Model(1.0, {"name": "one"})
  suite.run([model], [suite.load(model.trained)], epath.Path(directory))
  return json.loads((directory / "counting.json").read_text())


@pytest.fixture
def suites() -> Iterator[dict[str, str]]:
  """The table of suites. It is restored after the test."""
  original = dict(SUITES)
  yield SUITES
  SUITES.clear()
  SUITES.update(original)


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"count": 0}, "set.counting.count = 0: must be at least 1", id="minimum"
    ),
    pytest.param(
      {"kinds": ("a", "c")},
      "set.counting.kinds = 'c': must be one of a, b",
      id="choices",
    ),
    pytest.param(
      {"scale": math.nan}, "set.counting.scale = nan: must be finite", id="NaN"
    ),
  ],
)
def test_a_setting_outside_its_bound_raises(settings, message):
  with pytest.raises(UserError) as error:
    Counting(**settings)
  assert str(error.value) == message


def test_a_run_writes_both_models_and_their_difference(tmp_path):
  """The suite measures the mean of 0, 1 and 2, multiplied by a "model".

  Numbers take the place of trained models.
  """
  suite = Counting(count=3)
  models = [Model(1.0, {"name": "one"}), Model(2.0, {"name": "two"})]
  data = [suite.load(model.trained) for model in models]

  suite.run(models, data, epath.Path(tmp_path))

  suite_results = json.loads((tmp_path / "counting.json").read_text())
  (figure,) = suite_results["figures"]
  mean = (0 + 1 + 2) / 3
  assert figure["value"] == 1.0 * mean
  # The result of the second model.
  assert figure["against"]["value"] == 2.0 * mean
  assert figure["difference"]["value"] == (1.0 - 2.0) * mean


def test_a_run_writes_the_settings_with_their_defaults(tmp_path):
  suite_results = run_counting(tmp_path, count=2)

  defaults = {"kinds": ["a"], "scale": 1.0}
  assert suite_results["settings"] == {"count": 2, **defaults}


def test_a_run_prints_the_path_of_the_results(tmp_path, capsys):
  run_counting(tmp_path)

  assert str(tmp_path / "counting.json") in capsys.readouterr().out


def test_a_suite_without_a_plot_writes_json_and_a_table(tmp_path):
  run_counting(tmp_path)

  written = sorted(path.name for path in tmp_path.iterdir())
  assert written == ["counting.json", "counting.md"]


def test_a_registered_suite_is_found_by_its_name(suites):
  assert register(Counting) is Counting
  assert suite_class("counting") is Counting


def test_a_suite_can_be_registered_again(suites):
  """A notebook registers it each time that it runs the cell."""
  register(Counting)
  register(Counting)

  assert suite_class("counting") is Counting


def test_two_suites_cannot_have_one_name(suites):
  @dataclasses.dataclass(frozen=True)
  class Other(Counting):
    name = "needle"

  with pytest.raises(ValueError, match="there is a suite 'needle' already"):
    register(Other)


def count_confident(losses: np.ndarray, weights: np.ndarray) -> list[int]:
  """Returns how many tokens have a probability above 1/2, and their number."""
  # A loss is −log of the probability. Padding has the weight 0.
  probabilities = np.exp(-losses)[weights > 0]
  num_confident = np.sum(probabilities > 0.5)
  return [int(num_confident), probabilities.size]


def test_the_suite_in_the_documentation_counts_confident_tokens(
  make_trained, tmp_path
):
  """The suite is an example in evaluation.md.

  It measures the share of tokens with a probability above 1/2.
  """
  # This imports the example, which registers its suite.
  with own_variants.registered(tmp_path):
    confident_class = suite_class("confident")
  trained = make_trained(num_layers=1)
  # With large parameters, the model gives some tokens a high probability.
  params = jax.tree.map(lambda leaf: 10 * np.asarray(leaf), trained.params)
  trained = dataclasses.replace(trained, params=params)
  suite = confident_class(rows=30)

  (measurement,) = suite.evaluate(trained)

  compute_losses = jax.jit(functools.partial(token_losses, trained.model))
  expected = []
  for row in suite.load(trained):
    losses = np.asarray(compute_losses(params, row))
    expected.append(count_confident(losses, row["weights"]))
  assert measurement.units.tolist() == expected
  assert 0 < interval(measurement).value < 1


class NotADataclass(Counting):
  """A suite without a decorator."""

  name = "mine"
  rows: int = field(1, "Rows.")


@dataclasses.dataclass(frozen=True)
class PlainSetting(Counting):
  """A suite with a setting that has no description."""

  name = "mine"
  rows: int = 1


@dataclasses.dataclass(frozen=True)
class WithoutName(Suite):
  """A suite without a name."""


@dataclasses.dataclass(frozen=True)
class WithoutTable(Suite):
  """A suite without a table."""

  name = "mine"


@pytest.mark.parametrize(
  "suite, message",
  [
    pytest.param(
      NotADataclass,
      "NotADataclass is not a dataclass: decorate it with"
      " @dataclasses.dataclass(frozen=True), below @register",
      id="no dataclass",
    ),
    pytest.param(
      PlainSetting,
      "declare PlainSetting.rows with diffjax.config.field",
      id="plain setting",
    ),
    pytest.param(WithoutName, "WithoutName has no name", id="no name"),
    pytest.param(WithoutTable, "WithoutTable has no table", id="no table"),
  ],
)
def test_an_incomplete_suite_cannot_be_registered(suites, suite, message):
  """The error tells the author of a suite what to add."""
  with pytest.raises(TypeError, match=re.escape(message)):
    register(suite)


def test_units_can_be_a_list():
  # Each unit is a sum and a count. The value is (1 + 2 + 6) / (1 + 1 + 1).
  measurement = Measurement("x", units=[[1, 1], [2, 1], [6, 1]])

  assert interval(measurement).value == 3
