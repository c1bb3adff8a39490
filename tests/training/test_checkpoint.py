"""Checkpoints come back bit for bit, on any mesh, and damaged ones are skipped.

test_damage.py has every kind of damage.
"""

import copy
import functools
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import types
from typing import Any

import chex
import flax.struct
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import Config, DataConfig, OptimizerConfig, UserError
from diffjax.host.lock import LostWorkdir, lock
from diffjax.training import manifest
from diffjax.training.checkpoint import (
  Checkpoint,
  Checkpoints,
  find_checkpoint,
  open_checkpoint,
)
from diffjax.training.optimizer import make_optimizer
from diffjax.training.resume import check_resume


@flax.struct.dataclass
class State:
  step: jax.Array
  params: Any
  opt_state: Any
  rng: jax.Array


CONFIG = Config().to_dict()


def make_state(
  seed: int = 0, optimizer: str = "muon", ffn_dim: int = 16
) -> State:
  """Returns a training state with random parameters and moments."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jax.device_put(rng.standard_normal(shape, np.float32))

  params = {
    "embedding": normal(32, 8),
    "layers": {
      "ffn": {"up": normal(2, 8, ffn_dim), "down": normal(2, 16, 8)},
      "ffn_norm": normal(2, 8),
    },
  }

  def random_leaf(leaf):
    if leaf.dtype == np.float32:
      return normal(*leaf.shape)
    return jax.device_put(np.full(leaf.shape, seed, leaf.dtype))

  transformation = make_optimizer(
    OptimizerConfig(name=optimizer), lambda step: 1e-3
  )
  opt_state_shapes = jax.eval_shape(transformation.init, params)
  opt_state = jax.tree.map(random_leaf, opt_state_shapes)
  step = jax.device_put(np.int32(seed))
  return State(step, params, opt_state, jax.random.key(seed))


def abstract(tree: Any) -> Any:
  """Returns the shapes, dtypes and shardings of a tree of arrays."""

  def abstract_leaf(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

  return jax.tree.map(abstract_leaf, tree)


def assert_states_equal(actual: State, expected: State) -> None:
  """Checks that two states have equal values and dtypes, also of their keys."""
  actual_key = jax.random.key_data(actual.rng)
  expected_key = jax.random.key_data(expected.rng)
  chex.assert_trees_all_equal(
    actual.replace(rng=actual_key),
    expected.replace(rng=expected_key),
    strict=True,
  )
  assert actual.rng.dtype == expected.rng.dtype


def save(
  checkpoints: Checkpoints, step: int, scores: dict[str, float] | None = None
) -> bool:
  """Starts to save a step. Returns False if the step is saved already."""
  return checkpoints.save(
    step,
    make_state(step),
    data_state={"batch": step, "seed": [1, None]},
    config=CONFIG,
    scores=scores,
  )


def save_run(workdir: pathlib.Path, steps: list[int]) -> None:
  """Saves checkpoints of some steps."""
  with Checkpoints(workdir, keep=10) as checkpoints:
    for step in steps:
      save(checkpoints, step)


def reopen(workdir: pathlib.Path, keep: int) -> Checkpoints:
  """Returns the checkpoints of a run that is resumed."""
  return Checkpoints(workdir, keep=keep, restored=find_checkpoint(workdir))


def restore(workdir: pathlib.Path) -> Checkpoint | None:
  """Returns the checkpoint from which a run is resumed."""
  checkpoint = find_checkpoint(workdir)
  Checkpoints(workdir, keep=10, restored=checkpoint)
  return checkpoint


def restore_state(workdir: pathlib.Path) -> State:
  """Returns the state from which a run is resumed."""
  return restore(workdir).state(abstract(make_state()))


def newest_config(workdir: pathlib.Path) -> dict[str, Any] | None:
  """Returns the config of the newest checkpoint, without reading its arrays."""
  checkpoint = find_checkpoint(workdir, json_only=True)
  if checkpoint is None:
    return None
  return checkpoint.config


def saved_steps(workdir: pathlib.Path) -> list[str]:
  """Returns the names of the directories of checkpoints, by their steps."""
  return sorted(os.listdir(workdir / "checkpoints"), key=int)


# Saving and restoring.


def test_a_state_is_restored_bit_for_bit(tmp_path):
  """This includes its random key, which draws the same numbers."""
  save_run(tmp_path, [3, 12])

  state = restore_state(tmp_path)

  assert_states_equal(state, make_state(12))
  draws = jax.random.normal(state.rng, 4)
  expected_draws = jax.random.normal(make_state(12).rng, 4)
  chex.assert_trees_all_equal(draws, expected_draws)


def test_the_newest_checkpoint_has_its_step_data_state_and_config(tmp_path):
  save_run(tmp_path, [3, 12])

  checkpoint = restore(tmp_path)

  assert checkpoint.step == 12
  # The helper `save` stores this as the state of the data.
  assert checkpoint.data_state == {"batch": 12, "seed": [1, None]}
  assert checkpoint.config == CONFIG
  assert newest_config(tmp_path) == CONFIG


def test_a_workdir_without_checkpoints_restores_none(tmp_path):
  """A new run starts in an empty directory, or makes its directory."""
  assert restore(tmp_path) is None
  assert newest_config(tmp_path) is None
  assert newest_config(tmp_path / "absent") is None


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path, monkeypatch):
  """`save` copies the arrays, returns, and writes the files in a thread.

  The next training step donates the state, so JAX overwrites its arrays.
  """
  is_donated = threading.Event()
  write = manifest.write

  def write_after_donation(*arguments):
    # With a timeout, so that an error in the test does not block this thread.
    is_donated.wait(timeout=30)
    write(*arguments)

  @functools.partial(jax.jit, donate_argnums=0)
  def overwrite_with_zeros(arrays):
    return jax.tree.map(lambda array: 0 * array, arrays)

  monkeypatch.setattr(manifest, "write", write_after_donation)
  checkpoints = Checkpoints(tmp_path, keep=2)
  state = make_state(5)

  checkpoints.save(5, state, data_state={}, config=CONFIG)
  jax.block_until_ready(overwrite_with_zeros((state.params, state.opt_state)))
  # A checkpoint is complete when it has a manifest, which is written last.
  assert find_checkpoint(tmp_path) is None
  is_donated.set()
  checkpoints.close()

  assert_states_equal(restore_state(tmp_path), make_state(5))


def test_a_step_that_was_just_saved_is_not_saved_again(tmp_path):
  """`save` returns whether it saves the step."""
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    assert save(checkpoints, 4)
    assert not save(checkpoints, 4)


def test_a_step_that_was_restored_is_not_saved_again(tmp_path):
  """A run that ends without a further step would save the same state."""
  save_run(tmp_path, [4])

  with reopen(tmp_path, keep=2) as checkpoints:
    assert not save(checkpoints, 4)

  assert restore(tmp_path).step == 4


def make_mesh(data: int, fsdp: int) -> jax.sharding.Mesh:
  """Returns a mesh of the first devices."""
  return jax.make_mesh(
    (data, fsdp),
    ("data", "fsdp"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
    devices=jax.devices()[: data * fsdp],
  )


def abstract_on_mesh(mesh: jax.sharding.Mesh, state: State) -> State:
  """Returns a state's shapes, with last axes sharded where they divide."""

  def abstract_leaf(leaf):
    spec = P()
    if leaf.ndim > 0 and leaf.dtype == np.float32:
      if leaf.shape[-1] % mesh.shape["fsdp"] == 0:
        unsharded_axes = [None] * (leaf.ndim - 1)
        spec = P(*unsharded_axes, "fsdp")
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(abstract_leaf, state)


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
  """The workdir of a state that eight devices share."""
  workdir = tmp_path_factory.mktemp("sharded")
  state = make_state(7)
  shapes = abstract_on_mesh(make_mesh(data=1, fsdp=8), state)
  shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
  sharded_state = jax.device_put(state, shardings)
  with Checkpoints(workdir, keep=1) as checkpoints:
    checkpoints.save(7, sharded_state, data_state={}, config=CONFIG)
  return workdir


