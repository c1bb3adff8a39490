"""The attention layers, against the authors' own layers and as parts of a user's module."""

import ast
import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig, UserError
from diffjax.model.attention import (
  ATTENTION,
  Attention,
  DiffAttention,
  DiffAttentionV2,
  attention_class,
  lambda_init_schedule,
)
from diffjax.model.definition import apply_weights, attention_from_weights
from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.rope import rope
from diffjax.parameters import BIASES
from tests.harness.parameters import parameters
from tests.harness.tiers import full
from tests.harness.variants import EXPECTED, VARIANTS, declared, supporting

GOLDEN = pathlib.Path(__file__).parent / "golden"


def interleaved_to_halves(rows, head_dim):
  """Reorders the rows of each sub-head from (0, 1, 2, …), rotated in pairs (2j, 2j+1), to (0, 2, …, 1, 3, …), rotated (j, j + D/2)."""
  return (
    rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    .swapaxes(1, 2)
    .reshape(rows.shape)
  )


def to_diffjax(arrays, meta):
  """PyTorch Linear weights [out, in] of the authors' layers (or their gradients) to diffjax's parameters; both are linear maps."""
  E, H, K, D = (
    meta[name]
    for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim")
  )
  M, V, out = (
    (2, 2 * D, "out_proj") if meta["kind"] == "v1" else (1, D, "o_proj")
  )
  params = {
    "query": interleaved_to_halves(arrays["q_proj.weight"], D).T.reshape(
      E, H, 2, D
    ),
    "key": interleaved_to_halves(arrays["k_proj.weight"], D).T.reshape(
      E, K, M, D
    ),
    "value": arrays["v_proj.weight"].T.reshape(E, K, V),
    "out": arrays[f"{out}.weight"].T.reshape(H, V, E),
  }
  if meta["kind"] == "v1":
    params |= {
      name: arrays[name]
      for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    }
    params["head_gain"] = arrays["subln.weight"]
  else:
    params["lambda_hat"] = arrays["lambda_proj.weight"].T
  return params


def relative(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(
    want
  )


@pytest.mark.parametrize(
  "name, implementation",
  [
    ("v1_gqa_depth5", "chunked"),
    ("v2_gqa", "chunked"),
    ("v1_mha_depth0", "reference"),
    *full(
      [
        ("v1_gqa_depth5", "reference"),
        ("v2_gqa", "reference"),
        ("v1_mha_depth0", "chunked"),
      ]
    ),
  ],
)
def test_layer_equals_the_authors(name, implementation):
  """Output and every gradient to 2e-6 relative in float32 (norm of the difference over norm)."""
  data = np.load(GOLDEN / f"{name}.npz", allow_pickle=False)
  meta = ast.literal_eval(str(data["meta"]))
  weights, gradients = (
    to_diffjax(
      {
        key.split("/", 1)[1]: data[key]
        for key in data.files
        if key.startswith(prefix)
      },
      meta,
    )
    for prefix in ("param/", "grad/")
  )
  layer = {"v1": DiffAttention, "v2": DiffAttentionV2}[meta["kind"]](
    num_heads=meta["num_heads"],
    num_kv_heads=meta["num_kv_heads"],
    head_dim=meta["head_dim"],
    rope_base=meta["rope_base"],
    norm_eps=meta["norm_eps"],
    attention_fn=lambda *args, **kwargs: diff_attention(
      *args, **kwargs, implementation=implementation
    ),
  )
  lambda_init = (
    lambda_init_schedule(meta["depth"]) if meta["kind"] == "v1" else None
  )
  params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights)

  @jax.jit
  def output_and_gradients(params, x, dy):
    y, vjp = jax.vjp(
      lambda params, x: layer.apply({"params": params}, x, lambda_init),
      params,
      x,
    )
    return y, *vjp(dy)

  y, dparams, dx = output_and_gradients(
    params, *(jnp.asarray(data[name], jnp.float32) for name in ("x", "dy"))
  )

  assert relative(y, data["y"]) < 2e-6
  assert relative(dx, data["dx"]) < 2e-6
  assert set(dparams) == set(gradients)
  for key, want in gradients.items():
    assert relative(dparams[key], want) < 2e-6, key


