"""The recipe of the tiny pair: what is done is not done again, nothing stale is reused."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import scipy.stats

from diffjax.config import UserError, field
from diffjax.evals import validation
from diffjax.training import checkpoint
from experiments import grid
from tests.harness import ROOT
from tests.harness.in_process import own_flags

with own_flags():
  from recipes import tiny_pair


@pytest.fixture
def commands(monkeypatch):
  """The commands that the recipe started. They leave what real ones would: the checkpoint of a last step, and results of suites."""
  started = []

  def call(self, command):
    flags = dict(argument.split("=", 1) for argument in command[3:])
    workdir = pathlib.Path(flags["--workdir"])
    if command[2] == "diffjax.train":
      started.append(workdir.name)
      train(workdir, flags)
    else:
      started.append(pathlib.Path(flags["--out"]).name)
      measure(workdir, flags)

  def train(workdir, flags):
    config = tiny_pair.tiny.get_config(flags["--config"].partition(":")[2])
    fields = {
      name.removeprefix("--config."): grid.read_value(value)
      for name, value in flags.items()
      if name.startswith("--config.")
    }
    config.update_from_flattened_dict(fields)
    if (workdir.parent / "stop").exists():
      return
    steps = config.train.steps
    with checkpoint.Checkpoints(str(workdir), keep=1) as checkpoints:
      checkpoints.save(
        steps,
        {"params": np.random.default_rng().normal(size=2)},
        data_state={},
        config=config.to_dict(),
      )
      checkpoints.wait()
    (workdir / "metrics.jsonl").write_text(
      json.dumps({"step": steps, "validation/loss": 1.0}) + "\n"
    )

  def measure(workdir, flags):
    out = pathlib.Path(flags["--out"])
    out.mkdir(exist_ok=True)
    seed = int(out.name.removeprefix("pair_"))
    assert (workdir.name, pathlib.Path(flags["--against"]).name) == (
      f"diff_{seed}",
      f"transformer_{seed}",
    )
    suites = flags["--suite"].split(",")
    assert ("report" in suites) == (seed == 0)
    for suite in suites:
      wanted = [
        (name, at) for of, name, at in tiny_pair.ROWS.values() if of == suite
      ]
      rows = [
        {
          "name": name,
          "at": at,
          "value": 2.0 + seed,
          "against": {"value": 1.0 - seed},
        }
        for name, at in wanted
      ]
      (out / f"{suite}.json").write_text(
        json.dumps(
          {
            "figures": [
              {"name": "another", "at": {}, "value": 0.0, "against": None},
              *rows,
            ]
          }
        )
      )

  monkeypatch.setattr(tiny_pair.Launcher, "call", call)
  return started


def call(out, seeds):
  values = {"_SEEDS": seeds, "_OUT": str(out), "_TRY_OUT": False}
  with mock.patch.multiple(
    tiny_pair,
    **{name: mock.Mock(value=value) for name, value in values.items()},
  ):
    tiny_pair.main()
  return json.loads((out / "tiny_pair.json").read_text())


def test_what_is_done_is_not_done_again_and_the_line_says_how_far_it_is(
  commands, tmp_path, capsys
):
  found = call(tmp_path, 2)
  first, second = (
    ["transformer_0", "diff_0", "pair_0"],
    ["transformer_1", "diff_1", "pair_1"],
  )
  assert commands == first + second
  assert [*found["figures"]] == [*tiny_pair.ROWS]
  assert all(
    values == {"transformer": [1.0, 0.0], "diff": [2.0, 3.0]}
    for values in found["figures"].values()
  )
  shown = capsys.readouterr()
  assert shown.out.endswith(tiny_pair.table(found["figures"]) + "\n")
  lines = shown.err.splitlines()
  assert (
    "1 of 6: training transformer, seed 0; the next line will say when all is done"
    in lines[0]
  )
  assert re.search(
    r"6 of 6: measuring the pair of seed 1; all is done in about \d+ s, \w{3} \d\d:\d\d$",
    lines[5],
  )
  commands.clear()
  assert call(tmp_path, 2) == found and not commands
  call(tmp_path, 3)
  assert commands == [
    "transformer_2",
    "diff_2",
    "pair_2",
  ]  # only the new seed's


def test_figures_of_other_parameters_or_settings_are_not_reused(
  commands, monkeypatch, tmp_path
):
  call(tmp_path, 1)
  commands.clear()
  (tmp_path / "diff_0").rename(tmp_path / "elsewhere")  # so it is trained again
  call(tmp_path, 1)
  assert commands == ["diff_0", "pair_0"]
  commands.clear()
  monkeypatch.setattr(tiny_pair, "_SETTINGS", ("--set.validation.rows=3",))
  call(tmp_path, 1)
  assert commands == ["pair_0"]
  commands.clear()
  other = dataclasses.make_dataclass(
    "Validation",
    [("batch_size", int, field(9, "Rows in a batch."))],
    bases=(validation.Validation,),
    frozen=True,
  )
  monkeypatch.setattr(
    validation, "Validation", other
  )  # a default in the suite's code
  call(tmp_path, 1)
  assert commands == ["pair_0"]


def test_runs_of_another_config_or_without_an_end_are_refused(
  commands, monkeypatch, tmp_path
):
  call(tmp_path, 1)
  (tmp_path / "stop").touch()
  with pytest.raises(
    UserError,
    match="training transformer, seed 1: it ended before its last step; run the same command",
  ):
    call(tmp_path, 2)
  config = tiny_pair.tiny.get_config

  def wider(variant):
    changed = config(variant)
    changed.train.batch_size = 2
    return changed

  monkeypatch.setattr(tiny_pair.tiny, "get_config", wider)
  with pytest.raises(
    UserError,
    match="a run of another config: train.batch_size is 16 there and 2 now",
  ):
    call(tmp_path, 1)


def test_intervals_are_students_and_welchs():
  rng = np.random.default_rng(0)
  base, own = rng.normal(1, 0.03, 5), rng.normal(1.2, 0.01, 5)
  text = tiny_pair.table({"loss": {"transformer": base, "diff": own}})
  numbers = [
    float(number) for number in re.findall(r"-?\d+\.\d+", text.splitlines()[-1])
  ]
  reach = scipy.stats.t.ppf(0.975, 4) * base.std(ddof=1) / 5**0.5
  assert numbers[:3] == pytest.approx(
    [base.mean(), base.mean() - reach, base.mean() + reach], abs=5e-4
  )
  # Welch–Satterthwaite: the degrees of freedom lie between the smaller sample's 4 and 8 of both
  variances = np.array([base.var(ddof=1), own.var(ddof=1)]) / 5
  degrees = variances.sum() ** 2 / (variances**2 / 4).sum()
  reach = scipy.stats.t.ppf(0.975, degrees) * variances.sum() ** 0.5
  difference = own.mean() - base.mean()
  assert 4 < degrees < 8 and numbers[6:] == pytest.approx(
    [difference, difference - reach, difference + reach], abs=5e-4
  )
  assert "mean of 5 seeds" in text and "**0." in text
  assert "**" not in tiny_pair.table(
    {"loss": {"transformer": base, "diff": base + 0.001}}
  )
  alone = tiny_pair.table({"loss": {"transformer": base[:1], "diff": own[:1]}})
  assert "one seed" in alone and "[" not in alone


@pytest.mark.longest
@pytest.mark.full
def test_the_recipe_as_typed(tmp_path):
  """Two steps and few samples: every row of the table is there, with the report. The same command again does nothing."""
  line = [
    sys.executable,
    "-m",
    "recipes.tiny_pair",
    "--seeds=1",
    "--try_out",
    f"--out={tmp_path / 'pair'}",
  ]
  first = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
  assert first.returncode == 0, first.stderr
  table = first.stdout[first.stdout.index("| one seed |") :]
  assert all(f"| {title} |" in table for title in tiny_pair.ROWS)
  assert (tmp_path / "pair/pair_0/report.html").exists()
  again = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
  assert (
    again.returncode == 0
    and " of 3: " not in again.stderr
    and again.stdout.endswith(table)
  )
