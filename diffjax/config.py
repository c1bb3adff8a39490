"""The fields of a run's config, each with its unit, default and bound, and how a config is read and checked.

A config file (``diffjax/configs/*.py``) returns these fields as an ``ml_collections.ConfigDict``; `from_config_dict` turns that into the frozen,
checked dataclasses that the rest of the code reads.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from typing import Any

if typing.TYPE_CHECKING:
  import ml_collections

Section = typing.TypeVar("Section")


class UserError(Exception):
  """An error that the user can fix. Commands print it as one line and exit with 1."""


@dataclasses.dataclass(frozen=True)
class Bound:
  """The values that a field may take: one of `choices`, or numbers from `low` to `high`, where `low` itself may be left out."""

  choices: tuple[str, ...] = ()
  low: float = -math.inf
  high: float = math.inf
  above_low: bool = False

  def holds(self, value: Any) -> bool:
    """True if a field may have the value."""
    if self.choices:
      return value in self.choices
    return (
      self.low < value if self.above_low else self.low <= value
    ) and value <= self.high

  def __str__(self) -> str:
    """The rule in an error's words, such as "must be at least 1"."""
    if self.choices:
      return f"must be one of {', '.join(self.choices)}"
    if self.high < math.inf:
      return f"must lie between {self.low} and {self.high}"
    return (
      "must be positive" if self.above_low else f"must be at least {self.low}"
    )


def bound_of(field: dataclasses.Field) -> Bound | None:
  """The bound that a config's field was declared with."""
  return field.metadata.get("bound")


def one_of(*choices: str, default: str) -> Any:
  """A field whose value is one of `choices`."""
  return dataclasses.field(
    default=default, metadata={"bound": Bound(choices=choices)}
  )


def at_least(low: int, *, default: float) -> Any:
  """A field whose number is `low` or more."""
  return dataclasses.field(default=default, metadata={"bound": Bound(low=low)})


def positive(*, default: float) -> Any:
  """A field whose number is above 0."""
  return dataclasses.field(
    default=default, metadata={"bound": Bound(low=0, above_low=True)}
  )


def share(*, default: float) -> Any:
  """A field whose number lies from 0 to 1."""
  return dataclasses.field(
    default=default, metadata={"bound": Bound(low=0, high=1)}
  )


def decay_rate(*, default: float) -> Any:
  """A field whose number is the share of a moving average that each step keeps.

  With 1 the average stays 0, and its bias correction is 0 / 0. The bound is
  below 1 in float32 too.
  """
  return dataclasses.field(
    default=default, metadata={"bound": Bound(low=0, high=0.9999999)}
  )


# A number of the optimizer must be 0 or have such a magnitude. Smaller and larger
# ones, or their products, underflow or overflow in float32.
SMALLEST_MAGNITUDE, LARGEST_MAGNITUDE = 1e-30, 1e30

