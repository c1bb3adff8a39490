"""Sources yield their documents, and bad sources give errors of one line."""

import dataclasses
import glob
import gzip
import json
import os
import pathlib
import random
import shutil
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from diffjax.config import DataConfig, UserError
from diffjax.data import (
  files,
  jsonl_source,
  local_glob,
  parquet,
  sources,
)
from diffjax.data.document import Document

WITHOUT_VALIDATION = DataConfig(validation_fraction=0.0)
ROW_GROUP_SIZE = 70


def read(spec, split="train", config=WITHOUT_VALIDATION) -> list[Document]:
  """Returns the documents of a split."""
  return read_parts(sources.documents(spec, split, config))


def read_parts(source) -> list[Document]:
  """Returns the documents of all parts of an open source."""
  documents = []
  for part in source.parts:
    documents.extend(source.read(part))
  return documents


def read_texts(spec, split="train", config=WITHOUT_VALIDATION) -> list[str]:
  """Returns the texts of the documents of a split."""
  return [document.text for document in read(spec, split, config)]


def write(path, texts, field="text") -> str:
  """Writes records with texts to a file, in the format of its extension.

  Args:
    path: the file. Its name ends with .jsonl, .jsonl.gz, .jsonl.zst, .parquet,
      or .txt for a text file that contains JSONL.
    texts: the texts of the records. A second field, "id", counts the records.
    field: the name of the texts' field.

  Returns:
    The source that reads the file.
  """
  if path.suffix == ".parquet":
    table = pyarrow.table({field: texts, "id": range(len(texts))})
    pyarrow.parquet.write_table(table, path, row_group_size=ROW_GROUP_SIZE)
    return f"parquet:{path}"
  lines = bytearray()
  for index, text in enumerate(texts):
    record = json.dumps({field: text, "id": index})
    lines += f"{record}\n".encode()
  if path.suffix == ".txt":
    path.write_bytes(lines)
    return f"text:{path}"
  if path.suffix == ".gz":
    path.write_bytes(gzip.compress(lines))
  elif path.suffix == ".zst":
    path.write_bytes(compress_in_two_frames(lines))
  else:
    path.write_bytes(lines)
  return f"jsonl:{path}"


def compress_in_two_frames(lines) -> bytes:
  """Returns the content of a .zst file that lines were appended to."""
  middle = lines.index(b"\n", len(lines) // 2) + 1
  first = pyarrow.compress(bytes(lines[:middle]), codec="zstd", asbytes=True)
  second = pyarrow.compress(bytes(lines[middle:]), codec="zstd", asbytes=True)
  return first + second


def build_dataset(root, name, version, texts_by_split):
  """Writes a TFDS dataset "mine" with texts and numbers.

  Args:
    root: the data_dir.
    name: the name of the dataset's config.
    version: the version, such as "1.0.0".
    texts_by_split: the texts of each split.
  """
  import tensorflow_datasets as tfds

  class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version(version)
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name)]
    code_path = None

    def _info(self) -> Any:
      features = tfds.features.FeaturesDict(
        {
          "text": tfds.features.Text(),
          "number": tfds.features.Scalar(np.int64),
        }
      )
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager) -> dict[str, Any]:
      generators = {}
      for split in texts_by_split:
        generators[split] = self._generate_examples(split)
      return generators

    def _generate_examples(self, split) -> Any:
      for index, text in enumerate(texts_by_split[split]):
        yield index, {"text": text, "number": index}

  Builder.name = "mine"
  builder = Builder(data_dir=root, file_format="array_record")
  builder.download_and_prepare()


@pytest.fixture(scope="session")
def tfds_dir(tmp_path_factory, texts) -> pathlib.Path:
  """Returns a TFDS data_dir with the dataset "mine".

  Its config "split" has two versions with training and validation splits. Its
  config "single" has a training split only.
  """
  root = tmp_path_factory.mktemp("tfds")
  build_dataset(
    root, "split", "1.0.0", {"train": ["old"], "validation": ["old"]}
  )
  build_dataset(
    root, "split", "1.1.0", {"train": texts, "validation": ["held out"]}
  )
  build_dataset(root, "single", "1.0.0", {"train": texts})
  return root


@pytest.fixture
def tfds_config(tfds_dir) -> DataConfig:
  """Returns a config that finds the dataset "mine"."""
  return DataConfig(validation_fraction=0.0, data_dir=str(tfds_dir))


@pytest.fixture
def tfds_copy(tfds_dir, tmp_path) -> pathlib.Path:
  """Copies the dataset "mine/single" to `tmp_path`.

  Returns:
    The directory of the version, which has one file of records.
  """
  directory = tmp_path / "mine" / "single" / "1.0.0"
  shutil.copytree(tfds_dir / "mine" / "single" / "1.0.0", directory)
  return directory


