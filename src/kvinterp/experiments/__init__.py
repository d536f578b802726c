"""WHAT IS ASKED: one file an experiment, found by the registry."""

from kvinterp.experiments.base import Experiment, Outcome
from kvinterp.experiments.compare import Compare
from kvinterp.experiments.demo import Demo

__all__ = ["Compare", "Demo", "Experiment", "Outcome"]
