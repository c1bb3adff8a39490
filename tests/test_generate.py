"""python -m diffjax.generate prints the continuations of prompts."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
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
from diffjax.data.tokenizer import Tokenizer, load_tokenizer
from diffjax.host.lock import lock
from diffjax.inference import finish
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained, load
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention import diff_attention
from diffjax.parallel.mesh import make_mesh
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.result import TrainResult
from tests.harness import in_process, tokenizer_files
from tests.harness.parameters import parameters

with in_process.own_flags():
  from diffjax.generate import StreamPrinter

MODEL = ModelConfig(
  num_layers=1,
  embed_dim=16,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  ffn_dim=32,
  max_length=600,
)
# The command's capacity for short prompts. Samplers of this capacity run the
# programs that the command has compiled.
CAPACITY = 256


def random_parameters() -> dict[str, Any]:
  """Returns parameters of MODEL with logits that are far apart."""
  params = parameters(Decoder(MODEL), np.zeros((1, 1), np.int32))
  params["embedding"] = 3 * np.asarray(params["embedding"])
  return params


def save_run(
  workdir: Path,
  params: dict[str, Any],
  *,
  tokenizer: str = "bytes",
  attention_implementation: str = "auto",
) -> Path:
  """Writes the checkpoint of a run, and returns its workdir."""
  model = dataclasses.replace(
    MODEL, attention_implementation=attention_implementation
  )
  config = Config(model=model, data=DataConfig(tokenizer=tokenizer))
  with Checkpoints(workdir, keep=1) as checkpoints:
    checkpoints.save(
      0, {"params": params}, data_state={}, config=config.to_dict(), scores={}
    )
    checkpoints.wait()
  return workdir


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run of an untrained model."""
  return save_run(tmp_path_factory.mktemp("run"), random_parameters())


def run_generate(*arguments: str) -> subprocess.CompletedProcess:
  """Runs `python -m diffjax.generate ARGUMENTS` in this process."""
  return in_process.call("diffjax.generate", *arguments)


# The printed text.


@pytest.fixture(scope="module")
def abc_result(workdir):
  """The result of the command for the prompt "abc"."""
  return run_generate(
    f"--workdir={workdir}", "--prompt=abc", "--max_new_tokens=20", "--seed=3"
  )


@pytest.fixture(scope="module")
def answers(workdir):
  """The sampler's 20 tokens for "abc" and "a longer one", with seed 3."""
  trained = load(workdir)
  sampler = Sampler(trained, batch_size=2, capacity=CAPACITY)
  prompts = ["abc", "a longer one"]
  return sampler.generate(prompts, 20, temperature=0.8, seed=3)


def test_one_prompt_is_printed_with_its_continuation(abc_result, answers):
  assert abc_result.stdout == f"abc{answers[0]}\n", abc_result.stderr


def test_standard_error_says_that_the_model_is_loading(abc_result):
  assert abc_result.stderr.startswith("diffjax: loading ")


def test_several_prompts_are_numbered_and_end_before_a_stop_string(
  workdir, answers
):
  """`answers` are a sampler's texts for both prompts, without a stop string.

  The command has the same seed, so its answers are the same until they stop.
  """
  first, second = answers
  # Two characters of the second answer, as a stop string that it contains.
  middle = len(second) // 2
  stop = second[middle : middle + 2]

  result = run_generate(
    f"--workdir={workdir}",
    "--prompt=abc",
    "--prompt=a longer one",
    "--max_new_tokens=20",
    "--seed=3",
    f"--stop={stop}",
  )

  first_before_stop, _, _ = first.partition(stop)
  second_before_stop, _, _ = second.partition(stop)
  assert result.stdout == (
    f"--- 1 ---\nabc{first_before_stop}\n"
    f"--- 2 ---\na longer one{second_before_stop}\n"
  )


def test_the_terminal_gets_no_partial_character_or_stop_string(capsys):
  """A StreamPrinter prints an answer while its tokens arrive."""
  tokenizer = load_tokenizer("bytes")
  prompt_ids = tokenizer.encode_prompt("p: ")
  answer_ids = tokenizer.encode("größer€ STOP and more")
  printer = StreamPrinter("p: ", tokenizer, prompt_ids, stops=["STOP", "€€"])

  # A token is one byte. "ö" has two and "€" three, so they are incomplete at
  # first. "€" is also the beginning of the stop string "€€".
  for num_tokens in range(len(answer_ids) + 1):
    printer.update(answer_ids[:num_tokens])
  printer.finish(answer_ids)

  assert capsys.readouterr().out == "p: größer€ \n"


