"""Weights in int8: what is rounded, by how much at most, and that a model runs on them alone, on several devices as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import MeshConfig, ModelConfig
from diffjax.inference.sampler import Sampler
from diffjax.int8 import quantise
from diffjax.model.decoder import Decoder, logits
from diffjax.parallel.mesh import make_mesh, sharded_attention
from diffjax.parallel.rules import shardings
from tests.harness.parameters import parameters

qwix = pytest.importorskip("qwix")
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
INPUTS = {
  "query": (1,),
  "key": (1,),
  "value": (1,),
  "out": (1, 2),
  "gate": (1,),
  "up": (1,),
  "down": (1,),
}
PROMPTS = [[5], [int(i) for i in np.random.default_rng(0).integers(0, 64, 140)]]


@pytest.fixture(scope="module")
def model():
  return Decoder(CONFIG)


@pytest.fixture(scope="module")
def params(model):
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  return params | {"embedding": 3 * params["embedding"]}


def is_rounded(leaf):
  return isinstance(leaf, qwix.QArray)


def restored(params):
  return jax.tree.map(
    lambda leaf: qwix.dequantize(leaf) if is_rounded(leaf) else leaf,
    params,
    is_leaf=is_rounded,
  )


def test_matrices_alone_are_rounded_to_half_a_step_of_their_column(params):
  before = {
    path[-1].key: np.asarray(leaf)
    for path, leaf in jax.tree.leaves_with_path(params)
  }
  rounded = quantise(jax.tree.map(jnp.copy, params))
  after = {
    path[-1].key: leaf
    for path, leaf in jax.tree.leaves_with_path(rounded, is_leaf=is_rounded)
  }
  assert {name for name, leaf in after.items() if is_rounded(leaf)} == set(
    INPUTS
  )
  for name, leaf in after.items():
    if name in INPUTS:
      assert leaf.qvalue.dtype == jnp.int8
      step = np.abs(before[name]).max(axis=INPUTS[name], keepdims=True) / 127
      assert (
        np.abs(qwix.dequantize(leaf) - before[name]) <= 0.5001 * step
      ).all()
    else:
      np.testing.assert_array_equal(leaf, before[name])


def test_a_model_runs_on_rounded_weights(model, params):
  """In its own scan over layers, and in the sampler, whose copy of them is as small."""
  rounded = quantise(jax.tree.map(jnp.copy, params))
  tokens = jnp.asarray([PROMPTS[1]])
  hidden = [
    model.apply({"params": tree}, tokens)
    for tree in (rounded, restored(rounded))
  ]
  np.testing.assert_allclose(*hidden, rtol=1e-5, atol=1e-5)
  for dtype in (jnp.float32, jnp.bfloat16):
    sampler = Sampler(
      model.clone(dtype=dtype), rounded, batch_size=2, capacity=200
    )
    kept = [
      leaf.dtype
      for leaf in jax.tree.leaves(sampler._params["layers"], is_leaf=is_rounded)
      if is_rounded(leaf)
    ]
    assert (
      kept == [jnp.float32] * len(INPUTS) * 2
    )  # a QArray's dtype is its scale's, which stays exact
    if dtype == jnp.float32:
      np.testing.assert_allclose(
        sampler.prefill(PROMPTS).logits[1],
        logits(params, hidden[1])[0, -1],
        rtol=1e-4,
        atol=1e-4,
      )


def test_several_devices_answer_as_one_does(model, params):
  mesh = make_mesh(MeshConfig(data=1, tensor=4), jax.devices()[:4])
  split = quantise(jax.device_put(params, shardings(params, mesh)))
  for leaf in jax.tree.leaves(split, is_leaf=is_rounded):
    assert (
      not is_rounded(leaf)
      or leaf.qvalue.addressable_shards[0].data.size == leaf.qvalue.size // 4
    )
  shared = Sampler(
    model.clone(attention_fn=sharded_attention(mesh, "auto")),
    split,
    batch_size=2,
    capacity=200,
  )
  alone = Sampler(
    model, quantise(jax.tree.map(jnp.copy, params)), batch_size=2, capacity=200
  )
  np.testing.assert_allclose(
    shared.prefill(PROMPTS).logits,
    alone.prefill(PROMPTS).logits,
    rtol=1e-5,
    atol=1e-5,
  )
  assert shared.generate(PROMPTS, 9) == alone.generate(PROMPTS, 9)
