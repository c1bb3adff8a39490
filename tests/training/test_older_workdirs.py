"""Runs of an earlier version are restored and continue as they did then.

Each golden/*.tar.xz holds a run of version 0.1.0 under JAX 0.10.2: its
checkpoint at step 4 of 8 and its log. golden/expected.json holds the digest of
that checkpoint's parameters, and what version 0.1.0 logged after step 4.
"""

import hashlib
import json
import pathlib
import tarfile
from typing import Any

import jax
import numpy as np
import pytest

from diffjax.inference.trained import load
from tests.harness.tiers import full

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = pathlib.Path(__file__).parent / "golden"
RESULTS_OF_VERSION_0_1_0 = json.loads((GOLDEN / "expected.json").read_text())
# These runs have every variant and both modes of reading data. The full tier
# has the other combinations.
RUNS = ["diff_streamed", "diff_v2_prepared"]
OTHER_RUNS = sorted(RESULTS_OF_VERSION_0_1_0.keys() - set(RUNS))
# The fields of the runs that differ from configs/tiny.py.
FIELDS = {
  "model.num_layers": 2,
  "model.embed_dim": 16,
  "model.head_dim": 4,
  "model.ffn_dim": 16,
  "model.max_length": 64,
  "data.source": "text:text/*.txt",
  "data.prepared_dir": "rows",
  "data.length": 64,
  "data.validation_fraction": 0.1,
  "train.batch_size": 4,
  "train.steps": 8,
  "train.checkpoint_interval": 4,
  "train.log_interval": 1,
  "train.sample_tokens": 0,
  "eval.interval": 4,
  "eval.ngram": 4,
  "optimizer.warmup_steps": 2,
}


def digest(params: Any) -> str:
  """Returns the SHA-256 of the names and bytes of all parameters."""
  sha256 = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path)
    sha256.update(name.encode())
    sha256.update(np.asarray(leaf).tobytes())
  return sha256.hexdigest()


def unpack(name: str, directory: pathlib.Path) -> None:
  """Unpacks a run of version 0.1.0."""
  with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
    # tarfile has extraction filters since Python 3.11.4.
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(directory)


def write_texts(directory: pathlib.Path) -> None:
  """Writes the data of the runs: a file for each long paragraph of LICENSE."""
  directory.mkdir()
  paragraphs = (ROOT / "LICENSE").read_text().split("\n\n")
  long_paragraphs = [text for text in paragraphs if len(text) > 40]
  for index, text in enumerate(long_paragraphs):
    (directory / f"{index:02d}.txt").write_text(text)


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the entries of a metrics.jsonl."""
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", [*RUNS, *full(OTHER_RUNS)])
def test_parameters_of_an_earlier_version_are_restored(tmp_path, name):
  """They have the SHA-256 that version 0.1.0 computed when it saved them."""
  unpack(name, tmp_path)

  params = load(tmp_path / name).params

  assert digest(params) == RESULTS_OF_VERSION_0_1_0[name]["params_sha256"]


@pytest.mark.parametrize("name", [*RUNS, *full(OTHER_RUNS)])
def test_a_run_of_an_earlier_version_continues_with_the_same_losses(
  command, tmp_path, name
):
  """The run was saved at step 4 of 8. Version 0.1.0 also took the other steps.

  Its log of them is in golden/expected.json.
  """
  unpack(name, tmp_path)
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  write_texts(tmp_path / "text")
  # For example, "diff_v2_prepared" has the variant "diff_v2" and this mode.
  variant, mode = name.rsplit("_", maxsplit=1)
  fields = FIELDS | {"data.mode": mode}
  flags = [f"--config.{field}={value}" for field, value in fields.items()]

  result = command(
    "diffjax.train",
    f"--config=configs/tiny.py:{variant}",
    f"--workdir={name}",
    *flags,
    cwd=tmp_path,
  )

  assert result.returncode == 0, result.stderr
  assert "resuming from step 4" in result.stderr
  entries = read_log(tmp_path / name / "metrics.jsonl")
  new_entries = [entry for entry in entries if entry["step"] > 4]
  expected_entries = RESULTS_OF_VERSION_0_1_0[name]["after"]
  for entry, expected in zip(new_entries, expected_entries, strict=True):
    assert entry["step"] == expected["step"]
    # Other batches would have other numbers of tokens.
    assert entry.get("train/tokens") == expected.get("train/tokens")
    # Sums in float32 differ between processors and versions of XLA.
    values = [entry[field] for field in expected]
    np.testing.assert_allclose(values, list(expected.values()), rtol=1e-4)
