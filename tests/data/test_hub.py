"""Sources and tokenizers are read from the Hugging Face Hub, a local server."""

import gzip
import json
import pathlib
import socket
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

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

WITHOUT_VALIDATION = DataConfig(validation_fraction=0.0)
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
def hub_repo_dir(tmp_path) -> pathlib.Path:
  """Returns the directory of the files of the dataset org/name."""
  path = tmp_path / "hub" / "datasets/org/name"
  path.mkdir(parents=True)
  return path


@pytest.fixture
def serve_local_hub(tmp_path, monkeypatch) -> Iterator[Callable[[], HubServer]]:
  """Returns a function that makes a local server the Hub of this test.

  The server has the files of `hub_repo_dir` at hf://datasets/org/name.
  """
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
def skipped_waits(monkeypatch) -> list[float]:
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
  return read(sources.documents(spec, "train", WITHOUT_VALIDATION))


def read_with_error(spec) -> str:
  """Returns the error message of reading a source, which is one line."""
  with pytest.raises(UserError) as caught:
    read_spec(spec)
  message = str(caught.value)
  assert "\n" not in message
  return message


# Files of all formats.


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl_is_read_from_the_hub(hub_repo_dir, serve_local_hub, texts, name):
  write_jsonl(hub_repo_dir / name, texts)
  serve_local_hub()

  assert read_spec(f"jsonl:hf://datasets/org/name/{name}") == texts


def test_a_large_jsonl_file_is_read_in_ranges(
  hub_repo_dir, serve_local_hub, texts, monkeypatch
):
  """A large file could fill the memory if one request fetched it."""
  # The sizes are small, so that a small file has several parts and requests.
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 7919)
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  write_jsonl(hub_repo_dir / "a.jsonl", texts)
  server = serve_local_hub()

  read_texts = read_spec("jsonl:hf://datasets/org/name/a.jsonl")

  assert read_texts == texts
  # A single request for the whole file would be one range.
  fetched_ranges = server.fetched("a.jsonl")
  assert len(fetched_ranges) > 10


def test_each_text_file_is_one_request(hub_repo_dir, serve_local_hub, texts):
  """A text file is one document, so it is never read in parts."""
  texts = texts[:20]
  for index, text in enumerate(texts):
    (hub_repo_dir / f"{index:02}.txt").write_bytes(text.encode())
  server = serve_local_hub()

  read_texts = read_spec("text:hf://datasets/org/name/*.txt")

  assert read_texts == texts
  for index in range(20):
    requests = server.fetched(f"{index:02}.txt")
    assert len(requests) == 1


def test_parquet_is_read_from_the_hub(hub_repo_dir, serve_local_hub, texts):
  write_parquet(hub_repo_dir / "a.parquet", texts)
  serve_local_hub()

  assert read_spec("parquet:hf://datasets/org/name/a.parquet") == texts


def text_column_ranges(path) -> list[tuple[int, int]]:
  """Returns the first and the last byte of the text in each row group."""
  metadata = pyarrow.parquet.read_metadata(path)
  ranges = []
  for index in range(metadata.num_row_groups):
    # Column 0 is the text.
    column = metadata.row_group(index).column(0)
    first = column.dictionary_page_offset or column.data_page_offset
    last = first + column.total_compressed_size - 1
    ranges.append((first, last))
  return ranges


@pytest.mark.parametrize("name", ["a.parquet", "b.parquet"])
def test_only_the_footer_and_the_text_column_of_parquet_are_fetched(
  hub_repo_dir, serve_local_hub, texts, name
):
  """Other columns of a dataset are often larger than its text."""
  for file_name in ("a.parquet", "b.parquet"):
    write_parquet(hub_repo_dir / file_name, texts)
  server = serve_local_hub()

  read_texts = read_spec("parquet:hf://datasets/org/name/*.parquet")

  assert read_texts == texts + texts
  # The footer is at the end of the file, and has the positions of the columns.
  path = hub_repo_dir / name
  footer_range, *data_ranges = server.fetched(name)
  _, last_byte = footer_range
  assert last_byte == path.stat().st_size - 1
  assert data_ranges == text_column_ranges(path)


