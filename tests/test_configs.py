"""The shapes of all configs and variants.

Sizes are the paper's, and twins have equal sizes.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest

from diffjax.config import (
  ModelConfig,
  UserError,
  from_config_dict,
  to_config_dict,
)
from diffjax.configs import base
from diffjax.model.attention import ATTENTION, Attention, register
from diffjax.model.decoder import Decoder
from diffjax.model.flops import parameter_count
from diffjax.model.shapes import parameter_shapes
from diffjax.parameters import Parameter
from tests.harness import ROOT

# Adapted models of others, which have no twins.
ADAPTED = ["llama_1b_dex", "llama_1b_gda"]
# Published models, which have no twins, and billions of parameters.
PUBLISHED = {"motif_2_6b": 2.597, "motif_2_12b": 12.704}
FILES = {path.stem: path for path in (ROOT / "configs").glob("[!_]*.py")}
NAMES = sorted(FILES.keys() - {*ADAPTED, *PUBLISHED})
# The variants of the paper and of the authors' post.
VARIANTS = ("diff", "transformer", "diff_v2")
# All others, without "softmax", another name of "transformer".
OTHERS = [name for name in ATTENTION if name not in (*VARIANTS, "softmax")]

# Billions of parameters with one vocabulary matrix. From the shapes in tables 2
# and 8 of the paper; see each config.
PAPER = {
  "diff_830m": 0.834,
  "diff_1b": 1.410,
  "diff_3b": 3.479,
  "diff_3b_64k": 3.479,
  "math_stage1": 3.479,
  "math_stage2": 3.479,
  "diff_7b": 6.837,
  "diff_13b": 13.123,
}


def load(name, *variant):
  module = importlib.import_module(f"diffjax.configs.{name}")
  return from_config_dict(module.get_config(*variant))


def initialized_size(config):
  """Returns the number of parameters that the decoder initializes."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  variables = jax.eval_shape(
    Decoder(config.model).init, jax.random.key(0), tokens
  )
  return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def test_all_are_here():
  assert set(NAMES) == {"base", "tiny", "diff_125m", "diff_350m", *PAPER}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, variant):
  config = load(name, variant)
  size = initialized_size(config)
  assert size == parameter_count(config.model)
  # DIFF V1 adds λ vectors and gains. The feed-forward width of DIFF V2 is
  # rounded to a multiple of 16, which is coarse for tiny.
  tolerance = 0.02 if config.model.embed_dim < 512 else 1e-3
  twin_size = initialized_size(load(name, "transformer"))
  assert size == pytest.approx(twin_size, rel=tolerance)
  if name in PAPER and variant == "diff":
    billions = PAPER[name]
    tolerance = 5e-4 * max(1.0, billions)
    assert size / 1e9 == pytest.approx(billions, abs=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_twins_as_the_docstring_of_the_configs_says(name):
  """All else in the config stays. The numbers are written out here again."""
  diff = load(name)
  model = diff.model
  heads = dict(
    num_heads=2 * model.num_heads,
    num_kv_heads=2 * model.num_kv_heads,
    head_norm=False,
  )
  transformer = dataclasses.replace(model, attention="softmax", **heads)
  expected = dataclasses.replace(diff, model=transformer)
  assert load(name, "transformer") == load(name, "softmax") == expected
  assert load(name, "diff") == diff

  columns = 2 * model.num_heads * model.head_dim + 2 * model.num_heads
  ffn_dim = round((model.ffn_dim - columns / 3) / 16) * 16
  v2 = dataclasses.replace(model, attention="diff_v2", ffn_dim=ffn_dim, **heads)
  assert load(name, "diff_v2") == dataclasses.replace(diff, model=v2)


@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.parametrize("name", ["tiny", "diff_1b"])
def test_every_variant_has_a_twin(name, variant):
  """Its feed-forward layer differs from V1's size by half a step at most."""
  diff, twin = load(name).model, load(name, variant).model
  assert twin.attention == variant
  assert twin.head_norm == ATTENTION[variant].head_norm
  assert twin.ffn_dim % 16 == 0
  half_a_step = twin.num_layers * 3 * twin.embed_dim * 8
  vectors = twin.num_layers * (6 * diff.head_dim + 2 * twin.num_heads)
  difference = parameter_count(twin) - parameter_count(diff)
  assert abs(difference) <= half_a_step + vectors
  assert load(name, f"{variant},heads=1").model.num_heads == 1


def test_a_variant_of_a_user_has_a_twin(restored_registry):
  """Of three maps with keys of their own, whose λ has a matrix [E, R]."""

  @register("own")
  class Own(Attention):
    extra_parameters = {"own_lambda": Parameter("LER", inputs="E")}
    extra_axes = {"R": 7}
    num_key_maps = 3

    def head_sizes(self):
      return super().head_sizes()._replace(G=3)

  diff, twin = load("diff_1b").model, load("diff_1b", "own").model
  # Queries and keys have 3 maps instead of 2 · 1/2 for each of 16 heads.
  columns = 2 * (3 - 1) * 16 * 128 + 7
  ffn_dim = round((5440 - columns / 3) / 16) * 16
  assert twin == dataclasses.replace(
    diff,
    attention="own",
    num_heads=16,
    num_kv_heads=16,
    head_norm=False,
    ffn_dim=ffn_dim,
  )


@pytest.mark.parametrize(
  "fields, expected",
  [
    (dict(lambda_init=0.5), dict(lambda_init=None, ffn_dim=96)),
    (dict(lambda_init_offset=1), dict(lambda_init_offset=0, ffn_dim=96)),
    (dict(value_dim=40), dict(value_dim=20, ffn_dim=96)),
    (dict(plain_layers=1), dict(plain_layers=1, ffn_dim=96)),
    # Two noise maps and four signal maps have 2 · 16 fewer columns of queries
    # than the Transformer's eight heads. 96 − 32/3 is rounded to 80.
    (dict(num_noise_heads=2), dict(num_noise_heads=None, ffn_dim=80)),
    # If one layer of two has them, F shrinks half as much, which rounds to 0.
    (
      dict(num_noise_heads=2, plain_layers=1),
      dict(num_noise_heads=None, ffn_dim=96),
    ),
  ],
  ids=str,
)
def test_fields_of_a_twin(fields, expected):
  """The Transformer has none of V1's fields, and the same matrices."""
  sizes = dict(num_layers=2, embed_dim=64, head_dim=16, ffn_dim=96)
  diff = ModelConfig(num_heads=4, num_kv_heads=2, **sizes, **fields)
  twin = Attention.twin(diff)
  assert (twin.num_heads, twin.num_kv_heads) == (8, 4)
  for field, value in expected.items():
    assert getattr(twin, field) == value


def test_a_twin_of_a_twin():
  """Any variant becomes any other one."""
  v2, diff = load("diff_1b", "diff_v2").model, load("diff_1b").model
  assert ATTENTION["diff"].twin(v2) == diff
  assert Attention.twin(v2) == load("diff_1b", "transformer").model


def test_what_has_no_twin(restored_registry):
  narrow = dataclasses.replace(load("diff_1b").model, ffn_dim=688)
  with pytest.raises(
    UserError, match="ffn_dim = 688: too narrow for 'diff_v2'"
  ):
    ATTENTION["diff_v2"].twin(narrow)

  @register("own")
  class Own(Attention):
    value_dim_factor = 3

  with pytest.raises(
    UserError, match="config.model.num_heads = 8: .* 2/3 of it, which must be"
  ):
    load("diff_1b", "own")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_tuned_from_its_weights(name):
  config = load(name)
  size = parameter_count(config.model)
  assert initialized_size(config) == size
  assert size / 1e9 == pytest.approx(PUBLISHED[name], abs=5e-4)
  assert config.train.init_from == f"runs/{name}"
  assert config.data.tokenizer == f"runs/{name}/tokenizer.json"


@pytest.mark.parametrize("name", PAPER)
def test_paper_shapes(name):
  """E = 2·d·h in DIFF; the twin has twice the heads of the same d."""
  diff = load(name).model
  transformer = load(name, "transformer").model
  v2 = load(name, "diff_v2").model
  assert diff.embed_dim == 2 * diff.head_dim * diff.num_heads
  assert diff.head_norm
  for twin, attention in ((transformer, "softmax"), (v2, "diff_v2")):
    assert twin.attention == attention
    assert twin.num_heads == 2 * diff.num_heads
    assert twin.head_dim == diff.head_dim
    assert not twin.head_norm


# How many parameters are added to the Llama, with 16 layers, 32 heads of width
# 64 and E = 2048.
ADDED_PARAMETERS = {
  "llama_1b_dex": 16 * (64 * 64 + 32),
  "llama_1b_gda": 16 * 2048 * (8 * 64 + 32),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapted_models(name):
  """A Llama with 1.236 B parameters, and the added parameters.

  `optimizer.trained` has names of the model's parameters.
  """
  config = load(name)
  size = parameter_count(config.model)
  assert size - ADDED_PARAMETERS[name] == 1_235_814_400
  trained = set(config.optimizer.trained.split(","))
  assert trained < parameter_shapes(config.model).keys()
  assert not config.optimizer.frozen
  assert config.train.init_from == f"runs/{name}"


# Tokens of a batch.
PAPER_BATCHES = {
  "diff_830m": 0.25e6,
  "diff_1b": 0.25e6,
  "diff_13b": 0.25e6,
  "diff_3b": 4e6,
  "math_stage1": 4e6,
  "math_stage2": 1e6,
}


@pytest.mark.parametrize("name", PAPER_BATCHES)
def test_paper_batches(name):
  config = load(name)
  tokens = config.train.batch_size * config.data.length
  assert tokens == pytest.approx(PAPER_BATCHES[name], rel=0.05)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
  "name, tokens, learning_rate",
  [("math_stage1", 20e9, 8e-5), ("math_stage2", 2e9, 1e-5)],
)
def test_stages_of_mathematics(name, tokens, learning_rate, variant):
  """Tokens and learning rates are the paper's.

  Each stage can load the one before: only the lengths of the models differ.
  """
  config = load(name, variant)
  batch_tokens = config.train.batch_size * config.data.length
  assert config.train.steps * batch_tokens == pytest.approx(tokens, rel=0.01)
  assert config.optimizer.learning_rate == learning_rate
  assert config.train.init_from == ""

  pretrained = load("diff_3b_64k", variant).model
  same_remat = dataclasses.replace(config.model, remat=pretrained.remat)
  assert same_remat == pretrained


def test_prompts_of_mathematics():
  """Only the second stage has them."""
  assert not load("math_stage1").data.prompt_field
  config = load("math_stage2")
  assert config.data.prompt_field == "problem"
  # A prompt and an answer of 16K must fit the model.
  assert config.data.length == 16_384
  assert config.model.max_length > config.data.length
  head, tail = config.data.prompt_template.split("{prompt}")
  assert config.train.sample_prompt.startswith(head)
  assert config.train.sample_prompt.endswith(tail)


@pytest.mark.parametrize(
  "variant, part",
  [
    ("diff_v3", "diff_v3"),
    ("architecture=v2", "architecture=v2"),
    ("", ""),
    ("diff,", ""),
    ("diff,heads=2,heads=2", "heads=2"),
    ("diff,transformer", "transformer"),
    ("diff,head=2", "head=2"),
    ("heads=0", "heads=0"),
    ("heads=-2", "heads=-2"),
    ("heads=2.0", "heads=2.0"),
    ("heads=1_0", "heads=1_0"),
    ("heads= 2", "heads= 2"),
    ("heads=", "heads="),
    ("transformer,=8", "=8"),
  ],
)
def test_unknown_variants(variant, part):
  """The error names the part that is wrong and lists what is possible."""
  with pytest.raises(UserError) as error:
    load("tiny", variant)
  names = "|".join(dict.fromkeys(["diff", "transformer", *ATTENTION]))
  assert str(error.value) == (
    f"variant {variant!r}: {part!r} is not allowed;"
    f" variants are {names}[,heads=NUMBER];"
    " a variant of your own needs --import=MODULE"
  )


def read_variant(text):
  return base.read_variant(
    text,
    row=("b", ("a", "b")),
    size=("1b", {"1b": 1, "2b": 2}),
    times=(None, float),
    heads=(4, int),
  )


@pytest.mark.parametrize(
  "text, values",
  [
    ("b", ("b", "1b", None, 4)),
    ("row=b", ("b", "1b", None, 4)),
    ("size=1b", ("b", "1b", None, 4)),
    ("a,size=2b,times=0.5,heads=8", ("a", "2b", 0.5, 8)),
    ("heads=8,times=.5,a,size=2b", ("a", "2b", 0.5, 8)),
  ],
)
def test_a_variant_gives_values_by_name_in_any_order(text, values):
  assert read_variant(text) == values


@pytest.mark.parametrize("times", ["9" * 400, "nan", "inf", "-1", "0", "x"])
def test_a_number_of_a_variant_is_positive_and_finite(times):
  usage = r"a\|b\[,size=1b\|2b\]\[,times=NUMBER\]\[,heads=NUMBER\]"
  with pytest.raises(UserError, match=f"not allowed; variants are {usage}"):
    read_variant(f"a,times={times}")


# Billions of tokens in the files of FineWeb-Edu, less what is held out.
FINEWEB_EDU = {
  "sample/100BT/*.parquet": 90,
  "sample/350BT/*.parquet": 300,
  "data/*/*.parquet": 1000,
}


@pytest.mark.parametrize(
  "name", [name for name in NAMES if name.startswith("diff_")]
)
def test_a_run_of_the_paper_reads_enough_tokens_once(name):
  config = load(name)
  dataset, _, revision_and_files = config.data.source.partition("@")
  assert dataset == "parquet:hf://datasets/HuggingFaceFW/fineweb-edu"
  _, _, pattern = revision_and_files.partition("/")
  train = config.train
  tokens = train.steps * train.batch_size * config.data.length
  enough_files = []
  for files, billions in FINEWEB_EDU.items():
    if tokens <= billions * 1e9:
      enough_files.append(files)
  # The patterns go from the fewest files to all.
  assert pattern == enough_files[0]


@pytest.mark.parametrize("name", ["tiny", "diff_1b", "diff_3b"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads(name, variant):
  """Only λ, gains and V2's gates depend on the number of heads."""
  config = load(name, variant)
  size = parameter_count(config.model)
  tolerance = 3e-2 if name == "tiny" else 1e-3
  for heads in (config.model.num_heads * 2, config.model.num_heads // 2):
    model = load(name, f"{variant},heads={heads}").model
    assert model.num_heads == heads
    assert model.num_kv_heads == heads
    assert parameter_count(model) == pytest.approx(size, rel=tolerance)
    same_heads = dataclasses.replace(
      model,
      num_heads=config.model.num_heads,
      num_kv_heads=config.model.num_kv_heads,
      head_dim=config.model.head_dim,
    )
    assert same_heads == config.model


@pytest.mark.parametrize("name", ["tiny", "diff_1b", "diff_3b"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_width_that_cannot_be_divided_among_the_heads(name, variant):
  message = (
    r"variant with heads=7: a width of \d+ cannot be divided among 7 heads of an"
    " even width"
  )
  with pytest.raises(UserError, match=message):
    load(name, f"{variant},heads=7")


def test_round_trip():
  config = load("diff_1b")
  assert from_config_dict(to_config_dict(config)) == config
  assert from_config_dict(config.to_dict()) == config
