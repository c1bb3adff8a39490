"""Motif's checkpoints: golden ones of both shapes, both ways, and what is refused."""

import dataclasses
import importlib
import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

from diffjax.config import UserError, from_config_dict
from diffjax.inference import trained
from diffjax.inference.sampler import Sampler
from diffjax.interop import motif, workdir
from diffjax.model.attention import DiffAttention
from diffjax.model.decoder import lambda_inits
from tests.harness.tiers import full
from tests.interop import motif_reference

NAMES = ["motif_tiny", "motif_2_tiny", "motif_2_tiny_gqa"]


# Fields of the published config.json, as far as public code states them; the rest are that code's defaults.
PUBLISHED = {
  "motif_2_6b": dict(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=16,
    rope_theta=500000.0,
    max_position_embeddings=16384,
    tie_word_embeddings=True,
  ),
  "motif_2_12b": dict(
    hidden_size=4096,
    intermediate_size=16384,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=16,
    rope_theta=1000000.0,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
    head_dim=128,
    num_noise_heads=8,
    grouped_ratio=4,
    k_ratio=1,
    lambda_init=1,
  ),
}
OF_ALL = dict(
  architectures=["MotifForCausalLM"],
  model_type="Motif",
  vocab_size=219520,
  hidden_act="poly_norm",
  rms_norm_eps=1e-6,
  rope_scaling=None,
  attn_rms_norm_eps=1e-5,
  use_bias=False,
  sliding_window=None,
  use_sliding_window=False,
  max_window_layers=28,
  attention_dropout=0.0,
  initializer_range=0.02,
  torch_dtype="float32",
  use_cache=True,
  bos_token_id=219396,
  eos_token_id=219395,
)
# The tensors of the published models: their number, and the shapes of a layer's and of the vocabulary's.
TENSORS = {
  "motif_2_6b": (
    514,
    {
      "q": (2048, 2048),
      "k": (2048, 2048),
      "v": (2048, 2048),
      "o": (2048, 2048),
    },
  ),
  "motif_2_12b": (
    643,
    {
      "q": (5120, 4096),
      "k": (2048, 4096),
      "v": (2048, 4096),
      "o": (4096, 8192),
    },
  ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_of_a_published_model_is_what_convert_reads(name, tmp_path):
  """Field by field: a run from the converted weights computes what the published model does."""
  (tmp_path / "config.json").write_text(json.dumps(OF_ALL | PUBLISHED[name]))
  read = motif._read_config(tmp_path)
  model = from_config_dict(
    importlib.import_module(f"diffjax.configs.{name}").get_config()
  ).model
  assert dataclasses.replace(model, remat=read.remat) == read
  shapes, (count, attention) = motif._layout(read).shapes(), TENSORS[name]
  assert len(shapes) == count and shapes["model.embed_tokens.weight"] == (
    219520,
    read.embed_dim,
  )
  for which, shape in attention.items():
    assert shapes[f"model.layers.0.self_attn.{which}_proj.weight"] == shape
  assert shapes["model.layers.0.self_attn.subln.weight"] == (256,) and shapes[
    "model.layers.0.mlp.act_fn.bias"
  ] == (1,)


def tensors_of(directory):
  found = {}
  for file in sorted(directory.glob("*.safetensors")):
    found |= safetensors.numpy.load_file(file)
  return found


@pytest.mark.parametrize("name", NAMES)
def test_golden_logits(golden, logits, name, tmp_path):
  path, ids, want = golden(name, tmp_path / "source")
  model = motif.read(str(path))
  np.testing.assert_allclose(
    logits(model, ids), want, atol=1e-5 * np.abs(want).max(), rtol=0
  )


@pytest.mark.parametrize("name", NAMES)
def test_golden_attention_of_every_layer(golden, name, tmp_path):
  path, _, _ = golden(name, tmp_path / "source")
  model, data = motif.read(str(path)), np.load(path / "golden_logits.npz")
  config = model.config
  attention = DiffAttention(
    num_heads=config.num_heads,
    num_noise_heads=config.num_noise_heads,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    rope_base=config.rope_base,
    norm_eps=config.head_norm_eps,
  )
  params, groups = (
    model.params["layers"]["attention"],
    config.num_noise_heads or config.num_heads,
  )
  assert params["query"].shape[2:4] == (groups, config.num_heads // groups + 1)
  for layer, (x, want) in enumerate(
    zip(data["attention_input"], data["attention_output"], strict=True)
  ):
    of_layer = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params)
    got = attention.apply({"params": of_layer}, x, lambda_inits(config)[layer])
    np.testing.assert_allclose(
      got, want, atol=1e-5 * np.abs(want).max(), rtol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_written_tensors_are_those_that_were_read(golden, name, tmp_path):
  path, _, _ = golden(name, tmp_path / "source")
  dtype = json.loads((path / "config.json").read_text())["torch_dtype"]
  motif.write(str(tmp_path / "out"), motif.read(str(path)), dtype)
  source, out = tensors_of(path), tensors_of(tmp_path / "out")
  assert source.keys() == out.keys()
  for tensor, value in source.items():
    np.testing.assert_array_equal(out[tensor], value)
  was, now = (
    json.loads((folder / "config.json").read_text())
    for folder in (path, tmp_path / "out")
  )
  computed = {
    "num_attention_heads",
    "num_key_value_heads",
    "num_noise_heads",
    "hidden_size",
    "attn_rms_norm_eps",
    "rms_norm_eps",
    "rope_theta",
  }
  assert {field: now.get(field) for field in computed} == {
    field: was.get(field) for field in computed
  }
  again = motif.read(str(tmp_path / "out"))
  assert again.config == motif.read(str(path)).config


@pytest.mark.parametrize(
  "fields",
  [
    {},
    dict(
      num_noise_heads=2,
      num_kv_heads=1,
      rope_scaling="yarn",
      rope_factor=4.0,
      rope_original_length=8,
    ),
  ],
)
def test_a_model_of_ours_is_written_as_the_formulas_read_it(
  make_model, logits, fields, tmp_path
):
  """With gains and λ vectors off their initial values; the transcription reads the written tensors."""
  model = make_model(
    "diff",
    head_norm_eps=1e-3,
    lambda_init_offset=1,
    ffn_activation="poly_norm",
    **fields,
  )
  motif.write(str(tmp_path), model, "float32")
  again = motif.read(str(tmp_path))
  assert again.config == model.config
  jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
  if model.config.rope_scaling == "none":
    ids = np.arange(1, 20)
    tensors = {
      name: value.astype(np.float64)
      for name, value in tensors_of(tmp_path).items()
    }
    want = motif_reference.logits(
      json.loads((tmp_path / "config.json").read_text()), tensors, ids
    )
    np.testing.assert_allclose(
      logits(model, ids[None])[0], want, atol=1e-5 * np.abs(want).max(), rtol=0
    )


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      dict(num_noise_heads=3),
      "num_noise_heads = 3: it must divide num_attention_heads = 10, and be less",
    ),
    (
      dict(num_noise_heads=10),
      "num_noise_heads = 10: it must divide num_attention_heads = 10, and be less",
    ),
    (
      dict(num_noise_heads=-2),
      "num_noise_heads = -2: it must be a positive multiple of 1",
    ),
    (
      dict(num_noise_heads=True),
      "num_noise_heads = True: it must be a positive multiple of 1",
    ),
    (
      dict(num_key_value_heads=3),
      "num_key_value_heads = 3: it must be a positive multiple of 2",
    ),
    (
      dict(num_key_value_heads=6),
      "num_kv_heads = 3: must divide model.num_noise_heads = 2",
    ),
    (dict(grouped_ratio=3), "grouped_ratio = 3: diffjax supports only 4"),
    (dict(k_ratio=2), "k_ratio = 2: diffjax supports only 1"),
    (
      dict(hidden_act="silu"),
      "hidden_act = 'silu': diffjax supports only 'poly_norm'",
    ),
    (dict(use_bias=True), "use_bias = True: diffjax supports only False"),
    (
      dict(use_sliding_window=True),
      "use_sliding_window = True: diffjax supports only False",
    ),
    (dict(is_causal=False), "is_causal = False: diffjax supports only True"),
    (dict(attn_rms_norm_eps=None), "has no attn_rms_norm_eps"),
    (
      dict(model_type="Motif3"),
      "model_type = 'Motif3': this layout supports only 'Motif' or 'motif'",
    ),
    (
      dict(kv_lora_rank=512, mhc_enabled=True),
      "has fields that diffjax does not know: kv_lora_rank = 512, mhc_enabled = True; remove the fields",
    ),
    (
      dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
      "scales its rotary angles .*'dynamic'",
    ),
    (
      dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
      "rotary angles .*original_max_position_embeddings",
    ),
    (
      dict(head_dim=6),
      r"has model.layers.0.self_attn.q_proj.weight of shape \[80, 24\], but its config.json requires \[60, 24\]",
    ),
    (
      dict(vocab_size=100),
      "tokenizer.json has 128 tokens, but the model has 100",
    ),
  ],
)
def test_what_is_refused(golden, change, message, tmp_path):
  path, _, _ = golden("motif_2_tiny", tmp_path / "source")
  config = json.loads((path / "config.json").read_text()) | change
  (path / "config.json").write_text(json.dumps(config))
  with pytest.raises(UserError, match=message):
    motif.read(str(path))


