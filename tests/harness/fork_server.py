"""Runs commands in forked processes, each as `python -m MODULE` would, but with the slow imports done once.

Reads one task a line on standard input (JSON: module, arguments, directory, environment, and files for the two outputs), and writes the
exit code a line on standard output. No backend of JAX is made here, so that every command makes its own.
"""

import gc
import json
import os
import runpy
import sys
import types
import warnings

# Commands import these slow modules only when they need them. They are imported
# here so that each forked process has them.
import matplotlib.backends.backend_agg  # noqa: F401
import scipy.stats  # noqa: F401
import tensorflow_datasets  # noqa: F401

import diffjax.cli.command
import diffjax.evals.validation
import diffjax.inference.finish  # noqa: F401
import diffjax.interop.workdir
import diffjax.training.loop  # noqa: F401

warnings.filterwarnings(
  "ignore", message="os.fork"
)  # JAX has threads only once it has a backend
gc.freeze()  # what is imported is there to stay: no forked process looks through it for cycles

while line := sys.stdin.readline():
  task = json.loads(line)
  child = os.fork()
  if not child:
    break
  _, status = os.waitpid(child, 0)
  print(os.waitstatus_to_exitcode(status), flush=True)
else:
  sys.exit()

# From here on this is a command's process.
os.chdir(task["directory"])
os.environ.clear()
os.environ.update(task["environment"])
for number, path, flags in (
  (0, os.devnull, os.O_RDONLY),
  (1, task["out"], os.O_WRONLY),
  (2, task["errors"], os.O_WRONLY),
):
  os.dup2(os.open(path, flags), number)
main = sys.modules["__mp_main__"] = types.ModuleType(
  "__mp_main__"
)  # multiprocessing's name for the command, which is not here yet
main.__getattr__ = lambda name: getattr(sys.modules["__main__"], name)
sys.argv, sys.path[0] = [task["module"], *task["arguments"]], task["directory"]
python_path = task["environment"].get("PYTHONPATH", "").split(os.pathsep)
sys.path[1:1] = [path for path in python_path if path not in ("", *sys.path)]
runpy.run_module(task["module"], run_name="__main__", alter_sys=True)
