"""What the studies of several models share: models in float16, unless another dtype can be chosen, and prompts."""

from __future__ import annotations

from typing import Any

from kvinterp.comparison import recordable
from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.study.experiments.base import Experiment
from kvinterp.study.experiments.options import SHARED, argument, option, shared


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


def shown_sites(adapter: Adapter) -> list[str]:
    """Residual streams, and attention patterns where the model shows them."""
    sites, _ = recordable(adapter, None, range(adapter.facts.layers))
    return [site for site in sites if site in ("resid_post", "pattern")]
