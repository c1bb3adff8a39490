"""The code of the README and of docs/ runs.

tests/test_commands.py runs the documented commands, and the code that reads a
trained run. `python -m pytest docs/checks` checks the text of the pages.
"""

import pytest

from tests.harness.pages import DOCUMENTATION, python_blocks

WITH_CODE = [page for page in DOCUMENTATION if "```python" in page.read_text()]


@pytest.mark.usefixtures("restored_registry")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page):
  """The blocks of a page are one program, in their order."""
  program = {"__name__": "user"}
  for block in python_blocks(page.read_text()):
    reads_a_run = "runs/" in block
    if not reads_a_run:
      code = compile(block, str(page), "exec", dont_inherit=True)
      exec(code, program)
