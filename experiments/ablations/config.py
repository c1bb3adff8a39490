"""The rows of the paper's ablation table and of the V2 post's. A variant is ROW, with size=SIZE and heads=NUMBER if wanted.

    python -m diffjax.train --config=experiments/ablations/config.py:diff_without_norm --workdir=runs/diff_without_norm
    python -m diffjax.train --config=experiments/ablations/config.py:diff,size=1b,heads=4 --workdir=runs/diff_of_4_heads_1b

ROW is a key of ROWS. SIZE is tiny (the default), session (minutes on one GPU, experiments/gpu_session.sh), 125m or 1b (the paper's).
heads=NUMBER divides the width among so many heads: d = E / 2N for DIFF with N heads.
"""

import importlib
from collections.abc import Collection

import ml_collections

from configs import base

LAMBDAS = "lambda_q1,lambda_k1,lambda_q2,lambda_k2"


def _diff(config, **model):
  config.model.update(model)
  return config


def _wide(config, head_norm):
  """The Transformer with DIFF's number of heads, each as wide as a pair of DIFF's: the same matrices."""
  config.model.update(attention="softmax", head_dim=2 * config.model.head_dim, head_norm=head_norm)
  return config


def _frozen(config):
  config.optimizer.frozen = LAMBDAS
  return config


def _linear(config):
  config = base.twin(config, "diff_v2")
  config.model.attention = "diff_v2_linear"
  return config


# From the rows to functions that turn a DIFF config into them
ROWS = {
  "transformer": lambda config: base.twin(config, "transformer"),
  "transformer_wide": lambda config: _wide(config, head_norm=False),
  "transformer_norm": lambda config: _wide(config, head_norm=True),
  "diff": _diff,
  "diff_without_norm": lambda config: _diff(config, head_norm=False),
  "diff_lambda_0.8": lambda config: _diff(config, lambda_init=0.8),
  "diff_lambda_0.5": lambda config: _diff(config, lambda_init=0.5),
  "diff_frozen_lambda": _frozen,
  "diff_v2": lambda config: base.twin(config, "diff_v2"),
  "diff_v2_linear": _linear,
}
SIZES = {"tiny": "tiny", "session": "diff_125m", "125m": "diff_125m", "1b": "diff_1b"}


def _session(config):
  """The 125M shape with a vocabulary of 16,384 (98M parameters), trained on almost three times the standard library's 7.3M tokens.

  Estimate: 6N and the attention are 0.7 GFLOPs a token, so 1.5e16 FLOPs in 320 steps of 65,536 tokens, or 37 s at 40% of an H100's 990
  TFLOP/s. Twice that, for safety, and 75 s to start, compile, validate and save are 150 s a run: three runs in a command of 540 s, nine
  runs (three seeds) in 23 minutes. At the expected speed, with compiled programs cached, five seeds take about as long.
  """
  config.model.update(vocab_size=16_384)
  config.data.update(source="stdlib", length=1024)
  config.optimizer.update(learning_rate=1e-3, warmup_steps=40)
  config.train.update(steps=320, batch_size=64, accumulation=2, checkpoint_interval=320)
  config.eval.update(interval=64, rows=-1)


def parts(variant: str, sizes: Collection[str] = SIZES) -> tuple[str, str, int | None]:
  """The row, the size and the number of heads (None for the row's own) that a variant names."""
  row, size, heads = base.read_variant(variant, row=("diff", ROWS), size=("tiny", sizes), heads=(None, int))
  return row, size, heads


def get_config(variant: str = "diff") -> ml_collections.ConfigDict:
  row, size, heads = parts(variant)
  config = importlib.import_module(f"configs.{SIZES[size]}").get_config()
  if config.data.tokenizer == "bytes":  # one validation, at the end, with enough rows to see small differences
    config.eval.update(interval=config.train.steps, rows=2048)
  if size == "session":
    _session(config)
  config.train.sample_tokens = 0
  return base.with_heads(ROWS[row](config), heads)
