"""A second generate() on the first one's cache.

https://github.com/huggingface/transformers/issues/36151, https://github.com/huggingface/transformers/issues/38727, https://github.com/huggingface/transformers/issues/47597, 2025-02. `--mended` runs it without the fault.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.12,
        "head_dim": 8,
        "attention_dropout": 0.0,
        "vocab_size": 131,
        "num_key_value_heads": 2,
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


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def second_turn_numbered_from_0(fault: bool) -> nn.Module:
    model = small("llama")
    own = type(model).prepare_inputs_for_generation

    @functools.wraps(own)
    def planted(self: Any, input_ids: Tensor, past_key_values: Any = None, **more: Any) -> Any:
        out = own(self, input_ids, past_key_values=past_key_values, **more)
        new, cache = out.get("input_ids"), out.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0 and new is not None and new.shape[1] > 1:
            out["position_ids"] = torch.arange(new.shape[1])[None].expand_as(new)
        return out

    if fault:
        type(model).prepare_inputs_for_generation = planted  # type: ignore[method-assign]
    return model


@torch.no_grad()
def shows_in_a_second_turn(model: Any) -> float:
    ids, other = text(1, 6), text(1, 4, seed=2)
    greedy = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    first = model.generate(ids, max_new_tokens=3, min_new_tokens=3, **greedy)
    whole = torch.cat([first.sequences, other], 1)
    more = {"attention_mask": torch.ones_like(whole), "past_key_values": first.past_key_values}
    second = model.generate(whole, max_new_tokens=1, **more, **greedy)
    return apart(second.logits[0], model(whole, use_cache=False).logits[:, -1])


build = second_turn_numbered_from_0
shows = shows_in_a_second_turn


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
