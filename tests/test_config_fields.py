"""The config's fields: their declarations, who reads them, and their checks."""

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any

import pytest

from diffjax.config import (
  FIELDS,
  OF_THE_RUN,
  Bound,
  Config,
  UserError,
  check,
  from_config_dict,
)
from diffjax.training import resume
from experiments import grid
from tests.harness import ROOT, in_process

# Fields in which runs of one table may differ. So may the fields of the mesh.
WITHOUT_EFFECT = {
  "data.num_workers",
  "data.prepared_dir",
  "data.timeout",
  "train.checkpoint_interval",
  "train.keep_checkpoints",
  "train.log_interval",
  "train.max_skipped_in_a_row",
  "train.profile_step",
  "train.profile_steps",
  "train.sample_prompt",
  "train.sample_tokens",
  "train.wandb_project",
}

# The fields that have bounds.
BOUNDS = {
  name: info.bound for name, info in FIELDS.items() if info.bound is not None
}


def field_types() -> dict[str, str]:
  """Returns the type of each field, as its declaration writes it."""
  types = {}
  for section in dataclasses.fields(Config):
    for field in dataclasses.fields(section.default):
      types[f"{section.name}.{field.name}"] = field.type
  return types


TYPES = field_types()

# Fields by which a model computes another function of the same parameters.
FUNCTION_FIELDS = [
  name
  for name, info in FIELDS.items()
  if name.startswith("model.") and info.changes_function
]
OTHER_FIELDS = [name for name in FIELDS if name not in FUNCTION_FIELDS]
FLOAT_FIELDS = [name for name, type in TYPES.items() if "float" in type]
OPTIMIZER_FLOATS = [
  name
  for name, type in TYPES.items()
  if name.startswith("optimizer.") and type == "float"
]
# The axes of the mesh are numbers, too, but are checked elsewhere.
NUMBERS_WITH_BOUNDS = [
  name
  for name, type in TYPES.items()
  if type in ("int", "float") and not name.startswith("mesh.")
]


def config_with(changes: dict[str, Any]) -> dict[str, Any]:
  """Returns the default config as nested dicts, with changed fields."""
  values = Config().to_dict()
  for name, value in changes.items():
    section, field = name.split(".")
    values[section][field] = value
  return values


def test_every_field_is_listed():
  names = []
  for section, values in Config().to_dict().items():
    for name in values:
      names.append(f"{section}.{name}")

  assert list(FIELDS) == names


# A prepared batch does not depend on the number of workers; a stream does.
CHANGEABLE = ["data.num_workers"]
CHANGEABLE += [name for name, info in FIELDS.items() if info.may_change]
UNCHANGEABLE = [name for name in FIELDS if name not in CHANGEABLE]


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_run_resumes_with_another_value_of_a_changeable_field(name):
  saved = Config().to_dict()

  resume.check_resume(saved, config_with({name: "other"}))


@pytest.mark.parametrize("name", UNCHANGEABLE)
def test_a_run_does_not_resume_with_another_value_of_any_other_field(name):
  saved = Config().to_dict()

  with pytest.raises(UserError, match=f"{name} was .* and is '?other'?"):
    resume.check_resume(saved, config_with({name: "other"}))


@pytest.mark.parametrize("name", FUNCTION_FIELDS)
def test_a_start_from_parameters_of_another_function_is_reported(name):
  """train.init_from names the run whose parameters another one starts from.

  A field such as model.window changes what a model computes from them.
  """
  # `other_model` returns a text about the fields that differ, or "".
  assert resume.other_model(config_with({name: "other"}), Config()) != ""


@pytest.mark.parametrize("name", OTHER_FIELDS)
def test_a_start_from_parameters_of_the_same_function_is_not_reported(name):
  """train.init_from names the run whose parameters another one starts from.

  A field such as train.steps does not change what a model computes from them.
  """
  # `other_model` returns a text about the fields that differ, or "".
  assert resume.other_model(config_with({name: "other"}), Config()) == ""


def test_experiments_compare_the_fields_that_affect_results():
  """WITHOUT_EFFECT lists the fields that do not affect results.

  The mesh, which is how a run uses its devices, does not affect them, either.
  """
  # `places` are fields that say where data is. Here, they are compared, too.
  compared = grid.comparable(Config().to_dict(), places=())

  not_compared = {name for name in FIELDS if name not in compared}
  mesh_fields = {name for name in FIELDS if name.startswith("mesh.")}
  assert not_compared == WITHOUT_EFFECT | mesh_fields


def test_the_fields_that_each_run_chooses_do_not_change_the_function():
  assert OF_THE_RUN == ("dtype", "attention_implementation", "remat")
  for name in OF_THE_RUN:
    assert not FIELDS[f"model.{name}"].changes_function


