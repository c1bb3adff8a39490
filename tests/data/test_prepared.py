"""Prepared rows are the same bytes however they were made, and are never mistaken for others."""

import dataclasses
import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import (
  file_source,
  pipeline,
  prepared,
  shards,
  tfds_source,
)
from diffjax.data.row import Row, decode_row, encode_row
from diffjax.host import progress
from tests.harness.tiers import full


def rows_of(config, split="train"):
  target = next(
    target for target in prepared.prepare(config, 1) if split in target.splits
  )
  source = prepared.PreparedRows(target, split)
  return [source[index] for index in range(len(source))]


def content(directory):
  return {
    name: (pathlib.Path(directory) / name).read_bytes()
    for name in sorted(os.listdir(directory))
  }


@pytest.fixture
def many_files(tmp_path):
  """7 MB of text in 12 files: as many parts and shards, enough to be killed half-way."""
  directory = tmp_path / "texts"
  directory.mkdir()
  rng = np.random.default_rng(0)
  for index in range(12):
    (directory / f"{index:02}.txt").write_bytes(
      rng.integers(32, 127, 550_000, dtype=np.uint8).tobytes()
    )
  return directory


@pytest.mark.parametrize("kind", ["documents", "concat"])
def test_rows_hold_every_document_once(make_config, texts, kind):
  config = make_config(packing=kind).data
  found = []
  for split in ("train", "validation"):
    stream = np.concatenate([row.tokens for row in rows_of(config, split)])
    if kind == "documents":  # pieces of a document may lie in different rows
      found += [bytes(stream[stream != 255].astype(np.uint8))]
    else:
      found += [
        bytes(part)
        for part in bytes(stream.astype(np.uint8)).split(b"\xff\xff")
      ]
  if kind == "concat":
    assert sorted(part.strip(b"\xff") for part in found) == sorted(
      text.encode() for text in texts
    )
  else:
    assert sorted(b"".join(found)) == sorted("".join(texts).encode())


def test_meta_counts(make_config, texts):
  config = make_config().data
  (target,) = prepared.prepare(config, 1)
  with open(os.path.join(target.directory, "meta.json")) as file:
    meta = json.load(file)
  splits = meta["splits"].values()
  assert sum(split["documents"] for split in splits) == len(texts)
  assert sum(split["bytes"] for split in splits) == sum(
    len(text.encode()) for text in texts
  )
  assert sum(split["tokens"] for split in splits) == sum(
    len(text.encode()) + 2 for text in texts
  )
  for name, split in meta["splits"].items():
    rows = rows_of(config, name)
    assert split["rows"] == len(rows) and split["tokens"] == sum(
      len(row.tokens) for row in rows
    )
  assert (
    meta["description"]["length"] == config.length
    and meta["tokenizer_spec"] == "bytes"
  )


@pytest.mark.full
def test_the_number_of_workers_changes_nothing(many_files, tmp_path):
  directories = []
  for workers in (1, 3):
    directories.append(tmp_path / f"workers{workers}")
    prepared.prepare(
      DataConfig(
        source=f"text:{many_files}/0[0-3].txt",
        length=256,
        prepared_dir=str(directories[-1]),
      ),
      workers,
    )
  assert content(directories[0]) == content(directories[1])


