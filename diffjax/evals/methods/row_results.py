"""Results of a function for every row of a validation set."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from diffjax.data.pipeline import ValidationBatches
from diffjax.host.progress import Progress


def compute_for_rows(
  compute: Callable[[dict[str, np.ndarray]], PyTree],
  batches: ValidationBatches,
  label: str,
) -> PyTree:
  """Returns a function's results for all rows, and shows the progress.

  Args:
    compute: Takes a batch, and returns a tree of arrays whose first axis is the
      rows of the batch.
    batches: The rows.
    label: What is being done, for the progress line.

  Returns:
    The same tree with NumPy arrays, whose first axis is all rows.
  """
  results_of_batches = []
  with Progress(label, len(batches)) as progress:
    for num_done, batch in enumerate(batches, start=1):
      results_of_batches.append(jax.device_get(compute(batch)))
      progress.update(num_done, num_done * batch["tokens"].size)

  def concatenate_rows(*arrays: np.ndarray) -> np.ndarray:
    # The last batch is filled up with empty rows, which are left out.
    return np.concatenate(arrays)[: batches.rows]

  return jax.tree.map(concatenate_rows, *results_of_batches)
