"""THE loop. It reads top to bottom, and its order is a contract: restore → (evaluate → save → step → log)*."""

from __future__ import annotations

from diffjax.config import Config
from diffjax.data.reader import Interrupted
from diffjax.training.profiler import step_annotation
from diffjax.training.session import Session


def train(config: Config, workdir: str) -> None:
  """Trains to `config.train.steps`, from the newest checkpoint in `workdir` if there is one.

  SIGTERM, Ctrl-C and SIGHUP end it after the step or evaluation in hand, or while it waits for data, with a checkpoint; a second one at
  once. Before the first step there is nothing to save, and the first one ends the command at once.
  Several processes make the same calls in the same order; a signal to one of them ends all after the same step.

  Args:
    config: the run's config, checked.
    workdir: directory of checkpoints, metrics, plot and sample; local or gs://.

  Raises:
    UserError: for whatever the user can fix: a config that does not fit the devices, the data or the checkpoint; or
      `train.max_skipped_in_a_row` steps in a row whose loss or gradient was not finite or spiked.
  """
  steps, eval_interval, checkpoint_interval = (
    config.train.steps,
    config.eval.interval,
    config.train.checkpoint_interval,
  )
  with Session(config, workdir) as session:
    # Restore.
    state = session.restore()
    step = first = int(state.step)
    with session.stoppable() as stopping:
      while True:
        done = step >= steps
        ending = done or stopping()
        fresh = step > first  # A restored step has been saved.
        due = eval_interval > 0 and (done or step % eval_interval == 0)
        evaluating = due and (fresh or session.lacks_scores)
        saving = fresh and (ending or step % checkpoint_interval == 0)
        session.profile(step, ending)
        if evaluating or saving:
          session.log_last()

        # Evaluate.
        with session.saving(step, state, {}):
          scores = session.evaluate(step, state) if evaluating else {}

        # Save.
        if saving:
          session.save(step, state, scores)
        elif evaluating and not fresh:
          session.add_scores(step, scores)
        if ending:
          break

        # Step.
        try:
          with session.saving(step, state, scores):
            batch = session.next_batch()
        except Interrupted:  # no batch has come yet, and the run shall stop
          break
        with step_annotation(step + 1):
          state, measured = session.train_step(state, batch)
        step += 1

        # Log: the metrics of the step before, so that the device has its next step already.
        session.log(step, measured)
    session.end(step, state)
