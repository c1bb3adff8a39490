"""Hugging Face's DiffLlama: checkpoints are read, and written again."""

import json
import pathlib
import shutil
from typing import Any, NamedTuple

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from diffjax.interop import diffllama, directory, workdir
from tests.interop.small_models import (
  Golden,
  convert,
  copy_golden,
  edit_config,
  make_model,
  model_logits,
  read_tensors,
)

Tensors = dict[str, np.ndarray]

GOLDEN_NAMES = ["diffllama_tiny", "diffllama_tiny_gqa"]


def assert_same_tensors(actual: Tensors, expected: Tensors) -> None:
  """Asserts that tensors have the same names, types and values."""
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  chex.assert_trees_all_equal(actual, expected)


def cast(tensors: Tensors, dtype: Any) -> Tensors:
  """Returns the tensors in another type."""
  return {name: tensor.astype(dtype) for name, tensor in tensors.items()}


def read_config(path: pathlib.Path) -> dict[str, Any]:
  return json.loads((path / "config.json").read_text())


# Golden checkpoints, by the command.


class RoundTrip(NamedTuple):
  """A golden checkpoint that was converted to a workdir and back.

  Attributes:
    golden: an unchanged copy of the checkpoint.
    run: the workdir.
    output: what the first conversion printed.
    exported: the directory that was written from the workdir.
  """

  golden: Golden
  run: pathlib.Path
  output: str
  exported: pathlib.Path


@pytest.fixture(scope="module", params=GOLDEN_NAMES)
def round_trip(request, tmp_path_factory):
  home = tmp_path_factory.mktemp("round_trip")
  source = copy_golden(request.param, home / "source").path
  run = home / "run"
  first = convert(f"--from=diffllama:{source}", f"--to=diffjax:{run}")
  assert first.returncode == 0, first.stderr

  # The workdir must not need the files that it was converted from.
  shutil.rmtree(source)
  exported = home / "exported"
  second = convert(f"--from=diffjax:{run}", f"--to=diffllama:{exported}")
  assert second.returncode == 0, second.stderr

  golden = copy_golden(request.param, home / "golden")
  return RoundTrip(golden, run, first.stdout, exported)


def test_a_converted_checkpoint_has_its_logits(round_trip):
  model = workdir.read(str(round_trip.run))

  logits = model_logits(model, round_trip.golden.ids)

  chex.assert_trees_all_close(
    logits, round_trip.golden.logits, rtol=0, atol=1e-5
  )


def test_the_command_prints_the_flag_to_train_from_the_workdir(round_trip):
  assert f"--config.train.init_from={round_trip.run}" in round_trip.output


def test_exported_tensors_are_those_of_the_checkpoint(round_trip):
  exported = read_tensors(round_trip.exported)

  assert_same_tensors(exported, read_tensors(round_trip.golden.path))


def test_an_exported_file_names_its_format(round_trip):
  """transformers 4 refuses files without it."""
  path = round_trip.exported / "model.safetensors"
  with safetensors.safe_open(path, "numpy") as file:
    assert file.metadata() == {"format": "pt"}


def test_exported_files_have_equal_permissions(round_trip):
  modes = {path.stat().st_mode for path in round_trip.exported.iterdir()}

  assert len(modes) == 1


def test_the_exported_tokenizer_is_that_of_the_checkpoint(round_trip):
  exported = (round_trip.exported / "tokenizer.json").read_text()

  assert exported == (round_trip.golden.path / "tokenizer.json").read_text()


def test_the_exported_config_is_that_of_the_checkpoint(round_trip):
  expected = read_config(round_trip.golden.path)
  exported = read_config(round_trip.exported)

  # Fields without effect on the model's outputs.
  assert expected.keys() - exported.keys() == {
    "attention_dropout",
    "initializer_range",
    "lambda_std_dev",
    "pad_token_id",
    "transformers_version",
    "use_cache",
  }
  # The ids of the test's own tokenizer differ.
  from_tokenizer = {"bos_token_id", "eos_token_id"}
  for field in (expected.keys() & exported.keys()) - from_tokenizer:
    assert exported[field] == expected[field], field


