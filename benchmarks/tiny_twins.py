"""The three twins of configs/tiny.py, five seeds each: their validation losses, and the quick suites of DIFF beside the Transformer.

    python -m benchmarks.tiny_twins --workdir=runs/tiny_twins                    # 15 runs of five minutes, 5 evaluations of two
    python -m benchmarks.tiny_twins --workdir=/tmp/twins --out=/tmp/twins.json --seeds=2 --config.train.steps=4 --config.eval.rows=8

Prints the tables of docs/performance.md and writes them, with the numbers of every seed, as benchmarks/tiny_twins.json. Intervals are of
95% over seeds: Student's of a mean, Welch's of a difference from the Transformer. Stopped, the same command goes on where it was: a
finished run is not trained again, and a pair that was evaluated is not evaluated again. --config.FIELD is for training, --set.SUITE.FIELD
for the evaluation.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from configs import tiny
from diffjax.config import UserError, from_config_dict
from diffjax.evals.report.results import finite
from experiments import grid, results

VARIANTS = ("transformer", "diff", "diff_v2")
METRICS = ("bits_per_byte", "loss", "ar_hit", "others")
FIELDS = {"eval.rows": 2048, "eval.interval": 600, "train.sample_tokens": 0}
SETTINGS = ("--set.attention.length=1024", "--set.attention.samples=20")
# The rows of the suites' table: a suite, a figure's name and its place
FIGURES: tuple[tuple[str, str, dict[str, Any]], ...] = (
  ("validation", "loss (nats/token)", {}),
  ("validation", "AR-Hit (nats/token)", {}),
  ("validation", "Others (nats/token)", {}),
  ("position_nll", "cumulative NLL (nats/token)", {"position": 2048}),
  *(
    ("attention", part, {"weights": weights, "depth": "mean"}) for weights in ("signed", "absolute") for part in ("answer", "noise")
  ),
  *(("outliers", name, {"value": value}) for name in ("attention logits", "hidden states") for value in ("top-1", "median")),
  ("difference_map", "negative share", {"layer": "all"}),
)  # fmt: skip


def trained(variant: str, seed: int, workdir: pathlib.Path, changes: Mapping[str, Any]) -> dict[str, float]:
  """The last metrics of a run, which is trained unless it has finished.

  Raises:
    UserError: if its workdir holds a run of another config, or training was stopped.
  """
  directory = workdir / f"{variant}_{seed}"
  fields = {**FIELDS, **changes, "train.seed": seed, "data.seed": seed}
  config = tiny.get_config(variant)
  config.update_from_flattened_dict(fields)
  checked = from_config_dict(config)
  if (metrics := results.trained(directory, checked, ())) is None:
    flags = [f"--config.{field}={value}" for field, value in fields.items()]
    command = [sys.executable, "-m", "diffjax.train", f"--config=configs/tiny.py:{variant}", f"--workdir={directory}", *flags]
    subprocess.run(command, check=True)
    metrics = results.trained(directory, checked, ())
  if metrics is None:
    raise UserError(f"{directory}: training ended before its last step; run the same command to go on")
  return metrics


def evaluated(seed: int, workdir: pathlib.Path, settings: Sequence[str]) -> list[dict[str, float]]:
  """The values of FIGURES of DIFF and of the Transformer of a seed, which are measured unless they have been with these settings."""
  out = workdir / f"pair_{seed}"
  kept = out / "figures.json"
  suites = list(dict.fromkeys(suite for suite, _, _ in FIGURES))
  stored = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
  if stored.get("settings") != list(settings):
    pair = [f"--workdir={workdir / f'diff_{seed}'}", f"--against={workdir / f'transformer_{seed}'}", f"--out={out}"]
    subprocess.run([sys.executable, "-m", "diffjax.evaluate", f"--suite={','.join(suites)}", *pair, *settings], check=True)
    rows = {suite: json.loads((out / f"{suite}.json").read_text(encoding="utf-8"))["figures"] for suite in suites}
    found = [next(row for row in rows[suite] if (row["name"], row["at"]) == (name, at)) for suite, name, at in FIGURES]
    stored = {"settings": list(settings), "figures": [{"transformer": row["against"]["value"], "diff": row["value"]} for row in found]}
    results.write(kept, stored)
  return stored["figures"]


def over_seeds(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
  """The values of each variant, their mean with Student's interval, and the difference from the Transformer with Welch's.

  Bounds are NaN with one seed.
  """
  runs = [{"variant": variant, "results": {"value": value}} for variant, each in values.items() for value in each]
  out: dict[str, dict[str, Any]] = {}
  for variant, each in values.items():
    out[variant] = {"seeds": [*map(float, each)], "mean": [*results.mean_interval(each)]}
    if variant != "transformer":
      one_seed = (each[0] - values["transformer"][0], np.nan, np.nan)
      out[variant]["difference"] = [*(results.difference({"baseline": "transformer", "runs": runs}, variant, "value") or one_seed)]
  return out


def table(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
  """A Markdown table with a row for each measure, and the mean of each variant and its difference. Bold differences exclude 0."""
  variants = list(next(iter(rows.values())))
  head = ["mean over seeds [95%]", *variants, *(f"{variant} − transformer" for variant in variants[1:])]
  lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
  for name, found in rows.items():
    cells = [_cell(found[variant]["mean"]) for variant in variants]
    for variant in variants[1:]:
      _, low, high = difference = found[variant]["difference"]
      cells.append(f"**{_cell(difference)}**" if low > 0 or high < 0 else _cell(difference))
    lines.append("| " + " | ".join([name, *cells]) + " |")
  return "\n".join(lines)


def _cell(found: Sequence[float]) -> str:
  decimals = 1 if abs(found[0]) >= 10 else 3
  value, *bounds = (f"{number:.{decimals}f}".replace("-", "−") for number in found)
  return value if np.isnan(found[1:]).any() else f"{value} [{', '.join(bounds)}]"


def _arguments() -> tuple[argparse.Namespace, dict[str, Any], list[str]]:
  """The flags, the fields of --config.FIELD=VALUE, and the evaluation's settings."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
  parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/tiny_twins"))
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_suffix(".json"))
  flags, others = parser.parse_known_args()
  changes, settings = {}, [*SETTINGS]
  for argument in others:
    field, separator, value = argument.partition("=")
    if separator and field.startswith("--config."):
      changes[field.removeprefix("--config.")] = grid.read_value(value)
    elif separator and field.startswith("--set."):
      settings.append(argument)
    else:
      parser.error(f"unknown argument {argument}: further ones are --config.FIELD=VALUE and --set.SUITE.FIELD=VALUE")
  return flags, changes, settings


