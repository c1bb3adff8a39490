"""Differential attention on TPU as fused Pallas kernels.

`forward.py` and `backward.py` have the kernels, one for each direction. Both
share the work that the maps of a query group have in common. With two maps,
each head, query and key takes this many products of width D:

                              version 1 (V = 2D)   version 2 (V = D)
  forward: QKᵀ, AV            2 + 4                2 + 2
  backward: QKᵀ, dO Vᵀ,
    dV, dK, dQ                2 + 2 + 2 + 2 + 2    2 + 1 + 1 + 2 + 2

`schedule.py` decides which blocks are loaded and computed. Tiles that the mask
hides are neither loaded nor computed. In tiles that it cuts, hidden sub-tiles
are skipped, and only sub-tiles that it cuts apply it. `block_sizes.py` chooses
the sizes of tiles and sub-tiles.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tpu import block_sizes, chip
from diffjax.ops.diff_attention.tpu.backward import backward, backward_partial
from diffjax.ops.diff_attention.tpu.forward import forward, forward_partial
from diffjax.ops.diff_attention.tpu.kernel_call import KernelConfig
from diffjax.ops.diff_attention.vjp import (
  Arrays,
  Implementation,
  PartialImplementation,
)


def _prepare(arrays: Arrays, mask: Mask) -> KernelConfig:
  """Returns what the kernels of both passes need to know about the chip.

  It is called once, before the forward pass. The result is in `options.chosen`.

  Args:
    arrays: the arrays of the operation.
    mask: the mask, which has the lengths of queries and keys.

  Raises:
    ValueError: if the program is not for a TPU, or if the kernels do not
      support the dtype or the widths.
  """
  q = arrays.q
  v = arrays.v
  generation = chip.generation(otherwise="chunked")
  chip.check(q, v, otherwise="chunked")

  def choose_blocks(direction: str) -> block_sizes.Blocks:
    return block_sizes.choose(
      generation,
      direction,
      mask.q_length,
      mask.kv_length,
      D=q.shape[-1],
      V=v.shape[-1],
      G=q.shape[3],
      dtype=q.dtype,
    )

  return KernelConfig(
    forward_blocks=choose_blocks("forward"),
    backward_blocks=choose_blocks("backward"),
    generation=generation,
    cores=chip.cores(),
    interpret=chip.interpret_mode.get(),
  )


def _heads_last(out: Float[Array, "B H T V"]) -> Float[Array, "B T H V"]:
  """Returns the output of `forward` in the layout of the operation."""
  return jnp.swapaxes(out, 1, 2)


IMPLEMENTATION = Implementation(
  forward,
  backward,
  _prepare,
  output=_heads_last,
  takes_groups=True,
  partial=PartialImplementation(forward_partial, backward_partial),
)
