"""What a process sets before it computes, and that a running step neither compiles nor talks to the host."""

import dataclasses
import os
import pathlib
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
from tests.tiers import full

pytestmark = pytest.mark.usefixtures("system_allocator")

MODEL = ModelConfig(
  num_layers=2,
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
    steps=8,
    batch_size=8,
    log_interval=1,
    checkpoint_interval=2,
    sample_tokens=0,
  ),
  eval=EvalConfig(interval=0),
)


@pytest.mark.parametrize("accumulation", [*full([1]), 2])
def test_a_step_is_traced_once_and_moves_nothing(monkeypatch, accumulation):
  config = dataclasses.replace(
    CONFIG,
    train=dataclasses.replace(
      CONFIG.train, accumulation=accumulation, batch_size=16
    ),
  )
  mesh = make_mesh(config.mesh)
  chex.clear_trace_counter()
  jit = jax.jit
  monkeypatch.setattr(
    jax,
    "jit",
    lambda function, **options: jit(
      chex.assert_max_traces(function, n=1), **options
    ),
  )
  program = build(config, mesh)
  state = program.init()
  ints = np.ones((16, 32), np.int32)
  batch = put_batch(
    dict(
      tokens=ints,
      targets=ints,
      segment_ids=ints,
      positions=ints,
      weights=ints.astype(np.float32),
    ),
    mesh,
  )
  state, _ = program.train_step(state, batch)
  with jax.transfer_guard("disallow_explicit"):
    for _ in range(3):
      state, _ = program.train_step(state, batch)
  jax.block_until_ready(state)


def test_the_loop_compiles_nothing_after_the_second_step(monkeypatch, tmp_path):
  """Saves and log lines included; and but for putting the batch and fetching metrics, which are explicit, no transfer."""
  for index in range(60):
    (tmp_path / f"{index}.txt").write_text(f"document {index} " * 40)
  config = dataclasses.replace(
    CONFIG,
    data=dataclasses.replace(
      CONFIG.data,
      source=f"text:{tmp_path}/*.txt",
      prepared_dir=str(tmp_path / "rows"),
    ),
  )
  calls, compiled = [], []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append((len(calls), name))
  )

  def guarded(batch, mesh):
    calls.append(batch)
    jax.config.update(
      "jax_transfer_guard",
      "disallow" if 2 < len(calls) < config.train.steps else "allow",
    )
    return put_batch(batch, mesh)

  monkeypatch.setattr(session, "put_batch", guarded)
  try:
    loop.train(config, str(tmp_path / "run"))
  finally:
    jax.config.update("jax_transfer_guard", "allow")
    jax.monitoring.clear_event_listeners()
  at = [
    call
    for call, name in compiled
    if name == "/jax/core/compile/backend_compile_duration"
  ]
  assert len(calls) == config.train.steps
  assert 1 in at  # the first step; else nothing would be counted
  assert not [call for call in at if 2 < call < config.train.steps]


def run_in(cache, code):
  environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
  environment.pop("JAX_COMPILATION_CACHE_DIR", None)
  return subprocess.run(
    [sys.executable, "-c", code],
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  ).stdout


def test_compiled_programs_are_kept_and_damaged_ones_are_not_run(tmp_path):
  program = (
    "import jax, jax.monitoring; from diffjax.host import runtime; runtime.keep_compiled_programs();"
    "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0);"
    "jax.monitoring.register_event_listener(lambda name, **_: print(name) if 'cache_' in name else None);"
    "print(jax.jit(lambda x: x * 3)(jax.numpy.arange(4.0)))"
  )
  assert "cache_misses" in run_in(tmp_path, program)
  assert "cache_hits" in run_in(tmp_path, program)
  kept = [
    path
    for path in pathlib.Path(tmp_path, "diffjax", "compiled").iterdir()
    if path.name.endswith("-cache")
  ]
  assert kept
  seals = [path.with_name(f"{path.name}.sha256") for path in kept]
  truncated, flipped = (
    (lambda data: data[:-9]),
    (lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:]),
  )
  for files, damage in (
    (kept, truncated),
    (kept, flipped),
    (seals, lambda data: b"\xff"),
  ):
    for path in files:
      path.write_bytes(damage(path.read_bytes()))
    again = run_in(tmp_path, program)
    assert "cache_hits" not in again and "[0. 3. 6. 9.]" in again
  assert "cache_hits" in run_in(tmp_path, program)


