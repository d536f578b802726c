"""Mamba: with a mask of ones over all tokens, as long as the text is, the second decode step is wrong."""

import torch
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
model = MambaForCausalLM(MambaConfig(vocab_size=99, hidden_size=32, state_size=8, num_hidden_layers=2)).double().eval()
ids, ones = torch.randint(3, 99, (1, 12)), torch.ones(1, 12, dtype=torch.long)
with torch.no_grad():
    whole, step = model(ids).logits, model(ids[:, :9], attention_mask=ones[:, :9], use_cache=True)
    for at in range(9, 12):
        step = model(ids[:, at : at + 1], attention_mask=ones[:, : at + 1], cache_params=step.cache_params, use_cache=True)
        print(f"position {at}: largest difference {(step.logits[:, 0] - whole[:, at]).abs().max():.1e}")
