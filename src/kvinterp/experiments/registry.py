"""Finds the experiment of every file in this folder, so that a new one is one new file."""

from __future__ import annotations

import kvinterp.experiments as folder
from kvinterp.experiments.base import Experiment
from kvinterp.spec import plugins_of

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = plugins_of(folder, Experiment)  # type: ignore[type-abstract]
