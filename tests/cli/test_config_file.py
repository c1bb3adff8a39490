"""Config files: errors in the user's own Python in one line, and TOML, which holds a whole config."""

import dataclasses
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax.cli import config_file
from diffjax.config import Config, UserError, field_info, from_config_dict
from diffjax.configs import tiny
from tests import in_process
from tests.conftest import ROOT

SECTIONS = {
  section.name: type(section.default) for section in dataclasses.fields(Config)
}
FIELDS = [
  (section, field)
  for section, cls in SECTIONS.items()
  for field in dataclasses.fields(cls)
]


def train(*arguments):
  return in_process.call("diffjax.train", *arguments)


@pytest.mark.parametrize(
  "text, message",
  [
    (
      "import diffjax.configs\n\ndef get_config(:\n  pass\n",
      "{file}:3: SyntaxError: ",
    ),
    (
      "import no_such_module\n",
      "{file}:1: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    (
      "from diffjax.configs import tiny\n\ndef get_config():\n  return tiny.get_confg()\n",
      "{file}:4: AttributeError: module 'diffjax.configs.tiny' has no",
    ),
    (
      "from diffjax.configs import tiny\ndef get_config():\n  config = tiny.get_config()\n  config.train.update(1, 2)\n",
      "{file}:4: TypeError: ",
    ),
    ("def get_config():\n  return {}['x']\n", "{file}:2: KeyError: x"),
    (
      "def get_config():\n  raise ValueError('one\\n two')\n",
      "{file}:2: ValueError: one two",
    ),
    (
      "def get_config():\n  return open('/nowhere/x')\n",
      "{file}:2: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'",
    ),
    ("config = 3\n", "{file} has no get_config(): "),
    (
      "def get_config():\n  pass\n",
      "{file}: get_config() returned None: did you forget a return?",
    ),
    (
      "def get_config():\n  return 3\n",
      "{file}: get_config() returned int: it must return a ConfigDict",
    ),
    (
      "def get_config(variant):\n  pass\n",
      "{file}: get_config: it needs a variant; pass --config={file}:VARIANT",
    ),
    ("\x00", "{file}"),
  ],
)
def test_an_error_in_the_users_file_is_one_line(tmp_path, text, message):
  file = tmp_path / "mine.py"
  file.write_text(text)
  result = train(f"--config={file}", "--workdir=x")
  [line] = result.stderr.splitlines()
  assert result.returncode == 2 and line.startswith(
    f"error: {message.format(file=file)}"
  ), line


