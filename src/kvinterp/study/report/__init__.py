"""The room of pages and figures. Nothing here computes a divergence."""

from kvinterp.study.report.attention import attention_comparison

__all__ = ["attention_comparison"]
