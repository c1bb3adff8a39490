"""Prepared rows are the same bytes whoever writes them, and are never mixed up.

Rows of other text or other fields have another directory, or are refused.
"""

import dataclasses
import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

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
  tokenizer_training,
)
from diffjax.data.row import Row, decode_row, encode_row
from diffjax.host import progress


def prepare_rows(config, split="train") -> list[Row]:
  """Prepares the only source of a config, and returns its rows."""
  (target,) = prepared.prepare(config, workers=1)
  return list(prepared.PreparedRows(target, split))


def read_directory(directory) -> dict[str, bytes]:
  """Returns the content of each file."""
  contents = {}
  for path in pathlib.Path(directory).iterdir():
    contents[path.name] = path.read_bytes()
  return contents


def modification_times(directory) -> dict[str, int]:
  """Returns the time of each file, in nanoseconds."""
  times = {}
  for path in pathlib.Path(directory).iterdir():
    times[path.name] = path.stat().st_mtime_ns
  return times


def first_training_shard(target) -> pathlib.Path:
  """Returns the path of the first file of training rows."""
  return min(pathlib.Path(target.directory).glob("train*.array_record"))


# The content of the rows.


def test_rows_have_all_bytes_of_the_documents(make_config, texts):
  """The separators between documents are removed before the comparison."""
  config = make_config(packing="documents").data

  rows = prepare_rows(config, "train") + prepare_rows(config, "validation")

  # Without a tokenizer, tokens are bytes. Texts are UTF-8, which never has the
  # byte 255.
  separator = 255
  text_bytes = bytearray()
  for row in rows:
    tokens = row.tokens[row.tokens != separator]
    text_bytes += tokens.astype(np.uint8).tobytes()
  # The pieces of a document can be in different rows, so the order is lost.
  expected = "".join(texts).encode()
  assert sorted(text_bytes) == sorted(expected)


def test_concatenated_rows_hold_every_document_once(make_config, texts):
  """Split at the separators, the rows are the texts again."""
  config = make_config(packing="concat").data

  documents = []
  for split in ("train", "validation"):
    rows = prepare_rows(config, split)
    tokens = np.concatenate([row.tokens for row in rows])
    # A token is a byte. Each document has the separator 255 before and after
    # it, so two separators are between documents.
    row_bytes = bytes(tokens.tolist())
    documents += row_bytes.strip(b"\xff").split(b"\xff\xff")

  expected = [text.encode() for text in texts]
  assert sorted(documents) == sorted(expected)


def test_the_metadata_counts_documents_bytes_tokens_and_rows(
  make_config, texts
):
  """The numbers of both splits add up to the numbers of the texts."""
  config = make_config().data
  (target,) = prepared.prepare(config, workers=1)

  meta = json.loads(pathlib.Path(target.directory, "meta.json").read_text())

  train = meta["splits"]["train"]
  validation = meta["splits"]["validation"]
  num_bytes = sum(len(text.encode()) for text in texts)
  # A token is a byte, and each document has two separators.
  num_tokens = num_bytes + 2 * len(texts)
  assert train["documents"] + validation["documents"] == len(texts)
  assert train["bytes"] + validation["bytes"] == num_bytes
  assert train["tokens"] + validation["tokens"] == num_tokens


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_metadata_counts_the_rows_of_a_split(make_config, split):
  config = make_config().data
  (target,) = prepared.prepare(config, workers=1)

  meta = json.loads(pathlib.Path(target.directory, "meta.json").read_text())

  rows = prepare_rows(config, split)
  assert meta["splits"][split]["rows"] == len(rows)
  num_tokens = sum(len(row.tokens) for row in rows)
  assert meta["splits"][split]["tokens"] == num_tokens


def test_the_metadata_describes_the_rows(make_config):
  config = make_config(length=64).data
  (target,) = prepared.prepare(config, workers=1)

  meta = json.loads(pathlib.Path(target.directory, "meta.json").read_text())

  assert meta["description"]["length"] == 64
  # Without a tokenizer, tokens are bytes.
  assert meta["tokenizer_spec"] == "bytes"


def test_large_token_ids_are_stored_exactly():
  """Two bytes hold ids up to 65,535 only."""
  row = Row(
    tokens=np.array([0, 100_256, 65_536], np.int32),
    segment_lengths=np.array([3], np.int32),
    prompt_lengths=np.array([0], np.int32),
  )

  record = encode_row(row, vocab_size=100_277, with_prompts=False)

  decoded = decode_row(record)
  assert decoded.tokens.tolist() == [0, 100_256, 65_536]


