"""Scaling: the fits of power laws, the summary, and the sizes of the models."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from diffjax.config import UserError, from_config_dict
from diffjax.model.flops import parameter_count
from experiments import grid, series, table
from experiments.scaling import experiment
from experiments.scaling.config import (
  ARCHITECTURES,
  PAPER,
  SMALL,
  get_config,
  parts,
)
from experiments.scaling.fit import fit, interval

# Millions of parameters.
SIZES = np.array([0.12, 0.25, 0.47, 0.84, 1.6])

# The share of an architecture is the number of parameters (or tokens) with
# which it has the loss of the Transformer, relative to the Transformer's. These
# are the shares of the simulated losses.
SHARES = {"transformer": 1.0, "diff": 0.62, "diff_v2": 0.7}


def power_law(x, share, c=1.1, b=0.3):
  """Returns the losses c + 0.4 (x / share)^-b of an architecture.

  Args:
    x: The number of parameters or tokens.
    share: The architecture's share.
    c: The loss of an infinitely large model.
    b: The exponent.
  """
  return c + 0.4 * (x / share) ** -b


def num_parameters(variant: str) -> int:
  """Returns the number of parameters of a variant."""
  config = from_config_dict(get_config(variant))
  return parameter_count(config.model)


def test_a_fit_finds_the_parameters_of_power_laws():
  """The losses are c + 0.4 (x / share)^-b with c = 1.1 and b = 0.3."""
  curves = {}
  for name, share in SHARES.items():
    curves[name] = (SIZES, power_law(SIZES, share))

  fitted = fit(curves, at=SIZES[-1])

  assert fitted.c == pytest.approx(1.1, abs=1e-4)
  for b in fitted.b.values():
    assert b == pytest.approx(0.3, abs=1e-4)
  diff_share = fitted.share("diff", "transformer")
  assert diff_share == pytest.approx(0.62, abs=1e-4)
  v2_share_of_diff = fitted.share("diff_v2", "diff")
  assert v2_share_of_diff == pytest.approx(0.7 / 0.62, abs=1e-4)
  diff_losses = fitted.loss("diff", SIZES)
  assert diff_losses == pytest.approx(power_law(SIZES, 0.62), abs=1e-5)


def test_curves_with_different_exponents_have_equal_losses_at_the_share():
  """DIFF of `share` million parameters equals a Transformer of one million."""
  curves = {
    "transformer": (SIZES, power_law(SIZES, share=1.0, b=0.3)),
    "diff": (SIZES, power_law(SIZES, share=0.8, b=0.4)),
  }

  # The share depends on the Transformer's size, here one million parameters.
  share = fit(curves, at=1.0).share("diff", "transformer")

  transformer_loss = power_law(1.0, share=1.0, b=0.3)
  diff_loss = power_law(share, share=0.8, b=0.4)
  assert diff_loss == pytest.approx(transformer_loss, abs=1e-4)


def test_a_fit_of_the_papers_losses_gives_about_its_shares():
  """The losses are read off the paper's figure to ±0.002.

  In the paper, 6.8B of DIFF equal 11B of the Transformer (62%), and 7.8B equal
  13.1B (59.5%). The README has this fit's shares, 65% and 63%.
  """
  billions = [0.8335, 1.413, 2.794, 6.837, 13.123]
  curves = {
    "transformer": (billions, [3.170, 3.087, 3.003, 2.961, 2.899]),
    "diff": (billions, [3.138, 3.062, 2.977, 2.934, 2.872]),
  }

  transformer_share = fit(curves, at=6.837).share("transformer", "diff")
  diff_share = fit(curves, at=13.123).share("diff", "transformer")

  # 6.837 billions of DIFF equal 10.6 billions of the Transformer: 65%.
  transformer_billions = 6.837 * transformer_share
  assert transformer_billions == pytest.approx(10.6, abs=0.05)
  assert diff_share == pytest.approx(0.632, abs=5e-4)


def test_the_jackknife_interval_of_a_mean_is_its_t_interval():
  """The jackknife computes an interval from estimates that omit one value."""
  values = np.random.default_rng(0).normal(size=5)
  mean = values.mean()
  means_without_one = [np.delete(values, index).mean() for index in range(5)]

  low, high = interval(mean, means_without_one)

  # The 97.5% quantile of Student's t with four degrees of freedom.
  quantile = 2.7764
  margin = quantile * values.std(ddof=1) / 5**0.5
  assert low == pytest.approx(mean - margin, rel=1e-4)
  assert high == pytest.approx(mean + margin, rel=1e-4)


def simulate(points, true_fit, spread, rng):
  """Returns losses of five seeds, scattered about the fitted curves.

  Args:
    points: The losses by architecture, number of parameters (or tokens) and
      seed. Only their keys are used.
    true_fit: The curves.
    spread: The standard deviation of the losses.
    rng: The generator of random numbers.
  """
  simulated = {}
  for name, curve in points.items():
    simulated[name] = {}
    for x in curve:
      noise = rng.normal(0, spread, size=5)
      losses = true_fit.loss(name, x) + noise
      simulated[name][x] = dict(enumerate(losses))
  return simulated


def log_share_intervals(points, names):
  """Returns the interval of the logarithm of each architecture's share."""
  seeds = set(range(5))
  all_seeds = experiment.fit_seeds(points, seeds)
  fits_without_one_seed = []
  for seed in seeds:
    fits_without_one_seed.append(experiment.fit_seeds(points, seeds - {seed}))

  intervals = {}
  for name in names:
    share = all_seeds.share(name, "transformer")
    left_out = []
    for fitted in fits_without_one_seed:
      left_out.append(fitted.share(name, "transformer"))
    intervals[name] = interval(np.log(share), np.log(left_out))
  return intervals


