"""What every experiment is: a question with its choices as fields."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path

from kvinterp.results import Result

__all__ = ["Experiment"]


@dataclasses.dataclass(frozen=True)
class Experiment(abc.ABC):
    """A question asked of one or more models; the fields are its choices, the first line of its docstring says what."""

    @abc.abstractmethod
    def run(self, out: str | Path, existing: str = "error", progress: str = "bar") -> list[Result]:
        """Answers it, keeping what is finished in a folder so that an interrupted run can go on.

        Args:
            out: The folder.
            existing: What to do about what is already there, see :data:`kvinterp.folders.EXISTING`.
            progress: ``"bar"`` or ``"none"``.
        """
