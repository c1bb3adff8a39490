"""benchmarks/gpu and gpu_day: hangs and crashes cost one case, results survive being cut off, checks are neither blind nor wrong, and the
day's calls run end to end on a CPU."""

import concurrent.futures
import functools
import importlib.util
import json
import lzma
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_day, train_step
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
  attention,
  cases,
  checks,
  clock,
  inputs,
  pool,
  ptxas,
  report,
  results,
  verdict,
)
from diffjax.config import Config, DataConfig, ModelConfig, TrainConfig
from diffjax.ops.diff_attention import api
from diffjax.ops.diff_attention.gpu import measured

ROOT = pathlib.Path(__file__).parents[1]

# A worker without JAX: a case's "act" says what becomes of it. "poison" is right, and makes what the process does next fail.
WORKER = """
import json, os, signal, sys, time
from benchmarks.gpu import worker
acts = json.loads(sys.argv[1]) if sys.argv[1:] else {}
poisoned = False
def prepare(case):
  global poisoned
  if poisoned:
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
  act = case.get("act") or acts.get(str(case.get("D")), "right")
  if act == "hang early":
    time.sleep(600)
  if act == "error":
    raise ValueError("no such shape")
  def run():
    global poisoned
    poisoned = act == "poison"
    if act == "hang":
      time.sleep(600)
    if act == "crash":
      print("a stack trace", file=sys.stderr, flush=True)
      os.kill(os.getpid(), signal.SIGSEGV)
    print("noise")
    return {"right": act != "wrong", "errors": {}, "process": os.getpid(), "begun": time.monotonic(), "forward_ms": 1.0, "both_ms": 3.0}
  return run
worker.serve(prepare)
"""


def start():
  return pool.Worker([sys.executable, "-c", WORKER])


def run(acts, processes=1, limit=1.5, seconds=120.0, how=pool.run_beside):
  """The results by case number."""
  found = {}
  record = lambda case, result: found.update({case["n"]: result})
  those = [{"n": n, "act": act} for n, act in enumerate(acts)]
  deadline = time.monotonic() + seconds
  if how is pool.run_beside:
    how(those, start, processes, (limit, limit), deadline, record)
  else:
    how(those, start, processes, (limit, limit), deadline, lambda: None, record)
  return found


def test_a_hang_or_a_crash_costs_one_case():
  found = run(["right", "hang", "crash", "hang early", "error", "right"])
  assert [row.get("lost", "").partition(",")[0] for row in found.values()] == [
    "",
    "hang",
    "crash",
    "not compiled",
    "",
    "",
  ]
  assert (
    found[2]["lost"] == "crash, SIGSEGV"
    and "a stack trace" in found[2]["stderr"]
  )
  assert found[4] == {"error": "ValueError: no such shape"}
  assert (
    found[0]["right"]
    and found[5]["right"]
    and found[0]["process"] != found[5]["process"]
  )


def test_a_process_goes_on_until_it_fails():
  """An error that an earlier case left behind is not the later one's."""
  found = run(["right", "right", "poison", "right"])
  assert all(row["right"] for row in found.values())
  assert (
    found[0]["process"]
    == found[1]["process"]
    == found[2]["process"]
    != found[3]["process"]
  )


def test_what_the_deadline_cuts_off_is_not_recorded():
  begun = time.monotonic()
  assert (
    set(run(["right", "hang", "right"], limit=60, seconds=3)) == {0}
    and time.monotonic() - begun < 20
  )


def test_timings_have_a_process_each_and_the_gpu_alone():
  found = run(
    ["right", "hang early", "right", "crash", "hang", "right"],
    processes=3,
    how=pool.run_in_turn,
  )
  assert [row.get("lost", "").partition(",")[0] for row in found.values()] == [
    "",
    "not compiled",
    "",
    "crash",
    "hang",
    "",
  ]
  good = [found[n] for n in (0, 2, 5)]
  assert len({row["process"] for row in good}) == 3 and good == sorted(
    good, key=lambda row: row["begun"]
  )


