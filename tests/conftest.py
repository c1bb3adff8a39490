"""Eight fake CPU devices for every test, no writes to the user's cache, and commands in processes that start at once."""

import gc
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

# Eight devices share a few cores: on a busy machine one may wait long for the others, and XLA ends the process after 40 seconds of it.
_USERS_FLAGS = f"--xla_cpu_collective_call_terminate_timeout_seconds=600 {os.environ.get('XLA_FLAGS', '')}"
os.environ["XLA_FLAGS"] = (
  f"{_USERS_FLAGS} --xla_cpu_parallel_codegen_split_count=1"
)
# XLA's older emitters compile the tests' programs faster: in 40% of the time with
# JAX 0.10, and in 89 to 96% with JAX 0.12.
jaxlib_version = importlib.metadata.version("jaxlib")
if jaxlib_version.startswith("0.10."):
  os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
elif jaxlib_version.startswith("0.12."):
  os.environ["XLA_FLAGS"] += " --xla_cpu_use_new_xtile_lowering=false"

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.harness import deprecations  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]

gc.set_threshold(
  20_000, 20, 100
)  # JAX traces with millions of small objects, few of them in cycles: looking for those took 6% of the time
jax.config.update("jax_num_cpu_devices", 8)
if (
  "JAX_PLATFORMS" not in os.environ
):  # libtpu is installed for its compiler: neither tests nor the commands that they start look for a TPU
  jax.config.update("jax_platforms", "cpu")
  os.environ["JAX_PLATFORMS"] = "cpu"

# The tests' time is compilation, of thousands of small programs: their machine code is not optimised, here and in the commands that tests
# start (a test of what optimisation does asks for `optimised`), and each is compiled once for all workers.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


def pytest_collection_modifyitems(items):
  """Starts the longest tests first.

  A long test that starts last runs for minutes while other workers are idle.
  """
  items.sort(key=lambda item: item.get_closest_marker("longest") is None)


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory):
  """Gives the tests a cache directory of their own instead of the user's.

  All workers share it, so the embedded corpus is prepared once. Two environment
  variables let several runs of the suite share their caches:

  - DIFFJAX_TESTS_CACHE is the cache directory of the commands. It holds prepared
    rows and the programs that commands compile.
  - DIFFJAX_TESTS_COMPILED holds the programs that the tests compile themselves.
  """
  session_directory = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    session_directory = session_directory.parent
  commands_cache = str(session_directory / "cache")
  os.environ["XDG_CACHE_HOME"] = os.environ.get(
    "DIFFJAX_TESTS_CACHE", commands_cache
  )
  compiled_programs = str(session_directory / "compiled")
  jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("DIFFJAX_TESTS_COMPILED", compiled_programs),
  )
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(autouse=True, scope="session")
def deprecated_calls():
  """Makes the deprecated calls of this project errors."""
  with pytest.MonkeyPatch.context() as patch:
    deprecations.make_errors(patch)
    yield


@pytest.fixture(scope="module")
def optimised():
  """Machine code as users get it, for tests of what the compiler makes."""
  jax.config.update("jax_disable_most_optimizations", False)
  with pytest.MonkeyPatch.context() as patch:
    patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    patch.setenv(
      "XLA_FLAGS", _USERS_FLAGS
    )  # of processes that tests start: this one has read its own
    yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def restored_registry():
  """Forgets at the end which attention variants a test registers."""
  # Imported here, because that file imports this one.
  from tests.harness.own_variants import kept_registry

  with kept_registry():
    yield


@pytest.fixture
def system_allocator(monkeypatch):
  """Processes that the test starts use the system's memory allocator.

  CI preloads jemalloc to compile faster. Users do not.
  """
  monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.fixture(scope="session")
def command(tmp_path_factory):
  """command("diffjax.convert", "--from=…"): what `python -m diffjax.convert --from=…` does, told as `subprocess.run` tells it.

  The process is forked from one that has imported everything (tests/harness/fork_server.py): imports take most of the time of a short command.
  """
  servers = {}  # by JAX's settings, which are read at the import that the forked processes share
  directory = tmp_path_factory.mktemp("command")

  def server_of(environment):
    settings = frozenset(
      (name, value)
      for name, value in environment.items()
      if name.startswith("JAX_")
    )
    if settings not in servers or servers[settings].poll() is not None:
      servers[settings] = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.fork_server"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
      )
    return servers[settings]

  def run(module, *arguments, cwd=ROOT, environment=(), timeout=300):
    files = {name: directory / name for name in ("out", "errors")}
    for file in files.values():
      file.write_bytes(b"")
    environment = {**os.environ, **dict(environment)}
    task = {
      "module": module,
      "arguments": list(map(str, arguments)),
      "directory": str(cwd),
      "environment": environment,
    }
    task |= {name: str(file) for name, file in files.items()}
    server = server_of(environment)
    server.stdin.write(json.dumps(task) + "\n")
    server.stdin.flush()
    hanging = threading.Timer(timeout, os.killpg, (server.pid, signal.SIGKILL))
    hanging.start()
    answer = server.stdout.readline()
    hanging.cancel()
    if not answer:
      server.wait()  # the next command gets another one
      raise AssertionError(
        f"{module} {arguments} has not ended within {timeout} s"
      )
    return subprocess.CompletedProcess(
      [module, *arguments],
      int(answer),
      files["out"].read_text(),
      files["errors"].read_text(),
    )

  yield run
  for server in servers.values():
    server.stdin.close()
    server.wait()
