"""Differential attention: one operation, several implementations that agree."""

from diffjax.ops.diff_attention.api import IMPLEMENTATIONS, diff_attention
from diffjax.ops.diff_attention.residuals import RESIDUAL_NAMES

__all__ = ["IMPLEMENTATIONS", "RESIDUAL_NAMES", "diff_attention"]