@pytest.mark.parametrize("name", EXPECTED)
def test_a_class_says_what_its_paper_says(name):
  assert declared(name) == EXPECTED[name]


@pytest.mark.parametrize("name", ATTENTION)
def test_stands_alone_in_a_users_module(name):
  class Mine(nn.Module):
    @nn.compact
    def __call__(self, x):
      return ATTENTION[name](num_heads=2, head_dim=8, name="attention")(
        nn.Dense(32)(x), lambda_init=0.8
      )

  x = jax.random.normal(jax.random.key(0), (2, 6, 16))
  y, variables = jax.jit(Mine().init_with_output)(jax.random.key(1), x)
  assert y.shape == (2, 6, 32) and bool(jnp.isfinite(y).all())
  G, M, wide = VARIANTS[name].sizes
  shapes = jax.tree.map(jnp.shape, variables["params"]["attention"])
  size = dict(E=32, H=2, K=2, G=G, M=M, D=8, V=8 * wide, U=8 * wide)
  size |= ATTENTION[name].extra_axes
  want = {
    "query": "EHGD",
    "key": "EKMD",
    "value": "EKV",
    "out": "HVE",
    **VARIANTS[name].extra,
  }
  if ATTENTION[name].head_norm:
    want["head_gain"] = "V"
  assert shapes == {
    name: tuple(size[axis] for axis in axes) for name, axes in want.items()
  }


@pytest.mark.parametrize(
  "fields, message",
  [
    (
      dict(attention="diff_v3"),
      "config.model.attention = 'diff_v3': no such variant is registered; there are softmax, diff",
    ),
    (
      dict(attention="softmax", lambda_init=0.8),
      "config.model.lambda_init = 0.8: 'softmax' has no λ_init; leave it None",
    ),
    (
      dict(attention="softmax", num_noise_heads=2),
      "config.model.num_noise_heads = 2: 'softmax' has no noise map; leave it None",
    ),
    (
      dict(attention="diff_v2", lambda_init_offset=1),
      "config.model.lambda_init_offset = 1: 'diff_v2' has no λ_init; leave it 0",
    ),
    (
      dict(attention="dex", lambda_init=0.0),
      "config.model.lambda_init = 0.0: must not be 0 for 'dex'",
    ),
    (
      dict(attention="diff_per_token", lambda_init=1.5),
      "config.model.lambda_init = 1.5: must be between 0 and 1",
    ),
  ],
)
def test_a_layer_that_there_is_not(fields, message):
  with pytest.raises(UserError, match=message):
    attention_class(ModelConfig(**fields))


@pytest.mark.parametrize(
  "name, fields, message",
  [
    (
      "softmax",
      dict(num_noise_heads=2),
      "num_noise_heads must be None for Attention, which has no noise map; got 2",
    ),
    (
      "diff",
      dict(num_noise_heads=3),
      "num_noise_heads must divide num_heads = 4, or be None for one noise map per head; got 3",
    ),
    (
      "diff",
      dict(num_noise_heads=0),
      "num_noise_heads must divide num_heads = 4, or be None for one noise map per head; got 0",
    ),
    (
      "diff_v2",
      dict(rope_dim=10),
      "rope_dim must be even and from 2 to head_dim = 8, or None for all; got 10",
    ),
    (
      "diff_v2",
      dict(rope_dim=3),
      "rope_dim must be even and from 2 to head_dim = 8, or None for all; got 3",
    ),
  ],
)
def test_a_layer_alone_refuses_sizes_that_do_not_go_together(
  name, fields, message
):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
      ATTENTION[name](num_heads=4, head_dim=8, **fields).init,
      jax.random.key(0),
      jnp.zeros((1, 4, 16)),
      0.5,
    )


