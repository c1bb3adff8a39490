"""Every kind of source gives its documents, and every bad one an error of one line."""

import dataclasses
import glob
import gzip
import json
import os
import random
import shutil

import numpy as np
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import (
  files,
  jsonl_source,
  local_glob,
  parquet,
  sources,
  tfds_source,
)

ALL = DataConfig(validation_fraction=0.0)


def read(spec, split="train", config=ALL):
  source = sources.documents(spec, split, config)
  return [document for part in source.parts for document in source.read(part)]


def read_texts(*args, **kwargs):
  return [document.text for document in read(*args, **kwargs)]


@pytest.fixture(scope="session")
def tfds_dir(tmp_path_factory, texts):
  """A TFDS data_dir with dataset "mine", of which "split/1.0.0" and "split/1.1.0" have a validation split and "single" has none."""
  import tensorflow_datasets as tfds

  root = tmp_path_factory.mktemp("tfds")

  def build(name, config, version, splits, file_format="array_record"):
    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
      VERSION = tfds.core.Version(version)
      BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)]
      code_path = None

      def _info(self):
        features = tfds.features.FeaturesDict(
          {
            "text": tfds.features.Text(),
            "number": tfds.features.Scalar(np.int64),
          }
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

      def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in splits}

      def _generate_examples(self, split):
        for index, text in enumerate(splits[split]):
          yield index, {"text": text, "number": index}

    Builder.name = name
    Builder(data_dir=root, file_format=file_format).download_and_prepare()

  build("mine", "split", "1.0.0", {"train": ["old"], "validation": ["old"]})
  build(
    "mine",
    "split",
    "1.1.0",
    {"train": texts, "validation": ["only for validation"]},
  )
  build("mine", "single", "1.0.0", {"train": texts})
  return root


def write(path, texts, field="text"):
  lines = "".join(
    json.dumps({field: text, "id": index}) + "\n"
    for index, text in enumerate(texts)
  ).encode()
  if path.suffix == ".gz":
    path.write_bytes(gzip.compress(lines))
  elif path.suffix == ".zst":
    import pyarrow

    # Two frames, as in a file that lines were appended to.
    half = lines.index(b"\n", len(lines) // 2) + 1
    first = pyarrow.compress(lines[:half], codec="zstd", asbytes=True)
    second = pyarrow.compress(lines[half:], codec="zstd", asbytes=True)
    path.write_bytes(first + second)
  elif path.suffix == ".parquet":
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
      pyarrow.table({field: texts, "id": range(len(texts))}),
      path,
      row_group_size=70,
    )
  else:
    path.write_bytes(lines)
  return path


