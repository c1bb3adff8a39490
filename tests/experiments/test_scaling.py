"""Scaling: the fits of power laws, the summary, and the sizes of the models."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from diffjax.config import UserError, from_config_dict
from diffjax.model.flops import parameter_count
from experiments import grid, table
from experiments.scaling import experiment
from experiments.scaling.config import (
  ARCHITECTURES,
  PAPER,
  SMALL,
  get_config,
  parts,
)
from experiments.scaling.fit import fit, interval

# The share of an architecture is the number of parameters (or tokens) with
# which it has the loss of the Transformer, relative to the Transformer's. These
# are the shares of the simulated losses.
SHARES = {"transformer": 1.0, "diff": 0.62, "diff_v2": 0.7}


def num_parameters(variant: str) -> int:
  """Returns the number of parameters of a variant."""
  config = from_config_dict(get_config(variant))
  return parameter_count(config.model)


def test_a_fit_finds_the_parameters_of_power_laws():
  """The losses are c + 0.4 (x / share)^-b."""
  c = 1.1
  b = 0.3
  sizes = np.array([0.12, 0.25, 0.47, 0.84, 1.6])
  losses = {
    "transformer": c + 0.4 * sizes**-b,
    "diff": c + 0.4 * (sizes / 0.62) ** -b,
    "diff_v2": c + 0.4 * (sizes / 0.7) ** -b,
  }
  curves = {name: (sizes, values) for name, values in losses.items()}

  fitted = fit(curves, at=1.6)

  # The optimizer stops before the last digits.
  assert fitted.c == pytest.approx(c, abs=1e-4)
  for fitted_b in fitted.b.values():
    assert fitted_b == pytest.approx(b, abs=1e-4)
  diff_share = fitted.share("diff", "transformer")
  assert diff_share == pytest.approx(0.62, abs=1e-4)
  v2_share_of_diff = fitted.share("diff_v2", "diff")
  assert v2_share_of_diff == pytest.approx(0.7 / 0.62, abs=1e-4)
  diff_losses = fitted.loss("diff", sizes)
  assert diff_losses == pytest.approx(losses["diff"], abs=1e-5)


def test_curves_with_different_exponents_have_equal_losses_at_the_share():
  """The share depends on the size of the Transformer that DIFF equals."""
  sizes = np.array([0.12, 0.25, 0.47, 0.84, 1.6])

  def transformer_loss(size):
    return 1.1 + 0.4 * size**-0.3

  def diff_loss(size):
    return 1.1 + 0.4 * (size / 0.8) ** -0.4

  curves = {
    "transformer": (sizes, transformer_loss(sizes)),
    "diff": (sizes, diff_loss(sizes)),
  }
  transformer_size = 1.5

  fitted = fit(curves, at=transformer_size)

  diff_size = transformer_size * fitted.share("diff", "transformer")
  assert diff_loss(diff_size) == pytest.approx(
    transformer_loss(transformer_size), abs=1e-4
  )


def test_a_fit_of_the_papers_losses_gives_about_its_shares():
  """The losses are read off the paper's figure to ±0.002.

  In the paper, 6.8 billion parameters of DIFF equal 11 billion of the
  Transformer, and 7.8 billion equal 13.1 billion. The fit has 10.6 billion
  instead of 11, and 8.3 billion instead of 7.8.
  """
  billions = [0.8335, 1.413, 2.794, 6.837, 13.123]
  curves = {
    "transformer": (billions, [3.170, 3.087, 3.003, 2.961, 2.899]),
    "diff": (billions, [3.138, 3.062, 2.977, 2.934, 2.872]),
  }

  fit_at_7b = fit(curves, at=6.837)
  fit_at_13b = fit(curves, at=13.123)

  transformer_billions = 6.837 * fit_at_7b.share("transformer", "diff")
  diff_billions = 13.123 * fit_at_13b.share("diff", "transformer")
  assert transformer_billions == pytest.approx(10.6, abs=0.05)
  assert diff_billions == pytest.approx(8.29, abs=0.006)


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
      losses = list(loss_by_seed.values())
      variances.append(np.var(losses, ddof=1))
  return np.sqrt(np.mean(variances))


@pytest.mark.full
@pytest.mark.parametrize("axis", ["parameters", "tokens"])
def test_about_95_percent_of_intervals_contain_the_true_share(axis):
  """The committed curves stand for the truth, with which grids are simulated.

  An architecture's share is the part of the Transformer's parameters (or
  tokens) with which it has the Transformer's loss.
  """
  path = pathlib.Path(experiment.__file__).with_name("results.json")
  committed_results = json.loads(path.read_text())
  # The losses by architecture, number of parameters (or tokens) and seed.
  points = experiment.points_by_axis(committed_results)[axis]
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
      num_hits[name] += low < np.log(true_share) < high

  # Of 120 grids, 114 ± 2.4 (the standard deviation) are expected to be hits.
  # The jackknife is approximate, so a little fewer are allowed.
  expected = 0.95 * num_grids
  standard_deviation = np.sqrt(num_grids * 0.95 * 0.05)
  for name in num_hits:
    assert num_hits[name] > expected - 2.5 * standard_deviation
    assert num_hits[name] < expected + 1.5 * standard_deviation


def simulated_loss(run, rng) -> float:
  """Returns a loss that follows a power law, with an offset per seed.

  The runs of the smallest size differ in their tokens. The law is of the tokens
  for them, and of the parameters for the others.
  """
  architecture, size, times = parts(run.variant)
  share = SHARES[architecture]
  if size == "0.1m":
    tokens = times or 1.0
    loss = 0.7 + 0.4 * (tokens / share) ** -0.3
  else:
    millions = parameter_count(run.config.model) / 1e6
    loss = 1.1 + 0.4 * (millions / share) ** -0.3
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
  """Two numbers of parameters are too few points for a fit.

  The size 0.1m has been trained on more than two numbers of tokens, so the loss
  as a function of the tokens is fitted.
  """

  def is_small(run):
    return "size=0.1m" in run.variant or "size=0.2m" in run.variant

  simulated = simulated_results(seeds=[0, 1], only=is_small)

  fitted_axes = {row["against"] for row in simulated["summary"]}
  assert fitted_axes == {"tokens"}
  # The plot needs no fit to the parameters.
  assert experiment.plot(simulated) is not None


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
  """A size, such as "0.1m", is about the parameters without the embedding."""
  variant = f"diff,size={size}"
  num_bytes = 256
  embedding_parameters = num_bytes * get_config(variant).model.embed_dim

  actual = num_parameters(variant) - embedding_parameters

  millions = float(size.removesuffix("m"))
  # Sizes are rounded to one digit.
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
