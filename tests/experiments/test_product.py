"""`Grid.product`: names of rows, values of factors, and early errors."""

import re

import numpy as np
import pytest

from diffjax.config import UserError
from experiments import folders, grid, product
from experiments.grid import Grid
from tests.experiments.printed import configs_by_workdir
from tests.harness import in_process

FACTORS = {
  "model.lambda_init": [0.8, 0.2, 0.5],
  "model.head_norm": [True, False],
}


# An experiment.py with a grid in place of GRID.
TEMPLATE = """
from experiments.grid import Experiment, Grid

EXPERIMENT = Experiment(
  question="?",
  grids={"cpu": GRID},
  metrics={"loss": "validation/loss"},
)
"""


@pytest.fixture
def make_folder(tmp_path):
  """make_folder('Grid.product("tiny", …)'): the path of a folder with the grid.

  The folder may have a config, mine.py.
  """

  def make(grid_code, mine=None):
    folder = tmp_path / "study"
    folder.mkdir()
    experiment = TEMPLATE.replace("GRID", grid_code)
    (folder / "experiment.py").write_text(experiment)
    if mine is not None:
      (folder / "mine.py").write_text(mine)
    return str(folder)

  return make


def expand(folder, changes=None):
  """Returns the runs of a folder's grid."""
  return grid.expand(folder, grid.load(folder).grids["cpu"], changes or {})


def test_rows_are_named_by_the_values_of_the_factors():
  """A row is a combination of the factors' values."""
  rows = product.make("tiny", FACTORS).rows()

  assert list(rows) == [
    "lambda_init=0.8,head_norm=True",
    "lambda_init=0.8,head_norm=False",
    "lambda_init=0.2,head_norm=True",
    "lambda_init=0.2,head_norm=False",
    "lambda_init=0.5,head_norm=True",
    "lambda_init=0.5,head_norm=False",
  ]


def test_factors_with_the_same_last_part_have_dotted_names():
  names = product.short_names(["train.steps", "data.steps", "model.rope"])

  # Two of the fields would be called "steps".
  assert names == {
    "train.steps": "train.steps",
    "data.steps": "data.steps",
    "model.rope": "rope",
  }


def test_names_of_rows_are_different_and_valid_names_of_files():
  values = [
    # They differ only in a character that a file name cannot have.
    "text:/a/*",
    "text:/a/?",
    "a b",
    # They differ only after the length of a file name.
    "x" * 300,
    "x" * 301,
    "",
  ]
  factors = {"data.source": values, "model.name": ["y" * 300]}

  names = list(product.make("tiny", factors).rows())

  assert len(set(names)) == len(values)
  # The text is 1 to 250 letters, digits or other allowed characters.
  valid_name = r"[\w.,=+-]{1,250}"
  for name in names:
    assert re.fullmatch(valid_name, name, re.ASCII)


def test_names_of_rows_with_many_long_factors_are_short_and_differ():
  num_factors = 8
  long_name = "f" * 30
  factors = {}
  for index in range(num_factors):
    factors[f"section.{long_name}{index}"] = [True, False]

  names = list(product.make("tiny", factors).rows())

  # Each factor has two values.
  assert len(set(names)) == 2**num_factors
  for name in names:
    assert len(name) < 250


@pytest.mark.parametrize(
  "section, name, value",
  [
    ("model", "lambda_init", 0.2),
    ("model", "head_norm", False),
    ("model", "num_layers", 2),
    # The text "True" is not a bool.
    ("data", "source", "True"),
  ],
)
def test_values_of_factors_keep_their_types(make_folder, section, name, value):
  """A factor is a config field with the values that runs are trained with."""
  factors = {f"{section}.{name}": [value]}
  folder = make_folder(f"Grid.product('tiny', {factors})")

  (run,) = expand(folder)

  value_of_run = run.settings()[section][name]
  assert value_of_run == value
  # Equality is not enough, since 2 == 2.0 and 0 == False in Python.
  assert type(value_of_run) is type(value)
  assert run.factors == {f"{section}.{name}": value}