def test_processes_end_with_their_parent():
  code = f"""if True:
    import sys, time
    from benchmarks.gpu import pool
    worker = pool.Worker([sys.executable, "-c", {WORKER!r}])
    assert worker.receive(60) == "started"
    worker.send({{"act": "hang early"}})
    print(worker._process.pid, flush=True)
    time.sleep(600)"""
  parent = subprocess.Popen(
    [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
  )
  child = int(parent.stdout.readline())
  parent.kill()
  parent.wait()
  state = lambda: (
    pathlib.Path(f"/proc/{child}/stat")
    .read_text()
    .rpartition(")")[2]
    .split()[0]
  )
  deadline = time.monotonic() + 30
  while pathlib.Path(f"/proc/{child}").exists() and state() != "Z":
    assert time.monotonic() < deadline
    time.sleep(0.1)


def test_results_survive_sigkill_at_any_time(tmp_path):
  code = f"""if True:
    import pathlib
    from benchmarks.gpu import results
    store = results.Results(pathlib.Path({str(tmp_path)!r}) / "gpu.json", {{"device": "cpu", "mosaic": {{}}, "versions": {{}}}})
    print(flush=True)
    for n in range(10**9):
      store.add({{"n": n % 200}}, {{"right": True, "text": "x" * 2000}})"""
  for delay in (0.0, 0.05, 0.11, 0.23, 0.31):
    process = subprocess.Popen(
      [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = json.loads((tmp_path / "gpu.json").read_text())
  assert (
    len(found["calls"]) == 5
    and len({row["case"]["n"] for row in found["rows"]})
    == len(found["rows"])
    > 0
  )


ENVIRONMENT = {
  "backend": "cpu",
  "device": "cpu",
  "driver": "none",
  "processors": 2,
  "versions": {"jax": "1"},
  "mosaic": {"path": "/cuda/ptxas", "version": "13.5"},
}


def test_what_was_found_elsewhere_does_not_hold_here(tmp_path, monkeypatch):
  path, ours, theirs = (
    tmp_path / "gpu.json",
    {"name": "fused"},
    {"name": "cudnn"},
  )
  for case in (ours, theirs):
    results.Results(path, ENVIRONMENT).add(case, {"right": True})
  there = lambda **changes: [
    case
    for case in (ours, theirs)
    if results.Results(path, ENVIRONMENT | changes).find(case)
  ]
  assert there() == [ours, theirs]
  assert (
    there(device="another")
    == there(mosaic={"version": "13.0"})
    == there(versions={"jax": "2"})
    == []
  )
  monkeypatch.setattr(results, "digest", lambda: "other code")
  assert there() == [theirs]
  results.Results(path, ENVIRONMENT | {"device": "another"}).add(
    ours, {"right": False}
  )
  assert len(results.Results(path, ENVIRONMENT).rows) == 3, (
    "one device's row does not replace another's"
  )


def test_the_digest_is_of_the_code(tmp_path):
  (tmp_path / "kernel.py").write_text("a = 1")
  before = results.digest(tmp_path)
  (tmp_path / "table.json").write_text("{}")
  assert results.digest(tmp_path) == before
  (tmp_path / "kernel.py").write_text(
    '"""A docstring."""\n\na = 1  # a comment'
  )
  assert results.digest(tmp_path) == before
  (tmp_path / "kernel.py").write_text("a = 2")
  assert results.digest(tmp_path) != before
  (tmp_path / "kernel.py").write_text('def f():\n  """One."""\n  return "two"')
  before = results.digest(tmp_path)
  (tmp_path / "kernel.py").write_text(
    'def f():\n  """Another."""\n  return "two"'
  )
  assert results.digest(tmp_path) == before
  (tmp_path / "kernel.py").write_text('def f():\n  return "three"')
  assert results.digest(tmp_path) != before


@pytest.fixture
def calls(tmp_path, monkeypatch, capsys):
  """calls(…): exit code and output of the command with these flags, on a GPU of that environment, whose checks of D do as `acts` says."""
  parts = {
    "checks": [dict(do="check", kind="v1", D=D, T=70) for D in (64, 128)]
  }
  timed = dict(do="attention", kind="v1", D=64, B=1, T=64, H=1, packed=False)
  parts["v1_64"] = [{**timed, "name": name} for name in ("fused", "two_call")]
  monkeypatch.setattr(cases, "parts", lambda: parts)
  monkeypatch.setattr(ptxas, "put_first", lambda path: None)

  def call(*flags, acts=None, **environment):
    monkeypatch.setattr(
      ptxas,
      "probe",
      lambda: {
        **ENVIRONMENT,
        "backend": "gpu",
        "fusions": {"unknown": ""},
        **environment,
      },
    )
    command_line = [sys.executable, "-c", WORKER, json.dumps(acts or {})]
    monkeypatch.setattr(
      pool, "start", lambda memory, rehearse: pool.Worker(command_line)
    )
    with pytest.raises(SystemExit) as exit:
      command.main(["--out", str(tmp_path), "--processes=2", *flags])
    return exit.value.code, capsys.readouterr().out

  return call


def test_a_second_call_goes_on(calls, tmp_path):
  code, text = calls("--parts", "checks", acts={128: "wrong"})
  assert code == 1 and "WRONG" in text and "1 of 2 checks right" in text
  code, text = calls()
  assert (
    "checks, after" in text
    and "0 to do, 2 are there" in text
    and "v1_64" in text
    and code == 1
  )
  assert (
    "the kernel of v1, D 128, is out" in text
    and "v1, D 64, T 64: auto takes two_call" in text
  )
  assert json.loads((tmp_path / "measured.json").read_text())["cpu"][0][
    "ms"
  ] == {"pallas_gpu": 3.0, "two_call": 3.0}
  assert (tmp_path / "report.md").read_text().strip() in text
  code, text = calls("--again=failed")
  assert (
    code == 0
    and ": 1 to do, 1 are there" in text
    and ": 0 to do, 2 are there" in text
  )
  code, text = calls("--again=all", "--parts", "v1_64")
  assert re.search(r"v1_64, after \d+ s: 2 to do\n", text)


def test_time_that_is_up_is_said(calls):
  code, text = calls("--seconds=0")
  missing = re.findall(r"^missing: (\d+) of (.*)$", text, re.M)
  assert code == 1 and missing == [
    ("1", "check v1 D 64"),
    ("1", "check v1 D 128"),
    ("2", "attention v1 D 64"),
  ]
  calls("--parts", "v1_64")
  code, text = calls("--seconds=0")
  assert "the kernel of v1, D 64, is out" in text, (
    "it was timed, and not checked"
  )


def test_old_assemblers_are_refused(calls):
  old = {"mosaic": {"version": "13.2.78", "path": "/cuda/bin/ptxas"}}
  code, _ = calls(**old)
  assert (
    code.startswith(
      "error: ptxas 13.2.78 (/cuda/bin/ptxas) assembles the kernels, and before 13.3 "
    )
    and "--any_ptxas" in code
  )
  assert calls(mosaic={"unknown": "it did not run"})[0].startswith(
    "error: it is not known which ptxas"
  )
  assert calls("--any_ptxas", **old)[0] == 0
  assert (
    ptxas.refusal({"mosaic": {"version": "13.3"}})
    is ptxas.refusal({"mosaic": {"version": "14.0.1"}})
    is None
  )


def test_static_is_another_module(monkeypatch):
  given = []
  monkeypatch.setitem(
    sys.modules, "benchmarks.gpu.static", type(sys)("benchmarks.gpu.static")
  )
  sys.modules["benchmarks.gpu.static"].main = given.append
  command.main(["--static", "--more"])
  assert given == [["--more"]]


def fake_ptxas(folder, version):
  folder.mkdir()
  (folder / "ptxas").write_text(
    f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n"
  )
  (folder / "ptxas").chmod(0o755)
  return folder


def test_the_newest_assembler_comes_first(tmp_path, monkeypatch):
  older, newer = (
    fake_ptxas(tmp_path / "older", "13.9.1"),
    fake_ptxas(tmp_path / "newer", "13.10.2"),
  )
  monkeypatch.setattr(sys, "path", [])
  monkeypatch.setenv("PATH", f"{older}:{os.environ['PATH']}")
  assert ptxas.newest() == older / "ptxas" and ptxas.version(
    ptxas.newest()
  ) == (13, 9, 1)
  packaged = tmp_path / "site/nvidia/cu13/bin"
  packaged.parent.mkdir(parents=True)
  newer.rename(packaged)
  monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
  assert (
    ptxas.newest() == packaged / "ptxas"
    and ptxas.newest(older) == older / "ptxas"
  )
  ptxas.put_first(ptxas.newest())
  assert subprocess.run(
    ["ptxas"], capture_output=True, text=True
  ).stdout.endswith("V13.10.2\n")


@pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2)
  or importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="needs the compiler for Hopper",
)
def test_the_probe_tells_which_assembler_mosaic_takes(tmp_path, monkeypatch):
  """The first one on PATH, whatever is packaged; XLA's fusions take the packaged one."""
  packaged = ptxas.newest()
  told = fake_ptxas(tmp_path / "first", "13.0.88") / "ptxas"
  told.write_text(
    f'#!/bin/sh\n[ "$1" = --version ] && exec {packaged} --version | sed \'s/V1.*/V13.0.88/\'\nexec {packaged} "$@"\n'
  )
  monkeypatch.setenv("PATH", f"{told.parent}:{os.environ['PATH']}")
  found = ptxas.probe()
  assert found["mosaic"] == {
    "path": str(told),
    "version": "13.0.88",
  } and "13.0.88" in ptxas.refusal(found)
  assert found["fusions"]["path"] == str(packaged)


@functools.cache
def gradients(kind, T, S, **options):
  """Inputs in bfloat16, and reference's output and gradients in float32."""
  case = dict(kind=kind, D=64, B=2, H=2, T=T, S=S)
  (_, given), (theirs, exact) = checks.programs({**case, **options})
  return given, jax.jit(theirs)(*exact)


def test_one_key_is_right_within_rounding_and_wrong_beyond():
  """Where a query sees one key, dQ and dK cancel to nothing but rounding."""
  for kind in inputs.MAPS:
    (d_out, q, k, v, *lam), expected = gradients(
      kind, 1, 1, H=64
    )  # of few heads, chance could make the halves small
    assert checks.norm(expected[1]) < 1e-3 * checks.norm(d_out)
    floors = checks.floors(d_out, q, k, v)
    # δ from an output in bfloat16, as a kernel has it: the halves of dS cancel to within 2⁻⁹
    rounding = [
      jnp.zeros_like(expected[0]),
      *(2**-9 * _half(d_out, x, v) for x in (k, q)),
    ]
    rounded = [e + r for e, r in zip(expected, rounding, strict=False)]
    assert (
      max(checks.relative_errors(rounded, expected, floors))
      < checks.TOLERANCE["bfloat16"]
    )
    wrong = [
      expected[0],
      *(
        e + 0.1 * _half(d_out, x, v)
        for e, x in zip(expected[1:3], (k, q), strict=True)
      ),
    ]
    errors = checks.relative_errors(wrong, expected, floors)
    assert min(errors[1:]) > 3 * checks.TOLERANCE["bfloat16"]


def _half(d_out, x, v):
  """A half of dS, dO·v, times a key or a query: of one key and query, heads apart."""
  return (
    jnp.einsum(
      "bthv,bshv->bth", d_out.astype(jnp.float32), v.astype(jnp.float32)
    )[:, :, :, None, None]
    * x.astype(jnp.float32)
    / 8
  )


@pytest.mark.parametrize("kind", inputs.MAPS)
@pytest.mark.parametrize(
  "options", [{}, {"causal": False}, {"window": 20, "segments": True}], ids=str
)
def test_the_floor_is_below_ordinary_gradients(kind, options):
  """No tolerance is widened but where gradients cancel: a gradient that is 1.5% off fails."""
  (d_out, q, k, v, *_), expected = gradients(kind, 128, 128, **options)
  floors = checks.floors(d_out, q, k, v)
  assert all(
    floor < checks.norm(e) for floor, e in zip(floors, expected, strict=False)
  )
  errors = checks.relative_errors(
    [1.015 * e for e in expected], expected, floors
  )
  assert min(errors) > checks.TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
  "case", [dict(T=8), dict(S=8, decode=True)], ids=["attention", "decoding"]
)
def test_the_reference_is_exact_in_any_thread(case):
  """All of its products are of full precision, those of the backward pass too, whichever thread traces it; and so is a product that does
  not ask for that itself, as those of `reference` do."""
  _, (theirs, exact) = checks.programs(dict(kind="v1", D=64, B=1, H=1, **case))
  programs = [
    (theirs, exact),
    (checks.exactly(jnp.matmul), (jnp.ones((4, 4)), jnp.ones((4, 4)))),
  ]
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    texts = [
      thread.submit(lambda f=f, x=x: jax.jit(f).lower(*x).as_text()).result()
      for f, x in programs
    ]
  for text in texts:
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all(
      "precision = [HIGHEST, HIGHEST]" in line for line in products
    )


