"""Detects changed files of a source without reading them whole.

Prepared rows and streamed checkpoints compare different things.

Prepared rows belong to files of the same names, sizes and times, with equal
samples of their text. The times are in nanoseconds, so text that is rewritten
at the same size within a second counts as changed. The samples are needed where
times cannot tell: in buckets and on some file systems they are whole seconds,
and tools can set them. A copy of the files elsewhere has other names, so its
rows are prepared anew, as they are if only the times changed. The inode and its
change time are not compared: a backup, a `chmod` or a new hard link changes
them, but not the text. Earlier versions compared whole seconds and no text.
Their rows are accepted by that comparison (`Source.earlier_identity`).

A stream that is resumed goes on at a place in its files, which should be what they were. Compared are the names and sizes of all files, and
the first and last bytes of some (of a TFDS data set, the number of its records, and some of them): enough for files that were replaced,
rewritten, added or cut. Text that changed elsewhere at the same size is not seen. The files' times may tell of it, but a copy of the files
has other times too. The Hub gives a hash of each file's whole content, which is compared instead.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence

from diffjax.config import UserError
from diffjax.data.document import reason
from diffjax.data.files import File, open_file
from diffjax.host.progress import say

_SAMPLED = 32
_SAMPLE = 4096  # bytes, at either end of a file


def fingerprint(files: Sequence[File]) -> dict[str, str]:
  """Digests (hex) of the files' "names and sizes", "text" (of samples), "times" and "nanoseconds" (the same times).

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
  """Returns a digest of samples of the files, on the Hub of their contents.

  Raises:
    UserError: if a file cannot be read.
  """
  content_ids = [file.content_id for file in files]
  if all(content_ids):
    return digest(content_ids)
  samples = hashlib.sha256()
  for index in sampled(len(files)):
    file = files[index]
    if "://" in file.path:
      samples.update(_remote_sample(file))
    else:
      samples.update(_sample(file))
  return samples.hexdigest()


def _sample(file: File) -> bytes:
  """Returns the first and the last bytes of a file."""
  try:
    with open_file(file.path) as opened:
      beginning = opened.read(_SAMPLE)
      opened.seek(max(0, file.size - _SAMPLE))
      return beginning + opened.read(_SAMPLE)
  except OSError as error:
    raise UserError(f"{file.path}: cannot be read ({reason(error)})") from error


# A run opens its sources several times. The key has the size and the time of the
# file, so a rewrite within a second is seen by the next process only.
_remote_sample = functools.lru_cache(maxsize=1024)(_sample)


def sampled(count: int) -> list[int]:
  """The indices, of `count`, of what is compared: some, the first and the last among them."""
  return sorted(
    {(count - 1) * number // (_SAMPLED - 1) for number in range(_SAMPLED)}
  )


def digest(value: object) -> str:
  """sha256 (hex) of a value that JSON holds."""
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def check_unchanged(
  saved: Mapping[str, Mapping[str, str]] | None,
  own: Mapping[str, Mapping[str, str]],
) -> None:
  """Refuses to go on in changed files, and says what cannot be checked.

  Args:
    saved: The fingerprints of a checkpoint, by source; None if it has none.
    own: Those of the run, of the same sources.

  Raises:
    UserError: if the files of a source have changed. Names the source, and what to do.
  """
  if saved is None:
    say(
      "this checkpoint is of a version that did not note which files it read: whether they have changed since is not checked"
    )
    return
  for spec, now in own.items():
    changed = next(
      (
        what
        for what in ("names and sizes", "text")
        if saved[spec][what] != now[what]
      ),
      None,
    )
    if changed:
      raise UserError(
        f"cannot continue in the data from this checkpoint: of the files of {spec!r}, the {changed} changed since, and a stream goes on at "
        "a place in the old ones: put those back, or start over with another --workdir (--config.train.init_from keeps the parameters)"
      )
    # Older checkpoints have whole seconds only.
    times = "nanoseconds" if "nanoseconds" in saved[spec] else "times"
    if saved[spec][times] != now[times]:
      say(
        f"the files of {spec!r} have other times than at this checkpoint; their names, their sizes and the samples of their text that are "
        "compared are the same, so the run goes on; a change elsewhere in them would not be noticed"
      )
