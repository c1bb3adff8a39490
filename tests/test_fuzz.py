"""Any input of a user is accepted, or gives one line without a traceback."""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import math
import pathlib
import sys
import typing
from typing import Any, NamedTuple
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from absl.testing import flagsaver
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax.cli import command
from diffjax.config import (
  FIELDS,
  Config,
  DataConfig,
  TrainConfig,
  UserError,
  from_config_dict,
)
from diffjax.data.pipeline import training_batches
from diffjax.training import loop


def allowed_types() -> dict[str, tuple[type, ...]]:
  """Returns the types that each field may have, by its dotted name.

  Example: "train.steps" → (int,)
  """
  types_by_field = {}
  for section in dataclasses.fields(Config):
    hints = typing.get_type_hints(type(section.default))
    for name, hint in hints.items():
      alternatives = typing.get_args(hint) or (hint,)
      types_by_field[f"{section.name}.{name}"] = alternatives
  return types_by_field


TYPES = allowed_types()
# Texts that a user could write by mistake.
ODD = [
  "",
  " ",
  "None",
  "nan",
  "-inf",
  "1e400",
  "True",
  "-1",
  "0",
  "9" * 400,
  "0x10",
  "1_0",
  "٣",
  "[1, 2]",
  "(",
  "'",
  "=",
  "a\nb",
  "\udcff",
  "A=1,B=",
  "=0.5",
  "text:",
  "𝕏",
]
values = st.one_of(
  st.sampled_from(
    [
      0,
      -1,
      1,
      2**31,
      2**63,
      10**400,
      -(10**400),
      0.5,
      -0.0,
      1e-300,
      1e308,
      math.nan,
      math.inf,
      -math.inf,
      None,
      True,
      False,
      *ODD,
    ]
  ),
  st.integers(),
  st.floats(),
  st.text(max_size=8),
)
nested_values = st.one_of(
  values,
  st.lists(values, max_size=2),
  st.dictionaries(st.text(max_size=4), values, max_size=2),
  st.binary(max_size=3),
)
many_examples = settings(derandomize=True, deadline=None, max_examples=300)


def check_valid_or_one_error_line(values: Any) -> None:
  """Checks that values are a valid config, or that the error is one line.

  In a valid config, each value has the type of its field, is finite and is
  within the field's bound.
  """
  try:
    config = from_config_dict(values)
  except UserError as error:
    assert str(error).startswith("config")
    assert "\n" not in str(error)
    return

  for field, types in TYPES.items():
    section, name = field.split(".")
    value = getattr(getattr(config, section), name)
    assert isinstance(value, types), field
    if isinstance(value, float):
      assert math.isfinite(value), field
    bound = FIELDS[field].bound
    assert bound is None or bound.holds(value), field


# Names of fields. Some do not exist.
config_names = st.sampled_from([*FIELDS, "model.x", "x.steps", "train.", "."])


@many_examples
@given(st.dictionaries(config_names, nested_values, min_size=1, max_size=3))
def test_values_of_fields_are_accepted_or_one_error_line(changes):
  """Hypothesis draws `changes`, such as {"train.steps": "nan"}."""
  nested = Config().to_dict()
  for field, value in changes.items():
    section, name = field.split(".")
    nested.setdefault(section, {})[name] = value

  check_valid_or_one_error_line(nested)


section_names = st.sampled_from(["model", "data", "train", "x", ""])
sections = st.dictionaries(section_names, nested_values, max_size=3)


@many_examples
@given(st.one_of(nested_values, sections))
def test_whole_configs_are_accepted_or_one_error_line(nested):
  """Hypothesis draws `nested`, such as {"train": 3}."""
  check_valid_or_one_error_line(nested)


class Result(NamedTuple):
  """What a command did.

  Attributes:
    config: the config that the command's main function was called with. None
      if it was not called.
    code: the exit code.
    errors: what was printed to standard error.
  """

  config: Config | None
  code: int
  errors: str


