"""Our training step beside MaxText's, both compiled by the same libtpu for TPUs that are not there.

    python3.12 -m venv maxtext-env
    maxtext-env/bin/pip install 'maxtext[tpu]==0.2.5' jax==0.12.0.1 libtpu==0.0.50.1
    python -m benchmarks.maxtext --python=maxtext-env/bin/python                # a table, and benchmarks/maxtext.json; half an hour
    maxtext-env/bin/python benchmarks/maxtext.py --child 1b out                 # MaxText's program alone, into the folder out

MaxText asks for Python 3.12 and for versions of jax and libtpu of its own, so it has an environment to itself, in which diffjax need not
be; without its extra tpu it installs none of what it needs. Ours should have the same jax and libtpu: the table says which each had.

Seconds are the compiler's estimate, read as `diffjax.aot` reads it. Kernels have none: MaxText's splash attention counts as ours of the
same shape, its two backward kernels together as our one, which rather favours MaxText.
What benchmarks/maxtext.json holds is not compiled again.

MaxText's step is that of its own train_compile: a Llama-like decoder of the shape named, scanned over its layers, with AdamW, float32
parameters and bfloat16 products, splash attention with segment ids, tied embeddings, and all parameters split over all chips (FSDP).
What is not in SHAPES or SETTINGS is MaxText's default. --settings sets more of it: with '{"num_vocab_tiling": 8}' the loss is computed in 8
parts, and with --remat custom and '{"mlpwi_0": "device", "mlpwi_1": "device"}' the feed-forward's two inner products are kept.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

# MaxText names a v5p slice by its cores: v5p-128 is 4x4x4 chips.
SHAPES = {
  "1b": {
    "compile_topology": "v5e-16",
    "base_emb_dim": 2048,
    "base_num_decoder_layers": 24,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "head_dim": 128,
    "base_mlp_dim": 5440,
    "vocab_size": 100_288,
    "per_device_batch_size": 8,
  },
  "13b": {
    "compile_topology": "v5p-128",
    "base_emb_dim": 5120,
    "base_num_decoder_layers": 40,
    "base_num_query_heads": 40,
    "base_num_kv_heads": 40,
    "head_dim": 128,
    "base_mlp_dim": 13_696,
    "vocab_size": 100_288,
    "per_device_batch_size": 2,
  },
}

RESULTS = pathlib.Path(__file__).with_suffix(".json")
# Ours of the same shape: the slice, the config and what is set in it; and what the backward pass keeps of a layer besides, where there is
# memory for it.
_OURS: dict[str, tuple[str, str, dict, tuple[str, ...]]] = {
  "1b": ("v5e:4x4", "diff_1b", {}, ()),
  "13b": (
    "v5p:4x4x4",
    "diff_13b",
    {"mesh.data": 4, "mesh.fsdp": 16},
    ("none",),
  ),
}
# MaxText's programs: the compiler's options, what the backward pass keeps of a layer, further settings.
_FLAG = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# As compiler_options in diffjax/training/program.py, which MaxText's interpreter cannot import: gathers and sums on the sparse cores.
_OFFLOADED = (
  "all_gather",
  "2d_all_gather",
  "3d_all_gather",
  "reduce_scatter",
  "nd_reduce_scatter",
  "all_reduce",
)
_SPARSE = {
  f"xla_tpu_enable_sparse_core_collective_offload_{collective}": "true"
  for collective in _OFFLOADED
}
MAXTEXT: tuple[tuple[str, dict[str, str], str, dict[str, str]], ...] = (
  ("full", {}, "full", {}),
  ("full, flag", _FLAG, "full", {}),
  ("save_qkv_proj, flag", _FLAG, "save_qkv_proj", {}),
  (
    "mlpwi_0 and mlpwi_1 kept, flag",
    _FLAG,
    "custom",
    {"mlpwi_0": "device", "mlpwi_1": "device"},
  ),
  ("minimal_with_context, flag", _FLAG, "minimal_with_context", {}),
  (
    "minimal_with_context, flag, sparse cores",
    _FLAG | _SPARSE,
    "minimal_with_context",
    {},
  ),
)
# Parts that both programs can be told apart by: MaxText's instructions do not say of which module they are.
_SCOPES = (
  (
    r"\bloss\b",
    "outside the layers, elementwise",
    "outside the layers, products",
  ),
  (r"while/body", "layers, elementwise", "layers, products"),
  (r"", "outside the layers, elementwise", "outside the layers, products"),
)

SETTINGS = {
  "compile_topology_num_slices": 1,
  "decoder_block": "llama2",
  "mlp_activations": ["silu", "linear"],
  "max_target_length": 2048,
  "logits_via_embedding": True,
  "normalize_embedding_logits": False,
  "dtype": "bfloat16",
  "weight_dtype": "float32",
  "opt_type": "adamw",
  "attention": "flash",
  "scan_layers": True,
  "ici_fsdp_parallelism": -1,
  "enable_dropout": False,
  "enable_checkpointing": False,
  "dataset_type": "synthetic",
  "run_name": "compiled",
  "jax_cache_dir": "",
}

_PACKAGES = ("jax", "jaxlib", "libtpu", "maxtext", "flax", "optax")


def compile_maxtext(
  python: str,
  shape: str,
  folder: pathlib.Path,
  options: dict[str, str],
  remat: str,
  settings: dict | None = None,
) -> dict:
  """Compiles MaxText's training step under another interpreter.

  Args:
    python: the interpreter of MaxText's environment.
    shape: a name in SHAPES.
    folder: where step.txt and step.json go; made if it is not there.
    options: the compiler's options by name, such as {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}.
    remat: MaxText's remat_policy, such as "full" or "minimal".
    settings: further settings of MaxText by name; they go before those of SHAPES and SETTINGS.

  Returns:
    What step.json holds, and under "hlo" the path of step.txt; of a step that does not fit "refused", the compiler's reason, and no "hlo".

  Raises:
    RuntimeError: if the other process ends for another reason.
  """
  from diffjax.compiled.plan import ENVIRONMENT

  command = [
    python,
    str(pathlib.Path(__file__).resolve()),
    "--child",
    shape,
    str(folder),
    "--remat",
    remat,
  ]
  command += [
    "--options",
    json.dumps(options),
    "--settings",
    json.dumps(settings or {}),
  ]
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "LIBTPU_INIT_ARGS", "XLA_FLAGS")
  }
  done = subprocess.run(
    command, env=environment | ENVIRONMENT, capture_output=True, text=True
  )
  if done.returncode:
    raise RuntimeError(
      f"MaxText's step was not compiled, exit status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
  result = json.loads((folder / "step.json").read_text(encoding="utf-8"))
  return (
    result
    if "refused" in result
    else result | {"hlo": str(folder / "step.txt")}
  )


def compile_here(
  shape: str,
  folder: pathlib.Path,
  options: dict[str, str],
  remat: str,
  settings: dict,
) -> None:
  """Under MaxText's interpreter: compiles the step and writes step.txt and step.json, over those of an earlier time."""
  folder.mkdir(parents=True, exist_ok=True)
  for name in ("step.txt", "step.json"):
    (folder / name).unlink(missing_ok=True)
  # As MaxText's train_compile does: random bits are drawn on each chip for itself.
  os.environ["LIBTPU_INIT_ARGS"] = (
    "--xla_tpu_spmd_rng_bit_generator_unsafe=true"
  )
  here = pathlib.Path(__file__).resolve().parent
  sys.path = [
    entry for entry in sys.path if pathlib.Path(entry).resolve() != here
  ]  # or this file were the module maxtext
  import jax
  import maxtext
  from flax.core.spmd import logical_axis_rules
  from maxtext.configs import pyconfig
  from maxtext.trainers.pre_train import train, train_compile
  from maxtext.utils import maxtext_utils, sharding

  jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  nominal = SETTINGS | SHAPES[shape] | {"remat_policy": remat} | settings
  flags = " ".join(f"--{name}={value}" for name, value in options.items())
  base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
  config = pyconfig.initialize(
    ["train_compile", str(base)], **nominal, compile_xla_flags=flags
  )

  start = time.perf_counter()
  mesh = train_compile.get_topology_mesh(config)
  arguments, keywords, state_shardings, _, model = (
    train_compile.get_shaped_inputs(mesh, config)
  )
  parameter_shardings, state_shardings = (
    sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
  )
  step, in_shardings, out_shardings, static, donated = (
    maxtext_utils.get_functional_train_with_signature(
      train.train_step,
      sharding.get_input_data_sharding(config, mesh),
      sharding.build_zero1_input_state_mesh_shardings(
        config, state_shardings, parameter_shardings
      ),
      model,
      config,
      parameter_shardings,
    )
  )
  result: dict = {
    "shape": shape,
    "device": mesh.devices.flat[0].device_kind,
    "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
    "settings": nominal,
    "options": options,
    "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
  }
  rules = logical_axis_rules(config.logical_axis_rules)
  try:
    compiled = train_compile.jit_and_compile(
      step,
      arguments,
      keywords,
      mesh,
      in_shardings,
      out_shardings,
      static,
      donated,
      config,
      rules,
    )
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    result["refused"] = str(error)
  else:
    result |= _memory(compiled)
    (folder / "step.txt").write_text(compiled.as_text(), encoding="utf-8")
  result["seconds"] = round(time.perf_counter() - start, 1)
  (folder / "step.json").write_text(
    json.dumps(result, indent=1) + "\n", encoding="utf-8"
  )


