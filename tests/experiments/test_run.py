"""python -m experiments.run: grids at two steps, resumed after a stop, and refused beside results of another config."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from diffjax.compiled import plan
from experiments import cost, grid, launch, results
from tests.experiments.printed import parsed

# Models small enough for the command's own start to take longest, and machine code without optimisation
SMALL = (
  "model.num_layers=1",
  "model.embed_dim=32",
  "model.head_dim=8",
  "model.ffn_dim=32",
  "eval.rows=8",
  "train.batch_size=4",
)


def start(*args):
  """The command as a user starts it, in a process with processes of its own."""
  return subprocess.Popen(
    [sys.executable, "-m", "experiments.run", *args],
    cwd=grid.FOLDER.parent,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


@pytest.fixture(scope="module")
def places(tmp_path_factory):
  """Flags: a workdir, a place for results and a small text, for all tests of this file."""
  directory = tmp_path_factory.mktemp("experiments")
  (directory / "text").mkdir()
  for index in range(30):
    (directory / "text" / f"{index}.txt").write_text(
      f"line {index} of a text\n" * 60
    )
  text = f"--set=data.source=text:{directory}/text/*.txt"
  return directory, [
    f"--workdir={directory}/runs",
    f"--out={directory}/out",
    text,
    "--set=data.validation_fraction=0.3",
  ]


def small(*fields):
  return [f"--set={field}" for field in (*SMALL, *fields)]


@pytest.mark.full
def test_ablations_at_two_steps_and_again(run, places):
  """A slice of the grid, then more of it, side by side: finished runs are not repeated, and other configs are refused."""
  directory, flags = places
  flags = [*flags, "--steps=2", *small()]
  _, errors = run(
    "ablations",
    *flags,
    "--only=diff/seed_0",
    "--only=transformer/seed_0",
    "--slice=1/2",
  )
  assert (
    "1 of 1 runs to do" in errors
    and "this slice is done" in errors
    and not (directory / "out/results.json").exists()
  )
  path = directory / "runs/ablations/cpu/diff/seed_0/result.json"
  before = path.stat().st_mtime_ns
  out, errors = run(
    "ablations",
    *flags,
    "--only=diff/seed_[01]",
    "--only=transformer/seed_0",
    "--side_by_side=2",
  )
  assert (
    "2 of 3 runs to do" in errors
    and "1 run left, about " in errors
    and "(3 of 65 runs)" in out
    and path.stat().st_mtime_ns == before
  )
  found = json.loads((directory / "out/results.json").read_text())
  assert [each["name"] for each in found["runs"]] == [
    "transformer/seed_0",
    "diff/seed_0",
    "diff/seed_1",
  ]
  assert found["config"]["train.steps"] == 2 and all(
    each["results"]["validation/loss"] > 0 for each in found["runs"]
  )
  assert (
    len({each["results"]["validation/loss"] for each in found["runs"]}) == 3
  ), "seeds and variants differ"
  assert (
    "| diff | " in (directory / "out/table.md").read_text()
    and (directory / "out/plot.png").stat().st_size > 5000
  )
  path.unlink()
  _, errors = run("ablations", *flags, "--only=diff/seed_0")
  assert "0 of 1 runs to do" in errors, "results.json holds it"
  (errors,) = run("ablations", *flags[:-1], "--only=diff/seed_0", code=1)[
    1
  ].splitlines()
  assert (
    "holds results of another config" in errors
    and "train.batch_size is 4 there and 16 now" in errors
  )
  (directory / "out/results.json").unlink()
  _, errors = run("ablations", *flags[:-1], "--only=diff/seed_0", code=1)
  assert (
    "result.json holds results of another config (transformer/seed_0)" in errors
  ), "what could not be collected is said before training"
  for path in (directory / "runs/ablations/cpu").glob("*/seed_*/result.json"):
    path.unlink()
  _, errors = run("ablations", *flags[:-1], "--only=diff/seed_0", code=1)
  assert (
    "diff/seed_0 holds a run of another config" in errors
    and "train.batch_size is 4 there and 16 now" in errors
  )


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on(run, places):
  """At SIGTERM training saves and no process is left; the same command finishes the run."""
  directory, flags = places
  flags = [
    *flags,
    "--steps=600",
    *small("train.log_interval=1", "data.length=64"),
    "--only=diff/seed_0",
    f"--workdir={directory}/stopped",
    f"--out={directory}/stopped_out",
  ]
  process = start("ablations", *flags)
  workdir = directory / "stopped/ablations/cpu/diff/seed_0"
  deadline = time.monotonic() + 300
  while (
    not (workdir / "metrics.jsonl").exists()
    or (workdir / "metrics.jsonl").read_text().count("\n") < 5
  ):
    assert time.monotonic() < deadline and process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  out, errors = process.communicate(timeout=120)
  assert process.returncode == 130 and "SIGTERM: saving" in errors, errors
  assert (
    "0 of 1 runs are done; the same command goes on\n" in errors
    and "error: interrupted" in errors
  ), errors
  steps = [
    json.loads(line)["step"]
    for line in (workdir / "metrics.jsonl").read_text().splitlines()
  ]
  assert (
    5 <= steps[-1] < 600
    and not (workdir / "result.json").exists()
    and not list((directory / "stopped_out").glob("*"))
  )
  spent = json.loads((workdir / "spent.json").read_text())
  assert spent["seconds"] > 0
  (workdir / "spent.json").write_text(
    json.dumps({**spent, "seconds": 1e6})
  )  # as if the first start had taken long
  out, errors = run("ablations", *flags)
  assert f"resuming from step {steps[-1]}" in errors and "(1 of 65 runs)" in out
  result = json.loads((workdir / "result.json").read_text())
  assert (
    result["config"]["train"]["steps"] == 600 and result["seconds"] > 1e6
  ), "both starts"


@pytest.mark.full
def test_retrieval_at_two_steps(run, places):
  """Data, training, measurement and plot of a variant; then nothing is left to do."""
  directory, _ = places
  flags = [
    "--steps=2",
    *small(),
    f"--workdir={directory}/runs",
    f"--out={directory}/retrieval",
    "--only=diff/seed_0",
  ]
  for left in (1, 0):
    out, errors = run("retrieval", *flags)
    assert f"{left} of 1 runs to do" in errors and "(1 of 30 runs)" in out
  found = json.loads((directory / "retrieval/results.json").read_text())
  assert (
    found["task"]["samples"] == 200 and "data.source" not in found["config"]
  )
  (only,) = found["runs"]
  assert len(only["results"]["grid"]) == len(found["task"]["cells"]) and [
    row["step"] for row in only["results"]["curve"]
  ] == [2]
  assert (
    0 <= only["results"]["accuracy"] <= 1
    and (directory / "retrieval/plot.png").stat().st_size > 5000
  )


def test_bad_input_is_one_line(run, tmp_path):
  names = ", ".join(grid.names())
  for args, code, message in (
    (
      [],
      2,
      f"error: name an experiment: python -m experiments.run NAME; there are {names}",
    ),
    (
      ["nothing"],
      1,
      f"error: there is no experiment 'nothing'; there are {names}",
    ),
    (
      ["ablations", "--grid=moon"],
      1,
      "error: --grid=moon: ablations has no such grid; there are cpu, gpu, tpu",
    ),
    (["ablations", "--only=banana"], 1, "error: --only=banana matches no run"),
    (
      ["ablations", "--slice=2/2"],
      1,
      "error: --slice=2/2: must be INDEX/COUNT",
    ),
    (
      ["ablations", "--set=train.step=3"],
      1,
      "error: config.train.step is not a config field: did you mean train.steps?",
    ),
    (
      ["ablations", "--set=dif:eval.rows=4"],
      1,
      "error: --set=dif:eval.rows: the grid has no variant 'dif'; there are transformer",
    ),
    (
      ["ablations", "--set=train"],
      1,
      "error: --set=train: must be FIELD=VALUE",
    ),
    (
      ["ablations", "--set=data.seed=7"],
      1,
      "error: --set=data.seed: seeds are the grid's, 0, 1, 2, 3, 4; --only='*/seed_0' chooses one",
    ),
    (
      ["ablations", "--workdir=gs://bucket/runs"],
      1,
      "error: --workdir=gs://bucket/runs: must be a local directory",
    ),
    (
      ["ablations", "--grid=gpu", "--workdir=/proc/nowhere"],
      1,
      "error: cannot write in /proc/nowhere/ablations/gpu: No such",
    ),
    (
      ["throughput", "--grid=gpu", "--cost"],
      1,
      "error: throughput trains nothing",
    ),
    (
      ["noisy_lookup", "--aot=v5e:1x1"],
      1,
      "error: noisy_lookup takes no step of diffjax.train, so there is nothing to compile",
    ),
    (
      ["ablations", "--aot=v5e:3x3"],
      1,
      "error: transformer: --topology=v5e:3x3: there is no such slice",
    ),
    (["ablations", "--steps=0"], 2, "error: flag --steps=0"),
    (["ablations", "banana"], 2, "error: unexpected argument 'banana'"),
    (["--only=diff", "banana"], 1, "error: there is no experiment 'banana'"),
  ):
    _, errors = run(*args, f"--out={tmp_path}", code=code)
    assert errors.startswith(message) and len(errors.splitlines()) == 1, errors


def test_costs_and_commands_are_printed(run):
  out, _ = run("ablations", "--grid=tpu", "--cost")
  line = next(
    line for line in out.splitlines() if line.startswith("| diff,size=1b |")
  )
  assert [cell.strip() for cell in line.split("|")[2:6]] == [
    "1",
    "1,410 M",
    "10.5 B",
    "9.82e+19",
  ]
  assert out.startswith("chip-hours at 40% of the peak\n")
  out, _ = run("ablations", "--print", "--only=diff/seed_3", "--workdir=/runs")
  assert out.endswith(
    "-m diffjax.train --config=experiments/ablations/config.py:diff --workdir=/runs/ablations/cpu/diff/seed_3 "
    "--config.train.seed=3 --config.data.seed=3\n"
  )


def test_costs_of_small_grids_are_those_of_finished_runs(run, tmp_path):
  """Of this machine, as many at a time; results of another config are passed over."""
  chosen = grid.expand(
    "ablations",
    grid.Grid(("diff",), "diff", range(4)),
    {"data.source": "text:x"},
  )
  here, elsewhere = (
    results.machine(launch.Devices("cpu", kind, 1), 1)
    for kind in ("cpu", "other")
  )
  for one, seconds, machine in zip(
    chosen,
    (100.0, 200.0, 900.0, None),
    (here, here, elsewhere, here),
    strict=True,
  ):
    results.write_run(
      tmp_path / "ablations/cpu" / one.name,
      one,
      {},
      {"validation/loss": 1.0},
      seconds,
      machine,
    )
  flags = [
    f"--workdir={tmp_path}",
    f"--out={tmp_path}/out",
    "--only=diff",
    "--cost",
  ]
  out, _ = run("ablations", *flags, "--set=data.source=text:x")
  assert (
    out.startswith(f"hours of {here}, 1 at a time\n")
    and "| 150 | 0.208 | 2 finished runs |" in out
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      cost, "_time_steps", lambda shapes, env: dict.fromkeys(shapes, 0.25)
    )
    out, _ = run(
      "ablations", *flags, "--set=data.source=text:x", "--set=train.steps=400"
    )
  assert "| 100 | 0.139 | steps of 0.25 s |" in out


def test_a_changed_grid_lies_apart(run):
  """Its results are neither mixed with the unchanged grid's nor refused because of them. The place of data is no change."""
  places = []
  for flags in (
    [],
    ["--set=mesh.fsdp=1"],
    ["--steps=2"],
    ["--steps=2", "--set=eval.rows=8"],
  ):
    out, _ = run("ablations", "--print", "--only=diff/seed_0", *flags)
    places.append(
      re.search(r"--workdir=(\S+)/ablations/cpu/diff/seed_0", out)[
        1
      ].rpartition("/runs/")[2]
    )
  assert places[:2] == ["experiments"] * 2 and len(set(places[1:])) == 3
  assert all(
    re.fullmatch(r"experiments_[0-9a-f]{8}", place) for place in places[2:]
  )


