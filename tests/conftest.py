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


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory):
  """A cache of the tests' own, compiled programs included: a run that is resumed need not compile its step again."""
  os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
  jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))


@pytest.fixture(scope="module")
def quick_compile():
  """Machine code without optimisation, for tests of whole training steps, whose time is compilation."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
