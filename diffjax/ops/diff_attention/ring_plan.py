"""The plan of the ring: the attention that each device computes at each step.

The position of a row's first token is known while the program is compiled. So
are the masks between the queries and keys of any two shards. Planning needs no
arrays. `ring.py` computes the planned calls.

Under a causal mask and in balanced order, all devices do equal work at every
step, and only the first step needs a mask. Shard c of C holds the pieces c and
2C − 1 − c of a row. A device then sees

  its own keys: as a causal row of two pieces,
  keys of an earlier shard: their first piece, from all queries,
  keys of a later shard: both pieces, from the queries of its second piece.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.sharded import TokenSharding


class Call(NamedTuple):
  """Attention from some of a device's queries to some of the keys it holds.

  The lengths of the mask are the numbers of these queries and keys.
  """

  q_start: int
  k_start: int
  mask: Mask


class Step(NamedTuple):
  """One step of the ring.

  Attributes:
    distance: the number of shards that keys have moved: shard c holds the keys
      of shard c − distance.
    calls: the calls of each shard.
  """

  distance: int
  calls: tuple[tuple[Call, ...], ...]


class StepLoop(NamedTuple):
  """Consecutive steps that can run as one loop, as their shifts are equal.

  Attributes:
    steps: the steps.
    shift_before: the number of shards that keys move between the previous step
      and each of these. 0 if there is no previous step.
    shift_after: the number of shards that keys move between each of these and
      the next step. 0 if there is no next step.
  """

  steps: list[Step]
  shift_before: int
  shift_after: int

  def branches(self) -> list[tuple[Call, ...]]:
    """Returns the different calls that any shard has at any of the steps."""
    branches: list[tuple[Call, ...]] = []
    for step in self.steps:
      for calls in step.calls:
        if calls not in branches:
          branches.append(calls)
    return branches

  def branch_table(self) -> list[list[int]]:
    """Returns the index in `branches` of each shard's calls, for each step."""
    branches = self.branches()
    table = []
    for step in self.steps:
      table.append([branches.index(calls) for calls in step.calls])
    return table


def plan_loops(mask: Mask, tokens: TokenSharding) -> list[StepLoop]:
  """Returns the steps of the ring, grouped into loops.

  Between two steps, keys move by a number of shards, their shift. Steps with
  equal shifts before and after them can run as one loop.

  Args:
    mask: the mask of one shard's queries and keys, as in `plan_steps`.
    tokens: how the shards share a row.
  """
  steps = plan_steps(mask, tokens)
  last_index = len(steps) - 1
  loops: list[StepLoop] = []
  previous_shifts = None
  for index, step in enumerate(steps):
    shift_before = 0
    if index > 0:
      shift_before = step.distance - steps[index - 1].distance
    shift_after = 0
    if index < last_index:
      shift_after = steps[index + 1].distance - step.distance

    shifts = (shift_before, shift_after)
    if shifts == previous_shifts:
      loops[-1].steps.append(step)
    else:
      loops.append(StepLoop([step], shift_before, shift_after))
    previous_shifts = shifts
  return loops


@functools.cache
def plan_steps(mask: Mask, tokens: TokenSharding) -> tuple[Step, ...]:
  """Returns the steps of the ring at which some shard sees some key.

  Each device holds a shard of the queries. At the step with distance d, it has
  the keys of the shard d places before its own. A call is attention from some
  of its queries to some of these keys. The first step, d = 0, is always
  included.

  Args:
    mask: the mask of one shard's queries and keys. Its offset is the position
      of the row's first query.
    tokens: how the shards share a row.
  """
  shards = tokens.shards
  steps = []
  for distance in range(shards):
    calls_by_shard = []
    for shard in range(shards):
      key_shard = (shard - distance) % shards
      # The indices of the pieces of the row that the two shards hold.
      q_pieces = tokens.pieces(shard)
      k_pieces = tokens.pieces(key_shard)
      calls_by_shard.append(_plan_calls(mask, q_pieces, k_pieces))
    if distance == 0 or any(calls_by_shard):
      steps.append(Step(distance, tuple(calls_by_shard)))
  return tuple(steps)


