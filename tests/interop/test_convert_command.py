"""`python -m diffjax.convert` converts a model, or prints a one-line error.

It writes nothing if there is an error.
"""

import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from diffjax.cli import config_file
from diffjax.config import (
  Config,
  DataConfig,
  TrainConfig,
  UserError,
  from_config_dict,
)
from diffjax.interop import diffllama, unilm, workdir
from diffjax.training.checkpoint import Checkpoints
from tests.interop.small_models import (
  convert,
  copy_golden,
  edit_config,
  make_model,
  read_tensors,
  write_llama,
  write_tokenizer,
)


def assert_conversion_fails(
  source: str,
  target: pathlib.Path,
  message: str,
  target_layout: str = "diffjax",
) -> None:
  """Asserts that a conversion prints a one-line error and writes nothing.

  Args:
    source: the model, as LAYOUT:PATH.
    target: where to write it. The path must not exist.
    message: a regular expression that the line must contain.
    target_layout: the layout of the target.
  """
  result = convert(f"--from={source}", f"--to={target_layout}:{target}")

  # The command exits with 1 for an error, and with 2 for wrong flags.
  assert result.returncode == 1
  assert not result.stdout
  (line,) = result.stderr.splitlines()
  assert line.startswith("error: ")
  assert re.search(message, line), line
  assert not target.exists()


def assert_llama_is_rejected(directory: pathlib.Path, message: str) -> None:
  """Asserts that the conversion of directory/"llama" fails with a message."""
  assert_conversion_fails(
    f"llama:{directory}/llama", directory / "out", message
  )


# The flags.


@pytest.mark.parametrize(
  ("arguments", "end_of_message"),
  [
    pytest.param([], "", id="no flags"),
    pytest.param(
      ["--from=runs/tiny", "--to=diffllama:x"],
      "; got 'runs/tiny'",
      id="no layout",
    ),
    pytest.param(
      ["--from=diffjax:", "--to=diffllama:x"], "; got 'diffjax:'", id="no path"
    ),
  ],
)
def test_from_must_name_a_layout_and_a_path(arguments, end_of_message):
  """A layout is a file format of models, with its own names of tensors."""
  result = convert(*arguments)

  assert result.returncode == 2
  assert result.stderr == (
    "error: pass --from=LAYOUT:PATH, LAYOUT one of diffjax, diffllama, unilm,"
    f" llama, motif{end_of_message}\n"
  )


@pytest.mark.parametrize(
  ("arguments", "end_of_message"),
  [
    pytest.param([], "", id="no flag"),
    pytest.param(["--to=gguf:x"], "; got 'gguf:x'", id="unknown layout"),
  ],
)
def test_to_must_name_a_layout_and_a_path(arguments, end_of_message):
  """A layout is a file format of models. "gguf" is none of diffjax's."""
  result = convert("--from=diffjax:runs/tiny", *arguments)

  assert result.returncode == 2
  assert result.stderr == (
    "error: pass --to=LAYOUT:PATH, LAYOUT one of diffjax, diffllama, unilm,"
    f" llama, motif{end_of_message}\n"
  )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    pytest.param(
      ["--from=diffjax:runs/tiny", "--to=llama:x"],
      "--to=llama: this layout can only be read",
      id="a layout that is not written",
    ),
    pytest.param(
      ["--from=llama:x", "--to=diffjax:y", "--dtype=bfloat16"],
      "--dtype=bfloat16: a workdir's parameters are always float32",
      id="the dtype of a workdir",
    ),
    pytest.param(
      ["--from=llama:x", "--to=unilm:y", "--dtype=int8"],
      "flag --dtype=int8: value should be one of <float32|bfloat16>",
      id="an unknown dtype",
    ),
    pytest.param(
      ["--from=llama:gs://bucket/x", "--to=diffjax:y"],
      "--from=llama:gs://bucket/x: only workdirs may be gs://",
      id="a bucket",
    ),
    pytest.param(
      ["--from=llama:x", "--to=diffjax:y", "--config=x"],
      "Unknown command line flag 'config'",
      id="an unknown flag",
    ),
    pytest.param(
      ["llama", "diffjax"],
      "unexpected argument 'llama'",
      id="an argument without a flag",
    ),
  ],
)
def test_wrong_flags_are_rejected_with_exit_code_2(arguments, message):
  """The exit code of other errors is 1."""
  result = convert(*arguments)

  assert result.returncode == 2
  (line,) = result.stderr.splitlines()
  assert line.startswith(f"error: {message}")


