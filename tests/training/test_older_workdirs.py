"""Workdirs that an earlier version wrote restore, and go on as they would have then.

Each golden/*.tar.xz holds a run of version 0.1.0 under JAX 0.10.2: its checkpoint at step 4 of 8 and its log. golden/expected.json holds
the digest of that checkpoint's parameters, and what that version logged after it.
"""

import hashlib
import json
import pathlib
import tarfile

import jax
import numpy as np
import pytest

from diffjax.training.trained import load
from tests.tiers import full

ROOT, GOLDEN = (
  pathlib.Path(__file__).parents[2],
  pathlib.Path(__file__).parent / "golden",
)
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
RUNS = [
  "diff_streamed",
  "diff_v2_prepared",
  "transformer_prepared",
]  # every variant and both ways of reading; the others in the full tier
FLAGS = """
  model.num_layers=2 model.embed_dim=16 model.head_dim=4 model.ffn_dim=16 model.max_length=64 data.source=text:text/*.txt
  data.prepared_dir=rows data.length=64 data.validation_fraction=0.1 train.batch_size=4 train.steps=8 train.checkpoint_interval=4
  train.log_interval=1 train.sample_tokens=0 eval.interval=4 eval.ngram=4 optimizer.warmup_steps=2
"""


def digest(params):
  found = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    found.update(
      jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes()
    )
  return found.hexdigest()


@pytest.mark.parametrize(
  "name", [*RUNS, *full(sorted(EXPECTED.keys() - set(RUNS)))]
)
def test_it_restores_and_goes_on(command, tmp_path, name):
  with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  (tmp_path / "text").mkdir()
  paragraphs = [
    paragraph
    for paragraph in (ROOT / "LICENSE").read_text().split("\n\n")
    if len(paragraph) > 40
  ]
  for index, paragraph in enumerate(paragraphs):
    (tmp_path / "text" / f"{index:02d}.txt").write_text(paragraph)
  workdir = tmp_path / name
  assert digest(load(workdir).params) == EXPECTED[name]["params_sha256"]

  variant, _, mode = name.rpartition("_")
  flags = [
    f"--config.{field}" for field in (f"data.mode={mode}", *FLAGS.split())
  ]
  result = command(
    "diffjax.train",
    f"--config=configs/tiny.py:{variant}",
    f"--workdir={name}",
    *flags,
    cwd=tmp_path,
  )
  assert result.returncode == 0, result.stderr
  assert "resuming from step 4" in result.stderr
  lines = [
    json.loads(line)
    for line in (workdir / "metrics.jsonl").read_text().splitlines()
  ]
  after = [line for line in lines if line["step"] > 4]
  assert len(after) == len(EXPECTED[name]["after"])
  for line, expected in zip(after, EXPECTED[name]["after"], strict=True):
    # Of equal batches the tokens are equal; sums in float32 differ between processors and versions of XLA.
    assert line["step"] == expected["step"] and line.get(
      "train/tokens"
    ) == expected.get("train/tokens")
    np.testing.assert_allclose(
      [line[field] for field in expected], list(expected.values()), rtol=1e-4
    )
