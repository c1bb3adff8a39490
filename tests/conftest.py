"""Settings and fixtures of all tests: see tests/harness/README.md."""

import gc
import importlib.metadata
import os
import pathlib
from collections.abc import Iterator

# XLA reads its flags when JAX creates a backend.
#
# Eight devices share a few cores. On a busy machine one device can wait long
# for the others. By default XLA ends the process after 40 seconds.
_USERS_XLA_FLAGS = (
  "--xla_cpu_collective_call_terminate_timeout_seconds=600"
  f" {os.environ.get('XLA_FLAGS', '')}"
)
_TEST_XLA_FLAGS = f"{_USERS_XLA_FLAGS} --xla_cpu_parallel_codegen_split_count=1"
# XLA's older emitters compile the tests' programs faster: in 40% of the time
# with JAX 0.10, and in 89 to 96% with JAX 0.12.
_jaxlib_version = importlib.metadata.version("jaxlib")
if _jaxlib_version.startswith("0.10."):
  _TEST_XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
elif _jaxlib_version.startswith("0.12."):
  _TEST_XLA_FLAGS += " --xla_cpu_use_new_xtile_lowering=false"
os.environ["XLA_FLAGS"] = _TEST_XLA_FLAGS

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.harness import deprecations  # noqa: E402
from tests.harness.commands import Commands  # noqa: E402

# JAX traces with millions of small objects, and few of them are in cycles. With
# Python's default thresholds, garbage collection took 6% of the time.
gc.set_threshold(20_000, 20, 100)

jax.config.update("jax_num_cpu_devices", 8)
# libtpu is installed for its compiler. Neither the tests nor the commands that
# they start should look for a TPU.
if "JAX_PLATFORMS" not in os.environ:
  jax.config.update("jax_platforms", "cpu")
  os.environ["JAX_PLATFORMS"] = "cpu"

# Compiling thousands of small programs takes most of the tests' time, so their
# machine code is not optimized, here and in the commands that tests start.
# Tests of the compiler's optimizations use the fixture `optimised`.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Commands keep all programs that they compile, and not only those that took a
# second, so that later commands of the tests need not compile them again.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Starts the longest tests first.

  A long test that starts last runs for minutes while other workers are idle.
  """
  items.sort(key=lambda item: item.get_closest_marker("longest") is None)


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
  """Gives the tests a cache directory of their own instead of the user's.

  All workers share it, so the embedded corpus is prepared once. Two environment
  variables let several runs of the suite share their caches:

  - DIFFJAX_TESTS_CACHE is the cache directory of the commands. It holds
    prepared rows and the programs that commands compile.
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
def deprecated_calls() -> Iterator[None]:
  """Makes this project's calls of deprecated functions errors."""
  with pytest.MonkeyPatch.context() as patch:
    deprecations.make_errors(patch)
    yield


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
  """Compiles as for users, for tests of what the compiler makes.

  XLA_FLAGS changes only for processes that the tests start, because this
  process has read its own.
  """
  jax.config.update("jax_disable_most_optimizations", False)
  with pytest.MonkeyPatch.context() as patch:
    patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    patch.setenv("XLA_FLAGS", _USERS_XLA_FLAGS)
    yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def restored_registry() -> Iterator[None]:
  """Removes the attention variants that a test registers, at its end."""
  # This import registers the package's variants, which takes seconds.
  from tests.harness.own_variants import restore_registry

  with restore_registry():
    yield


@pytest.fixture
def system_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes processes that the test starts use the system's memory allocator.

  CI preloads jemalloc to compile faster. Users do not.
  """
  monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
  """Runs commands in processes of their own, without the time of imports.

  result = command("diffjax.convert", "--from=unilm", "--workdir=runs/a")
  """
  directory: pathlib.Path = tmp_path_factory.mktemp("command")
  commands = Commands(directory)
  yield commands
  commands.close()
