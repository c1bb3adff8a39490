"""The config of a run: its fields, how it is read, and how it is checked.

Each field is declared once, with its default, its documentation and the values
that it may take. `FieldInfo` lists what else a declaration can say. Help texts,
config.toml, checks, resume and experiments use these declarations.

A config file (`configs/*.py`) returns the fields as an
`ml_collections.ConfigDict`. `from_config_dict` turns that into the frozen,
checked dataclasses that the rest of the code reads.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

if typing.TYPE_CHECKING:
  import ml_collections

Section = typing.TypeVar("Section")


class UserError(Exception):
  """An error that the user can fix.

  Commands print it as one line and exit with 1.
  """


@dataclasses.dataclass(frozen=True)
class Bound:
  """The values that a field may take: some strings, or a range of numbers.

  Attributes:
    choices: the strings. Empty for a range.
    low: the lowest number.
    high: the highest number.
    above_low: whether numbers must be above `low`, which excludes `low`.
  """

  choices: tuple[str, ...] = ()
  low: float = -math.inf
  high: float = math.inf
  above_low: bool = False

  def holds(self, value: Any) -> bool:
    """Returns True if the value is one of the choices, or in the range."""
    if self.choices:
      return value in self.choices
    if self.above_low and value == self.low:
      return False
    return self.low <= value <= self.high

  def __str__(self) -> str:
    """Returns the rule for error messages, such as "must be at least 1"."""
    if self.choices:
      return f"must be one of {', '.join(self.choices)}"
    if self.high < math.inf:
      return f"must lie between {self.low} and {self.high}"
    if self.above_low:
      # POSITIVE is the only such range.
      return "must be positive"
    return f"must be at least {self.low}"


def one_of(*choices: str) -> Bound:
  """Returns the bound of a field with some choices."""
  return Bound(choices=choices)


def at_least(low: int) -> Bound:
  """Returns the bound of a number that is `low` or more."""
  return Bound(low=low)


POSITIVE = Bound(low=0, above_low=True)
FRACTION = Bound(low=0, high=1)
# How much of a moving average each step keeps. With 1 the average stays 0, and
# its bias correction is 0 / 0. The bound is below 1 in float32 too.
DECAY_RATE = Bound(low=0, high=0.9999999)


@dataclasses.dataclass(frozen=True)
class FieldInfo:
  """The properties of a config field, besides its type and default.

  Attributes:
    documentation: what the field means, with its unit.
    bound: the values that the field may take. None for all of its type.
    may_change: whether a run can resume with another value.
    affects_results: False if runs with different values are comparable.
    belongs_to_run: True for a field of `ModelConfig` that is a property of the
      run and not of the model, such as the compute dtype.
    changes_function: False for a field of `ModelConfig` that does not change
      what the model computes from its parameters.
  """

  documentation: str
  bound: Bound | None = None
  may_change: bool = False
  affects_results: bool = True
  belongs_to_run: bool = False
  changes_function: bool = True


def field(
  default: Any,
  documentation: str,
  *,
  bound: Bound | None = None,
  may_change: bool = False,
  affects_results: bool = True,
  belongs_to_run: bool = False,
  changes_function: bool = True,
) -> Any:
  """Declares a field of a config dataclass, or a section with many fields.

  `FieldInfo` explains the arguments. `may_change = True` and
  `affects_results = False` of a section apply to all of its fields.
  """
  info = FieldInfo(
    documentation,
    bound,
    may_change=may_change,
    affects_results=affects_results,
    belongs_to_run=belongs_to_run,
    changes_function=changes_function,
  )
  return dataclasses.field(default=default, metadata={"info": info})


def field_info(declared: dataclasses.Field) -> FieldInfo:
  """Returns the `FieldInfo` of a field or of a section."""
  return declared.metadata["info"]


def is_declared(dataclass_field: dataclasses.Field) -> bool:
  """Returns True if a field of a dataclass was declared with `field`."""
  return "info" in dataclass_field.metadata


# The smallest and largest magnitude of a number of the optimizer that is not 0.
# Smaller and larger ones, or their products, would underflow or overflow in
# float32.
SMALLEST_MAGNITUDE, LARGEST_MAGNITUDE = 1e-30, 1e30

# Values of `ModelConfig.remat`, from the most memory to the least.
REMAT = ("none", "dots", "ffn", "gate", "attention", "full")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder. `diffjax/parameters.py` defines the letters."""

  attention: str = field(
    "diff",
    'The attention layer: "diff" (DIFF V1), "diff_v2" (DIFF V2), "softmax" (the'
    " Transformer baseline) or another variant of model/attention.py.",
  )
  plain_layers: int = field(
    0,
    "How many of the lowest layers have the Transformer's attention instead."
    " They have as many heads as the Transformer twin.",
    bound=at_least(0),
  )
  vocab_size: int = field(
    256,
    "N: rows of the embedding. At least the tokenizer's size, and less than 256"
    " more.",
    bound=at_least(1),
  )
  num_layers: int = field(
    4, "L: layers, including the plain layers.", bound=at_least(1)
  )
  embed_dim: int = field(
    128, "E: width of the residual stream.", bound=at_least(1)
  )
  num_heads: int = field(
    2,
    "H: heads that write to the residual stream. DIFF V1 has half as many as"
    " its Transformer twin, DIFF V2 has the same number.",
    bound=at_least(1),
  )
  num_noise_heads: int | None = field(
    None,
    "Q: noise maps. Each is shared by num_heads / num_noise_heads heads"
    " (grouped differential attention). None for one per head.",
  )
  num_kv_heads: int = field(
    2,
    "K: key/value heads. Divides num_noise_heads, or num_heads if that is"
    " None.",
    bound=at_least(1),
  )
  head_dim: int = field(
    32, "D: width of a query and of a key.", bound=at_least(2)
  )
  value_dim: int | None = field(
    None,
    "V: width of a value. None for the variant's default: 2D in DIFF V1, and D"
    " otherwise.",
  )
  ffn_dim: int = field(
    352, "F: hidden width of the feed-forward layer.", bound=at_least(1)
  )
  max_length: int = field(
    2048,
    "The longest row, in tokens.",
    bound=at_least(1),
    changes_function=False,
  )
  causal: bool = field(
    True,
    "A token sees only itself and earlier tokens. False is for encoders in a"
    " training loop of your own: diffjax.train rejects it.",
  )
  window: int | None = field(
    None,
    "How many keys a token sees, including its own (sliding window). None for"
    " all keys.",
  )
  window_pattern: str = field(
    "",
    'Which layers have the window, from the first: "w" has it, "f" sees all'
    ' keys. The pattern repeats, as in "wwwf". "" for all layers.',
  )
  rope: bool = field(
    True, "Rotary position embeddings (RoPE) of queries and keys."
  )
  rope_base: float = field(
    10_000.0,
    "Base of RoPE: angle = position · base^(−2j/D).",
    bound=POSITIVE,
  )
  rope_scaling: str = field(
    "none",
    "How RoPE's angles change for rows longer than in pretraining:"
    ' "none", "linear", "llama3" or "yarn". Rows of rope_original_length tokens'
    " become rope_factor times as long.",
    bound=one_of("none", "linear", "llama3", "yarn"),
  )
  rope_factor: float = field(
    1.0,
    "For rope_scaling: how many times as long rows become. Above 1 if rows are"
    " scaled.",
    bound=at_least(1),
  )
  rope_original_length: int = field(
    4096,
    "For rope_scaling: tokens in a row of the pretraining.",
    bound=at_least(1),
  )
  rope_dim: int | None = field(
    None,
    "How many of the D numbers of a query and key RoPE rotates. These are the"
    " last ones. None for all.",
  )
  projection_biases: bool = field(
    False, "Biases of the query, key, value and output projections."
  )
  head_norm: bool = field(
    True,
    "RMSNorm of each head's output, with one gain vector per layer. In the"
    " paper, DIFF V1 has it, and V2 and the baseline do not.",
  )
  head_norm_eps: float | None = field(
    None, "ε of the head norm. None for norm_eps."
  )
  lambda_init: float | None = field(
    None,
    "λ_init of DIFF V1: a constant for all layers. None for the paper's"
    " 0.8 − 0.6·exp(−0.3·l).",
  )
  lambda_init_offset: int = field(
    0,
    "Subtracted from the layer's number l, which starts at 0, in the paper's"
    " λ_init. With 1, as in Motif's models, a layer has the λ_init of the layer"
    " before it.",
    bound=at_least(0),
  )
  ffn_activation: str = field(
    "silu",
    'Activation of the feed-forward layer\'s gate: "silu" (SwiGLU) or'
    ' "poly_norm" (a learned polynomial of normed powers, arXiv:2411.03884).',
    bound=one_of("silu", "poly_norm"),
  )
  norm: str = field(
    "rms",
    'Norm before each half of a layer and at the end: "rms" (gain) or "layer"'
    " (LayerNorm: gain and shift). The head norm is always an RMSNorm.",
    bound=one_of("rms", "layer"),
  )
  norm_eps: float = field(1e-5, "ε of all norms.", bound=POSITIVE)
  tie_embeddings: bool = field(
    True, "One matrix for the embedding and the output projection."
  )
  embed_scale: float = field(
    1.0,
    "Factor on the embeddings that enter the first layer, but not on those of"
    " the output projection. Embeddings start at 1/√E, so that tied logits"
    " start at unit variance. With 1, as in the authors' code, tokens enter the"
    " first layer with this small size, and a layer with head norms adds"
    " several times as much to them at the start. With √E, tokens enter with an"
    " RMS of 1.",
    bound=POSITIVE,
  )
  dtype: str = field(
    "auto",
    'Compute dtype: "bfloat16", "float32" or "auto" (bfloat16, but float32 on'
    " CPU). Parameters are always float32.",
    bound=one_of("auto", "bfloat16", "float32"),
    belongs_to_run=True,
    changes_function=False,
  )
  attention_implementation: str = field(
    "auto",
    'Implementation of diff_attention: "auto", "reference", "chunked",'
    ' "two_call", …',
    may_change=True,
    belongs_to_run=True,
    changes_function=False,
  )
  remat: str = field(
    "none",
    "What the backward pass recomputes instead of storing it, from the most"
    ' memory to the least: "none" (nothing), "dots" (all but matrix products'
    ' and attention), "ffn" (all but attention and the first two products of'
    ' the feed-forward layer), "gate" (all but attention and one of these two),'
    ' "attention" (all but attention) or "full" (everything).'
    " `diffjax.aot --remat` prints what each of them takes.",
    bound=one_of(*REMAT),
    may_change=True,
    belongs_to_run=True,
    changes_function=False,
  )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The source of the tokens, and how they become rows."""

  source: str = field(
    "stdlib",
    'One source, or a weighted mixture: "A" or "A=0.7,B=0.3". A source is'
    ' "stdlib" (the embedded default: the source code of Python\'s standard'
    ' library), "tfds:c4/en" (any TFDS builder on disk), "text:GLOB",'
    ' "jsonl:GLOB" (also .gz, .zst) or "parquet:GLOB". A GLOB is local, in a'
    " bucket (gs://) or on the Hugging Face Hub:"
    ' "hf://datasets/ORG/NAME@REVISION/sample/*.parquet".',
  )
  files: int = field(
    0,
    "Files to read from each source of files, evenly spaced in the list of"
    " their names. 0 reads all local files, and as many hf:// files as the"
    " run's tokens need.",
    bound=at_least(0),
  )
  validation_source: str = field(
    "",
    'Source of the validation rows. "" holds out a part of `source`: its'
    " validation split if it has one, otherwise validation_fraction. If"
    " `source` is hf://, validation documents come from up to 1 GiB of its"
    " files, so that not everything is downloaded twice.",
  )
  validation_fraction: float = field(
    0.01,
    "Fraction of the documents that are held out for validation, by a hash of"
    " their text, if the source has no validation split.",
    bound=FRACTION,
  )
  data_dir: str = field("", 'TFDS data directory. "" for the TFDS default.')
  text_field: str = field(
    "text",
    "Field of a record that holds its text, or the answer if prompt_field is"
    ' set. Dots lead into nested fields: "conversations.-1.value" is the field'
    ' "value" of the last item of the list "conversations".',
  )
  prompt_field: str = field(
    "",
    "Field of a record that holds the prompt. Then only answers are learned:"
    ' targets in the prompt have weight 0. "" for plain text.',
  )
  prompt_template: str = field(
    "Question: {prompt}\nAnswer:\n",
    "The text before an answer. The prompt replaces {prompt}.",
  )
  tokenizer: str = field(
    "bytes",
    '"bytes", "cl100k_base", or a file: *.tiktoken (see diffjax.prepare'
    " --train_tokenizer) or a Hugging Face tokenizer.json, also on the Hub"
    ' ("hf://ORG/NAME@REVISION/tokenizer.json").',
  )
  length: int = field(
    256,
    "T: tokens of a row that the model sees. A stored row has one more, for the"
    " last target.",
    bound=at_least(1),
  )
  packing: str = field(
    "documents",
    '"documents" (packs whole documents into rows, with segment ids and'
    ' positions that restart) or "concat" (concatenates and splits).',
    bound=one_of("documents", "concat"),
  )
  mode: str = field(
    "prepared",
    '"prepared" (diffjax.prepare packs rows once; batch n is a function of seed'
    ' and n), "streamed" (tokenized during training) or "auto" (prepared in a'
    " run of one process, streamed in a run of several).",
    bound=one_of("prepared", "streamed", "auto"),
  )
  prepared_dir: str = field(
    "",
    'Directory of prepared rows. "" for one in the user\'s cache, named by a'
    " hash of the settings that decide its contents.",
    may_change=True,
    affects_results=False,
  )
  # A streamed run cannot resume with another number: training/resume.py.
  num_workers: int = field(
    0,
    "Worker processes that read. 0 reads in the training process.",
    bound=at_least(0),
    affects_results=False,
  )
  timeout: float = field(
    50.0,
    "Seconds to wait for a batch. After these, reading counts as hung, and the"
    " run ends with an error.",
    bound=POSITIVE,
    may_change=True,
    affects_results=False,
  )
  seed: int = field(0, "Seed of the order of rows.", bound=at_least(0))


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The optimizer, its schedule and its limits."""

  name: str = field(
    "adamw",
    '"adamw" or "muon" (Muon for the matrices of the layers, AdamW for'
    " everything else).",
    bound=one_of("adamw", "muon"),
  )
  learning_rate: float = field(1e-3, "Peak learning rate.", bound=at_least(0))
  final_fraction: float = field(
    0.0,
    "Learning rate at the end, as a fraction of the peak.",
    bound=FRACTION,
  )
  schedule: str = field(
    "linear",
    'After the warmup: "linear", "cosine" or "wsd" (constant, then linear over'
    " the last decay_fraction of the steps).",
    bound=one_of("linear", "cosine", "wsd"),
  )
  warmup_steps: int = field(
    100,
    "Steps of linear warmup from 0. At most train.steps are used.",
    bound=at_least(0),
  )
  decay_fraction: float = field(
    0.2, 'For "wsd": fraction of the steps that decay.', bound=FRACTION
  )
  b1: float = field(0.9, "β₁ of Adam.", bound=DECAY_RATE)
  b2: float = field(0.95, "β₂ of Adam.", bound=DECAY_RATE)
  eps: float = field(1e-8, "ε of Adam.", bound=POSITIVE)
  weight_decay: float = field(
    0.1,
    "Decoupled weight decay of matrices. Gains, λ vectors and embeddings do not"
    " decay.",
    bound=at_least(0),
  )
  clip_norm: float = field(
    1.0,
    "Largest global norm of a gradient. 0 for no limit.",
    bound=at_least(0),
  )
  spike_sigmas: float = field(
    6.0,
    "Skips a step whose loss or gradient norm is this many standard deviations"
    " above its mean of about the last 128 steps. 0 for never.",
    bound=at_least(0),
    may_change=True,
  )
  muon_momentum: float = field(
    0.95, 'For "muon": its momentum.', bound=DECAY_RATE
  )
  frozen: str = field(
    "",
    "Names of the parameters that stay as they start, with commas between:"
    ' "lambda_q1,lambda_k1,lambda_q2,lambda_k2". "" for none.',
  )
  trained: str = field(
    "",
    "Names of the only parameters that are trained, with commas between:"
    ' "dex_matrix,dex_lambda". "" for all but the frozen ones.',
  )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The training loop."""

  steps: int = field(
    1000,
    "Total number of steps (parameter updates).",
    bound=at_least(0),
    may_change=True,
  )
  batch_size: int = field(
    16,
    "B: rows of a step, over all devices and micro-batches.",
    bound=at_least(1),
  )
  accumulation: int = field(1, "Micro-batches per step.", bound=at_least(1))
  seed: int = field(0, "Seed of the initialization.", bound=at_least(0))
  loss_chunk: int = field(
    0,
    "Tokens per device whose logits exist at the same time in the loss. 0 for"
    " 16 MiB of logits (at least 512 tokens), or a 16th of a TPU's memory.",
    bound=at_least(0),
    may_change=True,
  )
  z_loss: float = field(
    0.0,
    "Coefficient of the z-loss (mean squared log-partition). 0 for none.",
    bound=at_least(0),
  )
  init_from: str = field(
    "",
    "Workdir of another run, from whose parameters this run starts."
    ' "" for none.',
    may_change=True,
  )
  max_skipped_in_a_row: int = field(
    25,
    "The run stops after this many consecutive skipped steps (not finite, or"
    " see optimizer.spike_sigmas). 0 for never. If the gradient norm becomes a"
    " hundred times larger and stays so, the limits follow within 25 steps.",
    bound=at_least(0),
    may_change=True,
    # It decides whether a run finishes, not what a finished run learned.
    affects_results=False,
  )
  log_interval: int = field(
    10,
    "Steps between log lines.",
    bound=at_least(1),
    may_change=True,
    affects_results=False,
  )
  checkpoint_interval: int = field(
    500,
    "Steps between checkpoints. One is also saved at the end.",
    bound=at_least(1),
    may_change=True,
    affects_results=False,
  )
  keep_checkpoints: int = field(
    3,
    "How many of the newest checkpoints to keep. The one with the best"
    " validation loss is kept too.",
    bound=at_least(1),
    may_change=True,
    affects_results=False,
  )
  profile_step: int = field(
    -1,
    "Number of steps done before the profile starts. −1 for no profile.",
    bound=at_least(-1),
    may_change=True,
    affects_results=False,
  )
  profile_steps: int = field(
    5,
    "Number of steps that are profiled.",
    bound=at_least(1),
    may_change=True,
    affects_results=False,
  )
  wandb_project: str = field(
    "",
    'Weights & Biases project. "" for none.',
    may_change=True,
    affects_results=False,
  )
  sample_prompt: str = field(
    "def ",
    "Prompt of the sample at the end of a run.",
    may_change=True,
    affects_results=False,
  )
  sample_tokens: int = field(
    200,
    "Tokens of the sample at the end of a run. 0 for none.",
    bound=at_least(0),
    may_change=True,
    affects_results=False,
  )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Validation during training."""

  interval: int = field(
    500,
    "Steps between evaluations. There is also one at the end. 0 for none.",
    bound=at_least(0),
  )
  rows: int = field(
    256,
    "Rows that are evaluated, fewer if the validation set has fewer. −1 for"
    " all.",
    bound=at_least(-1),
  )
  ngram: int = field(
    2,
    "AR-Hit: a target is a hit if it ends an n-gram of this many tokens that"
    " occurred earlier in its document.",
    bound=at_least(2),
  )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis of the mesh.

  `_check_mesh` checks the sizes together.
  """

  data: int = field(-1, "Copies of the model, each with a share of the batch.")
  fsdp: int = field(
    1,
    "Devices that share parameters and optimizer state, and also the batch.",
  )
  context: int = field(
    1,
    "Devices that share the tokens of a row. Each keeps its queries, and keys"
    " and values are passed around.",
  )
  tensor: int = field(
    1, "Devices that share heads, feed-forward columns and vocabulary."
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """All fields of a run."""

  model: ModelConfig = field(
    ModelConfig(),
    "The decoder. Letters are the axes that diffjax/parameters.py defines.",
  )
  data: DataConfig = field(
    DataConfig(), "The source of the tokens, and how they become rows."
  )
  optimizer: OptimizerConfig = field(
    OptimizerConfig(), "AdamW or Muon, its schedule and its limits."
  )
  train: TrainConfig = field(TrainConfig(), "The training loop.")
  eval: EvalConfig = field(
    EvalConfig(), "Validation during training.", may_change=True
  )
  mesh: MeshConfig = field(
    MeshConfig(),
    "Devices along each axis of the mesh. −1 on one axis takes the devices that"
    " are left.",
    may_change=True,
    affects_results=False,
  )

  def to_dict(self) -> dict[str, dict[str, Any]]:
    """Returns nested plain dicts, as stored in checkpoints and logs."""
    return dataclasses.asdict(self)


def _collect_fields() -> dict[str, FieldInfo]:
  """Returns the `FieldInfo` of every field, by its dotted name.

  A field also has what its section declares about all of its fields.
  """
  fields = {}
  config = Config()
  for section in dataclasses.fields(config):
    section_info = field_info(section)
    for declared in dataclasses.fields(getattr(config, section.name)):
      info = field_info(declared)
      fields[f"{section.name}.{declared.name}"] = dataclasses.replace(
        info,
        may_change=info.may_change or section_info.may_change,
        affects_results=info.affects_results and section_info.affects_results,
      )
  return fields


# The `FieldInfo` of every field, by its dotted name, such as "train.steps".
FIELDS = _collect_fields()

# Names of the fields of `ModelConfig` that belong to a run (see `FieldInfo`).
OF_THE_RUN = tuple(
  name.removeprefix("model.")
  for name, info in FIELDS.items()
  if info.belongs_to_run
)


def check(config: Config) -> None:
  """Checks that each field of a config is valid, and that they fit together.

  Raises:
    UserError: for the first field that is wrong. The message has its value and
      what is allowed.
  """
  check_bounds(config, "config")
  _check_heads(config.model)
  _check_rope(config.model)
  _check_optional_sizes(config.model)
  _check_window(config.model)
  _check_data(config.data, config.model)
  _check_optimizer(config.optimizer)
  _check_batch(config.train)
  _check_mesh(config.mesh)


def _error(name: str, value: Any, rule: str) -> UserError:
  """Returns the error for the value of a field.

  Args:
    name: the field's dotted name, such as "train.steps".
    value: the wrong value.
    rule: what the value must be.
  """
  return UserError(f"config.{name} = {value!r}: {rule}")


def check_bounds(values: Any, name: str) -> None:
  """Checks that each value of a dataclass is within its field's bound.

  Numbers must also be finite. The fields must be declared with `field`. The
  bound of a tuple holds for each of its items.

  Args:
    values: the dataclass. A field may be another dataclass, a section.
    name: the name of the dataclass in error messages, such as "config".

  Raises:
    UserError: for the first value that is wrong.
  """
  for declared in dataclasses.fields(values):
    value = getattr(values, declared.name)
    value_name = f"{name}.{declared.name}"
    if dataclasses.is_dataclass(value):
      check_bounds(value, value_name)
      continue
    items = value if isinstance(value, tuple) else (value,)
    bound = field_info(declared).bound
    for item in items:
      if bound is not None and not bound.holds(item):
        raise UserError(f"{value_name} = {item!r}: {bound}")
      if isinstance(item, float) and not math.isfinite(item):
        raise UserError(f"{value_name} = {item!r}: must be finite")


def _check_heads(model: ModelConfig) -> None:
  """Checks the numbers of layers, heads, noise maps and key/value heads."""
  if model.plain_layers >= model.num_layers:
    raise _error(
      "model.plain_layers",
      model.plain_layers,
      f"must be less than num_layers = {model.num_layers}",
    )
  if model.num_noise_heads is None:
    # Each head has its own noise map.
    num_noise_heads = model.num_heads
    noise_field = "num_heads"
  else:
    num_noise_heads = model.num_noise_heads
    noise_field = "num_noise_heads"
  if num_noise_heads < 1 or model.num_heads % num_noise_heads != 0:
    raise _error(
      "model.num_noise_heads",
      num_noise_heads,
      f"must divide model.num_heads = {model.num_heads}, or be None for one"
      " per head",
    )
  if num_noise_heads % model.num_kv_heads != 0:
    raise _error(
      "model.num_kv_heads",
      model.num_kv_heads,
      f"must divide model.{noise_field} = {num_noise_heads}",
    )


def _check_rope(model: ModelConfig) -> None:
  """Checks the fields of RoPE, and the width of the heads that it rotates."""
  if model.head_dim % 2 != 0:
    raise _error(
      "model.head_dim", model.head_dim, "must be even: RoPE rotates pairs"
    )
  valid_rope_dims = range(2, model.head_dim + 1, 2)
  if model.rope_dim is not None and model.rope_dim not in valid_rope_dims:
    raise _error(
      "model.rope_dim",
      model.rope_dim,
      f"must be even and at most model.head_dim = {model.head_dim}, or None for"
      " all",
    )
  if model.rope_scaling == "none":
    return
  above_1 = f"must be above 1 with model.rope_scaling = {model.rope_scaling!r}"
  if model.rope_factor <= 1:
    raise _error("model.rope_factor", model.rope_factor, above_1)
  if model.rope_scaling == "yarn" and model.rope_base <= 1:
    raise _error("model.rope_base", model.rope_base, above_1)


def _check_optional_sizes(model: ModelConfig) -> None:
  """Checks numbers that may also be None. A `Bound` cannot express that."""
  if model.head_norm_eps is not None and model.head_norm_eps <= 0:
    raise _error(
      "model.head_norm_eps", model.head_norm_eps, "must be positive, or None"
    )
  if model.value_dim is not None and model.value_dim < 1:
    raise _error(
      "model.value_dim", model.value_dim, "must be at least 1, or None"
    )


def _check_window(model: ModelConfig) -> None:
  """Checks the sliding window, and the pattern of layers that have it."""
  if not set(model.window_pattern) <= {"w", "f"}:
    raise _error(
      "model.window_pattern",
      model.window_pattern,
      "must be letters w (a layer with the window) and f (a full one), such as"
      ' "wwwf"',
    )
  if model.window is None:
    if model.window_pattern:
      raise _error(
        "model.window",
        model.window,
        "must be a number of keys with a window_pattern",
      )
    return
  if model.window < 1:
    raise _error(
      "model.window",
      model.window,
      "must be at least 1 (the token itself), or None for all keys",
    )
  if model.attention_implementation == "two_call":
    raise _error(
      "model.window",
      model.window,
      "must be None with model.attention_implementation = 'two_call', which"
      " takes no window; 'auto' and 'chunked' do",
    )


def _check_data(data: DataConfig, model: ModelConfig) -> None:
  """Checks the fields of prompts and answers, and the length of rows."""
  if data.prompt_template.count("{prompt}") != 1:
    raise _error(
      "data.prompt_template",
      data.prompt_template,
      "must hold {prompt} once, where the prompt goes",
    )
  if data.prompt_field and data.packing != "documents":
    raise _error(
      "data.packing",
      data.packing,
      "must be 'documents' with config.data.prompt_field ="
      f" {data.prompt_field!r}: answers see their own prompts only",
    )
  if data.prompt_field == data.text_field:
    raise _error(
      "data.prompt_field",
      data.prompt_field,
      "must be another field than data.text_field, the answer's",
    )
  if data.length > model.max_length:
    raise _error(
      "data.length",
      data.length,
      f"must be at most model.max_length = {model.max_length}",
    )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
  """Checks that all numbers fit float32, and which parameters are trained."""
  for declared in dataclasses.fields(optimizer):
    value = getattr(optimizer, declared.name)
    if not isinstance(value, float) or value == 0:
      continue
    if not SMALLEST_MAGNITUDE <= abs(value) <= LARGEST_MAGNITUDE:
      raise _error(
        f"optimizer.{declared.name}",
        value,
        f"must be 0, or between {SMALLEST_MAGNITUDE} and {LARGEST_MAGNITUDE}:"
        " the optimizer computes in float32",
      )
  if optimizer.frozen and optimizer.trained:
    raise _error(
      "optimizer.trained",
      optimizer.trained,
      'must be "" with config.optimizer.frozen',
    )


def _check_batch(train: TrainConfig) -> None:
  """Checks that a batch can be split into micro-batches of equal size."""
  if train.batch_size % train.accumulation != 0:
    raise _error(
      "train.accumulation",
      train.accumulation,
      f"must divide train.batch_size = {train.batch_size}",
    )


def _check_mesh(mesh: MeshConfig) -> None:
  """Checks the sizes of the mesh's axes. One of them may be unknown (−1)."""
  sizes = (mesh.data, mesh.fsdp, mesh.context, mesh.tensor)
  known_sizes = [size for size in sizes if size != -1]
  num_unknown = len(sizes) - len(known_sizes)
  if num_unknown > 1 or min(known_sizes) < 1:
    raise _error(
      "mesh",
      dataclasses.asdict(mesh),
      "every axis must be positive, or −1 on one axis at most to take the"
      " devices left over",
    )