@pytest.mark.full
def test_a_closed_pipe_ends_the_command_quietly(workdir):
  """For example, `head` closes the pipe after the lines that it shows."""
  reader, writer = os.pipe()
  os.close(reader)

  result = subprocess.run(
    [
      sys.executable,
      "-m",
      "diffjax.generate",
      f"--workdir={workdir}",
      "--prompt=x",
    ],
    cwd=in_process.ROOT,
    stdout=writer,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writer)

  # A shell reports this code for a process that SIGPIPE has ended.
  assert result.returncode == 128 + signal.SIGPIPE
  assert result.stderr == f"diffjax: loading {workdir}\n"


# Words that begin with a space. These tokenizers drop the space at the start of
# a text, so the same tokens are " world" after "hello", and "world" at a start.


def tokens_after(prompt: str, answer: str, tokenizer: Tokenizer) -> list[int]:
  """Returns the tokens of an answer that continues a prompt."""
  prompt_length = len(tokenizer.encode(prompt))
  return tokenizer.encode(prompt + answer)[prompt_length:]


@pytest.mark.parametrize("kind", tokenizer_files.MAKERS)
def test_a_stop_string_may_begin_with_a_space(kind, tmp_path):
  tokenizer = load_tokenizer(tokenizer_files.save(tmp_path, kind))
  prompt = tokenizer.encode_prompt("hello")
  world = tokens_after("hello", " world", tokenizer)
  *beginning_of_world, _ = world

  has_stop = StopStrings(tokenizer, prompts=[prompt], stops=[" world"])

  assert has_stop(world)
  assert not has_stop(beginning_of_world)


@pytest.mark.parametrize("kind", tokenizer_files.MAKERS)
def test_a_word_after_an_empty_prompt_has_no_space(kind, tmp_path):
  """The tokens of " world" after "hello" are "world" after an empty prompt."""
  tokenizer = load_tokenizer(tokenizer_files.save(tmp_path, kind))
  empty_prompt = tokenizer.encode_prompt("")
  world = tokens_after("hello", " world", tokenizer)

  has_stop = StopStrings(tokenizer, prompts=[empty_prompt], stops=[" world"])

  assert not has_stop(world)


@pytest.mark.parametrize("kind", tokenizer_files.MAKERS)
def test_an_answer_stops_if_all_prompts_have_a_stop_string_after_them(
  kind, tmp_path
):
  """The same tokens can be another text after each of several prompts.

  These tokenizers drop the space at the start of a text. So the tokens of
  " world" after "hello" are "world" after an empty prompt.
  """
  tokenizer = load_tokenizer(tokenizer_files.save(tmp_path, kind))
  prompts = [tokenizer.encode_prompt(""), tokenizer.encode_prompt("hello")]
  world = tokens_after("hello", " world", tokenizer)

  stop_after_one_prompt = StopStrings(tokenizer, prompts, stops=[" world"])
  stop_after_both_prompts = StopStrings(tokenizer, prompts, stops=["world"])

  assert not stop_after_one_prompt(world)
  assert stop_after_both_prompts(world)


@pytest.mark.parametrize("kind", ["llama_2", "word_piece"])
def test_the_command_prints_the_space_after_a_prompt(kind, tmp_path, capsys):
  """The answer alone would be decoded to "world", without its space."""
  tokenizer = load_tokenizer(tokenizer_files.save(tmp_path, kind))
  world = tokens_after("hello", " world", tokenizer)
  printer = StreamPrinter(
    "hello", tokenizer, tokenizer.encode_prompt("hello"), stops=[]
  )

  # The answer has no token at first, and then one more each time.
  for num_tokens in range(len(world) + 1):
    printer.update(world[:num_tokens])
  printer.finish(world)

  assert capsys.readouterr().out == "hello world\n"


@pytest.fixture
def world_model(tmp_path):
  """A model that continues every prompt with the word "world"."""
  tokenizer = load_tokenizer(tokenizer_files.save(tmp_path, "llama_2"))
  world_id = tokenizer.encode("hello world")[-1]
  config = dataclasses.replace(
    MODEL, vocab_size=tokenizer.vocab_size, tie_embeddings=False
  )
  model = Decoder(config)
  params = parameters(model, np.zeros((1, 1), np.int32))

  # The layers add nothing to the hidden states, which are all ones.
  params["layers"] = jax.tree.map(np.zeros_like, params["layers"])
  params["embedding"] = np.ones_like(params["embedding"])
  # Only "world" has a positive logit.
  params["unembedding"] = np.zeros_like(params["unembedding"])
  params["unembedding"][world_id] = 9
  return Trained(
    name="run",
    config=Config(model=config),
    model=model,
    params=params,
    tokenizer=tokenizer,
  )


