"""`tiny` at the settings of the experiment fairness, trained on more tokens.

A variant is ROW, with times=TIMES to multiply the number of tokens. The
schedule is as long as the run:

    python -m diffjax.train \
      --config=experiments/tokens/config.py:diff,times=12 \
      --workdir=runs/diff_12_times
"""

import ml_collections

from diffjax.configs import base
from experiments import architectures

# The learning rates with the lowest mean validation loss in
# `python -m experiments.run fairness --grid=tune`. The comments name the
# variants of that grid.
LEARNING_RATES = {
  # transformer,scale=1,rate=0.003
  "transformer": 0.003,
  # transformer_norm,scale=1,rate=0.003
  "transformer_norm": 0.003,
  # diff,scale=1,rate=0.003
  "diff": 0.003,
  # diff_v2,scale=root,rate=0.006
  "diff_v2": 0.006,
}
# The rows for which that grid chose scale=root: model.embed_scale = √E.
ROOT_SCALED = ("diff_v2",)
ROWS = tuple(LEARNING_RATES)


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config of a variant such as "diff,times=12"."""
  row, times = base.read_variant(
    variant,
    row=base.Option(default="diff", allowed=ROWS),
    times=base.Option(default=1, allowed=int),
  )
  config = architectures.language_model(row)
  config.model.embed_scale = 1.0
  if row in ROOT_SCALED:
    config.model.embed_scale = config.model.embed_dim**0.5
  config.optimizer.learning_rate = LEARNING_RATES[row]
  config.train.steps *= times
  config.optimizer.warmup_steps *= times
  config.eval.interval = config.train.steps
  return config
