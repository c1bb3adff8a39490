"""The report's page shows all its parts and sends no request.

It is read as HTML and opened in a browser.
"""

import copy
import dataclasses
import html.parser
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np
import pytest
from etils import epath
from matplotlib import image

from diffjax.config import UserError
from diffjax.evals import SUITES
from diffjax.evals.measurement import Measurement, mean_of
from diffjax.evals.report import intervals, measurements, plots, results
from diffjax.evals.report.suite import Report
from diffjax.evals.suite import Model, suite_class
from diffjax.inference.trained import Trained
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
def report(
  make_trained: Callable[..., Trained],
  tmp_path_factory: pytest.TempPathFactory,
) -> MadeReport:
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


def make_page(
  suite: Report, models: list[Model], directory: epath.Path
) -> epath.Path:
  """Runs the suite, and returns the path of the page."""
  prompt_ids = [suite.load(model.trained) for model in models]
  suite.run(models, prompt_ids, directory)
  return directory / "report.html"


def describe(
  workdir: pathlib.Path, name: str, attention: str
) -> dict[str, Any]:
  """Returns the description of a model, as in the results of suites."""
  return {
    "name": name,
    "workdir": str(workdir),
    "attention": attention,
    "parameters": 12345,
  }


def with_tokenizer_name(trained: Trained, name: str) -> Trained:
  """Returns a model with the same tokenizer of another name."""
  tokenizer = copy.copy(trained.tokenizer)
  tokenizer.spec = name
  return dataclasses.replace(trained, tokenizer=tokenizer)


def write_log(workdir: pathlib.Path, *, has_lambda: bool) -> None:
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


def random_figures() -> tuple[list[Measurement], list[Measurement]]:
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


def write_results(
  directory: epath.Path,
  suite: str,
  models: list[dict[str, Any]],
  suite_figures: list[dict[str, Any]],
) -> None:
  """Writes SUITE.json."""
  suite_results = {
    "suite": suite,
    "settings": {"rows": 3},
    "models": models,
    "figures": suite_figures,
  }
  path = directory / f"{suite}.json"
  results.write(path, results.finite(suite_results))


def save_a_plot(path: epath.Path) -> None:
  """Saves a plot with one line."""
  figure = matplotlib.figure.Figure((3, 2))
  figure.add_subplot().plot([1, 2])
  plots.save(figure, path)


class TagReader(html.parser.HTMLParser):
  """Records tags, ids and every attribute that could cause a request."""

  ADDRESS_ATTRIBUTES = ("src", "href", "srcset", "action", "data", "poster")

  def __init__(self) -> None:
    super().__init__()
    self.tags: list[str] = []
    self.addresses: list[str | None] = []
    self.ids: list[str | None] = []

  def handle_starttag(
    self, tag: str, attributes: list[tuple[str, str | None]]
  ) -> None:
    self.tags.append(tag)
    for name, value in attributes:
      if name in self.ADDRESS_ATTRIBUTES:
        self.addresses.append(value)
      if name == "id":
        self.ids.append(value)


@pytest.fixture(scope="module")
def html_tags(report: MadeReport) -> TagReader:
  """The tags of the report."""
  reader = TagReader()
  reader.feed(report.page.read_text())
  return reader


def test_nothing_in_the_page_points_outside(report, html_tags):
  """Pictures are part of the page ("data:"), and links stay in it ("#")."""
  for address in html_tags.addresses:
    assert address.startswith(("data:", "#"))
  # Style sheets can load files too.
  text = report.page.read_text()
  assert "url(" not in text
  assert "@import" not in text


def test_the_page_is_a_whole_document_with_unique_ids(report, html_tags):
  text = report.page.read_text()
  assert text.startswith("<!doctype html>\n<html")
  assert text.endswith("</html>\n")
  assert len(set(html_tags.ids)) == len(html_tags.ids)


