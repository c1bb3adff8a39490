"""Batches are the same for all readers and after any restart, and hold every row once an epoch."""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from absl import flags

from diffjax.config import Config, DataConfig, TrainConfig, UserError
from diffjax.data import (
  files,
  pipeline,
  prepared,
  prepared_batches,
  sources,
  streamed_batches,
)
from diffjax.data.batches import FULL_SHARE, BatchShare
from diffjax.data.reader import Reader, prefetch
from tests.harness.tiers import full


def take(batches, count):
  return [next(batches) for _ in range(count)]


def assert_same(left, right):
  assert len(left) == len(right)
  for one, other in zip(left, right, strict=True):
    assert one.keys() == other.keys()
    for key in one:
      np.testing.assert_array_equal(one[key], other[key], err_msg=key)


def joined(shares):
  """The global batches of the processes' batches."""
  return [
    {
      key: np.concatenate([batch[key] for batch in batches])
      for key in batches[0]
    }
    for batches in zip(*shares, strict=True)
  ]


def row_keys(batches):
  return [
    row.tobytes()
    for batch in batches
    for row in np.concatenate(
      [batch["tokens"], batch["targets"][:, -1:]], axis=1
    )
  ]


@pytest.fixture
def rows(make_config):
  """Number of training rows."""
  (target,) = prepared.prepare(make_config().data, 1)
  return len(prepared.PreparedRows(target, "train"))


# --- Prepared ---


@pytest.mark.parametrize("workers, others", [(2, 0), *full([(0, 3), (4, 2)])])
def test_workers_and_restarts_change_nothing(make_config, workers, others):
  expected = take(pipeline.training_batches(make_config()), 12)
  batches = pipeline.training_batches(make_config(num_workers=workers))
  assert_same(take(batches, 7), expected[:7])
  state = json.loads(json.dumps(batches.get_state()))
  batches.close()
  other = pipeline.training_batches(make_config(num_workers=others))
  other.set_state(state)
  assert_same(take(other, 5), expected[7:])
  other.close()


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_processes_change_nothing(make_config, process_count):
  config = make_config()
  prepared.prepare(config.data, 1)
  expected = take(pipeline.training_batches(config), 10)
  shares = [
    pipeline.training_batches(
      config,
      share=BatchShare(index, process_count),
      num_processes=process_count,
    )
    for index in range(process_count)
  ]
  assert_same(joined([take(share, 10) for share in shares]), expected)


def test_restart_at_every_step(make_config, rows):
  config = make_config()
  steps = 2 * rows // 8 + 3
  expected = take(pipeline.training_batches(config), steps + 2)
  batches = pipeline.training_batches(config)
  for step in range(steps):
    state = json.loads(json.dumps(batches.get_state()))  # has read ahead by now
    assert state["batch"] == step
    other = pipeline.training_batches(config)
    other.set_state(state)
    assert_same(take(other, 2), expected[step : step + 2])
    assert_same([next(batches)], [expected[step]])


def test_an_iterator_goes_back(make_config):
  batches = pipeline.training_batches(make_config())
  state = batches.get_state()
  expected = take(batches, 5)
  batches.set_state(state)
  assert_same(take(batches, 5), expected)


def test_every_epoch_has_every_row_once_in_another_order(make_config, rows):
  config = make_config(batch_size=1)
  keys = row_keys(take(pipeline.training_batches(config), 3 * rows))
  epochs = [keys[start : start + rows] for start in range(0, len(keys), rows)]
  assert len(set(epochs[0])) == rows > 100
  assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_seed_orders_the_rows(make_config, rows):
  orders = [
    row_keys(
      take(
        pipeline.training_batches(make_config(batch_size=1, seed=seed)), rows
      )
    )
    for seed in (0, 1)
  ]
  assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_arrays(make_config):
  batch = next(pipeline.training_batches(make_config()))
  assert {
    key: (value.shape, value.dtype.name, type(value))
    for key, value in batch.items()
  } == {
    key: ((8, 64), "float32" if key == "weights" else "int32", np.ndarray)
    for key in ("tokens", "targets", "segment_ids", "positions", "weights")
  }
  np.testing.assert_array_equal(
    batch["tokens"][:, 1:], batch["targets"][:, :-1]
  )
  assert batch["tokens"].max() == 255
  assert any(
    batch["segment_ids"].max() > 1
    for batch in take(pipeline.training_batches(make_config()), 50)
  )


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"seed": 1}, "config.data.seed was 0 and is 1"),
    ({"batch_size": 4}, "config.train.batch_size"),
    (
      {"length": 32},
      "config.data.length was 64 and is 32; set the fields back",
    ),
    ({"mode": "streamed"}, "config.data.mode"),
  ],
)
def test_a_state_of_other_data_is_refused(make_config, change, field):
  state = pipeline.training_batches(make_config()).get_state()
  with pytest.raises(UserError, match=field):
    pipeline.training_batches(make_config(**change)).set_state(state)


