"""Tuning: the choice of settings, and the configs that state them."""

import json
import pathlib

import pytest

from diffjax.config import UserError
from experiments import grid, tuned
from experiments.eight_heads import config as eight_heads
from experiments.fairness import config as fairness
from experiments.noisy_lookup import config as noisy_lookup
from experiments.tokens import config as tokens


@pytest.fixture
def best_of(tmp_path, monkeypatch):
  """best_of({0.002: (0.5, 0.6), …}): the best variant of DIFF in noisy_lookup.

  The argument has the accuracies of two seeds with each learning rate. The
  experiment tries the rates 0.002, 0.004, 0.008 and 0.016.
  """
  monkeypatch.setattr(tuned, "FOLDER", tmp_path)
  folder = tmp_path / "noisy_lookup/tune"
  folder.mkdir(parents=True)

  def best(accuracies):
    runs = []
    for rate, values in accuracies.items():
      variant = f"diff,rate={rate:g}"
      for index, accuracy in enumerate(values):
        runs.append(
          {
            "name": f"{variant}/seed_{100 + index}",
            "variant": variant,
            "results": {"accuracy": accuracy},
          }
        )
    (folder / "results.json").write_text(json.dumps({"runs": runs}))
    return tuned.best("noisy_lookup", "diff", "accuracy", "max")

  return best


def test_the_variant_with_the_best_mean_is_chosen(best_of):
  # The accuracies of two seeds, by learning rate.
  best = best_of(
    {
      0.002: (0.5, 0.5),
      # The mean is 0.5, although one seed is the best of all.
      0.004: (0.9, 0.1),
      0.008: (0.6, 0.5),
      0.016: (0.5, 0.5),
    }
  )

  assert best == "diff,rate=0.008"


@pytest.mark.parametrize("diverged", [None, float("nan")])
def test_a_variant_with_a_diverged_run_is_not_chosen(best_of, diverged):
  # The accuracies of two seeds, by learning rate.
  best = best_of(
    {
      0.002: (0.5, 0.5),
      0.004: (0.5, 0.5),
      0.008: (0.6, 0.5),
      0.016: (diverged, 0.9),
    }
  )

  assert best == "diff,rate=0.008"


def test_an_error_is_raised_if_every_rate_has_a_diverged_run(best_of):
  # A diverged run has no accuracy.
  diverged = None

  with pytest.raises(UserError, match="no setting of diff .* finite accuracy"):
    best_of(
      {
        0.002: (diverged, 0.5),
        0.004: (diverged, 0.5),
        0.008: (diverged, 0.5),
        0.016: (diverged, 0.5),
      }
    )


def test_an_error_is_raised_if_runs_are_missing(best_of):
  """The grid has two seeds. Only the run of the first seed has finished."""
  with pytest.raises(UserError, match="diff has not been tuned"):
    best_of({0.002: (0.5,), 0.004: (0.5,), 0.008: (0.5,), 0.016: (0.5,)})


def test_a_grid_without_results_is_an_error(tmp_path, monkeypatch):
  # The folder of all experiments is empty.
  monkeypatch.setattr(tuned, "FOLDER", tmp_path)

  with pytest.raises(
    UserError,
    match="noisy_lookup: diff has not been tuned; run python -m"
    " experiments.run noisy_lookup --grid=tune",
  ):
    tuned.best("noisy_lookup", "diff", "accuracy", "max")


def test_an_unknown_row_is_an_error():
  with pytest.raises(UserError, match="diffs has not been tuned"):
    tuned.best("noisy_lookup", "diffs", "accuracy", "max")


@pytest.mark.parametrize("row", fairness.ROWS)
def test_the_config_of_fairness_has_the_tuned_settings(row):
  variant = tuned.best("fairness", row, metric="validation/loss", better="min")

  config = fairness.get_config(row)

  assert config == fairness.get_config(variant)


@pytest.mark.parametrize("row", noisy_lookup.ROWS)
def test_the_config_of_noisy_lookup_has_the_tuned_rate(row):
  variant = tuned.best("noisy_lookup", row, metric="accuracy", better="max")

  config = noisy_lookup.get_config(row)

  assert config == noisy_lookup.get_config(variant)


@pytest.mark.parametrize("row", tokens.ROWS)
def test_the_config_of_tokens_has_the_settings_tuned_for_fairness(row):
  variant = tuned.best("fairness", row, metric="validation/loss", better="min")
  tuned_config = fairness.get_config(variant)

  config = tokens.get_config(row)

  assert config.optimizer.learning_rate == tuned_config.optimizer.learning_rate
  assert config.model.embed_scale == tuned_config.model.embed_scale


@pytest.mark.parametrize(
  "row, tuned_row",
  [
    ("transformer", "transformer"),
    # fairness does not tune wide heads without a head norm.
    ("transformer_wide", "transformer_norm"),
    ("transformer_norm", "transformer_norm"),
    ("diff", "diff"),
    ("diff_v2", "diff_v2"),
  ],
)
def test_the_config_of_eight_heads_has_half_the_rate_at_twice_the_width(
  row, tuned_row
):
  """The scale of embeddings is 1 or the square root of the width."""
  variant = tuned.best(
    "fairness", tuned_row, metric="validation/loss", better="min"
  )
  tuned_config = fairness.get_config(variant)
  tuned_rate = tuned_config.optimizer.learning_rate
  tuned_width = tuned_config.model.embed_dim

  config = eight_heads.get_config(row)

  assert config.optimizer.learning_rate == tuned_rate / 2
  width = config.model.embed_dim
  assert width == 2 * tuned_width
  expected_scales = {1: 1, tuned_width**0.5: width**0.5}
  tuned_scale = tuned_config.model.embed_scale
  assert config.model.embed_scale == expected_scales[tuned_scale]


@pytest.mark.parametrize(
  "config_module, tuned_experiment, metric, better",
  [
    (fairness, "fairness", "validation/loss", "min"),
    (noisy_lookup, "noisy_lookup", "accuracy", "max"),
    (tokens, "fairness", "validation/loss", "min"),
    (eight_heads, "fairness", "validation/loss", "min"),
  ],
)
def test_a_comment_in_a_config_names_the_tuned_variant_of_each_row(
  config_module, tuned_experiment, metric, better
):
  """The comment says where the learning rate in the next line comes from."""
  source = pathlib.Path(config_module.__file__).read_text(encoding="utf-8")
  # fairness does not tune this row. It has the settings of another row.
  tuned_rows = {("fairness", "transformer_wide"): "transformer_norm"}

  for row in config_module.ROWS:
    tuned_row = tuned_rows.get((tuned_experiment, row), row)
    variant = tuned.best(tuned_experiment, tuned_row, metric, better)
    assert f'  # {variant}\n  "{row}": ' in source


@pytest.mark.parametrize("name", ["noisy_lookup", "fairness"])
def test_no_seed_is_both_tuned_on_and_reported(name):
  grids = grid.load(name).grids

  assert not set(grids["tune"].seeds) & set(grids["cpu"].seeds)


@pytest.mark.parametrize("name", ["noisy_lookup", "fairness"])
def test_every_reported_row_is_tuned(name):
  grids = grid.load(name).grids
  tuned_rows = {variant.split(",")[0] for variant in grids["tune"].variants}

  assert tuned_rows == set(grids["cpu"].variants)


def test_the_command_prints_the_best_variant_of_each_row(capsys):
  tuned.main("fairness", "validation/loss", "min")

  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(fairness.ROWS)
  # The committed results of tuning decide this.
  assert lines[0] == "transformer: transformer,scale=1,rate=0.003"
