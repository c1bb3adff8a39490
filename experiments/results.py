"""Results of runs: stored in each run's workdir, collected in a folder's results.json, and printed as a table.

A folder holds results of one grid with one setting. Results of other configs, tasks or grids are refused, since they cannot be compared.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from diffjax.config import Config, UserError
from diffjax.host.files import write_atomically
from diffjax.model.flops import parameter_count
from diffjax.training import manifest
from diffjax.training.metrics import read_log
from experiments.grid import Experiment, Run, comparable
from experiments.launch import Devices

_PACKAGES = ("jax", "flax", "optax", "numpy")
_LEVEL = 0.05  # of the p-values of differences that are bold
_CPUS = pathlib.Path("/proc/cpuinfo")  # on Linux
# The file in the workdir of a run that ended with an error.
_FAILURE = "failed.json"
# Characters of an error in a table's cell, and below the table.
_CELL_WIDTH = 80
_LINE_WIDTH = 400
# What every entry of results.json has, and each file of a run.
_ENTRY_KEYS = (
  "name",
  "variant",
  "seed",
  "versions",
  "parameters",
  "task",
  "config",
  "results",
)


def trained(
  workdir: pathlib.Path, config: Config, places: Iterable[str]
) -> dict[str, float] | None:
  """The last number of every name in the log of a finished run; None for one that has not finished.

  A run has finished if metrics.jsonl holds the last step's validation and that step's checkpoint exists. Either can exist alone, if a disk
  was full.

  Args:
    workdir: the run's.
    config: the config that it must have been trained with.
    places: fields that only say where data lies.

  Raises:
    UserError: if the workdir holds a run of another config, finished or not.
  """
  directory, places = (
    manifest.checkpoint_directory(workdir),
    (*places, "train.init_from"),
  )
  for step in reversed(manifest.steps(directory)):
    try:
      manifest.verify(directory / str(step), step, contents=False)
      stored = manifest.read_json(directory / str(step))["config"]
    except manifest.Damage:
      continue
    if differing := _differing(
      comparable(stored, places), comparable(config.to_dict(), places)
    ):
      raise UserError(
        f"{workdir} holds a run of another config: {_shortened(differing)}; choose another place with --workdir=DIR, or delete it"
      )
    return _logged(workdir, step) if step == config.train.steps else None
  return None


def _logged(workdir: pathlib.Path, step: int) -> dict[str, float] | None:
  """The last number of every name in a run's metrics.jsonl; None if it does not hold the validation of `step`."""
  found: dict[str, float] = {}
  ended = False
  try:
    lines = read_log(workdir / "metrics.jsonl")
  except OSError:
    return None
  for values in lines:
    ended |= values["step"] == step and "validation/loss" in values
    found |= values
  return found if ended else None


def write_run(
  workdir: pathlib.Path,
  run: Run,
  task: Mapping[str, Any],
  results: Mapping[str, Any],
  seconds: float | None,
  machine: str,
) -> None:
  """Writes a finished run's result.json: its config, date, machine, wall time (None if not known) and results."""
  entry = _entry(run, task, results)
  entry["machine"] = machine
  if seconds is not None:
    seconds = round(seconds, 1)
  entry["seconds"] = seconds
  write(workdir / "result.json", entry)


def write_failure(
  workdir: pathlib.Path, run: Run, experiment: Experiment, reason: str
) -> None:
  """Writes failed.json for a run that ended with an error.

  It is a run's entry of results.json, in which every metric is None.

  Args:
    workdir: The run's directory.
    run: The run.
    experiment: Its experiment.
    reason: The last error line.
  """
  no_results = dict.fromkeys(experiment.metrics.values())
  entry = _entry(run, experiment.task, no_results)
  entry["failed"] = reason
  write(workdir / _FAILURE, entry)


def forget_failure(workdir: pathlib.Path) -> None:
  """Deletes failed.json, since the run is tried again."""
  (workdir / _FAILURE).unlink(missing_ok=True)


