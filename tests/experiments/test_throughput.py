"""Throughput: the same loss as training's, all three architectures timed, and no more layers than fit."""

import dataclasses
import functools
import importlib.util
import math
import types

import jax
import numpy as np
import pytest

from diffjax.config import MeshConfig, UserError, from_config_dict
from diffjax.model.flops import parameter_count
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build
from experiments import grid, plots, results
from experiments.throughput import experiment
from experiments.throughput.config import get_config

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)


@pytest.fixture
def mesh():
  return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture
def small():
  changes = {
    "model.num_layers": 4,
    "model.embed_dim": 32,
    "model.head_dim": 8,
    "model.ffn_dim": 48,
    "data.length": 32,
    "train.batch_size": 2,
    "train.steps": 3,
  }
  (run,) = grid.expand(
    "throughput", grid.Grid(("tiny,length=256",), "tiny,length=256"), changes
  )
  return run


def test_the_loss_is_that_of_training(small, mesh):
  config = small.config
  tokens, targets = map(np.asarray, experiment.batch(config))
  assert tokens.shape == (2, 32) and (tokens != targets).any()
  programs = experiment.compile_programs(config, mesh)
  params = programs.make()
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameter_count(
    config.model
  )
  ones = np.ones(tokens.shape, np.int32)
  rows = dict(
    tokens=tokens,
    targets=targets,
    segment_ids=ones,
    positions=np.cumsum(ones, axis=1) - 1,
    weights=np.float32(ones),
    bytes=np.float32(ones),
    hits=0.0 * ones,
  )
  found = build(config, mesh).eval_step(params, put_batch(rows, mesh))
  loss = float(programs.forward(params, tokens, targets))
  assert loss == pytest.approx(
    float(np.sum(found["nll"]) / np.sum(found["weight"])), rel=1e-5
  )
  value, gradients = programs.both(params, tokens, targets)
  assert float(value) == pytest.approx(loss, rel=1e-5) and all(
    np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients)
  )


@pytest.mark.full
def test_measuring(small, tmp_path):
  found = experiment.measure(str(tmp_path), small.config)
  assert found["layers"] == 4 and all(
    len(taken) == 3
    for kinds in found["seconds"].values()
    for taken in kinds.values()
  )
  assert found["tokens_per_second"]["diff"]["both"] == pytest.approx(
    64 / np.median(found["seconds"]["diff"]["both"])
  )
  assert found["diff_v2_forward"] == pytest.approx(
    np.median(found["seconds"]["transformer"]["forward"])
    / np.median(found["seconds"]["diff_v2"]["forward"])
  )
  assert found.keys() >= set(experiment.EXPERIMENT.metrics.values())


def test_layers_that_fit(small, mesh):
  """The compiler's plan grows by the same bytes with every layer; as many layers are taken as the limit has room for, and no more."""
  # A CPU, whose memory nobody asks for, would unroll these few layers; what has memory of its own scans them.
  scanned = dataclasses.replace(
    small.config,
    model=dataclasses.replace(small.config.model, remat="attention"),
  )
  needed = functools.cache(
    lambda layers: experiment._bytes(scanned, mesh, layers)
  )
  sizes = np.array([needed(layers) for layers in (2, 3, 4, 7)])
  np.testing.assert_allclose(
    np.diff(sizes) / [1, 1, 3], sizes[1] - sizes[0], rtol=0.05
  )
  for layers in (3, 4, 7):
    assert (
      experiment.layers_that_fit(9, needed(layers) * 1.01, needed) == layers
    )
  assert (
    experiment.layers_that_fit(4, 1e12, needed) == 4
    and experiment.layers_that_fit(2, 1.0, needed) == 2
  )
  assert (
    experiment.layers_that_fit(
      9, 1e12, lambda layers: needed(2) if layers == 2 else math.inf
    )
    == 2
  ), "a third is refused"
  for refused in (needed, lambda layers: math.inf):
    with pytest.raises(
      UserError,
      match="2 layers take more than the 0.0 GiB .* make train.batch_size smaller",
    ):
      experiment.layers_that_fit(4, 1e4, refused)


def test_the_plan_is_of_what_is_measured(small, monkeypatch):
  """The rows say how many layers of all three fit, and the memory of both passes in GiB; the compiler is made up."""
  a_layer = {"softmax": 1.0, "diff": 1.2, "diff_v2": 1.1}
  monkeypatch.setattr(
    experiment,
    "_compile",
    lambda config, mesh, kind: (
      config.model.num_layers,
      config.model.attention,
      kind,
    ),
  )
  monkeypatch.setattr(
    experiment,
    "_planned",
    lambda program: (
      program[0]
      * a_layer[program[1]]
      * (1 if program[2] == "forward" else 3)
      * 2**30
    ),
  )
  # Real tracing takes a second on a busy machine.
  clock = types.SimpleNamespace(perf_counter=lambda: 0.0)
  monkeypatch.setattr(experiment, "time", clock)
  plan = lambda gib: experiment._plan(
    jax.devices()[:2], 1, gib << 30, small.config
  )  # of a chip of two devices: each has half
  found = plan(28)
  assert [row.pop("compiled in") for row in found] == ["0 s"] * 3
  assert [list(row.values()) for row in found] == [
    ["transformer", "3 of 4", "3.00", "9.00", "14.00"],
    ["diff", "3 of 4", "3.60", "10.80", "14.00"],
    ["diff_v2", "3 of 4", "3.30", "9.90", "14.00"],
  ]
  assert list(found[0]) == [
    "architecture",
    "layers",
    "forward, GiB",
    "forward + backward, GiB",
    "of",
  ]
  with pytest.raises(UserError, match="2 layers take more than the 6.3 GiB"):
    plan(14)


