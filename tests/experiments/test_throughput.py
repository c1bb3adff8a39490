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
from tests.harness.tolerances import FLOAT32_LAYER

GIB = 2**30

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
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
  one = grid.Grid(variants=(variant,), baseline=variant)
  (run,) = grid.expand("throughput", one, changes)
  return run.config


@pytest.fixture(scope="module")
def programs(small_config, mesh):
  """The programs that are timed."""
  return experiment.compile_programs(small_config, mesh)


def num_elements(tree) -> int:
  """Returns the number of elements of all arrays in a tree."""
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def evaluation_loss(config, mesh, params, tokens, targets) -> float:
  """Returns the mean loss per token that evaluation in training computes."""
  # Each row is one document.
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
  sums = build(config, mesh).eval_step(params, put_batch(rows, mesh))
  return float(np.sum(sums["nll"]) / np.sum(sums["weight"]))


@pytest.mark.full
def test_the_timed_loss_is_the_loss_of_training(small_config, mesh, programs):
  tokens, targets = experiment.batch(small_config)
  params = programs.make_params()
  forward = programs.passes["forward"]
  forward_and_backward = programs.passes["both"]

  forward_loss = forward(params, tokens, targets)
  loss, _ = forward_and_backward(params, tokens, targets)

  expected = evaluation_loss(small_config, mesh, params, tokens, targets)
  tolerance = FLOAT32_LAYER["rtol"]
  assert float(forward_loss) == pytest.approx(expected, rel=tolerance)
  assert float(loss) == pytest.approx(float(forward_loss), rel=tolerance)


def test_the_timed_backward_pass_has_gradients_of_all_parameters(
  small_config, programs
):
  tokens, targets = experiment.batch(small_config)
  forward_and_backward = programs.passes["both"]

  _, gradients = forward_and_backward(programs.make_params(), tokens, targets)

  assert num_elements(gradients) == parameter_count(small_config.model)
  for gradient in jax.tree.leaves(gradients):
    assert np.abs(gradient).max() > 0


@pytest.fixture(scope="module")
def measured(small_config):
  """The result of the experiment for the small shape."""
  return experiment.measure(workdir="", config=small_config)


@pytest.mark.full
def test_speeds_are_tokens_over_median_times(small_config, measured):
  # "both" is the forward and the backward pass.
  seconds_of_calls = measured["seconds"]["diff"]["both"]
  assert len(seconds_of_calls) == small_config.train.steps
  tokens_per_call = small_config.train.batch_size * small_config.data.length
  expected = tokens_per_call / np.median(seconds_of_calls)
  actual = measured["tokens_per_second"]["diff"]["both"]
  assert actual == pytest.approx(expected)


@pytest.mark.full
def test_ratios_of_speeds_are_inverse_ratios_of_times(small_config, measured):
  """A ratio is the speed of an architecture over the Transformer's speed."""
  transformer_seconds = np.median(measured["seconds"]["transformer"]["forward"])
  diff_v2_seconds = np.median(measured["seconds"]["diff_v2"]["forward"])
  ratio = transformer_seconds / diff_v2_seconds
  assert measured["diff_v2_forward"] == pytest.approx(ratio)
  assert measured.keys() >= set(experiment.EXPERIMENT.metrics.values())
  # The memory of a CPU is unknown, so all layers are timed.
  assert measured["layers"] == small_config.model.num_layers


# Compilation takes seconds.
@functools.cache
def bytes_of_scanned_layers(config, mesh, num_layers):
  """Returns the memory of the forward and backward pass of a model."""
  # Without rematerialization, few layers are unrolled on a CPU. With it they
  # are scanned, as on GPUs and TPUs.
  model = dataclasses.replace(config.model, remat="attention")
  scanned = dataclasses.replace(config, model=model)
  with_layers = experiment.with_layers(scanned, num_layers)
  return experiment.compiled_bytes(with_layers, mesh, "both")


@pytest.mark.full
def test_every_layer_takes_the_same_memory(small_config, mesh):
  bytes_of_2 = bytes_of_scanned_layers(small_config, mesh, 2)
  bytes_of_3 = bytes_of_scanned_layers(small_config, mesh, 3)
  bytes_of_7 = bytes_of_scanned_layers(small_config, mesh, 7)

  third_layer = bytes_of_3 - bytes_of_2
  mean_of_layers_4_to_7 = (bytes_of_7 - bytes_of_3) / 4
  assert mean_of_layers_4_to_7 == pytest.approx(third_layer, rel=0.05)


@pytest.mark.parametrize("num_layers", [3, 7])
def test_layers_that_fit_are_predicted_from_two_and_three_layers(
  small_config, mesh, num_layers
):
  """Every further layer takes the same memory as the third one."""

  def needed_bytes(layers):
    return bytes_of_scanned_layers(small_config, mesh, layers)

  # One percent is much less than the memory of a layer.
  limit = 1.01 * needed_bytes(num_layers)

  actual = experiment.layers_that_fit(9, limit, needed_bytes)

  assert actual == num_layers


