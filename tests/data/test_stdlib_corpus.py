"""The embedded corpus is real text and is built once, by whichever process needs it first."""

import os
import platform
import subprocess
import sys

import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import sources, stdlib_corpus
from diffjax.host.user_cache import cache_directory


@pytest.fixture(autouse=True)
def _forget():
  stdlib_corpus.corpus_directory.cache_clear()
  yield
  stdlib_corpus.corpus_directory.cache_clear()


def test_built_once_with_splits_that_share_nothing(capsys):
  directory = stdlib_corpus.corpus_directory()
  line = capsys.readouterr().err
  assert (
    line.count("\n") == 1
    and "built the embedded corpus" in line
    and platform.python_version() in line
  )
  assert platform.python_version() in os.fspath(directory) and os.environ[
    "XDG_CACHE_HOME"
  ] in os.fspath(directory)
  read = {}
  for split in ("train", "validation"):
    source = sources.documents(
      "stdlib", split, DataConfig(validation_fraction=0.5)
    )  # the corpus has splits of its own
    read[split] = [
      document.text for part in source.parts for document in source.read(part)
    ]
  assert not set(read["train"]) & set(read["validation"])
  assert len(set(read["train"])) == len(read["train"]), (
    "files of equal content count once"
  )
  train, validation = (
    sum(len(text.encode()) for text in read[split])
    for split in ("train", "validation")
  )
  assert train + validation > 8e6 and 0.01 < validation / train < 0.15
  assert any(
    "class TextWrapper" in text for texts in read.values() for text in texts
  )
  stdlib_corpus.corpus_directory.cache_clear()
  assert stdlib_corpus.corpus_directory() == directory
  assert capsys.readouterr().err == "", "the second time it is there"


@pytest.mark.full
def test_built_again_it_has_the_same_fingerprint(monkeypatch, tmp_path):
  """The files' bytes are others: a stream that is resumed where the corpus was built anew must not take it for another."""
  first = sources.documents("stdlib", "train", DataConfig()).fingerprint()
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  stdlib_corpus.corpus_directory.cache_clear()
  assert (
    sources.documents("stdlib", "train", DataConfig()).fingerprint() == first
  )
  assert list(tmp_path.glob("diffjax/stdlib/*"))


@pytest.mark.parametrize("root", ["", None])
def test_without_a_cache_directory_it_is_in_the_home(monkeypatch, root):
  monkeypatch.setenv("HOME", "/home/ann")
  monkeypatch.setenv("XDG_CACHE_HOME", root or "")
  if root is None:
    monkeypatch.delenv("XDG_CACHE_HOME")
  assert os.fspath(cache_directory("rows")) == "/home/ann/.cache/diffjax/rows"


@pytest.mark.full
def test_first_use_by_several_processes_at_once(tmp_path):
  code = "from diffjax.data import stdlib_corpus; print(stdlib_corpus.corpus_directory())"
  environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
  running = [
    subprocess.Popen(
      [sys.executable, "-c", code],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  ]
  results = [process.communicate(timeout=60) for process in running]
  assert [process.returncode for process in running] == [0, 0], results
  assert len({out for out, _ in results}) == 1
  home = tmp_path / "diffjax" / "stdlib"
  assert len(list(home.iterdir())) == 1, "nothing half built stays behind"


def test_other_content_is_another_corpus(tmp_path, monkeypatch):
  def use(files):
    for name, content in files.items():
      (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(
      stdlib_corpus.sysconfig, "get_path", lambda name: str(tmp_path)
    )
    stdlib_corpus.corpus_directory.cache_clear()
    return stdlib_corpus.corpus_directory()

  files = {f"m{index}.py": f"x = {index}".encode() for index in range(100)}
  first = use(files)
  assert (
    use(
      {
        "site-packages/other.py": b"y = 1",
        "latin.py": b"# caf\xe9",
        "copy.py": b"x = 1",
        "blank.py": b"\n",
      }
    )
    == first
  )
  assert use({"m1.py": b"x = 'patched'"}) != first


def test_python_without_sources(tmp_path, monkeypatch):
  monkeypatch.setattr(
    stdlib_corpus.sysconfig, "get_path", lambda name: str(tmp_path)
  )
  with pytest.raises(
    UserError, match="config.data.source = 'stdlib'.*holds no .py files"
  ):
    stdlib_corpus.corpus_directory()
