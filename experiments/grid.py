"""Experiments, their grids, and the runs of a grid."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffjax.config import Config, UserError, from_config_dict

if TYPE_CHECKING:
  from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).resolve().parent

# Fields that do not affect a run's results. Runs in one table may differ in them.
_CIRCUMSTANCES = (
  "mesh.",
  "data.prepared_dir",
  "data.num_workers",
  "data.timeout",
  "train.log_interval",
  "train.checkpoint_interval",
  "train.keep_checkpoints",
  "train.profile_step",
  "train.profile_steps",
  "train.wandb_project",
  "train.sample_prompt",
  "train.sample_tokens",
  "train.max_skipped_in_a_row",  # how patient a run is; what a finished one learnt is the same
)


@dataclasses.dataclass(frozen=True)
class Grid:
  """Runs of one size.

  Attributes:
    variants: of the folder's config.py.
    baseline: the variant that the others are compared with; in NAME,*, the star stands for what a variant has behind its first comma.
    seeds: of initialisation and of the order of data. Each variant is trained with every seed.
  """

  variants: tuple[str, ...]
  baseline: str
  seeds: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """An experiment. A folder's experiment.py defines EXPERIMENT, and LARGE too where its larger grids measure something else.

  Attributes:
    question: what it asks, in one line.
    grids: by name. The results of "cpu" lie in the folder itself.
    metrics: the table's columns: from their titles to the names of numbers in a run's results. Without `measure`, the results are the last
      numbers of these names in metrics.jsonl.
    trains: False if runs are only measured.
    pretrained: another experiment. Its runs of the same grid, variants and seeds are trained first, in their own workdirs. Runs of this
      experiment start from their parameters; if this experiment does not train, it measures those runs.
    prepare: writes the data that a run reads into a directory, unless it exists, and returns the fields of a config that point to it.
    measure: returns a finished run's results by name (JSON-able), from its workdir (the pretrained run's if this experiment does not train)
      and its config.
    plan: for an experiment that does not train: returns table rows on the memory that a config's programs take on TPUs of a topology, which
      need not be attached.
    task: the constants of `prepare` and `measure` (JSON-able). Results of different tasks do not share a folder.
    summarise: returns the rows of a second table, computed from results.json and stored there as `summary`. A cell is a text, a number, a
      number with the bounds of its interval, or None.
    plot: draws results.json.
  """

  question: str
  grids: Mapping[str, Grid]
  metrics: Mapping[str, str]
  trains: bool = True
  pretrained: str | None = None
  prepare: Callable[[pathlib.Path, Config], Mapping[str, str]] | None = None
  measure: Callable[[str, Config], dict[str, Any]] | None = None
  plan: Callable[[Config, str], list[dict[str, str]]] | None = None
  task: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  summarise: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None
  plot: Callable[[Mapping[str, Any]], Figure] | None = None


@dataclasses.dataclass(frozen=True)
class Run:
  """One training run.

  Attributes:
    name: VARIANT/seed_SEED, also the path of its workdir.
    variant: of the folder's config.py.
    seed: of initialisation and data.
    config: the whole config.
    fields: the overrides that the command line needs beside the variant, by dotted name.
    pretrained: the run that it starts from.
  """

  name: str
  variant: str
  seed: int
  config: Config
  fields: Mapping[str, Any]
  pretrained: Run | None = None

  def settings(self) -> dict[str, Any]:
    """The config's sections, and the fields of the pretrained run as one more section."""
    start = (
      {"pretrained": comparable(self.pretrained.config.to_dict(), ())}
      if self.pretrained
      else {}
    )
    return {**self.config.to_dict(), **start}


def names() -> list[str]:
  """The names of all experiments."""
  return sorted(path.parent.name for path in FOLDER.glob("*/experiment.py"))


def load(name: str, grid: str = "cpu") -> Experiment:
  """The experiment in a folder that has the grid of that name.

  Raises:
    UserError: for an unknown experiment or grid; lists the known ones.
  """
  if name not in names():
    raise UserError(
      f"there is no experiment {name!r}; there are {', '.join(names())}"
    )
  by_grid = {
    key: experiment
    for experiment in experiments_of(name)
    for key in experiment.grids
  }
  if grid not in by_grid:
    raise UserError(
      f"--grid={grid}: {name} has no such grid; there are {', '.join(by_grid)}"
    )
  return by_grid[grid]


def experiments_of(name: str) -> list[Experiment]:
  """EXPERIMENT of a folder, and LARGE if it has one."""
  module = importlib.import_module(f"experiments.{name}.experiment")
  return [
    module.EXPERIMENT,
    *([module.LARGE] if hasattr(module, "LARGE") else []),
  ]


