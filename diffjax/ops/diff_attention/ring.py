"""Rows that several devices share: each keeps its queries, and keys and values travel from device to device, in a ring.

At every step a device attends from its queries to the keys that it holds, while the next ones are under way. What it finds is merged by the
log-sum-exps of each map, in float32. In the backward pass the gradients of keys and values travel with them and are added up in float32.
So no device ever holds the keys of a whole row, and both maps share the values that travel.

Where the row's first position is known, so is what any shard's queries see of any other's keys. All masks are known while the program is
compiled, and a device chooses between few calls. In balanced order, under a causal mask, a device sees its own keys as a row of their own;
of keys from an earlier shard all its queries see the early piece, and of keys from a later shard its late queries see all: every step is
equal work, and but for the first one no mask is left.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.sharded import TokenSharding
from diffjax.ops.diff_attention.tiles import EMPTY_ROW_LSE, MASKED_LOGIT
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  Options,
  PartialResult,
  Saved,
)
from diffjax.ops.platform import platform
from diffjax.ops.varying import vary_like


class Call(NamedTuple):
  """Some of a device's queries, some of the keys that it holds, and what is seen: the mask knows how many there are of both."""

  q_start: int
  k_start: int
  mask: Mask


class Step(NamedTuple):
  """The calls of each shard with keys that come from so many shards before it."""

  distance: int
  calls: tuple[tuple[Call, ...], ...]


class _Keys(NamedTuple):
  """What travels round the ring."""

  k: Float[Array, "B K M S D"]
  v: Float[Array, "B K S V"]
  ids: Int[Array, "B S"] | None


class _Leg(NamedTuple):
  """Consecutive steps that are alike in how far keys have come since the step before, and in how far they go to the next: 0 for not."""

  steps: list[Step]
  before: int
  after: int


@functools.cache
def ring(
  implementation: Implementation, tokens: TokenSharding
) -> Implementation:
  """An implementation for one shard of rows, inside `shard_map`, out of one that has `partial`.

  Its mask has the lengths of a shard, and the offset of the row's first query, which is known.
  """
  return Implementation(
    functools.partial(_forward, implementation, tokens),
    functools.partial(_backward, implementation, tokens),
    functools.partial(_prepare, implementation, tokens),
    output=lambda out: jnp.swapaxes(out, 1, 2),
  )


@functools.cache
def steps_of(mask: Mask, tokens: TokenSharding) -> tuple[Step, ...]:
  """The steps in which any shard sees anything, and the first one, in which no keys have moved.

  Args:
    mask: of one shard's queries and keys, with the offset of the row's first query.
    tokens: how the shards share a row.
  """
  shards = tokens.shards
  pieces = list(map(tokens.pieces, range(shards)))
  steps = [
    Step(
      n,
      tuple(
        _calls(mask, pieces[shard], pieces[(shard - n) % shards])
        for shard in range(shards)
      ),
    )
    for n in range(shards)
  ]
  return tuple(step for step in steps if step.distance == 0 or any(step.calls))


def _calls(
  mask: Mask, q_pieces: tuple[int, ...], k_pieces: tuple[int, ...]
) -> tuple[Call, ...]:
  """The calls by which queries of some pieces of a row see keys of others: as few as their masks allow."""
  size = mask.q_length // len(q_pieces)
  free = Mask(size, size, causal=False, segments=mask.segments)

  def seen(q_piece: int, k_piece: int) -> Mask | None:
    cut = dataclasses.replace(
      mask,
      q_length=size,
      kv_length=size,
      offset=mask.known_offset + (q_piece - k_piece) * size,
    )
    tile = cut.known_offset, cut.known_offset + size - 1, 0, size - 1
    return None if not cut.some(*tile) else free if cut.every(*tile) else cut

  grid = [
    [seen(q_piece, k_piece) for k_piece in k_pieces] for q_piece in q_pieces
  ]
  causal = dataclasses.replace(free, causal=True)
  if grid == [
    [causal, None],
    [free, causal],
  ]:  # the two pieces are to each other as parts of one row
    return (
      Call(
        0, 0, dataclasses.replace(causal, q_length=2 * size, kv_length=2 * size)
      ),
    )
  rows = [(n * size, size, row) for n, row in enumerate(grid)]
  if all(row == grid[0] for row in grid):
    rows = [(0, mask.q_length, grid[0])]
  calls = []
  for start, length, row in rows:
    if all(each == free for each in row):
      calls.append(
        Call(
          start,
          0,
          dataclasses.replace(free, q_length=length, kv_length=mask.kv_length),
        )
      )
    else:
      calls += [
        Call(start, n * size, dataclasses.replace(each, q_length=length))
        for n, each in enumerate(row)
        if each is not None
      ]
  return tuple(calls)


