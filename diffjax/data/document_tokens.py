"""The control tokens around a document.

Models that are trained here see one separator before and after every document.
A published model has its own tokens. `diffjax.convert` writes them to
``document_tokens.json`` beside the model's ``tokenizer.json``, and
`load_tokenizer` reads them from there.
"""

from __future__ import annotations

from typing import NamedTuple

from etils import epath

from diffjax.config import UserError
from diffjax.data.json_file import read_json, write_json

FILE_NAME = "document_tokens.json"


class DocumentTokens(NamedTuple):
  """Ids of the control tokens around a document.

  Attributes:
    start: Tokens before a document; may be empty.
    end: Tokens after a document; at least one.
    stop: Tokens at which generation ends. They include the last token of `end`.
    no_context: The token that stands for an empty context. If `start` is not
      empty, this is its last token.
  """

  start: tuple[int, ...]
  end: tuple[int, ...]
  stop: tuple[int, ...]
  no_context: int

  def control_ids(self) -> set[int]:
    """Returns the ids that occur around documents and never in a text.

    Ids that are only in `stop` are not included: a published model may stop at
    a token of its text.
    """
    return {*self.start, *self.end, self.no_context}


def separated_by(separator: int) -> DocumentTokens:
  """Returns document tokens for one separator before and after a document.

  Models that are trained here use such tokens.

  Args:
    separator: The id of the separator.
  """
  return DocumentTokens(
    start=(separator,),
    end=(separator,),
    stop=(separator,),
    no_context=separator,
  )


def read(directory: epath.PathLike) -> DocumentTokens | None:
  """Returns the document tokens that are stored in a directory.

  Args:
    directory: The directory of a tokenizer.

  Returns:
    The tokens. None if none are stored.

  Raises:
    UserError: if the file cannot be read or is damaged.
  """
  path = epath.Path(directory) / FILE_NAME
  if not path.exists():
    return None
  fields = read_json(path)
  try:
    tokens = DocumentTokens(
      start=tuple(fields["start"]),
      end=tuple(fields["end"]),
      stop=tuple(fields["stop"]),
      no_context=fields["no_context"],
    )
    _check(tokens)
  except (ValueError, TypeError, KeyError) as error:
    raise UserError(
      f"{path} is damaged ({error!r}): write it again with"
      " python -m diffjax.convert"
    ) from error
  return tokens


def _check(tokens: DocumentTokens) -> None:
  """Raises ValueError if tokens that were read from a file are not valid."""
  for token in tokens.control_ids().union(tokens.stop):
    # isinstance would accept a bool.
    if type(token) is not int:
      raise ValueError("its values must be token ids")
  if not tokens.end or tokens.end[-1] not in tokens.stop:
    raise ValueError("stop must include the last token of end")


def write(directory: epath.PathLike, tokens: DocumentTokens) -> None:
  """Stores document tokens in a directory, where `read` finds them."""
  write_json(epath.Path(directory) / FILE_NAME, tokens._asdict())
