"""A local stand-in for the Hugging Face Hub, for tests without network.

Serves the folders of a directory as repositories: `ROOT/datasets/ORG/NAME` and
`ROOT/models/ORG/NAME`. It implements the endpoints that `huggingface_hub` calls
to list and to read files, on loopback and a free port:

    with HubServer(tmp_path) as server:
      monkeypatch.setenv("HF_ENDPOINT", server.url)
      ...  # "hf://datasets/ORG/NAME/*.parquet" now reads tmp_path/datasets/...

Files are read when a commit is made: at the start, and by
`server.commit(repo)`, which moves the branch "main" and returns the new commit.
Older commits stay, so that a pinned revision still gives the old files.

    commit = server.commit("datasets/ORG/NAME")

Failures are switched on for a number of requests, optionally only for those
whose path contains a text ("/api/", "/resolve/", "a.parquet"):

    # 401 without a token, 403 with another one
    server.gate("datasets/ORG/NAME", token="hf_ok")
    server.fail(2, status=429, retry_after=0)
    server.break_bodies(1)     # closes the connection in the middle of a file
    server.shorten_bodies(1)   # answers fewer bytes than were asked for

`server.requests` lists what was asked for, in order.
"""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import pathlib
import re
import socket
import threading
import urllib.parse

_REPOSITORY = r"(?P<repo>(?:datasets|models)/[^/]+/[^/]+)"
_API = re.compile(
  rf"/api/{_REPOSITORY}(?:/(?P<call>revision|tree)/(?P<revision>[^/]+)"
  r"(?:/(?P<path>.+))?)?"
)
# Models have no prefix here, unlike in the API.
_RESOLVE = re.compile(
  r"/(?P<repo>(?:datasets/)?[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)"
  r"/(?P<path>.+)"
)
_STORAGE = re.compile(
  rf"/storage/{_REPOSITORY}/(?P<revision>[^/]+)/(?P<path>.+)"
)
# The Hub redirects to another server for large files.
_LARGE_FILES = (".parquet", ".gz", ".zst")


@dataclasses.dataclass(frozen=True)
class Request:
  """A request that reached the server.

  Attributes:
    method: "GET" or "HEAD".
    path: The URL's path, unquoted, without its query.
    range: The first and last byte that were asked for; None for all.
    status: The status of the answer.
  """

  method: str
  path: str
  range: tuple[int, int] | None
  status: int


@dataclasses.dataclass
class _Fault:
  """A failure of the next requests.

  Attributes:
    kind: "status", "break" or "shorten".
    times: Number of requests that still fail.
    path: A text that is in the path of these requests.
    status: The status of the answer.
    retry_after: Seconds, in the header Retry-After; None to leave it out.
  """

  kind: str
  times: int
  path: str
  status: int = 200
  retry_after: int | None = None


