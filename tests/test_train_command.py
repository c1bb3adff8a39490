"""`diffjax.train` without --workdir: where a run goes, and who needs the flag."""

import subprocess
import sys

import pytest

from tests.harness import ROOT

SMALL = {
  "model.num_layers": 1,
  "model.embed_dim": 16,
  "model.head_dim": 8,
  "model.ffn_dim": 32,
  "data.length": 32,
  "data.validation_fraction": 0.2,
  "train.batch_size": 8,
  "train.sample_tokens": 0,
  "eval.rows": 8,
}


@pytest.fixture
def train(command, tmp_path):
  """train("--config=tiny", steps=2): trains a small model in tmp_path."""
  for index in range(40):
    line = f"document {index}: {index * 7 % 97}\n"
    (tmp_path / f"{index}.txt").write_text(line * 20)

  def run(*arguments, steps):
    fields = SMALL | {
      "data.source": f"text:{tmp_path}/*.txt",
      "data.prepared_dir": str(tmp_path / "rows"),
      "train.steps": steps,
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    return command("diffjax.train", *arguments, *overrides, cwd=tmp_path)

  return run


def test_a_run_goes_to_the_directory_of_its_config(train, tmp_path):
  workdir = "runs/tiny_transformer_heads_2"
  variant = "--config=tiny:transformer,heads=2"

  result = train(variant, steps=2)
  assert result.returncode == 0, result.stderr
  lines = result.stderr.splitlines()
  assert lines[0] == f"diffjax: workdir {workdir}: a new run"
  assert (tmp_path / workdir / "checkpoints" / "2").exists()

  result = train(variant, steps=3)
  assert result.returncode == 0, result.stderr
  resume_line = (
    f"diffjax: workdir {workdir}: resuming from its newest checkpoint"
  )
  lines = result.stderr.splitlines()
  assert lines[0] == resume_line
  assert f"diffjax: resuming from step 2 of {workdir}" in lines

  result = train(variant, "--config.optimizer.learning_rate=0.1", steps=3)
  assert result.returncode == 1
  lines = result.stderr.splitlines()
  assert lines[0] == resume_line
  assert "optimizer.learning_rate was 0.003 and is 0.1" in lines[-1]


def test_a_workdir_that_is_named_is_used(train, tmp_path):
  result = train("--config=tiny", "--workdir=mine", steps=1)
  assert result.returncode == 0, result.stderr
  lines = result.stderr.splitlines()
  assert lines[0] == "diffjax: workdir mine: a new run"
  assert (tmp_path / "mine" / "checkpoints" / "1").exists()
  assert not (tmp_path / "runs").exists()


def test_the_config_of_a_run_has_no_directory_of_its_own(command, tmp_path):
  (tmp_path / "config.toml").write_text("")
  result = command("diffjax.train", "--config=config.toml", cwd=tmp_path)
  assert result.returncode == 2
  assert result.stderr == (
    "error: pass --workdir=DIR: a run with --config=config.toml"
    " has no default\n"
  )


MULTI_PROCESS_ERROR = (
  "error: pass --workdir=DIR: 2 processes need a directory that all of them"
  " see, on a shared disk or gs://\n"
)


def test_several_processes_need_a_workdir(command, tmp_path):
  result = command(
    "diffjax.train",
    "--config=tiny",
    "--coordinator=localhost:9476",
    "--num_processes=2",
    "--process_id=0",
    cwd=tmp_path,
  )
  assert (result.returncode, result.stderr) == (1, MULTI_PROCESS_ERROR)


def test_several_processes_of_a_cluster_need_a_workdir(tmp_path):
  """Their number is known only after they have found each other."""
  code = """if True:
    import contextlib, runpy, sys
    import jax
    from diffjax.parallel import processes
    processes.connected = lambda *_, **__: contextlib.nullcontext()
    jax.process_count = lambda: 2
    sys.argv = ["diffjax.train", "--config=tiny"]
    runpy.run_module("diffjax.train", run_name="__main__", alter_sys=True)"""
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert (result.returncode, result.stderr) == (1, MULTI_PROCESS_ERROR)