def test_a_printed_config_explains_every_field():
  """The comment above a field has its documentation and its bound."""
  result = in_process.call("diffjax.train", "--config=tiny", "--print_config")

  comments = []
  for line in result.stdout.splitlines():
    if line.startswith("# "):
      comments.append(line.removeprefix("# "))
  # An explanation may continue on the next line.
  text = " ".join(comments)
  for info in FIELDS.values():
    assert info.documentation in text
    # For example: "Number of steps. It must be at least 1."
    if info.bound is not None and not info.bound.choices:
      assert f"{info.documentation} It {info.bound}." in text


PRINT_LOADED_PACKAGES = """
import sys
import diffjax.config

packages = {name.partition(".")[0] for name in sys.modules}
for package in packages - sys.stdlib_module_names:
  print(package)
"""


def test_the_config_needs_only_the_standard_library():
  result = subprocess.run(
    # With -S, Python has no site-packages, whose .pth files may import more.
    [sys.executable, "-S", "-c", PRINT_LOADED_PACKAGES],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )

  assert set(result.stdout.splitlines()) == {"__main__", "diffjax"}


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("model.num_layer", "is not a config field: did you mean model.num_layers"),
    ("model.banana", "is not a config field: there are attention, "),
  ],
)
def test_an_unknown_field_is_an_error(name, message):
  with pytest.raises(UserError, match=f"^config.{name} {message}"):
    from_config_dict(config_with({name: 3}))


@pytest.mark.parametrize(
  ("name", "value", "type_name"),
  [
    ("model.num_layers", "3", "int"),
    ("model.num_layers", 2.5, "int"),
    # In Python, a bool is an int.
    ("model.num_layers", True, "int"),
    ("model.rope", 0, "bool"),
    ("model.projection_biases", "qkv", "bool"),
  ],
)
def test_a_value_of_another_type_is_an_error(name, value, type_name):
  message = f"config.{name} must be {type_name}; got {value!r}"
  with pytest.raises(UserError, match=message):
    from_config_dict(config_with({name: value}))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_number_that_is_not_finite_is_an_error(value):
  message = f"config.optimizer.learning_rate must be finite; got {value}"
  with pytest.raises(UserError, match=message):
    from_config_dict(config_with({"optimizer.learning_rate": value}))


def test_a_section_without_fields_is_an_error():
  values = Config().to_dict() | {"model": 3}

  with pytest.raises(UserError, match="config.model must be a section"):
    from_config_dict(values)


@pytest.mark.parametrize(
  ("name", "value", "rule"),
  [
    ("model.num_layers", 0, "must be at least 1"),
    ("model.window_pattern", "wx", "must be letters w"),
    ("model.value_dim", 0, "must be at least 1, or None"),
    ("model.head_norm_eps", 0.0, "must be positive, or None"),
    ("model.head_dim", 33, "must be even"),
    ("model.window", 0, "must be at least 1"),
    ("data.validation_fraction", 1.5, "must lie between 0 and 1"),
    ("data.prompt_template", "Question:", "must hold {prompt} once"),
    ("optimizer.name", "sgd", "must be one of adamw, muon"),
  ],
)
def test_a_value_that_a_field_cannot_have_is_an_error(name, value, rule):
  message = re.escape(f"config.{name} = {value!r}: {rule}")
  with pytest.raises(UserError, match=message):
    from_config_dict(config_with({name: value}))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"model.num_heads": 2, "model.num_kv_heads": 3},
      "model.num_kv_heads = 3: must divide model.num_heads = 2",
    ),
    (
      {"model.num_heads": 2, "model.num_noise_heads": 3},
      "model.num_noise_heads = 3: must divide model.num_heads = 2, or be None",
    ),
    (
      {"model.num_noise_heads": 1, "model.num_kv_heads": 2},
      "model.num_kv_heads = 2: must divide model.num_noise_heads = 1",
    ),
    (
      {"model.num_layers": 4, "model.plain_layers": 4},
      "model.plain_layers = 4: must be less than num_layers = 4",
    ),
    (
      {"model.window_pattern": "wf", "model.window": None},
      "model.window = None: must be a number of keys with a window_pattern",
    ),
    (
      {"model.head_dim": 32, "model.rope_dim": 3},
      "model.rope_dim = 3: must be even and at most model.head_dim = 32",
    ),
    (
      {"model.rope_scaling": "linear", "model.rope_factor": 1.0},
      "model.rope_factor = 1.0: must be above 1 with"
      " model.rope_scaling = 'linear'",
    ),
    (
      {
        "model.rope_scaling": "yarn",
        "model.rope_factor": 2.0,
        "model.rope_base": 1.0,
      },
      "model.rope_base = 1.0: must be above 1 with model.rope_scaling = 'yarn'",
    ),
    (
      {"model.window": 9, "model.attention_implementation": "two_call"},
      "model.window = 9: must be None with model.attention_implementation ="
      " 'two_call', which takes no window; 'auto' and 'chunked' do",
    ),
    (
      {"data.length": 256, "model.max_length": 100},
      "data.length = 256: must be at most model.max_length = 100",
    ),
    (
      {"data.text_field": "text", "data.prompt_field": "text"},
      "data.prompt_field = 'text': must be another field than data.text_field",
    ),
    (
      {"data.prompt_field": "question", "data.packing": "concat"},
      "data.packing = 'concat': must be 'documents' with"
      " config.data.prompt_field = 'question'",
    ),
    (
      {"train.batch_size": 16, "train.accumulation": 3},
      "train.accumulation = 3: must divide train.batch_size = 16",
    ),
    (
      {"optimizer.frozen": "query", "optimizer.trained": "key"},
      "optimizer.trained = 'key': must be \"\" with config.optimizer.frozen",
    ),
  ],
)
def test_fields_that_do_not_fit_each_other_are_an_error(changes, message):
  with pytest.raises(UserError, match=re.escape(f"config.{message}")):
    from_config_dict(config_with(changes))