# Values of `ModelConfig.remat`, from the most memory to the least.
REMAT = ("none", "dots", "ffn", "gate", "attention", "full")
# Fields of `ModelConfig` that each run chooses: they do not change what a model is.
OF_THE_RUN = ("dtype", "attention_implementation", "remat")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder. Letters as everywhere: B T S H K G M D V E F L N (see parameters.py)."""

  # A layer of model/attention.py: "diff" (DIFF V1), "diff_v2" (DIFF V2), "softmax" (the Transformer baseline), or one of its variants
  attention: str = "diff"
  # How many of the layers, from the lowest, have the Transformer's attention instead, with the number of heads of its twin
  plain_layers: int = at_least(0, default=0)
  # N: rows of the embedding; at least the tokenizer's size, and less than 256 more than it
  vocab_size: int = at_least(1, default=256)
  # L, the plain layers included
  num_layers: int = at_least(1, default=4)
  # E: width of the residual stream
  embed_dim: int = at_least(1, default=128)
  # H: heads that write to the residual stream. DIFF V1 has half as many as its Transformer twin, DIFF V2 as many
  num_heads: int = at_least(1, default=2)
  # Q: noise maps, each shared by num_heads / num_noise_heads heads (grouped differential attention); None for one a head
  num_noise_heads: int | None = None
  # K: key/value heads; divides num_noise_heads, or num_heads where that is None
  num_kv_heads: int = at_least(1, default=2)
  # D: width of a query and key
  head_dim: int = at_least(2, default=32)
  # V: width of a value; None for the variant's own, 2D in DIFF V1 and D otherwise
  value_dim: int | None = None
  # F: hidden width of the feed-forward layer
  ffn_dim: int = at_least(1, default=352)
  # Longest row, tokens
  max_length: int = at_least(1, default=2048)
  # A token sees itself and those before it. False shows it the whole row: for encoders in a loop of your own, since training refuses it
  causal: bool = True
  # Keys that a token sees, itself included (sliding window); None for all
  window: int | None = None
  # The layers that have the window, from the first: "w" with it, "f" full, again and again: "wwwf"; "" for all of them
  window_pattern: str = ""
  # Rotary position embedding of queries and keys
  rope: bool = True
  # RoPE base (angle = position · base^(−2j/D))
  rope_base: float = positive(default=10_000.0)
  # RoPE's angles for rows longer than those of the pretraining: "none", "linear", "llama3" or "yarn"; rows of rope_original_length tokens
  # become rope_factor times as long
  rope_scaling: str = one_of("none", "linear", "llama3", "yarn", default="none")
  # How many times as long, above 1; for rope_scaling
  rope_factor: float = at_least(1, default=1.0)
  # Tokens of a row of the pretraining; for rope_scaling
  rope_original_length: int = at_least(1, default=4096)
  # How many of a query's and key's D numbers RoPE rotates, the last ones; None for all
  rope_dim: int | None = None
  # Biases of the query, key, value and output projections
  projection_biases: bool = False
  # RMSNorm of each head's output, with one gain vector per layer. The paper's DIFF V1 has it, V2 and the baseline do not
  head_norm: bool = True
  # ε of that norm; None for norm_eps
  head_norm_eps: float | None = None
  # λ_init of DIFF V1: a constant for every layer, or None for the paper's 0.8 − 0.6·exp(−0.3·l)
  lambda_init: float | None = None
  # Subtracted from the layer l, counted from 0, in the paper's λ_init: with 1, as in Motif's models, a layer has that of the one before it
  lambda_init_offset: int = at_least(0, default=0)
  # Activation of the feed-forward layer's gate: "silu" (SwiGLU) or "poly_norm" (a learnt polynomial of normed powers, arXiv:2411.03884)
  ffn_activation: str = one_of("silu", "poly_norm", default="silu")
  # Norm before each half of a layer and at the end: "rms" (gain) or "layer" (LayerNorm: gain and shift). The heads' is always RMSNorm
  norm: str = one_of("rms", "layer", default="rms")
  # ε of every norm
  norm_eps: float = positive(default=1e-5)
  # One matrix for the embedding and the output projection
  tie_embeddings: bool = True
  # Factor on the embeddings that enter the first layer; those of the output projection stay as they are. Embeddings start from 1/√E, so
  # that tied logits start at unit variance. With 1, the default, a token enters the first layer with that small size, as in the authors'
  # code, and a layer that norms its heads adds several times as much to it at the start; with √E a token enters with an RMS of 1
  embed_scale: float = positive(default=1.0)
  # Compute dtype: "bfloat16", "float32" or "auto" (bfloat16, but float32 on CPU). Parameters are always float32
  dtype: str = one_of("auto", "bfloat16", "float32", default="auto")
  # Which diff_attention: "auto", "reference", "chunked", "two_call", …
  attention_implementation: str = "auto"
  # What is computed again in the backward pass instead of kept, from the most memory to the least: "none" (nothing), "dots" (all but
  # matrix products and attention), "ffn" (all but attention and the feed-forward layer's first two products), "gate" (all but attention and
  # one of the two), "attention" (all but attention) or "full" (everything). `diffjax.aot --remat` tells what each would take
  remat: str = one_of(*REMAT, default="none")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The source of the tokens, and how they become rows."""

  # One source, or a weighted mixture: "A" or "A=0.7,B=0.3". A source is "stdlib" (the embedded default: the Python standard
  # library's own source), "tfds:c4/en" (any TFDS builder on disk), "text:GLOB", "jsonl:GLOB" (also .gz, .zst) or "parquet:GLOB".
  # A GLOB is local, in a bucket (gs://) or on the Hugging Face Hub: "hf://datasets/ORG/NAME@REVISION/sample/*.parquet"
  source: str = "stdlib"
  # Files to read of each source of files, evenly spaced in the list of their
  # names. 0 reads all local files, and as many hf:// files as the run's tokens
  # need
  files: int = at_least(0, default=0)
  # Source of the validation rows; "" holds out a part of `source`: its validation split if it has one, else validation_fraction.
  # Of an hf:// source, validation documents come from up to 1 GiB of its files, so that not everything is downloaded twice
  validation_source: str = ""
  # Share of the documents (by hash of their text) held out for validation where the source has no such split
  validation_fraction: float = share(default=0.01)
  # TFDS data directory; "" for the TFDS default
  data_dir: str = ""
  # Field of a record that holds its text, or with prompt_field the answer. Dots lead into nested fields: "conversations.-1.value" is the
  # field "value" of the last item of the list "conversations"
  text_field: str = "text"
  # Field of a record that holds the prompt to its answer: only answers are learnt then (targets in the prompt have weight 0); "" for
  # plain text
  prompt_field: str = ""
  # The text before an answer, with {prompt} where its prompt goes
  prompt_template: str = "Question: {prompt}\nAnswer:\n"
  # "bytes", "cl100k_base", or a file: *.tiktoken (see diffjax.prepare --train_tokenizer) or a Hugging Face tokenizer.json,
  # also on the Hub ("hf://ORG/NAME@REVISION/tokenizer.json")
  tokenizer: str = "bytes"
  # T: tokens a row that the model sees (a stored row has one more, for the last target)
  length: int = at_least(1, default=256)
  # "documents" (whole documents packed into rows, segment ids, positions that restart) or "concat" (concatenate and split)
  packing: str = one_of("documents", "concat", default="documents")
  # "prepared" (rows packed once by diffjax.prepare; batch n is a function of
  # seed and n), "streamed" (tokenized during training), or "auto" (prepared in
  # a run of one process, streamed in a run of several)
  mode: str = one_of("prepared", "streamed", "auto", default="prepared")
  # Directory of prepared rows; "" for one in the user's cache, named by a hash of its contents' settings
  prepared_dir: str = ""
  # Worker processes that read; 0 reads in the training process
  num_workers: int = at_least(0, default=0)
  # Seconds without a batch after which reading counts as hung, and the run ends with an error instead of waiting
  timeout: float = positive(default=50.0)
  # Seed of the order of rows
  seed: int = at_least(0, default=0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW or Muon, its schedule and its limits."""

  # "adamw" or "muon" (Muon for the layers' matrices, AdamW for everything else)
  name: str = one_of("adamw", "muon", default="adamw")
  # Peak learning rate
  learning_rate: float = at_least(0, default=1e-3)
  # Learning rate at the end, as a share of the peak
  final_fraction: float = share(default=0.0)
  # After the warmup: "linear", "cosine", or "wsd" (constant, then linear over the last decay_fraction of the steps)
  schedule: str = one_of("linear", "cosine", "wsd", default="linear")
  # Steps of linear warmup from 0; cut to train.steps if it is longer
  warmup_steps: int = at_least(0, default=100)
  # "wsd": share of the steps that decay
  decay_fraction: float = share(default=0.2)
  # Adam's β₁
  b1: float = decay_rate(default=0.9)
  # Adam's β₂
  b2: float = decay_rate(default=0.95)
  # Adam's ε
  eps: float = positive(default=1e-8)
  # Decoupled weight decay of matrices (not of gains, λ vectors and embeddings)
  weight_decay: float = at_least(0, default=0.1)
  # Largest global norm of a gradient; 0 for no limit
  clip_norm: float = at_least(0, default=1.0)
  # Skip a step whose loss or gradient norm lies this many standard deviations above its mean of about the last 128 steps; 0 for none
  spike_sigmas: float = at_least(0, default=6.0)
  # "muon": momentum
  muon_momentum: float = decay_rate(default=0.95)
  # Parameters that stay as they start, by name with commas between: "lambda_q1,lambda_k1,lambda_q2,lambda_k2"; "" for none
  frozen: str = ""
  # Parameters that alone are trained, likewise: "dex_matrix,dex_lambda"; "" for all but the frozen ones
  trained: str = ""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The loop."""

  # Steps (parameter updates) in all
  steps: int = at_least(0, default=1000)
  # B: rows of a step, over all devices and micro-batches
  batch_size: int = at_least(1, default=16)
  # Micro-batches a step
  accumulation: int = at_least(1, default=1)
  # Seed of the initialisation
  seed: int = at_least(0, default=0)
  # Tokens a device whose logits exist at once in the loss; 0 for 16 MiB of logits (at least 512 tokens), on TPU a 16th of its memory
  loss_chunk: int = at_least(0, default=0)
  # Coefficient of the z-loss (mean squared log-partition); 0 for none
  z_loss: float = at_least(0, default=0.0)
  # Another run's workdir to take the parameters from; "" for none
  init_from: str = ""
  # The run stops after this many skipped steps in a row (not finite, or optimizer.spike_sigmas); 0 for never. Within 25 steps the limits
  # have followed a gradient whose norm is a hundred times larger and stays so.
  max_skipped_in_a_row: int = at_least(0, default=25)
  # Steps between log lines
  log_interval: int = at_least(1, default=10)
  # Steps between checkpoints (one is also saved at the end)
  checkpoint_interval: int = at_least(1, default=500)
  # Newest checkpoints to keep (the best by validation loss is kept too)
  keep_checkpoints: int = at_least(1, default=3)
  # First step of the profiler's window; -1 for no profile
  profile_step: int = at_least(-1, default=-1)
  # Steps in the profiler's window
  profile_steps: int = at_least(1, default=5)
  # Weights & Biases project; "" for none
  wandb_project: str = ""
  # Prompt of the sample at the end of a run
  sample_prompt: str = "def "
  # Tokens of the sample at the end of a run; 0 for none
  sample_tokens: int = at_least(0, default=200)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Validation inside the loop."""

  # Steps between evaluations (there is also one at the end); 0 for none
  interval: int = at_least(0, default=500)
  # Rows evaluated (fewer if the validation set has fewer); -1 for all
  rows: int = at_least(-1, default=256)
  # AR-Hit: a target counts as a hit if it ends an n-gram of this many tokens seen earlier in its document
  ngram: int = at_least(2, default=2)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis of the mesh; −1 takes what is left."""

  # Copies of the model, each with a share of the batch
  data: int = -1
  # Devices that share parameters and optimizer state, and the batch too
  fsdp: int = 1
  # Devices that share the tokens of a row: each keeps its queries, keys and values go round
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


def require(ok: bool, field: str, got: Any, want: str) -> None:
  """Raises UserError unless `ok`: names the field, what it got and what would work."""
  if not ok:
    raise UserError(f"config.{field} = {got!r}: {want}")


def check(config: Config) -> None:
  """Raises UserError for the first field that is out of its bounds or cannot work with the others."""
  for section in dataclasses.fields(config):
    values = getattr(config, section.name)
    for field in dataclasses.fields(values):
      name, value = f"{section.name}.{field.name}", getattr(values, field.name)
      if (bound := bound_of(field)) is not None:
        require(bound.holds(value), name, value, str(bound))
      if isinstance(value, float):
        require(math.isfinite(value), name, value, "must be finite")
  _check_model(config.model)
  _check_data(config.data, config.model)
  optimizer = config.optimizer
  _check_magnitudes(optimizer)
  require(
    not (optimizer.frozen and optimizer.trained),
    "optimizer.trained",
    optimizer.trained,
    'must be "" with config.optimizer.frozen',
  )
  _check_training(config.train)
  _check_mesh(config.mesh)


def _check_magnitudes(optimizer: OptimizerConfig) -> None:
  for field in dataclasses.fields(optimizer):
    value = getattr(optimizer, field.name)
    if isinstance(value, float) and value != 0:
      require(
        SMALLEST_MAGNITUDE <= abs(value) <= LARGEST_MAGNITUDE,
        f"optimizer.{field.name}",
        value,
        f"must be 0, or between {SMALLEST_MAGNITUDE} and {LARGEST_MAGNITUDE}: the optimizer computes"
        " in float32",
      )


def _check_model(model: ModelConfig) -> None:
  require(
    model.plain_layers < model.num_layers,
    "model.plain_layers",
    model.plain_layers,
    f"must be less than num_layers = {model.num_layers}",
  )
  groups, dividend = model.num_heads, "num_heads"
  if model.num_noise_heads is not None:
    groups, dividend = model.num_noise_heads, "num_noise_heads"
    ok = groups >= 1 and model.num_heads % groups == 0
    require(
      ok,
      "model.num_noise_heads",
      groups,
      f"must divide model.num_heads = {model.num_heads}, or be None for one a head",
    )
  require(
    groups % model.num_kv_heads == 0,
    "model.num_kv_heads",
    model.num_kv_heads,
    f"must divide model.{dividend} = {groups}",
  )
  require(
    model.head_dim % 2 == 0,
    "model.head_dim",
    model.head_dim,
    "must be even: RoPE rotates pairs",
  )
  require(
    model.rope_dim is None
    or (2 <= model.rope_dim <= model.head_dim and model.rope_dim % 2 == 0),
    "model.rope_dim",
    model.rope_dim,
    f"must be even and at most model.head_dim = {model.head_dim}, or None for all",
  )
  if model.rope_scaling != "none":
    given = f"model.rope_scaling = {model.rope_scaling!r}"
    require(
      model.rope_factor > 1,
      "model.rope_factor",
      model.rope_factor,
      f"must be above 1 with {given}",
    )
    require(
      model.rope_scaling != "yarn" or model.rope_base > 1,
      "model.rope_base",
      model.rope_base,
      f"must be above 1 with {given}",
    )
  require(
    model.head_norm_eps is None or model.head_norm_eps > 0,
    "model.head_norm_eps",
    model.head_norm_eps,
    "must be positive, or None",
  )
  require(
    model.value_dim is None or model.value_dim >= 1,
    "model.value_dim",
    model.value_dim,
    "must be at least 1, or None",
  )
  require(
    set(model.window_pattern) <= set("wf"),
    "model.window_pattern",
    model.window_pattern,
    'must be letters w (a layer with the window) and f (a full one), such as "wwwf"',
  )
  require(
    not model.window_pattern or model.window is not None,
    "model.window",
    model.window,
    "must be a number of keys with a window_pattern",
  )
  require(
    model.window is None or model.window >= 1,
    "model.window",
    model.window,
    "must be at least 1 (the token itself), or None for all keys",
  )
  require(
    model.window is None or model.attention_implementation != "two_call",
    "model.window",
    model.window,
    "must be None with model.attention_implementation = 'two_call', which takes no window; 'auto' and 'chunked' do",
  )


def _check_data(data: DataConfig, model: ModelConfig) -> None:
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
    data.prompt_field != data.text_field,
    "data.prompt_field",
    data.prompt_field,
    "must be another field than data.text_field, the answer's",
  )
  require(
    data.length <= model.max_length,
    "data.length",
    data.length,
    f"must be at most model.max_length = {model.max_length}",
  )


