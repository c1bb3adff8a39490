"""Commands work in a locale whose encoding is ASCII.

Files are UTF-8 in every locale, and characters that a terminal cannot show are
escaped.
"""

import ast
import os
import subprocess
import sys

import pytest

from tests.harness import ROOT

# Functions that open files as text if their mode has no "b".
OPENERS = ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile")
# Functions with the name of an opener that never return text, or only if asked.
OPENERS_OF_BYTES = ("os.open", "gzip.open", "lzma.open", "tensorstore.open")


def opens_text(call: ast.Call) -> bool:
  """Returns whether a call opens a file as text."""
  function = ast.unparse(call.func)
  owner, _, name = function.rpartition(".")
  if name in ("read_text", "write_text"):
    return True
  if name not in OPENERS or function in OPENERS_OF_BYTES:
    return False

  mode = "r"
  # The mode of open(file, mode) and os.fdopen(number, mode).
  position = 1
  if name.endswith("TemporaryFile"):
    mode = "w+b"
    position = 0
  elif owner and name == "open":
    # The mode of path.open(mode).
    position = 0

  for keyword in call.keywords:
    if keyword.arg == "mode":
      mode = ast.unparse(keyword.value)
  if len(call.args) > position:
    mode = ast.unparse(call.args[position])
  return "b" not in mode


@pytest.mark.parametrize(
  "folder",
  ["diffjax", "experiments", "benchmarks", "configs", "recipes", "tools"],
)
def test_text_files_are_opened_as_utf8(folder):
  """Without an argument `encoding`, the locale would choose the encoding."""
  for path in sorted((ROOT / folder).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Call) and opens_text(node):
        arguments = {keyword.arg for keyword in node.keywords}
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        assert "encoding" in arguments, f'{place}: add encoding="utf-8"'


@pytest.mark.parametrize(
  ("code", "is_text"),
  [
    pytest.param("open(p)", True),
    pytest.param("open(p, 'rb')", False),
    pytest.param("p.open()", True),
    pytest.param("p.open('wb')", False),
    pytest.param("p.open(mode='rb')", False),
    pytest.param("p.read_text()", True),
    pytest.param("p.read_bytes()", False),
    pytest.param("os.open(p, 1)", False),
    pytest.param("os.fdopen(1, 'w')", True),
    pytest.param("tempfile.TemporaryFile()", False),
    pytest.param("tempfile.NamedTemporaryFile('w')", True),
  ],
)
def test_calls_that_open_text_are_recognized(code, is_text):
  """A file that is opened as text needs an encoding, and one of bytes none."""
  call = ast.parse(code, mode="eval").body

  assert opens_text(call) == is_text


def run_python(*arguments: str) -> subprocess.CompletedProcess[bytes]:
  """Runs Python in a locale whose encoding is ASCII."""
  environment = {
    **os.environ,
    "LC_ALL": "C",
    # Python would use UTF-8 in this locale.
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
  }
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=ROOT,
    env=environment,
    capture_output=True,
  )


PRINT_LAMBDA = r"""
from diffjax.cli import command
command.run(lambda: print('\u03bb'), with_config=False)
"""


def test_characters_that_a_terminal_cannot_show_are_escaped():
  """The locale has the encoding ASCII, so λ is printed as its code point."""
  result = run_python("-c", PRINT_LAMBDA)

  assert result.returncode == 0, result.stderr
  assert result.stdout == rb"\u03bb" + b"\n"
  assert result.stderr == b""


def test_arguments_that_the_locale_cannot_decode_are_rejected(tmp_path):
  result = run_python(
    "-m", "diffjax.generate", f"--workdir={tmp_path}", "--prompt=λ"
  )

  assert result.returncode == 2
  [line] = result.stderr.splitlines()
  # λ is two bytes, ce and bb. Python keeps each of them as a surrogate.
  assert rb"--prompt=\udcce\udcbb: this locale's encoding is ascii" in line
  assert b"PYTHONUTF8=1" in line


CONFIG = """# λ
from diffjax.configs import tiny

def get_config():
  config = tiny.get_config()
  config.model.update(
    num_layers=1,
    embed_dim=16,
    ffn_dim=32,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
  )
  config.data.update(
    source="text:DIRECTORY/*.txt",
    length=64,
    validation_fraction=0.3,
  )
  config.train.update(
    steps=2,
    batch_size=2,
    checkpoint_interval=1,
    sample_prompt="λé",
    sample_tokens=5,
  )
  config.eval.update(interval=2, rows=2)
  return config
"""


@pytest.mark.full
def test_a_run_with_other_characters_is_written_and_read(tmp_path):
  """Text, names of files, the config and the prompt are not all ASCII."""
  for index in range(40):
    text = f"naïve café {index} λ 😀 " * 40
    (tmp_path / f"{index}é.txt").write_text(text, encoding="utf-8")
  config = CONFIG.replace("DIRECTORY", str(tmp_path))
  (tmp_path / "config.py").write_text(config, encoding="utf-8")

  training = run_python(
    "-m",
    "diffjax.train",
    f"--config={tmp_path}/config.py",
    f"--workdir={tmp_path}/run",
  )
  evaluation = run_python(
    "-m",
    "diffjax.evaluate",
    f"--workdir={tmp_path}/run",
    "--suite=validation",
    f"--out={tmp_path}/out",
  )

  assert training.returncode == 0, training.stderr
  assert training.stdout.isascii()
  assert rb"\u03bb\xe9" in training.stdout
  # The sample begins with the prompt of the config.
  sample = (tmp_path / "run/sample.txt").read_text(encoding="utf-8")
  assert sample.startswith("λé")
  assert evaluation.returncode == 0, evaluation.stderr
