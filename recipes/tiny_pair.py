"""Compares DIFF with the Transformer at tiny size, over several seeds.

Trains the pairs, measures them and prints one table (recipes/tiny_pair.sh).

    # 10 runs of five minutes and 5 measurements of two, on two cores.
    python -m recipes.tiny_pair
    # Two steps and few samples, to see that all of it works on this machine.
    python -m recipes.tiny_pair --seeds=1 --try_out

All files are in --out: the runs, the measurements of each pair in pair_SEED,
pair_0/report.html, and tiny_pair.json with the numbers of every seed. The same
command continues after a stop. A finished run is not trained again. A pair is
measured again only if its parameters or the settings of the suites changed.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from diffjax.cli import command
from diffjax.config import UserError, from_config_dict
from diffjax.configs import tiny
from diffjax.evals.report.proportions import Estimate
from diffjax.host.progress import say
from diffjax.training import manifest
from experiments import comparison, machine, results, training_log
from experiments.launch import Launcher
from experiments.pace import in_words

_SEEDS = flags.DEFINE_integer(
  "seeds", 5, "Pairs: those of the seeds 0, 1, …", lower_bound=1
)
_OUT = flags.DEFINE_string(
  "out",
  None,
  "Local directory of all that is written; runs/tiny_pair by default.",
)
_TRY_OUT = flags.DEFINE_bool(
  "try_out", False, "Two steps and few samples. The table means nothing then."
)

VARIANTS = ("transformer", "diff")


class Row(NamedTuple):
  """A row of the table: a figure in the results of a suite.

  Attributes:
    suite: the suite.
    name: the name of the figure.
    at: the coordinates of the figure.
  """

  suite: str
  name: str
  at: dict[str, Any]


def _rows() -> dict[str, Row]:
  """Returns the rows of the table by their titles."""
  rows = {
    "validation loss, bits per byte": Row("validation", "bits per byte", {}),
    "AR-Hit, nats per byte": Row("validation", "AR-Hit (nats/token)", {}),
    "Others, nats per byte": Row("validation", "Others (nats/token)", {}),
    "loss over 2,048 bytes (trained on 256), nats per byte": Row(
      "position_nll", "cumulative NLL (nats/token)", {"position": 2048}
    ),
  }
  for weights in ("signed", "absolute"):
    at = {"weights": weights, "depth": "mean"}
    title = "attention on {}, share of " + weights + " weights"
    rows[title.format("the answer")] = Row("attention", "answer", at)
    rows[title.format("noise")] = Row("attention", "noise", at)
  for values, value in (
    ("attention logits", "attention logit"),
    ("hidden states", "hidden state"),
  ):
    rows[f"largest {value}"] = Row("outliers", values, {"value": "top-1"})
    rows[f"median {value}"] = Row("outliers", values, {"value": "median"})
  return rows


ROWS = _rows()
# The suites that take less than a minute for a pair, and their settings.
_QUICK_SUITES = (
  "validation",
  "position_nll",
  "attention",
  "outliers",
  "difference_map",
)
_SETTINGS = (
  "--set.validation.rows=2048",
  "--set.attention.length=1024",
  "--set.attention.samples=20",
)
# The fields of the config and the settings of the suites with --try_out.
_FEW_STEPS = {"train.steps": 2, "eval.rows": 16, "train.sample_tokens": 8}
_FEW_SAMPLES = (
  "--set.validation.rows=4",
  "--set.position_nll.rows=1",
  "--set.attention.length=1024",
  "--set.attention.samples=1",
  "--set.outliers.tokens=1024",
  "--set.difference_map.rows=4",
)


@dataclasses.dataclass(frozen=True)
class Training:
  """A training run.

  Attributes:
    variant: a variant of configs/tiny.py.
    seed: the seed of the initialization and of the order of the data.
    workdir: the directory of the run.
    fields: other changes of the config, by dotted name.
    cost: the time that it takes, in units of one training.
  """

  variant: str
  seed: int
  workdir: pathlib.Path
  fields: Mapping[str, Any]
  cost: float = 1.0

  def __str__(self) -> str:
    return f"training {self.variant}, seed {self.seed}"

  @functools.cached_property
  def changes(self) -> dict[str, Any]:
    """All changes of the config, by dotted name."""
    return {"train.seed": self.seed, "data.seed": self.seed, **self.fields}

  @functools.cached_property
  def config(self) -> Any:
    """The config of the run."""
    values = tiny.get_config(self.variant)
    values.update_from_flattened_dict(self.changes)
    return from_config_dict(values)

  def is_done(self) -> bool:
    """Returns whether the run has finished.

    Raises:
      UserError: if the directory has a run with another config.
    """
    metrics = training_log.final_metrics(self.workdir, self.config, ())
    return metrics is not None

  def run(self, launcher: Launcher) -> None:
    """Trains, or continues a stopped run."""
    command_line = [
      sys.executable,
      "-m",
      "diffjax.train",
      f"--config=configs/tiny.py:{self.variant}",
      f"--workdir={self.workdir}",
    ]
    for field, value in self.changes.items():
      command_line.append(f"--config.{field}={value}")
    launcher.call(command_line)

  def parameter_files(self) -> dict[str, Any]:
    """Returns sizes and checksums of the files of the last checkpoint."""
    step = self.config.train.steps
    checkpoints = manifest.checkpoint_directory(self.workdir)
    return manifest.read(checkpoints / str(step), step)["files"]


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The quick suites on the two models of a seed.

  Attributes:
    pair: the Transformer and DIFF.
    out: the directory of the results.
    settings: flags of the suites.
    report: whether to write the report, too.
    cost: the time that it takes, in units of one training, as measured on two
      cores.
  """

  pair: tuple[Training, Training]
  out: pathlib.Path
  settings: Sequence[str]
  report: bool
  cost: float = 0.4

  def __str__(self) -> str:
    return f"measuring the pair of seed {self.pair[0].seed}"

  def is_done(self) -> bool:
    """Returns whether these parameters were measured with these settings."""
    for training in self.pair:
      if not training.is_done():
        return False
    return results.read(self.out / "measured.json") == self._inputs()

  def run(self, launcher: Launcher) -> None:
    """Measures the pair."""
    transformer, diff = self.pair
    suites = list(_QUICK_SUITES)
    if self.report:
      suites.append("report")
    command_line = [
      sys.executable,
      "-m",
      "diffjax.evaluate",
      f"--suite={','.join(suites)}",
      f"--workdir={diff.workdir}",
      f"--against={transformer.workdir}",
      f"--out={self.out}",
      *self.settings,
    ]
    launcher.call(command_line)
    results.write(self.out / "measured.json", self._inputs())

  def figure(self, row: Row) -> tuple[float, float]:
    """Returns a figure of the Transformer and of DIFF."""
    text = (self.out / f"{row.suite}.json").read_text(encoding="utf-8")
    for figure in json.loads(text)["figures"]:
      if figure["name"] == row.name and figure["at"] == row.at:
        return figure["against"]["value"], figure["value"]
    raise UserError(
      f"{self.out}: has no figure {row.name} {row.at}; delete it and run again"
    )

  def _inputs(self) -> dict[str, Any]:
    """Returns what the results depend on, as it is read from JSON."""
    # The import takes seconds, so it comes after the check of the flags.
    from diffjax.evals.suite import suite_class

    default_settings = {}
    for name in _QUICK_SUITES:
      default_settings[name] = dataclasses.asdict(suite_class(name)())
    parameters = {}
    for training in self.pair:
      parameters[training.variant] = training.parameter_files()
    inputs = {
      "suites": default_settings,
      "settings": self.settings,
      "parameters": parameters,
      "python": platform.python_version(),
    }
    return json.loads(json.dumps(inputs))


