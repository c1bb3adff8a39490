"""With Hugging Face transformers itself (extra `hf`): it loads written models with the same outputs, and its models are read."""

import jax
import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from diffjax.data.tokenizer_training import train_tokenizer  # noqa: E402
from diffjax.inference.sampler import Sampler  # noqa: E402
from diffjax.inference.trained import load  # noqa: E402
from diffjax.interop import diffllama, directory, llama, workdir  # noqa: E402
from diffjax.model.decoder import Decoder  # noqa: E402
from diffjax.ops.rope import Scaling  # noqa: E402
from tests.harness import tokenizer_files  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 128, (2, 24))


def torch_logits(model, tokens):
  with torch.no_grad():
    return model(torch.as_tensor(tokens)).logits.float().numpy()


def assert_close(got, want):
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
  return str(
    train_tokenizer(
      ["it's a test of 123 words\n\n  "] * 9,
      270,
      tmp_path_factory.mktemp("tokenizer"),
    )
  )


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize(
  "width, base, factor, length", [(128, 1e6, 4.0, 8192), (32, 5e5, 2.5, 100)]
)
def test_rotary_angles_are_stretched_alike(kind, width, base, factor, length):
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  rope = {"rope_type": kind, "factor": factor, "rope_theta": base}
  rope |= (
    {} if kind == "linear" else {"original_max_position_embeddings": length}
  )
  rope |= (
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "llama3"
    else {}
  )
  config = transformers.LlamaConfig(
    hidden_size=2 * width,
    num_attention_heads=2,
    head_dim=width,
    rope_parameters=rope,
  )
  wanted, size = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
  plain = jax.numpy.float32(base) ** (-jax.numpy.arange(0, width, 2) / width)
  got = Scaling(kind, factor, length).scale_frequencies(plain, base)
  np.testing.assert_allclose(got[0], wanted.numpy(), rtol=2e-6)
  assert got[1] == pytest.approx(size, rel=1e-12)


@pytest.mark.parametrize(
  "kind, fields",
  [
    ("bytes", {}),
    ("bpe", dict(num_kv_heads=4, tie_embeddings=False, rope_base=5e5)),
  ],
)
def test_an_exported_model_generates_the_same_tokens(
  make_model, convert, logits, bpe, kind, fields, tmp_path
):
  """By the command, and greedily from the text on: transformers has only weights, config and tokenizer."""
  model = make_model(
    "diff", tokenizer={"bytes": "bytes", "bpe": bpe}[kind], **fields
  )
  workdir.write(str(tmp_path / "run"), model)
  assert (
    convert(
      f"--from=diffjax:{tmp_path / 'run'}", f"--to=diffllama:{tmp_path / 'out'}"
    ).returncode
    == 0
  )

  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "out", output_loading_info=True
  )
  assert type(theirs).__name__ == "DiffLlamaForCausalLM" and not any(
    info.values()
  ), info
  assert_close(torch_logits(theirs, TOKENS), logits(model, TOKENS))

  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
  for text in ("it's a test", "é 1234\n\n  ", "a  b"):
    assert tokenizer.encode(text) == model.tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert (
    tokenizer.eos_token_id
    == tokenizer.bos_token_id
    == theirs.config.eos_token_id
    == model.tokenizer.separator
  )

  prompt = tokenizer("it's", return_tensors="pt")
  theirs.generation_config.eos_token_id = None
  ids = theirs.generate(
    **prompt, max_new_tokens=24, do_sample=False, pad_token_id=0
  )[0].tolist()
  start = model.tokenizer.encode("it's")
  (new,) = Sampler(
    Decoder(model.config), jax.tree.map(jax.numpy.asarray, model.params)
  ).generate([start], 24)
  assert ids == start + new and len(set(new)) > 3


