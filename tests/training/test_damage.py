"""A damaged checkpoint is skipped with a warning, and the one before is loaded.

The damaged checkpoint is step 20 of a workdir with the steps 10 and 20.
"""

import json
import logging
import os
import pathlib
import random
import shutil
import stat
import subprocess
from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np
import pytest

from diffjax.config import Config, UserError
from diffjax.training import manifest
from diffjax.training.checkpoint import (
  Checkpoint,
  Checkpoints,
  find_checkpoint,
  open_checkpoint,
)
from tests.harness import in_process


def make_state(seed: int) -> dict[str, Any]:
  """Returns a state with random parameters."""
  rng = np.random.default_rng(seed)
  params = {
    "query": rng.standard_normal((4, 8), np.float32),
    "value": rng.standard_normal((4, 8), np.float32),
  }
  return jax.device_put({"params": params, "step": np.int32(seed)})


def make_config(step: int) -> dict[str, Any]:
  """Returns a config that differs between steps, as of a prolonged run."""
  config = Config().to_dict()
  config["train"]["steps"] = step
  return config


def abstract(tree: Any) -> Any:
  """Returns the shapes, dtypes and shardings of a tree of arrays."""

  def abstract_leaf(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

  return jax.tree.map(abstract_leaf, tree)


def save_run(workdir: pathlib.Path, first_seed: int) -> pathlib.Path:
  """Saves the steps 10 and 20, and returns the workdir."""
  with Checkpoints(workdir, keep=10) as checkpoints:
    for step in (10, 20):
      checkpoints.save(
        step,
        make_state(first_seed + step),
        data_state={"batch": step},
        config=make_config(step),
      )
  return workdir


@pytest.fixture(scope="module")
def saved_workdir(tmp_path_factory):
  return save_run(tmp_path_factory.mktemp("run"), first_seed=0)


@pytest.fixture
def workdir(saved_workdir, tmp_path):
  """A workdir with the steps 10 and 20, which a test may damage."""
  return shutil.copytree(saved_workdir, tmp_path / "run")


@pytest.fixture
def step_20(workdir):
  """The directory of step 20, which a test may damage."""
  return workdir / "checkpoints" / "20"


def restore(workdir: pathlib.Path) -> Checkpoint | None:
  """Returns the checkpoint from which a run is resumed."""
  checkpoint = find_checkpoint(workdir)
  Checkpoints(workdir, keep=10, restored=checkpoint)
  return checkpoint


def load_params(workdir: pathlib.Path, step: int | None = None) -> Any:
  """Returns the parameters of a checkpoint. None is the newest one."""
  shapes = abstract(make_state(0)["params"])
  return open_checkpoint(workdir, step).params(shapes)


def newest_config(workdir: pathlib.Path) -> dict[str, Any] | None:
  """Returns the config of the newest checkpoint, without reading its arrays."""
  checkpoint = find_checkpoint(workdir, json_only=True)
  if checkpoint is None:
    return None
  return checkpoint.config


def verify(workdir: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs the command that verifies all checkpoints."""
  return in_process.call(
    "diffjax.checkpoints", f"--workdir={workdir}", "--verify"
  )


def assert_restored(step: int, workdir: pathlib.Path) -> None:
  """Checks that a run is resumed from a step, with all that was saved."""
  checkpoint = restore(workdir)

  assert checkpoint.step == step
  assert checkpoint.data_state == {"batch": step}
  assert checkpoint.config == make_config(step)
  expected = make_state(step)
  state = checkpoint.state(abstract(expected))
  chex.assert_trees_all_equal(state, expected)
  chex.assert_trees_all_equal(load_params(workdir), expected["params"])


def assert_step_is_skipped(
  workdir: pathlib.Path,
  caplog: pytest.LogCaptureFixture,
  reason: str,
  damaged_step: int = 20,
) -> None:
  """Checks that step 10 is restored, and that the damage is reported.

  Args:
    workdir: the workdir with a damaged step.
    caplog: has the log.
    reason: part of the warning and of the output of the command that verifies.
    damaged_step: the number of the damaged step.
  """
  with caplog.at_level(logging.WARNING):
    restore(workdir)
  [record] = caplog.records
  warning = record.getMessage()
  assert str(workdir / "checkpoints" / str(damaged_step)) in warning
  assert reason in warning

  assert_restored(10, workdir)
  message = f"no complete checkpoint of step {damaged_step}"
  with pytest.raises(UserError, match=message):
    load_params(workdir, damaged_step)

  result = verify(workdir)
  assert result.stderr == f"error: not complete: {damaged_step}\n"
  lines = result.stdout.splitlines()
  [line] = [line for line in lines if line.split()[0] == str(damaged_step)]
  assert "not complete" in line
  assert reason in line


# Damage of one file.

# One name for each kind of file in a checkpoint. A directory stands for its
# largest file, because the names in it differ between saves.
KINDS_OF_FILES = [
  "manifest.json",
  "_CHECKPOINT_METADATA",
  "commit_success.txt",
  "state/_METADATA",
  "state/_sharding",
  "state/manifest.ocdbt",
  "state/array_metadatas/process_0",
  "state/d/",
  "state/ocdbt.process_0/manifest.ocdbt",
  "state/ocdbt.process_0/d/",
]
EMPTY_FILE = "orbax.checkpoint"


def find_file(step: pathlib.Path, kind: str) -> pathlib.Path:
  """Returns a checkpoint's file of a kind."""
  if not kind.endswith("/"):
    return step / kind
  files = (step / kind).iterdir()
  return max(files, key=lambda file: file.stat().st_size)


def truncate(path: pathlib.Path) -> None:
  path.write_bytes(path.read_bytes()[:-1])


def empty(path: pathlib.Path) -> None:
  path.write_bytes(b"")


def flip_random_bit(path: pathlib.Path, seed: int) -> None:
  content = bytearray(path.read_bytes())
  rng = random.Random(seed)
  content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  path.write_bytes(bytes(content))


def flip_first_bit(path: pathlib.Path) -> None:
  flip_random_bit(path, seed=1)


def flip_second_bit(path: pathlib.Path) -> None:
  flip_random_bit(path, seed=2)


def flip_third_bit(path: pathlib.Path) -> None:
  flip_random_bit(path, seed=3)


def delete(path: pathlib.Path) -> None:
  path.unlink()


def append_byte(path: pathlib.Path) -> None:
  path.write_bytes(path.read_bytes() + b"\0")


def replace_by_directory(path: pathlib.Path) -> None:
  path.unlink()
  path.mkdir()


def replace_by_broken_link(path: pathlib.Path) -> None:
  path.unlink()
  path.symlink_to("nowhere")


def replace_by_socket(path: pathlib.Path) -> None:
  """Makes a file that cannot be opened, not even by root."""
  path.unlink()
  os.mknod(path, stat.S_IFSOCK | 0o600)


DAMAGES_OF_FULL_FILES = [
  truncate,
  empty,
  flip_first_bit,
  flip_second_bit,
  flip_third_bit,
]
DAMAGES_OF_ALL_FILES = [
  delete,
  append_byte,
  replace_by_directory,
  replace_by_broken_link,
  replace_by_socket,
]
ALL_DAMAGES = [*DAMAGES_OF_FULL_FILES, *DAMAGES_OF_ALL_FILES]


def assert_damaged_file_is_detected(
  workdir: pathlib.Path,
  caplog: pytest.LogCaptureFixture,
  kind: str,
  damage: Callable[[pathlib.Path], None],
) -> None:
  """Damages one file of step 20, and checks that the step is skipped.

  Args:
    workdir: the workdir of a run with the steps 10 and 20.
    caplog: has the log.
    kind: the file, as in KINDS_OF_FILES.
    damage: a function that damages the file at a path.
  """
  step_20 = workdir / "checkpoints" / "20"
  path = find_file(step_20, kind)

  damage(path)

  assert_step_is_skipped(workdir, caplog, str(path.relative_to(step_20)))
  # The config is read without the other files.
  if kind in ("manifest.json", "_CHECKPOINT_METADATA"):
    assert newest_config(workdir) == make_config(10)
  else:
    assert newest_config(workdir) == make_config(20)


# Together, the next three tests have every damage and every kind of file. The
# full tier has their other combinations.


@pytest.mark.parametrize("damage", ALL_DAMAGES)
def test_each_damage_of_a_file_is_detected(workdir, caplog, damage):
  """`damage` is a function that truncates, deletes or replaces a file."""
  assert_damaged_file_is_detected(
    workdir, caplog, kind="manifest.json", damage=damage
  )


@pytest.mark.parametrize("kind", KINDS_OF_FILES[1:])
def test_damage_of_each_kind_of_file_is_detected(workdir, caplog, kind):
  assert_damaged_file_is_detected(workdir, caplog, kind=kind, damage=truncate)


def test_a_missing_empty_file_is_detected(workdir, caplog):
  assert_damaged_file_is_detected(
    workdir, caplog, kind=EMPTY_FILE, damage=delete
  )


@pytest.mark.parametrize("kind", ["commit_success.txt", EMPTY_FILE])
def test_a_pipe_in_place_of_a_file_is_not_opened(workdir, caplog, kind):
  """Opening it would wait until something is written to it."""

  def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)

  assert_damaged_file_is_detected(
    workdir, caplog, kind=kind, damage=replace_by_pipe
  )


@pytest.mark.full
@pytest.mark.parametrize("damage", ALL_DAMAGES[1:])
@pytest.mark.parametrize("kind", KINDS_OF_FILES[1:])
def test_each_damage_of_each_kind_of_file_is_detected(
  workdir, caplog, kind, damage
):
  assert_damaged_file_is_detected(workdir, caplog, kind=kind, damage=damage)


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES_OF_ALL_FILES[1:])
def test_each_damage_of_an_empty_file_is_detected(workdir, caplog, damage):
  assert_damaged_file_is_detected(
    workdir, caplog, kind=EMPTY_FILE, damage=damage
  )


