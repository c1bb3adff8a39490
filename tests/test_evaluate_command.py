"""python -m diffjax.evaluate, as a user runs it: results of a trained pair, and errors of one line."""

import dataclasses
import functools
import inspect
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from diffjax.config import (
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.evals import SUITES, harness
from diffjax.evals.report import intervals
from diffjax.evals.suite import suite_class
from diffjax.parallel.mesh import make_mesh
from diffjax.training import loop
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.metrics import read_log
from diffjax.training.program import build
from tests.harness import in_process, own_variants
from tests.harness.tiers import full


def run(*args):
  result = in_process.call("diffjax.evaluate", *args)
  assert "Traceback" not in result.stderr
  return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """A DIFF model after two steps; its Transformer twin (of shorter rows) and one of another vocabulary, as if after two."""
  path = tmp_path_factory.mktemp("runs")
  texts = [
    "".join(
      f"document {index}, line {line}: {line * index % 97}\n"
      for line in range(40)
    )
    for index in range(40)
  ]
  (path / "text").mkdir()
  for index, text in enumerate(texts):
    (path / "text" / f"{index}.txt").write_text(text)
  model = ModelConfig(
    num_layers=2,
    embed_dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=32,
    max_length=512,
  )
  data = DataConfig(
    source=f"text:{path}/text/*.txt",
    validation_fraction=0.3,
    length=64,
    prepared_dir=str(path / "rows"),
  )
  config = Config(
    model=model,
    data=data,
    optimizer=OptimizerConfig(warmup_steps=1),
    eval=EvalConfig(interval=2, rows=5),
    train=TrainConfig(steps=2, batch_size=8, log_interval=1, sample_tokens=0),
  )
  loop.train(config, str(path / "diff"))
  twin = dataclasses.replace(
    model, attention="softmax", num_heads=4, num_kv_heads=2, head_norm=False
  )
  shorter = dataclasses.replace(data, length=32, mode="streamed")
  save(
    path / "shared",
    dataclasses.replace(
      config, model=dataclasses.replace(model, num_kv_heads=2)
    ),
  )
  save(
    path / "transformer", dataclasses.replace(config, model=twin, data=shorter)
  )
  train_tokenizer(texts, 300, path / "tokenizer")
  words = dataclasses.replace(
    data, tokenizer=str(next((path / "tokenizer").glob("*.tiktoken")))
  )
  save(
    path / "other",
    dataclasses.replace(
      config, data=words, model=dataclasses.replace(model, vocab_size=300)
    ),
  )
  return path


def save(workdir, config):
  program = build(config, make_mesh(config.mesh, jax.devices()[:1]))
  with Checkpoints(str(workdir), keep=1) as checkpoints:
    checkpoints.save(2, program.init(), data_state={}, config=config.to_dict())
    checkpoints.wait()


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
  """Restricts lm-eval to piqa, since reading all tasks takes seconds."""

  @functools.cache
  def manager():
    from lm_eval import tasks

    return tasks.TaskManager(
      include_path=str(pathlib.Path(tasks.__file__).with_name("piqa")),
      include_defaults=False,
    )

  monkeypatch.setattr(harness.harness_tasks, "task_manager", manager)


def load(path):
  def refuse(name):
    raise ValueError(name)

  return json.loads(path.read_text(), parse_constant=refuse)


QUICK = [
  "--set.validation.rows=6",
  "--set.position_nll.rows=2",
  "--set.position_nll.length=128",
  "--set.needle.pairs=1/1",
  "--set.needle.samples=2",
  "--set.needle.batch_tokens=1024",
  "--set.needle.depths=0.0,1.0",
  "--set.attention.needles=1",
  "--set.attention.samples=2",
  "--set.outliers.tokens=512",
  "--set.quantised.measurements=validation",
  "--set.quantised.bits=4",
  "--set.quantised.validation.rows=4",
  "--set.difference_map.rows=4",
  "--set.many_shot.samples=4",
  "--set.many_shot.batch_tokens=1024",
  "--set.many_shot.sets=1",
  "--set.many_shot.orders=2",
]


SOME = ["validation", "needle"]
MORE = [
  *SOME,
  "difference_map",
  "position_nll",
  "attention",
  "outliers",
  "quantised",
  "many_shot",
]


@pytest.mark.parametrize("suites", [SOME, *full([MORE])], ids=len)
def test_suites_of_a_pair(runs, tmp_path, monkeypatch, suites):
  monkeypatch.setattr(
    intervals, "RESAMPLES", 99
  )  # of an interval's ends nothing is asked here
  result = run(
    f"--suite=report,{','.join(suites)}",
    f"--workdir={runs / 'diff'}",
    f"--against={runs / 'transformer'}",
    f"--out={tmp_path}",
    *QUICK,
  )
  assert result.returncode == 0, result.stderr
  for suite in suites:
    found = load(tmp_path / f"{suite}.json")
    assert found["suite"] == suite and found["figures"]
    assert [
      (model["attention"], model["name"]) for model in found["models"]
    ] == [
      ("diff", f"{runs / 'diff'} at step 2"),
      ("softmax", f"{runs / 'transformer'} at step 2"),
    ]
    assert all(
      model["parameters"] > 5000 and model["seconds"] >= 0
      for model in found["models"]
    )
    for row in found["figures"]:
      assert (
        row["units"]
        == row["against"]["units"]
        == row["difference"]["units"]
        > 0
      )
    assert (suite == "validation") or (
      tmp_path / f"{suite}.png"
    ).stat().st_size > 1000
    assert f"{tmp_path / suite}.json" in result.stdout
    assert f"{tmp_path / suite}.md" in result.stdout
    file_lines = (tmp_path / f"{suite}.md").read_text().splitlines()
    table = [line for line in file_lines if line.startswith("|")]
    assert len(table) == len(found["figures"]) + 2
  for line in result.stdout.splitlines():
    has_path = str(runs) in line or str(tmp_path) in line
    assert len(line) <= 80 or has_path, line
  assert load(tmp_path / "validation.json")["settings"]["rows"] == 6
  loss = load(tmp_path / "validation.json")["figures"][0]
  assert loss["difference"]["value"] == pytest.approx(
    loss["value"] - loss["against"]["value"]
  )
  assert (
    "AR-Hit (nats/token)" in result.stdout
    and "validation: 6 rows" in result.stdout
    and f"{loss['difference']['value']:.4g} [" in result.stdout
  )
  assert not [
    file
    for file in os.listdir(tmp_path)
    if not file.endswith((".json", ".md", ".png", ".html"))
  ]
  page = (tmp_path / "report.html").read_text()  # made last, whatever the order
  assert (
    all(f'<section id="{suite}">' in page for suite in suites)
    and "λ by layer" in page
  )
  assert result.stderr.count("loading") == 2  # each model once


@pytest.mark.parametrize("suites", [SOME, *full([MORE])], ids=len)
def test_several_devices_measure_what_one_does(
  runs, tmp_path, monkeypatch, suites
):
  monkeypatch.setattr(
    intervals, "RESAMPLES", 99
  )  # of intervals nothing is asked here
  for devices in (1, 2):
    out = tmp_path / str(devices)
    result = run(
      f"--suite={','.join(suites)}",
      f"--workdir={runs / 'shared'}",
      f"--out={out}",
      f"--tensor={devices}",
      *QUICK,
    )
    assert result.returncode == 0, result.stderr
  for suite in suites:
    alone, shared = (
      load(tmp_path / devices / f"{suite}.json")["figures"] for devices in "12"
    )
    assert [row["name"] for row in shared] == [row["name"] for row in alone]
    assert [row["value"] for row in shared] == pytest.approx(
      [row["value"] for row in alone], rel=1e-5, abs=1e-6, nan_ok=True
    )


def test_the_losses_are_those_of_training(runs, tmp_path):
  result = run(
    "--suite=validation", f"--workdir={runs / 'diff'}", f"--out={tmp_path}"
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith("validation: 5 rows\n")
  log = read_log(runs / "diff" / "metrics.jsonl")[-1]
  names = ("loss", "perplexity", "bits_per_byte", "ar_hit", "others")
  figures = load(tmp_path / "validation.json")["figures"]
  for name, figure in zip(names, figures, strict=True):
    assert figure["units"] == 5
    assert figure["value"] == pytest.approx(log[f"validation/{name}"], rel=1e-5)


def test_one_model_and_a_step_of_it(runs):
  result = run(
    "--suite=validation",
    f"--workdir={runs / 'transformer'}",
    "--step=2",
    "--set.validation.rows=-1",
  )
  assert result.returncode == 0, result.stderr
  found = load(runs / "transformer" / "evals" / "validation.json")
  assert (
    len(found["models"]) == 1
    and "against" not in found["figures"][0]
    and "difference" not in result.stdout
  )
  # Beside another, it is measured on the other's rows
  result = run(
    "--suite=validation",
    f"--workdir={runs / 'diff'}",
    f"--against={runs / 'transformer'}",
    "--set.validation.rows=-1",
  )
  assert result.returncode == 0, result.stderr
  both = load(runs / "diff" / "evals" / "validation.json")["figures"][0]
  assert (
    both["units"]
    == both["against"]["units"]
    < 0.7 * found["figures"][0]["units"]
  )


@pytest.mark.full
def test_the_harness_and_hallucination_of_a_pair(runs, tmp_path):
  pytest.importorskip("lm_eval")
  (tmp_path / "piqa").mkdir()
  question = {
    "goal": "To eat",
    "sol1": "use a fork",
    "sol2": "use a car",
    "label": 0,
  }
  (tmp_path / "piqa" / "validation.jsonl").write_text(
    f"{json.dumps(question)}\n{json.dumps(question | {'label': 1})}\n"
  )
  (tmp_path / "xsum.jsonl").write_text(
    json.dumps({"document": "The river rose.", "summary": "River rises"}) + "\n"
  )
  result = run(
    "--suite=harness,hallucination",
    f"--workdir={runs / 'diff'}",
    f"--against={runs / 'transformer'}",
    f"--out={tmp_path / 'out'}",
    "--tasks=piqa",
    f"--set.harness.data_dir={tmp_path}",
    "--set.hallucination.sets=xsum",
    f"--set.hallucination.data_dir={tmp_path}",
    "--set.hallucination.summary_tokens=8",
    "--set.hallucination.batch_tokens=1024",
    "--set.harness.batch_tokens=1024",
  )
  assert result.returncode == 0, result.stderr
  accuracy = load(tmp_path / "out" / "harness.json")["figures"][0]
  assert (
    accuracy["name"] == "acc"
    and accuracy["at"] == {"task": "piqa"}
    and accuracy["value"] == accuracy["against"]["value"] == 0.5
  )
  assert {
    row["name"]
    for row in load(tmp_path / "out" / "hallucination.json")["figures"]
  } == {"ROUGE-L", "empty outputs"}
  assert len(list((tmp_path / "judged").glob("*/judge_prompts.jsonl"))) == 2
  result = run(
    "--suite=harness",
    f"--workdir={runs / 'diff'}",
    "--tasks=piqaa",
    f"--out={tmp_path / 'out'}",
  )
  assert (
    result.returncode == 1
    and "error: set.harness.tasks: lm-eval has no task 'piqaa'; similar ones are piqa"
    in result.stderr
  )


def test_another_vocabulary_is_refused_before_anything_runs(runs, tmp_path):
  out = tmp_path / "out"
  result = run(
    "--suite=validation",
    f"--workdir={runs / 'diff'}",
    f"--against={runs / 'other'}",
    f"--out={out}",
  )
  assert result.returncode == 1 and not out.exists() and not result.stdout
  message = result.stderr.splitlines()[-1]
  assert (
    message.startswith(
      f"error: --against={runs / 'other'} has another vocabulary: "
    )
    and "of 300 tokens, not 'bytes' of 256" in message
  )


@pytest.mark.parametrize(
  "args, code, message",
  [
    (
      [],
      2,
      f"error: pass --suite=NAME[,NAME]: there are {', '.join(SUITES)}",
    ),
    (
      ["--suite=validation,books"],
      2,
      f"error: --suite=books: there is no such suite; there are {', '.join(SUITES)}",
    ),
    (["--suite=validation"], 2, "error: pass --workdir=DIR"),
    (
      ["--suite=validation", "--tasks=piqa"],
      2,
      "error: --tasks is for --suite=harness",
    ),
    (["--suite=harness", "--tasks=piqua", "--workdir={diff}"], 1, "error: "),
    (
      ["--suite=validation", "--workdir={diff}", "--against_step=3"],
      2,
      "error: --against_step is for --against=DIR",
    ),
    (
      ["--suite=validation", "--workdir={diff}", "--step=x"],
      2,
      "error: flag --step=x",
    ),
    (
      ["--suite=validation", "--workdir={diff}", "--steps=1"],
      2,
      "error: Unknown command line flag 'steps'",
    ),
    (
      ["--suite=validation", "--workdir={diff}", "extra"],
      2,
      "error: unexpected argument 'extra'",
    ),
    (
      ["--suite=validation", "--set.validation.row=3"],
      2,
      "error: set.validation.row is not a setting: did you mean validation.rows?",
    ),
    (
      ["--suite=validation", "--set.books.rows=3"],
      2,
      "error: set.books is not a setting: there are validation, ",
    ),
    (
      ["--suite=validation", "--set.validation.rows=x"],
      2,
      "error: flag --set.validation.rows=x: invalid literal",
    ),
    (
      ["--suite=quantised", "--set.quantised.needle.sample=3"],
      2,
      "error: set.quantised.needle.sample is not a setting: did you mean",
    ),
    (
      ["--suite=quantised", "--workdir=x", "--set.quantised.bits=4.5"],
      1,
      "error: set.quantised.bits must be int; got 4.5",
    ),
    (
      ["--suite=validation", "--workdir=/nowhere"],
      1,
      "error: there is no complete checkpoint in /nowhere/checkpoints",
    ),
    (
      ["--suite=validation", "--workdir={diff}", "--step=3"],
      1,
      "error: there is no complete checkpoint of step 3",
    ),
    (
      ["--suite=validation", "--workdir={diff}", "--against=/nowhere"],
      1,
      "error: there is no complete checkpoint in /nowhere/checkpoints",
    ),
    (
      ["--suite=validation", "--workdir={diff}", "--out=/proc/evals"],
      1,
      "error: cannot write results in /proc/evals",
    ),
    (
      ["--suite=validation", "--workdir={diff}", "--set.validation.length=513"],
      1,
      "takes at most 512 tokens (config.model.max_length)",
    ),
    (
      ["--suite=attention", "--workdir={diff}", "--set.attention.length=513"],
      1,
      "takes 1 to 512 tokens (config.model.max_length)",
    ),
    (
      ["--suite=needle", "--workdir={diff}", "--set.needle.lengths=513"],
      1,
      "at most 512 tokens",
    ),
    (
      ["--suite=needle", "--workdir={diff}", "--set.needle.pairs=1/2"],
      1,
      "2 of 1 needles cannot be asked for",
    ),
    (
      ["--suite=needle", "--tasks=piqa"],
      2,
      "error: --tasks is for --suite=harness",
    ),
    (
      [
        "--suite=many_shot",
        "--workdir={diff}",
        "--set.many_shot.datasets=trec",
      ],
      1,
      "'trec' is not 'synthetic'; set.many_shot.data_dir",
    ),
    (
      [
        "--suite=many_shot",
        "--workdir={diff}",
        "--set.many_shot.max_tokens=513",
      ],
      1,
      "the model takes at most 512",
    ),
  ],
)
def test_bad_input_is_one_line(runs, args, code, message):
  result = run(*(argument.format(diff=runs / "diff") for argument in args))
  assert result.returncode == code, result.stderr
  lines = [
    line
    for line in result.stderr.splitlines()
    if not line.startswith("diffjax: ")
  ]
  assert (
    len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
  )


def test_all_settings_are_checked_before_the_first_measurement(runs, tmp_path):
  """Of both models: here the second suite is wrong, or the second model alone, or the report, which is made last."""
  for wrong, message in (
    (
      ["--suite=validation,needle", "--set.needle.depths=0.5,2"],
      "set.needle.depths = 2.0: must lie between 0 and 1",
    ),
    (
      [
        "--suite=validation,quantised",
        "--set.quantised.validation.rows=-2",
        "--set.quantised.bits=4",
      ],
      "rows = -2: must be at least 1",
    ),
    (
      ["--suite=validation,report", "--set.report.heads=0"],
      "set.report.heads = 0: must be at least 1",
    ),
  ):
    result = run(
      *wrong,
      f"--workdir={runs / 'diff'}",
      f"--out={tmp_path}",
      "--set.validation.rows=1",
    )
    assert result.returncode == 1 and message in result.stderr.splitlines()[-1]
    assert not result.stdout and not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in SUITES if name != "report"])
