"""Profiles of a run's steps, for TensorBoard and Perfetto."""

from __future__ import annotations

import jax
from etils import epath

from diffjax.config import Config


def step_annotation(step: int) -> jax.profiler.StepTraceAnnotation:
  """Returns a context that marks a training step in a profile.

  If no profile is being recorded, it costs nothing.

  Args:
    step: the step's number in the log.
  """
  return jax.profiler.StepTraceAnnotation("train", step_num=step)


class Profiler:
  """Records a profile of some steps in workdir/profile.

  These are `config.train.profile_steps` steps after step
  `config.train.profile_step`. If that is negative, nothing is recorded.
  """

  def __init__(self, config: Config, workdir: str):
    """Prepares the profile. `update` starts it.

    Args:
      config: the run's config.
      workdir: the run's directory, local or gs://.
    """
    first_step = config.train.profile_step
    # The profile runs while the number of steps done is in this range.
    self._profiled_steps = range(0)
    if first_step >= 0:
      end_step = first_step + config.train.profile_steps
      self._profiled_steps = range(first_step, end_step)
    self._directory = str(epath.Path(workdir) / "profile")
    self._is_running = False

  def update(self, step: int, is_last: bool) -> None:
    """Starts or stops the profile. Must be called between steps.

    Args:
      step: the number of steps done.
      is_last: whether the run ends after this step.
    """
    should_run = step in self._profiled_steps and not is_last
    if should_run and not self._is_running:
      jax.profiler.start_trace(self._directory)
    elif self._is_running and not should_run:
      jax.profiler.stop_trace()
    self._is_running = should_run

  def close(self) -> None:
    """Stops the profile if it is running, for example after an error."""
    if self._is_running:
      jax.profiler.stop_trace()
      self._is_running = False
