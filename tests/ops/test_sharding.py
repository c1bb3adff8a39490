"""The operations inside `shard_map`, and with a `sharding` argument.

They run on four of the tests' eight fake devices.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.ops.cross_entropy import (
  fused_cross_entropy,
  per_token_cross_entropy,
  reference_cross_entropy,
)
from diffjax.ops.diff_attention import (
  balanced_order,
  chunked,
  decode_attention,
  diff_attention,
)
from diffjax.ops.diff_attention.tpu import chip
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_MODEL

DATA = P("data")


def normal(seed: int, *shape: int) -> np.ndarray:
  """Returns normally distributed numbers in float32."""
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape, np.float32)


@pytest.fixture
def mesh():
  """A mesh of four devices, which share the sequences of a batch."""
  return Mesh(jax.devices()[:4], ("data",))


def make_loss_arguments() -> tuple[np.ndarray, ...]:
  """Returns hidden states, embedding, targets and weights of 8 × 37 tokens."""
  hidden = normal(0, 8, 37, 16)
  embedding = normal(1, 50, 16)
  rng = np.random.default_rng(2)
  targets = rng.integers(0, 50, (8, 37), np.int32)
  weights = rng.random((8, 37), np.float32)
  return hidden, embedding, targets, weights


def loss_and_gradients_of_cross_entropy(cross_entropy):
  """Returns a jitted function of the arguments of a loss.

  The gradients are those of hidden states, embedding and weights.
  """
  return jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1, 3)))


def reference_loss(hidden, embedding, targets, weights):
  """Returns the loss by its definition, with a z-loss of 0.01."""
  loss, _ = reference_cross_entropy(
    hidden, embedding, targets, weights, z_loss=1e-2
  )
  return loss


@pytest.fixture
def cross_entropy_in_shard_map(mesh):
  """The compiled loss and gradients, for chunks of 16 tokens per device."""

  def local_loss(hidden, embedding, targets, weights):
    loss, _ = fused_cross_entropy(
      hidden, embedding, targets, weights, z_loss=1e-2, chunk=16
    )
    return jax.lax.psum(loss, "data")

  loss = jax.shard_map(
    local_loss, mesh=mesh, in_specs=(DATA, P(), DATA, DATA), out_specs=P()
  )
  program = loss_and_gradients_of_cross_entropy(loss)
  return program.lower(*make_loss_arguments()).compile()


def test_cross_entropy_in_shard_map_equals_one_device(
  cross_entropy_in_shard_map,
):
  arguments = make_loss_arguments()

  actual = cross_entropy_in_shard_map(*arguments)

  expected = loss_and_gradients_of_cross_entropy(reference_loss)(*arguments)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)


def test_cross_entropy_in_shard_map_sums_the_embedding_gradient_once(
  cross_entropy_in_shard_map,
):
  """Summing it over devices for each chunk would take longer."""
  text = cross_entropy_in_shard_map.as_text()

  # The text has the bodies of loops before the entry computation.
  loop_bodies, _, entry_computation = text.partition("ENTRY")
  assert " while(" in entry_computation
  assert " all-reduce(" in entry_computation
  assert " all-reduce(" not in loop_bodies
  assert "all-gather" not in text


def test_cross_entropy_is_partitioned_automatically(mesh):
  """`jit` divides a loss if its arguments are divided over devices."""

  def loss(hidden, embedding, targets, weights):
    loss, _ = fused_cross_entropy(
      hidden, embedding, targets, weights, z_loss=1e-2, chunk=64
    )
    return loss

  arguments = make_loss_arguments()
  hidden, embedding, targets, weights = arguments
  sharding = NamedSharding(mesh, DATA)
  sharded_arguments = (
    jax.device_put(hidden, sharding),
    embedding,
    jax.device_put(targets, sharding),
    jax.device_put(weights, sharding),
  )
  program = loss_and_gradients_of_cross_entropy(loss)
  compiled = program.lower(*sharded_arguments).compile()

  actual = compiled(*sharded_arguments)

  expected = loss_and_gradients_of_cross_entropy(reference_loss)(*arguments)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)
  # No device gets the hidden states of others.
  assert "all-gather" not in compiled.as_text()


def test_per_token_cross_entropy_in_shard_map_equals_the_reference(mesh):
  """The losses of all tokens are compared by their weighted sum."""
  hidden, embedding, targets, weights = make_loss_arguments()
  mapped = jax.shard_map(
    functools.partial(per_token_cross_entropy, chunk=16),
    mesh=mesh,
    in_specs=(DATA, P(), DATA),
    out_specs=DATA,
  )

  losses = jax.jit(mapped)(hidden, embedding, targets)

  weighted_sum = np.sum(weights * np.asarray(losses))
  reference = jax.jit(reference_cross_entropy)
  expected, _ = reference(hidden, embedding, targets, weights)
  chex.assert_trees_all_close(weighted_sum, expected, **FLOAT32_MODEL)


@pytest.mark.parametrize(
  "implementation", ["chunked", "two_call", *full(["pallas_tpu"])]
)
def test_attention_in_shard_map_equals_one_device(
  mesh, implementation, monkeypatch
):
  """All devices share λ. Its gradient is a sum over devices."""
  # With limits this small, `chunked` loops over blocks of queries and heads.
  monkeypatch.setattr(chunked, "BLOCK_QUERIES", 8)
  monkeypatch.setattr(chunked, "MAX_BANDS", 2)
  monkeypatch.setattr(chunked, "MAX_BLOCK_LOGITS", 2000)
  B, T, H, K, num_maps, D, V = 4, 37, 4, 2, 2, 8, 16
  q = normal(0, B, T, H, num_maps, D)
  k = normal(1, B, T, K, num_maps, D)
  v = normal(2, B, T, K, V)
  lam = np.float32(0.4)
  segment_ids = np.tile(np.arange(T, dtype=np.int32) // 10, (B, 1))

  def local_loss(q, k, v, lam, segment_ids):
    out = diff_attention(
      q, k, v, lam, q_segment_ids=segment_ids, implementation=implementation
    )
    return jax.lax.psum(jnp.sum(jnp.sin(out)), "data")

  loss = jax.shard_map(
    local_loss,
    mesh=mesh,
    in_specs=(DATA, DATA, DATA, P(), DATA),
    out_specs=P(),
  )
  with chip.interpreted():
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    actual = program(q, k, v, lam, segment_ids)

  reference = loss_and_gradients(
    implementation="reference", q_segment_ids=segment_ids
  )
  expected = reference(q, k, v, lam)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)


# The next tests use a mesh with names of axes that diffjax does not use.
SEGMENT_IDS = np.tile(np.arange(16, dtype=np.int32) // 5, (4, 1))


def make_mesh(axis_type: AxisType = AxisType.Auto) -> Mesh:
  """Returns a mesh of 2 × 2 devices with axes "rows" and "columns"."""
  return jax.make_mesh(
    (2, 2),
    ("rows", "columns"),
    axis_types=(axis_type, axis_type),
    devices=jax.devices()[:4],
  )


def make_attention_arguments() -> tuple[np.ndarray, ...]:
  """Returns q, k, v and λ of 4 × 16 tokens."""
  q = normal(0, 4, 16, 4, 2, 8)
  k = normal(1, 4, 16, 2, 2, 8)
  v = normal(2, 4, 16, 2, 16)
  return q, k, v, np.float32(0.4)


def loss_and_gradients(**options: Any):
  """Returns a function of q, k, v and λ, with options of `diff_attention`."""

  def loss(*arguments):
    return jnp.sum(jnp.sin(diff_attention(*arguments, **options)))

  return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))


@pytest.mark.parametrize(
  "spec",
  [
    pytest.param(P("rows", None, "columns"), id="batch_and_heads"),
    pytest.param(P("rows", "columns"), id="batch_and_tokens"),
    pytest.param(P(None, ("rows", "columns")), id="tokens"),
  ],
)
@pytest.mark.parametrize(
  "options",
  [
    pytest.param(
      {"q_segment_ids": SEGMENT_IDS, "window": 5}, id="segments_window"
    ),
    pytest.param({"causal": False}, id="not_causal", marks=pytest.mark.full),
    pytest.param(
      # An offset for each of four sequences.
      {"q_offset": np.array([0, 3, -2, 9], np.int32), "window": 6},
      id="offset_per_row_window",
      marks=pytest.mark.full,
    ),
    pytest.param({"q_offset": 2}, id="offset", marks=pytest.mark.full),
  ],
)
def test_sharding_does_not_change_attention(spec, options):
  """`spec` names the mesh axes that divide batch, tokens and heads.

  The mesh has 2 × 2 devices with the axes "rows" and "columns".
  """
  arguments = make_attention_arguments()
  options = options | {"implementation": "chunked"}
  sharding = NamedSharding(make_mesh(), spec)

  actual = loss_and_gradients(sharding=sharding, **options)(*arguments)

  expected = loss_and_gradients(**options)(*arguments)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)


# The ring of TPU kernels in test_ring.py has a sharding in the default tier.
@pytest.mark.parametrize(
  "implementation", ["reference", "two_call", *full(["pallas_tpu"])]
)
def test_sharding_works_with_each_implementation(implementation):
  arguments = make_attention_arguments()
  options = {"q_segment_ids": SEGMENT_IDS}
  sharding = NamedSharding(make_mesh(), P("rows", None, "columns"))

  with chip.interpreted():
    program = loss_and_gradients(
      implementation=implementation, sharding=sharding, **options
    )
    actual = program(*arguments)

  program = loss_and_gradients(implementation="reference", **options)
  expected = program(*arguments)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)


@pytest.mark.parametrize(
  "axis_type",
  [
    pytest.param(AxisType.Auto, id="auto"),
    pytest.param(AxisType.Explicit, id="explicit"),
  ],
)
def test_spec_refers_to_the_mesh_that_is_set(axis_type):
  """A PartitionSpec names axes of the mesh of `jax.set_mesh`."""
  q, k, v, lam = make_attention_arguments()
  batch_and_heads = P("rows", None, "columns")

  with jax.set_mesh(make_mesh(axis_type)):
    segment_ids = jax.device_put(SEGMENT_IDS, P("rows"))
    program = loss_and_gradients(
      implementation="chunked",
      sharding=batch_and_heads,
      q_segment_ids=segment_ids,
    )
    actual = program(
      jax.device_put(q, batch_and_heads),
      jax.device_put(k, batch_and_heads),
      jax.device_put(v, batch_and_heads),
      lam,
    )
    actual = jax.tree.map(np.asarray, actual)

  program = loss_and_gradients(
    implementation="chunked", q_segment_ids=SEGMENT_IDS
  )
  expected = program(q, k, v, lam)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)


def test_devices_do_not_gather_sequences_and_heads():
  """Each device attends only to its own sequences, with its own heads."""
  q, k, v, lam = make_attention_arguments()
  batch_and_heads = P("rows", None, "columns")

  with jax.set_mesh(make_mesh()):
    q, k, v = jax.device_put((q, k, v), batch_and_heads)
    program = loss_and_gradients(
      implementation="chunked",
      sharding=batch_and_heads,
      q_segment_ids=jax.device_put(SEGMENT_IDS, P("rows")),
    )
    compiled = program.lower(q, k, v, lam).compile()

  assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(
  "implementation",
  [
    # Devices send keys around a ring.
    pytest.param("chunked", id="ring"),
    # Each device gathers all keys.
    pytest.param("reference", id="gathered_keys"),
  ],
)
@pytest.mark.parametrize(
  ("spec", "shards"),
  [
    pytest.param(P("rows", "columns"), 2, id="batch_and_tokens"),
    pytest.param(
      P(None, ("rows", "columns")), 4, id="tokens", marks=pytest.mark.full
    ),
  ],
)
def test_balanced_order_does_not_change_attention(spec, shards, implementation):
  """This order of tokens gives all shards of a sequence equal work."""
  q, k, v, lam = make_attention_arguments()
  num_tokens = q.shape[1]
  order = balanced_order(num_tokens, shards)
  program_on_mesh = loss_and_gradients(
    sharding=NamedSharding(make_mesh(), spec),
    token_order="balanced",
    window=7,
    q_segment_ids=SEGMENT_IDS[:, order],
    implementation=implementation,
  )
  reference = loss_and_gradients(
    window=7, q_segment_ids=SEGMENT_IDS, implementation="reference"
  )

  actual_loss, actual_gradients = program_on_mesh(
    q[:, order], k[:, order], v[:, order], lam
  )

  expected_loss, expected_gradients = reference(q, k, v, lam)
  d_q, d_k, d_v, d_lam = jax.tree.map(np.asarray, expected_gradients)
  expected_gradients = (d_q[:, order], d_k[:, order], d_v[:, order], d_lam)
  chex.assert_trees_all_close(
    (actual_loss, actual_gradients),
    (expected_loss, expected_gradients),
    **FLOAT32_MODEL,
  )


def make_decode_arguments() -> tuple[np.ndarray, ...]:
  """Returns q, k, v, λ and lengths of 4 sequences in caches of 16 tokens."""
  q = normal(0, 4, 4, 2, 8)
  k = normal(1, 4, 2, 16, 16)
  v = normal(2, 4, 2, 16, 16)
  lengths = np.array([0, 3, 16, 9], np.int32)
  return q, k, v, np.float32(0.4), lengths


def test_spec_of_decoding_refers_to_the_mesh_that_is_set():
  """Without a mesh of its own, a PartitionSpec belongs to `jax.set_mesh`."""
  q, k, v, lam, lengths = make_decode_arguments()
  spec = P("rows", "columns")

  with jax.set_mesh(make_mesh(AxisType.Explicit)):
    decode = jax.jit(functools.partial(decode_attention, sharding=spec))
    out = decode(
      jax.device_put(q, spec),
      jax.device_put(k, spec),
      jax.device_put(v, spec),
      lam,
      lengths,
    )
    out = np.asarray(out)

  expected = jax.jit(decode_attention)(q, k, v, lam, lengths)
  chex.assert_trees_all_close(out, np.asarray(expected), **FLOAT32_MODEL)


@pytest.mark.parametrize("window", [None, 5])
def test_sharding_does_not_change_decoding(window):
  q, k, v, lam, lengths = make_decode_arguments()

  def loss(q, k, v, lam, sharding):
    out = decode_attention(
      q,
      k,
      v,
      lam,
      lengths,
      window=window,
      implementation="xla",
      sharding=sharding,
    )
    return jnp.sum(jnp.sin(out))

  program = jax.jit(
    jax.value_and_grad(loss, (0, 1, 2, 3)), static_argnames="sharding"
  )

  batch_and_heads = NamedSharding(make_mesh(), P("rows", "columns"))
  actual = program(q, k, v, lam, sharding=batch_and_heads)

  expected = program(q, k, v, lam, sharding=None)
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)


def test_sharding_does_not_change_decoding_by_the_tpu_kernel():
  """Each device has half of the heads. An interpreter runs the kernel."""
  arguments = make_decode_arguments()
  sharding = NamedSharding(make_mesh(), P("rows", "columns"))
  decode = functools.partial(
    decode_attention,
    window=5,
    implementation="pallas_tpu",
    sharding=sharding,
  )

  with chip.interpreted():
    out = jax.jit(decode)(*arguments)

  decode_by_xla = functools.partial(
    decode_attention, window=5, implementation="xla"
  )
  expected = jax.jit(decode_by_xla)(*arguments)
  chex.assert_trees_all_close(out, expected, **FLOAT32_MODEL)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_each_shard_has_pages_of_its_own(implementation):
  """A block table lists the pages of the cache in which a sequence is.

  The mesh axis "rows" divides four sequences into two shards. Each shard has
  its own pages, with numbers from 0 on.
  """
  q, k, v, lam, lengths = make_decode_arguments()
  block_tables = np.array([[0, 1], [2, 3], [0, 1], [2, 3]], np.int32)
  B, num_pages = block_tables.shape

  def divide_into_pages(cache):
    """Divides [B, K, tokens, width] into [B · pages, K, tokens, width]."""
    _, K, num_tokens, width = cache.shape
    page = num_tokens // num_pages
    pages = cache.reshape(B, K, num_pages, page, width)
    pages = np.swapaxes(pages, 1, 2)
    return pages.reshape(B * num_pages, K, page, width)

  k_pages = divide_into_pages(k)
  v_pages = divide_into_pages(v)
  decode = functools.partial(
    decode_attention,
    block_tables=block_tables,
    implementation=implementation,
    sharding=NamedSharding(make_mesh(), P("rows", "columns")),
  )

  with chip.interpreted():
    out = jax.jit(decode)(q, k_pages, v_pages, lam, lengths)

  decode_by_xla = functools.partial(decode_attention, implementation="xla")
  expected = jax.jit(decode_by_xla)(q, k, v, lam, lengths)
  chex.assert_trees_all_close(out, expected, **FLOAT32_MODEL)


@pytest.mark.parametrize(
  ("sharding", "message"),
  [
    pytest.param(
      P("rows"),
      "^sharding = .* needs a mesh: pass NamedSharding.*jax.set_mesh",
      id="spec_without_mesh",
    ),
    pytest.param(
      "rows",
      "^sharding must be a PartitionSpec or NamedSharding over .B, T, H.; got"
      " 'rows'",
      id="no_sharding",
    ),
    pytest.param(
      NamedSharding(make_mesh(), P("rows", None, None, "columns")),
      "^sharding must be over .B, T, H., 3 axes at most",
      id="too_many_axes",
    ),
    pytest.param(
      NamedSharding(make_mesh(), P(None, None, ("rows", "columns"))),
      "^sharding over .* needs K to be a multiple of 4; got K = 2; repeat k and"
      " v",
      id="heads",
    ),
    pytest.param(
      NamedSharding(
        jax.make_mesh((1, 3), ("a", "b"), devices=jax.devices()[:3]), P("b")
      ),
      "needs B to be a multiple of 3; got B = 4",
      id="batch",
    ),
  ],
)
def test_error_says_why_a_sharding_does_not_fit(sharding, message):
  """q has 4 sequences of 16 tokens with 4 heads, and k and v have K = 2."""
  with pytest.raises(ValueError, match=message):
    diff_attention(*make_attention_arguments(), sharding=sharding)


def test_error_names_an_axis_that_the_mesh_lacks():
  arguments = make_attention_arguments()
  spec = P("rows", None, "tensor")

  message = "must use axes of the mesh, rows, columns; got tensor"
  with (
    jax.set_mesh(make_mesh()),
    pytest.raises(ValueError, match=message),
  ):
    diff_attention(*arguments, sharding=spec)


def test_balanced_order_needs_two_pieces_per_shard():
  """Six tokens cannot be cut into the eight pieces of four shards."""
  q, k, v, lam = make_attention_arguments()

  with pytest.raises(
    ValueError, match="needs T to be a multiple of 2 × 4; got T = 6"
  ):
    diff_attention(
      q[:, :6],
      k[:, :6],
      v[:, :6],
      lam,
      sharding=NamedSharding(make_mesh(), P(None, ("rows", "columns"))),
      token_order="balanced",
    )


def test_error_lists_the_orders_of_tokens():
  arguments = make_attention_arguments()

  message = "^token_order must be one of given, balanced; got 'zigzag'"
  with pytest.raises(ValueError, match=message):
    diff_attention(*arguments, token_order="zigzag")
