"""Measures a trained model, or compares two.

    python -m diffjax.evaluate --suite=validation,needle --workdir=runs/diff
    python -m diffjax.evaluate --suite=needle --workdir=runs/a --against=runs/b
    python -m diffjax.evaluate --suite=needle --workdir=runs/diff \\
      --set.needle.samples=10
    python -m diffjax.evaluate --suite=harness --tasks=arc_easy --workdir=runs/a

Each suite prints its main figures and writes all of them into OUT, by default
WORKDIR/evals: SUITE.json for programs, SUITE.md with a table, and SUITE.png if
the suite has a plot. `report` writes OUT/report.html with all results in OUT.
Each figure has a 95% interval over rows, prompts or questions: Wilson's for a
share of yes-or-no answers, a bootstrap for the others. With --against, both
models are measured on the same samples, from the data of --workdir, and the
difference is paired. The difference of two shares has Tango's interval.
"""

from __future__ import annotations

if __name__ == "__main__":
  # This comes before the slow imports, so that Ctrl-C also ends the command
  # during them.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import dataclasses
import importlib
import math
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

from diffjax.cli import command
from diffjax.config import UserError
from diffjax.evals import SUITES

# Other modules are imported when they are used, so that a mistyped flag is
# reported at once.
if TYPE_CHECKING:
  from etils import epath

  from diffjax.evals.report.figures import Figure
  from diffjax.inference.trained import Trained

# The page with training curves, attention maps and all measurements. It is
# written after the measurements.
REPORT = "report"
_MODULES = {**SUITES, REPORT: "diffjax.evals.report.page"}

_SUITE = flags.DEFINE_list(
  "suite", [], f"Suites, with commas between: {', '.join(_MODULES)}."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory; local or gs://."
)
_STEP = flags.DEFINE_integer(
  "step",
  None,
  "Step of the checkpoint; the newest complete one by default.",
  lower_bound=0,
)
_AGAINST = flags.DEFINE_string(
  "against", None, "Directory of another run to compare with."
)
_AGAINST_STEP = flags.DEFINE_integer(
  "against_step", None, "Step of the other run's checkpoint.", lower_bound=0
)
_TENSOR = flags.DEFINE_integer(
  "tensor",
  1,
  "Devices that share a model, each with some of its heads.",
  lower_bound=1,
)
_WEIGHT_DTYPE = flags.DEFINE_enum(
  "weight_dtype",
  None,
  ["int8"],
  "Rounds the layers' matrices to 8 bits; needs qwix.",
)
_TASKS = flags.DEFINE_list(
  "tasks",
  [],
  "Tasks of the harness, with commas between: short for --set.harness.tasks.",
)
_OUT = flags.DEFINE_string(
  "out", None, "Directory of the results; WORKDIR/evals by default."
)


@dataclasses.dataclass(frozen=True)
class _Model:
  """A model to measure.

  Attributes:
    trained: The model.
    description: Its name, workdir, attention and number of parameters, for the
      results.
  """

  trained: Trained
  description: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Suite:
  """A suite of measurements that is ready to run.

  Attributes:
    name: The name in --suite.
    module: The module in diffjax/evals.
    settings: The module's Settings.
    measurements: For each model, an iterator over its figures. The model is
      measured during the iteration.
  """

  name: str
  module: types.ModuleType
  settings: Any
  measurements: list[Iterator[Figure]]


def main(settings: Any) -> None:
  """Measures the model with the suites in --suite, and writes the results.

  Args:
    settings: A dataclass with the Settings of each suite, by the suite's name
      (see `_default_settings`). Without fields, each suite has its defaults.
  """
  _check_flags()
  names = _suite_names()
  # These imports take seconds, so they follow the checks.
  from etils import epath

  from diffjax.evals.report import results
  from diffjax.host import runtime

  runtime.keep_compiled_programs()
  out = epath.Path(_WORKDIR.value) / "evals"
  if _OUT.value:
    out = epath.Path(_OUT.value)
  models = _load_models()
  results.check_writable(out)

  # Errors in settings and data are raised before the first measurement, which
  # may take hours.
  suites = []
  for name in names:
    if name == REPORT:
      _check_report(models, settings)
    else:
      suites.append(_prepare_suite(name, models, settings))

  for suite in suites:
    _run_suite(suite, models, out)
  if REPORT in names:
    _write_report(models, settings, out)