def test_text_is_escaped(html_tags):
  """Names, prompts and figures contain tags, and none becomes an element.

  A model's name contains <b>, a figure's <x>, and the prompt <script>.
  """
  assert "b" not in html_tags.tags
  assert "x" not in html_tags.tags
  # The data of two panels, and the page's own script.
  assert html_tags.tags.count("script") == 3


def test_the_page_contains_all_pictures(html_tags):
  # Curves of the losses and of λ.
  num_curves = 2
  # One head of DIFF.
  num_head_pictures = 1
  # The three maps of DIFF, and the single one of the Transformer.
  num_panel_maps = 3 + 1
  # The plot of the suite "needle".
  num_plots = 1
  num_pictures = num_curves + num_head_pictures + num_panel_maps + num_plots
  assert html_tags.tags.count("img") == num_pictures


def test_no_temporary_file_remains(report):
  for path in report.directory.iterdir():
    assert not path.name.endswith(".tmp")


def require_browser() -> None:
  """Skips the test if no browser is installed. CI requires one."""
  if executable() is not None:
    return
  missing = (
    f"needs a browser: none of {', '.join(EXECUTABLES)} is on PATH;"
    " on Debian: apt-get install chromium"
  )
  if "DIFFJAX_TESTS_REQUIRE_BROWSER" in os.environ:
    pytest.fail(missing)
  pytest.skip(missing)


class BrowserContents(NamedTuple):
  """What a browser shows of two pages, as browser.py prints it.

  Attributes:
    report: The contents of the report.
    faulty: The contents of a page with a request and an error.
  """

  report: dict[str, Any]
  faulty: dict[str, Any]


