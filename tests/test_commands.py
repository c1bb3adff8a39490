"""Commands as users type them: exit codes, errors in one line, and the docs.

The documented commands run as they are written on the pages.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.harness import ROOT, in_process
from tests.harness.pages import (
  DOCUMENTATION,
  Command,
  commands,
  python_blocks,
)

TINY = "--config=configs/tiny.py"
NO_SUCH_CONFIG = "no such config or file"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    pytest.param(
      [],
      "error: pass --config=NAME or --config=FILE, for example --config=",
      id="no config",
    ),
    pytest.param(
      ["--config=configs/nope.py"],
      f"error: --config=configs/nope.py: {NO_SUCH_CONFIG}; the configs are"
      " base, diff_125m, ",
      id="missing config",
    ),
    pytest.param(
      ["--config=runs/x/config.toml"],
      f"error: --config=runs/x/config.toml: {NO_SUCH_CONFIG}",
      id="missing TOML file",
    ),
    pytest.param(
      ["--config=configs/tiny.py:v9"],
      "error: variant 'v9': 'v9' is not allowed; variants are"
      " diff|transformer|softmax|diff_v2|",
      id="unknown variant",
    ),
    pytest.param(
      ["--config=experiments/scaling/config.py:diff,size=9b"],
      "error: variant 'diff,size=9b': 'size=9b' is not allowed; variants are"
      " transformer|diff|diff_v2[,size=0.1m|",
      id="unknown size",
    ),
    pytest.param(
      [TINY, "--config.train.stepz=3"],
      "error: config.train.stepz is not a config field: did you mean"
      " train.steps?",
      id="unknown field",
    ),
    pytest.param(
      [TINY, "--config.train.steps=x"],
      "error: flag --config.train.steps=x: invalid literal",
      id="value of another type",
    ),
    pytest.param(
      [TINY, "--workdirs=x"],
      "error: Unknown command line flag 'workdirs'",
      id="unknown flag",
    ),
    pytest.param(
      [TINY, "x"], "error: unexpected argument 'x'", id="unexpected argument"
    ),
  ],
)
def test_a_wrong_command_line_ends_with_one_line_and_exit_code_2(
  command, arguments, message
):
  result = command("diffjax.train", *arguments)

  assert result.returncode == 2, result.stderr
  assert "Traceback" not in result.stderr
  last_line = result.stderr.strip().splitlines()[-1]
  assert last_line.startswith(message)


@pytest.mark.parametrize(
  ("override", "message"),
  [
    pytest.param(
      "--config.model.num_kv_heads=3",
      "config.model.num_kv_heads = 3: must divide",
      id="heads",
    ),
    pytest.param(
      "--config.model.attention_implementation=x",
      "must be one of auto, reference, chunked",
      id="implementation",
    ),
    pytest.param(
      "--config.data.source=text:/nowhere/*", "/nowhere/*", id="data"
    ),
  ],
)
def test_a_config_that_cannot_be_trained_ends_with_one_line_and_exit_code_1(
  command, override, message
):
  result = command("diffjax.train", TINY, override, "--workdir=x")

  assert result.returncode == 1, result.stderr
  assert "Traceback" not in result.stderr
  last_line = result.stderr.strip().splitlines()[-1]
  assert last_line.startswith("error: ")
  assert message in last_line


def test_without_network_the_error_names_sources_that_need_none(
  command, tmp_path
):
  """The config's text is on the web, and so is its tokenizer."""
  # Nothing listens on this port, so every request fails.
  nowhere = "http://127.0.0.1:9"

  result = command(
    "diffjax.train",
    "--config=configs/diff_1b.py",
    f"--workdir={tmp_path}/run",
    environment={
      "HTTPS_PROXY": nowhere,
      "HF_ENDPOINT": nowhere,
      "TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"),
    },
  )

  assert result.returncode == 1, result.stderr
  assert "Traceback" not in result.stderr
  last_line = result.stderr.strip().splitlines()[-1]
  assert "cannot reach http://127.0.0.1:9" in last_line
  assert "--config.data.source='parquet:/data/*.parquet'" in last_line
  assert (
    "--config.data.source=tfds:NAME --config.data.data_dir=DIR" in last_line
  )
  assert "--config=configs/tiny.py" in last_line


