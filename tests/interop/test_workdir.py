"""Workdirs are written from parameters alone, with any tokenizer."""

import dataclasses
import pathlib

import chex
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from diffjax.config import Config, DataConfig, UserError
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.inference import trained
from diffjax.interop import diffllama, layout, workdir
from diffjax.interop.layout import Model
from diffjax.training import checkpoint
from diffjax.training.checkpoint import Checkpoints
from tests.interop.small_models import make_model


def save_run(path: pathlib.Path, model: Model, *, in_pieces: bool) -> None:
  """Saves a checkpoint as a run does, or in pieces as `workdir.write` does."""
  config = Config(model=model.config, data=DataConfig(length=16))
  params = model.params
  if not in_pieces:
    params = jax.device_put(params)
  with Checkpoints(str(path), keep=1) as checkpoints:
    checkpoints.save(
      0,
      {"params": params, "step": np.zeros((), np.int32)},
      data_state={},
      config=config.to_dict(),
      in_pieces=in_pieces,
    )
    checkpoints.wait()


# Tokenizers.


@pytest.fixture(scope="module")
def tokenizer_specs(tmp_path_factory):
  """Returns a tokenizer of each kind, as config.data.tokenizer names it."""
  directory = tmp_path_factory.mktemp("tokenizer")
  documents = ["it's a test of 123 words\n\n  "] * 9
  path = train_tokenizer(documents, 270, directory)
  return {
    "bytes": "bytes",
    "tiktoken": str(path),
    "json": str(path.parent / "tokenizer.json"),
  }


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "json"])
def test_a_written_workdir_has_the_model_and_its_tokenizer(
  tokenizer_specs, kind, tmp_path
):
  """A converted model is loaded like one that was trained in this workdir."""
  model = make_model("diff", tokenizer=tokenizer_specs[kind], num_layers=1)

  config = workdir.write(str(tmp_path), model)

  # This raises an error if a file of the checkpoint is missing or damaged.
  loaded = trained.load(tmp_path)
  assert loaded.config == config
  assert loaded.tokenizer.fingerprint == model.tokenizer.fingerprint
  chex.assert_trees_all_equal(loaded.params, model.params)


@pytest.mark.parametrize(
  ("kind", "expected"),
  [
    ("bytes", "bytes"),
    ("tiktoken", "{workdir}/tokenizer.tiktoken"),
    ("json", "{workdir}/tokenizer.json"),
  ],
)
def test_a_written_config_names_the_tokenizer(
  tokenizer_specs, kind, expected, tmp_path
):
  """The tokenizer's file is copied to the workdir. Bytes need no file."""
  model = make_model("diff", tokenizer=tokenizer_specs[kind], num_layers=1)

  config = workdir.write(str(tmp_path), model)

  assert config.data.tokenizer == expected.format(workdir=tmp_path)


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "json"])
def test_an_export_and_its_import_keep_config_and_tokens(
  tokenizer_specs, kind, tmp_path
):
  """An exported DiffLlama has a tokenizer.json for each kind of tokenizer."""
  model = make_model("diff", tokenizer=tokenizer_specs[kind], num_layers=1)
  diffllama.write(str(tmp_path / "exported"), model, "float32")

  imported = diffllama.read(str(tmp_path / "exported"))
  workdir.write(str(tmp_path / "run"), imported)

  loaded = trained.load(tmp_path / "run")
  assert loaded.config.model == model.config
  assert loaded.tokenizer.vocab_size == model.tokenizer.vocab_size
  assert loaded.tokenizer.separator == model.tokenizer.separator
  for text in ("it's 1234 é\n\n ", "", "<|endoftext|>"):
    expected = model.tokenizer.encode(text)
    assert loaded.tokenizer.encode(text) == expected


def test_a_moved_workdir_keeps_its_tokenizer(tokenizer_specs, tmp_path):
  """The config names the tokenizer by its old path, which exists no longer."""
  model = make_model("diff", tokenizer=tokenizer_specs["json"], num_layers=1)
  workdir.write(str(tmp_path / "run"), model)

  moved = (tmp_path / "run").rename(tmp_path / "moved")

  loaded = trained.load(moved)
  assert loaded.tokenizer.fingerprint == model.tokenizer.fingerprint


