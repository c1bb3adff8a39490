"""Results: stored as they were measured, compared with honest intervals, and never of different configs in one folder."""

import json
import os
import pathlib
import platform

import numpy as np
import pytest
import scipy.stats

from diffjax.config import UserError
from diffjax.training.checkpoint import Checkpoints
from experiments import grid, results
from experiments.grid import Experiment, Grid
from experiments.launch import Devices

EXPERIMENT = Experiment(
  "?",
  {"cpu": Grid(("transformer", "diff"), "transformer", (0, 1, 2))},
  {"loss": "validation/loss", "other": "x"},
)
CPU = Devices("cpu", "a CPU", 1)


@pytest.fixture
def runs():
  return grid.expand("ablations", EXPERIMENT.grids["cpu"], {})


@pytest.fixture
def entries(runs, tmp_path):
  """Results of all runs; DIFF's loss is 0.1 lower, plus noise."""
  noise = iter(np.random.default_rng(0).normal(0, 0.01, len(runs)))
  found = []
  for run in runs:
    loss = 2.0 - 0.1 * (run.variant == "diff") + 0.3 * run.seed + next(noise)
    results.write_run(
      tmp_path / run.name,
      run,
      {"samples": 3},
      {"validation/loss": loss},
      12.345,
      results.machine(CPU, 1),
    )
    found.append(results.read_run(tmp_path / run.name, run, {"samples": 3}, ()))
  return found


def changed(run, field, value):
  return grid.with_fields(run, {field: value})


def test_a_run_is_kept_with_what_it_was(entries, runs):
  entry = entries[1]
  assert (entry["name"], entry["variant"], entry["seed"], entry["seconds"]) == (
    "diff/seed_0",
    "diff",
    0,
    12.3,
  )
  assert {
    "date",
    "machine",
    "versions",
    "parameters",
    "task",
  } <= entry.keys() and "jax" in entry["versions"]
  assert (
    entry["machine"]
    == f"1 × a CPU (cpu), {os.cpu_count()} × {results.processor()}"
  )
  assert entry["config"] == grid.comparable(runs[1].config.to_dict(), ())


def test_the_cpu_is_called_by_its_name(tmp_path, monkeypatch):
  """The CPU's name tells results of different machines apart; it is the machine type where the system does not give a name."""
  monkeypatch.setattr(results, "_CPUS", tmp_path / "cpuinfo")
  assert results.processor() == platform.machine()
  (tmp_path / "cpuinfo").write_text(
    "processor\t: 0\nmodel\t\t: 106\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.60GHz\n\nprocessor\t: 1\n"
  )
  assert results.processor() == "Intel(R) Xeon(R) CPU @ 2.60GHz"


def test_results_of_another_config_are_refused(entries, runs, tmp_path):
  read = lambda run, task=None: results.read_run(
    tmp_path / run.name, run, task or {"samples": 3}, ("data.source",)
  )
  assert (
    read(changed(changed(runs[0], "mesh.fsdp", 2), "data.source", "text:x"))
    is not None
  ), "circumstances and places may differ"
  with pytest.raises(
    UserError,
    match=r"result.json holds results of another config \(transformer/seed_0\): train.steps is 600 there and 700 now",
  ):
    read(changed(runs[0], "train.steps", 700))
  with pytest.raises(
    UserError, match="the task's samples is 3 there and 4 now"
  ):
    read(runs[0], {"samples": 4})
  (tmp_path / runs[0].name / "result.json").write_text("{")
  with pytest.raises(UserError, match="cannot be read.*delete it"):
    read(runs[0])
  assert results.read_run(tmp_path / "nothing", runs[0], {}, ()) is None


def test_folders_hold_one_config(entries, runs, tmp_path):
  path = tmp_path / "out" / "results.json"
  read = lambda runs=runs, name="ablations", grid="cpu", task=None: (
    results.read_folder(path, name, grid, runs, task or {"samples": 3}, ())
  )
  assert read() == {}
  results.write_folder(path, "ablations", "cpu", "transformer", entries)
  assert list(read().values()) == entries, "what is shared is put back"
  stored = json.loads(path.read_text())
  assert (
    stored["config"]["train.steps"] == 600
    and stored["runs"][1]["config"].keys() == stored["runs"][0]["config"].keys()
  )
  assert {
    "train.seed",
    "data.seed",
    "model.attention",
    "model.num_heads",
  } <= stored["runs"][0]["config"].keys()
  for change, message in (
    (
      dict(name="retrieval"),
      "another experiment, 'ablations'; choose another place with --out=DIR",
    ),
    (dict(grid="tpu"), "another grid, 'cpu'"),
    (dict(task={"samples": 2}), "the task's samples is 3 there and 2 now"),
    (
      dict(runs=runs[1:]),
      "results of 'transformer/seed_0', which the grid does not have now",
    ),
    (
      dict(runs=[changed(run, "train.steps", 200) for run in runs]),
      r"another config \(transformer/seed_0\): train.steps is 600 there and 200 now",
    ),
  ):
    with pytest.raises(UserError, match=message):
      read(**change)
  path.write_text("[")
  with pytest.raises(UserError, match="cannot be read"):
    read()


