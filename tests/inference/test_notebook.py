"""diffjax from a notebook: the names that the package shows, training, loading and generating; and the project's own notebook."""

import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import tomllib

import jax
import pytest

import diffjax
from diffjax.config import Config, UserError, from_config_dict
from diffjax.configs import tiny
from diffjax.host.lock import lock
from experiments import plots
from tests.conftest import ROOT

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
  assert (
    trained.name == f"{workdir} at step 2" and trained.config.train.steps == 2
  )
  return workdir


def same(a, b):
  return all(
    (x == y).all()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def test_load_and_sample(workdir):
  trained = diffjax.load(workdir)
  [text] = diffjax.Sampler(trained).generate(["def "], 20)
  assert isinstance(text, str)
  prompt = [
    trained.tokenizer.separator,
    *trained.tokenizer.encode("def "),
  ]
  [ids] = diffjax.Sampler(trained.model, trained.params).generate(
    [prompt], 20, stop_ids=[trained.tokenizer.separator]
  )
  assert text == trained.tokenizer.decode(ids)
  with pytest.raises(
    ValueError, match="only a sampler made from a trained model"
  ):
    diffjax.Sampler(trained.model, trained.params).generate(["def "], 20)
  with pytest.raises(UserError, match="no complete checkpoint of step 1"):
    diffjax.load(workdir, 1)


def test_complete_is_the_samplers(workdir):
  """Texts in, their continuations out; one text counts as a list of one, and each text is continued as it is alone."""
  trained = diffjax.load(workdir)
  prompts = ["def ", "document 1\ndocument", ""]
  options = dict(temperature=1.0, top_k=20, top_p=0.9, seed=3)
  texts = diffjax.complete(trained, prompts, 20, **options)
  assert texts == diffjax.Sampler(trained, batch_size=3).generate(
    prompts, 20, **options
  )
  assert diffjax.complete(trained, "def ", 20, **options) == texts[:1]
  one = diffjax.Sampler(trained).generate("def ", 20, **options)
  assert one == texts[:1]
  assert diffjax.complete(trained, []) == []
  many = [f"document {number}\n" for number in range(20)]  # more than one batch
  assert diffjax.complete(trained, many, 4, temperature=0) == diffjax.Sampler(
    trained, batch_size=20
  ).generate(many, 4)
  with pytest.raises(
    UserError, match="a prompt of 5 tokens and 60 new ones are more than the 64"
  ):
    diffjax.complete(trained, ["def "], 60)
  with pytest.raises(
    UserError, match="top_p must be above 0 and at most 1; got 2"
  ):
    diffjax.complete(trained, ["def "], 20, top_p=2)


def test_a_second_call_goes_on_and_nothing_is_left_behind(
  config, workdir, tmp_path
):
  """Neither signal handlers nor the workdir's lock, after success and after a refusal."""
  handlers = [
    signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
  ]
  trained = diffjax.fit(config, tmp_path)
  longer = config.copy_and_resolve_references()
  longer.train.steps = 3
  assert diffjax.fit(longer, tmp_path).name.endswith("at step 3")
  longer.model.ffn_dim = 48
  with pytest.raises(UserError, match="model.ffn_dim was 32 and is 48"):
    diffjax.fit(longer, tmp_path)
  assert [
    signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
  ] == handlers
  assert signal.set_wakeup_fd(-1) == -1
  check = "import sys; from diffjax.host.lock import lock\nwith lock(sys.argv[1]): pass"
  subprocess.run([sys.executable, "-c", check, tmp_path], check=True)
  assert same(trained.params, diffjax.load(workdir).params), (
    "the same run again"
  )


def test_in_another_thread(config, workdir, tmp_path):
  found, handlers = (
    [],
    [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
  )

  def work():
    found.append(diffjax.fit(from_config_dict(config), str(tmp_path)))
    found.append(
      [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    )

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  trained, seen = found
  assert same(trained.params, diffjax.load(workdir).params) and seen == handlers


def test_configs_are_checked(config, tmp_path):
  with pytest.raises(
    UserError, match="config.train.batch_size = 0: must be at least 1"
  ):
    diffjax.fit(Config(train=Config().train.__class__(batch_size=0)), tmp_path)
  with pytest.raises(
    UserError, match="config.modle is not a config field: did you mean model"
  ):
    diffjax.fit(config.to_dict() | {"modle": {}}, tmp_path)
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
  assert {*diffjax.__all__} <= {*dir(diffjax)}
  for name in diffjax.__all__:
    assert getattr(diffjax, name).__doc__, name
    assert f"`{name}`" in diffjax.__doc__ or name == "__version__", name
  with pytest.raises(
    AttributeError, match="module 'diffjax' has no attribute 'trian'"
  ):
    _ = diffjax.trian


def test_one_version():
  """The package's own is what pyproject.toml, CITATION.cff and CHANGELOG.md give."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  assert (
    project["project"]["dynamic"] == ["version"]
    and "version" not in project["project"]
  )
  assert project["tool"]["setuptools"]["dynamic"]["version"] == {
    "attr": "diffjax.__version__"
  }
  assert (
    re.search(
      r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )[1]
    == diffjax.__version__
  )
  assert (
    re.search(
      r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )[1]
    == diffjax.__version__
  )


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


def test_a_lock_held_elsewhere_is_respected(config, tmp_path):
  code = "import sys; from diffjax.host.lock import lock\nwith lock(sys.argv[1]): print(flush=True); input()"
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


def shown(cell):
  """How many pictures a cell's output has, and what it prints."""
  outputs = cell.get("outputs", [])
  printed = "".join(
    "".join(output["text"])
    for output in outputs
    if output.get("name") == "stdout"
  )
  return sum(
    "image/png" in output.get("data", {}) for output in outputs
  ), printed


def check_outputs(cells):
  """Cells ran in order and without an error; and what the notebook says of its maps holds."""
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert [cell["execution_count"] for cell in code] == [
    *range(1, len(code) + 1)
  ]
  assert not [
    output
    for cell in code
    for output in cell["outputs"]
    if output["output_type"] == "error"
  ]
  [printed] = [
    text for cell in code if "% of the weight" in (text := shown(cell)[1])
  ]
  map_1, map_2, difference = map(
    float, re.findall(r"([\d.]+)% of the weight", printed)
  )
  assert difference > map_1 > map_2


def test_the_committed_notebook_was_executed_and_names_no_machine():
  text = NOTEBOOK.read_text()
  assert len(text) < 300_000
  cells = json.loads(text)["cells"]
  check_outputs(cells)
  texts = [cell["source"] for cell in cells]
  for output in (
    output for cell in cells for output in cell.get("outputs", [])
  ):
    texts += [
      output.get("text", ""),
      *(
        value
        for kind, value in output.get("data", {}).items()
        if kind != "image/png"
      ),
    ]
  found = re.search(
    r"/(home|root|tmp|work|Users|usr|opt)/|\\\\Users|preparing",
    json.dumps(texts),
  )
  assert not found, f"execute it where the rows are prepared: it says {found}"
  assert plots.style("diff").color in text


@pytest.mark.full
def test_the_notebook_runs_from_nothing(optimised, tmp_path):
  """And shows what the committed one shows, cell by cell."""
  import nbclient
  import nbformat

  notebook = nbformat.read(NOTEBOOK, as_version=4)
  before = [
    (pictures, bool(printed))
    for pictures, printed in map(shown, notebook.cells)
  ]
  nbclient.NotebookClient(
    notebook,
    timeout=600,
    startup_timeout=300,
    resources={"metadata": {"path": str(tmp_path)}},
  ).execute()
  check_outputs(notebook.cells)
  assert [
    (pictures, bool(printed))
    for pictures, printed in map(shown, notebook.cells)
  ] == before
  assert (tmp_path / "runs/notebook/loss.png").exists()
