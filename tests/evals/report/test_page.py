"""The report's page, read as HTML and opened in a browser, shows all its parts and sends no request."""

import functools
import html.parser
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from etils import epath
from matplotlib import image

from diffjax.config import UserError
from diffjax.evals.report import figures, map_pictures, maps, plots, results
from diffjax.evals.report.page import Settings, write
from diffjax.evals.report.words import readable, words_of
from diffjax.ops.diff_attention.reference import attention_maps
from tests.evals.report.browser import EXECUTABLES, executable
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
    lines = [
      {"step": step, "time": 0.0, "train/loss": 3 / step}
      for step in range(1, 20)
    ]
    if kind == "diff":
      lines = [
        line
        | {"lambda/layer_00": 0.2, "lambda/layer_01": 0.3 + 0.01 * line["step"]}
        for line in lines
      ]
    lines += [
      {"step": 19, "time": 0.0, "validation/loss": 0.2},
      {"step": 20, "time": 0.0, "train/loss": None},
    ]
    (workdir / "metrics.jsonl").write_text(
      "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 21, "tr'
    )
    trained = make_trained(kind)
    models.append(
      (
        trained,
        {
          "name": name,
          "workdir": str(workdir),
          "attention": kind,
          "parameters": 12345,
        },
      )
    )
  out = epath.Path(path / "out")
  out.mkdir()
  rng = np.random.default_rng(0)
  base = rng.random(20)
  first = [
    figures.mean_of("accuracy <x>", base + 5, depth="mean"),
    figures.mean_of("loss", base, depth=1),
    figures.mean_of("single", [math.pi]),
    figures.mean_of("alike", base, depth=2),
  ]
  second = [
    figures.mean_of("accuracy <x>", rng.random(20), depth="mean"),
    figures.mean_of("loss", base[::-1], depth=1),
    figures.mean_of("alike", base[::-1], depth=2),
  ]
  described = [description for _, description in models]
  pairs, alone = (
    list(figures.compare(first, second)),
    list(figures.compare([*first, figures.mean_of("none", [0.0, 0.0])])),
  )
  for suite in SUITES[:3]:
    rows, measured = (
      (alone, described[:1]) if suite == "outliers" else (pairs, described)
    )
    found = {
      "suite": suite,
      "settings": {"rows": 3},
      "models": measured,
      "figures": rows,
    }
    results.write(out / f"{suite}.json", results.finite(found))
  save_a_plot(out / "needle.png")
  page = write(models, Settings(prompt=PROMPT, heads=2), out, SUITES)
  return models, out, page, results.finite({"rows": pairs})["rows"]


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
  assert (
    reader.tags.count("script") == 3
    and "b" not in reader.tags
    and len(set(reader.ids)) == len(reader.ids)
  )
  assert (
    reader.tags.count("img") == 2 + 1 + 3 + 1 + 1
  )  # curves, a head's maps, both models' maps, a suite's plot
  assert [
    file.name for file in made[1].iterdir() if file.name.endswith(".tmp")
  ] == []


@functools.cache
def look(page, *options):
  script = pathlib.Path(__file__).with_name("browser.py")
  result = subprocess.run(
    [sys.executable, script, page, *options],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout)


@pytest.fixture(scope="module")
def browser():
  """Skips the test if no browser is installed; CI requires one."""
  if executable() is not None:
    return
  missing = (
    f"needs a browser: none of {', '.join(EXECUTABLES)} is on PATH;"
    " on Debian: apt-get install chromium"
  )
  if "DIFFJAX_TESTS_REQUIRE_BROWSER" in os.environ:
    pytest.fail(missing)
  pytest.skip(missing)


def test_a_browser_shows_everything_and_asks_for_nothing(made, browser):
  _, _, page, rows = made
  seen = look(page)
  assert seen["requests"] == [f"file://{page}"]
  assert not seen["said"]
  assert seen["title"] == "DIFF and Transformer" and seen["targets"]
  assert len(seen["images"]) == 8
  for _, complete, width, height, shown in (
    seen["images"] + seen["changed_images"]
  ):
    assert complete and width > 10 and height > 10 and shown > 100
  tables = dict(seen["tables"])
  assert list(tables) == ["training", "attention-maps", *SUITES[:3], "models"]
  assert tables["models"][:2] == [
    ["", "DIFF", "Transformer"],
    ["run", NASTY, "a transformer"],
  ]
  assert ["parameters", "12,345", "12,345"] in tables["models"]
  assert tables["needle"][0] == [
    "",
    "depth",
    "DIFF",
    "Transformer",
    "difference",
  ]
  first = rows[0]
  assert tables["needle"][1] == [
    "accuracy <x>",
    "mean",
    *(
      results.number(one)
      for one in (first, first["against"], first["difference"])
    ),
  ]
  assert tables["needle"][2] == ["single", "", "3.142", "–", "–"]
  assert len(tables["outliers"][1]) == 3
  assert (
    f"Measured of {NASTY}, not of this page's models." in seen["text"]
    and "Not measured here: attention." in seen["text"]
  )
  assert PROMPT in seen["text"]


