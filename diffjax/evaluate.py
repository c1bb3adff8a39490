"""Measures a trained model, or two beside each other.

    python -m diffjax.evaluate --suite=validation --workdir=runs/diff
    python -m diffjax.evaluate --suite=validation,needle --workdir=runs/a --against=runs/b
    python -m diffjax.evaluate --suite=needle --workdir=runs/diff --set.needle.samples=10
    python -m diffjax.evaluate --suite=harness --tasks=arc_easy,hellaswag --workdir=runs/diff

Each suite prints its main figures and writes all of them into OUT, WORKDIR/evals
by default: SUITE.json for programs, SUITE.md with a table, and SUITE.png if the
suite has a plot.
`report` makes OUT/report.html of all results in OUT. Every figure has a 95% interval over rows, prompts or questions: Wilson's for a share
of yes-or-no answers, else a bootstrap. With --against both models are measured on the same samples, those of --workdir's data, and the
difference is paired; that of two shares has Tango's interval.
"""

from __future__ import annotations

if __name__ == "__main__":
  # Before the other imports, which take a while: Ctrl-C ends them too.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import dataclasses
import importlib
import math
import sys
import time
import types
from typing import Any

from absl import app, flags

from diffjax.cli import command
from diffjax.config import UserError
from diffjax.evals import SUITES

# The page of training, attention maps and measurements. It is made after the measurements.
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


def suite(name: str) -> types.ModuleType:
  """The module of a suite or of the report."""
  return importlib.import_module(_MODULES[name])


def main(settings: Any) -> None:
  """Runs the suites of the flags.

  Args:
    settings: A dataclass with the Settings of each suite, or an empty one for the defaults.
  """
  names = _check_flags()
  import rich.console  # these imports take time, so they come after the check of the flags
  from etils import epath

  from diffjax.evals.report import figures, results
  from diffjax.host import runtime

  runtime.keep_compiled_programs()
  out = (
    epath.Path(_OUT.value)
    if _OUT.value
    else epath.Path(_WORKDIR.value) / "evals"
  )
  models = _load()
  results.check_writable(out)
  console = rich.console.Console(highlight=False)
  if not console.is_terminal:
    console = rich.console.Console(highlight=False, width=80)
  chosen = {
    name: getattr(settings, name, None) or suite(name).Settings()
    for name in names
  }
  if _TASKS.value:
    chosen["harness"] = dataclasses.replace(
      chosen["harness"], tasks=tuple(_TASKS.value)
    )
  # All settings are checked before the first measurement begins.
  measurements = {
    name: [
      suite(name).evaluate(model.trained, chosen[name]) for model in models
    ]
    for name in names
    if name != REPORT
  }
  if REPORT in names:
    suite(REPORT).check([model.trained for model in models], chosen[REPORT])
  for name in names:
    module = suite(name)
    if name == REPORT:
      print(
        module.write(
          [(model.trained, model.described) for model in models],
          chosen[name],
          out,
          list(SUITES),
        ),
        flush=True,
      )
      continue
    measured, described = [], []
    for model, measurement in zip(models, measurements.pop(name), strict=True):
      start = time.monotonic()
      measured.append(list(measurement))
      described.append(
        {**model.described, "seconds": round(time.monotonic() - start, 1)}
      )
    rows = list(figures.compare(*measured))
    found = results.finite(
      {
        "suite": name,
        "settings": dataclasses.asdict(chosen[name]),
        "models": described,
        "figures": rows,
      }
    )
    results.write(out / f"{name}.json", found)
    results.write_table(out / f"{name}.md", found, module.TABLE)
    # Without the capture rich ends the process if the reader of a pipe is gone.
    with console.capture() as captured:
      results.print_summary(console, found, module.TABLE)
    print(captured.get(), end="")
    print(out / f"{name}.json")
    print(f"{out / name}.md (the whole table, {len(rows)} figures)")
    if hasattr(module, "plot"):
      module.plot(found, out / f"{name}.png")
      print(out / f"{name}.png")
    print(flush=True)


@dataclasses.dataclass(frozen=True)
class _Model:
  trained: Any
  described: dict[str, Any]


def _check_flags() -> list[str]:
  names = sorted(dict.fromkeys(_SUITE.value), key=lambda name: name == REPORT)
  if not names:
    raise app.UsageError(
      f"pass --suite=NAME[,NAME]: there are {', '.join(_MODULES)}"
    )
  for name in names:
    if name not in _MODULES:
      raise app.UsageError(
        f"--suite={name}: there is no such suite; there are {', '.join(_MODULES)}"
      )
  if _TASKS.value and "harness" not in names:
    raise app.UsageError("--tasks is for --suite=harness; pass that too")
  if not _WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: the directory of a run")
  if _AGAINST_STEP.value is not None and not _AGAINST.value:
    raise app.UsageError("--against_step is for --against=DIR; pass that too")
  return names


def _load() -> list[_Model]:
  """The model, and the one to compare with, which is measured on the same data.

  Raises:
    UserError: if a checkpoint cannot be loaded, or the two have different tokenizers.
  """
  from diffjax.host.progress import say
  from diffjax.inference import trained
  from diffjax.model.shapes import parameter_shapes
  from diffjax.training import workdir_tokenizer

  def load(workdir: str, step: int | None) -> trained.Trained:
    say(f"loading {workdir}")
    return trained.load(
      workdir, step, tensor=_TENSOR.value, weight_dtype=_WEIGHT_DTYPE.value
    )

  assert _WORKDIR.value is not None
  models = [load(_WORKDIR.value, _STEP.value)]
  if _AGAINST.value:
    first, second = models[0], load(_AGAINST.value, _AGAINST_STEP.value)
    if not workdir_tokenizer.is_same_tokenizer(
      first.tokenizer, second.tokenizer
    ):
      raise UserError(
        f"--against={_AGAINST.value} has another vocabulary: {second.tokenizer.spec!r} of {second.tokenizer.vocab_size} tokens, "
        f"not {first.tokenizer.spec!r} of {first.tokenizer.vocab_size}; only models of the same tokens can be compared"
      )
    config = dataclasses.replace(
      second.config, data=first.config.data, eval=first.config.eval
    )
    models.append(
      dataclasses.replace(second, config=config, tokenizer=first.tokenizer)
    )
  return [
    _Model(
      model,
      {
        "name": model.name,
        "workdir": workdir,
        "attention": model.config.model.attention,
        "parameters": sum(
          math.prod(shape)
          for shape in parameter_shapes(model.config.model).values()
        ),
      },
    )
    for model, workdir in zip(
      models, (_WORKDIR.value, _AGAINST.value), strict=False
    )
  ]


def _settings() -> Any:
  """A dataclass with the Settings of every suite if the command line sets any; else an empty one, so that no suite is imported."""
  if not any(
    argument.lstrip("-").startswith("set.") for argument in sys.argv[1:]
  ):
    return dataclasses.make_dataclass("Settings", [])()
  fields: list[Any] = [
    (name, suite(name).Settings, suite(name).Settings()) for name in _MODULES
  ]
  return dataclasses.make_dataclass("Settings", fields)()


if __name__ == "__main__":
  command.run(main, with_config=False, settings=_settings())
