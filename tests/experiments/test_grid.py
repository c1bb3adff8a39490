"""Grids: every run has a valid config, and each row differs from DIFF in what its name says."""

import dataclasses
import functools
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import (
  Config,
  DataConfig,
  OptimizerConfig,
  TrainConfig,
  UserError,
)
from diffjax.model.decoder import Decoder
from diffjax.model.flops import parameter_count
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build
from experiments import grid
from tests.harness.tiers import full

ABLATIONS = {
  name: grid.load("ablations").grids[name] for name in ("cpu", "gpu", "tpu")
}


def configs(name, size=""):
  get_config = __import__(
    f"experiments.{name}.config", fromlist=["get_config"]
  ).get_config
  return lambda variant: grid._with_fields(
    get_config(variant + size).to_dict(), {}
  )


@functools.cache
def size(model):
  """Parameters by shape alone; grids share models."""
  shapes = jax.eval_shape(
    Decoder(model).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
  "name",
  ["order_robustness", *full(sorted({*grid.names()} - {"order_robustness"}))],
)
def test_every_run_of_every_grid_has_a_model(name):
  grids = [
    chosen
    for experiment in grid.experiments_of(name)
    for chosen in experiment.grids.values()
  ]
  assert {"cpu", "gpu"} & {
    key for experiment in grid.experiments_of(name) for key in experiment.grids
  }
  for chosen in grids:
    runs = grid.expand(
      name, dataclasses.replace(chosen, seeds=chosen.seeds[:1]), {}
    )
    variants = {run.variant for run in runs}
    assert variants >= {
      chosen.baseline.replace("*", variant.partition(",")[2])
      for variant in variants
    }
    assert len(
      {
        (run.config.model, run.config.optimizer, run.config.train.steps)
        for run in runs
      }
    ) == len(runs)
    assert all(
      size(run.config.model) == parameter_count(run.config.model)
      for run in runs
    )


def smaller(config):
  """The config with small sizes and one step. Variants of one kind become equal, whatever their size and training."""
  model = dataclasses.replace(
    config.model,
    vocab_size=64,
    num_layers=2,
    embed_dim=16,
    head_dim=4,
    ffn_dim=16,
    max_length=32,
  )
  optimizer = OptimizerConfig(frozen=config.optimizer.frozen, warmup_steps=0)
  return Config(
    model=model,
    data=DataConfig(length=32),
    optimizer=optimizer,
    train=TrainConfig(steps=1, batch_size=2),
  )


@pytest.mark.full
def test_every_row_of_ablations_takes_a_step():
  """The step moves every parameter that is not frozen. Other grids train no further kinds of models."""
  runs = grid.expand("ablations", ABLATIONS["cpu"], {})
  rng = np.random.default_rng(0)
  tokens, positions = (
    rng.integers(0, 64, (2, 33)),
    np.broadcast_to(np.arange(32), (2, 32)),
  )
  batch = dict(
    tokens=tokens[:, :-1],
    targets=tokens[:, 1:],
    segment_ids=np.ones((2, 32)),
    positions=positions,
  )
  batch = {name: np.int32(values) for name, values in batch.items()} | {
    "weights": np.ones((2, 32), np.float32)
  }
  for config in dict.fromkeys(smaller(run.config) for run in runs):
    program = build(config, make_mesh(config.mesh, jax.devices()[:1]))
    state = program.init()
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = program.train_step(state, put_batch(batch, program.mesh))
    assert np.isfinite(metrics["loss"])
    for path, moved in jax.tree_util.tree_leaves_with_path(
      jax.tree.map(lambda a, b: (a != b).any(), before, state.params)
    ):
      assert moved != (path[-1].key in config.optimizer.frozen.split(",")), (
        config.model,
        path,
      )


