"""Differential attention of new tokens to a cache of keys and values.

`api.py` has the operation. It checks the arguments (`arguments.py`), chooses an
implementation (`choice.py`) and runs it: `xla.py`, or the kernels in `tpu.py`
and `gpu.py`. The implementations agree, and use only `inputs.py` of the other
files.

Reading the cache takes most of the time of decoding. All implementations
therefore read keys and values once, for all maps and for all query heads that
share a key head.

Axis letters in addition to those in diffjax/parameters.py:
  P: pages of the pool, the memory that all sequences share.
  S: keys of a page.
  N: pages of a sequence. Its block table lists their ids in order.
  R: queries of one map that share a key head, T·H/K. They are ordered by token,
    and then by head.

A cache without block tables is a pool in which page b has all keys of sequence
b. Then P = B and N = 1.
"""

from diffjax.ops.diff_attention.decode.api import decode_attention

__all__ = ["decode_attention"]