def test_the_notes_of_a_table_fit_80_columns(name):
  table = suite_class(name).table
  assert table.unit and table.notes
  assert max(map(len, table.notes)) <= 80


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_loads_its_data_when_it_is_asked_to(name):
  """A generator would refuse its settings after the suites before it."""
  suite = suite_class(name)
  assert suite.name == name
  assert not inspect.isgeneratorfunction(suite.load)


def test_a_mistyped_flag_waits_for_no_imports():
  code = "import sys, diffjax.evaluate; sys.exit(bool({'jax', 'flax', 'matplotlib', 'etils'} & set(sys.modules)))"
  assert (
    subprocess.run(
      [sys.executable, "-c", code], cwd=pathlib.Path(__file__).parents[1]
    ).returncode
    == 0
  )


def test_the_report_shows_a_suite_from_outside_the_package(runs, tmp_path):
  """It runs after the other suites, whatever their order in --suite."""
  with own_variants.registered(tmp_path):
    result = run(
      f"--import={own_variants.SUITE_MODULE}",
      "--suite=report,confident",
      f"--workdir={runs / 'diff'}",
      f"--out={tmp_path}",
      "--set.confident.rows=2",
    )
  assert result.returncode == 0, result.stderr
  page = (tmp_path / "report.html").read_text()
  assert '<section id="confident">' in page