def timed(kind="v1", D=128, T=4096, packed=False, **ms):
  return [
    {
      "case": dict(
        do="attention", kind=kind, D=D, B=1, T=T, H=1, packed=packed, name=name
      ),
      "both_ms": taken,
    }
    for name, taken in ms.items()
  ]


def checked(kind="v1", D=128, **result):
  return [
    {
      "case": dict(do="check", kind=kind, D=D, T=1),
      **(result or {"right": True}),
    }
  ]


@pytest.mark.parametrize(
  ("rows", "expected"),
  [
    (checked() + timed(fused=1.0, two_call=1.04), "pallas_gpu"),
    (checked() + timed(fused=1.0, two_call=1.02), "two_call"),
    (
      checked() + timed(fused=1.0, two_call=1.5, cudnn=0.5, tokamax=0.5),
      "pallas_gpu",
    ),
    (checked() + timed(fused=1.0, chunked=1.2), "pallas_gpu"),
    (checked() + timed(two_call=2.0, chunked=1.0), "chunked"),
    (timed(fused=1.0, two_call=2.0, chunked=3.0), "two_call"),
    (
      checked() + checked(D=96, right=False) + timed(fused=1.0, two_call=2.0),
      "two_call",
    ),
    (
      checked() + checked(lost="hang") + timed(fused=1.0, two_call=2.0),
      "two_call",
    ),
    (
      checked() + checked(D=64, lost="hang") + timed(fused=1.0, two_call=2.0),
      "pallas_gpu",
    ),
    (checked() + timed(fused=1.0), None),
  ],
)
def test_the_verdict(rows, expected):
  entries = verdict.table(rows)
  assert [entry["implementation"] for entry in entries] == (
    [expected] if expected else []
  )


