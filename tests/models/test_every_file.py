"""Every file of a model folder and every number of its config behind the first door; and healthy checkpoints come in as before."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import kvinterp as kv
from kvinterp.errors import InputError
from kvinterp.models import zoo
from kvinterp.models.soundness import check_loaded

READ = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "merges.txt",
    "tokenizer.model",
    "adapter_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
]


@pytest.fixture(scope="session")
def sound(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("sound") / "whole"
    tiny("Llama").save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[UNK]", "a", "b", "c", "d"])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def loaded(folder: Path, kind: str = "native"):
    return kv.load_model(folder, kind=kind, dtype="float32", device="cpu")


def refused(folder: Path, said: str) -> None:
    """By one sentence on one line."""
    with pytest.raises(InputError, match=said) as caught:
        loaded(folder)
    assert "\n" not in str(caught.value)


def say(folder: Path, name: str, **more) -> None:
    file = folder / name
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **more}))


# Weights that are not used ---------------------------------------------------------------------------------------------


def change(folder: Path, how) -> None:
    file = folder / "model.safetensors"
    save_file(how(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["native", "bridge", pytest.param("hooked", marks=pytest.mark.hooked)])
def test_layers_that_the_config_does_not_have(tiny, tmp_path, kind):
    """Two of four layers were left out without a word."""
    tiny("Llama", num_hidden_layers=4).save_pretrained(tmp_path)
    say(tmp_path, "config.json", num_hidden_layers=2)
    with pytest.raises(InputError, match=r"has no place for \(model\.layers\.2\..* and 15 more\)"):
        loaded(tmp_path, kind)


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.weight_scale", "layers.1.mlp.up_proj.bias", "other.weight"])
def test_a_weight_that_has_no_place(folder, name):
    change(folder, lambda held: {**held, f"model.{name}": torch.ones(3)})
    refused(folder, "has no place for")


UNUSED = [
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "transformer.h.0.attn.bias",
    "transformer.h.0.attn.masked_bias",
    "transformer.h.0.attn.attention.bias",
    "gpt_neox.layers.3.attention.masked_bias",
    "mtp.layers.0.mlp.up_proj.weight",
    "model.mtp_block.weight",
    "model.layers.2.enorm.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    "vision_tower.encoder.layers.0.mlp.fc1.weight",
    "model.mm_projector.0.weight",
    "model.audio_tower.conv1.weight",
    "v_head.summary.weight",
    "score.weight",
]


def test_what_a_text_decoder_does_without_may_be_there(folder):
    """Buffers that older versions saved, other senses and heads, a next-token block that the config counts."""
    say(folder, "config.json", num_nextn_predict_layers=1)
    change(folder, lambda held: held | {name: torch.ones(3) for name in UNUSED})
    loaded(folder)


def test_a_block_beyond_those_that_the_config_counts():
    found = {"missing_keys": (), "unexpected_keys": ("model.layers.3.enorm.weight",)}
    config = transformers.LlamaConfig(num_hidden_layers=2, num_nextn_predict_layers=1)
    with pytest.raises(InputError, match="has no place for"):
        check_loaded(found, "m", config)
    check_loaded({**found, "unexpected_keys": ("model.layers.2.enorm.weight",)}, "m", config)


@pytest.mark.parametrize(("dtype", "what"), [(torch.complex64, "complex"), (torch.int8, "whole")], ids=str)
def test_weights_that_are_no_floating_point_numbers(folder, dtype, what):
    """transformers drops the imaginary part, and takes quantised integers for the weights themselves."""
    change(folder, lambda held: {n: t.to(dtype) if n.endswith("1.mlp.up_proj.weight") else t for n, t in held.items()})
    refused(folder, rf"hold {what} numbers in 'model\.layers\.1\.mlp\.up_proj\.weight'")


# Healthy checkpoints ---------------------------------------------------------------------------------------------------


ARCHITECTURES = (
    "Qwen2 Qwen3 Gemma Gemma2 Mistral Mixtral GPTNeoX Olmo2 Granite Cohere StableLm Starcoder2 Exaone4 Falcon Bloom OPT"
)


@pytest.mark.parametrize("stem", [pytest.param(s, marks=pytest.mark.slow) for s in ARCHITECTURES.split()] + ["GPT2"])
def test_architectures_come_in(tiny, tmp_path, stem):
    more = (
        {"sizes": {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128}} if stem == "GPT2" else {}
    )
    tiny(stem, scale=1.0, **more).save_pretrained(tmp_path)
    loaded(tmp_path)


def test_shards_and_tied_embeddings_come_in(tiny, tmp_path):
    model = tiny("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(loaded(tmp_path).model.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("name", ["mistral-mini", *[pytest.param(n, marks=pytest.mark.slow) for n in zoo.names()[:-1]]])
def test_the_layout_of_a_hubs_cache_comes_in(tmp_path, name):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(zoo.folder(name).iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert loaded(snapshot).encode("Tom has 5 apples.")
