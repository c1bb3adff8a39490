"""Decoding constrained to a set of labels: greedy, token by token, over the tree of the labels' tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from diffjax.config import UserError
from diffjax.model.sampler import Sampler, SamplerState


@dataclasses.dataclass
class LabelTree:
  """A place in the tree: the labels that can still come, and the tokens that lead on."""

  labels: list[int] = dataclasses.field(default_factory=list)
  children: dict[int, LabelTree] = dataclasses.field(default_factory=dict)

  @classmethod
  def grow(cls, sequences: Sequence[Sequence[int]]) -> LabelTree:
    """The tree of labels given as ids, each with the tokens that end it, so that none is the beginning of another.

    Raises:
      UserError: if one is all the same.
    """
    root = cls()
    for label, sequence in enumerate(sequences):
      place = root
      place.labels.append(label)
      for token in sequence:
        place = place.children.setdefault(int(token), cls())
        place.labels.append(label)
    ends = [_follow(root, sequence) for sequence in sequences]
    if any(len(end.labels) > 1 for end in ends):
      same = max((end.labels for end in ends), key=len)
      raise UserError(f"labels {', '.join(map(str, same))} (counted from 0) cannot be told apart by their tokens; rename all but one")
    return root


def _follow(place: LabelTree, sequence: Sequence[int]) -> LabelTree:
  for token in sequence:
    place = place.children[int(token)]
  return place


def decode_labels(sampler: Sampler, state: SamplerState, count: int, tree: LabelTree) -> list[int]:
  """The label that each row would write, if it took the likeliest token of those that lead to a label.

  A row is asked no further than to the token that tells its label from all others.

  Args:
    sampler: has read the prompts.
    state: what came of it; used up.
    count: rows that hold a prompt, the first ones.
    tree: of at least one label.

  Returns:
    Numbers of labels.
  """
  places = [tree] * count
  while True:
    undecided = [row for row, place in enumerate(places) if len(place.labels) > 1]
    if not undecided:
      return [place.labels[0] for place in places]
    logits, tokens = np.asarray(state.logits), np.zeros(sampler.batch_size, np.int32)
    for row in undecided:
      choices = list(places[row].children)
      tokens[row] = choices[int(np.argmax(logits[row, choices]))]
      places[row] = places[row].children[int(tokens[row])]
    if any(len(place.labels) > 1 for place in places):
      state = sampler.step(state, tokens)