def _legs(mask: Mask, tokens: TokenSharding) -> list[_Leg]:
  steps = steps_of(mask, tokens)
  moves = [
    0,
    *(
      after.distance - before.distance
      for before, after in itertools.pairwise(steps)
    ),
    0,
  ]
  alike = itertools.groupby(
    enumerate(steps), key=lambda numbered: moves[numbered[0] : numbered[0] + 2]
  )
  return [_Leg([step for _, step in members], *move) for move, members in alike]


def _prepare(
  implementation: Implementation,
  tokens: TokenSharding,
  arrays: Arrays,
  mask: Mask,
) -> tuple:
  """What the implementation chooses for each mask of a call, as items of a dict."""
  turned = _turned(arrays)
  keys = _Keys(turned.k, turned.v, turned.kv_ids)
  calls = {
    call.mask: call
    for step in steps_of(mask, tokens)
    for calls in step.calls
    for call in calls
  }
  return tuple(
    (each, implementation.prepare(_of_call(call, turned, keys), each))
    for each, call in calls.items()
  )


def _forward(
  implementation: Implementation,
  tokens: TokenSharding,
  arrays: Arrays,
  mask: Mask,
  options: Options,
) -> Saved:
  """The output and O₂ [B, H, T, V] in q's dtype, and the log-sum-exps (base 2) [B, H, G, T]."""
  q, _, v, lam, *_ = arrays
  (B, T, H, G, _), dtype = q.shape, jnp.promote_types(jnp.float32, q.dtype)
  zeros = lambda: vary_like(jnp.zeros((B, H, T, v.shape[-1]), dtype), q)
  turned = _turned(
    arrays._replace(lam=None if lam is None else jnp.zeros_like(lam))
  )

  def run(calls: tuple[Call, ...], keys: _Keys, found: Saved) -> Saved:
    assert implementation.partial is not None
    for call in calls:
      part = implementation.partial.forward(
        _of_call(call, turned, keys), call.mask, _of_part(options, call)
      )
      found = _merge(found, part, call.q_start)
    return found

  def step(leg: _Leg, carry, n):
    keys, found = carry
    ahead = tokens.shift(
      keys, leg.after
    )  # under way while the present keys are attended to
    return ahead, _choose(leg, tokens, n, run, keys, found)

  found = Saved(
    zeros(),
    zeros() if G == 2 else None,
    vary_like(jnp.full((B, H, G, T), MASKED_LOGIT, dtype), q),
  )
  _, (out, out2, lse) = _walk(_legs(mask, tokens), step, (_keys(turned), found))
  if lam is not None:
    out2 = out2.astype(
      q.dtype
    )  # rounded first, so that the backward pass, which reads it, agrees
    out = out - jnp.swapaxes(lam, 1, 2)[..., None] * out2
  return Saved(
    out.astype(q.dtype),
    out2,
    jnp.where(lse <= MASKED_LOGIT / 2, EMPTY_ROW_LSE, lse),
  )