def test_every_file_of_a_checkpoint_is_of_a_kind_that_the_tests_damage(
  saved_workdir,
):
  """KINDS_OF_FILES must be complete. "state/d/" means all files in it."""
  step_20 = saved_workdir / "checkpoints" / "20"
  directories = ("state/d/", "state/ocdbt.process_0/d/")

  names = set()
  for path in step_20.rglob("*"):
    name = str(path.relative_to(step_20))
    if path.is_file() and not name.startswith(directories):
      names.add(name)

  assert names <= {*KINDS_OF_FILES, EMPTY_FILE}


# Damage of a whole checkpoint.


def test_a_step_without_its_arrays_is_skipped(workdir, step_20, caplog):
  shutil.rmtree(step_20 / "state" / "d")

  assert_step_is_skipped(workdir, caplog, "is missing")


def test_a_step_with_the_arrays_of_another_step_is_skipped(
  workdir, step_20, caplog
):
  shutil.rmtree(step_20 / "state")
  shutil.copytree(workdir / "checkpoints/10/state", step_20 / "state")

  assert_step_is_skipped(workdir, caplog, "state/")


def test_an_empty_step_is_skipped(workdir, step_20, caplog):
  shutil.rmtree(step_20)
  step_20.mkdir()

  assert_step_is_skipped(workdir, caplog, "no manifest.json")