# A Llama's config.json.


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    (
      "model_type",
      "mistral",
      "model_type = 'mistral': this layout supports only 'llama'",
    ),
    (
      "attention_bias",
      True,
      "attention_bias = True: diffjax supports only False",
    ),
    ("mlp_bias", True, "mlp_bias = True: diffjax supports only False"),
    ("hidden_act", "gelu", "hidden_act = 'gelu': diffjax supports only 'silu'"),
    (
      "rope_scaling",
      {"rope_type": "llama3", "factor": 8.0},
      "scales its rotary angles .*'llama3'",
    ),
    (
      "rope_scaling",
      {"type": "dynamic", "factor": 2.0},
      "scales its rotary angles .*'dynamic'",
    ),
    (
      "rope_scaling",
      {"type": "linear", "factor": 0.5},
      "rope_factor = 0.5: must be at least 1",
    ),
    (
      "rope_parameters",
      {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
      "scales its rotary angles .*'yarn'",
    ),
    (
      "rope_parameters",
      {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
      "scales its rotary angles",
    ),
    (
      "rope_parameters",
      "default",
      "rope_parameters = 'default': it must be an object",
    ),
  ],
)
def test_a_llama_with_unsupported_parts_is_rejected(
  field, value, message, tmp_path
):
  """diffjax would compute other logits than the model's own code."""
  write_llama(tmp_path / "llama")
  edit_config(tmp_path / "llama", {field: value})

  assert_llama_is_rejected(tmp_path, message)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    pytest.param(
      "sliding_window",
      9,
      "has fields that diffjax does not know: sliding_window = 9; remove the"
      " fields that do not change",
      id="sliding_window",
    ),
    pytest.param(
      "a\nb",
      "c" * 99,
      r"does not know: 'a\\nb' = 'c{59}; remove the fields",
      id="a line break and a long value",
    ),
  ],
)
def test_an_unknown_field_of_a_config_is_rejected(
  field, value, message, tmp_path
):
  """It may stand for a part of the model that diffjax would leave out."""
  write_llama(tmp_path / "llama")
  edit_config(tmp_path / "llama", {field: value})

  assert_llama_is_rejected(tmp_path, message)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("rope_theta", "x", "rope_base must be float; got 'x'"),
    ("hidden_size", None, "has no hidden_size"),
    (
      "hidden_size",
      "32",
      "hidden_size = '32': it must be a positive multiple of 1",
    ),
    ("num_hidden_layers", "2", "num_layers must be int; got '2'"),
    (
      "num_attention_heads",
      0,
      "num_attention_heads = 0: it must be a positive multiple of 1",
    ),
    ("num_key_value_heads", 3, "num_kv_heads = 3: must divide"),
    ("rms_norm_eps", 0, "norm_eps = 0.0: must be positive"),
  ],
)
def test_an_invalid_field_of_a_config_is_rejected(
  field, value, message, tmp_path
):
  """None is written as null, which counts as a missing field."""
  write_llama(tmp_path / "llama")
  edit_config(tmp_path / "llama", {field: value})

  assert_llama_is_rejected(tmp_path, message)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    (
      "num_hidden_layers",
      2_000_000_000,
      "tensors, but its config.json says 2000000000 layers",
    ),
    (
      "num_hidden_layers",
      1,
      r"a tensor model.layers.1\..*not in this layout for its config.json",
    ),
    ("num_hidden_layers", 3, r"no tensor model.layers.2\."),
    (
      "num_key_value_heads",
      4,
      r"k_proj.weight of shape \[16, 32\], but its config.json requires"
      r" \[32, 32\]",
    ),
    (
      "vocab_size",
      120,
      "tokenizer.json has 128 tokens, but the model has 120: replace it with"
      " the model's own tokenizer",
    ),
    ("vocab_size", 256, r"embed_tokens.weight of shape \[128, 32\]"),
    (
      "tie_word_embeddings",
      True,
      "has a lm_head.weight that differs .*says tie_word_embeddings: true",
    ),
  ],
)
def test_a_config_that_contradicts_the_tensors_is_rejected(
  field, value, message, tmp_path
):
  """The tensors are those of an untied model with a vocabulary of 128 tokens.

  It has 2 layers, 4 heads of size 8, and 2 key/value heads.
  """
  write_llama(tmp_path / "llama")
  edit_config(tmp_path / "llama", {field: value})

  assert_llama_is_rejected(tmp_path, message)


