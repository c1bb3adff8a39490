"""The model card of an exported model: README.md beside its weights, with the front matter of Hugging Face's hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from diffjax.cli import config_file
from diffjax.config import Config, ModelConfig, UserError, from_config_dict
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals import SUITES
from diffjax.evals.report import results
from diffjax.model.attention import attention_class
from diffjax.training.checkpoint import find_checkpoint
from diffjax.training.manifest import SCORE_PREFIX
from diffjax.training.metrics import read_log

_SIZES = (
  "num_layers",
  "embed_dim",
  "num_heads",
  "num_kv_heads",
  "head_dim",
  "ffn_dim",
  "vocab_size",
  "max_length",
)
_ROWS = 12  # of a suite's figures, at most

# How transformers prompts a model that was trained here.
_OWN_PROMPT = {
  "prompt": '[tokenizer.bos_token_id, *tokenizer.encode("Once", add_special_tokens=False)]',
  "about_prompt": "A text begins with the tokenizer's `bos_token`, as in training.",
}
# The tokenizer of a published model adds the tokens itself.
_PUBLISHED_PROMPT = {
  "prompt": 'tokenizer.encode("Once")',
  "about_prompt": "The tokenizer adds the tokens that begin a text, if there are any, as in training.",
}

# How each layout is loaded, and the library that does it.
_LOADING = {
  "diffllama": (
    "transformers",
    """```python
import torch, transformers

model = transformers.AutoModelForCausalLM.from_pretrained("{path}")
tokenizer = transformers.AutoTokenizer.from_pretrained("{path}")
prompt = {prompt}
print(tokenizer.decode(model.generate(torch.tensor([prompt]), max_new_tokens=50)[0]))
```

{about_prompt}""",
  ),
  "unilm": (
    "diffjax",
    """The tensors have the names of the authors' layers (microsoft/unilm); `diffjax/interop/unilm.py` lists them. With diffjax:

    python -m diffjax.convert --from=unilm:{path} --to=diffjax:loaded

Then `diffjax.load("loaded")`.""",
  ),
  "motif": (
    "diffjax",
    """The tensors have the names of Motif's published checkpoints. The code of those (configuration_motif.py, modeling_motif.py and the
auto_map of config.json) is not here. With diffjax:

    python -m diffjax.convert --from=motif:{path} --to=diffjax:loaded