def standard_deviation_of_seeds(points):
  """Returns the root of the mean variance of the losses at a point."""
  variances = []
  for curve in points.values():
    for loss_by_seed in curve.values():
      variances.append(np.var(list(loss_by_seed.values()), ddof=1))
  return np.sqrt(np.mean(variances))


@pytest.mark.full
@pytest.mark.parametrize("axis", ["parameters", "tokens"])
def test_about_95_percent_of_intervals_contain_the_true_share(axis):
  """Simulates grids from the committed curves and the spread of their seeds."""
  path = pathlib.Path(experiment.__file__).with_name("results.json")
  # The losses by architecture, number of parameters (or tokens) and seed.
  points = experiment.points_by_axis(json.loads(path.read_text()))[axis]
  true_fit = experiment.fit_seeds(points, set(range(5)))
  spread = standard_deviation_of_seeds(points)
  rng = np.random.default_rng(0)
  num_grids = 120

  num_hits = {"diff": 0, "diff_v2": 0}
  for _ in range(num_grids):
    simulated = simulate(points, true_fit, spread, rng)
    intervals = log_share_intervals(simulated, names=["diff", "diff_v2"])
    for name, (low, high) in intervals.items():
      true_share = true_fit.share(name, "transformer")
      if low < np.log(true_share) < high:
        num_hits[name] += 1

  # With 120 grids, a fraction of 0.95 has a standard deviation of 0.02.
  assert 0.9 < num_hits["diff"] / num_grids < 0.98
  assert 0.9 < num_hits["diff_v2"] / num_grids < 0.98


def simulated_loss(run, rng) -> float:
  """Returns a loss that follows a power law, with an offset per seed.

  The law is of the tokens for the smallest size, and of the parameters else.
  """
  architecture, size, times = parts(run.variant)
  share = SHARES[architecture]
  if size == "0.1m":
    # The runs of this size differ in their tokens.
    loss = 0.7 + power_law(times or 1.0, share, c=0.0)
  else:
    loss = power_law(parameter_count(run.config.model) / 1e6, share)
  return loss + 0.05 * run.seed + rng.normal(0, 0.002)


def simulated_results(seeds, only=None):
  """Returns results of the CPU grid, as results.json holds them.

  Args:
    seeds: The seeds of the runs.
    only: Returns whether a run has finished. All runs by default.
  """
  rng = np.random.default_rng(1)
  cpu_grid = experiment.EXPERIMENT.grids["cpu"]
  with_seeds = dataclasses.replace(cpu_grid, seeds=tuple(seeds))
  runs = []
  for run in grid.expand("scaling", with_seeds, {}):
    if only is not None and not only(run):
      continue
    entry = {
      "name": run.name,
      "variant": run.variant,
      "seed": run.seed,
      "parameters": parameter_count(run.config.model),
      "config": {
        "train.steps": run.config.train.steps,
        "train.batch_size": run.config.train.batch_size,
        "data.length": run.config.data.length,
      },
      "results": {"validation/loss": simulated_loss(run, rng)},
    }
    runs.append(entry)
  simulated = {"baseline": cpu_grid.baseline, "config": {}, "runs": runs}
  simulated["summary"] = experiment.summarise(simulated)
  return simulated


