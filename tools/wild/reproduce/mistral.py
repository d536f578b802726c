"""Mistral with sliding_window=1, not among the sizes of the table: each decoded token sees itself alone, and yet is wrong."""

import torch
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.randint(3, 99, (1, 12))
for window in (1, 2):
    torch.manual_seed(0)
    config = MistralConfig(**sizes, num_key_value_heads=2, head_dim=8, sliding_window=window, initializer_range=0.3)
    model = MistralForCausalLM(config).double().eval()
    with torch.no_grad():
        whole, step = model(ids, use_cache=False).logits, model(ids[:, :9], use_cache=True)
        for at in range(9, 12):
            step = model(ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
            print(f"window {window}, position {at}: {(step.logits[:, 0] - whole[:, at]).abs().max():.1e}")
