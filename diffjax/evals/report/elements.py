"""Elements of the report's page: HTML made of text that is escaped, tables and pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.figure

from diffjax.evals.report import results


class Html(str):
  """Text that is HTML already, so that `element` does not escape it."""


def escape(text: str) -> Html:
  """Text as HTML; Html stays as it is."""
  return text if isinstance(text, Html) else Html(html.escape(text))


def element(tag: str, *children: str, **attributes: str) -> Html:
  """An element around its children.

  Args:
    tag: Its name.
    children: Its content: Html as it is, other text escaped.
    attributes: Its attributes. "class_" stands for "class".
  """
  inner = "".join(map(escape, children))
  names = "".join(
    f' {name.rstrip("_")}="{html.escape(value)}"'
    for name, value in attributes.items()
  )
  return Html(
    f"<{tag}{names}>" if tag == "img" else f"<{tag}{names}>{inner}</{tag}>"
  )


def number(interval: Mapping[str, Any] | None) -> Html:
  """A figure with its bounds in small type."""
  value, _, bounds = results.number(interval).partition(" ")
  return Html(
    escape(value)
    + (element("span", f" {bounds}", class_="bounds") if bounds else "")
  )


def table(rows: Sequence[Sequence[str | tuple[str, str]]]) -> Html:
  """A table whose first row is its header, in a frame that scrolls sideways. A cell is its content, or its content and class."""

  def cell(tag: str, content: str | tuple[str, str]) -> Html:
    return (
      element(tag, content)
      if isinstance(content, str)
      else element(tag, content[0], class_=content[1])
    )

  lines = (
    element(
      "tr", *(cell("td" if index else "th", content) for content in cells)
    )
    for index, cells in enumerate(rows)
  )
  return element("div", element("table", *lines), class_="wide")


def picture(address: str, name: str, caption: str = "") -> Html:
  """A picture with its caption, if it has one. The name is shown where pictures are not."""
  image = element(
    "div", element("img", src=address, alt=name), class_="plot"
  )  # it scrolls sideways where the page is narrow
  return element(
    "figure", image, *[element("figcaption", caption)] * bool(caption)
  )


def data_address(kind: str, content: bytes) -> str:
  """The address that holds a picture itself, such as one of the kind "image/png"."""
  return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def drawing(figure: matplotlib.figure.Figure, salt: str) -> str:
  """The address of a figure as SVG. The same figure and salt give the same bytes."""
  file = io.BytesIO()
  with matplotlib.rc_context({"svg.hashsalt": salt}):
    figure.savefig(file, format="svg", metadata={"Date": None})
  return data_address("image/svg+xml", file.getvalue())
