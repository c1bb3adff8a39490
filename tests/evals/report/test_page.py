"""The report's page shows all its parts and sends no request.

It is read as HTML and opened in a browser.
"""

import copy
import dataclasses
import functools
import html.parser
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np
import pytest
from etils import epath
from matplotlib import image

from diffjax.config import UserError
from diffjax.evals import SUITES
from diffjax.evals.measurement import mean_of
from diffjax.evals.report import intervals, measurements, plots, results
from diffjax.evals.report.suite import Report
from diffjax.evals.suite import Model, suite_class
from tests.evals.report.browser import EXECUTABLES, executable

# The suites with results, in the page's order. "outliers" has results of the
# first model only.
MEASURED = ["validation", "needle", "outliers"]
PROMPT = 'if a < b: print("</script><script>alert(1)</script>") & é'
NASTY_NAME = '<b>DIFF</b> & twin\'s "run"'


class MadeReport(NamedTuple):
  """A page about two models, and what it was made from.

  Attributes:
    directory: the directory with the results and the page.
    page: the path of the page.
    pair_figures: the figures of the suites that compare both models.
  """

  directory: epath.Path
  page: epath.Path
  pair_figures: list[dict[str, Any]]


@pytest.fixture(scope="module")
def report(make_trained, tmp_path_factory):
  """Makes the page of two models with logs and results."""
  path = tmp_path_factory.mktemp("report")
  directory = epath.Path(path / "out")
  directory.mkdir()
  diff = describe(path / "diff", NASTY_NAME, "diff")
  transformer = describe(path / "softmax", "a transformer", "softmax")
  write_log(path / "diff", has_lambda=True)
  write_log(path / "softmax", has_lambda=False)

  first, second = random_figures()
  pair_figures = list(intervals.compare(first, second))
  first.append(mean_of("none", [0.0, 0.0]))
  single_figures = list(intervals.compare(first))
  write_results(directory, "validation", [diff, transformer], pair_figures)
  write_results(directory, "needle", [diff, transformer], pair_figures)
  write_results(directory, "outliers", [diff], single_figures)
  save_a_plot(directory / "needle.png")

  models = [
    Model(with_tokenizer_name(make_trained("diff"), NASTY_NAME), diff),
    Model(make_trained("softmax"), transformer),
  ]
  page = make_page(Report(prompt=PROMPT, heads=2), models, directory)
  return MadeReport(directory, page, results.finite(pair_figures))


def make_page(suite, models, directory):
  """Runs the suite, and returns the path of the page."""
  prompt_ids = [suite.load(model.trained) for model in models]
  suite.run(models, prompt_ids, directory)
  return directory / "report.html"


def describe(workdir, name, attention):
  """Returns the description of a model, as in the results of suites."""
  return {
    "name": name,
    "workdir": str(workdir),
    "attention": attention,
    "parameters": 12345,
  }


def with_tokenizer_name(trained, name):
  """Returns a model with the same tokenizer of another name."""
  tokenizer = copy.copy(trained.tokenizer)
  tokenizer.spec = name
  return dataclasses.replace(trained, tokenizer=tokenizer)


def write_log(workdir, has_lambda):
  """Writes a log with a loss that was not finite and an incomplete line."""
  workdir.mkdir()
  lines = []
  for step in range(1, 20):
    line = {"step": step, "time": 0.0, "train/loss": 3 / step}
    if has_lambda:
      line["lambda/layer_00"] = 0.2
      line["lambda/layer_01"] = 0.3 + 0.01 * step
    lines.append(line)
  lines.append({"step": 19, "time": 0.0, "validation/loss": 0.2})
  lines.append({"step": 20, "time": 0.0, "train/loss": None})
  with (workdir / "metrics.jsonl").open("w") as file:
    for line in lines:
      file.write(json.dumps(line) + "\n")
    file.write('{"step": 21, "tr')


def random_figures():
  """Returns figures of two models.

  The accuracy differs clearly. The means of the other figures do not differ.
  The second model has no "single".
  """
  rng = np.random.default_rng(0)
  units = rng.random(20)
  first = [
    mean_of("accuracy <x>", units + 5, depth="mean"),
    mean_of("loss", units, depth=1),
    mean_of("single", [math.pi]),
    mean_of("alike", units, depth=2),
  ]
  second = [
    mean_of("accuracy <x>", rng.random(20), depth="mean"),
    mean_of("loss", units[::-1], depth=1),
    mean_of("alike", units[::-1], depth=2),
  ]
  return first, second


def write_results(directory, suite, models, suite_figures):
  """Writes SUITE.json."""
  suite_results = {
    "suite": suite,
    "settings": {"rows": 3},
    "models": models,
    "figures": suite_figures,
  }
  path = directory / f"{suite}.json"
  results.write(path, results.finite(suite_results))


def save_a_plot(path):
  figure = matplotlib.figure.Figure((3, 2))
  figure.add_subplot().plot([1, 2])
  plots.save(figure, path)


