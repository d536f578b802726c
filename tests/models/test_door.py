"""The door around loading: no code of a repository runs, no random weight takes a missing one's place, and whatever is
broken is one sentence and exit code 2, for every kind."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvinterp as kv
from command_line import kvinterp
from kvinterp.errors import InputError, KvinterpError, UnsupportedError, visible
from kvinterp.models import door, finding

KINDS = ["native", "bridge", pytest.param("hooked", marks=pytest.mark.hooked)]
CASES, SAMPLE = 320, 24


@pytest.fixture(scope="session")
def whole(tmp_path_factory, tiny):
    """A tiny random Llama as transformers saves it; copied by every test that breaks something of it."""
    folder = tmp_path_factory.mktemp("door") / "whole"
    tiny("Llama").save_pretrained(folder)
    return folder


@pytest.fixture
def broken(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "broken")


def say(folder, **more):
    """Changes entries of a checkpoint's config."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return folder


def rewrite(folder, change):
    """Changes a checkpoint's tensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def refused(folder, kind, said, **more):
    with pytest.raises(KvinterpError, match=said) as caught:
        kv.load_model(folder, kind=kind, dtype="float32", device="cpu", **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Code of others ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(whole, tmp_path, monkeypatch):
    """A checkpoint whose modelling, configuration and tokenizer files write a mark when they are imported."""
    folder = shutil.copytree(whole, tmp_path / "hostile")
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    (folder / "theirs.py").write_text(
        code + "class C(LlamaConfig):\n    model_type = 'theirs'\nclass M(LlamaForCausalLM):\n    config_class = C\nT = C\n"
    )
    say(folder, model_type="theirs", auto_map={"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"})
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder, mark, asked


@pytest.mark.parametrize("kind", KINDS)
def test_no_code_of_a_checkpoint_runs_unasked(hostile, kind):
    folder, mark, asked = hostile
    assert "remote_code='trust'" in refused(folder, kind, "needs code that comes with it")
    assert not mark.exists()
    assert not asked


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "{}", "--out", "out"),
        ("compare", "{}", "--out", "out", "--kind", "bridge"),
        pytest.param(("compare", "{}", "--out", "out", "--kind", "hooked"), marks=pytest.mark.hooked),
        ("patch", "{}", "--out", "out"),
        ("decompose", "{}", "--out", "out"),
        ("audit", "{}", "--out", "out"),
        ("audit", "{}", "--random-init", "--out", "out"),
        ("kernels", "--model", "{}", "--random-init"),
        ("root-cause", "{}", "--out", "out"),
    ],
    ids=" ".join,
)
def test_no_command_runs_a_checkpoints_code_or_asks(hostile, arguments, tmp_path, monkeypatch):
    """`audit --random-init` and `compare --kind hooked` asked [y/N] on standard input."""
    folder, mark, asked = hostile
    monkeypatch.chdir(tmp_path)
    made = kvinterp(*(str(folder) if part == "{}" else part for part in arguments))
    assert (made.exit_code, mark.exists(), asked) == (2, False, []), made.output
    assert "remote_code='refuse'" in made.stderr
    assert not (tmp_path / "out").exists()


def test_code_that_is_not_needed_is_not_run(hostile):
    """An architecture that transformers has is run by transformers' own class, whatever comes with it."""
    folder, mark, asked = hostile
    say(folder, model_type="llama")
    kv.load_model(folder, kind="native", dtype="float32", device="cpu")
    assert not mark.exists()
    assert not asked


def test_a_tokenizers_code_is_not_run(hostile):
    folder, mark, asked = hostile
    say(folder, model_type="llama", auto_map={})
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.T", None]}})
    )
    with contextlib.suppress(InputError):
        kv.load_model(folder, kind="native", device="cpu")
    assert not mark.exists()
    assert not asked


@pytest.mark.hooked
@pytest.mark.parametrize("name", ["Qwen/Qwen-1_8B", "qwen-1.8b", "microsoft/phi-2", "bigcode/santacoder"])
def test_families_for_which_transformer_lens_trusts_by_itself(monkeypatch, name):
    """TransformerLens 3.9 set trust_remote_code=True for them whatever it was told, and their code ran."""
    from transformer_lens import HookedTransformer

    monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", _never)
    monkeypatch.setattr(HookedTransformer, "from_pretrained", _never)
    with pytest.raises(InputError, match=r"trust_remote_code=True.*use kind='bridge' or kind='native'"):
        kv.load_model(name, kind="hooked", remote_code="refuse", device="cpu")


@pytest.mark.hooked
def test_a_family_that_trusts_at_its_tokenizer_only(monkeypatch):
    from transformer_lens import HookedTransformer, loading_from_pretrained

    monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", _never)
    monkeypatch.setattr(door, "reach", lambda name: {})
    config = types.SimpleNamespace(trust_remote_code=True)
    monkeypatch.setattr(loading_from_pretrained, "get_pretrained_model_config", lambda *given, **named: config)
    with pytest.raises(InputError, match="trust_remote_code=True"):
        kv.load_model("microsoft/phi-1", kind="hooked", device="cpu")


