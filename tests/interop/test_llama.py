"""A Llama becomes a DIFF V2 model of the same function, which can be trained further."""

import dataclasses

import jax
import numpy as np
import pytest

from diffjax.config import EvalConfig, OptimizerConfig, TrainConfig, UserError
from diffjax.interop import llama, unilm
from diffjax.training import loop, trained


def reference(parts, tensors, tokens, *, tie, base=500.0, eps=1e-6):
  """Logits of one row [T] by the Llama itself, in float64."""
  tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
  x = tensors["model.embed_tokens.weight"][tokens]
  for layer in range(2):
    weight = {name.split(f"layers.{layer}.")[1]: tensor for name, tensor in tensors.items() if f"layers.{layer}." in name}
    h = parts.norm(x, weight["input_layernorm.weight"], eps)
    q, k, v = ((h @ weight[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, 8) for name in "qkv")
    q, k = (parts.rotate(array, base, interleaved=False) for array in (q, k))
    heads = [parts.attend(q[:, head], k[:, head // 2], v[:, head // 2]) for head in range(4)]
    x = x + np.concatenate(heads, axis=-1) @ weight["self_attn.o_proj.weight"].T
    h = parts.norm(x, weight["post_attention_layernorm.weight"], eps)
    x = x + parts.swiglu(h, *(weight[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
  return parts.norm(x, tensors["model.norm.weight"], eps) @ tensors["model.embed_tokens.weight" if tie else "lm_head.weight"].T


@pytest.mark.parametrize("tie", [True, False])
def test_same_logits(write_llama, parts, logits, tie, tmp_path):
  tensors = write_llama(tmp_path, tie=tie)
  model = llama.read(str(tmp_path))
  assert model.config.attention == "diff_v2" and not model.config.head_norm and model.config.tie_embeddings is tie
  tokens = np.random.default_rng(0).integers(0, 128, (2, 20))
  want = np.stack([reference(parts, tensors, row, tie=tie) for row in tokens])
  np.testing.assert_allclose(logits(model, tokens), want, atol=2e-6 * np.abs(want).max(), rtol=0)
  assert not model.params["layers"]["attention"]["lambda_hat"].any()


@pytest.fixture
def start(write_llama, convert, tmp_path):
  """A Llama as a workdir, by the command."""
  write_llama(tmp_path / "llama")
  result = convert(f"--from=llama:{tmp_path / 'llama'}", f"--to=diffjax:{tmp_path / 'v2'}")
  assert result.returncode == 0, result.stderr
  return trained.load(tmp_path / "v2")


@pytest.fixture
def run_config(start, tmp_path):
  """A run of one step."""
  (tmp_path / "text.txt").write_text(" ".join(f"w{index % 120 + 1}" for index in range(3000)))
  source = f"text:{tmp_path}/text.txt"
  return dataclasses.replace(
    start.config,
    data=dataclasses.replace(start.config.data, source=source, validation_source=source, prepared_dir=str(tmp_path / "rows")),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=0, schedule="wsd", decay_fraction=0.0, weight_decay=0.0),
    train=TrainConfig(steps=1, batch_size=8, sample_tokens=0),
    eval=EvalConfig(interval=0),
  )


@pytest.mark.full
def test_training_goes_on_from_it(start, run_config, tmp_path):
  """Training starts from its parameters, and makes the two maps differ. Its own workdir has no optimizer to resume."""
  train = dataclasses.replace(run_config.train, init_from=str(tmp_path / "v2"))
  loop.train(dataclasses.replace(run_config, train=train), str(tmp_path / "run"))
  after = trained.load(tmp_path / "run")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), after.params, start.params)
  attention = after.params["layers"]["attention"]
  assert np.abs(attention["lambda_hat"]).max(axis=(1, 2)).min() > 0
  assert np.abs(attention["query"][..., 0, :] - attention["query"][..., 1, :]).max(axis=(1, 2, 3)).min() > 1e-4
  assert after.tokenizer.encode("w3 w4") == start.tokenizer.encode("w3 w4") == [3, 4]

  with pytest.raises(UserError, match=f"parameters alone.*another --workdir and --config.train.init_from={tmp_path / 'v2'}$"):
    loop.train(run_config, str(tmp_path / "v2"))


def test_straight_to_the_authors_layout(write_llama, logits, tmp_path):
  write_llama(tmp_path / "llama")
  model = llama.read(str(tmp_path / "llama"))
  unilm.write(str(tmp_path / "unilm"), model, "float32")
  jax.tree.map(np.testing.assert_array_equal, unilm.read(str(tmp_path / "unilm")).params, model.params)
