"""WHAT IS ASKED: one file an experiment, found by the registry."""

from kvinterp.study.experiments.base import Experiment
from kvinterp.study.experiments.compare import Compare
from kvinterp.study.experiments.demo import Demo

__all__ = ["Compare", "Demo", "Experiment"]
