"""What a command sets before JAX computes: where compiled programs are kept, and how a CPU's memory is."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import platform

import jax
from etils import epath

from diffjax.data.cache import cache_directory


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
  every step, which took a third of tiny's time. So glibc is told never to give memory back (M_TRIM_THRESHOLD = −1, M_MMAP_THRESHOLD = −3),
  and programs run in the thread that calls them, since glibc keeps large blocks in the main thread's arena alone. All other threads share
  one arena (M_ARENA_MAX = −8): with one each, the short-lived threads of every checkpoint left 15 MiB of other pages behind. On other
  devices nothing changes; with another C library only the thread does.
  """
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if platform.libc_ver()[0] == "glibc":
    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 2**31 - 1)
    libc.mallopt(-3, 2**30)
    libc.mallopt(-8, 2)


def _seal_all(directory: epath.Path) -> None:
  for program in directory.glob("*-cache"):
    with contextlib.suppress(OSError):  # A run that begins now may have removed it; a full disk may refuse the seal.
      if not _seal(program).exists():
        _seal(program).write_bytes(_sha256(program))


def _seal(program: epath.Path) -> epath.Path:
  return program.with_name(f"{program.name}.sha256")


def _sha256(program: epath.Path) -> bytes:
  return hashlib.sha256(program.read_bytes()).hexdigest().encode()