def _memory(compiled) -> dict[str, int]:
  """Bytes that a compiled program takes, by what they hold."""
  memory = compiled.memory_analysis()
  return {
    "temporaries_bytes": memory.temp_size_in_bytes,
    "argument_bytes": memory.argument_size_in_bytes,
    "output_bytes": memory.output_size_in_bytes,
    "alias_bytes": memory.alias_size_in_bytes,
    "program_bytes": memory.generated_code_size_in_bytes,
  }


def compile_ours(
  devices,
  chips: int,
  available: int,
  config,
  topology: str,
  folder: pathlib.Path,
) -> dict:
  """Our step, in the process of libtpu (`diffjax.compiled.plan.call_with_devices`); returns what `compile_maxtext` does, as far as it is needed."""
  from diffjax.parallel.mesh import make_mesh
  from diffjax.training.program import build

  program = build(config, make_mesh(config.mesh, devices))
  compiled = program.lower_train_step().compile()
  (folder / "step.txt").write_text(compiled.as_text(), encoding="utf-8")
  versions = {
    name: importlib.metadata.version(name) for name in ("jax", "libtpu")
  }
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  return {
    "hlo": str(folder / "step.txt"),
    "temporaries_bytes": temporaries,
    "mesh": dict(program.mesh.shape),
    "versions": versions,
  }


