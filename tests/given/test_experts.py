"""The experts that an engine says it chose: read, laid beside ours, replayed; what is wrong with them is named or counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
import writing_given as w

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.auditing.given import judge_given
from kvinterp.errors import InputError
from kvinterp.recording.given import GivenPath
from kvinterp.recording.readers import read_given
from kvinterp.recording.readers.own import write_given

LENGTH, COUNT, CUT = 128, 4, 12
MODEL = "zoo:moe-mini"


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load_model(MODEL, kind="native", dtype="float32")


@pytest.fixture(scope="module")
def texts(model: Any) -> list[list[int]]:
    text = [t for prompt in kv.load_prompts("natural:24") for t in model.encode(prompt.text)[1:]]
    bos = model.tokenizer.bos_token_id
    return [[bos, *text[n * LENGTH : (n + 1) * LENGTH - 1]] for n in range(COUNT)]


@pytest.fixture(scope="module")
def walked(model: Any, texts: Any) -> Callable[..., list[GivenPath]]:
    """An engine in a precision that says what it chose, with some choices forced on it in the first sequences."""

    def walk(
        dtype: str = "float32", forced: dict[tuple[int, int], list[int]] | None = None, sequences: int = 1
    ) -> list[GivenPath]:
        found = []
        for number, ids in enumerate(texts):
            mine = forced if forced and number < sequences else {}
            chosen, experts = planted.routed(model.at(getattr(torch, dtype)).model, ids, mine)
            found.append(GivenPath(str(number), tuple(ids[:64]), tuple(ids[64:]), chosen, experts=experts))
        return found

    return walk


def another(paths: list[GivenPath], position: int, layer: int) -> dict[tuple[int, int], list[int]]:
    """A choice of two experts of which neither was chosen."""
    left = [expert for expert in range(8) if expert not in paths[0].experts[position, layer]]
    return {(position, layer): left[:2]}


def read(folder: Path) -> str:
    """What a folder says in full; the terminal shortens it."""
    return " ".join(json.loads((folder / "summary.json").read_text())["reading"])


def routing(model: Any, paths: list[GivenPath], tmp_path: Path, **given: Any) -> Any:
    return kv.compare_given(model, write_given(paths, tmp_path / "experts.jsonl"), table="routing", **given)


def test_every_format_gives_the_experts_that_were_put_in(model: Any, texts: Any, walked: Any, tmp_path: Path) -> None:
    ids, rows = texts[0], w.all_log_probs(model, texts[0])
    experts = walked()[0].experts[:-1]
    records = {
        "own": w.own(ids, CUT, rows),
        "completions": w.completions(ids, CUT, rows),
        "chat": w.chat(ids, CUT, rows),
        "sglang": w.sglang(ids, CUT, rows),
        "nemo": w.nemo(ids, CUT, rows, rows),
        "prime": w.prime(ids, CUT, rows, rows),
    }
    for name, record in records.items():
        (path,) = read_given(w.lines([w.with_experts(record, name, experts)], tmp_path / f"{name}.jsonl"))
        np.testing.assert_array_equal(path.experts[:-1].reshape(experts.shape), experts, err_msg=name)
        (again,) = read_given(write_given([path], tmp_path / "again.jsonl"))
        np.testing.assert_array_equal(again.experts, path.experts, err_msg=name)
        table = kv.compare_given(model, tmp_path / f"{name}.jsonl", dtype="float32", table="routing")
        assert (len(table), int(table["changed"].sum())) == ((LENGTH - 1) * 4, 0), name


def test_the_prompts_rows_may_stand_apart(model: Any, texts: Any, walked: Any, tmp_path: Path) -> None:
    """vLLM before 0.22 gave the prompt's beside the choices; SGLang gives them from a position on."""
    ids, rows = texts[0], w.all_log_probs(model, texts[0])
    experts = walked()[0].experts[:-1]
    record = w.completions(ids, CUT, rows)
    record["prompt_routed_experts"] = experts[:CUT].tolist()
    record["choices"][0]["routed_experts"] = experts[CUT:].tolist()
    (path,) = read_given(w.lines([record], tmp_path / "a.jsonl"))
    np.testing.assert_array_equal(path.experts[:-1], experts)
    record["prompt_routed_experts"] = None
    (path,) = read_given(w.lines([record], tmp_path / "b.jsonl"))
    assert (path.experts[:CUT] == -1).all()
    np.testing.assert_array_equal(path.experts[CUT:-1], experts[CUT:])
    record = w.with_experts(w.sglang(ids, CUT, rows), "sglang", experts[5:])
    record["request"]["routed_experts_start_len"] = 5
    (path,) = read_given(w.lines([record], tmp_path / "c.jsonl"))
    np.testing.assert_array_equal(path.experts[5:-1], experts[5:].reshape(len(experts) - 5, -1))


