"""Building a program compiles nothing, and the step can be lowered alone."""

import dataclasses

import chex
import flax.linen as nn
import jax
import numpy as np
import pytest

from diffjax.config import (
  Config,
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.parallel import rules
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build

CONFIG = Config(
  model=ModelConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
  ),
  data=DataConfig(length=16),
  optimizer=OptimizerConfig(warmup_steps=0),
  train=TrainConfig(steps=10, batch_size=8),
  mesh=MeshConfig(data=2, fsdp=4),
)


@pytest.fixture(scope="module")
def program():
  return build(CONFIG, make_mesh(CONFIG.mesh))


def test_building_and_lowering_compile_nothing():
  """A step can then be lowered for devices that this machine lacks."""
  events = []

  # JAX reports each trace and each compilation as an event with a name.
  def record(name, *_, **__):
    events.append(name)

  jax.monitoring.register_event_duration_secs_listener(record)
  try:
    build(CONFIG, make_mesh(CONFIG.mesh)).lower_train_step()
  finally:
    jax.monitoring.clear_event_listeners()

  # The listener works, because it has recorded that the step is traced.
  assert "/jax/core/compile/jaxpr_trace_duration" in events
  assert "/jax/core/compile/backend_compile_duration" not in events


def test_the_initial_state_has_the_abstract_shapes_and_shardings(program):
  """Checkpoints are restored as `abstract_state` says."""
  state = program.init()

  chex.assert_trees_all_equal_shapes_and_dtypes(state, program.abstract_state)

  def assert_sharding(leaf, shape):
    assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)

  jax.tree.map(assert_sharding, state, program.abstract_state)


def test_the_lowered_step_is_the_step_that_trains(program):
  """`lower_train_step` needs only shapes, so it works for absent devices.

  Training lowers the same function with a state and a batch of arrays.
  """
  batch_shape = (8, 16)
  batch = {
    "tokens": np.ones(batch_shape, np.int32),
    "targets": np.ones(batch_shape, np.int32),
    "segment_ids": np.ones(batch_shape, np.int32),
    "positions": np.ones(batch_shape, np.int32),
    "weights": np.ones(batch_shape, np.float32),
  }
  train_step = program._jitted.train_step
  # The step shards its activations by these rules, over this mesh.
  with jax.set_mesh(program.mesh), nn.logical_axis_rules(rules.ACTIVATIONS):
    training_step = train_step.lower(
      program.init(), put_batch(batch, program.mesh)
    )

  lowered_step = program.lower_train_step()

  assert lowered_step.as_text() == training_step.as_text()


def test_a_program_cannot_be_changed(program):
  with pytest.raises(dataclasses.FrozenInstanceError):
    program.model = None


def test_a_program_has_its_config_and_its_mesh(program):
  assert program.config is CONFIG
  assert program.mesh.shape["fsdp"] == 4
