"""The room of pages and figures. Nothing here computes a divergence."""

from kvinterp.study.report.attention import attention_comparison
from kvinterp.study.report.style import save

__all__ = ["attention_comparison", "save"]