def _plan_calls(
  mask: Mask, q_pieces: tuple[int, ...], k_pieces: tuple[int, ...]
) -> tuple[Call, ...]:
  """Returns the fewest calls from one shard's queries to another's keys.

  A row is cut into equally long pieces, and a shard holds one or two of them. A
  call is attention with one mask, from some of the queries to some of the keys.
  Pieces that need the same mask share a call.

  Example:
    A causal mask, queries of pieces (1, 2) and keys of pieces (0, 3) → one call
    from all queries to piece 0, because they see nothing of piece 3.

  Args:
    mask: the mask of one shard's queries and keys, as in `plan_steps`.
    q_pieces: the indices of the pieces of the queries.
    k_pieces: the indices of the pieces of the keys.
  """
  piece_length = mask.q_length // len(q_pieces)
  # The mask of each pair of pieces, or None if it hides all keys.
  piece_masks = []
  for q_piece in q_pieces:
    row = []
    for k_piece in k_pieces:
      row.append(_piece_mask(mask, piece_length, q_piece - k_piece))
    piece_masks.append(row)

  # If the second piece sees all of the first, the two pieces are a causal row,
  # even if they are not neighbors.
  full_mask = _full_mask(mask, piece_length, piece_length)
  causal_mask = dataclasses.replace(full_mask, causal=True)
  if piece_masks == [[causal_mask, None], [full_mask, causal_mask]]:
    row_mask = _full_mask(mask, mask.q_length, mask.kv_length)
    row_mask = dataclasses.replace(row_mask, causal=True)
    return (Call(q_start=0, k_start=0, mask=row_mask),)

  if all(row == piece_masks[0] for row in piece_masks):
    # All queries see the same keys, so they share their calls.
    return tuple(
      _row_calls(
        mask, q_start=0, q_length=mask.q_length, piece_masks=piece_masks[0]
      )
    )

  # Otherwise each piece of the queries has calls of its own.
  calls = []
  for index, row in enumerate(piece_masks):
    q_start = index * piece_length
    calls += _row_calls(mask, q_start, piece_length, piece_masks=row)
  return tuple(calls)


def _piece_mask(mask: Mask, piece_length: int, distance: int) -> Mask | None:
  """Returns the mask from one piece of a row to another one.

  The pieces of a row have equal lengths and are numbered from its start.

  Example:
    With a causal mask, distance −1 → None, since all keys are later,
    0 → a causal mask, and 1 → a mask that hides nothing.

  Args:
    mask: the mask of one shard's queries and keys, as in `plan_steps`.
    piece_length: the number of tokens of each piece.
    distance: the queries' piece's index minus the keys' piece's index.

  Returns:
    The mask of the two pieces, or None if it hides all keys.
  """
  # Positions count from the first key of the keys' piece.
  piece_mask = dataclasses.replace(
    mask,
    q_length=piece_length,
    kv_length=piece_length,
    offset=mask.known_offset + distance * piece_length,
  )
  first_query = piece_mask.known_offset
  last_query = first_query + piece_length - 1
  last_key = piece_length - 1
  if not piece_mask.any_visible(first_query, last_query, 0, last_key):
    return None
  if piece_mask.all_visible(first_query, last_query, 0, last_key):
    return _full_mask(mask, piece_length, piece_length)
  return piece_mask


def _row_calls(
  mask: Mask, q_start: int, q_length: int, piece_masks: list[Mask | None]
) -> list[Call]:
  """Returns the calls from some queries to the pieces of the keys.

  A call is attention with one mask. If all pieces are fully visible, one call
  is enough. Otherwise each piece that is not hidden has a call.

  Args:
    mask: the mask of one shard's queries and keys, as in `plan_steps`.
    q_start: the first of the queries.
    q_length: the number of the queries.
    piece_masks: the masks of the pieces of the keys. None if no query of a
      piece sees them.
  """
  piece_length = mask.kv_length // len(piece_masks)
  full_mask = _full_mask(mask, piece_length, piece_length)
  if all(piece_mask == full_mask for piece_mask in piece_masks):
    all_keys_mask = _full_mask(mask, q_length, mask.kv_length)
    return [Call(q_start, k_start=0, mask=all_keys_mask)]

  calls = []
  for index, piece_mask in enumerate(piece_masks):
    if piece_mask is not None:
      call_mask = dataclasses.replace(piece_mask, q_length=q_length)
      calls.append(Call(q_start, index * piece_length, call_mask))
  return calls


def _full_mask(mask: Mask, q_length: int, kv_length: int) -> Mask:
  """Returns a mask that hides nothing, or only keys of other segments."""
  return Mask(q_length, kv_length, causal=False, segments=mask.segments)