def test_changed_text_is_told_from_changed_fields(make_config, jsonl, tmp_path):
  """No field is named, but the old rows and how to go on with them, which then works."""
  batches = pipeline.training_batches(make_config())
  expected = take(batches, 4)
  first = pipeline.training_batches(make_config())
  take(first, 2)
  state = json.loads(json.dumps(first.get_state()))
  (old,) = prepared.targets(make_config().data)
  jsonl.write_text(jsonl.read_text().replace("document", "Document", 1))
  os.utime(jsonl, (1, 1))  # else the size and the second would be the same
  with pytest.raises(
    UserError,
    match="no field has changed, but the text of 'jsonl:.* has, .*prepared anew in",
  ) as caught:
    pipeline.training_batches(make_config()).set_state(state)
  message = str(caught.value)
  assert (
    f"--config.data.prepared_dir={old.directory}, or start over with another --workdir"
    in message
    and "\n" not in message
  )
  other = pipeline.training_batches(make_config(prepared_dir=old.directory))
  other.set_state(state)
  assert_same(take(other, 2), expected[2:])
  shutil.rmtree(old.directory)
  with pytest.raises(
    UserError,
    match=rf"old rows are no longer in {old.directory}: put the old text back",
  ):
    pipeline.training_batches(make_config()).set_state(state)
  del state["rows"]  # as older versions wrote it
  with pytest.raises(UserError, match="or the text itself, has changed"):
    pipeline.training_batches(make_config()).set_state(state)


def test_changed_text_of_a_mixture(make_config, jsonl, tmp_path):
  """The message's commands give a directory of the old rows, with validation rows of their own."""
  (tmp_path / "b.jsonl").write_text(
    "".join(json.dumps({"text": f"b{index}"}) + "\n" for index in range(500))
  )
  (tmp_path / "v.jsonl").write_text(
    "".join(json.dumps({"text": f"v{index}"}) + "\n" for index in range(50))
  )
  data = {
    "source": f"jsonl:{jsonl}=0.5,jsonl:{tmp_path}/b.jsonl=0.5",
    "validation_source": f"jsonl:{tmp_path}/v.jsonl",
  }
  batches = pipeline.training_batches(make_config(**data))
  state, expected = batches.get_state(), take(batches, 2)
  jsonl.write_text(jsonl.read_text().replace("document", "Document"))
  os.utime(jsonl, (1, 1))
  with pytest.raises(
    UserError, match=f"the text of 'jsonl:{jsonl}' has, "
  ) as caught:
    pipeline.training_batches(make_config(**data)).set_state(state)
  (tmp_path / "DIR").mkdir()
  for link in re.search("in which (.*); or", str(caught.value))[1].split(
    " && "
  ):
    subprocess.run(link.split(), cwd=tmp_path, check=True)
  config = make_config(**data, prepared_dir=str(tmp_path / "DIR"))
  assert all(map(prepared.is_prepared, prepared.targets(config.data)))
  other = pipeline.training_batches(config)
  other.set_state(state)
  assert_same(take(other, 2), expected)
  with pytest.raises(
    UserError, match="the weights in config.data.source have changed"
  ):
    pipeline.training_batches(
      dataclasses.replace(
        config,
        data=dataclasses.replace(
          config.data, source=data["source"].replace("0.5", "0.7", 1)
        ),
      )
    ).set_state(state)


# With context or tensor parallelism, processes may read the same rows.
@pytest.mark.parametrize("share", [BatchShare(0, 2), FULL_SHARE])
def test_several_processes_do_not_prepare(make_config, share):
  with pytest.raises(UserError, match="run python -m diffjax.prepare"):
    pipeline.training_batches(make_config(), share, num_processes=2)


def test_one_process_prepares_and_says_so(make_config, capsys):
  pipeline.training_batches(make_config())
  assert "not prepared yet; preparing them once" in capsys.readouterr().err
  pipeline.training_batches(make_config())
  assert capsys.readouterr().err == ""


