"""`python -m benchmarks.gpu`: checks, times, tables, and the command."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, inputs, steps, tables, timing
from diffjax.ops.diff_attention import (
  decode_attention,
  diff_attention,
  implementations,
)
from diffjax.ops.diff_attention.gpu import measured
from diffjax.ops.diff_attention.mask import Mask
from tests.harness import ROOT
from tests.harness.host_callbacks import host_callbacks
from tests.harness.tolerances import FLOAT32_LAYER

needs_new_jax = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2),
  reason="the GPU kernels need JAX 0.11.2 or newer",
)

SMALL = inputs.Case("v1", D=16, B=1, T=24, H=2)
SMALL_DECODE = inputs.DecodeCase("v1", D=16, B=2, S=32, H=2)


def correct(*arrays: jax.Array, **mask: Any) -> jax.Array:
  """Computes attention in bfloat16, in another way than the checks do."""
  return diff_attention(*arrays, **mask, implementation="chunked")


# Checks


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(
      dataclasses.replace(SMALL, packed=True, heads_per_key_head=2),
      id="v1_packed_rows_and_shared_keys",
    ),
    pytest.param(
      dataclasses.replace(SMALL, kind="v2", causal=False),
      id="v2_not_causal",
      marks=pytest.mark.full,
    ),
    pytest.param(
      dataclasses.replace(SMALL, kind="plain", window=5, dtype="float16"),
      id="plain_window_in_float16",
    ),
    pytest.param(
      dataclasses.replace(SMALL, B=2, S=40, q_offset=(16, 3)), id="v1_offsets"
    ),
    pytest.param(
      dataclasses.replace(SMALL, kind="v2", T=1, H=64), id="v2_one_key"
    ),
  ],
)
def test_a_correct_kernel_is_right(case):
  """A check compares outputs and gradients with a reference in float32."""
  check = checks.check_attention(case, correct)

  assert check.is_right
  assert str(check).startswith("right (out ")


def test_a_kernel_with_a_wrong_output_is_wrong():
  """In bfloat16, a check tolerates an error of 1%."""

  def wrong(*arrays, **mask):
    return 1.02 * correct(*arrays, **mask)

  check = checks.check_attention(SMALL, wrong)

  assert not check.is_right
  # The error of the output is about 2%, which is printed as 2.0e-02.
  assert str(check).startswith("WRONG (out 2.")


def test_a_kernel_with_one_wrong_gradient_is_wrong():
  def wrong(q, *arrays, **mask):
    # This has the value of q, and doubles its gradient.
    doubled = 2 * q - jax.lax.stop_gradient(q)
    return correct(doubled, *arrays, **mask)

  check = checks.check_attention(SMALL, wrong)

  wrong_arrays = []
  for name, error in check.errors.items():
    if error > check.tolerance:
      wrong_arrays.append(name)
  assert wrong_arrays == ["d_q"]
  assert str(check).startswith("WRONG")


def test_a_kernel_with_a_window_that_is_too_short_by_one_key_is_wrong():
  """With a window of 5, a query attends to the last 5 keys."""

  def wrong(*arrays, window, **mask):
    return correct(*arrays, window=window - 1, **mask)

  check = checks.check_attention(dataclasses.replace(SMALL, window=5), wrong)

  assert not check.is_right


def test_a_kernel_whose_output_is_nan_is_wrong():
  """A comparison of NaN with the tolerance must not pass."""

  def wrong(*arrays, **mask):
    return math.nan * correct(*arrays, **mask)

  check = checks.check_attention(SMALL, wrong)

  assert str(check).startswith("WRONG (out nan")


def test_a_kernel_with_other_bits_in_its_second_run_is_not_deterministic():
  """A check runs a kernel twice, and compares all bits of both results."""
  num_runs = 0

  def count_runs():
    nonlocal num_runs
    num_runs += 1
    return np.float32(num_runs)

  def race(*arrays, **mask):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    # Each run changes the output by another multiple of 0.2%, which is less
    # than the tolerance of 1%.
    change = 0.002 * jax.pure_callback(count_runs, scalar)
    output = correct(*arrays, **mask)
    return (output * (1 + change)).astype(output.dtype)

  check = checks.check_attention(SMALL, race)

  assert max(check.errors.values()) < check.tolerance
  assert not check.is_right
  assert str(check).startswith("NOT DETERMINISTIC")


def test_a_wrong_gradient_is_found_where_the_right_one_is_zero():
  """With a single key, attention weights are 1 for any q. So dQ is 0.

  The error is not divided by the norm 0, but by a smallest divisor.
  """
  case = inputs.Case("v2", D=64, B=2, T=1, H=64)

  def with_wrong_d_q(q, k, v, lam, **mask):
    # The value is 0, and the gradient is 1.
    zero = q - jax.lax.stop_gradient(q)
    # [B, T, H]: the sum over the two maps.
    zero_logits = jnp.sum(zero * k, axis=(-2, -1)) / math.sqrt(case.D)
    # This adds the gradient of a weight that is 10% of the logit.
    return correct(q, k, v, lam, **mask) + 0.1 * zero_logits[..., None] * v

  check = checks.check_attention(case, with_wrong_d_q)

  # The tolerance is 1%, so rounding could not be the reason of such an error.
  assert check.errors["d_q"] > 3 * check.tolerance


@pytest.mark.parametrize(
  "options",
  [
    pytest.param({"kind": "v1"}, id="v1"),
    pytest.param({"kind": "v2", "causal": False}, id="v2_not_causal"),
    pytest.param({"kind": "plain", "window": 20}, id="plain_window"),
  ],
)
def test_ordinary_gradients_are_larger_than_the_smallest_divisor(options):
  """A check divides an error by the norm of the array, or by a larger divisor.

  The divisor is larger only if an array is almost 0.
  """
  case = inputs.Case(D=16, B=2, T=64, H=2, **options)
  arrays = inputs.arguments(case)
  gradient_of_output = inputs.output_gradient(arrays)
  attend = functools.partial(correct, **inputs.options(case))
  attend_with_gradients = jax.jit(inputs.with_gradients(attend))

  output_and_gradients = attend_with_gradients(gradient_of_output, *arrays)

  q, k, v, *_ = arrays
  divisors = checks.min_norms(gradient_of_output, q, k, v)
  for index, array in enumerate(output_and_gradients):
    assert checks.norm(array) > divisors[index]


def test_references_are_computed_in_float32_with_the_highest_precision():
  traced = []

  def multiply(a, b):
    traced.append((a.dtype, jax.config.jax_default_matmul_precision))
    return a @ b

  x = jnp.ones((4, 4), jnp.bfloat16)
  checks.run_in_float32(multiply, (x, x))

  assert traced == [(jnp.float32, "highest")]


def test_a_correct_decoding_kernel_is_right():
  decode = functools.partial(decode_attention, implementation="xla")

  check = checks.check_decoding(SMALL_DECODE, decode)

  assert check.is_right


def test_a_wrong_decoding_kernel_is_wrong():
  """A check tolerates an error of 1%."""

  def wrong(*arguments):
    return 1.02 * decode_attention(*arguments, implementation="xla")

  check = checks.check_decoding(SMALL_DECODE, wrong)

  assert not check.is_right


def test_every_kind_and_width_is_checked():
  """The kernels have the widths D = 64 and 128. Others are padded."""
  kinds_and_widths = {(case.kind, case.D) for case in inputs.check_cases()}

  for kind in ("v1", "v2", "plain"):
    assert (kind, 64) in kinds_and_widths
    assert (kind, 128) in kinds_and_widths


def test_a_row_of_one_position_is_checked_first():
  """The cases are sorted by their size."""
  first_case, *_ = inputs.check_cases()

  assert first_case.T == 1


# Times


def test_programs_take_turns():
  """If a GPU becomes slower, this must not affect only one of the programs."""
  order = []

  def sleep(name):
    order.append(name)
    time.sleep(timing.SAMPLE_SECONDS)

  programs = {
    "a": functools.partial(sleep, "a"),
    "b": functools.partial(sleep, "b"),
  }
  times = timing.median_milliseconds(programs, repetitions=2)

  # The first two calls of each are a warm-up and an estimate. Then both are
  # called in turn, in each of two repetitions.
  assert order == ["a", "a", "b", "b", "a", "b", "a", "b"]
  assert times["a"] >= 1e3 * timing.SAMPLE_SECONDS


def test_the_time_of_a_short_program_is_that_of_one_call():
  """A short program is called many times between two readings of the clock."""
  milliseconds_of_a_call = 5
  num_calls = 0

  def sleep():
    nonlocal num_calls
    num_calls += 1
    time.sleep(milliseconds_of_a_call / 1e3)

  start = time.perf_counter()
  times = timing.median_milliseconds({"short": sleep}, repetitions=1)
  elapsed_milliseconds = 1e3 * (time.perf_counter() - start)

  # Two calls are a warm-up and an estimate.
  num_timed_calls = num_calls - 2
  assert num_timed_calls > 1
  assert times["short"] >= milliseconds_of_a_call
  # The timed calls together are a part of all that was done.
  assert times["short"] * num_timed_calls < elapsed_milliseconds


@pytest.mark.parametrize("kind", inputs.KINDS)
def test_all_timed_programs_compute_the_same_attention(kind):
  """Each implementation has a program, with the same random arrays."""
  case = inputs.Case(kind, D=16, B=1, T=24, H=2, dtype="float32")
  reference = functools.partial(diff_attention, implementation="reference")
  expected = jax.jit(reference)(*inputs.arguments(case))

  needing_a_gpu = {"fused", "tokamax"}
  for name in set(timing.implementations(case)) - needing_a_gpu:
    attend, arrays = timing.attention_program(case, name)
    actual = jax.jit(attend)(*arrays)
    chex.assert_trees_all_close(actual, expected, **FLOAT32_LAYER)


@pytest.fixture(scope="module")
def rows_by_implementation_on_a_cpu() -> dict[str, tables.Row]:
  """The times of V1 on a CPU, where "fused" and "tokamax" cannot run."""
  rows = timing.time_attention(SMALL, repetitions=1)
  return {row["case"]["name"]: row for row in rows}


def test_the_row_of_an_implementation_has_its_times(
  rows_by_implementation_on_a_cpu,
):
  row = rows_by_implementation_on_a_cpu["two_call"]
  # This one computes the values in two halves.
  row_with_halves = rows_by_implementation_on_a_cpu["cudnn halved"]

  assert row["both_ms"] > 0
  assert row_with_halves["forward_ms"] > 0


def test_an_implementation_that_cannot_run_has_the_reason_in_its_row(
  rows_by_implementation_on_a_cpu,
):
  """ "fused" is the implementation pallas_gpu, which needs a GPU."""
  row = rows_by_implementation_on_a_cpu["fused"]

  assert "pallas_gpu" in row["error"]


@pytest.mark.skipif(
  importlib.util.find_spec("tokamax") is not None,
  reason="tokamax is installed",
)
def test_a_library_that_is_not_installed_has_this_reason_in_its_row(
  rows_by_implementation_on_a_cpu,
):
  assert rows_by_implementation_on_a_cpu["tokamax"]["error"] == "not installed"


def test_decoding_is_timed_and_its_bytes_are_counted():
  """The implementation "xla" can run on a CPU, and "pallas_gpu" cannot."""
  rows = timing.time_decoding(SMALL_DECODE, repetitions=1)

  by_name = {row["case"]["name"]: row for row in rows}
  assert by_name["xla"]["ms"] > 0
  assert "gigabytes_per_second" in by_name["xla"]
  assert "error" in by_name["pallas_gpu"]


def read_h100_rows() -> tuple[str, list[tables.Row]]:
  """Returns the device and the rows of the kernels' last version."""
  content = json.loads((ROOT / "benchmarks/gpu/gpu.json").read_text())
  calls = content["calls"]
  rows = []
  for row in content["rows"]:
    if calls[row["call"]]["code"] == calls[-1]["code"]:
      rows.append(row)
  return calls[-1]["environment"]["device"], rows


