"""Batches do not depend on the number of readers, or on restarts.

Every epoch has every row once.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import chex
import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from absl import flags

from diffjax.config import Config, DataConfig, TrainConfig, UserError
from diffjax.data import (
  files,
  fingerprint,
  pipeline,
  prepared,
  prepared_batches,
  sources,
  streamed_batches,
)
from diffjax.data.batches import FULL_SHARE, BatchShare
from diffjax.data.reader import Reader, prefetch
from diffjax.data.row import HostBatch


def take(batches, count) -> list[HostBatch]:
  """Returns the next batches."""
  return [next(batches) for _ in range(count)]


def stored_state(batches) -> dict[str, Any]:
  """Returns the state of batches as a checkpoint stores it, in JSON."""
  return json.loads(json.dumps(batches.get_state()))


def open_share(config, index, count):
  """Returns the training batches of a process that reads a share."""
  share = BatchShare(index=index, count=count)
  return pipeline.training_batches(config, share=share, num_processes=count)


def join_shares(batches_of_shares) -> list[HostBatch]:
  """Returns the global batches that the batches of all shares form."""
  global_batches = []
  for parts in zip(*batches_of_shares, strict=True):
    batch = {}
    for name in parts[0]:
      batch[name] = np.concatenate([part[name] for part in parts])
    global_batches.append(batch)
  return global_batches


def row_contents(batches) -> list[bytes]:
  """Returns the tokens of each row, the last target included."""
  contents = []
  for batch in batches:
    last_targets = batch["targets"][:, -1:]
    rows = np.concatenate([batch["tokens"], last_targets], axis=1)
    contents.extend(row.tobytes() for row in rows)
  return contents


def write_jsonl(path, texts) -> str:
  """Writes documents as a JSONL file, and returns its source."""
  lines = [json.dumps({"text": text}) + "\n" for text in texts]
  path.write_text("".join(lines))
  return f"jsonl:{path}"


def numbered_texts(prefix, count) -> list[str]:
  """Returns the documents "PREFIX0", "PREFIX1", …"""
  return [f"{prefix}{index}" for index in range(count)]


def prepare_and_count_rows(data: DataConfig) -> int:
  """Prepares the rows of a source, and returns how many are for training."""
  (target,) = prepared.prepare(data, workers=1)
  return len(prepared.PreparedRows(target, "train"))


@pytest.fixture
def num_rows(make_config) -> int:
  """Returns the number of training rows, and prepares them."""
  return prepare_and_count_rows(make_config().data)


# Prepared batches.


@pytest.mark.parametrize(
  ("num_workers", "num_workers_after"),
  [
    pytest.param(2, 0, id="fewer"),
    pytest.param(0, 3, id="more", marks=pytest.mark.full),
  ],
)
def test_a_run_continues_with_another_number_of_workers(
  make_config, num_workers, num_workers_after
):
  """A stored position is the number of batches, whichever process read them."""
  expected = take(pipeline.training_batches(make_config()), 12)

  # The run reads 7 of 12 batches, and then stops.
  batches = pipeline.training_batches(make_config(num_workers=num_workers))
  chex.assert_trees_all_equal(take(batches, 7), expected[:7])
  state = stored_state(batches)
  batches.close()

  # It continues with the other 5 batches.
  config = make_config(num_workers=num_workers_after)
  restarted = pipeline.training_batches(config)
  restarted.set_state(state)
  chex.assert_trees_all_equal(take(restarted, 5), expected[7:])
  restarted.close()


@pytest.mark.parametrize("num_processes", [2, 4])
def test_all_processes_together_read_the_global_batches(
  make_config, num_processes
):
  """Each process reads its share, a block of the rows of every batch."""
  config = make_config()
  prepared.prepare(config.data, workers=1)
  expected = take(pipeline.training_batches(config), 10)

  batches_of_shares = []
  for index in range(num_processes):
    share = open_share(config, index=index, count=num_processes)
    batches_of_shares.append(take(share, 10))

  chex.assert_trees_all_equal(join_shares(batches_of_shares), expected)


def test_a_run_can_restart_at_every_step(make_config, texts, tmp_path):
  """A state taken before a step gives the batches of this and later steps."""
  source = write_jsonl(tmp_path / "few.jsonl", texts[:60])
  batch_size = 8
  config = make_config(source=source, batch_size=batch_size)
  batches_per_epoch = prepare_and_count_rows(config.data) // batch_size
  # Two epochs, and the start of a third.
  num_batches = 2 * batches_per_epoch + 5
  expected = take(pipeline.training_batches(config), num_batches)

  batches = pipeline.training_batches(config)
  for step in range(num_batches - 1):
    state = stored_state(batches)
    # The batches that the reader has read ahead do not count.
    assert state["batch"] == step

    restarted = pipeline.training_batches(config)
    restarted.set_state(state)
    chex.assert_trees_all_equal(next(restarted), expected[step])
    chex.assert_trees_all_equal(next(restarted), expected[step + 1])

    chex.assert_trees_all_equal(next(batches), expected[step])


def test_batches_can_go_back_to_an_earlier_state(make_config):
  """A state can be set on batches that have been read further."""
  batches = pipeline.training_batches(make_config())
  state_at_start = batches.get_state()
  first_batches = take(batches, 5)

  batches.set_state(state_at_start)

  chex.assert_trees_all_equal(take(batches, 5), first_batches)


def test_every_epoch_has_every_row_once_in_another_order(make_config, num_rows):
  """Each epoch of training reads all prepared rows, in a new order.

  `num_rows` is the number of prepared rows.
  """
  # With few rows, two epochs could have the same order by chance.
  assert num_rows > 100
  # One row in a batch, so an epoch has num_rows batches.
  batches = pipeline.training_batches(make_config(batch_size=1))

  epochs = []
  for _ in range(3):
    epochs.append(row_contents(take(batches, num_rows)))

  assert len(set(epochs[0])) == num_rows
  assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
  assert epochs[0] != epochs[1]
  assert epochs[1] != epochs[2]
  assert epochs[2] != epochs[0]


def test_the_seed_determines_the_order_of_the_rows(make_config, num_rows):
  """The first epoch, of `num_rows` rows, has the same rows for each seed."""
  batches = pipeline.training_batches(make_config(batch_size=1, seed=0))
  other_batches = pipeline.training_batches(make_config(batch_size=1, seed=1))

  order = row_contents(take(batches, num_rows))
  other_order = row_contents(take(other_batches, num_rows))

  assert order != other_order
  assert sorted(order) == sorted(other_order)


def test_a_batch_consists_of_five_arrays(make_config):
  config = make_config(batch_size=8, length=64)

  batch = next(pipeline.training_batches(config))

  dtypes = {name: array.dtype.name for name, array in batch.items()}
  assert dtypes == {
    "tokens": "int32",
    "targets": "int32",
    "segment_ids": "int32",
    "positions": "int32",
    "weights": "float32",
  }
  for array in batch.values():
    assert type(array) is np.ndarray
    chex.assert_shape(array, (8, 64))


def test_targets_are_the_next_tokens(make_config):
  batch = next(pipeline.training_batches(make_config()))

  chex.assert_trees_all_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_rows_hold_several_documents_between_separators(make_config):
  batches = take(pipeline.training_batches(make_config()), 50)

  # Tokens are bytes. Texts are UTF-8, which never has the byte 255.
  separator = 255
  assert batches[0]["tokens"].max() == separator
  # Segments are numbered from 1 in each row.
  most_segments = max(batch["segment_ids"].max() for batch in batches)
  assert most_segments > 1


@pytest.mark.parametrize(
  ("change", "message"),
  [
    pytest.param({"seed": 1}, "config.data.seed was 0 and is 1", id="seed"),
    pytest.param({"batch_size": 4}, "config.train.batch_size", id="batch size"),
    pytest.param(
      {"length": 32},
      "config.data.length was 64 and is 32; set the fields back",
      id="length",
    ),
    pytest.param({"mode": "streamed"}, "config.data.mode", id="mode"),
  ],
)
def test_a_state_of_other_fields_is_refused(make_config, change, message):
  """The same number of batches would be another position in the rows."""
  config = make_config(seed=0, batch_size=8, length=64)
  state = pipeline.training_batches(config).get_state()
  batches = pipeline.training_batches(make_config(**change))

  with pytest.raises(UserError, match=message):
    batches.set_state(state)


# Text that has changed since a checkpoint.


class EarlierRun(NamedTuple):
  """A run that stopped after step 2, before the text was changed."""

  state_after_step_2: dict[str, Any]
  batches_of_steps_3_and_4: list[HostBatch]
  rows_dir: str


@pytest.fixture
def run_before_text_change(make_config, jsonl) -> EarlierRun:
  """Reads two batches and stores the state, and then changes the text."""
  batches = pipeline.training_batches(make_config())
  take(batches, 2)
  state = stored_state(batches)
  next_batches = take(batches, 2)
  (target,) = prepared.targets(make_config().data)

  jsonl.write_text(jsonl.read_text().replace("document", "Document", 1))
  # The new text has the same size, so only its time or content can tell.
  os.utime(jsonl, (1, 1))
  return EarlierRun(state, next_batches, target.directory)


def test_changed_text_is_distinguished_from_changed_fields(
  make_config, run_before_text_change, jsonl
):
  """The text of the file `jsonl` was changed after the run had stopped."""
  batches = pipeline.training_batches(make_config())

  with pytest.raises(UserError) as caught:
    batches.set_state(run_before_text_change.state_after_step_2)

  message = str(caught.value)
  assert f"no field has changed, but the text of 'jsonl:{jsonl}' has" in message
  assert "prepared anew in" in message
  assert "\n" not in message


def test_the_message_names_the_directory_of_the_old_rows(
  make_config, run_before_text_change
):
  """The rows of the text before the change are still in their directory."""
  batches = pipeline.training_batches(make_config())

  advice = (
    f"--config.data.prepared_dir={run_before_text_change.rows_dir},"
    " or start over with another --workdir"
  )
  with pytest.raises(UserError, match=re.escape(advice)):
    batches.set_state(run_before_text_change.state_after_step_2)


def test_a_run_continues_with_its_old_rows(make_config, run_before_text_change):
  """config.data.prepared_dir chooses the rows of the text before the change."""
  config = make_config(prepared_dir=run_before_text_change.rows_dir)
  batches = pipeline.training_batches(config)

  batches.set_state(run_before_text_change.state_after_step_2)

  expected = run_before_text_change.batches_of_steps_3_and_4
  chex.assert_trees_all_equal(take(batches, 2), expected)


def test_the_message_says_if_the_old_rows_are_gone(
  make_config, run_before_text_change
):
  """Without the old rows, only the old text can continue the run."""
  rows_dir = run_before_text_change.rows_dir
  shutil.rmtree(rows_dir)
  batches = pipeline.training_batches(make_config())

  message = f"old rows are no longer in {rows_dir}: put the old text back"
  with pytest.raises(UserError, match=message):
    batches.set_state(run_before_text_change.state_after_step_2)


def test_changed_text_is_refused_for_states_of_earlier_versions(
  make_config, run_before_text_change
):
  """Earlier versions stored no description of the rows.

  Then the message cannot tell changed text from changed fields.
  """
  state = dict(run_before_text_change.state_after_step_2)
  del state["rows"]
  batches = pipeline.training_batches(make_config())

  with pytest.raises(UserError, match="or the text itself, has changed"):
    batches.set_state(state)


def test_a_mixture_continues_with_the_commands_of_the_message(
  make_config, jsonl, tmp_path
):
  """After a change of text, a run can still use the old rows of its sources.

  Each source has its own directory of rows. The message has shell commands that
  link all of them into a new directory, "DIR".
  """
  second_source = write_jsonl(tmp_path / "b.jsonl", numbered_texts("b", 500))
  validation_source = write_jsonl(tmp_path / "v.jsonl", numbered_texts("v", 50))
  mixture = {
    "source": f"jsonl:{jsonl}=0.5,{second_source}=0.5",
    "validation_source": validation_source,
  }
  batches = pipeline.training_batches(make_config(**mixture))
  state_at_start = batches.get_state()
  first_batches = take(batches, 2)
  jsonl.write_text(jsonl.read_text().replace("document", "Document"))
  batches_of_new_text = pipeline.training_batches(make_config(**mixture))

  message = f"the text of 'jsonl:{jsonl}' has, "
  with pytest.raises(UserError, match=message) as caught:
    batches_of_new_text.set_state(state_at_start)
  # The message ends with "in which ln -s … && ln -s …; or start over …".
  commands = re.search("in which (ln -s .*); or", str(caught.value))[1]
  link_dir = tmp_path / "DIR"
  link_dir.mkdir()
  subprocess.run(commands, shell=True, cwd=tmp_path, check=True)

  config = make_config(**mixture, prepared_dir=str(link_dir))
  for target in prepared.targets(config.data):
    assert prepared.is_prepared(target)
  restarted = pipeline.training_batches(config)
  restarted.set_state(state_at_start)
  chex.assert_trees_all_equal(take(restarted, 2), first_batches)


# Who prepares rows.


@pytest.mark.parametrize(
  "share",
  [
    pytest.param(BatchShare(index=0, count=2), id="data parallelism"),
    # With context or tensor parallelism, processes can read the same rows.
    pytest.param(FULL_SHARE, id="context parallelism"),
  ],
)
def test_several_processes_do_not_prepare_rows(make_config, share):
  """The user must prepare the rows with a command before the run."""
  with pytest.raises(UserError, match="run python -m diffjax.prepare"):
    pipeline.training_batches(make_config(), share, num_processes=2)


def test_one_process_prepares_rows_once_and_says_so(make_config, capsys):
  """The first run prepares the rows, and the second one finds them."""
  pipeline.training_batches(make_config())
  printed = capsys.readouterr().err
  assert "not prepared yet; preparing them once" in printed

  pipeline.training_batches(make_config())
  printed = capsys.readouterr().err
  assert printed == ""


def test_rows_that_are_not_prepared_cannot_be_opened(make_config, tmp_path):
  """The attempt creates no directory."""
  directory = tmp_path / "rows"
  config = make_config(prepared_dir=str(directory)).data
  targets = prepared.targets(config)

  with pytest.raises(UserError, match="are not prepared"):
    prepared_batches.open_rows(targets, "train", config)

  assert not directory.exists()


def test_opening_rows_writes_nothing(make_config, tmp_path):
  """All processes of a run open the rows, which may be on a shared disk."""
  directory = tmp_path / "rows"
  config = make_config(prepared_dir=str(directory)).data
  targets = prepared.prepare(config, workers=1)
  times = {path: path.stat().st_mtime_ns for path in directory.iterdir()}

  for split in ("train", "validation"):
    prepared_batches.open_rows(targets, split, config)

  times_after = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
  assert times_after == times


@pytest.fixture
def unparsed_flags():
  """Returns absl's flags, which are not parsed during the test."""
  was_parsed = flags.FLAGS.is_parsed()
  flags.FLAGS.unparse_flags()
  yield flags.FLAGS
  # Other tests need the state that the flags had before.
  if was_parsed:
    flags.FLAGS.mark_as_parsed()


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_without_workers_flags_stay_unparsed(make_config, unparsed_flags, mode):
  """A program can still define and parse its own flags afterwards."""
  batches = pipeline.training_batches(make_config(mode=mode, num_workers=0))
  next(batches)
  batches.close()

  assert not unparsed_flags.is_parsed()


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_workers_mark_flags_as_parsed(make_config, unparsed_flags, mode):
  """Grain starts no worker process before absl's flags are parsed."""
  batches = pipeline.training_batches(make_config(mode=mode, num_workers=1))
  batches.close()

  assert unparsed_flags.is_parsed()


