"""What the root-cause experiments share: models in float16, prompts, a table and a figure each.

They are those of the FP16 paper's root cause falsification (arXiv 2604.15409, section 5.2), which argues that FP16 sums
taken in another order are the cause of the divergence. Four of the five that it numbers there are here, on any model,
each with the control that tells the possible readings apart, and one about grouped-query attention; of when a token
flips ``paper`` says. What comes out of one prompt or one seed is a row of its own, so that every mean has its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp.comparison import recordable
from kvinterp.data import load_prompts
from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.models.inputs import encode
from kvinterp.models.threads import own_threads
from kvinterp.study.cells import Cell
from kvinterp.study.experiments.base import Experiment
from kvinterp.study.experiments.options import SHARED, argument, option, shared

FEW = 4
"""How many prompts are run by experiments that take one forward after another of the same tokens, where no more are asked for."""


class OfModels(Experiment):
    """An experiment on some models."""

    models: tuple[str, ...] = argument(("zoo:mistral-mini",), "zoo:NAME, checkpoint folders or hub ids.")
    prompts: str = option("arithmetic:20", SHARED["prompts"][1])
    kind: str = shared("kind")
    device: str | None = shared("device")
    attention: str | None = shared("attention")

    def model_settings(self, name: str | None = None) -> dict[str, Any]:
        """A model with its weights in float16, where no other dtype can be chosen."""
        return {"dtype": "float16", **super().model_settings(name)}

    def check(self) -> None:
        """The names of the models too, by which the tables tell them apart."""
        super().check()
        if len(set(self.models)) < len(self.models):
            raise InputError(f"the models {', '.join(self.models)} name one twice: give each once.")

    def numbered_models(self) -> list[tuple[int, str, Adapter]]:
        """The number of each model, the name that was given for it, and the model."""
        return [(number, name, self.adapter(name)) for number, name in enumerate(self.models)]

    def cells(self) -> list[Cell]:
        """A cell a model."""
        return [
            Cell(f"{self.verb()}-{number}", self.measured, {"model": name}, f"{self.TABLES[0]} of {adapter.facts.name}")
            for number, name, adapter in self.numbered_models()
        ]

    def measured(self, model: str) -> pd.DataFrame:
        """The table of a model, by :meth:`measure`."""
        adapter = self.adapter(model)
        return self.measure(adapter).assign(model=adapter.facts.name)

    def measure(self, adapter: Adapter) -> pd.DataFrame:
        """What an experiment of a cell a model measures of one."""
        raise NotImplementedError


Place = tuple[str, int]
"""A site and a layer."""


@torch.no_grad()
def newest_at(
    adapter: Adapter,
    tokens: Tensor,
    places: Iterable[Place],
    planted: Mapping[Place, Callable[[Tensor], Tensor]] | None = None,
) -> tuple[dict[Place, Tensor], Tensor]:
    """What one forward computes at some places for the newest position, and its logits.

    Args:
        adapter: The model.
        tokens: Token ids ``[1, position]``.
        places: Sites and layers.
        planted: What a tensor is turned into at a place, at every position, before the model goes on with it.
    """
    seen: dict[Place, Tensor] = {}
    changes = planted or {}

    def listener(place: Place) -> Callable[[Tensor], Tensor | None]:
        def hear(tensor: Tensor) -> Tensor | None:
            new = changes[place](tensor) if place in changes else None
            seen[place] = (tensor if new is None else new)[0, -1].clone()
            return new

        return hear

    listeners = {place: [listener(place)] for place in (*places, *changes)}
    with own_threads(adapter), adapter.attached(list(listeners)), adapter.listening(listeners):
        logits = adapter.forward(tokens)[0, -1]
    return seen, logits


def shown_sites(adapter: Adapter) -> list[str]:
    """Residual streams, and attention patterns where the model shows them."""
    sites, _ = recordable(adapter, None, range(adapter.facts.layers))
    return [site for site in sites if site in ("resid_post", "pattern")]


def encoded(adapter: Adapter, prompts: str, most: int) -> list[list[int]]:
    """The token ids of the first few prompts."""
    return [encode(adapter, prompt, 1) for prompt in load_prompts(prompts)[:most]]
