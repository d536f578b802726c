"""IS IT CORRECT: cached against recompute over a ladder of precisions, judged at the first tensor that differs.

To be read in this order:

- what is watched: ``blocks`` (a model and its blocks), ``watch`` (inside a block), ``first_difference`` (two runs of it),
  ``values``;
- one precision: ``ladder`` (its notions), ``measure``;
- what takes a difference away: ``causes``, ``judging``;
- what else a cache is used for: ``uses``, by programs of a cache (:mod:`kvinterp.programs`); ``own_code``: what is no decoder;
- all of it: ``audit``, ``reading`` (what the evidence says), ``verdict``;
- another engine's log-probs: ``engine``, on ``engine_ways`` (our own ways, and the table of causes) and ``engine_numbers``;
- beside it: ``causality``, ``building`` (models made for an audit) and ``shape_dependence`` (the kernels table).
"""

from kvinterp.auditing.audit import CHECKS, LENGTHS, RUNGS, audit
from kvinterp.auditing.checks import Check
from kvinterp.auditing.ladder import Plan, PrecisionRun
from kvinterp.auditing.verdict import VERDICTS, Audit, Verdict

__all__ = [
    "CHECKS",
    "LENGTHS",
    "RUNGS",
    "VERDICTS",
    "Audit",
    "Check",
    "Plan",
    "PrecisionRun",
    "Verdict",
    "audit",
]
