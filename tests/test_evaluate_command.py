"""`python -m diffjax.evaluate` as users run it: results and error messages."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from diffjax.config import (
  Config,
  DataConfig,
  EvalConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.evals import SUITES, harness
from diffjax.evals.report import intervals
from diffjax.evals.suite import suite_class
from diffjax.model.decoder import Decoder
from diffjax.parallel.mesh import make_mesh
from diffjax.training import loop, session
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.metrics import read_log
from tests.harness import ROOT, in_process, own_variants
from tests.harness.parameters import parameters

# Suites of the default tier, and the other suites that need no data or library.
FEW_SUITES = ("validation", "needle")
OTHER_SUITES = (
  "difference_map",
  "position_nll",
  "attention",
  "outliers",
  "quantised",
  "many_shot",
)
SUITES_WITH_PLOT = (*FEW_SUITES[1:], *OTHER_SUITES)

# Settings with which each suite has little to measure.
QUICK_SETTINGS = (
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
  "--set.quantised.per=row",
  "--set.quantised.validation.rows=4",
  "--set.difference_map.rows=4",
  "--set.many_shot.samples=4",
  "--set.many_shot.batch_tokens=1024",
  "--set.many_shot.sets=1",
  "--set.many_shot.orders=2",
)


class Runs(NamedTuple):
  """The directories of three runs.

  Attributes:
    diff: A DIFF model after two steps of training.
    transformer: A Transformer whose data has shorter rows. It is not trained.
    other: A DIFF model with another vocabulary. It is not trained.
  """

  diff: pathlib.Path
  transformer: pathlib.Path
  other: pathlib.Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
  """Makes three runs with the same text."""
  path = tmp_path_factory.mktemp("runs")
  texts = make_texts()
  (path / "text").mkdir()
  for index, text in enumerate(texts):
    (path / "text" / f"{index}.txt").write_text(text)
  config = Config(
    model=ModelConfig(
      num_layers=2,
      embed_dim=16,
      num_heads=4,
      num_kv_heads=2,
      head_dim=8,
      ffn_dim=32,
      max_length=512,
    ),
    data=DataConfig(
      source=f"text:{path}/text/*.txt",
      validation_fraction=0.3,
      length=64,
      prepared_dir=str(path / "rows"),
    ),
    optimizer=OptimizerConfig(warmup_steps=1),
    eval=EvalConfig(interval=2, rows=5),
    train=TrainConfig(steps=2, batch_size=8, log_interval=1, sample_tokens=0),
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(session, "make_mesh", make_mesh_of_one_device)
    loop.train(config, str(path / "diff"))

  transformer = dataclasses.replace(
    config,
    model=dataclasses.replace(
      config.model, attention="softmax", head_norm=False
    ),
    data=dataclasses.replace(config.data, length=32, mode="streamed"),
  )
  save_untrained(path / "transformer", transformer)

  train_tokenizer(texts, 300, path / "tokenizer")
  (tokenizer,) = (path / "tokenizer").glob("*.tiktoken")
  other = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, num_layers=1, vocab_size=300),
    data=dataclasses.replace(config.data, tokenizer=str(tokenizer)),
  )
  save_untrained(path / "other", other)
  return Runs(path / "diff", path / "transformer", path / "other")


def make_texts() -> list[str]:
  """Returns 40 documents of 40 lines."""
  texts = []
  for index in range(40):
    lines = []
    for line in range(40):
      lines.append(f"document {index}, line {line}: {line * index % 97}\n")
    texts.append("".join(lines))
  return texts


def make_mesh_of_one_device(config: MeshConfig) -> Mesh:
  """Replaces `make_mesh`: training on eight devices takes longer to compile."""
  return make_mesh(config, jax.devices()[:1])


def save_untrained(workdir: pathlib.Path, config: Config) -> None:
  """Saves a model with random parameters as if after two steps."""
  params = parameters(Decoder(config.model), np.zeros((1, 1), np.int32))
  with Checkpoints(str(workdir), keep=1) as checkpoints:
    checkpoints.save(
      2, {"params": params}, data_state={}, config=config.to_dict()
    )
    checkpoints.wait()


@pytest.fixture(autouse=True)
def only_piqa(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes lm-eval read one task. It takes seconds to read all."""

  @functools.cache
  def task_manager() -> Any:
    from lm_eval import tasks

    piqa_folder = pathlib.Path(tasks.__file__).with_name("piqa")
    return tasks.TaskManager(
      include_path=str(piqa_folder), include_defaults=False
    )

  monkeypatch.setattr(harness.harness_tasks, "task_manager", task_manager)