def test_the_first_screen_says_what_differs(made, browser):
  """In a sentence and a figure, with a line for each main figure; results of other models than the page's do not count."""
  seen, rows = look(made[2]), made[3]
  value, other = (
    results.number(one).partition(" ")[0]
    for one in (rows[0], rows[0]["against"])
  )
  assert (
    f"DIFF against Transformer: DIFF is better in needles found ({value} against {other})."
    in seen["lead"]
  )
  assert "1 of 2 main figures shows no clear difference." in seen["lead"]
  lines = [line[:3] + line[4:] for line in seen["headlines"]]
  assert lines[0] == ["main figures", "DIFF", "Transformer", "DIFF is"]
  assert [line[0] for line in lines[1:]] == [
    "loss lower is better",
    "needles found higher is better",
  ]
  assert [line[-1] for line in lines[1:]] == ["unclear", "better"]
  assert seen["bars"] == [False, True], "whether each point is filled"
  assert seen["first_screen"], "it needs no scrolling"


def test_rows_that_tell_nothing_are_folded(made, browser):
  seen = look(made[2])
  assert seen["folded"]["needle"] == [
    "2 rows without a clear difference",
    "settings",
  ]
  assert seen["folded"]["validation"] == [
    "1 row without a clear difference",
    "settings",
  ], "a main figure is never folded"
  assert seen["folded"]["outliers"] == ["1 row of 0", "settings"]


def test_a_narrow_page_scrolls_in_its_parts_alone(made, browser):
  assert look(made[2], "--width=400")["overflow"] == 0


def test_the_maps_in_a_browser_change_with_layer_and_head(made, browser):
  diff, transformer = look(made[2])["panels"]
  count = len(PROMPT.encode()) + 1
  assert (diff["images"], transformer["images"]) == (3, 1) and diff["labels"][
    :4
  ] == ["if", "a", "<", "b"]
  for panel in (diff, transformer):
    assert panel["changed"] and panel["layers"] == 2 and panel["heads"] == 3
    assert (
      panel["said"]
      == f'query {count - 1} "\ufffd" looks at key {count // 2} "{PROMPT[count // 2 - 1]}"'
    )
    assert float(panel["scale"]) > 0


def test_the_browser_would_see_a_request_and_an_error(browser, tmp_path):
  page = tmp_path / "page.html"
  page.write_text(
    '<img src="http://example.com/a.png"><script>missing();</script>'
  )
  seen = look(page)
  assert "http://example.com/a.png" in seen["requests"] and any(
    "missing is not defined" in line for line in seen["said"]
  )


@pytest.mark.parametrize("kind", ["diff", *full(["softmax", "diff_v2"])])
def test_maps_are_those_of_the_model(make_trained, kind):
  trained = make_trained(kind)
  tokens = np.arange(20)[None]
  _, variables = jax.jit(
    lambda params: trained.model.apply(
      {"params": params}, tokens, mutable=["intermediates"]
    )
  )(trained.params)
  captured = variables["intermediates"]["layers"]["attention"]
  layers = maps.maps_of(trained.model, trained.params, tokens)
  if kind == "softmax":
    assert layers.titles == ("A",)
  else:
    assert layers.titles == ("A₁", "λA₂", "A₁ − λA₂")
  found = np.asarray(layers.weights)
  heads = trained.config.model.num_heads
  assert found.shape == (2, 1 + heads, 1 if kind == "softmax" else 3, 20, 20)
  np.testing.assert_allclose(found[:, 0], found[:, 1:].mean(axis=1), atol=1e-6)
  for layer in range(2):
    own = np.asarray(
      jax.jit(attention_maps)(
        captured["query"][0][layer], captured["key"][0][layer]
      )[0]
    )
    np.testing.assert_allclose(found[layer, 1:, 0], own[:, 0], atol=1e-6)
    if kind != "softmax":
      lam = 1 - found[layer, 1:, 2].sum(
        axis=-1
      )  # what is left of a row is 1 − λ
      np.testing.assert_allclose(
        found[layer, 1:, 1], lam[..., None] * own[:, 1], atol=1e-6
      )
      np.testing.assert_allclose(
        found[layer, 1:, 2],
        found[layer, 1:, 0] - found[layer, 1:, 1],
        atol=1e-6,
      )


