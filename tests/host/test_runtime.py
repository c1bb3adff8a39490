"""Settings of a process, and that a step neither compiles nor transfers."""

import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

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
  """A list that gets an item for each program that JAX compiles."""
  events = []

  def record(name, *_, **__):
    if name == COMPILE_EVENT:
      events.append(name)

  jax.monitoring.register_event_duration_secs_listener(record)
  yield events
  jax.monitoring.clear_event_listeners()


def config_with_micro_batches(num_micro_batches: int) -> Config:
  """Returns a config with batches of 16 rows."""
  train = TrainConfig(batch_size=16, accumulation=num_micro_batches)
  return dataclasses.replace(CONFIG, train=train)


def make_batch(mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
  """Returns a batch of 16 rows of 32 tokens, on the devices of a mesh."""
  batch_shape = (16, 32)
  host_batch = {
    "tokens": np.ones(batch_shape, np.int32),
    "targets": np.ones(batch_shape, np.int32),
    "segment_ids": np.ones(batch_shape, np.int32),
    "positions": np.ones(batch_shape, np.int32),
    "weights": np.ones(batch_shape, np.float32),
  }
  return put_batch(host_batch, mesh)


@pytest.mark.full
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_step_is_traced_once(monkeypatch, num_micro_batches):
  """Tracing takes seconds, so steps should not repeat it."""
  config = config_with_micro_batches(num_micro_batches)
  mesh = make_mesh(config.mesh)
  jit = jax.jit

  def jit_with_one_trace(function, **options):
    # Tracing the function again raises an error.
    return jit(chex.assert_max_traces(function, n=1), **options)

  chex.clear_trace_counter()
  monkeypatch.setattr(jax, "jit", jit_with_one_trace)
  program = build(config, mesh)
  state = program.init()
  batch = make_batch(mesh)

  for _ in range(4):
    state, _ = program.train_step(state, batch)


@pytest.mark.parametrize("num_micro_batches", [*full([1]), 2])
def test_steps_after_the_first_compile_and_transfer_nothing(
  compile_events, num_micro_batches
):
  """Each compilation or transfer would make steps slower."""
  config = config_with_micro_batches(num_micro_batches)
  mesh = make_mesh(config.mesh)
  program = build(config, mesh)
  batch = make_batch(mesh)
  state, _ = program.train_step(program.init(), batch)
  # The first step compiles. Otherwise, the listener would not work.
  assert compile_events
  compile_events.clear()

  # JAX then raises an error for each transfer, also for an explicit one.
  with jax.transfer_guard("disallow_explicit"):
    for _ in range(3):
      state, _ = program.train_step(state, batch)
  jax.block_until_ready(state)

  assert not compile_events


def train_six_steps(
  directory: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
  before_step: Callable[[int], None],
) -> None:
  """Trains with saves and log lines, and calls before_step(1) to (6)."""
  for index in range(20):
    (directory / f"{index}.txt").write_text(f"document {index} " * 40)
  data = dataclasses.replace(
    CONFIG.data,
    source=f"text:{directory}/*.txt",
    prepared_dir=str(directory / "rows"),
  )
  steps = itertools.count(1)

  # The loop calls put_batch once before each step.
  def call_and_put_batch(batch, mesh):
    before_step(next(steps))
    return put_batch(batch, mesh)

  monkeypatch.setattr(session, "put_batch", call_and_put_batch)
  config = dataclasses.replace(CONFIG, data=data)
  loop.train(config, str(directory / "run"))


def test_the_loop_compiles_nothing_after_the_second_step(
  monkeypatch, tmp_path, compile_events
):
  """Saves and log lines compile no further program."""
  num_compiled_before_step = {}

  def count_programs(step):
    num_compiled_before_step[step] = len(compile_events)

  train_six_steps(tmp_path, monkeypatch, before_step=count_programs)

  # The first step compiles. Otherwise, the listener would not work.
  assert num_compiled_before_step[2] > num_compiled_before_step[1]
  assert num_compiled_before_step[6] == num_compiled_before_step[3]


@pytest.mark.full
def test_the_loop_makes_no_implicit_transfers(monkeypatch, tmp_path):
  """Saves and log lines only make transfers that the code asks for.

  The beginning and the end of a run may transfer arrays implicitly.
  """
  steps = []

  def set_guard(step):
    steps.append(step)
    # JAX then raises an error for implicit transfers.
    guard = "disallow" if 2 < step < 6 else "allow"
    jax.config.update("jax_transfer_guard", guard)

  try:
    train_six_steps(tmp_path, monkeypatch, before_step=set_guard)
  finally:
    jax.config.update("jax_transfer_guard", "allow")

  assert steps == [1, 2, 3, 4, 5, 6]


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
COMPILE_TIMES_3 = """
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
    pytest.param(
      "*-cache", truncate, id="truncated program", marks=pytest.mark.full
    ),
    pytest.param("*-cache", flip_bit, id="program with another bit"),
    pytest.param("*-cache.sha256", replace, id="another checksum"),
  ],
)
def test_damaged_programs_are_compiled_again(
  run_program, tmp_path, pattern, damage
):
  """Each compiled program has a second file with its SHA-256.

  The process compiles a program that multiplies 0, 1, 2 and 3 by 3.
  """
  run_program(COMPILE_TIMES_3)
  paths = list((tmp_path / "diffjax" / "compiled").glob(pattern))
  assert paths
  for path in paths:
    path.write_bytes(damage(path.read_bytes()))

  output = run_program(COMPILE_TIMES_3)

  assert "cache_hits" not in output
  assert "[0. 3. 6. 9.]" in output
  # The new programs are kept.
  assert "cache_hits" in run_program(COMPILE_TIMES_3)


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
  """JAX does not check programs of its cache, and would run half of one.

  So each process writes to a directory of its own, and moves its programs when
  it ends. Here, a child is killed after it has written the program NAME-cache.
  """
  kept_dir = tmp_path / "diffjax" / "compiled"
  child = tmp_path / "programs" / "child.py"
  child.write_text(WRITE_PROGRAM + KILL_ITSELF)

  exit_status_of_child = run_program(RUN_CHILD)

  assert exit_status_of_child == f"{-signal.SIGKILL}\n"
  assert not list(kept_dir.glob("NAME-cache*"))
  # The next process deletes the directory in which the child wrote.
  run_program(PRINT_WHETHER_PROGRAM_EXISTS)
  assert not list(kept_dir.iterdir())


def test_a_program_gets_a_checksum_from_the_process_that_wrote_it(
  run_program, tmp_path
):
  """The checksum is a file with the program's SHA-256, which shows damage.

  A child process writes the program NAME-cache, and ends.
  """
  kept_dir = tmp_path / "diffjax" / "compiled"
  child = tmp_path / "programs" / "child.py"
  child.write_text(WRITE_PROGRAM)

  exit_status_of_child = run_program(RUN_CHILD)

  assert exit_status_of_child == "0\n"
  assert sorted(os.listdir(kept_dir)) == ["NAME-cache", "NAME-cache.sha256"]
  # Another process finds the program.
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
  """A process keeps the memory that it frees, unless it gives it back.

  The process allocates and frees 128 MiB in release_freed_memory(), which gives
  it back. It does so twice without that, and then calls trim_freed_memory().
  After each, it prints how many MiB it still has.
  """
  values = {}
  for line in run_with_system_allocator(RELEASE_MEMORY).splitlines():
    name, value = line.split()
    values[name] = int(value)

  allocated_mib = 128
  assert values["released"] < allocated_mib / 8
  assert values["kept"] > 0.94 * allocated_mib
  assert values["trimmed"] < allocated_mib / 8
  # The third time uses the pages that were kept. A page has 4 KiB.
  num_pages = allocated_mib * 2**20 / 4096
  assert values["faults"] < 0.03 * num_pages
