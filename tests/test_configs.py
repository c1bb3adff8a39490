"""The shapes of all configs and variants.

Sizes are the paper's, and twins have equal sizes.
"""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import pytest

from diffjax.config import (
  Config,
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
FILES = {path.stem for path in (ROOT / "configs").glob("[!_]*.py")}
NAMES = sorted(FILES - {*ADAPTED, *PUBLISHED})
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


def load(name: str, variant: str | None = None) -> Config:
  """Returns a config, or its variant."""
  module = importlib.import_module(f"diffjax.configs.{name}")
  if variant is None:
    return from_config_dict(module.get_config())
  return from_config_dict(module.get_config(variant))


@functools.cache
def initialized_size(model: ModelConfig) -> int:
  """Returns the number of parameters that the decoder initializes."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  variables = jax.eval_shape(Decoder(model).init, jax.random.key(0), tokens)
  return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def test_every_config_belongs_to_the_paper_or_is_listed_here():
  assert set(NAMES) == {"base", "tiny", "diff_125m", "diff_350m", *PAPER}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_parameter_count_is_that_of_the_decoder(name, variant):
  """`parameter_count` is a formula. The decoder creates the parameters."""
  model = load(name, variant).model

  assert parameter_count(model) == initialized_size(model)


@pytest.mark.parametrize("variant", ["diff", "diff_v2"])
@pytest.mark.parametrize("name", NAMES)
def test_the_variants_of_a_config_have_nearly_the_same_size(name, variant):
  """Variants differ in attention, and are compared at equal size."""
  model = load(name, variant).model
  transformer = load(name, "transformer").model

  # DIFF V1 adds λ vectors and gains. The feed-forward width of DIFF V2 is
  # rounded to a multiple of 16, which is coarse for tiny.
  tolerance = 1e-3
  if model.embed_dim < 512:
    tolerance = 0.02
  expected = pytest.approx(parameter_count(transformer), rel=tolerance)
  assert parameter_count(model) == expected


@pytest.mark.parametrize(("name", "billions"), PAPER.items())
def test_a_model_of_the_paper_has_its_size(name, billions):
  """The tables of the paper have the shapes, from which `billions` follow."""
  size = parameter_count(load(name).model)

  # Half of the last digit, or 0.05% of a larger model.
  tolerance = 5e-4 * max(1.0, billions)
  assert size / 1e9 == pytest.approx(billions, abs=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_variant_diff_changes_nothing(name):
  assert load(name, "diff") == load(name)


@pytest.mark.parametrize("variant", ["transformer", "softmax"])
@pytest.mark.parametrize("name", NAMES)
def test_the_transformer_differs_only_in_its_heads(name, variant):
  """A head of DIFF has two attention maps. A Transformer has twice the heads.

  Only the heads of DIFF have a norm at their output.
  """
  diff = load(name)

  transformer = load(name, variant)

  expected_model = dataclasses.replace(
    diff.model,
    attention="softmax",
    num_heads=2 * diff.model.num_heads,
    num_kv_heads=2 * diff.model.num_kv_heads,
    head_norm=False,
  )
  assert transformer == dataclasses.replace(diff, model=expected_model)


@pytest.mark.parametrize("name", NAMES)
def test_diff_v2_has_a_narrower_feed_forward_layer(name):
  """V2's attention is larger, and both variants have the same size."""
  diff = load(name)
  model = diff.model

  v2 = load(name, "diff_v2")

  # A head of V2 has values of half the width, so there are twice the heads.
  num_heads = 2 * model.num_heads
  # V2 adds a matrix [E, num_heads · head_dim] for queries, and one for λ.
  added_columns = num_heads * model.head_dim + num_heads
  # Each of the three matrices [E, ffn_dim] gives a third of these columns. The
  # width is rounded to a multiple of 16.
  exact_ffn_dim = model.ffn_dim - added_columns / 3
  ffn_dim = 16 * round(exact_ffn_dim / 16)
  expected_model = dataclasses.replace(
    model,
    attention="diff_v2",
    ffn_dim=ffn_dim,
    num_heads=num_heads,
    num_kv_heads=2 * model.num_kv_heads,
    head_norm=False,
  )
  assert v2 == dataclasses.replace(diff, model=expected_model)


@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.parametrize("name", ["tiny", "diff_1b"])
def test_every_variant_has_a_twin(name, variant):
  """A twin has another attention, and about as many parameters as "diff"."""
  twin = load(name, variant).model

  assert twin.attention == variant
  assert twin.head_norm == ATTENTION[variant].head_norm


@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.parametrize("name", ["tiny", "diff_1b"])
def test_a_variant_has_the_size_of_diff_up_to_vectors_and_rounding(
  name, variant
):
  """The width of the feed-forward layer makes the matrices equally large."""
  diff = load(name).model
  model = load(name, variant).model

  # Each of three feed-forward matrices [E, ffn_dim] has up to 8 columns too few
  # or too many, because ffn_dim is rounded to a multiple of 16.
  assert model.ffn_dim % 16 == 0
  rounding = 3 * model.embed_dim * 8
  # "diff" has four vectors for λ, and a gain that is twice as long.
  vectors_of_diff = 4 * diff.head_dim + 2 * diff.head_dim
  # A variant has at most two numbers for each head.
  vectors_of_variant = 2 * model.num_heads
  limit = model.num_layers * (rounding + vectors_of_diff + vectors_of_variant)
  assert abs(parameter_count(model) - parameter_count(diff)) <= limit


@pytest.mark.parametrize("variant", OTHERS)
def test_every_variant_can_have_one_head(variant):
  assert load("tiny", f"{variant},heads=1").model.num_heads == 1


def test_a_larger_registered_attention_gets_a_narrower_ffn(restored_registry):
  """The variants of a config have the same size.

  The attention "own" has three maps in a head, and a matrix [E, 7] in a layer.
  """

  @register("own")
  class Own(Attention):
    # The axes are layers, embed_dim (E), and 7 columns.
    extra_parameters = {"own_lambda": Parameter("LER", inputs="E")}
    extra_axes = {"R": 7}
    num_key_maps = 3

    def head_sizes(self):
      # G is the number of maps of a head.
      return super().head_sizes()._replace(G=3)

  diff = load("diff_1b").model

  own = load("diff_1b", "own").model

  # A head of "diff" has two maps, and values of twice the width. So "own" has
  # twice the heads.
  num_heads = 2 * diff.num_heads
  added_maps = 3 * num_heads - 2 * diff.num_heads
  # A map has queries and keys of width head_dim.
  added_columns = added_maps * 2 * diff.head_dim + 7
  # Each of the three matrices [E, ffn_dim] gives a third of these columns. The
  # width is rounded to a multiple of 16.
  exact_ffn_dim = diff.ffn_dim - added_columns / 3
  ffn_dim = 16 * round(exact_ffn_dim / 16)
  assert own == dataclasses.replace(
    diff,
    attention="own",
    num_heads=num_heads,
    num_kv_heads=2 * diff.num_kv_heads,
    head_norm=False,
    ffn_dim=ffn_dim,
  )


SMALL_V1 = ModelConfig(
  num_layers=2,
  embed_dim=64,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  ffn_dim=96,
)


@pytest.mark.parametrize(
  ("field", "value", "expected"),
  [
    ("lambda_init", 0.5, None),
    ("lambda_init_offset", 1, 0),
    ("num_noise_heads", 2, None),
    # The Transformer has twice the heads, so their values have half the width.
    ("value_dim", 40, 20),
    # The lowest layers have the Transformer's attention in both.
    ("plain_layers", 1, 1),
  ],
)
def test_a_field_of_v1_is_reset_or_converted_in_a_transformer(
  field, value, expected
):
  """Fields of λ and of noise maps, which a Transformer lacks, are reset."""
  v1 = dataclasses.replace(SMALL_V1, **{field: value})

  transformer = Attention.twin(v1)

  assert getattr(transformer, field) == expected


@pytest.mark.parametrize(
  ("fields", "num_layers_with_fewer_maps"),
  [
    pytest.param({"lambda_init": 0.5}, 0, id="lambda_init"),
    pytest.param({"lambda_init_offset": 1}, 0, id="lambda_init_offset"),
    pytest.param({"value_dim": 40}, 0, id="value_dim"),
    pytest.param({"plain_layers": 1}, 0, id="plain_layers"),
    pytest.param({"num_noise_heads": 2}, 2, id="num_noise_heads"),
    pytest.param(
      {"num_noise_heads": 2, "plain_layers": 1},
      1,
      id="num_noise_heads in one layer",
    ),
  ],
)
def test_a_transformer_is_narrower_if_v1_has_fewer_maps(
  fields, num_layers_with_fewer_maps
):
  """A head of V1 has two maps, and one of a Transformer has one.

  V1 with noise maps that heads share has fewer maps. The Transformer's width
  ffn_dim is then smaller, so that both have the same size.
  """
  num_layers = 2
  head_dim = 16
  ffn_dim = 96
  v1 = dataclasses.replace(
    SMALL_V1,
    num_layers=num_layers,
    num_heads=4,
    num_kv_heads=2,
    head_dim=head_dim,
    ffn_dim=ffn_dim,
    **fields,
  )

  transformer = Attention.twin(v1)

  assert transformer.num_heads == 2 * 4
  assert transformer.num_kv_heads == 2 * 2
  # 4 signal maps and 2 noise maps are two maps less than 8.
  missing_columns = 2 * head_dim * num_layers_with_fewer_maps / num_layers
  # Each of the three matrices [E, ffn_dim] gives a third of these columns. The
  # width is rounded to a multiple of 16.
  exact_ffn_dim = ffn_dim - missing_columns / 3
  assert transformer.ffn_dim == 16 * round(exact_ffn_dim / 16)


def test_any_variant_can_become_any_other():
  """`twin` gives a model another attention, and keeps the model's size."""
  v2 = load("diff_1b", "diff_v2").model

  diff = ATTENTION["diff"].twin(v2)
  transformer = Attention.twin(v2)

  assert diff == load("diff_1b").model
  assert transformer == load("diff_1b", "transformer").model


def test_a_feed_forward_layer_that_would_vanish_is_an_error():
  """V2's larger attention takes its parameters from the feed-forward layer."""
  narrow = dataclasses.replace(load("diff_1b").model, ffn_dim=688)

  with pytest.raises(
    UserError, match="ffn_dim = 688: too narrow for 'diff_v2'"
  ):
    ATTENTION["diff_v2"].twin(narrow)


def test_a_number_of_heads_that_cannot_be_converted_is_an_error(
  restored_registry,
):
  """The 8 heads of "diff" would become 8 · 2 / 3 heads of "own".

  Values are twice as wide as keys in "diff", and three times in "own".
  """

  @register("own")
  class Own(Attention):
    value_dim_factor = 3

  message = "config.model.num_heads = 8: .* 2/3 of it, which must be"
  with pytest.raises(UserError, match=message):
    load("diff_1b", "own")


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_a_published_model_has_its_size(name, billions):
  model = load(name).model

  size = parameter_count(model)

  assert size == initialized_size(model)
  assert size / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_tuned_from_its_weights(name):
  config = load(name)

  assert config.train.init_from == f"runs/{name}"
  assert config.data.tokenizer == f"runs/{name}/tokenizer.json"


@pytest.mark.parametrize("name", PAPER)
def test_the_heads_of_a_model_of_the_paper_fill_its_width(name):
  """E = 2·d·h. The twins have twice the heads with the same d."""
  diff = load(name).model

  assert diff.embed_dim == 2 * diff.head_dim * diff.num_heads
  assert diff.head_norm


# Llama 3.2 1B has 16 layers, 32 heads of width 64, and E = 2048. In each layer,
# "dex" adds a matrix [64, 64] and a λ for each head, and "gda" adds queries of
# 8 noise heads and a column for λ of each head.
@pytest.mark.parametrize(
  ("name", "num_added"),
  [
    ("llama_1b_dex", 16 * (64 * 64 + 32)),
    ("llama_1b_gda", 16 * 2048 * (8 * 64 + 32)),
  ],
)
def test_an_adapted_model_is_a_llama_with_added_parameters(name, num_added):
  model = load(name).model

  num_parameters_of_llama = 1_235_814_400
  assert parameter_count(model) == num_parameters_of_llama + num_added


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapted_model_trains_some_parameters_of_a_converted_llama(name):
  """`optimizer.trained` has the names of the parameters that are trained."""
  config = load(name)
  trained = set(config.optimizer.trained.split(","))
  all_names = set(parameter_shapes(config.model))

  assert trained.issubset(all_names)
  assert trained != all_names
  assert not config.optimizer.frozen
  # The weights of Llama, converted for this model.
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


@pytest.mark.parametrize(("name", "tokens"), PAPER_BATCHES.items())
def test_a_batch_has_as_many_tokens_as_in_the_paper(name, tokens):
  config = load(name)

  num_tokens = config.train.batch_size * config.data.length
  assert num_tokens == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
  "name, tokens, learning_rate",
  [("math_stage1", 20e9, 8e-5), ("math_stage2", 2e9, 1e-5)],
)
def test_a_stage_of_mathematics_follows_the_paper(
  name, tokens, learning_rate, variant
):
  config = load(name, variant)

  num_tokens = config.train.steps * config.train.batch_size * config.data.length
  assert num_tokens == pytest.approx(tokens, rel=0.01)
  assert config.optimizer.learning_rate == learning_rate
  # The user names the run to start from.
  assert config.train.init_from == ""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["math_stage1", "math_stage2"])
