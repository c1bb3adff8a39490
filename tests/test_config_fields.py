"""The declarations of the config's fields, and those who read them."""

import copy
import subprocess
import sys

import pytest

from diffjax.config import FIELDS, OF_THE_RUN, Config, UserError
from diffjax.training import resume
from experiments import grid
from tests import in_process
from tests.conftest import ROOT

# Fields with which runs in one table may differ, besides those of the mesh.
WITHOUT_EFFECT = {
  "data.num_workers",
  "data.prepared_dir",
  "data.timeout",
  "train.checkpoint_interval",
  "train.keep_checkpoints",
  "train.log_interval",
  "train.max_skipped_in_a_row",
  "train.profile_step",
  "train.profile_steps",
  "train.sample_prompt",
  "train.sample_tokens",
  "train.wandb_project",
}

every_field = pytest.mark.parametrize("name", FIELDS)


def with_other_value(name):
  """Returns a config as nested dicts, in which one field differs."""
  values = copy.deepcopy(Config().to_dict())
  section, field = name.split(".")
  values[section][field] = "other"
  return values


def test_every_field_is_listed():
  expected = [
    f"{section}.{name}"
    for section, values in Config().to_dict().items()
    for name in values
  ]
  assert list(FIELDS) == expected


@every_field
def test_a_field_has_documentation(name):
  """Whole sentences on one line, without the bound, which is shown after it."""
  text = FIELDS[name].documentation
  assert text.endswith((".", "…")) and text == " ".join(text.split())
  assert "must be" not in text


@every_field
def test_resume_follows_the_declaration(name):
  saved = Config().to_dict()
  # A prepared batch does not depend on the number of workers; a stream does.
  if FIELDS[name].may_change or name == "data.num_workers":
    resume.check_resume(saved, with_other_value(name))
  else:
    with pytest.raises(UserError, match=f"{name} was .* and is '?other'?"):
      resume.check_resume(saved, with_other_value(name))


@every_field
def test_the_model_that_a_run_starts_from_follows_the_declaration(name):
  """Only fields that change what a model computes are reported."""
  difference = resume.other_model(with_other_value(name), Config())
  is_reported = name.startswith("model.") and FIELDS[name].changes_function
  assert bool(difference) == is_reported


@every_field
def test_experiments_follow_the_declaration(name):
  compared = grid.comparable(Config().to_dict(), places=())
  assert (name in compared) == FIELDS[name].affects_results
  has_effect = name not in WITHOUT_EFFECT and not name.startswith("mesh.")
  assert FIELDS[name].affects_results == has_effect


def test_fields_that_each_run_chooses():
  assert OF_THE_RUN == ("dtype", "attention_implementation", "remat")
  for name in OF_THE_RUN:
    assert not FIELDS[f"model.{name}"].changes_function


def test_a_printed_config_explains_every_field():
  result = in_process.call("diffjax.train", "--config=tiny", "--print_config")
  comments = []
  for line in result.stdout.splitlines():
    if line.startswith("# "):
      comments.append(line.removeprefix("# "))
  text = " ".join(comments)
  for info in FIELDS.values():
    assert info.documentation in text
    if info.bound is not None and not info.bound.choices:
      assert f"{info.documentation} It {info.bound}." in text


def test_fields_need_only_the_standard_library():
  code = (
    "import sys, diffjax.config;"
    "print({name.partition('.')[0] for name in sys.modules}"
    " - sys.stdlib_module_names)"
  )
  result = subprocess.run(
    # Without site-packages, whose .pth files may import more.
    [sys.executable, "-S", "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert eval(result.stdout) <= {"__main__", "diffjax"}
