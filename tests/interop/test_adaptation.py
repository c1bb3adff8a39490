"""A Llama becomes a DIFF V2 or DEX model of the same function, which is trained further by a recipe."""

import re
import shlex
import shutil

import jax
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

from diffjax.config import UserError, from_config_dict
from diffjax.inference import trained
from diffjax.inference.sampler import Sampler
from diffjax.interop import llama, unilm, workdir
from diffjax.interop.adapt import adapted
from diffjax.interop.layout import Model
from diffjax.parallel.mesh import make_mesh
from diffjax.training import loop
from diffjax.training.program import build
from tests.harness.tiers import full


def reference(parts, tensors, tokens, *, tie, base=500.0, eps=1e-6):
  """Logits of one row [T] by the Llama itself, in float64."""
  tensors = {
    name: tensor.astype(np.float64) for name, tensor in tensors.items()
  }
  x = tensors["model.embed_tokens.weight"][tokens]
  for layer in range(2):
    weight = {
      name.split(f"layers.{layer}.")[1]: tensor
      for name, tensor in tensors.items()
      if f"layers.{layer}." in name
    }
    h = parts.norm(x, weight["input_layernorm.weight"], eps)
    q, k, v = (
      (h @ weight[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, 8)
      for name in "qkv"
    )
    q, k = (parts.rotate(array, base, interleaved=False) for array in (q, k))
    heads = [
      parts.attend(q[:, head], k[:, head // 2], v[:, head // 2])
      for head in range(4)
    ]
    x = x + np.concatenate(heads, axis=-1) @ weight["self_attn.o_proj.weight"].T
    h = parts.norm(x, weight["post_attention_layernorm.weight"], eps)
    x = x + parts.swiglu(
      h, *(weight[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    )
  return (
    parts.norm(x, tensors["model.norm.weight"], eps)
    @ tensors["model.embed_tokens.weight" if tie else "lm_head.weight"].T
  )


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
  "attention, noise",
  [("softmax", None), ("diff_v2", None), ("diff_v2", 2), ("dex", None)],
)
def test_same_logits(
  write_llama, parts, logits, attention, noise, tie, tmp_path
):
  tensors = write_llama(tmp_path, tie=tie)
  model = adapted(llama.read(str(tmp_path)), attention, noise)
  assert (model.config.attention, model.config.num_noise_heads) == (
    attention,
    noise,
  )
  assert not model.config.head_norm and model.config.tie_embeddings is tie
  tokens = np.random.default_rng(0).integers(0, 128, (2, 20))
  want = np.stack([reference(parts, tensors, row, tie=tie) for row in tokens])
  rounding = (
    4e-6 if noise else 2e-6
  )  # heads that share a noise map subtract what another one gives back
  np.testing.assert_allclose(
    logits(model, tokens), want, atol=rounding * np.abs(want).max(), rtol=0
  )


def test_a_transformer_of_our_own_is_adapted(
  make_model, convert, logits, tmp_path
):
  """One with biases, whose four heads share two noise maps."""
  model = make_model("softmax", projection_biases=True)
  workdir.write(str(tmp_path / "run"), model)
  source, target = (
    f"--from=diffjax:{tmp_path / 'run'}",
    f"--to=diffjax:{tmp_path / 'gda'}",
  )
  result = convert(source, target, "--attention=diff_v2", "--num_noise_heads=2")
  assert (
    result.returncode == 0
    and "--config.model.num_noise_heads=2" in result.stdout
  ), result.stderr
  tokens = np.random.default_rng(0).integers(0, 128, (2, 20))
  want = logits(model, tokens)
  np.testing.assert_allclose(
    logits(workdir.read(str(tmp_path / "gda")), tokens),
    want,
    atol=5e-6 * np.abs(want).max(),
    rtol=0,
  )


@pytest.mark.parametrize(
  "model, args, message",
  [
    (
      "diff",
      ["--attention=dex"],
      "--attention=dex: only a Transformer, attention 'softmax', can be adapted; this model has 'diff'",
    ),
    (
      "softmax",
      ["--attention=dex", "--num_noise_heads=2"],
      "--num_noise_heads=2: only --attention=diff_v2 has noise maps",
    ),
    (
      "softmax",
      ["--num_noise_heads=2"],
      "--num_noise_heads=2: pass --attention=diff_v2 with it",
    ),
    (
      "softmax",
      ["--attention=diff_v2", "--num_noise_heads=3"],
      "--num_noise_heads=3: must divide the model's 4 heads and be a multiple of its 2 key/value heads; it can be 2, 4$",
    ),
    (
      "normed",
      ["--attention=diff_v2"],
      "--attention=diff_v2: this model has a head norm",
    ),
  ],
)
def test_what_cannot_be_adapted(
  make_model, convert, model, args, message, tmp_path
):
  made = (
    make_model("diff")
    if model == "diff"
    else make_model("softmax", head_norm=model == "normed")
  )
  workdir.write(str(tmp_path / "run"), made)
  result = convert(
    f"--from=diffjax:{tmp_path / 'run'}",
    f"--to=diffjax:{tmp_path / 'out'}",
    *args,
  )
  assert (
    result.returncode and not result.stdout and not (tmp_path / "out").exists()
  )
  assert re.match(f"error: {message}", result.stderr.strip()), result.stderr


def test_an_attention_that_no_transformer_becomes_is_named(make_model):
  with pytest.raises(
    UserError,
    match="--attention=gated: a Transformer becomes one of softmax, diff_v2, dex",
  ):
    adapted(make_model("softmax"), "gated")


RECIPES = {
  "llama_1b_dex": ["--attention=dex"],
  "llama_1b_gda": ["--attention=diff_v2", "--num_noise_heads=2"],
}


@pytest.fixture(params=["llama_1b_dex", *full(["llama_1b_gda"])])
def recipe(request, write_llama, convert, tmp_path):
  """A recipe's config for a small Llama, by the commands as a user gives them, and the workdir that it starts from."""
  write_llama(tmp_path / "llama")
  (tmp_path / "text.txt").write_text(
    " ".join(f"w{index % 120 + 1}" for index in range(3000))
  )
  result = convert(
    f"--from=llama:{tmp_path / 'llama'}",
    f"--to=diffjax:{tmp_path / 'start'}",
    *RECIPES[request.param],
  )
  assert result.returncode == 0, result.stderr
  printed = shlex.split(result.stdout.splitlines()[-1].partition(": ")[2])
  data = dict(
    source=f"text:{tmp_path}/text.txt",
    validation_source=f"text:{tmp_path}/text.txt",
    prepared_dir=tmp_path / "rows",
    length=16,
  )
  train = dict(
    steps=3,
    batch_size=16,
    accumulation=2,
    checkpoint_interval=2,
    sample_tokens=0,
  )
  mine = {
    "data": data,
    "train": train,
    "eval": dict(interval=0),
    "optimizer": dict(warmup_steps=0),
  }
  flag = f"--config=configs/{request.param}.py"
  args = [
    flag,
    *printed,
    *(
      f"--config.{section}.{name}={value}"
      for section, fields in mine.items()
      for name, value in fields.items()
    ),
  ]
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file(
    "config", flag_values=values, sys_argv=args
  )
  values(["train", *args])
  return from_config_dict(holder.value), tmp_path / "start"


def test_a_recipe_trains_what_it_says(recipe, logits, tmp_path):
  """What it does not name stays, bit for bit, and has no moments; each array that it names moves, in every layer. A resumed run is an
  unbroken one, and generation continues what the whole row gives."""
  config, start = recipe
  run, names = tmp_path / "run", config.optimizer.trained.split(",")
  loop.train(config, str(run))
  before, after = trained.load(start), trained.load(run)
  for (path, old), new in zip(
    jax.tree_util.tree_leaves_with_path(before.params),
    jax.tree.leaves(after.params),
    strict=True,
  ):
    moved = np.asarray(old != new)
    assert (
      moved.reshape(len(moved), -1).any(axis=1).all()
      if path[-1].key in names
      else not moved.any()
    ), path
  state = jax.tree_util.tree_leaves_with_path(
    build(config, make_mesh(config.mesh)).abstract_state.opt_state
  )
  assert {path[-1].key for path, leaf in state if leaf.ndim > 1} == {*names}

  shutil.rmtree(run / "checkpoints/3")
  loop.train(config, str(run))
  jax.tree.map(
    np.testing.assert_array_equal, trained.load(run).params, after.params
  )

  (tokens,) = Sampler(after.model, after.params).generate([[3, 4, 5]], 8)
  read = logits(
    Model(after.config.model, after.params, after.tokenizer),
    [[3, 4, 5, *tokens]],
  )
  assert read[0, 2:-1].argmax(axis=-1).tolist() == tokens
  with pytest.raises(
    UserError,
    match=f"parameters alone.*another --workdir and --config.train.init_from={start}$",
  ):
    loop.train(config, str(start))


def test_straight_to_the_authors_layout(write_llama, logits, tmp_path):
  write_llama(tmp_path / "llama")
  model = adapted(llama.read(str(tmp_path / "llama")), "diff_v2")
  unilm.write(str(tmp_path / "unilm"), model, "float32")
  jax.tree.map(
    np.testing.assert_array_equal,
    unilm.read(str(tmp_path / "unilm")).params,
    model.params,
  )