@pytest.mark.parametrize("name", grid.names())
def test_the_commands_that_are_printed_train_what_the_grid_says(
  run, tmp_path, name
):
  """Every variant's line, after the pretrained run's, gives the run's whole config."""
  changes = {"train.steps": 6, "optimizer.warmup_steps": 1, "eval.interval": 2}
  settings = [f"--set={field}={value}" for field, value in changes.items()]
  for size in {
    size for each in grid.experiments_of(name) for size in each.grids
  }:
    experiment = grid.load(name, size)
    chosen, base = experiment.grids[size], tmp_path / name / size
    wanted = {}
    for each in grid.expand(name, chosen, changes):
      if each.seed != chosen.seeds[-1]:
        continue
      before = tmp_path / "ablations" / size / each.name
      if each.pretrained:
        wanted[str(before)] = each.pretrained.config
      if experiment.trains:
        fields = {
          **(
            experiment.prepare(base, each.config) if experiment.prepare else {}
          )
        }
        fields |= {"train.init_from": str(before)} if each.pretrained else {}
        wanted[str(base / each.name)] = grid.with_fields(each, fields).config
    trains = name not in ("noisy_lookup", "throughput")
    flags = [
      f"--grid={size}",
      "--print",
      f"--workdir={tmp_path}",
      f"--only=*/seed_{chosen.seeds[-1]}",
      *settings,
    ]
    out, errors = run(name, *flags, code=0 if trains else 1)
    assert (
      dict(map(parsed, out.splitlines())) == wanted and bool(wanted) == trains
    )
    assert trains or errors.endswith(
      f"error: {name} has no commands that train; run it without --print\n"
    )