@pytest.mark.parametrize(
  ("changes", "rule"),
  [
    ({"mesh.data": 0}, "every axis must be positive"),
    ({"mesh.data": -1, "mesh.fsdp": -1}, "−1 on one axis at most"),
  ],
)
def test_a_mesh_without_a_shape_is_an_error(changes, rule):
  """An axis of −1 takes the devices that the other axes leave."""
  with pytest.raises(UserError, match=f"config.mesh = .*{rule}"):
    from_config_dict(config_with(changes))


def refusal(name: str, value: Any) -> str | None:
  """Returns the error that names a field with a value, or None without one.

  The value may still not fit other fields, whose errors do not count.
  """
  section, field = name.split(".")
  config = Config()
  changed = dataclasses.replace(getattr(config, section), **{field: value})
  try:
    check(dataclasses.replace(config, **{section: changed}))
  except UserError as error:
    if str(error).startswith(f"config.{name} = {value!r}: "):
      return str(error)
  return None


def values_inside(bound: Bound) -> list[Any]:
  """Returns the choices of a bound, or the numbers at its limits."""
  if bound.choices:
    return list(bound.choices)
  values = [bound.low]
  if bound.above_low:
    values = [bound.low + 1e-9]
  if bound.high < math.inf:
    values.append(bound.high)
  return values


def values_outside(bound: Bound) -> list[Any]:
  """Returns texts that are no choice of a bound, or numbers just outside it."""
  if bound.choices:
    first = bound.choices[0]
    return ["", first + "x", first.upper()]
  values = [bound.low - 1, bound.low - 1e-9]
  if bound.above_low:
    values = [bound.low, bound.low - 1e-9]
  if bound.high < math.inf:
    values += [bound.high + 1, bound.high + 1e-9]
  return values


@pytest.mark.parametrize("name", BOUNDS)
def test_the_error_for_a_value_outside_of_a_bound_says_the_bound(name):
  bound = BOUNDS[name]

  for value in values_outside(bound):
    assert refusal(name, value) == f"config.{name} = {value!r}: {bound}"


@pytest.mark.parametrize("name", BOUNDS)
def test_a_value_inside_of_a_bound_is_allowed(name):
  """A value may still not fit the values of other fields."""
  bound = BOUNDS[name]

  for value in values_inside(bound):
    error = refusal(name, value)
    assert error is None or str(bound) not in error


@pytest.mark.parametrize(
  "name, rule",
  [
    ("train.profile_step", "must be at least -1"),
    ("optimizer.final_fraction", "must lie between 0 and 1"),
    ("model.norm_eps", "must be positive"),
    ("data.mode", "must be one of prepared, streamed, auto"),
  ],
)
def test_the_text_of_a_bound_is_its_rule(name, rule):
  """Errors contain this text. There is one case for each kind of bound."""
  assert str(FIELDS[name].bound) == rule


@pytest.mark.parametrize("name", ["b1", "b2", "muon_momentum"])
@pytest.mark.parametrize("value", [1.0, 1 - 1e-8, math.nan, -0.1])
def test_decay_rates_outside_their_bounds_are_refused(name, value):
  """With a decay rate of 1, Adam's bias correction divides 0 by 0.

  The optimizer computes in float32, in which 1 − 1e-8 is 1.
  """
  rule = f"config.optimizer.{name} = {value}: must lie between 0 and 0.99"
  assert refusal(f"optimizer.{name}", value).startswith(rule)


@pytest.mark.parametrize("name", FLOAT_FIELDS)
def test_numbers_that_are_not_finite_are_refused(name):
  """A Config that is made in Python is checked like one that is read."""
  for value in (math.inf, -math.inf, math.nan):
    assert refusal(name, value) is not None


@pytest.mark.parametrize("name", OPTIMIZER_FLOATS)
def test_numbers_that_the_optimizer_cannot_compute_with_are_refused(name):
  """In float32, 1e39 is infinite and 1e-300 is 0. The update would be NaN."""
  for value in (1e39, 1e-300):
    assert refusal(name, value) is not None


@pytest.mark.parametrize("name", NUMBERS_WITH_BOUNDS)
def test_every_number_of_the_config_has_a_bound(name):
  """So a wrong number is an error in one line, before the run starts."""
  assert FIELDS[name].bound is not None
