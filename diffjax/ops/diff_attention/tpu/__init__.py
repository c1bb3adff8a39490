"""The TPU kernels (Pallas), and what they share. Importing a module of this room imports Pallas."""