def test_whole_steps_decide_where_attention_was_not_timed():
  """Packed rows here; on rows of one document the times of attention alone count, whatever steps took."""
  step = lambda name, taken, packed: {
    "case": dict(
      do="step",
      attention="diff",
      name=name,
      packed=packed,
      T=4096,
      head_dim=128,
    ),
    "seconds_a_step": taken,
  }
  rows = timed(fused=2.0, two_call=1.0) + [
    step(name, taken, p)
    for p in (True, False)
    for name, taken in (("pallas_gpu", 1), ("two_call", 2))
  ]
  assert [
    (x["packed"], x["implementation"]) for x in verdict.table(checked() + rows)
  ] == [(False, "two_call"), (True, "pallas_gpu")]
  assert (
    "packed rows, by whole training steps: auto takes pallas_gpu"
    in verdict.words(checked() + rows)[-1]
  )
  assert {x["implementation"] for x in verdict.table(rows)} == {
    "two_call"
  }  # a kernel that was not checked


def test_the_file_names_no_place_of_the_machine(tmp_path):
  places = {
    "mosaic": {"path": "/home/me/ptxas", "version": "13.5.37"},
    "cuda": "/home/me/cuda",
  }
  store = results.Results(tmp_path / "gpu.json", ENVIRONMENT | places)
  assert (
    "13.5.37" in store._path.read_text()
    and "/home" not in store._path.read_text()
  )