def test_both_splits_share_the_footer_of_a_file(
  hub_repo_dir, serve_local_hub, texts
):
  """The parts of a source are the row groups, which the footer lists."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  server = serve_local_hub()
  spec = "parquet:hf://datasets/org/name/*.parquet"

  train = sources.documents(spec, "train", WITHOUT_VALIDATION)
  validation = sources.documents(spec, "validation", WITHOUT_VALIDATION)

  assert train.parts
  assert validation.parts
  assert len(server.fetched("a.parquet")) == 1


def test_the_footers_of_many_files_are_fetched_once_each(
  hub_repo_dir, serve_local_hub, texts
):
  """Counting the parts of a source needs the footer of every file."""
  for index in range(20):
    write_parquet(
      hub_repo_dir / f"{index:02}.parquet", texts[index : index + 1]
    )
  server = serve_local_hub()
  source = sources.documents(
    "parquet:hf://datasets/org/name/*.parquet", "train", WITHOUT_VALIDATION
  )

  # Each file has one row, and so one part.
  assert len(source.parts) == 20
  for index in range(20):
    requests = server.fetched(f"{index:02}.parquet")
    assert len(requests) == 1


def test_opening_a_source_fetches_no_file(hub_repo_dir, serve_local_hub, texts):
  """A run whose rows are prepared only compares the identity of its files.

  The server has the identity in its list of files.
  """
  write_parquet(hub_repo_dir / "a.parquet", texts)
  server = serve_local_hub()

  sources.documents(
    "parquet:hf://datasets/org/name/*.parquet", "train", WITHOUT_VALIDATION
  )

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
def test_patterns_match_files_of_the_hub(
  hub_repo_dir, serve_local_hub, pattern, expected
):
  """Files are read in the order of their names."""
  write_parquet(hub_repo_dir / "sample" / "b.parquet", ["b"])
  write_parquet(hub_repo_dir / "sample" / "a.parquet", ["a"])
  write_parquet(hub_repo_dir / "sample" / "more" / "c.parquet", ["c"])
  (hub_repo_dir / "README.md").write_text("not data", encoding="utf-8")
  serve_local_hub()

  assert read_spec(f"parquet:hf://datasets/org/name/{pattern}") == expected


def test_a_revision_can_be_chosen(hub_repo_dir, serve_local_hub, texts):
  """A source can name a commit or a branch. By default it is "main"."""
  write_parquet(hub_repo_dir / "a.parquet", texts[:100])
  server = serve_local_hub()
  old_commit = server.commit("datasets/org/name")
  # A second commit of the same file.
  write_parquet(hub_repo_dir / "a.parquet", texts[100:])
  server.commit("datasets/org/name")

  old_spec = f"parquet:hf://datasets/org/name@{old_commit}/a.parquet"
  assert read_spec(old_spec) == texts[:100]
  main_spec = "parquet:hf://datasets/org/name@main/a.parquet"
  assert read_spec(main_spec) == texts[100:]
  default_spec = "parquet:hf://datasets/org/name/a.parquet"
  assert read_spec(default_spec) == texts[100:]


def test_an_open_source_keeps_its_revision(
  hub_repo_dir, serve_local_hub, texts
):
  """A commit during a run must not change what the run reads."""
  write_parquet(hub_repo_dir / "a.parquet", texts[:100])
  server = serve_local_hub()
  source = sources.documents(
    "parquet:hf://datasets/org/name/*.parquet", "train", WITHOUT_VALIDATION
  )

  write_parquet(hub_repo_dir / "a.parquet", texts[100:])
  server.commit("datasets/org/name")

  assert read(source) == texts[:100]


# Tokenizers.


class TokenizerRepo(NamedTuple):
  """A repository of the local Hub with a tokenizer."""

  # Such as "org/name", which follows hf://.
  name: str
  # Such as "models/org/name".
  path_on_server: str
  local_dir: pathlib.Path


@pytest.fixture(params=["org/name", "datasets/org/name"])
def tokenizer_repo(request, tmp_path, texts) -> TokenizerRepo:
  """Trains a tokenizer in a repository of models or of datasets."""
  name = request.param
  path_on_server = f"models/{name}"
  if name == "datasets/org/name":
    path_on_server = name
  local_dir = tmp_path / "hub" / path_on_server
  tokenizer_training.train_tokenizer(texts, 300, local_dir)
  return TokenizerRepo(name, path_on_server, local_dir)


def test_a_tokenizer_json_is_fetched_once_for_all_revisions(
  tokenizer_repo, serve_local_hub
):
  """Revisions with the same content share one file in the cache."""
  repo = tokenizer_repo
  server = serve_local_hub()
  commit = server.commit(repo.path_on_server)
  local = tokenizer.load_tokenizer(f"{repo.local_dir}/tokenizer.json")

  newest = tokenizer.load_tokenizer(f"hf://{repo.name}/tokenizer.json")
  pinned = tokenizer.load_tokenizer(f"hf://{repo.name}@{commit}/tokenizer.json")

  assert newest.fingerprint == local.fingerprint
  assert pinned.fingerprint == local.fingerprint
  assert len(server.fetched("tokenizer.json")) == 1


def test_a_tokenizer_keeps_the_revision_in_its_spec(
  tokenizer_repo, serve_local_hub
):
  """A later run loads the tokenizer by its spec."""
  server = serve_local_hub()
  commit = server.commit(tokenizer_repo.path_on_server)
  newest_spec = f"hf://{tokenizer_repo.name}/tokenizer.json"
  pinned_spec = f"hf://{tokenizer_repo.name}@{commit}/tokenizer.json"

  assert tokenizer.load_tokenizer(newest_spec).spec == newest_spec
  assert tokenizer.load_tokenizer(pinned_spec).spec == pinned_spec


def test_a_tiktoken_file_is_read_from_the_hub(
  tokenizer_repo, serve_local_hub, texts
):
  repo = tokenizer_repo
  serve_local_hub()
  local = tokenizer.load_tokenizer(f"{repo.local_dir}/tokenizer.tiktoken")

  loaded = tokenizer.load_tokenizer(f"hf://{repo.name}/tokenizer.tiktoken")

  assert loaded.encode_batch(texts) == local.encode_batch(texts)


# The identity of files, which notices changes.


def open_jsonl_of_hub():
  """Returns the source of all JSONL files of the dataset."""
  return sources.documents(
    "jsonl:hf://datasets/org/name/*.jsonl", "train", WITHOUT_VALIDATION
  )


def test_the_identity_does_not_depend_on_the_commit(
  hub_repo_dir, serve_local_hub, texts
):
  """A run can continue after a commit that changes no data.

  A run that continues compares the identity and the fingerprint of its source.
  """
  write_jsonl(hub_repo_dir / "a.jsonl", texts)
  server = serve_local_hub()
  source = open_jsonl_of_hub()

  (hub_repo_dir / "README.md").write_text("another commit", encoding="utf-8")
  server.commit("datasets/org/name")

  source_after_commit = open_jsonl_of_hub()
  assert source_after_commit.identity == source.identity
  assert source_after_commit.fingerprint() == source.fingerprint()


def test_the_identity_depends_on_all_of_the_content(
  hub_repo_dir, serve_local_hub, texts
):
  """Samples of the file would not show a change in the middle."""
  path = hub_repo_dir / "a.jsonl"
  write_jsonl(path, texts)
  server = serve_local_hub()
  source = open_jsonl_of_hub()

  # Change one letter in the middle, so that the size stays the same.
  content = path.read_bytes()
  path.write_bytes(content.replace(b"document 150", b"Document 150"))
  server.commit("datasets/org/name")

  changed_source = open_jsonl_of_hub()
  assert changed_source.identity != source.identity
  old_fingerprint = source.fingerprint()
  new_fingerprint = changed_source.fingerprint()
  assert new_fingerprint["text"] != old_fingerprint["text"]
  assert (
    new_fingerprint["names and sizes"] == old_fingerprint["names and sizes"]
  )


def test_prepared_rows_of_changed_files_are_refused(
  hub_repo_dir, serve_local_hub, texts, make_config, tmp_path
):
  """The rows in the directory that the user chose are of the old text."""
  # All 300 texts are one row group, so the rows are prepared in this process.
  write_parquet(hub_repo_dir / "a.parquet", texts, row_group_size=300)
  server = serve_local_hub()
  config = make_config(
    source="parquet:hf://datasets/org/name/*.parquet",
    prepared_dir=f"{tmp_path}/rows",
  ).data
  prepared.prepare(config, workers=1)

  write_parquet(hub_repo_dir / "a.parquet", texts[1:])
  server.commit("datasets/org/name")

  with pytest.raises(UserError, match="held other files") as caught:
    prepared.prepare(config, workers=1)
  assert "\n" not in str(caught.value)


def test_a_run_on_prepared_rows_does_not_continue_with_changed_files(
  hub_repo_dir, serve_local_hub, texts, make_config
):
  """The same position would be in other rows."""
  # All 300 texts are one row group, so the rows are prepared in this process.
  write_parquet(hub_repo_dir / "a.parquet", texts, row_group_size=300)
  server = serve_local_hub()
  config = make_config(source="parquet:hf://datasets/org/name/*.parquet")
  state = pipeline.training_batches(config).get_state()

  write_parquet(hub_repo_dir / "a.parquet", texts[1:], row_group_size=300)
  server.commit("datasets/org/name")

  batches = pipeline.training_batches(config)
  with pytest.raises(UserError, match="the text of 'parquet:hf://") as caught:
    batches.set_state(state)
  assert "\n" not in str(caught.value)


@pytest.fixture
def stream_config(hub_repo_dir, texts, make_config):
  """Writes a file, and returns a config that streams it."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  return make_config(
    mode="streamed", source="parquet:hf://datasets/org/name/*.parquet"
  )