def made_up(**losses):
  """Results with these losses of each variant, in the order of seeds; the first variant is the baseline."""
  runs = [
    {
      "name": f"{variant}/seed_{seed}",
      "variant": variant,
      "seed": seed,
      "parameters": 1_000_000,
      "results": {"validation/loss": loss},
    }
    for variant, row in losses.items()
    for seed, loss in enumerate(row)
  ]
  return {"baseline": next(iter(losses)), "runs": runs}


def test_differences_are_welchs():
  """Spreads of different size, numbers of runs that differ, and no pairs: the order of the seeds does not matter."""
  rng = np.random.default_rng(0)
  rows = {
    "transformer": rng.normal(1, 0.3, 5),
    "diff": rng.normal(2, 0.1, 7),
    "diff_v2": rng.normal(3, 0.2, 4),
  }
  found = made_up(**rows)
  for variant, against in (
    ("diff", None),
    ("diff_v2", None),
    ("diff", "diff_v2"),
    ("transformer", "diff"),
  ):
    ours, theirs = rows[variant], rows[against or "transformer"]
    parts = np.array([each.var(ddof=1) / len(each) for each in (ours, theirs)])
    degrees = parts.sum() ** 2 / sum(
      part**2 / (len(each) - 1)
      for part, each in zip(parts, (ours, theirs), strict=True)
    )
    mean, reach = (
      ours.mean() - theirs.mean(),
      scipy.stats.t.ppf(0.975, degrees) * parts.sum() ** 0.5,
    )
    np.testing.assert_allclose(
      results.difference(found, variant, "validation/loss", against),
      [mean, mean - reach, mean + reach],
    )
  turned = made_up(**{**rows, "diff": rows["diff"][::-1]})
  np.testing.assert_allclose(
    results.difference(turned, "diff", "validation/loss"),
    results.difference(found, "diff", "validation/loss"),
    rtol=1e-12,
  )


def test_rows_that_cannot_be_compared():
  """A row with itself, or of one run. Rows whose runs are all equal have an interval without width beside another such row."""
  found = made_up(
    transformer=[1.0, 1.0], diff=[2.0, 2.0], diff_v2=[3.0], gated=[1.0, 2.0]
  )
  difference = lambda *args: results.difference(
    found, args[0], "validation/loss", *args[1:]
  )
  assert (
    difference("transformer") is None
    and difference("diff", "diff") is None
    and difference("diff_v2") is None
  )
  assert difference("gated", "diff_v2") is None and difference("diff") == (
    1.0,
    1.0,
    1.0,
  )
  mean, low, high = difference("gated")
  assert mean == 0.5 and low < 0 < 1 < high
  assert (
    results.dunnett(
      made_up(transformer=[1.0, 1.0], diff=[2.0, 2.0]), "validation/loss"
    )
    == {}
  ), "no spread to compare with"


def test_intervals_of_means_are_students():
  numbers = np.random.default_rng(0).normal(size=5)
  wanted = scipy.stats.ttest_1samp(numbers, 0).confidence_interval(0.95)
  np.testing.assert_allclose(
    results.mean_interval(numbers), [numbers.mean(), wanted.low, wanted.high]
  )
  assert (
    results.mean_interval([2.0])[0] == 2.0
    and np.isnan(results.mean_interval([2.0])[1:]).all()
  )


