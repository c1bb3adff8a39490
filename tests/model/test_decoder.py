"""The decoder: twins, layers under scan, isolation and remat."""

import dataclasses
import functools
import itertools
import operator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig
from diffjax.model import decoder
from diffjax.model.attention import ATTENTION, lambda_init_schedule
from diffjax.model.decoder import (
  Block,
  Decoder,
  WindowSwitch,
  lambda_inits,
  logits,
)
from diffjax.model.shapes import axis_sizes, parameter_shapes
from diffjax.ops.diff_attention import diff_attention
from tests.harness.parameters import parameters
from tests.harness.tiers import full
from tests.harness.variants import EXPECTED, models

CONFIG = ModelConfig(
  vocab_size=64,
  num_layers=3,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  ffn_dim=48,
  max_length=32,
)
VARIANTS = models(CONFIG)


@functools.cache
def random_parameters(config):
  """Returns parameters of a decoder, without compiling its initialisation."""
  return parameters(Decoder(config), jnp.zeros((1, 1), jnp.int32))


@functools.cache
def init(config):
  """Returns the parameters that training starts from."""
  return jax.jit(Decoder(config).init)(
    jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]


def tokens(shape, seed=1):
  return jax.random.randint(jax.random.key(seed), shape, 0, CONFIG.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def apply(config, params, *args, **kwargs):
  return logits(
    params, Decoder(config).apply({"params": params}, *args, **kwargs)
  )


def scans(config, params, ids):
  """Whether the program for these small arrays, in which nothing else loops, loops over the layers."""
  return "stablehlo.while" in apply.lower(config, params, ids).as_text()


def test_parameter_layout():
  params = jax.tree.map(jnp.shape, init(CONFIG))
  L, E, H, D, F = 3, 32, 2, 8, 48
  assert params == {
    "embedding": (64, E),
    "final_norm": (E,),
    "layers": {
      "attention": {
        "query": (L, E, H, 2, D),
        "key": (L, E, H, 2, D),
        "value": (L, E, H, 2 * D),
        "out": (L, H, 2 * D, E),
        "lambda_q1": (L, D),
        "lambda_k1": (L, D),
        "lambda_q2": (L, D),
        "lambda_k2": (L, D),
        "head_gain": (L, 2 * D),
      },
      "attention_norm": (L, E),
      "ffn": {"gate": (L, E, F), "up": (L, E, F), "down": (L, F, E)},
      "ffn_norm": (L, E),
    },
  }
  assert all(
    leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(init(CONFIG))
  )
  untied = dataclasses.replace(CONFIG, tie_embeddings=False)
  assert "unembedding" in random_parameters(untied)


def test_diff_equals_its_twin_in_parameters_but_for_lambda_and_gains():
  def count(params, without=()):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(
      leaf.size for path, leaf in leaves if path[-1].key not in without
    )

  extras = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "head_gain")
  diff, twin = random_parameters(CONFIG), random_parameters(VARIANTS["softmax"])
  assert count(diff, without=extras) == count(twin)
  assert count(diff) - count(twin) == CONFIG.num_layers * (
    4 * CONFIG.head_dim + 2 * CONFIG.head_dim
  )


@pytest.mark.parametrize(
  "remat", ["full", "none"]
)  # scanned; and unrolled, on a CPU
def test_lambda_init_is_each_layers_own(remat):
  """Against a decoder written as a Python loop over layers; with layer 0's λ_init everywhere the logits differ."""
  params, ids, config = (
    random_parameters(CONFIG),
    tokens((2, 16)),
    dataclasses.replace(CONFIG, remat=remat),
  )
  assert scans(config, params, ids) == (remat == "full")

  @functools.partial(jax.jit, static_argnums=0)
  def looped(lambda_init_of):
    x = params["embedding"][ids]
    block = decoder.Block(CONFIG, jnp.float32, decoder.diff_attention)
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    for layer in range(CONFIG.num_layers):
      weights = jax.tree.map(operator.itemgetter(layer), params["layers"])
      x, _ = block.apply(
        {"params": weights}, x, lambda_init_of(layer), 0, None, positions
      )
    return logits(
      params, decoder.rms_norm(x, params["final_norm"], CONFIG.norm_eps)
    )

  found = apply(config, params, ids)
  np.testing.assert_allclose(found, looped(lambda_init_schedule), atol=1e-5)
  assert (
    np.abs(found - looped(lambda layer: lambda_init_schedule(0))).max() > 1e-3
  )