def records_file(directory) -> pathlib.Path:
  """Returns the only file of records of a TFDS dataset."""
  (path,) = directory.glob("*array_record*")
  return path


# Documents.


@pytest.mark.parametrize(
  "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
def test_record_files_yield_their_documents(tmp_path, texts, name):
  """The text of a record is in the field config.data.text_field."""
  source = write(tmp_path / name, texts, field="content")
  config = DataConfig(validation_fraction=0.0, text_field="content")

  assert read_texts(source, config=config) == texts


@pytest.mark.parametrize(
  "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
def test_a_source_can_be_a_pattern_of_files(tmp_path, name):
  source = write(tmp_path / name, ["one", "two"])
  pattern = source.replace(name, "*")

  assert read_texts(pattern) == ["one", "two"]


def test_text_files_are_documents_in_the_order_of_their_names(tmp_path, texts):
  # Directory "0" has the texts of even index, and "1" has the others.
  for directory in ("0", "1"):
    (tmp_path / directory).mkdir()
  for index, text in enumerate(texts):
    path = tmp_path / f"{index % 2}" / f"{index:04}.txt"
    path.write_bytes(text.encode())

  documents = read_texts(f"text:{tmp_path}/**/*.txt")

  assert documents == texts[::2] + texts[1::2]


@pytest.mark.parametrize("part_bytes", [97, 1000, 7919])
def test_parts_of_a_jsonl_file_have_every_line_once(
  tmp_path, texts, monkeypatch, part_bytes
):
  """The borders of parts are anywhere, mostly within a line."""
  monkeypatch.setattr(jsonl_source, "PART_BYTES", part_bytes)
  spec = write(tmp_path / "a.jsonl", texts)
  source = sources.documents(spec, "train", WITHOUT_VALIDATION)
  assert len(source.parts) > 5

  documents = read_parts(source)

  assert [document.text for document in documents] == texts


def test_a_line_that_begins_where_a_part_ends_is_read_once(
  tmp_path, monkeypatch
):
  """The line belongs to the part that begins there."""
  line = '{"text": "a"}\n'
  (tmp_path / "a.jsonl").write_text(line * 10)
  # Each part has two lines.
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 2 * len(line))

  documents = read_texts(f"jsonl:{tmp_path}/a.jsonl")

  assert documents == ["a"] * 10


def test_a_tfds_dataset_is_read_in_its_newest_version(tfds_config, texts):
  """The dataset mine/split has the versions 1.0.0 and 1.1.0."""
  documents = read_texts("tfds:mine/split", config=tfds_config)

  # TFDS stores documents in an order of its own.
  assert sorted(documents) == sorted(texts)


def test_a_tfds_dataset_can_be_read_in_another_version(tfds_config):
  """Version 1.0.0 of the dataset mine/split has one document, "old"."""
  documents = read_texts("tfds:mine/split:1.0.0", config=tfds_config)

  assert documents == ["old"]


def test_a_tfds_dataset_has_its_own_validation_split(tfds_config):
  """The validation split of mine/split has one document, "held out"."""
  validation = read_texts("tfds:mine/split", "validation", tfds_config)

  assert validation == ["held out"]


def check_a_fifth_is_held_out(source, config, texts):
  """Checks that about a fifth of the texts is for validation only."""
  train = read_texts(source, "train", config)
  validation = read_texts(source, "validation", config)

  assert sorted(train + validation) == sorted(texts)
  assert set(train).isdisjoint(validation)
  assert 0.1 < len(validation) / len(texts) < 0.3
  # The choice is the same each time.
  assert read_texts(source, "validation", config) == validation


def test_copies_of_a_document_are_held_out_together(tmp_path, texts):
  """A model must not be validated on a copy of what it was trained on."""
  two_copies = texts * 2
  source = write(tmp_path / "a.jsonl", two_copies)
  config = DataConfig(validation_fraction=0.2)

  check_a_fifth_is_held_out(source, config, two_copies)


def test_a_fifth_of_a_tfds_dataset_without_a_validation_split_is_held_out(
  tfds_config, texts
):
  """The dataset "mine/single" has a training split only."""
  config = dataclasses.replace(tfds_config, validation_fraction=0.2)

  check_a_fifth_is_held_out("tfds:mine/single", config, texts)


def test_with_a_validation_source_no_document_is_held_out(tmp_path, texts):
  """The validation fraction then has no effect."""
  source = write(tmp_path / "a.jsonl", texts)
  validation_source = write(tmp_path / "b.jsonl", ["held out"])
  config = DataConfig(
    validation_fraction=0.2, validation_source=validation_source
  )

  train = read_texts(source, "train", config)
  validation = read_texts(validation_source, "validation", config)

  assert train == texts
  assert validation == ["held out"]


def test_documents_without_text_are_skipped(tmp_path):
  """An empty line, an empty text and null are no documents."""
  lines = ['{"text": "one"}', "", '{"text": ""}', '{"text": null}']
  # The last line of the file does not end with a newline.
  lines.append('{"text": "two"}')
  (tmp_path / "a.jsonl").write_text("\n".join(lines))

  documents = read_texts(f"jsonl:{tmp_path}/a.jsonl")

  assert documents == ["one", "two"]


def test_invalid_utf8_of_a_text_file_is_replaced_and_marked(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")

  documents = read(f"text:{tmp_path}/a.txt")

  # U+FFFD is the replacement character.
  assert documents == [
    Document(text="caf\ufffd au lait", replaced=True, prompt=None)
  ]


def test_invalid_utf8_and_half_surrogates_of_jsonl_are_replaced_and_marked(
  tmp_path,
):
  """JSON can escape half of a surrogate pair, which UTF-8 cannot encode."""
  (tmp_path / "a.jsonl").write_bytes(
    b'{"text": "caf\xe9"}\n'
    b'{"text": "half \\ud83d of one"}\n'
    b'{"text": "\\ud83d\\ude00"}\n'
  )

  documents = read(f"jsonl:{tmp_path}/a.jsonl")

  assert documents == [
    Document(text="caf\ufffd", replaced=True),
    # Half a surrogate pair is three bytes. None of them is valid UTF-8.
    Document(text="half \ufffd\ufffd\ufffd of one", replaced=True),
    Document(text="😀", replaced=False),
  ]


def test_invalid_utf8_of_parquet_is_replaced_and_marked(tmp_path):
  path = tmp_path / "a.parquet"
  source = write(path, ["caf? au lait", "tea"])
  # pyarrow writes valid UTF-8 only, so change a byte of the file.
  path.write_bytes(path.read_bytes().replace(b"caf?", b"caf\xe9"))

  documents = read(source)

  # U+FFFD is the replacement character.
  assert documents == [
    Document(text="caf\ufffd au lait", replaced=True),
    Document(text="tea", replaced=False),
  ]


def test_a_byte_order_mark_at_the_start_is_not_text(tmp_path):
  """Elsewhere, the character U+FEFF is kept."""
  (tmp_path / "a.txt").write_text("\ufeffcafé\ufeff")

  documents = read_texts(f"text:{tmp_path}/a.txt")

  assert documents == ["café\ufeff"]


def test_byte_order_marks_of_lines_are_not_text(tmp_path):
  """Files that were joined have marks in the middle."""
  mark = "\ufeff".encode()
  lines = mark + b'{"text": "one"}\n' + mark + b'{"text": "two"}\n' + mark
  (tmp_path / "a.jsonl").write_bytes(lines)
  (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))

  texts = read_texts(f"jsonl:{tmp_path}/*.jsonl*")

  assert texts == ["one", "two", "one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_that_would_fill_the_memory_is_refused(
  tmp_path, monkeypatch, name
):
  """A small compressed file can have a long line, so reading must stop."""
  monkeypatch.setattr(jsonl_source, "MAX_LINE_BYTES", 100)
  # The rest of a line, {"text": "", "id": 0}, has 21 bytes. Only the third
  # line, of 80 + 21 = 101 bytes, is longer than the limit.
  source = write(tmp_path / name, ["x" * 70, "short", "x" * 80])

  message = f"{name}:3: the line is longer than .* MiB.*split it"
  with pytest.raises(UserError, match=message) as caught:
    read(source)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_lines_up_to_the_limit_are_read(tmp_path, monkeypatch, name):
  monkeypatch.setattr(jsonl_source, "MAX_LINE_BYTES", 100)
  # The rest of a line, {"text": "", "id": 0}, has 21 bytes, so the first line
  # has 70 + 21 = 91 bytes.
  texts = ["x" * 70, "short"]
  source = write(tmp_path / name, texts)

  assert read_texts(source) == texts


# The fraction of a part that has been read.


def check_fractions_are_reported(source):
  """Checks that reading each part reports rising fractions up to one."""
  for part in source.parts:
    fractions = []
    assert list(source.read(part, fractions.append))

    assert fractions == sorted(fractions)
    assert 0 < fractions[0] < 0.5
    assert fractions[-1] == pytest.approx(1, abs=0.01)
    # gzip reads some kilobytes ahead, so some fractions are equal.
    assert len(set(fractions)) > len(fractions) / 20


def random_texts() -> list[str]:
  """Returns 100 texts of 1,000 characters."""
  rng = np.random.default_rng(0)
  return [rng.bytes(500).hex() for _ in range(100)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_reading_records_reports_fractions(tmp_path, monkeypatch, name):
  """The fractions move the progress bar within a large file."""
  # The file of 100 KB has three parts.
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 35_000)
  # Newer versions of Python read 128 KiB at a time, all of this small file.
  monkeypatch.setattr(gzip, "READ_BUFFER_SIZE", 8192, raising=False)
  spec = write(tmp_path / name, random_texts())
  source = sources.documents(spec, "train", WITHOUT_VALIDATION)

  check_fractions_are_reported(source)


def test_reading_text_files_reports_fractions(tmp_path):
  for index, text in enumerate(random_texts()):
    (tmp_path / f"{index:02}.txt").write_text(text)
  spec = f"text:{tmp_path}/*.txt"
  source = sources.documents(spec, "train", WITHOUT_VALIDATION)

  check_fractions_are_reported(source)


def test_reading_a_tfds_dataset_reports_fractions(tfds_config):
  source = sources.documents("tfds:mine/single", "train", tfds_config)

  check_fractions_are_reported(source)


# Mixtures.


@pytest.mark.parametrize(
  ("spec", "expected"),
  [
    pytest.param("stdlib", [("stdlib", 1.0)], id="one source"),
    pytest.param(
      "stdlib=3, jsonl:/a=b/*.jsonl=1",
      [("stdlib", 0.75), ("jsonl:/a=b/*.jsonl", 0.25)],
      id="weights",
    ),
    pytest.param(
      "text:/a=b/c.txt", [("text:/a=b/c.txt", 1.0)], id="equals sign in a path"
    ),
  ],
)
def test_a_mixture_is_a_list_of_sources_with_weights(spec, expected):
  """Weights are divided by their sum. A source alone has no weight."""
  assert sources.parse_mixture(spec) == expected


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    pytest.param(
      "csv:data.csv",
      "'csv:data.csv' is not a source;"
      " the kinds are stdlib, tfds:NAME, text:GLOB",
      id="unknown kind",
    ),
    pytest.param("", "is not a source", id="empty"),
    pytest.param("text:", "is not a source", id="no path"),
    pytest.param(
      "stdlib,text:a",
      "every source of a mixture needs a weight.*'stdlib' has none",
      id="no weights",
    ),
    pytest.param("stdlib=a,text:a=1", "'stdlib=a' has none", id="no number"),
    pytest.param(
      "stdlib=0,text:a=1",
      "weight of 'stdlib' must be a positive number; got 0",
      id="zero",
    ),
    pytest.param(
      "stdlib=-1,text:a=1", "positive number; got -1", id="negative"
    ),
    pytest.param("stdlib=nan,text:a=1", "positive number; got nan", id="nan"),
    pytest.param("stdlib=1,stdlib=1", "twice", id="repeated"),
  ],
)
def test_a_bad_mixture_is_an_error_of_one_line(spec, message):
  """The error names the source and the field config.data.source."""
  with pytest.raises(UserError, match=message) as caught:
    sources.parse_mixture(spec)

  assert "config.data.source" in str(caught.value)
  assert "\n" not in str(caught.value)