def test_committed_rates_follow_from_the_committed_times():
  """A rate is the number of operations divided by the time.

  benchmarks/gpu/gpu.json has both, as they were measured on a GPU.
  """
  _, rows = read_h100_rows()

  rows_with_rates = [row for row in rows if "backward_tflops" in row]
  for row in rows_with_rates:
    # "do" and "name" are "attention" and the name of the implementation.
    shape = {**row["case"]}
    del shape["do"], shape["name"]
    rates = timing.nominal_tflops(
      inputs.Case(**shape), row["forward_ms"], row["both_ms"]
    )
    # Rates in the file are rounded to 0.1, and times to 0.0001 ms.
    for rate in ("forward_tflops", "backward_tflops"):
      assert rates[rate] == pytest.approx(row[rate], rel=1e-3)


# Training steps


class TimedStep(NamedTuple):
  """A training step, and whether its attention was given documents' ids."""

  case: steps.StepCase
  row: dict[str, Any]
  has_documents: bool


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(True, id="packed", marks=pytest.mark.full),
    pytest.param(False, id="one_document"),
  ],
)
def timed_step(request) -> Iterator[TimedStep]:
  """A training step, timed with an attention that records what it is given.

  Rows are packed with several documents, or consist of one.
  """
  # For each call, whether attention was given the documents' ids.
  has_documents = []
  chunked = implementations.implementation_of("chunked")

  def forward(arrays, mask, options):
    has_documents.append(arrays.q_ids is not None)
    return chunked.forward(arrays, mask, options)

  registry = implementations.Registry(implementations.REGISTRY.built_in)
  recorded = dataclasses.replace(chunked, forward=forward)
  # The tests' eight devices share the rows of a batch.
  case = dataclasses.replace(
    steps.tiny_cases()[0], name="recorded", B=8, packed=request.param
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(implementations, "REGISTRY", registry)
    implementations.register("recorded", recorded)
    row = steps.time_step(case, repetitions=2)
    # The first call creates the parameters. The last one is in the step.
    yield TimedStep(case, row, has_documents[-1])


def test_the_row_of_a_step_has_its_throughput(timed_step):
  row = timed_step.row
  num_tokens = timed_step.case.B * timed_step.case.T

  assert row["case"]["attention"] == "diff"
  assert row["seconds_a_step"] > 0
  assert row["tokens_per_second"] == pytest.approx(
    num_tokens / row["seconds_a_step"], rel=0.05
  )


def test_only_packed_rows_have_documents(timed_step):
  """Attention gets the ids of documents if a row has several of them."""
  assert timed_step.has_documents == timed_step.case.packed


# Tables


def timed_row(name: str, ms: float, **case: Any) -> tables.Row:
  """Returns the row of an implementation of V1 at D 128."""
  fields = {"kind": "v1", "D": 128, "T": 4096, "packed": False, **case}
  return {
    "case": {"do": "attention", "name": name, **fields},
    "forward_ms": ms / 3,
    "both_ms": ms,
  }


def check_row(*, right: bool = True, D: int = 128) -> tables.Row:
  """Returns the row of a check of V1."""
  return {"case": {"do": "check", "kind": "v1", "D": D}, "right": right}


def test_a_line_has_the_times_and_the_ratio():
  """Each cell has the milliseconds of the forward pass, and of both passes.

  In `timed_row`, the forward pass takes a third of both.
  """
  fused = timed_row("fused", ms=2.0)
  fused |= {"forward_tflops": 597.4, "backward_tflops": 422.1}
  rows = [fused, timed_row("two_call", ms=4.5), timed_row("tokamax", ms=6.0)]

  line = tables.line(rows)

  # A dash is an implementation without a row. The last but one cell has the
  # rates of `fused`, and the last one how much faster it is than `two_call`:
  # 4.5 / 2.
  assert line == (
    "| v1 D 128 | 4096 | 0.667, 2 | 1.5, 4.5 | – | – | – | 2, 6 | 597, 422 |"
    " 2.25 |"
  )


def test_the_header_has_as_many_columns_as_a_line():
  line = tables.line([timed_row("fused", ms=1.0)])

  for header_line in tables.header().splitlines():
    assert header_line.count("|") == line.count("|")


def test_without_the_fused_kernels_there_is_no_ratio():
  """The last two cells are the rates of the fused kernels, and the ratio."""
  line = tables.line([timed_row("two_call", ms=1.0)])

  assert line.endswith("| – | – |")


@pytest.mark.parametrize(
  ("rows", "choice"),
  [
    pytest.param(
      [check_row(), timed_row("fused", ms=1.0), timed_row("two_call", ms=1.04)],
      "pallas_gpu",
      id="fused_is_4_percent_faster",
    ),
    pytest.param(
      [check_row(), timed_row("fused", ms=1.0), timed_row("two_call", ms=1.02)],
      "two_call",
      id="fused_is_2_percent_faster",
    ),
    pytest.param(
      [
        check_row(),
        timed_row("fused", ms=1.0),
        timed_row("two_call", ms=1.5),
        timed_row("cudnn", ms=0.5),
      ],
      "pallas_gpu",
      id="auto_cannot_take_cudnn",
    ),
    pytest.param(
      [check_row(), timed_row("fused", ms=1.0), timed_row("chunked", ms=1.2)],
      "pallas_gpu",
      id="two_call_cannot_run",
    ),
    pytest.param(
      [timed_row("two_call", ms=2.0), timed_row("chunked", ms=1.0)],
      "chunked",
      id="chunked_is_faster",
    ),
    pytest.param(
      [timed_row("fused", ms=1.0), timed_row("two_call", ms=2.0)],
      "two_call",
      id="fused_is_not_checked",
    ),
    pytest.param(
      [
        check_row(),
        check_row(right=False, D=96),
        timed_row("fused", ms=1.0),
        timed_row("two_call", ms=2.0),
      ],
      "two_call",
      id="fused_is_wrong_at_a_width_that_is_padded_to_this_one",
    ),
    pytest.param(
      [
        check_row(),
        check_row(right=False, D=64),
        timed_row("fused", ms=1.0),
        timed_row("two_call", ms=2.0),
      ],
      "pallas_gpu",
      id="fused_is_wrong_at_another_width",
    ),
  ],
)
def test_auto_takes_the_fastest_right_implementation(rows, choice):
  """A default is replaced only by an implementation that is 3% faster.

  The defaults are "two_call", and "chunked" where that cannot run. The fused
  kernels, "pallas_gpu", must also have passed all their checks.
  """
  [entry] = tables.measured_entries(rows)

  assert entry["implementation"] == choice


def test_there_is_no_entry_without_the_time_of_a_default():
  """The defaults are the implementations "two_call" and "chunked"."""
  rows = [check_row(), timed_row("fused", ms=1.0)]

  assert tables.measured_entries(rows) == []


def test_the_committed_table_follows_from_the_committed_rows():
  device, rows = read_h100_rows()
  committed = json.loads(measured.TABLE.read_text())[device]
  # Attention on packed rows was not timed. These entries compare the times of
  # whole training steps.
  without_steps = [entry for entry in committed if "of" not in entry]

  assert tables.measured_entries(rows) == without_steps


def test_an_update_keeps_the_entries_of_other_devices(tmp_path):
  """The table of measured times has entries for each device."""
  path = tmp_path / "measured.json"
  rows = [timed_row("two_call", ms=1.0)]

  tables.update_measured(path, "one GPU", rows)
  tables.update_measured(path, "another GPU", rows)

  table = json.loads(path.read_text())
  assert table == {
    "one GPU": tables.measured_entries(rows),
    "another GPU": tables.measured_entries(rows),
  }


@pytest.fixture
def table_without_times(tmp_path, monkeypatch) -> Iterator[None]:
  """Replaces the table of measured times, which is read once, by a new one."""
  monkeypatch.setattr(measured, "TABLE", tmp_path / "measured.json")
  measured.table.cache_clear()
  yield
  measured.table.cache_clear()


@pytest.mark.usefixtures("table_without_times")
def test_the_fastest_implementation_of_a_length_is_in_the_table():
  """The implementation "auto" runs the fastest one for the length of a row.

  The name "fused" in a row stands for the implementation "pallas_gpu".
  """
  rows = [
    check_row(right=True, D=128),
    timed_row("fused", ms=1.0, D=128, T=4096),
    timed_row("two_call", ms=2.0, D=128, T=4096),
    timed_row("fused", ms=2.0, D=128, T=16384),
    timed_row("two_call", ms=1.0, D=128, T=16384),
  ]
  tables.update_measured(measured.TABLE, "a GPU", rows)

  # The shapes of V1: [B, T, H, maps, D] and [B, T, H, 2 · D].
  q = jnp.zeros((1, 2, 1, 2, 128))
  v = jnp.zeros((1, 2, 1, 256))
  fastest = {}
  for length in (2048, 4096, 16384):
    mask = Mask(q_length=length, kv_length=length)
    fastest[length] = measured.fastest("a GPU", q, q, v, mask)

  # No length up to 2048 was timed.
  assert fastest == {2048: None, 4096: "pallas_gpu", 16384: "two_call"}


# The command


def test_a_missing_gpu_is_one_sentence():
  """The tests run on CPUs."""
  with pytest.raises(SystemExit) as exit_info:
    command.main([])

  assert exit_info.value.code == (
    "error: this needs a GPU, and JAX's backend is 'cpu';"
    " --interpret runs tiny shapes on a CPU"
  )


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    pytest.param(["--parts", "attention"], "add checks", id="no_checks"),
    pytest.param(["--interpret"], "leave one of them out", id="interpreter"),
  ],
)
def test_a_table_of_measured_times_needs_checks_and_a_gpu(
  flags, message, tmp_path, capsys
):
  """--measured=FILE writes a table, from which attention takes the fastest."""
  path = tmp_path / "measured.json"

  with pytest.raises(SystemExit):
    command.main([*flags, f"--measured={path}"])

  assert message in " ".join(capsys.readouterr().err.split())
  assert not path.exists()