def test_opening_rows_writes_nothing(make_config, tmp_path):
  config = make_config(prepared_dir=str(tmp_path / "rows")).data
  targets = prepared.targets(config)
  with pytest.raises(UserError, match="are not prepared"):
    prepared_batches.open_rows(targets, "train", config)
  assert not (tmp_path / "rows").exists()
  prepared.prepare(config, 1)
  before = {path: path.stat() for path in (tmp_path / "rows").iterdir()}
  for split in ("train", "validation"):
    prepared_batches.open_rows(targets, split, config)
  after = {path: path.stat() for path in (tmp_path / "rows").iterdir()}
  assert [status.st_mtime_ns for status in before.values()] == [
    status.st_mtime_ns for status in after.values()
  ]
  assert before.keys() == after.keys()


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_only_workers_mark_flags_as_parsed(make_config, mode):
  was_parsed = flags.FLAGS.is_parsed()
  flags.FLAGS.unparse_flags()
  try:
    batches = pipeline.training_batches(make_config(mode=mode))
    next(batches)
    batches.close()
    assert not flags.FLAGS.is_parsed()
    batches = pipeline.training_batches(make_config(mode=mode, num_workers=1))
    batches.close()
    assert flags.FLAGS.is_parsed()
  finally:
    if was_parsed:
      flags.FLAGS.mark_as_parsed()


def contents_in(directory, monkeypatch, config):
  """Returns the identity of the data for a process that runs in a directory."""
  monkeypatch.chdir(directory)
  batches = pipeline.training_batches(config)
  data_identity = batches.data_identity()
  batches.close()
  return data_identity | pipeline.validation_batches(config, 8).data_identity()


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
@pytest.mark.parametrize("which", ["source", "validation_source"])
def test_contents_tell_other_data(
  make_config, tmp_path, monkeypatch, mode, which
):
  """From copies of the same data in another place and of another time."""
  lines = [json.dumps({"text": f"document {i} " * 9}) for i in range(20)]
  text = "\n".join(lines)
  names = {"source": "train", "validation_source": "held_out"}
  for process in range(3):
    for name in names.values():
      (tmp_path / str(process) / name).mkdir(parents=True)
      for index in range(2):
        path = tmp_path / str(process) / name / f"{index}.jsonl"
        path.write_text(text)
        os.utime(path, (process, process))
  path = tmp_path / "2" / names[which] / "1.jsonl"
  path.write_text(text.replace("document", "Document"))
  config = make_config(
    mode=mode,
    prepared_dir="rows",
    **{field: f"jsonl:{name}/*.jsonl" for field, name in names.items()},
  )
  data_identity = [
    contents_in(tmp_path / str(process), monkeypatch, config)
    for process in range(3)
  ]
  assert data_identity[0] == data_identity[1]
  differing = [
    name
    for name in data_identity[0]
    if data_identity[0][name] != data_identity[2].get(name)
  ]
  assert differing and all(names[which] in name for name in differing)
  path.unlink()
  shutil.rmtree(tmp_path / "2" / "rows", ignore_errors=True)
  fewer = contents_in(tmp_path / "2", monkeypatch, config)
  kind = "training" if which == "source" else "validation"
  spec = f"'jsonl:{names[which]}/*.jsonl'"
  if mode == "prepared":
    name = f"the number of {kind} rows of {spec}"
    assert fewer[name] < data_identity[0][name]
  else:
    name = f"the number of files of {spec}"
    assert (fewer[name], data_identity[0][name]) == (1, 2)


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_processes_must_divide_the_batch(make_config, mode):
  with pytest.raises(UserError, match="config.train.batch_size = 8.*3"):
    pipeline.training_batches(
      make_config(mode=mode), share=BatchShare(0, 3), num_processes=3
    )


# --- Mixtures ---


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_mixtures_have_their_proportions(make_config, tmp_path, mode):
  for letter, count in (
    ("a", 300),
    ("b", 2000),
  ):  # the sizes of the sources do not matter
    (tmp_path / f"{letter}.jsonl").write_text(
      "".join(
        json.dumps({"text": letter * 50 + str(index)}) + "\n"
        for index in range(count)
      )
    )
  config = make_config(
    mode=mode,
    source=f"jsonl:{tmp_path}/a.jsonl=3,jsonl:{tmp_path}/b.jsonl=1",
    batch_size=8,
  )
  batches = take(pipeline.training_batches(config), 50)
  share = np.mean(
    [(batch["tokens"] == ord("a")).any(axis=1).mean() for batch in batches]
  )
  assert abs(share - 0.75) < 0.01
  state = pipeline.training_batches(config)
  take(state, 20)
  other = pipeline.training_batches(config)
  other.set_state(json.loads(json.dumps(state.get_state())))
  assert_same(take(other, 5), batches[20:25])


