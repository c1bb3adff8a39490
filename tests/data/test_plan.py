"""A run reads only the files that its tokens need, and prints their number.

Before rows are prepared, their size is estimated and compared with the disk.
"""

import dataclasses
import math
import os
import pathlib
import shutil
import types
from collections.abc import Iterator

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diffjax.config import Config, DataConfig, TrainConfig, UserError
from diffjax.data import (
  estimate,
  file_source,
  plan,
  prepared,
  sample,
  shards,
  sources,
)
from diffjax.training.resume import check_resume
from tests.harness.hub_server import HubServer


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
  """Writes 8 Parquet files of equal size, with 40 documents each.

  A document begins with the number of its file. It has 400 bytes, which are 402
  tokens with two separators.

  Returns:
    The directory of the Hub, which has the files in datasets/org/name.
  """
  root = tmp_path_factory.mktemp("hub")
  folder = root / "datasets/org/name"
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for number in range(8):
    texts = []
    for index in range(40):
      text = f"{number} {index} {rng.bytes(200).hex()}"
      texts.append(text[:400])
    table = pyarrow.table({"text": texts, "score": range(len(texts))})
    path = folder / f"{number:03}.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=10)
  return root


@pytest.fixture
def local_source(files) -> str:
  """Returns the source of the files on the disk."""
  return f"parquet:{files}/datasets/org/name/*.parquet"


@pytest.fixture
def hub_of_eight_files(files, monkeypatch) -> Iterator[HubServer]:
  """Serves the files as a Hub. Samples of them are small."""
  monkeypatch.setattr(sample, "MAX_DOCUMENTS", 20)
  with HubServer(files) as server:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server


def make_config(steps=1, **fields) -> Config:
  """Returns a config that reads the files on the Hub by default.

  Args:
    steps: the number of steps. Each takes 8 · 128 tokens.
    **fields: fields of DataConfig.
  """
  defaults = {
    "source": "parquet:hf://datasets/org/name/*.parquet",
    "length": 128,
    "validation_fraction": 0.0,
  }
  return Config(
    data=DataConfig(**{**defaults, **fields}),
    train=TrainConfig(steps=steps, batch_size=8),
  )


def resolve_data(config, num_processes=1) -> DataConfig:
  """Returns the data fields that a run uses."""
  return plan.resolve(config, num_processes, lambda line: None).data


def read_documents(split, config) -> list[str]:
  """Returns the documents of a split."""
  source = sources.documents(config.source, split, config)
  documents = []
  for part in source.parts:
    documents += [document.text for document in source.read(part)]
  return documents


def first_characters(documents) -> set[str]:
  """Returns the numbers of the files that documents are from."""
  return {document[0] for document in documents}


# The files that a run reads.


@pytest.mark.parametrize(
  ("mode", "num_processes", "expected"),
  [
    ("auto", 1, "prepared"),
    ("auto", 2, "streamed"),
    ("prepared", 2, "prepared"),
    ("streamed", 1, "streamed"),
  ],
)
def test_the_automatic_mode_depends_on_the_number_of_processes(
  mode, num_processes, expected
):
  """Rows are prepared by a single process, and several processes stream."""
  config = Config(data=DataConfig(mode=mode))

  assert resolve_data(config, num_processes).mode == expected


@pytest.mark.parametrize("steps", [1, 20, 32, 60, 110])
@pytest.mark.usefixtures("hub_of_eight_files")
def test_a_run_reads_just_enough_files_for_its_tokens(steps):
  """A run of few steps does not download a whole corpus."""
  # `make_config` has batches of 8 rows of 128 tokens.
  run_tokens = steps * 8 * 128
  # A file of the Hub has 40 documents of 402 tokens.
  file_tokens = 40 * 402

  num_files = resolve_data(make_config(steps=steps)).files

  # The number of tokens is estimated, so there is a margin of 10%.
  assert num_files == math.ceil(1.1 * run_tokens / file_tokens)


@pytest.mark.usefixtures("hub_of_eight_files")
def test_all_processes_and_starts_read_the_same_number_of_files():
  """Otherwise a restarted run could not find its position."""
  config = make_config(steps=60)

  num_files = resolve_data(config).files
  num_files_after_restart = resolve_data(config).files
  num_files_of_16_processes = resolve_data(config, num_processes=16).files

  assert num_files_after_restart == num_files
  assert num_files_of_16_processes == num_files


