"""A run's program is made without computing anything, and what is lowered ahead of time is what trains."""

import dataclasses

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


def test_building_compiles_nothing():
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name)
  )
  try:
    build(CONFIG, make_mesh(CONFIG.mesh)).lower_train_step()
  finally:
    jax.monitoring.clear_event_listeners()
  assert (
    "/jax/core/compile/jaxpr_trace_duration" in compiled
  )  # else nothing would be counted
  assert "/jax/core/compile/backend_compile_duration" not in compiled


def test_the_state_is_as_announced(program):
  announced, made = program.abstract_state, program.init()
  assert jax.tree.structure(announced) == jax.tree.structure(made)
  for expected, leaf in zip(
    jax.tree.leaves(announced), jax.tree.leaves(made), strict=True
  ):
    assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
    assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)


def test_the_step_that_is_lowered_is_the_step_that_trains(program):
  ints = np.ones((8, 16), np.int32)
  batch = dict(
    tokens=ints,
    targets=ints,
    segment_ids=ints,
    positions=ints,
    weights=ints.astype(np.float32),
  )
  with jax.set_mesh(program.mesh), nn.logical_axis_rules(rules.ACTIVATIONS):
    running = program._jitted.train_step.lower(
      program.init(), put_batch(batch, program.mesh)
    ).as_text()
  assert program.lower_train_step().as_text() == running


def test_a_program_is_of_its_config_and_frozen(program):
  assert program.config is CONFIG and program.mesh.shape["fsdp"] == 4
  with pytest.raises(dataclasses.FrozenInstanceError):
    program.model = None