# TFDS datasets.


@pytest.mark.usefixtures("tfds_copy")
def test_the_fingerprint_of_a_dataset_does_not_depend_on_its_directory(
  tfds_config, tmp_path
):
  """A copy has the same fingerprint, and another dataset has not.

  The fixture `tfds_copy` copies the dataset mine/single to `tmp_path`.
  """
  copy_config = DataConfig(validation_fraction=0.0, data_dir=str(tmp_path))
  original = sources.documents("tfds:mine/single", "train", tfds_config)
  copy = sources.documents("tfds:mine/single", "train", copy_config)
  other = sources.documents("tfds:mine/split:1.0.0", "train", tfds_config)

  assert copy.fingerprint() == original.fingerprint()
  assert other.fingerprint() != original.fingerprint()


def test_a_missing_dataset_is_an_error_that_lists_the_datasets(tfds_config):
  """The directory has the datasets mine/single and mine/split."""
  message = (
    r"'tfds:c4/en': no such dataset in .*data_dir"
    r".*it holds mine/single, mine/split"
  )
  with pytest.raises(UserError, match=message):
    read("tfds:c4/en", config=tfds_config)


def test_a_missing_version_is_an_error_that_lists_the_versions(tfds_config):
  """The dataset mine/split has two versions."""
  with pytest.raises(UserError, match="has the versions 1.0.0, 1.1.0"):
    read("tfds:mine/split:9.9.9", config=tfds_config)


