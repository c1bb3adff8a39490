"""Measurements of trained models, by name, one module each; imported where used, so that a mistyped flag need not wait."""

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
