"""Measurements inside a model see the values that the model computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
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
    seen = lambda attended: {
      "q": attended.q,
      "k": attended.k,
      "lam": attended.lam,
      "ids": attended.segment_ids,
    }
    return inside.measure(
      trained.model, params, batch, attention=seen, hidden=lambda x: x
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

  def seen(attended):
    return jnp.sum(
      attention_weights(
        attended.q, attended.k, attended.lam, window=attended.window
      )[:, :, -1]
      != 0,
      axis=-1,
    )[:, 0]

  found = jax.jit(
    functools.partial(
      inside.measure, trained.model, batch={"tokens": tokens}, attention=seen
    )
  )(trained.params)
  np.testing.assert_array_equal(found["attention"][:, 0], [3, 16, 3, 16])


@pytest.mark.parametrize(
  "length, block, window",
  [(37, 8, None), (37, 8, 7), *full([(16, 16, None), (5, 128, 3)])],
)
def test_blocks_of_queries_give_the_whole_map(length, block, window):
  keys = jax.random.split(jax.random.key(0), 3)
  q, k = (
    jax.random.normal(keys[0], (2, length, 4, 2, 8)),
    jax.random.normal(keys[1], (2, length, 2, 2, 8)),
  )
  v, lam = (
    jnp.zeros((2, length, 2, 16)),
    jax.random.uniform(keys[2], (2, length, 4)),
  )
  ids = jnp.asarray(
    np.repeat(
      [[1, 2, 0]], [length // 2, length - length // 2 - 2, 2], axis=1
    ).repeat(2, axis=0)
  )
  whole = attention_weights(
    q, k, lam, q_segment_ids=ids, kv_segment_ids=ids, window=window
  )

  def step(total, block, seen, first):
    options = dict(
      q_segment_ids=block.segment_ids,
      kv_segment_ids=ids,
      q_offset=first,
      window=block.window,
    )
    weights = attention_weights(block.q, block.k, block.lam, **options)
    return total[0] + jnp.sum(
      jnp.where(seen[:, None], weights, 0) ** 2, axis=(2, 3)
    ), total[1] + jnp.sum(seen)

  squares, count = inside.over_queries(
    step,
    (jnp.zeros((2, 4)), 0),
    inside.Attended(q, k, v, lam, ids, window),
    block=block,
  )
  np.testing.assert_allclose(
    squares, jnp.sum(whole[:, :, : length - 2] ** 2, axis=(2, 3)), rtol=1e-5
  )
  parts = length // 2, length - length // 2 - 2
  assert count == 2 * sum(
    min(n, window or n) for part in parts for n in range(1, part + 1)
  )  # padding sees nothing
