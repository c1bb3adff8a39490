"""Names of what the backward pass reads, for remat policies: kept, the forward kernel never runs twice."""

OUT = "diff_attention_out"
OUT2 = "diff_attention_out2"  # for kernels that walk the keys block by block; `chunked` sees whole rows and does without
LSE = "diff_attention_lse"

RESIDUAL_NAMES = (OUT, OUT2, LSE)
