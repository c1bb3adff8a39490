"""Config files: errors of the user's Python in one line, and TOML."""

import dataclasses
import pathlib
import re
import subprocess
import typing

import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax.cli import config_file
from diffjax.config import (
  Config,
  DataConfig,
  ModelConfig,
  UserError,
  field_info,
  from_config_dict,
)
from diffjax.configs import tiny
from tests.harness import ROOT, in_process

WITHOUT_VARIANTS = """
from diffjax.configs import tiny

def get_config():
  return tiny.get_config()
"""


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
  """Runs the training command, which must end before it trains."""
  return in_process.call("diffjax.train", *arguments)


def error_line(*arguments: str) -> str:
  """Returns the only line that a command with wrong flags prints."""
  result = train(*arguments)
  assert result.returncode == 2
  assert not result.stdout
  [line] = result.stderr.splitlines()
  return line


NAME_ERROR = """
from diffjax.configs import tiny

def get_config():
  return tiny.get_confg()
"""
WRONG_CALL = """
from diffjax.configs import tiny

def get_config():
  config = tiny.get_config()
  config.train.update(1, 2)
"""


@pytest.mark.parametrize(
  ("text", "message"),
  [
    pytest.param(
      "import diffjax.configs\n\ndef get_config(:\n  pass\n",
      "{file}:3: SyntaxError: ",
      id="syntax",
    ),
    pytest.param(
      "import no_such_module\n",
      "{file}:1: ModuleNotFoundError: No module named 'no_such_module'",
      id="import",
    ),
    pytest.param(
      NAME_ERROR,
      "{file}:5: AttributeError: module 'diffjax.configs.tiny' has no",
      id="name",
    ),
    pytest.param(WRONG_CALL, "{file}:6: TypeError: ", id="call of a library"),
    pytest.param(
      "def get_config():\n  return {}['x']\n", "{file}:2: KeyError: x", id="key"
    ),
    pytest.param(
      "def get_config():\n  raise ValueError('one\\n two')\n",
      "{file}:2: ValueError: one two",
      id="message of two lines",
    ),
    pytest.param(
      "def get_config():\n  return open('/nowhere/x')\n",
      "{file}:2: FileNotFoundError: [Errno 2] No such file or directory:"
      " '/nowhere/x'",
      id="file",
    ),
    pytest.param("\x00", "{file}", id="not text"),
  ],
)
def test_an_error_in_the_users_file_is_one_line(tmp_path, text, message):
  """--config=FILE executes a Python file. Users see no traceback."""
  file = tmp_path / "mine.py"
  file.write_text(text)

  line = error_line(f"--config={file}", "--workdir=x")

  assert line.startswith(f"error: {message.format(file=file)}")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    pytest.param("config = 3\n", "{file} has no get_config(): ", id="none"),
    pytest.param(
      "def get_config():\n  pass\n",
      "{file}: get_config() returned None: did you forget a return?",
      id="no return",
    ),
    pytest.param(
      "def get_config():\n  return 3\n",
      "{file}: get_config() returned int: it must return a ConfigDict",
      id="another type",
    ),
    pytest.param(
      "def get_config(variant):\n  pass\n",
      "{file}: get_config: it needs a variant; pass --config={file}:VARIANT",
      id="missing variant",
    ),
  ],
)
def test_the_error_for_a_wrong_get_config_says_what_is_wrong(
  tmp_path, text, message
):
  """A config is a Python file with a function get_config()."""
  file = tmp_path / "mine.py"
  file.write_text(text)

  line = error_line(f"--config={file}", "--workdir=x")

  assert line.startswith(f"error: {message.format(file=file)}")


def test_an_error_in_an_imported_file_names_that_file(tmp_path, monkeypatch):
  """The user's file imports another one, whose second line divides by 0."""
  (tmp_path / "mine_too.py").write_text("\nx = 1 / 0\n")
  (tmp_path / "mine.py").write_text("import mine_too\n")
  monkeypatch.syspath_prepend(str(tmp_path))

  line = error_line(f"--config={tmp_path}/mine.py")

  assert line == (
    f"error: {tmp_path}/mine_too.py:2: ZeroDivisionError: division by zero"
  )