def test_a_copy_of_a_step_under_another_number_is_skipped(
  workdir, step_20, caplog
):
  shutil.rmtree(step_20)
  shutil.copytree(workdir / "checkpoints" / "10", step_20)

  assert_step_is_skipped(workdir, caplog, "is of step 10")


def test_a_renamed_step_is_skipped(workdir, step_20, caplog):
  step_20.rename(workdir / "checkpoints" / "30")

  assert_step_is_skipped(workdir, caplog, "is of step 20", damaged_step=30)


def test_a_file_in_place_of_a_step_is_skipped(workdir, step_20, caplog):
  shutil.rmtree(step_20)
  step_20.write_text("")

  assert_step_is_skipped(workdir, caplog, "Not a directory")


def test_a_link_to_itself_in_place_of_a_step_is_skipped(
  workdir, step_20, caplog
):
  shutil.rmtree(step_20)
  step_20.symlink_to(step_20.name)

  assert_step_is_skipped(workdir, caplog, "Too many levels of symbolic links")


def test_a_broken_link_in_place_of_a_step_is_skipped(workdir, step_20, caplog):
  shutil.rmtree(step_20)
  step_20.symlink_to("nowhere")

  assert_step_is_skipped(workdir, caplog, "no manifest.json")


def test_a_file_among_the_arrays_is_detected(workdir, step_20, caplog):
  (step_20 / "state/d/0123").write_text("no part of a checkpoint")

  reason = "state/d/0123 is not of this checkpoint"
  assert_step_is_skipped(workdir, caplog, reason)


