"""Motif's checkpoints are read and written, and unsupported ones rejected."""

import dataclasses
import importlib
import json
import pathlib
import re
from typing import Any

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy

from diffjax.config import UserError, from_config_dict
from diffjax.inference import trained
from diffjax.inference.sampler import Sampler
from diffjax.interop import motif, workdir
from diffjax.model.attention import DiffAttention
from diffjax.model.decoder import lambda_inits
from tests.interop import motif_reference
from tests.interop.small_models import (
  convert,
  copy_golden,
  edit_config,
  make_model,
  model_logits,
  read_tensors,
)

# motif_tiny is like Motif-2.6B, and the others are like Motif-2-12.7B.
GOLDEN_NAMES = ["motif_tiny", "motif_2_tiny", "motif_2_tiny_gqa"]


# The published models. Public code states some fields of their config.json. The
# others are the defaults of that code.

COMMON_FIELDS = {
  "architectures": ["MotifForCausalLM"],
  "model_type": "Motif",
  "vocab_size": 219520,
  "hidden_act": "poly_norm",
  "rms_norm_eps": 1e-6,
  "rope_scaling": None,
  "attn_rms_norm_eps": 1e-5,
  "use_bias": False,
  "sliding_window": None,
  "use_sliding_window": False,
  "max_window_layers": 28,
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "torch_dtype": "float32",
  "use_cache": True,
  "bos_token_id": 219396,
  "eos_token_id": 219395,
}
PUBLISHED_FIELDS = {
  "motif_2_6b": {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
  },
  "motif_2_12b": {
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 16,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "head_dim": 128,
    "num_noise_heads": 8,
    "grouped_ratio": 4,
    "k_ratio": 1,
    "lambda_init": 1,
  },
}


def write_published_config(name: str, directory: pathlib.Path) -> None:
  """Writes the config.json of a published model."""
  config = COMMON_FIELDS | PUBLISHED_FIELDS[name]
  (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["motif_2_6b", "motif_2_12b"])
def test_our_config_of_a_published_model_equals_its_config_json(name, tmp_path):
  """diffjax/configs has a config with the sizes of each published model."""
  write_published_config(name, tmp_path)
  module = importlib.import_module(f"diffjax.configs.{name}")
  config = from_config_dict(module.get_config()).model

  published = motif.read_config(tmp_path)

  # `remat` saves memory in training. A config.json has no such field.
  assert dataclasses.replace(config, remat=published.remat) == published


def test_the_layout_has_the_tensors_of_motif_2_6b(tmp_path):
  """It has 8 heads with two maps of size 128, and values of size 256."""
  write_published_config("motif_2_6b", tmp_path)

  shapes = motif.make_layout(motif.read_config(tmp_path)).shapes()

  num_layers, width, vocab_size = 32, 2048, 219_520
  num_heads, value_size = 8, 256
  # 3 norms, 4 matrices and 4 λ vectors of the attention, 3 matrices and the
  # weight and bias of the activation of the feed-forward layer.
  tensors_per_layer = 3 + 4 + 4 + 3 + 2
  embedding, last_norm = 1, 1
  assert len(shapes) == num_layers * tensors_per_layer + embedding + last_norm
  assert shapes["model.embed_tokens.weight"] == (vocab_size, width)
  attention = "model.layers.0.self_attn"
  assert shapes[f"{attention}.q_proj.weight"] == (num_heads * 2 * 128, width)
  assert shapes[f"{attention}.k_proj.weight"] == (num_heads * 2 * 128, width)
  assert shapes[f"{attention}.v_proj.weight"] == (num_heads * value_size, width)
  assert shapes[f"{attention}.o_proj.weight"] == (width, num_heads * value_size)
  # This is the gain of the norm of the heads.
  assert shapes[f"{attention}.subln.weight"] == (value_size,)
  assert shapes["model.layers.0.mlp.act_fn.bias"] == (1,)