def test_equal_components_are_shuffled_differently():
  """And training and validation, which have one function, in the same way."""
  rows = list(range(100))
  one, other = [
    list(prepared_batches.mix([rows], [1.0], seed, repeat=False))
    for seed in (3, 4)
  ]
  assert sorted(one) == sorted(other) == rows
  assert one != other
  mixed = prepared_batches.mix([rows, rows], [0.5, 0.5], 3, repeat=False)
  assert list(mixed)[::2] == one
  assert list(mixed)[1::2] == other
  endless = prepared_batches.mix([rows], [1.0], 3, repeat=True)
  first, second = [
    [endless[index] for index in range(start, start + 100)]
    for start in (0, 100)
  ]
  assert first == one
  assert sorted(second) == rows
  assert second != first


def test_mixture_weights_are_part_of_the_state(make_config, tmp_path):
  (tmp_path / "b.jsonl").write_text(
    "".join(json.dumps({"text": f"b{index}"}) + "\n" for index in range(500))
  )
  source = f"{make_config().data.source}=%s,jsonl:{tmp_path}/b.jsonl=0.5"
  state = pipeline.training_batches(
    make_config(source=source % 0.5)
  ).get_state()
  with pytest.raises(UserError, match="config.data.source"):
    pipeline.training_batches(make_config(source=source % 0.25)).set_state(
      state
    )


# --- Streamed ---


# The worker processes of every restart take a second to start: there are fewer of them.
@pytest.mark.parametrize(
  "packing, num_workers, steps",
  [
    ("documents", 0, (0, 1, 17, 38)),
    ("concat", 0, (17,)),
    *full([("concat", 2, (17, 38)), ("documents", 2, (0, 38))]),
  ],
)
def test_streamed_restart(make_config, halves, packing, num_workers, steps):
  config = make_config(
    mode="streamed", packing=packing, num_workers=num_workers, source=halves
  )
  batches = pipeline.training_batches(config)
  states, expected = [], []
  for _ in range(40):
    states.append(json.loads(json.dumps(batches.get_state())))
    expected.append(next(batches))
  other = pipeline.training_batches(config)
  for step in steps:
    other.set_state(states[step])
    assert_same(take(other, 2), expected[step : step + 2])
  batches.close()
  other.close()


@pytest.mark.parametrize(
  "packing, num_workers",
  [("documents", 0), *full([("concat", 0), ("concat", 2), ("documents", 2)])],
)
def test_reading_ahead_does_not_change_a_state(
  make_config, halves, packing, num_workers
):
  """Not even one that has not been copied since Grain returned it."""
  config = make_config(
    mode="streamed", packing=packing, num_workers=num_workers, source=halves
  )
  mixture = streamed_batches.open_sources(config.data, "train")
  dataset = streamed_batches.stream_batches(
    mixture, config, BatchShare(), repeat=True
  )
  iterator = iter(prefetch(dataset, num_workers))
  batches = Reader(iterator, halves, num_workers, timeout=300)
  states = []
  written_states = []
  for _ in range(30):
    state = batches.get_state()
    states.append(state)
    written_states.append(json.dumps(state))
    next(batches)
  batches.close()
  assert [json.dumps(state) for state in states] == written_states
  assert len(set(written_states)) == 30


@pytest.mark.parametrize("packing", ["documents", *full(["concat"])])
def test_streamed_dataset_keeps_grains_contract(make_config, tmp_path, packing):
  lines = [
    json.dumps({"text": "x" * (index % 90)}) + "\n" for index in range(60)
  ]
  for part in range(3):
    (tmp_path / f"part{part}.jsonl").write_text("".join(lines[part::3]))
  config = make_config(
    mode="streamed",
    packing=packing,
    source=f"jsonl:{tmp_path}/part*.jsonl",
    batch_size=2,
  )
  with np.printoptions(threshold=4):  # it formats every batch for its messages
    grain.experimental.assert_equal_output_after_checkpoint(
      pipeline.streamed_dataset(config, repeat=False)
    )


