"""GIT: rows padded on the left are right in the prefill and wrong from the first decode step on."""

import torch
from transformers import GitConfig, GitForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = GitForCausalLM(GitConfig(**sizes, initializer_range=0.3)).double().eval()
ids = torch.randint(3, 99, (1, 12))
with torch.no_grad():
    for pad in (0, 4):
        padded = torch.cat([torch.zeros(1, pad, dtype=torch.long), ids], 1)
        mask = (torch.arange(padded.shape[1]) >= pad).long()[None]
        whole = model(padded, attention_mask=mask, use_cache=False).logits
        step = model(padded[:, : pad + 9], attention_mask=mask[:, : pad + 9], use_cache=True)
        print(f"{pad} of padding, prefill: {(step.logits[:, pad:] - whole[:, pad : pad + 9]).abs().max():.1e}")
        for at in range(pad + 9, pad + 12):
            more = {"attention_mask": mask[:, : at + 1], "past_key_values": step.past_key_values}
            step = model(padded[:, at : at + 1], use_cache=True, **more)
            print(f"{pad} of padding, position {at}: {(step.logits[:, 0] - whole[:, at]).abs().max():.1e}")
