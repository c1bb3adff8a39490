"""The operations inside `shard_map` and under automatic partitioning, on four of the tests' fake devices."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.ops.cross_entropy import fused_cross_entropy, per_token_cross_entropy, reference_cross_entropy
from diffjax.ops.diff_attention import chunked, diff_attention
from diffjax.ops.diff_attention.tpu import chip

DATA = P("data")


@pytest.fixture
def mesh():
  return Mesh(jax.devices()[:4], ("data",))


def _normal(seed: int, *shape: int):
  return jax.random.normal(jax.random.key(seed), shape)


def _loss_arguments():
  targets = jax.random.randint(jax.random.key(2), (8, 37), 0, 50)
  return _normal(0, 8, 37, 16), _normal(1, 50, 16), targets, jax.random.uniform(jax.random.key(3), (8, 37))


def _plain(hidden, embedding, targets, weights):
  loss = lambda h, e, w: reference_cross_entropy(h, e, targets, w, z_loss=1e-2)[0]
  return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(hidden, embedding, weights)


def _assert_close(actual, expected):
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_cross_entropy_in_shard_map_sums_the_embedding_gradient_once(mesh):
  hidden, embedding, targets, weights = _loss_arguments()
  local = lambda h, e, w, t: jax.lax.psum(fused_cross_entropy(h, e, t, w, z_loss=1e-2, chunk=16)[0], "data")
  mapped = jax.shard_map(local, mesh=mesh, in_specs=(DATA, P(), DATA, DATA), out_specs=P())
  compiled = jax.jit(jax.value_and_grad(mapped, (0, 1, 2))).lower(hidden, embedding, weights, targets).compile()
  _assert_close(compiled(hidden, embedding, weights, targets), _plain(hidden, embedding, targets, weights))
  program = compiled.as_text()
  entry = program[program.index("ENTRY") :]
  assert " while(" in entry
  # A loop's body is a computation of its own: every collective of the program is in the entry, outside of it.
  assert program.count(" all-reduce(") == entry.count(" all-reduce(") > 0
  assert "all-gather" not in program


def test_cross_entropy_partitioned_automatically(mesh):
  hidden, embedding, targets, weights = _loss_arguments()
  put = lambda x: jax.device_put(x, NamedSharding(mesh, DATA))
  loss = lambda h, e, w, t: fused_cross_entropy(h, e, t, w, z_loss=1e-2, chunk=64)[0]
  arguments = put(hidden), embedding, put(weights), put(targets)
  compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arguments).compile()
  _assert_close(compiled(*arguments), _plain(hidden, embedding, targets, weights))
  assert "all-gather" not in compiled.as_text()


def test_per_token_cross_entropy_in_shard_map(mesh):
  hidden, embedding, targets, weights = _loss_arguments()
  local = lambda h, e, t: per_token_cross_entropy(h, e, t, chunk=16)
  nll = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(DATA, P(), DATA), out_specs=DATA))(hidden, embedding, targets)
  _assert_close(jnp.sum(weights * nll), reference_cross_entropy(hidden, embedding, targets, weights)[0])


@pytest.mark.parametrize("implementation", ["chunked", "two_call", "pallas_tpu"])
def test_attention_in_shard_map(mesh, implementation, monkeypatch):
  monkeypatch.setattr(chunked, "_SHORT_BLOCK", 8)  # bands and groups of heads, which scan
  monkeypatch.setattr(chunked, "_MAX_BANDS", 2)
  monkeypatch.setattr(chunked, "_BLOCK_LOGITS", 2000)
  ids = jnp.broadcast_to(jnp.arange(37) // 10, (4, 37))
  # One λ that all devices share, as the model's is: its gradient is the sum over all of them.
  arguments = _normal(0, 4, 37, 4, 2, 8), _normal(1, 4, 37, 2, 2, 8), _normal(2, 4, 37, 2, 16), jnp.float32(0.4)
  loss = lambda name, ids, *a: jnp.sum(jnp.sin(diff_attention(*a, q_segment_ids=ids, implementation=name)))
  mapped = lambda ids, *a: jax.lax.psum(loss(implementation, ids, *a), "data")
  mapped = jax.shard_map(mapped, mesh=mesh, in_specs=(DATA, DATA, DATA, DATA, P()), out_specs=P())
  expected = jax.jit(jax.value_and_grad(lambda *a: loss("reference", ids, *a), (0, 1, 2, 3)))(*arguments)
  with chip.interpreted():
    _assert_close(jax.jit(jax.value_and_grad(mapped, (1, 2, 3, 4)))(ids, *arguments), expected)