class Reader(html.parser.HTMLParser):
  """Records tags, ids and every attribute that could cause a request."""

  ADDRESS_ATTRIBUTES = ("src", "href", "srcset", "action", "data", "poster")

  def __init__(self):
    super().__init__()
    self.tags = []
    self.addresses = []
    self.ids = []

  def handle_starttag(self, tag, attributes):
    self.tags.append(tag)
    for name, value in attributes:
      if name in self.ADDRESS_ATTRIBUTES:
        self.addresses.append(value)
      if name == "id":
        self.ids.append(value)


def test_nothing_in_the_page_points_outside(report):
  text = report.page.read_text()
  assert text.startswith("<!doctype html>\n<html")
  assert text.endswith("</html>\n")
  reader = Reader()
  reader.feed(text)
  for address in reader.addresses:
    assert address.startswith(("data:", "#"))
  assert "url(" not in text
  assert "@import" not in text
  assert len(set(reader.ids)) == len(reader.ids)


def test_text_is_escaped(report):
  """Names, prompts and figures contain tags, and none becomes an element."""
  reader = Reader()
  reader.feed(report.page.read_text())
  assert "b" not in reader.tags
  assert "x" not in reader.tags
  # The data of two panels, and the page's own script.
  assert reader.tags.count("script") == 3


def test_the_page_contains_all_pictures(report):
  reader = Reader()
  reader.feed(report.page.read_text())
  num_curves = 2
  num_head_pictures = 1
  num_panel_maps = 3 + 1
  num_plots = 1
  assert reader.tags.count("img") == (
    num_curves + num_head_pictures + num_panel_maps + num_plots
  )


def test_no_temporary_file_remains(report):
  names = [path.name for path in report.directory.iterdir()]
  assert not [name for name in names if name.endswith(".tmp")]


@functools.cache
def look(page, *options):
  """Opens a page in a browser. Returns what browser.py prints."""
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


def test_a_browser_loads_all_pictures_and_requests_nothing(report, browser):
  contents = look(report.page)
  assert contents["requests"] == [f"file://{report.page}"]
  assert not contents["said"]
  assert len(contents["images"]) == 8
  images = contents["images"] + contents["changed_images"]
  for _, is_complete, width, height, shown_width in images:
    assert is_complete
    assert width > 10
    assert height > 10
    assert shown_width > 100


def test_a_browser_shows_all_sections(report, browser):
  contents = look(report.page)
  assert contents["title"] == "DIFF and Transformer"
  assert contents["targets"], "each link leads to a section"
  sections = [section for section, _ in contents["tables"]]
  assert sections == ["training", "attention-maps", *MEASURED, "models"]
  text = contents["text"]
  assert f"Measured of {NASTY_NAME}, not of this page's models." in text
  assert "Not measured here: position_nll, attention," in text
  assert PROMPT in text


def test_a_browser_shows_the_tables(report, browser):
  tables = dict(look(report.page)["tables"])
  assert tables["models"][:2] == [
    ["", "DIFF", "Transformer"],
    ["run", NASTY_NAME, "a transformer"],
  ]
  assert ["parameters", "12,345", "12,345"] in tables["models"]
  assert ["tokenizer", NASTY_NAME, "bytes"] in tables["models"]

  # The figures differ in their number of prompts, so it has a column.
  header = ["", "depth", "prompts", "DIFF", "Transformer", "difference"]
  accuracy = report.pair_figures[0]
  assert tables["needle"][0] == header
  assert tables["needle"][1] == [
    "accuracy <x>",
    "mean",
    "20",
    results.number(accuracy),
    results.number(accuracy["against"]),
    results.number(accuracy["difference"]),
  ]
  assert tables["needle"][2] == ["single", "", "1", "3.142", "–", "–"]
  # Without a second model, there are no columns for it.
  assert tables["outliers"][0] == ["", "depth", "rows", "DIFF"]


def test_the_first_screen_says_what_differs(report, browser):
  """It has a sentence, and a line for each main figure.

  Results of other models than the page's are not on it.
  """
  contents = look(report.page)
  accuracy = report.pair_figures[0]
  value = results.number(accuracy).partition(" ")[0]
  against = results.number(accuracy["against"]).partition(" ")[0]
  assert (
    "DIFF against Transformer: DIFF is better in needles found"
    f" ({value} against {against})."
  ) in contents["lead"]
  no_difference = "1 of 2 main figures shows no clear difference."
  assert no_difference in contents["lead"]

  header, loss, needles = contents["headlines"]
  assert header[:3] == ["main figures", "DIFF", "Transformer"]
  assert header[-1] == "DIFF is"
  assert loss[0] == "loss lower is better"
  assert loss[-1] == "unclear"
  assert needles[0] == "needles found higher is better"
  assert needles[-1] == "better"
  assert contents["bars"] == [False, True], "whether each point is filled"
  assert contents["first_screen"], "it needs no scrolling"


def test_figures_without_information_are_folded(report, browser):
  folded = look(report.page)["folded"]
  assert folded["needle"] == ["2 rows without a clear difference", "settings"]
  assert folded["validation"] == [
    "1 row without a clear difference",
    "settings",
  ], "a main figure is never folded"
  assert folded["outliers"] == ["1 row of 0", "settings"]


def test_a_narrow_page_scrolls_only_in_its_parts(report, browser):
  assert look(report.page, "--width=400")["overflow"] == 0