def test_many_layers_are_scanned():
  """On a CPU too: the program does not grow with every layer."""
  config = dataclasses.replace(CONFIG, num_layers=9)
  assert scans(config, random_parameters(config), tokens((2, 16)))


def test_the_initialisation_is_scanned():
  """The program of the initialisation has the same size for any depth."""

  def count_lines(num_layers):
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    initialise = jax.jit(Decoder(config).init)
    key = jax.random.key(0)
    lowered = initialise.lower(key, jnp.zeros((1, 1), jnp.int32))
    return len(lowered.as_text().splitlines())

  assert count_lines(num_layers=2) == count_lines(num_layers=4)


def test_a_layer_is_traced_once(monkeypatch):
  """The loop over the layers does not trace their code again to check it."""
  num_traces = 0
  call_block = Block.__call__

  def counted_call(*args):
    nonlocal num_traces
    num_traces += 1
    return call_block(*args)

  params = random_parameters(CONFIG)
  monkeypatch.setattr(Block, "__call__", counted_call)
  jax.eval_shape(Decoder(CONFIG).apply, {"params": params}, tokens((2, 8)))
  assert num_traces == 1


def test_lambda_init_is_the_schedule_or_a_constant():
  np.testing.assert_allclose(
    lambda_inits(CONFIG), [0.2, 0.3555, 0.4707], atol=5e-5
  )
  for constant in (0.5, 0.0):
    np.testing.assert_allclose(
      lambda_inits(dataclasses.replace(CONFIG, lambda_init=constant)),
      [constant] * 3,
    )


def test_lambda_init_lags_behind():
  """Motif's first layer has 0.8 − 0.6·exp(0.3)."""
  config = dataclasses.replace(CONFIG, lambda_init_offset=1)
  np.testing.assert_allclose(
    lambda_inits(config), [-0.00992, 0.2, 0.3555], atol=5e-5
  )


@pytest.mark.parametrize("remat, layers", [("none", 5), ("attention", 9)])
def test_windows_and_plain_layers_are_those_of_their_layers(remat, layers):
  """A decoder of several kinds of layers equals one that is put together from a layer of each kind."""
  config = dataclasses.replace(
    VARIANTS["public"],
    num_layers=layers,
    plain_layers=2,
    window=3,
    window_pattern="wwf",
    remat=remat,
  )
  params, ids = random_parameters(config), tokens((2, 16))
  plain = dict(
    attention="softmax",
    num_heads=8,
    num_kv_heads=4,
    num_noise_heads=None,
    head_norm=False,
    lambda_init_offset=0,
  )
  x: Any = jnp.take(params["embedding"], ids, axis=0)
  for layer in range(layers):
    name, index, kind = (
      ("plain_layers", layer, plain) if layer < 2 else ("layers", layer - 2, {})
    )
    window = 3 if layer % 3 < 2 else None
    own = dataclasses.replace(
      config, plain_layers=0, window_pattern="", window=window, **kind
    )
    weights = jax.tree.map(lambda leaf, index=index: leaf[index], params[name])
    x, _ = Block(own, jnp.float32, diff_attention).apply(
      {"params": weights}, x, lambda_init_schedule(layer - 1), 0, None, None
    )
  want = logits(params, decoder.apply_norm(params, "final_norm", x, config))
  np.testing.assert_allclose(apply(config, params, ids), want, atol=2e-5)
  every = apply(dataclasses.replace(config, window_pattern="w"), params, ids)
  assert np.abs(every - want).max() > 1e-3


