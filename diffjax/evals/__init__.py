"""Measurements of trained models: one module each, with `Settings`, `evaluate(trained, settings)` and perhaps `plot(results, path)`.

methods/ holds what measurements share, report/ what becomes of their results.
"""

# The modules of the measurements, by name. They are imported when they are needed, so that a mistyped flag is reported at once.

SUITES = {
  "validation": "diffjax.evals.validation",
  "position_nll": "diffjax.evals.position_nll",
  "needle": "diffjax.evals.needle",
  "attention": "diffjax.evals.attention",
  "outliers": "diffjax.evals.outliers",
  "quantised": "diffjax.evals.quantised",
  "difference_map": "diffjax.evals.difference_map",
  "many_shot": "diffjax.evals.many_shot",
  "harness": "diffjax.evals.harness",
  "hallucination": "diffjax.evals.hallucination",
  "mathematics": "diffjax.evals.mathematics",
}
