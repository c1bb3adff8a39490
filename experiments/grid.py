"""Experiments, their grids, and the runs of a grid."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import importlib
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffjax.cli import config_file
from diffjax.config import FIELDS, Config, UserError, from_config_dict
from experiments import folders
from experiments import product as products
from experiments.product import Product

if TYPE_CHECKING:
  from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Grid:
  """Runs of one size.

  Attributes:
    variants: of the folder's config.py.
    baseline: the variant that the others are compared with; in NAME,*, the star stands for what a variant has behind its first comma.
    seeds: of initialisation and of the order of data. Each variant is trained with every seed.
    crossed: the factors of `Grid.product`, whose rows are the variants.
  """

  variants: tuple[str, ...]
  baseline: str
  seeds: tuple[int, ...] = (0,)
  crossed: Product | None = None

  @classmethod
  def product(
    cls,
    base: str,
    factors: Mapping[str, Iterable[Any]],
    *,
    seeds: Iterable[int] = (0,),
    baseline: str | None = None,
  ) -> Grid:
    """Returns the grid of all combinations of some config fields' values.

    It needs no config.py:

        Grid.product(
          "tiny",
          {"model.lambda_init": [0.2, 0.5], "model.head_norm": [True, False]},
          seeds=range(2),
        )

    has eight runs. The rows are called "lambda_init=0.2,head_norm=True", and so
    on. The dotted name is used if two factors end alike. The default plot has
    the first factor on its x-axis.

    The factor "variant" is what follows the colon of --config. For example,
    {"variant": ["diff", "transformer"]} compares models of equal size, which
    "model.attention" as a factor does not.

    Args:
      base: The config that the fields are set in, as --config takes it. The
        path of a file is relative to the experiment's folder.
      factors: The values of each field, by the field's dotted name, or of
        "variant". They keep their types. None is possible if it is the base's
        value.
      seeds: Each combination is trained with every seed.
      baseline: The name of a row, or "NAME=VALUE,*" for the row that differs in
        the first factor alone. The first row by default.

    Raises:
      UserError: for a factor without values or with a value twice, and for an
        unknown baseline.
    """
    crossed = products.make(base, factors)
    rows = tuple(crossed.rows())
    if baseline is None:
      baseline = rows[0]
    names_a_row = baseline in rows
    if baseline.endswith(",*"):
      start = baseline.removesuffix("*")
      names_a_row = any(row.startswith(start) for row in rows)
    if not names_a_row:
      raise UserError(
        f"Grid.product: there is no row {baseline!r} for the baseline; there"
        f" are {', '.join(rows)}"
      )
    return cls(rows, baseline, tuple(seeds), crossed)


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
    plot: draws results.json. `Grid.product` has a plot of its own if this is None.

  If a run of a row failed, `summarise` and `plot` get results without that row: its other runs are no fair sample.
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
    base: the value of --config that the fields override.
    factors: the values of `Grid.product`, by dotted name.
  """

  name: str
  variant: str
  seed: int
  config: Config
  fields: Mapping[str, Any]
  pretrained: Run | None = None
  base: str = ""
  factors: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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


def resolve(argument: str) -> str:
  """Returns an experiment's name: that of a folder in this one, or the absolute path of a folder outside.

  Args:
    argument: A name, or the path of a folder with an experiment.py.

  Raises:
    UserError: for an unknown name, and for a path without an experiment.py.
  """
  if argument in names():
    return argument
  folder = pathlib.Path(argument).expanduser().resolve()
  if folder.parent == FOLDER and folder.name in names():
    return folder.name
  if not folder.is_dir():
    raise UserError(
      f"there is no experiment {argument!r}; there are {', '.join(names())},"
      " and the path of a folder with an experiment.py works too"
    )
  if not (folder / "experiment.py").is_file():
    raise UserError(
      f"{folder} has no experiment.py; experiments/README.md says what to write"
      " into it"
    )
  return str(folder)


def label(name: str) -> str:
  """Returns the name of an experiment's folder, without its path."""
  return pathlib.Path(name).name


def load(name: str, grid: str = "cpu") -> Experiment:
  """Returns the experiment in a folder that has the grid of that name.

  Args:
    name: The experiment's name, or the path of a folder.
    grid: The name of one of its grids.

  Raises:
    UserError: for an unknown experiment or grid; lists the known ones.
  """
  name = resolve(name)
  by_grid = {}
  for experiment in experiments_of(name):
    for key in experiment.grids:
      by_grid[key] = experiment
  if grid not in by_grid:
    raise UserError(
      f"--grid={grid}: {name} has no such grid; there are {', '.join(by_grid)}"
    )
  return by_grid[grid]


def experiments_of(name: str) -> list[Experiment]:
  """Returns EXPERIMENT of a folder, and LARGE if it has one."""
  if folders.is_outside(name):
    module = folders.load(pathlib.Path(name))
  else:
    module = importlib.import_module(f"experiments.{name}.experiment")
  if hasattr(module, "LARGE"):
    return [module.EXPERIMENT, module.LARGE]
  return [module.EXPERIMENT]


