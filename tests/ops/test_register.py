"""An implementation of a user: two functions, which `diff_attention` completes.

It adds gradients of the right shapes, masks, `shard_map` and remat.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.ops.diff_attention import (
  Implementation,
  Saved,
  diff_attention,
  implementations,
  register,
)
from diffjax.ops.diff_attention.mask import positions
from tests.harness.tolerances import FLOAT32_LAYER


def toy_forward(arrays, mask, options):
  """Returns the output of differential attention, written with einsum.

  It supports two maps with keys of their own, and one head per key head.
  """
  q_positions = positions(mask.q_length, mask.first_position(arrays.offset))
  kv_positions = positions(mask.kv_length, 0)
  visible = mask.between(q_positions, kv_positions, arrays.q_ids, arrays.kv_ids)
  visible = visible[:, None, None]
  logits = jnp.einsum("bthgd,bshgd->bhgts", arrays.q, arrays.k) * options.scale
  maps = jax.nn.softmax(jnp.where(visible, logits, -1e30)) * visible
  lam = jnp.moveaxis(arrays.lam, 2, 1)[..., None]
  weights = maps[:, :, 0] - lam * maps[:, :, 1]
  return Saved(jnp.einsum("bhts,bshv->bthv", weights, arrays.v))


def toy_backward(arrays, mask, options, saved, d_out):
  """Returns the gradients of q, k, v and λ."""

  def output(q, k, v, lam):
    inputs = arrays._replace(q=q, k=k, v=v, lam=lam)
    return toy_forward(inputs, mask, options).out

  _, vjp = jax.vjp(output, arrays.q, arrays.k, arrays.v, arrays.lam)
  return vjp(d_out)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
  """Registers the implementation "toy" for a test."""
  registry = implementations.Registry(implementations.REGISTRY.built_in)
  monkeypatch.setattr(implementations, "REGISTRY", registry)
  register("toy", Implementation(toy_forward, toy_backward))


# Documents of 5, 5 and 2 tokens in each of 4 sequences.
SEGMENT_IDS = np.tile(np.arange(12, dtype=np.int32) // 5, (4, 1))


def make_arguments() -> tuple[np.ndarray, ...]:
  """Returns q, k, v and one λ for all heads."""
  rng = np.random.default_rng(0)
  q = rng.standard_normal((4, 12, 4, 2, 6), np.float32)
  k = rng.standard_normal((4, 12, 4, 2, 6), np.float32)
  v = rng.standard_normal((4, 12, 4, 8), np.float32)
  return q, k, v, np.float32(0.4)


def loss_and_gradients(implementation: str, **options):
  """Returns a loss of the output, and the gradients of q, k, v and λ."""

  def loss(*arrays):
    out = diff_attention(*arrays, implementation=implementation, **options)
    return jnp.sum(jnp.sin(out))

  program = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
  return program(*make_arguments())


@pytest.mark.parametrize(
  "options",
  [
    pytest.param({}, id="causal"),
    pytest.param(
      {"q_segment_ids": SEGMENT_IDS, "window": 3}, id="segments_window"
    ),
    pytest.param(
      {"q_offset": np.array([-3, 0, 2, 5], np.int32), "scale": 0.7},
      id="offset_per_row_scale",
    ),
    pytest.param({"causal": False, "window": 4}, id="window_not_causal"),
  ],
)
def test_registered_implementation_has_masks_and_gradients(options):
  """`options` are arguments of `diff_attention`."""
  actual = loss_and_gradients("toy", **options)

  expected = loss_and_gradients("reference", **options)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


@pytest.fixture
def mesh():
  """A mesh of 2 × 2 devices."""
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  return Mesh(devices, ("rows", "columns"))


def test_registered_implementation_works_in_shard_map(mesh):
  """The fixture `toy` has registered the implementation "toy".

  All devices share λ, so its gradient is a sum over devices.
  """

  def local_loss(q, k, v, lam, segment_ids):
    out = diff_attention(
      q, k, v, lam, q_segment_ids=segment_ids, implementation="toy"
    )
    return jax.lax.psum(jnp.sum(jnp.sin(out)), ("rows", "columns"))

  # The mesh axes divide sequences and heads.
  heads = P("rows", None, "columns")
  loss = jax.shard_map(
    local_loss,
    mesh=mesh,
    in_specs=(heads, heads, heads, P(), P("rows")),
    out_specs=P(),
  )
  program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))

  actual = program(*make_arguments(), SEGMENT_IDS)

  # The same loss without a mesh.
  expected = loss_and_gradients("reference", q_segment_ids=SEGMENT_IDS)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


@pytest.mark.parametrize(
  "spec",
  [
    pytest.param(P("rows", None, "columns"), id="batch_and_heads"),
    pytest.param(P("rows", "columns"), id="batch_and_tokens"),
  ],
)
def test_registered_implementation_takes_a_sharding(mesh, spec):
  """`spec` says how q [batch, tokens, heads] is divided over the devices."""
  actual = loss_and_gradients(
    "toy", q_segment_ids=SEGMENT_IDS, sharding=NamedSharding(mesh, spec)
  )

  expected = loss_and_gradients("reference", q_segment_ids=SEGMENT_IDS)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


def test_remat_by_name_does_not_repeat_a_registered_implementation():
  """A checkpoint that saves the output by its name does not compute it again.

  The fixture `toy` has registered the implementation "toy".
  """

  def loss(*arrays):
    return jnp.sum(jnp.sin(diff_attention(*arrays, implementation="toy")))

  def count_softmaxes(saved_name):
    policy = jax.checkpoint_policies.save_only_these_names(saved_name)
    gradient = jax.grad(jax.checkpoint(loss, policy=policy))
    program = str(jax.make_jaxpr(gradient)(*make_arguments()))
    # Each softmax has one exponential.
    return program.count(" exp ")

  # The forward pass, and the backward pass, which computes its weights again.
  assert count_softmaxes("diff_attention_out") == 2
  # Also the repeated forward pass.
  assert count_softmaxes("other") == 3


@pytest.mark.parametrize("name", ["toy", "chunked", "auto"])
def test_name_in_use_is_refused(name):
  """The fixture of all tests here has registered "toy"."""
  message = f"^name must be a new one, got '{name}'"
  with pytest.raises(ValueError, match=message):
    register(name, Implementation(toy_forward))
