"""The parts of a Transformer in float64 NumPy, for one sequence.

They are independent of diffjax. T is the number of tokens.
"""

import numpy as np


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
  """Returns x divided by its root mean square, times the gain."""
  mean_square = (x**2).mean(-1, keepdims=True)
  return x / np.sqrt(mean_square + eps) * gain


def swiglu(
  x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> np.ndarray:
  """Returns the feed-forward layer of x. Matrices are [outputs, inputs]."""
  hidden = x @ gate.T
  silu = hidden / (1 + np.exp(-hidden))
  return (silu * (x @ up.T)) @ down.T


def rotate(x: np.ndarray, base: float, *, interleaved: bool) -> np.ndarray:
  """Returns queries or keys after RoPE.

  Args:
    x: queries or keys of shape [T, heads, D].
    base: the base of the angles.
    interleaved: whether the pairs are the dimensions (2j, 2j + 1), instead of
      (j, j + D/2).
  """
  num_tokens, _, head_dim = x.shape
  positions = np.arange(num_tokens)[:, None, None]
  frequencies = base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
  angles = positions * frequencies
  if interleaved:
    first = x[..., 0::2]
    second = x[..., 1::2]
  else:
    first, second = np.split(x, 2, axis=-1)

  new_first = first * np.cos(angles) - second * np.sin(angles)
  new_second = second * np.cos(angles) + first * np.sin(angles)
  if interleaved:
    return np.stack([new_first, new_second], axis=-1).reshape(x.shape)
  return np.concatenate([new_first, new_second], axis=-1)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
  """Returns the output of one causal softmax map.

  Args:
    q: queries of shape [T, D].
    k: keys of shape [T, D].
    v: values of shape [T, V].
  """
  is_visible = np.tri(len(q), dtype=bool)
  scores = np.where(is_visible, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True) @ v
