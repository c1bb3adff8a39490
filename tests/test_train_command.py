"""The workdir of `diffjax.train`, with and without the flag --workdir."""

import pathlib
import subprocess

import pytest

from tests.harness.commands import Commands

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


# All runs train this config, so that it is compiled once.
CONFIG_FLAG = "--config=tiny:transformer,heads=2"
DEFAULT_WORKDIR = "runs/tiny_transformer_heads_2"


def train(
  command: Commands, directory: pathlib.Path, *flags: str, steps: int
) -> subprocess.CompletedProcess:
  """Writes texts into a directory, and trains a small model there."""
  for index in range(20):
    line = f"document {index}: {index * 7 % 97}\n"
    (directory / f"{index}.txt").write_text(line * 20)
  fields = SMALL | {
    "data.source": f"text:{directory}/*.txt",
    "data.prepared_dir": str(directory / "rows"),
    "train.steps": steps,
  }
  overrides = [f"--config.{name}={value}" for name, value in fields.items()]
  return command(
    "diffjax.train", CONFIG_FLAG, *flags, *overrides, cwd=directory
  )


@pytest.fixture(scope="module")
def first_run(command, tmp_path_factory):
  """Returns the directory of a run of one step, and the command's result."""
  directory = tmp_path_factory.mktemp("first_run")
  result = train(command, directory, steps=1)
  assert result.returncode == 0, result.stderr
  return directory, result


def test_the_default_workdir_is_named_after_the_config(first_run):
  """The run has --config=tiny:transformer,heads=2, and no --workdir."""
  directory, result = first_run

  first_line = result.stderr.splitlines()[0]
  workdir = "runs/tiny_transformer_heads_2"
  assert first_line == f"diffjax: workdir {workdir}: a new run"
  assert (directory / workdir / "checkpoints" / "1").exists()


RESUME_LINE = (
  f"diffjax: workdir {DEFAULT_WORKDIR}: resuming from its newest checkpoint"
)


def test_the_same_command_resumes_the_run(command, first_run):
  """The first run has taken its only step, so no step is left."""
  directory, _ = first_run

  result = train(command, directory, steps=1)

  assert result.returncode == 0, result.stderr
  lines = result.stderr.splitlines()
  assert lines[0] == RESUME_LINE
  assert f"diffjax: resuming from step 1 of {DEFAULT_WORKDIR}" in lines


def test_another_learning_rate_in_the_same_directory_is_refused(
  command, first_run
):
  """Both runs have the same --config, and so the same default workdir."""
  directory, _ = first_run
  flag = "--config.optimizer.learning_rate=0.1"

  result = train(command, directory, flag, steps=1)

  assert result.returncode == 1
  lines = result.stderr.splitlines()
  # The command names the workdir before it compares the configs.
  assert lines[0] == RESUME_LINE
  # The config "tiny" has a learning rate of 0.003.
  assert "optimizer.learning_rate was 0.003 and is 0.1" in lines[-1]


def test_the_flag_workdir_replaces_the_default_workdir(command, tmp_path):
  """The default would be a directory below "runs"."""
  result = train(command, tmp_path, "--workdir=mine", steps=0)

  assert result.returncode == 0, result.stderr
  first_line = result.stderr.splitlines()[0]
  assert first_line == "diffjax: workdir mine: a new run"
  assert (tmp_path / "mine" / "config.toml").exists()
  assert not (tmp_path / "runs").exists()


def test_a_config_from_a_file_needs_a_workdir(command, tmp_path):
  """Every run has a config.toml, so its name says nothing about the run."""
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
  """The default is a local directory, which the other machines do not see.

  The command ends before it looks for the other process.
  """
  result = command(
    "diffjax.train",
    "--config=tiny",
    "--coordinator=localhost:9476",
    "--num_processes=2",
    "--process_id=0",
    cwd=tmp_path,
  )

  assert result.returncode == 1
  assert result.stderr == MULTI_PROCESS_ERROR


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
  """JAX finds the processes of a cluster itself, without flags.

  The command knows their number only after it has joined them.
  """
  (tmp_path / "cluster_command.py").write_text(CLUSTER_COMMAND)

  result = command("cluster_command", cwd=tmp_path)

  assert result.returncode == 1
  assert result.stderr == MULTI_PROCESS_ERROR
