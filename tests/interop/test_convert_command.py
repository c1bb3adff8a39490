"""python -m diffjax.convert, as a user runs it: an error is one line, and nothing is written."""

import importlib.util
import json
import pathlib
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from diffjax.cli import config_file
from diffjax.config import Config, DataConfig, TrainConfig, from_config_dict
from diffjax.interop import unilm, workdir
from diffjax.training.checkpoint import Checkpoints

USAGE = r"pass --{}=LAYOUT:PATH, LAYOUT one of diffjax, diffllama, unilm, llama, motif{}$"


@pytest.mark.parametrize(
  "args, message",
  [
    ([], USAGE.format("from", "")),
    (
      ["--from=runs/tiny", "--to=diffllama:x"],
      USAGE.format("from", "; got 'runs/tiny'"),
    ),
    (
      ["--from=diffjax:", "--to=diffllama:x"],
      USAGE.format("from", "; got 'diffjax:'"),
    ),
    (["--from=diffjax:runs/tiny"], USAGE.format("to", "")),
    (
      ["--from=diffjax:runs/tiny", "--to=gguf:x"],
      USAGE.format("to", "; got 'gguf:x'"),
    ),
    (
      ["--from=diffjax:runs/tiny", "--to=llama:x"],
      "--to=llama: this layout can only be read",
    ),
    (
      ["--from=llama:x", "--to=diffjax:y", "--dtype=bfloat16"],
      "--dtype=bfloat16: a workdir's parameters are always float32",
    ),
    (
      ["--from=llama:x", "--to=unilm:y", "--dtype=int8"],
      "flag --dtype=int8: value should be one of <float32|bfloat16>",
    ),
    (
      ["--from=llama:gs://bucket/x", "--to=diffjax:y"],
      "--from=llama:gs://bucket/x: only workdirs may be gs://",
    ),
    (
      ["--from=llama:x", "--to=diffjax:y", "--config=x"],
      "Unknown command line flag 'config'",
    ),
    (["llama", "diffjax"], "unexpected argument 'llama'"),
  ],
)
def test_usage(convert, args, message):
  result = convert(*args)
  assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
  assert re.match(f"error: {message}", result.stderr.strip()), result.stderr


@pytest.fixture(scope="module")
def refuses(convert, tmp_path_factory):
  """Asserts that a conversion ends with one line, and leaves nothing behind."""
  out = tmp_path_factory.mktemp("out") / "out"

  def check(source, message, target="diffjax"):
    result = convert(f"--from={source}", f"--to={target}:{out}")
    assert result.returncode == 1 and not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and re.search(message, line), line
    assert not out.exists()

  return check


def edit(path, change):
  """Changes fields of a JSON file."""
  path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
  "change, message",
  [
    (
      dict(model_type="mistral"),
      "model_type = 'mistral': this layout supports only 'llama'",
    ),
    (
      dict(attention_bias=True),
      "attention_bias = True: diffjax supports only False",
    ),
    (dict(mlp_bias=True), "mlp_bias = True: diffjax supports only False"),
    (
      dict(hidden_act="gelu"),
      "hidden_act = 'gelu': diffjax supports only 'silu'",
    ),
    (
      dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
      "scales its rotary angles .*'llama3'",
    ),
    (
      dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
      "scales its rotary angles .*'dynamic'",
    ),
    (
      dict(rope_scaling={"type": "linear", "factor": 0.5}),
      "rope_factor = 0.5: must be at least 1",
    ),
    ({"a\nb": "c" * 99}, r"does not know: 'a\\nb' = 'c{59}; remove the fields"),
    (
      dict(sliding_window=9),
      "has fields that diffjax does not know: sliding_window = 9; remove the fields that do not change",
    ),
    (
      dict(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
      ),
      "scales its rotary angles .*'yarn'",
    ),
    (
      dict(
        rope_parameters={
          "rope_type": "default",
          "rope_theta": 1e4,
          "partial_rotary_factor": 0.5,
        }
      ),
      "scales its rotary angles",
    ),
    (
      dict(rope_parameters="default"),
      "rope_parameters = 'default': it must be an object",
    ),
    (dict(rope_theta="x"), "rope_base must be float; got 'x'"),
    (dict(hidden_size=None), "has no hidden_size"),
    (
      dict(hidden_size="32"),
      "hidden_size = '32': it must be a positive multiple of 1",
    ),
    (dict(num_hidden_layers="2"), "num_layers must be int; got '2'"),
    (
      dict(num_hidden_layers=2_000_000_000),
      "tensors, but its config.json says 2000000000 layers",
    ),
    (
      dict(num_hidden_layers=1),
      r"a tensor model.layers.1\..*not in this layout for its config.json",
    ),
    (dict(num_hidden_layers=3), r"no tensor model.layers.2\."),
    (
      dict(num_attention_heads=0),
      "num_attention_heads = 0: it must be a positive multiple of 1",
    ),
    (dict(num_key_value_heads=3), "num_kv_heads = 3: must divide"),
    (
      dict(num_key_value_heads=4),
      r"k_proj.weight of shape \[16, 32\], but its config.json requires \[32, 32\]",
    ),
    (dict(rms_norm_eps=0), "norm_eps = 0.0: must be positive"),
    (
      dict(vocab_size=120),
      "tokenizer.json has 128 tokens, but the model has 120: replace it with the model's own tokenizer",
    ),
    (dict(vocab_size=256), r"embed_tokens.weight of shape \[128, 32\]"),
    (
      dict(tie_word_embeddings=True),
      "has a lm_head.weight that differs .*says tie_word_embeddings: true",
    ),
  ],
)
def test_configs_that_diffjax_cannot_hold(
  write_llama, refuses, change, message, tmp_path
):
  write_llama(tmp_path)
  edit(tmp_path / "config.json", change)
  refuses(f"llama:{tmp_path}", message)


