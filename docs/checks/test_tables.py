"""Tables of pages are complete, and have the numbers that the code computes."""

import dataclasses
import importlib
import json
import statistics
from typing import Any

import pytest

from benchmarks import topologies
from diffjax.config import Config, ModelConfig, from_config_dict
from diffjax.evals import SUITES
from diffjax.model.attention import ATTENTION
from diffjax.model.flops import parameter_count, step_flops
from diffjax.ops.diff_attention import implementations
from experiments import comparison, plots
from recipes import tiny_pair
from tests.harness import ROOT
from tests.harness.variants import EXPECTED

UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
CONFIGS_HEADING = (
  "| config | parameters | E | L | DIFF heads × d | F | tokens a step | for |"
)
VARIANTS_HEADING = (
  "| `model.attention` | output of a head | parameters | FLOPs | from |"
)
ABLATIONS_HEADING = (
  "| 0.84 M parameters, 2.5 M bytes | loss | − Transformer's"
  " | AR-Hit | − Transformer's | Others | − Transformer's |"
)


def table(page: str, heading: str) -> list[list[str]]:
  """Returns the cells of each row of a table.

  Args:
    page: A file of the repository.
    heading: The first line of the table.
  """
  _, _, text = (ROOT / page).read_text().partition(f"\n{heading}\n")
  _, *lines = text.splitlines()
  rows = []
  for line in lines:
    if not line:
      break
    cells = line.strip("|").split("|")
    rows.append([cell.strip() for cell in cells])
  assert rows, f"{page} has no table with this heading: {heading}"
  return rows


def first_column(page: str, heading: str) -> set[str]:
  """Returns the first cell of each row of a table, without backticks."""
  return {row[0].strip("`") for row in table(page, heading)}


def load_config(name: str) -> Config:
  module = importlib.import_module(f"diffjax.configs.{name}")
  return from_config_dict(module.get_config())


def assert_rounded(cell: str, number: float) -> None:
  """Checks that a cell such as "1.41 B" is a number, rounded."""
  value, unit = cell.split()
  _, _, decimals = value.partition(".")
  half_of_last_digit = 0.51 * 10 ** -len(decimals)
  expected = pytest.approx(number / UNITS[unit], abs=half_of_last_digit)
  assert float(value) == expected


CONFIG_ROWS = table("docs/training.md", CONFIGS_HEADING)


@pytest.mark.parametrize("row", CONFIG_ROWS, ids=lambda row: row[0].strip("`"))
def test_the_table_of_configs_has_their_sizes(row):
  """`row` has the texts of the cells. The last one, of purposes, is free."""
  name, parameters, embed_dim, layers, heads, ffn_dim, tokens, _ = row
  config = load_config(name.strip("`"))
  model = config.model

  assert embed_dim == str(model.embed_dim)
  assert layers == str(model.num_layers)
  assert heads == f"{model.num_heads} × {model.head_dim}"
  assert ffn_dim == str(model.ffn_dim)
  assert_rounded(parameters, parameter_count(model))
  assert_rounded(tokens, config.train.batch_size * config.data.length)


VARIANT_ROWS = table("docs/family.md", VARIANTS_HEADING)


def test_the_table_of_variants_is_complete():
  names = set()
  for row in VARIANT_ROWS:
    name, _, _ = row[0].partition(",")
    names.add(name)
  assert set(EXPECTED) <= names <= set(ATTENTION)


def model_of_variant(attention: str, shares_noise_maps: bool) -> ModelConfig:
  """Returns a variant of diff_3b with the same widths.

  In "diff", values have twice the width of keys. Where they have the same width
  (`value_dim_factor` = 1), there are twice the heads. If noise maps are shared,
  there is one for four heads, with a key and a value of its own.
  """
  diff = load_config("diff_3b").model
  value_dim_factor = ATTENTION[attention].value_dim_factor
  num_heads = diff.num_heads * 2 // value_dim_factor
  model = dataclasses.replace(
    diff,
    attention=attention,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_norm=diff.head_norm and value_dim_factor == 2,
  )
  if shares_noise_maps:
    model = dataclasses.replace(
      model, num_noise_heads=num_heads // 4, num_kv_heads=num_heads // 4
    )
  return model


def transformer_with_equal_keys_and_values(model: ModelConfig) -> ModelConfig:
  """Returns a Transformer whose heads together are as wide as the model's."""
  value_dim_factor = ATTENTION[model.attention].value_dim_factor
  return dataclasses.replace(
    model,
    attention="softmax",
    num_heads=model.num_heads * value_dim_factor,
    num_noise_heads=None,
    num_kv_heads=model.num_kv_heads * value_dim_factor,
    head_norm=False,
  )


