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
    variants: Variants of the folder's config.py.
    baseline: The variant with which the others are compared. In "NAME,*", the
      star stands for the part of a variant after its first comma.
    seeds: The seeds of initialization and of the order of the data. Each
      variant is trained with every seed.
    crossed: The factors of `Grid.product`, whose rows are the variants.
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
    """Returns the grid of all combinations of values of config fields.

    Each combination is a row of the results, and no config.py is needed. For
    example, this grid has four rows, and eight runs:

        Grid.product(
          "tiny",
          {"model.lambda_init": [0.2, 0.5], "model.head_norm": [True, False]},
          seeds=range(2),
        )

    The first row is called "lambda_init=0.2,head_norm=True". If the last parts
    of two dotted names are equal, the whole names are used. The default plot
    has the first factor on its x-axis.

    The factor "variant" is no field. Its values follow the colon of --config.
    {"variant": ["diff", "transformer"]} compares models of equal size. With the
    factor "model.attention", the sizes would differ.

    Args:
      base: The config in which the fields are set, in the form of --config. The
        path of a file is relative to the experiment's folder.
      factors: The values of each field, by the field's dotted name, or of
        "variant". A value may be None only if the field is None in `base`.
      seeds: The seeds. Each combination is trained with every seed.
      baseline: The name of the row with which the others are compared. With
        "NAME=VALUE,*", where NAME is the first factor, each row is compared
        with the row that differs from it only in this factor. The first row by
        default.

    Raises:
      UserError: for a factor without values or with a value twice, and for an
        unknown baseline.
    """
    product = products.make(base, factors)
    rows = tuple(product.rows())
    if baseline is None:
      baseline = rows[0]
    is_known = baseline in rows
    if baseline.endswith(",*"):
      start = baseline.removesuffix("*")
      is_known = any(row.startswith(start) for row in rows)
    if not is_known:
      raise UserError(
        f"Grid.product: there is no row {baseline!r} for the baseline; there"
        f" are {', '.join(rows)}"
      )
    return cls(
      variants=rows, baseline=baseline, seeds=tuple(seeds), crossed=product
    )


@dataclasses.dataclass(frozen=True)
class Experiment:
  """An experiment.

  A folder's experiment.py defines EXPERIMENT. It also defines LARGE if its
  larger grids measure something else.

  Attributes:
    question: The question in one line.
    grids: The grids by name. The results of "cpu" lie in the folder itself.
    metrics: The columns of the table: their titles, and the names of numbers in
      the results of a run. Without `measure`, the results are the last numbers
      with these names in metrics.jsonl.
    trains: False if runs are only measured.
    pretrained: The name of another experiment. Its runs of the same grid,
      variants and seeds are trained first, in their own workdirs. Runs of this
      experiment start from their parameters. If this experiment does not train,
      it measures those runs.
    prepare: Writes the data that a run reads into a directory, unless it
      exists. Returns the fields of a config that point to the data.
    measure: Returns the results of a finished run by name, from a workdir and
      the run's config. The workdir is the pretrained run's if this experiment
      does not train. The results can be written as JSON.
    plan: For an experiment that does not train. Returns table rows on the
      memory that the programs of a config take on TPUs of a topology. These
      need not be attached.
    task: The constants of `prepare` and `measure`, which can be written as
      JSON. Results of different tasks do not share a folder.
    summarise: Returns the rows of a second table, computed from results.json
      and stored there as `summary`. A cell is a text, a number, a number with
      the bounds of its interval, or None.
    plot: Draws results.json. If it is None, only `Grid.product` has a plot.

  If a run of a row failed, `summarise` and `plot` get results without that row,
  because its other runs are not a fair sample.
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
    name: VARIANT/seed_SEED, which is also the path of its workdir.
    variant: A variant of the folder's config.py.
    seed: The seed of initialization and of the data.
    config: The whole config.
    fields: The overrides that the command line needs in addition to the
      variant, by dotted name.
    pretrained: The run from which it starts.
    base: The value of --config that the fields override.
    factors: The values of `Grid.product`, by dotted name.
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
    """Returns the sections of the config.

    The fields of the pretrained run are one more section, "pretrained".
    """
    sections = self.config.to_dict()
    if self.pretrained:
      pretrained_config = self.pretrained.config.to_dict()
      sections["pretrained"] = comparable(pretrained_config, ())
    return sections


def names() -> list[str]:
  """Returns the names of all experiments."""
  paths = FOLDER.glob("*/experiment.py")
  return sorted(path.parent.name for path in paths)


def resolve(argument: str) -> str:
  """Returns the name of an experiment that a command line names.

  The name is the one of a folder in experiments/, or the absolute path of a
  folder elsewhere.

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
  """Returns the runs of a grid.

  All variants of a seed come before the next seed, so that a grid that is
  stopped has complete comparisons.

  Args:
    name: The experiment's name.
    grid: One of its grids.
    changes: Fields to set, by dotted name: FIELD in every run, VARIANT:FIELD in
      the runs of one variant. Seeds and factors cannot be set, because the
      grid sets them.

  Raises:
    UserError: if a change is not allowed or not known, and for a config that
      cannot work. For `Grid.product` the error names the run.
  """
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
      try:
        run = _make_run(
          run_name, variant, seed, rows[variant], _changes_of(variant, changes)
        )
      except UserError as error:
        if grid.crossed is None:
          raise
        raise UserError(f"{run_name}: {error}") from error
      pretrained = pretrained_runs.get(run_name)
      runs.append(dataclasses.replace(run, pretrained=pretrained))
  return runs


