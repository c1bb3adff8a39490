"""Decoding constrained to a set of labels, greedy over the tree of the labels' tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from diffjax.config import UserError
from diffjax.inference.sampler import Sampler, SamplerState


@dataclasses.dataclass
class LabelTree:
  """A node of the tree.

  Attributes:
    labels: The labels below it.
    children: The next nodes, by their tokens.
  """

  labels: list[int] = dataclasses.field(default_factory=list)
  children: dict[int, LabelTree] = dataclasses.field(default_factory=dict)

  @classmethod
  def grow(cls, sequences: Sequence[Sequence[int]]) -> LabelTree:
    """Makes the tree of labels.

    Args:
      sequences: The tokens of each label, the ones that end it included, so that no label is the beginning of another.

    Raises:
      UserError: if labels have the same tokens.
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
      raise UserError(
        f"labels {', '.join(map(str, same))} (counted from 0) have the same tokens; rename all but one"
      )
    return root


def _follow(place: LabelTree, sequence: Sequence[int]) -> LabelTree:
  for token in sequence:
    place = place.children[int(token)]
  return place


def decode_labels(
  sampler: Sampler, state: SamplerState, count: int, tree: LabelTree
) -> list[int]:
  """Decodes a label for each row: at each step the likeliest of the tokens that lead to a label.

  A row is decoded up to the token that distinguishes its label from all others.

  Args:
    sampler: The sampler that has read the prompts.
    state: Its state, which is used up.
    count: Number of rows with a prompt, the first ones.
    tree: A tree of at least one label.

  Returns:
    The index of each row's label.
  """
  places = [tree] * count
  while True:
    undecided = [
      row for row, place in enumerate(places) if len(place.labels) > 1
    ]
    if not undecided:
      return [place.labels[0] for place in places]
    logits, tokens = (
      np.asarray(state.logits),
      np.zeros(sampler.batch_size, np.int32),
    )
    for row in undecided:
      choices = list(places[row].children)
      tokens[row] = choices[int(np.argmax(logits[row, choices]))]
      places[row] = places[row].children[int(tokens[row])]
    if any(len(place.labels) > 1 for place in places):
      state = sampler.step(state, tokens)
