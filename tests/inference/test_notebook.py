"""diffjax in a notebook: the package's names, and the project's notebook."""

import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import tomllib
import typing

import jax
import numpy as np
import pytest

import diffjax
from diffjax.config import Config, TrainConfig, UserError, from_config_dict
from diffjax.configs import tiny
from diffjax.host.lock import lock
from experiments import plots
from tests.harness import ROOT

NOTEBOOK = ROOT / "notebooks/diff_attention.ipynb"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """The ConfigDict of a config file, made very small."""
  path = tmp_path_factory.mktemp("text")
  for index in range(40):
    (path / f"{index}.txt").write_text(f"document {index}\n" * 20)
  config = tiny.get_config()
  config.model.update(
    num_layers=1,
    embed_dim=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=32,
    max_length=64,
  )
  config.data.update(
    source=f"text:{path}/*.txt",
    validation_fraction=0.2,
    length=32,
    prepared_dir=str(path / "rows"),
  )
  config.train.update(steps=2, batch_size=8, sample_tokens=0)
  config.eval.interval = 0
  return config


@pytest.fixture(scope="module")
def workdir(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  trained = diffjax.fit(config, workdir)
  assert trained.name == f"{workdir} at step 2"
  assert trained.config.train.steps == 2
  return workdir


def assert_same_parameters(trained, workdir):
  jax.tree.map(
    np.testing.assert_array_equal, trained.params, diffjax.load(workdir).params
  )


def test_load_and_sample(workdir):
  """Texts and token ids have the same continuations."""
  trained = diffjax.load(workdir)
  [text] = diffjax.Sampler(trained).generate(["def "], 20)
  tokenizer = trained.tokenizer
  prompt_ids = [tokenizer.separator, *tokenizer.encode("def ")]
  sampler = diffjax.Sampler(trained.model, trained.params)
  [ids] = sampler.generate([prompt_ids], 20, stop_ids=[tokenizer.separator])
  assert text == tokenizer.decode(ids)


def test_a_sampler_without_a_tokenizer_takes_no_texts(workdir):
  trained = diffjax.load(workdir)
  sampler = diffjax.Sampler(trained.model, trained.params)
  message = "only a sampler made from a trained model"
  with pytest.raises(ValueError, match=message):
    sampler.generate(["def "], 20)


def test_a_step_without_a_checkpoint(workdir):
  with pytest.raises(UserError, match="no complete checkpoint of step 1"):
    diffjax.load(workdir, 1)


def test_complete_is_the_samplers(workdir):
  """Texts in, their continuations out."""
  trained = diffjax.load(workdir)
  prompts = ["def ", "document 1\ndocument", ""]
  options = dict(temperature=1.0, top_k=20, top_p=0.9, seed=3)
  texts = diffjax.complete(trained, prompts, 20, **options)
  sampler = diffjax.Sampler(trained, batch_size=3)
  assert texts == sampler.generate(prompts, 20, **options)
  assert diffjax.complete(trained, []) == []


def test_one_text_counts_as_a_list_of_one(workdir):
  trained = diffjax.load(workdir)
  options = dict(temperature=1.0, seed=3)
  texts = diffjax.complete(trained, ["def "], 20, **options)
  assert diffjax.complete(trained, "def ", 20, **options) == texts
  assert diffjax.Sampler(trained).generate("def ", 20, **options) == texts


def test_prompts_do_not_affect_each_other(workdir):
  trained = diffjax.load(workdir)
  options = dict(temperature=1.0, top_k=20, top_p=0.9, seed=3)
  texts = diffjax.complete(trained, ["def ", "document"], 20, **options)
  assert diffjax.complete(trained, "def ", 20, **options) == texts[:1]


def test_more_prompts_than_a_batch(workdir):
  trained = diffjax.load(workdir)
  prompts = [f"document {number}\n" for number in range(20)]
  sampler = diffjax.Sampler(trained, batch_size=20)
  texts = diffjax.complete(trained, prompts, 4, temperature=0)
  assert texts == sampler.generate(prompts, 4)


@pytest.mark.parametrize(
  "max_new_tokens, options, message",
  [
    (60, {}, "a prompt of 5 tokens and 60 new ones are more than the 64"),
    (20, {"top_p": 2}, "top_p must be above 0 and at most 1; got 2"),
  ],
)
def test_options_out_of_range(workdir, max_new_tokens, options, message):
  trained = diffjax.load(workdir)
  with pytest.raises(UserError, match=message):
    diffjax.complete(trained, ["def "], max_new_tokens, **options)


def signal_handlers():
  return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]


