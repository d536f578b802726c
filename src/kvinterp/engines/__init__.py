"""WHAT OTHERS COMPUTED: their files, read and judged beside the model; dumps of hidden states side
by side.

To be read in this order: ``readers`` (files become numbers), ``judge``, on ``ways`` (our own ways,
and the table of causes) and ``numbers``; ``hidden``; ``traces`` (two recordings side by side),
``matching`` and ``two_models``; ``turns`` (prompts beside what was cached); ``page`` and
``commands``.
"""
