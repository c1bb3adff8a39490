"""The three twins of configs/tiny.py, three seeds each: bits per byte on 2,048 validation rows.

    python -m benchmarks.tiny_twins --workdir=runs/tiny_twins

Prints the README's table and writes it as benchmarks/tiny_twins.json. Stopped, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import jax

VARIANTS = ("transformer", "diff", "diff_v2")
FIELDS = ("--config.eval.rows=2048", "--config.eval.interval=600", "--config.train.sample_tokens=0")


def run(variant: str, seed: int, workdir: pathlib.Path) -> dict[str, float]:
  """Trains one model and returns the metrics of its last line, and what came before them."""
  directory = workdir / f"{variant}_{seed}"
  seeds = (f"--config.train.seed={seed}", f"--config.data.seed={seed}")
  command = (sys.executable, "-m", "diffjax.train", f"--config=configs/tiny.py:{variant}", f"--workdir={directory}", *FIELDS, *seeds)
  subprocess.run(command, check=True)
  metrics: dict[str, float] = {}
  for line in (directory / "metrics.jsonl").read_text().splitlines():
    metrics |= json.loads(line)
  return metrics


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/tiny_twins"))
  parser.add_argument("--seeds", type=int, default=3)
  flags = parser.parse_args()
  names = ("bits_per_byte", "loss", "ar_hit", "others", "trigram_bits_per_byte")
  runs = []
  for seed in range(flags.seeds):
    for variant in VARIANTS:
      metrics = run(variant, seed, flags.workdir)
      runs.append({"variant": variant, "seed": seed, **{name: metrics[f"validation/{name}"] for name in names}})
  machine = f"{platform.machine()}, {os.cpu_count()} CPUs, JAX {jax.__version__}, Python {platform.python_version()}"
  result = {"date": str(datetime.date.today()), "machine": machine, "fields": FIELDS, "runs": runs}
  pathlib.Path("benchmarks/tiny_twins.json").write_text(json.dumps(result, indent=1) + "\n")
  print(
    "| bits per byte | " + " | ".join(f"seed {seed}" for seed in range(flags.seeds)) + " | mean ± sd |\n" + "|---" * (flags.seeds + 2) + "|"
  )
  for variant in VARIANTS:
    values = [entry["bits_per_byte"] for entry in runs if entry["variant"] == variant]
    cells = " | ".join(f"{value:.3f}" for value in values)
    print(f"| {variant} | {cells} | {statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f} |")
  trigram = [entry["trigram_bits_per_byte"] for entry in runs[:: len(VARIANTS)]]
  print(f"| byte trigram | {' | '.join(f'{value:.3f}' for value in trigram)} | |")


if __name__ == "__main__":
  main()