def test_lambda_init_schedule_is_the_papers():
  np.testing.assert_allclose(
    lambda_init_schedule(jnp.arange(5)),
    [0.2, 0.3555, 0.4707, 0.5561, 0.6193],
    atol=5e-5,
  )


@pytest.mark.parametrize("name", ["diff", "diff_per_token", "dex"])
def test_a_layer_with_lambda_init_needs_it(name):
  layer = ATTENTION[name](num_heads=2, head_dim=8)
  message = f"{type(layer).__name__} needs lambda_init.*lambda_init_schedule"
  with pytest.raises(ValueError, match=message):
    parameters(layer, jnp.zeros((1, 4, 16)))


def test_dex_is_attention_with_another_output_projection():
  """O_h − λ_h O_h W_D, with a λ for each head, in float64; and W_D learns from the start, where it is 0."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 9, 16)), jnp.float32)
  sizes = dict(num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5)
  dex, plain = ATTENTION["dex"](**sizes), Attention(**sizes)
  start = jax.jit(dex.init)(jax.random.key(0), x, 0.7)["params"]
  assert not start["dex_matrix"].any() and not start["dex_lambda"].any()
  slope = jax.jit(
    jax.grad(lambda params: (dex.apply({"params": params}, x, 0.7) ** 2).sum())
  )(start)
  assert (
    jnp.abs(slope["dex_matrix"]).min() > 0 and not slope["dex_lambda"].any()
  )

  params = start | {
    "dex_matrix": rng.normal(size=(5, 5)).astype(np.float32),
    "dex_lambda": np.float32([0.4, -0.7, 0.0, 1.1]),
  }
  lam = 0.7 + params["dex_lambda"].astype(np.float64)
  out = [
    (np.eye(5) - lam[h] * params["dex_matrix"])
    @ np.asarray(start["out"][h], np.float64)
    for h in range(4)
  ]
  folded = {name: start[name] for name in ("query", "key", "value")} | {
    "out": jnp.asarray(np.stack(out), jnp.float32)
  }
  assert (
    relative(
      jax.jit(dex.apply)({"params": params}, x, 0.7),
      jax.jit(plain.apply)({"params": folded}, x),
    )
    < 2e-6
  )


def test_head_norm_is_a_field_of_every_layer():
  """The ablation rows: the baseline with head norm, DIFF without."""
  x = jax.random.normal(jax.random.key(0), (1, 8, 16))
  for cls in (Attention, DiffAttention):
    outputs = {}
    for head_norm in (True, False):
      layer = cls(num_heads=2, head_dim=4, head_norm=head_norm)
      params = parameters(layer, x, 0.5)
      assert ("head_gain" in params) is head_norm
      outputs[head_norm] = jax.jit(layer.apply)({"params": params}, x, 0.5)
    assert not np.allclose(outputs[True], outputs[False])


def test_the_heads_norm_has_the_models_epsilon():
  """An ε that outweighs every mean square leaves the heads' outputs over √ε."""
  x = jax.random.normal(jax.random.key(0), (1, 8, 16))
  layers = [
    DiffAttention(num_heads=2, head_dim=4, norm_eps=eps) for eps in (1e6, 4e6)
  ]
  params = parameters(layers[0], x, 0.5)
  outputs = [
    jax.jit(layer.apply)({"params": params}, x, 0.5) for layer in layers
  ]
  assert relative(outputs[0], 2 * outputs[1]) < 1e-5


def test_first_layer_without_difference_is_attention():
  """With λ = 0 (λ vectors 0, λ_init 0) and no head norm, DIFF's first map alone remains."""
  x = jax.random.normal(jax.random.key(0), (2, 8, 16))
  diff = DiffAttention(num_heads=2, head_dim=4, head_norm=False)
  params = parameters(diff, x, 0.0)
  for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
    params[name] = jnp.zeros(4)
  changed = params | {
    "query": params["query"].at[:, :, 1].add(1.0),
    "key": params["key"].at[:, :, 1].add(1.0),
  }
  apply = jax.jit(diff.apply)
  np.testing.assert_array_equal(
    apply({"params": params}, x, 0.0), apply({"params": changed}, x, 0.0)
  )