def needs_100_bytes_per_layer(layers):
  return 100.0 * layers


def test_only_as_many_layers_are_timed_as_fit_the_memory():
  actual = experiment.layers_that_fit(
    layers=9, limit=399, needed=needs_100_bytes_per_layer
  )

  # Three layers take 300 bytes, and four take 400.
  assert actual == 3


def test_all_layers_are_timed_if_they_fit_the_memory():
  actual = experiment.layers_that_fit(
    layers=4, limit=1e12, needed=needs_100_bytes_per_layer
  )

  assert actual == 4


def test_the_memory_of_a_model_with_two_layers_is_not_checked():
  """No smaller number of layers is tried, so there is nothing to choose."""
  actual = experiment.layers_that_fit(
    layers=2, limit=1, needed=needs_100_bytes_per_layer
  )

  assert actual == 2


def test_two_layers_fit_if_the_compiler_refuses_three():
  def needed_bytes(layers):
    if layers == 2:
      return 100.0
    # The compiler runs out of memory.
    return math.inf

  actual = experiment.layers_that_fit(layers=9, limit=1e12, needed=needed_bytes)

  assert actual == 2


def test_an_error_is_raised_if_two_layers_do_not_fit():
  # 99 bytes are 0.0 GiB.
  message = (
    "2 layers take more than the 0.0 GiB .* make train.batch_size smaller"
  )

  with pytest.raises(UserError, match=message):
    experiment.layers_that_fit(
      layers=4, limit=99, needed=needs_100_bytes_per_layer
    )


def test_an_error_is_raised_if_the_compiler_refuses_two_layers():
  def needed_bytes(layers):
    # The compiler runs out of memory.
    return math.inf

  with pytest.raises(UserError, match="2 layers take more than the 3.0 GiB"):
    experiment.layers_that_fit(layers=4, limit=3 * GIB, needed=needed_bytes)


def twice_as_much_for_diff(config, mesh, kind):
  """Returns 2 GiB per layer of DIFF, 1 GiB of others; backward doubles it."""
  gib_per_layer = 1
  if config.model.attention == "diff":
    gib_per_layer = 2
  needed_bytes = config.model.num_layers * gib_per_layer * GIB
  if kind == "both":
    needed_bytes *= 2
  return needed_bytes


def test_the_largest_architecture_limits_the_layers(small_config, mesh):
  """DIFF takes 4 GiB per layer, and the other architectures 2 GiB.

  All architectures are timed with the same number of layers.
  """
  three_layers_of_diff = 3 * 4 * GIB
  # Programs can use only this part of a device's memory.
  memory = three_layers_of_diff / experiment.USABLE_MEMORY

  few_bytes = 1000
  with_enough_memory = experiment.layers_on_device(
    small_config, mesh, memory + few_bytes, needed_bytes=twice_as_much_for_diff
  )
  with_less_memory = experiment.layers_on_device(
    small_config, mesh, memory - few_bytes, needed_bytes=twice_as_much_for_diff
  )

  assert with_enough_memory == 3
  assert with_less_memory == 2


def test_the_memory_of_a_device_without_statistics_is_unknown():
  device = types.SimpleNamespace(memory_stats=lambda: None)

  assert experiment.memory_limit(device) is None


def test_all_layers_are_timed_if_the_memory_is_unknown(small_config, mesh):
  actual = experiment.layers_on_device(small_config, mesh, memory=None)

  # The model has four layers.
  assert actual == 4


def test_the_memory_limit_is_what_jax_can_allocate():
  device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 7})

  assert experiment.memory_limit(device) == 7


def test_a_plan_has_the_layers_and_the_memory_of_each_pass(small_config, mesh):
  """A layer of DIFF takes 2 GiB, or 4 GiB with backward. Others take half."""
  transformer, diff, diff_v2 = experiment.plan_rows(
    small_config, mesh, 14 * GIB, needed_bytes=twice_as_much_for_diff
  )

  # Four layers of DIFF would take 16 GiB, more than the device has.
  assert diff == {
    "architecture": "diff",
    "layers": "3 of 4",
    "forward, GiB": "6.00",
    "forward + backward, GiB": "12.00",
    # The memory of the device.
    "of": "14.00",
    "compiled in": "0 s",
  }
  half_as_much = {"forward, GiB": "3.00", "forward + backward, GiB": "6.00"}
  assert transformer == {**diff, "architecture": "transformer", **half_as_much}
  assert diff_v2 == {**diff, "architecture": "diff_v2", **half_as_much}


