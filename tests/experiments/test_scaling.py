"""Power laws: known ones are found, and the paper's own losses give about the share that the paper gives."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.model.flops import parameter_count
from experiments import grid, plots, results
from experiments.scaling import experiment
from experiments.scaling.config import (
  ARCHITECTURES,
  PAPER,
  SMALL,
  get_config,
  parts,
)
from experiments.scaling.fit import fit, interval

SIZES = np.array([0.12, 0.25, 0.47, 0.84, 1.6])
TRUE = {
  "transformer": 1.0,
  "diff": 0.62,
  "diff_v2": 0.7,
}  # of the parameters, and of the tokens, for the same loss


def law(x, share, c=1.1, b=0.3):
  return c + 0.4 * (x / share) ** -b


def test_known_laws_are_found():
  found = fit(
    {name: (SIZES, law(SIZES, share)) for name, share in TRUE.items()},
    at=SIZES[-1],
  )
  assert found.c == pytest.approx(1.1, abs=1e-4) and all(
    b == pytest.approx(0.3, abs=1e-4) for b in found.b.values()
  )
  assert found.share("diff", "transformer") == pytest.approx(
    0.62, abs=1e-4
  ) and found.share("diff_v2", "diff") == pytest.approx(0.7 / 0.62, abs=1e-4)
  np.testing.assert_allclose(
    found.loss("diff", SIZES), law(SIZES, 0.62), atol=1e-5
  )
  # other exponents: at the share, one curve has the loss that the other has at the whole size
  curves = {
    "transformer": (SIZES, law(SIZES, 1.0)),
    "diff": (SIZES, law(SIZES, 0.8, b=0.4)),
  }
  found = fit(curves, at=1.0)
  assert law(found.share("diff", "transformer"), 0.8, b=0.4) == pytest.approx(
    law(1.0, 1.0), abs=1e-4
  )


def test_the_papers_own_losses():
  """Losses read off its figure to ±0.002. In the paper 6.8B of DIFF equal 11B of the Transformer (62%), and 7.8B equal 13.1B (59.5%)."""
  billions = [0.8335, 1.413, 2.794, 6.837, 13.123]
  curves = {
    "transformer": (billions, [3.170, 3.087, 3.003, 2.961, 2.899]),
    "diff": (billions, [3.138, 3.062, 2.977, 2.934, 2.872]),
  }
  equal = 6.837 * fit(curves, at=6.837).share("transformer", "diff")
  assert equal == pytest.approx(10.6, abs=0.05), "the README says so"
  assert fit(curves, at=13.123).share("diff", "transformer") == pytest.approx(
    0.632, abs=5e-4
  )


def test_intervals_of_a_mean_are_students():
  values = np.random.default_rng(0).normal(size=5)
  low, high = interval(
    values.mean(), [np.delete(values, index).mean() for index in range(5)]
  )
  reach = 2.7764 * values.std(ddof=1) / 5**0.5
  np.testing.assert_allclose(
    [low, high], [values.mean() - reach, values.mean() + reach], rtol=1e-4
  )


@pytest.mark.full
@pytest.mark.parametrize(
  "axis, grids", [("parameters", 120), ("tokens", 240)]
)  # a fit against parameters takes longer
def test_intervals_hold_the_true_share(axis, grids):
  """About 95% of the intervals do, in grids simulated from the committed curves with their runs' spread, as the README says."""
  points = experiment._points(
    json.loads(
      pathlib.Path(experiment.__file__).with_name("results.json").read_text()
    )
  )[axis]
  seeds = set(range(5))
  true = experiment._fit(points, seeds)
  spread = np.sqrt(
    np.mean(
      [
        np.var(list(losses.values()), ddof=1)
        for curve in points.values()
        for losses in curve.values()
      ]
    )
  )
  rng = np.random.default_rng(0)
  held = dict.fromkeys(("diff", "diff_v2"), 0)
  for _ in range(grids):
    simulated = {
      name: {
        x: {seed: true.loss(name, x) + rng.normal(0, spread) for seed in seeds}
        for x in curve
      }
      for name, curve in points.items()
    }
    fits = [
      experiment._fit(simulated, kept)
      for kept in (seeds, *(seeds - {seed} for seed in seeds))
    ]
    for name in held:
      whole, *left_out = np.log(
        [found.share(name, "transformer") for found in fits]
      )
      low, high = interval(whole, left_out)
      held[name] += bool(low < np.log(true.share(name, "transformer")) < high)
  assert all(0.9 < count / grids < 0.98 for count in held.values()), held


def made_up(tmp_path, seeds, only=lambda run: True):
  """Made-up results of the CPU grid: a law on each axis, an offset per seed, and a little noise."""
  rng = np.random.default_rng(1)
  chosen = experiment.EXPERIMENT.grids["cpu"]
  entries = []
  for run in grid.expand(
    "scaling", dataclasses.replace(chosen, seeds=seeds), {}
  ):
    architecture, _, times = parts(run.variant)
    if only(run):
      share = TRUE[architecture]
      loss = (
        0.7 + law(times, share, 0.0)
        if times
        else law(parameter_count(run.config.model) / 1e6, share)
      )
      if times is None and "0.1m" in run.variant:
        loss = 0.7 + law(1.0, share, 0.0)  # on both axes
      loss += 0.05 * run.seed + rng.normal(0, 0.002)
      results.write_run(
        tmp_path / run.name,
        run,
        {},
        {"validation/loss": loss},
        1.0,
        "a machine",
      )
      entries.append(results.read_run(tmp_path / run.name, run, {}, ()))
  return results.write_folder(
    tmp_path / "results.json",
    "scaling",
    "cpu",
    chosen.baseline,
    entries,
    experiment.summarise,
  )


