"""Any input of a user works or gets one clear line: no traceback from inside a library."""

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
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from absl.testing import flagsaver
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax.cli import command
from diffjax.config import (
  Config,
  DataConfig,
  TrainConfig,
  UserError,
  field_info,
  from_config_dict,
)
from diffjax.data.pipeline import training_batches
from diffjax.training import loop

NAMED = [
  (section, field)
  for section in dataclasses.fields(Config)
  for field in dataclasses.fields(section.default)
]
FIELDS = {
  f"{section.name}.{field.name}": typing.get_type_hints(type(section.default))[
    field.name
  ]
  for section, field in NAMED
}
BOUNDS = {
  f"{section.name}.{field.name}": field_info(field).bound
  for section, field in NAMED
}
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
things = st.one_of(
  values,
  st.lists(values, max_size=2),
  st.dictionaries(st.text(max_size=4), values, max_size=2),
  st.binary(max_size=3),
)
fast = settings(derandomize=True, deadline=None, max_examples=300)


def checked(get):
  """Reading gives a valid config, or one line."""
  try:
    config = get()
  except UserError as error:
    assert str(error).startswith("config") and "\n" not in str(error)
    return
  for field, kind in FIELDS.items():
    section, name = field.split(".")
    value = getattr(getattr(config, section), name)
    assert isinstance(value, typing.get_args(kind) or (kind,)), field
    assert not isinstance(value, float) or math.isfinite(value), field
    assert BOUNDS[field] is None or BOUNDS[field].holds(value), field


@fast
@given(
  st.dictionaries(
    st.sampled_from([*FIELDS, "model.x", "x.steps", "train.", "."]),
    things,
    min_size=1,
    max_size=3,
  )
)
def test_config_values(changes):
  nested = Config().to_dict()
  for field, value in changes.items():
    section, name = field.split(".")
    nested.setdefault(section, {})[name] = value
  checked(lambda: from_config_dict(nested))


@fast
@given(
  st.one_of(
    things,
    st.dictionaries(
      st.sampled_from(["model", "data", "train", "x", ""]), things, max_size=3
    ),
  )
)
def test_whole_configs(nested):
  checked(lambda: from_config_dict(nested))


def run(arguments):
  """`command.run` in this process: the config that it passes on (or None), the exit code, and standard error."""
  configs, err = [], io.StringIO()
  saved = flagsaver.save_flag_values()
  try:
    with (
      mock.patch.object(sys, "argv", ["train", *arguments]),
      contextlib.redirect_stderr(err),
    ):
      command.run(configs.append)
  except SystemExit as exit:
    code = exit.code or 0
  finally:
    flagsaver.restore_flag_values(saved)
  return (configs or [None])[0], code, err.getvalue()


def as_argument(field, value):
  return f"--config.{field}={value}"


arguments = st.one_of(
  st.builds(
    as_argument,
    st.sampled_from(
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
    ),
    values,
  ),
  st.sampled_from(
    [f"--config.{field}" for field in FIELDS]
    + [
      "--",
      "-",
      "x",
      "",
      "--config",
      "--noconfig.model.head_norm",
      "--workdir=x",
    ]
  ),
  st.builds(
    "--{}={}".format,
    st.sampled_from(["config", "x", "config.", "config..", "verbosity"]),
    values,
  ),
)


@fast
@given(st.lists(arguments, min_size=1, max_size=3))
def test_command_lines(rest):
  config, code, err = run(["--config=configs/tiny.py", *rest])
  if code == 0:
    assert isinstance(config, Config)
  else:
    lines = err.splitlines()
    assert (
      config is None
      and code in (1, 2)
      and len(lines) == 1
      and lines[0].startswith("error: ")
    ), (code, err)


variants = st.lists(
  st.one_of(
    st.sampled_from(
      ["diff", "transformer", "diff_v2", "gated", "heads", "architecture"]
    ),
    st.builds(
      "{}={}".format,
      st.sampled_from(["heads", "architecture", "x", ""]),
      st.one_of(values, st.sampled_from(["2", "8", "diff"])),
    ),
    st.text(max_size=8),
  ),
  min_size=1,
  max_size=3,
).map(",".join)


