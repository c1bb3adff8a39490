"""Fields, settings and files that pages name in backticks exist."""

import re

import pytest

from diffjax.config import Config
from diffjax.evals import SUITES
from diffjax.evals.suite import suite_class
from docs.checks.checked_pages import every_page
from tests.harness import ROOT, own_variants
from tests.harness.pages import inline_code

SECTIONS = Config().to_dict()
# `train.steps`, `config.train.steps` or `--config.train.steps=3`.
FIELD = re.compile(
  rf"(?:--)?(?:config\.)?(?P<section>{'|'.join(SECTIONS)})"
  r"\.(?P<field>\w+)(?:=.*)?"
)
# `--set.needle.lengths=512`.
SETTING = re.compile(r"--set\.(?P<suite>\w+)\.(?P<setting>\w+)")
FOLDERS = (
  "benchmarks",
  "configs",
  "diffjax",
  "docs",
  "experiments",
  "notebooks",
  "recipes",
  "tests",
  "tools",
)
FILE = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*")


def field_errors(text: str) -> list[str]:
  """Returns fields of a page, such as train.step, that the config lacks."""
  errors = []
  for code in inline_code(text):
    match = FIELD.fullmatch(code)
    if match is None:
      continue
    # `data.py` is a file.
    is_file = match["field"] == "py"
    if not is_file and match["field"] not in SECTIONS[match["section"]]:
      errors.append(f"{code}: no such field")
  return errors


def setting_errors(text: str) -> list[str]:
  """Returns settings of a page, such as --set.needle.x, that no suite has."""
  errors = []
  for code in inline_code(text):
    match = SETTING.match(code)
    if match is None:
      continue
    is_known = False
    if match["suite"] in SUITES:
      suite = suite_class(match["suite"])()
      is_known = hasattr(suite, match["setting"])
    if not is_known:
      errors.append(f"{code}: no such setting")
  return errors


def file_errors(text: str) -> list[str]:
  """Returns the files and folders of a page that do not exist."""
  errors = []
  for code in inline_code(text):
    if FILE.fullmatch(code) and not (ROOT / code).exists():
      errors.append(f"{code}: no such file")
  return errors


@every_page
def test_fields_exist(page):
  assert field_errors(page.read_text()) == []


@every_page
def test_settings_exist(page, tmp_path):
  # Pages have settings of the suites that they define.
  with own_variants.registered(tmp_path):
    assert setting_errors(page.read_text()) == []


@every_page
def test_files_exist(page):
  assert file_errors(page.read_text()) == []


@pytest.mark.parametrize("code", ["train.step", "--config.train.step=3"])
def test_an_unknown_field_is_reported(code):
  text = f"set `{code}` or `--config.train.steps=3`"
  assert field_errors(text) == [f"{code}: no such field"]


def test_an_unknown_setting_is_reported():
  errors = setting_errors("`--set.needle.length=3` or `--set.needle.lengths=3`")
  assert errors == ["--set.needle.length=3: no such setting"]


def test_a_missing_file_is_reported():
  errors = file_errors("see `diffjax/trian.py` and `diffjax/train.py`")
  assert errors == ["diffjax/trian.py: no such file"]