def test_one_changed_expert_is_found_where_it_is(model: Any, walked: Any, tmp_path: Path) -> None:
    """In the layers behind it and at later positions others follow from it, so that it is the first."""
    clean = walked()
    assert not routing(model, clean, tmp_path, dtype="float32")["changed"].any()
    table = routing(model, walked(forced=another(clean, 40, 2)), tmp_path, dtype="float32")
    changed = table[table["changed"]].iloc[0]
    assert (changed["sequence"], changed["position"], changed["layer"]) == ("0", 40, 2)
    assert changed["margin_b"] < -2 * changed["difference"], "no rounding turned it"
    assert (table.loc[~table["changed"], "margin_a"] >= 0).all()


def test_the_order_in_which_an_engine_names_its_experts_says_nothing(model: Any, walked: Any, tmp_path: Path) -> None:
    paths = walked()
    for path in paths:
        path.experts = path.experts[..., ::-1].copy()
    assert not routing(model, paths, tmp_path, dtype="float32")["changed"].any()


@pytest.mark.parametrize("path", ["cached", "recompute", "cached@float64"])
def test_choices_along_a_path_are_those_of_its_rows(path: str, model: Any, walked: Any, tmp_path: Path) -> None:
    table = routing(model, walked()[:1], tmp_path, path=path)
    assert set(table["position"]) == set(range(LENGTH - 1))
    assert table["changed"].mean() < 0.01
    assert table["difference"].max() > 0


