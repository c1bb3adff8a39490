"""Measurements inside a model see the values that the model computes."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.inference.trained import Trained
from diffjax.model.attention import Attention, DiffAttention, MaskArguments
from diffjax.ops.diff_attention.reference import attention_weights
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32


def identity(x: jax.Array) -> jax.Array:
  """Returns its argument, so that `inside.measure` returns what it sees."""
  return x


def measure_jitted(
  trained: Trained, batch: dict[str, Any], **functions: Callable[[Any], Any]
) -> dict[str, Any]:
  """Returns the results of `inside.measure`, compiled."""

  @jax.jit
  def measure(params):
    return inside.measure(trained.model, params, batch, **functions)

  return measure(trained.params)


@pytest.mark.parametrize("variant", ["softmax", "diff", "diff_v2"])
def test_measured_values_are_those_that_the_model_captures(
  make_trained, variant
):
  trained = make_trained(variant)
  batch = next(iter(validation_rows("x", trained, 2, batch_size=2)))

  @jax.jit
  def capture(params):
    _, variables = trained.model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["intermediates", "metrics"],
    )
    return variables

  def select_arrays(inputs):
    return {
      "q": inputs.q,
      "k": inputs.k,
      "lam": inputs.lam,
      "ids": inputs.mask.q_segment_ids,
    }

  measured = measure_jitted(
    trained, batch, attention=select_arrays, hidden=identity
  )

  attention = measured["attention"]
  captured = capture(trained.params)
  layers = captured["intermediates"]["layers"]
  (queries,) = layers["attention"]["query"]
  (keys,) = layers["attention"]["key"]
  (hidden,) = layers["hidden"]
  chex.assert_trees_all_equal(attention["q"], queries)
  chex.assert_trees_all_equal(attention["k"], keys)
  chex.assert_trees_all_equal(measured["hidden"], hidden)
  num_layers = 2
  chex.assert_trees_all_equal(
    np.asarray(attention["ids"]), np.stack([batch["segment_ids"]] * num_layers)
  )
  lam = attention["lam"]
  if variant == "softmax":
    assert lam is None
    return
  chex.assert_shape(lam, (num_layers, 2, 64, trained.config.model.num_heads))
  metrics = captured["metrics"]["layers"]
  (mean_lambdas,) = metrics["attention"]["lambda"]
  chex.assert_trees_all_close(
    jnp.mean(lam, axis=(1, 2, 3)), mean_lambdas, **FLOAT32
  )


def test_measuring_under_remat_does_not_change_the_model(make_trained):
  trained = make_trained(remat="full", num_layers=3)
  tokens = np.arange(32).reshape(2, 16)

  def run_model():
    # A new function, so that jit traces the model each time.
    def apply(params):
      return trained.model.apply({"params": params}, tokens)

    return jax.jit(apply)(trained.params)

  before = run_model()
  measured = measure_jitted(trained, {"tokens": tokens}, hidden=identity)
  after = run_model()

  assert set(measured) == {"hidden"}
  chex.assert_shape(measured["hidden"], (3, 2, 16, 16))
  chex.assert_trees_all_equal(after, before)


def test_the_example_in_the_docstring(make_trained):
  """The largest logit of each layer equals one from all queries and keys."""

  def add_block(largest, queries):
    is_visible = queries.mask[:, None, None]
    logits = jnp.where(is_visible, queries.logits(), -jnp.inf)
    return jnp.maximum(largest, jnp.max(logits))

  def largest_logits(inputs):
    start = jnp.float32(-jnp.inf)
    all_queries = inputs.queries(0, inputs.q.shape[1])
    return {
      "blocks": inside.fold_query_blocks(
        add_block, start, inputs, block_size=24
      ),
      "all": add_block(start, all_queries),
    }

  trained = make_trained("diff")
  batch = next(iter(validation_rows("x", trained, 2, batch_size=2)))

  results = measure_jitted(trained, batch, attention=largest_logits)

  largest = results["attention"]
  chex.assert_shape(largest["all"], (2,))
  chex.assert_trees_all_close(largest["blocks"], largest["all"], rtol=1e-6)


# Without remat, the layers are unrolled. With it, they are scanned.
@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_layer_is_measured_with_its_own_window(make_trained, remat):
  """The last query's weights lie on the keys that its layer sees.

  The layers: a plain one, then full and windowed ones.
  """
  trained = make_trained(
    num_layers=4, plain_layers=1, window=3, window_pattern="wf", remat=remat
  )
  tokens = np.arange(16).reshape(1, 16)

  def count_keys(inputs):
    # [B, H, 1, S]
    last_weights = inputs.queries(15, 1).weights()
    return jnp.sum(last_weights[:, 0, 0] != 0, axis=-1)

  results = measure_jitted(trained, {"tokens": tokens}, attention=count_keys)

  assert results["attention"][:, 0].tolist() == [3, 16, 3, 16]


@pytest.mark.parametrize(
  "length, block, window",
  [(37, 8, 7), *full([(16, 16, None), (5, 128, 3)])],
)
def test_blocks_of_queries_give_the_whole_map(length, block, window):
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, length, 4, 2, 8))
  k = jax.random.normal(keys[1], (2, length, 2, 2, 8))
  v = jnp.zeros((2, length, 2, 16))
  lam = jax.random.uniform(keys[2], (2, length, 4))
  # Two documents, then two tokens of padding.
  num_padding = 2
  first_size = length // 2
  second_size = length - first_size - num_padding
  row_ids = np.repeat([1, 2, 0], [first_size, second_size, num_padding])
  ids = jnp.asarray([row_ids] * 2)
  all_weights = attention_weights(
    q, k, lam, q_segment_ids=ids, kv_segment_ids=ids, window=window
  )

  def add_block(total, queries):
    squares, num_visible = total
    weights = jnp.where(queries.mask[:, None], queries.weights(), 0)
    squares += jnp.sum(weights**2, axis=(2, 3))
    return squares, num_visible + jnp.sum(queries.mask)

  inputs = inside.AttentionInputs(
    DiffAttention(num_heads=4, head_dim=8, num_kv_heads=2),
    q,
    k,
    v,
    lam,
    MaskArguments(ids, ids, causal=True, window=window),
  )

  squares, num_visible = inside.fold_query_blocks(
    add_block, (jnp.zeros((2, 4)), 0), inputs, block_size=block
  )

  weights = all_weights[:, :, : length - num_padding]
  expected = jnp.sum(weights**2, axis=(2, 3))
  chex.assert_trees_all_close(squares, expected, **FLOAT32)
  # Padding sees nothing.
  num_keys_per_row = 0
  for size in (first_size, second_size):
    for num_keys in range(1, size + 1):
      num_keys_per_row += min(num_keys, window or num_keys)
  assert num_visible == 2 * num_keys_per_row


def test_a_layer_that_needs_all_queries_gets_one_block():
  class NeedsAllQueries(DiffAttention):
    supports = frozenset()

  q = jax.random.normal(jax.random.key(0), (2, 37, 2, 2, 8))
  k = jax.random.normal(jax.random.key(1), (2, 37, 2, 2, 8))
  ids = jnp.ones((2, 37), jnp.int32)
  inputs = inside.AttentionInputs(
    NeedsAllQueries(num_heads=2, head_dim=8),
    q,
    k,
    jnp.zeros((2, 37, 2, 16)),
    jnp.full((2, 37, 2), 0.3),
    MaskArguments(ids, ids, causal=True, window=None),
  )
  block_sizes = []

  def count_keys(total, queries):
    block_sizes.append(queries.q.shape[1])
    return total + jnp.sum(queries.mask)

  num_visible = inside.fold_query_blocks(count_keys, 0, inputs, block_size=8)

  assert num_visible == 2 * 37 * 19
  assert set(block_sizes) == {37}


def test_a_layer_that_does_not_attend_cannot_be_measured(
  make_trained, monkeypatch
):
  def compute_heads(self, q, k, v, lam, mask):
    return jnp.repeat(v, self.num_heads // v.shape[2], axis=2)

  def select_queries(inputs):
    return inputs.q

  trained = make_trained("softmax")
  monkeypatch.setattr(Attention, "compute_heads", compute_heads)

  with pytest.raises(UserError, match="does not call Attention.attend"):
    inside.measure(
      trained.model,
      trained.params,
      {"tokens": np.arange(8)[None]},
      attention=select_queries,
    )