@pytest.fixture(scope="module")
def browser_contents(
  report: MadeReport, tmp_path_factory: pytest.TempPathFactory
) -> BrowserContents:
  """Opens both pages in one browser."""
  require_browser()
  faulty_page = tmp_path_factory.mktemp("faulty") / "page.html"
  faulty_page.write_text(
    '<img src="http://example.com/a.png"><script>missing();</script>'
  )
  script = pathlib.Path(__file__).with_name("browser.py")
  result = subprocess.run(
    [sys.executable, script, report.page, faulty_page],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert result.returncode == 0, result.stderr
  first_line, second_line = result.stdout.splitlines()
  return BrowserContents(json.loads(first_line), json.loads(second_line))


@pytest.fixture
def shown(browser_contents: BrowserContents) -> dict[str, Any]:
  """What a browser shows of the report."""
  return browser_contents.report


@pytest.mark.full
def test_a_browser_requests_nothing_and_reports_no_error(report, shown):
  """The only request is for the page itself. "said" has the errors."""
  assert shown["requests"] == [f"file://{report.page}"]
  assert not shown["said"]


def test_the_browser_would_see_a_request_and_an_error(browser_contents):
  """The faulty page has a picture of another site, and calls `missing()`."""
  faulty = browser_contents.faulty

  assert "http://example.com/a.png" in faulty["requests"]
  assert "missing is not defined" in " ".join(faulty["said"])


def test_a_browser_loads_all_pictures(shown):
  """The pictures change after a choice of another layer and head."""
  images = shown["images"] + shown["changed_images"]
  assert images
  for picture in images:
    assert picture["complete"]
    # A missing picture has no size.
    assert picture["width"] > 10
    assert picture["height"] > 10
    assert picture["shown_width"] > 100


def test_each_link_leads_to_a_section(shown):
  assert shown["targets"]


def test_a_browser_shows_all_sections(shown):
  assert shown["title"] == "DIFF and Transformer"
  sections = list(shown["tables"])
  assert sections == ["training", "attention-maps", *MEASURED, "models"]
  assert PROMPT in shown["text"]


def test_suites_of_other_models_and_without_results_are_named(shown):
  """Only DIFF was measured by "outliers", and both models by two suites."""
  text = shown["text"]

  assert f"Measured of {NASTY_NAME}, not of this page's models." in text
  assert "Not measured here: position_nll, attention," in text


def test_the_table_of_models_describes_both(shown):
  """A browser shows the report of a DIFF model and a Transformer.

  The name of DIFF's run and tokenizer, NASTY_NAME, has characters of HTML.
  """
  rows = shown["tables"]["models"]

  assert ["", "DIFF", "Transformer"] in rows
  assert ["run", NASTY_NAME, "a transformer"] in rows
  assert ["parameters", "12,345", "12,345"] in rows
  assert ["tokenizer", NASTY_NAME, "bytes"] in rows


def test_the_table_of_a_suite_has_both_models_and_their_difference(
  report, shown
):
  """Both models have the figure "accuracy <x>" of 20 prompts."""
  header, accuracy_row, *_ = shown["tables"]["needle"]

  accuracy, *_ = report.pair_figures
  assert header == ["", "depth", "prompts", "DIFF", "Transformer", "difference"]
  assert accuracy_row == [
    "accuracy <x>",
    "mean",
    "20",
    results.number(accuracy),
    results.number(accuracy["against"]),
    results.number(accuracy["difference"]),
  ]


def test_a_figure_of_the_first_model_only_has_dashes_for_the_second(shown):
  """The figure "single" is π, measured on one prompt."""
  rows = shown["tables"]["needle"]

  # The cells are name, depth, prompts, both models and their difference.
  assert ["single", "", "1", "3.142", "–", "–"] in rows


def test_the_table_of_one_model_has_no_difference(shown):
  header, *_ = shown["tables"]["outliers"]

  assert header == ["", "depth", "rows", "DIFF"]


def test_the_first_screen_says_in_a_sentence_what_differs(report, shown):
  """The main figures are the loss and the accuracy of the suite "needle".

  Only the accuracy, which the page calls "needles found", differs clearly.
  """
  accuracy, *_ = report.pair_figures
  value = f"{accuracy['value']:.4g}"
  against = f"{accuracy['against']['value']:.4g}"

  difference = (
    "DIFF against Transformer: DIFF is better in needles found"
    f" ({value} against {against})."
  )
  no_difference = "1 of 2 main figures shows no clear difference."
  assert difference in shown["lead"]
  assert no_difference in shown["lead"]


def test_the_first_screen_has_a_line_for_each_main_figure(shown):
  """The main figures are the loss and the accuracy of the suite "needle".

  The accuracy, which the page calls "needles found", differs clearly.
  """
  lines = shown["headlines"]

  titles = [cells[0] for cells in lines]
  verdicts = [cells[-1] for cells in lines]
  assert titles == [
    "main figures",
    "loss lower is better",
    "needles found higher is better",
  ]
  assert verdicts == ["DIFF is", "unclear", "better"]
  header, *_ = lines
  assert "DIFF" in header
  assert "Transformer" in header


def test_only_clear_differences_have_filled_points(shown):
  """The first bar is of the loss, and the second one of needles found."""
  assert shown["bars"] == [False, True]


def test_the_first_screen_needs_no_scrolling(shown):
  assert shown["first_screen"]


def test_figures_without_information_are_folded(shown):
  """A click on a line, such as "settings", shows what is folded.

  The loss is a main figure of "validation", so it is not folded there.
  """
  folded = shown["folded"]

  # These two rows are the figures "loss" and "alike".
  unclear = "2 rows without a clear difference"
  assert folded["needle"] == [unclear, "settings"]
  # This row is the figure "alike".
  unclear = "1 row without a clear difference"
  assert folded["validation"] == [unclear, "settings"]
  # The figure "none" is 0.
  assert folded["outliers"] == ["1 row of 0", "settings"]


def test_a_narrow_page_scrolls_only_in_its_parts(shown):
  assert shown["narrow_overflow"] == 0


def test_each_model_has_its_maps_with_the_tokens_beside_them(shown):
  """A panel shows the attention maps of a model for the prompt."""
  diff, transformer = shown["panels"]

  # A₁, λA₂ and their difference.
  assert diff["images"] == 3
  assert transformer["images"] == 1
  # The prompt begins with "if a < b".
  assert diff["labels"][:4] == ["if", "a", "<", "b"]


def test_the_maps_change_with_layer_and_head(shown):
  """A panel shows the attention maps of a model, of a layer and head to choose.

  The models have two layers. The report shows two heads, and the mean over all.
  """
  for panel in shown["panels"]:
    assert panel["layers"] == 2
    assert panel["heads"] == 2 + 1
    assert panel["changed"]
    assert float(panel["scale"]) > 0


def test_a_map_names_the_tokens_under_the_mouse(shown):
  """The mouse is over the last query and the key in the middle.

  The tokens are a start token and the bytes of the prompt.
  """
  prompt_bytes = PROMPT.encode()
  num_tokens = 1 + len(prompt_bytes)
  last_query = num_tokens - 1
  middle_key = num_tokens // 2
  # The start token is not part of the prompt's bytes.
  key_text = chr(prompt_bytes[middle_key - 1])
  # The prompt ends with "é", which has two bytes. The second one alone is not
  # a character, and the page shows the replacement character.
  query_text = "\ufffd"

  for panel in shown["panels"]:
    assert panel["said"] == (
      f'query {last_query} "{query_text}" looks at key {middle_key}'
      f' "{key_text}"'
    )


def test_the_picture_beside_the_page_is_sharp_and_opaque(report):
  """Other pages, such as the README, show the picture on light and dark."""
  pixels = image.imread(report.directory / "maps.png")

  # [height, width, channels], with the channels red, green, blue and alpha.
  width = pixels.shape[1]
  alpha = pixels[..., 3]
  assert width == 2400
  assert (alpha == 1).all()


def make_section(
  directory: pathlib.Path, figures: list[Measurement]
) -> measurements.Section:
  """Returns the section of a suite with these measurements of one model."""
  suite_results = {
    "suite": "needle",
    "settings": {},
    "models": [describe(directory, "a model", "diff")],
    "figures": list(intervals.compare(figures)),
  }
  return measurements.section(suite_results, ["a model"], epath.Path(directory))


def test_the_number_of_prompts_is_not_a_column_if_all_figures_share_it(
  tmp_path,
):
  figures = [
    mean_of("accuracy", np.zeros(1000), depth=0.5),
    mean_of("accuracy", np.ones(1000), depth="mean"),
  ]

  section = make_section(tmp_path, figures)

  assert section.units == "1,000 prompts"
  assert "prompts" not in section.main.header


def test_the_number_of_prompts_is_a_column_if_figures_differ_in_it(tmp_path):
  """The figure of a single depth, 0.5, is not in the main table."""
  figures = [
    mean_of("accuracy", np.zeros(1000), depth=0.5),
    mean_of("accuracy", np.ones(1000), depth="mean"),
    mean_of("time of two prompts", [1.0, 2.0]),
  ]

  section = make_section(tmp_path, figures)

  assert section.units == ""
  assert section.main.header == ["depth", "prompts", "DIFF"]
  assert section.folded.header == ["depth", "prompts", "DIFF"]
  accuracy_row, time_row = section.main.rows
  assert accuracy_row.details == ["mean", "1,000"]
  assert time_row.details == ["", "2"]


def page_of_one_model(
  trained: Trained, description: dict[str, Any], directory: pathlib.Path
) -> str:
  """Returns the text of a page about one model with a short prompt."""
  models = [Model(trained, description)]
  page = make_page(Report(tokens=8), models, epath.Path(directory))
  return page.read_text()


def write_accuracy(
  directory: pathlib.Path, suite: str, description: dict[str, Any]
) -> None:
  """Writes results of one model for a suite: the accuracy of 1,000 prompts."""
  accuracy = mean_of("accuracy", np.ones(1000))
  figures = list(intervals.compare([accuracy]))
  write_results(epath.Path(directory), suite, [description], figures)


def test_the_page_has_the_number_of_prompts_and_the_notes_of_a_suite(
  make_trained, tmp_path
):
  """`write_accuracy` writes the results of a suite on 1,000 prompts."""
  trained = make_trained("softmax", num_layers=1)
  description = describe(tmp_path, "a model", "softmax")
  write_accuracy(tmp_path, "needle", description)
  # These files are ignored: they are not named after a suite.
  (tmp_path / "settings.json").write_text('{"suite": "settings"}')
  (tmp_path / "broken.json").write_text("{")

  text = page_of_one_model(trained, description, tmp_path)

  assert "Measured on 1,000 prompts." in text
  for note in suite_class("needle").table.notes:
    assert note in text


def test_the_page_names_measured_suites_that_are_not_registered(
  make_trained, tmp_path
):
  """The module of the suite "mine" has not been imported."""
  trained = make_trained("softmax", num_layers=1)
  description = describe(tmp_path, "a model", "softmax")
  write_accuracy(tmp_path, "needle", description)
  write_accuracy(tmp_path, "mine", description)

  text = page_of_one_model(trained, description, tmp_path)

  unknown = "was measured, but is not known here: pass --import=MODULE."
  assert f"<p>mine {unknown}</p>" in text
  # The suite "needle" is registered, so only "mine" has this sentence.
  assert text.count(unknown) == 1


def test_the_page_says_that_logs_and_results_are_missing(
  make_trained, tmp_path
):
  """The directory `tmp_path` has no files before the page is made."""
  trained = make_trained("diff_v2", num_layers=1)
  description = describe(tmp_path, "a model", "diff_v2")

  text = page_of_one_model(trained, description, tmp_path)

  # The name that the page gives a model with the attention "diff_v2".
  assert f"DIFF V2: no metrics.jsonl in {tmp_path}." in text
  assert "No suite has been measured here" in text
  # The page itself is made by a suite, "report", which measures nothing.
  measuring_suites = [name for name in SUITES if name != "report"]
  assert f"Not measured here: {', '.join(measuring_suites)}." in text


def test_layers_and_heads_are_limited_to_those_of_the_model(
  make_trained, tmp_path
):
  """Nine of each are asked for. The model has one layer with four heads."""
  trained = make_trained("diff_v2", num_layers=1)
  models = [Model(trained, describe(tmp_path, "a model", "diff_v2"))]
  suite = Report(tokens=8, layers=9, heads=9)

  page = make_page(suite, models, epath.Path(tmp_path))

  # An option is a layer, a head, or the mean over heads.
  num_options = page.read_text().count("<option")
  assert num_options == 1 + 4 + 1


@pytest.mark.parametrize(
  "settings, message",
  [
    (
      {"prompt": "x" * 200},
      "set.report.prompt has 201 tokens with its start token, and at most 96"
      " are allowed: set.report.tokens = 96",
    ),
    ({"prompt": "x" * 600, "tokens": 1000}, "config.model.max_length = 512"),
    ({"layers": 0}, "set.report.layers = 0"),
  ],
)
def test_an_invalid_setting_raises(make_trained, tmp_path, settings, message):
  """A prompt has one token for each byte. The model takes at most 512."""
  description = describe(tmp_path, "a model", "diff")
  models = [Model(make_trained(num_layers=1), description)]

  with pytest.raises(UserError, match=message):
    make_page(Report(**settings), models, epath.Path(tmp_path))


@pytest.mark.parametrize(
  "content, message",
  [
    ("{", "needle.json holds no results of a suite"),
    (
      '{"suite": "validation", "models": ["a model"], "figures": []}',
      "needle.json holds no results of the suite needle",
    ),
    (
      '{"suite": "needle", "models": [{}], "figures": ["no figure"]}',
      "needle.json holds no results of a suite",
    ),
  ],
)
def test_a_file_without_results_raises(
  make_trained, tmp_path, content, message
):
  """A file SUITE.json must have the results of this suite."""
  (tmp_path / "needle.json").write_text(content)
  trained = make_trained(num_layers=1)
  description = describe(tmp_path, "a model", "diff")

  with pytest.raises(UserError, match=message):
    page_of_one_model(trained, description, tmp_path)
