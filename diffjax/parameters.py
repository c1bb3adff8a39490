"""One table of the decoder's parameters. Their shapes, sharding, weight decay, Muon's sides, FLOPs and counts follow from it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One array.

  Attributes:
    axes: a letter each, as everywhere (CONTRIBUTING.md). An array of the layers has a leading L.
    inputs: of a matrix, the axes that its product sums over; empty for embeddings, gains, biases and λ vectors. Matrices decay, Muon
      orthogonalises them, and each element costs a token one multiply-add.
    shared: of a matrix, the axes of activations that it serves again and again, such as "H" for one that all heads share.
  """

  axes: str
  inputs: str = ""
  shared: str = ""

  @property
  def outputs(self) -> str:
    """Of a matrix, the axes that its product writes to."""
    return "".join(axis for axis in self.axes if axis not in "L" + self.inputs)


PARAMETERS = {
  "embedding": Parameter("NE"),
  "unembedding": Parameter("NE"),
  "final_norm": Parameter("E"),
  "final_norm_shift": Parameter("E"),
  "attention_norm": Parameter("LE"),
  "attention_norm_shift": Parameter("LE"),
  "query": Parameter("LEQGD", inputs="E"),
  "key": Parameter("LEKMD", inputs="E"),
  "value": Parameter("LEKV", inputs="E"),
  "out": Parameter("LHVE", inputs="HV"),
  "query_bias": Parameter("LQGD"),
  "key_bias": Parameter("LKMD"),
  "value_bias": Parameter("LKV"),
  "out_bias": Parameter("LE"),
  "head_gain": Parameter("LV"),
  "lambda_q1": Parameter("LD"),
  "lambda_k1": Parameter("LD"),
  "lambda_q2": Parameter("LD"),
  "lambda_k2": Parameter("LD"),
  "lambda_hat": Parameter("LEH", inputs="E"),
  "head_gate": Parameter("LEHV", inputs="E"),
  "dex_matrix": Parameter("LVU", inputs="V", shared="H"),
  "dex_lambda": Parameter("LH"),
  "ffn_norm": Parameter("LE"),
  "ffn_norm_shift": Parameter("LE"),
  "gate": Parameter("LEF", inputs="E"),
  "up": Parameter("LEF", inputs="E"),
  "down": Parameter("LFE", inputs="F"),
  "poly_weights": Parameter("LW"),
  "poly_constant": Parameter("L"),
}

MATRICES = frozenset(
  name for name, parameter in PARAMETERS.items() if parameter.inputs
)

# The fields of config.model that give the sizes of axes. G, M, V and U, and Q where its field is None, follow
# from the attention class (model/attention.py).
FIELDS = {
  "N": "vocab_size",
  "L": "num_layers",
  "E": "embed_dim",
  "H": "num_heads",
  "Q": "num_noise_heads",
  "K": "num_kv_heads",
  "D": "head_dim",
  "F": "ffn_dim",
}