def test_streamed_pass_has_every_document_once(make_config, texts):
  config = make_config(
    mode="streamed", packing="concat", batch_size=1, validation_fraction=0.0
  )
  batches = list(pipeline.streamed_dataset(config, repeat=False))
  stream = b"".join(
    row
    for row in (
      bytes(
        np.append(batch["tokens"], batch["targets"][0, -1]).astype(np.uint8)
      )
      for batch in batches
    )
  )
  assert [part.strip(b"\xff\0") for part in stream.split(b"\xff\xff")] == [
    text.encode() for text in texts
  ]


@pytest.mark.parametrize("seed", range(3))
def test_streamed_processes_read_different_documents(
  make_config, tmp_path, seed
):
  for part in range(8):
    (tmp_path / f"part{part}.jsonl").write_text(
      "".join(json.dumps({"text": f"{part}" * 40}) + "\n" for _ in range(50))
    )
  config = make_config(
    mode="streamed",
    source=f"jsonl:{tmp_path}/part*.jsonl",
    validation_fraction=0.0,
    seed=seed,
  )
  shares = [
    take(
      pipeline.training_batches(
        config, share=BatchShare(index, 2), num_processes=2
      ),
      45,
    )
    for index in range(2)
  ]
  assert all(
    batch["tokens"].shape == (4, 64) for share in shares for batch in share
  )
  seen = [
    set(np.unique([batch["tokens"] for batch in share])) - {0, 255}
    for share in shares
  ]
  assert len(seen[0]) == len(seen[1]) == 4 and not seen[0] & seen[1], seen


@pytest.fixture
def row_groups(tmp_path):
  """A Parquet file with as many row groups as one of FineWeb-Edu.

  Each row group has one document, its number in four digits.
  """
  path = tmp_path / "one.parquet"
  texts = [f"{index:04}" for index in range(727)]
  table = pyarrow.table({"text": texts})
  pyarrow.parquet.write_table(table, path, row_group_size=1)
  return f"parquet:{path}"


def test_processes_and_workers_share_the_row_groups_of_one_file(row_groups):
  """16 processes with 4 workers each read all of them once an epoch."""
  # A row is exactly one document with its two separators.
  config = DataConfig(
    source=row_groups,
    validation_fraction=0.0,
    packing="concat",
    length=5,
    mode="streamed",
    num_workers=4,
  )
  opened = streamed_batches.open_sources(config, "train")
  epochs = [[], []]
  for index in range(16):
    rows = streamed_batches.stream_rows(
      opened, config, BatchShare(index, 16), repeat=True
    )
    # Threads get their shares in the same way as worker processes.
    shared = grain.experimental.multithread_prefetch(
      rows, num_threads=4, buffer_size=1
    )
    num_parts = len(range(index, 727, 16))
    assert num_parts >= 4
    iterator = iter(shared)
    for epoch in epochs:
      for row in take(iterator, num_parts):
        epoch.append(bytes(row.tokens[1:-1].astype(np.uint8)).decode())
    iterator.close()
  everything = [f"{index:04}" for index in range(727)]
  assert sorted(epochs[0]) == everything
  assert sorted(epochs[1]) == everything
  assert epochs[0] != epochs[1], "each epoch has an order of its own"


def test_more_workers_than_parts_are_refused(row_groups):
  config = Config(
    data=DataConfig(source=row_groups, mode="streamed", num_workers=46),
    train=TrainConfig(batch_size=16),
  )
  with pytest.raises(UserError) as caught:
    pipeline.streamed_dataset(config, BatchShare(0, 16))
  message = str(caught.value)
  assert "727 parts" in message
  assert "16 shares that the processes read with 46 workers each" in message
  assert "config.data.num_workers to at most 45" in message
  data = dataclasses.replace(config.data, num_workers=45)
  config = dataclasses.replace(config, data=data)
  pipeline.streamed_dataset(config, BatchShare(0, 16))


_EPOCH_DOCUMENTS = 2  # of each file


