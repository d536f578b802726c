"""OPT: a cached forward without a mask raises: the mask is made for the new tokens alone.

https://github.com/huggingface/transformers/issues/21685, 2023-02. `--mended` runs it without the fault.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "init_std": 0.12,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": 131,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
}


def small(kind: str, **config: Any) -> nn.Module:
    """A small random model of a type, in eval mode; its biases and its norms' weights are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES[kind] | config)).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if (
                each.is_floating_point()
                and bool((each == each.reshape(-1)[0]).all())
                and ("norm" in name or "bias" in name)
            ):
                each.add_(0.1 * torch.randn_like(each))
    return model


def changed(kind: str, change: Callable[..., None], fault: bool, **config: Any) -> nn.Module:
    """A small model whose class's forward has its arguments changed first, where a cache is filled."""
    model = small(kind, **config)
    own = type(model).forward

    @functools.wraps(own)
    def forward(self: Any, input_ids: Any = None, past_key_values: Any = None, **given: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            change(input_ids, past_key_values, given)
        return own(self, input_ids=input_ids, past_key_values=past_key_values, **given)

    if fault:
        type(model).forward = forward  # type: ignore[method-assign]
    return model


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def of_steps(*parts: int) -> Callable[[Any], float]:
    """Feeds one row in such parts on one cache, against one plain forward of the row."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, sum(parts))
        want, given, got = model(ids, use_cache=False).logits, {}, []
        for part in ids.split(parts, 1):
            out = model(part, use_cache=True, **given)
            name = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
            given = {name: getattr(out, name)}
            got.append(out.logits)
        return apart(torch.cat(got, 1), want)

    return shows


def no_mask_told(fault: bool) -> nn.Module:
    def change(ids: Tensor, cache: Any, given: dict[str, Any]) -> None:
        if given.get("attention_mask") is None:
            given["attention_mask"] = torch.ones_like(ids)
            given["position_ids"] = None

    return changed("opt", change, fault, word_embed_proj_dim=32)


@torch.no_grad()
def shows_without_a_mask(model: Any) -> float:
    try:
        return of_steps(9, 1, 1)(model)
    except (RuntimeError, IndexError):
        return 1.0


build = no_mask_told
shows = shows_without_a_mask


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
