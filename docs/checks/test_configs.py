"""A config file can be read alone, and its fields have documentation."""

import ast

import pytest

from diffjax.config import FIELDS
from tests.harness import ROOT

FILES = sorted((ROOT / "configs").glob("[!_]*.py"))
# Configs of the paper's models besides those named diff_*.
OTHER_PAPER_CONFIGS = ("math_stage1", "math_stage2")
# Fields that a reader of a config of the paper finds in its file.
STATED = {
  "model": {
    "vocab_size",
    "num_layers",
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_dim",
    "max_length",
  },
  "data": {"source", "tokenizer", "length"},
  "optimizer": {
    "learning_rate",
    "schedule",
    "warmup_steps",
    "b1",
    "b2",
    "weight_decay",
  },
  "train": {"steps", "batch_size"},
  "eval": {"interval", "rows"},
  "mesh": {"data", "fsdp"},
}


def is_paper_config(name: str) -> bool:
  return name.startswith("diff_") or name in OTHER_PAPER_CONFIGS


PAPER_FILES = [file for file in FILES if is_paper_config(file.stem)]


def stated_fields(tree: ast.Module) -> dict[str, set[str]]:
  """Returns the fields that calls of `config.SECTION.update` set."""
  stated: dict[str, set[str]] = {section: set() for section in STATED}
  for node in ast.walk(tree):
    if not isinstance(node, ast.Call):
      continue
    section, _, method = ast.unparse(node.func).rpartition(".")
    section = section.removeprefix("config.")
    if method == "update" and section in stated:
      stated[section] |= {str(keyword.arg) for keyword in node.keywords}
  return stated


def imported_configs(tree: ast.Module) -> set[str]:
  """Returns the names that a file imports from diffjax.configs."""
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module == "diffjax.configs":
      names |= {alias.name for alias in node.names}
  return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_imports_no_other_config(file):
  tree = ast.parse(file.read_text())
  assert imported_configs(tree) <= {"base"}


@pytest.mark.parametrize("file", PAPER_FILES, ids=lambda file: file.stem)
def test_a_config_of_the_paper_states_its_fields(file):
  stated = stated_fields(ast.parse(file.read_text()))
  for section, fields in STATED.items():
    assert fields <= stated[section], section


@pytest.mark.parametrize("name", FIELDS)
def test_the_documentation_of_a_field_is_whole_sentences_on_one_line(name):
  text = FIELDS[name].documentation
  assert text.endswith((".", "…"))
  assert text == " ".join(text.split())


@pytest.mark.parametrize("name", FIELDS)
def test_the_documentation_of_a_field_does_not_repeat_its_bound(name):
  """The bound is shown after the documentation."""
  assert "must be" not in FIELDS[name].documentation