# The identity of the data, which all processes must share.


def write_copies(directory, time, changed_split=None):
  """Writes two training files and two validation files of the same text.

  Args:
    directory: the directory of the copies.
    time: the time of modification of the files, in seconds.
    changed_split: "train" or "validation". The text of one file of this split
      is another one of the same size. By default, all texts are equal.
  """
  lines = []
  for index in range(20):
    lines.append(json.dumps({"text": f"document {index} " * 9}))
  text = "\n".join(lines)
  for split in ("train", "validation"):
    (directory / split).mkdir(parents=True)
    for index in range(2):
      path = directory / split / f"{index}.jsonl"
      path.write_text(text)
      if split == changed_split and index == 1:
        path.write_text(text.replace("document", "Document"))
      os.utime(path, (time, time))


def read_data_identity(directory, monkeypatch, mode) -> dict[str, int | str]:
  """Returns the identity of the data for a process in a directory."""
  config = Config(
    data=DataConfig(
      source="jsonl:train/*.jsonl",
      validation_source="jsonl:validation/*.jsonl",
      length=64,
      mode=mode,
      prepared_dir="rows",
    ),
    train=TrainConfig(batch_size=8),
  )
  monkeypatch.chdir(directory)
  batches = pipeline.training_batches(config)
  data_identity = batches.data_identity()
  batches.close()
  validation_batches = pipeline.validation_batches(config, batch_size=8)
  return data_identity | validation_batches.data_identity()


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_copies_of_the_data_have_the_same_identity(tmp_path, monkeypatch, mode):
  """Processes of one run can read copies in other directories.

  Their files also have other times of modification.
  """
  write_copies(tmp_path / "a", time=1)
  write_copies(tmp_path / "b", time=2)

  identity = read_data_identity(tmp_path / "a", monkeypatch, mode)
  copy_identity = read_data_identity(tmp_path / "b", monkeypatch, mode)

  assert identity == copy_identity


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_other_text_has_another_identity(tmp_path, monkeypatch, mode, split):
  """Processes that read different text must stop.

  They compare a dict of values, for example the number of rows. Each name
  contains the source of its split, so that the error can name the source.
  """
  write_copies(tmp_path / "a", time=1)
  # One file of this split has other text of the same size.
  write_copies(tmp_path / "b", time=1, changed_split=split)

  identity = read_data_identity(tmp_path / "a", monkeypatch, mode)
  other_identity = read_data_identity(tmp_path / "b", monkeypatch, mode)

  different_names = []
  for name, value in identity.items():
    if other_identity[name] != value:
      different_names.append(name)
  assert len(different_names) > 0
  for name in different_names:
    assert f"jsonl:{split}/*.jsonl" in name


