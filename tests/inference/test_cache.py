"""Reading tokens in pieces with a cache equals reading them all at once."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.inference.cache import empty_cache, extend, unstack
from diffjax.inference.pages import allocate
from diffjax.model.attention import ATTENTION, Attention
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.decode import xla as decode_xla
from tests.harness.parameters import parameters
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_LAYER
from tests.harness.variants import PUBLIC

CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=2,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=4,
  head_dim=8,
  ffn_dim=48,
  max_length=32,
)
SOFTMAX = dataclasses.replace(CONFIG, attention="softmax", head_norm=False)
DIFF_V2 = dataclasses.replace(CONFIG, attention="diff_v2", head_norm=False)
DEX = dataclasses.replace(CONFIG, attention="dex", head_norm=False)

CONFIGS = {
  "diff": CONFIG,
  "diff, grouped heads": dataclasses.replace(CONFIG, num_kv_heads=2),
  "softmax": SOFTMAX,
  "softmax, grouped heads": dataclasses.replace(SOFTMAX, num_kv_heads=1),
  "softmax, window": dataclasses.replace(SOFTMAX, window=3),
  "diff_v2": DIFF_V2,
  "diff_v2, grouped heads, untied": dataclasses.replace(
    DIFF_V2, num_kv_heads=2, tie_embeddings=False
  ),
  "diff, window, no RoPE, biases": dataclasses.replace(
    CONFIG, num_kv_heads=2, window=5, rope=False, projection_biases=True
  ),
  "diff, grouped noise": dataclasses.replace(
    CONFIG, num_noise_heads=2, num_kv_heads=1
  ),
  "diff_v2, grouped noise": dataclasses.replace(
    DIFF_V2, num_noise_heads=1, num_kv_heads=1
  ),
  "public": dataclasses.replace(
    CONFIG, num_noise_heads=2, num_kv_heads=1, **PUBLIC
  ),
  "diff, scaled embeddings": dataclasses.replace(CONFIG, embed_scale=32**0.5),
  "dex": dataclasses.replace(DEX, num_kv_heads=2),
}
# The configs that together use most of the options.
DEFAULT_TIER = (
  "diff, grouped heads",
  "diff_v2, grouped heads, untied",
  "diff, window, no RoPE, biases",
)
FULL_TIER = sorted(CONFIGS.keys() - set(DEFAULT_TIER))

NUM_ROWS = 3
TOKENS = jax.random.randint(jax.random.key(1), (NUM_ROWS, 24), 0, 64)


def perturbed(params):
  """Returns parameters that all differ from their initial values.

  Initially gains are 1 and λ vectors are small, so a mistake could be hidden.
  """
  rng = np.random.default_rng(7)

  def perturb(leaf):
    noise = 0.2 * np.std(leaf) * rng.standard_normal(leaf.shape) + 0.02
    return jnp.asarray(leaf + noise.astype(leaf.dtype))

  return jax.tree.map(perturb, params)


@functools.cache
def model_and_params(config_name):
  """Returns a small decoder of `CONFIGS`, and its parameters."""
  model = Decoder(CONFIGS[config_name])
  return model, perturbed(parameters(model, TOKENS[:1, :1]))


def contiguous_cache(model, capacity):
  """Returns an empty cache for three rows, in which each row has one page."""
  return empty_cache(model, NUM_ROWS, capacity)


def paged_cache(model, capacity, **options):
  """Returns an empty cache for three rows, with pages of 8 tokens.

  The rows have their pages in reversed order.
  """
  pages_per_row = math.ceil(capacity / 8)
  num_pages = NUM_ROWS * pages_per_row
  cache = empty_cache(
    model, NUM_ROWS, capacity, num_pages=num_pages, page=8, **options
  )
  tables = allocate([capacity] * NUM_ROWS, num_pages, pages_per_row, 8)
  return cache.replace(tables=jnp.asarray(tables[::-1]))


def read_in_pieces(model, params, cache, ends):
  """Returns the hidden states of tokens that are read in several pieces.

  Args:
    model: a decoder.
    params: its parameters.
    cache: an empty cache.
    ends: where each piece ends. The first one begins at 0.

  Returns:
    The hidden states, and the cache after the last piece.
  """
  weights = unstack(model, params)
  extend_cache = jax.jit(functools.partial(extend, model))
  pieces = []
  start = 0
  for end in ends:
    hidden, cache = extend_cache(weights, TOKENS[:, start:end], cache)
    pieces.append(hidden)
    start = end
  return jnp.concatenate(pieces, axis=1), cache


@pytest.mark.parametrize(
  ("config_name", "make_cache"),
  [
    *[(name, contiguous_cache) for name in DEFAULT_TIER],
    ("diff, window, no RoPE, biases", paged_cache),
    *full([(name, contiguous_cache) for name in FULL_TIER]),
    *full([(name, paged_cache) for name in FULL_TIER]),
  ],
)
def test_pieces_give_the_hidden_states_of_the_whole(config_name, make_cache):
  """Three rows of 24 tokens are read up to token 20, in pieces and at once."""
  model, params = model_and_params(config_name)
  cache = make_cache(model, capacity=24)

  # Pieces of one token are decoded. Longer ones are read like prompts.
  hidden, cache = read_in_pieces(
    model, params, cache, ends=(8, 9, 10, 11, 19, 20)
  )

  at_once = jax.jit(model.apply)({"params": params}, TOKENS)
  chex.assert_trees_all_close(hidden, at_once[:, :20], **FLOAT32_LAYER)
  assert cache.lengths.tolist() == [20, 20, 20]


@pytest.mark.parametrize(
  "config_name", ["diff_v2, grouped heads, untied", *full(["diff"])]
)
def test_padding_of_shorter_rows_is_invisible(config_name):
  """Prompts of 2, 5 and 8 tokens are read together, then each grows by 3.

  Each row alone, read by the whole model without a cache, is the reference.
  """
  model, params = model_and_params(config_name)
  weights = unstack(model, params)
  extend_cache = jax.jit(functools.partial(extend, model))
  apply = jax.jit(model.apply)
  prompt_lengths = np.array([2, 5, 8])
  num_new_tokens = 3
  new_tokens = jax.random.randint(
    jax.random.key(2), (NUM_ROWS, num_new_tokens), 0, 64
  )

  cache = contiguous_cache(model, capacity=24)
  _, cache = extend_cache(weights, TOKENS[:, :8], cache, prompt_lengths)
  assert cache.lengths.tolist() == prompt_lengths.tolist()
  pieces = []
  for step in range(num_new_tokens):
    hidden, cache = extend_cache(weights, new_tokens[:, [step]], cache)
    pieces.append(hidden)
  decoded = jnp.concatenate(pieces, axis=1)

  for row, prompt_length in enumerate(prompt_lengths):
    end = prompt_length + num_new_tokens
    ids = np.zeros((1, 16), np.int32)
    ids[0, :end] = [*TOKENS[row, :prompt_length], *new_tokens[row]]
    hidden = apply({"params": params}, ids)
    expected = hidden[0, prompt_length:end]
    chex.assert_trees_all_close(decoded[row], expected, **FLOAT32_LAYER)


@pytest.mark.parametrize(
  "config_name", ["diff, grouped heads", *full(["diff_v2", "softmax, window"])]
)
def test_an_int8_cache_approximates_the_hidden_states(config_name):
  """Keys and values are rounded to 8 bits when they are stored.

  The first 13 tokens are stored at once, and two more one by one.
  """
  model, params = model_and_params(config_name)
  cache = paged_cache(model, capacity=24, dtype="int8")

  hidden, cache = read_in_pieces(model, params, cache, ends=(13, 14, 15))

  # The model has two layers.
  assert cache.keys[0].tokens.dtype == jnp.int8
  assert cache.values[1].tokens.dtype == jnp.int8
  without_cache = jax.jit(model.apply)({"params": params}, TOKENS)
  expected = without_cache[:, :15]
  distance = jnp.linalg.norm(hidden - expected, axis=-1)
  relative_error = distance / jnp.linalg.norm(expected, axis=-1)
  # An error of 0 would mean that the cache is not in int8.
  assert 1e-4 < relative_error.max() < 0.05


@pytest.mark.parametrize("make_cache", [contiguous_cache, paged_cache])
@pytest.mark.parametrize("num_tokens", [1, 8], ids=["decoding", "prompt"])
def test_the_cache_is_not_copied(make_cache, num_tokens, monkeypatch):
  """The program moves no array of the size of a layer's keys or values.

  A copy of the cache for each token would cost more than the token itself.
  """
  # Keys are read in pieces. Few logits make them smaller than this small cache.
  monkeypatch.setattr(decode_xla, "_PIECE_LOGITS", 1 << 14)
  model, params = model_and_params("diff, grouped heads")
  weights = jax.eval_shape(functools.partial(unstack, model), params)
  cache = jax.eval_shape(functools.partial(make_cache, model, 1 << 14))
  tokens = jax.ShapeDtypeStruct((NUM_ROWS, num_tokens), jnp.int32)

  # XLA may write into the cache, the argument 2, because it is donated.
  extend_cache = jax.jit(functools.partial(extend, model), donate_argnums=2)
  hlo = extend_cache.lower(weights, tokens, cache).compile().as_text()

  moved_shapes = re.findall(
    r"= \w+\[([\d,]+)\]\S* (?:transpose|copy|gather|concatenate)\(", hlo
  )
  moved_sizes = []
  for shape in moved_shapes:
    axes = [int(axis) for axis in shape.split(",")]
    moved_sizes.append(math.prod(axes))
  pool_sizes = [pool.tokens.size for pool in (*cache.keys, *cache.values)]
  assert max(moved_sizes) < min(pool_sizes) / 4


@pytest.mark.parametrize(
  "options",
  [{"dtype": jnp.int8}, {"dtype": jnp.int16, "num_pages": 3}],
  ids=["int8 without pages", "int16"],
)
def test_an_unsupported_dtype_is_rejected(options):
  """In int8, each page has scales. So int8 needs a number of pages."""
  model = Decoder(CONFIG)
  message = (
    r"^dtype = int(8|16): must be None for the model's float32, or int8"
    " together with num_pages"
  )
  with pytest.raises(UserError, match=message):
    empty_cache(model, batch_size=1, capacity=8, **options)


def test_weights_are_cast_once_and_vectors_stay_float32():
  model, params = model_and_params("diff")

  weights = unstack(model.clone(dtype=jnp.bfloat16), params)

  # `unstack` gives each layer its own arrays.
  layer = weights["layers"][1]
  assert weights["embedding"].dtype == jnp.bfloat16
  assert layer["attention"]["query"].dtype == jnp.bfloat16
  assert layer["attention"]["lambda_q1"].dtype == jnp.float32
  assert layer["ffn_norm"].dtype == jnp.float32
  up = params["layers"]["ffn"]["up"][1]
  chex.assert_trees_all_equal(layer["ffn"]["up"], up.astype(jnp.bfloat16))


# Models that cannot be decoded.


@pytest.fixture
def encoder():
  """A model in which a token also sees later tokens."""
  return Decoder(dataclasses.replace(CONFIG, causal=False))


def test_a_model_that_is_not_causal_has_no_cache(encoder):
  with pytest.raises(UserError, match="config.model.causal = False"):
    empty_cache(encoder, batch_size=1, capacity=8)


def test_a_model_that_is_not_causal_is_not_decoded(encoder):
  # The cache and the weights are those of a causal model.
  model, params = model_and_params("diff")
  cache = contiguous_cache(model, capacity=8)
  weights = unstack(model, params)

  with pytest.raises(ValueError, match="causal = False"):
    extend(encoder, weights, TOKENS[:, :8], cache)


class ScaledAttention(Attention):
  """Softmax attention with its own scale."""

  supports = {"cached_decoding"}

  def compute_heads(self, q, k, v, lam, mask):
    return self.attention_fn(q, k, v, None, scale=3.0)


def test_a_variant_with_an_argument_that_decoding_lacks_is_rejected(
  monkeypatch,
):
  """Decoding has no `scale`, which this variant gives to its attention.

  Otherwise it would be decoded as if it had the usual scale.
  """
  monkeypatch.setitem(ATTENTION, "scaled", ScaledAttention)
  config = dataclasses.replace(CONFIG, attention="scaled", head_norm=False)
  model = Decoder(config)
  params = parameters(model, TOKENS[:1, :1])
  cache = contiguous_cache(model, capacity=8)
  weights = unstack(model, params)

  with pytest.raises(TypeError, match="'scale'"):
    extend(model, weights, TOKENS[:, :8], cache)


def test_decoding_uses_the_scale_of_the_models_attention_function():
  """The scale of attention logits is 1 here. By default it is 1/√D."""
  default_model, params = model_and_params("diff, grouped heads")
  scaled_attention = functools.partial(
    diff_attention, scale=1.0, implementation="reference"
  )
  model = default_model.clone(attention_fn=scaled_attention)
  cache = contiguous_cache(model, capacity=8)

  hidden, _ = read_in_pieces(model, params, cache, ends=(8,))

  expected = jax.jit(model.apply)({"params": params}, TOKENS[:, :8])
  chex.assert_trees_all_close(hidden, expected, **FLOAT32_LAYER)