def read_stream_state(config) -> dict:
  """Returns the state after one batch, as a checkpoint stores it."""
  batches = pipeline.training_batches(config)
  next(batches)
  state = json.loads(json.dumps(batches.get_state()))
  batches.close()
  return state


def test_a_stream_continues_with_the_same_files(serve_local_hub, stream_config):
  """`stream_config` reads a file of the local Hub."""
  serve_local_hub()
  state = read_stream_state(stream_config)
  batches = pipeline.training_batches(stream_config)

  batches.set_state(state)

  assert batches.get_state() == state
  batches.close()


def test_a_stream_does_not_continue_with_changed_files(
  hub_repo_dir, serve_local_hub, texts, stream_config
):
  """The same position would be in other text.

  `stream_config` reads the file a.parquet of the local Hub.
  """
  server = serve_local_hub()
  state = read_stream_state(stream_config)

  write_parquet(hub_repo_dir / "a.parquet", [text.upper() for text in texts])
  server.commit("datasets/org/name")

  batches = pipeline.training_batches(stream_config)
  message = "of the files of 'parquet:hf://"
  with pytest.raises(UserError, match=message) as caught:
    batches.set_state(state)
  assert "\n" not in str(caught.value)
  batches.close()


# Worker processes.


def read_streamed_tokens(config) -> list[list]:
  """Returns the tokens of four batches."""
  batches = pipeline.training_batches(config)
  tokens = []
  for _ in range(4):
    tokens.append(next(batches)["tokens"].tolist())
  batches.close()
  return tokens


