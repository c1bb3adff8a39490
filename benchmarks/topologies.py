"""The TPU slices that a config's training step fits and can use.

    python -m benchmarks.topologies
    python -m benchmarks.topologies --configs diff_1b --generations v5e
    python -m benchmarks.topologies --offline

For every config and generation, finds the smallest slice on which the step
fits, and the smallest on which the bound on MFU is at least half. The TPU's
compiler estimates both, as in `diffjax.aot`, so no TPU is needed. On each
slice, it tries as few changes as possible: none; then accumulation, by powers
of two until a chip has one row at a time; then also full rematerialization.

Results are kept in benchmarks/topologies.json and are not compiled again.
Without them, this takes hours. `--offline` prints the table of the results that
are there, and lists the missing ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from diffjax.compiled.hardware import MEMORY_GIB, TOPOLOGIES, Topology
from diffjax.compiled.plan import compile_plan
from diffjax.config import Config, UserError, from_config_dict
from diffjax.model.flops import parameter_count

RESULTS = pathlib.Path(__file__).with_suffix(".json")
CONFIGS = (
  "diff_125m",
  "diff_350m",
  "diff_830m",
  "diff_1b",
  "diff_3b",
  "diff_7b",
  "diff_13b",
)
GENERATIONS = ("v5e", "v5p", "v6e")
HALF = 0.5
# Parameters, two moments of Adam and gradients, in float32.
STATE_BYTES_PER_PARAMETER = 4 * 4


class NotCompiled(Exception):
  """A result is missing, and nothing may be compiled."""


@dataclasses.dataclass(frozen=True)
class Result:
  """A config's training step, compiled for a slice.

  Attributes:
    config: Name of the config.
    topology: The slice, such as "v5e:4x4".
    overrides: Changed fields of the config.
    gib: Memory that a chip needs, in GiB.
    fits: Whether a chip has it.
    mfu_bound: The bound on MFU. None if the compiler refused the step.
  """

  config: str
  topology: str
  overrides: dict[str, Any]
  gib: float
  fits: bool
  mfu_bound: float | None

  @classmethod
  def from_json(cls, row: dict[str, Any]) -> Result:
    """Returns the result of a row of the file."""
    return cls(
      config=row["config"],
      topology=row["topology"],
      overrides=row["overrides"],
      gib=row["GiB"],
      fits=row["fits"],
      mfu_bound=row["bound on MFU"],
    )

  def to_json(self) -> str:
    """Returns the row of the file."""
    row = {
      "config": self.config,
      "topology": self.topology,
      "overrides": self.overrides,
      "GiB": self.gib,
      "fits": self.fits,
      "bound on MFU": self.mfu_bound,
    }
    return json.dumps(row)

  @property
  def num_chips(self) -> int:
    """Number of chips of the slice."""
    return Topology.parse(self.topology).num_chips

  def cell(self) -> str:
    """Returns the text of the table."""
    changes = ""
    for field, value in self.overrides.items():
      _, _, name = field.partition(".")
      changes += f", {name} {value}"
    return (
      f"`{self.topology}`{changes}: {self.gib:.1f} GiB, {self.mfu_bound:.0%}"
    )


class Compiled:
  """The results of benchmarks/topologies.json.

  Missing results are compiled and written to the file, unless it is offline.
  """

  def __init__(self, offline: bool = False):
    """Reads the file.

    Args:
      offline: Whether missing results raise NotCompiled.
    """
    self._offline = offline
    self._results: dict[tuple[str, str, str], Result] = {}
    if RESULTS.exists():
      for row in json.loads(RESULTS.read_text(encoding="utf-8")):
        self._add(Result.from_json(row))

  def find(self, config: str, topology: str, overrides: dict) -> Result | None:
    """Returns a result if it is there."""
    return self._results.get(_key(config, topology, overrides))

  def smallest_known(self, config: str, generation: str) -> Result | None:
    """Returns the result on the smallest slice on which a config fits.

    Smaller slices or fewer changes that were not compiled may fit as well.
    """
    fitting = []
    for result in self._results.values():
      if result.config != config:
        continue
      if result.fits and result.topology.startswith(generation):
        fitting.append(result)
    return min(fitting, key=lambda result: result.num_chips, default=None)

  def get(self, config: str, topology: str, overrides: dict) -> Result:
    """Returns a result, and compiles it if it is not there.

    Raises:
      NotCompiled: if it is not there, and nothing may be compiled.
      UserError: if the kernels have no estimate.
    """
    result = self.find(config, topology, overrides)
    if result is not None:
      return result
    if self._offline:
      raise NotCompiled(f"{config} {topology} {json.dumps(overrides)}")

    result = _compile(config, topology, overrides)
    self._add(result)
    rows = [self._results[key].to_json() for key in sorted(self._results)]
    text = "[\n" + ",\n".join(rows) + "\n]\n"
    RESULTS.write_text(text, encoding="utf-8")
    return result

  def _add(self, result: Result) -> None:
    key = _key(result.config, result.topology, result.overrides)
    self._results[key] = result


def _key(config: str, topology: str, overrides: dict) -> tuple[str, str, str]:
  return config, topology, json.dumps(overrides, sort_keys=True)


def _compile(name: str, topology: str, overrides: dict) -> Result:
  """Compiles a config's step for a slice, and prints the result."""
  plan = compile_plan(_load_config(name, overrides), topology)
  has_kernels = plan.estimate is not None and plan.estimate.has_kernels
  if plan.fits and not has_kernels:
    raise UserError(
      f"the attention kernels of {name} have no estimate on {topology};"
      " python -m benchmarks.tpu --shapes makes one"
    )
  mfu_bound = None
  if plan.mfu_bound:
    mfu_bound = round(plan.mfu_bound, 3)
  result = Result(
    config=name,
    topology=topology,
    overrides=overrides,
    gib=round(plan.total / 2**30, 2),
    fits=plan.fits,
    mfu_bound=mfu_bound,
  )
  print(f"{result.to_json()} after {plan.seconds:.0f} s", flush=True)
  return result