@fast
@given(variants)
def test_variants(variant):
  config, code, err = run([f"--config=configs/tiny.py:{variant}"])
  if code == 0:
    assert isinstance(config, Config)
  else:
    lines = err.splitlines()
    assert (
      config is None
      and code in (1, 2)
      and len(lines) == 1
      and lines[0].startswith("error: ")
    ), (code, err)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """Texts of several lengths, some empty."""
  path = tmp_path_factory.mktemp("text")
  for index in range(40):
    (path / f"{index}.txt").write_text(
      "".join(f"text {index}, line {line}\n" for line in range(index % 7 * 3))
    )
  return path


# Values that fit each other, and values that mostly do not. A field with choices takes each of them.
FITTING: dict[str, list] = {
  **{
    field: list(bound.choices)
    for field, bound in BOUNDS.items()
    if bound and bound.choices
  },
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
unfitting = [
  {field: value} for field, choices in UNFITTING.items() for value in choices
]
runs = st.builds(
  lambda fitting, other: fitting | other,
  st.fixed_dictionaries(
    {field: st.sampled_from(choices) for field, choices in FITTING.items()}
  ),
  st.sampled_from([{}] * len(unfitting) + unfitting),
)


def train(changes, workdir):
  """Training ends, or gives one line."""
  nested = Config().to_dict()
  for field, value in changes.items():
    section, name = field.split(".")
    nested[section][name] = value
  try:
    config = from_config_dict(nested)
    loop.train(config, str(workdir))
  except UserError as error:
    assert "\n" not in str(error)
    return str(error)
  assert (
    workdir / "checkpoints" / str(config.train.steps)
  ).exists() or not config.train.steps


@pytest.mark.full
@settings(derandomize=True, deadline=None, max_examples=12)
@given(runs)
def test_small_runs(corpus, tmp_path_factory, changes):
  """Every combination of fields that the check lets pass trains a step, or is refused in one line."""
  train(
    {**changes, "data.source": f"text:{corpus}/*.txt"},
    tmp_path_factory.mktemp("run"),
  )


def parquet(column):
  sink = io.BytesIO()
  pyarrow.parquet.write_table(pyarrow.table({"text": column}), sink)
  return sink.getvalue()


lines = st.lists(
  st.one_of(
    st.binary(max_size=20),
    st.recursive(
      values,
      lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.just("text"), inner)
      ),
    ).map(lambda value: json.dumps(value).encode()),
    st.text(min_size=1, max_size=9).map(
      lambda text: json.dumps({"text": text}).encode()
    ),
  ),
  max_size=4,
).map(b"\n".join)
CONTENTS = {
  "text:{}.txt": st.binary(max_size=40),
  "jsonl:{}.jsonl": lines,
  "jsonl:{}.jsonl.gz": lines.map(gzip.compress),
  "jsonl:{}.jsonl.zst": lines.map(
    functools.partial(pyarrow.compress, codec="zstd", asbytes=True)
  ),
  "parquet:{}.parquet": st.lists(
    st.one_of(
      st.none(), st.text(max_size=9, alphabet=st.characters(codec="utf-8"))
    )
  ).map(parquet)
  | st.lists(st.integers(0, 9), min_size=1).map(parquet),
}


@st.composite
def files(draw):
  """A source and the content of its file: sound, cut off, or with a few bytes of noise."""
  spec = draw(st.sampled_from(list(CONTENTS)))
  content = bytearray(draw(CONTENTS[spec]))
  damage = draw(st.sampled_from(["none", "cut", "noise", "all"]))
  if damage == "cut":
    content = content[: draw(st.integers(0, len(content)))]
  elif damage == "noise" and content:
    for position in draw(
      st.lists(st.integers(0, len(content) - 1), max_size=3)
    ):
      content[position] = draw(st.integers(0, 255))
  elif damage == "all":
    content = draw(st.binary(max_size=40))
  return spec, bytes(content)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(files(), st.sampled_from(["prepared", "streamed"]))
def test_input_files(corpus, tmp_path_factory, file, mode):
  """Random bytes give a batch, or one line that names the file."""
  path = tmp_path_factory.mktemp("input") / "input"
  spec, content = file[0].format(path), file[1]
  pathlib.Path(spec.partition(":")[2]).write_bytes(content)
  data = DataConfig(
    source=spec, validation_source=f"text:{corpus}/*.txt", mode=mode, length=8
  )
  try:
    batches = training_batches(
      Config(data=data, train=TrainConfig(batch_size=2))
    )
    assert next(batches)["tokens"].shape == (2, 8)
    batches.close()
  except UserError as error:
    assert str(path) in str(error) and "\n" not in str(error)
