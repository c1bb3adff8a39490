"""Grids: their runs, the configs of their variants, and choices of runs."""

import dataclasses
import functools
import importlib
import re
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import (
  Config,
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  UserError,
  from_config_dict,
)
from diffjax.model.decoder import Decoder
from diffjax.model.flops import parameter_count
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build
from experiments import architectures, grid
from tests.harness.tiers import full


def config_of(name: str, variant: str) -> Config:
  """Returns the config of an experiment's variant, such as "diff,heads=4"."""
  module = importlib.import_module(f"experiments.{name}.config")
  return from_config_dict(module.get_config(variant).to_dict())


def all_grids(name: str) -> dict[str, grid.Grid]:
  """Returns the grids of an experiment, by name: "cpu", "gpu" and others."""
  grids = {}
  for experiment in grid.experiments_of(name):
    grids.update(experiment.grids)
  return grids


# Grids have many models in common.
@functools.cache
def num_initialised_parameters(model: ModelConfig) -> int:
  """Returns the number of parameters of an initialized model."""
  initialise = Decoder(model).init
  tokens = jnp.zeros((1, 1), jnp.int32)
  variables = jax.eval_shape(initialise, jax.random.key(0), tokens)
  return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


OTHER_NAMES = sorted(set(grid.names()) - {"order_robustness"})


# `full` leaves the other experiments to the full tier.
@pytest.mark.parametrize("name", ["order_robustness", *full(OTHER_NAMES)])
def test_every_run_of_every_grid_has_a_model(name):
  """The model can be initialized, and has the computed number of parameters."""
  for chosen in all_grids(name).values():
    # Seeds do not change the model.
    one_seed = dataclasses.replace(chosen, seeds=chosen.seeds[:1])
    for run in grid.expand(name, one_seed, {}):
      model = run.config.model
      assert num_initialised_parameters(model) == parameter_count(model)


@pytest.mark.parametrize("name", grid.names())
def test_no_two_variants_of_a_grid_have_the_same_settings(name):
  for chosen in all_grids(name).values():
    # Without further seeds, there is one run for each variant.
    one_seed = dataclasses.replace(chosen, seeds=chosen.seeds[:1])
    settings = set()
    for run in grid.expand(name, one_seed, {}):
      config = run.config
      settings.add((config.model, config.optimizer, config.train.steps))

    assert len(settings) == len(chosen.variants)


@pytest.mark.parametrize("name", grid.names())
def test_every_variant_has_a_baseline_in_its_grid(name):
  for chosen in all_grids(name).values():
    for variant in chosen.variants:
      # The baseline of "diff,size=1b" is "transformer,size=1b" if the grid's
      # baseline is "transformer,*".
      _, _, settings = variant.partition(",")
      assert chosen.baseline.replace("*", settings) in chosen.variants


@pytest.mark.parametrize("name", grid.names())
def test_every_experiment_has_a_grid_for_a_single_machine(name):
  assert {"cpu", "gpu"} & set(all_grids(name))


def with_small_sizes(config):
  """Returns the config with small sizes and one step.

  Variants that differ only in size, training or the value of λ_init become
  equal.
  """
  lambda_init = None
  if config.model.lambda_init is not None:
    lambda_init = 0.5
  model = dataclasses.replace(
    config.model,
    vocab_size=64,
    num_layers=2,
    embed_dim=16,
    head_dim=4,
    ffn_dim=16,
    max_length=32,
    lambda_init=lambda_init,
  )
  optimizer = OptimizerConfig(frozen=config.optimizer.frozen, warmup_steps=0)
  return Config(
    model=model,
    data=DataConfig(length=32),
    optimizer=optimizer,
    train=TrainConfig(steps=1, batch_size=2),
  )


def random_batch():
  """Returns two rows of 32 random tokens. Each row is one document."""
  tokens = np.random.default_rng(0).integers(0, 64, (2, 33), np.int32)
  segment_ids = np.ones((2, 32), np.int32)
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": segment_ids,
    "positions": np.cumsum(segment_ids, axis=1, dtype=np.int32) - 1,
    "weights": np.ones((2, 32), np.float32),
  }


def distinct_small_configs():
  """Returns small configs of the kinds of models that ablations trains.

  The variants that are DIFF with another number of heads are left out.
  """
  rows = grid.Grid(architectures.ROWS, "diff")
  configs = []
  for run in grid.expand("ablations", rows, {}):
    config = with_small_sizes(run.config)
    if config not in configs:
      configs.append(config)
  return configs


