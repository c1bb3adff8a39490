"""Sources and tokenizers are read from the Hugging Face Hub, a local server."""

import gzip
import json
import pathlib
import socket
import types
from collections.abc import Callable, Iterator

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import (
  hub,
  jsonl_source,
  parquet,
  pipeline,
  prepared,
  sources,
  tokenizer,
  tokenizer_training,
)
from tests.harness import ROOT
from tests.harness.hub_server import HubServer

ALL = DataConfig(validation_fraction=0.0)
REPO = "datasets/org/name"
# What to use if a source on the Hub cannot be reached.
ALTERNATIVES = (
  "--config.data.source='parquet:/data/*.parquet'",
  "--config.data.source=tfds:NAME --config.data.data_dir=DIR",
  "--config=configs/tiny.py",
)
TOKENIZER_ALTERNATIVES = (
  "--config.data.tokenizer=bytes",
  "--config.data.tokenizer=DIR/tokenizer.json",
)


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  """Returns the directory of the files of the dataset org/name."""
  path = tmp_path / "hub" / REPO
  path.mkdir(parents=True)
  return path


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[[], HubServer]]:
  """Returns a function that serves the folders as the Hub of this test."""
  servers = []

  def start_server() -> HubServer:
    server = HubServer(tmp_path / "hub")
    servers.append(server)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server

  monkeypatch.delenv("HF_TOKEN", raising=False)
  # Another test may have read a file of the same name and content.
  parquet.clear_caches()
  hub.clear_cache()
  yield start_server
  for server in servers:
    server.close()


@pytest.fixture(autouse=True)
def waits(monkeypatch) -> list[float]:
  """Returns the seconds of the waits between retries, which are skipped."""
  seconds = []
  clock = types.SimpleNamespace(sleep=seconds.append)
  monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
  monkeypatch.setattr(hub, "time", clock)
  return seconds


def write_jsonl(path, texts):
  """Writes documents in the format of the file's extension."""
  lines = [json.dumps({"text": text}) + "\n" for text in texts]
  content = "".join(lines).encode()
  if path.suffix == ".gz":
    content = gzip.compress(content)
  elif path.suffix == ".zst":
    content = pyarrow.compress(content, codec="zstd", asbytes=True)
  path.write_bytes(content)


def write_parquet(path, texts, row_group_size=70):
  """Writes a file with the columns text, url and score."""
  path.parent.mkdir(parents=True, exist_ok=True)
  urls = [f"https://example.com/{text}" for text in texts]
  columns = {"text": texts, "url": urls, "score": range(len(texts))}
  pyarrow.parquet.write_table(
    pyarrow.table(columns), path, row_group_size=row_group_size
  )


def read(source) -> list[str]:
  """Returns the texts of an open source."""
  texts = []
  for part in source.parts:
    texts += [document.text for document in source.read(part)]
  return texts


def read_spec(spec) -> list[str]:
  """Opens a source and returns its texts."""
  return read(sources.documents(spec, "train", ALL))


def error_message(function, *arguments) -> str:
  """Returns the error message of a call, which is one line."""
  with pytest.raises(UserError) as caught:
    function(*arguments)
  message = str(caught.value)
  assert "\n" not in message
  return message


# Files of all formats.


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl_is_read_from_the_hub(folder, start, texts, name):
  write_jsonl(folder / name, texts)
  start()

  assert read_spec(f"jsonl:hf://{REPO}/{name}") == texts


def test_a_large_jsonl_file_is_read_in_ranges(
  folder, start, texts, monkeypatch
):
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 7919)
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  write_jsonl(folder / "a.jsonl", texts)
  server = start()

  assert read_spec(f"jsonl:hf://{REPO}/a.jsonl") == texts
  assert len(server.fetched("a.jsonl")) > 10


def test_each_text_file_is_one_request(folder, start, texts):
  for index, text in enumerate(texts[:20]):
    (folder / f"{index:02}.txt").write_bytes(text.encode())
  server = start()

  assert read_spec(f"text:hf://{REPO}/*.txt") == texts[:20]
  for index in range(20):
    assert len(server.fetched(f"{index:02}.txt")) == 1


