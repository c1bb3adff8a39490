"""`tiny` with each architecture at its own settings.

A variant is ROW, with scale=1|root and rate=LEARNING_RATE if wanted:

    python -m diffjax.train \
      --config=experiments/fairness/config.py:diff,scale=root,rate=0.003 \
      --workdir=runs/diff_root

ROW is one of `ROWS`. scale is model.embed_scale: 1 or √E. A row without both
has the settings that the grid "tune" chose.
"""

import ml_collections

from diffjax.configs import base
from experiments import architectures

# The scale and the learning rate of each row, by the lowest mean validation
# loss in `python -m experiments.run fairness --grid=tune`. The comments name
# the variants of that grid. Their results are in tune/results.json.
TUNED = {
  # transformer,scale=1,rate=0.003
  "transformer": ("1", 0.003),
  # transformer_norm,scale=1,rate=0.003
  "transformer_norm": ("1", 0.003),
  # diff,scale=1,rate=0.003
  "diff": ("1", 0.003),
  # diff_without_norm,scale=1,rate=0.003
  "diff_without_norm": ("1", 0.003),
  # diff_v2,scale=root,rate=0.006
  "diff_v2": ("root", 0.006),
  # gated,scale=1,rate=0.006
  "gated": ("1", 0.006),
}
# "gated" is the Transformer with a gate on the output of each head. The gate
# adds an E × E matrix to each layer, and the feed-forward layer is narrower by
# as much, as in DIFF V2.
ROWS = tuple(TUNED)
# The values that the grid "tune" tries.
SCALES = ("1", "root")
RATES = (0.0015, 0.003, 0.006)


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config of a variant such as "diff,scale=root,rate=0.003"."""
  row, scale, rate = base.read_variant(
    variant,
    row=base.Option(default="diff", allowed=ROWS),
    scale=base.Option(default=None, allowed=SCALES),
    rate=base.Option(default=None, allowed=float),
  )
  if scale is None and rate is None:
    scale, rate = TUNED[row]
  config = architectures.language_model(row)
  config.model.embed_scale = 1.0
  if scale == "root":
    config.model.embed_scale = config.model.embed_dim**0.5
  # A variant with scale= alone has the learning rate of `tiny`.
  if rate is not None:
    config.optimizer.learning_rate = rate
  return config