@pytest.mark.parametrize(
  ("split", "kind_of_rows"),
  [("train", "training rows"), ("validation", "validation rows")],
)
def test_the_identity_of_prepared_data_has_the_number_of_rows(
  tmp_path, monkeypatch, split, kind_of_rows
):
  """Processes compare the number, which is lower if one of them lacks a file.

  With other rows, each process would train on other batches.
  """
  # Each split of the copies has the files 0.jsonl and 1.jsonl.
  write_copies(tmp_path / "complete", time=1)
  write_copies(tmp_path / "incomplete", time=1)
  (tmp_path / "incomplete" / split / "1.jsonl").unlink()

  complete = read_data_identity(tmp_path / "complete", monkeypatch, "prepared")
  incomplete = read_data_identity(
    tmp_path / "incomplete", monkeypatch, "prepared"
  )

  name = f"the number of {kind_of_rows} of 'jsonl:{split}/*.jsonl'"
  assert incomplete[name] < complete[name]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_identity_of_streamed_data_has_the_number_of_files(
  tmp_path, monkeypatch, split
):
  """A process that lacks a file would otherwise train on other rows."""
  # Each split of the copies has the files 0.jsonl and 1.jsonl.
  write_copies(tmp_path / "complete", time=1)
  write_copies(tmp_path / "incomplete", time=1)
  (tmp_path / "incomplete" / split / "1.jsonl").unlink()

  complete = read_data_identity(tmp_path / "complete", monkeypatch, "streamed")
  incomplete = read_data_identity(
    tmp_path / "incomplete", monkeypatch, "streamed"
  )

  count_name = f"the number of files of 'jsonl:{split}/*.jsonl'"
  assert complete[count_name] == 2
  assert incomplete[count_name] == 1


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_the_number_of_shares_must_divide_the_batch(make_config, mode):
  """A batch of 8 rows cannot be divided among 3 processes."""
  config = make_config(mode=mode, batch_size=8)

  with pytest.raises(UserError, match="config.train.batch_size = 8.*3"):
    open_share(config, index=0, count=3)


# Mixtures.


@pytest.fixture
def letter_mixture(tmp_path) -> str:
  """Returns a source with three documents of "aaa…" for one of "bbb…".

  The second file is larger, because sizes do not matter for the proportions.
  """
  source_a = write_jsonl(tmp_path / "a.jsonl", numbered_texts("a" * 50, 300))
  source_b = write_jsonl(tmp_path / "b.jsonl", numbered_texts("b" * 50, 1000))
  return f"{source_a}=3,{source_b}=1"


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_a_mixture_has_the_proportions_of_its_weights(
  make_config, letter_mixture, mode
):
  """Source "a" has the weight 3, and source "b" has the weight 1.

  The documents of a source consist of its letter. All documents of a row are
  from one source.
  """
  config = make_config(mode=mode, source=letter_mixture)

  batches = take(pipeline.training_batches(config), 50)

  tokens = np.concatenate([batch["tokens"] for batch in batches])
  is_row_of_source_a = (tokens == ord("a")).any(axis=1)
  assert is_row_of_source_a.mean() == pytest.approx(3 / 4, abs=0.01)


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_a_mixture_can_restart(make_config, letter_mixture, mode):
  """A state includes the position in both sources of `letter_mixture`."""
  config = make_config(mode=mode, source=letter_mixture)
  batches = pipeline.training_batches(config)
  take(batches, 20)
  state = stored_state(batches)
  expected = take(batches, 5)

  restarted = pipeline.training_batches(config)
  restarted.set_state(state)

  chex.assert_trees_all_equal(take(restarted, 5), expected)


