"""Reading with a cache equals reading everything at once, for every attention, in pieces of any size."""

import dataclasses
import functools
import math
import re

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
VARIANTS = {
  "diff": CONFIG,
  "diff, grouped heads": dataclasses.replace(CONFIG, num_kv_heads=2),
  "softmax": dataclasses.replace(CONFIG, attention="softmax", head_norm=False),
  "softmax, grouped heads": dataclasses.replace(
    CONFIG, attention="softmax", num_kv_heads=1, head_norm=False
  ),
  "diff_v2": dataclasses.replace(CONFIG, attention="diff_v2", head_norm=False),
  "diff_v2, grouped heads, untied": dataclasses.replace(
    CONFIG,
    attention="diff_v2",
    num_kv_heads=2,
    head_norm=False,
    tie_embeddings=False,
  ),
  "diff, window, no RoPE, biases": dataclasses.replace(
    CONFIG, num_kv_heads=2, window=5, rope=False, projection_biases=True
  ),
  "diff, grouped noise": dataclasses.replace(
    CONFIG, num_noise_heads=2, num_kv_heads=1
  ),
  "diff_v2, grouped noise": dataclasses.replace(
    CONFIG,
    attention="diff_v2",
    num_noise_heads=1,
    num_kv_heads=1,
    head_norm=False,
  ),
  "public": dataclasses.replace(
    CONFIG, num_noise_heads=2, num_kv_heads=1, **PUBLIC
  ),
  "diff, scaled embeddings": dataclasses.replace(CONFIG, embed_scale=32**0.5),
  "dex": dataclasses.replace(
    CONFIG, attention="dex", num_kv_heads=2, head_norm=False
  ),
  "softmax, window": dataclasses.replace(
    CONFIG, attention="softmax", head_norm=False, window=3
  ),
}
TOKENS = jax.random.randint(jax.random.key(1), (3, 24), 0, 64)


def trained_like(params):
  """Every parameter off its initial value, so that none is idle: gains are not 1, λ vectors not small."""
  rng = np.random.default_rng(7)

  def changed(leaf):
    noise = 0.2 * np.std(leaf) * rng.standard_normal(leaf.shape) + 0.02
    return jnp.asarray(leaf + noise.astype(leaf.dtype))

  return jax.tree.map(changed, params)


@functools.cache
def model_and_params(variant):
  model = Decoder(VARIANTS[variant])
  return model, trained_like(parameters(model, TOKENS[:1, :1]))