class HubServer:
  """A server of the repositories in a directory. See the module's docstring.

  Attributes:
    url: The value for HF_ENDPOINT.
    requests: All requests so far.
  """

  def __init__(self, root: pathlib.Path):
    self._root = pathlib.Path(root)
    self._commits: dict[str, dict[str, dict[str, bytes]]] = {}
    self._main: dict[str, str] = {}
    self._tokens: dict[str, str] = {}
    self._faults: list[_Fault] = []
    self._lock = threading.Lock()
    self.requests: list[Request] = []
    for folder in sorted(self._root.glob("*/*/*")):
      self.commit(folder.relative_to(self._root).as_posix())
    self._server = _Server(("127.0.0.1", 0), _make_handler(self))
    self.url = f"http://127.0.0.1:{self._server.server_port}"
    self._thread = threading.Thread(
      target=self._server.serve_forever,
      kwargs={"poll_interval": 0.01},
      daemon=True,
    )
    self._thread.start()

  def __enter__(self) -> "HubServer":
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def close(self) -> None:
    """Stops the server: from now on, connections are refused."""
    self._server.shutdown()
    self._server.server_close()
    self._server.close_connections()
    self._thread.join()

  def commit(self, repo: str, commit: str = "") -> str:
    """Reads the files of a repository again and moves its branch "main".

    Args:
      repo: Its folder, such as "datasets/ORG/NAME".
      commit: The name of the commit, 40 hexadecimal digits. By default the same
        files have the same one.

    Returns:
      The commit.
    """
    folder = self._root / repo
    files = {}
    digest = hashlib.sha1()
    for path in sorted(folder.rglob("*")):
      if path.is_file():
        name = path.relative_to(folder).as_posix()
        files[name] = path.read_bytes()
        digest.update(f"{name} {_blob_id(files[name])}\n".encode())
    commit = commit or digest.hexdigest()
    self._commits.setdefault(repo, {})[commit] = files
    self._main[repo] = commit
    return commit

  def gate(self, repo: str, token: str) -> None:
    """Refuses the files of a repository to those without this token."""
    self._tokens[repo] = token

  def fail(
    self,
    times: int,
    status: int,
    retry_after: int | None = None,
    path: str = "",
  ) -> None:
    """Answers the next requests with an error.

    Args:
      times: Number of requests.
      status: The status of the answer.
      retry_after: Value of the header Retry-After in seconds.
      path: Only requests whose path contains this text fail.
    """
    self._faults.append(_Fault("status", times, path, status, retry_after))

  def break_bodies(self, times: int, path: str = "/resolve/") -> None:
    """Closes the connection in the middle of the body of the next answers."""
    self._faults.append(_Fault("break", times, path))

  def shorten_bodies(self, times: int, path: str = "/resolve/") -> None:
    """Answers the next requests with half of the bytes, as if it were all."""
    self._faults.append(_Fault("shorten", times, path))

  def fetched(self, name: str) -> list[tuple[int, int]]:
    """Returns the ranges of a file that were served, in order."""
    ranges = []
    for request in self.requests:
      is_body = request.method == "GET" and request.status in (200, 206)
      if is_body and request.path.endswith(name) and request.range:
        ranges.append(request.range)
    return ranges

  def _take_fault(self, kinds: tuple[str, ...], path: str) -> _Fault | None:
    with self._lock:
      for fault in self._faults:
        if fault.kind in kinds and fault.times and fault.path in path:
          fault.times -= 1
          return fault
    return None

  def _find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
    """Returns a commit and its files.

    Raises:
      _Refusal: if the repository or the revision does not exist.
    """
    if repo not in self._commits:
      raise _Refusal(401, "RepoNotFound", "Invalid username or password.")
    commit = self._main[repo] if revision == "main" else revision
    if commit not in self._commits[repo]:
      raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    return commit, self._commits[repo][commit]

  def _check_token(self, repo: str, authorization: str) -> None:
    if repo not in self._tokens:
      return
    if authorization == f"Bearer {self._tokens[repo]}":
      return
    status = 403 if authorization else 401
    raise _Refusal(status, "GatedRepo", f"Access to {repo} is restricted.")


class _Server(http.server.ThreadingHTTPServer):
  """A server that can end the connections that clients keep open."""

  daemon_threads = True

  def __init__(self, *args: object):
    super().__init__(*args)
    self._connections: list[socket.socket] = []

  def get_request(self) -> tuple[socket.socket, object]:
    connection, address = super().get_request()
    self._connections.append(connection)
    return connection, address

  def close_connections(self) -> None:
    for connection in self._connections:
      with contextlib.suppress(OSError):  # the client has closed it
        connection.shutdown(socket.SHUT_RDWR)

  def handle_error(self, request: object, client_address: object) -> None:
    """Writes nothing: clients of a test may end at any time."""


class _Refusal(Exception):
  """An error that the Hub answers, with its header X-Error-Code."""

  def __init__(self, status: int, code: str, message: str):
    super().__init__(message)
    self.status = status
    self.code = code