def _load_config(name: str, overrides: dict) -> Config:
  module = importlib.import_module(f"diffjax.configs.{name}")
  config = module.get_config()
  config.update_from_flattened_dict(overrides)
  return from_config_dict(config)


def fitting_slices(
  name: str, generation: str, compiled: Compiled
) -> Iterator[Result]:
  """Yields a result for each slice on which a config fits, small ones first.

  Each has the fewest changes of the config with which it fits.

  Args:
    name: Name of the config.
    generation: The generation of TPUs.
    compiled: The results.
  """
  config = _load_config(name, overrides={})
  batch_size = config.train.batch_size
  state_bytes = STATE_BYTES_PER_PARAMETER * parameter_count(config.model)
  for shape in TOPOLOGIES[generation]:
    topology = f"{generation}:{shape}"
    num_chips = Topology.parse(topology).num_chips
    # The batch cannot be divided among the chips of this slice or a larger one.
    if batch_size % num_chips != 0:
      return
    # The parameters and the optimizer's state alone do not fit.
    if state_bytes >= num_chips * MEMORY_GIB[generation] * 2**30:
      continue
    rows_per_chip = batch_size // num_chips
    result = fewest_changes(name, topology, rows_per_chip, compiled)
    if result is not None:
      yield result


def fewest_changes(
  name: str, topology: str, rows_per_chip: int, compiled: Compiled
) -> Result | None:
  """Returns the result with the fewest changes of the config that fit.

  The changes are tried in order: none, then accumulation by powers of two, then
  full rematerialization as well. Each takes less memory than the one before, so
  a binary search finds the first that fits. It starts between the last one that
  is known not to fit and the first one that is known to fit.

  Args:
    name: Name of the config.
    topology: The slice.
    rows_per_chip: Rows of the batch on a chip, which limit accumulation.
    compiled: The results.

  Returns:
    The result. None if no changes are enough.
  """
  changes: list[dict[str, Any]] = [{}]
  for exponent in range(1, rows_per_chip.bit_length()):
    changes.append({"train.accumulation": 2**exponent})
  changes.append(changes[-1] | {"model.remat": "full"})

  last_too_large = -1
  first_fitting = len(changes)
  for index, overrides in enumerate(changes):
    result = compiled.find(name, topology, overrides)
    if result is None:
      continue
    if result.fits:
      first_fitting = min(first_fitting, index)
    else:
      last_too_large = index

  while first_fitting - last_too_large > 1:
    if first_fitting == len(changes):
      # If the most changes do not fit, none do.
      index = first_fitting - 1
    else:
      index = (last_too_large + first_fitting) // 2
    if compiled.get(name, topology, changes[index]).fits:
      first_fitting = index
    else:
      last_too_large = index
  if first_fitting == len(changes):
    return None
  return compiled.get(name, topology, changes[first_fitting])