@pytest.mark.parametrize(
  "module",
  [
    "diffjax.train",
    "diffjax.prepare",
    "diffjax.aot",
    "diffjax.evaluate",
    "diffjax.generate",
    "diffjax.convert",
    "diffjax.checkpoints",
    "experiments.run",
  ],
)
def test_the_short_flag_of_help_works_beside_other_flags(module):
  help_page = in_process.call(module, "--help").stdout

  result = in_process.call(module, "--workdir=x", "-h")

  assert result.returncode == 0
  assert result.stdout == help_page


@pytest.mark.parametrize(
  "arguments",
  [
    pytest.param(["--help"], id="help"),
    pytest.param(["--config=configs/tiny.py", "--print_config"], id="config"),
  ],
)
def test_a_command_that_prints_into_a_closed_pipe_prints_no_error(arguments):
  """For example, `head` closes the pipe after the lines that it shows."""
  reader, writer = os.pipe()
  # Without a reader, printing into the pipe fails.
  os.close(reader)

  result = subprocess.run(
    [sys.executable, "-m", "diffjax.train", *arguments],
    cwd=ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writer)

  # A shell reports this code for a process that SIGPIPE has ended.
  assert result.returncode == 128 + signal.SIGPIPE
  assert not result.stderr


# With None in sys.modules, `import NAME` fails as if it were not installed.
GPU_BENCHMARK_WITHOUT_OTHER_PACKAGES = """
import sys

for name in (
  "array_record",
  "grain",
  "matplotlib",
  "ml_collections",
  "orbax",
  "pyarrow",
  "tensorboardX",
  "tensorflow_datasets",
  "tiktoken",
  "tokenizers",
):
  sys.modules[name] = None

from benchmarks.gpu.__main__ import main

main([])
"""


def test_the_gpu_benchmark_needs_few_packages():
  """A machine with a GPU may have JAX, flax and optax, and little else."""
  result = subprocess.run(
    [sys.executable, "-c", GPU_BENCHMARK_WITHOUT_OTHER_PACKAGES],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )

  # The program could import all that it needs, and then found no GPU.
  assert result.returncode == 1
  assert result.stderr == (
    "error: this needs a GPU, and JAX's backend is 'cpu';"
    " --interpret runs tiny shapes on a CPU\n"
  )


# The config of the README's run, with a smaller model and fewer steps.
TINY_WITH_120_STEPS = """
from diffjax.configs import tiny

def get_config():
  config = tiny.get_config()
  config.model.num_layers = 1
  config.optimizer.warmup_steps = 20
  config.train.update(steps=120, batch_size=4, checkpoint_interval=60)
  config.eval.update(interval=60, rows=32)
  return config
"""


def documented_commands_on_tiny() -> list[Command]:
  """Returns the documented commands that use runs/tiny and no other run."""
  training = Command("diffjax.train", [TINY])
  selected = []
  for page in DOCUMENTATION:
    for command in commands(page.read_text()):
      workdirs = re.findall(r"runs/\w+", " ".join(command.arguments))
      # Training writes to runs/tiny by default.
      is_on_tiny = command == training or set(workdirs) == {"runs/tiny"}
      if is_on_tiny and command not in selected:
        selected.append(command)
  return selected


def documented_code_on_tiny() -> list[str]:
  """Returns the documented blocks of Python that use runs/tiny."""
  selected = []
  for page in DOCUMENTATION:
    for block in python_blocks(page.read_text()):
      if "runs/tiny" in block:
        selected.append(block)
  return selected


def run_in(
  directory: pathlib.Path,
  command: Callable[..., subprocess.CompletedProcess[str]],
  module: str,
  arguments: Sequence[str] = (),
) -> str:
  """Returns what a command prints, which must succeed without a warning.

  Training may warn, because its config is too small.
  """
  result = command(
    module,
    *arguments,
    cwd=directory,
    environment={"PYTHONPATH": str(ROOT)},
  )
  assert result.returncode == 0, result.stderr
  assert "Traceback" not in result.stderr
  if module != "diffjax.train":
    assert "warning" not in result.stderr.lower(), result.stderr
  return result.stdout


