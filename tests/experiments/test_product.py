"""Grid.product: rows, types, errors before training, and the default plot."""

import re

import numpy as np
import pytest

from diffjax.config import UserError
from experiments import draw, folders, grid, product, product_plot
from experiments.grid import Experiment, Grid
from tests.experiments.printed import parsed
from tests.harness import in_process

FACTORS = {
  "model.lambda_init": [0.8, 0.2, 0.5],
  "model.head_norm": [True, False],
}


@pytest.fixture
def make_folder(tmp_path):
  """make_folder(grid_code): the path of a folder whose experiment has it."""

  def make(grid_code, name="study", **files):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "experiment.py").write_text(
      "from experiments.grid import Experiment, Grid\n"
      "EXPERIMENT = Experiment('?', {'cpu': "
      f"{grid_code}}}, {{'loss': 'validation/loss'}})\n"
    )
    for file, content in files.items():
      (folder / f"{file}.py").write_text(content)
    return str(folder)

  return make


def expand(folder, changes=None):
  return grid.expand(folder, grid.load(folder).grids["cpu"], changes or {})


def test_rows_have_readable_names():
  crossed = Grid.product("tiny", FACTORS, seeds=range(2)).crossed
  assert list(crossed.rows()) == [
    "lambda_init=0.8,head_norm=True",
    "lambda_init=0.8,head_norm=False",
    "lambda_init=0.2,head_norm=True",
    "lambda_init=0.2,head_norm=False",
    "lambda_init=0.5,head_norm=True",
    "lambda_init=0.5,head_norm=False",
  ]


def test_factors_that_end_alike_have_dotted_names():
  names = product.short_names(["train.steps", "data.steps", "model.rope"])
  assert names == {
    "train.steps": "train.steps",
    "data.steps": "data.steps",
    "model.rope": "rope",
  }


def test_names_are_safe_and_distinct():
  values = ["text:/a/*", "text:/a/?", "a b", "x" * 300, "x" * 301, ""]
  crossed = product.make("tiny", {"data.source": values, "a.b": ["y" * 300]})
  names = list(crossed.rows())
  assert len(set(names)) == len(values)
  for name in names:
    assert re.fullmatch(r"[\w.,=+-]{1,250}", name, re.ASCII)


def test_long_names_are_shortened_and_distinct():
  values = {f"section.{'f' * 30}{index}": [True, False] for index in range(8)}
  names = list(product.make("tiny", values).rows())
  assert len(set(names)) == 2**8
  assert max(map(len, names)) < 250


def test_factors_keep_their_types(make_folder):
  factors = {
    "model.lambda_init": [0.2],
    "model.head_norm": [False],
    "model.num_layers": [2],
    "data.source": ["True"],
  }
  (run,) = expand(make_folder(f"Grid.product('tiny', {factors})"))
  assert run.factors == {field: value[0] for field, value in factors.items()}
  for field, (value,) in factors.items():
    section, name = field.split(".")
    stored = run.settings()[section][name]
    assert type(stored) is type(value) and stored == value


def test_numbers_of_numpy_become_pythons():
  crossed = product.make("tiny", {"model.lambda_init": np.linspace(0, 1, 3)})
  assert crossed.factors["model.lambda_init"] == (0.0, 0.5, 1.0)
  assert {type(v) for v in crossed.factors["model.lambda_init"]} == {float}


@pytest.mark.parametrize("base", ["tiny", "tiny:transformer", "mine.py:4"])
def test_printed_commands_train_what_the_grid_says(
  run, make_folder, tmp_path, base
):
  """Optimizer and data factors too. None leaves a field at the base's None."""
  factors = {
    "optimizer.learning_rate": [1e-05, 0.25],
    "data.source": ["True", "text:/x/*.txt"],
    "model.window": [None, 7],
  }
  mine = (
    "from diffjax.configs import tiny\n"
    "def get_config(layers):\n"
    "  config = tiny.get_config()\n"
    "  config.model.num_layers = int(layers)\n"
    "  return config\n"
  )
  folder = make_folder(f"Grid.product({base!r}, {factors})", mine=mine)
  out, _ = run(folder, "--print", f"--workdir={tmp_path}/runs", "--steps=5")
  printed = dict(map(parsed, out.splitlines()))
  runs = expand(folder, {"train.steps": 5, "eval.interval": 5})
  runs_dir = tmp_path / "runs" / folders.identifier(folder) / "cpu"
  assert printed == {str(runs_dir / run.name): run.config for run in runs}
  assert len(printed) == 8


