"""Help pages are short, have examples and explain every flag."""

import re

import pytest

from diffjax.__main__ import COMMANDS
from tests.harness import ROOT, in_process

MODULES = [*(f"diffjax.{name}" for name in COMMANDS), "experiments.run"]
WITH_CONFIG = ("diffjax.train", "diffjax.prepare", "diffjax.aot")
FLAG_DEFINITION = re.compile(
  r'flags\.DEFINE_\w+\(\s*"(?P<name>\w+)", (?P<default>[^,]+),'
)
# How a help page shows a default that the source writes in another way.
SHOWN_DEFAULTS = {"False": "off", "None": "", "[]": ""}


@pytest.fixture(scope="module", params=MODULES)
def help_page(request):
  """Returns the module of a command, and what its --help prints."""
  result = in_process.call(request.param, "--help")
  assert result.returncode == 0
  assert not result.stderr
  return request.param, result.stdout


def test_a_help_page_fits_on_a_screen(help_page):
  _, text = help_page
  lines = text.splitlines()
  assert len(lines) <= 30
  assert max(map(len, lines)) <= 100


def test_a_help_page_has_two_examples(help_page):
  module, text = help_page
  assert text.count(f"\n    python -m {module} ") >= 2


def ends_of_explanations(module: str) -> dict[str, str]:
  """Returns the end of a help page's explanation of each flag of a module.

  It is the default, such as "[0]", or nothing for an empty default.
  """
  source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
  ends = {}
  for flag in FLAG_DEFINITION.finditer(source):
    default = flag["default"].strip('"')
    shown = SHOWN_DEFAULTS.get(default, default)
    ends[flag["name"]] = f"[{shown}]\n" if shown else ""
  return ends


def explanation_of(flag: str, page: str) -> str:
  """Returns the text from a flag to the next flag, with a line break."""
  _, _, rest_of_page = page.partition(f"\n  --{flag}")
  explanation, _, _ = rest_of_page.partition("\n  --")
  return f"{explanation}\n"


def test_a_help_page_explains_every_flag_and_gives_its_default(help_page):
  """A default stands in brackets at the end: "--seed  Random seed. [0]"."""
  module, page = help_page

  for flag, default_in_brackets in ends_of_explanations(module).items():
    explanation = explanation_of(flag, page)
    assert explanation.strip(), flag
    assert default_in_brackets in explanation, flag


def test_a_help_page_says_where_fields_are_explained(help_page):
  module, text = help_page
  if module in WITH_CONFIG:
    assert "diffjax/config.py" in text
    sections = "Sections are model, data, optimizer, train, eval, mesh."
    assert sections in " ".join(text.split())


def test_the_help_page_of_evaluate_says_where_settings_are_explained():
  result = in_process.call("diffjax.evaluate", "--help")
  assert "diffjax/evals/SUITE.py" in result.stdout
