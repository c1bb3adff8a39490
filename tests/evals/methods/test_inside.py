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


def two_validation_rows(trained: Trained) -> dict[str, Any]:
  """Returns a batch of two rows of 64 tokens of validation text."""
  rows = validation_rows("a test", trained, count=2, batch_size=2)
  (batch,) = rows
  return batch


def stored_by_layers(
  trained: Trained, batch: dict[str, Any], collection: str
) -> dict[str, Any]:
  """Returns what the model's layers themselves store in a Flax collection.

  Each value is a tuple with one array, because each layer is called once. The
  first axis of the array is the layers.
  """

  @jax.jit
  def run_model(params):
    _, variables = trained.model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=[collection],
    )
    return variables[collection]["layers"]

  return run_model(trained.params)


@pytest.mark.parametrize("variant", ["softmax", "diff", "diff_v2"])
def test_measured_values_are_those_that_the_model_captures(
  make_trained, variant
):
  """`inside.measure` sees the arrays that Flax captures as intermediates."""
  num_layers = 2
  trained = make_trained(variant, num_layers=num_layers)
  batch = two_validation_rows(trained)

  def select_arrays(inputs):
    return {
      "queries": inputs.q,
      "keys": inputs.k,
      "segment_ids": inputs.mask.q_segment_ids,
    }

  measured = measure_jitted(
    trained, batch, attention=select_arrays, hidden=identity
  )

  captured = stored_by_layers(trained, batch, "intermediates")
  (queries,) = captured["attention"]["query"]
  (keys,) = captured["attention"]["key"]
  (hidden,) = captured["hidden"]
  # All layers have the segment ids of the batch.
  segment_ids = np.stack([batch["segment_ids"]] * num_layers)
  attention = measured["attention"]
  chex.assert_trees_all_equal(attention["queries"], queries)
  chex.assert_trees_all_equal(attention["keys"], keys)
  chex.assert_trees_all_equal(attention["segment_ids"], segment_ids)
  chex.assert_trees_all_equal(measured["hidden"], hidden)


def select_lambda(inputs: inside.AttentionInputs) -> dict[str, Any]:
  """Returns the factor λ of an attention layer's second map."""
  return {"lam": inputs.lam}


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
def test_measured_lambda_has_the_mean_that_the_model_reports(
  make_trained, variant
):
  """The model stores the mean λ of each layer as the metric "lambda"."""
  num_layers = 2
  num_heads = 4
  trained = make_trained(variant, num_layers=num_layers, num_heads=num_heads)
  batch = two_validation_rows(trained)

  measured = measure_jitted(trained, batch, attention=select_lambda)

  num_rows, row_length = batch["tokens"].shape
  lam = measured["attention"]["lam"]
  chex.assert_shape(lam, (num_layers, num_rows, row_length, num_heads))
  metrics = stored_by_layers(trained, batch, "metrics")
  (mean_lambdas,) = metrics["attention"]["lambda"]
  mean_by_layer = np.mean(lam, axis=(1, 2, 3))
  chex.assert_trees_all_close(mean_by_layer, mean_lambdas, **FLOAT32)


def test_softmax_attention_has_no_lambda(make_trained):
  """λ is the factor of a second map, and softmax attention has only one."""
  trained = make_trained("softmax")
  batch = {"tokens": np.arange(16).reshape(1, 16)}

  measured = measure_jitted(trained, batch, attention=select_lambda)

  assert measured["attention"]["lam"] is None


def test_measuring_under_remat_does_not_change_the_model(make_trained):
  """The model's output is the same before and after a measurement.

  With remat, JAX caches traced layers. The cache must not keep a layer that
  contains the measurement.
  """
  num_layers = 3
  trained = make_trained(remat="full", num_layers=num_layers)
  tokens = np.arange(32).reshape(2, 16)

  def run_model():
    # A new function, so that jit traces the model each time.
    def apply(params):
      return trained.model.apply({"params": params}, tokens)

    return jax.jit(apply)(trained.params)

  output_before = run_model()
  measured = measure_jitted(trained, {"tokens": tokens}, hidden=identity)
  output_after = run_model()

  assert len(measured["hidden"]) == num_layers
  chex.assert_trees_all_equal(output_after, output_before)