def test_a_difference_has_to_survive_the_number_of_rows():
  """Of many rows one differs by chance: its interval excludes 0, and among twelve rows it is not bold. A large difference is."""
  around = np.array([-0.01, -0.005, 0.0, 0.005, 0.01])
  others = {f"row_{number}": 1.0 + around for number in range(10)}
  few = made_up(transformer=1.0 + around, diff=1.014 + around)
  many = made_up(
    transformer=1.0 + around,
    diff=1.014 + around,
    diff_v2=1.1 + around,
    **others,
  )
  assert results.difference(few, "diff", "validation/loss")[1] > 0
  assert results.significant(few, "validation/loss") == {
    "diff"
  } and results.significant(many, "validation/loss") == {"diff_v2"}
  experiment = Experiment("?", {}, {"loss": "validation/loss"})
  lines = results.table(experiment, many).splitlines()
  assert (
    "| **+0.1000 [" in lines[4]
    and "| +0.0140 [+" in lines[3]
    and lines[-1].endswith(
      "Bold: the interval excludes 0, and Dunnett's p < 0.05 among the 12 rows compared with transformer, each column by itself."
    )
  )
  assert (
    results.table(experiment, few)
    .splitlines()[-1]
    .endswith(
      "among the one row compared with transformer, each column by itself."
    )
  )


def test_a_row_of_large_spread_is_not_trusted_beyond_its_own_interval():
  """Dunnett's test pools the spread, so that a row that varies more than the others looks more certain than it is."""
  around = np.array([-0.01, -0.005, 0.0, 0.005, 0.01])
  found = made_up(
    transformer=1.0 + around,
    diff=1.05 + 6 * around,
    **{f"row_{number}": 1.0 + around for number in range(4)},
  )
  assert (
    results.dunnett(found, "validation/loss")["diff"] < 0.05
    and results.significant(found, "validation/loss") == set()
  )


def test_the_table(entries, tmp_path):
  found = results.write_folder(
    tmp_path / "results.json", "ablations", "cpu", "transformer", entries
  )
  for run in found["runs"]:
    run["results"]["validation/loss"] -= (
      0.3 * run["seed"]
    )  # else the seeds differ more than the variants
  lines = results.table(EXPERIMENT, found).splitlines()
  assert (
    lines[0]
    == "|  | parameters | seeds | loss | other | loss − transformer's |"
  )
  cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
  assert (
    cells[0] == "diff"
    and cells[2] == "3"
    and " ± " in cells[3]
    and cells[4] == "–"
    and cells[5].startswith("**-0.")
  )
  assert lines[2].rstrip().endswith("|  |")
  for run in found["runs"]:
    run["results"]["x"] = run["seed"] + 2.0 * (run["variant"] == "diff")
  mean, low, high = results.difference(found, "diff", "x")
  assert results.table(EXPERIMENT, found).splitlines()[-5:-2] == [
    "| − transformer's | other |",
    "|---|---|",
    f"| diff | {mean:+.4f} [{low:+.4f}, {high:+.4f}] |",
  ]
  alone = results.write_folder(
    tmp_path / "results.json", "ablations", "cpu", "transformer", entries[:2]
  )
  assert not set("−±") & set(results.table(EXPERIMENT, alone)), (
    "one seed makes no claim"
  )


def test_tables_take_any_row_name():
  """A vertical bar does not end a cell, and a star in a name is a star."""
  rows = {"a|b": [1.0, 1.1], "wide*": [2.0, 2.1], "$x,y": [3.0, 3.1]}
  experiment = Experiment("?", {}, {"loss": "validation/loss"})
  lines = results.table(experiment, made_up(**rows)).splitlines()
  assert [line.partition(" | ")[0] for line in lines[2:5]] == [
    r"| a\|b",
    "| wide*",
    "| $x,y",
  ]
  starred = {**made_up(**rows), "baseline": "wide*"}
  assert results.difference(starred, "$x,y", "validation/loss")[
    0
  ] == pytest.approx(1.0)


def test_rows_without_the_failed():
  found = made_up(transformer=[1.0, 1.1], diff=[2.0, None])
  found["runs"][3]["failed"] = "diverged"
  rows = results.without_failed_rows(found)
  assert [run["variant"] for run in rows["runs"]] == ["transformer"] * 2
  assert results.difference(found, "diff", "validation/loss") is None, (
    "a row of which a run failed is no fair sample"
  )


def test_a_baseline_of_every_size():
  """NAME,* stands for the variant of the same size, and Dunnett's test corrects for the rows of that size."""
  around = np.array([-0.01, 0.0, 0.01])
  rows = {
    f"{name},size={size}": level + size + around
    for size in (1, 2)
    for name, level in (("transformer", 0), ("diff", 0.1), ("v2", 0.2))
  }
  found = {**made_up(**rows), "baseline": "transformer,*"}
  assert results.difference(found, "diff,size=2", "validation/loss")[
    0
  ] == pytest.approx(0.1)
  assert (
    results.difference(found, "transformer,size=2", "validation/loss") is None
  )
  alone = {
    **made_up(**{name: row for name, row in rows.items() if "size=2" in name}),
    "baseline": "transformer,*",
  }
  both = results.dunnett(found, "validation/loss")
  assert len(both) == 4 and results.dunnett(alone, "validation/loss") == {
    name: p for name, p in both.items() if "size=2" in name
  }
  assert (
    "among the 2 rows compared with the transformer of the same options,"
    in results.table(EXPERIMENT, found)
  )


