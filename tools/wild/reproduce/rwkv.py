"""RWKV: rows of a batch decoded from a state are not what each is alone."""

import torch
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
model = (
    RwkvForCausalLM(RwkvConfig(vocab_size=99, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2))
    .double()
    .eval()
)
with torch.no_grad():
    [each.uniform_(-0.5, 0.5) for each in model.parameters()]
    ids = torch.randint(3, 99, (3, 12))
    whole = model(ids, use_cache=False).logits
    for rows in (slice(0, 3), slice(0, 1)):
        step = model(ids[rows, :9], use_cache=True)
        for at in range(9, 12):
            step = model(ids[rows, at : at + 1], state=step.state, use_cache=True)
            print(f"{len(ids[rows])} rows, position {at}: {(step.logits[:, 0] - whole[rows, at]).abs().amax(-1).tolist()}")
