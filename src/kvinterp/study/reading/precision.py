"""What the same weights and prompts in several precisions say: of each model whether the difference falls, and where not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvinterp.common.numbers import counted, listed, number
from kvinterp.study.reading.results import unit_roundoff

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison


Step = tuple[tuple[str, float], tuple[str, float]]
"""A dtype and its largest logit difference, and the same of the next finer one."""


@dataclasses.dataclass(frozen=True)
class Fall:
    """What the largest logit difference of one model does from each dtype to the next finer one.

    Attributes:
        model: The model.
        sizes: Dtype and largest logit difference, the coarsest dtype first.
    """

    model: str
    sizes: tuple[tuple[str, float], ...]

    @property
    def steps(self) -> list[Step]:
        """Each dtype beside the next finer one."""
        return list(itertools.pairwise(self.sizes))

    @property
    def stuck(self) -> list[Step]:
        """The steps at which a difference is there and does not fall."""
        return [(coarse, fine) for coarse, fine in self.steps if fine[1] >= coarse[1] > 0]

    @property
    def begins(self) -> list[Step]:
        """The steps from exact equality to a difference: they neither fall nor say anything against rounding."""
        return [(coarse, fine) for coarse, fine in self.steps if fine[1] > coarse[1] == 0]

    @property
    def falls(self) -> bool:
        """Whether there is a difference, and it falls at every step up in precision (or is gone and stays so)."""
        return self.sizes[0][1] > 0 and not self.stuck and not self.begins


def fall_of(model: str, rungs: Sequence[Comparison]) -> Fall:
    """Orders one model's comparisons that hold a step from the coarsest dtype to the finest."""
    sizes = [(str(c.provenance["dtype"]), float(c.steps["max_abs_logit"].max())) for c in rungs if len(c.steps)]
    return Fall(model, tuple(sorted(sizes, key=lambda size: unit_roundoff(size[0]), reverse=True)))


def _falls(rungs: Mapping[str, Sequence[Comparison]]) -> list[Fall]:
    """Those of the models that have more than one dtype."""
    falls = (fall_of(model, group) for model, group in rungs.items())
    return [fall for fall in falls if len(fall.sizes) > 1]


def ladder_said(rungs: Mapping[str, Sequence[Comparison]]) -> list[str]:
    """What the ladder says, a sentence each: how large the difference is in each dtype, and of which models it falls."""
    falls = _falls(rungs)
    if not falls:
        return []
    largest: dict[str, float] = {}
    for dtype, size in itertools.chain(*(fall.sizes for fall in falls)):
        largest[dtype] = max(size, largest.get(dtype, 0.0))
    sizes = ", ".join(f"{number(size)} in {dtype}" for dtype, size in largest.items())
    of = "" if len(falls) == 1 else " of any model"
    every = [c for group in rungs.values() for c in group]
    setting = ", ".join(sorted({str(c.provenance[key]) for c in every for key in ("kind", "protocol")}))
    count = counted(len({name for c in every for name in c.examples["id"]}), "prompt")
    said = [f"On the same {count} ({setting}) the largest logit difference{of} was {sizes}."]
    equal = [fall for fall in falls if not any(size for _, size in fall.sizes)]
    falling = [fall for fall in falls if fall.falls]
    if len(falling) == len(falls):
        said[0] += (
            f" {'It falls' if len(falls) == 1 else 'In each model it falls'} at every step up in precision, as rounding does; "
            "an error that has nothing to do with precision would stay. Whether it is rounding, kvinterp audit checks."
        )
        return said
    if falling:
        which = listed([fall.model for fall in falling])
        said[0] += f" In {which} it falls at every step up in precision, as rounding does."
    if equal:
        said[0] += f" In {listed([fall.model for fall in equal])} the paths are bitwise equal in every one of them."
    for fall in falls:
        for (coarse, _), (fine, size) in fall.begins:
            said.append(
                f"{fall.model}: bitwise equal in {coarse} and {number(size)} apart in {fine}. In which dtype this processor's "
                "kernels add alike on both paths is their choice; equality in one speaks neither for nor against rounding."
            )
        for (coarse, before), (fine, size) in fall.stuck:
            said.append(
                f"{fall.model}: it does not fall from {coarse} ({number(before)}) to {fine} ({number(size)}), which this table "
                "does not explain: ask kvinterp audit."
            )
    return said
