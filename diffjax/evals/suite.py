"""The interface of a suite, which is one kind of measurement of models."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import matplotlib.figure
from etils import epath

from diffjax.config import check_bounds, is_declared
from diffjax.evals import SUITES
from diffjax.evals.measurement import Measurement
from diffjax.evals.report import intervals, plots, results
from diffjax.inference.trained import Trained

Data = TypeVar("Data")
SuiteType = TypeVar("SuiteType", bound="Suite")


@dataclasses.dataclass(frozen=True)
class Model:
  """A model to measure.

  Attributes:
    trained: The model.
    description: Its name, workdir, attention and number of parameters, for the
      results.
  """

  trained: Trained
  description: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Suite(abc.ABC, Generic[Data]):
  """A kind of measurement of trained models, such as needle retrieval.

  A suite is a subclass with four parts, in this order:

  1. Its settings. They are the fields of the class, declared with
     `config.field`, which gives each a default, a documentation and a bound.
     On the command line they are flags, such as --set.needle.samples=10.
  2. `load` checks the settings against a model and reads the data.
  3. `measure` yields the measurements of a model on the data.
  4. `plot` draws the results. A suite without a plot leaves it out.

  The command `evaluate` constructs the suites and loads the data for all models
  before it measures the first one. So mistakes are reported at once, although
  measurements can take hours.

  Example: `measurements = list(Needle(samples=10).evaluate(trained))`

  Attributes:
    name: The name in --suite, in `SUITES` and of the files.
    table: How the results are shown in tables.
    main_figures: The figures on the first screen of the report.
  """

  name: ClassVar[str]
  table: ClassVar[results.TableSpec]
  main_figures: ClassVar[tuple[results.MainFigure, ...]] = ()

  def __post_init__(self) -> None:
    """Checks that each setting is within its bound.

    Raises:
      UserError: for the first setting that is wrong.
    """
    check_bounds(self, f"set.{self.name}")

  @abc.abstractmethod
  def load(self, trained: Trained) -> Data:
    """Returns the data to measure a model on. Measures nothing yet.

    It is called once for each model. If two models are compared, the second one
    has the data config and the tokenizer of the first.

    Raises:
      UserError: if the model does not allow these settings, or the data cannot
        be read.
    """

  @abc.abstractmethod
  def measure(self, trained: Trained, data: Data) -> Iterator[Measurement]:
    """Yields the measurements of a model.

    If two models are compared, measurements with the same name and coordinates
    form a pair. Their units must be the same samples in the same order.

    Args:
      trained: The model.
      data: The result of `load` for this model.
    """

  def plot(
    self, suite_results: Mapping[str, Any]
  ) -> matplotlib.figure.Figure | None:
    """Returns a plot of the results, or None if the suite has no plot.

    Args:
      suite_results: The content of the suite's JSON file.
    """
    return None

  def evaluate(self, trained: Trained) -> Iterator[Measurement]:
    """Loads the data at once, and measures the model during the iteration."""
    data = self.load(trained)
    return self.measure(trained, data)

  def run(
    self, models: Sequence[Model], data: Sequence[Data], out: epath.Path
  ) -> None:
    """Measures all models, writes the results and prints a summary.

    Args:
      models: One model, or two to compare.
      data: The result of `load` for each model.
      out: The directory of the results.
    """
    measurements_of_models = []
    descriptions = []
    for model, model_data in zip(models, data, strict=True):
      start = time.monotonic()
      measurements = list(self.measure(model.trained, model_data))
      seconds = round(time.monotonic() - start, 1)
      measurements_of_models.append(measurements)
      descriptions.append({**model.description, "seconds": seconds})

    suite_results = self._to_results(descriptions, measurements_of_models)
    self._write_and_print(suite_results, out)

  def _to_results(
    self,
    descriptions: Sequence[Mapping[str, Any]],
    measurements_of_models: Sequence[Iterable[Measurement]],
  ) -> dict[str, Any]:
    """Returns the content of the JSON file."""
    return results.finite(
      {
        "suite": self.name,
        "settings": dataclasses.asdict(self),
        "models": descriptions,
        "figures": list(intervals.compare(*measurements_of_models)),
      }
    )

  def _write_and_print(
    self, suite_results: Mapping[str, Any], out: epath.Path
  ) -> None:
    """Writes JSON, table and plot, and prints a summary and the paths."""
    json_path = out / f"{self.name}.json"
    table_path = out / f"{self.name}.md"
    plot_path = out / f"{self.name}.png"
    num_figures = len(suite_results["figures"])

    results.write(json_path, suite_results)
    results.write_table(table_path, suite_results, self.table)
    results.print_summary(suite_results, self.table)
    print(json_path)
    print(f"{table_path} (the whole table, {num_figures} figures)")
    plot = self.plot(suite_results)
    if plot is not None:
      plots.save(plot, plot_path)
      print(plot_path)
    print(flush=True)


def register(suite: type[SuiteType]) -> type[SuiteType]:
  """Adds a suite to `SUITES`, so that --suite finds it by its name.

  This is a class decorator for suites outside of diffjax, whose modules the
  command imports with --import. A class may be registered again, for example if
  its module is reloaded.

  Raises:
    TypeError: if a part of the class is missing.
    ValueError: if another suite has the name.
  """
  _check_parts(suite)
  location = f"{suite.__module__}.{suite.__qualname__}"
  is_taken = SUITES.get(suite.name, location) != location
  if is_taken:
    raise ValueError(
      f"there is a suite {suite.name!r} already: {SUITES[suite.name]}; choose"
      " another name"
    )
  SUITES[suite.name] = location
  return suite


def _check_parts(suite: type[Suite]) -> None:
  """Raises TypeError if the class of a suite lacks a part."""
  class_name = suite.__name__
  # A base class that is a dataclass does not make this class one.
  if "__dataclass_fields__" not in vars(suite):
    raise TypeError(
      f"{class_name} is not a dataclass: decorate it with"
      " @dataclasses.dataclass(frozen=True), below @register"
    )
  for attribute in ("name", "table"):
    if not hasattr(suite, attribute):
      raise TypeError(
        f"{class_name} has no {attribute}: see diffjax.evals.suite.Suite"
      )
  for declared in dataclasses.fields(suite):
    if not is_declared(declared):
      raise TypeError(
        f"declare {class_name}.{declared.name} with diffjax.config.field"
      )


def suite_class(name: str) -> type[Suite]:
  """Returns the class of a suite in `SUITES`, after importing its module."""
  module_name, _, class_name = SUITES[name].rpartition(".")
  return getattr(importlib.import_module(module_name), class_name)