def test_parquet_is_read_from_the_hub(folder, start, texts):
  write_parquet(folder / "a.parquet", texts)
  start()

  assert read_spec(f"parquet:hf://{REPO}/a.parquet") == texts


def column_range(column) -> tuple[int, int]:
  """Returns the first and the last byte of a column of a row group."""
  first = column.dictionary_page_offset or column.data_page_offset
  return first, first + column.total_compressed_size - 1


@pytest.mark.parametrize("name", ["a.parquet", "b.parquet"])
def test_only_the_footer_and_the_text_column_of_parquet_are_fetched(
  folder, start, texts, name
):
  write_parquet(folder / "a.parquet", texts)
  write_parquet(folder / "b.parquet", texts)
  server = start()
  spec = f"parquet:hf://{REPO}/*.parquet"
  assert read_spec(spec) == texts * 2
  # Another split of the same source needs no second footer.
  assert sources.documents(spec, "validation", ALL).parts

  metadata = pyarrow.parquet.read_metadata(folder / name)
  text_columns = []
  end_of_data = 0
  for index in range(metadata.num_row_groups):
    row_group = metadata.row_group(index)
    text_columns.append(column_range(row_group.column(0)))
    _, end_of_data = column_range(row_group.column(2))
  fetched_data = []
  fetched_footers = []
  for first, last in server.fetched(name):
    if last <= end_of_data:
      fetched_data.append((first, last))
    else:
      fetched_footers.append((first, last))
  assert fetched_data == text_columns
  assert len(fetched_footers) == 1


def test_the_footers_of_many_files_are_fetched_once_each(folder, start, texts):
  for index in range(20):
    write_parquet(folder / f"{index:02}.parquet", texts[index : index + 1])
  server = start()
  source = sources.documents(f"parquet:hf://{REPO}/*.parquet", "train", ALL)

  assert len(source.parts) == 20
  for index in range(20):
    assert len(server.fetched(f"{index:02}.parquet")) == 1


def test_opening_a_source_fetches_no_file(folder, start, texts):
  """A run whose rows are prepared only compares the identity of its files."""
  write_parquet(folder / "a.parquet", texts)
  server = start()

  sources.documents(f"parquet:hf://{REPO}/*.parquet", "train", ALL)

  assert not server.fetched("a.parquet")


# Patterns and revisions.


@pytest.mark.parametrize(
  ("pattern", "expected"),
  [
    ("sample/*.parquet", ["a", "b"]),
    ("sample/[ab].parquet", ["a", "b"]),
    ("**/*.parquet", ["a", "b", "c"]),
  ],
)
def test_patterns_match_files_of_the_hub(folder, start, pattern, expected):
  write_parquet(folder / "sample" / "b.parquet", ["b"])
  write_parquet(folder / "sample" / "a.parquet", ["a"])
  write_parquet(folder / "sample" / "more" / "c.parquet", ["c"])
  (folder / "README.md").write_text("not data", encoding="utf-8")
  start()

  assert read_spec(f"parquet:hf://{REPO}/{pattern}") == expected


def test_a_revision_can_be_chosen(folder, start, texts):
  write_parquet(folder / "a.parquet", texts[:100])
  server = start()
  old_commit = server.commit(REPO)
  write_parquet(folder / "a.parquet", texts[100:])
  server.commit(REPO)

  old_spec = f"parquet:hf://{REPO}@{old_commit}/a.parquet"
  assert read_spec(old_spec) == texts[:100]
  assert read_spec(f"parquet:hf://{REPO}@main/a.parquet") == texts[100:]
  assert read_spec(f"parquet:hf://{REPO}/a.parquet") == texts[100:]


def test_an_open_source_keeps_its_revision(folder, start, texts):
  write_parquet(folder / "a.parquet", texts[:100])
  server = start()
  source = sources.documents(f"parquet:hf://{REPO}/*.parquet", "train", ALL)

  write_parquet(folder / "a.parquet", texts[100:])
  server.commit(REPO)

  assert read(source) == texts[:100]


# Tokenizers.


