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
  """Converts a golden checkpoint to a workdir, and that back to a DiffLlama."""
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
  """Hugging Face's DiffLlama has computed the expected logits, in float64."""
  model = workdir.read(str(round_trip.run))

  logits = model_logits(model, round_trip.golden.ids)

  expected = round_trip.golden.logits
  chex.assert_trees_all_close(logits, expected, rtol=0, atol=1e-5)


def test_the_command_prints_the_flag_that_starts_training(round_trip):
  assert f"--config.train.init_from={round_trip.run}" in round_trip.output


def test_exported_tensors_are_those_of_the_checkpoint(round_trip):
  exported = read_tensors(round_trip.exported)

  assert_same_tensors(exported, read_tensors(round_trip.golden.path))


def test_an_exported_safetensors_file_names_its_format(round_trip):
  """transformers 4 refuses files without the metadata "format"."""
  path = round_trip.exported / "model.safetensors"
  with safetensors.safe_open(path, "numpy") as file:
    assert file.metadata() == {"format": "pt"}


def test_exported_files_have_equal_permissions(round_trip):
  """Files that are written as temporary ones could be private."""
  modes = {path.stat().st_mode for path in round_trip.exported.iterdir()}

  assert len(modes) == 1


def test_the_exported_tokenizer_is_that_of_the_checkpoint(round_trip):
  exported = (round_trip.exported / "tokenizer.json").read_text()

  assert exported == (round_trip.golden.path / "tokenizer.json").read_text()


def test_the_exported_config_is_that_of_the_checkpoint(round_trip):
  expected = read_config(round_trip.golden.path)
  exported = read_config(round_trip.exported)

  # These fields have no effect on the outputs. They are not exported.
  assert expected.keys() - exported.keys() == {
    "attention_dropout",
    "initializer_range",
    "lambda_std_dev",
    "pad_token_id",
    "transformers_version",
    "use_cache",
  }
  for field in expected.keys() & exported.keys():
    # The test has another tokenizer, so these ids are others.
    if field not in ("bos_token_id", "eos_token_id"):
      assert exported[field] == expected[field], field


# Types.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_exactly(dtype, tmp_path):
  """float32 has every number of bfloat16 and float16."""
  source = copy_golden("diffllama_tiny", tmp_path / "source").path
  half_tensors = cast(read_tensors(source), dtype)
  safetensors.numpy.save_file(half_tensors, source / "model.safetensors")

  model = diffllama.read(str(source))

  for leaf in jax.tree.leaves(model.params):
    assert leaf.dtype == np.float32
  diffllama.write(str(tmp_path / "out"), model, "float32")
  written = read_tensors(tmp_path / "out")
  assert_same_tensors(cast(written, dtype), half_tensors)


def test_bfloat16_is_written_exactly(tmp_path):
  """A checkpoint in bfloat16 is read into float32, and written as it was."""
  source = copy_golden("diffllama_tiny", tmp_path / "source").path
  half_tensors = cast(read_tensors(source), ml_dtypes.bfloat16)
  safetensors.numpy.save_file(half_tensors, source / "model.safetensors")
  model = diffllama.read(str(source))

  diffllama.write(str(tmp_path / "out"), model, "bfloat16")

  assert_same_tensors(read_tensors(tmp_path / "out"), half_tensors)
  assert read_config(tmp_path / "out")["dtype"] == "bfloat16"


def test_weights_are_multiplied_with_the_head_gain_before_rounding(tmp_path):
  """DiffLlama has no head gain, so the output projection contains it.

  The product is computed in float32, and rounded once.
  """
  model = make_model("diff")

  diffllama.write(str(tmp_path / "float32"), model, "float32")
  diffllama.write(str(tmp_path / "bfloat16"), model, "bfloat16")

  exact = read_tensors(tmp_path / "float32")
  rounded = read_tensors(tmp_path / "bfloat16")
  assert_same_tensors(rounded, cast(exact, ml_dtypes.bfloat16))


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
  token_ids = np.random.default_rng(0).integers(0, 128, size=(2, 32))
  expected = model_logits(model, token_ids)

  diffllama.write(str(tmp_path), model, "float32")

  read = diffllama.read(str(tmp_path))
  assert read.config == model.config
  # DiffLlama has no head gain. The output projection was multiplied with it.
  head_gain = read.params["layers"]["attention"]["head_gain"]
  chex.assert_trees_all_equal(head_gain, np.ones_like(head_gain))
  logits = model_logits(read, token_ids)
  atol = 1e-5 * np.abs(expected).max()
  chex.assert_trees_all_close(logits, expected, rtol=0, atol=atol)


def test_a_written_model_keeps_its_tokenizer(tmp_path):
  model = make_model("diff")

  diffllama.write(str(tmp_path), model, "float32")

  tokenizer = diffllama.read(str(tmp_path)).tokenizer
  # Each byte is a token. Byte 255 occurs in no UTF-8 text, and separates
  # documents.
  assert model.tokenizer.separator == 255
  assert tokenizer.separator == 255
  assert tokenizer.encode("é 1") == model.tokenizer.encode("é 1")


