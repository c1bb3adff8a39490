"""Every damage to a saved checkpoint is passed over, aloud, and nothing wrong is ever loaded; what is harmless changes nothing."""

import json
import logging
import os
import random
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from diffjax import checkpoints as command
from diffjax.config import Config, UserError
from diffjax.training import manifest
from diffjax.training.checkpoint import (
  Checkpoints,
  find_checkpoint,
  open_checkpoint,
)
from tests.harness.tiers import full


def make_state(seed=0):
  draw = np.random.default_rng(seed)
  params = {
    name: jnp.asarray(draw.standard_normal((4, 8)), jnp.float32)
    for name in ("query", "value")
  }
  return {"params": params, "step": jnp.int32(seed)}


def make_config(step):
  """Each step's own, as if the run had been prolonged in between."""
  config = Config().to_dict()
  config["train"]["steps"] = step
  return config


def abstract(tree):
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=leaf.sharding
    ),
    tree,
  )


def save_run(workdir, seed=0):
  checkpoints = Checkpoints(workdir, keep=10)
  for step in (10, 20):
    checkpoints.save(
      step,
      make_state(step + seed),
      data_state={"batch": step},
      config=make_config(step),
    )
  checkpoints.close()
  return workdir


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
  return save_run(tmp_path_factory.mktemp("other"), seed=5)


# Every kind of file of a step, by what varies between saves.
EMPTY = "orbax.checkpoint"
KINDS = [
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


def find(step, kind):
  return (
    max((step / kind).iterdir(), key=lambda file: file.stat().st_size)
    if kind.endswith("/")
    else step / kind
  )


def flip(seed):
  def flip_bit(path):
    data, draw = bytearray(path.read_bytes()), random.Random(seed)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(data))

  return flip_bit


def truncate(path):
  path.write_bytes(path.read_bytes()[:-1])


def empty(path):
  path.write_bytes(b"")


def append(path):
  path.write_bytes(path.read_bytes() + b"\0")


def swap_for(make):
  def swap(path):
    path.unlink()
    make(path)

  return swap


