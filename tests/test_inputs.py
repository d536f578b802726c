"""The room where arguments are checked: what is taken, and the sentence for everything else. No model runs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvinterp.common import checks
from kvinterp.data import Prompt
from kvinterp.errors import InputError
from kvinterp.models import inputs

FACTS = SimpleNamespace(name="tiny", layers=3, vocabulary=100, context=8)
MODEL = SimpleNamespace(facts=FACTS, encode=lambda text: [ord(character) - 32 for character in text], tokenizer=None)


@pytest.mark.parametrize("given", [[3, 5], (3, 5), np.array([3, 5]), torch.tensor([3, 5]), iter([3, 5]), range(3, 6, 2)])
def test_token_ids_of_every_type(given):
    assert inputs.encode(MODEL, given, 1) == [3, 5]


def test_prompts_of_every_form():
    assert inputs.listed("ab") == (["ab"], True)
    assert inputs.listed([3, 5]) == ([[3, 5]], True)
    assert inputs.listed(torch.tensor([[3, 5], [4, 6]])) == ([[3, 5], [4, 6]], False)
    prompt = Prompt("one", "ab")
    assert inputs.listed([prompt, "ab"]) == ([prompt, "ab"], False)
    assert inputs.encode_all(MODEL, [prompt, "ab", [65, 66]], 1) == [[65, 66]] * 3
    assert inputs.encode_all(MODEL, "ab", 1) == [[65, 66]]
    assert len(inputs.encode(MODEL, "a" * 8, 1)) == 8


GPT2 = SimpleNamespace(pad_token_id=9, bos_token_id=9, eos_token_id=9)
LLAMA = SimpleNamespace(pad_token_id=0, bos_token_id=1, eos_token_id=2)
UNCLEAR = "which of these belong to the text cannot be told: give the prompts as a list, each without padding."


@pytest.mark.parametrize(
    ("tokenizer", "rows", "kept"),
    [
        (LLAMA, [[1, 5, 6], [0, 1, 7]], [[1, 5, 6], [1, 7]]),
        (LLAMA, [[1, 5, 6], [1, 7, 0]], [[1, 5, 6], [1, 7]]),
        (LLAMA, [[5, 6], [0, 7]], [[5, 6], [7]]),
        (LLAMA, [[5, 0, 6], [5, 6, 7]], [[5, 0, 6], [5, 6, 7]]),
        (LLAMA, [[0, 5], [0, 7]], [[0, 5], [0, 7]]),
        (LLAMA, [[0, 5, 6], [4, 5, 0]], None),
        (LLAMA, [[0, 0, 6], [0, 5, 6]], None),
        (GPT2, [[9, 5, 6], [9, 9, 7]], [[9, 5, 6], [9, 7]]),
        (GPT2, [[5, 6], [9, 7]], None),
        (GPT2, [[9, 5, 6], [9, 7, 9]], None),
        (GPT2, [[5, 6, 9], [7, 9, 9]], [[5, 6, 9], [7, 9]]),
        (GPT2, [[5, 6, 7], [9, 9, 9]], None),
        (None, [[0, 5], [6, 7]], [[0, 5], [6, 7]]),
    ],
)
def test_padding_of_a_batch_is_no_text(tokenizer, rows, kept):
    """Pad tokens of ``to_tokens`` were run as text. Where they may be text there is no right guess, so a sentence comes instead."""
    for batch in (torch.tensor(rows), np.array(rows)):
        if kept is None:
            with pytest.raises(InputError, match=UNCLEAR):
                inputs.listed(batch, tokenizer)
        else:
            assert inputs.listed(batch, tokenizer) == (kept, False)
    assert inputs.listed(rows, tokenizer) == (rows, False), "a list is taken as it is"


@pytest.mark.parametrize(
    ("prompt", "more", "said"),
    [
        ([], 1, "prompt [] has no token: give at least one."),
        ([3, 100], 1, "token id 100 in prompt [3, 100] does not exist: tiny has 0 to 99."),
        ([0.5], 1, "prompt [0.5] was given: expected whole numbers, the ids of tokens."),
        (b"ab", 1, "prompt b'ab' was given: expected whole numbers, the ids of tokens."),
        ("arithmetic:3", 1, "prompt 'arithmetic:3' names a generator: give kv.load_prompts('arithmetic:3')"),
        ([3] * 8, 2, "has 8 tokens, and with max_new_tokens=2 that is more than the context of tiny, 8 positions"),
        ([3], 0, "max_new_tokens=0 was given: expected a whole number of at least 1."),
    ],
)
def test_prompts_that_are_none(prompt, more, said):
    with pytest.raises(InputError) as caught:
        inputs.encode(MODEL, prompt, more)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: inputs.listed(3), "prompts of type int were given: expected a text, token ids, or a list of them."),
        (lambda: inputs.listed([]), "the list of prompts is empty: give at least one."),
        (lambda: inputs.checked_continuation([999], 1, MODEL), "continuation holds token id 999: tiny has 0 to 99."),
        (lambda: inputs.chosen_layers(MODEL, [3]), "layer 3 does not exist: tiny has layers 0 to 2."),
        (lambda: inputs.chosen_layers(MODEL, "0"), "layers='0' was given: expected numbers as in (0, 2), or None for all."),
        (lambda: inputs.chosen_layers(MODEL, ()), "an empty list of layers was given: name at least one"),
        (lambda: inputs.chosen_heads([-1], 4, "KV head"), "KV head -1 does not exist: this model has KV heads 0 to 3."),
        (lambda: inputs.chosen_steps([-1]), "step -1 does not exist: steps are numbered 0, 1, 2, ..."),
        (lambda: checks.check_choice("stop", "x", ("a", "b")), "stop='x' was given: expected 'a' or 'b'."),
        (lambda: checks.check_known("site", "resid_pots", ("resid_post", "k")), "did you mean 'resid_post'? known are"),
        (
            lambda: checks.check_whole("n", 9, 2, 8, ", or None"),
            "n=9 was given: expected a whole number from 2 to 8, or None.",
        ),
        (lambda: checks.check_callable("done", 3), "done=3 was given: expected a function, or None."),
    ],
)
def test_arguments_that_are_none(call, said):
    with pytest.raises(InputError) as caught:
        call()
    assert said in str(caught.value)


def test_layers_heads_and_steps():
    assert inputs.chosen_layers(MODEL, None) == (0, 1, 2)
    assert inputs.chosen_layers(MODEL, [-1, 0, 2]) == (2, 0)
    assert inputs.chosen_layers(MODEL, 1) == (1,)
    assert inputs.chosen_heads(None, 4, "KV head") is None
    assert inputs.chosen_heads(np.array([1, 3]), 4, "KV head") == (1, 3)
    assert inputs.chosen_steps(range(2)) == (0, 1)
    assert inputs.checked_continuation(None, 5, MODEL) is None
