"""Everything that a run opens, in the order that its safety needs, and what the loop asks of it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from diffjax.cli import config_file
from diffjax.config import Config, UserError, from_config_dict
from diffjax.data import plan
from diffjax.data.pipeline import (
  check_prepared,
  check_vocabulary,
  training_batches,
  validation_batches,
)
from diffjax.data.reader import Interrupted
from diffjax.data.tokenizer import load_once, load_tokenizer
from diffjax.host import runtime
from diffjax.host.interruption import Interruption
from diffjax.host.lock import LostWorkdir, WorkdirLock, lock
from diffjax.host.progress import short_number
from diffjax.inference.finish import finish
from diffjax.ops.diff_attention.choice import Choice, reported_to
from diffjax.parallel.mesh import batch_share, make_mesh, put_batch
from diffjax.parallel.processes import (
  Agreement,
  check_same,
  check_same_data,
  gather_objects,
)
from diffjax.training import cpu_time, manifest, memory, trigram, validation
from diffjax.training.checkpoint import (
  Checkpoint,
  Checkpoints,
  check_path,
  find_checkpoint,
  open_checkpoint,
)
from diffjax.training.metrics import check_wandb
from diffjax.training.profiler import Profiler
from diffjax.training.program import build
from diffjax.training.resume import check_checkpoint, new_schedule, other_model
from diffjax.training.run_log import RunLog, note
from diffjax.training.step import Batch, Metrics, TrainState
from diffjax.training.workdir_tokenizer import (
  check_start_tokenizer,
  keep_tokenizer,
)


class Session:
  """A run's data, program, checkpoints and logs, open for as long as the context. Several processes make the same calls in the same order.

  Attributes:
    program: what the run computes.
    lacks_scores: Whether the restored checkpoint has no validation losses.
  """

  def __init__(self, config: Config, workdir: str):
    """Refuses what it can before anything is opened or written.

    Args:
      config: the run's config.
      workdir: the run's directory, local or gs://.

    Raises:
      UserError: if the config does not fit the devices, the tokenizer or the
        checkpoint in the workdir, or if all checkpoints there are damaged.
    """
    check_same(
      {
        "config": config.to_dict(),
        "--workdir": workdir,
        "JAX's version": jax.__version__,
      }
    )
    check_path(workdir)
    checkpoint = find_checkpoint(workdir, config_only=True)
    if checkpoint is None:
      note(f"workdir {workdir}: a new run")
    else:
      note(f"workdir {workdir}: resuming from its newest checkpoint")
    config = plan.resolve(config, jax.process_count(), note)
    check_same({"config": config.to_dict()})
    if checkpoint is not None:
      check_checkpoint(checkpoint, workdir, config)
    if jax.process_index() == 0:
      check_wandb(config.train.wandb_project)
    self._config, self._workdir = config, workdir
    mesh = make_mesh(config.mesh)
    self._share, self._shares = batch_share(mesh)
    # Its file may have changed since an earlier run of this process.
    load_once.cache_clear()
    self._tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(config, self._tokenizer)
    self.program = build(config, mesh)
    self._check_implementation()
    self.lacks_scores = False
    self._printed_choices: set[Choice] = set()
    warning = cpu_time.warning(config, mesh.devices.flat[0].platform)
    if warning is not None:
      note(warning)
    self._held = contextlib.ExitStack()
    # Held by process 0 inside the context.
    self._lock: WorkdirLock | None = None
    self._waited = 0.0

  def _check_implementation(self) -> None:
    """Raises UserError if the config names an attention that cannot run here.

    Otherwise the first step would raise it, after the workdir has changed.
    """
    name = self._config.model.attention_implementation
    if name == "auto":
      return
    try:
      self.program.trace_train_step()
    except ValueError as error:
      raise UserError(
        f"config.model.attention_implementation = {name!r}: {error}"
      ) from error

  def __enter__(self) -> Session:
    """Opens the data and locks the workdir. Changes no other file there."""
    with contextlib.ExitStack() as held:
      held.enter_context(
        memory.explained(self._config, self.program.mesh.shape)
      )
      self._open_data(held)
      if jax.process_index() == 0:
        self._lock = held.enter_context(lock(self._workdir))
      self._held = held.pop_all()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._held.__exit__(*exception)

  def _open_data(self, held: contextlib.ExitStack) -> None:
    config, share = (
      self._config,
      dict(process_index=self._share, process_count=self._shares),
    )
    if jax.process_count() > 1 and config.data.mode == "prepared":
      check_prepared(config.data)  # also if all of them feed the same rows
    with runtime.release_freed_memory():  # or decompressors, freed a minute later, would leave a hole where temporaries lie
      self._batches = training_batches(config, **share)
      held.callback(self._batches.close)
      self._validation_batches = validation_batches(
        config, config.train.batch_size // config.train.accumulation, **share
      )
    if jax.process_count() > 1:
      check_same_data(
        self._batches.data_identity() | self._validation_batches.data_identity()
      )

  def restore(self) -> TrainState:
    """Returns the state to start from, and opens the workdir for writing.

    The state is that of the newest complete checkpoint, or a new one. The
    workdir changes only after everything that refuses a run: a refused run
    leaves the files of an earlier one as they were.

    Raises:
      UserError: if the run cannot go on from the checkpoint, or start from the
        parameters of config.train.init_from.
    """
    restored = find_checkpoint(self._workdir)
    if restored is not None:
      state = self._restored_state(restored)
    else:
      state = self._new_state()
    self._first = int(state.step)
    # Process 0 must not write before the others have passed their checks.
    gather_objects(None)
    self._open_workdir(restored)
    self._describe_steps(state)
    return state

  def _restored_state(self, checkpoint: Checkpoint) -> TrainState:
    """Returns a checkpoint's state, and sets the data to its place."""
    # Another run may have written it after the check in the constructor.
    check_checkpoint(checkpoint, self._workdir, self._config)
    state = checkpoint.state(self.program.abstract_state)
    self._batches.set_state(self._own(checkpoint.data_state))
    is_scored = manifest.BEST_METRIC in checkpoint.metrics
    # The same in all processes, since all take part in an evaluation.
    self.lacks_scores = not gather_objects(is_scored)[0]
    note(f"resuming from step {checkpoint.step} of {self._workdir}")
    change = new_schedule(checkpoint.config, self._config, checkpoint.step)
    if change:
      note(change)
    return state

  def _new_state(self) -> TrainState:
    """Returns the state of step 0, with the parameters of init_from if set."""
    source = self._config.train.init_from
    if not source:
      return self.program.init()
    start = open_checkpoint(source)
    check_start_tokenizer(
      source, from_config_dict(start.config), self._tokenizer
    )
    state = self.program.init()
    params = start.params(self.program.abstract_state.params)
    note(f"starting from the parameters of {source}")
    change = other_model(start.config, self._config)
    if change:
      note(change)
    return dataclasses.replace(state, params=params)

  def _open_workdir(self, restored: Checkpoint | None) -> None:
    """Opens checkpoints and log, and writes the tokenizer and the config.

    The log drops its lines of steps after the restored one.

    Args:
      restored: The checkpoint that the run goes on from, if there is one.
    """
    config = self._config
    checkpoints = Checkpoints(
      self._workdir,
      keep=config.train.keep_checkpoints,
      restored=restored,
      lock=self._lock,
    )
    # Closed before the lock is released, however the run ends.
    self._checkpoints = self._held.enter_context(checkpoints)
    self._log = RunLog(
      config,
      self._workdir,
      self.program.mesh,
      self._checkpoints,
      first_step=self._first,
    )
    self._held.callback(self._log.close)
    self._profiler = Profiler(config, self._workdir)
    self._held.callback(self._profiler.close)
    if jax.process_index() == 0:
      keep_tokenizer(self._workdir, self._tokenizer)
      # At each start, since some fields may change.
      config_file.write(epath.Path(self._workdir) / config_file.NAME, config)

  def _describe_steps(self, state: TrainState) -> None:
    """Prints which steps the run takes."""
    config = self._config
    steps = config.train.steps
    warmup = config.optimizer.warmup_steps
    if warmup > steps > 0:
      note(
        f"config.optimizer.warmup_steps = {warmup} is cut to"
        f" config.train.steps = {steps}"
      )
    if self._first < steps:
      num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
      tokens_per_step = config.train.batch_size * config.data.length
      note(
        f"training {short_number(num_parameters)} parameters: steps {self._first + 1:,}"
        f" to {steps:,} of {tokens_per_step:,} tokens; compiling …"
      )

  def _own(self, data_state: dict[str, Any]) -> dict[str, Any]:
    """The state of the data for this process's share of the batch. Of a checkpoint with fewer shares it takes any: where shares matter, the
    data refuse it."""
    shares = data_state.get(
      "shares", [data_state]
    )  # an older checkpoint has one for all
    return shares[min(self._share, len(shares) - 1)]

  @contextlib.contextmanager
  def stoppable(self) -> Iterator[Agreement]:
    """The steps of the run, which a signal ends. At the end of the context the data are closed, and the last save is complete.

    Yields:
      Called, it says whether to stop, the same in every process.
    """
    with Interruption() as interrupted:
      self._interrupted, self._stopping = (
        interrupted,
        Agreement(self.program.mesh, interrupted),
      )
      if (
        jax.process_count() == 1
      ):  # one of several alone cannot call off a wait: the others may be in the next step, waiting for it
        self._batches.interrupted = interrupted
      yield self._stopping
      self._batches.close()
      self._checkpoints.wait()
    self._log.end_line()

  def profile(self, step: int, ending: bool) -> None:
    """Starts or stops the profile that the config asks for."""
    self._profiler(step, ending)

  def next_batch(self) -> Batch:
    """The next global batch, on the devices.

    Raises:
      Interrupted: if a signal comes while it is waited for.
      UserError: as `TrainingBatches.__next__`.
    """
    asked = time.perf_counter()
    batch = put_batch(next(self._batches), self.program.mesh)
    self._waited = time.perf_counter() - asked
    self._log.batch_ready(self._waited)
    self._stopping.start_vote()
    return batch

  def train_step(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """Takes a step of the program, and prints which attention it uses.

    The attention reports its choice while the step is traced. So there is one
    line, before the first step is compiled, unless layers differ.
    """
    implementation = self._config.model.attention_implementation
    if implementation != "auto":
      field = "config.model.attention_implementation"
      self._print_choice(Choice(implementation, f"because {field} names it"))
    with reported_to(self._print_choice):
      return self.program.train_step(state, batch)

  def _print_choice(self, choice: Choice) -> None:
    if choice not in self._printed_choices:
      self._printed_choices.add(choice)
      note(str(choice))

  @contextlib.contextmanager
  def saving(
    self, step: int, state: TrainState, scores: dict[str, float]
  ) -> Iterator[None]:
    """Saves if what is done inside fails or is interrupted, so that no step is lost: between two steps the state is whole.

    One of several processes cannot save alone, and the others may be in the next step already.
    """
    try:
      yield
    except Exception as error:  # whatever it is, it goes on its way
      if step > self._first and jax.process_count() == 1:
        if not isinstance(error, Interrupted):
          note(f"saving step {step}, before the run ends with an error")
        self.log_last()
        try:
          self.save(step, state, scores)
        except LostWorkdir as lost:
          note(str(lost))
      raise

  def log(self, step: int, measured: Metrics) -> None:
    """Takes the metrics of the step that was just dispatched, and logs those of the step before.

    Raises:
      UserError: as `log_last`.
    """
    self._interrupted.started = True
    self._log.stepped(step, measured, self._waited)

  def log_last(self) -> None:
    """Logs the metrics of the last step. It comes before a save, so that no line of a step that a checkpoint holds can be lost.

    Raises:
      UserError: if too many steps in a row have been skipped.
    """
    self._log.flush()

  def evaluate(self, step: int, state: TrainState) -> dict[str, float]:
    """Measures the validation losses, and logs them.

    Returns:
      The losses by the names that they are logged under.
    """
    config = self._config
    losses = validation.losses(
      self.program.eval_step,
      state.params,
      self._validation_batches,
      tokenizer=self._tokenizer,
      ngram=config.eval.ngram,
    )
    scores = {f"validation/{name}": value for name, value in losses}
    has_baseline = (
      config.data.mode == "prepared"
      and config.data.tokenizer == "bytes"
      and jax.process_count() == 1
    )
    if (
      has_baseline
      and step >= config.train.steps
      and "validation/bits_per_byte" in scores
    ):
      scores["validation/trigram_bits_per_byte"] = trigram.baseline(
        config, self._validation_batches, self._tokenizer.token_bytes()
      )
    self._log.evaluated(step, scores, self._validation_batches.rows)
    return scores

  def save(
    self, step: int, state: TrainState, scores: dict[str, float]
  ) -> None:
    """Starts to save a checkpoint, unless the step was saved or restored last."""
    places = dict(
      gather_objects([self._share, self._batches.get_state()])
    )  # in a stream every process has a place of its own
    data_state = {"shares": [places[share] for share in sorted(places)]}
    self._checkpoints.save(
      step,
      state,
      data_state=data_state,
      config=self._config.to_dict(),
      metrics=scores,
    )
    self._log.saved(step)

  def add_scores(self, step: int, scores: dict[str, float]) -> None:
    """Adds validation losses to the checkpoint that was restored."""
    self._checkpoints.add_metrics(step, scores)

  def end(self, step: int, state: TrainState) -> None:
    """Prints that the run has stopped, or writes the plot and the sample."""
    if step < self._config.train.steps:
      saved = ", saved" * (step > self._first)
      note(
        f"stopped at step {step} of {self._config.train.steps}{saved}; run the same command to go on"
      )
    else:
      finish(
        self._config,
        self._workdir,
        self.program.model,
        state.params,
        self._tokenizer,
        self._checkpoints.check_lock,
      )
      # Files that were just written may be gone.
      self._checkpoints.check_lock()
