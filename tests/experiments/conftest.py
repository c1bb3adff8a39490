"""Fixtures: workdirs of small models, results of runs, and the command."""

import sys
import threading

import jax
import numpy as np
import pytest

from diffjax.config import from_config_dict
from diffjax.model.decoder import Decoder
from diffjax.training.checkpoint import Checkpoints
from experiments import grid, launch
from tests.harness import in_process

SMALL = dict(
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  num_kv_heads=2,
  head_dim=4,
  ffn_dim=16,
)


def workdir_maker(directory):
  """Returns the function of the fixture `make_workdir`, for a directory."""
  text_dir = directory / "text"
  text_dir.mkdir()
  for index in range(8):
    line = f"line {index} of a text that goes on and on\n"
    (text_dir / f"{index}.txt").write_text(line * 8)

  def make(name, config, fields=None):
    """Returns the workdir, and the config with the fields of a small model."""
    values = config.to_dict()
    values["model"].update(SMALL)
    values["data"].update(
      source=f"text:{text_dir}/*.txt",
      validation_fraction=0.7,
      mode="streamed",
      length=64,
    )
    for field, value in (fields or {}).items():
      section, key = field.split(".")
      values[section][key] = value
    config = from_config_dict(values)
    # test_outliers.py compares losses, which depend on the drawn values. So
    # these are not the parameters of tests/harness/parameters.py.
    initialise = jax.jit(Decoder(config.model).init)
    variables = initialise(jax.random.key(0), np.zeros((1, 4), np.int32))
    workdir = str(directory / name)
    with Checkpoints(workdir, keep=1) as checkpoints:
      checkpoints.save(
        0,
        {"params": variables["params"]},
        data_state={},
        config=config.to_dict(),
      )
      checkpoints.wait()
    return workdir, config

  return make


@pytest.fixture
def make_workdir(tmp_path):
  """A function that creates a workdir with the checkpoint of a small model.

  make_workdir("run", config, {"train.steps": 1}) returns its path and its
  config, which has the given fields. The parameters are random.
  """
  return workdir_maker(tmp_path)


@pytest.fixture(scope="module")
def make_shared_workdir(tmp_path_factory):
  """Like `make_workdir`, for workdirs that the tests of a module share."""
  return workdir_maker(tmp_path_factory.mktemp("workdirs"))


@pytest.fixture
def make_results():
  """A function that returns the results.json of an experiment's grid.

  In make_results("tokens", experiment, measured, chosen="cpu"), the metrics of
  each run of the grid "cpu" are `measured(run)`, and nothing is trained.
  """

  def make(name, experiment, measured, chosen="cpu"):
    """Returns results of the runs of a grid, with the metrics measured(run)."""
    entries = []
    for run in grid.expand(name, experiment.grids[chosen], {}):
      entries.append(
        {
          "name": run.name,
          "variant": run.variant,
          "seed": run.seed,
          "parameters": 838_000,
          "results": measured(run),
        }
      )
    baseline = experiment.grids[chosen].baseline
    return {"grid": chosen, "baseline": baseline, "runs": entries}

  return make


@pytest.fixture
def run(command, monkeypatch):
  """A function that runs the command experiments.run in this process.

  run("ablations", "--steps=2", code=0) checks the exit status and returns
  stdout and stderr. The commands that experiments.run starts are forked, one at
  a time.
  """
  one_at_a_time = threading.Lock()

  def call(self, line, env=None, log=None, *, tail=False):
    """Replaces `Launcher.call`: runs a command line in a forked process."""
    python, dash_m, module, *arguments = line
    assert (python, dash_m) == (sys.executable, "-m")
    with one_at_a_time:
      result = command(module, *arguments, environment=env)
    output = result.stdout + result.stderr
    if log:
      log.write_text(output)
    print(output, file=sys.stderr)
    if result.returncode:
      raise launch.failure(line, result.returncode, result.stderr, log)

  def one_cpu():
    return launch.Devices("cpu", "cpu", 1)

  def run_command(*args, code=0):
    result = in_process.call("experiments.run", *args)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout, result.stderr

  monkeypatch.setattr(launch.Launcher, "call", call)
  monkeypatch.setattr(launch, "devices", one_cpu)
  return run_command