def test_tied_in_the_target_alone(write_llama, refuses, tmp_path):
  write_llama(tmp_path, tie=True)
  edit(tmp_path / "config.json", dict(tie_word_embeddings=False))
  refuses(
    f"llama:{tmp_path}",
    "no tensor lm_head.weight.*set tie_word_embeddings to true",
  )


def _truncated(path):
  (path / "model.safetensors").write_bytes(
    (path / "model.safetensors").read_bytes()[:-100]
  )


def _header_cut(path):
  (path / "model.safetensors").write_bytes(
    (path / "model.safetensors").read_bytes()[:50]
  )


def _rewritten(change):
  def make(path):
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")

  return make


def _index(content):
  def make(path):
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(
      content if isinstance(content, str) else json.dumps(content)
    )

  return make


BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
  "damage, message",
  [
    (
      _truncated,
      "model.safetensors is not a whole safetensors file, download it again: Error while deserializing header",
    ),
    (
      _header_cut,
      "model.safetensors is not a whole safetensors file, download it again: Error while deserializing header",
    ),
    (
      lambda path: (path / "model.safetensors").write_text(""),
      "model.safetensors is not a whole safetensors file",
    ),
    (
      lambda path: (path / "model.safetensors").unlink(),
      "there is no .*model.safetensors; only safetensors are read, no pickles",
    ),
    (
      _rewritten(lambda tensors: tensors.pop("model.norm.weight")),
      "has no tensor model.norm.weight",
    ),
    (
      _rewritten(
        lambda tensors: tensors.update({BIAS: np.ones(32, np.float32)})
      ),
      f"has a tensor {BIAS}.*: biases are not supported",
    ),
    (
      _rewritten(
        lambda tensors: tensors.update({"model.norm.weight": np.ones(32)})
      ),
      "model.norm.weight in F64: only F32, F16, BF16",
    ),
    (
      _rewritten(
        lambda tensors: tensors.update(
          {"model.norm.weight": np.ones(32, np.int8)}
        )
      ),
      "model.norm.weight in I8",
    ),
    (
      _index(
        {
          "weight_map": {
            "model.norm.weight": "model-00002-of-00002.safetensors"
          }
        }
      ),
      "no .*model-00002-of-00002.*index.json names",
    ),
    (
      _index({"weight_map": {"model.norm.weight": "../other.safetensors"}}),
      "names a file '../other.safetensors': it must be in the same directory",
    ),
    (_index({"weights": {}}), "has no weight_map"),
    (_index("{"), "index.json is not JSON"),
    (
      lambda path: (path / "config.json").unlink(),
      "cannot read .*config.json: No such file",
    ),
    (
      lambda path: (path / "config.json").write_text("[" * 100_000),
      "config.json is not JSON",
    ),
    (
      lambda path: (path / "config.json").write_text("[1]"),
      "config.json must hold a JSON object",
    ),
    (
      lambda path: (path / "config.json").write_bytes(b"\xff\xfe"),
      "config.json is not JSON",
    ),
    (
      lambda path: (path / "tokenizer.json").unlink(),
      "there is no tokenizer beside the model",
    ),
    (
      lambda path: (path / "tokenizer.json").write_text("{}"),
      "not a Hugging Face tokenizer.json",
    ),
    (
      lambda path: shutil.rmtree(path),
      "cannot read .*config.json: No such file",
    ),
  ],
)
def test_damaged_directories(write_llama, refuses, damage, message, tmp_path):
  write_llama(tmp_path / "llama")
  damage(tmp_path / "llama")
  refuses(f"llama:{tmp_path / 'llama'}", message)


