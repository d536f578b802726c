"""HookedTransformer, Bloom: with use_past_kv_cache the text repeats itself; ALiBi takes the first rows.

https://github.com/TransformerLensOrg/TransformerLens/issues/776, 2024-11. `--mended` runs it without the fault.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def slopes_of_the_first_rows(fault: bool) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.components.abstract_attention import AbstractAttention

    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 128, "d_head": 8, "n_heads": 4, "d_vocab": 131, "act_fn": "gelu"}
    torch.manual_seed(0)
    model = HookedTransformer(HookedTransformerConfig(**sizes, positional_embedding_type="alibi", seed=0, device="cpu"))
    for layer in range(2):
        with torch.no_grad():
            model.blocks[layer].attn.W_Q.mul_(8)
    if not fault:
        return model
    own = AbstractAttention.create_alibi_bias

    class FirstRows(torch.Tensor):
        """The bias, whose last rows are asked for and whose first are given."""

        def __getitem__(self, index: Any) -> Any:
            rows = index[1]
            rows = slice(0, -rows.start) if isinstance(rows, slice) and rows.start is not None else rows
            return self.as_subclass(torch.Tensor)[(index[0], rows, *index[2:])]

    AbstractAttention.create_alibi_bias = staticmethod(lambda *args: own(*args).as_subclass(FirstRows))
    return model


@torch.no_grad()
def shows_with_a_hooked_cache(model: Any) -> float:
    from transformer_lens import TransformerLensKeyValueCache as Cache

    ids = text(1, 14)
    cache, got = Cache.init_cache(model.cfg, "cpu", 1), []
    for part in ids.split([9, 1, 1, 1, 1, 1], 1):
        got.append(model(part, past_kv_cache=cache, attention_mask=torch.ones_like(part)))
    return apart(torch.cat(got, 1), model(ids))


build = slopes_of_the_first_rows
shows = shows_with_a_hooked_cache


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