def test_untied_embeddings_need_an_output_projection(tmp_path):
  """A tied model has no lm_head.weight: it uses its embeddings instead."""
  write_llama(tmp_path / "llama", is_tied=True)
  edit_config(tmp_path / "llama", {"tie_word_embeddings": False})

  assert_llama_is_rejected(
    tmp_path, "no tensor lm_head.weight.*set tie_word_embeddings to true"
  )


# The files of a Llama.


@pytest.mark.parametrize(
  ("end", "message"),
  [
    pytest.param(
      -100,
      "download it again: Error while deserializing header",
      id="without its end",
    ),
    pytest.param(
      50,
      "download it again: Error while deserializing header",
      id="only a part of the header",
    ),
    pytest.param(0, "", id="empty"),
  ],
)
def test_a_truncated_safetensors_file_is_rejected(end, message, tmp_path):
  """A download that was interrupted leaves such a file."""
  write_llama(tmp_path / "llama")
  path = tmp_path / "llama/model.safetensors"
  path.write_bytes(path.read_bytes()[:end])

  assert_llama_is_rejected(
    tmp_path, f"model.safetensors is not a whole safetensors file, {message}"
  )


@pytest.mark.parametrize(
  ("file_name", "message"),
  [
    ("config.json", "cannot read .*config.json: No such file"),
    ("tokenizer.json", "there is no tokenizer beside the model"),
    (
      "model.safetensors",
      "there is no .*model.safetensors; only safetensors are read, no pickles",
    ),
  ],
)
def test_the_error_names_a_missing_file(file_name, message, tmp_path):
  """These are the three files of a model."""
  write_llama(tmp_path / "llama")
  (tmp_path / "llama" / file_name).unlink()

  assert_llama_is_rejected(tmp_path, message)


def test_a_missing_directory_is_named(tmp_path):
  # The directory "llama" does not exist.
  assert_llama_is_rejected(
    tmp_path, "cannot read .*llama/config.json: No such file"
  )


@pytest.mark.parametrize(
  ("content", "message"),
  [
    pytest.param(b"[" * 100_000, "config.json is not JSON", id="deep"),
    pytest.param(b"\xff\xfe", "config.json is not JSON", id="binary"),
    pytest.param(b"[1]", "config.json must hold a JSON object", id="a list"),
  ],
)
def test_a_config_must_be_a_json_object(content, message, tmp_path):
  """Python's parser fails at 100,000 nested lists with an error of its own."""
  write_llama(tmp_path / "llama")
  (tmp_path / "llama/config.json").write_bytes(content)

  assert_llama_is_rejected(tmp_path, message)


def test_a_tokenizer_in_another_format_is_rejected(tmp_path):
  write_llama(tmp_path / "llama")
  # The JSON is valid, but has no vocabulary.
  (tmp_path / "llama/tokenizer.json").write_text("{}")

  assert_llama_is_rejected(tmp_path, "not a Hugging Face tokenizer.json")


@pytest.mark.parametrize(
  ("content", "message"),
  [
    pytest.param(
      '{"weight_map": {"model.norm.weight": "model-2.safetensors"}}',
      "no .*model-2.safetensors, which .*index.json names",
      id="a missing file",
    ),
    pytest.param(
      '{"weight_map": {"model.norm.weight": "../other.safetensors"}}',
      "names a file '../other.safetensors': it must be in the same directory",
      id="a file in another directory",
    ),
    pytest.param('{"weights": {}}', "has no weight_map", id="no weight_map"),
    pytest.param("{", "index.json is not JSON", id="not JSON"),
  ],
)
def test_a_wrong_index_of_shards_is_rejected(content, message, tmp_path):
  """The index of a model in several files names the file of each tensor."""
  write_llama(tmp_path / "llama")
  (tmp_path / "llama/model.safetensors").unlink()
  (tmp_path / "llama/model.safetensors.index.json").write_text(content)

  assert_llama_is_rejected(tmp_path, message)


