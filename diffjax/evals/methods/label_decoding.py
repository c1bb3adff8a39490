"""Greedy decoding that can only write one of several labels.

The tokens of the labels form a tree. A row starts at the root. At each step it
goes to the child whose token is the most likely one, until the node has a
single label. For the labels "red" (r, ed), "rose" (r, ose) and "blue" (bl, ue):

    root ── r ─┬─ ed
         │     └─ ose
         └─ bl ── ue

A row that chooses "bl" has the label "blue". It does not decode "ue".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from diffjax.config import UserError
from diffjax.inference.sampler import Sampler, SamplerState


@dataclasses.dataclass
class LabelTree:
  """A node of the tree of labels.

  Attributes:
    labels: The indices of the labels at or below the node.
    children: The next nodes, by token.
  """

  labels: list[int] = dataclasses.field(default_factory=list)
  children: dict[int, LabelTree] = dataclasses.field(default_factory=dict)

  @classmethod
  def grow(cls, sequences: Sequence[Sequence[int]]) -> LabelTree:
    """Builds the tree of labels, and returns its root.

    Args:
      sequences: The tokens of each label. They include the tokens that end it,
        so that no label is the beginning of another.

    Raises:
      UserError: if labels have the same tokens.
    """
    root = cls()
    last_nodes = []
    for label, sequence in enumerate(sequences):
      node = root
      node.labels.append(label)
      for token in sequence:
        node = node.children.setdefault(int(token), cls())
        node.labels.append(label)
      last_nodes.append(node)

    # Labels that end at the same node have the same tokens.
    largest_node = max(last_nodes, key=cls.num_labels, default=root)
    if largest_node.num_labels() > 1:
      names = ", ".join(map(str, largest_node.labels))
      raise UserError(
        f"labels {names} (counted from 0) have the same tokens; rename all but"
        " one"
      )
    return root

  def num_labels(self) -> int:
    """Returns the number of labels at or below the node."""
    return len(self.labels)

  @property
  def is_decided(self) -> bool:
    """Whether a single label is left."""
    return self.num_labels() == 1

  def most_likely_token(self, logits: Float[np.ndarray, "N"]) -> int:
    """Returns the token of the child with the highest logit."""
    tokens = list(self.children)
    return tokens[int(np.argmax(logits[tokens]))]


def decode_labels(
  sampler: Sampler, state: SamplerState, count: int, tree: LabelTree
) -> list[int]:
  """Returns the label of each row, by greedy decoding among the labels.

  Each row follows the tree from its root to a node with a single label. At each
  node it takes the most likely of the tokens that continue a label.

  Args:
    sampler: The sampler, which has read the prompts.
    state: The sampler's state. It is donated: it must not be used afterwards.
    count: The number of rows with a prompt. They are the first rows.
    tree: The root of a tree with at least one label.

  Returns:
    The index of the label of each row.
  """
  nodes = [tree] * count
  while not _are_decided(nodes):
    logits = np.asarray(state.logits)
    # Rows that are decided get the token 0. Their logits are not used.
    tokens = np.zeros(sampler.batch_size, np.int32)
    for row, node in enumerate(nodes):
      if not node.is_decided:
        token = node.most_likely_token(logits[row])
        tokens[row] = token
        nodes[row] = node.children[token]
    # The model reads no tokens after the last decision.
    if not _are_decided(nodes):
      state = sampler.step(state, tokens)
  return [node.labels[0] for node in nodes]


def _are_decided(nodes: Sequence[LabelTree]) -> bool:
  """Returns whether each row has a single label."""
  return all(node.is_decided for node in nodes)