def evaluate(*arguments: str) -> subprocess.CompletedProcess:
  """Runs the command in this process."""
  result = in_process.call("diffjax.evaluate", *arguments)
  assert "Traceback" not in result.stderr
  return result


def evaluate_successfully(*arguments: str) -> subprocess.CompletedProcess:
  """Runs the command, which must succeed."""
  result = evaluate(*arguments)
  assert result.returncode == 0, result.stderr
  return result


def read_strict_json(path: pathlib.Path) -> Any:
  """Returns the content of a JSON file without NaN and infinity."""

  def raise_error(constant: str) -> None:
    raise ValueError(f"{path} contains {constant}")

  return json.loads(path.read_text(), parse_constant=raise_error)


class PairEvaluation(NamedTuple):
  """An evaluation of the DIFF model against the Transformer.

  Attributes:
    suites: The names of the suites, without the report.
    out: The directory of the results.
    result: The exit code and the output of the command.
  """

  suites: tuple[str, ...]
  out: pathlib.Path
  result: subprocess.CompletedProcess

  def read(self, suite: str) -> dict[str, Any]:
    """Returns the results of a suite."""
    return read_strict_json(self.out / f"{suite}.json")


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(FEW_SUITES, id="few"),
    pytest.param(OTHER_SUITES, id="other", marks=pytest.mark.full),
  ],
)
def pair(
  request: pytest.FixtureRequest,
  runs: Runs,
  tmp_path_factory: pytest.TempPathFactory,
) -> PairEvaluation:
  """Evaluates a pair. The report is the first suite on the command line."""
  out = tmp_path_factory.mktemp("pair")
  suites = request.param
  with pytest.MonkeyPatch.context() as patch:
    # These tests do not depend on the bounds of intervals.
    patch.setattr(intervals, "RESAMPLES", 99)
    result = evaluate_successfully(
      f"--suite=report,{','.join(suites)}",
      f"--workdir={runs.diff}",
      f"--against={runs.transformer}",
      f"--out={out}",
      *QUICK_SETTINGS,
    )
  return PairEvaluation(suites, out, result)


def test_results_describe_both_models(pair, runs):
  """Each file of results names the models, their parameters and their time.

  `pair` is a comparison of a DIFF model with a Transformer by several suites.
  """
  for suite in pair.suites:
    suite_results = pair.read(suite)
    assert suite_results["suite"] == suite
    diff, transformer = suite_results["models"]
    assert diff["attention"] == "diff"
    assert diff["name"] == f"{runs.diff} at step 2"
    assert transformer["attention"] == "softmax"
    assert transformer["name"] == f"{runs.transformer} at step 2"
    for model in (diff, transformer):
      # The embedding alone has 256 * 16 = 4,096 parameters.
      assert model["parameters"] > 5000
      assert model["seconds"] >= 0


def test_both_models_are_measured_on_the_same_units(pair):
  """`pair` has the results of two models by several suites.

  A figure is computed from units, such as prompts. "against" is the figure of
  the second model.
  """
  for suite in pair.suites:
    figures = pair.read(suite)["figures"]
    assert figures
    for figure in figures:
      assert figure["units"] > 0
      assert figure["against"]["units"] == figure["units"]
      assert figure["difference"]["units"] == figure["units"]