def test_a_sharded_state_is_restored_on_another_mesh(sharded_run):
  """A mesh of 1 x 8 devices saved it, and one of 2 x 4 restores it."""
  state = make_state(7)
  shapes = abstract_on_mesh(make_mesh(data=2, fsdp=4), state)

  restored = find_checkpoint(sharded_run).state(shapes)

  assert_states_equal(restored, state)
  shardings = [leaf.sharding for leaf in jax.tree.leaves(restored)]
  expected_shardings = [shape.sharding for shape in jax.tree.leaves(shapes)]
  assert shardings == expected_shardings
  assert len(restored.params["embedding"].sharding.device_set) == 8


def test_sharded_parameters_are_restored_on_one_device(sharded_run):
  """Shapes without shardings, as of eval_shape, mean the default device."""
  state = make_state(7)
  shapes = jax.eval_shape(lambda: state.params)

  params = open_checkpoint(sharded_run).params(shapes)

  chex.assert_trees_all_equal(params, state.params, strict=True)
  assert params["embedding"].sharding.device_set == {jax.devices()[0]}


@pytest.fixture(scope="module")
def workdir_of_steps_10_and_20(tmp_path_factory):
  """The workdir of a run with checkpoints of steps 10 and 20."""
  workdir = tmp_path_factory.mktemp("run")
  save_run(workdir, [10, 20])
  return workdir


