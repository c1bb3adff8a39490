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


def capture(trained: Trained, batch: dict[str, Any]) -> dict[str, Any]:
  """Returns the intermediates and metrics that the model itself stores."""

  @jax.jit
  def run_model(params):
    _, variables = trained.model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["intermediates", "metrics"],
    )
    return variables

  return run_model(trained.params)


@pytest.mark.parametrize("variant", ["softmax", "diff", "diff_v2"])
def test_measured_values_are_those_that_the_model_captures(
  make_trained, variant
):
  """Flax can capture the queries, keys and hidden states of each layer.

  The results of `inside.measure` are the same arrays.
  """
  trained = make_trained(variant)
  batch = next(iter(validation_rows("x", trained, count=2, batch_size=2)))

  def select_arrays(inputs):
    return {
      "q": inputs.q,
      "k": inputs.k,
      "segment_ids": inputs.mask.q_segment_ids,
    }

  measured = measure_jitted(
    trained, batch, attention=select_arrays, hidden=identity
  )

  layers = capture(trained, batch)["intermediates"]["layers"]
  (queries,) = layers["attention"]["query"]
  (keys,) = layers["attention"]["key"]
  (hidden,) = layers["hidden"]
  attention = measured["attention"]
  chex.assert_trees_all_equal(attention["q"], queries)
  chex.assert_trees_all_equal(attention["k"], keys)
  chex.assert_trees_all_equal(measured["hidden"], hidden)
  for layer_segment_ids in np.asarray(attention["segment_ids"]):
    chex.assert_trees_all_equal(layer_segment_ids, batch["segment_ids"])


def select_lambda(inputs: inside.AttentionInputs) -> dict[str, Any]:
  """Returns the factor λ of an attention layer's second map."""
  return {"lam": inputs.lam}


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
def test_measured_lambda_has_the_mean_that_the_model_reports(
  make_trained, variant
):
  """λ is the factor of an attention layer's second map."""
  trained = make_trained(variant)
  batch = next(iter(validation_rows("x", trained, count=2, batch_size=2)))

  measured = measure_jitted(trained, batch, attention=select_lambda)

  lam = measured["attention"]["lam"]
  num_layers = 2
  num_rows = 2
  row_length = 64
  num_heads = trained.config.model.num_heads
  chex.assert_shape(lam, (num_layers, num_rows, row_length, num_heads))
  metrics = capture(trained, batch)["metrics"]["layers"]
  (mean_lambdas,) = metrics["attention"]["lambda"]
  mean_by_layer = jnp.mean(lam, axis=(1, 2, 3))
  chex.assert_trees_all_close(mean_by_layer, mean_lambdas, **FLOAT32)


def test_softmax_attention_has_no_lambda(make_trained):
  """λ is the factor of a second map, and softmax attention has only one."""
  trained = make_trained("softmax")
  batch = {"tokens": np.arange(16).reshape(1, 16)}

  measured = measure_jitted(trained, batch, attention=select_lambda)

  assert measured["attention"]["lam"] is None


def test_measuring_under_remat_does_not_change_the_model(make_trained):
  """A measurement intercepts calls of layers, but only while it runs.

  With remat, JAX caches the traced layers. A cached layer with the measurement
  inside would change the model afterwards.
  """
  trained = make_trained(remat="full", num_layers=3)
  tokens = np.arange(32).reshape(2, 16)

  def run_model():
    # A new function, so that jit traces the model each time.
    def apply(params):
      return trained.model.apply({"params": params}, tokens)

    return jax.jit(apply)(trained.params)

  output_before = run_model()
  measured = measure_jitted(trained, {"tokens": tokens}, hidden=identity)
  output_after = run_model()

  assert set(measured) == {"hidden"}
  num_layers = 3
  embed_dim = 16
  chex.assert_shape(measured["hidden"], (num_layers, 2, 16, embed_dim))
  chex.assert_trees_all_equal(output_after, output_before)


def test_the_largest_logit_is_found_block_by_block(make_trained):
  """The maximum over blocks of queries is that of all queries at once.

  A row of 64 queries has two blocks of 24, and a last one of 16.
  """

  def add_block(largest, queries):
    is_visible = queries.mask[:, None, None]
    logits = jnp.where(is_visible, queries.logits(), -jnp.inf)
    return jnp.maximum(largest, jnp.max(logits))

  def largest_logits(inputs):
    start = jnp.float32(-jnp.inf)
    num_queries = inputs.q.shape[1]
    all_queries = inputs.queries(first=0, count=num_queries)
    of_blocks = inside.fold_query_blocks(
      add_block, start, inputs, block_size=24
    )
    return {"blocks": of_blocks, "all": add_block(start, all_queries)}

  trained = make_trained("diff")
  batch = next(iter(validation_rows("x", trained, count=2, batch_size=2)))

  results = measure_jitted(trained, batch, attention=largest_logits)

  largest = results["attention"]
  num_layers = 2
  chex.assert_shape(largest["all"], (num_layers,))
  chex.assert_trees_all_close(largest["blocks"], largest["all"], rtol=1e-6)