@pytest.mark.full
def test_workers_stream_from_the_hub(
  hub_repo_dir, serve_local_hub, texts, make_config
):
  """This process reads the same tokens from the local file."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  serve_local_hub()
  config = make_config(
    mode="streamed",
    source="parquet:hf://datasets/org/name/a.parquet",
    num_workers=1,
  )
  local_config = make_config(
    mode="streamed", source=f"parquet:{hub_repo_dir}/a.parquet"
  )

  assert read_streamed_tokens(config) == read_streamed_tokens(local_config)


def prepare_totals(config, num_workers) -> list[bytes]:
  """Prepares rows, and returns the totals of each file of rows.

  The totals have a digest of the rows.
  """
  (target,) = prepared.prepare(config, workers=num_workers)
  paths = sorted(pathlib.Path(target.directory).glob("*-*.json"))
  return [path.read_bytes() for path in paths]


@pytest.mark.full
def test_workers_prepare_rows_from_the_hub(
  hub_repo_dir, serve_local_hub, texts, make_config
):
  """This process writes the same rows from the local file."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  serve_local_hub()
  config = make_config(source="parquet:hf://datasets/org/name/a.parquet").data
  local_config = make_config(source=f"parquet:{hub_repo_dir}/a.parquet").data

  totals = prepare_totals(config, num_workers=2)

  assert totals, "no rows were written"
  assert totals == prepare_totals(local_config, num_workers=1)


