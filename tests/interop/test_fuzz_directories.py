"""Any directory is read, or refused in one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax.config import UserError
from diffjax.interop import diffllama, llama, motif, unilm

ODD = [
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
READ = {
  "diffllama": diffllama.read,
  "llama": llama.read,
  "unilm": unilm.read,
  "motif": motif.read,
}


@pytest.fixture(scope="module")
def directories(golden, write_llama, make_model, tmp_path_factory):
  """A good directory of each layout, as file names and contents."""
  home = tmp_path_factory.mktemp("good")
  golden("diffllama_tiny_gqa", home / "diffllama")
  write_llama(home / "llama")
  unilm.write(str(home / "unilm"), make_model("diff"), "float32")
  fields = dict(
    num_noise_heads=2, lambda_init_offset=1, ffn_activation="poly_norm"
  )
  motif.write(str(home / "motif"), make_model("diff", **fields), "float32")
  names = ("config.json", "model.safetensors", "tokenizer.json")
  return {
    layout: {name: (home / layout / name).read_bytes() for name in names}
    for layout in READ
  }


def assert_read_or_refused(layout, directory, files):
  for name, content in files.items():
    (directory / name).write_bytes(content)
  try:
    READ[layout](str(directory))
  except UserError as error:
    assert len(str(error).splitlines()) == 1


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
  return tmp_path_factory.mktemp("scratch")


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_odd_fields(directories, scratch, data):
  layout = data.draw(st.sampled_from(sorted(READ)))
  files = directories[layout]
  config = json.loads(files["config.json"])
  names = st.sampled_from(
    [*config, "rope_scaling", "rope_parameters", "rope_theta"]
  )
  config |= data.draw(
    st.dictionaries(names, st.sampled_from(ODD), min_size=1, max_size=2)
  )
  for name in data.draw(st.sets(names, max_size=1)):
    config.pop(name, None)
  assert_read_or_refused(
    layout, scratch, files | {"config.json": json.dumps(config).encode()}
  )


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damaged_bytes(directories, scratch, data):
  layout = data.draw(st.sampled_from(sorted(READ)))
  files = directories[layout]
  name = data.draw(st.sampled_from(sorted(files)))
  content = files[name]
  place = data.draw(
    st.integers(0, min(len(content), 4000))
  )  # the header of model.safetensors is shorter
  kind = data.draw(st.sampled_from(["cut", "insert", "overwrite"]))
  damage = data.draw(st.binary(min_size=1, max_size=4))
  rest = {
    "cut": b"",
    "insert": damage + content[place:],
    "overwrite": damage + content[place + len(damage) :],
  }[kind]
  assert_read_or_refused(
    layout, scratch, files | {name: content[:place] + rest}
  )
