"""The report's page, read as HTML and opened in a browser, shows all its parts and sends no request."""

import html.parser
import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.evals.report import figures, plots, results
from diffjax.evals.report.page import Settings, write
from tests.tiers import full

SUITES = ["validation", "needle", "outliers", "attention"]
PROMPT = 'if a < b: print("</script><script>alert(1)</script>") & é'
NASTY = '<b>DIFF</b> & twin\'s "run"'


@pytest.fixture(scope="module")
def made(make_trained, tmp_path_factory):
  """Two models with logs and results, and their page."""
  path = tmp_path_factory.mktemp("report")
  models = []
  for name, kind in ((NASTY, "diff"), ("a transformer", "softmax")):
    workdir = path / kind
    workdir.mkdir()
    lines = [{"step": step, "time": 0.0, "train/loss": 3 / step} for step in range(1, 20)]
    if kind == "diff":
      lines = [line | {"lambda/layer_00": 0.2, "lambda/layer_01": 0.3 + 0.01 * line["step"]} for line in lines]
    lines += [{"step": 19, "time": 0.0, "validation/loss": 0.2}, {"step": 20, "time": 0.0, "train/loss": None}]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 21, "tr')
    trained = make_trained(kind)
    models.append((trained, {"name": name, "workdir": str(workdir), "attention": kind, "parameters": 12345}))
  out = epath.Path(path / "out")
  out.mkdir()
  rng = np.random.default_rng(0)
  first = [figures.mean_of("accuracy <x>", rng.random(20) + 5, depth=0.5), figures.mean_of("single", [math.pi])]
  second = [figures.mean_of("accuracy <x>", rng.random(20), depth=0.5)]
  described = [{"name": description["name"]} for _, description in models]
  for suite in SUITES[:3]:
    rows = list(figures.compare(first, second))
    found = {"suite": suite, "settings": {"rows": 3}, "models": described[: 1 if suite == "outliers" else 2], "figures": rows}
    results.write(out / f"{suite}.json", results.finite(found))
  save_a_plot(out / "needle.png")
  page = write(models, Settings(prompt=PROMPT, heads=2), out, SUITES)
  return models, out, page, results.finite({"rows": rows})["rows"]


def save_a_plot(path):
  import matplotlib.figure

  figure = matplotlib.figure.Figure((3, 2))
  figure.add_subplot().plot([1, 2])
  plots.save(figure, path)


class Reader(html.parser.HTMLParser):
  """Records tags, ids and every attribute that could cause a request."""

  def __init__(self):
    super().__init__()
    self.tags, self.addresses, self.ids = [], [], []

  def handle_starttag(self, tag, attributes):
    self.tags.append(tag)
    for name, value in attributes:
      if name in ("src", "href", "srcset", "action", "data", "poster"):
        self.addresses.append(value)
      if name == "id":
        self.ids.append(value)


def test_nothing_in_the_page_points_outside(made):
  text = made[2].read_text()
  reader = Reader()
  reader.feed(text)
  assert all(address.startswith(("data:", "#")) for address in reader.addresses)
  assert "url(" not in text and "@import" not in text
  assert reader.tags.count("script") == 3 and "b" not in reader.tags and len(set(reader.ids)) == len(reader.ids)
  assert reader.tags.count("img") == 2 + 3 + 1 + 1  # curves, both models' maps, a suite's plot
  assert [file.name for file in made[1].iterdir() if file.name.endswith(".tmp")] == []


def look(page):
  script = pathlib.Path(__file__).with_name("browser.py")
  result = subprocess.run([sys.executable, script, page], capture_output=True, text=True, timeout=120)
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout)


@pytest.fixture(scope="module")
def browser():
  pytest.importorskip("PySide6.QtWebEngineWidgets", reason="needs PySide6-WebEngine, a browser", exc_type=ImportError)


def test_a_browser_shows_everything_and_asks_for_nothing(made, browser):
  _, _, page, rows = made
  seen = look(page)
  assert seen["requests"] == [f"file://{page}"]
  assert not seen["said"]
  assert seen["title"] == f"{NASTY} and a transformer" and seen["targets"]
  assert len(seen["images"]) == 7
  for _, complete, width, height, shown in seen["images"] + seen["changed_images"]:
    assert complete and width > 10 and height > 10 and shown > 100
  tables = dict(seen["tables"])
  assert list(tables) == ["models", "training", "attention-maps", *SUITES[:3]]
  assert tables["models"][0] == ["", NASTY, "a transformer"] and ["parameters", "12,345", "12,345"] in tables["models"]
  assert tables["needle"][0] == ["", "depth", NASTY, "a transformer", "difference"]
  first = rows[0]
  assert tables["needle"][1] == [
    "accuracy <x>", "0.5", *(results.number(one) for one in (first, first["against"], first["difference"]))
  ]  # fmt: skip
  assert tables["needle"][2] == ["single", "", "3.142", "–", "–"]
  assert len(tables["outliers"][1]) == 3
  assert f"Measured of {NASTY}, not of this page's models." in seen["text"] and "Not measured here: attention." in seen["text"]
  assert PROMPT in seen["text"]