def test_equal_components_are_shuffled_differently():
  """Component i of a mixture is shuffled with `seed + i`.

  With the same seed, the two components would be in the same order.
  """
  rows = list(range(100))
  # A mixture of one component shows the order of a seed.
  rows_with_seed_3 = prepared_batches.mix(
    [rows], weights=[1.0], seed=3, repeat=False
  )
  rows_with_seed_4 = prepared_batches.mix(
    [rows], weights=[1.0], seed=4, repeat=False
  )

  mixture = prepared_batches.mix(
    [rows, rows], weights=[0.5, 0.5], seed=3, repeat=False
  )

  # With equal weights, the components take turns.
  rows_of_mixture = list(mixture)
  rows_of_component_0 = rows_of_mixture[0::2]
  rows_of_component_1 = rows_of_mixture[1::2]
  assert rows_of_component_0 == list(rows_with_seed_3)
  assert rows_of_component_1 == list(rows_with_seed_4)
  assert rows_of_component_0 != rows_of_component_1


def test_the_first_epoch_has_the_order_of_a_single_pass():
  """Training repeats the rows (`repeat=True`), and validation does not."""
  rows = list(range(100))
  single_pass = list(
    prepared_batches.mix([rows], weights=[1.0], seed=3, repeat=False)
  )

  endless = prepared_batches.mix([rows], weights=[1.0], seed=3, repeat=True)

  first_epoch = [endless[index] for index in range(100)]
  second_epoch = [endless[index] for index in range(100, 200)]
  assert first_epoch == single_pass
  assert sorted(second_epoch) == rows
  assert second_epoch != first_epoch


def test_a_state_of_other_mixture_weights_is_refused(
  make_config, jsonl, tmp_path
):
  """The same number of batches would be another position in each source."""
  second_source = write_jsonl(tmp_path / "b.jsonl", numbered_texts("b", 500))
  # A source is followed by "=" and its weight.
  config = make_config(source=f"jsonl:{jsonl}=0.5,{second_source}=0.5")
  other_config = make_config(source=f"jsonl:{jsonl}=0.25,{second_source}=0.5")
  state = pipeline.training_batches(config).get_state()
  batches = pipeline.training_batches(other_config)

  message = "the weights in config.data.source have changed"
  with pytest.raises(UserError, match=message):
    batches.set_state(state)


# Streamed batches.


# The run has 40 steps, and two steps are compared after each restart. A restart
# with workers takes a second, so there are fewer of them.
@pytest.mark.parametrize(
  ("packing", "num_workers", "steps"),
  [
    pytest.param("documents", 0, (0, 1, 17, 38)),
    pytest.param("concat", 0, (17,)),
    pytest.param("concat", 2, (17, 38), marks=pytest.mark.full),
    pytest.param("documents", 2, (0, 38), marks=pytest.mark.full),
  ],
)
def test_a_stream_can_restart(
  make_config, two_files, packing, num_workers, steps
):
  """A new iterator continues from the state that was stored before a step."""
  config = make_config(
    mode="streamed", packing=packing, num_workers=num_workers, source=two_files
  )
  batches = pipeline.training_batches(config)
  state_before_step = []
  batch_of_step = []
  for _ in range(40):
    state_before_step.append(stored_state(batches))
    batch_of_step.append(next(batches))
  batches.close()

  restarted = pipeline.training_batches(config)
  for step in steps:
    restarted.set_state(state_before_step[step])
    chex.assert_trees_all_equal(next(restarted), batch_of_step[step])
    chex.assert_trees_all_equal(next(restarted), batch_of_step[step + 1])
  restarted.close()


@pytest.mark.parametrize(
  ("packing", "num_workers"),
  [
    pytest.param("documents", 0),
    pytest.param("concat", 0, marks=pytest.mark.full),
    pytest.param("documents", 2, marks=pytest.mark.full),
  ],
)
def test_reading_ahead_does_not_change_earlier_states(
  make_config, two_files, packing, num_workers
):
  """A state stays the same while later batches are read."""
  config = make_config(
    mode="streamed", packing=packing, num_workers=num_workers, source=two_files
  )
  mixture = streamed_batches.open_sources(config.data, "train")
  dataset = streamed_batches.stream_batches(
    mixture, config, BatchShare(), repeat=True
  )
  # `pipeline.training_batches` would return copies of this reader's states.
  iterator = iter(prefetch(dataset, num_workers))
  batches = Reader(iterator, two_files, num_workers, timeout=300)

  states = []
  json_of_states = []
  for _ in range(30):
    state = batches.get_state()
    states.append(state)
    json_of_states.append(json.dumps(state))
    next(batches)
  batches.close()

  json_of_states_at_end = [json.dumps(state) for state in states]
  assert json_of_states_at_end == json_of_states
  # Each of the 30 states is another position.
  assert len(set(json_of_states)) == 30


@pytest.mark.parametrize(
  "packing",
  ["documents", pytest.param("concat", marks=pytest.mark.full)],
)
def test_a_stream_passes_grains_test_of_checkpoints(
  make_config, tmp_path, packing
):
  """Grain checks that the output after each checkpoint is the same."""
  # Each file has documents of 0, 3, 6, … 57 bytes, so that a row of 64 tokens
  # has one or several.
  for letter in "abc":
    documents = [letter * num_bytes for num_bytes in range(0, 60, 3)]
    write_jsonl(tmp_path / f"{letter}.jsonl", documents)
  config = make_config(
    mode="streamed",
    packing=packing,
    source=f"jsonl:{tmp_path}/[abc].jsonl",
    length=64,
    batch_size=2,
  )
  dataset = pipeline.streamed_dataset(config, repeat=False)

  # Grain formats every batch for its messages. Short arrays are faster.
  with np.printoptions(threshold=4):
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def read_documents(dataset) -> list[bytes]:
  """Returns the documents of a single pass in batches of one row."""
  stream = bytearray()
  for batch in dataset:
    row = np.append(batch["tokens"][0], batch["targets"][0, -1])
    stream += row.astype(np.uint8).tobytes()
  # Each document has a separator before and after it. Padding is zero.
  parts = bytes(stream).split(b"\xff\xff")
  return [part.strip(b"\xff\0") for part in parts]


def test_a_single_pass_has_every_document_once(make_config, texts):
  """The documents of `texts` are the source of `make_config`."""
  config = make_config(
    mode="streamed", packing="concat", batch_size=1, validation_fraction=0.0
  )

  dataset = pipeline.streamed_dataset(config, repeat=False)

  expected = [text.encode() for text in texts]
  assert read_documents(dataset) == expected