def test_a_data_dir_that_does_not_exist_is_an_error(tmp_path):
  config = DataConfig(validation_fraction=0.0, data_dir=str(tmp_path / "none"))

  with pytest.raises(UserError, match="it holds no datasets"):
    read("tfds:c4/en", config=config)


@pytest.mark.parametrize("field", ["content", "number"])
def test_a_dataset_without_the_text_field_lists_its_features(
  tfds_config, field
):
  """The dataset has no field "content", and its field "number" is no text."""
  config = dataclasses.replace(tfds_config, text_field=field)

  message = (
    rf"text_field = '{field}' is not text"
    r".*features are number \(Scalar\), text \(Text\)$"
  )
  with pytest.raises(UserError, match=message):
    read("tfds:mine/single", config=config)


def test_a_dataset_in_another_format_is_an_error_that_names_the_conversion(
  tfds_copy, tmp_path
):
  """Only ArrayRecord files can be read at any index."""
  # Make the metadata and the name of the file say that it is a TFRecord file.
  info_path = tfds_copy / "dataset_info.json"
  info = json.loads(info_path.read_text())
  info["fileFormat"] = "tfrecord"
  info_path.write_text(json.dumps(info))
  path = records_file(tfds_copy)
  path.rename(tfds_copy / path.name.replace("array_record", "tfrecord"))
  config = DataConfig(validation_fraction=0.0, data_dir=str(tmp_path))

  with pytest.raises(
    UserError, match="not stored as ArrayRecord.*tfds convert_format"
  ):
    read("tfds:mine/single", config=config)


