"""Detects changed files of a source without reading them whole.

Prepared rows and streamed checkpoints compare different things.

Prepared rows belong to files with the same names, sizes and times, and with
equal samples of their text:

* Times are compared in nanoseconds. So text that is rewritten with the same
  size within a second counts as changed.
* Samples of the text are compared where times are not enough. In buckets and on
  some file systems times are whole seconds, and tools can set them.
* A copy of the files has other names, so its rows are prepared anew. The same
  holds if only the times changed.
* The inode and its change time are not compared. A backup, a `chmod` or a new
  hard link changes them, but not the text.

Earlier versions compared times in whole seconds and no text. Their rows are
accepted by that comparison (`Source.earlier_identity`).

A streamed run resumes at a place in its files, so they must be the same files.
The names and sizes of all files are compared, and the first and last bytes of
some files. For a TFDS dataset, the number of its records and some records are
compared. This detects files that were replaced, rewritten, added or cut. It
does not detect a change elsewhere in the text that keeps the size. The times
could show it, but copies of the files have other times too, so other times only
print a warning. On the Hub, each file has a hash of its whole content, which is
compared instead.

Terms, and who compares what:

* digest: a sha256 in hex.
* identity of a source: digests of its files, compared with meta.json before
  prepared rows are used from the cache or completed.
* fingerprint of a source: digests of its files, compared with the checkpoint
  when a stream resumes. For rows in config.data.prepared_dir, only a warning.
* fingerprint of rows or of a tokenizer: one digest of the whole content. A run
  that resumes compares it with its checkpoint.
* data_identity: values that the processes of a run compare when it starts.
* origin of rows: stored in checkpoints, to explain other fingerprints of rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence

from diffjax.config import UserError
from diffjax.data.document import reason
from diffjax.data.files import File, open_file
from diffjax.host.files import is_remote
from diffjax.host.progress import say

# Number of files, or of records, that are compared.
_NUM_SAMPLES = 32
# Bytes that are read at the beginning and at the end of a file.
_SAMPLE_BYTES = 4096


def fingerprint(files: Sequence[File]) -> dict[str, str]:
  """Returns digests (hex) by which changed files are detected.

  Args:
    files: The files of a source.

  Returns:
    A dict of four digests: "names and sizes", "text" (of samples), "times" (of
    modification, in whole seconds) and "nanoseconds" (the same times).

  Raises:
    UserError: if a file cannot be read.
  """
  return {
    "names and sizes": digest([(file.name, file.size) for file in files]),
    "text": text_digest(files),
    "times": digest([file.time for file in files]),
    "nanoseconds": digest([file.time_ns for file in files]),
  }


def text_digest(files: Sequence[File]) -> str:
  """Returns a digest of the text of files, without reading it whole.

  Some of the files are sampled: their first and last bytes are read. If all
  files have a content id, as on the Hub, the digest of these ids is returned.

  Raises:
    UserError: if a file cannot be read.
  """
  content_ids = [file.content_id for file in files]
  if all(content_ids):
    return digest(content_ids)
  samples = hashlib.sha256()
  for index in sampled(len(files)):
    file = files[index]
    if is_remote(file.path):
      samples.update(_remote_sample(file))
    else:
      samples.update(_sample(file))
  return samples.hexdigest()


def _sample(file: File) -> bytes:
  """Returns the first and the last bytes of a file."""
  try:
    with open_file(file.path) as stream:
      beginning = stream.read(_SAMPLE_BYTES)
      stream.seek(max(0, file.size - _SAMPLE_BYTES))
      return beginning + stream.read(_SAMPLE_BYTES)
  except OSError as error:
    raise UserError(f"{file.path}: cannot be read ({reason(error)})") from error


# A run opens its sources several times. The key contains the size and the time
# of the file. A rewrite within a second is noticed only by the next process.
_remote_sample = functools.lru_cache(maxsize=1024)(_sample)


def sampled(count: int) -> list[int]:
  """Returns the indices of the files or records to compare.

  They are evenly spaced and include the first and the last index. If there are
  few files or records, all indices are returned.

  Args:
    count: Number of files or records.
  """
  indices = set()
  for sample in range(_NUM_SAMPLES):
    indices.add((count - 1) * sample // (_NUM_SAMPLES - 1))
  return sorted(indices)


def digest(value: object) -> str:
  """Returns the sha256 (hex) of a value, written as JSON."""
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def check_unchanged(
  saved: Mapping[str, Mapping[str, str]] | None,
  current: Mapping[str, Mapping[str, str]],
) -> None:
  """Checks that a streamed run resumes with the files of its checkpoint.

  Only prints a line if the files cannot be compared, or have other times.

  Args:
    saved: The fingerprints in the checkpoint, by source. None if it has none.
    current: The fingerprints of the same sources in this run.

  Raises:
    UserError: if the files of a source have changed. The message names the
      source, and what to do.
  """
  if saved is None:
    say(
      "this checkpoint was written by a version that did not record which files"
      " it read; the files are not checked for changes"
    )
    return
  for spec, current_digests in current.items():
    _check_source_unchanged(spec, saved[spec], current_digests)


def _check_source_unchanged(
  spec: str, saved: Mapping[str, str], current: Mapping[str, str]
) -> None:
  """Raises UserError if the files of one source have changed.

  Args:
    spec: The source, for messages.
    saved: Its fingerprint in the checkpoint.
    current: Its fingerprint in this run.
  """
  for aspect in ("names and sizes", "text"):
    if saved[aspect] != current[aspect]:
      raise UserError(
        "cannot continue in the data from this checkpoint:"
        f" the {aspect} of the files of {spec!r} changed since, and a stream"
        " resumes at a position in the old files; restore them, or start over"
        " with another --workdir (--config.train.init_from keeps the"
        " parameters)"
      )
  # Copies of the files have other times, so this is not an error. Checkpoints
  # of earlier versions have only whole seconds.
  times = "nanoseconds" if "nanoseconds" in saved else "times"
  if saved[times] != current[times]:
    say(
      f"the files of {spec!r} have other times than at this checkpoint; the run"
      " continues, because their names, their sizes and samples of their text"
      " are the same; a change elsewhere in the text would not be detected"
    )