def _check_flags() -> None:
  """Raises app.UsageError if the flags are wrong."""
  all_names = ", ".join(_MODULES)
  if not _SUITE.value:
    raise app.UsageError(f"pass --suite=NAME[,NAME]: there are {all_names}")
  for name in _SUITE.value:
    if name not in _MODULES:
      raise app.UsageError(
        f"--suite={name}: there is no such suite; there are {all_names}"
      )
  if _TASKS.value and "harness" not in _SUITE.value:
    raise app.UsageError("--tasks is for --suite=harness; pass that too")
  if not _WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: the directory of a run")
  if _AGAINST_STEP.value is not None and not _AGAINST.value:
    raise app.UsageError("--against_step is for --against=DIR; pass that too")


def _suite_names() -> list[str]:
  """Returns the names in --suite without duplicates, "report" last.

  The report also shows the results of the other suites.
  """
  names = list(dict.fromkeys(_SUITE.value))
  if REPORT in names:
    names.remove(REPORT)
    names.append(REPORT)
  return names


def _module(name: str) -> types.ModuleType:
  """Returns the module of a suite or of the report."""
  return importlib.import_module(_MODULES[name])


def _load_models() -> list[_Model]:
  """Loads the models of --workdir and, if it is passed, of --against.

  The second model gets the data settings and the tokenizer of the first, so
  that both are measured on the same samples.

  Raises UserError if a checkpoint cannot be loaded, or if the models have
  different tokenizers.
  """
  # Checked by `_check_flags`.
  assert _WORKDIR.value is not None
  first = _load(_WORKDIR.value, _STEP.value)
  models = [_with_description(first, _WORKDIR.value)]
  if not _AGAINST.value:
    return models

  second = _load(_AGAINST.value, _AGAINST_STEP.value)
  _check_same_tokenizer(first, second)
  config = dataclasses.replace(
    second.config, data=first.config.data, eval=first.config.eval
  )
  second = dataclasses.replace(second, config=config, tokenizer=first.tokenizer)
  models.append(_with_description(second, _AGAINST.value))
  return models


def _check_same_tokenizer(first: Trained, second: Trained) -> None:
  """Raises UserError if the model of --against has another tokenizer."""
  from diffjax.training import workdir_tokenizer

  if workdir_tokenizer.is_same_tokenizer(first.tokenizer, second.tokenizer):
    return
  raise UserError(
    f"--against={_AGAINST.value} has another vocabulary:"
    f" {second.tokenizer.spec!r} of {second.tokenizer.vocab_size} tokens, not"
    f" {first.tokenizer.spec!r} of {first.tokenizer.vocab_size}; only models"
    " of the same tokens can be compared"
  )


def _load(workdir: str, step: int | None) -> Trained:
  """Loads a model as --tensor and --weight_dtype say.

  Args:
    workdir: The run's directory.
    step: The checkpoint's step. None for the newest complete one.
  """
  from diffjax.host.progress import say
  from diffjax.inference import trained

  say(f"loading {workdir}")
  return trained.load(
    workdir, step, tensor=_TENSOR.value, weight_dtype=_WEIGHT_DTYPE.value
  )


def _with_description(trained: Trained, workdir: str) -> _Model:
  """Returns a model with its description for the results."""
  from diffjax.model.shapes import parameter_shapes

  config = trained.config.model
  shapes = parameter_shapes(config).values()
  description = {
    "name": trained.name,
    "workdir": workdir,
    "attention": config.attention,
    "parameters": sum(math.prod(shape) for shape in shapes),
  }
  return _Model(trained, description)


def _settings_of(name: str, settings: Any) -> Any:
  """Returns the Settings of one suite. --tasks replaces the harness's tasks.

  Args:
    name: The suite.
    settings: The argument of `main`.
  """
  suite_settings = getattr(settings, name, None)
  if suite_settings is None:
    suite_settings = _module(name).Settings()
  if name == "harness" and _TASKS.value:
    tasks = tuple(_TASKS.value)
    suite_settings = dataclasses.replace(suite_settings, tasks=tasks)
  return suite_settings