def test_a_dangling_link_to_a_newer_version_is_an_error(tfds_copy, tmp_path):
  """Otherwise the older version would be read instead.

  `tfds_copy` is the directory of version 1.0.0 of a dataset in `tmp_path`.
  """
  config = DataConfig(validation_fraction=0.0, data_dir=str(tmp_path))
  sources.documents("tfds:mine/single", "train", config)

  (tfds_copy.parent / "1.1.0").symlink_to("gone")

  with pytest.raises(UserError, match="1.1.0: a link to 'gone'"):
    sources.documents("tfds:mine/single", "train", config)


def replace_in_records(path, old, new):
  """Writes an ArrayRecord file again, with another text in its records."""
  reader = array_record_module.ArrayRecordReader(str(path))
  records = reader.read_all()
  reader.close()
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record.replace(old, new))
  writer.close()


def test_a_dataset_that_was_built_again_has_another_identity(
  tfds_copy, tmp_path
):
  """The names of the files and the number of records stay the same.

  `tfds_copy` is the directory of a dataset in `tmp_path`, with one file.
  """
  config = DataConfig(validation_fraction=0.0, data_dir=str(tmp_path))
  identity = sources.documents("tfds:mine/single", "train", config).identity

  replace_in_records(records_file(tfds_copy), b"document", b"Document")

  rebuilt = sources.documents("tfds:mine/single", "train", config)
  assert rebuilt.identity != identity


def test_a_dataset_that_was_built_again_is_read_again(tfds_copy, tmp_path):
  """Open files are cached, but not after a change.

  `tfds_copy` is the directory of a dataset in `tmp_path`, with one file.
  """
  config = DataConfig(validation_fraction=0.0, data_dir=str(tmp_path))
  old_texts = read_texts("tfds:mine/single", config=config)

  replace_in_records(records_file(tfds_copy), b"document", b"Document")

  new_texts = [text.replace("document", "Document") for text in old_texts]
  assert new_texts != old_texts
  assert read_texts("tfds:mine/single", config=config) == new_texts


# Files that are missing, empty or damaged.


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_pattern_without_files_is_an_error(kind, tmp_path):
  with pytest.raises(UserError, match=rf"no file matches '{tmp_path}/\*.none'"):
    read(f"{kind}:{tmp_path}/*.none")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_file_of_zero_bytes_is_an_error(kind, tmp_path):
  (tmp_path / "empty").write_bytes(b"")

  with pytest.raises(UserError, match="empty: the 1 files"):
    read(f"{kind}:{tmp_path}/empty")


def test_parquet_without_rows_is_an_error(tmp_path):
  source = write(tmp_path / "a.parquet", texts=[])

  with pytest.raises(UserError, match="empty"):
    read(source)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_was_cut_short_is_named(tmp_path, texts, name):
  """The last 40 bytes of a compressed file are missing."""
  path = tmp_path / name
  source = write(path, texts)
  content = path.read_bytes()

  path.write_bytes(content[:-40])

  with pytest.raises(UserError, match=name):
    read(source)


def damage_in_21_ways(content) -> list[bytes]:
  """Returns versions of a file's content with all kinds of damage.

  12 have a flipped bit, 4 are cut short, 4 are overwritten, 1 is random.
  """
  rng = np.random.default_rng(0)
  size = len(content)
  versions = []
  for _ in range(12):
    flipped_bit = bytearray(content)
    flipped_bit[rng.integers(size)] ^= 1 << rng.integers(8)
    versions.append(bytes(flipped_bit))
  for _ in range(4):
    cut_short = content[: rng.integers(1, size)]
    versions.append(cut_short)
    start = rng.integers(size - 100)
    overwritten = content[:start] + rng.bytes(100) + content[start + 100 :]
    versions.append(overwritten)
  versions.append(rng.bytes(size))
  return versions


def read_damaged_versions(path, source) -> list[str]:
  """Reads a source with 21 kinds of damage, and returns the error messages."""
  messages = []
  for content in damage_in_21_ways(path.read_bytes()):
    path.write_bytes(content)
    try:
      read(source)
    except UserError as error:
      messages.append(str(error))
  return messages