def test_shards_and_halves_load(make_model, logits, monkeypatch, tmp_path):
  model = make_model("diff", tie_embeddings=False)
  monkeypatch.setattr(directory, "SHARD_BYTES", 20_000)
  for dtype in ("float32", "bfloat16"):
    diffllama.write(str(tmp_path / dtype), model, dtype)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / dtype, dtype="auto", output_loading_info=True
    )
    assert theirs.dtype == getattr(torch, dtype) and not any(info.values())
  assert len(list((tmp_path / "float32").glob("*.safetensors"))) > 2
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "float32"
  )
  assert_close(torch_logits(theirs, TOKENS), logits(model, TOKENS))
  rounded = diffllama.read(str(tmp_path / "bfloat16"))
  assert_close(
    torch_logits(
      theirs.from_pretrained(tmp_path / "bfloat16", dtype=torch.float32), TOKENS
    ),
    logits(rounded, TOKENS),
  )


@pytest.mark.parametrize(
  "name, layout", [("DiffLlama", diffllama), ("Llama", llama)]
)
@pytest.mark.parametrize("tie", [True, False])
def test_what_transformers_writes_is_read(
  write_tokenizer, logits, name, layout, tie, tmp_path
):
  """Its shards and its config.json are read as they are; a Llama as DIFF V2 has the same logits."""
  torch.manual_seed(0)
  theirs = getattr(transformers, f"{name}ForCausalLM")(
    getattr(transformers, f"{name}Config")(
      vocab_size=128,
      hidden_size=32,
      intermediate_size=48,
      num_hidden_layers=3,
      num_attention_heads=4,
      num_key_value_heads=2,
      max_position_embeddings=64,
      rms_norm_eps=1e-4,
      rope_parameters={"rope_type": "default", "rope_theta": 300.0},
      tie_word_embeddings=tie,
      initializer_range=0.3,
    )
  ).eval()
  theirs.save_pretrained(tmp_path, max_shard_size="20KB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 2
  write_tokenizer(tmp_path)
  model = layout.read(str(tmp_path))
  assert model.config.tie_embeddings is tie
  assert_close(logits(model, TOKENS), torch_logits(theirs, TOKENS))


@pytest.mark.parametrize("kind", ["llama_2", "unigram"])
@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("num_ends", [1, 2])
def test_a_published_llama_answers_as_in_transformers(
  tmp_path, convert, kind, has_bos, num_ends
):
  """Greedily, from a text: the prompts, the tokens and the end are the same."""
  made = tokenizer_files.MAKERS[kind]()
  if has_bos:
    made = tokenizer_files.with_first_token(made, "<s>")
  published = tmp_path / "published"
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<s>", eos_token="</s>"
  )
  tokenizer.save_pretrained(published)
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=made.get_vocab_size(),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.5,
  )
  theirs = transformers.LlamaForCausalLM(config).eval()

  def answer():
    prompt = transformers.AutoTokenizer.from_pretrained(published)(
      "hello the", return_tensors="pt", return_token_type_ids=False
    )
    ids = theirs.generate(
      **prompt, max_new_tokens=24, do_sample=False, pad_token_id=0
    )[0].tolist()
    return ids[prompt["input_ids"].shape[1] :]

  theirs.generation_config.eos_token_id = 2
  ends = [2]
  if num_ends == 2:
    # A token that the answer has after two others.
    answered = answer()
    for index in range(2, len(answered)):
      if answered[index] not in answered[:index]:
        ends.append(answered[index])
        break
  theirs.config.eos_token_id = ends if num_ends == 2 else ends[0]
  theirs.generation_config.eos_token_id = theirs.config.eos_token_id
  theirs.save_pretrained(published)
  theirs = transformers.LlamaForCausalLM.from_pretrained(published).eval()
  expected = answer()
  if num_ends == 2:
    assert expected[-1] == ends[1]
  while expected and expected[-1] in ends:
    expected.pop()

  result = convert(
    f"--from=llama:{published}",
    f"--to=diffjax:{tmp_path / 'run'}",
    "--attention=softmax",
  )
  assert result.returncode == 0, result.stderr
  trained = load(tmp_path / "run")
  prompt = trained.tokenizer.encode_prompt("hello the")
  stop_ids = trained.tokenizer.document_tokens.stop
  (new,) = Sampler(trained).generate([prompt], 24, stop_ids=stop_ids)
  assert new == expected and len(new) > 1
  (text,) = Sampler(trained).generate(["hello the"], 24)
  assert text == trained.tokenizer.decode_after(prompt, expected)
  whole = tokenizer.decode([*prompt, *expected], skip_special_tokens=True)
  assert "hello the" + text == whole