@pytest.mark.parametrize(
  ("requested_step", "expected_step"),
  [pytest.param(None, 20, id="newest"), pytest.param(10, 10, id="step 10")],
)
def test_parameters_are_loaded_without_the_rest_of_the_state(
  workdir_of_steps_10_and_20, requested_step, expected_step
):
  """For example to generate text. The newest step is 20."""
  expected = make_state(expected_step).params
  checkpoint = open_checkpoint(workdir_of_steps_10_and_20, requested_step)

  params = checkpoint.params(abstract(expected))

  chex.assert_trees_all_equal(params, expected, strict=True)


# Checkpoints that do not fit are refused.


def test_parameters_of_another_shape_are_refused(workdir_of_steps_10_and_20):
  """The last axis is ffn_dim, which was 16 when the checkpoint was saved."""
  checkpoint = open_checkpoint(workdir_of_steps_10_and_20)
  shapes = abstract(make_state(ffn_dim=24).params)

  message = r"layers/ffn/up is \[2, 8, 16\] there and \[2, 8, 24\] here"
  with pytest.raises(UserError, match=message):
    checkpoint.params(shapes)


def test_a_checkpoint_that_lacks_a_parameter_is_refused(
  workdir_of_steps_10_and_20,
):
  """The model has an unembedding of shape [32, 8], as its embedding."""
  checkpoint = open_checkpoint(workdir_of_steps_10_and_20)
  shapes = abstract(make_state().params)
  shapes["unembedding"] = shapes["embedding"]

  message = r"it has no unembedding, which is \[32, 8\] here"
  with pytest.raises(UserError, match=message):
    checkpoint.params(shapes)


def test_a_checkpoint_with_an_additional_parameter_is_refused(
  workdir_of_steps_10_and_20,
):
  """The model has no "ffn_norm", and the checkpoint has one."""
  checkpoint = open_checkpoint(workdir_of_steps_10_and_20)
  shapes = abstract(make_state().params)
  del shapes["layers"]["ffn_norm"]

  message = r"it has layers/ffn_norm \[2, 8\], which is not there here"
  with pytest.raises(UserError, match=message):
    checkpoint.params(shapes)


def test_a_state_of_another_optimizer_is_refused(workdir_of_steps_10_and_20):
  """The checkpoint has a state of Muon."""
  checkpoint = open_checkpoint(workdir_of_steps_10_and_20)
  shapes = abstract(make_state(optimizer="adamw"))

  message = (
    r"opt_state/.*; config.train.init_from starts another --workdir from its"
    " parameters"
  )
  with pytest.raises(UserError, match=message):
    checkpoint.state(shapes)


def test_opening_a_workdir_without_checkpoints_is_an_error(tmp_path):
  message = f"no complete checkpoint in {tmp_path}/checkpoints"
  with pytest.raises(UserError, match=message):
    open_checkpoint(tmp_path)


def test_opening_a_step_that_was_not_saved_is_an_error(
  workdir_of_steps_10_and_20,
):
  with pytest.raises(UserError, match="no complete checkpoint of step 11"):
    open_checkpoint(workdir_of_steps_10_and_20, 11)


