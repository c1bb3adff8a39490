"""Commands as users type them: exit codes, errors in one line, and the docs.

The documented commands run as they are written on the pages.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.harness import ROOT, in_process
from tests.harness.pages import DOCUMENTATION, commands, python_blocks

TINY = "--config=configs/tiny.py"


@pytest.mark.parametrize(
  "arguments, code, message",
  [
    (
      [],
      2,
      "error: pass --config=NAME or --config=FILE, for example --config=",
    ),
    (
      ["--config=configs/nope.py"],
      2,
      "error: --config=configs/nope.py: no such config or file; the configs are"
      " base, diff_125m, ",
    ),
    (
      ["--config=configs/tiny.py:v9"],
      2,
      "error: variant 'v9': 'v9' is not allowed; variants are"
      " diff|transformer|softmax|diff_v2|",
    ),
    (
      ["--config=experiments/scaling/config.py:diff,size=9b"],
      2,
      "error: variant 'diff,size=9b': 'size=9b' is not allowed; variants are"
      " transformer|diff|diff_v2[,size=0.1m|",
    ),
    (
      [TINY, "--config.train.stepz=3"],
      2,
      "error: config.train.stepz is not a config field: did you mean"
      " train.steps?",
    ),
    (
      [TINY, "--config.train.steps=x"],
      2,
      "error: flag --config.train.steps=x: invalid literal",
    ),
    (
      [TINY, "--workdirs=x"],
      2,
      "error: Unknown command line flag 'workdirs'",
    ),
    ([TINY, "x"], 2, "error: unexpected argument 'x'"),
    (
      ["--config=runs/x/config.toml"],
      2,
      "error: --config=runs/x/config.toml: no such config or file",
    ),
    (
      [
        TINY,
        "--config.model.num_kv_heads=3",
        "--workdir=x",
      ],
      1,
      "error: config.model.num_kv_heads = 3: must divide",
    ),
    (
      [
        TINY,
        "--config.model.attention_implementation=x",
        "--workdir=x",
      ],
      1,
      "must be one of auto, reference, chunked",
    ),
    (
      [
        TINY,
        "--config.data.source=text:/nowhere/*",
        "--workdir=x",
      ],
      1,
      "/nowhere/*",
    ),
  ],
)
def test_bad_input_is_one_line(command, arguments, code, message):
  result = command("diffjax.train", *arguments)
  lines = result.stderr.strip().splitlines()
  assert result.returncode == code, result.stderr
  assert message in lines[-1]
  assert lines[-1].startswith("error: ")
  assert "Traceback" not in result.stderr


def test_without_network_the_command_names_what_works(command, tmp_path):
  # Nothing listens on this port.
  environment = {
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"),
    "HF_ENDPOINT": "http://127.0.0.1:9",
  }
  arguments = ["--config=configs/diff_1b.py", f"--workdir={tmp_path}/run"]
  result = command("diffjax.train", *arguments, environment=environment)
  assert result.returncode == 1, result.stderr
  message = result.stderr.strip().splitlines()[-1]
  assert "Traceback" not in result.stderr
  for part in (
    "cannot reach http://127.0.0.1:9",
    "--config.data.source='parquet:/data/*.parquet'",
    "--config.data.source=tfds:NAME --config.data.data_dir=DIR",
    "--config=configs/tiny.py",
  ):
    assert part in message


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


@pytest.mark.parametrize("arguments", [["--help"], [TINY, "--print_config"]])
def test_a_closed_pipe_ends_a_command_quietly(arguments):
  reader, writer = os.pipe()
  os.close(reader)
  result = subprocess.run(
    [sys.executable, "-m", "diffjax.train", *arguments],
    cwd=ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writer)
  assert result.returncode == 128 + signal.SIGPIPE
  assert not result.stderr


# A machine with a GPU may have JAX, flax and optax, and little else.
NOT_ON_GPU_MACHINES = [
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
]


def test_the_gpu_benchmark_needs_little():
  """It imports what its processes do, too."""
  code = f"""if True:
    import sys
    sys.modules.update(dict.fromkeys({NOT_ON_GPU_MACHINES}))
    import benchmarks.gpu.worker, benchmarks.gpu.checks
    import benchmarks.gpu.attention, benchmarks.gpu.decode, benchmarks.gpu.steps
    from benchmarks.gpu.__main__ import main
    main([])"""
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 1
  assert result.stderr == (
    "error: this times a GPU, and the backend is 'cpu'\n"
  )


def with_workdir(module, arguments):
  """Returns the command with the workdir that it writes to by default."""
  if (module, arguments) == ("diffjax.train", [TINY]):
    return (module, TINY, "--workdir=runs/tiny")
  return (module, *arguments)


def commands_on_tiny():
  """Returns the documented commands that use runs/tiny and no other run."""
  documented = []
  for page in DOCUMENTATION:
    for module, arguments in commands(page.read_text()):
      command = with_workdir(module, arguments)
      workdirs = set(re.findall(r"runs/\w+", " ".join(command)))
      if workdirs == {"runs/tiny"} and command not in documented:
        documented.append(command)
  return documented


def code_on_tiny():
  """Returns the documented blocks of Python that use runs/tiny."""
  blocks = []
  for page in DOCUMENTATION:
    for block in python_blocks(page.read_text()):
      if "runs/tiny" in block:
        blocks.append(block)
  return blocks


@pytest.fixture
def run_in(tmp_path):
  """run_in("-m", MODULE, …): Python, with its files in tmp_path.

  Returns what it prints. Fails if it does not succeed, or if it warns.
  """

  def run(*arguments):
    moved = []
    for argument in arguments:
      moved.append(
        re.sub(r"runs/tiny|exported", rf"{tmp_path}/\g<0>", argument)
      )
    result = subprocess.run(
      [sys.executable, *moved],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=1800,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    if "diffjax.train" not in arguments:
      assert "warning" not in result.stderr.lower(), result.stderr
    return result.stdout

  return run


@pytest.mark.longest
@pytest.mark.full
@pytest.mark.usefixtures("optimised", "system_allocator")
def test_documented_commands_on_tiny(tmp_path, run_in):
  """Runs the README's training command, and all that pages do with its run.

  Only the workdir is another one, and a benchmark reads fewer rows. Each command
  and each block of code runs in a process of its own, as a user starts it.
  """
  documented = commands_on_tiny()
  assert documented[0][0] == "diffjax.train"
  evaluation = ("diffjax.evaluate", "--suite=validation", "--workdir=runs/tiny")
  printed = {}
  for module, *arguments in [*documented, evaluation]:
    if module == "benchmarks.int8_cache":
      # Of 256 rows, which would take minutes.
      arguments.append("--rows=32")
    printed[module] = run_in("-m", module, *arguments)
  assert {
    "diffjax.train",
    "diffjax.checkpoints",
    "diffjax.generate",
    "diffjax.convert",
    "diffjax.evaluate",
  } <= printed.keys()
  assert "600" in printed["diffjax.checkpoints"]
  assert printed["diffjax.generate"].startswith("def main(")

  blocks = code_on_tiny()
  assert blocks
  for block in blocks:
    text = run_in("-c", block)
  assert text.count("def ") >= 1

  run = tmp_path / "runs/tiny"
  newest_values = {}
  for line in (run / "metrics.jsonl").read_text().splitlines():
    newest_values |= json.loads(line)
  assert newest_values["validation/bits_per_byte"] < 2.2
  assert (run / "loss.png").exists()
  assert (run / "sample.txt").exists()
  assert (run / "checkpoints/600").exists()
  assert (run / "evals/validation.json").exists()
  assert (tmp_path / "exported/model.safetensors").exists()


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
  "arguments",
  [
    "--times=3 --steps=120 --seed=142",
    "--times=2 --steps=80 --mode=streamed",
    "--times=1 --steps=60 --processes=2",
  ],
)
def test_sigkill_at_random_moments_changes_nothing(arguments):
  """docs/reliability.md has the full measurements.

  Seed 142 kills it once while it starts again.
  """
  result = subprocess.run(
    [sys.executable, "-m", "benchmarks.kill", *arguments.split()],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.full
def test_ctrl_c_at_random_moments_of_a_cold_start():
  """`python -m benchmarks.interrupt` does 50, with a limit of two seconds each.

  A busy machine has longer here.
  """
  arguments = ["--times=4", "--seed=1", "--limit=30"]
  result = subprocess.run(
    [sys.executable, "-m", "benchmarks.interrupt", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("optimised", "system_allocator")
def test_memory_does_not_grow():
  """With one layer of tiny. docs/reliability.md has the full measurements."""
  code = """if True:
    from benchmarks import growth
    whole = growth.tiny.get_config
    def one_layer():
      config = whole()
      config.model.num_layers = 1
      return config
    growth.tiny.get_config = one_layer
    growth.main()"""
  arguments = ["--batch_size=2", "--steps=1200"]
  result = subprocess.run(
    [sys.executable, "-c", code, *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  assert "MiB until step 1200, ratio " in result.stdout