def test_processes_share_the_documents_of_a_single_pass(
  make_config, two_files, texts
):
  """Each of two processes reads one of the two files of `two_files`."""
  config = make_config(
    mode="streamed",
    source=two_files,
    packing="concat",
    batch_size=2,
    validation_fraction=0.0,
  )

  documents = []
  for index in range(2):
    share = BatchShare(index=index, count=2)
    dataset = pipeline.streamed_dataset(config, share, repeat=False)
    documents += read_documents(dataset)

  # The first file has the first half of the documents.
  assert documents == [text.encode() for text in texts]


def characters_read(batches, characters) -> set[str]:
  """Returns the characters whose bytes are tokens of the batches."""
  tokens = np.concatenate([batch["tokens"] for batch in batches])
  return {character for character in characters if ord(character) in tokens}


@pytest.mark.parametrize("seed", range(3))
def test_processes_stream_different_documents(make_config, tmp_path, seed):
  """Each of two processes reads half of the files."""
  digits = "01234567"
  documents_per_file = 50
  for digit in digits:
    # Two documents of 40 bytes do not fit in a row of 64 tokens, so each
    # document has a row for itself.
    documents = [digit * 40] * documents_per_file
    write_jsonl(tmp_path / f"{digit}.jsonl", documents)
  config = make_config(
    mode="streamed",
    source=f"jsonl:{tmp_path}/[0-7].jsonl",
    validation_fraction=0.0,
    length=64,
    batch_size=8,
    seed=seed,
  )
  batches_of_process_0 = open_share(config, index=0, count=2)
  batches_of_process_1 = open_share(config, index=1, count=2)

  rows_per_process = documents_per_file * len(digits) // 2
  rows_per_batch = 8 // 2
  num_batches = rows_per_process // rows_per_batch
  epoch_of_process_0 = take(batches_of_process_0, num_batches)
  epoch_of_process_1 = take(batches_of_process_1, num_batches)

  digits_of_process_0 = characters_read(epoch_of_process_0, digits)
  digits_of_process_1 = characters_read(epoch_of_process_1, digits)
  assert len(digits_of_process_0) == 4
  assert len(digits_of_process_1) == 4
  assert digits_of_process_0.isdisjoint(digits_of_process_1)


@pytest.fixture
def file_with_727_row_groups(tmp_path) -> str:
  """Returns a source with as many row groups as a file of FineWeb-Edu.

  Each row group has one document, its index in four digits.
  """
  path = tmp_path / "one.parquet"
  texts = [f"{index:04}" for index in range(727)]
  table = pyarrow.table({"text": texts})
  pyarrow.parquet.write_table(table, path, row_group_size=1)
  return f"parquet:{path}"


def read_with_threads(rows, num_threads):
  """Returns an iterator over rows that threads read.

  Threads get their shares in the same way as worker processes.
  """
  dataset = grain.experimental.multithread_prefetch(
    rows, num_threads=num_threads, buffer_size=1
  )
  return iter(dataset)


def next_documents(rows, count) -> list[str]:
  """Returns the documents of rows. Separators are before and after each one."""
  documents = []
  for row in take(rows, count):
    document = row.tokens[1:-1]
    documents.append(bytes(document.astype(np.uint8)).decode())
  return documents


def test_processes_and_workers_share_the_row_groups_of_one_file(
  file_with_727_row_groups,
):
  """16 processes with 4 workers each read every row group once an epoch."""
  num_processes = 16
  config = DataConfig(
    source=file_with_727_row_groups,
    validation_fraction=0.0,
    packing="concat",
    # Row group n has one document, the number n in four digits. With two
    # separators, it fills a row of 5 inputs and a last target.
    length=5,
    mode="streamed",
    num_workers=4,
  )
  mixture = streamed_batches.open_sources(config, "train")

  first_epoch = []
  second_epoch = []
  for process in range(num_processes):
    share = BatchShare(index=process, count=num_processes)
    rows = streamed_batches.stream_rows(mixture, config, share, repeat=True)
    # Threads stand in for worker processes, which take longer to start.
    iterator = read_with_threads(rows, num_threads=4)
    row_groups_of_process = range(process, 727, num_processes)
    first_epoch += next_documents(iterator, len(row_groups_of_process))
    second_epoch += next_documents(iterator, len(row_groups_of_process))
    iterator.close()

  all_documents = [f"{number:04}" for number in range(727)]
  assert sorted(first_epoch) == all_documents
  assert sorted(second_epoch) == all_documents
  # Each epoch has its own order.
  assert first_epoch != second_epoch


def test_more_workers_than_parts_are_refused(file_with_727_row_groups):
  """A part is a row group. A worker without one would have nothing to read."""
  # 16 · 46 = 736 workers are too many for 727 row groups, but 16 · 45 = 720
  # are not.
  data = DataConfig(
    source=file_with_727_row_groups, mode="streamed", num_workers=46
  )
  config = Config(data=data, train=TrainConfig(batch_size=16))
  share = BatchShare(index=0, count=16)

  with pytest.raises(UserError) as caught:
    pipeline.streamed_dataset(config, share)

  message = str(caught.value)
  assert "727 parts" in message
  assert "16 shares that the processes read with 46 workers each" in message
  assert "config.data.num_workers to at most 45" in message
  # The number that the message names is accepted.
  fewer_workers = dataclasses.replace(data, num_workers=45)
  pipeline.streamed_dataset(
    dataclasses.replace(config, data=fewer_workers), share
  )


# Every document once an epoch, for many numbers of files and readers.

DOCUMENTS_PER_FILE = 2


def write_numbered_files(directory, name, num_files) -> str:
  """Writes files with the documents NAME0-0, NAME0-1, NAME1-0, NAME1-1, …

  Returns:
    The source of the files.
  """
  directory.mkdir()
  for index in range(num_files):
    texts = numbered_texts(f"{name}{index}-", DOCUMENTS_PER_FILE)
    write_jsonl(directory / f"{index}.jsonl", texts)
  return f"jsonl:{directory}/*.jsonl"


def count_documents_by_epoch(
  config, files_per_source, num_processes, num_epochs
) -> list[collections.Counter]:
  """Returns how often each document is read in each epoch, by all processes.

  A row is exactly one document, whose first character names its source. Readers
  take turns, so the index of a row determines its reader. The number of rows
  that this reader has read from the source before determines the part and the
  epoch.

  Args:
    config: the data fields.
    files_per_source: the number of files of each source, by its letter.
    num_processes: the number of processes.
    num_epochs: the number of epochs to return.
  """
  mixture = streamed_batches.open_sources(config, "train")
  num_readers = max(1, config.num_workers)
  # Enough for the slowest source of a mixture of equal weights.
  rows_per_source = (
    (max(files_per_source.values()) + num_readers)
    * DOCUMENTS_PER_FILE
    * num_epochs
  )
  num_rows = rows_per_source * len(files_per_source)
  epochs = [collections.Counter() for _ in range(num_epochs)]
  for process in range(num_processes):
    share = BatchShare(index=process, count=num_processes)
    rows = streamed_batches.stream_rows(mixture, config, share, repeat=True)
    iterator = read_with_threads(rows, config.num_workers)
    rows_read = collections.Counter()
    for row_index, document in enumerate(next_documents(iterator, num_rows)):
      source = document[0]
      reader = row_index % num_readers
      part_of_reader = rows_read[source, reader] // DOCUMENTS_PER_FILE
      rows_read[source, reader] += 1
      part_of_process = reader + part_of_reader * num_readers
      parts_per_epoch = len(
        range(process, files_per_source[source], num_processes)
      )
      epoch = part_of_process // parts_per_epoch
      if epoch < num_epochs:
        epochs[epoch][document] += 1
    iterator.close()
  return epochs


