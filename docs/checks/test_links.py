"""Links lead to files and headings that exist, and the index has all pages."""

import functools
import pathlib
import re

import pytest

from docs.checks.checked_pages import every_page
from tests.harness import ROOT
from tests.harness.pages import DOCUMENTATION, headings, prose

_INLINE_CODE = re.compile(r"`[^`\n]*`")
_MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HTML_LINK = re.compile(r"(?:src|href)=\"([^\"]+)\"")


@functools.cache
def anchors(page: pathlib.Path) -> list[str]:
  """Returns the anchors that GitHub gives to the headings of a page.

  An anchor that occurs again gets a number: `#setup`, `#setup-1`.
  """
  names: list[str] = []
  for heading in headings(page.read_text()):
    link_texts = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    words = re.sub(r"[^\w\- ]", "", link_texts.lower())
    name = words.replace(" ", "-")
    if name in names:
      name = f"{name}-{names.count(name)}"
    names.append(name)
  return names


def link_errors(text: str, page: pathlib.Path) -> list[str]:
  """Returns the links of a page to missing files and missing headings."""
  text = _INLINE_CODE.sub("", prose(text))
  errors = []
  for target in _MARKDOWN_LINK.findall(text) + _HTML_LINK.findall(text):
    is_url = re.match(r"[a-z]+:", target)
    if is_url:
      continue
    path, _, anchor = target.partition("#")
    file = page
    if path:
      file = (page.parent / path).resolve()
    if not file.exists():
      errors.append(f"{target}: no such file")
    elif anchor and anchor not in anchors(file):
      errors.append(f"{target}: no such heading; there are {anchors(file)}")
  return errors


@every_page
def test_links_lead_to_files_and_headings(page):
  assert link_errors(page.read_text(), page) == []


@pytest.mark.parametrize(
  ("text", "error"),
  [
    pytest.param("[a](nothing.md)", "nothing.md: no such file", id="file"),
    pytest.param(
      "[two\nlines](data.md#c5)",
      "data.md#c5: no such heading; there are",
      id="heading",
    ),
    pytest.param(
      "![a picture](images/nothing.png)",
      "images/nothing.png: no such file",
      id="image",
    ),
  ],
)
def test_a_broken_link_is_reported(text, error):
  """Targets are relative to the folder of the page."""
  (reported,) = link_errors(text, ROOT / "docs/README.md")
  assert reported.startswith(error)


def test_the_index_has_a_link_to_every_page():
  index = (ROOT / "docs/README.md").read_text()
  for page in DOCUMENTATION:
    if page.name != "README.md":
      assert f"({page.name})" in index