def test_a_stage_of_mathematics_can_start_from_the_pretrained_model(
  name, variant
):
  pretrained = load("diff_3b_64k", variant).model
  model = load(name, variant).model

  # The policy of rematerialization has no effect on the parameters.
  assert dataclasses.replace(model, remat=pretrained.remat) == pretrained


def test_only_the_second_stage_of_mathematics_has_prompts():
  assert not load("math_stage1").data.prompt_field
  assert load("math_stage2").data.prompt_field == "problem"


def test_the_second_stage_of_mathematics_fits_a_prompt_and_a_16k_answer():
  config = load("math_stage2")
  assert config.data.length == 16_384
  assert config.model.max_length > config.data.length


def test_the_sample_of_the_second_stage_has_the_format_of_its_data():
  config = load("math_stage2")
  head, tail = config.data.prompt_template.split("{prompt}")
  assert config.train.sample_prompt.startswith(head)
  assert config.train.sample_prompt.endswith(tail)


@pytest.mark.parametrize(
  ("variant", "part"),
  [
    pytest.param("diff_v3", "diff_v3", id="unknown name"),
    pytest.param("architecture=v2", "architecture=v2", id="named name"),
    pytest.param("", "", id="empty"),
    pytest.param("diff,", "", id="empty second part"),
    pytest.param("diff,heads=2,heads=2", "heads=2", id="number twice"),
    pytest.param("diff,transformer", "transformer", id="two names"),
    pytest.param("diff,head=2", "head=2", id="unknown option"),
    pytest.param("heads=0", "heads=0", id="zero"),
    pytest.param("heads=-2", "heads=-2", id="negative"),
    pytest.param("heads=2.0", "heads=2.0", id="float"),
    # Python's `int` would read these two as 10 and 2.
    pytest.param("heads=1_0", "heads=1_0", id="underscore"),
    pytest.param("heads= 2", "heads= 2", id="space"),
    pytest.param("heads=", "heads=", id="no number"),
    pytest.param("transformer,=8", "=8", id="no option"),
  ],
)
def test_the_error_names_the_unknown_part_of_a_variant(variant, part):
  """A variant is a name, a number of heads, or both, with a comma."""
  message = re.escape(
    f"variant {variant!r}: {part!r} is not allowed; variants are diff|"
  )
  with pytest.raises(UserError, match=f"^{message}"):
    load("tiny", variant)


