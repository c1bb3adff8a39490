"""Every command on attention variants from outside the package."""

import json

import jax
import numpy as np
import pytest

import diffjax
from diffjax.config import UserError
from diffjax.model import registry
from tests.harness import ROOT, own_variants

MODULES = {
  "dint": own_variants.DINT_MODULE,
  "distance_sigmoid": own_variants.SIGMOID_MODULE,
  "strange": own_variants.MODULE,
  "strange_sum": own_variants.MODULE,
}
METRICS = {
  "dint": "lambda",
  "distance_sigmoid": "sigmoid_slope",
  "strange": "strangeness",
  "strange_sum": "strangeness",
}
FORMULAS = {
  "dint": "A₁ − λA₂ + λA₃",
  "distance_sigmoid": "<figcaption>A</figcaption>",
  "strange": "σ − tanh + s",
  "strange_sum": "σ − tanh + s",
}
TRAINING = [
  "--config.model.num_layers=2",
  "--config.model.embed_dim=32",
  "--config.model.head_dim=8",
  "--config.model.ffn_dim=32",
  "--config.model.max_length=512",
  "--config.data.length=64",
  "--config.train.batch_size=4",
  "--config.train.sample_tokens=4",
  "--config.train.log_interval=1",
  "--config.eval.rows=8",
]
# The suites that need no data from elsewhere.
SUITES = (
  "validation",
  "difference_map",
  "attention",
  "outliers",
  "position_nll",
  "needle",
  "quantised",
  "report",
)
SETTINGS = [
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


def run(command, module, *arguments, cwd, environment=()):
  """Returns the standard output of a command that must succeed."""
  result = command(module, *arguments, cwd=cwd, environment=environment)
  assert result.returncode == 0, result.stderr
  assert "Traceback" not in result.stderr
  return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A directory outside of the repository, with the modules of the variants."""
  path = tmp_path_factory.mktemp("user")
  own_variants.write_modules(path)
  return path


@pytest.fixture(
  scope="module",
  params=[
    "dint",
    pytest.param("distance_sigmoid", marks=pytest.mark.full),
    pytest.param("strange", marks=pytest.mark.full),
    pytest.param("strange_sum", marks=pytest.mark.full),
  ],
)
def trained(command, folder, request):
  """A run of two steps that was resumed for two more, on two devices."""
  name = request.param
  arguments = [
    f"--config=tiny:{name}",
    import_flag(name),
    f"--workdir=runs/{name}",
    *TRAINING,
  ]
  first = "--config.train.steps=2"
  run(command, "diffjax.train", *arguments, first, cwd=folder)
  rest = ["--config.train.steps=4", "--config.mesh.fsdp=2"]
  devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  run(
    command,
    "diffjax.train",
    *arguments,
    *rest,
    cwd=folder,
    environment=devices,
  )
  return name


def import_flag(name):
  return f"--import={MODULES[name]}"


def load(folder, name):
  """Returns the trained model, with the module imported in this process."""
  return diffjax.load(folder / "runs" / name, imports=[MODULES[name]])


def test_training_logs_every_metric_of_the_layers(folder, trained):
  log = (folder / "runs" / trained / "metrics.jsonl").read_text().splitlines()
  lines = [json.loads(line) for line in log]
  steps = [line["step"] for line in lines if "train/loss" in line]
  assert steps == [1, 2, 3, 4]
  metric = METRICS[trained]
  for layer in range(2):
    assert any(f"{metric}/layer_{layer:02d}" in line for line in lines)


def test_without_the_import_the_error_names_the_flag(command, folder, trained):
  workdir = f"--workdir=runs/{trained}"
  config = f"--config=runs/{trained}/config.toml"
  for module, *options in (
    ("diffjax.generate", "--prompt=a"),
    ("diffjax.train", config, "--config.mesh.fsdp=1"),
  ):
    result = command(module, workdir, *options, cwd=folder)
    assert result.returncode == 1
    assert f"config.model.attention = '{trained}'" in result.stderr
    assert "--import=MODULE" in result.stderr
  with pytest.raises(UserError, match="imports=.MODULE."):
    diffjax.load(folder / "runs" / trained)


def test_generated_text_is_that_of_the_definition(
  command, folder, trained, monkeypatch
):
  monkeypatch.syspath_prepend(str(folder))
  arguments = [
    import_flag(trained),
    f"--workdir=runs/{trained}",
    "--prompt=def ",
  ]
  text = run(
    command,
    "diffjax.generate",
    *arguments,
    "--max_new_tokens=8",
    "--temperature=0",
    cwd=folder,
  )
  with own_variants.restore_registry():
    model = load(folder, trained)
    row = model.tokenizer.encode_prompt("def ")
    first = len(row)
    stop_ids = model.tokenizer.document_tokens.stop
    apply = jax.jit(model.model.apply)
    while len(row) < first + 8 and row[-1] not in stop_ids:
      padded = np.zeros((1, 32), np.int32)
      padded[0, : len(row)] = row
      hidden = apply({"params": model.params}, padded)[0, len(row) - 1]
      embedding = model.params["embedding"]
      row.append(int(np.argmax(embedding @ hidden)))
    answer = [token for token in row[first:] if token not in stop_ids]
    expected = model.tokenizer.decode_after(row[:first], answer)
  assert text.rstrip("\n") == f"def {expected}"


def test_all_suites_measure_it(command, folder, trained):
  arguments = [import_flag(trained), f"--workdir=runs/{trained}"]
  run(
    command,
    "diffjax.evaluate",
    *arguments,
    f"--suite={','.join(SUITES)}",
    *SETTINGS,
    cwd=folder,
  )
  evals = folder / "runs" / trained / "evals"
  for suite in SUITES[:-1]:
    figures = json.loads((evals / f"{suite}.json").read_text())["figures"]
    assert figures
  page = (evals / "report.html").read_text()
  assert FORMULAS[trained] in page


@pytest.mark.full
def test_checkpoints_and_workdirs(command, folder, trained):
  """Commands that do not compute, and those that cannot hold the variant."""
  workdir = f"runs/{trained}"
  listing = run(
    command, "diffjax.checkpoints", f"--workdir={workdir}", cwd=folder
  )
  assert "4" in listing
  copy = f"runs/{trained}_copy"
  arguments = [import_flag(trained), f"--from=diffjax:{workdir}"]
  output = run(
    command, "diffjax.convert", *arguments, f"--to=diffjax:{copy}", cwd=folder
  )
  assert import_flag(trained) in output
  texts = []
  for path in (workdir, copy):
    generate = [
      import_flag(trained),
      f"--workdir={path}",
      "--prompt=a",
      "--temperature=0",
    ]
    texts.append(run(command, "diffjax.generate", *generate, cwd=folder))
  assert texts[0] == texts[1]
  for layout in ("diffllama", "unilm", "motif"):
    result = command(
      "diffjax.convert", *arguments, f"--to={layout}:{layout}", cwd=folder
    )
    assert result.returncode == 1
    assert trained in result.stderr


def test_modules_that_cannot_be_imported(command, folder):
  (folder / "broken.py").write_text("raise RuntimeError('on purpose')\n")
  for flag, message in (
    ("--import=no_such_module", "'no_such_module': ModuleNotFoundError"),
    ("--import=broken", "cannot import 'broken': RuntimeError: on purpose"),
    ("--import=", "--import needs a module"),
  ):
    result = command("diffjax.train", "--config=tiny", flag, cwd=folder)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_every_command_has_the_flag(command):
  commands = [path.stem for path in (ROOT / "diffjax").glob("*.py")]
  names = [
    name
    for name in commands
    if "command.run(" in (ROOT / "diffjax" / f"{name}.py").read_text()
  ]
  assert {"train", "evaluate", "generate", "convert", "aot"} <= set(names)
  for name in names:
    page = command(f"diffjax.{name}", "--help").stdout
    assert "--import=MODULE" in page, name


def test_names_of_registered_modules(folder, monkeypatch):
  monkeypatch.syspath_prepend(str(folder))
  assert registry.imported_modules() == []
  with own_variants.restore_registry():
    registry.import_modules([own_variants.MODULE])
    assert registry.imported_modules() == [own_variants.MODULE]