# Types.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_exactly(dtype, tmp_path):
  source = copy_golden("diffllama_tiny", tmp_path / "source").path
  halves = cast(read_tensors(source), dtype)
  safetensors.numpy.save_file(halves, source / "model.safetensors")

  model = diffllama.read(str(source))

  for leaf in jax.tree.leaves(model.params):
    assert leaf.dtype == np.float32
  diffllama.write(str(tmp_path / "out"), model, "float32")
  written = cast(read_tensors(tmp_path / "out"), dtype)
  assert_same_tensors(written, halves)


def test_bfloat16_is_written_exactly(tmp_path):
  source = copy_golden("diffllama_tiny", tmp_path / "source").path
  halves = cast(read_tensors(source), ml_dtypes.bfloat16)
  safetensors.numpy.save_file(halves, source / "model.safetensors")
  model = diffllama.read(str(source))

  diffllama.write(str(tmp_path / "out"), model, "bfloat16")

  assert_same_tensors(read_tensors(tmp_path / "out"), halves)
  assert read_config(tmp_path / "out")["dtype"] == "bfloat16"


def test_folded_weights_are_rounded_once(tmp_path):
  """The gain of the head norm is multiplied with the weights in float32."""
  model = make_model("diff")

  diffllama.write(str(tmp_path / "exact"), model, "float32")
  diffllama.write(str(tmp_path / "rounded"), model, "bfloat16")

  expected = cast(read_tensors(tmp_path / "exact"), ml_dtypes.bfloat16)
  assert_same_tensors(read_tensors(tmp_path / "rounded"), expected)


# Models of diffjax.


@pytest.mark.parametrize(
  "fields",
  [
    pytest.param(
      {
        "num_kv_heads": 4,
        "tie_embeddings": False,
        "rope_scaling": "llama3",
        "rope_factor": 8.0,
        "rope_original_length": 16,
      },
      id="untied, scaled RoPE",
    ),
    pytest.param(
      {"num_kv_heads": 1, "norm_eps": 1e-3, "rope_base": 5e5},
      id="one key/value head",
    ),
  ],
)
def test_a_written_model_has_the_same_logits_when_it_is_read(fields, tmp_path):
  model = make_model("diff", **fields)
  ids = np.random.default_rng(0).integers(0, 128, (2, 32))
  expected = model_logits(model, ids)

  diffllama.write(str(tmp_path), model, "float32")

  read = diffllama.read(str(tmp_path))
  assert read.config == model.config
  # DiffLlama has no gain, so it is folded into the output projection.
  head_gain = read.params["layers"]["attention"]["head_gain"]
  chex.assert_trees_all_equal(head_gain, np.ones_like(head_gain))
  atol = 1e-5 * np.abs(expected).max()
  chex.assert_trees_all_close(
    model_logits(read, ids), expected, rtol=0, atol=atol
  )


def test_a_written_model_keeps_its_tokenizer(tmp_path):
  model = make_model("diff")

  diffllama.write(str(tmp_path), model, "float32")

  tokenizer = diffllama.read(str(tmp_path)).tokenizer
  assert model.tokenizer.separator == 255
  assert tokenizer.separator == 255
  assert tokenizer.encode("é 1") == model.tokenizer.encode("é 1")


def test_rope_scaling_by_1_is_no_scaling(tmp_path):
  model = make_model("diff")
  diffllama.write(str(tmp_path), model, "float32")
  scaling = {"type": "linear", "factor": 1.0}
  edit_config(tmp_path, {"rope_parameters": None, "rope_scaling": scaling})

  assert diffllama.read(str(tmp_path)).config == model.config


# Several files.

SHARD_BYTES = 20_000