@pytest.mark.parametrize(
  "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
def test_record_files_give_their_documents(tmp_path, texts, name):
  path = write(tmp_path / name, texts, field="content")
  kind = "parquet" if name.endswith("parquet") else "jsonl"
  config = dataclasses.replace(ALL, text_field="content")
  assert read_texts(f"{kind}:{path}", config=config) == texts
  assert read_texts(f"{kind}:{tmp_path}/*", config=config) == texts


def test_text_files_are_documents_in_order_of_name(tmp_path, texts):
  for index, text in enumerate(texts):
    (tmp_path / f"{index % 2}").mkdir(exist_ok=True)
    (tmp_path / f"{index % 2}" / f"{index:04}.txt").write_bytes(text.encode())
  assert read_texts(f"text:{tmp_path}/**/*.txt") == texts[::2] + texts[1::2]


def test_ranges_of_a_large_jsonl_meet_at_lines(tmp_path, texts, monkeypatch):
  path = write(tmp_path / "a.jsonl", texts)
  for size in (97, 1000, 7919):
    monkeypatch.setattr(jsonl_source, "_PART_BYTES", size)
    assert len(sources.documents(f"jsonl:{path}", "train", ALL).parts) > 5
    assert read_texts(f"jsonl:{path}") == texts


def test_tfds_by_name_and_data_dir(tfds_dir, texts):
  config = dataclasses.replace(ALL, data_dir=str(tfds_dir))
  assert sorted(read_texts("tfds:mine/split", config=config)) == sorted(
    texts
  )  # the newest version
  assert read_texts("tfds:mine/split", "validation", config) == [
    "only for validation"
  ]
  assert read_texts("tfds:mine/split:1.0.0", config=config) == ["old"]


@pytest.mark.parametrize("kind", ["jsonl", "tfds"])
def test_held_out_documents_never_leak(kind, jsonl, texts, tfds_dir):
  with jsonl.open(
    "a"
  ) as file:  # every document a second time: copies must stay together
    file.write(jsonl.read_text())
  spec = {"jsonl": f"jsonl:{jsonl}", "tfds": "tfds:mine/single"}[kind]
  config = DataConfig(validation_fraction=0.2, data_dir=str(tfds_dir))
  train, validation = (
    read_texts(spec, "train", config),
    read_texts(spec, "validation", config),
  )
  copies = 2 if kind == "jsonl" else 1
  assert sorted(train + validation) == sorted(texts * copies)
  assert not set(train) & set(validation)
  assert 0.1 < len(validation) / len(texts) / copies < 0.3
  assert read_texts(spec, "validation", config) == validation


def test_validation_source_leaves_both_sides_whole(jsonl, tmp_path, texts):
  other = write(tmp_path / "other.jsonl", ["held out"])
  config = DataConfig(
    validation_fraction=0.2, validation_source=f"jsonl:{other}"
  )
  assert read_texts(f"jsonl:{jsonl}", "train", config) == texts
  assert read_texts(f"jsonl:{other}", "validation", config) == ["held out"]


def test_what_is_not_utf8_is_replaced_and_marked(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
  assert read(f"text:{tmp_path}/a.txt") == [("caf� au lait", True, None)]
  (tmp_path / "a.jsonl").write_bytes(
    b'{"text": "caf\xe9"}\n{"text": "half \\ud83d of one"}\n{"text": "\\ud83d\\ude00"}\n'
  )
  assert read(f"jsonl:{tmp_path}/a.jsonl") == [
    ("caf�", True, None),
    ("half ��� of one", True, None),
    ("😀", False, None),
  ]


def test_byte_order_marks_are_not_text(tmp_path):
  """Some editors begin a file with one; joined files have them at other lines too."""
  mark = "\ufeff".encode()
  (tmp_path / "a.txt").write_bytes(mark + "café\ufeff".encode())
  assert read_texts(f"text:{tmp_path}/a.txt") == ["café\ufeff"]
  lines = mark + b'{"text": "one"}\n' + mark + b'{"text": "two"}\n' + mark
  (tmp_path / "a.jsonl").write_bytes(lines)
  (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
  assert read_texts(f"jsonl:{tmp_path}/*.jsonl*") == ["one", "two"] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_that_would_fill_the_memory_is_refused(
  tmp_path, monkeypatch, name
):
  """A small compressed file may hold one of any length: no more of it is read than a document may have."""
  monkeypatch.setattr(jsonl_source, "_MAX_LINE_BYTES", 100)
  texts = [
    "x" * 70,
    "short",
    "x" * 80,
  ]  # with its field, the last one is too long
  path = write(tmp_path / name, texts)
  with pytest.raises(
    UserError, match=f"{name}:3: the line is longer than .* MiB.*split it"
  ) as caught:
    read(f"jsonl:{path}")
  assert "\n" not in str(caught.value)
  assert read_texts(f"jsonl:{write(path, texts[:2])}") == texts[:2]


@pytest.mark.parametrize(
  "name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet", "tfds"]
)
def test_reading_says_how_far_it_is(tmp_path, tfds_dir, name, monkeypatch):
  monkeypatch.setattr(jsonl_source, "_PART_BYTES", 35_000)
  monkeypatch.setattr(
    gzip, "READ_BUFFER_SIZE", 8192, raising=False
  )  # newer Pythons read 128 KiB at a time: all of this small file
  rng = np.random.default_rng(0)
  texts = [rng.bytes(500).hex() for _ in range(100)]
  for index, text in enumerate(texts):
    (tmp_path / f"{index:02}.txt").write_text(text)
  spec = {"a.txt": f"text:{tmp_path}/*.txt", "tfds": "tfds:mine/single"}.get(
    name
  )
  spec = (
    spec
    or f"{'parquet' if name == 'a.parquet' else 'jsonl'}:{write(tmp_path / name, texts)}"
  )
  source = sources.documents(
    spec, "train", dataclasses.replace(ALL, data_dir=str(tfds_dir))
  )
  for part in source.parts:
    shares = []
    assert list(source.read(part, shares.append))
    assert (
      shares == sorted(shares)
      and 0 < shares[0]
      and shares[-1] == pytest.approx(1, abs=0.01)
    )
    assert (
      len(set(shares)) > len(shares) / 20 and shares[0] < 0.5
    )  # gzip reads ahead, by a few kilobytes


def test_documents_without_text_are_skipped(tmp_path):
  (tmp_path / "a.jsonl").write_text(
    '{"text": "one"}\n\n{"text": ""}\n{"text": null}\n{"text": "two"}'
  )
  assert read_texts(f"jsonl:{tmp_path}/a.jsonl") == ["one", "two"]


def test_mixtures():
  assert sources.parse_mixture("stdlib") == [("stdlib", 1.0)]
  assert sources.parse_mixture("stdlib=3, jsonl:/a=b/*.jsonl=1") == [
    ("stdlib", 0.75),
    ("jsonl:/a=b/*.jsonl", 0.25),
  ]
  assert sources.parse_mixture("text:/a=b/c.txt") == [("text:/a=b/c.txt", 1.0)]


@pytest.mark.parametrize(
  ("spec", "message"),
  [
    (
      "csv:data.csv",
      "'csv:data.csv' is not a source; the kinds are stdlib, tfds:NAME, text:GLOB",
    ),
    ("", "is not a source"),
    ("text:", "is not a source"),
    (
      "stdlib,text:a",
      "every source of a mixture needs a weight.*'stdlib' has none",
    ),
    ("stdlib=a,text:a=1", "'stdlib=a' has none"),
    (
      "stdlib=0,text:a=1",
      "weight of 'stdlib' must be a positive number; got 0",
    ),
    ("stdlib=-1,text:a=1", "positive number; got -1"),
    ("stdlib=nan,text:a=1", "positive number; got nan"),
    ("stdlib=1,stdlib=1", "twice"),
  ],
)
def test_bad_specs(spec, message):
  with pytest.raises(UserError, match=message) as caught:
    sources.parse_mixture(spec)
  assert "config.data.source" in str(caught.value) and "\n" not in str(
    caught.value
  )


def test_a_dataset_has_one_fingerprint_wherever_it_lies(tfds_dir, tmp_path):
  def fingerprint(root, name="mine/single"):
    return sources.documents(
      f"tfds:{name}", "train", dataclasses.replace(ALL, data_dir=str(root))
    ).fingerprint()

  shutil.copytree(tfds_dir, tmp_path / "copy")
  assert fingerprint(tmp_path / "copy") == fingerprint(tfds_dir)
  assert fingerprint(tfds_dir, "mine/split:1.0.0") != fingerprint(tfds_dir)


def test_missing_dataset_lists_what_is_there(tfds_dir):
  config = dataclasses.replace(ALL, data_dir=str(tfds_dir))
  with pytest.raises(
    UserError,
    match=r"'tfds:c4/en': no such dataset in .*data_dir.*it holds mine/single, mine/split",
  ):
    read("tfds:c4/en", config=config)
  with pytest.raises(UserError, match="has the versions 1.0.0, 1.1.0"):
    read("tfds:mine/split:9.9.9", config=config)


def test_empty_data_dir_says_so(tmp_path):
  with pytest.raises(UserError, match="it holds no datasets"):
    read(
      "tfds:c4/en",
      config=dataclasses.replace(ALL, data_dir=str(tmp_path / "none")),
    )


def test_dataset_without_text_lists_its_features(tfds_dir):
  features = r"number \(Scalar\), text \(Text\)"
  for field in ("content", "number"):
    with pytest.raises(
      UserError,
      match=rf"text_field = '{field}' is not text.*features are {features}$",
    ):
      read(
        "tfds:mine/single",
        config=dataclasses.replace(
          ALL, data_dir=str(tfds_dir), text_field=field
        ),
      )


def test_dataset_in_another_format_names_the_remedy(tfds_dir, tmp_path):
  copy = tmp_path / "mine" / "single" / "1.0.0"
  shutil.copytree(tfds_dir / "mine" / "single" / "1.0.0", copy)
  info = json.loads((copy / "dataset_info.json").read_text())
  (copy / "dataset_info.json").write_text(
    json.dumps({**info, "fileFormat": "tfrecord"})
  )
  for path in copy.glob("*array_record*"):
    path.rename(copy / path.name.replace("array_record", "tfrecord"))
  with pytest.raises(
    UserError, match="not stored as ArrayRecord.*tfds convert_format"
  ):
    read(
      "tfds:mine/single",
      config=dataclasses.replace(ALL, data_dir=str(tmp_path)),
    )


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_files_that_are_missing_empty_or_damaged(kind, tmp_path):
  with pytest.raises(UserError, match=rf"no file matches '{tmp_path}/\*.none'"):
    read(f"{kind}:{tmp_path}/*.none")
  (tmp_path / "empty").write_bytes(b"")
  with pytest.raises(UserError, match="empty: the 1 files"):
    read(f"{kind}:{tmp_path}/empty")


def test_damaged_files_are_named(tmp_path, texts):
  for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
    path = write(tmp_path / name, texts)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=name):
      read(f"{'parquet' if name.endswith('parquet') else 'jsonl'}:{path}")


def damages(data, rng):
  """A file with a flipped bit, cut short, with random bytes in its middle, and of random bytes alone."""
  for _ in range(12):
    flipped = bytearray(data)
    flipped[rng.integers(len(data))] ^= 1 << rng.integers(8)
    yield bytes(flipped)
  for _ in range(4):
    yield data[: rng.integers(1, len(data))]
    start = rng.integers(len(data) - 100)
    yield data[:start] + rng.bytes(100) + data[start + 100 :]
  yield rng.bytes(len(data))


@pytest.mark.parametrize(
  "name",
  [
    "a.txt",
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a.parquet",
    "array_record",
  ],
)
def test_damage_gives_documents_or_one_line_that_names_the_file(
  tmp_path, tfds_dir, texts, name
):
  if name == "array_record":
    shutil.copytree(
      tfds_dir / "mine" / "single" / "1.0.0",
      tmp_path / "mine" / "single" / "1.0.0",
    )
    (path,) = tmp_path.glob("mine/single/1.0.0/*array_record*")
    spec = "tfds:mine/single"
  else:
    path = write(tmp_path / name, texts)
    spec = (
      f"{ {'txt': 'text', 'parquet': 'parquet'}.get(name[2:], 'jsonl') }:{path}"
    )
  config, messages = dataclasses.replace(ALL, data_dir=str(tmp_path)), []
  for content in damages(path.read_bytes(), np.random.default_rng(0)):
    path.write_bytes(content)
    tfds_source._open_records.cache_clear()
    try:
      read(spec, config=config)
    except UserError as error:
      messages.append(str(error))
  assert all(
    str(path) in message and "\n" not in message for message in messages
  ), messages
  assert len(messages) > 4 or name == "a.txt", (
    "bytes that are not UTF-8 are replaced; everything else has a form to break"
  )


def test_damage_is_placed(tmp_path, tfds_dir, texts):
  import pyarrow.parquet

  path = write(tmp_path / "a.parquet", texts)  # of 70 rows a group
  content, column = (
    path.read_bytes(),
    pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0),
  )
  middle = (
    column.dictionary_page_offset or column.data_page_offset
  ) + column.total_compressed_size // 2
  path.write_bytes(content[:middle] + b"\xff" * 20 + content[middle + 20 :])
  with pytest.raises(
    UserError, match="a.parquet: row group 2 cannot be read beyond its row 0"
  ):
    read(f"parquet:{path}")
  shutil.copytree(
    tfds_dir / "mine" / "single" / "1.0.0",
    tmp_path / "mine" / "single" / "1.0.0",
  )
  (path,) = tmp_path.glob("mine/single/1.0.0/*array_record*")
  path.write_bytes(path.read_bytes()[:1000])
  tfds_source._open_records.cache_clear()
  with pytest.raises(UserError, match=f"{path}: record 0 cannot be read"):
    read(
      "tfds:mine/single",
      config=dataclasses.replace(ALL, data_dir=str(tmp_path)),
    )


