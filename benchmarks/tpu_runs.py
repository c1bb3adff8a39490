"""What a row of packed documents costs a TPU kernel, put together from its runs of instructions.

The compiler has no estimate where the mask is data, as segment ids are: which instructions run is known when the kernel does. So the kernel
is built for each of its runs of instructions under one condition (a whole tile; one that causality cuts; a strip, or a sub-tile by itself,
where documents meet), with that run alone and without the condition: of such a build the estimate is whole. Nor is anything else data there
but the ids that documents are compared by. How often a row takes each run is found by the kernel's own conditions, which are worked through
for the row's documents. Nothing here says what the runs are: they are taken from the kernel as it is.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import types
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tpu import schedule as schedules
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks
from diffjax.ops.diff_attention.tpu.schedule import (
  Schedule,
  SegmentComparison,
  SubtileMask,
  make_scalars,
  make_schedule,
)


def ids_of(documents: tuple[int, ...]) -> np.ndarray:
  """The segment ids [1, T] of a row of documents of such lengths."""
  return np.repeat(np.arange(len(documents), dtype=np.int32), documents)[None]


def schedule_of(
  blocks: Blocks,
  length: int,
  G: int,
  M: int,
  *,
  keys_pass: bool,
  segments: bool,
) -> Schedule:
  """The schedule of a causal row."""
  q, k = (
    jax.ShapeDtypeStruct((1, length, 1, maps, 1), np.float32) for maps in (G, M)
  )
  return make_schedule(
    Mask(length, length, segments=segments), blocks, q, k, keys_move=keys_pass
  )


def runs_of(
  schedule: Schedule, ids: np.ndarray | None
) -> collections.Counter[str]:
  """How often a kernel takes each of its runs of instructions for a row with ids [1, T], by its own conditions.

  A run is named after its sub-tiles: "-" for one that is seen whole, "p" where positions are compared, "d" where documents are, too.
  """
  counts: collections.Counter[str] = collections.Counter()
  opened: list[str] = []

  def when(condition) -> Callable:
    def decide(function: Callable) -> None:
      if condition:
        opened.append("")
        function()
        counts[opened.pop()] += 1

    return decide

  def fori_loop(start: int, stop: int, function: Callable, init) -> None:
    for n in range(start, stop):
      function(n, init)

  def body(row, key, mask) -> None:
    opened[-1] += _letter(mask)

  scalars = jax.tree.map(
    lambda x: x.tolist(), make_scalars(schedule, ids, ids, None, 1)
  )
  stay = schedule.num_q_blocks if schedule.keys_move else schedule.num_kv_blocks
  with (
    _instead(
      when=when,
      fori_loop=fori_loop,
      div=lambda a, b: a // b,
      broadcasted_iota=lambda *_: 0,
    ),
    mock.patch.object(schedules, "jnp", np),
  ):
    for stays, step in itertools.product(range(stay), range(schedule.steps)):

      def tile(block: int, place: int, stays=stays) -> None:
        schedule.for_each_subtile(
          scalars,
          0,
          *((stays, block) if schedule.keys_move else (block, stays)),
          body,
        )

      schedule.for_each_moving_block(scalars, 0, stays, step, tile)
  del counts[""]  # what holds other runs, or nothing
  return counts


@contextlib.contextmanager
def only(run: str, times: int) -> Iterator[None]:
  """A kernel of one tile that is built within it takes one of its runs so many times, and nothing else, under no condition."""
  visit = Schedule.for_each_subtile
  dry: list[
    str
  ] = []  # the sub-tiles of what is looked at and not built; empty while one builds
  turn = types.SimpleNamespace(n=None, found=False)

  def when(condition) -> Callable:
    def decide(function: Callable) -> None:
      if dry:
        return  # a run of its own
      dry.append("")
      with mock.patch.object(
        schedules,
        "lax",
        types.SimpleNamespace(
          **{**vars(schedules.lax), "broadcasted_iota": lambda *_: 0}
        ),
      ):
        function()
      held = dry.pop()
      if not held or (held == run and not turn.found):
        turn.found = turn.found or held == run
        function()

    return decide

  def forced(self, scalars, b, i, j, body) -> None:
    def look(row, key, mask) -> None:
      if dry:
        dry[0] += _letter(mask)
      else:
        body(row, key, mask)

    def once(n, _) -> None:
      turn.n, turn.found = n, False
      visit(self, scalars, b, i, j, look)
      assert turn.found, f"the kernel has no run {run}"

    lax.fori_loop(0, times, once, None)

  known = dict(  # nothing is read as data but the elementwise mask's ids
    needs_scalars=False,
    span_to_load=lambda self, scalars, b, stays, step: step,
    for_each_moving_block=lambda self, scalars, b, stays, step, body: body(
      step, step
    ),
    _compare_segments=lambda self, scalars, tile, *_: SegmentComparison(
      tile.i == 0, tile.i == 0
    ),
  )
  fori_loop = lambda start, stop, function, init: function(
    0 if dry else turn.n, init
  )
  with (
    _instead(when=when, fori_loop=fori_loop),
    mock.patch.multiple(Schedule, for_each_subtile=forced, **known),
  ):
    yield


def _instead(*, when: Callable, **functions: Callable):
  """The schedule's conditions, and functions of jax.lax, replaced."""
  room = lambda module, **names: types.SimpleNamespace(
    **{**vars(module), **names}
  )
  return mock.patch.multiple(
    schedules, _when=when, pl=room(pl, when=when), lax=room(lax, **functions)
  )


def _letter(mask: SubtileMask | None) -> str:
  if mask is None:
    return "-"
  return "d" if mask.compares_segments else "p"
