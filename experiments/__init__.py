"""The paper's questions, asked at sizes that can be run. One folder a question; `python -m experiments.run` runs them."""
