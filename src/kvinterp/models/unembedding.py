"""The final norm and the unembedding of any kind of model, in a wide dtype, of any stream: what a logit lens looks through.

Neither is found by its name. The last block's output is replaced, and the model's own code does the rest, whatever its final
norm, its head and its multipliers are. That a norm divides by one number, the stream's scale, is asked of the model too, by
streams of one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models.adapter import Adapter
from kvinterp.models.threads import own_threads

ROWS = 256
"""Streams a forward."""
_LINEAR = 1e-5
"""Largest relative error of what counts as linear: transformers computes norms in float32 whatever the dtype."""


class Unembedding:
    """What a model makes of residual streams behind its last block, computed in a wide dtype.

    Args:
        adapter: The model, of any kind and dtype.
        dtype: What it is computed in.
    """

    def __init__(self, adapter: Adapter, dtype: torch.dtype = torch.float64) -> None:
        self.adapter = adapter.at(dtype)
        self.cap = _soft_cap(adapter.model)

    def logits(self, streams: Float[Tensor, "row width"]) -> Float[Tensor, "row vocab"]:
        """The logits of each stream."""
        return torch.cat([self._forward(part) for part in streams.to(self.adapter.dtype).split(ROWS)])

    def uncapped(self, streams: Float[Tensor, "row width"]) -> Float[Tensor, "row vocab"]:
        """The logits before a soft cap, where the model has one: what the unembedding itself gives."""
        found = self.logits(streams)
        return found if self.cap is None else self.cap * torch.atanh(found / self.cap)

    def frozen(self, stream: Float64[Tensor, " width"]) -> FrozenNorm:
        """The final norm with the scale of one stream, and the unembedding: together linear.

        Raises:
            UnsupportedError: The norm does not divide by one number, or what follows is not linear.
        """
        return FrozenNorm(self, stream)

    def _forward(self, streams: Tensor) -> Tensor:
        last = ("resid_post", self.adapter.facts.layers - 1)
        given = streams.to(self.adapter.device)[:, None]
        return _run(self.adapter, len(streams), {last: lambda _: given})[:, -1]


class FrozenNorm:
    """The map from a part of a residual stream to its part of the logits, with the final norm's scale held at one stream's."""

    def __init__(self, of: Unembedding, stream: Float64[Tensor, " width"]) -> None:
        self._of, stream = of, stream.double()
        one, shifted = of.uncapped(torch.stack([stream, stream + stream.abs().mean()]))
        # A LayerNorm takes the mean off, an RMSNorm does not.
        self._centers = float((one - shifted).norm()) <= _LINEAR * float(one.norm())
        self.scale = self._size(stream[None])[0]
        self.bias = self._of.uncapped(torch.stack([stream, -stream])).mean(0)
        halves = torch.stack([stream.clone(), stream.clone()])
        halves[0, ::2], halves[1, 1::2] = 0, 0
        whole = of.uncapped(stream[None])[0] - self.bias
        if not float((self.parts(halves).sum(0) - whole).norm()) <= _LINEAR * float(whole.norm()):
            raise UnsupportedError(
                f"the logits of {of.adapter.facts.architecture} are not linear behind the scale of its final norm, so that they "
                "have no parts: use kv.logit_lens, which needs none."
            )

    def parts(self, vectors: Float64[Tensor, "part width"]) -> Float64[Tensor, "part vocab"]:
        """What each part of a stream adds to the logits.

        A part is brought to the stream's own scale, so that the model's norm divides it by the frozen one; the half of what it
        gives less what its opposite gives is without the bias.
        """
        sizes = self._size(vectors.double())
        some = sizes > 0
        found = vectors.new_zeros(len(vectors), len(self.bias), dtype=torch.float64).to(self.bias.device)
        if bool(some.any()):
            ratio = (sizes[some] / self.scale)[:, None]
            probes = vectors.double()[some] / ratio
            both = self._of.uncapped(torch.cat([probes, -probes]))
            ahead, behind = both.chunk(2)
            found[some.to(found.device)] = (ahead - behind) / 2 * ratio.to(both.device)
        return found

    def _size(self, vectors: Tensor) -> Tensor:
        if self._centers:
            vectors = vectors - vectors.mean(-1, keepdim=True)
        return vectors.square().mean(-1).sqrt()


def head_outputs(adapter: Adapter, z: Sequence[Float64[Tensor, "head head_dim"]]) -> list[Tensor] | None:
    """What each head's z adds to the residual stream, layer by layer, in float64.

    Args:
        adapter: The model.
        z: Each layer's; a difference of two is taken too, since the bias is left out.

    Returns:
        ``[head, width]`` for each layer; None where attention's output is no sum over its heads, as behind a norm of its own.

    Raises:
        UnsupportedError: This kind of model does not show z or what attention adds.
    """
    model, shown = adapter.at(torch.float64), dict[int, Tensor]()
    listeners: dict[Any, Any] = {}
    for layer, each in enumerate(z):
        heads = len(each)
        # A row for each head alone, one for all, and one for none, which shows the bias.
        rows = each.new_zeros(heads + 2, *each.shape, dtype=torch.float64)
        rows[torch.arange(heads), torch.arange(heads)] = each.double()
        rows[heads] = each.double()
        given = rows.to(model.device)[:, None]
        listeners["z", layer] = lambda _, given=given: given
        listeners["attn_out", layer] = lambda tensor, layer=layer: shown.__setitem__(layer, tensor[:, -1].clone())
    _run(model, len(z[0]) + 2, listeners)
    found = []
    for layer in range(len(z)):
        *alone, whole, none = shown[layer]
        parts = torch.stack(alone) - none
        if not float((parts.sum(0) - (whole - none)).norm()) <= _LINEAR * float((whole - none).norm()):
            return None
        found.append(parts)
    return found


@torch.no_grad()
def _run(adapter: Adapter, rows: int, listeners: dict[Any, Any]) -> Tensor:
    """One forward of a token a row, in which the listeners replace what they hear."""
    tokens = torch.zeros(rows, 1, dtype=torch.long, device=adapter.device)
    heard = {place: [listener] for place, listener in listeners.items()}
    with own_threads(adapter), adapter.attached(list(heard)), adapter.listening(heard):
        return adapter.forward(tokens)


def _soft_cap(model: Any) -> float | None:
    """The soft cap on a model's logits, as its config has it."""
    configs = [getattr(model, "cfg", None), getattr(model, "config", None)]
    configs += [getattr(config, "text_config", None) for config in configs]
    for config in configs:
        for name in ("output_logits_soft_cap", "final_logit_softcapping"):
            value = getattr(config, name, None)
            if isinstance(value, int | float) and value > 0:
                return float(value)
    return None