def test_rope_scaling_by_a_factor_of_1_is_read_as_no_scaling(tmp_path):
  model = make_model("diff")
  diffllama.write(str(tmp_path), model, "float32")
  scaling = {"type": "linear", "factor": 1.0}
  edit_config(tmp_path, {"rope_parameters": None, "rope_scaling": scaling})

  config = diffllama.read(str(tmp_path)).config

  assert config == model.config


# Several files.

SHARD_BYTES = 20_000


class WrittenTwice(NamedTuple):
  """The directories of a model that was written in one file, and in many."""

  one_file: pathlib.Path
  many_files: pathlib.Path


@pytest.fixture
def written(tmp_path, monkeypatch):
  """Writes a model in one file, and in files of at most SHARD_BYTES."""
  model = make_model("diff", tie_embeddings=False)
  directories = WrittenTwice(tmp_path / "one_file", tmp_path / "many_files")
  diffllama.write(str(directories.one_file), model, "float32")
  monkeypatch.setattr(directory, "SHARD_BYTES", SHARD_BYTES)
  diffllama.write(str(directories.many_files), model, "float32")
  return directories


def test_files_of_a_model_have_the_names_that_transformers_expects(written):
  paths = written.many_files.glob("*.safetensors")
  names = sorted(path.name for path in paths)

  count = len(names)
  assert count > 2
  # For example model-00001-of-00003.safetensors.
  for number, name in enumerate(names, start=1):
    assert name == f"model-{number:05d}-of-{count:05d}.safetensors"


def test_a_file_exceeds_the_limit_only_if_it_has_a_single_tensor(written):
  for path in written.many_files.glob("*.safetensors"):
    tensors = safetensors.numpy.load_file(path)
    if len(tensors) > 1:
      num_bytes = sum(tensor.nbytes for tensor in tensors.values())
      assert num_bytes <= SHARD_BYTES


def test_the_index_names_the_file_of_each_tensor(written):
  index_path = written.many_files / "model.safetensors.index.json"
  index = json.loads(index_path.read_text())

  file_of_tensor = {}
  num_bytes = 0
  for path in written.many_files.glob("*.safetensors"):
    for name, tensor in safetensors.numpy.load_file(path).items():
      file_of_tensor[name] = path.name
      num_bytes += tensor.nbytes
  assert index["weight_map"] == file_of_tensor
  assert index["metadata"]["total_size"] == num_bytes


def test_many_files_have_the_tensors_of_a_single_file(written):
  many = read_tensors(written.many_files)
  single = read_tensors(written.one_file)

  assert_same_tensors(many, single)


def test_many_files_are_read_like_a_single_file(written):
  many = diffllama.read(str(written.many_files))
  single = diffllama.read(str(written.one_file))

  chex.assert_trees_all_equal(many.params, single.params)


# Checkpoints of older versions of transformers.


def test_a_config_of_transformers_5_is_read(tmp_path):
  """The golden checkpoint was written by version 5."""
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


def test_a_config_of_transformers_4_is_read_like_one_of_5(tmp_path):
  """In version 4, the base of RoPE is a field, and head_dim may be missing."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  expected = diffllama.read(str(source)).config
  remove_fields(source, "rope_parameters")
  edit_config(
    source, {"rope_theta": 640_000, "rope_scaling": None, "head_dim": None}
  )

  config = diffllama.read(str(source)).config

  assert config == expected


def test_a_missing_rope_base_is_10_000(tmp_path):
  """transformers has the same default."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  remove_fields(source, "rope_parameters")

  config = diffllama.read(str(source)).config

  assert config.rope_base == 10_000.0


def test_embeddings_are_not_tied_by_default(tmp_path):
  """The checkpoint then has an output projection."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  remove_fields(source, "tie_word_embeddings")
  tensors = read_tensors(source)
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  safetensors.numpy.save_file(tensors, source / "model.safetensors")

  config = diffllama.read(str(source)).config

  assert not config.tie_embeddings


def test_each_head_has_its_own_keys_and_values_by_default(tmp_path):
  """The golden checkpoint has 4 heads, and 2 of keys and values."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  edit_config(source, {"num_key_value_heads": None})
  # The projections get the rows of two more heads.
  tensors = read_tensors(source)
  for name, tensor in tensors.items():
    if name.endswith(("k_proj.weight", "v_proj.weight")):
      tensors[name] = np.concatenate([tensor, tensor])
  safetensors.numpy.save_file(tensors, source / "model.safetensors")

  config = diffllama.read(str(source)).config

  assert config.num_kv_heads == 4


def test_an_output_projection_that_equals_the_embedding_is_ignored(tmp_path):
  """Old checkpoints of tied models have both."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  expected = diffllama.read(str(source)).params
  tensors = read_tensors(source)
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  safetensors.numpy.save_file(tensors, source / "model.safetensors")

  params = diffllama.read(str(source)).params

  chex.assert_trees_all_equal(params, expected)


def test_frequencies_of_rope_in_a_checkpoint_are_ignored(tmp_path):
  """Old checkpoints have them, although the config determines them."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  expected = diffllama.read(str(source)).params
  tensors = read_tensors(source)
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  tensors[name] = np.ones(4, np.float32)
  safetensors.numpy.save_file(tensors, source / "model.safetensors")

  params = diffllama.read(str(source)).params

  chex.assert_trees_all_equal(params, expected)