def _make_run(
  name: str, variant: str, seed: int, row: _Row, changes: Mapping[str, Any]
) -> Run:
  """Returns a run without its pretrained run, and checks its config.

  Args:
    name: The run's name.
    variant: Its variant.
    seed: Its seed.
    row: The settings of its variant.
    changes: The values of changed fields, by dotted name.

  Raises:
    UserError: for an unknown field, and for a config that cannot work.
  """
  # Here, because listing experiments needs no JAX.
  from diffjax.model.attention import attention_class

  fields = {"train.seed": seed, "data.seed": seed, **row.fields, **changes}
  config = _with_fields(copy.deepcopy(row.base_values), fields)
  # Checks the fields of the attention variant.
  attention_class(config.model)
  return Run(
    name=name,
    variant=variant,
    seed=seed,
    config=config,
    fields=products.command_line_fields(fields, row.base_values),
    base=row.base,
    factors=row.factors,
  )


@dataclasses.dataclass(frozen=True)
class _Row:
  """The settings that the runs of a variant share.

  Attributes:
    base: The value of --config.
    base_values: The sections of that config.
    factors: The factors of `Grid.product` with the values of this row.
    fields: The config fields among them.
  """

  base: str
  base_values: dict[str, Any]
  factors: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _rows(name: str, experiment: Experiment, grid: Grid) -> dict[str, _Row]:
  """Returns the settings that the runs of each variant share, by variant."""
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
  name: str, experiment: Experiment, product: Product
) -> dict[str, _Row]:
  """Returns the rows of a grid from `Grid.product`, by name."""
  if experiment.pretrained:
    raise UserError(
      f"{name}: Grid.product cannot start from the runs of"
      f" {experiment.pretrained}; set train.init_from in its base instead"
    )
  rows = {}
  for row_name, factors in product.rows().items():
    fields = dict(factors)
    base = product.base_path(FOLDER / name)
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
  """Raises UserError if the grid does not allow a change.

  A change must not name an unknown variant, and must not set a seed or a
  factor, which the grid itself sets.
  """
  for change in changes:
    variant, _, field = change.rpartition(":")
    if variant and variant not in grid.variants:
      raise UserError(
        f"--set={change}: the grid has no variant {variant!r}; there are"
        f" {', '.join(grid.variants)}"
      )
    if field in products.SEED_FIELDS:
      seeds = ", ".join(str(seed) for seed in grid.seeds)
      raise UserError(
        f"--set={field}: seeds are the grid's, {seeds}; --only='*/seed_0'"
        " chooses one"
      )
    if grid.crossed is not None and field in grid.crossed.factors:
      raise UserError(
        f"--set={field}: that is a factor of the grid; --only chooses rows of"
        " it"
      )