def test_the_table_that_is_committed_is_the_verdict_of_the_rows_that_are():
  found = json.loads((ROOT / "benchmarks/gpu/gpu.json").read_text())
  now = found["calls"][-1]
  rows = [
    row
    for row in found["rows"]
    if found["calls"][row["call"]]["code"] == now["code"]
  ]
  there = [row["case"] for row in rows]
  missing = [
    {"case": case, "absent": "not done"}
    for case in cases.parts()["checks"]
    if case not in there
  ]
  device = now["environment"]["device"]
  assert rows and json.loads(measured.TABLE.read_text())[
    device
  ] == verdict.table(rows + missing)


def test_auto_reads_the_verdict(tmp_path, monkeypatch):
  rows = (
    checked()
    + timed(fused=1.0, two_call=2.0)
    + timed(T=16384, fused=2.0, two_call=1.0)
  )
  monkeypatch.setattr(measured, "TABLE", tmp_path / "measured.json")
  verdict.write(measured.TABLE, "a GPU", rows)
  measured.table.cache_clear()
  q, v = jnp.zeros((1, 2, 1, 2, 128)), jnp.zeros((1, 2, 1, 256))
  assert [
    measured.fastest("a GPU", q, q, v, api.Mask(T, T))
    for T in (2048, 4096, 16384)
  ] == [None, "pallas_gpu", "two_call"]
  measured.table.cache_clear()


