"""Every file of a model folder and every number of its config behind the first door; and healthy checkpoints come in as before."""

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


# Weights that are not used ---------------------------------------------------------------------------------------------


def change(folder: Path, how) -> None:
    file = folder / "model.safetensors"
    save_file(how(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj.weight_scale", "layers.1.mlp.up_proj.bias", "other.weight"])
def test_a_weight_that_has_no_place(folder, name):
    change(folder, lambda held: {**held, f"model.{name}": torch.ones(3)})
    refused(folder, "has no place for")


# Healthy checkpoints ---------------------------------------------------------------------------------------------------


ARCHITECTURES = (
    "Qwen2 Qwen3 Gemma Gemma2 Mistral Mixtral GPTNeoX Olmo2 Granite Cohere StableLm Starcoder2 Exaone4 Falcon Bloom OPT"
)


@pytest.mark.parametrize("stem", [pytest.param(s, marks=pytest.mark.slow) for s in ARCHITECTURES.split()] + ["GPT2"])
def test_architectures_come_in(tiny, tmp_path, stem):
    more = (
        {"sizes": {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128}} if stem == "GPT2" else {}
    )
    model = tiny(stem, scale=1.0, **more)
    model.save_pretrained(tmp_path)
    found = loaded(tmp_path).source.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


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