@pytest.mark.usefixtures("hub_of_eight_files")
def test_a_long_run_reads_all_files_several_times_and_says_so():
  """A run with more tokens than all files repeats them."""
  # `make_config` has batches of 8 rows of 128 tokens.
  config = make_config(steps=1000)
  run_tokens = 1000 * 8 * 128
  # Each of the 8 files has 40 documents of 402 tokens.
  corpus_tokens = 8 * 40 * 402
  lines = []

  resolved = plan.resolve(config, process_count=1, note=lines.append)

  assert resolved.data.files == 8
  (line,) = lines
  num_epochs = run_tokens / corpus_tokens
  assert f"they are read {num_epochs:.1f} times" in line


@pytest.mark.usefixtures("hub_of_eight_files")
def test_the_number_of_files_is_printed():
  """The user can then set config.data.files to another number."""
  lines = []

  plan.resolve(make_config(steps=20), process_count=1, note=lines.append)

  # The run needs 20 steps · 8 rows · 128 tokens = 20,480 tokens. A file has 40
  # documents · 402 tokens = 16,080 tokens, so one is too few.
  (line,) = lines
  assert "reading 2 of 8 files" in line
  assert "for the run's 20.5K" in line
  assert "config.data.files" in line


def test_the_number_of_files_is_estimated_from_the_first_file(
  hub_of_eight_files,
):
  """The other files are not fetched before the run reads them."""
  resolve_data(make_config(steps=60))

  assert hub_of_eight_files.fetched("000.parquet")
  for number in range(1, 8):
    assert not hub_of_eight_files.fetched(f"{number:03}.parquet")


def test_a_number_of_files_that_is_set_is_kept(hub_of_eight_files):
  """Nothing is estimated then, so the Hub gets no request."""
  config = make_config(steps=60, files=3)

  num_files = resolve_data(config).files

  assert num_files == 3
  assert not hub_of_eight_files.requests


def test_a_run_reads_all_local_files(local_source):
  """The value 0 of config.data.files stands for all files."""
  config = make_config(source=local_source)

  assert resolve_data(config).files == 0
  documents = read_documents("train", config.data)
  # There are 8 files of 40 documents.
  assert len(documents) == 8 * 40


@pytest.mark.usefixtures("hub_of_eight_files")
def test_a_source_with_half_the_weight_needs_half_the_tokens(files, tmp_path):
  """60 steps at weight 0.5 need as many files as 30 steps without a mixture."""
  remote = "parquet:hf://datasets/org/name/*.parquet"
  file = files / "datasets/org/name/000.parquet"
  shutil.copy(file, tmp_path / "local.parquet")
  local = f"parquet:{tmp_path}/*.parquet"
  # A source is followed by "=" and its weight.
  config_of_mixture = make_config(steps=60, source=f"{remote}=0.5,{local}=0.5")
  config_of_source = make_config(steps=30, source=remote)

  num_files_in_mixture = resolve_data(config_of_mixture).files
  num_files_alone = resolve_data(config_of_source).files

  assert num_files_in_mixture == num_files_alone


@pytest.mark.usefixtures("hub_of_eight_files")
def test_a_mixture_reads_all_local_files(local_source):
  """config.data.files is one number for all sources, so it is 8 for both."""
  remote = "parquet:hf://datasets/org/name/*.parquet"
  # A source is followed by "=" and its weight.
  config = make_config(source=f"{remote}=0.5,{local_source}=0.5")

  assert resolve_data(config).files == 8


def test_preparing_fetches_only_the_chosen_files(hub_of_eight_files, tmp_path):
  """config.data.files = 2 chooses two of the eight files."""
  config = make_config(files=2, prepared_dir=str(tmp_path / "rows"))

  prepared.prepare(config.data, workers=1)

  # Requests with a range of bytes fetch a part of a file.
  fetched = set()
  for request in hub_of_eight_files.requests:
    if request.range:
      fetched.add(pathlib.PurePosixPath(request.path).name)
  # The chosen files are evenly spaced.
  assert fetched == {"000.parquet", "004.parquet"}