def test_local_globs_match_as_in_the_standard_library(tmp_path, monkeypatch):
  rng = random.Random(0)
  for _ in range(60):
    depth = rng.randrange(4)
    names = [rng.choice(["a", "b", ".h", "a.txt"]) for _ in range(depth)]
    directory = tmp_path.joinpath(*names)
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("1.txt", "[2].txt", ".3.txt"):
      (directory / name).write_text("text")
  monkeypatch.chdir(tmp_path)
  for pattern in (
    "*",
    "**",
    "1.txt",
    "./*.txt",
    "*/",
    "**/*.txt",
    "**/[[]2].txt",
    "**/a/**/1.txt",
    "**/**/?.txt",
    "*/**/*",
    "a//[!a]/*.txt",
    ".h/**/.*",
    "*/missing/*",
    "missing",
    f"{tmp_path}/**/b/*",
  ):
    expected = glob.glob(pattern, recursive=True)
    expected = {path for path in expected if os.path.isfile(path)}
    assert local_glob.match(pattern) == sorted(expected), pattern


def test_every_directory_is_searched_once(tmp_path):
  """Whatever links lead to it. A link to a file counts like the file."""
  (tmp_path / "data/a/deep").mkdir(parents=True)
  (tmp_path / "data/b").mkdir()
  (tmp_path / "elsewhere").mkdir()
  for name in (
    "data/0",
    "data/a/1",
    "data/a/deep/2",
    "data/b/3",
    "elsewhere/4",
  ):
    (tmp_path / f"{name}.txt").write_text(name)
  (tmp_path / "data/self").symlink_to(".")
  found = files.match(f"{tmp_path}/data/**/*.txt")
  names = ["0", "a/1", "a/deep/2", "b/3"]
  assert [file.name for file in found] == [
    f"{tmp_path}/data/{name}.txt" for name in names
  ]
  (tmp_path / "data/0_first").symlink_to("a")  # sorted before "a"
  (tmp_path / "data/a/up").symlink_to("../b")
  (tmp_path / "data/b/up").symlink_to("../a")
  (tmp_path / "data/a/deep/root").symlink_to(tmp_path / "data")
  (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
  (tmp_path / "data/lost+found").mkdir()
  (tmp_path / "data/lost+found/5.txt").write_text("not of the data")
  expected = ["0", "a/1", "a/deep/2", "b/3", "link/4"]
  for pattern in ("**/*.txt", "**", "**/**/*.txt"):
    found = files.match(f"{tmp_path}/data/{pattern}")
    assert [file.name for file in found] == [
      f"{tmp_path}/data/{name}.txt" for name in expected
    ]
  (tmp_path / "data/again.txt").symlink_to("0.txt")
  texts = read_texts(f"text:{tmp_path}/data/*.txt")
  assert texts == ["data/0", "data/0"]


@pytest.mark.parametrize(
  ("pattern", "link"),
  [
    ("a.txt", "a.txt"),
    ("*.txt", "a.txt"),
    ("**/*.txt", "b/a.txt"),
    ("**/*.txt", "b/moved"),
    ("*/c.txt", "moved"),
    ("moved/c.txt", "moved"),
  ],
)
@pytest.mark.parametrize("target", ["gone", "self"])
def test_a_dangling_link_is_an_error(tmp_path, pattern, link, target):
  (tmp_path / "b").mkdir()
  for name in ("ok.txt", "b/c.txt"):
    (tmp_path / name).write_text("text")
  link = tmp_path / link
  link.symlink_to(link.name if target == "self" else "gone")
  with pytest.raises(UserError, match=f"^{link}: ") as caught:
    sources.documents(f"text:{tmp_path}/{pattern}", "train", ALL)
  message = str(caught.value)
  if target == "gone":
    assert "a link to 'gone', which does not exist" in message
  else:
    assert "Too many levels of symbolic links" in message


def test_a_dangling_version_of_a_dataset_is_an_error(tfds_dir, tmp_path):
  """The version before it would be read instead."""
  versions = tmp_path / "mine" / "single"
  versions.mkdir(parents=True)
  (versions / "1.0.0").symlink_to(tfds_dir / "mine" / "single" / "1.0.0")
  config = dataclasses.replace(ALL, data_dir=str(tmp_path))
  sources.documents("tfds:mine/single", "train", config)
  (versions / "1.1.0").symlink_to("gone")
  with pytest.raises(UserError, match="1.1.0: a link to 'gone'"):
    sources.documents("tfds:mine/single", "train", config)


@pytest.mark.parametrize("which", ["directory", "file"])
def test_what_cannot_be_read_is_an_error(tmp_path, monkeypatch, which):
  """Before anything is read. Root may read everything, so it is simulated."""
  (tmp_path / "b").mkdir()
  for name in ("ok.txt", "b/c.txt"):
    (tmp_path / name).write_text("text")
  scandir, access = os.scandir, os.access

  def refusing_scandir(path):
    if which == "directory" and str(path).endswith("/b"):
      raise PermissionError(13, "Permission denied", path)
    return scandir(path)

  def refusing_access(path, mode):
    is_refused = which == "file" and str(path).endswith("c.txt")
    return not is_refused and access(path, mode)

  monkeypatch.setattr(os, "scandir", refusing_scandir)
  monkeypatch.setattr(os, "access", refusing_access)
  name = {"directory": "b", "file": "b/c.txt"}[which]
  for pattern in ("**/*.txt", "*/*.txt"):
    with pytest.raises(UserError, match=f"^{tmp_path}/{name}: ") as caught:
      sources.documents(f"text:{tmp_path}/{pattern}", "train", ALL)
    assert "ermission denied" in str(caught.value)
  sources.documents(f"text:{tmp_path}/*.txt", "train", ALL)


def test_a_dataset_that_was_built_again_is_another(tfds_dir, tmp_path):
  """With other text, but as many documents in files of the same names."""
  from array_record.python import array_record_module

  directory = tmp_path / "mine" / "single" / "1.0.0"
  shutil.copytree(tfds_dir / "mine" / "single" / "1.0.0", directory)
  config = dataclasses.replace(ALL, data_dir=str(tmp_path))
  before = sources.documents("tfds:mine/single", "train", config)
  identity = before.identity
  text = read_texts("tfds:mine/single", config=config)[0]
  (path,) = directory.glob("*array_record*")
  reader = array_record_module.ArrayRecordReader(str(path))
  records = [
    record.replace(b"document", b"Document") for record in reader.read_all()
  ]
  reader.close()
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()
  after = sources.documents("tfds:mine/single", "train", config)
  assert after.identity != identity
  changed = text.replace("document", "Document")
  assert read_texts("tfds:mine/single", config=config)[0] == changed


def test_a_parquet_file_rewritten_within_a_second_is_read_anew(tmp_path):
  """Its footer is not that of the old file, although the sizes are equal."""
  path = write(tmp_path / "a.parquet", ["aa"] * 3 + ["b"] * 3)
  os.utime(path, ns=(10**18, 10**18))
  assert read_texts(f"parquet:{path}") == ["aa"] * 3 + ["b"] * 3
  size = path.stat().st_size
  footer = parquet.read_metadata(str(path))
  write(path, ["c"] * 3 + ["dd"] * 3)
  assert path.stat().st_size == size
  os.utime(path, ns=(10**18 + 1, 10**18 + 1))
  assert parquet.read_metadata(str(path)) is not footer
  assert read_texts(f"parquet:{path}") == ["c"] * 3 + ["dd"] * 3


@pytest.mark.parametrize(
  "name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"]
)
@pytest.mark.parametrize("now", ["gone", "a directory", "shorter"])
def test_files_that_change_after_they_were_listed(tmp_path, texts, name, now):
  path = write(tmp_path / name, texts)
  source = sources.documents(
    f"{ {'txt': 'text', 'parquet': 'parquet'}.get(name[2:], 'jsonl') }:{path}",
    "train",
    ALL,
  )
  content = path.read_bytes()
  path.unlink()
  if now == "a directory":
    path.mkdir()
  elif now == "shorter":
    path.write_bytes(content[: content.index(b"\n", len(content) // 2) + 1])
    if name in ("a.txt", "a.jsonl"):  # whole as far as it goes
      assert [
        document for part in source.parts for document in source.read(part)
      ]
      return
  with pytest.raises(UserError, match=str(path)):
    [document for part in source.parts for document in source.read(part)]


def test_parquet_that_is_not_utf8_is_replaced_and_marked(tmp_path):
  path = write(tmp_path / "a.parquet", ["caf? au lait", "tea"])
  path.write_bytes(path.read_bytes().replace(b"caf?", b"caf\xe9"))
  assert read(f"parquet:{path}") == [
    ("caf\ufffd au lait", True, None),
    ("tea", False, None),
  ]


def test_empty_parquet(tmp_path):
  path = write(tmp_path / "a.parquet", [])
  with pytest.raises(UserError, match="empty"):
    read(f"parquet:{path}")


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"text": "x"', "a.jsonl:3: not JSON"),
    (
      '{"body": "x", "id": 1}',
      r"a.jsonl:3: config.data.text_field = 'text' is not text here; the fields are body \(str\), id \(int\)",
    ),
    ('{"text": 5}', r"a.jsonl:3: .*text \(int\)"),
    ('["text"]', "a.jsonl:3: .*must be a JSON object"),
  ],
)
@pytest.mark.parametrize("part_size", [1 << 20, 10])
def test_bad_lines_are_named(tmp_path, line, message, part_size, monkeypatch):
  monkeypatch.setattr(jsonl_source, "_PART_BYTES", part_size)
  (tmp_path / "a.jsonl").write_text(
    '{"text": "one"}\n{"text": "two"}\n' + line + "\n"
  )
  with pytest.raises(UserError, match=message) as caught:
    read(f"jsonl:{tmp_path}/a.jsonl")
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["body", "id"])
def test_parquet_without_text_lists_its_columns(tmp_path, field):
  path = write(tmp_path / "a.parquet", ["one"])
  with pytest.raises(
    UserError, match=f"text_field = '{field}'.*columns are text.*id"
  ):
    read(f"parquet:{path}", config=dataclasses.replace(ALL, text_field=field))
