"""Hugging Face's DiffLlama: golden checkpoints are read, and written again."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from diffjax.interop import diffllama, directory, workdir

NAMES = ["diffllama_tiny", "diffllama_tiny_gqa"]


def load(path):
  return safetensors.numpy.load_file(path / "model.safetensors")


def assert_same(left, right):
  assert left.keys() == right.keys()
  for name in left:
    assert left[name].dtype == right[name].dtype, name
    np.testing.assert_array_equal(
      left[name].view(np.uint8), right[name].view(np.uint8), err_msg=name
    )


@pytest.mark.parametrize("name", NAMES)
def test_golden_checkpoints_by_the_command(
  golden, convert, logits, name, tmp_path
):
  """Read, they have the same logits to 1e-5; written again, the same tensors bit for bit, and the same config.json."""
  source, ids, want = golden(name, tmp_path / "source")
  result = convert(
    f"--from=diffllama:{source}", f"--to=diffjax:{tmp_path / 'run'}"
  )
  assert result.returncode == 0, result.stderr
  assert f"--config.train.init_from={tmp_path / 'run'}" in result.stdout
  model = workdir.read(str(tmp_path / "run"))
  np.testing.assert_allclose(logits(model, ids), want, atol=1e-5, rtol=0)

  shutil.rmtree(source)  # what comes out needs nothing of it
  assert (
    convert(
      f"--from=diffjax:{tmp_path / 'run'}", f"--to=diffllama:{tmp_path / 'out'}"
    ).returncode
    == 0
  )
  again, _, _ = golden(name, tmp_path / "again")
  assert_same(load(tmp_path / "out"), load(again))
  assert (
    len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
  ), "who may read one file may read all"
  assert (tmp_path / "out/tokenizer.json").read_text() == (
    again / "tokenizer.json"
  ).read_text()
  before, after = (
    json.loads((path / "config.json").read_text())
    for path in (again, tmp_path / "out")
  )
  assert {
    key: after[key]
    for key in before.keys() & after.keys() - {"bos_token_id", "eos_token_id"}
  } == {
    key: before[key]
    for key in before.keys() & after.keys() - {"bos_token_id", "eos_token_id"}
  }
  assert before.keys() - after.keys() == {
    "attention_dropout",
    "initializer_range",
    "lambda_std_dev",
    "pad_token_id",
    "transformers_version",
    "use_cache",
  }
  with safetensors.safe_open(
    tmp_path / "out/model.safetensors", "numpy"
  ) as file:
    assert file.metadata() == {
      "format": "pt"
    }  # transformers 4 refuses files without it


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_read_exactly(golden, dtype, tmp_path):
  source, _, _ = golden("diffllama_tiny", tmp_path / "source")
  halves = {name: tensor.astype(dtype) for name, tensor in load(source).items()}
  safetensors.numpy.save_file(halves, source / "model.safetensors")
  model = diffllama.read(str(source))
  assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {
    np.dtype(np.float32)
  }
  if dtype == "bfloat16":
    diffllama.write(str(tmp_path / "out"), model, dtype)
    assert_same(load(tmp_path / "out"), halves)
    assert (
      json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype
    )
  else:
    diffllama.write(str(tmp_path / "out"), model, "float32")
    assert_same(
      {
        name: tensor.astype(np.float16)
        for name, tensor in load(tmp_path / "out").items()
      },
      halves,
    )


@pytest.mark.parametrize(
  "fields",
  [
    {},
    dict(num_kv_heads=4, tie_embeddings=False),
    dict(num_kv_heads=1, norm_eps=1e-3, rope_base=5e5),
    dict(rope_scaling="llama3", rope_factor=8.0, rope_original_length=16),
  ],
)
def test_outward_and_inward_is_the_same_function(
  make_model, logits, fields, tmp_path
):
  model = make_model("diff", **fields)
  diffllama.write(str(tmp_path), model, "float32")
  again = diffllama.read(str(tmp_path))
  assert again.config == model.config
  tokens = np.random.default_rng(0).integers(0, 128, (2, 32))
  want = logits(model, tokens)
  np.testing.assert_allclose(
    logits(again, tokens), want, atol=1e-5 * np.abs(want).max(), rtol=0
  )
  assert np.all(again.params["layers"]["attention"]["head_gain"] == 1)
  assert again.tokenizer.separator == model.tokenizer.separator == 255
  assert again.tokenizer.encode("é 1") == model.tokenizer.encode("é 1")


def test_angles_stretched_by_1_are_not_stretched(make_model, tmp_path):
  model = make_model("diff")
  diffllama.write(str(tmp_path), model, "float32")
  path = tmp_path / "config.json"
  path.write_text(
    json.dumps(
      json.loads(path.read_text())
      | {
        "rope_parameters": None,
        "rope_scaling": {"type": "linear", "factor": 1.0},
      }
    )
  )
  assert diffllama.read(str(tmp_path)).config == model.config


def test_bfloat16_is_rounded_once_from_what_is_folded(make_model, tmp_path):
  model = make_model("diff")
  diffllama.write(str(tmp_path / "a"), model, "float32")
  diffllama.write(str(tmp_path / "b"), model, "bfloat16")
  assert_same(
    {
      name: tensor.astype(ml_dtypes.bfloat16)
      for name, tensor in load(tmp_path / "a").items()
    },
    load(tmp_path / "b"),
  )


def test_shards(make_model, monkeypatch, tmp_path):
  """Files have at most the given size, except for a larger tensor; the index is that of transformers; the tensors are the same."""
  model = make_model("diff", tie_embeddings=False)
  diffllama.write(str(tmp_path / "one"), model, "float32")
  monkeypatch.setattr(directory, "SHARD_BYTES", 20_000)
  diffllama.write(str(tmp_path / "many"), model, "float32")
  index = json.loads(
    (tmp_path / "many/model.safetensors.index.json").read_text()
  )
  files = sorted(
    path.name for path in (tmp_path / "many").glob("*.safetensors")
  )
  assert len(files) > 2 and files == [
    f"model-{number:05d}-of-{len(files):05d}.safetensors"
    for number in range(1, len(files) + 1)
  ]
  whole = load(tmp_path / "one")
  assert (
    sorted(set(index["weight_map"].values())) == files
    and index["weight_map"].keys() == whole.keys()
  )
  assert index["metadata"]["total_size"] == sum(
    tensor.nbytes for tensor in whole.values()
  )
  parts = {
    file: safetensors.numpy.load_file(tmp_path / "many" / file)
    for file in files
  }
  assert_same(
    {name: parts[file][name] for name, file in index["weight_map"].items()},
    whole,
  )
  for tensors in parts.values():
    assert (
      len(tensors) == 1
      or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
    )
  jax.tree.map(
    np.testing.assert_array_equal,
    *(diffllama.read(str(tmp_path / name)).params for name in ("one", "many")),
  )


def edit(path, **changes):
  config = json.loads((path / "config.json").read_text())
  config = {
    key: value for key, value in (config | changes).items() if value != "gone"
  }
  (path / "config.json").write_text(json.dumps(config))


def test_configs_of_older_versions(golden, tmp_path):
  source, _, _ = golden("diffllama_tiny_gqa", tmp_path / "source")
  want = diffllama.read(str(source)).config
  assert (
    want.rope_base == 640_000.0
    and want.tie_embeddings
    and (want.num_heads, want.num_kv_heads, want.head_dim) == (4, 2, 8)
  )
  edit(
    source,
    rope_parameters="gone",
    rope_theta=640_000,
    rope_scaling=None,
    head_dim=None,
  )
  assert diffllama.read(str(source)).config == want
  edit(
    source,
    num_key_value_heads=None,
    rope_theta="gone",
    tie_word_embeddings="gone",
  )
  tensors = load(source)
  rows = {
    f"model.layers.{layer}.self_attn.{name}_proj.weight"
    for layer in range(2)
    for name in "kv"
  }
  wider = {
    name: np.concatenate([tensor, tensor]) if name in rows else tensor
    for name, tensor in tensors.items()
  }
  safetensors.numpy.save_file(
    wider | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    source / "model.safetensors",
  )
  config = diffllama.read(str(source)).config
  assert (config.rope_base, config.tie_embeddings, config.num_kv_heads) == (
    10_000.0,
    False,
    4,
  )


def test_extra_tensors_of_old_checkpoints(golden, tmp_path):
  """A copy of tied weights, and the angles of RoPE."""
  source, _, _ = golden("diffllama_tiny_gqa", tmp_path / "source")
  want = diffllama.read(str(source)).params
  tensors = load(source)
  tensors |= {
    "lm_head.weight": tensors["model.embed_tokens.weight"],
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
  }
  safetensors.numpy.save_file(tensors, source / "model.safetensors")
  jax.tree.map(
    np.testing.assert_array_equal, diffllama.read(str(source)).params, want
  )