def test_numpy_numbers_become_python_numbers():
  """Numbers of NumPy could not be written as JSON."""
  numpy_values = np.linspace(0, 1, 3)

  made = product.make("tiny", {"model.lambda_init": numpy_values})

  values = made.factors["model.lambda_init"]
  assert values == (0.0, 0.5, 1.0)
  for value in values:
    assert type(value) is float


@pytest.mark.parametrize("base", ["tiny", "tiny:transformer", "mine.py:4"])
def test_printed_commands_train_the_runs_of_the_grid(
  run, make_folder, tmp_path, base
):
  """--print prints a diffjax.train command for each run, and trains nothing."""
  factors = {
    "optimizer.learning_rate": [1e-05, 0.25],
    # "True" is a text here.
    "data.source": ["True", "text:/x/*.txt"],
    # None is the value in all base configs. Commands can set no other to None.
    "model.window": [None, 7],
  }
  # "mine.py:4" calls get_config("4").
  config_with_layers = """
from diffjax.configs import tiny

def get_config(num_layers):
  config = tiny.get_config()
  config.model.num_layers = int(num_layers)
  return config
"""
  folder = make_folder(
    f"Grid.product('{base}', {factors})", mine=config_with_layers
  )

  out, _ = run(folder, "--print", f"--workdir={tmp_path}/runs", "--steps=5")

  # With --steps=5, the interval of evaluations is 5, too.
  expected_runs = expand(folder, {"train.steps": 5, "eval.interval": 5})
  runs_dir = tmp_path / "runs" / folders.identifier(folder) / "cpu"
  expected = {}
  for expected_run in expected_runs:
    expected[str(runs_dir / expected_run.name)] = expected_run.config
  # Each of three factors has two values.
  assert len(expected) == 2 * 2 * 2
  assert configs_by_workdir(out) == expected


def test_none_is_refused_if_the_base_has_a_value(make_folder):
  """Flags of the command that trains cannot set None."""
  config_with_lambda_init = """
from diffjax.configs import tiny

def get_config():
  config = tiny.get_config()
  config.model.lambda_init = 0.5
  return config
"""
  folder = make_folder(
    "Grid.product('mine.py', {'model.lambda_init': [0.2, None]})",
    mine=config_with_lambda_init,
  )

  message = r"^lambda_init=None/seed_0: model.lambda_init = None: .*0.5"
  with pytest.raises(UserError, match=message):
    expand(folder)


@pytest.mark.parametrize(
  "factors, message",
  [
    (
      {"model.lamda_init": [0.2]},
      "model.lamda_init is not a config field: did you mean model.lambda_init",
    ),
    (
      {"model.num_heads": [2, 4], "model.num_kv_heads": [2, 3]},
      r"^num_heads=2,num_kv_heads=3/seed_0: config.model.num_kv_heads = 3",
    ),
    (
      {"model.attention": ["diff", "gated"], "model.lambda_init": [0.5]},
      "attention=gated,.*/seed_0: .*has no λ_init",
    ),
    ({"model.head_norm": ["True"]}, "head_norm must be bool; got 'True'"),
    ({"model.head_norm": "True"}, "must have a list of values; got 'True'"),
    ({"model.lambda_init": [0.2, 0.2]}, "has the value 0.2 twice"),
    ({"model.lambda_init": []}, "has no values"),
    ({}, "there are no factors"),
    ({"train.seed": [1, 2]}, "train.seed cannot be a factor; set seeds="),
  ],
)
def test_wrong_factors_are_reported_before_training(
  make_folder, factors, message
):
  """A product has a run for each combination of its factors' values."""
  folder = make_folder(f"Grid.product('tiny', {factors})")

  with pytest.raises(UserError, match=message):
    expand(folder)