@pytest.mark.full
def test_a_step_of_every_ablation_moves_all_parameters_that_are_not_frozen():
  """The models of the other experiments are of the same kinds."""
  for config in distinct_small_configs():
    program = build(config, make_mesh(config.mesh, jax.devices()[:1]))
    state = program.init()
    initial_params = jax.tree.map(np.asarray, state.params)
    batch = put_batch(random_batch(), program.mesh)

    state, metrics = program.train_step(state, batch)

    assert np.isfinite(metrics["loss"])
    changes = jax.tree.map(np.not_equal, initial_params, state.params)
    names_of_frozen = config.optimizer.frozen.split(",")
    frozen_paths = []
    unmoved_paths = []
    for path, is_changed in jax.tree_util.tree_leaves_with_path(changes):
      parameter_name = path[-1].key
      if parameter_name in names_of_frozen:
        frozen_paths.append(path)
      if not np.any(is_changed):
        unmoved_paths.append(path)
    assert unmoved_paths == frozen_paths, config.model


# order_robustness trains, and outliers measures the runs of ablations.
@pytest.mark.parametrize("name", ["order_robustness", "outliers"])
def test_all_variants_of_a_seed_come_before_the_next_seed(name):
  """A grid that is stopped early has all variants of its first seeds."""
  chosen = grid.load(name).grids["cpu"]

  seeds = [run.seed for run in grid.expand(name, chosen, {})]

  assert seeds == sorted(seeds)
  assert set(seeds) == set(chosen.seeds)


@pytest.mark.parametrize("name", ["order_robustness", "outliers"])
def test_a_seed_sets_initialization_and_data(name):
  for run in grid.expand(name, grid.load(name).grids["cpu"], {}):
    assert run.config.train.seed == run.seed
    assert run.config.data.seed == run.seed


# one_gpu has no grid for CPUs, and the times of throughput need no seeds.
SEEDED_NAMES = sorted(set(grid.names()) - {"one_gpu", "throughput"})


@pytest.mark.parametrize("name", SEEDED_NAMES)
def test_results_come_from_at_least_three_seeds(name):
  assert len(grid.load(name).grids["cpu"].seeds) >= 3


def changes_from_diff(row: str, size: str) -> dict[str, Any]:
  """Returns the fields in which a row of ablations differs from DIFF.

  Args:
    row: A variant without options, such as "transformer".
    size: The options of the variant, such as ",size=125m".
  """
  diff = grid.comparable(config_of("ablations", f"diff{size}").to_dict(), ())
  fields = grid.comparable(config_of("ablations", f"{row}{size}").to_dict(), ())
  changes = {}
  for field, value in fields.items():
    if value != diff[field]:
      changes[field] = value
  return changes


SIZES = pytest.mark.parametrize("size", ["", ",size=125m", ",size=1b"])


@SIZES
@pytest.mark.parametrize(
  "row, changes",
  [
    ("diff_without_norm", {"model.head_norm": False}),
    ("diff_lambda_0.8", {"model.lambda_init": 0.8}),
    ("diff_lambda_0.5", {"model.lambda_init": 0.5}),
    (
      "diff_frozen_lambda",
      {"optimizer.frozen": "lambda_q1,lambda_k1,lambda_q2,lambda_k2"},
    ),
  ],
)
def test_a_row_of_diff_differs_in_one_field(row, changes, size):
  """Each of these variants of ablations changes one config field of DIFF."""
  assert changes_from_diff(row, size) == changes


@SIZES
def test_heads_of_wide_transformers_are_twice_as_wide_as_those_of_diff(size):
  """transformer_norm has DIFF's head norm, and transformer_wide has none."""
  diff_head_dim = config_of("ablations", f"diff{size}").model.head_dim

  changes_with_norm = changes_from_diff("transformer_norm", size)
  changes_without_norm = changes_from_diff("transformer_wide", size)

  assert changes_with_norm == {
    "model.attention": "softmax",
    "model.head_dim": 2 * diff_head_dim,
  }
  assert changes_without_norm == {
    "model.attention": "softmax",
    "model.head_dim": 2 * diff_head_dim,
    "model.head_norm": False,
  }


@SIZES
def test_the_transformer_has_twice_the_heads_of_diff(size):
  """A head of DIFF has two attention maps, and so the work of two heads."""
  num_diff_heads = config_of("ablations", f"diff{size}").model.num_heads

  changes = changes_from_diff("transformer", size)

  assert changes == {
    "model.attention": "softmax",
    "model.num_heads": 2 * num_diff_heads,
    "model.num_kv_heads": 2 * num_diff_heads,
    "model.head_norm": False,
  }


@SIZES
def test_linear_diff_v2_differs_from_diff_v2_in_its_attention(size):
  diff_v2 = changes_from_diff("diff_v2", size)

  linear_diff_v2 = changes_from_diff("diff_v2_linear", size)

  assert diff_v2["model.attention"] == "diff_v2"
  assert linear_diff_v2 == {**diff_v2, "model.attention": "diff_v2_linear"}


