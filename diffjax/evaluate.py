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
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

from diffjax.cli import command
from diffjax.config import UserError
from diffjax.evals import SUITES

# Other modules are imported when they are used, so that a mistyped flag is
# reported at once.
if TYPE_CHECKING:
  from diffjax.evals.suite import Model, Suite
  from diffjax.inference.trained import Trained

_SUITE = flags.DEFINE_list(
  "suite",
  [],
  f"Suites, with commas between: {', '.join(SUITES)}, and those of --import."
  " The report runs last.",
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


def main(settings: Mapping[str, Suite]) -> None:
  """Measures the models with the suites in --suite, and writes the results.

  Args:
    settings: The suites with the settings of the command line, by name. Other
      suites have their default settings.
  """
  _check_flags()
  # These imports take seconds, so they follow the check.
  from etils import epath

  from diffjax.evals.report import results
  from diffjax.host import runtime

  runtime.keep_compiled_programs()
  out = epath.Path(_WORKDIR.value) / "evals"
  if _OUT.value:
    out = epath.Path(_OUT.value)
  suites = _selected_suites(settings)
  models = _load_models()
  results.check_writable(out)

  # Measurements may take hours, so all data is loaded before the first one:
  # mistakes in the settings are reported at once.
  data_of_suites = []
  for suite in suites:
    data_of_suites.append([suite.load(model.trained) for model in models])
  for suite, data in zip(suites, data_of_suites, strict=True):
    suite.run(models, data, out)


def _check_flags() -> None:
  """Raises app.UsageError if the flags are wrong."""
  all_names = ", ".join(SUITES)
  if not _SUITE.value:
    raise app.UsageError(f"pass --suite=NAME[,NAME]: there are {all_names}")
  for name in _SUITE.value:
    if name not in SUITES:
      raise app.UsageError(
        f"--suite={name}: there is no such suite; there are {all_names}"
      )
  if _TASKS.value and "harness" not in _SUITE.value:
    raise app.UsageError("--tasks is for --suite=harness; pass that too")
  if not _WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: the directory of a run")
  if _AGAINST_STEP.value is not None and not _AGAINST.value:
    raise app.UsageError("--against_step is for --against=DIR; pass that too")


def _selected_suites(settings: Mapping[str, Suite]) -> list[Suite]:
  """Returns the suites in --suite, in their order and without duplicates.

  The report is moved to the end, because it shows the results of the others.

  Args:
    settings: The suites with the settings of the command line, by name.
  """
  from diffjax.evals.suite import suite_class

  names = list(dict.fromkeys(_SUITE.value))
  if "report" in names:
    names.remove("report")
    names.append("report")
  suites = []
  for name in names:
    suite: Any = settings.get(name)
    if suite is None:
      suite = suite_class(name)()
    if name == "harness" and _TASKS.value:
      suite = dataclasses.replace(suite, tasks=tuple(_TASKS.value))
    suites.append(suite)
  return suites


def _load_models() -> list[Model]:
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
  """Loads a model, with the flags --tensor and --weight_dtype.

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


def _with_description(trained: Trained, workdir: str) -> Model:
  """Returns a model with its description for the results."""
  from diffjax.evals.suite import Model
  from diffjax.model.shapes import parameter_shapes

  config = trained.config.model
  shapes = parameter_shapes(config).values()
  description = {
    "name": trained.name,
    "workdir": workdir,
    "attention": config.attention,
    "parameters": sum(math.prod(shape) for shape in shapes),
  }
  return Model(trained, description)


def _default_settings() -> dict[str, Suite]:
  """Returns all suites with their default settings, which flags override.

  For example, --set.needle.samples=10 overrides the field `samples` of the
  suite "needle".

  Returns:
    The suites by name. Empty if the command line has no such flag, because
    importing the suites takes seconds.
  """
  arguments = sys.argv[1:]
  if not _has_settings(arguments):
    return {}
  # The modules of --import may add suites.
  command.import_modules(arguments)
  from diffjax.evals.suite import suite_class

  return {name: suite_class(name)() for name in SUITES}


def _has_settings(arguments: Sequence[str]) -> bool:
  """Returns True if the command line has a flag --set.SUITE.FIELD."""
  for argument in arguments:
    if argument.lstrip("-").startswith("set."):
      return True
  return False


if __name__ == "__main__":
  command.run(main, with_config=False, default_settings=_default_settings)