def test_the_number_of_files_limits_local_sources(local_source):
  """Two of the eight files are read. They are evenly spaced."""
  config = make_config(source=local_source, files=2).data

  documents = read_documents("train", config)

  # A document begins with the number of its file.
  numbers = first_characters(documents)
  assert numbers == {"0", "4"}


@pytest.mark.parametrize(
  ("count", "expected"),
  [
    (0, []),
    (1, [0]),
    (3, [0, 2, 4]),
    (7, [0, 1, 2, 3, 4, 5, 6]),
    (100, [0, 1, 2, 3, 4, 5, 6]),
  ],
)
def test_the_chosen_items_are_evenly_spaced(count, expected):
  """`spread` chooses `count` of seven items, or all if there are fewer.

  The index of choice i is i * 7 // count.
  """
  assert file_source.spread(range(7), count) == expected


@pytest.fixture
def config_of_sampled_validation(
  hub_of_eight_files, files, monkeypatch
) -> DataConfig:
  """Holds out 0.3 of the documents, and reads half of the row groups."""
  file_bytes = (files / "datasets/org/name/000.parquet").stat().st_size
  monkeypatch.setattr(file_source, "MAX_HUB_VALIDATION_BYTES", 4 * file_bytes)
  return make_config(validation_fraction=0.3).data


def test_validation_reads_a_sample_of_all_files(config_of_sampled_validation):
  """Of a large corpus, only half of the row groups are read for validation."""
  validation = read_documents("validation", config_of_sampled_validation)

  # A document begins with the number of its file.
  assert first_characters(validation) == set("01234567")
  # 0.3 of the documents are held out at random. 0.07 is 3.5 standard deviations
  # of the binomial distribution.
  num_documents = 8 * 40
  validation_fraction = len(validation) / num_documents
  assert validation_fraction == pytest.approx(0.3 / 2, abs=0.07)


def test_training_reads_no_held_out_documents(config_of_sampled_validation):
  """0.3 of all documents are held out, but validation reads only half of them.

  Training must not read the other half either.
  """
  validation = read_documents("validation", config_of_sampled_validation)
  train = read_documents("train", config_of_sampled_validation)

  # A document begins with the number of its file.
  assert first_characters(train) == set("01234567")
  assert set(train).isdisjoint(validation)
  # The documents are held out at random. 0.1 is 3.9 standard deviations of the
  # binomial distribution.
  num_documents = 8 * 40
  train_fraction = len(train) / num_documents
  assert train_fraction == pytest.approx(1 - 0.3, abs=0.1)


# Rows and runs of another number of files.


def test_the_number_of_files_chooses_the_directory_of_the_rows(local_source):
  """Rows of other files are other rows. 0 stands for all files."""
  directories = set()
  for num_files in (0, 2, 3):
    config = make_config(source=local_source, files=num_files).data
    (target,) = prepared.targets(config)
    directories.add(target.directory)

  assert len(directories) == 3


def test_rows_of_all_files_are_described_as_in_earlier_versions(local_source):
  """Earlier versions did not have config.data.files."""
  (target,) = prepared.targets(make_config(source=local_source).data)

  assert "files" not in target.description


def test_prepared_rows_of_another_number_of_files_are_refused(
  local_source, tmp_path
):
  """A run would otherwise train on rows that its config does not describe."""
  config = make_config(
    source=local_source, files=2, prepared_dir=str(tmp_path / "rows")
  ).data
  prepared.prepare(config, workers=1)

  message = r"holds other rows: config.data.files \(there 2, asked for 3\)"
  with pytest.raises(UserError, match=message):
    prepared.prepare(dataclasses.replace(config, files=3), workers=1)


def test_a_run_does_not_continue_with_another_number_of_files():
  """A position in the rows of three files is another one in four files."""
  checkpoint = make_config(steps=60, files=3).to_dict()
  config = make_config(steps=90, files=4).to_dict()

  with pytest.raises(UserError) as caught:
    check_resume(checkpoint, config)

  message = str(caught.value)
  assert message.startswith("config.data.files was 3 when")
  assert "and is 4" in message
  assert "--config.data.files=3" in message
  assert "another --workdir" in message


def test_a_longer_run_continues_with_the_same_number_of_files():
  """`check_resume` raises an error if the run cannot continue."""
  checkpoint = make_config(steps=60, files=3).to_dict()
  config = make_config(steps=90, files=3).to_dict()

  check_resume(checkpoint, config)