def _never(*given, **named):
    raise AssertionError("it was called")


# Weights -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_missing_are_not_random_ones(broken, kind):
    """A checkpoint of other names ran over random weights with exit code 0."""
    rewrite(broken, lambda held: {f"other.{name}": tensor for name, tensor in held.items()})
    said = refused(broken, kind, "lacks weights that its config needs")
    assert "model.layers.0" in said or "model.embed_tokens" in said or "lm_head" in said


@pytest.mark.parametrize("kind", KINDS)
def test_one_weight_that_is_missing(broken, kind):
    rewrite(broken, lambda held: {n: t for n, t in held.items() if n != "model.layers.1.mlp.up_proj.weight"})
    refused(broken, kind, r"lacks weights .*model\.layers\.1\.mlp\.up_proj\.weight")


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_another_shape(broken, kind):
    rewrite(broken, lambda held: {**held, "model.norm.weight": torch.ones(25)})
    refused(broken, kind, r"model\.norm\.weight: \(25,\) where \(24,\) is expected")


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_are_not_missing(tiny, tmp_path, kind):
    tiny("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    kv.load_model(tmp_path, kind=kind, dtype="float32", device="cpu")


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_weights_that_are_not_finite(broken, kind, value, what):
    """They passed with dashes, or with the advice to use a wider dtype."""

    def spoil(held):
        held["model.layers.1.self_attn.q_proj.weight"][3, 5] = value
        return held

    said = refused(rewrite(broken, spoil), kind, rf"holds {what} in model\.layers\.1\.self_attn\.q_proj\.weight")
    assert "wider" not in said


def test_a_weight_that_only_the_dtype_cannot_hold_is_let_in(broken):
    """What runs says then that a wider dtype helps, which is true of it."""

    def enlarge(held):
        held["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
        return held

    adapter = kv.load_model(rewrite(broken, enlarge), kind="native", dtype="float16", device="cpu")
    assert any(bool(parameter.isinf().any()) for parameter in adapter.model.parameters())


# Files and configs ---------------------------------------------------------------------------------------------------

FILES = {
    "cut": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-40]),
    "empty": lambda f: (f / "model.safetensors").write_bytes(b""),
    "missing": lambda f: (f / "model.safetensors").unlink(),
    "index": lambda f: (
        (f / "model.safetensors").unlink(),
        (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
    ),
    "index outside": lambda f: (
        (f / "model.safetensors").rename(f.parent / "w.safetensors"),
        (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../w.safetensors"}}'),
    ),
    "null": lambda f: (f / "config.json").write_text("null"),
    "number": lambda f: (f / "config.json").write_text("7"),
    "nest": lambda f: (f / "config.json").write_text("[" * 100_000),
    "bytes": lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
    "tokenizer list": lambda f: (f / "tokenizer.json").write_text("[]"),
    "tokenizer broken": lambda f: (f / "tokenizer.json").write_text('{"model": 3}'),
    "ends": lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [[2]]}'),
}
CONFIGS = [
    {"num_attention_heads": 0},
    {"head_dim": 15},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": -1},
    {"hidden_size": "24"},
    {"vocab_size": 62},
    {"hidden_act": "no-such"},
    {"rope_parameters": {"rope_type": "no-such", "rope_theta": 1e4}},
    {"dtype": "float99"},
    {"eos_token_id": [[2]]},
    {"model_type": "no-such"},
    {"model_type": 3},
]


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FILES)
def test_broken_files(broken, kind, what):
    FILES[what](broken)
    refused(broken, kind, "expected|copy or download")


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", CONFIGS, ids=str)
def test_impossible_configs(broken, kind, more):
    refused(say(broken, **more), kind, "expected|mend|give|use")


def test_a_config_that_computes_nan_is_an_error_of_the_run(broken):
    """No entry is looked at by its name: what cannot be computed with shows when it is."""
    model = kv.load_model(say(broken, rms_norm_eps=float("nan")), kind="native", dtype="float32", device="cpu")
    with pytest.raises(kv.NonFiniteError, match="NaN"):
        kv.run(model, [3, 5, 7], max_new_tokens=2)


# Names and devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["~nobody-here/x", "x" * 3000, "a/" * 1500, "nobody/\0x", "", "zoo:"])
def test_names_that_are_none(name):
    with pytest.raises(InputError, match=r"expected|give|known are") as caught:
        kv.load_model(name, kind="native", device="cpu")
    assert len(str(caught.value)) < 600