def test_a_missing_tensor_is_named(tmp_path):
  """A Llama without its last norm is no Llama."""
  tensors = write_llama(tmp_path / "llama")
  del tensors["model.norm.weight"]
  safetensors.numpy.save_file(tensors, tmp_path / "llama/model.safetensors")

  assert_llama_is_rejected(tmp_path, "has no tensor model.norm.weight")


def test_a_llama_with_biases_is_rejected(tmp_path):
  """Its config.json does not say that there are biases. The tensors do."""
  tensors = write_llama(tmp_path / "llama")
  name = "model.layers.0.self_attn.q_proj.bias"
  tensors[name] = np.ones(32, np.float32)
  safetensors.numpy.save_file(tensors, tmp_path / "llama/model.safetensors")

  assert_llama_is_rejected(
    tmp_path, f"has a tensor {name}.*: biases are not supported"
  )


@pytest.mark.parametrize(
  ("dtype", "message"),
  [
    (np.float64, "model.norm.weight in F64: only F32, F16, BF16"),
    (np.int8, "model.norm.weight in I8"),
  ],
)
def test_tensors_other_than_floats_of_at_most_32_bits_are_rejected(
  dtype, message, tmp_path
):
  """Parameters are float32: float64 would be rounded, and int8 needs scales."""
  tensors = write_llama(tmp_path / "llama")
  tensors["model.norm.weight"] = np.ones(32, dtype)
  safetensors.numpy.save_file(tensors, tmp_path / "llama/model.safetensors")

  assert_llama_is_rejected(tmp_path, message)


# Other layouts.


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    (
      "num_attention_heads",
      5,
      "num_attention_heads = 5: it must be a positive multiple of 2",
    ),
    (
      "num_key_value_heads",
      1,
      "num_key_value_heads = 1: it must be a positive multiple of 2",
    ),
    (
      "model_type",
      "llama",
      "model_type = 'llama': this layout supports only 'diffllama'",
    ),
  ],
)
def test_a_diffllama_with_an_invalid_config_is_rejected(
  field, value, message, tmp_path
):
  """Its heads are in pairs, a signal head and a noise head."""
  source = copy_golden("diffllama_tiny_gqa", tmp_path / "source").path
  edit_config(source, {field: value})

  assert_conversion_fails(
    source=f"diffllama:{source}", target=tmp_path / "out", message=message
  )


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("diff_version", 3, "diff_version = 3: it must be 1 or 2"),
    (
      "diff_version",
      1,
      r"has no tensor layers.0.self_attn.out_proj.weight|requires",
    ),
    ("norm_eps", None, "norm_eps must be float; got None"),
    (
      "share_input_output_embed",
      False,
      "no tensor output_projection.weight.*set share_input_output_embed to"
      " true",
    ),
  ],
)
def test_an_invalid_unilm_config_is_rejected(field, value, message, tmp_path):
  """The model is a DIFF V2, in the layout of the authors."""
  unilm.write(str(tmp_path / "source"), make_model("diff_v2"), "float32")
  edit_config(tmp_path / "source", {field: value})

  assert_conversion_fails(
    source=f"unilm:{tmp_path}/source", target=tmp_path / "out", message=message
  )


def test_a_missing_field_of_a_unilm_config_is_named(tmp_path):
  """unilm is the layout of the authors' code."""
  unilm.write(str(tmp_path / "source"), make_model("diff"), "float32")
  path = tmp_path / "source/config.json"
  config = json.loads(path.read_text())
  del config["rope_theta"]
  path.write_text(json.dumps(config))

  assert_conversion_fails(
    source=f"unilm:{tmp_path}/source",
    target=tmp_path / "out",
    message="config.json has no rope_theta",
  )


