"""What a command sets before JAX computes: where compiled programs are kept, and how a CPU's memory is."""

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
_libc: ctypes.CDLL | None = None  # once freed pages are kept


def keep_compiled_programs() -> None:
  """Turns on JAX's persistent compilation cache, in the user's cache folder; JAX's own settings go first.

  JAX runs what it finds there unchecked, and never replaces what a killed process half wrote. So programs are sealed with their sha256
  when a process ends, and those without a seal that fits are removed when one begins.
  """
  if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
    directory = cache_directory("compiled")
    for program in directory.glob("*-cache"):
      with contextlib.suppress(OSError):  # Another run that begins now may have removed it.
        if not _seal(program).exists() or _seal(program).read_bytes() != _sha256(program):
          program.unlink(missing_ok=True)
          _seal(program).unlink(missing_ok=True)  # Or it would not be sealed when it is compiled again.
    atexit.register(_seal_all, directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))


def keep_freed_pages() -> None:
  """On CPU: what is freed stays with the process, for the next step. To be called before JAX makes its backend.

  XLA allocates its temporaries anew at every call on CPU. Left alone, glibc maps and unmaps them, and the kernel clears fresh pages at
  every step, which took a third of tiny's time. So glibc is told never to give memory back, and programs run in the thread that calls
  them, since glibc keeps large blocks in the main thread's arena alone. Every other thread has an arena of its own: one that shares the
  main thread's cuts the temporaries' place into pieces, and they are placed anew, on other pages. Of other devices' runs it
  changes the host's memory alone; with another C library only the thread changes.
  """
  global _libc
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if platform.libc_ver()[0] == "glibc":
    _libc = ctypes.CDLL(None)
    _libc.mallopt(_M_ARENA_MAX, 4096)  # more than there are threads
    _libc.mallopt(_M_MMAP_THRESHOLD, 2**20)
    _give_nothing_back(_libc)


@contextlib.contextmanager
def freed_pages_not_kept() -> Iterator[None]:
  """What is freed while it lasts goes back to the system at once: for what a run does once, or now and then.

  The threads that write a checkpoint would leave their buffers' pages behind, in other arenas every time. Without `keep_freed_pages`
  nothing changes.
  """
  if _libc is None:
    yield
    return
  _libc.mallopt(_M_MMAP_MAX, 2**16)  # as glibc has it
  _libc.mallopt(_M_TRIM_THRESHOLD, 2**20)
  try:
    yield
  finally:
    _give_nothing_back(_libc)


def give_back_freed_pages() -> None:
  """What has been freed so far goes back to the system: what compiling has needed, above all, which no step needs.

  The next step takes its pages anew. Without `keep_freed_pages` nothing changes.
  """
  if _libc is not None:
    _libc.malloc_trim(0)


def _give_nothing_back(libc: ctypes.CDLL) -> None:
  libc.mallopt(_M_MMAP_MAX, 0)
  libc.mallopt(_M_TRIM_THRESHOLD, -1)


def _seal_all(directory: epath.Path) -> None:
  for program in directory.glob("*-cache"):
    with contextlib.suppress(OSError):  # A run that begins now may have removed it; a full disk may refuse the seal.
      if not _seal(program).exists():
        _seal(program).write_bytes(_sha256(program))


def _seal(program: epath.Path) -> epath.Path:
  return program.with_name(f"{program.name}.sha256")


def _sha256(program: epath.Path) -> bytes:
  return hashlib.sha256(program.read_bytes()).hexdigest().encode()