@pytest.mark.parametrize(
  ("value", "name"),
  [
    pytest.param("", "", id="nothing"),
    pytest.param("nope", "nope", id="unknown name"),
    pytest.param("nope:diff", "nope", id="unknown name with a variant"),
    pytest.param("tiny.py", "tiny.py", id="file without its folder"),
    pytest.param("none.toml", "none.toml", id="missing TOML file"),
  ],
)
def test_the_error_for_a_missing_config_lists_the_configs(value, name):
  line = error_line(f"--config={value}")

  assert line.startswith(
    f"error: --config={name}: no such config or file; the configs are base,"
    " diff_125m, "
  )


def test_the_error_for_the_folder_of_configs_lists_its_files():
  line = error_line("--config=configs")

  assert line.startswith(
    "error: --config=configs: that is a directory; name a file in it:"
    " configs/base.py, "
  )


def test_the_error_for_a_workdir_names_its_config_file(tmp_path):
  (tmp_path / "config.toml").write_text("")

  line = error_line(f"--config={tmp_path}")

  assert line.startswith(
    f"error: --config={tmp_path}: that is a directory; name a file in it:"
    f" {tmp_path}/config.toml"
  )


def test_the_error_for_an_empty_directory_lists_the_configs(tmp_path):
  line = error_line(f"--config={tmp_path}")

  assert line.startswith(
    f"error: --config={tmp_path}: that is a directory; name a file; the"
    " configs are base, "
  )


def test_a_file_that_is_not_toml_is_an_error(tmp_path):
  file = tmp_path / "mine.toml"
  file.write_text("[model\n")

  line = error_line(f"--config={file}")

  assert line.startswith(f"error: --config={file}: not TOML: ")


def test_a_misspelled_field_of_a_toml_file_is_an_error(tmp_path):
  file = tmp_path / "mine.toml"
  file.write_text("[train]\nstepz = 3\n")

  line = error_line(f"--config={file}")

  assert line.startswith(
    f"error: --config={file}: config.train.stepz is not a config field:"
    " did you mean train.steps?"
  )


def test_a_variant_of_a_toml_file_is_an_error(tmp_path):
  """A variant is passed as FILE:VARIANT. Only Python files have variants."""
  file = tmp_path / "mine.toml"
  file.write_text("")

  line = error_line(f"--config={file}:diff")

  assert line.startswith(
    f"error: --config={file}:diff: a TOML file has no variants; pass --config="
  )


def test_a_file_without_variants_says_so(tmp_path):
  """A variant is passed as FILE:VARIANT. This get_config has no argument."""
  file = tmp_path / "no_variant.py"
  file.write_text(WITHOUT_VARIANTS)

  line = error_line(f"--config={file}:diff")

  assert line == (
    f"error: {file}: get_config: it takes no variant; pass --config={file}"
  )


def test_an_error_in_a_config_of_the_package_names_its_line(tmp_path):
  """Users edit these files too, although they lie in the package."""
  file = tmp_path / "mine.py"
  # The call of `base` fails inside base.py, since None has no model.
  file.write_text(
    "from diffjax.configs import base\n\n"
    "def get_config():\n  base.with_heads(None, 1)\n"
  )

  line = error_line(f"--config={file}")

  assert line.startswith(f"error: {ROOT}/diffjax/configs/base.py:")
  assert "AttributeError" in line


@pytest.mark.parametrize("variant", ["diff", "transformer"])
def test_a_config_of_the_package_is_read_by_its_name(
  tmp_path, monkeypatch, variant
):
  """The current directory has no file of that name."""
  monkeypatch.chdir(tmp_path)

  values = config_file.read(f"tiny:{variant}")

  expected = from_config_dict(tiny.get_config(variant))
  assert from_config_dict(values) == expected