def _changes_of(variant: str, changes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields that are changed in the runs of a variant."""
  fields = {}
  for change, value in changes.items():
    chosen_variant, _, field = change.rpartition(":")
    if chosen_variant in ("", variant):
      fields[field] = value
  return fields


def with_fields(run: Run, fields: Mapping[str, Any]) -> Run:
  """Returns a run with further fields set.

  Args:
    run: The run.
    fields: The values by dotted name.

  Raises:
    UserError: for an unknown field, and for a config that cannot work.
  """
  return dataclasses.replace(
    run,
    config=_with_fields(run.config.to_dict(), fields),
    fields={**run.fields, **fields},
  )


def _with_fields(values: dict[str, Any], fields: Mapping[str, Any]) -> Config:
  """Returns the config with some fields set.

  Args:
    values: The sections of the config. They are changed.
    fields: The values by dotted name.

  Raises:
    UserError: for an unknown field, and for a config that cannot work.
  """
  for field, value in fields.items():
    section, _, name = field.partition(".")
    if not isinstance(values.get(section), dict):
      raise UserError(
        f"config.{field} is not a config field: fields are SECTION.NAME, with"
        f" the sections {', '.join(values)}"
      )
    values[section][name] = value
  return from_config_dict(values)


def read_value(text: str) -> Any:
  """Returns the value of a field that a command line names.

  Returns a bool or a number if the text can be read as one. Otherwise, returns
  the text.
  """
  if text in ("True", "False"):
    return text == "True"
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text


def choose(runs: Sequence[Run], only: Iterable[str], slice_: str) -> list[Run]:
  """Returns a part of the runs.

  Args:
    runs: The runs of a grid.
    only: Patterns of variants or of runs: "diff*" or "diff/seed_0". A run is
      chosen if it matches one of them. Empty for all runs.
    slice_: "INDEX/COUNT". Every COUNT-th of these runs is chosen, beginning
      with the run INDEX.

  Raises:
    UserError: for a pattern that matches no run, and for a malformed slice.
  """
  index, count = _read_slice(slice_)
  patterns = list(only)
  if not patterns:
    return list(runs[index::count])
  chosen_names = set()
  for pattern in patterns:
    matching = [run.name for run in runs if _matches(run, pattern)]
    if not matching:
      variants = dict.fromkeys(run.variant for run in runs)
      raise UserError(
        f"--only={pattern} matches no run; runs are VARIANT/seed_SEED, with the"
        f" variants {', '.join(variants)}"
      )
    chosen_names.update(matching)
  chosen = [run for run in runs if run.name in chosen_names]
  return chosen[index::count]


def _read_slice(text: str) -> tuple[int, int]:
  """Returns INDEX and COUNT of a slice."""
  index, _, count = text.partition("/")
  is_valid = index.isdigit() and count.isdigit() and int(index) < int(count)
  if not is_valid:
    raise UserError(
      f"--slice={text}: must be INDEX/COUNT, from 0/COUNT to COUNT−1/COUNT,"
      " such as 0/4"
    )
  return int(index), int(count)


def _matches(run: Run, pattern: str) -> bool:
  """Returns True if a pattern matches the run's name or its variant."""
  if fnmatch.fnmatchcase(run.name, pattern):
    return True
  return fnmatch.fnmatchcase(run.variant, pattern)


def decides(field: str) -> bool:
  """Returns True if a config field affects the results of a run.

  Args:
    field: The dotted name of the field. Stored results may have a field that
      the config no longer has. Such a field counts too.
  """
  return field not in FIELDS or FIELDS[field].affects_results


def comparable(
  config: Mapping[str, Mapping[str, Any]], places: Iterable[str]
) -> dict[str, Any]:
  """Returns the fields of a config that affect results, by dotted name.

  Args:
    config: The sections of the config, as `Config.to_dict` returns them.
    places: Fields that are left out, because they only say where data is.
  """
  left_out = set(places)
  fields = {}
  for section, values in config.items():
    for name, value in values.items():
      field = f"{section}.{name}"
      if decides(field) and field not in left_out:
        fields[field] = value
  return fields
