"""Hugging Face's transformers computes what diffjax computes.

Needs the extra `hf`. Written models are loaded by transformers, and models that
transformers writes are read.
"""

import pathlib
from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from transformers.modeling_rope_utils import (  # noqa: E402
  ROPE_INIT_FUNCTIONS,
)

from diffjax.data.tokenizer_training import train_tokenizer  # noqa: E402
from diffjax.inference.sampler import Sampler  # noqa: E402
from diffjax.inference.trained import load  # noqa: E402
from diffjax.interop import (  # noqa: E402
  diffllama,
  directory,
  llama,
  workdir,
)
from diffjax.interop.layout import Model  # noqa: E402
from diffjax.ops.rope import Scaling  # noqa: E402
from tests.harness import tokenizer_files  # noqa: E402
from tests.interop.small_models import (  # noqa: E402
  convert,
  make_model,
  model_logits,
  write_tokenizer,
)

IDS = np.random.default_rng(0).integers(0, 128, (2, 24))


def torch_logits(model: torch.nn.Module) -> np.ndarray:
  """Returns the logits of IDS by a model of transformers."""
  with torch.no_grad():
    return model(torch.as_tensor(IDS)).logits.float().numpy()


def assert_same_logits(hf_model: torch.nn.Module, model: Model) -> None:
  """Asserts that transformers and diffjax compute the same logits of IDS."""
  expected = torch_logits(hf_model)
  atol = 1e-5 * np.abs(expected).max()
  chex.assert_trees_all_close(
    model_logits(model, IDS), expected, rtol=0, atol=atol
  )


def load_whole(path: pathlib.Path, **options: Any) -> torch.nn.Module:
  """Returns a model that transformers loads without missing tensors."""
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    path, output_loading_info=True, **options
  )
  assert not any(info.values()), info
  return model


# RoPE.


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize(
  ("head_dim", "base", "factor", "original_length"),
  [(128, 1e6, 4.0, 8192), (32, 5e5, 2.5, 100)],
)
def test_rotary_frequencies_are_scaled_as_in_transformers(
  kind, head_dim, base, factor, original_length
):
  """The factor stretches RoPE to texts longer than the original length."""
  # A kind ignores the fields that it does not need.
  rope_parameters = {
    "rope_type": kind,
    "rope_theta": base,
    "factor": factor,
    "original_max_position_embeddings": original_length,
    # diffjax supports only these values, the values of Llama 3.
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
  }
  hf_config = transformers.LlamaConfig(
    hidden_size=2 * head_dim,
    num_attention_heads=2,
    head_dim=head_dim,
    rope_parameters=rope_parameters,
  )
  expected, expected_scale = ROPE_INIT_FUNCTIONS[kind](hf_config, "cpu")

  # Pair i of a head rotates by base^(-2i / head_dim) for each token.
  exponents = -jnp.arange(0, head_dim, 2) / head_dim
  unscaled = jnp.float32(base) ** exponents
  scaling = Scaling(kind, factor, original_length)
  frequencies, scale = scaling.scale_frequencies(unscaled, base)

  chex.assert_trees_all_close(frequencies, expected.numpy(), rtol=2e-6, atol=0)
  assert scale == pytest.approx(expected_scale, rel=1e-12)


# Exported models.


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
  """Returns the path of a BPE tokenizer that diffjax has trained."""
  documents = ["it's a test of 123 words\n\n  "] * 9
  return str(train_tokenizer(documents, 270, tmp_path_factory.mktemp("bpe")))


class Exported(NamedTuple):
  """A model, and the directory that the command has exported it to."""

  model: Model
  directory: pathlib.Path


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def exported(request, bpe, tmp_path_factory):
  """Exports a model with a tokenizer of bytes, and one with a BPE tokenizer."""
  home = tmp_path_factory.mktemp("exported")
  if request.param == "bytes":
    model = make_model("diff")
  else:
    model = make_model(
      "diff", tokenizer=bpe, num_kv_heads=4, tie_embeddings=False, rope_base=5e5
    )
  workdir.write(str(home / "run"), model)

  result = convert(
    f"--from=diffjax:{home / 'run'}", f"--to=diffllama:{home / 'exported'}"
  )

  assert result.returncode == 0, result.stderr
  return Exported(model, home / "exported")


def test_an_exported_model_has_the_same_logits(exported):
  """transformers loads the DiffLlama that `diffjax.convert` has written."""
  hf_model = load_whole(exported.directory)

  assert type(hf_model).__name__ == "DiffLlamaForCausalLM"
  assert_same_logits(hf_model, exported.model)