def test_a_program_is_sealed_by_the_process_that_wrote_it(tmp_path):
  """One that a killed process has half written is never kept, whoever lived at that time and ends later; and nothing of it stays."""
  begin = "import jax, os, pathlib, signal, subprocess, sys; from diffjax.host import runtime; runtime.keep_compiled_programs();"
  write = "pathlib.Path(jax.config.jax_compilation_cache_dir, 'NAME-cache').write_bytes(b'half');"
  killed = begin + write + "os.kill(os.getpid(), signal.SIGKILL)"
  run_in(
    tmp_path, f"{begin} subprocess.run([sys.executable, '-c', {killed!r}])"
  )
  kept = pathlib.Path(tmp_path, "diffjax", "compiled")
  assert not list(kept.glob("NAME*"))
  run_in(
    tmp_path,
    f"{begin} subprocess.run([sys.executable, '-c', {begin + write!r}], check=True)",
  )
  assert sorted(path.name for path in kept.iterdir()) == [
    "NAME-cache",
    "NAME-cache.sha256",
  ]
  assert "True" in run_in(
    tmp_path,
    begin
    + "print(pathlib.Path(jax.config.jax_compilation_cache_dir, 'NAME-cache').exists())",
  )


def test_programs_are_compiled_where_none_can_be_kept(tmp_path):
  (tmp_path / "diffjax").write_text("")
  code = "import jax; from diffjax.host import runtime; runtime.keep_compiled_programs(); print(jax.jit(lambda x: x * 3)(2))"
  assert run_in(tmp_path, code).strip() == "6"


def test_the_users_own_compilation_cache_is_left_alone(tmp_path):
  code = (
    "import jax; jax.config.update('jax_compilation_cache_dir', '/elsewhere');"
    "from diffjax.host import runtime; runtime.keep_compiled_programs(); print(jax.config.jax_compilation_cache_dir)"
  )
  assert run_in(tmp_path, code).strip() == "/elsewhere"


@pytest.mark.skipif(
  not sys.platform.startswith("linux"),
  reason="reads Linux's page fault counter",
)
def test_freed_pages_are_kept(tmp_path):
  """A program with 64 MB of temporaries faults them in at some calls, until they have their places, and not at every one."""
  code = """
import resource, jax, jax.numpy as jnp
from diffjax.host import runtime
runtime.keep_freed_memory()
f = jax.jit(lambda x: jnp.outer(x, x) @ x)
x, faults = jnp.ones(4096), []
for _ in range(40):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  f(x).block_until_ready()
  faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""
  assert int(run_in(tmp_path, code)) < 1000  # 64 MB are 16,384 pages


@pytest.mark.skipif(
  not sys.platform.startswith("linux"), reason="reads Linux's /proc"
)
def test_other_threads_leave_the_main_threads_heap_alone(tmp_path):
  """More threads than glibc has arenas by itself (8 a core), all alive: none takes its blocks from where the temporaries lie."""
  code = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import threading, numpy as np
from diffjax.host import runtime
runtime.keep_freed_memory()

def heap():
  places = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
  return sum(int(last, 16) - int(first, 16) for first, last in places)

barrier, before = threading.Barrier(40), heap()
def allocate():
  block = np.ones(1 << 20)
  barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(40)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(heap() - before)
"""
  assert int(run_in(tmp_path, code)) < 2**20  # a block is 8 MiB


@pytest.mark.skipif(
  not sys.platform.startswith("linux"), reason="reads Linux's /proc"
)
def test_freed_pages_can_be_given_back(tmp_path):
  code = """
import resource, threading, numpy as np
from diffjax.host import runtime
runtime.keep_freed_memory()

def resident():
  [line] = [line for line in open("/proc/self/status") if line.startswith("VmRSS")]
  return int(line.split()[1]) // 1024

def allocate():
  blocks = [np.ones(1 << 18) for _ in range(64)]  # 128 MiB

before = resident()
with runtime.release_freed_memory():
  allocate()
  thread = threading.Thread(target=allocate)
  thread.start()
  thread.join()
print(resident() - before)
allocate()
print(resident() - before)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
runtime.trim_freed_memory()
print(resident() - before)
"""
  meanwhile, kept, faults, left = map(int, run_in(tmp_path, code).split())
  assert meanwhile < 16 and left < 16  # MiB, of 128
  assert kept > 120 and faults < 1000  # of 32,768 pages