def test_invalid_utf8_is_replaced_and_counted(tmp_path, capsys):
  """Each invalid byte becomes the character U+FFFD."""
  # "café" in Latin-1 is not UTF-8. Two files have 1 + 2 = 3 invalid bytes.
  (tmp_path / "0.txt").write_bytes(b"caf\xe9")
  (tmp_path / "1.txt").write_bytes(b"caf\xe9 caf\xe9")
  (tmp_path / "2.txt").write_bytes(b"tea")
  config = DataConfig(
    source=f"text:{tmp_path}/*.txt", length=32, validation_fraction=0.0
  )

  rows = prepare_rows(config)

  assert "2 documents were not UTF-8" in capsys.readouterr().err
  tokens = np.concatenate([row.tokens for row in rows])
  first_byte_of_replacement = "\ufffd".encode()[0]
  num_replaced = np.count_nonzero(tokens == first_byte_of_replacement)
  assert num_replaced == 3


def test_a_source_without_documents_is_an_error(tmp_path):
  # A record without text is no document.
  (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
  config = DataConfig(source=f"jsonl:{tmp_path}/a.jsonl")

  with pytest.raises(UserError, match="empty: no document to train on"):
    prepared.prepare(config, workers=1)


# Workers, and processes that are killed.


@pytest.fixture
def four_files(tmp_path) -> str:
  """Returns the source of four small files, which are four shards."""
  rng = np.random.default_rng(0)
  for index in range(4):
    lines = []
    for _ in range(50):
      lines.append(json.dumps({"text": rng.bytes(200).hex()}) + "\n")
    (tmp_path / f"part{index}.jsonl").write_text("".join(lines))
  return f"jsonl:{tmp_path}/part*.jsonl"


@pytest.mark.full
def test_rows_do_not_depend_on_the_number_of_workers(four_files, tmp_path):
  """One process and three processes write the same bytes."""
  one_dir = tmp_path / "one"
  three_dir = tmp_path / "three"
  config = DataConfig(source=four_files, length=256)
  config_of_one = dataclasses.replace(config, prepared_dir=str(one_dir))
  config_of_three = dataclasses.replace(config, prepared_dir=str(three_dir))

  prepared.prepare(config_of_one, workers=1)
  prepared.prepare(config_of_three, workers=3)

  assert read_directory(three_dir) == read_directory(one_dir)


@pytest.mark.full
def test_workers_start_if_the_script_comes_from_standard_input(
  four_files, monkeypatch, capsys
):
  """Workers of `python < script.py` cannot import the script."""
  # Python gives such a script this name, but there is no file to import.
  main_module = types.ModuleType("__main__")
  main_module.__file__ = "<stdin>"
  monkeypatch.setitem(sys.modules, "__main__", main_module)
  config = DataConfig(source=four_files, length=256)

  (target,) = prepared.prepare(config, workers=2)

  assert prepared.is_prepared(target)
  assert "with 2 workers" in capsys.readouterr().err


@pytest.fixture
def text_files(tmp_path) -> str:
  """Returns the source of 12 files, 7 MB together, which are 12 shards."""
  directory = tmp_path / "texts"
  directory.mkdir()
  rng = np.random.default_rng(0)
  for index in range(12):
    text = rng.integers(32, 127, 550_000, dtype=np.uint8).tobytes()
    (directory / f"{index:02}.txt").write_bytes(text)
  return f"text:{directory}/*.txt"


@pytest.fixture
def parquet_file(tmp_path) -> str:
  """Returns the source of a file of 12 row groups, which are 12 shards."""
  path = tmp_path / "one.parquet"
  rng = np.random.default_rng(0)
  texts = [rng.bytes(1000).hex() for _ in range(1200)]
  table = pyarrow.table({"text": texts})
  pyarrow.parquet.write_table(table, path, row_group_size=100)
  return f"parquet:{path}"


def prepare_and_kill(config, num_workers, tmp_path):
  """Prepares rows in a process, and kills it after the first two shards.

  The script has no `if __name__ == "__main__"`, because workers do not run it
  again. If they did, the process would end with an error.
  """
  script = tmp_path / "script.py"
  script.write_text(f"""
from diffjax.config import DataConfig
from diffjax.data import prepared

prepared.prepare({config!r}, {num_workers})
""")
  process = subprocess.Popen(
    [sys.executable, script],
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    start_new_session=True,
  )
  directory = pathlib.Path(config.prepared_dir)
  wait_until(
    lambda: (
      process.poll() is not None
      or len(list(directory.glob("train-*.array_record"))) >= 2
    )
  )
  assert process.poll() is None, "the process ended before it was killed"
  os.kill(process.pid, signal.SIGKILL)
  process.wait()
  wait_until(lambda: not has_processes(process.pid))


def has_processes(process_group) -> bool:
  """Returns whether any process of a group is left."""
  try:
    os.killpg(process_group, 0)
  except ProcessLookupError:
    return False
  return True


def wait_until(condition):
  """Waits for a condition for at most a minute."""
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.005)


