"""The letters of all axes, and the table of the decoder's parameters.

Every axis has one letter, in shapes, in jaxtyping annotations and in the table:

  B  batch
  T  query length
  S  key length, or the tokens of a page
  E  model width
  H  heads
  Q  query groups. The heads of a group share a noise map.
  G  maps of a query group: its heads' signal maps, then the noise map
  K  key and value heads
  M  key maps: 2 if noise maps have their own keys, else 1
  D  width of queries and keys
  V  width of values
  U  width of values, for the second axis of DEX's square matrix [V, U]
  F  width of the feed-forward layer
  W  the three weights of PolyNorm
  L  layers
  N  vocabulary
  P  pages of a key/value cache; in interop/, the two numbers of a RoPE pair
  J  RoPE pairs of a head, D / 2
  C  V / D

So H = Q·(G − 1) with noise maps. Without, G = 1 and H = Q. X, Y and Z
are axes of any size. A file that needs more letters defines them at its top.

The table gives the axes of each parameter. Sharding, weight decay, Muon's
matrices, FLOPs, parameter counts and conversions follow from it. The layers
state the shapes of their parameters, and a test compares them with the table.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One array of a decoder's parameters.

  Attributes:
    axes: a letter for each axis. A layer's array has a leading L.
    inputs: the axes that a matrix product sums over. Empty for embeddings,
      gains, biases and λ vectors. Matrices have weight decay, Muon
      orthogonalizes them, and each element costs one multiply-add per token.
    shared: axes of the activations for which a matrix is used repeatedly, such
      as "H" if all heads share it.
  """

  axes: str
  inputs: str = ""
  shared: str = ""

  @property
  def outputs(self) -> str:
    """Returns the axes of a matrix that its product keeps.

    Example: axes = "LEQGD", inputs = "E" → "QGD"
    """
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

# The fields of config.model that give the sizes of axes. The attention class
# determines G, M, V and U, and also Q if num_noise_heads is None.
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

# The size of W: PolyNorm weights the cube, the square and the number itself.
NUM_POLY_NORM_WEIGHTS = 3
