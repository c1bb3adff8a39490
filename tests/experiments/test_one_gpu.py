"""experiments/one_gpu: the plan, the text, the choice of learning rates and of runs, and the whole chain on a CPU with tiny models."""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tarfile
import time
import zipfile

import jax
import psutil
import pytest

from benchmarks import wheels
from diffjax.model.flops import parameter_count
from experiments import grid, results
from experiments.one_gpu import on_gpu, pack
from experiments.one_gpu.config import RATES, get_config
from experiments.one_gpu.experiment import EXPERIMENT, best_rates

SMALL = [
  "model.vocab_size=300",
  "model.num_layers=1",
  "model.embed_dim=32",
  "model.head_dim=4",
  "model.ffn_dim=32",
  "data.length=64",
  "data.validation_fraction=0.3",
  "train.batch_size=4",
  "eval.rows=8",
]
ARCHITECTURES = ("transformer", "diff", "diff_v2")


def expand(name):
  return grid.expand("one_gpu", EXPERIMENT.grids[name], {})


def tried(losses):
  """Results of pilots with these losses, by variant."""
  return {
    "runs": [
      {"variant": variant, "seed": 100, "results": {"validation/loss": loss}}
      for variant, loss in losses.items()
    ]
  }


def test_the_plan():
  """27M parameters each, the heads of the plan, 79M tokens, pilots of a quarter on a seed that is not reported, one kind of attention."""
  pilots, runs = expand("pilot"), expand("gpu")
  sizes = [parameter_count(run.config.model) for run in runs]
  assert max(sizes) < 27.3e6 and max(sizes) < min(sizes) * 1.001
  heads = {
    run.variant: (run.config.model.num_heads, run.config.model.head_dim)
    for run in runs
  }
  assert heads == {
    "transformer": (16, 32),
    "diff": (8, 32),
    "diff_v2": (16, 32),
  }
  tokens = {
    run.config.train.steps
    * run.config.train.batch_size
    * run.config.data.length
    for run in runs
  }
  assert (
    tokens
    == {4 * run.config.train.steps * 64 * 1024 for run in pilots}
    == {78_643_200}
  )
  assert (
    not {run.seed for run in pilots} & {run.seed for run in runs}
    and len({run.seed for run in runs}) == 3
  )
  assert {
    run.config.model.attention_implementation for run in (*pilots, *runs)
  } == {"two_call"}
  same = lambda config: (
    config.data,
    dataclasses.replace(config.optimizer, learning_rate=0.0),
    config.train,
  )
  assert len({same(run.config) for run in runs if run.seed == 0}) == 1
  assert {
    (run.variant.partition(",")[0], run.config.optimizer.learning_rate)
    for run in pilots
  } == {
    (architecture, rate) for architecture in ARCHITECTURES for rate in RATES
  }


def test_the_best_rates():
  """The lowest loss of each architecture, among the rates that all have tried; without any, the default."""
  assert best_rates(tried({})) == dict.fromkeys(
    ARCHITECTURES, get_config("diff").optimizer.learning_rate
  )
  losses = {
    f"{architecture},rate={rate:g}": 4.0 + rate
    for architecture in ARCHITECTURES
    for rate in (0.002, 0.001)
  }
  losses["diff,rate=0.002"] = 3.0
  assert best_rates(tried(losses)) == {
    "transformer": 0.001,
    "diff": 0.002,
    "diff_v2": 0.001,
  }
  alone = {**losses, "transformer,rate=0.004": 1.0, "diff,rate=0.004": 1.0}
  assert best_rates(tried(alone)) == best_rates(tried(losses)), (
    "V2 has not tried 0.004"
  )
  assert best_rates(tried({**alone, "diff_v2,rate=0.004": 5.0})) == {
    "transformer": 0.004,
    "diff": 0.004,
    "diff_v2": 0.001,
  }


def test_runs_are_expected_to_take_what_the_pilots_took_and_their_further_steps():
  pilot = {"seconds": 60.0, "results": {"train/step_seconds": 0.1}}
  expected = lambda name, done, pilots: on_gpu.expected_seconds(
    name, done, pilots, 900
  )
  assert expected("gpu", [], [pilot]) == pytest.approx(1.15 * 150)
  assert expected(
    "pilot", [{**pilot, "seconds": 80.0}, pilot], []
  ) == pytest.approx(1.15 * 80)
  assert expected(
    "gpu", [{**pilot, "seconds": 100.0}], [pilot]
  ) == pytest.approx(1.15 * 100), "a run that was timed says more"
  assert expected("gpu", [], []) > expected("pilot", [], []) > 0