@pytest.fixture(scope="module")
def complete_results():
  """Simulated results of five seeds."""
  return simulated_results(range(5))


@pytest.fixture(scope="module")
def summary(complete_results):
  """The rows of the summary: summary["tokens", "diff"] is a dict."""
  rows = {}
  for row in complete_results["summary"]:
    rows[row["against"], row["architecture"]] = row
  return rows


def test_the_summary_has_a_row_for_each_axis_and_architecture(summary):
  assert list(summary) == [
    ("parameters", "transformer"),
    ("parameters", "diff"),
    ("parameters", "diff_v2"),
    ("tokens", "transformer"),
    ("tokens", "diff"),
    ("tokens", "diff_v2"),
  ]


@pytest.mark.parametrize("name, true_share", [("diff", 0.62), ("diff_v2", 0.7)])
def test_the_summary_has_the_shares_with_intervals(summary, name, true_share):
  """The losses are simulated with the true share."""
  share, low, high = summary["tokens", name]["share"]

  assert low < true_share < high
  assert high / low < 1.3
  assert share == pytest.approx(true_share, rel=0.1)


def test_the_transformer_has_no_share(summary):
  assert summary["parameters", "transformer"]["share"] is None


def test_the_summary_has_the_papers_shares(summary):
  # In the paper, DIFF with 160B tokens equals the Transformer with 251B.
  assert summary["tokens", "diff"]["paper's share"] == "0.637"


def test_shares_are_at_the_transformers_most_tokens(summary):
  """The runs on the most tokens have four times the usual 480 steps."""
  steps = 4 * 480
  rows = 4
  tokens_per_row = 256
  millions = steps * rows * tokens_per_row / 1e6

  assert summary["tokens", "diff"]["at (M)"] == pytest.approx(millions)


def test_shares_are_at_the_transformers_most_parameters(summary):
  """The largest size is 1.2m."""
  millions = num_parameters("transformer,size=1.2m") / 1e6

  assert summary["parameters", "diff"]["at (M)"] == pytest.approx(millions)


def test_the_table_compares_with_the_transformer_of_the_same_size(
  complete_results,
):
  text = table.markdown(experiment.EXPERIMENT, complete_results)

  def mean_loss(variant):
    losses = []
    for run in complete_results["runs"]:
      if run["variant"] == variant:
        losses.append(run["results"]["validation/loss"])
    return np.mean(losses)

  difference = mean_loss("diff,size=1.2m") - mean_loss("transformer,size=1.2m")
  row = re.search(r"^\| diff,size=1.2m .*$", text, re.MULTILINE)[0]
  assert f"{difference:+.4f}" in row


def test_the_plot_has_a_curve_for_each_architecture(complete_results):
  figure = experiment.plot(complete_results)

  for axes in figure.axes:
    _, labels = axes.get_legend_handles_labels()
    assert labels == ["Transformer", "DIFF", "DIFF V2"]


def test_the_summary_of_one_seed_has_no_intervals():
  rows = simulated_results(seeds=[0])["summary"]

  # Three architectures on two axes.
  assert len(rows) == 3 * 2
  for row in rows:
    # With an interval, the exponent b would be a list of three numbers.
    assert isinstance(row["b"], float)


def test_a_curve_of_two_sizes_is_not_fitted():
  def is_small(run):
    _, size, _ = parts(run.variant)
    return size in ("0.1m", "0.2m")

  simulated = simulated_results(seeds=[0, 1], only=is_small)

  # There is no fit to the parameters. The smallest size has been trained on
  # more than two numbers of tokens.
  axes = series.column(simulated["summary"], "against")
  assert set(axes) == {"tokens"}
  # The plot leaves out what is not fitted.
  assert experiment.plot(simulated)


def test_nothing_is_fitted_without_the_transformer():
  """Shares are relative to the Transformer."""

  def is_diff(run):
    return run.variant.startswith("diff,")

  simulated = simulated_results(seeds=[0, 1], only=is_diff)

  assert simulated["summary"] == []
  assert experiment.plot(simulated)


