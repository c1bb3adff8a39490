"""The runs of sub-tiles of a TPU kernel, which have an estimate each.

The compiler has no estimate of a kernel whose mask is data, as segment ids are,
because the instructions that run are known only at run time. A kernel consists
of runs: sub-tiles that it computes under one condition. There is a run for a
whole tile, one for a tile that positions cut, and, where documents meet, runs
for a strip of a tile and for a single sub-tile.

`single_run` builds a kernel with only one of these runs and without its
condition. Its estimate is complete: only the ids that documents are compared by
are data. `count_runs` evaluates the kernel's conditions for the documents of a
row. It returns how often each run is taken.

Nothing here lists the runs. Both functions find them by replacing functions
that the schedule of the kernel calls.

A run is named after its sub-tiles: "-" for a sub-tile without a mask, "p" if
positions are compared, and "d" if documents are compared as well.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Int

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tpu import schedule as schedule_module
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks
from diffjax.ops.diff_attention.tpu.schedule import (
  Schedule,
  SegmentComparison,
  SubtileMask,
  make_scalars,
  make_schedule,
)


def segment_ids(documents: Sequence[int]) -> Int[np.ndarray, "1 T"]:
  """Returns the segment ids of a row.

  Example:
    segment_ids((3, 1)) → [[0, 0, 0, 1]]

  Args:
    documents: The lengths of the row's documents.
  """
  ids = np.arange(len(documents), dtype=np.int32)
  return np.repeat(ids, documents)[None]


def causal_schedule(
  blocks: Blocks,
  length: int,
  G: int,
  M: int,
  *,
  keys_move: bool,
  segments: bool,
) -> Schedule:
  """Returns the schedule of a kernel for a causal row.

  Args:
    blocks: The sizes of tiles and sub-tiles.
    length: T.
    G: Maps of a query head.
    M: Maps of a key head.
    keys_move: True for the forward kernel, False for the backward one.
    segments: Whether the row has segment ids.
  """
  # Only the numbers of rows and maps matter.
  q = jax.ShapeDtypeStruct((1, length, 1, G, 1), np.float32)
  k = jax.ShapeDtypeStruct((1, length, 1, M, 1), np.float32)
  mask = Mask(length, length, segments=segments)
  return make_schedule(mask, blocks, q, k, keys_move=keys_move)


class _RunCounter:
  """Counts the runs of a schedule that is executed with Python integers."""

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    # The names of the runs that are being executed, the innermost one last.
    self._open_runs: list[str] = []

  def when(self, condition: Any) -> Callable[[Callable[[], None]], None]:
    """Replaces `pl.when`: calls the function at once, and counts its run."""

    def call_if_true(function: Callable[[], None]) -> None:
      if not condition:
        return
      self._open_runs.append("")
      function()
      self.counts[self._open_runs.pop()] += 1

    return call_if_true

  def compute_subtile(
    self, rows: Any, keys: Any, mask: SubtileMask | None
  ) -> None:
    """Adds a sub-tile to the innermost run."""
    del rows, keys
    self._open_runs[-1] += _letter(mask)


def count_runs(
  schedule: Schedule, ids: Int[np.ndarray, "1 T"] | None
) -> dict[str, int]:
  """Returns how often a kernel takes each of its runs for a row.

  Executes the kernel's schedule in Python, with integers instead of arrays.

  Args:
    schedule: The schedule of the kernel.
    ids: The row's segment ids. None without segments.

  Returns:
    Numbers by the names of the runs.
  """
  counter = _RunCounter()
  arrays = make_scalars(schedule, q_ids=ids, kv_ids=ids, offset=None, batch=1)
  scalars = jax.tree.map(lambda array: array.tolist(), arrays)
  num_stationary = schedule.num_kv_blocks
  if schedule.keys_move:
    num_stationary = schedule.num_q_blocks
  with (
    _replaced_functions(
      when=counter.when,
      fori_loop=_python_loop,
      div=_integer_division,
      broadcasted_iota=_no_indices,
    ),
    mock.patch.object(schedule_module, "jnp", np),
  ):
    steps = itertools.product(range(num_stationary), range(schedule.steps))
    for stationary, step in steps:
      _run_step(schedule, scalars, stationary, step, counter)

  # Conditions around other conditions have no sub-tiles of their own.
  del counter.counts[""]
  return dict(counter.counts)


def _run_step(
  schedule: Schedule,
  scalars: Any,
  stationary: int,
  step: int,
  counter: _RunCounter,
) -> None:
  """Executes a step of the grid with Python integers.

  Args:
    schedule: The schedule of the kernel.
    scalars: What the kernel prefetches, as lists.
    stationary: The index of the block that stays: of queries if keys move.
    step: The step of the grid.
    counter: Counts the runs.
  """

  def run_tile(block: int, index: int) -> None:
    del index
    if schedule.keys_move:
      i, j = stationary, block
    else:
      i, j = block, stationary
    schedule.for_each_subtile(scalars, 0, i, j, counter.compute_subtile)

  schedule.for_each_moving_block(scalars, 0, stationary, step, run_tile)


def _python_loop(start: int, stop: int, function: Callable, init: Any) -> None:
  """Replaces `lax.fori_loop`."""
  for index in range(start, stop):
    function(index, init)


def _integer_division(a: int, b: int) -> int:
  """Replaces `lax.div`."""
  return a // b


def _no_indices(*arguments: Any) -> int:
  """Replaces `lax.broadcasted_iota`, whose result is not needed."""
  del arguments
  return 0


class _RunSelector:
  """Selects one run of a kernel while the kernel is traced.

  Each function under a condition is first called only to record its sub-tiles.
  It is called again, and becomes part of the kernel, if it is the run that is
  looked for, or if it has no sub-tiles of its own but may contain that run.
  """

  def __init__(self, run: str):
    self._run = run
    # The sub-tiles that were recorded. None while the kernel is built.
    self._recorded: str | None = None
    # The index of the loop in which the run is repeated.
    self._turn: Any = None
    self._is_built = False

  def when(self, condition: Any) -> Callable[[Callable[[], None]], None]:
    """Replaces `pl.when`: the condition is ignored."""
    del condition
    return self._build_if_selected

  def _build_if_selected(self, function: Callable[[], None]) -> None:
    """Calls a function to record its sub-tiles, and again if it is selected."""
    if self._recorded is not None:
      # A condition within a function that is recorded is a run of its own.
      return
    self._recorded = ""
    iota = {"broadcasted_iota": _no_indices}
    with mock.patch.object(
      schedule_module, "lax", _with_attributes(schedule_module.lax, iota)
    ):
      function()
    recorded = self._recorded
    self._recorded = None

    if recorded == "":
      # Conditions inside the function may have the run.
      function()
    elif recorded == self._run and not self._is_built:
      self._is_built = True
      function()

  def fori_loop(
    self, start: Any, stop: Any, function: Callable, init: Any
  ) -> None:
    """Replaces `lax.fori_loop` over strips: builds a single strip."""
    del start, stop
    index = self._turn
    if self._recorded is not None:
      index = 0
    function(index, init)

  def repeat(
    self, times: int, for_each_subtile: Callable, body: Callable
  ) -> None:
    """Builds a loop that takes the run `times` times.

    Args:
      times: Number of repetitions.
      for_each_subtile: Calls a function for each sub-tile of the tile.
      body: Computes a sub-tile.
    """

    def compute_or_record(rows, keys, mask: SubtileMask | None) -> None:
      if self._recorded is None:
        body(rows, keys, mask)
      else:
        self._recorded += _letter(mask)

    def take_run(turn: Any, carry: None) -> None:
      del carry
      self._turn = turn
      self._is_built = False
      for_each_subtile(compute_or_record)
      assert self._is_built, f"the kernel has no run {self._run}"

    lax.fori_loop(0, times, take_run, None)


@contextlib.contextmanager
def single_run(run: str, times: int) -> Iterator[None]:
  """A context in which a kernel of one tile is built with a single run.

  It replaces methods of `Schedule`, so that the grid and the tile are fixed,
  and no condition depends on data.

  Args:
    run: The name of the run.
    times: How often the kernel takes it.
  """
  selector = _RunSelector(run)
  original = Schedule.for_each_subtile

  def for_each_subtile(schedule, scalars, b, i, j, body) -> None:
    for_each = functools.partial(original, schedule, scalars, b, i, j)
    selector.repeat(times, for_each, body)

  def span_to_load(schedule, scalars, b, stationary, step):
    return step

  def for_each_moving_block(schedule, scalars, b, stationary, step, body):
    # A step has one block.
    body(step, step)

  def compare_segments(schedule, scalars, tile, rows, keys):
    # This is always true, but the compiler does not know it.
    is_first = tile.i == 0
    return SegmentComparison(is_first, is_first)

  with (
    _replaced_functions(when=selector.when, fori_loop=selector.fori_loop),
    # Nothing but the ids of the elementwise mask is read as data.
    mock.patch.multiple(
      Schedule,
      for_each_subtile=for_each_subtile,
      needs_scalars=False,
      span_to_load=span_to_load,
      for_each_moving_block=for_each_moving_block,
      _compare_segments=compare_segments,
    ),
  ):
    yield


def _replaced_functions(
  *, when: Callable, **lax_functions: Callable
) -> contextlib.AbstractContextManager:
  """Replaces conditions and functions of jax.lax in the schedule's module.

  Args:
    when: Replaces `pl.when`.
    lax_functions: Replacements by the names in jax.lax.
  """
  return mock.patch.multiple(
    schedule_module,
    _when=when,
    pl=_with_attributes(pl, {"when": when}),
    lax=_with_attributes(lax, lax_functions),
  )


def _with_attributes(
  module: Any, attributes: dict[str, Callable]
) -> types.SimpleNamespace:
  """Returns a copy of a module with other attributes."""
  return types.SimpleNamespace(**(vars(module) | attributes))


def _letter(mask: SubtileMask | None) -> str:
  """Returns the letter of a sub-tile in the name of a run."""
  if mask is None:
    return "-"
  if mask.compares_segments:
    return "d"
  return "p"
