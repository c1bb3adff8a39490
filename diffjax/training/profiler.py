"""Profiles of a run's steps, for TensorBoard and Perfetto."""

from __future__ import annotations

import jax
from etils import epath

from diffjax.config import Config


def step_annotation(step: int) -> jax.profiler.StepTraceAnnotation:
  """Returns a context that marks a step in profiles.

  Outside a profile it costs nothing.

  Args:
    step: the step's number in the log.
  """
  return jax.profiler.StepTraceAnnotation("train", step_num=step)


class Profiler:
  """Traces the steps that the config names into workdir/profile."""

  def __init__(self, config: Config, workdir: str):
    """Computes the traced steps. Nothing is traced if profile_step is negative.

    Args:
      config: the run's config.
      workdir: the run's directory, local or gs://.
    """
    first = config.train.profile_step
    num_steps = config.train.profile_steps
    self._traced_steps = range(0)
    if first >= 0:
      self._traced_steps = range(first, first + num_steps)
    self._directory = str(epath.Path(workdir) / "profile")
    self._is_running = False

  def update(self, step: int, is_last: bool) -> None:
    """Starts or stops the trace. Must be called between steps.

    Args:
      step: the number of steps done.
      is_last: whether the run ends after this step.
    """
    should_run = step in self._traced_steps and not is_last
    if should_run and not self._is_running:
      jax.profiler.start_trace(self._directory)
    elif self._is_running and not should_run:
      jax.profiler.stop_trace()
    self._is_running = should_run

  def close(self) -> None:
    """Stops a trace that an error has left running."""
    if self._is_running:
      jax.profiler.stop_trace()
      self._is_running = False
