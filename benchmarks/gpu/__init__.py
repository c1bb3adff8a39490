"""The Hopper kernels on a GPU, right first and then fast: `python -m benchmarks.gpu`. The flags are in __main__.py."""