@pytest.mark.parametrize(
  "change, message",
  [
    (
      dict(num_attention_heads=5),
      "num_attention_heads = 5: it must be a positive multiple of 2",
    ),
    (
      dict(num_key_value_heads=1),
      "num_key_value_heads = 1: it must be a positive multiple of 2",
    ),
    (
      dict(model_type="llama"),
      "model_type = 'llama': this layout supports only 'diffllama'",
    ),
  ],
)
def test_diffllama_configs(golden, refuses, change, message, tmp_path):
  source, _, _ = golden("diffllama_tiny_gqa", tmp_path / "source")
  edit(source / "config.json", change)
  refuses(f"diffllama:{source}", message)


@pytest.mark.parametrize(
  "target, attention, fields, message",
  [
    (
      "diffllama",
      "diff_v2",
      {},
      "DiffLlama supports only attention = 'diff'; the model has 'diff_v2'",
    ),
    (
      "diffllama",
      "softmax",
      {},
      "DiffLlama supports only attention = 'diff'; the model has 'softmax'",
    ),
    (
      "diffllama",
      "diff",
      dict(lambda_init=0.8),
      "DiffLlama supports only lambda_init = None, the schedule; the model has 0.8",
    ),
    (
      "diffllama",
      "diff",
      dict(head_norm=False),
      "supports only head_norm = True",
    ),
    (
      "diffllama",
      "diff",
      dict(window=8),
      "supports only window = None; the model has 8",
    ),
    (
      "unilm",
      "diff_v2",
      dict(rope=False),
      "supports only rope = True; the model has False",
    ),
    (
      "unilm",
      "diff",
      dict(projection_biases=True),
      "supports only projection_biases = False",
    ),
    (
      "diffllama",
      "diff",
      dict(embed_scale=2.0),
      "supports only embed_scale = 1.0; the model has 2.0",
    ),
    (
      "unilm",
      "softmax",
      {},
      "support only attention = 'diff' or 'diff_v2'; the model has 'softmax'",
    ),
    (
      "unilm",
      "diff",
      dict(lambda_init=0.8),
      "lambda_init = None, the schedule; the model has 0.8",
    ),
    (
      "unilm",
      "diff",
      dict(head_norm=False),
      "V1 layer supports only head_norm = True",
    ),
    (
      "unilm",
      "diff_v2",
      dict(head_norm=True),
      "V2 layer supports only head_norm = False",
    ),
    (
      "unilm",
      "diff",
      dict(norm_eps=1e-6),
      "norm_eps = 1e-05, the ε of its head norm; the model has 1e-06",
    ),
    (
      "unilm",
      "diff",
      dict(head_dim=8),
      "the model has 32, which is not 2 · 8 · 4",
    ),
  ],
)
def test_models_that_a_layout_cannot_hold(
  make_model, refuses, target, attention, fields, message, tmp_path
):
  workdir.write(str(tmp_path), make_model(attention, **fields))
  refuses(f"diffjax:{tmp_path}", message, target)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(diff_version=3), "diff_version = 3: it must be 1 or 2"),
    (
      dict(diff_version=1),
      r"has no tensor layers.0.self_attn.out_proj.weight|requires",
    ),
    (dict(norm_eps=None), "norm_eps must be float; got None"),
    (
      dict(share_input_output_embed=False),
      "no tensor output_projection.weight.*set share_input_output_embed to true",
    ),
  ],
)
def test_unilm_configs(make_model, refuses, change, message, tmp_path):
  unilm.write(str(tmp_path), make_model("diff_v2"), "float32")
  edit(tmp_path / "config.json", change)
  refuses(f"unilm:{tmp_path}", message)


def test_unilm_config_without_a_field(make_model, refuses, tmp_path):
  unilm.write(str(tmp_path), make_model("diff"), "float32")
  config = json.loads((tmp_path / "config.json").read_text())
  del config["rope_theta"]
  (tmp_path / "config.json").write_text(json.dumps(config))
  refuses(f"unilm:{tmp_path}", "config.json has no rope_theta")