@needs_libtpu
@pytest.mark.full
def test_what_is_measured_compiles_for_tpus_that_are_not_there(small):
  model = dataclasses.replace(
    small.config.model, num_layers=2, vocab_size=1 << 18
  )
  found = experiment.plan(
    dataclasses.replace(small.config, model=model), "v5e:1x1"
  )
  assert [row["architecture"] for row in found] == [
    "transformer",
    "diff",
    "diff_v2",
  ]
  for row in found:
    assert (
      row["layers"] == "2 of 2"
      and 0
      < float(row["forward, GiB"])
      < float(row["forward + backward, GiB"])
      < float(row["of"])
      == 15.75
    )


@needs_libtpu
@pytest.mark.full
def test_what_does_not_fit_on_tpus_that_are_not_there(small):
  wide = dataclasses.replace(
    small.config.model, embed_dim=1 << 15, ffn_dim=1 << 15
  )
  with pytest.raises(UserError, match="2 layers take more than the 14.2 GiB"):
    experiment.plan(dataclasses.replace(small.config, model=wide), "v5e:1x1")


def test_a_device_of_little_memory(small, mesh, tmp_path, monkeypatch):
  """The architecture that needs most memory decides the number of layers, in nine tenths of the memory."""
  needed = {"softmax": 100, "diff": 120, "diff_v2": 110}  # a layer

  class Device:
    memory_stats = staticmethod(lambda: {"bytes_limit": 3 * 120 / 0.9 + 1})

  monkeypatch.setattr(
    experiment,
    "_bytes",
    lambda config, _, layers: layers * needed[config.model.attention],
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [Device])
  monkeypatch.setattr("diffjax.parallel.mesh.make_mesh", lambda *_: mesh)
  monkeypatch.setattr(
    experiment,
    "compile_programs",
    lambda config, _: pytest.fail(f"{config.model.num_layers} layers"),
  )
  with pytest.raises(pytest.fail.Exception, match="3 layers"):
    experiment.measure(str(tmp_path), small.config)


def test_times_of_processes_that_share_a_cpu_are_refused(monkeypatch):
  monkeypatch.setenv("NPROC", "1")
  with pytest.raises(UserError, match="cannot be timed; measure one at a time"):
    experiment.measure("", from_config_dict(get_config("tiny,length=256")))


def test_shapes():
  config = from_config_dict(get_config("13b,length=2048"))
  assert (
    config.model.num_layers,
    config.data.length,
    config.train.batch_size,
  ) == (40, 2048, 4)
  assert (
    from_config_dict(get_config("3b,length=4096")).train.batch_size == 2
    and from_config_dict(get_config("3b,length=4096")).model.max_length == 4096
  )
  for variant in (
    "3b@3k",
    "3b,length=2k",
    "3b,length=0",
    "diff,length=2048",
    "",
  ):
    with pytest.raises(
      UserError, match=r"; variants are tiny\|125m\|3b\|13b\[,length=NUMBER\]$"
    ):
      get_config(variant)


@pytest.mark.full
def test_every_large_shape_has_its_loss(mesh):
  """Shapes alone: parameters of the three twins, and the gradient of the loss."""
  for variant, name in (
    ("3b,length=4096", "diff"),
    ("13b,length=2048", "transformer"),
    ("13b,length=2048", "diff_v2"),
  ):
    config = from_config_dict(experiment.base.twin(get_config(variant), name))
    _, loss, arguments = experiment._parts(config, mesh)
    value, gradients = jax.eval_shape(jax.value_and_grad(loss), *arguments)
    assert value.shape == () and sum(
      leaf.size for leaf in jax.tree.leaves(gradients)
    ) == parameter_count(config.model)


def test_the_table_stands_beside_the_papers(tmp_path):
  runs = grid.expand("throughput", experiment.EXPERIMENT.grids["gpu"], {})
  entries = []
  for run in runs:
    speed = {
      "transformer": {"forward": 50_000.0, "both": 7000.0},
      "diff": {"forward": 46_000.0, "both": 6500.0},
    }
    speed["diff_v2"] = speed["transformer"]
    ratios = {
      "diff_forward": 0.92,
      "diff_both": 0.9286,
      "diff_v2_forward": 1.0,
      "diff_v2_both": 1.0,
    }
    seconds = {
      name: dict.fromkeys(kinds, [0.1, 0.2]) for name, kinds in speed.items()
    }
    found = {
      "layers": 20,
      "tokens_per_second": speed,
      "seconds": seconds,
      **ratios,
    }
    results.write_run(tmp_path / run.name, run, {}, found, 1.0, "a machine")
    entries.append(results.read_run(tmp_path / run.name, run, {}, ()))
  stored = results.write_folder(
    tmp_path / "results.json",
    "throughput",
    "gpu",
    runs[0].variant,
    entries,
    experiment.summarise,
  )
  lines = [
    line
    for line in results.table(experiment.EXPERIMENT, stored).splitlines()
    if "of" in line
  ]
  assert [line.split("|")[8].strip() for line in lines[-6:]] == [
    "−9%",
    "−8%",
    "−9%",
    "−10%",
    "−5%",
    "−6%",
  ]
  assert (
    lines[-6]
    == "| 3b,length=2048 | 20 of 28 | forward | 50,000 | 46,000 | 50,000 | −8% | −9% | +0% |"
  )
  plots.save(experiment.plot(stored), tmp_path)
  assert (tmp_path / "plot.png").stat().st_size > 10_000
