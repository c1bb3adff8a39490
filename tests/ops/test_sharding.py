"""The operations inside `shard_map` and under automatic partitioning, on four of the tests' fake devices."""

from __future__ import annotations

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

DATA = P("data")


@pytest.fixture
def mesh():
  return Mesh(jax.devices()[:4], ("data",))


def _normal(seed: int, *shape: int):
  return jax.random.normal(jax.random.key(seed), shape)


def _loss_arguments():
  targets = jax.random.randint(jax.random.key(2), (8, 37), 0, 50)
  return (
    _normal(0, 8, 37, 16),
    _normal(1, 50, 16),
    targets,
    jax.random.uniform(jax.random.key(3), (8, 37)),
  )


def _plain(hidden, embedding, targets, weights):
  loss = lambda h, e, w: reference_cross_entropy(h, e, targets, w, z_loss=1e-2)[
    0
  ]
  return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(
    hidden, embedding, weights
  )


def _assert_close(actual, expected):
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_cross_entropy_in_shard_map_sums_the_embedding_gradient_once(mesh):
  hidden, embedding, targets, weights = _loss_arguments()
  local = lambda h, e, w, t: jax.lax.psum(
    fused_cross_entropy(h, e, t, w, z_loss=1e-2, chunk=16)[0], "data"
  )
  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=(DATA, P(), DATA, DATA), out_specs=P()
  )
  compiled = (
    jax.jit(jax.value_and_grad(mapped, (0, 1, 2)))
    .lower(hidden, embedding, weights, targets)
    .compile()
  )
  _assert_close(
    compiled(hidden, embedding, weights, targets),
    _plain(hidden, embedding, targets, weights),
  )
  program = compiled.as_text()
  entry = program[program.index("ENTRY") :]
  assert " while(" in entry
  # A loop's body is a computation of its own: every collective of the program is in the entry, outside of it.
  assert program.count(" all-reduce(") == entry.count(" all-reduce(") > 0
  assert "all-gather" not in program


def test_cross_entropy_partitioned_automatically(mesh):
  hidden, embedding, targets, weights = _loss_arguments()
  put = lambda x: jax.device_put(x, NamedSharding(mesh, DATA))
  loss = lambda h, e, w, t: fused_cross_entropy(
    h, e, t, w, z_loss=1e-2, chunk=64
  )[0]
  arguments = put(hidden), embedding, put(weights), put(targets)
  compiled = (
    jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arguments).compile()
  )
  _assert_close(
    compiled(*arguments), _plain(hidden, embedding, targets, weights)
  )
  assert "all-gather" not in compiled.as_text()


def test_per_token_cross_entropy_in_shard_map(mesh):
  hidden, embedding, targets, weights = _loss_arguments()
  local = lambda h, e, t: per_token_cross_entropy(h, e, t, chunk=16)
  nll = jax.jit(
    jax.shard_map(local, mesh=mesh, in_specs=(DATA, P(), DATA), out_specs=DATA)
  )(hidden, embedding, targets)
  _assert_close(
    jnp.sum(weights * nll),
    reference_cross_entropy(hidden, embedding, targets, weights)[0],
  )


