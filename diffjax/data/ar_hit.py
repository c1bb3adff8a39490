"""AR-Hit: targets that a model can recall from their context, because they end an n-gram that has occurred there before."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int


def ar_hit_mask(
  tokens: Int[np.ndarray, "B T"],
  targets: Int[np.ndarray, "B T"],
  segment_ids: Int[np.ndarray, "B T"],
  n: int = 2,
) -> Bool[np.ndarray, "B T"]:
  """Marks the targets that end an n-gram seen earlier in their segment.

  The n-gram of target t is the n − 1 inputs up to t and the target itself. It was seen if it ended at an earlier target of the same
  segment; the two may overlap. The paper splits its loss by such n-grams (paper.md, §5) and does not give n. Arora et al. 2023 ("Zoology",
  arXiv:2312.04927), who introduced the measure, use bigrams and leave out frequent ones; here all n-grams count. The value of a
  target of weight 0, such as the one across a document's end, has no meaning.

  Args:
    tokens: Inputs.
    targets: The token after each input.
    segment_ids: Segment of each input. Consecutive equal ids in a row are one segment.
    n: Length of the n-grams, at least 2.

  Returns:
    Whether each target is a hit.

  Raises:
    ValueError: if n is below 2.
  """
  if n < 2:
    raise ValueError(f"an n-gram of AR-Hit has at least 2 tokens; got n = {n}")
  rows, length = tokens.shape
  if n > length + 1:  # longer than a row and its last target
    return np.zeros((rows, length), bool)
  starts = np.ones((rows, length), bool)
  starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
  # A number for each (segment, n-gram). Segments are numbered over the whole batch, so that one sort serves all rows.
  code = np.cumsum(starts).reshape(rows, length)
  vocabulary = int(max(tokens.max(initial=0), targets.max(initial=0))) + 1
  largest = code.size + 1
  for back in range(
    n - 2, -2, -1
  ):  # inputs from the farthest to t itself (back = 0), then the target
    if largest * vocabulary >= 2**63:
      code = np.unique(code, return_inverse=True)[1].reshape(rows, length)
      largest = code.size
    if back >= 0:
      token = np.zeros_like(tokens)
      token[:, back:] = tokens[:, : length - back]
    else:
      token = targets
    code = code * vocabulary + token
    largest *= vocabulary
  # The inputs of an n-gram must be in one segment, so the first n − 2 targets of a segment end no n-gram.
  index = np.arange(length)
  position = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
  valid = (position >= n - 2).reshape(-1)

  where = np.flatnonzero(valid)
  code = code.reshape(-1)[where]
  order = np.argsort(
    code, kind="stable"
  )  # stable: equal n-grams stay in the order of the text
  repeated = np.zeros(code.size, bool)
  repeated[order[1:]] = code[order[1:]] == code[order[:-1]]
  hits = np.zeros(rows * length, bool)
  hits[where] = repeated
  return hits.reshape(rows, length)
