"""WHAT A MODEL DOES along a path: texts it writes, likelihoods it gives, and others' evaluators
over both.
"""
