"""Models run on matrices in int8, on one device and on several."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import MeshConfig, ModelConfig
from diffjax.inference.cache import unstack
from diffjax.inference.sampler import Sampler
from diffjax.int8 import dequantised, is_quantised, quantise
from diffjax.model.decoder import Decoder, logits
from diffjax.parallel.mesh import make_mesh, sharded_attention
from diffjax.parallel.rules import shardings
from tests.harness.parameters import parameters
from tests.harness.tolerances import FLOAT32_LAYER, FLOAT32_MODEL

pytest.importorskip("qwix")

CONFIG = ModelConfig(
  attention="diff_v2",
  vocab_size=64,
  num_layers=2,
  embed_dim=32,
  num_heads=8,
  num_kv_heads=4,
  head_dim=8,
  ffn_dim=48,
  max_length=300,
)
# The axes of each matrix [layer, ...] that a product with it sums over. All
# other axes index columns.
INPUT_AXES = {
  "query": (1,),
  "key": (1,),
  "value": (1,),
  "out": (1, 2),
  "gate": (1,),
  "up": (1,),
  "down": (1,),
}
LONG_PROMPT = np.random.default_rng(0).integers(0, 64, 140).tolist()


@pytest.fixture(scope="module")
def model():
  return Decoder(CONFIG)


@pytest.fixture(scope="module")
def params(model):
  """Parameters in float32, with logits that are far apart."""
  params = parameters(model, np.zeros((1, 1), np.int32))
  return params | {"embedding": 3 * np.asarray(params["embedding"])}


@pytest.fixture(scope="module")
def rounded(params):
  """The same parameters, with the matrices of the layers in int8."""
  # `quantise` donates the matrices, so it gets a copy.
  return quantise(jax.device_get(params))


@pytest.fixture(scope="module")
def exact(rounded):
  """The float32 values of the rounded parameters."""

  def dequantise_all(params):
    return jax.tree.map(dequantised, params, is_leaf=is_quantised)

  return jax.jit(dequantise_all)(rounded)


@pytest.fixture(scope="module")
def exact_hidden(model, exact):
  """The hidden states of LONG_PROMPT with the values of `exact`."""
  return jax.jit(model.apply)({"params": exact}, np.array([LONG_PROMPT]))


@pytest.fixture(scope="module")
def sampler(model, rounded):
  """A sampler with the rounded parameters, on one device."""
  return Sampler(model, rounded, batch_size=2, capacity=200)


def by_name(params):
  """Returns the parameters by the last part of their paths, such as "query"."""
  named = {}
  leaves = jax.tree.leaves_with_path(params, is_leaf=is_quantised)
  for path, leaf in leaves:
    named[path[-1].key] = leaf
  return named


# Rounding.


def test_only_matrices_of_the_layers_are_rounded(params, rounded):
  """`rounded` has the values of `params`, with some arrays in int8."""
  originals = by_name(params)
  rounded_names = set()
  for name, leaf in by_name(rounded).items():
    if is_quantised(leaf):
      rounded_names.add(name)
    else:
      chex.assert_trees_all_equal(leaf, originals[name])

  assert rounded_names == {"query", "key", "value", "out", "gate", "up", "down"}


@pytest.mark.parametrize(("name", "input_axes"), INPUT_AXES.items())
def test_rounding_changes_a_weight_by_at_most_half_a_step(
  params, rounded, exact, name, input_axes
):
  """A step is 1/127 of the largest weight in the same column.

  `exact` has the values of `rounded` in float32.
  """
  matrix = np.asarray(by_name(params)[name])
  exact_matrix = np.asarray(by_name(exact)[name])
  rounded_matrix = by_name(rounded)[name]

  step = np.abs(matrix).max(axis=input_axes, keepdims=True) / 127
  error = np.abs(exact_matrix - matrix)
  # A little more than 0.5, because the division by the step rounds, too.
  assert np.all(error <= 0.5001 * step)
  assert rounded_matrix.qvalue.dtype == jnp.int8


# Running on rounded weights.


def test_int8_matrices_compute_what_their_float32_values_do(
  model, rounded, exact_hidden
):
  """The value of a weight is its int8 number times the scale of its column."""
  apply = jax.jit(model.apply)

  hidden = apply({"params": rounded}, np.array([LONG_PROMPT]))

  chex.assert_trees_all_close(hidden, exact_hidden, **FLOAT32_LAYER)


def test_the_sampler_gives_the_logits_of_the_model(
  params, sampler, exact_hidden
):
  """The sampler has int8 matrices, and the model has their float32 values.

  The prompts are a single token, 5, and one of 140 tokens.
  """
  state = sampler.prefill([[5], LONG_PROMPT])

  # The logits after the last token of the long prompt, which is the second.
  last_hidden = np.asarray(exact_hidden)[:, -1:]
  expected = jax.jit(logits)(params, last_hidden)[0, 0]
  actual = np.asarray(state.logits)[1]
  chex.assert_trees_all_close(actual, expected, **FLOAT32_MODEL)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matrices_stay_in_int8_with_float32_scales_for_generation(
  model, rounded, dtype
):
  """Generation converts other parameters to the compute dtype in advance."""
  unstack_parameters = functools.partial(unstack, model.clone(dtype=dtype))
  prepared = jax.jit(unstack_parameters)(rounded)

  leaves = jax.tree.leaves(prepared["layers"], is_leaf=is_quantised)
  matrices = [leaf for leaf in leaves if is_quantised(leaf)]
  # Each of two layers has four matrices of attention and three feed-forward.
  assert len(matrices) == 2 * 7
  for matrix in matrices:
    assert matrix.qvalue.dtype == jnp.int8
    assert matrix.scale.dtype == jnp.float32


# Several devices.


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(MeshConfig(data=1, tensor=4), jax.devices()[:4])


@pytest.fixture(scope="module")
def split(params, mesh):
  """The rounded parameters on four devices."""
  copy = jax.device_get(params)
  return quantise(jax.device_put(copy, shardings(params, mesh)))


def test_each_device_holds_its_part_of_a_rounded_matrix(split):
  """`split` are parameters on four devices, which share each int8 matrix."""
  for leaf in jax.tree.leaves(split, is_leaf=is_quantised):
    if is_quantised(leaf):
      shard = leaf.qvalue.addressable_shards[0].data
      assert shard.size == leaf.qvalue.size // 4


@pytest.mark.full
def test_several_devices_give_the_answers_of_one(model, mesh, split, sampler):
  """The layers' int8 matrices are split over four devices."""
  prompts = [[5], LONG_PROMPT]
  sharded_model = model.clone(attention_fn=sharded_attention(mesh, "auto"))
  split_sampler = Sampler(sharded_model, split, batch_size=2, capacity=200)

  state = split_sampler.prefill(prompts)
  answers = split_sampler.generate(prompts, max_new_tokens=9)

  expected_state = sampler.prefill(prompts)
  expected_answers = sampler.generate(prompts, max_new_tokens=9)
  chex.assert_trees_all_close(
    state.logits, expected_state.logits, **FLOAT32_LAYER
  )
  assert answers == expected_answers
