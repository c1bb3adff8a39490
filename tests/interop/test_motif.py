"""Motif's checkpoints: golden ones of both shapes, both ways, and what is refused."""

import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

from diffjax.config import UserError
from diffjax.interop import motif
from diffjax.model.decoder import Decoder
from tests.interop import motif_reference

NAMES = ["motif_tiny", "motif_2_tiny", "motif_2_tiny_gqa"]


def tensors_of(directory):
  found = {}
  for file in sorted(directory.glob("*.safetensors")):
    found |= safetensors.numpy.load_file(file)
  return found


@pytest.mark.parametrize("name", NAMES)
def test_golden_logits(golden, logits, name, tmp_path):
  path, ids, want = golden(name, tmp_path / "source")
  model = motif.read(str(path))
  np.testing.assert_allclose(logits(model, ids), want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_golden_attention_of_every_layer(golden, name, tmp_path):
  path, _, _ = golden(name, tmp_path / "source")
  model, data = motif.read(str(path)), np.load(path / "golden_logits.npz")
  _, variables = jax.jit(lambda params, ids: Decoder(model.config).apply({"params": params}, ids, mutable=["intermediates"]))(
    model.params, data["input_ids"]
  )
  (queries,) = variables["intermediates"]["layers"]["attention"]["query"]
  noise = model.config.num_noise_heads or model.config.num_heads
  assert queries.shape[3:5] == (noise, model.config.num_heads // noise + 1)


@pytest.mark.parametrize("name", NAMES)
def test_written_tensors_are_those_that_were_read(golden, name, tmp_path):
  path, _, _ = golden(name, tmp_path / "source")
  dtype = json.loads((path / "config.json").read_text())["torch_dtype"]
  motif.write(str(tmp_path / "out"), motif.read(str(path)), dtype)
  source, out = tensors_of(path), tensors_of(tmp_path / "out")
  assert source.keys() == out.keys()
  for tensor, value in source.items():
    np.testing.assert_array_equal(out[tensor], value)
  was, now = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "out"))
  computed = {
    "num_attention_heads",
    "num_key_value_heads",
    "num_noise_heads",
    "hidden_size",
    "attn_rms_norm_eps",
    "rms_norm_eps",
    "rope_theta",
  }
  assert {field: now.get(field) for field in computed} == {field: was.get(field) for field in computed}
  again = motif.read(str(tmp_path / "out"))
  assert again.config == motif.read(str(path)).config


@pytest.mark.parametrize(
  "fields", [{}, dict(num_noise_heads=2, num_kv_heads=1, rope_scaling="yarn", rope_factor=4.0, rope_original_length=8)]
)
def test_a_model_of_ours_is_written_as_the_formulas_read_it(make_model, logits, fields, tmp_path):
  """With gains and λ vectors off their initial values; the transcription reads the written tensors."""
  model = make_model("diff", head_norm_eps=1e-3, lambda_init_offset=1, ffn_activation="poly_norm", **fields)
  motif.write(str(tmp_path), model, "float32")
  again = motif.read(str(tmp_path))
  assert again.config == model.config
  jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
  if model.config.rope_scaling == "none":
    ids = np.arange(1, 20)
    tensors = {name: value.astype(np.float64) for name, value in tensors_of(tmp_path).items()}
    want = motif_reference.logits(json.loads((tmp_path / "config.json").read_text()), tensors, ids)
    np.testing.assert_allclose(logits(model, ids[None])[0], want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(num_noise_heads=3), "num_noise_heads = 3: it must divide num_attention_heads = 10, and be less"),
    (dict(num_noise_heads=10), "num_noise_heads = 10: it must divide num_attention_heads = 10, and be less"),
    (dict(num_noise_heads=-2), "num_noise_heads = -2: it must be a positive multiple of 1"),
    (dict(num_noise_heads=True), "num_noise_heads = True: it must be a positive multiple of 1"),
    (dict(num_key_value_heads=3), "num_key_value_heads = 3: it must be a positive multiple of 2"),
    (dict(num_key_value_heads=6), "num_kv_heads = 3: must divide model.num_noise_heads = 2"),
    (dict(grouped_ratio=3), "grouped_ratio = 3: diffjax supports only 4"),
    (dict(k_ratio=2), "k_ratio = 2: diffjax supports only 1"),
    (dict(hidden_act="silu"), "hidden_act = 'silu': diffjax supports only 'poly_norm'"),
    (dict(use_bias=True), "use_bias = True: diffjax supports only False"),
    (dict(use_sliding_window=True), "use_sliding_window = True: diffjax supports only False"),
    (dict(is_causal=False), "is_causal = False: diffjax supports only True"),
    (dict(attn_rms_norm_eps=None), "has no attn_rms_norm_eps"),
    (dict(model_type="Motif3"), "model_type = 'Motif3': this layout is 'Motif' or 'motif'"),
    (
      dict(kv_lora_rank=512, mhc_enabled=True),
      "has fields that diffjax does not know: kv_lora_rank = 512, mhc_enabled = True; remove those",
    ),
    (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "scales its rotary angles as diffjax does not .*'dynamic'"),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rotary angles as diffjax does not .*original_max_position_embeddings"),
    (dict(head_dim=6), r"has model.layers.0.self_attn.q_proj.weight of shape \[80, 24\], but for its config.json it must be \[60, 24\]"),
    (dict(vocab_size=100), "tokenizer.json has 128 tokens, but the model has 100"),
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
  with pytest.raises(UserError, match=f"there is no .*{re.escape(shard.name)}, which model.safetensors.index.json names"):
    motif.read(str(path))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(lambda_init_offset=0), "this layout can only say lambda_init_offset 1: it cannot hold a model of lambda_init_offset 0"),
    (dict(ffn_activation="silu"), "this layout can only say ffn_activation poly_norm"),
    (dict(lambda_init=0.8), "this layout can only say lambda_init None: it cannot hold a model of lambda_init 0.8"),
    (dict(attention="diff_v2", head_norm=False), "this layout can only say attention diff: it cannot hold a model of attention diff_v2"),
    (dict(plain_layers=1), "this layout can only say plain_layers 0"),
    (dict(window=9), "this layout can only say window None"),
  ],
)
def test_a_model_that_the_layout_cannot_say(make_model, fields, message, tmp_path):
  sizes = dict(attention="diff", lambda_init_offset=1, ffn_activation="poly_norm") | fields
  with pytest.raises(UserError, match=message):
    motif.write(str(tmp_path / "out"), make_model(**sizes), "float32")
  assert not (tmp_path / "out").exists()