def test_a_file_does_not_replace_the_config_of_its_name(tmp_path, monkeypatch):
  """The name of a config of the package never means a file of the user."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tiny").write_text("")

  values = config_file.read("tiny")

  assert from_config_dict(values) == from_config_dict(tiny.get_config())


def test_a_file_with_the_name_of_a_config_needs_a_path(tmp_path, monkeypatch):
  """The file is empty, so reading it is an error that names it."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tiny").write_text("")

  with pytest.raises(UserError, match=r"\./tiny has no get_config\(\)"):
    config_file.read("./tiny")


def test_a_file_in_the_current_directory_may_have_any_other_name(
  tmp_path, monkeypatch
):
  """There is no config "mine" in the package, so this is the user's file."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine").write_text("from diffjax.configs.tiny import get_config")

  values = config_file.read("mine")

  assert from_config_dict(values) == from_config_dict(tiny.get_config())


@pytest.mark.parametrize("name", ["motif_2_6b", "configs/motif_2_6b.py"])
def test_a_config_without_variants_says_so(name, monkeypatch):
  """A variant is passed as NAME:VARIANT. This config has none."""
  monkeypatch.chdir(ROOT)

  message = f"{name}: get_config: it takes no variant; pass --config={name}"
  with pytest.raises(UserError, match=f"^{message}$"):
    config_file.read(f"{name}:diff")


def test_the_names_of_the_configs_are_those_of_the_files_in_order():
  files = (ROOT / "configs").glob("*.py")
  expected = {file.stem for file in files} - {"__init__"}

  assert config_file.names() == sorted(expected)


@pytest.mark.parametrize(
  ("spec", "name"),
  [
    ("tiny", "tiny"),
    ("configs/diff_1b.py", "diff_1b"),
    ("configs/diff_1b.py:transformer", "diff_1b_transformer"),
    ("diff_1b:diff_v2,heads=4", "diff_1b_diff_v2_heads_4"),
    ("my/scaling.py:diff,size=0.4m", "scaling_diff_size_0.4m"),
    ("tiny:a-b é/../c", "tiny_a-b___.._c"),
    ("tiny:", "tiny"),
    ("experiments/scaling/config.py:diff", "scaling_diff"),
    ("config.py", "config"),
    ("../config.py", "config"),
    ("runs/x/config.toml", None),
    ("gs://bucket/config.toml", None),
  ],
)
def test_a_run_is_named_after_its_config_and_variant(spec, name):
  """`spec` is the value of --config. A saved config.toml gives no name."""
  assert config_file.run_name(spec) == name


@pytest.fixture
def printed_config(tmp_path):
  """The file that --print_config prints for a variant with overrides."""
  result = train(
    "--config=configs/tiny.py:transformer",
    "--config.train.steps=7",
    "--config.model.window=9",
    "--print_config",
  )
  assert result.returncode == 0
  assert not result.stderr
  file = tmp_path / "mine.toml"
  file.write_text(result.stdout)
  return file


def test_a_printed_config_holds_the_variant_and_the_overrides(printed_config):
  """`printed_config` is a file that was printed with these two changes."""
  values = config_file.read(str(printed_config))

  expected = tiny.get_config("transformer")
  expected.train.steps = 7
  expected.model.window = 9
  assert from_config_dict(values) == from_config_dict(expected)


def test_a_printed_config_is_printed_again_without_a_change(printed_config):
  """A file in the printed format is read, and printed in the same format."""
  result = train(f"--config={printed_config}", "--print_config")

  assert result.stdout == printed_config.read_text()


def test_a_printed_config_can_be_overridden(printed_config):
  """The printed file has `steps = 7`."""
  result = train(
    f"--config={printed_config}", "--config.train.steps=8", "--print_config"
  )

  assert "steps = 8\n" in result.stdout


def section_text(text: str, name: str) -> str:
  """Returns the lines of a TOML text below [name], up to the next section."""
  _, _, following_text = text.partition(f"[{name}]\n")
  return re.split(r"^\[", following_text, maxsplit=1, flags=re.MULTILINE)[0]


def test_a_printed_config_has_all_fields_with_comments(printed_config):
  """A section such as [model] has its fields in order, each below a comment.

  The line of a field without a value is commented out: "# window = 9".
  """
  comment_and_field = re.compile(r"^# .+\n(?:# )?(\w+) = ", re.MULTILINE)
  for section in dataclasses.fields(Config):
    text = section_text(printed_config.read_text(), section.name)

    commented_names = comment_and_field.findall(text)

    fields = dataclasses.fields(section.default)
    assert commented_names == [field.name for field in fields]


def test_the_lines_of_a_printed_config_are_short(printed_config):
  for line in printed_config.read_text().splitlines():
    assert len(line) <= 100


def comments(file: pathlib.Path) -> str:
  """Returns the lines of a printed config as one line, without their "# ".

  A comment may continue on the next line.
  """
  lines = file.read_text().splitlines()
  return " ".join(line.removeprefix("# ") for line in lines)


def test_the_comments_explain_the_fields_and_their_bounds(printed_config):
  text = comments(printed_config)

  assert "H: heads that write to the residual stream" in text
  assert "Number of steps that are profiled. It must be at least 1." in text


def test_the_comments_name_all_choices(printed_config):
  """For example, the mode of reading data is "prepared" or "streamed"."""
  choices = []
  for section in dataclasses.fields(Config):
    for field in dataclasses.fields(section.default):
      bound = field_info(field).bound
      if bound is not None:
        choices.extend(bound.choices)

  text = comments(printed_config)

  assert choices
  for choice in choices:
    assert choice in text


def test_a_field_that_may_be_none_has_the_default_none():
  """TOML has no None, so such a field is left out and read as its default."""
  for section in dataclasses.fields(Config):
    types_by_name = typing.get_type_hints(type(section.default))
    for field in dataclasses.fields(section.default):
      if type(None) in typing.get_args(types_by_name[field.name]):
        assert field.default is None, (section.name, field.name)


def can_be_decoded(text: str) -> bool:
  """Returns True if UTF-8 with surrogates for odd bytes can hold the text."""
  for character in text:
    if "\ud800" <= character < "\udc80" or "\udcff" < character <= "\udfff":
      return False
  return True


# Also text that no encoding has: Python keeps a path's odd bytes as surrogates.
encodable_texts = st.text(st.characters(codec=None), max_size=9).filter(
  can_be_decoded
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
  # Such as text with quotation marks.
  source=encodable_texts,
  lambda_init=st.floats(allow_nan=False, allow_infinity=False),
  timeout=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
  causal=st.booleans(),
)
def test_a_written_config_is_read_exactly(
  tmp_path_factory, source, lambda_init, timeout, causal
):
  """Hypothesis draws texts, numbers and booleans for four of the fields."""
  config = Config(
    model=ModelConfig(lambda_init=lambda_init, causal=causal),
    data=DataConfig(source=source, timeout=timeout),
  )
  path = tmp_path_factory.getbasetemp() / "config.toml"

  config_file.write(epath.Path(path), config)
  values = config_file.read(str(path))

  assert from_config_dict(values) == config


def test_a_failed_write_is_one_line_and_leaves_no_file(tmp_path):
  """A config is written to a temporary file, which then gets its name."""
  target = tmp_path / "config.toml"
  # A file cannot take the name of a directory that is not empty.
  target.mkdir()
  (target / "file").touch()

  with pytest.raises(UserError, match=f"^cannot write {target}: "):
    config_file.write(epath.Path(target), Config())

  assert list(tmp_path.iterdir()) == [target]


def test_nothing_of_a_toml_file_is_executed(tmp_path):
  """A config.toml may come from others. Python in it must not run."""
  file = tmp_path / "config.toml"
  file.write_text("import os\nos.abort()\n")

  with pytest.raises(UserError, match="not TOML"):
    config_file.read(str(file))
