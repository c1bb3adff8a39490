"""Small tokenizer.json files with the conventions of published models."""

import pathlib
import string

import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

CONTROL = ("<unk>", "<s>", "</s>", "<pad>")
_LETTERS = sorted(set(string.ascii_letters + string.digits + "</>.,[]"))
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = ("hello", "world", "the", "fox", "an")


def unigram(has_space_mark: bool = True) -> tokenizers.Tokenizer:
  """Returns a Unigram model with byte fallback, as SentencePiece trains it."""
  pieces = [(name, 0.0) for name in CONTROL]
  pieces += [(name, 0.0) for name in _BYTES]
  pieces += [(character, -5.0) for character in _LETTERS]
  pieces += [(word, -3.0) for word in _WORDS]
  if has_space_mark:
    pieces += [("▁", -4.0)] + [(f"▁{word}", -3.0) for word in _WORDS]
  tokenizer = tokenizers.Tokenizer(
    models.Unigram(pieces, 0, byte_fallback=True)
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  tokenizer.decoder = decoders.Sequence(
    [decoders.ByteFallback(), decoders.Metaspace()]
  )
  tokenizer.add_special_tokens(list(CONTROL))
  return tokenizer


def llama_2() -> tokenizers.Tokenizer:
  """Returns a BPE with byte fallback. Its decoder strips the first space."""
  names = [*CONTROL, *_BYTES, "▁", *_LETTERS, "s>", "</"]
  merges = [("s", ">"), ("<", "/"), ("</", "s>"), ("<", "s>")]
  for word in ("world", "the"):
    for end in range(1, len(word) + 1):
      before = "▁" + word[: end - 1]
      merges.append((before, word[end - 1]))
      names.append(before + word[end - 1])
  vocabulary = {name: index for index, name in enumerate(names)}
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
  )
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  tokenizer.add_special_tokens(list(CONTROL))
  return tokenizer


def word_piece() -> tokenizers.Tokenizer:
  """Returns a WordPiece model with the conventions of BERT."""
  names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
  for character in _LETTERS:
    names += [character, f"##{character}"]
  names += ["hello", "world", "the", "fox"]
  vocabulary = {name: index for index, name in enumerate(names)}
  tokenizer = tokenizers.Tokenizer(
    models.WordPiece(vocabulary, unk_token="[UNK]")
  )
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.decoder = decoders.WordPiece()
  tokenizer.add_special_tokens(names[:4])
  return tokenizer


def unigram_without_space_mark() -> tokenizers.Tokenizer:
  """Returns a Unigram whose vocabulary has no mark of a space."""
  return unigram(has_space_mark=False)


MAKERS = {
  "unigram": unigram,
  "unigram_without_space_mark": unigram_without_space_mark,
  "llama_2": llama_2,
  "word_piece": word_piece,
}


def save(directory: pathlib.Path, kind: str) -> str:
  """Writes the tokenizer.json of a kind, and returns its path."""
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / "tokenizer.json"
  MAKERS[kind]().save(str(path))
  return str(path)


def with_first_token(
  tokenizer: tokenizers.Tokenizer, name: str
) -> tokenizers.Tokenizer:
  """Returns the tokenizer with a post-processor that adds a first token."""
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{name} $A",
    special_tokens=[(name, tokenizer.token_to_id(name))],
  )
  return tokenizer
