"""Workdirs with checkpoints of small models, made without training."""

import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from diffjax.config import from_config_dict
from diffjax.model.decoder import Decoder
from diffjax.training.checkpoint import Checkpoints
from experiments import grid, launch, tuned
from tests.harness import in_process

SMALL = dict(
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  num_kv_heads=2,
  head_dim=4,
  ffn_dim=16,
)


@pytest.fixture
def choose():
  """The choice of settings by a tuning's results."""
  return tuned.best


@pytest.fixture(autouse=True)
def first_settings(monkeypatch, choose):
  """Instead of tuning's choice, which may not have been made yet, each row has the first setting of the grid "tune"."""

  def first(name, row, *_):
    return next(
      variant
      for variant in grid.load(name, "tune").grids["tune"].variants
      if variant.partition(",")[0] == row
    )

  monkeypatch.setattr(tuned, "best", first)


@pytest.fixture
def make_workdir(tmp_path):
  """make_workdir("run", config, {"train.steps": 1}): the workdir of a small model with random parameters, and its config."""
  (tmp_path / "text").mkdir()
  for index in range(8):
    (tmp_path / "text" / f"{index}.txt").write_text(
      f"line {index} of a text that goes on and on\n" * 8
    )

  def make(name, config, fields=None):
    values = config.to_dict()
    values["model"].update(SMALL)
    values["data"].update(
      source=f"text:{tmp_path}/text/*.txt",
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
    variables = initialise(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    params = variables["params"]
    with Checkpoints(str(tmp_path / name), keep=1) as checkpoints:
      checkpoints.save(
        0, {"params": params}, data_state={}, config=config.to_dict()
      )
      checkpoints.wait()
    return str(tmp_path / name), config

  return make


@pytest.fixture
def make_results():
  """make_results(name, experiment, measured): results.json of all its runs, as if `measured(run)` had come of each."""

  def make(name, experiment, measured, chosen="cpu"):
    from experiments import grid

    runs = grid.expand(name, experiment.grids[chosen], {})
    found = [
      {
        "name": run.name,
        "variant": run.variant,
        "seed": run.seed,
        "parameters": 838_000,
        "results": measured(run),
      }
      for run in runs
    ]
    return {"baseline": experiment.grids[chosen].baseline, "runs": found}

  return make


@pytest.fixture
def run(command, monkeypatch):
  """run(…): the outputs of the command in this process. The commands that it starts are forked, and share compiled programs."""
  one_at_a_time = threading.Lock()
  compiled = {
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }

  def call(self, line, env=None, log=None, *, tail=False):
    python, dash_m, module, *arguments = line
    assert (python, dash_m) == (sys.executable, "-m")
    with one_at_a_time:
      result = command(
        module, *arguments, environment={**compiled, **(env or {})}
      )
    if log:
      log.write_text(result.stdout + result.stderr)
    print(result.stdout + result.stderr, file=sys.stderr)
    if result.returncode:
      raise launch._failure(line, result.returncode, result.stderr, log)

  def run(*args, code=0):
    result = in_process.call("experiments.run", *args)
    assert result.returncode == code and "Traceback" not in result.stderr, (
      result.stderr
    )
    return result.stdout, result.stderr

  monkeypatch.setattr(launch.Launcher, "call", call)
  monkeypatch.setattr(
    launch, "devices", lambda: launch.Devices("cpu", "cpu", 1)
  )
  return run