@pytest.mark.parametrize("how", ["file", "standard input"])
def test_a_script_needs_no_guard(many_files, tmp_path, how):
  """Workers do not run the caller's main module again."""
  code = (
    "from diffjax.config import DataConfig\nfrom diffjax.data import prepared\nprint('once')\n"
    f"prepared.prepare(DataConfig(source='text:{many_files}/0[0-3].txt', length=256, prepared_dir='{tmp_path}/rows'), 2)\n"
  )
  (tmp_path / "script.py").write_text(code)
  arguments, piped = (
    ([tmp_path / "script.py"], None) if how == "file" else (["-"], code)
  )
  environment = os.environ | {
    "PYTHONPATH": str(pathlib.Path(__file__).parents[2])
  }
  result = subprocess.run(
    [sys.executable, *arguments],
    input=piped,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (
    result.returncode == 0
    and result.stdout == "once\n"
    and "with 2 workers" in result.stderr
  ), result.stderr


@pytest.fixture
def one_file(tmp_path):
  """2.4 MB of text in a Parquet file of 12 row groups, which are the parts."""
  path = tmp_path / "one.parquet"
  rng = np.random.default_rng(0)
  texts = [rng.bytes(1000).hex() for _ in range(1200)]
  table = pyarrow.table({"text": texts})
  pyarrow.parquet.write_table(table, path, row_group_size=100)
  return path


@pytest.mark.parametrize(
  "kind, workers", [("parquet", 2), *full([("text", 1), ("text", 2)])]
)
def test_killed_and_started_again(
  many_files, one_file, tmp_path, kind, workers
):
  sources = {
    "text": f"text:{many_files}/*.txt",
    "parquet": f"parquet:{one_file}",
  }
  spec, directory = sources[kind], tmp_path / "killed"
  code = (
    "from diffjax.config import DataConfig\nfrom diffjax.data import prepared\nif __name__ == '__main__':\n"
    f"  prepared.prepare(DataConfig(source={spec!r}, length=256, prepared_dir={str(directory)!r}), {workers})\n"
  )
  script = tmp_path / "script.py"
  script.write_text(code)
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  process = subprocess.Popen(
    [sys.executable, script], env=environment, start_new_session=True
  )
  deadline = time.monotonic() + 60
  while len(list(directory.glob("train-*.array_record"))) < 2:
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.005)
  os.kill(process.pid, signal.SIGKILL)
  process.wait()
  while time.monotonic() < deadline:  # its workers leave by themselves
    try:
      os.killpg(process.pid, 0)
      time.sleep(0.05)
    except ProcessLookupError:
      break
  else:
    pytest.fail("workers outlived their parent")

  config = DataConfig(source=spec, length=256, prepared_dir=str(directory))
  (target,) = prepared.targets(config)
  assert not prepared.is_prepared(target), "killed too late to test anything"
  with pytest.raises(UserError, match="not prepared.*diffjax.prepare"):
    prepared.PreparedRows(target, "train")
  before = {path: path.stat() for path in directory.glob("*.array_record")}
  prepared.prepare(config, workers)
  for path, stat in before.items():
    now = path.stat()
    is_same = (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert is_same, "whole shards are not written again"
  whole = tmp_path / "whole"
  prepared.prepare(dataclasses.replace(config, prepared_dir=str(whole)), 1)
  assert content(directory) == content(whole)


def test_what_others_are_writing_stays(tmp_path, monkeypatch):
  """Files of a killed process of this host are removed; those of a live one, or of another host, stay."""
  dead = subprocess.Popen([sys.executable, "-c", ""])
  dead.wait()
  files = {}
  for host, pid in (
    ("here", dead.pid),
    ("here", os.getpid()),
    ("there.example", dead.pid),
  ):
    monkeypatch.setattr(shards.socket, "gethostname", lambda host=host: host)
    monkeypatch.setattr(prepared.os, "getpid", lambda pid=pid: pid)
    files[host, pid] = f"{tmp_path}/meta.json{shards.temporary_suffix()}"
    open(files[host, pid], "w").close()
  monkeypatch.setattr(shards.socket, "gethostname", lambda: "here")
  shards.remove_leftovers(str(tmp_path))
  assert (
    not os.path.exists(files.pop(("here", dead.pid)))
    and len(files) == 2
    and all(map(os.path.exists, files.values()))
  )


def test_a_second_time_nothing_is_written(make_config, capsys):
  config = make_config().data
  (target,) = prepared.prepare(config, 1)
  before = {
    entry.name: entry.stat().st_mtime_ns
    for entry in os.scandir(target.directory)
  }
  capsys.readouterr()
  prepared.prepare(config, 1)
  assert "already prepared" in capsys.readouterr().err
  assert {
    entry.name: entry.stat().st_mtime_ns
    for entry in os.scandir(target.directory)
  } == before


def test_the_cache_keeps_different_rows_apart(make_config, jsonl):
  """Every field that changes the rows, and the files themselves, choose another directory."""
  changes = [
    {},
    {"length": 32},
    {"packing": "concat"},
    {"validation_fraction": 0.2},
    {"validation_source": f"jsonl:{jsonl}"},
    {"text_field": "id"},
  ]
  directories = [
    prepared.targets(make_config(**change).data)[0].directory
    for change in changes
  ]
  os.utime(jsonl, (1, 1))
  directories.append(prepared.targets(make_config().data)[0].directory)
  assert len(set(directories)) == len(directories)
  assert (
    prepared.targets(make_config(seed=5, num_workers=3).data)[0].directory
    == directories[-1]
  )


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("length", 32),
    ("packing", "concat"),
    ("validation_fraction", 0.3),
    ("source", "stdlib"),
    ("tokenizer", "tiktoken"),
  ],
)
def test_a_directory_of_other_rows_is_refused(
  make_config, tmp_path, field, value
):
  config = dataclasses.replace(
    make_config().data, prepared_dir=str(tmp_path / "rows")
  )
  prepared.prepare(config, 1)
  if value == "tiktoken":
    from diffjax.data import tokenizer_training

    value = str(tokenizer_training.train_tokenizer(["aab"] * 9, 258, tmp_path))
  other = dataclasses.replace(config, **{field: value})
  for use in (
    prepared.prepare,
    lambda config: prepared.is_prepared(prepared.targets(config)[0]),
  ):
    with pytest.raises(
      UserError,
      match=rf"prepared_dir.*rows holds other rows: config.data.{field} \(there",
    ) as caught:
      use(other)
    assert str(caught.value).count("(there") == 1, (
      "only the field that differs is named"
    )


