"""Finished training runs are recognised, and their final metrics are read."""

import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.training.checkpoint import Checkpoints
from experiments import grid, training_log
from experiments.grid import Grid

# The metrics.jsonl of a run of two steps. Its last line is incomplete.
LOG = """\
{"step": 1, "train/loss": 3.0}
{"step": 2, "train/loss": 2.0}
{"step": 2, "validation/loss": 1.5}
{"step": 2, "val"""


@pytest.fixture
def run():
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


def test_a_finished_run_has_the_last_value_of_each_metric(run, tmp_path):
  save_checkpoint(tmp_path, run.config, step=2)
  (tmp_path / "metrics.jsonl").write_text(LOG)

  metrics = training_log.final_metrics(tmp_path, run.config, location_fields=())

  assert metrics == {"step": 2, "train/loss": 2.0, "validation/loss": 1.5}


def has_finished(workdir, run):
  """Returns whether a workdir has the final metrics of a run."""
  metrics = training_log.final_metrics(workdir, run.config, location_fields=())
  return metrics is not None


def test_a_run_without_a_workdir_has_not_finished(run, tmp_path):
  assert not has_finished(tmp_path / "missing", run)


def test_a_run_without_a_checkpoint_has_not_finished(run, tmp_path):
  (tmp_path / "metrics.jsonl").write_text(LOG)

  assert not has_finished(tmp_path, run)


def test_a_run_without_a_log_has_not_finished(run, tmp_path):
  save_checkpoint(tmp_path, run.config, step=2)

  assert not has_finished(tmp_path, run)


def test_a_run_with_only_an_earlier_checkpoint_has_not_finished(run, tmp_path):
  """The run has two steps."""
  save_checkpoint(tmp_path, run.config, step=1)
  (tmp_path / "metrics.jsonl").write_text(LOG)

  assert not has_finished(tmp_path, run)


def test_a_run_with_only_an_earlier_validation_has_not_finished(run, tmp_path):
  """The run has two steps."""
  save_checkpoint(tmp_path, run.config, step=2)
  (tmp_path / "metrics.jsonl").write_text(
    '{"step": 1, "validation/loss": 1.5}\n{"step": 2, "train/loss": 2.0}\n'
  )

  assert not has_finished(tmp_path, run)


def test_a_run_with_a_damaged_checkpoint_has_not_finished(run, tmp_path):
  save_checkpoint(tmp_path, run.config, step=2)
  (tmp_path / "metrics.jsonl").write_text(LOG)
  (tmp_path / "checkpoints/2/manifest.json").unlink()

  assert not has_finished(tmp_path, run)


@pytest.mark.parametrize("step", [1, 2], ids=["unfinished", "finished"])
@pytest.mark.parametrize(
  "field, value, message",
  [
    pytest.param(
      "optimizer.learning_rate",
      0.01,
      "optimizer.learning_rate is 0.003 there and 0.01 now; choose",
      id="learning_rate",
    ),
    pytest.param(
      "train.steps", 3, "train.steps is 2 there and 3 now", id="steps"
    ),
  ],
)
def test_a_run_of_another_config_is_refused(
  run, tmp_path, step, field, value, message
):
  """Such a run must not be continued, and its metrics must not be used."""
  save_checkpoint(tmp_path, run.config, step)
  (tmp_path / "metrics.jsonl").write_text(LOG)
  changed = grid.with_fields(run, {field: value})

  with pytest.raises(
    UserError, match=f"holds a run of another config: {message}"
  ):
    training_log.final_metrics(tmp_path, changed.config, location_fields=())


@pytest.mark.parametrize(
  "field, value",
  [
    pytest.param("data.source", "text:x", id="location_of_data"),
    pytest.param("train.init_from", "elsewhere", id="location_of_start"),
    pytest.param("mesh.fsdp", 1, id="mesh"),
    pytest.param("data.num_workers", 3, id="workers"),
  ],
)
def test_fields_that_do_not_affect_results_may_differ(
  run, tmp_path, field, value
):
  """Location fields only say where data is."""
  save_checkpoint(tmp_path, run.config, step=2)
  (tmp_path / "metrics.jsonl").write_text(LOG)
  changed = grid.with_fields(run, {field: value})

  metrics = training_log.final_metrics(
    tmp_path, changed.config, location_fields=("data.source",)
  )

  assert metrics is not None
