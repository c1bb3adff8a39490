"""Models in other layouts. Each module reads a layout into a `Model`, writes it, or both."""