# Without remat, the layers are unrolled. With it, they are scanned.
@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_layer_is_measured_with_its_own_window(make_trained, remat):
  """The last of 16 queries sees 3 keys in layers with a window of 3.

  In other layers it sees all 16 keys.
  The pattern "wf" alternates layers with a window and full ones. The first
  layer is a plain one: its attention is softmax.
  """
  trained = make_trained(
    num_layers=4, plain_layers=1, window=3, window_pattern="wf", remat=remat
  )
  tokens = np.arange(16).reshape(1, 16)

  def count_keys(inputs):
    last_query = inputs.queries(first=15, count=1)
    weights_of_first_head = last_query.weights()[:, 0, 0]  # [B, S]
    return jnp.sum(weights_of_first_head != 0, axis=-1)

  results = measure_jitted(trained, {"tokens": tokens}, attention=count_keys)

  num_keys_by_layer = results["attention"][:, 0].tolist()
  assert num_keys_by_layer == [3, 16, 3, 16]


@pytest.mark.parametrize(
  "length, block, window",
  [(37, 8, 7), *full([(16, 16, None), (5, 128, 3)])],
)
def test_blocks_of_queries_give_the_whole_map(length, block, window):
  """The sums over blocks of queries equal those over all queries.

  They are the sum of squared weights, and the number of visible keys.
  A row has two documents and two tokens of padding.
  """
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, length, 4, 2, 8))
  k = jax.random.normal(keys[1], (2, length, 2, 2, 8))
  v = jnp.zeros((2, length, 2, 16))
  lam = jax.random.uniform(keys[2], (2, length, 4))
  num_padding = 2
  first_size = length // 2
  second_size = length - first_size - num_padding
  row_ids = np.repeat([1, 2, 0], [first_size, second_size, num_padding])
  ids = jnp.asarray([row_ids] * 2)
  all_weights = attention_weights(
    q, k, lam, q_segment_ids=ids, kv_segment_ids=ids, window=window
  )

  def add_block(sums, queries):
    squares, num_visible = sums
    weights = jnp.where(queries.mask[:, None], queries.weights(), 0)
    squares += jnp.sum(weights**2, axis=(2, 3))
    return squares, num_visible + jnp.sum(queries.mask)

  inputs = inside.AttentionInputs(
    layer=DiffAttention(num_heads=4, head_dim=8, num_kv_heads=2),
    q=q,
    k=k,
    v=v,
    lam=lam,
    mask=MaskArguments(ids, ids, causal=True, window=window),
  )

  squares, num_visible = inside.fold_query_blocks(
    add_block, (jnp.zeros((2, 4)), 0), inputs, block_size=block
  )

  # Padding sees nothing.
  weights = all_weights[:, :, : length - num_padding]
  expected = jnp.sum(weights**2, axis=(2, 3))
  chex.assert_trees_all_close(squares, expected, **FLOAT32)
  num_keys_per_row = 0
  for num_tokens in (first_size, second_size):
    # The n-th query of a document sees n keys, or those in the window.
    for num_keys in range(1, num_tokens + 1):
      num_keys_per_row += min(num_keys, window or num_keys)
  num_rows = 2
  assert num_visible == num_rows * num_keys_per_row


def test_a_layer_that_needs_all_queries_gets_one_block():
  """A layer that can decode with a cache computes each query on its own.

  A layer that does not support it may need all 37 queries at once.
  """

  class NeedsAllQueries(DiffAttention):
    # Without "cached_decoding".
    supports = frozenset()

  q = jax.random.normal(jax.random.key(0), (2, 37, 2, 2, 8))
  k = jax.random.normal(jax.random.key(1), (2, 37, 2, 2, 8))
  ids = jnp.ones((2, 37), jnp.int32)
  inputs = inside.AttentionInputs(
    layer=NeedsAllQueries(num_heads=2, head_dim=8),
    q=q,
    k=k,
    v=jnp.zeros((2, 37, 2, 16)),
    lam=jnp.full((2, 37, 2), 0.3),
    mask=MaskArguments(ids, ids, causal=True, window=None),
  )
  block_sizes = []

  def count_keys(total, queries):
    block_sizes.append(queries.q.shape[1])
    return total + jnp.sum(queries.mask)

  num_visible = inside.fold_query_blocks(count_keys, 0, inputs, block_size=8)

  assert set(block_sizes) == {37}
  # The n-th query of a row sees n keys.
  num_rows = 2
  num_causal_pairs = 37 * (37 + 1) // 2
  assert num_visible == num_rows * num_causal_pairs


def test_a_layer_that_does_not_attend_cannot_be_measured(
  make_trained, monkeypatch
):
  """Attention is measured where the layer calls `attend`.

  The heads of this layer are the values, without a call of `attend`.
  """

  def compute_heads(self, q, k, v, lam, mask):
    return jnp.repeat(v, self.num_heads // v.shape[2], axis=2)

  def select_queries(inputs):
    return inputs.q

  trained = make_trained("softmax")
  batch = {"tokens": np.arange(8)[None]}
  monkeypatch.setattr(Attention, "compute_heads", compute_heads)

  with pytest.raises(UserError, match="does not call Attention.attend"):
    inside.measure(
      trained.model, trained.params, batch, attention=select_queries
    )