def test_a_sampler_of_texts_returns_the_space_after_a_prompt(world_model):
  """`world_model` continues every prompt with the word "world"."""
  sampler = Sampler(world_model, capacity=CAPACITY)

  assert sampler.generate(["hello"], 1) == [" world"]


def test_the_sample_of_a_run_has_the_space_after_its_prompt(
  world_model, tmp_path
):
  """`world_model` continues every prompt with the word "world"."""
  workdir = tmp_path / "run"
  # Training leaves a lock file and a log in its workdir.
  with lock(workdir) as held:
    pass
  (workdir / "metrics.jsonl").write_text('{"step": 1, "train/loss": 5.0}\n')
  train = TrainConfig(steps=1, sample_prompt="hello", sample_tokens=1)
  config = dataclasses.replace(world_model.config, train=train)
  result = TrainResult(
    config=config,
    workdir=str(workdir),
    mesh=make_mesh(config.mesh),
    model=world_model.model,
    params=world_model.params,
    tokenizer=world_model.tokenizer,
    step=1,
    check_lock=held.check,
  )

  finish.finish(result)

  assert (workdir / "sample.txt").read_text() == "hello world"


# Several devices.


def test_each_device_holds_its_part_of_the_parameters(workdir):
  """With `tensor=2`, two devices share the heads."""
  one_device = load(workdir).params
  two_devices = load(workdir, tensor=2).params

  query = two_devices["layers"]["attention"]["query"]
  # The shape is [layers, inputs, heads, ...]. Shard 1 is on the second device.
  num_heads_of_device = query.addressable_shards[1].data.shape[2]
  assert num_heads_of_device == MODEL.num_heads // 2
  chex.assert_trees_all_equal(jax.device_get(two_devices), one_device)


@pytest.mark.full
def test_several_devices_print_the_text_of_one(workdir, abc_result):
  result = run_generate(
    f"--workdir={workdir}",
    "--prompt=abc",
    "--max_new_tokens=20",
    "--seed=3",
    "--tensor=2",
  )

  assert result.stdout == abc_result.stdout, result.stderr


# The attention implementation of a loaded model.


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_loaded_model_has_the_attention_of_its_config(
  tensor, tmp_path, capsys
):
  """A model on several devices must not fall back to another implementation.

  `tensor` is the number of devices that share the heads.
  """
  save_run(tmp_path, random_parameters(), attention_implementation="reference")

  attention = load(tmp_path, tensor=tensor).model.attention_fn

  assert attention.keywords["implementation"] == "reference"
  assert not capsys.readouterr().err


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    pytest.param("pallas_gpu", "needs ", id="pallas_gpu"),
    pytest.param("pallas_tpu", "TPU", id="pallas_tpu"),
    pytest.param(
      "mine",
      "no implementation of that name is registered",
      id="not registered",
    ),
  ],
)
def test_attention_that_cannot_run_here_is_replaced_with_a_warning(
  name, reason, tmp_path, capsys
):
  """A run may come from a machine with other devices or with a plugin."""
  save_run(tmp_path, random_parameters(), attention_implementation=name)

  trained = load(tmp_path)

  assert trained.model.attention_fn is diff_attention
  assert trained.config.model.attention_implementation == name
  [line] = capsys.readouterr().err.splitlines()
  assert f"attention_implementation = {name!r}, which cannot run" in line
  assert reason in line
  assert line.endswith("'auto' is used instead")


# Weights in int8.


@pytest.mark.full
def test_weights_in_int8_print_the_text_of_a_rounded_model(workdir):
  """A sampler with the same rounded weights generates the printed text."""
  pytest.importorskip("qwix")
  rounded = load(workdir, weight_dtype="int8")
  sampler = Sampler(rounded, capacity=CAPACITY)
  [text] = sampler.generate(["abc"], max_new_tokens=20)

  result = run_generate(
    f"--workdir={workdir}",
    "--prompt=abc",
    "--max_new_tokens=20",
    "--temperature=0",
    "--weight_dtype=int8",
  )

  assert result.stdout == f"abc{text}\n", result.stderr
  # Results of evaluations contain this name, so they tell the rounding.
  assert rounded.name.endswith("at step 0, weights in int8")


def test_int8_without_qwix_says_what_to_install(workdir, monkeypatch):
  # With None in sys.modules, an import fails as if it were not installed.
  monkeypatch.setitem(sys.modules, "qwix", None)

  result = run_generate(
    f"--workdir={workdir}", "--prompt=abc", "--weight_dtype=int8"
  )

  assert result.returncode == 1
  assert result.stderr.endswith(
    "error: weights in int8 need qwix: pip install 'diffjax[int8]'\n"
  )


