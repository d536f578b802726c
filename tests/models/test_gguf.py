"""GGUF files are models: the same bits as the folder they were made of, what they were stored as said, and bad ones one sentence."""

import os
import random
import shutil
import struct
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest
import torch
import transformers

import kvinterp as kv
from command_line import kvinterp, wrong
from gguf_files import TYPES, packed, stored_as, zoo_gguf
from kvinterp.errors import InputError, KvinterpError, UnsupportedError
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


def test_the_encoder_of_q4_k_is_as_near_as_one_of_four_bits_can_be():
    """A block's integers are within half a step of its values, a step being its range by 15 and a little for the six bits."""
    values = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    read = gguf.quants.dequantize(packed(values, gguf.GGMLQuantizationType.Q4_K), gguf.GGMLQuantizationType.Q4_K)
    blocks, errors = values.reshape(-1, 32), (read - values).reshape(-1, 32)
    steps = (blocks.max(1) - np.minimum(blocks.min(1), 0)) / 15
    # Scale and minimum are of 63 steps each, so that they are off by a 126th of the superblock's largest at most.
    assert (np.abs(errors).max(1) < 0.5 * steps + 16 * steps.max() / 126 * 2).all()
    assert np.abs(errors).mean() < 0.3 * steps.mean()


def test_every_provenance_says_what_was_stored(files):
    model = loaded(files("Q4_1"))
    said = "GGUF: 29 tensors in Q4_1, 9 in F32, dequantised when loaded"
    assert provenance(model)["stored"] == said
    assert provenance(model.at(torch.bfloat16))["stored"] == said
    both = kv.compare(model, "17+25=", max_new_tokens=2, record="", progress="none")
    assert both.provenance["stored"] == said
    assert header_of(files("F16")).stored == "GGUF: 29 tensors in F16, 9 in F32"
    assert "stored" not in provenance(loaded(f"zoo:{ZOO}"))


def test_nothing_beside_the_file_is_read(files, tmp_path):
    """A tokenizer.json in its folder was taken for the file's own, and an adapter_config.json for its weights'."""
    file = shutil.copy(files(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json", "config.json"):
        (tmp_path / name).write_text("{")
    assert loaded(tmp_path / "F32.gguf").encode(TEXTS[0]) == loaded(files()).encode(TEXTS[0])
    assert str(file).endswith("F32.gguf")


@pytest.mark.hooked
def test_transformerlens_finds_the_tokenizer_of_a_file_that_adds_no_first_token(tmp_path):
    """It makes a second tokenizer, which it looks for where the first lay."""
    file = zoo_gguf(ZOO, tmp_path / "x.gguf", add_bos=False)
    model = loaded(file, "hooked")
    assert model.encode("17") == loaded(file).encode("17")


@pytest.mark.slow
def test_a_file_is_given_wherever_a_model_is(files, tmp_path):
    out = tmp_path / "out"
    how = (
        "--prompts",
        "Tom has 3 apples",
        "--max-new-tokens",
        "2",
        "--kind",
        "native",
        "--dtype",
        "bfloat16",
        "--record",
        "",
    )
    made = kvinterp("compare", files("Q8_0"), *how, "--out", out)
    assert made.exit_code == 0, made.output
    summary = kv.load(out).provenance
    assert summary["stored"].startswith("GGUF: 29 tensors in Q8_0")
    assert summary["model"] == str(files("Q8_0"))


@pytest.mark.slow
def test_an_audit_of_a_file_passes(files, tmp_path):
    made = kvinterp("audit", files("Q8_0"), "--out", tmp_path / "out")
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("PASS")


# What cannot be one --------------------------------------------------------------------------------------------------


def changed(file, to, at, new):
    held = bytearray(file.read_bytes())
    held[at : at + len(new)] = new
    to.write_bytes(held)
    return to


@pytest.mark.parametrize("part", range(20))
def test_a_file_that_is_cut_is_one_sentence(files, tmp_path, part):
    whole = files().read_bytes()
    # Ten places within the header, ten behind.
    header = 40_000
    at = header * part // 10 if part < 10 else header + (len(whole) - header) * (part - 10) // 10
    (tmp_path / "x.gguf").write_bytes(whole[:at])
    refused(tmp_path / "x.gguf", "cut off or damaged|is no GGUF file", InputError)


@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "entries"])
@pytest.mark.parametrize("count", [2**60, 2**63, 2**20])
def test_a_count_that_the_file_has_no_room_for(files, tmp_path, at, count):
    """gguf's own reader takes each for a loop."""
    refused(changed(files(), tmp_path / "x.gguf", at, struct.pack("<Q", count)), "cut off or damaged", InputError)