def test_a_hub_that_is_not_there_is_asked_once(monkeypatch):
    """A misspelt name cost five retries and 24 seconds."""
    import huggingface_hub

    asked = []

    def away(url, **named):
        asked.append(named["timeout"])
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", away)
    with pytest.raises(InputError, match=r"cannot be found \(the hub cannot be reached: no route\)"):
        kv.load_model("nobody-here/misspelt", kind="native", device="cpu")
    assert asked == [finding.HUB_SECONDS]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("compare nobody-here/none", "model 'nobody-here/none' cannot be found"),
        ("study behaviour nobody-here/none", "model 'nobody-here/none' cannot be found"),
        ("patch ./missing", "model folder './missing' does not exist"),
        ("study behaviour zoo:nope", "unknown zoo model 'nope'"),
        ("decompose zoo:gqa2-mini --dtype fp99", "unknown dtype 'fp99'"),
        ("patch zoo:gqa2-mini --kind=nativ", "did you mean 'native'"),
        ("compare zoo:gqa2-mini --b cahced", "path 'cahced' cannot be read"),
        ("compare zoo:gqa2-mini --b cached@float61", "unknown dtype 'float61'"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_before_torch_is_imported(tmp_path, command, said):
    code = (
        "import sys; from kvinterp.cli import main\n"
        f"sys.argv = ['kvinterp', *{command.split()!r}, '--out', {str(tmp_path / 'out')!r}]\n"
        "try: main()\n"
        "except SystemExit as left: assert left.code == 2, left.code\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    given = {**os.environ, "HF_HUB_OFFLINE": "1"}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=given)
    assert made.returncode == 0, made.stderr
    assert said in made.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["meta", "cpu:3", "nonsense"])
def test_devices_that_compute_nothing(whole, device):
    with pytest.raises(InputError):
        kv.load_model(whole, kind="native", device=device)


def test_models_that_are_not_computed_with_as_they_are(tiny):
    with pytest.raises(InputError, match="meta device"):
        kv.wrap(tiny("Llama").to("meta"))
    model = tiny("Llama")
    model.model.layers[1].mlp.double()
    with pytest.raises(InputError, match="fails on two tokens"):
        kv.wrap(model)
    model = tiny("Llama")
    model.is_quantized = True
    with pytest.raises(UnsupportedError, match="is quantised"):
        kv.wrap(model)


# What reaches the terminal -------------------------------------------------------------------------------------------


def test_control_characters_are_shown_and_not_sent():
    assert visible("a\x1b[31mb\x9bc\u202ed\te\n") == "a\\x1b[31mb\\x9bc\\u202ed\te\n"
    assert str(InputError("x\x1b]0;y\x07")) == "x\\x1b]0;y\\x07"


def test_names_of_tensors_do_not_command_the_terminal(broken):
    rewrite(broken, lambda held: {f"\x1b[2J{name}": tensor for name, tensor in held.items()})
    made = kvinterp("compare", broken, "--out", broken.parent / "out")
    assert made.exit_code == 2
    assert "\x1b" not in made.output


# The generator -------------------------------------------------------------------------------------------------------


VALUES = [None, True, "", "x", "\x1b[31m", -1, 0, 1, 15, 10**9, 10**30, 0.5, -1e9, float("nan"), [], [[]], {}, {"a": [1]}]
REMEDIES = ("expected", "mend", "give", "use", "copy", "install", "save", "leave", "remove")


def spoiled(folder, seed):
    """Breaks a checkpoint in one way that the seed chooses, and says how."""
    chosen = random.Random(seed)
    file = folder / chosen.choice(
        ("config.json", "config.json", "config.json", "generation_config.json", "model.safetensors")
    )
    way = chosen.choice(("value", "value", "cut", "bytes")) if file.suffix == ".json" else chosen.choice(("cut", "bytes"))
    if way == "value":
        held = json.loads(file.read_text())
        name, value = chosen.choice(sorted(held)), chosen.choice(VALUES)
        file.write_text(json.dumps({**held, name: value}))
        return f"{file.name}: {name} = {value!r}"
    content = bytearray(file.read_bytes())
    place = chosen.randrange(len(content))
    if way == "cut":
        file.write_bytes(content[:place])
    else:
        # Eight bytes side by side, as a bad block or a bad copy leaves them.
        content[place : place + 8] = chosen.randbytes(len(content[place : place + 8]))
        file.write_bytes(content)
    return f"{file.name}: {way} at {place} of {len(content)}"


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < SAMPLE else pytest.mark.long, id=str(n)) for n in range(CASES)]
)
def test_whatever_is_broken_is_one_sentence_or_runs(broken, seed):
    """Some of these checkpoints are whole all the same (another epsilon, other weights): those must load."""
    how = spoiled(broken, seed)
    before = sorted((p.name, p.stat().st_size) for p in broken.iterdir())
    kind = ("native", "bridge")[seed % 2]
    try:
        kv.load_model(broken, kind=kind, dtype="float32", device="cpu")
    except KvinterpError as error:
        said = str(error)
        assert "\n" not in said, how
        assert "\x1b" not in said, how
        assert any(word in said for word in REMEDIES), (how, said)
    assert sorted((p.name, p.stat().st_size) for p in broken.iterdir()) == before, how


def test_a_broken_checkpoint_on_the_command_line(broken, tmp_path):
    FILES["cut"](broken)
    made = kvinterp("compare", broken, "--out", tmp_path / "out")
    assert made.exit_code == 2
    assert len([line for line in made.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert not (tmp_path / "out").exists()


def test_transformers_says_what_it_said_before(whole):
    """Quiet for as long as loading lasts, and not longer."""
    level = transformers.logging.get_verbosity()
    kv.load_model(whole, kind="native", device="cpu")
    assert transformers.logging.get_verbosity() == level