def read(result: dict, config, topology: str, chips: int) -> dict:
  """A row of the table: seconds by part, the bound on MFU, temporaries and collectives of a compiled step of a config's shape."""
  from diffjax.compiled.estimate import Scope, estimate
  from diffjax.compiled.hardware import CHIPS, Torus
  from diffjax.compiled.plan import kernel_cycles
  from diffjax.compiled.text import windowed_einsums
  from diffjax.model.flops import peak_flops, step_flops

  text, chip = (
    pathlib.Path(result["hlo"]).read_text(encoding="utf-8"),
    CHIPS[topology.partition(":")[0]],
  )
  kernels = kernel_cycles(
    config,
    {"data": 1, "fsdp": chips, "context": 1, "tensor": 1},
    topology.partition(":")[0],
    chip.num_cores,
  )
  ours = {
    "splash_mha_fwd": "diff_attention_forward_plain",
    "splash_mha_dkv": "diff_attention_backward_plain",
  }
  kernels |= {
    theirs: kernels[name] for theirs, name in ours.items() if name in kernels
  }
  scopes = [Scope(*entry) for entry in _SCOPES]
  found = estimate(
    text, result["mesh"], chip, Torus.from_topology(topology), kernels, scopes
  )
  assert found is not None
  flops = step_flops(
    config.model,
    config.data.length,
    config.train.batch_size * config.data.length,
  ).training
  peak = (
    flops
    / chips
    / peak_flops(
      {"v5e": "TPU v5e", "v5p": "TPU v5p"}[topology.partition(":")[0]]
    )
  )
  return {
    "versions": f"jax {result['versions']['jax']}, libtpu {result['versions']['libtpu']}",
    "seconds": round(found.seconds, 4),
    "bound on MFU": round(peak / found.seconds, 4),
    "parts": {
      part: round(seconds, 4)
      for part, seconds in sorted(
        found.parts.items(), key=lambda entry: -entry[1]
      )
    },
    "collectives, of them exposed": {
      kind: [round(x, 4) for x in pair]
      for kind, pair in found.collectives.items()
    },
    "windowed": windowed_einsums(text),
    "temporaries, GiB": round(result["temporaries_bytes"] / 2**30, 2),
  }