@pytest.mark.parametrize(
  ("attention", "fields", "message"),
  [
    (
      "diff_v2",
      {},
      "DiffLlama supports only attention = 'diff'; the model has 'diff_v2'",
    ),
    (
      "softmax",
      {},
      "DiffLlama supports only attention = 'diff'; the model has 'softmax'",
    ),
    (
      "diff",
      {"lambda_init": 0.8},
      "DiffLlama supports only lambda_init = None, the schedule; the model has"
      " 0.8",
    ),
    ("diff", {"head_norm": False}, "supports only head_norm = True"),
    ("diff", {"window": 8}, "supports only window = None; the model has 8"),
    (
      "diff",
      {"embed_scale": 2.0},
      "supports only embed_scale = 1.0; the model has 2.0",
    ),
  ],
)
def test_diffllama_rejects_a_model_that_it_cannot_represent(
  attention, fields, message, tmp_path
):
  """transformers would compute other logits from the written files."""
  model = make_model(attention, **fields)

  with pytest.raises(UserError, match=message):
    diffllama.write(str(tmp_path / "out"), model, "float32")

  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  ("attention", "fields", "message"),
  [
    (
      "softmax",
      {},
      "support only attention = 'diff' or 'diff_v2'; the model has 'softmax'",
    ),
    (
      "diff_v2",
      {"rope": False},
      "supports only rope = True; the model has False",
    ),
    (
      "diff",
      {"projection_biases": True},
      "supports only projection_biases = False",
    ),
    (
      "diff",
      {"lambda_init": 0.8},
      "lambda_init = None, the schedule; the model has 0.8",
    ),
    ("diff", {"head_norm": False}, "V1 layer supports only head_norm = True"),
    (
      "diff_v2",
      {"head_norm": True},
      "V2 layer supports only head_norm = False",
    ),
    (
      "diff",
      {"norm_eps": 1e-6},
      "norm_eps = 1e-05, the ε of its head norm; the model has 1e-06",
    ),
    ("diff", {"head_dim": 8}, "the model has 32, which is not 2 · 8 · 4"),
  ],
)
def test_unilm_rejects_a_model_that_it_cannot_represent(
  attention, fields, message, tmp_path
):
  """The authors' code would compute other logits from the written files."""
  model = make_model(attention, **fields)

  with pytest.raises(UserError, match=message):
    unilm.write(str(tmp_path / "out"), model, "float32")

  assert not (tmp_path / "out").exists()


# Workdirs.


@pytest.fixture(scope="module")
def word_workdir(tmp_path_factory):
  """Returns a workdir whose tokenizer.json has 128 tokens."""
  directory = tmp_path_factory.mktemp("word_workdir")
  write_tokenizer(directory)
  model = make_model("diff", tokenizer=str(directory / "tokenizer.json"))
  workdir.write(str(directory / "written"), model)
  # The path of the tokenizer in the config exists no longer. So a copy of the
  # workdir has only its own tokenizer.
  return (directory / "written").rename(directory / "run")


def test_convert_rejects_a_model_that_the_target_cannot_represent(tmp_path):
  """The model is a Transformer, and the target a DIFF Transformer."""
  workdir.write(str(tmp_path / "run"), make_model("softmax", num_layers=1))

  assert_conversion_fails(
    source=f"diffjax:{tmp_path}/run",
    target=tmp_path / "out",
    message="DiffLlama supports only attention = 'diff'",
    target_layout="diffllama",
  )


def test_a_workdir_without_a_checkpoint_is_rejected(tmp_path):
  # The directory "nowhere" does not exist.
  assert_conversion_fails(
    source=f"diffjax:{tmp_path}/nowhere",
    target=tmp_path / "out",
    message="there is no complete checkpoint in",
    target_layout="diffllama",
  )


def test_a_tokenizer_that_is_not_the_one_of_training_is_rejected(
  word_workdir, tmp_path
):
  """The model of word_workdir was trained with a tokenizer of 128 tokens."""
  run = shutil.copytree(word_workdir, tmp_path / "run")
  write_tokenizer(run, vocab_size=200)

  assert_conversion_fails(
    source=f"diffjax:{run}",
    target=tmp_path / "out",
    message="was trained with 128 tokens, but its tokenizer .* has 200: it is"
    " another one",
    target_layout="diffllama",
  )


