"""DIFF, the Transformer or DIFF V2 with 27M parameters. A variant is ARCHITECTURE for a run, or ARCHITECTURE,rate=RATE for a pilot.

    python -m diffjax.train --config=experiments/one_gpu/config.py:diff,rate=0.002 --workdir=runs/pilot

A run takes 79M tokens, a pilot a quarter of them at the learning rate RATE. README.md says where text, tokenizer and rows come from.
"""

import ml_collections

from diffjax.configs import base

ARCHITECTURES = ("transformer", "diff", "diff_v2")
# Learning rates of the pilots, in their order. The first one is the default: it serves if no pilots could be made.
RATES = (0.002, 0.001, 0.004)


def parts(variant: str) -> tuple[str, float | None]:
  """The architecture, and the learning rate of a pilot (None for a run)."""
  architecture, rate = base.read_variant(
    variant, architecture=("diff", ARCHITECTURES), rate=(None, float)
  )
  return architecture, rate


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  architecture, rate = parts(variant)
  config = base.get_config()
  config.model.update(
    vocab_size=4096,
    num_layers=8,
    embed_dim=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    ffn_dim=1360,
  )
  config.model.attention_implementation = (
    "two_call"  # on GPUs through cuDNN, for every architecture alike
  )
  config.data.update(
    source="text:runs/one_gpu/work/text/*.py",
    tokenizer="runs/one_gpu/pack/tokenizer/tokenizer.json",
    length=1024,
  )
  config.data.update(
    validation_fraction=0.02, prepared_dir="runs/one_gpu/work/rows"
  )
  steps = 1200 if rate is None else 300
  config.optimizer.update(
    learning_rate=rate or RATES[0], warmup_steps=steps // 20
  )
  config.train.update(
    steps=steps, batch_size=64, checkpoint_interval=steps, sample_tokens=0
  )
  config.train.max_skipped_in_a_row = 0  # a pilot whose rate is too high ends with a high loss, and the others go on
  config.eval.update(interval=steps, rows=-1)
  return base.twin(config, architecture)