def test_files_that_changed_are_noticed(make_config, jsonl, tmp_path):
  config = dataclasses.replace(
    make_config().data, prepared_dir=str(tmp_path / "rows")
  )
  prepared.prepare(config, 1)
  with jsonl.open("a") as file:
    file.write('{"text": "more"}\n')
  with pytest.raises(UserError, match="held other files"):
    prepared.prepare(config, 1)
  assert prepared.is_prepared(prepared.targets(config)[0]), (
    "but rows serve without the files that they were made of"
  )


@pytest.mark.parametrize("is_time_kept", [False, True])
def test_text_rewritten_within_a_second_is_not_prepared(
  make_config, jsonl, tmp_path, is_time_kept
):
  """At the same size. If a tool keeps the time too, the text tells."""
  second = 1_700_000_000 * 10**9
  os.utime(jsonl, ns=(second, second))
  chosen = make_config(prepared_dir=str(tmp_path / "rows")).data
  prepared.prepare(chosen, 1)
  cached = make_config().data
  (before,) = prepared.prepare(cached, 1)
  jsonl.write_text(jsonl.read_text().replace("document", "Document"))
  time = second if is_time_kept else second + 1
  os.utime(jsonl, ns=(time, time))
  (after,) = prepared.targets(cached)
  assert after.directory != before.directory
  assert not prepared.is_prepared(after)
  with pytest.raises(UserError, match="held other files.*times or text"):
    prepared.prepare(chosen, 1)


def test_training_says_that_rows_are_of_other_text(
  make_config, jsonl, tmp_path, capsys
):
  """Rows in a directory that the config names."""
  config = make_config(prepared_dir=str(tmp_path / "rows"))
  pipeline.training_batches(config).close()
  text = jsonl.read_text()
  # A copy of the files, or none, serves.
  os.utime(jsonl, (1_700_000_000, 1_700_000_000))
  pipeline.training_batches(config).close()
  jsonl.rename(tmp_path / "away")
  pipeline.training_batches(config).close()
  assert "warning" not in capsys.readouterr().err
  for changed in (text + text, text.replace("document", "Document")):
    jsonl.write_text(changed)
    for open_rows in (
      pipeline.training_batches,
      lambda config: pipeline.validation_batches(config, 4),
    ):
      open_rows(config)
      assert "prepared before the" in capsys.readouterr().err


def test_rows_of_an_earlier_version_stay_prepared(
  make_config, jsonl, tmp_path, monkeypatch, capsys
):
  configs = [
    make_config().data,
    make_config(prepared_dir=str(tmp_path / "rows")).data,
  ]
  earlier = []
  with monkeypatch.context() as patch:
    for kind in (file_source.FileSource, tfds_source.TfdsSource):
      patch.setattr(kind, "identity", kind.earlier_identity)
    for config in configs:
      earlier += prepared.prepare(config, 1)
  capsys.readouterr()
  now = []
  for config in configs:
    now += prepared.prepare(config, 1)
  assert now == earlier
  assert capsys.readouterr().err.count("already prepared") == 2
  os.utime(jsonl, (1, 1))
  (after,) = prepared.targets(configs[0])
  assert after.directory != earlier[0].directory
  with pytest.raises(UserError, match="held other files"):
    prepared.prepare(configs[1], 1)