def test_a_command_that_hangs_is_ended_with_all_its_processes(monkeypatch):
  monkeypatch.setattr(on_gpu, "_RESERVE", 1)
  deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); "
  parent = f"import subprocess; subprocess.Popen([sys.executable, '-c', {deaf + 'time.sleep(600)'!r}], start_new_session=True); "
  process = subprocess.Popen(
    [sys.executable, "-c", deaf + parent + "time.sleep(600)"],
    stdout=subprocess.PIPE,
  )
  (
    process.stdout.readline(),
    process.stdout.readline(),
  )  # both ignore SIGTERM now
  (child,) = psutil.Process(process.pid).children()
  assert on_gpu._wait(process, 0.1) is None
  deadline = time.monotonic() + 60
  while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  assert process.wait(60) != 0


def wheel(path, files):
  with zipfile.ZipFile(path, "w") as archive:
    for name, content in files.items():
      archive.writestr(name, content)


def test_the_text_is_code_each_content_once(tmp_path):
  """Without short files, files in other encodings, data and tables; and the same each time it is made."""
  code = [
    f"def function_{index}(argument):\n  return {index} * argument  # {index**7}\n"
    for index in range(60)
  ]
  first, second = "".join(code[:30]), "".join(code[30:])
  wheel(
    tmp_path / "b-1.whl",
    {
      "b.py": second,
      "again.py": first,
      "short.py": "import a\n",
      "latin.py": ("# é\n" + second).encode("latin-1"),
    },
  )
  wheel(
    tmp_path / "a-1.whl",
    {
      "z.py": first,
      "table.py": "row = 1, 2, 3\n" * 300,
      "notes.txt": second * 2,
      "data.py": os.urandom(3000).hex(),
    },
  )
  assert (
    list(pack.documents(tmp_path))
    == [first, second]
    == list(pack.documents(tmp_path))
  )


def test_bad_input_is_one_line(tmp_path):
  with pytest.raises(
    SystemExit,
    match=f"^error: {tmp_path}/pack/text.jsonl.xz is missing; python -m experiments.one_gpu.pack",
  ):
    on_gpu.main([str(tmp_path)])


def test_figures(make_results):
  """Of the pilots, each architecture's loss over its learning rates; of the runs, their differences."""
  made = make_results(
    "one_gpu",
    EXPERIMENT,
    lambda run: {"validation/loss": 3.0 + run.config.optimizer.learning_rate},
    "pilot",
  )
  axes = EXPERIMENT.plot({**made, "grid": "pilot"}).axes[0]
  assert axes.get_legend_handles_labels()[1] == [
    "Transformer",
    "DIFF",
    "DIFF V2",
  ]
  for line in axes.get_lines():
    assert [*line.get_xdata()] == sorted(RATES) and [*line.get_ydata()] == [
      3.0 + rate for rate in sorted(RATES)
    ]
  made = make_results(
    "one_gpu",
    EXPERIMENT,
    lambda run: {"validation/loss": 3.0 + run.seed},
    "gpu",
  )
  axes = EXPERIMENT.plot({**made, "grid": "gpu"}).axes[0]
  assert [label.get_text() for label in axes.get_yticklabels()] == [
    "Transformer",
    "DIFF",
    "DIFF V2",
  ]


@pytest.fixture
def place(tmp_path):
  """A directory with downloads, and with a wheel that no machine has installed, so that nothing is fetched."""
  (tmp_path / "downloads").mkdir()
  lines = lambda index: "".join(
    f"value_{line} = {line} * {index} + {math.sin(line * index)}\n"
    for line in range(60)
  )
  wheel(
    tmp_path / "downloads/text-1.0-py3-none-any.whl",
    {f"text/file_{index}.py": lines(index) for index in range(1, 40)},
  )
  (tmp_path / "pack/wheels").mkdir(parents=True)
  info = "diffjax_absent-1.0.dist-info"
  wheel(
    tmp_path / "pack/wheels/diffjax_absent-1.0-py3-none-any.whl",
    {
      "diffjax_absent.py": "here = True\n",
      f"{info}/METADATA": "Metadata-Version: 2.1\nName: diffjax-absent\nVersion: 1.0\n",
      f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
      f"{info}/RECORD": "",
    },
  )
  return tmp_path