def documents_by_epoch(config, opened, num_processes, num_epochs):
  """Returns the documents that all readers together read, by epoch.

  A row is exactly one document, whose first character names its source. Readers
  take turns. So the turn of a row tells its reader, and the number of rows that
  this reader had of the source before tells their part and epoch.
  """
  num_parts = {
    name: len(source.parts)
    for name, source in zip("abc", opened.sources, strict=False)
  }
  num_readers = max(1, config.num_workers)
  largest = max(num_parts.values())
  # Enough for the slowest source of a mixture of equal weights.
  num_rows = (
    (largest + num_readers)
    * _EPOCH_DOCUMENTS
    * num_epochs
    * len(opened.sources)
  )
  epochs = [collections.Counter() for _ in range(num_epochs)]
  for process in range(num_processes):
    rows = streamed_batches.stream_rows(
      opened, config, BatchShare(process, num_processes), repeat=True
    )
    # Threads get their shares in the same way as worker processes.
    shared = grain.experimental.multithread_prefetch(
      rows, num_threads=config.num_workers, buffer_size=1
    )
    taken = collections.Counter()
    iterator = iter(shared)
    for turn, row in enumerate(take(iterator, num_rows)):
      document = bytes(row.tokens[1:-1].astype(np.uint8)).decode()
      name, reader = document[0], turn % num_readers
      part = taken[name, reader] // _EPOCH_DOCUMENTS
      taken[name, reader] += 1
      place = reader + part * num_readers
      epoch = place // len(range(process, num_parts[name], num_processes))
      if epoch < num_epochs:
        epochs[epoch][document] += 1
    iterator.close()
  return epochs


def test_every_document_is_read_once_an_epoch(tmp_path):
  """By all processes and workers together, or the error names what works."""
  num_readable = num_refused = 0
  for num_files in (1, 3, 5):
    for number in range(num_files):
      for name in "ab":
        lines = [
          json.dumps({"text": f"{name}{number}-{index}"}) + "\n"
          for index in range(_EPOCH_DOCUMENTS)
        ]
        path = tmp_path / f"{name}{num_files}" / f"{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines))
  for files_of_a, files_of_b, num_processes, num_workers in itertools.product(
    (1, 3, 5), (0, 3), (1, 2), (0, 2, 4)
  ):
    case = (files_of_a, files_of_b, num_processes, num_workers)
    source = f"jsonl:{tmp_path}/a{files_of_a}/*.jsonl"
    num_parts = files_of_a
    if files_of_b:
      source += f"=0.5,jsonl:{tmp_path}/b{files_of_b}/*.jsonl=0.5"
      num_parts = min(files_of_a, files_of_b)
    config = DataConfig(
      source=source,
      validation_fraction=0.0,
      packing="concat",
      length=5,
      mode="streamed",
      num_workers=num_workers,
    )
    opened = streamed_batches.open_sources(config, "train")
    share = BatchShare(0, num_processes)
    if num_processes * max(1, num_workers) > num_parts:
      with pytest.raises(UserError) as caught:
        streamed_batches.stream_rows(opened, config, share, repeat=True)
      if num_processes <= num_parts:
        works = num_parts // num_processes
        assert f"num_workers to at most {works}," in str(caught.value), case
        config = dataclasses.replace(config, num_workers=works)
        streamed_batches.stream_rows(opened, config, share, repeat=True)
      num_refused += 1
      continue
    expected = {
      f"{name}{number}-{index}": 1
      for name, num_files in (("a", files_of_a), ("b", files_of_b))
      for number in range(num_files)
      for index in range(_EPOCH_DOCUMENTS)
    }
    for epoch in documents_by_epoch(config, opened, num_processes, 2):
      assert epoch == expected, case
    num_readable += 1
  assert num_readable > 10 and num_refused > 10, "both have been tested"


def test_processes_share_a_streamed_pass(make_config, halves, texts):
  config = make_config(
    mode="streamed",
    source=halves,
    packing="concat",
    batch_size=2,
    validation_fraction=0.0,
  )
  seen = []
  for index in range(2):
    dataset = pipeline.streamed_dataset(
      config, BatchShare(index, 2), repeat=False
    )
    stream = b"".join(
      np.append(batch["tokens"], batch["targets"][0, -1])
      .astype(np.uint8)
      .tobytes()
      for batch in dataset
    )
    seen += [part.strip(b"\xff\0") for part in stream.split(b"\xff\xff")]
  assert seen == [text.encode() for text in texts]


def test_streamed_resume_with_other_workers_or_processes_is_refused(
  make_config, tmp_path, jsonl
):
  (tmp_path / "documents2.jsonl").write_text(jsonl.read_text())
  source = f"jsonl:{tmp_path}/documents*.jsonl"
  state = pipeline.training_batches(
    make_config(mode="streamed", source=source)
  ).get_state()
  with pytest.raises(UserError, match="config.data.num_workers was 0 and is 2"):
    pipeline.training_batches(
      make_config(mode="streamed", source=source, num_workers=2)
    ).set_state(state)
  with pytest.raises(
    UserError, match="number of shares that the processes read was 1 and is 2"
  ):
    pipeline.training_batches(
      make_config(mode="streamed", source=source),
      share=BatchShare(0, 2),
      num_processes=2,
    ).set_state(state)
  with pytest.raises(UserError, match="version of Grain"):
    pipeline.training_batches(
      make_config(mode="streamed", source=source)
    ).set_state({**state, "grain": "0.0"})
  with pytest.raises(UserError, match="field of config.data has changed"):
    pipeline.training_batches(
      make_config(mode="streamed", source=source, seed=1)
    ).set_state(state)