def test_metadata_of_another_process_are_detected(workdir, step_20, caplog):
  """Orbax would read them and fail."""
  name = "state/array_metadatas/process_1"
  (step_20 / name).write_text("no part of a checkpoint")

  assert_step_is_skipped(workdir, caplog, f"{name} is not of this checkpoint")


def test_a_link_to_a_parent_among_the_files_is_detected(
  workdir, step_20, caplog
):
  (step_20 / "state/loop").symlink_to("..")

  assert_step_is_skipped(workdir, caplog, "state/loop/")


# Damage of the manifest.


def test_a_manifest_of_another_step_is_detected(workdir, step_20, caplog):
  shutil.copy(
    workdir / "checkpoints/10/manifest.json", step_20 / "manifest.json"
  )

  assert_step_is_skipped(workdir, caplog, "is of step 10")


def test_a_manifest_of_another_run_is_detected(
  workdir, step_20, tmp_path, caplog
):
  """It has the right step, but hashes of the other run's files."""
  other_workdir = save_run(tmp_path / "other", first_seed=5)
  shutil.copy(
    other_workdir / "checkpoints/20/manifest.json", step_20 / "manifest.json"
  )

  # The warning names one of the files, which depends on their order.
  assert_step_is_skipped(workdir, caplog, reason="")


def test_changed_metrics_in_a_manifest_are_detected(workdir, step_20, caplog):
  """A manifest has a hash of its own content, too."""
  path = step_20 / "manifest.json"
  content = json.loads(path.read_text())
  content["metrics"] = {"validation/loss": 0.0}
  # These are the options with which manifests are written.
  path.write_text(json.dumps(content, sort_keys=True, indent=1))

  assert_step_is_skipped(workdir, caplog, "manifest.json is damaged")


@pytest.mark.parametrize(
  "content",
  [
    pytest.param(b"{}", id="empty object"),
    pytest.param(b"[]", id="list"),
    pytest.param(b"null", id="null"),
    pytest.param(b'{"sha256": 1}', id="hash is a number"),
    pytest.param(b"{", id="incomplete"),
    pytest.param(b"\xff\xfe{}", id="not UTF-8"),
    pytest.param(b"[" * 100_000, id="nested too deeply"),
  ],
)
def test_a_file_that_is_no_manifest_is_detected(
  workdir, step_20, caplog, content
):
  """The manifest is a JSON object with a hash of its own content."""
  (step_20 / "manifest.json").write_bytes(content)

  assert_step_is_skipped(workdir, caplog, "manifest.json is damaged")


def test_a_file_that_the_manifest_does_not_name_fails_its_verification(step_20):
  """The manifest is written without the file, and so has no hash of it."""
  (step_20 / "_CHECKPOINT_METADATA").unlink()
  manifest.write(step_20, step=20, scores={})

  with pytest.raises(manifest.Damage, match="_CHECKPOINT_METADATA"):
    manifest.verify(step_20, step=20, only="_CHECKPOINT_METADATA")


# Harmless changes.


