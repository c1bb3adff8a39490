"""Measurements of trained models: one module each, with `Settings`, `TABLE`,
`evaluate(trained, settings)` and perhaps `plot(results, path)`.

`evaluate` refuses wrong settings and data when it is called, and measures when its figures are asked for: so that several measurements can
be checked before the first begins.

methods/ holds what measurements share, report/ what becomes of their results.
"""

# The modules of the measurements, by name, in the report's order: losses, what the paper claims, the rest. They are imported when they are
# needed, so that a mistyped flag is reported at once.
SUITES = {
  "validation": "diffjax.evals.validation",
  "position_nll": "diffjax.evals.position_nll",
  "needle": "diffjax.evals.needle",
  "attention": "diffjax.evals.attention",
  "many_shot": "diffjax.evals.many_shot",
  "hallucination": "diffjax.evals.hallucination",
  "outliers": "diffjax.evals.outliers",
  "quantised": "diffjax.evals.quantised",
  "mathematics": "diffjax.evals.mathematics",
  "harness": "diffjax.evals.harness",
  "difference_map": "diffjax.evals.difference_map",
}
