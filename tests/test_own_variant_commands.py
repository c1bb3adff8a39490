"""Every command works with attention variants from outside the package."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import diffjax
from diffjax.config import UserError
from diffjax.model import registry
from tests.harness import ROOT, own_variants
from tests.harness.commands import Commands


class Variant(NamedTuple):
  """An attention variant from outside the package.

  Attributes:
    name: its value of config.model.attention.
    module: the module that registers it.
    metric: a metric that each of its layers records.
    formula: text that the report shows for it.
  """

  name: str
  module: str
  metric: str
  formula: str

  @property
  def import_flag(self) -> str:
    return f"--import={self.module}"

  @property
  def workdir(self) -> str:
    return f"runs/{self.name}"


DINT = Variant("dint", own_variants.DINT_MODULE, "lambda", "A₁ − λA₂ + λA₃")
DISTANCE_SIGMOID = Variant(
  "distance_sigmoid",
  own_variants.SIGMOID_MODULE,
  "sigmoid_slope",
  "<figcaption>A</figcaption>",
)
STRANGE = Variant("strange", own_variants.MODULE, "strangeness", "σ − tanh + s")
STRANGE_SUM = Variant(
  "strange_sum", own_variants.MODULE, "strangeness", "σ − tanh + s"
)

TRAINING_FLAGS = [
  "--config.model.num_layers=2",
  "--config.model.embed_dim=32",
  "--config.model.head_dim=8",
  "--config.model.ffn_dim=32",
  "--config.model.max_length=512",
  "--config.data.source=text:text/*.txt",
  "--config.data.validation_fraction=0.3",
  "--config.data.length=64",
  "--config.train.batch_size=4",
  "--config.train.sample_tokens=0",
  "--config.train.log_interval=1",
  "--config.eval.rows=8",
]
# Suites that need no downloaded data, in the default tier and in the full tier.
# "report" shows their results.
FEW_SUITES = ("validation", "difference_map")
OTHER_SUITES = (
  "attention",
  "outliers",
  "position_nll",
  "needle",
  "quantised",
)
SUITE_FLAGS = [
  "--set.validation.rows=8",
  "--set.difference_map.rows=4",
  "--set.attention.samples=2",
  "--set.attention.needles=1",
  "--set.attention.length=512",
  "--set.outliers.tokens=256",
  "--set.needle.samples=1",
  "--set.needle.lengths=512",
  "--set.needle.pairs=1/1",
  "--set.needle.depths=0.5",
  "--set.needle.new_tokens=8",
  "--set.position_nll.rows=4",
  "--set.quantised.measurements=validation",
  "--set.quantised.validation.rows=8",
  "--set.quantised.bits=8",
  "--set.quantised.per=head",
]


def run(
  command: Commands,
  module: str,
  *arguments: str,
  cwd: Path,
  environment: dict[str, str] | None = None,
) -> str:
  """Returns the standard output of a command that must succeed."""
  result = command(module, *arguments, cwd=cwd, environment=environment)
  assert result.returncode == 0, result.stderr
  assert "Traceback" not in result.stderr
  return result.stdout


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """A user's directory, with the modules of the variants and some texts."""
  path = tmp_path_factory.mktemp("user")
  own_variants.write_modules(path)
  (path / "text").mkdir()
  for number in range(40):
    lines = []
    for line in range(40):
      lines.append(f"document {number}, line {line}: {line * number % 97}\n")
    (path / f"text/{number}.txt").write_text("".join(lines))
  return path


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(DINT, id="dint"),
    pytest.param(
      DISTANCE_SIGMOID, id="distance_sigmoid", marks=pytest.mark.full
    ),
    pytest.param(STRANGE, id="strange", marks=pytest.mark.full),
    pytest.param(STRANGE_SUM, id="strange_sum", marks=pytest.mark.full),
  ],
)
def variant(command, directory, request):
  """A variant with a run of two steps, resumed for two more on two devices."""
  variant = request.param
  flags = [
    f"--config=tiny:{variant.name}",
    variant.import_flag,
    f"--workdir={variant.workdir}",
    *TRAINING_FLAGS,
  ]
  run(
    command,
    "diffjax.train",
    *flags,
    "--config.train.steps=2",
    cwd=directory,
  )
  two_devices = (
    f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
  )
  run(
    command,
    "diffjax.train",
    *flags,
    "--config.train.steps=4",
    "--config.mesh.fsdp=2",
    cwd=directory,
    environment={"XLA_FLAGS": two_devices},
  )
  return variant


