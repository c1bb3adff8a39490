"""The functions of the package for notebooks, and the project's notebook."""

import json
import re
import shutil
import signal
import subprocess
import sys
import typing
from concurrent import futures

import chex
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
  """The directory of a run of two steps."""
  workdir = tmp_path_factory.mktemp("run")
  trained = diffjax.fit(config, workdir)
  assert trained.name == f"{workdir} at step 2"
  assert trained.config.train.steps == 2
  return workdir


@pytest.fixture(scope="module")
def trained(workdir):
  """The model of the run."""
  return diffjax.load(workdir)


def test_texts_and_token_ids_have_the_same_continuations(trained):
  """The separator is the token between documents.

  A text begins a document, so the separator comes before its tokens.
  Its continuation ends with the document, before the next separator.
  """
  separator = trained.tokenizer.separator
  prompt_ids = [separator, *trained.tokenizer.encode("def ")]
  sampler_of_texts = diffjax.Sampler(trained)
  sampler_of_ids = diffjax.Sampler(trained.model, trained.params)

  (text,) = sampler_of_texts.generate(["def "], 20)
  (ids,) = sampler_of_ids.generate([prompt_ids], 20, stop_ids=[separator])

  assert text == trained.tokenizer.decode(ids)


def test_a_sampler_without_a_tokenizer_rejects_texts(trained):
  # The sampler gets only the model and its parameters.
  sampler = diffjax.Sampler(trained.model, trained.params)

  message = "only a sampler made from a trained model"
  with pytest.raises(ValueError, match=message):
    sampler.generate(["def "], 20)


def test_loading_a_step_without_a_checkpoint_is_an_error(workdir):
  """The run has only the checkpoint of its end, at step 2."""
  with pytest.raises(UserError, match="no complete checkpoint of step 1"):
    diffjax.load(workdir, step=1)


def test_complete_returns_the_continuations_of_a_sampler(trained):
  prompts = ["def ", "document 1\ndocument", ""]
  options = dict(temperature=1.0, top_k=20, top_p=0.9, seed=3)

  texts = diffjax.complete(trained, prompts, 20, **options)

  sampler = diffjax.Sampler(trained, batch_size=3)
  assert texts == sampler.generate(prompts, 20, **options)


def test_no_prompts_have_no_continuations(trained):
  assert diffjax.complete(trained, []) == []


@pytest.mark.full
def test_one_text_counts_as_a_list_of_one(trained):
  options = dict(temperature=1.0, seed=3)

  completed = diffjax.complete(trained, "def ", 20, **options)
  generated = diffjax.Sampler(trained).generate("def ", 20, **options)

  expected = diffjax.complete(trained, ["def "], 20, **options)
  assert completed == expected
  assert generated == expected


@pytest.mark.full
def test_prompts_do_not_affect_each_other(trained):
  options = dict(temperature=1.0, top_k=20, top_p=0.9, seed=3)

  first, _ = diffjax.complete(trained, ["def ", "document"], 20, **options)

  assert [first] == diffjax.complete(trained, "def ", 20, **options)


def test_complete_accepts_more_prompts_than_a_batch(trained):
  prompts = [f"document {number}\n" for number in range(20)]

  texts = diffjax.complete(trained, prompts, 4, temperature=0)

  # This sampler takes all prompts at a time, and is greedy.
  sampler = diffjax.Sampler(trained, batch_size=20)
  assert texts == sampler.generate(prompts, 4)


@pytest.mark.parametrize(
  "max_new_tokens, options, message",
  [
    (60, {}, "a prompt of 5 tokens and 60 new ones are more than the 64"),
    (20, {"top_p": 2}, "top_p must be above 0 and at most 1; got 2"),
  ],
)
def test_options_out_of_range_are_rejected(
  trained, max_new_tokens, options, message
):
  """The model takes 64 tokens. The prompt has a separator and four bytes."""
  with pytest.raises(UserError, match=message):
    diffjax.complete(trained, ["def "], max_new_tokens, **options)


