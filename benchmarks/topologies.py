"""The TPU slices that a config's training step fits, and those that it can use, by the TPU's own compiler. No TPU is needed.

    python -m benchmarks.topologies                          # every config of the paper, into benchmarks/topologies.json; hours
    python -m benchmarks.topologies --configs diff_1b --generations v5e
    python -m benchmarks.topologies --offline                # the table of what was compiled, and what it still lacks

For every config and generation it finds the smallest slice that fits, and the smallest on which the bound on MFU (the compiler's estimate,
as `diffjax.aot` prints it) is at least half. On a slice it takes the fewest changes that fit: none, accumulation by powers of two until a
chip has one row at a time, and then rematerialisation of everything too. What benchmarks/topologies.json holds is not compiled again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pathlib
from collections.abc import Iterator

from diffjax.compiled.hardware import MEMORY_GIB, TOPOLOGIES
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


class NotCompiled(Exception):
  """Raised with --offline for a result that is not there."""


class Compiled:
  """The rows of benchmarks/topologies.json; what is asked for and not there is compiled, and kept there."""

  def __init__(self, offline: bool = False):
    self.offline = offline
    rows = (
      json.loads(RESULTS.read_text(encoding="utf-8"))
      if RESULTS.exists()
      else []
    )
    self.rows = {
      self._key(row["config"], row["topology"], row["overrides"]): row
      for row in rows
    }

  def known(self, name: str, topology: str, overrides: dict) -> dict | None:
    return self.rows.get(self._key(name, topology, overrides))

  def fitting(self, name: str, generation: str) -> dict | None:
    """The smallest slice of those that are known to fit: a smaller one or fewer changes may."""
    fit = [
      row
      for row in self.rows.values()
      if row["config"] == name
      and row["topology"].startswith(generation)
      and row["fits"]
    ]
    return min(fit, key=lambda row: _chips(row["topology"]), default=None)

  def row(self, name: str, topology: str, overrides: dict) -> dict:
    """A config on a topology: memory of a chip in GiB, whether it fits, and the bound on MFU, None where the compiler refused.

    Raises:
      NotCompiled: if it is not there, and offline.
    """
    if found := self.known(name, topology, overrides):
      return found
    if self.offline:
      raise NotCompiled(f"{name} {topology} {json.dumps(overrides)}")
    plan = compile_plan(_config(name, overrides), topology)
    if plan.fits and not (plan.estimate and plan.estimate.has_kernels):
      raise UserError(
        f"the attention kernels of {name} have no estimate on {topology}: python -m benchmarks.tpu --shapes makes one"
      )
    row = dict(
      config=name,
      topology=topology,
      overrides=overrides,
      GiB=round(plan.total / 2**30, 2),
      fits=plan.fits,
    )
    row["bound on MFU"] = plan.mfu_bound and round(plan.mfu_bound, 3)
    print(f"{json.dumps(row)} after {plan.seconds:.0f} s", flush=True)
    self.rows[self._key(name, topology, overrides)] = row
    RESULTS.write_text(
      "[\n"
      + ",\n".join(json.dumps(self.rows[key]) for key in sorted(self.rows))
      + "\n]\n",
      encoding="utf-8",
    )
    return row

  @staticmethod
  def _key(name: str, topology: str, overrides: dict) -> tuple[str, str, str]:
    return name, topology, json.dumps(overrides, sort_keys=True)


def smallest(name: str, generation: str, compiled: Compiled) -> dict | None:
  """The first slice that fits; None if there is none."""
  return next(_slices(name, generation, compiled), None)


def smallest_at_half(
  name: str, generation: str, compiled: Compiled
) -> tuple[dict | None, dict | None]:
  """The first slice whose bound on MFU is at least half, if there is one; and the best of all up to there.

  The search ends on the first slice for which nothing need be changed: on a larger one a chip has fewer rows for as many parameters to
  gather.
  """
  best = None
  for row in _slices(name, generation, compiled):
    best = max(best or row, row, key=lambda row: row["bound on MFU"])
    if row["bound on MFU"] >= HALF:
      return row, best
    if not row["overrides"]:
      break
  return None, best


def table(compiled: Compiled) -> tuple[str, list[str]]:
  """The results as a table in Markdown, a row a config; and what --offline lacks for it. In its place stand the smallest slice
  that is known to fit, and an ellipsis."""
  rows, lacking = (
    [["config", *GENERATIONS], ["---"] * (1 + len(GENERATIONS))],
    [],
  )

  def known(search, name: str, generation: str):
    try:
      return search(name, generation, compiled)
    except NotCompiled as error:
      lacking.append(str(error))
      return ...

  for name in CONFIGS:
    cells = []
    for generation in GENERATIONS:
      first = known(smallest, name, generation)
      half = (
        known(smallest_at_half, name, generation)
        if first not in (None, ...)
        else None
      )
      cells.append(_cell(first, half, compiled.fitting(name, generation)))
    rows.append([f"`{name}`", *cells])
  return "\n".join(f"| {' | '.join(row)} |" for row in rows), lacking


def _cell(first, half, fitting: dict | None) -> str:
  """One generation's two searches; of one that is not done, an ellipsis."""

  def entry(row: dict) -> str:
    overrides = "".join(
      f", {field.split('.')[1]} {value}"
      for field, value in row["overrides"].items()
    )
    return f"`{row['topology']}`{overrides}: {row['GiB']:.1f} GiB, {row['bound on MFU']:.0%}"

  if first is ...:
    return f"{entry(fitting)}, …" if fitting else "…"
  if first is None:
    return "none"
  if half is ...:
    return f"{entry(first)}<br>…"
  found, best = half
  if found is None:
    return f"{entry(first)}<br>none at half" + (
      "" if best == first else f"; best {entry(best)}"
    )
  return entry(first) if found == first else f"{entry(first)}<br>{entry(found)}"


