"""One writer a workdir."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from etils import epath

from diffjax.config import UserError


@contextlib.contextmanager
def lock(workdir: epath.PathLike) -> Iterator[None]:
  """Keeps every other process from writing in a workdir, for as long as the context, or this process, lives.

  The kernel frees the lock with the process, however that ends. Object stores have no such lock: nothing is done for gs:// paths.

  Args:
    workdir: The run's directory; made if it is not there.

  Raises:
    UserError: if another process holds it, or it cannot be written.
  """
  if "://" in os.fspath(workdir):
    yield
    return
  path = epath.Path(workdir).expanduser() / "lock"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")
  except OSError as error:
    raise UserError(
      f"cannot write in the workdir {path.parent}: {error.strerror}"
    ) from error
  with file:
    try:
      # Not flock: a forked child would share that lock and keep it after a kill. This one belongs to the process alone.
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      file.seek(0)
      holder = file.read().strip() or "another process"
      raise UserError(
        f"{path.parent} is in use by {holder}: wait until it ends, stop it, or use another --workdir"
      ) from error
    with contextlib.suppress(
      OSError
    ):  # The name is for the message above alone; a full disk may refuse it.
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()}")
      file.flush()
    yield