def _backward(
  implementation: Implementation,
  tokens: TokenSharding,
  arrays: Arrays,
  mask: Mask,
  options: Options,
  saved: Saved,
  d_out,
):
  """Gradients of q, k, v and λ (None without λ)."""
  lam, turned, d_out = arrays.lam, _turned(arrays), _tokens_last(d_out)
  dtype = jnp.promote_types(jnp.float32, d_out.dtype)
  zeros = lambda x: vary_like(jnp.zeros(x.shape, dtype), d_out)

  def run(calls: tuple[Call, ...], keys: _Keys, d_q):
    assert implementation.partial is not None
    found: list[Any] = [None, None]  # of keys and values
    for call in calls:
      rows = lambda x, axis, call=call: lax.slice_in_dim(
        x, call.q_start, call.q_start + call.mask.q_length, axis=axis
      )
      of_rows = PartialResult(
        rows(saved.out, 2),
        None if saved.out2 is None else rows(saved.out2, 2),
        rows(saved.lse, 3),
      )
      part = implementation.partial.backward(
        _of_call(call, turned, keys),
        call.mask,
        _of_part(options, call),
        of_rows,
        _tokens_first(rows(d_out, 2)),
      )
      d_q = _add(d_q, _tokens_last(part[0]), call.q_start, mask.q_length)
      found = [
        _add(x, _tokens_last(y), call.k_start, mask.kv_length)
        for x, y in zip(found, part[1:3], strict=True)
      ]
    return d_q, *(
      zeros(x) if y is None else y for x, y in zip(keys[:2], found, strict=True)
    )

  def step(leg: _Leg, carry, n):
    keys, d_keys, d_q = carry
    ahead = tokens.shift(keys, leg.after)
    d_keys = tokens.shift(
      d_keys, leg.before
    )  # to where the keys are since the step before: needed after this step's attention
    d_q, *parts = _choose(leg, tokens, n, run, keys, d_q)
    return (
      ahead,
      [total + part for total, part in zip(d_keys, parts, strict=True)],
      d_q,
    )

  legs, keys = _legs(mask, tokens), _keys(turned)
  _, d_keys, d_q = _walk(
    legs, step, (keys, [zeros(keys.k), zeros(keys.v)], zeros(turned.q))
  )
  d_k, d_v = tokens.shift(d_keys, -legs[-1].steps[-1].distance)  # home
  d_lam = None
  if lam is not None:
    d_lam = -jnp.swapaxes(
      jnp.sum(d_out.astype(dtype) * saved.out2.astype(dtype), axis=-1), 1, 2
    ).astype(lam.dtype)
  return *(
    _tokens_first(x).astype(arrays.q.dtype) for x in (d_q, d_k, d_v)
  ), d_lam


def _walk(legs: list[_Leg], step: Callable, carry: Any) -> Any:
  """Runs `step(leg, carry, number of the step in the leg)` for all steps, those of a leg in a loop.

  On CPU there is no loop: there XLA (0.10) does not order what a loop sends among what is sent outside of it, and devices that meet
  different transfers first wait for each other for ever.
  """
  for leg in legs:
    if len(leg.steps) == 1 or platform() == "cpu":
      for n in range(len(leg.steps)):
        carry = step(leg, carry, n)
    else:
      carry = lax.fori_loop(
        0, len(leg.steps), lambda n, carry, leg=leg: step(leg, carry, n), carry
      )
  return carry


def _choose(
  leg: _Leg, tokens: TokenSharding, n: Any, run: Callable, *operands: Any
) -> Any:
  """run(this shard's calls at step n of a leg, *operands)."""
  branches = list(
    dict.fromkeys(calls for step in leg.steps for calls in step.calls)
  )
  if len(branches) == 1:
    return run(branches[0], *operands)
  table = jnp.array(
    [[branches.index(calls) for calls in step.calls] for step in leg.steps],
    jnp.int32,
  )
  return lax.switch(
    table[n, tokens.shard],
    [functools.partial(run, calls) for calls in branches],
    *operands,
  )