def test_seed_after_seed():
  for name in {*grid.names()} - {"one_gpu"}:  # which has no grid for CPUs
    experiment = grid.load(name)
    runs = grid.expand(name, experiment.grids["cpu"], {})
    seeds = [run.seed for run in runs]
    assert seeds == sorted(seeds) and set(seeds) == set(
      experiment.grids["cpu"].seeds
    ), "whole comparisons first"
    assert len(set(seeds)) >= 3 or name == "throughput"
    assert all(
      run.config.train.seed == run.config.data.seed == run.seed for run in runs
    )


@pytest.mark.parametrize("size", ["", ",size=125m", ",size=1b"])
def test_ablation_rows_differ_in_what_they_are_called_after(size):
  get = configs("ablations", size)
  diff = get("diff")
  changed = lambda variant: {
    field: value
    for field, value in grid.comparable(get(variant).to_dict(), ()).items()
    if value != grid.comparable(diff.to_dict(), ())[field]
  }
  H, D, E = diff.model.num_heads, diff.model.head_dim, diff.model.embed_dim
  assert changed("diff_without_norm") == {"model.head_norm": False}
  assert changed("diff_lambda_0.8") == {"model.lambda_init": 0.8} and changed(
    "diff_lambda_0.5"
  ) == {"model.lambda_init": 0.5}
  assert changed("diff_frozen_lambda") == {
    "optimizer.frozen": "lambda_q1,lambda_k1,lambda_q2,lambda_k2"
  }
  assert changed("transformer_wide") == {
    "model.attention": "softmax",
    "model.head_dim": 2 * D,
    "model.head_norm": False,
  }
  assert changed("transformer_norm") == {
    "model.attention": "softmax",
    "model.head_dim": 2 * D,
  }
  assert changed("transformer") == {
    "model.attention": "softmax",
    "model.num_heads": 2 * H,
    "model.num_kv_heads": 2 * H,
    "model.head_norm": False,
  }
  v2, linear = changed("diff_v2"), changed("diff_v2_linear")
  assert (
    linear == {**v2, "model.attention": "diff_v2_linear"}
    and v2["model.attention"] == "diff_v2"
  )
  for heads in (2, 4, 8, 16):
    model = get(f"diff,heads={heads}").model
    assert (
      model.num_heads == model.num_kv_heads == heads
      and 2 * heads * model.head_dim == E
    )
  # The same matrices: sizes differ by the λ vectors, the gains and the rounding of V2's feed-forward width alone
  sizes = [
    parameter_count(get(row).model)
    for row in (
      "transformer",
      "transformer_wide",
      "transformer_norm",
      "diff",
      "diff,heads=4",
      "diff_v2",
    )
  ]
  assert max(sizes) < min(sizes) * (1.001 if size else 1.02)


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
def test_unknown_variants_are_answered_with_what_there_is(name, variant):
  with pytest.raises(
    UserError,
    match=r"^variant .*; variants are transformer\|.*\|diff_v2_linear\[,size=tiny\|.*\]\[,heads=NUMBER\]$",
  ):
    configs(name)(variant)


@pytest.mark.parametrize("name", ["order_robustness", "retrieval"])
def test_unknown_rows_are_answered_with_those_there_are(name):
  for variant in ("nothing", "diff,size=1b", ""):
    with pytest.raises(
      UserError,
      match=r"^variant .*; variants are transformer\|.*\|diff_v2_linear$",
    ):
      configs(name)(variant)


def test_heads_that_do_not_divide_the_width():
  with pytest.raises(
    UserError, match="heads=3: a width of 64 cannot be divided among 3 heads"
  ):
    configs("ablations")("diff,heads=3")


@pytest.mark.parametrize("name", grid.names())
def test_runs_are_called_as_files_can_be(name):
  """A run's name is the path of its workdir: the variant and the seed, in characters that no shell interprets."""
  for experiment in grid.experiments_of(name):
    for chosen in experiment.grids.values():
      runs = [
        f"{variant}/seed_{seed}"
        for variant in chosen.variants
        for seed in chosen.seeds
      ]
      assert len(set(runs)) == len(runs) and all(
        re.fullmatch(r"[a-z0-9_.]+(,[a-z]+=[a-z0-9.]+)*/seed_[0-9]+", run)
        for run in runs
      )
      assert all(shlex.quote(run) == run for run in runs)


