"""Length extensions of ablations' models, by the same variants: a few steps on longer rows, from a finished run's parameters.

    python -m diffjax.train --config=experiments/long_context/config.py:diff --workdir=runs/diff_2k --config.train.init_from=runs/diff

As in the paper (4K to 64K, RoPE base 10,000 to 640,000, learning rate 3.2e-4 to 8e-5), the base grows with the length to the power 1.5, and
the learning rate starts at a quarter of the run's own. A step has as many tokens as in the run.
"""

import ml_collections

from experiments.ablations import config as ablations

# By size: the new length, steps (0.25 M tokens, a tenth of the run's own; 0.1 B; the paper's 1.5 B), and micro-batches a step
EXTENSIONS = {
  "tiny": (2048, 60, 1),
  "125m": (16_384, 400, 16),
  "1b": (65_536, 5_722, 1),
}


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  _, size, _ = ablations.parts(variant)
  config = ablations.get_config(variant)
  length, steps, accumulation = EXTENSIONS[size]
  factor = length // config.data.length
  config.model.update(
    max_length=length, rope_base=config.model.rope_base * factor**1.5
  )
  config.data.length = length
  config.optimizer.update(
    learning_rate=config.optimizer.learning_rate / 4, warmup_steps=steps // 12
  )
  config.train.update(
    steps=steps,
    batch_size=config.train.batch_size // factor,
    accumulation=accumulation,
  )
  config.eval.update(interval=steps, rows=64)
  if size != "tiny":  # books: C4's documents are shorter than these rows
    config.data.update(source="tfds:pg19", text_field="book_text")
    config.model.remat = "full"
  return config
