"""Atomic writes: the old content or the new one, and nothing else."""

import os

import pytest
from etils import epath

from diffjax.host import files


@pytest.mark.parametrize(
  "path, expected",
  [("gs://bucket/a", True), ("/tmp/a", False), ("a/b", False), ("", False)],
)
def test_a_path_with_a_scheme_is_remote(path, expected):
  assert files.is_remote(path) == expected


@pytest.mark.parametrize(
  ("content", "expected"),
  [
    pytest.param("λ\n", b"\xce\xbb\n", id="text in UTF-8"),
    pytest.param(b"\x00\xff", b"\x00\xff", id="bytes"),
  ],
)
def test_the_content_is_written(tmp_path, content, expected):
  path = tmp_path / "file"
  path.write_text("old")

  files.write_atomically(path, content)

  assert path.read_bytes() == expected
  # No temporary file is left.
  assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_an_error_while_a_file_is_written_keeps_the_old_one(tmp_path, error):
  """The new content is in a temporary file, which is deleted."""
  path = tmp_path / "file"
  path.write_text("old")

  with pytest.raises(error):
    with files.replaced_at_the_end(path) as temporary:
      temporary.write_text("half")
      assert path.read_text() == "old"
      raise error

  assert path.read_text() == "old"
  assert os.listdir(tmp_path) == ["file"]


def test_a_directory_at_the_path_of_a_file_is_an_error(tmp_path):
  path = tmp_path / "file"
  path.mkdir()

  with pytest.raises(OSError):
    files.write_atomically(path, "new")

  # No temporary file is left.
  assert os.listdir(tmp_path) == ["file"]


def test_an_object_of_a_store_is_written_without_a_temporary_one(monkeypatch):
  """A write to an object store is atomic already."""
  written = {}

  def write_bytes(path, content):
    written[os.fspath(path)] = content

  remote_class = type(epath.Path("gs://a"))
  monkeypatch.setattr(remote_class, "write_bytes", write_bytes)

  files.write_atomically("gs://bucket/file", "new")

  assert written == {"gs://bucket/file": b"new"}


def test_two_writers_at_once_each_write_a_whole_file(tmp_path):
  """Each has a temporary file of its own. The last one to end wins."""
  path = tmp_path / "file"

  with files.replaced_at_the_end(path, ".1.tmp") as first:
    first.write_text("first")
    with files.replaced_at_the_end(path, ".2.tmp") as second:
      second.write_text("second")
      first.write_text("first, continued")
    assert path.read_text() == "second"

  assert path.read_text() == "first, continued"
  assert os.listdir(tmp_path) == ["file"]