def test_a_second_call_resumes_and_nothing_is_left_behind(
  config, workdir, tmp_path
):
  """Neither signal handlers nor the workdir's lock, also after an error."""
  handlers = signal_handlers()
  trained = diffjax.fit(config, tmp_path)
  longer = config.copy_and_resolve_references()
  longer.train.steps = 3
  assert diffjax.fit(longer, tmp_path).name.endswith("at step 3")
  longer.model.ffn_dim = 48
  with pytest.raises(UserError, match="model.ffn_dim was 32 and is 48"):
    diffjax.fit(longer, tmp_path)

  assert signal_handlers() == handlers
  assert signal.set_wakeup_fd(-1) == -1
  # Another process can lock the workdir.
  run_code(f"""
    from diffjax.host.lock import lock
    with lock({str(tmp_path)!r}):
      pass
  """)
  # It was the same run as the fixture's.
  assert_same_parameters(trained, workdir)


def test_in_another_thread(config, workdir, tmp_path):
  """The same run, without signal handlers."""
  results = []

  def work():
    results.append(diffjax.fit(from_config_dict(config), str(tmp_path)))
    results.append(signal_handlers())

  handlers = signal_handlers()
  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  trained, handlers_after_training = results
  assert_same_parameters(trained, workdir)
  assert handlers_after_training == handlers


def test_a_config_is_checked(tmp_path):
  message = "config.train.batch_size = 0: must be at least 1"
  with pytest.raises(UserError, match=message):
    diffjax.fit(Config(train=TrainConfig(batch_size=0)), tmp_path)
  assert not list(tmp_path.iterdir())


def test_values_of_a_config_are_checked(config, tmp_path):
  values = config.to_dict() | {"modle": {}}
  message = "config.modle is not a config field: did you mean model"
  with pytest.raises(UserError, match=message):
    diffjax.fit(values, tmp_path)
  assert not list(tmp_path.iterdir())


def test_the_package_shows_what_a_notebook_needs():
  assert set(diffjax.__all__) == {
    "Attention",
    "DiffAttention",
    "Parameter",
    "Sampler",
    "complete",
    "diff_attention",
    "fit",
    "load",
    "register",
    "__version__",
  }
  assert set(diffjax.__all__) <= set(dir(diffjax))


@pytest.mark.parametrize("name", diffjax.__all__)
def test_a_name_of_the_package_is_documented(name):
  assert getattr(diffjax, name).__doc__
  if name != "__version__":
    assert f"`{name}`" in diffjax.__doc__


def test_an_unknown_name_of_the_package():
  message = "module 'diffjax' has no attribute 'trian'"
  with pytest.raises(AttributeError, match=message):
    _ = diffjax.trian


def test_one_version():
  """pyproject.toml, CITATION.cff and CHANGELOG.md give the package's own."""
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
  assert settings["project"]["dynamic"] == ["version"]
  assert "version" not in settings["project"]
  dynamic = settings["tool"]["setuptools"]["dynamic"]
  assert dynamic["version"] == {"attr": "diffjax.__version__"}

  citation = (ROOT / "CITATION.cff").read_text()
  [cited] = re.findall(r"^version: (.*)$", citation, re.MULTILINE)
  assert cited == diffjax.__version__
  changelog = (ROOT / "CHANGELOG.md").read_text()
  newest, *_ = re.findall(r"^## \[(\d.*?)\]", changelog, re.MULTILINE)
  assert newest == diffjax.__version__


def run_code(code):
  """Returns what Python prints for some code, in a process of its own."""
  result = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return result.stdout


def test_importing_the_package_imports_nothing_else():
  printed = run_code("""
    import json, sys, types, typing
    before = set(sys.modules)
    import diffjax
    print(json.dumps(sorted(set(sys.modules) - before)))
  """)
  assert set(json.loads(printed)) <= {"diffjax", "__future__"}


