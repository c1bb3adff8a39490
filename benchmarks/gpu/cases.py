"""What is checked and timed, part by part, what is most wanted first."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.attention import names
from benchmarks.gpu.inputs import MAPS

EMBED = 2048  # of the layer whose attention is timed: 2048/(2D) heads of V1, 2048/D of V2 and of the Transformer
# Each with 16,384 tokens in all. Every implementation is timed at the first length alone: there the slow ones lose by 10 times already.
LENGTHS = (4096, 16384, 2048)
MORE = (8192, 65536)  # of V1, D 128; the longest is one row

Case = dict[str, Any]


def parts() -> dict[str, list[Case]]:
  """The cases by part, in the order of the day."""
  sizes = [(16384 // T, T) for T in LENGTHS]
  more = [(max(16384 // T, 1), T) for T in MORE]
  widths = dict(
    vocab_size=100_288,
    num_layers=4,
    embed_dim=EMBED,
    head_dim=128,
    ffn_dim=5440,
  )  # of 1.4B's, with fewer layers
  timed = {
    "v1_128": _attention("v1", 128, sizes + more),
    "v1_64": _attention("v1", 64, sizes),
    "plain_128": _attention("plain", 128, sizes),
    "decode": _decode(
      B=32,
      S=8192,
      D=128,
      H={kind: EMBED // (wide * 128) for kind, (*_, wide) in MAPS.items()},
    ),
    "plain_64": _attention("plain", 64, sizes),
    "v2_128": _attention("v2", 128, sizes),
    "v2_64": _attention("v2", 64, sizes),
    "steps": _steps(B=4, T=4096, **widths),
    "packed": [
      case
      for kind in MAPS
      for D in (128, 64)
      for case in _attention(kind, D, sizes[:2], packed=True)
    ],
  }
  return {"checks": _checks(), **timed}


def rehearsal() -> dict[str, list[Case]]:
  """The same with sizes that the interpreter of the kernels takes seconds for."""
  checks = [dict(kind=kind, D=64, T=70) for kind in MAPS] + [
    dict(kind="v1", D=64, T=60, segments=True),
    dict(kind="v2", D=64, T=1),
  ]
  checks = [_check(B=1, H=1, **case) for case in checks] + [
    _check(kind="v1", decode=True, D=64, B=1, S=64, H=1)
  ]
  widths = dict(
    vocab_size=64, num_layers=1, embed_dim=128, head_dim=64, ffn_dim=64
  )
  return {
    "checks": checks,
    "v1_64": _attention("v1", 64, [(1, 64)], embed=128),
    "decode": _decode(B=1, S=64, D=64, H=dict.fromkeys(MAPS, 1)),
    "steps": _steps(
      ("chunked", "two_call"), B=1, T=64, **widths
    ),  # flax cannot scan layers whose kernels are interpreted
    "packed": _attention("v1", 64, [(1, 64)], embed=128, packed=True),
  }


def _check(**case: Any) -> Case:
  return {"do": "check", **case}


def _checks() -> list[Case]:
  cases = [
    dict(kind=kind, D=D, **options)
    for kind in MAPS
    for D in (64, 128)
    for options in (
      dict(T=128),
      dict(T=1000),
      dict(T=640, causal=False, dtype="float16"),
      dict(T=1000, window=200, segments=True, groups=2),
      dict(T=300, S=700, q_offset=[400, 123]),
    )
  ]
  cases += [
    dict(kind="v1", D=96, T=333, segments=True),
    dict(kind="v1", D=128, T=130, S=514, q_offset=384),
    dict(kind="v2", D=64, T=1, S=1),
  ]
  checks = [_check(B=2, H=2, **case) for case in cases]
  checks += [
    _check(kind=kind, decode=True, D=128, B=4, S=1024, H=4) for kind in MAPS
  ]
  return sorted(
    checks,
    key=lambda case: (
      case.get("T", 1) * case.get("S", case.get("T", 1)),
      case["D"],
    ),
  )


def _attention(
  kind: str,
  D: int,
  sizes: list[tuple[int, int]],
  embed: int = EMBED,
  packed: bool = False,
) -> list[Case]:
  H = embed // (MAPS[kind][2] * D)
  return [
    dict(
      do="attention", kind=kind, D=D, B=B, T=T, H=H, packed=packed, name=name
    )
    for B, T in sizes
    for name in names(kind, packed, every=(B, T) == sizes[0])
  ]


def _decode(H: dict[str, int], **sizes: int) -> list[Case]:
  return [
    dict(do="decode", kind=kind, H=H[kind], name=name, **sizes)
    for kind in MAPS
    for name in ("pallas_gpu", "xla")
  ]


def _steps(
  names: tuple[str, ...] = ("pallas_gpu", "two_call"), **sizes: int
) -> list[Case]:
  return [
    dict(do="step", attention=attention, name=name, packed=packed, **sizes)
    for packed in (False, True)
    for attention, name in zip(
      ("diff", "softmax", "diff", "softmax"),
      (*names, *reversed(names)),
      strict=True,
    )
  ]
