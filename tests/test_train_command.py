"""The workdir of `diffjax.train`, with and without the flag --workdir."""

import pytest

SMALL = {
  "model.num_layers": 1,
  "model.embed_dim": 16,
  "model.head_dim": 8,
  "model.ffn_dim": 32,
  "data.length": 32,
  "data.validation_fraction": 0.2,
  "train.batch_size": 8,
  "train.sample_tokens": 0,
  "eval.interval": 0,
}


@pytest.fixture
def train(command, tmp_path):
  """train("--config=tiny", steps=2): trains a small model in tmp_path."""
  for index in range(20):
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


# All tests train this config, so that it is compiled once.
CONFIG_FLAG = "--config=tiny:transformer,heads=2"
DEFAULT_WORKDIR = "runs/tiny_transformer_heads_2"


def test_a_run_goes_to_the_directory_of_its_config(train, tmp_path):
  result = train(CONFIG_FLAG, steps=1)

  assert result.returncode == 0, result.stderr
  first_line = result.stderr.splitlines()[0]
  assert first_line == f"diffjax: workdir {DEFAULT_WORKDIR}: a new run"
  assert (tmp_path / DEFAULT_WORKDIR / "checkpoints" / "1").exists()


def test_the_same_command_resumes_the_run(train):
  train(CONFIG_FLAG, steps=1)

  resumed = train(CONFIG_FLAG, steps=1)
  # With another learning rate, the run is found and then refused.
  refused = train(CONFIG_FLAG, "--config.optimizer.learning_rate=1", steps=1)

  resume_line = (
    f"diffjax: workdir {DEFAULT_WORKDIR}: resuming from its newest checkpoint"
  )
  assert resumed.returncode == 0, resumed.stderr
  lines = resumed.stderr.splitlines()
  assert lines[0] == resume_line
  assert f"diffjax: resuming from step 1 of {DEFAULT_WORKDIR}" in lines
  assert refused.returncode == 1
  lines = refused.stderr.splitlines()
  assert lines[0] == resume_line
  assert "optimizer.learning_rate was 0.003 and is 1" in lines[-1]


def test_a_workdir_that_is_named_is_used(train, tmp_path):
  result = train(CONFIG_FLAG, "--workdir=mine", steps=0)

  assert result.returncode == 0, result.stderr
  first_line = result.stderr.splitlines()[0]
  assert first_line == "diffjax: workdir mine: a new run"
  assert (tmp_path / "mine" / "config.toml").exists()
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


# The command on a cluster of two processes, which it joins only after the flags
# are checked.
CLUSTER_COMMAND = """
import contextlib
import runpy
import sys

import jax

from diffjax.parallel import processes

processes.connected = lambda *_, **__: contextlib.nullcontext()
jax.process_count = lambda: 2
sys.argv = ["diffjax.train", "--config=tiny"]
runpy.run_module("diffjax.train", run_name="__main__", alter_sys=True)
"""


def test_several_processes_of_a_cluster_need_a_workdir(command, tmp_path):
  """Their number is known only after they have found each other."""
  (tmp_path / "cluster_command.py").write_text(CLUSTER_COMMAND)

  result = command("cluster_command", cwd=tmp_path)

  assert (result.returncode, result.stderr) == (1, MULTI_PROCESS_ERROR)
