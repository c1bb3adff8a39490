"""DIFF, the Transformer or DIFF V2 with 27M parameters, trained on 79M tokens.

    python -m diffjax.train --config=experiments/one_gpu/config.py:diff \\
      --workdir=runs/one_gpu_diff

A variant is an architecture, or ARCHITECTURE,rate=RATE for a run of the grid
"tune", which takes a quarter of the tokens. README.md says how to train the
tokenizer.
"""

import ml_collections

from diffjax.configs import base

ARCHITECTURES = ("transformer", "diff", "diff_v2")
# The learning rates of the grid "tune".
RATES = (0.001, 0.002, 0.004)
# The learning rate of each architecture. The grid "tune" has not run yet. After
# it has, each rate is the one with the lowest validation loss in
# tune/results.json.
LEARNING_RATES = {"transformer": 0.002, "diff": 0.002, "diff_v2": 0.002}

VOCAB_SIZE = 4096
STEPS = 1200
TUNE_STEPS = 300


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  """Returns the config of a variant.

  Args:
    variant: A name in ARCHITECTURES. A variant with a learning rate, such as
      "diff,rate=0.001", is a run of the grid "tune".
  """
  architecture, rate = base.read_variant(
    variant,
    architecture=base.Option(default="diff", allowed=ARCHITECTURES),
    rate=base.Option(default=None, allowed=float),
  )
  if rate is None:
    rate = LEARNING_RATES[architecture]
    steps = STEPS
  else:
    steps = TUNE_STEPS

  config = base.get_config()
  config.model.update(
    vocab_size=VOCAB_SIZE,
    num_layers=8,
    embed_dim=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    ffn_dim=1360,
    # Stock attention for all architectures, on GPUs through cuDNN.
    attention_implementation="two_call",
  )
  config.data.update(
    source=base.fineweb_edu("sample/100BT/*.parquet"),
    # A file has more tokens than a run takes, so no token is seen twice.
    files=1,
    tokenizer="runs/one_gpu/tokenizer/tokenizer.json",
    length=1024,
    prepared_dir="runs/one_gpu/rows",
  )
  config.optimizer.update(learning_rate=rate, warmup_steps=steps // 20)
  config.train.update(
    steps=steps,
    batch_size=64,
    checkpoint_interval=steps,
    sample_tokens=0,
    # A run whose rate is too high ends with a high loss, not with an error.
    max_skipped_in_a_row=0,
  )
  config.eval.update(interval=steps, rows=2048)
  return base.twin(config, architecture)
