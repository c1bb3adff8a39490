"""The files with results: result.json, failed.json and results.json."""

import json

import pytest

from diffjax.config import UserError
from experiments import compatibility, grid, results
from experiments.grid import Grid

# The constants of a task, which are stored with its results.
TASK = {"samples": 3}


@pytest.fixture
def runs():
  """Six runs: both variants with seed 0, then with seed 1, then with seed 2."""
  chosen = Grid(
    variants=("transformer", "diff"), baseline="transformer", seeds=(0, 1, 2)
  )
  return grid.expand("ablations", chosen, {})


@pytest.fixture
def entries(runs, tmp_path):
  """The results of the six runs, as stored in results.json.

  Each is read from a result.json in its workdir, tmp_path / run.name.
  """
  entries = []
  for run in runs:
    workdir = tmp_path / run.name
    metrics = {"validation/loss": 2.0 + run.seed}
    results.write_run(
      workdir, run, TASK, metrics, seconds=12.345, machine="a machine"
    )
    entries.append(results.read_run(workdir, run, TASK, location_fields=()))
  return entries


def write_folder(path, entries):
  """Writes a results.json with entries of the grid."""
  results.write_folder(path, "ablations", "cpu", "transformer", entries)


def test_an_entry_describes_its_run(runs, tmp_path):
  run = runs[1]
  results.write_run(
    tmp_path,
    run,
    task={"samples": 3},
    results={"validation/loss": 2.5},
    seconds=12.345,
    machine="a machine",
  )

  entry = results.read_run(tmp_path, run, {"samples": 3}, location_fields=())

  assert entry["name"] == "diff/seed_0"
  assert entry["variant"] == "diff"
  assert entry["seed"] == 0
  assert entry["config"] == grid.comparable(run.config.to_dict(), ())
  assert entry["task"] == {"samples": 3}
  assert entry["results"] == {"validation/loss": 2.5}
  # Rounded to tenths.
  assert entry["seconds"] == 12.3
  assert entry["machine"] == "a machine"
  assert {"versions", "date", "parameters"} <= entry.keys()
  assert {"python", "jax"} <= entry["versions"].keys()


def test_a_run_without_a_result_has_no_entry(runs, tmp_path):
  missing_dir = tmp_path / "missing"

  entry = results.read_run(missing_dir, runs[0], TASK, location_fields=())

  assert entry is None


@pytest.mark.parametrize(
  "field, value",
  [
    pytest.param("mesh.fsdp", 2, id="does_not_affect_results"),
    pytest.param("data.source", "text:x", id="location"),
  ],
)
@pytest.mark.usefixtures("entries")
def test_an_entry_may_differ_in_irrelevant_fields(runs, tmp_path, field, value):
  """The run has finished, with other values of fields that do not matter."""
  run = grid.with_fields(runs[0], {field: value})

  entry = results.read_run(
    tmp_path / run.name, run, TASK, location_fields=("data.source",)
  )

  assert entry is not None


@pytest.mark.usefixtures("entries")
def test_an_entry_of_another_config_is_refused(runs, tmp_path):
  """The run has finished, with 600 steps."""
  run = grid.with_fields(runs[0], {"train.steps": 700})

  with pytest.raises(
    UserError,
    match=r"result.json holds results of another config"
    r" \(transformer/seed_0\): train.steps is 600 there and 700 now",
  ):
    results.read_run(tmp_path / run.name, run, TASK, location_fields=())


@pytest.mark.usefixtures("entries")
def test_an_entry_of_another_task_is_refused(runs, tmp_path):
  """The run has finished. It was measured with three samples."""
  run = runs[0]
  other_task = {"samples": 4}

  with pytest.raises(
    UserError, match="the task's samples is 3 there and 4 now"
  ):
    results.read_run(tmp_path / run.name, run, other_task, location_fields=())