def test_a_workdir_without_its_tokenizer_is_rejected(word_workdir, tmp_path):
  """Token ids have no meaning without the tokenizer of training."""
  run = shutil.copytree(word_workdir, tmp_path / "run")
  (run / "tokenizer.json").unlink()

  assert_conversion_fails(
    source=f"diffjax:{run}",
    target=tmp_path / "out",
    message="there is no tokenizer beside the checkpoint",
    target_layout="diffllama",
  )


def test_a_damaged_checkpoint_is_rejected(word_workdir, tmp_path):
  """One byte of the embedding is lost."""
  run = shutil.copytree(word_workdir, tmp_path / "run")
  embedding = run / "checkpoints/0/state/params.embedding/c"
  chunk, *_ = [path for path in embedding.rglob("*") if path.is_file()]
  chunk.write_bytes(chunk.read_bytes()[:-1])

  result = convert(f"--from=diffjax:{run}", f"--to=diffllama:{tmp_path}/out")

  assert result.returncode == 1
  assert not (tmp_path / "out").exists()
  # The line before is a warning that describes the damage.
  last_line = result.stderr.splitlines()[-1]
  assert re.match("error: every checkpoint in .* is damaged", last_line)


@pytest.mark.skipif(
  importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed"
)
@pytest.mark.parametrize(
  "arguments",
  [
    pytest.param(["--from=llama:x", "--to=diffjax:gs://b/x"], id="to"),
    pytest.param(["--from=diffjax:gs://b/x", "--to=unilm:x"], id="from"),
  ],
)
def test_a_bucket_needs_gcsfs(arguments):
  """Paths that begin with gs:// are in a bucket of Google Cloud Storage."""
  result = convert(*arguments)

  assert result.returncode == 1
  assert result.stderr == (
    "error: the workdir gs://b/x needs gcsfs: pip install 'diffjax[gcs]'\n"
  )


# Paths.


@pytest.mark.parametrize("target_layout", ["diffjax", "diffllama"])
@pytest.mark.parametrize(
  "existing_file",
  [
    pytest.param("target", id="a file"),
    pytest.param("target/notes.txt", id="a directory with a file"),
    pytest.param("target/run/notes.txt", id="a directory of directories"),
  ],
)
def test_convert_does_not_write_to_an_existing_target(
  existing_file, target_layout, tmp_path
):
  """The target must be a new path or an empty directory.

  Here, it is the path "target", and `existing_file` is this path or below it.
  """
  write_llama(tmp_path / "llama")
  target = tmp_path / "target"
  file = tmp_path / existing_file
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text("text")
  paths_before = sorted(tmp_path.rglob("*"))

  result = convert(
    f"--from=llama:{tmp_path}/llama", f"--to={target_layout}:{target}"
  )

  assert result.returncode == 1
  assert result.stderr == (
    f"error: --to: {target} exists and is not an empty directory; choose"
    " another one, or delete it\n"
  )
  assert sorted(tmp_path.rglob("*")) == paths_before
  assert file.read_text() == "text"


@pytest.mark.parametrize(
  ("source", "message"),
  [
    pytest.param(
      "x" * 300, "cannot read .*: File name too long", id="too long"
    ),
    pytest.param(
      "~nobody-of-that-name/x",
      "cannot read .*: No such file",
      id="no such user",
    ),
  ],
)
def test_a_path_that_cannot_exist_is_rejected(source, message, tmp_path):
  """Such a path is an error of the user, and not of the program."""
  result = convert(f"--from=llama:{source}", f"--to=unilm:{tmp_path}/out")

  assert result.returncode == 1
  assert re.fullmatch(f"error: {message}.*\n", result.stderr), result.stderr


@pytest.mark.parametrize("target_layout", ["diffjax", "unilm"])
def test_a_target_inside_a_file_is_rejected(target_layout, tmp_path):
  """A directory cannot be made below a file."""
  write_llama(tmp_path / "llama")
  (tmp_path / "file").write_text("text")

  result = convert(
    f"--from=llama:{tmp_path}/llama",
    f"--to={target_layout}:{tmp_path}/file/below",
  )

  assert result.returncode == 1
  (line,) = result.stderr.splitlines()
  assert line.startswith("error: cannot ")
  assert str(tmp_path / "file") in line