def test_a_missing_shard_is_named(golden, tmp_path):
  path, _, _ = golden("motif_2_tiny", tmp_path / "source")
  shard = sorted(path.glob("*.safetensors"))[1]
  shard.unlink()
  with pytest.raises(
    UserError,
    match=f"there is no .*{re.escape(shard.name)}, which model.safetensors.index.json names",
  ):
    motif.read(str(path))


@pytest.mark.parametrize("differs", [True, False])
def test_a_tensor_of_two_files_is_named(golden, differs, tmp_path):
  path, _, _ = golden("motif_2_tiny", tmp_path / "source")
  first, *_, last = sorted(path.glob("*.safetensors"))
  name, tensor = next(iter(safetensors.numpy.load_file(first).items()))
  safetensors.numpy.save_file(
    safetensors.numpy.load_file(last) | {name: tensor + differs}, last
  )
  with pytest.raises(
    UserError,
    match=f"has {re.escape(name)} in more than one file, {last.name} among them",
  ):
    motif.read(str(path))


def test_there_and_back_by_command(golden, convert, tmp_path):
  """As a user does it: into a workdir, out of it, and in again; the card says how."""
  path, _, _ = golden("motif_2_tiny_gqa", tmp_path / "source")
  for source, target in (
    ("motif:source", "diffjax:run"),
    ("diffjax:run", "motif:out"),
    ("motif:out", "diffjax:again"),
  ):
    result = convert(
      *(
        f"--{flag}={place.replace(':', f':{tmp_path}/')}"
        for flag, place in (("from", source), ("to", target))
      )
    )
    assert result.returncode == 0, result.stderr
  assert (
    "--config.model.num_noise_heads=4" in result.stdout
    and "--config.model.ffn_activation=poly_norm" in result.stdout
  )
  card = (tmp_path / "out/README.md").read_text()
  assert (
    "python -m diffjax.convert --from=motif:out --to=diffjax:loaded" in card
  )
  source, out = tensors_of(path), tensors_of(tmp_path / "out")
  assert source.keys() == out.keys()
  for name, tensor in source.items():
    np.testing.assert_array_equal(out[name], tensor)