def test_none_is_refused_where_the_command_line_cannot_set_it(make_folder):
  mine = (
    "from diffjax.configs import tiny\n"
    "def get_config():\n"
    "  config = tiny.get_config()\n"
    "  config.model.lambda_init = 0.5\n"
    "  return config\n"
  )
  code = "Grid.product('mine.py', {'model.lambda_init': [0.2, None]})"
  folder = make_folder(code, mine=mine)
  with pytest.raises(
    UserError,
    match=r"^lambda_init=None/seed_0: model.lambda_init = None: .*0.5",
  ):
    expand(folder)


@pytest.mark.parametrize(
  "code, message",
  [
    (
      "{'model.lamda_init': [0.2]}",
      "model.lamda_init is not a config field: did you mean model.lambda_init",
    ),
    (
      "{'model.num_heads': [2, 4], 'model.num_kv_heads': [2, 3]}",
      r"^num_heads=2,num_kv_heads=3/seed_0: config.model.num_kv_heads = 3",
    ),
    ("{'model.head_norm': ['True']}", "head_norm must be bool; got 'True'"),
    ("{'model.head_norm': 'True'}", "must have a list of values; got 'True'"),
    ("{'model.lambda_init': [0.2, 0.2]}", "has the value 0.2 twice"),
    ("{'model.lambda_init': []}", "has no values"),
    ("{}", "there are no factors"),
    ("{'train.seed': [1, 2]}", "train.seed cannot be a factor; set seeds="),
    ("{'model.window': [1]}, baseline='x'", "there is no row 'x'"),
  ],
)
def test_mistakes_are_reported_before_training(make_folder, code, message):
  with pytest.raises(UserError, match=message):
    expand(make_folder(f"Grid.product('tiny', {code})"))


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--set=model.lambda_init=1"], "that is a factor of the grid"),
    (["--steps=3"], "--steps=3: train.steps is a factor of the grid"),
    (
      ["--set=eval.interval=0"],
      "lambda_init=0.2,steps=9/seed_0: config.eval.interval = 0",
    ),
    (["--set=lambda_init=0.3:eval.rows=4"], "the grid has no variant"),
  ],
)
def test_flags_that_do_not_fit_the_factors(run, make_folder, flags, message):
  factors = {"model.lambda_init": [0.2], "train.steps": [9]}
  folder = make_folder(f"Grid.product('tiny', {factors})")
  _, errors = run(folder, *flags, code=1)
  assert message in errors and len(errors.splitlines()) == 1


def test_settings_of_one_row(run, make_folder):
  code = (
    "Grid.product('tiny', {'data.length': [64, 128],"
    " 'model.max_length': [256]})"
  )
  folder = make_folder(code)
  row = "length=64,max_length=256"
  out, _ = run(folder, "--print", f"--set={row}:eval.rows=4")
  lines = out.splitlines()
  assert ["--config.eval.rows=4" in line for line in lines] == [True, False]


def test_settings_of_a_row_with_a_dotted_name():
  """Its name begins like a setting of all rows."""
  row = "model.a=2,data.a=x"
  with in_process.own_flags():
    from experiments.run import split_setting
  one_row = split_setting(f"{row}:eval.rows=4", [row])
  assert one_row == (f"{row}:eval.rows", "4")
  all_rows = split_setting("data.source=text:x", [row])
  assert all_rows == ("data.source", "text:x")


def test_a_baseline_of_each_combination():
  made = Grid.product("tiny", FACTORS, baseline="lambda_init=0.2,*")
  assert made.baseline == "lambda_init=0.2,*"
  first = Grid.product("tiny", FACTORS).baseline
  assert first == "lambda_init=0.8,head_norm=True"


def results_of(factors, number_of, seeds=(0, 1)):
  """Results of all runs of a product: number_of(fields, seed), which may be None."""
  made = Grid.product("tiny", factors, seeds=seeds)
  runs = []
  for seed in seeds:
    for variant, fields in made.crossed.rows().items():
      run = {
        "name": f"{variant}/seed_{seed}",
        "variant": variant,
        "seed": seed,
        "factors": fields,
        "parameters": 1000,
        "results": {"validation/loss": number_of(fields, seed)},
      }
      runs.append(run)
  stored = {"grid": "cpu", "baseline": made.baseline, "runs": runs}
  return made, stored


def loss(fields, seed):
  return fields["model.lambda_init"] + fields["model.head_norm"] + 0.1 * seed


def drawn(factors, stored):
  figure = product_plot.plot(
    stored, tuple(factors), "validation/loss", "the loss"
  )
  (axes,) = figure.axes
  means, dots = [], []
  for line in axes.lines:
    if len(line.get_xdata()) == 0:
      continue
    is_dots = line.get_linestyle() == "None"
    (dots if is_dots else means).append(
      list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    )
  return axes, means, dots


