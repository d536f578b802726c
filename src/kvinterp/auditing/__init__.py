"""IS IT CORRECT: cached against recompute over a ladder of precisions, judged at the first tensor that differs."""

from kvinterp.auditing.building import random_model, users_model
from kvinterp.auditing.entry import CHECKS, LENGTHS, RUNGS, Audit, audit
from kvinterp.auditing.exercises import Check
from kvinterp.auditing.ladder import Plan, Rung
from kvinterp.auditing.operations import KernelsTable, kernels_table
from kvinterp.auditing.verdict import VERDICTS, Verdict

__all__ = [
    "CHECKS",
    "LENGTHS",
    "RUNGS",
    "VERDICTS",
    "Audit",
    "Check",
    "KernelsTable",
    "Plan",
    "Rung",
    "Verdict",
    "audit",
    "kernels_table",
    "random_model",
    "users_model",
]