def test_each_suite_has_a_table_with_all_figures(pair):
  """`pair` is an evaluation by several suites. SUITE.md has a table of each."""
  for suite in pair.suites:
    figures = pair.read(suite)["figures"]
    table = (pair.out / f"{suite}.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("|")]
    # The header, and the line below it.
    num_header_lines = 2
    assert len(rows) == num_header_lines + len(figures)


def test_each_suite_except_validation_has_a_plot(pair):
  for suite in pair.suites:
    if suite in SUITES_WITH_PLOT:
      assert (pair.out / f"{suite}.png").stat().st_size > 1000


def test_the_output_names_the_files(pair):
  for suite in pair.suites:
    assert f"{pair.out / suite}.json" in pair.result.stdout
    assert f"{pair.out / suite}.md" in pair.result.stdout


def test_lines_of_the_output_fit_80_columns_except_paths(pair, runs):
  for line in pair.result.stdout.splitlines():
    has_path = str(runs.diff.parent) in line or str(pair.out) in line
    assert len(line) <= 80 or has_path, line


def test_no_temporary_file_remains(pair):
  for file in os.listdir(pair.out):
    assert file.endswith((".json", ".md", ".png", ".html"))


def test_the_report_is_made_after_the_other_suites(pair):
  page = (pair.out / "report.html").read_text()
  for suite in pair.suites:
    assert f'<section id="{suite}">' in page
  assert "λ by layer" in page


def test_each_model_is_loaded_once(pair):
  assert pair.result.stderr.count("loading") == 2


@pytest.mark.full
def test_several_devices_give_the_results_of_one_device(
  pair, runs, tmp_path, monkeypatch
):
  """The first model of the pair is measured again, split over two devices.

  `pair` has the results of the same suites and settings on one device.
  """
  # The bounds of intervals are not compared, and few resamples are faster.
  monkeypatch.setattr(intervals, "RESAMPLES", 99)

  evaluate_successfully(
    f"--suite={','.join(pair.suites)}",
    f"--workdir={runs.diff}",
    f"--out={tmp_path}",
    "--tensor=2",
    *QUICK_SETTINGS,
  )

  for suite in pair.suites:
    one_device = pair.read(suite)["figures"]
    two_devices = read_strict_json(tmp_path / f"{suite}.json")["figures"]
    # A figure is a value of the suite, such as a loss.
    for expected, actual in zip(one_device, two_devices, strict=True):
      assert actual["name"] == expected["name"]
      assert actual["value"] == pytest.approx(
        expected["value"], rel=1e-5, abs=1e-6, nan_ok=True
      )


def test_the_losses_are_those_of_training(runs, tmp_path):
  """The run measured its five validation rows after its last step."""
  log = read_log(runs.diff / "metrics.jsonl")
  last_line = log[-1]

  result = evaluate_successfully(
    "--suite=validation", f"--workdir={runs.diff}", f"--out={tmp_path}"
  )

  assert result.stdout.startswith("validation: 5 rows\n")
  # The names of the results, in their order.
  names = ("loss", "perplexity", "bits_per_byte", "ar_hit", "others")
  figures = read_strict_json(tmp_path / "validation.json")["figures"]
  for name, figure in zip(names, figures, strict=True):
    assert figure["units"] == 5
    logged = last_line[f"validation/{name}"]
    assert figure["value"] == pytest.approx(logged, rel=1e-5)


class ValidationRun(NamedTuple):
  """An evaluation of the suite "validation": its results and its output."""

  results: dict[str, Any]
  output: str


@pytest.fixture(scope="module")
def transformer_validation(runs: Runs) -> ValidationRun:
  """Evaluates a step of the Transformer on all of its validation rows."""
  result = evaluate_successfully(
    "--suite=validation",
    f"--workdir={runs.transformer}",
    "--step=2",
    "--set.validation.rows=-1",
  )
  # The default directory of results.
  path = runs.transformer / "evals" / "validation.json"
  return ValidationRun(read_strict_json(path), result.stdout)


@pytest.fixture(scope="module")
def pair_validation(
  runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> ValidationRun:
  """Evaluates both models on all validation rows of the first one."""
  out = tmp_path_factory.mktemp("pair_validation")
  result = evaluate_successfully(
    "--suite=validation",
    f"--workdir={runs.diff}",
    f"--against={runs.transformer}",
    f"--out={out}",
    "--set.validation.rows=-1",
  )
  return ValidationRun(read_strict_json(out / "validation.json"), result.stdout)


def test_results_of_one_model_have_no_difference(transformer_validation):
  suite_results = transformer_validation.results

  assert len(suite_results["models"]) == 1
  for figure in suite_results["figures"]:
    assert "against" not in figure
  assert "difference" not in transformer_validation.output


def test_results_contain_the_settings(pair_validation):
  assert pair_validation.results["settings"]["rows"] == -1


def test_the_output_shows_the_difference_of_two_models(pair_validation):
  """`pair_validation` has the results and the output of a comparison."""
  output = pair_validation.output

  # The loss is the first figure.
  loss = pair_validation.results["figures"][0]
  difference = loss["difference"]["value"]
  expected = loss["value"] - loss["against"]["value"]
  assert difference == pytest.approx(expected)
  assert f"validation: {loss['units']} rows" in output
  assert "AR-Hit (nats/token)" in output
  # The interval is in brackets after the difference.
  assert f"{difference:.4g} [" in output


def test_the_second_model_is_measured_on_the_rows_of_the_first(
  transformer_validation, pair_validation
):
  """The second model is a Transformer, whose own rows are half as long.

  `transformer_validation` has its results on its own rows, which are more.
  """
  loss = pair_validation.results["figures"][0]
  loss_alone = transformer_validation.results["figures"][0]

  assert loss["units"] == loss["against"]["units"]
  # A unit is a row. The longer rows of the first model are about half as many.
  assert loss["units"] < 0.7 * loss_alone["units"]


@pytest.mark.full
def test_the_harness_measures_both_models_of_a_pair(runs, tmp_path):
  """The two questions are the same, with opposite right answers.

  So each model is right in exactly one, and has the accuracy 0.5.
  """
  pytest.importorskip("lm_eval")
  question = {"goal": "To eat", "sol1": "use a fork", "sol2": "use a car"}
  first_is_right = {**question, "label": 0}
  second_is_right = {**question, "label": 1}
  (tmp_path / "piqa").mkdir()
  (tmp_path / "piqa" / "validation.jsonl").write_text(
    f"{json.dumps(first_is_right)}\n{json.dumps(second_is_right)}\n"
  )

  evaluate_successfully(
    "--suite=harness",
    f"--workdir={runs.diff}",
    f"--against={runs.transformer}",
    f"--out={tmp_path}",
    "--tasks=piqa",
    f"--set.harness.data_dir={tmp_path}",
    "--set.harness.batch_tokens=1024",
  )

  figures = read_strict_json(tmp_path / "harness.json")["figures"]
  accuracy = figures[0]
  assert accuracy["name"] == "acc"
  assert accuracy["at"] == {"task": "piqa"}
  assert accuracy["value"] == 0.5
  assert accuracy["against"]["value"] == 0.5


@pytest.mark.full
def test_each_model_of_a_pair_writes_prompts_for_a_judge(runs, tmp_path):
  """The suite "hallucination" asks a judge about the outputs of a model.

  The suite has only two figures until the judge has answered.
  """
  pytest.importorskip("rouge_score")
  news = {"document": "The river rose.", "summary": "River rises"}
  (tmp_path / "xsum.jsonl").write_text(f"{json.dumps(news)}\n")

  evaluate_successfully(
    "--suite=hallucination",
    f"--workdir={runs.diff}",
    f"--against={runs.transformer}",
    f"--out={tmp_path}",
    "--set.hallucination.sets=xsum",
    f"--set.hallucination.data_dir={tmp_path}",
    "--set.hallucination.summary_tokens=8",
    "--set.hallucination.batch_tokens=1024",
  )

  figures = read_strict_json(tmp_path / "hallucination.json")["figures"]
  names = {figure["name"] for figure in figures}
  assert names == {"ROUGE-L", "empty outputs"}
  # One file for each model.
  judge_prompts = list((tmp_path / "judged").glob("*/judge_prompts.jsonl"))
  assert len(judge_prompts) == 2


def test_another_vocabulary_is_refused_before_anything_runs(runs, tmp_path):
  """Losses per token of two vocabularies cannot be compared.

  The tokenizer of `runs.diff` has 256 tokens, and that of `runs.other` 300.
  """
  out = tmp_path / "out"

  result = evaluate(
    "--suite=validation",
    f"--workdir={runs.diff}",
    f"--against={runs.other}",
    f"--out={out}",
  )

  assert result.returncode == 1
  assert not result.stdout
  assert not out.exists()
  message = result.stderr.splitlines()[-1]
  beginning = f"error: --against={runs.other} has another vocabulary: "
  assert message.startswith(beginning)
  assert "of 300 tokens, not 'bytes' of 256" in message


def error_line(result: subprocess.CompletedProcess) -> str:
  """Returns the only line of the errors that is not a progress message."""
  lines = []
  for line in result.stderr.splitlines():
    if not line.startswith("diffjax: "):
      lines.append(line)
  assert len(lines) == 1, result.stderr
  return lines[0]


@pytest.mark.parametrize(
  "arguments, message",
  [
    pytest.param(
      [],
      f"error: pass --suite=NAME[,NAME]: there are {', '.join(SUITES)}",
      id="no suite",
    ),
    pytest.param(
      ["--suite=validation,books"],
      "error: --suite=books: there is no such suite; there are"
      f" {', '.join(SUITES)}",
      id="unknown suite",
    ),
    pytest.param(
      ["--suite=validation"], "error: pass --workdir=DIR", id="no workdir"
    ),
    pytest.param(
      ["--suite=validation", "--tasks=piqa"],
      "error: --tasks is for --suite=harness",
      id="tasks without harness",
    ),
    pytest.param(
      ["--suite=validation", "--workdir=x", "--against_step=3"],
      "error: --against_step is for --against=DIR",
      id="against_step without against",
    ),
    pytest.param(
      ["--suite=validation", "--workdir=x", "--step=x"],
      "error: flag --step=x",
      id="step that is no number",
    ),
    pytest.param(
      ["--suite=validation", "--workdir=x", "--steps=1"],
      "error: Unknown command line flag 'steps'",
      id="unknown flag",
    ),
    pytest.param(
      ["--suite=validation", "--workdir=x", "extra"],
      "error: unexpected argument 'extra'",
      id="argument without a flag",
    ),
    pytest.param(
      ["--suite=validation", "--set.validation.row=3"],
      "error: set.validation.row is not a setting: did you mean"
      " validation.rows?",
      id="mistyped setting",
    ),
    pytest.param(
      ["--suite=quantised", "--set.quantised.needle.sample=3"],
      "error: set.quantised.needle.sample is not a setting: did you mean",
      id="mistyped nested setting",
    ),
    pytest.param(
      ["--suite=validation", "--set.books.rows=3"],
      "error: set.books is not a setting: there are validation, ",
      id="setting of an unknown suite",
    ),
    pytest.param(
      ["--suite=validation", "--set.validation.rows=x"],
      "error: flag --set.validation.rows=x: invalid literal",
      id="setting that is no number",
    ),
  ],
)
def test_a_mistake_in_the_flags_is_reported_in_one_line(arguments, message):
  result = evaluate(*arguments)

  # The exit status of an invalid command line.
  assert result.returncode == 2
  line = error_line(result)
  assert line.startswith("error: ")
  assert message in line


@pytest.mark.parametrize(
  "arguments, message",
  [
    pytest.param(
      ["--suite=harness", "--tasks=piqua"], "error: ", id="unknown task"
    ),
    pytest.param(
      ["--suite=validation", "--step=3"],
      "error: there is no complete checkpoint of step 3",
      id="missing step",
    ),
    pytest.param(
      ["--suite=validation", "--against=/nowhere"],
      "error: there is no complete checkpoint in /nowhere/checkpoints",
      id="missing second model",
    ),
    pytest.param(
      ["--suite=validation", "--out=/proc/evals"],
      "error: cannot write results in /proc/evals",
      id="out",
    ),
    pytest.param(
      ["--suite=validation", "--set.validation.length=513"],
      "takes at most 512 tokens (config.model.max_length)",
      id="validation.length",
    ),
    pytest.param(
      ["--suite=attention", "--set.attention.length=513"],
      "takes 1 to 512 tokens (config.model.max_length)",
      id="attention.length",
    ),
    pytest.param(
      ["--suite=needle", "--set.needle.lengths=513"],
      "at most 512 tokens",
      id="needle.lengths",
    ),
    pytest.param(
      ["--suite=needle", "--set.needle.pairs=1/2"],
      "2 of 1 needles cannot be asked for",
      id="needle.pairs",
    ),
    pytest.param(
      ["--suite=many_shot", "--set.many_shot.datasets=trec"],
      "'trec' is not 'synthetic'; set.many_shot.data_dir",
      id="many_shot.datasets",
    ),
    pytest.param(
      ["--suite=many_shot", "--set.many_shot.max_tokens=513"],
      "the model takes at most 512",
      id="many_shot.max_tokens",
    ),
  ],
)
def test_a_value_that_does_not_fit_the_run_is_reported_in_one_line(
  runs, arguments, message
):
  """The run has a checkpoint of step 2, and its model takes 512 tokens."""
  result = evaluate(f"--workdir={runs.diff}", *arguments)

  assert result.returncode == 1
  line = error_line(result)
  assert line.startswith("error: ")
  assert message in line


@pytest.mark.parametrize(
  "arguments, message",
  [
    pytest.param(
      ["--suite=quantised", "--workdir=x", "--set.quantised.bits=4.5"],
      "error: set.quantised.bits must be int; got 4.5",
      id="setting of another type",
    ),
    pytest.param(
      ["--suite=validation", "--workdir=/nowhere"],
      "error: there is no complete checkpoint in /nowhere/checkpoints",
      id="missing model",
    ),
  ],
)
def test_an_error_before_a_model_is_loaded_is_one_line(arguments, message):
  result = evaluate(*arguments)

  assert result.returncode == 1
  assert error_line(result).startswith(message)


@pytest.mark.parametrize(
  "arguments, message",
  [
    pytest.param(
      ["--suite=validation,needle", "--set.needle.depths=0.5,2"],
      "set.needle.depths = 2.0: must lie between 0 and 1",
      id="second suite",
    ),
    pytest.param(
      [
        "--suite=validation,quantised",
        "--set.quantised.validation.rows=-2",
        "--set.quantised.bits=4",
      ],
      "rows = -2: must be at least 1",
      id="suite in a suite",
    ),
    pytest.param(
      ["--suite=validation,report", "--set.report.heads=0"],
      "set.report.heads = 0: must be at least 1",
      id="report",
    ),
  ],
)
def test_all_settings_are_checked_before_the_first_measurement(
  runs, tmp_path, arguments, message
):
  """Otherwise an error in the last suite would come after hours."""
  result = evaluate(
    *arguments,
    f"--workdir={runs.diff}",
    f"--out={tmp_path}",
    "--set.validation.rows=1",
  )

  assert result.returncode == 1
  last_line = result.stderr.splitlines()[-1]
  assert message in last_line
  # Nothing was measured: no summary was printed, and no file was written.
  assert not result.stdout
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in SUITES if name != "report"])
def test_the_notes_of_a_table_fit_80_columns(name):
  """Each suite prints a table of its results, with notes below it."""
  table = suite_class(name).table

  assert table.unit
  assert table.notes
  for note in table.notes:
    assert len(note) <= 80