@pytest.mark.parametrize("name", ["softmax", "diff"])
def test_a_window_that_data_choose_takes_the_place_of_the_layers_own(name):
  x = jax.random.normal(jax.random.key(0), (2, 9, 16))
  layer = ATTENTION[name](num_heads=4, num_kv_heads=2, head_dim=4, window=5)
  params = parameters(layer, x, 0.3)
  windows = (3, None)

  @jax.jit
  def chosen(index):
    switch = WindowSwitch(diff_attention, windows, index)
    return layer.clone(attention_fn=switch).apply({"params": params}, x, 0.3)

  for index, window in enumerate(windows):
    want = layer.clone(window=window).apply({"params": params}, x, 0.3)
    np.testing.assert_allclose(chosen(index), want, rtol=1e-5, atol=1e-6)
  assert np.abs(chosen(0) - chosen(1)).max() > 1e-2


def test_kept_attention_runs_forward_once_whichever_window_it_has():
  def maxima(pattern):
    config = dataclasses.replace(
      CONFIG, num_layers=9, window=3, window_pattern=pattern, remat="attention"
    )
    loss = lambda params: jnp.sum(apply(config, params, tokens((1, 8))))
    return str(jax.make_jaxpr(jax.grad(loss))(random_parameters(config))).count(
      "reduce_max"
    )

  assert maxima("wf") == 2 * maxima("w")  # each of two windows has its program


def test_positions_count_by_their_distances_alone():
  """Queries and keys turn by the same angles, whatever RoPE's base is."""
  config, ids, positions = (
    dataclasses.replace(CONFIG, rope_base=20.0),
    tokens((2, 16)),
    np.broadcast_to(np.arange(16), (2, 16)),
  )
  params = random_parameters(CONFIG)
  expected = apply(config, params, ids, positions=positions)
  np.testing.assert_allclose(
    apply(config, params, ids, positions=positions + 9), expected, atol=1e-5
  )
  assert (
    np.abs(apply(config, params, ids, positions=2 * positions) - expected).max()
    > 1e-3
  )


def test_untied_logits_are_products_with_the_unembedding():
  rng = np.random.default_rng(0)
  hidden, embedding, unembedding = (
    rng.standard_normal(shape, np.float32)
    for shape in ((2, 3, 8), (5, 8), (5, 8))
  )
  tied, untied = (
    {"embedding": embedding},
    {"embedding": embedding, "unembedding": unembedding},
  )
  np.testing.assert_allclose(
    logits(tied, hidden), hidden @ embedding.T, rtol=1e-5
  )
  np.testing.assert_allclose(
    logits(untied, hidden), hidden @ unembedding.T, rtol=1e-5
  )


def test_embed_scale_multiplies_what_enters_the_first_layer_and_not_the_logits():
  config, params, ids = (
    dataclasses.replace(CONFIG, embed_scale=5.0),
    random_parameters(CONFIG),
    tokens((2, 16)),
  )
  entering = {
    **params,
    "embedding": 5 * params["embedding"],
    "unembedding": params["embedding"],
  }
  wanted = apply(
    dataclasses.replace(CONFIG, tie_embeddings=False), entering, ids
  )
  np.testing.assert_allclose(apply(config, params, ids), wanted, atol=1e-5)
  assert np.abs(apply(CONFIG, params, ids) - wanted).max() > 1e-2


