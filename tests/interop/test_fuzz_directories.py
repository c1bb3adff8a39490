"""Any directory is read, or rejected with a one-line error."""

import json
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax.config import UserError
from diffjax.interop import diffllama, llama, motif, unilm
from tests.interop.small_models import copy_golden, make_model, write_llama

ODD_VALUES: list[Any] = [
  None,
  0,
  -1,
  1,
  3,
  0.5,
  1e400,
  "x",
  "",
  [],
  [1, 2],
  {},
  {"rope_theta": None},
  {"rope_type": []},
  {"a": 1},
  True,
  False,
  2**31,
  2**70,
]
READERS = {
  "diffllama": diffllama.read,
  "llama": llama.read,
  "unilm": unilm.read,
  "motif": motif.read,
}
FILE_NAMES = ["config.json", "model.safetensors", "tokenizer.json"]
# The header of model.safetensors is shorter.
MAX_DAMAGED_BYTES = 4000

layouts = st.sampled_from(sorted(READERS))


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory):
  """Returns a valid directory of each layout, as contents by file name."""
  home = tmp_path_factory.mktemp("valid")
  copy_golden("diffllama_tiny_gqa", home / "diffllama")
  write_llama(home / "llama")
  unilm.write(str(home / "unilm"), make_model("diff"), "float32")
  motif_model = make_model(
    "diff", num_noise_heads=2, lambda_init_offset=1, ffn_activation="poly_norm"
  )
  motif.write(str(home / "motif"), motif_model, "float32")

  contents = {}
  for layout in READERS:
    contents[layout] = {}
    for name in FILE_NAMES:
      contents[layout][name] = (home / layout / name).read_bytes()
  return contents


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
  return tmp_path_factory.mktemp("scratch")


def assert_read_or_rejected(
  layout: str, directory: pathlib.Path, files: dict[str, bytes]
) -> None:
  """Asserts that a directory is read, or rejected with a one-line UserError.

  Any other error makes the test fail.

  Args:
    layout: the layout to read.
    directory: a directory, whose files are overwritten.
    files: the contents by file name.
  """
  for name, content in files.items():
    (directory / name).write_bytes(content)
  try:
    READERS[layout](str(directory))
  except UserError as error:
    assert len(str(error).splitlines()) == 1


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_configs_with_odd_fields_are_read_or_rejected(
  valid_files, scratch, data
):
  """One or two fields get odd values, such as -1, and a field may be missing.

  Any error must be a UserError of one line.
  """
  layout = data.draw(layouts)
  files = valid_files[layout]
  config = json.loads(files["config.json"])
  field_names = st.sampled_from(
    [*config, "rope_scaling", "rope_parameters", "rope_theta"]
  )
  odd_values = st.sampled_from(ODD_VALUES)

  odd_fields = st.dictionaries(field_names, odd_values, min_size=1, max_size=2)
  config |= data.draw(odd_fields)
  if data.draw(st.booleans()):
    missing_field = data.draw(field_names)
    config.pop(missing_field, None)

  odd_config = json.dumps(config).encode()
  assert_read_or_rejected(layout, scratch, files | {"config.json": odd_config})


def draw_damaged(data: st.DataObject, content: bytes) -> bytes:
  """Draws a damaged version of a file's content."""
  position = data.draw(st.integers(0, min(len(content), MAX_DAMAGED_BYTES)))
  kind = data.draw(st.sampled_from(["cut", "insert", "overwrite"]))
  damage = data.draw(st.binary(min_size=1, max_size=4))
  if kind == "cut":
    return content[:position]
  if kind == "insert":
    return content[:position] + damage + content[position:]
  return content[:position] + damage + content[position + len(damage) :]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_damaged_files_are_read_or_rejected(valid_files, scratch, data):
  """A file of a valid directory is cut, or a few bytes of it are changed.

  Damage may be harmless, for example in a tensor. Any error must be a UserError
  of one line.
  """
  layout = data.draw(layouts)
  files = valid_files[layout]
  name = data.draw(st.sampled_from(FILE_NAMES))

  damaged_content = draw_damaged(data, files[name])

  damaged_files = files | {name: damaged_content}
  assert_read_or_rejected(layout, scratch, damaged_files)
