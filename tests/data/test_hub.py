"""Sources and tokenizers on the Hugging Face Hub, against a local server."""

import gzip
import json
import pathlib
import socket
import types

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
ALTERNATIVES = (
  "--config.data.source='parquet:/data/*.parquet'",
  "--config.data.source=tfds:NAME --config.data.data_dir=DIR",
  "--config=configs/tiny.py",
)


@pytest.fixture
def folder(tmp_path):
  """The files of the dataset org/name."""
  path = tmp_path / "hub" / REPO
  path.mkdir(parents=True)
  return path


def clear_parquet_caches():
  parquet._cached_footer.cache_clear()
  parquet._cached_metadata.cache_clear()
  parquet._cached_row_groups.cache_clear()


@pytest.fixture
def start(tmp_path, monkeypatch):
  """start(): serves what is in the folders, as the Hub of this test."""
  servers = []

  def start():
    server = HubServer(tmp_path / "hub")
    servers.append(server)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server

  monkeypatch.delenv("HF_TOKEN", raising=False)
  # Another test may have read a file of the same name and content.
  clear_parquet_caches()
  hub._read_once.cache_clear()
  yield start
  for server in servers:
    server.close()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
  """The waits between retries in seconds, which are noted and not waited."""
  seconds = []
  clock = types.SimpleNamespace(sleep=seconds.append)
  monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
  monkeypatch.setattr(hub, "time", clock)
  return seconds


def write_jsonl(path, texts):
  lines = [json.dumps({"text": text}) + "\n" for text in texts]
  content = "".join(lines).encode()
  if path.suffix == ".gz":
    content = gzip.compress(content)
  elif path.suffix == ".zst":
    content = pyarrow.compress(content, codec="zstd", asbytes=True)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)


def write_parquet(path, texts, row_group_size=70):
  """Writes a file with the columns text, url and score."""
  path.parent.mkdir(parents=True, exist_ok=True)
  urls = [f"https://example.com/{text}" for text in texts]
  columns = {"text": texts, "url": urls, "score": range(len(texts))}
  pyarrow.parquet.write_table(
    pyarrow.table(columns), path, row_group_size=row_group_size
  )


def column_range(column):
  """Returns the first and the last byte of a column of a row group."""
  first = column.dictionary_page_offset or column.data_page_offset
  return first, first + column.total_compressed_size - 1


def read(source):
  documents = []
  for part in source.parts:
    documents += [document.text for document in source.read(part)]
  return documents


def read_spec(spec, config=ALL):
  return read(sources.documents(spec, "train", config))


def error_of(function, *arguments):
  """Returns the message of a call that fails, which is one line."""
  with pytest.raises(UserError) as caught:
    function(*arguments)
  message = str(caught.value)
  assert "\n" not in message
  return message


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl(folder, start, texts, name):
  write_jsonl(folder / name, texts)
  start()
  assert read_spec(f"jsonl:hf://{REPO}/{name}") == texts


def test_a_large_jsonl_is_read_in_ranges(folder, start, texts, monkeypatch):
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 7919)
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  write_jsonl(folder / "a.jsonl", texts)
  server = start()
  assert read_spec(f"jsonl:hf://{REPO}/a.jsonl") == texts
  assert len(server.fetched("a.jsonl")) > 10


def test_text(folder, start, texts):
  for index, text in enumerate(texts[:20]):
    (folder / f"{index:02}.txt").write_bytes(text.encode())
  server = start()
  assert read_spec(f"text:hf://{REPO}/*.txt") == texts[:20]
  assert all(len(server.fetched(f"{i:02}.txt")) == 1 for i in range(20))


def test_parquet(folder, start, texts):
  write_parquet(folder / "a.parquet", texts)
  start()
  assert read_spec(f"parquet:hf://{REPO}/a.parquet") == texts


def test_globs(folder, start, texts):
  write_parquet(folder / "sample" / "b.parquet", texts[:50])
  write_parquet(folder / "sample" / "a.parquet", texts[50:100])
  write_parquet(folder / "sample" / "more" / "c.parquet", texts[100:])
  (folder / "README.md").write_text("not data", encoding="utf-8")
  start()
  two = texts[50:100] + texts[:50]
  assert read_spec(f"parquet:hf://{REPO}/sample/*.parquet") == two
  assert read_spec(f"parquet:hf://{REPO}/sample/[ab].parquet") == two
  assert read_spec(f"parquet:hf://{REPO}/**/*.parquet") == two + texts[100:]


