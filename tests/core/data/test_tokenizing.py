"""A tokenizer and a chat template are files that somebody else wrote: what they make of a text is still the text."""

import json
import shutil

import pytest
import transformers

import kvinterp as kv
from kvinterp.data import chat, tokenizing
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
def test_a_text_that_comes_back_in_another_form(tmp_path, text):
    """What the ids say counts, not how."""
    tokenizer = made(tmp_path)
    assert tokenizing.ids_of(tokenizer, text, "m") == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("name", zoo.names())
def test_the_zoos_tokenizers_keep_a_prompt(name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo.folder(name))
    for prompt in kv.load_prompts("arithmetic:3") + kv.load_prompts("instructions:3"):
        assert tokenizing.ids_of(tokenizer, prompt.text, name) == tokenizer(prompt.text)["input_ids"]


# Chat templates --------------------------------------------------------------------------------------------------------

TURN = [{"role": "user", "content": TEXT}]
PLAIN = "{% for m in messages %}{% generation %}<{{ m.role }}>{{ m.content | trim }}{% endgeneration %}{% endfor %}"


def chatting(tmp_path, template):
    tokenizer = made(tmp_path)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template", [5, {"a": "x"}, "{{ 1 // 0 }}", "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ a.b.c }}"], ids=str
)
def test_a_template_that_fails(tmp_path, template):
    with pytest.raises(InputError, match=r"does not take these messages \(.+; roles: user\)"):
        chat.chat_tokens(chatting(tmp_path, template), TURN, "m")


def test_a_template_gives_what_transformers_gives(tmp_path):
    tokenizer = chatting(tmp_path, PLAIN)
    said = tokenizer.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True)
    assert chat.chat_tokens(tokenizer, TURN, "m") == tokenizer(said, add_special_tokens=False)["input_ids"]


def test_a_template_runs_no_code(tmp_path):
    """transformers renders in Jinja's sandbox."""
    with pytest.raises(InputError, match="does not take these messages"):
        chat.chat_tokens(chatting(tmp_path, "{{ messages.__class__.__mro__[-1].__subclasses__() }}"), TURN, "m")
