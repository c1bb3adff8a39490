"""Settings of a command's process, made before JAX computes: the cache of compiled programs, and how the allocator treats freed memory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import hashlib
import os
import pathlib
import platform
import shutil
import socket
from collections.abc import Iterator

import jax

from diffjax.host.user_cache import cache_directory

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
# Begins the name of the folder of one process among the compiled programs; its host and number follow.
_OWN = "process-"
# Set by `keep_freed_memory`.
_libc: ctypes.CDLL | None = None


def keep_compiled_programs() -> None:
  """Turns on JAX's persistent compilation cache, in the user's cache folder, unless the user has set one.

  JAX runs the programs that it finds there unchecked, and never replaces one that a killed process has half written. So JAX is given a
  folder of this process alone, which begins with links to the kept programs whose sha256 is that of their seals. When the process ends, it
  seals the programs that it has written itself, and moves them to the others.
  """
  if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
    return
  kept = pathlib.Path(cache_directory("compiled"))
  own = kept / f"{_OWN}{socket.gethostname()}-{os.getpid()}"
  try:
    shutil.rmtree(
      own, ignore_errors=True
    )  # of a killed process that had this number
    own.mkdir(parents=True)
  except OSError:  # the programs are compiled each time
    return
  for program in kept.glob("*-cache"):
    with contextlib.suppress(
      OSError
    ):  # another run that begins now may have removed it
      if _seal(program).exists() and _seal(program).read_bytes() == _sha256(
        program
      ):
        (own / program.name).symlink_to(program.absolute())
      else:
        program.unlink()
  for other in kept.glob(f"{_OWN}{glob.escape(socket.gethostname())}-*"):
    if not _is_alive(other.name.rpartition("-")[2]):
      shutil.rmtree(other, ignore_errors=True)
  atexit.register(_keep, own, kept, os.getpid())
  jax.config.update("jax_compilation_cache_dir", str(own))
  # XLA's own caches lie in the same folder, whose name on GPU would be part of each program's key
  jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def keep_freed_memory() -> None:
  """Keeps freed memory in the process for the next step, on CPU. Call it before JAX makes its backend.

  XLA allocates a program's temporaries anew at every call on CPU. By default glibc maps and unmaps them, and the kernel clears fresh pages
  at every step, which took a third of tiny's time. So glibc is told never to give memory back, and programs run in the thread that calls
  them, since glibc keeps large blocks in the main thread's arena alone. Every other thread gets an arena of its own: a thread that shared
  the main thread's would cut the temporaries' place into pieces, and they would move to other pages. On accelerators it affects host memory
  only; without glibc, only dispatch.
  """
  global _libc
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if platform.libc_ver()[0] == "glibc":
    _libc = ctypes.CDLL(None)
    _libc.mallopt(_M_ARENA_MAX, 4096)  # more than there are threads
    _libc.mallopt(_M_MMAP_THRESHOLD, 2**20)
    _give_nothing_back(_libc)


@contextlib.contextmanager
def release_freed_memory() -> Iterator[None]:
  """Returns freed memory to the operating system inside the context, for work that a run does once or now and then.

  The threads that write a checkpoint would leave their buffers' pages behind, in other arenas every time. Without `keep_freed_memory` the
  context changes nothing.
  """
  if _libc is None:
    yield
    return
  _libc.mallopt(_M_MMAP_MAX, 2**16)  # glibc's default
  _libc.mallopt(_M_TRIM_THRESHOLD, 2**20)
  try:
    yield
  finally:
    _give_nothing_back(_libc)


def trim_freed_memory() -> None:
  """Returns the memory freed so far to the operating system: above all what compilation has needed, which no step needs.

  The next step takes its pages anew. Without `keep_freed_memory` nothing changes.
  """
  if _libc is not None:
    _libc.malloc_trim(0)


def _give_nothing_back(libc: ctypes.CDLL) -> None:
  libc.mallopt(_M_MMAP_MAX, 0)
  libc.mallopt(_M_TRIM_THRESHOLD, -1)


def _keep(own: pathlib.Path, kept: pathlib.Path, pid: int) -> None:
  """Moves what this process has compiled to the kept programs, the seals first: a program without one would be removed."""
  if os.getpid() != pid:  # a forked child that ends before its parent
    return
  for program in own.glob("*-cache"):
    with contextlib.suppress(OSError):  # a full disk may refuse the seal
      if not program.is_symlink():
        _seal(kept / program.name).write_bytes(_sha256(program))
        program.replace(kept / program.name)
  shutil.rmtree(own, ignore_errors=True)


def _is_alive(pid: str) -> bool:
  try:
    os.kill(int(pid), 0)
  except (ProcessLookupError, ValueError):
    return False
  except OSError:  # of another user
    pass
  return True


def _seal(program: pathlib.Path) -> pathlib.Path:
  return program.with_name(f"{program.name}.sha256")


def _sha256(program: pathlib.Path) -> bytes:
  return hashlib.sha256(program.read_bytes()).hexdigest().encode()
