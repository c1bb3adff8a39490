"""Throughput: the programs that are timed, and the layers that fit a device."""

import dataclasses
import functools
import importlib.util
import math
import types

import jax
import numpy as np
import pytest

from diffjax.config import MeshConfig, UserError, from_config_dict
from diffjax.configs import base
from diffjax.model.flops import parameter_count
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build
from experiments import grid, series, table
from experiments.throughput import experiment
from experiments.throughput.config import get_config

GIB = 2**30

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture
def small_config():
  """The config of a shape that compiles quickly."""
  changes = {
    "model.num_layers": 4,
    "model.embed_dim": 32,
    "model.head_dim": 8,
    "model.ffn_dim": 48,
    "data.length": 32,
    "train.batch_size": 2,
    "train.steps": 3,
  }
  variant = "tiny,length=256"
  one = grid.Grid((variant,), variant)
  (run,) = grid.expand("throughput", one, changes)
  return run.config


def num_elements(tree) -> int:
  """Returns the number of elements of all arrays in a tree."""
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_the_timed_loss_is_the_loss_of_training(small_config, mesh):
  tokens, targets = experiment.batch(small_config)
  programs = experiment.compile_programs(small_config, mesh)
  params = programs.make_params()
  ones = np.ones(tokens.shape, np.int32)
  rows = {
    "tokens": np.asarray(tokens),
    "targets": np.asarray(targets),
    "segment_ids": ones,
    "positions": np.cumsum(ones, axis=1) - 1,
    "weights": ones.astype(np.float32),
    "bytes": ones.astype(np.float32),
    "hits": np.zeros(tokens.shape),
  }

  sums = build(small_config, mesh).eval_step(params, put_batch(rows, mesh))
  forward_loss = programs.passes["forward"](params, tokens, targets)
  loss, gradients = programs.passes["both"](params, tokens, targets)

  assert num_elements(params) == parameter_count(small_config.model)
  expected = float(np.sum(sums["nll"]) / np.sum(sums["weight"]))
  assert float(forward_loss) == pytest.approx(expected, rel=1e-5)
  assert float(loss) == pytest.approx(float(forward_loss), rel=1e-5)
  for gradient in jax.tree.leaves(gradients):
    assert np.abs(gradient).max() > 0


@pytest.mark.full
def test_speeds_are_tokens_over_median_times(small_config):
  measured = experiment.measure("", small_config)

  assert measured["layers"] == 4
  seconds = measured["seconds"]
  for passes in seconds.values():
    assert len(passes["forward"]) == len(passes["both"]) == 3
  speed = measured["tokens_per_second"]["diff"]["both"]
  # A call has 2 rows of 32 tokens.
  assert speed == pytest.approx(64 / np.median(seconds["diff"]["both"]))
  baseline_seconds = np.median(seconds["transformer"]["forward"])
  ratio = baseline_seconds / np.median(seconds["diff_v2"]["forward"])
  assert measured["diff_v2_forward"] == pytest.approx(ratio)
  assert measured.keys() >= set(experiment.EXPERIMENT.metrics.values())


def test_every_layer_takes_the_same_memory(small_config, mesh):
  # On a CPU, few layers are unrolled. With rematerialization they are scanned,
  # as on devices with their own memory.
  model = dataclasses.replace(small_config.model, remat="attention")
  scanned = dataclasses.replace(small_config, model=model)

  @functools.cache
  def needed(layers):
    config = experiment.with_layers(scanned, layers)
    return experiment.compiled_bytes(config, mesh, "both")

  per_layer = needed(3) - needed(2)
  assert (needed(7) - needed(3)) / 4 == pytest.approx(per_layer, rel=0.05)
  for layers in (3, 7):
    limit = 1.01 * needed(layers)
    assert experiment.layers_that_fit(9, limit, needed) == layers


def needs_100_bytes_per_layer(layers):
  return 100.0 * layers


@pytest.mark.parametrize(
  "layers, limit, fitting",
  [
    pytest.param(9, 399, 3, id="fewer layers fit"),
    pytest.param(4, 1e12, 4, id="all layers fit"),
    pytest.param(2, 1, 2, id="two layers are not checked"),
  ],
)
def test_layers_that_fit(layers, limit, fitting):
  actual = experiment.layers_that_fit(layers, limit, needs_100_bytes_per_layer)

  assert actual == fitting