@pytest.fixture
def cpu_settings(monkeypatch):
  """Restores the environment variables that --interpret sets."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("NPROC", "8")


@pytest.mark.skipif(
  jax.__version_info__ >= (0, 11, 2), reason="this JAX has the interpreter"
)
@pytest.mark.usefixtures("cpu_settings")
def test_an_old_jax_without_the_interpreter_is_one_sentence():
  with pytest.raises(SystemExit, match="^error: pallas_gpu needs JAX 0.11.2"):
    command.main(["--interpret"])


@needs_new_jax
@pytest.mark.usefixtures("cpu_settings")
def test_interpreted_kernels_are_right(tmp_path, capsys):
  """--interpret runs the GPU's kernels on a CPU, with tiny shapes."""
  path = tmp_path / "rows.json"

  # The context makes the interpreter faster.
  with host_callbacks():
    command.main(
      ["--interpret", "--parts", "checks", "--kinds", "plain", f"--json={path}"]
    )

  printed = capsys.readouterr().out
  assert "plain D 64 B 1 T 40 H 1: right (out " in printed
  assert "decoding plain D 64 B 1 S 64 H 1: right (out " in printed
  assert "2 of 2 checks right" in printed
  content = json.loads(path.read_text())
  assert content["machine"]["device"] == "cpu"
  assert [row["right"] for row in content["rows"]] == [True, True]


@needs_new_jax
@pytest.mark.usefixtures("cpu_settings")
def test_a_wrong_kernel_is_printed_and_ends_with_status_1(monkeypatch, capsys):
  def check_attention(case):
    # The output has an error of 0.5, and 0.01 is tolerated.
    return checks.Check(
      errors={"out": 0.5}, tolerance=1e-2, is_deterministic=True
    )

  # The command calls this in place of the check of a kernel.
  monkeypatch.setattr(checks, "check_attention", check_attention)
  # There are no cases of decoding.
  monkeypatch.setattr(inputs, "tiny_decode_cases", lambda: [])

  with pytest.raises(SystemExit) as exit_info:
    command.main(["--interpret", "--parts", "checks", "--kinds", "v1"])

  assert exit_info.value.code == 1
  assert "v1 D 64 B 1 T 40 H 1: WRONG (out 5.0e-01)" in capsys.readouterr().out
