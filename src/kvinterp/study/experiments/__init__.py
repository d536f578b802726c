"""WHAT IS ASKED: one file an experiment, found by the registry."""
