"""The configs: one file for each run, and the defaults in base.py.

The repository keeps them in configs/. `diffjax/configs` is a link to that
folder, so that they are installed with the package, as `diffjax.configs`.
"""
