"""Files on the Hugging Face Hub, by hf:// paths.

    hf://datasets/ORG/NAME/sample/*.parquet
    hf://datasets/ORG/NAME@REVISION/sample/*.parquet
    hf://ORG/NAME/tokenizer.json

A listing resolves its revision ("main" by default) to a commit, and the paths
that it returns contain the commit. All processes of a run therefore read the
same files, even if the repository changes meanwhile.

`huggingface_hub` honours HF_ENDPOINT and HF_TOKEN. It retries requests for
parts of files and for listings, on connections that break and on the statuses
429 and 5xx. It does not retry the request that resolves a revision, nor does it
notice an answer that is shorter than the range that was asked for.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import huggingface_hub
from huggingface_hub import errors

from diffjax.config import UserError
from diffjax.data.document import WITHOUT_NETWORK, reason
from diffjax.host.progress import say

_Result = TypeVar("_Result")

READ_AHEAD_BYTES = 4 << 20

# How often a range of bytes is requested if the answer is too short.
_RANGE_TRIES = 3

# The statuses with which the Hub refuses a request only temporarily, and the
# seconds before each further try.
_TEMPORARY_STATUSES = (408, 429, 500, 502, 503, 504)
_WAITS = (1.0, 2.0, 4.0, 8.0, 8.0)

# The longest wait that the Hub may ask for, in seconds. It counts requests over
# five minutes.
_MAX_WAIT = 300.0

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PATH = re.compile(
  r"hf://(?P<repo>(?:datasets|spaces)/[^/@]+/[^/@]+"
  # A model. No organization is called "datasets" or "spaces".
  r"|(?!(?:datasets|spaces)/)[^/@]+/[^/@]+)"
  # Only these two kinds of revisions contain a slash.
  r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?"
  r"/(?P<path>.+)"
)

# What a run can use if the Hub cannot be reached.
_TOKENIZER_ALTERNATIVES = (
  "a local file (--config.data.tokenizer=DIR/tokenizer.json) or "
  "--config.data.tokenizer=bytes"
)


class HubFile(NamedTuple):
  """A file on the Hub.

  Attributes:
    path: The path that is opened. It contains the commit.
    name: The path with the revision that was asked for, if any.
    size: Bytes.
    content_id: A hash of the content.
  """

  path: str
  name: str
  size: int
  content_id: str


class _Location(NamedTuple):
  """The parts of a path on the Hub.

  Attributes:
    repo: "datasets/ORG/NAME", or "ORG/NAME" for a model.
    revision: A branch, tag or commit; "" for the default branch.
    path: The path in the repository. May have wildcards.
  """

  repo: str
  revision: str
  path: str

  @property
  def repo_type(self) -> str:
    """The kind of repository: "model", "dataset" or "space"."""
    if self.repo.count("/") == 1:
      # ORG/NAME
      return "model"
    kind_in_plural, _, _ = self.repo.partition("/")
    return kind_in_plural.removesuffix("s")

  @property
  def repo_id(self) -> str:
    """ORG/NAME, without the kind."""
    return "/".join(self.repo.split("/")[-2:])


def _parse(path: str) -> _Location:
  """Returns the parts of an hf:// path.

  Raises:
    UserError: if the path has another form.
  """
  parsed = _PATH.fullmatch(path)
  if parsed is None:
    raise UserError(
      f"{path!r} is not a path on the Hugging Face Hub: write"
      " hf://datasets/ORG/NAME/PATH, or hf://ORG/NAME/PATH for a model;"
      " NAME@REVISION pins a revision"
    )
  return _Location(parsed["repo"], parsed["revision"] or "", parsed["path"])


def list_files(
  pattern: str, alternatives: str = WITHOUT_NETWORK
) -> list[HubFile]:
  """Returns the files that match a glob, sorted by name.

  Args:
    pattern: An hf:// path, with or without wildcards.
    alternatives: What the user can do without network, for messages.

  Returns:
    The files. Their paths contain the commit.

  Raises:
    UserError: if the Hub cannot be reached or refuses, or nothing matches.
  """
  location = _parse(pattern)
  filesystem = _filesystem(_endpoint())
  with _explain_errors(pattern, location, alternatives):
    commit = _resolve(location, filesystem)
    # The file system's paths have the form REPO@COMMIT/PATH.
    path = f"{location.repo}@{commit}/{location.path}"
    if glob.has_magic(location.path):
      matching: Any = filesystem.glob(path, detail=True)
      infos = list(matching.values())
    else:
      infos = [filesystem.info(path)]

  files = []
  for info in infos:
    if info["type"] == "file":
      files.append(_make_file(info, location, commit))
  if not files:
    raise UserError(
      f"{pattern}: no file of {location.repo} matches {location.path!r} at"
      f" revision {location.revision or 'main'!r} ({commit[:12]}); see"
      f" {_endpoint()}/{location.repo}/tree/{commit}"
    )
  return sorted(files, key=lambda file: file.name)


def _make_file(
  info: dict[str, Any], location: _Location, commit: str
) -> HubFile:
  """Returns a file of a listing.

  Args:
    info: The description of the file by `HfFileSystem`.
    location: The pattern that was listed.
    commit: The commit of its revision.
  """
  commit_root = f"{location.repo}@{commit}/"
  name_root = f"{location.repo}/"
  if location.revision:
    name_root = f"{location.repo}@{location.revision}/"
  path_in_repo = info["name"].removeprefix(commit_root)
  return HubFile(
    path=f"hf://{commit_root}{path_in_repo}",
    name=f"hf://{name_root}{path_in_repo}",
    size=info["size"],
    # For a large file, this is the hash of its Git LFS pointer, which contains
    # the file's sha256.
    content_id=info["blob_id"],
  )


def open_file(path: str, read_ahead: bool) -> BinaryIO:
  """Opens a file for random access.

  Args:
    path: The path of a listed file.
    read_ahead: Whether each request fetches 4 MiB, for readers of small pieces.
      Otherwise, each read is a request for exactly its bytes.

  Returns:
    The file. Reading raises UserError if the Hub cannot be read.

  Raises:
    UserError: if the Hub cannot be reached or refuses, or has no such file.
  """
  file = _HubFile(path)
  if read_ahead:
    return cast(BinaryIO, io.BufferedReader(file, READ_AHEAD_BYTES))
  return cast(BinaryIO, file)


def read_tokenizer(path: str) -> bytes:
  """Returns the content of a tokenizer's file.

  Args:
    path: An hf:// path, with or without a revision.

  Raises:
    UserError: if the Hub cannot be reached or refuses, or has no such file.
  """
  file = list_files(path, _TOKENIZER_ALTERNATIVES)[0]
  return _read_once(file.path)


def clear_cache() -> None:
  """Removes the files of tokenizers from memory. They are read again."""
  _read_once.cache_clear()


@functools.lru_cache(maxsize=2)
def _read_once(path: str) -> bytes:
  """Returns the content of a file of a commit, and caches it for the run."""
  with open_file(path, read_ahead=False) as file:
    return file.read()


class _HubFile(io.RawIOBase):
  """A file on the Hub. Each read is one request for a range of bytes."""

  def __init__(self, path: str):
    """Opens the file.

    Raises:
      UserError: if the Hub cannot be reached or refuses, or has no such file.
    """
    self._path = path
    self._location = _parse(path)
    self._position = 0
    filesystem = _filesystem(_endpoint())
    with self._explain_errors():
      _retry(filesystem.resolve_path, path)
      # The default cache would fetch 5 MB beyond each range.
      self._file = filesystem.open(path=path, mode="rb", cache_type="none")
      self._size = self._file.size

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._position

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    if whence == os.SEEK_CUR:
      offset += self._position
    elif whence == os.SEEK_END:
      offset += self._size
    self._position = max(0, offset)
    return self._position

  def readinto(self, buffer: Any) -> int:
    """Fills the buffer as far as the file reaches. Returns the bytes read."""
    view = memoryview(buffer).cast("B")
    content = self._fetch(len(view))
    view[: len(content)] = content
    return len(content)

  def readall(self) -> bytes:
    return self._fetch(self._size)

  def _fetch(self, count: int) -> bytes:
    """Returns the next `count` bytes, or all bytes up to the end of the file.

    The Hub's answer may be shorter than the range that was requested. Then the
    range is requested again, and incomplete bytes are never returned.

    Raises:
      UserError: if the bytes cannot be fetched.
    """
    count = min(count, self._size - self._position)
    if count <= 0:
      return b""
    for _ in range(_RANGE_TRIES):
      with self._explain_errors():
        self._file.seek(self._position)
        content = self._file.read(count)
      if len(content) == count:
        self._position += count
        return content
    raise UserError(
      f"{self._path}: got {len(content)} of {count} bytes from byte"
      f" {self._position} on, {_RANGE_TRIES} times in a row: check the proxy,"
      " if there is one, and run the same command again to continue"
    )

  def _explain_errors(self) -> contextlib.AbstractContextManager[None]:
    return _explain_errors(self._path, self._location, WITHOUT_NETWORK)


def _endpoint() -> str:
  """Returns the URL of the Hub.

  huggingface_hub reads HF_ENDPOINT only when it is imported.
  """
  endpoint = os.environ.get("HF_ENDPOINT") or huggingface_hub.constants.ENDPOINT
  return endpoint.rstrip("/")


@functools.lru_cache(maxsize=4)
def _filesystem(endpoint: str) -> huggingface_hub.HfFileSystem:
  """Returns huggingface_hub's file system, one for all threads.

  All threads share its cache of listings. By default, each thread would have an
  instance of its own.
  """
  return huggingface_hub.HfFileSystem(
    endpoint=endpoint, skip_instance_cache=True
  )


def _resolve(
  location: _Location, filesystem: huggingface_hub.HfFileSystem
) -> str:
  """Returns the commit of a location's revision.

  Raises:
    HfHubHTTPError, FileNotFoundError: if there is no such revision or commit.
  """
  revision = urllib.parse.unquote(location.revision)
  if _COMMIT.fullmatch(revision):
    commit = revision
  else:
    api = huggingface_hub.HfApi(endpoint=_endpoint())
    info = _retry(
      api.repo_info,
      location.repo_id,
      revision=revision or None,
      repo_type=location.repo_type,
      timeout=huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT,
    )
    assert info.sha is not None, "the Hub names a commit"
    commit = info.sha
  # Raises an error if there is no such commit.
  _retry(filesystem.resolve_path, f"{location.repo}@{commit}")
  return commit


def _retry(
  function: Callable[..., _Result], *args: Any, **kwargs: Any
) -> _Result:
  """Returns function(*args, **kwargs). Retries while the Hub is unavailable.

  For functions of huggingface_hub that have no retries of their own.
  """
  for default_wait in _WAITS:
    try:
      return function(*args, **kwargs)
    except errors.HfHubHTTPError as error:
      status = error.response.status_code
      if status not in _TEMPORARY_STATUSES:
        raise
      wait = _requested_wait(error, default_wait)
    say(f"{_endpoint()} answers {status}; trying again in {wait:g} s")
    time.sleep(wait)
  # The last try. The caller handles its errors.
  return function(*args, **kwargs)


def _requested_wait(error: errors.HfHubHTTPError, default: float) -> float:
  """Returns the seconds that the Hub asks to wait before the next request."""
  retry_after = error.response.headers.get("Retry-After", "")
  if not retry_after.isdigit():
    return default
  return min(float(retry_after), _MAX_WAIT)


@contextlib.contextmanager
def _explain_errors(
  path: str, location: _Location, alternatives: str
) -> Iterator[None]:
  """Converts errors of huggingface_hub in the body to a UserError.

  Args:
    path: The path or pattern that is read, for the message.
    location: The same, parsed.
    alternatives: What the user can do without network.
  """
  try:
    yield
  except (errors.HTTPError, OSError, ValueError) as error:
    message = _error_message(error, location, alternatives)
    raise UserError(f"{path}: {message}") from error


def _error_message(
  error: Exception, location: _Location, alternatives: str
) -> str:
  """Returns what an error of huggingface_hub means, and what the user can do.

  Args:
    error: An `HTTPError`, `OSError` or `ValueError`.
    location: What was read.
    alternatives: What the user can do without network.
  """
  if isinstance(error, FileNotFoundError):
    # The file system converts some refusals of the Hub to FileNotFoundError.
    # The original error says more.
    if not isinstance(error.__cause__, errors.HfHubHTTPError):
      return _missing_file_message(location)
    error = error.__cause__
  if isinstance(error, errors.HfHubHTTPError):
    return _refusal_message(error, location)
  if isinstance(error, ValueError):
    return f"cannot be read from {_endpoint()} ({reason(error)})"
  return (
    f"cannot reach {_endpoint()} ({reason(error)}): run the same command again"
    f" when it can be reached, or use {alternatives}"
  )


def _missing_file_message(location: _Location) -> str:
  """Returns the message for a file that is not in the repository."""
  revision = location.revision or "main"
  return (
    f"{location.repo} has no such file at revision {revision!r}; see"
    f" {_endpoint()}/{location.repo}/tree/{revision}"
  )


def _refusal_message(error: errors.HfHubHTTPError, location: _Location) -> str:
  """Returns why the Hub refuses a request, and what the user can do."""
  status = error.response.status_code
  page = f"{_endpoint()}/{location.repo}"
  is_gated = isinstance(error, errors.GatedRepoError)
  # The error for a gated repository is a subclass of the one for a missing one.
  is_missing = isinstance(error, errors.RepositoryNotFoundError)
  if is_missing and not is_gated:
    return (
      f"no repository {location.repo!r} at {_endpoint()} (status {status}):"
      " check its name; if it is private, set HF_TOKEN to a token that may"
      " read it"
    )
  if isinstance(error, errors.RevisionNotFoundError):
    return (
      f"{location.repo} has no revision {location.revision!r} (status"
      f" {status}); see {page}/commits/main"
    )
  if isinstance(error, errors.EntryNotFoundError):
    return _missing_file_message(location)
  if is_gated or status in (401, 403):
    token = "the token has no access"
    if huggingface_hub.get_token() is None:
      token = "no token is set"
    return (
      f"access to {location.repo} is restricted (status {status}), and {token}:"
      f" accept the terms on {page}, and set HF_TOKEN to a token from"
      f" {_endpoint()}/settings/tokens"
    )
  if status in _TEMPORARY_STATUSES:
    return (
      f"{_endpoint()} still answers {status} after several tries: wait, and run"
      " the same command again to continue; with HF_TOKEN set, the Hub's limits"
      " are higher"
    )
  return f"{_endpoint()} answers {status} ({reason(error)})"