@SIZES
@pytest.mark.parametrize("heads", [2, 4, 8, 16])
def test_another_number_of_heads_keeps_the_width(heads, size):
  model = config_of("ablations", f"diff,heads={heads}{size}").model

  assert model.num_heads == heads
  assert model.num_kv_heads == heads
  # Each head has two queries of size head_dim.
  assert 2 * heads * model.head_dim == model.embed_dim


@pytest.mark.parametrize(
  "size, tolerance",
  [("", 0.02), (",size=125m", 0.001), (",size=1b", 0.001)],
)
def test_rows_have_almost_equally_many_parameters(size, tolerance):
  """λ vectors, gains and rounded widths make small differences."""
  rows = [
    "transformer",
    "transformer_wide",
    "transformer_norm",
    "diff",
    "diff,heads=4",
    "diff_v2",
  ]

  counts = []
  for row in rows:
    model = config_of("ablations", row + size).model
    counts.append(parameter_count(model))

  assert max(counts) < min(counts) * (1 + tolerance)


@pytest.mark.parametrize(
  "variant",
  [
    "nothing",
    "heads_4",
    "diff@1b",
    "diff,size=2b",
    "diff,heads=0",
    "diff,heads=x",
    "diff,rows=3",
    "",
  ],
)
@pytest.mark.parametrize("name", ["ablations", "long_context"])
def test_the_error_of_an_unknown_variant_lists_the_known_ones(name, variant):
  """A variant is ROW, ROW,size=SIZE, ROW,heads=NUMBER, or has both options."""
  with pytest.raises(
    UserError,
    match=r"^variant .*; variants are transformer\|.*\|diff_v2_linear"
    r"\[,size=tiny\|.*\]\[,heads=NUMBER\]$",
  ):
    config_of(name, variant)


@pytest.mark.parametrize("variant", ["nothing", "diff,size=1b", ""])
@pytest.mark.parametrize("name", ["order_robustness", "retrieval"])
def test_the_error_of_an_unknown_row_lists_the_known_ones(name, variant):
  """In these experiments, a variant is a row without options."""
  with pytest.raises(
    UserError,
    match=r"^variant .*; variants are transformer\|.*\|diff_v2_linear$",
  ):
    config_of(name, variant)


def test_heads_that_do_not_divide_the_width_are_an_error():
  with pytest.raises(
    UserError, match="heads=3: a width of 64 cannot be divided among 3 heads"
  ):
    config_of("ablations", "diff,heads=3")


@pytest.mark.parametrize("name", grid.names())
def test_the_names_of_runs_are_safe_in_files_and_shells(name):
  """A name is, for example, "diff,heads=4/seed_0"."""
  row = "[a-z0-9_.]+"
  option = ",[a-z]+=[a-z0-9.]+"

  for chosen in all_grids(name).values():
    for run in grid.expand(name, chosen, {}):
      assert re.fullmatch(f"{row}({option})*/seed_[0-9]+", run.name)
      # A shell would need quotes for special characters.
      assert shlex.quote(run.name) == run.name


@pytest.mark.parametrize("name", grid.names())
def test_the_runs_of_a_grid_have_different_names(name):
  for chosen in all_grids(name).values():
    names = {run.name for run in grid.expand(name, chosen, {})}

    assert len(names) == len(chosen.variants) * len(chosen.seeds)


def test_the_error_of_an_unknown_experiment_lists_the_known_ones():
  names = ", ".join(grid.names())

  with pytest.raises(
    UserError, match=f"there is no experiment 'nothing'; there are {names}"
  ):
    grid.load("nothing")


def test_the_error_of_an_unknown_grid_lists_the_known_ones():
  with pytest.raises(
    UserError,
    match="--grid=moon: retrieval has no such grid; there are cpu, gpu, tpu$",
  ):
    grid.load("retrieval", "moon")


# A grid of one run.
DIFF = grid.Grid(variants=("diff",), baseline="diff", seeds=(0,))


def test_a_grid_can_be_expanded_with_changed_fields():
  changes = {
    "train.steps": 700,
    "optimizer.learning_rate": 1,
    "data.source": "text:a",
  }

  (run,) = grid.expand("ablations", DIFF, changes)

  assert run.config.train.steps == 700
  assert run.config.optimizer.learning_rate == 1.0
  assert run.config.data.source == "text:a"
  # The command that trains the run sets these fields.
  assert run.fields == {"train.seed": 0, "data.seed": 0, **changes}