def test_the_summary_is_a_second_table(entries, tmp_path):
  rows = [
    {"what": "a", "share": [0.6234, 0.5, 0.75], "speed": 51234.5},
    {"what": "b", "share": None, "speed": 0.01234},
  ]
  found = results.write_folder(
    tmp_path / "results.json",
    "ablations",
    "cpu",
    "transformer",
    entries,
    lambda results: rows[: len(results["runs"])],
  )
  assert json.loads((tmp_path / "results.json").read_text())["summary"] == rows
  lines = results.table(EXPERIMENT, found).splitlines()
  assert lines[-7:-2] == [
    "",
    "| what | share | speed |",
    "|---|---|---|",
    "| a | 0.623 [0.5, 0.75] | 51,234 |",
    "| b | – | 0.0123 |",
  ]


def save(workdir, config, step, log_lines=()):
  """A tiny checkpoint and a log."""
  with Checkpoints(str(workdir), keep=9) as checkpoints:
    checkpoints.save(
      step,
      {"params": np.zeros(1)},
      data_state={"shares": [{}]},
      config=config.to_dict(),
    )
    checkpoints.wait()
  with (workdir / "metrics.jsonl").open("a") as file:
    file.writelines(line + "\n" for line in log_lines)


def test_trained_is_what_has_logged_and_saved_its_last_step(runs, tmp_path):
  """Neither is enough alone: the log has the last step's loss before that step is saved."""
  config = grid.with_fields(
    runs[0], {"train.steps": 2, "optimizer.warmup_steps": 1}
  ).config
  lines = [
    '{"step": 1, "train/loss": 3.0}',
    '{"step": 2, "train/loss": 2.0}',
    '{"step": 2, "validation/loss": 1.5}',
    '{"step": 2, "val',
  ]
  assert results.trained(tmp_path / "nothing", config, ()) is None
  (tmp_path / "logged").mkdir()
  (tmp_path / "logged/metrics.jsonl").write_text("\n".join(lines))
  assert results.trained(tmp_path / "logged", config, ()) is None
  save(tmp_path / "logged", config, 1)
  assert results.trained(tmp_path / "logged", config, ()) is None
  save(tmp_path / "logged", config, 2)
  assert results.trained(tmp_path / "logged", config, ()) == {
    "step": 2,
    "train/loss": 2.0,
    "validation/loss": 1.5,
  }
  save(
    tmp_path / "saved",
    config,
    2,
    [*lines[:2], '{"step": 1, "validation/loss": 1.5}'],
  )
  assert results.trained(tmp_path / "saved", config, ()) is None
  (tmp_path / "logged/checkpoints/2/manifest.json").unlink()
  assert results.trained(tmp_path / "logged", config, ()) is None


def test_what_is_trained_with_another_config_is_refused(runs, tmp_path):
  """Finished or not; the places of data and of the pretrained run do not matter."""
  config = grid.with_fields(
    runs[0], {"train.steps": 2, "optimizer.warmup_steps": 1}
  ).config
  end = '{"step": 2, "validation/loss": 1.5}'
  save(tmp_path, config, 1, [end])
  change = lambda **fields: grid._with_fields(
    config.to_dict(),
    {name.replace("__", "."): value for name, value in fields.items()},
  )
  for step in (1, 2):
    with pytest.raises(
      UserError,
      match="holds a run of another config: optimizer.learning_rate is 0.003 there and 0.01 now; choose",
    ):
      results.trained(tmp_path, change(optimizer__learning_rate=0.01), ())
    with pytest.raises(UserError, match="train.steps is 2 there and 3 now"):
      results.trained(tmp_path, change(train__steps=3), ())
    other = change(
      data__source="text:x",
      train__init_from="elsewhere",
      mesh__fsdp=1,
      data__num_workers=3,
    )
    assert (results.trained(tmp_path, other, ("data.source",)) is None) == (
      step == 1
    )
    save(tmp_path, config, 2)