def test_the_largest_logit_is_found_block_by_block(make_trained):
  """The maximum over three blocks of queries is the maximum over all queries.

  A row has 64 queries: two blocks of 24, and a last block of 16.
  """

  def largest_visible_logit(queries):
    is_visible = queries.mask[:, None, None, :, :]  # [B, 1, 1, t, S]
    logits = jnp.where(is_visible, queries.logits(), -jnp.inf)
    return jnp.max(logits)

  def update_maximum(maximum, queries):
    return jnp.maximum(maximum, largest_visible_logit(queries))

  def measure_in_blocks_and_at_once(inputs):
    maximum_over_blocks = inside.fold_query_blocks(
      update_maximum, jnp.float32(-jnp.inf), inputs, block_size=24
    )
    all_queries = inputs.queries(first=0, count=64)
    return {
      "in_blocks": maximum_over_blocks,
      "at_once": largest_visible_logit(all_queries),
    }

  num_layers = 2
  trained = make_trained("diff", num_layers=num_layers)
  batch = two_validation_rows(trained)

  measured = measure_jitted(
    trained, batch, attention=measure_in_blocks_and_at_once
  )

  largest_logit = measured["attention"]
  chex.assert_shape(largest_logit["at_once"], (num_layers,))
  chex.assert_trees_all_close(
    largest_logit["in_blocks"], largest_logit["at_once"], **FLOAT32
  )


# Without remat, the layers are unrolled. With it, they are scanned.
@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_layer_is_measured_with_its_own_window(make_trained, remat):
  """The last query sees 3 keys in a layer with a window of 3, or all 16 keys.

  The lowest layer is "plain": it has softmax attention, but also a window.
  """
  num_tokens = 16
  window = 3
  trained = make_trained(
    num_layers=4,
    plain_layers=1,
    window=window,
    # Layers with a window (w) and with full attention (f) alternate.
    window_pattern="wf",
    remat=remat,
  )
  tokens = np.arange(num_tokens).reshape(1, num_tokens)

  def count_keys(inputs):
    last_query = inputs.queries(first=num_tokens - 1, count=1)
    weights = last_query.weights()  # [B, H, 1, S]
    first_head_weights = weights[0, 0]
    return jnp.count_nonzero(first_head_weights)

  measured = measure_jitted(trained, {"tokens": tokens}, attention=count_keys)

  num_keys_by_layer = measured["attention"].tolist()
  assert num_keys_by_layer == [window, num_tokens, window, num_tokens]