def test_an_unknown_baseline_is_an_error():
  # The only row is "window=1".
  with pytest.raises(UserError, match="there is no row 'x'"):
    Grid.product("tiny", {"model.window": [1]}, baseline="x")


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--set=model.lambda_init=1", "that is a factor of the grid"),
    ("--steps=3", "--steps=3: train.steps is a factor of the grid"),
    (
      "--set=eval.interval=0",
      "lambda_init=0.2,steps=9/seed_0: config.eval.interval = 0",
    ),
    ("--set=lambda_init=0.3:eval.rows=4", "the grid has no variant"),
  ],
)
def test_flags_that_contradict_the_factors_are_refused(
  run, make_folder, flag, message
):
  """--set=FIELD=VALUE is for all runs, --set=ROW:FIELD=VALUE for one row."""
  factors = {"model.lambda_init": [0.2], "train.steps": [9]}
  folder = make_folder(f"Grid.product('tiny', {factors})")

  _, errors = run(folder, flag, code=1)

  assert message in errors
  assert len(errors.splitlines()) == 1


def test_the_flag_set_can_be_for_one_row(run, make_folder):
  factors = {"data.length": [64, 128], "model.max_length": [256]}
  folder = make_folder(f"Grid.product('tiny', {factors})")
  first_row = "length=64,max_length=256"

  out, _ = run(folder, "--print", f"--set={first_row}:eval.rows=4")

  # One command is printed for each of the two rows.
  first_command, second_command = out.splitlines()
  assert "--config.eval.rows=4" in first_command
  assert "--config.eval.rows=4" not in second_command


@pytest.mark.parametrize(
  "setting, field, value",
  [
    pytest.param(
      "model.a=2,data.a=x:eval.rows=4",
      "model.a=2,data.a=x:eval.rows",
      "4",
      id="one_row",
    ),
    pytest.param("data.source=text:x", "data.source", "text:x", id="all_rows"),
  ],
)
def test_a_row_with_a_dotted_name_is_recognised_in_a_setting(
  setting, field, value
):
  """A setting is FIELD=VALUE or ROW:FIELD=VALUE.

  The row "model.a=2,data.a=x" itself begins like FIELD=VALUE.
  """
  # The command defines flags when it is imported.
  with in_process.own_flags():
    from experiments.run import split_setting
  rows = ["model.a=2,data.a=x"]

  assert split_setting(setting, rows) == (field, value)


def test_rows_can_be_compared_with_one_value_of_the_first_factor():
  """The star stands for the values of the other factors."""
  made = Grid.product("tiny", FACTORS, baseline="lambda_init=0.2,*")

  assert made.baseline == "lambda_init=0.2,*"


def test_the_baseline_is_the_first_row_by_default():
  factors = {"model.lambda_init": [0.8, 0.2], "model.head_norm": [True, False]}

  made = Grid.product("tiny", factors)

  assert made.baseline == "lambda_init=0.8,head_norm=True"


def test_the_variants_of_a_config_are_a_factor(make_folder):
  """The config "tiny" has the variants "diff" and "transformer"."""
  factors = {"variant": ["diff", "transformer"]}
  folder = make_folder(f"Grid.product('tiny', {factors})")

  diff_run, transformer_run = expand(folder)

  assert diff_run.variant == "variant=diff"
  assert diff_run.base == "tiny:diff"
  assert diff_run.config.model.attention == "diff"
  assert transformer_run.variant == "variant=transformer"
  assert transformer_run.base == "tiny:transformer"
  assert transformer_run.config.model.attention == "softmax"
  # For the same size, the Transformer has twice as many heads.
  num_diff_heads = diff_run.config.model.num_heads
  assert transformer_run.config.model.num_heads == 2 * num_diff_heads


def test_a_variant_is_a_factor_but_no_field_of_the_config(make_folder):
  factors = {"variant": ["transformer"], "model.rope": [False]}
  folder = make_folder(f"Grid.product('tiny', {factors})")

  (run,) = expand(folder)

  assert run.variant == "variant=transformer,rope=False"
  assert run.factors == {"variant": "transformer", "model.rope": False}
  assert "variant" not in run.fields
  assert run.fields["model.rope"] is False


def test_a_base_with_a_variant_cannot_have_the_factor_variant():
  with pytest.raises(UserError, match="leave one of them out"):
    Grid.product("tiny:diff", {"variant": ["diff"]})
