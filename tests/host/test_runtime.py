"""Settings of a process, and that a step neither compiles nor transfers."""

import dataclasses
import os
import signal
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from diffjax.config import (
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training import loop, session
from diffjax.training.program import build
from tests.harness.tiers import full

MODEL = ModelConfig(
  num_layers=1,
  embed_dim=16,
  num_heads=1,
  num_kv_heads=1,
  head_dim=8,
  ffn_dim=32,
)
CONFIG = Config(
  model=MODEL,
  data=DataConfig(length=32, validation_fraction=0.2),
  optimizer=OptimizerConfig(warmup_steps=1),
  train=TrainConfig(
    steps=6,
    batch_size=8,
    log_interval=1,
    checkpoint_interval=2,
    sample_tokens=0,
  ),
  eval=EvalConfig(interval=0),
)


# JAX records an event of this name for each program that it compiles.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compile_events():
  """A list that gets an item for each program that is compiled."""
  events = []

  def record(name, *_, **__):
    if name == COMPILE_EVENT:
      events.append(name)

  jax.monitoring.register_event_duration_secs_listener(record)
  yield events
  jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("accumulation", [*full([1]), 2])
def test_a_step_is_traced_and_compiled_once_and_moves_nothing(
  monkeypatch, compile_events, accumulation
):
  """Any further compilation or transfer would make steps slower."""
  train = dataclasses.replace(
    CONFIG.train, accumulation=accumulation, batch_size=16
  )
  config = dataclasses.replace(CONFIG, train=train)
  mesh = make_mesh(config.mesh)
  batch_shape = (16, 32)
  host_batch = {
    "tokens": np.ones(batch_shape, np.int32),
    "targets": np.ones(batch_shape, np.int32),
    "segment_ids": np.ones(batch_shape, np.int32),
    "positions": np.ones(batch_shape, np.int32),
    "weights": np.ones(batch_shape, np.float32),
  }
  chex.clear_trace_counter()
  jit = jax.jit

  def jit_traced_once(function, **options):
    return jit(chex.assert_max_traces(function, n=1), **options)

  monkeypatch.setattr(jax, "jit", jit_traced_once)
  program = build(config, mesh)
  state = program.init()
  batch = put_batch(host_batch, mesh)
  state, _ = program.train_step(state, batch)
  # Otherwise, the listener would not work.
  assert compile_events
  compile_events.clear()

  with jax.transfer_guard("disallow_explicit"):
    for _ in range(3):
      state, _ = program.train_step(state, batch)
  jax.block_until_ready(state)

  assert not compile_events


def test_the_loop_compiles_nothing_after_the_second_step(
  monkeypatch, tmp_path, compile_events
):
  """Saves and log lines compile no further program and hide no transfer.

  Explicit transfers, of batches and metrics, are allowed.
  """
  for index in range(20):
    (tmp_path / f"{index}.txt").write_text(f"document {index} " * 40)
  data = dataclasses.replace(
    CONFIG.data,
    source=f"text:{tmp_path}/*.txt",
    prepared_dir=str(tmp_path / "rows"),
  )
  config = dataclasses.replace(CONFIG, data=data)
  num_steps = config.train.steps
  # For each step, the number of programs that were compiled before it.
  compiled_before_step = []

  # The loop calls this function once before each step.
  def put_batch_guarded(batch, mesh):
    compiled_before_step.append(len(compile_events))
    step = len(compiled_before_step)
    guard = "allow"
    # The beginning and the end of the run may transfer arrays.
    if 2 < step < num_steps:
      guard = "disallow"
    jax.config.update("jax_transfer_guard", guard)
    return put_batch(batch, mesh)

  monkeypatch.setattr(session, "put_batch", put_batch_guarded)
  try:
    loop.train(config, str(tmp_path / "run"))
  finally:
    jax.config.update("jax_transfer_guard", "allow")

  assert len(compiled_before_step) == num_steps
  # The first step compiles. Otherwise, the listener would not work.
  assert compiled_before_step[1] > compiled_before_step[0]
  # Nothing is compiled between the third step and the last one.
  assert compiled_before_step[-1] == compiled_before_step[2]


@pytest.fixture
def run_program(command, monkeypatch, tmp_path):
  """Returns a function that runs Python code and returns its output.

  The process has imported JAX already, but has not used it. All processes of a
  test have the same cache directory.
  """
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  programs_dir = tmp_path / "programs"
  programs_dir.mkdir()

  def run(code: str) -> str:
    # A new name for each, so that Python does not run an older one's bytecode.
    name = f"program_{len(list(programs_dir.glob('*.py')))}"
    (programs_dir / f"{name}.py").write_text(code)
    result = command(name, cwd=programs_dir)
    assert result.returncode == 0, result.stderr
    return result.stdout

  return run


# Prints "cache_hits" or "cache_misses" for each program, and a result.
COMPILE = """
import jax, jax.monitoring
from diffjax.host import runtime

def print_cache_event(name, **_):
  if "cache_" in name:
    print(name)

runtime.keep_compiled_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.monitoring.register_event_listener(print_cache_event)
print(jax.jit(lambda x: x * 3)(jax.numpy.arange(4.0)))
"""


def truncate(content):
  return content[:-9]


def flip_bit(content):
  return content[:40] + bytes([content[40] ^ 4]) + content[41:]


def replace(content):
  return b"\xff"


@pytest.mark.parametrize(
  ("pattern", "damage"),
  [
    pytest.param("*-cache", truncate, id="truncated program"),
    pytest.param("*-cache", flip_bit, id="program with another bit"),
    pytest.param("*-cache.sha256", replace, id="another seal"),
  ],
)
def test_damaged_programs_are_compiled_again(
  run_program, tmp_path, pattern, damage
):
  """The seal of a program is a file with its sha256, which shows damage."""
  run_program(COMPILE)
  paths = list((tmp_path / "diffjax" / "compiled").glob(pattern))
  assert paths
  for path in paths:
    path.write_bytes(damage(path.read_bytes()))

  output = run_program(COMPILE)

  assert "cache_hits" not in output
  assert "[0. 3. 6. 9.]" in output
  # The new programs are kept.
  assert "cache_hits" in run_program(COMPILE)


# Writes a program to the cache of this process, as JAX does after compilation.
WRITE_PROGRAM = """
import pathlib

import jax

from diffjax.host import runtime

runtime.keep_compiled_programs()
cache_dir = pathlib.Path(jax.config.jax_compilation_cache_dir)
(cache_dir / "NAME-cache").write_bytes(b"half")
"""

KILL_ITSELF = """
import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
"""

# Lives from before the beginning of child.py until after its end.
RUN_CHILD = """
import subprocess
import sys

from diffjax.host import runtime

runtime.keep_compiled_programs()
print(subprocess.run([sys.executable, "child.py"]).returncode)
"""

PRINT_WHETHER_PROGRAM_EXISTS = """
import pathlib

import jax

from diffjax.host import runtime

runtime.keep_compiled_programs()
cache_dir = pathlib.Path(jax.config.jax_compilation_cache_dir)
print((cache_dir / "NAME-cache").exists())
"""


def test_a_half_written_program_of_a_killed_process_is_deleted(
  run_program, tmp_path
):
  """JAX does not check programs of its cache, and would run half of one."""
  kept_dir = tmp_path / "diffjax" / "compiled"
  child = tmp_path / "programs" / "child.py"
  child.write_text(WRITE_PROGRAM + KILL_ITSELF)

  # The parent prints the exit status of its child, which was killed.
  assert run_program(RUN_CHILD) == f"{-signal.SIGKILL}\n"

  assert not list(kept_dir.glob("NAME*"))
  # The next process deletes the directory of the killed one.
  run_program(PRINT_WHETHER_PROGRAM_EXISTS)
  assert not list(kept_dir.iterdir())


def test_a_program_is_sealed_by_the_process_that_wrote_it(
  run_program, tmp_path
):
  """The seal is a file with the program's sha256, which shows later damage."""
  kept_dir = tmp_path / "diffjax" / "compiled"
  child = tmp_path / "programs" / "child.py"
  child.write_text(WRITE_PROGRAM)

  # The parent prints the exit status of its child.
  assert run_program(RUN_CHILD) == "0\n"

  assert sorted(os.listdir(kept_dir)) == ["NAME-cache", "NAME-cache.sha256"]
  assert run_program(PRINT_WHETHER_PROGRAM_EXISTS) == "True\n"


COMPUTE = """
import jax

from diffjax.host import runtime

runtime.keep_compiled_programs()
print(jax.jit(lambda x: x * 3)(2))
"""


def test_programs_are_compiled_where_none_can_be_kept(run_program, tmp_path):
  # A directory cannot be created in a file.
  (tmp_path / "diffjax").write_text("")

  assert run_program(COMPUTE) == "6\n"


PRINT_CACHE_OF_USER = """
import jax

jax.config.update("jax_compilation_cache_dir", "/elsewhere")

from diffjax.host import runtime

runtime.keep_compiled_programs()
print(jax.config.jax_compilation_cache_dir)
"""


def test_the_users_own_compilation_cache_is_left_alone(run_program):
  assert run_program(PRINT_CACHE_OF_USER) == "/elsewhere\n"


linux_only = pytest.mark.skipif(
  not sys.platform.startswith("linux"), reason="reads counters of Linux"
)


def run_with_system_allocator(code: str) -> str:
  """Runs Python in a new process, and returns its output."""
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  return result.stdout


# Prints the lowest number of page faults of a call with 64 MB of temporaries.
COUNT_PAGE_FAULTS = """
import resource, jax, jax.numpy as jnp
from diffjax.host import runtime
runtime.keep_freed_memory()

def num_page_faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

f = jax.jit(lambda x: jnp.outer(x, x) @ x)
x = jnp.ones(4096)
faults = []
for _ in range(15):
  before = num_page_faults()
  f(x).block_until_ready()
  faults.append(num_page_faults() - before)
print(min(faults))
"""


@linux_only
def test_freed_pages_are_kept(system_allocator):
  """A program with 64 MB of temporaries needs no new pages at every call.

  At some calls, the temporaries may move, so the lowest number counts.
  """
  num_page_faults = int(run_with_system_allocator(COUNT_PAGE_FAULTS))

  # 64 MiB are 16,384 pages of 4 KiB. New pages would cause a fault each.
  assert num_page_faults < 1000


# Allocates 8 MiB in each of 40 threads. Prints by how many bytes the heap of
# the main thread grows.
MEASURE_HEAP = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import threading, numpy as np
from diffjax.host import runtime
runtime.keep_freed_memory()

def heap_size():
  size = 0
  for line in open("/proc/self/maps"):
    if "[heap]" in line:
      first, last = line.split()[0].split("-")
      size += int(last, 16) - int(first, 16)
  return size

barrier = threading.Barrier(40)
before = heap_size()

def allocate():
  block = np.ones(1 << 20)
  barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(40)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(heap_size() - before)
"""


@linux_only
def test_other_threads_leave_the_main_threads_heap_alone(system_allocator):
  """The heap of the main thread is kept for temporary arrays of programs.

  By default, glibc has 8 arenas per core. There are more threads than that, and
  all exist at the same time.
  """
  growth_in_bytes = int(run_with_system_allocator(MEASURE_HEAP))

  # Each of the 40 threads allocates 8 MiB, outside of this heap.
  assert growth_in_bytes < 2**20


# Allocates and frees 128 MiB in several ways. Prints how many MiB the process
# has kept, and the page faults of the last time.
RELEASE_MEMORY = """
import resource, threading, numpy as np
from diffjax.host import runtime
runtime.keep_freed_memory()

def resident_mib():
  for line in open("/proc/self/status"):
    if line.startswith("VmRSS"):
      return int(line.split()[1]) // 1024

def num_page_faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

# 128 MiB in 32,768 pages, which are freed again.
def allocate():
  blocks = [np.ones(1 << 18) for _ in range(64)]

before = resident_mib()
with runtime.release_freed_memory():
  allocate()
  thread = threading.Thread(target=allocate)
  thread.start()
  thread.join()
print("released", resident_mib() - before)
allocate()
print("kept", resident_mib() - before)
faults = num_page_faults()
allocate()
print("faults", num_page_faults() - faults)
runtime.trim_freed_memory()
print("trimmed", resident_mib() - before)
"""


@linux_only
def test_freed_pages_can_be_given_back(system_allocator):
  """At first 128 MiB are released, then kept, and at last trimmed."""
  values = {}
  for line in run_with_system_allocator(RELEASE_MEMORY).splitlines():
    name, value = line.split()
    values[name] = int(value)

  # MiB that the process has kept.
  assert values["released"] < 16
  assert values["kept"] > 120
  assert values["trimmed"] < 16
  # The kept memory has 32,768 pages, which are used again.
  assert values["faults"] < 1000
