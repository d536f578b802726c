"""IS IT CORRECT: cached against recompute over a ladder of precisions, judged at the first tensor
that differs.

To be read in this order:

- what is watched: ``blocks`` (a model and its blocks), ``watch`` (inside a block),
  ``first_difference`` (two runs of it), ``values``;
- one precision: ``ladder`` (its notions), ``measure``;
- what takes a difference away: ``causes``, ``judging``, ``accounting`` (do
  the parts account for the whole?);
- what else a cache is used for: ``uses``, by programs of a cache (``programs``); ``own_code``: what
  is no decoder;
- all of it: ``audit``, ``reading`` (what the evidence says), ``hints``, ``verdict``;
- as commands and pages: ``commands``, ``page``;
- beside it: ``causality``, ``building`` (models made for an audit) and ``shape_dependence`` (the
  kernels table) of ``model_operations``.
"""