def make_numbered_config(tmp_path, files_per_source, num_workers):
  """Returns a config of sources whose rows hold one document each.

  Args:
    tmp_path: the directory of the files.
    files_per_source: the number of files of each source, by its letter.
    num_workers: the number of workers.
  """
  weighted_sources = []
  for name, num_files in files_per_source.items():
    source = write_numbered_files(tmp_path / name, name, num_files)
    weighted_sources.append(f"{source}=0.5")
  source = ",".join(weighted_sources)
  return DataConfig(
    source=source,
    validation_fraction=0.0,
    packing="concat",
    length=5,
    mode="streamed",
    num_workers=num_workers,
  )


@pytest.mark.parametrize(
  ("files_per_source", "num_processes", "num_workers"),
  [
    pytest.param({"a": 1}, 1, 0, id="one file"),
    pytest.param({"a": 3}, 1, 2, id="3 files, 2 workers"),
    pytest.param({"a": 5}, 1, 4, id="5 files, 4 workers"),
    pytest.param({"a": 3}, 2, 0, id="3 files, 2 processes"),
    pytest.param({"a": 5}, 2, 2, id="5 files, 2 processes with 2 workers"),
    pytest.param({"a": 1, "b": 3}, 1, 0, id="a mixture"),
    pytest.param({"a": 5, "b": 3}, 1, 2, id="a mixture, 2 workers"),
    pytest.param({"a": 3, "b": 3}, 2, 0, id="equal sizes, 2 processes"),
    pytest.param({"a": 5, "b": 3}, 2, 0, id="a mixture, 2 processes"),
  ],
)
def test_every_document_is_read_once_an_epoch(
  tmp_path, files_per_source, num_processes, num_workers
):
  """All workers of all processes together read each document once.

  files_per_source {"a": 5, "b": 3} is a mixture of a source of five files and
  one of three. Each file has two documents, such as "a0-0" and "a0-1".
  """
  config = make_numbered_config(tmp_path, files_per_source, num_workers)

  first_epoch, second_epoch = count_documents_by_epoch(
    config, files_per_source, num_processes, num_epochs=2
  )

  count_by_document = {}
  for source, num_files in files_per_source.items():
    for file in range(num_files):
      count_by_document[f"{source}{file}-0"] = 1
      count_by_document[f"{source}{file}-1"] = 1
  assert first_epoch == count_by_document
  assert second_epoch == count_by_document


@pytest.mark.parametrize(
  ("files_per_source", "num_processes", "max_workers"),
  [
    pytest.param({"a": 1}, 1, 1, id="one file"),
    pytest.param({"a": 3}, 1, 3, id="3 files"),
    pytest.param({"a": 5}, 2, 2, id="5 files for 2 processes"),
    pytest.param({"a": 5, "b": 3}, 1, 3, id="5 and 3 files"),
    pytest.param({"a": 5, "b": 3}, 2, 1, id="5 and 3 files for 2 processes"),
  ],
)
def test_too_many_workers_are_refused_with_a_number_that_works(
  tmp_path, files_per_source, num_processes, max_workers
):
  """Each worker of each process needs a file of every source.

  files_per_source {"a": 5, "b": 3} is a mixture of a source of five files and
  one of three.
  """
  config = make_numbered_config(tmp_path, files_per_source, max_workers)
  too_many_workers = dataclasses.replace(config, num_workers=max_workers + 1)
  mixture = streamed_batches.open_sources(config, "train")
  share = BatchShare(index=0, count=num_processes)

  with pytest.raises(UserError, match=f"num_workers to at most {max_workers},"):
    streamed_batches.stream_rows(mixture, too_many_workers, share, repeat=True)

  # The number of the message is accepted.
  streamed_batches.stream_rows(mixture, config, share, repeat=True)


def test_more_processes_than_parts_are_refused(make_config):
  """The only file of the source is one part, which two processes need."""
  config = make_config(mode="streamed")

  with pytest.raises(UserError, match="has 1 parts.*fewer than the 2 shares"):
    open_share(config, index=0, count=2)


def test_a_stream_without_documents_is_an_error(make_config):
  # All documents are held out for validation.
  config = make_config(mode="streamed", validation_fraction=1.0)
  batches = pipeline.training_batches(config)

  with pytest.raises(UserError, match="empty: no document to train on"):
    next(batches)


# Streams that cannot be continued.


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_workers": 2}, "config.data.num_workers was 0 and is 2"),
    ({"seed": 1}, "field of config.data has changed"),
  ],
)
def test_a_stream_does_not_continue_with_other_fields(
  make_config, two_files, change, message
):
  """The position in a stream depends on who reads which file."""
  config = make_config(mode="streamed", source=two_files, num_workers=0, seed=0)
  state = pipeline.training_batches(config).get_state()
  data = dataclasses.replace(config.data, **change)
  changed_config = dataclasses.replace(config, data=data)
  batches = pipeline.training_batches(changed_config)

  with pytest.raises(UserError, match=message):
    batches.set_state(state)


def test_a_stream_does_not_continue_with_another_number_of_processes(
  make_config, two_files
):
  """One process reads both files, but each of two processes reads one."""
  config = make_config(mode="streamed", source=two_files)
  state_of_one_process = open_share(config, index=0, count=1).get_state()
  batches_of_two_processes = open_share(config, index=0, count=2)

  message = "number of shares that the processes read was 1 and is 2"
  with pytest.raises(UserError, match=message):
    batches_of_two_processes.set_state(state_of_one_process)


def test_a_stream_does_not_continue_with_another_version_of_grain(make_config):
  """A position is stored in Grain's own format, which may change."""
  batches = pipeline.training_batches(make_config(mode="streamed"))
  state = batches.get_state()
  state["grain"] = "0.0"

  with pytest.raises(UserError, match="version of Grain"):
    batches.set_state(state)


@pytest.fixture
def stream_config(make_config, jsonl, tmp_path):
  """Returns a config that streams all JSONL files of a directory."""
  jsonl.rename(tmp_path / "a.jsonl")
  return make_config(mode="streamed", source=f"jsonl:{tmp_path}/*.jsonl")


@pytest.fixture
def stream_state(stream_config):
  """Returns the state after two batches of the stream."""
  batches = pipeline.training_batches(stream_config)
  take(batches, 2)
  return stored_state(batches)


