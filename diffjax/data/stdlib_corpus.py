"""The embedded corpus: the source text of the Python standard library, as a TFDS dataset.

A first run can train on real text without a network. The corpus is built on first use, in seconds, from the library of the running
interpreter. Python's version and the content are part of its name, so that another interpreter or a patched library is another dataset.
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

from etils import epath

from diffjax.config import UserError
from diffjax.data.document import is_validation
from diffjax.host.progress import say
from diffjax.host.user_cache import cache_directory

# Share of the files for validation. The default of config.data.validation_fraction would leave a few dozen files, a noisy measure.
VALIDATION_FRACTION = 0.05


def _files() -> dict[bytes, tuple[str, bytes]]:
  """The .py files of the standard library, {sha256: (name, content)}: of files of equal content one.

  They include the library's tests where the distribution ships them (about 30 MB with them, 12 MB without), but neither installed packages
  nor the few files that are not UTF-8.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  files: dict[bytes, tuple[str, bytes]] = {}
  for path in sorted(root.rglob("*.py")):
    name = path.relative_to(root)
    if not {"site-packages", "dist-packages"}.isdisjoint(name.parts):
      continue
    content = path.read_bytes()
    try:
      content.decode("utf-8")
    except UnicodeDecodeError:
      continue
    if content.strip():
      files.setdefault(
        hashlib.sha256(content).digest(), (name.as_posix(), content)
      )
  if not files:
    raise UserError(
      f"config.data.source = 'stdlib': {root} holds no .py files (a frozen or zipped Python?); "
      "use text:GLOB, jsonl:GLOB, parquet:GLOB or tfds:NAME"
    )
  return files


@functools.cache
def corpus_directory(root: str = "") -> epath.Path:
  """The directory of the corpus, which is built if it is not there.

  Processes that build it at the same time each build a whole one. The first to finish moves it into place, the others discard theirs.

  Args:
    root: Directory of the corpora; "" for the user's cache.

  Returns:
    A directory for ``tfds.builder_from_directory``, with the splits "train" and "validation" and the features "text" and "name".

  Raises:
    UserError: if this Python has no source files.
  """
  start = time.time()
  files = _files()
  key = hashlib.sha256(
    b"".join(sorted(files)) + str(VALIDATION_FRACTION).encode()
  ).hexdigest()[:16]
  home = epath.Path(root) if root else cache_directory("stdlib")
  target = home / f"python-{platform.python_version()}-{key}"
  if not target.exists():
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      dir=home, prefix=".building-"
    ) as temporary:
      building = os.path.join(temporary, "corpus")
      _build(building, files)
      try:
        os.rename(building, target)
      except OSError:  # another process was first
        if not target.exists():
          raise
    size = sum(len(content) for _, content in files.values()) / 1e6
    say(
      f"built the embedded corpus, {len(files)} files ({size:.1f} MB) of Python {platform.python_version()}'s standard library, "
      f"in {time.time() - start:.1f} s: {target}"
    )
  return target / "stdlib" / "1.0.0"


def _build(directory: str, files: dict[bytes, tuple[str, bytes]]) -> None:
  """Writes the files as a TFDS dataset."""
  import tensorflow_datasets as tfds

  splits: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
  for digest, (name, content) in files.items():
    split = (
      "validation" if is_validation(digest, VALIDATION_FRACTION) else "train"
    )
    splits[split].append({"name": name, "text": content.decode("utf-8")})

  class Stdlib(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """The Python standard library's source text, one file a document."""

    name = "stdlib"
    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # without downloads there are no checksums beside the code, and TFDS would need importlib_resources to look for them

    def _info(self):
      features = tfds.features.FeaturesDict(
        {"name": tfds.features.Text(), "text": tfds.features.Text()}
      )
      return tfds.core.DatasetInfo(
        builder=self, description=self.__doc__, features=features
      )

    def _split_generators(self, dl_manager):
      return {
        split: self._generate_examples(documents)
        for split, documents in splits.items()
      }

    def _generate_examples(self, documents):
      for document in documents:
        yield document["name"], document

  # TFDS prints and draws progress bars that suit long downloads
  with (
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()),
  ):
    Stdlib(
      data_dir=directory, file_format="array_record"
    ).download_and_prepare()
