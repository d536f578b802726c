"""What would take for ever, or all memory, is refused before it begins: long texts, large counts, steps that no model has."""

import dataclasses

import pytest

import kvinterp as kv
from command_line import wrong
from kvinterp.common.checks import MOST_LISTED
from kvinterp.common.spec import LONGEST
from kvinterp.data import load_prompts
from kvinterp.data.example import MOST, check_characters
from kvinterp.errors import InputError
from kvinterp.study.experiments.behaviour import Behaviour
from kvinterp.study.experiments.compare import Compare


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"seeds": 10**23}, "seeds=1000000.* expected at most 1,000,000"),
        ({"batch_size": 10**23}, "batch_size=1000.* expected at most"),
        ({"max_new_tokens": 10**12}, "max_new_tokens=1000.* expected at most"),
        ({"seeds": 60_000}, "60,000 seeds.* expected at most 1,000,000 in all; give fewer"),
        ({"strategies": ("greedy",) * (MOST_LISTED + 1)}, "strategies lists 1,001: expected at most 1,000; give fewer"),
        ({"kernels": "x" * 10**6}, "kernels has 1,000,000 characters: expected at most 10,000; shorten it"),
        ({"prompts": f"arithmetic:{10**12}"}, "expected a whole number from 1 to 1,000,000"),
        ({"prompts": f"arithmetic({10**6})"}, "asked for 1,000,000 problems: expected at least 1, and at most 100,000"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_counts_are_weighed_before_work(choices, said):
    with pytest.raises(InputError, match=said):
        Behaviour(**choices).check()


def test_what_is_large_and_can_be_done_is_not_refused():
    dataclasses.replace(Behaviour(), prompts="arithmetic:50", seeds=1000, batch_size=10**6).check()
    Compare(seed=2**62, strategy="top_p(0.95,0.8)", a="cached[kernels=split_k(4,float16)]").check()


def test_steps_beyond_the_context_are_refused_before_any_part_is_done(tmp_path, monkeypatch):
    """They were met in the middle: what was done before them stayed in the folder."""
    monkeypatch.chdir(tmp_path)
    for verb, option in (("compare", "max-new-tokens"), ("root-cause", "ladder-steps")):
        said = (
            f"{option.replace('-', '_')}=99999 was given, but zoo:gqa2-mini has a context of 1,024 positions: decode fewer"
        )
        wrong(said, verb, "zoo:gqa2-mini", "--prompts", "arithmetic:1", f"--{option}", "99999", "--out", "out")
    assert not list(tmp_path.iterdir())


def test_lists_of_numbers_are_read_where_they_are_short(tmp_path):
    wrong(
        "--layers has 200,000 characters", "compare", "zoo:gqa2-mini", "--layers", "0," * 10**5, "--out", tmp_path / "out"
    )


def test_files_of_many_lines_and_ids_of_many_characters(tmp_path):
    many, long = tmp_path / "many.txt", tmp_path / "long.jsonl"
    many.write_text("a\n" * 1_000_001)
    with pytest.raises(InputError, match="has 1,000,001 lines: expected at most 1,000,000; take fewer"):
        load_prompts(many)
    long.write_text('{"prompt": "a b", "id": "' + "x" * (LONGEST + 1) + '"}')
    with pytest.raises(InputError, match="the id of prompt 1 has 10,001 characters"):
        load_prompts(long)


@pytest.mark.parametrize("text", ["cached+" + "int8+" * 10**5 + "int8", "(" * 10**5, "cached[" + "chunk=1," * 10**5 + "]"])
def test_text_forms_are_read_where_they_are_short(text):
    with pytest.raises(InputError, match="expected at most 10,000; shorten it"):
        kv.path_named(text)


def test_a_million_paths_are_not_read():
    with pytest.raises(InputError, match="b lists 1,000,000: expected at most 1,000; give fewer"):
        kv.compare(kv.load_model("zoo:gqa2-mini"), [[1, 2]], b=["recompute"] * 10**6)


def test_problems_are_made_once():
    first, again = load_prompts("arithmetic:50"), load_prompts("arithmetic:50")
    assert first == again
    assert first is not again
    assert all(one.text is other.text for one, other in zip(first, again, strict=True))
    assert MOST == 100_000


def test_half_a_character_is_found_in_a_long_text():
    with pytest.raises(InputError, match=r"prompt 1 holds the lone surrogate \\udcff"):
        check_characters("x" * 10**6 + "\udcff", "prompt 1")
