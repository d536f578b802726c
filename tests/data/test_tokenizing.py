"""A tokenizer and a chat template are files that somebody else wrote: what they make of a text is bounded, and still the text."""

import json
import shutil
import subprocess

import pytest
import transformers

import kvinterp as kv
from kvinterp.data import chat, rendering, tokenizing
from kvinterp.errors import InputError
from kvinterp.models import zoo

TEXT = "Tom has 5 apples and buys 7 more. aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"


def made(tmp_path, **more):
    """The zoo's tokenizer with parts of its file replaced."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(zoo.folder("llama-mini") / name, folder / name)
    held = json.loads((folder / "tokenizer.json").read_text())
    held["model"] |= more.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps({**held, **more}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def replacing(pattern, content, kind="Regex"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


# Tokenizers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": {"vocab": {}, "merges": []}}, "makes 1 tokens of the text 'Tom has 5.*they say '<bos>'"),
        ({"normalizer": replacing(".", "")}, "makes 1 tokens of the text"),
        ({"normalizer": replacing("[a-z ]", "")}, "they say '<bos>T57.!'"),
        ({"normalizer": replacing(".", "x")}, "they say '<bos>xxxxx"),
    ],
    ids=["empty", "nothing", "capitals", "x"],
)
def test_a_tokenizer_that_drops_the_text(tmp_path, more, said):
    """25 tokens became 2, and the comparison said that nothing differs."""
    with pytest.raises(InputError, match=said):
        tokenizing.ids_of(made(tmp_path, **more), TEXT, "m")


@pytest.mark.parametrize("text", ["Tom has 5 apples.", "ünï 日本 😀 {}", "  \n", "?!", "x"])
@pytest.mark.parametrize("decoder", [{}, {"decoder": None}], ids=["whole", "no decoder"])
def test_a_text_that_comes_back_in_another_form(tmp_path, text, decoder):
    """What the ids say counts, not how: without a decoder the tokens spell bytes."""
    tokenizer = made(tmp_path, **decoder)
    assert tokenizing.ids_of(tokenizer, text, "m") == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("name", zoo.names())
def test_the_zoos_tokenizers_keep_a_prompt(name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo.folder(name))
    for prompt in kv.load_prompts("arithmetic:3") + kv.load_prompts("instructions:3"):
        assert tokenizing.ids_of(tokenizer, prompt.text, name) == tokenizer(prompt.text)["input_ids"]


def test_case_accents_and_order_do_not_count():
    assert tokenizing.kept_of("Ünï Code", "code uni") == 1
    assert tokenizing.kept_of("abcd", "ab") == 0.5
    assert tokenizing.kept_of(" \n", "") == 1


def test_a_regex_that_explodes(tmp_path):
    """A panic in Rust is no Exception: it left as a traceback."""
    tokenizer = made(tmp_path, normalizer=replacing("(?:(a|aa)+)+$", "x"))
    with pytest.raises(InputError, match=r"cannot take the text 'Tom has.*(PanicException|TimeoutError)"):
        tokenizing.ids_of(tokenizer, TEXT, "m")


def test_a_tokenizer_without_an_end_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "SECONDS", 0.05)
    grows = {"type": "Sequence", "normalizers": [replacing("a", "a" * 1000, "String")] * 2}
    with pytest.raises(InputError, match="it did not answer within"):
        tokenizing.ids_of(made(tmp_path, normalizer=grows), "a a a", "m")


def test_every_text_goes_through_that_door(tmp_path):
    model = kv.load_model("zoo:gqa2-mini", kind="native", device="cpu")
    deaf = kv.wrap(model.model, made(tmp_path, normalizer=replacing(".", "")))
    with pytest.raises(InputError, match="expected ids that say the text"):
        kv.compare(deaf, [TEXT], max_new_tokens=2)


# Chat templates --------------------------------------------------------------------------------------------------------

TURN = [{"role": "user", "content": TEXT}]
PLAIN = "{% for m in messages %}{% generation %}<{{ m.role }}>{{ m.content | trim }}{% endgeneration %}{% endfor %}"


def chatting(tmp_path, template):
    tokenizer = made(tmp_path)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", marks=pytest.mark.slow
        ),
        "{{ 'x' * 10 ** 9 }}",
        pytest.param("{{ 7 ** (10 ** 9) }}", marks=pytest.mark.slow),
        pytest.param("{{ '%01000000000d' % 1 }}", marks=pytest.mark.slow),
        pytest.param(
            "{% set n = namespace(x='xxxx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["loops", "product", "power", "padding", "doubling"],
)
def test_a_template_without_bounds(tmp_path, template):
    with pytest.raises(InputError, match="takes more than 2 seconds of processor time, or more memory"):
        chat.chat_tokens(chatting(tmp_path, template), TURN, "m")


@pytest.mark.parametrize(
    "template", [5, {"a": "x"}, "{{ 1 // 0 }}", "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ a.b.c }}"], ids=str
)
def test_a_template_that_fails(tmp_path, template):
    with pytest.raises(InputError, match=r"does not take these messages \(.+; roles: user\)"):
        chat.chat_tokens(chatting(tmp_path, template), TURN, "m")


def test_a_template_that_leaves_out_what_it_is_given(tmp_path):
    with pytest.raises(InputError, match="leaves out what it is given"):
        chat.chat_tokens(chatting(tmp_path, "hello"), TURN, "m")


def test_a_template_is_tried_once(tmp_path, monkeypatch):
    """In a process of its own, whose program renders what transformers renders; what it makes is transformers' own."""
    tokenizer, asked = chatting(tmp_path, PLAIN), []
    run = subprocess.run
    monkeypatch.setattr(chat, "_known", set())
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: asked.append(given) or run(*given, **named))
    said = tokenizer.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True)
    for _ in range(3):
        assert chat.chat_tokens(tokenizer, TURN, "m") == tokenizer(said, add_special_tokens=False)["input_ids"]
    assert len(asked) == 1
    assert rendering.rendered(PLAIN, {"messages": TURN}) == said
