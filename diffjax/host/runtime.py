"""Settings of a command's process, made before JAX computes.

They keep compiled programs between processes, and freed memory between steps.

  keep_freed_memory     keeps freed memory from now on
  release_freed_memory  returns it to the operating system inside a context
  trim_freed_memory     returns once what has been kept until now
"""

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
from typing import Any

import jax

from diffjax.host.user_cache import cache_directory

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8

# glibc's default of M_MMAP_MAX, the maximum number of blocks that are mapped.
_DEFAULT_MMAP_MAX = 2**16

# Blocks of this size or more are mapped, unless M_MMAP_MAX is 0.
_MMAP_THRESHOLD_BYTES = 2**20

# Outside of steps, free memory beyond this size is returned.
_TRIM_THRESHOLD_BYTES = 2**20

# More than there are threads, so that each thread has its own arena.
_MAX_ARENAS = 4096

# The directory of a process among the compiled programs is called
# "process-HOST-PID".
_PROCESS_PREFIX = "process-"

# The C library, whose functions change glibc's allocator. None until
# `keep_freed_memory` is called.
_libc: ctypes.CDLL | None = None


def keep_compiled_programs() -> None:
  """Turns on JAX's persistent compilation cache, in the user's cache directory.

  Does nothing if the user has set a cache.

  A killed process may leave half a program in JAX's cache. JAX would run it
  unchecked, and never replace it. So each process gives JAX a directory of its
  own, with links to the intact programs of earlier processes. When the process
  ends, it moves the programs that it has compiled to the kept ones. Beside each
  is a seal, a file with its sha256, which shows whether it is intact.
  """
  jax_config: Any = jax.config
  if jax_config.jax_compilation_cache_dir is not None:
    return
  kept_dir = pathlib.Path(cache_directory("compiled"))
  process_dir = kept_dir / f"{_host_prefix()}{os.getpid()}"
  try:
    # A killed process with the same PID may have left this directory.
    shutil.rmtree(process_dir, ignore_errors=True)
    process_dir.mkdir(parents=True)
  except OSError:
    # Without a cache, programs are compiled in each process.
    return
  _link_kept_programs(kept_dir, process_dir)
  _delete_dirs_of_dead_processes(kept_dir)
  atexit.register(_keep_new_programs, process_dir, kept_dir, os.getpid())
  jax.config.update("jax_compilation_cache_dir", str(process_dir))
  # XLA would put its own caches into the same directory. On GPU, the name of
  # the directory would then be a part of each program's key.
  jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def keep_freed_memory() -> None:
  """Keeps freed memory in the process for the next step, on CPU.

  Call this before JAX creates its backend.

  XLA allocates the temporaries of a program at every call. By default, glibc
  maps and unmaps them, and the kernel clears new pages at every step. This took
  a third of the time of configs/tiny.py.

  On accelerators, only host memory is affected.
  """
  global _libc
  # glibc keeps large blocks only in the arena of the main thread. So programs
  # run in the thread that calls them.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if platform.libc_ver()[0] != "glibc":
    return
  _libc = ctypes.CDLL(None)
  # Every other thread gets its own arena. It would fragment the main thread's
  # arena, and the temporaries would move to other pages.
  _libc.mallopt(_M_ARENA_MAX, _MAX_ARENAS)
  # By default, glibc changes this threshold while it runs.
  _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
  _never_return_memory(_libc)


@contextlib.contextmanager
def release_freed_memory() -> Iterator[None]:
  """Returns freed memory to the operating system inside the context.

  Use it for rare work. For example, the threads that write a checkpoint would
  otherwise keep the pages of their buffers, each time in other arenas. Does
  nothing if `keep_freed_memory` was not called.
  """
  if _libc is None:
    yield
    return
  _libc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
  _libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
  try:
    yield
  finally:
    _never_return_memory(_libc)


def trim_freed_memory() -> None:
  """Returns the memory that was freed so far to the operating system.

  Call it after compilation, which uses much memory that no step needs. Does
  nothing if `keep_freed_memory` was not called.
  """
  if _libc is not None:
    _libc.malloc_trim(0)


def _never_return_memory(libc: ctypes.CDLL) -> None:
  """Makes glibc keep all freed memory."""
  libc.mallopt(_M_MMAP_MAX, 0)
  libc.mallopt(_M_TRIM_THRESHOLD, -1)


def _host_prefix() -> str:
  """Returns the beginning of the names of this host's process directories."""
  return f"{_PROCESS_PREFIX}{socket.gethostname()}-"


def _link_kept_programs(
  kept_dir: pathlib.Path, process_dir: pathlib.Path
) -> None:
  """Links intact programs into the directory of a process.

  Deletes damaged programs.

  Args:
    kept_dir: The directory of the programs of earlier processes.
    process_dir: The directory of this process.
  """
  for program in kept_dir.glob("*-cache"):
    # Another run that starts now may have deleted the program.
    with contextlib.suppress(OSError):
      if _is_intact(program):
        (process_dir / program.name).symlink_to(program.absolute())
      else:
        program.unlink()


def _is_intact(program: pathlib.Path) -> bool:
  """Returns True if a program has a seal that equals its sha256."""
  seal = _seal_path(program)
  return seal.exists() and seal.read_bytes() == _sha256(program)


def _delete_dirs_of_dead_processes(kept_dir: pathlib.Path) -> None:
  """Deletes the directories of this host's processes that were killed."""
  prefix = _host_prefix()
  for process_dir in kept_dir.glob(f"{glob.escape(prefix)}*"):
    pid = process_dir.name.rpartition("-")[2]
    if not _is_alive(pid):
      shutil.rmtree(process_dir, ignore_errors=True)


def _keep_new_programs(
  process_dir: pathlib.Path, kept_dir: pathlib.Path, pid: int
) -> None:
  """Moves the programs that a process has compiled to the kept ones.

  Called when the process ends. Deletes the directory of the process.

  Args:
    process_dir: The directory of the process.
    kept_dir: The directory of the kept programs.
    pid: The PID of the process.
  """
  if os.getpid() != pid:
    # This is a forked child, which inherits the functions of atexit.
    return
  for program in process_dir.glob("*-cache"):
    if program.is_symlink():
      # An earlier process has compiled it.
      continue
    # A full disk may refuse the seal.
    with contextlib.suppress(OSError):
      kept_program = kept_dir / program.name
      # The seal comes first, because a program without one would be deleted.
      _seal_path(kept_program).write_bytes(_sha256(program))
      program.replace(kept_program)
  shutil.rmtree(process_dir, ignore_errors=True)


def _is_alive(pid: str) -> bool:
  """Returns True if a process of this host exists.

  Args:
    pid: Its PID, from the name of a directory. It may not be a number.
  """
  try:
    # Signal 0 is never delivered. It only tests whether the process exists.
    os.kill(int(pid), 0)
  except (ProcessLookupError, ValueError):
    return False
  except OSError:
    # The process belongs to another user.
    return True
  return True


def _seal_path(program: pathlib.Path) -> pathlib.Path:
  """Returns the path of the file with the sha256 of a program."""
  return program.with_name(f"{program.name}.sha256")


def _sha256(program: pathlib.Path) -> bytes:
  """Returns the content of a program's seal: its sha256 in hex."""
  return hashlib.sha256(program.read_bytes()).hexdigest().encode()
