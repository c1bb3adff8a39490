"""Results of runs: stored in each run's workdir, collected in a folder's results.json, and printed as a table.

A folder holds results of one grid with one setting. Results of other configs, tasks or grids are refused, since they cannot be compared.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import scipy.stats

from diffjax.config import Config, UserError
from diffjax.training import manifest
from diffjax.training.flops import parameter_count
from experiments.grid import Experiment, Run, comparable
from experiments.launch import Devices

_PACKAGES = ("jax", "flax", "optax", "numpy")
_CPUS = pathlib.Path("/proc/cpuinfo")  # on Linux


def trained(workdir: pathlib.Path, config: Config, places: Iterable[str]) -> dict[str, float] | None:
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
  directory, places = manifest.checkpoint_directory(workdir), (*places, "train.init_from")
  for step in reversed(manifest.steps(directory)):
    try:
      manifest.verify(directory / str(step), step, contents=False)
      stored = manifest.metadata(directory / str(step))["config"]
    except manifest.Damage:
      continue
    if differing := _differing(comparable(stored, places), comparable(config.to_dict(), places)):
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
    lines = (workdir / "metrics.jsonl").read_text(errors="replace").splitlines()
  except OSError:
    return None
  for line in lines:
    try:
      values = json.loads(line)
      ended |= values["step"] == step and "validation/loss" in values
      found |= values
    except (ValueError, KeyError, TypeError):  # the last line of a run that was killed while it wrote
      continue
  return found if ended else None


def write_run(
  workdir: pathlib.Path, run: Run, task: Mapping[str, Any], results: Mapping[str, Any], seconds: float | None, machine: str
) -> None:
  """Writes a finished run's result.json: its config, date, machine, wall time (None if not known) and results."""
  write(
    workdir / "result.json",
    {
      "name": run.name,
      "variant": run.variant,
      "seed": run.seed,
      "date": str(datetime.date.today()),
      "machine": machine,
      "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _PACKAGES}},
      "seconds": seconds and round(seconds, 1),
      "parameters": parameter_count(run.config.model),
      "task": dict(task),
      "config": run.settings(),
      "results": dict(results),
    },
  )


def machine(found: Devices, slots: int) -> str:
  """Names the devices and CPU cores that one of `slots` runs side by side has."""
  number = found.number if found.backend == "cpu" else found.number // slots
  return f"{number} × {found.kind} ({found.backend}), {max(1, (os.cpu_count() or 1) // slots)} × {processor()}"


def processor() -> str:
  """The CPU's name on Linux, such as "AMD EPYC"; else the machine type."""
  with contextlib.suppress(OSError):
    for line in _CPUS.read_text().splitlines():
      field, _, name = line.partition(":")
      if field.strip() == "model name":
        return name.strip()
  return platform.machine()


def read_run(workdir: pathlib.Path, run: Run, task: Mapping[str, Any], places: Iterable[str]) -> dict[str, Any] | None:
  """A run's result.json; None if the run has not finished.

  Raises:
    UserError: if it belongs to another config or task.
  """
  path = workdir / "result.json"
  entry = read(path, "name", "variant", "seed", "versions", "parameters", "task", "config", "results")
  if entry is None:
    return None
  entry["config"] = comparable(entry["config"], places)
  _check(path, entry, run, task, places)
  return entry


def read_folder(
  path: pathlib.Path, name: str, grid: str, runs: Sequence[Run], task: Mapping[str, Any], places: Iterable[str]
) -> dict[str, dict[str, Any]]:
  """The runs in a results.json, by name; empty if there is no such file.

  Args:
    path: the file.
    name: the experiment's.
    grid: the grid's.
    runs: all runs of the grid, with the present settings.
    task: the experiment's.
    places: fields that only say where data lies.

  Raises:
    UserError: if it holds results of another experiment, grid, config or task.
  """
  stored = read(path, "experiment", "grid", "task", "config", "runs")
  if stored is None:
    return {}
  for key, value in (("experiment", name), ("grid", grid)):
    if stored.get(key) != value:
      raise UserError(f"{path} holds results of another {key}, {stored.get(key)!r}; choose another place with --out=DIR")
  wanted = {run.name: run for run in runs}
  entries = {}
  for entry in stored["runs"]:
    entry = {**entry, "task": stored["task"], "config": {**stored["config"], **entry["config"]}}
    if entry["name"] not in wanted:
      raise UserError(f"{path} holds results of {entry['name']!r}, which the grid does not have now; choose another place with --out=DIR")
    _check(path, entry, wanted[entry["name"]], task, places)
    entries[entry["name"]] = entry
  return entries


