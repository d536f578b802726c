"""Without a cache generation is garbage: the last token alone is fed.

https://github.com/EricLBuehler/mistral.rs/issues/765, 2024-09. `--mended` runs it without the fault.
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


def of_generate(columns: int = 9, pads: int = 0, new: int = 8, beams: int = 1, **options: Any) -> Callable[[Any], float]:
    """generate() with such options against a greedy loop without a cache (beams: against use_cache=False): 1.0 if they differ."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, columns)
        padded = torch.cat([torch.full((1, pads), 5), ids], 1)
        mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(ids)], 1)
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": beams}
        more = {name: option(model) if callable(option) else option for name, option in options.items()}
        if beams > 1:
            given |= {"num_return_sequences": beams, "output_scores": True, "return_dict_in_generate": True}
            cached, plain = (model.generate(padded, use_cache=use, **given).sequences_scores for use in (True, False))
            return apart(cached, plain)
        got = model.generate(padded, attention_mask=mask, **given, **more)[:, pads:]
        for _ in range(new):
            logits = model(ids, use_cache=False).logits[:, -1]
            logits[:, 2] = -torch.inf  # the end, which min_new_tokens forbids
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        return float(not torch.equal(got, ids))

    return shows


def the_last_token_alone(fault: bool) -> nn.Module:
    model: Any = small("llama")
    own = type(model).prepare_inputs_for_generation

    @functools.wraps(own)
    def planted(self: Any, input_ids: Tensor, is_first_iteration: bool = False, **more: Any) -> Any:
        if not is_first_iteration and more.get("past_key_values") is None:
            more["next_sequence_length"] = 1
        return own(self, input_ids, is_first_iteration=is_first_iteration, **more)

    if fault:
        type(model).prepare_inputs_for_generation = planted
    return model


build = the_last_token_alone
shows = of_generate(use_cache=False)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
