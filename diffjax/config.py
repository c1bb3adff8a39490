"""What a run's config may hold: every field with its unit, default and check.

A config file (``configs/*.py``) returns these fields as an ``ml_collections.ConfigDict``; `diffjax.command` turns that into the frozen,
checked dataclasses that the rest of the code reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any


class UserError(Exception):
  """Something the user can mend. Commands print it as one line and exit with 1."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder. Letters as everywhere: B T S H K G M D V E F L N (see CONTRIBUTING.md)."""

  # "diff" (DIFF V1), "diff_v2" (DIFF V2), "softmax" (the Transformer baseline), or "diff_v2_linear" (an ablation: V2 without the sigmoid)
  attention: str = "diff"
  # N: rows of the embedding; at least the tokenizer's size, and less than 256 more than it
  vocab_size: int = 256
  # L
  num_layers: int = 4
  # E: width of the residual stream
  embed_dim: int = 128
  # H: heads that write to the residual stream. DIFF V1 has half as many as its Transformer twin, DIFF V2 as many
  num_heads: int = 2
  # K: key/value heads; divides num_heads
  num_kv_heads: int = 2
  # D: width of a query and key. V is 2D wide in DIFF V1 and D wide otherwise
  head_dim: int = 32
  # F: hidden width of the SwiGLU
  ffn_dim: int = 352
  # Longest row, tokens
  max_length: int = 2048
  # RoPE base (angle = position · base^(−2j/D))
  rope_base: float = 10_000.0
  # RMSNorm of each head's output, with one gain vector per layer. The paper's DIFF V1 has it, V2 and the baseline do not
  head_norm: bool = True
  # λ_init of DIFF V1: a constant for every layer, or None for the paper's 0.8 − 0.6·exp(−0.3·l)
  lambda_init: float | None = None
  # ε of every RMSNorm
  norm_eps: float = 1e-5
  # One matrix for the embedding and the output projection
  tie_embeddings: bool = True
  # Compute dtype: "bfloat16", "float32" or "auto" (bfloat16, but float32 on CPU). Parameters are always float32
  dtype: str = "auto"
  # Which diff_attention: "auto", "reference", "chunked", "two_call", …
  attention_implementation: str = "auto"
  # What is computed again in the backward pass instead of kept, from the most memory to the least: "none" (nothing), "dots" (all but
  # matrix products and attention), "ffn" (all but attention and the feed-forward layer's first two products), "gate" (all but attention and
  # one of the two), "attention" (all but attention) or "full" (everything). `diffjax.aot --remat` tells what each would take
  remat: str = "none"


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from and how they become rows."""

  # One source, or a weighted mixture: "A" or "A=0.7,B=0.3". A source is "stdlib" (the embedded default: the Python standard
  # library's own source), "tfds:c4/en" (any TFDS builder on disk), "text:GLOB", "jsonl:GLOB" (also .gz, .zst) or "parquet:GLOB"
  source: str = "stdlib"
  # Source of the validation rows; "" holds out a part of `source`: its validation split if it has one, else validation_fraction
  validation_source: str = ""
  # Share of the documents (by hash of their text) held out for validation where the source has no such split
  validation_fraction: float = 0.01
  # TFDS data directory; "" for the TFDS default
  data_dir: str = ""
  # Field of a record that holds its text, or with prompt_field the answer. A dot goes into it: "conversations.-1.value" is the field
  # "value" of the last item of the list "conversations"
  text_field: str = "text"
  # Field of a record that holds the prompt to its answer, so that answers alone are learnt (targets in the prompt have weight 0);
  # "" for plain text
  prompt_field: str = ""
  # What stands before an answer, around its prompt
  prompt_template: str = "Question: {prompt}\nAnswer:\n"
  # "bytes", "cl100k_base", or a file: *.tiktoken (see diffjax.prepare --train_tokenizer) or a Hugging Face tokenizer.json
  tokenizer: str = "bytes"
  # T: tokens a row that the model sees (a stored row has one more, for the last target)
  length: int = 256
  # "documents" (whole documents packed into rows, segment ids, positions that restart) or "concat" (concatenate and split)
  packing: str = "documents"
  # "prepared" (rows packed once by diffjax.prepare; batch n is a function of seed and n) or "streamed" (on the fly)
  mode: str = "prepared"
  # Directory of prepared rows; "" for one in the user's cache, named by what is in it
  prepared_dir: str = ""
  # Worker processes that read; 0 reads in the training process
  num_workers: int = 0
  # Seconds without a batch after which reading counts as hung, and the run ends with an error instead of waiting
  timeout: float = 50.0
  # Seed of the order of rows
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW or Muon, its schedule and its limits."""

  # "adamw" or "muon" (Muon for the layers' matrices, AdamW for everything else)
  name: str = "adamw"
  # Peak learning rate
  learning_rate: float = 1e-3
  # Learning rate at the end, as a share of the peak
  final_fraction: float = 0.0
  # After the warmup: "linear", "cosine", or "wsd" (constant, then linear over the last decay_fraction of the steps)
  schedule: str = "linear"
  # Steps of linear warmup from 0; cut to train.steps if it is longer
  warmup_steps: int = 100
  # "wsd": share of the steps that decay
  decay_fraction: float = 0.2
  # Adam's β₁
  b1: float = 0.9
  # Adam's β₂
  b2: float = 0.95
  # Adam's ε
  eps: float = 1e-8
  # Decoupled weight decay of matrices (not of gains, λ vectors and embeddings)
  weight_decay: float = 0.1
  # Largest global norm of a gradient; 0 for no limit
  clip_norm: float = 1.0
  # Skip a step whose loss or gradient norm lies this many standard deviations above its mean of about the last 128 steps; 0 for none
  spike_sigmas: float = 6.0
  # "muon": momentum
  muon_momentum: float = 0.95
  # Parameters that stay as they were initialised, by name with commas between: "lambda_q1,lambda_k1,lambda_q2,lambda_k2"; "" for none
  frozen: str = ""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The loop."""

  # Steps (parameter updates) in all
  steps: int = 1000
  # B: rows of a step, over all devices and micro-batches
  batch_size: int = 16
  # Micro-batches a step
  accumulation: int = 1
  # Seed of the initialisation
  seed: int = 0
  # Tokens a device whose logits exist at once in the loss; 0 for 16 MiB of logits (at least 512 tokens), on TPU a 16th of its memory
  loss_chunk: int = 0
  # Coefficient of the z-loss (mean squared log-partition); 0 for none
  z_loss: float = 0.0
  # Another run's workdir to take the parameters from; "" for none
  init_from: str = ""
  # The run stops after this many skipped steps in a row (not finite, or optimizer.spike_sigmas); 0 for never
  max_skipped_in_a_row: int = 10
  # Steps between log lines
  log_interval: int = 10
  # Steps between checkpoints (one is also saved at the end)
  checkpoint_interval: int = 500
  # Newest checkpoints to keep (the best by validation loss is kept too)
  keep_checkpoints: int = 3
  # First step of the profiler's window; -1 for no profile
  profile_step: int = -1
  # Steps in the profiler's window
  profile_steps: int = 5
  # Weights & Biases project; "" for none
  wandb_project: str = ""
  # Prompt of the sample at the end of a run
  sample_prompt: str = "def "
  # Tokens of the sample at the end of a run; 0 for none
  sample_tokens: int = 200


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Validation inside the loop."""

  # Steps between evaluations (there is also one at the end); 0 for none
  interval: int = 500
  # Rows evaluated (fewer if the validation set has fewer); -1 for all
  rows: int = 256
  # AR-Hit: a target counts as a hit if it ends an n-gram of this many tokens seen earlier in its document
  ngram: int = 2


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis of the mesh; −1 takes what is left."""

  # Copies of the model, each with a share of the batch
  data: int = -1
  # Devices that share parameters and optimizer state, and the batch too
  fsdp: int = 1
  # Devices that share the tokens of a row: queries are split by length, keys and values are gathered
  context: int = 1
  # Devices that share heads, feed-forward columns and vocabulary
  tensor: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
  """All of one run."""

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()
  eval: EvalConfig = EvalConfig()
  mesh: MeshConfig = MeshConfig()

  def to_dict(self) -> dict[str, dict[str, Any]]:
    """Nested plain dict, as stored in checkpoints and logs."""
    return dataclasses.asdict(self)


# What the backward pass may keep of a layer, from the most memory to the least.
REMAT = ("none", "dots", "ffn", "gate", "attention", "full")

_CHOICES = {
  "model.attention": ("diff", "diff_v2", "diff_v2_linear", "softmax"),
  "model.dtype": ("auto", "bfloat16", "float32"),
  "model.remat": REMAT,
  "data.packing": ("documents", "concat"),
  "data.mode": ("prepared", "streamed"),
  "optimizer.name": ("adamw", "muon"),
  "optimizer.schedule": ("linear", "cosine", "wsd"),
}


def check(config: Config) -> None:
  """Raises UserError for the first field that cannot work with the others."""

  def require(ok: bool, field: str, got: Any, want: str):
    if not ok:
      raise UserError(f"config.{field} = {got!r}: {want}")

  def get(field: str):
    section, name = field.split(".")
    return getattr(getattr(config, section), name)

  for field, choices in _CHOICES.items():
    require(get(field) in choices, field, get(field), f"must be one of {', '.join(choices)}")
  for field, low in _AT_LEAST.items():
    require(get(field) >= low, field, get(field), f"must be at least {low}")
  for field in _SHARES:
    require(0 <= get(field) <= 1, field, get(field), "must lie between 0 and 1")
  for field in _POSITIVE:
    require(get(field) > 0, field, get(field), "must be positive")

  model, data, train, mesh = config.model, config.data, config.train, config.mesh
  require(
    model.num_heads % model.num_kv_heads == 0, "model.num_kv_heads", model.num_kv_heads, f"must divide model.num_heads = {model.num_heads}"
  )
  require(model.head_dim % 2 == 0, "model.head_dim", model.head_dim, "must be even: RoPE rotates pairs")
  require(
    model.attention == "diff" or model.lambda_init is None,
    "model.lambda_init",
    model.lambda_init,
    f"only attention = 'diff' has a λ_init; leave it None for {model.attention!r}",
  )
  require(
    data.prompt_template.count("{prompt}") == 1,
    "data.prompt_template",
    data.prompt_template,
    "must hold {prompt} once, where the prompt goes",
  )
  require(
    not data.prompt_field or data.packing == "documents",
    "data.packing",
    data.packing,
    f"must be 'documents' with config.data.prompt_field = {data.prompt_field!r}: answers see their own prompts only",
  )
  require(
    data.prompt_field != data.text_field, "data.prompt_field", data.prompt_field, "must be another field than data.text_field, the answer's"
  )
  require(data.length <= model.max_length, "data.length", data.length, f"must be at most model.max_length = {model.max_length}")
  require(
    train.batch_size % train.accumulation == 0,
    "train.accumulation",
    train.accumulation,
    f"must divide train.batch_size = {train.batch_size}",
  )
  sizes = (mesh.data, mesh.fsdp, mesh.context, mesh.tensor)
  require(
    all(size == -1 or size > 0 for size in sizes) and sizes.count(-1) <= 1,
    "mesh",
    dataclasses.asdict(mesh),
    "every axis must be positive, or −1 on one axis at most to take the devices left over",
  )


_AT_LEAST = {
  "model.vocab_size": 1,
  "model.num_layers": 1,
  "model.embed_dim": 1,
  "model.num_heads": 1,
  "model.num_kv_heads": 1,
  "model.head_dim": 2,
  "model.ffn_dim": 1,
  "model.max_length": 1,
  "data.length": 1,
  "data.num_workers": 0,
  "data.seed": 0,
  "optimizer.warmup_steps": 0,
  "optimizer.weight_decay": 0,
  "optimizer.clip_norm": 0,
  "optimizer.spike_sigmas": 0,
  "optimizer.learning_rate": 0,
  "train.steps": 0,
  "train.batch_size": 1,
  "train.accumulation": 1,
  "train.seed": 0,
  "train.loss_chunk": 0,
  "train.z_loss": 0,
  "train.max_skipped_in_a_row": 0,
  "train.log_interval": 1,
  "train.checkpoint_interval": 1,
  "train.keep_checkpoints": 1,
  "train.profile_step": -1,
  "train.profile_steps": 1,
  "train.sample_tokens": 0,
  "eval.interval": 0,
  "eval.rows": -1,
  "eval.ngram": 2,
}
_SHARES = (
  "data.validation_fraction",
  "optimizer.final_fraction",
  "optimizer.decay_fraction",
  "optimizer.b1",
  "optimizer.b2",
  "optimizer.muon_momentum",
)
_POSITIVE = ("model.norm_eps", "model.rope_base", "data.timeout", "optimizer.eps")