def _check_training(train: TrainConfig) -> None:
  require(
    train.batch_size % train.accumulation == 0,
    "train.accumulation",
    train.accumulation,
    f"must divide train.batch_size = {train.batch_size}",
  )


def _check_mesh(mesh: MeshConfig) -> None:
  sizes = (mesh.data, mesh.fsdp, mesh.context, mesh.tensor)
  require(
    all(size == -1 or size > 0 for size in sizes) and sizes.count(-1) <= 1,
    "mesh",
    dataclasses.asdict(mesh),
    "every axis must be positive, or −1 on one axis at most to take the devices left over",
  )


def to_config_dict(config: Any = None) -> ml_collections.ConfigDict:
  """A config (by default `Config()`) as a ConfigDict, for config files to edit and flags to override."""
  import ml_collections  # here, so that reading fields needs the standard library alone
  from ml_collections import config_dict

  def convert(section):
    out = ml_collections.ConfigDict()
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
      value = getattr(section, field.name)
      if dataclasses.is_dataclass(value):
        value = convert(value)
      elif isinstance(
        hints[field.name], types.UnionType
      ):  # float | None: None stays overridable by a float
        out[field.name] = config_dict.placeholder(
          typing.get_args(hints[field.name])[0]
        )
      out[field.name] = value
    return out

  return convert(config or Config())


