"""python -m diffjax.generate as typed."""

import dataclasses
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from diffjax.config import (
  Config,
  DataConfig,
  ModelConfig,
  TrainConfig,
  UserError,
)
from diffjax.data.stop_strings import StopStrings
from diffjax.data.tokenizer import load_tokenizer
from diffjax.inference import finish
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained, load
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention import diff_attention
from diffjax.parallel.mesh import make_mesh
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.program import build
from diffjax.training.result import TrainResult
from diffjax.training.step import init_params
from tests.harness import in_process, tokenizer_files

MODEL = ModelConfig(
  num_layers=1,
  embed_dim=16,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  ffn_dim=32,
  max_length=600,
)


def save(workdir, change=lambda params: None, **data):
  """A model that has learnt nothing, but whose logits are far apart."""
  config = Config(model=MODEL, data=DataConfig(**data))
  program = build(config, make_mesh(config.mesh, jax.devices()[:1]))
  state = program.init()
  state.params["embedding"] *= 3
  change(state.params)
  with Checkpoints(workdir, keep=1) as checkpoints:
    checkpoints.save(
      0, state, data_state={}, config=config.to_dict(), scores={}
    )
    checkpoints.wait()
  return workdir


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return save(tmp_path_factory.mktemp("run"))


def run(*args):
  return in_process.call("diffjax.generate", *args)