def test_packages_that_are_missing_can_be_imported_at_once(place, monkeypatch):
  monkeypatch.setattr(sys, "path", [str(place / "site"), *sys.path])
  assert (
    importlib.util.find_spec("diffjax_absent") is None
  )  # an import that passes the directory before it is there
  wheels.install(place / "pack/wheels", place / "site")
  assert importlib.import_module("diffjax_absent").here
  times = [path.stat().st_mtime_ns for path in (place / "site").iterdir()]
  wheels.install(place / "pack/wheels", place / "site")
  assert [
    path.stat().st_mtime_ns for path in (place / "site").iterdir()
  ] == times, "they are there"


def call(module, directory, *arguments, **environment):
  """The output of a command of the folder."""
  environment = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    **environment,
  }
  command = [
    sys.executable,
    "-m",
    f"experiments.one_gpu.{module}",
    str(directory),
    *arguments,
    *(f"--set={field}" for field in SMALL),
  ]
  result = subprocess.run(
    command,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=900,
    cwd=grid.FOLDER.parent,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def earlier(directory, name, runs, losses):
  """Another machine's results: these runs, of a minute each, and the first one's curve."""
  entries = []
  for run in runs:
    measured = {
      "validation/loss": losses.get(run.variant, 2.0 + run.seed),
      "train/step_seconds": 0.01,
    }
    results.write_run(
      directory / "made" / run.name, run, {}, measured, 60.0, "a machine"
    )
    entries.append(results.read_run(directory / "made" / run.name, run, {}, ()))
  results.write_folder(
    directory / "out" / name / "results.json",
    "one_gpu",
    name,
    EXPERIMENT.grids[name].baseline,
    entries,
  )
  (directory / "out" / name / "curves.jsonl").write_text(
    json.dumps({"run": runs[0].name, "step": 1, "train/loss": 6.0}) + "\n"
  )


@pytest.mark.full
def test_the_whole_chain(place):
  """The last round of pilots and the last seed, where another machine has made the others; then the rates are kept and nothing is left.

  Text is read from the pack alone, missing packages are installed, and no run starts in too little time."""
  (place / "OUT").mkdir()
  call("pack", place)
  for made in (place / "downloads", place / "text.jsonl"):
    made.rename(made.with_name(f"{made.name}.gone"))
  best = {"transformer": 0.002, "diff": 0.001, "diff_v2": 0.002}
  session = on_gpu.Session(place, 0.0, 4, SMALL)
  rates = [
    f"{architecture}:optimizer.learning_rate={rate}"
    for architecture, rate in best.items()
  ]
  pilots, runs = session.runs("pilot"), session.runs("gpu", rates)
  earlier(
    place,
    "pilot",
    pilots[:-3],
    {
      f"{architecture},rate={rate:g}": 1.0
      for architecture, rate in best.items()
    },
  )
  earlier(place, "gpu", runs[:-3], {})

  arguments = ["--on_cpu", "--steps=4"]
  text = call("on_gpu", place, *arguments, "--limit=60")
  assert (
    "pilot: 6 of 9 are made" in text
    and "gpu:" not in text
    and (place / "work/site/diffjax_absent.py").exists()
  )
  text = call(
    "on_gpu", place, *arguments, "--limit=3000", OUT=str(place / "OUT")
  )
  assert "pilot: 9 of 9 are made" in text and "gpu: 9 of 9 are made" in text
  assert json.loads((place / "out/rates.json").read_text()) == best
  for name, wanted in (("pilot", pilots), ("gpu", runs)):
    found = json.loads((place / "out" / name / "results.json").read_text())
    assert [run["name"] for run in found["runs"]] == [
      run.name for run in wanted
    ]
    assert {
      run["variant"]: run["config"]["optimizer.learning_rate"]
      for run in found["runs"]
    } == {run.variant: run.config.optimizer.learning_rate for run in wanted}
    assert all(
      run["results"]["validation/loss"] > 3 for run in found["runs"][-3:]
    ), "made here"
    curves = [
      json.loads(line)
      for line in (place / "out" / name / "curves.jsonl")
      .read_text()
      .splitlines()
    ]
    assert {line["run"] for line in curves} == {
      run.name for run in (wanted[0], *wanted[-3:])
    }
    assert (place / "out" / name / "table.md").exists() and (
      place / "out" / name / "plot.png"
    ).exists()
  with tarfile.open(place / "OUT/one_gpu.tar.gz") as archive:
    assert {
      "./rates.json",
      "./gpu/results.json",
      "./gpu/curves.jsonl",
      "./pilot/results.json",
    } <= set(archive.getnames())
  text = call("on_gpu", place, *arguments, "--limit=60")
  assert "gpu: 9 of 9 are made" in text and "pilot" not in text
