"""Workdirs written from parameters alone, and every tokenizer written and read again."""

import dataclasses

import jax
import numpy as np
import pytest
from etils import epath

from diffjax.data.tokenizer import load_tokenizer
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.interop import diffllama, workdir
from diffjax.training import manifest, trained


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
  path = train_tokenizer(["it's a test of 123 words\n\n  "] * 9, 270, tmp_path_factory.mktemp("tokenizer"))
  return {"bytes": "bytes", "tiktoken": str(path), "json": str(path.parent / "tokenizer.json")}


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "json"])
def test_there_and_back(make_model, tokenizers, kind, tmp_path):
  """A workdir keeps tokenizer and parameters; a written directory has a tokenizer.json of the same ids, and is read again."""
  model = make_model("diff", tokenizer=tokenizers[kind])
  written = workdir.write(str(tmp_path / "run"), model)
  manifest.verify(epath.Path(tmp_path / "run/checkpoints/0"), 0)
  assert written.data.tokenizer == ("bytes" if kind == "bytes" else str(tmp_path / f"run/tokenizer.{kind}"))
  loaded = trained.load(tmp_path / "run")
  assert loaded.config == written and loaded.tokenizer.fingerprint == model.tokenizer.fingerprint
  jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)

  diffllama.write(str(tmp_path / "out"), workdir.read(str(tmp_path / "run")), "float32")
  workdir.write(str(tmp_path / "again"), diffllama.read(str(tmp_path / "out")))
  again = trained.load(tmp_path / "again")
  assert again.config.model == model.config
  assert (again.tokenizer.vocab_size, again.tokenizer.separator) == (model.tokenizer.vocab_size, model.tokenizer.separator)
  for text in ("it's 1234 é\n\n ", "", "<|endoftext|>"):
    assert list(again.tokenizer.encode(text)) == list(load_tokenizer(tokenizers[kind]).encode(text))


def test_a_workdir_that_is_moved_takes_its_tokenizer_along(make_model, tokenizers, tmp_path):
  model = make_model("diff", tokenizer=tokenizers["json"])
  workdir.write(str(tmp_path / "run"), model)
  moved = (tmp_path / "run").rename(tmp_path / "moved")
  assert trained.load(moved).tokenizer.fingerprint == model.tokenizer.fingerprint


def test_rows_are_no_longer_than_the_model_takes(make_model, tmp_path):
  assert workdir.write(str(tmp_path / "short"), make_model("diff_v2", max_length=32)).data.length == 32
  model = make_model("diff")
  long = dataclasses.replace(model, config=dataclasses.replace(model.config, max_length=131_072))
  assert workdir.write(str(tmp_path / "long"), long).data.length == 2048