def main() -> None:
  flags, changes, settings = _arguments()
  runs = []
  for seed in range(flags.seeds):
    for variant in VARIANTS:
      metrics = trained(variant, seed, flags.workdir, changes)
      runs.append(
        {"variant": variant, "seed": seed, **{name: metrics[f"validation/{name}"] for name in (*METRICS, "trigram_bits_per_byte")}}
      )
  twins = {
    name: over_seeds({variant: [run[name] for run in runs if run["variant"] == variant] for variant in VARIANTS}) for name in METRICS
  }
  trigram = runs[0]["trigram_bits_per_byte"]
  print(f"{table(twins)}\n\nA byte trigram model: {trigram:.3f} bits per byte.\n", flush=True)
  pairs = [evaluated(seed, flags.workdir, settings) for seed in range(flags.seeds)]
  suites = {}
  for index, (suite, name, at) in enumerate(FIGURES):
    title = ", ".join([f"`{suite}`: {name}", *map(str, at.values())])
    suites[title] = over_seeds({variant: [pair[index][variant] for pair in pairs] for variant in VARIANTS[:2]})
  machine = f"{platform.machine()}, {os.cpu_count()} CPUs, JAX {jax.__version__}, Python {platform.python_version()}"
  found = {"date": str(datetime.date.today()), "machine": machine, "fields": {**FIELDS, **changes}, "settings": settings}
  results.write(flags.out, finite({**found, "trigram_bits_per_byte": trigram, "twins": twins, "suites": suites}))
  print(f"{table(suites)}\n\n{flags.out}")


if __name__ == "__main__":
  try:
    main()
  except (UserError, subprocess.CalledProcessError) as error:
    sys.exit(f"error: {error}")