def test_the_maps_in_a_browser_change_with_layer_and_head(made, browser):
  diff, transformer = look(made[2])["panels"]
  count = len(PROMPT.encode()) + 1
  assert (diff["images"], transformer["images"]) == (3, 1)
  for panel in (diff, transformer):
    assert panel["changed"] and panel["layers"] == 2 and panel["heads"] == 3
    assert panel["said"] == f'query {count - 1} "\ufffd" looks at key {count // 2} "{PROMPT[count // 2 - 1]}"'
    assert all(scale for scale in panel["scales"])
  assert diff["scales"][2].startswith("±") and transformer["scales"][0].startswith("0 to ")


def test_the_browser_would_see_a_request_and_an_error(browser, tmp_path):
  page = tmp_path / "page.html"
  page.write_text('<img src="http://example.com/a.png"><script>missing();</script>')
  seen = look(page)
  assert "http://example.com/a.png" in seen["requests"] and any("missing is not defined" in line for line in seen["said"])


@pytest.mark.parametrize("kind", ["diff", *full(["softmax", "diff_v2"])])
def test_maps_are_those_of_the_model(make_trained, kind):
  from diffjax.evals.report.maps import maps_of
  from diffjax.ops.diff_attention.reference import attention_maps

  trained = make_trained(kind)
  tokens = np.arange(20)[None]
  _, variables = jax.jit(lambda params: trained.model.apply({"params": params}, tokens, mutable=["intermediates"]))(trained.params)
  captured = variables["intermediates"]["layers"]["attention"]
  found = maps_of(trained.model, trained.params, tokens, 2)
  assert found.shape == (2, 3, 1 if kind == "softmax" else 3, 20, 20)
  for layer in range(2):
    maps = jax.jit(attention_maps)(captured["query"][0][layer], captured["key"][0][layer])[0]
    np.testing.assert_allclose(found[layer, 1:, : maps.shape[1]], maps[:2], atol=1e-6)
    np.testing.assert_allclose(found[layer, 0, : maps.shape[1]], maps.mean(axis=0), atol=1e-6)
  if kind != "softmax":  # what is left of a row is 1 − λ
    lam = 1 - found[:, 1:, 2].sum(axis=-1)
    np.testing.assert_allclose(found[:, 1:, 2], found[:, 1:, 0] - lam[..., None] * found[:, 1:, 1], atol=1e-6)


def test_one_model_without_logs_or_results(make_trained, tmp_path):
  model = make_trained("diff_v2", num_layers=1), {"name": "a model", "workdir": str(tmp_path), "attention": "diff_v2", "parameters": 1}
  text = write([model], Settings(layers=9, heads=9), epath.Path(tmp_path), SUITES).read_text()
  assert f"a model: no metrics.jsonl in {tmp_path}." in text and f"Not measured here: {', '.join(SUITES)}." in text
  assert text.count("<option") == 1 + 5  # a layer; the mean and four heads


@pytest.mark.parametrize(
  "settings, content, message",
  [
    (dict(prompt="x" * 200), None, "set.report.prompt has 201 tokens, its separator included: set.report.tokens = 96"),
    (dict(prompt="x" * 600, tokens=1000), None, "the model takes at most 512"),
    (dict(layers=0), None, "set.report.layers = 0"),
    ({}, "{", "needle.json holds no results"),
    ({}, '{"suite": "validation", "models": [1], "figures": []}', "needle.json holds no results of the suite needle"),
    ({}, '{"suite": "needle", "models": [{}], "figures": [3]}', "needle.json holds no results"),
  ],
)
def test_bad_input(make_trained, tmp_path, settings, content, message):
  if content is not None:
    (tmp_path / "needle.json").write_text(content)
  model = make_trained(num_layers=1), {"name": "a model", "workdir": str(tmp_path), "attention": "diff", "parameters": 1}
  with pytest.raises(UserError, match=message):
    write([model], Settings(**settings), epath.Path(tmp_path), SUITES)