def check_preparing_continues_after_a_kill(config, tmp_path):
  """Checks that the result is complete, and that finished shards are kept.

  The process that prepared the rows of the config has been killed.
  """
  directory = pathlib.Path(config.prepared_dir)
  (target,) = prepared.targets(config)
  assert not prepared.is_prepared(target), "the kill came too late"
  with pytest.raises(UserError, match="not prepared.*diffjax.prepare"):
    prepared.PreparedRows(target, "train")

  finished_shards = {}
  for path in directory.glob("*.array_record"):
    finished_shards[path] = path.stat()
  prepared.prepare(config, workers=1)

  for path, before in finished_shards.items():
    after = path.stat()
    assert after.st_ino == before.st_ino
    assert after.st_mtime_ns == before.st_mtime_ns
  whole = tmp_path / "whole"
  prepared.prepare(dataclasses.replace(config, prepared_dir=str(whole)), 1)
  assert read_directory(directory) == read_directory(whole)


# A program that prepares the rows of a config, and kills itself while it writes
# the third shard. Each shard has a JSON file of its totals.
PREPARE_TWO_SHARDS = """
import os
import signal

from diffjax.config import DataConfig
from diffjax.data import prepared, shards

paths = []
write_json = shards.write_json

def write_json_or_die(path, content):
  if len(paths) == 2:
    os.kill(os.getpid(), signal.SIGKILL)
  paths.append(path)
  write_json(path, content)

shards.write_json = write_json_or_die
prepared.prepare(CONFIG, workers=1)
"""


def test_preparing_continues_after_a_kill_without_workers(
  four_files, command, tmp_path
):
  """A program kills itself while it writes the third shard of the rows."""
  config = DataConfig(
    source=four_files, length=256, prepared_dir=str(tmp_path / "killed")
  )
  program = PREPARE_TWO_SHARDS.replace("CONFIG", repr(config))
  (tmp_path / "prepare_two_shards.py").write_text(program)

  result = command("prepare_two_shards", cwd=tmp_path)

  assert result.returncode == -signal.SIGKILL, result.stderr
  check_preparing_continues_after_a_kill(config, tmp_path)


@pytest.mark.full
def test_preparing_continues_after_a_kill_of_two_workers(
  parquet_file, tmp_path
):
  config = DataConfig(
    source=parquet_file, length=256, prepared_dir=str(tmp_path / "killed")
  )

  prepare_and_kill(config, 2, tmp_path)

  check_preparing_continues_after_a_kill(config, tmp_path)


@pytest.mark.full
def test_preparing_continues_after_a_kill_at_any_time(text_files, tmp_path):
  """The process has no workers. It is killed after its first two shards."""
  config = DataConfig(
    source=text_files, length=256, prepared_dir=str(tmp_path / "killed")
  )

  prepare_and_kill(config, 1, tmp_path)

  check_preparing_continues_after_a_kill(config, tmp_path)


def make_temporary_file(directory, monkeypatch, host, pid) -> pathlib.Path:
  """Creates the incomplete file of a process of a host."""
  with monkeypatch.context() as patch:
    patch.setattr(socket, "gethostname", lambda: host)
    patch.setattr(os, "getpid", lambda: pid)
    suffix = shards.temporary_suffix()
  path = directory / f"meta.json{suffix}"
  path.touch()
  return path