def test_a_change_can_be_for_one_variant():
  rows = grid.Grid(variants=("transformer", "diff"), baseline="diff")

  transformer, diff = grid.expand(
    "ablations", rows, {"eval.rows": 4, "diff:eval.rows": 8}
  )

  assert transformer.config.eval.rows == 4
  assert diff.config.eval.rows == 8
  assert diff.fields["eval.rows"] == 8


@pytest.mark.parametrize(
  "field, message",
  [
    ("steps", "config.steps is not a config field"),
    (
      "train.step",
      "train.step is not a config field: did you mean train.steps",
    ),
    ("x.y", "config.x.y is not a config field"),
    (
      "dif:eval.rows",
      "--set=dif:eval.rows: the grid has no variant 'dif'; there are diff",
    ),
    ("diff:data.seed", "--set=data.seed: seeds are the grid's"),
  ],
)
def test_a_change_that_is_not_possible_is_an_error(field, message):
  """A change is for a FIELD of all runs, or for VARIANT:FIELD."""
  with pytest.raises(UserError, match=message):
    grid.expand("ablations", DIFF, {field: 1})


@pytest.mark.parametrize(
  "text, expected",
  [
    ("3", 3),
    ("-1e-3", -1e-3),
    ("True", True),
    ("text:a", "text:a"),
    ("", ""),
  ],
)
def test_the_value_of_a_flag_is_a_number_a_bool_or_a_text(text, expected):
  actual = grid.read_value(text)

  assert actual == expected
  # Equality is not enough, since 1 == True == 1.0 in Python.
  assert type(actual) is type(expected)


@pytest.fixture(scope="module")
def ablations():
  """The runs of the grid "cpu" of ablations, with five seeds."""
  return grid.expand("ablations", all_grids("ablations")["cpu"], {})


def names_of(runs):
  """Returns the names of runs, such as "diff/seed_0"."""
  return [run.name for run in runs]


# The slice "INDEX/COUNT" that has all runs.
ALL = "0/1"


def test_all_runs_are_chosen_without_patterns(ablations):
  assert grid.choose(ablations, only=[], slice_=ALL) == ablations


def test_a_variant_is_chosen_with_all_its_seeds(ablations):
  """A pattern of --only without a seed matches all seeds."""
  chosen = grid.choose(ablations, only=["diff"], slice_=ALL)

  assert names_of(chosen) == [
    "diff/seed_0",
    "diff/seed_1",
    "diff/seed_2",
    "diff/seed_3",
    "diff/seed_4",
  ]


def test_patterns_choose_runs_in_the_order_of_the_grid(ablations):
  patterns = ["diff_v2*/seed_1", "transformer/seed_0"]

  chosen = grid.choose(ablations, only=patterns, slice_=ALL)

  assert names_of(chosen) == [
    "transformer/seed_0",
    "diff_v2/seed_1",
    "diff_v2_linear/seed_1",
  ]


def test_slices_divide_the_runs_evenly(ablations):
  first = grid.choose(ablations, only=[], slice_="0/3")
  second = grid.choose(ablations, only=[], slice_="1/3")
  third = grid.choose(ablations, only=[], slice_="2/3")

  # Each run is in one slice.
  names = names_of([*first, *second, *third])
  assert sorted(names) == sorted(names_of(ablations))
  sizes = [len(first), len(second), len(third)]
  assert max(sizes) - min(sizes) <= 1


def test_a_pattern_that_matches_no_run_is_an_error(ablations):
  with pytest.raises(
    UserError,
    match="--only=banana matches no run; .*variants transformer,"
    " transformer_wide",
  ):
    grid.choose(ablations, only=["diff", "banana"], slice_=ALL)


@pytest.mark.parametrize("text", ["1", "3/3", "a/b", "1/0", "-1/2"])
def test_a_malformed_slice_is_an_error(ablations, text):
  with pytest.raises(UserError, match=f"--slice={text}: must be INDEX/COUNT"):
    grid.choose(ablations, only=[], slice_=text)


def test_only_fields_that_affect_results_are_compared():
  config = config_of("ablations", "diff").to_dict()

  # The second argument has fields that are left out on request, since they only
  # say where data is.
  fields = grid.comparable(config, ["data.source"])

  for field in ("train.steps", "eval.rows", "model.dtype"):
    assert field in fields
  for field in (
    "data.source",
    "mesh.data",
    "data.prepared_dir",
    "train.checkpoint_interval",
    "train.max_skipped_in_a_row",
  ):
    assert field not in fields


def test_a_field_that_was_removed_from_the_config_is_compared():
  """Results of earlier versions may have such fields."""
  config = config_of("ablations", "diff").to_dict()
  config["model"]["removed"] = 1

  fields = grid.comparable(config, [])

  assert "model.removed" in fields