# Training.


def read_log(workdir: Path) -> list[dict[str, float]]:
  """Returns the lines of a run's metrics.jsonl."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_a_resumed_run_logs_every_step(directory, variant):
  """The fixture `variant` trained for two steps, and resumed for two more."""
  steps = []
  for line in read_log(directory / variant.workdir):
    if "train/loss" in line:
      steps.append(line["step"])

  assert steps == [1, 2, 3, 4]


def test_a_run_logs_the_metric_of_every_layer(directory, variant):
  """The model has two layers. Each line of the log has some metrics."""
  metrics = set()
  for line in read_log(directory / variant.workdir):
    metrics.update(line)

  assert f"{variant.metric}/layer_00" in metrics
  assert f"{variant.metric}/layer_01" in metrics


# Commands without --import.


def test_generate_without_the_import_names_the_flag(
  command, directory, variant
):
  """A user's module defines the run's attention. Here, it is not imported."""
  result = command(
    "diffjax.generate",
    f"--workdir={variant.workdir}",
    "--prompt=a",
    cwd=directory,
  )

  assert result.returncode == 1
  assert f"config.model.attention = '{variant.name}'" in result.stderr
  assert "--import=MODULE" in result.stderr


def test_train_without_the_import_names_the_flag(command, directory, variant):
  """A user's module defines the run's attention. Here, it is not imported."""
  result = command(
    "diffjax.train",
    f"--workdir={variant.workdir}",
    f"--config={variant.workdir}/config.toml",
    # The run was last trained on two devices, with fsdp = 2.
    "--config.mesh.fsdp=1",
    cwd=directory,
  )

  assert result.returncode == 1
  assert f"config.model.attention = '{variant.name}'" in result.stderr
  assert "--import=MODULE" in result.stderr


def test_load_without_the_import_names_the_argument(directory, variant):
  """A user's module defines the run's attention. Here, it is not imported."""
  with pytest.raises(UserError, match="imports=.MODULE."):
    diffjax.load(directory / variant.workdir)


# Generation and evaluation.


def generate_greedily(trained, prompt: str, num_tokens: int) -> str:
  """Returns the continuation of a prompt, computed without a key-value cache.

  The model reads the whole text again for each new token.
  """
  tokenizer = trained.tokenizer
  prompt_ids = tokenizer.encode_prompt(prompt)
  stop_ids = tokenizer.document_tokens.stop
  embedding = trained.params["embedding"]
  apply = jax.jit(trained.model.apply)

  answer_ids = []
  for _ in range(num_tokens):
    ids = prompt_ids + answer_ids
    # One shape for all lengths, so that the model is compiled once.
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(ids)] = ids
    hidden = apply({"params": trained.params}, padded)
    last_hidden = hidden[0, len(ids) - 1]
    next_id = int(np.argmax(embedding @ last_hidden))
    if next_id in stop_ids:
      break
    answer_ids.append(next_id)
  return tokenizer.decode_after(prompt_ids, answer_ids)


def test_generate_continues_like_a_loop_over_the_model(
  command, directory, variant, monkeypatch
):
  """The command has a key-value cache, and the loop has none.

  So the cache must hold what an attention from outside the package needs.
  """
  # This process imports the variant's module from the user's directory.
  monkeypatch.syspath_prepend(str(directory))

  text = run(
    command,
    "diffjax.generate",
    variant.import_flag,
    f"--workdir={variant.workdir}",
    "--prompt=def ",
    "--max_new_tokens=8",
    "--temperature=0",
    cwd=directory,
  )

  with own_variants.restore_registry():
    trained = diffjax.load(
      directory / variant.workdir, imports=[variant.module]
    )
    continuation = generate_greedily(trained, "def ", num_tokens=8)
  assert text.rstrip("\n") == f"def {continuation}"


class Evaluation(NamedTuple):
  """The results of an evaluation.

  Attributes:
    suites: the names of its suites, without the report.
    directory: the directory of the results.
  """

  suites: tuple[str, ...]
  directory: Path


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(FEW_SUITES, id="few"),
    pytest.param(OTHER_SUITES, id="other", marks=pytest.mark.full),
  ],
)
def evaluation(command, directory, variant, request):
  """Evaluates the run by several suites. The last one is the report."""
  suites = request.param
  results = directory / variant.workdir / f"evals_{request.param_index}"
  run(
    command,
    "diffjax.evaluate",
    variant.import_flag,
    f"--workdir={variant.workdir}",
    f"--suite={','.join(suites)},report",
    f"--out={results}",
    *SUITE_FLAGS,
    cwd=directory,
  )
  return Evaluation(suites, results)


def test_the_suites_measure_the_variant(evaluation):
  """There is a file of results for each suite of the evaluation."""
  for suite in evaluation.suites:
    results = json.loads((evaluation.directory / f"{suite}.json").read_text())
    assert results["figures"]


def test_the_report_has_the_formula_of_the_variant(evaluation, variant):
  """The class of a variant may give a formula. Otherwise the report has "A"."""
  page = (evaluation.directory / "report.html").read_text()

  assert variant.formula in page


# Checkpoints and conversion.


@pytest.mark.full
def test_checkpoints_are_listed(command, directory, variant):
  listing = run(
    command,
    "diffjax.checkpoints",
    f"--workdir={variant.workdir}",
    cwd=directory,
  )

  # The run has one checkpoint, of step 4.
  assert "4" in listing


@pytest.mark.full
def test_a_converted_run_generates_the_same_text(command, directory, variant):
  """From and to the project's own format, the conversion makes a copy."""
  converted_workdir = f"{variant.workdir}_copy"
  generate_flags = ["--prompt=a", "--temperature=0", "--max_new_tokens=20"]

  output = run(
    command,
    "diffjax.convert",
    variant.import_flag,
    f"--from=diffjax:{variant.workdir}",
    f"--to=diffjax:{converted_workdir}",
    cwd=directory,
  )
  text = run(
    command,
    "diffjax.generate",
    variant.import_flag,
    f"--workdir={variant.workdir}",
    *generate_flags,
    cwd=directory,
  )
  converted_text = run(
    command,
    "diffjax.generate",
    variant.import_flag,
    f"--workdir={converted_workdir}",
    *generate_flags,
    cwd=directory,
  )

  # The converter prints how to use the copy.
  assert variant.import_flag in output
  assert converted_text == text