def cache_in_pages(model, rows, capacity, **options):
  """Pages of 8 tokens, those of the last row first."""
  pages = -(-capacity // 8)
  cache = empty_cache(
    model, rows, capacity, num_pages=rows * pages, page=8, **options
  )
  return cache.replace(
    tables=jnp.asarray(
      allocate([capacity] * rows, rows * pages, pages, 8)[::-1]
    )
  )


HARDEST = [
  "diff, grouped heads",
  "diff_v2, grouped heads, untied",
  "diff, window, no RoPE, biases",
]


@pytest.mark.parametrize(
  ("variant", "make"),
  [
    *((variant, empty_cache) for variant in HARDEST),
    (HARDEST[2], cache_in_pages),
    *full(
      (variant, empty_cache) for variant in VARIANTS if variant not in HARDEST
    ),
    *full(
      (variant, cache_in_pages) for variant in VARIANTS if variant != HARDEST[2]
    ),
  ],
)
def test_pieces_equal_the_whole(variant, make):
  model, params = model_and_params(variant)
  whole = jax.jit(model.apply)({"params": params}, TOKENS)
  weights, cache = unstack(model, params), make(model, 3, 24)
  read = jax.jit(functools.partial(extend, model))
  pieces = []
  for first, last in (
    (0, 8),
    (8, 9),
    (9, 10),
    (10, 11),
    (11, 19),
    (19, 20),
  ):  # both what decodes and what reads prompts
    hidden, cache = read(weights, TOKENS[:, first:last], cache)
    pieces.append(hidden)
  np.testing.assert_allclose(
    jnp.concatenate(pieces, axis=1), whole[:, :20], rtol=2e-5, atol=2e-5
  )
  assert cache.lengths.tolist() == [20] * 3


@pytest.mark.parametrize(
  "variant", [*full(["diff"]), "diff_v2, grouped heads, untied"]
)
def test_rows_of_unequal_lengths_do_not_see_what_does_not_count(variant):
  """Rows of 2, 5 and 8 tokens are read in one piece, filled up with tokens that do not count; then each goes on for itself."""
  model, params = model_and_params(variant)
  lengths = np.array([2, 5, 8])
  weights, cache = unstack(model, params), empty_cache(model, 3, 24)
  read, apply = jax.jit(functools.partial(extend, model)), jax.jit(model.apply)
  _, cache = read(weights, TOKENS[:, :8], cache, lengths)
  assert cache.lengths.tolist() == lengths.tolist()
  after = jax.random.randint(jax.random.key(2), (3, 3), 0, 64)
  for step in range(3):
    hidden, cache = read(weights, after[:, step : step + 1], cache)
    for row, length in enumerate(lengths):
      alone, last = (
        np.zeros((1, 16), np.int32),
        length + step,
      )  # what follows changes nothing: the model is causal
      alone[0, : last + 1] = [*TOKENS[row, :length], *after[row, : step + 1]]
      np.testing.assert_allclose(
        hidden[row, 0],
        apply({"params": params}, alone)[0, last],
        rtol=2e-5,
        atol=2e-5,
      )


@pytest.mark.parametrize(
  "variant", ["diff, grouped heads", *full(["diff_v2", "softmax, window"])]
)
def test_int8_is_near_and_not_the_same(variant):
  """Both what is written at once and what is appended to a page."""
  model, params = model_and_params(variant)
  read, weights = (
    jax.jit(functools.partial(extend, model)),
    unstack(model, params),
  )
  whole = jax.jit(model.apply)({"params": params}, TOKENS)[:, :15]
  cache, pieces = cache_in_pages(model, 3, 24, dtype="int8"), []
  for first, last in ((0, 13), (13, 14), (14, 15)):
    hidden, cache = read(weights, TOKENS[:, first:last], cache)
    pieces.append(hidden)
  assert cache.keys[0].tokens.dtype == cache.values[1].tokens.dtype == jnp.int8
  error = jnp.linalg.norm(
    jnp.concatenate(pieces, axis=1) - whole, axis=-1
  ) / jnp.linalg.norm(whole, axis=-1)
  assert 1e-4 < error.max() < 0.05


@pytest.mark.parametrize("make", [empty_cache, cache_in_pages])
@pytest.mark.parametrize("length", [1, 8])
def test_the_cache_is_read_and_written_where_it_lies(make, length, monkeypatch):
  """Nothing of the size of a layer's keys or values is transposed, copied or gathered, be it one new token or a chunk of a prompt."""
  monkeypatch.setattr(decode_xla, "_PIECE_LOGITS", 1 << 14)
  model, params = model_and_params("diff, grouped heads")
  weights, cache = (
    jax.eval_shape(lambda params: unstack(model, params), params),
    jax.eval_shape(lambda: make(model, 3, 1 << 14)),
  )
  tokens = jax.ShapeDtypeStruct((3, length), jnp.int32)
  compiled = (
    jax.jit(functools.partial(extend, model), donate_argnums=2)
    .lower(weights, tokens, cache)
    .compile()
  )
  moved = re.findall(
    r"= \w+\[([\d,]*)\]\S* (?:transpose|copy|gather|concatenate)\(",
    compiled.as_text(),
  )
  largest = max(
    math.prod(map(int, shape.split(","))) for shape in moved if shape
  )
  assert (
    largest < min(pool.tokens.size for pool in (*cache.keys, *cache.values)) / 4
  )


@pytest.mark.parametrize(
  "options",
  [{"dtype": jnp.int8}, {"dtype": jnp.int16, "num_pages": 3}],
  ids=str,
)
def test_a_dtype_that_a_cache_cannot_have_is_refused(options):
  with pytest.raises(
    UserError,
    match=r"^dtype = int(8|16): must be None for the model's float32, or int8 together with num_pages",
  ):
    empty_cache(Decoder(CONFIG), 1, 8, **options)


def test_a_model_that_is_not_causal_has_no_cache():
  with pytest.raises(UserError, match="config.model.causal = False"):
    empty_cache(Decoder(dataclasses.replace(CONFIG, causal=False)), 1, 8)


class ScaledAttention(Attention):
  """Softmax attention with its own scale."""

  supports = {"cached_decoding"}

  def compute_heads(self, q, k, v, lam, mask):
    return self.attention_fn(q, k, v, None, scale=3.0)


def read_all(model, params, length=8):
  """Returns the hidden states of the first tokens, read with a cache."""
  cache = empty_cache(model, 3, length)
  hidden, _ = extend(model, unstack(model, params), TOKENS[:, :length], cache)
  return hidden


def test_an_argument_that_decoding_ignores_is_refused(monkeypatch):
  """A new variant must not be decoded as if it did not pass it."""
  monkeypatch.setitem(ATTENTION, "scaled", ScaledAttention)
  config = dataclasses.replace(CONFIG, attention="scaled", head_norm=False)
  model = Decoder(config)
  with pytest.raises(TypeError, match="'scale'"):
    read_all(model, parameters(model, TOKENS[:1, :1]))


def test_a_scale_bound_to_attention_applies_to_decoding():
  model, params = model_and_params("diff, grouped heads")
  scaled = functools.partial(
    diff_attention, scale=1.0, implementation="reference"
  )
  model = model.clone(attention_fn=scaled)
  want = jax.jit(model.apply)({"params": params}, TOKENS[:, :8])
  np.testing.assert_allclose(read_all(model, params), want, atol=2e-5)


def test_a_model_that_is_not_causal_is_not_decoded():
  model, params = model_and_params("diff")
  cache = empty_cache(model, 3, 8)
  encoder = Decoder(dataclasses.replace(CONFIG, causal=False))
  with pytest.raises(ValueError, match="causal = False"):
    extend(encoder, unstack(model, params), TOKENS[:, :8], cache)


def test_weights_are_cast_once_and_vectors_stay_float32():
  model, params = model_and_params("diff")
  weights = unstack(model.clone(dtype=jnp.bfloat16), params)
  layer = weights["layers"][1]
  assert (
    layer["attention"]["query"].dtype == jnp.bfloat16
    and weights["embedding"].dtype == jnp.bfloat16
  )
  assert (
    layer["attention"]["lambda_q1"].dtype
    == layer["ffn_norm"].dtype
    == jnp.float32
  )
  np.testing.assert_array_equal(
    layer["ffn"]["up"], params["layers"]["ffn"]["up"][1].astype(jnp.bfloat16)
  )