def test_without_the_sigmoid_v2s_lambda_is_its_logit():
  """Parameters are the same; the share of the second map is x W_λ, which grows with W_λ beyond 1."""
  x = jax.random.normal(jax.random.key(0), (1, 6, 16))
  layers = [
    ATTENTION[name](num_heads=2, head_dim=4)
    for name in ("diff_v2", "diff_v2_linear")
  ]
  params = parameters(layers[0], x)
  (_, v2), (once, linear) = (
    jax.jit(functools.partial(layer.apply, mutable=["metrics"]))(
      {"params": params}, x
    )
    for layer in layers
  )
  logits = x @ params["lambda_hat"]
  np.testing.assert_allclose(
    v2["metrics"]["lambda"][0], jnp.mean(jax.nn.sigmoid(logits)), rtol=1e-5
  )
  np.testing.assert_allclose(
    linear["metrics"]["lambda"][0], jnp.mean(logits), rtol=1e-5
  )
  apply = jax.jit(layers[1].apply)
  none, thrice = (
    apply({"params": params | {"lambda_hat": scale * params["lambda_hat"]}}, x)
    for scale in (0.0, 3.0)
  )
  np.testing.assert_allclose(
    thrice - none, 3 * (once - none), rtol=1e-3, atol=1e-5
  )


def test_the_last_numbers_of_a_head_are_rotated():
  """Multi-head latent attention's keys: 4 numbers without positions, then 4 with."""
  x = jax.random.normal(jax.random.key(0), (1, 6, 16))
  layer = DiffAttention(num_heads=2, head_dim=8, rope_dim=4, value_dim=5)
  params = parameters(layer, x, 0.3)
  assert (
    params["value"].shape == (16, 2, 5)
    and params["out"].shape == (2, 5, 16)
    and params["head_gain"].shape == (5,)
  )
  _, captured = layer.apply(
    {"params": params}, x, 0.3, mutable=["intermediates"]
  )
  for name, letter in (("query", "H"), ("key", "K")):
    (got,) = captured["intermediates"][name]
    still = jnp.einsum(f"BTE,E{letter}GD->BT{letter}GD", x, params[name])
    np.testing.assert_array_equal(got[..., :4], still[..., :4])
    np.testing.assert_allclose(
      got[..., 4:], rope(still[..., 4:], jnp.arange(6)[None]), atol=1e-6
    )


