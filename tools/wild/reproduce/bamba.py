"""Bamba: called without position_ids it numbers cached tokens wrongly; told them, as generate() tells them, it is right."""

import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
config = BambaConfig(**sizes, **mamba, num_key_value_heads=2, attn_layer_indices=[1], initializer_range=0.1)
model = BambaForCausalLM(config).double().eval()
ids = torch.randint(3, 99, (1, 12))
with torch.no_grad():
    whole = model(ids, use_cache=False).logits
    for told in (False, True):
        step = model(ids[:, :9], use_cache=True)
        for at in range(9, 12):
            positions = {"position_ids": torch.tensor([[at]])} if told else {}
            step = model(ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True, **positions)
            print(f"positions told: {told}, position {at}: {(step.logits[:, 0] - whole[:, at]).abs().max():.1e}")