# Parameters.


@pytest.mark.parametrize(
  ("in_pieces", "has_ocdbt"),
  [
    pytest.param(True, False, id="converted"),
    pytest.param(False, True, id="trained"),
  ],
)
def test_large_parameters_are_read_into_files(
  in_pieces, has_ocdbt, monkeypatch, tmp_path
):
  """A model may be larger than the memory.

  Training saves in Orbax's format OCDBT, which has a manifest. Conversions save
  large parameters in pieces, in another format.
  """
  # The chunks of 999 bytes do not divide any array evenly.
  monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 999)
  # Every parameter is large enough for a file.
  monkeypatch.setattr(layout, "MIN_FILE_BYTES", 1)
  model = make_model("diff", num_layers=3)
  save_run(tmp_path, model, in_pieces=in_pieces)
  ocdbt_manifest = tmp_path / "checkpoints/0/state/manifest.ocdbt"
  assert ocdbt_manifest.exists() == has_ocdbt

  read = workdir.read(str(tmp_path))

  assert read.config == model.config
  chex.assert_trees_all_equal(read.params, model.params)
  for leaf in jax.tree.leaves(read.params):
    assert isinstance(leaf, np.memmap)


def test_a_model_with_a_parameter_that_is_nan_is_rejected(tmp_path):
  """A single NaN makes all outputs NaN."""
  model = make_model("diff")
  up_projection = model.params["layers"]["ffn"]["up"]
  up_projection[1, 2, 3] = np.nan
  workdir.write(str(tmp_path / "run"), model)

  message = "parameters that are not finite: layers/ffn/up: it has diverged"
  with pytest.raises(UserError, match=message):
    workdir.read(str(tmp_path / "run"))


# Paths.

# Orbax could decode such a path as a URL, or cut it at a special character. The
# result would be another path of the list.
SPECIAL_NAMES = ["lr 1", "lr%201", "a#b", "a", "a?b", "é]{x}@2|100%"]


def make_small_models() -> dict[str, Model]:
  """Returns a different model for each of SPECIAL_NAMES."""
  model = make_model("softmax", num_layers=1, embed_dim=8, ffn_dim=8)
  models = {}
  for number, name in enumerate(SPECIAL_NAMES):
    params = {}
    for path, leaf in flatten_dict(model.params).items():
      params[path] = leaf + np.float32(number)
    models[name] = dataclasses.replace(model, params=unflatten_dict(params))
  return models


def test_converted_workdirs_with_special_characters_in_their_paths_are_read(
  tmp_path,
):
  """Names such as "a", "a#b" and "a?b" must not be the same path."""
  models = make_small_models()
  for name, model in models.items():
    workdir.write(str(tmp_path / name), model)

  for name, model in models.items():
    read = workdir.read(str(tmp_path / name))
    chex.assert_trees_all_equal(read.params, model.params)
  loaded = trained.load(tmp_path / "lr%201")
  chex.assert_trees_all_equal(loaded.params, models["lr%201"].params)


def test_runs_with_special_characters_in_their_paths_are_read(tmp_path):
  """Names such as "a", "a#b" and "a?b" must not be the same path."""
  models = make_small_models()
  for name, model in models.items():
    save_run(tmp_path / name, model, in_pieces=False)

  for name, model in models.items():
    read = workdir.read(str(tmp_path / name))
    chex.assert_trees_all_equal(read.params, model.params)


# The config.


@pytest.mark.parametrize(
  ("max_length", "expected"), [(32, 32), (131_072, 2048)]
)
def test_training_rows_have_the_length_of_the_model_but_at_most_2048(
  max_length, expected, tmp_path
):
  """Further training with rows of 131,072 tokens would need much memory."""
  model = make_model("diff_v2", num_layers=1)
  config = dataclasses.replace(model.config, max_length=max_length)
  model = dataclasses.replace(model, config=config)

  written = workdir.write(str(tmp_path / "run"), model)

  assert written.data.length == expected
