"""Checks and times the fused attention kernels on a GPU.

    python -m benchmarks.gpu

It needs JAX for CUDA, flax, optax, jaxtyping and etils. The parts are:

- checks: every kernel against `reference` in float32, output and gradients. A
  second run must give the same bits.
- attention: forward, and forward and backward, of the fused kernels, of two
  cuDNN calls and of tokamax (if installed), in ms. The ratio is the time of the
  best other implementation divided by the fused kernels' time.
- packed: the same on rows with several documents.
- decode: one new token per row, with the kernel and with XLA.
- steps: whole training steps and their MFU.

The exit status is 1 if a check is not right. To make `auto` use the times on
your kind of GPU:

    python -m benchmarks.gpu --parts checks attention packed \\
      --measured=diffjax/ops/diff_attention/gpu/measured.json

--interpret needs no GPU. It runs tiny shapes on a CPU, with the kernels in
Pallas's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks.gpu import checks, inputs, steps, tables, timing
from diffjax.ops.diff_attention.gpu import assembler, chip, measured

PARTS = ("checks", "attention", "packed", "decode", "steps")

# A warpgroup of an interpreted kernel blocks a thread of JAX. JAX starts as
# many threads as this environment variable says; with two, it can hang.
_INTERPRETER_THREADS = {"NPROC": "8"}

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the chosen parts, writes files if wanted, and counts right checks.

  Args:
    arguments: the command line. None for the one of this process.
  """
  flags = _parse_flags(arguments)
  context: contextlib.AbstractContextManager[None]
  if flags.interpret:
    os.environ |= _INTERPRETER_THREADS
    os.environ["JAX_PLATFORMS"] = "cpu"
    context = _interpreter()
  else:
    context = contextlib.nullcontext()
    _require_gpu()
    print(_describe_machine(), flush=True)

  rows = []
  with context:
    for row in _measure(flags):
      rows.append(row)
      # Written after each row, so that an interruption loses nothing.
      if flags.json is not None:
        _write_json(flags.json, rows)

  if flags.measured is not None:
    device_kind = jax.devices()[0].device_kind
    tables.update_measured(flags.measured, device_kind, rows)
  num_checks = 0
  num_right = 0
  for row in rows:
    if row["case"]["do"] == "check":
      num_checks += 1
      if row["right"]:
        num_right += 1
  if num_checks:
    print(f"\n{num_right} of {num_checks} checks right")
  if num_right < num_checks:
    sys.exit(1)


def _parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
  """Returns the flags. Ends the program if they contradict each other."""
  parser = argparse.ArgumentParser(
    "python -m benchmarks.gpu",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--parts", nargs="+", choices=PARTS, default=PARTS, help="all by default"
  )
  parser.add_argument(
    "--kinds",
    nargs="+",
    choices=tuple(inputs.KINDS),
    default=tuple(inputs.KINDS),
    help="kinds of attention",
  )
  parser.add_argument(
    "--head_dims",
    nargs="+",
    type=int,
    choices=measured.BUCKETS,
    default=measured.BUCKETS,
    help="widths of queries and keys",
  )
  parser.add_argument(
    "--lengths",
    nargs="+",
    type=int,
    choices=inputs.LENGTHS,
    default=inputs.LENGTHS,
    help="lengths of timed rows",
  )
  parser.add_argument(
    "--repetitions", type=int, default=10, help="samples for each median"
  )
  parser.add_argument(
    "--json", type=pathlib.Path, metavar="FILE", help="write the rows to FILE"
  )
  parser.add_argument(
    "--measured",
    type=pathlib.Path,
    metavar="FILE",
    help="replace all entries of this kind of GPU in a measured.json",
  )
  parser.add_argument(
    "--interpret", action="store_true", help="tiny shapes on a CPU"
  )
  flags = parser.parse_args(arguments)
  if flags.measured is not None and "checks" not in flags.parts:
    parser.error(
      "--measured needs the checks, because `auto` must not take a kernel that"
      " is wrong; add checks to --parts"
    )
  if flags.measured is not None and flags.interpret:
    parser.error(
      "--measured needs times of a GPU, which --interpret does not measure;"
      " leave one of them out"
    )
  return flags


def _require_gpu() -> None:
  """Ends the program if JAX has no GPU."""
  backend = jax.default_backend()
  if backend != "gpu":
    sys.exit(
      f"error: this needs a GPU, and JAX's backend is {backend!r};"
      " --interpret runs tiny shapes on a CPU"
    )


def _interpreter() -> contextlib.AbstractContextManager[None]:
  """Returns a context in which the kernels run on a CPU."""
  if not hasattr(chip.plgpu, "InterpretGPUParams"):
    sys.exit(f"error: pallas_gpu {chip.refusal()}")
  return chip.interpreted()


def _describe_machine() -> str:
  """Returns a line with the GPU and the versions, and problems if any."""
  device = jax.devices()[0]
  problem = chip.refusal() or assembler.refusal()
  text = f"{device.device_kind}, JAX {jax.__version__}"
  if problem is not None:
    return f"{text}\nwarning: pallas_gpu {problem}"
  release = ".".join(map(str, assembler.release()))
  return f"{text}, ptxas of CUDA {release}"