def test_the_layout_has_the_tensors_of_motif_2_12b(tmp_path):
  """Its 40 query heads are 32 signal heads and 8 noise heads.

  A noise head has only a map, which 4 signal heads subtract from theirs. So
  only signal heads have an output, which has the size of two values.
  """
  write_published_config("motif_2_12b", tmp_path)

  shapes = motif.make_layout(motif.read_config(tmp_path)).shapes()

  num_layers, width, vocab_size = 40, 4096, 219_520
  num_query_heads, num_signal_heads, num_kv_heads, head_size = 40, 32, 16, 128
  # As in Motif-2.6B, a layer has 16 tensors. The others are the embedding, the
  # last norm and lm_head.
  assert len(shapes) == num_layers * 16 + 3
  assert shapes["model.embed_tokens.weight"] == (vocab_size, width)
  attention = "model.layers.0.self_attn"
  query_shape = (num_query_heads * head_size, width)
  key_shape = (num_kv_heads * head_size, width)
  assert shapes[f"{attention}.q_proj.weight"] == query_shape
  assert shapes[f"{attention}.k_proj.weight"] == key_shape
  assert shapes[f"{attention}.v_proj.weight"] == key_shape
  output_size = 2 * head_size
  out_shape = (width, num_signal_heads * output_size)
  assert shapes[f"{attention}.o_proj.weight"] == out_shape
  assert shapes[f"{attention}.subln.weight"] == (output_size,)
  assert shapes["model.layers.0.mlp.act_fn.bias"] == (1,)


# Golden checkpoints.


@pytest.fixture(scope="module", params=GOLDEN_NAMES)
def golden(request, tmp_path_factory):
  """Returns a golden checkpoint. Tests must not change its files."""
  directory = tmp_path_factory.mktemp("golden") / "source"
  return copy_golden(request.param, directory)


def test_a_golden_checkpoint_has_its_logits(golden):
  """A transcription of the authors' code in PyTorch has computed the logits."""
  model = motif.read(str(golden.path))

  logits = model_logits(model, golden.ids)

  atol = 1e-5 * np.abs(golden.logits).max()
  chex.assert_trees_all_close(logits, golden.logits, rtol=0, atol=atol)


def test_every_attention_layer_computes_its_golden_output(golden):
  """A transcription of the authors' code has computed the golden outputs."""
  model = motif.read(str(golden.path))
  config = model.config
  all_layers = model.params["layers"]["attention"]
  data = np.load(golden.path / "golden_logits.npz")
  attention = DiffAttention(
    num_heads=config.num_heads,
    num_noise_heads=config.num_noise_heads,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    rope_base=config.rope_base,
    norm_eps=config.head_norm_eps,
  )
  apply = jax.jit(attention.apply)

  for layer, lambda_init in enumerate(lambda_inits(config)):
    params = {name: stacked[layer] for name, stacked in all_layers.items()}
    x = data["attention_input"][layer]
    output = apply({"params": params}, x, lambda_init)

    expected = data["attention_output"][layer]
    atol = 1e-5 * np.abs(expected).max()
    chex.assert_trees_all_close(output, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
  ("name", "num_groups", "signal_heads_per_group"),
  [
    # Each of 3 signal heads has a noise head of its own.
    ("motif_tiny", 3, 1),
    # 8 signal heads share 2 noise heads, and in the last model 4.
    ("motif_2_tiny", 2, 4),
    ("motif_2_tiny_gqa", 4, 2),
  ],
)
def test_queries_are_in_groups_that_share_a_noise_head(
  name, num_groups, signal_heads_per_group, tmp_path
):
  """A group has signal heads, and a noise head whose map they subtract."""
  source = copy_golden(name, tmp_path / "source").path

  model = motif.read(str(source))

  query = model.params["layers"]["attention"]["query"]
  num_layers = model.config.num_layers
  width = model.config.embed_dim
  head_dim = model.config.head_dim
  heads_per_group = signal_heads_per_group + 1
  expected_shape = (num_layers, width, num_groups, heads_per_group, head_dim)
  assert query.shape == expected_shape