def test_only_incomplete_files_of_dead_processes_of_this_host_are_removed(
  tmp_path, monkeypatch
):
  """Other processes may be writing their files now."""
  # The program `true` ends at once.
  dead_process = subprocess.Popen(["true"])
  dead_process.wait()
  dead_pid = dead_process.pid
  leftover = make_temporary_file(
    tmp_path, monkeypatch, host="here", pid=dead_pid
  )
  in_use = make_temporary_file(
    tmp_path, monkeypatch, host="here", pid=os.getpid()
  )
  of_another_host = make_temporary_file(
    tmp_path, monkeypatch, host="there.example", pid=dead_pid
  )
  monkeypatch.setattr(socket, "gethostname", lambda: "here")

  shards.remove_leftovers(str(tmp_path))

  assert not leftover.exists()
  assert in_use.exists()
  assert of_another_host.exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_error_of_a_bad_document_names_its_line(tmp_path, num_workers):
  """The error is the same in this process and in worker processes."""
  for index in range(4):
    (tmp_path / f"{index}.jsonl").write_text('{"text": "fine"}\n' * 50)
  with (tmp_path / "2.jsonl").open("a") as file:
    file.write("oops\n")
  directory = tmp_path / "rows"
  config = DataConfig(
    source=f"jsonl:{tmp_path}/*.jsonl", prepared_dir=str(directory)
  )

  with pytest.raises(UserError, match="2.jsonl:51: not JSON"):
    prepared.prepare(config, workers=num_workers)

  # The rows of earlier files are kept, and there are no incomplete files.
  assert list(directory.glob("*.array_record"))
  assert not list(directory.glob("*.tmp"))


# The directory of the rows.


def test_rows_are_prepared_once(make_config, capsys):
  """The second call writes no file."""
  config = make_config().data
  (target,) = prepared.prepare(config, workers=1)
  times = modification_times(target.directory)
  capsys.readouterr()

  prepared.prepare(config, workers=1)

  assert "already prepared" in capsys.readouterr().err
  assert modification_times(target.directory) == times


def cache_directory(config) -> str:
  """Returns the directory of the rows of the only source."""
  (target,) = prepared.targets(config.data)
  return target.directory


def test_fields_that_change_the_rows_choose_another_directory(
  make_config, jsonl
):
  """The name of a directory in the cache has a digest of these fields."""
  directories = [
    cache_directory(make_config()),
    cache_directory(make_config(length=32)),
    cache_directory(make_config(packing="concat")),
    cache_directory(make_config(validation_fraction=0.2)),
    cache_directory(make_config(text_field="id")),
  ]
  # The first target is the source of the training rows.
  config = make_config(validation_source=f"jsonl:{jsonl}")
  directories.append(prepared.targets(config.data)[0].directory)

  assert len(set(directories)) == len(directories)


def test_files_with_other_times_choose_another_directory(make_config, jsonl):
  """The text of a file with another time may have changed.

  `jsonl` is the file that the configs of `make_config` read.
  """
  directory_before = cache_directory(make_config())

  os.utime(jsonl, (1, 1))

  assert cache_directory(make_config()) != directory_before


def test_the_seed_and_the_workers_do_not_choose_another_directory(make_config):
  """The seed and the number of workers do not change the rows."""
  config = make_config(seed=0, num_workers=0)
  other_config = make_config(seed=5, num_workers=3)

  assert cache_directory(other_config) == cache_directory(config)


def check_directory_is_refused(config, field):
  """Checks that config.data.prepared_dir is refused because of one field."""
  message = rf"prepared_dir.*rows holds other rows: config.data.{field} \(there"
  with pytest.raises(UserError, match=message) as caught:
    prepared.prepare(config, workers=1)
  # Only the field that differs is named.
  assert str(caught.value).count("(there") == 1

  (target,) = prepared.targets(config)
  with pytest.raises(UserError, match=message) as caught:
    prepared.is_prepared(target)
  assert str(caught.value).count("(there") == 1


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("length", 32),
    ("packing", "concat"),
    ("validation_fraction", 0.3),
    ("source", "stdlib"),
  ],
)
def test_a_directory_of_rows_of_other_fields_is_refused(
  make_config, tmp_path, field, value
):
  """A run would otherwise train on rows that its config does not describe."""
  config = make_config(prepared_dir=str(tmp_path / "rows")).data
  prepared.prepare(config, workers=1)

  other_config = dataclasses.replace(config, **{field: value})

  check_directory_is_refused(other_config, field)


