"""Nothing is unpickled, and no code from data or checkpoints is run: runs, resumes, a start from parameters and conversions, watched."""

import subprocess
import sys

import pytest

WATCHED = """
import pathlib, pickle, sys

work, seen = pathlib.Path(sys.argv[1]), []


def caller():
  return sys._getframe(2).f_code.co_filename


def watch(event, args):
  if event in ("pickle.find_class", "marshal.load") or event == "marshal.loads" and "importlib" not in caller():  # it reads modules' .pyc
    seen.append((event, caller()))
  if event == "exec" and str(work) in args[0].co_filename or event == "import" and str(work) in str(args[1]):
    seen.append((event, args))


def refused(*args, **kwargs):
  seen.append(("unpickling", caller()))
  raise AssertionError("unpickling")


import jax
from diffjax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimizerConfig, TrainConfig
from diffjax.interop import diffllama, workdir
from diffjax.training import loop

jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(work / "compiled"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
for index in range(40):
  lines = "".join(f"import os; raise SystemExit({line}) of {index}\\n" for line in range(20))
  (work / f"{index}.py").write_text(lines)


def train(name, mode, steps, **fields):
  loop.train(
    Config(
      model=ModelConfig(num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1, head_dim=8, ffn_dim=16, max_length=64),
      data=DataConfig(source=f"text:{work}/*.py", validation_fraction=0.2, length=32, mode=mode, prepared_dir=str(work / "rows")),
      optimizer=OptimizerConfig(warmup_steps=0, schedule="wsd", decay_fraction=0.0),
      train=TrainConfig(steps=steps, batch_size=4, sample_tokens=0, **fields),
      eval=EvalConfig(interval=0),
    ),
    str(work / name),
  )


sys.addaudithook(watch)
pickle.load = pickle.loads = pickle.Unpickler = refused  # what holds no class passes the audit's pickle.find_class
train("prepared", "prepared", 1)
train("prepared", "prepared", 2)
train("streamed", "streamed", 1, init_from=str(work / "prepared"))
train("streamed", "streamed", 2)
diffllama.write(str(work / "exported"), workdir.read(str(work / "prepared")), "bfloat16")
workdir.write(str(work / "imported"), diffllama.read(str(work / "exported")))
print("seen:", seen)
"""


@pytest.mark.full
def test_nothing_is_unpickled_or_executed(tmp_path):
  result = subprocess.run(
    [sys.executable, "-c", WATCHED, tmp_path],
    capture_output=True,
    text=True,
    timeout=100,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.splitlines()[-1] == "seen: []"
  assert (
    result.stderr.count("resuming from step 1") == 2
    and "starting from the parameters" in result.stderr
  )