def test_a_stream_does_not_continue_with_an_added_file(
  stream_config, stream_state, tmp_path
):
  """The stream reads *.jsonl in `tmp_path`, which had only a.jsonl before."""
  (tmp_path / "b.jsonl").write_text('{"text": "more"}\n')
  batches = pipeline.training_batches(stream_config)

  message = (
    "the names and sizes of the files of 'jsonl:.*' changed since.*--workdir"
  )
  with pytest.raises(UserError, match=message):
    batches.set_state(stream_state)


def test_a_stream_does_not_continue_with_a_renamed_file(
  stream_config, stream_state, tmp_path
):
  """The stream reads *.jsonl in `tmp_path`, which had only a.jsonl before."""
  (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
  batches = pipeline.training_batches(stream_config)

  message = (
    "the names and sizes of the files of 'jsonl:.*' changed since.*--workdir"
  )
  with pytest.raises(UserError, match=message):
    batches.set_state(stream_state)


def test_a_stream_does_not_continue_with_a_longer_file(
  stream_config, stream_state, tmp_path
):
  """The stream reads *.jsonl in `tmp_path`, which has only a.jsonl."""
  with (tmp_path / "a.jsonl").open("a") as file:
    file.write('{"text": "more"}\n')
  batches = pipeline.training_batches(stream_config)

  message = (
    "the names and sizes of the files of 'jsonl:.*' changed since.*--workdir"
  )
  with pytest.raises(UserError, match=message):
    batches.set_state(stream_state)


@pytest.mark.parametrize(
  ("old_word", "new_word"), [("first", "First"), ("last", "Last")]
)
def test_a_stream_does_not_continue_with_changed_text(
  make_config, texts, tmp_path, old_word, new_word
):
  """A change at the start or the end of a file is noticed.

  The file keeps its size and its time, so only its text tells.
  """
  path = tmp_path / "a.jsonl"
  source = write_jsonl(path, ["first", *texts, "last"])
  os.utime(path, (1, 1))
  config = make_config(mode="streamed", source=source)
  state = pipeline.training_batches(config).get_state()

  text = path.read_text()
  path.write_text(text.replace(old_word, new_word))
  os.utime(path, (1, 1))
  batches = pipeline.training_batches(config)

  message = "the text of the files of 'jsonl:.*' changed since.*--workdir"
  with pytest.raises(UserError, match=message) as caught:
    batches.set_state(state)
  assert "\n" not in str(caught.value)


# Streams that continue with a warning.


@pytest.fixture
def continue_stream(stream_config, capsys):
  """Returns a function that continues from a state and returns the warnings."""
  expected = take(pipeline.training_batches(stream_config), 4)[2:]
  capsys.readouterr()

  def continue_from(state) -> str:
    batches = pipeline.training_batches(stream_config)
    batches.set_state(state)
    chex.assert_trees_all_equal(take(batches, 2), expected)
    return capsys.readouterr().err

  return continue_from


def test_a_stream_of_unchanged_files_continues_without_a_warning(
  stream_state, continue_stream
):
  warnings = continue_stream(stream_state)

  assert warnings == ""


def set_time_within_second(path, nanoseconds):
  """Changes the nanoseconds of a file's time of modification."""
  seconds = path.stat().st_mtime_ns // 10**9
  time_ns = seconds * 10**9 + nanoseconds
  os.utime(path, ns=(time_ns, time_ns))


@pytest.fixture
def stream_state_at_nanosecond_5(stream_config, tmp_path):
  """Returns the state after two batches of a file whose time ends with 5 ns."""
  set_time_within_second(tmp_path / "a.jsonl", nanoseconds=5)
  batches = pipeline.training_batches(stream_config)
  take(batches, 2)
  return stored_state(batches)


def test_another_time_within_the_same_second_is_a_warning(
  stream_state_at_nanosecond_5, continue_stream, tmp_path
):
  """The stream reads a.jsonl, whose text is still the same."""
  set_time_within_second(tmp_path / "a.jsonl", nanoseconds=6)

  warnings = continue_stream(stream_state_at_nanosecond_5)

  assert "have other times than at this checkpoint" in warnings


def without_nanoseconds(state) -> dict[str, Any]:
  """Returns the state as earlier versions stored it."""
  for digests in state["files"].values():
    del digests["nanoseconds"]
  return state


def test_a_state_without_nanoseconds_allows_a_time_within_the_same_second(
  stream_state_at_nanosecond_5, continue_stream, tmp_path
):
  """Earlier versions stored the time of a file in seconds only."""
  state = without_nanoseconds(stream_state_at_nanosecond_5)
  set_time_within_second(tmp_path / "a.jsonl", nanoseconds=6)

  warnings = continue_stream(state)

  assert warnings == ""


def test_a_state_without_nanoseconds_warns_of_a_time_in_another_second(
  stream_state, continue_stream, tmp_path
):
  """Earlier versions stored the time of a file in seconds only."""
  state = without_nanoseconds(stream_state)
  # Second 1 of the year 1970.
  os.utime(tmp_path / "a.jsonl", (1, 1))

  warnings = continue_stream(state)

  assert "have other times than at this checkpoint" in warnings


def test_a_stream_whose_state_lacks_the_files_continues_with_a_warning(
  stream_state, continue_stream
):
  """The first versions did not store which files a stream reads."""
  del stream_state["files"]

  warnings = continue_stream(stream_state)

  assert (
    "did not record which files it read; the files are not checked for changes"
    in warnings
  )


def test_a_fingerprint_reads_at_most_32_files(tmp_path, monkeypatch):
  """A sample of the files, with the first and the last, is enough and fast."""
  for index in range(200):
    (tmp_path / f"{index:03}.txt").write_text("text")
  source = sources.documents(f"text:{tmp_path}/*.txt", "train", DataConfig())
  opened_names = []

  def open_and_record(path):
    opened_names.append(pathlib.Path(path).name)
    return files.open_file(path)

  monkeypatch.setattr(fingerprint, "open_file", open_and_record)

  source.fingerprint()

  assert len(opened_names) == 32
  assert "000.txt" in opened_names
  assert "199.txt" in opened_names


# Damaged data.


@pytest.mark.parametrize(
  "num_workers", [0, pytest.param(2, marks=pytest.mark.full)]
)
def test_damaged_prepared_rows_are_named(make_config, two_files, num_workers):
  """The error is one line with the file and the row, also from a worker."""
  config = make_config(num_workers=num_workers, source=two_files)
  (target,) = prepared.prepare(config.data, workers=1)
  path = min(pathlib.Path(target.directory).glob("train*.array_record"))
  content = path.read_bytes()
  first_half = content[: len(content) // 2]
  path.write_bytes(first_half)
  batches = pipeline.training_batches(config)

  # 500 batches are more than an epoch, so a damaged row is among them.
  message = rf"{path}: row \d+ cannot be read"
  with (
    contextlib.closing(batches),
    pytest.raises(UserError, match=message) as caught,
  ):
    take(batches, 500)

  # Grain must not replace the error of a worker by one of another class.
  assert type(caught.value) is UserError
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "num_workers", [0, pytest.param(2, marks=pytest.mark.full)]
)
def test_a_damaged_line_of_a_stream_is_named(
  make_config, tmp_path, num_workers
):
  """The error is one line with the file and the line, also from a worker."""
  good_line = '{"text": "fine"}\n'
  (tmp_path / "a.jsonl").write_text(good_line * 50)
  bad_path = tmp_path / "b.jsonl"
  bad_path.write_text(good_line * 50 + '{"text": 5}\n')
  config = make_config(
    mode="streamed",
    num_workers=num_workers,
    source=f"jsonl:{tmp_path}/[ab].jsonl",
    validation_fraction=0.0,
  )
  batches = pipeline.training_batches(config)

  # 500 batches are more than an epoch, so the damaged line is among them.
  with (
    contextlib.closing(batches),
    pytest.raises(UserError, match=f"{bad_path}:51: .*text_field") as caught,
  ):
    take(batches, 500)

  # Grain must not replace the error of a worker by one of another class.
  assert type(caught.value) is UserError
  assert "\n" not in str(caught.value)


# Validation batches.


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
@pytest.mark.parametrize("eval_rows", [5, 16])
def test_validation_reads_the_first_rows(make_config, mode, eval_rows):
  """config.eval.rows is the number of rows, and -1 stands for all rows."""
  all_batches = pipeline.validation_batches(
    make_config(mode=mode, eval_rows=-1), batch_size=1
  )
  all_rows = row_contents(all_batches)

  first_batches = pipeline.validation_batches(
    make_config(mode=mode, eval_rows=eval_rows), batch_size=1
  )
  first_rows = row_contents(first_batches)

  assert len(all_rows) > eval_rows
  assert first_batches.rows == eval_rows
  assert first_rows == all_rows[:eval_rows]


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
@pytest.mark.parametrize("eval_rows", [-1, 5, 16])
def test_the_last_validation_batch_is_padded(make_config, mode, eval_rows):
  """All batches have the same shape, so that a model is compiled once."""
  config = make_config(mode=mode, eval_rows=eval_rows, length=64)
  # With one row in a batch, no batch needs padding.
  rows = row_contents(pipeline.validation_batches(config, batch_size=1))
  num_rows = len(rows)

  validation_batches = pipeline.validation_batches(config, batch_size=4)
  batches = list(validation_batches)

  assert validation_batches.rows == num_rows
  assert len(validation_batches) == math.ceil(num_rows / 4)
  assert len(batches) == len(validation_batches)
  for batch in batches:
    chex.assert_shape(batch["tokens"], (4, 64))
  assert row_contents(batches)[:num_rows] == rows
  for name in ("segment_ids", "weights"):
    values = np.concatenate([batch[name] for batch in batches])
    padding = values[num_rows:]
    assert not padding.any()


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_validation_is_the_same_each_time_and_for_each_seed(make_config, mode):
  """config.data.seed determines the order of the training rows only."""
  config = make_config(mode=mode, seed=0)
  other_config = make_config(mode=mode, seed=9)

  batches = pipeline.validation_batches(config, batch_size=4)
  other_batches = pipeline.validation_batches(other_config, batch_size=4)

  first_pass = list(batches)
  second_pass = list(batches)
  chex.assert_trees_all_equal(second_pass, first_pass)
  chex.assert_trees_all_equal(list(other_batches), first_pass)


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
@pytest.mark.parametrize("eval_rows", [-1, 5])
def test_processes_share_the_validation_batches(make_config, mode, eval_rows):
  """Each of two processes has half of the rows of every batch."""
  config = make_config(mode=mode, eval_rows=eval_rows)
  expected = list(pipeline.validation_batches(config, batch_size=4))

  batches_of_shares = []
  for index in range(2):
    share = BatchShare(index=index, count=2)
    batches = pipeline.validation_batches(
      config, batch_size=4, share=share, num_processes=2
    )
    batches_of_shares.append(list(batches))

  chex.assert_trees_all_equal(join_shares(batches_of_shares), expected)


def test_validation_and_training_share_no_rows(make_config, num_rows):
  """A row with the same tokens in both splits would be a leak.

  `num_rows` is the number of training rows.
  """
  batches = pipeline.training_batches(make_config(batch_size=1))
  validation_batches = pipeline.validation_batches(make_config(), batch_size=1)

  training_rows = set(row_contents(take(batches, num_rows)))
  validation_rows = set(row_contents(validation_batches))

  assert validation_rows
  assert training_rows.isdisjoint(validation_rows)


def test_a_few_validation_rows_come_from_many_documents(make_config, tmp_path):
  """Rows are shuffled, because they are on disk in the order of documents."""
  letters = "ABCDEFGHIJKLMNOPQRST"
  # Each document repeats its letter in 1000 / 65 > 15 rows of 65 tokens (64
  # inputs and a last target).
  texts = [letter * 1000 for letter in letters]
  source = write_jsonl(tmp_path / "v.jsonl", texts)
  config = make_config(validation_source=source, eval_rows=16, length=64)

  batches = pipeline.validation_batches(config, batch_size=8)

  # The first 16 rows on disk have 2 letters. 16 random rows have about 11.
  documents = characters_read(batches, letters)
  assert len(documents) > 8


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_validation_without_documents_is_an_error(make_config, mode):
  """A fraction of 0 holds out no documents for validation."""
  config = make_config(mode=mode, validation_fraction=0.0)

  with pytest.raises(UserError, match="config.data.validation_fraction = 0.0"):
    pipeline.validation_batches(config, batch_size=4)


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_the_number_of_shares_must_divide_validation_batches(make_config, mode):
  """Batches of 4 rows cannot be divided among 3 processes."""
  config = make_config(mode=mode)
  share = BatchShare(index=0, count=3)

  with pytest.raises(UserError, match="divisible by 3, the number of shares"):
    pipeline.validation_batches(
      config, batch_size=4, share=share, num_processes=3
    )


# Imports.


# The arguments of this program: a directory that counts as the standard
# library, which is the default source, and the source of a stream.
PROGRAM_THAT_CHECKS_ITS_IMPORTS = """
import sys
import sysconfig

library, stream = sys.argv[1:]
sysconfig.get_path = lambda name: library

def imported(*names):
  return [name for name in names if name in sys.modules]

if __name__ == "__main__":
  from diffjax.config import Config, DataConfig
  from diffjax.data import pipeline

  assert not imported(
    "tensorflow_datasets", "pyarrow", "tokenizers", "tiktoken", "rustbpe"
  )
  default_config = Config()
  streamed_config = Config(data=DataConfig(source=stream, mode="streamed"))
  for config in (default_config, streamed_config):
    next(pipeline.training_batches(config))
    assert pipeline.validation_batches(config, batch_size=4).rows
  assert imported("tensorflow_datasets")
  assert not imported("tensorflow", "tensorflow_text", "torch")
"""


def test_the_pipeline_never_imports_tensorflow(jsonl, tmp_path):
  """It imports the libraries of file formats and tokenizers only when used.

  The program asserts that these modules are not in `sys.modules`.
  """
  library = tmp_path / "library"
  library.mkdir()
  for index in range(100):
    (library / f"module{index}.py").write_text(f"x = {index}\n" * 50)

  program = [sys.executable, "-c", PROGRAM_THAT_CHECKS_ITS_IMPORTS]
  arguments = [str(library), f"jsonl:{jsonl}"]
  subprocess.run([*program, *arguments], check=True, timeout=120)