Then `diffjax.load("loaded")`.""",
  ),
  "diffjax": (
    "diffjax",
    """```python
import diffjax

print(*diffjax.Sampler(diffjax.load("{path}")).generate(["Once"], 50))
```""",
  ),
}


def write(
  path: str,
  layout: str,
  model: ModelConfig,
  params: Any,
  dtype: str,
  source: str,
  tokenizer: Tokenizer,
) -> None:
  """Writes the card of a model that has just been exported.

  Args:
    path: The directory that holds it.
    layout: Its layout there.
    model: Its config.
    params: Its parameters.
    dtype: The type of its tensors there.
    source: LAYOUT:PATH of what it was exported from. A workdir's config and measurements are told.
    tokenizer: Its tokenizer.

  Raises:
    UserError: if it cannot be written.
  """
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  parts = _parts(path, layout, model, count, dtype, source, tokenizer)
  text = "\n\n".join(parts) + "\n"
  target = epath.Path(path) / "README.md"
  try:
    target.write_bytes(
      text.encode("utf-8", "surrogateescape")
    )  # in paths, bytes that are not UTF-8 stay what they are
  except OSError as error:
    raise UserError(
      f"cannot write {target}: {error.strerror or error}"
    ) from error


def _parts(
  path: str,
  layout: str,
  model: ModelConfig,
  count: int,
  dtype: str,
  source: str,
  tokenizer: Tokenizer,
) -> Iterator[str]:
  library, loading = _LOADING[layout]
  prompt = _OWN_PROMPT
  if tokenizer.has_own_document_tokens:
    prompt = _PUBLISHED_PROMPT
  source_layout, _, source_path = source.partition(":")
  found = (
    find_checkpoint(source_path, json_only=True)
    if source_layout == "diffjax"
    else None
  )
  run = (
    found if found is not None and found.data_state else None
  )  # without a place in its data it was converted, not trained
  config = from_config_dict(run.config) if run is not None else None
  layer_class = attention_class(model)
  tags = ""
  if layer_class.has_noise_map:
    tags = "\n- differential-transformer"
  yield f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- diffjax{tags}\n---"
  name = layer_class.model_name or model.attention
  origin = (
    f"trained with diffjax for {run.step:,} steps"
    if run is not None
    else f"converted from the layout {source_layout}"
  )
  yield f"# {epath.Path(path).name}"
  yield f"A language model: {name}, {count:,} parameters, {origin}."
  loading = loading.format(path=epath.Path(path).name, **prompt)
  yield f"## Loading\n\n{loading}"
  rows = [
    ["attention", model.attention],
    *([size, str(getattr(model, size))] for size in _SIZES),
    ["type of the tensors", dtype],
  ]
  yield f"## Sizes\n\n{_table(['field', 'value'], rows)}"
  if run is not None and config is not None:
    yield from _training(config, run.step)
    yield from _measured(epath.Path(source_path), run.step)
  else:
    yield "## Training\n\nNothing is known here of its training and its data: see where it came from."
  yield "## Limits\n\n" + "\n".join(
    f"- {limit}" for limit in _limits(model, config, dtype)
  )


def _training(config: Config, step: int) -> Iterator[str]:
  data, tokens = config.data, config.train.batch_size * config.data.length
  rows = [
    ["steps", f"{step:,} of {config.train.steps:,}"],
    ["tokens", f"{step * tokens:,}, {tokens:,} a step"],
    ["text", data.source],
    [
      "validation text",
      data.validation_source or "a part of the text that was held out",
    ],
    ["tokenizer", data.tokenizer],
    ["rows", f"{data.length:,} tokens, {data.packing}"],
    [
      "optimizer",
      f"{config.optimizer.name}, learning rate {config.optimizer.learning_rate:g}, {config.optimizer.schedule}",
    ],
    ["seed", str(config.train.seed)],
  ]
  if config.train.init_from:
    rows.append(["started from", config.train.init_from])
  yield f"## Training\n\n{_table(['', ''], rows)}"
  whole = config_file.to_toml(config, comments=False)
  yield f"<details><summary>The whole config</summary>\n\n```toml\n{whole}```\n\n</details>"


def _measured(workdir: epath.Path, step: int) -> Iterator[str]:
  yield "## Measured"
  losses = _losses(workdir / "metrics.jsonl", step)
  if losses:
    yield f"In training, on validation rows:\n\n{_table(['figure', 'value', 'at step'], losses)}"
  suites = [
    (name, found)
    for name in SUITES
    if (found := _results(workdir / "evals" / f"{name}.json")) is not None
  ]
  for name, found in suites:
    figures = found["figures"]
    rows = [
      [
        row["name"],
        ", ".join(f"{key} {value}" for key, value in row["at"].items()),
        results.number(row),
      ]
      for row in figures[:_ROWS]
    ]
    measured = str(found["models"][0]["name"]).rpartition(" at ")[2]
    more = (
      f"\n\nThese are the first of {len(figures)}."
      if len(figures) > _ROWS
      else ""
    )
    yield f"`{name}`, at {measured}, with 95% intervals:\n\n{_table(['figure', 'at', 'value'], rows)}{more}"
  if not losses and not suites:
    yield "Nothing has been measured."


def _losses(path: epath.Path, step: int) -> list[list[str]]:
  """The last value of each validation figure until a step."""
  found: dict[str, tuple[float, int]] = {}
  for values in read_log(path) if path.exists() else []:
    if values["step"] <= step:
      found |= {
        name: (value, values["step"])
        for name, value in values.items()
        if name.startswith(SCORE_PREFIX) and value is not None
      }
  return [
    [name.removeprefix(SCORE_PREFIX), f"{value:.4g}", str(at)]
    for name, (value, at) in found.items()
  ]


def _results(path: epath.Path) -> Mapping[str, Any] | None:
  """A suite's results; None if there are none, or the file holds something else."""
  try:
    found = json.loads(path.read_bytes())
    ok = found["models"][0]["name"] and all(
      "at" in row and "value" in row and row["name"] for row in found["figures"]
    )
  except (OSError, ValueError, LookupError, TypeError):
    return None
  return found if ok else None


def _limits(
  model: ModelConfig, config: Config | None, dtype: str
) -> Iterator[str]:
  if config is not None and not config.data.prompt_field:
    yield "It continues text: it was not taught to follow instructions, or to refuse any."
  yield "What it writes may be false, biased or copied from its training data."
  yield f"It takes at most {model.max_length:,} tokens."
  if config is not None and config.data.length < model.max_length:
    yield f"It was trained on rows of {config.data.length:,} tokens; what it does beyond them is not known unless it is measured above."
  if dtype != "float32":
    yield f"Its tensors are rounded to {dtype}. The figures are of its float32 parameters."
  yield "Only what is measured above is known of it. Of its licence, and of its data's, nothing is stated here."


def _table(head: list[str], rows: list[list[str]]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(
    "| "
    + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line)
    + " |"
    for line in lines
  )