def _make_handler(
  server: HubServer,
) -> type[http.server.BaseHTTPRequestHandler]:
  class Handler(_Handler):
    hub = server

  return Handler


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers one request."""

  hub: HubServer
  protocol_version = "HTTP/1.1"
  # Otherwise each answer waits 40 ms for an acknowledgement of its headers.
  disable_nagle_algorithm = True

  def log_message(self, format: str, *args: object) -> None:
    """Writes nothing: the tests' output is not a log."""

  def do_HEAD(self) -> None:
    self._answer()

  def do_GET(self) -> None:
    self._answer()

  def _answer(self) -> None:
    path = urllib.parse.urlsplit(self.path).path
    fault = self.hub._take_fault(("status",), urllib.parse.unquote(path))
    if fault is not None:
      headers = {}
      if fault.retry_after is not None:
        headers["Retry-After"] = str(fault.retry_after)
      self._send(fault.status, b'{"error": "a test"}', headers)
      return
    try:
      if match := _API.fullmatch(path):
        self._answer_api(**_unquoted(match))
      elif match := _STORAGE.fullmatch(path):
        self._send_file(**_unquoted(match))
      elif match := _RESOLVE.fullmatch(path):
        self._resolve(**_unquoted(match))
      else:
        raise _Refusal(404, "NotFound", f"no such endpoint: {path}")
    except _Refusal as error:
      body = json.dumps({"error": str(error)}).encode()
      headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
      self._send(error.status, body, headers)

  def _answer_api(
    self,
    repo: str,
    call: str | None,
    revision: str | None,
    path: str | None,
  ) -> None:
    commit, files = self.hub._find(repo, revision or "main")
    if call == "tree":
      query = urllib.parse.urlsplit(self.path).query
      options = urllib.parse.parse_qs(query)
      is_recursive = options.get("recursive", [""])[0].lower() == "true"
      answer = _tree(files, path or "", is_recursive)
    else:
      answer = {"id": repo.partition("/")[2], "sha": commit}
    self._send(200, json.dumps(answer).encode())

  def _resolve(self, repo: str, revision: str, path: str) -> None:
    """Sends a small file, or says where a large file is."""
    if not repo.startswith("datasets/"):
      repo = f"models/{repo}"
    self.hub._check_token(repo, self.headers.get("Authorization", ""))
    commit, files = self.hub._find(repo, revision)
    if path not in files:
      raise _Refusal(404, "EntryNotFound", f"{path} does not exist")
    if not path.endswith(_LARGE_FILES):
      self._send_file(repo, commit, path)
      return
    location = f"{self.hub.url}/storage/{repo}/{commit}/{path}"
    headers = {
      "Location": urllib.parse.quote(location, safe=":/"),
      "X-Repo-Commit": commit,
      "X-Linked-Size": str(len(files[path])),
      "X-Linked-Etag": f'"{hashlib.sha256(files[path]).hexdigest()}"',
    }
    self._send(302, b"", headers)

  def _send_file(self, repo: str, revision: str, path: str) -> None:
    commit, files = self.hub._find(repo, revision)
    content = files[path]
    headers = {
      "X-Repo-Commit": commit,
      "ETag": f'"{_blob_id(content)}"',
      "Accept-Ranges": "bytes",
    }
    requested = self._requested_range()
    if requested is None:
      self._send(200, content, headers)
      return
    start, stop = requested[0], min(requested[1] + 1, len(content))
    if start >= stop:
      headers["Content-Range"] = f"bytes */{len(content)}"
      self._send(416, b"", headers)
      return
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    self._send(206, content[start:stop], headers)

  def _requested_range(self) -> tuple[int, int] | None:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
    if match is None:
      return None
    return int(match[1]), int(match[2])

  def _send(
    self, status: int, body: bytes, headers: dict[str, str] | None = None
  ) -> None:
    """Sends an answer and notes the request. Some faults change the body."""
    path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
    self.hub.requests.append(
      Request(self.command, path, self._requested_range(), status)
    )
    has_content = self.command == "GET" and status in (200, 206)
    fault = None
    if has_content and not path.startswith("/api/"):
      # Faults of "/resolve/" also apply to the storage that it redirects to.
      resolve_path = path.replace("/storage/", "/resolve/")
      fault = self.hub._take_fault(("break", "shorten"), resolve_path)
    if fault is not None and fault.kind == "shorten":
      body = body[: len(body) // 2]
    self.send_response(status)
    for name, value in (headers or {}).items():
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    if self.command == "HEAD":
      return
    if fault is not None and fault.kind == "break":
      body = body[: len(body) // 2]
      self.close_connection = True
    self.wfile.write(body)


def _unquoted(match: re.Match[str]) -> dict[str, str | None]:
  groups: dict[str, str | None] = {}
  for name, value in match.groupdict().items():
    groups[name] = None if value is None else urllib.parse.unquote(value)
  return groups


def _blob_id(content: bytes) -> str:
  """Returns Git's name of a file with this content."""
  return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _tree(
  files: dict[str, bytes], folder: str, is_recursive: bool
) -> list[dict[str, object]]:
  """Returns what the Hub says of the files and folders in a folder.

  Raises:
    _Refusal: if the folder does not exist.
  """
  prefix = f"{folder}/" if folder else ""
  inside = [name for name in files if name.startswith(prefix)]
  if not inside:
    raise _Refusal(404, "EntryNotFound", f"{folder} does not exist")
  folders = set()
  entries: list[dict[str, object]] = []
  for name in inside:
    parents = name.removeprefix(prefix).split("/")[:-1]
    for depth in range(1, len(parents) + 1):
      if depth == 1 or is_recursive:
        folders.add(prefix + "/".join(parents[:depth]))
    if parents and not is_recursive:
      continue
    content = files[name]
    entry: dict[str, object] = {
      "type": "file",
      "path": name,
      "size": len(content),
      "oid": _blob_id(content),
    }
    if name.endswith(_LARGE_FILES):
      sha256 = hashlib.sha256(content).hexdigest()
      lfs = {"oid": sha256, "size": len(content), "pointerSize": 134}
      entry["lfs"] = lfs
    entries.append(entry)
  for name in sorted(folders):
    oid = hashlib.sha1(name.encode()).hexdigest()
    entries.append({"type": "directory", "path": name, "size": 0, "oid": oid})
  return entries
