"""What is saved comes back bit for bit, on any mesh; what is damaged is passed over, aloud; another run's config is refused."""

import copy
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.config import Config, DataConfig, OptimizerConfig, UserError
from diffjax.host.lock import LostWorkdir, lock
from diffjax.training import manifest
from diffjax.training.checkpoint import (
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


def make_state(seed=0, name="muon", up=(2, 8, 16)):
  draw = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(draw.standard_normal(shape), jnp.float32)

  params = {
    "embedding": normal(32, 8),
    "layers": {
      "ffn": {"up": normal(*up), "down": normal(2, 16, 8)},
      "ffn_norm": normal(2, 8),
    },
  }
  opt_state = jax.tree.map(
    lambda leaf: (
      normal(*leaf.shape) if leaf.dtype == jnp.float32 else leaf + seed
    ),
    make_optimizer(OptimizerConfig(name=name), lambda step: 1e-3).init(params),
  )
  return State(jnp.int32(seed), params, opt_state, jax.random.key(seed))


def abstract(state, sharding=None):
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding
    ),
    state,
  )


def raw(leaf):
  return np.asarray(
    jax.random.key_data(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    else leaf
  )


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype and raw(x).tobytes() == raw(y).tobytes()


def save(checkpoints, step, scores=None, config=CONFIG, **kwargs):
  return checkpoints.save(
    step,
    make_state(step),
    data_state={"batch": step, "seed": [1, None]},
    config=config,
    scores=scores,
    **kwargs,
  )


def run(workdir, steps, keep=10):
  checkpoints = Checkpoints(workdir, keep=keep)
  for step in steps:
    save(checkpoints, step)
  checkpoints.close()


def reopen(workdir, keep):
  """The checkpoints of a run that goes on, and the one it goes on from."""
  found = find_checkpoint(workdir)
  return Checkpoints(workdir, keep=keep, restored=found), found


def restore(workdir):
  return reopen(workdir, keep=10)[1]


def read(checkpoint):
  return checkpoint.state(abstract(make_state()))


def newest_config(workdir):
  """Read as at the start of a run: without the arrays."""
  found = find_checkpoint(workdir, json_only=True)
  return None if found is None else found.config


def listing(workdir):
  return sorted(os.listdir(workdir / "checkpoints"), key=int)


def test_restores_every_bit(tmp_path):
  run(tmp_path, [3, 12])
  restored = restore(tmp_path)
  assert (
    restored.step == 12
    and restored.data_state == {"batch": 12, "seed": [1, None]}
    and restored.config == CONFIG
  )
  state = read(restored)
  assert_same(state, make_state(12))
  assert type(state) is State
  np.testing.assert_array_equal(
    jax.random.normal(state.rng, 4), jax.random.normal(make_state(12).rng, 4)
  )
  assert newest_config(tmp_path) == CONFIG


def test_nothing_saved_restores_to_none(tmp_path):
  assert (
    restore(tmp_path) is None
    and newest_config(tmp_path) is None
    and newest_config(tmp_path / "absent") is None
  )


def test_save_returns_before_the_files_and_its_state_may_be_donated(
  tmp_path, monkeypatch
):
  gate, write = threading.Event(), manifest.write
  monkeypatch.setattr(
    manifest, "write", lambda *args: gate.wait(30) and write(*args)
  )
  checkpoints = Checkpoints(tmp_path, keep=2)
  state = make_state(5)
  checkpoints.save(5, state, data_state={}, config=CONFIG)
  assert newest_config(tmp_path) is None, "no manifest, not complete"
  state = jax.jit(
    lambda tree: jax.tree.map(
      lambda leaf: leaf * 0 if leaf.dtype == jnp.float32 else leaf, tree
    ),
    donate_argnums=0,
  )(state)
  jax.block_until_ready(state)
  gate.set()
  checkpoints.close()
  assert_same(read(restore(tmp_path)), make_state(5))


def test_keeps_the_newest_and_the_best(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step, loss in [
    (1, 3.0),
    (2, 1.5),
    (3, float("nan")),
    (4, 2.0),
    (5, None),
    (6, 1.75),
  ]:
    save(
      checkpoints,
      step,
      scores=None if loss is None else {"validation/loss": loss},
    )
  checkpoints.close()
  assert listing(tmp_path) == ["2", "5", "6"]
  checkpoints = Checkpoints(tmp_path, keep=1)
  save(checkpoints, 7, scores={"validation/loss": 1.0})
  checkpoints.close()
  assert listing(tmp_path) == ["7"]


def test_a_step_just_saved_or_restored_is_not_saved_again(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  assert save(checkpoints, 4) and not save(checkpoints, 4)
  checkpoints.close()
  checkpoints, _ = reopen(tmp_path, keep=2)
  assert not save(checkpoints, 4)
  checkpoints.close()
  assert restore(tmp_path).step == 4


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  run(workdir, [10, 20])
  return workdir


def flip_bit(workdir):
  """In the arrays of step 20."""
  path = max(
    (workdir / "checkpoints/20/state/d").iterdir(),
    key=lambda file: file.stat().st_size,
  )
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 4
  path.write_bytes(bytes(data))


def test_stale_temporary_directory_is_removed(two_steps, tmp_path, caplog):
  workdir = shutil.copytree(two_steps, tmp_path / "run")
  stale = workdir / "checkpoints" / "30.orbax-checkpoint-tmp"
  shutil.copytree(workdir / "checkpoints" / "20", stale)
  (workdir / "checkpoints" / "notes").mkdir()  # not ours
  assert newest_config(workdir) == CONFIG and stale.exists(), (
    "a reader deletes nothing"
  )
  with caplog.at_level(logging.WARNING):
    assert restore(workdir).step == 20
  assert not stale.exists() and any(
    "30.orbax-checkpoint-tmp" in record.getMessage()
    for record in caplog.records
  )


def test_damaged_step_is_overwritten_and_does_not_count_as_kept(
  two_steps, tmp_path
):
  workdir = shutil.copytree(two_steps, tmp_path / "run")
  flip_bit(workdir)
  checkpoints, found = reopen(workdir, keep=2)
  assert found.step == 10
  save(checkpoints, 15)
  checkpoints.wait()
  assert listing(workdir) == ["10", "15", "20"]
  save(checkpoints, 20)
  checkpoints.wait()
  assert_same(read(restore(workdir)), make_state(20))
  save(checkpoints, 30)
  checkpoints.close()
  assert listing(workdir) == ["20", "30"]


def test_damaged_step_that_was_left_behind_is_pruned_first(two_steps, tmp_path):
  workdir = shutil.copytree(two_steps, tmp_path / "run")
  flip_bit(workdir)
  checkpoints, _ = reopen(workdir, keep=2)
  save(checkpoints, 25)
  checkpoints.close()
  assert listing(workdir) == ["10", "25"]


def test_a_save_whose_size_cannot_be_read_fails_later(tmp_path):
  class Unreadable:
    @property
    def nbytes(self):
      raise OSError("the file is gone")

  with Checkpoints(tmp_path, keep=1) as checkpoints:
    assert checkpoints.save(
      1, {"params": Unreadable()}, data_state={}, config={}
    )
    with pytest.raises(UserError, match="the file is gone"):
      checkpoints.wait()


@pytest.mark.parametrize("error", [None, OSError("no space left")])
def test_nothing_is_deleted_in_a_directory_that_is_not_the_locked_one(
  two_steps, tmp_path, monkeypatch, error
):
  """The path gets a new run while a save is under way, which may fail."""
  workdir = tmp_path / "run"
  new_run = [f"{step}/file" for step in (10, 20, 30)]
  new_run.append("40.orbax-checkpoint-tmp/file")
  write = manifest.write

  def move_and_write(path, step, scores):
    write(path, step, scores)
    workdir.rename(tmp_path / "old")
    for name in new_run:
      file = workdir / "checkpoints" / name
      file.parent.mkdir(parents=True)
      file.write_text("of the new run")
    if error is not None:
      raise error

  shutil.copytree(two_steps, workdir)
  with lock(workdir) as held:
    found = find_checkpoint(workdir)
    checkpoints = Checkpoints(workdir, keep=1, restored=found, lock=held)
    with monkeypatch.context() as patch:
      patch.setattr(manifest, "write", move_and_write)
      save(checkpoints, 30)
      with pytest.raises(LostWorkdir):
        checkpoints.wait()
    with pytest.raises(LostWorkdir):
      save(checkpoints, 50)
    checkpoints.close()
  files = (workdir / "checkpoints").rglob("*")
  names = [str(path.relative_to(workdir / "checkpoints")) for path in files]
  assert sorted(name for name in names if "/" in name) == new_run
  assert len(names) == 2 * len(new_run)
  assert restore(tmp_path / "old").step == 30


def test_workdir_that_cannot_be_made(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="file/checkpoints"):
    Checkpoints(tmp_path / "file", keep=1)


def mesh_of(shape):
  return jax.make_mesh(
    shape,
    ("data", "fsdp"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
    devices=jax.devices()[: shape[0] * shape[1]],
  )


def test_restores_onto_another_mesh(tmp_path):
  def on(mesh, state):
    def sharding(leaf):
      divisible = (
        leaf.ndim
        and leaf.shape[-1] % mesh.shape["fsdp"] == 0
        and leaf.dtype == jnp.float32
      )
      return NamedSharding(
        mesh, P(*[None] * (leaf.ndim - 1), "fsdp") if divisible else P()
      )

    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding(leaf)
      ),
      state,
    )

  state = make_state(7)
  eight, four = on(mesh_of((1, 8)), state), on(mesh_of((2, 4)), state)
  placed = jax.tree.map(
    lambda leaf, spec: jax.device_put(leaf, spec.sharding), state, eight
  )
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(7, placed, data_state={}, config=CONFIG)
  checkpoints.close()
  restored = find_checkpoint(tmp_path).state(four)
  assert_same(restored, state)
  for leaf, spec in zip(
    jax.tree.leaves(restored), jax.tree.leaves(four), strict=True
  ):
    assert leaf.sharding == spec.sharding
  assert len(restored.params["embedding"].sharding.device_set) == 8
  single = open_checkpoint(tmp_path).params(
    jax.eval_shape(lambda: make_state().params)
  )
  assert_same(single, state.params)
  assert single["embedding"].sharding.device_set == {jax.devices()[0]}


def test_loads_parameters_alone(two_steps):
  wanted = abstract(make_state().params)
  assert_same(open_checkpoint(two_steps).params(wanted), make_state(20).params)
  assert_same(
    open_checkpoint(two_steps, 10).params(wanted), make_state(10).params
  )


def test_parameters_of_another_model_are_refused(two_steps):
  with pytest.raises(
    UserError,
    match=r"layers/ffn/up is \[2, 8, 16\] there and \[2, 8, 24\] here",
  ):
    open_checkpoint(two_steps).params(
      abstract(make_state(up=(2, 8, 24)).params)
    )
  wanted = abstract(make_state().params)
  with pytest.raises(
    UserError, match=r"it has no unembedding, which is \[32, 8\] here"
  ):
    open_checkpoint(two_steps).params(
      {**wanted, "unembedding": wanted["embedding"]}
    )
  with pytest.raises(
    UserError, match=r"it has layers/ffn_norm \[2, 8\], which is not there here"
  ):
    open_checkpoint(two_steps).params(
      {**wanted, "layers": {"ffn": wanted["layers"]["ffn"]}}
    )


def test_another_optimizers_state_is_refused(two_steps):
  with pytest.raises(
    UserError,
    match=r"opt_state/.*; config.train.init_from starts another --workdir from its parameters",
  ):
    restore(two_steps).state(abstract(make_state(name="adamw")))


def test_no_checkpoint_to_load_from(two_steps, tmp_path):
  with pytest.raises(
    UserError, match=f"no complete checkpoint in {tmp_path}/checkpoints"
  ):
    open_checkpoint(tmp_path)
  with pytest.raises(UserError, match="no complete checkpoint of step 11"):
    open_checkpoint(two_steps, 11)


def changed(*fields, base=CONFIG):
  config = copy.deepcopy(base)
  for field, value in fields:
    section, name = field.split(".")
    config[section][name] = value
  return config


def test_what_may_change_on_resume():
  free = [
    ("train.steps", 7),
    ("mesh.fsdp", 4),
    ("mesh.data", 2),
    ("mesh.context", 2),
    ("mesh.tensor", 2),
    ("train.log_interval", 1),
    ("train.checkpoint_interval", 1),
    ("train.keep_checkpoints", 9),
    ("train.profile_step", 3),
    ("train.profile_steps", 1),
    ("train.wandb_project", "w"),
    ("train.sample_prompt", "x"),
    ("train.sample_tokens", 0),
    ("train.init_from", "elsewhere"),
    ("train.loss_chunk", 512),
    ("train.max_skipped_in_a_row", 0),
    ("optimizer.spike_sigmas", 0.0),
    ("data.timeout", 1.0),
    ("eval.interval", 3),
    ("eval.rows", 2),
    ("eval.ngram", 3),
    ("data.num_workers", 4),
    ("data.prepared_dir", "there"),
    ("model.attention_implementation", "reference"),
    ("model.remat", "full"),
  ]
  check_resume(CONFIG, changed(*free))
  every = {
    f"{section}.{name}" for section, fields in CONFIG.items() for name in fields
  }
  # data.files has a message of its own (tests/data/test_plan.py).
  for field in every - {name for name, _ in free} - {"data.files"}:
    with pytest.raises(
      UserError, match=rf"{field} was .* and is 'other'; use another --workdir"
    ):
      check_resume(CONFIG, changed((field, "other")))


def test_resume_names_every_difference_with_both_values():
  with pytest.raises(UserError) as error:
    check_resume(
      CONFIG,
      changed(
        ("model.embed_dim", 64),
        ("optimizer.learning_rate", 0.5),
        ("train.steps", 3),
      ),
    )
  assert str(error.value) == (
    "the checkpoint in this workdir is of another run: model.embed_dim was 128 and is 64; optimizer.learning_rate was 0.001 and is 0.5; "
    "use another --workdir or set them back"
  )


def test_workers_of_a_stream_may_not_change():
  streamed = Config(data=DataConfig(mode="streamed", num_workers=2)).to_dict()
  check_resume(streamed, streamed)
  with pytest.raises(UserError, match="data.num_workers was 2 and is 4"):
    check_resume(streamed, changed(("data.num_workers", 4), base=streamed))


def test_field_that_an_older_checkpoint_lacks_counts_as_its_default():
  older = copy.deepcopy(CONFIG)
  del older["train"]["z_loss"], older["eval"]
  check_resume(older, CONFIG)
  with pytest.raises(UserError, match="train.z_loss was 0.0 and is 0.1"):
    check_resume(older, changed(("train.z_loss", 0.1)))


# A limit on the size of files: writes fail as on a full disk, for Python and for TensorStore alike.
FAILING_SAVES = """
import contextlib, os, pathlib, resource, sys
import jax, jax.numpy as jnp
from diffjax.config import Config, UserError
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.metrics import MetricWriter

workdir = pathlib.Path(sys.argv[1])
state = {"params": {"weight": jnp.arange(4096.0)}, "step": jnp.int32(1)}
checkpoints = Checkpoints(workdir, keep=1)
metrics = MetricWriter(workdir, {}, start_step=0)

def save(step):
  checkpoints.save(step, state, data_state={}, config={})
  metrics.write(step, {f"train/loss_{i}": step for i in range(20)})

def wait():
  try:
    checkpoints.wait()
    print("saved", end="")
  except UserError as error:
    print(error, end="")
  print(" |", *sorted(path.name for path in (workdir / "checkpoints").iterdir()))

save(1)
wait()
for step, limit in enumerate((0, 100, 1000, 4000), 2):
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
  save(step)
  save(step)  # the same step again, since it was not saved
  wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
save(6)
wait()
metrics.close()
"""


def test_saves_and_metrics_that_fail_leave_what_was_there_and_are_tried_again(
  tmp_path,
):
  result = subprocess.run(
    [sys.executable, "-c", FAILING_SAVES, tmp_path / "run"],
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert result.returncode == 0, result.stderr
  lines = result.stdout.splitlines()
  assert lines[0] == "saved | 1" and lines[-1] == "saved | 6"
  for line in lines[1:-1]:
    assert "File too large" in line and line.endswith(" | 1"), (
      "nothing half-written, and the older one is not pruned"
    )
  assert (
    result.stderr.count("not saved: cannot read or write the checkpoint") == 8
  )
  assert result.stderr.count("cannot write metrics in") == 1
  written = [
    json.loads(line)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  ]
  assert [line["step"] for line in written] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6], (
    "no line is lost or torn"
  )


def test_a_save_that_does_not_fit_the_disk_is_not_begun(
  tmp_path, caplog, monkeypatch
):
  checkpoints = Checkpoints(tmp_path, keep=1)
  save(checkpoints, 1)
  with monkeypatch.context() as patch:
    patch.setattr(
      shutil,
      "disk_usage",
      lambda _: shutil._ntuple_diskusage(10_000, 9_900, 100),
    )
    save(checkpoints, 2)
    with pytest.raises(
      UserError,
      match="checkpoints/2: no space left: it takes .* KiB, and 100 bytes are free",
    ):
      checkpoints.wait()
  assert listing(tmp_path) == ["1"]
  save(checkpoints, 2)
  checkpoints.close()
  assert listing(tmp_path) == ["2"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["checkpoints", "."])
def test_save_into_a_directory_that_became_a_file(tmp_path, name):
  workdir = tmp_path / "run"
  checkpoints = Checkpoints(workdir, keep=1)
  save(checkpoints, 1)
  checkpoints.wait()
  (workdir / name).resolve().rename(tmp_path / "away")
  (workdir / name).resolve().write_text("")
  save(checkpoints, 2)
  with pytest.raises(UserError, match="checkpoints/2: .*Not a directory"):
    checkpoints.wait()
  (workdir / name).resolve().unlink()
  (tmp_path / "away").rename((workdir / name).resolve())
  assert listing(workdir) == ["1"]
  save(checkpoints, 2)
  checkpoints.close()
  assert_same(read(restore(workdir)), make_state(2))


def test_a_workdir_that_is_moved_away_is_made_again(tmp_path):
  checkpoints = Checkpoints(tmp_path / "run", keep=1)
  save(checkpoints, 1)
  checkpoints.wait()
  (tmp_path / "run").rename(tmp_path / "away")
  save(checkpoints, 2)
  checkpoints.close()
  assert listing(tmp_path / "run") == ["2"] and listing(tmp_path / "away") == [
    "1"
  ]


@pytest.mark.parametrize(
  "make",
  [lambda path: path.write_text(""), lambda path: path.symlink_to(path.name)],
)
def test_what_lies_in_a_steps_place_is_overwritten(tmp_path, make):
  (tmp_path / "checkpoints").mkdir()
  make(tmp_path / "checkpoints" / "2")
  run(tmp_path, [2])
  assert_same(read(restore(tmp_path)), make_state(2))