@pytest.mark.parametrize(
  "change", ["added", "renamed", "longer", "beginning", "end"]
)
def test_streamed_resume_in_changed_files_is_refused(
  make_config, tmp_path, jsonl, change
):
  jsonl.rename(path := tmp_path / "a.jsonl")
  batches = pipeline.training_batches(
    make_config(mode="streamed", source=f"jsonl:{tmp_path}/*.jsonl")
  )
  take(batches, 2)
  state, text = json.loads(json.dumps(batches.get_state())), path.read_bytes()
  before = path.stat()
  match change:
    case "added":
      (tmp_path / "b.jsonl").write_bytes(text)
    case "renamed":
      path.rename(tmp_path / "b.jsonl")
    case "longer":
      path.write_bytes(text + b'{"text": "more"}\n')
    case "beginning":
      path.write_bytes(text.replace(b"document", b"Document", 1))
    case "end":
      path.write_bytes(text[:-4] + b"!" + text[-3:])
  if change in ("beginning", "end"):  # not even the time tells
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
  what = "text" if change in ("beginning", "end") else "names and sizes"
  with pytest.raises(
    UserError,
    match=rf"the {what} of the files of 'jsonl:.*' changed since.*--workdir",
  ) as caught:
    pipeline.training_batches(
      make_config(mode="streamed", source=f"jsonl:{tmp_path}/*.jsonl")
    ).set_state(state)
  assert "\n" not in str(caught.value)


def test_streamed_resume_says_what_it_cannot_check(make_config, jsonl, capsys):
  config = make_config(mode="streamed")
  batches = pipeline.training_batches(config)
  expected = take(batches, 2)
  state = json.loads(json.dumps(pipeline.training_batches(config).get_state()))

  def resumed(state):
    batches = pipeline.training_batches(config)
    batches.set_state(state)
    assert_same(take(batches, 2), expected)
    return capsys.readouterr().err

  assert resumed(state) == ""
  time = jsonl.stat().st_mtime_ns
  second = time // 10**9 * 10**9
  within = second + (time + 1) % 10**9
  os.utime(jsonl, ns=(within, within))
  assert "have other times than at this checkpoint" in resumed(state)
  for fingerprint in state["files"].values():
    del fingerprint["nanoseconds"]  # as older versions wrote it
  assert resumed(state) == ""
  os.utime(jsonl, (1, 1))
  assert "have other times than at this checkpoint" in resumed(state)
  del state["files"]  # as older versions wrote it
  assert (
    "did not record which files it read; the files are not checked for changes"
    in resumed(state)
  )


def test_a_fingerprint_reads_little(tmp_path, monkeypatch):
  """However many files there are."""
  for index in range(200):
    (tmp_path / f"{index:03}.txt").write_text(f"{index}" * 5000)
  source, opened = (
    sources.documents(f"text:{tmp_path}/*.txt", "train", DataConfig()),
    [],
  )
  path_class = type(files.epath.Path(tmp_path))
  real = path_class.open
  monkeypatch.setattr(
    path_class,
    "open",
    lambda self, *args, **kwargs: (
      opened.append(self) or real(self, *args, **kwargs)
    ),
  )
  source.fingerprint()
  assert len(set(opened)) == 32 and {"000.txt", "199.txt"} <= {
    path.name for path in opened
  }


def test_streamed_needs_a_part_a_process(make_config):
  with pytest.raises(UserError, match="has 1 parts.*fewer than the 2 shares"):
    pipeline.training_batches(
      make_config(mode="streamed"), share=BatchShare(0, 2), num_processes=2
    )


def test_streaming_nothing_does_not_run_for_ever(make_config):
  with pytest.raises(UserError, match="empty: no document to train on"):
    next(
      pipeline.training_batches(
        make_config(mode="streamed", validation_fraction=1.0)
      )
    )


# --- Damage ---


