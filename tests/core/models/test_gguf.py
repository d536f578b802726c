"""GGUF files are models: the same bits as the folder they were made of, what they were stored as said, and bad ones one sentence."""

import time

import gguf
import numpy as np
import pytest
import torch
import transformers

import kvinterp as kv
from gguf_files import TYPES, packed, stored_as, zoo_gguf
from kvinterp.errors import InputError, KvinterpError
from kvinterp.models import zoo
from kvinterp.models.gguf_file import header_of
from kvinterp.models.provenance import provenance

ZOO = "llama64-mini"
KINDS = ["native", "bridge", pytest.param("hooked", marks=pytest.mark.hooked)]
TEXTS = ("Tom has 3 apples. 17+25=", "don't\n\n  é 中", "<eos> x")
FLIPS, SAMPLE = 200, 24


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Gives the zoo model's file in a type; each is written once a session."""
    root = tmp_path_factory.mktemp("gguf")

    def get(kind="F32"):
        file = root / f"{kind}.gguf"
        return file if file.exists() else zoo_gguf(ZOO, file, kind)

    return get


def loaded(file, kind="native", dtype="float32"):
    return kv.load_model(file, kind=kind, dtype=dtype, device="cpu")


def refused(file, said, error=KvinterpError):
    began = time.process_time()
    with pytest.raises(error, match=said) as caught:
        loaded(file)
    assert "\n" not in str(caught.value)
    assert time.process_time() - began < 10
    return str(caught.value)


# The same model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_is_read_once_a_load(files, monkeypatch, kind):
    """transformers asks for it three times; a load later it is read anew, and the package is left as it was."""
    read, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: read.append(path) or reader(path))
    ours = gguf.GGUFReader
    loaded(files("F16"), kind)
    first = len(read)
    loaded(files("F16"), kind)
    assert (first, len(read)) == (1, 2)
    assert gguf.GGUFReader is ours


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_float32_is_the_model_it_was_made_of(files, kind):
    """llama.cpp turns the rows of queries and keys for its RoPE; turned back wrongly, the model computes something else."""
    folder, file = loaded(f"zoo:{ZOO}", kind), loaded(files(), kind)
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(folder.forward(tokens), file.forward(tokens))
    assert [folder.encode(text) for text in TEXTS] == [file.encode(text) for text in TEXTS]
    assert folder.fingerprint() == file.fingerprint()
    assert file.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "user: x\n"


@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_those_that_the_format_stores(files, kind):
    model, rows = (
        loaded(files(kind)).model,
        transformers.AutoModelForCausalLM.from_pretrained(zoo.folder(ZOO), dtype="float32"),
    )
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
    ):
        values = rows.get_parameter(name).detach().numpy()
        stored = stored_as(values, kind)
        wanted = gguf.quants.dequantize(packed(values, stored), stored)
        assert np.array_equal(model.get_parameter(name).detach().numpy(), wanted), name


def test_every_provenance_says_what_was_stored(files):
    model = loaded(files("Q4_1"))
    said = "GGUF: 29 tensors in Q4_1, 9 in F32, dequantised when loaded"
    assert provenance(model)["stored"] == said
    assert provenance(model.at(torch.bfloat16))["stored"] == said
    both = kv.compare(model, "17+25=", max_new_tokens=2, record="", progress="none")
    assert both.provenance["stored"] == said
    assert header_of(files("F16")).stored == "GGUF: 29 tensors in F16, 9 in F32"
    assert "stored" not in provenance(loaded(f"zoo:{ZOO}"))


@pytest.mark.hooked
def test_transformerlens_finds_the_tokenizer_of_a_file_that_adds_no_first_token(tmp_path):
    """It makes a second tokenizer, which it looks for where the first lay."""
    file = zoo_gguf(ZOO, tmp_path / "x.gguf", add_bos=False)
    model = loaded(file, "hooked")
    assert model.encode("17") == loaded(file).encode("17")


# What cannot be one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(20))
def test_a_file_that_is_cut_is_one_sentence(files, tmp_path, part):
    whole = files().read_bytes()
    # Ten places within the header, ten behind.
    header = 40_000
    at = header * part // 10 if part < 10 else header + (len(whole) - header) * (part - 10) // 10
    (tmp_path / "x.gguf").write_bytes(whole[:at])
    refused(tmp_path / "x.gguf", "cut off or damaged|is no GGUF file", InputError)


def test_a_file_without_a_tokenizer_takes_token_ids(tmp_path):
    model = loaded(zoo_gguf(ZOO, tmp_path / "x.gguf", tokenizer=None))
    assert kv.run(model, [5, 6, 7], max_new_tokens=2, stop="length").tokens
    with pytest.raises(InputError, match="no tokenizer"):
        kv.run(model, "17+25=", max_new_tokens=2)
