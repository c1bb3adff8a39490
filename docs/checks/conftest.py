"""Checks of the documentation: `python -m pytest docs/checks`.

They fail because of a page, a help page, a docstring or a committed result, and
not because of an error in the code. They are a step of linting, like ruff and
mypy.
"""

import os

# libtpu is installed for its compiler. Without this, JAX would look for a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