def test_a_directory_of_rows_of_another_tokenizer_is_refused(
  make_config, tmp_path
):
  """The same token ids would be other text."""
  config = make_config(prepared_dir=str(tmp_path / "rows")).data
  prepared.prepare(config, workers=1)
  # 258 ids are 256 bytes, one merge ("aa" or "ab"), and the separator.
  tokenizer = tokenizer_training.train_tokenizer(
    ["aab"] * 9, vocab_size=258, directory=tmp_path
  )

  other_config = dataclasses.replace(config, tokenizer=str(tokenizer))

  check_directory_is_refused(other_config, "tokenizer")


def test_a_directory_of_rows_of_a_shorter_file_is_refused(
  make_config, jsonl, tmp_path
):
  """The rows lack the text that is appended to the file `jsonl` afterwards."""
  config = make_config(prepared_dir=str(tmp_path / "rows")).data
  prepared.prepare(config, workers=1)
  with jsonl.open("a") as file:
    file.write('{"text": "more"}\n')

  with pytest.raises(UserError, match="held other files"):
    prepared.prepare(config, workers=1)

  # A run can still use the rows, because it does not need the files.
  (target,) = prepared.targets(config)
  assert prepared.is_prepared(target)


@pytest.mark.parametrize("nanoseconds_later", [0, 1])
def test_text_rewritten_within_a_second_has_another_cache_directory(
  make_config, jsonl, nanoseconds_later
):
  """A run must not use the rows of the old text of the file `jsonl`.

  The new text has the same size, and may even have the same time.
  """
  old_time_ns = 1_700_000_000_000_000_000
  os.utime(jsonl, ns=(old_time_ns, old_time_ns))
  config = make_config().data
  (old_target,) = prepared.prepare(config, workers=1)

  jsonl.write_text(jsonl.read_text().replace("document", "Document"))
  new_time_ns = old_time_ns + nanoseconds_later
  os.utime(jsonl, ns=(new_time_ns, new_time_ns))

  (new_target,) = prepared.targets(config)
  assert new_target.directory != old_target.directory
  assert not prepared.is_prepared(new_target)


@pytest.mark.parametrize("nanoseconds_later", [0, 1])
def test_old_rows_are_refused_for_text_rewritten_within_a_second(
  make_config, jsonl, tmp_path, nanoseconds_later
):
  """The rows are of the old text of the file `jsonl`.

  The new text has the same size, and may even have the same time.
  """
  old_time_ns = 1_700_000_000_000_000_000
  os.utime(jsonl, ns=(old_time_ns, old_time_ns))
  config = make_config(prepared_dir=str(tmp_path / "rows")).data
  prepared.prepare(config, workers=1)

  jsonl.write_text(jsonl.read_text().replace("document", "Document"))
  new_time_ns = old_time_ns + nanoseconds_later
  os.utime(jsonl, ns=(new_time_ns, new_time_ns))

  with pytest.raises(UserError, match="held other files.*times or text"):
    prepared.prepare(config, workers=1)


@pytest.mark.parametrize("has_same_size", [False, True])
def test_training_warns_if_the_text_has_changed_after_preparing(
  make_config, jsonl, tmp_path, capsys, has_same_size
):
  """The rows of the old text are still used, from the user's directory.

  `jsonl` is the file that the configs of `make_config` read.
  """
  config = make_config(prepared_dir=str(tmp_path / "rows"))
  pipeline.training_batches(config).close()
  capsys.readouterr()

  text = jsonl.read_text()
  if has_same_size:
    jsonl.write_text(text.replace("document", "Document"))
  else:
    jsonl.write_text(text + text)

  pipeline.training_batches(config).close()
  assert "prepared before the" in capsys.readouterr().err

  pipeline.validation_batches(config, batch_size=4)
  assert "prepared before the" in capsys.readouterr().err


def test_training_does_not_warn_about_copied_or_missing_files(
  make_config, jsonl, tmp_path, capsys
):
  """Rows can be copied to a machine without their text.

  `jsonl` is the file that the configs of `make_config` read.
  """
  config = make_config(prepared_dir=str(tmp_path / "rows"))
  pipeline.training_batches(config).close()

  # A copy has another time of modification.
  os.utime(jsonl, (1_700_000_000, 1_700_000_000))
  pipeline.training_batches(config).close()

  jsonl.unlink()
  pipeline.training_batches(config).close()

  assert "warning" not in capsys.readouterr().err


