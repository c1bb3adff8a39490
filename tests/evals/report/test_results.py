"""Results as JSON and as a table."""

import json
import math
import re

import numpy as np
import pytest
import rich.console
from etils import epath

from diffjax.config import UserError
from diffjax.evals.report import plots, results
from diffjax.evals.report.figures import compare, mean_of

MODELS = [{"name": "[one]"}, {"name": "two"}]


def found(models=MODELS):
  rng = np.random.default_rng(0)
  base = rng.normal(size=50)
  first = [mean_of("accuracy", base + 1, depth=0.5), mean_of("single", [2.0])]
  second = [mean_of("accuracy", base + 0.01 * rng.normal(size=50), depth=0.5)]
  rows = list(compare(first, second if len(models) > 1 else None))
  return results.finite({"suite": "x", "settings": {"lengths": (1, 2)}, "models": models, "figures": rows})


def test_json_has_no_nan_and_is_written_whole(tmp_path):
  path = epath.Path(tmp_path) / "x.json"
  results.write(path, found())
  text = path.read_text()
  assert "NaN" not in text and json.loads(text)["figures"][1]["low"] is None
  assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
  with pytest.raises(ValueError):
    results.write(path, {"value": math.nan})
  assert path.read_text() == text
  with pytest.raises(UserError, match="cannot write"):
    results.write(epath.Path(tmp_path) / "missing" / "x.json", {})


def shown(models):
  console = rich.console.Console(width=160, record=True, file=open("/dev/null", "w"))
  console.print(results.table(found(models)))
  return console.export_text(styles=True)


def test_the_table_has_both_models_and_their_difference():
  text = shown(MODELS)
  row = next(line for line in text.splitlines() if "accuracy" in line)
  assert "[one]" in text and "two" in text and "0.5" in row
  assert len(re.findall(r"(?<!\x1b)\[-?\d", row)) == 3
  assert "\x1b[1m" in row  # the difference excludes 0
  assert "single" in text and "–" in text
  assert "difference" not in shown(MODELS[:1])


def test_by_model_gives_each_model_its_own_numbers():
  (first, rows), (second, others) = plots.by_model(found())
  assert (first, second) == ("[one]", "two")
  assert rows[0]["value"] == pytest.approx(others[0]["value"] + 1, abs=0.01) and len(rows) == 2 and len(others) == 1
  assert [name for name, _ in plots.by_model(found(MODELS[:1]), "single")] == ["[one]"]
