"""python -m experiments.run as typed: grids at two steps, resumed where they were stopped, and refused where they do not fit."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments import grid

# Models small enough for the command's own start to take longest, and machine code without optimisation
SMALL = ("model.num_layers=1", "model.embed_dim=32", "model.head_dim=8", "model.ffn_dim=32", "eval.rows=8", "train.batch_size=4")


def start(*args, **options):
  environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
  return subprocess.Popen(
    [sys.executable, "-m", "experiments.run", *args], cwd=grid.FOLDER.parent, env=environment, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
  )  # fmt: skip


def run(*args, code=0):
  process = start(*args)
  out, errors = process.communicate(timeout=900)
  assert process.returncode == code and "Traceback" not in errors, errors
  return out, errors


@pytest.fixture(scope="module")
def places(tmp_path_factory):
  """Flags: a workdir, a place for results and a small text, for all tests of this file."""
  directory = tmp_path_factory.mktemp("experiments")
  (directory / "text").mkdir()
  for index in range(30):
    (directory / "text" / f"{index}.txt").write_text(f"line {index} of a text\n" * 60)
  text = f"--set=data.source=text:{directory}/text/*.txt"
  return directory, [f"--workdir={directory}/runs", f"--out={directory}/out", text, "--set=data.validation_fraction=0.3"]


def small(*fields):
  return [f"--set={field}" for field in (*SMALL, *fields)]


def test_ablations_at_two_steps_and_again(places):
  """A part of the grid, then more of it, side by side: what is done is not done again; then other configs are refused."""
  directory, flags = places
  flags = [*flags, "--steps=2", *small()]
  out, errors = run("ablations", *flags, "--only=diff/seed_0,transformer/seed_0")
  assert "2 of 2 runs to do" in errors and "(2 of 65 runs)" in out
  path = directory / "runs/ablations/cpu/diff/seed_0/result.json"
  before = path.stat().st_mtime_ns
  _, errors = run("ablations", *flags, "--only=diff/seed_[01],transformer/seed_[01]", "--side_by_side=2")
  assert "2 of 4 runs to do" in errors and path.stat().st_mtime_ns == before
  found = json.loads((directory / "out/results.json").read_text())
  assert [each["name"] for each in found["runs"]] == ["transformer/seed_0", "diff/seed_0", "transformer/seed_1", "diff/seed_1"]
  assert found["config"]["train.steps"] == 2 and all(each["results"]["validation/loss"] > 0 for each in found["runs"])
  assert "| diff | " in (directory / "out/table.md").read_text() and (directory / "out/plot.png").stat().st_size > 5000
  path.unlink()
  _, errors = run("ablations", *flags, "--only=diff/seed_0")
  assert "0 of 1 runs to do" in errors, "results.json holds it"
  _, errors = run("ablations", *flags[:-1], "--only=diff/seed_0", code=1)
  assert (
    len(errors.splitlines()) == 1 and "holds results of another config" in errors and "train.batch_size is 4 there and 16 now" in errors
  )
  for path in (directory / "runs/ablations/cpu/diff/seed_0/result.json", directory / "out/results.json"):
    path.unlink(missing_ok=True)
  _, errors = run("ablations", *flags[:-1], "--only=diff/seed_0", code=1)
  assert "diff/seed_0 holds a run of another config" in errors and "train.batch_size is 4 there and 16 now" in errors


def test_a_run_that_was_stopped_goes_on(places):
  """SIGTERM in the middle: training saves, nothing is left running, and the same command ends what was begun."""
  directory, flags = places
  flags = [
    *flags,
    "--steps=600",
    *small("train.log_interval=1"),
    "--only=diff/seed_0",
    f"--workdir={directory}/stopped",
    f"--out={directory}/stopped_out",
  ]
  process = start("ablations", *flags)
  workdir = directory / "stopped/ablations/cpu/diff/seed_0"
  deadline = time.monotonic() + 300
  while not (workdir / "metrics.jsonl").exists() or (workdir / "metrics.jsonl").read_text().count("\n") < 5:
    assert time.monotonic() < deadline and process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  out, errors = process.communicate(timeout=120)
  assert process.returncode == 130 and "SIGTERM: saving" in errors and "error: interrupted" in errors, errors
  steps = [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert 5 <= steps[-1] < 600 and not (workdir / "result.json").exists() and not list((directory / "stopped_out").glob("*"))
  spent = json.loads((workdir / "spent.json").read_text())["seconds"]
  out, errors = run("ablations", *flags)
  assert f"resuming from step {steps[-1]}" in errors and "(1 of 65 runs)" in out
  result = json.loads((workdir / "result.json").read_text())
  assert result["config"]["train"]["steps"] == 600 and result["seconds"] > spent + 1 > 2, "both starts"


def test_retrieval_at_two_steps(places):
  """Data, training, measurement and plot of two variants, in two slices as two hosts would, then collected."""
  directory, flags = places
  flags = ["--steps=2", *small(), f"--workdir={directory}/runs", f"--out={directory}/retrieval", "--only=transformer/seed_0,diff/seed_0"]
  for index in range(2):
    _, errors = run("retrieval", *flags, f"--slice={index}/2")
    assert "1 of 1 runs to do" in errors and "this slice is done" in errors
  out, errors = run("retrieval", *flags)
  assert "0 of 2 runs to do" in errors and "(2 of 30 runs)" in out
  found = json.loads((directory / "retrieval/results.json").read_text())
  assert found["task"]["samples"] == 200 and "data.source" not in found["config"]
  for each in found["runs"]:
    assert len(each["results"]["grid"]) == len(found["task"]["cells"]) and [row["step"] for row in each["results"]["curve"]] == [2]
    assert 0 <= each["results"]["accuracy"] <= 1
  assert (directory / "retrieval/plot.png").stat().st_size > 5000


def test_bad_input_is_one_line(command, tmp_path):
  names = ", ".join(grid.names())
  for args, code, message in (
    ([], 2, f"error: name an experiment: python -m experiments.run NAME; there are {names}"),
    (["nothing"], 1, f"error: there is no experiment 'nothing'; there are {names}"),
    (["ablations", "--grid=moon"], 1, "error: --grid=moon: ablations has no such grid; there are cpu, session, gpu, tpu"),
    (["ablations", "--only=banana"], 1, "error: --only=banana matches no run"),
    (["ablations", "--slice=2/2"], 1, "error: --slice=2/2: must be INDEX/COUNT"),
    (["ablations", "--set=train.step=3"], 1, "error: config.train.step is not a config field: did you mean train.steps?"),
    (["ablations", "--set=train"], 1, "error: --set=train: must be FIELD=VALUE"),
    (["ablations", "--set=data.seed=7"], 1, "error: --set=data.seed: seeds are the grid's, 0, 1, 2, 3, 4; --only='*/seed_0' chooses one"),
    (["ablations", "--workdir=gs://bucket/runs"], 1, "error: --workdir=gs://bucket/runs: must be a local directory"),
    (["ablations", "--grid=gpu", "--workdir=/proc/nowhere"], 1, "error: cannot write in /proc/nowhere/ablations/gpu: No such"),
    (["throughput", "--cost"], 1, "error: throughput trains nothing"),
    (["ablations", "--aot=v5e:3x3"], 1, "error: transformer: --topology=v5e:3x3: there is no such slice"),
    (["ablations", "--steps=0"], 2, "error: flag --steps=0"),
    (["ablations", "banana"], 2, "error: unexpected argument 'banana'"),
    (["--only=diff", "banana"], 1, "error: there is no experiment 'banana'"),
  ):
    result = command("experiments.run", *args, f"--out={tmp_path}")
    assert result.returncode == code and result.stderr.startswith(message) and len(result.stderr.splitlines()) == 1, result.stderr


def test_costs_and_commands_are_printed():
  out, _ = run("ablations", "--grid=tpu", "--cost")
  line = next(line for line in out.splitlines() if line.startswith("| diff@1b |"))
  assert [cell.strip() for cell in line.split("|")[2:6]] == ["1", "1,410 M", "10.5 B", "9.82e+19"]
  out, _ = run("ablations", "--print", "--only=diff/seed_3", "--workdir=/runs")
  assert out.endswith(
    "-m diffjax.train --config=experiments/ablations/config.py:diff --workdir=/runs/ablations/cpu/diff/seed_3 "
    "--config.train.seed=3 --config.data.seed=3\n"
  )


def test_a_changed_grid_lies_apart():
  """So that it is neither taken for the grid as it is nor refused by its results; where data lies is no change."""
  places = []
  for flags in ([], ["--set=mesh.fsdp=1"], ["--steps=2"], ["--steps=2", "--set=eval.rows=8"]):
    out, _ = run("ablations", "--print", "--only=diff/seed_0", *flags)
    places.append(re.search(r"--workdir=(\S+)/ablations/cpu/diff/seed_0", out)[1].rpartition("/runs/")[2])
  assert places[:2] == ["experiments"] * 2 and len(set(places[1:])) == 3
  assert all(re.fullmatch(r"experiments_[0-9a-f]{8}", place) for place in places[2:])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler, libtpu, is not installed")
def test_variants_are_compiled_for_tpus_that_are_not_there():
  """One row a variant, whatever the seeds; what is too large is named at the end, after its row."""
  flags = ["ablations", "--aot=v5e:1x1", *small("model.max_length=64", "data.length=64")]
  out, _ = run(*flags, "--only=diff")
  row = next(line for line in out.splitlines() if line.startswith("| diff |"))
  assert re.fullmatch(r"\| diff \| 0\.\d\d of 15\.75 \| yes \| \d[\d.e+]+ \| \d+ s \|", row) and out.count("\n") == 4, out
  out, errors = run(*flags, "--set=model.embed_dim=32768", "--set=model.ffn_dim=32768", "--only=transformer/seed_3", code=1)
  assert "| transformer |" in out and " of 15.75 | no |" in out
  assert errors == "error: transformer: too large for v5e:1x1; python -m diffjax.aot says what would take less\n"


@pytest.mark.full
@pytest.mark.parametrize("name", grid.names())
def test_every_grid_at_two_steps(places, tmp_path, name):
  """Every variant but those that differ in their number of steps alone."""
  directory, flags = places
  flags = flags[2:] if name == "ablations" else []
  runs = grid.expand(name, grid.load(name).grids["cpu"], {"train.steps": 2, "optimizer.warmup_steps": 1, "eval.interval": 2})
  chosen = {str(run.settings()): run for run in reversed(runs) if run.seed == 0}.values()
  out, _ = run(
    name,
    *flags,
    "--steps=2",
    f"--only={','.join(each.name for each in chosen)}",
    f"--side_by_side={1 if name == 'throughput' else 2}",
    f"--workdir={tmp_path}",
    "--set=eval.rows=8",
    "--set=train.batch_size=4",
  )
  assert f"{tmp_path}/{name}/cpu: results.json, table.md" in out and f"({len(chosen)} of {len(runs)} runs)" in out
  assert all(f"| {each.variant} |" in out for each in chosen)