def to_config_dict(config: Any = None) -> ml_collections.ConfigDict:
  """Returns a config as a ConfigDict, which files and flags can change.

  Args:
    config: a dataclass of fields and sections. None for `Config()`.
  """
  # Imported here, so that this module needs only the standard library.
  import ml_collections
  from ml_collections import config_dict

  if config is None:
    config = Config()
  result = ml_collections.ConfigDict()
  types_by_name = field_types(type(config))
  for declared in dataclasses.fields(config):
    name = declared.name
    value = getattr(config, name)
    if dataclasses.is_dataclass(value):
      result[name] = to_config_dict(value)
      continue
    # A ConfigDict takes only values of the first value's type. For a field of
    # type `float | None`, a placeholder accepts a float in place of None.
    if isinstance(types_by_name[name], types.UnionType):
      value_type, *_ = typing.get_args(types_by_name[name])
      result[name] = config_dict.placeholder(value_type)
    result[name] = value
  return result


def from_config_dict(
  values: ml_collections.ConfigDict | dict[str, Any],
) -> Config:
  """Returns the config with the given values, after checking them.

  Checks the names, types and bounds of all fields, and that they fit together.

  Args:
    values: the fields by section and name, as in {"train": {"steps": 100}}. A
      field that is left out keeps its default.

  Raises:
    UserError: for the first field that is wrong. The message has its value and
      what is allowed.
  """
  config = to_dataclass(values, Config, "config")
  check(config)
  return config