def test_a_pinned_revision_gives_its_files(folder, start, texts):
  write_parquet(folder / "a.parquet", texts[:100])
  server = start()
  old = server.commit(REPO)
  write_parquet(folder / "a.parquet", texts[100:])
  server.commit(REPO)
  assert read_spec(f"parquet:hf://{REPO}@{old}/a.parquet") == texts[:100]
  assert read_spec(f"parquet:hf://{REPO}@main/a.parquet") == texts[100:]
  assert read_spec(f"parquet:hf://{REPO}/a.parquet") == texts[100:]


def test_files_that_change_during_a_run_stay(folder, start, texts):
  write_parquet(folder / "a.parquet", texts[:100])
  server = start()
  source = sources.documents(f"parquet:hf://{REPO}/*.parquet", "train", ALL)
  write_parquet(folder / "a.parquet", texts[100:])
  server.commit(REPO)
  assert read(source) == texts[:100]


@pytest.mark.parametrize("repo", ["org/name", REPO])
def test_tokenizer(tmp_path, start, texts, repo):
  root = repo if repo == REPO else f"models/{repo}"
  folder = tmp_path / "hub" / root
  tokenizer_training.train_tokenizer(texts, 300, folder)
  server = start()
  commit = server.commit(root)
  local = tokenizer.load_tokenizer(str(folder / "tokenizer.json"))
  for revision in ("", f"@{commit}"):
    spec = f"hf://{repo}{revision}/tokenizer.json"
    loaded = tokenizer.load_tokenizer(spec)
    assert loaded.fingerprint == local.fingerprint
    assert loaded.spec == spec
  assert len(server.fetched("tokenizer.json")) == 1
  loaded = tokenizer.load_tokenizer(f"hf://{repo}/tokenizer.tiktoken")
  assert loaded.encode(texts[4]) == local.encode(texts[4])


def test_a_parquet_file_is_fetched_once(folder, start, texts):
  """Its footer, and of each row group the column that is needed."""
  write_parquet(folder / "a.parquet", texts)
  write_parquet(folder / "b.parquet", texts)
  server = start()
  spec = f"parquet:hf://{REPO}/*.parquet"
  assert read_spec(spec) == texts * 2
  # Another split of the same source needs no second footer.
  sources.documents(spec, "validation", ALL).parts  # noqa: B018
  for name in ("a.parquet", "b.parquet"):
    metadata = pyarrow.parquet.read_metadata(folder / name)
    row_groups = [metadata.row_group(i) for i in range(5)]
    _, end_of_data = column_range(row_groups[-1].column(2))
    data = []
    footers = []
    for first, last in server.fetched(name):
      if last <= end_of_data:
        data.append((first, last))
      else:
        footers.append((first, last))
    expected = [column_range(row_group.column(0)) for row_group in row_groups]
    assert data == expected
    assert len(footers) == 1


def test_footers_of_many_files_are_read_once_each(folder, start, texts):
  for index in range(20):
    write_parquet(folder / f"{index:02}.parquet", texts[index : index + 1])
  server = start()
  spec = f"parquet:hf://{REPO}/*.parquet"
  assert len(sources.documents(spec, "train", ALL).parts) == 20
  assert all(len(server.fetched(f"{i:02}.parquet")) == 1 for i in range(20))


def test_opening_a_source_reads_no_file(folder, start, texts):
  """A run whose rows are prepared only compares the identity of its files."""
  write_parquet(folder / "a.parquet", texts)
  server = start()
  sources.documents(f"parquet:hf://{REPO}/*.parquet", "train", ALL)
  assert not server.fetched("a.parquet")


def test_identity_is_that_of_the_content(folder, start, texts):
  def identities():
    source = sources.documents(f"jsonl:hf://{REPO}/*.jsonl", "train", ALL)
    return source.identity, source.fingerprint()

  write_jsonl(folder / "a.jsonl", texts)
  server = start()
  identity, fingerprint = identities()
  (folder / "README.md").write_text("another commit", encoding="utf-8")
  server.commit(REPO)
  assert identities() == (identity, fingerprint)
  # A change of the same size in the middle, which samples would not show.
  path = folder / "a.jsonl"
  content = path.read_bytes()
  path.write_bytes(content.replace(b"document 150", b"Document 150"))
  server.commit(REPO)
  new_identity, new_fingerprint = identities()
  assert new_identity != identity
  assert new_fingerprint["text"] != fingerprint["text"]
  assert new_fingerprint["names and sizes"] == fingerprint["names and sizes"]


def test_prepared_rows_of_changed_files_are_refused(
  folder, start, texts, make_config, tmp_path
):
  write_parquet(folder / "a.parquet", texts, row_group_size=300)
  server = start()
  data = make_config(
    source=f"parquet:hf://{REPO}/*.parquet", prepared_dir=f"{tmp_path}/rows"
  ).data
  prepared.prepare(data, 1)
  write_parquet(folder / "a.parquet", texts[1:])
  server.commit(REPO)
  assert "held other files" in error_of(prepared.prepare, data, 1)


