"""Commands as users type them: exit codes and one clear line for bad input; the README's commands as they stand there."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
  "args, code, message",
  [
    ([], 2, "error: pass --config=FILE"),
    (["--config=configs/nope.py"], 2, "error: --config: no such file; there are configs/base.py"),
    (
      ["--config=configs/tiny.py:v9"],
      2,
      "error: variant 'v9': there is no architecture 'v9'; variants are diff|transformer|diff_v2[,heads=NUMBER]",
    ),
    (
      ["--config=experiments/scaling/config.py:diff,size=9b"],
      2,
      "error: variant 'diff,size=9b': there is no size '9b'; variants are transformer|diff|diff_v2[,size=0.1m|",
    ),
    (
      ["--config=configs/tiny.py", "--config.train.stepz=3"],
      2,
      "error: config.train.stepz is not a config field: did you mean train.steps?",
    ),
    (["--config=configs/tiny.py", "--config.train.steps=x"], 2, "error: flag --config.train.steps=x: invalid literal"),
    (["--config=configs/tiny.py", "--workdirs=x"], 2, "error: Unknown command line flag 'workdirs'"),
    (["--config=configs/tiny.py", "x"], 2, "error: unexpected argument 'x'"),
    (["--config=configs/tiny.py"], 2, "error: pass --workdir=DIR"),
    (["--config=configs/tiny.py", "--config.model.num_kv_heads=3", "--workdir=x"], 1, "error: config.model.num_kv_heads = 3: must divide"),
    (
      ["--config=configs/tiny.py", "--config.model.attention_implementation=x", "--workdir=x"],
      1,
      "must be one of auto, reference, chunked",
    ),
    (["--config=configs/tiny.py", "--config.data.source=text:/nowhere/*", "--workdir=x"], 1, "/nowhere/*"),
    (["--config=configs/diff_1b.py", "--workdir=x"], 1, "cl100k_base"),
  ],
)
def test_bad_input_is_one_line(command, args, code, message):
  result = command("diffjax.train", *args)
  lines = result.stderr.strip().splitlines()
  assert result.returncode == code, result.stderr
  assert message in lines[-1]
  assert lines[-1].startswith("error: ")
  assert "Traceback" not in result.stderr


def test_help_names_the_flags(command):
  result = command("diffjax.train", "--help")
  assert "--config" in result.stdout and "--workdir" in result.stdout


def test_readme_module():
  """The README's DiffAttention in a user's own module runs as it stands there."""
  [code] = [code for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if "DiffAttention(" in code]
  names = {"__name__": "user"}
  exec(compile(code, "README.md", "exec", dont_inherit=True), names)
  assert names["y"].shape == (2, 128, 256)


def test_the_gpu_benchmark_needs_little():
  """A machine with a GPU may have JAX, flax and optax, and little else. What its processes do is imported here too."""
  absent = "ml_collections grain tensorboardX orbax tiktoken tokenizers matplotlib tensorflow_datasets array_record pyarrow zstandard"
  code = f"""if True:
    import sys
    sys.modules.update(dict.fromkeys({absent.split()}))
    import benchmarks.gpu.worker, benchmarks.gpu.checks, benchmarks.gpu.attention, benchmarks.gpu.decode, benchmarks.gpu.steps
    from benchmarks.gpu.__main__ import main
    main([])"""
  result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert result.stderr.strip() == "error: this times a GPU, and the backend is 'cpu'" and result.returncode == 1


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
def test_readme_tiny(tmp_path):
  """The README's training line as it stands there, but for where it writes: below 2.2 bits per byte and below a trigram model. Then what
  else the README does with that run, each command in a process of its own, as a user starts it."""
  lines = [line for line in (ROOT / "README.md").read_text().splitlines() if re.search(r"python -m diffjax\.\w+ .*runs/tiny\b", line)]
  commands = [shlex.split(re.sub(r"runs/tiny|exported", rf"{tmp_path}/\g<0>", line).split(" -m ")[1], comments=True) for line in lines]
  commands.append(["diffjax.evaluate", "--suite=validation", f"--workdir={tmp_path}/runs/tiny"])
  assert [command[0].partition(".")[2] for command in commands] == ["train", "checkpoints", "generate", "convert", "evaluate"]
  outputs = {}
  for module, *arguments in commands:
    result = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    assert module == "diffjax.train" or "warning" not in result.stderr.lower(), result.stderr
    outputs[module] = result.stdout
  run, last = tmp_path / "runs/tiny", {}
  for entry in (run / "metrics.jsonl").read_text().splitlines():
    last |= json.loads(entry)
  assert last["validation/bits_per_byte"] < 2.2
  assert last["validation/bits_per_byte"] < last["validation/trigram_bits_per_byte"]
  assert (run / "loss.png").exists() and (run / "sample.txt").exists() and (run / "checkpoints" / "600").exists()
  assert "600" in outputs["diffjax.checkpoints"] and outputs["diffjax.generate"].startswith("def main(")
  assert (tmp_path / "exported" / "model.safetensors").exists() and (run / "evals" / "validation.json").exists()


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
  "arguments", ["--times=3 --steps=120 --seed=142", "--times=2 --steps=80 --mode=streamed", "--times=1 --steps=60 --processes=2"]
)
def test_sigkill_at_random_moments_changes_nothing(arguments):
  """The full measurements are in the README. Seed 142 kills it once while it starts again."""
  result = subprocess.run(
    [sys.executable, "-m", "benchmarks.kill", *arguments.split()], cwd=ROOT, capture_output=True, text=True, timeout=1200
  )
  assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.full
def test_ctrl_c_at_random_moments_of_a_cold_start():
  """`python -m benchmarks.interrupt` does 50, of which each must end within two seconds; a busy machine has longer here."""
  arguments = ["--times=4", "--seed=1", "--limit=30"]
  result = subprocess.run(
    [sys.executable, "-m", "benchmarks.interrupt", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200
  )
  assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
def test_memory_does_not_grow():
  """With one layer of tiny's, whose arrays are as large as those of all; the full measurements are in the README."""
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
  result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200)
  assert result.returncode == 0, result.stdout + result.stderr
  assert "MiB until step 1200, ratio " in result.stdout
