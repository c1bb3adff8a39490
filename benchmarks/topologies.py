"""The smallest slice of each TPU generation that a config's training step fits, by the TPU's own compiler; no TPU is needed.

    python -m benchmarks.topologies                          # every config of the paper, into benchmarks/topologies.json; hours
    python -m benchmarks.topologies --configs diff_1b --generations v5e

Slices are tried from small to large: as the config has it, with one row a device at a time (accumulation), and with rematerialisation of
everything too, the first of these that fits. What benchmarks/topologies.json holds is not compiled again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pathlib

from diffjax import aot
from diffjax.command import from_config_dict
from diffjax.config import Config
from diffjax.training.flops import parameter_count

RESULTS = pathlib.Path(__file__).with_suffix(".json")
CONFIGS = ("diff_125m", "diff_350m", "diff_830m", "diff_1b", "diff_3b", "diff_7b", "diff_13b")
GENERATIONS = ("v5e", "v5p", "v6e")


def smallest(name: str, generation: str) -> dict | None:
  """The first slice and overrides that fit, and what the step takes there; None if there is none."""
  for topology in aot.TOPOLOGIES[generation]:
    devices = math.prod(map(int, topology.split("x")))
    config = _config(name, {})
    if config.train.batch_size % devices or 16 * parameter_count(config.model) > devices * aot.MEMORY[generation] * 2**30:
      continue  # parameters, Adam's two moments and the gradient, float32, leave no room
    rows = config.train.batch_size // devices
    one_row = {"train.accumulation": rows} if rows > 1 else {}
    least = one_row | {"model.remat": "full"}
    plan = _compile(name, least, f"{generation}:{topology}")
    if not plan.fits:
      continue
    for overrides in [{}, *([one_row] if one_row else [])]:  # fewer changes, if that fits too
      better = _compile(name, overrides, f"{generation}:{topology}")
      if better.fits:
        least, plan = overrides, better
        break
    return {
      "topology": f"{generation}:{topology}",
      "overrides": least,
      "GiB": round(plan.total / 2**30, 2),
      "compiled in s": round(plan.seconds),
    }
  return None


def table(found: dict) -> str:
  """The results as a table in Markdown, a row a config: slice, overrides, GiB a chip, seconds of compilation."""

  def cell(generation: str, entry: dict | None) -> str:
    if entry is None:
      return "none"
    overrides = "".join(f", {field.split('.')[1]} {value}" for field, value in entry["overrides"].items())
    return f"`{entry['topology']}`{overrides}: {entry['GiB']:.1f} of {aot.MEMORY[generation]:.1f} GiB, {entry['compiled in s']} s"

  rows = [["config", *GENERATIONS], ["---"] * (1 + len(GENERATIONS))]
  for name in CONFIGS:
    entries = found.get(name, {})
    rows.append([f"`{name}`", *(cell(generation, entries[generation]) if generation in entries else "" for generation in GENERATIONS)])
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _compile(name: str, overrides: dict, topology: str) -> aot.Plan:
  plan = aot.compile_apart(_config(name, overrides), topology)
  print(f"{name} {topology} {overrides}: {plan.total / 2**30:.2f} GiB, {plan.seconds:.0f} s", flush=True)
  return plan


def _config(name: str, overrides: dict) -> Config:
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update_from_flattened_dict(overrides)
  return from_config_dict(config)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=CONFIGS)
  parser.add_argument("--generations", nargs="+", choices=aot.TOPOLOGIES, default=GENERATIONS)
  flags = parser.parse_args()
  found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
  for name in flags.configs:
    for generation in flags.generations:
      if generation not in found.setdefault(name, {}):
        found[name][generation] = smallest(name, generation)
        rows = lambda entries: ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        RESULTS.write_text("{\n" + ",\n".join(f" {json.dumps(key)}: {{\n{rows(entries)}\n }}" for key, entries in found.items()) + "\n}\n")
  print(table(found))


if __name__ == "__main__":
  main()