def _tokens_last(x: jax.Array) -> jax.Array:
  """[B, T, …, X] as [B, …, T, X]. So arrays lie in the ring as kernels have them, and what turns them for a call costs nothing."""
  return jnp.moveaxis(x, 1, -2)


def _tokens_first(x: jax.Array) -> jax.Array:
  """[B, …, T, X] as [B, T, …, X]."""
  return jnp.moveaxis(x, -2, 1)


def _turned(arrays: Arrays) -> Arrays:
  return arrays._replace(
    q=_tokens_last(arrays.q), k=_tokens_last(arrays.k), v=_tokens_last(arrays.v)
  )


def _keys(turned: Arrays) -> _Keys:
  """What sets out. The ids stay with the keys: all layers share them, and JAX would let them go round once before the first layer, and keep
  whatever follows from them at each step."""
  return _Keys(*lax.optimization_barrier((turned.k, turned.v, turned.kv_ids)))


def _of_call(call: Call, turned: Arrays, keys: _Keys) -> Arrays:
  """The queries and keys of a call, as implementations take them."""
  rows: Any = lambda x, axis: (
    None
    if x is None
    else lax.slice_in_dim(
      x, call.q_start, call.q_start + call.mask.q_length, axis=axis
    )
  )
  columns: Any = lambda x, axis: (
    None
    if x is None
    else lax.slice_in_dim(
      x, call.k_start, call.k_start + call.mask.kv_length, axis=axis
    )
  )
  q, k, v = (
    _tokens_first(rows(turned.q, -2)),
    _tokens_first(columns(keys.k, -2)),
    _tokens_first(columns(keys.v, -2)),
  )
  return Arrays(
    q,
    k,
    v,
    rows(turned.lam, 1),
    rows(turned.q_ids, 1),
    columns(keys.ids, 1),
    None,
  )


def _add(
  total: jax.Array | None, part: jax.Array, start: int, length: int
) -> jax.Array:
  """A total [B, …, length, X], None for zeros, and a part of it added from a token on."""
  size, axis = part.shape[-2], part.ndim - 2
  if total is None:
    blank = lambda count: vary_like(
      jnp.zeros((*part.shape[:-2], count, part.shape[-1]), part.dtype), part
    )
    return (
      part
      if size == length
      else jnp.concatenate(
        [blank(start), part, blank(length - start - size)], axis=axis
      )
    )
  return lax.dynamic_update_slice_in_dim(
    total,
    lax.slice_in_dim(total, start, start + size, axis=axis) + part,
    start,
    axis=axis,
  )


def _of_part(options: Options, call: Call) -> Options:
  return Options(
    options.scale,
    save=True,
    chosen=dict(options.chosen)[call.mask],
  )


def _merge(total: Saved, part: PartialResult, start: int) -> Saved:
  """The outputs of all keys so far and of some more, weighted by what their softmax add up to. A row without keys has MASKED_LOGIT for a sum."""
  length = part.lse.shape[3]
  rows = lambda x, axis: lax.slice_in_dim(x, start, start + length, axis=axis)
  before, more = (
    rows(total.lse, 3),
    jnp.where(part.lse > EMPTY_ROW_LSE / 2, MASKED_LOGIT, part.lse),
  )
  peak = jnp.maximum(before, more)
  old, new = jnp.exp2(before - peak), jnp.exp2(more - peak)

  def merge(g: int, x: jax.Array, y: jax.Array) -> jax.Array:
    weighted = (
      rows(x, 2) * (old / (old + new))[:, :, g, :, None]
      + y * (new / (old + new))[:, :, g, :, None]
    )
    return lax.dynamic_update_slice_in_dim(x, weighted, start, axis=2)

  lse = lax.dynamic_update_slice_in_dim(
    total.lse, peak + jnp.log2(old + new), start, axis=3
  )
  return Saved(
    merge(0, total.out, part.out),
    None if part.out2 is None else merge(1, total.out2, part.out2),
    lse,
  )
