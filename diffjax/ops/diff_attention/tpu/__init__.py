"""The TPU kernels. Importing a module of this package imports Pallas."""
