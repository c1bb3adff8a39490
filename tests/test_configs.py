"""Every config and variant, by shape alone: sizes as in the paper, twins of equal size."""

import dataclasses
import importlib
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from diffjax.command import from_config_dict, to_config_dict
from diffjax.config import UserError
from diffjax.model.decoder import Decoder
from diffjax.training.flops import parameter_count

NAMES = sorted(path.stem for path in pathlib.Path("configs").glob("*.py"))
VARIANTS = ("diff", "transformer", "diff_v2")

# Billions with one vocabulary matrix (paper, tables 2 and 8, from shapes; see each config).
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


def load(name, variant="diff"):
  return from_config_dict(importlib.import_module(f"configs.{name}").get_config(variant))


def shapes(config):
  return jax.eval_shape(Decoder(config.model).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def count(tree):
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_all_are_here():
  assert set(NAMES) == {"base", "tiny", "diff_125m", "diff_350m", *PAPER}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, variant):
  config = load(name, variant)
  size = count(shapes(config))
  assert size == parameter_count(config.model)
  twin_size = count(shapes(load(name, "transformer")))
  # DIFF V1 adds λ vectors and gains; DIFF V2's feed-forward width is rounded to a shardable one. Rounding is coarse at tiny's width.
  assert size == pytest.approx(twin_size, rel=0.02 if config.model.embed_dim < 512 else 1e-3)
  if name in PAPER and variant == "diff":
    assert size / 1e9 == pytest.approx(PAPER[name], abs=5e-4 * max(1.0, PAPER[name]))


@pytest.mark.parametrize("name", PAPER)
def test_paper_shapes(name):
  """E = 2·d·h in DIFF; the twin has twice the heads of the same d."""
  model, twin, v2 = (load(name, variant).model for variant in VARIANTS)
  assert model.embed_dim == 2 * model.head_dim * model.num_heads
  assert twin.num_heads == v2.num_heads == 2 * model.num_heads
  assert twin.head_dim == v2.head_dim == model.head_dim
  assert (twin.attention, v2.attention) == ("softmax", "diff_v2")
  assert model.head_norm and not twin.head_norm and not v2.head_norm


PAPER_BATCHES = {"diff_830m": 0.25e6, "diff_1b": 0.25e6, "diff_13b": 0.25e6, "diff_3b": 4e6, "math_stage1": 4e6, "math_stage2": 1e6}


@pytest.mark.parametrize("name", PAPER_BATCHES)
def test_paper_batches(name):
  config = load(name)
  assert config.train.batch_size * config.data.length == pytest.approx(PAPER_BATCHES[name], rel=0.05)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mathematics(variant):
  """Each stage takes the parameters of the one before: the same model, but for lengths; tokens and learning rates are the paper's."""
  before, first, second = (load(name, variant) for name in ("diff_3b_64k", "math_stage1", "math_stage2"))
  for name, tokens, learning_rate in [("math_stage1", 20e9, 8e-5), ("math_stage2", 2e9, 1e-5)]:
    config = load(name, variant)
    assert config.train.steps * config.train.batch_size * config.data.length == pytest.approx(tokens, rel=0.01)
    assert config.optimizer.learning_rate == learning_rate and config.train.init_from == ""
    assert dataclasses.replace(config.model, remat="") == dataclasses.replace(before.model, remat="")
  assert not first.data.prompt_field and second.data.prompt_field == "problem"
  assert second.data.length == 16_384 and second.model.max_length > second.data.length, "a prompt stands before an answer of 16K"
  head, tail = second.data.prompt_template.split("{prompt}")
  assert second.train.sample_prompt.startswith(head) and second.train.sample_prompt.endswith(tail)


def test_unknown_variant():
  with pytest.raises(UserError, match="'diff_v3'.*diff, transformer, diff_v2"):
    load("tiny", "diff_v3")


def test_round_trip():
  config = load("diff_1b")
  assert from_config_dict(to_config_dict(config)) == config
  assert from_config_dict(config.to_dict()) == config


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("model.num_layer", 3, "config.model.num_layer is not a config field: did you mean model.num_layers"),
    ("model.banana", 3, "config.model.banana is not a config field: there are attention, "),
    ("model.num_layers", "3", "config.model.num_layers must be int; got '3'"),
    ("model.num_layers", 2.5, "config.model.num_layers must be int; got 2.5"),
    ("model.num_layers", True, "config.model.num_layers must be int; got True"),
    ("model.num_layers", 0, "config.model.num_layers = 0: must be at least 1"),
    ("model.num_kv_heads", 3, "config.model.num_kv_heads = 3: must divide model.num_heads = 2"),
    ("model.head_dim", 33, "config.model.head_dim = 33: must be even"),
    ("model.attention", "diff_v3", "config.model.attention = 'diff_v3': must be one of diff, diff_v2, diff_v2_linear, softmax"),
    ("model.max_length", 100, "config.data.length = 256: must be at most model.max_length = 100"),
    ("optimizer.learning_rate", math.inf, "config.optimizer.learning_rate must be finite; got inf"),
    ("optimizer.learning_rate", math.nan, "config.optimizer.learning_rate must be finite; got nan"),
    ("data.validation_fraction", 1.5, "config.data.validation_fraction = 1.5: must lie between 0 and 1"),
    ("data.prompt_template", "Question:", r"config.data.prompt_template = 'Question:': must hold \{prompt\} once"),
    ("data.prompt_field", "text", "config.data.prompt_field = 'text': must be another field than data.text_field"),
    ("train.accumulation", 3, "config.train.accumulation = 3: must divide train.batch_size = 16"),
    ("optimizer.name", "sgd", "config.optimizer.name = 'sgd': must be one of adamw, muon"),
    ("mesh.data", 0, "config.mesh = .*every axis must be positive"),
    ("mesh.fsdp", -1, "config.mesh = .*on one axis at most"),
    ("model", 3, "config.model must be a section"),
  ],
)
def test_bad_fields(field, value, message):
  values = load("tiny").to_dict()
  *section, name = field.split(".")
  target = values
  for key in section:
    target = target[key]
  target[name] = value
  with pytest.raises(UserError, match=message):
    from_config_dict(values)


def test_prompts_are_packed_as_documents():
  values = load("tiny").to_dict()
  values["data"] |= {"prompt_field": "question", "packing": "concat"}
  with pytest.raises(UserError, match="config.data.packing = 'concat': must be 'documents' with config.data.prompt_field = 'question'"):
    from_config_dict(values)


def test_lambda_init_belongs_to_diff():
  values = load("tiny", "transformer").to_dict()
  values["model"]["lambda_init"] = 0.8
  with pytest.raises(UserError, match="config.model.lambda_init = 0.8: only attention = 'diff'"):
    from_config_dict(values)
