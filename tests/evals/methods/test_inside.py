"""Measurements inside a model see the values that the model computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.model.attention import Attention, DiffAttention, MaskArguments
from diffjax.ops.diff_attention.reference import attention_weights
from tests.tiers import full


@pytest.mark.parametrize("kind", ["softmax", "diff", "diff_v2"])
def test_queries_keys_and_hidden_states_are_those_that_the_model_captures(
  make_trained, kind
):
  trained = make_trained(kind)
  batch = next(iter(validation_rows("x", trained, 2, batch_size=2)))

  @jax.jit
  def captured(params):
    _, variables = trained.model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["intermediates", "metrics"],
    )
    return variables

  @jax.jit
  def measured(params):
    def inputs(attended):
      return {
        "q": attended.q,
        "k": attended.k,
        "lam": attended.lam,
        "ids": attended.mask.q_segment_ids,
      }

    return inside.measure(
      trained.model, params, batch, attention=inputs, hidden=lambda x: x
    )

  want, got = captured(trained.params), measured(trained.params)
  layers = want["intermediates"]["layers"]
  np.testing.assert_array_equal(
    got["attention"]["q"], layers["attention"]["query"][0]
  )
  np.testing.assert_array_equal(
    got["attention"]["k"], layers["attention"]["key"][0]
  )
  np.testing.assert_array_equal(got["hidden"], layers["hidden"][0])
  np.testing.assert_array_equal(
    got["attention"]["ids"], np.stack([batch["segment_ids"]] * 2)
  )
  if kind == "softmax":
    assert got["attention"]["lam"] is None
  else:
    lam = got["attention"]["lam"]
    assert lam.shape == (2, 2, 64, trained.config.model.num_heads)
    np.testing.assert_allclose(
      lam.mean(axis=(1, 2, 3)),
      want["metrics"]["layers"]["attention"]["lambda"][0],
      rtol=1e-5,
    )


def test_it_measures_under_remat_and_leaves_the_model_as_it_was(make_trained):
  trained = make_trained(remat="full", num_layers=3)
  tokens = np.arange(32).reshape(2, 16)
  apply = jax.jit(
    lambda params: trained.model.apply({"params": params}, tokens)
  )
  before = apply(trained.params)
  found = jax.jit(
    functools.partial(
      inside.measure,
      trained.model,
      batch={"tokens": tokens},
      hidden=lambda x: x,
    )
  )(trained.params)
  assert set(found) == {"hidden"} and found["hidden"].shape == (3, 2, 16, 16)
  after = jax.jit(
    lambda params: trained.model.apply({"params": params}, tokens)
  )(trained.params)  # traced anew
  np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("remat", ["none", "full"])  # unrolled, and scanned
def test_every_layer_is_measured_with_its_own_window(make_trained, remat):
  """A plain layer, then full and windowed ones: the weights of the last query lie on the keys that its layer sees."""
  trained = make_trained(
    num_layers=4, plain_layers=1, window=3, window_pattern="wf", remat=remat
  )
  tokens = np.arange(16).reshape(1, 16)

  def count_keys(attended):
    last_weights = attended.queries(15, 1).weights()  # [B, H, 1, S]
    return jnp.sum(last_weights[:, 0, 0] != 0, axis=-1)

  found = jax.jit(
    functools.partial(
      inside.measure,
      trained.model,
      batch={"tokens": tokens},
      attention=count_keys,
    )
  )(trained.params)
  np.testing.assert_array_equal(found["attention"][:, 0], [3, 16, 3, 16])


@pytest.mark.parametrize(
  "length, block, window",
  [(37, 8, None), (37, 8, 7), *full([(16, 16, None), (5, 128, 3)])],
)
def test_blocks_of_queries_give_the_whole_map(length, block, window):
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, length, 4, 2, 8))
  k = jax.random.normal(keys[1], (2, length, 2, 2, 8))
  v = jnp.zeros((2, length, 2, 16))
  lam = jax.random.uniform(keys[2], (2, length, 4))
  sizes = [length // 2, length - length // 2 - 2, 2]  # The last is padding.
  ids = jnp.asarray([np.repeat([1, 2, 0], sizes)] * 2)
  whole = attention_weights(
    q, k, lam, q_segment_ids=ids, kv_segment_ids=ids, window=window
  )

  def step(total, queries):
    squares, num_visible = total
    weights = jnp.where(queries.mask[:, None], queries.weights(), 0)
    squares += jnp.sum(weights**2, axis=(2, 3))
    return squares, num_visible + jnp.sum(queries.mask)

  attended = inside.AttentionInputs(
    DiffAttention(num_heads=4, head_dim=8, num_kv_heads=2),
    q,
    k,
    v,
    lam,
    MaskArguments(ids, ids, causal=True, window=window),
  )
  squares, num_visible = inside.fold_query_blocks(
    step, (jnp.zeros((2, 4)), 0), attended, block_size=block
  )
  np.testing.assert_allclose(
    squares, jnp.sum(whole[:, :, : length - 2] ** 2, axis=(2, 3)), rtol=1e-5
  )
  want = 0
  for size in sizes[:2]:
    for num_keys in range(1, size + 1):
      want += min(num_keys, window or num_keys)
  assert num_visible == 2 * want  # Padding sees nothing.


def test_a_layer_that_needs_all_queries_gets_one_block():
  class NeedsAllQueries(DiffAttention):
    supports = frozenset()

  q = jax.random.normal(jax.random.key(0), (2, 37, 2, 2, 8))
  k = jax.random.normal(jax.random.key(1), (2, 37, 2, 2, 8))
  ids = jnp.ones((2, 37), jnp.int32)
  attended = inside.AttentionInputs(
    NeedsAllQueries(num_heads=2, head_dim=8),
    q,
    k,
    jnp.zeros((2, 37, 2, 16)),
    jnp.full((2, 37, 2), 0.3),
    MaskArguments(ids, ids, causal=True, window=None),
  )
  sizes = []

  def step(total, queries):
    sizes.append(queries.q.shape[1])
    return total + jnp.sum(queries.mask)

  assert (
    inside.fold_query_blocks(step, 0, attended, block_size=8) == 2 * 37 * 19
  )
  assert set(sizes) == {37}


def test_a_layer_that_does_not_attend_cannot_be_measured(
  make_trained, monkeypatch
):
  def compute_heads(self, q, k, v, lam, mask):
    return jnp.repeat(v, self.num_heads // v.shape[2], axis=2)

  trained = make_trained("softmax")
  monkeypatch.setattr(Attention, "compute_heads", compute_heads)
  with pytest.raises(UserError, match="does not call Attention.attend"):
    inside.measure(
      trained.model,
      trained.params,
      {"tokens": np.arange(8)[None]},
      attention=lambda attended: attended.q,
    )