def run_command(arguments: list[str]) -> Result:
  """Runs a command in this process that only reads its config."""
  configs = []
  errors = io.StringIO()
  code = None

  def main(config):
    configs.append(config)

  saved = flagsaver.save_flag_values()
  try:
    with (
      mock.patch.object(sys, "argv", ["train", *arguments]),
      contextlib.redirect_stderr(errors),
    ):
      # This always exits.
      command.run(main)
  except SystemExit as end:
    code = end.code or 0
  finally:
    flagsaver.restore_flag_values(saved)
  config = configs[0] if configs else None
  return Result(config, code, errors.getvalue())


def check_config_or_one_error_line(result: Result) -> None:
  """Checks that a command got a config, or printed one line."""
  if result.code == 0:
    assert isinstance(result.config, Config)
    return
  assert result.config is None
  assert result.code in (1, 2)
  [line] = result.errors.splitlines()
  assert line.startswith("error: ")


def as_argument(field, value):
  return f"--config.{field}={value}"


argument_names = st.sampled_from(
  [
    *FIELDS,
    "train",
    "model",
    "x",
    "train.x",
    "train.steps.x",
    "data.source[0]",
    "",
  ]
)
flag_names = st.sampled_from(
  ["config", "x", "config.", "config..", "verbosity"]
)
arguments_without_values = [
  "--",
  "-",
  "x",
  "",
  "--config",
  "--noconfig.model.head_norm",
  "--workdir=x",
]
for field in FIELDS:
  arguments_without_values.append(f"--config.{field}")
arguments = st.one_of(
  st.builds(as_argument, argument_names, values),
  st.builds("--{}={}".format, flag_names, values),
  st.sampled_from(arguments_without_values),
)


@many_examples
@given(st.lists(arguments, min_size=1, max_size=3))
def test_command_lines_are_accepted_or_one_error_line(arguments):
  """Hypothesis draws `arguments`, such as ["--config.train.steps=nan"]."""
  result = run_command(["--config=configs/tiny.py", *arguments])

  check_config_or_one_error_line(result)


architectures = st.sampled_from(
  ["diff", "transformer", "diff_v2", "gated", "heads", "architecture"]
)
option_names = st.sampled_from(["heads", "architecture", "x", ""])
option_values = st.one_of(values, st.sampled_from(["2", "8", "diff"]))
options = st.builds("{}={}".format, option_names, option_values)
variant_parts = st.one_of(architectures, options, st.text(max_size=8))
variants = st.lists(variant_parts, min_size=1, max_size=3).map(",".join)


@many_examples
@given(variants)
def test_variants_are_accepted_or_one_error_line(variant):
  """Hypothesis draws `variant`, such as "diff,heads=nan"."""
  result = run_command([f"--config=configs/tiny.py:{variant}"])

  check_config_or_one_error_line(result)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """Texts of several lengths, some empty."""
  path = tmp_path_factory.mktemp("text")
  for index in range(40):
    num_lines = index % 7 * 3
    lines = [f"text {index}, line {line}\n" for line in range(num_lines)]
    (path / f"{index}.txt").write_text("".join(lines))
  return path


def choices_of_fields():
  """Returns the choices of each field that has them."""
  choices = {}
  for field, info in FIELDS.items():
    if info.bound is not None and info.bound.choices:
      choices[field] = list(info.bound.choices)
  return choices


