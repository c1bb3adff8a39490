"""An implementation of a user's own: two functions, ten lines, and the operation does the rest."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.ops.diff_attention import (
  Arrays,
  Implementation,
  Saved,
  diff_attention,
  implementations,
  register,
)
from diffjax.ops.diff_attention.mask import positions


def _forward(arrays, mask, options):
  """For two maps with keys of their own, and as many key heads as query heads."""
  rows, keys = (
    positions(mask.q_length, mask.first_position(arrays.offset)),
    positions(mask.kv_length, 0),
  )
  seen = mask.between(rows, keys, arrays.q_ids, arrays.kv_ids)[:, None, None]
  logits = jnp.einsum("bthgd,bshgd->bhgts", arrays.q, arrays.k) * options.scale
  first, second = jnp.moveaxis(
    jax.nn.softmax(jnp.where(seen, logits, -1e30)) * seen, 2, 0
  )
  return Saved(
    jnp.einsum(
      "bhts,bshv->bthv",
      first - jnp.moveaxis(arrays.lam, 2, 1)[..., None] * second,
      arrays.v,
    )
  )


def _backward(arrays, mask, options, saved, d_out):
  output = lambda *inputs: (
    _forward(Arrays(*inputs, *arrays[4:]), mask, options).out
  )
  return jax.vjp(output, *arrays[:4])[1](d_out)


@pytest.fixture
def toy(monkeypatch):
  monkeypatch.setattr(implementations.REGISTRY, "_registered", {})
  register("toy", Implementation(_forward, _backward))
  return "toy"


IDS = jnp.broadcast_to(jnp.arange(12) // 5, (4, 12))


def _arguments():
  normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
  return (
    normal(0, 4, 12, 4, 2, 6),
    normal(1, 4, 12, 4, 2, 6),
    normal(2, 4, 12, 4, 8),
    jnp.float32(0.4),
  )


def _value_and_gradients(implementation, **options):
  loss = lambda *a: jnp.sum(
    jnp.sin(diff_attention(*a, implementation=implementation, **options))
  )
  return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*_arguments())


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"q_segment_ids": IDS, "window": 3},
    {"q_offset": np.array([-3, 0, 2, 5], np.int32), "scale": 0.7},
    {"causal": False, "window": 4},
  ],
  ids=[
    "causal",
    "segments_window",
    "offset_per_row_scale",
    "window_not_causal",
  ],
)
def test_two_functions_give_gradients_masks_and_lambdas_of_any_shape(
  toy, options
):
  chex.assert_trees_all_close(
    _value_and_gradients(toy, **options),
    _value_and_gradients("reference", **options),
    rtol=1e-5,
    atol=1e-5,
  )


def test_two_functions_give_shard_map(toy):
  """One λ that all devices share: its gradient is the sum over them. Written out by hand, and as an argument."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "columns"))
  heads, ids = P("rows", None, "columns"), P("rows")
  local = lambda ids, *a: jax.lax.psum(
    jnp.sum(jnp.sin(diff_attention(*a, q_segment_ids=ids, implementation=toy))),
    ("rows", "columns"),
  )
  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=(ids, heads, heads, heads, P()), out_specs=P()
  )
  expected = _value_and_gradients("reference", q_segment_ids=IDS)
  chex.assert_trees_all_close(
    jax.jit(jax.value_and_grad(mapped, (1, 2, 3, 4)))(IDS, *_arguments()),
    expected,
    rtol=1e-5,
    atol=1e-5,
  )
  for spec in (heads, P("rows", "columns")):
    actual = _value_and_gradients(
      toy, q_segment_ids=IDS, sharding=NamedSharding(mesh, spec)
    )
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_what_is_saved_is_named_for_remat(toy):
  """Kept by name, the output is not computed again where something after it needs it."""
  saved = []
  loss = lambda *a: jnp.sum(jnp.sin(diff_attention(*a, implementation=toy)))
  for name in ("diff_attention_out", "other"):
    policy = jax.checkpoint_policies.save_only_these_names(name)
    gradient = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(
      *_arguments()
    )
    saved.append(str(gradient).count(" exp "))
  assert saved[0] < saved[1]


def test_a_name_is_taken_once(toy):
  for name in ("toy", "chunked", "auto"):
    with pytest.raises(
      ValueError, match=f"^name must be a new one, got '{name}'"
    ):
      register(name, Implementation(_forward))