def test_it_prints_what_the_sampler_gives(workdir):
  """One prompt as it comes, two together; a stop string ends the text before it."""
  trained = load(workdir)
  sampler = Sampler(trained.model, trained.params, batch_size=2, capacity=512)
  prompts = [[255, *b"abc"], [255, *b"a longer one"]]
  first, second = (
    trained.tokenizer.decode(ids)
    for ids in sampler.generate(
      prompts, 40, temperature=0.8, seed=3, stop_ids=[255]
    )
  )
  alone = run(
    f"--workdir={workdir}", "--prompt=abc", "--max_new_tokens=40", "--seed=3"
  )
  assert alone.stdout == f"abc{first}\n", alone.stderr
  assert alone.stderr.startswith("diffjax: loading ")
  stop = second[len(second) // 2 :][:2]
  both = run(
    f"--workdir={workdir}",
    "--prompt=abc",
    "--prompt=a longer one",
    "--max_new_tokens=40",
    "--seed=3",
    f"--stop={stop}",
  )
  assert (
    both.stdout
    == f"--- 1 ---\nabc{first.split(stop)[0]}\n--- 2 ---\na longer one{second.split(stop)[0]}\n"
  )


def test_several_devices_share_the_model(workdir):
  """Each reads its own part of the parameters, and the text is the same."""
  one, several = load(workdir), load(workdir, tensor=2)
  assert (
    several.params["layers"]["attention"]["query"]
    .addressable_shards[1]
    .data.shape[2]
    == 1
  )
  for here, there in zip(
    jax.tree.leaves(one.params), jax.tree.leaves(several.params), strict=True
  ):
    np.testing.assert_array_equal(here, there)
  flags = [
    f"--workdir={workdir}",
    "--prompt=abc",
    "--max_new_tokens=20",
    "--seed=3",
  ]
  alone, shared = run(*flags), run(*flags, "--tensor=2")
  assert shared.stdout == alone.stdout != "", shared.stderr


def test_a_loaded_model_has_the_attention_that_its_config_names(
  workdir, tmp_path, capsys
):
  """One that cannot run here is replaced, and the user is told."""
  start = load(workdir)
  reasons = {
    "reference": None,
    "pallas_gpu": "needs ",
    "pallas_tpu": "TPU",
    "mine": "no implementation of that name is registered",
  }
  with Checkpoints(tmp_path, keep=len(reasons)) as checkpoints:
    for step, name in enumerate(reasons):
      config = start.config.to_dict()
      config["model"]["attention_implementation"] = name
      state = {"params": start.params}
      checkpoints.save(step, state, data_state={}, config=config, scores={})
  capsys.readouterr()
  for tensor in (1, 2):
    attention = load(tmp_path, 0, tensor=tensor).model.attention_fn
    assert attention.keywords["implementation"] == "reference"
  assert not capsys.readouterr().err
  for step, (name, reason) in enumerate(reasons.items()):
    if reason is None:
      continue
    loaded = load(tmp_path, step)
    assert loaded.model.attention_fn is diff_attention
    assert loaded.config.model.attention_implementation == name
    [line] = capsys.readouterr().err.splitlines()
    assert f"attention_implementation = {name!r}, which cannot run" in line
    assert reason in line and line.endswith("'auto' is used instead")


def test_weights_in_int8(workdir):
  """The command takes what `load` rounds; its name says so in results."""
  pytest.importorskip("qwix")
  rounded = load(workdir, weight_dtype="int8")
  assert rounded.name.endswith("at step 0, weights in int8")
  [text] = Sampler(rounded).generate(["abc"], 20)
  result = run(
    f"--workdir={workdir}",
    "--prompt=abc",
    "--max_new_tokens=20",
    "--temperature=0",
    "--weight_dtype=int8",
  )
  assert result.stdout == f"abc{text}\n", result.stderr


def test_int8_says_what_it_needs(workdir, monkeypatch):
  monkeypatch.setitem(sys.modules, "qwix", None)
  result = run(f"--workdir={workdir}", "--prompt=abc", "--weight_dtype=int8")
  assert result.returncode == 1 and result.stderr.endswith(
    "error: weights in int8 need qwix: pip install 'diffjax[int8]'\n"
  )
  with pytest.raises(UserError, match="weight_dtype = 'int4': must be 'int8'"):
    load(workdir, weight_dtype="int4")


def test_the_terminal_gets_whole_characters_and_no_part_of_a_stop_string(
  capsys,
):
  """Token by token."""
  with in_process.own_flags():
    from diffjax.generate import StreamPrinter
  tokenizer = load_tokenizer("bytes")
  ids = tokenizer.encode("größer€ STOP and more")
  printer = StreamPrinter(
    "p: ", tokenizer, tokenizer.encode_prompt("p: "), ["STOP", "€€"]
  )
  for end in range(len(ids) + 1):
    print("|", end="")
    printer.update(ids[:end])
  printer.finish(ids)
  text = capsys.readouterr().out
  assert text.replace("|", "") == "p: größer€ \n" and "\ufffd" not in text


@pytest.mark.parametrize("kind", tokenizer_files.MAKERS)
def test_a_stop_string_may_begin_with_a_space(kind, tmp_path):
  tokenizer = load_tokenizer(tokenizer_files.save(tmp_path, kind))
  hello = tokenizer.encode_prompt("hello")
  word = tokenizer.encode("hello world")[len(tokenizer.encode("hello")) :]
  assert StopStrings(tokenizer, [hello], [" world"])(word)
  assert not StopStrings(tokenizer, [hello], [" world"])(word[:-1])
  # Where no text is before it, the word has no space.
  empty = tokenizer.encode_prompt("")
  assert not StopStrings(tokenizer, [empty], [" world"])(word)
  assert not StopStrings(tokenizer, [empty, hello], [" world"])(word)
  assert StopStrings(tokenizer, [empty, hello], ["world"])(word)


@pytest.mark.parametrize("kind", ["llama_2", "word_piece"])
def test_the_space_after_a_prompt_is_printed(
  kind, tmp_path, capsys, monkeypatch
):
  """By the command, the sampler and the sample of a run."""
  with in_process.own_flags():
    from diffjax.generate import StreamPrinter
  tokenizer = load_tokenizer(tokenizer_files.save(tmp_path, kind))
  prompt = tokenizer.encode_prompt("hello")
  answer = tokenizer.encode("hello world")[len(prompt) - 1 :]
  printer = StreamPrinter("hello", tokenizer, prompt, [])
  for end in range(len(answer) + 1):
    printer.update(answer[:end])
  printer.finish(answer)
  assert capsys.readouterr().out == "hello world\n"

  config = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size)
  model = Decoder(config)
  params = init_params(model, jax.random.key(0))
  monkeypatch.setattr(Sampler, "_stream", lambda *args: [[answer]])
  trained = Trained("run", Config(model=config), model, params, tokenizer)
  assert Sampler(trained).generate(["hello"], 9) == [" world"]
  run_config = Config(
    model=config,
    train=TrainConfig(sample_prompt="hello", sample_tokens=9),
  )
  result = TrainResult(
    config=run_config,
    workdir=str(tmp_path),
    mesh=make_mesh(run_config.mesh),
    model=model,
    params=params,
    tokenizer=tokenizer,
    step=0,
    check_lock=lambda: None,
  )
  assert finish._generate_sample(result) == "hello world"


