"""The warning before a large model is trained without an accelerator."""

import pytest

from diffjax.config import Config, ModelConfig, TrainConfig
from diffjax.model.flops import parameter_count
from diffjax.training import cpu_time, session

# 125 M parameters.
MODEL = ModelConfig(
  num_layers=12,
  embed_dim=768,
  num_heads=6,
  num_kv_heads=6,
  head_dim=64,
  ffn_dim=2048,
  vocab_size=52_000,
)
CONFIG = Config(model=MODEL, train=TrainConfig(steps=10_000))


def fail_if_timed() -> float:
  """Stands for the measurement of the CPU where none is allowed."""
  pytest.fail("the CPU was timed")


@pytest.mark.parametrize(
  ("days", "printed_days"), [(3_812, "3,000"), (12.4, "10"), (0.04, "0.04")]
)
def test_the_warning_says_how_long_a_large_model_takes(
  monkeypatch, days, printed_days
):
  """The days are rounded down to one digit, as for "at least".

  The model of CONFIG has 125 million parameters.
  """
  flops_per_day = cpu_time.run_flops(CONFIG) / days
  seconds_per_day = 24 * 60 * 60
  flops_per_second = flops_per_day / seconds_per_day
  # The measurement then finds a CPU on which the run takes these days.
  monkeypatch.setattr(
    cpu_time, "product_flops_per_second", lambda: flops_per_second
  )

  warning = cpu_time.warning(CONFIG, "cpu")

  assert warning.startswith(
    "this machine has no accelerator: training 125 M parameters takes"
    f" at least {printed_days} days on its CPU ("
  )
  assert warning.endswith("use a GPU or a TPU, or --config=configs/tiny.py")


def test_the_model_of_these_tests_has_125_million_parameters():
  assert round(parameter_count(MODEL) / 1e6) == 125


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_have_no_warning(monkeypatch, platform):
  """On a CPU, this model of 125 M parameters has a warning."""
  monkeypatch.setattr(cpu_time, "product_flops_per_second", fail_if_timed)

  assert cpu_time.warning(CONFIG, platform) is None


def test_small_models_have_no_warning(monkeypatch):
  """The warning is for models of more than 100 M parameters."""
  monkeypatch.setattr(cpu_time, "product_flops_per_second", fail_if_timed)
  config = Config()

  assert parameter_count(config.model) < 100e6
  assert cpu_time.warning(config, "cpu") is None


def test_the_flops_of_a_run_are_proportional_to_its_steps():
  config = Config(model=MODEL, train=TrainConfig(steps=10_000))
  longer_config = Config(model=MODEL, train=TrainConfig(steps=20_000))

  flops = cpu_time.run_flops(config)
  longer_flops = cpu_time.run_flops(longer_config)

  assert longer_flops == 2 * flops


def test_the_flops_of_a_token_are_at_least_six_for_each_parameter():
  """The forward pass has two, the backward pass four, and attention more."""
  tokens_per_step = CONFIG.train.batch_size * CONFIG.data.length
  num_tokens = tokens_per_step * CONFIG.train.steps

  flops_per_token = cpu_time.run_flops(CONFIG) / num_tokens

  num_parameters = 125e6
  assert 6 * num_parameters < flops_per_token < 12 * num_parameters


def test_the_measured_speed_is_possible_for_a_cpu():
  """A slow core has 1 GFLOP/s, and no CPU has 100 TFLOP/s."""
  assert 1e9 < cpu_time.product_flops_per_second() < 1e14


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (3812.7, "3,000"),
    (9.6, "9"),
    (1.4, "1"),
    (0.96, "0.9"),
    (940.0, "900"),
    (0.043, "0.04"),
    (0.04, "0.04"),
    (96.0, "90"),
    (1e6, "1,000,000"),
    (0.0, "0"),
  ],
)
def test_one_figure_rounds_down_to_one_digit(value, text):
  """The text follows "at least", so it must not be larger than the value."""
  assert cpu_time.one_figure(value) == text


def test_a_run_prints_the_warning_once(monkeypatch, tmp_path, capsys):
  """It is printed when the session of a run is made, before training."""

  def warning(config, platform):
    return f"slow on {platform}"

  monkeypatch.setattr(cpu_time, "warning", warning)

  session.Session(Config(), str(tmp_path))

  assert capsys.readouterr().err.count("diffjax: slow on cpu\n") == 1