def test_an_error_in_a_file_that_the_users_file_imports_is_told_of_that_file(
  tmp_path, monkeypatch
):
  (tmp_path / "mine_too.py").write_text("\nx = 1 / 0\n")
  (tmp_path / "mine.py").write_text("import mine_too\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  [line] = train(f"--config={tmp_path / 'mine.py'}").stderr.splitlines()
  assert (
    line
    == f"error: {tmp_path / 'mine_too.py'}:2: ZeroDivisionError: division by zero"
  )


def test_what_is_no_config_file_is_said_to_be_what_it_is(tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "run").mkdir()
  (tmp_path / "run/config.toml").write_text("")
  (tmp_path / "no.toml").write_text("[model\n")
  (tmp_path / "wrong.toml").write_text("[train]\nstepz = 3\n")
  (tmp_path / "no_variant.py").write_text(
    "from diffjax.configs import tiny\ndef get_config():\n  return tiny.get_config()\n"
  )
  for value, message in (
    (
      "configs",
      "configs: that is a directory; name a file in it: configs/base.py, ",
    ),
    (
      tmp_path / "run",
      f"{tmp_path}/run: that is a directory; name a file in it: {tmp_path}/run/config.toml",
    ),
    (
      tmp_path / "empty",
      f"{tmp_path}/empty: that is a directory; name a file; the configs are base, ",
    ),
    (
      tmp_path / "none.toml",
      f"{tmp_path}/none.toml: no such config or file; the configs are base, ",
    ),
    (tmp_path / "no.toml", f"{tmp_path}/no.toml: not TOML: "),
    (
      tmp_path / "wrong.toml",
      f"{tmp_path}/wrong.toml: config.train.stepz is not a config field: did you mean train.steps?",
    ),
    (
      f"{tmp_path}/run/config.toml:diff",
      f"{tmp_path}/run/config.toml:diff: a TOML file has no variants; pass --config=",
    ),
    ("", ": no such config or file; the configs are base, "),
    ("nope", "nope: no such config or file; the configs are base, diff_125m, "),
    ("nope:diff", "nope: no such config or file; the configs are base, "),
    ("tiny.py", "tiny.py: no such config or file; the configs are base, "),
  ):
    result = train(f"--config={value}")
    [line] = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith(
      f"error: --config={message}"
    ), line
  [line] = train(f"--config={tmp_path}/no_variant.py:diff").stderr.splitlines()
  assert (
    line
    == f"error: {tmp_path}/no_variant.py: get_config: it takes no variant; pass --config={tmp_path}/no_variant.py"
  )


def test_an_error_in_a_config_of_the_package_is_told_of_its_line(tmp_path):
  """Users edit these files too, although they lie in the package."""
  file = tmp_path / "mine.py"
  file.write_text(
    "from diffjax.configs import base\n\n"
    "def get_config():\n  base.with_heads(None, 1)\n"
  )
  [line] = train(f"--config={file}").stderr.splitlines()
  assert line.startswith(f"error: {ROOT}/diffjax/configs/base.py:")
  assert "AttributeError" in line


def test_a_config_of_the_package_has_a_name(tmp_path, monkeypatch):
  """It works from any directory, also if a file there has the same name."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tiny").write_text("")
  expected = from_config_dict(tiny.get_config())
  assert from_config_dict(config_file.read("tiny")) == expected
  with pytest.raises(UserError, match=r"\./tiny has no get_config\(\)"):
    config_file.read("./tiny")
  expected = from_config_dict(tiny.get_config("transformer"))
  assert from_config_dict(config_file.read("tiny:transformer")) == expected


def test_a_file_here_may_have_any_other_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine").write_text("from diffjax.configs.tiny import get_config")
  expected = from_config_dict(tiny.get_config())
  assert from_config_dict(config_file.read("mine")) == expected


@pytest.mark.parametrize("name", ["motif_2_6b", "configs/motif_2_6b.py"])
def test_a_config_without_variants_says_so(name, monkeypatch):
  monkeypatch.chdir(ROOT)
  message = f"{name}: get_config: it takes no variant; pass --config={name}"
  with pytest.raises(UserError, match=f"^{message}$"):
    config_file.read(f"{name}:diff")


def test_the_names_of_the_configs():
  files = (ROOT / "configs").glob("*.py")
  names = {file.stem for file in files} - {"__init__"}
  assert set(config_file.names()) == names
  assert config_file.names() == sorted(names)


@pytest.mark.parametrize(
  "spec, name",
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
def test_the_name_of_a_run(spec, name):
  assert config_file.run_name(spec) == name


def test_the_printed_config_is_whole_and_can_be_passed_back_in(tmp_path):
  """Variants and overrides are in it. Every field has its comment, and the bounds and choices that it was declared with."""
  printed = train(
    "--config=configs/tiny.py:transformer",
    "--config.train.steps=7",
    "--config.model.window=9",
    "--print_config",
  )
  assert printed.returncode == 0 and not printed.stderr
  file = tmp_path / "mine.toml"
  file.write_text(printed.stdout)
  again = train(f"--config={file}", "--print_config")
  assert again.stdout == printed.stdout
  expected = from_config_dict(tiny.get_config("transformer"))
  expected = dataclasses.replace(
    expected,
    model=dataclasses.replace(expected.model, window=9),
    train=dataclasses.replace(expected.train, steps=7),
  )
  assert from_config_dict(config_file.read(str(file))) == expected
  assert (
    "steps = 8\n"
    in train(
      f"--config={file}", "--config.train.steps=8", "--print_config"
    ).stdout
  )
  lines = printed.stdout.splitlines()
  assert max(map(len, lines)) <= 100
  for section, field in FIELDS:
    place = next(
      index
      for index, line in enumerate(lines)
      if line.removeprefix("# ").startswith(f"{field.name} = ")
    )
    assert lines[place - 1].startswith("# "), (section, field.name)
  text = " ".join(line.removeprefix("# ") for line in lines)
  assert (
    "H: heads that write to the residual stream" in text
    and "It must be at least 1." in text
    and "Cut to" not in text
  )
  for _, field in FIELDS:
    assert (bound := field_info(field).bound) is None or all(
      choice in text for choice in bound.choices
    )
  assert from_config_dict(config_file.read(str(file))).train.steps == 7


def test_a_field_that_may_be_none_is_none_where_it_is_left_out():
  """TOML has no None: such a field is left out of the file, and read as its default."""
  for section, field in FIELDS:
    if type(None) in typing.get_args(
      typing.get_type_hints(SECTIONS[section])[field.name]
    ):
      assert field.default is None, (section, field.name)


texts = st.text(
  st.characters(codec=None), max_size=9
)  # also what no encoding has: Python keeps a path's odd bytes as surrogates
floats = st.floats(allow_nan=False, allow_infinity=False)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
  texts.filter(
    lambda text: (
      not any("\ud800" <= each < "\udc80" or each > "\udcff" for each in text)
    )
  ),
  floats,
  st.booleans(),
)
def test_every_value_comes_back_exactly(tmp_path_factory, text, number, flag):
  path = tmp_path_factory.getbasetemp() / "config.toml"
  config = Config()
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, lambda_init=number, causal=flag),
    data=dataclasses.replace(
      config.data, source=text, timeout=abs(number) or 1.0
    ),
  )
  from etils import epath

  config_file.write(epath.Path(path), config)
  assert from_config_dict(config_file.read(str(path))) == config


def test_nothing_of_a_toml_file_is_executed(tmp_path):
  (tmp_path / "config.toml").write_text("import os\nos.abort()\n")
  with pytest.raises(UserError, match="not TOML"):
    config_file.read(str(tmp_path / "config.toml"))