# Values that fit each other, and values that mostly do not.
FITTING: dict[str, list] = {
  **choices_of_fields(),
  "model.vocab_size": [256, 257, 511],
  "model.num_layers": [1, 2],
  "model.embed_dim": [8, 16, 24],
  "model.num_heads": [2, 1, 3, 4],
  "model.num_kv_heads": [1],
  "model.head_dim": [4, 2, 6],
  "model.ffn_dim": [8, 1, 17],
  "model.max_length": [64],
  "model.rope_factor": [4.0],
  "model.rope_base": [1e4, 1.0, 1e-30, 1e30],
  "model.head_norm": [True, False],
  "model.norm_eps": [1e-5, 1e-30, 1e30],
  "model.tie_embeddings": [True, False],
  "model.attention_implementation": [
    "auto",
    "reference",
    "chunked",
    "two_call",
  ],
  "data.validation_fraction": [0.3],
  "data.length": [8, 3, 5, 64],
  "data.seed": [0, 2**31 - 1],
  "optimizer.learning_rate": [1e-3, 0.0, 1e30],
  "optimizer.final_fraction": [0.0, 1.0],
  "optimizer.warmup_steps": [0, 1],
  "optimizer.decay_fraction": [0.2, 0.0, 1.0],
  "optimizer.b1": [0.9, 0.0, 0.9999999],
  "optimizer.b2": [0.95, 0.0, 0.9999999],
  "optimizer.eps": [1e-8, 1e-30, 1e30],
  "optimizer.weight_decay": [0.1, 0.0, 1e30],
  "optimizer.clip_norm": [1.0, 0.0, 1e-30],
  "optimizer.spike_sigmas": [6.0, 0.0, 1e-9],
  "optimizer.muon_momentum": [0.95, 0.0, 0.9999999],
  "train.steps": [1],
  "train.batch_size": [16],
  "train.accumulation": [1, 2],
  "train.seed": [0, 2**31 - 1],
  "train.z_loss": [0.0, 1e-4, 1e30],
  "train.max_skipped_in_a_row": [25, 0, 1],
  "train.sample_tokens": [0],
  "eval.interval": [0, 1],
  "eval.rows": [1, 9, -1, 0],
  "eval.ngram": [2, 3, 99],
  "mesh.data": [-1],
  "mesh.fsdp": [1, 2, 4, 8],
}
UNFITTING = {
  "model.vocab_size": [255, 512],
  "model.embed_dim": [1, 7],
  "model.num_kv_heads": [2, 3],
  "model.head_dim": [3],
  "model.max_length": [1, 8],
  "model.lambda_init": [0.0, -5.0, 1e30],
  "model.attention_implementation": ["pallas_tpu", "x"],
  "data.validation_fraction": [0.0, 1.0, 1e-9],
  "data.length": [1, 2, 65],
  "optimizer.warmup_steps": [2],
  "train.steps": [0],
  "train.batch_size": [1, 3, 24],
  "train.accumulation": [3],
  "train.sample_tokens": [3],
  "train.init_from": ["", "/nowhere", "é"],
  "mesh.data": [1, 2, 3, 8],
  "mesh.fsdp": [-1, 3],
}
# Single values that mostly do not fit.
UNFITTING_CHANGES = []
for field, unfitting_values in UNFITTING.items():
  for value in unfitting_values:
    UNFITTING_CHANGES.append({field: value})


@st.composite
def run_fields(draw):
  """Draws values of fields that fit. One in two draws has one that may not."""
  fields = {}
  for field, fitting_values in FITTING.items():
    fields[field] = draw(st.sampled_from(fitting_values))
  if draw(st.booleans()):
    fields |= draw(st.sampled_from(UNFITTING_CHANGES))
  return fields


def check_trained_or_one_error_line(
  changes: dict[str, Any], workdir: pathlib.Path
) -> None:
  """Checks that a run trains to its last step, or that the error is one line.

  Args:
    changes: values of fields by their dotted names.
    workdir: the directory of the run.
  """
  nested = Config().to_dict()
  for field, value in changes.items():
    section, name = field.split(".")
    nested[section][name] = value
  try:
    config = from_config_dict(nested)
    loop.train(config, str(workdir))
  except UserError as error:
    assert "\n" not in str(error)
    return
  if config.train.steps > 0:
    assert (workdir / f"checkpoints/{config.train.steps}").exists()


