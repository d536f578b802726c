"""Ablations: what a patch puts in where it takes from no path. Zeros, the mean of given prompts' rows, or rows drawn from them.

Mean and resample share one pool: the rows that given prompts show at the site, of every position. So they need no prompts of
equal length. For another prompt's rows position by position, its trace is the donor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from kvinterp.common.draws import draws
from kvinterp.errors import InputError
from kvinterp.models.attaching import Site
from kvinterp.models.sites import LAYOUTS

ABLATIONS = {
    "zero": "zeros",
    "mean": "the mean of the rows of given prompts, over all their positions and over the prompts",
    "resample": "for each position a row drawn, with a seed, from those of given prompts, of any of their positions",
}


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What stands in for a run that gives: rows that do not depend on the one that is patched.

    Attributes:
        name: A name of ABLATIONS.
        pool: For each site and layer the rows to take from, without the batch dimension; empty for zeros.
        seed: Seeds the draws.
    """

    name: str
    pool: Mapping[Site, Tensor] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    seed: int = 0

    def rows(self, site: str, layer: int, start: int, like: Tensor) -> Tensor:
        """What replaces a tensor of a site.

        Args:
            site: The site.
            layer: The layer.
            start: The absolute position of the first row.
            like: The tensor, with the batch dimension; only its shape, dtype and device count.
        """
        if self.name == "zero":
            return torch.zeros_like(like)
        pool, axis = self.pool[site, layer], LAYOUTS[site].rows
        if self.name == "mean":
            taken = pool.double().mean(axis - 1, keepdim=True)
        else:
            # Drawn by position alone: the same one in every layer, site and forward.
            places = [self._drawn(start + row, pool.shape[axis - 1]) for row in range(like.shape[axis])]
            taken = pool.index_select(axis - 1, torch.tensor(places, device=pool.device))
        taken = taken[None].to(like)
        fits = [1, *like.shape[1:]]
        fits[axis] = taken.shape[axis]
        if list(taken.shape) != fits:
            raise InputError(
                f"the {self.name} donor's {site} at layer {layer} has shape {tuple(taken.shape[1:])} and cannot be put where "
                f"{tuple(like.shape[1:])} is: make it with the model that is patched."
            )
        return taken.expand_as(like)

    def _drawn(self, position: int, count: int) -> int:
        return int(draws((self.seed, 0), 1, (0, position, 0, 0))[0] * count)


ZERO = Ablation("zero")