def test_written_tensors_are_the_tensors_that_were_read(golden, tmp_path):
  config = json.loads((golden.path / "config.json").read_text())
  model = motif.read(str(golden.path))

  # The golden checkpoints have different dtypes.
  motif.write(str(tmp_path / "out"), model, config["torch_dtype"])

  written = read_tensors(tmp_path / "out")
  chex.assert_trees_all_equal(written, read_tensors(golden.path))


def test_a_written_config_describes_the_same_model(golden, tmp_path):
  model = motif.read(str(golden.path))

  motif.write(str(tmp_path / "out"), model, "float32")

  source = json.loads((golden.path / "config.json").read_text())
  written = json.loads((tmp_path / "out/config.json").read_text())
  for field in (
    "num_attention_heads",
    "num_key_value_heads",
    "num_noise_heads",
    "hidden_size",
    "attn_rms_norm_eps",
    "rms_norm_eps",
    "rope_theta",
  ):
    # Not every checkpoint has every field.
    assert written.get(field) == source.get(field), field
  assert motif.read(str(tmp_path / "out")).config == model.config


def test_commands_convert_a_motif_to_a_workdir_and_back(tmp_path):
  """A workdir is the directory of a run of diffjax."""
  source = copy_golden("motif_2_tiny_gqa", tmp_path / "source").path
  run = tmp_path / "run"
  out = tmp_path / "out"

  first = convert(f"--from=motif:{source}", f"--to=diffjax:{run}")
  second = convert(f"--from=diffjax:{run}", f"--to=motif:{out}")

  assert first.returncode == 0, first.stderr
  assert "--config.model.num_noise_heads=4" in first.stdout
  assert "--config.model.ffn_activation=poly_norm" in first.stdout
  assert second.returncode == 0, second.stderr
  chex.assert_trees_all_equal(read_tensors(out), read_tensors(source))
  card = (out / "README.md").read_text()
  command = "python -m diffjax.convert --from=motif:out --to=diffjax:loaded"
  assert command in card


# Models of diffjax.


@pytest.mark.parametrize(
  "fields",
  [
    pytest.param({}, id="a noise map for each head"),
    pytest.param(
      {
        "num_noise_heads": 2,
        "num_kv_heads": 1,
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_length": 8,
      },
      id="shared noise maps, YaRN",
    ),
  ],
)
def test_a_model_that_is_written_and_read_is_the_same(fields, tmp_path):
  """These models have Motif's norms, λ_init and feed-forward layers."""
  model = make_model(
    "diff",
    head_norm_eps=1e-3,
    lambda_init_offset=1,
    ffn_activation="poly_norm",
    **fields,
  )

  motif.write(str(tmp_path), model, "float32")

  read = motif.read(str(tmp_path))
  assert read.config == model.config
  chex.assert_trees_all_equal(read.params, model.params)


def test_a_written_model_has_the_same_logits_by_the_reference(tmp_path):
  """The reference computes Motif in NumPy, from the written files."""
  model = make_model(
    "diff", head_norm_eps=1e-3, lambda_init_offset=1, ffn_activation="poly_norm"
  )
  token_ids = np.arange(1, 20)

  motif.write(str(tmp_path), model, "float32")

  config = json.loads((tmp_path / "config.json").read_text())
  expected = motif_reference.logits(config, read_tensors(tmp_path), token_ids)
  logits = model_logits(model, token_ids[None])[0]
  atol = 1e-5 * np.abs(expected).max()
  chex.assert_trees_all_close(logits, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"lambda_init_offset": 0}, "lambda_init_offset = 1; the model has 0"),
    (
      {"ffn_activation": "silu"},
      "ffn_activation = 'poly_norm'; the model has 'silu'",
    ),
    ({"lambda_init": 0.8}, "lambda_init = None; the model has 0.8"),
    # DIFF V2 has no λ_init and no head norm.
    (
      {"attention": "diff_v2", "lambda_init_offset": 0, "head_norm": False},
      "attention = 'diff'; the model has 'diff_v2'",
    ),
    ({"plain_layers": 1}, "plain_layers = 0; the model has 1"),
    ({"window": 9}, "window = None; the model has 9"),
  ],
)
def test_a_model_that_motif_cannot_represent_is_not_written(
  fields, message, tmp_path
):
  """Without `fields`, the model would be one that Motif can represent."""
  supported_fields = {
    "attention": "diff",
    "lambda_init_offset": 1,
    "ffn_activation": "poly_norm",
  }
  model = make_model(**(supported_fields | fields))

  with pytest.raises(UserError, match=f"supports only {message}"):
    motif.write(str(tmp_path / "out"), model, "float32")

  assert not (tmp_path / "out").exists()