def to_dataclass(
  values: ml_collections.ConfigDict | dict[str, Any],
  cls: type[Section],
  root: str,
) -> Section:
  """Returns an object of a dataclass with the given values.

  Checks the names and types of all fields. A field is a plain value, a tuple,
  or a section, which is a dataclass itself.

  Args:
    values: the fields by name. A section is a nested dict. A field that is left
      out keeps its default.
    cls: the dataclass.
    root: the name of the object in error messages, such as "config".

  Raises:
    UserError: for the first field that is wrong.
  """
  if hasattr(values, "to_dict"):
    values = values.to_dict()
  return _to_section(values, cls, f"{root}.")


def field_types(cls: type) -> dict[str, Any]:
  """Returns the type of each field of a dataclass, by its name."""
  hints = typing.get_type_hints(cls)
  return {
    declared.name: hints[declared.name] for declared in dataclasses.fields(cls)
  }


def _to_section(values: Any, cls: type[Section], prefix: str) -> Section:
  """Returns an object of a dataclass with the given values.

  Args:
    values: should be a dict, but may be anything that a config file contains.
    cls: the dataclass.
    prefix: the start of its fields' names in error messages: "config.train.".
  """
  types_by_name = field_types(cls)
  if not isinstance(values, dict):
    raise UserError(
      f"{prefix.rstrip('.')} must be a section with the fields"
      f" {', '.join(types_by_name)}; got {values!r}"
    )
  converted = {}
  for name, value in values.items():
    if name not in types_by_name:
      raise unknown_field(prefix, name, types_by_name)
    converted[name] = _to_field(value, types_by_name[name], f"{prefix}{name}")
  return cls(**converted)


