"""`tiny` at fairness's settings, trained on more tokens. A variant is ROW, with times=TIMES the tokens if wanted; the schedule is as long.

python -m diffjax.train --config=experiments/tokens/config.py:diff,times=12 --workdir=runs/diff_12_times
"""

import ml_collections

from diffjax.configs import base
from experiments.fairness.config import get_config as get_tuned

ROWS = ("transformer", "transformer_norm", "diff", "diff_v2")


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  row, times = base.read_variant(variant, row=("diff", ROWS), times=(1, int))
  config = get_tuned(row)
  config.train.steps *= times
  config.optimizer.warmup_steps *= times
  config.eval.interval = config.train.steps
  return config