def _slices(name: str, generation: str, compiled: Compiled) -> Iterator[dict]:
  """A row for each slice that fits, from small to large, with the fewest changes that it needs."""
  for shape in TOPOLOGIES[generation]:
    config, chips = _config(name, {}), _chips(f"{generation}:{shape}")
    if config.train.batch_size % chips:
      return
    # Parameters, Adam's two moments and the gradient, float32, must leave room.
    if (
      16 * parameter_count(config.model)
      < chips * MEMORY_GIB[generation] * 2**30
    ):
      if row := _fewest_changes(
        name,
        f"{generation}:{shape}",
        config.train.batch_size // chips,
        compiled,
      ):
        yield row


def _fewest_changes(
  name: str, topology: str, rows: int, compiled: Compiled
) -> dict | None:
  """The row of the first changes that fit, where a chip has so many rows of the batch; None if none do.

  Every change takes less memory than the one before it, so that they need not all be compiled: what is known narrows the search first.
  """
  changes: list[dict] = [
    {"train.accumulation": 2**n} if n else {} for n in range(rows.bit_length())
  ]
  changes.append(changes[-1] | {"model.remat": "full"})
  low, high = (
    -1,
    len(changes),
  )  # the last that does not fit, the first that does
  for place, overrides in enumerate(changes):
    if row := compiled.known(name, topology, overrides):
      low, high = (low, min(high, place)) if row["fits"] else (place, high)
  while high - low > 1:
    # Whether the last one fits decides whether there is any.
    middle = high - 1 if high == len(changes) else (low + high) // 2
    fits = compiled.row(name, topology, changes[middle])["fits"]
    low, high = (low, middle) if fits else (middle, high)
  return (
    compiled.row(name, topology, changes[high]) if high < len(changes) else None
  )


def _chips(topology: str) -> int:
  return math.prod(map(int, topology.partition(":")[2].split("x")))


def _config(name: str, overrides: dict) -> Config:
  config = importlib.import_module(f"diffjax.configs.{name}").get_config()
  config.update_from_flattened_dict(overrides)
  return from_config_dict(config)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=CONFIGS)
  parser.add_argument(
    "--generations", nargs="+", choices=GENERATIONS, default=GENERATIONS
  )
  parser.add_argument("--offline", action="store_true", help="compile nothing")
  flags = parser.parse_args()
  compiled = Compiled(flags.offline)
  if not flags.offline:
    for name in flags.configs:
      for generation in flags.generations:
        smallest_at_half(
          name, generation, compiled
        )  # the smallest that fits is on its way
  text, lacking = table(Compiled(offline=True))
  print("\n".join([text, *(f"not compiled: {entry}" for entry in lacking)]))


if __name__ == "__main__":
  main()