def test_the_error_for_an_unknown_variant_lists_all_variants():
  with pytest.raises(UserError) as error:
    load("tiny", "unknown")

  # The main variants come first.
  others = [name for name in ATTENTION if name != "diff"]
  names = "|".join(["diff", "transformer", *others])
  assert str(error.value).endswith(
    f"variants are {names}[,heads=NUMBER];"
    " a variant of your own needs --import=MODULE"
  )


def read_variant(text: str) -> tuple:
  """Returns the row, size, times and heads of a variant.

  The name of a choice may be left out: "a" means "row=a". Parts that are not in
  the text have the defaults "b", "1b", None and 4.
  """
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
  """The values are for the fields row, size, times and heads."""
  assert read_variant(text) == values


@pytest.mark.parametrize(
  "number",
  # As a float, 400 digits are infinite.
  ["9" * 400, "nan", "inf", "-1", "0", "x"],
)
def test_a_number_of_a_variant_is_positive_and_finite(number):
  """The error lists the variants that `read_variant` allows."""
  usage = r"a\|b\[,size=1b\|2b\]\[,times=NUMBER\]\[,heads=NUMBER\]"
  with pytest.raises(UserError, match=f"not allowed; variants are {usage}"):
    read_variant(f"a,times={number}")


# Billions of training tokens in the files of FineWeb-Edu.
FINEWEB_EDU = {
  "sample/100BT/*.parquet": 90,
  "sample/350BT/*.parquet": 300,
  "data/*/*.parquet": 1000,
}


