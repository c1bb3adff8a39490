"""Workdirs written from parameters alone, and every tokenizer written and read again."""

import dataclasses

import jax
import numpy as np
import pytest
from etils import epath

from diffjax.config import Config, DataConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.inference import trained
from diffjax.interop import diffllama, workdir
from diffjax.training import manifest
from diffjax.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
  path = train_tokenizer(
    ["it's a test of 123 words\n\n  "] * 9,
    270,
    tmp_path_factory.mktemp("tokenizer"),
  )
  return {
    "bytes": "bytes",
    "tiktoken": str(path),
    "json": str(path.parent / "tokenizer.json"),
  }


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "json"])
def test_there_and_back(make_model, tokenizers, kind, tmp_path):
  """A workdir keeps tokenizer and parameters; a written directory has a tokenizer.json of the same ids, and is read again."""
  model = make_model("diff", tokenizer=tokenizers[kind])
  written = workdir.write(str(tmp_path / "run"), model)
  manifest.verify(epath.Path(tmp_path / "run/checkpoints/0"), 0)
  assert written.data.tokenizer == (
    "bytes" if kind == "bytes" else str(tmp_path / f"run/tokenizer.{kind}")
  )
  loaded = trained.load(tmp_path / "run")
  assert (
    loaded.config == written
    and loaded.tokenizer.fingerprint == model.tokenizer.fingerprint
  )
  jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)

  diffllama.write(
    str(tmp_path / "out"), workdir.read(str(tmp_path / "run")), "float32"
  )
  workdir.write(str(tmp_path / "again"), diffllama.read(str(tmp_path / "out")))
  again = trained.load(tmp_path / "again")
  assert again.config.model == model.config
  assert (again.tokenizer.vocab_size, again.tokenizer.separator) == (
    model.tokenizer.vocab_size,
    model.tokenizer.separator,
  )
  for text in ("it's 1234 é\n\n ", "", "<|endoftext|>"):
    original = load_tokenizer(tokenizers[kind])
    assert again.tokenizer.encode(text) == original.encode(text)


@pytest.mark.parametrize("in_pieces", [True, False])
def test_a_workdir_is_read_into_files_piece_by_piece(
  make_model, in_pieces, monkeypatch, tmp_path
):
  """What was converted, in pieces of which no axis is a multiple, and what was trained, in Orbax's other format."""
  monkeypatch.setattr("diffjax.training.checkpoint._CHUNK_BYTES", 999)
  model = make_model("diff", num_layers=3)
  config = Config(model=model.config, data=DataConfig(length=16))
  with Checkpoints(str(tmp_path), keep=1) as checkpoints:
    params = (
      model.params
      if in_pieces
      else jax.tree.map(jax.numpy.asarray, model.params)
    )
    checkpoints.save(
      0,
      {"params": params, "step": np.zeros((), np.int32)},
      data_state={},
      config=config.to_dict(),
      in_pieces=in_pieces,
    )
    checkpoints.wait()
  assert (
    tmp_path / "checkpoints/0/state/manifest.ocdbt"
  ).exists() is not in_pieces
  monkeypatch.setattr("diffjax.interop.layout._MIN_FILE_BYTES", 1)
  read = workdir.read(str(tmp_path))
  assert read.config == model.config
  jax.tree.map(np.testing.assert_array_equal, read.params, model.params)
  assert all(
    isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(read.params)
  )


def test_a_path_with_special_characters_is_that_path(make_model, tmp_path):
  """Also if there is a workdir of the path that a URL would decode it to."""
  models = {}
  names = ["lr 1", "lr%201", "a#b", "a", "a?b", "a|b", "é]{x}@2", "100%"]
  for seed, name in enumerate(names):
    model = make_model("diff", num_layers=1, embed_dim=8, ffn_dim=8)
    params = jax.tree.map(lambda leaf, seed=seed: leaf + seed, model.params)
    models[name] = dataclasses.replace(model, params=params)
    # Both of Orbax's formats.
    workdir.write(str(tmp_path / "pieces" / name), models[name])
    with Checkpoints(tmp_path / "whole" / name, keep=1) as checkpoints:
      config = Config(model=model.config, data=DataConfig(length=16))
      checkpoints.save(
        0,
        {"params": jax.tree.map(jax.numpy.asarray, params)},
        data_state={},
        config=config.to_dict(),
      )
  for name in names:
    for folder in ("pieces", "whole"):
      read = workdir.read(str(tmp_path / folder / name))
      jax.tree.map(
        np.testing.assert_array_equal, read.params, models[name].params
      )
  loaded = trained.load(tmp_path / "pieces" / "lr%201")
  jax.tree.map(
    np.testing.assert_array_equal, loaded.params, models["lr%201"].params
  )


def test_a_model_that_diverged_is_refused(make_model, tmp_path):
  model = make_model("diff")
  model.params["layers"]["ffn"]["up"][1, 2, 3] = np.nan
  workdir.write(str(tmp_path / "run"), model)
  with pytest.raises(
    UserError,
    match="parameters that are not finite: layers/ffn/up: it has diverged",
  ):
    workdir.read(str(tmp_path / "run"))


def test_a_workdir_that_is_moved_takes_its_tokenizer_along(
  make_model, tokenizers, tmp_path
):
  model = make_model("diff", tokenizer=tokenizers["json"])
  workdir.write(str(tmp_path / "run"), model)
  moved = (tmp_path / "run").rename(tmp_path / "moved")
  assert (
    trained.load(moved).tokenizer.fingerprint == model.tokenizer.fingerprint
  )


def test_rows_are_no_longer_than_the_model_takes(make_model, tmp_path):
  assert (
    workdir.write(
      str(tmp_path / "short"), make_model("diff_v2", max_length=32)
    ).data.length
    == 32
  )
  model = make_model("diff")
  long = dataclasses.replace(
    model, config=dataclasses.replace(model.config, max_length=131_072)
  )
  assert workdir.write(str(tmp_path / "long"), long).data.length == 2048