def test_two_layers_fit_if_the_compiler_refuses_three():
  def needed(layers):
    return 100.0 if layers == 2 else math.inf

  assert experiment.layers_that_fit(9, 1e12, needed) == 2


def test_an_error_is_raised_if_two_layers_do_not_fit():
  message = (
    "2 layers take more than the 0.0 GiB .* make train.batch_size smaller"
  )

  with pytest.raises(UserError, match=message):
    experiment.layers_that_fit(4, 99, needs_100_bytes_per_layer)


def test_an_error_is_raised_if_the_compiler_refuses_two_layers():
  def refused(layers):
    return math.inf

  with pytest.raises(UserError, match="2 layers take more than the 3.0 GiB"):
    experiment.layers_that_fit(4, 3 * GIB, refused)


def simulated_bytes(config, mesh, kind):
  """Returns bytes that depend on the architecture, the layers and the pass."""
  per_layer = {"softmax": 1.0, "diff": 1.2, "diff_v2": 1.1}
  needed = config.model.num_layers * per_layer[config.model.attention]
  if kind == "both":
    needed *= 3
  return needed * GIB


def test_the_largest_architecture_limits_the_layers(small_config, mesh):
  # Three layers of DIFF take 10.8 GiB, in nine tenths of the memory.
  memory = 3 * 3 * 1.2 / 0.9 * GIB

  assert (
    experiment.layers_on_device(
      small_config, mesh, memory + 1e3, simulated_bytes
    )
    == 3
  )
  assert (
    experiment.layers_on_device(
      small_config, mesh, memory - 1e3, simulated_bytes
    )
    == 2
  )


def test_all_layers_are_timed_if_the_memory_is_unknown(small_config, mesh):
  device = types.SimpleNamespace(memory_stats=lambda: None)

  memory = experiment.memory_limit(device)

  assert memory is None
  assert experiment.layers_on_device(small_config, mesh, memory) == 4


def test_the_memory_limit_is_what_jax_can_allocate():
  device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 7})

  assert experiment.memory_limit(device) == 7


def test_a_plan_has_the_layers_and_the_memory_of_each_pass(small_config, mesh):
  rows = experiment.plan_rows(small_config, mesh, 14 * GIB, simulated_bytes)

  assert list(rows[0]) == [
    "architecture",
    "layers",
    "forward, GiB",
    "forward + backward, GiB",
    "of",
    "compiled in",
  ]
  for row in rows:
    assert row.pop("compiled in").endswith(" s")
  assert [list(row.values()) for row in rows] == [
    ["transformer", "3 of 4", "3.00", "9.00", "14.00"],
    ["diff", "3 of 4", "3.60", "10.80", "14.00"],
    ["diff_v2", "3 of 4", "3.30", "9.90", "14.00"],
  ]


def test_a_plan_needs_memory_for_two_layers(small_config, mesh):
  with pytest.raises(UserError, match="2 layers take more than the 6.3 GiB"):
    experiment.plan_rows(small_config, mesh, 7 * GIB, simulated_bytes)


@needs_libtpu
@pytest.mark.full
def test_the_programs_compile_for_tpus_that_are_not_attached(small_config):
  # A large vocabulary, so that the memory is not 0.00 GiB.
  model = dataclasses.replace(
    small_config.model, num_layers=2, vocab_size=1 << 18
  )
  config = dataclasses.replace(small_config, model=model)

  rows = experiment.plan(config, "v5e:1x1")

  names = series.column(rows, "architecture")
  assert names == ["transformer", "diff", "diff_v2"]
  for row in rows:
    assert row["layers"] == "2 of 2"
    assert row["of"] == "15.75"
    forward = float(row["forward, GiB"])
    assert 0 < forward < float(row["forward + backward, GiB"]) < 15.75


