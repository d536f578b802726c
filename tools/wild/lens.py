"""TransformerLens on this release of transformers: does its generate() decode from a cache what it computes without one?

``python -m wild --lens`` asks each kind of model that the installed TransformerLens has, and keeps a row a type among those of
``make wild``, so that a board and a diff have them. A row is made by its script alone, which has not heard of kvinterp.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from wild import making

LENS = "of TransformerLens"
"""What the auto class of such a row says behind its kind."""
TYPES = (
    "bloom",
    "falcon",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mamba",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "stablelm",
)
"""The types that a bridge is made of unless others are named."""
OFF = 1e-4
"""What is further off is wrong: float32 rounds to some 1e-6 of the largest logit, and a step that does not read its cache is off by
more than 1e-2.
"""
HOOKED = {
    "rotary, GQA": 'positional_embedding_type="rotary", rotary_dim=8, n_key_value_heads=2, gated_mlp=True, normalization_type="RMS"',
    "learned positions": 'positional_embedding_type="standard", normalization_type="LN"',
    "learned positions, no tokenizer": 'positional_embedding_type="standard", normalization_type="LN"',
    "ALiBi": 'positional_embedding_type="alibi", normalization_type="LN"',
    "sliding window": 'positional_embedding_type="rotary", rotary_dim=8, use_local_attn=True, attn_types=["local", "global"], '
    'window_size=4, normalization_type="RMS"',
}
"""HookedTransformers by what is theirs."""
OF_HOOKED = """import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

torch.manual_seed(0)
sizes = dict(n_layers=2, d_model=32, d_head=8, n_heads=4, d_mlp=48, n_ctx=64, d_vocab=131, act_fn="gelu", seed=0)
config = HookedTransformerConfig(**sizes, {fields})
"""
TOKENIZER = """import tempfile
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

folder, words = tempfile.mkdtemp(), models.WordLevel({f"t{i}": i for i in range(131)}, unk_token="t1")
names = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t2", "unk_token": "t1", "name_or_path": folder}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), padding_side="left", **names)
tokenizer.save_pretrained(folder)
"""
NO_TOKENIZER = "tokenizer = None\n"
HOOKED_MODEL = """model = HookedTransformer(config, tokenizer=tokenizer)
torch.nn.init.normal_(model.unembed.W_U)
"""
BRIDGE_MODEL = """from transformer_lens.model_bridge import TransformerBridge
model.save_pretrained(folder)
model = TransformerBridge.boot_transformers(folder, hf_model=model.eval(), tokenizer=tokenizer, device="cpu")
"""
GENERATE = """logits = []
model.unembed.register_forward_hook(lambda module, args, out: logits.append(out[:, -8:]))
greedy = dict(max_new_tokens=8, do_sample=False, stop_at_eos=False, return_type="tokens", verbose=False)
ids = torch.randint(3, 130, (1, 9), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    text = model.generate(ids, use_past_kv_cache=True, **greedy)
    cached = torch.cat([out[:, -1:] for out in logits[-8:]], 1)
    model(text[:, :-1])
print(f"{float((cached - logits[-1]).abs().max() / logits[-1].abs().max()):.3g}")
"""


def scripts(names: Sequence[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A row of each type that the installed TransformerLens may have, and its program as an entry of a fault."""
    version = importlib.metadata.version("transformer-lens")
    known = making.known(making.CAUSAL)
    models = {
        ("TransformerBridge", name): (making.written(making.CAUSAL, name, known[name]), TOKENIZER + BRIDGE_MODEL)
        for name in names or TYPES
        if name in known
    }
    if importlib.util.find_spec("transformer_lens.HookedTransformer") is not None:  # Until 4.0.
        for name, fields in HOOKED.items():
            first = NO_TOKENIZER if name.endswith("no tokenizer") else TOKENIZER
            models["HookedTransformer", name] = OF_HOOKED.format(fields=fields), first + HOOKED_MODEL
    for (kind, name), (model, lines) in models.items():
        row = {**making.untried(f"{kind} {LENS} {version}", name), "class": kind, "model": model}
        yield row, {"use": "generate()", "beyond": "no", "program": "generate(9,8)", "place": "", "lines": lines + GENERATE}


def installed(auto: str) -> bool:
    """Whether a script of an auto class says here what its row says: those of TransformerLens belong to one version."""
    return LENS not in auto or auto.endswith(f" {importlib.metadata.version('transformer-lens')}")


def judged(row: dict[str, Any], one: dict[str, Any], printed: str) -> dict[str, Any]:
    """The row with what its script printed: how far off it is, or the error that it ended with."""
    try:
        error = float(printed.splitlines()[-1])
    except (ValueError, IndexError):
        return {**row, "why": printed.splitlines()[-1][:300] if printed else "it printed nothing"}
    if error <= OFF:
        return {**row, "uses": {"generate()": {"word": "right", "count": 1}}, "worst": error}
    why = f"{error:.2g} of the largest logit off the forward without a cache"
    return {**row, "wrong": [{**one, "why": why, "error": error, "printed": printed}]}
