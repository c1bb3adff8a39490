"""The registry of the implementations of `decode_attention`."""

from __future__ import annotations

from diffjax.ops.diff_attention.decode.inputs import DecodeImplementation
from diffjax.ops.diff_attention.implementations import Registry

_PACKAGE = "diffjax.ops.diff_attention.decode"
DECODERS = Registry[DecodeImplementation](
  {
    "xla": f"{_PACKAGE}.xla:decode_attention_xla",
    "pallas_tpu": f"{_PACKAGE}.tpu:decode_attention_tpu",
    "pallas_gpu": f"{_PACKAGE}.gpu:decode_attention_gpu",
  }
)