# Which checkpoints are kept.


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
  """Step 2 has the lowest validation loss, and 5 and 6 are the newest two."""
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    save(checkpoints, 1, {"validation/loss": 3.0})
    save(checkpoints, 2, {"validation/loss": 1.5})
    # NaN is never the lowest loss.
    save(checkpoints, 3, {"validation/loss": float("nan")})
    save(checkpoints, 4, {"validation/loss": 2.0})
    save(checkpoints, 5)
    save(checkpoints, 6, {"validation/loss": 1.75})

  assert saved_steps(tmp_path) == ["2", "5", "6"]


def test_checkpoints_of_a_resumed_run_are_pruned_too(tmp_path):
  """Step 1 was the best one of the first run, until step 3 had a lower loss.

  Step 3 is the newest and the best step then, so the others are deleted.
  """
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    save(checkpoints, 1, {"validation/loss": 2.0})
    save(checkpoints, 2)

  with Checkpoints(tmp_path, keep=1) as checkpoints:
    save(checkpoints, 3, {"validation/loss": 1.0})

  assert saved_steps(tmp_path) == ["3"]


def test_a_temporary_directory_is_removed_by_a_run_with_a_warning(
  workdir_of_steps_10_and_20, tmp_path, caplog
):
  """Orbax writes into a temporary directory, which remains if a run is killed.

  Whoever only reads the workdir does not remove it: a run may be saving there.
  """
  workdir = shutil.copytree(workdir_of_steps_10_and_20, tmp_path / "run")
  temporary = workdir / "checkpoints" / "30.orbax-checkpoint-tmp"
  shutil.copytree(workdir / "checkpoints" / "20", temporary)
  # Reading changes nothing.
  assert newest_config(workdir) == CONFIG
  assert temporary.exists()

  with caplog.at_level(logging.WARNING):
    checkpoint = restore(workdir)

  assert checkpoint.step == 20
  assert not temporary.exists()
  assert "30.orbax-checkpoint-tmp" in caplog.text


