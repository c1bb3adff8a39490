"""Rejects an old Python with a clear message.

All metadata is in pyproject.toml. For a checkout, pip looks for the
requirements before it checks `requires-python`, so that on an old Python it
would report that a requirement does not exist.
"""

import sys

import setuptools

MINIMUM_PYTHON = (3, 11)

if sys.version_info < MINIMUM_PYTHON:
  minimum = ".".join(map(str, MINIMUM_PYTHON))
  running = ".".join(map(str, sys.version_info[:3]))
  sys.exit(
    f"diffjax needs Python {minimum} or newer; this is Python {running}"
    f" ({sys.executable}). Make the virtual environment with a newer Python."
  )

setuptools.setup()
