"""Nothing is unpickled, and no code from data or checkpoints is executed.

An audit hook watches training, resuming, a start from parameters and two
conversions.
"""

import subprocess
import sys

import pytest

TRAIN_AND_CONVERT_WITH_AN_AUDIT_HOOK = r"""
import pathlib
import pickle
import sys

import jax

from diffjax.config import (
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.interop import diffllama, workdir
from diffjax.training import loop

directory = sys.argv[1]
violations = []


def caller():
  return sys._getframe(2).f_code.co_filename


def watch(event, arguments):
  if event in ("pickle.find_class", "marshal.load"):
    violations.append((event, caller()))
  # importlib reads the .pyc files of modules.
  if event == "marshal.loads" and "importlib" not in caller():
    violations.append((event, caller()))
  if event == "exec" and directory in arguments[0].co_filename:
    violations.append((event, arguments))
  if event == "import" and directory in str(arguments[1]):
    violations.append((event, arguments))


def unpickle(*arguments, **options):
  violations.append(("unpickling", caller()))
  raise AssertionError("unpickling")


def write_text():
  # If it were executed, a document would end the process.
  for document in range(40):
    lines = []
    for line in range(20):
      lines.append(f"import os; raise SystemExit({line}) of {document}\n")
    file = pathlib.Path(directory, f"{document}.py")
    file.write_text("".join(lines))


def train(name, mode, steps, init_from=""):
  config = Config(
    model=ModelConfig(
      num_layers=1,
      embed_dim=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=8,
      ffn_dim=16,
      max_length=64,
    ),
    data=DataConfig(
      source=f"text:{directory}/*.py",
      validation_fraction=0.2,
      length=32,
      mode=mode,
      prepared_dir=f"{directory}/rows",
    ),
    optimizer=OptimizerConfig(
      warmup_steps=0, schedule="wsd", decay_fraction=0.0
    ),
    train=TrainConfig(
      steps=steps, batch_size=4, sample_tokens=0, init_from=init_from
    ),
    eval=EvalConfig(interval=0),
  )
  loop.train(config, f"{directory}/{name}")


jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", f"{directory}/compiled")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
write_text()
sys.addaudithook(watch)
# The event pickle.find_class does not occur for a pickle without classes.
pickle.load = pickle.loads = pickle.Unpickler = unpickle

train("prepared", "prepared", steps=1)
train("prepared", "prepared", steps=2)
train("streamed", "streamed", steps=1, init_from=f"{directory}/prepared")
train("streamed", "streamed", steps=2)
model = workdir.read(f"{directory}/prepared")
diffllama.write(f"{directory}/exported", model, "bfloat16")
workdir.write(f"{directory}/imported", diffllama.read(f"{directory}/exported"))
print("violations:", violations)
"""


@pytest.mark.full
def test_nothing_is_unpickled_or_executed(tmp_path):
  """Data and checkpoints of others can be read without running their code.

  Python calls an audit hook whenever code is unpickled, executed or imported.
  The hook of the program records any unpickling as a violation, and execution
  and imports of files from the run's directory.
  """
  result = subprocess.run(
    [sys.executable, "-c", TRAIN_AND_CONVERT_WITH_AN_AUDIT_HOOK, tmp_path],
    capture_output=True,
    text=True,
    timeout=100,
  )

  assert result.returncode == 0, result.stderr
  last_line = result.stdout.splitlines()[-1]
  assert last_line == "violations: []"
  # The program resumes a run with prepared data, and one with streamed data. It
  # starts one of them from the parameters of the other.
  assert result.stderr.count("resuming from step 1") == 2
  assert "starting from the parameters" in result.stderr