def _prepare_suite(name: str, models: list[_Model], settings: Any) -> _Suite:
  """Checks a suite's settings and data. Measures nothing yet.

  Args:
    name: The suite.
    models: The models to measure.
    settings: The argument of `main`.

  Raises:
    UserError: if settings or data are wrong.
  """
  module = _module(name)
  suite_settings = _settings_of(name, settings)
  measurements = []
  for model in models:
    # `evaluate` checks its arguments and returns an iterator.
    measurements.append(module.evaluate(model.trained, suite_settings))
  return _Suite(name, module, suite_settings, measurements)


def _check_report(models: list[_Model], settings: Any) -> None:
  """Raises UserError if the report cannot be made of these models."""
  trained_models = [model.trained for model in models]
  _module(REPORT).check(trained_models, _settings_of(REPORT, settings))


def _write_report(models: list[_Model], settings: Any, out: epath.Path) -> None:
  """Writes a page with all results in a directory, and prints its path."""
  described_models = [(model.trained, model.description) for model in models]
  report_settings = _settings_of(REPORT, settings)
  page = _module(REPORT).write(
    described_models, report_settings, out, list(SUITES)
  )
  print(page, flush=True)


def _run_suite(suite: _Suite, models: list[_Model], out: epath.Path) -> None:
  """Measures all models with a suite, and writes and prints the results."""
  from diffjax.evals.report import figures, results

  figures_of_models = []
  descriptions = []
  for model, measurement in zip(models, suite.measurements, strict=True):
    start = time.monotonic()
    # The iteration measures the model.
    figures_of_models.append(list(measurement))
    seconds = round(time.monotonic() - start, 1)
    descriptions.append({**model.description, "seconds": seconds})

  figure_rows = list(figures.compare(*figures_of_models))
  suite_results = results.finite(
    {
      "suite": suite.name,
      "settings": dataclasses.asdict(suite.settings),
      "models": descriptions,
      "figures": figure_rows,
    }
  )
  _write_results(suite, suite_results, out)


def _write_results(
  suite: _Suite, suite_results: dict[str, Any], out: epath.Path
) -> None:
  """Writes a suite's JSON, table and plot, and prints a summary and the paths.

  Args:
    suite: The suite.
    suite_results: The content of the JSON file.
    out: The directory of the results.
  """
  from diffjax.evals.report import results

  num_figures = len(suite_results["figures"])
  json_path = out / f"{suite.name}.json"
  table_path = out / f"{suite.name}.md"
  plot_path = out / f"{suite.name}.png"
  results.write(json_path, suite_results)
  results.write_table(table_path, suite_results, suite.module.TABLE)
  _print_summary(suite, suite_results)
  print(json_path)
  print(f"{table_path} (the whole table, {num_figures} figures)")
  if hasattr(suite.module, "plot"):
    suite.module.plot(suite_results, plot_path)
    print(plot_path)
  print(flush=True)


def _print_summary(suite: _Suite, suite_results: dict[str, Any]) -> None:
  """Prints a table of a suite's main figures."""
  import rich.console

  from diffjax.evals.report import results

  console = rich.console.Console(highlight=False)
  if not console.is_terminal:
    # Output in files and pipes does not depend on the terminal's width.
    console = rich.console.Console(highlight=False, width=80)
  # rich would end the process if the output is a closed pipe. `print` raises an
  # error.
  with console.capture() as capture:
    results.print_summary(console, suite_results, suite.module.TABLE)
  print(capture.get(), end="")


def _default_settings(arguments: Sequence[str]) -> Any:
  """Returns the default settings, which flags of the command line override.

  They are a dataclass with one field for each suite, which holds the suite's
  `Settings`. For example, --set.needle.samples overrides `needle.samples`. If
  no argument is such a flag, the dataclass has no fields, because the suites
  would have to be imported for them, which takes seconds.

  Args:
    arguments: The command line without the name of the program.
  """
  fields: list[Any] = []
  if _has_settings_flag(arguments):
    for name in _MODULES:
      settings_class = _module(name).Settings
      fields.append((name, settings_class, settings_class()))
  settings_type = dataclasses.make_dataclass("Settings", fields)
  return settings_type()


def _has_settings_flag(arguments: Sequence[str]) -> bool:
  """Returns True if an argument is a flag such as --set.needle.samples=10."""
  names = [argument.lstrip("-") for argument in arguments]
  return any(name.startswith("set.") for name in names)


if __name__ == "__main__":
  command.run(main, with_config=False, settings=_default_settings(sys.argv[1:]))
