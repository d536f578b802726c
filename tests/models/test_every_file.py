"""Every file of a model folder and every number of its config behind the first door; and healthy checkpoints come in as before."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import kvinterp as kv
from kvinterp.common.files import bytes_of, opened
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


# What is no file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (os.mkfifo, "it is a pipe and no file"),
        (lambda file: file.symlink_to("/dev/zero"), "it is a device and no file"),
        (lambda file: file.symlink_to("/dev/tty"), "it is a device and no file"),
        (lambda file: file.symlink_to(file.with_name("gone")), "is a link to a file that is not there"),
    ],
    ids=["pipe", "zero", "tty", "link"],
)
def test_what_is_no_file_is_not_waited_for(folder, name, made, said):
    """A pipe as the tokenizer was waited for, and /dev/zero as the generation config filled the memory."""
    (folder / name).unlink(missing_ok=True)
    made(folder / name)
    refused(folder, said)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_file_that_is_longer_than_any_of_its_kind_is_not_read(folder, name):
    (folder / name).unlink(missing_ok=True)
    with (folder / name).open("wb") as file:
        file.truncate(2**28 + 1)  # It has no blocks.
    refused(folder, "it has 268,435,457 bytes, more than")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here that fails when it is read")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_read_that_fails_is_one_sentence(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")
    refused(folder, "cannot be read .*expected")


def test_the_one_door_for_files(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert bytes_of(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, more than the 4"):
        bytes_of(tmp_path / "file", 4)
    with pytest.raises(OSError, match="a folder and no file"):
        opened(tmp_path)


@pytest.mark.parametrize("made", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")], ids=["pipe", "zero"])
def test_results_that_are_no_files_are_not_waited_for(tmp_path, made):
    model = kv.load_model("zoo:gqa2-mini", kind="native", device="cpu")
    place = kv.compare(model, [[3, 5, 7, 9]], max_new_tokens=2).save(tmp_path / "both")
    for name, said in (("steps.parquet", "holds no readable result"), ("summary.json", "summary.json")):
        (place / name).rename(place / "aside")
        made(place / name)
        with pytest.raises(InputError, match=said):
            kv.load(place)
        (place / name).unlink()
        (place / "aside").rename(place / name)
    kv.load(place)
    for name in ("verdict.json", "trace.json"):
        made(tmp_path / name)
    for read in (kv.Verdict.load, kv.Trace.load):
        with pytest.raises(InputError):
            read(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y", "x/../y"])
def test_names_in_an_index_that_no_file_can_have(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    refused(folder, "copy or download them too|not in its folder")


def test_names_of_5000_characters():
    """`show` and kv.load raised the system's own error."""
    from kvinterp.cli.showing import page_of

    for read in (kv.load, lambda name: page_of(Path(name)), kv.load_prompts):
        with pytest.raises(InputError) as caught:
            read("x" * 5000)
        assert len(str(caught.value)) < 600


# What configs say -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *[("generation_config.json", {"eos_token_id": value}) for value in (10**20, -1, "x", 2.5, True, [2, 2**40])],
        *[("generation_config.json", {"pad_token_id": value}) for value in (10**20, -2, "x")],
        ("generation_config.json", {"temperature": "hot"}),
        ("generation_config.json", {"do_sample": "yes"}),
        ("generation_config.json", {"repetition_penalty": float("nan")}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer_config.json", {"model_max_length": [1]}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("config.json", {"rope_theta": float("inf")}),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}),
        ("config.json", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}}),
        ("config.json", {"rope_scaling": {"type": "linear", "factor": -2.0}}),
        ("config.json", {"partial_rotary_factor": -0.5}),
        ("config.json", {"rms_norm_eps": -1.0}),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("config.json", {"quantization_config": {"quant_method": 5}}),
        ("config.json", {"quantization_config": 5}),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_its_name(folder, name, more):
    """They ran, one with ids that no tensor holds, others with angles that are NaN or turn backwards."""
    say(folder, name, **more)
    refused(folder, f"{name}' says .*({'|'.join((*more, 'quant_method'))}).* is .*(mend|remove)")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("generation_config.json", {"eos_token_id": [2, 50256], "pad_token_id": -1, "temperature": 1, "top_p": 0.9}),
        ("tokenizer_config.json", {"model_max_length": int(1e30)}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]}),
        ("config.json", {"quantization_config": None, "eos_token_id": 50256, "time_step_limit": [0.0, float("inf")]}),
        (
            "config.json",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0, "attention_factor": None}},
        ),
    ],
    ids=str,
)
def test_what_released_checkpoints_say_is_let_in(folder, name, more):
    say(folder, name, **more)
    loaded(folder)


def test_an_infinite_limit_of_time_steps_is_one(tiny, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 12, "n_groups": 1}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, expand=2, state_size=8))
    model.save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    loaded(tmp_path)


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
