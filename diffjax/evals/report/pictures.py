"""Pictures that a page contains itself, as data: addresses."""

from __future__ import annotations

import base64
import dataclasses
import io

import matplotlib
import matplotlib.figure


@dataclasses.dataclass(frozen=True)
class Picture:
  """A picture of the page.

  Attributes:
    address: A data: address.
    name: The text in place of the picture where pictures are not shown.
    caption: The text below the picture. "" for no caption.
  """

  address: str
  name: str
  caption: str = ""


def encode(content: bytes) -> str:
  """Returns the bytes of a file as base64 text."""
  return base64.b64encode(content).decode()


def png_address(content: bytes) -> str:
  """Returns the data: address of a PNG file with these bytes."""
  return f"data:image/png;base64,{encode(content)}"


def svg_address(figure: matplotlib.figure.Figure, salt: str) -> str:
  """Returns the data: address of a figure as SVG.

  Args:
    figure: The figure.
    salt: The text from which matplotlib derives the ids in the SVG. The same
      figure and salt give the same bytes.
  """
  file = io.BytesIO()
  with matplotlib.rc_context({"svg.hashsalt": salt}):
    figure.savefig(file, format="svg", metadata={"Date": None})
  return f"data:image/svg+xml;base64,{encode(file.getvalue())}"