@pytest.mark.parametrize(
  "implementation", ["chunked", "two_call", "pallas_tpu"]
)
def test_attention_in_shard_map(mesh, implementation, monkeypatch):
  monkeypatch.setattr(
    chunked, "_BLOCK_QUERIES", 8
  )  # bands and groups of heads, which scan
  monkeypatch.setattr(chunked, "_MAX_BANDS", 2)
  monkeypatch.setattr(chunked, "_MAX_BLOCK_LOGITS", 2000)
  ids = jnp.broadcast_to(jnp.arange(37) // 10, (4, 37))
  # One λ that all devices share, as the model's is: its gradient is the sum over all of them.
  arguments = (
    _normal(0, 4, 37, 4, 2, 8),
    _normal(1, 4, 37, 2, 2, 8),
    _normal(2, 4, 37, 2, 16),
    jnp.float32(0.4),
  )
  loss = lambda name, ids, *a: jnp.sum(
    jnp.sin(diff_attention(*a, q_segment_ids=ids, implementation=name))
  )
  mapped = lambda ids, *a: jax.lax.psum(loss(implementation, ids, *a), "data")
  mapped = jax.shard_map(
    mapped, mesh=mesh, in_specs=(DATA, DATA, DATA, DATA, P()), out_specs=P()
  )
  expected = jax.jit(
    jax.value_and_grad(lambda *a: loss("reference", ids, *a), (0, 1, 2, 3))
  )(*arguments)
  with chip.interpreted():
    _assert_close(
      jax.jit(jax.value_and_grad(mapped, (1, 2, 3, 4)))(ids, *arguments),
      expected,
    )


# A mesh of somebody else's: its axes have names that diffjax has never heard of.
IDS = jnp.broadcast_to(jnp.arange(16) // 5, (4, 16))
LAYOUTS = [
  P("rows", None, "columns"),
  P("rows", "columns"),
  P(None, ("rows", "columns")),
]


def _strangers_mesh(axis_type=AxisType.Auto):
  return jax.make_mesh(
    (2, 2),
    ("rows", "columns"),
    axis_types=(axis_type,) * 2,
    devices=jax.devices()[:4],
  )


def _attention_arguments():
  return (
    _normal(0, 4, 16, 4, 2, 8),
    _normal(1, 4, 16, 2, 2, 8),
    _normal(2, 4, 16, 2, 16),
    jnp.float32(0.4),
  )


def _value_and_gradients(**options):
  options = {"implementation": "chunked"} | options
  return jax.value_and_grad(
    lambda *a: jnp.sum(jnp.sin(diff_attention(*a, **options))), (0, 1, 2, 3)
  )


def _decode_arguments():
  return (
    _normal(0, 4, 4, 2, 8),
    _normal(1, 4, 2, 16, 16),
    _normal(2, 4, 2, 16, 16),
    jnp.float32(0.4),
    jnp.array([0, 3, 16, 9], jnp.int32),
  )


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
@pytest.mark.parametrize(
  "options",
  [
    {"q_segment_ids": IDS, "window": 5},
    *full(
      [
        {},
        {"causal": False},
        {"q_offset": jnp.array([0, 3, -2, 9]), "window": 6},
        {"q_offset": 2},
      ]
    ),
  ],
  ids=lambda options: "_".join(options) or "causal",
)
def test_attention_on_a_mesh_of_other_axes(spec, options):
  sharding = NamedSharding(_strangers_mesh(), spec)
  actual = jax.jit(_value_and_gradients(sharding=sharding, **options))(
    *_attention_arguments()
  )
  _assert_close(
    actual, jax.jit(_value_and_gradients(**options))(*_attention_arguments())
  )


@pytest.mark.parametrize(
  "axis_type", [AxisType.Auto, AxisType.Explicit], ids=str
)
def test_a_spec_is_for_the_mesh_that_is_set(axis_type):
  with jax.set_mesh(_strangers_mesh(axis_type)):
    *arrays, lam = _attention_arguments()
    q, k, v = (jax.device_put(x, P("rows", None, "columns")) for x in arrays)
    program = jax.jit(
      _value_and_gradients(
        sharding=P("rows", None, "columns"),
        q_segment_ids=jax.device_put(IDS, P("rows")),
      )
    )
    actual = program(q, k, v, lam)
    if (
      axis_type == AxisType.Auto
    ):  # else the gradient of λ is gathered, [B, T, H], since λ itself is on no axis
      assert "all-gather" not in program.lower(q, k, v, lam).compile().as_text()
    decode_arrays = [
      jax.device_put(x, P("rows", "columns")) for x in _decode_arguments()[:3]
    ]
    decoded = jax.jit(
      lambda *a: decode_attention(*a, sharding=P("rows", "columns"))
    )(*decode_arrays, *_decode_arguments()[3:])
  actual, decoded = jax.tree.map(np.asarray, (actual, decoded))
  _assert_close(
    actual,
    jax.jit(_value_and_gradients(q_segment_ids=IDS))(*_attention_arguments()),
  )
  _assert_close(decoded, decode_attention(*_decode_arguments()))


@pytest.mark.parametrize(
  "implementation", ["chunked", "reference"]
)  # in a ring, and gathered
@pytest.mark.parametrize("spec", LAYOUTS[1:], ids=str)
def test_tokens_in_balanced_order(spec, implementation):
  """Tokens moved into that order, and the results moved back, are those of the row as it is."""
  order = balanced_order(16, 2 if "rows" in spec else 4)
  moved = lambda x: x[:, order]
  *arrays, lam = _attention_arguments()
  program = _value_and_gradients(
    sharding=NamedSharding(_strangers_mesh(), spec),
    token_order="balanced",
    window=7,
    q_segment_ids=moved(IDS),
    implementation=implementation,
  )
  value, (*gradients, d_lam) = jax.jit(program)(*map(moved, arrays), lam)
  expected = jax.jit(
    _value_and_gradients(
      window=7, q_segment_ids=IDS, implementation="reference"
    )
  )(*arrays, lam)
  _assert_close(
    (value, (*(x[:, np.argsort(order)] for x in gradients), d_lam)), expected
  )


@pytest.mark.parametrize(
  "implementation", ["reference", "two_call", "pallas_tpu"]
)
def test_every_implementation_takes_a_sharding(implementation):
  sharding = NamedSharding(_strangers_mesh(), LAYOUTS[0])
  with chip.interpreted():
    actual = jax.jit(
      _value_and_gradients(
        implementation=implementation, sharding=sharding, q_segment_ids=IDS
      )
    )(*_attention_arguments())
  _assert_close(
    actual,
    jax.jit(
      _value_and_gradients(implementation="reference", q_segment_ids=IDS)
    )(*_attention_arguments()),
  )


@pytest.mark.parametrize("window", [None, 5])
def test_decoding_on_a_mesh_of_other_axes(window):
  *arrays, lengths = _decode_arguments()

  def run(sharding):
    loss = lambda *a: jnp.sum(
      jnp.sin(
        decode_attention(
          *a, lengths, window=window, implementation="xla", sharding=sharding
        )
      )
    )
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*arrays)

  _assert_close(
    run(NamedSharding(_strangers_mesh(), P("rows", "columns"))), run(None)
  )
  with chip.interpreted():
    sharding = NamedSharding(_strangers_mesh(), P("rows", "columns"))
    kernel = jax.jit(
      lambda *a: decode_attention(
        *a, window=window, implementation="pallas_tpu", sharding=sharding
      )
    )(*_decode_arguments())
  _assert_close(
    kernel,
    decode_attention(*_decode_arguments(), window=window, implementation="xla"),
  )


def test_decoding_in_pages_on_a_mesh():
  """Each shard of the rows has pages of its own, which the tables count from 0."""
  q, k, v, lam, lengths = _decode_arguments()
  page_k, page_v = (
    x.reshape(4, 2, 2, 8, 16).swapaxes(1, 2).reshape(8, 2, 8, 16)
    for x in (k, v)
  )  # two pages of 8 tokens a row
  sharding, tables = (
    NamedSharding(_strangers_mesh(), P("rows", "columns")),
    jnp.array([[0, 1], [2, 3]] * 2),
  )
  decode = lambda implementation: jax.jit(
    lambda *a: decode_attention(
      *a, block_tables=tables, implementation=implementation, sharding=sharding
    )
  )(q, page_k, page_v, lam, lengths)
  wanted = decode_attention(*_decode_arguments(), implementation="xla")
  _assert_close(decode("xla"), wanted)
  with chip.interpreted():
    _assert_close(decode("pallas_tpu"), wanted)


@pytest.mark.parametrize(
  ("sharding", "message"),
  [
    (
      P("rows"),
      "^sharding = .* needs a mesh: pass NamedSharding.*jax.set_mesh",
    ),
    (
      "rows",
      "^sharding must be a PartitionSpec or NamedSharding over .B, T, H.; got 'rows'",
    ),
    (
      NamedSharding(_strangers_mesh(), P("rows", None, None, "columns")),
      "^sharding must be over .B, T, H., 3 axes at most",
    ),
    (
      NamedSharding(_strangers_mesh(), P(None, None, ("rows", "columns"))),
      "^sharding over .* needs K to be a multiple of 4; got K = 2; repeat k and v",
    ),
    (
      NamedSharding(
        jax.make_mesh((1, 3), ("a", "b"), devices=jax.devices()[:3]), P("b")
      ),
      "needs B to be a multiple of 3; got B = 4",
    ),
  ],
  ids=["no_mesh", "no_sharding", "too_many_axes", "heads", "batch"],
)
def test_a_sharding_that_does_not_fit_is_refused(sharding, message):
  with pytest.raises(ValueError, match=message):
    diff_attention(*_attention_arguments(), sharding=sharding)


def test_an_axis_that_the_mesh_lacks_is_named():
  with (
    jax.set_mesh(_strangers_mesh()),
    pytest.raises(
      ValueError, match="must use axes of the mesh, rows, columns; got tensor"
    ),
  ):
    diff_attention(*_attention_arguments(), sharding=P("rows", None, "tensor"))


def test_balanced_tokens_need_two_pieces_a_shard():
  q, k, v, lam = (
    x if x.ndim == 0 else x[:, :6] for x in _attention_arguments()
  )
  sharding = NamedSharding(_strangers_mesh(), P(None, ("rows", "columns")))
  with pytest.raises(
    ValueError, match="needs T to be a multiple of 2 × 4; got T = 6"
  ):
    diff_attention(q, k, v, lam, sharding=sharding, token_order="balanced")
  with pytest.raises(
    ValueError,
    match="^token_order must be one of given, balanced; got 'zigzag'",
  ):
    diff_attention(q, k, v, lam, token_order="zigzag")
