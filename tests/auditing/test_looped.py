"""Decoders that run their blocks several times in a forward, a slot of the cache for each run: they were "no list of 16 blocks"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, HrmTextConfig, HrmTextForCausalLM, LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import kvinterp as kv
from kvinterp.errors import UnsupportedError

PROMPT = (3, 17, 44, 9, 71, 26, 58, 5, 33)
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FEW: dict[str, Any] = {"lengths": (5, 9), "steps": 2, "programs": 9, "seconds": 15, "rungs": ("float32", "float64")}


class Twice(PreTrainedModel, GenerationMixin):
    """Two blocks, each run twice; what it is told may mend or break: which slot of the cache the second run has."""

    config_class = LlamaConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: Any, slots: str = "own") -> None:
        super().__init__(config)
        self.slots, self.embed = slots, nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, n) for n in range(2))
        self.rope = LlamaRotaryEmbedding(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embed

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
        use_cache: Any = None, **_: Any,
    ) -> Any:  # fmt: skip
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        x, cache = self.embed(input_ids), past_key_values
        begun = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(begun, begun + x.shape[1])[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        angles = self.rope(x, position_ids)
        for run in range(2):
            for n, layer in enumerate(self.layers):
                # Broken: the second run of a step reads what the second run of the other block kept.
                other = self.slots == "swapped" and run and x.shape[1] == 1 and begun
                layer.self_attn.layer_idx = 2 * run + (1 - n if other else n)
                x = layer(x, attention_mask=mask, position_embeddings=angles, past_key_values=cache)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=cache)


def _twice(slots: str = "own", layers: int = 4) -> Any:
    torch.manual_seed(0)
    return Twice(LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **SIZES), slots).eval()


def _hrm() -> Any:
    torch.manual_seed(0)
    cycles = {"H_cycles": 2, "L_cycles": 3, "num_hidden_layers": 2, "head_dim": 8}
    return HrmTextForCausalLM(HrmTextConfig(**SIZES, **cycles)).eval()


@pytest.mark.parametrize("make", [_hrm, _twice])
def test_its_uses_are_right_and_its_paths_are_compared(make: Any) -> None:
    model = make()
    verdict = kv.audit(model, **FEW)
    assert verdict.verdict == "rounding", str(verdict)
    assert {check.name for check in verdict.checks if check.status == "right"} >= {
        "prompt",
        "decode step",
        "several chunks",
    }
    both = kv.compare(model, [PROMPT], max_new_tokens=4, stop="length")
    assert len(both.steps) == 4
    assert both.steps["max_abs_logit"].max() < 1e-3
    with torch.no_grad():
        want = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    ran = kv.run(model, PROMPT, "cached", max_new_tokens=2, logits="keep")
    assert torch.allclose(ran.logits[0], want, atol=1e-4)


def test_blocks_are_counted_once_and_slots_as_the_library_makes_them() -> None:
    adapter = kv.wrap(_hrm())
    assert (adapter.facts.layers, len(adapter.blocks), adapter.config.num_hidden_layers) == (4, 4, 16)
    assert adapter.loops
    assert not kv.wrap(_twice(layers=2)).loops


def test_a_cache_that_grows_past_its_config() -> None:
    """A model whose config counts blocks makes a DynamicCache without it: one made with it has too few layers."""
    model = _twice(layers=2)
    ran = kv.run(model, PROMPT, "cached", max_new_tokens=3, stop="length")
    assert ran.tokens == kv.run(model, PROMPT, "recompute", max_new_tokens=3, stop="length").tokens


def test_a_slot_of_another_block_is_found() -> None:
    verdict = kv.audit(_twice("swapped"), **FEW)
    assert verdict.verdict == "bug"
    assert "decode step is wrong" in str(verdict)
    assert "cached rows are not read" not in str(verdict).lower()


def test_a_forward_is_one_step_of_a_recorder() -> None:
    model = _hrm()
    with kv.record(model, "resid_post") as seen, torch.no_grad():
        model(torch.tensor([PROMPT]))
        model(torch.tensor([PROMPT[:4]]))
    assert len(seen.kept["resid_post", 3]) == 2
    heard: list[Any] = []
    last = model.model.H_module.layers[1].register_forward_hook(lambda _, __, out: heard.append(out))
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    last.remove()
    assert torch.equal(seen.kept["resid_post", 3][0], heard[-1][:, -1])
    with (
        pytest.raises(UnsupportedError, match="run several times in a forward"),
        kv.record(model, "resid_post", positions="all"),
    ):
        pass