@pytest.mark.parametrize(
  "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
def test_a_damaged_file_yields_documents_or_a_named_error(
  tmp_path, texts, name
):
  """Damage must not end a run with a traceback of a library."""
  path = tmp_path / name
  source = write(path, texts)

  messages = read_damaged_versions(path, source)

  # These formats have a structure, so most kinds of damage are errors.
  assert len(messages) > 4
  for message in messages:
    assert str(path) in message
    assert "\n" not in message


def test_a_damaged_text_file_is_still_a_text_file(tmp_path, texts):
  """Any bytes are text, because invalid UTF-8 is replaced."""
  path = tmp_path / "a.txt"
  source = write(path, texts)

  messages = read_damaged_versions(path, source)

  assert not messages


def test_a_damaged_dataset_yields_documents_or_a_named_error(
  tfds_copy, tmp_path
):
  """Damage must not end a run with a traceback of a library.

  `tfds_copy` is the directory of a dataset, with one file of records.
  """
  content = records_file(tfds_copy).read_bytes()

  message_by_path = {}
  for index, damaged in enumerate(damage_in_21_ways(content)):
    # Each damaged version is in a data_dir of its own.
    data_dir = tmp_path / f"copy{index}"
    dataset_dir = data_dir / "mine" / "single" / "1.0.0"
    shutil.copytree(tfds_copy, dataset_dir)
    path = records_file(dataset_dir)
    path.write_bytes(damaged)
    config = DataConfig(validation_fraction=0.0, data_dir=str(data_dir))
    try:
      read("tfds:mine/single", config=config)
    except UserError as error:
      message_by_path[path] = str(error)

  # ArrayRecord has hashes of its blocks, so most kinds of damage are errors.
  assert len(message_by_path) > 4
  for path, message in message_by_path.items():
    assert str(path) in message
    assert "\n" not in message


def test_the_error_names_the_damaged_row_group(tmp_path, texts):
  """The number of the row group tells how much of the file is good."""
  path = tmp_path / "a.parquet"
  source = write(path, texts)
  # Column 0 is the text. Its data is damaged in the third row group.
  metadata = pyarrow.parquet.ParquetFile(path).metadata
  start_of_text = metadata.row_group(2).column(0).data_page_offset
  with path.open("r+b") as file:
    file.seek(start_of_text)
    file.write(b"\xff" * 20)

  # The message also has the number of rows that could be read before: none.
  message = "a.parquet: row group 2 cannot be read beyond its row 0"
  with pytest.raises(UserError, match=message):
    read(source)


def test_the_error_names_the_damaged_record(tfds_copy, tmp_path):
  """`tfds_copy` is the directory of a dataset in `tmp_path`."""
  path = records_file(tfds_copy)
  first_bytes = path.read_bytes()[:1000]
  path.write_bytes(first_bytes)
  config = DataConfig(validation_fraction=0.0, data_dir=str(tmp_path))

  with pytest.raises(UserError, match=f"{path}: record 0 cannot be read"):
    read("tfds:mine/single", config=config)


@pytest.mark.parametrize("part_bytes", [1 << 20, 10])
@pytest.mark.parametrize(
  ("line", "message"),
  [
    pytest.param('{"text": "x"', "a.jsonl:3: not JSON", id="not JSON"),
    pytest.param(
      '{"body": "x", "id": 1}',
      "a.jsonl:3: config.data.text_field = 'text' is not text here;"
      r" the fields are body \(str\), id \(int\)",
      id="other fields",
    ),
    pytest.param('{"text": 5}', r"a.jsonl:3: .*text \(int\)", id="a number"),
    pytest.param('["text"]', "a.jsonl:3: .*must be a JSON object", id="a list"),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message, part_bytes, monkeypatch):
  """The line number is right also if the file is read in parts of 10 bytes."""
  monkeypatch.setattr(jsonl_source, "PART_BYTES", part_bytes)
  path = tmp_path / "a.jsonl"
  path.write_text(f'{{"text": "one"}}\n{{"text": "two"}}\n{line}\n')

  with pytest.raises(UserError, match=message) as caught:
    read(f"jsonl:{path}")
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["body", "id"])
def test_parquet_without_the_text_field_lists_its_columns(tmp_path, field):
  """The file has no column "body", and its column "id" has numbers."""
  source = write(tmp_path / "a.parquet", ["one"])
  config = DataConfig(validation_fraction=0.0, text_field=field)

  with pytest.raises(
    UserError, match=f"text_field = '{field}'.*columns are text.*id"
  ):
    read(source, config=config)


# Files that change after they were listed.


@pytest.mark.parametrize(
  "name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"]
)
@pytest.mark.parametrize("is_directory", [False, True])
def test_a_file_that_is_gone_is_an_error(tmp_path, texts, name, is_directory):
  """The error names the file, and is not a crash."""
  path = tmp_path / name
  source = sources.documents(write(path, texts), "train", WITHOUT_VALIDATION)

  path.unlink()
  # A directory can have taken the place of the file.
  if is_directory:
    path.mkdir()

  with pytest.raises(UserError, match=str(path)):
    read_parts(source)