def _entry(
  run: Run, task: Mapping[str, Any], results: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what results.json holds of a run."""
  versions = {"python": platform.python_version()}
  for package in _PACKAGES:
    versions[package] = importlib.metadata.version(package)
  entry = {
    "name": run.name,
    "variant": run.variant,
    "seed": run.seed,
    "date": str(datetime.date.today()),
    "machine": None,
    "versions": versions,
    "seconds": None,
    "parameters": parameter_count(run.config.model),
    "task": dict(task),
    "config": run.settings(),
    "results": dict(results),
  }
  if run.factors:
    entry["factors"] = dict(run.factors)
  return entry


def machine(found: Devices, slots: int) -> str:
  """Names the devices and CPU cores that one of `slots` runs side by side has."""
  number = found.number if found.backend == "cpu" else found.number // slots
  return f"{number} × {found.kind} ({found.backend}), {max(1, (os.cpu_count() or 1) // slots)} × {processor()}"


def processor() -> str:
  """The CPU's name on Linux, such as "AMD EPYC"; else the machine type."""
  with contextlib.suppress(OSError):
    for line in _CPUS.read_text(encoding="utf-8").splitlines():
      field, _, name = line.partition(":")
      if field.strip() == "model name":
        return name.strip()
  return platform.machine()


def read_run(
  workdir: pathlib.Path,
  run: Run,
  task: Mapping[str, Any],
  places: Iterable[str],
) -> dict[str, Any] | None:
  """A run's result.json; None if the run has not finished.

  Raises:
    UserError: if it belongs to another config or task.
  """
  path = workdir / "result.json"
  entry = read(path, *_ENTRY_KEYS)
  if entry is None:
    return None
  entry["config"] = comparable(entry["config"], places)
  _check(path, entry, run, task, places)
  return entry


def read_folder(
  path: pathlib.Path,
  name: str,
  grid: str,
  runs: Sequence[Run],
  task: Mapping[str, Any],
  places: Iterable[str],
) -> dict[str, dict[str, Any]]:
  """Returns the finished runs in a results.json, by name; an empty dict if there is no such file.

  Args:
    path: The file.
    name: The experiment's name.
    grid: The grid's name.
    runs: All runs of the grid, with the present settings.
    task: The experiment's task.
    places: Fields that only say where data lies.

  Raises:
    UserError: if it holds results of another experiment, grid, config or task.
  """
  stored = read(path, "experiment", "grid", "task", "config", "runs")
  if stored is None:
    return {}
  for key, value in (("experiment", name), ("grid", grid)):
    if stored.get(key) != value:
      raise UserError(
        f"{path} holds results of another {key}, {stored.get(key)!r}; choose another place with --out=DIR"
      )
  run_by_name = {run.name: run for run in runs}
  entries = {}
  for entry in _whole_entries(stored):
    if "failed" in entry:
      continue
    if entry["name"] not in run_by_name:
      raise UserError(
        f"{path} holds results of {entry['name']!r}, which the grid does not have now; choose another place with --out=DIR"
      )
    _check(path, entry, run_by_name[entry["name"]], task, places)
    entries[entry["name"]] = entry
  return entries


def read_failures(
  path: pathlib.Path,
  runs_dir: pathlib.Path,
  runs: Sequence[Run],
  task: Mapping[str, Any],
  places: Iterable[str],
) -> dict[str, dict[str, Any]]:
  """Returns the entries of the runs that ended with an error, by name.

  Those of another config or task are left out: a changed config is often the
  remedy.

  Args:
    path: A results.json, which may not exist.
    runs_dir: The directory of the runs, whose failed.json are newer.
    runs: All runs of the grid, with the present settings.
    task: The experiment's task.
    places: Fields that only say where data lies.
  """
  stored_failures: dict[str, dict[str, Any]] = {}
  stored = read(path, "task", "config", "runs")
  if stored is not None:
    for stored_entry in _whole_entries(stored):
      if "failed" in stored_entry:
        stored_failures[stored_entry["name"]] = stored_entry
  failures: dict[str, dict[str, Any]] = {}
  for run in runs:
    entry = read(runs_dir / run.name / _FAILURE, *_ENTRY_KEYS, "failed")
    if entry is not None:
      entry["config"] = comparable(entry["config"], places)
    else:
      entry = stored_failures.get(run.name)
    if entry is not None and not _differences(entry, run, task, places):
      failures[run.name] = entry
  return failures


def _whole_entries(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the entries of a results.json with the fields that they share."""
  entries = []
  for run in stored["runs"]:
    config = {**stored["config"], **run["config"]}
    entries.append({**run, "task": stored["task"], "config": config})
  return entries


def check_text(
  entries: Iterable[Mapping[str, Any]], python: str | None = None
) -> None:
  """Refuses to compare runs on different texts: every version of Python has another standard library.

  Args:
    entries: results of runs.
    python: the version of Python for further runs.

  Raises:
    UserError: if the runs on `stdlib` have several versions of Python.
  """
  versions = {
    entry["versions"]["python"]
    for entry in entries
    if entry["config"].get("data.source") == "stdlib"
  }
  if len(found := versions | ({python} if python and versions else set())) > 1:
    raise UserError(
      f"runs on data.source = stdlib under Python {' and '.join(sorted(found))} cannot be compared, since their texts differ: use one "
      "Python, or other places with --workdir=DIR and --out=DIR"
    )


def write_folder(
  path: pathlib.Path,
  name: str,
  grid: str,
  baseline: str,
  entries: Sequence[Mapping[str, Any]],
  summarise: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
  """Writes and returns results.json: the fields that all runs share, then each run with its own fields and results, then the summary."""
  configs = [entry["config"] for entry in entries]
  shared = {}
  for field, value in configs[0].items():
    if all(config.get(field, ...) == value for config in configs):
      shared[field] = value
  runs = []
  for entry in entries:
    run = {key: entry[key] for key in entry if key not in ("config", "task")}
    run["config"] = {}
    for field, value in entry["config"].items():
      if field not in shared:
        run["config"][field] = value
    runs.append(run)
  results = {
    "experiment": name,
    "grid": grid,
    "baseline": baseline,
    "task": entries[0]["task"],
    "config": shared,
    "runs": runs,
  }
  rows = without_failed_rows(results)
  if summarise and rows["runs"]:
    results["summary"] = summarise(rows)
  write(path, results)
  return results


def without_failed_rows(results: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the results without the rows of which a run failed."""
  failed = {run["variant"] for run in results["runs"] if "failed" in run}
  runs = [run for run in results["runs"] if run["variant"] not in failed]
  return {**results, "runs": runs}


def _check(
  path: pathlib.Path,
  entry: Mapping[str, Any],
  run: Run,
  task: Mapping[str, Any],
  places: Iterable[str],
) -> None:
  """Raises UserError if an entry belongs to another config or task."""
  differences = _differences(entry, run, task, places)
  if differences:
    raise UserError(
      f"{path} holds results of another config ({run.name}): {_shortened(differences)}; choose other places with --workdir=DIR and "
      "--out=DIR, or delete them"
    )


def _differences(
  entry: Mapping[str, Any],
  run: Run,
  task: Mapping[str, Any],
  places: Iterable[str],
) -> list[str]:
  """Returns a text for each field and constant in which an entry differs from a run."""
  differences = _differing(entry["config"], comparable(run.settings(), places))
  stored_task = json.loads(json.dumps(entry["task"]))
  own_task = json.loads(json.dumps(dict(task)))
  for key in {**stored_task, **own_task}:
    stored_value, own_value = stored_task.get(key), own_task.get(key)
    if stored_value != own_value:
      differences.append(
        f"the task's {key} is {stored_value!r} there and {own_value!r} now"
      )
  return differences


def _differing(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
  """A text for each field that differs. A field that is not stored is newer than the results, and counts as its default."""
  default = comparable(Config().to_dict(), ())
  before = {
    field: stored.get(field, default.get(field.removeprefix("pretrained.")))
    for field in own
  }
  return [
    f"{field} is {before[field]!r} there and {own[field]!r} now"
    for field in own
    if before[field] != own[field]
  ]


def _shortened(differing: Sequence[str]) -> str:
  return "; ".join(differing[:2]) + (
    f" and {len(differing) - 2} more" if len(differing) > 2 else ""
  )


def read(path: pathlib.Path, *keys: str) -> dict[str, Any] | None:
  """The JSON object in a file, which must have these keys; None if there is no such file."""
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in keys if key not in found]
  except FileNotFoundError:
    return None
  except (OSError, ValueError, TypeError) as error:
    raise UserError(
      f"{path}: cannot be read ({error}); delete it, and run again"
    ) from error
  if missing or not isinstance(found, dict):
    raise UserError(
      f"{path}: cannot be read (it holds other data than results); delete it, and run again"
    )
  return found


def write(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file atomically."""
  path.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(value, indent=1, ensure_ascii=False)
  # Two processes may run experiments of the same folder.
  suffix = f".{os.getpid()}.tmp"
  write_atomically(path, text + "\n", temporary_suffix=suffix)


# --- Statistics and tables ---


def values(
  results: Mapping[str, Any], variant: str, name: str
) -> dict[int, float]:
  """A named number of a variant's runs, by seed; runs without it are left out."""
  return {
    run["seed"]: run["results"][name]
    for run in results["runs"]
    if run["variant"] == variant and run["results"].get(name) is not None
  }


def _baseline(results: Mapping[str, Any], variant: str) -> str:
  """Returns the variant that `variant` is compared with."""
  baseline = results["baseline"]
  if not baseline.endswith(",*"):
    return baseline
  _, _, options = variant.partition(",")
  return baseline.removesuffix("*") + options


def _count(results: Mapping[str, Any], name: str, variant: str) -> str:
  """The note " (4 of 5)" beside a mean, if some runs of a variant lack the number; else an empty text."""
  runs = [run for run in results["runs"] if run["variant"] == variant]
  count = len(values(results, variant, name))
  if not 0 < count < len(runs):
    return ""
  return f" ({count} of {len(runs)})"


def sample(
  results: Mapping[str, Any], variant: str, name: str
) -> list[float] | None:
  """A named number of all of a variant's runs. None with fewer than two runs, and if a run lacks the number.

  A run without the number may have diverged. The others are no fair sample then."""
  found = [
    run["results"].get(name)
    for run in results["runs"]
    if run["variant"] == variant
  ]
  return found if len(found) > 1 and None not in found else None


def mean_interval(found: Sequence[float]) -> tuple[float, float, float]:
  """The mean over seeds and its 95% interval (Student's t). The bounds are NaN for one seed."""
  mean = float(np.mean(found))
  if len(found) < 2:
    return mean, math.nan, math.nan
  reach = (
    float(scipy.stats.t.ppf(0.975, len(found) - 1))
    * float(np.std(found, ddof=1))
    / len(found) ** 0.5
  )
  return mean, mean - reach, mean + reach


def difference(
  results: Mapping[str, Any],
  variant: str,
  name: str,
  against: str | None = None,
) -> tuple[float, float, float] | None:
  """A variant's mean minus another's, with Welch's 95% interval.

  Runs of one seed are not paired: they have the order of data in common, and that does not make their results similar.

  Args:
    results: as in results.json.
    variant: the row.
    name: of a number in the runs' results.
    against: the other row; the baseline if it is None.

  Returns:
    The difference and the bounds of its interval. None for a row against itself, for a row of fewer than two runs, and if a run lacks the
    number.
  """
  against = against or _baseline(results, variant)
  ours, theirs = sample(results, variant, name), sample(results, against, name)
  if variant == against or ours is None or theirs is None:
    return None
  with _equal_runs():
    interval = scipy.stats.ttest_ind(
      ours, theirs, equal_var=False
    ).confidence_interval(0.95)
  return (
    statistics.mean(ours) - statistics.mean(theirs),
    float(interval.low),
    float(interval.high),
  )


def contrasts(
  results: Mapping[str, Any],
  title: str,
  name: str,
  pairs: Iterable[tuple[str, str]],
) -> list[dict[str, Any]]:
  """Rows of a summary: the differences of a named number, called `title`, in pairs of rows that the table's baseline does not compare."""
  return [
    {"": f"{variant} − {against}", f"{title}, difference": found}
    for variant, against in pairs
    if (found := difference(results, variant, name, against)) is not None
  ]


@contextlib.contextmanager
def _equal_runs() -> Iterator[None]:
  """Without SciPy's warning about a row whose runs are all equal: its spread is 0, and no precision is lost."""
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
    yield


def dunnett(results: Mapping[str, Any], name: str) -> dict[str, float]:
  """The p-values of Dunnett's test, by variant: is this row's mean the baseline's?

  The test pools the spread over the baseline and all rows that are compared with it, and corrects for the number of these rows. Rows that
  `difference` does not compare are left out."""
  rows: dict[str, list[str]] = {}
  for variant in dict.fromkeys(run["variant"] for run in results["runs"]):
    if difference(results, variant, name) is not None:
      rows.setdefault(_baseline(results, variant), []).append(variant)
  found: dict[str, float] = {}
  for baseline, variants in rows.items():
    control, *samples = (
      sample(results, variant, name) or [] for variant in (baseline, *variants)
    )
    if any(
      len({*sample}) > 1 for sample in (control, *samples)
    ):  # else there is no spread to compare with
      with _equal_runs():
        test = scipy.stats.dunnett(
          *samples, control=control, random_state=0
        )  # its integral is a random sum
      found |= dict(zip(variants, map(float, test.pvalue), strict=True))
  return found


def significant(results: Mapping[str, Any], name: str) -> set[str]:
  """The variants whose interval of the difference from the baseline excludes 0 and whose p-value of Dunnett's test is below 0.05.

  The test alone would trust a row whose own spread is much larger than that of the others, since it pools them."""
  found = {
    variant: difference(results, variant, name)
    for variant, p in dunnett(results, name).items()
    if p < _LEVEL
  }
  return {
    variant
    for variant, interval in found.items()
    if interval and interval[1] * interval[2] > 0
  }


def table(experiment: Experiment, results: Mapping[str, Any]) -> str:
  """Returns the markdown tables of an experiment's results.

  The first has a row per variant: mean ± standard deviation over seeds of every metric and, where there are several seeds, the first
  metric's difference from the baseline with its interval. The second has the other metrics' differences, and the third the summary, if
  there is one. Then come the errors of the runs that failed, which no mean counts. The last line says what intervals and bold differences
  are.
  """
  metrics = experiment.metrics
  variants = list(dict.fromkeys(run["variant"] for run in results["runs"]))
  differences = {}
  for name in metrics.values():
    differences[name] = _difference_cells(results, variants, name)
  lines = _table_of_means(metrics, results, variants, differences)
  lines += _table_of_differences(metrics, results, variants, differences)
  lines += _table_of_summary(results.get("summary"))
  lines += _lines_of_failures(results)
  if any(differences.values()):
    lines += ["", _legend(results, differences)]
  return "\n".join(lines) + "\n"


def _table_of_means(
  metrics: Mapping[str, str],
  results: Mapping[str, Any],
  variants: Sequence[str],
  differences: Mapping[str, Mapping[str, str]],
) -> list[str]:
  first_title, first_name = next(iter(metrics.items()))
  first_differences = differences[first_name]
  head = ["", "parameters", "seeds", *metrics]
  if first_differences:
    head.append(f"{first_title} − {_baseline_name(results)}'s")
  lines = _table_head(head)
  for variant in variants:
    runs = [run for run in results["runs"] if run["variant"] == variant]
    failed = [run for run in runs if "failed" in run]
    cells = [variant, f"{runs[0]['parameters'] / 1e6:.3g} M"]
    if not failed:
      cells.append(str(len(runs)))
    else:
      cells.append(f"{len(runs) - len(failed)} of {len(runs)}")
    if len(failed) == len(runs):
      reason = textwrap.shorten(
        failed[0]["failed"], _CELL_WIDTH, placeholder=" …"
      )
      cells.append(f"failed: {reason}")
      cells += ["–"] * (len(metrics) - 1)
    else:
      for name in metrics.values():
        mean = _mean(list(values(results, variant, name).values()))
        cells.append(mean + _count(results, name, variant))
    if first_differences:
      cells.append(first_differences.get(variant, ""))
    lines.append(_table_row(cells))
  return lines


def _table_of_differences(
  metrics: Mapping[str, str],
  results: Mapping[str, Any],
  variants: Sequence[str],
  differences: Mapping[str, Mapping[str, str]],
) -> list[str]:
  """Returns the table of the differences of all metrics but the first."""
  titles = list(metrics)[1:]
  columns = [differences[metrics[title]] for title in titles]
  rows = []
  for variant in variants:
    cells = [column.get(variant, "") for column in columns]
    if any(cells):
      rows.append(_table_row([variant, *cells]))
  if not rows:
    return []
  head = [f"− {_baseline_name(results)}'s", *titles]
  return ["", *_table_head(head), *rows]


def _table_of_summary(summary: Sequence[Mapping[str, Any]] | None) -> list[str]:
  if not summary:
    return []
  rows = []
  for row in summary:
    rows.append(_table_row([cell(value) for value in row.values()]))
  return ["", *_table_head(list(summary[0])), *rows]


def _lines_of_failures(results: Mapping[str, Any]) -> list[str]:
  lines = []
  for run in results["runs"]:
    if "failed" in run:
      reason = textwrap.shorten(run["failed"], _LINE_WIDTH, placeholder=" …")
      lines.append(f"- {run['name']} failed: {reason}")
  return ["", *lines] if lines else []


def _table_head(cells: Sequence[str]) -> list[str]:
  return [_table_row(cells), "|---" * len(cells) + "|"]


def _table_row(cells: Sequence[str]) -> str:
  """Returns a row of a table, in which a name may have a vertical bar."""
  escaped = [text.replace("|", "\\|") for text in cells]
  return f"| {' | '.join(escaped)} |"


def _baseline_name(results: Mapping[str, Any]) -> str:
  return results["baseline"].removesuffix(",*")


def _legend(
  results: Mapping[str, Any], compared: Mapping[str, Mapping[str, str]]
) -> str:
  """The line that says what the numbers beside the means are."""
  rows = max(
    max(
      collections.Counter(
        _baseline(results, variant) for variant in found
      ).values()
    )
    for found in compared.values()
    if found
  )
  others = f"the {rows} rows" if rows > 1 else "the one row"
  name = results["baseline"].removesuffix(",*")
  baseline = (
    name if name == results["baseline"] else f"the {name} of the same options"
  )
  return (
    "±: standard deviation over seeds. Intervals: Welch's 95%, each by itself. Bold: the interval excludes 0, and Dunnett's "
    f"p < {_LEVEL} among {others} compared with {baseline}, each column by itself."
  )


def cell(value: Any) -> str:
  """A cell of a table: a text, a number, a number with its interval, or "–" for None."""
  if isinstance(value, (list, tuple)):
    mean, low, high = map(cell, value)
    return f"{mean} [{low}, {high}]"
  if isinstance(value, (int, float)):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
  return "–" if value is None else value


def _difference_cells(
  results: Mapping[str, Any], variants: Sequence[str], name: str
) -> dict[str, str]:
  """The cells of a metric's differences from the baseline, by variant: bold if they are significant."""
  bold, cells = significant(results, name), {}
  for variant in variants:
    if (found := difference(results, variant, name)) is not None:
      mean, low, high = (f"{number:+.{_decimals(found)}f}" for number in found)
      cells[variant] = (
        f"**{mean} [{low}, {high}]**"
        if variant in bold
        else f"{mean} [{low}, {high}]"
      )
  return cells


def _mean(found: Sequence[float]) -> str:
  if not found:
    return "–"
  digits = _decimals(found)
  return f"{statistics.mean(found):.{digits}f}" + (
    f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
  )


def _decimals(numbers: Sequence[float]) -> int:
  """Decimal places: four for numbers below 10, one fewer for each further digit. Infinite numbers are ignored."""
  return max(
    0,
    4
    - int(
      math.log10(
        max(
          [1.0, *(abs(number) for number in numbers if math.isfinite(number))]
        )
      )
    ),
  )