def test_the_summary_holds_the_shares(tmp_path):
  found = made_up(tmp_path, seeds=range(5))
  rows = {
    (row["against"], row["architecture"]): row for row in found["summary"]
  }
  assert list(rows) == [
    (axis, name) for axis in ("parameters", "tokens") for name in ARCHITECTURES
  ]
  for name in ("diff", "diff_v2"):
    value, low, high = rows["tokens", name]["share"]
    assert (
      low < TRUE[name] < high
      and high / low < 1.3
      and value == pytest.approx(TRUE[name], rel=0.1)
    )
  assert (
    rows["parameters", "transformer"]["share"] is None
    and rows["tokens", "diff"]["paper's share"] == "0.637"
  )
  assert rows["tokens", "diff"]["at (M)"] == pytest.approx(
    4 * 480 * 4 * 256 / 1e6
  )
  assert rows["parameters", "diff"]["at (M)"] == pytest.approx(
    parameter_count(
      grid.from_config_dict(get_config("transformer,size=1.2m")).model
    )
    / 1e6
  )
  text = results.table(experiment.EXPERIMENT, found)
  assert "| against | architecture |" in text and "loss − transformer's" in text
  row = next(
    line for line in text.splitlines() if line.startswith("| diff,size=1.2m |")
  )
  difference = [
    run["results"]["validation/loss"]
    for run in found["runs"]
    if run["variant"] in ("diff,size=1.2m", "transformer,size=1.2m")
  ]
  assert (
    f"{np.mean(difference[1::2]) - np.mean(difference[::2]):+.4f}" in row
  ), "compared with the Transformer of its size"
  plots.save(experiment.plot(found), tmp_path)
  assert (tmp_path / "plot.png").stat().st_size > 20_000


def test_parts_of_the_grid_have_the_summary_that_they_can_have(tmp_path):
  """One seed has no interval. Two sizes, or no Transformer, have no fit. Seeds that some lack are left out."""
  rows = made_up(tmp_path / "one", seeds=(0,))["summary"]
  assert len(rows) == 6 and all(isinstance(row["b"], float) for row in rows)
  two = made_up(
    tmp_path / "two",
    seeds=(0, 1),
    only=lambda run: "0.1m" in run.variant or "0.2m" in run.variant,
  )
  assert {row["against"] for row in two["summary"]} == {"tokens"}
  none = made_up(
    tmp_path / "none",
    seeds=(0, 1),
    only=lambda run: run.variant.startswith("diff,"),
  )
  assert none["summary"] == []
  less = made_up(
    tmp_path / "less",
    seeds=range(3),
    only=lambda run: run.seed < 2 or run.variant == "diff,size=0.8m",
  )["summary"]
  assert (
    less[0]["share"] is None
    and less[1]["share"]
    == made_up(tmp_path / "both", seeds=range(2))["summary"][1]["share"]
  )
  for name, found in (("two", two), ("none", none)):
    assert plots.save(experiment.plot(found), tmp_path / name)


def test_sizes():
  """Heads are equally wide at every size, and DIFF has two or more; the paper's sizes have its parameters, steps and learning rates."""
  count = lambda variant: parameter_count(
    grid.from_config_dict(get_config(variant)).model
  )
  for size, (E, L, F) in SMALL.items():
    model = get_config(f"diff,size={size}").model
    assert (
      model.head_dim,
      2 * model.num_heads * model.head_dim,
      model.num_layers,
      model.ffn_dim,
    ) == (16, E, L, F) and model.num_heads >= 2
    assert count(f"diff,size={size}") - 256 * E == pytest.approx(
      1e6 * float(size[:-1]), rel=0.25
    ), "without the vocabulary"
    assert max(
      count(f"{name},size={size}") for name in ARCHITECTURES
    ) < 1.03 * min(count(f"{name},size={size}") for name in ARCHITECTURES)
  for size, parameters in {
    "830m": 0.8335e9,
    "1.4b": 1.413e9,
    "2.8b": 2.794e9,
    "6.8b": 6.837e9,
    "13.1b": 13.123e9,
    "3b": 3.479e9,
  }.items():
    assert (
      count(f"transformer,size={size}") == pytest.approx(parameters, rel=3e-3)
      and size in PAPER
    )
    if size != "3b":
      config = get_config(f"diff,size={size}")
      tokens = config.train.steps * config.train.batch_size * config.data.length
      assert config.optimizer.learning_rate == (
        7.5e-5 if size in ("6.8b", "13.1b") else 1.5e-4
      ) and tokens == pytest.approx(10e9, rel=0.06)


def test_tokens():
  steps = lambda variant: get_config(variant).train.steps
  assert [
    steps(f"diff,size=0.1m{times}")
    for times in (",times=0.5", "", ",times=2", ",times=4")
  ] == [240, 480, 960, 1920]
  assert [
    steps(f"diff_v2,size=3b,times={times}") for times in ("0.125", "1")
  ] == [10_938, 87_500]
  assert get_config("diff,size=0.1m,times=4").optimizer.warmup_steps == 192, (
    "a schedule of its own"
  )
  sizes = "|".join([*SMALL, *PAPER])
  for variant in (
    "diff@0.1m",
    "diff,size=5b",
    "softmax,size=0.1m",
    *(f"diff,size=0.1m,times={times}" for times in ("", "0", ".", "x", "-1")),
  ):
    with pytest.raises(
      UserError,
      match=rf"; variants are transformer\|diff\|diff_v2\[,size={re.escape(sizes)}\]\[,times=NUMBER\]$",
    ):
      get_config(variant)