Job = Training | Measurement


def run_all(jobs: Sequence[Job]) -> None:
  """Does what is not done yet, in order.

  Prints a line for each job: its number, and when all jobs will be done.

  Raises:
    UserError: if a job fails or was stopped. The same call continues.
  """
  start = time.monotonic()
  finished_cost = 0.0
  with Launcher() as launcher:
    for number, job in enumerate(jobs, 1):
      if job.is_done():
        continue
      end = "the next line will say when all is done"
      if finished_cost > 0:
        seconds_per_cost = (time.monotonic() - start) / finished_cost
        end = _expected_end(_remaining_cost(jobs) * seconds_per_cost)
      say(f"{number} of {len(jobs)}: {job}; {end}")
      job.run(launcher)
      if not job.is_done():
        raise UserError(
          f"{job}: it ended before its last step; run the same command to go on"
        )
      finished_cost += job.cost


def _remaining_cost(jobs: Sequence[Job]) -> float:
  return sum(job.cost for job in jobs if not job.is_done())


def _expected_end(seconds: float) -> str:
  """Returns when all is done, in words."""
  end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
  return f"all is done in about {in_words(seconds)}, {end:%a %H:%M}"


def table(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
  """Returns a Markdown table of means over seeds and of differences.

  Means have Student's 95% interval and differences Welch's. A difference is
  bold if its interval excludes 0.

  Args:
    figures: for each title, the values of the seeds by variant.
  """
  first_figure = next(iter(figures.values()))
  num_seeds = len(first_figure["diff"])
  header = "one seed"
  if num_seeds > 1:
    header = f"mean of {num_seeds} seeds [95%]"
  lines = [
    f"| {header} | Transformer | DIFF | DIFF − Transformer |",
    "|---|---|---|---|",
  ]
  for title, values in figures.items():
    transformer = _cell(comparison.mean_interval(values["transformer"]))
    diff = _cell(comparison.mean_interval(values["diff"]))
    difference = _difference(values)
    difference_cell = _cell(difference)
    # The bounds have the same sign, so the interval excludes 0.
    if difference.low * difference.high > 0:
      difference_cell = f"**{difference_cell}**"
    lines.append(f"| {title} | {transformer} | {diff} | {difference_cell} |")
  return "\n".join(lines)


def _difference(values: Mapping[str, Sequence[float]]) -> Estimate:
  """Returns DIFF minus the Transformer. One seed gives no interval."""
  runs = []
  for variant, seed_values in values.items():
    for value in seed_values:
      runs.append({"variant": variant, "results": {"value": value}})
  pair_results = {"baseline": "transformer", "runs": runs}
  difference = comparison.difference(pair_results, "diff", "value")
  if difference is not None:
    return difference
  single = values["diff"][0] - values["transformer"][0]
  return Estimate(single, math.nan, math.nan)


def _cell(estimate: Estimate) -> str:
  """Returns a number with its interval, if there is one."""
  decimals = 3
  if abs(estimate.value) >= 10:
    decimals = 1
  value, low, high = [
    f"{number:.{decimals}f}".replace("-", "−") for number in estimate
  ]
  if math.isnan(estimate.low):
    return value
  return f"{value} [{low}, {high}]"


def main() -> None:
  """Runs the recipe with the settings of the flags."""
  default_out = "runs/tiny_pair"
  fields: dict[str, Any] = {}
  settings: Sequence[str] = _SETTINGS
  if _TRY_OUT.value:
    default_out = "runs/tiny_pair_tried_out"
    fields = _FEW_STEPS
    settings = _FEW_SAMPLES
  out = pathlib.Path(_OUT.value or default_out).absolute()

  jobs: list[Job] = []
  measurements = []
  for seed in range(_SEEDS.value):
    trainings = [
      Training(variant, seed, out / f"{variant}_{seed}", fields)
      for variant in VARIANTS
    ]
    measurement = Measurement(
      (trainings[0], trainings[1]),
      out / f"pair_{seed}",
      settings,
      report=seed == 0,
    )
    jobs += [*trainings, measurement]
    measurements.append(measurement)
  run_all(jobs)

  figures = _figures(measurements)
  record = {
    "date": str(datetime.date.today()),
    "machine": _machine(),
    "fields": fields,
    "settings": settings,
    "figures": figures,
  }
  results.write(out / "tiny_pair.json", record)
  print(f"\n{out / 'pair_0/report.html'}\n{out / 'tiny_pair.json'}")
  print(f"\n{table(figures)}")


def _figures(
  measurements: Sequence[Measurement],
) -> dict[str, dict[str, list[float]]]:
  """Returns for each title the values of the seeds, by variant."""
  figures = {}
  for title, row in ROWS.items():
    values: dict[str, list[float]] = {"transformer": [], "diff": []}
    for measurement in measurements:
      transformer, diff = measurement.figure(row)
      values["transformer"].append(transformer)
      values["diff"].append(diff)
    figures[title] = values
  return figures


def _machine() -> str:
  """Returns the processor and the versions of JAX and Python."""
  jax_version = importlib.metadata.version("jax")
  return (
    f"{os.cpu_count()} × {machine.processor()}, JAX {jax_version}, Python"
    f" {platform.python_version()}"
  )


if __name__ == "__main__":
  command.run(main, with_config=False)
