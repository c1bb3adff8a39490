"""Which modules a training run loads, after the first steps.

A reader of the loop has to know the modules that a run loads. Lazy imports
count, so the run takes two steps, with an evaluation and a save.
"""

import json
import subprocess
import sys

import pytest

# This run loads 102 modules, packages included: 32 of data, 21 of operations,
# 19 of training, 10 of the host, 7 of the model and 13 others. There is room
# for a few files that are split.
MAX_MODULES = 106

# What training must not load. The kernels of other platforms, decoding, and
# attention of sequences that devices share are for other runs.
UNUSED = (
  "diffjax.compiled",
  "diffjax.evals",
  "diffjax.inference",
  "diffjax.interop",
  "diffjax.model.variant_styles",
  "diffjax.ops.diff_attention.decode",
  "diffjax.ops.diff_attention.gpu",
  "diffjax.ops.diff_attention.ring",
  "diffjax.ops.diff_attention.tpu",
  "diffjax.ops.diff_attention.two_call",
)

PROGRAM = """
import json
import sys

from diffjax import config
from diffjax.training import loop

directory = sys.argv[1]
result = loop.train(
  config.Config(
    model=config.ModelConfig(
      num_layers=1,
      embed_dim=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=8,
      ffn_dim=32,
      max_length=32,
    ),
    data=config.DataConfig(
      source=f"text:{directory}/*.txt",
      validation_fraction=0.2,
      length=32,
      prepared_dir=f"{directory}/rows",
    ),
    optimizer=config.OptimizerConfig(warmup_steps=0),
    train=config.TrainConfig(steps=2, batch_size=8),
    eval=config.EvalConfig(interval=2, rows=8),
    mesh=config.MeshConfig(),
  ),
  f"{directory}/run",
)
assert result.is_finished
loaded = [name for name in sys.modules if name.startswith("diffjax")]
print(json.dumps(sorted(loaded)))
"""


@pytest.fixture(scope="module")
def loaded_modules(tmp_path_factory):
  """The names of diffjax's modules that a training run loads."""
  directory = tmp_path_factory.mktemp("run")
  for index in range(20):
    (directory / f"{index}.txt").write_text(f"document {index}\n" * 20)
  result = subprocess.run(
    [sys.executable, "-c", PROGRAM, directory], capture_output=True, text=True
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_run_loads_only_modules_that_it_needs(loaded_modules):
  """UNUSED lists modules for other runs, such as the kernels of GPUs."""
  unneeded = [name for name in loaded_modules if name.startswith(UNUSED)]

  assert unneeded == []


@pytest.mark.full
def test_a_run_loads_few_modules(loaded_modules):
  """A reader of the training loop has to know all of them."""
  assert len(loaded_modules) <= MAX_MODULES, "\n".join(loaded_modules)