def expand(name: str, grid: Grid, changes: Mapping[str, Any]) -> list[Run]:
  """The runs of a grid, seed after seed, so that a grid that is stopped has complete comparisons.

  Args:
    name: the experiment's.
    grid: one of its grids.
    changes: fields to set, by dotted name: FIELD in every run, VARIANT:FIELD in the runs of one variant.

  Raises:
    UserError: for an unknown field or variant, for a seed, which the grid sets, and for a config that cannot work.
  """
  for change in changes:
    variant, _, field = change.rpartition(":")
    if variant and variant not in grid.variants:
      raise UserError(
        f"--set={change}: the grid has no variant {variant!r}; there are {', '.join(grid.variants)}"
      )
    if field in ("train.seed", "data.seed"):
      raise UserError(
        f"--set={field}: seeds are the grid's, {', '.join(map(str, grid.seeds))}; --only='*/seed_0' chooses one"
      )
  experiment = next(
    (each for each in experiments_of(name) if grid in each.grids.values()),
    experiments_of(name)[0],
  )
  start = (
    {run.name: run for run in expand(experiment.pretrained, grid, changes)}
    if experiment.pretrained
    else {}
  )
  config_of = (
    name
    if experiment.trains or not experiment.pretrained
    else experiment.pretrained
  )
  get_config = importlib.import_module(
    f"experiments.{config_of}.config"
  ).get_config
  runs = []
  for seed in grid.seeds:
    for variant in grid.variants:
      own = {
        change.rpartition(":")[2]: value
        for change, value in changes.items()
        if change.rpartition(":")[0] in ("", variant)
      }
      fields = {"train.seed": seed, "data.seed": seed, **own}
      config = _with_fields(get_config(variant).to_dict(), fields)
      runs.append(
        Run(
          f"{variant}/seed_{seed}",
          variant,
          seed,
          config,
          fields,
          start.get(f"{variant}/seed_{seed}"),
        )
      )
  return runs


def with_fields(run: Run, fields: Mapping[str, Any]) -> Run:
  """The run with further fields set."""
  return dataclasses.replace(
    run,
    config=_with_fields(run.config.to_dict(), fields),
    fields={**run.fields, **fields},
  )


def _with_fields(values: dict[str, Any], fields: Mapping[str, Any]) -> Config:
  for field, value in fields.items():
    section, _, name = field.partition(".")
    if not isinstance(values.get(section), dict):
      raise UserError(
        f"config.{field} is not a config field: fields are SECTION.NAME, with the sections {', '.join(values)}"
      )
    values[section][name] = value
  return from_config_dict(values)


def read_value(text: str) -> Any:
  """The value of a field from a command line: a number, a truth value, or else the text."""
  if text in ("True", "False"):
    return text == "True"
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text


def choose(runs: Sequence[Run], only: Iterable[str], slice_: str) -> list[Run]:
  """The runs that match one of the patterns `only` ("diff*", "diff/seed_0"; all runs if empty), and of these the slice INDEX/COUNT.

  Raises:
    UserError: for a pattern that matches nothing, or a malformed slice.
  """
  only = list(only)
  for pattern in only:
    if not any(_matches(run, pattern) for run in runs):
      variants = dict.fromkeys(run.variant for run in runs)
      raise UserError(
        f"--only={pattern} matches no run; runs are VARIANT/seed_SEED, with the variants {', '.join(variants)}"
      )
  chosen = [
    run
    for run in runs
    if not only or any(_matches(run, pattern) for pattern in only)
  ]
  index, separator, count = slice_.partition("/")
  if not (
    separator
    and index.isdigit()
    and count.isdigit()
    and int(index) < int(count)
  ):
    raise UserError(
      f"--slice={slice_}: must be INDEX/COUNT, from 0/COUNT to COUNT−1/COUNT, such as 0/4"
    )
  return chosen[int(index) :: int(count)]


def _matches(run: Run, pattern: str) -> bool:
  return fnmatch.fnmatchcase(run.name, pattern) or fnmatch.fnmatchcase(
    run.variant, pattern
  )


def decides(field: str) -> bool:
  """True if results depend on a config's field, given by its dotted name."""
  return (
    field not in _CIRCUMSTANCES
    and f"{field.partition('.')[0]}." not in _CIRCUMSTANCES
  )


def comparable(
  config: Mapping[str, Mapping[str, Any]], places: Iterable[str]
) -> dict[str, Any]:
  """The fields of a config that affect results, by dotted name.

  Args:
    config: as `Config.to_dict` returns it.
    places: further fields to leave out: those that only say where data lies.
  """
  fields = {
    f"{section}.{name}": value
    for section, values in config.items()
    for name, value in values.items()
  }
  left_out = set(places)
  return {
    field: value
    for field, value in fields.items()
    if decides(field) and field not in left_out
  }