@pytest.mark.parametrize("name", SUITES)
def test_load_is_not_a_generator(name):
  """All suites load their data, and then they are measured one by one.

  A generator would raise its errors only when the suite is measured.
  """
  suite = suite_class(name)

  assert suite.name == name
  assert not inspect.isgeneratorfunction(suite.load)


def test_the_flags_are_checked_before_large_imports():
  """A mistake in the flags is reported at once, and not after seconds."""
  # Exits with the status 1 if the module imports a large package.
  code = """
import sys
import diffjax.evaluate
large = {"jax", "flax", "matplotlib", "etils"}
sys.exit(bool(large.intersection(sys.modules)))
"""

  result = subprocess.run([sys.executable, "-c", code], cwd=ROOT)

  assert result.returncode == 0


@pytest.mark.full
def test_the_report_shows_a_suite_from_outside_the_package(runs, tmp_path):
  """A module that `--import` names defines the suite "confident"."""
  # This writes the module to `tmp_path`, from which it can be imported.
  with own_variants.registered(tmp_path):
    evaluate_successfully(
      f"--import={own_variants.SUITE_MODULE}",
      "--suite=report,confident",
      f"--workdir={runs.diff}",
      f"--out={tmp_path}",
      "--set.confident.rows=2",
    )

  page = (tmp_path / "report.html").read_text()
  assert '<section id="confident">' in page