def test_clocks_are_read_where_they_can_be():
  rows = "1980, 2619, 310.5, 44\\n1755, 2619, [N/A], 46\\n"
  with clock.Gauge(["sh", "-c", f"printf '{rows}'; sleep 60"]) as gauge:
    deadline, read = time.monotonic() + 30, []
    while len(gauge._samples) < 2:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    read = gauge.take()
  assert read == {
    "sm_mhz": [1755, 1867.5, 1980],
    "memory_mhz": [2619] * 3,
    "watts": [310.5] * 3,
    "celsius": [44, 45, 46],
  }
  with clock.Gauge([]) as gauge:
    assert gauge.take() == {}


def test_a_profile_is_summed_up_by_kernel():
  event = lambda name, ms: types.SimpleNamespace(
    name=name, duration_ns=ms * 1e6
  )
  line = lambda name, *events: types.SimpleNamespace(name=name, events=events)
  gpu = [
    line(
      "Stream #7(Compute)",
      event("gemm", 2),
      event("void fusion", 1),
      event("gemm", 2),
    ),
    line("Stream #9", event("d_q_mosaic_gpu", 3)),
  ]
  planes = [
    ("/device:GPU:0", [*gpu, line("XLA Ops", event("gemm", 9))]),
    ("/host:CPU", [line("Stream #1", event("gemm", 9))]),
  ]
  profile = types.SimpleNamespace(
    planes=[
      types.SimpleNamespace(name=name, lines=lines) for name, lines in planes
    ]
  )
  assert list(clock.by_kernel(profile).items()) == [
    ("gemm", 4),
    ("d_q", 3),
    ("fusion", 1),
  ]
  assert (
    clock.kernels(lambda: jax.block_until_ready(jnp.ones(3) + 1)) == {}
  )  # without a GPU


@pytest.mark.skipif(
  importlib.util.find_spec("tokamax") is not None, reason="it is installed here"
)
def test_tokamax_may_be_absent():
  case = dict(
    do="attention",
    kind="v1",
    D=64,
    B=1,
    T=64,
    H=1,
    packed=False,
    name="tokamax",
  )
  result = attention.prepare(case)()
  assert result == {
    "absent": "not installed"
  } and "not installed" in report.line(case, result)


@pytest.mark.parametrize("packed", [True, False])
def test_steps_on_packed_rows_and_on_rows_of_one_document(packed, monkeypatch):
  told = []
  attend = api._attention_on_one_device
  monkeypatch.setattr(
    api,
    "_attention_on_one_device",
    lambda arrays, *options: (
      told.append(arrays.q_ids) or attend(arrays, *options)
    ),
  )
  model = ModelConfig(
    vocab_size=64,
    num_layers=1,
    embed_dim=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=32,
    max_length=16,
  )
  train_step.stepper(
    Config(
      model=model, data=DataConfig(length=16), train=TrainConfig(batch_size=8)
    ),
    packed=packed,
  )
  in_the_step = told[-1]  # the first call makes the parameters
  assert (in_the_step is not None) == packed