@pytest.fixture(params=["org/name", REPO])
def tokenizer_repo(request, tmp_path, texts) -> tuple[str, pathlib.Path]:
  """Trains a tokenizer in a repository of models or of datasets.

  Returns:
    The repository, and the directory of its files.
  """
  repo = request.param
  directory = tmp_path / "hub" / "models" / repo
  if repo == REPO:
    directory = tmp_path / "hub" / repo
  tokenizer_training.train_tokenizer(texts, 300, directory)
  return repo, directory


def test_a_tokenizer_json_is_fetched_once_for_all_revisions(
  tokenizer_repo, start, tmp_path
):
  repo, directory = tokenizer_repo
  server = start()
  commit = server.commit(str(directory.relative_to(tmp_path / "hub")))
  local = tokenizer.load_tokenizer(str(directory / "tokenizer.json"))

  for revision in ("", f"@{commit}"):
    spec = f"hf://{repo}{revision}/tokenizer.json"
    loaded = tokenizer.load_tokenizer(spec)
    assert loaded.fingerprint == local.fingerprint
    assert loaded.spec == spec
  assert len(server.fetched("tokenizer.json")) == 1


def test_a_tiktoken_file_is_read_from_the_hub(tokenizer_repo, start, texts):
  repo, directory = tokenizer_repo
  start()
  local = tokenizer.load_tokenizer(str(directory / "tokenizer.tiktoken"))

  loaded = tokenizer.load_tokenizer(f"hf://{repo}/tokenizer.tiktoken")

  assert loaded.encode(texts[4]) == local.encode(texts[4])


# The identity of files, which notices changes.


def open_jsonl():
  """Returns the source of all JSONL files of the dataset."""
  return sources.documents(f"jsonl:hf://{REPO}/*.jsonl", "train", ALL)


def test_the_identity_does_not_depend_on_the_commit(folder, start, texts):
  write_jsonl(folder / "a.jsonl", texts)
  server = start()
  before = open_jsonl()

  (folder / "README.md").write_text("another commit", encoding="utf-8")
  server.commit(REPO)

  after = open_jsonl()
  assert after.identity == before.identity
  assert after.fingerprint() == before.fingerprint()


def test_the_identity_depends_on_all_of_the_content(folder, start, texts):
  """Samples of the file would not show a change in the middle."""
  path = folder / "a.jsonl"
  write_jsonl(path, texts)
  server = start()
  before = open_jsonl()

  content = path.read_bytes()
  path.write_bytes(content.replace(b"document 150", b"Document 150"))
  server.commit(REPO)

  after = open_jsonl()
  fingerprint_before = before.fingerprint()
  fingerprint = after.fingerprint()
  assert after.identity != before.identity
  assert fingerprint["text"] != fingerprint_before["text"]
  assert fingerprint["names and sizes"] == fingerprint_before["names and sizes"]


def test_prepared_rows_of_changed_files_are_refused(
  folder, start, texts, make_config, tmp_path
):
  write_parquet(folder / "a.parquet", texts, row_group_size=300)
  server = start()
  config = make_config(
    source=f"parquet:hf://{REPO}/*.parquet", prepared_dir=f"{tmp_path}/rows"
  ).data
  prepared.prepare(config, 1)

  write_parquet(folder / "a.parquet", texts[1:])
  server.commit(REPO)

  assert "held other files" in error_message(prepared.prepare, config, 1)


def test_a_run_on_prepared_rows_does_not_continue_with_changed_files(
  folder, start, texts, make_config
):
  # With one row group, the rows are prepared in this process.
  write_parquet(folder / "a.parquet", texts, row_group_size=300)
  server = start()
  config = make_config(source=f"parquet:hf://{REPO}/*.parquet")
  state = pipeline.training_batches(config).get_state()

  write_parquet(folder / "a.parquet", texts[1:], row_group_size=300)
  server.commit(REPO)

  batches = pipeline.training_batches(config)
  message = error_message(batches.set_state, state)
  assert "the text of 'parquet:hf://" in message


@pytest.fixture
def stream_config(folder, texts, make_config):
  """Writes a file, and returns a config that streams it."""
  write_parquet(folder / "a.parquet", texts)
  return make_config(mode="streamed", source=f"parquet:hf://{REPO}/*.parquet")