@pytest.fixture
def sharded(tmp_path, monkeypatch):
  """Returns a directory with a model in one file, and in many files."""
  model = make_model("diff", tie_embeddings=False)
  diffllama.write(str(tmp_path / "one"), model, "float32")
  monkeypatch.setattr(directory, "SHARD_BYTES", SHARD_BYTES)
  diffllama.write(str(tmp_path / "many"), model, "float32")
  return tmp_path


def test_shards_have_the_names_of_transformers(sharded):
  names = [path.name for path in (sharded / "many").glob("*.safetensors")]

  count = len(names)
  assert count > 2
  expected = []
  for number in range(1, count + 1):
    expected.append(f"model-{number:05d}-of-{count:05d}.safetensors")
  assert sorted(names) == expected


def test_a_shard_is_only_larger_than_the_limit_if_its_one_tensor_is(sharded):
  for path in (sharded / "many").glob("*.safetensors"):
    sizes = []
    for tensor in safetensors.numpy.load_file(path).values():
      sizes.append(tensor.nbytes)
    assert len(sizes) == 1 or sum(sizes) <= SHARD_BYTES


def test_the_index_names_the_file_of_each_tensor(sharded):
  many = sharded / "many"
  index = json.loads((many / "model.safetensors.index.json").read_text())

  weight_map = {}
  total_size = 0
  for path in many.glob("*.safetensors"):
    for name, tensor in safetensors.numpy.load_file(path).items():
      weight_map[name] = path.name
      total_size += tensor.nbytes
  assert index["weight_map"] == weight_map
  assert index["metadata"]["total_size"] == total_size


def test_shards_have_the_tensors_of_a_single_file(sharded):
  assert_same_tensors(
    read_tensors(sharded / "many"), read_tensors(sharded / "one")
  )


def test_shards_are_read_like_a_single_file(sharded):
  many = diffllama.read(str(sharded / "many"))
  one = diffllama.read(str(sharded / "one"))

  chex.assert_trees_all_equal(many.params, one.params)


# Checkpoints of older versions of transformers.


def test_a_config_of_transformers_5_is_read(tmp_path):
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path

  config = diffllama.read(str(source)).config

  assert config.rope_base == 640_000.0
  assert config.tie_embeddings
  assert config.num_heads == 4
  assert config.num_kv_heads == 2
  assert config.head_dim == 8


def remove_fields(path: pathlib.Path, *fields: str) -> None:
  """Removes fields of the config.json in a directory."""
  config = read_config(path)
  for field in fields:
    config.pop(field, None)
  (path / "config.json").write_text(json.dumps(config))


def test_a_config_of_transformers_4_is_read(tmp_path):
  """Its RoPE base is a field of its own, and it has no head_dim."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  expected = diffllama.read(str(source)).config
  remove_fields(source, "rope_parameters")
  edit_config(
    source, {"rope_theta": 640_000, "rope_scaling": None, "head_dim": None}
  )

  assert diffllama.read(str(source)).config == expected


def test_missing_fields_have_the_defaults_of_transformers(tmp_path):
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  remove_fields(source, "rope_parameters", "tie_word_embeddings")
  edit_config(source, {"num_key_value_heads": None})
  # By default, each head has its own keys and values, and nothing is tied.
  tensors = read_tensors(source)
  for name, tensor in tensors.items():
    if name.endswith(("k_proj.weight", "v_proj.weight")):
      tensors[name] = np.concatenate([tensor, tensor])
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  safetensors.numpy.save_file(tensors, source / "model.safetensors")

  config = diffllama.read(str(source)).config

  assert config.rope_base == 10_000.0
  assert not config.tie_embeddings
  assert config.num_kv_heads == 4


@pytest.mark.parametrize(
  "name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
)
def test_redundant_tensors_of_old_checkpoints_are_ignored(name, tmp_path):
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  expected = diffllama.read(str(source)).params
  tensors = read_tensors(source)
  redundant = {
    "lm_head.weight": tensors["model.embed_tokens.weight"],
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
  }
  tensors[name] = redundant[name]
  safetensors.numpy.save_file(tensors, source / "model.safetensors")

  chex.assert_trees_all_equal(diffllama.read(str(source)).params, expected)
