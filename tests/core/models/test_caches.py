"""The cached path of models that keep something else than keys and values, and keep it where they please."""

import pytest
import torch

import kvinterp as kv
from kvinterp.errors import UnsupportedError

pytestmark = pytest.mark.bits

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]
SMALL = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2}
STATES = {
    "Mamba": {"scale": 1.5, "state_size": 4},
    "FalconMamba": {"scale": 1.5, "state_size": 4},
    "Mamba2": {"scale": 1.5, "state_size": 4, "num_heads": 6, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "Rwkv": {"scale": 2.0, "attention_hidden_size": 24, "context_length": 64},
}
RECURRENT = {
    "sizes": {**SMALL, "num_hidden_layers": 3, "intermediate_size": 48},
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "lru_width": 24,
    "attention_window_size": 64,
    "block_types": ["recurrent", "recurrent", "attention"],
}


def largest(model, a="cached", b="recompute", steps=5):
    return kv.compare(model, PROMPT, a, b, max_new_tokens=steps, stop="length", progress="none").steps.max_abs_logit.max()


@pytest.mark.parametrize("stem", STATES)
def test_a_cache_by_another_name_is_remembered(tiny, stem):
    """Mamba called its cache cache_params and RWKV calls it state; given as past_key_values it went into their keyword
    arguments and was dropped, so that the cached path began anew at every step and differed by whole logits."""
    assert largest(tiny(stem, sizes=SMALL, **STATES[stem])) < 1e-4


@pytest.mark.parametrize("stem", STATES)
def test_a_prompt_in_chunks_goes_on_from_the_state_or_is_refused(tiny, stem):
    """transformers' Mamba takes no state into its scan of several tokens, so chunks after the first would forget."""
    model = tiny(stem, sizes=SMALL, **STATES[stem])
    for path in ("cached[chunk=5]", "recompute[chunk=5]"):
        if stem in ("Mamba2", "Rwkv"):
            assert largest(model, path) < 1e-4
        else:
            with pytest.raises(UnsupportedError, match="leave the chunk out"):
                largest(model, path)


def test_state_kept_in_modules_belongs_to_a_path(tiny):
    """RecurrentGemma keeps its state in its modules, where the recomputation of compare() overwrote the cached path's
    at every step: the two differed by whole logits though each alone was right."""
    model = tiny("RecurrentGemma", **RECURRENT)
    assert largest(model) < 1e-4
    assert largest(model, "cached", "cached") == 0
    assert all(block.temporal_block.conv1d_state is None for block in model.model.layers[:2])


def test_a_model_that_takes_no_known_cache_has_no_cached_path(tiny):
    model = tiny("Llama")
    whole = model.forward

    def forward(input_ids=None, use_cache=None):
        return whole(input_ids=input_ids, use_cache=False)

    model.forward = forward
    assert len(kv.run(model, PROMPT, "recompute", max_new_tokens=2, stop="length").tokens) == 2
    with pytest.raises(UnsupportedError, match="no cached path"):
        kv.run(model, PROMPT, "cached", max_new_tokens=2)


def test_a_cache_that_is_left_lying_is_an_error(tiny):
    """A model that swallows the cache it is given would be compared as if it had one.

    A pass that begins at a block in the middle writes nothing before it either, and is right.
    """
    model = tiny("Llama")
    whole = model.forward

    def forward(input_ids=None, past_key_values=None, **_):
        return whole(input_ids=input_ids, use_cache=False)

    model.forward = forward
    with pytest.raises(UnsupportedError, match="no cache that it uses"):
        kv.run(model, PROMPT, "cached", max_new_tokens=2)


# Names that a release may change ----------------------------------------------------------------------------------------


# A soft cap that attention leaves out --------------------------------------------------------------------------------


def test_attention_that_leaves_out_a_soft_cap_is_not_run(monkeypatch):
    """Older transformers (5.17.0 among them) gave Gemma 2 an SDPA that drops its cap: 0.065 in float32 logits."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

    whole = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    # In the mapping itself: what is put back through it would stand before what is registered from then on.
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping,
        "sdpa",
        lambda *args, softcap=None, **given: whole(*args, softcap=None, **given),
    )
    right = kv.load_model("zoo:gemma2-mini", dtype="float32", attention="eager")
    chosen = kv.load_model("zoo:gemma2-mini", dtype="float32")
    assert chosen.facts.attention == "eager"
    tokens = torch.tensor([PROMPT])
    assert torch.equal(chosen.model(tokens).logits, right.model(tokens).logits)
    with pytest.raises(UnsupportedError, match=r"leaves out the soft cap .* attention='eager'"):
        kv.load_model("zoo:gemma2-mini", dtype="float32", attention="sdpa")
    assert kv.load_model("zoo:llama-mini", dtype="float32").facts.attention == "sdpa"


# A TransformerLens that lacks something ---------------------------------------------------------------------------------
