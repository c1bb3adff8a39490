#!/usr/bin/env bash
# The record: from a bare machine to two trained twins, their report and their table.
#
#     git clone … && cd diffjax && SEEDS=5 bash recipes/tiny_pair.sh
#
# needs git and Python 3.11 or newer, and downloads packages alone. It trains DIFF and the Transformer of configs/tiny.py with SEEDS seeds (5
# unless you say otherwise; an hour on two cores), measures each pair, and writes the report of the first pair. Its last lines are the table
# in experiments/README.md. If you stop it, the same command goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv
.venv/bin/pip install -q -e .
exec .venv/bin/python -m recipes.tiny_pair --seeds="${SEEDS:-5}" "$@"