def test_a_plan_needs_memory_for_two_layers(small_config, mesh):
  # Two layers of DIFF take 8 GiB. Nine tenths of 8 GiB are 7.2 GiB.
  with pytest.raises(UserError, match="2 layers take more than the 7.2 GiB"):
    experiment.plan_rows(
      small_config, mesh, 8 * GIB, needed_bytes=twice_as_much_for_diff
    )


@needs_libtpu
@pytest.mark.full
def test_the_programs_compile_for_tpus_that_are_not_attached(small_config):
  # A small vocabulary would take less than 0.01 GiB, which is shown as 0.
  model = dataclasses.replace(
    small_config.model, num_layers=2, vocab_size=262_144
  )
  config = dataclasses.replace(small_config, model=model)
  one_v5e_chip = "v5e:1x1"
  gib_of_v5e = 15.75

  rows = experiment.plan(config, one_v5e_chip)

  names = series.column(rows, "architecture")
  assert names == ["transformer", "diff", "diff_v2"]
  for row in rows:
    assert row["layers"] == "2 of 2"
    # The column "of" is the memory of the device.
    assert row["of"] == f"{gib_of_v5e}"
    forward_gib = float(row["forward, GiB"])
    both_passes_gib = float(row["forward + backward, GiB"])
    assert 0 < forward_gib < both_passes_gib < gib_of_v5e


@needs_libtpu
@pytest.mark.full
def test_a_model_that_is_too_large_for_a_tpu_is_refused(small_config):
  model = dataclasses.replace(
    small_config.model, embed_dim=1 << 15, ffn_dim=1 << 15
  )
  config = dataclasses.replace(small_config, model=model)

  # A v5e chip has 15.75 GiB. Nine tenths of the memory are used.
  with pytest.raises(UserError, match="2 layers take more than the 14.2 GiB"):
    experiment.plan(config, "v5e:1x1")


def test_runs_that_share_a_cpu_are_not_timed(monkeypatch):
  # With NPROC, experiments.run divides the cores among runs side by side.
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
def test_large_shapes_have_the_papers_sizes(variant, layers, length, rows):
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
  "shape, architecture",
  [
    ("3b,length=4096", "diff"),
    ("13b,length=2048", "transformer"),
    ("13b,length=2048", "diff_v2"),
  ],
)
def test_models_of_large_shapes_have_gradients_of_all_parameters(
  shape, architecture, mesh
):
  """Only shapes are computed, since the parameters do not fit this machine."""
  model_config = base.twin(get_config(shape), architecture)
  config = from_config_dict(model_config)
  functions = experiment.make_functions(config, mesh)

  loss_and_gradients = jax.value_and_grad(functions.loss)
  loss, gradients = jax.eval_shape(loss_and_gradients, *functions.arguments)

  assert loss.shape == ()
  assert num_elements(gradients) == parameter_count(config.model)


@pytest.fixture
def gpu_results():
  """A results.json of the GPU grid: DIFF processes 8% fewer tokens forward."""
  runs = []
  transformer = {"forward": 50_000.0, "both": 7000.0}
  diff = {"forward": 46_000.0, "both": 6500.0}
  seconds = {"forward": [0.1, 0.2], "both": [0.1, 0.2]}
  for run in grid.expand("throughput", experiment.EXPERIMENT.grids["gpu"], {}):
    measured = {
      "layers": 20,
      "tokens_per_second": {
        "transformer": transformer,
        "diff": diff,
        "diff_v2": transformer,
      },
      "seconds": dict.fromkeys(experiment.NAMES, seconds),
      "diff_forward": 46_000 / 50_000,
      "diff_both": 6500 / 7000,
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


def test_the_table_has_speeds_and_their_differences(gpu_results):
  """`gpu_results` has the speeds of 20 layers of models with 28 layers."""
  text = table.markdown(experiment.EXPERIMENT, gpu_results)

  # 46,000 tokens/s are 8% fewer than 50,000. The paper's speeds differ by 9%.
  forward_row = {
    "shape": "3b,length=2048",
    "layers": "20 of 28",
    "pass": "forward",
    "Transformer (tokens/s)": "50,000",
    "DIFF (tokens/s)": "46,000",
    "DIFF V2 (tokens/s)": "50,000",
    "DIFF − Transformer": "−8%",
    "paper's": "−9%",
    "V2 − Transformer": "+0%",
  }
  assert f"| {' | '.join(forward_row.values())} |" in text.splitlines()


def test_the_summary_has_the_papers_differences(gpu_results):
  differences = series.column(gpu_results["summary"], "paper's")

  # Each of three shapes has the forward pass alone, and both passes.
  assert differences == ["−9%", "−8%", "−9%", "−10%", "−5%", "−6%"]


def test_the_plot_has_the_papers_ratios(gpu_results):
  (axes,) = experiment.plot(gpu_results).axes

  _, labels = axes.get_legend_handles_labels()
  assert labels == ["DIFF", "DIFF V2", "DIFF in the paper"]
