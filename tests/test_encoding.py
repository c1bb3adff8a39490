"""Commands do the same in every locale: files are UTF-8, and what a terminal cannot show is escaped."""

import ast
import os
import subprocess
import sys

import pytest

from tests.harness import ROOT


def opened_as_text(call: ast.Call) -> bool:
  """True for a call that opens a file as text."""
  function = call.func
  name = (
    function.attr
    if isinstance(function, ast.Attribute)
    else getattr(function, "id", "")
  )
  if name in ("read_text", "write_text"):
    return True
  if name not in ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile"):
    return False
  module = (
    function.value.id
    if isinstance(function, ast.Attribute)
    and isinstance(function.value, ast.Name)
    else ""
  )
  if (module, name) in (
    ("os", "open"),
    ("gzip", "open"),
    ("lzma", "open"),
    ("tensorstore", "open"),
  ):
    return False
  method = isinstance(function, ast.Attribute) and name == "open"
  modes = [
    *call.args[0 if method or "Temporary" in name else 1 :][:1],
    *(keyword.value for keyword in call.keywords if keyword.arg == "mode"),
  ]
  mode = (
    modes[0].value
    if modes and isinstance(modes[0], ast.Constant)
    else "w+b"
    if "Temporary" in name
    else "r"
  )
  return "b" not in str(mode)


@pytest.mark.parametrize(
  "room",
  ["diffjax", "experiments", "benchmarks", "configs", "recipes", "tools"],
)
def test_text_files_are_opened_as_utf8(room):
  wrong = []
  for path in sorted((ROOT / room).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if (
        isinstance(node, ast.Call)
        and opened_as_text(node)
        and all(keyword.arg != "encoding" for keyword in node.keywords)
      ):
        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
  assert not wrong, f'without encoding="utf-8": {", ".join(wrong)}'


def test_text_is_told_from_bytes():
  calls = "open(p) open(p,'rb') p.open() p.open('wb') p.open(mode='rb') p.read_text() p.read_bytes() os.open(p,1) os.fdopen(1,'w')"
  found = [
    opened_as_text(ast.parse(call).body[0].value) for call in calls.split()
  ]
  assert found == [True, False, True, False, False, True, False, False, True]


def python(*arguments):
  """A process in a locale whose encoding is ASCII."""
  environment = os.environ | {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
  }  # Python does nothing to escape it
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    cwd=ROOT,
    env=environment,
    capture_output=True,
  )


def test_what_a_terminal_cannot_show_is_escaped():
  result = python(
    "-c",
    "from diffjax.cli import command; command.run(lambda: print('\\u03bb'), with_config=False)",
  )
  assert (result.returncode, result.stdout, result.stderr) == (
    0,
    b"\\u03bb\n",
    b"",
  )


def test_arguments_that_the_locale_spoils_are_refused(tmp_path):
  result = python(
    "-m", "diffjax.generate", f"--workdir={tmp_path}", "--prompt=λ"
  )
  assert result.returncode == 2 and result.stderr.count(b"\n") == 1
  assert (
    b"--prompt=\\udcce\\udcbb: this locale's encoding is ascii" in result.stderr
    and b"PYTHONUTF8=1" in result.stderr
  )


@pytest.mark.full
def test_a_run_in_an_ascii_locale(tmp_path):
  """Rows, checkpoints, metrics, plot and sample are written, and the run is read again."""
  for index in range(40):
    (tmp_path / f"{index}é.txt").write_bytes(
      f"naïve café {index} λ 😀 ".encode() * 40
    )
  (tmp_path / "config.py").write_bytes(
    f"""# λ
from diffjax.configs import tiny

def get_config():
  config = tiny.get_config()
  config.model.update(num_layers=1, embed_dim=16, ffn_dim=32, num_heads=1, num_kv_heads=1, head_dim=8)
  config.data.update(source="text:{tmp_path}/*.txt", length=64, validation_fraction=0.3)
  config.train.update(steps=2, batch_size=2, checkpoint_interval=1, sample_prompt="λé", sample_tokens=5)
  config.eval.update(interval=2, rows=2)
  return config
""".encode()
  )
  result = python(
    "-m",
    "diffjax.train",
    f"--config={tmp_path}/config.py",
    f"--workdir={tmp_path}/run",
  )
  assert result.returncode == 0, result.stderr
  assert b"\\u03bb\\xe9" in result.stdout and result.stdout.isascii()
  assert (
    (tmp_path / "run" / "sample.txt")
    .read_text(encoding="utf-8")
    .startswith("λé")
  )
  again = python(
    "-m",
    "diffjax.evaluate",
    f"--workdir={tmp_path}/run",
    "--suite=validation",
    f"--out={tmp_path}/out",
  )
  assert again.returncode == 0, again.stderr