def signal_settings():
  """Returns what this process does at SIGTERM and SIGINT, and the wakeup file.

  Python writes to the wakeup file when a signal arrives. -1 means no file.
  """
  wakeup_file = signal.set_wakeup_fd(-1)
  signal.set_wakeup_fd(wakeup_file)
  return [
    signal.getsignal(signal.SIGTERM),
    signal.getsignal(signal.SIGINT),
    wakeup_file,
  ]


def test_a_second_call_resumes(config, workdir, tmp_path):
  """A run of two steps goes on to a third one."""
  copied_workdir = shutil.copytree(workdir, tmp_path / "run")
  longer_config = config.copy_and_resolve_references()
  longer_config.train.steps = 3

  trained = diffjax.fit(longer_config, copied_workdir)

  assert trained.name.endswith("at step 3")


class SecondRun(typing.NamedTuple):
  """A second run of the config, and the signal settings around it."""

  params: dict
  settings_before: list
  settings_after: list


@pytest.fixture(scope="module")
def second_run(config, tmp_path_factory):
  settings_before = signal_settings()
  trained = diffjax.fit(config, tmp_path_factory.mktemp("second_run"))
  return SecondRun(trained.params, settings_before, signal_settings())


@pytest.mark.full
def test_the_same_config_gives_the_same_parameters(second_run, trained):
  chex.assert_trees_all_equal(second_run.params, trained.params)


def test_fit_restores_signal_handlers(second_run):
  """A run handles SIGTERM and SIGINT only while it trains."""
  assert second_run.settings_after == second_run.settings_before


def test_fit_restores_signal_handlers_after_an_error(config, workdir):
  """The error is that a run cannot continue with a model of another size."""
  settings = signal_settings()
  wrong_config = config.copy_and_resolve_references()
  wrong_config.model.ffn_dim = 48

  with pytest.raises(UserError, match="model.ffn_dim was 32 and is 48"):
    diffjax.fit(wrong_config, workdir)

  assert signal_settings() == settings


def test_fit_unlocks_the_workdir_after_an_error(config, workdir):
  wrong_config = config.copy_and_resolve_references()
  wrong_config.model.ffn_dim = 48
  with pytest.raises(UserError, match="model.ffn_dim was 32 and is 48"):
    diffjax.fit(wrong_config, workdir)

  # This raises if another process cannot lock the workdir.
  program_that_locks_a_workdir = (
    "import sys\n"
    "from diffjax.host.lock import lock\n"
    "with lock(sys.argv[1]): pass\n"
  )
  run_program(program_that_locks_a_workdir, str(workdir))


@pytest.mark.full
def test_fit_works_in_another_thread(config, trained, tmp_path):
  """Only the main thread may set signal handlers, so `fit` leaves them."""
  settings = signal_settings()

  with futures.ThreadPoolExecutor(max_workers=1) as executor:
    training = executor.submit(
      diffjax.fit, from_config_dict(config), str(tmp_path)
    )
  trained_in_thread = training.result()

  # `trained` is from a run of the same config in the main thread.
  chex.assert_trees_all_equal(trained_in_thread.params, trained.params)
  assert signal_settings() == settings


def test_an_invalid_config_is_rejected_before_anything_is_written(tmp_path):
  invalid_config = Config(train=TrainConfig(batch_size=0))

  message = "config.train.batch_size = 0: must be at least 1"
  with pytest.raises(UserError, match=message):
    diffjax.fit(invalid_config, tmp_path)

  assert not list(tmp_path.iterdir())


def test_unknown_fields_of_a_config_are_rejected(config, tmp_path):
  values = config.to_dict()
  values["modle"] = {}

  message = "config.modle is not a config field: did you mean model"
  with pytest.raises(UserError, match=message):
    diffjax.fit(values, tmp_path)

  assert not list(tmp_path.iterdir())


def test_the_package_lists_its_public_names():
  """`dir` has them too, although they are imported when they are used."""
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


def test_an_unknown_name_is_an_attribute_error():
  message = "module 'diffjax' has no attribute 'trian'"
  with pytest.raises(AttributeError, match=message):
    _ = diffjax.trian