# What is written and printed.


def test_the_printed_flags_include_fields_that_are_false(tmp_path):
  """`diffjax.train` needs them to build a model with the same tensors."""
  write_llama(tmp_path / "llama")

  result = convert(
    f"--from=llama:{tmp_path}/llama", f"--to=diffjax:{tmp_path}/out"
  )

  assert result.returncode == 0, result.stderr
  printed_flags = result.stdout.split()
  assert "--config.model.head_norm=False" in printed_flags
  assert "--config.model.tie_embeddings=False" in printed_flags


class Conversion(NamedTuple):
  """A conversion that succeeded.

  Attributes:
    source: the directory of the model.
    target: the directory that was written.
    result: the exit code and the output of the command.
  """

  source: pathlib.Path
  target: pathlib.Path
  result: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def llama_to_unilm(tmp_path_factory):
  """Converts a Llama with 128 embeddings, but a tokenizer of 100 tokens."""
  directory = tmp_path_factory.mktemp("llama_to_unilm")
  source = directory / "llama"
  target = directory / "unilm"
  write_llama(source)
  write_tokenizer(source, vocab_size=100)
  result = convert(
    f"--from=llama:{source}", f"--to=unilm:{target}", "--dtype=bfloat16"
  )
  assert result.returncode == 0, result.stderr
  return Conversion(source, target, result)


def test_the_sizes_and_the_document_tokens_are_printed(llama_to_unilm):
  assert llama_to_unilm.result.stdout == (
    f"{llama_to_unilm.target}: diff_v2, 2 layers of width 32, vocabulary 128"
    " (its tokenizer has 100)\n"
    "documents: TEXT <|endoftext|>; generation stops at <|endoftext|>\n"
  )
  assert llama_to_unilm.result.stderr == ""


def test_tensors_are_written_in_the_dtype_of_the_flag(llama_to_unilm):
  tensors = read_tensors(llama_to_unilm.target)

  dtypes = {tensor.dtype for tensor in tensors.values()}
  assert dtypes == {np.dtype(ml_dtypes.bfloat16)}


def test_the_tokenizer_is_copied(llama_to_unilm):
  source = (llama_to_unilm.source / "tokenizer.json").read_text()
  target = (llama_to_unilm.target / "tokenizer.json").read_text()

  assert target == source


# The model card.

CARD_FIGURE = {
  "name": "accuracy",
  "at": {"depth": 0.5},
  "value": 0.25,
  "low": 0.125,
  "high": 0.5,
}
# The run has stopped at step 6 of 7. The checkpoint of step 5 is exported.
METRICS = [
  {"step": 2, "validation/loss": 3.0, "validation/others": 4.0},
  {"step": 5, "validation/loss": 2.0, "validation/others": None},
  {"step": 6, "validation/loss": 1.0},
]
LAYOUTS = ["diffllama", "unilm", "diffjax"]


class ExportedRun(NamedTuple):
  """A run that was converted to several layouts.

  Attributes:
    config: the run's config.
    directory: has a directory out_LAYOUT for each of LAYOUTS.
  """

  config: Config
  directory: pathlib.Path

  def card(self, layout: str) -> str:
    """Returns the README.md of a conversion."""
    return (self.directory / f"out_{layout}" / "README.md").read_text()


