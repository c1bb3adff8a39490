"""Generation on several devices gives the answers of one device.

The model and the cache are split over the mesh axis "tensor".
"""

import re
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest

from diffjax.config import MeshConfig, ModelConfig
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder
from diffjax.parallel.mesh import make_mesh, sharded_attention
from diffjax.parallel.rules import shardings
from tests.harness.parameters import parameters
from tests.harness.tiers import full
from tests.harness.tolerances import FLOAT32_LAYER

PROMPT_OF_140 = np.random.default_rng(0).integers(0, 64, 140).tolist()
PROMPTS = [[5], [7, 3, 9], PROMPT_OF_140]
TENSOR_4 = MeshConfig(data=1, tensor=4)
# The mesh of a training run, which writes a sample at its end.
TRAINING_MESH = MeshConfig(data=2, fsdp=2, tensor=2)


class SmallModel(NamedTuple):
  """A small decoder and its parameters."""

  decoder: Decoder
  params: dict

  def sampler(self, **cache_options):
    """Returns a sampler of three rows of up to 200 tokens."""
    return Sampler(
      self.decoder, self.params, batch_size=3, capacity=200, **cache_options
    )


def small_model(attention):
  """Returns a decoder on one device."""
  config = ModelConfig(
    attention=attention,
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_dim=48,
    max_length=300,
  )
  decoder = Decoder(config)
  params = jax.device_get(parameters(decoder, np.zeros((1, 1), np.int32)))
  # Larger embeddings separate the logits, so that rounding errors do not change
  # which token is the most likely one.
  params["embedding"] = 3 * params["embedding"]
  return SmallModel(decoder, params)


def split_over(mesh_config, model):
  """Returns the model with its parameters and attention split over a mesh."""
  num_devices = mesh_config.data * mesh_config.fsdp * mesh_config.tensor
  mesh = make_mesh(mesh_config, jax.devices()[:num_devices])
  attention_fn = sharded_attention(mesh, "auto")
  params = jax.device_put(model.params, shardings(model.params, mesh))
  return SmallModel(model.decoder.clone(attention_fn=attention_fn), params)


@pytest.mark.full
@pytest.mark.parametrize(
  ("attention", "mesh", "cache_options"),
  [
    ("diff", TENSOR_4, {"cache_tokens": 512}),
    ("diff", TENSOR_4, {}),
    ("diff_v2", TENSOR_4, {"cache_tokens": 512}),
    ("diff", TENSOR_4, {"cache_dtype": "int8"}),
    ("softmax", TENSOR_4, {}),
    ("diff", TRAINING_MESH, {}),
  ],
)
def test_several_devices_give_the_answers_of_one(
  attention, mesh, cache_options
):
  """A model that is split over 4 or 8 devices generates the same tokens."""
  prompts = [[5], [7, 3, 9], PROMPT_OF_140]
  model = small_model(attention)
  one_device = model.sampler(**cache_options)
  several_devices = split_over(mesh, model).sampler(**cache_options)
  draw_options = dict(temperature=1.3, top_p=0.8, seed=0)

  most_likely_tokens = several_devices.generate(prompts, 11)
  drawn_tokens = several_devices.generate(prompts, 11, **draw_options)

  assert most_likely_tokens == one_device.generate(prompts, 11)
  assert drawn_tokens == one_device.generate(prompts, 11, **draw_options)


@pytest.mark.parametrize(
  ("attention", "cache_options"),
  [*full([("diff", {})]), ("diff_v2", {"cache_tokens": 512})],
)
def test_several_devices_give_the_logits_of_one(attention, cache_options):
  """Three prompts are read, then two tokens are appended to each of them."""
  model = small_model(attention)
  model_on_four_devices = split_over(TENSOR_4, model)

  def logits_after_each_step(sampler):
    after_prompts = sampler.prefill([[5], [7, 3, 9], PROMPT_OF_140], 20)
    after_one_token = sampler.step(after_prompts, [1, 2, 3])
    after_two_tokens = sampler.step(after_one_token, [9, 8, 7])
    states = (after_prompts, after_one_token, after_two_tokens)
    return [state.logits for state in states]

  actual = logits_after_each_step(
    model_on_four_devices.sampler(**cache_options)
  )

  expected = logits_after_each_step(model.sampler(**cache_options))
  chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


@pytest.fixture(
  scope="module",
  params=[
    pytest.param({}, id="float32"),
    pytest.param({"cache_dtype": "int8"}, id="int8", marks=pytest.mark.full),
  ],
)
def split_sampler(request):
  """A sampler of DIFF on four devices."""
  model = split_over(TENSOR_4, small_model("diff"))
  return model.sampler(**request.param)


def test_the_cache_is_split_over_its_heads(split_sampler):
  """Each of four devices has a quarter of the heads, which are axis 1."""
  state = split_sampler.prefill(PROMPTS, 20)

  for pool in jax.tree.leaves((state.cache.keys, state.cache.values)):
    shard = pool.addressable_shards[0].data
    assert shard.shape[1] == pool.shape[1] // 4


def test_each_device_has_a_quarter_of_the_cache_and_of_the_matrices(
  split_sampler,
):
  cache = split_sampler._make_cache()

  for leaf in jax.tree.leaves(
    (cache.keys, cache.values, split_sampler._params)
  ):
    # Vectors are small. Each device has all of them.
    if leaf.ndim > 1:
      assert leaf.addressable_shards[0].data.size == leaf.size // 4


def shapes_of_collectives(hlo):
  """Returns the shapes of the arrays that devices exchange, in sorted order.

  The text of a compiled program has lines such as
  "%sum.2 = f32[3,1,32]{2,1,0} all-reduce(%part)", with the shape "3,1,32".
  """
  collectives = re.findall(
    r"= (.*) (?:all-gather|all-reduce|all-to-all|collective-permute)\(", hlo
  )
  shapes = []
  for result_types in collectives:
    shapes.extend(re.findall(r"\w+\[([\d,]*)\]", result_types))
  return sorted(shapes)


def test_devices_exchange_only_hidden_states_and_logits(split_sampler):
  """Each device has a part of the vocabulary, of the heads and of the FFN.

  So devices sum the hidden states after the embedding, and after the attention
  and the FFN of each layer. At the end they collect the logits.
  """
  num_layers = 2
  rows_tokens_features = "3,1,32"
  rows_vocabulary = "3,64"
  state = split_sampler.prefill(PROMPTS)
  next_tokens = np.zeros(3, np.int32)

  lowered = split_sampler._step.lower(split_sampler._params, state, next_tokens)
  hlo = lowered.compile().as_text()

  num_sums = 1 + 2 * num_layers
  expected = [rows_tokens_features] * num_sums + [rows_vocabulary]
  assert shapes_of_collectives(hlo) == expected