# A Hub that cannot be reached.


def check_unreachable(message, endpoint, alternatives=ALTERNATIVES):
  """Checks that a message names the Hub and what to use instead."""
  assert f"cannot reach {endpoint}" in message
  for alternative in alternatives:
    assert alternative in message


def test_a_refused_connection_is_an_error_at_once(
  hub_repo_dir, serve_local_hub, texts, skipped_waits
):
  """Nothing has been read yet, so the user need not wait for retries."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  server = serve_local_hub()
  # From now on, the server refuses connections.
  server.close()

  message = read_with_error("parquet:hf://datasets/org/name/*.parquet")

  check_unreachable(message, server.url)
  assert "refused" in message
  # The fixture `skipped_waits` records every wait before a retry.
  assert not skipped_waits


@pytest.mark.usefixtures("hub_repo_dir")
def test_a_refused_connection_for_a_tokenizer_names_other_tokenizers(
  serve_local_hub,
):
  """A tokenizer of bytes or of a local file needs no connection."""
  server = serve_local_hub()
  # From now on, the server refuses connections.
  server.close()

  with pytest.raises(UserError) as caught:
    tokenizer.load_tokenizer("hf://datasets/org/name/tokenizer.json")

  message = str(caught.value)
  assert "\n" not in message
  check_unreachable(message, server.url, TOKENIZER_ALTERNATIVES)


def test_an_unknown_host_is_an_error(monkeypatch):
  # Names that end in .invalid never exist (RFC 2606).
  monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")

  message = read_with_error("parquet:hf://datasets/org/name/*.parquet")

  check_unreachable(message, "http://hub.invalid")


def test_a_host_that_does_not_answer_is_an_error(monkeypatch):
  """The server accepts connections, but never sends a byte."""
  # huggingface_hub waits for this number of seconds.
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
  with socket.create_server(("127.0.0.1", 0)) as silent_server:
    port = silent_server.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)

    message = read_with_error("parquet:hf://datasets/org/name/*.parquet")

  check_unreachable(message, endpoint)
  assert "timed out" in message


def test_the_offline_mode_is_an_error_that_names_its_variable(monkeypatch):
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

  message = read_with_error("parquet:hf://datasets/org/name/*.parquet")

  check_unreachable(message, "https://huggingface.co")
  assert "HF_HUB_OFFLINE" in message


def test_a_server_that_stops_during_a_read_is_an_error_after_five_retries(
  hub_repo_dir, serve_local_hub, texts, skipped_waits
):
  """A run of days should survive a short failure of the Hub."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  server = serve_local_hub()
  source = sources.documents(
    "parquet:hf://datasets/org/name/*.parquet", "train", WITHOUT_VALIDATION
  )
  # The footer of the file names its parts, so get one before the stop.
  part = source.parts[0]
  server.close()

  with pytest.raises(UserError) as caught:
    list(source.read(part))

  message = str(caught.value)
  assert "\n" not in message
  check_unreachable(message, server.url)
  # huggingface_hub tries five times more, and waits before each try. The
  # fixture `skipped_waits` records the waits and skips them.
  assert len(skipped_waits) == 5


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
      "datasets/org/name@v9/*.parquet",
      "datasets/org/name has no revision 'v9'",
      id="revision",
    ),
    pytest.param(
      f"datasets/org/name@{'0' * 40}/*.parquet",
      f"datasets/org/name has no revision '{'0' * 40}'",
      id="commit",
    ),
    pytest.param(
      "datasets/org/name/b.parquet",
      "has no such file at revision 'main'",
      id="file",
    ),
    pytest.param(
      "datasets/org/name/none/b.parquet",
      "has no such file at revision 'main'",
      id="file in a directory",
    ),
    pytest.param(
      "datasets/org/name/b*.parquet",
      "no file of datasets/org/name matches 'b*.parquet'",
      id="pattern",
    ),
    pytest.param(
      "datasets/org/name/none/*",
      "no file of datasets/org/name matches 'none/*'",
      id="pattern in a directory",
    ),
  ],
)
def test_a_missing_repository_revision_or_file_is_named(
  hub_repo_dir, serve_local_hub, texts, path, message
):
  """The error is one line that names what is missing."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  serve_local_hub()

  assert message in read_with_error(f"parquet:hf://{path}")


@pytest.mark.parametrize(
  "path", ["datasets/*.parquet", "datasets/name/a.parquet"]
)
def test_a_path_without_a_repository_is_an_error(serve_local_hub, path):
  serve_local_hub()

  message = read_with_error(f"parquet:hf://{path}")

  assert "is not a path on the Hugging Face Hub: write hf" in message


@pytest.fixture
def gated_server(hub_repo_dir, serve_local_hub, texts) -> HubServer:
  """Serves a dataset that can only be read with the token "hf_good"."""
  write_parquet(hub_repo_dir / "a.parquet", texts)
  server = serve_local_hub()
  server.gate("datasets/org/name", token="hf_good")
  return server


def test_a_gated_dataset_without_a_token_is_an_error(gated_server):
  """The server gives the dataset only to users who accepted its terms."""
  message = read_with_error("parquet:hf://datasets/org/name/*.parquet")

  assert "status 401" in message
  assert "no token is set" in message
  page = f"{gated_server.url}/datasets/org/name"
  assert f"accept the terms on {page}, and set HF_TOKEN" in message


def test_a_gated_dataset_with_a_token_without_access_is_an_error(
  gated_server, monkeypatch
):
  """The server accepts the token "hf_good" only."""
  monkeypatch.setenv("HF_TOKEN", "hf_bad")

  message = read_with_error("parquet:hf://datasets/org/name/*.parquet")

  assert "status 403" in message
  assert "the token has no access" in message
  page = f"{gated_server.url}/datasets/org/name"
  assert f"accept the terms on {page}, and set HF_TOKEN" in message


@pytest.mark.usefixtures("gated_server")
def test_a_gated_dataset_can_be_read_with_its_token(monkeypatch, texts):
  """The server of this fixture accepts the token "hf_good" only."""
  monkeypatch.setenv("HF_TOKEN", "hf_good")

  assert read_spec("parquet:hf://datasets/org/name/*.parquet") == texts


@pytest.mark.parametrize("path", ["/api/", "/tree/", "/resolve/", "/storage/"])
@pytest.mark.parametrize("status", [429, 503])
def test_temporary_refusals_are_retried(
  hub_repo_dir, serve_local_hub, texts, skipped_waits, path, status
):
  """The server refuses two requests, and says how long to wait.

  `path` is in the addresses of the API (/api/), of its list of files (/tree/),
  of a file (/resolve/), or of the storage of its content (/storage/).
  """
  write_parquet(hub_repo_dir / "a.parquet", texts)
  server = serve_local_hub()
  server.fail(times=2, status=status, retry_after=7, path=path)

  read_texts = read_spec("parquet:hf://datasets/org/name/*.parquet")

  assert read_texts == texts
  # The server asks for a wait of 7 seconds. huggingface_hub may add one.
  assert len(skipped_waits) == 2
  for seconds in skipped_waits:
    assert seconds in (7, 8)


@pytest.mark.parametrize("path", ["/api/", "/resolve/"])
@pytest.mark.parametrize("status", [429, 503])
def test_permanent_refusals_are_an_error_after_five_retries(
  hub_repo_dir, serve_local_hub, texts, skipped_waits, path, status
):
  """The waits before the retries become longer.

  `path` is in the addresses of the API (/api/) or of a file (/resolve/).
  """
  write_parquet(hub_repo_dir / "a.parquet", texts)
  server = serve_local_hub()
  server.fail(times=1000, status=status, path=path)

  message = read_with_error("parquet:hf://datasets/org/name/*.parquet")

  assert f"{server.url} still answers {status} after several tries" in message
  # The waits before the five retries double, up to 8 seconds.
  assert skipped_waits == [1, 2, 4, 8, 8]


# Answers that break off.


@pytest.fixture(
  params=["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
def any_file(
  request, hub_repo_dir, texts, monkeypatch
) -> tuple[str, list[str]]:
  """Writes a file that is read by several requests, and returns its name.

  Returns:
    The source of the file, and its texts.
  """
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  name = request.param
  if name == "a.txt":
    text = "\n".join(texts)
    (hub_repo_dir / name).write_bytes(text.encode())
    return f"text:hf://datasets/org/name/{name}", [text]
  if name == "a.parquet":
    write_parquet(hub_repo_dir / name, texts)
    return f"parquet:hf://datasets/org/name/{name}", texts
  write_jsonl(hub_repo_dir / name, texts)
  return f"jsonl:hf://datasets/org/name/{name}", texts


def test_a_broken_connection_is_repeated(any_file, serve_local_hub):
  """The server closes two connections in the middle of a file."""
  spec, texts = any_file
  server = serve_local_hub()
  server.break_bodies(times=2)

  assert read_spec(spec) == texts


def test_a_short_answer_is_repeated(any_file, serve_local_hub):
  """Two answers have fewer bytes than were asked for."""
  spec, texts = any_file
  server = serve_local_hub()
  server.shorten_bodies(times=2)

  assert read_spec(spec) == texts


def test_connections_that_always_break_are_an_error(any_file, serve_local_hub):
  """The error names the file."""
  spec, _ = any_file
  server = serve_local_hub()
  # The server closes all connections in the middle of a file.
  server.break_bodies(times=1000)

  message = read_with_error(spec)

  file_name = spec.rpartition("/")[2]
  assert file_name in message


def test_answers_that_are_always_short_are_an_error(any_file, serve_local_hub):
  """The error names the file."""
  spec, _ = any_file
  server = serve_local_hub()
  # All answers have fewer bytes than were asked for.
  server.shorten_bodies(times=1000)

  message = read_with_error(spec)

  file_name = spec.rpartition("/")[2]
  assert file_name in message


def test_a_short_answer_is_described(hub_repo_dir, serve_local_hub):
  """The server sends half of the file each time."""
  (hub_repo_dir / "a.txt").write_bytes(b"x" * 1000)
  server = serve_local_hub()
  server.shorten_bodies(times=1000)

  message = read_with_error("text:hf://datasets/org/name/a.txt")

  assert "got 500 of 1000 bytes from byte 0 on, 3 times in a row" in message


def test_a_connection_that_breaks_late_loses_no_document(
  hub_repo_dir, serve_local_hub, texts, monkeypatch
):
  """Each document is read once, also those before the break."""
  # The sizes are small, so that a small file has several parts and requests.
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 7919)
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  write_jsonl(hub_repo_dir / "a.jsonl", texts)
  server = serve_local_hub()
  source = open_jsonl_of_hub()

  documents = []
  for part in source.parts:
    # The next answer breaks off in its middle.
    server.break_bodies(times=1)
    documents += [document.text for document in source.read(part)]

  assert documents == texts


@pytest.mark.full
def test_the_1b_config_trains_on_a_file_of_the_hub_and_resumes(
  serve_local_hub, texts, command, tmp_path
):
  """The second command continues the run of the first one."""
  # The dataset and the revision that the config names, with three small files.
  dataset = "datasets/HuggingFaceFW/fineweb-edu"
  revision = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
  directory = tmp_path / "hub" / dataset / "sample/100BT"
  for number in range(3):
    path = directory / f"{number:03}_00000.parquet"
    write_parquet(path, [f"{text} {number}" for text in texts])
  server = serve_local_hub()
  server.commit(dataset, revision)
  # A small model of bytes, whose tokenizer needs no download.
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

  first = command(
    "diffjax.train", *flags, "--config.train.steps=1", cwd=tmp_path
  )
  second = command(
    "diffjax.train", *flags, "--config.train.steps=2", cwd=tmp_path
  )

  assert first.returncode == 0, first.stderr
  assert second.returncode == 0, second.stderr
  assert "resuming from step 1" in second.stderr
  run_dir = tmp_path / "runs/diff_1b"
  assert (run_dir / "checkpoints/2").is_dir()
  # One of the three files has enough tokens for the run.
  config = (run_dir / "config.toml").read_text(encoding="utf-8")
  assert "files = 1\n" in config
