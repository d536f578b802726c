"""The kit for pages and figures. Nothing here computes a divergence."""

from kvinterp.study.report import backend as _  # noqa: F401  # before anything else imports matplotlib
from kvinterp.study.report.attention import attention_comparison
from kvinterp.study.report.style import save

__all__ = ["attention_comparison", "save"]
