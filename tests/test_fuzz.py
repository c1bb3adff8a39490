"""Whatever a user can type either works or is answered by one clear line: no traceback from inside a library."""

import contextlib
import dataclasses
import io
import math
import sys
import typing
from unittest import mock

import pytest
from absl.testing import flagsaver
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax import config as config_lib
from diffjax.config import Config, UserError, from_config_dict
from diffjax.training import loop

FIELDS = {
  f"{section.name}.{field.name}": typing.get_type_hints(type(section.default))[field.name]
  for section in dataclasses.fields(Config)
  for field in dataclasses.fields(section.default)
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
    [0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e-300, 1e308, math.nan, math.inf, -math.inf, None, True, False, *ODD]
  ),
  st.integers(),
  st.floats(),
  st.text(max_size=8),
)
things = st.one_of(values, st.lists(values, max_size=2), st.dictionaries(st.text(max_size=4), values, max_size=2), st.binary(max_size=3))
fast = settings(derandomize=True, deadline=None, max_examples=300)


def checked(get):
  """A config that is sane, or one line."""
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


@fast
@given(st.dictionaries(st.sampled_from([*FIELDS, "model.x", "x.steps", "train.", "."]), things, min_size=1, max_size=3))
def test_config_values(changes):
  nested = Config().to_dict()
  for field, value in changes.items():
    section, name = field.split(".")
    nested.setdefault(section, {})[name] = value
  checked(lambda: from_config_dict(nested))


@fast
@given(st.one_of(things, st.dictionaries(st.sampled_from(["model", "data", "train", "x", ""]), things, max_size=3)))
def test_whole_configs(nested):
  checked(lambda: from_config_dict(nested))


def run(arguments):
  """`config.run` in this process: the config it hands on or None, exit code, standard error."""
  configs, err = [], io.StringIO()
  saved = flagsaver.save_flag_values()
  try:
    with mock.patch.object(sys, "argv", ["train", *arguments]), contextlib.redirect_stderr(err):
      config_lib.run(configs.append)
  except SystemExit as exit:
    code = exit.code or 0
  finally:
    flagsaver.restore_flag_values(saved)
  return (configs or [None])[0], code, err.getvalue()


def as_argument(field, value):
  return f"--config.{field}={value}"


arguments = st.one_of(
  st.builds(as_argument, st.sampled_from([*FIELDS, "train", "model", "x", "train.x", "train.steps.x", "data.source[0]", ""]), values),
  st.sampled_from(
    [f"--config.{field}" for field in FIELDS] + ["--", "-", "x", "", "--config", "--noconfig.model.head_norm", "--workdir=x"]
  ),
  st.builds("--{}={}".format, st.sampled_from(["config", "x", "config.", "config..", "verbosity"]), values),
)


@fast
@given(st.lists(arguments, min_size=1, max_size=3))
def test_command_lines(rest):
  config, code, err = run(["--config=configs/tiny.py", *rest])
  if code == 0:
    assert isinstance(config, Config)
  else:
    lines = err.splitlines()
    assert config is None and code in (1, 2) and len(lines) == 1 and lines[0].startswith("error: "), (code, err)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """Texts of several lengths, the empty one among them."""
  path = tmp_path_factory.mktemp("text")
  for index in range(40):
    (path / f"{index}.txt").write_text("".join(f"text {index}, line {line}\n" for line in range(index % 7 * 3)))
  return path


def small(*usual, odd=()):
  """Mostly a usual value."""
  return st.sampled_from([*usual] * 4 + [*odd])


SMALL = {
  "model.attention": small("diff", "diff_v2", "softmax"),
  "model.vocab_size": small(256, 257, 511, odd=(255, 512)),
  "model.num_layers": small(1, 2),
  "model.embed_dim": small(8, 16, 24, odd=(1, 5, 7)),
  "model.num_heads": small(2, 1, 3, 4),
  "model.num_kv_heads": small(1, odd=(2, 3)),
  "model.head_dim": small(2, 4, 6, 8, odd=(3,)),
  "model.ffn_dim": small(8, 1, 17),
  "model.max_length": small(64, odd=(1, 8)),
  "model.rope_base": small(1e4, 1.0, 1e-30, 1e30),
  "model.head_norm": small(True, False),
  "model.lambda_init": small(None, odd=(0.0, 0.8, -5.0, 1e30)),
  "model.norm_eps": small(1e-5, 1e-30, 1e30),
  "model.tie_embeddings": small(True, False),
  "model.dtype": small("auto", "float32", "bfloat16"),
  "model.attention_implementation": small("auto", "reference", "chunked", "two_call", odd=("pallas_tpu", "pallas_gpu", "x")),
  "model.remat": small("none", "attention", "dots", "full"),
  "data.validation_fraction": small(0.3, odd=(0.0, 1.0, 1e-9)),
  "data.length": small(8, 1, 2, 5, 64, odd=(65,)),
  "data.packing": small("documents", "concat"),
  "data.mode": small("prepared", "streamed"),
  "data.seed": small(0, 2**31 - 1),
  "optimizer.name": small("adamw", "muon"),
  "optimizer.learning_rate": small(1e-3, 0.0, 1e30),
  "optimizer.final_fraction": small(0.0, 1.0),
  "optimizer.schedule": small("linear", "cosine", "wsd"),
  "optimizer.warmup_steps": small(0, 1, odd=(2,)),
  "optimizer.decay_fraction": small(0.2, 0.0, 1.0),
  "optimizer.b1": small(0.9, 0.0, 1.0),
  "optimizer.b2": small(0.95, 0.0, 1.0),
  "optimizer.eps": small(1e-8, 1e-300, 1e30),
  "optimizer.weight_decay": small(0.1, 0.0, 1e30),
  "optimizer.clip_norm": small(1.0, 0.0, 1e-30),
  "optimizer.spike_sigmas": small(6.0, 0.0, 1e-9),
  "optimizer.muon_momentum": small(0.95, 0.0, 1.0),
  "train.steps": small(1, odd=(0,)),
  "train.batch_size": small(8, 16, odd=(1, 3, 24)),
  "train.accumulation": small(1, 2, odd=(3,)),
  "train.seed": small(0, 2**31 - 1),
  "train.z_loss": small(0.0, 1e-4, 1e30),
  "train.max_skipped_in_a_row": small(10, 0, 1),
  "train.sample_tokens": small(0, odd=(3,)),
  "train.sample_prompt": small("", "é\0", "x" * 99),
  "eval.interval": small(0, 1),
  "eval.rows": small(1, 9, -1, 0),
  "eval.ngram": small(2, 3, 99),
  "mesh.data": small(-1, 2, odd=(8, 3)),
  "mesh.fsdp": small(1, 4, odd=(-1, 8, 2)),
}


def train(changes, workdir):
  """A run that ends, or one line."""
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
  assert (workdir / "checkpoints" / str(config.train.steps)).exists() or not config.train.steps


@pytest.mark.usefixtures("quick_compile")
@settings(derandomize=True, deadline=None, max_examples=12)
@given(st.fixed_dictionaries(SMALL))
def test_small_runs(corpus, tmp_path_factory, changes):
  """Every combination of fields that the check lets pass trains a step, or is refused in one line."""
  train({**changes, "data.source": f"text:{corpus}/*.txt"}, tmp_path_factory.mktemp("run"))