def test_what_is_no_choice_is_not_given_and_counted(model: Any, walked: Any, tmp_path: Path) -> None:
    (path, *_) = walked()
    path.experts[3] = -1
    path.experts[5, 1] = [7, 7]
    path.experts[6, 2] = [8, 1]
    (file := tmp_path / "a.jsonl").write_text("")
    write_given([path], file)
    assert len(kv.compare_given(model, file, table="routing")) == LENGTH * 4 - 4 - 2
    found = kvinterp("compare", MODEL, "--dtype", "float32", "--b", f"given({file})", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    said = "For not given stood null 4 times, a number that is no expert's 1 time, an expert twice 1 time."
    assert said in read(tmp_path / "out")
    assert (tmp_path / "out" / "routing.parquet").is_file()
    assert kv.load(tmp_path / "out") is not None


def test_experts_of_another_place_are_said_to_be_of_that_place(model: Any, walked: Any, tmp_path: Path) -> None:
    clean = walked()
    for name, change, says in (
        ("a", lambda e: np.concatenate([e[1:], e[:1]]), "they are ours of position +1"),
        ("b", lambda e: e[:, [1, 0, 2, 3]], "they are ours of layers 1, 0, 2, 3 in the place of 0, 1, 2, 3"),
    ):
        for path, own in zip(paths := walked(), clean, strict=True):
            path.experts = change(own.experts)
        file = write_given(paths, tmp_path / f"{name}.jsonl")
        found = kvinterp("compare", MODEL, "--b", f"given({file})", "--dtype", "float32", "--out", tmp_path / name)
        assert found.exit_code == 0, found.output
        assert says in read(tmp_path / name)
    file = write_given(clean, tmp_path / "c.jsonl")
    found = kvinterp("compare", MODEL, "--b", f"given({file})", "--dtype", "float32", "--out", tmp_path / "c")
    assert "they are ours" not in read(tmp_path / "c")


def test_experts_of_another_model_get_one_sentence(model: Any, walked: Any, tmp_path: Path) -> None:
    paths = walked()
    for path in paths:
        path.experts = np.concatenate([path.experts] * 3, 1)
    file = write_given(paths, tmp_path / "a.jsonl")
    says = (
        "experts of the shape 12 x 2 at each position, and zoo:moe-mini has routers in 4 of 4 layers, which choose 2 of 8"
    )
    wrong(says, "compare", MODEL, "--b", f"given({file})", "--out", tmp_path / "out")
    wrong(
        "has experts, and zoo:llama64-mini has no router", "compare", "zoo:llama64-mini", "--b", f"given({file})",
        "--out", tmp_path / "out",
    )  # fmt: skip


OWN = {"prompt": [3, 4], "tokens": [5], "logprobs": [-1.0]}


@pytest.mark.parametrize(
    ("experts", "says"),
    [(5, "cannot be read"), ("A" * 9, "cannot be read"), ("AAAA", "cannot be read"), ([], "cannot be read"),
     ([[1], [2], [3, 4]], "cannot be read"), ([[[1.5, 2]]] * 3, "cannot be read"), ([[[True, False]]] * 3, "cannot be read"),
     ([[[10**400, 1]]] * 3, "cannot be read"), ([[["a", "b"]]] * 3, "cannot be read"), ([None] * 3, "cannot be read"),
     ([[[0, 1]]] * 5, "5 positions for 2 prompt tokens and 1 more"),
     ("k05VTVBZAQB2AHsnZGVzY3InOiAnPGk0JywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDEwMDAwMDAwMDAwMDAsKSwgfQ==", "cannot")],
)  # fmt: skip
def test_experts_that_are_none_get_a_sentence(experts: Any, says: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_text(json.dumps({**OWN, "routed_experts": experts}))
    with pytest.raises(InputError, match=says):
        read_given(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clean_engine_passes_and_its_choices_are_ours_but_for_near_ties(dtype: str, model: Any, walked: Any) -> None:
    found = judge_given(model, walked(dtype), dtype)
    assert found.verdict == "rounding", str(found)
    assert "routing: " in found.reading
    assert sum(row["choices"] for row in found.given["routing"]) == COUNT * LENGTH * 4
    assert all(check.status == "passed" for check in found.checks if check.name == "routing")


@pytest.mark.parametrize(("dtype", "sequences"), [("float32", 1), ("bfloat16", COUNT)])
def test_a_choice_that_rounding_does_not_make_is_named_by_replaying_it(
    dtype: str, sequences: int, model: Any, walked: Any
) -> None:
    forced, clean = {}, walked(dtype)
    for position in range(20, 120, 7):
        forced |= another(clean, position, 2)
    found = judge_given(model, walked(dtype, forced, sequences), dtype)
    assert found.verdict == "bug", str(found)
    assert "routing, the engine's own experts replayed, reproduces it" in found.reading.splitlines()[1], str(found)
    assert dtype != "float32" or "the first at position 20, layer 2 of 0" in found.reading


@pytest.mark.parametrize("place", ["position", "layers", "none"])
def test_experts_that_did_not_make_the_log_probs_fail_though_those_are_right(place: str, model: Any, walked: Any) -> None:
    paths, drawn = walked(), np.random.default_rng(0)
    for path in paths:
        own = path.experts
        path.experts = {
            "position": np.concatenate([own[1:], own[:1]]),
            "layers": own[:, [0, 2, 1, 3]],
            "none": drawn.permuted(np.broadcast_to(np.arange(8), (*own.shape[:2], 8)), axis=-1)[..., :2],
        }[place]
    found = judge_given(model, paths, "float32")
    assert found.verdict == "misaligned", str(found)
    says = {"position": "position +1", "layers": "layers 0, 2, 1, 3", "none": "did not make the log-probs"}[place]
    assert says in found.reading.splitlines()[1]


def test_the_command_says_it_on_its_page(walked: Any, tmp_path: Path) -> None:
    file = write_given(walked("float32")[:2], tmp_path / "a.jsonl")
    found = kvinterp("audit", MODEL, "--against", file, "--dtype", "float32", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "routing: 0 of 1,024 choices of experts (0%) are others than ours." in found.stdout
    assert "choices of experts" in (tmp_path / "out" / "report.html").read_text()