def flip_bit_of_step_20(workdir: pathlib.Path) -> None:
  """Flips a bit in the arrays of step 20."""
  array_files = (workdir / "checkpoints/20/state/d").iterdir()
  largest_file = max(array_files, key=lambda file: file.stat().st_size)
  content = bytearray(largest_file.read_bytes())
  content[len(content) // 2] ^= 4
  largest_file.write_bytes(bytes(content))


def test_a_damaged_newest_step_is_not_counted(
  workdir_of_steps_10_and_20, tmp_path
):
  """If it were one of the two steps that are kept, step 10 would be deleted."""
  workdir = shutil.copytree(workdir_of_steps_10_and_20, tmp_path / "run")
  flip_bit_of_step_20(workdir)
  # The run is resumed from step 10.
  assert find_checkpoint(workdir).step == 10

  with reopen(workdir, keep=2) as checkpoints:
    save(checkpoints, 15)

  assert saved_steps(workdir) == ["10", "15", "20"]


def test_a_damaged_step_is_overwritten(workdir_of_steps_10_and_20, tmp_path):
  """The run is resumed from step 10, and reaches step 20 again."""
  workdir = shutil.copytree(workdir_of_steps_10_and_20, tmp_path / "run")
  flip_bit_of_step_20(workdir)

  with reopen(workdir, keep=2) as checkpoints:
    save(checkpoints, 20)
    checkpoints.wait()
    assert_states_equal(restore_state(workdir), make_state(20))
    # Step 20 is now one of the two steps that are kept, and step 10 is not.
    save(checkpoints, 30)

  assert saved_steps(workdir) == ["20", "30"]


def test_a_damaged_step_is_pruned_before_older_complete_ones(
  workdir_of_steps_10_and_20, tmp_path
):
  """Two steps are kept, which are the complete steps 10 and 25."""
  workdir = shutil.copytree(workdir_of_steps_10_and_20, tmp_path / "run")
  flip_bit_of_step_20(workdir)

  with reopen(workdir, keep=2) as checkpoints:
    save(checkpoints, 25)

  assert saved_steps(workdir) == ["10", "25"]


@pytest.mark.parametrize(
  "error",
  [
    pytest.param(None, id="save succeeds"),
    pytest.param(OSError("no space left"), id="save fails"),
  ],
)
def test_a_save_deletes_nothing_in_a_workdir_that_was_replaced(
  workdir_of_steps_10_and_20, tmp_path, monkeypatch, error
):
  """A run with keep=1 saves step 30, and then deletes the steps 10 and 20.

  Between the two, its workdir is moved and a new run gets the path. The run
  must not delete the checkpoints of the new one.
  """
  workdir = shutil.copytree(workdir_of_steps_10_and_20, tmp_path / "run")
  old_workdir = tmp_path / "old"
  checkpoints_dir = workdir / "checkpoints"
  write = manifest.write

  def write_manifest_and_replace_workdir(path, step, scores):
    write(path, step, scores)
    workdir.rename(old_workdir)
    for name in ("10", "20", "30", "40.orbax-checkpoint-tmp"):
      (checkpoints_dir / name).mkdir(parents=True)
      (checkpoints_dir / name / "file").write_text("of the new run")
    if error is not None:
      raise error

  monkeypatch.setattr(manifest, "write", write_manifest_and_replace_workdir)
  with lock(workdir) as workdir_lock:
    checkpoints = Checkpoints(
      workdir, keep=1, restored=find_checkpoint(workdir), lock=workdir_lock
    )
    save(checkpoints, 30)
    with pytest.raises(LostWorkdir):
      checkpoints.wait()
    checkpoints.close()

  assert sorted(checkpoints_dir.rglob("*")) == [
    checkpoints_dir / "10",
    checkpoints_dir / "10/file",
    checkpoints_dir / "20",
    checkpoints_dir / "20/file",
    checkpoints_dir / "30",
    checkpoints_dir / "30/file",
    checkpoints_dir / "40.orbax-checkpoint-tmp",
    checkpoints_dir / "40.orbax-checkpoint-tmp/file",
  ]
  assert restore(old_workdir).step == 30


def test_a_save_in_a_workdir_that_was_replaced_is_an_error(tmp_path):
  """The run has locked the moved directory. The new directory is empty."""
  workdir = tmp_path / "run"
  with lock(workdir) as workdir_lock:
    checkpoints = Checkpoints(workdir, keep=1, lock=workdir_lock)
    workdir.rename(tmp_path / "old")
    workdir.mkdir()

    with pytest.raises(LostWorkdir):
      save(checkpoints, 50)
    checkpoints.close()

  assert not list(workdir.iterdir())


# Configs of a resumed run.


def change(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
  """Returns a config with other values: change(CONFIG, train__steps=3)."""
  config = copy.deepcopy(config)
  for field, value in fields.items():
    section, name = field.split("__")
    config[section][name] = value
  return config


# The fields that a resumed run may change, with values that are no defaults.
CHANGEABLE = {
  "train__steps": 7,
  "mesh__fsdp": 4,
  "mesh__data": 2,
  "mesh__context": 2,
  "mesh__tensor": 2,
  "train__log_interval": 1,
  "train__checkpoint_interval": 1,
  "train__keep_checkpoints": 9,
  "train__profile_step": 3,
  "train__profile_steps": 1,
  "train__wandb_project": "w",
  "train__sample_prompt": "x",
  "train__sample_tokens": 0,
  "train__init_from": "elsewhere",
  "train__loss_chunk": 512,
  "train__max_skipped_in_a_row": 0,
  "optimizer__spike_sigmas": 0.0,
  "data__timeout": 1.0,
  "eval__interval": 3,
  "eval__rows": 2,
  "eval__ngram": 3,
  "data__num_workers": 4,
  "data__prepared_dir": "there",
  "model__attention_implementation": "reference",
  "model__remat": "full",
}


def test_fields_that_do_not_change_the_training_may_change_on_resume():
  # An error is raised for a field that may not change.
  check_resume(CONFIG, change(CONFIG, **CHANGEABLE))


def test_all_other_fields_may_not_change_on_resume():
  """Any other value is refused, here "other" for every field."""
  # data.files has a message of its own, which tests/data/test_plan.py tests.
  excluded = CHANGEABLE.keys() | {"data__files"}
  for section, fields in CONFIG.items():
    for name in fields:
      field = f"{section}__{name}"
      if field in excluded:
        continue
      other_config = change(CONFIG, **{field: "other"})
      message = (
        rf"{section}\.{name} was .* and is 'other'; use another --workdir"
      )
      with pytest.raises(UserError, match=message):
        check_resume(CONFIG, other_config)


def test_a_refused_resume_names_every_difference_with_both_values():
  """It does not name train.steps, which may change.

  The checkpoint has the default values, 128 and 0.001.
  """
  other_config = change(
    CONFIG, model__embed_dim=64, optimizer__learning_rate=0.5, train__steps=3
  )

  with pytest.raises(UserError) as error:
    check_resume(CONFIG, other_config)

  assert str(error.value) == (
    "the checkpoint in this workdir is of another run: model.embed_dim was 128"
    " and is 64; optimizer.learning_rate was 0.001 and is 0.5; use another"
    " --workdir or set them back"
  )


def test_the_number_of_workers_of_a_stream_may_not_change():
  """The order of streamed documents depends on it."""
  old_config = Config(data=DataConfig(mode="streamed", num_workers=2)).to_dict()
  new_config = Config(data=DataConfig(mode="streamed", num_workers=4)).to_dict()

  check_resume(old_config, old_config)
  with pytest.raises(UserError, match="data.num_workers was 2 and is 4"):
    check_resume(old_config, new_config)


def test_a_field_that_an_older_checkpoint_lacks_counts_as_its_default():
  """Such a checkpoint is of a version that did not have the field."""
  default_config = Config().to_dict()
  other_config = change(default_config, train__z_loss=0.1)
  older_config = copy.deepcopy(default_config)
  del older_config["train"]["z_loss"]
  del older_config["eval"]

  check_resume(older_config, default_config)
  with pytest.raises(UserError, match="train.z_loss was 0.0 and is 0.1"):
    check_resume(older_config, other_config)


# Saves that fail.

# Saves checkpoints and metrics while the size of files is limited. Writes then
# fail as on a full disk, in Python and in TensorStore.
FAILING_SAVES = """
import pathlib
import resource
import sys

import jax
import numpy as np

from diffjax.config import UserError
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.metrics import MetricWriter

workdir = pathlib.Path(sys.argv[1])
weight = np.arange(4096, dtype=np.float32)
state = jax.device_put({"params": {"weight": weight}, "step": np.int32(1)})
checkpoints = Checkpoints(workdir, keep=1)
metrics = MetricWriter(workdir, {}, start_step=0)

def limit_file_size(num_bytes):
  limits = (num_bytes, resource.RLIM_INFINITY)
  resource.setrlimit(resource.RLIMIT_FSIZE, limits)

def save(step):
  checkpoints.save(step, state, data_state={}, config={})
  metrics.write(step, {f"train/loss_{i}": step for i in range(20)})

def wait_and_print():
  try:
    checkpoints.wait()
    print("saved", end="")
  except UserError as error:
    print(error, end="")
  directories = (workdir / "checkpoints").iterdir()
  print(" |", *sorted(path.name for path in directories))

save(1)
wait_and_print()
step = 1
for num_bytes in (0, 100, 1000, 4000):
  step += 1
  limit_file_size(num_bytes)
  save(step)
  save(step)  # The same step again, because it was not saved.
  wait_and_print()
limit_file_size(resource.RLIM_INFINITY)
save(6)
wait_and_print()
metrics.close()
"""


@pytest.fixture(scope="module")
def run_with_failing_saves(tmp_path_factory):
  """Returns the workdir of such a run, and its completed process."""
  workdir = tmp_path_factory.mktemp("failing") / "run"
  result = subprocess.run(
    [sys.executable, "-c", FAILING_SAVES, workdir],
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert result.returncode == 0, result.stderr
  return workdir, result


def test_a_failed_save_leaves_the_older_checkpoint_and_is_repeated(
  run_with_failing_saves,
):
  """Step 1 is saved. Steps 2 to 5 fail on a full disk, and step 6 is saved.

  After each of them, the run prints the result and the steps in its workdir.
  With keep=1, a save that succeeds deletes the older step.
  """
  _, result = run_with_failing_saves

  lines = result.stdout.splitlines()
  line_1, line_2, line_3, line_4, line_5, line_6 = lines
  assert line_1 == "saved | 1"
  for line in (line_2, line_3, line_4, line_5):
    assert "File too large" in line
    assert line.endswith(" | 1")
  assert line_6 == "saved | 6"
  num_failing_steps, tries_per_step = 4, 2
  message = "not saved: cannot read or write the checkpoint"
  assert result.stderr.count(message) == num_failing_steps * tries_per_step


def test_metrics_that_cannot_be_written_are_written_later(
  run_with_failing_saves,
):
  """The disk is full in steps 2 to 5. Each step writes two entries."""
  workdir, result = run_with_failing_saves

  steps = []
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    steps.append(json.loads(line)["step"])
  assert steps == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
  # The warning is not repeated.
  assert result.stderr.count("cannot write metrics in") == 1


def test_a_save_that_does_not_fit_the_disk_does_not_start(
  tmp_path, monkeypatch
):
  """Otherwise, it would fail after it has filled the disk."""
  # Stands for the bytes that shutil.disk_usage returns.
  full_disk = types.SimpleNamespace(total=10_000, used=9_900, free=100)
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
      patch.setattr(shutil, "disk_usage", lambda _: full_disk)
      save(checkpoints, 2)
      message = (
        "checkpoints/2: no space left: it takes .* KiB, and 100 bytes are free"
      )
      with pytest.raises(UserError, match=message):
        checkpoints.wait()
    # The older checkpoint is still there.
    assert saved_steps(tmp_path) == ["1"]

    # Now there is space.
    save(checkpoints, 2)

  assert saved_steps(tmp_path) == ["2"]


def test_an_unreadable_size_of_an_array_is_an_error_of_the_save(tmp_path):
  """The size is read in the thread that saves, and `wait` raises its errors."""

  class UnreadableArray:
    @property
    def nbytes(self):
      raise OSError("the file is gone")

  state = {"params": UnreadableArray()}
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    assert checkpoints.save(1, state, data_state={}, config={})
    with pytest.raises(UserError, match="the file is gone"):
      checkpoints.wait()


@pytest.mark.full
@pytest.mark.parametrize("replaced_directory", ["run", "run/checkpoints"])
def test_a_save_fails_while_a_file_replaces_its_directory(
  tmp_path, replaced_directory
):
  """The next save succeeds after the directory is back."""
  workdir = tmp_path / "run"
  checkpoints = Checkpoints(workdir, keep=1)
  save(checkpoints, 1)
  checkpoints.wait()

  directory = tmp_path / replaced_directory
  directory.rename(tmp_path / "moved")
  directory.write_text("a file")
  save(checkpoints, 2)
  with pytest.raises(UserError, match="checkpoints/2: .*Not a directory"):
    checkpoints.wait()

  directory.unlink()
  (tmp_path / "moved").rename(directory)
  assert saved_steps(workdir) == ["1"]
  save(checkpoints, 2)
  checkpoints.close()
  assert_states_equal(restore_state(workdir), make_state(2))


def test_a_workdir_that_cannot_be_created_is_an_error(tmp_path):
  """The workdir is a file, in which there can be no directory."""
  workdir = tmp_path / "file"
  workdir.write_text("")

  with pytest.raises(UserError, match="file/checkpoints"):
    Checkpoints(workdir, keep=1)


def test_a_workdir_that_is_moved_is_created_again(tmp_path):
  """There is no lock here, which would end the run instead."""
  workdir = tmp_path / "run"
  with Checkpoints(workdir, keep=1) as checkpoints:
    save(checkpoints, 1)
    checkpoints.wait()
    workdir.rename(tmp_path / "moved")

    save(checkpoints, 2)

  assert saved_steps(workdir) == ["2"]
  assert saved_steps(tmp_path / "moved") == ["1"]


def test_a_file_at_the_path_of_a_checkpoint_is_overwritten(tmp_path):
  (tmp_path / "checkpoints").mkdir()
  (tmp_path / "checkpoints" / "2").write_text("")

  save_run(tmp_path, [2])

  assert_states_equal(restore_state(tmp_path), make_state(2))


def test_a_link_at_the_path_of_a_checkpoint_is_overwritten(tmp_path):
  (tmp_path / "checkpoints").mkdir()
  # The link points to itself.
  (tmp_path / "checkpoints" / "2").symlink_to("2")

  save_run(tmp_path, [2])

  assert_states_equal(restore_state(tmp_path), make_state(2))
