"""Nemotron-H: the time step is clamped to time_step_min in a whole text and not in a decoded token."""

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
mamba = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "head_dim": 8}
config = NemotronHConfig(**sizes, **mamba, layers_block_type=["mamba", "attention", "mamba"], initializer_range=0.3)
model = NemotronHForCausalLM(config).double().eval()
ids = torch.randint(3, 99, (1, 12))
with torch.no_grad():
    whole, step = model(ids, use_cache=False).logits, model(ids[:, :9], use_cache=True)
    for at in range(9, 12):
        step = model(ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
        print(f"position {at}: largest difference {(step.logits[:, 0] - whole[:, at]).abs().max():.1e}")