def test_metrics_hold_each_layers_lambda():
  params = random_parameters(CONFIG)
  _, variables = jax.jit(
    lambda ids: Decoder(CONFIG).apply(
      {"params": params}, ids, mutable=["metrics"]
    )
  )(tokens((2, 8)))
  (lam,) = variables["metrics"]["layers"]["attention"]["lambda"]
  attention = params["layers"]["attention"]
  dot = lambda a, b: jnp.sum(attention[a] * attention[b], axis=-1)  # noqa: E731
  want = (
    jnp.exp(dot("lambda_q1", "lambda_k1"))
    - jnp.exp(dot("lambda_q2", "lambda_k2"))
    + lambda_inits(CONFIG)
  )
  np.testing.assert_allclose(lam, want, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_init_returns_parameters_alone(name):
  """An array that `init` returned beside them would be in every later call."""
  ids = jnp.zeros((1, 8), jnp.int32)
  for remat in ("none", "full"):
    model = Decoder(dataclasses.replace(VARIANTS[name], remat=remat))
    init = functools.partial(model.init, mutable=True)
    variables = jax.eval_shape(init, jax.random.key(0), ids)
    assert variables.keys() == {"params"}
    apply = functools.partial(model.apply, mutable=["metrics", "intermediates"])
    _, sown = jax.eval_shape(apply, variables, ids)
    assert "hidden" in sown["intermediates"]["layers"]
    for values in sown.values():
      tuples = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, tuple))
      assert [len(each) for each in tuples] == [1] * len(tuples)


def test_lambda_is_of_the_call_and_not_of_init():
  """The variables of `init` go into `apply` whole, as Flax's examples do."""
  ids = tokens((1, 8))
  model = Decoder(CONFIG)
  variables = jax.jit(model.init)(jax.random.key(0), ids)
  attention = variables["params"]["layers"]["attention"]
  for name in ("lambda_q1", "lambda_k1"):
    attention[name] = jnp.ones_like(attention[name])
  apply = jax.jit(functools.partial(model.apply, mutable=["metrics"]))
  _, sown = apply(variables, ids)
  lam = sown["metrics"]["layers"]["attention"]["lambda"][0]
  assert lam.min() > 100  # exp(8) − …


@pytest.mark.parametrize(
  "name",
  ["diff", "softmax", *full(sorted(VARIANTS.keys() - {"diff", "softmax"}))],
)
def test_causality_by_gradient(name):
  config, length, at = VARIANTS[name], 12, 5
  params = random_parameters(config)
  embedded = jax.random.normal(jax.random.key(3), (1, length, CONFIG.embed_dim))

  def output(
    x,
  ):  # the decoder on embeddings: one row of the embedding matrix a position
    table = {**params, "embedding": x[0]}
    hidden = Decoder(
      dataclasses.replace(config, vocab_size=length, tie_embeddings=True)
    ).apply({"params": table}, jnp.arange(length)[None])
    return hidden[0, at].sum()

  influence = jnp.abs(jax.jit(jax.grad(output))(embedded)).sum(-1)[0]
  assert bool((influence[: at + 1] > 0).all())
  assert bool((influence[at + 1 :] == 0).all())


@pytest.mark.parametrize(
  "fields, seen",
  [
    (dict(window=3), range(3, 6)),
    (dict(causal=False), range(12)),
    (dict(causal=False, window=3), range(3, 8)),
    (dict(rope=False, projection_biases=True), range(6)),
  ],
  ids=str,
)
def test_a_token_sees_what_the_config_lets_it_see(fields, seen):
  config, at = dataclasses.replace(CONFIG, num_layers=1, **fields), 5
  params = random_parameters(config)

  def output(x):
    hidden = Decoder(dataclasses.replace(config, vocab_size=12)).apply(
      {"params": {**params, "embedding": x}}, jnp.arange(12)[None]
    )
    return hidden[0, at].sum()

  influence = jnp.abs(
    jax.jit(jax.grad(output))(
      jax.random.normal(jax.random.key(3), (12, CONFIG.embed_dim))
    )
  ).sum(-1)
  assert np.flatnonzero(influence).tolist() == list(seen)


# Every axis has another size, so that the shapes tell which letter it has.
SIZES = dict(
  vocab_size=64,
  num_layers=5,
  embed_dim=40,
  num_heads=36,
  num_kv_heads=6,
  head_dim=10,
  value_dim=14,
  ffn_dim=48,
)


def with_distinct_sizes(name, **fields):
  """Returns a config of an attention class in which all sizes are different."""
  num_noise_heads = 12 if ATTENTION[name].has_noise_map else None
  return ModelConfig(
    attention=name, num_noise_heads=num_noise_heads, **SIZES, **fields
  )