@pytest.mark.usefixtures("entries")
def test_an_error_names_two_changed_fields_and_counts_the_others(
  runs, tmp_path
):
  """The run has finished, with other values of three fields."""
  fields = {"train.steps": 700, "eval.interval": 7, "model.num_layers": 1}
  run = grid.with_fields(runs[0], fields)

  # A named field ends with its value "now". There is one further field.
  with pytest.raises(UserError, match=" now; .* now and 1 more; choose"):
    results.read_run(tmp_path / run.name, run, TASK, location_fields=())


def test_a_folder_without_results_has_no_entries(runs, tmp_path):
  missing_path = tmp_path / "results.json"

  stored = results.read_folder(
    missing_path, "ablations", "cpu", runs, TASK, location_fields=()
  )

  assert stored == {}


def test_a_folder_returns_the_entries_that_were_written(
  entries, runs, tmp_path
):
  path = tmp_path / "results.json"

  write_folder(path, entries)

  stored = results.read_folder(
    path, "ablations", "cpu", runs, TASK, location_fields=()
  )
  assert list(stored.values()) == entries


def test_a_folder_stores_fields_with_one_value_once(entries, tmp_path):
  """The runs differ in the seed and in the architecture, not in the steps."""
  path = tmp_path / "results.json"
  num_steps = entries[0]["config"]["train.steps"]

  write_folder(path, entries)

  stored = json.loads(path.read_text())
  assert stored["config"]["train.steps"] == num_steps
  fields_of_runs = stored["runs"][0]["config"].keys()
  assert {"train.seed", "model.attention", "data.seed"} <= fields_of_runs
  assert "train.steps" not in fields_of_runs
  for run in stored["runs"]:
    assert run["config"].keys() == fields_of_runs


@pytest.mark.parametrize(
  "name, grid_name, task, message",
  [
    pytest.param(
      "retrieval",
      "cpu",
      TASK,
      "another experiment, 'ablations'; choose another place with --out=DIR",
      id="experiment",
    ),
    pytest.param("ablations", "tpu", TASK, "another grid, 'cpu'", id="grid"),
    pytest.param(
      "ablations",
      "cpu",
      {"samples": 2},
      "the task's samples is 3 there and 2 now",
      id="task",
    ),
  ],
)
def test_a_folder_of_other_results_is_refused(
  entries, runs, tmp_path, name, grid_name, task, message
):
  path = tmp_path / "results.json"
  write_folder(path, entries)

  with pytest.raises(UserError, match=message):
    results.read_folder(path, name, grid_name, runs, task, location_fields=())


def test_a_folder_with_a_run_of_another_grid_is_refused(
  entries, runs, tmp_path
):
  path = tmp_path / "results.json"
  write_folder(path, entries)
  without_first_run = runs[1:]

  with pytest.raises(
    UserError,
    match="results of 'transformer/seed_0', which the grid does not have now",
  ):
    results.read_folder(
      path, "ablations", "cpu", without_first_run, TASK, location_fields=()
    )


def test_a_folder_of_another_config_is_refused(entries, runs, tmp_path):
  path = tmp_path / "results.json"
  write_folder(path, entries)
  assert runs[0].config.train.steps == 600
  changed_runs = [grid.with_fields(run, {"train.steps": 200}) for run in runs]

  with pytest.raises(
    UserError,
    match=r"another config \(transformer/seed_0\):"
    " train.steps is 600 there and 200 now",
  ):
    results.read_folder(
      path, "ablations", "cpu", changed_runs, TASK, location_fields=()
    )


@pytest.fixture
def older_results(entries, tmp_path):
  """A results.json from before the field model.remat existed."""
  for entry in entries:
    del entry["config"]["model.remat"]
  path = tmp_path / "results.json"
  write_folder(path, entries)
  return path


def test_results_without_a_newer_field_fit_its_default(older_results, runs):
  stored = results.read_folder(
    older_results, "ablations", "cpu", runs, TASK, location_fields=()
  )

  assert len(stored) == len(runs)