def test_loading_rejects_other_weight_dtypes(workdir):
  with pytest.raises(UserError, match="weight_dtype = 'int4': must be 'int8'"):
    load(workdir, weight_dtype="int4")


# Errors.


def assert_one_error(
  result: subprocess.CompletedProcess, returncode: int, message: str
) -> None:
  """Asserts that a command printed nothing but an error as its last line."""
  assert result.returncode == returncode
  assert not result.stdout
  assert "Traceback" not in result.stderr
  last_line = result.stderr.splitlines()[-1]
  assert last_line.startswith("error: ")
  assert message in last_line


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    pytest.param(
      ["--prompt=x", "--tensor=3"],
      "num_kv_heads = 2, ffn_dim = 32, vocab_size = 256; it can be 1, 2",
      id="tensor does not divide the heads",
    ),
    pytest.param(
      ["--prompt=x", "--tensor=16"],
      "tensor = 16: must be at most the 8 devices here and divide",
      id="too few devices",
    ),
    pytest.param(
      ["--prompt=x", "--step=7"],
      "there is no complete checkpoint of step 7",
      id="no such step",
    ),
    pytest.param(
      ["--prompt=" + "x" * 700],
      "701 tokens and 200 new ones are more than the 600 that a row can have",
      id="prompt too long",
    ),
    pytest.param(
      ["--prompt=x", "--top_p=2"],
      "top_p must be above 0 and at most 1; got 2.0",
      id="top_p",
    ),
    pytest.param(
      ["--prompt=x", "--temperature=-1"],
      "temperature must be",
      id="temperature",
    ),
  ],
)
def test_options_that_do_not_fit_the_model_are_one_error(
  workdir, arguments, message
):
  """The model has 2 heads and rows of at most 600 tokens.

  A token is a byte. A prompt has one more before its text, so 700 + 1 here.
  """
  result = run_generate(f"--workdir={workdir}", *arguments)

  assert_one_error(result, returncode=1, message=message)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    pytest.param([], "pass --workdir=DIR", id="no workdir"),
    pytest.param(["--workdir=run"], "pass --prompt=TEXT", id="no prompt"),
    pytest.param(
      ["--workdir=run", "--prompt=x", "--stop="],
      "--stop must not be empty",
      id="empty stop string",
    ),
  ],
)
def test_missing_or_empty_flags_are_one_error(arguments, message):
  result = run_generate(*arguments)

  assert_one_error(result, returncode=2, message=message)


def test_a_workdir_without_a_checkpoint_is_an_error():
  result = run_generate("--workdir=/nowhere", "--prompt=x")

  message = "there is no complete checkpoint in /nowhere/checkpoints"
  assert_one_error(result, returncode=1, message=message)


def test_a_checkpoint_without_its_tokenizer_is_an_error(tmp_path):
  save_run(tmp_path, random_parameters(), tokenizer="/nowhere/tokenizer.json")

  result = run_generate(f"--workdir={tmp_path}", "--prompt=x")

  message = "there is no tokenizer beside the checkpoint: neither"
  assert_one_error(result, returncode=1, message=message)


@pytest.mark.parametrize(
  ("module", "argument"),
  [
    pytest.param("diffjax.generate", "--prompt=x", id="generate"),
    pytest.param("diffjax.evaluate", "--suite=validation", id="evaluate"),
  ],
)
def test_parameters_that_are_not_finite_are_rejected(
  module, argument, tmp_path
):
  """With NaN, a model would generate zero bytes, and results would be NaN."""
  params = random_parameters()
  attention = params["layers"]["attention"]
  attention["query"] = np.full_like(attention["query"], np.nan)
  save_run(tmp_path, params)

  result = in_process.call(module, f"--workdir={tmp_path}", argument)

  message = (
    f"{tmp_path} at step 0 has parameters that are not finite:"
    " layers/attention/query: "
  )
  assert_one_error(result, returncode=1, message=message)


def test_a_damaged_checkpoint_is_an_error(tmp_path):
  """A single bit of the stored parameters is wrong."""
  save_run(tmp_path, random_parameters())
  paths = (tmp_path / "checkpoints/0").rglob("*")
  files = [path for path in paths if path.is_file()]
  # The largest file holds parameters. Invert one bit of its byte 1000.
  largest_file = max(files, key=lambda file: file.stat().st_size)
  content = bytearray(largest_file.read_bytes())
  content[1000] ^= 1
  largest_file.write_bytes(content)

  result = run_generate(f"--workdir={tmp_path}", "--prompt=x")

  assert_one_error(result, returncode=1, message="is damaged")
