"""What an audit says of one use of a cache."""

from __future__ import annotations

import dataclasses

from kvinterp.auditing.ladder import part_named
from kvinterp.auditing.programs.first_difference import RAISED
from kvinterp.auditing.programs.reach import Reach

NOT_RUN, BEYOND, UNCLEAR = "not run", "wrong beyond what a cache promises", "cannot tell"
NUMBERS = (
    "told the positions of its tokens, as generate() tells them, the model is right: called without position_ids it numbers "
    "cached tokens wrongly"
)
"""The hint of a use that is right once its forwards are told the positions."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One use of a cache that an audit tried, or did not.

    Attributes:
        name: The use.
        status: ``"right"``, ``"wrong"`` (it is off, or crashes), ``"off without a cache too"``,
            ``"refused"`` by the library; ``"not run"``, ``"cannot tell"``, or
            ``"wrong beyond what a cache promises"``, which does not fail.
        detail: One sentence: what was run and what it showed, or why it was not run.
        error: Largest error of the logits, of the largest logit, beside one forward without a cache
            over a row's own tokens.
        null: The limit: the root of how far that forward is from itself.
        step: The column of the program (pads counted) at which a tensor is first wrong, where one
            was found.
        hint: The likely cause; of what was not run, the option that runs it.
        layer: The first block that is wrong, where it failed and that could be found.
        tensor: The first tensor that is wrong there.
        module: The module it was seen in.
        tried: How many programs tried it.
        program: The smallest program that shows it.
        lines: It as lines of plain Python.
        reach: How far the programs went that were right in it.
        asked: The program that the user asked for and that came to this, unless it is wrong or
            right.
    """

    name: str
    status: str
    detail: str
    error: float | None = None
    null: float | None = None
    step: int | None = None
    hint: str = ""
    layer: int | None = None
    tensor: str = ""
    module: str = ""
    tried: int = 0
    program: str = ""
    lines: str = ""
    asked: str = ""
    reach: Reach = dataclasses.field(default_factory=Reach)

    @property
    def failure(self) -> str:
        """What a wrong one showed, and where."""
        where = (
            ""
            if self.layer is None
            else f" First apart: {self.tensor} of {part_named(self.layer, self.tensor)}."
        )
        if self.tensor == RAISED:
            where = f" It is raised in {self.module}."
        return f"{self.name} is wrong: {self.detail}{where}"