def prepare_as_earlier_version(config, monkeypatch) -> prepared.Target:
  """Prepares the only source as a version with another identity of files."""
  with monkeypatch.context() as patch:
    source_class = file_source.FileSource
    patch.setattr(source_class, "identity", source_class.earlier_identity)
    (target,) = prepared.prepare(config, workers=1)
  return target


@pytest.mark.parametrize("is_in_cache", [False, True])
def test_rows_of_an_earlier_version_stay_prepared(
  make_config, tmp_path, monkeypatch, capsys, is_in_cache
):
  """Nobody should have to prepare a large corpus again after an update.

  Rows are in the cache, or in a directory that the user chose.
  """
  prepared_dir = "" if is_in_cache else str(tmp_path / "rows")
  config = make_config(prepared_dir=prepared_dir).data
  earlier_target = prepare_as_earlier_version(config, monkeypatch)
  capsys.readouterr()

  (target,) = prepared.prepare(config, workers=1)

  assert target == earlier_target
  assert "already prepared" in capsys.readouterr().err


def test_cached_rows_of_an_earlier_version_are_not_used_for_a_changed_file(
  make_config, jsonl, monkeypatch
):
  """`jsonl` is the file that the configs of `make_config` read."""
  config = make_config().data
  earlier_target = prepare_as_earlier_version(config, monkeypatch)

  os.utime(jsonl, (1, 1))

  (target,) = prepared.targets(config)
  assert target.directory != earlier_target.directory


def test_a_directory_of_an_earlier_version_is_refused_for_a_changed_file(
  make_config, jsonl, tmp_path, monkeypatch
):
  """`jsonl` is the file that the configs of `make_config` read."""
  config = make_config(prepared_dir=str(tmp_path / "rows")).data
  prepare_as_earlier_version(config, monkeypatch)

  os.utime(jsonl, (1, 1))

  with pytest.raises(UserError, match="held other files"):
    prepared.prepare(config, workers=1)


def test_a_directory_that_cannot_be_created_is_an_error(make_config, tmp_path):
  # The parent of the directory is a file.
  (tmp_path / "file").write_text("")
  config = make_config(prepared_dir=str(tmp_path / "file" / "rows")).data

  with pytest.raises(UserError, match="cannot write prepared rows"):
    prepared.prepare(config, workers=1)


def test_the_directory_must_be_local(make_config):
  """Rows are read in random order, which is slow in a bucket."""
  config = make_config(prepared_dir="gs://bucket/rows").data

  with pytest.raises(UserError, match="must be a local path"):
    prepared.targets(config)


def test_the_sources_of_a_mixture_have_their_own_directories(
  make_config, jsonl, tmp_path
):
  """The rows of a source can then be used in other mixtures."""
  (tmp_path / "other.jsonl").write_text('{"text": "other"}\n' * 500)
  rows_dir = tmp_path / "rows"
  # A source is followed by "=" and its weight.
  source = f"jsonl:{jsonl}=0.5,jsonl:{tmp_path}/other.jsonl=0.5"
  config = make_config(source=source, prepared_dir=str(rows_dir)).data

  first, second = prepared.prepare(config, workers=1)

  assert first.directory != second.directory
  for target in (first, second):
    assert pathlib.Path(target.directory).is_relative_to(rows_dir)


def test_the_weights_of_a_mixture_do_not_change_its_directories(
  make_config, jsonl, tmp_path
):
  """Rows are mixed when they are read, so the weights do not change them."""
  second = tmp_path / "second.jsonl"
  second.write_text('{"text": "second"}\n')
  # A source is followed by "=" and its weight.
  config = make_config(source=f"jsonl:{jsonl}=0.5,jsonl:{second}=0.5").data
  other_config = make_config(
    source=f"jsonl:{jsonl}=0.1,jsonl:{second}=0.3"
  ).data

  targets = prepared.targets(config)
  other_targets = prepared.targets(other_config)

  directories = [target.directory for target in targets]
  other_directories = [target.directory for target in other_targets]
  assert directories == other_directories


# Damage.


def test_a_missing_file_of_rows_is_named(make_config):
  """The error names the file and the row."""
  (target,) = prepared.prepare(make_config().data, workers=1)
  rows = prepared.PreparedRows(target, "train")
  path = first_training_shard(target)
  path.unlink()

  with pytest.raises(UserError, match=rf"{path.name}: row 3 cannot be read"):
    rows[3]


