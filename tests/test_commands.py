"""Commands as users type them: exit codes and one clear line for bad input; the documented commands as they stand there."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests import in_process
from tests.conftest import ROOT
from tests.pages import DOCUMENTATION, commands, python_blocks


@pytest.mark.parametrize(
  "args, code, message",
  [
    (
      [],
      2,
      "error: pass --config=NAME or --config=FILE, for example --config=",
    ),
    (
      ["--config=configs/nope.py"],
      2,
      "error: --config=configs/nope.py: no such config or file; the configs are base, diff_125m, ",
    ),
    (
      ["--config=configs/tiny.py:v9"],
      2,
      "error: variant 'v9': 'v9' is not allowed; variants are diff|transformer|softmax|diff_v2|",
    ),
    (
      ["--config=experiments/scaling/config.py:diff,size=9b"],
      2,
      "error: variant 'diff,size=9b': 'size=9b' is not allowed; variants are transformer|diff|diff_v2[,size=0.1m|",
    ),
    (
      ["--config=configs/tiny.py", "--config.train.stepz=3"],
      2,
      "error: config.train.stepz is not a config field: did you mean train.steps?",
    ),
    (
      ["--config=configs/tiny.py", "--config.train.steps=x"],
      2,
      "error: flag --config.train.steps=x: invalid literal",
    ),
    (
      ["--config=configs/tiny.py", "--workdirs=x"],
      2,
      "error: Unknown command line flag 'workdirs'",
    ),
    (["--config=configs/tiny.py", "x"], 2, "error: unexpected argument 'x'"),
    (
      ["--config=runs/x/config.toml"],
      2,
      "error: --config=runs/x/config.toml: no such config or file",
    ),
    (
      [
        "--config=configs/tiny.py",
        "--config.model.num_kv_heads=3",
        "--workdir=x",
      ],
      1,
      "error: config.model.num_kv_heads = 3: must divide",
    ),
    (
      [
        "--config=configs/tiny.py",
        "--config.model.attention_implementation=x",
        "--workdir=x",
      ],
      1,
      "must be one of auto, reference, chunked",
    ),
    (
      [
        "--config=configs/tiny.py",
        "--config.data.source=text:/nowhere/*",
        "--workdir=x",
      ],
      1,
      "/nowhere/*",
    ),
  ],
)
def test_bad_input_is_one_line(command, args, code, message):
  result = command("diffjax.train", *args)
  lines = result.stderr.strip().splitlines()
  assert result.returncode == code, result.stderr
  assert message in lines[-1]
  assert lines[-1].startswith("error: ")
  assert "Traceback" not in result.stderr


def test_without_network_the_command_names_what_works(command, tmp_path):
  environment = {
    "HTTPS_PROXY": "http://127.0.0.1:9",  # nothing listens there
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


WITH_CONFIG = ("train", "prepare", "aot")
COMMANDS = [
  *(
    f"diffjax.{name}"
    for name in (*WITH_CONFIG, "evaluate", "generate", "convert", "checkpoints")
  ),
  "experiments.run",
]


@pytest.mark.parametrize("module", COMMANDS)
def test_help_fits_a_screen(module):
  """What it does, every flag of its own with its default, examples, and where the fields are."""
  result = in_process.call(module, "--help")
  assert result.returncode == 0 and not result.stderr
  lines = result.stdout.splitlines()
  assert len(lines) <= 30 and max(map(len, lines)) <= 100
  assert (
    sum(line.startswith(f"    python -m {module} ") for line in lines) >= 2
  ), "examples"
  source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
  for kind, name, default in re.findall(
    r'flags\.DEFINE_(\w+)\(\s*"(\w+)", ([^,]+),', source
  ):
    about = result.stdout.partition(f"\n  --{name}")[2].partition("\n  --")[0]
    shown = {"False": "off", "None": None, "[]": None, '""': None}.get(
      default, default.strip('"')
    )
    assert about and (
      shown is None or about.endswith(f"[{shown}]") or f"[{shown}]\n" in about
    ), (kind, name, default, about)
  names = (
    "diffjax/evals/SUITE.py"
    if module == "diffjax.evaluate"
    else "diffjax/config.py"
  )
  if module in (
    "diffjax.evaluate",
    *(f"diffjax.{name}" for name in WITH_CONFIG),
  ):
    assert names in result.stdout
  assert in_process.call(module, "--workdir=x", "-h").stdout == result.stdout


@pytest.mark.parametrize(
  "arguments", [["--help"], ["--config=configs/tiny.py", "--print_config"]]
)
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
  assert result.returncode == 128 + signal.SIGPIPE and not result.stderr


def test_the_gpu_benchmark_needs_little():
  """A machine with a GPU may have JAX, flax and optax, and little else. What its processes do is imported here too."""
  absent = "ml_collections grain tensorboardX orbax tiktoken tokenizers matplotlib tensorflow_datasets array_record pyarrow zstandard"
  code = f"""if True:
    import sys
    sys.modules.update(dict.fromkeys({absent.split()}))
    import benchmarks.gpu.worker, benchmarks.gpu.checks, benchmarks.gpu.attention, benchmarks.gpu.decode, benchmarks.gpu.steps
    from benchmarks.gpu.__main__ import main
    main([])"""
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert (
    result.stderr.strip() == "error: this times a GPU, and the backend is 'cpu'"
    and result.returncode == 1
  )


def with_workdir(module, arguments):
  """Returns the command with the workdir that it writes to by default."""
  config = "--config=configs/tiny.py"
  if (module, arguments) == ("diffjax.train", [config]):
    return (module, config, "--workdir=runs/tiny")
  return (module, *arguments)


@pytest.mark.longest
@pytest.mark.full
@pytest.mark.usefixtures("optimised", "system_allocator")
def test_documented_commands_on_tiny(tmp_path):
  """Runs the README's training command, and all that pages do with its run.

  Only the workdir is another one, and a benchmark reads fewer rows. Each command
  and each block of code runs in a process of its own, as a user starts it.
  """
  texts = [page.read_text() for page in DOCUMENTATION]
  documented = dict.fromkeys(
    with_workdir(module, arguments)
    for text in texts
    for module, arguments in commands(text)
  )
  on_tiny = [
    command
    for command in documented
    if set(re.findall(r"runs/\w+", " ".join(command))) == {"runs/tiny"}
  ]
  assert on_tiny[0][0] == "diffjax.train"
  programs = [
    ["-m", *command]
    for command in [
      *on_tiny,
      ("diffjax.evaluate", "--suite=validation", "--workdir=runs/tiny"),
    ]
  ]
  for program in programs:
    if "benchmarks.int8_cache" in program:
      program.append("--rows=32")  # of 256, which would take minutes
  programs += [
    ["-c", block]
    for text in texts
    for block in python_blocks(text)
    if "runs/tiny" in block
  ]
  outputs = {}
  for option, program, *arguments in programs:
    arguments = [
      re.sub(r"runs/tiny|exported", rf"{tmp_path}/\g<0>", argument)
      for argument in (program, *arguments)
    ]
    result = subprocess.run(
      [sys.executable, option, *arguments],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=1800,
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr, (
      result.stderr
    )
    assert (
      program == "diffjax.train" or "warning" not in result.stderr.lower()
    ), result.stderr
    outputs[program if option == "-m" else "code"] = result.stdout
  assert {"train", "checkpoints", "generate", "convert", "evaluate"} <= {
    name.partition(".")[2] for name in outputs
  }
  run, last = tmp_path / "runs/tiny", {}
  for entry in (run / "metrics.jsonl").read_text().splitlines():
    last |= json.loads(entry)
  assert last["validation/bits_per_byte"] < 2.2
  assert (
    last["validation/bits_per_byte"] < last["validation/trigram_bits_per_byte"]
  )
  assert (
    (run / "loss.png").exists()
    and (run / "sample.txt").exists()
    and (run / "checkpoints" / "600").exists()
  )
  assert "600" in outputs["diffjax.checkpoints"] and outputs[
    "diffjax.generate"
  ].startswith("def main(")
  assert (tmp_path / "exported" / "model.safetensors").exists() and (
    run / "evals" / "validation.json"
  ).exists()
  assert outputs["code"].count("def ") >= 1


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
  """The full measurements are in docs/reliability.md. Seed 142 kills it once while it starts again."""
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
  """`python -m benchmarks.interrupt` does 50, of which each must end within two seconds; a busy machine has longer here."""
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
  """With one layer of tiny's, whose arrays are as large as those of all; the full measurements are in docs/reliability.md."""
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
