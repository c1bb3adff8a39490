"""The file of results: written anew after every row, so that a call that is cut off loses nothing, and the next one goes on."""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

OPERATION = (
  pathlib.Path(__file__).resolve().parents[2] / "diffjax/ops/diff_attention"
)

_NO_KERNELS = ("api.py", "ring.py", "ring_plan.py", "tpu")  # of OPERATION
OTHERS = (
  "cudnn",
  "cudnn halved",
  "tokamax",
)  # names of cases that no kernel of ours takes part in

Row = dict[str, Any]


def write(path: pathlib.Path, text: str) -> None:
  """Writes a file at once: a reader sees the old one or the new one, also after SIGKILL."""
  temporary = path.with_name(f"{path.name}.tmp")
  temporary.write_text(text, encoding="utf-8")
  os.replace(temporary, path)


def digest(folder: pathlib.Path = OPERATION) -> str:
  """Of the operation's code: what was found of other kernels is not known of these.

  Comments and docstrings are no code. What chooses among implementations, and those that no GPU runs, are left out.
  """
  content = hashlib.sha256()
  for path in sorted(
    x
    for x in folder.rglob("*.py")
    if x.relative_to(folder).parts[0] not in _NO_KERNELS
  ):
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
      if (
        isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        and ast.get_docstring(node, clean=False) is not None
      ):
        del node.body[0]
    content.update(ast.dump(tree).encode())
  return content.hexdigest()[:12]


def _without_paths(environment: dict[str, Any]) -> dict[str, Any]:
  """The environment as the file keeps it, which is committed: where things lie on a machine says nothing to others."""
  keep = lambda found: {
    name: x for name, x in found.items() if name not in ("path", "cuda")
  }
  return keep(
    {
      name: keep(x) if isinstance(x, dict) else x
      for name, x in environment.items()
    }
  )


def _conditions(call: dict[str, Any]) -> tuple[Any, ...]:
  environment = call["environment"]
  return (
    environment["device"],
    environment["mosaic"].get("version"),
    environment["versions"],
  )


class Results:
  """All rows of OUT/gpu.json. A row is {"case": …, "call": n, …}; call n says where and when it was measured.

  Args:
    path: the file; rows that it has stay.
    environment: device, versions and ptxas of this call.
  """

  def __init__(self, path: pathlib.Path, environment: dict[str, Any]):
    self._path, self._lock = path, threading.Lock()
    path.parent.mkdir(parents=True, exist_ok=True)
    found = (
      json.loads(path.read_text(encoding="utf-8"))
      if path.exists()
      else {"calls": [], "rows": []}
    )
    self.calls: list[dict[str, Any]] = found["calls"]
    self.rows: list[Row] = found["rows"]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    self.calls.append(
      {
        "date": now,
        "code": digest(),
        "environment": _without_paths(environment),
      }
    )
    self._save()

  def add(self, case: dict[str, Any], result: dict[str, Any]) -> None:
    """Adds a row, in the place of an earlier one of the same case and device. Threads may call it."""
    with self._lock:
      self.rows = [
        row
        for row in self.rows
        if row["case"] != case or not self._same_device(row)
      ]
      self.rows.append({"case": case, "call": len(self.calls) - 1, **result})
      self._save()

  def find(self, case: dict[str, Any]) -> Row | None:
    """The row of a case if it is one of this device, ptxas and code."""
    ours = [row for row in self.here() if row["case"] == case]
    return ours[-1] if ours else None

  def here(self) -> Iterator[Row]:
    """The rows that hold for this call: of its device, ptxas and versions and, but for other people's attention, its code."""
    now = self.calls[-1]
    for row in self.rows:
      then = self.calls[row["call"]]
      if _conditions(then) == _conditions(now) and (
        then["code"] == now["code"] or row["case"].get("name") in OTHERS
      ):
        yield row

  def _same_device(self, row: Row) -> bool:
    device = lambda call: self.calls[call]["environment"]["device"]
    return device(row["call"]) == device(-1)

  def _save(self) -> None:
    lines = lambda entries: ",\n".join(
      f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries
    )
    write(
      self._path,
      f'{{"calls": [\n{lines(self.calls)}\n], "rows": [\n{lines(self.rows)}\n]}}\n',
    )