def test_damaged_metadata_is_named(make_config):
  (target,) = prepared.prepare(make_config().data, workers=1)
  pathlib.Path(target.directory, "meta.json").write_text("{")

  with pytest.raises(UserError, match="meta.json: cannot be read"):
    prepared.is_prepared(target)


def test_deleted_files_are_written_again(make_config):
  """Error messages advise to delete a damaged file, and meta.json."""
  config = make_config().data
  (target,) = prepared.prepare(config, workers=1)
  complete = read_directory(target.directory)
  # Each file of rows has a JSON file with its totals, which stays.
  first_training_shard(target).unlink()
  pathlib.Path(target.directory, "meta.json").unlink()

  prepared.prepare(config, workers=1)

  assert read_directory(target.directory) == complete


@pytest.fixture
def small_target(tmp_path, texts):
  """Returns the prepared rows of 40 documents, in one file."""
  path = tmp_path / "small.jsonl"
  lines = [json.dumps({"text": text}) + "\n" for text in texts[:40]]
  path.write_text("".join(lines))
  config = DataConfig(source=f"jsonl:{path}", length=64)
  (target,) = prepared.prepare(config, workers=1)
  return target


def read_rows(target) -> tuple[str, list[bytes]]:
  """Returns the fingerprint of the training rows, and their records."""
  rows = prepared.PreparedRows(target, "train")
  return rows.fingerprint, [
    encode_row(row, vocab_size=256, with_prompts=False) for row in rows
  ]


def flip_random_bit(content, rng) -> bytes:
  """Returns the content with one other bit, before the padding of zeros."""
  num_used_bytes = len(content.rstrip(b"\0"))
  damaged = bytearray(content)
  damaged[rng.integers(num_used_bytes)] ^= 1 << rng.integers(8)
  return bytes(damaged)


@pytest.mark.parametrize("pattern", ["train*.array_record", "meta.json"])
def test_a_flipped_bit_never_gives_other_rows(small_target, pattern):
  """Reading damaged rows raises an error, or gives another fingerprint.

  A run that continues compares the fingerprint with that of its checkpoint.
  `small_target` has the directory of prepared rows.
  """
  fingerprint, expected_rows = read_rows(small_target)
  (path,) = pathlib.Path(small_target.directory).glob(pattern)
  content = path.read_bytes()
  rng = np.random.default_rng(0)

  messages = []
  rows_with_same_fingerprint = []
  for _ in range(50):
    path.write_bytes(flip_random_bit(content, rng))
    try:
      damaged_fingerprint, rows = read_rows(small_target)
    except UserError as error:
      messages.append(str(error))
      continue
    if damaged_fingerprint == fingerprint:
      rows_with_same_fingerprint.append(rows)

  for rows in rows_with_same_fingerprint:
    assert rows == expected_rows
  for message in messages:
    assert small_target.directory in message
    assert "\n" not in message
  # Most flips break the JSON, or are found by the hashes of ArrayRecord.
  assert len(messages) > 10


def test_counts_of_rows_that_do_not_agree_are_an_error(small_target):
  """A damaged number would otherwise change which row has which index.

  `small_target` has the directory of prepared rows.
  """
  path = pathlib.Path(small_target.directory, "meta.json")
  meta = json.loads(path.read_text())
  # The file has the number of rows of each shard, and their sum.
  meta["splits"]["train"]["shard_rows"][0] -= 1
  path.write_text(json.dumps(meta))

  message = "meta.json: cannot be read .its counts of train rows do not agree"
  with pytest.raises(UserError, match=message):
    prepared.PreparedRows(small_target, "train")


def prepare_fingerprints(config) -> list[str]:
  """Prepares the rows anew, and returns the fingerprints of both splits."""
  shutil.rmtree(config.prepared_dir, ignore_errors=True)
  (target,) = prepared.prepare(config, workers=1)
  fingerprints = []
  for split in ("train", "validation"):
    rows = prepared.PreparedRows(target, split)
    fingerprints.append(rows.fingerprint)
  return fingerprints


