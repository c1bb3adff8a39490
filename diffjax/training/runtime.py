"""Settings of a command's process, made before JAX computes: the cache of compiled programs, and how the allocator treats freed memory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import platform
from collections.abc import Iterator

import jax
from etils import epath

from diffjax.user_cache import cache_directory

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
# Set by `keep_freed_memory`.
_libc: ctypes.CDLL | None = None


def keep_compiled_programs() -> None:
  """Turns on JAX's persistent compilation cache, in the user's cache folder, unless the user has set one.

  JAX runs the programs that it finds there unchecked, and never replaces one that a killed process has half written. So a process seals
  programs with their sha256 when it ends, and removes those without a matching seal when it begins.
  """
  if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
    directory = cache_directory("compiled")
    for program in directory.glob("*-cache"):
      with contextlib.suppress(OSError):  # another run that begins now may have removed it
        if not _seal(program).exists() or _seal(program).read_bytes() != _sha256(program):
          program.unlink(missing_ok=True)
          _seal(program).unlink(missing_ok=True)  # or the program would not be sealed when it is compiled again
    atexit.register(_seal_all, directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))


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


def _seal_all(directory: epath.Path) -> None:
  for program in directory.glob("*-cache"):
    with contextlib.suppress(OSError):  # a run that begins now may have removed it; a full disk may refuse the seal
      if not _seal(program).exists():
        _seal(program).write_bytes(_sha256(program))


def _seal(program: epath.Path) -> epath.Path:
  return program.with_name(f"{program.name}.sha256")


def _sha256(program: epath.Path) -> bytes:
  return hashlib.sha256(program.read_bytes()).hexdigest().encode()
