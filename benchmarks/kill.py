"""Kills training again and again, and compares what comes out with a run that was left alone: python -m benchmarks.kill --times=100

Every life of the run is ended by SIGKILL at a random moment: while it starts, takes steps, evaluates or saves (it does so every few steps).
Once a run has reached its last step, its losses and validation losses (metrics.jsonl), its batches (a sha256 each, by step, of all lives)
and its final parameters must equal those of the uninterrupted run bit for bit. Prints a line a kill and a table; exits with 1 if anything
differs. `--json=FILE` writes the table.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from diffjax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimizerConfig, TrainConfig

CONFIG = Config(
  model=ModelConfig(num_layers=2, embed_dim=64, num_heads=2, num_kv_heads=2, head_dim=16, ffn_dim=128),
  optimizer=OptimizerConfig(warmup_steps=10),
  train=TrainConfig(steps=300, batch_size=8, log_interval=1, checkpoint_interval=5, keep_checkpoints=2, sample_tokens=0),
  eval=EvalConfig(interval=50, rows=16),
)
# Seconds that a life lasts, at most, from its first batch; and the share of lives that end before that, while starting.
_LIFE, _STARTING = 4.0, 0.15


def run_child(directory: pathlib.Path, workdir: str, mode: str) -> None:
  """Trains as the command does, and appends every batch that it takes to WORKDIR.batches."""
  from diffjax.training import loop, runtime

  runtime.keep_compiled_programs()
  runtime.keep_freed_pages()
  data = DataConfig(
    source=f"text:{directory}/text/*.txt", validation_fraction=0.1, length=64, prepared_dir=str(directory / "rows"), mode=mode
  )
  log = os.open(f"{workdir}.batches", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
  step, put_batch, make_metrics = 0, loop.put_batch, loop.Metrics

  def metrics(*args, resume_step, **options):
    nonlocal step
    step = resume_step
    return make_metrics(*args, resume_step=resume_step, **options)

  def record(batch, mesh):
    nonlocal step
    step += 1
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(batch[name]).tobytes() for name in sorted(batch))).hexdigest()
    os.write(log, f"{step} {digest}\n".encode())
    return put_batch(batch, mesh)

  loop.put_batch, loop.Metrics = record, metrics
  loop.train(dataclasses.replace(CONFIG, data=data), workdir)


def losses(workdir: pathlib.Path) -> list[tuple]:
  """What the log says of every step but the time."""
  names = ("step", "train/loss", "train/grad_norm", "validation/loss")
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [tuple(line.get(name) for name in names) for line in lines]


def batches(workdir: pathlib.Path) -> dict[int, set[str]]:
  """Digests of the batches that any life took for each step."""
  seen = collections.defaultdict(set)
  for line in pathlib.Path(f"{workdir}.batches").read_text().splitlines():
    step, digest = line.split()
    seen[int(step)].add(digest)
  return dict(seen)


def parameters(workdir: pathlib.Path) -> str:
  """sha256 of the final checkpoint's parameters."""
  from diffjax.parallel.mesh import make_mesh
  from diffjax.training.checkpoint import load_params
  from diffjax.training.step import make_init

  abstract = make_init(CONFIG, make_mesh(CONFIG.mesh))[1].params
  bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)
  leaves = jax.tree.leaves(load_params(workdir, bare, step=CONFIG.train.steps))
  return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def _first_difference(found, expected) -> str:
  """In words; of logs and batches, the first entry that only one side has."""
  if isinstance(found, str):
    return f"{found} instead of {expected}"
  pairs = (
    itertools.zip_longest(sorted(found.items()), sorted(expected.items()))
    if isinstance(found, dict)
    else itertools.zip_longest(found, expected)
  )
  return next(f"{mine} instead of {theirs}" for mine, theirs in pairs if mine != theirs)


def moment(workdir: pathlib.Path, taken: int) -> str:
  """What the killed life was doing, by what it left."""
  checkpoints = workdir / "checkpoints"
  steps = list(checkpoints.iterdir()) if checkpoints.exists() else []
  if any("tmp" in path.name for path in steps):
    return "writing a checkpoint"
  if any(path.name.isdecimal() and not (path / "manifest.json").exists() for path in steps):
    return "writing a manifest or pruning"
  return "taking steps" if taken else "starting"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--times", type=int, default=20, help="kills")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument("--mode", choices=("prepared", "streamed"), default="prepared", help="config.data.mode")
  parser.add_argument("--json", help="file for the table")
  parser.add_argument("--child", nargs=2, metavar=("DIRECTORY", "WORKDIR"), help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.child:
    run_child(pathlib.Path(flags.child[0]), flags.child[1], flags.mode)
    return

  rng, began = random.Random(flags.seed), time.time()
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch)
    (directory / "text").mkdir()
    for index in range(200):
      text = "".join(f"document {index}, line {line}: {line * index % 97}\n" for line in range(60))
      (directory / "text" / f"{index}.txt").write_text(text)

    def start(workdir: pathlib.Path) -> subprocess.Popen:
      command = [sys.executable, "-m", "benchmarks.kill", f"--mode={flags.mode}", "--child", str(directory), str(workdir)]
      return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def finish(child: subprocess.Popen) -> None:
      errors = child.communicate()[1]
      if child.returncode:
        sys.exit(f"a run ended by itself with {child.returncode}:\n{errors}")

    whole = directory / "whole"
    finish(start(whole))
    started = time.time()
    moments: collections.Counter[str] = collections.Counter()
    kills, runs, lost, differing = 0, 0, 0, []
    while kills < flags.times or runs == 0:
      workdir, runs = directory / f"run{runs}", runs + 1
      while True:
        log = pathlib.Path(f"{workdir}.batches")
        before = len(log.read_text().splitlines()) if log.exists() else 0
        child, started = start(workdir), time.time()
        if kills >= flags.times:
          finish(child)
          break
        starting = rng.random() < _STARTING
        delay = rng.uniform(0, _LIFE)
        while not starting and child.poll() is None and (not log.exists() or len(log.read_text().splitlines()) == before):
          time.sleep(0.01)
        deadline = time.time() + delay
        while child.poll() is None and time.time() < deadline:
          time.sleep(0.001)
        if child.poll() is not None:
          finish(child)
          break
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += 1
        taken = (len(log.read_text().splitlines()) if log.exists() else 0) - before
        what = moment(workdir, taken)
        moments[what] += 1
        lost += taken
        print(f"kill {kills}: {time.time() - started:.1f} s after its start, {taken} steps into it, {what}", flush=True)
      for name, read in (("losses", losses), ("batches", batches), ("final parameters", parameters)):
        found, expected = read(workdir), read(whole)
        if found != expected:
          differing.append(f"run {runs}: its {name} differ, first {_first_difference(found, expected)}")
    table = {
      "kills": kills,
      "moments": dict(moments),
      "runs finished": runs,
      "steps of a run": CONFIG.train.steps,
      "steps taken in killed lives": lost,
      "differences from the uninterrupted run": differing,
      "mode": flags.mode,
      "seed": flags.seed,
      "seconds": round(time.time() - began),
      "date": time.strftime("%Y-%m-%d"),
      "jax": jax.__version__,
      "python": platform.python_version(),
    }
  print(json.dumps(table, indent=1))
  if flags.json:
    pathlib.Path(flags.json).write_text(json.dumps(table, indent=1) + "\n")
  sys.exit(1 if differing else 0)


if __name__ == "__main__":
  main()
