"""A missing tokenizer of a workdir is an error that says where to put it."""

import pytest

from diffjax.config import Config, DataConfig, UserError
from diffjax.training.workdir_tokenizer import load_workdir_tokenizer


def test_the_copy_of_a_tokenizer_from_the_hub_must_exist(tmp_path):
  """A run copies its tokenizer into its workdir, which has none here.

  The error does not claim that the file on the Hub is missing.
  """
  spec = "hf://owner/model/tokenizer.json"
  config = Config(data=DataConfig(tokenizer=spec))

  with pytest.raises(UserError) as error:
    load_workdir_tokenizer(tmp_path, config)

  assert str(error.value) == (
    "there is no tokenizer beside the checkpoint:"
    f" {tmp_path / 'tokenizer.json'} does not exist; put the tokenizer used in"
    f" training, {spec}, there"
  )


def test_a_local_tokenizer_or_its_copy_must_exist(tmp_path):
  """Neither the tokenizer of the config nor a copy in the workdir exists."""
  spec = str(tmp_path / "original.json")
  config = Config(data=DataConfig(tokenizer=spec))

  with pytest.raises(UserError, match="neither .* nor .*, exists"):
    load_workdir_tokenizer(tmp_path / "run", config)