def test_other_fields_that_differ_are_named_with_the_number_of_files():
  """The number of files may differ because of the other field."""
  checkpoint = make_config(steps=60, files=3, length=128).to_dict()
  config = make_config(steps=60, files=4, length=64).to_dict()

  message = "another run: data.files was 3 and is 4; data.length was 128"
  with pytest.raises(UserError, match=message):
    check_resume(checkpoint, config)


def test_a_checkpoint_without_a_number_of_files_can_continue():
  """Earlier versions had no such field.

  `check_resume` raises an error if the run cannot continue.
  """
  checkpoint = make_config(steps=60, source="stdlib").to_dict()
  del checkpoint["data"]["files"]
  config = make_config(steps=60, source="stdlib").to_dict()

  check_resume(checkpoint, config)


# The estimate of the rows' size.


@pytest.fixture
def estimate_small_sources(monkeypatch):
  """Makes sources of any size be estimated. By default, small ones are not."""
  monkeypatch.setattr(estimate, "SMALL_BYTES", 0)


def set_free_bytes(monkeypatch, num_bytes):
  """Sets the free space of all disks."""
  usage = types.SimpleNamespace(free=num_bytes)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def find_missing_shards(config) -> shards.Work:
  """Returns the work that remains to prepare the only source."""
  (target,) = prepared.targets(config)
  work = prepared.open_work(target, config)
  assert work is not None
  return work


@pytest.fixture
def local_config(local_source, tmp_path) -> DataConfig:
  """Returns data fields with the local files and a directory of rows."""
  rows = str(tmp_path / "rows")
  return make_config(source=local_source, prepared_dir=rows).data


@pytest.mark.parametrize("validation_fraction", [0.0, 0.25])
def test_the_estimate_is_near_the_size_of_the_rows(
  local_config, validation_fraction
):
  """The estimate is computed from a sample of the documents."""
  config = dataclasses.replace(
    local_config, validation_fraction=validation_fraction
  )
  # Each of the 8 local files has 40 documents of 402 tokens.
  num_tokens = 8 * 40 * 402

  estimated = estimate.estimate(find_missing_shards(config), config)

  assert estimated.num_files == 8
  assert estimated.tokens == pytest.approx(num_tokens, rel=0.05)
  # Most bytes of these small files are padding, and the sample has more of it.
  prepared.prepare(config, workers=1)
  row_bytes = 0
  for path in pathlib.Path(config.prepared_dir).glob("*.array_record"):
    row_bytes += path.stat().st_size
  assert estimated.row_bytes == pytest.approx(row_bytes, rel=0.3)


@pytest.fixture
def full_disk(monkeypatch):
  """Leaves one kilobyte of space on all disks."""
  set_free_bytes(monkeypatch, 1000)


@pytest.mark.usefixtures("hub_of_eight_files", "full_disk")
def test_a_disk_that_is_too_small_is_an_error_that_names_remedies(tmp_path):
  """The fixture `full_disk` leaves one kilobyte free."""
  rows = tmp_path / "new" / "rows"
  config = make_config(files=6, prepared_dir=str(rows)).data

  with pytest.raises(UserError) as caught:
    prepared.prepare(config, workers=1)

  message = str(caught.value)
  assert message.startswith(f"{rows}: the disk has 1KB free")
  assert "--config.data.prepared_dir=DIR" in message
  assert "--config.data.files (now 6)" in message
  assert "--config.data.mode=streamed" in message


@pytest.mark.usefixtures("hub_of_eight_files")
def test_preparing_prints_the_number_of_files_to_download(tmp_path, capsys):
  config = make_config(files=2, prepared_dir=str(tmp_path / "rows")).data

  prepared.prepare(config, workers=1)

  assert "2 files to download" in capsys.readouterr().err