@pytest.mark.full
@pytest.mark.parametrize("layout", ["diffllama", "unilm", "motif"])
def test_published_formats_reject_the_variant(
  command, directory, variant, layout
):
  """These formats of published models have only their own attention."""
  result = command(
    "diffjax.convert",
    variant.import_flag,
    f"--from=diffjax:{variant.workdir}",
    f"--to={layout}:{layout}",
    cwd=directory,
  )

  assert result.returncode == 1
  assert variant.name in result.stderr


# The flag itself.


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    pytest.param(
      "--import=no_such_module",
      "'no_such_module': ModuleNotFoundError",
      id="missing",
    ),
    pytest.param(
      "--import=broken",
      "cannot import 'broken': RuntimeError: on purpose",
      id="broken",
    ),
    pytest.param("--import=", "--import needs a module", id="empty"),
  ],
)
def test_a_module_that_cannot_be_imported_is_one_error(
  command, directory, flag, message
):
  """--import=MODULE imports a module of the user before the command runs."""
  # --import=broken imports this module.
  (directory / "broken.py").write_text("raise RuntimeError('on purpose')\n")

  result = command("diffjax.train", "--config=tiny", flag, cwd=directory)

  assert result.returncode == 2
  assert message in result.stderr
  assert "Traceback" not in result.stderr


def test_every_command_has_the_import_flag(command):
  """--import=MODULE imports a user's module, such as one with a variant."""
  # The modules of commands call `command.run(main)`.
  names = set()
  for path in (ROOT / "diffjax").glob("*.py"):
    if "command.run(" in path.read_text():
      names.add(path.stem)
  assert {"train", "evaluate", "generate", "convert", "aot"} <= names

  for name in names:
    help_page = command(f"diffjax.{name}", "--help").stdout
    assert "--import=MODULE" in help_page, name


def test_the_registry_lists_imported_modules(directory, monkeypatch):
  """The module, of an attention variant, is in the user's directory."""
  monkeypatch.syspath_prepend(str(directory))
  assert registry.imported_modules() == []

  # The variant is registered within this context only.
  with own_variants.restore_registry():
    registry.import_modules([own_variants.MODULE])

    assert registry.imported_modules() == [own_variants.MODULE]
