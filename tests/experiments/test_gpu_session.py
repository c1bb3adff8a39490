"""experiments/gpu_session.sh on a CPU with tiny models: the pack, the choice of runs, and the collected results."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from experiments import grid, results

SCRIPT = grid.FOLDER / "gpu_session.sh"
SMALL = {
  "model.vocab_size": 300, "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.head_dim": 8,
  "model.ffn_dim": 32, "data.length": 64, "data.validation_fraction": 0.3, "train.batch_size": 4, "eval.rows": 8,
}  # fmt: skip
RUNS = [f"{variant},size=session/seed_{seed}" for seed in range(5) for variant in ("transformer", "diff", "diff_v2")]


def call(*args, code=0, **environment):
  environment = {"PYTHON": sys.executable, "ON_CPU": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_NUM_CPU_DEVICES": "1", **environment}
  result = subprocess.run(["bash", SCRIPT, *map(str, args)], env={**os.environ, **environment}, capture_output=True, text=True, timeout=900)
  assert result.returncode == code, result.stdout + result.stderr
  return result.stdout, result.stderr


def flags(fields):
  return [f"--set={field}={value}" for field, value in fields.items()]


@pytest.fixture
def place(tmp_path):
  """A directory to pack into, and all fields. It holds a wheel already, which no machine has installed, so that none is fetched."""
  (tmp_path / "text").mkdir()
  for index in range(30):
    (tmp_path / "text" / f"{index}.txt").write_text("".join(f"line {line} of text {index}\n" for line in range(60)))
  wheels = tmp_path / "pack/wheels"
  wheels.mkdir(parents=True)
  with zipfile.ZipFile(wheels / "diffjax_absent-1.0-py3-none-any.whl", "w") as file:
    file.writestr("diffjax_absent.py", "here = True\n")
    file.writestr("diffjax_absent-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: diffjax-absent\nVersion: 1.0\n")
    file.writestr("diffjax_absent-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    file.writestr("diffjax_absent-1.0.dist-info/RECORD", "")
  return tmp_path, {**SMALL, "data.source": f"text:{tmp_path}/text/*.txt"}


def earlier(pack, fields, steps, names):
  """Another machine's results: a results.json with these runs, of one second each, and the first one's curve."""
  changes = {**fields, "data.tokenizer": f"{pack}/tokenizer/tokenizer.json", "data.prepared_dir": f"{pack}/rows"}
  changes |= {"train.steps": steps, "eval.interval": min(64, steps)}
  entries = []
  for run in grid.expand("ablations", grid.load("ablations").grids["session"], changes):
    if run.name in names:
      results.write_run(pack / "made", run, {}, {"validation/loss": 5.0 + run.seed}, 1.0, "a machine")
      entries.append(results.read_run(pack / "made", run, {}, ()))
  results.write_folder(pack / "out/results.json", "ablations", "session", "transformer,size=session", entries)
  (pack / "out/curves.jsonl").write_text(json.dumps({"run": names[0], "step": 1, "train/loss": 6.0}) + "\n")


def test_bad_input_is_one_line(tmp_path):
  subprocess.run(["bash", "-n", SCRIPT], check=True)
  for args, message in (
    ([], "error: experiments/gpu_session.sh pack DIR, or run DIR\n"),
    (["run"], "error: name a directory: experiments/gpu_session.sh run DIR\n"),
    (["run", tmp_path], f"error: {tmp_path} holds no rows; make them with experiments/gpu_session.sh pack {tmp_path}\n"),
  ):
    assert call(*args, code=1) == ("", message)


@pytest.mark.full
def test_without_a_gpu_nothing_is_begun(tmp_path):
  (tmp_path / "rows").mkdir()
  (tmp_path / "rows/meta.json").write_text("{}")
  (tmp_path / "wheels").mkdir()
  out, errors = call("run", tmp_path, code=1, ON_CPU="", SCRATCH=str(tmp_path / "scratch"))
  assert "devices:" in out and errors.endswith("error: JAX finds no GPU here; set ON_CPU=1 to go on without\n")


@pytest.mark.full
def test_a_run_is_made_where_the_others_are_known(place):
  """Rows are read without their text, and missing packages installed. No run starts in too little time; then the missing one does, once."""
  directory, fields = place
  pack, out = directory / "pack", directory / "OUT"
  out.mkdir()
  packed, _ = call("pack", pack, *flags(fields))
  assert "rows" in packed and (pack / "tokenizer/tokenizer.json").exists()
  (directory / "text").rename(directory / "gone")
  earlier(pack, fields, 2, RUNS[:-1])
  arguments = ["run", pack, *flags(fields), "--steps=2"]
  environment = {"SCRATCH": str(directory / "scratch"), "OUT": str(out)}
  text, _ = call(*arguments, LIMIT="50", **environment)
  assert "14 runs in" in text and "left:" not in text and (directory / "scratch/site/diffjax_absent.py").exists()
  text, _ = call(*arguments, LIMIT="600", **environment)
  assert f"s left: {RUNS[-1]}\n" in text and "15 runs in" in text
  found = json.loads((out / "results.json").read_text())
  assert [run["name"] for run in found["runs"]] == RUNS and found["runs"][-1]["config"]["train.seed"] == 4
  curves = [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]
  assert curves[0]["run"] == RUNS[0] and {line["run"] for line in curves[1:]} == {RUNS[-1]}
  assert any("validation/loss" in line for line in curves)
  assert "| diff_v2,size=session | " in (out / "table.md").read_text() and (out / "plot.png").exists()
  text, _ = call(*arguments, LIMIT="600", **environment)
  assert "15 runs in" in text and "left:" not in text


@pytest.mark.full
def test_a_run_that_takes_too_long_is_stopped_and_saved(place):
  directory, fields = place
  pack = directory / "pack"
  call("pack", pack, *flags(fields))
  earlier(pack, fields, 10**6, RUNS[1:])
  scratch = directory / "scratch"
  text, errors = call("run", pack, *flags(fields), "--steps=1000000", LIMIT="90", SCRATCH=str(scratch))
  assert "SIGTERM: saving" in errors and "14 runs in" in text
  workdir = scratch / "runs/ablations/session" / RUNS[0]
  assert list((workdir / "checkpoints").glob("[0-9]*")) and not (workdir / "result.json").exists()