def test_the_fingerprint_depends_on_the_rows_alone(
  make_config, jsonl, tmp_path
):
  """A run that continues compares fingerprints, to notice rows of other text.

  `jsonl` is the file that the configs of `make_config` read.
  """
  config = make_config(prepared_dir=str(tmp_path / "rows")).data
  fingerprints = prepare_fingerprints(config)

  fingerprints_of_same_text = prepare_fingerprints(config)
  jsonl.write_text(jsonl.read_text().replace("document", "Document"))
  fingerprints_of_other_text = prepare_fingerprints(config)

  assert fingerprints_of_same_text == fingerprints
  assert set(fingerprints_of_other_text).isdisjoint(fingerprints)


# Progress.


def test_without_a_terminal_progress_is_printed_in_lines(monkeypatch):
  """Lines come at intervals, even if nothing has been reported."""
  lines = []
  monkeypatch.setattr(progress, "say", lines.append)
  # A thread prints the first line after 0.01 s, and one every 0.02 s after it.
  reporter = progress.Progress(
    "preparing x", total=10, first=0.01, interval=0.02
  )

  with reporter:
    wait_until(lambda: len(lines) >= 1)
    num_lines_before_update = len(lines)
    reporter.update(parts=2.5, tokens=2_000_000)
    wait_until(lambda: len(lines) >= num_lines_before_update + 3)

  # The speed and the time left are unknown before the first update.
  assert lines[0] == "preparing x: 0.0%, 0:00:00 so far"
  # 2.5 of 10 parts are 25%. The speed depends on the machine.
  speed = r"\d+(\.\d+)?[MG] tokens/s"
  time_left = r"0:00:0\d left"
  assert re.fullmatch(
    rf"preparing x: 25\.0%, 2M tokens, {speed}, {time_left}", lines[-1]
  )


def test_progress_counts_days(monkeypatch):
  """Half of the work took 100,000 s, so the other half takes 100,000 s too.

  100,000 s = 86,400 s + 13,600 s = 1 day + 3:46:40. The speed is 1,000 tokens /
  100,000 s = 0.01 tokens/s.
  """
  # The clock is read three times: at the start, for the time left, and for the
  # speed.
  times = iter([0.0, 100_000.0, 100_000.0])
  monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))

  reporter = progress.Progress("preparing x", total=10)
  reporter.update(parts=5, tokens=1000)

  assert reporter.line() == (
    "preparing x: 50.0%, 1K tokens, 0.01 tokens/s, 1 day, 3:46:40 left"
  )


@pytest.fixture
def reported_parts(monkeypatch) -> list[float]:
  """Returns the numbers of parts that are reported as done, in order."""
  reported_parts = []

  def record_parts(self, parts, tokens):
    reported_parts.append(parts)

  monkeypatch.setattr(progress.Progress, "update", record_parts)
  return reported_parts


@pytest.fixture
def two_gzip_files(tmp_path, monkeypatch) -> DataConfig:
  """Returns a config of two compressed files of 80 KB."""
  # By default, Python 3.12 and later read 128 KiB at once.
  monkeypatch.setattr(gzip, "READ_BUFFER_SIZE", 8192, raising=False)
  # Random documents cannot be compressed much.
  rng = np.random.default_rng(0)
  for name in ("0.jsonl.gz", "1.jsonl.gz"):
    lines = []
    for _ in range(200):
      lines.append(json.dumps({"text": rng.bytes(400).hex()}) + "\n")
    compressed = gzip.compress("".join(lines).encode())
    (tmp_path / name).write_bytes(compressed)
  return DataConfig(
    source=f"jsonl:{tmp_path}/*.gz", length=64, validation_fraction=0.0
  )


@pytest.mark.parametrize(
  "num_workers", [1, pytest.param(2, marks=pytest.mark.full)]
)
def test_progress_ends_at_the_number_of_parts(
  two_gzip_files, reported_parts, num_workers
):
  """A compressed file is one part for each split that reads it."""
  prepared.prepare(two_gzip_files, workers=num_workers)

  assert reported_parts == sorted(reported_parts)
  # Two files of two splits.
  assert max(reported_parts) == pytest.approx(2 * 2)


def test_progress_moves_within_a_compressed_file(
  two_gzip_files, reported_parts
):
  """A compressed file is one part, but fractions of it are reported."""
  prepared.prepare(two_gzip_files, workers=1)

  within_first_file = [parts for parts in reported_parts if 0 < parts < 1]
  assert len(within_first_file) > 10
