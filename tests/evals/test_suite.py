"""The interface that all suites share, and a suite from outside the package."""

import dataclasses
import json
import math
import re
from typing import ClassVar

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
  """Yields the numbers that it is given."""

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


@pytest.fixture
def suites():
  """Forgets the suites that a test registers."""
  original = dict(SUITES)
  yield SUITES
  SUITES.clear()
  SUITES.update(original)


@pytest.mark.parametrize(
  "settings, message",
  [
    ({"count": 0}, "set.counting.count = 0: must be at least 1"),
    ({"kinds": ("a", "c")}, "set.counting.kinds = 'c': must be one of a, b"),
    ({"scale": math.nan}, "set.counting.scale = nan: must be finite"),
  ],
)
def test_a_setting_outside_its_bound_is_refused(settings, message):
  with pytest.raises(UserError) as error:
    Counting(**settings)
  assert str(error.value) == message


def test_a_run_writes_both_models_and_their_difference(tmp_path, capsys):
  suite = Counting()
  models = [Model(1.0, {"name": "one"}), Model(2.0, {"name": "two"})]
  data = [suite.load(model.trained) for model in models]
  suite.run(models, data, epath.Path(tmp_path))
  results = json.loads((tmp_path / "counting.json").read_text())
  assert results["settings"] == {"count": 3, "kinds": ["a"], "scale": 1.0}
  (row,) = results["figures"]
  values = row["value"], row["against"]["value"], row["difference"]["value"]
  assert values == (1.0, 2.0, -1.0)
  # This suite has no plot.
  written = sorted(path.name for path in tmp_path.iterdir())
  assert written == ["counting.json", "counting.md"]
  assert str(tmp_path / "counting.json") in capsys.readouterr().out


def test_a_registered_suite_is_found_by_its_name(suites):
  assert register(Counting) is Counting
  assert suite_class("counting") is Counting
  # As when a notebook runs a cell again.
  register(Counting)


def test_two_suites_cannot_have_one_name(suites):
  @dataclasses.dataclass(frozen=True)
  class Other(Counting):
    name = "needle"

  with pytest.raises(ValueError, match="there is a suite 'needle' already"):
    register(Other)


def test_the_suite_of_the_documentation(make_trained, tmp_path):
  with own_variants.registered(tmp_path):
    Confident = suite_class("confident")
  # Random parameters are never sure of a token. Large ones are, and are right
  # about once in 256 tokens.
  trained = make_trained()
  params = jax.tree.map(lambda leaf: 10 * leaf, trained.params)
  trained = dataclasses.replace(trained, params=params)
  suite = Confident(rows=30)
  (measurement,) = suite.evaluate(trained)
  num_confident = 0
  num_tokens = 0
  for batch in suite.load(trained):
    losses = np.asarray(token_losses(trained.model, trained.params, batch))
    probabilities = np.exp(-losses)[batch["weights"] > 0]
    num_confident += np.sum(probabilities > 0.5)
    num_tokens += probabilities.size
  assert measurement.units.shape == (30, 2)
  assert measurement.units.sum(axis=0).tolist() == [num_confident, num_tokens]
  assert 0 < num_confident < num_tokens


def make_class(**attributes):
  """Returns a class as a user writes it, without some of its parts."""
  annotations = {"rows": int}
  attributes = {"__annotations__": annotations, **attributes}
  return type("Mine", (Counting,), attributes)


@pytest.mark.parametrize(
  "suite, message",
  [
    (
      make_class(name="mine", rows=field(1, "Rows.")),
      "Mine is not a dataclass: decorate it with"
      " @dataclasses.dataclass(frozen=True), below @register",
    ),
    (
      dataclasses.dataclass(frozen=True)(make_class(name="mine", rows=1)),
      "declare Mine.rows with diffjax.config.field",
    ),
    (
      dataclasses.dataclass(frozen=True)(type("Mine", (Suite,), {})),
      "Mine has no name",
    ),
    (
      dataclasses.dataclass(frozen=True)(
        type("Mine", (Suite,), {"name": "mine"})
      ),
      "Mine has no table",
    ),
  ],
)
def test_a_suite_without_a_part_is_refused_when_it_is_registered(
  suites, suite, message
):
  with pytest.raises(TypeError, match=re.escape(message)):
    register(suite)


def test_units_can_be_a_list():
  measurement = Measurement("x", [[1, 1], [2, 1], [6, 1]])
  assert interval(measurement).value == 3
