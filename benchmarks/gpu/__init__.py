"""Checks and times the fused attention kernels: `python -m benchmarks.gpu`."""