def smallest(name: str, generation: str, compiled: Compiled) -> Result | None:
  """Returns the result on the smallest slice that fits. None if none does."""
  return next(fitting_slices(name, generation, compiled), None)


class HalfSearch(NamedTuple):
  """The search for a slice whose bound on MFU is at least half.

  Attributes:
    result: The result on the smallest such slice. None if no slice has it.
    best: The result with the largest bound up to there.
  """

  result: Result | None
  best: Result | None


def smallest_at_half(
  name: str, generation: str, compiled: Compiled
) -> HalfSearch:
  """Searches the smallest slice whose bound on MFU is at least half.

  The search ends at the first slice that needs no changes. On a larger slice,
  the bound is lower, because a chip computes fewer rows and gathers as many
  parameters.

  Args:
    name: Name of the config.
    generation: The generation of TPUs.
    compiled: The results.

  Returns:
    The result on that slice, and the one with the largest bound.
  """
  best = None
  best_bound = 0.0
  for result in fitting_slices(name, generation, compiled):
    assert result.mfu_bound is not None
    if result.mfu_bound > best_bound:
      best = result
      best_bound = result.mfu_bound
    if result.mfu_bound >= HALF:
      return HalfSearch(result, best)
    if not result.overrides:
      break
  return HalfSearch(None, best)


def table(compiled: Compiled) -> tuple[str, list[str]]:
  """Returns the table in Markdown, and the results that it lacks.

  An ellipsis stands for a search that lacks results.
  """
  missing: list[str] = []
  rows = [["config", *GENERATIONS], ["---"] * (1 + len(GENERATIONS))]
  for name in CONFIGS:
    row = [f"`{name}`"]
    for generation in GENERATIONS:
      cell = _cell(name, generation, compiled)
      row.append(cell.text)
      if cell.missing is not None:
        missing.append(cell.missing)
    rows.append(row)
  lines = [f"| {' | '.join(row)} |" for row in rows]
  return "\n".join(lines), missing


class Cell(NamedTuple):
  """A cell of the table.

  Attributes:
    text: The text.
    missing: A result that the cell lacks. None if it is complete.
  """

  text: str
  missing: str | None = None


def _cell(name: str, generation: str, compiled: Compiled) -> Cell:
  """Returns the cell of a config and a generation of TPUs.

  It has the smallest slice that fits, and the smallest one whose bound on MFU
  is at least half.
  """
  try:
    first = smallest(name, generation, compiled)
  except NotCompiled as error:
    known = compiled.smallest_known(name, generation)
    if known is None:
      return Cell("…", missing=str(error))
    return Cell(f"{known.cell()}, …", missing=str(error))
  if first is None:
    return Cell("none")

  try:
    search = smallest_at_half(name, generation, compiled)
  except NotCompiled as error:
    return Cell(f"{first.cell()}<br>…", missing=str(error))
  if search.result == first:
    return Cell(first.cell())
  if search.result is not None:
    return Cell(f"{first.cell()}<br>{search.result.cell()}")
  if search.best is None or search.best == first:
    return Cell(f"{first.cell()}<br>none at half")
  return Cell(f"{first.cell()}<br>none at half; best {search.best.cell()}")


def main() -> None:
  """Compiles what is missing, unless --offline is set; prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=CONFIGS)
  parser.add_argument(
    "--generations", nargs="+", choices=GENERATIONS, default=GENERATIONS
  )
  parser.add_argument("--offline", action="store_true", help="compile nothing")
  flags = parser.parse_args()

  if not flags.offline:
    compiled = Compiled()
    for name in flags.configs:
      for generation in flags.generations:
        # This also compiles what the smallest slice needs.
        smallest_at_half(name, generation, compiled)
  text, missing = table(Compiled(offline=True))
  print(text)
  for entry in missing:
    print(f"not compiled: {entry}")


if __name__ == "__main__":
  main()