def test_the_plot_has_a_dot_per_run_and_lines_through_means():
  _, stored = results_of(FACTORS, loss)
  axes, means, dots = drawn(FACTORS, stored)
  np.testing.assert_allclose(
    means,
    [
      [(0.2, 1.25), (0.5, 1.55), (0.8, 1.85)],
      [(0.2, 0.25), (0.5, 0.55), (0.8, 0.85)],
    ],
  )
  points = sorted(point for line in dots for point in line)
  wanted = sorted(
    (
      run["factors"]["model.lambda_init"],
      run["results"]["validation/loss"],
    )
    for run in stored["runs"]
  )
  np.testing.assert_allclose(points, wanted)
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == ["head_norm = True", "head_norm = False"]
  assert axes.get_xlabel() == "model.lambda_init"
  assert axes.get_ylabel() == "the loss" and not axes.get_title()


def test_the_plot_leaves_out_runs_without_a_number():
  """They count in its title; a mean is that of the other runs."""

  def number_of(fields, seed):
    if fields["model.lambda_init"] == 0.5 and seed == 1:
      return None if fields["model.head_norm"] else float("nan")
    return loss(fields, seed)

  _, stored = results_of(FACTORS, number_of)
  axes, means, dots = drawn(FACTORS, stored)
  np.testing.assert_allclose(means[0], [(0.2, 1.25), (0.5, 1.5), (0.8, 1.85)])
  assert sum(map(len, dots)) == 10
  assert axes.get_title() == "2 of 12 runs failed or have no number"


def test_categories_are_evenly_spaced():
  factors = {
    "model.head_norm": [True, False],
    "model.lambda_init": [0.2],
    "data.source": ["$a$", "_b"],
  }
  _, stored = results_of(factors, loss)
  axes, means, _ = drawn(factors, stored)
  np.testing.assert_allclose(means, [[(0, 1.25), (1, 0.25)]] * 2)
  assert [text.get_text() for text in axes.get_xticklabels()] == [
    "True",
    "False",
  ]
  labels = [text.get_text().strip() for text in axes.get_legend().get_texts()]
  assert labels == [
    r"lambda_init = 0.2, source = \$a\$",
    "lambda_init = 0.2, source = _b",
  ]


def test_lines_of_three_factors_can_be_told_apart():
  factors = {**FACTORS, "model.num_layers": [2, 4, 8]}
  _, stored = results_of(factors, loss)
  axes, _, _ = drawn(factors, stored)
  legend_lines = axes.get_legend().get_lines()
  looks = {(line.get_color(), line.get_linestyle()) for line in legend_lines}
  assert len(looks) == 6 and len({color for color, _ in looks}) == 2


def test_learning_rates_stand_on_a_logarithmic_axis():
  rates = {"optimizer.learning_rate": [1e-2, 1e-4, 1e-3]}
  _, stored = results_of(rates, lambda fields, seed: 1.0)
  axes, _, _ = drawn(rates, stored)
  assert axes.get_xscale() == "log"
  assert axes.get_legend().get_texts()[0].get_text() == "mean over seeds"
  _, stored = results_of(FACTORS, loss)
  assert drawn(FACTORS, stored)[0].get_xscale() == "linear"


def test_a_product_without_a_plot_is_drawn(tmp_path):
  made, stored = results_of(FACTORS, loss)
  experiment = Experiment("?", {"cpu": made}, {"loss": "validation/loss"})
  assert draw.draw(experiment, stored, tmp_path) == [
    "table.md",
    "plot.png",
    "plot.svg",
  ]
  plain = Grid(made.variants, made.baseline, made.seeds)
  experiment = Experiment("?", {"cpu": plain}, {"loss": "validation/loss"})
  assert draw.draw(experiment, stored, tmp_path) == ["table.md"]


def test_variants_of_a_config_are_a_factor(make_folder):
  """They have equal sizes, which values of model.attention do not."""
  folder = make_folder(
    "Grid.product('tiny', {'variant': ['diff', 'transformer'],"
    " 'model.rope': [True, False]})"
  )
  runs = {run.variant: run for run in expand(folder)}
  plain = runs["variant=transformer,rope=False"]
  assert plain.base == "tiny:transformer"
  assert plain.config.model.attention == "softmax"
  assert plain.config.model.num_heads == 4
  assert plain.fields["model.rope"] is False
  assert "variant" not in plain.fields
  assert dict(plain.factors) == {"variant": "transformer", "model.rope": False}
  with pytest.raises(UserError, match="leave one of them out"):
    Grid.product("tiny:diff", {"variant": ["diff"]})


def test_what_a_variant_lacks_is_reported_before_training(make_folder):
  folder = make_folder(
    "Grid.product('tiny', {'model.attention': ['diff', 'gated'],"
    " 'model.lambda_init': [0.5]})"
  )
  with pytest.raises(
    UserError, match="attention=gated,.*/seed_0: .*has no λ_init"
  ):
    expand(folder)