def forward_flops(model: ModelConfig) -> float:
  """Returns the FLOPs of a forward pass with diff_3b's length."""
  return step_flops(model, 4096, 4096).forward


@pytest.mark.parametrize("row", VARIANT_ROWS, ids=lambda row: row[0])
def test_the_table_of_variants_has_their_cost(row):
  """Parameters and FLOPs are relative to a Transformer with the same widths."""
  # A name is, for example, "diff" or "diff, `num_noise_heads`".
  name, _, parameters, flops, _ = row
  attention, _, field = name.partition(", ")
  model = model_of_variant(
    attention, shares_noise_maps=field == "`num_noise_heads`"
  )
  transformer = transformer_with_equal_keys_and_values(model)

  parameters_ratio = parameter_count(model) / parameter_count(transformer)
  flops_ratio = forward_flops(model) / forward_flops(transformer)

  # The table has three decimals.
  half_of_last_digit = 0.51 * 1e-3
  assert float(parameters) == pytest.approx(
    parameters_ratio, abs=half_of_last_digit
  )
  assert float(flops) == pytest.approx(flops_ratio, abs=half_of_last_digit)


def test_the_table_of_suites_is_complete():
  names = first_column("docs/evaluation.md", "| suite | measures |")
  assert names == set(SUITES)


def test_the_table_of_implementations_is_complete():
  heading = "| `implementation` | what it is | `auto` takes it |"
  names = first_column("docs/attention.md", heading)
  assert names == set(implementations.REGISTRY.built_in)


def test_the_table_of_slices_has_the_compiled_results():
  compiled = topologies.Compiled(offline=True)
  expected, _ = topologies.table(compiled)
  assert expected in (ROOT / "docs/slices.md").read_text()


def test_the_table_of_the_tiny_pair_has_the_recorded_figures():
  record = (ROOT / "recipes/tiny_pair.json").read_text()
  figures = json.loads(record)["figures"]
  page = (ROOT / "experiments/README.md").read_text()
  assert list(figures) == list(tiny_pair.ROWS)
  assert tiny_pair.table(figures) in page


def committed_ablations() -> dict[str, Any]:
  """Returns the committed results of the ablations."""
  file = ROOT / "experiments/ablations/results.json"
  return json.loads(file.read_text(encoding="utf-8"))


def variants_by_name(committed: dict[str, Any]) -> dict[str, str]:
  """Returns the variants of results, by the names that figures show."""
  variants = {}
  for run in committed["runs"]:
    variant = run["variant"]
    variants[plots.style(variant).name] = variant
  return variants


ABLATION_ROWS = table("experiments/ablations/README.md", ABLATIONS_HEADING)


def test_the_table_of_ablations_is_complete():
  names = [row[0] for row in ABLATION_ROWS]
  assert sorted(names) == sorted(variants_by_name(committed_ablations()))


@pytest.mark.parametrize("row", ABLATION_ROWS, ids=lambda row: row[0])
def test_the_table_of_ablations_has_the_committed_means(row):
  """Runs of a variant differ in their seeds."""
  # Each metric has its mean, and the difference from the Transformer's mean.
  name, loss, _, ar_hit, _, others, _ = row
  committed = committed_ablations()
  variant = variants_by_name(committed)[name]

  cells = {"loss": loss, "ar_hit": ar_hit, "others": others}
  for metric, cell in cells.items():
    values = comparison.values_by_seed(
      committed, variant, f"validation/{metric}"
    )
    # Bold marks a significance test, which is not checked here.
    assert cell.strip("*") == f"{statistics.mean(values.values()):.3f}"


def difference_cell(
  committed: dict[str, Any], variant: str, metric: str
) -> str:
  """Returns the difference from the Transformer. Its own cell is empty."""
  if variant == "transformer":
    return ""
  difference, low, high = comparison.difference(
    committed, variant, f"validation/{metric}"
  )
  text = f"{difference:.3f} [{low:.3f}, {high:.3f}]"
  # The table has the mathematical minus sign.
  return text.replace("-", "−")


@pytest.mark.parametrize("row", ABLATION_ROWS, ids=lambda row: row[0])
def test_the_table_of_ablations_has_the_committed_differences(row):
  """A difference from the Transformer's mean has its 95 % interval.

  For example: "−0.021 [−0.030, −0.012]".
  """
  name, _, loss, _, ar_hit, _, others = row
  committed = committed_ablations()
  variant = variants_by_name(committed)[name]

  cells = {"loss": loss, "ar_hit": ar_hit, "others": others}
  for metric, cell in cells.items():
    # Bold marks a significance test, which is not checked here.
    assert cell.strip("*") == difference_cell(committed, variant, metric)
