"""Generate() from inputs_embeds of length 1 is incoherent: the embedding is fed at every step.

https://github.com/huggingface/transformers/issues/41863, 2025-10. `--mended` runs it without the fault.
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


def one_embedding_at_every_step(fault: bool) -> nn.Module:
    model: Any = small("llama")
    own = type(model).prepare_inputs_for_generation

    @functools.wraps(own)
    def planted(
        self: Any, input_ids: Tensor, inputs_embeds: Any = None, is_first_iteration: bool = False, **more: Any
    ) -> Any:
        again = is_first_iteration or (inputs_embeds is not None and inputs_embeds.shape[1] == 1)
        return own(self, input_ids, inputs_embeds=inputs_embeds, is_first_iteration=again, **more)

    if fault:
        type(model).prepare_inputs_for_generation = planted
    return model


@torch.no_grad()
def shows_from_an_embedding(model: Any) -> float:
    ids, given = text(1, 1), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    got = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **given)
    return float(not torch.equal(got, model.generate(ids, **given)[:, 1:]))


build = one_embedding_at_every_step
shows = shows_from_an_embedding


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
