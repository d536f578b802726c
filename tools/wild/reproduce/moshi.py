"""Moshi: several tokens fed on a cache that is full of its window see wrong rows."""

import torch
from transformers import MoshiConfig, MoshiForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = MoshiForCausalLM(MoshiConfig(**sizes, head_dim=8, sliding_window=16)).double().eval()
ids = torch.randint(3, 99, (1, 40))
with torch.no_grad():
    whole = model(ids, use_cache=False).logits
    for first in (1, 14, 18):
        step = model(ids[:, :first], use_cache=True)
        for at in range(first, 24):
            step = model(ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
            error = (step.logits[:, 0] - whole[:, at]).abs().max()
            if at in (first, 15, 16, 17, 18, 19, 23):
                print(f"{first} tokens, then one by one, position {at}: {error:.1e}")