# Checkpoints that are not supported.


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    (
      "num_noise_heads",
      3,
      "num_noise_heads = 3: it must divide num_attention_heads = 10, and be"
      " less",
    ),
    (
      "num_noise_heads",
      10,
      "num_noise_heads = 10: it must divide num_attention_heads = 10, and be"
      " less",
    ),
    (
      "num_noise_heads",
      -2,
      "num_noise_heads = -2: it must be a positive multiple of 1",
    ),
    (
      "num_noise_heads",
      True,
      "num_noise_heads = True: it must be a positive multiple of 1",
    ),
    (
      "num_key_value_heads",
      3,
      "num_key_value_heads = 3: it must be a positive multiple of 2",
    ),
    (
      "num_key_value_heads",
      6,
      "num_kv_heads = 3: must divide model.num_noise_heads = 2",
    ),
    (
      "head_dim",
      6,
      r"has model.layers.0.self_attn.q_proj.weight of shape \[80, 24\], but"
      r" its config.json requires \[60, 24\]",
    ),
  ],
)
def test_numbers_of_heads_that_do_not_divide_are_rejected(
  field, value, message, tmp_path
):
  """motif_2_tiny has 10 query heads. 2 of them are noise heads."""
  source = copy_golden("motif_2_tiny", tmp_path / "source").path
  edit_config(source, {field: value})

  with pytest.raises(UserError, match=message):
    motif.read(str(source))


@pytest.mark.parametrize(
  ("field", "value", "supported"),
  [
    ("grouped_ratio", 3, "4"),
    ("k_ratio", 2, "1"),
    ("hidden_act", "silu", "'poly_norm'"),
    ("use_bias", True, "False"),
    ("use_sliding_window", True, "False"),
    ("is_causal", False, "True"),
  ],
)
def test_a_field_with_an_unsupported_value_is_rejected(
  field, value, supported, tmp_path
):
  """`supported` is the only value that the reader accepts."""
  source = copy_golden("motif_2_tiny", tmp_path / "source").path
  edit_config(source, {field: value})

  message = f"{field} = {value!r}: diffjax supports only {supported}"
  with pytest.raises(UserError, match=message):
    motif.read(str(source))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    pytest.param(
      {"attn_rms_norm_eps": None},
      "has no attn_rms_norm_eps",
      id="a missing field",
    ),
    pytest.param(
      {"model_type": "Motif3"},
      "model_type = 'Motif3': this layout supports only 'Motif' or 'motif'",
      id="another model",
    ),
    pytest.param(
      {"kv_lora_rank": 512, "mhc_enabled": True},
      "has fields that diffjax does not know: kv_lora_rank = 512, mhc_enabled"
      " = True; remove the fields",
      id="unknown fields",
    ),
    pytest.param(
      {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
      "scales its rotary angles .*'dynamic'",
      id="dynamic RoPE",
    ),
    pytest.param(
      {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
      "rotary angles .*original_max_position_embeddings",
      id="YaRN without its length",
    ),
    pytest.param(
      {"vocab_size": 100},
      "tokenizer.json has 128 tokens, but the model has 100",
      id="a vocabulary smaller than the tokenizer's",
    ),
  ],
)
def test_an_unsupported_config_is_rejected(changes, message, tmp_path):
  """diffjax would compute other logits than the model's own code."""
  source = copy_golden("motif_2_tiny", tmp_path / "source").path
  edit_config(source, changes)

  with pytest.raises(UserError, match=message):
    motif.read(str(source))


