"""Tuning: the best setting of each row by its mean over the tuning seeds, from a whole grid alone."""

import json

import pytest

from diffjax.config import UserError
from experiments import grid, tuned

RATES = (0.002, 0.004, 0.008, 0.016)


@pytest.fixture
def results(tmp_path, monkeypatch, choose):
  """results(losses by rate): a results.json of the tuning of noisy_lookup's DIFF."""
  monkeypatch.setattr(tuned, "FOLDER", tmp_path)

  def write(losses):
    runs = [
      {
        "name": f"diff,rate={rate:g}/seed_{seed}",
        "variant": f"diff,rate={rate:g}",
        "results": {"accuracy": loss},
      }
      for rate, each in losses.items()
      for seed, loss in zip((100, 101), each, strict=False)
    ]
    (tmp_path / "noisy_lookup/tune").mkdir(parents=True, exist_ok=True)
    (tmp_path / "noisy_lookup/tune/results.json").write_text(
      json.dumps({"runs": runs})
    )
    return choose("noisy_lookup", "diff", "accuracy", max)

  return write


def test_the_best_mean_decides(results):
  losses = dict.fromkeys(RATES, (0.5, 0.5)) | {
    0.004: (0.9, 0.1),
    0.008: (0.55, 0.5),
  }
  assert results(losses) == "diff,rate=0.008"
  assert results(losses | {0.016: (None, 0.9)}) == "diff,rate=0.008", (
    "a run that diverged"
  )
  assert results(losses | {0.016: (float("nan"), 0.9)}) == "diff,rate=0.008"


def test_what_has_not_been_tuned_whole_is_refused(results, choose, tmp_path):
  with pytest.raises(
    UserError,
    match="noisy_lookup: diff has not been tuned; run python -m experiments.run noisy_lookup --grid=tune",
  ):
    choose("noisy_lookup", "diff", "accuracy", max)
  with pytest.raises(UserError, match="diff has not been tuned"):
    results(dict.fromkeys(RATES, (0.5,)))
  with pytest.raises(
    UserError, match="no setting of diff .* has a finite accuracy"
  ):
    results(dict.fromkeys(RATES, (None, 0.5)))
  with pytest.raises(UserError, match="diffs has not been tuned"):
    choose("noisy_lookup", "diffs", "accuracy", max)


@pytest.mark.parametrize("name", ["fairness", "eight_heads", "tokens"])
def test_runs_that_need_fairness_s_settings_do_not_begin_without_them(
  name, tmp_path, monkeypatch, choose
):
  monkeypatch.setattr(tuned, "best", choose)
  monkeypatch.setattr(tuned, "FOLDER", tmp_path)
  with pytest.raises(
    UserError,
    match="fairness: transformer has not been tuned; run python -m experiments.run fairness --grid=tune",
  ):
    grid.expand(name, grid.load(name).grids["cpu"], {})


@pytest.mark.parametrize("name", ["noisy_lookup", "fairness"])
def test_no_seed_is_tuned_on_and_reported(name):
  grids = grid.load(name).grids
  assert not {*grids["tune"].seeds} & {*grids["cpu"].seeds}
  assert {variant.partition(",")[0] for variant in grids["tune"].variants} == {
    *grids["cpu"].variants
  }