def read_stream_state(config) -> dict:
  """Returns the state after one batch, as a checkpoint stores it."""
  batches = pipeline.training_batches(config)
  next(batches)
  state = json.loads(json.dumps(batches.get_state()))
  batches.close()
  return state


def test_a_stream_continues_with_the_same_files(start, stream_config):
  start()
  state = read_stream_state(stream_config)
  batches = pipeline.training_batches(stream_config)

  batches.set_state(state)

  assert batches.get_state() == state
  batches.close()


def test_a_stream_does_not_continue_with_changed_files(
  folder, start, texts, stream_config
):
  server = start()
  state = read_stream_state(stream_config)

  write_parquet(folder / "a.parquet", [text.upper() for text in texts])
  server.commit(REPO)

  batches = pipeline.training_batches(stream_config)
  message = error_message(batches.set_state, state)
  batches.close()
  assert "of the files of 'parquet:hf://" in message


# Worker processes.


def read_streamed_tokens(config) -> list[list]:
  """Returns the tokens of four batches."""
  batches = pipeline.training_batches(config)
  tokens = []
  for _ in range(4):
    tokens.append(next(batches)["tokens"].tolist())
  batches.close()
  return tokens


def test_workers_stream_from_the_hub(folder, start, texts, make_config):
  write_parquet(folder / "a.parquet", texts)
  start()
  config = make_config(
    mode="streamed",
    source=f"parquet:hf://{REPO}/a.parquet",
    num_workers=1,
  )
  local_config = make_config(
    mode="streamed", source=f"parquet:{folder}/a.parquet"
  )

  assert read_streamed_tokens(config) == read_streamed_tokens(local_config)


def prepare_totals(config, num_workers) -> list[bytes]:
  """Prepares rows, and returns the totals of each file of rows.

  The totals have a digest of the rows.
  """
  (target,) = prepared.prepare(config, num_workers)
  paths = sorted(pathlib.Path(target.directory).glob("*-*.json"))
  return [path.read_bytes() for path in paths]


def test_workers_prepare_rows_from_the_hub(folder, start, texts, make_config):
  write_parquet(folder / "a.parquet", texts)
  start()
  config = make_config(source=f"parquet:hf://{REPO}/a.parquet").data
  local_config = make_config(source=f"parquet:{folder}/a.parquet").data

  totals = prepare_totals(config, 2)

  assert totals, "no rows were written"
  assert totals == prepare_totals(local_config, 1)


# A Hub that cannot be reached.


def check_unreachable(message, endpoint, alternatives=ALTERNATIVES):
  """Checks that a message names the Hub and what to use instead."""
  assert f"cannot reach {endpoint}" in message
  for alternative in alternatives:
    assert alternative in message


def test_a_refused_connection_is_an_error_at_once(folder, start, texts, waits):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.close()

  message = error_message(read_spec, f"parquet:hf://{REPO}/*.parquet")

  check_unreachable(message, server.url)
  assert "refused" in message
  # Nothing has been read yet, so the user need not wait for retries.
  assert not waits


def test_a_refused_connection_for_a_tokenizer_names_other_tokenizers(
  folder, start
):
  server = start()
  server.close()

  message = error_message(
    tokenizer.load_tokenizer, f"hf://{REPO}/tokenizer.json"
  )

  check_unreachable(message, server.url, TOKENIZER_ALTERNATIVES)


def test_an_unknown_host_is_an_error(monkeypatch):
  # Names that end in .invalid never exist (RFC 2606).
  monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")

  message = error_message(read_spec, f"parquet:hf://{REPO}/*.parquet")

  check_unreachable(message, "http://hub.invalid")


def test_a_host_that_does_not_answer_is_an_error(monkeypatch):
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
  with socket.create_server(("127.0.0.1", 0)) as silent_server:
    port = silent_server.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)

    message = error_message(read_spec, f"parquet:hf://{REPO}/*.parquet")

  check_unreachable(message, endpoint)
  assert "timed out" in message


def test_the_offline_mode_is_an_error_that_names_its_variable(monkeypatch):
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

  message = error_message(read_spec, f"parquet:hf://{REPO}/*.parquet")

  check_unreachable(message, "https://huggingface.co")
  assert "HF_HUB_OFFLINE" in message


