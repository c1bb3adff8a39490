"""The interpreter of the kernels in half of its time: for rehearsals and tests.

An interpreter calls back into Python for each load, store and wait. JAX copies what it passes to a device, which takes longer than the
interpreter's own work: here it passes NumPy's arrays, and numbers for whole numbers.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from unittest import mock

import numpy as np
from jax._src import api, callback


@contextlib.contextmanager
def callbacks_on_the_host() -> Iterator[None]:
  """Within it Python's callbacks get NumPy's arrays."""

  def device_put(arguments, device):
    arrays = [np.asarray(x) for x in arguments]
    return tuple(
      x.item() if x.ndim == 0 and x.dtype.kind in "iub" else x for x in arrays
    )

  with mock.patch.object(
    callback,
    "api",
    types.SimpleNamespace(**{**vars(api), "device_put": device_put}),
  ):
    yield


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
  """Within it the GPU kernels run on any backend."""
  from diffjax.ops.diff_attention.gpu import chip

  with callbacks_on_the_host(), chip.interpreted():
    yield
