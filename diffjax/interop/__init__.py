"""Models in other layouts. Each module reads a layout into a `Model`, writes it, or both; phi_flash reads and writes single layers."""