@pytest.mark.parametrize("name", EXPECTED)
def test_sizes_tell_axes_apart(name):
  """Equal are only the sizes that are equal by definition: V and U.

  With one map, H and Q are also equal, and G and M.
  """
  sizes = axis_sizes(with_distinct_sizes(name))
  num_equal = 1 if ATTENTION[name].has_noise_map else 3
  assert len(set(sizes.values())) == len(sizes) - num_equal


OPTIONS = [
  dict(head_norm=True),
  dict(head_norm=False, tie_embeddings=False, projection_biases=True),
  dict(head_norm=True, norm="layer", ffn_activation="poly_norm"),
  dict(head_norm=True, plain_layers=1, projection_biases=True),
]


@pytest.mark.parametrize(
  "config",
  [
    *VARIANTS.values(),
    *(
      with_distinct_sizes(name, **fields)
      for name in ATTENTION
      for fields in OPTIONS
    ),
  ],
  ids=lambda config: config.attention,
)
def test_the_table_knows_the_shape_of_every_parameter(config):
  """The layers state the shapes, and the table of parameters has the axes."""
  made = jax.eval_shape(
    Decoder(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  plain = lambda path: "plain_layers/" * (path[0].key == "plain_layers")
  assert parameter_shapes(config) == {
    plain(path) + path[-1].key: leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(made)
  }


@pytest.mark.parametrize(
  "name",
  ["diff", "diff_v2", *full(sorted(VARIANTS.keys() - {"diff", "diff_v2"}))],
)
def test_packed_documents_do_not_see_each_other(name):
  """Two documents packed in a row give each the logits it has alone.

  The logits are computed in float64. For rows of another length a CPU may sum
  products in another order, which changes float32 logits by up to 5e-6.
  """
  config, params = VARIANTS[name], random_parameters(VARIANTS[name])
  first, second = tokens((1, 7), 1), tokens((1, 9), 2)
  packed = jnp.concatenate([first, second], axis=1)
  segments = jnp.asarray([[1] * 7 + [2] * 9])
  positions = jnp.asarray([[*range(7), *range(9)]])
  with jax.enable_x64(True):
    params = jax.tree.map(lambda leaf: leaf.astype("float64"), params)

    @jax.jit
    def run(*batch):
      model = Decoder(config, jnp.float64)
      return logits(params, model.apply({"params": params}, *batch))

    got = run(packed, segments, positions)
    alone = jnp.concatenate([run(first), run(second)], axis=1)
    without_segments = run(packed)
  np.testing.assert_allclose(got, alone, atol=1e-6)
  assert np.abs(got - without_segments)[:, 7:].max() > 1e-3


REMAT = [("diff", "attention"), ("diff_v2", "dots"), ("softmax", "full")]


@pytest.mark.parametrize(
  "name, policy",
  [
    *REMAT,
    *full(
      case
      for case in itertools.product(VARIANTS, ("attention", "dots", "full"))
      if case not in REMAT
    ),
  ],
)
def test_remat_does_not_change_loss_or_gradients(name, policy):
  config, ids = VARIANTS[name], tokens((2, 16))

  def loss(config, params):
    return (apply(config, params, ids) ** 2).mean()

  params, gradient = (
    random_parameters(config),
    jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0),
  )
  plain, remat = (
    gradient(config, params),
    gradient(dataclasses.replace(config, remat=policy), params),
  )
  chex.assert_trees_all_close(plain, remat, rtol=1e-5, atol=1e-7)


# Other variants store their weights.
FUSED = [
  name for name, config in VARIANTS.items() if ATTENTION[config.attention].fused
]


@pytest.mark.parametrize("name", FUSED)
def test_the_backward_pass_keeps_no_float32_and_no_second_copy_of_a_parameter(
  name,
):
  """Where nothing is computed again, either would take more memory than all else that is kept."""
  config, ids = (
    dataclasses.replace(VARIANTS[name], remat="none"),
    tokens((5, 16)),
  )
  B, T, E = *ids.shape, config.embed_dim
  model = Decoder(config, jnp.bfloat16)
  backward = lambda params: jax.vjp(
    lambda params: model.apply({"params": params}, ids), params
  )[1]
  kept = jax.tree.leaves(jax.eval_shape(backward, random_parameters(config)))
  assert [
    leaf
    for leaf in kept
    if leaf.shape == (config.num_layers - config.plain_layers, B, T, E)
    and leaf.dtype == jnp.bfloat16
  ]
  wide = [
    leaf
    for leaf in kept
    if leaf.dtype == jnp.float32 and (B, T) in (leaf.shape[:2], leaf.shape[1:3])
  ]
  assert all(leaf.size < B * T * E for leaf in wide), wide
  parameters = {
    leaf.shape
    for leaf in jax.tree.leaves(random_parameters(config))
    if leaf.size > E * E
  }
  assert not [
    leaf
    for leaf in kept
    if leaf.dtype == jnp.bfloat16 and leaf.shape in parameters
  ]


def test_longer_than_max_length_is_refused():
  with pytest.raises(ValueError, match="max_length is 32"):
    apply(CONFIG, random_parameters(CONFIG), tokens((1, 33)))


@pytest.mark.parametrize("name", ["diff", "diff_v2"])
def test_initial_standard_deviations(name):
  """1/√inputs; the two matrices that write to the residual stream a further 1/√(2L)."""
  params, residual = init(VARIANTS[name]), (2 * CONFIG.num_layers) ** -0.5
  layers, E = params["layers"], CONFIG.embed_dim
  wanted = {
    "query": E**-0.5,
    "key": E**-0.5,
    "value": E**-0.5,
    "out": residual * E**-0.5,
  }  # H·V inputs, as many as E
  wanted |= {
    "gate": E**-0.5,
    "up": E**-0.5,
    "down": residual * CONFIG.ffn_dim**-0.5,
  }
  found = {
    key: float(leaf.std())
    for key, leaf in {**layers["attention"], **layers["ffn"]}.items()
    if key in wanted
  }
  assert found == {
    key: pytest.approx(value, rel=0.1) for key, value in wanted.items()
  }
  assert float(params["embedding"].std()) == pytest.approx(E**-0.5, rel=0.1)


def test_initial_logits_have_unit_scale():
  """So that the first loss is near log N, whatever the width."""
  for width in (32, 128):
    config = dataclasses.replace(CONFIG, embed_dim=width)
    assert 0.7 < float(apply(config, init(config), tokens((4, 32))).std()) < 1.4


@pytest.mark.parametrize(
  "name", ["diff", *full(sorted(VARIANTS.keys() - {"diff"}))]
)
def test_bfloat16_computes_near_float32(name):
  """Mixed precision: float32 parameters and gradients, loss within bfloat16's rounding."""
  config, ids = VARIANTS[name], tokens((4, 32))
  params = random_parameters(config)

  @functools.partial(jax.jit, static_argnums=0)
  def loss_and_gradient(dtype, params):
    def loss(params):
      hidden = Decoder(config, dtype=dtype).apply({"params": params}, ids)
      assert hidden.dtype == dtype
      log_probabilities = jax.nn.log_softmax(logits(params, hidden))
      return -jnp.take_along_axis(
        log_probabilities[:, :-1], ids[:, 1:, None], axis=-1
      ).mean()

    return jax.value_and_grad(loss)(params)

  exact, exact_gradient = loss_and_gradient(jnp.dtype("float32"), params)
  rounded, gradient = loss_and_gradient(jnp.dtype("bfloat16"), params)
  assert exact != rounded
  np.testing.assert_allclose(rounded, exact, rtol=1e-2)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))
  flat, exact_flat = (
    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    for tree in (gradient, exact_gradient)
  )
  assert np.linalg.norm(flat - exact_flat) < 0.05 * np.linalg.norm(exact_flat)