def test_the_picture_is_of_the_head_that_cancels_most(make_trained, tmp_path):
  """Of two heads in two layers, one of which has a second map that equals half its first; the others' maps share no key."""
  first, second = np.zeros((2, 3, 6, 6)), np.zeros((2, 3, 6, 6))
  first[..., 0], second[..., 1] = 1, 0.9
  second[1, 2] = first[1, 2] / 2
  weights = np.stack([first, second, first - second], axis=2)
  tokens = ["(start)", "a", "b", " ", "+", "="]
  titles = ("A₁", "λA₂", "A₁ − λA₂")
  model_maps = maps.Maps(make_trained(), tokens, titles, weights)
  assert maps.most_cancelled(model_maps) == (1, 2 - 1, 0.5)
  figure, caption = map_pictures.head_picture(model_maps)
  assert caption.startswith("Layer 1 of 2, head 1 of 2,") and "50%" in caption
  fields = [axes for axes in figure.axes if axes.get_title()]
  assert [axes.get_title() for axes in fields] == ["A₁", "λA₂", "A₁ − λA₂"]
  for axes, expected in zip(fields, weights[1, 2], strict=True):
    shown = axes.images[0].get_array()
    np.testing.assert_array_equal(
      shown.filled(9), np.where(np.tri(6), expected, 9)
    )
    assert [label.get_text() for label in axes.get_xticklabels()] == [
      "(start)",
      "ab",
      "+=",
    ]
    assert axes.images[0].norm is fields[0].images[0].norm, "one scale"


def test_the_picture_beside_the_page_is_sharp_and_opaque(made):
  """It stands on light and dark pages alike, the README's for one."""
  pixels = image.imread(made[1] / "maps.png")
  assert pixels.shape[1] == 2400 and (pixels[..., 3] == 1).all()


def test_words_of_tokens():
  words = words_of(
    [
      "d",
      "e",
      "f",
      " ",
      "a",
      "_",
      "1",
      "(",
      ")",
      ":",
      "\n",
      " the",
      " cat",
      "s",
    ]
  )
  assert [word.text for word in words] == ["def", "a_1", "():", "the", "cats"]
  assert words[1] == (4, 7, "a_1") and words[4] == (12, 14, "cats")
  assert [
    word.text for word in readable(words_of(["x", "=", "y", ";", "z"]), 2)
  ] == ["x", "y", "z"], "words go before signs"


def test_one_model_without_logs_or_results(make_trained, tmp_path):
  model = (
    make_trained("diff_v2", num_layers=1),
    {
      "name": "a model",
      "workdir": str(tmp_path),
      "attention": "diff_v2",
      "parameters": 1,
    },
  )
  text = write(
    [model], Settings(layers=9, heads=9), epath.Path(tmp_path), SUITES
  ).read_text()
  assert (
    f"DIFF V2: no metrics.jsonl in {tmp_path}." in text
    and "No suite has been measured here" in text
    and f"Not measured here: {', '.join(SUITES)}." in text
  )
  assert text.count("<option") == 1 + 5  # a layer; the mean and four heads


@pytest.mark.parametrize(
  "settings, content, message",
  [
    (
      dict(prompt="x" * 200),
      None,
      "set.report.prompt has 201 tokens, its start included: set.report.tokens = 96",
    ),
    (dict(prompt="x" * 600, tokens=1000), None, "the model takes at most 512"),
    (dict(layers=0), None, "set.report.layers = 0"),
    ({}, "{", "needle.json holds no results"),
    (
      {},
      '{"suite": "validation", "models": [1], "figures": []}',
      "needle.json holds no results of the suite needle",
    ),
    (
      {},
      '{"suite": "needle", "models": [{}], "figures": [3]}',
      "needle.json holds no results",
    ),
  ],
)
def test_bad_input(make_trained, tmp_path, settings, content, message):
  if content is not None:
    (tmp_path / "needle.json").write_text(content)
  model = (
    make_trained(num_layers=1),
    {
      "name": "a model",
      "workdir": str(tmp_path),
      "attention": "diff",
      "parameters": 1,
    },
  )
  with pytest.raises(UserError, match=message):
    write([model], Settings(**settings), epath.Path(tmp_path), SUITES)
