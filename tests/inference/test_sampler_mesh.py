"""Generation on several devices: the model and the cache are split over the tensor axis, and the answers are those of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import MeshConfig, ModelConfig
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder
from diffjax.parallel.mesh import make_mesh, sharded_attention
from diffjax.parallel.rules import shardings
from tests.harness.parameters import parameters
from tests.harness.tiers import full

PROMPTS = [
  [5],
  [7, 3, 9],
  [int(i) for i in np.random.default_rng(0).integers(0, 64, 140)],
]
PAGES = {"cache_tokens": 512}
INT8 = {"cache_dtype": "int8"}


def make(attention, mesh):
  """A decoder on one device, and the same on a mesh."""
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
  model = Decoder(config)
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  params |= {
    "embedding": 3 * params["embedding"]
  }  # logits far enough apart that rounding decides nothing
  mesh = make_mesh(mesh, jax.devices()[: 4 if mesh.data == 1 else 8])
  split = model.clone(attention_fn=sharded_attention(mesh, "auto"))
  return (model, params), (
    split,
    jax.device_put(params, shardings(params, mesh)),
  )


@pytest.mark.parametrize(
  "attention, mesh, cache",
  [
    ("diff", MeshConfig(data=1, tensor=4), {}),
    ("diff_v2", MeshConfig(data=1, tensor=4), PAGES),
    *full(
      [
        ("diff", MeshConfig(data=1, tensor=4), INT8),
        ("softmax", MeshConfig(data=1, tensor=4), {}),
        (
          "diff",
          MeshConfig(data=2, fsdp=2, tensor=2),
          {},
        ),  # the mesh of a run, whose end writes a sample
      ]
    ),
  ],
)
def test_several_devices_answer_as_one_does(attention, mesh, cache):
  one, several = (
    Sampler(*made, batch_size=3, capacity=200, **cache)
    for made in make(attention, mesh)
  )
  there = several.prefill(PROMPTS, 20)
  if cache is not INT8:  # whose rounding may go either way
    here = one.prefill(PROMPTS, 20)
    for tokens in ([1, 2, 3], [9, 8, 7]):
      np.testing.assert_allclose(
        there.logits, here.logits, rtol=1e-5, atol=1e-5
      )
      here, there = one.step(here, tokens), several.step(there, tokens)
    np.testing.assert_allclose(there.logits, here.logits, rtol=1e-5, atol=1e-5)
  for pool in jax.tree.leaves((there.cache.keys, there.cache.values)):
    assert (
      pool.addressable_shards[0].data.shape[1] == pool.shape[1] // mesh.tensor
    )
  for options in ({}, {"temperature": 1.3, "top_p": 0.8}):
    assert several.generate(PROMPTS, 11, **options) == one.generate(
      PROMPTS, 11, **options
    )


@pytest.mark.parametrize("cache", [{}, INT8])
def test_no_device_has_more_than_its_share(cache):
  """Of the cache and of the sampler's own copy of the matrices; and they exchange two sums a layer for a token."""
  _, (model, params) = make("diff", MeshConfig(data=1, tensor=4))
  sampler = Sampler(model, params, batch_size=3, capacity=200, **cache)
  empty = sampler._make_cache()
  for leaf in jax.tree.leaves((empty.keys, empty.values, sampler._params)):
    assert (
      leaf.ndim == 1 or leaf.addressable_shards[0].data.size == leaf.size // 4
    )
  text = (
    sampler._step.lower(
      sampler._params, sampler.prefill(PROMPTS), jnp.zeros(3, jnp.int32)
    )
    .compile()
    .as_text()
  )
  calls = re.findall(
    r"= (.*) (?:all-gather|all-reduce|all-to-all|collective-permute)\(", text
  )
  exchanged = [
    shape for call in calls for shape in re.findall(r"\w+\[([\d,]*)\]", call)
  ]
  assert sorted(exchanged) == ["3,1,32"] * 5 + [
    "3,64"
  ]  # sums for the embedding and two layers' outputs; and the logits
