"""DIFF beside the Transformer at tiny size, over seeds: trains the pairs, measures them and prints one table (recipes/tiny_pair.sh).

    python -m recipes.tiny_pair                        # 10 runs of five minutes and 5 measurements of two, on two cores
    python -m recipes.tiny_pair --seeds=1 --try_out    # two steps and few samples, to see that all of it works here

All that it writes lies in --out: the runs, each pair's measurements in pair_SEED, pair_0/report.html, and tiny_pair.json with the table's
numbers for every seed. Stopped, the same command goes on where it was: a finished run is not trained again, and a pair is measured again
only if its parameters or the suites' settings are not those that were measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from diffjax.cli import command
from diffjax.config import UserError, from_config_dict
from diffjax.configs import tiny
from diffjax.host.progress import say
from diffjax.training import manifest
from experiments import comparison, results, training_log
from experiments import machine as machine_module
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

# The table's rows: a title, and which figure of which suite they show.
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
  "validation loss, bits per byte": ("validation", "bits per byte", {}),
  "AR-Hit, nats per byte": ("validation", "AR-Hit (nats/token)", {}),
  "Others, nats per byte": ("validation", "Others (nats/token)", {}),
  "loss over 2,048 bytes (trained on 256), nats per byte": (
    "position_nll",
    "cumulative NLL (nats/token)",
    {"position": 2048},
  ),
  **{
    f"attention on {words}, share of {weights} weights": (
      "attention",
      part,
      {"weights": weights, "depth": "mean"},
    )
    for weights in ("signed", "absolute")
    for part, words in (("answer", "the answer"), ("noise", "noise"))
  },
  **{
    f"{words} {of[:-1]}": ("outliers", of, {"value": value})
    for of in ("attention logits", "hidden states")
    for value, words in (("top-1", "largest"), ("median", "median"))
  },
}
# The suites that take less than a minute a pair, and their settings.
_QUICK = (
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
  """One run.

  Attributes:
    variant: of configs/tiny.py.
    seed: of initialisation and of the order of data.
    workdir: the run's directory.
    fields: what else it changes in the config, by dotted name.
  """

  variant: str
  seed: int
  workdir: pathlib.Path
  fields: Mapping[str, Any]
  cost = 1.0  # the unit of time

  def __str__(self) -> str:
    return f"training {self.variant}, seed {self.seed}"

  @functools.cached_property
  def changes(self) -> dict[str, Any]:
    return {"train.seed": self.seed, "data.seed": self.seed, **self.fields}

  @functools.cached_property
  def config(self) -> Any:
    values = tiny.get_config(self.variant)
    values.update_from_flattened_dict(self.changes)
    return from_config_dict(values)

  def done(self) -> bool:
    """True if it has finished. Raises UserError if the directory holds a run of another config."""
    return training_log.final_metrics(self.workdir, self.config, ()) is not None

  def do(self, launcher: Launcher) -> None:
    changes = [
      f"--config.{field}={value}" for field, value in self.changes.items()
    ]
    of = [
      f"--config=configs/tiny.py:{self.variant}",
      f"--workdir={self.workdir}",
      *changes,
    ]
    launcher.call([sys.executable, "-m", "diffjax.train", *of])

  def parameters(self) -> dict[str, Any]:
    """The size and the checksum of every file of its last checkpoint."""
    step = self.config.train.steps
    return manifest.read(
      manifest.checkpoint_directory(self.workdir) / str(step), step
    )["files"]


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The quick suites on the two models of a seed.

  Attributes:
    pair: the Transformer and DIFF.
    out: directory of the suites' results.
    settings: flags for the suites.
    report: whether to make the report, too.
  """

  pair: tuple[Training, Training]
  out: pathlib.Path
  settings: Sequence[str]
  report: bool
  cost = 0.4  # of a training's time, as measured on two cores

  def __str__(self) -> str:
    return f"measuring the pair of seed {self.pair[0].seed}"

  def _measured(self) -> dict[str, Any]:
    """What its results depend on, as JSON has it."""
    # The import takes seconds, so it comes after the check of the flags.
    from diffjax.evals.suite import suite_class

    defaults = {
      name: dataclasses.asdict(suite_class(name)()) for name in _QUICK
    }
    parameters = {run.variant: run.parameters() for run in self.pair}
    what = {
      "suites": defaults,
      "settings": self.settings,
      "parameters": parameters,
      "python": platform.python_version(),
    }
    return json.loads(json.dumps(what))

  def done(self) -> bool:
    """True if these parameters have been measured with these settings."""
    return (
      all(run.done() for run in self.pair)
      and results.read(self.out / "measured.json") == self._measured()
    )

  def do(self, launcher: Launcher) -> None:
    transformer, diff = self.pair
    suites = ",".join([*_QUICK, *["report"] * self.report])
    of = [
      f"--suite={suites}",
      f"--workdir={diff.workdir}",
      f"--against={transformer.workdir}",
      f"--out={self.out}",
      *self.settings,
    ]
    launcher.call([sys.executable, "-m", "diffjax.evaluate", *of])
    results.write(self.out / "measured.json", self._measured())

  def figure(
    self, suite: str, name: str, at: Mapping[str, Any]
  ) -> tuple[float, float]:
    """A figure of the Transformer and of DIFF."""
    rows = json.loads((self.out / f"{suite}.json").read_text(encoding="utf-8"))[
      "figures"
    ]
    found = next(row for row in rows if (row["name"], row["at"]) == (name, at))
    return found["against"]["value"], found["value"]


