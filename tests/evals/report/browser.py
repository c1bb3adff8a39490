"""Opens pages in an installed Chromium and prints what they show as JSON.

    python tests/evals/report/browser.py PAGE... [--width=1280] \
        [--height=2000] [--dark] [--screenshot=FILE.png]

It prints a line for each page. The screenshot shows the top of the last page,
with two pixels for one.
"""

import argparse
import json
import pathlib
import shutil
import sys
from typing import Any

from playwright import sync_api

EXECUTABLES = (
  "chromium",
  "chromium-browser",
  "google-chrome",
  "google-chrome-stable",
)

# The width of a telephone, in pixels.
NARROW = 400

# By how many pixels the page is wider than the window.
OVERFLOW = """
() => {
  const root = document.documentElement;
  return root.scrollWidth - root.clientWidth;
}
"""

IMAGES = """
() => [...document.images].map(image => ({
  alt: image.alt,
  complete: image.complete,
  width: image.naturalWidth,
  height: image.naturalHeight,
  shown_width: image.clientWidth,
}))
"""

ALL_LOADED = "() => [...document.images].every(image => image.complete)"

# Points at the last row of each panel's first map, then chooses the last layer
# and the first head.
PANELS = """
() => [...document.querySelectorAll(".panel")].map(panel => {
  const text = node => node.textContent.trim();
  const images = [...panel.querySelectorAll("img")];
  const [layer, head] = panel.querySelectorAll("select");
  const before = images.map(image => image.src);
  const box = images[0].getBoundingClientRect();
  images[0].onmousemove({
    clientX: box.left + box.width / 2,
    clientY: box.bottom - 1,
  });
  layer.value = String(layer.options.length - 1);
  head.value = "1";
  layer.onchange();
  return {
    images: images.length,
    layers: layer.options.length,
    heads: head.options.length,
    said: text(panel.querySelector("output")),
    changed: images.every((image, index) => image.src != before[index]),
    scale: text(panel.querySelector(".scale")),
    labels: [...panel.querySelector(".queries").children].map(text),
  };
})
"""

CONTENTS = """
() => {
  const text = node => node.textContent.trim();
  const cells = row => [...row.cells].map(text);
  const all = selector => [...document.querySelectorAll(selector)];
  const sections = all("section");
  return {
    title: document.title,
    text: document.body.innerText,
    lead: text(document.querySelector(".lead") || document.body),
    tables: Object.fromEntries(sections.map(section =>
      [section.id, [...section.querySelectorAll("tr")].map(cells)])),
    targets: all("nav a").every(link =>
      document.querySelector(link.getAttribute("href"))),
    headlines: all(".headlines tr").map(cells),
    bars: all(".headlines circle").map(circle =>
      circle.classList.contains("clear")),
    first_screen: all(".headlines").every(figure =>
      figure.getBoundingClientRect().bottom < 800),
    folded: Object.fromEntries(sections.map(section =>
      [section.id, [...section.querySelectorAll("summary")].map(text)])),
  };
}
"""


def executable() -> str | None:
  """Returns the path of an installed Chromium or Chrome, or None."""
  for name in EXECUTABLES:
    path = shutil.which(name)
    if path is not None:
      return path
  return None


def save_screenshot(page: sync_api.Page, path: str) -> None:
  """Saves the visible part of the page with a palette: a fifth of the size."""
  from PIL import Image

  page.screenshot(path=path)
  picture = Image.open(path).convert("RGB").quantize(256)
  picture.save(path, optimize=True)


def look(
  browser: sync_api.Browser, path: str, options: argparse.Namespace
) -> dict[str, Any]:
  """Returns the contents of a page, its requests and its messages."""
  address = pathlib.Path(path).absolute().as_uri()
  page = browser.new_page(
    viewport={"width": options.width, "height": options.height},
    color_scheme="dark" if options.dark else "light",
    device_scale_factor=2 if options.screenshot else 1,
  )
  requests = []
  messages = []

  def record_message(message: sync_api.ConsoleMessage) -> None:
    messages.append(f"{message.type}: {message.text}")

  def answer(route: sync_api.Route) -> None:
    """Loads the page itself and nothing else."""
    if route.request.url == address:
      route.continue_()
    else:
      route.abort()

  page.on("request", lambda request: requests.append(request.url))
  page.on("console", record_message)
  page.on("pageerror", lambda error: messages.append(f"error: {error}"))
  page.route("**/*", answer)

  page.goto(address)
  page.wait_for_function(ALL_LOADED)
  images = page.evaluate(IMAGES)
  panels = page.evaluate(PANELS)
  page.wait_for_function(ALL_LOADED)
  contents = page.evaluate(CONTENTS)
  changed_images = page.evaluate(IMAGES)
  page.set_viewport_size({"width": NARROW, "height": options.height})
  narrow_overflow = page.evaluate(OVERFLOW)
  page.set_viewport_size({"width": options.width, "height": options.height})
  if options.screenshot:
    save_screenshot(page, options.screenshot)
  return {
    **contents,
    "images": images,
    "panels": panels,
    "changed_images": changed_images,
    "narrow_overflow": narrow_overflow,
    "requests": requests,
    "said": messages,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("pages", nargs="+", metavar="PAGE")
  parser.add_argument("--width", type=int, default=1280)
  parser.add_argument("--height", type=int, default=2000)
  parser.add_argument("--dark", action="store_true")
  parser.add_argument("--screenshot")
  options = parser.parse_args()

  chromium = executable()
  if chromium is None:
    sys.exit(f"no browser: none of {', '.join(EXECUTABLES)} is on PATH")
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=chromium, args=["--disable-gpu"]
    )
    for path in options.pages:
      print(json.dumps(look(browser, path, options)))
    browser.close()


if __name__ == "__main__":
  main()