def check_text(entries: Iterable[Mapping[str, Any]], python: str | None = None) -> None:
  """Refuses to compare runs on different texts: every version of Python has another standard library.

  Args:
    entries: results of runs.
    python: the version of Python for further runs.

  Raises:
    UserError: if the runs on `stdlib` have several versions of Python.
  """
  versions = {entry["versions"]["python"] for entry in entries if entry["config"].get("data.source") == "stdlib"}
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
  shared = {field: value for field, value in configs[0].items() if all(config.get(field, ...) == value for config in configs)}
  runs = [
    {key: value for key, value in entry.items() if key not in ("config", "task")}
    | {"config": {field: value for field, value in entry["config"].items() if field not in shared}}
    for entry in entries
  ]
  results = {"experiment": name, "grid": grid, "baseline": baseline, "task": entries[0]["task"], "config": shared, "runs": runs}
  if summarise:
    results["summary"] = summarise(results)
  write(path, results)
  return results


def _check(path: pathlib.Path, entry: Mapping[str, Any], run: Run, task: Mapping[str, Any], places: Iterable[str]) -> None:
  differing = _differing(entry["config"], comparable(run.settings(), places))
  kept, asked = json.loads(json.dumps(entry["task"])), json.loads(json.dumps(dict(task)))
  differing += [
    f"the task's {key} is {kept.get(key)!r} there and {asked.get(key)!r} now"
    for key in {**kept, **asked}
    if kept.get(key) != asked.get(key)
  ]
  if differing:
    raise UserError(
      f"{path} holds results of another config ({run.name}): {_shortened(differing)}; choose other places with --workdir=DIR and "
      "--out=DIR, or delete them"
    )


def _differing(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
  """A text for each field that differs. A field that is not stored is newer than the results, and counts as its default."""
  default = comparable(Config().to_dict(), ())
  before = {field: stored.get(field, default.get(field.removeprefix("pretrained."))) for field in own}
  return [f"{field} is {before[field]!r} there and {own[field]!r} now" for field in own if before[field] != own[field]]


def _shortened(differing: Sequence[str]) -> str:
  return "; ".join(differing[:2]) + (f" and {len(differing) - 2} more" if len(differing) > 2 else "")


def read(path: pathlib.Path, *keys: str) -> dict[str, Any] | None:
  """The JSON object in a file, which must have these keys; None if there is no such file."""
  try:
    found = json.loads(path.read_text())
    missing = [key for key in keys if key not in found]
  except FileNotFoundError:
    return None
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f"{path}: cannot be read ({error}); delete it, and run again") from error
  if missing or not isinstance(found, dict):
    raise UserError(f"{path}: cannot be read (it holds other data than results); delete it, and run again")
  return found


def write(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file atomically."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix(f".{os.getpid()}.tmp")
  temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
  temporary.replace(path)


# --- Statistics and tables ---


def values(results: Mapping[str, Any], variant: str, name: str) -> dict[int, float]:
  """A named number of a variant's runs, by seed; runs without it are left out."""
  return {
    run["seed"]: run["results"][name] for run in results["runs"] if run["variant"] == variant and run["results"].get(name) is not None
  }


def _baseline(results: Mapping[str, Any], variant: str) -> str:
  """The variant that `variant` is compared with."""
  return results["baseline"].replace("*", variant.partition(",")[2])


def _count(results: Mapping[str, Any], name: str, variant: str) -> str:
  """The note " (4 of 5)" beside a mean, if some runs of a variant lack the number; else an empty text."""
  there, runs = len(values(results, variant, name)), sum(run["variant"] == variant for run in results["runs"])
  return f" ({there} of {runs})" if 0 < there < runs else ""


def differences(results: Mapping[str, Any], variant: str, name: str) -> list[float]:
  """Variant − baseline, for every seed that both have."""
  baseline = _baseline(results, variant)
  ours, theirs = values(results, variant, name), values(results, baseline, name)
  return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())] if variant != baseline else []