def test_the_maps_in_a_browser_change_with_layer_and_head(report, browser):
  diff, transformer = look(report.page)["panels"]
  assert diff["images"] == 3
  assert transformer["images"] == 1
  assert diff["labels"][:4] == ["if", "a", "<", "b"]

  num_tokens = len(PROMPT.encode()) + 1
  last_query = num_tokens - 1
  middle_key = num_tokens // 2
  # The first token is the start, and the last one is a part of "é".
  key_text = PROMPT[middle_key - 1]
  for panel in (diff, transformer):
    assert panel["changed"]
    assert panel["layers"] == 2
    assert panel["heads"] == 3
    assert panel["said"] == (
      f'query {last_query} "\ufffd" looks at key {middle_key} "{key_text}"'
    )
    assert float(panel["scale"]) > 0


def test_the_browser_would_see_a_request_and_an_error(browser, tmp_path):
  page = tmp_path / "page.html"
  page.write_text(
    '<img src="http://example.com/a.png"><script>missing();</script>'
  )
  contents = look(page)
  assert "http://example.com/a.png" in contents["requests"]
  assert "missing is not defined" in " ".join(contents["said"])


def test_the_picture_beside_the_page_is_sharp_and_opaque(report):
  """It stands on light and dark pages, such as the README."""
  pixels = image.imread(report.directory / "maps.png")
  assert pixels.shape[1] == 2400
  alpha = pixels[..., 3]
  assert (alpha == 1).all()


def test_a_section_has_the_number_of_units_and_the_notes(tmp_path):
  """The number is a sentence if all figures share it, and else a column."""
  model = describe(tmp_path, "a model", "diff")
  figures = [
    mean_of("accuracy", np.zeros(1000), depth=0.5),
    mean_of("accuracy", np.ones(1000), depth="mean"),
  ]

  def section(*more_figures):
    suite_results = {
      "suite": "needle",
      "settings": {},
      "models": [model],
      "figures": list(intervals.compare([*figures, *more_figures])),
    }
    directory = epath.Path(tmp_path)
    return measurements.section(suite_results, ["a model"], directory)

  with_equal_units = section()
  assert with_equal_units.units == "1,000 prompts"
  assert "prompts" not in with_equal_units.main.header
  assert with_equal_units.notes == suite_class("needle").table.notes

  with_other_units = section(mean_of("time", [1.0, 2.0]))
  assert with_other_units.units == ""
  for table in (with_other_units.main, with_other_units.folded):
    assert table.header == ["depth", "prompts", "DIFF"]
  details = [row.details for row in with_other_units.main.rows]
  assert details == [["mean", "1,000"], ["", "2"]]


def test_results_of_one_model(make_trained, tmp_path):
  """The suite `needle` is known. `mine` is from a module not imported.

  Other JSON files may lie in the directory.
  """
  directory = epath.Path(tmp_path)
  model = describe(tmp_path, "a model", "softmax")
  figures = list(intervals.compare([mean_of("accuracy", np.ones(1000))]))
  write_results(directory, "needle", [model], figures)
  write_results(directory, "mine", [model], figures)
  (tmp_path / "settings.json").write_text('{"suite": "settings"}')
  (tmp_path / "broken.json").write_text("{")
  trained = make_trained("softmax", num_layers=1)
  page = make_page(Report(tokens=8), [Model(trained, model)], directory)
  text = page.read_text()
  assert "Measured on 1,000 prompts." in text
  for note in suite_class("needle").table.notes:
    assert note in text
  unknown = "was measured, but is not known here: pass --import=MODULE."
  assert f"<p>mine {unknown}</p>" in text
  assert text.count(unknown) == 1


def test_one_model_without_logs_or_results(make_trained, tmp_path):
  trained = make_trained("diff_v2", num_layers=1)
  description = describe(tmp_path, "a model", "diff_v2")
  models = [Model(trained, description)]
  page = make_page(Report(layers=9, heads=9), models, epath.Path(tmp_path))
  text = page.read_text()
  assert f"DIFF V2: no metrics.jsonl in {tmp_path}." in text
  assert "No suite has been measured here" in text
  other_suites = [name for name in SUITES if name != "report"]
  assert f"Not measured here: {', '.join(other_suites)}." in text
  num_layers = 1
  mean_and_heads = 1 + 4
  assert text.count("<option") == num_layers + mean_and_heads


@pytest.mark.parametrize(
  "settings, content, message",
  [
    (
      dict(prompt="x" * 200),
      None,
      "set.report.prompt has 201 tokens with its start token, and at most 96"
      " are allowed: set.report.tokens = 96",
    ),
    (
      dict(prompt="x" * 600, tokens=1000),
      None,
      "config.model.max_length = 512",
    ),
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
  """`content` is the content of needle.json. None for no such file."""
  if content is not None:
    (tmp_path / "needle.json").write_text(content)
  description = describe(tmp_path, "a model", "diff")
  model = Model(make_trained(num_layers=1), description)
  with pytest.raises(UserError, match=message):
    make_page(Report(**settings), [model], epath.Path(tmp_path))