def test_results_without_a_newer_field_do_not_fit_another_value(
  older_results, runs
):
  changed_runs = [
    grid.with_fields(run, {"model.remat": "full"}) for run in runs
  ]

  # The default is "none".
  with pytest.raises(
    UserError, match="model.remat is 'none' there and 'full' now"
  ):
    results.read_folder(
      older_results, "ablations", "cpu", changed_runs, TASK, location_fields=()
    )


UNREADABLE_CONTENTS = [
  pytest.param("", id="empty"),
  pytest.param("{", id="no_json"),
  pytest.param("[]", id="list"),
  pytest.param("3", id="number"),
  pytest.param("{}", id="no_keys"),
  pytest.param('{"name": "diff/seed_0"}', id="missing_keys"),
]


@pytest.mark.parametrize("content", UNREADABLE_CONTENTS)
def test_an_unreadable_result_of_a_run_is_named(runs, tmp_path, content):
  (tmp_path / "result.json").write_text(content)

  with pytest.raises(
    UserError, match="result.json: cannot be read .*; delete it, and run again"
  ):
    results.read_run(tmp_path, runs[0], TASK, location_fields=())


@pytest.mark.parametrize("content", UNREADABLE_CONTENTS)
def test_unreadable_results_of_a_folder_are_named(runs, tmp_path, content):
  path = tmp_path / "results.json"
  path.write_text(content)

  with pytest.raises(
    UserError, match="results.json: cannot be read .*; delete it, and run again"
  ):
    results.read_folder(
      path, "ablations", "cpu", runs, TASK, location_fields=()
    )


def test_variants_with_a_failed_run_are_left_out():
  """The runs of the variant that did not fail would be a biased sample."""
  stored = {
    "baseline": "transformer",
    "runs": [
      {"variant": "transformer", "seed": 0},
      {"variant": "diff", "seed": 0},
      {"variant": "diff", "seed": 1, "failed": "diverged"},
    ],
  }

  rows = results.without_failed_rows(stored)

  assert rows == {
    "baseline": "transformer",
    "runs": [{"variant": "transformer", "seed": 0}],
  }


def test_the_summary_is_computed_from_the_results(entries, tmp_path):
  path = tmp_path / "results.json"

  def count_runs(stored):
    return [{"number of runs": len(stored["runs"])}]

  stored = results.write_folder(
    path, "ablations", "cpu", "transformer", entries, summarise=count_runs
  )

  assert stored["summary"] == [{"number of runs": len(entries)}]
  assert json.loads(path.read_text()) == stored


def test_results_of_one_version_of_python_can_be_compared(entries):
  """Models are trained on the standard library, which differs by version."""
  python = entries[0]["versions"]["python"]

  # These calls raise no error. The version is that of the runs to come.
  compatibility.check_python_versions(entries)
  compatibility.check_python_versions(entries, python)
  compatibility.check_python_versions([], "3.99")


def test_results_of_different_pythons_are_not_compared(entries):
  """Models are trained on the standard library, which differs by version."""
  changed = {**entries[0], "versions": {"python": "3.99"}}

  with pytest.raises(UserError, match="cannot be compared"):
    compatibility.check_python_versions([changed, *entries[1:]])


def test_further_runs_need_the_same_python(entries):
  """Models are trained on the standard library, which differs by version."""
  with pytest.raises(
    UserError,
    match="data.source = stdlib under Python .*3.99.* cannot be compared",
  ):
    compatibility.check_python_versions(entries, "3.99")


def test_a_text_of_the_user_is_independent_of_python():
  own_text = {"data.source": "text:x"}
  first = {"config": own_text, "versions": {"python": "3.11"}}
  second = {"config": own_text, "versions": {"python": "3.99"}}

  # This raises no error.
  compatibility.check_python_versions([first, second])
