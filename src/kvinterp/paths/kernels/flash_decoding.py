"""``flash_decoding``: attention of one row over parts of the keys, merged by their log-sum-exp.

Sources: Dao et al. 2023, "Flash-Decoding for long-context inference"; the split-KV kernels of FlashAttention (which torch's
flash backend of SDPA has too) and FlashInfer keep the parts' outputs in float32; PagedAttention's second version in vLLM
keeps them in the model's own 16 bits, and only their maxima and sums in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import Listener
from kvinterp.models.derived import SDPA, sdpa_arguments
from kvinterp.models.hooks import Functions
from kvinterp.paths.kernels import fixed_order
from kvinterp.paths.kernels.base import KernelMode, Kernels, drops_out
from kvinterp.paths.kernels.split_k import check_fields, check_layers


@dataclasses.dataclass(frozen=True)
class FlashDecoding(Kernels):
    """Attention of one row is computed over parts of the keys, which are merged by their log-sum-exp.

    Calls of more rows keep the machine's kernels, as libraries split over keys only where there are too few rows to fill
    the machine. For models loaded with ``attention="sdpa"``, whose attention is one kernel.

    Attributes:
        parts: How many pieces the keys are cut into.
        accumulate: ``"float32"``: the pieces' outputs are kept in float32 until they are merged; ``"float16"``: each is
            rounded to the model's own 16 bits first. A 32- or 64-bit model keeps its own dtype either way.
        layers: Which layers; empty for all.
    """

    parts: int = 4
    accumulate: str = "float32"
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts attention of one row.

        Raises:
            InputError: It names a layer the model does not have.
            UnsupportedError: The model's attention is no call of SDPA.
        """
        check_layers(self, adapter)
        if adapter.facts.attention != "sdpa":
            raise UnsupportedError(
                f"kernels={self} splits attention as one kernel, and {adapter.facts.name} (kind {adapter.kind!r}) computes "
                "scores, softmax and values one after the other: load it with kind='native', attention='sdpa', or use "
                "split_k(4,float32,values)."
            )
        return _FlashDecodingMode(self, adapter)


class _FlashDecodingMode(KernelMode):
    def __init__(self, kernels: FlashDecoding, adapter: Adapter) -> None:
        super().__init__()
        self.kernels = kernels
        self.layer: int | None = None
        self.alone = False
        if kernels.layers:
            places = [(site, n) for n in range(adapter.facts.layers) for site in ("resid_pre", "resid_post")]
            self.listeners = {place: self._follow(*place) for place in places}

    def _follow(self, site: str, layer: int) -> Listener:
        def listener(_: Tensor) -> None:
            self.layer = layer if site == "resid_pre" else None

        return listener

    def expect(self, operation: str) -> None:
        self.alone = True

    def interceptors(self) -> list[Any]:
        self.layer = None
        return [Functions(self._function)]

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        chosen = self.alone or not self.kernels.layers or self.layer in self.kernels.layers
        if func is not SDPA or not chosen or drops_out(*args, **kwargs):
            return NotImplemented
        query, key, value, mask, causal, scale = sdpa_arguments(*args, **kwargs)
        # Of one row, causal masking in torch's sense shows the first key only: no decode is called so.
        if query.shape[-2] != 1 or (causal and key.shape[-2] > 1):
            return NotImplemented
        between = query.dtype if self.kernels.accumulate == "float16" else fixed_order.wide(query.dtype)
        return merged_attention(query, key, value, mask, scale, self.kernels.parts, between)


def merged_attention(
    query: Float[Tensor, "*heads row head_dim"],
    key: Float[Tensor, "*heads key head_dim"],
    value: Float[Tensor, "*heads key value_dim"],
    mask: Tensor | None,
    scale: float | None,
    parts: int,
    between: torch.dtype,
) -> Float[Tensor, "*heads row value_dim"]:
    """Attention over pieces of the keys, each with its own softmax, merged by their log-sum-exp.

    Probabilities are rounded to the dtype of the query before they meet the values, as matrix units ask.

    Args:
        query: The rows.
        key: With as many heads as the query.
        value: Likewise.
        mask: Boolean (true where a row may look), additive, or None; broadcast to ``[..., row, key]``.
        scale: Factor on the scores; one over the root of head_dim for None.
        parts: How many pieces.
        between: The dtype a piece's output has until it is merged.
    """
    wide = fixed_order.wide(query.dtype)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    size = -(-key.shape[-2] // parts)
    outputs, totals = [], []
    for start in range(0, key.shape[-2], size):
        piece = slice(start, start + size)
        scores = torch.matmul(query.to(wide), key[..., piece, :].to(wide).transpose(-1, -2)) * factor
        if mask is not None:
            seen = mask if mask.shape[-1] == 1 else mask[..., piece]
            scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.to(wide)
        largest = scores.amax(-1, keepdim=True)
        # Where a piece shows a row no key, its largest score is -inf, and -inf - -inf would be NaN.
        powers = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0.0))
        total = powers.sum(-1, keepdim=True)
        made = torch.matmul(powers.to(query.dtype).to(wide), value[..., piece, :].to(wide))
        outputs.append((made / total.masked_fill(total == 0, 1.0)).to(between).to(wide))
        totals.append(largest + torch.log(total))
    lse = torch.stack(totals)
    top = lse.amax(0)
    shares = torch.exp(lse - top.masked_fill(top == -torch.inf, 0.0))
    merged, whole = torch.zeros_like(outputs[0]), torch.zeros_like(shares[0])
    for share, output in zip(shares, outputs, strict=True):
        merged, whole = merged + share * output, whole + share
    return (merged / whole.masked_fill(whole == 0, 1.0)).to(query.dtype)
