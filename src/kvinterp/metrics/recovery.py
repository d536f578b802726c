"""The share of a difference that a patch removes."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.common.shapes import Measure

TO_SEE_A_DIFFERENCE = (
    "To see a difference try a path that differs by construction (a quantised cache, cached+int8, or other kernels, "
    "cached[kernels=split_k(4,float16)]), another dtype, longer prompts or more steps, or another kind of model."
)
"""The advice if everything is equal, whatever was compared."""
ONLY_THE_PREFILL = (
    "Only step 0 was compared, which is the prefill's and the same on both paths: no token was decoded, since every text ended "
    "there or one step was asked for. Give --stop length and more steps, or a prompt that the model goes on with: a chat model "
    "wants messages, as in a .jsonl file or natural:8."
)
"""The sentence for equality if nothing was decoded."""


def recovery(d_before: Float[Tensor, "*batch"], d_after: Float[Tensor, "*batch"]) -> Measure:
    """Share of a divergence that a patch removed: ``1 - d_after / d_before``.

    Args:
        d_before: Divergence of the two paths without the patch, of any metric.
        d_after: The same with the patch.

    Returns:
        A fraction: 1 if the patch removed everything, 0 if it changed nothing, negative if it made
        the paths differ more. NaN if there was nothing to remove (``d_before`` is 0);
        :func:`why_undefined` says why and what to do instead.

    Source: arXiv 2604.15409, eq. (4), there in percent.
    """
    before = d_before.detach().double()
    return torch.where(before == 0, torch.nan, 1 - d_after.detach().double() / before)


def why_undefined(steps: int, l2: float, d_before: float) -> str:
    """Says in a sentence why a recovery is NaN and what to do instead; empty if it is defined.

    Args:
        steps: How many steps the recovery is over.
        l2: L2 distance of the unpatched paths' logits over these steps.
        d_before: The divergence over these steps, of the recovery's metric.
    """
    if d_before > 0:
        return ""
    if steps == 0:
        return "no patched step was decoded: give a prompt that decodes longer, or patch an earlier step."
    if l2 == 0:
        return (
            "the paths' logits are bitwise equal at the steps patched, so there is nothing to recover: "
            f"{TO_SEE_A_DIFFERENCE[:1].lower()}{TO_SEE_A_DIFFERENCE[1:]}"
        )
    return "the logits differ and this distance is 0 all the same: read the recovery of their L2 distance."
