"""Measurements of trained models, called suites.

- `suite.py` defines the interface of a suite. Each suite has one module here.
- `measurement.py` defines what a suite yields.
- `methods/` has what several suites share.
- `report/` computes intervals, and writes tables, plots and the HTML page.
"""

# The class of each suite, by the name in --suite, in the order of the report:
# losses, what the paper claims, other measurements. The modules are imported
# when they are used, so that a mistyped flag is reported at once.
SUITES = {
  "validation": "diffjax.evals.validation.Validation",
  "position_nll": "diffjax.evals.position_nll.PositionNLL",
  "needle": "diffjax.evals.needle.Needle",
  "attention": "diffjax.evals.attention.AttentionShares",
  "many_shot": "diffjax.evals.many_shot.ManyShot",
  "hallucination": "diffjax.evals.hallucination.Hallucination",
  "outliers": "diffjax.evals.outliers.Outliers",
  "quantised": "diffjax.evals.quantised.Quantised",
  "mathematics": "diffjax.evals.mathematics.Mathematics",
  "harness": "diffjax.evals.harness.Harness",
  "difference_map": "diffjax.evals.difference_map.DifferenceMap",
  "report": "diffjax.evals.report.suite.Report",
}
