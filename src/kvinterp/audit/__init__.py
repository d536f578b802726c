"""IS IT CORRECT: cached against recompute over a ladder of precisions, judged at the first tensor that differs."""

from kvinterp.audit.kernels_table import KernelsTable, kernels_table
from kvinterp.audit.ladder import Plan, Rung
from kvinterp.audit.subject import random_model
from kvinterp.audit.verdict import LENGTHS, RUNGS, VERDICTS, Audit, Verdict, audit

__all__ = [
    "LENGTHS",
    "RUNGS",
    "VERDICTS",
    "Audit",
    "KernelsTable",
    "Plan",
    "Rung",
    "Verdict",
    "audit",
    "kernels_table",
    "random_model",
]