def test_unknown_experiments_are_answered_with_a_list():
  with pytest.raises(
    UserError,
    match=f"there is no experiment 'nothing'; there are {', '.join(grid.names())}",
  ):
    grid.load("nothing")
  with pytest.raises(
    UserError,
    match="--grid=moon: retrieval has no such grid; there are cpu, gpu, tpu$",
  ):
    grid.load("retrieval", "moon")


def test_changes():
  (run,) = grid.expand(
    "ablations",
    grid.Grid(("diff",), "diff"),
    {"train.steps": 700, "optimizer.learning_rate": 1, "data.source": "text:a"},
  )
  assert (
    run.config.train.steps == 700
    and run.config.optimizer.learning_rate == 1.0
    and run.config.data.source == "text:a"
  )
  assert run.fields == {
    "train.seed": 0,
    "data.seed": 0,
    "train.steps": 700,
    "optimizer.learning_rate": 1,
    "data.source": "text:a",
  }
  two = grid.expand(
    "ablations",
    grid.Grid(("transformer", "diff"), "diff"),
    {"eval.rows": 4, "diff:eval.rows": 8},
  )
  assert [run.config.eval.rows for run in two] == [4, 8] and two[1].fields[
    "eval.rows"
  ] == 8, "one variant's own"
  assert [
    grid.read_value(text) for text in ("3", "-1e-3", "True", "text:a", "")
  ] == [3, -1e-3, True, "text:a", ""]
  for field, message in (
    ("steps", "config.steps is not a config field"),
    (
      "train.step",
      "train.step is not a config field: did you mean train.steps",
    ),
    ("x.y", "config.x.y"),
    (
      "dif:eval.rows",
      "--set=dif:eval.rows: the grid has no variant 'dif'; there are diff",
    ),
    ("diff:data.seed", "--set=data.seed: seeds are the grid's"),
  ):
    with pytest.raises(UserError, match=message):
      grid.expand("ablations", grid.Grid(("diff",), "diff"), {field: 1})


def test_choices():
  runs = grid.expand("ablations", ABLATIONS["cpu"], {})
  pick = lambda only, part="0/1": [
    run.name for run in grid.choose(runs, only, part)
  ]
  assert len(pick([])) == len(runs) == 5 * len(ABLATIONS["cpu"].variants)
  assert pick(["diff"]) == [f"diff/seed_{seed}" for seed in range(5)]
  assert pick(["diff_v2*/seed_1", "transformer/seed_0"]) == [
    "transformer/seed_0",
    "diff_v2/seed_1",
    "diff_v2_linear/seed_1",
  ]
  parts = [pick([], f"{index}/3") for index in range(3)]
  assert (
    sorted(sum(parts, [])) == sorted(pick([]))
    and max(map(len, parts)) - min(map(len, parts)) <= 1
  )
  with pytest.raises(
    UserError,
    match="--only=banana matches no run; .*variants transformer, transformer_wide",
  ):
    pick(["diff", "banana"])
  for part in ("1", "3/3", "a/b", "1/0", "-1/2"):
    with pytest.raises(UserError, match=f"--slice={part}: must be INDEX/COUNT"):
      pick([], part)


def test_circumstances_are_not_compared():
  config = configs("ablations")("diff").to_dict()
  fields = grid.comparable(config, ["data.source"])
  assert (
    "train.steps" in fields
    and "eval.rows" in fields
    and "model.dtype" in fields
  )
  assert not fields.keys() & {
    "data.source",
    "mesh.data",
    "data.prepared_dir",
    "train.checkpoint_interval",
    "train.max_skipped_in_a_row",
  }
  # Results of earlier versions may have fields that were removed since.
  config["model"]["removed"] = 1
  assert "model.removed" in grid.comparable(config, [])
