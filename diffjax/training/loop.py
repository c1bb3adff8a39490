"""The training loop: restore → (evaluate → save → step → log)*.

A resumed run enters the loop with the step that was saved last. From there on
it takes the same steps as a run that was never stopped.
"""

from __future__ import annotations

from diffjax.config import Config
from diffjax.data.reader import Interrupted
from diffjax.training.profiler import step_annotation
from diffjax.training.result import TrainResult
from diffjax.training.session import Session


def train(config: Config, workdir: str) -> TrainResult:
  """Trains to `config.train.steps`.

  Starts from the newest checkpoint in `workdir`, if there is one.

  SIGTERM, Ctrl-C and SIGHUP end the run after the current step or evaluation,
  or while it waits for data, with a checkpoint. A second signal ends the
  process at once. Before the first step there is nothing to save, and the first
  signal ends the command at once.

  Several processes make the same calls in the same order. A signal to one of
  them ends all of them after the same step.

  Args:
    config: the run's config, which has been checked.
    workdir: directory of checkpoints and metrics, local or gs://.

  Returns:
    The trained parameters. `inference.finish.finish` writes the plot and the
    sample of a finished run.

  Raises:
    UserError: if the user can fix the problem. Examples are a config that does
      not fit the devices, the data or the checkpoint, and too many skipped
      steps in a row (`config.train.max_skipped_in_a_row`).
  """
  with Session(config, workdir) as session:
    # Restore.
    state = session.take_initial_state()
    step = session.start_step
    while True:
      # Decide what to do after `step` steps.
      is_last = step >= config.train.steps or session.should_stop()
      should_evaluate = _should_evaluate(config, session, step)
      should_save = _should_save(config, session, step, is_last)
      session.update_profile(step, is_last)
      if should_evaluate or should_save:
        session.flush_log()

      # Evaluate.
      scores: dict[str, float] = {}
      if should_evaluate:
        with session.save_on_error(step, state, scores):
          scores = session.evaluate(step, state)

      # Save.
      if should_save:
        session.save(step, state, scores)
      elif should_evaluate and step == session.start_step:
        # The restored checkpoint has no losses.
        session.add_scores(step, scores)
      if is_last:
        break

      # Step.
      try:
        with session.save_on_error(step, state, scores):
          host_batch = session.next_batch()
      except Interrupted:
        # A signal arrived before the batch. `save_on_error` has saved the steps
        # of this session. Only a single process is interrupted here.
        break
      session.start_vote_on_stopping()
      with step_annotation(step + 1):
        state, metrics = session.train_step(state, host_batch)
      step += 1

      # This logs the metrics of the previous step. The device already has this
      # step, so it never waits for the host.
      session.record_dispatched_step(step, metrics)
    return session.end(step, state)


def _should_evaluate(config: Config, session: Session, step: int) -> bool:
  """Returns True if the loop must measure the validation losses after a step.

  That is every `eval.interval` steps, and after the last step. A restored step
  has been evaluated, unless its checkpoint has no losses.
  """
  interval = config.eval.interval
  if interval == 0:
    return False
  if step == session.start_step and not session.lacks_scores:
    return False
  return step >= config.train.steps or step % interval == 0


def _should_save(
  config: Config, session: Session, step: int, is_last: bool
) -> bool:
  """Returns True if the loop must save a checkpoint after a step.

  That is every `train.checkpoint_interval` steps, and before the run ends or is
  stopped. The step that the session starts from is not saved again.
  """
  if step == session.start_step:
    return False
  return is_last or step % config.train.checkpoint_interval == 0