def compare(python: str, shape: str, folder: pathlib.Path, found: dict) -> None:
  """Adds the rows that `found` lacks of a shape, by program, and writes it after each: ours, DIFF and its Transformer twin, and MaxText's
  with and without the option, with what it keeps of a layer."""
  from diffjax.compiled.plan import call_with_devices
  from diffjax.config import from_config_dict

  topology, name, overrides, policies = _OURS[shape]
  chips = math.prod(map(int, topology.partition(":")[2].split("x")))
  rows = found.setdefault(shape, {})

  def add(row: str, compile: Callable[[], dict], config) -> None:
    if row in rows:
      return
    result = compile()
    rows[row] = (
      {"refused": result["refused"][:200]}
      if "refused" in result
      else read(result, config, topology, chips)
    )
    print(f"{shape} {row}: {rows[row]}", file=sys.stderr, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

  programs = {}
  for remat, variant in itertools.product(
    (None, *policies), ("diff", "transformer")
  ):
    config = importlib.import_module(f"diffjax.configs.{name}").get_config(
      variant
    )
    config.update_from_flattened_dict(
      overrides | ({"model.remat": remat} if remat else {})
    )
    programs[f"diffjax {variant}" + (f", remat {remat}" if remat else "")] = (
      from_config_dict(config)
    )
  for row, config in programs.items():
    add(
      row,
      functools.partial(
        call_with_devices,
        compile_ours,
        config,
        topology,
        folder,
        topology=topology,
      ),
      config,
    )
  twin = programs["diffjax transformer"]
  for row, options, remat, settings in MAXTEXT:
    if "sparse cores" in row and topology.startswith("v5e"):
      continue  # it has none
    add(
      f"MaxText {row}",
      functools.partial(
        compile_maxtext, python, shape, folder, options, remat, settings
      ),
      twin,
    )


def table(found: dict) -> str:
  """The results in Markdown, a row a program."""
  lines = [
    "| | step, s | bound on MFU | products | elementwise | copies | kernels | exposed | temporaries, GiB |",
    "|---" * 9 + "|",
  ]
  for shape, rows in found.items():
    for row, read in rows.items():
      if "refused" in read:
        lines.append(f"| {shape} {row} | does not fit |" + " |" * 7)
        continue
      parts = read["parts"]
      of = lambda kind, parts=parts: sum(
        seconds for part, seconds in parts.items() if kind in part
      )
      cells = [
        of("products"),
        of("elementwise") + parts.get("other", 0),
        of("copies"),
        of("kernels"),
        of("exposed"),
      ]
      windowed = f" ({read['windowed']} windowed)" if read["windowed"] else ""
      text = [f"{seconds:.3f}" for seconds in cells]
      text[0] += windowed
      temporaries = f"{read['temporaries, GiB']:.1f}"
      lines.append(
        f"| {shape} {row} | {read['seconds']:.3f} | {read['bound on MFU']:.1%} | {' | '.join(text)} | {temporaries} |"
      )
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--python", help="the interpreter of MaxText's environment"
  )
  parser.add_argument(
    "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES)
  )
  parser.add_argument(
    "--child",
    nargs=2,
    metavar=("SHAPE", "OUT"),
    help=f"one of {', '.join(SHAPES)}, and a folder",
  )
  parser.add_argument(
    "--options",
    type=json.loads,
    default={},
    help="the compiler's options, JSON",
  )
  parser.add_argument("--remat", default="full", help="MaxText's remat_policy")
  parser.add_argument(
    "--settings",
    type=json.loads,
    default={},
    help="further settings of MaxText, JSON",
  )
  flags = parser.parse_args()
  if not flags.child:
    if not flags.python:
      parser.error("pass --python, the interpreter of MaxText's environment")
    found = (
      json.loads(RESULTS.read_text(encoding="utf-8"))
      if RESULTS.exists()
      else {}
    )
    for shape in flags.shapes:
      with tempfile.TemporaryDirectory() as folder:
        compare(flags.python, shape, pathlib.Path(folder), found)
    print(table(found))
    return
  shape, folder = flags.child
  if shape not in SHAPES:
    parser.error(
      f"--child {shape}: there is no such shape; there are {', '.join(SHAPES)}"
    )
  compile_here(
    shape, pathlib.Path(folder), flags.options, flags.remat, flags.settings
  )


if __name__ == "__main__":
  main()