def test_workdirs_without_what_is_needed(
  make_model, refuses, convert, tmp_path, write_tokenizer
):
  refuses(
    f"diffjax:{tmp_path / 'nowhere'}",
    "there is no complete checkpoint in",
    "diffllama",
  )
  write_tokenizer(tmp_path)
  workdir.write(
    str(tmp_path / "run"),
    make_model("diff", tokenizer=str(tmp_path / "tokenizer.json")),
  )
  write_tokenizer(tmp_path / "run", 200)
  refuses(
    f"diffjax:{tmp_path / 'run'}",
    "was trained with 128 tokens, but its tokenizer .* has 200: it is another one",
    "diffllama",
  )
  (tmp_path / "run/tokenizer.json").unlink()
  refuses(
    f"diffjax:{tmp_path / 'run'}",
    "there is no tokenizer beside the checkpoint",
    "diffllama",
  )
  data = next(
    path
    for path in (tmp_path / "run/checkpoints/0/state/params.embedding/c").rglob(
      "*"
    )
    if path.is_file()
  )
  data.write_bytes(data.read_bytes()[:-1])
  result = convert(
    f"--from=diffjax:{tmp_path / 'run'}", f"--to=diffllama:{tmp_path / 'out'}"
  )
  assert result.returncode == 1 and not (tmp_path / "out").exists()
  assert re.match(
    "error: every checkpoint in .* is damaged", result.stderr.splitlines()[-1]
  )  # after a warning that says how


@pytest.mark.parametrize("target", ["diffjax", "diffllama"])
def test_what_is_there_is_not_written_over(
  write_llama, convert, target, tmp_path
):
  write_llama(tmp_path / "llama")
  (tmp_path / "full").mkdir()
  (tmp_path / "full/notes.txt").write_text("mine")
  (tmp_path / "runs/one").mkdir(parents=True)
  (tmp_path / "file").write_text("mine")
  for name in ("full", "runs", "file"):
    result = convert(
      f"--from=llama:{tmp_path / 'llama'}", f"--to={target}:{tmp_path / name}"
    )
    assert result.returncode == 1
    assert (
      result.stderr
      == f"error: --to: {tmp_path / name} exists and is not an empty directory; choose another one, or delete it\n"
    )
  assert [
    path.name
    for name in ("full", "runs")
    for path in (tmp_path / name).iterdir()
  ] == ["notes.txt", "one"]


@pytest.mark.skipif(
  importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is there"
)
def test_buckets_need_gcsfs(convert):
  for args in (
    ["--from=llama:x", "--to=diffjax:gs://b/x"],
    ["--from=diffjax:gs://b/x", "--to=unilm:x"],
  ):
    result = convert(*args)
    assert (
      result.returncode == 1
      and result.stderr
      == "error: the workdir gs://b/x needs gcsfs: pip install 'diffjax[gcs]'\n"
    )


def test_names_that_cannot_be(convert, tmp_path):
  for args, message in [
    (
      [
        f"--from=llama:{tmp_path / ('x' * 300)}",
        f"--to=unilm:{tmp_path / 'out'}",
      ],
      "cannot read .*: File name too long",
    ),
    (
      ["--from=llama:~nobody-of-that-name/x", f"--to=unilm:{tmp_path / 'out'}"],
      "cannot read .*: No such file",
    ),
  ]:
    result = convert(*args)
    assert result.returncode == 1 and re.fullmatch(
      f"error: {message}.*\n", result.stderr
    ), result.stderr


@pytest.mark.parametrize("target", ["diffjax", "unilm"])
def test_a_place_that_cannot_be_written(write_llama, convert, target, tmp_path):
  write_llama(tmp_path / "llama")
  (tmp_path / "file").write_text("mine")
  result = convert(
    f"--from=llama:{tmp_path / 'llama'}",
    f"--to={target}:{tmp_path / 'file/below'}",
  )
  assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
  assert (
    result.stderr.startswith("error: cannot ")
    and str(tmp_path / "file") in result.stderr
  )


def test_fields_that_are_false_are_among_the_flags_to_train_on(
  write_llama, convert, tmp_path
):
  write_llama(tmp_path / "llama")
  result = convert(
    f"--from=llama:{tmp_path / 'llama'}", f"--to=diffjax:{tmp_path / 'out'}"
  )
  fields = [
    field.split("=")
    for field in result.stdout.strip().split(" --config.model.")[1:]
  ]
  assert (
    result.returncode == 0
    and {"head_norm": "False", "tie_embeddings": "False"}.items()
    <= dict(fields).items()
  )


