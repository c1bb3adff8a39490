"""The warning before a large model is trained without an accelerator."""

import dataclasses

import pytest

from diffjax.config import Config, ModelConfig, TrainConfig
from diffjax.model.flops import parameter_count
from diffjax.training import cpu_time, session


@pytest.fixture
def large():
  """A config of 125 M parameters."""
  model = ModelConfig(
    num_layers=12,
    embed_dim=768,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    ffn_dim=2048,
    vocab_size=52_000,
  )
  assert round(parameter_count(model) / 1e6) == 125
  return Config(model=model, train=TrainConfig(steps=10_000))


@pytest.fixture
def rate(monkeypatch):
  """rate(days, config): a CPU on which that config takes so many days."""

  def set_rate(days, config):
    seconds = days * 24 * 60 * 60
    per_second = cpu_time.run_flops(config) / seconds
    monkeypatch.setattr(
      cpu_time, "product_flops_per_second", lambda: per_second
    )

  return set_rate


@pytest.mark.parametrize(
  ("days", "duration"),
  [
    (3_812, "at least 3,000 days"),
    (12.4, "at least 10 days"),
    (0.04, "at least 0.04 days"),
  ],
)
def test_a_large_model_on_a_cpu_is_warned_of(large, rate, days, duration):
  rate(days, large)
  said = cpu_time.warning(large, "cpu")
  assert said.startswith(
    f"this machine has no accelerator: training 125 M parameters takes {duration} on its CPU ("
  )
  assert said.endswith("use a GPU or a TPU, or --config=configs/tiny.py")


def test_an_accelerator_is_not_warned_of(large, monkeypatch):
  monkeypatch.setattr(
    cpu_time, "product_flops_per_second", lambda: pytest.fail("it was timed")
  )
  assert cpu_time.warning(large, "gpu") is None
  assert cpu_time.warning(large, "tpu") is None


def test_a_small_model_is_not_warned_of(monkeypatch):
  monkeypatch.setattr(
    cpu_time, "product_flops_per_second", lambda: pytest.fail("it was timed")
  )
  assert cpu_time.warning(Config(), "cpu") is None


def test_the_flops_of_a_run_are_those_of_its_steps(large):
  doubled = dataclasses.replace(
    large, train=dataclasses.replace(large.train, steps=20_000)
  )
  assert cpu_time.run_flops(doubled) == 2 * cpu_time.run_flops(large)
  # Six for each parameter and token, and those of attention.
  tokens = large.train.batch_size * large.data.length * large.train.steps
  per_token = cpu_time.run_flops(large) / tokens
  assert 6 * 125e6 < per_token < 12 * 125e6


def test_a_product_is_timed():
  """Any CPU does between 1 GFLOP/s and 100 TFLOP/s."""
  assert 1e9 < cpu_time.product_flops_per_second() < 1e14


@pytest.mark.parametrize(
  ("value", "shown"),
  [(3812.7, "3,000"), (9.6, "9"), (1.4, "1"), (0.96, "0.9"), (940.0, "900")]
  + [(0.043, "0.04"), (0.04, "0.04"), (96.0, "90"), (1e6, "1,000,000")]
  + [(0.0, "0")],
)
def test_one_figure_is_kept_and_none_is_too_large(value, shown):
  assert cpu_time.one_figure(value) == shown


def test_training_warns_once_and_goes_on(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(
    cpu_time, "warning", lambda config, platform: f"slow on {platform}"
  )
  session.Session(Config(), str(tmp_path))
  assert capsys.readouterr().err.count("diffjax: slow on cpu\n") == 1