def test_a_checkpoint_of_prepared_rows_of_changed_files_is_refused(
  folder, start, texts, make_config
):
  # With one row group, the rows are prepared in this process.
  write_parquet(folder / "a.parquet", texts, row_group_size=300)
  server = start()
  config = make_config(source=f"parquet:hf://{REPO}/*.parquet")
  state = pipeline.training_batches(config).get_state()
  write_parquet(folder / "a.parquet", texts[1:], row_group_size=300)
  server.commit(REPO)
  other = pipeline.training_batches(config)
  assert "the text of 'parquet:hf://" in error_of(other.set_state, state)


def test_a_stream_of_changed_files_is_refused(
  folder, start, texts, make_config
):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  config = make_config(mode="streamed", source=f"parquet:hf://{REPO}/*.parquet")
  batches = pipeline.training_batches(config)
  next(batches)
  state = json.loads(json.dumps(batches.get_state()))
  batches.close()
  same = pipeline.training_batches(config)
  same.set_state(state)
  same.close()
  write_parquet(folder / "a.parquet", [text.upper() for text in texts])
  server.commit(REPO)
  other = pipeline.training_batches(config)
  message = error_of(other.set_state, state)
  other.close()
  assert "of the files of 'parquet:hf://" in message


def test_streamed_workers_read_the_hub(folder, start, texts, make_config):
  write_parquet(folder / "a.parquet", texts)
  start()

  def tokens(source, num_workers):
    config = make_config(
      mode="streamed", source=source, num_workers=num_workers
    )
    batches = pipeline.training_batches(config)
    taken = [next(batches)["tokens"].tolist() for _ in range(4)]
    batches.close()
    return taken

  remote = tokens(f"parquet:hf://{REPO}/a.parquet", num_workers=1)
  assert remote == tokens(f"parquet:{folder}/a.parquet", num_workers=0)


def test_prepared_workers_read_the_hub(
  folder, start, texts, make_config, tmp_path
):
  write_parquet(folder / "a.parquet", texts)
  start()
  digests = []
  for root, workers in ((f"hf://{REPO}", 2), (str(folder), 1)):
    data = make_config(source=f"parquet:{root}/a.parquet").data
    (target,) = prepared.prepare(data, workers)
    shard_files = sorted(pathlib.Path(target.directory).glob("*-*.json"))
    digests.append([path.read_bytes() for path in shard_files])
  assert digests[0], "no shard was written"
  assert digests[0] == digests[1]


# --- Failures ---


def check_unreachable(message, endpoint, alternatives=ALTERNATIVES):
  assert f"cannot reach {endpoint}" in message
  for alternative in alternatives:
    assert alternative in message


def test_refused_connection(folder, start, texts, waits):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.close()
  message = error_of(read_spec, f"parquet:hf://{REPO}/*.parquet")
  check_unreachable(message, server.url)
  assert "refused" in message
  assert not waits  # nothing was read yet, so the user need not wait
  message = error_of(tokenizer.load_tokenizer, f"hf://{REPO}/tokenizer.json")
  alternatives = (
    "--config.data.tokenizer=bytes",
    "--config.data.tokenizer=DIR/tokenizer.json",
  )
  check_unreachable(message, server.url, alternatives)


def test_unknown_host(monkeypatch):
  # Names that end in .invalid never exist (RFC 2606).
  monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
  message = error_of(read_spec, f"parquet:hf://{REPO}/*.parquet")
  check_unreachable(message, "http://hub.invalid")


def test_no_answer(monkeypatch):
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
  with socket.create_server(("127.0.0.1", 0)) as silent:
    endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    message = error_of(read_spec, f"parquet:hf://{REPO}/*.parquet")
  check_unreachable(message, endpoint)
  assert "timed out" in message


def test_offline_mode(monkeypatch):
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
  message = error_of(read_spec, f"parquet:hf://{REPO}/*.parquet")
  check_unreachable(message, "https://huggingface.co")
  assert "HF_HUB_OFFLINE" in message