def test_a_vocabulary_that_is_padded_is_said(
  write_llama, write_tokenizer, convert, tmp_path
):
  write_llama(tmp_path / "llama")
  write_tokenizer(tmp_path / "llama", 100)
  result = convert(
    f"--from=llama:{tmp_path / 'llama'}",
    f"--to=unilm:{tmp_path / 'out'}",
    "--dtype=bfloat16",
  )
  assert result.returncode == 0 and not result.stderr
  assert (
    result.stdout
    == f"{tmp_path / 'out'}: diff_v2, 2 layers of width 32, vocabulary 128 (its tokenizer has 100)\n"
    "documents: TEXT <|endoftext|>; generation stops at <|endoftext|>\n"
  )
  tensors = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
  assert {tensor.dtype for tensor in tensors.values()} == {
    np.dtype(ml_dtypes.bfloat16)
  }
  assert (
    pathlib.Path(tmp_path / "out/tokenizer.json").read_text()
    == (tmp_path / "llama/tokenizer.json").read_text()
  )


def test_a_card_tells_what_is_known_of_an_exported_run(
  make_model, convert, tmp_path
):
  """Its config, its data and its figures up to the exported step; and of a model that came from elsewhere that nothing is known."""
  model = make_model("diff")
  config = Config(
    model=model.config,
    data=DataConfig(source="text:a|b/*.txt", length=16),
    train=TrainConfig(steps=7, batch_size=2),
  )
  run = tmp_path / "run"
  with Checkpoints(str(run), keep=1) as checkpoints:
    params = jax.tree.map(jax.numpy.asarray, model.params)
    checkpoints.save(
      5, {"params": params}, data_state={"shares": []}, config=config.to_dict()
    )
    checkpoints.wait()
  lines = [
    {"step": 2, "validation/loss": 3.0, "validation/others": 4.0},
    {"step": 5, "validation/loss": 2.0, "validation/others": None},
    {"step": 6, "validation/loss": 1.0},
  ]
  (run / "metrics.jsonl").write_text(
    "".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 7'
  )
  figure = {
    "name": "accuracy",
    "at": {"depth": 0.5},
    "value": 0.25,
    "low": 0.125,
    "high": 0.5,
  }
  (run / "evals").mkdir()
  (run / "evals/needle.json").write_text(
    json.dumps(
      {"models": [{"name": f"{run} at step 5"}], "figures": [figure] * 20}
    )
  )
  (run / "evals/validation.json").write_text("{")
  for target, library in (
    ("diffllama", "transformers"),
    ("unilm", "diffjax"),
    ("diffjax", "diffjax"),
  ):
    out = tmp_path / f"out_{target}"
    dtype = ["--dtype=bfloat16"] * (target == "diffllama")
    assert (
      convert(
        f"--from=diffjax:{run}", f"--to={target}:{out}", *dtype
      ).returncode
      == 0
    )
    card = (out / "README.md").read_text()
    assert (
      card.startswith(
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n"
      )
      and "license" not in card
    )
    assert (
      f"# out_{target}\n" in card
      and "DIFF Transformer (V1)" in card
      and "trained with diffjax for 5 steps" in card
    )
    assert (
      "| steps | 5 of 7 |" in card
      and "| tokens | 160, 32 a step |" in card
      and "| text | text:a\\|b/*.txt |" in card
    )
    assert "| loss | 2 | 5 |\n| others | 4 | 2 |" in card
    assert (
      card.count("| accuracy | depth 0.5 | 0.25 [0.125, 0.5] |") == 12
      and "the first of 20" in card
      and "`needle`, at step 5" in card
    )
    assert ("rounded to bfloat16" in card) == bool(
      dtype
    ) and "trained on rows of 16 tokens" in card
    whole = re.search("```toml\n(.*?)```", card, re.DOTALL)[1]
    (tmp_path / "config.toml").write_text(whole)
    assert (
      from_config_dict(config_file.read(str(tmp_path / "config.toml")))
      == config
    )
  assert (
    convert(
      f"--from=diffjax:{tmp_path / 'out_diffjax'}",
      f"--to=unilm:{tmp_path / 'again'}",
    ).returncode
    == 0
  )
  card = (tmp_path / "again/README.md").read_text()
  assert (
    "converted from the layout diffjax" in card
    and "Nothing is known here of its training" in card
    and "## Measured" not in card
  )