def test_a_missing_safetensors_file_is_named(tmp_path):
  """An index names all files of a model."""
  source = copy_golden("motif_2_tiny", tmp_path / "source").path
  _, shard, *_ = sorted(source.glob("*.safetensors"))
  shard.unlink()

  message = (
    f"there is no .*{re.escape(shard.name)}, which"
    " model.safetensors.index.json names"
  )
  with pytest.raises(UserError, match=message):
    motif.read(str(source))


@pytest.mark.parametrize(
  "difference", [pytest.param(0, id="equal"), pytest.param(1, id="different")]
)
def test_a_tensor_in_two_files_is_rejected(difference, tmp_path):
  """A reader that takes one of them could take the wrong one."""
  source = copy_golden("motif_2_tiny", tmp_path / "source").path
  first, *_, last = sorted(source.glob("*.safetensors"))
  first_tensors = safetensors.numpy.load_file(first)
  last_tensors = safetensors.numpy.load_file(last)
  # The last file also gets a tensor of the first one, equal or changed.
  name = min(first_tensors)
  tensor = first_tensors[name]
  last_tensors[name] = tensor + tensor.dtype.type(difference)
  safetensors.numpy.save_file(last_tensors, last)

  message = (
    f"has {re.escape(name)} in more than one file, {last.name} among them"
  )
  with pytest.raises(UserError, match=message):
    motif.read(str(source))


# A converted model on several devices.


def prefill_logits(
  run: pathlib.Path, prompts: list[list[int]], **options: Any
) -> jax.Array:
  """Returns the logits of the next token of each prompt.

  Args:
    run: a workdir.
    prompts: token ids of each prompt.
    options: keyword arguments of `trained.load`.
  """
  loaded = trained.load(run, **options)
  sampler = Sampler(
    loaded.model, loaded.params, batch_size=len(prompts), capacity=64
  )
  return sampler.prefill(prompts).logits


@pytest.fixture
def golden_and_workdir(tmp_path):
  """Returns a small Motif, and the path of a workdir with the same model."""
  golden = copy_golden("motif_2_tiny", tmp_path / "source")
  workdir.write(str(tmp_path / "run"), motif.read(str(golden.path)))
  return golden, tmp_path / "run"


@pytest.mark.full
def test_two_devices_compute_the_golden_logits(golden_and_workdir):
  """With tensor=2, each device has a half of each large parameter."""
  golden, run = golden_and_workdir

  logits = prefill_logits(run, golden.ids.tolist(), tensor=2)

  # These predict the token after each row.
  expected = golden.logits[:, -1]
  atol = 1e-5 * np.abs(expected).max()
  chex.assert_trees_all_close(logits, expected, rtol=0, atol=atol)


@pytest.mark.full
def test_two_devices_compute_the_int8_logits_of_one_device(golden_and_workdir):
  """With tensor=2, each device has a half of each large matrix in int8."""
  pytest.importorskip("qwix")
  golden, run = golden_and_workdir
  prompts = golden.ids.tolist()

  on_one_device = prefill_logits(run, prompts, weight_dtype="int8")
  on_two_devices = prefill_logits(run, prompts, weight_dtype="int8", tensor=2)

  largest = np.abs(on_one_device).max()
  chex.assert_trees_all_close(
    on_two_devices, on_one_device, rtol=0, atol=1e-5 * largest
  )
  # int8 rounds a weight by up to 1/254 of the largest one, and float32 by less
  # than 1e-7. So this shows that the weights are in int8.
  exact_logits = golden.logits[:, -1]
  rounding_error = np.abs(on_one_device - exact_logits).max() / largest
  assert 1e-4 < rounding_error < 0.1
