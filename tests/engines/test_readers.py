"""What engines write is read to the very numbers that were put in; what stands for "none" is counted; bad files get a sentence."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import writing_given as w

import kvinterp as kv
from kvinterp.engines.readers import READERS, read_engine
from kvinterp.errors import InputError

CUT = 12


@pytest.fixture(scope="module")
def sample() -> tuple[Any, list[int], np.ndarray]:
    adapter = kv.load_model("zoo:llama64-mini", kind="native", dtype="float32")
    ids = adapter.encode(" ".join(kv.load_prompts("natural:3")[n].text for n in range(2)))[:60]
    return adapter, ids, w.all_log_probs(adapter, ids)


def chosen(ids: list[int], rows: np.ndarray) -> np.ndarray:
    return np.array([np.nan, *(rows[at - 1][ids[at]] for at in range(1, len(ids)))])


def test_every_format_gives_the_numbers_that_were_put_in(sample: Any, tmp_path: Path) -> None:
    _, ids, rows = sample
    want, tail = chosen(ids, rows), chosen(ids, rows)
    tail[:CUT] = np.nan
    masked = tail.copy()
    masked[CUT + 3] = np.nan
    cases = {
        "own": (w.own(ids, CUT, rows), want),
        "completions": (w.completions(ids, CUT, rows, infinite=False), want),
        "chat": (w.chat(ids, CUT, rows), tail),
        "sglang": (w.sglang(ids, CUT, rows), want),
        "nemo": (w.nemo(ids, CUT, rows, rows), tail),
        "prime": (w.prime(ids, CUT, rows, rows), tail),
        "trl": (w.trl(ids, CUT, rows), tail),
        "verl": (w.verl(ids, CUT, rows, rows), masked),
        "llama_server": (w.llama_positions(ids, rows), None),
    }
    assert set(cases) == set(READERS)
    for name, (record, values) in cases.items():
        file = w.lines(record if isinstance(record, list) else [record], tmp_path / f"{name}.jsonl")
        for named in (None, name):
            path, *others = read_engine(file, named)
            assert len(others) == (name == "trl")
            if values is not None:
                assert path.ids == tuple(ids), name
                np.testing.assert_array_equal(path.chosen, values, err_msg=name)
            else:
                assert path.prompt == tuple(ids[:-1])
                np.testing.assert_array_equal(path.chosen[:-1], want[:-1])


def test_our_own_form_goes_round(sample: Any, tmp_path: Path) -> None:
    _, ids, rows = sample
    (path,) = read_engine(w.lines([w.completions(ids, CUT, rows, infinite=False)], tmp_path / "a.jsonl"))
    path.trainer = chosen(ids, rows)
    path.trainer[:CUT] = np.nan
    (again,) = read_engine(w.write_given([path], tmp_path / "b.jsonl"))
    np.testing.assert_array_equal(again.chosen, path.chosen)
    np.testing.assert_array_equal(again.trainer, path.trainer)
    assert again.top.keys() == path.top.keys()
    np.testing.assert_array_equal(again.top[20][1], path.top[20][1])


def test_a_kl_base_goes_round_to_half_a_step_and_the_bos_is_put_back(sample: Any, tmp_path: Path) -> None:
    _, ids, rows = sample
    ids = ids[:40]
    file = w.write_kl_base([[7, *ids[1:]]], [rows[20:39]], tmp_path / "base")
    (path,) = read_engine(file, bos=ids[0])
    assert path.ids == tuple(ids)
    assert np.isnan(path.chosen[:21]).all()
    given = np.isfinite(path.chosen)
    assert given[21:].sum() + path.missing["clamped"] == 19
    assert np.abs(path.chosen - chosen(ids, rows[:40]))[given].max() <= 16 / 65535 / 2 + 1e-6
    # Writing what was read changes no bit: the grid is the file's own.
    again = w.write_kl_base([ids], [np.stack([path.top[at][1] for at in range(21, 40)])], tmp_path / "again")
    np.testing.assert_allclose(read_engine(again)[0].chosen, path.chosen, atol=1.3e-4)


def test_what_stands_for_none_is_not_given_and_counted(sample: Any, tmp_path: Path) -> None:
    _, ids, rows = sample
    record = w.completions(ids, CUT, rows)
    (path,) = read_engine(w.lines([record], tmp_path / "a.jsonl"))
    assert np.isnan(path.chosen[CUT])
    assert path.missing["-9999"] == 2
    record = w.nemo(ids, CUT, rows, rows)
    record["generation_logprobs"][CUT + 3] = 0.0
    (path,) = read_engine(w.lines([record], tmp_path / "b.jsonl"))
    assert path.chosen[CUT + 3] == 0, "of a model that is certain it is a log-prob, which the judge can tell"
    assert path.zeros == "doubtful"
    assert not path.missing, "what the mask leaves out is nothing that the file lacks"
    (path,) = read_engine(w.lines(w.llama_positions(ids, rows), tmp_path / "c.jsonl"))
    assert path.missing["float lowest"] > 0
    assert np.isfinite(path.chosen[1:-1]).all()


def test_texts_become_ids_only_where_one_token_has_them(sample: Any, tmp_path: Path) -> None:
    adapter, ids, rows = sample
    # Behind it stands a part of a character, whose text others have too.
    ids = ids[: CUT + 40]
    texts = adapter.pieces(range(adapter.facts.vocabulary))
    once = {text: n for n, text in enumerate(texts) if texts.count(text) == 1}
    file = w.lines([w.chat(ids, CUT, rows, texts)], tmp_path / "a.jsonl")
    (path,) = read_engine(file, token=once.get)
    np.testing.assert_array_equal(path.chosen[CUT:], chosen(ids, rows)[CUT:])
    with pytest.raises(InputError, match="return_token_ids"):
        read_engine(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"<html>busy</html>", "is not JSON"),
        (b'{"error": "overloaded"}', "no format that is known"),
        (pickle.dumps({"a": 1}), "pickle"),
        (b'{"prompt": [1], "tokens": [2.5], "logprobs": [0]}', "token ids"),
        (b'{"prompt": [1], "tokens": [2, 3], "logprobs": [-1]}', "expected one for each"),
        (b'{"token_ids": [], "generation_logprobs": []}', "has no token"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1, -2]}', "2 logprobs for 1 tokens"),
        (
            b'{"prompt_ids": [[1], [1]], "completion_ids": [[2]], "logprobs": [[-1]]}',
            "2 rows of 'prompt_ids' for 1 replies",
        ),
        (b'{"prompt_ids": [1], "completion_ids": [2], "logprobs": [[-1, -2]]}', "keep these beside them"),
        (b'{"prompts": [1], "responses": [2], "rollout_log_probs": [-1], "attention_mask": [1]}', "mask and all"),
        (b'{"answer": "yes"}', "The simplest is a line for each text"),
    ],
)
def test_a_bad_file_gets_a_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_engine(file)


CONVERTERS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "engines.md").read_text("utf-8"), re.DOTALL
)


@pytest.mark.parametrize("name", ["slime", "verl"])
def test_the_converters_of_the_docs_give_our_own_form(
    name: str, sample: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, on what verl and slime write: padding left of the prompt, right of the reply, a token that is masked."""
    _, ids, rows = sample
    want, end = chosen(ids, rows), len(ids) - CUT
    want[:CUT] = np.nan
    monkeypatch.chdir(tmp_path)
    code = next(code for code in CONVERTERS if {"slime": "torch.load", "verl": "old_log_probs"}[name] in code)
    made = {"tokens": ids, "response_length": end, "rollout_log_probs": want[CUT:].tolist()}
    torch.save({"samples": [made]}, "dump.pt")
    if name == "verl":
        want[CUT + 3] = np.nan
    pad, kept = [0] * 3, [int(at != 3) for at in range(end)]
    side = [*chosen(ids, rows)[CUT:].tolist(), *[0.0] * 3]
    batch = {
        "prompts": [[*pad, *ids[:CUT]]],
        "responses": [[*ids[CUT:], *pad]],
        "attention_mask": [[*pad, *[1] * len(ids), *pad]],
        "response_mask": [[*kept, *pad]],
        "rollout_log_probs": [side],
        "old_log_probs": [side],
    }
    exec(
        code,
        {"batch": {each: torch.tensor(row, dtype=torch.float64 if "log" in each else None) for each, row in batch.items()}},
    )
    (path,) = read_engine("rollouts.jsonl")
    assert path.ids == tuple(ids)
    np.testing.assert_array_equal(path.chosen, want)
    assert (path.trainer is None) == (name == "slime")
