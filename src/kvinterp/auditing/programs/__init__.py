"""PROGRAMS OF A CACHE: every use that a model offers, drawn, judged beside the plain forward, and
shrunk where it is wrong.

A cache is right if every way of using it gives, for every row, the logits of one forward without a
cache over that row's own tokens.

- ``program``, ``operations/``, ``names``: what is done, as data;
- ``subject``, ``model_subject``, ``function_subject``, ``sourced``: what an audit runs, and the
  null; ``offered_calls``: how else a model may be called;
- ``fed_rows``: a program's rows as they are fed; ``running``: does and judges it;
- ``search``: draws programs and shrinks the first that is wrong; ``first_difference``: where it is wrong;
  ``pasted``: it in plain Python.
"""