@pytest.mark.parametrize(
  "length, block, window",
  [(37, 8, 7), *full([(16, 16, None), (5, 128, 3)])],
)
def test_blocks_of_queries_give_the_whole_map(length, block, window):
  """The sums over blocks of queries equal those over all queries.

  They are the sum of squared weights, and the number of visible keys.
  A row has two documents and two tokens of padding.
  """
  rng = np.random.default_rng(0)
  q = rng.standard_normal((2, length, 4, 2, 8), np.float32)
  k = rng.standard_normal((2, length, 2, 2, 8), np.float32)
  v = np.zeros((2, length, 2, 16), np.float32)
  lam = rng.random((2, length, 4), np.float32)
  num_padding = 2
  first_size = length // 2
  second_size = length - first_size - num_padding
  row_ids = np.repeat([1, 2, 0], [first_size, second_size, num_padding])
  ids = np.asarray([row_ids] * 2, np.int32)
  compute_weights = jax.jit(attention_weights, static_argnames="window")
  all_weights = compute_weights(
    q, k, lam, q_segment_ids=ids, kv_segment_ids=ids, window=window
  )

  def add_block(sums, queries):
    squares, num_visible = sums
    weights = jnp.where(queries.mask[:, None], queries.weights(), 0)
    squares += jnp.sum(weights**2, axis=(2, 3))
    return squares, num_visible + jnp.sum(queries.mask)

  @jax.jit
  def sum_over_blocks(q, k, v, lam, ids):
    inputs = inside.AttentionInputs(
      layer=DiffAttention(num_heads=4, head_dim=8, num_kv_heads=2),
      q=q,
      k=k,
      v=v,
      lam=lam,
      mask=MaskArguments(ids, ids, causal=True, window=window),
    )
    start = (jnp.zeros((2, 4)), 0)
    return inside.fold_query_blocks(add_block, start, inputs, block_size=block)

  squares, num_visible = sum_over_blocks(q, k, v, lam, ids)

  # Padding sees nothing.
  weights = np.asarray(all_weights)[:, :, : length - num_padding]
  expected = np.sum(weights**2, axis=(2, 3))
  chex.assert_trees_all_close(squares, expected, **FLOAT32)
  num_keys_per_row = 0
  for num_tokens in (first_size, second_size):
    # The n-th query of a document sees n keys, or those in the window.
    for num_keys in range(1, num_tokens + 1):
      num_keys_per_row += min(num_keys, window or num_keys)
  num_rows = 2
  assert num_visible == num_rows * num_keys_per_row


class LayerThatNeedsAllQueries(DiffAttention):
  """DIFF attention that does not declare that it can decode with a cache."""

  supports = frozenset()


def test_a_layer_that_needs_all_queries_gets_one_block():
  """A layer that can decode with a cache needs only one query at a time.

  The weights of other layers may depend on all queries of a row, so the
  `block_size` is ignored.
  """
  num_rows = 2
  length = 37
  head_dim = 8
  shape = (num_rows, length, 2, 2, head_dim)  # [B, T, heads, maps, D]
  ids = np.ones((num_rows, length), np.int32)
  rng = np.random.default_rng(0)
  inputs = inside.AttentionInputs(
    layer=LayerThatNeedsAllQueries(num_heads=2, head_dim=head_dim),
    q=rng.standard_normal(shape, np.float32),
    k=rng.standard_normal(shape, np.float32),
    v=np.zeros((num_rows, length, 2, 2 * head_dim), np.float32),
    lam=np.full((num_rows, length, 2), 0.3, np.float32),
    mask=MaskArguments(ids, ids, causal=True, window=None),
  )

  def count_blocks(num_blocks, queries):
    return num_blocks + 1

  def count_visible_keys(num_visible, queries):
    return num_visible + jnp.sum(queries.mask)

  num_blocks = inside.fold_query_blocks(count_blocks, 0, inputs, block_size=8)
  num_visible = inside.fold_query_blocks(
    count_visible_keys, 0, inputs, block_size=8
  )

  assert num_blocks == 1
  # The n-th query of a row sees n keys.
  num_visible_per_row = sum(range(1, length + 1))
  assert num_visible == num_rows * num_visible_per_row


def test_a_layer_that_does_not_attend_cannot_be_measured(
  make_trained, monkeypatch
):
  """Attention is measured where `compute_heads` calls `attend`."""

  def return_values(layer, q, k, v, lam, mask):
    """Stands for a method `compute_heads` that never calls `attend`."""
    return v

  def select_queries(inputs):
    return inputs.q

  # With as many key heads as heads, the values have the shape of the heads.
  trained = make_trained("softmax", num_heads=4, num_kv_heads=4)
  batch = {"tokens": np.arange(8).reshape(1, 8)}
  monkeypatch.setattr(Attention, "compute_heads", return_values)

  with pytest.raises(UserError, match="does not call Attention.attend"):
    inside.measure(
      trained.model, trained.params, batch, attention=select_queries
    )