def test_a_server_that_stops_during_a_read_is_retried(
  folder, start, texts, waits
):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  source = sources.documents(f"parquet:hf://{REPO}/*.parquet", "train", ALL)
  part = source.parts[0]
  server.close()

  message = error_message(lambda: list(source.read(part)))

  check_unreachable(message, server.url)
  # huggingface_hub retries.
  assert len(waits) == 5


# Files that the Hub does not have, or does not give.


@pytest.mark.parametrize(
  ("path", "message"),
  [
    pytest.param(
      "datasets/org/other/*.parquet",
      "no repository 'datasets/org/other'",
      id="dataset",
    ),
    pytest.param("org/name/*.parquet", "no repository 'org/name'", id="model"),
    pytest.param(
      f"{REPO}@v9/*.parquet",
      "datasets/org/name has no revision 'v9'",
      id="revision",
    ),
    pytest.param(
      f"{REPO}@{'0' * 40}/*.parquet",
      f"datasets/org/name has no revision '{'0' * 40}'",
      id="commit",
    ),
    pytest.param(
      f"{REPO}/b.parquet",
      "has no such file at revision 'main'",
      id="file",
    ),
    pytest.param(
      f"{REPO}/none/b.parquet",
      "has no such file at revision 'main'",
      id="file in a directory",
    ),
    pytest.param(
      f"{REPO}/b*.parquet",
      "no file of datasets/org/name matches 'b*.parquet'",
      id="pattern",
    ),
    pytest.param(
      f"{REPO}/none/*",
      "no file of datasets/org/name matches 'none/*'",
      id="pattern in a directory",
    ),
  ],
)
def test_a_missing_repository_revision_or_file_is_named(
  folder, start, texts, path, message
):
  write_parquet(folder / "a.parquet", texts)
  start()

  assert message in error_message(read_spec, f"parquet:hf://{path}")


@pytest.mark.parametrize(
  "path", ["datasets/*.parquet", "datasets/name/a.parquet"]
)
def test_a_path_without_a_repository_is_an_error(start, path):
  start()

  message = error_message(read_spec, f"parquet:hf://{path}")

  assert "is not a path on the Hugging Face Hub: write hf" in message


@pytest.fixture
def gated_server(folder, start, texts) -> HubServer:
  """Serves a dataset that can only be read with the token "hf_good"."""
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.gate(REPO, token="hf_good")
  return server


def test_a_gated_dataset_without_a_token_is_an_error(gated_server):
  message = error_message(read_spec, f"parquet:hf://{REPO}/*.parquet")

  assert "status 401" in message
  assert "no token is set" in message
  page = f"{gated_server.url}/{REPO}"
  assert f"accept the terms on {page}, and set HF_TOKEN" in message


def test_a_gated_dataset_with_a_token_without_access_is_an_error(
  gated_server, monkeypatch
):
  monkeypatch.setenv("HF_TOKEN", "hf_bad")

  message = error_message(read_spec, f"parquet:hf://{REPO}/*.parquet")

  assert "status 403" in message
  assert "the token has no access" in message
  page = f"{gated_server.url}/{REPO}"
  assert f"accept the terms on {page}, and set HF_TOKEN" in message


@pytest.mark.usefixtures("gated_server")
def test_a_gated_dataset_can_be_read_with_its_token(monkeypatch, texts):
  monkeypatch.setenv("HF_TOKEN", "hf_good")

  assert read_spec(f"parquet:hf://{REPO}/*.parquet") == texts


@pytest.mark.parametrize("path", ["/api/", "/tree/", "/resolve/", "/storage/"])
@pytest.mark.parametrize("status", [429, 503])
def test_temporary_refusals_are_retried(
  folder, start, texts, waits, path, status
):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.fail(2, status, retry_after=7, path=path)

  assert read_spec(f"parquet:hf://{REPO}/*.parquet") == texts

  # huggingface_hub adds a second, because the header is rounded.
  assert len(waits) == 2
  assert set(waits) <= {7, 8}