@pytest.mark.full
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
def test_variants_are_compiled_for_tpus_that_are_not_there(run, monkeypatch):
  """There is one row per variant, whatever the seeds; variants that are too large are named after the rows."""
  flags = [
    "ablations",
    "--aot=v5e:1x1",
    *small("model.max_length=64", "data.length=64"),
  ]
  out, _ = run(*flags, "--only=diff")
  row = next(line for line in out.splitlines() if line.startswith("| diff |"))
  assert (
    re.fullmatch(
      r"\| diff \| 0\.\d\d of 15\.75 \| yes \| \d[\d.e+]+ \| \d+ s \|", row
    )
    and out.count("\n") == 4
  ), out
  compiled = []

  def too_large(config, topology):
    compiled.append((config.model.attention, topology))
    return plan.Plan(
      1,
      "TPU v5 lite",
      {},
      9 << 30,
      9 << 30,
      0,
      0,
      0,
      round(15.75 * 2**30),
      {},
      "",
      (),
      1.0,
    )

  monkeypatch.setattr(plan, "compile_plan", too_large)
  out, errors = run(*flags, "--only=transformer", code=1)
  assert (
    compiled == [("softmax", "v5e:1x1")]
    and "| transformer | 18.00 of 15.75 | no |" in out
  )
  assert (
    errors
    == "error: transformer: too large for v5e:1x1; python -m diffjax.aot says what would take less\n"
  )