@pytest.mark.parametrize("name, kv_heads", [("diff", 2), ("diff_v2", 1)])
def test_shared_noise_maps_are_repeated_ones_that_stay_tied(name, kv_heads):
  """Grouped differential attention (arXiv:2510.06949): the layer whose noise rows of W_q are repeated, and its gradient summed up."""
  x = jax.random.normal(jax.random.key(0), (2, 9, 16))
  grouped = ATTENTION[name](
    num_heads=6, num_noise_heads=2, num_kv_heads=kv_heads, head_dim=4
  )
  single = grouped.clone(num_noise_heads=None)
  params = parameters(grouped, x, 0.3)
  assert params["query"].shape == (16, 2, 4, 4) and params["out"].shape[0] == 6
  signal, noise = params["query"][:, :, :3], params["query"][:, :, 3:]
  repeated = jnp.concatenate(
    [
      signal[:, :, :, None],
      jnp.broadcast_to(noise[:, :, :, None], (16, 2, 3, 1, 4)),
    ],
    axis=3,
  ).reshape(16, 6, 2, 4)

  def run(layer, query):
    def loss(query):
      y = layer.apply({"params": params | {"query": query}}, x, 0.3)
      return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.grad(loss, has_aux=True))(query)

  (own, got), (each, want) = (
    run(grouped, params["query"]),
    run(single, repeated),
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  each = each.reshape(16, 2, 3, 2, 4)
  np.testing.assert_allclose(
    own[:, :, :3], each[:, :, :, 0], rtol=1e-4, atol=1e-6
  )
  np.testing.assert_allclose(
    own[:, :, 3], each[:, :, :, 1].sum(axis=2), rtol=1e-4, atol=1e-6
  )


class MaskedAttention:
  """Attention whose mask is given: that of the layer is ignored.

  Variants that are computed from their weights call `by_definition`.

  Attributes:
    visible: Bool[T, S], whether a query sees a key.
  """

  def __init__(self, visible):
    self.visible = visible

  def __call__(self, q, k, v, lam, **_):
    return dense(self.visible, q, k, v, lam)

  def by_definition(self, weights_fn, supports):
    def attention_fn(q, k, v, lam, **_):
      mask = jnp.broadcast_to(self.visible, (len(q), *self.visible.shape))
      return apply_weights(weights_fn(q, k, lam, mask), v)

    return attention_fn


def dense(visible, q, k, v, lam):
  """Returns attention with the mask `visible`, written out."""
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
  scores = (
    jnp.einsum(
      "BTHGD,BSHGD->BHGTS", q, jnp.broadcast_to(k, (*k.shape[:3], *q.shape[3:]))
    )
    * q.shape[-1] ** -0.5
  )
  maps = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
  weights = maps[:, :, 0]
  if lam is not None:
    weights -= (
      jnp.moveaxis(jnp.broadcast_to(lam, q.shape[:3]), 1, 2)[..., None]
      * maps[:, :, 1]
    )
  return jnp.einsum("BHTS,BSHV->BTHV", weights, v)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
  "causal, window", [(True, 3), (False, None), (False, 3)]
)
def test_mask_fields(name, causal, window):
  """Against a mask that is written out."""
  if window is not None and name not in supporting("windows"):
    pytest.skip("the variant has no windows")
  x, distance = (
    jax.random.normal(jax.random.key(0), (2, 9, 16)),
    np.subtract.outer(np.arange(9), np.arange(9)),
  )
  visible = (distance >= 0) | (not causal)
  if window:
    visible &= abs(distance) < window
  layer = ATTENTION[name](
    num_heads=4, num_kv_heads=2, head_dim=4, causal=causal, window=window
  )
  params = parameters(layer, x, 0.3)
  masked = layer.clone(
    causal=True, window=None, attention_fn=MaskedAttention(visible)
  )
  got, want = (
    jax.jit(module.apply)({"params": params}, x, 0.3)
    for module in (layer, masked)
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ATTENTION)
def test_without_rope_and_causality_order_does_not_matter(name):
  x, order = (
    jax.random.normal(jax.random.key(0), (1, 9, 16)),
    np.random.default_rng(0).permutation(9),
  )
  layer = ATTENTION[name](num_heads=2, head_dim=4, rope=False, causal=False)
  params = parameters(layer, x, 0.3)
  apply = jax.jit(layer.apply)
  np.testing.assert_allclose(
    apply({"params": params}, x[:, order], 0.3),
    apply({"params": params}, x, 0.3)[:, order],
    rtol=1e-4,
    atol=1e-5,
  )
  rotated = jax.jit(layer.clone(rope=True).apply)
  assert not np.allclose(
    rotated({"params": params}, x[:, order], 0.3),
    rotated({"params": params}, x, 0.3)[:, order],
    atol=1e-3,
  )


