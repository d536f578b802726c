"""Whether a model's tokens see the ones after them, asked of its structure and not of the size of a
number.

A later token may move an earlier one's logits in a causal model too: it changes how many rows each
expert is given, another number of rows has other bits, and a bit can tip the choice of an expert,
after which everything is different. What it cannot
have is a derivative: a masked score has the weight 0 and hands on a gradient of exactly 0, and a
convolution by FFT one that is rounding's beside that of the earlier tokens. So the derivative of
the earlier rows by the later ones decides, wherever bits differ at all.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvinterp.auditing.blocks import prompts_for
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.hooks import stream_hook
from kvinterp.models.threads import own_threads
from kvinterp.paths.kernels import BatchInvariant, Kernels, Native

log = logging.getLogger("kvinterp")

LENGTH = 12
"""Tokens that are looked at."""

ROUNDED = 64 * torch.finfo(torch.float32).eps
"""What rounding leaves of a derivative that is 0, beside the largest one: transforms of 16-bit
tensors are taken in float32.
"""


def check_causal(adapter: Adapter) -> None:
    """Raises InputError for a model whose tokens see the ones after them: an earlier one's logits
    depend on a later one.
    """
    if adapter.facts.vocabulary < 2 or adapter.facts.context < 4:
        return
    with own_threads(adapter):
        ahead = sees_ahead(adapter)
    if ahead is None:
        log.info(
            "%s: whether its tokens see the ones after them could not be told", adapter.facts.name
        )
    if ahead:
        raise InputError(
            f"model {adapter.facts.name} ({adapter.facts.architecture}) is not causal, its tokens see the ones after them: "
            "only a causal decoder can decode from a cache; give one."
        )


def sees_ahead(adapter: Adapter) -> bool | None:
    """Whether an earlier token's logits depend on a later token; None where it cannot be told."""
    length = min(LENGTH, adapter.facts.context)
    tokens = torch.tensor(prompts_for(adapter, 1, length), device=adapter.device)
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % adapter.facts.vocabulary
    if _bits_stay(adapter, tokens, other, Native()):
        return False
    reaches = _gradient_reaches(adapter, tokens, length // 2)
    if reaches is not None:
        return reaches
    # Without derivatives (quantised weights, inference tensors), orders of addition that no later
    # row can change.
    try:
        return not _bits_stay(adapter, tokens, other, BatchInvariant())
    except UnsupportedError:
        return None


@torch.no_grad()
def _bits_stay(adapter: Adapter, tokens: Tensor, other: Tensor, kernels: Kernels) -> bool:
    """Whether the rows before the last keep their bits with another last token; so too where no run
    is like another.
    """
    mode = kernels.mode(adapter)
    logits = []
    for fed in (tokens, other, tokens):
        with adapter.own_state([]), mode:
            logits.append(adapter.forward(fed)[0, :-1].nan_to_num())
    first, changed, again = logits
    return torch.equal(first, changed) or not torch.equal(first, again)


def _gradient_reaches(adapter: Adapter, tokens: Tensor, rows: int) -> bool | None:
    """Whether the logits of the first rows have a derivative by what a later token brings into the
    first block.
    """
    entered: list[Tensor] = []

    def enter(stream: Tensor) -> Tensor:
        entered.append(stream.detach().requires_grad_())
        return entered[-1]

    handle = adapter.blocks[0].register_forward_pre_hook(stream_hook(enter), with_kwargs=True)
    try:
        with torch.inference_mode(False), torch.enable_grad(), adapter.own_state([]):
            logits = adapter.forward(tokens)[0, :rows]
            logits = logits.masked_fill(~logits.isfinite(), 0.0)
            # One number that no two tokens' logits can cancel in, but by chance.
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(
                logits
            )
            (gradient,) = torch.autograd.grad((logits * weights).sum(), entered[:1])
    # Each library that has no derivative says so in its own way.
    except Exception as error:
        log.debug("%s has no derivative: %s", adapter.facts.name, error)
        return None
    finally:
        handle.remove()
    size, later = gradient.abs().max(), gradient[..., rows:, :].abs().max()
    return bool(later > ROUNDED * size) if bool(size.isfinite()) and bool(size) else None
