"""The plan of experiments/one_gpu."""

import dataclasses

import pytest

from diffjax.model.flops import parameter_count
from experiments import grid
from experiments.one_gpu.config import ARCHITECTURES, LEARNING_RATES, RATES
from experiments.one_gpu.experiment import EXPERIMENT


@pytest.fixture(scope="module")
def tune_runs() -> list[grid.Run]:
  """The runs that choose the learning rates."""
  return grid.expand("one_gpu", EXPERIMENT.grids["tune"], {})


@pytest.fixture(scope="module")
def runs() -> list[grid.Run]:
  """The runs of the comparison."""
  return grid.expand("one_gpu", EXPERIMENT.grids["gpu"], {})


def num_tokens(run: grid.Run) -> int:
  """Returns the number of tokens that a run trains on."""
  train = run.config.train
  return train.steps * train.batch_size * run.config.data.length


def test_all_models_have_27_million_parameters(runs):
  sizes = [parameter_count(run.config.model) for run in runs]

  assert max(sizes) < 27.3e6
  # The smallest model has at least 99.9% of the parameters of the largest one.
  assert max(sizes) < 1.001 * min(sizes)


def test_diff_has_eight_heads_and_the_others_have_sixteen(runs):
  """A head of DIFF has two attention maps. All heads have the size 32."""
  num_heads = {}
  for run in runs:
    num_heads[run.variant] = run.config.model.num_heads
    assert run.config.model.head_dim == 32

  assert num_heads == {"transformer": 16, "diff": 8, "diff_v2": 16}


def test_tuning_takes_a_quarter_of_the_tokens(runs, tune_runs):
  # 1,200 steps of 65,536 tokens.
  tokens_of_comparison = 1200 * 65_536

  for run in runs:
    assert num_tokens(run) == tokens_of_comparison
  for run in tune_runs:
    assert num_tokens(run) == tokens_of_comparison // 4


def test_the_seed_of_tuning_is_not_a_seed_of_the_comparison(runs, tune_runs):
  """Rates that were tuned on a seed of the comparison would favor it."""
  seeds = {run.seed for run in runs}

  assert seeds == {0, 1, 2}
  for run in tune_runs:
    assert run.seed not in seeds


def test_each_architecture_tries_each_rate(tune_runs):
  tried = set()
  for run in tune_runs:
    # A variant is, for example, "diff,rate=0.001".
    architecture, _, _ = run.variant.partition(",")
    tried.add((architecture, run.config.optimizer.learning_rate))

  assert len(tried) == len(ARCHITECTURES) * len(RATES)


def test_each_architecture_has_one_of_the_tried_rates(runs):
  for run in runs:
    rate = run.config.optimizer.learning_rate
    assert rate == LEARNING_RATES[run.variant]
    assert rate in RATES


def test_architectures_differ_only_in_the_model_and_the_rate(runs):
  runs_of_seed_0 = [run for run in runs if run.seed == 0]
  first, *others = runs_of_seed_0
  assert len(runs_of_seed_0) == len(ARCHITECTURES)

  for run in others:
    with_first_model_and_rate = dataclasses.replace(
      run.config,
      model=first.config.model,
      optimizer=dataclasses.replace(
        run.config.optimizer,
        learning_rate=first.config.optimizer.learning_rate,
      ),
    )
    assert with_first_model_and_rate == first.config


def test_all_runs_have_the_same_implementation_of_attention(runs, tune_runs):
  for run in [*runs, *tune_runs]:
    assert run.config.model.attention_implementation == "two_call"


def test_the_figure_of_tuning_has_losses_over_learning_rates(make_results):
  def measured(run):
    rate = run.config.optimizer.learning_rate
    losses = {0.001: 3.2, 0.002: 3.1, 0.004: 3.3}
    return {"validation/loss": losses[rate]}

  results = make_results("one_gpu", EXPERIMENT, measured, chosen="tune")

  (axes,) = EXPERIMENT.plot(results).axes

  _, labels = axes.get_legend_handles_labels()
  assert labels == ["Transformer", "DIFF", "DIFF V2"]
  for line in axes.get_lines():
    assert line.get_xdata().tolist() == [0.001, 0.002, 0.004]
    assert line.get_ydata().tolist() == [3.2, 3.1, 3.3]


def test_the_figure_of_the_comparison_has_a_row_for_each_architecture(
  make_results,
):
  def measured(run):
    losses_of_seeds = [3.0, 3.1, 3.2]
    return {"validation/loss": losses_of_seeds[run.seed]}

  results = make_results("one_gpu", EXPERIMENT, measured, chosen="gpu")

  axes = EXPERIMENT.plot(results).axes[0]

  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels == ["Transformer", "DIFF", "DIFF V2"]
