"""Where NaN or Inf first appears along a path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from kvinterp.errors import NonFiniteError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.sites import RESIDUAL_SITES
from kvinterp.paths.decode import fed_to_all, lockstep
from kvinterp.paths.loops import Runner
from kvinterp.paths.path import ExecutionPath
from kvinterp.paths.vocabulary import padding_of, shown_tokens, sound_rows
from kvinterp.policies import CacheRows, Identity
from kvinterp.recording import SiteHook


class _FiniteHook(SiteHook):
    """Stops at the first residual stream that is not finite."""

    def __init__(self, adapter: Adapter) -> None:
        layers = range(adapter.facts.layers)
        super().__init__(
            adapter,
            [(s, layer) for layer in layers for s in RESIDUAL_SITES if adapter.supports(s, layer)],
        )
        self.step = 0

    def begin_step(self, step: int) -> None:
        self.step = step

    def on_read(self, cache_rows: CacheRows, keys: Tensor, values: Tensor) -> None:
        for site, tensor in (("keys", keys), ("values", values)):
            self.see(f"cached {site}", cache_rows.layer, cache_rows.start, tensor)

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(
                f"{_what(tensor)} first appeared in {site} of layer {layer} at step {self.step}"
            )


def first_nonfinite(
    adapter: Adapter,
    path: ExecutionPath,
    prompt: Sequence[int],
    fed: Sequence[int],
    padding: Bool[Tensor, " vocab"] | None = None,
) -> str:
    """Where NaN or Inf first appears when these tokens are run along this path, as one sentence.

    Args:
        adapter: The model.
        path: How to run it.
        prompt: Token ids of the prompt.
        fed: Token ids fed after it.
        padding: Which ids stand for no token and have minus infinity; as the first step has it,
            unless given.
    """
    remedy = "use a dtype with a wider range, such as dtype='bfloat16' or 'float32'"
    if not isinstance(path.policy, Identity):
        remedy += f", or, where policy {path.policy} made it of finite numbers, one that does not overflow"
    hook = _FiniteHook(adapter.at(dtype_named(path.dtype)))
    tokens = torch.tensor([list(prompt)], device=adapter.device)
    fed_tokens = fed_to_all(fed, 1, 1, adapter.device)
    try:
        with Runner(adapter, path, tokens, len(fed) + 1, [hook]) as runner:
            for now in lockstep([runner], len(fed) + 1, given=fed_tokens):
                logits = now.logits[0]
                padding = padding_of([logits]) if padding is None else padding
                if not bool(sound_rows(logits, padding).all()):
                    wrong = torch.where(padding, logits != -torch.inf, ~logits.isfinite()).any(0)
                    if not bool(wrong.all()):
                        remedy += ", or, where these ids stand for no token, give them -inf at every step on both paths"
                    what = f"{_what(logits[:, wrong])} first appeared in the logits at step {now.number}"
                    raise NonFiniteError(f"{what}, of {shown_tokens(wrong)},")
    except NonFiniteError as error:
        return (
            f"path {path}: {error} in {str(runner.adapter.dtype).removeprefix('torch.')}: {remedy}."
        )
    return f"path {path}: NaN or Inf appeared in the logits once and not again on a second run of the same tokens."


def _what(tensor: Tensor) -> str:
    return "NaN" if bool(tensor.isnan().any()) else "Inf"