def difference(results: Mapping[str, Any], variant: str, name: str) -> tuple[float, float, float] | None:
  """The mean of `differences` and its 95% interval (Student's t).

  None with fewer than two seeds, and if a run lacks the number (it may have diverged), since the others are no fair sample."""
  each = differences(results, variant, name)
  if len(each) < 2 or any(_count(results, name, compared) for compared in (variant, _baseline(results, variant))):
    return None
  mean, error = statistics.mean(each), statistics.stdev(each) / len(each) ** 0.5
  reach = float(scipy.stats.t.ppf(0.975, len(each) - 1)) * error
  return mean, mean - reach, mean + reach


def table(experiment: Experiment, results: Mapping[str, Any]) -> str:
  """Markdown tables of an experiment's results.

  The first has a row per variant: mean ± standard deviation over seeds of every metric and, where there are several seeds, the first
  metric's difference from the baseline with its 95% interval, bold if that excludes 0. The second has the other metrics' differences, and
  the last the summary, if there is one."""
  first = next(iter(experiment.metrics.values()))
  variants = list(dict.fromkeys(run["variant"] for run in results["runs"]))
  several = any(difference(results, variant, first) for variant in variants)
  head = [
    "",
    "parameters",
    "seeds",
    *experiment.metrics,
    *([f"{next(iter(experiment.metrics))} − {results['baseline']}'s"] if several else []),
  ]
  lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
  for variant in variants:
    own = [run for run in results["runs"] if run["variant"] == variant]
    cells = [variant, f"{own[0]['parameters'] / 1e6:.3g} M", str(len(own))]
    cells += [_mean(list(values(results, variant, name).values())) + _count(results, name, variant) for name in experiment.metrics.values()]
    if several:
      cells.append(_difference_cell(difference(results, variant, first)))
    lines.append("| " + " | ".join(cells) + " |")
  lines += _other_differences(experiment, results, variants)
  if summary := results.get("summary"):
    lines += ["", "| " + " | ".join(summary[0]) + " |", "|---" * len(summary[0]) + "|"]
    lines += ["| " + " | ".join(cell(value) for value in row.values()) + " |" for row in summary]
  return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
  """A cell of a table: a text, a number, a number with its interval, or "–" for None."""
  if isinstance(value, (list, tuple)):
    mean, low, high = map(cell, value)
    return f"{mean} [{low}, {high}]"
  if isinstance(value, (int, float)):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
  return "–" if value is None else value


def _other_differences(experiment: Experiment, results: Mapping[str, Any], variants: Sequence[str]) -> list[str]:
  """The lines of the second table: the other metrics' differences from the baseline; none without several seeds."""
  names = list(experiment.metrics.items())[1:]
  rows = {variant: [difference(results, variant, name) for _, name in names] for variant in variants}
  rows = {variant: row for variant, row in rows.items() if any(row)}
  if not rows:
    return []
  lines = ["", f"| − {results['baseline']}'s | " + " | ".join(title for title, _ in names) + " |", "|---" * (1 + len(names)) + "|"]
  return lines + [f"| {variant} | " + " | ".join(map(_difference_cell, row)) + " |" for variant, row in rows.items()]


def _difference_cell(found: tuple[float, float, float] | None) -> str:
  """A mean with its interval, bold if that excludes 0."""
  if found is None:
    return ""
  mean, low, high = found
  digits = _decimals(found)
  text = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
  return f"**{text}**" if low > 0 or high < 0 else text


def _mean(found: Sequence[float]) -> str:
  if not found:
    return "–"
  digits = _decimals(found)
  return f"{statistics.mean(found):.{digits}f}" + (f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else "")


def _decimals(numbers: Sequence[float]) -> int:
  """Decimal places: four for numbers below 10, one fewer for each further digit. Infinite numbers are ignored."""
  return max(0, 4 - int(math.log10(max([1.0, *(abs(number) for number in numbers if math.isfinite(number))]))))
