"""Results of functions that are no commands: how they are kept, read and drawn, as an experiment
says it of a command's.
"""

from __future__ import annotations

from kvinterp.commands.base import Experiment
from kvinterp.common.words import unwrapped
from kvinterp.patching import ActivationPatching as Restored
from kvinterp.patching import Cause


class OfFunction(Experiment):
    """What a function found: it has no cells, since nothing but the function makes it."""

    VERB = ""

    @classmethod
    def verb(cls) -> str:
        """What the result says that made it."""
        return cls.VERB

    @classmethod
    def question(cls) -> str:
        """What the class says: several share this file."""
        return unwrapped(cls.__doc__ or "")


class ActivationPatching(OfFunction):
    """Which place of a clean prompt restores its answer in a corrupted one?"""

    VERB = "activation-patching"
    RESULT = Restored


class Localise(OfFunction):
    """Where is the difference at the first decode step made?"""

    VERB = "localise"
    RESULT = Cause


FUNCTIONS: dict[str, type[Experiment]] = {
    kind.VERB: kind for kind in (ActivationPatching, Localise)
}
"""How what a function found is kept, by what the result says that made it."""
