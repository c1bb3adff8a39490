"""What the tests share. README.md in this folder describes it."""

import pathlib

# The root of the repository.
ROOT = pathlib.Path(__file__).parents[2]
