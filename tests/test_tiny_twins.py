"""The benchmark of the tiny twins: finished work is not done again, and its intervals are over seeds."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats

from benchmarks import tiny_twins
from diffjax.config import UserError
from diffjax.training import checkpoint


def values_of(command):
  """The flags of a command as a dictionary."""
  return dict(argument.split("=", 1) for argument in command if argument.startswith("--"))


@pytest.fixture
def commands(monkeypatch):
  """The commands that the benchmark started. They leave what real ones would: the checkpoint of a last step, and results of suites."""
  started = []

  def run(command, check):
    assert check
    started.append(command[2])
    flags = values_of(command)
    workdir = pathlib.Path(flags["--workdir"])
    if command[2] == "diffjax.train":
      train(command[3].partition(":")[2], workdir, flags)
    else:
      evaluate(workdir, pathlib.Path(flags["--against"]), flags)

  def train(variant, workdir, flags):
    config = tiny_twins.tiny.get_config(variant)
    config.update_from_flattened_dict(
      {
        field.removeprefix("--config."): tiny_twins.grid.read_value(value)
        for field, value in flags.items()
        if field.startswith("--config.")
      }
    )
    if (workdir.parent / "stop").exists():
      return
    steps = config.train.steps
    with checkpoint.Checkpoints(str(workdir), keep=1) as checkpoints:
      checkpoints.save(steps, {"params": np.zeros(2)}, data_state={}, config=config.to_dict())
      checkpoints.wait()
    loss = tiny_twins.VARIANTS.index(variant) + 0.1 * config.train.seed
    names = (*tiny_twins.METRICS, "trigram_bits_per_byte")
    (workdir / "metrics.jsonl").write_text(json.dumps({"step": steps, **{f"validation/{name}": loss for name in names}}) + "\n")

  def evaluate(workdir, against, flags):
    out = pathlib.Path(flags["--out"])
    out.mkdir(exist_ok=True)
    seed = int(workdir.name.rpartition("_")[2])
    assert (workdir.name, against.name) == (f"diff_{seed}", f"transformer_{seed}")
    for suite in flags["--suite"].split(","):
      rows = [
        {"name": name, "at": at, "value": 2.0 + seed, "against": {"value": 1.0 - seed}}
        for of, name, at in tiny_twins.FIGURES
        if of == suite
      ]
      (out / f"{suite}.json").write_text(json.dumps({"figures": [{"name": "another", "at": {}, "value": 0.0, "against": None}, *rows]}))

  monkeypatch.setattr(subprocess, "run", run)
  return started


def call(monkeypatch, workdir, *arguments):
  out = workdir / "twins.json"
  monkeypatch.setattr(sys, "argv", ["tiny_twins", f"--workdir={workdir}", f"--out={out}", "--config.train.steps=3", *arguments])
  tiny_twins.main()
  return json.loads(out.read_text())


def test_what_is_done_is_not_done_again(commands, monkeypatch, tmp_path, capsys):
  found = call(monkeypatch, tmp_path, "--seeds=2")
  assert commands == ["diffjax.train"] * 6 + ["diffjax.evaluate"] * 2
  assert found["twins"]["loss"]["diff"]["seeds"] == [1.0, 1.1]
  assert found["suites"]["`outliers`: hidden states, top-1"]["diff"]["seeds"] == [2.0, 3.0]
  assert len(found["suites"]) == len(tiny_twins.FIGURES)
  commands.clear()
  assert call(monkeypatch, tmp_path, "--seeds=2") == found and not commands
  assert "| loss |" in capsys.readouterr().out
  call(monkeypatch, tmp_path, "--seeds=3")  # more seeds: only theirs
  assert commands == ["diffjax.train"] * 3 + ["diffjax.evaluate"]
  commands.clear()
  call(monkeypatch, tmp_path, "--seeds=1", "--set.validation.rows=3")  # other settings of the suites
  assert commands == ["diffjax.evaluate"]


def test_runs_of_another_config_or_without_an_end_are_refused(commands, monkeypatch, tmp_path):
  call(monkeypatch, tmp_path, "--seeds=1")
  with pytest.raises(UserError, match="a run of another config: train.batch_size is 16 there and 2 now"):
    call(monkeypatch, tmp_path, "--seeds=1", "--config.train.batch_size=2")
  (tmp_path / "stop").touch()
  with pytest.raises(UserError, match="transformer_1: training ended before its last step; run the same command"):
    call(monkeypatch, tmp_path, "--seeds=2")
  with pytest.raises(SystemExit):
    call(monkeypatch, tmp_path, "--step=2")


def test_intervals_are_students_and_welchs():
  rng = np.random.default_rng(0)
  base, own = rng.normal(1, 0.03, 5), rng.normal(1.2, 0.01, 5)
  found = tiny_twins.over_seeds({"transformer": base, "diff": own})
  reach = scipy.stats.t.ppf(0.975, 4) * base.std(ddof=1) / 5**0.5
  assert found["transformer"]["mean"] == pytest.approx([base.mean(), base.mean() - reach, base.mean() + reach])
  # Welch–Satterthwaite: the degrees of freedom lie between the smaller sample's 4 and 8 of both
  variances = np.array([base.var(ddof=1), own.var(ddof=1)]) / 5
  degrees = variances.sum() ** 2 / (variances**2 / 4).sum()
  reach = scipy.stats.t.ppf(0.975, degrees) * variances.sum() ** 0.5
  difference = own.mean() - base.mean()
  assert 4 < degrees < 8 and found["diff"]["difference"] == pytest.approx([difference, difference - reach, difference + reach])
  text = tiny_twins.table({"loss": found})
  assert "**0." in text and text.count("[") == 4  # the heading's, two means and a difference
  alone = tiny_twins.over_seeds({"transformer": base[:1], "diff": own[:1]})
  assert "[" not in tiny_twins.table({"loss": alone}).splitlines()[-1]


def test_the_documented_table_is_of_the_committed_runs():
  root = pathlib.Path(__file__).parents[1]
  runs = json.loads((root / "experiments/ablations/results.json").read_text())["runs"]
  names = {"bits per byte": "validation/loss", "AR-Hit": "validation/ar_hit", "Others": "validation/others"}
  page = (root / "docs/performance.md").read_text()
  for name, metric in names.items():
    scale = np.log(2) if name == "bits per byte" else 1
    each = {key: [run["results"][metric] / scale for run in runs if run["variant"] == key] for key in tiny_twins.VARIANTS}
    (row,) = tiny_twins.table({name: tiny_twins.over_seeds(each)}).splitlines()[2:]
    assert row in page
