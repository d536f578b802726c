"""Arguments that ended in a traceback, in a run without end, or in numbers that nobody asked for: each is one sentence now."""

import json

import pytest

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.common.checks import check_number, check_seed
from kvinterp.errors import InputError
from kvinterp.paths.sampling import uniforms
from support import TINY


def test_every_seed_has_random_numbers_of_its_own():
    """The key of the generator was a float: seeds 0 and -1 to -1000 gave the same numbers, and so did those from 2**63."""
    seeds = [*range(-1000, 1000), 2**53, 2**53 + 1, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1]
    assert len({tuple(uniforms(seed, 0, 4).tolist()) for seed in seeds}) == len(seeds)
    examples = [0, 1, 2, 2**53, 2**53 + 1]
    assert len({tuple(uniforms(3, example, 4).tolist()) for example in examples}) == len(examples)


@pytest.mark.parametrize("seed", [2**63, 1.0, True, None])
def test_seeds_that_are_none(seed):
    with pytest.raises(InputError, match=r"seed=.* was given: expected a whole number from -2\*\*63"):
        check_seed(seed)


def _tiny():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(TINY["llama-gqa"]()).eval()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "zoo:gqa2-mini", "--device", "meta"), "device 'meta' holds no numbers"),
        (("compare", "~no-such-user/x"), "model folder '~no-such-user/x' does not exist"),
        (("compare", "x" * 3000), "give a transformers checkpoint folder"),
        (
            ("compare", "zoo:gqa2-mini", "--max-new-tokens", "99999"),
            "1024 positions: shorten the prompt or decode fewer tokens",
        ),
        (("compare", "zoo:gqa2-mini", "--seed", str(2**64)), "expected a whole number from -2**63 to 2**63 - 1"),
        (("compare", "zoo:gqa2-mini", "--prompts", "instructions:100000"), "the generator has only 12,283: ask for fewer"),
        (("compare", "zoo:gqa2-mini", "--a", "cached+identity(99)"), "identity takes no values"),
        (("compare", "zoo:gqa2-mini", "--a", "cached[kernels=split_k(4,float16,all,99)]"), "names layer 99: "),
        (("audit", "zoo:gqa2-mini", "--steps", "100000"), "at most 4,096 steps in all; give fewer"),
        (("audit", "zoo:gqa2-mini", "--lengths", "99999"), "expected lengths up to 32,768"),
    ],
    ids=lambda given: " ".join(given)[:50] if isinstance(given, tuple) else None,
)
def test_what_ran_until_it_was_killed_or_ended_in_a_traceback(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    wrong(said, *arguments, "--out", "out")
    assert not list(tmp_path.iterdir())


def test_what_nothing_would_read_is_refused():
    model = kv.wrap(_tiny())
    quick = {"max_new_tokens": 2, "progress": "none"}
    compared = kv.compare(model, [[1, 2, 3]], record="", **quick)
    bench = kv.PatchBench(model, 2)
    unread = "was given, and nothing reads it"
    cases = {
        r"answers=\(1, 2\) " + unread: lambda: kv.sweep(model, [1, 2, 3], answers=(1, 2), **quick),
        r"block=3 " + unread: lambda: kv.sweep(model, [1, 2, 3], block=3, **quick),
        r"answers=\(1, 2\) " + unread + ": distance": lambda: kv.activation_patching(
            model, [1, 2], [1, 3], answers=(1, 2), progress="none"
        ),
        r"block=2 " + unread: lambda: kv.activation_patching(model, [1, 2], [1, 3], "z", "heads", block=2, progress="none"),
        r"example=\{1\} " + unread: lambda: kv.attention_comparison(model, [1, 2, 3], step=1, example={1}),
        "a='recompute' " + unread: lambda: kv.attention_comparison(compared, step=1, a="recompute"),
        "cells=8 " + unread: lambda: kv.attention_comparison(model, [1, 2, 3], step=1, cells=8, positions=(0, 2)),
        "tokenizer=3 was given: expected a tokenizer": lambda: kv.wrap(model.model, tokenizer=3),
        "tokenizer=3 " + unread: lambda: kv.wrap(model, tokenizer=3),
        "name='other' " + unread: lambda: kv.wrap(model, name="other"),
        "other=.* " + unread: lambda: bench.ask([1, 2, 3], other=[1, 2, 4]),
        "kind='bridge' " + unread: lambda: kv.patch_panel(model, kind="bridge"),
        "unknown kernel mode 'nope'": lambda: kv.patch_panel(model, kernels="nope"),
        "progress=<class 'type'> was given|progress=.* was given": lambda: kv.experiment("compare", progress=type),
        "unknown way to treat an existing result": lambda: kv.experiment("compare", existing="no", progress="none"),
        "existing='use' " + unread: lambda: kv.experiment("compare", existing="use", progress="none"),
    }
    for said, call in cases.items():
        with pytest.raises(InputError, match=said):
            call()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, True, "1", None, 1j])
def test_numbers_that_are_none(value):
    with pytest.raises(InputError, match="expected a finite number"):
        check_number("units", value)


def test_an_error_is_one_line_whatever_was_given():
    said = str(InputError(f"name {'x' * 50_000!r}\n  was given: expected\n another."))
    assert "\n" not in said
    assert len(said) < 2_100
    assert said.endswith("another.")


def test_a_sentence_on_the_command_line_has_no_control_characters(tmp_path, monkeypatch):
    """Names of models, prompts' ids and folders reached the terminal as they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "\x1b]0;owned\x07", "prompt": "2 + 2 ="}))
    made = kvinterp(
        *["compare", "zoo:gqa2-mini", "--out", "\x1b[31mout", "--record"],
        "",
        *["--prompts", "p.jsonl", "--max-new-tokens", "2"],
    )
    assert made.exit_code == 0, made.output
    assert "\x1b" not in made.output
    assert "\x07" not in made.output
    assert "\\x1b[31mout" in made.output