def run_program(program, *arguments):
  """Returns what a Python program prints, in a process of its own."""
  result = subprocess.run(
    [sys.executable, "-c", program, *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return result.stdout


PROGRAM_THAT_PRINTS_THE_MODULES_OF_THE_PACKAGE = """
import json
import sys
import types
import typing

before = set(sys.modules)
import diffjax

print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_the_package_imports_no_other_module():
  """Its public names are imported when they are used."""
  printed = run_program(PROGRAM_THAT_PRINTS_THE_MODULES_OF_THE_PACKAGE)

  assert set(json.loads(printed)) <= {"diffjax", "__future__"}


PROGRAM_THAT_IMPORTS_AND_PRINTS_THREADS = """
import signal
import sys
import threading

# Libraries read the command line when they are imported.
import grain
import matplotlib
import ml_collections
import orbax.checkpoint

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
import diffjax.train
import diffjax.aot
import diffjax.__main__

assert signal.getsignal(signal.SIGINT) is handler
print([thread.name for thread in threading.enumerate()])
"""


@pytest.mark.full
def test_importing_starts_no_thread_and_does_not_read_the_command_line():
  """This holds for the package, its public names and the commands."""
  printed = run_program(PROGRAM_THAT_IMPORTS_AND_PRINTS_THREADS)

  assert printed == "['MainThread']\n"


PROGRAM_THAT_HOLDS_A_LOCK_UNTIL_A_LINE_IS_READ = """
import sys
from diffjax.host.lock import lock

with lock(sys.argv[1]):
  print("locked", flush=True)
  input()
"""


def test_fit_rejects_a_workdir_that_another_process_uses(config, tmp_path):
  holder = subprocess.Popen(
    [
      sys.executable,
      "-c",
      PROGRAM_THAT_HOLDS_A_LOCK_UNTIL_A_LINE_IS_READ,
      tmp_path,
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert holder.stdout.readline() == "locked\n"

  with pytest.raises(UserError, match="is in use by process"):
    diffjax.fit(config, tmp_path)

  # The other process ends after a line, and the workdir is free.
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


def check_that_cells_ran_and_the_difference_has_the_most_weight(cells):
  """Checks that code cells ran in order and without errors.

  The notebook prints how much weight the maps have on the answer. Their
  difference has more than each of them.
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


def texts_of(cells):
  """Returns the sources and outputs of cells, without pictures."""
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

  # Large pictures would make the repository large.
  assert len(text) < 300_000
  check_that_cells_ran_and_the_difference_has_the_most_weight(
    json.loads(text)["cells"]
  )
  assert plots.style("diff").color in text


def test_the_committed_notebook_has_no_paths_of_a_machine():
  cells = json.loads(NOTEBOOK.read_text())["cells"]

  # "preparing" is printed with a path, where rows were not prepared before.
  path = r"/(home|root|tmp|work|Users|usr|opt)/|\\\\Users|preparing"
  assert not re.search(path, texts_of(cells))


def pictures_and_prints(cells):
  """Returns how many pictures each cell shows, and whether it prints."""
  kinds = []
  for cell in cells:
    output = cell_output(cell)
    kinds.append((output.num_pictures, bool(output.printed)))
  return kinds


@pytest.mark.full
@pytest.mark.usefixtures("optimised")
def test_the_notebook_runs_in_an_empty_directory(tmp_path):
  """Each cell shows as many pictures as in the committed notebook.

  A cell also prints something if the committed one does.
  """
  import nbclient
  import nbformat

  text = NOTEBOOK.read_text()
  # The training of the language model would take a minute. No other cell
  # depends on it.
  assert text.count("TrainConfig(steps=400,") == 1
  short_text = text.replace("TrainConfig(steps=400,", "TrainConfig(steps=40,")
  committed = nbformat.reads(text, as_version=4)
  notebook = nbformat.reads(short_text, as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=600,
    startup_timeout=300,
    resources={"metadata": {"path": str(tmp_path)}},
  )

  client.execute()

  check_that_cells_ran_and_the_difference_has_the_most_weight(notebook.cells)
  assert pictures_and_prints(notebook.cells) == pictures_and_prints(
    committed.cells
  )
  assert (tmp_path / "runs/notebook/loss.png").exists()
