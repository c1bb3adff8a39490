"""Profiles of a run's steps, for TensorBoard and Perfetto."""

from __future__ import annotations

import jax
from etils import epath

from diffjax.config import Config


def step_annotation(step: int) -> jax.profiler.StepTraceAnnotation:
  """Marks a step in profiles, by the number that the log has for it. Outside a profile it costs nothing."""
  return jax.profiler.StepTraceAnnotation("train", step_num=step)


class Profiler:
  """Traces the steps of the config's window into workdir/profile."""

  def __init__(self, config: Config, workdir: str):
    first, count = config.train.profile_step, config.train.profile_steps
    self._window = range(first, first + count) if first >= 0 else range(0)
    self._directory, self._running = str(epath.Path(workdir) / "profile"), False

  def __call__(self, step: int, ending: bool) -> None:
    """Starts or stops the trace. Call it between steps, with the number of steps done, and whether the run ends here."""
    wanted = step in self._window and not ending
    if wanted and not self._running:
      jax.profiler.start_trace(self._directory)
    elif self._running and not wanted:
      jax.profiler.stop_trace()
    self._running = wanted

  def close(self) -> None:
    """Ends a trace that an error has left open."""
    self(-1, True)