def _to_field(value: Any, field_type: Any, name: str) -> Any:
  """Returns a value in a field's type, after checking it.

  Args:
    value: the value.
    field_type: a dataclass, a tuple type, or one or several plain types.
    name: the field's full name, for error messages.
  """
  if dataclasses.is_dataclass(field_type):
    return _to_section(value, typing.cast(type, field_type), f"{name}.")
  if typing.get_origin(field_type) is tuple:
    if not isinstance(value, tuple | list):
      raise UserError(
        f"{name} must be values with commas between them; got {value!r}"
      )
    item_type, *_ = typing.get_args(field_type)
    return tuple(_to_field(item, item_type, name) for item in value)
  # A single type, such as int, has no arguments. `int | None` has two.
  plain_types = typing.get_args(field_type) or (field_type,)
  return _to_plain(value, plain_types, name)


def _to_plain(value: Any, allowed: tuple[type, ...], name: str) -> Any:
  """Returns a plain value, after checking that its type is allowed.

  An int becomes a float if floats are allowed. Numbers must be finite, and ints
  below 2³¹.
  """
  # bool is a subclass of int, but no number.
  is_bool = isinstance(value, bool)
  is_int = isinstance(value, int) and not is_bool
  if is_int and abs(value) >= 2**31:
    raise UserError(
      f"{name} must be below 2³¹; got a number of {value.bit_length()} bits"
    )
  if is_int and float in allowed:
    value = float(value)
  is_allowed = isinstance(value, allowed)
  if is_bool:
    is_allowed = bool in allowed
  if not is_allowed:
    names = " or ".join(allowed_type.__name__ for allowed_type in allowed)
    raise UserError(f"{name} must be {names}; got {value!r}")
  if isinstance(value, float) and not math.isfinite(value):
    raise UserError(f"{name} must be finite; got {value}")
  return value


def unknown_field(prefix: str, name: Any, names: Iterable[str]) -> UserError:
  """Returns the error for a field that does not exist.

  Its message suggests the field with the most similar name, or lists all.

  Args:
    prefix: the start of the section's full names, such as "config.train.".
    name: the name that is not a field.
    names: the names of the section's fields.
  """
  # The first part of a full name is "config", or "set" for settings.
  root, _, section = prefix.partition(".")
  kind = "config field" if root == "config" else "setting"
  # `repr` escapes line breaks.
  shown_name = name if str(name).isprintable() else repr(name)
  similar = difflib.get_close_matches(str(name), names, n=1)
  if similar:
    hint = f"did you mean {section}{similar[0]}?"
  else:
    hint = f"there are {', '.join(names)}"
  return UserError(f"{prefix}{shown_name} is not a {kind}: {hint}")