def test_documents_that_are_not_utf8_are_counted(tmp_path, capsys):
  for index in range(20):
    (tmp_path / f"{index}.txt").write_bytes(b"caf\xe9" * index + b"%d" % index)
  config = DataConfig(
    source=f"text:{tmp_path}/*.txt", length=32, validation_fraction=0.0
  )
  rows = rows_of(config)
  assert "19 documents were not UTF-8" in capsys.readouterr().err
  stored = np.concatenate([row.tokens for row in rows])
  assert np.count_nonzero(stored == "�".encode()[0]) == sum(range(20))


def test_nothing_to_train_on(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
  with pytest.raises(UserError, match="empty: no document to train on"):
    prepared.prepare(DataConfig(source=f"jsonl:{tmp_path}/a.jsonl"), 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_document_stops_with_its_place(tmp_path, workers):
  for index in range(4):
    (tmp_path / f"{index}.jsonl").write_text(
      '{"text": "fine"}\n' * 50 + ("oops\n" if index == 2 else "")
    )
  directory = tmp_path / "rows"
  config = DataConfig(
    source=f"jsonl:{tmp_path}/*.jsonl", prepared_dir=str(directory)
  )
  with pytest.raises(UserError, match="2.jsonl:51: not JSON"):
    prepared.prepare(config, workers)
  assert list(directory.glob("*.array_record"))
  assert not list(directory.glob("*.tmp")), "incomplete files are removed"


def test_a_place_that_cannot_be_written(make_config, tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match="cannot write prepared rows"):
    prepared.prepare(
      dataclasses.replace(
        make_config().data, prepared_dir=str(tmp_path / "file" / "rows")
      ),
      1,
    )
  with pytest.raises(UserError, match="must be a local path"):
    prepared.targets(
      dataclasses.replace(make_config().data, prepared_dir="gs://bucket/rows")
    )


def test_damage_is_named(make_config):
  config = make_config().data
  (target,) = prepared.prepare(config, 1)
  rows = prepared.PreparedRows(target, "train")
  path = next(
    name
    for name in sorted(os.listdir(target.directory))
    if name.startswith("train") and name.endswith("array_record")
  )
  os.remove(os.path.join(target.directory, path))
  with pytest.raises(UserError, match=rf"{path}: row 3 cannot be read"):
    rows[3]
  with open(os.path.join(target.directory, "meta.json"), "w") as file:
    file.write("{")
  with pytest.raises(UserError, match="meta.json: cannot be read"):
    prepared.is_prepared(target)


def test_damaged_files_are_written_again_as_the_message_says(make_config):
  """ "Delete this file and its directory's meta.json": the totals beside the file do not count as the file."""
  config = make_config().data
  (target,) = prepared.prepare(config, 1)
  before = content(target.directory)
  (first, *_) = (
    name
    for name in before
    if name.startswith("train") and name.endswith("array_record")
  )
  for name in (first, "meta.json"):
    os.remove(os.path.join(target.directory, name))
  prepared.prepare(config, 1)
  assert content(target.directory) == before


def test_a_flipped_bit_never_gives_other_rows(make_config):
  """ArrayRecord's blocks carry hashes; meta.json's counts must agree, and its fingerprint is compared on resuming."""
  (target,) = prepared.prepare(make_config().data, 1)

  def rows():
    source = prepared.PreparedRows(target, "train")
    return source.fingerprint, [
      (row.tokens.tobytes(), row.segment_lengths.tobytes())
      for row in map(source.__getitem__, range(len(source)))
    ]

  fingerprint, expected = rows()
  rng = np.random.default_rng(0)
  for name in (
    next(
      name
      for name in sorted(os.listdir(target.directory))
      if name.startswith("train") and name.endswith("record")
    ),
    "meta.json",
  ):
    path = os.path.join(target.directory, name)
    with open(path, "rb") as file:
      whole = file.read()
    used = len(whole.rstrip(b"\0"))
    messages = []
    for _ in range(50):
      damaged = bytearray(whole)
      damaged[rng.integers(used)] ^= 1 << rng.integers(8)
      with open(path, "wb") as file:
        file.write(damaged)
      try:
        found = rows()
        assert found[1] == expected or found[0] != fingerprint
      except UserError as error:
        messages.append(str(error))
    assert len(messages) > 10 and all(
      target.directory in message and "\n" not in message
      for message in messages
    )
    with open(path, "wb") as file:
      file.write(whole)
  meta = json.loads(whole)
  meta["splits"]["train"]["shard_rows"][0] -= 1
  with open(path, "w") as file:
    json.dump(meta, file)
  with pytest.raises(
    UserError,
    match="meta.json: cannot be read .its counts of train rows do not agree",
  ):
    rows()


def test_the_fingerprint_is_of_the_rows(make_config, jsonl, tmp_path):
  """A replaced file gives rows of the same description, and a resumed run must tell them from the rows before."""
  config = dataclasses.replace(
    make_config().data, prepared_dir=str(tmp_path / "rows")
  )
  (target,) = prepared.targets(config)

  def fingerprints():
    shutil.rmtree(target.directory, ignore_errors=True)
    prepared.prepare(config, 1)
    return [
      prepared.PreparedRows(target, split).fingerprint
      for split in ("train", "validation")
    ]

  before = fingerprints()
  assert fingerprints() == before
  jsonl.write_text(jsonl.read_text().replace("document", "Document"))
  assert not set(fingerprints()) & set(before)


def test_mixtures_are_prepared_apart(make_config, tmp_path):
  (tmp_path / "other.jsonl").write_text('{"text": "other"}\n' * 500)
  single = make_config(prepared_dir=str(tmp_path / "rows")).data
  mixed = dataclasses.replace(
    single, source=f"{single.source}=0.5,jsonl:{tmp_path}/other.jsonl=0.5"
  )
  first = [target.directory for target in prepared.prepare(mixed, 1)]
  again = [
    target.directory
    for target in prepared.prepare(
      dataclasses.replace(mixed, source=mixed.source.replace("0.5", "0.1")), 1
    )
  ]
  assert (
    first == again
    and len(set(first)) == 2
    and all(str(tmp_path / "rows") in directory for directory in first)
  )


def test_large_vocabularies_are_stored_whole():
  row = Row(
    np.array([0, 100_256, 65_536], np.int32),
    np.array([3], np.int32),
    np.zeros(1, np.int32),
  )
  np.testing.assert_array_equal(
    decode_row(encode_row(row, 100_277, False)).tokens, row.tokens
  )


def test_progress_is_lines_where_there_is_no_terminal():
  """The first one comes soon, and the next ones come also while nothing is reported."""
  said = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(progress, "say", said.append)
    with progress.Progress(
      "preparing x", 10, first=0.01, interval=0.02
    ) as shown:
      wait_for(lambda: said)
      shown.update(2.5, 2_000_000)
      before = len(said)
      wait_for(lambda: len(said) > before + 2)
  # Speed and time left are unknown until something is done.
  assert said[0] == "preparing x: 0.0%, 0:00:00 so far"
  assert re.fullmatch(
    r"preparing x: 25\.0%, 2M tokens, \d+(\.\d+)?[MG] tokens/s, 0:00:0\d left",
    said[-1],
  )


def test_progress_counts_days(monkeypatch):
  clock = iter([0.0, 100_000.0, 100_000.0])
  monkeypatch.setattr(progress.time, "monotonic", clock.__next__)
  shown = progress.Progress("preparing x", 10)
  shown.update(5, 1000)
  assert shown.line() == (
    "preparing x: 50.0%, 1K tokens, 0.01 tokens/s, 1 day, 3:46:40 left"
  )


def wait_for(condition):
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


@pytest.mark.parametrize("workers", [1, *full([2])])
def test_progress_moves_within_a_compressed_file(
  tmp_path, monkeypatch, workers
):
  """A file is one part, which a few percent at a time add up to."""
  updates = []
  monkeypatch.setattr(
    progress.Progress,
    "update",
    lambda self, parts, tokens: updates.append(parts),
  )
  monkeypatch.setattr(
    gzip, "READ_BUFFER_SIZE", 8192, raising=False
  )  # newer Pythons read 128 KiB at a time: all of these small files
  rng = np.random.default_rng(0)
  for index in range(2):
    lines = [
      json.dumps({"text": rng.bytes(400).hex()}) + "\n" for _ in range(200)
    ]
    (tmp_path / f"{index}.jsonl.gz").write_bytes(
      gzip.compress("".join(lines).encode())
    )
  prepared.prepare(
    DataConfig(
      source=f"jsonl:{tmp_path}/*.gz", length=64, validation_fraction=0.0
    ),
    workers,
  )
  assert updates == sorted(updates) and max(updates) == pytest.approx(
    4
  )  # two parts, for either split
  assert workers > 1 or len([parts for parts in updates if 0 < parts < 1]) > 10