def cut_after_a_line(path):
  """Removes about half of a file, from the start of a line on."""
  content = path.read_bytes()
  end = content.index(b"\n", len(content) // 2) + 1
  path.write_bytes(content[:end])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_shorter_file_of_lines_can_be_read(tmp_path, texts, name):
  path = tmp_path / name
  source = sources.documents(write(path, texts), "train", WITHOUT_VALIDATION)

  cut_after_a_line(path)

  assert read_parts(source)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_shorter_compressed_file_is_an_error(tmp_path, texts, name):
  """Without its end, a compressed file cannot be read."""
  path = tmp_path / name
  source = sources.documents(write(path, texts), "train", WITHOUT_VALIDATION)

  cut_after_a_line(path)

  with pytest.raises(UserError, match=str(path)):
    read_parts(source)


def test_a_parquet_file_rewritten_within_a_second_is_read_again(tmp_path):
  """Footers are cached by the size and the time of a file in nanoseconds."""
  path = tmp_path / "a.parquet"
  source = write(path, ["old", "text"])
  old_time_ns = 1_700_000_000_000_000_000
  os.utime(path, ns=(old_time_ns, old_time_ns))
  old_size = path.stat().st_size
  old_texts = read_texts(source)
  old_footer = parquet.read_metadata(str(path))

  write(path, ["new", "text"])
  one_nanosecond_later = old_time_ns + 1
  os.utime(path, ns=(one_nanosecond_later, one_nanosecond_later))
  new_size = path.stat().st_size
  new_texts = read_texts(source)
  new_footer = parquet.read_metadata(str(path))

  assert new_size == old_size
  assert old_texts == ["old", "text"]
  assert new_texts == ["new", "text"]
  # The cache would return the same object.
  assert new_footer is not old_footer


# Patterns and links.


def test_local_patterns_match_as_in_the_standard_library(tmp_path, monkeypatch):
  """A pattern matches the files that `glob.glob` finds, once and sorted."""
  # 60 random directories, such as "a/.h/b", with three files each.
  rng = random.Random(0)
  for _ in range(60):
    depth = rng.randrange(4)
    names = rng.choices(["a", "b", ".h", "a.txt"], k=depth)
    directory = tmp_path.joinpath(*names)
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("1.txt", "[2].txt", ".3.txt"):
      (directory / name).write_text("text")
  monkeypatch.chdir(tmp_path)

  for pattern in (
    # A name, all names, and only directories.
    "1.txt",
    "missing",
    "*",
    "./*.txt",
    "*/",
    # Directories at any depth.
    "**",
    "**/*.txt",
    "**/a/**/1.txt",
    "**/**/?.txt",
    "*/**/*",
    "*/missing/*",
    f"{tmp_path}/**/b/*",
    # Brackets in a name, a directory that is not "a", and hidden files.
    "**/[[]2].txt",
    "a//[!a]/*.txt",
    ".h/**/.*",
  ):
    # glob.glob also returns directories, and some files twice.
    paths = set(glob.glob(pattern, recursive=True))
    expected = [path for path in paths if os.path.isfile(path)]
    assert local_glob.match(pattern) == sorted(expected), pattern


@pytest.fixture
def tree(tmp_path) -> pathlib.Path:
  """Writes four files into a directory and its subdirectories."""
  (tmp_path / "data/a/deep").mkdir(parents=True)
  (tmp_path / "data/b").mkdir()
  for name in ("0", "a/1", "a/deep/2", "b/3"):
    (tmp_path / "data" / f"{name}.txt").write_text(name)
  return tmp_path / "data"


@pytest.mark.parametrize("pattern", ["**/*.txt", "**", "**/**/*.txt"])
def test_files_behind_several_links_are_listed_once(tmp_path, pattern):
  """Links to directories can form cycles, which would never end."""
  root = tmp_path / "root"
  outside = tmp_path / "outside"
  (root / "a/deep").mkdir(parents=True)
  (root / "b").mkdir()
  outside.mkdir()
  for name in ("0.txt", "a/1.txt", "a/deep/2.txt", "b/3.txt"):
    (root / name).write_text("text")
  (outside / "4.txt").write_text("text")
  # Cycles: to the same directory, to each other, and to the root.
  (root / "self").symlink_to(".")
  (root / "a/up").symlink_to("../b")
  (root / "b/up").symlink_to("../a")
  (root / "a/deep/root").symlink_to(root)
  # A second name of the directory "a", which is sorted before it.
  (root / "0_first").symlink_to("a")
  # The only name of a directory.
  (root / "link").symlink_to(outside)

  matches = files.match(f"{root}/{pattern}")

  # A file is listed by its name without links, if it has one.
  names = [os.path.relpath(file.name, root) for file in matches]
  assert names == ["0.txt", "a/1.txt", "a/deep/2.txt", "b/3.txt", "link/4.txt"]


def test_files_that_a_repair_of_the_disk_found_are_skipped(tree):
  """A repair puts pieces of deleted files into the directory lost+found."""
  # The tree has 0.txt, a/1.txt, a/deep/2.txt and b/3.txt.
  (tree / "lost+found").mkdir()
  (tree / "lost+found/5.txt").write_text("5")

  matches = files.match(f"{tree}/**/*.txt")

  names = [os.path.relpath(file.name, tree) for file in matches]
  assert names == ["0.txt", "a/1.txt", "a/deep/2.txt", "b/3.txt"]


def test_a_link_to_a_file_counts_like_a_file(tree):
  """The tree has the file 0.txt, whose text is "0"."""
  (tree / "again.txt").symlink_to("0.txt")

  documents = read_texts(f"text:{tree}/*.txt")

  assert documents == ["0", "0"]


# Each pattern can match the link, or a file behind it.
PATTERNS_AND_BAD_LINKS = pytest.mark.parametrize(
  ("pattern", "link"),
  [
    ("new.txt", "new.txt"),
    ("*.txt", "new.txt"),
    ("**/*.txt", "b/new.txt"),
    ("**/*.txt", "b/moved"),
    ("*/3.txt", "moved"),
    ("moved/3.txt", "moved"),
  ],
)


@PATTERNS_AND_BAD_LINKS
def test_a_dangling_link_is_an_error(tree, pattern, link):
  """Otherwise a run would not notice that the linked file is missing."""
  # The tree has 0.txt, a/1.txt, a/deep/2.txt and b/3.txt.
  path = tree / link
  path.symlink_to("gone")

  message = f"^{path}: .*a link to 'gone', which does not exist"
  with pytest.raises(UserError, match=message):
    sources.documents(f"text:{tree}/{pattern}", "train", WITHOUT_VALIDATION)


@PATTERNS_AND_BAD_LINKS
def test_a_link_to_itself_is_an_error(tree, pattern, link):
  """The system gives up following such a link."""
  # The tree has 0.txt, a/1.txt, a/deep/2.txt and b/3.txt.
  path = tree / link
  path.symlink_to(path.name)

  message = f"^{path}: .*Too many levels of symbolic links"
  with pytest.raises(UserError, match=message):
    sources.documents(f"text:{tree}/{pattern}", "train", WITHOUT_VALIDATION)


# Missing permissions.


def test_an_unreadable_directory_is_an_error(tree, monkeypatch):
  """Otherwise a run would not notice that the files in it are missing.

  The tree has the file 0.txt, and directories "a" and "b".
  """
  # Root can read every directory, so a missing permission is simulated.
  scandir = os.scandir

  def refusing_scandir(path):
    if str(path).endswith("/b"):
      raise PermissionError(13, "Permission denied", path)
    return scandir(path)

  monkeypatch.setattr(os, "scandir", refusing_scandir)

  for pattern in ("**/*.txt", "*/*.txt"):
    with pytest.raises(UserError, match=f"^{tree}/b: .*ermission denied"):
      sources.documents(f"text:{tree}/{pattern}", "train", WITHOUT_VALIDATION)
  # This pattern does not need the directory.
  sources.documents(f"text:{tree}/*.txt", "train", WITHOUT_VALIDATION)


@pytest.fixture
def tree_with_unreadable_file(tree, monkeypatch) -> pathlib.Path:
  """Returns `tree`, in which the file b/3.txt cannot be read.

  Root can read every file, so a missing permission is simulated.
  """
  has_access = os.access

  def has_access_except_to_3_txt(path, mode):
    if str(path).endswith("3.txt"):
      return False
    return has_access(path, mode)

  monkeypatch.setattr(os, "access", has_access_except_to_3_txt)
  return tree


@pytest.mark.parametrize("pattern", ["**/*.txt", "*/*.txt"])
def test_an_unreadable_file_is_an_error(tree_with_unreadable_file, pattern):
  """Otherwise a run would not notice that the file b/3.txt is missing."""
  path = tree_with_unreadable_file / "b/3.txt"
  spec = f"text:{tree_with_unreadable_file}/{pattern}"

  with pytest.raises(UserError, match=f"^{path}: .*[Pp]ermission denied"):
    sources.documents(spec, "train", DataConfig())


def test_an_unreadable_file_that_is_not_matched_is_ignored(
  tree_with_unreadable_file,
):
  """The pattern matches 0.txt, but not the unreadable file b/3.txt."""
  spec = f"text:{tree_with_unreadable_file}/*.txt"

  source = sources.documents(spec, "train", DataConfig())

  assert source.num_files == 1
