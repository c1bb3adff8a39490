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
TOKENS = np.random.default_rng(1).integers(0, 64, (NUM_ROWS, 24), np.int32)


def perturbed(params):
  """Returns NumPy parameters that all differ from their initial values.

  Initially gains are 1 and λ vectors are small, so a mistake could be hidden.
  """
  rng = np.random.default_rng(7)

  def perturb(leaf):
    noise = 0.2 * np.std(leaf) * rng.standard_normal(leaf.shape) + 0.02
    return leaf + noise.astype(leaf.dtype)

  return jax.tree.map(perturb, jax.device_get(params))


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
  return cache.replace(tables=tables[::-1].copy())


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
    pieces.append(np.asarray(hidden))
    start = end
  return np.concatenate(pieces, axis=1), cache


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
  """A decoder reads 20 tokens of each row in six pieces, or all at once.

  Pieces of one token are decoded. Longer ones are read like prompts.
  """
  model, params = model_and_params(config_name)
  cache = make_cache(model, capacity=24)
  ends_of_pieces = (8, 9, 10, 11, 19, 20)

  hidden, cache = read_in_pieces(model, params, cache, ends_of_pieces)

  expected = jax.jit(model.apply)({"params": params}, TOKENS[:, :20])
  chex.assert_trees_all_close(hidden, expected, **FLOAT32_LAYER)
  assert cache.lengths.tolist() == [20, 20, 20]


@pytest.mark.parametrize(
  "config_name", ["diff_v2, grouped heads, untied", *full(["diff"])]
)
def test_padding_of_shorter_rows_is_invisible(config_name):
  """Three prompts are padded to 8 tokens. Then each row grows by three tokens.

  The hidden states of the new tokens are those of a model that reads each row
  alone, without padding and without a cache.
  """
  model, params = model_and_params(config_name)
  prompt_lengths = np.array([2, 5, 8])
  rng = np.random.default_rng(1)
  prompts = rng.integers(0, 64, (3, 8), np.int32)
  new_tokens = rng.integers(0, 64, (3, 3), np.int32)
  weights = unstack(model, params)
  cache = empty_cache(model, batch_size=3, capacity=24)
  extend_cache = jax.jit(functools.partial(extend, model))

  _, cache = extend_cache(weights, prompts, cache, prompt_lengths)
  hidden_of_steps = []
  for step in range(3):
    hidden, cache = extend_cache(weights, new_tokens[:, [step]], cache)
    hidden_of_steps.append(np.asarray(hidden))
  actual = np.concatenate(hidden_of_steps, axis=1)

  assert cache.lengths.tolist() == [5, 8, 11]
  for row, prompt_length in enumerate(prompt_lengths):
    prompt = prompts[row, :prompt_length]
    whole_row = np.concatenate([prompt, new_tokens[row]])
    hidden = jax.jit(model.apply)({"params": params}, whole_row[None])
    expected = np.asarray(hidden)[0, prompt_length:]
    chex.assert_trees_all_close(actual[row], expected, **FLOAT32_LAYER)


@pytest.mark.parametrize(
  "config_name", ["diff, grouped heads", *full(["diff_v2", "softmax, window"])]
)
def test_an_int8_cache_approximates_the_hidden_states(config_name):
  """Keys and values are rounded to 8 bits when they are stored.

  The first 13 tokens of each row are stored at once, and two more one by one.
  """
  model, params = model_and_params(config_name)
  cache = paged_cache(model, capacity=24, dtype="int8")

  hidden, cache = read_in_pieces(model, params, cache, ends=(13, 14, 15))

  for pool in (*cache.keys, *cache.values):
    assert pool.tokens.dtype == jnp.int8
  expected = jax.jit(model.apply)({"params": params}, TOKENS[:, :15])
  expected = np.asarray(expected)
  distance = np.linalg.norm(hidden - expected, axis=-1)
  relative_error = distance / np.linalg.norm(expected, axis=-1)
  # int8 has steps of 1/127 of the largest number, which is about 1%.
  assert relative_error.max() < 0.05
  # Without rounding, the error would be below 1e-4.
  assert relative_error.max() > 1e-4


def sizes_of_copies(hlo):
  """Returns the sizes of the arrays that a compiled program copies or moves.

  The text of a program has lines such as
  "%copy.3 = f32[3,2,16]{2,1,0} copy(%argument)", with the shape [3, 2, 16].
  """
  shape_of_a_copy = (
    r"= \w+\[([\d,]+)\]\S* (?:transpose|copy|gather|concatenate)\("
  )
  sizes = []
  for shape in re.findall(shape_of_a_copy, hlo):
    axes = [int(axis) for axis in shape.split(",")]
    sizes.append(math.prod(axes))
  return sizes