@pytest.mark.parametrize("text", ["it's a test", "é 1234\n\n  ", "a  b"])
def test_an_exported_tokenizer_gives_the_same_tokens(exported, text):
  """transformers loads the tokenizer that `diffjax.convert` has written."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(exported.directory)

  ids = tokenizer.encode(text)

  assert ids == exported.model.tokenizer.encode(text)
  assert tokenizer.decode(ids) == text


def test_an_exported_model_has_its_separator(exported):
  """diffjax trains with one separator before and after each document.

  transformers has names for both: bos before it, and eos after it.
  """
  tokenizer = transformers.AutoTokenizer.from_pretrained(exported.directory)
  config = transformers.AutoConfig.from_pretrained(exported.directory)

  separator = exported.model.tokenizer.separator
  assert tokenizer.eos_token_id == separator
  assert tokenizer.bos_token_id == separator
  assert config.eos_token_id == separator


def test_an_exported_model_generates_the_same_tokens(exported, tmp_path):
  """Both generate the 24 most likely tokens after the prompt "it's"."""
  workdir.write(str(tmp_path), exported.model)
  prompt = exported.model.tokenizer.encode("it's")
  (answer,) = Sampler(load(tmp_path)).generate([prompt], 24)

  tokenizer = transformers.AutoTokenizer.from_pretrained(exported.directory)
  hf_model = load_whole(exported.directory)
  # Without an end token, transformers always generates 24 tokens.
  hf_model.generation_config.eos_token_id = None
  inputs = tokenizer("it's", return_tensors="pt")
  (sequence,) = hf_model.generate(
    **inputs, max_new_tokens=24, do_sample=False, pad_token_id=0
  )

  assert sequence.tolist() == [*prompt, *answer]
  # The test would say little if the answer repeated one token.
  assert len(set(answer)) > 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_a_model_in_several_files(
  dtype, monkeypatch, tmp_path
):
  # Files have at most 20 kB.
  monkeypatch.setattr(directory, "SHARD_BYTES", 20_000)
  model = make_model("diff", tie_embeddings=False)

  diffllama.write(str(tmp_path), model, dtype)

  assert len(list(tmp_path.glob("*.safetensors"))) > 1
  # "auto" is the dtype of the files.
  hf_model = load_whole(tmp_path, dtype="auto")
  assert hf_model.dtype == getattr(torch, dtype)
  # Both compute in float32, with the weights of the files.
  hf_model = load_whole(tmp_path, dtype=torch.float32)
  assert_same_logits(hf_model, diffllama.read(str(tmp_path)))


# Models that transformers writes.

SMALL_MODEL_FIELDS: dict[str, Any] = {
  "vocab_size": 128,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-4,
  "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
  "initializer_range": 0.3,
}


def save_in_shards(hf_model: torch.nn.Module, path: pathlib.Path) -> None:
  """Writes a model of transformers in several files, with a tokenizer."""
  hf_model.save_pretrained(path, max_shard_size="20KB")
  assert len(list(path.glob("*.safetensors"))) > 2
  write_tokenizer(path)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_diffllama_of_transformers_has_the_same_logits(is_tied, tmp_path):
  """transformers writes a random model, and diffjax reads it."""
  torch.manual_seed(0)
  config = transformers.DiffLlamaConfig(
    tie_word_embeddings=is_tied, **SMALL_MODEL_FIELDS
  )
  hf_model = transformers.DiffLlamaForCausalLM(config).eval()
  save_in_shards(hf_model, tmp_path)

  model = diffllama.read(str(tmp_path))

  assert model.config.tie_embeddings is is_tied
  assert_same_logits(hf_model, model)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_llama_of_transformers_has_the_same_logits(is_tied, tmp_path):
  """transformers writes a random model, and diffjax reads it."""
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    tie_word_embeddings=is_tied, **SMALL_MODEL_FIELDS
  )
  hf_model = transformers.LlamaForCausalLM(config).eval()
  save_in_shards(hf_model, tmp_path)

  model = llama.read(str(tmp_path))

  assert model.config.tie_embeddings is is_tied
  assert_same_logits(hf_model, model)


# Generation by a published Llama.

EOS = 2
PROMPT = "hello the"


def random_llama(vocab_size: int) -> torch.nn.Module:
  """Returns a random Llama of transformers."""
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=vocab_size,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.5,
  )
  return transformers.LlamaForCausalLM(config).eval()


def generate(hf_model: torch.nn.Module, published: pathlib.Path) -> list[int]:
  """Returns the answer of transformers to PROMPT, with its stop token.

  Args:
    hf_model: a model of transformers. Its generation_config has the stop ids.
    published: the directory of its tokenizer.
  """
  tokenizer = transformers.AutoTokenizer.from_pretrained(published)
  inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
  sequences = hf_model.generate(
    **inputs, max_new_tokens=24, do_sample=False, pad_token_id=0
  )
  num_prompt_tokens = inputs["input_ids"].shape[1]
  return sequences[0].tolist()[num_prompt_tokens:]


def first_new_token(ids: list[int], start: int) -> int:
  """Returns the first token from `start` on that does not occur before it."""
  for index in range(start, len(ids)):
    if ids[index] not in ids[:index]:
      return ids[index]
  raise ValueError(f"all of {ids[start:]} occur before")


def publish_llama(
  directory: pathlib.Path,
  hf_tokenizer: transformers.PreTrainedTokenizerFast,
  num_stop_ids: int,
) -> list[int]:
  """Writes a random Llama with its tokenizer, and returns its stop ids.

  Args:
    directory: where to write it.
    hf_tokenizer: the tokenizer.
    num_stop_ids: 1 or 2. The second one is a token that the model generates.
  """
  hf_tokenizer.save_pretrained(directory)
  hf_model = random_llama(len(hf_tokenizer))
  stop_ids = [EOS]
  eos_token_id: int | list[int] = EOS
  if num_stop_ids == 2:
    hf_model.generation_config.eos_token_id = EOS
    answer = generate(hf_model, directory)
    # The second stop token is the third of the answer, or a later one.
    stop_ids.append(first_new_token(answer, start=2))
    eos_token_id = stop_ids
  hf_model.config.eos_token_id = eos_token_id
  hf_model.generation_config.eos_token_id = eos_token_id
  hf_model.save_pretrained(directory)
  return stop_ids


class PublishedLlama(NamedTuple):
  """A Llama that transformers has written, and its answer to PROMPT.

  Attributes:
    workdir: has the model that `diffjax.convert` has made of it.
    hf_tokenizer: its tokenizer in transformers.
    answer: the answer of transformers, without the stop token.
  """

  workdir: pathlib.Path
  hf_tokenizer: transformers.PreTrainedTokenizerFast
  answer: list[int]


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(("llama_2", False, 1), id="BPE"),
    pytest.param(("llama_2", True, 2), id="BPE, <s>, two stop tokens"),
    pytest.param(("unigram", True, 1), id="Unigram, <s>"),
    pytest.param(("unigram", False, 2), id="Unigram, two stop tokens"),
  ],
)
def published_llama(request, tmp_path_factory):
  """Llamas whose tokenizers do or do not add a first token <s> to a prompt."""
  kind, adds_first_token, num_stop_ids = request.param
  home = tmp_path_factory.mktemp("llama")
  published = home / "published"
  tokenizer = tokenizer_files.MAKERS[kind]()
  if adds_first_token:
    tokenizer = tokenizer_files.with_first_token(tokenizer, "<s>")
  hf_tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
  )
  stop_ids = publish_llama(published, hf_tokenizer, num_stop_ids)
  hf_model = transformers.LlamaForCausalLM.from_pretrained(published).eval()
  answer = generate(hf_model, published)
  if num_stop_ids == 2:
    assert answer[-1] == stop_ids[1]
  if answer[-1] in stop_ids:
    answer.pop()

  result = convert(
    f"--from=llama:{published}",
    f"--to=diffjax:{home / 'run'}",
    "--attention=softmax",
  )
  assert result.returncode == 0, result.stderr
  return PublishedLlama(home / "run", hf_tokenizer, answer)


def test_a_published_llama_generates_the_tokens_of_transformers(
  published_llama,
):
  """Both take the most likely token, until a stop token or the 24th token."""
  trained = load(published_llama.workdir)
  prompt = trained.tokenizer.encode_prompt(PROMPT)
  stop_ids = trained.tokenizer.document_tokens.stop

  (answer,) = Sampler(trained).generate([prompt], 24, stop_ids=stop_ids)

  assert answer == published_llama.answer
  assert len(answer) > 1


def test_a_published_llama_generates_the_text_of_transformers(published_llama):
  """The text continues the prompt, so a space between the two is kept."""
  trained = load(published_llama.workdir)
  prompt = trained.tokenizer.encode_prompt(PROMPT)

  (text,) = Sampler(trained).generate([PROMPT], 24)

  assert PROMPT + text == published_llama.hf_tokenizer.decode(
    [*prompt, *published_llama.answer], skip_special_tokens=True
  )
