"""The check of the GPU kernels' assembler, which runs once, on import.

Old assemblers can corrupt the kernels' results, so "auto" must not select the
kernels with them. PATH may hold an assembler of any origin, and only running
it tells its version. That starts a process and may change PATH (see
`assembler.prefer_packaged`). An import does it once, only where it is needed
(`choice.choose_gpu` imports this module if the kernels would be selected), and
leaves a constant to read.
"""

from __future__ import annotations

from diffjax.ops.diff_attention.gpu import assembler

# Why the kernels cannot use the assembler, as the end of a sentence that begins
# with "pallas_gpu". None if they can.
ASSEMBLER_PROBLEM: str | None = assembler.refusal()
