"""Zamba2: a token decoded from the cache leaves another recurrent state, and other logits, than in the whole text."""

import torch
from transformers import Zamba2Config, Zamba2ForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
mamba = {"n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 16}
config = Zamba2Config(**sizes, **mamba, num_key_value_heads=4, layers_block_type=["mamba", "hybrid"], initializer_range=0.3)
model = Zamba2ForCausalLM(config).double().eval()
ids = torch.randint(3, 99, (1, 12))
with torch.no_grad():
    whole, step = model(ids, use_cache=False).logits, model(ids[:, :9], use_cache=True)
    for at in range(9, 12):
        step = model(ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
        print(f"position {at}: largest difference {(step.logits[:, 0] - whole[:, at]).abs().max():.1e}")
