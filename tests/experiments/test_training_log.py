"""Finished training runs are recognised, and their final metrics are read."""

import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.training.checkpoint import Checkpoints
from experiments import grid, training_log
from experiments.grid import Grid

# The metrics.jsonl of a run of two steps. Its last line is incomplete.
LOG_OF_TWO_STEPS = """\
{"step": 1, "train/loss": 3.0}
{"step": 2, "train/loss": 2.0}
{"step": 2, "validation/loss": 1.5}
{"step": 2, "val"""


@pytest.fixture
def run_of_two_steps():
  """A run of two steps."""
  (run,) = grid.expand(
    "ablations", Grid(variants=("diff",), baseline="diff"), {}
  )
  fields = {"train.steps": 2, "optimizer.warmup_steps": 1}
  return grid.with_fields(run, fields)


def save_checkpoint(workdir, config, step):
  """Saves a checkpoint of a single parameter."""
  with Checkpoints(str(workdir), keep=9) as checkpoints:
    checkpoints.save(
      step,
      {"params": np.zeros(1)},
      data_state={"shares": [{}]},
      config=config.to_dict(),
    )
    checkpoints.wait()


def test_a_finished_run_has_the_last_value_of_each_metric(
  run_of_two_steps, tmp_path
):
  save_checkpoint(tmp_path, run_of_two_steps.config, step=2)
  (tmp_path / "metrics.jsonl").write_text(LOG_OF_TWO_STEPS)

  metrics = training_log.final_metrics(
    tmp_path, run_of_two_steps.config, location_fields=()
  )

  assert metrics == {"step": 2, "train/loss": 2.0, "validation/loss": 1.5}


def has_finished(workdir, run):
  """Returns whether a workdir has the final metrics of a run."""
  metrics = training_log.final_metrics(workdir, run.config, location_fields=())
  return metrics is not None


def test_a_run_without_a_workdir_has_not_finished(run_of_two_steps, tmp_path):
  assert not has_finished(tmp_path / "missing", run_of_two_steps)


def test_a_run_without_a_checkpoint_has_not_finished(
  run_of_two_steps, tmp_path
):
  (tmp_path / "metrics.jsonl").write_text(LOG_OF_TWO_STEPS)

  assert not has_finished(tmp_path, run_of_two_steps)


def test_a_run_without_a_log_has_not_finished(run_of_two_steps, tmp_path):
  save_checkpoint(tmp_path, run_of_two_steps.config, step=2)

  assert not has_finished(tmp_path, run_of_two_steps)


def test_a_run_with_only_an_earlier_checkpoint_has_not_finished(
  run_of_two_steps, tmp_path
):
  save_checkpoint(tmp_path, run_of_two_steps.config, step=1)
  (tmp_path / "metrics.jsonl").write_text(LOG_OF_TWO_STEPS)

  assert not has_finished(tmp_path, run_of_two_steps)


def test_a_run_with_only_an_earlier_validation_has_not_finished(
  run_of_two_steps, tmp_path
):
  save_checkpoint(tmp_path, run_of_two_steps.config, step=2)
  (tmp_path / "metrics.jsonl").write_text(
    '{"step": 1, "validation/loss": 1.5}\n{"step": 2, "train/loss": 2.0}\n'
  )

  assert not has_finished(tmp_path, run_of_two_steps)


def test_a_run_with_a_damaged_checkpoint_has_not_finished(
  run_of_two_steps, tmp_path
):
  save_checkpoint(tmp_path, run_of_two_steps.config, step=2)
  (tmp_path / "metrics.jsonl").write_text(LOG_OF_TWO_STEPS)
  (tmp_path / "checkpoints/2/manifest.json").unlink()

  assert not has_finished(tmp_path, run_of_two_steps)


@pytest.mark.parametrize("saved_step", [1, 2], ids=["unfinished", "finished"])
@pytest.mark.parametrize(
  "field, stored, changed",
  [
    pytest.param("optimizer.learning_rate", 0.003, 0.01, id="learning_rate"),
    pytest.param("train.steps", 2, 3, id="steps"),
  ],
)
def test_a_run_of_another_config_is_refused(
  run_of_two_steps, tmp_path, saved_step, field, stored, changed
):
  """Such a run must not be continued, and its metrics must not be used."""
  stored_run = grid.with_fields(run_of_two_steps, {field: stored})
  save_checkpoint(tmp_path, stored_run.config, saved_step)
  (tmp_path / "metrics.jsonl").write_text(LOG_OF_TWO_STEPS)
  changed_run = grid.with_fields(run_of_two_steps, {field: changed})

  message = (
    f"holds a run of another config: {field} is {stored} there and {changed}"
    " now; choose another"
  )
  with pytest.raises(UserError, match=message):
    training_log.final_metrics(tmp_path, changed_run.config, location_fields=())


@pytest.mark.parametrize(
  "field, value",
  [
    pytest.param("data.source", "text:x", id="path_of_the_data"),
    pytest.param("train.init_from", "elsewhere", id="path_of_a_checkpoint"),
    pytest.param("mesh.fsdp", 1, id="mesh"),
    pytest.param("data.num_workers", 3, id="workers"),
  ],
)
def test_fields_that_do_not_affect_results_may_differ(
  run_of_two_steps, tmp_path, field, value
):
  save_checkpoint(tmp_path, run_of_two_steps.config, step=2)
  log = '{"step": 2, "validation/loss": 1.5}\n'
  (tmp_path / "metrics.jsonl").write_text(log)
  changed_run = grid.with_fields(run_of_two_steps, {field: value})

  metrics = training_log.final_metrics(
    tmp_path, changed_run.config, location_fields=("data.source",)
  )

  assert metrics == {"step": 2, "validation/loss": 1.5}