def _measure(flags: argparse.Namespace) -> Iterator[Row]:
  """Runs the chosen parts, prints their results and yields the rows."""
  if "checks" in flags.parts:
    yield from _run_checks(flags)
  if "attention" in flags.parts:
    yield from _time_attention(flags, packed=False)
  if "packed" in flags.parts:
    yield from _time_attention(flags, packed=True)
  if "decode" in flags.parts:
    yield from _time_decoding(flags)
  if "steps" in flags.parts:
    yield from _time_steps(flags)


def _run_checks(flags: argparse.Namespace) -> Iterator[Row]:
  """Checks the kernels, prints each result and yields its row."""
  cases: list[Any] = [*inputs.check_cases(), *inputs.decode_check_cases()]
  if flags.interpret:
    cases = [*inputs.tiny_cases(), *inputs.tiny_decode_cases()]
  print("\nchecks: relative errors of the output and the gradients")
  for case in cases:
    if not _is_chosen(case, flags):
      continue
    description: Row = {"do": "check", **inputs.to_json(case)}
    if isinstance(case, inputs.DecodeCase):
      description["decode"] = True
    try:
      check = _check(case)
    except Exception as error:  # Other kernels may still be right.
      message = timing.first_line(error)
      print(f"  {case}: FAILED ({message})", flush=True)
      yield {"case": description, "right": False, "error": message}
      continue
    print(f"  {case}: {check}", flush=True)
    yield {
      "case": description,
      "right": check.is_right,
      "deterministic": check.is_deterministic,
      "errors": check.errors,
    }


def _check(case: inputs.Case | inputs.DecodeCase) -> checks.Check:
  if isinstance(case, inputs.DecodeCase):
    return checks.check_decoding(case)
  return checks.check_attention(case)


def _time_attention(
  flags: argparse.Namespace, *, packed: bool
) -> Iterator[Row]:
  """Times attention, prints a table and yields the rows.

  Args:
    flags: the flags of the command.
    packed: whether several documents are packed into a row.
  """
  cases = inputs.timed_cases(packed=packed)
  if flags.interpret:
    cases = inputs.tiny_cases(packed=packed)
  rows_text = "packed rows" if packed else "rows of one document"
  print(
    f"\nattention on {rows_text}: ms of the forward pass, and of both passes"
  )
  print(tables.header())
  errors = []
  for case in cases:
    is_chosen_length = flags.interpret or case.T in flags.lengths
    if not is_chosen_length or not _is_chosen(case, flags):
      continue
    rows = timing.time_attention(case, flags.repetitions)
    print(tables.line(rows), flush=True)
    for row in rows:
      if "error" in row:
        errors.append(f"  {case}, {row['case']['name']}: {row['error']}")
    yield from rows
  if errors:
    print("not timed:")
    print("\n".join(errors), flush=True)


def _time_decoding(flags: argparse.Namespace) -> Iterator[Row]:
  """Times decoding, prints each result and yields its row."""
  cases = inputs.timed_decode_cases()
  if flags.interpret:
    cases = inputs.tiny_decode_cases()
  print("\ndecoding")
  for case in cases:
    if not _is_chosen(case, flags):
      continue
    for row in timing.time_decoding(case, flags.repetitions):
      result = row.get("error")
      if result is None:
        milliseconds = row["ms"]
        result = f"{milliseconds:.3g} ms, {row['gigabytes_per_second']} GB/s"
      print(f"  {case}, {row['case']['name']}: {result}", flush=True)
      yield row


def _time_steps(flags: argparse.Namespace) -> Iterator[Row]:
  """Times training steps, prints each result and yields its row."""
  cases = steps.step_cases()
  if flags.interpret:
    cases = steps.tiny_cases()
  print("\ntraining steps")
  for case in cases:
    row = steps.time_step(case, flags.repetitions)
    text = f"{row['tokens_per_second']:,} tokens/s"
    if "mfu" in row:
      text += f", MFU {row['mfu']:.1%}"
    print(f"  {case}: {text}", flush=True)
    yield row


def _is_chosen(case: Any, flags: argparse.Namespace) -> bool:
  """Returns whether the flags choose the kind and the width of a case."""
  is_chosen_width = measured.bucket(case.D) in flags.head_dims
  return case.kind in flags.kinds and is_chosen_width


def _write_json(path: pathlib.Path, rows: Sequence[Row]) -> None:
  """Writes the rows, one per line, with the device and JAX's version."""
  lines = [f"  {json.dumps(row, ensure_ascii=False)}" for row in rows]
  text = ",\n".join(lines)
  machine = json.dumps(
    {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
  )
  content = f'{{"machine": {machine}, "rows": [\n{text}\n]}}\n'
  # A reader of the file sees the old content or the new one.
  temporary = path.with_name(f"{path.name}.tmp")
  temporary.write_text(content, encoding="utf-8")
  temporary.replace(path)


if __name__ == "__main__":
  main()
