"""Shared memory of a thread block: tiled arrays and ring buffers of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from diffjax.ops.diff_attention.gpu.chip import Ref, plgpu

# The most that a thread block of a Hopper GPU can allocate is 227 KiB.
_SHARED_MEMORY_BYTES = 227 * 1024
# Reserved for the barriers of a kernel, which take 8 bytes each.
_BARRIER_BYTES = 1024
# The most slots of a ring buffer, if all of them fit.
_MAX_SLOTS = 4

# TMA and wgmma read tiles of 8 rows of 128 bytes. Swizzling permutes the parts
# of a tile, so that its columns are read without bank conflicts.
_TILE_ROWS = 8
_SWIZZLE_BYTES = 128


def tiled_smem(shape: tuple[int, ...], dtype: Any) -> Any:
  """Returns the type of an array in shared memory for TMA and wgmma."""
  tile_columns = _SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
  transforms = (
    plgpu.TilingTransform((_TILE_ROWS, tile_columns)),
    plgpu.SwizzleTransform(_SWIZZLE_BYTES),
  )
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def max_slots(fixed_bytes: int, slot_bytes: int, minimum: int = 2) -> int:
  """Returns how many slots of a ring buffer fit into shared memory.

  Args:
    fixed_bytes: the size of everything else in shared memory.
    slot_bytes: the size of a slot.
    minimum: the number of slots that the kernel needs. It is 2 if a warpgroup
      waits for a slot while it holds another one.
  """
  available_bytes = _SHARED_MEMORY_BYTES - _BARRIER_BYTES - fixed_bytes
  num_slots = min(_MAX_SLOTS, available_bytes // slot_bytes)
  assert num_slots >= minimum, (
    f"{num_slots} slots of {slot_bytes} bytes fit into shared memory next to"
    f" {fixed_bytes} bytes; the kernel needs {minimum}"
  )
  return num_slots


@dataclasses.dataclass(frozen=True)
class RingBuffer:
  """Slots in shared memory that pass blocks from a producer to consumers.

  Step n uses slot n mod `num_slots`. In each step the producer calls `fill`.
  Each consumer calls `wait` and then `release`, or `skip`. After the last step
  the producer calls `drain`.

  Each wait for a barrier consumes one of its phases. So a consumer must wait
  exactly once per step, and also for blocks that it does not use.

  Attributes:
    num_slots: the number of slots.
    filled: one barrier per slot. It completes when the slot's loads arrive.
    freed: one barrier per slot. It completes when all consumers release it.
  """

  num_slots: int
  filled: Ref
  freed: Ref

  def slot(self, step: jax.Array) -> jax.Array:
    """Returns the slot of a step."""
    return lax.rem(step, jnp.int32(self.num_slots))

  def wait(self, step: jax.Array) -> jax.Array:
    """Waits until the slot of a step is filled, and returns the slot."""
    slot = self.slot(step)
    plgpu.barrier_wait(self.filled.at[slot])
    return slot

  def release(self, step: jax.Array) -> None:
    """Frees the slot of a step for the producer."""
    plgpu.barrier_arrive(self.freed.at[self.slot(step)])

  def skip(self, step: jax.Array) -> None:
    """Waits for the slot of a step and frees it unread."""
    self.wait(step)
    self.release(step)

  def fill(
    self,
    step: jax.Array,
    first_step: jax.Array,
    load: Callable[[jax.Array, Ref], None],
  ) -> None:
    """Fills the slot of a step as soon as the consumers have freed it.

    The producer calls this once per step. It does not wait for the copies.

    Example:
      With 4 slots and first_step = 10, steps 10 to 13 fill slots that were
      never used. Step 14 waits until step 10 is released.

    Args:
      step: the step, which uses slot step mod `num_slots`.
      first_step: the first step of the loop.
      load: load(slot, barrier) starts copies into the slot. The barrier
        completes when they have arrived.
    """
    slot = self.slot(step)

    @pl.when(step - first_step >= self.num_slots)
    def wait_until_freed() -> None:
      plgpu.barrier_wait(self.freed.at[slot])

    load(slot, self.filled.at[slot])

  def drain(self, first_step: jax.Array, stop_step: jax.Array) -> None:
    """Waits until the consumers have freed the last slots.

    Every phase of a barrier must be waited for before the kernel ends.

    Args:
      first_step: the first step of the loop.
      stop_step: the last step + 1.
    """
    first_unobserved = lax.max(stop_step - self.num_slots, first_step)

    @pl.loop(first_unobserved, stop_step)
    def wait_until_freed(step: jax.Array) -> None:
      plgpu.barrier_wait(self.freed.at[self.slot(step)])