def test_a_field_that_is_newer_than_the_results_counts_as_its_default(
  entries, runs
):
  entry = {
    **entries[0],
    "config": {
      field: value
      for field, value in entries[0]["config"].items()
      if field != "model.remat"
    },
  }
  results._check(pathlib.Path("x"), entry, runs[0], {"samples": 3}, ())
  with pytest.raises(
    UserError, match="model.remat is 'none' there and 'full' now"
  ):
    results._check(
      pathlib.Path("x"),
      entry,
      changed(runs[0], "model.remat", "full"),
      {"samples": 3},
      (),
    )


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "{}", "3", '{"name": "diff/seed_0"}']
)
def test_files_that_are_not_ours_are_named(runs, tmp_path, text):
  (tmp_path / "result.json").write_text(text)
  (tmp_path / "results.json").write_text(text)
  with pytest.raises(
    UserError, match="result.json: cannot be read .*; delete it, and run again"
  ):
    results.read_run(tmp_path, runs[0], {}, ())
  with pytest.raises(
    UserError, match="results.json: cannot be read .*; delete it, and run again"
  ):
    results.read_folder(
      tmp_path / "results.json", "ablations", "cpu", runs, {}, ()
    )


def test_a_run_that_diverged_leaves_no_interval(entries, tmp_path):
  """Otherwise the diverged run would be forgotten, and its variant look better than it is."""
  entries[3] = {**entries[3], "results": {"validation/loss": None}}
  found = results.write_folder(
    tmp_path / "results.json", "ablations", "cpu", "transformer", entries
  )
  assert (
    entries[3]["name"] == "diff/seed_1"
    and results.difference(found, "diff", "validation/loss") is None
  )
  assert " (2 of 3) |" in results.table(EXPERIMENT, found).splitlines()[3]


def test_different_texts_are_not_compared(entries):
  """Every version of Python has another standard library."""
  results.check_text(entries)
  results.check_text(entries, entries[0]["versions"]["python"])
  results.check_text([], "3.99")
  with pytest.raises(
    UserError,
    match=r"runs on data.source = stdlib under Python .*3.99.* cannot be compared",
  ):
    results.check_text(entries, "3.99")
  other = [{**entries[0], "versions": {"python": "3.99"}}, *entries[1:]]
  with pytest.raises(UserError, match="cannot be compared"):
    results.check_text(other)
  results.check_text(
    [{**entry, "config": {"data.source": "text:x"}} for entry in other]
  )


def test_a_machine_is_what_a_run_has_of_it():
  cpus = os.cpu_count() or 1
  assert results.machine(Devices("gpu", "H100", 8), 8).startswith(
    f"1 × H100 (gpu), {max(1, cpus // 8)} × "
  )
  assert (
    results.machine(Devices("gpu", "H100", 8), 1)
    == f"8 × H100 (gpu), {cpus} × {results.processor()}"
  )
  assert results.machine(CPU, 2).startswith("1 × a CPU (cpu), ")


def numbers(rows):
  cells = [cell for row in rows for cell in row.values()]
  return [
    value
    for cell in cells
    for value in (cell if isinstance(cell, (list, tuple)) else [cell])
    if isinstance(value, (int, float))
  ]


# Folders with results, relative to experiments/. Retrieval's data takes long to write.
COMMITTED = [
  path.parent.relative_to(grid.FOLDER)
  for path in sorted(grid.FOLDER.rglob("results.json"))
]


@pytest.mark.parametrize(
  "place",
  [
    pytest.param(each, marks=[pytest.mark.full] * (str(each) == "retrieval"))
    for each in COMMITTED
  ],
  ids=str,
)
def test_committed_results_are_those_of_the_grid_as_it_is(place, tmp_path):
  """Otherwise the README's command would refuse its own folder. The table is that of the results. A README counts missing runs."""
  name, chosen = (
    place.parts[0],
    "cpu" if len(place.parts) == 1 else place.parts[1],
  )
  experiment, folder = grid.load(name, chosen), grid.FOLDER / place
  runs = grid.expand(name, experiment.grids[chosen], {})
  places = (
    tuple(experiment.prepare(tmp_path, runs[0].config))
    if experiment.prepare
    else ()
  )
  kept = results.read_folder(
    folder / "results.json", name, chosen, runs, experiment.task, places
  )
  if missing := [run.name for run in runs if run.name not in kept]:
    assert f"{len(missing)} of {len(runs)} runs are missing" in " ".join(
      (folder / "README.md").read_text().split()
    )
  assert [*kept] == [run.name for run in runs if run.name not in missing]
  results.check_text(kept.values())
  found = json.loads((folder / "results.json").read_text())
  assert results.table(experiment, found) == (folder / "table.md").read_text()
  if experiment.summarise:
    assert numbers(experiment.summarise(found)) == pytest.approx(
      numbers(found.get("summary", [])), rel=1e-3
    )
