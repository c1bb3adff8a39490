"""A training run: what it opens, and the operations that the loop calls.

A run that is refused must not change the workdir of an earlier run. Therefore
everything that may refuse a run comes before the first write, except for the
file `lock`:

  1. `Session.__init__` checks the config.
  2. `Session.__enter__` opens the data, locks the workdir and restores the
     state.
  3. When all processes have passed their checks, `Session.__enter__` opens the
     checkpoints, the log and the profiler, which write in the workdir.
"""

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
  BatchShare,
  TrainingBatches,
  ValidationBatches,
  check_vocabulary,
  training_batches,
  validation_batches,
)
from diffjax.data.reader import Interrupted
from diffjax.data.row import HostBatch
from diffjax.data.tokenizer import load_once
from diffjax.host import runtime
from diffjax.host.interruption import Interruption
from diffjax.host.lock import lock
from diffjax.host.progress import short_number
from diffjax.ops.diff_attention.choice import Choice, reported_to
from diffjax.parallel.mesh import batch_share, make_mesh, put_batch
from diffjax.parallel.processes import (
  Agreement,
  check_same,
  check_same_data,
  gather_objects,
)
from diffjax.training import cpu_time, manifest, memory, validation
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
from diffjax.training.result import TrainResult
from diffjax.training.resume import check_checkpoint, new_schedule, other_model
from diffjax.training.run_log import RunLog, note
from diffjax.training.step import Metrics, TrainState
from diffjax.training.workdir_tokenizer import (
  check_start_tokenizer,
  keep_tokenizer,
)


@dataclasses.dataclass(frozen=True)
class _Start:
  """Where a run starts.

  Attributes:
    state: the state of the newest complete checkpoint, or a new one.
    checkpoint: the checkpoint. None for a new run.
    lacks_scores: True if the checkpoint has no validation losses, because its
      step was not evaluated.
  """

  state: TrainState
  checkpoint: Checkpoint | None
  lacks_scores: bool


@dataclasses.dataclass
class _Resources:
  """The objects of a session that exist only inside its context.

  They are grouped, so that `__enter__` sets all of them at once or, if it
  raises, none.

  Attributes:
    training_batches: this process's share of the training data.
    validation_batches: this process's share of the validation data.
    checkpoints: writes the checkpoints.
    log: writes the metrics, and prints progress.
    profiler: writes the profile that the config asks for.
    interruption: tells whether this process has received a signal.
    stop_agreement: decides whether to stop, alike in all processes.
    initial_state: the state to start from. None once the loop has taken it.
  """

  training_batches: TrainingBatches
  validation_batches: ValidationBatches
  checkpoints: Checkpoints
  log: RunLog
  profiler: Profiler
  interruption: Interruption
  stop_agreement: Agreement
  initial_state: TrainState | None


