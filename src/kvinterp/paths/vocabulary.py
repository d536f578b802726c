"""Token ids that stand apart: those that end a text, and those of a vocabulary padded with minus
infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvinterp.models import Adapter


def end_tokens(adapter: Adapter, device: torch.device) -> Tensor:
    """The token ids that end a sequence, as a tensor."""
    return torch.tensor(sorted(adapter.end_tokens), dtype=torch.long, device=device)


def padding_of(logits: Sequence[Float[Tensor, "batch vocab"]]) -> Bool[Tensor, " vocab"]:
    """Which token ids have minus infinity in every row of every path.

    Such a logit has the probability 0 on both sides, and is how a vocabulary is padded to a round
    size.
    """
    nowhere = torch.stack([(rows == -torch.inf).all(0) for rows in logits]).all(0)
    # A row of nothing but minus infinity is no padding.
    return nowhere if not bool(nowhere.all()) else torch.zeros_like(nowhere)


def sound_rows(
    logits: Float[Tensor, "batch vocab"], padding: Bool[Tensor, " vocab"]
) -> Bool[Tensor, " batch"]:
    """Which rows are finite, but for the padding, where they must be minus infinity."""
    return torch.where(padding, logits == -torch.inf, logits.isfinite()).all(-1)


def shown_tokens(wrong: Bool[Tensor, " vocab"]) -> str:
    """The token ids in question as text: ``token ids 125 to 130 (6 of 131)``; all of them said as
    such.
    """
    found = wrong.nonzero().flatten().tolist()
    if len(found) == len(wrong):
        return "every token"
    together = found[-1] - found[0] + 1 == len(found)
    shown = (
        str(found[0])
        if len(found) == 1
        else f"{found[0]} to {found[-1]}"
        if together
        else f"{found[0]}, {found[1]}, ..."
    )
    return f"token id{'s' * (len(found) > 1)} {shown} ({len(found)} of {len(wrong)})"
