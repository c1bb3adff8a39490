"""The embedded corpus: the source text of the Python standard library.

A first run can train on real text without a network. The corpus is a TFDS
dataset, built on first use, in seconds, from the library of the running
interpreter. Its name has Python's version and a hash of the content, so another
interpreter or a patched library gives another dataset.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import platform
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from diffjax.config import UserError
from diffjax.data.document import is_validation
from diffjax.host.progress import say
from diffjax.host.user_cache import cache_directory

# The fraction of the files for validation. The default of
# config.data.validation_fraction would leave a few dozen files, which is too
# few for a precise loss.
VALIDATION_FRACTION = 0.05

_VERSION = "1.0.0"

# Directories of installed packages within the standard library's directory.
_PACKAGE_DIRECTORIES = {"site-packages", "dist-packages"}


class _SourceFile(NamedTuple):
  """A file of source text of the standard library.

  Attributes:
    name: Its path in the library, with slashes.
    content: Its bytes, valid UTF-8.
  """

  name: str
  content: bytes


# Files by the sha256 of their content. Files with equal content occur once.
_SourceFiles = Mapping[bytes, _SourceFile]


@functools.cache
def corpus_directory(root: str = "") -> epath.Path:
  """Returns the directory of the embedded corpus. Builds it if it is missing.

  If several processes build it at the same time, each one builds all of it. The
  first to finish moves it into place, and the others discard theirs.

  Args:
    root: The directory of the corpora. "" for the user's cache.

  Returns:
    A directory for `tfds.builder_from_directory`, with the splits "train" and
    "validation" and the features "text" and "name".

  Raises:
    UserError: if this Python has no source files.
  """
  start = time.time()
  files = _read_files()
  home = epath.Path(root) if root else cache_directory("stdlib")
  version = platform.python_version()
  target = home / f"python-{version}-{_hash(files)}"
  if not target.exists():
    home.mkdir(parents=True, exist_ok=True)
    _build_and_move(files, home, target)
    megabytes = sum(len(file.content) for file in files.values()) / 1e6
    seconds = time.time() - start
    say(
      f"built the embedded corpus, {len(files)} files ({megabytes:.1f} MB) of"
      f" Python {version}'s standard library, in {seconds:.1f} s: {target}"
    )
  return target / "stdlib" / _VERSION


def _read_files() -> _SourceFiles:
  """Returns the .py files of the standard library.

  They include the library's tests if the distribution has them (about 30 MB
  with tests, 12 MB without). Installed packages, empty files and the few files
  that are not UTF-8 are left out.

  Raises:
    UserError: if there are no files.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  files: dict[bytes, _SourceFile] = {}
  for path in sorted(root.rglob("*.py")):
    relative_path = path.relative_to(root)
    if not _PACKAGE_DIRECTORIES.isdisjoint(relative_path.parts):
      continue
    content = path.read_bytes()
    if not content.strip() or not _is_utf8(content):
      continue
    digest = hashlib.sha256(content).digest()
    if digest not in files:
      files[digest] = _SourceFile(relative_path.as_posix(), content)
  if not files:
    raise UserError(
      f"config.data.source = 'stdlib': {root} holds no .py files (a frozen or"
      " zipped Python?); use text:GLOB, jsonl:GLOB, parquet:GLOB or tfds:NAME"
    )
  return files


def _is_utf8(content: bytes) -> bool:
  try:
    content.decode("utf-8")
  except UnicodeDecodeError:
    return False
  return True


def _hash(files: _SourceFiles) -> str:
  """Returns a hash of all files and of how they are divided into splits."""
  digests = b"".join(sorted(files))
  fraction = str(VALIDATION_FRACTION).encode()
  return hashlib.sha256(digests + fraction).hexdigest()[:16]


def _build_and_move(
  files: _SourceFiles, home: epath.Path, target: epath.Path
) -> None:
  """Builds the corpus in a temporary directory, and moves it to `target`.

  So `target` is never incomplete.

  Args:
    files: The files of the corpus.
    home: The parent of the temporary directory, on the same disk as `target`.
    target: The directory of the corpus.
  """
  with tempfile.TemporaryDirectory(dir=home, prefix=".building-") as temporary:
    directory = os.path.join(temporary, "corpus")
    _build(directory, files)
    try:
      os.rename(directory, target)
    except OSError:
      # If another process was first, its corpus is used.
      if not target.exists():
        raise


def _build(directory: str, files: _SourceFiles) -> None:
  """Writes the files as a TFDS dataset, divided into its splits."""
  documents: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
  for digest, file in files.items():
    split = "train"
    if is_validation(digest, VALIDATION_FRACTION):
      split = "validation"
    text = file.content.decode("utf-8")
    documents[split].append({"name": file.name, "text": text})
  builder = _make_builder(directory, documents)
  # TFDS prints and draws progress bars for long downloads. This takes seconds.
  with (
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()),
  ):
    builder.download_and_prepare()


def _make_builder(
  directory: str, documents: Mapping[str, list[dict[str, str]]]
) -> Any:
  """Returns a TFDS builder that writes documents to a directory.

  Args:
    directory: The directory.
    documents: By split, the documents. Each has the fields "name" and "text".
  """
  import tensorflow_datasets as tfds

  class Stdlib(  # type: ignore[call-arg]
    tfds.core.GeneratorBasedBuilder, skip_registration=True
  ):
    """The Python standard library's source text, one file a document."""

    name = "stdlib"
    VERSION = tfds.core.Version(_VERSION)
    # Without the path of its code, TFDS does not look for checksums of
    # downloads, for which it would need importlib_resources.
    code_path = None

    def _info(self):
      features = {"name": tfds.features.Text(), "text": tfds.features.Text()}
      return tfds.core.DatasetInfo(
        builder=self,
        description=self.__doc__,
        features=tfds.features.FeaturesDict(features),
      )

    def _split_generators(self, dl_manager):
      generators = {}
      for split in documents:
        generators[split] = self._generate_examples(split)
      return generators

    def _generate_examples(self, split):
      for document in documents[split]:
        yield document["name"], document

  return Stdlib(data_dir=directory, file_format="array_record")