def test_lists_that_fill_the_memory_are_refused(tmp_path):
    many = zoo_gguf(ZOO, tmp_path / "x.gguf", change=lambda writer: writer.add_array("x.many", [0] * 100_000))
    at = many.read_bytes().index(b"x.many") + len("x.many") + 8
    refused(changed(many, tmp_path / "y.gguf", at, struct.pack("<Q", 2**40)), "cut off or damaged", InputError)


def test_a_weight_that_lies_elsewhere_is_refused(files, tmp_path):
    """A bit of an offset gave other numbers, which loaded without a word."""
    name = b"blk.1.attn_v.weight"
    at = files().read_bytes().index(name) + len(name) + 4 + 16 + 4
    (offset,) = struct.unpack_from("<Q", files().read_bytes(), at)
    refused(changed(files(), tmp_path / "x.gguf", at, struct.pack("<Q", offset ^ 32)), "one behind the other", InputError)


def test_flipped_bits_of_a_header_end_in_a_sentence_or_a_model(files, tmp_path, request):
    """No traceback of another library, nothing that hangs, no gigabytes: and what loads runs."""
    whole, chance = files().read_bytes(), random.Random(0)
    header = whole.index(b"blk.3.ffn_up.weight")
    outcomes = []
    for number in range(FLIPS if request.config.getoption("--everything") else SAMPLE):
        # Half of them where the sizes and types are, not among the tokens.
        at = chance.randrange(700) if number % 2 else chance.randrange(header)
        flipped = changed(files(), tmp_path / "x.gguf", at, bytes([whole[at] ^ 1 << chance.randrange(8)]))
        began = time.process_time()
        try:
            model = loaded(flipped)
            outcomes.append(str(tuple(model.forward(torch.tensor([[1, 2, 3]])).shape)))
        except KvinterpError as error:
            outcomes.append(str(error))
        assert time.process_time() - began < 10, at
    said = {outcome for outcome in outcomes if not outcome.startswith("(1, 3, ")}
    assert 0 < len(said) < len(outcomes)
    assert not [each for each in said if "\n" in each]


def test_an_architecture_that_transformers_has_not(tmp_path):
    file = zoo_gguf(ZOO, tmp_path / "x.gguf", architecture="plumbus")
    assert "'plumbus'" in refused(file, "of which transformers makes no model", UnsupportedError)


def test_rotary_embeddings_that_transformers_would_not_scale(tmp_path):
    """Llama 3.1's file loaded and computed something else."""
    file = zoo_gguf(ZOO, tmp_path / "x.gguf", change=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    refused(file, "scales its rotary embeddings", UnsupportedError)


def test_a_file_without_a_tokenizer_takes_token_ids(tmp_path):
    model = loaded(zoo_gguf(ZOO, tmp_path / "x.gguf", tokenizer=None))
    assert kv.run(model, [5, 6, 7], max_new_tokens=2, stop="length").tokens
    with pytest.raises(InputError, match="no tokenizer"):
        kv.run(model, "17+25=", max_new_tokens=2)


def test_what_is_no_file(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "is no file", InputError)
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "is no file", InputError)
    refused(tmp_path / "none.gguf", "does not exist", InputError)
    (tmp_path / "empty.gguf").write_bytes(b"")
    wrong("is no GGUF file", "compare", tmp_path / "empty.gguf", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_package_that_is_missing_is_named(files, monkeypatch, package):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more))
    said = refused(files(), f"the package {package}", UnsupportedError)
    assert "pip install 'kvinterp[gguf]'" in said


@pytest.mark.slow
def test_transformers_bar_is_not_drawn(files):
    code = f"import kvinterp as kv; kv.load_model({str(files())!r}, kind='native', dtype='float32', device='cpu')"
    without = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    made = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "")