# Of each experiment with a grid for CPUs. A test above asks whether the commands of the others are what the grid says, and test_grid.py
# whether they take a step
TRAINED = {
  "ablations": ("transformer_norm", "diff_v2_linear"),
  "eight_heads": ("diff",),
  "fairness": ("gated",),
  "long_context": ("diff_v2",),
  "noisy_lookup": ("diff_lambda_zero",),
  "order_robustness": ("transformer_norm",),
  "outliers": ("diff",),
  "retrieval": ("diff_without_norm",),
  "scaling": ("diff,size=0.1m,times=0.5", "diff_v2,size=0.2m"),
  "throughput": ("tiny,length=256",),
  "tokens": ("diff_v2,times=4",),
}


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINED)
def test_every_experiment_at_two_steps(run, places, tmp_path, name):
  """From the data to the plot, with the grid's own sizes, except for the layers of the model with long rows."""
  directory, flags = places
  flags = {
    "ablations": flags[2:],
    "long_context": ["--set=model.num_layers=1"],
  }.get(name, [])
  variants = TRAINED[name]
  only = [
    f"--only={variant}/seed_{grid.load(name, 'cpu').grids['cpu'].seeds[0]}"
    for variant in variants
  ]
  sizes = ["--set=eval.rows=4", "--set=train.batch_size=2"]
  out, _ = run(
    name, *flags, "--steps=2", *only, f"--workdir={tmp_path}", *sizes
  )
  assert (
    f"{tmp_path}/{name}/cpu: results.json, table.md" in out
    and f"({len(variants)} of " in out
  )
  assert all(f"| {variant} |" in out for variant in variants)