@needs_libtpu
@pytest.mark.full
def test_a_model_that_is_too_large_for_a_tpu_is_refused(small_config):
  model = dataclasses.replace(
    small_config.model, embed_dim=1 << 15, ffn_dim=1 << 15
  )
  config = dataclasses.replace(small_config, model=model)

  with pytest.raises(UserError, match="2 layers take more than the 14.2 GiB"):
    experiment.plan(config, "v5e:1x1")


def test_runs_that_share_a_cpu_are_not_timed(monkeypatch):
  monkeypatch.setenv("NPROC", "1")
  config = from_config_dict(get_config("tiny,length=256"))

  with pytest.raises(UserError, match="cannot be timed; measure one at a time"):
    experiment.measure("", config)


@pytest.mark.parametrize(
  "variant, layers, length, rows",
  [
    ("13b,length=2048", 40, 2048, 4),
    ("3b,length=4096", 28, 4096, 2),
  ],
)
def test_large_shapes(variant, layers, length, rows):
  config = from_config_dict(get_config(variant))

  assert config.model.num_layers == layers
  assert config.model.max_length == length
  assert config.data.length == length
  assert config.train.batch_size == rows


@pytest.mark.parametrize(
  "variant",
  ["3b@3k", "3b,length=2k", "3b,length=0", "diff,length=2048", ""],
)
def test_the_error_for_an_unknown_shape_lists_the_shapes(variant):
  shapes = r"tiny\|125m\|3b\|13b\[,length=NUMBER\]"

  with pytest.raises(UserError, match=rf"; variants are {shapes}$"):
    get_config(variant)


@pytest.mark.full
@pytest.mark.parametrize(
  "variant, name",
  [
    ("3b,length=4096", "diff"),
    ("13b,length=2048", "transformer"),
    ("13b,length=2048", "diff_v2"),
  ],
)
def test_large_shapes_have_a_loss_and_its_gradient(variant, name, mesh):
  config = from_config_dict(base.twin(get_config(variant), name))
  functions = experiment.make_functions(config, mesh)

  loss, gradients = jax.eval_shape(
    jax.value_and_grad(functions.loss), *functions.arguments
  )

  assert loss.shape == ()
  assert num_elements(gradients) == parameter_count(config.model)


@pytest.fixture
def gpu_results():
  """Results of the GPU grid in which DIFF is 8% slower."""
  runs = []
  for run in grid.expand("throughput", experiment.EXPERIMENT.grids["gpu"], {}):
    transformer = {"forward": 50_000.0, "both": 7000.0}
    diff = {"forward": 46_000.0, "both": 6500.0}
    seconds = {"forward": [0.1, 0.2], "both": [0.1, 0.2]}
    measured = {
      "layers": 20,
      "tokens_per_second": {
        "transformer": transformer,
        "diff": diff,
        "diff_v2": transformer,
      },
      "seconds": dict.fromkeys(experiment.NAMES, seconds),
      "diff_forward": 0.92,
      "diff_both": 0.9286,
      "diff_v2_forward": 1.0,
      "diff_v2_both": 1.0,
    }
    entry = {
      "name": run.name,
      "variant": run.variant,
      "seed": run.seed,
      "parameters": parameter_count(run.config.model),
      "config": {"model.num_layers": run.config.model.num_layers},
      "results": measured,
    }
    runs.append(entry)
  gpu_results = {"baseline": "3b,length=2048", "config": {}, "runs": runs}
  gpu_results["summary"] = experiment.summarise(gpu_results)
  return gpu_results


def test_the_table_has_the_papers_ratios(gpu_results):
  text = table.markdown(experiment.EXPERIMENT, gpu_results)

  assert (
    "| 3b,length=2048 | 20 of 28 | forward | 50,000 | 46,000 | 50,000 | −8%"
    " | −9% | +0% |"
  ) in text
  paper = series.column(gpu_results["summary"], "paper's")
  assert paper == ["−9%", "−8%", "−9%", "−10%", "−5%", "−6%"]


def test_the_plot_has_the_papers_ratios(gpu_results):
  (axes,) = experiment.plot(gpu_results).axes

  _, labels = axes.get_legend_handles_labels()
  assert labels == ["DIFF", "DIFF V2", "DIFF in the paper"]
