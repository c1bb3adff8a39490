"""Eight fake CPU devices for every test, and no writes to the user's cache."""

import os

# Eight devices share a few cores: on a busy machine one may wait long for the others, and XLA ends the process after 40 seconds of it.
os.environ["XLA_FLAGS"] = f"--xla_cpu_collective_call_terminate_timeout_seconds=600 {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
if "JAX_PLATFORMS" not in os.environ:  # libtpu is installed for its compiler: neither tests nor the commands that they start look for a TPU
  jax.config.update("jax_platforms", "cpu")
  os.environ["JAX_PLATFORMS"] = "cpu"

# The tests' time is compilation, of thousands of small programs: their machine code is not optimised, here and in the commands that tests
# start (a test of what optimisation does asks for `optimised`), and each is compiled once for all workers.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory):
  """A cache of the tests' own, compiled programs included: a run that is resumed need not compile its step again."""
  shared = tmp_path_factory.getbasetemp()
  shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
  os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
  jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="module")
def optimised():
  """Machine code as users get it, for tests of what the compiler makes."""
  jax.config.update("jax_disable_most_optimizations", False)
  with pytest.MonkeyPatch.context() as patch:
    patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    yield
  jax.config.update("jax_disable_most_optimizations", True)
