"""The embedded corpus: the Python standard library's own source text, as a TFDS dataset.

Every machine that runs diffjax has it, so that a first run trains on real text without a network. It is built from the running interpreter
on first use, in seconds, and keyed by Python version and content: another interpreter, or a patched library, is another dataset.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pathlib
import platform
import sys
import sysconfig
import tempfile
import time

from etils import epath

from diffjax.config import UserError
from diffjax.user_cache import cache_directory

# Share of the files held out. More than config.data.validation_fraction's default, because a few dozen files would be a noisy measure.
VALIDATION_FRACTION = 0.05


def _files() -> dict[bytes, tuple[str, bytes]]:
  """Every .py file of the standard library, {sha256: (name, content)}: files of equal content are one.

  The library's tests count where the distribution ships them (about 30 MB with them, 12 MB without). Installed packages do not, and
  neither do the few files that are not UTF-8.
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
      files.setdefault(hashlib.sha256(content).digest(), (name.as_posix(), content))
  if not files:
    raise UserError(
      f"config.data.source = 'stdlib': {root} holds no .py files (a frozen or zipped Python?); "
      "use text:GLOB, jsonl:GLOB, parquet:GLOB or tfds:NAME"
    )
  return files


def held_out(digest: bytes, fraction: float) -> bool:
  """Whether a document with this sha256 belongs to validation: equal documents land on the same side."""
  return int.from_bytes(digest[:8], "big") < fraction * 2**64


@functools.cache
def corpus_directory(root: str = "") -> epath.Path:
  """The dataset's directory for ``tfds.builder_from_directory``, built if need be.

  Processes that build it at the same time each build a whole one; the first to finish moves it into place, the others discard theirs.

  Args:
    root: Where the corpora are kept; "" for the user's cache.

  Returns:
    The directory, with splits "train" and "validation" and the features "text" and "name".

  Raises:
    UserError: if this Python has no source files.
  """
  start = time.time()
  files = _files()
  key = hashlib.sha256(b"".join(sorted(files)) + str(VALIDATION_FRACTION).encode()).hexdigest()[:16]
  home = epath.Path(root) if root else cache_directory("stdlib")
  target = home / f"python-{platform.python_version()}-{key}"
  builder_directory = target / "stdlib" / "1.0.0"
  if target.exists():
    return builder_directory

  import tensorflow_datasets as tfds

  splits: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
  for digest, (name, content) in files.items():
    split = "validation" if held_out(digest, VALIDATION_FRACTION) else "train"
    splits[split].append({"name": name, "text": content.decode("utf-8")})

  class Stdlib(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """The Python standard library's source text, one file a document."""

    name = "stdlib"
    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # nothing is downloaded, so no checksums stand beside the code; TFDS needs importlib_resources to look for them

    def _info(self):
      features = tfds.features.FeaturesDict({"name": tfds.features.Text(), "text": tfds.features.Text()})
      return tfds.core.DatasetInfo(builder=self, description=self.__doc__, features=features)

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(documents) for split, documents in splits.items()}

    def _generate_examples(self, documents):
      for document in documents:
        yield document["name"], document

  home.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=home, prefix=".building-") as temporary:
    building = os.path.join(temporary, "corpus")
    # TFDS prints and draws progress bars meant for downloads of hours
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
      Stdlib(data_dir=building, file_format="array_record").download_and_prepare()
    try:
      os.rename(building, target)
    except OSError:  # another process was first
      if not target.exists():
        raise
  size = sum(len(content) for _, content in files.values()) / 1e6
  print(
    f"diffjax: built the embedded corpus, {len(files)} files ({size:.1f} MB) of Python {platform.python_version()}'s standard library, "
    f"in {time.time() - start:.1f} s: {target}",
    file=sys.stderr,
    flush=True,
  )
  return builder_directory
