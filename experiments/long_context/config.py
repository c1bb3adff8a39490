"""Length extensions of the models of the experiment ablations.

Variants have the same names as in ablations. A few steps on longer rows start
from the parameters of a finished run:

    python -m diffjax.train --config=experiments/long_context/config.py:diff \
      --workdir=runs/diff_2k --config.train.init_from=runs/diff

The paper extends 4K to 64K, with a RoPE base of 10,000 to 640,000 and learning
rates of 3.2e-4 to 8e-5. As there, the base grows with the length to the power
1.5, and the learning rate starts at a quarter of the first run's. A step has as
many tokens as a step of the first run.
"""

from typing import NamedTuple

import ml_collections

from experiments import architectures


class Extension(NamedTuple):
  """The extension of a model.

  Attributes:
    length: The new length of rows.
    steps: The number of steps.
    accumulation: The number of micro-batches of a step.
  """

  length: int
  steps: int
  accumulation: int


# By size. The tokens are 0.25 M (a tenth of the first run's), 0.1 B and 1.5 B
# (the paper's).
EXTENSIONS = {
  "tiny": Extension(length=2048, steps=60, accumulation=1),
  "125m": Extension(length=16_384, steps=400, accumulation=16),
  "1b": Extension(length=65_536, steps=5_722, accumulation=1),
}


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config that extends a variant such as "diff,size=1b"."""
  row, size, heads = architectures.read_variant(variant)
  config = architectures.language_model(row, size, heads)
  extension = EXTENSIONS[size]
  factor = extension.length // config.data.length
  config.model.max_length = extension.length
  config.model.rope_base *= factor**1.5
  config.data.length = extension.length
  config.optimizer.learning_rate /= 4
  config.optimizer.warmup_steps = extension.steps // 12
  config.train.steps = extension.steps
  # Rows are longer, so a step has as many tokens as before.
  config.train.batch_size //= factor
  config.train.accumulation = extension.accumulation
  config.eval.update(interval=extension.steps, rows=64)
  if size != "tiny":
    # Books: the documents of C4 are shorter than these rows.
    config.data.update(source="tfds:pg19", text_field="book_text")
    config.model.remat = "full"
  return config