def do_all(jobs: Sequence[Training | Measurement]) -> None:
  """Does what is not done yet, in order, with a line for each job: which of how many it is, and when all will be done.

  Raises:
    UserError: if a job fails or was stopped; the same call goes on.
  """
  started, spent = time.monotonic(), 0.0
  with Launcher() as launcher:
    for number, job in enumerate(jobs, 1):
      if job.done():
        continue
      when = "the next line will say when all is done"
      if spent:
        left = (
          sum(other.cost for other in jobs[number - 1 :] if not other.done())
          * (time.monotonic() - started)
          / spent
        )
        end = datetime.datetime.now() + datetime.timedelta(seconds=left)
        when = f"all is done in about {in_words(left)}, {end:%a %H:%M}"
      say(f"{number} of {len(jobs)}: {job}; {when}")
      job.do(launcher)
      if not job.done():
        raise UserError(
          f"{job}: it ended before its last step; run the same command to go on"
        )
      spent += job.cost


def table(figures: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
  """A Markdown table of means over seeds with their 95% intervals (Student's), and of differences (Welch's); bold ones exclude 0.

  Args:
    figures: for each title the values of each seed, by variant.
  """
  seeds = len(next(iter(figures.values()))["diff"])
  over = f"mean of {seeds} seeds [95%]" if seeds > 1 else "one seed"
  lines = [
    f"| {over} | Transformer | DIFF | DIFF − Transformer |",
    "|---|---|---|---|",
  ]
  for title, values in figures.items():
    runs = [
      {"variant": variant, "results": {"value": value}}
      for variant, each in values.items()
      for value in each
    ]
    alone = (values["diff"][0] - values["transformer"][0], np.nan, np.nan)
    difference = (
      comparison.difference(
        {"baseline": "transformer", "runs": runs}, "diff", "value"
      )
      or alone
    )
    mark = "**" * (difference[1] * difference[2] > 0)
    cells = [
      *(
        _cell(comparison.mean_interval(values[variant]))
        for variant in ("transformer", "diff")
      ),
      f"{mark}{_cell(difference)}{mark}",
    ]
    lines.append(f"| {title} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _cell(found: Sequence[float]) -> str:
  decimals = 1 if abs(found[0]) >= 10 else 3
  value, *bounds = (
    f"{number:.{decimals}f}".replace("-", "−") for number in found
  )
  return (
    value if np.isnan(found[1:]).any() else f"{value} [{', '.join(bounds)}]"
  )


def main() -> None:
  """Does the recipe of the flags."""
  out = pathlib.Path(
    _OUT.value or f"runs/tiny_pair{'_tried_out' * _TRY_OUT.value}"
  ).absolute()
  fields, settings = (
    ({"train.steps": 2}, _FEW_SAMPLES) if _TRY_OUT.value else ({}, _SETTINGS)
  )
  jobs: list[Training | Measurement] = []
  for seed in range(_SEEDS.value):
    transformer, diff = (
      Training(variant, seed, out / f"{variant}_{seed}", fields)
      for variant in ("transformer", "diff")
    )
    jobs += [
      transformer,
      diff,
      Measurement(
        (transformer, diff), out / f"pair_{seed}", settings, report=seed == 0
      ),
    ]
  do_all(jobs)
  measured = [job for job in jobs if isinstance(job, Measurement)]
  figures = {}
  for title, row in ROWS.items():
    both = [pair.figure(*row) for pair in measured]
    figures[title] = {
      "transformer": [value for value, _ in both],
      "diff": [value for _, value in both],
    }
  versions = f"JAX {importlib.metadata.version('jax')}, Python {platform.python_version()}"
  machine = f"{os.cpu_count()} × {machine_module.processor()}, {versions}"
  found = {
    "date": str(datetime.date.today()),
    "machine": machine,
    "fields": fields,
    "settings": settings,
    "figures": figures,
  }
  results.write(out / "tiny_pair.json", found)
  print(
    f"\n{out / 'pair_0' / 'report.html'}\n{out / 'tiny_pair.json'}\n\n{table(figures)}"
  )


if __name__ == "__main__":
  command.run(main, with_config=False)
