"""Faults that show in one way of calling a model and in no other: one file a family, each with its ``FAULTS``.

Plain decoding from the cache, and recomputation, are right in all of them.
"""