@pytest.mark.parametrize("make_cache", [contiguous_cache, paged_cache])
@pytest.mark.parametrize("num_tokens", [1, 8], ids=["decoding", "prompt"])
def test_the_cache_is_not_copied(make_cache, num_tokens, monkeypatch):
  """The compiled program moves no array as large as a layer's keys or values.

  A copy of the cache for each token would cost more than the token itself.
  """
  capacity = 16_384
  # Attention reads the keys in pieces of at most this many logits, and may copy
  # a piece. By default, a piece could hold all keys of this small cache.
  monkeypatch.setattr(decode_xla, "_PIECE_LOGITS", 16_384)
  model, params = model_and_params("diff, grouped heads")
  weights = unstack(model, params)
  cache = make_cache(model, capacity)
  tokens = np.zeros((NUM_ROWS, num_tokens), np.int32)

  def extend_cache(weights, tokens, cache):
    return extend(model, weights, tokens, cache)

  # XLA may write into a cache that is donated.
  program = jax.jit(extend_cache, donate_argnames="cache")
  hlo = program.lower(weights, tokens, cache).compile().as_text()

  pool_sizes = [pool.tokens.size for pool in (*cache.keys, *cache.values)]
  # A piece has less than a quarter of the keys.
  assert max(sizes_of_copies(hlo)) < min(pool_sizes) / 4


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
  """`unstack` gives each layer its own arrays, with matrices in bfloat16."""
  model, params = model_and_params("diff")
  bfloat16_model = model.clone(dtype=jnp.bfloat16)

  weights = unstack(bfloat16_model, params)

  second_layer = weights["layers"][1]
  attention = second_layer["attention"]
  assert weights["embedding"].dtype == jnp.bfloat16
  assert attention["query"].dtype == jnp.bfloat16
  assert attention["lambda_q1"].dtype == jnp.float32
  assert second_layer["ffn_norm"].dtype == jnp.float32
  up_of_all_layers = params["layers"]["ffn"]["up"]
  expected_up = up_of_all_layers[1].astype(jnp.bfloat16)
  chex.assert_trees_all_equal(second_layer["ffn"]["up"], expected_up)


# Models that cannot be decoded.


def test_a_model_that_is_not_causal_has_no_cache():
  encoder = Decoder(dataclasses.replace(CONFIG, causal=False))
  with pytest.raises(UserError, match="config.model.causal = False"):
    empty_cache(encoder, batch_size=1, capacity=8)


def test_a_model_that_is_not_causal_is_not_decoded():
  causal_model, params = model_and_params("diff")
  weights = unstack(causal_model, params)
  # A model that is not causal has no cache, so this is another model's cache.
  cache = empty_cache(causal_model, batch_size=3, capacity=8)
  config = dataclasses.replace(causal_model.config, causal=False)
  model = Decoder(config)

  with pytest.raises(ValueError, match="causal = False"):
    jax.eval_shape(
      functools.partial(extend, model), weights, TOKENS[:, :8], cache
    )


def test_decoding_rejects_a_variant_that_scales_its_logits(monkeypatch):
  """Attention with a cache has no argument `scale`.

  If decoding ignored the argument, the logits would have the usual scale.
  """

  class ScaledAttention(Attention):
    supports = {"cached_decoding"}

    def compute_heads(self, q, k, v, lam, mask):
      return self.attention_fn(q, k, v, None, scale=3.0)

  monkeypatch.setitem(ATTENTION, "scaled", ScaledAttention)
  config = dataclasses.replace(CONFIG, attention="scaled", head_norm=False)
  model = Decoder(config)
  ids = np.zeros((1, 8), np.int32)
  weights = unstack(model, parameters(model, ids))
  cache = empty_cache(model, batch_size=1, capacity=8)

  with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
    jax.eval_shape(functools.partial(extend, model), weights, ids, cache)


def test_decoding_uses_the_scale_of_the_models_attention_function():
  """The scale of attention logits is 1 here. By default it is 1/√D."""
  default_model, params = model_and_params("diff, grouped heads")
  scaled_attention = functools.partial(
    diff_attention, scale=1.0, implementation="reference"
  )
  model = default_model.clone(attention_fn=scaled_attention)
  weights = unstack(model, params)
  cache = empty_cache(model, batch_size=3, capacity=8)
  ids = TOKENS[:, :8]

  hidden, _ = jax.jit(functools.partial(extend, model))(weights, ids, cache)

  expected = jax.jit(model.apply)({"params": params}, ids)
  chex.assert_trees_all_close(hidden, expected, **FLOAT32_LAYER)