def test_bad_input_is_one_line(workdir, tmp_path):
  tokenized = save(tmp_path / "tokenized", tokenizer="/nowhere/tokenizer.json")
  for args, code, message in (
    (
      [f"--workdir={workdir}", "--prompt=x", "--tensor=3"],
      1,
      "num_kv_heads = 2, ffn_dim = 32, vocab_size = 256; it can be 1, 2",
    ),
    (
      [f"--workdir={workdir}", "--prompt=x", "--tensor=16"],
      1,
      "tensor = 16: must be at most the 8 devices here and divide",
    ),
    ([], 2, "pass --workdir=DIR"),
    ([f"--workdir={workdir}"], 2, "pass --prompt=TEXT"),
    (
      [f"--workdir={workdir}", "--prompt=x", "--stop="],
      2,
      "--stop must not be empty",
    ),
    (
      ["--workdir=/nowhere", "--prompt=x"],
      1,
      "there is no complete checkpoint in /nowhere/checkpoints",
    ),
    (
      [f"--workdir={workdir}", "--prompt=x", "--step=7"],
      1,
      "there is no complete checkpoint of step 7",
    ),
    (
      [f"--workdir={workdir}", f"--prompt={'x' * 700}"],
      1,
      "701 tokens and 200 new ones are more than the 600 that a row can have",
    ),
    (
      [f"--workdir={workdir}", "--prompt=x", "--top_p=2"],
      1,
      "top_p must be above 0 and at most 1; got 2.0",
    ),
    (
      [f"--workdir={workdir}", "--prompt=x", "--temperature=-1"],
      1,
      "temperature must be",
    ),
    (
      [f"--workdir={tokenized}", "--prompt=x"],
      1,
      "there is no tokenizer beside the checkpoint: neither",
    ),
  ):
    result = run(*args)
    lines = result.stderr.strip().splitlines()
    assert (
      result.returncode == code
      and lines[-1].startswith("error: ")
      and message in lines[-1]
    ), result.stderr
    assert "Traceback" not in result.stderr and not result.stdout


@pytest.mark.full
def test_a_closed_pipe_ends_it_quietly(workdir):
  reader, writer = os.pipe()
  os.close(reader)
  arguments = [
    sys.executable,
    "-m",
    "diffjax.generate",
    f"--workdir={workdir}",
    "--prompt=x",
  ]
  result = subprocess.run(
    arguments,
    cwd=in_process.ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writer)
  assert result.returncode == 128 + signal.SIGPIPE
  assert result.stderr == f"diffjax: loading {workdir}\n"


def test_parameters_that_are_not_finite_are_refused(tmp_path):
  """A model with a NaN would write zero bytes, and be measured as nothing."""
  wrong = save(
    tmp_path,
    change=lambda params: params["layers"]["attention"].update(
      query=params["layers"]["attention"]["query"] * np.nan
    ),
  )
  for result in (
    run(f"--workdir={wrong}", "--prompt=x"),
    in_process.call(
      "diffjax.evaluate", "--suite=validation", f"--workdir={wrong}"
    ),
  ):
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and not result.stdout
    assert last.startswith(
      f"error: {wrong} at step 0 has parameters that are not finite: layers/attention/query: "
    )


def test_a_damaged_checkpoint_is_passed_over_or_named(workdir, tmp_path):
  damaged = save(tmp_path / "damaged")
  file = next(
    path
    for path in (damaged / "checkpoints/0").rglob("*")
    if path.is_file() and path.stat().st_size > 2000
  )
  data = np.frombuffer(file.read_bytes(), np.uint8).copy()
  data[1000] ^= 1
  file.write_bytes(data.tobytes())
  result = run(f"--workdir={damaged}", "--prompt=x")
  assert (
    result.returncode == 1
    and "is damaged" in result.stderr
    and "Traceback" not in result.stderr
  )