@pytest.mark.full
@settings(derandomize=True, deadline=None, max_examples=12)
@given(run_fields())
def test_small_runs_end_or_give_one_error_line(
  corpus, tmp_path_factory, changes
):
  """Hypothesis draws `changes`, such as {"optimizer.b1": 0.0}."""
  changes["data.source"] = f"text:{corpus}/*.txt"
  check_trained_or_one_error_line(changes, tmp_path_factory.mktemp("run"))


def parquet_file(column):
  """Returns the bytes of a Parquet file with a column of texts."""
  buffer = io.BytesIO()
  table = pyarrow.table({"text": column})
  pyarrow.parquet.write_table(table, buffer)
  return buffer.getvalue()


def json_bytes(value):
  return json.dumps(value).encode()


def nest(inner):
  """Returns a strategy for JSON values that contain these values."""
  return st.one_of(
    st.lists(inner, max_size=2), st.dictionaries(st.just("text"), inner)
  )


# A line is noise, any JSON, or a record with a text.
noise = st.binary(max_size=20)
json_values = st.recursive(values, nest).map(json_bytes)
records = st.fixed_dictionaries({"text": st.text(min_size=1, max_size=9)})
jsonl_lines = st.one_of(noise, json_values, records.map(json_bytes))
jsonl_files = st.lists(jsonl_lines, max_size=4).map(b"\n".join)

valid_texts = st.text(max_size=9, alphabet=st.characters(codec="utf-8"))
text_columns = st.lists(st.one_of(st.none(), valid_texts))
integer_columns = st.lists(st.integers(0, 9), min_size=1)
columns = st.one_of(text_columns, integer_columns)

zstd_compress = functools.partial(pyarrow.compress, codec="zstd", asbytes=True)

# Contents of files, by the source that reads them and by the file's name.
CONTENTS = {
  ("text", "input.txt"): st.binary(max_size=40),
  ("jsonl", "input.jsonl"): jsonl_files,
  ("jsonl", "input.jsonl.gz"): jsonl_files.map(gzip.compress),
  ("jsonl", "input.jsonl.zst"): jsonl_files.map(zstd_compress),
  ("parquet", "input.parquet"): columns.map(parquet_file),
}


class InputFile(NamedTuple):
  """A file, and the kind of data source that reads it, such as "text"."""

  source: str
  name: str
  content: bytes


@st.composite
def input_files(draw):
  """Draws an InputFile, sound or damaged."""
  source, name = draw(st.sampled_from(list(CONTENTS)))
  content = bytearray(draw(CONTENTS[source, name]))

  damage = draw(st.sampled_from(["none", "cut", "noise", "all"]))
  if damage == "cut":
    size = draw(st.integers(0, len(content)))
    content = content[:size]
  elif damage == "noise" and content:
    offsets = st.integers(0, len(content) - 1)
    for offset in draw(st.lists(offsets, max_size=3)):
      content[offset] = draw(st.integers(0, 255))
  elif damage == "all":
    content = draw(st.binary(max_size=40))
  return InputFile(source, name, bytes(content))


def check_batch_or_one_error_line(config: Config, path: pathlib.Path) -> None:
  """Checks that there is a batch, or that the error is a line with the path."""
  try:
    batches = training_batches(config)
    batch = next(batches)
    batches.close()
  except UserError as error:
    assert str(path) in str(error)
    assert "\n" not in str(error)
    return
  assert batch["tokens"].shape == (config.train.batch_size, config.data.length)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(input_files(), st.sampled_from(["prepared", "streamed"]))
def test_input_files_give_a_batch_or_one_error_line_with_their_name(
  corpus, tmp_path_factory, file, mode
):
  """Hypothesis draws `file`: its format, and content that may be damaged."""
  path = tmp_path_factory.mktemp("directory") / file.name
  path.write_bytes(file.content)
  data = DataConfig(
    source=f"{file.source}:{path}",
    # These files are not damaged.
    validation_source=f"text:{corpus}/*.txt",
    mode=mode,
    length=8,
  )
  config = Config(data=data, train=TrainConfig(batch_size=2))

  check_batch_or_one_error_line(config, path)