def test_the_server_goes_away_while_a_file_is_read(folder, start, texts, waits):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  source = sources.documents(f"parquet:hf://{REPO}/*.parquet", "train", ALL)
  parts = source.parts
  server.close()
  message = error_of(lambda: list(source.read(parts[0])))
  check_unreachable(message, server.url)
  assert len(waits) == 5  # huggingface_hub retries


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("datasets/org/other/*.parquet", "no repository 'datasets/org/other'"),
    (f"{REPO}@v9/*.parquet", "datasets/org/name has no revision 'v9'"),
    (
      f"{REPO}@{'0' * 40}/*.parquet",
      f"datasets/org/name has no revision '{'0' * 40}'",
    ),
    (f"{REPO}/b.parquet", "has no such file at revision 'main'"),
    (f"{REPO}/none/b.parquet", "has no such file at revision 'main'"),
    (f"{REPO}/b*.parquet", "no file of datasets/org/name matches 'b*.parquet'"),
    (f"{REPO}/none/*", "no file of datasets/org/name matches 'none/*'"),
    ("org/name/*.parquet", "no repository 'org/name'"),
    ("datasets/*.parquet", "is not a path on the Hugging Face Hub: write hf"),
    ("datasets/name/a.parquet", "is not a path on the Hugging Face Hub: write"),
  ],
)
def test_what_does_not_exist_is_named(folder, start, texts, path, message):
  write_parquet(folder / "a.parquet", texts)
  start()
  assert message in error_of(read_spec, f"parquet:hf://{path}")


def test_a_gated_dataset_names_the_token(folder, start, texts, monkeypatch):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.gate(REPO, token="hf_good")
  spec = f"parquet:hf://{REPO}/*.parquet"
  terms = f"accept the terms on {server.url}/{REPO}, and set HF_TOKEN"
  message = error_of(read_spec, spec)
  assert "status 401" in message and "no token is set" in message
  assert terms in message
  monkeypatch.setenv("HF_TOKEN", "hf_bad")
  message = error_of(read_spec, spec)
  assert "status 403" in message and "the token has no access" in message
  assert terms in message
  monkeypatch.setenv("HF_TOKEN", "hf_good")
  assert read_spec(spec) == texts


@pytest.mark.parametrize("path", ["/api/", "/tree/", "/resolve/", "/storage/"])
@pytest.mark.parametrize("status", [429, 503])
def test_temporary_refusals_are_retried(
  folder, start, texts, waits, path, status
):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.fail(2, status, retry_after=7, path=path)
  assert read_spec(f"parquet:hf://{REPO}/*.parquet") == texts
  # huggingface_hub adds a second, against rounding.
  assert len(waits) == 2 and set(waits) <= {7, 8}


@pytest.mark.parametrize("path", ["/api/", "/resolve/"])
@pytest.mark.parametrize("status", [429, 503])
def test_permanent_refusals_end(folder, start, texts, waits, path, status):
  write_parquet(folder / "a.parquet", texts)
  server = start()
  server.fail(1000, status, path=path)
  message = error_of(read_spec, f"parquet:hf://{REPO}/*.parquet")
  assert f"{server.url} still answers {status} after several tries" in message
  assert waits == [1, 2, 4, 8, 8]


@pytest.mark.parametrize(
  "name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
)
@pytest.mark.parametrize("fault", ["break_bodies", "shorten_bodies"])
def test_what_breaks_in_the_middle_is_read_again(
  folder, start, texts, monkeypatch, name, fault
):
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  kind = "jsonl"
  if name == "a.parquet":
    kind = "parquet"
    write_parquet(folder / name, texts)
  elif name == "a.txt":
    kind = "text"
    texts = ["\n".join(texts)]
    (folder / name).write_bytes(texts[0].encode())
  else:
    write_jsonl(folder / name, texts)
  server = start()
  spec = f"{kind}:hf://{REPO}/{name}"
  add_faults = getattr(server, fault)
  add_faults(2)
  assert read_spec(spec) == texts
  add_faults(1000)
  clear_parquet_caches()
  assert name in error_of(read_spec, spec)


def test_a_short_answer_is_named(folder, start, texts):
  (folder / "a.txt").write_bytes(b"x" * 1000)
  server = start()
  server.shorten_bodies(1000)
  message = error_of(read_spec, f"text:hf://{REPO}/a.txt")
  assert "got 500 of 1000 bytes from byte 0 on, 3 times in a row" in message


def test_a_file_that_breaks_late_loses_no_document(
  folder, start, texts, monkeypatch
):
  """The documents before the break have been given; none is given twice."""
  monkeypatch.setattr(jsonl_source, "PART_BYTES", 7919)
  monkeypatch.setattr(hub, "READ_AHEAD_BYTES", 1000)
  write_jsonl(folder / "a.jsonl", texts)
  server = start()
  source = sources.documents(f"jsonl:hf://{REPO}/a.jsonl", "train", ALL)
  documents = []
  for part in source.parts:
    server.break_bodies(1)
    documents += [document.text for document in source.read(part)]
  assert documents == texts


@pytest.mark.full
def test_the_main_command(start, texts, command, tmp_path):
  """configs/diff_1b.py downloads, prepares, trains and resumes.

  Flags only make the model small and avoid the tokenizer's download.
  """
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
  # The run's tokens are less than those of one file.
  config = (tmp_path / "runs/diff_1b/config.toml").read_text(encoding="utf-8")
  assert "files = 1\n" in config
