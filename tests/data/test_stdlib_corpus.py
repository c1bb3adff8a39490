"""The embedded corpus is real text, and is built once for all processes."""

import os
import platform
import subprocess
import sys
import sysconfig

import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import sources, stdlib_corpus
from diffjax.host.user_cache import cache_directory


@pytest.fixture(autouse=True)
def empty_process_cache():
  """Lets each test find the corpus as a new process does."""
  stdlib_corpus.corpus_directory.cache_clear()
  yield
  stdlib_corpus.corpus_directory.cache_clear()


def open_as_another_process():
  """Returns the directory of the corpus, after its cached value is deleted."""
  stdlib_corpus.corpus_directory.cache_clear()
  return stdlib_corpus.corpus_directory()


@pytest.fixture
def small_library(tmp_path, monkeypatch):
  """Returns a directory with 100 modules that counts as standard library."""
  directory = tmp_path / "library"
  directory.mkdir()
  for index in range(100):
    (directory / f"module{index}.py").write_text(f"x = {index}")
  monkeypatch.setattr(sysconfig, "get_path", lambda name: str(directory))
  return directory


def read_texts(split) -> list[str]:
  """Returns the texts of the corpus in a split."""
  # The corpus has its own splits, so the fraction is not used.
  config = DataConfig(validation_fraction=0.5)
  source = sources.documents("stdlib", split, config)
  texts = []
  for part in source.parts:
    texts += [document.text for document in source.read(part)]
  return texts


def test_the_corpus_is_the_text_of_the_standard_library():
  """The text has several megabytes. Some of its files are for validation."""
  train = read_texts("train")
  validation = read_texts("validation")

  train_bytes = sum(len(text.encode()) for text in train)
  validation_bytes = sum(len(text.encode()) for text in validation)
  assert train_bytes + validation_bytes > 8_000_000
  assert 0.01 < validation_bytes / train_bytes < 0.15
  # The module textwrap has this class.
  assert any("class TextWrapper" in text for text in train + validation)
  # Files of equal content count once.
  assert len(set(train)) == len(train)
  assert set(train).isdisjoint(validation)


@pytest.mark.usefixtures("small_library")
def test_building_the_corpus_prints_one_line(capsys):
  stdlib_corpus.corpus_directory()

  printed = capsys.readouterr().err
  assert printed.count("\n") == 1
  assert "built the embedded corpus" in printed
  assert platform.python_version() in printed


@pytest.mark.usefixtures("small_library")
def test_the_corpus_is_built_once(capsys):
  """Another process finds the corpus in the cache, and prints nothing."""
  directory = stdlib_corpus.corpus_directory()
  capsys.readouterr()

  assert open_as_another_process() == directory
  assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("small_library")
def test_the_corpus_is_in_the_cache_under_the_version_of_python():
  directory = os.fspath(stdlib_corpus.corpus_directory())

  assert directory.startswith(os.environ["XDG_CACHE_HOME"])
  assert platform.python_version() in directory


@pytest.mark.full
def test_the_fingerprint_does_not_depend_on_when_the_corpus_was_built(
  monkeypatch, tmp_path
):
  """A stream must resume on a corpus that was built again."""
  original = sources.documents("stdlib", "train", DataConfig())
  fingerprint = original.fingerprint()

  # In an empty cache directory, the corpus is built again.
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  stdlib_corpus.corpus_directory.cache_clear()
  rebuilt = sources.documents("stdlib", "train", DataConfig())

  assert list(tmp_path.glob("diffjax/stdlib/*"))
  assert rebuilt.fingerprint() == fingerprint


def test_by_default_the_cache_is_in_the_home_directory(monkeypatch):
  monkeypatch.setenv("HOME", "/home/ann")
  monkeypatch.delenv("XDG_CACHE_HOME")

  assert os.fspath(cache_directory("rows")) == "/home/ann/.cache/diffjax/rows"


def test_an_empty_cache_variable_counts_as_not_set(monkeypatch):
  monkeypatch.setenv("HOME", "/home/ann")
  monkeypatch.setenv("XDG_CACHE_HOME", "")

  assert os.fspath(cache_directory("rows")) == "/home/ann/.cache/diffjax/rows"


PROGRAM_THAT_BUILDS_THE_CORPUS = """
from diffjax.data import stdlib_corpus

print(stdlib_corpus.corpus_directory())
"""


@pytest.mark.full
def test_processes_that_build_at_once_have_one_corpus(tmp_path):
  """The processes of a run may all find an empty cache."""
  processes = []
  for _ in range(2):
    process = subprocess.Popen(
      [sys.executable, "-c", PROGRAM_THAT_BUILDS_THE_CORPUS],
      env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    processes.append(process)

  directories = set()
  for process in processes:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    directories.add(output)

  # Both processes printed the same directory, and left no other one.
  assert len(directories) == 1
  corpora = list((tmp_path / "diffjax" / "stdlib").iterdir())
  assert len(corpora) == 1


def test_files_that_are_left_out_do_not_change_the_corpus(small_library):
  """Installed packages, invalid UTF-8, copies and empty files are left out.

  `small_library` is a directory of modules that counts as standard library.
  """
  directory = stdlib_corpus.corpus_directory()

  (small_library / "site-packages").mkdir()
  (small_library / "site-packages" / "other.py").write_text("y = 1")
  (small_library / "latin.py").write_bytes(b"# caf\xe9")
  # The file module1.py has the same text.
  (small_library / "copy.py").write_text("x = 1")
  (small_library / "blank.py").write_text("\n")

  assert open_as_another_process() == directory


def test_a_patched_library_is_another_corpus(small_library):
  """Some distributions of Python patch its library.

  `small_library` is a directory of modules that counts as standard library.
  """
  directory = stdlib_corpus.corpus_directory()

  (small_library / "module1.py").write_text("x = 'patched'")

  assert open_as_another_process() != directory


def test_a_python_without_source_files_is_an_error(tmp_path, monkeypatch):
  # The directory of the standard library is an empty one.
  monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))

  with pytest.raises(
    UserError, match="config.data.source = 'stdlib'.*holds no .py files"
  ):
    stdlib_corpus.corpus_directory()