def assert_newest_step_is_restored(
  workdir: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
  """Checks that step 20 is restored without a warning."""
  assert_restored(20, workdir)
  assert not caplog.records
  assert newest_config(workdir) == make_config(20)
  result = verify(workdir)
  assert result.returncode == 0
  # A heading and the two steps.
  assert len(result.stdout.splitlines()) == 3


def test_other_files_in_a_step_are_harmless(workdir, step_20, caplog):
  """Orbax does not read such files, for example a file manager's."""
  for name in ("notes.txt", "manifest.json.tmp", ".DS_Store", "process_1"):
    (step_20 / name).write_text("no part of a checkpoint")
  (step_20 / "state" / "d" / "directory").mkdir()

  assert_newest_step_is_restored(workdir, caplog)


def test_directories_whose_names_are_no_steps_are_harmless(workdir, caplog):
  """The name of a step is a decimal number without leading zeros."""
  directory = workdir / "checkpoints"
  for name in ("020", "20.bak", "notes", "-30", "3_0", "³"):
    shutil.copytree(directory / "10", directory / name)

  assert_newest_step_is_restored(workdir, caplog)


def test_a_step_may_be_a_link_to_another_directory(workdir, step_20, caplog):
  step_20.rename(workdir / "elsewhere")
  step_20.symlink_to(workdir / "elsewhere")

  assert_newest_step_is_restored(workdir, caplog)


def test_an_unfinished_save_is_listed_and_not_removed(workdir, step_20):
  """It may be under way, so commands that only read must not remove it."""
  unfinished = workdir / "checkpoints" / "30.orbax-checkpoint-tmp"
  shutil.copytree(step_20, unfinished)

  result = verify(workdir)
  config = newest_config(workdir)

  assert result.returncode == 0
  assert (
    "30.orbax-checkpoint-tmp: a save that is under way, or was interrupted"
  ) in result.stdout
  assert config == make_config(20)
  assert unfinished.exists()


def test_a_run_removes_an_unfinished_save_with_a_warning(
  workdir, step_20, caplog
):
  """A run is the only writer of its workdir, so no save is under way."""
  unfinished = workdir / "checkpoints" / "30.orbax-checkpoint-tmp"
  shutil.copytree(step_20, unfinished)

  assert_restored(20, workdir)

  assert not unfinished.exists()
  [record] = caplog.records
  assert unfinished.name in record.getMessage()


# No complete checkpoint.


@pytest.mark.parametrize("damage", [truncate, delete, flip_first_bit])
def test_a_workdir_with_only_damaged_steps_is_an_error(workdir, damage):
  """A run that started again there would delete what is left of the old one."""
  damage(workdir / "checkpoints/10/_CHECKPOINT_METADATA")
  damage(workdir / "checkpoints/20/_CHECKPOINT_METADATA")

  message = (
    r"every checkpoint in .*/checkpoints is damaged \(20: _CHECKPOINT"
    ".*intact copy.*another --workdir"
  )
  with pytest.raises(UserError, match=message):
    restore(workdir)
  with pytest.raises(UserError, match=message):
    open_checkpoint(workdir)
  with pytest.raises(UserError, match=message):
    newest_config(workdir)
  assert verify(workdir).stderr == "error: not complete: 10, 20\n"


def test_a_workdir_that_has_lost_all_manifests_is_an_error(workdir):
  """A killed run lacks at most the manifest of its newest step."""
  (workdir / "checkpoints/10/manifest.json").unlink()
  (workdir / "checkpoints/20/manifest.json").unlink()

  with pytest.raises(UserError, match="every checkpoint in"):
    restore(workdir)


def test_a_run_whose_first_save_was_interrupted_starts_again(
  workdir, step_20, caplog
):
  """The manifest is written last, so the interrupted save has none.

  The only step of this run is step 20.
  """
  shutil.rmtree(workdir / "checkpoints" / "10")
  (step_20 / "manifest.json").unlink()

  assert restore(workdir) is None
  assert newest_config(workdir) is None
  assert "its save or its deletion was interrupted" in caplog.text


def save_without_manifest(workdir: pathlib.Path, step: int) -> None:
  """Leaves a step as a kill does that comes before its manifest is written."""
  restored = find_checkpoint(workdir)
  with Checkpoints(workdir, keep=10, restored=restored) as checkpoints:
    checkpoints.save(
      step, make_state(step), data_state={}, config=make_config(step)
    )
  (workdir / "checkpoints" / str(step) / "manifest.json").unlink()


def test_a_run_without_a_complete_save_starts_again(tmp_path):
  """Two sessions were killed during their first save, of another step each."""
  save_without_manifest(tmp_path, step=20)
  save_without_manifest(tmp_path, step=10)

  assert restore(tmp_path) is None
