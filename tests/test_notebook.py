"""diffjax from a notebook: two lines train a small model, two load it, two sample from it."""

import importlib
import json
import signal
import subprocess
import sys
import threading

import jax
import pytest

import diffjax
from configs import tiny
from diffjax.config import Config, UserError, from_config_dict
from diffjax.training.lock import lock
from tests.in_process import own_flags


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """The ConfigDict of a config file, made very small."""
  path = tmp_path_factory.mktemp("text")
  for index in range(40):
    (path / f"{index}.txt").write_text(f"document {index}\n" * 20)
  config = tiny.get_config()
  config.model.update(num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1, head_dim=8, ffn_dim=32, max_length=64)
  config.data.update(source=f"text:{path}/*.txt", validation_fraction=0.2, length=32, prepared_dir=str(path / "rows"))
  config.train.update(steps=2, batch_size=8, sample_tokens=0)
  config.eval.interval = 0
  return config


@pytest.fixture(scope="module")
def workdir(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  trained = diffjax.train(config, workdir)
  assert trained.name == f"{workdir} at step 2" and trained.config.train.steps == 2
  return workdir


def same(a, b):
  return all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_load_and_sample(workdir):
  trained = diffjax.load(workdir)
  [text] = diffjax.Sampler(trained).generate(["def "], 20)
  assert isinstance(text, str)
  prompt = [trained.tokenizer.separator, *map(int, trained.tokenizer.encode("def "))]
  [ids] = diffjax.Sampler(trained.model, trained.params).generate([prompt], 20, stop_ids=[trained.tokenizer.separator])
  assert text == trained.tokenizer.decode(ids)
  with pytest.raises(ValueError, match="only a sampler made from a trained model"):
    diffjax.Sampler(trained.model, trained.params).generate(["def "], 20)
  with pytest.raises(UserError, match="no complete checkpoint of step 1"):
    diffjax.load(workdir, 1)


def test_a_second_call_goes_on_and_nothing_is_left_behind(config, workdir, tmp_path):
  """Neither signal handlers nor the workdir's lock, after success and after a refusal."""
  handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  trained = diffjax.train(config, tmp_path)
  longer = config.copy_and_resolve_references()
  longer.train.steps = 3
  assert diffjax.train(longer, tmp_path).name.endswith("at step 3")
  longer.model.ffn_dim = 48
  with pytest.raises(UserError, match="model.ffn_dim was 32 and is 48"):
    diffjax.train(longer, tmp_path)
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
  assert signal.set_wakeup_fd(-1) == -1
  check = "import sys; from diffjax.training.lock import lock\nwith lock(sys.argv[1]): pass"
  subprocess.run([sys.executable, "-c", check, tmp_path], check=True)
  assert same(trained.params, diffjax.load(workdir).params), "the same run again"


def test_in_another_thread(config, workdir, tmp_path):
  found, handlers = [], [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

  def work():
    found.append(diffjax.train(from_config_dict(config), str(tmp_path)))
    found.append([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)])

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  trained, seen = found
  assert same(trained.params, diffjax.load(workdir).params) and seen == handlers


def test_configs_are_checked(config, tmp_path):
  with pytest.raises(UserError, match="config.train.batch_size = 0: must be at least 1"):
    diffjax.train(Config(train=Config().train.__class__(batch_size=0)), tmp_path)
  with pytest.raises(UserError, match="config.modle is not a config field: did you mean model"):
    diffjax.train(config.to_dict() | {"modle": {}}, tmp_path)
  assert not list(tmp_path.iterdir())


def test_the_commands_module_in_the_functions_place_trains_too(config, workdir, monkeypatch):
  """Importing the module of `python -m diffjax.train` replaces the function of the same name."""
  function = diffjax.train
  try:
    with own_flags():
      module = importlib.import_module("diffjax.train")
    assert diffjax.train is module is not function
    assert diffjax.train(config, workdir).name == function(config, workdir).name
  finally:
    diffjax.train = function
    sys.modules.pop("diffjax.train", None)


def test_importing_the_package_imports_nothing_else():
  code = "import json, sys, typing; before = {*sys.modules}; import diffjax; print(json.dumps(sorted({*sys.modules} - before)))"
  found = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
  assert {*found} <= {"diffjax", "__future__"}


def test_a_lock_held_elsewhere_is_respected(config, tmp_path):
  code = "import sys; from diffjax.training.lock import lock\nwith lock(sys.argv[1]): print(flush=True); input()"
  holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  holder.stdout.readline()
  with pytest.raises(UserError, match="is in use by process"):
    diffjax.train(config, tmp_path)
  holder.communicate("\n")
  with lock(tmp_path):
    pass