def test_importing_starts_no_thread_and_does_not_read_the_command_line():
  """Neither the package nor what its names import, nor the commands do."""
  printed = run_code("""
    import pathlib, signal, sys, threading
    # Libraries read the command line when they are imported.
    import grain, matplotlib, ml_collections, orbax.checkpoint

    class CommandLine(list):
      def __getitem__(self, index):
        frame = sys._getframe(1)
        if "diffjax" in frame.f_globals["__name__"]:
          raise AssertionError("reads the command line")
        return super().__getitem__(index)

    sys.argv = CommandLine(["-m"])
    handler = signal.getsignal(signal.SIGINT)
    import diffjax
    for name in diffjax.__all__:
      getattr(diffjax, name)
    import diffjax.train, diffjax.aot, diffjax.__main__
    assert signal.getsignal(signal.SIGINT) is handler
    print([thread.name for thread in threading.enumerate()])
  """)
  assert printed == "['MainThread']\n"


def test_a_lock_of_another_process_is_respected(config, tmp_path):
  code = (
    "import sys; from diffjax.host.lock import lock\n"
    "with lock(sys.argv[1]): print(flush=True); input()"
  )
  holder = subprocess.Popen(
    [sys.executable, "-c", code, tmp_path],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  holder.stdout.readline()
  with pytest.raises(UserError, match="is in use by process"):
    diffjax.fit(config, tmp_path)
  holder.communicate("\n")
  with lock(tmp_path):
    pass


class CellOutput(typing.NamedTuple):
  """What a cell shows."""

  num_pictures: int
  printed: str


def cell_output(cell):
  num_pictures = 0
  printed = ""
  for output in cell.get("outputs", []):
    if "image/png" in output.get("data", {}):
      num_pictures += 1
    if output.get("name") == "stdout":
      printed += "".join(output["text"])
  return CellOutput(num_pictures, printed)


def check_outputs(cells):
  """Checks that cells ran in order, without errors, and show what is claimed.

  The difference of the two maps has the most weight on the answer.
  """
  code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
  printed = ""
  for number, cell in enumerate(code_cells, 1):
    assert cell["execution_count"] == number
    for output in cell["outputs"]:
      assert output["output_type"] != "error"
    printed += cell_output(cell).printed
  weights = re.findall(r"([\d.]+)% of the weight", printed)
  map_1, map_2, difference = map(float, weights)
  assert difference > map_1 > map_2


def shown_texts(cells):
  """Returns sources and outputs, without pictures."""
  texts = []
  for cell in cells:
    texts.append(cell["source"])
    for output in cell.get("outputs", []):
      texts.append(output.get("text", ""))
      for kind, data in output.get("data", {}).items():
        if kind != "image/png":
          texts.append(data)
  return json.dumps(texts)


def test_the_committed_notebook_was_executed():
  text = NOTEBOOK.read_text()
  assert len(text) < 300_000
  check_outputs(json.loads(text)["cells"])
  assert plots.style("diff").color in text


def test_the_committed_notebook_names_no_machine():
  """It was executed where the rows were prepared already."""
  cells = json.loads(NOTEBOOK.read_text())["cells"]
  path = r"/(home|root|tmp|work|Users|usr|opt)/|\\\\Users|preparing"
  assert not re.search(path, shown_texts(cells))


def output_kinds(cells):
  """Returns how many pictures each cell shows, and whether it prints."""
  kinds = []
  for cell in cells:
    output = cell_output(cell)
    kinds.append((output.num_pictures, bool(output.printed)))
  return kinds


@pytest.mark.full
def test_the_notebook_runs_from_nothing(optimised, tmp_path):
  """And shows what the committed one shows, cell by cell."""
  import nbclient
  import nbformat

  notebook = nbformat.read(NOTEBOOK, as_version=4)
  committed_kinds = output_kinds(notebook.cells)
  client = nbclient.NotebookClient(
    notebook,
    timeout=600,
    startup_timeout=300,
    resources={"metadata": {"path": str(tmp_path)}},
  )
  client.execute()
  check_outputs(notebook.cells)
  assert output_kinds(notebook.cells) == committed_kinds
  assert (tmp_path / "runs/notebook/loss.png").exists()