@pytest.mark.parametrize("weight_dtype", [None, *full(["int8"])])
def test_what_was_converted_is_served_by_several_devices(
  golden, weight_dtype, tmp_path
):
  """From the workdir, a part of the parameters on each: the golden logits; and in int8 those of one device in int8."""
  path, ids, want = golden("motif_2_tiny", tmp_path / "source")
  workdir.write(str(tmp_path / "run"), motif.read(str(path)))
  prompts = [list(map(int, row)) for row in ids]

  def serve(**how):
    loaded = trained.load(tmp_path / "run", **how)
    return (
      Sampler(loaded.model, loaded.params, batch_size=len(prompts), capacity=64)
      .prefill(prompts)
      .logits
    )

  want = want[:, -1]
  if weight_dtype:
    pytest.importorskip("qwix")
    golden_logits, want = want, serve(weight_dtype="int8")
    assert 1e-4 < np.abs(want - golden_logits).max() / np.abs(want).max() < 0.1
  np.testing.assert_allclose(
    serve(tensor=2, weight_dtype=weight_dtype),
    want,
    atol=1e-5 * np.abs(want).max(),
    rtol=0,
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      dict(lambda_init_offset=0),
      "this format supports only lambda_init_offset = 1; the model has 0",
    ),
    (
      dict(ffn_activation="silu"),
      "this format supports only ffn_activation = 'poly_norm'",
    ),
    (
      dict(lambda_init=0.8),
      "this format supports only lambda_init = None; the model has 0.8",
    ),
    (
      dict(attention="diff_v2", lambda_init_offset=0, head_norm=False),
      "this format supports only attention = 'diff'; the model has 'diff_v2'",
    ),
    (dict(plain_layers=1), "this format supports only plain_layers = 0"),
    (dict(window=9), "this format supports only window = None"),
  ],
)
def test_a_model_that_the_layout_cannot_say(
  make_model, fields, message, tmp_path
):
  sizes = (
    dict(attention="diff", lambda_init_offset=1, ffn_activation="poly_norm")
    | fields
  )
  with pytest.raises(UserError, match=message):
    motif.write(str(tmp_path / "out"), make_model(**sizes), "float32")
  assert not (tmp_path / "out").exists()