def write_run(run: pathlib.Path) -> Config:
  """Writes a workdir with metrics and evaluations, and returns its config."""
  model = make_model("diff")
  config = Config(
    model=model.config,
    data=DataConfig(source="text:a|b/*.txt", length=16),
    train=TrainConfig(steps=7, batch_size=2),
  )
  state: dict[str, Any] = {"params": jax.device_put(model.params)}
  with Checkpoints(str(run), keep=1) as checkpoints:
    checkpoints.save(
      5, state, data_state={"shares": []}, config=config.to_dict()
    )
    checkpoints.wait()

  lines = [json.dumps(metrics) for metrics in METRICS]
  # The last line and one evaluation were interrupted.
  lines.append('{"step": 7')
  (run / "metrics.jsonl").write_text("\n".join(lines))
  (run / "evals").mkdir()
  report = {
    "models": [{"name": f"{run} at step 5"}],
    "figures": [CARD_FIGURE] * 20,
  }
  (run / "evals/needle.json").write_text(json.dumps(report))
  (run / "evals/validation.json").write_text("{")
  return config


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory):
  """Returns a run that was converted to each of LAYOUTS.

  Only the DiffLlama is in bfloat16.
  """
  directory = tmp_path_factory.mktemp("exported_run")
  config = write_run(directory / "run")
  for layout in LAYOUTS:
    flags = ["--dtype=bfloat16"] if layout == "diffllama" else []
    result = convert(
      f"--from=diffjax:{directory / 'run'}",
      f"--to={layout}:{directory / f'out_{layout}'}",
      *flags,
    )
    assert result.returncode == 0, result.stderr
  return ExportedRun(config, directory)


@pytest.mark.parametrize(
  ("layout", "library"),
  [("diffllama", "transformers"), ("unilm", "diffjax"), ("diffjax", "diffjax")],
)
def test_a_model_card_begins_with_the_metadata_of_the_hub(
  exported_run, layout, library
):
  """The Hugging Face Hub reads them to show how the model is loaded."""
  card = exported_run.card(layout)

  assert card.startswith(
    f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n"
  )
  assert "license" not in card


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_card_describes_the_training(exported_run, layout):
  """The card is README.md. The exported checkpoint is of step 5 of 7."""
  card = exported_run.card(layout)

  assert f"# out_{layout}\n" in card
  assert "DIFF Transformer (V1)" in card
  assert "trained with diffjax for 5 steps" in card
  assert "trained on rows of 16 tokens" in card
  assert "| steps | 5 of 7 |" in card
  # A step has 2 rows of 16 tokens.
  assert "| tokens | 160, 32 a step |" in card
  assert "| text | text:a\\|b/*.txt |" in card


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_card_has_the_latest_losses_up_to_the_exported_step(
  exported_run, layout
):
  """The run has logged losses at steps 2, 5 and 6. Step 5 is exported."""
  card = exported_run.card(layout)

  # A row has the name, the value and the step. At step 5, "others" is missing.
  assert "| loss | 2 | 5 |\n| others | 4 | 2 |" in card


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_card_has_the_first_twelve_figures_of_an_evaluation(
  exported_run, layout
):
  """The evaluation "needle" has 20 equal values of 0.25."""
  card = exported_run.card(layout)

  assert card.count("| accuracy | depth 0.5 | 0.25 [0.125, 0.5] |") == 12
  assert "the first of 20" in card
  assert "`needle`, at step 5" in card


@pytest.mark.parametrize(
  ("layout", "is_rounded"),
  [("diffllama", True), ("unilm", False), ("diffjax", False)],
)
def test_a_model_card_says_whether_the_weights_are_rounded(
  exported_run, layout, is_rounded
):
  """Only the DiffLlama was written with --dtype=bfloat16."""
  card = exported_run.card(layout)

  says_rounded = "rounded to bfloat16" in card
  assert says_rounded is is_rounded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_config_in_a_model_card_is_the_config_of_the_run(
  exported_run, layout, tmp_path
):
  """The card has a block of TOML, which is a config file of diffjax."""
  card = exported_run.card(layout)
  toml = re.search("```toml\n(.*?)```", card, re.DOTALL)[1]
  (tmp_path / "config.toml").write_text(toml)

  config = from_config_dict(config_file.read(str(tmp_path / "config.toml")))

  assert config == exported_run.config


def test_a_model_card_of_a_converted_workdir_states_no_training(
  exported_run, tmp_path
):
  """A converted workdir has a config and parameters, but no history."""
  result = convert(
    f"--from=diffjax:{exported_run.directory / 'out_diffjax'}",
    f"--to=unilm:{tmp_path}/again",
  )

  assert result.returncode == 0, result.stderr
  card = (tmp_path / "again/README.md").read_text()
  assert "converted from the layout diffjax" in card
  assert "Nothing is known here of its training" in card
  assert "## Measured" not in card