WEB_TEXT_CONFIGS = [name for name in NAMES if name.startswith("diff_")]


@pytest.mark.parametrize("name", WEB_TEXT_CONFIGS)
def test_a_config_reads_the_fewest_files_that_have_enough_tokens(name):
  """A run reads each token at most once."""
  config = load(name)
  tokens = config.train.steps * config.train.batch_size * config.data.length

  # FINEWEB_EDU has the billions of tokens of each pattern of files, from the
  # fewest files to all.
  sufficient_patterns = []
  for pattern, billions in FINEWEB_EDU.items():
    if tokens <= billions * 1e9:
      sufficient_patterns.append(pattern)

  # The source is "parquet:DATASET@REVISION/PATTERN".
  dataset, _, revision_and_pattern = config.data.source.partition("@")
  _, _, pattern = revision_and_pattern.partition("/")
  assert dataset == "parquet:hf://datasets/HuggingFaceFW/fineweb-edu"
  assert pattern == sufficient_patterns[0]


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("name", ["tiny", "diff_1b", "diff_3b"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_another_number_of_heads_hardly_changes_the_size(name, variant, factor):
  """All heads together keep their width, and so the matrices keep their size.

  The exceptions are V2's matrix for λ, and V1's vectors.
  """
  model = load(name, variant).model
  num_heads = int(factor * model.num_heads)

  changed = load(name, f"{variant},heads={num_heads}").model

  # V2 has a matrix [E, num_heads] for λ.
  lambda_columns = abs(num_heads - model.num_heads)
  # V1 has four vectors for λ, and a gain that is twice as long.
  changed_length = abs(changed.head_dim - model.head_dim)
  vectors = 4 * changed_length + 2 * changed_length
  limit = model.num_layers * (model.embed_dim * lambda_columns + vectors)
  assert abs(parameter_count(changed) - parameter_count(model)) <= limit


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("name", ["tiny", "diff_1b", "diff_3b"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_another_number_of_heads_changes_only_the_fields_of_heads(
  name, variant, factor
):
  model = load(name, variant).model
  num_heads = int(factor * model.num_heads)

  changed = load(name, f"{variant},heads={num_heads}").model

  assert changed == dataclasses.replace(
    model,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_dim=int(model.head_dim / factor),
  )


@pytest.mark.parametrize("name", ["tiny", "diff_1b", "diff_3b"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_width_that_cannot_be_divided_among_the_heads_is_an_error(
  name, variant
):
  message = (
    r"variant with heads=7: a width of \d+ cannot be divided among 7 heads of"
    " an even width"
  )
  with pytest.raises(UserError, match=message):
    load(name, f"{variant},heads=7")


def test_a_config_becomes_a_config_dict_and_back():
  config = load("diff_1b")
  assert from_config_dict(to_config_dict(config)) == config
  assert from_config_dict(config.to_dict()) == config