@pytest.mark.parametrize("path", ["/api/", "/resolve/"])
@pytest.mark.parametrize("status", [429, 503])
def test_permanent_refusals_are_an_error_after_five_retries(
  folder, start, texts, waits, path, status
):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.fail(1000, status, path=path)

  message = error_message(read_spec, f"parquet:hf://{REPO}/*.parquet")

  assert f"{server.url} still answers {status} after several tries" in message
  assert waits == [1, 2, 4, 8, 8]


# Answers that break off.


@pytest.fixture(
  params=["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
def any_file(request, folder, texts, monkeypatch) -> tuple[str, list[str]]:
  """Writes a file that is read by several requests, and returns its name.

  Returns:
    The source of the file, and its texts.
  """
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  name = request.param
  if name == "a.txt":
    text = "\n".join(texts)
    (folder / name).write_bytes(text.encode())
    return f"text:hf://{REPO}/{name}", [text]
  if name == "a.parquet":
    write_parquet(folder / name, texts)
    return f"parquet:hf://{REPO}/{name}", texts
  write_jsonl(folder / name, texts)
  return f"jsonl:hf://{REPO}/{name}", texts


def test_a_broken_connection_is_repeated(any_file, start):
  spec, texts = any_file
  server = start()
  server.break_bodies(2)

  assert read_spec(spec) == texts


def test_a_short_answer_is_repeated(any_file, start):
  spec, texts = any_file
  server = start()
  server.shorten_bodies(2)

  assert read_spec(spec) == texts


def test_connections_that_always_break_are_an_error(any_file, start):
  spec, _ = any_file
  server = start()
  server.break_bodies(1000)

  name = spec.rpartition("/")[2]
  assert name in error_message(read_spec, spec)


def test_answers_that_are_always_short_are_an_error(any_file, start):
  spec, _ = any_file
  server = start()
  server.shorten_bodies(1000)

  name = spec.rpartition("/")[2]
  assert name in error_message(read_spec, spec)


def test_a_short_answer_is_described(folder, start):
  (folder / "a.txt").write_bytes(b"x" * 1000)
  server = start()
  server.shorten_bodies(1000)

  message = error_message(read_spec, f"text:hf://{REPO}/a.txt")

  assert "got 500 of 1000 bytes from byte 0 on, 3 times in a row" in message


def test_a_connection_that_breaks_late_loses_no_document(
  folder, start, texts, monkeypatch
):
  """The documents before the break are not repeated either."""
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 7919)
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  write_jsonl(folder / "a.jsonl", texts)
  server = start()
  source = open_jsonl()

  documents = []
  for part in source.parts:
    server.break_bodies(1)
    documents += [document.text for document in source.read(part)]

  assert documents == texts


@pytest.mark.full
def test_the_1b_config_downloads_prepares_trains_and_resumes(
  start, texts, command, tmp_path
):
  """Flags only make the model small and avoid the tokenizer's download."""
  repo = "datasets/HuggingFaceFW/fineweb-edu"
  for number in range(3):
    path = tmp_path / "hub" / repo / f"sample/100BT/{number:03}_00000.parquet"
    write_parquet(path, [f"{text} {number}" for text in texts])
  server = start()
  server.commit(repo, "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9")
  flags = [
    f"--config={ROOT}/configs/diff_1b.py",
    "--config.data.tokenizer=bytes",
    "--config.data.length=64",
    "--config.model.vocab_size=256",
    "--config.model.num_layers=1",
    "--config.model.embed_dim=32",
    "--config.model.num_heads=1",
    "--config.model.num_kv_heads=1",
    "--config.train.batch_size=2",
    "--config.eval.rows=4",
  ]

  for steps in (1, 2):
    steps_flag = f"--config.train.steps={steps}"
    result = command("diffjax.train", *flags, steps_flag, cwd=tmp_path)
    assert result.returncode == 0, result.stderr

  assert "resuming from step 1" in result.stderr
  assert (tmp_path / "runs/diff_1b/checkpoints/2").is_dir()
  # A single file has more tokens than the run needs.
  config = (tmp_path / "runs/diff_1b/config.toml").read_text(encoding="utf-8")
  assert "files = 1\n" in config
