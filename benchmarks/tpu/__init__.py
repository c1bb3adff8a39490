"""What the TPU kernels cost: three commands that print ratios.

    python -m benchmarks.tpu                fused kernels, and two calls
    python -m benchmarks.tpu --search       the best sizes of blocks
    python -m benchmarks.tpu.packed         rows of packed documents
    python -m benchmarks.tpu.shared_noise   signal maps that share a noise map

On a TPU, costs are times. Elsewhere they are cycles that the TPU's compiler
estimates. libtpu compiles a kernel for a chip that is not there, and walks
through its instructions and loops. The estimates rank variants and are not
times.

A case describes one call of a kernel: `Case` of case.py is a call of our
kernels, and `Splash` of splash.py one of a library. estimate.py has the
estimate of a case, and cost.py its cost, which is kept in
diffjax/ops/diff_attention/tpu/cycles.json. runs.py divides a kernel into parts
that have an estimate.
"""