def test_every_part_is_in_a_call():
  whole = list(cases.parts())
  assert whole[0] == "checks"
  for name in gpu_day.CALLS:
    assert sorted(gpu_day.parts(name, False)) == sorted(whole)
    assert sorted(gpu_day.parts(name, True)) == sorted(cases.rehearsal())
  assert gpu_day.parts("1", False)[:3] == ["checks", "v1_128", "steps"]


def test_small_checks_come_first():
  sizes = [
    case.get("T", 1) * case.get("S", case.get("T", 1))
    for case in cases.parts()["checks"]
  ]
  assert sizes[0] == 1 and sizes == sorted(sizes) and len(sizes) > 30


@pytest.fixture
def place(tmp_path):
  """A directory with a pack of no packages, whose ptxas says that it is 13.5."""
  (tmp_path / "pack/wheels").mkdir(parents=True)
  (tmp_path / "pack/ptxas.xz").write_bytes(
    lzma.compress(b"#!/bin/sh\necho 'release 13.5, V13.5.37'\n")
  )
  return tmp_path


def test_a_call_without_a_pack_is_one_line(tmp_path):
  with pytest.raises(
    SystemExit,
    match=f"^error: {tmp_path}/pack/ptxas.xz is missing; python -m benchmarks.gpu_day pack",
  ):
    gpu_day.main(["1", str(tmp_path)])


def test_a_call_unpacks_and_goes_on_from_what_is_there(place, monkeypatch):
  """DIR/out is copied to $OUT, the packed ptxas named, and the benchmark's end is the call's."""
  (place / "out").mkdir()
  (place / "out/gpu.json").write_text("earlier")
  (place / "OUT").mkdir()
  stand_in = place / "stand_in/benchmarks/gpu"
  stand_in.mkdir(parents=True)
  code = "import os, subprocess, sys; print(sys.argv[1:]); sys.stderr.write('also this\\n'); sys.exit(3)"
  for file, text in (
    ("__init__.py", ""),
    ("__main__.py", code),
    ("../__init__.py", ""),
  ):
    (stand_in / file).write_text(text)
  monkeypatch.setattr(gpu_day, "ROOT", place / "stand_in")
  monkeypatch.setenv("OUT", str(place / "OUT"))
  with pytest.raises(SystemExit) as exit:
    gpu_day.main(["2", str(place), "--limit=100", "--again=failed"])
  text = (place / "OUT/log_2.txt").read_text()
  assert (
    exit.value.code == 3
    and "also this" in text
    and "'--again=failed'" in text
    and "'--seconds=8" in text
  )
  assert (place / "OUT/gpu.json").read_text() == "earlier" and ptxas.version(
    place / "work/bin/ptxas"
  ) == (13, 5, 37)


@pytest.mark.full
@pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2),
  reason="the kernels need JAX 0.11.2 or newer",
)
def test_the_rehearsal(place):
  """The day's calls: the first is killed while it times, the next one goes on and finishes all; then nothing is left to do."""
  environment = {
    **os.environ,
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
  }
  environment.pop("XLA_FLAGS")
  command = lambda number: [
    sys.executable,
    "-m",
    "benchmarks.gpu_day",
    number,
    str(place),
    "--rehearse",
    "--limit=1500",
    "--processes=2",
  ]
  first = subprocess.Popen(
    command("1"),
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  for line in first.stdout:
    if "two_call" in line:
      os.killpg(first.pid, signal.SIGKILL)
      break
  first.wait()
  found = json.loads((place / "out/gpu.json").read_text())["rows"]
  assert len(
    [row for row in found if row["case"]["do"] == "check" and row["right"]]
  ) == len(cases.rehearsal()["checks"]), found
  result = subprocess.run(
    command("2"),
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=1800,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  assert (
    "6 of 6 checks right" in result.stdout
    and "missing" not in result.stdout
    and "LOST" not in result.stdout
  )
  assert re.search(r"checks, after \d+ s: 0 to do, 6 are there", result.stdout)
  choices = {
    entry["implementation"]
    for entry in json.loads((place / "out/measured.json").read_text())["cpu"]
  }
  assert choices <= {"two_call", "chunked"}, "the interpreter is not fast"
  result = subprocess.run(
    command("3"),
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert result.returncode == 0 and all(
    ": 0 to do" in line
    for line in result.stdout.splitlines()
    if ", after " in line
  ), result.stdout