@pytest.mark.parametrize(
  "mode, num_workers",
  [("prepared", 0), ("streamed", 0), *full([("prepared", 2), ("streamed", 2)])],
)
def test_damage_arrives_as_one_line(
  make_config, halves, tmp_path, mode, num_workers
):
  """The error names file and place, also if a worker process reads."""
  config = make_config(mode=mode, num_workers=num_workers, source=halves)
  if mode == "prepared":
    (target,) = prepared.prepare(config.data, 1)
    path, _ = pathlib.Path(target.directory).glob("train*.array_record")
    path.write_bytes(path.read_bytes()[: 1 << 14])
    message = rf"{path}: row \d+ cannot be read"
  else:
    path = tmp_path / "half1.jsonl"
    with path.open("a") as file:
      file.write('{"text": 5}\n')
    message = rf"{path}:151: .*text_field"
  batches = pipeline.training_batches(config)
  with pytest.raises(UserError, match=message) as caught:
    take(batches, 500)
  assert type(caught.value) is UserError and "\n" not in str(caught.value)
  batches.close()


# --- Validation ---


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
@pytest.mark.parametrize("eval_rows", [-1, 5, 16])
def test_validation(make_config, mode, eval_rows):
  config = make_config(mode=mode, eval_rows=eval_rows)
  everything = pipeline.validation_batches(make_config(mode=mode), 1)
  batches = pipeline.validation_batches(config, 4)
  count = min(eval_rows, everything.rows) if eval_rows >= 0 else everything.rows
  first, again = list(batches), list(batches)
  assert_same(first, again)
  assert (
    batches.rows == count
    and len(first) == len(batches) == -(-count // 4)
    and everything.rows > 16
  )
  assert all(batch["tokens"].shape == (4, 64) for batch in first)
  assert row_keys(first)[:count] == row_keys(everything)[:count]
  padding = np.concatenate([batch["segment_ids"] for batch in first])[count:]
  assert (
    not padding.any()
    and not np.concatenate([batch["weights"] for batch in first])[count:].any()
  )
  shares = [
    list(
      pipeline.validation_batches(
        config, 4, share=BatchShare(index, 2), num_processes=2
      )
    )
    for index in range(2)
  ]
  assert_same(joined(shares), first)
  assert_same(
    list(
      pipeline.validation_batches(
        dataclasses.replace(
          config, data=dataclasses.replace(config.data, seed=9)
        ),
        4,
      )
    ),
    first,
  )


def test_validation_shares_nothing_with_training(make_config, rows):
  train = set(
    row_keys(take(pipeline.training_batches(make_config(batch_size=1)), rows))
  )
  validation = row_keys(pipeline.validation_batches(make_config(), 1))
  assert validation and not train & set(validation)


def test_few_validation_rows_are_of_many_documents(make_config, tmp_path):
  (tmp_path / "v.jsonl").write_text(
    "".join(
      json.dumps({"text": chr(65 + index) * 1000}) + "\n" for index in range(20)
    )
  )
  config = make_config(
    validation_source=f"jsonl:{tmp_path}/v.jsonl", eval_rows=16
  )
  documents = {
    letter
    for batch in pipeline.validation_batches(config, 8)
    for letter in np.unique(batch["tokens"])
    if 65 <= letter < 85
  }
  assert len(documents) > 8


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_no_validation_documents(make_config, mode):
  with pytest.raises(UserError, match="config.data.validation_fraction = 0.0"):
    pipeline.validation_batches(
      make_config(mode=mode, validation_fraction=0.0), 4
    )
  with pytest.raises(UserError, match="divisible by 3, the number of shares"):
    pipeline.validation_batches(
      make_config(mode=mode), 4, share=BatchShare(0, 3), num_processes=3
    )


# --- Imports ---


def test_tensorflow_is_never_imported(jsonl, tmp_path):
  for index in range(100):  # a library, for the default source
    (tmp_path / f"module{index}.py").write_text(f"x = {index}\n" * 50)
  code = f"""
import sys, sysconfig
sysconfig.get_path = lambda name: {str(tmp_path)!r}
if __name__ == "__main__":
  from diffjax.config import Config, DataConfig
  from diffjax.data import pipeline
  heavy = [name for name in ("tensorflow_datasets", "pyarrow", "tokenizers", "tiktoken", "rustbpe") if name in sys.modules]
  assert not heavy, heavy
  for data in (DataConfig(), DataConfig(source="jsonl:{jsonl}", mode="streamed")):
    next(pipeline.training_batches(Config(data=data)))
    assert pipeline.validation_batches(Config(data=data), 4).rows
  assert "tensorflow_datasets" in sys.modules
  assert not [name for name in sys.modules if name.split(".")[0] in ("tensorflow", "tensorflow_text", "torch")]
"""
  subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
