"""The questions of the paper, at sizes that can be run here.

Each folder has one question. `python -m experiments.run` runs it.
"""
