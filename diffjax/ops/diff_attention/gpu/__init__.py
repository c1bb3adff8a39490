"""The kernels for Hopper GPUs (Pallas, Mosaic GPU), and what they share. Importing a module of this room imports Pallas."""