@pytest.mark.parametrize("name", ATTENTION)
def test_projection_biases_are_the_weights_of_an_input_of_ones(name):
  E, x = 16, jax.random.normal(jax.random.key(0), (1, 9, 16))
  layer = ATTENTION[name](
    num_heads=4, num_kv_heads=2, head_dim=4, projection_biases=True
  )
  params = parameters(layer, x, 0.3)
  biases = {
    name: jax.random.normal(jax.random.key(2), params[name].shape)
    for name in BIASES
  }
  got = jax.jit(layer.apply)({"params": params | biases}, x, 0.3)

  def widened(key, leaf):  # by one more input, of ones, and one more output
    if f"{key}_bias" in biases and key != "out":
      return jnp.concatenate([leaf, biases[f"{key}_bias"][None]])
    if key == "out":
      return jnp.pad(leaf, [(0, 0), (0, 0), (0, 1)])
    return (
      jnp.pad(leaf, [(0, 1)] + [(0, 0)] * (leaf.ndim - 1))
      if leaf.shape[0] == E
      else leaf
    )

  wide = {
    key: widened(key, leaf) for key, leaf in params.items() if key not in biases
  }
  ones = jnp.concatenate([x, jnp.ones((1, 9, 1))], axis=-1)
  want = (
    jax.jit(layer.clone(projection_biases=False).apply)(
      {"params": wide}, ones, 0.3
    )[..., :E]
    + biases["out_bias"]
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class StoringAttention:
  """`diff_attention` that stores the keys and values of its last call."""

  def __init__(self):
    self.keys_values = ()

  def __call__(self, q, k, v, lam, **mask):
    self.keys_values = k, v
    return diff_attention(q, k, v, lam, **mask)

  def by_definition(self, weights_fn, supports):
    def attention_fn(q, k, v, lam, **mask):
      self.keys_values = k, v
      return attention_from_weights(weights_fn, q, k, v, lam, **mask)

    return attention_fn


# The test needs to know which keys have an influence: those in the window.
@pytest.mark.parametrize("name", supporting("windows", "cached_decoding"))
def test_a_layer_that_reads_keys_and_values_has_none_of_its_own(name):
  """With those that it would have made itself it gives the same; with those of another input it is cross-attention."""
  x, other = jax.random.normal(jax.random.key(0), (2, 2, 9, 16))
  attention = StoringAttention()
  layer = ATTENTION[name](
    num_heads=4, num_kv_heads=2, head_dim=4, projection_biases=True, window=4
  )
  own = layer.clone(attention_fn=attention)
  params = parameters(layer, x, 0.3)
  params = {
    key: jax.random.normal(jax.random.key(2), leaf.shape)
    if key in BIASES
    else leaf
    for key, leaf in params.items()
  }
  want = own.apply({"params": params}, x, 0.3)
  own_keys_values = attention.keys_values
  init = functools.partial(layer.init_with_output, keys_values=own_keys_values)
  made, variables = jax.eval_shape(init, jax.random.key(1), x, 0.3)
  assert made.shape == x.shape
  names = variables["params"].keys()
  assert params.keys() - names == {"key", "key_bias", "value", "value_bias"}
  few = {key: params[key] for key in names}
  cross = jax.jit(
    lambda x, keys_values: layer.apply(
      {"params": few}, x, 0.3, keys_values=keys_values
    )
  )
  np.testing.assert_allclose(
    cross(x, own_keys_values), want, rtol=1e-5, atol=1e-6
  )
  own.apply({"params": params}, other, 0.3)
  k, v = attention.keys_values
  influence = jax.grad(
    lambda k, v: cross(x, (k, v))[0, 6].sum(), argnums=(0, 1)
  )(k, v)
  assert [
    sorted({*np.nonzero(gradient)[1].tolist()}) for gradient in influence
  ] == [[3, 4, 5, 6]] * 2  # the window's, of its own row
  assert not any(gradient[1].any() for gradient in influence)
  assert not np.allclose(cross(x, (k, v)), want, atol=1e-2)
  with pytest.raises(
    ValueError,
    match=r"the values in keys_values must be \[B, T, K, V\] = \[B, T, 2, \d\]; got shape \(2, 9, 1, ",
  ):
    cross(x, (k, v[:, :, :1]))


def test_lambda_per_token_starts_from_lambda_init():
  """Where W_λ is 0 it is version 1 with λ = λ_init; elsewhere λ is sigmoid(x W_λ + log(λ_init / (1 − λ_init)))."""
  x, constant = jax.random.normal(jax.random.key(0), (1, 6, 16)), 0.3
  layers = [
    ATTENTION[name](num_heads=2, head_dim=4)
    for name in ("diff_per_token", "diff")
  ]
  params = jax.jit(layers[0].init)(jax.random.key(1), x, constant)["params"]
  w = params.pop("lambda_hat")
  vectors = {
    name: jnp.zeros(4)
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
  }
  got = jax.jit(layers[0].apply)(
    {"params": params | {"lambda_hat": 0 * w}}, x, constant
  )
  np.testing.assert_allclose(
    got,
    jax.jit(layers[1].apply)({"params": params | vectors}, x, constant),
    rtol=1e-5,
    atol=1e-6,
  )
  _, variables = jax.jit(
    functools.partial(layers[0].apply, mutable=["metrics"])
  )({"params": params | {"lambda_hat": w}}, x, constant)
  want = 1 / (1 + np.exp(-np.asarray(x @ w)) * (1 - constant) / constant)
  assert want.std() > 0.05
  np.testing.assert_allclose(
    variables["metrics"]["lambda"][0], want.mean(), rtol=1e-5
  )


def test_a_gate_weighs_each_number_of_the_heads_outputs():
  x = jax.random.normal(jax.random.key(0), (1, 6, 16))
  gated, plain = (
    ATTENTION[name](num_heads=4, head_dim=4) for name in ("gated", "softmax")
  )
  params = parameters(gated, x)
  w, eye = params["head_gate"], jnp.eye(16).reshape(4, 4, 16)
  ungated = {
    key: leaf for key, leaf in params.items() if key != "head_gate"
  } | {"out": eye}
  heads = jax.jit(plain.apply)(
    {"params": ungated}, x
  )  # before the output projection
  want = heads / (
    1 + np.exp(-np.einsum("bte,ehv->bthv", x, w).reshape(1, 6, 16))
  )
  np.testing.assert_allclose(
    jax.jit(gated.apply)({"params": {**params, "out": eye}}, x),
    want,
    rtol=1e-5,
    atol=1e-6,
  )


def test_queries_and_keys_after_rope_can_be_captured():
  x = jax.random.normal(jax.random.key(0), (1, 6, 16))
  layer = DiffAttention(num_heads=2, head_dim=4)
  params = parameters(layer, x, 0.2)
  _, captured = jax.jit(
    functools.partial(layer.apply, mutable=["intermediates"])
  )({"params": params}, x, 0.2)
  (q,), (k,) = (
    captured["intermediates"]["query"],
    captured["intermediates"]["key"],
  )
  assert q.shape == (1, 6, 2, 2, 4) and k.shape == (1, 6, 2, 2, 4)
  unrotated = jnp.einsum("BTE,EHGD->BTHGD", x, params["query"])
  np.testing.assert_allclose(
    q[:, 0], unrotated[:, 0], rtol=1e-6
  )  # position 0 is not rotated
  assert not np.allclose(q[:, 1], unrotated[:, 1])


@pytest.mark.parametrize("name", ATTENTION)
def test_init_of_a_layer_returns_parameters_alone(name):
  x = jnp.ones((1, 6, 16))
  layer = ATTENTION[name](num_heads=2, head_dim=4)
  for mutable in (True, nn.DenyList("intermediates")):
    init = functools.partial(layer.init, mutable=mutable)
    variables = jax.eval_shape(init, jax.random.key(0), x, 0.3)
    assert variables.keys() == {"params"}
  sown = ["metrics", "intermediates"]
  apply = functools.partial(layer.apply, mutable=sown)
  _, variables = jax.eval_shape(apply, variables, x, 0.3)
  assert len(variables["intermediates"]["query"]) == 1
  if ATTENTION[name].compute_lambda is Attention.compute_lambda:  # no λ
    assert "metrics" not in variables
  else:
    assert len(variables["metrics"]["lambda"]) == 1