FILE_DAMAGES = {
  "truncated": truncate,
  "emptied": empty,
  "bit 1": flip(1),
  "bit 2": flip(2),
  "bit 3": flip(3),
  "missing": os.remove,
  "longer": append,
  "directory": swap_for(os.mkdir),
  "broken link": swap_for(lambda path: path.symlink_to("nowhere")),
  # Not chmod: root reads all the same. A socket cannot be opened; a pipe would be waited for.
  "unreadable": swap_for(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
}
CASES = [(kind, name) for kind in KINDS for name in FILE_DAMAGES]
CASES += [
  (EMPTY, name)
  for name in ("missing", "longer", "directory", "broken link", "unreadable")
]
# Waited for, if it were opened.
CASES += [("commit_success.txt", "pipe"), (EMPTY, "pipe")]
FILE_DAMAGES["pipe"] = swap_for(os.mkfifo)


def without_directory(step):
  shutil.rmtree(step / "state" / "d")


def arrays_of_step_10(step):
  shutil.rmtree(step / "state")
  shutil.copytree(step.parent / "10" / "state", step / "state")


def empty_step(step):
  shutil.rmtree(step)
  step.mkdir()


def step_copied_under_another_number(step):
  shutil.rmtree(step)
  shutil.copytree(step.parent / "10", step)


def step_renamed(step):
  step.rename(step.parent / "30")


def step_is_a_file(step):
  shutil.rmtree(step)
  step.write_text("")


def step_is_a_link_to_itself(step):
  shutil.rmtree(step)
  step.symlink_to(step.name)


def step_is_a_broken_link(step):
  shutil.rmtree(step)
  step.symlink_to("nowhere")


def manifest_of_step_10(step):
  shutil.copy(step.parent / "10/manifest.json", step / "manifest.json")


def metadata_of_another_process(step):
  """Orbax reads all that it finds there, and fails."""
  (step / "state/array_metadatas/process_1").write_text("not a checkpoint's")


def file_among_the_arrays(step):
  (step / "state/d/0123").write_text("not a checkpoint's")


def link_to_itself_inside(step):
  (step / "state/loop").symlink_to("..")


def manifest_with_forged_metrics(step):
  body = json.loads((step / "manifest.json").read_text())
  body["metrics"] = {"validation/loss": 0.0}
  (step / "manifest.json").write_text(
    json.dumps(body, sort_keys=True, indent=1)
  )


STEP_DAMAGES = [
  (without_directory, "is missing"),
  (arrays_of_step_10, "state/"),
  (empty_step, "no manifest.json"),
  (step_copied_under_another_number, "is of step 10"),
  (step_renamed, "is of step 20"),
  (step_is_a_file, "Not a directory"),
  (step_is_a_link_to_itself, "Too many levels of symbolic links"),
  (step_is_a_broken_link, "no manifest.json"),
  (manifest_of_step_10, "is of step 10"),
  (
    metadata_of_another_process,
    "state/array_metadatas/process_1 is not of this checkpoint",
  ),
  (file_among_the_arrays, "state/d/0123 is not of this checkpoint"),
  (link_to_itself_inside, "state/loop/"),
  (manifest_with_forged_metrics, "manifest.json is damaged"),
]


@pytest.fixture
def workdir(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "run")


def verify(workdir, capsys):
  """What the command prints, and the line that it ends with, or None."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(workdir=str(workdir), verify=True):
    try:
      command.main()
      error = None
    except UserError as caught:
      error = str(caught)
  return capsys.readouterr().out, error


def newest_config(workdir):
  """Read as at the start of a run: without the arrays."""
  found = find_checkpoint(workdir, json_only=True)
  return None if found is None else found.config


def assert_holds(step, restored, params):
  state = restored.state(abstract(make_state()))
  for name, expected in make_state(step)["params"].items():
    np.testing.assert_array_equal(state["params"][name], expected)
    np.testing.assert_array_equal(params[name], expected)
  assert (
    restored.step
    == int(state["step"])
    == restored.data_state["batch"]
    == restored.config["train"]["steps"]
    == step
  )


def params(workdir, step=None):
  return open_checkpoint(workdir, step).params(abstract(make_state()["params"]))


def restore(workdir):
  """The checkpoint that a run goes on from, as the run opens the workdir."""
  found = find_checkpoint(workdir)
  Checkpoints(workdir, keep=10, restored=found)
  return found


def load(workdir):
  return restore(workdir), params(workdir)


def assert_passed_over(workdir, caplog, capsys, reason, damaged=20):
  path = workdir / "checkpoints" / str(damaged)
  with caplog.at_level(logging.WARNING):
    restored = restore(workdir)
  warnings = [record.getMessage() for record in caplog.records]
  assert (
    len(warnings) == 1 and str(path) in warnings[0] and reason in warnings[0]
  )
  assert_holds(10, restored, params(workdir))
  with pytest.raises(
    UserError, match=f"no complete checkpoint of step {damaged}"
  ):
    params(workdir, damaged)
  printed, error = verify(workdir, capsys)
  (line,) = [
    line for line in printed.splitlines() if line.split()[0] == str(damaged)
  ]
  assert (
    "not complete" in line
    and reason in line
    and error == f"not complete: {damaged}"
  )


# Every kind of file once, and every damage.
FEW = [
  case
  for n, case in enumerate(CASES)
  if any(case[i] not in {other[i] for other in CASES[:n]} for i in (0, 1))
]


@pytest.mark.parametrize(
  "kind, damage",
  [*FEW, *full(case for case in CASES if case not in FEW)],
  ids=str,
)
def test_damaged_file(workdir, caplog, capsys, kind, damage):
  path = find(workdir / "checkpoints" / "20", kind)
  FILE_DAMAGES[damage](path)
  assert_passed_over(
    workdir,
    caplog,
    capsys,
    str(path.relative_to(workdir / "checkpoints" / "20")),
  )
  # Reads one file alone: the newest config that is as it was written.
  assert newest_config(workdir) == make_config(
    10 if kind in ("manifest.json", "_CHECKPOINT_METADATA") else 20
  )


@pytest.mark.parametrize("damage, reason", STEP_DAMAGES)
def test_damaged_step(workdir, caplog, capsys, damage, reason):
  damage(workdir / "checkpoints" / "20")
  assert_passed_over(
    workdir,
    caplog,
    capsys,
    reason,
    damaged=30 if damage is step_renamed else 20,
  )


@pytest.mark.parametrize(
  "text",
  [
    b"{}",
    b"[]",
    b"null",
    b'{"sha256": 1}',
    b"{",
    b"\xff\xfe{}",
    b"[" * 100_000,
  ],
)
def test_manifest_that_is_none(workdir, caplog, capsys, text):
  (workdir / "checkpoints/20/manifest.json").write_bytes(text)
  assert_passed_over(workdir, caplog, capsys, "manifest.json is damaged")


def test_manifest_of_another_run(workdir, other_run, caplog, capsys):
  shutil.copy(
    other_run / "checkpoints/20/manifest.json",
    workdir / "checkpoints/20/manifest.json",
  )
  assert_passed_over(workdir, caplog, capsys, "")


def test_the_cases_name_every_kind_of_file(saved):
  step = saved / "checkpoints" / "20"
  for path in step.rglob("*"):
    name = str(path.relative_to(step))
    assert path.is_dir() or any(
      name == kind or (kind.endswith("/") and name.startswith(kind))
      for kind in [*KINDS, EMPTY]
    ), name


def extra_files(step):
  for name in ("notes.txt", "manifest.json.tmp", ".DS_Store", "process_1"):
    (step / name).write_text("not a checkpoint's")
  (step / "state" / "d" / "directory").mkdir()


def extra_directories(step):
  for name in ("020", "20.bak", "notes", "-30", "3_0", "³"):
    shutil.copytree(step.parent / "10", step.parent / name)


def moved_behind_a_link(step):
  step.rename(step.parents[1] / "elsewhere")
  step.symlink_to(step.parents[1] / "elsewhere")


@pytest.mark.parametrize(
  "change", [extra_files, extra_directories, moved_behind_a_link]
)
def test_harmless(workdir, caplog, capsys, change):
  change(workdir / "checkpoints" / "20")
  assert_holds(20, *load(workdir))
  assert not caplog.records and newest_config(workdir) == make_config(20)
  printed, error = verify(workdir, capsys)
  assert error is None and len(printed.splitlines()) == 3


def test_stale_temporary_directory(workdir, caplog, capsys):
  stale = workdir / "checkpoints" / "30.orbax-checkpoint-tmp"
  shutil.copytree(workdir / "checkpoints" / "20", stale)
  assert newest_config(workdir) == make_config(20)
  printed, error = verify(workdir, capsys)
  assert (
    error is None
    and "30.orbax-checkpoint-tmp: a save that is under way, or was interrupted"
    in printed
  )
  assert stale.exists(), "a reader deletes nothing"
  assert_holds(20, *load(workdir))
  assert not stale.exists() and [
    stale.name in record.getMessage() for record in caplog.records
  ] == [True]


@pytest.mark.parametrize("damage", ["truncated", "missing", "bit 1"])
def test_all_damaged_is_an_error(workdir, capsys, damage):
  for step in ("10", "20"):
    FILE_DAMAGES[damage](
      workdir / "checkpoints" / step / "_CHECKPOINT_METADATA"
    )
  for reader in (
    lambda: restore(workdir),
    lambda: open_checkpoint(workdir),
    lambda: newest_config(workdir),
  ):
    with pytest.raises(
      UserError,
      match=r"every checkpoint in .*/checkpoints is damaged \(20: _CHECKPOINT.*intact copy.*another --workdir",
    ):
      reader()
  assert verify(workdir, capsys)[1] == "not complete: 10, 20"


def test_every_manifest_lost_is_an_error(workdir):
  for step in ("10", "20"):
    (workdir / "checkpoints" / step / "manifest.json").unlink()
  with pytest.raises(UserError, match="every checkpoint in"):
    restore(workdir)


def test_first_save_interrupted_starts_from_the_beginning(workdir, caplog):
  shutil.rmtree(workdir / "checkpoints" / "10")
  (workdir / "checkpoints" / "20" / "manifest.json").unlink()
  assert restore(workdir) is None
  assert (
    newest_config(workdir) is None
    and "its save or its deletion was interrupted" in caplog.text
  )


def test_first_saves_interrupted_at_two_steps_start_from_the_beginning(
  tmp_path,
):
  """Each run is killed after Orbax's files, before the manifest."""
  for step in (20, 10):
    with Checkpoints(
      tmp_path, keep=10, restored=find_checkpoint(tmp_path)
    ) as checkpoints:
      checkpoints.save(
        step, make_state(step), data_state={}, config=make_config(step)
      )
    (tmp_path / "checkpoints" / str(step) / "manifest.json").unlink()
  assert restore(tmp_path) is None


def test_a_file_that_the_manifest_does_not_name_is_not_verified(workdir):
  step = workdir / "checkpoints" / "20"
  (step / manifest.JSON_FILE).unlink()
  manifest.write(step, 20, {})
  with pytest.raises(manifest.Damage, match="_CHECKPOINT_METADATA"):
    manifest.verify(step, 20, only=manifest.JSON_FILE)
