"""IS IT CORRECT: cached against recompute over a ladder of precisions, judged at the first tensor that differs.

To be read in this order:

- what is watched: ``blocks`` (a model and its blocks), ``attention`` (which calls are attention), ``watch`` (inside a block),
  ``comparing`` (two runs of it), ``first_difference``, ``values``;
- one precision: ``ladder`` (its notions), ``measure``;
- what takes a difference away: ``causes``, ``judging``;
- what else a cache is used for: ``exercises``, on ``bench``: ``batches`` and ``lengths``;
- all of it: ``audit``, ``reading`` (what the evidence says), ``verdict``, and ``report`` and ``junit`` for readers;
- another engine's log-probs: ``given``, on ``given_paths`` (our own ways) and ``given_steps`` (numbers alone), ``given_page``;
- beside it: ``causality``, ``building`` (models made for an audit), ``operations`` and ``shape_dependence`` (the kernels table).
"""

from kvinterp.auditing.audit import CHECKS, LENGTHS, RUNGS, audit
from kvinterp.auditing.bench import Check
from kvinterp.auditing.building import random_model, users_model
from kvinterp.auditing.given import audit_given
from kvinterp.auditing.ladder import Plan, PrecisionRun
from kvinterp.auditing.shape_dependence import KernelsTable, kernels_table
from kvinterp.auditing.verdict import VERDICTS, Audit, Verdict

__all__ = [
    "CHECKS",
    "LENGTHS",
    "RUNGS",
    "VERDICTS",
    "Audit",
    "Check",
    "KernelsTable",
    "Plan",
    "PrecisionRun",
    "Verdict",
    "audit",
    "audit_given",
    "kernels_table",
    "random_model",
    "users_model",
]
