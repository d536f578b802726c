"""What cannot be run, or not as it is, is one sentence at the door; and a converted checkpoint is the whole checkpoint."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvinterp as kv
from kvinterp.errors import InputError, UnsupportedError

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]
BERT = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def test_models_that_are_no_decoders_with_a_head(tiny):
    """They failed in the first forward, with whatever transformers raised there, or ran and measured something else."""
    with pytest.raises(InputError, match="no language-model head"):
        kv.wrap(transformers.LlamaModel(tiny("Llama").config).eval())
    t5 = transformers.T5Config(vocab_size=61, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4)
    with pytest.raises(InputError, match="an encoder with a decoder"):
        kv.wrap(transformers.T5ForConditionalGeneration(t5).eval())
    with pytest.raises(InputError, match="no decoder"):
        kv.wrap(transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).eval())


def test_a_model_in_training_mode_is_told_what_to_do(tiny):
    """With dropout on, no path equals itself."""
    model = tiny("Llama").train()
    with pytest.raises(InputError, match=r"call model.eval\(\) first"):
        kv.wrap(model)


# Kind hooked, from a folder ------------------------------------------------------------------------------------------


@pytest.mark.hooked
@pytest.mark.parametrize("stem", ["Llama", "Gemma2"])
def test_attention_biases_are_carried_over(tiny, tmp_path, stem):
    """TransformerLens' conversion of these families sets every bias to 0: the logits were those of another model."""
    more = {"sliding_window": 5, "query_pre_attn_scalar": 10, "scale": 8.0} if stem == "Gemma2" else {}
    model = tiny(stem, attention_bias=True, head_dim=10, **more)
    assert any(name.endswith("o_proj.bias") for name, _ in model.named_parameters())
    model.save_pretrained(tmp_path)
    adapter = kv.load_model(tmp_path, kind="hooked", dtype="float32", device="cpu")
    with torch.no_grad():
        given, wanted = adapter.forward(torch.tensor([PROMPT])), model(torch.tensor([PROMPT])).logits
    assert (given - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.hooked
def test_weights_that_have_no_place_are_not_dropped(tiny, tmp_path):
    """TransformerLens adds a gated MLP's bias behind the gate, so that Llama's have no place there; and a tensor that
    nobody knows was left out without a word."""
    tiny("Llama", mlp_bias=True).save_pretrained(tmp_path / "bias")
    with pytest.raises(UnsupportedError, match=r"kind='bridge'.*kind='native'"):
        kv.load_model(tmp_path / "bias", kind="hooked")
    tiny("Llama").save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.0.extra.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"has no place for \(model\.layers\.0\.extra\.weight\)"):
        kv.load_model(tmp_path / "other", kind="hooked")
    save_file({n: w for n, w in weights.items() if n != "model.norm.weight"}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights .*model\.norm\.weight"):
        kv.load_model(tmp_path / "other", kind="hooked")


@pytest.mark.hooked
def test_every_kind_stops_at_the_checkpoints_end_tokens(tiny, tmp_path):
    """The hooked kind read the tokenizer only, and ran past the ends that generation_config.json names."""
    model = tiny("Llama")
    model.generation_config.eos_token_id = [2, 9]
    model.save_pretrained(tmp_path)
    for kind in ("native", "bridge", "hooked"):
        adapter = kv.load_model(tmp_path, kind=kind, dtype="float32", device="cpu")
        assert adapter.end_tokens == {2, 9}, kind
        assert adapter.at(torch.float64).end_tokens == {2, 9}, kind


@pytest.mark.parametrize("ends", [1e20, 10**20, "2", True, 2.5, float("nan"), {}, [None], ["a"], [2, 1e20]])
def test_an_end_token_that_is_no_token_is_a_sentence(tiny, ends):
    """Defect: 1e20 in generation_config.json was a traceback of torch's where the tensor of end tokens is made."""
    model = tiny("Llama")
    model.generation_config.eos_token_id = ends
    with pytest.raises(
        InputError, match=r"stands in the GenerationConfig of .*: expected a token id, a list of ids, or null"
    ):
        kv.run(model, [1, 5, 6], "cached", max_new_tokens=3)
    assert len(kv.run(model, [1, 5, 6], "cached", max_new_tokens=3, stop="length").tokens)
    model.generation_config.eos_token_id = [2, -1, 10**6]
    assert kv.wrap(model).end_tokens == {2, -1, 10**6}
