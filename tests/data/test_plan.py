"""A run reads only the files that its tokens need, and prints their number."""

import dataclasses
import pathlib
import shutil
import types

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

REPO = "datasets/org/name"
NUM_FILES = 8
DOCUMENTS_PER_FILE = 40
DOCUMENT_TOKENS = 402  # 400 bytes and two separators


def write_parquet(path, texts, row_group_size=10):
  scores = range(len(texts))
  table = pyarrow.table({"text": texts, "score": scores})
  pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Eight Parquet files of equal size. Document k of file n begins "n k"."""
  root = tmp_path_factory.mktemp("hub")
  folder = root / REPO
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for number in range(NUM_FILES):
    texts = []
    for index in range(DOCUMENTS_PER_FILE):
      start = f"{number} {index} "
      text = start + rng.bytes(200).hex()
      texts.append(text[:400])
    write_parquet(folder / f"{number:03}.parquet", texts)
  return root


@pytest.fixture
def hub(files, monkeypatch):
  """The files on a Hub, of which a small sample is taken."""
  monkeypatch.setattr(sample, "MAX_DOCUMENTS", 20)
  with HubServer(files) as server:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server


def make_config(steps, **data):
  data = {
    "source": f"parquet:hf://{REPO}/*.parquet",
    "length": 128,
    "validation_fraction": 0.0,
    **data,
  }
  return Config(
    data=DataConfig(**data), train=TrainConfig(steps=steps, batch_size=8)
  )


def resolved_data(config, process_count=1):
  return plan.resolve(config, process_count, lambda line: None).data


def documents_of(split, config):
  source = sources.documents(config.source, split, config)
  documents = []
  for part in source.parts:
    documents += [document.text for document in source.read(part)]
  return documents


@pytest.mark.parametrize(
  "mode, process_count, expected",
  [
    ("auto", 1, "prepared"),
    ("auto", 2, "streamed"),
    ("prepared", 2, "prepared"),
    ("streamed", 1, "streamed"),
  ],
)
def test_the_mode_follows_from_the_number_of_processes(
  mode, process_count, expected
):
  config = Config(data=DataConfig(mode=mode))
  assert resolved_data(config, process_count).mode == expected


@pytest.mark.parametrize("steps", [1, 20, 32, 60, 100])
def test_as_many_files_as_hold_the_tokens_of_the_run(hub, steps):
  num_files = resolved_data(make_config(steps)).files
  tokens = steps * 8 * 128
  file_tokens = DOCUMENTS_PER_FILE * DOCUMENT_TOKENS
  assert tokens <= num_files * file_tokens
  # One file fewer would not hold the tokens plus a margin of 10%.
  assert (num_files - 1) * file_tokens <= 1.11 * tokens


def test_the_number_is_the_same_in_all_processes_and_at_each_start(hub):
  config = make_config(60)
  numbers = {resolved_data(config, count).files for count in (1, 1, 16)}
  assert len(numbers) == 1


def test_all_files_are_read_again_if_they_are_too_few(hub):
  lines = []
  config = plan.resolve(make_config(1000), 1, lines.append)
  assert config.data.files == NUM_FILES
  tokens = NUM_FILES * DOCUMENTS_PER_FILE * DOCUMENT_TOKENS
  (line,) = lines
  times = float(line.rpartition("read ")[2].removesuffix(" times"))
  assert times == pytest.approx(1000 * 8 * 128 / tokens, rel=0.02)


def test_the_line_says_what_is_read(hub):
  lines = []
  plan.resolve(make_config(20), 1, lines.append)
  (line,) = lines
  assert "reading 2 of 8 files" in line
  assert "for the run's 20.5K" in line
  assert "config.data.files" in line


def test_only_the_first_file_is_sampled(hub):
  resolved_data(make_config(60))
  assert hub.fetched("000.parquet")
  for number in range(1, NUM_FILES):
    assert not hub.fetched(f"{number:03}.parquet")


def test_a_number_that_is_set_is_kept(hub):
  assert resolved_data(make_config(60, files=3)).files == 3
  assert not hub.requests


def test_local_files_are_all_read(files):
  config = make_config(1, source=f"parquet:{files}/{REPO}/*.parquet")
  assert resolved_data(config).files == 0
  documents = documents_of("train", config.data)
  assert len(documents) == NUM_FILES * DOCUMENTS_PER_FILE


def test_a_mixture_reads_what_its_weights_need(hub, files, tmp_path):
  remote = f"parquet:hf://{REPO}/*.parquet"
  shutil.copy(files / REPO / "000.parquet", tmp_path / "local.parquet")
  local = f"parquet:{tmp_path}/*.parquet"
  half = make_config(60, source=f"{remote}=0.5,{local}=0.5")
  alone = make_config(30, source=remote)
  assert resolved_data(half).files == resolved_data(alone).files


def test_all_local_files_of_a_mixture_are_read(hub, files):
  local = f"parquet:{files}/{REPO}/*.parquet"
  remote = f"parquet:hf://{REPO}/*.parquet"
  config = make_config(1, source=f"{remote}=0.5,{local}=0.5")
  assert resolved_data(config).files == NUM_FILES


def test_other_files_are_not_touched(hub, tmp_path):
  config = make_config(1, files=2, prepared_dir=str(tmp_path / "rows"))
  prepared.prepare(config.data, 1)
  fetched = set()
  for request in hub.requests:
    if request.range:
      fetched.add(pathlib.PurePosixPath(request.path).name)
  assert fetched == {"000.parquet", "004.parquet"}


def test_files_limits_local_sources(files):
  source = f"parquet:{files}/{REPO}/*.parquet"
  documents = documents_of("train", make_config(1, source=source, files=2).data)
  assert {document[0] for document in documents} == {"0", "4"}


@pytest.mark.parametrize(
  "count, expected", [(0, []), (1, [0]), (3, [0, 2, 4]), (7, list(range(7)))]
)
def test_items_are_evenly_spaced(count, expected):
  assert file_source.spread(range(7), count) == expected
  assert file_source.spread(range(7), 100) == list(range(7))


def test_validation_documents_are_of_some_row_groups_of_all_files(
  hub, files, monkeypatch
):
  size = (files / REPO / "000.parquet").stat().st_size
  monkeypatch.setattr(file_source, "MAX_HUB_VALIDATION_BYTES", 4 * size)
  config = make_config(1, validation_fraction=0.3).data
  validation = documents_of("validation", config)
  train = documents_of("train", config)
  assert {document[0] for document in validation} == set("01234567")
  assert {document[0] for document in train} == set("01234567")
  # Half of the row groups, and three tenths of their documents.
  num_documents = NUM_FILES * DOCUMENTS_PER_FILE
  assert 0.08 < len(validation) / num_documents < 0.22
  # Documents of other files are held out too, so that all agree on the split.
  held_out = 1 - len(train) / num_documents
  assert 0.2 < held_out < 0.4
  assert not set(train) & set(validation)


def test_files_is_part_of_the_rows_name_only_if_it_is_set(files):
  source = f"parquet:{files}/{REPO}/*.parquet"
  descriptions = []
  directories = set()
  for number in (0, 2, 3):
    config = make_config(1, source=source, files=number).data
    (target,) = prepared.targets(config)
    descriptions.append(target.description)
    directories.add(target.directory)
  assert "files" not in descriptions[0]
  assert len(directories) == 3


def test_prepared_rows_of_other_files_are_refused(files, tmp_path):
  source = f"parquet:{files}/{REPO}/*.parquet"
  rows = str(tmp_path / "rows")
  config = make_config(1, source=source, files=2, prepared_dir=rows).data
  prepared.prepare(config, 1)
  other = dataclasses.replace(config, files=3)
  message = r"holds other rows: config.data.files \(there 2, asked for 3\)"
  with pytest.raises(UserError, match=message):
    prepared.prepare(other, 1)


def test_a_resume_with_other_files_is_refused():
  before = make_config(60, files=3)
  now = make_config(90, files=4)
  with pytest.raises(UserError) as caught:
    check_resume(before.to_dict(), now.to_dict())
  message = str(caught.value)
  assert message.startswith("config.data.files was 3 when")
  assert "and is 4" in message
  assert "--config.data.files=3" in message
  assert "another --workdir" in message
  check_resume(before.to_dict(), make_config(90, files=3).to_dict())


def test_a_resume_names_other_fields_before_the_files():
  """The number of files may differ because another field does."""
  before = make_config(60, files=3).to_dict()
  now = make_config(60, files=4, length=64).to_dict()
  message = "another run: data.files was 3 and is 4; data.length was 128"
  with pytest.raises(UserError, match=message):
    check_resume(before, now)


def test_older_checkpoints_have_no_such_field():
  """The check, which raises for a difference, accepts them."""
  before = make_config(60, source="stdlib").to_dict()
  del before["data"]["files"]
  check_resume(before, make_config(60, source="stdlib").to_dict())


@pytest.fixture
def estimate_small_sources(monkeypatch):
  """Estimates sources of any size. By default small ones are left out."""
  monkeypatch.setattr(estimate, "SMALL_BYTES", 0)


def set_free_bytes(monkeypatch, free):
  """Sets the free space of all disks."""
  usage = types.SimpleNamespace(free=free)
  monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: usage)


def work_of(config):
  (target,) = prepared.targets(config)
  work = prepared.open_work(target, config)
  assert work is not None
  return work


@pytest.mark.parametrize("validation_fraction", [0.0, 0.25])
def test_the_estimate_is_near_what_is_written(
  files, tmp_path, validation_fraction
):
  config = make_config(
    1,
    source=f"parquet:{files}/{REPO}/*.parquet",
    validation_fraction=validation_fraction,
    prepared_dir=str(tmp_path / "rows"),
  ).data
  needs = estimate.estimate(work_of(config), config)
  tokens = NUM_FILES * DOCUMENTS_PER_FILE * DOCUMENT_TOKENS
  assert needs.num_files == NUM_FILES
  assert needs.tokens == pytest.approx(tokens, rel=0.05)
  prepared.prepare(config, 1)
  row_bytes = 0
  for path in pathlib.Path(config.prepared_dir).glob("*.array_record"):
    row_bytes += path.stat().st_size
  assert needs.row_bytes == pytest.approx(row_bytes, rel=0.3)


def test_a_disk_that_is_too_small_stops_before_the_download(
  hub, monkeypatch, tmp_path, capsys
):
  rows = tmp_path / "new" / "rows"
  config = make_config(1, files=6, prepared_dir=str(rows)).data
  set_free_bytes(monkeypatch, free=1000)
  with pytest.raises(UserError) as caught:
    prepared.prepare(config, 1)
  message = str(caught.value)
  assert message.startswith(f"{rows}: the disk has 1KB free")
  for remedy in (
    "--config.data.prepared_dir=DIR",
    "--config.data.files (now 6)",
    "--config.data.mode=streamed",
  ):
    assert remedy in message
  assert not rows.parent.exists()
  # Footers and the sample, but no row group of the other files.
  for number in range(1, 6):
    assert len(hub.fetched(f"{number:03}.parquet")) <= 2
  assert "6 files to download" in capsys.readouterr().err


def test_the_targets_of_a_mixture_share_the_disk(
  files, monkeypatch, tmp_path, estimate_small_sources
):
  first = f"parquet:{files}/{REPO}/000.parquet"
  second = f"parquet:{files}/{REPO}/001.parquet"
  mixture = make_config(
    1,
    source=f"{first}=0.5,{second}=0.5",
    prepared_dir=str(tmp_path / "rows"),
  ).data
  single = dataclasses.replace(
    mixture, source=first, prepared_dir=str(tmp_path / "single")
  )
  needed = estimate.estimate(work_of(single), single).row_bytes
  set_free_bytes(monkeypatch, free=1.5 * needed)
  prepared.prepare(single, 1)
  with pytest.raises(UserError, match="the rows need about"):
    prepared.prepare(mixture, 1)


def test_only_missing_rows_need_space(files, tmp_path, estimate_small_sources):
  config = make_config(
    1,
    source=f"parquet:{files}/{REPO}/*.parquet",
    prepared_dir=str(tmp_path / "rows"),
  ).data
  whole = estimate.estimate(work_of(config), config)
  prepared.prepare(config, 1)
  rows = pathlib.Path(config.prepared_dir)
  paths = sorted(rows.glob("train-*.array_record"))
  for path in [rows / "meta.json", *paths[: len(paths) // 2]]:
    path.unlink()
  half = estimate.estimate(work_of(config), config)
  assert half.tokens == pytest.approx(whole.tokens / 2)
  assert half.row_bytes < 0.6 * whole.row_bytes


def test_a_small_local_source_is_not_sampled(files, tmp_path, monkeypatch):
  def fail(source, config):
    pytest.fail("a sample was taken")

  monkeypatch.setattr(estimate, "take_sample", fail)
  config = make_config(
    1,
    source=f"parquet:{files}/{REPO}/*.parquet",
    prepared_dir=str(tmp_path / "rows"),
  ).data
  (target,) = prepared.prepare(config, 1)
  assert (pathlib.Path(target.directory) / "meta.json").exists()


def test_one_file_gives_work_to_all_cpus(files, monkeypatch):
  monkeypatch.setattr(shards.os, "cpu_count", lambda: 2)
  config = make_config(1, source=f"parquet:{files}/{REPO}/000.parquet").data
  missing = [
    shard for shard in work_of(config).missing if shard.split == "train"
  ]
  assert len(missing) == DOCUMENTS_PER_FILE // 10
  assert shards.worker_count(0, len(missing)) == 2
  assert shards.worker_count(3, len(missing)) == 3
  assert shards.worker_count(0, 1) == 1
  assert shards.worker_count(4, 0) == 1


def test_a_source_without_training_documents_has_no_estimate(
  files, tmp_path, estimate_small_sources
):
  config = make_config(
    1,
    source=f"parquet:{files}/{REPO}/*.parquet",
    validation_fraction=1.0,
    prepared_dir=str(tmp_path / "rows"),
  ).data
  with pytest.raises(UserError, match="empty: no document to train on"):
    prepared.prepare(config, 1)