@pytest.mark.usefixtures("full_disk")
def test_a_disk_that_is_too_small_stops_before_the_download(
  hub_of_eight_files, tmp_path
):
  """The user learns of a full disk at once, and not hours later.

  The fixture `full_disk` leaves one kilobyte free.
  """
  rows_dir = tmp_path / "new" / "rows"
  config = make_config(files=8, prepared_dir=str(rows_dir)).data

  with pytest.raises(UserError, match="the disk has 1KB free"):
    prepared.prepare(config, workers=1)

  assert not rows_dir.parent.exists()
  # The estimate needs two of the four row groups of the first file, and the
  # footers of all files. The footers can be in the cache.
  assert len(hub_of_eight_files.fetched("000.parquet")) <= 2 + 1
  for number in range(1, 8):
    assert len(hub_of_eight_files.fetched(f"{number:03}.parquet")) <= 1


@pytest.mark.usefixtures("estimate_small_sources")
def test_the_sources_of_a_mixture_share_the_disk(files, monkeypatch, tmp_path):
  """The free space must suffice for the rows of both sources.

  By default, small sources such as these are not compared with the free space.
  The fixture `estimate_small_sources` changes this.
  """
  # Two files of the same size.
  first = f"parquet:{files}/datasets/org/name/000.parquet"
  second = f"parquet:{files}/datasets/org/name/001.parquet"
  single = make_config(source=first, prepared_dir=f"{tmp_path}/single").data
  mixture = make_config(
    source=f"{first}=0.5,{second}=0.5", prepared_dir=f"{tmp_path}/mixture"
  ).data
  estimated = estimate.estimate(find_missing_shards(single), single)

  # This is enough for the rows of one source, but not of two.
  set_free_bytes(monkeypatch, 1.5 * estimated.row_bytes)

  prepared.prepare(single, workers=1)
  with pytest.raises(UserError, match="the rows need about"):
    prepared.prepare(mixture, workers=1)


@pytest.mark.usefixtures("estimate_small_sources")
def test_only_missing_rows_need_space(local_config):
  """Rows that were written before are not written again."""
  whole = estimate.estimate(find_missing_shards(local_config), local_config)
  prepared.prepare(local_config, workers=1)
  # Remove half of the files of rows, and the metadata of the complete result.
  rows_dir = pathlib.Path(local_config.prepared_dir)
  (rows_dir / "meta.json").unlink()
  paths = sorted(rows_dir.glob("train-*.array_record"))
  for path in paths[: len(paths) // 2]:
    path.unlink()

  half = estimate.estimate(find_missing_shards(local_config), local_config)

  assert half.tokens == pytest.approx(whole.tokens / 2)
  assert half.row_bytes < 0.6 * whole.row_bytes


def test_a_small_local_source_is_prepared_without_a_sample(
  local_config, monkeypatch
):
  """A sample would take longer than preparing the rows."""

  def fail(source, config):
    pytest.fail("a sample was taken")

  monkeypatch.setattr(estimate, "take_sample", fail)

  (target,) = prepared.prepare(local_config, workers=1)

  assert prepared.is_prepared(target)


def test_each_row_group_of_a_file_is_a_shard(files):
  """A shard is the work of one process, and becomes one file of rows."""
  config = make_config(
    source=f"parquet:{files}/datasets/org/name/000.parquet"
  ).data

  missing_shards = find_missing_shards(config).missing

  # The file has 40 documents in row groups of 10, and 40 / 10 = 4.
  splits = [shard.split for shard in missing_shards]
  assert splits.count("train") == 4


@pytest.mark.parametrize(
  ("requested", "num_shards", "expected"),
  [
    pytest.param(0, 4, 2, id="one for each CPU"),
    pytest.param(3, 4, 3, id="as requested"),
    pytest.param(0, 1, 1, id="one shard"),
    pytest.param(4, 0, 1, id="no shard"),
  ],
)
def test_the_number_of_workers_depends_on_cpus_and_shards(
  monkeypatch, requested, num_shards, expected
):
  """The machine has 2 CPUs. The request 0 stands for one worker for each CPU.

  A shard is the work of one process, so more workers would have nothing to do.
  """
  monkeypatch.setattr(os, "cpu_count", lambda: 2)

  assert shards.worker_count(requested, num_shards) == expected


@pytest.mark.usefixtures("estimate_small_sources")
def test_a_source_without_training_documents_is_an_error(local_config):
  # All documents are held out for validation.
  config = dataclasses.replace(local_config, validation_fraction=1.0)

  with pytest.raises(UserError, match="empty: no document to train on"):
    prepared.prepare(config, workers=1)