class Session:
  """A run's data, program, checkpoints and logs, open inside the context.

  All processes of a run make the same calls in the same order.

  Attributes:
    program: the computations of the run.
    start_step: the number of steps done before the session. Its first step is
      start_step + 1.
    lacks_scores: True if the restored checkpoint has no validation losses.
  """

  # Set by `__enter__`.
  start_step: int
  lacks_scores: bool
  _resources: _Resources

  def __init__(self, config: Config, workdir: str):
    """Checks the config. Writes nothing in the workdir.

    For hf:// sources without config.data.files, this downloads a sample to a
    temporary file, to choose the number of files.

    Args:
      config: the run's config.
      workdir: the run's directory, local or gs://.

    Raises:
      UserError: if the config does not fit the devices, the tokenizer or the
        checkpoint in the workdir, or if all checkpoints there are damaged.
    """
    # All processes must have been started with the same arguments.
    check_same(
      {
        "config": config.to_dict(),
        "--workdir": workdir,
        "JAX's version": jax.__version__,
      }
    )

    # Check the config against the checkpoint. Only the file with its config is
    # verified here. `_restore` verifies all files, before it reads the state.
    check_path(workdir)
    checkpoint = find_checkpoint(workdir, json_only=True)
    if checkpoint is None:
      note(f"workdir {workdir}: a new run")
    else:
      note(f"workdir {workdir}: resuming from its newest checkpoint")
    # If the config leaves the data mode or the number of files open, they are
    # chosen here. The processes must have chosen the same.
    config = plan.resolve(config, jax.process_count(), note)
    check_same({"config": config.to_dict()})
    if checkpoint is not None:
      check_checkpoint(checkpoint, workdir, config)
    if jax.process_index() == 0:
      check_wandb(config.train.wandb_project)

    # Check the config against the tokenizer and the devices. The file of the
    # tokenizer may have changed since an earlier run of this process.
    mesh = make_mesh(config.mesh)
    load_once.cache_clear()
    tokenizer = load_once(config.data.tokenizer)
    check_vocabulary(config, tokenizer)

    self.program = build(config, mesh)
    self._config = config
    self._workdir = workdir
    self._tokenizer = tokenizer
    # This process reads share number `_share` of `_num_shares` of each batch.
    self._share, self._num_shares = batch_share(mesh)
    self._printed_choices: set[Choice] = set()
    # `__enter__` fills the stack, and `__exit__` closes it.
    self._stack = contextlib.ExitStack()
    self._check_implementation()
    warning = cpu_time.warning(config, mesh.devices.flat[0].platform)
    if warning is not None:
      note(warning)

  def _check_implementation(self) -> None:
    """Raises UserError if the config names an attention that cannot run here.

    Tracing the training step shows it. Without this check the first step would
    fail, after the workdir has changed.
    """
    name = self._config.model.attention_implementation
    if name == "auto":
      # An implementation that can run is chosen.
      return
    try:
      self.program.trace_train_step()
    except ValueError as error:
      raise UserError(
        f"config.model.attention_implementation = {name!r}: {error}"
      ) from error

  def __enter__(self) -> Session:
    """Opens everything, and restores or makes the state to start from.

    Raises:
      UserError: if the data cannot be opened, if another run uses the workdir,
        or if the run cannot continue from the checkpoint or start from the
        parameters of config.train.init_from. The workdir's files are then as
        they were.
    """
    config = self._config
    mesh = self.program.mesh
    # If anything here raises, `stack` closes what has been opened before.
    with contextlib.ExitStack() as stack:
      # This context lasts as long as the session, so it also explains errors of
      # steps and evaluations.
      stack.enter_context(memory.explain_out_of_memory(config, mesh.shape))
      # This part may refuse the run. In the workdir it writes only the lock.
      batches, validation_data = self._open_data(stack)
      workdir_lock = None
      if jax.process_index() == 0:
        workdir_lock = stack.enter_context(lock(self._workdir))
      start = self._restore(batches)
      start_step = int(start.state.step)

      # Wait until all processes have passed their checks. Everything below
      # writes in the workdir.
      gather_objects(None)
      checkpoints = Checkpoints(
        self._workdir,
        keep=config.train.keep_checkpoints,
        restored=start.checkpoint,
        lock=workdir_lock,
      )
      # Entered after the lock, and therefore closed before its release.
      stack.enter_context(checkpoints)
      log = RunLog(
        config, self._workdir, mesh, checkpoints, start_step=start_step
      )
      stack.callback(log.close)
      profiler = Profiler(config, self._workdir)
      stack.callback(profiler.close)
      if jax.process_index() == 0:
        self._write_config()
      self._print_steps(start.state, start_step)

      # From here on, a signal ends the run after the current step.
      interruption = stack.enter_context(Interruption())
      if jax.process_count() == 1:
        # A signal also ends the wait for a batch. Not with several processes:
        # the others may be in the next step already, and wait for this one.
        batches.interrupted = interruption.is_stop_requested
      self._resources = _Resources(
        training_batches=batches,
        validation_batches=validation_data,
        checkpoints=checkpoints,
        log=log,
        profiler=profiler,
        interruption=interruption,
        stop_agreement=Agreement(mesh, interruption.is_stop_requested),
        initial_state=start.state,
      )
      self.start_step = start_step
      self.lacks_scores = start.lacks_scores
      # Nothing has failed, so everything stays open until `__exit__`.
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._stack.__exit__(*exception)

  def _open_data(
    self, stack: contextlib.ExitStack
  ) -> tuple[TrainingBatches, ValidationBatches]:
    """Returns this process's training and validation batches.

    In prepared mode, a single process first tokenizes and writes the rows that
    config.data.prepared_dir lacks. This may take hours.

    Args:
      stack: closes the training batches.
    """
    config = self._config
    share = BatchShare(self._share, self._num_shares)
    num_processes = jax.process_count()
    # An evaluation keeps no gradients, so a batch of this size fits if a
    # training step fits.
    validation_batch_size = config.train.batch_size // config.train.accumulation
    # Opening data uses decompressors that are freed only a minute later. If
    # their memory were kept, it would fragment the heap where the temporaries
    # of steps belong.
    with runtime.release_freed_memory():
      batches = training_batches(config, share, num_processes=num_processes)
      stack.callback(batches.close)
      validation_data = validation_batches(
        config, validation_batch_size, share, num_processes=num_processes
      )
    if num_processes > 1:
      identity = batches.data_identity() | validation_data.data_identity()
      check_same_data(identity)
    return batches, validation_data

  def _restore(self, batches: TrainingBatches) -> _Start:
    """Returns the state to start from, and moves the batches to its position.

    Args:
      batches: the training batches, which are at their beginning.
    """
    checkpoint = find_checkpoint(self._workdir)
    if checkpoint is None:
      return _Start(self._new_state(), None, lacks_scores=False)

    # This may be another checkpoint than in `__init__`: an older one, because
    # now all files are verified, or a newer one, which another run has written.
    check_checkpoint(checkpoint, self._workdir, self._config)
    state = checkpoint.state(self.program.abstract_state)
    batches.set_state(self._data_state_of_share(checkpoint.data_state))
    has_scores = manifest.BEST_SCORE in checkpoint.scores
    # Without them, the loop evaluates this step. All processes take part in an
    # evaluation, so they must agree, and process 0 decides.
    has_scores = gather_objects(has_scores)[0]
    note(f"resuming from step {checkpoint.step} of {self._workdir}")
    change = new_schedule(checkpoint.config, self._config, checkpoint.step)
    if change:
      note(change)
    return _Start(state, checkpoint, lacks_scores=not has_scores)

  def _data_state_of_share(self, data_state: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a checkpoint's data state for this process's share.

    If the checkpoint has fewer shares, the last one is used. The data pipeline
    raises an error if the number of shares matters.

    Args:
      data_state: {"shares": [one state of the batches for each share]}.
    """
    # Older checkpoints have one state for all shares.
    shares = data_state.get("shares", [data_state])
    index = min(self._share, len(shares) - 1)
    return shares[index]

  def _new_state(self) -> TrainState:
    """Returns the state of step 0.

    Its parameters come from the checkpoint `config.train.init_from`. If none is
    set, they are random.
    """
    source = self._config.train.init_from
    if not source:
      return self.program.init()
    checkpoint = open_checkpoint(source)
    source_config = from_config_dict(checkpoint.config)
    check_start_tokenizer(source, source_config, self._tokenizer)
    state = self.program.init()
    params = checkpoint.params(self.program.abstract_state.params)
    note(f"starting from the parameters of {source}")
    change = other_model(checkpoint.config, self._config)
    if change:
      note(change)
    return dataclasses.replace(state, params=params)

  def _write_config(self) -> None:
    """Writes the config and the tokenizer's files in the workdir.

    They are written at each start, because a resumed run may change some
    fields.
    """
    keep_tokenizer(self._workdir, self._tokenizer)
    config_path = epath.Path(self._workdir) / config_file.NAME
    config_file.write(config_path, self._config)

  def _print_steps(self, state: TrainState, start_step: int) -> None:
    """Prints the number of parameters and the steps that the run will take.

    Args:
      state: the state to start from.
      start_step: the number of steps done.
    """
    config = self._config
    num_steps = config.train.steps
    warmup_steps = config.optimizer.warmup_steps
    if warmup_steps > num_steps > 0:
      note(
        f"config.optimizer.warmup_steps = {warmup_steps} is cut to"
        f" config.train.steps = {num_steps}"
      )
    if start_step >= num_steps:
      return
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    tokens_per_step = config.train.batch_size * config.data.length
    note(
      f"training {short_number(num_parameters)} parameters: steps"
      f" {start_step + 1:,} to {num_steps:,} of {tokens_per_step:,} tokens;"
      " compiling …"
    )

  def take_initial_state(self) -> TrainState:
    """Returns the state to start from. May be called once.

    The first step donates the state's memory, so the session must not keep it.
    """
    state = self._resources.initial_state
    assert state is not None, "the state has been taken"
    self._resources.initial_state = None
    return state

  def should_stop(self) -> bool:
    """Returns True if the last vote was to stop, the same in all processes.

    A single process decides without a vote.
    """
    return self._resources.stop_agreement.decision()

  def start_vote_on_stopping(self) -> None:
    """Starts to collect the votes of all processes, without waiting for them.

    A process votes to stop if it has received a signal. The loop must call this
    before every step.
    """
    self._resources.stop_agreement.start_vote()

  def update_profile(self, step: int, is_last: bool) -> None:
    """Starts or stops the profile, if the config asks for it at this step.

    Args:
      step: the number of steps done.
      is_last: whether the run ends after this step.
    """
    self._resources.profiler.update(step, is_last)

  def next_batch(self) -> HostBatch:
    """Returns this process's share of the next batch, on the host.

    Moves the position in the data past the batch, unless it raises.

    Raises:
      Interrupted: if a signal arrives while waiting for the batch.
      UserError: as `TrainingBatches.__next__`.
    """
    start = time.perf_counter()
    batch = next(self._resources.training_batches)
    self._resources.log.add_wait(time.perf_counter() - start)
    return batch

  def train_step(
    self, state: TrainState, host_batch: HostBatch
  ) -> tuple[TrainState, Metrics]:
    """Takes a training step, and prints once which attention it uses.

    With "auto", the attention chooses an implementation while the step is
    traced, before the first step is compiled. Each different choice is printed.

    Args:
      state: the state before the step. It cannot be used again.
      host_batch: this process's share of the batch, from `next_batch`.
    """
    # If this fails, for example because memory is full, no checkpoint may be
    # saved: the batch has been read, so a resumed run would skip it. Therefore
    # this is not in `next_batch`, which the loop calls in `save_on_error`.
    batch = put_batch(host_batch, self.program.mesh)
    implementation = self._config.model.attention_implementation
    if implementation != "auto":
      field = "config.model.attention_implementation"
      self._print_choice(Choice(implementation, f"because {field} names it"))
    with reported_to(self._print_choice):
      return self.program.train_step(state, batch)

  def _print_choice(self, choice: Choice) -> None:
    """Prints a choice of attention, unless it has been printed before."""
    if choice not in self._printed_choices:
      self._printed_choices.add(choice)
      note(str(choice))

  def record_dispatched_step(self, step: int, metrics: Metrics) -> None:
    """Keeps a step's metrics, and logs the metrics of the previous step.

    Args:
      step: the number of the step that has just been dispatched.
      metrics: its metrics, which may not have been computed yet.

    Raises:
      UserError: as `flush_log`.
    """
    # From now on there is a step to save, so a signal no longer ends the
    # process at once.
    self._resources.interruption.started = True
    self._resources.log.record_dispatched_step(step, metrics)

  def flush_log(self) -> None:
    """Waits for the last step, and logs its metrics.

    Must be called before a save, so that the local log has every step that the
    checkpoint includes. On gs://, the log is uploaded at most once a minute and
    at the end. A killed run may lose the last entries there.

    Raises:
      UserError: if too many steps in a row have been skipped.
    """
    self._resources.log.flush()

  def evaluate(self, step: int, state: TrainState) -> dict[str, float]:
    """Measures and logs the validation losses.

    Args:
      step: the number of steps done.
      state: the state after them.

    Returns:
      The losses by the names under which they are logged, such as
      "validation/loss".
    """
    batches = self._resources.validation_batches
    losses = validation.measure_losses(
      self.program.eval_step,
      state.params,
      batches,
      mesh=self.program.mesh,
      tokenizer=self._tokenizer,
      ngram=self._config.eval.ngram,
    )
    prefix = manifest.SCORE_PREFIX
    scores = {prefix + name: value for name, value in losses.items()}
    self._resources.log.add_evaluation(step, scores, batches.rows)
    return scores

  def save(
    self, step: int, state: TrainState, scores: dict[str, float]
  ) -> None:
    """Starts to save a checkpoint.

    Does nothing if this step was the last one to be saved or restored.

    Args:
      step: the number of steps done.
      state: the state after them.
      scores: the validation losses of this step. Empty if not measured.
    """
    # Each process reads its share of the data at its own position. Processes
    # with the same share have the same position. All take part, even if nothing
    # will be saved.
    data_state = self._resources.training_batches.get_state()
    # All processes' pairs, as a dict from share to state.
    states = dict(gather_objects([self._share, data_state]))
    states_by_share = [states[share] for share in sorted(states)]
    has_started = self._resources.checkpoints.save(
      step,
      state,
      data_state={"shares": states_by_share},
      config=self._config.to_dict(),
      scores=scores,
    )
    if has_started:
      self._resources.log.add_save(step)

  @contextlib.contextmanager
  def save_on_error(
    self, step: int, state: TrainState, scores: dict[str, float]
  ) -> Iterator[None]:
    """Saves a checkpoint if the body raises, so that no step is lost.

    The body must not take a step, because a step donates the state. If it
    raises, it must not have read a batch: the checkpoint would skip that batch.

    Nothing is saved if the session has not taken a step. With several processes
    nothing is saved either: one process cannot save alone, and the others may
    be in the next step.

    Args:
      step: the number of steps done.
      state: the state after them.
      scores: the validation losses of this step. Empty if not measured.
    """
    try:
      yield
    except Exception as error:
      has_new_steps = step > self.start_step
      if has_new_steps and jax.process_count() == 1:
        if isinstance(error, Interrupted):
          # A signal has ended the wait for data. This is a normal end of the
          # run, so an error of the log or of the save is raised.
          self.flush_log()
          self.save(step, state, scores)
        else:
          note(f"saving step {step}, before the run ends with an error")
          with _note_error():
            self.flush_log()
          with _note_error():
            self.save(step, state, scores)
      raise

  def add_scores(self, step: int, scores: dict[str, float]) -> None:
    """Adds validation losses to the checkpoint that was restored.

    Args:
      step: the checkpoint's step.
      scores: the losses by the names under which they are logged.
    """
    self._resources.checkpoints.add_scores(step, scores)

  def end(self, step: int, state: TrainState) -> TrainResult:
    """Closes the data, waits for the last save and returns the result.

    If a signal has stopped the run early, prints how to continue.

    Args:
      step: the number of steps done.
      state: the state after them.
    """
    self._resources.training_batches.close()
    self._resources.checkpoints.wait()
    self._resources.log.end_status_line()
    result = TrainResult(
      config=self._config,
      workdir=self._workdir,
      mesh=self.program.mesh,
      model=self.program.model,
      params=state.params,
      tokenizer=self._tokenizer,
      step=step,
      check_lock=self._resources.checkpoints.check_lock,
    )
    if not result.is_finished:
      message = f"stopped at step {step} of {self._config.train.steps}"
      if step > self.start_step:
        message += ", saved"
      note(f"{message}; run the same command to continue")
    return result


@contextlib.contextmanager
def _note_error() -> Iterator[None]:
  """Prints a UserError of the body, so that it does not replace another."""
  try:
    yield
  except UserError as error:
    note(str(error))