@pytest.mark.longest
@pytest.mark.full
def test_documented_commands_on_tiny(command, tmp_path):
  """The commands and the code on the pages of the documentation work.

  They use a run in runs/tiny, which the first command trains: here, with a
  smaller configs/tiny.py. This is one test, so that the run is trained once.
  """
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs/__init__.py").touch()
  (tmp_path / "configs/tiny.py").write_text(TINY_WITH_120_STEPS)
  run = tmp_path / "runs/tiny"
  # The default of 256 rows would take minutes.
  few_rows = ["--rows=4", "--batch_size=4", "--length=128"]

  printed = {}
  for module, arguments in documented_commands_on_tiny():
    if module == "benchmarks.int8_cache":
      arguments = [*arguments, *few_rows]
    printed[module] = run_in(tmp_path, command, module, arguments)

  # Training has written these files, and the last checkpoint is listed.
  assert (run / "loss.png").exists()
  assert (run / "sample.txt").exists()
  assert (run / "checkpoints/120").exists()
  assert "120" in printed["diffjax.checkpoints"]
  assert printed["diffjax.generate"].startswith("def main(")
  assert (tmp_path / "exported/model.safetensors").exists()
  # The model has learned more than the frequencies of bytes.
  last_metrics = {}
  for line in (run / "metrics.jsonl").read_text().splitlines():
    last_metrics.update(json.loads(line))
  bits_without_context = 4.6
  assert last_metrics["validation/bits_per_byte"] < bits_without_context - 1

  evaluation = ["--suite=validation", "--workdir=runs/tiny"]
  run_in(tmp_path, command, "diffjax.evaluate", evaluation)

  assert (run / "evals/validation.json").exists()

  blocks = documented_code_on_tiny()
  assert blocks
  for block in blocks:
    # The config in diffjax.configs has more steps.
    with_small_config = block.replace("from diffjax.configs", "from configs")
    (tmp_path / "documented_code.py").write_text(with_small_config)
    assert "def " in run_in(tmp_path, command, "documented_code")


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
  "arguments",
  [
    # With this seed, a process is killed a second after its second step, and
    # then once more while it starts again.
    pytest.param(["--times=2", "--steps=60", "--seed=1182"], id="prepared"),
    pytest.param(
      ["--times=1", "--steps=60", "--seed=1182", "--mode=streamed"],
      id="streamed",
    ),
  ],
)
def test_a_run_that_sigkill_stops_at_random_moments_has_the_same_result(
  arguments,
):
  """The benchmark compares a run that it kills with a run that it does not.

  It exits with 1 if the results differ. `--times` is the number of kills.
  docs/reliability.md has the full measurements.
  """
  result = subprocess.run(
    [sys.executable, "-m", "benchmarks.kill", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )

  assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.full
def test_ctrl_c_ends_a_command_at_random_moments_of_its_start():
  """The benchmark exits with 1 if Ctrl-C does not end a command in time.

  The limit is 30 seconds in place of two, because the machine of the tests may
  be busy.
  """
  result = subprocess.run(
    [
      sys.executable,
      "-m",
      "benchmarks.interrupt",
      # With this seed, after 2% and after 72% of the time to the first step.
      "--times=2",
      "--seed=1",
      "--limit=30",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )

  assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("optimised", "system_allocator")
def test_the_memory_of_training_does_not_grow(tmp_path):
  """`benchmarks.growth` exits with 1 if the memory grows by more than 5%.

  docs/reliability.md has the measurement with tiny itself. Here, tiny has fewer
  tokens in a step, so that steps are fast.
  """
  for index in range(40):
    text = f"line {index} of a document\n" * 100
    (tmp_path / f"{index}.txt").write_text(text)
  program = f"""
from benchmarks import growth
from diffjax.configs import tiny

tiny_config = tiny.get_config

def get_config():
  config = tiny_config()
  config.model.num_layers = 1
  config.data.source = "text:{tmp_path}/*.txt"
  config.data.update(length=32, validation_fraction=0.1)
  config.eval.rows = 16
  return config

tiny.get_config = get_config
growth.main()
"""
  num_steps = 1200

  result = subprocess.run(
    [sys.executable, "-c", program, "--batch_size=2", f"--steps={num_steps}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )

  assert result.returncode == 0, result.stdout + result.stderr
  assert f"MiB until step {num_steps}, ratio " in result.stdout
