"""Opens a page in Chromium (Qt WebEngine), without a display, and prints what it finds as JSON.

    python tests/evals/report/browser.py PAGE [--width=1280] [--height=2000] [--dark] [--screenshot=FILE.png]

The screenshot, of the top of the page, has two pixels for one.
"""

import argparse
import json
import os
import sys

OPTIONS = argparse.ArgumentParser()
OPTIONS.add_argument("page")
OPTIONS.add_argument("--width", type=int, default=1280)
OPTIONS.add_argument("--height", type=int, default=2000)
OPTIONS.add_argument("--dark", action="store_true")
OPTIONS.add_argument("--screenshot")
OPTIONS = OPTIONS.parse_args()

os.environ |= {
  "QT_QPA_PLATFORM": "offscreen",
  "QTWEBENGINE_DISABLE_SANDBOX": "1",
  "QT_SCALE_FACTOR": "2" if OPTIONS.screenshot else "1",
  "QTWEBENGINE_CHROMIUM_FLAGS": f"--disable-gpu --blink-settings=preferredColorScheme={0 if OPTIONS.dark else 1}",
}

from PIL import Image  # noqa: E402
from PySide6.QtCore import QTimer, QUrl  # noqa: E402
from PySide6.QtWebEngineCore import (  # noqa: E402
  QWebEnginePage,
  QWebEngineProfile,
  QWebEngineSettings,
  QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PySide6.QtWidgets import QApplication  # noqa: E402

IMAGES = "[...document.images].map(image => [image.alt, image.complete, image.naturalWidth, image.naturalHeight, image.clientWidth])"
LOOK = """
(() => {
  const text = node => node.textContent.trim(), images = IMAGES;
  const panels = [...document.querySelectorAll(".panel")].map(panel => {
    const images = [...panel.querySelectorAll("img")], [layer, head] = panel.querySelectorAll("select");
    const before = images.map(image => image.src);
    const box = images[0].getBoundingClientRect();
    images[0].onmousemove({clientX: box.left + box.width / 2, clientY: box.bottom - 1});
    layer.value = String(layer.options.length - 1);
    head.value = "1";
    layer.onchange();
    return {images: images.length, layers: layer.options.length, heads: head.options.length, said: text(panel.querySelector("output")),
            changed: images.every((image, index) => image.src != before[index]), scale: text(panel.querySelector(".scale")),
            labels: [...panel.querySelector(".queries").children].map(text)};
  });
  return JSON.stringify({
    title: document.title, images: images,
    tables: [...document.querySelectorAll("section")].map(section => [section.id,
      [...section.querySelectorAll("tr")].map(row => [...row.cells].map(text))]),
    targets: [...document.querySelectorAll("nav a")].every(link => document.querySelector(link.getAttribute("href"))),
    panels: panels, text: document.body.innerText, lead: text(document.querySelector(".lead") || document.body),
    headlines: [...document.querySelectorAll(".headlines tr")].map(row => [...row.cells].map(text)),
    bars: [...document.querySelectorAll(".headlines circle")].map(circle => circle.classList.contains("clear")),
    first_screen: [...document.querySelectorAll(".headlines")].every(figure => figure.getBoundingClientRect().bottom < 800),
    folded: Object.fromEntries([...document.querySelectorAll("section")].map(section =>
      [section.id, [...section.querySelectorAll("summary")].map(text)])),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
})()
""".replace("IMAGES", IMAGES)


class Interceptor(QWebEngineUrlRequestInterceptor):
  """Records every request and blocks all but the page's own."""

  def __init__(self, own):
    super().__init__()
    self.own, self.requests = own, []

  def interceptRequest(self, info):
    self.requests.append(info.requestUrl().toString())
    info.block(info.requestUrl() != self.own)


class Page(QWebEnginePage):
  """Records the messages of scripts and of the security policy."""

  def __init__(self, profile):
    super().__init__(profile)
    self.said = []

  def javaScriptConsoleMessage(self, level, message, line, source):
    self.said.append(f"{level.name}: {message}")


def main():
  app = QApplication(sys.argv[:1])
  own = QUrl.fromLocalFile(os.path.abspath(OPTIONS.page))
  interceptor, profile = Interceptor(own), QWebEngineProfile()
  profile.setUrlRequestInterceptor(interceptor)
  page, view = Page(profile), QWebEngineView()
  # Else Chromium would itself keep a local page from asking, and nothing be seen of it.
  page.settings().setAttribute(
    QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True
  )
  page.settings().setAttribute(
    QWebEngineSettings.WebAttribute.ShowScrollBars, not OPTIONS.screenshot
  )
  view.setPage(page)
  view.resize(OPTIONS.width, OPTIONS.height)
  view.show()

  def found(answer):
    QTimer.singleShot(
      500,
      lambda: page.runJavaScript(
        f"JSON.stringify({IMAGES})", lambda images: done(answer, images)
      ),
    )

  def done(answer, images):
    changed = {
      "requests": interceptor.requests,
      "said": page.said,
      "changed_images": json.loads(images),
    }
    print(json.dumps({**changed, **json.loads(answer or "{}")}))
    if OPTIONS.screenshot:
      view.grab().save(OPTIONS.screenshot)
      Image.open(OPTIONS.screenshot).convert("RGB").quantize(256).save(
        OPTIONS.screenshot, optimize=True
      )  # a palette: a fifth of the size
    app.exit(0)

  page.loadFinished.connect(
    lambda ok: QTimer.singleShot(500, lambda: page.runJavaScript(LOOK, found))
  )
  QTimer.singleShot(60_000, lambda: app.exit(3))
  page.load(own)
  status = app.exec()
  view.setPage(None)
  page.deleteLater()
  return status


if __name__ == "__main__":
  status = main()
  sys.stdout.flush()
  os._exit(status)  # Chromium would complain of the order in which its parts go