def expand(name: str, grid: Grid, changes: Mapping[str, Any]) -> list[Run]:
  """Returns the runs of a grid, seed after seed, so that a grid that is stopped has complete comparisons.

  Args:
    name: The experiment's name.
    grid: One of its grids.
    changes: Fields to set, by dotted name: FIELD in every run, VARIANT:FIELD in
      the runs of one variant.

  Raises:
    UserError: for an unknown field or variant, for a seed or a factor, which
      the grid sets, and for a config that cannot work. For `Grid.product` the
      error names the run.
  """
  # Here, because listing experiments needs no JAX.
  from diffjax.model.attention import attention_class

  name = resolve(name)
  _check_changes(grid, changes)
  experiment = _experiment_with(name, grid)
  pretrained_runs = {}
  if experiment.pretrained:
    for run in expand(experiment.pretrained, grid, changes):
      pretrained_runs[run.name] = run
  rows = _rows(name, experiment, grid)
  runs = []
  for seed in grid.seeds:
    for variant in grid.variants:
      run_name = f"{variant}/seed_{seed}"
      row = rows[variant]
      changed = _changes_of(variant, changes)
      fields = {"train.seed": seed, "data.seed": seed, **row.fields, **changed}
      try:
        config = _with_fields(copy.deepcopy(row.base_values), fields)
        attention_class(config.model)  # checks the fields of the variant
        fields = products.command_line_fields(fields, row.base_values)
      except UserError as error:
        if grid.crossed is None:
          raise
        raise UserError(f"{run_name}: {error}") from error
      run = Run(
        name=run_name,
        variant=variant,
        seed=seed,
        config=config,
        fields=fields,
        pretrained=pretrained_runs.get(run_name),
        base=row.base,
        factors=row.factors,
      )
      runs.append(run)
  return runs


@dataclasses.dataclass(frozen=True)
class _Row:
  """What the runs of a variant have in common.

  Attributes:
    base: the value of --config.
    base_values: the sections of that config.
    factors: the factors of `Grid.product` with the values of this row.
    fields: the config fields among them.
  """

  base: str
  base_values: dict[str, Any]
  factors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _rows(name: str, experiment: Experiment, grid: Grid) -> dict[str, _Row]:
  """Returns the rows of a grid by variant."""
  if grid.crossed is not None:
    return _rows_of_product(name, experiment, grid.crossed)
  config_name = name
  if experiment.pretrained and not experiment.trains:
    config_name = resolve(experiment.pretrained)
  rows = {}
  for variant in grid.variants:
    if folders.is_outside(config_name):
      base = f"{config_name}/config.py:{variant}"
      config = config_file.read(base)
    else:
      module = importlib.import_module(f"experiments.{config_name}.config")
      base = f"{FOLDER.name}/{config_name}/config.py:{variant}"
      config = module.get_config(variant)
    rows[variant] = _Row(base, config.to_dict())
  return rows


def _rows_of_product(
  name: str, experiment: Experiment, crossed: Product
) -> dict[str, _Row]:
  if experiment.pretrained:
    raise UserError(
      f"{name}: Grid.product cannot start from the runs of"
      f" {experiment.pretrained}; set train.init_from in its base instead"
    )
  rows = {}
  for row_name, factors in crossed.rows().items():
    fields = dict(factors)
    base = crossed.base_path(FOLDER / name)
    if products.VARIANT in fields:
      base = f"{base}:{fields.pop(products.VARIANT)}"
    base_values = config_file.read(base).to_dict()
    rows[row_name] = _Row(base, base_values, factors, fields)
  return rows


def _experiment_with(name: str, grid: Grid) -> Experiment:
  """Returns the folder's experiment that has the grid, or else its first."""
  experiments = experiments_of(name)
  for experiment in experiments:
    if grid in experiment.grids.values():
      return experiment
  return experiments[0]


def _check_changes(grid: Grid, changes: Mapping[str, Any]) -> None:
  """Raises UserError for an unknown variant, a seed and a factor."""
  for change in changes:
    variant, _, field = change.rpartition(":")
    if variant and variant not in grid.variants:
      raise UserError(
        f"--set={change}: the grid has no variant {variant!r}; there are {', '.join(grid.variants)}"
      )
    if field in products.SEED_FIELDS:
      raise UserError(
        f"--set={field}: seeds are the grid's, {', '.join(map(str, grid.seeds))}; --only='*/seed_0' chooses one"
      )
    if grid.crossed is not None and field in grid.crossed.factors:
      raise UserError(
        f"--set={field}: that is a factor of the grid; --only chooses rows of it"
      )


def _changes_of(variant: str, changes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the changes that concern a variant, by dotted name."""
  fields = {}
  for change, value in changes.items():
    chosen_variant, _, field = change.rpartition(":")
    if chosen_variant in ("", variant):
      fields[field] = value
  return fields


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
  """Returns True if results depend on a config's field.

  Args:
    field: its dotted name. A field that does not exist any more counts too.
  """
  return field not in FIELDS or FIELDS[field].affects_results


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