def test_a_seed_that_has_not_finished_all_sizes_is_left_out():
  def is_finished(run):
    # The third seed has finished one size of DIFF.
    return run.seed < 2 or run.variant == "diff,size=0.8m"

  three_seeds = simulated_results(seeds=[0, 1, 2], only=is_finished)

  # The runs of the third seed come last, so the losses of the others are the
  # same without it.
  two_seeds = simulated_results(seeds=[0, 1])
  assert three_seeds["summary"] == two_seeds["summary"]


@pytest.mark.parametrize("size", SMALL)
def test_small_models_have_the_dimensions_of_their_size(size):
  embed_dim, num_layers, ffn_dim = SMALL[size]

  model = get_config(f"diff,size={size}").model

  assert model.num_layers == num_layers
  assert model.ffn_dim == ffn_dim
  # Heads are equally wide at every size. Each has two queries of size 16.
  assert model.head_dim == 16
  assert 2 * model.num_heads * model.head_dim == embed_dim
  assert model.num_heads >= 2


@pytest.mark.parametrize("size", SMALL)
def test_small_models_have_the_parameters_of_their_size(size):
  embed_dim, _, _ = SMALL[size]
  vocabulary_parameters = 256 * embed_dim

  actual = num_parameters(f"diff,size={size}") - vocabulary_parameters

  # The name of a size is about its parameters without the vocabulary.
  millions = float(size.removesuffix("m"))
  assert actual == pytest.approx(1e6 * millions, rel=0.25)


@pytest.mark.parametrize("size", SMALL)
def test_small_architectures_of_a_size_have_equally_many_parameters(size):
  counts = [num_parameters(f"{name},size={size}") for name in ARCHITECTURES]

  assert max(counts) < 1.03 * min(counts)


@pytest.mark.parametrize(
  "size, papers_parameters",
  [
    ("830m", 0.8335e9),
    ("1.4b", 1.413e9),
    ("2.8b", 2.794e9),
    ("6.8b", 6.837e9),
    ("13.1b", 13.123e9),
    ("3b", 3.479e9),
  ],
)
def test_large_models_have_the_papers_parameters(size, papers_parameters):
  actual = num_parameters(f"transformer,size={size}")

  assert actual == pytest.approx(papers_parameters, rel=3e-3)


@pytest.mark.parametrize(
  "size, learning_rate",
  [
    ("830m", 1.5e-4),
    ("1.4b", 1.5e-4),
    ("2.8b", 1.5e-4),
    ("6.8b", 7.5e-5),
    ("13.1b", 7.5e-5),
  ],
)
def test_large_runs_have_the_papers_rate_and_tokens(size, learning_rate):
  config = get_config(f"diff,size={size}")

  assert config.optimizer.learning_rate == learning_rate
  tokens_per_step = config.train.batch_size * config.data.length
  tokens = config.train.steps * tokens_per_step
  assert tokens == pytest.approx(10e9, rel=0.06)


@pytest.mark.parametrize(
  "variant, steps",
  [
    ("diff,size=0.1m,times=0.5", 240),
    ("diff,size=0.1m", 480),
    ("diff,size=0.1m,times=4", 1920),
    ("diff_v2,size=3b,times=0.125", 10_938),
    ("diff_v2,size=3b,times=1", 87_500),
  ],
)
def test_times_multiplies_the_steps(variant, steps):
  """times=1 is 480 steps for the size 0.1m, and 87,500 for 3b."""
  assert get_config(variant).train.steps == steps


def test_the_warmup_is_a_tenth_of_the_multiplied_steps():
  config = get_config("diff,size=0.1m,times=4")

  assert config.train.steps == 4 * 480
  assert config.optimizer.warmup_steps == 192


@pytest.mark.parametrize(
  "variant",
  [
    "diff@0.1m",
    "diff,size=5b",
    "softmax,size=0.1m",
    "diff,size=0.1m,times=",
    "diff,size=0.1m,times=0",
    "diff,size=0.1m,times=x",
    "diff,size=0.1m,times=-1",
  ],
)
def test_the_error_for_an_unknown_variant_lists_the_variants(variant):
  sizes = re.escape("|".join([*SMALL, *PAPER]))
  variants = rf"transformer\|diff\|diff_v2\[,size={sizes}\]\[,times=NUMBER\]"

  with pytest.raises(UserError, match=rf"; variants are {variants}$"):
    get_config(variant)