def from_config_dict(
  values: ml_collections.ConfigDict | dict[str, Any],
) -> Config:
  """The checked config of nested values: names, types and bounds of all fields, and how they go together.

  Raises:
    UserError: naming the field, what it got and what would work.
  """
  config = to_dataclass(values, Config, "config")
  check(config)
  return config


def to_dataclass(
  values: ml_collections.ConfigDict | dict[str, Any],
  cls: type[Section],
  root: str,
) -> Section:
  """A dataclass of plain fields, tuples and sections from nested dicts, names and types checked.

  Args:
    values: The fields by name; one that is left out keeps its default.
    cls: The dataclass.
    root: The name of the whole in error messages, such as "config".

  Raises:
    UserError: naming the field, what it got and what would work.
  """

  def convert(cls, mapping, prefix):
    hints = typing.get_type_hints(cls)
    if not isinstance(mapping, dict):  # a config file may return anything
      raise UserError(
        f"{prefix.rstrip('.')} must be a section with the fields {', '.join(hints)}; got {mapping!r}"
      )
    for name in mapping:
      if name not in hints:
        raise unknown_field(prefix, name, hints)
    return cls(
      **{
        name: convert_field(hints[name], value, f"{prefix}{name}")
        for name, value in mapping.items()
      }
    )

  def convert_field(kind, value, field):
    if dataclasses.is_dataclass(kind):
      return convert(kind, value, f"{field}.")
    if typing.get_origin(kind) is tuple:  # tuple[int, ...]
      if not isinstance(value, tuple | list):
        raise UserError(
          f"{field} must be values with commas between them; got {value!r}"
        )
      return tuple(
        convert_field(typing.get_args(kind)[0], item, field) for item in value
      )
    allowed = typing.get_args(kind) or (kind,)
    if isinstance(value, int) and abs(value) >= 2**31:
      raise UserError(
        f"{field} must be below 2³¹; got a number of {value.bit_length()} bits"
      )
    if (
      float in allowed
      and isinstance(value, int)
      and not isinstance(value, bool)
    ):
      value = float(value)
    if not isinstance(value, allowed) or (
      isinstance(value, bool) and bool not in allowed
    ):
      names = " or ".join(t.__name__ for t in allowed)
      raise UserError(f"{field} must be {names}; got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
      raise UserError(f"{field} must be finite; got {value}")
    return value

  if hasattr(values, "to_dict"):  # a ConfigDict
    values = values.to_dict()
  return convert(cls, values, f"{root}.")


def unknown_field(
  prefix: str, name: Any, fields: typing.Iterable[str]
) -> UserError:
  """The error for an unknown field: its full name (`prefix` is "config.train." for one of train's), and the nearest of `fields` or all."""
  near = difflib.get_close_matches(str(name), fields, n=1)
  root, _, section = prefix.partition(".")
  hint = (
    f"did you mean {section}{near[0]}?"
    if near
    else f"there are {', '.join(fields)}"
  )
  kind = "config field" if root == "config" else "setting"
  return UserError(
    f"{prefix}{name if str(name).isprintable() else repr(name)} is not a {kind}: {hint}"
  )
