"""Compiles MaxText's training step for TPUs that are not there.

    maxtext-env/bin/python benchmarks/maxtext_step.py 1b out

Runs under the interpreter of MaxText's environment, which need not have
diffjax; see benchmarks/maxtext.py. Writes the compiled program to out/step.txt,
and its memory and settings to out/step.json.

The step is the one of MaxText's train_compile: a Llama-like decoder, scanned
over its layers, with AdamW, float32 parameters, bfloat16 products, splash
attention with segment ids and tied embeddings. All parameters are split over
all chips (FSDP). Settings that are not in SHAPES or SETTINGS are MaxText's
defaults.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import sys
import time
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
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
    # MaxText names a v5p slice by its cores. This one has 4×4×4 chips.
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

SETTINGS: dict[str, Any] = {
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

SETTINGS_HELP = """
further settings of MaxText, JSON. With '{"num_vocab_tiling": 8}' the loss is
computed in 8 parts. With --remat=custom and
'{"mlpwi_0": "device", "mlpwi_1": "device"}' the inner products of the
feed-forward network are kept.
"""

# Their versions are written to step.json.
PACKAGES = ("jax", "jaxlib", "libtpu", "maxtext", "flax", "optax")


def compile_step(
  shape: str,
  folder: pathlib.Path,
  options: dict[str, str],
  remat: str,
  settings: dict[str, Any],
) -> None:
  """Compiles MaxText's training step, and writes step.txt and step.json.

  If the step does not fit into memory, step.json has the compiler's message as
  "refused", and there is no step.txt.

  Args:
    shape: A name in SHAPES.
    folder: The folder of both files. Earlier ones are replaced.
    options: Options of the compiler.
    remat: MaxText's remat_policy.
    settings: Further settings of MaxText, which go before all others.
  """
  folder.mkdir(parents=True, exist_ok=True)
  step_text = folder / "step.txt"
  step_json = folder / "step.json"
  step_text.unlink(missing_ok=True)
  step_json.unlink(missing_ok=True)
  # As in MaxText's train_compile: each chip draws its own random bits.
  os.environ["LIBTPU_INIT_ARGS"] = (
    "--xla_tpu_spmd_rng_bit_generator_unsafe=true"
  )
  _remove_own_folder_from_path()
  # Imported only now, because libtpu reads the variable when JAX starts.
  import jax
  from maxtext.trainers.pre_train import train_compile

  jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  all_settings = SETTINGS | SHAPES[shape] | {"remat_policy": remat} | settings
  config = _make_config(all_settings, options)
  start = time.perf_counter()
  mesh = train_compile.get_topology_mesh(config)
  result: dict[str, Any] = {
    "shape": shape,
    "device": mesh.devices.flat[0].device_kind,
    "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
    "settings": all_settings,
    "options": options,
    "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
  }
  try:
    compiled = _compile(config, mesh)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    result["refused"] = str(error)
  else:
    result |= _memory(compiled)
    step_text.write_text(compiled.as_text(), encoding="utf-8")
  result["seconds"] = round(time.perf_counter() - start, 1)
  text = json.dumps(result, indent=1) + "\n"
  step_json.write_text(text, encoding="utf-8")


def _remove_own_folder_from_path() -> None:
  """Lets `import maxtext` find MaxText, and not benchmarks/maxtext.py."""
  own_folder = pathlib.Path(__file__).resolve().parent
  remaining = []
  for entry in sys.path:
    if pathlib.Path(entry).resolve() != own_folder:
      remaining.append(entry)
  sys.path = remaining


def _make_config(settings: dict[str, Any], options: dict[str, str]) -> Any:
  """Returns MaxText's config: its defaults with our settings.

  Args:
    settings: Settings of MaxText.
    options: Options of the compiler.
  """
  import maxtext
  from maxtext.configs import pyconfig

  compiler_flags = [f"--{name}={value}" for name, value in options.items()]
  defaults = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
  return pyconfig.initialize(
    ["train_compile", str(defaults)],
    **settings,
    compile_xla_flags=" ".join(compiler_flags),
  )


def _compile(config: Any, mesh: Any) -> Any:
  """Compiles the step in the same way as `main` of MaxText's train_compile.

  Args:
    config: MaxText's config.
    mesh: The mesh of the TPU slice.
  """
  from flax.core.spmd import logical_axis_rules
  from maxtext.trainers.pre_train import train, train_compile
  from maxtext.utils import maxtext_utils, sharding

  arguments, keywords, state_shardings, _, model = (
    train_compile.get_shaped_inputs(mesh, config)
  )
  parameter_shardings, state_shardings = (
    sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
  )
  input_state_shardings = sharding.build_zero1_input_state_mesh_shardings(
    config, state_shardings, parameter_shardings
  )
  step, in_shardings, out_shardings, static_argnums, donate_argnums = (
    maxtext_utils.get_functional_train_with_signature(
      train.train_step,
      sharding.get_input_data_sharding(config, mesh),
      input_state_shardings,
      model,
      config,
      parameter_shardings,
    )
  )
  return train_compile.jit_and_compile(
    step,
    arguments,
    keywords,
    mesh,
    in_shardings,
    out_shardings,
    static_argnums,
    donate_argnums,
    config,
    logical_axis_rules(config.logical_axis_rules),
  )


def _memory(compiled: Any) -> dict[str, int]:
  """Returns the bytes that a compiled program takes, by their contents."""
  memory = compiled.memory_analysis()
  return {
    "temporaries_bytes": memory.temp_size_in_bytes,
    "argument_bytes": memory.argument_size_in_bytes,
    "output_bytes": memory.output_size_in_bytes,
    "alias_bytes": memory.alias_size_in_bytes,
    "program_bytes": memory.generated_code_size_in_bytes,
  }


def main() -> None:
  """Compiles the step that the flags describe."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "shape", choices=SHAPES, help="the model and the slice of TPUs"
  )
  parser.add_argument(
    "folder", type=pathlib.Path, help="for step.txt and step.json"
  )
  parser.add_argument(
    "--options",
    type=json.loads,
    default={},
    help="""options of the compiler, JSON, such as '{"NAME": "VALUE"}'""",
  )
  parser.add_argument("--remat", default="full", help="MaxText's remat_policy")
  parser.add_argument(
    "--settings", type=json.loads, default={}, help=SETTINGS_HELP
  )
  flags = parser.parse_args()
  compile_step(
    shape=flags.shape,
    folder=flags.folder,
    options=flags.options,
    remat=flags.remat,
    settings=flags.settings,
  )


if __name__ == "__main__":
  main()
