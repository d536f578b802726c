"""WHAT IS SAID: every sentence about a result, each chosen by the numbers that make it true, and nowhere else.

The sentences stand below what they speak of: they are given tables, summaries and findings, compute nothing but the numbers
they name, and import the classes of these things for their types only.
"""
