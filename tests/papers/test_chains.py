"""The telephone game: chains against plain calls of run(), cycles and attractors that are known, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.common.result import Result
from kvinterp.findings import findings_of, lines_of
from kvinterp.models import Adapter
from kvinterp.papers.behaviour.chains import CHAIN, attractors_of, curves_of, cycles_of, deltas_of, played, tokens_of
from kvinterp.papers.studies.chain import Chain
from support import Case

TEXT = "Max met Omar in Rome. Paul owns 12 pens."
TEMPLATE = "Text: {text}\nIn other words:"
Load = Callable[..., Adapter]


@pytest.fixture
def small(load: Load) -> Adapter:
    return load(Case("zoo:gqa2-mini", "native"), "float16")


def table(
    texts: dict[tuple[str, int], list[str]], similarity: dict[tuple[str, int], list[float]] | None = None
) -> pd.DataFrame:
    """Chains by arm and seed, of one model, temperature and text."""
    rows = []
    for (arm, seed), said in texts.items():
        for hop, text in enumerate(said):
            near = 1.0 if similarity is None else similarity[arm, seed][hop]
            named = dict(zip(CHAIN, ("m", arm, 0.7, 0, seed), strict=True))
            rows.append({**named, "hop": hop, "said": text, "words": len(text.split()), "similarity": near, "facts": 1.0})
    return pd.DataFrame(rows)


# Playing -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["cached", "cached+int4"])
def test_a_greedy_chain_is_that_of_plain_calls(small: Adapter, path: str) -> None:
    """What comes again is copied: the copy is what computing it gives."""
    ask = tokens_of(small, TEMPLATE, "none", None)
    ((first, *said),) = played(small, path, TEXT, 0, [0], 3, ask, temperature=0, max_new_tokens=12)
    assert first == TEXT
    text = TEXT
    for each in said:
        trace = kv.run(small, TEMPLATE.replace("{text}", text), path, max_new_tokens=12)
        text = small.tokenizer.decode(trace.tokens, skip_special_tokens=True).strip()
        assert each == text


def test_a_fixed_point_is_not_computed_again(small: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvinterp.papers.behaviour import chains

    calls = []

    def writes(adapter: Any, path: Any, prompts: list[Any], most: int, **how: Any) -> Any:
        calls.append(prompts)
        return [type("W", (), {"text": {"a": "b", "b": "c", "c": "b"}[prompt]})() for prompt in prompts]

    monkeypatch.setattr(chains, "write", writes)
    (cold,) = played(small, "cached", "a", 0, [0], 6, lambda text: text, temperature=0)
    assert cold == ["a", "b", "c", "b", "c", "b", "c"]
    assert [asked for asked in calls if asked] == [["a"], ["b"], ["c"]]
    calls.clear()
    # Where numbers are drawn, a text that comes again may go on otherwise.
    played(small, "cached", "a", 0, [0], 6, lambda text: text, temperature=0.7)
    assert len(calls) == 6


def test_every_seed_has_its_own_chain_whatever_runs_beside_it(small: Adapter) -> None:
    ask = tokens_of(small, TEMPLATE, "none", None)
    how: dict[str, Any] = {"temperature": 3.0, "max_new_tokens": 6}
    several = played(small, "cached", TEXT, 1, [4, 5], 2, ask, **how)
    assert several[0] != several[1]
    assert played(small, "cached", TEXT, 1, [5], 2, ask, **how)[0] == several[1]
    assert played(small, "cached", TEXT, 2, [5], 2, ask, **how)[0] != several[1]


# What texts are worth ------------------------------------------------------------------------------------------------------


# What chains come to -------------------------------------------------------------------------------------------------------


def test_an_attractor_is_found_where_it_was_put() -> None:
    """Each hop goes 0.4 of the way to 20 words: 0.4 is the strength, and 20 the position."""
    lengths, words = 4.0, []
    for _ in range(12):
        words.append(lengths)
        lengths += 0.4 * (20 - lengths)
    chains = table({("cached", 0): ["x"] * 12}).assign(words=words)
    row = attractors_of(chains).query("of == 'words'").iloc[0]
    assert (row["position"], row["strength"]) == pytest.approx((20, 0.4))
    assert np.isnan(attractors_of(chains).query("of == 'similarity'").iloc[0]["strength"])


def test_arms_are_compared_chain_by_chain() -> None:
    texts = {(arm, seed): ["a", f"{arm}{seed}"] for arm in ("cached", "bad") for seed in (0, 1, 2)}
    texts["bad", 2] = texts["cached", 2]
    texts |= {("cached, other seeds", seed): ["a", "z"] for seed in (3, 4, 5)}
    near = {place: [1.0, 0.8] for place in texts} | {("bad", 0): [1.0, 0.3], ("bad", 1): [1.0, 0.9]}
    chains = table(texts, near)
    deltas = deltas_of(chains, "cached")
    by = deltas.set_index("arm")
    assert by.loc["bad", "delta"] == pytest.approx((0.3 + 0.9 + 0.8) / 3 - 0.8)
    assert by.loc["bad", ["better", "worse", "same_text", "halved", "half_life"]].tolist() == [1, 1, 1, 1, 1]
    assert by.loc["cached, other seeds", ["delta", "chains", "same_text"]].tolist() == [0, 3, 0]
    assert by.loc["cached", "same_text"] == 3
    curve = curves_of(chains).query("arm == 'bad' and hop == 1").iloc[0]
    assert np.isnan(curve["similarity_low"]), "chains of one text say nothing of 95%"
    many = pd.concat([chains.assign(text=chains["text"] + 10 * turn) for turn in range(6)]).assign(
        similarity=lambda rows: rows["similarity"] + rows["text"] / 1000
    )
    curve = curves_of(many).query("arm == 'bad' and hop == 1").iloc[0]
    assert curve["similarity_low"] <= curve["similarity"] <= curve["similarity_high"]
    empty = {"cycles": cycles_of(chains), "attractors": attractors_of(chains)}
    outcome = Result({"chains": chains, "curves": curves_of(chains), "deltas": deltas, **empty}, {})
    outcome.summary = {"hops": 1, "embedder": "counts"}
    (said,) = Chain().headline(outcome)
    assert "bad changes the last similarity to the first text most, by -0.133 on m at temperature" in said
    assert ", where other seeds alone change it by 0 (" in said
    assert "word counts, which knows no synonyms" in said
    found = " ".join(lines_of(findings_of(Chain().rows(outcome))))
    assert "1 better, 1 worse, 1 with the same last text, of 3." in found
    assert "the null: only the seeds differ" in found
    outcome.tables["deltas"] = deltas.assign(same_text=deltas["chains"])
    assert "every last text is the same, to the letter" in " ".join(lines_of(findings_of(Chain().rows(outcome))))
    assert Chain().headline(outcome)[0].startswith("No policy changes a last text, to the letter")


# The experiment -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_plays_every_arm_and_draws(tmp_path: Path) -> None:
    asked = Chain(
        ("zoo:gqa2-mini",),
        ("int4",),
        texts="restate:1",
        hops=1,
        seeds=2,
        max_new_tokens=8,
        temperatures="0.7,0",
        device="cpu",
    )
    assert Chain(policies=("int4",), on="v", prefill="stored").arms()["int4(on=v)"] == "cached[prefill=stored]+int4(on=v)"
    outcome = asked.run(tmp_path / "out", progress="none", figures="png")
    chains = outcome.tables["chains"]
    assert list(asked.arms()) == ["cached", "cached, other seeds", "int4", "int4(on=k)", "int4(on=v)"]
    counts = chains[chains["hop"] == 1].groupby(["arm", "temperature"]).size()
    assert counts[:, 0.7].tolist() == [2] * 5
    assert counts[:, 0.0].tolist() == [1] * 4
    assert chains.loc[chains["arm"] == "cached, other seeds", "seed"].unique().tolist() == [2, 3]
    first = chains[chains["hop"] == 0]
    assert first["similarity"].tolist() == pytest.approx([1] * len(first))
    assert (first["facts"] == 1).all()
    for name in ("curves", "deltas", "map"):
        assert (tmp_path / "out" / "figures" / f"chain_{name}.png").is_file()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "cosine of word counts" in page
    assert chains["said"].iloc[0] in page
